//! Sets an `io_uring` up: asks the kernel for what it can do, and tries each system call before anything depends on it.
#![allow(unsafe_code)]

use super::Unavailable;
use io_uring::{IoUring, Probe, cqueue, opcode, squeue};
use std::{fmt, io};

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
        Err(error) => return Err(refusal(Call::Register, &error)),
    }
    try_out(&mut ring).map_err(|error| refusal(Call::Enter, &error))?;
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
            Err(error) => return Err(refusal(Call::SetUp, &error)),
        }
    }
    Err(refusal(Call::SetUp, &last))
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

/// A system call that a ring needs.
#[derive(Clone, Copy)]
enum Call {
    SetUp,
    Register,
    Enter,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SetUp => "io_uring_setup",
            Self::Register => "io_uring_register",
            Self::Enter => "io_uring_enter",
        })
    }
}

/// Why there is no ring, and what to do.
fn refusal(call: Call, error: &io::Error) -> Unavailable {
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
