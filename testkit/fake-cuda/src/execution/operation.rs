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
use std::{cell::Cell, ffi::c_void, ops::Range, sync::Arc};

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
    /// Whether it copies from or to a range of a device's memory, or fills it.
    pub(super) fn touches(&self, range: &Range<u64>) -> bool {
        let overlaps = |(start, len): (u64, u64)| start < range.end && start + len > range.start;
        match self {
            Self::Copy(copy) => copy.device_ranges().into_iter().flatten().any(overlaps),
            Self::Fill { address, bytes, .. } => overlaps((*address, *bytes)),
            _ => false,
        }
    }

    /// Does it, or nothing if the context is unusable or its work was ended since: but marks are passed and memory is freed in any
    /// case, or else nothing could be waited for any more.
    ///
    /// Returns `false` if it was left out because its era had ended.
    pub(super) fn execute(self, era: u64, stream: &Stream) -> bool {
        let owner = &stream.owner;
        match self {
            // Its stream knows what was left out ahead of it.
            Operation::Record(..) => {}
            Operation::Wait(event, generation) => event.wait(generation),
            Operation::Free(address) => {
                if let Some(memory) = device::of_address(address) {
                    memory.finish_release(address);
                }
            }
            #[cfg(windows)]
            Operation::Acquire { semaphore, value } => semaphore.acquire(value),
            _ if owner.era() != era => return false,
            _ if owner.health().is_err() || stream.is_abandoned() => (),
            Operation::Call { function, argument } => {
                IN_HOST_FUNCTION.set(true);
                // SAFETY: the caller that passed the function promised, as the driver demands, that it may be called
                // from any thread with this argument until the stream has done so.
                unsafe { function(argument as *mut c_void) };
                IN_HOST_FUNCTION.set(false);
            }
            Operation::Copy(copy) => {
                let work = Work { stream, era, subject: "copy", name: copy.kind() };
                let run = || {
                    copy.run(owner)?;
                    counters::COPIES.add(1);
                    counters::COPIED_BYTES.add(copy.bytes());
                    Ok(copy.bytes())
                };
                return work.perform(|| copy.delay(|| owner.era() != era), run);
            }
            Operation::Launch(launch) => {
                let work = Work { stream, era, subject: "kernel", name: launch.name() };
                let run = || {
                    let stored = launch.run(owner)?;
                    counters::KERNELS.add(1);
                    Ok(stored)
                };
                return work.perform(|| (), run);
            }
            Operation::Fill { address, value, bytes } => {
                let work = Work { stream, era, subject: "fill", name: "fill" };
                return work.perform(|| (), || fill(owner, address, value, bytes));
            }
        }
        true
    }
}

/// An operation that touches memory.
struct Work<'a> {
    stream: &'a Stream,
    era: u64,
    /// What faults call it.
    subject: &'a str,
    /// What the trace calls it.
    name: &'a str,
}

impl Work<'_> {
    /// Does it after a delay, and returns whether its era had not ended by then. It can fail, by itself or by request, and leaves a line in
    /// the trace if it doesn't.
    fn perform(self, delay: impl FnOnce(), run: impl FnOnce() -> Result<u64, Code>) -> bool {
        let (owner, begin_ns) = (&self.stream.owner, now_ns());
        let fault = control().faults.strike(self.subject);
        if fault.is_none() {
            delay();
        }
        owner.act(self.era, || match fault.map_or_else(run, Err) {
            Ok(bytes) => control().trace.write(&Line {
                device: owner.ordinal(),
                stream: self.stream.number,
                operation: self.name,
                bytes,
                begin_ns,
                end_ns: now_ns(),
            }),
            Err(code) => owner.fail(code),
        })
    }
}

fn fill(owner: &Owner, address: u64, value: u8, bytes: u64) -> Result<u64, Code> {
    let memory = device::of_device(owner.device).ok_or(ILLEGAL_ADDRESS)?;
    let shadow = memory.shadow(address, bytes)?;
    // SAFETY: `shadow` checked that the range is in one allocation, all of which is mapped for writing.
    unsafe { shadow.write_bytes(value, bytes as usize) };
    Ok(bytes)
}
