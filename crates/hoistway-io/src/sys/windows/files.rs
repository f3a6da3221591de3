//! Files: opening, identity, and transfers at a position.
#![allow(unsafe_code)]

use super::{code, verbatim};
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
        fs::{FileExt, OpenOptionsExt},
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
            ERROR_CALL_NOT_IMPLEMENTED, ERROR_INVALID_FUNCTION, ERROR_INVALID_PARAMETER, ERROR_IO_PENDING,
            ERROR_LOCK_VIOLATION, ERROR_NOT_SUPPORTED, ERROR_TOO_MANY_OPEN_FILES, GENERIC_READ,
            GENERIC_WRITE, INVALID_HANDLE_VALUE,
        },
        Storage::FileSystem::{
            DELETE, FILE_ALLOCATION_INFO, FILE_BASIC_INFO, FILE_FLAG_BACKUP_SEMANTICS,
            FILE_FLAG_DELETE_ON_CLOSE, FILE_FLAG_NO_BUFFERING, FILE_ID_INFO, FILE_INFO_BY_HANDLE_CLASS,
            FILE_REMOTE_PROTOCOL_INFO, FILE_SHARE_DELETE, FILE_SHARE_READ, FILE_SHARE_WRITE,
            FILE_STANDARD_INFO, FILE_STORAGE_INFO, FILE_TYPE_CHAR, FILE_TYPE_DISK, FILE_TYPE_PIPE,
            FileAllocationInfo, FileBasicInfo, FileIdInfo, FileRemoteProtocolInfo, FileStandardInfo,
            FileStorageInfo, GetDiskFreeSpaceExW, GetFileInformationByHandleEx, GetFileType,
            GetFinalPathNameByHandleW, GetVolumeInformationByHandleW, LOCKFILE_EXCLUSIVE_LOCK,
            LOCKFILE_FAIL_IMMEDIATELY, LockFileEx, ReOpenFile, SetFileInformationByHandle, UnlockFileEx,
        },
        System::IO::{IO_STATUS_BLOCK, OVERLAPPED, OVERLAPPED_0, OVERLAPPED_0_0},
    },
};

/// Slices that the system takes in one call.
pub const MAX_SLICES: usize = 1;

/// Opens a file for reading. Pipes have paths of their own here, and no file becomes one.
///
/// # Errors
/// The system's.
pub fn open_without_waiting(path: &Path) -> io::Result<File> {
    File::open(path)
}

/// Opens an open file a second time for reading: the same file for certain, and flags of its own.
///
/// # Errors
/// The system's.
pub fn reopen(file: &File) -> io::Result<File> {
    reopen_with(file, GENERIC_READ, 0)
}

fn reopen_with(file: &File, access: u32, flags: u32) -> io::Result<File> {
    let share = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
    // SAFETY: the handle is open during the call.
    let handle = unsafe { ReOpenFile(file.as_raw_handle(), access, share, flags) };
    if handle == INVALID_HANDLE_VALUE {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new handle of a file, which has no other owner.
    Ok(unsafe { File::from_raw_handle(handle) })
}

/// Whether transfers of this handle go past the cache.
pub fn is_direct(file: &File) -> bool {
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
    result >= 0 && mode.Mode & FILE_NO_INTERMEDIATE_BUFFERING != 0
}

/// Opens an open file a second time, past the cache.
///
/// # Errors
/// Why that cannot be.
pub fn open_direct(file: &File, filesystem: FileSystem, file_use: FileUse) -> Result<File, Unavailable> {
    let access = match file_use {
        FileUse::Read => GENERIC_READ,
        FileUse::ReadWrite => GENERIC_READ | GENERIC_WRITE,
    };
    reopen_with(file, access, FILE_FLAG_NO_BUFFERING).map_err(|error| match code(&error) {
        Some(ERROR_INVALID_PARAMETER | ERROR_INVALID_FUNCTION | ERROR_NOT_SUPPORTED) => Unavailable::new(
            format!("{filesystem} does not support FILE_FLAG_NO_BUFFERING for this file"),
            "",
        ),
        Some(ERROR_TOO_MANY_OPEN_FILES) => Unavailable::new("no file handle is left for it", ""),
        _ => Unavailable::new(format!("opening with FILE_FLAG_NO_BUFFERING failed: {error}"), ""),
    })
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
    let id: FILE_ID_INFO = information(file)?;
    let times: FILE_BASIC_INFO = information(file)?;
    let standard: FILE_STANDARD_INFO = information(file)?;
    // NTFS has numbers of 64 bits, ReFS of 128, of which it uses few.
    let number = u128::from_le_bytes(id.FileId.Identifier);
    let in_ns = |time: i64| i128::from(time) * 100;
    Ok(FileIdentity {
        device: id.VolumeSerialNumber,
        inode: number as u64 ^ (number >> 64) as u64,
        len: u64::try_from(standard.EndOfFile).unwrap_or(0),
        modified_ns: in_ns(times.LastWriteTime),
        changed_ns: in_ns(times.ChangeTime),
        links: u64::from(standard.NumberOfLinks),
    })
}

/// What a path leads to that is no regular file: `NUL` and `CON` are devices. `None` if it is one.
///
/// # Errors
/// The system's.
pub fn irregular_path(path: &Path) -> io::Result<Option<&'static str>> {
    // Devices answer no question about files, and may refuse to be opened for reading.
    let flags = FILE_FLAG_BACKUP_SEMANTICS;
    irregular(&OpenOptions::new().access_mode(0).custom_flags(flags).open(path)?)
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
    let sector = u64::from(storage.LogicalBytesPerSector);
    (sector > 0).then_some(DirectAlignment { memory: sector, offset: sector })
}

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
    file.seek_read(bytes, offset)
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
        if !matches!(
            code(&error),
            Some(ERROR_INVALID_FUNCTION | ERROR_NOT_SUPPORTED | ERROR_CALL_NOT_IMPLEMENTED)
        ) {
            return Err(error);
        }
    }
    file.set_len(len)
}

/// Locks a file unless another handle has the lock: a byte far behind its end, as the system keeps other handles from
/// bytes that are locked.
///
/// # Errors
/// [`WouldBlock`](io::ErrorKind::WouldBlock) if another has it; others where it cannot be locked.
pub fn try_lock(file: &File) -> io::Result<()> {
    let flags = LOCKFILE_EXCLUSIVE_LOCK | LOCKFILE_FAIL_IMMEDIATELY;
    let mut place = lock_place();
    // SAFETY: the handle is open during the call, and the structure outlives it: with this flag it does not wait.
    if unsafe { LockFileEx(file.as_raw_handle(), flags, 0, 1, 0, &raw mut place) } != 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    let is_taken = matches!(code(&error), Some(ERROR_LOCK_VIOLATION | ERROR_IO_PENDING));
    Err(if is_taken { io::ErrorKind::WouldBlock.into() } else { error })
}

/// Unlocks a file. One that was not locked need not be unlocked.
pub fn unlock(file: &File) {
    let mut place = lock_place();
    // SAFETY: the handle is open during the call, which does not wait.
    unsafe { UnlockFileEx(file.as_raw_handle(), 0, 1, 0, &raw mut place) };
}

fn lock_place() -> OVERLAPPED {
    let far = OVERLAPPED_0_0 { Offset: 0, OffsetHigh: i32::MAX.cast_unsigned() };
    OVERLAPPED { Anonymous: OVERLAPPED_0 { Anonymous: far }, ..Default::default() }
}

/// Writes the first of the slices, from `offset` on, and says how many bytes of it.
///
/// # Errors
/// The system's.
pub fn write_vectored_at(file: &File, slices: &[IoSlice<'_>], offset: u64) -> io::Result<usize> {
    slices.iter().find(|slice| !slice.is_empty()).map_or(Ok(0), |slice| file.seek_write(slice, offset))
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

/// A structure of facts about an open file.
///
/// # Safety
/// It must be the one that the system writes for this class, and made of numbers and flags.
unsafe trait Information: Default {
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

fn information<T: Information>(file: &File) -> io::Result<T> {
    let mut found = T::default();
    let at: *mut c_void = (&raw mut found).cast();
    // SAFETY: the handle is open during the call, which writes no more than the structure has room for.
    let is_told =
        unsafe { GetFileInformationByHandleEx(file.as_raw_handle(), T::CLASS, at, size_of::<T>() as u32) };
    if is_told != 0 { Ok(found) } else { Err(io::Error::last_os_error()) }
}
