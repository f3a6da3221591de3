//! The checksum of a file that has the payload alone, in an extended attribute of the file. It moves with the file, and
//! is valid only until the next write to the file.
#![forbid(unsafe_code)]

use rustix::fs::{XattrFlags, fsetxattr, lgetxattr};
use std::{
    fs::{File, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
};
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{I64, U32},
};

pub(super) const ATTRIBUTE: &str = "user.hoistway.crc32c";
/// The attribute's name in files from before the project's renaming.
pub(super) const FORMER_ATTRIBUTE: &str = "user.windlass.crc32c";

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    /// When the file was last written to.
    modified_seconds: I64,
    modified_nanoseconds: U32,
    /// CRC-32C of its bytes.
    checksum: U32,
}

/// Writes down the checksum of a file whose bytes stay as they are from now on.
pub(super) fn write(file: &File, checksum: u32) -> io::Result<()> {
    let metadata = file.metadata()?;
    let raw = Raw {
        modified_seconds: metadata.mtime().into(),
        modified_nanoseconds: (metadata.mtime_nsec() as u32).into(),
        checksum: checksum.into(),
    };
    Ok(fsetxattr(file, ATTRIBUTE, raw.as_bytes(), XattrFlags::empty())?)
}

/// Returns the checksum of a file; `None` if the file has none, or has been written to since it was recorded.
pub(super) fn read(path: &Path, metadata: &Metadata) -> Option<u32> {
    [ATTRIBUTE, FORMER_ATTRIBUTE].into_iter().find_map(|attribute| {
        let mut bytes = [0; size_of::<Raw>()];
        let len = lgetxattr(path, attribute, &mut bytes).ok()?;
        let raw = Raw::read_from_bytes(bytes.get(..len)?).ok()?;
        let modified = (raw.modified_seconds.get(), i64::from(raw.modified_nanoseconds.get()));
        (modified == (metadata.mtime(), metadata.mtime_nsec())).then_some(raw.checksum.get())
    })
}
