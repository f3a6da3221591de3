//! Files as the runtime opens them.
#![allow(unsafe_code)]

use crate::{
    Failure,
    abi::{FactoryTable, FileInformation, FileTable},
    interface::Reference,
    libraries::wide,
};
use std::{fs::File, io, os::windows::io::AsRawHandle, path::Path};
use windows_sys::Win32::Storage::FileSystem::{BY_HANDLE_FILE_INFORMATION, GetFileInformationByHandle};

/// A file that the runtime has open for reading. It is closed once this and all reads of it are gone.
#[derive(Debug)]
pub struct StorageFile {
    file: Reference<FileTable>,
    volume: u32,
    index: u64,
    len: u64,
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
        let opened = Self { file, volume: found.volume, index: joined(found.index), len: joined(found.len) };
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
        let index = joined([found.nFileIndexHigh, found.nFileIndexLow]);
        Ok((self.volume, self.index) == (found.dwVolumeSerialNumber, index))
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
