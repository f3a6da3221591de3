//! Batches of reads into memory that the caller owns.
#![allow(unsafe_code)]

use crate::{
    handle::{self, held},
    hoistway_catalog,
    status::{Failure, call, hoistway_status, status_of},
    system, text,
    versioned::{self, Versioned},
};
use hoistway::{
    ByteRange, DeviceId,
    device::{Device, Fence},
    read::{Batch, Priority, ReadFile, ReadRequest, ReadStatus, Reader, ReaderOptions, Target},
};
use std::{
    collections::{HashMap, hash_map::Entry},
    ffi::{c_char, c_void},
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering},
    },
    time::{Duration, Instant},
};

/// `hoistway_read.target`: host memory.
pub const HOISTWAY_TARGET_HOST: i32 = 0;
/// `hoistway_read.target`: a CUDA device pointer, in the primary context of its device.
pub const HOISTWAY_TARGET_CUDA: i32 = 1;
/// `hoistway_read.target`: the bytes are passed to the function `sink`.
pub const HOISTWAY_TARGET_CALLBACK: i32 = 2;
/// `hoistway_read.target`: a HIP pointer to memory of a ROCm device.
pub const HOISTWAY_TARGET_ROCM: i32 = 3;

/// The device of a target and a number; `None` if that is negative, or the target is no device's.
pub(crate) fn device_of(target: i32, ordinal: i32) -> Option<DeviceId> {
    let ordinal = u32::try_from(ordinal).ok()?;
    match target {
        HOISTWAY_TARGET_CUDA => Some(DeviceId::Cuda(ordinal)),
        HOISTWAY_TARGET_ROCM => Some(DeviceId::Rocm(ordinal)),
        _ => None,
    }
}

/// The target and the number of a device. Of the host, the number is 0.
pub(crate) fn target_of(device: DeviceId) -> (i32, i32) {
    let (target, ordinal) = match device {
        DeviceId::Cuda(ordinal) => (HOISTWAY_TARGET_CUDA, ordinal),
        DeviceId::Rocm(ordinal) => (HOISTWAY_TARGET_ROCM, ordinal),
        _ => (HOISTWAY_TARGET_HOST, 0),
    };
    (target, i32::try_from(ordinal).unwrap_or(i32::MAX))
}

/// `hoistway_reader_options.flags`: do not advise huge pages for destinations of 2 MiB or more.
pub const HOISTWAY_SMALL_PAGES: u64 = 1;

/// Priority of reads that a caller waits for. They are read first.
pub const HOISTWAY_DEMAND: i32 = 0;
/// Priority of reads that a caller will probably need. With those of the background, they take at most half of the
/// reader's lanes, but at least one.
pub const HOISTWAY_PREFETCH: i32 = 1;
/// Priority of reads that no caller waits for. They begin after demand and prefetches.
pub const HOISTWAY_BACKGROUND: i32 = 2;

/// How often a waiting caller is told of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Threads and staging memory for reads, reused between batches.
pub struct hoistway_reader {
    reader: Arc<Reader>,
}

impl hoistway_reader {
    /// The reader, for what keeps it longer than the caller does.
    pub(crate) fn shared(&self) -> &Arc<Reader> {
        &self.reader
    }
}

/// A group of reads that were submitted together.
pub struct hoistway_batch {
    batch: Batch,
}

/// How a reader reads.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_reader_options {
    /// `sizeof(hoistway_reader_options)`.
    pub size: u64,
    /// "auto", "io_uring", "overlapped", "threads", "cached", "usrbio", "directstorage", "staged", "gds" or
    /// "gds-compat"; NULL for "auto".
    pub route: *const c_char,
    /// Limit of staging memory in bytes, for the host and for each device; 0 for 128 MiB.
    pub memory_budget_bytes: u64,
    /// Number of reads in flight; 0 for 16.
    pub in_flight: u64,
    /// `HOISTWAY_SMALL_PAGES` or 0.
    pub flags: u64,
}

// SAFETY: numbers and a pointer, of which the first is the size.
unsafe impl Versioned for hoistway_reader_options {
    const NAME: &str = "hoistway_reader_options";
    const FIRST_SIZE: usize = 40;
}

/// Receives the bytes of a read in pieces, in any order. `position` is the offset of the piece from the first byte of
/// the read. The reader calls it on its threads, for several reads at once. Return 0 to go on; any other number fails
/// the read. The function must return (no exception, no `longjmp`), must not wait for reads of the same reader, and
/// must not free a batch.
pub type hoistway_sink = Option<
    unsafe extern "C" fn(context: *mut c_void, position: u64, bytes: *const c_void, length: u64) -> i32,
>;

/// Reports the progress of a batch, on the thread that waits for it. Return `false` to cancel the batch. The function
/// must return (no exception, no `longjmp`), and must not free the batch.
pub type hoistway_progress =
    Option<unsafe extern "C" fn(context: *mut c_void, bytes_done: u64, bytes_total: u64) -> bool>;

/// A range of a file, and where its bytes go. Members that the target does not need are ignored.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_read {
    /// `sizeof(hoistway_read)`, the same for all reads of a batch.
    pub size: u64,
    /// The catalog that has the file, or NULL. The read gets the file whose header was read, or fails. It is refused if its range has
    /// bytes of a tensor that is big-endian, unless of single bytes, or of a type that is not known.
    pub catalog: *const hoistway_catalog,
    /// With a catalog: the number of the file.
    pub file: u64,
    /// Without a catalog: the path of the file, or NULL if `fd` names it.
    pub path: *const c_char,
    /// Without catalog and path: a descriptor of the open file. It stays the caller's, who may close it once the batch
    /// is submitted.
    pub fd: i32,
    /// One of `HOISTWAY_TARGET_…`.
    pub target: i32,
    /// Number of the device, for device memory.
    pub device: i32,
    /// Must be 0.
    pub reserved: u32,
    /// Where the range begins in the file, in bytes.
    pub offset: u64,
    /// Length of the range in bytes. A read delivers all of them, or fails.
    pub length: u64,
    /// Host memory, or a device pointer. It stays the caller's, but nothing else may use it until the read has ended.
    pub destination: *mut c_void,
    /// The function that receives the bytes, for `HOISTWAY_TARGET_CALLBACK`.
    pub sink: hoistway_sink,
    /// The first argument of `sink`.
    pub sink_context: *mut c_void,
    /// What messages call the read, such as the name of the tensor; may be NULL.
    pub name: *const c_char,
    /// Set to 1 plus the status, with release order, when the read ends; may be NULL. `hoistway_batch_status` may
    /// return `HOISTWAY_PENDING` for a moment longer.
    pub done: *mut i32,
    /// For device memory: a stream of the device, or NULL. The read writes after the work that is queued on the stream
    /// at submission. NULL is the legacy default stream if `event` is NULL too, else no stream. A stream that is being
    /// captured is an error.
    pub stream: *mut c_void,
    /// For device memory: an event that the read waits for, or NULL. It must live until the read has ended. An event
    /// that was recorded in a capture fails the read.
    pub event: *mut c_void,
}

// SAFETY: numbers, pointers and an optional function, of which the first is the size.
unsafe impl Versioned for hoistway_read {
    const NAME: &str = "hoistway_read";
    const FIRST_SIZE: usize = 104;
}

/// Starts a reader. `options` may be NULL. Free `reader` with `hoistway_reader_free`.
///
/// # Safety
/// `options` must be NULL or readable for its size, `reader` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_reader_create(
    options: *const hoistway_reader_options,
    reader: *mut *mut hoistway_reader,
) -> hoistway_status {
    // SAFETY: as the caller says.
    unsafe {
        handle::make(reader, || {
            Ok(hoistway_reader { reader: Arc::new(Reader::new(&reader_options(options)?)?) })
        })
    }
}

/// Frees a reader. Reads that have not begun are cancelled; the call waits for those in flight. Batches of the reader
/// stay valid and keep their results. NULL is allowed.
///
/// # Safety
/// `reader` must be NULL or come from [`hoistway_reader_create`], and neither be in use nor have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_reader_free(reader: *mut hoistway_reader) {
    // SAFETY: as the caller says.
    unsafe { handle::free(reader) }
}

/// Starts `count` reads. Each read succeeds or fails on its own. The call fails, and starts nothing, if an argument of
/// a read is invalid or its file cannot be opened. `priority` is `HOISTWAY_DEMAND`, `HOISTWAY_PREFETCH` or
/// `HOISTWAY_BACKGROUND`. Free `batch` with `hoistway_batch_free`.
///
/// A read into device memory writes after its stream and event. Without both, it writes after the work that is queued
/// at submission on the legacy default stream of the device, and on all streams that synchronize with that.
///
/// # Safety
/// `reader` must be live. `reads` must be `count` structures, readable for their size. Their strings must live until
/// the call returns. Destinations, sinks with their contexts, and `done` must live until the read has ended, and
/// nothing else may use them until then. `batch` must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_batch_submit(
    reader: *const hoistway_reader,
    reads: *const hoistway_read,
    count: u64,
    priority: i32,
    batch: *mut *mut hoistway_batch,
) -> hoistway_status {
    let submit = || {
        // SAFETY: live, as the caller says.
        let reader = unsafe { held(reader, "reader")? };
        let priority = priority_of(priority)?;
        // SAFETY: as the caller says.
        let requests = unsafe { requests(reads, count)? };
        Ok(hoistway_batch { batch: reader.reader.submit(requests, priority)? })
    };
    // SAFETY: writable, as the caller says.
    unsafe { handle::make(batch, submit) }
}

/// Waits until all reads have ended, at most `timeout_ms` milliseconds; `UINT64_MAX` waits without limit. Gives the
/// reads the priority demand. `progress` may be NULL.
///
/// Returns `HOISTWAY_OK` if every read succeeded, `HOISTWAY_PENDING` if the time ran out, else the status of the first
/// read that failed, in the order of submission. After a failure all reads have ended, and [`hoistway_batch_status`]
/// tells which succeeded.
///
/// # Safety
/// `batch` must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_batch_wait(
    batch: *const hoistway_batch,
    timeout_ms: u64,
    progress: hoistway_progress,
    progress_context: *mut c_void,
) -> hoistway_status {
    // SAFETY: live, as the caller says.
    with_batch(unsafe { held(batch, "batch") }, |batch| {
        let Some(progress) = progress else {
            return outcome(batch.wait_within(timeout(timeout_ms)));
        };
        let deadline = Instant::now().checked_add(timeout(timeout_ms));
        let mut is_wanted = true;
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let step = left.map_or(PROGRESS_INTERVAL, |left| left.min(PROGRESS_INTERVAL));
            let ended = batch.wait_within(step);
            // SAFETY: a function of the caller's, with the context that it asked for.
            if is_wanted && !unsafe { progress(progress_context, batch.bytes_done(), batch.bytes_total()) } {
                is_wanted = false;
                batch.cancel();
            }
            if ended.is_some() {
                return outcome(ended);
            }
            if left.is_some_and(|left| left.is_zero()) {
                return Err(Failure::pending());
            }
        }
    })
}

/// Waits until the read at position `index` has ended, at most `timeout_ms` milliseconds; `UINT64_MAX` waits without
/// limit. Gives the read the priority demand. Returns its status, or `HOISTWAY_PENDING` if the time ran out.
///
/// # Safety
/// `batch` must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_batch_wait_read(
    batch: *const hoistway_batch,
    index: u64,
    timeout_ms: u64,
) -> hoistway_status {
    // SAFETY: live, as the caller says.
    with_batch(unsafe { held(batch, "batch") }, |batch| {
        match batch.wait_read(position(batch, index)?, timeout(timeout_ms)) {
            ReadStatus::Pending => Err(Failure::pending()),
            ReadStatus::Delivered => Ok(()),
            ReadStatus::Failed(error) => Err(error.into()),
        }
    })
}

/// Sets `index` to the position of the next read that ended, in the order in which they end. Each read is reported
/// once. Waits at most `timeout_ms` milliseconds; `UINT64_MAX` waits without limit. `HOISTWAY_PENDING` if no read
/// ended in that time, `HOISTWAY_NOT_FOUND` once all were reported.
///
/// # Safety
/// `batch` must be live, `index` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_batch_next_ended(
    batch: *const hoistway_batch,
    timeout_ms: u64,
    index: *mut u64,
) -> hoistway_status {
    // SAFETY: live, as the caller says.
    with_batch(unsafe { held(batch, "batch") }, |batch| {
        if index.is_null() {
            return Err(Failure::argument("the output pointer for the index is NULL"));
        }
        // Before it waits: a read that ends after that was not told.
        let have_ended = batch.ended() == batch.len();
        match batch.next_ended(timeout(timeout_ms)) {
            // SAFETY: writable, as the caller says.
            Some(read) => unsafe { index.write(read as u64) },
            None if have_ended => return Err(Failure::not_found("all reads of the batch were reported")),
            None => return Err(Failure::pending()),
        }
        Ok(())
    })
}

/// Returns the status of the read at position `index`: `HOISTWAY_PENDING`, `HOISTWAY_OK`, or why it failed. Does not
/// wait, and does not change the last error of the thread.
///
/// # Safety
/// `batch` must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_batch_status(batch: *const hoistway_batch, index: u64) -> hoistway_status {
    // SAFETY: live, as the caller says.
    let Some(hoistway_batch { batch }) = (unsafe { batch.as_ref() }) else {
        return hoistway_status::HOISTWAY_INVALID_ARGUMENT;
    };
    match position(batch, index) {
        Err(_) => hoistway_status::HOISTWAY_INVALID_ARGUMENT,
        Ok(read) => match batch.status(read) {
            ReadStatus::Pending => hoistway_status::HOISTWAY_PENDING,
            ReadStatus::Delivered => hoistway_status::HOISTWAY_OK,
            ReadStatus::Failed(error) => status_of(error),
        },
    }
}

/// Sets `message` to the sentence that says why the read at position `index` failed, or to an empty string if it did
/// not. Free it with `hoistway_string_free`.
///
/// # Safety
/// `batch` must be live, `message` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_batch_error(
    batch: *const hoistway_batch,
    index: u64,
    message: *mut *mut c_char,
) -> hoistway_status {
    // SAFETY: live, as the caller says.
    with_batch(unsafe { held(batch, "batch") }, |batch| {
        let error = batch.status(position(batch, index)?).error().map(ToString::to_string);
        // SAFETY: writable, as the caller says.
        unsafe { text::give(error.as_deref().unwrap_or_default(), message) }
    })
}

/// Gives the reads that have not begun the priority demand.
///
/// # Safety
/// `batch` must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_batch_promote(batch: *const hoistway_batch) -> hoistway_status {
    // SAFETY: live, as the caller says.
    with_batch(unsafe { held(batch, "batch") }, |batch| {
        batch.promote();
        Ok(())
    })
}

/// Cancels the reads that have not begun, and ends those that wait for a server. Reads that the kernel or a device
/// carries out run to their end. Does not wait.
///
/// # Safety
/// `batch` must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_batch_cancel(batch: *const hoistway_batch) -> hoistway_status {
    // SAFETY: live, as the caller says.
    with_batch(unsafe { held(batch, "batch") }, |batch| {
        batch.cancel();
        Ok(())
    })
}

/// Sets `json` to a report of what the batch has done so far: the route of every byte, and why a faster route was not
/// used. Free it with `hoistway_string_free`.
///
/// # Safety
/// `batch` must be live, `json` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_batch_report(
    batch: *const hoistway_batch,
    json: *mut *mut c_char,
) -> hoistway_status {
    // SAFETY: live, as the caller says.
    with_batch(unsafe { held(batch, "batch") }, |batch| {
        // SAFETY: writable, as the caller says.
        unsafe { text::give(&serde_json::to_string(&batch.report())?, json) }
    })
}

/// Frees a batch. Reads that have not begun are cancelled; the call waits for those in flight. Nothing uses the
/// destinations afterwards, with one exception: after a read into device memory failed with `HOISTWAY_DEVICE`, a copy
/// may be in flight until the device is synchronized. NULL is allowed.
///
/// # Safety
/// `batch` must be NULL or come from [`hoistway_batch_submit`], and neither be in use nor have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_batch_free(batch: *mut hoistway_batch) {
    // SAFETY: as the caller says.
    unsafe { handle::free(batch) }
}

fn with_batch(
    batch: Result<&hoistway_batch, Failure>,
    work: impl FnOnce(&Batch) -> Result<(), Failure>,
) -> hoistway_status {
    call(|| work(&batch?.batch))
}

pub(crate) fn priority_of(priority: i32) -> Result<Priority, Failure> {
    match priority {
        HOISTWAY_DEMAND => Ok(Priority::Demand),
        HOISTWAY_PREFETCH => Ok(Priority::Prefetch),
        HOISTWAY_BACKGROUND => Ok(Priority::Background),
        other => Err(Failure::argument(format!("{other} is not a priority"))),
    }
}

pub(crate) fn timeout(milliseconds: u64) -> Duration {
    if milliseconds == u64::MAX { Duration::MAX } else { Duration::from_millis(milliseconds) }
}

fn position(batch: &Batch, index: u64) -> Result<usize, Failure> {
    let position = usize::try_from(index).ok().filter(|position| *position < batch.len());
    position
        .ok_or_else(|| Failure::argument(format!("there is no read {index}: the batch has {}", batch.len())))
}

fn outcome(waited: Option<Result<(), &hoistway::Error>>) -> Result<(), Failure> {
    waited.ok_or_else(Failure::pending)?.map_err(Failure::from)
}

/// # Safety
/// `options` must be NULL or as its size says.
unsafe fn reader_options(options: *const hoistway_reader_options) -> Result<ReaderOptions, Failure> {
    let mut chosen = ReaderOptions::default();
    if options.is_null() {
        return Ok(chosen);
    }
    // SAFETY: readable, as the caller says.
    let options = unsafe { versioned::read(options)? };
    if options.flags & !HOISTWAY_SMALL_PAGES != 0 {
        return Err(Failure::argument(format!(
            "hoistway_reader_options.flags has unknown bits: {:#x}",
            options.flags
        )));
    }
    chosen.huge_pages = options.flags & HOISTWAY_SMALL_PAGES == 0;
    // SAFETY: a string, as the caller says.
    if let Some(route) = unsafe { text::borrow(options.route, "the route")? } {
        chosen.route = route.parse()?;
    }
    if options.memory_budget_bytes > 0 {
        chosen.memory_budget_bytes = options.memory_budget_bytes;
    }
    if options.in_flight > 0 {
        chosen.in_flight = usize::try_from(options.in_flight).unwrap_or(usize::MAX);
    }
    Ok(chosen)
}

/// # Safety
/// See [`hoistway_batch_submit`].
unsafe fn requests(reads: *const hoistway_read, count: u64) -> Result<Vec<ReadRequest>, Failure> {
    let (mut files, mut fences) = (Files::default(), HashMap::new());
    // SAFETY: passed on.
    unsafe { versioned::read_all(reads, count, |read, index| request(read, index, &mut files, &mut fences)) }
}

/// # Safety
/// See [`hoistway_batch_submit`].
unsafe fn request(
    read: &hoistway_read,
    index: usize,
    files: &mut Files,
    fences: &mut HashMap<(DeviceId, usize), Fence>,
) -> Result<ReadRequest, Failure> {
    // Only a label: whatever it is made of.
    // SAFETY: a string, as the caller says.
    let name = unsafe { text::borrow_lossily(read.name) };
    let wrong = |what: &str| match &name {
        Some(name) => Failure::argument(format!("read {index} ('{name}'): {what}")),
        None => Failure::argument(format!("read {index}: {what}")),
    };
    if read.reserved != 0 {
        return Err(wrong("its member 'reserved' is not 0"));
    }
    let range = ByteRange::at(read.offset, read.length).ok_or_else(|| wrong("its range ends past 2^64"))?;
    // SAFETY: a live catalog and a path, as the caller says.
    let file = match unsafe { (read.catalog.as_ref(), text::borrow_path(read.path)?) } {
        (Some(catalog), _) => {
            let file = catalog.file(read.file, range)?;
            file.ok_or_else(|| wrong(&format!("its catalog has no file {}", read.file)))?
        }
        (None, Some(path)) => files.by_path(path)?,
        (None, None) if read.fd < 0 => return Err(wrong("it has no catalog, no path and no descriptor")),
        // SAFETY: open during this call, as the caller says.
        (None, None) => unsafe { files.by_descriptor(read.fd)? },
    };
    let target = match (read.target, NonNull::new(read.destination.cast::<u8>())) {
        // No byte is written there.
        (HOISTWAY_TARGET_HOST | HOISTWAY_TARGET_CUDA | HOISTWAY_TARGET_ROCM, _) if range.is_empty() => {
            Target::memory()
        }
        (HOISTWAY_TARGET_HOST | HOISTWAY_TARGET_CUDA | HOISTWAY_TARGET_ROCM, None) => {
            return Err(wrong("its destination is NULL"));
        }
        // SAFETY: the caller's promise.
        (HOISTWAY_TARGET_HOST, Some(start)) => unsafe { Target::host(start) },
        (target @ (HOISTWAY_TARGET_CUDA | HOISTWAY_TARGET_ROCM), Some(start)) => {
            let device = device_of(target, read.device).ok_or_else(|| wrong("its device is negative"))?;
            // SAFETY: the caller's promise.
            unsafe { Target::device(device, start.addr().get() as u64) }
        }
        (HOISTWAY_TARGET_CALLBACK, _) => {
            let sink = Callback {
                sink: read.sink.ok_or_else(|| wrong("its sink is NULL"))?,
                context: read.sink_context,
            };
            Target::sink(move |position, bytes| sink.take(position, bytes))
        }
        (other, _) => return Err(wrong(&format!("its target {other} is unknown"))),
    };
    let mut request = ReadRequest::new(&file, range, target);
    if let Some(device) = device_of(read.target, read.device) {
        let mut after = Vec::new();
        if !read.stream.is_null() {
            let stream = read.stream.expose_provenance();
            let fence = match fences.entry((device, stream)) {
                Entry::Occupied(known) => known.into_mut(),
                // SAFETY: a live stream of the device, as the caller says.
                Entry::Vacant(new) => new.insert(unsafe { stream_fence(device, stream)? }),
            };
            after.push(fence.clone());
        }
        if !read.event.is_null() {
            // SAFETY: it lives until the read has ended, as the caller says.
            after.push(unsafe { Fence::of_event(read.event.expose_provenance() as u64) });
        }
        if !after.is_empty() {
            request = request.after(after);
        }
    }
    if let Some(name) = name {
        request = request.named(&*name);
    }
    if let Some(done) = NonNull::new(read.done) {
        let done = Flag(done);
        request = request.on_end(move |outcome| done.set(outcome));
    }
    Ok(request)
}

/// # Safety
/// It must be a live stream of the device.
unsafe fn stream_fence(device: DeviceId, stream: usize) -> Result<Fence, Failure> {
    let fenced = Device::open(device).and_then(|device| {
        // SAFETY: passed on.
        unsafe { Fence::of_stream(&device, stream) }
    });
    Ok(fenced.map_err(hoistway::Error::from)?)
}

/// Files of one batch, each opened once.
#[derive(Default)]
struct Files {
    by_path: HashMap<PathBuf, ReadFile>,
    by_descriptor: HashMap<i32, ReadFile>,
}

impl Files {
    fn by_path(&mut self, path: &Path) -> Result<ReadFile, Failure> {
        if let Some(file) = self.by_path.get(path) {
            return Ok(file.clone());
        }
        let file = ReadFile::open(path)?;
        self.by_path.insert(path.to_owned(), file.clone());
        Ok(file)
    }

    /// # Safety
    /// `descriptor` must not be closed during the call.
    unsafe fn by_descriptor(&mut self, descriptor: i32) -> Result<ReadFile, Failure> {
        if let Some(file) = self.by_descriptor.get(&descriptor) {
            return Ok(file.clone());
        }
        // SAFETY: open during this call, as the caller says.
        let (duplicate, path) = unsafe { system::file_of_descriptor(descriptor)? };
        let file = ReadFile::from_file(duplicate, path)?;
        self.by_descriptor.insert(descriptor, file.clone());
        Ok(file)
    }
}

/// A function of the caller's that takes bytes.
struct Callback {
    sink: unsafe extern "C" fn(*mut c_void, u64, *const c_void, u64) -> i32,
    context: *mut c_void,
}

// SAFETY: the caller of `hoistway_batch_submit` has promised that the sink may be called from any thread.
unsafe impl Send for Callback {}
// SAFETY: as above, and several at once.
unsafe impl Sync for Callback {}

impl Callback {
    fn take(&self, position: u64, bytes: &[u8]) -> Result<(), hoistway::read::SinkError> {
        // SAFETY: a live function, as the caller of `hoistway_batch_submit` has promised; it gets readable bytes.
        match unsafe { (self.sink)(self.context, position, bytes.as_ptr().cast(), bytes.len() as u64) } {
            0 => Ok(()),
            code => Err(format!("the sink returned {code}").into()),
        }
    }
}

/// Where the caller looks for the end of a read.
struct Flag(NonNull<i32>);

// SAFETY: the caller of `hoistway_batch_submit` has promised that nothing else writes to the place.
unsafe impl Send for Flag {}

impl Flag {
    fn set(&self, outcome: Result<(), &hoistway::Error>) {
        let status = outcome.err().map_or(hoistway_status::HOISTWAY_OK, status_of);
        // SAFETY: live until the read has ended, as the caller of `hoistway_batch_submit` has promised.
        unsafe { AtomicI32::from_ptr(self.0.as_ptr()) }.store(1 + status as i32, Ordering::Release);
    }
}
