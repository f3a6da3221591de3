//! A disk as layouts use it: the few operations that matter for the order in which things survive a crash, and the
//! files that the bytes of blocks are in.
#![forbid(unsafe_code)]

mod file;
mod lazy_file;
mod opening;
mod real;
#[cfg(test)]
pub(crate) mod simulated;
#[cfg(feature = "fault-injection")]
mod stuck;

pub(crate) use file::{DataFile, FileAccess};
pub(crate) use lazy_file::LazyFile;
pub(crate) use opening::{expect_directory, is_unexpected_kind, open_regular};
pub(crate) use real::RealDisk;
#[cfg(feature = "fault-injection")]
pub use stuck::HangingCalls;

use hoistway_io::sys::files::Space;
use std::{
    fmt,
    fs::{File, Metadata},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// A file in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listing {
    /// The last part of its path.
    pub(crate) name: String,
    pub(crate) is_directory: bool,
    /// Bytes that it takes on the disk.
    pub(crate) allocated: u64,
}

/// A file system.
pub(crate) trait Disk: fmt::Debug + Send + Sync {
    /// Opens a regular file, and follows no link; new ones are for their owner alone.
    fn open(&self, path: &Path, access: FileAccess) -> io::Result<Box<dyn DiskFile>>;

    /// Opens a file with the bytes of blocks, and the same for transfers.
    fn open_data(&self, path: &Path, access: FileAccess) -> io::Result<(Box<dyn DiskFile>, Arc<DataFile>)>;

    /// Makes a directory for its owner alone, where there is none. A link to one is an error.
    fn create_directory(&self, path: &Path) -> io::Result<()>;

    /// Lists a directory, in no order.
    fn list(&self, directory: &Path) -> io::Result<Vec<Listing>>;

    /// Gives a file another name, and takes that from whatever had it.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Gives a file another name if nothing has it: else [`io::ErrorKind::AlreadyExists`].
    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty directory.
    fn remove_directory(&self, path: &Path) -> io::Result<()>;

    /// Names in a directory are on the disk as they are.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;

    /// The number of the file system that a path is on.
    fn file_system(&self, path: &Path) -> io::Result<u64>;

    /// The free bytes on the file system of a path.
    fn free_space(&self, path: &Path) -> io::Result<Space>;

    /// Reads at most `most` bytes of a small file.
    fn read_file(&self, path: &Path, most: usize) -> io::Result<Vec<u8>> {
        let file = self.open(path, FileAccess::Read)?;
        let len = usize::try_from(file.len()?).unwrap_or(usize::MAX).min(most);
        let mut bytes = vec![0; len];
        let read = read_full(&*file, &mut bytes, 0)?;
        bytes.truncate(read);
        Ok(bytes)
    }
}

/// An open file of a [`Disk`].
pub(crate) trait DiskFile: fmt::Debug + Send + Sync {
    /// Reads some bytes, 0 only at the end.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes some bytes, at least one.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize>;

    /// What was written is on the disk, and the length with it. If that fails, what was written since the last time may
    /// be lost even if a later call does not fail.
    fn sync_data(&self) -> io::Result<()>;

    /// Makes sure that there is room up to `len`. [`Extend::Yes`] makes the file that long.
    fn allocate(&self, len: u64, extend: Extend) -> io::Result<()>;

    fn len(&self) -> io::Result<u64>;

    /// Whether a path names this very file, not another one or none.
    fn is_named(&self, path: &Path) -> io::Result<bool>;

    /// Locks the file against other openings of it, in this process or others, until this one is dropped. Whether that
    /// was possible at once. A child of `fork` does not keep the lock.
    fn try_lock(&self) -> io::Result<bool>;

    /// Undoes [`DiskFile::try_lock`].
    fn unlock(&self) -> io::Result<()>;
}

/// Whether room is part of the file already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extend {
    Yes,
    No,
}

/// Precedes a call that names a file: tests let such calls hang.
pub(crate) fn before_call(path: &Path) {
    #[cfg(feature = "fault-injection")]
    stuck::pass(path);
    let _ = path;
}

/// Precedes a call that goes to an open file.
fn before_call_to(file: &File) {
    #[cfg(feature = "fault-injection")]
    stuck::pass_file(file);
    let _ = file;
}

/// What the system says of a name itself, rather than of what it links to.
pub(crate) fn metadata(path: &Path) -> io::Result<Metadata> {
    before_call(path);
    path.symlink_metadata()
}

/// Reads until the end of the file or of `into`.
pub(crate) fn read_full(file: &dyn DiskFile, into: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < into.len() {
        match file.read_at(&mut into[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Writes everything.
pub(crate) fn write_full(file: &dyn DiskFile, bytes: &[u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match file.write_at(&bytes[done..], offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => done += written,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes a file that is there whole or not at all: it has a temporary name, and gets its own by `rename`. On the disk when
/// this returns.
pub(crate) fn write_whole(
    disk: &dyn Disk,
    temporary: &Path,
    path: &Path,
    bytes: &[u8],
    rename: impl FnOnce(&Path, &Path) -> io::Result<()>,
) -> io::Result<()> {
    let written = create_over(disk, temporary).and_then(|file| {
        write_full(&*file, bytes, 0)?;
        file.sync_data()?;
        rename(temporary, path)?;
        disk.sync_directory(path.parent().unwrap_or(Path::new(".")))
    });
    if written.is_err() {
        // What is left is removed by the next opening.
        let _ = disk.remove(temporary);
    }
    written
}

/// The name that a file has before it is whole.
pub(crate) fn temporary_name(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(TEMPORARY);
    path.with_file_name(name)
}

/// The end of the names of unfinished files.
pub(crate) const TEMPORARY: &str = ".tmp";

/// A new file in place of whatever a crash may have left under this name.
pub(crate) fn create_over(disk: &dyn Disk, path: &Path) -> io::Result<Box<dyn DiskFile>> {
    match disk.open(path, FileAccess::CreateNew) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            disk.remove(path)?;
            disk.open(path, FileAccess::CreateNew)
        }
        opened => opened,
    }
}
