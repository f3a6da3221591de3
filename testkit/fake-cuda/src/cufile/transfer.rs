//! Reads and writes between files and device memory.

use super::{
    abi::{Error, INVALID_VALUE},
    admit,
    buffer::{self, Target},
    file::{self, RegisteredFile},
    session, stats,
};
use crate::{
    control::{
        control,
        counters::{CUFILE_READS, CUFILE_WRITES},
        faults::{READ, ReadFault},
    },
    execution::stream::Jitter,
};
use std::{
    alloc::{Layout, alloc, dealloc, handle_alloc_error},
    ffi::{CString, c_int},
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

/// What O_DIRECT asks of offsets, sizes and addresses at most, and what GPUDirect Storage asks of them for
/// its direct path.
const ALIGNMENT: u64 = 4096;
const BOUNCE_BYTES: u64 = 1 << 20;

/// Transfers that are being executed.
static UNDER_WAY: AtomicU64 = AtomicU64::new(0);

/// One transfer.
pub(super) struct Transfer {
    pub(super) direction: Direction,
    file: Arc<RegisteredFile>,
    request: Request,
}

/// What a transfer moves, in an order of our own.
struct Request {
    base: u64,
    buffer_offset: i64,
    file_offset: i64,
    size: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

/// Why a transfer didn't happen.
enum Failure {
    Cufile(Error),
    Errno(c_int),
}

pub(super) fn is_under_way() -> bool {
    UNDER_WAY.load(Ordering::SeqCst) > 0
}

#[unsafe(no_mangle)]
extern "C" fn cuFileRead(file: usize, base: u64, size: usize, file_offset: i64, buffer_offset: i64) -> isize {
    let request = Request { base, buffer_offset, file_offset, size };
    transfer("cuFileRead", Direction::Read, file, request)
}

#[unsafe(no_mangle)]
extern "C" fn cuFileWrite(
    file: usize,
    base: u64,
    size: usize,
    file_offset: i64,
    buffer_offset: i64,
) -> isize {
    let request = Request { base, buffer_offset, file_offset, size };
    transfer("cuFileWrite", Direction::Write, file, request)
}

fn transfer(name: &'static str, direction: Direction, file: usize, request: Request) -> isize {
    let prepared = admit(name).map_err(|status| status.error).and_then(|()| {
        session::mode()?;
        file::get(file)
    });
    let file = match prepared {
        Ok(file) => file,
        Err(error) => return -(error as isize),
    };
    match (Transfer { direction, file, request }).run() {
        Ok(bytes) => bytes as isize,
        Err(Failure::Cufile(error)) => -(error as isize),
        Err(Failure::Errno(errno)) => {
            // SAFETY: the calling thread's own variable.
            unsafe { *libc::__errno_location() = errno };
            -1
        }
    }
}

impl Transfer {
    /// Moves the bytes and says how many there were.
    fn run(&self) -> Result<u64, Failure> {
        /// Each call has a delay of its own, whichever thread makes it.
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        UNDER_WAY.fetch_add(1, Ordering::SeqCst);
        Jitter::new(NUMBERS.fetch_add(1, Ordering::Relaxed)).delay();
        let begin = Instant::now();
        let outcome = self.attempt();
        stats::record(self, outcome.as_ref().ok().copied(), begin.elapsed());
        UNDER_WAY.fetch_sub(1, Ordering::SeqCst);
        outcome
    }

    fn attempt(&self) -> Result<u64, Failure> {
        let fault = match self.direction {
            Direction::Read => {
                CUFILE_READS.add(1);
                control().read_faults.strike(READ)
            }
            Direction::Write => {
                CUFILE_WRITES.add(1);
                None
            }
        };
        let size = match fault {
            Some(ReadFault::Cufile(error)) => return Err(Failure::Cufile(error)),
            Some(ReadFault::Errno(errno)) => return Err(Failure::Errno(errno)),
            Some(ReadFault::Short(most)) => most.min(self.request.size as u64),
            None => self.request.size as u64,
        };
        let file_offset =
            u64::try_from(self.request.file_offset).map_err(|_| Failure::Cufile(INVALID_VALUE))?;
        if !self.file.is_open() {
            return Err(Failure::Errno(libc::EBADF));
        }
        if self.request.size == 0 {
            return Ok(0);
        }
        // Checked for what was asked, even if less is read.
        let target = self.target().map_err(Failure::Cufile)?;
        control().wait_for_transfer(size, || false);
        let moved = match (self.direction, self.file.is_direct) {
            (Direction::Read, false) => read_buffered(self.file.fd, &target, size, file_offset),
            (Direction::Read, true) => read_direct(self.file.fd, &target, size, file_offset),
            (Direction::Write, _) => write(&self.file, &target, size, file_offset),
        };
        moved.map_err(|error| Failure::Errno(error.raw_os_error().unwrap_or(libc::EIO)))
    }

    fn target(&self) -> Result<Target, Error> {
        buffer::target(self.request.base, self.request.buffer_offset, self.request.size as u64)
    }

    /// On which device the buffer is.
    pub(super) fn device(&self) -> Option<usize> {
        self.target().ok().map(|target| target.device)
    }

    /// Whether GPUDirect Storage would have moved the bytes through a buffer of its own.
    pub(super) fn is_unaligned(&self) -> bool {
        let address = self.target().map_or(0, |target| target.address);
        !(address | self.request.file_offset as u64 | self.request.size as u64).is_multiple_of(ALIGNMENT)
    }
}

fn read_buffered(fd: c_int, target: &Target, size: u64, offset: u64) -> io::Result<u64> {
    repeat(size, |done| {
        let memory = target.shadow.wrapping_add(done as usize).cast();
        // SAFETY: the target is `size` bytes of an allocation, all of which is mapped for writing.
        unsafe { libc::pread(fd, memory, (size - done) as usize, (offset + done) as libc::off_t) }
    })
}

/// Reads the blocks around the range into aligned memory, and takes the range out of them.
fn read_direct(fd: c_int, target: &Target, size: u64, offset: u64) -> io::Result<u64> {
    let bounce = Bounce::new();
    let mut done = 0;
    while done < size {
        let position = offset + done;
        let skipped = position % ALIGNMENT;
        let wanted = (skipped + size - done).next_multiple_of(ALIGNMENT).min(BOUNCE_BYTES);
        let start = (position - skipped) as libc::off_t;
        // SAFETY: the bounce buffer has BOUNCE_BYTES.
        let read = unsafe { libc::pread(fd, bounce.0.cast(), wanted as usize, start) };
        if read < 0 {
            return Err(io::Error::last_os_error());
        }
        let useful = (read as u64).saturating_sub(skipped).min(size - done);
        if useful == 0 {
            break;
        }
        // SAFETY: `useful` bytes were read behind the skipped ones, and the target has room for `size`.
        unsafe {
            let from = bounce.0.add(skipped as usize);
            target.shadow.add(done as usize).copy_from_nonoverlapping(from, useful as usize);
        }
        done += useful;
    }
    Ok(done)
}

/// Writes past O_DIRECT, which would need whole blocks; the kernel keeps both views of the file in step.
fn write(file: &RegisteredFile, target: &Target, size: u64, offset: u64) -> io::Result<u64> {
    let reopened = if file.is_direct { Some(reopen(file.fd)?) } else { None };
    let fd = reopened.as_ref().map_or(file.fd, |reopened| reopened.0);
    repeat(size, |done| {
        let memory = target.shadow.wrapping_add(done as usize).cast_const().cast();
        // SAFETY: the target is `size` bytes of an allocation, all of which is mapped.
        unsafe { libc::pwrite(fd, memory, (size - done) as usize, (offset + done) as libc::off_t) }
    })
}

/// Calls until all is done, or nothing more comes. An error counts only if nothing was done before it.
fn repeat(size: u64, mut step: impl FnMut(u64) -> isize) -> io::Result<u64> {
    let mut done = 0;
    while done < size {
        match step(done) {
            0 => break,
            moved if moved > 0 => done += moved as u64,
            _ => {
                let error = io::Error::last_os_error();
                match error.kind() {
                    io::ErrorKind::Interrupted => (),
                    _ if done > 0 => break,
                    _ => return Err(error),
                }
            }
        }
    }
    Ok(done)
}

struct Reopened(c_int);

/// Opens the file of a descriptor again, without O_DIRECT.
fn reopen(fd: c_int) -> io::Result<Reopened> {
    let path = CString::new(format!("/proc/self/fd/{fd}"))?;
    // SAFETY: the path ends with a NUL.
    match unsafe { libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC) } {
        -1 => Err(io::Error::last_os_error()),
        fd => Ok(Reopened(fd)),
    }
}

impl Drop for Reopened {
    fn drop(&mut self) {
        // SAFETY: the descriptor is this one's own.
        unsafe { libc::close(self.0) };
    }
}

/// Memory that O_DIRECT can read into.
struct Bounce(*mut u8);

impl Bounce {
    const LAYOUT: Layout = match Layout::from_size_align(BOUNCE_BYTES as usize, ALIGNMENT as usize) {
        Ok(layout) => layout,
        Err(_) => unreachable!(),
    };

    fn new() -> Bounce {
        // SAFETY: the layout isn't empty.
        let memory = unsafe { alloc(Bounce::LAYOUT) };
        if memory.is_null() {
            handle_alloc_error(Bounce::LAYOUT);
        }
        Bounce(memory)
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.0, Bounce::LAYOUT) };
    }
}
