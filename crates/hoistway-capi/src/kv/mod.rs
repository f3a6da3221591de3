//! The KV store.
#![allow(unsafe_code)]

mod far;
mod item;
mod namespace;
mod ticket;

pub use far::*;
pub use item::*;
pub use namespace::*;
pub use ticket::*;

use crate::{
    handle::{self, held},
    status::{Failure, call, hoistway_status},
    text,
    versioned::{self, Versioned},
};
use ::hoistway_kv::{Error, Region, Store, StoreOptions};
use hoistway::DeviceId;
use std::{
    collections::VecDeque,
    ffi::c_char,
    mem::ManuallyDrop,
    os::fd::AsRawFd,
    process,
    str::FromStr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// `hoistway_kv_options.flags`: do not compare the checksums of blocks that a sync covers.
pub const HOISTWAY_KV_NO_VERIFY: u64 = 1;

/// An open KV store. KV stores are available on Linux only.
pub struct hoistway_kv {
    store: Store,
    /// The process that opened it.
    process: u32,
    /// Tickets that were drained of the store, and that the caller had no room for.
    ended: Mutex<VecDeque<u64>>,
}

/// Memory that is registered with a KV store.
pub struct hoistway_kv_region {
    /// A child of `fork` has no device to take it back from.
    region: ManuallyDrop<Region>,
    process: u32,
}

impl Drop for hoistway_kv_region {
    fn drop(&mut self) {
        if self.process == process::id() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.region) };
        }
    }
}

/// How to open a KV store. A string that is NULL, or a number that is 0, stands for the default; docs/kv/README.md
/// explains the options.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_kv_options {
    /// `sizeof(hoistway_kv_options)`.
    pub size: u64,
    /// Directory of the store. It is created if it does not exist.
    pub root: *const c_char,
    /// "read_write" or "read"; NULL for "read_write".
    pub access: *const c_char,
    /// "segments" or "files"; NULL for the layout of the existing store, or "segments" for a new one.
    pub layout: *const c_char,
    /// "none", "batched" or "sync"; NULL for "batched".
    pub durability: *const c_char,
    /// "s3fifo" or "lru"; NULL for "s3fifo".
    pub eviction: *const c_char,
    /// "always" or "second_touch"; NULL for "always".
    pub admission: *const c_char,
    /// "auto", "io_uring" or "threads"; NULL for "auto".
    pub route: *const c_char,
    /// "prefer", "require" or "off"; NULL for "prefer".
    pub direct: *const c_char,
    /// Limit in bytes of all files below `root`, of all processes. Required for writing.
    pub capacity_bytes: u64,
    /// Bytes to leave free on the file system; 0 for 1 GiB, 1 for none.
    pub min_free_bytes: u64,
    /// Bytes of a segment file; 0 for 1 GiB, or less if the capacity is small.
    pub segment_bytes: u64,
    /// Number of threads that read and write; 0 for 4, or 8 with the route "threads".
    pub io_threads: u64,
    /// Limit in bytes of transfers in flight; 0 for 256 MiB.
    pub max_in_flight_bytes: u64,
    /// Milliseconds that a request may take if it sets no time itself; 0 for no limit.
    pub timeout_ms: u64,
    /// Milliseconds without a new shard after which an incomplete block is dropped; 0 for 60,000.
    pub partial_timeout_ms: u64,
    /// Bytes to read per second, in the background, to find damaged blocks; 0 for none.
    pub scrub_bytes_per_second: u64,
    /// `HOISTWAY_KV_NO_VERIFY` or 0.
    pub flags: u64,
    /// The far tier, or NULL.
    pub far_tier: *const hoistway_kv_far_options,
}

// SAFETY: numbers and pointers, of which the first is the size.
unsafe impl Versioned for hoistway_kv_options {
    const NAME: &str = "hoistway_kv_options";
    const FIRST_SIZE: usize = 144;
}

/// Opens a KV store, and creates it if it does not exist. In a child of `fork` the store is closed: open it again
/// there. Free `store` with `hoistway_kv_free`.
///
/// # Safety
/// `options` must be readable for its size, `store` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_open(
    options: *const hoistway_kv_options,
    store: *mut *mut hoistway_kv,
) -> hoistway_status {
    let open = || {
        // SAFETY: as the caller says.
        let options = unsafe { store_options(held(options, "hoistway_kv_options")?)? };
        Ok(hoistway_kv { store: Store::open(options)?, process: process::id(), ended: Mutex::default() })
    };
    // SAFETY: writable, as the caller says.
    unsafe { handle::make(store, open) }
}

/// Closes a store. It accepts no further requests. Stores of blocks in flight get `timeout_ms` milliseconds to end
/// (`UINT64_MAX`: no limit); other requests are cancelled. Then the operating system gets some seconds to end its
/// operations. The handle stays valid until it is freed.
///
/// `HOISTWAY_TIMED_OUT` if something did not end in time: the tickets tell which memory is still in use. `HOISTWAY_IO`
/// if the index cannot be written, or if blocks were not written to the far tier: the message says how many.
///
/// # Safety
/// `store` must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_close(store: *const hoistway_kv, timeout_ms: u64) -> hoistway_status {
    // SAFETY: live, as the caller says.
    call(|| Ok(unsafe { held(store, "store")? }.store.close(timeout(timeout_ms))?))
}

/// Frees a store. If it was not closed, it closes when its last namespace is freed too, as `hoistway_kv_close` does
/// with a `timeout_ms` of 0. In a child of `fork` nothing is closed. NULL is allowed.
///
/// # Safety
/// `store` must be NULL or come from [`hoistway_kv_open`], and neither be in use nor have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_free(store: *mut hoistway_kv) {
    // SAFETY: as the caller says.
    unsafe { handle::free(store) }
}

/// Waits until all requests to store that were submitted before have ended, as the option `durability` defines it.
/// Waits at most `timeout_ms` milliseconds; `UINT64_MAX` waits without limit. `HOISTWAY_TIMED_OUT` if the time ran
/// out.
///
/// # Safety
/// `store` must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_flush(store: *const hoistway_kv, timeout_ms: u64) -> hoistway_status {
    // SAFETY: live, as the caller says.
    call(|| Ok(unsafe { held(store, "store")? }.store.flush(timeout(timeout_ms))?))
}

/// Returns a file descriptor for `poll` or `epoll`. It is readable while requests with `HOISTWAY_KV_NOTIFY` have ended
/// and `hoistway_kv_drain` has not reported them. It is the store's: neither read nor close it. -1 if `store` is NULL.
///
/// # Safety
/// `store` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_event_fd(store: *const hoistway_kv) -> i32 {
    // SAFETY: live, as the caller says.
    unsafe { store.as_ref() }.map_or(-1, |kv| kv.store.event_fd().as_raw_fd())
}

/// Reports ended requests with `HOISTWAY_KV_NOTIFY`, each once, in the order in which they ended. Writes at most
/// `room` ticket numbers to `tickets`, and sets `count` to how many. If `count` equals `room`, call again at once:
/// there may be more, and the descriptor does not become readable for them.
///
/// # Safety
/// `store` must be live, `tickets` have room for `room` numbers, `count` be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_drain(
    store: *const hoistway_kv,
    tickets: *mut u64,
    room: u64,
    count: *mut u64,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let kv = unsafe { held(store, "store")? };
        if count.is_null() || (room > 0 && tickets.is_null()) {
            return Err(Failure::argument("the output pointer for the tickets or for their count is NULL"));
        }
        if kv.process != process::id() {
            // A thread that the child lacks may have had the lock.
            return Err(Error::Closed { path: kv.store.root().to_owned() }.into());
        }
        let mut ended = kv.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let room = usize::try_from(room).unwrap_or(usize::MAX);
        // The store bounds the tickets that it keeps. Those that it has given must not pile up here instead.
        if ended.len() < room {
            ended.extend(kv.store.drain_completions().iter().map(|completion| completion.ticket));
        }
        let given = ended.len().min(room);
        for (place, ticket) in ended.drain(..given).enumerate() {
            // SAFETY: there is room, as the caller says.
            unsafe { tickets.add(place).write(ticket) };
        }
        // SAFETY: writable, as the caller says.
        unsafe { count.write(given as u64) };
        Ok(())
    })
}

/// Registers memory with a store, so that bytes can move between storage and device memory without passing through
/// host memory. Host memory may be registered, but need not be. Free `region` with `hoistway_kv_region_free`.
///
/// # Safety
/// `store` must be live. `memory` must be readable, and the memory that it describes must stay allocated until the
/// region is freed. `region` must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_register(
    store: *const hoistway_kv,
    memory: *const hoistway_kv_piece,
    region: *mut *mut hoistway_kv_region,
) -> hoistway_status {
    let register = || {
        // SAFETY: live and readable, as the caller says.
        let (kv, memory) = unsafe { (held(store, "store")?, held(memory, "memory")?) };
        let piece = memory.piece()?;
        let region = match piece.device {
            // SAFETY: allocated until the region is freed, as the caller says.
            DeviceId::Cpu => unsafe { kv.store.register_host(memory.address.cast(), length(piece.len)?) },
            // SAFETY: as above.
            device => unsafe { kv.store.register_device(device, piece.address, piece.len) },
        };
        Ok(hoistway_kv_region { region: ManuallyDrop::new(region?), process: process::id() })
    };
    // SAFETY: writable, as the caller says.
    unsafe { handle::make(region, register) }
}

/// Returns whether the bytes of a region move between storage and device memory without passing through host memory.
/// If not, `hoistway_kv_report` says why.
///
/// # Safety
/// `region` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_region_is_direct(region: *const hoistway_kv_region) -> bool {
    // SAFETY: live, as the caller says.
    unsafe { region.as_ref() }.is_some_and(|known| known.region.is_direct())
}

/// Unregisters memory, which may be freed afterwards. Requests that use the memory must have released it before. NULL
/// is allowed.
///
/// # Safety
/// `region` must be NULL or come from [`hoistway_kv_register`], and not have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_region_free(region: *mut hoistway_kv_region) {
    // SAFETY: as the caller says.
    unsafe { handle::free(region) }
}

/// Sets `json` to statistics of a store: what it holds, and what it has done. Free it with `hoistway_string_free`.
///
/// # Safety
/// `store` must be live, `json` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_stats(
    store: *const hoistway_kv,
    json: *mut *mut c_char,
) -> hoistway_status {
    // SAFETY: as the caller says.
    unsafe { say(store, json, |store| Ok(serde_json::to_string(&store.stats()?)?)) }
}

/// Sets `openmetrics` to the same statistics as text for Prometheus (OpenMetrics). Free it with
/// `hoistway_string_free`.
///
/// # Safety
/// `store` must be live, `openmetrics` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_metrics(
    store: *const hoistway_kv,
    openmetrics: *mut *mut c_char,
) -> hoistway_status {
    // SAFETY: as the caller says.
    unsafe { say(store, openmetrics, |store| Ok(store.metrics()?)) }
}

/// Sets `json` to a report of how a store works: the routes of its bytes, and why faster routes were not used. Free it
/// with `hoistway_string_free`.
///
/// # Safety
/// `store` must be live, `json` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_report(
    store: *const hoistway_kv,
    json: *mut *mut c_char,
) -> hoistway_status {
    // SAFETY: as the caller says.
    unsafe { say(store, json, |store| Ok(serde_json::to_string(&store.report()?)?)) }
}

/// Sets `json` to the list of events since the last call, such as damaged blocks. Free it with `hoistway_string_free`.
///
/// # Safety
/// `store` must be live, `json` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_events(
    store: *const hoistway_kv,
    json: *mut *mut c_char,
) -> hoistway_status {
    // SAFETY: as the caller says.
    unsafe { say(store, json, |store| Ok(serde_json::to_string(&store.events())?)) }
}

/// # Safety
/// `store` must be live, `place` writable.
unsafe fn say(
    store: *const hoistway_kv,
    place: *mut *mut c_char,
    words: impl FnOnce(&Store) -> Result<String, Failure>,
) -> hoistway_status {
    // SAFETY: as the caller says.
    call(|| unsafe { text::give(&words(&held(store, "store")?.store)?, place) })
}

/// `None` is for ever.
fn timeout(milliseconds: u64) -> Option<Duration> {
    (milliseconds != u64::MAX).then(|| Duration::from_millis(milliseconds))
}

/// What an option says, if it was set.
fn set(value: u64) -> Option<u64> {
    (value != 0).then_some(value)
}

fn milliseconds(value: u64) -> Option<Duration> {
    set(value).map(Duration::from_millis)
}

fn length(bytes: u64) -> Result<usize, Failure> {
    usize::try_from(bytes)
        .map_err(|_| Failure::argument(format!("{bytes} is more than this machine can address")))
}

/// # Safety
/// `options` must be as its size says.
unsafe fn store_options(options: *const hoistway_kv_options) -> Result<StoreOptions, Failure> {
    // SAFETY: readable, as the caller says.
    let options = unsafe { versioned::read(options)? };
    // SAFETY: a string, as the caller says.
    let root = unsafe { text::borrow_path(options.root)? };
    let mut chosen =
        StoreOptions::new(root.ok_or_else(|| Failure::argument("hoistway_kv_options.root is NULL"))?);
    // SAFETY: strings, as the caller says.
    unsafe {
        choose(options.access, &mut chosen.access)?;
        choose(options.durability, &mut chosen.durability)?;
        choose(options.eviction, &mut chosen.eviction)?;
        choose(options.admission, &mut chosen.admission)?;
        choose(options.route, &mut chosen.route)?;
        choose(options.direct, &mut chosen.direct)?;
        chosen.layout = text::borrow(options.layout, "the layout")?.map(str::parse).transpose()?;
    }
    chosen.capacity_bytes = set(options.capacity_bytes);
    chosen.segment_bytes = set(options.segment_bytes);
    chosen.io_threads = set(options.io_threads).map(length).transpose()?;
    chosen.timeout = milliseconds(options.timeout_ms);
    chosen.scrub_bytes_per_second = options.scrub_bytes_per_second;
    chosen.min_free_bytes = set(options.min_free_bytes).unwrap_or(chosen.min_free_bytes);
    chosen.max_in_flight_bytes = set(options.max_in_flight_bytes).unwrap_or(chosen.max_in_flight_bytes);
    chosen.partial_timeout = milliseconds(options.partial_timeout_ms).unwrap_or(chosen.partial_timeout);
    chosen.verify = options.flags & HOISTWAY_KV_NO_VERIFY == 0;
    // SAFETY: NULL or as its size says, as the caller says.
    chosen.far = unsafe { far_options(options.far_tier)? };
    match options.flags & !HOISTWAY_KV_NO_VERIFY {
        0 => Ok(chosen),
        other => Err(Failure::argument(format!("hoistway_kv_options.flags has unknown bits: {other:#x}"))),
    }
}

/// # Safety
/// `name` must be NULL or a string.
unsafe fn choose<T: FromStr<Err = Error>>(name: *const c_char, place: &mut T) -> Result<(), Failure> {
    // SAFETY: as the caller says.
    if let Some(name) = unsafe { text::borrow(name, "an option of a KV store")? } {
        *place = name.parse()?;
    }
    Ok(())
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        use hoistway_status::*;
        let status = match &error {
            Error::InvalidKey { .. } | Error::InvalidOption { .. } | Error::InvalidRequest(_) => {
                HOISTWAY_INVALID_ARGUMENT
            }
            Error::NotAStore { .. } | Error::UnknownFormat { .. } => HOISTWAY_INVALID_FILE,
            Error::Io { .. } => HOISTWAY_IO,
            Error::DamagedBlock { .. } => HOISTWAY_CORRUPT,
            Error::RouteUnavailable { .. } => HOISTWAY_ROUTE_UNAVAILABLE,
            Error::Device(_) => HOISTWAY_DEVICE,
            Error::Closed { .. } => HOISTWAY_CLOSED,
            Error::ReadOnly { .. } => HOISTWAY_READ_ONLY,
            Error::TooManyCompletions { .. } => HOISTWAY_REFUSED,
            Error::TimedOut { .. } => HOISTWAY_TIMED_OUT,
            Error::FarUnavailable { .. } | Error::NotWrittenBack { .. } => HOISTWAY_IO,
            _ => HOISTWAY_INTERNAL,
        };
        Self::new(status, error.to_string())
    }
}
