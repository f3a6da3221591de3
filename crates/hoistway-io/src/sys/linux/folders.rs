//! Folders and the names in them.
#![forbid(unsafe_code)]

use rustix::{
    fs::{CWD, Mode, OFlags, RenameFlags, renameat_with},
    io::{Errno, retry_on_intr},
};
use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, OpenOptions},
    io,
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::OpenOptionsExt,
    },
    path::Path,
};

/// Opens a folder.
///
/// # Errors
/// The system's.
pub fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(super::files::open(path, flags, Mode::empty())?.into())
}

/// The lock of a folder, from a successful [`try_lock`](Self::try_lock) until it is dropped.
#[derive(Debug)]
pub struct FolderLock(File);

impl FolderLock {
    /// The lock of this folder, which is not taken yet. The folder stays open.
    ///
    /// # Errors
    /// The system's.
    pub fn new(path: &Path) -> io::Result<Self> {
        open(path).map(Self)
    }

    /// Takes the lock unless another has it.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if another has it; others where the folder cannot be locked.
    pub fn try_lock(&mut self) -> io::Result<()> {
        super::files::try_lock(&self.0)
    }

    /// Returns the process that holds the lock; `None` if the system does not tell, as on file systems of a network.
    pub fn holder(&self) -> Option<String> {
        lock_holder(&self.0)
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        super::files::unlock(&self.0);
    }
}

fn lock_holder(file: &File) -> Option<String> {
    let stat = rustix::fs::fstat(file).ok()?;
    let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let place = format!("{major:02x}:{minor:02x}:{}", stat.st_ino);
    // number: FLOCK ADVISORY WRITE process place start end
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let held = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        (fields.get(1) == Some(&"FLOCK") && fields.get(5) == Some(&&*place))
            .then(|| fields[4].parse::<u32>().ok())?
    };
    let process = locks.lines().find_map(held)?;
    let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    Some(format!("process {process} ({})", name.trim()))
}

/// Makes the names in a folder durable.
///
/// # Errors
/// The system's.
pub fn sync(path: &Path) -> io::Result<()> {
    let folder = open(path)?;
    match retry_on_intr(|| rustix::fs::fsync(&folder)) {
        // Some network file systems have no such thing: names are on the server as soon as they are given.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Makes a new file for reading and writing that no other user may open.
///
/// # Errors
/// The system's; [`AlreadyExists`](io::ErrorKind::AlreadyExists) if the name is taken.
pub fn create_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// Opens a file that [`create_private`] has made, as it was opened then.
///
/// # Errors
/// The system's.
pub fn open_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

/// Renames, in place of a file that has the name.
///
/// # Errors
/// The system's.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)
}

/// Renames without replacing.
///
/// # Errors
/// The system's; [`AlreadyExists`](io::ErrorKind::AlreadyExists) if the name is taken.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        done => return Ok(done?),
    }
    match fs::hard_link(from, to) {
        Ok(()) => {
            // For a moment it has both names; nothing looks for the one that goes.
            let _ = fs::remove_file(from);
            Ok(())
        }
        // Where there are no links either, to look before is the best there is.
        Err(_) if fs::symlink_metadata(to).is_ok() => Err(io::ErrorKind::AlreadyExists.into()),
        Err(_) => fs::rename(from, to),
    }
}

/// As much of a name as `max_bytes` hold. Text stays text.
pub fn shortened(name: &OsStr, max_bytes: usize) -> OsString {
    match name.to_str() {
        Some(text) => text[..text.floor_char_boundary(max_bytes)].into(),
        None => OsString::from_vec(name.as_bytes().iter().take(max_bytes).copied().collect()),
    }
}
