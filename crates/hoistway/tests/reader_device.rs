//! Readers to devices of every kind: any address, faults of the device, what is left there. On the stand-in driver and on
//! the device that only copies; the suite `reader_faults` reads to both too.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    Footprint, assert_nothing_left,
    on_device::{Devices, Fault, Played, chunky, disk, start_threads_that_stay},
    reading::{
        Kind, LONG, Place, TestFile, assert_all_hold, lanes, no_faults, prepare, range, reader, submit, until,
    },
    stand_in::{STAND_IN, Vendor},
};
use hoistway::{
    Carrier, DirectIo, Error, Route,
    read::{Priority, ReadRequest, Reader, ReaderOptions, Target},
    route::fault::FaultScript,
};
use hoistway_device::Device;
use std::{sync::mpsc, thread, time::Duration};

const LEN: u64 = 1_200_003;

/// Ranges of any length at addresses of any kind.
fn on_device(played: Played) -> Vec<Place> {
    let ranges = [(0, 1), (4095, 2), (8192, 16384), (70_001, 300_000), (LEN - 77_777, 77_777)];
    let starts = [0, 1, 4, 511, 4095];
    ranges
        .iter()
        .zip(starts)
        .map(|(bytes, start)| Place::new(Kind::Device(played.device(0), start), range(bytes.0, bytes.1)))
        .collect()
}

#[test]
fn bytes_arrive_at_any_address_by_every_route() {
    let devices = Devices::take();
    let file = TestFile::new(LEN as usize);
    for played in devices.each() {
        for (route, direct, warm) in lanes() {
            for delay in [Duration::ZERO, Duration::from_micros(300)] {
                played.delay(delay);
                let _warm = prepare(&file, warm);
                let (reader, mut places) = (reader(route, direct, no_faults()), on_device(played));
                let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
                batch.wait().unwrap();
                assert_all_hold(&file, &places, &batch);
                let report = batch.report();
                assert_eq!(
                    (report.delivered_bytes, report.staged_bytes),
                    (report.bytes, report.bytes),
                    "{report}"
                );
                // Past the host or by pinned memory, and only where the route chooses and the device can.
                let by_way = |carrier: &Carrier| carrier.via == Some(Route::Staged);
                let may_be_direct = route == Route::Auto && played == Played::Cuda;
                let past_host =
                    |carrier: &Carrier| may_be_direct && carrier.route == Route::Gds && carrier.via.is_none();
                assert!(
                    report.carriers.iter().all(|carrier| by_way(carrier) || past_host(carrier)),
                    "{report}"
                );
                assert!(report.carriers.iter().any(by_way), "the last block of the file at least\n{report}");
                assert!(report.to_string().contains(", staged "), "{report}");
            }
        }
    }
}

#[test]
fn scratch_memory_is_one_chunk_whatever_is_read() {
    let devices = Devices::take();
    let file = TestFile::new(LEN as usize);
    for played in devices.each() {
        let open = Device::open(played.device(1)).unwrap();
        let (before, reader) = (played.device_bytes(), reader(Route::Threads, DirectIo::Auto, no_faults()));
        for range in [range(0, LEN), range(5, LEN - 7), range(LEN - 1, 1)] {
            let request = ReadRequest::new(&file.open(), range, Target::scratch(played.device(1)));
            let batch = reader.submit([request], Priority::Demand).unwrap();
            batch.wait().unwrap();
            let report = batch.report();
            assert_eq!((report.delivered_bytes, report.staged_bytes), (range.len(), range.len()), "{report}");
            assert!(report.carriers.iter().all(|carrier| carrier.via == Some(Route::Staged)), "{report}");
            assert_eq!(played.device_bytes() - before, reader.options().chunk_bytes);
        }
        drop((reader, open));
        devices.assert_nothing_left("scratch memory");
    }
}

#[test]
fn a_route_past_the_host_reads_nothing_to_it() {
    let _devices = Devices::take();
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
    let devices = Devices::take();
    let file = TestFile::new(LEN as usize);
    let (reader, open) = (reader(Route::Auto, DirectIo::Auto, no_faults()), file.open());
    for played in devices.each() {
        // SAFETY: there is no such device, so nothing is written.
        let nowhere = unsafe { Target::device(played.device(9), 4096) };
        let kinds = [Kind::Device(played.device(0), 7), Kind::Host(3)];
        let mut good = kinds.map(|kind| Place::new(kind, range(5, 90_000)));
        let [device, host] = &mut good;
        let requests =
            [device.request(&open), host.request(&open), ReadRequest::new(&open, range(0, 10), nowhere)];
        let batch = reader.submit(requests, Priority::Prefetch).unwrap();
        match batch.wait().unwrap_err() {
            Error::DeviceUnavailable { device, why } => {
                assert_eq!(*device, played.device(9).to_string());
                assert!(why.fix.contains("choose another device"), "{why}");
            }
            other => panic!("{other:?}"),
        }
        assert_all_hold(&file, &good, &batch);
        assert_eq!((batch.report().delivered, batch.report().failed), (2, 1));
    }
}

/// What a device fails at.
#[derive(Debug)]
enum Harm {
    Any(Fault, Option<u64>),
    /// A function of a driver, by CUDA's name.
    Driver(&'static str),
}

/// The device is gone, as after a reset by the program. At which call of a read or between them that is found depends on the time, so
/// that all reads may succeed.
const GONE: &str = "cuCtxPushCurrent_v2:9=201";

/// A driver makes one call at a time: while another thread pins a window, copies are left to it, of readers that go meanwhile too.
#[test]
fn copies_that_are_left_to_another_thread_arrive_or_fail_before_their_reader_has_gone() {
    let devices = Devices::take();
    let file = TestFile::new(LEN as usize);
    for played in devices.each() {
        for fault in [None, Some(Fault::Queue), Some(Fault::Mark)] {
            for goes in [false, true] {
                let device = Device::open(played.device(0)).unwrap();
                let reader = reader(Route::Staged, DirectIo::Auto, no_faults());
                let mut places = on_device(played);
                // Its memory is pinned from now on.
                submit(&reader, &file.open(), &mut places, Priority::Demand).wait().unwrap();
                let mut places = on_device(played);
                let (tells, hears) = mpsc::channel();
                let batch = device.make_long_calls(|| {
                    fault.into_iter().for_each(|fault| played.fail(fault, Some(1)));
                    let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
                    thread::spawn(move || tells.send((!goes).then_some(reader)));
                    batch
                });
                let reader = hears.recv_timeout(LONG).unwrap();
                let patience = if goes { Duration::ZERO } else { LONG };
                let outcome = batch.wait_within(patience).expect("no read outlives its reader");
                drop(reader);
                played.reset();
                match outcome {
                    Ok(()) => assert_all_hold(&file, &places, &batch),
                    Err(error) => assert!(goes || fault.is_some(), "{fault:?}: {error}"),
                }
            }
        }
    }
}

/// Each fault of the device, at each place where it can happen: reads to it fail with a typed error or deliver, others
/// deliver, and nothing is left.
#[test]
fn faults_of_the_device_fail_reads_to_it_alone_and_leave_nothing() {
    let devices = Devices::take();
    let directory = disk();
    start_threads_that_stay(&chunky(directory.path()).0);
    let file = TestFile::new(LEN as usize);
    let faults = [
        (Fault::MakeStream, Some(1)),
        (Fault::PinLimit, None),
        (Fault::PinLimit, Some(1)),
        (Fault::Pin, None),
        (Fault::Mark, Some(2)),
        (Fault::Queue, Some(1)),
        (Fault::Lose, Some(2)),
        (Fault::Copy, Some(1)),
        (Fault::Copy, Some(4)),
        (Fault::Copy, None),
    ]
    .map(|(fault, nth)| Harm::Any(fault, nth));
    let of_drivers =
        ["cuEventRecord:3=2", "cuMemcpyHtoDAsync_v2:*=719", GONE, "copy:*=710"].map(Harm::Driver);
    let before = Footprint::now();
    for played in devices.each() {
        let of_vendor = if played.vendor().is_some() { &of_drivers[..] } else { &[] };
        for harm in faults.iter().chain(of_vendor) {
            for warm in [false, true] {
                let _warm = prepare(&file, warm);
                let mut places = on_device(played);
                places.push(Place::new(Kind::Memory, range(3, 500_000)));
                played.delay(Duration::from_micros(200));
                match (harm, played.vendor()) {
                    (Harm::Driver(fault), Some(vendor)) => STAND_IN.set(&vendor.faults(fault)),
                    (Harm::Driver(fault), None) => panic!("{fault} is a driver's"),
                    (Harm::Any(fault, nth), _) => played.fail(*fault, *nth),
                }
                let reader = reader(Route::Staged, DirectIo::Auto, no_faults());
                let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
                let outcome = batch.wait_within(LONG).expect("it ends");
                let may_succeed = matches!(harm, Harm::Driver(GONE) | Harm::Any(Fault::PinLimit, Some(_)));
                assert!(outcome.is_err() || may_succeed, "{harm:?}");
                played.reset();
                let memory = places.pop().unwrap();
                memory.assert_holds(file.bytes_of(memory.range), &batch, places.len());
                let mut failed = 0;
                for (read, place) in places.iter().enumerate() {
                    match batch.status(read).error() {
                        None => {
                            // Memory of a toy that is lost cannot be looked at.
                            if played.vendor().is_some() {
                                place.assert_holds(file.bytes_of(place.range), &batch, read);
                            }
                            continue;
                        }
                        Some(error @ Error::Device { device, source, .. }) => {
                            assert!(*device == played.device(0).to_string() && source.code > 0, "{error}");
                        }
                        Some(Error::Allocation { kind: "pinned memory", .. }) => {
                            assert!(matches!(harm, Harm::Any(Fault::PinLimit, _)), "{harm:?}");
                        }
                        Some(other) => panic!("{harm:?}: {other:?}"),
                    }
                    failed += 1;
                }
                let report = batch.report();
                assert_eq!(
                    (report.failed, report.delivered),
                    (failed, places.len() + 1 - failed),
                    "{report}"
                );
                let says_so = report.notes.iter().any(|note| note.contains("of staging memory were pinned"));
                assert_eq!(
                    says_so,
                    matches!(harm, Harm::Any(Fault::PinLimit, Some(1))),
                    "{harm:?}: {report}"
                );
                drop(batch);
                drop(reader);
                drop(places);
                assert_nothing_left(&before);
            }
        }
        // The next reader starts afresh.
        let mut places = on_device(played);
        let reader = reader(Route::Staged, DirectIo::Auto, no_faults());
        let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
        batch.wait().unwrap();
        assert_all_hold(&file, &places, &batch);
    }
}

/// Where a wait says that the device is of no use any more, nothing of it is under way, and the memory of its copies is given back.
#[test]
fn a_device_that_is_lost_uses_no_memory_that_a_reader_has_given_back() {
    let devices = Devices::take();
    let directory = disk();
    start_threads_that_stay(&chunky(directory.path()).0);
    let file = TestFile::new(LEN as usize);
    let _warm = prepare(&file, true);
    for vendor in Vendor::ALL {
        let place = || [Place::new(Kind::Device(vendor.device(0), 3), range(5, 5000))];
        let reader = reader(Route::Threads, DirectIo::Auto, no_faults());
        let mut lost = place();
        // No copy ends before the settings are taken back.
        STAND_IN.set("COPY_LATENCY_US=600000000");
        let pinned = vendor.count("pinned_bytes");
        STAND_IN.configure(&vendor.faults("cuEventSynchronize:*=719"));
        let batch = submit(&reader, &file.open(), &mut lost, Priority::Demand);
        let outcome = batch.wait_within(LONG).expect("it ends");
        assert!(matches!(outcome, Err(Error::Device { source, .. }) if source.code == 719));
        drop((batch, reader));
        assert_eq!(vendor.count("pinned_bytes"), pinned, "{vendor:?}");
        STAND_IN.reset();
        drop(lost);
        let (mut places, reader) = (place(), self::reader(Route::Threads, DirectIo::Auto, no_faults()));
        let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
        batch.wait().unwrap_or_else(|error| panic!("{vendor:?}: {error}"));
        assert_all_hold(&file, &places, &batch);
    }
    drop(devices);
}

#[test]
fn a_batch_that_is_dropped_waits_for_copies_that_are_under_way() {
    let devices = Devices::take();
    let file = TestFile::new(LEN as usize);
    let _warm = prepare(&file, true);
    let reader = reader(Route::Auto, DirectIo::Auto, no_faults());
    for played in devices.each() {
        played.delay(Duration::from_millis(3));
        for cancels in [false, true] {
            let mut place = [Place::new(Kind::Device(played.device(0), 3), range(5, LEN - 5))];
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
}

#[test]
fn a_reader_that_is_dropped_ends_what_copies_it_has_begun() {
    let devices = Devices::take();
    let directory = disk();
    start_threads_that_stay(&chunky(directory.path()).0);
    let file = TestFile::new(LEN as usize);
    let before = Footprint::now();
    for played in devices.each() {
        for (route, direct, warm) in lanes() {
            let _warm = prepare(&file, warm);
            played.delay(Duration::from_millis(1));
            let (reader, mut places) = (reader(route, direct, no_faults()), on_device(played));
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
    }
    assert_nothing_left(&before);
}

#[test]
fn short_copies_that_come_while_others_are_under_way_are_waited_for_together() {
    let devices = Devices::take();
    let file = TestFile::new(LEN as usize);
    let _warm = prepare(&file, true);
    for vendor in Vendor::ALL {
        let waits = move || STAND_IN.count(&format!("calls.{}", vendor.symbol("cuEventSynchronize")));
        let before = waits();
        // The first is waited for before another is handed over.
        let script = FaultScript::new(move |number, _| {
            if number > 0 {
                until("the first is waited for", || waits() > before);
            }
            None
        });
        // One thread makes the reads, and there is a slot for each.
        let options = ReaderOptions::default().route(Route::Threads).in_flight(1).chunk_bytes(64 << 10);
        let reader = Reader::new(&options.faults(script.clone())).unwrap();
        let place = |number: u64| Place::new(Kind::Device(vendor.device(0), 3), range(number * 50_000, 5000));
        let mut places: Vec<Place> = (0..5).map(place).collect();
        // No copy ends before the settings are taken back.
        STAND_IN.configure("COPY_LATENCY_US=600000000");
        let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
        // Those before the last have been handed over then.
        until("the last read to begin", || script.reads() == 5);
        STAND_IN.reset();
        batch.wait().unwrap();
        let waits = waits() - before;
        assert_all_hold(&file, &places, &batch);
        assert!(waits <= 3, "{vendor:?}: {waits}: for the first, for three, and for the last");
    }
    drop(devices);
}
