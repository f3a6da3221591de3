//! Device memory and pinned host memory.

use crate::fixture::{Session, pattern};
use std::{collections::HashSet, fs, ptr, thread, time::Duration};

const POISON: u8 = 0xA5;
const MIB: usize = 1 << 20;

fn resident_shared_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn new_memory_is_full_of_poison() {
    let session = Session::new();
    let address = session.allocate(10_000);
    assert!(session.download(address, 10_000).iter().all(|byte| *byte == POISON));
}

#[test]
fn alignment_is_what_the_driver_promises_and_no_more() {
    let session = Session::new();
    let mut pool_address = 0;
    for _ in 0..20 {
        assert_eq!(session.allocate(1) % 1024, 512);
        assert_eq!(session.cuMemAllocAsync(&mut pool_address, 1, 0), 0);
        assert_eq!(pool_address % 512, 256);
    }
    session.configure("ALIGNMENT=2097152");
    assert_eq!(session.allocate(1) % (2 << 20), 0);
}

#[test]
fn capacity_is_finite_and_reported() {
    let session = Session::configured(&["MEMORY_MIB=4"]);
    let info = || {
        let (mut free, mut total) = (0, 0);
        assert_eq!(session.cuMemGetInfo_v2(&mut free, &mut total), 0);
        (free, total)
    };
    let mut address = 0;
    let first = session.allocate(3 * MIB);
    assert_eq!(info(), (MIB, 4 * MIB));
    assert_eq!(session.cuMemAlloc_v2(&mut address, MIB + 1), 2);
    assert_eq!(session.cuMemAlloc_v2(&mut address, usize::MAX), 2);
    assert_eq!(session.cuMemAlloc_v2(&mut address, 0), 1);
    // What a stream is about to free is waited for.
    let stream = session.stream();
    let gate = session.gate(stream);
    assert_eq!(session.cuMemFreeAsync(first, stream), 0);
    assert_eq!(session.cuMemAlloc_v2(&mut address, 5 * MIB), 2);
    drop(gate);
    assert_eq!(session.cuMemAlloc_v2(&mut address, 4 * MIB), 0);
    assert_eq!(info(), (0, 4 * MIB));
}

#[test]
fn memory_is_freed_once() {
    let session = Session::new();
    let address = session.allocate(100);
    assert_eq!(session.cuMemFree_v2(address + 1), 1);
    assert_eq!(session.cuMemFree_v2(address), 0);
    assert_eq!(session.cuMemFree_v2(address), 1);
    let address = session.allocate(100);
    assert_eq!((session.cuMemFreeAsync(address, 0), session.cuMemFreeAsync(address, 0)), (0, 1));
}

#[test]
fn freed_memory_is_out_of_bounds() {
    let session = Session::new();
    let address = session.upload(b"old");
    assert_eq!(session.cuMemFree_v2(address), 0);
    let mut byte = 0;
    assert_eq!(session.cuMemcpyDtoH_v2(&mut byte, address, 1), 700);
}

#[test]
fn memory_is_freed_in_the_order_of_the_stream() {
    let session = Session::new();
    let stream = session.stream();
    let source = session.pinned(b"data");
    let mut address = 0;
    assert_eq!(session.cuMemAllocAsync(&mut address, 4, stream), 0);
    let gate = session.gate(stream);
    assert_eq!(session.cuMemcpyHtoDAsync_v2(address, source.as_ptr(), 4, stream), 0);
    assert_eq!(session.cuMemFreeAsync(address, stream), 0);
    assert_eq!(session.count("device_bytes"), 4);
    drop(gate);
    assert_eq!(session.cuStreamSynchronize(stream), 0, "the copy came before");
    assert_eq!(session.count("device_bytes"), 0);
    assert_eq!(session.cuMemcpyHtoDAsync_v2(address, source.as_ptr(), 4, stream), 0);
    assert_eq!(session.cuStreamSynchronize(stream), 700, "this one came behind");
}

#[test]
fn freeing_waits_for_all_work_on_the_device() {
    let session = Session::new();
    let stream = session.stream();
    let mut other = 0;
    let address = session.allocate(4);
    let gate = session.gate(stream);
    assert_eq!(session.cuMemcpyHtoDAsync_v2(address, b"data".as_ptr(), 4, stream), 0);
    let calls = session.count("calls.cuMemFree_v2");
    thread::scope(|scope| {
        scope.spawn(|| {
            // From another context of the same device.
            assert_eq!(session.cuCtxCreate_v2(&mut other, 0, 0), 0);
            assert_eq!(session.cuMemFree_v2(address), 0);
            assert_eq!(session.cuCtxDestroy_v2(other), 0);
        });
        while session.count("calls.cuMemFree_v2") == calls {
            thread::yield_now();
        }
        thread::sleep(Duration::from_millis(30));
        assert_eq!(session.count("device_bytes"), 4);
        drop(gate);
    });
    assert_eq!(session.count("device_bytes"), 0);
    assert_eq!(session.cuStreamSynchronize(stream), 0, "the copy came before");
}

#[test]
fn pools_can_be_missing() {
    let session = Session::configured(&["POOLS=0"]);
    let mut address = 0;
    assert_eq!(session.cuMemAllocAsync(&mut address, 1, 0), 801);
}

#[test]
fn a_long_run_stays_small() {
    let session = Session::new();
    let mut addresses = HashSet::new();
    for _ in 0..64 {
        let address = session.allocate(16 * MIB);
        addresses.insert(address);
        assert_eq!(session.cuMemFree_v2(address), 0);
    }
    for _ in 0..10_000 {
        let address = session.allocate(100);
        addresses.insert(address);
        assert_eq!(session.cuMemFree_v2(address), 0);
    }
    assert_eq!(addresses.len(), 10_064, "addresses rest");
    assert!(resident_shared_bytes() < 200 << 20);
}

#[test]
fn out_of_bounds_makes_the_context_unusable() {
    let session = Session::new();
    let (stream, event) = (session.stream(), session.event());
    let address = session.allocate(1000);
    let neighbour = session.allocate(1000);
    let gate = session.gate(stream);
    assert_eq!(session.cuMemsetD8Async(address, 0, 1001, stream), 0);
    assert_eq!(session.cuEventRecord(event, stream), 0);
    drop(gate);
    assert_eq!(session.cuEventSynchronize(event), 700);
    let mut byte = 0;
    let later = [
        session.cuEventQuery(event),
        session.cuStreamQuery(stream),
        session.cuStreamSynchronize(stream),
        session.cuCtxSynchronize(),
        session.cuMemAlloc_v2(&mut 0, 1),
        session.cuMemcpyDtoH_v2(&mut byte, neighbour, 1),
        session.cuMemsetD8Async(neighbour, 0, 1, stream),
        session.cuMemFree_v2(address),
    ];
    assert_eq!(later, [700; 8]);
    assert_eq!(session.count("device_bytes"), 1000, "freed nevertheless");
    session.fake_cuda_reset();
    assert_eq!(session.download(neighbour, 1), [POISON]);
}

#[test]
fn pointers_know_what_they_point_to() {
    let session = Session::new();
    let address = session.allocate(1000);
    let pinned = session.pinned(&pattern(4096));
    let ask = |attribute, address: u64| {
        let mut value = 0u64;
        let code = session.cuPointerGetAttribute(ptr::from_mut(&mut value).cast(), attribute, address);
        if code == 0 { Ok(value) } else { Err(code) }
    };
    // Context, type, device pointer, ordinal, start, size.
    let of_device = [1, 2, 3, 9, 11, 12].map(|attribute| ask(attribute, address + 999).unwrap());
    assert_eq!(of_device, [session.context as u64, 2, address + 999, 0, address, 1000]);
    let host = pinned.as_ptr() as u64;
    let of_host = [1, 2, 3, 9, 11, 12].map(|attribute| ask(attribute, host + 1).unwrap());
    assert_eq!(of_host, [session.context as u64, 1, host + 1, 0, host, 4096]);
    assert_eq!(ask(2, address + 1000), Err(1));
    assert_eq!(ask(2, (&raw const session).addr() as u64), Err(1));
    let (mut start, mut bytes) = (0, 0);
    assert_eq!(session.cuMemGetAddressRange_v2(&mut start, &mut bytes, address + 5), 0);
    assert_eq!((start, bytes), (address, 1000));
    let mut device = 0;
    assert_eq!((session.cuMemHostGetDevicePointer_v2(&mut device, pinned.as_ptr(), 0), device), (0, host));
}

#[test]
fn pinned_memory_is_freed_as_it_was_made() {
    let session = Session::new();
    let allocated = session.pinned(&[1; 100]);
    let bytes = [0u8; 100];
    assert_eq!(session.cuMemHostRegister_v2(bytes.as_ptr(), 100, 0), 0);
    assert_eq!(session.cuMemHostUnregister(allocated.as_ptr()), 713);
    assert_eq!(session.cuMemFreeHost(bytes.as_ptr().cast_mut()), 1);
    assert_eq!(session.count("pinned_bytes"), 200);
    assert_eq!(session.cuMemFreeHost(allocated.as_mut_ptr()), 0);
    assert_eq!(session.cuMemHostUnregister(bytes.as_ptr()), 0);
    assert_eq!(session.count("pinned_bytes"), 0);
}

#[test]
fn registrations_do_not_overlap() {
    let session = Session::new();
    let host = vec![0u8; 300];
    let at = |offset: usize| host[offset..].as_ptr();
    assert_eq!(session.cuMemHostRegister_v2(at(100), 0, 0), 1);
    assert_eq!(session.cuMemHostRegister_v2(ptr::null(), 1, 0), 1);
    assert_eq!(session.cuMemHostRegister_v2(at(100), 100, 1), 0);
    assert_eq!(session.count("pinned_bytes"), 100);
    for (offset, bytes) in [(100, 100), (0, 101), (199, 1), (0, 300)] {
        assert_eq!(session.cuMemHostRegister_v2(at(offset), bytes, 0), 712, "{offset}");
    }
    assert_eq!(session.cuMemHostRegister_v2(at(0), 100, 0), 0);
    assert_eq!(session.cuMemHostRegister_v2(at(200), 100, 0), 0);
    assert_eq!(session.cuMemHostUnregister(at(101)), 713);
    for offset in [0, 100, 200] {
        assert_eq!(session.cuMemHostUnregister(at(offset)), 0);
    }
    assert_eq!(session.cuMemHostUnregister(at(100)), 713);
    assert_eq!(session.cuMemHostRegister_v2(ptr::without_provenance(0x1000), 1, 0), 1, "not mapped");
}
