//! Readers from a 3FS to a device: through memory that is shared with the daemon and pinned for the device, and past the
//! host by cuFile.

use crate::{
    Model,
    common::{
        Footprint, assert_is_file, assert_nothing_left,
        on_device::CUDA,
        reading::{Kind, Place, range, submit, until},
        stand_in::{STAND_IN, Vendor},
    },
    failing::{assert_shared_memory_is_gone, shared_memory},
    fixture::{PATIENCE, eventually, pattern},
    reading,
};
use hoistway::{
    Error, LoadOptions, Route, UsrbioClient,
    read::{Batch, BatchReport, Priority, ReadFile, Reader, ReaderOptions},
    route::{Access, fault::FaultScript},
};
use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};
use usrbiod::Faults;

const LEN: u64 = 1_200_003;
/// The bytes of the last block, which is cut short.
const TAIL: u64 = LEN % 4096;

/// A file on the mount, and a stand-in of a device to oneself.
struct Setup {
    model: Model,
    path: PathBuf,
}

impl Setup {
    #[track_caller]
    fn start() -> Option<Self> {
        let model = Model::start()?;
        STAND_IN.reset();
        let path = model.fixture.write("file", LEN as usize);
        Some(Self { model, path })
    }

    fn open(&self) -> ReadFile {
        ReadFile::open(&self.path).unwrap()
    }

    /// Reads all places by a new reader, and fails unless they hold their bytes.
    fn read(&self, options: &ReaderOptions) -> BatchReport {
        let (reader, mut places) = (Reader::new(options).unwrap(), places());
        let batch = submit(&reader, &self.open(), &mut places, Priority::Demand);
        batch.wait_within(PATIENCE).expect("it ends").unwrap_or_else(|error| panic!("{options:?}: {error}"));
        assert_hold(&places, &batch);
        batch.report()
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        STAND_IN.reset();
    }
}

fn by_usrbio() -> [ReaderOptions; 2] {
    [UsrbioClient::Native, UsrbioClient::Vendor].map(reading::options)
}

fn past_host() -> [ReaderOptions; 2] {
    [Route::Gds, Route::GdsCompat].map(|route| reading::options(UsrbioClient::Native).route(route))
}

/// Ranges of any length at addresses of any kind.
fn places() -> Vec<Place> {
    let ranges = [(0, 1), (4095, 2), (8192, 16384), (70_001, 700_000), (LEN - 77_777, 77_777)];
    let starts = [0, 1, 4, 511, 4095];
    ranges
        .iter()
        .zip(starts)
        .map(|(bytes, start)| Place::new(Kind::Device(CUDA, start), range(bytes.0, bytes.1)))
        .collect()
}

fn assert_hold(places: &[Place], batch: &Batch) {
    for (read, place) in places.iter().enumerate() {
        place.assert_holds(&pattern(place.range.start(), place.range.len() as usize), batch, read);
    }
}

#[test]
fn bytes_arrive_at_any_address_by_shared_memory() {
    let Some(setup) = Setup::start() else { return };
    for settings in ["COPY_LATENCY_US=0", "COPY_LATENCY_US=3000", "JITTER_US=300"] {
        for faults in [
            Faults::default(),
            Faults { reorder: true, delay: Duration::from_micros(200), ..Faults::default() },
            // So rarely that what goes on is not cut short again.
            Faults { short_every: 20, ..Faults::default() },
        ] {
            STAND_IN.reset();
            STAND_IN.set(settings);
            setup.model.fixture.daemon.behave(faults).unwrap();
            for options in by_usrbio() {
                let report = setup.read(&options);
                assert_eq!(report.staged_bytes, report.delivered_bytes, "{report}");
                for carrier in &report.carriers {
                    let way = (carrier.route, carrier.access, carrier.via);
                    assert_eq!(way, (Route::Usrbio, Access::Direct, Some(Route::Staged)), "{report}");
                }
            }
        }
    }
}

#[test]
fn bytes_arrive_at_any_address_past_the_host() {
    let Some(setup) = Setup::start() else { return };
    for settings in ["COPY_LATENCY_US=0", "COPY_LATENCY_US=3000", "JITTER_US=300"] {
        STAND_IN.reset();
        STAND_IN.set(settings);
        for options in past_host() {
            let report = setup.read(&options);
            let bytes = |route, via| -> u64 {
                let carrier =
                    report.carriers.iter().filter(|carrier| carrier.route == route && carrier.via == via);
                carrier.map(|carrier| carrier.tensor_bytes).sum()
            };
            assert_eq!(bytes(Route::Threads, Some(Route::Staged)), TAIL, "{report}");
            assert_eq!(bytes(options.route, None), report.bytes - TAIL, "{report}");
        }
    }
    // Nothing else is asked for: the kernel reads the file.
    for route in [Route::Auto, Route::Staged] {
        let report = setup.read(&reading::options(UsrbioClient::Native).route(route));
        assert!(report.carriers.iter().all(|carrier| carrier.route != Route::Usrbio), "{report}");
    }
}

#[test]
fn loads_of_files_on_a_3fs_go_past_the_host_where_that_is_named() {
    let Some(setup) = Setup::start() else { return };
    let Model { path, file, .. } = &setup.model;
    let [_, device] = crate::common::devices();
    for route in [Route::Gds, Route::GdsCompat] {
        let options = LoadOptions::default().route(route).device(device);
        let loaded = hoistway::load(&[path], &options).unwrap();
        assert_is_file(&loaded, file);
        let report = loaded.report();
        let past_host =
            report.carriers.iter().filter(|carrier| carrier.route == route && carrier.via.is_none());
        let others = report.carriers.iter().filter(|carrier| carrier.via == Some(Route::Staged));
        let tail = others.map(|carrier| carrier.tensor_bytes).sum::<u64>();
        assert!(tail < 4096, "{report}");
        assert_eq!(
            past_host.map(|carrier| carrier.tensor_bytes).sum::<u64>() + tail,
            report.tensor_bytes,
            "{report}"
        );
    }
}

#[test]
fn faults_of_the_driver_fail_reads_and_leave_nothing_with_the_daemon() {
    let Some(setup) = Setup::start() else { return };
    let faults = [
        "cuStreamCreate:1=2",
        "cuMemHostRegister_v2:*=2",
        "cuMemHostRegister_v2:2=999",
        "cuEventRecord:3=2",
        "cuEventRecord:2=700",
        "cuMemcpyHtoDAsync_v2:3=719",
        "cuEventSynchronize:2=719",
        "copy:1=700",
        "copy:4=719",
    ];
    for options in by_usrbio() {
        // The vendor's library keeps a handle of each mount that it has met.
        setup.read(&options);
        let before = (Footprint::now(), shared_memory(), STAND_IN.leftovers());
        for fault in faults {
            let (reader, mut places) = (Reader::new(&options).unwrap(), places());
            STAND_IN.set(&Vendor::Cuda.faults(fault));
            let batch = submit(&reader, &setup.open(), &mut places, Priority::Demand);
            let error = batch.wait_within(PATIENCE).expect(fault).unwrap_err().to_string();
            STAND_IN.reset();
            for (read, place) in places.iter().enumerate() {
                match batch.status(read).error() {
                    None => place.assert_holds(
                        &pattern(place.range.start(), place.range.len() as usize),
                        &batch,
                        read,
                    ),
                    Some(Error::Device { .. } | Error::Allocation { kind: "pinned memory", .. }) => {}
                    Some(other) => panic!("{fault}: {other:?}"),
                }
            }
            drop((batch, reader, places));
            assert_nothing_left(&before.0);
            assert_shared_memory_is_gone(&before.1);
            assert_eq!(STAND_IN.leftovers(), before.2, "{fault}: {error}");
            eventually("that the daemon has no registrations", || {
                setup.model.fixture.daemon.registrations().unwrap().is_empty()
            });
        }
        setup.read(&options);
    }
}

#[test]
fn errors_of_the_storage_name_the_file_and_the_device_is_read_to_again() {
    let Some(setup) = Setup::start() else { return };
    for options in by_usrbio() {
        setup.model.fixture.daemon.behave(Faults { error_every: 4, ..Faults::default() }).unwrap();
        let (reader, mut places) = (Reader::new(&options).unwrap(), places());
        let batch = submit(&reader, &setup.open(), &mut places, Priority::Demand);
        match batch.wait_within(PATIENCE).expect("it ends").unwrap_err() {
            error @ Error::Io { path, range: Some(_), .. } => {
                assert_eq!(*path, setup.path);
                assert!(error.to_string().contains("a storage server failed"), "{error}");
            }
            other => panic!("{other:?}"),
        }
        setup.model.fixture.daemon.behave(Faults::default()).unwrap();
        setup.read(&options);
    }
}

/// While reads wait for it, and copies out of its memory are under way.
#[test]
fn a_daemon_that_dies_ends_all_reads_and_the_next_serves() {
    let Some(mut setup) = Setup::start() else { return };
    for options in by_usrbio().into_iter().chain(past_host()) {
        setup.read(&options);
        STAND_IN.set("COPY_LATENCY_US=2000");
        let before = (shared_memory(), STAND_IN.leftovers());
        let delay = Duration::from_millis(5);
        setup.model.fixture.daemon.behave(Faults { delay, ..Faults::default() }).unwrap();
        // However late the daemon dies, most of the reads are left.
        let is_dead = Arc::new(AtomicBool::new(false));
        let gate = is_dead.clone();
        let script = FaultScript::new(move |number, _| {
            if number >= 24 {
                until("the daemon is dead", || gate.load(Ordering::Relaxed));
            }
            None
        });
        let reader = Reader::new(&options.clone().faults(script)).unwrap();
        let mut places: Vec<Place> =
            (0..8).map(|start| Place::new(Kind::Device(CUDA, start), range(start as u64, LEN - 8))).collect();
        let batch = submit(&reader, &setup.open(), &mut places, Priority::Demand);
        until("copies arrive", || batch.bytes_done() > 0);
        setup.model.fixture.daemon.kill().unwrap();
        is_dead.store(true, Ordering::Relaxed);
        let outcome = batch.wait_within(PATIENCE).expect("it ends");
        let error = outcome.expect_err(&format!("{options:?}")).to_string();
        assert!(error.contains(&*setup.path.to_string_lossy()), "{error}");
        drop(batch);
        let copied: Vec<_> = places.iter().map(Place::device_bytes).collect();
        thread::sleep(Duration::from_millis(10));
        let later: Vec<_> = places.iter().map(Place::device_bytes).collect();
        assert!(copied == later, "memory that was given back is written");
        drop((reader, places));
        assert_shared_memory_is_gone(&before.0);
        assert_eq!(STAND_IN.leftovers(), before.1, "{options:?}");
        setup.model.fixture.start_again();
        STAND_IN.reset();
        setup.read(&options);
    }
}

#[test]
fn a_reader_that_is_dropped_waits_for_copies_out_of_shared_memory() {
    let Some(setup) = Setup::start() else { return };
    for options in by_usrbio().into_iter().chain(past_host()) {
        setup.read(&options);
        let before = (Footprint::now(), shared_memory());
        STAND_IN.set("COPY_LATENCY_US=1000");
        let (reader, mut places) = (Reader::new(&options).unwrap(), places());
        let batch = submit(&reader, &setup.open(), &mut places, Priority::Prefetch);
        until("copies arrive", || batch.bytes_done() > 0);
        drop(reader);
        assert_eq!(batch.ended(), batch.len());
        for (read, place) in places.iter().enumerate() {
            match batch.status(read).error() {
                None => {
                    let bytes = pattern(place.range.start(), place.range.len() as usize);
                    place.assert_holds(&bytes, &batch, read);
                }
                Some(error) => assert!(matches!(error, Error::Cancelled), "{error:?}"),
            }
        }
        drop((batch, places));
        STAND_IN.reset();
        assert_nothing_left(&before.0);
        assert_shared_memory_is_gone(&before.1);
    }
}
