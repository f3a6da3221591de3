//! The driver itself and its devices.

use super::{put, put_text};
use crate::{
    control::{control, settings},
    gate,
    status::{Code, INVALID_DEVICE, INVALID_VALUE, NO_DEVICE, NOT_SUPPORTED},
    status_names::describe,
};
use std::ffi::{CStr, c_char, c_int, c_uint};

/// A number that the driver numbers devices with, if there is such a device.
pub(crate) fn ordinal(device: c_int) -> Result<usize, Code> {
    usize::try_from(device).ok().filter(|device| *device < settings().devices).ok_or(INVALID_DEVICE)
}

/// The same for each run: a device is recognized by it.
pub(crate) fn uuid(device: usize) -> [u8; 16] {
    let mut uuid = *b"fake-cuda device";
    uuid[15] = device as u8 + 1;
    uuid
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuInit(flags: c_uint) -> Code {
    gate::anyone("cuInit", || start(flags))
}

/// Lets this process use devices, if there are any.
pub(crate) fn start(flags: c_uint) -> Result<(), Code> {
    if flags != 0 || !control().environment_is_sound() {
        return Err(INVALID_VALUE);
    }
    if settings().devices == 0 {
        return Err(NO_DEVICE);
    }
    gate::open();
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Code {
    // SAFETY: the place is the caller's.
    gate::anyone("cuDriverGetVersion", || unsafe { put(version, settings().driver_version) })
}

/// Takes no lock and counts nothing, so that a forked child can say what went wrong.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(error: Code, name: *mut *const c_char) -> Code {
    // SAFETY: the place is the caller's.
    unsafe { put_description(name, describe(error).map(|description| description.0)) }
}

/// As `cuGetErrorName`.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(error: Code, text: *mut *const c_char) -> Code {
    // SAFETY: the place is the caller's.
    unsafe { put_description(text, describe(error).map(|description| description.1)) }
}

/// # Safety
/// `place` is null or can be written.
pub(crate) unsafe fn put_description(place: *mut *const c_char, text: Option<&CStr>) -> Code {
    // SAFETY: the caller promised that the place can be written.
    let written = unsafe { put(place, text.map_or(std::ptr::null(), CStr::as_ptr)) };
    written.and(text.map(|_| ()).ok_or(INVALID_VALUE)).err().unwrap_or(0)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Code {
    // SAFETY: the place is the caller's.
    gate::initialized("cuDeviceGetCount", || unsafe { put(count, settings().devices as c_int) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, wanted: c_int) -> Code {
    // SAFETY: the place is the caller's.
    gate::initialized("cuDeviceGet", || unsafe { put(device, ordinal(wanted)? as c_int) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, room: c_int, device: c_int) -> Code {
    gate::initialized("cuDeviceGetName", || {
        let text = format!("Stand-in device {}", ordinal(device)?);
        // SAFETY: the place is the caller's.
        unsafe { put_text(name, room, &text) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> Code {
    gate::initialized("cuDeviceTotalMem_v2", || {
        ordinal(device)?;
        // SAFETY: the place is the caller's.
        unsafe { put(bytes, settings().memory_bytes as usize) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> Code {
    gate::initialized("cuDeviceGetAttribute", || {
        let answer = self::attribute(attribute, ordinal(device)?);
        // SAFETY: the place is the caller's.
        unsafe { put(value, answer) }
    })
}

/// The bus number with `%x`, as `cuDeviceGetAttribute` has it: real drivers print it in upper or lower case.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(text: *mut c_char, room: c_int, device: c_int) -> Code {
    gate::initialized("cuDeviceGetPCIBusId", || {
        let address = format!("0000:{:02x}:00.0", ordinal(device)? + 1);
        // SAFETY: the place is the caller's.
        unsafe { put_text(text, room, &address) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid(place: *mut [u8; 16], device: c_int) -> Code {
    // SAFETY: the place is the caller's.
    gate::initialized("cuDeviceGetUuid", || unsafe { put(place, uuid(ordinal(device)?)) })
}

/// What other interfaces of Windows know a device by.
pub(crate) fn luid(device: usize) -> [u8; 8] {
    [device as u8 + 1, 0, 0, 0, 0x57, 0x48, 0, 0]
}

/// Devices of Linux have none, nor has one of Windows that shows no pictures.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetLuid(place: *mut [u8; 8], mask: *mut c_uint, device: c_int) -> Code {
    gate::initialized("cuDeviceGetLuid", || {
        let device = ordinal(device)?;
        if cfg!(not(windows)) || !settings().luids {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: the places are the caller's.
        unsafe { put(place, luid(device)).and_then(|()| put(mask, settings().luid_nodes)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(place: *mut [u8; 16], device: c_int) -> Code {
    // SAFETY: the place is the caller's.
    gate::initialized("cuDeviceGetUuid_v2", || unsafe { put(place, uuid(ordinal(device)?)) })
}

/// By the numbers of `CUdevice_attribute`. What isn't listed is 0.
fn attribute(attribute: c_int, device: usize) -> c_int {
    const MAX_PITCH: c_int = 11;
    const MULTIPROCESSOR_COUNT: c_int = 16;
    const INTEGRATED: c_int = 18;
    const CAN_MAP_HOST_MEMORY: c_int = 19;
    const PCI_BUS_ID: c_int = 33;
    const UNIFIED_ADDRESSING: c_int = 41;
    const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
    const PAGEABLE_MEMORY_ACCESS: c_int = 88;
    const PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: c_int = 100;
    const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: c_int = 102;
    const READ_ONLY_HOST_REGISTER_SUPPORTED: c_int = 113;
    const MEMORY_POOLS_SUPPORTED: c_int = 115;
    const GPU_DIRECT_RDMA_SUPPORTED: c_int = 116;
    let settings = settings();
    match attribute {
        MAX_PITCH => super::copy::PITCH_MAX as c_int,
        MULTIPROCESSOR_COUNT => 132,
        INTEGRATED | PAGEABLE_MEMORY_ACCESS | PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES => {
            settings.integrated.into()
        }
        CAN_MAP_HOST_MEMORY | UNIFIED_ADDRESSING | GPU_DIRECT_RDMA_SUPPORTED => 1,
        PCI_BUS_ID => device as c_int + 1,
        COMPUTE_CAPABILITY_MAJOR => 9,
        MEMORY_POOLS_SUPPORTED => settings.pools.into(),
        VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED => settings.maps.into(),
        READ_ONLY_HOST_REGISTER_SUPPORTED => settings.pins_read_only.into(),
        _ => 0,
    }
}
