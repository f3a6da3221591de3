//! Memory and fences of D3D12: that of its stand-in, which is asked what a handle is of.
//!
//! Imported memory is memory of the device like any other: what D3D12 wrote gets there when a stream has waited for the fence that was
//! signalled after the write, and is poison until then.

use super::{device::luid, put, stream};
use crate::{
    control::counters::{DESTROYED_IN_USE, LEAKED},
    execution::{context::Owner, handles::Table, operation::Operation},
    gate,
    memory::device::{self, PLAIN_ALIGNMENT, POISON},
    status::{Code, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, OPERATING_SYSTEM, OUT_OF_MEMORY},
};
use std::{
    ffi::{CStr, c_int, c_uint, c_void},
    mem, slice,
    sync::{Arc, Mutex, PoisonError},
};
use windows_sys::{
    Win32::System::LibraryLoader::{GetModuleHandleW, GetProcAddress},
    w,
};

/// `CUexternalMemoryHandleType` and `CUexternalSemaphoreHandleType`
const D3D12_HEAP: c_int = 4;
const D3D12_RESOURCE: c_int = 5;
const D3D12_FENCE: c_int = 4;
/// `CUDA_EXTERNAL_MEMORY_DEDICATED`
const DEDICATED: c_uint = 1;

/// `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`
#[repr(C)]
struct MemoryDescription {
    kind: c_int,
    handle: *mut c_void,
    name: *const c_void,
    bytes: u64,
    flags: c_uint,
    reserved: [c_uint; 16],
}

/// `CUDA_EXTERNAL_MEMORY_BUFFER_DESC`
#[repr(C)]
struct BufferDescription {
    offset: u64,
    bytes: u64,
    flags: c_uint,
    reserved: [c_uint; 16],
}

/// `CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC`
#[repr(C)]
struct SemaphoreDescription {
    kind: c_int,
    handle: *mut c_void,
    name: *const c_void,
    flags: c_uint,
    reserved: [c_uint; 16],
}

/// `CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS`
#[repr(C)]
struct WaitParameters {
    value: u64,
    others: [u64; 3],
    others_reserved: [c_uint; 10],
    flags: c_uint,
    reserved: [c_uint; 16],
}

/// What the stand-in of D3D12 says of a handle. Kinds: 1 a heap, 2 a resource, 3 a fence.
#[derive(Default)]
#[repr(C)]
struct Shared {
    kind: u32,
    luid: [u8; 8],
    bytes: u64,
    object: u64,
}

/// Memory that was imported.
pub(crate) struct Memory {
    owner: Arc<Owner>,
    object: u64,
    bytes: u64,
    _imported: Imported,
    /// Where which bytes of it are mapped: address, offset and length.
    mapped: Mutex<Vec<(u64, u64, u64)>>,
}

/// Memory that D3D12 must keep, which its stand-in is told.
struct Imported(u64);

impl Imported {
    fn new(object: u64) -> Self {
        let imported = Self(object);
        imported.tell(1);
        imported
    }

    /// Tells how many imports more there are.
    fn tell(&self, more: i64) {
        type Tell = unsafe extern "C" fn(u64, i64);
        if let Some(function) = function(c"fake_d3d12_imported") {
            // SAFETY: the function has this signature.
            unsafe { mem::transmute::<Function, Tell>(function)(self.0, more) };
        }
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        self.tell(-1);
    }
}

/// A fence that was imported.
pub(crate) struct Semaphore {
    owner: Arc<Owner>,
    object: u64,
}

pub(crate) static MEMORIES: Table<Memory> = Table::new(0x9AE0_0000_0000);
pub(crate) static SEMAPHORES: Table<Semaphore> = Table::new(0x9BE0_0000_0000);

/// Forgets what a context left behind, and says how much that was.
pub(crate) fn release_all(owner: &Arc<Owner>) -> u64 {
    let memories = MEMORIES.remove_if(|memory| Arc::ptr_eq(&memory.owner, owner));
    let semaphores = SEMAPHORES.remove_if(|semaphore| Arc::ptr_eq(&semaphore.owner, owner));
    (memories.len() + semaphores.len()) as u64
}

/// A function of a library, whatever it takes.
type Function = unsafe extern "system" fn() -> isize;

/// A function of the stand-in of D3D12.
fn function(name: &CStr) -> Option<Function> {
    // SAFETY: texts that end with a zero; the library stays loaded.
    unsafe { GetProcAddress(GetModuleHandleW(w!("fake_graphics.dll")), name.as_ptr().cast()) }
}

/// What a handle is of, if that is on the device.
fn describe(owner: &Owner, handle: *mut c_void) -> Result<Shared, Code> {
    type Describe = unsafe extern "C" fn(*mut c_void, *mut Shared) -> c_int;
    let function = function(c"fake_d3d12_describe").ok_or(NOT_SUPPORTED)?;
    let mut found = Shared::default();
    // SAFETY: the function has this signature, and writes one structure.
    let code = unsafe { mem::transmute::<Function, Describe>(function)(handle, &raw mut found) };
    match code {
        0 if found.luid == luid(owner.ordinal()) => Ok(found),
        // What the driver was seen to say of another adapter's.
        0 => Err(OPERATING_SYSTEM),
        _ => Err(INVALID_HANDLE),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuImportExternalMemory(
    place: *mut usize,
    description: *const MemoryDescription,
) -> Code {
    gate::in_context("cuImportExternalMemory", |context| {
        // SAFETY: the caller's, or null.
        let description = unsafe { description.as_ref() }.ok_or(INVALID_VALUE)?;
        let (kind, flags) = match description.kind {
            D3D12_HEAP => (1, 0),
            D3D12_RESOURCE => (2, DEDICATED),
            _ => return Err(INVALID_VALUE),
        };
        let found = describe(&context.owner, description.handle)?;
        let is_said = found.kind == kind && found.bytes == description.bytes && description.flags == flags;
        if !is_said || !description.name.is_null() || description.reserved != [0; 16] {
            return Err(INVALID_VALUE);
        }
        let owner = Arc::clone(&context.owner);
        let (object, bytes) = (found.object, found.bytes);
        let imported = Imported::new(object);
        let memory = Memory { owner, object, bytes, _imported: imported, mapped: Mutex::default() };
        // SAFETY: the place is the caller's.
        unsafe { put(place, MEMORIES.insert(Arc::new(memory))) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuExternalMemoryGetMappedBuffer(
    place: *mut u64,
    memory: usize,
    description: *const BufferDescription,
) -> Code {
    gate::in_context("cuExternalMemoryGetMappedBuffer", |context| {
        // SAFETY: the caller's, or null.
        let description = unsafe { description.as_ref() }.ok_or(INVALID_VALUE)?;
        let memory = MEMORIES.get(memory).ok_or(INVALID_HANDLE)?;
        let &BufferDescription { offset, bytes, flags, reserved } = description;
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= memory.bytes);
        if !fits || flags != 0 || reserved != [0; 16] {
            return Err(INVALID_VALUE);
        }
        let own = device::of_device(context.owner.device).ok_or(OUT_OF_MEMORY)?;
        let address = own.allocate(&context.owner, bytes, PLAIN_ALIGNMENT)?;
        memory.mapped.lock().unwrap_or_else(PoisonError::into_inner).push((address, offset, bytes));
        // SAFETY: the place is the caller's.
        unsafe { put(place, address) }
    })
}

/// What is mapped must have been freed: the driver leaves that open, and programs that do it lose addresses.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDestroyExternalMemory(memory: usize) -> Code {
    gate::ending("cuDestroyExternalMemory", |_| {
        let memory = MEMORIES.remove(memory).ok_or(INVALID_HANDLE)?;
        let mapped = memory.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        LEAKED.add(mapped.iter().filter(|(address, ..)| device::find(*address).is_some()).count() as u64);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuImportExternalSemaphore(
    place: *mut usize,
    description: *const SemaphoreDescription,
) -> Code {
    gate::in_context("cuImportExternalSemaphore", |context| {
        // SAFETY: the caller's, or null.
        let description = unsafe { description.as_ref() }.ok_or(INVALID_VALUE)?;
        let found = describe(&context.owner, description.handle)?;
        let is_said = description.kind == D3D12_FENCE && found.kind == 3 && description.flags == 0;
        if !is_said || !description.name.is_null() || description.reserved != [0; 16] {
            return Err(INVALID_VALUE);
        }
        let semaphore = Semaphore { owner: Arc::clone(&context.owner), object: found.object };
        // SAFETY: the place is the caller's.
        unsafe { put(place, SEMAPHORES.insert(Arc::new(semaphore))) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuWaitExternalSemaphoresAsync(
    semaphores: *const usize,
    parameters: *const WaitParameters,
    count: c_uint,
    handle: usize,
) -> Code {
    gate::in_context("cuWaitExternalSemaphoresAsync", |context| {
        if semaphores.is_null() || parameters.is_null() {
            return Err(INVALID_VALUE);
        }
        let stream = stream::get(context, handle)?;
        // SAFETY: the caller gives as many of both.
        let (semaphores, parameters) = unsafe {
            (
                slice::from_raw_parts(semaphores, count as usize),
                slice::from_raw_parts(parameters, count as usize),
            )
        };
        for (&semaphore, wanted) in semaphores.iter().zip(parameters) {
            let semaphore = SEMAPHORES.get(semaphore).ok_or(INVALID_HANDLE)?;
            if wanted.flags != 0
                || wanted.reserved != [0; 16]
                || wanted.others != [0; 3]
                || wanted.others_reserved != [0; 10]
            {
                return Err(INVALID_VALUE);
            }
            stream.push(Operation::Acquire { semaphore, value: wanted.value });
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDestroyExternalSemaphore(semaphore: usize) -> Code {
    gate::ending("cuDestroyExternalSemaphore", |_| {
        let semaphore = SEMAPHORES.remove(semaphore).ok_or(INVALID_HANDLE)?;
        // Streams that have yet to wait for it hold it, too.
        DESTROYED_IN_USE.add(u64::from(Arc::strong_count(&semaphore) > 1));
        Ok(())
    })
}

impl Semaphore {
    /// Waits until the fence has reached a value, and lets what was written before be seen in imported memory.
    pub(crate) fn acquire(&self, value: u64) {
        type Acquire = unsafe extern "C" fn(
            u64,
            u64,
            *mut c_void,
            unsafe extern "C" fn(*mut c_void, u64, u64, *const u8, usize),
        );
        if let Some(function) = function(c"fake_d3d12_acquire") {
            // SAFETY: the function has this signature.
            unsafe {
                let acquire: Acquire = mem::transmute(function);
                acquire(self.object, value, std::ptr::null_mut(), show);
            }
        }
    }
}

/// Copies bytes of an object to where it is mapped.
unsafe extern "C" fn show(_: *mut c_void, object: u64, offset: u64, bytes: *const u8, len: usize) {
    each_mapped(object, offset, len as u64, |shadow, position, length| {
        // SAFETY: the shadow has so many bytes, and so has the caller.
        unsafe { shadow.copy_from(bytes.add(position as usize), length as usize) };
    });
}

/// Overwrites what is mapped of an object: D3D12 has begun to write there.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_spoil(object: u64, offset: u64, len: u64) {
    each_mapped(object, offset, len, |shadow, _, length| {
        // SAFETY: the shadow has so many bytes.
        unsafe { shadow.write_bytes(POISON, length as usize) };
    });
}

/// Calls `visit` with each mapped part of a range of an object: where the host finds it, where it begins in the range, and its length.
fn each_mapped(object: u64, offset: u64, len: u64, mut visit: impl FnMut(*mut u8, u64, u64)) {
    let end = offset + len;
    let _ = MEMORIES.find(|memory| {
        let mapped = memory.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        for &(address, first, count) in mapped.iter().filter(|_| memory.object == object) {
            let (from, to) = (offset.max(first), end.min(first + count));
            let Some(length) = to.checked_sub(from).filter(|&length| length > 0) else { continue };
            let place = address + (from - first);
            if let Some(Ok(shadow)) = device::of_address(place).map(|memory| memory.shadow(place, length)) {
                visit(shadow, from - offset, length);
            }
        }
        false
    });
}
