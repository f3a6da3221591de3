//! The mount as programs see it: the local directory, and `3fs-virt` in its root.

use crate::engine::Engine;
use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    IoctlFlags, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use hoistway_usrbio::proto;
use std::{
    collections::HashMap,
    ffi::{OsStr, OsString},
    fs::{self, File},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

const VIRTUAL: INodeNo = INodeNo(u64::MAX - 1);
const IOVS: INodeNo = INodeNo(0xffff_ffff_8000_0000);
/// Numbers below that of the directory: of the links to semaphores, then of registrations.
const LINKS: u64 = IOVS.0 - 16;
const REGISTRATIONS: u64 = IOVS.0 - 65535;
/// Attributes are asked for anew each time, so that a change shows at once.
const NO_CACHING: Duration = Duration::ZERO;
const GENERATION: Generation = Generation(0);

pub(crate) struct Mounted {
    engine: Arc<Engine>,
    files: Mutex<HashMap<u64, Arc<File>>>,
    next_handle: AtomicU64,
}

/// One of the inodes that are no local file.
enum Special {
    Virtual,
    Iovs,
    /// A link, and where it points.
    Link(PathBuf, u32),
}

impl Mounted {
    pub(crate) fn new(engine: Arc<Engine>) -> Self {
        Self { engine, files: Mutex::default(), next_handle: AtomicU64::new(1) }
    }

    fn special(&self, inode: INodeNo) -> Option<Special> {
        match inode {
            VIRTUAL => Some(Special::Virtual),
            IOVS => Some(Special::Iovs),
            INodeNo(number) if (LINKS..IOVS.0).contains(&number) => {
                let (_, target) = self.engine.submit_links().into_iter().nth((number - LINKS) as usize)?;
                Some(Special::Link(target, 0))
            }
            INodeNo(number) if (REGISTRATIONS - (1 << 30)..=REGISTRATIONS).contains(&number) => {
                let registration = self.engine.registry.get(REGISTRATIONS - number)?;
                Some(Special::Link(registration.target.clone(), registration.uid))
            }
            _ => None,
        }
    }

    /// The attributes of a name in `3fs-virt/iovs`.
    fn iovs_entry(&self, name: &OsStr, uid: u32) -> Result<FileAttr, Errno> {
        let name = name.to_str().ok_or(Errno::ENOENT)?;
        let links = self.engine.submit_links();
        if let Some(position) = links.iter().position(|(link, _)| *link == name) {
            return Ok(attributes(INodeNo(LINKS + position as u64), FileType::Symlink, 0o666, 0));
        }
        match self.engine.registry.find(name) {
            Some((number, one)) if one.uid == uid => Ok(registration_attributes(number, one.uid)),
            Some(_) => Err(Errno::EPERM),
            None => Err(Errno::ENOENT),
        }
    }

    fn child(&self, parent: INodeNo, name: &OsStr) -> io::Result<PathBuf> {
        Ok(self.engine.nodes.path(parent)?.join(name))
    }

    fn keep(&self, file: File) -> FileHandle {
        let handle = self.next_handle.fetch_add(1, Ordering::Relaxed);
        self.files().insert(handle, Arc::new(file));
        FileHandle(handle)
    }

    fn kept(&self, handle: FileHandle) -> Result<Arc<File>, Errno> {
        self.files().get(&handle.0).cloned().ok_or(Errno::EBADF)
    }

    fn files(&self) -> MutexGuard<'_, HashMap<u64, Arc<File>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entries(&self, inode: INodeNo, uid: u32) -> io::Result<Vec<(INodeNo, FileType, OsString)>> {
        let mut entries =
            vec![(inode, FileType::Directory, ".".into()), (INodeNo::ROOT, FileType::Directory, "..".into())];
        match self.special(inode) {
            Some(Special::Virtual) => entries.push((IOVS, FileType::Directory, "iovs".into())),
            Some(Special::Iovs) => {
                let links = self.engine.submit_links();
                entries.extend(
                    (LINKS..)
                        .zip(links)
                        .map(|(inode, (name, _))| (INodeNo(inode), FileType::Symlink, name.into())),
                );
                let of_user = self.engine.registry.all().into_iter().filter(|(_, one)| one.uid == uid);
                entries.extend(of_user.map(|(number, one)| {
                    (INodeNo(REGISTRATIONS - number), FileType::Symlink, one.name.clone().into())
                }));
            }
            Some(Special::Link(..)) => return Err(io::ErrorKind::NotADirectory.into()),
            None => {
                for entry in fs::read_dir(self.engine.nodes.path(inode)?)? {
                    let entry = entry?;
                    let attributes = self.engine.nodes.attributes(&entry.metadata()?);
                    entries.push((attributes.ino, attributes.kind, entry.file_name()));
                }
                if inode == INodeNo::ROOT {
                    entries.push((VIRTUAL, FileType::Directory, "3fs-virt".into()));
                }
            }
        }
        Ok(entries)
    }
}

impl Filesystem for Mounted {
    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = match (parent, name.as_bytes()) {
            (INodeNo::ROOT, b"3fs-virt") => Ok(attributes(VIRTUAL, FileType::Directory, 0o555, 0)),
            (VIRTUAL, b"iovs") => Ok(attributes(IOVS, FileType::Directory, 0o777, 0)),
            (VIRTUAL, _) => Err(Errno::ENOENT),
            (IOVS, _) => self.iovs_entry(name, request.uid()),
            _ => {
                self.child(parent, name).and_then(|path| self.engine.nodes.look_up(path)).map_err(Errno::from)
            }
        };
        answer(reply, found);
    }

    fn forget(&self, _request: &Request, inode: INodeNo, lookups: u64) {
        self.engine.nodes.forget(inode, lookups);
    }

    fn getattr(&self, _request: &Request, inode: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        let attributes = match self.special(inode) {
            Some(Special::Virtual) => attributes(inode, FileType::Directory, 0o555, 0),
            Some(Special::Iovs) => attributes(inode, FileType::Directory, 0o777, 0),
            Some(Special::Link(_, uid)) => attributes(inode, FileType::Symlink, 0o400, uid),
            None => {
                let answer = move |engine: &Engine| match engine.nodes.attributes_of(inode) {
                    Ok(attributes) => reply.attr(&NO_CACHING, &attributes),
                    Err(error) => reply.error(error.into()),
                };
                return match inode {
                    // On the way to everything.
                    INodeNo::ROOT => answer(&self.engine),
                    _ => self.engine.when_not_mute(answer),
                };
            }
        };
        reply.attr(&NO_CACHING, &attributes);
    }

    fn setattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _accessed: Option<TimeOrNow>,
        _modified: Option<TimeOrNow>,
        _changed: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _created: Option<SystemTime>,
        _checked: Option<SystemTime>,
        _backed_up: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = || {
            let path = self.engine.nodes.path(inode)?;
            if let Some(size) = size {
                File::options().write(true).open(&path)?.set_len(size)?;
            }
            if let Some(mode) = mode {
                fs::set_permissions(&path, fs::Permissions::from_mode(mode & 0o7777))?;
            }
            self.engine.nodes.attributes_of(inode)
        };
        match set() {
            Ok(attributes) => reply.attr(&NO_CACHING, &attributes),
            Err(error) => reply.error(error.into()),
        }
    }

    fn readlink(&self, _request: &Request, inode: INodeNo, reply: ReplyData) {
        let target = match self.special(inode) {
            Some(Special::Link(target, _)) => Ok(target),
            Some(_) => Err(Errno::EINVAL),
            None => self.engine.nodes.path(inode).and_then(fs::read_link).map_err(Errno::from),
        };
        match target {
            Ok(target) => reply.data(target.as_os_str().as_bytes()),
            Err(error) => reply.error(error),
        }
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        if parent == IOVS {
            let name = name.to_str().unwrap_or_default();
            let added = self.engine.registry.add(name, target, request.uid(), request.pid());
            return answer(reply, added.map(|(number, one)| registration_attributes(number, one.uid)));
        }
        let make = || {
            let path = self.child(parent, name)?;
            std::os::unix::fs::symlink(target, &path)?;
            self.engine.nodes.look_up(path)
        };
        answer(reply, make().map_err(Errno::from));
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        done(
            reply,
            match (parent, name.to_str()) {
                (IOVS, Some(name)) => self.engine.registry.remove(name, request.uid()),
                _ => self.child(parent, name).and_then(fs::remove_file).map_err(Errno::from),
            },
        );
    }

    fn mkdir(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        let make = || {
            let path = self.child(parent, name)?;
            fs::create_dir(&path)?;
            self.engine.nodes.look_up(path)
        };
        answer(reply, make().map_err(Errno::from));
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        done(reply, self.child(parent, name).and_then(fs::remove_dir).map_err(Errno::from));
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        _flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let rename = || {
            let (from, to) = (self.child(parent, name)?, self.child(new_parent, new_name)?);
            fs::rename(&from, &to)?;
            self.engine.nodes.moved(&from, &to);
            Ok::<_, io::Error>(())
        };
        done(reply, rename().map_err(Errno::from));
    }

    fn create(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let create = || {
            let path = self.child(parent, name)?;
            let flags = flags & (libc::O_EXCL | libc::O_TRUNC);
            let mut options = File::options();
            let file =
                options.read(true).write(true).create(true).mode(mode).custom_flags(flags).open(&path)?;
            Ok::<_, io::Error>((file, self.engine.nodes.look_up(path)?))
        };
        match create() {
            Ok((file, attributes)) => {
                reply.created(&NO_CACHING, &attributes, GENERATION, self.keep(file), FopenFlags::empty());
            }
            Err(error) => reply.error(error.into()),
        }
    }

    fn open(&self, _request: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let writes = flags.0 & libc::O_ACCMODE != libc::O_RDONLY;
        let truncates = flags.0 & libc::O_TRUNC != 0;
        let open = || {
            let path = self.engine.nodes.path(inode)?;
            File::options().read(true).write(writes).truncate(writes && truncates).open(path)
        };
        match open() {
            Ok(file) => reply.opened(self.keep(file), FopenFlags::empty()),
            Err(error) => reply.error(error.into()),
        }
    }

    fn read(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let read = || {
            let file = self.kept(handle)?;
            let (mut bytes, mut got) = (vec![0; size as usize], 0);
            while got < bytes.len() {
                match file.read_at(&mut bytes[got..], offset + got as u64).map_err(Errno::from)? {
                    0 => break,
                    count => got += count,
                }
            }
            bytes.truncate(got);
            Ok(bytes)
        };
        match read() {
            Ok(bytes) => reply.data(&bytes),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.kept(handle).and_then(|file| file.write_all_at(data, offset).map_err(Errno::from)) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    fn flush(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        self.engine.when_not_mute(|_| reply.ok());
    }

    fn fsync(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        _data: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn release(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.files().remove(&handle.0);
        reply.ok();
    }

    fn opendir(&self, request: &Request, inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let handle = self.next_handle.fetch_add(1, Ordering::Relaxed);
        if inode == IOVS {
            self.engine.registry.opened(handle, request.pid());
        }
        reply.opened(FileHandle(handle), FopenFlags::empty());
    }

    fn releasedir(
        &self,
        _request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        if inode == IOVS {
            self.engine.registry.closed(handle.0);
        }
        reply.ok();
    }

    fn readdir(
        &self,
        request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let entries = match self.entries(inode, request.uid()) {
            Ok(entries) => entries,
            Err(error) => return reply.error(error.into()),
        };
        for (position, (inode, kind, name)) in (1u64..).zip(entries).skip(offset as usize) {
            if reply.add(inode, position, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn ioctl(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        _flags: IoctlFlags,
        command: u32,
        _in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        match command {
            proto::GET_MAGIC => reply.ioctl(0, &proto::MAGIC.to_ne_bytes()),
            proto::GET_VERSION => {
                let version = proto::VERSION + self.engine.faults().version_ahead;
                reply.ioctl(0, &version.to_ne_bytes());
            }
            _ => reply.error(Errno::EINVAL),
        }
    }

    fn statfs(&self, _request: &Request, _inode: INodeNo, reply: ReplyStatfs) {
        match self.engine.nodes.path(INodeNo::ROOT).and_then(|root| Ok(rustix::fs::statvfs(root)?)) {
            Ok(room) => reply.statfs(
                room.f_blocks,
                room.f_bfree,
                room.f_bavail,
                room.f_files,
                room.f_ffree,
                room.f_bsize as u32,
                255,
                room.f_frsize as u32,
            ),
            Err(error) => reply.error(error.into()),
        }
    }
}

fn answer(reply: ReplyEntry, found: Result<FileAttr, Errno>) {
    match found {
        Ok(attributes) => reply.entry(&NO_CACHING, &attributes, GENERATION),
        Err(error) => reply.error(error),
    }
}

fn done(reply: ReplyEmpty, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

fn registration_attributes(number: u64, uid: u32) -> FileAttr {
    attributes(INodeNo(REGISTRATIONS - number), FileType::Symlink, 0o400, uid)
}

fn attributes(inode: INodeNo, kind: FileType, perm: u16, uid: u32) -> FileAttr {
    FileAttr {
        ino: inode,
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm,
        nlink: 1,
        uid,
        gid: uid,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}
