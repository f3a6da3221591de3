//! Files: opening, identity, and transfers at a position.
#![allow(unsafe_code)]

use super::{code, is_lack, transfer, verbatim};
pub use crate::sys::common::Space;
use crate::{
    ByteRange,
    file::{DirectAlignment, FileIdentity, FileSystem, FileSystemKind, FileUse},
};
use hoistway_device::Unavailable;
use std::{
    ffi::{OsString, c_void},
    fs::{File, OpenOptions},
    io::{self, IoSlice},
    os::windows::{
        ffi::OsStringExt,
        fs::OpenOptionsExt,
        io::{AsRawHandle, FromRawHandle},
    },
    path::{Path, PathBuf},
    process, ptr,
    sync::atomic::{AtomicU64, Ordering},
};
use windows_sys::{
    Wdk::Storage::FileSystem::{
        FILE_MODE_INFORMATION, FILE_NO_INTERMEDIATE_BUFFERING, FileModeInformation, NtQueryInformationFile,
    },
    Win32::{
        Foundation::{
            ERROR_INVALID_FUNCTION, ERROR_INVALID_PARAMETER, ERROR_LOCK_VIOLATION, ERROR_NOT_SUPPORTED,
            ERROR_SHARING_VIOLATION, ERROR_TOO_MANY_OPEN_FILES, GENERIC_READ, GENERIC_WRITE,
            INVALID_HANDLE_VALUE,
        },
        Storage::FileSystem::{
            BY_HANDLE_FILE_INFORMATION, DELETE, FILE_ALLOCATION_INFO, FILE_BASIC_INFO,
            FILE_FLAG_BACKUP_SEMANTICS, FILE_FLAG_DELETE_ON_CLOSE, FILE_FLAG_NO_BUFFERING,
            FILE_FLAG_OVERLAPPED, FILE_ID_INFO, FILE_INFO_BY_HANDLE_CLASS, FILE_REMOTE_PROTOCOL_INFO,
            FILE_SHARE_DELETE, FILE_SHARE_READ, FILE_SHARE_WRITE, FILE_STANDARD_INFO, FILE_STORAGE_INFO,
            FILE_TYPE_CHAR, FILE_TYPE_DISK, FILE_TYPE_PIPE, FileAllocationInfo, FileBasicInfo, FileIdInfo,
            FileRemoteProtocolInfo, FileStandardInfo, FileStorageInfo, GetDiskFreeSpaceExW,
            GetFileInformationByHandle, GetFileInformationByHandleEx, GetFileType, GetFinalPathNameByHandleW,
            GetVolumeInformationByHandleW, LOCKFILE_EXCLUSIVE_LOCK, LOCKFILE_FAIL_IMMEDIATELY, LockFileEx,
            ReOpenFile, SetFileInformationByHandle, UnlockFileEx,
        },
        System::IO::IO_STATUS_BLOCK,
    },
};

/// Slices that the system takes in one call.
pub const MAX_SLICES: usize = 1;

/// What others may do with a file meanwhile: read it, and give its name to another.
const READERS: u32 = FILE_SHARE_READ | FILE_SHARE_DELETE;
/// The same, and write to it.
const WRITERS: u32 = READERS | FILE_SHARE_WRITE;

/// Opens a file for reading, for transfers of several threads at once. On Windows pipes have other paths than
/// files, and no file becomes one.
///
/// No other program can open it for writing meanwhile: the times of a file, which show that it was rewritten, may be late as
/// long as its writer has it open. If it has a writer already, that may go on, and the second value is `true`.
///
/// # Errors
/// The system's.
pub fn open_without_waiting(path: &Path) -> io::Result<(File, bool)> {
    let open = |share| {
        let flags = FILE_FLAG_OVERLAPPED;
        OpenOptions::new().read(true).share_mode(share).custom_flags(flags).open(path)
    };
    match open(READERS) {
        Err(error) if code(&error) == Some(ERROR_SHARING_VIOLATION) => Ok((open(WRITERS)?, true)),
        opened => Ok((opened?, false)),
    }
}

/// Opens an open file a second time for reading: certainly the same file, with separate flags.
///
/// # Errors
/// The system's.
pub fn reopen(file: &File) -> io::Result<File> {
    reopen_with(file, GENERIC_READ, 0)
}

/// Opens an open file a second time for reading, past the cache or through it as the first time.
///
/// # Errors
/// The system's.
pub(super) fn reopen_alike(file: &File) -> io::Result<File> {
    reopen_with(file, GENERIC_READ, if is_direct(file) { FILE_FLAG_NO_BUFFERING } else { 0 })
}

/// For transfers of several threads at once.
fn reopen_with(file: &File, access: u32, flags: u32) -> io::Result<File> {
    let open = |share| {
        // SAFETY: the handle is open during the call.
        let handle = unsafe { ReOpenFile(file.as_raw_handle(), access, share, flags | FILE_FLAG_OVERLAPPED) };
        if handle == INVALID_HANDLE_VALUE {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new handle of a file, which has no other owner.
        Ok(unsafe { File::from_raw_handle(handle) })
    };
    match open(READERS) {
        // It has a writer.
        Err(error) if code(&error) == Some(ERROR_SHARING_VIOLATION) => open(WRITERS),
        opened => opened,
    }
}

/// Whether transfers of this handle go past the cache.
pub fn is_direct(file: &File) -> bool {
    mode(file).is_some_and(|mode| mode & FILE_NO_INTERMEDIATE_BUFFERING != 0)
}

/// Whether the system carries out the transfers of this handle one after the other.
#[cfg(test)]
pub(super) fn is_synchronous(file: &File) -> bool {
    use windows_sys::Wdk::Storage::FileSystem::{FILE_SYNCHRONOUS_IO_ALERT, FILE_SYNCHRONOUS_IO_NONALERT};
    mode(file).unwrap() & (FILE_SYNCHRONOUS_IO_ALERT | FILE_SYNCHRONOUS_IO_NONALERT) != 0
}

/// The options that a file was opened with; `None` if the system does not say.
fn mode(file: &File) -> Option<u32> {
    let (mut status, mut mode) = (IO_STATUS_BLOCK::default(), FILE_MODE_INFORMATION::default());
    let len = size_of::<FILE_MODE_INFORMATION>() as u32;
    // SAFETY: the handle is open during the call, and both structures outlive it; `len` is that of the second.
    let result = unsafe {
        NtQueryInformationFile(
            file.as_raw_handle(),
            &raw mut status,
            (&raw mut mode).cast(),
            len,
            FileModeInformation,
        )
    };
    (result >= 0).then_some(mode.Mode)
}

/// Opens an open file a second time, past the cache.
///
/// # Errors
/// Why that cannot be.
pub fn open_direct(
    file: &File,
    filesystem: FileSystem,
    file_use: FileUse,
) -> io::Result<Result<File, Unavailable>> {
    let access = match file_use {
        FileUse::Read => GENERIC_READ,
        FileUse::ReadWrite => GENERIC_READ | GENERIC_WRITE,
    };
    let error = match reopen_with(file, access, FILE_FLAG_NO_BUFFERING) {
        Ok(direct) => return Ok(Ok(direct)),
        Err(error) => error,
    };
    let reason = match code(&error) {
        Some(ERROR_TOO_MANY_OPEN_FILES) => return Err(error),
        Some(ERROR_INVALID_PARAMETER | ERROR_INVALID_FUNCTION | ERROR_NOT_SUPPORTED) => {
            format!("{filesystem} does not support FILE_FLAG_NO_BUFFERING for this file")
        }
        _ => format!("opening with FILE_FLAG_NO_BUFFERING failed: {error}"),
    };
    Ok(Err(Unavailable::new(reason, "")))
}

/// Makes a file in a folder, for reading and writing, that is deleted when it is closed.
///
/// # Errors
/// The system's.
pub fn create_nameless(folder: &Path) -> io::Result<File> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    OpenOptions::new()
        .access_mode(GENERIC_READ | GENERIC_WRITE | DELETE)
        .custom_flags(FILE_FLAG_DELETE_ON_CLOSE)
        .create_new(true)
        .write(true)
        .open(folder.join(format!(".hoistway-{}-{number}.tmp", process::id())))
}

/// The path that the system has for an open file; `None` where it does not say.
pub fn name(file: &File) -> Option<PathBuf> {
    let mut text = vec![0u16; 512];
    loop {
        let room = u32::try_from(text.len()).ok()?;
        // SAFETY: the handle is open during the call, which writes no more than `room` characters.
        let len =
            unsafe { GetFinalPathNameByHandleW(file.as_raw_handle(), text.as_mut_ptr(), room, 0) } as usize;
        if len == 0 {
            return None;
        }
        if len < text.len() {
            text.truncate(len);
            return Some(OsString::from_wide(&text).into());
        }
        text.resize(len + 1, 0);
    }
}

/// The identity of an open file.
///
/// # Errors
/// The system's.
pub fn identity(file: &File) -> io::Result<FileIdentity> {
    let (device, inode) = number(file)?;
    let times: FILE_BASIC_INFO = information(file)?;
    let standard: FILE_STANDARD_INFO = information(file)?;
    let in_ns = |time: i64| i128::from(time) * 100;
    Ok(FileIdentity {
        device,
        inode,
        len: u64::try_from(standard.EndOfFile).unwrap_or(0),
        modified_ns: in_ns(times.LastWriteTime),
        changed_ns: in_ns(times.ChangeTime),
        links: u64::from(standard.NumberOfLinks),
    })
}

/// The number of a file's volume, and that of the file on it.
fn number(file: &File) -> io::Result<(u64, u64)> {
    match information::<FILE_ID_INFO>(file) {
        Ok(id) => {
            // NTFS has numbers of 64 bits, ReFS of 128, of which it uses few.
            let number = u128::from_le_bytes(id.FileId.Identifier);
            Ok((id.VolumeSerialNumber, number as u64 ^ (number >> 64) as u64))
        }
        // FAT, and servers of an older protocol.
        Err(error) if is_lack(&error) => {
            let mut found = BY_HANDLE_FILE_INFORMATION::default();
            // SAFETY: the handle is open during the call, and the structure outlives it.
            if unsafe { GetFileInformationByHandle(file.as_raw_handle(), &raw mut found) } == 0 {
                return Err(io::Error::last_os_error());
            }
            let number = u64::from(found.nFileIndexHigh) << 32 | u64::from(found.nFileIndexLow);
            Ok((found.dwVolumeSerialNumber.into(), number))
        }
        Err(error) => Err(error),
    }
}

/// What a path leads to that is no regular file: `NUL` and `CON` are devices. `None` if it is one.
///
/// # Errors
/// The system's.
pub fn irregular_path(path: &Path) -> io::Result<Option<&'static str>> {
    if is_device(path)? {
        return Ok(Some("a device"));
    }
    // Without access, which a pipe may refuse.
    let flags = FILE_FLAG_BACKUP_SEMANTICS;
    irregular(&OpenOptions::new().access_mode(0).custom_flags(flags).open(path)?)
}

/// Whether the system takes a path for a device, such as `NUL`: which names these are depends on its version. Opening a device
/// may do something.
fn is_device(path: &Path) -> io::Result<bool> {
    let absolute = std::path::absolute(path)?;
    let name = absolute.as_os_str().as_encoded_bytes().strip_prefix(br"\\.\");
    Ok(name.is_some_and(|name| !name.contains(&b'\\')))
}

/// What an open file is, if it is no regular one.
///
/// # Errors
/// The system's.
pub fn irregular(file: &File) -> io::Result<Option<&'static str>> {
    // SAFETY: the handle is open during the call.
    Ok(match unsafe { GetFileType(file.as_raw_handle()) } {
        FILE_TYPE_DISK => file.metadata()?.is_dir().then_some("a directory"),
        FILE_TYPE_CHAR => Some("a device"),
        FILE_TYPE_PIPE => Some("a pipe"),
        _ => Some("something else"),
    })
}

/// The length of transfers that the file system likes best; 0: it does not say.
pub fn preferred_bytes(_file: &File) -> u64 {
    0
}

/// What the file system says of direct transfers, if anything.
pub fn direct_alignment(direct: &File) -> Option<DirectAlignment> {
    let storage: FILE_STORAGE_INFO = information(direct).ok()?;
    in_sectors(storage.LogicalBytesPerSector)
}

/// The alignment that sectors of this length need; `None` for what is no length of a sector.
fn in_sectors(bytes: u32) -> Option<DirectAlignment> {
    let sector = u64::from(bytes);
    bytes.is_power_of_two().then_some(DirectAlignment { memory: sector, offset: sector })
}

/// The error of a read that the drive fails.
#[cfg(feature = "fault-injection")]
pub const BROKEN: i32 = windows_sys::Win32::Foundation::ERROR_IO_DEVICE.cast_signed();
/// The error of a transfer that is interrupted: Windows has no number for it.
#[cfg(feature = "fault-injection")]
pub fn interrupted() -> io::Error {
    io::ErrorKind::Interrupted.into()
}
/// The error of a transfer that the system asks to be tried again.
#[cfg(feature = "fault-injection")]
pub fn again() -> io::Error {
    transfer::retried(io::Error::from_raw_os_error(
        windows_sys::Win32::Foundation::ERROR_NO_SYSTEM_RESOURCES.cast_signed(),
    ))
}
/// The error of a direct read of a file that takes none.
#[cfg(feature = "fault-injection")]
pub const REFUSED: i32 = ERROR_INVALID_PARAMETER.cast_signed();

/// Whether an error of a direct transfer says that the file takes none.
pub fn is_refusal_of_direct(error: &io::Error) -> bool {
    matches!(code(error), Some(ERROR_INVALID_PARAMETER | ERROR_NOT_SUPPORTED))
}

/// Whether an error says that the program that serves a file system is gone: there are no such file systems.
pub fn is_server_gone(_error: &io::Error) -> bool {
    false
}

/// The file system of an open file.
///
/// # Errors
/// The system's.
pub fn filesystem(file: &File) -> io::Result<FileSystem> {
    if information::<FILE_REMOTE_PROTOCOL_INFO>(file).is_ok() {
        return Ok(FileSystem { name: "a network share", kind: FileSystemKind::Network });
    }
    let mut name = [0u16; 64];
    // SAFETY: the handle is open during the call, which writes no more characters than it is told; what is not wanted may
    // be null.
    let is_told = unsafe {
        GetVolumeInformationByHandleW(
            file.as_raw_handle(),
            ptr::null_mut(),
            0,
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
            name.as_mut_ptr(),
            name.len() as u32,
        )
    };
    if is_told == 0 {
        return Err(io::Error::last_os_error());
    }
    let len = name.iter().position(|&character| character == 0).unwrap_or(name.len());
    Ok(of_name(&String::from_utf16_lossy(&name[..len])))
}

fn of_name(name: &str) -> FileSystem {
    const LOCAL: [&str; 5] = ["NTFS", "ReFS", "exFAT", "FAT32", "FAT"];
    match LOCAL.iter().find(|known| known.eq_ignore_ascii_case(name)) {
        Some(name) => FileSystem { name, kind: FileSystemKind::Local },
        None => FileSystem { name: "unknown", kind: FileSystemKind::Unknown },
    }
}

/// The space of the file system that `path` lies on.
///
/// # Errors
/// The system's.
pub fn space(path: &Path) -> io::Result<Space> {
    let folder = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
    let folder = verbatim(folder)?;
    let (mut free_bytes, mut total_bytes) = (0, 0);
    // SAFETY: the path ends with a zero; it and both numbers outlive the call, which is not asked for a third.
    let is_told = unsafe {
        GetDiskFreeSpaceExW(folder.as_ptr(), &raw mut free_bytes, &raw mut total_bytes, ptr::null_mut())
    };
    if is_told != 0 { Ok(Space { free_bytes, total_bytes }) } else { Err(io::Error::last_os_error()) }
}

/// Reads up to as many bytes as fit, from `offset` on.
///
/// # Errors
/// The system's.
pub fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    transfer::read(file, bytes, offset)
}

/// Fills `bytes` from `offset` on.
///
/// # Errors
/// The system's; [`UnexpectedEof`](io::ErrorKind::UnexpectedEof) if there are too few.
pub fn read_exact_at(file: &File, mut bytes: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match read_at(file, bytes, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                bytes = &mut bytes[count..];
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads what the cache holds: Windows does not tell.
///
/// # Errors
/// Always.
pub fn read_cached_at(_file: &File, _bytes: &mut [u8], _offset: u64) -> io::Result<usize> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Says why nothing is known about what the cache holds of a file.
pub fn no_residency(_error: &io::Error) -> Unavailable {
    Unavailable::new("Windows does not say what its cache holds of a file", "")
}

/// Makes a file `len` bytes long, on blocks that nothing else can take any more where the file system can promise that.
///
/// # Errors
/// The system's.
pub fn allocate(file: &File, len: u64) -> io::Result<()> {
    let bytes = i64::try_from(len).map_err(|_| io::ErrorKind::FileTooLarge)?;
    let allocation = FILE_ALLOCATION_INFO { AllocationSize: bytes };
    let size = size_of::<FILE_ALLOCATION_INFO>() as u32;
    // SAFETY: the handle is open during the call, which reads the structure of this class.
    let is_allocated = unsafe {
        SetFileInformationByHandle(
            file.as_raw_handle(),
            FileAllocationInfo,
            (&raw const allocation).cast(),
            size,
        )
    };
    if is_allocated == 0 {
        let error = io::Error::last_os_error();
        // Setting the length takes the blocks, and says if there are too few.
        if !is_lack(&error) {
            return Err(error);
        }
    }
    file.set_len(len)
}

/// What is locked of a file: no file is so long.
const LOCKED_BYTE: u64 = (i32::MAX as u64) << 32;

/// Locks a file unless another handle has the lock: a byte far behind its end, as the system keeps other handles from
/// bytes that are locked.
///
/// # Errors
/// [`WouldBlock`](io::ErrorKind::WouldBlock) if another has it; others where it cannot be locked.
pub fn try_lock(file: &File) -> io::Result<()> {
    lock(file, LOCKFILE_EXCLUSIVE_LOCK)
}

/// Locks a file, as other handles may at the same time, unless one has it by [`try_lock`]. The system would keep all handles
/// from writing to bytes that are locked so.
///
/// # Errors
/// As [`try_lock`].
pub fn try_lock_shared(file: &File) -> io::Result<()> {
    lock(file, 0)
}

fn lock(file: &File, flags: u32) -> io::Result<()> {
    let flags = flags | LOCKFILE_FAIL_IMMEDIATELY;
    // SAFETY: the handle is open, and the structure is used until the lock is decided on.
    let lock = |handle, place| unsafe { LockFileEx(handle, flags, 0, 1, 0, place) };
    match transfer::run(file, LOCKED_BYTE, lock) {
        Err(error) if code(&error) == Some(ERROR_LOCK_VIOLATION) => Err(io::ErrorKind::WouldBlock.into()),
        done => done.map(drop),
    }
}

/// Does nothing: here, closing a file says nothing of what was written.
///
/// # Errors
/// None.
pub fn close_copy(_: &File) -> io::Result<()> {
    Ok(())
}

/// Closes a file.
///
/// # Errors
/// None.
pub fn close(_: File) -> io::Result<()> {
    Ok(())
}

/// Unlocks a file. One that was not locked need not be unlocked.
pub fn unlock(file: &File) {
    // SAFETY: the handle is open, and the structure is used until the lock is gone.
    let _ = transfer::run(file, LOCKED_BYTE, |handle, place| unsafe { UnlockFileEx(handle, 0, 1, 0, place) });
}

/// Writes the first of the slices, from `offset` on, and says how many bytes of it.
///
/// # Errors
/// The system's.
pub fn write_vectored_at(file: &File, slices: &[IoSlice<'_>], offset: u64) -> io::Result<usize> {
    slices.iter().find(|slice| !slice.is_empty()).map_or(Ok(0), |slice| transfer::write(file, slice, offset))
}

/// Asks that reads bring no neighbours of what they read into the cache: Windows takes that at opening only.
pub fn expect_random_reads(_file: &File) {}

/// Pages of `range` that the cache holds: Windows does not tell.
///
/// # Errors
/// Always.
pub fn cached_pages(_file: &File, _range: ByteRange) -> io::Result<u64> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Where the first hole at or after `offset` begins: not asked on Windows, which has no file systems in memory.
///
/// # Errors
/// Always.
pub fn first_hole(_file: &File, _offset: u64) -> io::Result<u64> {
    Err(io::ErrorKind::Unsupported.into())
}

/// A structure of facts about an open file.
///
/// # Safety
/// It must be the one that the system writes for this class, and made of numbers and flags.
pub(super) unsafe trait Information: Default {
    const CLASS: FILE_INFO_BY_HANDLE_CLASS;
}

// SAFETY: as the system's reference says of the class; numbers.
unsafe impl Information for FILE_BASIC_INFO {
    const CLASS: FILE_INFO_BY_HANDLE_CLASS = FileBasicInfo;
}
// SAFETY: as above.
unsafe impl Information for FILE_ID_INFO {
    const CLASS: FILE_INFO_BY_HANDLE_CLASS = FileIdInfo;
}
// SAFETY: as above.
unsafe impl Information for FILE_REMOTE_PROTOCOL_INFO {
    const CLASS: FILE_INFO_BY_HANDLE_CLASS = FileRemoteProtocolInfo;
}
// SAFETY: as above; the system writes flags as 0 or 1.
unsafe impl Information for FILE_STANDARD_INFO {
    const CLASS: FILE_INFO_BY_HANDLE_CLASS = FileStandardInfo;
}
// SAFETY: as above.
unsafe impl Information for FILE_STORAGE_INFO {
    const CLASS: FILE_INFO_BY_HANDLE_CLASS = FileStorageInfo;
}

pub(super) fn information<T: Information>(file: &File) -> io::Result<T> {
    let mut found = T::default();
    let at: *mut c_void = (&raw mut found).cast();
    // SAFETY: the handle is open during the call, which writes no more than the structure has room for.
    let is_told =
        unsafe { GetFileInformationByHandleEx(file.as_raw_handle(), T::CLASS, at, size_of::<T>() as u32) };
    if is_told != 0 { Ok(found) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_tell_how_direct_transfers_are_aligned() {
        let block = |bytes| Some(DirectAlignment { memory: bytes, offset: bytes });
        assert_eq!([512, 4096].map(in_sectors), [512, 4096].map(block));
        assert_eq!([0, 520, 4104].map(in_sectors), [None; 3]);
    }

    #[test]
    fn no_writer_opens_a_file_that_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [7; 4096]).unwrap();
        let write = || OpenOptions::new().write(true).open(&path);
        let (file, has_writer) = open_without_waiting(&path).unwrap();
        assert!(!has_writer);
        let again = reopen_alike(&file).unwrap();
        assert_eq!(code(&write().unwrap_err()), Some(ERROR_SHARING_VIOLATION));
        drop(file);
        assert_eq!(code(&write().unwrap_err()), Some(ERROR_SHARING_VIOLATION));
        drop(again);
        let writer = write().unwrap();
        let (file, has_writer) = open_without_waiting(&path).unwrap();
        assert!(has_writer);
        reopen_alike(&file).unwrap();
        drop((file, writer));
        // Others may replace it and delete it.
        let (file, _) = open_without_waiting(&path).unwrap();
        std::fs::rename(&path, folder.path().join("other")).unwrap();
        std::fs::remove_file(folder.path().join("other")).unwrap();
        let mut bytes = [0; 4096];
        assert_eq!(read_at(&file, &mut bytes, 0).unwrap(), 4096);
    }

    #[test]
    fn a_file_that_shares_nothing_is_an_error_with_its_number() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let _alone = OpenOptions::new().write(true).create_new(true).share_mode(0).open(&path).unwrap();
        let error = open_without_waiting(&path).unwrap_err();
        assert_eq!(code(&error), Some(ERROR_SHARING_VIOLATION));
        assert!(error.to_string().contains("os error 32"), "{error}");
    }

    #[test]
    fn a_lock_belongs_to_one_handle() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [7; 10]).unwrap();
        let open = || OpenOptions::new().read(true).write(true).open(&path).unwrap();
        // Such handles, and those for transfers of several threads.
        for [first, second] in [[open(), open()], [reopen(&open()).unwrap(), reopen(&open()).unwrap()]] {
            try_lock(&first).unwrap();
            assert_eq!(try_lock(&second).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            unlock(&first);
            try_lock(&second).unwrap();
            unlock(&second);
        }
    }

    #[test]
    fn handles_that_share_a_lock_may_write_and_keep_others_from_the_lock_for_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [7; 10]).unwrap();
        let open = || OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let (first, second) = (open(), open());
        try_lock_shared(&first).unwrap();
        try_lock_shared(&second).unwrap();
        assert_eq!(transfer::write(&second, &[8; 3], 0).unwrap(), 3);
        for last in [&first, &second] {
            assert_eq!(try_lock(&open()).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            unlock(last);
        }
        try_lock(&open()).unwrap();
    }
}
