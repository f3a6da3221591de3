//! Folders and the names in them.
#![allow(unsafe_code)]

use super::{code, is_lack, verbatim};
use std::{
    ffi::{OsStr, OsString},
    fs::{File, OpenOptions},
    io,
    mem::offset_of,
    os::windows::{
        ffi::{OsStrExt, OsStringExt},
        fs::OpenOptionsExt,
        io::AsRawHandle,
    },
    path::Path,
};
use windows_sys::Win32::{
    Foundation::{
        ERROR_ACCESS_DENIED, ERROR_INVALID_FUNCTION, ERROR_NOT_SUPPORTED, ERROR_SHARING_VIOLATION,
        GENERIC_READ, GENERIC_WRITE,
    },
    Storage::FileSystem::{
        DELETE, FILE_FLAG_BACKUP_SEMANTICS, FILE_FLAG_DELETE_ON_CLOSE, FILE_FLAG_OVERLAPPED,
        FILE_RENAME_INFO, FILE_RENAME_INFO_0, FileRenameInfoEx, MOVEFILE_REPLACE_EXISTING,
        MOVEFILE_WRITE_THROUGH, MoveFileExW, SetFileInformationByHandle, WRITE_DAC,
    },
    System::WindowsProgramming::{FILE_RENAME_FLAG_POSIX_SEMANTICS, FILE_RENAME_FLAG_REPLACE_IF_EXISTS},
};

/// The file that stands for the lock of the folder that it lies in.
const LOCK: &str = ".hoistway.lock";

/// Opens a folder, to sync it.
///
/// # Errors
/// The system's.
pub fn open(path: &Path) -> io::Result<File> {
    // Only what may be written to can be synced.
    let access = GENERIC_READ | GENERIC_WRITE;
    OpenOptions::new().access_mode(access).custom_flags(FILE_FLAG_BACKUP_SEMANTICS).open(path)
}

/// Locks a folder unless another has the lock: by a file in it, as the system locks no folders. The file is there for as long as one
/// handle is open, to which no other comes; the system removes it with that, also if the process is killed.
///
/// # Errors
/// [`WouldBlock`](io::ErrorKind::WouldBlock) if another has the lock; others where it cannot be locked.
pub fn try_lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.access_mode(GENERIC_WRITE | DELETE).write(true).create(true).share_mode(0);
    let file = options.custom_flags(FILE_FLAG_DELETE_ON_CLOSE).open(path.join(LOCK));
    file.map_err(|error| match code(&error) {
        Some(ERROR_SHARING_VIOLATION) => io::ErrorKind::WouldBlock.into(),
        _ => error,
    })
}

/// Returns the process that holds a lock of a file; `None` here, where the system does not tell.
pub fn lock_holder(_: &File) -> Option<String> {
    None
}

/// Makes the names in a folder durable.
///
/// # Errors
/// The system's.
pub fn sync(path: &Path) -> io::Result<()> {
    match open(path)?.sync_all() {
        // Some file systems have no such thing.
        Err(error) if matches!(code(&error), Some(ERROR_INVALID_FUNCTION | ERROR_NOT_SUPPORTED)) => Ok(()),
        done => done,
    }
}

/// Makes a new file for reading and writing, for transfers of several threads at once, with the rights that its folder gives.
/// They can be changed later.
///
/// # Errors
/// The system's; [`AlreadyExists`](io::ErrorKind::AlreadyExists) if the name is taken.
pub fn create_private(path: &Path) -> io::Result<File> {
    private().write(true).create_new(true).open(path)
}

/// Opens a file that [`create_private`] has made, as it was opened then.
///
/// # Errors
/// The system's.
pub fn open_private(path: &Path) -> io::Result<File> {
    private().open(path)
}

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.access_mode(GENERIC_READ | GENERIC_WRITE | WRITE_DAC).custom_flags(FILE_FLAG_OVERLAPPED);
    options
}

/// Renames, in place of a file that has the name. At no moment is there no file of that name. Others may have the old one open
/// where the file system can do that, as NTFS can from Windows 10 on.
///
/// # Errors
/// The system's.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    match rename_posix(from, to) {
        // Before Windows 10, on FAT and on network shares.
        Err(error) if is_lack(&error) => {}
        done => return done,
    }
    let (from, to) = (verbatim(from)?, verbatim(to)?);
    let flags = MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH;
    // SAFETY: both paths end with a zero and outlive the call.
    if unsafe { MoveFileExW(from.as_ptr(), to.as_ptr(), flags) } != 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if !matches!(code(&error), Some(ERROR_ACCESS_DENIED | ERROR_SHARING_VIOLATION)) {
        return Err(error);
    }
    // ReplaceFileW could do it, but there is no file of that name for a moment.
    Err(io::Error::new(
        error.kind(),
        format!(
            "{error} Close the programs that have the old file open: this file system replaces none that is open"
        ),
    ))
}

fn rename_posix(from: &Path, to: &Path) -> io::Result<()> {
    let file = OpenOptions::new().access_mode(DELETE).custom_flags(FILE_FLAG_BACKUP_SEMANTICS).open(from)?;
    let name = verbatim(to)?;
    // With the zero at its end, which does not count.
    let len = size_of_val(&name[..]);
    let bytes = offset_of!(FILE_RENAME_INFO, FileName) + len;
    let mut buffer = vec![0u64; bytes.max(size_of::<FILE_RENAME_INFO>()).div_ceil(size_of::<u64>())];
    let info = FILE_RENAME_INFO {
        Anonymous: FILE_RENAME_INFO_0 {
            Flags: FILE_RENAME_FLAG_REPLACE_IF_EXISTS | FILE_RENAME_FLAG_POSIX_SEMANTICS,
        },
        FileNameLength: (len - size_of::<u16>()) as u32,
        ..Default::default()
    };
    let place: *mut FILE_RENAME_INFO = buffer.as_mut_ptr().cast();
    // SAFETY: the buffer is aligned as the structure is, and has room for it and, from its last field on, for the name.
    unsafe {
        place.write(info);
        (&raw mut (*place).FileName).cast::<u16>().copy_from_nonoverlapping(name.as_ptr(), name.len());
    }
    let handle = file.as_raw_handle();
    // SAFETY: the handle is open during the call, which reads the structure of this class and the name in it.
    if unsafe { SetFileInformationByHandle(handle, FileRenameInfoEx, place.cast(), bytes as u32) } != 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Renames without replacing.
///
/// # Errors
/// The system's; [`AlreadyExists`](io::ErrorKind::AlreadyExists) if the name is taken.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    let (from, to) = (verbatim(from)?, verbatim(to)?);
    // SAFETY: both paths end with a zero and outlive the call.
    if unsafe { MoveFileExW(from.as_ptr(), to.as_ptr(), 0) } != 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// As much of a name as `max_bytes` hold; the system counts characters of two bytes, and takes 255 of them.
pub fn shortened(name: &OsStr, max_bytes: usize) -> OsString {
    OsString::from_wide(&name.encode_wide().take(max_bytes).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::files;
    use std::{io::IoSlice, sync::Barrier, thread};

    /// A handle that is not open for it would refuse the length, or carry out one write after the other.
    #[test]
    fn threads_write_by_one_handle_of_a_private_file() {
        const PART: usize = 1 << 16;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let content: Vec<u8> = (0..8 * PART).map(|at| (at / 5 % 251) as u8).collect();
        drop(create_private(&path).unwrap());
        assert_eq!(create_private(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        let (file, barrier) = (open_private(&path).unwrap(), Barrier::new(8));
        files::allocate(&file, content.len() as u64).unwrap();
        thread::scope(|scope| {
            for (part, bytes) in content.chunks(PART).enumerate() {
                let (file, barrier) = (&file, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    let (slice, offset) = (IoSlice::new(bytes), (part * PART) as u64);
                    assert_eq!(files::write_vectored_at(file, &[slice], offset).unwrap(), PART);
                });
            }
        });
        file.sync_all().unwrap();
        drop(file);
        assert!(std::fs::read(&path).unwrap() == content);
    }

    #[test]
    fn a_folder_is_locked_by_one_at_a_time_and_nothing_stays_in_it() {
        let folder = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            let held = try_lock(folder.path()).unwrap();
            for _ in 0..2 {
                assert_eq!(try_lock(folder.path()).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            }
            drop(held);
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        }
        assert_eq!(try_lock(&folder.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_file_that_is_read_can_be_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let long = folder.path().join("n".repeat(120)).join("m".repeat(120));
        std::fs::create_dir_all(&long).unwrap();
        let [new, old] = ["new", "\u{6a21}\u{578b} \u{1f388}"].map(|name| long.join(name));
        std::fs::write(&old, "old").unwrap();
        std::fs::write(&new, "new").unwrap();
        let (reader, _) = files::open_without_waiting(&old).unwrap();
        rename(&new, &old).unwrap();
        assert_eq!(std::fs::read(&old).unwrap(), b"new");
        let mut bytes = [0; 3];
        files::read_exact_at(&reader, &mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"old");
        drop(reader);
        assert_eq!(std::fs::read_dir(&long).unwrap().count(), 1);
        assert_eq!(rename(&new, &old).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
