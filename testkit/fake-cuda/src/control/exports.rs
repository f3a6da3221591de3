//! The functions by which tests steer the stand-in.

use super::{control, counters};
use crate::{
    execution::{capture::GRAPHS, context, event::EVENTS, kernel::MODULES, stream::STREAMS},
    gate,
    memory::{device, host, mapped},
    status::{Code, INVALID_VALUE, NOT_INITIALIZED, SUCCESS},
};
use std::ffi::{CStr, c_char};

#[cfg(target_os = "linux")]
use crate::cufile::{buffer, file::FILES};
#[cfg(windows)]
use crate::driver::external;

/// Changes one thing: `KEY=VALUE`. Returns 0, 1 if it makes no sense, or 3 in a forked child.
///
/// # Safety
/// `text` is null or ends with a NUL.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_cuda_configure(text: *const c_char) -> Code {
    if gate::is_forked() {
        return NOT_INITIALIZED;
    }
    // SAFETY: the caller promised so.
    let Some((key, value)) = unsafe { read(text) }.and_then(|text| text.split_once('=')) else {
        return INVALID_VALUE;
    };
    if control().set(key.trim(), value.trim()).is_ok() { SUCCESS } else { INVALID_VALUE }
}

/// Goes back to what the environment says, and makes all contexts usable again. Copies that are under way wait no longer.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_reset() {
    if !gate::is_forked() {
        control().reset();
        context::heal_all();
    }
}

/// What has happened or exists, by name; `u64::MAX` for a name that means nothing, and in a forked child.
///
/// # Safety
/// `name` is null or ends with a NUL.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_cuda_count(name: *const c_char) -> u64 {
    if gate::is_forked() {
        return u64::MAX;
    }
    // SAFETY: the caller promised so.
    unsafe { read(name) }.and_then(count).unwrap_or(u64::MAX)
}

fn count(name: &str) -> Option<u64> {
    if let Some(function) = name.strip_prefix("calls.") {
        return Some(counters::calls_of(function));
    }
    Some(match name {
        "device_bytes" => device::used_by(|_| true),
        "device_bytes.cuda" => device::used_by(context::is_of_cuda),
        "device_bytes.hip" => device::used_by(|device| !context::is_of_cuda(device)),
        "pinned_bytes" => host::pinned().bytes_of(|_| true),
        "pinned_bytes.cuda" => host::pinned().bytes_of(|owner| owner.is_of_cuda()),
        "pinned_bytes.hip" => host::pinned().bytes_of(|owner| !owner.is_of_cuda()),
        "streams" => STREAMS.len(),
        "newest_stream" => STREAMS.newest().unwrap_or(0) as u64,
        "events" => EVENTS.len(),
        "modules" => MODULES.len(),
        "contexts" => context::retained(),
        "context_depth" => context::depth(),
        "copies" => counters::COPIES.get(),
        "pageable_copies" => counters::PAGEABLE_COPIES.get(),
        "copied_bytes" => counters::COPIED_BYTES.get(),
        "kernels" => counters::KERNELS.get(),
        "calls_under_interpreter" => counters::UNDER_INTERPRETER.get(),
        "graphs" => GRAPHS.len(),
        #[cfg(windows)]
        "external_memories" => external::MEMORIES.len(),
        #[cfg(windows)]
        "external_semaphores" => external::SEMAPHORES.len(),
        #[cfg(not(windows))]
        "external_memories" | "external_semaphores" => 0,
        "leaked" => counters::LEAKED.get(),
        "destroyed_in_use" => counters::DESTROYED_IN_USE.get(),
        "reserved" => mapped::counts().0,
        "mapped" => mapped::counts().1,
        "blocks" => mapped::BLOCKS.len(),
        "unmapped_in_use" => counters::UNMAPPED_IN_USE.get(),
        #[cfg(target_os = "linux")]
        "cufile_handles" => FILES.len(),
        #[cfg(target_os = "linux")]
        "cufile_buffers" => buffer::count(),
        #[cfg(not(target_os = "linux"))]
        "cufile_handles" | "cufile_buffers" => 0,
        "cufile_reads" => counters::CUFILE_READS.get(),
        "cufile_writes" => counters::CUFILE_WRITES.get(),
        _ => return None,
    })
}

/// # Safety
/// `text` is null or ends with a NUL and outlives the result.
unsafe fn read<'a>(text: *const c_char) -> Option<&'a str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller promised so.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}
