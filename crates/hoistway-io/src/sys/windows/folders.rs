//! Folders and the names in them.
#![allow(unsafe_code)]

use super::{code, files, is_lack, verbatim};
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
    path::{Path, PathBuf},
};
use windows_sys::Win32::{
    Foundation::{
        ERROR_ACCESS_DENIED, ERROR_DELETE_PENDING, ERROR_INVALID_FUNCTION, ERROR_NOT_SUPPORTED,
        ERROR_SHARING_VIOLATION, GENERIC_READ, GENERIC_WRITE,
    },
    Storage::FileSystem::{
        DELETE, FILE_ADD_FILE, FILE_ADD_SUBDIRECTORY, FILE_FLAG_BACKUP_SEMANTICS, FILE_FLAG_DELETE_ON_CLOSE,
        FILE_FLAG_OVERLAPPED, FILE_READ_ATTRIBUTES, FILE_RENAME_INFO, FILE_RENAME_INFO_0, FileRenameInfoEx,
        MOVEFILE_REPLACE_EXISTING, MOVEFILE_WRITE_THROUGH, MoveFileExW, SYNCHRONIZE,
        SetFileInformationByHandle, WRITE_DAC,
    },
    System::WindowsProgramming::{FILE_RENAME_FLAG_POSIX_SEMANTICS, FILE_RENAME_FLAG_REPLACE_IF_EXISTS},
};

/// The file that stands for the lock of the folder that it lies in.
const LOCK: &str = ".hoistway.lock";

/// Opens a folder, to ask what it lies on.
///
/// # Errors
/// The system's.
pub fn open(path: &Path) -> io::Result<File> {
    open_for(path, FILE_READ_ATTRIBUTES)
}

fn open_for(path: &Path, access: u32) -> io::Result<File> {
    OpenOptions::new().access_mode(access | SYNCHRONIZE).custom_flags(FILE_FLAG_BACKUP_SEMANTICS).open(path)
}

/// The lock of a folder, from a successful [`try_lock`](Self::try_lock) until it is dropped.
///
/// It is a file in the folder, as the system locks no folders. The file is there for as long as one handle is open, to which no other
/// comes; the system removes it with that, also if the process is killed.
#[derive(Debug)]
pub struct FolderLock {
    folder: PathBuf,
    file: Option<File>,
}

impl FolderLock {
    /// The lock of this folder, which is not taken yet.
    ///
    /// # Errors
    /// None.
    pub fn new(path: &Path) -> io::Result<Self> {
        Ok(Self { folder: path.to_owned(), file: None })
    }

    /// Takes the lock unless another has it.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if another has it; others where the folder cannot be locked.
    pub fn try_lock(&mut self) -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.access_mode(GENERIC_WRITE | DELETE).write(true).create(true).share_mode(0);
        match options.custom_flags(FILE_FLAG_DELETE_ON_CLOSE).open(self.folder.join(LOCK)) {
            Ok(file) => {
                self.file = Some(file);
                Ok(())
            }
            Err(error) if is_held(&error, || files::create_nameless(&self.folder)) => {
                Err(io::ErrorKind::WouldBlock.into())
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the process that holds the lock; `None` here, where the system does not tell.
    pub fn holder(&self) -> Option<String> {
        None
    }
}

/// Whether the error of opening the lock's file says that another has the lock. `create_other` makes another file in the folder.
fn is_held(error: &io::Error, create_other: impl FnOnce() -> io::Result<File>) -> bool {
    match code(error) {
        Some(ERROR_SHARING_VIOLATION | ERROR_DELETE_PENDING) => true,
        // Also where the file is another user's, or is still to be removed because a program that looks at it has it open. If no
        // file can be made in the folder at all, it has nothing to do with the lock.
        Some(ERROR_ACCESS_DENIED) => create_other().is_ok(),
        _ => false,
    }
}

/// Makes the names in a folder durable.
///
/// # Errors
/// The system's.
pub fn sync(path: &Path) -> io::Result<()> {
    // Either right is enough for the system. A process that makes folders or files here may have only one.
    let folder = match open_for(path, FILE_ADD_SUBDIRECTORY) {
        Err(error) if code(&error) == Some(ERROR_ACCESS_DENIED) => open_for(path, FILE_ADD_FILE),
        opened => opened,
    };
    match folder?.sync_all() {
        // Some file systems have no such thing.
        Err(error) if matches!(code(&error), Some(ERROR_INVALID_FUNCTION | ERROR_NOT_SUPPORTED)) => Ok(()),
        done => done,
    }
}

/// Makes a new file for reading and writing, for transfers of several threads at once, with the rights that its folder gives.
/// They can be changed later, where the folder lets them be.
///
/// # Errors
/// The system's; [`AlreadyExists`](io::ErrorKind::AlreadyExists) if the name is taken.
pub fn create_private(path: &Path) -> io::Result<File> {
    with_rights(|access| private(access).write(true).create_new(true).open(path))
}

/// Opens a file that [`create_private`] has made, as it was opened then.
///
/// # Errors
/// The system's.
pub fn open_private(path: &Path) -> io::Result<File> {
    with_rights(|access| private(access).open(path))
}

fn private(access: u32) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.access_mode(access).custom_flags(FILE_FLAG_OVERLAPPED);
    options
}

/// Opens for reading, writing and changing who may do so; without the last where that is refused, as by a network share that
/// lets its users change files and no more.
fn with_rights(open: impl Fn(u32) -> io::Result<File>) -> io::Result<File> {
    let access = GENERIC_READ | GENERIC_WRITE;
    match open(access | WRITE_DAC) {
        Err(error) if code(&error) == Some(ERROR_ACCESS_DENIED) => open(access),
        opened => opened,
    }
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
    use std::{cell::RefCell, fs, io::IoSlice, sync::Barrier, thread};

    fn error(number: u32) -> io::Error {
        io::Error::from_raw_os_error(number.cast_signed())
    }

    /// A handle that is not open for it would refuse the length, or carry out one write after the other.
    #[test]
    fn threads_write_by_one_handle_of_a_private_file() {
        const PART: usize = 1 << 16;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let content: Vec<u8> = (0..8 * PART).map(|at| (at / 5 % 251) as u8).collect();
        assert!(!files::is_synchronous(&create_private(&path).unwrap()));
        assert!(files::is_synchronous(&File::open(&path).unwrap()));
        assert_eq!(create_private(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        let (file, barrier) = (open_private(&path).unwrap(), Barrier::new(8));
        assert!(!files::is_synchronous(&file));
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
        assert!(fs::read(&path).unwrap() == content);
    }

    #[test]
    fn a_private_file_needs_no_right_to_change_who_may_open_it() {
        let asked = RefCell::new(Vec::new());
        let folder = tempfile::tempdir().unwrap();
        let open = |refused: u32, number: u32| {
            asked.borrow_mut().clear();
            with_rights(|access| {
                asked.borrow_mut().push(access);
                if access & refused != 0 { Err(error(number)) } else { files::create_nameless(folder.path()) }
            })
        };
        let both = GENERIC_READ | GENERIC_WRITE;
        open(0, 0).unwrap();
        assert_eq!(*asked.borrow(), [both | WRITE_DAC]);
        open(WRITE_DAC, ERROR_ACCESS_DENIED).unwrap();
        assert_eq!(*asked.borrow(), [both | WRITE_DAC, both]);
        let refused = open(both, ERROR_ACCESS_DENIED).unwrap_err();
        assert_eq!(code(&refused), Some(ERROR_ACCESS_DENIED));
        let shared = open(WRITE_DAC, ERROR_SHARING_VIOLATION).unwrap_err();
        assert_eq!((code(&shared), asked.borrow().len()), (Some(ERROR_SHARING_VIOLATION), 1));
    }

    fn is_locked(folder: &Path) -> bool {
        match FolderLock::new(folder).unwrap().try_lock() {
            Ok(()) => false,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => true,
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn a_folder_is_locked_by_one_at_a_time_and_nothing_stays_in_it() {
        let folder = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            let mut held = FolderLock::new(folder.path()).unwrap();
            held.try_lock().unwrap();
            assert!(is_locked(folder.path()) && is_locked(folder.path()));
            drop(held);
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        }
        let mut none = FolderLock::new(&folder.path().join("none")).unwrap();
        assert_eq!(none.try_lock().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    /// A program that looks at the lock's file keeps its name taken when the lock is given back.
    #[test]
    fn a_lock_whose_file_is_looked_at_is_held_or_free_and_never_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let mut held = FolderLock::new(folder.path()).unwrap();
        held.try_lock().unwrap();
        let looks =
            OpenOptions::new().access_mode(FILE_READ_ATTRIBUTES).open(folder.path().join(LOCK)).unwrap();
        assert!(is_locked(folder.path()));
        drop(held);
        // On Windows it is held; what Wine says depends on its version.
        is_locked(folder.path());
        drop(looks);
        assert!(!is_locked(folder.path()));
    }

    /// The system denies access to it, as to a file that is being removed.
    #[test]
    fn a_lock_that_access_is_denied_to_is_held_where_other_files_can_be_made() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(LOCK)).unwrap();
        assert!(is_locked(folder.path()));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        fs::remove_dir(folder.path().join(LOCK)).unwrap();
        assert!(!is_locked(folder.path()));

        let made = || files::create_nameless(folder.path());
        let refused = || Err(error(ERROR_ACCESS_DENIED));
        assert!(is_held(&error(ERROR_ACCESS_DENIED), made));
        assert!(!is_held(&error(ERROR_ACCESS_DENIED), refused));
        assert!(is_held(&error(ERROR_SHARING_VIOLATION), refused));
        assert!(is_held(&error(ERROR_DELETE_PENDING), refused));
        assert!(!is_held(&error(ERROR_NOT_SUPPORTED), made));
    }

    #[test]
    fn folders_are_synced_and_what_is_none_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        sync(folder.path()).unwrap();
        for access in [FILE_ADD_SUBDIRECTORY, FILE_ADD_FILE] {
            open_for(folder.path(), access).unwrap().sync_all().unwrap();
        }
        assert_eq!(sync(&folder.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_file_that_is_read_can_be_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let long = folder.path().join("n".repeat(120)).join("m".repeat(120));
        fs::create_dir_all(&long).unwrap();
        let [new, old] = ["new", "\u{6a21}\u{578b} \u{1f388}"].map(|name| long.join(name));
        fs::write(&old, "old").unwrap();
        fs::write(&new, "new").unwrap();
        let (reader, _) = files::open_without_waiting(&old).unwrap();
        rename(&new, &old).unwrap();
        assert_eq!(fs::read(&old).unwrap(), b"new");
        let mut bytes = [0; 3];
        files::read_exact_at(&reader, &mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"old");
        drop(reader);
        assert_eq!(fs::read_dir(&long).unwrap().count(), 1);
        assert_eq!(rename(&new, &old).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
