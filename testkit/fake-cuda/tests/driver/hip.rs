//! The runtime of HIP: what it shares with CUDA's driver, and where it differs.

use crate::{
    fixture::{ENDLESS, pattern},
    library::library,
};
use std::{
    ffi::c_void,
    ptr,
    sync::{MutexGuard, PoisonError},
};

/// A function of the runtime, by its name.
macro_rules! hip {
    ($name:ident($($argument:ident: $type:ty = $value:expr),*)) => {{
        let function: unsafe extern "C" fn($($type),*) -> i32 = library().symbol(stringify!($name));
        // SAFETY: the types are those of the header; the pointers lead to what it asks for.
        unsafe { function($($value),*) }
    }};
}

/// The runtime to oneself, initialised, with its default settings and the first device current.
struct Turn(#[expect(dead_code, reason = "held to be dropped")] MutexGuard<'static, ()>);

impl Turn {
    fn take() -> Self {
        let turn = crate::fixture::ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        library().fake_cuda_reset();
        assert_eq!(hip!(hipInit(flags: u32 = 0)), 0);
        assert_eq!(hip!(hipSetDevice(device: i32 = 0)), 0);
        last_error();
        Self(turn)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        library().fake_cuda_reset();
        if !std::thread::panicking() {
            for name in ["device_bytes.hip", "pinned_bytes.hip", "streams", "events", "modules"] {
                assert_eq!(library().count(name), 0, "{name}");
            }
        }
    }
}

fn last_error() -> i32 {
    hip!(hipGetLastError())
}

fn allocate(bytes: usize) -> u64 {
    let mut address = 0;
    assert_eq!(hip!(hipMalloc(place: *mut u64 = &mut address, bytes: usize = bytes)), 0);
    address
}

fn free(address: u64) {
    assert_eq!(hip!(hipFree(address: u64 = address)), 0);
}

fn stream() -> usize {
    let mut stream = 0;
    assert_eq!(hip!(hipStreamCreateWithFlags(place: *mut usize = &mut stream, flags: u32 = 1)), 0);
    stream
}

fn to_device(address: u64, bytes: &[u8], stream: usize) -> i32 {
    hip!(hipMemcpyHtoDAsync(
        to: u64 = address, from: *const u8 = bytes.as_ptr(), bytes: usize = bytes.len(), stream: usize = stream
    ))
}

fn read(address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let into: *mut u8 = bytes.as_mut_ptr();
    let code = hip!(hipMemcpyDtoHAsync(to: *mut u8 = into, from: u64 = address, bytes: usize = len, stream: usize = 0));
    assert_eq!(code, 0);
    bytes
}

#[repr(C)]
#[derive(Default)]
struct PointerAttributes {
    memory_type: u32,
    device: i32,
    device_pointer: usize,
    host_pointer: usize,
    is_managed: i32,
    flags: u32,
}

fn attributes(address: u64) -> PointerAttributes {
    let mut found = PointerAttributes::default();
    let code =
        hip!(hipPointerGetAttributes(place: *mut PointerAttributes = &mut found, address: u64 = address));
    assert_eq!(code, 0);
    found
}

#[test]
fn devices_say_what_they_are() {
    let _turn = Turn::take();
    let (mut version, mut count) = (0, 0);
    assert_eq!(hip!(hipRuntimeGetVersion(place: *mut i32 = &mut version)), 0);
    assert_eq!(hip!(hipGetDeviceCount(place: *mut i32 = &mut count)), 0);
    assert_eq!((version / 10_000_000, count), (6, 2));
    let mut properties = vec![0u8; 1472];
    let place: *mut u8 = properties.as_mut_ptr();
    assert_eq!(hip!(hipGetDevicePropertiesR0600(place: *mut u8 = place, device: i32 = 1)), 0);
    assert!(properties[1160..].starts_with(b"gfx942:"));
    assert_eq!(hip!(hipGetDevicePropertiesR0600(place: *mut u8 = place, device: i32 = 2)), 101);
}

#[test]
fn memory_is_that_of_the_device_that_is_current_on_the_thread() {
    let _turn = Turn::take();
    let first = allocate(1000);
    assert_eq!(hip!(hipSetDevice(device: i32 = 1)), 0);
    let second = allocate(1000);
    let of = |address| (attributes(address).memory_type, attributes(address).device);
    assert_eq!((of(first + 999), of(second)), ((2, 0), (2, 1)));
    assert_eq!(attributes(ptr::from_ref(&first) as u64).memory_type, 0, "of no device");
    // CUDA's driver knows nothing of it, nor HIP's of CUDA's.
    let mut kind = 0u32;
    assert_eq!(library().cuPointerGetAttribute((&raw mut kind).cast::<c_void>(), 2, first), 1);
    free(second);
    free(first);
    assert_eq!(hip!(hipSetDevice(device: i32 = 0)), 0);
}

#[test]
fn bytes_are_copied_and_events_are_reached() {
    let _turn = Turn::take();
    let bytes = pattern(100_000);
    let (address, stream) = (allocate(bytes.len()), stream());
    let mut event = 0;
    assert_eq!(hip!(hipEventCreateWithFlags(place: *mut usize = &mut event, flags: u32 = 3)), 0);
    assert_eq!(to_device(address, &bytes, stream), 0);
    assert_eq!(hip!(hipEventRecord(event: usize = event, stream: usize = stream)), 0);
    assert_eq!(hip!(hipEventSynchronize(event: usize = event)), 0);
    assert_eq!(hip!(hipEventQuery(event: usize = event)), 0);
    assert!(read(address, bytes.len()) == bytes);
    assert_eq!(hip!(hipEventDestroy(event: usize = event)), 0);
    assert_eq!(hip!(hipStreamDestroy(stream: usize = stream)), 0);
    free(address);
}

/// The header leaves open what becomes of work of a stream that is destroyed: here it is lost.
#[test]
fn a_stream_that_is_destroyed_forgets_its_work() {
    let _turn = Turn::take();
    let pinned = pattern(4096);
    let memory: *const u8 = pinned.as_ptr();
    assert_eq!(hip!(hipHostRegister(address: *const u8 = memory, bytes: usize = 4096, flags: u32 = 1)), 0);
    let (address, stream) = (allocate(4096), stream());
    library().configure(ENDLESS);
    // The first is under way, or has not begun either.
    for _ in 0..2 {
        assert_eq!(to_device(address, &[0; 1], stream), 0);
    }
    assert_eq!(to_device(address, &pinned, stream), 0);
    assert_eq!(hip!(hipStreamDestroy(stream: usize = stream)), 0);
    library().fake_cuda_reset();
    assert_eq!(hip!(hipDeviceSynchronize()), 0);
    assert!(read(address + 1, 4095).iter().all(|byte| *byte == 0xA5));
    free(address);
    assert_eq!(hip!(hipHostUnregister(address: *const u8 = memory)), 0);
}

/// As AMD's runtime has it: the code says nothing of work that is in flight.
#[test]
fn a_stream_or_event_that_is_not_known_is_error_709() {
    let _turn = Turn::take();
    let (address, stream, mut event) = (allocate(16), stream(), 0);
    assert_eq!(hip!(hipEventCreateWithFlags(place: *mut usize = &mut event, flags: u32 = 3)), 0);
    assert_eq!(hip!(hipStreamDestroy(stream: usize = stream)), 0);
    assert_eq!(hip!(hipStreamDestroy(stream: usize = stream)), 709);
    assert_eq!(hip!(hipStreamSynchronize(stream: usize = stream)), 709);
    assert_eq!(hip!(hipStreamWaitEvent(stream: usize = stream, event: usize = event, flags: u32 = 0)), 709);
    assert_eq!(hip!(hipEventRecord(event: usize = event, stream: usize = stream)), 709);
    assert_eq!(to_device(address, &[1; 16], stream), 709);
    assert_eq!(hip!(hipEventDestroy(event: usize = event)), 0);
    assert_eq!(hip!(hipEventDestroy(event: usize = event)), 709);
    assert_eq!(hip!(hipEventQuery(event: usize = event)), 400);
    assert_eq!(hip!(hipDeviceSynchronize()), 0, "the device goes on");
    free(address);
}

/// What one driver has pinned, the other does not know.
#[test]
fn host_memory_is_pinned_for_one_driver() {
    let _turn = Turn::take();
    let memory = pattern(4096);
    let start: *const u8 = memory.as_ptr();
    let register = || hip!(hipHostRegister(address: *const u8 = start, bytes: usize = 4096, flags: u32 = 1));
    assert_eq!((register(), register()), (0, 712));
    let pinned = ["pinned_bytes.cuda", "pinned_bytes.hip"].map(|name| library().count(name));
    assert_eq!(pinned, [0, 4096]);
    let mut kind = 0u32;
    assert_eq!(library().cuInit(0), 0);
    assert_eq!(library().cuPointerGetAttribute((&raw mut kind).cast::<c_void>(), 2, start as u64), 1);
    assert_eq!(attributes(start as u64).memory_type, 1);
    assert_eq!(hip!(hipHostUnregister(address: *const u8 = start)), 0);
}

#[test]
fn a_threads_last_error_is_kept_until_it_is_asked_for() {
    let _turn = Turn::take();
    let mut address = 0;
    assert_eq!(hip!(hipMalloc(place: *mut u64 = &mut address, bytes: usize = 1 << 50)), 2);
    assert_eq!(std::thread::spawn(last_error).join().unwrap(), 0, "of another thread");
    assert_eq!((last_error(), last_error()), (2, 0));
    library().configure("FAULTS=hipMalloc:1=999");
    assert_eq!(hip!(hipMalloc(place: *mut u64 = &mut address, bytes: usize = 1)), 999);
    let mut name = ptr::null();
    assert_eq!(hip!(hipDrvGetErrorName(code: i32 = 999, place: *mut *const i8 = &mut name)), 0);
    // SAFETY: the runtime gave it.
    assert_eq!(unsafe { std::ffi::CStr::from_ptr(name) }, c"hipErrorUnknown");
    assert_eq!(last_error(), 999);
}

#[test]
fn an_error_that_ends_a_device_leaves_others_and_cudas_alone() {
    let _turn = Turn::take();
    library().configure("FAULTS=hipMemGetInfo:1=719");
    let (mut free, mut total) = (0, 0);
    let mut ask = || hip!(hipMemGetInfo(free: *mut usize = &mut free, total: *mut usize = &mut total));
    assert_eq!((ask(), ask()), (719, 719));
    assert_eq!(hip!(hipSetDevice(device: i32 = 1)), 0);
    assert_eq!(ask(), 0);
    assert_eq!(hip!(hipSetDevice(device: i32 = 0)), 0);
    let mut context = 0;
    assert_eq!(library().cuInit(0), 0);
    assert_eq!(library().cuDevicePrimaryCtxRetain(&mut context, 0), 0);
    assert_eq!(library().cuCtxPushCurrent_v2(context), 0);
    assert_eq!(library().cuMemGetInfo_v2(&mut free, &mut total), 0);
    assert_eq!(library().cuCtxPopCurrent_v2(&mut context), 0);
    assert_eq!(library().cuDevicePrimaryCtxRelease_v2(0), 0);
}

#[test]
fn kernels_are_those_of_the_engines_code_objects() {
    let _turn = Turn::take();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/hoistway-device/src/hip/kernels");
    let image = std::fs::read(format!("{folder}/gfx942.co")).unwrap();
    let (mut module, mut function) = (0, 0);
    let load = |module: &mut usize, image: &[u8]| hip!(hipModuleLoadData(place: *mut usize = module, image: *const u8 = image.as_ptr()));
    assert_eq!(load(&mut module, &image), 0);
    let mut find = |name: &std::ffi::CStr| {
        hip!(hipModuleGetFunction(
            place: *mut usize = &mut function, module: usize = module, name: *const i8 = name.as_ptr()
        ))
    };
    assert_eq!((find(c"hoistway_cast_f32_f32"), find(c"hoistway_copy")), (500, 0));
    let bytes = pattern(10_000);
    let (from, to, table) = (allocate(bytes.len()), allocate(bytes.len()), allocate(24));
    assert_eq!(to_device(from, &bytes, 0), 0);
    let segment: Vec<u8> = [from + 1, to + 2, 9000].into_iter().flat_map(u64::to_ne_bytes).collect();
    assert_eq!(to_device(table, &segment, 0), 0);
    let parameters = [ptr::from_ref(&table).cast::<c_void>()];
    let code = hip!(hipModuleLaunchKernel(
        function: usize = function, x: u32 = 2, y: u32 = 1, z: u32 = 1, a: u32 = 64, b: u32 = 1, c: u32 = 1,
        shared: u32 = 0, stream: usize = 0, parameters: *const *const c_void = parameters.as_ptr(),
        extra: *const *const c_void = ptr::null()
    ));
    assert_eq!(code, 0);
    assert!(read(to, bytes.len())[2..9002] == bytes[1..9001]);
    assert_eq!(hip!(hipModuleUnload(module: usize = module)), 0);
    assert_eq!(load(&mut module, &[b'x'; 64]), 200);
    [from, to, table].into_iter().for_each(free);
}
