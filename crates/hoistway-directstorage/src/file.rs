//! Files as the runtime opens them.
#![allow(unsafe_code)]

use crate::{
    Failure,
    abi::{FactoryTable, FileInformation, FileTable},
    interface::Reference,
    libraries::wide,
};
use std::{fs::File, io, os::windows::io::AsRawHandle, path::Path};
use windows_sys::Win32::{
    Foundation::FILETIME,
    Storage::FileSystem::{BY_HANDLE_FILE_INFORMATION, GetFileInformationByHandle},
};

/// A file that the runtime has open for reading. It is closed once this and all reads of it are gone.
#[derive(Debug)]
pub struct StorageFile {
    file: Reference<FileTable>,
    identity: Identity,
    len: u64,
}

/// What tells a file from others: its volume, its number there, its length, and when it was created and written. Some file systems
/// give all files one number.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    volume: u32,
    index: u64,
    len: u64,
    created: u64,
    written: u64,
}

impl StorageFile {
    pub(crate) fn open(factory: &Reference<FactoryTable>, path: &Path) -> Result<Self, Failure> {
        let path = wide(path);
        let open = |id, object| {
            // SAFETY: the path ends with a zero, and outlives the call.
            unsafe { (factory.table().open_file)(factory.object(), path.as_ptr(), id, object) }
        };
        // SAFETY: the function gives an object with the table that it is asked for.
        let file: Reference<FileTable> = unsafe { Reference::of("OpenFile", open)? };
        let mut found = FileInformation::default();
        // SAFETY: the object lives during the call, and the structure is that of the header.
        let answer = unsafe { (file.table().information)(file.object(), &raw mut found) };
        let [created_low, created_high, _, _, written_low, written_high] = found.times;
        let len = joined(found.len);
        let identity = Identity {
            volume: found.volume,
            index: joined(found.index),
            len,
            created: joined([created_high, created_low]),
            written: joined([written_high, written_low]),
        };
        let opened = Self { file, identity, len };
        Failure::check("GetFileInformation", answer)?;
        Ok(opened)
    }

    /// Returns the length in bytes when it was opened.
    #[expect(clippy::len_without_is_empty, reason = "an empty file is a file")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether `other` is the same file.
    ///
    /// # Errors
    /// The system's.
    pub fn is_same(&self, other: &File) -> io::Result<bool> {
        let mut found = BY_HANDLE_FILE_INFORMATION::default();
        // SAFETY: the handle is open during the call, and the structure outlives it.
        if unsafe { GetFileInformationByHandle(other.as_raw_handle(), &raw mut found) } == 0 {
            return Err(io::Error::last_os_error());
        }
        let time = |time: FILETIME| joined([time.dwHighDateTime, time.dwLowDateTime]);
        Ok(self.identity
            == Identity {
                volume: found.dwVolumeSerialNumber,
                index: joined([found.nFileIndexHigh, found.nFileIndexLow]),
                len: joined([found.nFileSizeHigh, found.nFileSizeLow]),
                created: time(found.ftCreationTime),
                written: time(found.ftLastWriteTime),
            })
    }

    pub(crate) fn reference(&self) -> &Reference<FileTable> {
        &self.file
    }
}

impl Drop for StorageFile {
    fn drop(&mut self) {
        // SAFETY: no read of it is in flight: each keeps it.
        unsafe { (self.file.table().close)(self.file.object()) };
    }
}

fn joined([high, low]: [u32; 2]) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}
