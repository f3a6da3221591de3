//! The library's functions, found by name.

use libloading::Library as Loaded;
use std::{
    env,
    ffi::{CString, c_char, c_void},
    path::PathBuf,
    sync::OnceLock,
};

/// `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CufileStatus {
    pub(crate) error: i32,
    pub(crate) cuda: i32,
}

pub(crate) type HostFunction = extern "C" fn(*mut c_void);

/// A struct of function pointers, and a method to call each.
macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        #[allow(non_snake_case)]
        pub(crate) struct Library {
            loaded: &'static Loaded,
            $($name: unsafe extern "C" fn($($type),*) $(-> $result)?,)*
        }

        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl Library {
            fn new(loaded: &'static Loaded) -> Library {
                Library {
                    loaded,
                    // SAFETY: the types are those of NVIDIA's headers, which the stand-in follows.
                    $($name: unsafe { *loaded.get(stringify!($name)).unwrap() },)*
                }
            }

            $(pub(crate) fn $name(&self, $($argument: $type),*) $(-> $result)? {
                // SAFETY: the tests pass pointers to what the functions expect, or to nothing.
                unsafe { (self.$name)($($argument),*) }
            })*
        }
    };
}

functions! {
    cuInit(flags: u32) -> i32;
    cuDriverGetVersion(version: *mut i32) -> i32;
    cuGetErrorName(error: i32, name: *mut *const c_char) -> i32;
    cuGetErrorString(error: i32, text: *mut *const c_char) -> i32;
    cuDeviceGetCount(count: *mut i32) -> i32;
    cuDeviceGet(device: *mut i32, ordinal: i32) -> i32;
    cuDeviceGetName(name: *mut u8, room: i32, device: i32) -> i32;
    cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) -> i32;
    cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) -> i32;
    cuDeviceGetPCIBusId(text: *mut u8, room: i32, device: i32) -> i32;
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32) -> i32;
    cuDevicePrimaryCtxRetain(context: *mut usize, device: i32) -> i32;
    cuDevicePrimaryCtxRelease_v2(device: i32) -> i32;
    cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32) -> i32;
    cuDevicePrimaryCtxReset_v2(device: i32) -> i32;
    cuCtxGetId(context: usize, id: *mut u64) -> i32;
    cuCtxGetCurrent(context: *mut usize) -> i32;
    cuCtxSetCurrent(context: usize) -> i32;
    cuCtxPushCurrent_v2(context: usize) -> i32;
    cuCtxPopCurrent_v2(context: *mut usize) -> i32;
    cuCtxGetDevice(device: *mut i32) -> i32;
    cuCtxSynchronize() -> i32;
    cuCtxCreate_v2(context: *mut usize, flags: u32, device: i32) -> i32;
    cuCtxDestroy_v2(context: usize) -> i32;
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> i32;
    cuMemAlloc_v2(address: *mut u64, bytes: usize) -> i32;
    cuMemFree_v2(address: u64) -> i32;
    cuMemAllocAsync(address: *mut u64, bytes: usize, stream: usize) -> i32;
    cuMemFreeAsync(address: u64, stream: usize) -> i32;
    cuMemHostRegister_v2(address: *const u8, bytes: usize, flags: u32) -> i32;
    cuMemHostUnregister(address: *const u8) -> i32;
    cuMemHostAlloc(address: *mut *mut u8, bytes: usize, flags: u32) -> i32;
    cuMemFreeHost(address: *mut u8) -> i32;
    cuMemHostGetDevicePointer_v2(device: *mut u64, address: *const u8, flags: u32) -> i32;
    cuMemGetAddressRange_v2(start: *mut u64, bytes: *mut usize, address: u64) -> i32;
    cuPointerGetAttribute(value: *mut c_void, attribute: i32, address: u64) -> i32;
    cuStreamCreate(stream: *mut usize, flags: u32) -> i32;
    cuStreamCreateWithPriority(stream: *mut usize, flags: u32, priority: i32) -> i32;
    cuStreamDestroy_v2(stream: usize) -> i32;
    cuStreamQuery(stream: usize) -> i32;
    cuStreamSynchronize(stream: usize) -> i32;
    cuStreamWaitEvent(stream: usize, event: usize, flags: u32) -> i32;
    cuEventCreate(event: *mut usize, flags: u32) -> i32;
    cuEventRecord(event: usize, stream: usize) -> i32;
    cuEventQuery(event: usize) -> i32;
    cuEventSynchronize(event: usize) -> i32;
    cuEventDestroy_v2(event: usize) -> i32;
    cuThreadExchangeStreamCaptureMode(mode: *mut i32) -> i32;
    cuStreamBeginCapture_v2(stream: usize, mode: i32) -> i32;
    cuStreamEndCapture(stream: usize, graph: *mut usize) -> i32;
    cuStreamIsCapturing(stream: usize, status: *mut i32) -> i32;
    cuGraphInstantiateWithFlags(executable: *mut usize, graph: usize, flags: u64) -> i32;
    cuGraphLaunch(executable: usize, stream: usize) -> i32;
    cuGraphDestroy(graph: usize) -> i32;
    cuGraphExecDestroy(executable: usize) -> i32;
    cuLaunchHostFunc(stream: usize, function: HostFunction, argument: *mut c_void) -> i32;
    cuMemcpyHtoDAsync_v2(destination: u64, source: *const u8, bytes: usize, stream: usize) -> i32;
    cuMemcpyDtoHAsync_v2(destination: *mut u8, source: u64, bytes: usize, stream: usize) -> i32;
    cuMemcpyDtoDAsync_v2(destination: u64, source: u64, bytes: usize, stream: usize) -> i32;
    cuMemcpyHtoD_v2(destination: u64, source: *const u8, bytes: usize) -> i32;
    cuMemcpyDtoH_v2(destination: *mut u8, source: u64, bytes: usize) -> i32;
    cuMemcpy2DAsync_v2(parameters: *const Memcpy2D, stream: usize) -> i32;
    cuMemsetD8Async(address: u64, value: u8, bytes: usize, stream: usize) -> i32;
    cuMemcpyBatchAsync(
        to: *const u64, from: *const u64, sizes: *const usize, count: usize, attributes: *const [i32; 6],
        firsts: *const usize, attribute_count: usize, refused: *mut usize, stream: usize
    ) -> i32;
    cuMemcpyBatchAsync_v2(
        to: *const u64, from: *const u64, sizes: *const usize, count: usize, attributes: *const [i32; 6],
        firsts: *const usize, attribute_count: usize, stream: usize
    ) -> i32;
    cuModuleLoadData(module: *mut usize, image: *const c_char) -> i32;
    cuModuleUnload(module: usize) -> i32;
    cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) -> i32;
    cuLaunchKernel(
        function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32, stream: usize, parameters: *const *const c_void, extra: *const *const c_void
    ) -> i32;

    cuFileDriverOpen() -> CufileStatus;
    cuFileDriverClose_v2() -> CufileStatus;
    cuFileDriverGetProperties(properties: *mut [u32; 14]) -> CufileStatus;
    cuFileUseCount() -> i64;
    cuFileGetVersion(version: *mut i32) -> CufileStatus;
    cuFileHandleRegister(handle: *mut usize, description: *const [u64; 3]) -> CufileStatus;
    cuFileHandleDeregister(handle: usize);
    cuFileBufRegister(base: u64, bytes: usize, flags: i32) -> CufileStatus;
    cuFileBufDeregister(base: u64) -> CufileStatus;
    cuFileRead(file: usize, base: u64, size: usize, file_offset: i64, buffer_offset: i64) -> isize;
    cuFileWrite(file: usize, base: u64, size: usize, file_offset: i64, buffer_offset: i64) -> isize;
    cuFileSetParameterString(parameter: i32, value: *const c_char) -> CufileStatus;
    cuFileSetParameterBool(parameter: i32, value: bool) -> CufileStatus;
    cuFileSetParameterSizeT(parameter: i32, value: usize) -> CufileStatus;
    cuFileGetParameterBool(parameter: i32, value: *mut bool) -> CufileStatus;
    cuFileSetStatsLevel(level: i32) -> CufileStatus;
    cuFileStatsStart() -> CufileStatus;
    cuFileGetStatsL3(stats: *mut [u64; 639]) -> CufileStatus;

    fake_cuda_configure(text: *const c_char) -> i32;
    fake_cuda_reset();
    fake_cuda_count(name: *const c_char) -> u64;
}

/// `CUDA_MEMCPY2D_v2`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Memcpy2D {
    pub(crate) source: Memcpy2DSide,
    pub(crate) destination: Memcpy2DSide,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Memcpy2DSide {
    pub(crate) x: usize,
    pub(crate) y: usize,
    pub(crate) memory_type: u32,
    pub(crate) host: usize,
    pub(crate) device: u64,
    pub(crate) array: usize,
    pub(crate) pitch: usize,
}

/// The stand-in, loaded once.
pub(crate) fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // SAFETY: nothing runs when the stand-in is loaded.
        let loaded = unsafe { Loaded::new(path()) }.unwrap();
        Library::new(Box::leak(Box::new(loaded)))
    })
}

/// Cargo puts it beside the test, or a folder above.
fn path() -> PathBuf {
    let test = env::current_exe().unwrap();
    let mut places = test.ancestors().skip(1).take(2).map(|folder| folder.join("libfake_cuda.so"));
    places.find(|place| place.exists()).expect("cargo builds the library with its tests")
}

impl Library {
    /// Another function, of the type that the caller names.
    pub(crate) fn symbol<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the caller names the function's type.
        unsafe { *self.loaded.get::<F>(name).unwrap() }
    }

    pub(crate) fn configure(&self, text: &str) {
        let text = CString::new(text).unwrap();
        assert_eq!(self.fake_cuda_configure(text.as_ptr()), 0, "{text:?}");
    }

    pub(crate) fn count(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        self.fake_cuda_count(name.as_ptr())
    }
}
