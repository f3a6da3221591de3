//! Requests under way: how their items ended, and when their memory is the caller's again.
#![allow(unsafe_code)]

use super::timeout;
use crate::{
    handle::{self, check_place, held},
    status::{Failure, call, hoistway_status},
    text,
};
use ::hoistway_kv::{Completion, DropReason, Error, Item, KeepAlive, Status, Ticket};
use std::{
    ffi::c_char,
    process,
    sync::{
        Arc, Condvar, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// How often a caller that waits for memory learns that it will never be released.
const LOST_INTERVAL: Duration = Duration::from_millis(50);

/// How an item of a request ended.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum hoistway_kv_status {
    /// The item was loaded and verified, or stored.
    HOISTWAY_KV_OK = 0,
    /// Not stored: the store already has the block, or another request is storing it. This is no failure.
    HOISTWAY_KV_EXISTS = 1,
    /// Not loaded: the store does not have the block.
    HOISTWAY_KV_MISS = 2,
    /// Not loaded: the block has expired.
    HOISTWAY_KV_EXPIRED = 3,
    /// Not loaded: the block differs from what was stored. Later loads of it are misses. The contents of the memory
    /// are undefined.
    HOISTWAY_KV_CORRUPT = 4,
    /// The length of the memory differs from that of the shard, or the block has another number of shards. The block
    /// stays. The contents of the memory are undefined.
    HOISTWAY_KV_MISMATCH = 5,
    /// Not stored: all blocks that could be evicted are in use, or the file system is full.
    HOISTWAY_KV_NO_ROOM = 6,
    /// Not stored: the namespace has used up its quota.
    HOISTWAY_KV_QUOTA = 7,
    /// Refused: too much is in flight.
    HOISTWAY_KV_BUSY = 8,
    /// Not stored: the option `admission` requires an earlier request for the block.
    HOISTWAY_KV_NOT_ADMITTED = 9,
    /// Not stored: the block is larger than a segment.
    HOISTWAY_KV_TOO_LARGE = 10,
    /// It took longer than its time. The memory is the store's until the ticket is released.
    HOISTWAY_KV_TIMED_OUT = 11,
    /// It was cancelled. The memory is the store's until the ticket is released.
    HOISTWAY_KV_CANCELLED = 12,
    /// The operating system failed the operation, with the number in `error`. The block stays, and can be requested
    /// again.
    HOISTWAY_KV_IO = 13,
    /// An end that this version of the header has no name for. `hoistway_kv_ticket_report` names it.
    HOISTWAY_KV_OTHER = 14,
}

/// How one item of a request ended. This structure never grows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_kv_outcome {
    /// The status of the item.
    pub status: hoistway_kv_status,
    /// The `errno` if the status is `HOISTWAY_KV_IO`; else 0.
    pub error: i32,
}

impl From<Status> for hoistway_kv_outcome {
    fn from(status: Status) -> Self {
        use hoistway_kv_status::*;
        let error = if let Status::Io(errno) = status { errno } else { 0 };
        let status = match status {
            Status::Ok => HOISTWAY_KV_OK,
            Status::Exists => HOISTWAY_KV_EXISTS,
            Status::Miss => HOISTWAY_KV_MISS,
            Status::Expired => HOISTWAY_KV_EXPIRED,
            Status::Corrupt => HOISTWAY_KV_CORRUPT,
            Status::Mismatch => HOISTWAY_KV_MISMATCH,
            Status::Dropped(DropReason::NoRoom) => HOISTWAY_KV_NO_ROOM,
            Status::Dropped(DropReason::Quota) => HOISTWAY_KV_QUOTA,
            Status::Dropped(DropReason::Busy) => HOISTWAY_KV_BUSY,
            Status::Dropped(DropReason::NotAdmitted) => HOISTWAY_KV_NOT_ADMITTED,
            Status::Dropped(DropReason::TooLarge) => HOISTWAY_KV_TOO_LARGE,
            Status::TimedOut => HOISTWAY_KV_TIMED_OUT,
            Status::Cancelled => HOISTWAY_KV_CANCELLED,
            Status::Io(_) => HOISTWAY_KV_IO,
            _ => HOISTWAY_KV_OTHER,
        };
        Self { status, error }
    }
}

/// How a request ends of which an item ended like this.
fn status_of(status: Status) -> hoistway_status {
    use hoistway_status::*;
    match status {
        Status::Ok | Status::Exists => HOISTWAY_OK,
        Status::Miss | Status::Expired => HOISTWAY_NOT_FOUND,
        Status::Corrupt => HOISTWAY_CORRUPT,
        Status::Mismatch => HOISTWAY_INVALID_ARGUMENT,
        Status::Dropped(_) => HOISTWAY_REFUSED,
        Status::TimedOut => HOISTWAY_TIMED_OUT,
        Status::Cancelled => HOISTWAY_CANCELLED,
        Status::Io(_) => HOISTWAY_IO,
        _ => HOISTWAY_INTERNAL,
    }
}

/// A request to load or store.
pub struct hoistway_kv_ticket {
    ticket: Ticket,
    items: usize,
    memory: Arc<Memory>,
    ended: OnceLock<Completion>,
}

/// The caller's memory, as far as the store has it.
struct Memory {
    /// The process that the store is open in: in a child of `fork`, nothing is released, and no lock can be had.
    process: u32,
    is_released: AtomicBool,
    waiting: Mutex<()>,
    released: Condvar,
}

/// What the store holds as long as it has the memory.
struct Borrowed(Arc<Memory>);

impl Drop for Borrowed {
    fn drop(&mut self) {
        if self.0.process == process::id() {
            let waiting = self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            self.0.is_released.store(true, Ordering::Release);
            drop(waiting);
            self.0.released.notify_all();
        }
    }
}

impl hoistway_kv_ticket {
    pub(super) fn begin(
        items: Vec<Item>,
        start: impl FnOnce(Vec<Item>, KeepAlive) -> Result<Ticket, Failure>,
    ) -> Result<Self, Failure> {
        let memory = Arc::new(Memory {
            process: process::id(),
            is_released: AtomicBool::new(false),
            waiting: Mutex::default(),
            released: Condvar::new(),
        });
        let count = items.len();
        let ticket = start(items, KeepAlive::new(Arc::new(Borrowed(memory.clone()))))?;
        Ok(Self { ticket, items: count, memory, ended: OnceLock::new() })
    }

    /// How it ended, if it has.
    fn ended(&self) -> Option<&Completion> {
        match self.ended.get() {
            Some(completion) => Some(completion),
            None => self.ticket.poll().map(|completion| self.ended.get_or_init(|| completion)),
        }
    }

    fn is_released(&self) -> bool {
        self.memory.is_released.load(Ordering::Acquire)
    }

    /// Waits until the memory is released, or cannot be, or the time is over. Whether it is released.
    fn wait_released(&self, timeout: Option<Duration>) -> bool {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if self.is_released() || self.memory.process != process::id() {
            return self.is_released();
        }
        let mut waiting = self.memory.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        while !self.is_released() && !self.ticket.is_lost() {
            let left = deadline.map_or(LOST_INTERVAL, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                break;
            }
            let waited = self.memory.released.wait_timeout(waiting, left.min(LOST_INTERVAL));
            waiting = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        self.is_released()
    }
}

impl Drop for hoistway_kv_ticket {
    fn drop(&mut self) {
        self.ticket.cancel();
        self.wait_released(None);
    }
}

/// Returns the number of a ticket, as `hoistway_kv_drain` reports it; 0 if `ticket` is NULL.
///
/// # Safety
/// `ticket` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_ticket_id(ticket: *const hoistway_kv_ticket) -> u64 {
    // SAFETY: live, as the caller says.
    unsafe { ticket.as_ref() }.map_or(0, |request| request.ticket.id())
}

/// Waits until a request has ended, at most `timeout_ms` milliseconds; `UINT64_MAX` waits without limit.
///
/// Returns `HOISTWAY_OK` if every item was loaded or is in the store, `HOISTWAY_PENDING` if the time ran out, else the
/// status of the first item that failed: `HOISTWAY_NOT_FOUND` for a miss, `HOISTWAY_CORRUPT`, `HOISTWAY_REFUSED`, and
/// so on. [`hoistway_kv_ticket_outcomes`] has the outcome of each item.
///
/// # Safety
/// `ticket` must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_ticket_wait(
    ticket: *const hoistway_kv_ticket,
    timeout_ms: u64,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let request = unsafe { held(ticket, "ticket")? };
        let completion = match request.ended.get() {
            Some(completion) => completion,
            None => match request.ticket.wait(timeout(timeout_ms)) {
                Ok(completion) => request.ended.get_or_init(|| completion),
                Err(Error::TimedOut { .. }) => return Err(Failure::pending()),
                Err(error) => return Err(error.into()),
            },
        };
        let failed = completion.items.iter().enumerate().find(|(_, status)| !status.is_ok());
        let Some((item, status)) = failed else { return Ok(()) };
        let message = format!("item {item} of {}: {status}", completion.items.len());
        Err(Failure::new(status_of(*status), message))
    })
}

/// Returns what [`hoistway_kv_ticket_wait`] would return now, or `HOISTWAY_PENDING`. Does not wait, and does not
/// change the last error of the thread.
///
/// # Safety
/// `ticket` must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_ticket_poll(ticket: *const hoistway_kv_ticket) -> hoistway_status {
    // SAFETY: live, as the caller says.
    let Some(request) = (unsafe { ticket.as_ref() }) else {
        return hoistway_status::HOISTWAY_INVALID_ARGUMENT;
    };
    let Some(completion) = request.ended() else { return hoistway_status::HOISTWAY_PENDING };
    let failed = completion.items.iter().find(|status| !status.is_ok());
    failed.map_or(hoistway_status::HOISTWAY_OK, |status| status_of(*status))
}

/// Sets `outcomes` to how each item ended, in the order of the request. `count` must be the number of items.
/// `HOISTWAY_PENDING` if the request has not ended.
///
/// # Safety
/// `ticket` must be live, `outcomes` have room for `count` structures.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_ticket_outcomes(
    ticket: *const hoistway_kv_ticket,
    outcomes: *mut hoistway_kv_outcome,
    count: u64,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let request = unsafe { held(ticket, "ticket")? };
        check_place(outcomes, "outcomes")?;
        if count != request.items as u64 {
            let reason =
                format!("the count of outcomes is {count}, but the request has {} items", request.items);
            return Err(Failure::argument(reason));
        }
        let completion = request.ended().ok_or_else(Failure::pending)?;
        for (place, status) in completion.items.iter().enumerate() {
            // SAFETY: there is room, as the caller says.
            unsafe { outcomes.add(place).write((*status).into()) };
        }
        Ok(())
    })
}

/// Sets `json` to a report of a request: the statuses of its items by name, its bytes and their routes, and its times
/// in seconds. `HOISTWAY_PENDING` if the request has not ended. Free it with `hoistway_string_free`.
///
/// # Safety
/// `ticket` must be live, `json` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_ticket_report(
    ticket: *const hoistway_kv_ticket,
    json: *mut *mut c_char,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let request = unsafe { held(ticket, "ticket")? };
        let completion = request.ended().ok_or_else(Failure::pending)?;
        let named =
            |(carrier, bytes): (&::hoistway_kv::Carrier, &u64)| (carrier.to_string(), (*bytes).into());
        let report = serde_json::json!({
            "ticket": completion.ticket,
            "items": completion.items.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "bytes": completion.bytes,
            "carried": completion.carried.iter().map(named).collect::<serde_json::Map<_, _>>(),
            "bounced_bytes": completion.bounced_bytes,
            "far_bytes": completion.far_bytes,
            "far_missing": completion.far_missing,
            "queued": completion.queued.as_secs_f64(),
            "moving": completion.moving.as_secs_f64(),
        });
        // SAFETY: writable, as the caller says.
        unsafe { text::give(&report.to_string(), json) }
    })
}

/// Cancels a request: its items that have not ended become `HOISTWAY_KV_CANCELLED`. The memory is the store's until
/// the ticket is released. Does not wait.
///
/// # Safety
/// `ticket` must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_ticket_cancel(ticket: *const hoistway_kv_ticket) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        unsafe { held(ticket, "ticket")? }.ticket.cancel();
        Ok(())
    })
}

/// Returns whether the memory of a request is the caller's again: nothing reads or writes it any more. A request
/// releases its memory when it ends. After a time-out or a cancellation, the memory is released once the operating
/// system no longer uses it.
///
/// # Safety
/// `ticket` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_ticket_is_released(ticket: *const hoistway_kv_ticket) -> bool {
    // SAFETY: live, as the caller says.
    unsafe { ticket.as_ref() }.is_some_and(hoistway_kv_ticket::is_released)
}

/// Waits until the memory of a request is the caller's again, at most `timeout_ms` milliseconds; `UINT64_MAX` waits
/// without limit.
///
/// `HOISTWAY_PENDING` if the time ran out. `HOISTWAY_DEVICE` if the operating system or a device failed while it used
/// the memory: keep the memory, and do not touch it, for as long as the process lives. `HOISTWAY_CLOSED` in a child of
/// `fork`.
///
/// # Safety
/// `ticket` must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_ticket_wait_released(
    ticket: *const hoistway_kv_ticket,
    timeout_ms: u64,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let request = unsafe { held(ticket, "ticket")? };
        if request.wait_released(timeout(timeout_ms)) {
            return Ok(());
        }
        if request.memory.process != process::id() {
            let reason = "the request was made by the parent of this process";
            return Err(Failure::new(hoistway_status::HOISTWAY_CLOSED, reason));
        }
        if request.ticket.is_lost() {
            let reason =
                "the memory of the request may be in use as long as the process lives: do not touch it";
            return Err(Failure::new(hoistway_status::HOISTWAY_DEVICE, reason));
        }
        Err(Failure::pending())
    })
}

/// Frees a ticket. A request that has not ended is cancelled: to let it go on, keep its ticket. The call waits until
/// the memory is released. Afterwards the memory is the caller's, unless [`hoistway_kv_ticket_wait_released`] returns
/// `HOISTWAY_DEVICE`. In a child of `fork` the call does not wait. NULL is allowed.
///
/// # Safety
/// `ticket` must be NULL or come from `hoistway_kv_load` or `hoistway_kv_store`, and neither be in use nor have been
/// freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_ticket_free(ticket: *mut hoistway_kv_ticket) {
    // SAFETY: as the caller says.
    unsafe { handle::free(ticket) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HOISTWAY_DEMAND, kv::*};
    use ::hoistway_kv::{
        NamespaceDescription, NamespaceOptions, Store, StoreOptions,
        fault::{Fault, FaultScript, Gate},
    };
    use std::{ptr, thread};

    #[test]
    fn memory_is_the_stores_until_the_ticket_is_released() {
        let root = tempfile::tempdir().unwrap();
        let (gate, hung) = (Gate::new(), AtomicBool::new(false));
        let of_script = gate.clone();
        // The first read of a whole block hangs.
        let script = FaultScript::new(move |operation| {
            let is_first =
                !operation.is_write && operation.len >= 1 << 16 && !hung.swap(true, Ordering::Relaxed);
            is_first.then(|| Fault::Hang(of_script.clone()))
        });
        let options =
            StoreOptions::new(root.path()).capacity_bytes(64 << 20).min_free_bytes(0).faults(script);
        let store = Store::open(options).unwrap();
        let description = NamespaceDescription::default();
        let blocks = hoistway_kv_namespace {
            namespace: store.namespace(&description, NamespaceOptions::default()).unwrap(),
        };
        let mut memory = vec![7_u8; 1 << 16];
        let piece = hoistway_kv_piece {
            address: memory.as_mut_ptr().cast(),
            length: memory.len() as u64,
            target: crate::HOISTWAY_TARGET_HOST,
            device: 0,
        };
        let item = hoistway_kv_item {
            size: size_of::<hoistway_kv_item>() as u64,
            key: hoistway_kv_key { bytes: b"a".as_ptr().cast(), length: 1 },
            pieces: &raw const piece,
            piece_count: 1,
            shard: 0,
            reserved: 0,
        };
        let (mut stored, mut loaded) = (ptr::null_mut(), ptr::null_mut());
        let wanted = hoistway_status::HOISTWAY_OK;
        // SAFETY: everything lives until the tickets are freed.
        unsafe {
            let status = hoistway_kv_store(
                &raw const blocks,
                &raw const item,
                1,
                HOISTWAY_DEMAND,
                ptr::null(),
                &raw mut stored,
            );
            assert_eq!(status, wanted);
            assert_eq!(hoistway_kv_ticket_wait(stored, u64::MAX), wanted);
            hoistway_kv_ticket_free(stored);
            let status = hoistway_kv_load(
                &raw const blocks,
                &raw const item,
                1,
                HOISTWAY_DEMAND,
                ptr::null(),
                &raw mut loaded,
            );
            assert_eq!(status, wanted);
            while gate.came() == 0 {
                thread::yield_now();
            }
            assert_eq!(hoistway_kv_ticket_cancel(loaded), wanted);
            assert_eq!(hoistway_kv_ticket_wait(loaded, u64::MAX), hoistway_status::HOISTWAY_CANCELLED);
            assert!(!hoistway_kv_ticket_is_released(loaded), "the system has it");
            assert_eq!(hoistway_kv_ticket_wait_released(loaded, 20), hoistway_status::HOISTWAY_PENDING);
            gate.open();
            assert_eq!(hoistway_kv_ticket_wait_released(loaded, u64::MAX), wanted);
            assert!(hoistway_kv_ticket_is_released(loaded));
            hoistway_kv_ticket_free(loaded);
        }
    }
}
