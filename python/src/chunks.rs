//! Reads of parts of files into memory of the caller's, for `hoistway.compat.threefs`.
#![allow(unsafe_code)]

use crate::{
    TICK,
    error::{IntoPython, exception_of},
    interruptible,
    process::Detached,
};
use hoistway::{
    ByteRange, DeviceId, Error, Route, UsrbioClient,
    catalog::{header_texts, safetensors::LENGTH_PREFIX_BYTES},
    device::{self, Device, Fence},
    read::{Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target},
    route,
};
use pyo3::prelude::*;
use std::{
    collections::{BTreeSet, HashMap},
    fs, io,
    ops::ControlFlow,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// Longest single read, where as many may be in flight as the buffer has room for. Longer ones keep no network busier,
/// and are copied from memory rather than from the processor's cache.
const CHUNK_BYTES: u64 = 2 << 20;
/// Longest single read where few may be in flight.
const MAX_CHUNK_BYTES: u64 = 8 << 20;
/// Reads that should be in flight, whatever the size of the buffer.
const MIN_IN_FLIGHT: u64 = 8;
const BLOCK_BYTES: u64 = 4096;
/// How long a device is asked whether it still writes.
const DOUBT_PATIENCE: Duration = Duration::from_secs(2);

/// Reads parts of files, those of one 3FS if there is a mount point. Threads may share it.
#[pyclass(frozen, module = "hoistway")]
pub(crate) struct ChunkReader {
    /// Where the one 3FS is mounted that is read from.
    mount: Option<PathBuf>,
    options: ReaderOptions,
    state: Detached<Mutex<State>>,
    /// Devices that may still write to the memory of reads that have failed.
    doubts: Mutex<BTreeSet<DeviceId>>,
}

#[derive(Default)]
struct State {
    /// Made with the first read; anew after it was closed or its daemon was lost.
    reader: Option<Arc<Reader>>,
    files: HashMap<PathBuf, (ReadFile, Stamp)>,
    /// The number of the mount that they belong to.
    device: Option<u64>,
}

/// The stamp of a file, which changes if its path leads to another file or the file was written.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

#[pymethods]
impl ChunkReader {
    #[new]
    fn new(
        py: Python<'_>,
        mount_point: Option<PathBuf>,
        entries: u64,
        buffer_size: u64,
        client: &str,
        directories: Vec<PathBuf>,
    ) -> PyResult<Self> {
        let route = if mount_point.is_some() { Route::Usrbio } else { Route::Auto };
        let options = options(route, entries, buffer_size, client, directories).into_python(py)?;
        if let Some(point) = &mount_point {
            let probe = || route::probe_3fs(point, options.usrbio, &options.usrbio_directories);
            py.detach(probe).into_python(py)?;
        }
        let state = Detached::new(Mutex::default());
        Ok(Self { mount: mount_point, options, state, doubts: Mutex::default() })
    }

    /// Reads up to `total_length` bytes, fewer only where the file ends, to `dev_ptr`: memory of the host or of a
    /// device, or 0 to forget them. No single read is longer than `chunk_size`, unless that is 0. Bytes get to a device after
    /// what is queued on `stream` by now, else on the legacy default stream. The cause of an error is a
    /// `DeviceUnavailableError` if it is unknown whether a device still writes to `dev_ptr`: `close` tells when it does not.
    #[pyo3(signature = (path, dev_ptr, file_offset, total_length, chunk_size, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "as Python's method has them")]
    fn read(
        &self,
        py: Python<'_>,
        path: PathBuf,
        dev_ptr: u64,
        file_offset: u64,
        total_length: u64,
        chunk_size: u64,
        stream: Option<usize>,
    ) -> PyResult<u64> {
        let (reader, file) = py.detach(|| self.open(&path)).into_python(py)?;
        // The last to drop a reader or file closes it, which may call a driver.
        let (reader, file) = (Detached::new(reader), Detached::new(file));
        let len = total_length.min(file.len().saturating_sub(file_offset));
        if len == 0 {
            return Ok(0);
        }
        let submit = || -> hoistway::Result<_> {
            let device = if dev_ptr == 0 { DeviceId::Cpu } else { device::device_of(dev_ptr)? };
            let requests = requests(&file, (device, dev_ptr), file_offset, len, chunk_size, stream)?;
            Ok((device, Detached::new(reader.submit(requests, Priority::Demand)?)))
        };
        let (device, batch) = py.detach(submit).into_python(py)?;
        let interrupt = loop {
            if py.detach(|| batch.wait_within(TICK).is_some()) {
                break None;
            }
            if let Err(interrupt) = py.check_signals() {
                break Some(interrupt);
            }
        };
        let has_failed = interrupt.is_none();
        let error = match (interrupt, batch.wait_within(Duration::ZERO)) {
            (None, Some(Err(error))) => exception_of(py, error),
            (None, _) => return Ok(len),
            (Some(interrupt), _) => interrupt,
        };
        let settled = py.detach(|| {
            // That waits for what is under way.
            drop(batch);
            if has_failed {
                self.forget(reader.into_inner());
            }
            self.settle(device, dev_ptr)
        });
        if let Err(doubt) = settled {
            error.set_cause(py, Some(exception_of(py, &doubt)));
        }
        Err(error)
    }

    /// The headers of safetensors files as text, and the files' lengths.
    fn header_texts(
        &self,
        py: Python<'_>,
        paths: Vec<PathBuf>,
        num_threads: usize,
    ) -> PyResult<Vec<(String, u64, u64)>> {
        let texts = interruptible(py, |go_on| {
            let texts = header_texts(&paths, num_threads)?;
            for path in &paths {
                if let ControlFlow::Break(()) = go_on() {
                    return Err(Error::Cancelled);
                }
                self.open(path)?;
            }
            Ok(texts)
        })?;
        let with_prefix = |(text, file_len): (String, u64)| {
            let header_len = LENGTH_PREFIX_BYTES + text.len() as u64;
            (text, header_len, file_len)
        };
        Ok(texts.into_iter().map(with_prefix).collect())
    }

    /// Whether this file is open.
    fn has_file(&self, path: PathBuf) -> bool {
        self.state().files.contains_key(&path)
    }

    /// Closes files, rings and memory. Another read opens them again. Fails as long as it is unknown whether a device still writes
    /// to memory of reads that have failed.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let close = || {
            let state = std::mem::take(&mut *self.state());
            drop(state);
            self.end_doubts()
        };
        py.detach(close).into_python(py)
    }
}

impl ChunkReader {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An open file, and its reader.
    fn open(&self, path: &Path) -> hoistway::Result<(Arc<Reader>, ReadFile)> {
        let stat = |path: &Path| fs::metadata(path).map_err(|source| (path.to_owned(), source));
        // The mount is asked each time: a daemon that came back may have made another one. It is asked before the file: if the
        // daemon dies in between, the file is not found. The other way round, it would seem to lie elsewhere.
        let stats = || Ok((self.mount.as_deref().map(stat).transpose()?, stat(path)?));
        let file = match stats() {
            Ok((point, stat)) => {
                if let (Some(mount), Some(point)) = (&self.mount, point) {
                    if point.dev() != stat.dev() {
                        let reason = format!("it does not lie on the 3FS at {}", mount.display());
                        let why = route::Unavailable { reason, fix: "make a reader for its mount".into() };
                        return Err(Error::RouteUnavailable {
                            route: Route::Usrbio,
                            path: Some(path.to_owned()),
                            why,
                        });
                    }
                    self.keep_to(stat.dev());
                }
                let stamp = Stamp::of(&stat);
                let known = self.state().files.get(path).filter(|(_, known)| *known == stamp).cloned();
                match known {
                    Some((file, _)) => file,
                    None => {
                        let file = ReadFile::open(path)?;
                        self.state().files.insert(path.to_owned(), (file.clone(), stamp));
                        file
                    }
                }
            }
            Err((asked, source)) => {
                if !matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) {
                    // The mount may be no more. Files that stay open would keep its remains.
                    let forgotten = std::mem::take(&mut *self.state());
                    drop(forgotten);
                }
                // Opening the file says best what is wrong, if something is.
                return Err(ReadFile::open(path).err().unwrap_or(Error::Io {
                    operation: "stat",
                    path: asked,
                    tensor: None,
                    range: None,
                    source,
                }));
            }
        };
        let mut state = self.state();
        let reader = match &state.reader {
            Some(reader) => reader.clone(),
            None => state.reader.insert(Arc::new(Reader::new(&self.options)?)).clone(),
        };
        Ok((reader, file))
    }

    /// Whatever belongs to a mount that was there before this one is forgotten.
    fn keep_to(&self, device: u64) {
        let mut state = self.state();
        if state.device != Some(device) {
            let forgotten =
                std::mem::replace(&mut *state, State { device: Some(device), ..State::default() });
            drop(state);
            drop(forgotten);
        }
    }

    /// After an error, which may be that of a daemon which is no more: the next read begins anew.
    fn forget(&self, failed: Arc<Reader>) {
        let mut state = self.state();
        if state.reader.as_ref().is_some_and(|reader| Arc::ptr_eq(reader, &failed)) {
            let forgotten = std::mem::take(&mut *state);
            drop(state);
            drop(forgotten);
        }
    }
}

impl ChunkReader {
    /// Waits until a device does not write to `address` any more, after reads to it that have failed: their copies may be of
    /// unknown fate.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] if the device does not tell for two seconds.
    fn settle(&self, id: DeviceId, address: u64) -> hoistway::Result<()> {
        let Some(device) = Device::get(id) else { return Ok(()) };
        let until = Instant::now() + DOUBT_PATIENCE;
        loop {
            let Err(error) = device.regain() else { return Ok(()) };
            if Instant::now() < until {
                thread::sleep(TICK);
                continue;
            }
            self.doubts().insert(id);
            let reason = format!("it may still write to the memory at {address:#x}: {error}");
            let why = route::Unavailable { reason, fix: "keep that memory until close() succeeds".into() };
            return Err(Error::DeviceUnavailable { device: id.to_string(), why });
        }
    }

    /// Waits for devices that may still write to memory of reads that have failed.
    fn end_doubts(&self) -> hoistway::Result<()> {
        let doubts = self.doubts().clone();
        for id in doubts {
            if let Some(device) = Device::get(id) {
                device.regain()?;
            }
            self.doubts().remove(&id);
        }
        Ok(())
    }

    fn doubts(&self) -> MutexGuard<'_, BTreeSet<DeviceId>> {
        self.doubts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stamp {
    fn of(stat: &fs::Metadata) -> Self {
        Self {
            device: stat.dev(),
            inode: stat.ino(),
            len: stat.len(),
            modified: (stat.mtime(), stat.mtime_nsec()),
            changed: (stat.ctime(), stat.ctime_nsec()),
        }
    }
}

/// Whether USRBIO can be used on the 3FS at this path: an error that says why not.
#[pyfunction]
pub(crate) fn probe_3fs(
    py: Python<'_>,
    path: PathBuf,
    client: &str,
    directories: Vec<PathBuf>,
) -> PyResult<()> {
    let client = parse_client(client).into_python(py)?;
    py.detach(|| route::probe_3fs(&path, client, &directories)).into_python(py)
}

/// Where the 3FS is mounted that a path lies on.
#[pyfunction]
pub(crate) fn mount_point_of_3fs(py: Python<'_>, path: PathBuf) -> PyResult<PathBuf> {
    py.detach(|| route::mount_point_of_3fs(&path)).into_python(py)
}

/// Where a 3FS is mounted that this process sees.
#[pyfunction]
pub(crate) fn mount_points_of_3fs(py: Python<'_>) -> Vec<PathBuf> {
    py.detach(route::mount_points_of_3fs)
}

fn options(
    route: Route,
    entries: u64,
    buffer_size: u64,
    client: &str,
    usrbio_directories: Vec<PathBuf>,
) -> hoistway::Result<ReaderOptions> {
    if buffer_size < BLOCK_BYTES || entries == 0 {
        let (option, value, reason) = match entries {
            0 => ("entries", entries, "a reader needs at least one"),
            _ => ("buffer_size", buffer_size, "a reader needs at least 4096 bytes"),
        };
        return Err(Error::InvalidOption { option, value: value.to_string(), reason: reason.into() });
    }
    let chunk_bytes = (buffer_size / MIN_IN_FLIGHT).min(CHUNK_BYTES.max(buffer_size / entries));
    let chunk_bytes = (chunk_bytes / BLOCK_BYTES * BLOCK_BYTES).clamp(BLOCK_BYTES, MAX_CHUNK_BYTES);
    let most = ReaderOptions::MAX_IN_FLIGHT as u64;
    let in_flight = (buffer_size / chunk_bytes).min(entries).clamp(1, most) as usize;
    Ok(ReaderOptions::default()
        .route(route)
        .usrbio(parse_client(client)?)
        .usrbio_directories(usrbio_directories)
        .in_flight(in_flight)
        .chunk_bytes(chunk_bytes)
        .memory_budget_bytes(buffer_size))
}

fn parse_client(name: &str) -> hoistway::Result<UsrbioClient> {
    let mut options = hoistway::LoadOptions::default();
    options.set("usrbio", name)?;
    Ok(options.usrbio)
}

/// The reads of `len` bytes of a file, which has them, to an address of a device.
fn requests(
    file: &ReadFile,
    (device, address): (DeviceId, u64),
    offset: u64,
    len: u64,
    chunk_size: u64,
    stream: Option<usize>,
) -> hoistway::Result<Vec<ReadRequest>> {
    // Chunks of a few bytes would be many.
    let step = if chunk_size == 0 { len } else { chunk_size.max(BLOCK_BYTES) };
    let invalid = || Error::InvalidOption {
        option: "dev_ptr",
        value: format!("{address:#x}"),
        reason: format!("{len} bytes from there end past 2^64"),
    };
    address.checked_add(len).ok_or_else(invalid)?;
    let fence = match stream.filter(|_| !device.is_host()) {
        // SAFETY: the caller of `read_chunked` promises that it is a live stream of the device.
        Some(stream) => Some(unsafe { Fence::of_stream(&*Device::open(device)?, stream)? }),
        None => None,
    };
    let place = |position: u64| match (NonNull::new((address + position) as *mut u8), device) {
        (Some(start), DeviceId::Cpu) if address != 0 => {
            // SAFETY: the caller of `read_chunked` promises that `dev_ptr` is the beginning of so many bytes, used by no
            // other code during the call. The batch is waited for, or dropped, which waits, before the call returns.
            unsafe { Target::host(start) }
        }
        // SAFETY: as above; the driver says that the address is memory of that device.
        (Some(_), device) if !device.is_host() => unsafe { Target::device(device, address + position) },
        _ => Target::discard(),
    };
    let part = |position: u64| {
        let range = ByteRange::at(offset + position, step.min(len - position)).unwrap_or_default();
        let request = ReadRequest::new(file, range, place(position));
        match &fence {
            Some(fence) => request.after([fence.clone()]),
            None => request,
        }
    };
    Ok((0..len.div_ceil(step)).map(|part_number| part(part_number * step)).collect())
}
