//! AMD's devices: what ROCm's runtime has of its own. Its functions for programs are those of a driver, and it is found at
//! run time, too.
//!
//! Signatures and numbers, also those of `driver::table`, are those of `hip/hip_runtime_api.h` of ROCm 6.0 to 6.3. ROCm 5
//! has other layouts and numbers, such as those of memory types, and is refused. This module has not run on hardware.
#![allow(unsafe_code)]

mod kernels;
mod machine;

use crate::{
    DeviceId, Finding, Result, Unavailable,
    backend::{Direct, Opened},
    driver::{
        Driver, Failed, Slot, Traits, Vendor, Words,
        device::DriverDevice,
        images::Image,
        library::{functions, is_loaded, searched_directories},
        table::{
            DeviceHandle, Handle, INVALID_VALUE, MEMORY_DEVICE, OUT_OF_MEMORY, ResultCode, SUCCESS, Symbols,
        },
    },
};
use libloading::Library;
use std::{
    collections::BTreeMap,
    ffi::{CStr, OsStr, OsString, c_int, c_uint, c_void},
    mem::offset_of,
    path::PathBuf,
    ptr,
};

/// The kind.
#[derive(Debug)]
pub(crate) struct Hip;

functions! {
    /// Functions about the current device, properties, addresses, and a thread's last error.
    returning ResultCode;
    required {
        current_device = "hipGetDevice"(*mut c_int);
        set_device = "hipSetDevice"(c_int);
        properties = "hipGetDevicePropertiesR0600"(*mut Properties, c_int);
        pointer_attributes = "hipPointerGetAttributes"(*mut PointerAttributes, *const c_void);
        last_error = "hipGetLastError"();
    }
    optional {}
}

/// `hipDeviceProp_tR0600`: the suffix stands for the layout, which later versions keep.
#[repr(C)]
pub(crate) struct Properties {
    _name: [u8; 256],
    _uuid: [u8; 16],
    luid: [u8; 8],
    _to_integrated: [u32; 29],
    integrated: c_int,
    _to_pageable: [u32; 68],
    pageable_memory_access: c_int,
    _to_pools: [u32; 17],
    memory_pools: c_int,
    gpu_direct_rdma: c_int,
    _to_architecture: [u32; 102],
    architecture: [u8; 256],
    _rest: [u64; 7],
}

/// As a C compiler lays it out.
const _: () = {
    assert!(offset_of!(Properties, luid) == 272);
    assert!(offset_of!(Properties, integrated) == 396);
    assert!(offset_of!(Properties, pageable_memory_access) == 672);
    assert!(offset_of!(Properties, memory_pools) == 744);
    assert!(offset_of!(Properties, gpu_direct_rdma) == 748);
    assert!(offset_of!(Properties, architecture) == 1160);
    assert!(size_of::<Properties>() == 1472);
};

/// `hipPointerAttribute_t` since ROCm 6.0.
#[repr(C)]
pub(crate) struct PointerAttributes {
    memory_type: c_uint,
    device: c_int,
    _device_pointer: Handle,
    _host_pointer: Handle,
    _is_managed: c_int,
    _flags: c_uint,
}

/// The names of all functions of the runtime that are called.
#[cfg(feature = "stand-in")]
pub(crate) fn function_names() -> Vec<&'static str> {
    [Hip::SYMBOLS.names(), Functions::NAMES.to_vec()].concat()
}

impl Vendor for Hip {
    type Own = Functions;

    const SYMBOLS: Symbols = Symbols {
        init: "hipInit",
        driver_version: "hipRuntimeGetVersion",
        error_name: "hipDrvGetErrorName",
        error_text: "hipDrvGetErrorString",
        device_count: "hipGetDeviceCount",
        device: "hipDeviceGet",
        device_name: "hipDeviceGetName",
        device_memory: "hipDeviceTotalMem",
        device_pci: "hipDeviceGetPCIBusId",
        device_uuid: "hipDeviceGetUuid",
        memory_info: "hipMemGetInfo",
        allocate: "hipMalloc",
        free: "hipFree",
        host_register: "hipHostRegister",
        host_unregister: "hipHostUnregister",
        stream_create: "hipStreamCreateWithFlags",
        stream_destroy: "hipStreamDestroy",
        stream_synchronize: "hipStreamSynchronize",
        stream_query: "hipStreamQuery",
        stream_wait_event: "hipStreamWaitEvent",
        event_create: "hipEventCreateWithFlags",
        event_record: "hipEventRecord",
        event_query: "hipEventQuery",
        event_synchronize: "hipEventSynchronize",
        event_destroy: "hipEventDestroy",
        copy_to_device: "hipMemcpyHtoDAsync",
        copy_to_host: "hipMemcpyDtoHAsync",
        copy_on_device: "hipMemcpyDtoDAsync",
        copy_2d: "hipMemcpyParam2DAsync",
        module_load: "hipModuleLoadData",
        module_unload: "hipModuleUnload",
        module_function: "hipModuleGetFunction",
        launch: "hipModuleLaunchKernel",
        allocate_async: "hipMallocAsync",
        free_async: "hipFreeAsync",
        exchange_capture_mode: "hipThreadExchangeStreamCaptureMode",
        stream_is_capturing: "hipStreamIsCapturing",
    };
    const WORDS: Words = Words {
        name: "ROCm",
        install: if cfg!(windows) {
            "install AMD's driver, or the HIP SDK 6.0 or later"
        } else {
            "install ROCm 6.0 or later; in a container, run it with --device=/dev/kfd --device=/dev/dri"
        },
        update: "install ROCm 6.0 or later",
        check: if cfg!(windows) { "check that hipInfo lists it" } else { "check that rocminfo lists it" },
        visible: "HIP_VISIBLE_DEVICES",
    };
    /// The first with the layouts below.
    const OLDEST_VERSION: i32 = 60_000_000;
    /// `kDLROCM`.
    const DLPACK_TYPES: &'static [i32] = &[10];
    /// The header leaves open what becomes of work that is queued on a stream that is destroyed.
    const STREAMS_OUTLIVE_HANDLES: bool = false;

    fn id(ordinal: u32) -> DeviceId {
        DeviceId::Rocm(ordinal)
    }

    fn slot() -> &'static Slot<Self> {
        static SLOT: Slot<Hip> = Slot::new();
        &SLOT
    }

    fn opened() -> &'static Opened {
        static OPENED: Opened = Opened::new(BTreeMap::new());
        &OPENED
    }

    /// What the process has loaded comes first: frameworks bring a runtime of their own, and one runtime knows nothing of
    /// another's memory.
    fn library_names() -> Vec<OsString> {
        #[cfg(feature = "stand-in")]
        if let Some(path) = std::env::var_os("HOISTWAY_HIP_DRIVER") {
            return std::env::split_paths(&path).map(Into::into).collect();
        }
        const NAMES: &[&str] = if cfg!(windows) {
            &["amdhip64_7.dll", "amdhip64_6.dll", "amdhip64.dll"]
        } else {
            &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"]
        };
        let (packages, own) = match cfg!(windows) {
            true => (Vec::new(), Vec::new()),
            false => (searched_directories(), vec![PathBuf::from("/opt/rocm/lib")]),
        };
        candidates(NAMES, &packages, &own, is_loaded)
    }

    fn find(library: &Library) -> Result<Functions, &'static str> {
        Functions::find(library)
    }

    /// `HIP_VERSION`: two digits for the minor version, five for the patch.
    fn version_text(version: i32) -> String {
        format!("HIP {}.{}", version / 10_000_000, version / 100_000 % 100)
    }

    fn fix(code: ResultCode) -> &'static str {
        match code {
            3 => {
                "if ROCm was started before fork(), start workers with the method 'spawn'; else check that rocminfo works"
            }
            100 if cfg!(windows) => "check that hipInfo lists a device",
            35 => "install the amdgpu driver that this version of ROCm needs",
            100 => {
                "check that rocminfo lists a device, and that this user may open /dev/kfd and /dev/dri/renderD*; in a \
                 container, run it with --device=/dev/kfd --device=/dev/dri"
            }
            _ if cfg!(windows) => "check that hipInfo works",
            _ => "check that rocminfo works",
        }
    }

    /// The device has failed. `hipErrorUnknown` (999) and errors of captures say nothing of work in flight. Nor does
    /// `hipErrorContextIsDestroyed` (709), which the runtime returns for streams and events that it does not know.
    fn ends_work(code: ResultCode) -> bool {
        // hipErrorECCNotCorrectable, IllegalAddress, LaunchTimeOut, Assert, LaunchFailure.
        matches!(code, 214 | 700 | 702 | 710 | 719)
    }

    /// The runtime returns `hipErrorInvalidValue` (1), too, for memory that it cannot pin.
    fn cannot_pin(code: ResultCode) -> bool {
        matches!(code, 1 | OUT_OF_MEMORY)
    }

    /// Programs ask for a thread's last error after kernels were started, and would take this one for theirs.
    fn forget_error(driver: &Driver<Self>) {
        if driver.is_usable() {
            // SAFETY: no arguments.
            unsafe { (driver.own.last_error)() };
        }
    }

    fn describe(driver: &Driver<Self>, handle: DeviceHandle) -> Result<Traits, Failed> {
        // SAFETY: numbers, for all of which zero is a value.
        let mut properties: Properties = unsafe { std::mem::zeroed() };
        // SAFETY: writes the structure.
        let code = unsafe { (driver.own.properties)(&mut properties, handle) };
        succeeded("hipGetDevicePropertiesR0600", code)?;
        let architecture = CStr::from_bytes_until_nul(&properties.architecture).unwrap_or_default();
        Ok(Traits {
            architecture: architecture.to_string_lossy().into_owned(),
            // Undefined elsewhere.
            luid: cfg!(windows).then_some(properties.luid),
            is_integrated: properties.integrated != 0,
            reads_pageable_memory: properties.pageable_memory_access != 0,
            has_memory_pools: properties.memory_pools != 0,
            has_gpudirect_rdma: properties.gpu_direct_rdma != 0,
            pins_read_only: false,
            uses_host_page_tables: false,
        })
    }

    fn kernels(architecture: &str) -> Vec<Image> {
        kernels::of(architecture)
    }

    /// Devices have one context each, to the end of the process.
    fn retain(_driver: &Driver<Self>, _handle: DeviceHandle) -> Result<Handle, Failed> {
        Ok(ptr::null_mut())
    }

    fn release(_driver: &Driver<Self>, _handle: DeviceHandle) {}

    fn enter(driver: &Driver<Self>, handle: DeviceHandle, _context: Handle) -> Result<DeviceHandle, Failed> {
        let mut before = 0;
        // SAFETY: writes one integer.
        succeeded("hipGetDevice", unsafe { (driver.own.current_device)(&mut before) })?;
        // SAFETY: the device is there.
        succeeded("hipSetDevice", unsafe { (driver.own.set_device)(handle) })?;
        Ok(before)
    }

    fn leave(driver: &Driver<Self>, before: DeviceHandle) {
        // SAFETY: it was current before.
        let code = unsafe { (driver.own.set_device)(before) };
        if code != SUCCESS {
            Self::forget_error(driver);
            tracing::warn!(device = before, code, "a thread's device of ROCm could not be set back");
        }
    }

    fn owner_of(driver: &Driver<Self>, address: u64) -> Result<Option<u32>, Failed> {
        // SAFETY: numbers and pointers, for all of which zero is a value.
        let mut found: PointerAttributes = unsafe { std::mem::zeroed() };
        let Ok(address) = usize::try_from(address) else { return Ok(None) };
        // SAFETY: writes the structure. Any address may be asked about.
        let code =
            unsafe { (driver.own.pointer_attributes)(&mut found, ptr::with_exposed_provenance(address)) };
        if code == INVALID_VALUE {
            Self::forget_error(driver);
            return Ok(None);
        }
        succeeded("hipPointerGetAttributes", code)?;
        // Memory of the host may be known to the runtime too.
        Ok(u32::try_from(found.device).ok().filter(|_| found.memory_type == MEMORY_DEVICE))
    }

    fn direct(_device: &DriverDevice<Self>) -> Result<&dyn Direct, Unavailable> {
        Err(machine::no_direct_path())
    }

    fn may_have_direct_path() -> Result<(), Unavailable> {
        Err(machine::no_direct_path())
    }

    fn examine(devices: Result<usize, Unavailable>) -> Vec<Finding> {
        machine::examine(devices)
    }
}

fn succeeded(function: &'static str, code: ResultCode) -> Result<(), Failed> {
    if code == SUCCESS { Ok(()) } else { Err((function, code)) }
}

/// Where to look for libraries of these names: what is loaded, what lies in the directories of packages, what the system
/// finds, and last what lies in ROCm's own directories.
fn candidates(
    names: &[&str],
    packages: &[PathBuf],
    own: &[PathBuf],
    is_loaded: impl Fn(&OsStr) -> bool,
) -> Vec<OsString> {
    let (loaded, absent): (Vec<OsString>, Vec<OsString>) =
        names.iter().map(OsString::from).partition(|name| is_loaded(name));
    let present = |directories: &[PathBuf]| -> Vec<OsString> {
        let paths =
            directories.iter().flat_map(|directory| names.iter().map(move |name| directory.join(name)));
        paths.filter(|path| path.exists()).map(Into::into).collect()
    };
    [loaded, present(packages), absent, present(own)].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_loaded_comes_first_and_rocms_own_directory_last() {
        let [packages, own] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        for directory in [&packages, &own] {
            std::fs::write(directory.path().join("lib.so.6"), "").unwrap();
        }
        let directories = |directory: &tempfile::TempDir| vec![directory.path().to_owned()];
        let found = candidates(
            &["lib.so.7", "lib.so.6", "lib.so"],
            &directories(&packages),
            &directories(&own),
            |name| name == "lib.so",
        );
        let expected = [
            "lib.so".into(),
            packages.path().join("lib.so.6"),
            "lib.so.7".into(),
            "lib.so.6".into(),
            own.path().join("lib.so.6"),
        ];
        assert_eq!(found, expected.map(PathBuf::into_os_string));
    }
}
