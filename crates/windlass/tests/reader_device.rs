//! Readers to a device: any address, faults of the driver, what is left there. On the stand-in driver; the suite
//! `reader_faults` reads to it too.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    Footprint, assert_nothing_left,
    on_device::{chunky, disk, start_threads_that_stay},
    reading::{
        Kind, LONG, Place, TestFile, assert_all_hold, lanes, no_faults, prepare, range, reader, submit, until,
    },
    stand_in::Turn,
};
use std::{thread, time::Duration};
use windlass::{
    Carrier, DeviceId, DirectIo, Error, Route,
    read::{Priority, ReadRequest, Target},
};

const LEN: u64 = 1_200_003;

/// Ranges of any length at addresses of any kind.
fn on_device() -> Vec<Place> {
    let ranges = [(0, 1), (4095, 2), (8192, 16384), (70_001, 300_000), (LEN - 77_777, 77_777)];
    let starts = [0, 1, 4, 511, 4095];
    ranges
        .iter()
        .zip(starts)
        .map(|(own, start)| Place::new(Kind::Device(start), range(own.0, own.1)))
        .collect()
}

#[test]
fn bytes_arrive_at_any_address_by_every_route() {
    let stand_in = Turn::take();
    let file = TestFile::new(LEN as usize);
    for (route, direct, warm) in lanes() {
        for settings in ["COPY_LATENCY_US=300", "JITTER_US=300"] {
            stand_in.reset();
            stand_in.set(settings);
            let _warm = prepare(&file, warm);
            let (reader, mut places) = (reader(route, direct, no_faults()), on_device());
            let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
            batch.wait().unwrap();
            assert_all_hold(&file, &places, &batch);
            let report = batch.report();
            assert_eq!(
                (report.delivered_bytes, report.staged_bytes),
                (report.bytes, report.bytes),
                "{report}"
            );
            // Past the host or by pinned memory, and only where the route chooses.
            let by_way = |own: &Carrier| own.via == Some(Route::Staged);
            let past_host =
                |own: &Carrier| route == Route::Auto && own.route == Route::Gds && own.via.is_none();
            assert!(report.carriers.iter().all(|own| by_way(own) || past_host(own)), "{report}");
            assert!(report.carriers.iter().any(by_way), "the last block of the file at least\n{report}");
            assert!(report.to_string().contains(", staged "), "{report}");
        }
    }
}

#[test]
fn scratch_memory_is_one_chunk_whatever_is_read() {
    let stand_in = Turn::take();
    let file = TestFile::new(LEN as usize);
    let (before, reader) =
        (stand_in.count("device_bytes"), reader(Route::Threads, DirectIo::Auto, no_faults()));
    for range in [range(0, LEN), range(5, LEN - 7), range(LEN - 1, 1)] {
        let request = ReadRequest::new(&file.open(), range, Target::scratch(DeviceId::Cuda(1)));
        let batch = reader.submit([request], Priority::Demand).unwrap();
        batch.wait().unwrap();
        let report = batch.report();
        assert_eq!((report.delivered_bytes, report.staged_bytes), (range.len(), range.len()), "{report}");
        assert!(report.carriers.iter().all(|own| own.via == Some(Route::Staged)), "{report}");
        assert_eq!(stand_in.count("device_bytes") - before, reader.options().chunk_bytes);
    }
    drop(reader);
    stand_in.assert_nothing_left("scratch memory");
}

#[test]
fn a_route_past_the_host_reads_nothing_to_it() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    for route in [Route::Gds, Route::GdsCompat] {
        let reader = reader(route, DirectIo::Auto, no_faults());
        let request = ReadRequest::new(&file.open(), range(0, 5000), Target::memory());
        let batch = reader.submit([request], Priority::Demand).unwrap();
        let error = batch.wait().unwrap_err();
        assert!(matches!(error, Error::RouteUnavailable { route: named, .. } if *named == route), "{error}");
    }
}

#[test]
fn a_device_that_does_not_exist_fails_its_read_alone() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    let (reader, open) = (reader(Route::Auto, DirectIo::Auto, no_faults()), file.open());
    // SAFETY: there is no such device, so nothing is written.
    let nowhere = unsafe { Target::device(DeviceId::Cuda(9), 4096) };
    let mut good =
        [Place::new(Kind::Device(7), range(5, 90_000)), Place::new(Kind::Host(3), range(5, 90_000))];
    let [device, host] = &mut good;
    let requests =
        [device.request(&open), host.request(&open), ReadRequest::new(&open, range(0, 10), nowhere)];
    let batch = reader.submit(requests, Priority::Prefetch).unwrap();
    match batch.wait().unwrap_err() {
        Error::DeviceUnavailable { device, why } => {
            assert_eq!(device, "cuda:9");
            assert!(why.fix.contains("CUDA_VISIBLE_DEVICES"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    assert_all_hold(&file, &good, &batch);
    assert_eq!((batch.report().delivered, batch.report().failed), (2, 1));
}

/// Each fault of the driver, at each place where it can happen: reads to the device fail with a typed error or deliver,
/// others deliver, and nothing is left.
#[test]
fn faults_of_the_driver_fail_reads_to_the_device_alone_and_leave_nothing() {
    let stand_in = Turn::take();
    let directory = disk();
    start_threads_that_stay(&chunky(directory.path()).0);
    let file = TestFile::new(LEN as usize);
    let faults = [
        ("cuStreamCreate:1=2", true),
        ("cuMemHostRegister_v2:*=2", true),
        ("cuMemHostRegister_v2:*=801", true),
        ("cuMemHostRegister_v2:2=2", true),
        ("cuEventCreate:3=2", true),
        ("cuEventRecord:2=700", true),
        ("cuMemcpyHtoDAsync_v2:3=719", true),
        ("cuMemcpyHtoDAsync_v2:1=1", true),
        ("cuEventSynchronize:2=719", true),
        ("cuCtxPushCurrent_v2:9=201", false),
        ("copy:1=700", true),
        ("copy:4=719", true),
        ("copy:*=714", true),
    ];
    let before = Footprint::now();
    for (fault, is_certain) in faults {
        for warm in [false, true] {
            let _warm = prepare(&file, warm);
            let mut places = on_device();
            places.push(Place::new(Kind::Memory, range(3, 500_000)));
            stand_in.set("JITTER_US=200");
            stand_in.set(&format!("FAULTS={fault}"));
            let reader = reader(Route::Staged, DirectIo::Auto, no_faults());
            let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
            let outcome = batch.wait_within(LONG).expect(fault);
            assert!(outcome.is_err() || !is_certain, "{fault}");
            stand_in.reset();
            let memory = places.pop().unwrap();
            memory.assert_holds(file.bytes_of(memory.range), &batch, places.len());
            let mut failed = 0;
            for read in 0..places.len() {
                match batch.status(read).error() {
                    None => continue,
                    Some(error @ Error::Device { device, source, .. }) => {
                        assert!(device == "cuda:0" && source.code > 0, "{error}");
                    }
                    Some(Error::Allocation { kind: "pinned memory", .. }) => {
                        assert!(fault.starts_with("cuMemHostRegister"), "{fault}");
                    }
                    Some(other) => panic!("{fault}: {other:?}"),
                }
                failed += 1;
            }
            let report = batch.report();
            assert_eq!((report.failed, report.delivered), (failed, places.len() + 1 - failed), "{report}");
            drop(batch);
            drop(reader);
            drop(places);
            assert_nothing_left(&before);
        }
    }
    // The next reader starts afresh.
    let mut places = on_device();
    let reader = reader(Route::Staged, DirectIo::Auto, no_faults());
    let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
    batch.wait().unwrap();
    assert_all_hold(&file, &places, &batch);
}

#[test]
fn a_batch_that_is_dropped_waits_for_copies_that_are_under_way() {
    let stand_in = Turn::take();
    let file = TestFile::new(LEN as usize);
    let _warm = prepare(&file, true);
    stand_in.set("COPY_LATENCY_US=3000");
    let reader = reader(Route::Auto, DirectIo::Auto, no_faults());
    for cancels in [false, true] {
        let mut place = [Place::new(Kind::Device(3), range(5, LEN - 5))];
        let batch = submit(&reader, &file.open(), &mut place, Priority::Demand);
        until("copies arrive", || batch.bytes_done() > 0);
        if cancels {
            batch.cancel();
            assert!(batch.wait_within(LONG).is_some());
        }
        drop(batch);
        let before = place[0].device_bytes();
        thread::sleep(Duration::from_millis(30));
        assert!(place[0].device_bytes() == before, "memory that was given back is written");
    }
}

#[test]
fn a_reader_that_is_dropped_ends_what_copies_it_has_begun() {
    let stand_in = Turn::take();
    let directory = disk();
    start_threads_that_stay(&chunky(directory.path()).0);
    let file = TestFile::new(LEN as usize);
    let before = Footprint::now();
    for (route, direct, warm) in lanes() {
        let _warm = prepare(&file, warm);
        stand_in.set("COPY_LATENCY_US=1000");
        let (reader, mut places) = (reader(route, direct, no_faults()), on_device());
        let batch = submit(&reader, &file.open(), &mut places, Priority::Prefetch);
        until("copies arrive", || batch.bytes_done() > 0);
        drop(reader);
        assert_eq!(batch.ended(), batch.len());
        for (read, place) in places.iter().enumerate() {
            match batch.status(read).error() {
                None => place.assert_holds(file.bytes_of(place.range), &batch, read),
                Some(error) => assert!(matches!(error, Error::Cancelled), "{error:?}"),
            }
        }
    }
    assert_nothing_left(&before);
}
