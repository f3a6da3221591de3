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

/// An open KV store. Linux only, as is all that has to do with it.
pub struct hoistway_kv {
    store: Store,
    /// The process that opened it.
    process: u32,
    /// Tickets that were drained of the store, and that the caller had no room for.
    ended: Mutex<VecDeque<u64>>,
}

/// Memory that a KV store was told of ahead.
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

/// How to open a KV store. Strings that are NULL, and numbers that are 0, are defaults; docs/kv says what each means.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_kv_options {
    /// `sizeof(hoistway_kv_options)`.
    pub size: u64,
    /// Its directory. Made if it is not there.
    pub root: *const c_char,
    /// "read_write" or "read".
    pub access: *const c_char,
    /// "segments" or "files"; NULL is what is there, else "segments".
    pub layout: *const c_char,
    /// "none", "batched" or "sync"; NULL is "batched".
    pub durability: *const c_char,
    /// "s3fifo" or "lru"; NULL is "s3fifo".
    pub eviction: *const c_char,
    /// "always" or "second_touch"; NULL is "always".
    pub admission: *const c_char,
    /// "auto", "io_uring" or "threads"; NULL is "auto".
    pub route: *const c_char,
    /// "prefer", "require" or "off"; NULL is "prefer".
    pub direct: *const c_char,
    /// Most bytes that all files below `root` take, of all processes. Needed for writing.
    pub capacity_bytes: u64,
    /// Bytes that are left free on the file system; 0 for 1 GiB, 1 for none.
    pub min_free_bytes: u64,
    /// Bytes of a segment.
    pub segment_bytes: u64,
    /// Threads that move bytes.
    pub io_threads: u64,
    /// Most bytes of transfers under way; 0 for 256 MiB.
    pub max_in_flight_bytes: u64,
    /// Milliseconds that a request may take unless it says otherwise; 0 for as long as it takes.
    pub timeout_ms: u64,
    /// Milliseconds after which a block is given up that lacks shards and has got no further one; 0 for a minute.
    pub partial_timeout_ms: u64,
    /// Bytes a second that are read in the background to find damaged blocks.
    pub scrub_bytes_per_second: u64,
    /// `HOISTWAY_KV_NO_VERIFY` or 0.
    pub flags: u64,
    /// A second store behind this one, or NULL.
    pub far_tier: *const hoistway_kv_far_options,
}

// SAFETY: numbers and pointers, of which the first is the size.
unsafe impl Versioned for hoistway_kv_options {
    const NAME: &str = "hoistway_kv_options";
    const FIRST_SIZE: usize = 144;
}

/// Opens a KV store, and makes it if it is not there. In a child of `fork` it is closed: open it anew there.
///
/// # Safety
/// `options` must be as its size says, `store` writable.
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

/// Ends a store: nothing is accepted any more, stores under way get `timeout_ms` milliseconds to end (`UINT64_MAX`: as long
/// as they take), other requests are cancelled. Then the system gets some seconds to end what it has.
/// `HOISTWAY_TIMED_OUT` if something did not end in time: its tickets tell which memory is still in use. `HOISTWAY_IO` if the
/// index cannot be written, or if blocks were not written to the far tier: the message says how many.
///
/// # Safety
/// `store` must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_close(store: *const hoistway_kv, timeout_ms: u64) -> hoistway_status {
    // SAFETY: live, as the caller says.
    call(|| Ok(unsafe { held(store, "store")? }.store.close(timeout(timeout_ms))?))
}

/// Frees a store. With its last namespace it ends, if it was not closed: as `hoistway_kv_close` without time for stores.
/// In a child of `fork` nothing is closed. NULL is fine.
///
/// # Safety
/// `store` must come from [`hoistway_kv_open`], and not be in use nor have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_free(store: *mut hoistway_kv) {
    // SAFETY: as the caller says.
    unsafe { handle::free(store) }
}

/// Waits until every block that was given to the store before is where `durability` wants it, `timeout_ms` milliseconds at
/// most; `UINT64_MAX` is for ever.
///
/// # Safety
/// `store` must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_flush(store: *const hoistway_kv, timeout_ms: u64) -> hoistway_status {
    // SAFETY: live, as the caller says.
    call(|| Ok(unsafe { held(store, "store")? }.store.flush(timeout(timeout_ms))?))
}

/// A descriptor that can be read, and so be watched with `poll` or `epoll`, while requests that asked for it by
/// `HOISTWAY_KV_NOTIFY` have ended and were not drained. It is the store's: neither read nor close it. -1 if `store` is NULL.
///
/// # Safety
/// `store` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_event_fd(store: *const hoistway_kv) -> i32 {
    // SAFETY: live, as the caller says.
    unsafe { store.as_ref() }.map_or(-1, |kv| kv.store.event_fd().as_raw_fd())
}

/// Gives the numbers of tickets that asked for it by `HOISTWAY_KV_NOTIFY` and have ended, each once, in the order of their
/// ends: at most `room`. Sets `count`. If that is `room`, there may be more, of which the descriptor does not tell again.
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
            return Err(Failure::argument("there is no place for the tickets: a pointer is NULL"));
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

/// Tells a store of memory ahead, so that storage can be read to a device's memory and written from it past the host's.
/// Memory of the host needs no telling, and may be told of.
///
/// # Safety
/// `store` must be live, `memory` readable and what it describes allocated until the region is freed; `region` writable.
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

/// Whether it is memory of a device whose bytes go past the host's memory. If not, `hoistway_kv_report` says why.
///
/// # Safety
/// `region` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_region_is_direct(region: *const hoistway_kv_region) -> bool {
    // SAFETY: live, as the caller says.
    unsafe { region.as_ref() }.is_some_and(|known| known.region.is_direct())
}

/// Has the store forget memory; then it may be freed. Requests that use it must have released it. NULL is fine.
///
/// # Safety
/// `region` must come from [`hoistway_kv_register`], and not have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_region_free(region: *mut hoistway_kv_region) {
    // SAFETY: as the caller says.
    unsafe { handle::free(region) }
}

/// Gives what a store holds and did, as JSON. Free it with `hoistway_string_free`.
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

/// Gives the same as text for Prometheus (OpenMetrics). Free it with `hoistway_string_free`.
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

/// Gives how a store works, as JSON: which way bytes went, and why not a better one. Free it with `hoistway_string_free`.
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

/// Gives what happened since the last call, such as damaged blocks, as a list in JSON. Free it with
/// `hoistway_string_free`.
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
    usize::try_from(bytes).map_err(|_| Failure::argument(format!("{bytes} bytes: there is no such memory")))
}

/// # Safety
/// `options` must be as its size says.
unsafe fn store_options(options: *const hoistway_kv_options) -> Result<StoreOptions, Failure> {
    // SAFETY: readable, as the caller says.
    let options = unsafe { versioned::read(options)? };
    // SAFETY: a string, as the caller says.
    let root = unsafe { text::borrow_path(options.root)? };
    let mut chosen = StoreOptions::new(root.ok_or_else(|| Failure::argument("the root is NULL"))?);
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
        other => Err(Failure::argument(format!("there are no flags {other:#x} of a KV store"))),
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
