//! Files that are opened past the page cache (`O_DIRECT`), and whether they can be.
#![forbid(unsafe_code)]

use super::{FileSystem, FileSystemKind, descriptor::with_descriptor};
use crate::{Alignment, sys};
use hoistway_device::Unavailable;
use std::{fs::File, io};

/// The use of a file that is opened past the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileUse {
    /// Only reading.
    Read,
    /// Reading and writing.
    ReadWrite,
}

/// A file, opened past the page cache (`O_DIRECT`).
#[derive(Debug)]
pub struct DirectFile {
    /// The file.
    pub file: File,
    /// Offsets and lengths of transfers must be multiples of this, at most 4096.
    pub offset_alignment: u64,
    /// Addresses of memory must be multiples of this, at most 4096.
    pub memory_alignment: u64,
}

/// The alignment that direct transfers need, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectAlignment {
    /// The alignment of addresses of memory.
    pub memory: u64,
    /// The alignment of offsets and lengths. 0 if the file takes no direct transfers.
    pub offset: u64,
}

/// The alignment to try where the file system does not report one. A transfer may still be refused; see
/// [`is_refusal_of_direct`].
impl Default for DirectAlignment {
    fn default() -> Self {
        Self { memory: Alignment::BLOCK.bytes(), offset: Alignment::BLOCK.bytes() }
    }
}

/// Opens an open file a second time, past the page cache.
///
/// # Errors
/// Why that cannot be.
pub fn open_direct(file: &File, file_use: FileUse) -> Result<DirectFile, Unavailable> {
    let filesystem = FileSystem::of(file)
        .map_err(|error| Unavailable::new(format!("the file system is not known: {error}"), ""))?;
    let opened = open_on(file, filesystem, file_use);
    opened.unwrap_or_else(|error| {
        Err(Unavailable::new(format!("it cannot be opened past the page cache: {error}"), ""))
    })
}

/// Does what [`open_direct`] does, for a file that lies on `filesystem`.
///
/// # Errors
/// The process has too many files open. That may pass.
pub(super) fn open_on(
    file: &File,
    filesystem: FileSystem,
    file_use: FileUse,
) -> io::Result<Result<DirectFile, Unavailable>> {
    if let Err(why) = check_medium(filesystem) {
        return Ok(Err(why));
    }
    let opened = with_descriptor(|| sys::files::open_direct(file, filesystem, file_use))?;
    Ok(opened.and_then(|file| with_alignment(file, filesystem)))
}

fn check_medium(filesystem: FileSystem) -> Result<(), Unavailable> {
    if filesystem.kind == FileSystemKind::Memory {
        let reason = format!("the file lives in memory ({filesystem}), there is nothing to bypass");
        return Err(Unavailable::new(reason, ""));
    }
    Ok(())
}

fn with_alignment(file: File, filesystem: FileSystem) -> Result<DirectFile, Unavailable> {
    let DirectAlignment { memory, offset } = sys::files::direct_alignment(&file).unwrap_or_default();
    let block = Alignment::BLOCK.bytes();
    if offset == 0 {
        let reason =
            format!("{filesystem} supports no direct I/O on this file (encrypted, journaled or inline data)");
        return Err(Unavailable::new(reason, ""));
    }
    if memory > block || offset > block {
        let needed = memory.max(offset);
        let reason = format!("{filesystem} needs direct I/O aligned to {needed} bytes, more than {block}");
        return Err(Unavailable::new(reason, ""));
    }
    Ok(DirectFile { file, offset_alignment: offset, memory_alignment: memory })
}

/// Returns whether an error of a direct transfer means that the file takes none.
pub fn is_refusal_of_direct(error: &io::Error) -> bool {
    sys::files::is_refusal_of_direct(error)
}

/// Why `io_uring` cannot be used for what lies on the file system of `file`, which may be a directory; `None` if it can,
/// as far as the file system goes.
///
/// # Errors
/// The system's, if it does not say which file system that is.
pub fn ring_refusal(file: &File) -> io::Result<Option<Unavailable>> {
    Ok(FileSystem::of(file)?.ring_refusal())
}

/// Whether `file`, which may be a directory, lies on a file system that other machines may share: one of the network, or a
/// program's (FUSE).
///
/// # Errors
/// The system's, if it does not say which file system that is.
pub fn is_remote(file: &File) -> io::Result<bool> {
    Ok(FileSystem::of(file)?.is_remote())
}
