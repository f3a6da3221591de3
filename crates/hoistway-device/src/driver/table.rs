//! The functions that the drivers of several vendors have in common, each with its own name: what they take, return and
//! mean is the same, down to the numbers. The vendor's module says the names, and where that is written.
#![allow(unsafe_code)]

use libloading::Library;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};

/// A device, as the driver numbers them.
pub(crate) type DeviceHandle = c_int;
/// A context, stream, event, module or kernel: an opaque pointer.
pub(crate) type Handle = *mut c_void;
/// An address in a device's memory.
pub(crate) type DevicePointer = u64;
/// What nearly every function returns.
pub(crate) type ResultCode = c_int;

pub(crate) const SUCCESS: ResultCode = 0;
pub(crate) const OUT_OF_MEMORY: ResultCode = 2;
pub(crate) const INVALID_VALUE: ResultCode = 1;
/// What a handle names is not there, or no more.
pub(crate) const INVALID_HANDLE: ResultCode = 400;
pub(crate) const INVALID_CONTEXT: ResultCode = 201;
pub(crate) const NOT_READY: ResultCode = 600;
/// Memory of the host was not pinned, or is no more.
pub(super) const HOST_MEMORY_NOT_REGISTERED: ResultCode = 713;
pub(super) const NOT_SUPPORTED: ResultCode = 801;
/// A stream is captured, which what was asked for does not go with.
pub(super) const CAPTURE_UNSUPPORTED: ResultCode = 900;

/// Whether a call was refused, with no effect, since it does not go with a capture that is under way. An event that was captured
/// (907) is not among these: it stays so until it is recorded again.
pub(crate) fn is_not_now(code: ResultCode) -> bool {
    /// From `STREAM_CAPTURE_UNSUPPORTED` to `STREAM_CAPTURE_IMPLICIT`.
    const CAPTURE_ERRORS: std::ops::RangeInclusive<ResultCode> = 900..=906;
    CAPTURE_ERRORS.contains(&code)
}

/// Pinned for every context.
pub(super) const HOST_REGISTER_PORTABLE: c_uint = 1;
/// `CU_MEMHOSTREGISTER_READ_ONLY`.
pub(super) const HOST_REGISTER_READ_ONLY: c_uint = 8;
/// No order with the legacy default stream.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// This thread's calls are no part of what others capture.
pub(crate) const CAPTURE_RELAXED: c_int = 2;
/// Waiting threads sleep, and no times are taken.
pub(super) const EVENT_QUIET: c_uint = 1 | 2;
/// A side of a copy of rows is in host memory.
pub(super) const MEMORY_HOST: c_uint = 1;
/// A side of a copy of rows, or an address that was asked about, is in a device's memory.
pub(crate) const MEMORY_DEVICE: c_uint = 2;

/// A copy of rows.
#[repr(C)]
pub(crate) struct Copy2d {
    pub(super) source_x: usize,
    pub(super) source_y: usize,
    pub(super) source_type: c_uint,
    pub(super) source_host: *const c_void,
    pub(super) source_device: DevicePointer,
    pub(super) source_array: Handle,
    pub(super) source_pitch: usize,
    pub(super) destination_x: usize,
    pub(super) destination_y: usize,
    pub(super) destination_type: c_uint,
    pub(super) destination_host: *mut c_void,
    pub(super) destination_device: DevicePointer,
    pub(super) destination_array: Handle,
    pub(super) destination_pitch: usize,
    pub(super) width: usize,
    pub(super) height: usize,
}

/// Copies of bytes in a row, as drivers take them: addresses of the host are those of the device too.
#[derive(Default)]
pub(crate) struct Batch {
    pub(crate) to: Vec<DevicePointer>,
    pub(crate) from: Vec<DevicePointer>,
    pub(crate) lens: Vec<usize>,
}

/// A function of a driver's, and its name there.
pub(crate) struct Function<F> {
    /// The name without the suffix of a version.
    pub(crate) name: &'static str,
    pub(crate) call: F,
}

/// Declares `Functions`, and `Symbols` with the name of each.
macro_rules! common_functions {
    (
        required { $($(#[doc = $doc:literal])* $name:ident($($argument:ty),*);)* }
        optional { $($(#[doc = $extra_doc:literal])* $extra:ident($($extra_argument:ty),*);)* }
    ) => {
        /// The functions, each under the name of what it does.
        pub(crate) struct Functions {
            $($(#[doc = $doc])*
                pub(crate) $name: Function<unsafe extern "C" fn($($argument),*) -> ResultCode>,)*
            $($(#[doc = $extra_doc])*
                pub(crate) $extra: Option<Function<unsafe extern "C" fn($($extra_argument),*) -> ResultCode>>,)*
        }

        /// The names under which a driver's library exports the functions.
        pub(crate) struct Symbols {
            $(pub(crate) $name: &'static str,)*
            $(pub(crate) $extra: &'static str,)*
        }

        #[cfg(feature = "stand-in")]
        impl Symbols {
            pub(crate) fn names(&self) -> Vec<&'static str> {
                vec![$(self.$name,)* $(self.$extra,)*]
            }
        }

        impl Functions {
            /// The functions of a library that stays loaded for the life of the process; else the name of one that it
            /// lacks.
            pub(super) fn find(library: &Library, symbols: &Symbols) -> Result<Self, &'static str> {
                // SAFETY: each symbol is a function of this signature, which is what the author of `symbols` vouches
                // for.
                unsafe {
                    Ok(Self {
                        $($name: find(library, symbols.$name).ok_or(symbols.$name)?,)*
                        $($extra: find(library, symbols.$extra),)*
                    })
                }
            }
        }
    };
}

common_functions! {
    required {
        init(c_uint);
        driver_version(*mut c_int);
        error_name(ResultCode, *mut *const c_char);
        error_text(ResultCode, *mut *const c_char);
        device_count(*mut c_int);
        device(*mut DeviceHandle, c_int);
        device_name(*mut c_char, c_int, DeviceHandle);
        device_memory(*mut usize, DeviceHandle);
        device_pci(*mut c_char, c_int, DeviceHandle);
        device_uuid(*mut [u8; 16], DeviceHandle);
        memory_info(*mut usize, *mut usize);
        allocate(*mut DevicePointer, usize);
        free(DevicePointer);
        host_register(*mut c_void, usize, c_uint);
        host_unregister(*mut c_void);
        stream_create(*mut Handle, c_uint);
        stream_destroy(Handle);
        stream_synchronize(Handle);
        stream_query(Handle);
        stream_wait_event(Handle, Handle, c_uint);
        event_create(*mut Handle, c_uint);
        event_record(Handle, Handle);
        event_query(Handle);
        event_synchronize(Handle);
        event_destroy(Handle);
        copy_to_device(DevicePointer, *const c_void, usize, Handle);
        copy_to_host(*mut c_void, DevicePointer, usize, Handle);
        copy_on_device(DevicePointer, DevicePointer, usize, Handle);
        copy_2d(*const Copy2d, Handle);
        module_load(*mut Handle, *const c_void);
        module_unload(Handle);
        module_function(*mut Handle, Handle, *const c_char);
        launch(
            Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
        );
    }
    optional {
        allocate_async(*mut DevicePointer, usize, Handle);
        free_async(DevicePointer, Handle);
        exchange_capture_mode(*mut c_int);
        stream_is_capturing(Handle, *mut c_int);
    }
}

/// # Safety
/// `F` is the type of a pointer to the function of this name.
unsafe fn find<F: Copy>(library: &Library, symbol: &'static str) -> Option<Function<F>> {
    let terminated = CString::new(symbol).ok()?;
    // SAFETY: passed on.
    let call = unsafe { *library.get::<F>(terminated.as_bytes_with_nul()).ok()? };
    Some(Function { name: symbol.trim_end_matches("_v2"), call })
}
