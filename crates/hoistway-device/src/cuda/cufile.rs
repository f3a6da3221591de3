//! cuFile, NVIDIA's library for GPUDirect Storage, found at run time: files and device memory that it knows, reads
//! and writes between them.
//!
//! Its batches are not used: it counts no batched read by path, so that nothing could prove one direct, and on some
//! file systems they never are. Several threads read at the same time instead.
//!
//! Opening it proves nothing: it copies through host memory where the direct path is missing, and says that all is
//! well. `proof` finds out which path reads take. Layouts and codes are those of `cufile.h` 1.20.
#![allow(unsafe_code)]

use super::{
    Cuda, CudaDevice,
    cufile_error::{CuFileError, check, explain, outcome},
    descriptor::{self, StandardInput},
    number_text,
};
use crate::{
    CopyDirection, DirectLibrary, Error, PathCounts, Result, Unavailable,
    backend::Direct,
    driver::{
        Driver,
        library::{self, functions},
    },
    fork::Once,
};
use libloading::Library;
use std::{
    ffi::{CString, OsString, c_char, c_int, c_long, c_uint, c_void},
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Status {
    pub(super) code: c_int,
    pub(super) cuda: c_int,
}

/// `CUfileDescr_t`.
#[repr(C)]
pub(super) struct FileDescription {
    kind: c_int,
    descriptor: FileHandle,
    operations: *const c_void,
}

/// The union in `CUfileDescr_t`.
#[repr(C)]
pub(super) union FileHandle {
    descriptor: c_int,
    _handle: *mut c_void,
}

/// `CUfileDrvProps_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Properties {
    nvfs_major: c_uint,
    nvfs_minor: c_uint,
    _poll_threshold: usize,
    _max_direct_io: usize,
    _status_flags: c_uint,
    _control_flags: c_uint,
    feature_flags: c_uint,
    _max_device_cache: c_uint,
    _per_buffer_cache: c_uint,
    _max_pinned: c_uint,
    _max_batch: c_uint,
    _max_batch_timeout_ms: c_uint,
}

functions! {
    /// The functions, each under the name of what it does.
    returning Status;
    required {
        open = "cuFileDriverOpen"();
        properties = "cuFileDriverGetProperties"(*mut Properties);
        register_file = "cuFileHandleRegister"(*mut *mut c_void, *mut FileDescription);
        deregister_file = "cuFileHandleDeregister"(*mut c_void) -> ();
        register_buffer = "cuFileBufRegister"(u64, usize, c_int);
        deregister_buffer = "cuFileBufDeregister"(u64);
        read = "cuFileRead"(*mut c_void, u64, usize, i64, i64) -> isize;
        write = "cuFileWrite"(*mut c_void, u64, usize, i64, i64) -> isize;
        use_count = "cuFileUseCount"() -> c_long;
    }
    optional {
        version = "cuFileGetVersion"(*mut c_int);
        set_flag = "cuFileSetParameterBool"(c_int, bool);
        set_text = "cuFileSetParameterString"(c_int, *const c_char);
        set_statistics = "cuFileSetStatsLevel"(c_int);
        start_statistics = "cuFileStatsStart"();
        statistics = "cuFileGetStatsL3"(*mut c_void);
    }
}

/// cuFile, its driver open.
pub(super) struct CuFile {
    functions: Functions,
    properties: Properties,
    /// Such as 1.20; older libraries do not say.
    version: Option<String>,
    path: PathBuf,
}

impl CuFile {
    /// The library, loaded and opened at the first call.
    pub(super) fn get() -> std::result::Result<&'static Self, Unavailable> {
        static CUFILE: Once<std::result::Result<CuFile, Unavailable>> = Once::new();
        let forked =
            |_| Unavailable::new("cuFile was opened before fork()", "start workers with the method 'spawn'");
        CUFILE.get_or_make(Self::load).map_err(forked)?.as_ref().map_err(Clone::clone)
    }

    /// Whether it says that there is a direct path for some file systems. No proof: see `route::gds`.
    fn has_direct_path(&self) -> bool {
        /// `CU_FILE_P2P_SUPPORTED`.
        const P2P_SUPPORTED: c_uint = 4;
        let Properties { nvfs_major, nvfs_minor, feature_flags, .. } = self.properties;
        (nvfs_major, nvfs_minor) != (0, 0) || feature_flags & (1 << P2P_SUPPORTED) != 0
    }

    /// What it is, for people.
    pub(super) fn describe(&self) -> String {
        let Properties { nvfs_major, nvfs_minor, .. } = self.properties;
        let version = self.version.as_deref().unwrap_or("of unknown version");
        let nvfs = match (nvfs_major, nvfs_minor) {
            (0, 0) => "without nvidia-fs".to_owned(),
            (major, minor) => format!("with nvidia-fs {major}.{minor}"),
        };
        format!("{version} {nvfs}, {}", self.path.display())
    }

    fn load() -> std::result::Result<Self, Unavailable> {
        if cfg!(not(target_os = "linux")) {
            return Err(Unavailable::new("cuFile is a library of Linux", "use route staged"));
        }
        // Version 1.20 waits for this file for ever.
        if !Path::new("/proc/modules").exists() && !is_stand_in() {
            let reason =
                "this kernel shows no loadable modules (/proc/modules), for which cuFile waits for ever";
            return Err(Unavailable::new(reason, "use route staged"));
        }
        let (library, path) = open_library()?;
        let functions = Functions::find(&library).map_err(|symbol| {
            let reason = format!("{} has no function {symbol}", path.display());
            Unavailable::new(reason, "install cuFile of CUDA 12 or later")
        })?;
        // It may have threads, and is meant to stay.
        std::mem::forget(library);
        let mut cufile = Self { functions, properties: Properties::default(), version: None, path };
        // To open it allocates and pins.
        let driver = Driver::<Cuda>::get()?;
        let _relaxed = driver.relax();
        cufile.configure();
        cufile.open().map_err(|error| {
            let (why, fix) = explain(error.code);
            Unavailable::new(format!("cuFile does not open: {error}: {why}"), fix)
        })?;
        Ok(cufile)
    }

    /// What can only be set before the driver is open. Best effort: another user of this process may have opened it,
    /// and older versions know less.
    fn configure(&self) {
        /// `CUFILE_PARAM_USE_PCIP2PDMA`.
        const USE_P2PDMA: c_int = 7;
        /// `CUFILE_PARAM_LOG_DIR`.
        const LOG_DIRECTORY: c_int = 2;
        /// Reads of each device, by path.
        const STATISTICS_BY_DEVICE: c_int = 3;
        // SAFETY: asks for a number.
        if unsafe { (self.functions.use_count)() } > 0 {
            return;
        }
        if let Some(set) = self.functions.set_flag
            && !Path::new("/proc/driver/nvidia-fs").exists()
        {
            // SAFETY: sets a parameter by value.
            unsafe { set(USE_P2PDMA, true) };
        }
        // Else it writes into the current directory.
        if let (Some(set), None, Ok(directory)) = (
            self.functions.set_text,
            std::env::var_os("CUFILE_LOGFILE_PATH"),
            CString::new(std::env::temp_dir().into_os_string().into_encoded_bytes()),
        ) {
            // SAFETY: the text is copied.
            unsafe { set(LOG_DIRECTORY, directory.as_ptr()) };
        }
        if let Some(set) = self.functions.set_statistics {
            // SAFETY: sets a level.
            unsafe { set(STATISTICS_BY_DEVICE) };
        }
    }

    fn open(&mut self) -> std::result::Result<(), CuFileError> {
        let standard_input = StandardInput::keep();
        // SAFETY: no arguments.
        let opened = check("cuFileDriverOpen", unsafe { (self.functions.open)() });
        standard_input.restore();
        opened?;
        // SAFETY: writes the structure, which is that of all versions of CUDA 12 and 13.
        check("cuFileDriverGetProperties", unsafe { (self.functions.properties)(&mut self.properties) })?;
        if let Some(start) = self.functions.start_statistics {
            // SAFETY: no arguments. Without statistics there is no proof, which is said there.
            unsafe { start() };
        }
        self.version = self.functions.version.and_then(|get| {
            let mut version = 0;
            // SAFETY: writes one integer.
            let code = unsafe { get(&mut version) }.code;
            (code == 0).then(|| number_text(version))
        });
        Ok(())
    }

    /// How many reads into a device went each way since the library was opened, by all users of it in this process;
    /// `None` if this version does not count.
    fn counters(&self, uuid: &[u8; 16]) -> Option<PathCounts> {
        Counters::of_reads(&self.statistics()?, uuid).map(Into::into)
    }

    /// As [`CuFile::counters`], of writes from a device.
    fn write_counters(&self, uuid: &[u8; 16]) -> Option<PathCounts> {
        Counters::of_writes(&self.statistics()?, uuid).map(Into::into)
    }

    fn statistics(&self) -> Option<Vec<u64>> {
        const PLENTY: usize = 64 << 10;
        let get = self.functions.statistics?;
        let mut buffer = vec![0u64; PLENTY / 8];
        // SAFETY: `CUfileStatsLevel3_t` takes 5 KiB in the newest version, and is made of 64-bit numbers.
        let code = unsafe { get(buffer.as_mut_ptr().cast()) }.code;
        (code == 0).then_some(buffer)
    }
}

/// Reads into one device, or writes from it, by path: a part of `CUfilePerGpuStats_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counters {
    /// By PCI P2PDMA.
    p2p: u64,
    /// By nvidia-fs.
    nvfs: u64,
    /// Through host memory.
    posix: u64,
}

impl From<Counters> for PathCounts {
    fn from(counters: Counters) -> Self {
        let direct = vec![("P2PDMA", counters.p2p), ("nvidia-fs", counters.nvfs)];
        Self { direct, through_host: counters.posix }
    }
}

impl Counters {
    /// After the UUID: bytes, rate, utilisation, duration and number of reads, then the numbers by path.
    fn of_reads(statistics: &[u64], uuid: &[u8; 16]) -> Option<Self> {
        Self::at(Self::of_device(statistics, uuid)?, 5)
    }

    /// After the reads: five numbers of theirs more, then the same of writes.
    fn of_writes(statistics: &[u64], uuid: &[u8; 16]) -> Option<Self> {
        Self::at(Self::of_device(statistics, uuid)?, 5 + 3 + 5 + 5)
    }

    fn at(numbers: &[u64], place: usize) -> Option<Self> {
        let counters = numbers.get(place..place + 3)?;
        Some(Self { p2p: counters[0], nvfs: counters[1], posix: counters[2] })
    }

    /// What follows the UUID of a device: what stands before the devices grows from version to version.
    fn of_device<'a>(statistics: &'a [u64], uuid: &[u8; 16]) -> Option<&'a [u64]> {
        let (first, last) = uuid.split_at(8);
        let word = |bytes: &[u8]| bytes.try_into().map(u64::from_ne_bytes).ok();
        let pair = [word(first)?, word(last)?];
        let place = statistics.windows(2).position(|words| words == pair)?;
        statistics.get(place + 2..)
    }
}

/// A file that is registered with cuFile.
#[derive(Debug)]
pub struct RegisteredFile {
    handle: *mut c_void,
    /// Open as long as it is registered.
    _file: Arc<File>,
}

// SAFETY: cuFile may be called from any thread, with any handle.
unsafe impl Send for RegisteredFile {}
// SAFETY: as above.
unsafe impl Sync for RegisteredFile {}

impl RegisteredFile {
    /// Registers a file that was opened with `O_DIRECT`: for reading, writing, or both. It gets a descriptor of its own.
    ///
    /// # Errors
    /// Why cuFile cannot be used, or does not take the file.
    pub fn register(file: &File) -> std::result::Result<Self, Unavailable> {
        CuFile::get()?;
        let file = file.try_clone().map_err(|error| {
            Unavailable::new(format!("no file descriptor is left: {error}"), "raise ulimit -n")
        })?;
        Self::register_shared(Arc::new(file))
    }

    /// Does what [`register`](Self::register) does by the descriptor of `file`, which must not be registered already.
    ///
    /// # Errors
    /// Why cuFile cannot be used, or does not take the file.
    pub fn register_shared(file: Arc<File>) -> std::result::Result<Self, Unavailable> {
        let cufile = CuFile::get()?;
        /// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
        const DESCRIPTOR: c_int = 1;
        let mut description = FileDescription {
            kind: DESCRIPTOR,
            descriptor: FileHandle { descriptor: descriptor::of(&file) },
            operations: std::ptr::null(),
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle, reads the description.
        let status = unsafe { (cufile.functions.register_file)(&mut handle, &mut description) };
        check("cuFileHandleRegister", status).map_err(CuFileError::into_unavailable)?;
        Ok(Self { handle, _file: file })
    }
}

impl Drop for RegisteredFile {
    fn drop(&mut self) {
        if let Ok(cufile) = CuFile::get() {
            // SAFETY: registered once, deregistered once; requests hold the file.
            unsafe { (cufile.functions.deregister_file)(self.handle) };
        }
    }
}

impl Direct for CudaDevice {
    fn check(&self) -> std::result::Result<(), Unavailable> {
        if CuFile::get()?.has_direct_path() {
            return Ok(());
        }
        let reason = "cuFile runs in compatibility mode: it has neither nvidia-fs nor P2PDMA, and copies through host memory";
        Err(Unavailable::new(reason, "load the module nvidia-fs, or set P2PDMA up: docs/gpu.md says how"))
    }

    unsafe fn register(&self, address: u64, len: u64) -> Result<()> {
        let unavailable = |why| Error::DeviceUnavailable { device: self.info.id.to_string(), why };
        let cufile = CuFile::get().map_err(unavailable)?;
        // cuFile keeps streams and buffers of its own in each context that it meets, and goes on using them.
        self.keep_context()?;
        let _entered = self.enter()?;
        let bytes = usize::try_from(len).unwrap_or(usize::MAX);
        // SAFETY: the memory is the device's and stays until it is deregistered.
        let status = unsafe { (cufile.functions.register_buffer)(address, bytes, 0) };
        check("cuFileBufRegister", status).map_err(|error| unavailable(error.into_unavailable()))
    }

    unsafe fn deregister(&self, address: u64) {
        if let (Ok(cufile), Ok(_entered)) = (CuFile::get(), self.enter_to_give_back()) {
            // SAFETY: registered once, deregistered once; no request is in flight.
            unsafe { (cufile.functions.deregister_buffer)(address) };
        }
    }

    unsafe fn transfer(
        &self,
        direction: CopyDirection,
        file: &RegisteredFile,
        file_offset: i64,
        address: u64,
        offset: i64,
        len: usize,
    ) -> io::Result<usize> {
        let cufile = CuFile::get().map_err(|why| io::Error::other(why.to_string()))?;
        let _entered = self.enter().map_err(io::Error::other)?;
        let function = match direction {
            CopyDirection::ToDevice => cufile.functions.read,
            CopyDirection::ToHost => cufile.functions.write,
        };
        // SAFETY: both are registered, and the range lies inside the memory.
        let result = unsafe { function(file.handle, address, len, file_offset, offset) };
        // For results of -1 the system's own error is set.
        outcome(result, io::Error::last_os_error)
    }

    fn library(&self) -> &'static DirectLibrary {
        &DirectLibrary {
            name: "cuFile",
            check: "see what gdscheck -p says of this file system",
            log: "check gdscheck -p and cufile.log in the temporary directory",
            counting_version: "install cuFile of CUDA 13: its package libcufile or, for Python, 'pip install nvidia-cufile'",
        }
    }

    fn reads(&self) -> Option<PathCounts> {
        CuFile::get().ok()?.counters(&self.uuid)
    }

    fn writes(&self) -> Option<PathCounts> {
        CuFile::get().ok()?.write_counters(&self.uuid)
    }
}

/// Whether a test has named the library.
pub(super) fn is_stand_in() -> bool {
    cfg!(feature = "stand-in") && std::env::var_os("HOISTWAY_CUFILE").is_some()
}

/// The first library that counts reads by path, which alone can prove them direct; else the first of all. Those of
/// packages come before the system's, which may be older.
fn open_library() -> std::result::Result<(Library, PathBuf), Unavailable> {
    /// The name that it has in its packages, and that of a toolkit's link.
    const NAMES: [&str; 2] = ["libcufile.so.0", "libcufile.so"];
    let mut candidates: Vec<OsString> = Vec::new();
    if is_stand_in() {
        candidates.extend(std::env::var_os("HOISTWAY_CUFILE"));
    } else {
        let directories = library::searched_directories();
        let system = [PathBuf::from("/usr/local/cuda/lib64")];
        let listed = directories.iter().chain(&system).map(|directory| directory.join(NAMES[0]));
        candidates
            .extend(listed.filter(|path| fs::exists(path).unwrap_or(false)).map(PathBuf::into_os_string));
        candidates.extend(NAMES.map(OsString::from));
    }
    let (mut tried, mut silent) = (Vec::new(), None);
    for name in candidates {
        match library::open(&name) {
            Ok(library) if counts_by_path(&library) => return Ok((library, name.into())),
            Ok(library) => _ = silent.get_or_insert((library, name.into())),
            Err(error) => tried.push(library::reason(&error)),
        }
    }
    let fix = "install cuFile of CUDA 13: its package libcufile or, for Python, 'pip install nvidia-cufile'";
    silent.ok_or_else(|| Unavailable::new(format!("cuFile was not found: {}", tried.join("; ")), fix))
}

fn counts_by_path(library: &Library) -> bool {
    // SAFETY: only asks whether the symbol exists.
    unsafe { library.get::<unsafe extern "C" fn()>(b"cuFileGetStatsL3\0").is_ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes that a C compiler gives the structures of `cufile.h` 1.20.
    #[test]
    fn structures_have_the_layout_of_the_header() {
        assert_eq!(size_of::<Status>(), 8);
        assert_eq!(size_of::<FileDescription>(), 24);
        assert_eq!(size_of::<Properties>(), 56);
    }

    #[test]
    fn a_devices_counters_are_found_wherever_they_stand() {
        let uuid = *b"0123456789abcdef";
        let words = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().unwrap());
        for before in [0, 78, 143] {
            let mut statistics = vec![7; before];
            statistics.extend([
                words(&uuid[..8]),
                words(&uuid[8..]),
                1,
                2,
                3,
                4,
                60,
                10,
                20,
                30,
                5,
                0,
                0,
                0,
                0,
            ]);
            statistics.extend([1, 2, 3, 4, 150, 40, 50, 60, 5]);
            let found = Counters::of_reads(&statistics, &uuid);
            assert_eq!(found, Some(Counters { p2p: 10, nvfs: 20, posix: 30 }));
            let found = Counters::of_writes(&statistics, &uuid);
            assert_eq!(found, Some(Counters { p2p: 40, nvfs: 50, posix: 60 }));
            assert_eq!(Counters::of_reads(&statistics[..before + 9], &uuid), None);
            assert_eq!(Counters::of_writes(&statistics[..before + 22], &uuid), None);
            assert_eq!(Counters::of_reads(&statistics, b"another device's"), None);
        }
    }
}
