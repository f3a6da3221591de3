//! Files: opening, identity, and transfers at a position.
#![allow(unsafe_code)]

pub use crate::sys::common::Space;
use crate::{
    ByteRange,
    file::{DirectAlignment, FileIdentity, FileSystem, FileSystemKind, FileUse},
};
use hoistway_device::Unavailable;
use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, FallocateFlags, FlockOperation, Mode, OFlags, SeekFrom, StatxFlags},
    io::{Errno, ReadWriteFlags, retry_on_intr},
};
use std::{
    fs::{self, File, FileType},
    io::{self, IoSlice, IoSliceMut},
    os::{
        fd::{AsRawFd, IntoRawFd},
        unix::fs::{FileExt, FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

/// `STATX_DIOALIGN`, Linux 6.1.
const STATX_DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);

/// Slices that the kernel takes in one call.
pub const MAX_SLICES: usize = 1024;

/// Opens a file for reading that may have become a FIFO since it was looked at: that would wait for a writer. The second value
/// says whether writers may hide what they do from the file's times: they cannot.
///
/// # Errors
/// The system's.
pub fn open_without_waiting(path: &Path) -> io::Result<(File, bool)> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = match open(path, flags | OFlags::NONBLOCK, Mode::empty()) {
        // A program has a lease of it, which only regular files have, and is given time to let it go.
        Err(Errno::WOULDBLOCK) => return Ok((open(path, flags, Mode::empty())?.into(), false)),
        opened => opened?,
    };
    // Reads wait as usual, also those of rings.
    rustix::fs::fcntl_setfl(&file, OFlags::empty())?;
    Ok((file.into(), false))
}

/// Opens a path. A server, or a program that is to give a lease back, may take long: a signal that comes meanwhile changes nothing.
pub(super) fn open(path: &Path, flags: OFlags, mode: Mode) -> rustix::io::Result<OwnedFd> {
    retry_on_intr(|| rustix::fs::open(path, flags, mode))
}

/// Opens an open file a second time for reading: certainly the same file, with separate flags.
///
/// # Errors
/// The system's.
pub fn reopen(file: &File) -> io::Result<File> {
    File::open(link(file))
}

/// Whether transfers of this descriptor go past the page cache.
pub fn is_direct(file: &File) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(OFlags::DIRECT))
}

/// Opens an open file a second time, past the page cache.
///
/// # Errors
/// Why that cannot be.
pub fn open_direct(
    file: &File,
    filesystem: FileSystem,
    file_use: FileUse,
) -> io::Result<Result<File, Unavailable>> {
    let mode = match file_use {
        FileUse::Read => OFlags::RDONLY,
        FileUse::ReadWrite => OFlags::RDWR,
    };
    let flags = mode | OFlags::CLOEXEC | OFlags::DIRECT;
    let refused = match open(&link(file), flags, Mode::empty()) {
        Ok(direct) => return Ok(Ok(direct.into())),
        Err(error @ (Errno::MFILE | Errno::NFILE)) => return Err(error.into()),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => {
            Unavailable::new(format!("{filesystem} does not support O_DIRECT for this file"), "")
        }
        Err(Errno::NOENT) => {
            Unavailable::new("/proc is not mounted, so the file cannot be opened again", "mount /proc")
        }
        Err(error) => Unavailable::new(format!("opening with O_DIRECT failed: {error}"), ""),
    };
    Ok(Err(refused))
}

/// Makes a file without a name in a folder, for reading and writing.
///
/// # Errors
/// The system's, also where file systems have no such files.
pub fn create_nameless(folder: &Path) -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(open(folder, flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// Returns the path of the open file itself, whatever has its name now.
pub fn link(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Returns the path that the system has for an open file; `None` where it does not say.
pub fn name(file: &File) -> Option<PathBuf> {
    fs::read_link(link(file)).ok()
}

/// The identity of an open file.
///
/// # Errors
/// The system's.
pub fn identity(file: &File) -> io::Result<FileIdentity> {
    let stat = file.metadata()?;
    let in_ns = |seconds, nanoseconds| i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
    Ok(FileIdentity {
        device: stat.dev(),
        inode: stat.ino(),
        len: stat.len(),
        modified_ns: in_ns(stat.mtime(), stat.mtime_nsec()),
        changed_ns: in_ns(stat.ctime(), stat.ctime_nsec()),
        links: stat.nlink(),
    })
}

/// Describes what a path leads to, if it is no regular file.
///
/// # Errors
/// The system's.
pub fn irregular_path(path: &Path) -> io::Result<Option<&'static str>> {
    fs::metadata(path).map(|stat| kind(stat.file_type()))
}

/// Describes an open file, if it is no regular one.
///
/// # Errors
/// The system's.
pub fn irregular(file: &File) -> io::Result<Option<&'static str>> {
    file.metadata().map(|stat| kind(stat.file_type()))
}

fn kind(file_type: FileType) -> Option<&'static str> {
    Some(match file_type {
        regular if regular.is_file() => return None,
        other if other.is_dir() => "a directory",
        other if other.is_fifo() => "a FIFO (a named pipe)",
        other if other.is_socket() => "a socket",
        other if other.is_char_device() => "a character device",
        other if other.is_block_device() => "a block device",
        _ => "something else",
    })
}

/// Returns the length of transfers that the file system prefers; 0 if it does not say.
pub fn preferred_bytes(file: &File) -> u64 {
    file.metadata().map_or(0, |stat| stat.blksize())
}

/// Returns the alignment that the file system reports for direct transfers, if any.
pub fn direct_alignment(direct: &File) -> Option<DirectAlignment> {
    let stat = rustix::fs::statx(direct, c"", AtFlags::EMPTY_PATH, STATX_DIOALIGN).ok()?;
    StatxFlags::from_bits_retain(stat.stx_mask).contains(STATX_DIOALIGN).then(|| DirectAlignment {
        memory: u64::from(stat.stx_dio_mem_align),
        offset: u64::from(stat.stx_dio_offset_align),
    })
}

/// The error of a read that the drive fails.
#[cfg(feature = "fault-injection")]
pub const BROKEN: i32 = libc::EIO;
/// The error of a transfer that a signal interrupts.
#[cfg(feature = "fault-injection")]
pub fn interrupted() -> io::Error {
    io::Error::from_raw_os_error(libc::EINTR)
}
/// The error of a transfer that the system asks to be tried again.
#[cfg(feature = "fault-injection")]
pub fn again() -> io::Error {
    io::Error::from_raw_os_error(libc::EAGAIN)
}
/// The error of a direct read of a file that takes none.
#[cfg(feature = "fault-injection")]
pub const REFUSED: i32 = libc::EINVAL;

/// Returns whether an error of a direct transfer means that the file takes none.
pub fn is_refusal_of_direct(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP))
}

/// Returns whether an error means that the program that serves a file system is gone.
pub fn is_server_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED))
}

/// Returns the file system of an open file. It is [hidden](FileSystemKind::Hidden) if a filter of system calls keeps the
/// process from asking.
///
/// # Errors
/// The system's.
pub fn filesystem(file: &File) -> io::Result<FileSystem> {
    match retry_on_intr(|| rustix::fs::fstatfs(file)) {
        Ok(found) => Ok(of_magic(found.f_type)),
        Err(Errno::PERM | Errno::ACCESS | Errno::NOSYS) => {
            Ok(FileSystem { name: "unknown", kind: FileSystemKind::Hidden })
        }
        Err(error) => Err(error.into()),
    }
}

/// By the numbers of `statfs(2)` and `linux/magic.h`.
fn of_magic(magic: i64) -> FileSystem {
    use FileSystemKind::*;
    let (name, kind) = match magic & 0xffff_ffff {
        0xEF53 => ("ext4", Local),
        0x5846_5342 => ("xfs", Local),
        0x9123_683E => ("btrfs", Local),
        0xF2F5_2010 => ("f2fs", Local),
        0x2FC1_2FC1 => ("zfs", Local),
        0xCA45_1A4E => ("bcachefs", Local),
        0x5346_544E | 0x7366_746E => ("ntfs", Local),
        0x2011_BAB0 => ("exfat", Local),
        0x4D44 => ("vfat", Local),
        0x7371_7368 => ("squashfs", Local),
        0xE0F5_E1E2 => ("erofs", Local),
        0x0102_1994 => ("tmpfs", Memory),
        0x8584_58F6 => ("ramfs", Memory),
        0x9584_58F6 => ("hugetlbfs", Memory),
        0x6969 => ("nfs", Network),
        0xFF53_4D42 | 0xFE53_4D42 => ("smb", Network),
        0x0BD0_0BD0 => ("lustre", Network),
        0x00C3_6400 => ("ceph", Network),
        0x4750_4653 => ("gpfs", Network),
        0x1983_0326 => ("beegfs", Network),
        0x0102_1997 => ("9p", Network),
        0x6A65_7377 => ("wekafs", Network),
        0x6573_5546 => ("fuse", Fuse),
        0x6573_5543 => ("fusectl", Fuse),
        0x794C_7630 => ("overlayfs", Overlay),
        _ => ("unknown", Unknown),
    };
    FileSystem { name, kind }
}

/// The space of the file system that `path` lies on.
///
/// # Errors
/// The system's.
pub fn space(path: &Path) -> io::Result<Space> {
    let found = retry_on_intr(|| rustix::fs::statvfs(path))?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    Ok(Space { free_bytes: bytes(found.f_bavail), total_bytes: bytes(found.f_blocks) })
}

/// Reads up to as many bytes as fit, from `offset` on.
///
/// # Errors
/// The system's.
pub fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    Ok(rustix::io::pread(file, bytes, offset)?)
}

/// Fills `bytes` from `offset` on.
///
/// # Errors
/// The system's; [`UnexpectedEof`](io::ErrorKind::UnexpectedEof) if there are too few.
pub fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    FileExt::read_exact_at(file, bytes, offset)
}

/// Reads what the page cache holds, from `offset` on, and stops where it does not. Never waits for a disk.
///
/// # Errors
/// The system's; also if the file system cannot tell.
pub fn read_cached_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut slices = [IoSliceMut::new(bytes)];
    match retry_on_intr(|| rustix::io::preadv2(file, &mut slices, offset, ReadWriteFlags::NOWAIT)) {
        Err(Errno::AGAIN) => Ok(0),
        read => Ok(read?),
    }
}

/// Says why nothing is known about what the cache holds of a file, after [`read_cached_at`] has failed.
pub fn no_residency(error: &io::Error) -> Unavailable {
    let reason = format!("its file system cannot say what the page cache holds (RWF_NOWAIT: {error})");
    Unavailable::new(reason, "")
}

/// Makes a file `len` bytes long, on blocks that nothing else can take any more where the file system can promise that.
///
/// # Errors
/// The system's.
pub fn allocate(file: &File, len: u64) -> io::Result<()> {
    match retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(len),
        done => Ok(done?),
    }
}

/// Writes up to [`MAX_SLICES`] slices, from `offset` on, and says how many bytes of them.
///
/// # Errors
/// The system's.
pub fn write_vectored_at(file: &File, slices: &[IoSlice<'_>], offset: u64) -> io::Result<usize> {
    Ok(rustix::io::pwritev(file, slices, offset)?)
}

/// Returns what the file system says of what was written only as a file is closed, as NFS, CIFS and FUSE do of a full disk or a
/// quota. The file stays open, and locked.
///
/// # Errors
/// The system's.
pub fn close_copy(file: &File) -> io::Result<()> {
    close(file.try_clone()?)
}

/// Closes a file, and returns what the file system says of what was written, as [`close_copy`] does.
///
/// # Errors
/// The system's.
pub fn close(file: File) -> io::Result<()> {
    // SAFETY: the descriptor is this function's own.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Locks a file or folder unless another descriptor has the lock.
///
/// # Errors
/// [`WouldBlock`](io::ErrorKind::WouldBlock) if another has the lock; others where it cannot be locked.
pub fn try_lock(file: &File) -> io::Result<()> {
    lock(file, FlockOperation::NonBlockingLockExclusive)
}

/// Locks a file or folder, as other descriptors may at the same time, unless one has it by [`try_lock`].
///
/// # Errors
/// As [`try_lock`].
pub fn try_lock_shared(file: &File) -> io::Result<()> {
    lock(file, FlockOperation::NonBlockingLockShared)
}

fn lock(file: &File, operation: FlockOperation) -> io::Result<()> {
    Ok(retry_on_intr(|| rustix::fs::flock(file, operation))?)
}

/// Unlocks a file or folder. Closing it is not enough: a child of `fork` has the descriptor too, and so the lock.
pub fn unlock(file: &File) {
    // What was not locked need not be unlocked.
    let _ = file.unlock();
}

/// Asks that reads bring no neighbours of what they read into the page cache.
pub fn expect_random_reads(file: &File) {
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random);
}

/// Pages of `range` that the page cache holds, by `cachestat(2)`: Linux 6.5, for files that one owns or may write.
///
/// # Errors
/// The system's, also if it does not tell this process.
pub fn cached_pages(file: &File, range: ByteRange) -> io::Result<u64> {
    #[repr(C)]
    struct CachestatRange {
        offset: u64,
        len: u64,
    }
    /// `struct cachestat` of `linux/mman.h`.
    #[repr(C)]
    #[derive(Default)]
    struct Cachestat {
        cached: u64,
        dirty: u64,
        writeback: u64,
        evicted: u64,
        recently_evicted: u64,
    }
    /// The same on every architecture; newer than `libc`'s tables of some targets.
    const SYS_CACHESTAT: libc::c_long = 451;
    let asked = CachestatRange { offset: range.start(), len: range.len() };
    let mut answer = Cachestat::default();
    // SAFETY: both structures are laid out as the kernel's and outlive the call.
    let result =
        unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const asked, &raw mut answer, 0u32) };
    if result == 0 { Ok(answer.cached) } else { Err(io::Error::last_os_error()) }
}

/// Where the first hole at or after `offset` begins, which the end of the file is too. File systems without holes know of that
/// alone, and so does `ramfs`, whose reads make pages of holes.
///
/// # Errors
/// The system's, also if the file is no longer than `offset`.
pub fn first_hole(file: &File, offset: u64) -> io::Result<u64> {
    // It moves the position of the descriptor and of its duplicates. Nothing here uses that, and descriptors of callers do not get
    // here: loads ask, which open files by their paths.
    Ok(rustix::fs::seek(file, SeekFrom::Hole(offset))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_of_an_opened_file_wait() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (file, _) = open_without_waiting(file.path()).unwrap();
        assert!(!rustix::fs::fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));
    }
}
