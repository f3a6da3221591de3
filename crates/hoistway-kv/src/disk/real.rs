//! The system's file systems.
#![forbid(unsafe_code)]

use super::{
    DataFile, Disk, DiskFile, Extend, FileAccess, Listing, before_call, before_call_to, expect_directory,
    metadata, open_regular,
};
use crate::fork::NotInChildren;
use hoistway_io::{
    file,
    parallel::lock,
    sys::{
        files::{self, Space},
        folders,
    },
};
use rustix::{
    fs::{self, CWD, FallocateFlags, Mode, RenameFlags},
    io::{Errno, retry_on_intr},
};
use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
};

/// File systems as the system has them.
#[derive(Debug, Default)]
pub(crate) struct RealDisk;

impl Disk for RealDisk {
    fn open(&self, path: &Path, access: FileAccess) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(RealFile::new(Handle::Own(open_regular(path, access)?))))
    }

    fn open_data(&self, path: &Path, access: FileAccess) -> io::Result<(Box<dyn DiskFile>, Arc<DataFile>)> {
        let file = Arc::new(DataFile::open(path, access)?);
        Ok((Box::new(RealFile::new(Handle::Data(Arc::clone(&file)))), file))
    }

    fn create_directory(&self, path: &Path) -> io::Result<()> {
        before_call(path);
        match fs::mkdir(path, Mode::RWXU) {
            Err(Errno::EXIST) => expect_directory(path),
            made => Ok(made?),
        }
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<Listing>> {
        before_call(directory);
        let mut listing = Vec::new();
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            let metadata = match entry.metadata() {
                Ok(metadata) => metadata,
                // It went meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            // Nothing of ours has another name.
            let Ok(name) = entry.file_name().into_string() else { continue };
            let allocated = metadata.blocks().saturating_mul(512);
            listing.push(Listing { name, is_directory: metadata.is_dir(), allocated });
        }
        Ok(listing)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        before_call(to);
        std::fs::rename(from, to)
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        before_call(to);
        match fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
            // Not every file system can; a second name is refused by all that know of second names.
            Err(Errno::INVAL | Errno::NOSYS) => {
                std::fs::hard_link(from, to)?;
                std::fs::remove_file(from)
            }
            renamed => Ok(renamed?),
        }
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        before_call(path);
        std::fs::remove_file(path)
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        before_call(path);
        std::fs::remove_dir(path)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        before_call(path);
        folders::open(path)?.sync_all()
    }

    fn file_system(&self, path: &Path) -> io::Result<u64> {
        Ok(metadata(path)?.dev())
    }

    fn free_space(&self, path: &Path) -> io::Result<Space> {
        before_call(path);
        files::space(path)
    }
}

#[derive(Debug)]
enum Handle {
    Own(File),
    Data(Arc<DataFile>),
}

#[derive(Debug)]
struct RealFile {
    /// Dropped before the descriptor is closed, whose number is another file's then.
    lock: Mutex<Option<NotInChildren>>,
    handle: Handle,
    /// The process that opened it.
    process: u32,
}

impl RealFile {
    fn new(handle: Handle) -> Self {
        Self { handle, lock: Mutex::default(), process: std::process::id() }
    }

    /// What is kept while it is locked.
    fn own_lock(&self) -> MutexGuard<'_, Option<NotInChildren>> {
        lock(&self.lock)
    }

    /// The file, for a call that may wait for its file system.
    fn call(&self) -> &File {
        before_call_to(self.file());
        self.file()
    }

    fn file(&self) -> &File {
        match &self.handle {
            Handle::Own(file) => file,
            Handle::Data(file) => file.buffered(),
        }
    }
}

impl DiskFile for RealFile {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        self.call().read_at(into, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.call().write_at(bytes, offset)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.call().sync_data()
    }

    fn allocate(&self, len: u64, extend: Extend) -> io::Result<()> {
        let flags = match extend {
            Extend::Yes => FallocateFlags::empty(),
            Extend::No => FallocateFlags::KEEP_SIZE,
        };
        match retry_on_intr(|| fs::fallocate(self.call(), flags, 0, len)) {
            // Such a file system gives room when it is written to.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => match extend {
                Extend::Yes => self.call().set_len(len),
                Extend::No => Ok(()),
            },
            allocated => Ok(allocated?),
        }
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.call().metadata()?.len())
    }

    fn is_named(&self, path: &Path) -> io::Result<bool> {
        let named = match metadata(path) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(false);
            }
            named => named?,
        };
        let opened = self.file().metadata()?;
        Ok((opened.dev(), opened.ino()) == (named.dev(), named.ino()))
    }

    fn try_lock(&self) -> io::Result<bool> {
        let mut lock = self.own_lock();
        if lock.is_some() {
            return Ok(true);
        }
        // Before it is locked: a child that is made meanwhile does not keep the lock either.
        let not_in_children = NotInChildren::new(self.file())?;
        match file::try_lock(self.file()) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            locked => {
                locked?;
                *lock = Some(not_in_children);
                Ok(true)
            }
        }
    }

    fn unlock(&self) -> io::Result<()> {
        let mut lock = self.own_lock();
        self.file().unlock()?;
        *lock = None;
        Ok(())
    }
}

impl Drop for RealFile {
    fn drop(&mut self) {
        // Closing it would not do where a child has the descriptor too, which was made without the C library. In a child,
        // it is not ours to give up.
        if self.process == std::process::id() && self.own_lock().is_some() {
            let _ = self.unlock();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{read_full, write_full};

    #[test]
    fn files_are_for_their_owner_alone() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("file");
        RealDisk.open(&path, FileAccess::CreateNew).unwrap();
        RealDisk.create_directory(&root.path().join("folder")).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        assert_eq!(root.path().join("folder").metadata().unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_lock_is_one_openings_alone() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("file");
        let first = RealDisk.open(&path, FileAccess::CreateNew).unwrap();
        let second = RealDisk.open(&path, FileAccess::ReadWrite).unwrap();
        assert!(first.try_lock().unwrap());
        assert!(!second.try_lock().unwrap());
        drop(first);
        assert!(second.try_lock().unwrap());
    }

    #[test]
    fn new_names_replace_nothing() {
        let root = tempfile::tempdir().unwrap();
        let (first, second) = (root.path().join("first"), root.path().join("second"));
        std::fs::write(&first, b"1").unwrap();
        std::fs::write(&second, b"2").unwrap();
        let refused = RealDisk.rename_new(&first, &second).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&second).unwrap(), b"2");
        RealDisk.rename_new(&first, &root.path().join("third")).unwrap();
        assert_eq!(RealDisk.list(root.path()).unwrap().len(), 2);
    }

    #[test]
    fn room_is_taken_before_it_is_written_to() {
        let root = tempfile::tempdir().unwrap();
        let file = RealDisk.open(&root.path().join("file"), FileAccess::CreateNew).unwrap();
        file.allocate(1 << 20, Extend::No).unwrap();
        assert_eq!(file.len().unwrap(), 0);
        file.allocate(8192, Extend::Yes).unwrap();
        assert_eq!(file.len().unwrap(), 8192);
        write_full(&*file, b"bytes", 8190).unwrap();
        let mut read = [0; 8];
        assert_eq!(read_full(&*file, &mut read, 8189).unwrap(), 6);
        assert_eq!(&read[..6], b"\0bytes");
        assert!(RealDisk.list(root.path()).unwrap()[0].allocated >= 8192);
    }
}
