//! What lies below a file system, as far as it matters to how a file is read. Windows does not tell queues and NUMA nodes of
//! drives without administrator rights.
#![allow(unsafe_code)]

use super::{files, transfer};
use std::{ffi::c_void, fs::File, io, ptr};
use windows_sys::Win32::{
    Foundation::STATUS_SUCCESS,
    Storage::FileSystem::{
        FILE_ATTRIBUTE_COMPRESSED, FILE_ATTRIBUTE_ENCRYPTED, FILE_ATTRIBUTE_OFFLINE,
        FILE_ATTRIBUTE_RECALL_ON_DATA_ACCESS, FILE_ATTRIBUTE_SPARSE_FILE, FILE_BASIC_INFO, FILE_STORAGE_INFO,
    },
    System::{
        IO::DeviceIoControl,
        Ioctl::{FS_BPIO_INPUT, FS_BPIO_OP_QUERY, FS_BPIO_OUTPUT, FSCTL_MANAGE_BYPASS_IO},
    },
};

/// Hardware queues of the device with this number: not known.
pub fn queues(_device: u64) -> usize {
    0
}

/// The NUMA node of the device with this number: not known.
pub fn numa_node(_device: u64) -> Option<u32> {
    None
}

/// Lengths of a drive's sectors, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sectors {
    /// What transfers past the cache are multiples of.
    pub logical: u32,
    /// What the drive reads and writes at once.
    pub physical: u32,
}

/// The sectors of the drive that a file lies on; `None` if the system does not say.
pub fn sectors(file: &File) -> Option<Sectors> {
    let storage: FILE_STORAGE_INFO = files::information(file).ok()?;
    let sectors = Sectors {
        logical: storage.LogicalBytesPerSector,
        physical: storage.PhysicalBytesPerSectorForPerformance,
    };
    (sectors.logical > 0).then_some(sectors)
}

/// What of a file makes its reads slower: that it is compressed, for instance.
///
/// # Errors
/// The system's.
pub fn hindrances(file: &File) -> io::Result<Vec<&'static str>> {
    const NAMES: [(u32, &str); 4] = [
        (FILE_ATTRIBUTE_COMPRESSED, "compressed"),
        (FILE_ATTRIBUTE_ENCRYPTED, "encrypted"),
        (FILE_ATTRIBUTE_SPARSE_FILE, "sparse"),
        (FILE_ATTRIBUTE_OFFLINE | FILE_ATTRIBUTE_RECALL_ON_DATA_ACCESS, "not stored on this machine"),
    ];
    let basic: FILE_BASIC_INFO = files::information(file)?;
    let has = |flags: u32| basic.FileAttributes & flags != 0;
    Ok(NAMES.iter().filter(|(flags, _)| has(*flags)).map(|(_, name)| *name).collect())
}

/// Whether reads of a file can bypass the file system's filters (BypassIO, Windows 11), or which driver does not let them, and why.
///
/// # Errors
/// The system's, if it or the file system has no such thing.
pub fn bypass_io(file: &File) -> io::Result<Result<(), String>> {
    let input = FS_BPIO_INPUT { Operation: FS_BPIO_OP_QUERY, ..Default::default() };
    let mut output = FS_BPIO_OUTPUT::default();
    let (from, from_len) = ((&raw const input).cast::<c_void>(), size_of::<FS_BPIO_INPUT>() as u32);
    let (to, to_len) = ((&raw mut output).cast::<c_void>(), size_of::<FS_BPIO_OUTPUT>() as u32);
    // SAFETY: `run` returns once the call is over; both structures outlive it, and their lengths are told.
    transfer::run(file, 0, |handle, place| unsafe {
        DeviceIoControl(handle, FSCTL_MANAGE_BYPASS_IO, from, from_len, to, to_len, ptr::null_mut(), place)
    })?;
    // SAFETY: numbers, which are all zero unless the system has written them.
    let found = unsafe { output.Anonymous.Query };
    if found.OpStatus.cast_signed() == STATUS_SUCCESS {
        return Ok(Ok(()));
    }
    // Lengths in bytes.
    let text = |units: &[u16], bytes: u16| {
        let units = units.get(..usize::from(bytes / 2)).unwrap_or(units);
        String::from_utf16_lossy(units).trim_end_matches('\0').to_owned()
    };
    let driver = text(&found.FailingDriverName, found.FailingDriverNameLen);
    let reason = text(&found.FailureReason, found.FailureReasonLen);
    Ok(Err(format!("{driver}: {reason} (status {:#010x})", found.OpStatus)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sparse_file_is_told_from_others() {
        use windows_sys::Win32::System::Ioctl::FSCTL_SET_SPARSE;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [7; 4096]).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        assert_eq!(hindrances(&file).unwrap(), [""; 0]);
        let set = |handle, place| {
            let nothing = ptr::null_mut();
            // SAFETY: no structure goes in or comes out.
            unsafe {
                DeviceIoControl(handle, FSCTL_SET_SPARSE, nothing, 0, nothing, 0, ptr::null_mut(), place)
            }
        };
        transfer::run(&file, 0, set).unwrap();
        // Wine takes the call and forgets it.
        let found = hindrances(&file).unwrap();
        assert!(found.is_empty() || found == ["sparse"], "{found:?}");
    }

    #[test]
    fn bypass_io_is_asked_about_without_harm() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [7; 4096]).unwrap();
        let file = files::open_without_waiting(&path).unwrap().0;
        if let Ok(Err(driver)) = bypass_io(&file) {
            assert!(driver.contains("status 0x"), "{driver}");
        }
        let mut bytes = [0; 4096];
        assert_eq!(files::read_at(&file, &mut bytes, 0).unwrap(), 4096);
    }
}
