//! `io_uring`: several operations in flight from one thread, straight into their final places.
//!
//! `open_ring` sets a ring up: it asks the kernel for what it can do, and tries each system call before anything depends
//! on it.
#![allow(unsafe_code)]

pub(super) mod vectored;

use super::{Done, FileRead, Lane, ReadsFile};
use hoistway_device::Unavailable;
use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};
use std::{
    io,
    mem::{self, ManuallyDrop},
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
    task::{Wake, Waker},
    time::Duration,
};

/// The system calls that a ring needs.
const SET_UP: &str = "io_uring_setup";
const REGISTER: &str = "io_uring_register";
const ENTER: &str = "io_uring_enter";

/// Pause after the kernel had no memory for operations.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(1);

/// What completions of the wait for a [`Bell`] carry.
const BELL: u64 = u64::MAX;

/// Ends the wait in a ring, which polls its descriptor.
struct Bell(OwnedFd);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Fails if it was rung so often that the count does not fit any more: then it still rings.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// One ring and the operations that are in it.
pub struct UringLane<T> {
    // Dropped in this order by `Drop for UringLane`, not by the fields': the kernel may write to the buffers of
    // `in_flight` until their completions were seen.
    ring: IoUring,
    /// The operations that the kernel has, by the number that their completions carry.
    in_flight: Vec<Option<T>>,
    free: Vec<usize>,
    /// Operations that failed before the kernel saw them.
    rejected: Vec<Done<T>>,
    /// Of a ring that can be woken: whether the ring polls it.
    bell: Option<(Arc<Bell>, bool)>,
    /// Gives up an operation that the kernel may still carry out.
    abandon: fn(T),
}

impl<T: ReadsFile> UringLane<T> {
    /// A ring for up to `depth` reads. Must be used by the thread that made it.
    ///
    /// # Errors
    /// Why no ring can be used here, and what changes that.
    pub fn new(depth: usize) -> Result<Self, Unavailable> {
        Self::open(depth, &[opcode::Read::CODE], None, T::abandon)
    }
}

impl<T> UringLane<T> {
    /// A ring for operations of these codes that other threads can wake. Operations whose end cannot be known are leaked.
    pub(super) fn wakeable(depth: usize, operations: [u8; 2]) -> Result<Self, Unavailable> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Unavailable::new(format!("eventfd failed: {errno}"), "raise ulimit -n"))?;
        let [one, other] = operations;
        let bell = Some((Arc::new(Bell(bell)), false));
        Self::open(depth, &[one, other, opcode::PollAdd::CODE], bell, mem::forget)
    }

    fn open(
        depth: usize,
        operations: &[u8],
        bell: Option<(Arc<Bell>, bool)>,
        abandon: fn(T),
    ) -> Result<Self, Unavailable> {
        let entries = (depth + usize::from(bell.is_some())).next_power_of_two();
        let ring = open_ring(u32::try_from(entries).unwrap_or(u32::MAX), operations)?;
        Ok(Self {
            ring,
            in_flight: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            rejected: Vec::new(),
            bell,
            abandon,
        })
    }

    pub(super) fn count(&self) -> usize {
        self.in_flight.len() - self.free.len() + self.rejected.len()
    }

    /// Takes completions, and returns whether the bell was rung.
    fn reap(&mut self, done: &mut Vec<Done<T>>) -> bool {
        let mut is_woken = false;
        for completion in self.ring.completion() {
            if let (BELL, Some((bell, is_polled))) = (completion.user_data(), &mut self.bell) {
                let _ = rustix::io::read(&bell.0, &mut [0; 8]);
                (*is_polled, is_woken) = (false, true);
                continue;
            }
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
        is_woken
    }

    /// Has the ring poll the bell, if it does not.
    fn arm(&mut self) {
        if let Some((bell, is_polled @ false)) = &mut self.bell {
            let bell = types::Fd(bell.0.as_raw_fd());
            let entry = opcode::PollAdd::new(bell, libc::POLLIN as u32).build().user_data(BELL);
            // SAFETY: refers to no memory. The descriptor is open as long as the lane, and the kernel holds its file.
            *is_polled = unsafe { self.ring.submission().push(&entry) }.is_ok();
        }
    }

    pub(super) fn wait(&mut self, done: &mut Vec<Done<T>>) -> io::Result<()> {
        if !self.rejected.is_empty() {
            done.append(&mut self.rejected);
            return Ok(());
        }
        self.arm();
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
            if self.reap(done) || done.len() > before {
                break;
            }
        }
        Ok(())
    }
}

impl<T> UringLane<T> {
    pub(super) fn waker(&self) -> Option<Waker> {
        self.bell.as_ref().map(|(bell, _)| bell.clone().into())
    }

    pub(super) fn depth(&self) -> usize {
        self.in_flight.len()
    }

    /// Hands an operation over to the kernel, as the entry that `make` makes of it.
    ///
    /// # Safety
    /// Descriptor and memory of the entry belong to the operation, stay where they are while it is moved, and are used by
    /// nothing else until it is dropped.
    pub(super) unsafe fn submit(
        &mut self,
        mut op: T,
        make: impl FnOnce(&mut T) -> io::Result<squeue::Entry>,
    ) {
        let Some(slot) = self.free.pop() else {
            let result = Err(io::Error::other("more operations were pushed than the ring holds"));
            return self.rejected.push(Done { op, result });
        };
        let error = match make(&mut op) {
            Ok(entry) => {
                self.in_flight[slot] = Some(op);
                // SAFETY: by this function's contract: the operation stays in `in_flight` until the completion of the
                // entry was seen, also when the lane is dropped.
                let pushed = unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) };
                // The queue has an entry for each slot, so it is never full.
                match pushed {
                    Ok(()) => return,
                    Err(_) => io::Error::other("the submission queue is full"),
                }
            }
            Err(error) => {
                self.in_flight[slot] = Some(op);
                error
            }
        };
        self.free.push(slot);
        let op = self.in_flight[slot].take();
        self.rejected.extend(op.map(|op| Done { op, result: Err(error) }));
    }
}

impl<T: ReadsFile> Lane<T> for UringLane<T> {
    fn capacity(&self) -> usize {
        self.depth()
    }

    fn in_flight(&self) -> usize {
        self.count()
    }

    fn push(&mut self, op: T) {
        let read = |op: &mut T| {
            let FileRead { file, offset, target } = op.next_read()?;
            let len = u32::try_from(target.len()).map_err(|_| io::Error::other("a read of 4 GiB or more"))?;
            let file = types::Fd(file.as_raw_fd());
            Ok(opcode::Read::new(file, target.as_mut_ptr(), len).offset(offset).build())
        };
        // SAFETY: by the contract of `ReadsFile`.
        unsafe { self.submit(op, read) };
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
                // Nothing more can be learnt of these: the kernel may still write to their memory, so it
                // is never freed, even if one of the calls panics.
                let mut lost = ManuallyDrop::new(mem::take(&mut self.in_flight).into_iter());
                lost.by_ref().flatten().for_each(self.abandon);
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
fn open_ring(entries: u32, operations: &[u8]) -> Result<IoUring, Unavailable> {
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
