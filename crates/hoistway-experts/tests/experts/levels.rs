//! The second level in pinned host memory: what is copied rather than read, its bound, its order, and faults of both copies.

use crate::{
    beside::{self, Work},
    kit::{EXPERTS, LAYERS, LONG, Model, SLICE_BYTES, scripted, until},
    stand_in::{Turn, Vendor},
};
use hoistway::DeviceId;
use hoistway_device::{CopyStream, Device, DeviceMemory, toy};
use hoistway_experts::{
    Error,
    backing::{Backing, HostLevelStats},
    store::{Store, StoreOptions},
};
use proptest::prelude::*;
use std::{
    collections::VecDeque,
    env, thread,
    time::{Duration, Instant},
};

/// What an expert takes on a device: three parts, each of whole multiples of 256 bytes.
const SLOT_BYTES: u64 = 3 * SLICE_BYTES.next_multiple_of(256);
const ALL: u32 = LAYERS * EXPERTS;

/// Slots for as many experts on a device, and in its second level.
fn levels(device: DeviceId, slots: u64, host_slots: u64) -> StoreOptions {
    StoreOptions::default()
        .budget_bytes(slots * SLOT_BYTES)
        .batch_bytes(0)
        .dense_bytes(0)
        .host_level_bytes(host_slots * SLOT_BYTES + 1)
        .timeout(LONG)
        .backing(Backing::DeviceSlots(device))
}

fn level_of(store: &Store) -> HostLevelStats {
    store.stats().host_level.expect("it has a second level")
}

/// Leases one of all experts, counted through the layers, and looks at its bytes.
fn look_at(model: &Model, store: &Store, number: u32) {
    model.assert_holds(&store.ensure(number / EXPERTS, &[number % EXPERTS]).unwrap());
}

#[test]
fn an_evicted_expert_is_copied_rather_than_read() {
    let turn = Turn::take();
    toy::reset();
    let before = toy::in_use();
    for device in [DeviceId::Cuda(0), DeviceId::Rocm(1), DeviceId::Toy(0)] {
        let model = Model::new();
        let (options, script) = scripted(levels(device, 4, ALL.into()), |_, _| None);
        let store = model.store(&options);
        (0..ALL).for_each(|number| look_at(&model, &store, number));
        let (reads, bytes_read) = (script.reads(), store.stats().bytes_read);
        for pass in 1..=3 {
            (0..ALL).for_each(|number| look_at(&model, &store, number));
            let (stats, level) = (store.stats(), level_of(&store));
            assert_eq!((script.reads(), stats.bytes_read), (reads, bytes_read), "nothing is read again");
            // In a fixed order, LRU finds nothing resident on the device.
            assert_eq!(level.hits, u64::from(pass * ALL));
            assert_eq!((level.bytes_copied, level.failed), (level.hits * 3 * SLICE_BYTES, 0));
            assert!(level.saved <= ALL.into(), "bytes never change, so none is saved twice: {level:?}");
            assert_eq!(level.held_bytes, u64::from(ALL) * SLOT_BYTES);
            assert!(stats.held_bytes <= stats.budget_bytes, "the second level is beside the budget");
        }
        drop((store, model));
        turn.assert_nothing_left(&device.to_string());
        assert_eq!(toy::in_use(), before, "{device}");
    }
}

/// Prefetches come from the second level, too, and tickets that are dropped on the way change nothing.
#[test]
fn prefetches_and_tickets_come_from_the_second_level() {
    let _turn = Turn::take();
    let model = Model::new();
    let (options, script) = scripted(levels(DeviceId::Cuda(0), 8, ALL.into()), |_, _| None);
    let store = model.store(&options);
    (0..ALL).for_each(|number| look_at(&model, &store, number));
    let reads = script.reads();
    store.prefetch(0, &[0, 1], None).unwrap();
    until("the prefetches", || level_of(&store).hits == 2);
    drop(store.ensure_async(1, &[2, 3, 4]).unwrap());
    model.assert_holds(&store.ensure(0, &[0, 1]).unwrap());
    model.assert_holds(&store.ensure(1, &[4, 3]).unwrap());
    let stats = store.stats();
    assert_eq!((stats.useful_prefetches, script.reads()), (2, reads), "{stats:?}");
}

#[test]
fn a_second_level_that_cannot_be_is_refused() {
    let _turn = Turn::take();
    let model = Model::new();
    let mut options = levels(DeviceId::Cuda(0), 4, 4);
    for wrong in [
        options.clone().host_level_bytes(SLOT_BYTES - 1),
        options.clone().host_level_bytes(0),
        options.clone().backing(Backing::HostSlots),
        options.clone().backing(Backing::HostSparse),
    ] {
        let error = model.open(&wrong).unwrap_err();
        assert!(matches!(error, Error::InvalidOption { option: "host_level_bytes", .. }), "{error:?}");
    }
    options.host_level_bytes = None;
    assert_eq!(model.store(&options).stats().host_level, None);
}

/// An expert that could not be saved is read again.
#[test]
fn faults_of_either_copy_serve_no_other_bytes() {
    let turn = Turn::take();
    for vendor in Vendor::ALL {
        let model = Model::new();
        let store = model.store(&levels(vendor.device(0), 2, 6));
        let all = || (0..ALL).for_each(|number| look_at(&model, &store, number));
        turn.configure(&vendor.faults("cuMemcpyDtoHAsync_v2:*=1"));
        for number in 0..2 {
            drop(store.ensure(0, &[number]).unwrap());
        }
        assert_eq!(store.evict(0, &[0, 1]).unwrap(), 2);
        until("both failures", || level_of(&store).failed == 2);
        turn.reset();
        let read = store.stats().bytes_read;
        look_at(&model, &store, 0);
        assert!(store.stats().bytes_read > read && level_of(&store).hits == 0);
        all();

        // Resident is what came last: the first expert of the second level's four comes back by a copy.
        let number = ALL - 3;
        turn.configure(&vendor.faults("cuMemcpyHtoDAsync_v2:*=1"));
        let error = store.ensure(number / EXPERTS, &[number % EXPERTS]).unwrap_err();
        let Error::Read { source, .. } = &error else { panic!("{error:?}") };
        assert!(matches!(source.error(), hoistway::Error::Device { .. }), "{error:?}");
        turn.reset();
        let hits = level_of(&store).hits;
        look_at(&model, &store, number);
        assert_eq!(level_of(&store).hits, hits + 1);

        // HIP's streams stay after a wait that has failed.
        if vendor == Vendor::Rocm {
            drop((store, model));
            turn.assert_nothing_left("HIP");
            continue;
        }
        // It is not known whether copies have ended.
        let failed = level_of(&store).failed;
        let in_doubt =
            "cuEventSynchronize:*=999,cuStreamSynchronize:*=999,cuEventQuery:*=999,cuMemFree_v2:*=999";
        (0..2).for_each(|expert| drop(store.ensure(0, &[expert]).unwrap()));
        turn.configure(&vendor.faults(in_doubt));
        assert_eq!(store.evict(0, &[0, 1]).unwrap(), 2);
        until("both doubts", || level_of(&store).failed == failed + 2);
        turn.reset();
        Device::open(vendor.device(0)).unwrap().regain().unwrap();
        (0..2).for_each(|_| all());
        assert_eq!(level_of(&store).failed, failed + 2);
        drop((store, model));
        turn.assert_nothing_left("CUDA");
    }
}

/// A slow copy to the second level: what is read to its slot comes after it.
#[test]
fn a_slot_is_read_to_once_its_expert_is_saved() {
    let turn = Turn::take();
    let model = Model::new();
    let store = model.store(&levels(DeviceId::Cuda(0), 1, 4));
    turn.configure("COPY_LATENCY_US=20000");
    for number in [0, 1, 2, 0, 3, 1, 2, 0] {
        look_at(&model, &store, number);
    }
    turn.reset();
    assert_eq!(level_of(&store).hits, 4);
}

/// Uses the first expert behind a stream, and evicts it to the second level.
fn save_first(model: &Model, store: &Store, idle: &Work) {
    look_behind(model, store, 0, idle);
    store.evict(0, &[0]).unwrap();
    until("the first to be saved", || level_of(store).saved == 1);
}

/// Leases one of the first layer's experts, looks at its bytes, and releases it behind a stream.
fn look_behind(model: &Model, store: &Store, number: u32, work: &Work) {
    let lease = store.ensure(0, &[number]).unwrap();
    model.assert_holds(&lease);
    // SAFETY: the stream lives.
    unsafe { lease.release_behind(work.stream.expose_provenance()) }.unwrap();
}

/// A stream that is held up until the caller has got other experts.
#[test]
fn work_that_uses_an_expert_keeps_only_fetches_to_its_slot_waiting() {
    let turn = Turn::take();
    let model = Model::new();
    let store = model.store(&levels(DeviceId::Cuda(0), 2, 8));
    let device = Device::open(DeviceId::Cuda(0)).unwrap();
    let seen = DeviceMemory::new(&device, SLICE_BYTES).unwrap();
    let [idle, busy] = [Work::new(), Work::new()];
    // The first free slot is taken: the last of these has the second.
    save_first(&model, &store, &idle);
    look_behind(&model, &store, 1, &idle);
    let lease = store.ensure(0, &[2]).unwrap();
    let part = lease.get(0).unwrap().parts().next().unwrap();
    let (address, range) = (part.address(), part.part().bytes);
    store.evict(0, &[1]).unwrap();
    until("the second to be saved", || level_of(&store).saved == 2);

    let gate = busy.gate();
    busy.copy(seen.address(), address, SLICE_BYTES as usize);
    // SAFETY: the stream lives.
    unsafe { lease.release_behind(busy.stream.expose_provenance()) }.unwrap();
    store.evict(0, &[2]).unwrap();
    until("one to be saved that is being used", || level_of(&store).saved == 3);
    look_behind(&model, &store, 1, &idle);
    let waits = store.ensure_async(0, &[0]).unwrap();
    store.evict(0, &[1]).unwrap();
    look_behind(&model, &store, 1, &idle);
    assert_eq!(level_of(&store).hits, 2, "a fetch to the slot did not wait");
    beside::open(&gate);
    let lease = waits.wait().unwrap();
    model.assert_holds(&lease);
    device.settle().unwrap();
    let mut bytes = vec![0; SLICE_BYTES as usize];
    CopyStream::new(&device).unwrap().read_back(seen.address(), &mut bytes).unwrap();
    assert!(bytes == model.bytes[range.start() as usize..range.end() as usize], "it saw another expert");
    drop((lease, store, idle, busy, seen, device, model));
    turn.assert_nothing_left("the store");
}

/// An expert is not saved to a place that another is copied from once a stream allows that.
#[test]
fn a_save_waits_for_no_fetch() {
    let turn = Turn::take();
    let model = Model::new();
    let store = model.store(&levels(DeviceId::Cuda(0), 2, 1));
    let [idle, busy] = [Work::new(), Work::new()];
    look_behind(&model, &store, 0, &idle);
    let lease = store.ensure(0, &[1]).unwrap();
    let gate = busy.gate();
    // SAFETY: the stream lives.
    unsafe { lease.release_behind(busy.stream.expose_provenance()) }.unwrap();
    store.evict(0, &[1]).unwrap();
    until("the first to be saved", || level_of(&store).saved == 1);
    let waits = store.ensure_async(0, &[1]).unwrap();
    store.evict(0, &[0]).unwrap();
    look_behind(&model, &store, 2, &idle);
    let level = level_of(&store);
    assert_eq!((level.saved, level.failed, level.hits), (1, 1, 0));
    beside::open(&gate);
    model.assert_holds(&waits.wait().unwrap());
    assert_eq!(level_of(&store).hits, 1);
    drop((store, idle, busy, model));
    turn.assert_nothing_left("the store");
}

/// All work of the device is waited for beside the thread that copies.
#[test]
fn work_that_was_not_named_keeps_only_fetches_to_its_slot_waiting() {
    let _turn = Turn::take();
    let model = Model::new();
    let store = model.store(&levels(DeviceId::Cuda(0), 2, 8));
    let [idle, busy] = [Work::new(), Work::new()];
    save_first(&model, &store, &idle);
    look_behind(&model, &store, 1, &idle);
    let lease = store.ensure(0, &[2]).unwrap();
    let gate = busy.gate();
    drop(lease);
    store.evict(0, &[2]).unwrap();
    until("one to be saved that is being used", || level_of(&store).saved == 2);
    let waits = store.ensure_async(0, &[0]).unwrap();
    store.evict(0, &[1]).unwrap();
    look_behind(&model, &store, 1, &idle);
    assert_eq!(level_of(&store).hits, 1);
    beside::open(&gate);
    model.assert_holds(&waits.wait().unwrap());
}

#[test]
fn fetches_that_have_not_begun_are_cancelled_dropped_when_late_and_promoted() {
    let _turn = Turn::take();
    let model = Model::new();
    let store = model.store(&levels(DeviceId::Cuda(0), 4, 8));
    let [idle, busy] = [Work::new(), Work::new()];
    save_first(&model, &store, &idle);
    (1..4).for_each(|number| look_behind(&model, &store, number, &idle));
    let lease = store.ensure(0, &[4]).unwrap();
    let gate = busy.gate();
    // SAFETY: the stream lives.
    unsafe { lease.release_behind(busy.stream.expose_provenance()) }.unwrap();
    store.evict(0, &[4]).unwrap();
    let dropped = |count| until("the prefetch to be dropped", || store.stats().dropped_prefetches == count);
    store.prefetch(0, &[0], None).unwrap();
    store.cancel_before(1);
    dropped(1);
    store.prefetch(0, &[0], Some(Instant::now() + Duration::from_millis(1))).unwrap();
    dropped(2);
    drop(store.ensure_async(0, &[0]).unwrap());
    store.prefetch(0, &[0], Some(Instant::now() + LONG)).unwrap();
    let ticket = store.ensure_async(0, &[0]).unwrap();
    assert_eq!(level_of(&store).hits, 0);
    beside::open(&gate);
    model.assert_holds(&ticket.wait().unwrap());
    let stats = store.stats();
    assert_eq!((stats.dropped_prefetches, stats.useful_prefetches, level_of(&store).hits), (2, 1, 1));
}

/// A request finds an expert in the second level that turns out not to have been saved.
#[test]
fn an_expert_that_is_requested_before_its_save_has_failed_is_read() {
    let turn = Turn::take();
    for vendor in Vendor::ALL {
        let model = Model::new();
        let store = model.store(&levels(vendor.device(0), 2, 8));
        look_at(&model, &store, 0);
        look_at(&model, &store, 1);
        let read = store.stats().bytes_read;
        turn.configure(&format!("BLOCKS={}", vendor.symbol("cuMemcpyDtoHAsync_v2")));
        store.evict(0, &[0]).unwrap();
        let ticket = store.ensure_async(0, &[0]).unwrap();
        assert_eq!(store.stats().bytes_read, read);
        turn.configure(&vendor.faults("cuMemcpyDtoHAsync_v2:*=1"));
        turn.configure("BLOCKS=");
        let lease = ticket.wait().unwrap();
        turn.reset();
        model.assert_holds(&lease);
        let level = level_of(&store);
        assert_eq!((level.failed, level.saved, level.hits), (1, 0, 0));
        assert!(store.stats().bytes_read > read);
    }
}

/// A store of three experts on its device whose second level has the first two.
fn with_two_saved(model: &Model, device: DeviceId) -> Store {
    let store = model.store(&levels(device, 3, 2));
    (0..3).for_each(|number| look_at(model, &store, number));
    for number in 0..2 {
        store.evict(0, &[number]).unwrap();
        until("an expert to be saved", || level_of(&store).saved == u64::from(number) + 1);
    }
    store
}

/// Lets calls of one function of the driver wait until this is dropped.
struct Blocked<'a>(&'a Turn);

impl<'a> Blocked<'a> {
    fn new(turn: &'a Turn, vendor: Vendor, function: &str) -> Self {
        turn.configure(&format!("BLOCKS={}", vendor.symbol(function)));
        Self(turn)
    }
}

impl Drop for Blocked<'_> {
    fn drop(&mut self) {
        self.0.configure("BLOCKS=");
    }
}

/// A bus carries as much one way while it carries the other. A slot of the second level is not filled before what is fetched from
/// it is on the device.
#[test]
fn experts_are_saved_while_one_is_fetched_but_not_to_where_it_is_fetched_from() {
    let turn = Turn::take();
    for vendor in Vendor::ALL {
        let model = Model::new();
        let store = with_two_saved(&model, vendor.device(0));
        look_at(&model, &store, 3);
        let calls = format!("calls.{}", vendor.symbol("cuMemcpyHtoDAsync_v2"));
        let before = turn.count(&calls);
        let blocked = Blocked::new(&turn, vendor, "cuMemcpyHtoDAsync_v2");
        let fetch = store.ensure_async(0, &[0]).unwrap();
        until("the fetch to have begun", || turn.count(&calls) > before);
        // The second level has room for the one where the first is fetched from, and for the other beside it.
        store.evict(0, &[2]).unwrap();
        store.evict(0, &[3]).unwrap();
        until("one to be saved", || level_of(&store).saved == 3);
        drop(blocked);
        model.assert_holds(&fetch.wait().unwrap());
        until("the other to be saved", || level_of(&store).saved == 4);
        let hits = level_of(&store).hits;
        (2..4).for_each(|number| look_at(&model, &store, number));
        assert_eq!((level_of(&store).hits, level_of(&store).failed), (hits + 2, 0));
        drop((store, model));
        turn.assert_nothing_left("saved beside a fetch");
    }
}

/// An expert is not fetched before it is in the second level.
#[test]
fn experts_are_fetched_while_one_is_saved_but_not_from_where_it_is_saved_to() {
    let turn = Turn::take();
    for vendor in Vendor::ALL {
        let model = Model::new();
        let store = with_two_saved(&model, vendor.device(0));
        let blocked = Blocked::new(&turn, vendor, "cuMemcpyDtoHAsync_v2");
        // Its slot of the second level has had the first.
        store.evict(0, &[2]).unwrap();
        let waits = store.ensure_async(0, &[2]).unwrap();
        let lease = store.ensure(0, &[1]).unwrap();
        assert_eq!(level_of(&store).hits, 1);
        drop(blocked);
        model.assert_holds(&waits.wait().unwrap());
        model.assert_holds(&lease);
        let level = level_of(&store);
        assert_eq!((level.saved, level.hits, level.failed), (3, 2, 0));
        drop((lease, store, model));
        turn.assert_nothing_left("fetched beside a save");
    }
}

#[test]
fn a_lease_that_outlives_its_store_keeps_no_second_level() {
    let turn = Turn::take();
    let model = Model::new();
    let store = model.store(&levels(DeviceId::Cuda(0), 2, 8));
    look_at(&model, &store, 0);
    let lease = store.ensure(0, &[1]).unwrap();
    let unpinned = || turn.count("calls.cuMemHostUnregister");
    let before = unpinned();
    drop(store);
    until("the second level to be given back", || unpinned() > before);
    model.assert_holds(&lease);
    drop((lease, model));
    turn.assert_nothing_left("the store");
}

/// A store may go at any time.
#[test]
fn a_store_goes_while_experts_are_saved() {
    let turn = Turn::take();
    let model = Model::new();
    for count in 0..8 {
        let store = model.store(&levels(DeviceId::Cuda(0), 4, 8));
        (0..4 + count).for_each(|number| drop(store.ensure(0, &[number % EXPERTS]).unwrap()));
        turn.configure("COPY_LATENCY_US=5000");
        let lease = store.ensure(1, &[0]).unwrap();
        store.evict(0, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
        drop(store.ensure_async(0, &[0]).unwrap());
        drop(store);
        model.assert_holds(&lease);
        drop(lease);
        turn.reset();
    }
    // An open file keeps what cuFile knows of it.
    drop(model);
    turn.assert_nothing_left("stores");
}

/// Both levels as they should be, by lists.
#[derive(Default)]
struct Expected {
    slots: usize,
    host_slots: usize,
    /// On the device, the least recently used first.
    resident: VecDeque<u32>,
    /// In the second level and on the device, the one that came first first.
    both: VecDeque<u32>,
    /// In the second level alone, the one that was evicted first first.
    evicted: VecDeque<u32>,
    reads: u64,
    hits: u64,
    saved: u64,
}

fn take(list: &mut VecDeque<u32>, number: u32) -> bool {
    let position = list.iter().position(|other| *other == number);
    position.is_some_and(|position| list.remove(position).is_some())
}

impl Expected {
    fn ensure(&mut self, number: u32) {
        if take(&mut self.resident, number) {
            return self.resident.push_back(number);
        }
        if self.resident.len() == self.slots
            && let Some(victim) = self.resident.front().copied()
        {
            self.evict(victim);
        }
        if take(&mut self.evicted, number) {
            self.hits += 1;
            self.both.push_back(number);
        } else {
            self.reads += 1;
        }
        self.resident.push_back(number);
    }

    fn evict(&mut self, number: u32) {
        if !take(&mut self.resident, number) {
            return;
        }
        if !take(&mut self.both, number) {
            self.saved += 1;
            if self.both.len() + self.evicted.len() == self.host_slots {
                let _ = self.both.pop_front().or_else(|| self.evicted.pop_front());
            }
        }
        self.evicted.push_back(number);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn both_levels_hold_what_they_should(
        slots in 1..5_usize,
        host_slots in 1..9_usize,
        steps in proptest::collection::vec((0..12_u32, prop::bool::weighted(0.2)), 1..60),
    ) {
        let _turn = Turn::take();
        toy::reset();
        let model = Model::new();
        let store = model.store(&levels(DeviceId::Toy(0), slots as u64, host_slots as u64));
        let mut expected = Expected { slots, host_slots, ..Expected::default() };
        let bytes = 3 * SLICE_BYTES;
        for (number, is_evicted) in steps {
            if is_evicted {
                store.evict(number / EXPERTS, &[number % EXPERTS]).unwrap();
                expected.evict(number);
            } else {
                look_at(&model, &store, number);
                expected.ensure(number);
            }
            let (stats, level) = (store.stats(), level_of(&store));
            prop_assert_eq!(stats.resident, expected.resident.len());
            prop_assert_eq!(stats.bytes_read, expected.reads * bytes);
            prop_assert_eq!(level.hits, expected.hits);
            prop_assert_eq!(level.experts, expected.both.len() + expected.evicted.len());
            prop_assert_eq!(level.held_bytes, host_slots as u64 * SLOT_BYTES);
        }
        until("the last copies", || level_of(&store).saved == expected.saved);
    }
}

#[test]
#[ignore = "takes 10 seconds, or as many as HOISTWAY_SOAK_SECONDS says: just soak-experts"]
fn soak_of_two_levels() {
    let seconds = env::var("HOISTWAY_SOAK_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(10));
    let mut seed = 0;
    while Instant::now() < end {
        round(seed, 400);
        seed += 1;
    }
    eprintln!("{seed} rounds");
}

#[test]
fn threads_share_two_levels() {
    (0..2).for_each(|seed| round(seed, 60));
}

/// Threads that use one store, on a device that is late at times.
fn round(seed: u64, steps: u64) {
    let turn = Turn::take();
    let model = Model::new();
    let mut random = fastrand::Rng::with_seed(seed);
    let vendor = Vendor::ALL[random.usize(0..2)];
    // Few experts and few host slots, so that one is often filled while it was just fetched from, or else many.
    let (layers, host_slots) =
        if random.bool() { (1, random.u64(1..4)) } else { (LAYERS, random.u64(1..20)) };
    let slots = random.u64(3..if layers == 1 { 5 } else { 9 });
    let store = model.store(&levels(vendor.device(0), slots, host_slots));
    turn.configure(&format!("JITTER_US={}", random.u32(0..300)));
    thread::scope(|scope| {
        for thread in 0..4 {
            let (store, model) = (&store, &model);
            let random = fastrand::Rng::with_seed(seed * 4 + thread);
            scope.spawn(move || work(store, model, layers, random, steps));
        }
    });
    turn.reset();
    let (stats, level) = (store.stats(), level_of(&store));
    assert!(stats.held_bytes <= stats.budget_bytes && level.experts as u64 <= host_slots, "{stats:?}");
    eprintln!("seed {seed}, {vendor:?}: {slots} and {host_slots} slots, {} misses, {level:?}", stats.misses);
    (0..ALL).for_each(|number| look_at(&model, &store, number));
    drop((store, model));
    turn.assert_nothing_left("a round");
}

fn work(store: &Store, model: &Model, layers: u32, mut random: fastrand::Rng, steps: u64) {
    for _ in 0..steps {
        let layer = random.u32(0..layers);
        let experts: Vec<u32> = (0..random.usize(1..3)).map(|_| random.u32(0..EXPERTS)).collect();
        match random.u32(0..12) {
            0 => _ = store.evict(layer, &experts).unwrap(),
            1 => store.prefetch(layer, &experts, None).unwrap(),
            2 => drop(store.ensure_async(layer, &experts).unwrap()),
            _ => model.assert_holds(&store.ensure(layer, &experts).unwrap()),
        }
    }
}
