//! Batches by route `usrbio`: every kind of target, both clients, files that come and go, and the daemon's death.

use crate::{
    Model, by,
    fixture::{Fixture, PATIENCE, library_path, pattern},
};
use hoistway::{
    ByteRange, Checkpoint, DeviceId, Error, Route, UsrbioClient,
    device::Device,
    read::{Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target},
};
use hoistway_device::DirectBuffer;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use std::{
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};
use usrbiod::Faults;

pub(crate) const IN_FLIGHT: usize = 6;

pub(crate) fn options(client: UsrbioClient) -> ReaderOptions {
    ReaderOptions::default()
        .route(Route::Usrbio)
        .usrbio(client)
        .usrbio_directories(vec![library_path().parent().unwrap().to_owned()])
        .in_flight(IN_FLIGHT)
        .chunk_bytes(64 << 10)
        .memory_budget_bytes(IN_FLIGHT as u64 * (64 << 10))
}

#[test]
fn every_target_gets_the_bytes_by_either_client() {
    let Some(model) = Model::start() else { return };
    let len = model.file.len() as u64;
    let ranges = [(0, len), (1, len - 2), (4095, 4097), (len - 1, 1), (65_535, 2), (7, 0)];
    for client in [UsrbioClient::Native, UsrbioClient::Vendor] {
        let reader = Reader::new(&options(client)).unwrap();
        let file = ReadFile::open(&model.path).unwrap();
        let collected = Arc::new(Mutex::new(vec![0; model.file.len()]));
        let requests = ranges.iter().flat_map(|&(start, len)| {
            let collected = collected.clone();
            let sink = Target::sink(move |position, bytes| {
                let start = (start + position) as usize;
                collected.lock().unwrap()[start..start + bytes.len()].copy_from_slice(bytes);
                Ok(())
            });
            [Target::memory(), sink, Target::discard()]
                .map(|target| ReadRequest::new(&file, ByteRange::at(start, len).unwrap(), target))
        });
        let batch = reader.submit(requests.collect::<Vec<_>>(), Priority::Demand).unwrap();
        batch.wait().unwrap();
        for (number, &(start, len)) in ranges.iter().enumerate() {
            let block = batch.take(3 * number).unwrap();
            assert_eq!(&block[..], &model.file[start as usize..(start + len) as usize]);
        }
        assert_eq!(*collected.lock().unwrap(), model.file);
        let report = batch.report();
        assert_eq!(report.delivered_bytes, 3 * ranges.iter().map(|(_, len)| len).sum::<u64>());
        assert!(report.carriers.iter().all(|carrier| carrier.route == Route::Usrbio), "{report}");
    }
}

#[test]
fn files_elsewhere_are_refused_and_others_read() {
    let Some(model) = Model::start() else { return };
    let reader = Reader::new(&options(UsrbioClient::Native)).unwrap();
    let elsewhere = ReadFile::open(model.fixture.behind("mixed.safetensors")).unwrap();
    let range = ByteRange::at(0, 100).unwrap();
    for _ in 0..2 {
        let refused = reader
            .submit([ReadRequest::new(&elsewhere, range, Target::discard())], Priority::Demand)
            .unwrap();
        let error = refused.wait().unwrap_err();
        assert!(matches!(error, Error::RouteUnavailable { route: Route::Usrbio, .. }), "{error}");
        // Opened anew each time: the one before is gone by then.
        let file = ReadFile::open(&model.path).unwrap();
        let read =
            reader.submit([ReadRequest::new(&file, range, Target::memory())], Priority::Demand).unwrap();
        read.wait().unwrap();
        assert_eq!(&read.take(0).unwrap()[..], &model.file[..100]);
    }
}

/// From now on this thread is given no other.
pub(crate) fn without_threads() {
    let filter = SeccompFilter::new(
        [(libc::SYS_clone, Vec::new()), (libc::SYS_clone3, Vec::new())].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EAGAIN as u32),
        std::env::consts::ARCH.try_into().unwrap(),
    );
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
}

#[test]
fn threads_that_cannot_be_had_are_an_error_and_not_a_wait() {
    let Some(model) = Model::start() else { return };
    // It keeps the mount open, which has threads of its own.
    let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
    drop(checkpoint.load(&by(Route::Usrbio, UsrbioClient::Native, DeviceId::Cpu)).unwrap());
    let reader = Reader::new(&options(UsrbioClient::Native)).unwrap();
    let file = ReadFile::open(&model.path).unwrap();
    let read = || {
        let range = ByteRange::at(3, 100_000).unwrap();
        reader.submit([ReadRequest::new(&file, range, Target::memory())], Priority::Demand).unwrap()
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            without_threads();
            for _ in 0..2 {
                let batch = read();
                let error = batch.wait_within(PATIENCE).expect("it does not wait").unwrap_err();
                assert!(matches!(error, Error::System { operation: "starting a thread", .. }), "{error}");
            }
        });
    });
    let batch = read();
    batch.wait_within(PATIENCE).expect("it does not wait").unwrap();
    assert!(batch.take(0).unwrap()[..] == model.file[3..100_003]);
}

#[test]
fn memory_that_late_bytes_may_reach_is_not_used_again() {
    let Some(model) = Model::start() else { return };
    let file = ReadFile::open(&model.path).unwrap();
    let [_, device] = crate::common::devices();
    for client in [UsrbioClient::Native, UsrbioClient::Vendor] {
        for to_device in [false, true] {
            let reader = Reader::new(&options(client)).unwrap();
            let memory = DirectBuffer::new(&Device::open(DeviceId::Cuda(0)).unwrap(), 4096).unwrap();
            let read = || {
                let target = match to_device {
                    // SAFETY: the memory outlives the batch, and nothing else uses it.
                    #[allow(unsafe_code)]
                    true => unsafe { Target::device(device, memory.address()) },
                    false => Target::discard(),
                };
                let range = ByteRange::at(0, 4096).unwrap();
                let batch =
                    reader.submit([ReadRequest::new(&file, range, target)], Priority::Demand).unwrap();
                let outcome = batch.wait_within(PATIENCE).expect("it does not wait");
                outcome.map_err(ToString::to_string)
            };
            let fails = |errno| Faults { error_every: 1, errno, ..Faults::default() };
            model.fixture.daemon.behave(Faults::default()).unwrap();
            read().unwrap();
            // The daemon has asked no other process: the memory is as good as before.
            model.fixture.daemon.behave(fails(libc::EINVAL)).unwrap();
            for _ in 0..20 {
                assert!(read().unwrap_err().contains("does not know this buffer"));
            }
            // A little of it is lost: the rest serves.
            for (errno, hint) in [(libc::EREMOTEIO, "storage server failed"), (libc::EINTR, "cancelled")] {
                model.fixture.daemon.behave(fails(errno)).unwrap();
                let error = read().unwrap_err();
                assert!(error.contains(hint), "{error}");
                // Nothing is repeated.
                assert_eq!(model.fixture.daemon.transfers().unwrap(), 1);
                model.fixture.daemon.behave(Faults::default()).unwrap();
                read().unwrap();
            }
            // All of it.
            model.fixture.daemon.behave(fails(libc::EREMOTEIO)).unwrap();
            let lost = (0..20).take_while(|_| read().unwrap_err().contains("storage server failed")).count();
            assert_eq!(lost, 4, "of six slots, two were lost before");
            model.fixture.daemon.behave(Faults::default()).unwrap();
            assert!(read().unwrap_err().contains("open the reader, or the store that reads by it, anew"));
        }
    }
}

#[test]
fn the_death_of_the_daemon_ends_every_read_and_those_that_follow() {
    let Some(mut model) = Model::start() else { return };
    let reader = Reader::new(&options(UsrbioClient::Native)).unwrap();
    let file = ReadFile::open(&model.path).unwrap();
    let whole = || {
        let range = ByteRange::at(0, file.len()).unwrap();
        // More pieces than there are slots.
        let requests: Vec<_> = (0..8).map(|_| ReadRequest::new(&file, range, Target::memory())).collect();
        reader.submit(requests, Priority::Demand).unwrap()
    };
    whole().wait().unwrap();
    model.fixture.daemon.behave(Faults { stall: true, ..Faults::default() }).unwrap();
    let waiting = whole();
    model.fixture.daemon.kill().unwrap();
    let error = waiting.wait().unwrap_err().to_string();
    assert!(error.contains("mixed.safetensors"), "{error}");
    assert_eq!(waiting.report().failed, 8);
    assert!(whole().wait().is_err());
}

#[test]
fn a_daemon_that_hangs_delays_no_reader_of_another() {
    let Some(model) = Model::start() else { return };
    let Some(other) = Fixture::start() else { return };
    let hanging = ReadFile::open(&model.path).unwrap();
    let working = ReadFile::open(other.write("file", 100)).unwrap();
    let range = ByteRange::at(0, 100).unwrap();
    let read = |file: &ReadFile| {
        let reader = Reader::new(&options(UsrbioClient::Native)).unwrap();
        let batch = reader.submit([ReadRequest::new(file, range, Target::memory())], Priority::Demand);
        let batch = batch.unwrap();
        batch.wait().unwrap();
        batch.take(0).unwrap()
    };
    model.fixture.daemon.pause().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| read(&hanging));
        // Lets it come as far as it can.
        thread::sleep(Duration::from_millis(200));
        let (tell, hear) = mpsc::channel();
        scope.spawn(move || tell.send(read(&working)));
        let came = hear.recv_timeout(PATIENCE);
        model.fixture.daemon.resume().unwrap();
        assert_eq!(&came.unwrap()[..], &pattern(0, 100)[..]);
        assert_eq!(&waiting.join().unwrap()[..], &model.file[..100]);
    });
}
