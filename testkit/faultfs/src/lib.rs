//! A FUSE file system of files in memory that fails on command: what a broken disk or server looks like to a
//! program that reads through a real kernel.
#![forbid(unsafe_code)]

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyStatfs, Request,
};
use std::{
    ffi::OsStr,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Attributes are asked for anew each time, so that a change shows at once.
const NO_CACHING: Duration = Duration::ZERO;
const FIRST_FILE: u64 = 2;

/// How a file misbehaves. The default is not at all.
#[derive(Clone, Copy, Debug, Default)]
pub struct Behaviour {
    /// Reads that touch bytes from here on fail with EIO.
    pub broken_from: Option<u64>,
    /// Reads return at most this many bytes. Seen by programs only if `bypass_cache` is set: through the page
    /// cache the kernel itself fills the rest with zeros.
    pub short_reads: Option<usize>,
    /// After this many reads the file is this many bytes long.
    pub cut_after: Option<(u64, u64)>,
    /// Each read takes this long.
    pub delay: Duration,
    /// Opening with O_DIRECT fails with EINVAL.
    pub refuse_direct: bool,
    /// All reads go past the page cache, whatever the program asked for.
    pub bypass_cache: bool,
}

struct FaultyFile {
    name: String,
    bytes: Vec<u8>,
    behaviour: Mutex<Behaviour>,
    reads: AtomicU64,
}

impl FaultyFile {
    fn behaviour(&self) -> MutexGuard<'_, Behaviour> {
        self.behaviour.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn len_now(&self) -> u64 {
        match self.behaviour().cut_after {
            Some((reads, len)) if self.reads.load(Ordering::Relaxed) >= reads => len,
            _ => self.bytes.len() as u64,
        }
    }

    fn attributes(&self, inode: u64) -> FileAttr {
        let size = self.len_now();
        FileAttr { size, blocks: size.div_ceil(512), ..attributes(inode, FileType::RegularFile, 0o644) }
    }

    fn read(&self, offset: u64, size: usize) -> Result<&[u8], Errno> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let behaviour = *self.behaviour();
        std::thread::sleep(behaviour.delay);
        let len = self.len_now();
        let start = offset.min(len);
        let end = offset.saturating_add(size as u64).min(len);
        if behaviour.broken_from.is_some_and(|broken| end > broken) {
            return Err(Errno::EIO);
        }
        let bytes = self.bytes.get(start as usize..end as usize).unwrap_or_default();
        Ok(&bytes[..bytes.len().min(behaviour.short_reads.unwrap_or(usize::MAX))])
    }
}

/// Calls that signals interrupt: of each kind the first one, the third, and so on.
#[derive(Default)]
struct Interruptions {
    are_on: AtomicBool,
    opens: AtomicU64,
    folder_opens: AtomicU64,
    folder_syncs: AtomicU64,
    questions: AtomicU64,
}

impl Interruptions {
    fn hit(&self, calls: &AtomicU64) -> bool {
        self.are_on.load(Ordering::Relaxed) && calls.fetch_add(1, Ordering::Relaxed).is_multiple_of(2)
    }
}

/// A mounted file system. Unmounted when dropped.
pub struct FaultFs {
    mount_point: PathBuf,
    files: Arc<Vec<FaultyFile>>,
    interruptions: Arc<Interruptions>,
    session: Option<BackgroundSession>,
}

impl FaultFs {
    /// Mounts `files`, names and contents, at `mount_point`.
    ///
    /// # Errors
    /// Those of mounting: no `/dev/fuse`, or no right to mount.
    pub fn mount(mount_point: &Path, files: Vec<(String, Vec<u8>)>) -> io::Result<Self> {
        let files: Arc<Vec<FaultyFile>> = Arc::new(
            files
                .into_iter()
                .map(|(name, bytes)| FaultyFile { name, bytes, behaviour: Mutex::default(), reads: 0.into() })
                .collect(),
        );
        let mut config = Config::default();
        config.mount_options = vec![MountOption::RO, MountOption::FSName("faultfs".into())];
        config.n_threads = Some(2);
        let interruptions = Arc::<Interruptions>::default();
        let server = Server { files: files.clone(), interruptions: interruptions.clone() };
        let session = fuser::spawn_mount(server, mount_point, &config)?;
        Ok(Self { mount_point: mount_point.to_owned(), files, interruptions, session: Some(session) })
    }

    /// Where a file is.
    pub fn path(&self, name: &str) -> PathBuf {
        self.mount_point.join(name)
    }

    /// From now on a file behaves like this. Its reads are counted anew.
    pub fn behave(&self, name: &str, behaviour: Behaviour) {
        for file in self.files.iter().filter(|file| file.name == name) {
            *file.behaviour() = behaviour;
            file.reads.store(0, Ordering::Relaxed);
        }
    }

    /// From now on every other call that opens a file or a folder, makes the names in a folder durable, or asks for the file
    /// system fails with EINTR, as servers answer where a signal comes: the first of each kind does.
    pub fn interrupt(&self) {
        self.interruptions.are_on.store(true, Ordering::Relaxed);
    }
}

impl Drop for FaultFs {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            // A file that is still open keeps the mount busy; the process's end unmounts it then.
            let _ = session.umount_and_join();
        }
    }
}

struct Server {
    files: Arc<Vec<FaultyFile>>,
    interruptions: Arc<Interruptions>,
}

impl Server {
    fn file(&self, inode: INodeNo) -> Option<&FaultyFile> {
        self.files.get(usize::try_from(inode.0.checked_sub(FIRST_FILE)?).ok()?)
    }
}

impl Filesystem for Server {
    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match (FIRST_FILE..).zip(self.files.iter()).find(|(_, file)| OsStr::new(&file.name) == name) {
            Some((inode, file)) => reply.entry(&NO_CACHING, &file.attributes(inode), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _request: &Request, inode: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        match self.file(inode) {
            Some(file) => reply.attr(&NO_CACHING, &file.attributes(inode.0)),
            None => reply.attr(&NO_CACHING, &attributes(inode.0, FileType::Directory, 0o755)),
        }
    }

    fn open(&self, _request: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let Some(file) = self.file(inode) else { return reply.error(Errno::ENOENT) };
        if self.interruptions.hit(&self.interruptions.opens) {
            return reply.error(Errno::EINTR);
        }
        let behaviour = *file.behaviour();
        if behaviour.refuse_direct && flags.0 & libc::O_DIRECT != 0 {
            return reply.error(Errno::EINVAL);
        }
        let mode = if behaviour.bypass_cache { FopenFlags::FOPEN_DIRECT_IO } else { FopenFlags::empty() };
        reply.opened(FileHandle(0), mode);
    }

    fn read(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(file) = self.file(inode) else { return reply.error(Errno::ENOENT) };
        match file.read(offset, size as usize) {
            Ok(bytes) => reply.data(bytes),
            Err(error) => reply.error(error),
        }
    }

    fn opendir(&self, _request: &Request, _inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        if self.interruptions.hit(&self.interruptions.folder_opens) {
            return reply.error(Errno::EINTR);
        }
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        _only_data: bool,
        reply: ReplyEmpty,
    ) {
        if self.interruptions.hit(&self.interruptions.folder_syncs) {
            return reply.error(Errno::EINTR);
        }
        reply.ok();
    }

    fn statfs(&self, _request: &Request, _inode: INodeNo, reply: ReplyStatfs) {
        if self.interruptions.hit(&self.interruptions.questions) {
            return reply.error(Errno::EINTR);
        }
        reply.statfs(0, 0, 0, 0, 0, 512, 255, 0);
    }

    fn readdir(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let names = [".", ".."].into_iter().chain(self.files.iter().map(|file| file.name.as_str()));
        for (position, name) in (0u64..).zip(names).skip(offset as usize) {
            let (inode, kind) = match position {
                0 | 1 => (1, FileType::Directory),
                file => (file - 2 + FIRST_FILE, FileType::RegularFile),
            };
            if reply.add(INodeNo(inode), position + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}

fn attributes(inode: u64, kind: FileType, perm: u16) -> FileAttr {
    let time: SystemTime = UNIX_EPOCH;
    FileAttr {
        ino: INodeNo(inode),
        size: 0,
        blocks: 0,
        atime: time,
        mtime: time,
        ctime: time,
        crtime: time,
        kind,
        perm,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}
