//! The exported functions, and the factory.
#![allow(unsafe_code)]

use crate::{
    control::{state, violation},
    file::File,
    object::{Kind, make, unknown},
    queue::Queue,
    status::Statuses,
};
use hoistway_directstorage::abi::{
    Configuration1, E_DSTORAGE_INVALID_QUEUE_CAPACITY, E_DSTORAGE_STAGING_BUFFER_LOCKED, E_FAIL, E_NOTIMPL,
    FactoryTable, Guid, HResult, IID_FACTORY, Object, QUEUE_CAPACITY, QueueDescription,
};
use std::{
    ffi::{OsString, c_char},
    os::windows::ffi::OsStringExt,
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};
use windows_sys::{Win32::System::LibraryLoader::GetModuleHandleW, w};

pub(crate) static STAGING_BYTES: AtomicU32 = AtomicU32::new(32 << 20);
/// Whether a factory was asked for: then it is too late to configure it.
static HAS_FACTORY: AtomicBool = AtomicBool::new(false);

struct Factory;

impl Kind for Factory {
    type Table = FactoryTable;
    const TABLE: &'static FactoryTable = &FactoryTable {
        unknown: unknown::<Self>(),
        create_queue,
        open_file,
        create_status_array,
        set_debug_flags,
        set_staging_buffer_size,
    };
    const IDS: &'static [Guid] = &[IID_FACTORY];
}

/// The real one finds its core library beside the program alone, or loaded.
fn has_core() -> bool {
    // SAFETY: a text that ends with a zero.
    !unsafe { GetModuleHandleW(w!("dstoragecore.dll")) }.is_null()
}

/// # Safety
/// That of the real one.
#[unsafe(no_mangle)]
pub unsafe extern "system" fn DStorageSetConfiguration1(configuration: *const Configuration1) -> HResult {
    if !has_core() {
        return E_NOTIMPL;
    }
    if HAS_FACTORY.load(Ordering::Acquire) {
        return E_FAIL;
    }
    let mut state = state();
    state.count("configurations");
    // SAFETY: callers give a valid pointer.
    if unsafe { (*configuration).disable_telemetry } == 0 {
        state.count("telemetry");
    }
    0
}

/// # Safety
/// That of the real one.
#[unsafe(no_mangle)]
pub unsafe extern "system" fn DStorageGetFactory(id: *const Guid, out: *mut Object) -> HResult {
    if !has_core() {
        return E_NOTIMPL;
    }
    HAS_FACTORY.store(true, Ordering::Release);
    // The same object for all.
    static FACTORY: OnceLock<usize> = OnceLock::new();
    let factory = *FACTORY.get_or_init(|| {
        let mut object = ptr::null_mut();
        // SAFETY: both pointers are valid.
        unsafe { make(Factory, &IID_FACTORY, &raw mut object) };
        object as usize
    });
    // SAFETY: the factory lives for ever.
    unsafe { (Factory::TABLE.unknown.query)(factory as Object, id, out) }
}

unsafe extern "system" fn create_queue(
    _: Object,
    description: *const QueueDescription,
    id: *const Guid,
    out: *mut Object,
) -> HResult {
    // SAFETY: callers give a valid pointer.
    let description = unsafe { &*description };
    if !(QUEUE_CAPACITY.0..=QUEUE_CAPACITY.1).contains(&description.capacity) {
        return E_DSTORAGE_INVALID_QUEUE_CAPACITY;
    }
    let has_device = !description.device.is_null();
    let refusal = state().get("refuse_queue") as u32;
    if has_device && refusal != 0 {
        return refusal.cast_signed();
    }
    match Queue::new(description.capacity, has_device) {
        // SAFETY: callers give valid pointers.
        Some(queue) => unsafe { make(queue, id, out) },
        None => E_FAIL,
    }
}

unsafe extern "system" fn open_file(
    _: Object,
    path: *const u16,
    id: *const Guid,
    out: *mut Object,
) -> HResult {
    // SAFETY: the path ends with a zero.
    let path = unsafe {
        let len = (0..).take_while(|&at| *path.add(at) != 0).count();
        OsString::from_wide(std::slice::from_raw_parts(path, len))
    };
    match File::open(path.as_ref()) {
        // SAFETY: callers give valid pointers.
        Ok(file) => unsafe { make(file, id, out) },
        Err(error) => of_windows(&error),
    }
}

/// The result for an error of the system.
pub(crate) fn of_windows(error: &std::io::Error) -> HResult {
    error.raw_os_error().map_or(E_FAIL, |code| (0x8007_0000 | code.cast_unsigned() & 0xFFFF).cast_signed())
}

unsafe extern "system" fn create_status_array(
    _: Object,
    count: u32,
    _: *const c_char,
    id: *const Guid,
    out: *mut Object,
) -> HResult {
    // SAFETY: callers give valid pointers.
    unsafe { make(Statuses::new(count), id, out) }
}

unsafe extern "system" fn set_debug_flags(_: Object, _: u32) {}

unsafe extern "system" fn set_staging_buffer_size(_: Object, bytes: u32) -> HResult {
    let state = state();
    if state.get("staging_locked") != 0 || state.counted("queues") > 0 || state.counted("files") > 0 {
        return E_DSTORAGE_STAGING_BUFFER_LOCKED;
    }
    drop(state);
    if bytes == 0 {
        violation();
    }
    STAGING_BYTES.store(bytes, Ordering::Release);
    0
}
