//! Room: what goes for what, and how it is shared.

use super::*;

#[test]
fn blocks_are_evicted_where_there_is_no_more_room() {
    let bench = Bench::new();
    let store = bench.open();
    for number in 0..300 {
        assert_eq!(bench.put(&store, &format!("key {number}")).unwrap(), Put::Done);
    }
    assert!(bench.disk.most_used() <= 1 << 20, "{}", bench.disk.most_used());
    let usage = store.usage();
    assert!(usage.evicted_blocks > 0 && usage.blocks > 30, "{usage:?}");
    assert_eq!(usage.blocks + usage.evicted_blocks, 300);
}

#[test]
fn a_disk_that_is_fuller_than_it_should_be_evicts_as_well() {
    let bench = Bench::new();
    bench.disk.set_capacity(400 << 10);
    let store = bench.open();
    for number in 0..100 {
        assert_eq!(bench.put(&store, &format!("key {number}")).unwrap(), Put::Done);
    }
    // Files of other programs fill the disk.
    bench.disk.set_capacity(100 << 10);
    for number in 100..200 {
        let put = bench.put(&store, &format!("key {number}"));
        assert!(matches!(put, Ok(Put::Done | Put::Dropped(DropReason::NoRoom))), "{put:?}");
    }
}

#[test]
fn slots_of_one_size_give_way_to_another() {
    let bench = Bench::new();
    let store = bench.open();
    for number in 0..100 {
        bench.put_len(&store, &format!("small {number}"), 4096).unwrap();
    }
    for number in 0..40 {
        let key = format!("large {number}");
        assert_eq!(bench.put_len(&store, &key, 100 << 10).unwrap(), Put::Done, "{key}");
    }
    let large = (0..40).filter(|number| bench.has(&store, &format!("large {number}"))).count();
    assert!(large >= 4, "{large} large blocks");
    assert_eq!(bench.put_len(&store, "huge", 1 << 20).unwrap(), Put::Dropped(DropReason::TooLarge));
    assert!(bench.disk.most_used() <= 1 << 20);
}

#[test]
fn a_writer_that_has_nothing_gets_its_share() {
    let bench = Bench::new();
    let rich = bench.open();
    for number in 0..200 {
        bench.put(&rich, &format!("rich {number}")).unwrap();
    }
    let poor = bench.open();
    let mut done = 0;
    for number in 0..100 {
        bench.now.fetch_add(1, Ordering::Relaxed);
        done += usize::from(bench.put(&poor, &format!("poor {number}")).unwrap() == Put::Done);
        poor.maintain().unwrap();
        rich.maintain().unwrap();
    }
    assert!(done > 50, "{done}");
    assert!(bench.disk.most_used() <= 1 << 20, "{}", bench.disk.most_used());
    assert!(rich.usage().blocks > 20 && poor.usage().blocks > 20);
}

#[test]
fn the_room_of_dead_writers_is_used() {
    let bench = Bench::new();
    let (first, second, third) = (bench.open(), bench.open(), bench.open());
    for number in 0..40 {
        bench.put(&first, &format!("first {number}")).unwrap();
        bench.put(&second, &format!("second {number}")).unwrap();
    }
    drop((first, second));
    for number in 0..60 {
        assert_eq!(bench.put(&third, &format!("third {number}")).unwrap(), Put::Done);
        third.maintain().unwrap();
    }
    let there = (0..60).filter(|number| bench.has(&third, &format!("third {number}"))).count();
    assert!(there > 40, "{there}");
    assert!(bench.files("LEASE").len() < 3);
    assert!(bench.disk.most_used() <= 1 << 20);
}

#[test]
fn the_dead_neither_want_nor_share() {
    let bench = Bench::new();
    let rich = bench.open();
    for number in 0..200 {
        bench.put(&rich, &format!("rich {number}")).unwrap();
    }
    let poor = bench.open();
    for number in 0..20 {
        bench.now.fetch_add(1, Ordering::Relaxed);
        bench.put(&poor, &format!("poor {number}")).unwrap();
        poor.maintain().unwrap();
    }
    drop(poor);
    let writer = rich.writer().unwrap();
    let others = writer.others(&rich.shared.root.lock().unwrap()).unwrap();
    assert_eq!((others.writers, others.wanted), (1, 0));
    let before = rich.usage().blocks;
    for _ in 0..20 {
        rich.maintain().unwrap();
    }
    let gone = before - rich.usage().blocks;
    assert!(gone * 4 < before, "{gone} of {before} blocks were evicted for a writer that has ended");
}

#[test]
fn many_sizes_find_room_in_a_store_that_several_share() {
    let mut bench = Bench::new();
    bench.options.capacity_bytes = Some(24 << 20);
    bench.options.segment_bytes = None;
    let stores = [(); 4].map(|()| bench.open());
    let mut dice = Dice(5);
    let (mut done, mut refused) = (0, 0);
    for number in 0..3000 {
        let store = &stores[number % 4];
        // More classes than there could be segments.
        let len = 4096 << dice.below(6);
        match bench.put_len(store, &format!("key {number}"), len + dice.below(len as u64) as usize).unwrap() {
            Put::Done => done += 1,
            Put::Dropped(why) => {
                assert_eq!(why, DropReason::NoRoom);
                refused += 1;
            }
        }
        if dice.one_in(10) {
            bench.now.fetch_add(1, Ordering::Relaxed);
            store.maintain().unwrap();
        }
    }
    assert!(refused * 50 < done, "{refused} refused, {done} done");
    assert!(bench.disk.most_used() <= 24 << 20, "{}", bench.disk.most_used());
    let found = (0..3000).filter(|number| bench.has(&stores[number % 4], &format!("key {number}"))).count();
    assert!(found > 100, "{found}");
}

#[test]
fn a_directory_that_cannot_be_taken_over_does_not_stop_writers() {
    let bench = Bench::new();
    let (first, second) = (bench.open(), bench.open());
    for number in 0..40 {
        bench.put(&second, &format!("second {number}")).unwrap();
    }
    let lease = bench.files("LEASE")[1].clone();
    drop(second);
    let name: &'static str = Box::leak(lease.to_string_lossy().into_owned().into_boxed_str());
    bench.fail(Operation::Open, name, u32::MAX, Errno::ACCESS);
    for number in 0..100 {
        assert_eq!(bench.put(&first, &format!("first {number}")).unwrap(), Put::Done);
        first.maintain().unwrap();
    }
    bench.disk.end_faults();
    // What is in it cannot be removed either.
    bench.fail(Operation::Remove, name, u32::MAX, Errno::ISDIR);
    for number in 0..100 {
        assert_eq!(bench.put(&first, &format!("again {number}")).unwrap(), Put::Done);
        first.maintain().unwrap();
    }
}

#[test]
fn lost_places_and_pinned_blocks_do_not_keep_segments_from_going() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    let Reservation::Claimed(claim) = bench.reserve(&store, "lost").unwrap() else { panic!() };
    store.lose(claim);
    let segment_of = |key| {
        let found = bench.find(&store, key).unwrap();
        found.token.downcast_ref::<FoundToken>().unwrap().entry.slot.segment
    };
    let writer = store.writer().unwrap();
    lock(&writer.slots).drain(segment_of("a"));
    writer.finish_draining().unwrap();
    assert!(bench.files("seg-").is_empty());
    bench.put_all(&store, &["pinned"]);
    store.pin(fingerprint("pinned"));
    lock(&writer.slots).drain(segment_of("pinned"));
    writer.finish_draining().unwrap();
    assert!(lock(&writer.slots).draining().is_empty(), "it is in use as before");
    bench.put_all(&store, &["b"]);
    assert_eq!(bench.found(&store, &["pinned", "b"]), [true, true]);
    assert_eq!(bench.files("seg-").len(), 1);
}

#[test]
fn a_smaller_capacity_is_kept_after_the_next_opening() {
    let mut bench = Bench::new();
    let store = bench.open();
    for number in 0..100 {
        bench.put(&store, &format!("key {number}")).unwrap();
    }
    drop(store);
    bench.options.capacity_bytes = Some(512 << 10);
    let store = bench.open();
    for _ in 0..20 {
        store.maintain().unwrap();
    }
    assert!(bench.disk.used() <= 512 << 10, "{}", bench.disk.used());
    bench.put_all(&store, &["new"]);
}

#[test]
fn a_disk_that_refuses_segments_costs_few_of_those_that_are_there() {
    let mut bench = Bench::new();
    bench.options.segment_bytes = None;
    let store = bench.open();
    for number in 0..100 {
        bench.put(&store, &format!("small {number}")).unwrap();
    }
    let before = bench.files("seg-").len();
    bench.fail(Operation::Allocate, "seg-", u32::MAX, Errno::NOSPC);
    for number in 0..10 {
        // Longer than any segment.
        let put = bench.put_len(&store, &format!("large {number}"), 12 * LEN).unwrap();
        assert_eq!(put, Put::Dropped(DropReason::NoRoom));
    }
    let after = bench.files("seg-").len();
    assert!(after + 3 >= before, "{before} segments, then {after}");
    bench.disk.end_faults();
    store.maintain().unwrap();
    assert_eq!(bench.put_len(&store, "large", 12 * LEN).unwrap(), Put::Done);
}

#[test]
fn while_a_segment_that_was_given_up_is_read_no_other_is() {
    let mut bench = Bench::new();
    bench.options.segment_bytes = None;
    let store = bench.open();
    // It gets a segment that is longer than the others.
    assert_eq!(bench.put_len(&store, "read", 12 * LEN).unwrap(), Put::Done);
    let found = bench.find(&store, "read").unwrap();
    let segment = found.token.downcast_ref::<FoundToken>().unwrap().entry.slot.segment;
    for number in 0..100 {
        bench.put(&store, &format!("small {number}")).unwrap();
    }
    lock(&store.writer().unwrap().slots).drain(segment);
    let before = bench.files("seg-").len();
    for number in 0..3 {
        let put = bench.put_len(&store, &format!("large {number}"), 12 * LEN).unwrap();
        assert_eq!(put, Put::Dropped(DropReason::NoRoom));
    }
    assert_eq!(bench.files("seg-").len(), before);
    drop(found);
    assert_eq!(bench.put_len(&store, "large", 12 * LEN).unwrap(), Put::Done);
    assert_eq!(bench.files("seg-").len(), before, "its room was enough");
}

#[test]
fn a_directory_that_cannot_be_listed_takes_what_it_took() {
    let bench = Bench::new();
    let first = bench.open();
    for number in 0..100 {
        bench.put(&first, &format!("first {number}")).unwrap();
    }
    let directory = first.writer().unwrap().directory.to_string_lossy().into_owned();
    let name: &'static str = Box::leak(directory.into_boxed_str());
    let put_many = |store: &Segments| {
        for number in 0..100 {
            bench.put(store, &format!("second {number}")).unwrap();
            store.maintain().ok();
        }
    };
    let capacity = bench.options.capacity_bytes.unwrap();
    let second = bench.open();
    bench.fail(Operation::List, name, u32::MAX, Errno::MFILE);
    put_many(&second);
    assert!(bench.disk.most_used() <= capacity, "{}", bench.disk.most_used());
    drop(second);
    // This one has never seen it.
    let third = bench.open();
    put_many(&third);
    assert!(bench.disk.most_used() <= capacity, "{}", bench.disk.most_used());
    bench.disk.end_faults();
    // A directory that this process may not list does not stop it.
    bench.fail(Operation::List, name, u32::MAX, Errno::ACCESS);
    let fourth = bench.open();
    assert_eq!(bench.put(&fourth, "a").unwrap(), Put::Done);
}

#[test]
fn a_lack_of_room_for_a_first_segment_is_told_once() {
    let mut bench = Bench::new();
    bench.options.min_free_bytes = (64 << 20) - 100_000;
    let store = bench.open();
    for key in ["a", "b"] {
        assert_eq!(bench.put(&store, key).unwrap(), Put::Dropped(DropReason::NoRoom));
        store.maintain().unwrap();
    }
    let [crate::layout::Notice { kind: EventKind::NoRoom, reason: told }] =
        &store.observed().take_notices()[..]
    else {
        panic!()
    };
    for part in ["of the capacity of 1048576 bytes", "of which min_free keeps 67008864"] {
        assert!(told.contains(part), "{told}");
    }
    bench.options.min_free_bytes = 0;
    drop(store);
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    assert!(store.observed().take_notices().is_empty());
}

/// Stores blocks of mixed sizes, every second one of which is used twice, until five times the capacity was written.
/// Returns the payload that is there at the end.
fn fill_mixed(bench: &Bench, store: &Segments, lens: &[usize]) -> u64 {
    let capacity = bench.options.capacity_bytes.unwrap();
    let mut dice = Dice(7);
    let (mut written, mut number) = (0, 0);
    while written < 5 * capacity {
        let len = lens[dice.below(lens.len() as u64) as usize];
        let key = format!("{number}");
        bench.put_hollow(store, &key, len);
        if number % 2 == 0 {
            store.touch(&[fingerprint(&key), fingerprint(&key)]);
        }
        (written, number) = (written + len as u64, number + 1);
        if number % 16 == 0 {
            store.maintain().unwrap();
        }
    }
    store.usage().payload_bytes
}

#[test]
fn a_full_store_of_mixed_sizes_keeps_most_of_its_capacity_as_payload() {
    const CAPACITY: u64 = 256 << 20;
    const KIB: usize = 1 << 10;
    let mixes: [&[usize]; 5] = [
        &[64 * KIB],
        &[16 * KIB, 160 * KIB],
        &[160 * KIB, 640 * KIB],
        &[64 * KIB, 1024 * KIB],
        &[15 * KIB, 1024 * KIB],
    ];
    for lens in mixes {
        let mut bench = Bench::new();
        bench.disk = SimulatedDisk::new(7, 1 << 30);
        bench.options.capacity_bytes = Some(CAPACITY);
        bench.options.segment_bytes = None;
        let store = bench.open();
        let payload = fill_mixed(&bench, &store, lens);
        let share = payload as f64 / CAPACITY as f64;
        assert!(share >= 0.85, "{lens:?}: {share:.3}");
        assert!(bench.disk.most_used() <= CAPACITY);
    }
}

#[test]
fn hot_blocks_stay_when_their_place_is_needed_for_larger_ones() {
    let mut bench = Bench::new();
    bench.disk = SimulatedDisk::new(7, 1 << 30);
    bench.options.capacity_bytes = Some(32 << 20);
    bench.options.segment_bytes = None;
    let store = bench.open();
    let hot: Vec<String> = (0..64).map(|number| format!("hot {number}")).collect();
    for key in &hot {
        assert_eq!(bench.put_len(&store, key, 16 << 10).unwrap(), Put::Done);
    }
    for number in 0..400 {
        for key in &hot {
            store.touch(&[fingerprint(key)]);
        }
        let len = if number % 2 == 0 { 256 << 10 } else { 60 << 10 };
        assert_eq!(bench.put_len(&store, &format!("{number}"), len).unwrap(), Put::Done);
    }
    let kept = hot.iter().filter(|key| bench.has(&store, key)).count();
    assert!(kept >= 60, "{kept} of 64");
    drop(store);
    let store = bench.open();
    let after = hot.iter().filter(|key| bench.has(&store, key)).count();
    assert_eq!(after, kept);
    assert_eq!(store.usage().lost_on_recovery, 0);
}

#[test]
fn large_blocks_get_the_room_of_small_ones_that_are_older() {
    let mut bench = Bench::new();
    bench.disk = SimulatedDisk::new(7, 1 << 30);
    bench.options.capacity_bytes = Some(32 << 20);
    bench.options.segment_bytes = None;
    let store = bench.open();
    for number in 0..250 {
        bench.put_hollow(&store, &format!("small {number}"), 124 << 10);
    }
    for number in 0..8 {
        bench.put_hollow(&store, &format!("large {number}"), 6 << 20);
        store.maintain().unwrap();
    }
    let has = |number: &i32| bench.find(&store, &format!("large {number}")).is_some();
    let large = (0..8).filter(has).count();
    assert!(large >= 4, "{large} large blocks");
    assert!(has(&7));
    let payload = store.usage().payload_bytes;
    assert!(payload >= (32 << 20) * 3 / 4, "{payload}");
}

#[test]
fn blocks_that_lack_shards_take_a_part_of_the_capacity_and_evict_no_more() {
    let bench = Bench::new();
    let store = bench.open();
    for number in 0..60 {
        bench.put_all(&store, &[&format!("{number}")]);
    }
    let before = store.usage().blocks;
    let partial = |key: &str| {
        store.reserve(NewBlock {
            namespace: NAMESPACE,
            key: Key::new(key.as_bytes()).unwrap(),
            fingerprint: fingerprint(key),
            shards: 10,
            shard_len: 8 << 10,
            expires: None,
            following: 0,
            is_partial: true,
        })
    };
    let first = partial("first").unwrap();
    assert!(matches!(first, Reservation::Claimed(_)));
    let after_first = store.usage().blocks;
    for number in 0..5 {
        let refused = partial(&format!("partial {number}")).unwrap();
        assert!(matches!(refused, Reservation::Dropped(DropReason::NoRoom)), "{refused:?}");
    }
    assert_eq!(store.usage().blocks, after_first);
    assert!(before - after_first <= 8, "{before} blocks, then {after_first}");
    drop(first);
    assert!(matches!(partial("again").unwrap(), Reservation::Claimed(_)));
}

#[test]
fn a_place_that_failed_is_not_chosen_again_and_its_segment_goes_in_time() {
    let bench = Bench::new();
    let store = bench.open();
    for number in 0..100 {
        bench.put_all(&store, &[&format!("{number}")]);
    }
    let mut places = Vec::new();
    for number in 0..20 {
        let Reservation::Claimed(claim) = bench.reserve(&store, &format!("bad {number}")).unwrap() else {
            panic!("no room for {number}")
        };
        let place = (claim.place.file.path().to_owned(), claim.place.payload);
        assert!(!places.contains(&place), "{place:?}");
        places.push(place);
        store.lose(claim);
        store.maintain().unwrap();
    }
    assert!(store.usage().blocks > 30);
    bench.put_all(&store, &["good"]);
}
