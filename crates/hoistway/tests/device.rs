//! What is special about devices of every kind: their memory, their faults, several at once. On the stand-in driver and on
//! the device that only copies, on which the suites `conformance`, `faults`, `streams`, `gguf` and `save` run too.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    Footprint, TestTensor, assert_is_file, assert_nothing_left, make_cold, make_warm, mixed_model,
    on_device::{Devices, Fault, Played, TOY, chunky, disk, start_threads_that_stay},
    reading::until,
    tensor, write_model,
};
use hoistway::{
    Checkpoint, DeviceAllocator, Dtype, Error, Route,
    memory::LentMemory,
    plan::{Layout, Selection, TensorSlice},
    route::fault::FaultScript,
};
use hoistway_device::{Device, DeviceMemory, toy};
use hoistway_io::memory::{Pinning, SlotKind, Slots};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

#[test]
fn memory_comes_back_bit_by_bit() {
    let devices = Devices::take();
    let directory = disk();
    let path = directory.path().join("large.safetensors");
    let tensors: Vec<TestTensor> = (0..6).map(|i| tensor(&format!("t{i}"), Dtype::U8, &[32 << 20])).collect();
    write_model(&path, &tensors, 0, 1);
    for played in devices.each() {
        let _open = Device::open(played.device(0)).unwrap();
        let before = played.device_bytes();
        for layout in [Layout::File, Layout::Tensor] {
            let loaded = hoistway::load(&[&path], &played.options().layout(layout)).unwrap();
            let all = played.device_bytes() - before;
            let kept = loaded.get("t0").unwrap().clone();
            drop(loaded);
            let left = played.device_bytes() - before;
            // Four times the tensor at most.
            assert!(left <= 128 << 20 && left < all, "{all} → {left}: one tensor keeps the whole file");
            drop(kept);
        }
    }
}

/// Memory of a long load is allocated while it copies: what is missing then is an error as at the start.
#[test]
fn an_allocation_that_fails_while_copies_run_fails_the_load() {
    let devices = Devices::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    for played in devices.each() {
        let options = played.staged().layout(Layout::Tensor).chunk_bytes(64 << 10);
        for fault in [Fault::Allocate, Fault::Exhaust] {
            // After what a device allocates for itself, and the first tensors.
            played.fail(fault, Some(if played == Played::Toy { 6 } else { 10 }));
            match hoistway::load(&[&path], &options).unwrap_err() {
                Error::Device { operation, .. } => {
                    assert_eq!((fault, operation), (Fault::Allocate, "allocating memory"));
                }
                Error::MemoryBudget { .. } => assert_eq!(fault, Fault::Exhaust),
                other => panic!("{other:?}"),
            }
            played.reset();
            devices.assert_nothing_left("a load without memory");
        }
        assert_is_file(&hoistway::load(&[&path], &options).unwrap(), &file);
    }
}

#[test]
fn no_more_staging_is_kept_than_one_load_has() {
    let devices = Devices::take();
    let device = Device::open(TOY).unwrap();
    let pin = |count| {
        let slots = Slots::new(count, 1 << 20, SlotKind::Pinned(&device, None)).unwrap();
        let taken: Vec<_> = (0..count).map(|_| slots.take().unwrap()).collect();
        taken.iter().for_each(|slot| assert_eq!(slot.pin().unwrap(), Pinning::Ready));
        (slots, taken)
    };
    let pinned_mib = || toy::in_use().1 >> 20;
    let both = [pin(96), pin(96)];
    assert_eq!(pinned_mib(), 192);
    drop(both);
    assert_eq!(pinned_mib(), 128);
    drop(pin(128));
    assert_eq!(pinned_mib(), 128, "all of it is used again");
    drop(device);
    devices.assert_nothing_left("a device that was released");
}

#[test]
fn staging_that_no_load_uses_is_unpinned_after_some_seconds() {
    let devices = Devices::take();
    let directory = disk();
    let (path, _) = chunky(directory.path());
    for played in devices.each() {
        drop(hoistway::load(&[&path], &played.staged()).unwrap());
        assert!(played.pinned_bytes() > 0, "{played:?}");
    }
    for played in Played::ALL {
        until("nothing is pinned", || played.pinned_bytes() == 0);
    }
    devices.assert_nothing_left("an idle process");
}

#[test]
fn host_memory_is_bounded_whatever_the_model_and_the_drive() {
    let devices = Devices::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    for played in devices.each() {
        make_cold(&path);
        let greedy = played.staged().in_flight_bytes(4 << 30).chunk_bytes(256 << 10);
        let loaded = hoistway::load(&[&path], &greedy).unwrap();
        assert_is_file(&loaded, &file);
        assert!(loaded.report().memory.staging_bytes <= 128 << 20, "{}", loaded.report());
        drop(loaded);
        let tight = played.staged().memory_budget_bytes(5 << 20);
        let loaded = hoistway::load(&[&path], &tight).unwrap();
        assert_is_file(&loaded, &file);
        assert!(loaded.report().memory.staging_bytes <= 5 << 20, "{}", loaded.report());
        let none = played.staged().memory_budget_bytes(1 << 20);
        assert!(matches!(hoistway::load(&[&path], &none), Err(Error::MemoryBudget { .. })));
        drop(loaded);
        devices.assert_nothing_left("bounded loads");
    }
}

#[test]
fn a_device_with_too_little_memory_is_an_error_before_anything_moves() {
    let devices = Devices::take();
    let directory = disk();
    let (path, _) = chunky(directory.path());
    for played in devices.each() {
        played.set_memory_mib(16);
        let reads = FaultScript::new(|_, _| None);
        let options = played.options().faults(reads.clone());
        match hoistway::load(&[&path], &options).unwrap_err() {
            Error::MemoryBudget { needed, available, limit_name, .. } => {
                assert!(needed >= 24 << 20 && available <= 16 << 20, "{needed} {available}");
                assert_eq!(limit_name, format!("the memory of {}", played.device(0)));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(reads.reads(), 0);
        devices.assert_nothing_left("a load that does not fit");
    }
}

/// Each fault at each place where it can happen: a typed error, and nothing left.
#[test]
fn faults_of_devices_are_typed_errors_and_leave_nothing() {
    let devices = Devices::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    start_threads_that_stay(&path);
    let before = Footprint::now();
    let faults = [
        (Fault::Allocate, Some(1)),
        // After what a device allocates for itself.
        (Fault::Exhaust, Some(6)),
        (Fault::MakeStream, Some(1)),
        (Fault::PinLimit, None),
        (Fault::Pin, None),
        (Fault::Mark, Some(2)),
        (Fault::Queue, Some(1)),
        (Fault::Lose, Some(2)),
        (Fault::Copy, Some(1)),
        (Fault::Copy, Some(4)),
        (Fault::Copy, None),
    ];
    for played in devices.each() {
        for (fault, nth) in faults {
            for warm in [false, true] {
                if warm {
                    make_warm(&path)
                } else {
                    make_cold(&path)
                }
                played.delay(Duration::from_micros(200));
                played.fail(fault, nth);
                let options = played.staged().layout(Layout::Tensor);
                let error = hoistway::load(&[&path], &options).expect_err(&format!("{fault:?} {nth:?}"));
                played.reset();
                match &error {
                    Error::Device { device, source, .. } => {
                        assert_eq!(*device, played.device(0).to_string());
                        assert!(error.to_string().contains(device) && source.code > 0, "{error}");
                    }
                    Error::MemoryBudget { limit_name, .. } => {
                        let is_named = limit_name.contains(&played.device(0).to_string());
                        assert!(fault == Fault::Exhaust && is_named, "{fault:?}: {error}");
                    }
                    Error::Allocation { kind: "pinned memory", .. } => {
                        assert_eq!(fault, Fault::PinLimit, "{error}")
                    }
                    other => panic!("{fault:?}: {other:?}"),
                }
                assert_nothing_left(&before);
            }
        }
        assert_is_file(&hoistway::load(&[&path], &played.staged()).unwrap(), &file);
    }
}

#[test]
fn what_is_let_go_aside_as_devices_are_released_is_waited_for() {
    static IS_WANTED: AtomicBool = AtomicBool::new(true);
    static IS_GONE: AtomicBool = AtomicBool::new(false);
    struct Slow;
    impl Drop for Slow {
        fn drop(&mut self) {
            thread::sleep(Duration::from_secs(1));
            IS_GONE.store(true, Ordering::Relaxed);
        }
    }
    let _devices = Devices::take();
    drop(Device::open(TOY).unwrap());
    hoistway_device::on_release(|_| {
        // It is called for as long as the process lives.
        if IS_WANTED.swap(false, Ordering::Relaxed) {
            hoistway_device::drop_aside(Slow);
        }
    });
    hoistway_device::release_devices();
    assert!(IS_GONE.load(Ordering::Relaxed));
}

/// Each limit of the system is one of its own: less than a segment, and less than two slots.
#[test]
fn loads_go_on_with_the_slots_that_can_be_pinned_and_the_report_says_how_many() {
    let devices = Devices::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    for played in devices.each() {
        for (refused, says) in
            [(&[1][..], "of staging memory were pinned, in pieces of one slot"), (&[1, 3], "and no more: ")]
        {
            make_cold(&path);
            played.fail_each(Fault::PinLimit, refused);
            let loaded = hoistway::load(&[&path], &played.staged().chunk_bytes(512 << 10)).unwrap();
            played.reset();
            assert_is_file(&loaded, &file);
            let notes = &loaded.report().notes;
            assert!(notes.iter().any(|note| note.contains(says)), "{played:?} {refused:?}: {notes:?}");
            assert!(!notes.iter().any(|note| note.contains("not pinned")), "{notes:?}");
            drop(loaded);
            devices.assert_nothing_left("a load with few pinned slots");
        }
    }
}

#[test]
fn slow_streams_deliver_the_same_bytes() {
    let devices = Devices::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    for played in devices.each() {
        played.delay(Duration::from_millis(2));
        for (route, warm) in [(Route::Staged, false), (Route::Staged, true), (Route::Auto, false)] {
            if warm {
                make_warm(&path)
            } else {
                make_cold(&path)
            }
            let options = played.options().route(route).chunk_bytes(512 << 10);
            let loaded = hoistway::load(&[&path], &options).unwrap();
            assert_is_file(&loaded, &file);
            if route == Route::Staged {
                assert!(loaded.report().device.as_ref().unwrap().copy_wait_seconds > 0.0);
            }
        }
    }
}

#[test]
fn slices_of_rows_and_columns_arrive_by_reads_of_their_bytes_or_by_pitched_copies() {
    let devices = Devices::take();
    let directory = disk();
    let path = directory.path().join("sliced.safetensors");
    let file = write_model(&path, &[tensor("m", Dtype::U16, &[600, 50_000])], 0, 5);
    let whole = common::expected(&file, "m");
    let row = 50_000 * 2;
    for played in devices.each() {
        for (columns, reads_through) in [(1000..1500, false), (100..40_000, true)] {
            make_cold(&path);
            let slice = TensorSlice::new(vec![7..600, columns.clone()]);
            let selection = Selection::all().slice("m", slice);
            let loaded = hoistway::load(&[&path], &played.staged().selection(selection)).unwrap();
            let part: Vec<u8> = (7..600)
                .flat_map(|r| {
                    &whole[r * row + columns.start as usize * 2..r * row + columns.end as usize * 2]
                })
                .copied()
                .collect();
            let report = loaded.report();
            assert!(*loaded.get("m").unwrap().bytes().unwrap() == *part, "{report}");
            // Rows far apart are read one by one, near ones with what lies between them, by few copies.
            assert_eq!(report.read_bytes > file.len() as u64 / 2, reads_through, "{report}");
            if reads_through {
                assert!(report.device.as_ref().unwrap().copies < 100, "{report}");
            }
        }
    }
}

#[test]
fn several_devices_are_loaded_at_once() {
    let devices = Devices::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    let all = devices.each().flat_map(|played| [0, 1, 0, 1].map(|ordinal| (played, ordinal)));
    let all: Vec<_> = all.collect();
    thread::scope(|scope| {
        for (played, ordinal) in all {
            played.delay(Duration::from_micros(300));
            let (path, file) = (&path, &file);
            scope.spawn(move || {
                let device = played.device(ordinal);
                let options = played.options().device(device).chunk_bytes(256 << 10);
                let loaded = hoistway::load(&[path], &options).unwrap();
                assert_is_file(&loaded, file);
                assert!(loaded.tensors().iter().all(|tensor| tensor.device() == device));
            });
        }
    });
    devices.assert_nothing_left("loads of several devices");
}

#[test]
fn memory_of_another_allocator_is_used_and_given_back() {
    struct Lent {
        _memory: DeviceMemory,
        count: Arc<AtomicU64>,
    }
    impl Drop for Lent {
        fn drop(&mut self) {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }
    let devices = Devices::take();
    let directory = disk();
    let (path, file) = mixed_model(directory.path());
    for played in devices.each() {
        let device = Device::open(played.device(0)).unwrap();
        let lent = Arc::new(AtomicU64::new(0));
        let counter = lent.clone();
        let allocate = move |bytes| {
            let memory = DeviceMemory::new(&device, bytes)?;
            counter.fetch_add(1, Ordering::Relaxed);
            let address = memory.address();
            let lent = Lent { _memory: memory, count: counter.clone() };
            Ok(LentMemory::new(address, 0, Box::new(lent)))
        };
        // SAFETY: the memory lies on the device, nothing else uses it, and `LentMemory` owns it.
        let allocator = unsafe { DeviceAllocator::new(allocate) };
        let options = played.options().allocator(allocator).layout(Layout::Tensor);
        let loaded = hoistway::load(&[&path], &options).unwrap();
        assert_is_file(&loaded, &file);
        let arenas = loaded.report().memory.arenas as u64;
        assert_eq!(lent.load(Ordering::Relaxed), arenas);
        drop((loaded, options));
        assert_eq!(lent.load(Ordering::Relaxed), 0);
        // SAFETY: fails before it gives anything.
        let broken = unsafe { DeviceAllocator::new(|_| Err(Error::Cancelled)) };
        let options = played.options().allocator(broken);
        assert!(matches!(hoistway::load(&[&path], &options), Err(Error::Cancelled)));
        devices.assert_nothing_left("lent memory");
    }
}

/// What the driver has left says nothing of an allocator that keeps memory, as that of torch does.
#[test]
fn memory_that_an_allocator_keeps_is_used_where_the_device_is_full() {
    let devices = Devices::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    for played in devices.each() {
        played.set_memory_mib(100);
        let device = Device::open(played.device(0)).unwrap();
        let kept = DeviceMemory::new(&device, 64 << 20).unwrap();
        let rest = DeviceMemory::new(&device, device.memory().unwrap().0).unwrap();
        assert!(matches!(hoistway::load(&[&path], &played.staged()), Err(Error::MemoryBudget { .. })));
        let next = Arc::new(AtomicU64::new(kept.address()));
        let allocate = move |bytes: u64| {
            let address = next.fetch_add(bytes.next_multiple_of(256), Ordering::Relaxed);
            Ok(LentMemory::new(address, 0, Box::new(())))
        };
        // SAFETY: the memory lies on the device, nothing else uses it, and it outlives the tensors.
        let allocator = unsafe { DeviceAllocator::new(allocate) };
        let loaded = hoistway::load(&[&path], &played.staged().allocator(allocator)).unwrap();
        assert_is_file(&loaded, &file);
        drop(loaded);
        drop((kept, rest, device));
        played.reset();
        devices.assert_nothing_left("lent memory");
    }
}

#[test]
fn a_load_that_is_cancelled_or_dropped_leaves_nothing_on_the_device() {
    let devices = Devices::take();
    let directory = disk();
    let (path, _) = chunky(directory.path());
    start_threads_that_stay(&path);
    let before = Footprint::now();
    for played in devices.each() {
        played.delay(Duration::from_millis(1));
        for route in [Route::Staged, Route::Auto] {
            for wait in [false, true] {
                make_cold(&path);
                let checkpoint = Checkpoint::open(&[&path]).unwrap();
                let options = played.options().route(route).chunk_bytes(256 << 10);
                let mut loading = checkpoint.start(&options).unwrap();
                if wait {
                    drop(loading.next());
                    loading.cancel();
                }
                drop(loading);
                drop(checkpoint);
                assert_nothing_left(&before);
            }
        }
    }
}
