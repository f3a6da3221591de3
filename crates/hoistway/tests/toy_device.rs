//! The device that only copies: what needs kernels or a direct path is done by copies, or refused with a reason. The
//! suites `device`, `reader_device`, `conformance`, `faults`, `reader_faults`, `streams`, `gguf` and `save` run on it too.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{
    assert_is_file, mixed_model,
    on_device::{chunky, disk},
    tensor, write_model,
};
use hoistway::{DeviceId, Dtype, Error, LoadOptions, Route, plan::Layout};
use hoistway_device::{CopyDirection, CopyStream, Device, DeviceMemory, Fate, HostCopy, Pinned, toy};
use std::sync::{Mutex, MutexGuard, PoisonError};

const TOY: DeviceId = DeviceId::Toy(1);

/// The toy, to oneself: what it counts is the process's.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn loads_copy_every_piece_and_leave_nothing() {
    let _turn = turn();
    let directory = disk();
    let (mixed, bytes) = mixed_model(directory.path());
    // More short pieces in a chunk than another device would copy one by one.
    let pieces = directory.path().join("pieces.safetensors");
    let tensors: Vec<_> = (0..300).map(|i| tensor(&format!("t{i}"), Dtype::U8, &[100 + i])).collect();
    let piece_bytes = write_model(&pieces, &tensors, 0, 3);
    for (path, file) in [(&mixed, &bytes), (&pieces, &piece_bytes)] {
        for layout in [Layout::File, Layout::Packed, Layout::Tensor] {
            for chunk_bytes in [4096, 4 << 20] {
                let options = LoadOptions::default().device(TOY).layout(layout).chunk_bytes(chunk_bytes);
                let loaded = hoistway::load(&[path], &options).unwrap();
                assert_is_file(&loaded, file);
                assert!(toy::in_use().0 > 0, "tensors are on the device");
                assert!(loaded.report().carriers.iter().all(|carrier| carrier.via == Some(Route::Staged)));
                drop(loaded);
                hoistway_device::release_devices();
                assert_eq!(toy::in_use(), (0, 0), "{layout:?} {chunk_bytes}");
            }
        }
    }
}

#[test]
fn what_it_cannot_do_is_refused_with_a_reason() {
    let _turn = turn();
    let directory = disk();
    let floats = directory.path().join("floats.safetensors");
    write_model(&floats, &[tensor("f", Dtype::F16, &[1000])], 0, 1);
    let options = LoadOptions::default().device(TOY);
    match hoistway::load(&[&floats], &options.clone().dtype(Dtype::F32)).unwrap_err() {
        Error::DeviceUnavailable { device, why } => {
            assert_eq!(device, "toy:1");
            assert!(why.reason.contains("converts") && why.fix.contains("dtype"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    let (path, _) = chunky(directory.path());
    let empty = directory.path().join("empty.safetensors");
    write_model(&empty, &[tensor("none", Dtype::F16, &[0])], 0, 1);
    // Also where nothing would be read by them.
    for path in [&path, &floats, &empty] {
        for route in [Route::Gds, Route::GdsCompat] {
            match hoistway::load(&[path], &options.clone().route(route)).unwrap_err() {
                Error::RouteUnavailable { route: refused, why, .. } => {
                    assert_eq!(refused, route);
                    assert!(why.reason.contains("no direct path"), "{why}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
    let error = hoistway::load(&[&floats], &options.clone().route(Route::Unified)).unwrap_err();
    assert!(matches!(error, Error::RouteUnavailable { route: Route::Unified, .. }), "{error:?}");
    let error = hoistway::load(&[&floats], &options.device(DeviceId::Toy(9))).unwrap_err();
    assert!(matches!(&error, Error::DeviceUnavailable { device, .. } if device == "toy:9"), "{error:?}");
    assert_eq!(toy::in_use(), (0, 0));
}

#[test]
fn copies_go_both_ways_and_only_to_memory_of_the_device() {
    let _turn = turn();
    let device = Device::open(TOY).unwrap();
    let memory = DeviceMemory::new(&device, 4096).unwrap();
    let stream = CopyStream::new(&device).unwrap();
    let mut host: Vec<u8> = (0..=255).cycle().take(1024).collect();
    // SAFETY: the vector outlives the pin.
    let pinned = unsafe { Pinned::new(&device, host.as_mut_ptr(), host.len()) }.unwrap();
    let start = host.as_mut_ptr().expose_provenance();
    // Rows at one distance on the device.
    let rows: Vec<HostCopy> = (0..8)
        .map(|row| HostCopy {
            host: start + row * 128,
            device: memory.address() + row as u64 * 512,
            len: 128,
        })
        .collect();
    // SAFETY: all of it is pinned or allocated here, and not used meanwhile.
    unsafe { stream.run(CopyDirection::ToDevice, &rows) }.result().unwrap();
    let expected = host.clone();
    host.fill(0);
    // SAFETY: as above.
    unsafe { stream.run(CopyDirection::ToHost, &rows) }.result().unwrap();
    assert!(host == expected);
    let outside = HostCopy { host: start, device: memory.address() + 4000, len: 128 };
    // SAFETY: refused before anything is copied.
    let failed = unsafe { stream.run(CopyDirection::ToDevice, &[outside]) };
    assert!(matches!(failed, Fate::Failed(hoistway::device::Error::Device { .. })), "{failed:?}");
    drop((pinned, memory));
    assert_eq!(toy::in_use(), (0, 0));
}
