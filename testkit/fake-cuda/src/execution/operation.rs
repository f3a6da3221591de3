//! The operations that streams execute.

use super::{context::Owner, copy::Copy, event::Event, kernel::Launch, stream::Stream};
#[cfg(windows)]
use crate::driver::external;
use crate::{
    control::{control, counters, trace::Line},
    memory::device,
    status::{Code, ILLEGAL_ADDRESS},
    system::now_ns,
};
use std::{cell::Cell, ffi::c_void, sync::Arc};

/// `CUhostFn`.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// One thing for a stream to do.
#[derive(Clone)]
pub(crate) enum Operation {
    Copy(Copy),
    Fill {
        address: u64,
        value: u8,
        bytes: u64,
    },
    Launch(Launch),
    Record(Arc<Event>, u64),
    Wait(Arc<Event>, u64),
    Call {
        function: HostFunction,
        argument: usize,
    },
    Free(u64),
    /// A wait for a fence of D3D12.
    #[cfg(windows)]
    Acquire {
        semaphore: Arc<external::Semaphore>,
        value: u64,
    },
}

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is a stream's and executes a function of the program: then the driver permits no
/// calls.
pub(crate) fn in_host_function() -> bool {
    IN_HOST_FUNCTION.get()
}

impl Operation {
    /// Does it, or nothing if the context is unusable: but marks are passed and memory is freed in any case,
    /// or else nothing could be waited for any more.
    pub(super) fn execute(self, stream: &Stream) {
        let owner = &stream.owner;
        match self {
            Operation::Record(event, generation) => event.pass(generation),
            Operation::Wait(event, generation) => event.wait(generation),
            Operation::Free(address) => {
                if let Some(memory) = device::of_address(address) {
                    memory.finish_release(address);
                }
            }
            #[cfg(windows)]
            Operation::Acquire { semaphore, value } => semaphore.acquire(value),
            _ if owner.health().is_err() || stream.is_abandoned() => (),
            Operation::Call { function, argument } => {
                IN_HOST_FUNCTION.set(true);
                // SAFETY: the caller that passed the function promised, as the driver demands, that it may be called
                // from any thread with this argument until the stream has done so.
                unsafe { function(argument as *mut c_void) };
                IN_HOST_FUNCTION.set(false);
            }
            Operation::Copy(copy) => {
                let kind = copy.kind();
                perform(stream, "copy", kind, || {
                    copy.delay();
                    copy.run(owner)?;
                    counters::COPIES.add(1);
                    counters::COPIED_BYTES.add(copy.bytes());
                    Ok(copy.bytes())
                });
            }
            Operation::Launch(launch) => perform(stream, "kernel", launch.name(), || {
                let stored = launch.run(owner)?;
                counters::KERNELS.add(1);
                Ok(stored)
            }),
            Operation::Fill { address, value, bytes } => {
                perform(stream, "fill", "fill", || fill(owner, address, value, bytes));
            }
        }
    }
}

/// Does something that can fail, by itself or by request, and leaves a line in the trace if it doesn't.
fn perform(stream: &Stream, subject: &str, name: &str, action: impl FnOnce() -> Result<u64, Code>) {
    let begin_ns = now_ns();
    let outcome = match control().faults.strike(subject) {
        Some(code) => Err(code),
        None => action(),
    };
    match outcome {
        Ok(bytes) => control().trace.write(&Line {
            device: stream.owner.ordinal(),
            stream: stream.number,
            operation: name,
            bytes,
            begin_ns,
            end_ns: now_ns(),
        }),
        Err(code) => stream.owner.fail(code),
    }
}

fn fill(owner: &Owner, address: u64, value: u8, bytes: u64) -> Result<u64, Code> {
    let memory = device::of_device(owner.device).ok_or(ILLEGAL_ADDRESS)?;
    let shadow = memory.shadow(address, bytes)?;
    // SAFETY: `shadow` checked that the range is in one allocation, all of which is mapped for writing.
    unsafe { shadow.write_bytes(value, bytes as usize) };
    Ok(bytes)
}
