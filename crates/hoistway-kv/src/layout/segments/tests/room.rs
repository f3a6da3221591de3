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

/// Segments of the usual length are an 32nd of the capacity.
#[test]
fn each_of_many_writers_gets_a_segment() {
    let (capacity, writers) = (16 << 20, 33);
    let mut bench = Bench::new();
    bench.disk = SimulatedDisk::new(7, 2 * capacity);
    bench.options.capacity_bytes = Some(capacity);
    bench.options.segment_bytes = None;
    bench.options.durability = Durability::None;
    let stores: Vec<_> = (0..writers).map(|_| bench.open()).collect();
    // The first takes all that there is.
    let len = (capacity / 512) as usize;
    (0..600).for_each(|number| bench.put_hollow(&stores[0], &format!("first {number}"), len));
    let mut done = vec![false; writers];
    for round in 0..2 * writers {
        if done.iter().skip(1).all(|done| *done) {
            break;
        }
        for (number, store) in stores.iter().enumerate().skip(1) {
            if !done[number] {
                let reserved = bench.reserve_len(store, &format!("{number} {round}"), len).unwrap();
                done[number] = matches!(reserved, Reservation::Claimed(_));
                let waits = matches!(reserved, Reservation::Full);
                assert!(done[number] || waits, "{writers} writers: {number} is refused: {reserved:?}");
            }
        }
        bench.now.fetch_add(1, Ordering::Relaxed);
        stores.iter().for_each(|store| store.maintain().unwrap());
    }
    let without = done.iter().skip(1).filter(|done| !**done).count();
    assert_eq!(without, 0, "of {writers} writers");
    assert!(bench.disk.most_used() <= capacity, "{}", bench.disk.most_used());
}

/// Reserves places until there are no more.
fn reserve_all(bench: &Bench, store: &Segments) -> Vec<Claim> {
    let mut claims = Vec::new();
    while let Reservation::Claimed(claim) = bench.reserve(store, &format!("claim {}", claims.len())).unwrap()
    {
        claims.push(claim);
    }
    claims
}

fn room_wait(store: &Segments, stamp: u64) -> RoomWait {
    store.wait_for_room(stamp, Instant::now())
}

#[test]
fn room_that_blocks_are_written_to_is_waited_for() {
    let bench = Bench::new();
    let store = bench.open();
    assert_eq!(room_wait(&store, store.room_stamp()), RoomWait::Nothing);
    let mut claims = reserve_all(&bench, &store);
    let stamp = store.room_stamp();
    assert_eq!(room_wait(&store, stamp), RoomWait::Writes);
    let written = bench.write(claims.pop().unwrap(), &content("last", LEN));
    store.commit(vec![written]).pop().unwrap().unwrap();
    assert_eq!(room_wait(&store, stamp), RoomWait::Changed);
    assert!(matches!(bench.reserve(&store, "next").unwrap(), Reservation::Claimed(_)), "one was evicted");
    drop(claims);
    for number in 0..300 {
        let key = format!("pinned {number}");
        bench.put(&store, &key).unwrap();
        store.pin(fingerprint(&key));
    }
    assert!(matches!(bench.reserve(&store, "more").unwrap(), Reservation::Dropped(DropReason::NoRoom)));
    assert_eq!(room_wait(&store, store.room_stamp()), RoomWait::Nothing);
}

#[test]
fn room_that_pins_leave_for_no_block_is_not_waited_for() {
    let bench = Bench::new();
    let store = full_store(&bench, |number| number % 4 == 0);
    let Reservation::Claimed(_writing) = bench.reserve(&store, "writing").unwrap() else { panic!() };
    assert_eq!(room_wait(&store, store.room_stamp()), RoomWait::Writes);
    let refused = bench.reserve_len(&store, "large", 12 * LEN).unwrap();
    assert!(matches!(refused, Reservation::Dropped(DropReason::NoRoom)), "{refused:?}");
    let bench = Bench::new();
    let store = full_store(&bench, |_| false);
    let _writing = reserve_all(&bench, &store);
    let full = bench.reserve_len(&store, "large", 12 * LEN).unwrap();
    assert!(matches!(full, Reservation::Full), "{full:?}");
}

/// A full store in which every fourth block has gone and is being stored again, with the places of these.
fn with_scattered_writes(bench: &Bench) -> (Segments, Vec<Claim>) {
    let store = full_store(bench, |_| false);
    let mut claims = Vec::new();
    for number in (0..100).step_by(4) {
        let key = format!("{number}");
        if store.delete(NAMESPACE, &[(key.as_bytes(), fingerprint(&key))]).unwrap() == 1 {
            let Reservation::Claimed(claim) = bench.reserve(&store, &key).unwrap() else { panic!() };
            claims.push(claim);
        }
    }
    assert!(claims.len() > 10, "{}", claims.len());
    (store, claims)
}

#[test]
fn a_block_that_waits_for_room_evicts_no_more_each_time_that_it_asks() {
    for few_blocks in [FEW_BLOCKS, 0] {
        let mut bench = Bench::new();
        bench.few_blocks = few_blocks;
        let (store, mut claims) = with_scattered_writes(&bench);
        // Between places that are written to there is no room for it.
        let ask = || matches!(bench.reserve_len(&store, "large", 12 * LEN).unwrap(), Reservation::Full);
        let full = store.usage().evicted_blocks;
        assert!(ask());
        let once = store.usage().evicted_blocks;
        assert!(once - full <= 20, "{}", once - full);
        (0..20).for_each(|_| assert!(ask()));
        assert_eq!(store.usage().evicted_blocks, once, "{few_blocks}");
        // What was written can go.
        let written = claims.drain(..).map(|claim| bench.write(claim, &content("again", LEN))).collect();
        assert!(store.commit(written).iter().all(Result::is_ok));
        store.maintain().unwrap();
        store.maintain().unwrap();
        assert_eq!(bench.put_len(&store, "large", 12 * LEN).unwrap(), Put::Done, "{few_blocks}");
    }
}

#[test]
fn a_block_that_pins_keep_out_evicts_no_more_with_each_round() {
    let mut bench = Bench::new();
    bench.few_blocks = 0;
    let store = full_store(&bench, |number| number % 4 == 0);
    let ask = || matches!(bench.reserve_len(&store, "large", 12 * LEN).unwrap(), Reservation::Full);
    assert!(ask());
    let once = store.usage().evicted_blocks;
    let mut was_waited_for = false;
    for _ in 0..40 {
        was_waited_for |= room_wait(&store, store.room_stamp()) == RoomWait::Lookup;
        store.maintain().unwrap();
        assert!(ask());
    }
    assert_eq!(store.usage().evicted_blocks, once);
    assert!(was_waited_for);
    // All was looked through.
    assert_eq!(room_wait(&store, store.room_stamp()), RoomWait::Nothing);
    // Not before the coldest segments come again.
    (0..100).for_each(|number| store.unpin(fingerprint(&format!("{number}"))));
    for _ in 0..40 {
        store.maintain().unwrap();
        if let Reservation::Claimed(_) = bench.reserve_len(&store, "large", 12 * LEN).unwrap() {
            return;
        }
    }
    panic!("what is not pinned any more leaves room");
}

#[test]
fn stretches_that_are_about_to_be_looked_up_are_waited_for() {
    let mut bench = Bench::new();
    bench.few_blocks = 0;
    // The oldest blocks leave none.
    let store = full_store(&bench, |number| number % 4 == 0 && number < 60);
    let before = store.usage().evicted_blocks;
    let mut stamp = store.room_stamp();
    let mut rounds = 0;
    while !matches!(bench.reserve_len(&store, "large", 12 * LEN).unwrap(), Reservation::Claimed(_)) {
        assert_eq!(room_wait(&store, stamp), RoomWait::Lookup, "no write is under way");
        store.maintain().unwrap();
        assert_eq!(room_wait(&store, stamp), RoomWait::Changed);
        stamp = store.room_stamp();
        rounds += 1;
        assert!(rounds < 20);
    }
    assert!(rounds > 0);
    assert!(store.usage().evicted_blocks - before <= 40, "{}", store.usage().evicted_blocks - before);
}

#[test]
fn a_writer_that_always_writes_gives_up_room_as_well() {
    let bench = Bench::new();
    let rich = full_store(&bench, |_| false);
    let writer = rich.writer().unwrap();
    let poor = bench.open();
    // Another block comes to each of its segments before the last one has been written.
    let write_to_each = |round: u32| -> Vec<Claim> {
        let segments: Vec<u32> = lock(&writer.slots).all().map(|segment| segment.head.number).collect();
        let mut claims = Vec::new();
        for region in writer.regions(&segments) {
            let Some(block) = region.blocks.first() else { continue };
            writer.tombstone(|| rich.shared.index.evict_placed(std::slice::from_ref(block))).unwrap();
            let key = format!("{round} {}", region.segment);
            if let Reservation::Claimed(claim) = bench.reserve(&rich, &key).unwrap() {
                claims.push(claim);
            }
        }
        claims
    };
    let mut writing = write_to_each(0);
    let mut got = false;
    for round in 1..20 {
        let next = write_to_each(round);
        let written = std::mem::replace(&mut writing, next);
        let written = written.into_iter().map(|claim| bench.write(claim, &content("always", LEN))).collect();
        assert!(rich.commit(written).iter().all(Result::is_ok));
        bench.now.fetch_add(1, Ordering::Relaxed);
        got |= bench.put(&poor, &format!("poor {round}")).unwrap() == Put::Done;
        assert!(got || writer.least_at_once().is_none(), "else this says nothing");
        rich.maintain().unwrap();
        poor.maintain().unwrap();
    }
    assert!(got, "a writer with nothing gets room");
}

#[test]
fn room_that_others_are_asked_for_is_waited_for() {
    let bench = Bench::new();
    let rich = bench.open();
    for number in 0..200 {
        bench.put(&rich, &format!("rich {number}")).unwrap();
    }
    let poor = bench.open();
    let stamp = poor.room_stamp();
    assert_eq!(bench.put(&poor, "first").unwrap(), Put::Dropped(DropReason::NoRoom));
    assert_eq!(room_wait(&poor, stamp), RoomWait::Others);
    rich.maintain().unwrap();
    poor.maintain().unwrap();
    assert_eq!(room_wait(&poor, stamp), RoomWait::Changed);
    assert_eq!(bench.put(&poor, "first").unwrap(), Put::Done);
}

/// A store of which some processes have all, and two others nothing yet.
fn shared_store(rich: usize) -> (Bench, Vec<Segments>, [Segments; 2]) {
    let mut bench = Bench::new();
    bench.options.capacity_bytes = Some(4 << 20);
    let rich: Vec<Segments> = (0..rich).map(|_| bench.open()).collect();
    for number in 0..400 {
        for store in &rich {
            bench.put(store, &format!("rich {number}")).unwrap();
        }
    }
    let poor = [bench.open(), bench.open()];
    // Their logs take room, too.
    for store in [&rich[..]; 4].into_iter().flatten() {
        store.maintain().unwrap();
    }
    (bench, rich, poor)
}

#[test]
fn a_writer_with_less_gets_room_before_one_with_more() {
    let (bench, rich, [middle, poor]) = shared_store(1);
    let mut refused = 0;
    for round in 0..20 {
        // It is quicker each time.
        for number in 0..12 {
            bench.put(&middle, &format!("middle {round} {number}")).unwrap();
        }
        refused += u32::from(bench.put(&poor, &format!("poor {round}")).unwrap() != Put::Done);
        rich.iter().chain([&middle, &poor]).for_each(|store| store.maintain().unwrap());
    }
    assert!(refused <= 2, "{refused} times");
}

#[test]
fn writers_that_ask_for_room_get_it_in_the_same_round() {
    let (bench, rich, poor) = shared_store(2);
    let put = |round: u32| poor.each_ref().map(|store| bench.put(store, &format!("poor {round}")).unwrap());
    assert_eq!(put(0), [Put::Dropped(DropReason::NoRoom), Put::Dropped(DropReason::NoRoom)]);
    rich.iter().chain(&poor).for_each(|store| store.maintain().unwrap());
    assert_eq!(put(1), [Put::Done, Put::Done]);
}

#[test]
fn a_writer_that_stores_no_more_keeps_no_room_from_others() {
    let bench = Bench::new();
    let rich = full_store(&bench, |_| false);
    let poor = bench.open();
    bench.put(&poor, "poor").unwrap();
    assert!(others_of(&rich).wanted > 0);
    poor.maintain().unwrap();
    assert!(others_of(&rich).wanted > 0);
    bench.elapsed.fetch_add(6_000, Ordering::Relaxed);
    poor.maintain().unwrap();
    poor.maintain().unwrap();
    assert_eq!(others_of(&rich).wanted, 0);
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

/// Whatever fails once a file is removed: the disk is told of the removal.
#[test]
fn what_was_removed_of_dead_writers_stays_away_after_a_power_cut_though_a_store_failed() {
    let mut failed_after = 0;
    for seed in 0..6 {
        for skip in 16..28 {
            let mut bench = Bench::new();
            bench.disk = SimulatedDisk::new(seed, 64 << 20);
            let (first, second) = (bench.open(), bench.open());
            for number in 0..80 {
                let store = if number % 2 == 0 { &first } else { &second };
                bench.put(store, &format!("{number}")).unwrap();
            }
            drop((first, second));
            let third = bench.open();
            let left = bench.files("seg-");
            let (operation, effect) = (Operation::List, Effect::Fail(Errno::IO.raw_os_error()));
            bench.disk.script(Fault { operation, name: "", skip, times: 1, effect });
            let mut has_failed = false;
            for number in 100..120 {
                has_failed |= bench.put(&third, &format!("{number}")).is_err();
            }
            let there = bench.files("seg-");
            let removed: Vec<_> = left.into_iter().filter(|path| !there.contains(path)).collect();
            failed_after += usize::from(has_failed && !removed.is_empty());
            drop(third);
            bench.disk.crash();
            let back = bench.files("seg-");
            assert!(removed.iter().all(|path| !back.contains(path)), "seed {seed}, skip {skip}");
        }
    }
    assert!(failed_after > 0, "no store has failed after something was removed");
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
    let others = others_of(&rich);
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

#[test]
fn a_place_is_given_up_when_two_writes_to_it_fail_one_after_the_other() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["first"]);
    let slots = store.writer().unwrap();
    let lost = || {
        let slots = lock(&slots.slots);
        slots.total() - slots.used() - slots.free()
    };
    let claim = |key: &str| match bench.reserve(&store, key).unwrap() {
        Reservation::Claimed(claim) => claim,
        other => panic!("{other:?}"),
    };
    let place = |claim: &Claim| (claim.place.file.path().to_owned(), claim.place.payload);
    let failed = claim("a");
    let bad = place(&failed);
    store.fail(failed);
    assert_eq!(lost(), 0, "the failure may pass");
    // A store that does not write to it says nothing of it.
    drop(claim("b"));
    let again = claim("c");
    assert_eq!(place(&again), bad);
    let written = bench.write(again, &content("c", LEN));
    store.commit(vec![written]).pop().unwrap().unwrap();
    assert_eq!(store.delete(NAMESPACE, &[(b"c", fingerprint("c"))]).unwrap(), 1);
    for (failures, expected) in [(1, 0), (2, 3)] {
        let failed = claim("d");
        assert_eq!(place(&failed), bad);
        store.fail(failed);
        assert_eq!(lost(), expected, "after {failures} failures since it was good");
    }
    assert_ne!(place(&claim("e")), bad);
}

#[test]
fn a_write_to_part_of_a_place_that_failed_says_nothing_of_the_rest() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["first"]);
    let writer = store.writer().unwrap();
    let lost = || {
        let slots = lock(&writer.slots);
        slots.total() - slots.used() - slots.free()
    };
    let claim = |key: &str, len| match bench.reserve_len(&store, key, len).unwrap() {
        Reservation::Claimed(claim) => claim,
        other => panic!("{other:?}"),
    };
    let large = claim("large", 4 * LEN);
    let place = large.place.payload;
    store.fail(large);
    let small = claim("small", LEN);
    assert_eq!(small.place.payload, place, "the beginning of the place that failed");
    let written = bench.write(small, &content("small", LEN));
    store.commit(vec![written]).pop().unwrap().unwrap();
    // Behind it, in what has failed once.
    store.fail(claim("next", LEN));
    assert_eq!(lost(), 3, "two slots of the block, and one of its header");
}

/// A store that is full of blocks, of which so many are pinned.
fn full_store(bench: &Bench, is_pinned: impl Fn(u32) -> bool) -> Segments {
    let store = bench.open();
    (0..100).for_each(|number| assert_eq!(bench.put(&store, &format!("{number}")).unwrap(), Put::Done));
    for number in (0..100).filter(|number| is_pinned(*number)) {
        store.pin(fingerprint(&format!("{number}")));
    }
    store.maintain().unwrap();
    // What is free is used.
    let mut number = 0;
    while lock(&store.writer().unwrap().slots).has_room(LEN as u64 + 4096) {
        let key = format!("filler {number}");
        assert_eq!(bench.put(&store, &key).unwrap(), Put::Done);
        if is_pinned(number) {
            store.pin(fingerprint(&key));
        }
        number += 1;
    }
    store
}

#[test]
fn a_store_that_is_refused_evicts_nothing() {
    let bench = Bench::new();
    // Pinned blocks leave no stretch.
    let store = full_store(&bench, |number| number % 4 == 0);
    let before = store.usage();
    for number in 0..10 {
        let put = bench.put_len(&store, &format!("large {number}"), 12 * LEN).unwrap();
        assert_eq!(put, Put::Dropped(DropReason::NoRoom));
    }
    assert_eq!((store.usage().blocks, store.usage().evicted_blocks), (before.blocks, before.evicted_blocks));
    // But for the pinned ones, there is room for small ones.
    assert_eq!(bench.put(&store, "small").unwrap(), Put::Done);
    // All are pinned.
    let bench = Bench::new();
    let store = full_store(&bench, |_| true);
    let before = store.usage();
    assert_eq!(bench.put(&store, "a").unwrap(), Put::Dropped(DropReason::NoRoom));
    assert_eq!((store.usage().blocks, store.usage().evicted_blocks), (before.blocks, before.evicted_blocks));
}

#[test]
fn a_quota_that_cannot_be_kept_evicts_nothing() {
    let bench = Bench::new();
    let store = bench.open();
    let options = NamespaceOptions { quota_bytes: Some(120 << 10), ttl: None };
    store.open_namespace(NAMESPACE, "{}", options).unwrap();
    let keys: Vec<String> = (0..10).map(|number| format!("{number}")).collect();
    keys.iter().for_each(|key| assert_eq!(bench.put(&store, key).unwrap(), Put::Done));
    assert_eq!(bench.put_len(&store, "large", 15 * LEN).unwrap(), Put::Dropped(DropReason::Quota));
    assert_eq!(store.usage().evicted_blocks, 0, "it is larger than the quota");
    keys[..8].iter().for_each(|key| assert!(store.pin(fingerprint(key))));
    assert_eq!(bench.put_len(&store, "medium", 4 * LEN).unwrap(), Put::Dropped(DropReason::Quota));
    assert_eq!(store.usage().evicted_blocks, 0, "too much is pinned");
    assert_eq!(bench.put(&store, "small").unwrap(), Put::Done);
    assert_eq!(store.usage().evicted_blocks, 1);
}

#[test]
fn a_store_that_waits_looks_through_few_blocks_only() {
    let mut bench = Bench::new();
    bench.disk = SimulatedDisk::new(7, 1 << 30);
    bench.options.capacity_bytes = Some(32 << 20);
    bench.options.segment_bytes = None;
    bench.few_blocks = 0;
    let store = bench.open();
    for number in 0..250 {
        bench.put_hollow(&store, &format!("small {number}"), 124 << 10);
    }
    let mut done = 0;
    for number in 0..12 {
        let before = store.shared.index.walks();
        let put = bench.put_len(&store, &format!("large {number}"), 6 << 20).unwrap();
        done += usize::from(put == Put::Done);
        for small in 0..4 {
            bench.put_len(&store, &format!("small {number} {small}"), 24 << 10).unwrap();
        }
        assert_eq!(store.shared.index.walks(), before, "the housekeeping looks through all blocks");
        store.maintain().unwrap();
        store.maintain().unwrap();
    }
    assert!(done >= 8, "{done} of 12 large blocks are stored");
    let found = (0..12).filter(|number| bench.find(&store, &format!("large {number}")).is_some()).count();
    assert!(found >= 3, "{found}");
    assert!(bench.disk.most_used() <= 32 << 20);
}

/// A store with hot blocks in one segment, and room in another. Returns it with that segment's blocks.
fn with_hot_blocks(bench: &Bench) -> (Segments, Vec<String>, sweep::Region) {
    let store = bench.open();
    let hot: Vec<String> = (0..8).map(|number| format!("hot {number}")).collect();
    // Which is no use of it.
    let segment_of = |key: &str| store.shared.index.peek(&fingerprint(key)).unwrap().slot.segment;
    for key in &hot {
        assert_eq!(bench.put(&store, key).unwrap(), Put::Done);
    }
    let first = segment_of("hot 0");
    // Into another segment, and out of it again.
    let others: Vec<String> = (0..12).map(|number| format!("other {number}")).collect();
    for key in &others {
        assert_eq!(bench.put(&store, key).unwrap(), Put::Done);
    }
    for key in others.iter().filter(|key| segment_of(key) != first) {
        store.delete(NAMESPACE, &[(key.as_bytes(), fingerprint(key))]).unwrap();
    }
    let prints: Vec<Fingerprint> = hot.iter().map(|key| fingerprint(key)).collect();
    (0..4).for_each(|_| store.touch(&prints));
    let region = store.writer().unwrap().regions(&[first]).pop_front().unwrap();
    (store, hot, region)
}

#[test]
fn blocks_are_moved_out_of_a_stretch_that_is_emptied() {
    let bench = Bench::new();
    let (store, hot, region) = with_hot_blocks(&bench);
    assert!(store.writer().unwrap().clear_place_in(region, 13 * LEN as u64).unwrap());
    assert!(hot.iter().all(|key| bench.has(&store, key)));
    drop(store);
    bench.disk.crash();
    let store = bench.open();
    assert!(hot.iter().all(|key| bench.has(&store, key)));
    assert_eq!(store.usage().lost_on_recovery, 0);
}

#[test]
fn a_log_that_fails_while_blocks_are_moved_costs_no_other_blocks() {
    for seed in 0..8 {
        let mut bench = Bench::new();
        bench.disk = SimulatedDisk::new(seed, 64 << 20);
        let (store, hot, region) = with_hot_blocks(&bench);
        let contains = |key: &str| {
            let mut found = [false];
            store.contains(NAMESPACE, &[(key.as_bytes(), fingerprint(key))], &mut found);
            found[0]
        };
        let cold: Vec<String> =
            (0..12).map(|number| format!("other {number}")).filter(|key| contains(key)).collect();
        assert!(!cold.is_empty());
        bench.fail(Operation::Sync, "idx-", 1, Errno::IO);
        store.writer().unwrap().clear_place_in(region, 13 * LEN as u64).unwrap_err();
        assert!(cold.iter().all(|key| contains(key)), "nothing goes in vain");
        store.maintain().unwrap();
        bench.put_all(&store, &["after"]);
        let found = |store: &Segments| -> Vec<bool> {
            hot.iter().chain(&cold).map(|key| bench.has(store, key)).collect()
        };
        let before = found(&store);
        drop(store);
        bench.disk.crash();
        let store = bench.open();
        assert_eq!(found(&store), before, "seed {seed}: what is found is found after a crash");
        assert_eq!(store.usage().lost_on_recovery, 0);
    }
}

#[test]
fn places_that_copies_fail_to_get_are_not_tried_again_and_again() {
    let bench = Bench::new();
    let (store, _, region) = with_hot_blocks(&bench);
    bench.fail(Operation::Write, "seg-", u32::MAX, Errno::IO);
    let writer = store.writer().unwrap();
    assert!(writer.clear_place_in(region, 13 * LEN as u64).unwrap());
    bench.disk.end_faults();
    let slots = lock(&writer.slots);
    assert!(slots.total() > slots.used() + slots.free(), "places that failed twice are lost");
}

#[test]
fn copies_are_synced_only_if_the_blocks_were() {
    let mut bench = Bench::new();
    bench.options.durability = Durability::None;
    let (store, hot, region) = with_hot_blocks(&bench);
    let segment = region.segment;
    drop((store, region));
    // Killed: nothing says that its blocks were synced.
    bench.options.durability = Durability::Sync;
    let store = bench.open();
    bench.put_all(&store, &["proven"]);
    let all: Vec<&str> = hot.iter().map(String::as_str).chain(["proven"]).collect();
    let prints: Vec<Fingerprint> = all.iter().map(|key| fingerprint(key)).collect();
    (0..4).for_each(|_| store.touch(&prints));
    let is_proven = |key: &str| bench.find(&store, key).map(|found| found.is_proven);
    assert_eq!((is_proven("hot 0"), is_proven("proven")), (Some(false), Some(true)));
    let writer = store.writer().unwrap();
    for number in [segment, segment + 1] {
        for region in writer.regions(&[number]) {
            writer.clear_place_in(region, 13 * LEN as u64).unwrap();
        }
    }
    assert!(hot.iter().all(|key| is_proven(key) != Some(true)), "no sync covers them");
    assert_eq!(is_proven("proven"), Some(true));
}

#[test]
fn a_store_that_begins_while_its_older_block_is_moved_is_the_newer_one() {
    let mut bench = Bench::new();
    bench.options.segment_bytes = Some(128 << 10);
    let bench = Arc::new(bench);
    let store = Arc::new(bench.open());
    let ttl = NamespaceOptions::default().ttl(Duration::from_secs(60));
    store.open_namespace(NAMESPACE, "{}", ttl).unwrap();
    bench.put_all(&store, &["a"]);
    let found = bench.find(&store, "a").unwrap();
    let segment = found.token.downcast_ref::<FoundToken>().unwrap().entry.slot.segment;
    drop(found);
    store.open_namespace(NAMESPACE, "{}", NamespaceOptions::default()).unwrap();
    for number in 0..20 {
        bench.put_all(&store, &[&format!("{number}")]);
    }
    (0..4).for_each(|_| store.touch(&[fingerprint("a")]));
    let writer = store.writer().unwrap();
    let region = writer.regions(&[segment]).pop_front().unwrap();
    let newer = content("newer", LEN);
    let claimed = Arc::new(Mutex::new(None));
    bench.disk.during_next_sync({
        let (bench, store, newer, claimed) = (bench.clone(), store.clone(), newer.clone(), claimed.clone());
        move || {
            // The older one is expired by now, so that it may be stored again.
            bench.now.fetch_add(100, Ordering::Relaxed);
            let Reservation::Claimed(claim) = bench.reserve(&store, "a").unwrap() else { panic!() };
            *lock(&claimed) = Some(bench.write(claim, &newer));
        }
    });
    writer.clear_place_in(region, 2 * LEN as u64).unwrap();
    let written = lock(&claimed).take().expect("the copy was synced");
    store.commit(vec![written]).pop().unwrap().unwrap();
    drop((writer, store));
    let store = bench.open();
    let found = bench.find(&store, "a").expect("the newer one is there");
    assert_eq!(bench.disk.read(found.place.file.path(), found.place.payload, LEN).unwrap(), newer);
}

#[test]
fn a_segment_whose_room_no_block_may_take_is_left_in_time() {
    let bench = Bench::new();
    let store = bench.open();
    // The segment is made for few blocks.
    assert_eq!(bench.put_len(&store, "large", 12 * LEN).unwrap(), Put::Done);
    assert_eq!(store.delete(NAMESPACE, &[(b"large", fingerprint("large"))]).unwrap(), 1);
    let writer = store.writer().unwrap();
    let mut claims = Vec::new();
    while lock(&writer.slots).has_room(4096) {
        let Reservation::Claimed(claim) =
            bench.reserve_len(&store, &format!("{}", claims.len()), 100).unwrap()
        else {
            panic!()
        };
        claims.push(claim);
    }
    assert!(lock(&writer.slots).free() > 4, "there is room, but records of more blocks have none");
    let region = writer.regions(&[1]).pop_front().unwrap();
    let (ended, end) = std::sync::mpsc::channel();
    let clearing = writer.clone();
    std::thread::spawn(move || ended.send(clearing.clear_place_in(region, 4096)));
    let made = end.recv_timeout(Duration::from_secs(60)).expect("the hand goes round and round");
    assert!(!made.unwrap());
}
