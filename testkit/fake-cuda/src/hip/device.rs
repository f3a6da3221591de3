//! The runtime itself, its devices, and their memory.

use super::error_names::describe;
use crate::{
    control::settings,
    driver::{
        device::{ordinal, put_description, start, uuid},
        memory, pointer, put, put_text,
    },
    gate,
    memory::{
        device::POOL_ALIGNMENT,
        host::{self, Driver},
    },
    status::{Code, INVALID_VALUE},
};
use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    ptr,
};

#[unsafe(no_mangle)]
unsafe extern "C" fn hipInit(flags: c_uint) -> Code {
    gate::anyone("hipInit", || start(flags))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipRuntimeGetVersion(version: *mut c_int) -> Code {
    // SAFETY: the place is the caller's.
    gate::anyone("hipRuntimeGetVersion", || unsafe { put(version, settings().hip_version) })
}

/// Takes no lock and counts nothing, so that a forked child can say what went wrong.
#[unsafe(no_mangle)]
unsafe extern "C" fn hipDrvGetErrorName(error: Code, name: *mut *const c_char) -> Code {
    // SAFETY: the place is the caller's.
    unsafe { put_description(name, describe(error).map(|description| description.0)) }
}

/// As `hipDrvGetErrorName`.
#[unsafe(no_mangle)]
unsafe extern "C" fn hipDrvGetErrorString(error: Code, text: *mut *const c_char) -> Code {
    // SAFETY: the place is the caller's.
    unsafe { put_description(text, describe(error).map(|description| description.1)) }
}

/// The last error of this thread's calls, which this takes back.
#[unsafe(no_mangle)]
extern "C" fn hipGetLastError() -> Code {
    gate::take_hip_error()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipGetDeviceCount(count: *mut c_int) -> Code {
    // SAFETY: the place is the caller's.
    gate::hip("hipGetDeviceCount", || unsafe { put(count, settings().devices as c_int) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipDeviceGet(device: *mut c_int, wanted: c_int) -> Code {
    // SAFETY: the place is the caller's.
    gate::hip("hipDeviceGet", || unsafe { put(device, ordinal(wanted)? as c_int) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipGetDevice(device: *mut c_int) -> Code {
    // SAFETY: the place is the caller's.
    gate::hip("hipGetDevice", || unsafe { put(device, gate::hip_device() as c_int) })
}

#[unsafe(no_mangle)]
extern "C" fn hipSetDevice(device: c_int) -> Code {
    gate::hip("hipSetDevice", || {
        gate::set_hip_device(ordinal(device)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceSynchronize() -> Code {
    gate::ending_on_hip_device("hipDeviceSynchronize", |context| {
        context.owner.synchronize();
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipDeviceGetName(name: *mut c_char, room: c_int, device: c_int) -> Code {
    gate::hip("hipDeviceGetName", || {
        let text = format!("Stand-in HIP device {}", ordinal(device)?);
        // SAFETY: the place is the caller's.
        unsafe { put_text(name, room, &text) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipDeviceTotalMem(bytes: *mut usize, device: c_int) -> Code {
    gate::hip("hipDeviceTotalMem", || {
        ordinal(device)?;
        // SAFETY: the place is the caller's.
        unsafe { put(bytes, settings().memory_bytes as usize) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipDeviceGetPCIBusId(text: *mut c_char, room: c_int, device: c_int) -> Code {
    gate::hip("hipDeviceGetPCIBusId", || {
        let address = format!("0000:{:02x}:00.0", ordinal(device)? + 0x81);
        // SAFETY: the place is the caller's.
        unsafe { put_text(text, room, &address) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipDeviceGetUuid(place: *mut [u8; 16], device: c_int) -> Code {
    gate::hip("hipDeviceGetUuid", || {
        let mut uuid = uuid(ordinal(device)?);
        uuid[..8].copy_from_slice(b"fake-hip");
        // SAFETY: the place is the caller's.
        unsafe { put(place, uuid) }
    })
}

/// Room for `hipDeviceProp_tR0600`.
const PROPERTIES_BYTES: usize = 1472;

/// Fills what programs look at; all else is 0.
#[unsafe(no_mangle)]
unsafe extern "C" fn hipGetDevicePropertiesR0600(place: *mut u8, device: c_int) -> Code {
    const INTEGRATED: usize = 396;
    const PAGEABLE_MEMORY_ACCESS: usize = 672;
    const MEMORY_POOLS_SUPPORTED: usize = 744;
    const GCN_ARCH_NAME: usize = 1160;
    gate::hip("hipGetDevicePropertiesR0600", || {
        ordinal(device)?;
        if place.is_null() {
            return Err(INVALID_VALUE);
        }
        let settings = settings();
        let mut properties = [0; PROPERTIES_BYTES];
        properties[INTEGRATED] = settings.integrated.into();
        properties[PAGEABLE_MEMORY_ACCESS] = settings.integrated.into();
        properties[MEMORY_POOLS_SUPPORTED] = settings.pools.into();
        let name = settings.hip_architecture.as_bytes();
        properties[GCN_ARCH_NAME..][..name.len()].copy_from_slice(name);
        // SAFETY: not null, so that the structure can be written.
        unsafe { ptr::copy_nonoverlapping(properties.as_ptr(), place, PROPERTIES_BYTES) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> Code {
    // SAFETY: the places are the caller's.
    gate::on_hip_device("hipMemGetInfo", |context| unsafe { memory::info(context, free, total) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipMalloc(place: *mut u64, bytes: usize) -> Code {
    // SAFETY: the place is the caller's.
    gate::on_hip_device("hipMalloc", |context| unsafe {
        memory::allocate(context, place, bytes, POOL_ALIGNMENT)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipFree(address: u64) -> Code {
    gate::ending_on_hip_device("hipFree", |_| memory::release(address))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipMallocAsync(place: *mut u64, bytes: usize, stream: usize) -> Code {
    // SAFETY: the place is the caller's.
    gate::on_hip_device("hipMallocAsync", |context| unsafe {
        memory::allocate_ordered(context, place, bytes, stream)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipFreeAsync(address: u64, stream: usize) -> Code {
    gate::ending_on_hip_device("hipFreeAsync", |context| memory::release_ordered(context, address, stream))
}

#[unsafe(no_mangle)]
extern "C" fn hipHostRegister(address: usize, bytes: usize, flags: c_uint) -> Code {
    // Portable, mapped, I/O memory, read-only.
    const FLAGS: c_uint = 0xF;
    gate::on_hip_device("hipHostRegister", |context| {
        if flags & !FLAGS != 0 {
            return Err(INVALID_VALUE);
        }
        host::register(&context.owner, address, bytes, false)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipHostUnregister(address: usize) -> Code {
    gate::ending_on_hip_device("hipHostUnregister", |_| host::unregister(Driver::Hip, address).map(drop))
}

/// `hipPointerAttribute_t`.
#[repr(C)]
struct PointerAttributes {
    memory_type: c_uint,
    device: c_int,
    device_pointer: usize,
    host_pointer: usize,
    is_managed: c_int,
    flags: c_uint,
}

/// An address that the runtime does not know is no error: it is of memory that is not registered.
#[unsafe(no_mangle)]
unsafe extern "C" fn hipPointerGetAttributes(place: *mut PointerAttributes, address: *const c_void) -> Code {
    gate::hip("hipPointerGetAttributes", || {
        let known = pointer::look_up(Driver::Hip, address.addr() as u64);
        let (memory_type, device) =
            known.map_or((0, -2), |known| (known.memory_type, known.owner.ordinal() as c_int));
        let (device_pointer, host_pointer) = match memory_type {
            0 => (0, 0),
            1 => (address.addr(), address.addr()),
            _ => (address.addr(), 0),
        };
        // SAFETY: the place is the caller's.
        unsafe {
            put(
                place,
                PointerAttributes {
                    memory_type,
                    device,
                    device_pointer,
                    host_pointer,
                    is_managed: 0,
                    flags: 0,
                },
            )
        }
    })
}

/// Pinned host memory.
#[unsafe(no_mangle)]
unsafe extern "C" fn hipHostMalloc(place: *mut usize, bytes: usize, flags: c_uint) -> Code {
    // Portable, mapped, write-combined.
    const FLAGS: c_uint = 0x7;
    gate::on_hip_device("hipHostMalloc", |context| {
        if flags & !FLAGS != 0 || place.is_null() {
            return Err(INVALID_VALUE);
        }
        let address = host::allocate(&context.owner, bytes)?;
        // SAFETY: the place is the caller's.
        unsafe { put(place, address) }
    })
}
