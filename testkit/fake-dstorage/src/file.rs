//! Files.
#![allow(unsafe_code)]

use crate::{
    control::state,
    factory::of_windows,
    object::{Kind, kind, unknown},
};
use hoistway_directstorage::abi::{
    E_DSTORAGE_END_OF_FILE, E_DSTORAGE_FILE_NOT_OPEN, FileInformation, FileTable, Guid, HResult, IID_FILE,
    Object,
};
use std::{
    fs, io,
    os::windows::{
        fs::{FileExt, OpenOptionsExt},
        io::AsRawHandle,
    },
    path::Path,
    sync::{Arc, PoisonError, RwLock},
};
use windows_sys::Win32::Storage::FileSystem::{
    BY_HANDLE_FILE_INFORMATION, FILE_SHARE_DELETE, FILE_SHARE_READ, GetFileInformationByHandle,
};

/// A file, until it is closed.
pub(crate) type Opened = Arc<RwLock<Option<fs::File>>>;

pub(crate) struct File(Opened);

impl Kind for File {
    type Table = FileTable;
    const TABLE: &'static FileTable = &FileTable { unknown: unknown::<Self>(), close, information };
    const IDS: &'static [Guid] = &[IID_FILE];
}

impl File {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let share = FILE_SHARE_READ | FILE_SHARE_DELETE;
        let file = fs::OpenOptions::new().read(true).share_mode(share).open(path)?;
        state().count("files");
        Ok(Self(Arc::new(RwLock::new(Some(file)))))
    }

    pub(crate) fn opened(&self) -> &Opened {
        &self.0
    }
}

impl Drop for File {
    fn drop(&mut self) {
        state().discount("files");
    }
}

/// Reads all of it, or says why not.
pub(crate) fn read(file: &Opened, offset: u64, mut memory: &mut [u8]) -> HResult {
    let file = file.read().unwrap_or_else(PoisonError::into_inner);
    let Some(file) = &*file else { return E_DSTORAGE_FILE_NOT_OPEN };
    let mut at = offset;
    while !memory.is_empty() {
        match file.seek_read(memory, at) {
            Ok(0) => return E_DSTORAGE_END_OF_FILE,
            Ok(count) => {
                memory = &mut memory[count..];
                at += count as u64;
            }
            Err(error) => return of_windows(&error),
        }
    }
    0
}

/// Its length, while it is open.
pub(crate) fn len(file: &Opened) -> Option<u64> {
    let file = file.read().unwrap_or_else(PoisonError::into_inner);
    file.as_ref()?.metadata().ok().map(|found| found.len())
}

unsafe extern "system" fn close(object: Object) {
    // SAFETY: callers give a living object.
    let file = unsafe { kind::<File>(object) };
    *file.0.write().unwrap_or_else(PoisonError::into_inner) = None;
}

unsafe extern "system" fn information(object: Object, out: *mut FileInformation) -> HResult {
    // SAFETY: callers give a living object.
    let file = unsafe { kind::<File>(object) };
    let file = file.0.read().unwrap_or_else(PoisonError::into_inner);
    let Some(file) = &*file else { return E_DSTORAGE_FILE_NOT_OPEN };
    // SAFETY: both structures are the same, and callers give a valid pointer.
    if unsafe { GetFileInformationByHandle(file.as_raw_handle(), out.cast::<BY_HANDLE_FILE_INFORMATION>()) }
        == 0
    {
        return of_windows(&io::Error::last_os_error());
    }
    0
}
