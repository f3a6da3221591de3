//! Faults while a load runs: the right error in time, or the right bytes, and nothing left behind.

use crate::{
    Model, by,
    common::{Footprint, assert_is_file, assert_nothing_left, devices, reading::until},
    fixture::{PATIENCE, eventually},
    reading, ways,
};
use hoistway::{
    Arrival, ByteRange, Checkpoint, DeviceId, Error, LoadOptions, Route, UsrbioClient,
    plan::Layout,
    read::{Priority, ReadFile, ReadRequest, Reader, Target},
    route::fault::{Fault, FaultScript},
};
use std::{
    collections::BTreeSet,
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use usrbiod::Faults;

/// What a process may leave in shared memory.
pub(crate) fn shared_memory() -> BTreeSet<PathBuf> {
    let names = fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().path());
    names.filter(|path| path.to_string_lossy().contains("hf3fs-iov")).collect()
}

/// Fails unless names that were not there `before` go. Those of other processes do, too.
pub(crate) fn assert_shared_memory_is_gone(before: &BTreeSet<PathBuf>) {
    eventually("that shared memory has no name", || shared_memory().is_subset(before));
}

/// Loads in small reads, and checks that nothing is left behind, here and with the daemon.
fn load(model: &Model, options: &LoadOptions) -> hoistway::Result<()> {
    let options = options.clone().chunk_bytes(64 << 10);
    let before = (footprint(model, &options), shared_memory());
    let outcome = model.load(&options).map(|loaded| assert_is_file(&loaded, &model.file));
    assert_nothing_left(&before.0);
    assert_shared_memory_is_gone(&before.1);
    eventually("that the daemon has no registrations", || {
        model.fixture.daemon.registrations().unwrap().is_empty()
    });
    outcome
}

/// What this process has, the vendor's library being in use: it keeps a handle of each mount that it has met.
fn footprint(model: &Model, options: &LoadOptions) -> Footprint {
    if options.usrbio == UsrbioClient::Vendor {
        let _ = model.load(&options.clone().faults(FaultScript::new(|_, _| None)));
    }
    Footprint::now()
}

#[test]
fn short_reads_of_the_daemon_are_continued() {
    let Some(model) = Model::start() else { return };
    // So few in flight that what goes on is not cut short again.
    model.fixture.daemon.behave(Faults { short_every: 20, ..Faults::default() }).unwrap();
    for way in ways() {
        let before = model.fixture.daemon.transfers().unwrap();
        load(&model, &way.in_flight_bytes(256 << 10).rings(1)).unwrap();
        assert!(
            model.fixture.daemon.transfers().unwrap() > before + model.file.len() as u64 / (64 << 10) + 3
        );
    }
}

#[test]
fn whatever_order_reads_end_in_the_bytes_are_right() {
    let Some(model) = Model::start() else { return };
    let faults =
        Faults { reorder: true, slow_every: 5, delay: Duration::from_micros(200), ..Faults::default() };
    model.fixture.daemon.behave(faults).unwrap();
    for way in ways() {
        load(&model, &way).unwrap();
    }
}

#[test]
fn short_reads_and_interruptions_of_the_lane_are_gone_on_with() {
    let Some(model) = Model::start() else { return };
    for way in ways() {
        for layout in [Layout::File, Layout::Packed] {
            for fault in [Fault::Short(1), Fault::Short(5000), Fault::Interrupted] {
                let script = FaultScript::new(move |number, _| (number % 3 == 0).then(|| fault.clone()));
                load(&model, &way.clone().layout(layout).faults(script)).unwrap();
            }
        }
    }
}

#[test]
fn errors_of_the_storage_name_file_tensor_and_offset() {
    let Some(model) = Model::start() else { return };
    for way in ways() {
        // The first is the probe.
        model.fixture.daemon.behave(Faults { error_every: 5, ..Faults::default() }).unwrap();
        let error = load(&model, &way).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EREMOTEIO), "{error:?}");
        assert!(error.to_string().contains("a storage server failed"), "{error}");
        let Error::Io { path, tensor: Some(_), range: Some(_), .. } = error else { panic!("{error:?}") };
        assert_eq!(path, model.path);
    }
}

/// Enough to complete the small tensors, which come first.
const READS_BEFORE_HARM: u64 = 24;

/// Starts a load, waits for its first tensor, does `harm`, and returns the error that comes of it.
fn harmed(model: &mut Model, way: &LoadOptions, harm: impl FnOnce(&mut Model)) -> Error {
    let faults = Faults { delay: Duration::from_millis(5), ..Faults::default() };
    model.fixture.daemon.behave(faults).unwrap();
    let before = (footprint(model, way), shared_memory());
    let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
    // However late the harm comes, most of the file is left to read.
    let is_harmed = Arc::new(AtomicBool::new(false));
    let gate = is_harmed.clone();
    let script = FaultScript::new(move |number, _| {
        if number >= READS_BEFORE_HARM {
            until("the harm is done", || gate.load(Ordering::Relaxed));
        }
        None
    });
    let options = way.clone().chunk_bytes(64 << 10).in_flight_bytes(256 << 10).faults(script);
    let mut loading = checkpoint.start(&options).unwrap();
    // The first has no bytes, and is complete at once.
    for _ in 0..3 {
        assert!(matches!(loading.next_within(PATIENCE).unwrap(), Arrival::Tensor(_)));
    }
    harm(model);
    is_harmed.store(true, Ordering::Relaxed);
    let since = Instant::now();
    let error = loading.find_map(Result::err).expect("the load went on");
    assert!(since.elapsed() < PATIENCE, "it took {:?} to say: {error}", since.elapsed());
    drop((loading, checkpoint));
    let is_dead = error.to_string().contains("is dead");
    // The vendor's library cannot be told that a file is closed when its daemon is dead, so it stays open.
    if !(is_dead && way.usrbio == UsrbioClient::Vendor) {
        assert_nothing_left(&before.0);
    }
    assert_shared_memory_is_gone(&before.1);
    error
}

#[test]
fn a_daemon_that_dies_ends_the_load_and_the_next_mount_serves() {
    let Some(mut model) = Model::start() else { return };
    for way in ways() {
        let error = harmed(&mut model, &way, |model| model.fixture.daemon.kill().unwrap());
        let Error::Io { path, tensor: Some(_), range: Some(_), source, .. } = &error else {
            panic!("{error:?}")
        };
        assert_eq!(*path, model.path);
        // The ring may notice first, or the look at the file after a read.
        assert!(source.to_string().contains("is dead"), "{error}");
        model.fixture.start_again();
        load(&model, &way).unwrap();
    }
}

#[test]
fn a_daemon_that_is_restarted_ends_the_load_and_serves_the_next() {
    let Some(mut model) = Model::start() else { return };
    for way in ways() {
        let error = harmed(&mut model, &way, |model| model.fixture.daemon.restart().unwrap());
        let Error::Io { path, tensor: Some(_), range: Some(_), source, .. } = &error else {
            panic!("{error:?}")
        };
        assert_eq!(*path, model.path);
        // Either it is seen to be another, or the other does not know the memory.
        let is_told = ["restarted", "does not know this buffer", "registration"];
        assert!(is_told.iter().any(|text| source.to_string().contains(text)), "{error}");
        load(&model, &way).unwrap();
    }
}

#[test]
fn a_checkpoint_outlives_a_restart_of_the_daemon() {
    let Some(model) = Model::start() else { return };
    let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
    for way in ways() {
        assert_is_file(&checkpoint.load(&way).unwrap(), &model.file);
        model.fixture.daemon.restart().unwrap();
        assert_is_file(&checkpoint.load(&way).unwrap(), &model.file);
    }
}

#[test]
fn a_file_that_is_cut_short_is_said_to_be() {
    let Some(mut model) = Model::start() else { return };
    let whole = model.file.clone();
    for way in ways() {
        let error = harmed(&mut model, &way, |model| {
            let file = fs::OpenOptions::new().write(true).open(model.fixture.behind("mixed.safetensors"));
            file.unwrap().set_len(1 << 20).unwrap();
        });
        // Whichever bytes are looked at first: those that are gone, or those that are not.
        let (Error::Truncated { path, tensor: Some(_), .. } | Error::Changed { path, tensor: Some(_), .. }) =
            &error
        else {
            panic!("{error:?}")
        };
        assert_eq!(*path, model.path);
        fs::write(model.fixture.behind("mixed.safetensors"), &whole).unwrap();
    }
}

#[test]
fn cancelling_does_not_wait_for_a_daemon_that_hangs() {
    let Some(model) = Model::start() else { return };
    for device in devices() {
        for client in [UsrbioClient::Native, UsrbioClient::Vendor] {
            model.fixture.daemon.behave(Faults::default()).unwrap();
            let options = by(Route::Usrbio, client, device);
            let before = (footprint(&model, &options), shared_memory());
            let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
            // Proves the mount while the daemon works.
            drop(checkpoint.load(&options).unwrap());
            model.fixture.daemon.behave(Faults { stall: true, ..Faults::default() }).unwrap();
            let mut loading = checkpoint.start(&options).unwrap();
            let since = Instant::now();
            loading.cancel();
            drop((loading, checkpoint));
            assert!(since.elapsed() < PATIENCE, "it took {:?}", since.elapsed());
            assert_nothing_left(&before.0);
            assert_shared_memory_is_gone(&before.1);
        }
    }
}

#[test]
fn a_daemon_that_is_lost_is_not_asked_about_files() {
    let Some(model) = Model::start() else { return };
    for way in ways() {
        model.fixture.daemon.behave(Faults::default()).unwrap();
        let before = (footprint(&model, &way), shared_memory());
        let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
        drop(checkpoint.load(&way).unwrap());
        model.fixture.daemon.behave(Faults { stall: true, ..Faults::default() }).unwrap();
        let mut loading = checkpoint.start(&way).unwrap();
        // Until then it may ask about files before it reads.
        eventually("that reads are under way", || model.fixture.daemon.transfers().unwrap() > 0);
        model.fixture.daemon.behave(Faults { stall: true, mute: true, ..Faults::default() }).unwrap();
        model.fixture.daemon.restart().unwrap();
        let error = loading.find_map(Result::err).expect("the load went on");
        // Had it asked, it would say that there is no answer.
        let Error::Io { source, .. } = &error else { panic!("{error:?}") };
        assert!(source.to_string().contains("restarted"), "{error}");
        // Nor does a thread wait for it to close them.
        let since = Instant::now();
        drop((loading, checkpoint));
        assert!(since.elapsed() < PATIENCE, "it took {:?}", since.elapsed());
        model.fixture.daemon.behave(Faults::default()).unwrap();
        assert_nothing_left(&before.0);
        assert_shared_memory_is_gone(&before.1);
    }
}

#[test]
fn a_read_that_the_daemon_never_answers_fails_in_time() {
    let Some(model) = Model::start() else { return };
    let options = by(Route::Usrbio, UsrbioClient::Native, DeviceId::Cpu);
    let before = (Footprint::now(), shared_memory());
    let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
    drop(checkpoint.load(&options).unwrap());
    let reader = Reader::new(&reading::options(UsrbioClient::Native)).unwrap();
    let file = ReadFile::open(&model.path).unwrap();
    let read = || {
        let whole = ByteRange::at(0, file.len()).unwrap();
        reader.submit([ReadRequest::new(&file, whole, Target::memory())], Priority::Demand).unwrap()
    };
    read().wait().unwrap();

    model.fixture.daemon.behave(Faults { stall: true, ..Faults::default() }).unwrap();
    let batch = read();
    eventually("that the reader reads", || model.fixture.daemon.transfers().unwrap() > 0);
    let mut loading = checkpoint.start(&options).unwrap();
    eventually("that the load reads, too", || {
        model.fixture.daemon.transfers().unwrap() > reading::IN_FLIGHT as u64
    });
    model.fixture.daemon.behave(Faults { mute: true, ..Faults::default() }).unwrap();
    let load = loading.find_map(Result::err).expect("the load went on");
    let first = batch.wait_within(PATIENCE).expect("the read went on").unwrap_err().to_string();
    for error in [load.to_string(), first, read().wait().unwrap_err().to_string()] {
        assert!(error.contains("asking about a file") && error.contains("hangs"), "{error}");
    }
    let since = Instant::now();
    drop((loading, checkpoint, batch, reader, file));
    assert!(since.elapsed() < PATIENCE, "it took {:?}", since.elapsed());
    model.fixture.daemon.behave(Faults::default()).unwrap();
    assert_nothing_left(&before.0);
    assert_shared_memory_is_gone(&before.1);
}

#[test]
fn an_error_of_one_ring_ends_those_that_wait_for_others() {
    let Some(model) = Model::start() else { return };
    let failed = Arc::new(AtomicBool::new(false));
    for way in ways() {
        let first = failed.clone();
        first.store(false, Ordering::Relaxed);
        let script = FaultScript::new(move |number, _| {
            (number > 20 && !first.swap(true, Ordering::Relaxed)).then_some(Fault::Broken)
        });
        let options = way.rings(4).in_flight_bytes(1 << 20).faults(script);
        let error = load(&model, &options).unwrap_err();
        assert_eq!(error.errno(), Fault::Broken.errno(), "{error:?}");
    }
}
