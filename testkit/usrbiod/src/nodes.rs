//! The local files behind the mount, by the inode numbers that the kernel knows them by.

use fuser::{FileAttr, FileType, INodeNo};
use std::{
    collections::HashMap,
    fs::{self, File, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Keeps numbers of files apart from the root's. All files lie on one file system, so its numbers do.
const FIRST_INODE: u64 = 1 << 20;

/// Files by inode number.
pub(crate) struct Nodes {
    root: PathBuf,
    chunk_bytes: u32,
    known: Mutex<HashMap<u64, Node>>,
}

struct Node {
    path: PathBuf,
    lookups: u64,
    /// Opened for the first transfer.
    file: Option<Arc<File>>,
}

impl Nodes {
    pub(crate) fn new(root: PathBuf, chunk_bytes: u32) -> Self {
        Self { root, chunk_bytes, known: Mutex::default() }
    }

    pub(crate) fn path(&self, inode: INodeNo) -> io::Result<PathBuf> {
        if inode == INodeNo::ROOT {
            return Ok(self.root.clone());
        }
        self.known().get(&inode.0).map(|node| node.path.clone()).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The attributes of a path, whose number the kernel will know from now on.
    pub(crate) fn look_up(&self, path: PathBuf) -> io::Result<FileAttr> {
        let attributes = self.attributes(&fs::symlink_metadata(&path)?);
        let mut known = self.known();
        let node =
            known.entry(attributes.ino.0).or_insert(Node { path: path.clone(), lookups: 0, file: None });
        node.path = path;
        node.lookups += 1;
        Ok(attributes)
    }

    pub(crate) fn forget(&self, inode: INodeNo, lookups: u64) {
        let mut known = self.known();
        if let Some(node) = known.get_mut(&inode.0) {
            node.lookups = node.lookups.saturating_sub(lookups);
            if node.lookups == 0 {
                known.remove(&inode.0);
            }
        }
    }

    /// What was at `from` is at `to`.
    pub(crate) fn moved(&self, from: &Path, to: &Path) {
        for node in self.known().values_mut() {
            if let Ok(rest) = node.path.strip_prefix(from) {
                node.path = if rest.as_os_str().is_empty() { to.to_owned() } else { to.join(rest) };
            }
        }
    }

    pub(crate) fn attributes_of(&self, inode: INodeNo) -> io::Result<FileAttr> {
        let attributes = self.attributes(&fs::symlink_metadata(self.path(inode)?)?);
        Ok(FileAttr { ino: inode, ..attributes })
    }

    /// The file for transfers.
    pub(crate) fn file(&self, inode: u64) -> io::Result<Arc<File>> {
        let mut known = self.known();
        let node = known.get_mut(&inode).ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
        match &node.file {
            Some(file) => Ok(file.clone()),
            None => {
                let writable = File::options().read(true).write(true).open(&node.path);
                let file = Arc::new(writable.or_else(|_| File::open(&node.path))?);
                node.file = Some(file.clone());
                Ok(file)
            }
        }
    }

    pub(crate) fn attributes(&self, metadata: &Metadata) -> FileAttr {
        let kind = match metadata.file_type() {
            kind if kind.is_dir() => FileType::Directory,
            kind if kind.is_symlink() => FileType::Symlink,
            _ => FileType::RegularFile,
        };
        let time = |seconds: i64, nanoseconds: i64| {
            UNIX_EPOCH + Duration::new(seconds.max(0) as u64, nanoseconds.max(0) as u32)
        };
        FileAttr {
            ino: INodeNo(metadata.ino().wrapping_add(FIRST_INODE)),
            size: metadata.size(),
            blocks: metadata.blocks(),
            atime: time(metadata.atime(), metadata.atime_nsec()),
            mtime: time(metadata.mtime(), metadata.mtime_nsec()),
            ctime: time(metadata.ctime(), metadata.ctime_nsec()),
            crtime: SystemTime::UNIX_EPOCH,
            kind,
            perm: (metadata.mode() & 0o7777) as u16,
            nlink: metadata.nlink() as u32,
            uid: metadata.uid(),
            gid: metadata.gid(),
            rdev: 0,
            blksize: self.chunk_bytes,
            flags: 0,
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<u64, Node>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
