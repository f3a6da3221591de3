//! `io_uring`: several reads in flight from one thread, straight into their final places.
//!
//! [`open_ring`] sets a ring up: it asks the kernel for what it can do, and tries each system call before anything depends
//! on it.
#![allow(unsafe_code)]

use super::{Done, FileRead, Lane, ReadsFile};
use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};
use std::{io, os::fd::AsRawFd, time::Duration};
use windlass_device::Unavailable;

/// The system calls that a ring needs.
const SET_UP: &str = "io_uring_setup";
const REGISTER: &str = "io_uring_register";
const ENTER: &str = "io_uring_enter";

/// Pause after the kernel had no memory for reads.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(1);

/// One ring and the reads that are in it.
pub struct UringLane<T> {
    // Dropped in this order by `Drop for UringLane`, not by the fields': the kernel may write to the buffers of
    // `in_flight` until their completions were seen.
    ring: IoUring,
    /// The reads that the kernel has, by the number that their completions carry.
    in_flight: Vec<Option<T>>,
    free: Vec<usize>,
    /// Reads that failed before the kernel saw them.
    rejected: Vec<Done<T>>,
}

impl<T> UringLane<T> {
    /// A ring for up to `depth` reads. Must be used by the thread that made it.
    ///
    /// # Errors
    /// Why no ring can be used here, and what changes that.
    pub fn new(depth: usize) -> Result<Self, Unavailable> {
        let entries = u32::try_from(depth.next_power_of_two()).unwrap_or(u32::MAX);
        let ring = open_ring(entries, &[opcode::Read::CODE])?;
        Ok(Self {
            ring,
            in_flight: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            rejected: Vec::new(),
        })
    }

    fn count(&self) -> usize {
        self.in_flight.len() - self.free.len() + self.rejected.len()
    }

    fn reap(&mut self, done: &mut Vec<Done<T>>) {
        for completion in self.ring.completion() {
            let slot = completion.user_data() as usize;
            let Some(op) = self.in_flight.get_mut(slot).and_then(Option::take) else {
                continue;
            };
            self.free.push(slot);
            let result = match usize::try_from(completion.result()) {
                Ok(count) => Ok(count),
                Err(_) => Err(io::Error::from_raw_os_error(-completion.result())),
            };
            done.push(Done { op, result });
        }
    }

    fn wait(&mut self, done: &mut Vec<Done<T>>) -> io::Result<()> {
        if !self.rejected.is_empty() {
            done.append(&mut self.rejected);
            return Ok(());
        }
        while self.count() > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Completions must be taken first, or the kernel is short of memory.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN)) => {
                    std::thread::sleep(SHORTAGE_PAUSE);
                }
                Err(error) => return Err(error),
            }
            let before = done.len();
            self.reap(done);
            if done.len() > before {
                break;
            }
        }
        Ok(())
    }
}

impl<T: ReadsFile> UringLane<T> {
    fn enqueue(&mut self, slot: usize, mut op: T) -> Result<(), (T, io::Error)> {
        let (file, offset, pointer, len) = match op.next_read() {
            Ok(FileRead { file, offset, target }) => {
                (file.as_raw_fd(), offset, target.as_mut_ptr(), target.len())
            }
            Err(error) => return Err((op, error)),
        };
        let Ok(len) = u32::try_from(len) else {
            return Err((op, io::Error::other("a read of 4 GiB or more")));
        };
        let entry =
            opcode::Read::new(types::Fd(file), pointer, len).offset(offset).build().user_data(slot as u64);
        self.in_flight[slot] = Some(op);
        // SAFETY: the descriptor and the memory belong to `op`, which stays in `in_flight` until the completion
        // of this entry was seen, also when the lane is dropped.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // The queue has an entry for each slot, so it is never full.
        if pushed.is_err()
            && let Some(op) = self.in_flight[slot].take()
        {
            return Err((op, io::Error::other("the submission queue is full")));
        }
        Ok(())
    }
}

impl<T: ReadsFile> Lane<T> for UringLane<T> {
    fn capacity(&self) -> usize {
        self.in_flight.len()
    }

    fn in_flight(&self) -> usize {
        self.count()
    }

    fn push(&mut self, op: T) {
        match self.free.pop() {
            Some(slot) => {
                if let Err((op, error)) = self.enqueue(slot, op) {
                    self.free.push(slot);
                    self.rejected.push(Done { op, result: Err(error) });
                }
            }
            None => {
                let result = Err(io::Error::other("more reads were pushed than the ring holds"));
                self.rejected.push(Done { op, result });
            }
        }
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done<T>>) -> io::Result<()> {
        self.wait(done)
    }
}

impl<T> Drop for UringLane<T> {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.count() > 0 {
            if self.wait(&mut done).is_err() {
                // Nothing more can be learnt of these reads: the kernel may still write to their memory, so it
                // is never freed.
                for op in self.in_flight.drain(..) {
                    std::mem::forget(op);
                }
                return;
            }
            done.clear();
        }
    }
}

/// Makes a ring of at least `entries` entries that knows the operations of these codes, and proves by an empty operation
/// that this process may use it. The ring must be used by the thread that made it.
///
/// # Errors
/// Why no ring can be used here, and what changes that. A filter of system calls may refuse any of the three that a ring
/// needs.
pub fn open_ring(entries: u32, operations: &[u8]) -> Result<IoUring, Unavailable> {
    let mut ring = set_up(entries)?;
    let mut probe = Probe::new();
    let reason = "this kernel's io_uring lacks operations that are needed, such as plain reads";
    let too_old = || Unavailable::new(reason, "use Linux 5.6 or later");
    match ring.submitter().register_probe(&mut probe) {
        Ok(()) if operations.iter().all(|&code| probe.is_supported(code)) => {}
        Ok(()) => return Err(too_old()),
        // The answer of kernels that do not know the question.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Err(too_old()),
        Err(error) => return Err(refusal(REGISTER, &error)),
    }
    try_out(&mut ring).map_err(|error| refusal(ENTER, &error))?;
    Ok(ring)
}

fn set_up(entries: u32) -> Result<IoUring, Unavailable> {
    // Each rung needs less of the kernel: 6.1, 5.19, 5.6.
    type Rung = fn(&mut io_uring::Builder<squeue::Entry, cqueue::Entry>);
    let rungs: [Rung; 3] = [
        |builder| {
            builder.setup_single_issuer().setup_defer_taskrun();
        },
        |builder| {
            builder.setup_coop_taskrun();
        },
        |_| {},
    ];
    let mut last = io::Error::from(io::ErrorKind::Unsupported);
    for rung in rungs {
        let mut builder = IoUring::builder();
        rung(&mut builder);
        match builder.build(entries) {
            Ok(ring) => return Ok(ring),
            // Unknown flags: try with fewer.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => last = error,
            Err(error) => return Err(refusal(SET_UP, &error)),
        }
    }
    Err(refusal(SET_UP, &last))
}

/// Has the kernel carry out an operation that does nothing.
fn try_out(ring: &mut IoUring) -> io::Result<()> {
    // SAFETY: the operation refers to no memory and to no descriptor.
    let pushed = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
    pushed.map_err(io::Error::other)?;
    loop {
        match ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if let Some(completion) = ring.completion().next() {
            let result = completion.result();
            return if result < 0 {
                Err(io::Error::from_raw_os_error(result.wrapping_neg()))
            } else {
                Ok(())
            };
        }
    }
}

/// Why there is no ring, and what to do.
fn refusal(call: &str, error: &io::Error) -> Unavailable {
    const ALLOW: &str =
        "allow io_uring_setup, io_uring_register and io_uring_enter in the container's seccomp profile";
    let (reason, fix) = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => (
            format!("{call} is blocked for this process (seccomp profile, LSM, or kernel.io_uring_disabled)"),
            format!("{ALLOW}, or set kernel.io_uring_disabled=0"),
        ),
        Some(libc::ENOSYS) => (
            format!("this kernel, or the container's seccomp profile, has no {call}"),
            format!("use Linux 5.6 or later, and {ALLOW}"),
        ),
        Some(libc::ENOMEM) => {
            (format!("{call}: the kernel has no memory (locked-memory limit)"), "raise ulimit -l".into())
        }
        Some(libc::EMFILE | libc::ENFILE) => {
            (format!("{call}: no file descriptor is left"), "raise ulimit -n".into())
        }
        _ => (format!("{call} failed"), String::new()),
    };
    Unavailable::new(format!("{reason}: {error}"), fix)
}
