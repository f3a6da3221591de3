//! The permissions of a saved file: those of the files that it replaces.
#![allow(unsafe_code)]

use super::code;
use crate::{Error, Result};
use std::{
    fs::{File, OpenOptions},
    io,
    os::windows::{fs::OpenOptionsExt, io::AsRawHandle},
    path::{Path, PathBuf},
    ptr,
};
use windows_sys::Win32::{
    Foundation::ERROR_INSUFFICIENT_BUFFER,
    Security::{DACL_SECURITY_INFORMATION, GetKernelObjectSecurity, SetKernelObjectSecurity},
    Storage::FileSystem::READ_CONTROL,
};

/// The access list of a file that is saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// The different access lists of the replaced files, each as a descriptor of the system's.
    replaced: Vec<Vec<u64>>,
}

impl Permissions {
    /// Returns those of a new file: what its folder gives.
    pub fn of_new_file() -> Self {
        Self { replaced: Vec::new() }
    }

    /// Returns those of a file that replaces the files of these paths. If all are missing, it is a new file.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn replacing(paths: &[PathBuf]) -> Result<Self> {
        let mut replaced = Vec::new();
        for path in paths {
            let list = OpenOptions::new().access_mode(READ_CONTROL).open(path);
            match list.and_then(|file| access_list(&file)) {
                Ok(list) if replaced.contains(&list) => {}
                Ok(list) => replaced.push(list),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => {
                    let (operation, path) = ("read the access list", path.clone());
                    return Err(Error::Io { operation, path, range: None, source });
                }
            }
        }
        Ok(Self { replaced })
    }

    /// Gives them to a complete file that has no name yet, as far as the process is allowed to. Adds a note of what the system
    /// refuses. If the replaced files have different ones, the file keeps what its folder gives, with a note.
    pub fn give(&self, file: &File, path: &Path, notes: &mut Vec<String>) {
        let list = match &self.replaced[..] {
            [] => return,
            [list] => list,
            _ => {
                let reason = "the files that it replaces have different ones";
                notes
                    .push(format!("{} gets the access list that its folder gives: {reason}", path.display()));
                return;
            }
        };
        let descriptor = list.as_ptr().cast_mut().cast();
        // SAFETY: the handle is open during the call, which reads a descriptor that the system has made.
        if unsafe { SetKernelObjectSecurity(file.as_raw_handle(), DACL_SECURITY_INFORMATION, descriptor) }
            == 0
        {
            let error = io::Error::last_os_error();
            notes.push(format!(
                "{} does not get the access list of what it replaces: {error}",
                path.display()
            ));
        }
    }
}

/// A descriptor that holds the access list of a file.
fn access_list(file: &File) -> io::Result<Vec<u64>> {
    // Words, as the system wants it aligned.
    let mut descriptor: Vec<u64> = Vec::new();
    loop {
        let (mut bytes, room) = (0, size_of_val(&descriptor[..]) as u32);
        let place = if room == 0 { ptr::null_mut() } else { descriptor.as_mut_ptr().cast() };
        // SAFETY: the handle is open during the call, which writes no more than there is room for.
        let is_told = unsafe {
            GetKernelObjectSecurity(
                file.as_raw_handle(),
                DACL_SECURITY_INFORMATION,
                place,
                room,
                &raw mut bytes,
            )
        };
        if is_told != 0 {
            return Ok(descriptor);
        }
        let error = io::Error::last_os_error();
        if code(&error) != Some(ERROR_INSUFFICIENT_BUFFER) || bytes <= room {
            return Err(error);
        }
        descriptor = vec![0; (bytes as usize).div_ceil(size_of::<u64>())];
    }
}
