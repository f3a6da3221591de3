//! A file as a source of bytes: its descriptors, what they can do, and whether it is still the same file.
#![forbid(unsafe_code)]

use super::{
    OpenMount, Unavailable,
    filesystem::{FileSystem, FileSystemKind},
    residency::Probe,
};
use crate::{
    Alignment, ByteRange, Result,
    catalog::{FileIdentity, OpenFile},
    device::DirectFile,
};
use rustix::{
    fs::{AtFlags, Mode, OFlags, StatxFlags},
    io::Errno,
};
use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::MetadataExt,
    },
    path::Path,
    sync::{Arc, OnceLock, PoisonError, RwLock, mpsc},
};

/// One open file of a checkpoint.
#[derive(Debug)]
pub(crate) struct SourceFile {
    open: Arc<OpenFile>,
    /// Dropped after `open` and before `mount`: tells who closes the file that its turn has come.
    held: Option<mpsc::Sender<()>>,
    filesystem: FileSystem,
    direct: Result<File, Unavailable>,
    /// Set when a direct read was refused although opening was not.
    direct_failed: OnceLock<Unavailable>,
    probe: Probe,
    /// The file as cuFile knows it, once it was asked for.
    cufile: OnceLock<Result<DirectFile, Unavailable>>,
    /// The 3FS that it was last read from by USRBIO. A child of `fork` can read it, also if a thread of its parent was
    /// about to.
    mount: RwLock<Option<Arc<OpenMount>>>,
}

/// `STATX_DIOALIGN`, Linux 6.1.
const STATX_DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);

impl SourceFile {
    /// Finds out what can be done with an open file.
    pub(crate) fn new(open: Arc<OpenFile>) -> Result<Self> {
        let filesystem = FileSystem::of(&open.file).map_err(|source| open.io_error("statfs", source))?;
        let direct = open_direct(&open.file, filesystem, OFlags::RDONLY);
        let probe = Probe::find(&open.file);
        Ok(Self {
            open,
            held: None,
            filesystem,
            direct,
            direct_failed: OnceLock::new(),
            probe,
            cufile: OnceLock::new(),
            mount: RwLock::default(),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.open.path
    }

    pub(crate) fn open_file(&self) -> &OpenFile {
        &self.open
    }

    pub(crate) fn filesystem(&self) -> FileSystem {
        self.filesystem
    }

    pub(crate) fn probe(&self) -> &Probe {
        &self.probe
    }

    /// The device that the file lies on.
    pub(crate) fn device(&self) -> u64 {
        self.open.identity.device()
    }

    /// The file's number on its file system.
    pub(crate) fn inode(&self) -> u64 {
        self.open.identity.inode()
    }

    /// The length of reads that the file system likes best.
    pub(crate) fn preferred_bytes(&self) -> u64 {
        self.open.file.metadata().map_or(0, |stat| stat.blksize())
    }

    /// Keeps a mount of 3FS open as long as this file: the next load finds it so.
    pub(crate) fn keep_mount(&self, mount: &Arc<OpenMount>) {
        let mut kept = self.mount.write().unwrap_or_else(PoisonError::into_inner);
        let before = kept.replace(mount.clone());
        drop(kept);
        // To close a mount takes time.
        drop(before);
    }

    /// What an error of the system means on a 3FS that the file was read from: that it has no daemon any more, if so.
    fn explain(&self, error: io::Error) -> io::Error {
        match (self.mount(), error.raw_os_error()) {
            (Some(mount), Some(libc::ENOTCONN | libc::ECONNABORTED)) => mount.death(&error),
            _ => error,
        }
    }

    /// Length in bytes when the header was read.
    pub(crate) fn len(&self) -> u64 {
        self.open.identity.len()
    }

    /// Bytes that the page cache holds, if that can be known.
    pub(crate) fn cached_bytes(&self) -> Option<u64> {
        self.probe.cached_bytes(&self.open.file, self.len())
    }

    pub(crate) fn buffered_file(&self) -> &File {
        &self.open.file
    }

    /// The descriptor for direct reads.
    pub(crate) fn direct_file(&self) -> io::Result<&File> {
        self.direct.as_ref().map_err(|why| io::Error::new(io::ErrorKind::Unsupported, why.to_string()))
    }

    /// The file as cuFile knows it, or why it does not take it.
    pub(crate) fn cufile(&self) -> Result<&DirectFile, Unavailable> {
        let register = || DirectFile::register(self.direct.as_ref().map_err(Clone::clone)?.as_fd());
        self.cufile.get_or_init(register).as_ref().map_err(Clone::clone)
    }

    /// Why direct reads cannot be used, or nothing if they can.
    pub(crate) fn direct_refusal(&self) -> Option<&Unavailable> {
        self.direct_failed.get().or(self.direct.as_ref().err())
    }

    /// Why rings cannot be used, or nothing if they can.
    pub(crate) fn ring_refusal(&self) -> Option<Unavailable> {
        self.filesystem.ring_refusal()
    }

    /// A direct read was refused: from now on this file is read through the page cache.
    pub(crate) fn refuse_direct(&self, why: Unavailable) {
        let _ = self.direct_failed.set(why);
    }

    /// Fails if the file is no longer what it was when its header was read. `needed` are the bytes at stake,
    /// `tensor_at` gives the tensor that holds one of them.
    pub(crate) fn check_unchanged(
        &self,
        needed: ByteRange,
        tensor_at: impl FnOnce(u64) -> Option<String>,
    ) -> Result<()> {
        let now = match self.mount() {
            Some(mount) => {
                let open = self.open.clone();
                let asked = mount.ask("asking about a file", move || FileIdentity::of(&open.file));
                asked.and_then(|identity| identity)
            }
            None => FileIdentity::of(&self.open.file),
        };
        self.open.check_identity(now.map_err(|error| self.explain(error)), needed, tensor_at)
    }

    fn mount(&self) -> Option<Arc<OpenMount>> {
        self.mount.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for SourceFile {
    fn drop(&mut self) {
        if let Some(mount) = self.mount() {
            // A daemon that hangs would be waited for. So the other thread closes: once this file's own hold is gone.
            let direct = std::mem::replace(&mut self.direct, Err(Unavailable::new("it is closed", "")));
            let (held, gone) = mpsc::channel();
            self.held = Some(held);
            let open = self.open.clone();
            mount.later(move || {
                let _ = gone.recv();
                drop((direct, open));
            });
        }
    }
}

/// A second descriptor of an open file for direct reads or writes, which `mode` says, or why there is none.
pub(crate) fn open_direct(file: &File, filesystem: FileSystem, mode: OFlags) -> Result<File, Unavailable> {
    if filesystem.kind == FileSystemKind::Memory {
        let reason = format!("the file lives in memory ({filesystem}), there is nothing to bypass");
        return Err(Unavailable::new(reason, ""));
    }
    // Through the first descriptor rather than the path: the same file for certain.
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = mode | OFlags::CLOEXEC | OFlags::DIRECT;
    let direct = File::from(rustix::fs::open(link, flags, Mode::empty()).map_err(|error| match error {
        Errno::INVAL | Errno::OPNOTSUPP => {
            Unavailable::new(format!("{filesystem} does not support O_DIRECT for this file"), "")
        }
        Errno::MFILE | Errno::NFILE => {
            Unavailable::new("no file descriptor is left for it", "raise ulimit -n")
        }
        Errno::NOENT => {
            Unavailable::new("/proc is not mounted, so the file cannot be opened again", "mount /proc")
        }
        error => Unavailable::new(format!("opening with O_DIRECT failed: {error}"), ""),
    })?);
    check_alignment(&direct, filesystem)?;
    Ok(direct)
}

/// What direct transfers need to be multiples of, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DirectAlignment {
    /// Of addresses of memory.
    pub(super) memory: u64,
    /// Of offsets in the file, and of lengths. 0: it takes none.
    pub(super) offset: u64,
}

/// Where the file system does not say. Only a read tells; see `refuse_direct`.
impl Default for DirectAlignment {
    fn default() -> Self {
        Self { memory: Alignment::BLOCK.bytes(), offset: Alignment::BLOCK.bytes() }
    }
}

/// What the file system says of direct transfers, if anything.
pub(super) fn direct_alignment(direct: &File) -> Option<DirectAlignment> {
    let stat = rustix::fs::statx(direct, c"", AtFlags::EMPTY_PATH, STATX_DIOALIGN).ok()?;
    StatxFlags::from_bits_retain(stat.stx_mask).contains(STATX_DIOALIGN).then(|| DirectAlignment {
        memory: u64::from(stat.stx_dio_mem_align),
        offset: u64::from(stat.stx_dio_offset_align),
    })
}

/// Direct transfers of whole blocks between the file and block-aligned memory must be allowed.
fn check_alignment(direct: &File, filesystem: FileSystem) -> Result<(), Unavailable> {
    let DirectAlignment { memory, offset } = direct_alignment(direct).unwrap_or_default();
    let block = Alignment::BLOCK.bytes();
    if offset == 0 {
        let reason =
            format!("{filesystem} supports no direct I/O on this file (encrypted, journaled or inline data)");
        return Err(Unavailable::new(reason, ""));
    }
    if memory > block || offset > block {
        let needed = memory.max(offset);
        let reason = format!("{filesystem} needs direct I/O aligned to {needed} bytes, more than {block}");
        return Err(Unavailable::new(reason, ""));
    }
    Ok(())
}
