//! What small loads to a device do without, on the stand-in driver.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    assert_is_file, make_warm,
    on_device::{Devices, Fault, Played, disk},
    stand_in::{STAND_IN, Vendor},
    tensor, write_model,
};
use hoistway::{Dtype, Error, Route, plan::Layout};
use std::time::{Duration, Instant};

/// What is not used for so long is let go.
const IDLE_TIME: Duration = Duration::from_secs(5);

/// Calls of the driver that take long, or hold others up.
const CALLS: [&str; 6] = [
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuMemGetInfo_v2",
    "cuMemHostRegister_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
];

fn calls(vendor: Vendor) -> [u64; 6] {
    CALLS.map(|function| STAND_IN.count(&format!("calls.{}", vendor.symbol(function))))
}

/// One tensor of 16 MiB: it allocates its memory, and makes no other such call.
#[test]
fn the_second_load_of_a_small_file_makes_one_long_call() {
    let devices = Devices::take();
    let directory = disk();
    let path = directory.path().join("one.safetensors");
    let file = write_model(&path, &[tensor("t", Dtype::U8, &[16 << 20])], 0, 4);
    make_warm(&path);
    for vendor in Vendor::ALL {
        // Without numbers of contexts, streams are not kept.
        let new_streams = if vendor == Vendor::Cuda { 0 } else { 1 };
        let options = hoistway::LoadOptions::default().device(vendor.device(0)).threads(8);
        // A busy machine may let what is kept be given back now and then.
        let is_shown = (0..10).any(|_| {
            hoistway_device::release_devices();
            let begun = Instant::now();
            let first = hoistway::load(&[&path], &options).unwrap();
            let before = calls(vendor);
            let second = hoistway::load(&[&path], &options).unwrap();
            let after = calls(vendor);
            let is_in_time = begun.elapsed() < IDLE_TIME;
            let mut made = [0; 6];
            made.iter_mut()
                .zip(before.iter().zip(after))
                .for_each(|(made, (before, after))| *made = after - before);
            let [made_streams, destroyed, others @ .., allocated, freed] = made;
            // A direct path has memory of its own on the device, which it gives back.
            let are_kept = [made_streams, destroyed] == [new_streams; 2];
            let is_right = are_kept && others == [0; 2] && allocated == freed + 1;
            assert!(is_right || !is_in_time, "{vendor:?}: {CALLS:?} {made:?}");
            assert_is_file(&first, &file);
            assert_is_file(&second, &file);
            let carried = &second.report().carriers;
            assert!(carried.iter().all(|carrier| carrier.route == Route::Cached), "{}", second.report());
            let copiers = second.report().device.as_ref().unwrap().copiers;
            assert!((1..=5).contains(&copiers), "a thread for each read at most: {copiers}");
            is_in_time
        });
        assert!(is_shown, "{vendor:?}: loads take too long");
    }
    devices.assert_nothing_left("small loads");
}

/// By few threads, it takes longer to copy than to pin.
#[test]
fn a_load_is_small_for_as_many_threads_as_copy_it() {
    let devices = Devices::take();
    let directory = disk();
    let path = directory.path().join("one.safetensors");
    let file = write_model(&path, &[tensor("t", Dtype::U8, &[16 << 20])], 0, 4);
    make_warm(&path);
    for (threads, chunk_bytes, route, is_small) in [
        (2, 4 << 20, Route::Auto, false),
        (8, 4 << 20, Route::Auto, true),
        // By two reads, no more than two threads copy.
        (8, 8 << 20, Route::Auto, false),
        (8, 4 << 20, Route::PinnedCache, false),
    ] {
        let options = Played::Cuda.options().threads(threads).chunk_bytes(chunk_bytes).route(route);
        let loaded = match hoistway::load(&[&path], &options) {
            // Not every system tells what its cache holds of a file.
            Err(Error::RouteUnavailable { .. }) => continue,
            loaded => loaded.unwrap(),
        };
        assert_is_file(&loaded, &file);
        let report = loaded.report();
        let says = report.refused.iter().any(|refusal| refusal.why.reason.contains("the load is small"));
        assert_eq!(says, is_small, "{report}");
        let pins = report.carriers.iter().any(|carrier| carrier.route == Route::PinnedCache);
        assert!(!pins || !is_small, "{report}");
    }
    devices.assert_nothing_left("loads by few and many threads");
}

/// A device that has too little memory may not tell how much it has.
#[test]
fn a_small_load_that_has_no_room_says_so_whatever_the_device_tells() {
    let devices = Devices::take();
    let directory = disk();
    let path = directory.path().join("small.safetensors");
    write_model(&path, &[tensor("t", Dtype::U8, &[3 << 20])], 0, 1);
    for vendor in Vendor::ALL {
        let options = hoistway::LoadOptions::default().device(vendor.device(0)).route(Route::Staged);
        for tells in ["", ",cuMemGetInfo_v2:*=999"] {
            STAND_IN.set(&vendor.faults(&format!("cuMemAlloc_v2:*=2{tells}")));
            let error = hoistway::load(&[&path], &options).unwrap_err();
            assert!(matches!(error, Error::MemoryBudget { .. }), "{vendor:?}{tells}: {error:?}");
        }
        STAND_IN.reset();
    }
    devices.assert_nothing_left("loads that had no room");
}

/// What a device has free is asked for a load whose memory is not allocated at once, and for what does not fit.
#[test]
fn the_free_memory_of_a_device_is_asked_for_large_loads() {
    let devices = Devices::take();
    let directory = disk();
    let (small, large) =
        (directory.path().join("small.safetensors"), directory.path().join("large.safetensors"));
    let file = write_model(&small, &[tensor("t", Dtype::U8, &[3 << 20])], 0, 1);
    write_model(&large, &[tensor("t", Dtype::U8, &[65 << 20])], 0, 2);
    for played in devices.each() {
        for layout in [Layout::File, Layout::Tensor] {
            let options = played.staged().layout(layout);
            played.fail(Fault::AskMemory, Some(1));
            let error = hoistway::load(&[&large], &options).unwrap_err();
            assert!(matches!(error, Error::Device { .. }), "{error:?}");
            // A toy asks itself before it allocates.
            if played != Played::Toy {
                played.fail(Fault::AskMemory, Some(1));
                assert_is_file(&hoistway::load(&[&small], &options).unwrap(), &file);
            }
        }
        played.reset();
    }
    devices.assert_nothing_left("loads of two sizes");
}
