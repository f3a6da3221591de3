//! What a store does when transfers fail, hang or come in another order than expected.
#![allow(unsafe_code, reason = "makes requests")]

mod parts;

use super::gate::Charge;
use crate::{
    Completion, DropReason, Error, EventKind, FarOptions, FarPolicy, Item, KeepAlive, Key, Namespace,
    NamespaceDescription, NamespaceOptions, Notify, Piece, Priority, Request, Status, Store, StoreOptions,
    Ticket, io::Direction,
};
use hoistway_io::parallel::lock;
use parts::{OneThread, Shared, Slots};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// Longer than anything takes that is going to happen at all.
const LONG: Option<Duration> = Some(Duration::from_secs(60));
const SHARD: usize = 5000;

struct Bench {
    store: Store,
    namespace: Namespace,
    layout: Arc<Slots>,
    transfers: Arc<Shared>,
    _root: tempfile::TempDir,
}

fn bench(change: impl FnOnce(&mut StoreOptions)) -> Bench {
    bench_of(false, change)
}

/// `find_waits`: whether finding blocks is said to wait for the disk.
fn bench_of(find_waits: bool, change: impl FnOnce(&mut StoreOptions)) -> Bench {
    let root = tempfile::tempdir().unwrap();
    let mut options = StoreOptions::new(root.path());
    change(&mut options);
    let layout = Arc::new(Slots::new(root.path(), 4, find_waits));
    let transfers = OneThread::start();
    let shared = transfers.shared();
    let store = Store::with_parts(options, layout.clone(), Arc::new(transfers)).unwrap();
    let namespace = store.namespace(&NamespaceDescription::default(), NamespaceOptions::default()).unwrap();
    Bench { store, namespace, layout, transfers: shared, _root: root }
}

fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(31) ^ seed.wrapping_mul(197) ^ (at >> 8)) as u8).collect()
}

fn item(key: &str, shard: u32, memory: &Arc<Vec<u8>>) -> Item {
    let (head, tail) = memory.split_at(memory.len() / 3);
    let pieces = [head, tail].map(|piece| Piece::host(piece.as_ptr(), piece.len())).into();
    Item { key: Key::new(key.as_bytes()).unwrap(), shard, pieces }
}

fn request(items: Vec<Item>, memory: &Arc<Vec<u8>>, shards: u32) -> Request {
    let mut request = Request::new(items, KeepAlive::new(memory.clone()));
    request.shards = shards;
    request
}

impl Bench {
    fn store_shard(&self, key: &str, shard: u32, shards: u32) -> (Ticket, Arc<Vec<u8>>) {
        let memory = Arc::new(bytes(shard as usize, SHARD));
        // SAFETY: the request keeps the memory.
        let ticket =
            unsafe { self.namespace.store(request(vec![item(key, shard, &memory)], &memory, shards)) };
        (ticket.unwrap(), memory)
    }

    fn put(&self, key: &str) {
        assert_eq!(end(&self.store_shard(key, 0, 1).0).items, [Status::Ok]);
    }

    fn load(&self, key: &str, shard: u32, len: usize) -> (Ticket, Arc<Vec<u8>>) {
        self.load_with(key, shard, len, |_| {})
    }

    fn load_with(
        &self,
        key: &str,
        shard: u32,
        len: usize,
        change: impl FnOnce(&mut Request),
    ) -> (Ticket, Arc<Vec<u8>>) {
        let memory = Arc::new(vec![0; len]);
        let mut request = request(vec![item(key, shard, &memory)], &memory, 1);
        change(&mut request);
        // SAFETY: the request keeps the memory, and no test reads it before the ticket is released.
        (unsafe { self.namespace.load(request) }.unwrap(), memory)
    }

    fn get(&self, key: &str, shard: u32) -> Status {
        let (ticket, memory) = self.load(key, shard, SHARD);
        let status = end(&ticket).items[0];
        if status == Status::Ok {
            assert!(*memory == bytes(shard as usize, SHARD), "shard {shard} of {key}");
        }
        status
    }
}

fn end(ticket: &Ticket) -> Completion {
    ticket.wait(LONG).unwrap()
}

fn eventually(what: &str, mut happens: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !happens() {
        assert!(begin.elapsed() < LONG.unwrap(), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A store with a far tier, and a block in both.
fn bench_with_far() -> Bench {
    let bench = bench_before_far(FarPolicy::WriteThrough);
    bench.put("a");
    assert_eq!(bench.store.stats().unwrap().far.unwrap().written_blocks, 1);
    bench
}

fn bench_before_far(policy: FarPolicy) -> Bench {
    bench(|options| {
        let root = options.root.join("far");
        options.root.push("near");
        [&root, &options.root].into_iter().for_each(|root| std::fs::create_dir(root).unwrap());
        options.far = Some(FarOptions::new(root).capacity_bytes(64 << 20).min_free_bytes(0).policy(policy));
    })
}

#[test]
fn blocks_wait_in_the_backlog_while_a_tier_is_busy() {
    let bench = bench_before_far(FarPolicy::WriteBack);
    let far = || bench.store.stats().unwrap().far.unwrap();
    eventually("the far tier is open", || far().is_up);
    let far_store = bench.store.inner.tier.as_ref().unwrap().far_store().unwrap();
    let (near_gate, far_gate) = (&bench.store.core().gate, &far_store.core().gate);

    let loads = 3 << 14;
    assert!(near_gate.take_loads(Priority::Background, loads));
    bench.put("a");
    let is_said = |what: &str| bench.store.events().iter().any(|event| event.reason.contains(what));
    eventually("it is said that it cannot be read", || is_said("the near tier has too many loads open"));
    (0..loads).for_each(|_| near_gate.load_ended());
    eventually("it is written", || far().written_blocks == 1);

    let all = Charge::of(u64::MAX);
    assert!(far_gate.admit_store([all].into_iter()));
    bench.put("b");
    eventually("it is said that it cannot be written", || is_said("blocks wait to be written"));
    far_gate.store_ended(all);
    eventually("it is written", || far().written_blocks == 2);
    assert_eq!((far().unwritten_blocks, far().failures), (0, 0));
    // No caller was refused.
    let busy = |store: &Store| store.stats().unwrap().dropped.busy;
    assert_eq!((busy(&bench.store), busy(&far_store)), (0, 0));
}

#[test]
fn a_block_that_goes_while_it_is_loaded_comes_from_the_far_tier() {
    let bench = bench_with_far();
    // Its place gets other bytes, and its owner says so.
    bench.layout.damage("a", &bench.namespace);
    lock(&bench.layout.state).has_moved = true;
    let (ticket, memory) = bench.load("a", 0, SHARD);
    let completion = end(&ticket);
    assert_eq!((&*completion.items, completion.far_bytes), (&[Status::Ok][..], SHARD as u64));
    assert!(ticket.is_released() && *memory == bytes(0, SHARD));
    let stats = bench.store.stats().unwrap();
    assert_eq!((stats.corrupt_blocks, stats.namespaces[0].hits, stats.namespaces[0].misses), (0, 1, 0));
}

#[test]
fn a_block_is_found_once_it_is_stored() {
    let bench = bench(|_| {});
    assert_eq!(bench.get("a", 0), Status::Miss);
    bench.put("a");
    assert_eq!(bench.namespace.lookup(&["a", "b"]).unwrap(), [true, false]);
    assert_eq!(bench.get("a", 0), Status::Ok);
    assert_eq!(end(&bench.store_shard("a", 0, 1).0).items, [Status::Exists]);
    let stats = bench.store.stats().unwrap();
    let namespace = &stats.namespaces[0];
    assert_eq!((namespace.hits, namespace.misses, namespace.stored_blocks), (1, 1, 1));
    assert_eq!((stats.open_requests, stats.in_flight_bytes, stats.partial_blocks), (0, 0, 0));
}

#[test]
fn shards_may_come_in_any_order_and_nothing_is_found_before_the_last() {
    let bench = bench(|_| {});
    for shard in [2, 0, 3] {
        assert_eq!(end(&bench.store_shard("a", shard, 4).0).items, [Status::Ok]);
        assert_eq!(bench.namespace.lookup_prefix(&["a"]).unwrap(), 0);
        assert_eq!(bench.get("a", shard), Status::Miss);
    }
    assert_eq!(end(&bench.store_shard("a", 2, 4).0).items, [Status::Exists], "a shard that is there");
    assert_eq!(end(&bench.store_shard("a", 1, 4).0).items, [Status::Ok]);
    for shard in 0..4 {
        assert_eq!(bench.get("a", shard), Status::Ok);
    }
    assert_eq!(bench.get("a", 4), Status::Mismatch);
}

#[test]
fn the_last_of_two_transfers_completes_a_block_even_if_neither_began_last() {
    let bench = bench(|_| {});
    bench.transfers.hold(Some(Direction::Write));
    let (first, _) = bench.store_shard("a", 0, 2);
    let (second, _) = bench.store_shard("a", 1, 2);
    eventually("both are placed", || bench.store.stats().unwrap().partial_blocks == 1);
    bench.transfers.hold(None);
    let ended = [end(&first), end(&second)];
    assert_eq!(ended.each_ref().map(|completion| completion.items[0]), [Status::Ok; 2]);
    let carried: u64 = ended.iter().flat_map(|completion| completion.carried.values()).sum();
    assert_eq!(carried, 2 * SHARD as u64 + 4096, "with the header, which was written by itself");
    assert_eq!((bench.get("a", 0), bench.get("a", 1)), (Status::Ok, Status::Ok));
}

#[test]
fn shards_of_another_shape_do_not_fit() {
    let bench = bench(|_| {});
    end(&bench.store_shard("a", 0, 2).0);
    assert_eq!(end(&bench.store_shard("a", 1, 3).0).items, [Status::Mismatch]);
    let memory = Arc::new(vec![1; 3 * SHARD]);
    // SAFETY: the request keeps the memory.
    let other = unsafe { bench.namespace.store(request(vec![item("a", 1, &memory)], &memory, 2)) };
    assert_eq!(end(&other.unwrap()).items, [Status::Mismatch]);
    assert_eq!(end(&bench.store_shard("a", 1, 2).0).items, [Status::Ok]);
    for len in [SHARD - 1, SHARD + 1, 3 * SHARD] {
        assert_eq!(end(&bench.load("a", 1, len).0).items, [Status::Mismatch], "{len} bytes");
    }
    assert_eq!(bench.get("a", 1), Status::Ok);
    assert_eq!(bench.store.stats().unwrap().corrupt_blocks, 0);
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let bench = bench(|_| {});
    let memory = Arc::new(vec![0; SHARD]);
    let good = || item("a", 0, &memory);
    let with = |change: &dyn Fn(&mut Request)| {
        let mut request = request(vec![good()], &memory, 1);
        change(&mut request);
        // SAFETY: the request keeps the memory.
        unsafe { bench.namespace.store(request) }
    };
    let refused: [&dyn Fn(&mut Request); 9] = [
        &|request| request.items.clear(),
        &|request| request.shards = 0,
        &|request| request.shards = 257,
        &|request| request.items[0].shard = 1,
        &|request| request.shard_len = Some(SHARD as u64 - 1),
        &|request| request.shard_len = Some(u64::MAX),
        &|request| request.items[0].pieces.clear(),
        &|request| request.items[0].pieces[0].len = 0,
        &|request| request.items[0].pieces[0].len = u64::MAX,
    ];
    for (number, change) in refused.iter().enumerate() {
        assert!(matches!(with(*change), Err(Error::InvalidRequest(_))), "{number}");
    }
    assert!(matches!(bench.namespace.lookup(&[vec![0; 1 << 20]]), Err(Error::InvalidKey { len: 1048576 })));
    assert!(with(&|_| {}).is_ok());
}

#[test]
fn an_error_of_the_system_does_not_remove_a_block() {
    let bench = bench(|_| {});
    bench.put("a");
    bench.transfers.fail_next(libc::EIO);
    assert_eq!(bench.get("a", 0), Status::Io(libc::EIO));
    assert_eq!(bench.get("a", 0), Status::Ok);
    let events = bench.store.events();
    assert_eq!(events.iter().map(|event| event.kind).collect::<Vec<_>>(), [EventKind::LoadFailed]);
    assert_eq!(bench.store.stats().unwrap().io_errors, 1);
}

#[test]
fn a_block_is_given_up_when_the_drive_fails_twice_with_no_success_in_between() {
    let bench = bench(|_| {});
    let fail = |errno: i32| {
        bench.transfers.fail_next(errno);
        assert!(matches!(bench.get("a", 0), Status::Io(_)));
    };
    for errno in [libc::EIO, libc::ENODATA] {
        bench.put("a");
        for _ in 0..3 {
            fail(errno);
            assert_eq!(bench.get("a", 0), Status::Ok, "it was read since");
        }
        fail(errno);
        assert_eq!(bench.namespace.delete(&["a"]).unwrap(), 1);
        bench.put("a");
        fail(errno);
        assert_eq!(bench.get("a", 0), Status::Ok, "it was stored again");
        fail(errno);
        fail(errno);
        assert_eq!(bench.get("a", 0), Status::Miss);
    }
}

#[test]
fn a_block_with_an_unreadable_shard_is_given_up_whatever_others_are_read() {
    let bench = bench(|_| {});
    for shard in 0..2 {
        assert_eq!(end(&bench.store_shard("a", shard, 2).0).items, [Status::Ok]);
    }
    for _ in 0..2 {
        assert_eq!(bench.get("a", 0), Status::Ok);
        bench.transfers.fail_next(libc::EIO);
        assert!(matches!(bench.get("a", 1), Status::Io(_)));
    }
    assert_eq!(bench.get("a", 0), Status::Miss);
}

#[test]
fn a_place_that_failed_one_shard_of_several_is_remembered_when_it_is_left() {
    let bench = bench(|_| {});
    assert_eq!(end(&bench.store_shard("a", 0, 2).0).items, [Status::Ok]);
    bench.transfers.fail_next(libc::EIO);
    assert_eq!(end(&bench.store_shard("a", 1, 2).0).items, [Status::Io(libc::EIO)]);
    bench.store.close(None).unwrap();
    assert_eq!(lock(&bench.layout.state).failed, 1);
}

#[test]
fn a_block_that_was_removed_before_its_file_was_opened_is_a_miss_and_no_error() {
    let bench = bench(|_| {});
    bench.put("a");
    bench.transfers.fail_next(libc::ENOENT);
    assert_eq!(bench.get("a", 0), Status::Miss);
    assert_eq!(bench.store.stats().unwrap().io_errors, 0);
    assert!(bench.store.events().is_empty());
}

#[test]
fn a_store_that_fails_can_be_repeated() {
    let bench = bench(|_| {});
    for (errno, status, free, failed, why) in [
        (libc::EROFS, Status::Io(libc::EROFS), 4, 0, "the place is given back"),
        (libc::ENOSPC, Status::Dropped(DropReason::NoRoom), 4, 0, "the disk is full, not the place bad"),
        (libc::EIO, Status::Io(libc::EIO), 4, 1, "the place may be bad"),
        (libc::ENODATA, Status::Io(libc::ENODATA), 3, 1, "the place is bad"),
    ] {
        bench.transfers.fail_next(errno);
        assert_eq!(end(&bench.store_shard("a", 0, 1).0).items, [status]);
        assert_eq!((bench.layout.free(), lock(&bench.layout.state).failed), (free, failed), "{why}");
    }
    end(&bench.store_shard("b", 0, 2).0);
    bench.transfers.fail_next(libc::EIO);
    assert_eq!(end(&bench.store_shard("b", 1, 2).0).items, [Status::Io(libc::EIO)]);
    assert_eq!(end(&bench.store_shard("b", 1, 2).0).items, [Status::Ok]);
    assert_eq!((bench.get("b", 0), bench.get("b", 1)), (Status::Ok, Status::Ok));
    bench.put("a");
}

#[test]
fn a_header_that_cannot_be_written_leaves_the_block_to_be_completed() {
    let bench = bench(|_| {});
    bench.transfers.hold(Some(Direction::Write));
    let (first, _) = bench.store_shard("a", 0, 2);
    let (second, _) = bench.store_shard("a", 1, 2);
    let (other, _) = bench.store_shard("b", 0, 2);
    eventually("all are on their way", || bench.transfers.waiting() == 3);
    // The header is the transfer after these three.
    bench.transfers.fail_after(3, libc::EIO);
    bench.transfers.hold(None);
    assert_eq!(end(&first).items, [Status::Ok]);
    assert_eq!(end(&other).items, [Status::Ok]);
    assert_eq!(end(&second).items, [Status::Io(libc::EIO)]);
    assert_eq!(bench.namespace.lookup_prefix(&["a"]).unwrap(), 0);
    assert_eq!(end(&bench.store_shard("a", 1, 2).0).items, [Status::Ok]);
    assert_eq!((bench.get("a", 0), bench.get("a", 1)), (Status::Ok, Status::Ok));
}

#[test]
fn a_shard_of_a_block_that_is_lost_is_not_stored() {
    let bench = bench(|_| {});
    bench.transfers.hold(Some(Direction::Write));
    let (first, _) = bench.store_shard("a", 0, 2);
    let (last, _) = bench.store_shard("a", 1, 2);
    // Once this one is there, both others are on their way.
    let (other, _) = bench.store_shard("b", 0, 2);
    eventually("all are placed", || bench.store.stats().unwrap().partial_blocks == 2);
    bench.transfers.lose_next();
    bench.transfers.hold(None);
    let failed = [Status::Io(libc::EIO)];
    assert_eq!((end(&first).items, end(&last).items), (failed.to_vec(), failed.to_vec()));
    assert_eq!(end(&other).items, [Status::Ok]);
}

#[test]
fn blocks_of_one_request_share_commits() {
    let bench = bench(|options| options.durability = crate::Durability::Batched);
    let (begin, begun) = std::sync::mpsc::channel();
    let (open, opened) = std::sync::mpsc::channel::<()>();
    *lock(&bench.layout.on_prepare) = Some(Box::new(move |_| {
        let _ = begin.send(());
        let _ = opened.recv_timeout(LONG.unwrap());
    }));
    // Before its commit it waits until the others are written: what comes next waits for that, too.
    let (first, _) = bench.store_shard("a", 0, 1);
    begun.recv_timeout(LONG.unwrap()).unwrap();
    let memory = Arc::new(bytes(0, SHARD));
    let items = ["b", "c", "d"].map(|key| item(key, 0, &memory)).into();
    // SAFETY: the request keeps the memory.
    let ticket = unsafe { bench.namespace.store(request(items, &memory, 1)) }.unwrap();
    eventually("all are written", || bench.transfers.ended() == 4);
    drop(open);
    assert_eq!((end(&first).items, end(&ticket).items), (vec![Status::Ok], vec![Status::Ok; 3]));
    assert_eq!(bench.store.stats().unwrap().commits, 2, "of 4 blocks");
}

#[test]
fn a_commit_that_fails_leaves_no_block() {
    let bench = bench(|_| {});
    lock(&bench.layout.state).commits_fail = true;
    assert_eq!(end(&bench.store_shard("a", 0, 1).0).items, [Status::Io(libc::EIO)]);
    assert_eq!((bench.get("a", 0), bench.layout.free()), (Status::Miss, 4));
    lock(&bench.layout.state).commits_fail = false;
    bench.put("a");
}

#[test]
fn a_load_that_hangs_times_out_and_gives_its_memory_back_later() {
    let bench = bench(|_| {});
    bench.put("a");
    bench.transfers.hang(true);
    let mut timeout = Duration::from_millis(20);
    let (ticket, memory) = loop {
        let (ticket, memory) = bench.load_with("a", 0, SHARD, |request| request.timeout = Some(timeout));
        assert_eq!(end(&ticket).items, [Status::TimedOut]);
        if !ticket.is_released() {
            break (ticket, memory);
        }
        // Its time was over before the thread had begun with it.
        timeout *= 2;
    };
    assert!(Arc::strong_count(&memory) == 2);
    let (other, _) = bench.load("a", 0, SHARD);
    assert!(matches!(other.wait(Some(Duration::ZERO)), Err(Error::TimedOut { .. })));
    assert_eq!(bench.store.stats().unwrap().leased_requests, 1);
    assert!(bench.store.events().iter().any(|event| event.kind == EventKind::Leased));
    bench.transfers.hang(false);
    eventually("the memory comes back", || ticket.is_released());
    eventually("the owner too", || Arc::strong_count(&memory) == 1);
    assert_eq!(bench.store.stats().unwrap().leased_requests, 0);
    assert_eq!(end(&ticket).items, [Status::TimedOut], "it ends once");
    assert_eq!((end(&other).items[0], bench.get("a", 0)), (Status::Ok, Status::Ok));
}

#[test]
fn what_has_not_begun_is_cancelled_and_its_memory_is_free_at_once() {
    let bench = bench(|_| {});
    bench.put("a");
    bench.transfers.hold(Some(Direction::Read));
    let (ticket, memory) = bench.load("a", 0, SHARD);
    assert!(ticket.poll().is_none() && !ticket.is_released());
    assert!(ticket.cancel() && !ticket.cancel());
    assert_eq!(ticket.poll().unwrap().items, [Status::Cancelled]);
    assert!(ticket.is_released() && Arc::strong_count(&memory) == 1);
    bench.transfers.hold(Some(Direction::Write));
    let (ticket, memory) = bench.store_shard("b", 0, 1);
    eventually("it is on its way", || bench.transfers.waiting() == 1);
    ticket.cancel();
    assert!(ticket.is_released() && Arc::strong_count(&memory) == 1);
    assert_eq!((bench.layout.free(), bench.store.stats().unwrap().partial_blocks), (3, 0));
    bench.transfers.hold(None);
    bench.put("b");
}

#[test]
fn too_many_bytes_at_once_queue_loads_and_refuse_stores() {
    let bench = bench(|options| options.max_in_flight_bytes = 10_000);
    bench.put("a");
    bench.transfers.hold(Some(Direction::Read));
    let loads: Vec<_> = (0..5).map(|_| bench.load("a", 0, SHARD)).collect();
    let stats = bench.store.stats().unwrap();
    assert_eq!((stats.in_flight_bytes, stats.queued_loads), (10_000, 3));
    let stores = ["b", "c"].map(|key| bench.store_shard(key, 0, 1).0);
    assert_eq!(end(&bench.store_shard("d", 0, 1).0).items, [Status::Dropped(DropReason::Busy)]);
    assert!(loads[4].0.cancel() && loads[4].0.is_released());
    bench.transfers.hold(None);
    for (ticket, memory) in &loads[..4] {
        assert_eq!(end(ticket).items, [Status::Ok]);
        assert!(**memory == bytes(0, SHARD));
    }
    stores
        .iter()
        .for_each(|ticket| assert_eq!(end(ticket).items, [Status::Ok], "loads alone refuse no store"));
    eventually("all have left", || bench.store.stats().unwrap().in_flight_bytes == 0);
    assert_eq!(bench.store.stats().unwrap().dropped.busy, 1);
    bench.put("d");
}

#[test]
fn a_store_waits_for_room_in_vain_for_a_part_of_its_time() {
    let bench = bench(|options| options.timeout = Some(Duration::from_secs(40)));
    bench.transfers.hold(Some(Direction::Write));
    let held: Vec<_> = (0..4).map(|number| bench.store_shard(&format!("held {number}"), 0, 1).0).collect();
    let refused = [Status::Dropped(DropReason::NoRoom)];
    for number in 0..3 {
        let (ticket, _) = bench.store_shard(&format!("refused {number}"), 0, 1);
        assert_eq!(end(&ticket).items, refused, "rather than out of time");
    }
    bench.transfers.hold(None);
    held.iter().for_each(|ticket| assert_eq!(end(ticket).items, [Status::Ok]));
}

#[test]
fn a_store_is_taken_whole_or_not_at_all() {
    let bench = bench(|options| options.max_in_flight_bytes = 10_000);
    let store = |keys: &[&str]| {
        let memory = Arc::new(bytes(0, SHARD));
        let items = keys.iter().map(|key| item(key, 0, &memory)).collect();
        // SAFETY: the request keeps the memory.
        unsafe { bench.namespace.store(request(items, &memory, 1)) }.unwrap()
    };
    bench.transfers.hold(Some(Direction::Write));
    let large = store(&["a", "b", "c"]);
    eventually("two of it are on their way", || bench.transfers.waiting() == 2);
    assert_eq!((bench.layout.free(), bench.store.stats().unwrap().in_flight_bytes), (1, 10_000));
    assert_eq!(end(&store(&["d"])).items, [Status::Dropped(DropReason::Busy)]);
    bench.transfers.hold(None);
    assert_eq!(end(&large).items, [Status::Ok; 3]);
    bench.transfers.hold(Some(Direction::Write));
    let small = store(&["d"]);
    let refused = store(&["a", "e", "f"]);
    let busy = Status::Dropped(DropReason::Busy);
    assert_eq!(end(&refused).items, [Status::Exists, busy, busy], "none of it, rather than one");
    bench.transfers.hold(None);
    assert_eq!(end(&small).items, [Status::Ok]);
}

#[test]
fn a_store_that_waits_is_cancelled_and_leaves_nothing() {
    let bench = bench(|options| options.max_in_flight_bytes = SHARD as u64);
    bench.put("a");
    bench.transfers.hold(Some(Direction::Read));
    let (load, _) = bench.load("a", 0, SHARD);
    let (store, memory) = bench.store_shard("b", 0, 1);
    eventually("it is placed", || bench.layout.free() == 2);
    assert!(store.cancel());
    eventually("its place is given back", || bench.layout.free() == 3);
    eventually("its memory is free", || store.is_released() && Arc::strong_count(&memory) == 1);
    bench.transfers.hold(None);
    assert_eq!(end(&load).items, [Status::Ok]);
    eventually("all have left", || bench.store.stats().unwrap().in_flight_bytes == 0);
    bench.put("b");
}

#[test]
fn a_store_that_is_cancelled_while_others_of_its_blocks_are_placed_lets_its_memory_go() {
    // Where one block has room, the other waits at the gate.
    for limit in [SHARD as u64, 1 << 30] {
        let bench = bench(|options| options.max_in_flight_bytes = limit);
        bench.transfers.hold(Some(Direction::Write));
        let (send, tickets) = std::sync::mpsc::channel::<Ticket>();
        *lock(&bench.layout.on_reserve) = Some(Box::new(move |key| {
            if *key == Key::new(b"c").unwrap() {
                assert!(tickets.recv_timeout(LONG.unwrap()).unwrap().cancel());
            }
        }));
        let memory = Arc::new(bytes(0, SHARD / 2));
        let items = ["a", "b", "c"].map(|key| item(key, 0, &memory)).into();
        // SAFETY: the request keeps the memory.
        let ticket = unsafe { bench.namespace.store(request(items, &memory, 1)) }.unwrap();
        send.send(ticket.clone()).unwrap();
        assert_eq!(end(&ticket).items, [Status::Cancelled; 3]);
        eventually("its memory is free", || ticket.is_released() && Arc::strong_count(&memory) == 1);
        bench.transfers.hold(None);
        bench.store.flush(LONG).unwrap();
    }
}

#[test]
fn a_store_does_not_overtake_loads_that_wait() {
    let bench = bench(|options| options.max_in_flight_bytes = 12_000);
    bench.put("a");
    bench.transfers.hold(Some(Direction::Read));
    let (small, _) = bench.load("a", 0, SHARD);
    let (large, _) = bench.load("a", 0, 8000);
    assert_eq!(bench.store.stats().unwrap().queued_loads, 1);
    let (store, _) = bench.store_shard("b", 0, 1);
    eventually("it is placed", || bench.layout.free() == 2);
    assert_eq!(bench.store.stats().unwrap().in_flight_bytes, SHARD as u64);
    bench.transfers.hold(None);
    assert_eq!((end(&small).items[0], end(&large).items[0]), (Status::Ok, Status::Mismatch));
    assert_eq!(end(&store).items, [Status::Ok]);
}

#[test]
fn a_load_that_is_given_up_lets_in_those_behind_it() {
    let bench = bench(|options| options.max_in_flight_bytes = 12_000);
    bench.put("a");
    bench.transfers.hold(Some(Direction::Read));
    let (first, _) = bench.load("a", 0, SHARD);
    let (large, _) = bench.load("a", 0, 8000);
    let (last, _) = bench.load("a", 0, SHARD);
    large.cancel();
    let stats = bench.store.stats().unwrap();
    assert_eq!((stats.in_flight_bytes, stats.queued_loads), (2 * SHARD as u64, 0));
    bench.transfers.hold(None);
    assert_eq!((end(&first).items[0], end(&last).items[0]), (Status::Ok, Status::Ok));
}

#[test]
fn deadlines_are_kept_while_a_block_is_looked_for_in_vain() {
    let bench = bench_of(true, |options| options.max_in_flight_bytes = 12_000);
    bench.put("a");
    bench.put("b");
    bench.transfers.hold(Some(Direction::Read));
    let (open, opened) = std::sync::mpsc::channel::<()>();
    let this_thread = std::thread::current().id();
    *lock(&bench.layout.on_find) = Some(Box::new(move |_| {
        if std::thread::current().id() != this_thread {
            let _ = opened.recv_timeout(LONG.unwrap());
        }
    }));
    let timed = |len, timeout| {
        bench.load_with("a", 0, len, |request| request.timeout = Some(Duration::from_millis(timeout))).0
    };
    let (first, _) = bench.load("a", 0, SHARD);
    // Its end lets in the next, whose block is looked for while the deadlines of the others pass.
    let large = timed(8000, 20);
    let found = timed(SHARD, 40);
    let (last, _) = bench.load("b", 0, SHARD);
    let late = timed(SHARD, 60);
    for ticket in [&large, &found, &late] {
        assert_eq!(end(ticket).items, [Status::TimedOut]);
    }
    eventually("who waits to be looked for is let go", || large.is_released() && late.is_released());
    drop(open);
    bench.transfers.hold(None);
    assert_eq!((end(&first).items[0], end(&last).items[0]), (Status::Ok, Status::Ok));
    eventually("all have left", || bench.store.stats().unwrap().in_flight_bytes == 0);
    assert!(found.is_released());
}

#[test]
fn a_store_closes_while_loads_wait_to_be_looked_for() {
    let bench = bench_of(true, |options| options.max_in_flight_bytes = SHARD as u64);
    bench.put("a");
    bench.transfers.hold(Some(Direction::Read));
    let loads: Vec<_> = (0..100).map(|_| bench.load("a", 0, SHARD).0).collect();
    bench.store.close(LONG).unwrap();
    assert!(loads.iter().all(|ticket| end(ticket).items == [Status::Cancelled] && ticket.is_released()));
}

#[test]
fn a_load_that_waits_does_not_hold_its_block() {
    let bench = bench(|options| options.max_in_flight_bytes = SHARD as u64);
    bench.put("a");
    bench.put("b");
    bench.transfers.hold(Some(Direction::Read));
    let (first, _) = bench.load("a", 0, SHARD);
    let (second, _) = bench.load("b", 0, SHARD);
    let (third, _) = bench.load("a", 0, SHARD);
    assert_eq!(bench.namespace.delete(&["b"]).unwrap(), 1);
    bench.transfers.hold(None);
    let ended = [first, second, third].map(|ticket| end(&ticket).items[0]);
    assert_eq!(ended, [Status::Ok, Status::Miss, Status::Ok]);
}

#[test]
fn a_request_to_load_is_taken_whole_unless_others_leave_it_no_room() {
    const MOST: usize = 1 << 16;
    const REST: usize = MOST - MOST / 4;
    let bench = bench(|_| {});
    bench.put("a");
    bench.transfers.hold(Some(Direction::Read));
    let load = |count: usize, priority| {
        let memory = Arc::new(vec![0; SHARD]);
        let items = (0..count).map(|_| item("a", 0, &memory)).collect();
        let mut request = request(items, &memory, 1);
        request.priority = Some(priority);
        // SAFETY: the request keeps the memory, and no test reads it.
        (unsafe { bench.namespace.load(request) }.unwrap(), memory)
    };
    let is_refused = |count, priority| {
        let (ticket, memory) = load(count, priority);
        let is_over = ticket.poll().is_some();
        if is_over {
            assert_eq!(end(&ticket).items, vec![Status::Dropped(DropReason::Busy); count]);
            assert!(ticket.is_released() && Arc::strong_count(&memory) == 1);
        }
        is_over
    };
    let (alone, _) = load(MOST + 1, Priority::Background);
    assert!(is_refused(1, Priority::Demand), "who came alone leaves no room");
    alone.cancel();
    assert_eq!(bench.store.stats().unwrap().dropped.busy, 1);

    let (rest, _) = load(REST, Priority::Background);
    assert!(is_refused(1, Priority::Prefetch), "a quarter is for demand");
    assert!(is_refused(MOST / 4 + 1, Priority::Demand), "it is taken whole or not at all");
    let (demand, _) = load(MOST / 4, Priority::Demand);
    assert!(is_refused(1, Priority::Demand));
    rest.cancel();
    demand.cancel();
    bench.transfers.hold(None);
    assert_eq!(bench.get("a", 0), Status::Ok, "what has ended leaves room");
    assert_eq!(bench.get("b", 0), Status::Miss);
    let (again, _) = load(MOST, Priority::Demand);
    assert!(end(&again).is_ok(), "misses and those that have ended count no more");
}

#[test]
fn loads_that_wait_begin_together() {
    let bench = bench(|options| options.max_in_flight_bytes = 16 * SHARD as u64);
    bench.put("a");
    bench.transfers.submitted();
    // None ends before all others wait.
    bench.transfers.hold(Some(Direction::Read));
    let memory = Arc::new(vec![0; SHARD]);
    let items = (0..64).map(|_| item("a", 0, &memory)).collect();
    // SAFETY: the request keeps the memory, and the test does not read it before the request ends.
    let ticket = unsafe { bench.namespace.load(request(items, &memory, 1)) }.unwrap();
    assert_eq!(bench.store.stats().unwrap().queued_loads, 48);
    bench.transfers.hold(None);
    assert!(end(&ticket).is_ok());
    let submitted = bench.transfers.submitted();
    assert_eq!(submitted.iter().sum::<usize>(), 64);
    assert!(submitted.iter().all(|together| *together >= 4), "{submitted:?}");
}

#[test]
fn any_number_of_queued_loads_may_be_refused_one_after_the_other() {
    for find_waits in [false, true] {
        let bench = bench_of(find_waits, |options| options.max_in_flight_bytes = SHARD as u64);
        bench.put("a");
        bench.transfers.hold(Some(Direction::Read));
        let loads: Vec<_> = (0..20_000).map(|_| bench.load("a", 0, SHARD).0).collect();
        assert_eq!(bench.store.stats().unwrap().queued_loads, 19_999);
        bench.transfers.refuse();
        bench.transfers.hold(None);
        for ticket in &loads[1..] {
            assert_eq!(end(ticket).items, [Status::Io(libc::ENODEV)]);
        }
    }
}

#[test]
fn completions_are_told_by_the_event_descriptor() {
    let bench = bench(|_| {});
    bench.put("a");
    assert!(bench.store.drain_completions().is_empty(), "the ticket alone was told");
    let (ticket, _) = bench.load_with("a", 0, SHARD, |request| request.notify = Notify::EventFd);
    let completion = end(&ticket);
    let event = bench.store.event_fd();
    let mut poll = [rustix::event::PollFd::new(&event, rustix::event::PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut poll, None).unwrap(), 1);
    assert_eq!(bench.store.drain_completions(), [completion]);
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut poll, Some(&now)).unwrap(), 0);
}

#[test]
fn a_block_that_lacks_shards_is_given_up_in_time() {
    let bench = bench(|options| options.partial_timeout = Duration::from_millis(50));
    end(&bench.store_shard("a", 0, 2).0);
    eventually("it is given up", || bench.store.stats().unwrap().abandoned == 1);
    eventually("its place is free", || bench.layout.free() == 4);
    assert!(bench.store.events().iter().any(|event| event.kind == EventKind::Abandoned));
    end(&bench.store_shard("a", 1, 2).0);
    assert_eq!(bench.get("a", 1), Status::Miss, "it begins anew");
}

#[test]
fn flush_waits_for_stores_and_close_ends_the_rest() {
    let bench = bench(|_| {});
    bench.transfers.hold(Some(Direction::Write));
    let (ticket, _) = bench.store_shard("a", 0, 1);
    let short = Some(Duration::from_millis(10));
    assert!(matches!(bench.store.flush(short), Err(Error::TimedOut { .. })));
    bench.transfers.hold(None);
    bench.store.flush(LONG).unwrap();
    assert_eq!(ticket.poll().unwrap().items, [Status::Ok]);
    bench.transfers.hold(Some(Direction::Read));
    let (ticket, memory) = bench.load("a", 0, SHARD);
    bench.store.close(LONG).unwrap();
    assert_eq!(ticket.poll().unwrap().items, [Status::Cancelled]);
    assert!(ticket.is_released() && Arc::strong_count(&memory) == 1);
    assert!(matches!(bench.namespace.lookup(&["a"]), Err(Error::Closed { .. })));
    assert!(matches!(bench.store.stats(), Err(Error::Closed { .. })));
    bench.store.close(LONG).unwrap();
}

/// Longer than what is read at a time, with shards of several lengths.
#[test]
fn a_long_block_is_verified_part_by_part() {
    let bench = bench(|_| {});
    let lens = [200_001, 1, 65_536, 4096];
    let memory: Vec<_> = (0..).zip(lens).map(|(seed, len)| Arc::new(bytes(seed, len))).collect();
    let whole = |memory: &Arc<Vec<u8>>| vec![Piece::host(memory.as_ptr(), memory.len())];
    let key = Key::new(b"long").unwrap();
    let items = (0..).zip(&memory).map(|(shard, memory)| Item::new(key.clone(), shard, whole(memory)));
    let mut request = Request::new(items.collect(), KeepAlive::new(Arc::new(memory.clone())));
    request.shards = 4;
    // SAFETY: the request keeps the memory.
    assert!(end(&unsafe { bench.namespace.store(request) }.unwrap()).is_ok());
    let verify = || bench.store.verify(|_| std::ops::ControlFlow::Continue(())).unwrap();
    let verified = verify();
    assert_eq!(
        (verified.blocks, verified.corrupt, verified.bytes),
        (1, 0, lens.iter().sum::<usize>() as u64)
    );
    bench.layout.damage("long", &bench.namespace);
    assert_eq!(verify().corrupt, 1);
}

#[test]
fn verify_finds_damage_and_scrubbing_too() {
    for scrub in [0, 1 << 30] {
        let bench = bench(|options| options.scrub_bytes_per_second = scrub);
        bench.put("a");
        bench.put("b");
        let mut calls = 0;
        let verified = bench.store.verify(|_| {
            calls += 1;
            std::ops::ControlFlow::Continue(())
        });
        assert_eq!((verified.unwrap().blocks, calls), (2, 2));
        bench.layout.damage("a", &bench.namespace);
        if scrub == 0 {
            let verified = bench.store.verify(|_| std::ops::ControlFlow::Continue(())).unwrap();
            assert_eq!((verified.blocks, verified.corrupt), (2, 1));
        }
        eventually("the damage is found", || bench.store.stats().unwrap().corrupt_blocks == 1);
        assert_eq!((bench.get("a", 0), bench.get("b", 0)), (Status::Miss, Status::Ok));
        let block = bench.namespace.block(b"b").unwrap().unwrap();
        assert_eq!(block.shards[0].len, SHARD as u64);
        eventually("it is said", || {
            bench.store.events().iter().any(|event| event.kind == EventKind::CorruptBlock)
        });
    }
}

#[test]
fn scrubbing_rests_where_it_owns_no_blocks() {
    let bench = bench(|options| options.scrub_bytes_per_second = 1 << 30);
    lock(&bench.layout.state).is_others = true;
    bench.put("a");
    let lists = || lock(&bench.layout.state).lists;
    eventually("it looks", || lists() > 0);
    let (begin, before) = (Instant::now(), lists());
    std::thread::sleep(Duration::from_millis(500));
    let looks = lists() - before;
    // It waits for a tenth of a second at least between two looks.
    let time = begin.elapsed();
    assert!(u128::from(looks) <= 1 + time.as_millis() / 100, "{looks} times in {time:?}");
}

#[test]
fn damaged_bytes_are_a_miss_a_count_and_an_event() {
    let bench = bench(|_| {});
    bench.put("a");
    bench.layout.damage("a", &bench.namespace);
    assert_eq!(bench.get("a", 0), Status::Corrupt);
    assert_eq!(bench.get("a", 0), Status::Miss);
    let event = bench.store.events().remove(0);
    assert_eq!((event.kind, event.key.unwrap().to_string()), (EventKind::CorruptBlock, "a".to_owned()));
    assert!(event.reason.contains("shard 0 has the checksum"), "{}", event.reason);
    assert_eq!(bench.store.stats().unwrap().namespaces[0].corrupt, 1);
}

#[test]
fn a_child_of_fork_has_no_store() {
    let bench = bench(|_| {});
    bench.put("a");
    let (ticket, _) = bench.load("a", 0, SHARD);
    end(&ticket);
    // SAFETY: the child only asks the store, which touches no lock there, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let closed = matches!(bench.namespace.lookup(&["a"]), Err(Error::Closed { .. }))
            && matches!(bench.store.flush(None), Err(Error::Closed { .. }))
            && matches!(ticket.wait(None), Err(Error::Closed { .. }))
            && ticket.poll().is_none()
            && bench.store.drain_completions().is_empty();
        drop(bench);
        // SAFETY: ends this process.
        unsafe { libc::_exit(if closed { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: `status` is written.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(bench.get("a", 0), Status::Ok);
}

#[test]
fn metrics_name_what_happened() {
    let bench = bench(|_| {});
    bench.put("a");
    bench.get("a", 0);
    let metrics = bench.store.metrics().unwrap();
    let (namespace, root) = (bench.namespace.id(), bench.store.root().display());
    for line in [
        format!("hits_total{{store=\"{root}\",namespace=\"{namespace}\"}} 1"),
        format!("blocks{{store=\"{root}\"}} 1"),
        format!(
            "carried_bytes_total{{store=\"{root}\",route=\"threads\",access=\"buffered\",direction=\"write\"}} 9096"
        ),
        format!("requests_total{{store=\"{root}\",status=\"ok\"}} 2"),
    ] {
        let line = format!("hoistway_kv_{line}");
        assert!(metrics.lines().any(|other| other == line), "{line} in:\n{metrics}");
    }
    assert!(metrics.contains(&format!("namespace_info{{store=\"{root}\",namespace=\"{namespace}\",")));
    assert!(metrics.ends_with("# EOF\n"));
}

#[test]
fn series_are_there_from_the_start_and_counts_are_counters() {
    let bench = bench(|_| {});
    let store = format!("store=\"{}\"", bench.store.root().display());
    let metrics = bench.store.metrics().unwrap();
    let metrics = metrics.replace(&format!("{{{store}}}"), "").replace(&format!("{store},"), "");
    for line in [
        "hoistway_kv_dropped_total{reason=\"no_room\"} 0",
        "hoistway_kv_requests_total{status=\"timed_out\"} 0",
        "hoistway_kv_carried_bytes_total{route=\"gds\",access=\"direct\",direction=\"read\"} 0",
        "hoistway_kv_request_seconds_count{operation=\"load\",phase=\"queued\"} 0",
        "# TYPE hoistway_kv_evicted_blocks counter",
        "hoistway_kv_evicted_blocks_total 0",
        "hoistway_kv_corrupt_blocks_total 0",
        "hoistway_kv_damaged_records_total 0",
        "hoistway_kv_unsynced_loads_total 0",
        "# TYPE hoistway_kv_blocks gauge",
    ] {
        assert!(metrics.lines().any(|other| other == line), "{line} in:\n{metrics}");
    }
}

#[test]
fn what_its_owner_has_moved_is_a_miss_unless_its_checksum_was_compared() {
    for (verify, status) in [(true, Status::Ok), (false, Status::Miss)] {
        let bench = bench(|options| options.verify = verify);
        bench.put("a");
        lock(&bench.layout.state).has_moved = true;
        assert_eq!(bench.get("a", 0), status, "verify: {verify}");
        assert!(bench.store.events().is_empty());
    }
}

#[test]
fn bytes_of_another_block_in_a_moved_place_are_no_damage() {
    let bench = bench(|_| {});
    bench.put("a");
    bench.layout.damage("a", &bench.namespace);
    lock(&bench.layout.state).has_moved = true;
    assert_eq!(bench.get("a", 0), Status::Miss);
    let verified = bench.store.verify(|_| std::ops::ControlFlow::Continue(())).unwrap();
    assert_eq!((verified.gone, verified.corrupt), (1, 0));
    assert_eq!(bench.store.stats().unwrap().corrupt_blocks, 0);
    assert!(bench.store.events().is_empty());
}

#[test]
fn who_closes_while_another_does_waits_no_longer_than_asked() {
    let bench = bench(|_| {});
    bench.transfers.hold(Some(Direction::Write));
    let (ticket, _) = bench.store_shard("a", 0, 1);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| bench.store.close(None));
        eventually("it closes", || bench.store.stats().is_err());
        let second = bench.store.close(Some(Duration::from_millis(20)));
        assert!(matches!(second, Err(Error::TimedOut { .. })), "{second:?}");
        bench.transfers.hold(None);
        first.join().unwrap().unwrap();
    });
    assert_eq!(end(&ticket).items, [Status::Ok]);
    bench.store.close(None).unwrap();
}

#[test]
fn a_ticket_says_that_its_memory_is_lost_before_its_end_is_seen() {
    let bench = bench(|_| {});
    bench.put("a");
    for is_load in [false, true] {
        bench.transfers.lose_next();
        let (ticket, _memory) =
            if is_load { bench.load("a", 0, SHARD) } else { bench.store_shard("b", 0, 1) };
        assert_eq!(end(&ticket).items, [Status::Io(libc::EIO)]);
        assert!(ticket.is_lost() && !ticket.is_released());
    }
    let (ticket, _memory) = bench.load("a", 0, SHARD);
    assert_eq!(end(&ticket).items, [Status::Ok]);
    assert!(!ticket.is_lost() && ticket.is_released());
    let _ = bench.store.close(Some(Duration::ZERO));
}

#[test]
fn a_block_whose_place_is_lost_can_be_stored_again_elsewhere() {
    let bench = bench(|_| {});
    bench.transfers.lose_next();
    assert_eq!(end(&bench.store_shard("a", 0, 1).0).items, [Status::Io(libc::EIO)]);
    assert_eq!((bench.layout.free(), bench.store.stats().unwrap().partial_blocks), (3, 0));
    bench.put("a");
    assert_eq!((bench.get("a", 0), bench.layout.free()), (Status::Ok, 2));
    let closed = bench.store.close(LONG).unwrap_err();
    assert!(
        matches!(closed, Error::Io { operation: "closing", .. }),
        "the lease is kept, and it says why: {closed}"
    );
}
