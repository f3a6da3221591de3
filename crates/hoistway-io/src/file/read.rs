//! Reads for the page cache's sake.
#![forbid(unsafe_code)]

use crate::{ByteRange, sys::files::read_at};
use std::{fs::File, io};

/// Bytes of one read.
const STEP_BYTES: u64 = 1 << 20;

/// Reads a range of a file into the page cache, as far as the file goes.
///
/// # Errors
/// The system's.
pub fn read_in(file: &File, range: ByteRange) -> io::Result<()> {
    let mut buffer = vec![0; range.len().min(STEP_BYTES) as usize];
    let mut at = range.start();
    while at < range.end() {
        let len = (range.end() - at).min(STEP_BYTES) as usize;
        match read_at(file, &mut buffer[..len], at) {
            Ok(0) => break,
            Ok(count) => at += count as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
