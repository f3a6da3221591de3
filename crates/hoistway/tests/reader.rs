//! Readers: byte ranges into memory of every kind, by every route; priorities, cancelling, and what callers are told.
//! Faults are in `reader_faults`, devices in `reader_device`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    QUEUED, make_cold,
    reading::{
        Gate, Kind, LONG, Place, TestFile, assert_all_hold, no_faults, open_reader, prepare, range, reader,
        submit, until,
    },
};
use hoistway::{
    ByteRange, DeviceId, DirectIo, Error, Route,
    read::{Batch, Priority, ReadRequest, ReadStatus, Reader, ReaderOptions, Target},
    route::fault::{Fault, FaultScript},
};
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Ranges of all kinds: aligned or not, within a block, over several chunks, up to the end.
fn ranges(len: u64) -> Vec<ByteRange> {
    [
        (0, 0),
        (0, 1),
        (4095, 2),
        (0, len),
        (4096, 8192),
        (8192, 1 << 20),
        (100, 5_000_000),
        (len - 1, 1),
        (len - 5000, 5000),
        ((1 << 20) - 1, (1 << 20) + 2),
    ]
    .iter()
    .map(|&(start, len)| range(start, len))
    .collect()
}

#[test]
fn every_route_delivers_every_range_to_every_kind_of_memory() {
    let file = TestFile::new(9_000_001);
    for route in [Route::Auto, Route::Threads, QUEUED, Route::Cached] {
        if cfg!(windows) && route == Route::Cached {
            continue; // Windows does not say what its cache holds.
        }
        for chunk_bytes in [4096 * 16, 1 << 20] {
            let _warm = prepare(&file, route == Route::Cached);
            let options = ReaderOptions::default().route(route).chunk_bytes(chunk_bytes);
            let Some(reader) = open_reader(&options) else { continue };
            // Every misplacement of the memory against the file that matters.
            let shifts = [0, 1, 511, 4095].map(Kind::Host);
            let kinds = [Kind::Memory, Kind::Sink].into_iter().chain(shifts);
            let mut places: Vec<Place> = kinds
                .flat_map(|kind| ranges(9_000_001).into_iter().map(move |range| Place::new(kind, range)))
                .collect();
            let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
            batch.wait().unwrap();
            assert_all_hold(&file, &places, &batch);
            let report = batch.report();
            assert_eq!(report.delivered_bytes, report.bytes, "{report}");
            if route != Route::Auto {
                assert!(report.carriers.iter().all(|carrier| carrier.route == route), "{report}");
            }
        }
    }
}

/// A reader of one lane, whose reads take turns, and the reads that it has made by their offsets.
fn slow_reader(in_flight: usize, gate: &Gate) -> (Reader, Arc<Mutex<Vec<u64>>>) {
    let order = Arc::new(Mutex::new(Vec::new()));
    let (gate, seen) = (gate.clone(), order.clone());
    let script = FaultScript::new(move |_, offset| {
        seen.lock().unwrap().push(offset);
        gate.pass();
        None
    });
    let options = ReaderOptions::default()
        .route(Route::Threads)
        .direct(DirectIo::Never)
        .in_flight(in_flight)
        .chunk_bytes(64 << 10)
        .faults(script);
    (Reader::new(&options).unwrap(), order)
}

const BLOCK: u64 = 4096;

fn blocks(numbers: std::ops::Range<u64>) -> Vec<Place> {
    numbers.map(|block| Place::new(Kind::Memory, range(block * BLOCK, BLOCK))).collect()
}

fn block_numbers(order: &Mutex<Vec<u64>>) -> Vec<u64> {
    order.lock().unwrap().iter().map(|offset| offset / BLOCK).collect()
}

#[test]
fn demand_is_read_before_prefetch_and_each_in_the_order_in_which_it_was_asked_for() {
    let (file, gate) = (TestFile::new(1 << 20), Gate::default());
    let (reader, order) = slow_reader(1, &gate);
    let open = file.open();
    let first = submit(&reader, &open, &mut blocks(0..4), Priority::Prefetch);
    until("the first read begins", || !order.lock().unwrap().is_empty());
    let second = submit(&reader, &open, &mut blocks(10..13), Priority::Demand);
    let third = submit(&reader, &open, &mut blocks(20..22), Priority::Prefetch);
    let fourth = submit(&reader, &open, &mut blocks(30..32), Priority::Demand);
    gate.open();
    // Without making anything more urgent.
    until("all end", || [&first, &second, &third, &fourth].iter().all(|batch| batch.ended() == batch.len()));
    assert_eq!(block_numbers(&order), [0, 10, 11, 12, 30, 31, 1, 2, 3, 20, 21]);
    assert_eq!(first.report().priority, Priority::Prefetch);
}

#[test]
fn waiting_for_a_prefetch_or_promoting_it_moves_it_ahead() {
    type Urge = fn(&Batch);
    let urges: [(Urge, &[u64]); 4] = [
        (Batch::promote, &[0, 30, 20, 21, 22, 10, 11, 12]),
        (|batch| assert!(batch.wait_within(Duration::ZERO).is_none()), &[0, 30, 20, 21, 22, 10, 11, 12]),
        (|batch| assert!(batch.wait_read(1, Duration::ZERO).is_pending()), &[0, 30, 21, 10, 11, 12, 20, 22]),
        (|batch| assert!(batch.next_ended(Duration::ZERO).is_none()), &[0, 30, 10, 11, 12, 20, 21, 22]),
    ];
    let file = TestFile::new(1 << 20);
    for (urge, expected) in urges {
        let gate = Gate::default();
        let (reader, order) = slow_reader(1, &gate);
        let open = file.open();
        let first = submit(&reader, &open, &mut blocks(0..1), Priority::Demand);
        until("the first read begins", || !order.lock().unwrap().is_empty());
        let early = submit(&reader, &open, &mut blocks(10..13), Priority::Prefetch);
        let late = submit(&reader, &open, &mut blocks(20..23), Priority::Prefetch);
        let demand = submit(&reader, &open, &mut blocks(30..31), Priority::Demand);
        urge(&late);
        gate.open();
        until("all end", || {
            [&first, &early, &late, &demand].iter().all(|batch| batch.ended() == batch.len())
        });
        assert_eq!(block_numbers(&order), expected);
        let is_promoted = late.report().priority == Priority::Demand;
        assert_eq!(is_promoted, expected[2] == 20, "a batch is promoted as a whole or not");
        assert_eq!(early.report().priority, Priority::Prefetch);
    }
}

#[test]
fn prefetch_takes_half_of_the_lanes_at_most() {
    let (file, gate) = (TestFile::new(1 << 20), Gate::default());
    let (reader, order) = slow_reader(6, &gate);
    let open = file.open();
    let prefetch = submit(&reader, &open, &mut blocks(0..20), Priority::Prefetch);
    until("prefetching begins", || order.lock().unwrap().len() == 3);
    // Given time, no fourth comes.
    thread::sleep(Duration::from_millis(50));
    assert_eq!(order.lock().unwrap().len(), 3);
    let demand = submit(&reader, &open, &mut blocks(100..103), Priority::Demand);
    until("demand finds lanes", || order.lock().unwrap().len() == 6);
    assert!(block_numbers(&order)[3..].iter().all(|block| *block >= 100));
    gate.open();
    demand.wait().unwrap();
    prefetch.wait().unwrap();
}

#[test]
fn what_has_not_begun_is_cancelled_and_what_is_under_way_ends() {
    let file = TestFile::new(1 << 20);
    for priority in [Priority::Demand, Priority::Prefetch] {
        let gate = Gate::default();
        let (reader, order) = slow_reader(1, &gate);
        let mut places = blocks(0..5);
        // A read of two pieces, one of which is under way.
        places.insert(0, Place::new(Kind::Memory, range(60 << 10, 8 << 10)));
        let batch = submit(&reader, &file.open(), &mut places, priority);
        until("the first read begins", || !order.lock().unwrap().is_empty());
        batch.cancel();
        batch.cancel();
        assert_eq!(batch.ended(), 5, "all but the one under way");
        assert!(batch.status(0).is_pending());
        gate.open();
        assert!(matches!(batch.wait(), Err(Error::Cancelled)));
        assert_eq!(order.lock().unwrap().len(), 1);
        for read in 0..6 {
            assert!(matches!(batch.status(read), ReadStatus::Failed(Error::Cancelled)));
            assert!(batch.take(read).is_none());
        }
        assert_eq!(
            (batch.report().failed, batch.report().delivered_bytes),
            (6, 4 << 10),
            "{}",
            batch.report()
        );
        // The reader serves others.
        let mut others = blocks(7..9);
        let batch = submit(&reader, &file.open(), &mut others, Priority::Demand);
        batch.wait().unwrap();
        assert_all_hold(&file, &others, &batch);
    }
}

#[test]
fn a_read_that_has_not_begun_by_its_deadline_is_cancelled() {
    let file = TestFile::new(1 << 20);
    // On a busy machine the first read may not begin within the shortest of these.
    let begins_in_time = |patience| first_begins_and_second_is_late(&file, patience);
    assert!([300, 3_000, 30_000].map(Duration::from_millis).into_iter().any(begins_in_time));
}

/// Reads two blocks that are to begin within `patience` and two that have more time, by one lane that is held up for that
/// long. Returns `false` if not even the first began in time.
fn first_begins_and_second_is_late(file: &TestFile, patience: Duration) -> bool {
    let gate = Gate::default();
    let (reader, order) = slow_reader(1, &gate);
    let (open, mut places) = (file.open(), blocks(0..4));
    let (soon, late) = (Instant::now() + patience, Instant::now() + patience + LONG);
    let deadlines = [Some(soon), Some(soon), Some(late), None];
    let requests = places.iter_mut().zip(deadlines).map(|(place, deadline)| {
        let request = place.request(&open);
        match deadline {
            Some(deadline) => request.begin_by(deadline),
            None => request,
        }
    });
    let batch = reader.submit(requests, Priority::Demand).unwrap();
    until("the first read begins", || !order.lock().unwrap().is_empty());
    let is_first_in_time = block_numbers(&order) == [0];
    thread::sleep(soon.saturating_duration_since(Instant::now()) + Duration::from_millis(1));
    gate.open();
    assert!(matches!(batch.wait(), Err(Error::Cancelled)));
    if is_first_in_time {
        assert_eq!(block_numbers(&order), [0, 2, 3], "the first had begun");
        for (read, is_read) in [true, false, true, true].into_iter().enumerate() {
            assert_eq!(batch.status(read).error().is_none(), is_read);
        }
    }
    is_first_in_time
}

#[test]
fn a_batch_that_is_dropped_leaves_the_callers_memory_alone() {
    let file = TestFile::new(4 << 20);
    for route in [Route::Auto, Route::Threads, QUEUED] {
        make_cold(&file.path);
        let slow = FaultScript::new(|_, _| Some(Fault::Delay(Duration::from_millis(3))));
        let options =
            ReaderOptions::default().route(route).in_flight(4).chunk_bytes(64 << 10).faults(slow.clone());
        let Ok(reader) = Reader::new(&options) else { continue };
        let mut memory = vec![0u8; (4 << 20) + 4096];
        let shift = memory.as_ptr().addr().wrapping_neg() % 4096;
        // In place, and by way of slots.
        for shift in [shift, shift + 1] {
            let before = slow.reads();
            // SAFETY: the batch is dropped before the memory is used.
            let target =
                unsafe { Target::host(std::ptr::NonNull::new(memory[shift..].as_mut_ptr()).unwrap()) };
            let request = ReadRequest::new(&file.open(), range(0, (4 << 20) - 4096), target);
            let batch = reader.submit([request], Priority::Demand).unwrap();
            until("reads are under way", || slow.reads() > before);
            drop(batch);
            memory.fill(0x5C);
            thread::sleep(Duration::from_millis(30));
            assert!(memory.iter().all(|byte| *byte == 0x5C), "{route} writes to memory that was given back");
        }
    }
}

#[test]
fn a_reader_that_is_dropped_ends_its_batches() {
    let file = TestFile::new(1 << 20);
    for route in [Route::Threads, QUEUED] {
        // So slow that no batch ends before the reader is dropped.
        let slow = FaultScript::new(|_, _| Some(Fault::Delay(Duration::from_millis(200))));
        let options =
            ReaderOptions::default().route(route).in_flight(2).chunk_bytes(4096).faults(slow.clone());
        let Ok(reader) = Reader::new(&options) else { continue };
        let kinds = [Kind::Memory, Kind::Host(1), Kind::Sink];
        let mut places = kinds.map(|kind| Place::new(kind, range(0, 1 << 19)));
        let demand = submit(&reader, &file.open(), &mut places, Priority::Demand);
        let prefetch = submit(&reader, &file.open(), &mut blocks(0..50), Priority::Prefetch);
        until("reads are under way", || slow.reads() > 0);
        drop(reader);
        for batch in [demand, prefetch] {
            assert_eq!(batch.ended(), batch.len(), "nothing is pending without a reader");
            assert!(matches!(batch.wait(), Err(Error::Cancelled)));
            let told: usize = std::iter::from_fn(|| batch.next_ended(LONG)).count();
            assert_eq!(told, batch.len());
            assert_eq!(batch.report().failed, batch.len());
        }
    }
}

#[test]
fn each_read_is_told_once_in_the_order_in_which_they_end() {
    let (file, gate) = (TestFile::new(1 << 20), Gate::default());
    let (reader, _) = slow_reader(3, &gate);
    let open = file.open();
    let mut places = blocks(0..40);
    let mut requests: Vec<ReadRequest> = places.iter_mut().map(|place| place.request(&open)).collect();
    requests.push(ReadRequest::new(&open, range(1 << 20, 1), Target::memory()));
    requests.push(ReadRequest::new(&open, range(0, 0), Target::memory()));
    let batch = reader.submit(requests, Priority::Demand).unwrap();
    // What ends before it begins is told first.
    assert_eq!(batch.next_ended(LONG), Some(40));
    assert_eq!(batch.next_ended(LONG), Some(41));
    assert_eq!(batch.next_ended(Duration::from_millis(5)), None);
    assert!(batch.wait_within(Duration::from_millis(5)).is_none());
    assert!(batch.wait_read(0, Duration::from_millis(5)).is_pending());
    assert!(batch.take(0).is_none(), "nothing is given before it is there");
    assert!(batch.take(41).is_some_and(|block| block.is_empty()));
    gate.open();
    // From two threads, and still each once.
    let told = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(read) = batch.next_ended(LONG) {
                    assert!(!batch.status(read).is_pending());
                    told.lock().unwrap().push(read);
                }
            });
        }
    });
    let mut told = told.into_inner().unwrap();
    told.sort_unstable();
    assert!(told.into_iter().eq(0..40));
    assert_eq!((batch.next_ended(LONG), batch.ended()), (None, 42));
    assert!(matches!(batch.wait_within(LONG), Some(Err(Error::Truncated { .. }))));
    assert!(batch.status(42).is_pending() && batch.wait_read(42, LONG).is_pending(), "there is no such read");
    assert!(batch.take(42).is_none());
}

#[test]
fn an_empty_batch_has_ended() {
    let reader = Reader::new(&ReaderOptions::default()).unwrap();
    let batch = reader.submit([], Priority::Prefetch).unwrap();
    batch.wait().unwrap();
    assert!(batch.is_empty() && batch.next_ended(LONG).is_none());
    assert_eq!((batch.bytes_total(), batch.report().delivered), (0, 0));
}

#[test]
fn the_end_of_each_read_is_called_once_however_it_ends() {
    let (file, gate) = (TestFile::new(1 << 20), Gate::default());
    let calls = Arc::new(Mutex::new(vec![Vec::new(); 6]));
    let broken = FaultScript::new(|_, offset| (offset == 3 * BLOCK).then_some(Fault::Broken));
    let options =
        ReaderOptions::default().route(Route::Threads).direct(DirectIo::Never).in_flight(1).faults(broken);
    let reader = Reader::new(&options).unwrap();
    let open = file.open();
    let noting = |read: usize, request: ReadRequest| {
        let calls = calls.clone();
        request.on_end(move |outcome| calls.lock().unwrap()[read].push(outcome.map_err(ToString::to_string)))
    };
    let request = |start, len, target| ReadRequest::new(&open, range(start, len), target);
    let (waiting, begun) = (gate.clone(), Arc::new(AtomicUsize::new(0)));
    let begins = begun.clone();
    let sink = Target::sink(move |_, _| {
        begins.fetch_add(1, Ordering::Relaxed);
        waiting.pass();
        Ok(())
    });
    let batch = reader
        .submit(
            [
                noting(0, request(0, BLOCK, Target::memory())),
                noting(1, request(3 * BLOCK, BLOCK, Target::memory())),
                noting(2, request(1 << 20, 1, Target::memory())),
                noting(3, request(0, 0, Target::memory())),
                noting(4, request(0, BLOCK, sink)),
                noting(5, request(0, 1 << 20, Target::memory())),
            ],
            Priority::Demand,
        )
        .unwrap();
    until("the sink has bytes", || begun.load(Ordering::Relaxed) == 1);
    batch.cancel();
    gate.open();
    batch.wait().unwrap_err();
    let calls = calls.lock().unwrap();
    let expected = [None, Some("EIO"), Some("1048576"), None, None, Some("cancelled")];
    for (call, expected) in calls.iter().zip(expected) {
        match (call.as_slice(), expected) {
            ([Ok(())], None) => {}
            ([Err(error)], Some("EIO")) => assert!(error.contains("bytes 12288..16384"), "{error}"),
            ([Err(error)], Some(text)) => assert!(error.contains(text), "{error}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_sink_that_panics_as_it_is_dropped_ends_its_read() {
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("a sink panics on purpose as it is dropped");
        }
    }
    let file = TestFile::new(1 << 20);
    let reader = reader(Route::Threads, DirectIo::Auto, no_faults());
    let (panics, is_told) = (Panics, Arc::new(AtomicUsize::new(0)));
    let sink = Target::sink(move |_, _| {
        let _kept = &panics;
        Ok(())
    });
    let told = is_told.clone();
    let request = ReadRequest::new(&file.open(), range(0, 4096), sink)
        .on_end(move |_| _ = told.fetch_add(1, Ordering::Relaxed));
    reader.submit([request], Priority::Demand).unwrap().wait().unwrap();
    assert_eq!(is_told.load(Ordering::Relaxed), 1);
}

#[test]
fn functions_of_the_caller_that_panic_or_refuse_fail_their_read_alone() {
    let file = TestFile::new(1 << 20);
    for route in [Route::Threads, QUEUED, Route::Auto] {
        let Ok(reader) = Reader::new(&ReaderOptions::default().route(route).in_flight(1)) else {
            continue;
        };
        let open = file.open();
        let request = |target| ReadRequest::new(&open, range(5, 5000), target).named("layer.0");
        let batch = reader
            .submit(
                [
                    request(Target::sink(|_, _| panic!("a sink panics on purpose"))),
                    request(Target::sink(|_, _| Err("no room".into()))),
                    request(Target::memory()).on_end(|_| panic!("an end panics on purpose")),
                    request(Target::memory()),
                ],
                Priority::Demand,
            )
            .unwrap();
        assert!(matches!(batch.wait(), Err(Error::Sink { .. })));
        for (read, text) in [(0, "it panicked"), (1, "no room")] {
            let error = batch.status(read).error().unwrap().to_string();
            assert!(
                error.contains("bytes 5..5005 (tensor 'layer.0') were not accepted")
                    || error.contains("layer.0"),
                "{error}"
            );
            assert!(error.contains(text), "{error}");
        }
        for read in [2, 3] {
            assert_eq!(*batch.take(read).unwrap(), *file.bytes_of(range(5, 5000)));
        }
        let report = batch.report();
        assert_eq!((report.delivered, report.failed), (2, 2), "{report}");
    }
}

/// What the functions hold is gone when their read has ended, so that callers know when their memory is free.
#[test]
fn functions_of_the_caller_are_dropped_before_their_read_has_ended() {
    let file = TestFile::new(1 << 20);
    let reader = reader(Route::Auto, DirectIo::Auto, no_faults());
    let open = file.open();
    for round in 0..200 {
        let held = Arc::new(());
        let (in_sink, in_end) = (held.clone(), held.clone());
        let sink = Target::sink(move |_, _| {
            let _ = &in_sink;
            Ok(())
        });
        let request = ReadRequest::new(&open, range(round, 200_000), sink).on_end(move |_| drop(in_end));
        let batch = reader.submit([request], Priority::Demand).unwrap();
        if round % 2 == 0 {
            batch.wait().unwrap()
        } else {
            batch.cancel();
            let _ = batch.wait();
        }
        assert_eq!(Arc::strong_count(&held), 1);
    }
}

#[test]
fn the_next_read_can_be_asked_for_at_the_end_of_one() {
    let file = TestFile::new(1 << 20);
    let reader = Arc::new(Reader::new(&ReaderOptions::default().in_flight(1)).unwrap());
    let (next, place) = (reader.clone(), Arc::new(Mutex::new(None)));
    let (open, slot) = (file.open(), place.clone());
    let first = ReadRequest::new(&file.open(), range(0, 9000), Target::memory()).on_end(move |outcome| {
        outcome.unwrap();
        let request = ReadRequest::new(&open, range(9000, 9000), Target::memory());
        *slot.lock().unwrap() = Some(next.submit([request], Priority::Prefetch).unwrap());
    });
    let batch = reader.submit([first], Priority::Demand).unwrap();
    batch.wait().unwrap();
    let second = place.lock().unwrap().take().unwrap();
    second.wait().unwrap();
    assert_eq!(*second.take(0).unwrap(), *file.bytes_of(range(9000, 9000)));
}

/// The last owner of the reader may be one of its own threads.
#[test]
fn a_reader_may_be_dropped_by_its_own_thread() {
    let file = TestFile::new(1 << 20);
    let reader = Arc::new(Reader::new(&ReaderOptions::default().in_flight(2)).unwrap());
    let (last, gate, dropped) = (reader.clone(), Gate::default(), Arc::new(AtomicUsize::new(0)));
    let (waiting, done) = (gate.clone(), dropped.clone());
    let request = ReadRequest::new(&file.open(), range(0, 9000), Target::memory()).on_end(move |_| {
        waiting.pass();
        drop(last);
        done.fetch_add(1, Ordering::Relaxed);
    });
    let batch = reader.submit([request], Priority::Demand).unwrap();
    drop(reader);
    gate.open();
    batch.wait().unwrap();
    assert_eq!(dropped.load(Ordering::Relaxed), 1, "dropping it neither hangs nor panics");
}

#[test]
fn many_threads_share_a_reader() {
    let file = TestFile::new(3 << 20);
    for route in [Route::Auto, QUEUED] {
        make_cold(&file.path);
        let options = ReaderOptions::default().route(route).in_flight(3).chunk_bytes(64 << 10);
        let Ok(reader) = Reader::new(&options) else { continue };
        thread::scope(|scope| {
            for thread in 0..6u64 {
                let (reader, file) = (&reader, &file);
                scope.spawn(move || {
                    let open = file.open();
                    for round in 0..20 {
                        let start = (thread * 20 + round) * 12_345;
                        let kinds = [Kind::Memory, Kind::Host(round as usize), Kind::Sink];
                        let mut places = kinds.map(|kind| Place::new(kind, range(start, 150_000)));
                        let priority = if round % 3 == 0 { Priority::Prefetch } else { Priority::Demand };
                        let batch = submit(reader, &open, &mut places, priority);
                        if round % 5 == 4 {
                            batch.cancel();
                            drop(batch);
                            places.iter().for_each(Place::assert_fenced);
                        } else {
                            batch.wait().unwrap();
                            assert_all_hold(file, &places, &batch);
                        }
                    }
                });
            }
        });
    }
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let defaults = ReaderOptions::default;
    let wrong = [
        ("route", defaults().route(Route::Mapped)),
        ("route", defaults().route(Route::Unified)),
        ("direct", defaults().route(Route::Gds).direct(DirectIo::Never)),
        ("direct", defaults().route(Route::Usrbio).direct(DirectIo::Never)),
        ("direct", defaults().route(Route::Cached).direct(DirectIo::Always)),
        ("in_flight", defaults().in_flight(0)),
        ("in_flight", defaults().in_flight(1025)),
        ("chunk", defaults().chunk_bytes(0)),
        ("chunk", defaults().chunk_bytes(5000)),
        ("chunk", defaults().chunk_bytes((1 << 30) + 4096)),
        ("memory_budget", defaults().memory_budget_bytes(1 << 20)),
    ];
    for (name, options) in wrong {
        match Reader::new(&options) {
            Err(Error::InvalidOption { option, .. }) => assert_eq!(option, name),
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn reports_are_for_reading_and_for_programs() {
    let file = TestFile::new(1 << 20);
    let _warm = prepare(&file, true);
    let reader = reader(Route::Threads, DirectIo::Never, no_faults());
    let mut places = blocks(0..3);
    let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
    batch.wait().unwrap();
    let report = batch.report();
    let text = report.to_string();
    assert!(text.starts_with("3 of 3 reads delivered 12.0 KiB in "), "{text}");
    assert!(
        text.contains("threads   buffered") && text.contains("100.0 %  (3 reads of 12.0 KiB in all)"),
        "{text}"
    );
    let again: hoistway::read::BatchReport =
        serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
    assert_eq!(again, report);
    assert!(batch.report() == report, "its clock stands still once it has ended");
}

/// A child of `fork` has none of the reader's threads: it is told so, and nothing hangs or tears the parent's reads down.
#[cfg(target_os = "linux")]
#[test]
fn a_child_of_fork_is_told_that_no_thread_reads() {
    let (file, gate) = (TestFile::new(1 << 20), Gate::default());
    let (reader, order) = slow_reader(1, &gate);
    let open = file.open();
    let mut places = blocks(0..4);
    let batch = submit(&reader, &open, &mut places, Priority::Prefetch);
    until("the first read begins", || !order.lock().unwrap().is_empty());
    // SAFETY: the child calls nothing but the reader's functions, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let request = ReadRequest::new(&open, range(0, 1), Target::memory());
        let is_told = matches!(reader.submit([request], Priority::Demand), Err(Error::Forked))
            && matches!(batch.wait(), Err(Error::Forked))
            && matches!(batch.wait_within(LONG), Some(Err(Error::Forked)))
            && matches!(batch.wait_read(2, LONG), ReadStatus::Failed(Error::Forked))
            && batch.next_ended(LONG).is_none()
            && (batch.ended(), batch.report().failed) == (4, 4)
            && batch.take(0).is_none();
        batch.promote();
        batch.cancel();
        drop(batch);
        drop(reader);
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(if is_told { 0 } else { 1 }) };
    }
    let mut status = -1;
    until("the child ends", || {
        // SAFETY: a child of this test, and a place for its status.
        unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) == child }
    });
    assert_eq!(status, 0, "the child was not told");
    gate.open();
    batch.wait().unwrap();
    assert_all_hold(&file, &places, &batch);
}

/// A program with a lease is told that a file is opened, and is given time to let it go.
#[cfg(target_os = "linux")]
#[test]
fn a_file_that_another_program_has_leased_is_waited_for() {
    use std::os::fd::AsRawFd;
    const F_SETSIG: libc::c_int = 10;
    let file = TestFile::new(1000);
    let holder = std::fs::File::options().read(true).write(true).open(&file.path).unwrap();
    let control = |command, value: libc::c_int| {
        // SAFETY: both commands take a number.
        let done = unsafe { libc::fcntl(holder.as_raw_fd(), command, value) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    };
    // A signal that is ignored, where the default would end the process.
    control(F_SETSIG, libc::SIGURG);
    control(libc::F_SETLEASE, libc::F_WRLCK);
    thread::scope(|scope| {
        let opening = scope.spawn(|| hoistway::read::ReadFile::open(&file.path).map(|open| open.len()));
        thread::sleep(Duration::from_millis(50));
        assert!(!opening.is_finished());
        control(libc::F_SETLEASE, libc::F_UNLCK);
        assert_eq!(opening.join().unwrap().unwrap(), 1000);
    });
}

/// Devices are tested in `reader_device`; this is what can be wrong before one is asked.
#[test]
fn a_device_without_addresses_fails_its_read_alone() {
    let file = TestFile::new(1 << 20);
    let reader = reader(Route::Auto, DirectIo::Auto, no_faults());
    let open = file.open();
    // SAFETY: nothing is written to them, as they are refused.
    let [cpu, past] =
        unsafe { [Target::device(DeviceId::Cpu, 4096), Target::device(DeviceId::Cuda(0), u64::MAX - 5)] };
    let request = |target| ReadRequest::new(&open, range(0, 100), target);
    let batch =
        reader.submit([request(cpu), request(past), request(Target::memory())], Priority::Demand).unwrap();
    for read in [0, 1] {
        let error = batch.wait_read(read, LONG).error().unwrap();
        assert!(matches!(error, Error::InvalidOption { option: "device", .. }), "{error:?}");
    }
    assert!(batch.wait_read(2, LONG).error().is_none() && batch.take(2).is_some());
}
