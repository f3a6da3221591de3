//! Registered files.

use super::{
    abi::{
        Error, FileDescription, HANDLE_ALREADY_REGISTERED, HANDLE_NOT_REGISTERED, HANDLE_TYPE_OPAQUE_FD,
        HANDLE_TYPE_USERSPACE_FS, INTERNAL_ERROR, INVALID_FILE_OPEN_FLAG, INVALID_FILE_TYPE, INVALID_VALUE,
        IO_NOT_SUPPORTED, Status,
    },
    answer, put, session,
};
use crate::{
    control::{
        settings,
        settings::CufileMode::{Nvfs, PeerToPeer},
    },
    execution::handles::Table,
    gate,
};
use std::{ffi::c_int, mem::MaybeUninit, sync::Arc};

/// All registered files.
pub(crate) static FILES: Table<RegisteredFile> = Table::new(0xCF10_0000_0000);

/// A file, by a descriptor that stays the program's.
pub(crate) struct RegisteredFile {
    pub(super) fd: c_int,
    pub(super) is_direct: bool,
    identity: (u64, u64),
}

impl RegisteredFile {
    fn register(fd: c_int) -> Result<RegisteredFile, Error> {
        let status = status(fd).ok_or(INVALID_VALUE)?;
        if !matches!(status.st_mode & libc::S_IFMT, libc::S_IFREG | libc::S_IFBLK) {
            return Err(INVALID_FILE_TYPE);
        }
        // SAFETY: asks for a number.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
        if flags & libc::O_APPEND != 0 {
            return Err(INVALID_FILE_OPEN_FLAG);
        }
        let is_direct = flags & libc::O_DIRECT != 0;
        Ok(RegisteredFile { fd, is_direct, identity: (status.st_dev, status.st_ino) })
    }

    /// Whether the descriptor still means the file that was registered: a program that closes it too early,
    /// and opens another, must not get bytes of that one.
    pub(super) fn is_open(&self) -> bool {
        status(self.fd).is_some_and(|status| (status.st_dev, status.st_ino) == self.identity)
    }
}

/// The file of a handle.
pub(super) fn get(handle: usize) -> Result<Arc<RegisteredFile>, Error> {
    FILES.get(handle).ok_or(HANDLE_NOT_REGISTERED)
}

/// Forgets what is registered, and says how much that was.
pub(super) fn release_all() -> u64 {
    FILES.remove_if(|_| true).len() as u64
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuFileHandleRegister(place: *mut usize, description: *const FileDescription) -> Status {
    answer("cuFileHandleRegister", || {
        let mode = session::mode()?;
        // SAFETY: null or the caller's structure.
        let description = unsafe { description.as_ref() }.ok_or(INVALID_VALUE)?;
        match description.kind {
            HANDLE_TYPE_OPAQUE_FD if !place.is_null() => (),
            HANDLE_TYPE_USERSPACE_FS => return Err(IO_NOT_SUPPORTED),
            _ => return Err(INVALID_VALUE),
        }
        if matches!(mode, Nvfs | PeerToPeer) && settings().cufile_refuses_files {
            return Err(INTERNAL_ERROR);
        }
        let fd = description.handle as c_int;
        let file = RegisteredFile::register(fd)?;
        if FILES.find(|other| other.fd == fd).is_some() {
            return Err(HANDLE_ALREADY_REGISTERED);
        }
        // SAFETY: the place is the caller's.
        unsafe { put(place, FILES.insert(Arc::new(file))) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileHandleDeregister(handle: usize) {
    if gate::admit("cuFileHandleDeregister").is_ok() {
        FILES.remove(handle);
    }
}

fn status(fd: c_int) -> Option<libc::stat> {
    let mut status = MaybeUninit::uninit();
    // SAFETY: writes one `stat` into the place for it.
    let result = unsafe { libc::fstat(fd, status.as_mut_ptr()) };
    // SAFETY: written in case of success.
    (result == 0).then(|| unsafe { status.assume_init() })
}
