//! The direct path from storage to devices: proven or refused, and what becomes of reads that cuFile fails. On the
//! stand-in driver and its cuFile.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    Footprint, assert_is_file, assert_nothing_left, can_read,
    child::is_case,
    make_cold,
    on_device::{chunky, disk, start_threads_that_stay, to_device},
    reading::{Kind, Place, TestFile, range, submit},
    stand_in::{STAND_IN, Turn},
    tensor, write_model,
};
use hoistway::{
    Cancel, DeviceId, DirectIo, Dtype, Error, Route,
    device::Device,
    read::{Priority, Reader, ReaderOptions},
    route::fault::{Fault, FaultScript},
};
use hoistway_device::{DirectBuffer, RegisteredFile};
use std::{
    fs,
    path::Path,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

/// One thread gives cuFile up while another has a read to go on with.
#[test]
fn giving_cufile_up_strands_no_read() {
    let _stand_in = Turn::take();
    if !has_direct_reads() {
        return;
    }
    let directory = disk();
    let (path, file) = chunky(directory.path());
    drop(hoistway::load(&[&path], &to_device().route(Route::Gds)).unwrap());
    for round in 0..10u64 {
        make_cold(&path);
        // One early read fails for good, and its neighbours come short, slowly.
        let failed = Arc::new(AtomicU64::new(0));
        let script = FaultScript::new(move |number, offset| match number % 7 {
            // Not the last block, which is not cuFile's.
            _ if number >= round
                && offset < 20 << 20
                && failed.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0 =>
            {
                Some(Fault::Broken)
            }
            1 | 4 => Some(Fault::Short(4096)),
            2 | 5 => Some(Fault::Delay(Duration::from_millis(1))),
            _ => None,
        });
        let options = to_device().chunk_bytes(256 << 10).faults(script);
        let loaded = hoistway::load(&[&path], &options).unwrap();
        assert_is_file(&loaded, &file);
        let report = loaded.report();
        let moved: u64 = report.carriers.iter().map(|carrier| carrier.tensor_bytes).sum();
        assert_eq!(moved, report.tensor_bytes, "{report}");
        assert!(report.refused.iter().any(|refusal| refusal.what == "gds"), "{report}");
    }
}

#[test]
fn what_cufile_gives_up_after_a_cancel_is_not_read_by_the_host() {
    let _stand_in = Turn::take();
    if !has_direct_reads() {
        return;
    }
    let file = TestFile::new(1 << 20);
    make_cold(&file.path);
    let cancel = Cancel::default();
    let script = FaultScript::new({
        let cancel = cancel.clone();
        move |_, _| {
            cancel.cancel();
            Some(Fault::Broken)
        }
    });
    let options = ReaderOptions::default().cancel(cancel).faults(script.clone());
    let reader = Reader::new(&options).unwrap();
    let mut places = [Place::new(Kind::Device(DeviceId::Cuda(0), 0), range(0, 64 << 10))];
    let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
    assert!(matches!(batch.wait(), Err(Error::Cancelled)));
    assert_eq!(script.reads(), 1);
    let report = batch.report();
    assert!(report.refused.iter().any(|refusal| refusal.what == "gds"), "{report}");
}

/// Nothing of such a file is read past the host, but its name promises that it could be.
#[test]
fn a_short_file_needs_the_proof_of_another() {
    const TEST: &str = "a_short_file_needs_the_proof_of_another";
    let stand_in = Turn::take();
    if !has_direct_reads() {
        return;
    }
    let directory = disk();
    let short = directory.path().join("a.safetensors");
    let file = write_model(&short, &[tensor("small", Dtype::U8, &[100])], 0, 1);
    let load = |route| hoistway::load(&[&short], &to_device().route(route));
    let refused = |route| match load(route).unwrap_err() {
        Error::RouteUnavailable { route: refused, why, .. } => {
            assert_eq!(refused, route);
            why.reason
        }
        other => panic!("{other:?}"),
    };
    if is_case(TEST, "unproven") {
        let why = refused(Route::Gds);
        assert!(why.contains("shorter than a block"), "{why}");
        let (long, _) = chunky(directory.path());
        hoistway::load(&[&long], &to_device().route(Route::Gds)).unwrap();
        assert_is_file(&load(Route::Gds).unwrap(), &file);
    }
    if is_case(TEST, "compatibility mode") {
        stand_in.set("CUFILE_MODE=compat");
        let why = refused(Route::Gds);
        assert!(why.contains("compatibility mode"), "{why}");
        assert_is_file(&load(Route::GdsCompat).unwrap(), &file);
        stand_in.set("FAULTS=cuFileHandleRegister:*=5030");
        refused(Route::GdsCompat);
    }
    if is_case(TEST, "no library") {
        stand_in.set("CUFILE_MODE=closed");
        for route in [Route::Gds, Route::GdsCompat] {
            let why = refused(route);
            assert!(why.contains("does not open"), "{why}");
        }
        assert_is_file(&load(Route::Staged).unwrap(), &file);
    }
}

#[test]
fn short_files_need_no_direct_path() {
    let _stand_in = Turn::take();
    if !has_direct_reads() {
        return;
    }
    let directory = disk();
    let short = directory.path().join("a.safetensors");
    let small = write_model(&short, &[tensor("small", Dtype::U8, &[100])], 0, 1);
    let (long, file) = chunky(directory.path());
    let options = to_device().route(Route::Gds);
    let loaded = hoistway::load(&[&short, &long], &options).unwrap();
    assert_eq!(*loaded.get("small").unwrap().bytes().unwrap(), *common::expected(&small, "small"));
    assert_eq!(*loaded.get("t7").unwrap().bytes().unwrap(), *common::expected(&file, "t7"));
    let loaded = hoistway::load(&[&short], &options).unwrap();
    assert_is_file(&loaded, &small);
}

/// Whether files of the disk can be read directly; else cuFile refuses them.
fn has_direct_reads() -> bool {
    can_read(Path::new(env!("CARGO_TARGET_TMPDIR")), Route::Threads, DirectIo::Always)
}

#[test]
fn gds_is_proven_and_every_byte_of_it_is_named() {
    let _stand_in = Turn::take();
    if !has_direct_reads() {
        return;
    }
    let directory = disk();
    let (path, file) = chunky(directory.path());
    make_cold(&path);
    let options = to_device().route(Route::Gds);
    let loaded = hoistway::load(&[&path], &options).unwrap();
    assert_is_file(&loaded, &file);
    let report = loaded.report();
    // All but the last block, which is not whole, and is listed.
    let whole_blocks = file.len() as u64 / 4096 * 4096;
    let tail: u64 = report
        .carriers
        .iter()
        .filter(|carrier| carrier.via == Some(Route::Staged) && carrier.route == Route::Threads)
        .map(|carrier| carrier.tensor_bytes)
        .sum();
    assert_eq!(tail, file.len() as u64 - whole_blocks, "{report}");
    let direct =
        report.carriers.iter().find(|carrier| carrier.route == Route::Gds && carrier.via.is_none()).unwrap();
    assert_eq!(direct.tensor_bytes + tail, report.tensor_bytes, "{report}");
    assert!(report.device.as_ref().unwrap().proof.as_ref().unwrap().contains("nvidia-fs"), "{report}");
    assert!(report.memory.staging_bytes <= 4 << 20, "one slot, for the last block\n{report}");
    let staged = hoistway::load(&[&path], &to_device().route(Route::Staged)).unwrap();
    let mut both = staged.report().clone();
    both.merge(report);
    assert_eq!(both.device.unwrap().proof, report.device.as_ref().unwrap().proof);
}

/// The library promises a direct path, and reads through the host all the same: never `gds`.
#[test]
fn compatibility_mode_cannot_pass_as_gds() {
    let stand_in = Turn::take();
    if !has_direct_reads() {
        return;
    }
    let directory = disk();
    let (path, file) = chunky(directory.path());
    let gds = to_device().route(Route::Gds);
    assert_is_file(&hoistway::load(&[&path], &gds).unwrap(), &file);

    // It was proven a moment ago. Now every read is counted as one through the host.
    stand_in.set("CUFILE_THROUGH_HOST=1");
    match hoistway::load(&[&path], &gds).unwrap_err() {
        Error::RouteUnavailable { route: Route::Gds, path: None, why } => {
            assert!(why.reason.contains("through host memory"), "{why}");
            assert!(why.fix.contains("gds-compat"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    make_cold(&path);
    let loaded = hoistway::load(&[&path], &to_device()).unwrap();
    assert_is_file(&loaded, &file);
    let report = loaded.report();
    assert!(report.carriers.iter().all(|carrier| carrier.route != Route::Gds), "{report}");
    assert!(report.refused.iter().any(|refusal| refusal.what == "gds"), "{report}");
    let compat = to_device().route(Route::GdsCompat);
    let loaded = hoistway::load(&[&path], &compat).unwrap();
    assert_is_file(&loaded, &file);
    assert_eq!(loaded.report().device.as_ref().unwrap().proof, None);
}

#[test]
fn reads_that_cufile_fails_are_errors_or_are_made_by_others() {
    let stand_in = Turn::take();
    if !has_direct_reads() {
        return;
    }
    let directory = disk();
    let (path, file) = chunky(directory.path());
    let gds = to_device().route(Route::Gds);
    // Proves the path, so that the faults below hit the load.
    drop(hoistway::load(&[&path], &gds).unwrap());
    start_threads_that_stay(&path);
    let before = Footprint::now();
    for (fault, words) in [
        ("3=-5030", "5030"),
        ("2=-5016", "BAR1"),
        ("1=-5008", "does not support GPUDirect Storage"),
        ("4=-5", "os error 5"),
    ] {
        make_cold(&path);
        stand_in.set(&format!("CUFILE_READ_FAULTS={fault}"));
        match hoistway::load(&[&path], &gds).unwrap_err() {
            error @ Error::Io { operation: "read", tensor: Some(_), range: Some(_), .. } => {
                assert!(error.to_string().contains(words), "{error}");
            }
            other => panic!("{other:?}"),
        }
        assert_nothing_left(&before);
        stand_in.set(&format!("CUFILE_READ_FAULTS={fault}"));
        let loaded = hoistway::load(&[&path], &to_device()).unwrap();
        assert_is_file(&loaded, &file);
        assert!(loaded.report().refused.iter().any(|refusal| refusal.what == "gds"), "{}", loaded.report());
    }
    stand_in.set("CUFILE_READ_FAULTS=1=short:4096,2=short:5000,3=short:1");
    assert_is_file(&hoistway::load(&[&path], &gds).unwrap(), &file);
    stand_in.set("CUFILE_READ_FAULTS=");
    for fault in ["cuFileRead:2=5034", "cuFileBufRegister:1=5016"] {
        stand_in.set(&format!("FAULTS={fault}"));
        let error = hoistway::load(&[&path], &gds).unwrap_err();
        assert!(matches!(error, Error::Io { .. } | Error::RouteUnavailable { .. }), "{error:?}");
        assert_nothing_left(&before);
        stand_in.set(&format!("FAULTS={fault}"));
        make_cold(&path);
        assert_is_file(&hoistway::load(&[&path], &to_device()).unwrap(), &file);
    }
}

#[test]
fn files_that_cufile_does_not_take_are_named_with_the_fix() {
    let stand_in = Turn::take();
    if !has_direct_reads() {
        return;
    }
    let directory = disk();
    let (path, file) = chunky(directory.path());
    drop(hoistway::load(&[&path], &to_device().route(Route::Gds)).unwrap());
    stand_in.set("CUFILE_REFUSE_FS=1");
    match hoistway::load(&[&path], &to_device().route(Route::Gds)).unwrap_err() {
        Error::RouteUnavailable { route: Route::Gds, path: at, why } => {
            assert_eq!(at.as_ref(), Some(&path));
            assert!(why.reason.contains("5030") && why.fix.contains("/run/udev"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    make_cold(&path);
    let loaded = hoistway::load(&[&path], &to_device()).unwrap();
    assert_is_file(&loaded, &file);
    let refused = &loaded.report().refused;
    assert!(
        refused.iter().any(|refusal| refusal.what == "gds" && refusal.path.as_deref() == Some(&*path)),
        "{refused:?}"
    );
}

#[test]
fn direct_files_are_read_and_written() {
    let _stand_in = Turn::take();
    if !has_direct_reads() {
        return;
    }
    let directory = disk();
    let path = directory.path().join("block");
    let contents: Vec<u8> = (0..64 << 10).map(|i: u32| (i ^ (i >> 8)) as u8).collect();
    fs::write(&path, &contents).unwrap();
    let open = || {
        use std::os::unix::fs::OpenOptionsExt;
        let mut options = fs::OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_DIRECT).open(&path).unwrap()
    };
    let device = Device::open(DeviceId::Cuda(0)).unwrap();
    let file = RegisteredFile::register(&open()).unwrap();
    let buffer = DirectBuffer::new(&device, 64 << 10).unwrap();
    assert_eq!(buffer.address() % 4096, 0);
    assert_eq!(file.read_at(&buffer, 0, 64 << 10, 0).unwrap(), 64 << 10);
    let mut seen = vec![0; 64 << 10];
    buffer.read_back(&mut seen).unwrap();
    assert!(seen == contents);
    // The second half of the buffer goes to the file's beginning, and back.
    assert_eq!(file.write_at(&buffer, 32 << 10, 32 << 10, 0).unwrap(), 32 << 10);
    assert!(fs::read(&path).unwrap()[..32 << 10] == contents[32 << 10..]);
    assert!(file.read_at(&buffer, 60 << 10, 8 << 10, 0).is_err(), "past the end of the buffer");
    drop((file, buffer, device));
    assert_eq!(STAND_IN.leftovers(), []);
}
