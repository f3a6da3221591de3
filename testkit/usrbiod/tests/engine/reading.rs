//! Batches by route `usrbio`: every kind of target, both clients, files that come and go, and the daemon's death.

use crate::{
    Model,
    fixture::{Fixture, PATIENCE, library_path, pattern},
};
use std::{
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};
use usrbiod::Faults;
use windlass::{
    ByteRange, Error, Route, UsrbioClient,
    read::{Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target},
};

fn options(client: UsrbioClient) -> ReaderOptions {
    ReaderOptions {
        route: Route::Usrbio,
        usrbio: client,
        usrbio_directories: vec![library_path().parent().unwrap().to_owned()],
        in_flight: 6,
        chunk_bytes: 64 << 10,
        memory_budget_bytes: 6 * (64 << 10),
        ..ReaderOptions::default()
    }
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
fn a_daemon_that_hangs_holds_up_nobody_who_reads_from_another() {
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
