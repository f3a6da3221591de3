//! The device below a file system, as far as it matters for reads. Windows does not tell queues and NUMA nodes of
//! drives without administrator rights.
#![allow(unsafe_code)]

use super::{files, transfer};
use std::{ffi::c_void, fmt, fs::File, io, ptr};
use windows_sys::Win32::{
    Foundation::STATUS_SUCCESS,
    Storage::FileSystem::{
        FILE_ATTRIBUTE_COMPRESSED, FILE_ATTRIBUTE_ENCRYPTED, FILE_ATTRIBUTE_OFFLINE,
        FILE_ATTRIBUTE_RECALL_ON_DATA_ACCESS, FILE_ATTRIBUTE_SPARSE_FILE, FILE_BASIC_INFO, FILE_STORAGE_INFO,
    },
    System::{
        IO::DeviceIoControl,
        Ioctl::{
            FS_BPIO_INPUT, FS_BPIO_OP_QUERY, FS_BPIO_OUTPUT, FSBPIO_OUTFL_COMPATIBLE_STORAGE_DRIVER,
            FSBPIO_OUTFL_FILTER_ATTACH_BLOCKED, FSCTL_MANAGE_BYPASS_IO,
        },
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
    /// The alignment of transfers past the cache.
    pub logical: u32,
    /// The physical sector size of the drive.
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

/// Properties of a file that make its reads slower, such as compression.
///
/// # Errors
/// The system's.
pub fn hindrances(file: &File) -> io::Result<Vec<&'static str>> {
    let basic: FILE_BASIC_INFO = files::information(file)?;
    Ok(hindrances_in(basic.FileAttributes))
}

fn hindrances_in(attributes: u32) -> Vec<&'static str> {
    const NAMES: [(u32, &str); 4] = [
        (FILE_ATTRIBUTE_COMPRESSED, "compressed"),
        (FILE_ATTRIBUTE_ENCRYPTED, "encrypted"),
        (FILE_ATTRIBUTE_SPARSE_FILE, "sparse"),
        (FILE_ATTRIBUTE_OFFLINE | FILE_ATTRIBUTE_RECALL_ON_DATA_ACCESS, "not stored on this machine"),
    ];
    NAMES.iter().filter(|(flags, _)| attributes & flags != 0).map(|(_, name)| *name).collect()
}

/// What the system says of BypassIO for a file: reads that bypass the file system's filters, from Windows 11 on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BypassIo {
    /// The driver that does not let reads bypass it, and why; `None` if they can.
    pub refusal: Option<String>,
    /// Whether the driver of the drive is made for it.
    pub has_storage_driver: bool,
    /// Whether a filter was kept from the volume, as it would be in the way.
    pub blocks_filters: bool,
}

impl fmt::Display for BypassIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.refusal {
            None => f.write_str("can be used here")?,
            Some(refusal) => write!(f, "a driver is in its way: {refusal}")?,
        }
        let driver = if self.has_storage_driver { "supports it" } else { "does not support it" };
        let filters = if self.blocks_filters { ", and a filter was kept from the volume for it" } else { "" };
        write!(f, "; the driver of the drive {driver}{filters}")
    }
}

/// Asks whether reads of a file can bypass the file system's filters.
///
/// # Errors
/// The system's, if it or the file system has no such thing.
pub fn bypass_io(file: &File) -> io::Result<BypassIo> {
    let input = FS_BPIO_INPUT { Operation: FS_BPIO_OP_QUERY, ..Default::default() };
    let mut output = FS_BPIO_OUTPUT::default();
    let (from, from_len) = ((&raw const input).cast::<c_void>(), size_of::<FS_BPIO_INPUT>() as u32);
    let (to, to_len) = ((&raw mut output).cast::<c_void>(), size_of::<FS_BPIO_OUTPUT>() as u32);
    // SAFETY: `run` returns once the call is over; both structures outlive it, and their lengths are told.
    transfer::run(file, 0, |handle, place| unsafe {
        DeviceIoControl(handle, FSCTL_MANAGE_BYPASS_IO, from, from_len, to, to_len, ptr::null_mut(), place)
    })
    .map_err(|error| {
        io::Error::new(error.kind(), format!("this system or file system does not have it: {error}"))
    })?;
    Ok(verdict(&output))
}

fn verdict(output: &FS_BPIO_OUTPUT) -> BypassIo {
    // SAFETY: numbers, which are all zero unless the system has written them.
    let found = unsafe { output.Anonymous.Query };
    // Lengths in characters.
    let text = |units: &[u16], len: u16| {
        let units = units.get(..len.into()).unwrap_or(units);
        let end = units.iter().position(|&unit| unit == 0).unwrap_or(units.len());
        String::from_utf16_lossy(&units[..end])
    };
    let refusal = (found.OpStatus.cast_signed() != STATUS_SUCCESS).then(|| {
        let driver = text(&found.FailingDriverName, found.FailingDriverNameLen);
        let reason = text(&found.FailureReason, found.FailureReasonLen);
        format!("{driver}: {reason} (status {:#010x})", found.OpStatus)
    });
    BypassIo {
        refusal,
        has_storage_driver: output.OutFlags & FSBPIO_OUTFL_COMPATIBLE_STORAGE_DRIVER != 0,
        blocks_filters: output.OutFlags & FSBPIO_OUTFL_FILTER_ATTACH_BLOCKED != 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use windows_sys::Win32::System::Ioctl::FS_BPIO_RESULTS;

    #[test]
    fn attributes_are_told_by_name() {
        assert_eq!(hindrances_in(0x20), [""; 0]);
        for (attributes, name) in [
            (0x200, "sparse"),
            (0x800, "compressed"),
            (0x1000, "not stored on this machine"),
            (0x4000, "encrypted"),
            (0x40_0000, "not stored on this machine"),
        ] {
            assert_eq!(hindrances_in(attributes | 0x20), [name]);
        }
        assert_eq!(hindrances_in(0xA00), ["compressed", "sparse"]);
    }

    #[test]
    fn what_the_system_says_of_bypass_io_is_told_in_full() {
        let mut output = FS_BPIO_OUTPUT { OutFlags: 8, ..Default::default() };
        let none = BypassIo { refusal: None, has_storage_driver: true, blocks_filters: false };
        assert_eq!(verdict(&output), none);

        let mut results = FS_BPIO_RESULTS { OpStatus: 0xC000_00BB, ..Default::default() };
        let fill = |units: &mut [u16], text: &str| {
            units.iter_mut().zip(text.encode_utf16()).for_each(|(unit, code)| *unit = code);
            text.encode_utf16().count() as u16
        };
        results.FailingDriverNameLen = fill(&mut results.FailingDriverName, "filter.sys");
        results.FailureReasonLen = fill(&mut results.FailureReason, "it encrypts");
        output.OutFlags = 4;
        let mut refused = |results: FS_BPIO_RESULTS| {
            output.Anonymous.Query = results;
            let found = verdict(&output);
            assert!(!found.has_storage_driver && found.blocks_filters, "{found:?}");
            found.refusal.unwrap()
        };
        assert_eq!(refused(results), "filter.sys: it encrypts (status 0xc00000bb)");
        // A zero ends a text, and so does the end of its room.
        results.FailingDriverNameLen = 32;
        results.FailureReasonLen = u16::MAX;
        assert_eq!(refused(results), "filter.sys: it encrypts (status 0xc00000bb)");
        results.FailureReason = [u16::from(b'x'); 128];
        assert_eq!(refused(results), format!("filter.sys: {} (status 0xc00000bb)", "x".repeat(128)));
    }

    #[test]
    fn bypass_io_names_the_driver_in_its_way() {
        let text = |refusal: Option<&str>, has_storage_driver, blocks_filters| {
            let refusal = refusal.map(str::to_owned);
            BypassIo { refusal, has_storage_driver, blocks_filters }.to_string()
        };
        assert_eq!(text(None, true, false), "can be used here; the driver of the drive supports it");
        assert_eq!(
            text(Some("filter.sys: it encrypts"), false, true),
            "a driver is in its way: filter.sys: it encrypts; the driver of the drive does not support it, \
             and a filter was kept from the volume for it"
        );
    }

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
        if let Ok(BypassIo { refusal: Some(driver), .. }) = bypass_io(&file) {
            assert!(driver.contains("status 0x"), "{driver}");
        }
        let mut bytes = [0; 4096];
        assert_eq!(files::read_at(&file, &mut bytes, 0).unwrap(), 4096);
    }
}
