//! What programs that read and write files themselves ask the engine, so that they decide as it does.
#![forbid(unsafe_code)]

use super::{
    Unavailable,
    filesystem::FileSystem,
    source::{DirectAlignment, direct_alignment, open_direct},
};
use rustix::fs::OFlags;
use std::{fs::File, io};

/// What a file that is opened past the page cache is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileUse {
    /// Reading alone.
    Read,
    /// Reading and writing.
    ReadWrite,
}

/// A file, opened past the page cache (`O_DIRECT`).
#[derive(Debug)]
pub struct PastCache {
    /// The file.
    pub file: File,
    /// What offsets and lengths of reads and writes are multiples of: at most 4096.
    pub offset_alignment: u64,
    /// What addresses of memory are multiples of: at most 4096.
    pub memory_alignment: u64,
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

/// Opens an open file a second time, past the page cache.
///
/// # Errors
/// Why that cannot be.
pub fn open_past_cache(file: &File, file_use: FileUse) -> Result<PastCache, Unavailable> {
    let filesystem = FileSystem::of(file)
        .map_err(|error| Unavailable::new(format!("the file system is not known: {error}"), ""))?;
    let mode = match file_use {
        FileUse::Read => OFlags::RDONLY,
        FileUse::ReadWrite => OFlags::RDWR,
    };
    let file = open_direct(file, filesystem, mode)?;
    let DirectAlignment { memory, offset } = direct_alignment(&file).unwrap_or_default();
    Ok(PastCache { file, offset_alignment: offset, memory_alignment: memory })
}
