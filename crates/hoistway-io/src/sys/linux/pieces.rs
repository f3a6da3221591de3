//! Transfers between a file and memory in pieces, whose memory its owner vouches for.
#![allow(unsafe_code)]

pub use libc::iovec as Piece;

use std::{fs::File, io, os::fd::AsRawFd};

/// Reads into the pieces, in their order, from `offset` on. Returns how many bytes were read.
///
/// # Errors
/// The system's; also if there are more pieces than it takes.
///
/// # Safety
/// The pieces are valid for writes, and nothing else uses their memory during the call.
pub unsafe fn read(file: &File, pieces: &[Piece], offset: u64) -> io::Result<usize> {
    let (count, offset) = arguments(pieces, offset)?;
    // SAFETY: by the contract of this function; the list outlives the call.
    moved(unsafe { libc::preadv(file.as_raw_fd(), pieces.as_ptr(), count, offset) })
}

/// Writes the pieces, in their order, from `offset` on. Returns how many bytes were written.
///
/// # Errors
/// The system's; also if there are more pieces than it takes.
///
/// # Safety
/// The pieces are valid for reads, and nothing writes to their memory during the call.
pub unsafe fn write(file: &File, pieces: &[Piece], offset: u64) -> io::Result<usize> {
    let (count, offset) = arguments(pieces, offset)?;
    // SAFETY: by the contract of this function; the list outlives the call.
    moved(unsafe { libc::pwritev(file.as_raw_fd(), pieces.as_ptr(), count, offset) })
}

fn arguments(pieces: &[Piece], offset: u64) -> io::Result<(libc::c_int, libc::off_t)> {
    let too_large = |_| io::Error::from(io::ErrorKind::InvalidInput);
    Ok((pieces.len().try_into().map_err(too_large)?, offset.try_into().map_err(too_large)?))
}

fn moved(count: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}
