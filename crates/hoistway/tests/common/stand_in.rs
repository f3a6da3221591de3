//! The stand-in driver, its controls, and the vendors whose drivers it plays. See `testkit/fake-cuda`.

use hoistway_device::DeviceId;
use libloading::Library;
use std::{
    env::consts::{DLL_PREFIX, DLL_SUFFIX},
    ffi::{CString, c_char, c_int},
    ops::Deref,
    path::PathBuf,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
};

/// The stand-in of this process: loaded once, and found by the engine from then on.
pub static STAND_IN: LazyLock<StandIn> = LazyLock::new(StandIn::load);

pub struct StandIn {
    library: Library,
}

impl StandIn {
    fn load() -> Self {
        let path = path();
        // SAFETY: tests call this before the engine looks for a driver; other threads read the environment through
        // the standard library, which takes turns with this.
        unsafe {
            for variable in ["HOISTWAY_CUDA_DRIVER", "HOISTWAY_CUFILE", "HOISTWAY_HIP_DRIVER"] {
                std::env::set_var(variable, &path);
            }
            std::env::set_var("FAKE_CUDA_CUFILE_MODE", "nvfs");
        }
        // SAFETY: a library of this project without initialisers.
        let library = unsafe { Library::new(&path) }.unwrap_or_else(|error| panic!("{error}"));
        Self { library }
    }

    /// Sets `KEY=VALUE`. Devices that nothing uses are opened anew after that.
    pub fn set(&self, text: &str) {
        hoistway_device::release_devices();
        self.configure(text);
    }

    /// Sets `KEY=VALUE` for devices as they are.
    pub fn configure(&self, text: &str) {
        let text = CString::new(text).unwrap();
        // SAFETY: of this signature in the stand-in.
        let code = unsafe {
            let configure: libloading::Symbol<'_, unsafe extern "C" fn(*const c_char) -> c_int> =
                self.library.get(b"fake_cuda_configure\0").unwrap();
            configure(text.as_ptr())
        };
        assert_eq!(code, 0, "{text:?} means nothing to the stand-in");
    }

    /// Takes all settings back.
    pub fn reset(&self) {
        // SAFETY: of this signature in the stand-in.
        unsafe {
            let reset: libloading::Symbol<'_, unsafe extern "C" fn()> =
                self.library.get(b"fake_cuda_reset\0").unwrap();
            reset();
        }
    }

    pub fn count(&self, name: &str) -> u64 {
        let text = CString::new(name).unwrap();
        // SAFETY: of this signature in the stand-in.
        let count = unsafe {
            let count: libloading::Symbol<'_, unsafe extern "C" fn(*const c_char) -> u64> =
                self.library.get(b"fake_cuda_count\0").unwrap();
            count(text.as_ptr())
        };
        assert_ne!(count, u64::MAX, "the stand-in does not count {name}");
        count
    }

    /// What exists on the devices and must be gone when nothing uses them. Contexts that cuFile has met stay.
    pub fn leftovers(&self) -> Vec<(&'static str, u64)> {
        hoistway_device::release_devices();
        let of_memory = ["device_bytes", "pinned_bytes", "reserved", "blocks", "mapped"];
        let others = ["streams", "events", "modules", "cufile_handles", "cufile_buffers"];
        let counts = of_memory.into_iter().chain(others).map(|name| (name, self.count(name)));
        counts.filter(|(_, count)| *count > 0).collect()
    }

    /// A function of the driver, for tests that play another user of it.
    pub fn function<T: Copy>(&self, name: &str) -> T {
        let name = CString::new(name).unwrap();
        // SAFETY: the caller names the function's type.
        unsafe { *self.library.get::<T>(name.as_bytes_with_nul()).unwrap() }
    }
}

/// A vendor whose driver the stand-in plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    Cuda,
    Rocm,
}

/// The call of CUDA for several copies.
const BATCH: &str = "cuMemcpyBatchAsync";

impl Vendor {
    pub const ALL: [Self; 2] = [Self::Cuda, Self::Rocm];

    /// The device of this number.
    pub fn device(self, ordinal: u32) -> DeviceId {
        match self {
            Self::Cuda => DeviceId::Cuda(ordinal),
            Self::Rocm => DeviceId::Rocm(ordinal),
        }
    }

    /// The vendor's name of a function of CUDA's; other names are those of both.
    pub fn symbol(self, of_cuda: &str) -> &str {
        if self == Self::Cuda {
            return of_cuda;
        }
        match of_cuda {
            "cuCtxPushCurrent_v2" => "hipGetDevice",
            "cuDevicePrimaryCtxRetain" => "hipGetDevicePropertiesR0600",
            "cuEventCreate" => "hipEventCreateWithFlags",
            "cuEventDestroy_v2" => "hipEventDestroy",
            "cuEventQuery" => "hipEventQuery",
            "cuEventRecord" => "hipEventRecord",
            "cuEventSynchronize" => "hipEventSynchronize",
            "cuInit" => "hipInit",
            "cuLaunchKernel" => "hipModuleLaunchKernel",
            "cuMemAlloc_v2" => "hipMalloc",
            "cuMemAllocAsync" => "hipMallocAsync",
            "cuMemFree_v2" => "hipFree",
            "cuMemGetInfo_v2" => "hipMemGetInfo",
            "cuMemHostRegister_v2" => "hipHostRegister",
            "cuMemcpy2DAsync_v2" => "hipMemcpyParam2DAsync",
            "cuMemcpyDtoHAsync_v2" => "hipMemcpyDtoHAsync",
            "cuMemcpyHtoDAsync_v2" => "hipMemcpyHtoDAsync",
            "cuModuleGetFunction" => "hipModuleGetFunction",
            "cuModuleLoadData" => "hipModuleLoadData",
            "cuStreamCreate" => "hipStreamCreateWithFlags",
            "cuStreamQuery" => "hipStreamQuery",
            "cuStreamSynchronize" => "hipStreamSynchronize",
            "cuStreamDestroy_v2" => "hipStreamDestroy",
            other => {
                assert!(!other.starts_with("cu"), "{other} has no name of HIP's");
                other
            }
        }
    }

    /// Counts what exists on the vendor's devices alone: `device_bytes` or `pinned_bytes`.
    pub fn count(self, name: &str) -> u64 {
        let suffix = match self {
            Self::Cuda => "cuda",
            Self::Rocm => "hip",
        };
        STAND_IN.count(&format!("{name}.{suffix}"))
    }

    /// Faults as the stand-in takes them, from those of CUDA's functions.
    ///
    /// Where copies between host and device are to fail, CUDA is made to refuse several by one call, as it depends on the
    /// time whether that is tried: then each copy is a call of its own.
    pub fn faults(self, of_cuda: &str) -> String {
        let mut each: Vec<_> = of_cuda
            .split(',')
            .map(|fault| {
                let (function, when) = fault.split_once(':').unwrap();
                format!("{}:{when}", self.symbol(function))
            })
            .collect();
        let fails = |function: &str| of_cuda.contains(function);
        let fails_copies = fails("cuMemcpyHtoDAsync") || fails("cuMemcpyDtoHAsync");
        if self == Self::Cuda && fails_copies && !fails(BATCH) {
            each.push(format!("{BATCH}:*=1"));
        }
        format!("FAULTS={}", each.join(","))
    }
}

/// The stand-in, to oneself: its settings are the process's.
pub struct Turn {
    _turn: MutexGuard<'static, ()>,
    /// What others have left: memory in doubt stays pinned.
    before: Vec<(&'static str, u64)>,
}

impl Turn {
    pub fn take() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        STAND_IN.reset();
        Self { _turn: turn, before: STAND_IN.leftovers() }
    }

    pub fn assert_nothing_left(&self, of: &str) {
        assert_eq!(STAND_IN.leftovers(), self.before, "{of}");
    }
}

impl Deref for Turn {
    type Target = StandIn;

    fn deref(&self) -> &StandIn {
        &STAND_IN
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        STAND_IN.reset();
    }
}

/// Cargo puts it beside the test programs.
pub fn path() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let directory = program.parent().unwrap();
    let name = format!("{DLL_PREFIX}fake_cuda{DLL_SUFFIX}");
    let names = [directory.join(&name), directory.join("..").join(&name)];
    names.into_iter().find(|path| path.exists()).expect("the stand-in was not built beside the tests")
}
