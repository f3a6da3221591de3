//! Requests under way: how their items ended, and when their memory is the caller's again.
#![allow(unsafe_code)]

use super::timeout;
use crate::{
    handle::{self, held},
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

/// What became of an item.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum hoistway_kv_status {
    /// Loaded and verified, or stored.
    HOISTWAY_KV_OK = 0,
    /// A store of a block that is there already, or that is being stored by another request. Nothing was written.
    HOISTWAY_KV_EXISTS = 1,
    /// A load of a block that is not there.
    HOISTWAY_KV_MISS = 2,
    /// A load of a block whose time was over.
    HOISTWAY_KV_EXPIRED = 3,
    /// A load of a block that is not what was stored. It is a miss from now on; the memory holds anything.
    HOISTWAY_KV_CORRUPT = 4,
    /// The memory has another length than the shard, or the block other shards. The block stays; the memory holds anything.
    HOISTWAY_KV_MISMATCH = 5,
    /// A store that was refused: everything that could be evicted is in use, or the file system is full.
    HOISTWAY_KV_NO_ROOM = 6,
    /// A store that was refused: the namespace has used up its quota.
    HOISTWAY_KV_QUOTA = 7,
    /// A store that was refused: too many bytes are under way.
    HOISTWAY_KV_BUSY = 8,
    /// A store that was refused: it was not asked for before.
    HOISTWAY_KV_NOT_ADMITTED = 9,
    /// A store that was refused: it is larger than a segment.
    HOISTWAY_KV_TOO_LARGE = 10,
    /// It took too long. The memory is the store's until the ticket is released.
    HOISTWAY_KV_TIMED_OUT = 11,
    /// It was cancelled. The memory is the store's until the ticket is released.
    HOISTWAY_KV_CANCELLED = 12,
    /// The system's error, by `error`, which says nothing of the block: it stays.
    HOISTWAY_KV_IO = 13,
    /// Something that this version of the interface has no name for: the ticket's report has.
    HOISTWAY_KV_OTHER = 14,
}

/// How one item of a request ended. It never gets more members.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_kv_outcome {
    /// What became of it.
    pub status: hoistway_kv_status,
    /// The `errno` of `HOISTWAY_KV_IO`; else 0.
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

/// A request under way.
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

/// The number of a ticket, as `hoistway_kv_drain` tells it; 0 if `ticket` is NULL.
///
/// # Safety
/// `ticket` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_ticket_id(ticket: *const hoistway_kv_ticket) -> u64 {
    // SAFETY: live, as the caller says.
    unsafe { ticket.as_ref() }.map_or(0, |request| request.ticket.id())
}

/// Waits for the end of a request, `timeout_ms` milliseconds at most; `UINT64_MAX` is for ever.
///
/// `HOISTWAY_OK` if every item was loaded, or is in the store; `HOISTWAY_PENDING` if the time ran out; else what came of
/// the first item that failed: `HOISTWAY_NOT_FOUND` for a miss, `HOISTWAY_CORRUPT`, `HOISTWAY_REFUSED`, and so on.
/// [`hoistway_kv_ticket_outcomes`] tells which items these were.
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

/// How far a request has got: `HOISTWAY_PENDING`, or what [`hoistway_kv_ticket_wait`] returns. Never waits, and leaves the
/// thread's last error as it is.
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

/// Tells what became of each item, in the order of the request; `HOISTWAY_PENDING` if it has not ended.
///
/// # Safety
/// `ticket` must be live, `outcomes` have room for `count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_ticket_outcomes(
    ticket: *const hoistway_kv_ticket,
    outcomes: *mut hoistway_kv_outcome,
    count: u64,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let request = unsafe { held(ticket, "ticket")? };
        if outcomes.is_null() || count != request.items as u64 {
            let reason = format!("there is room for {count} outcomes: the request has {}", request.items);
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

/// Gives what came of a request, as JSON: statuses by name, bytes, the way that these took, times. `HOISTWAY_PENDING` if it
/// has not ended. Free it with `hoistway_string_free`.
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

/// Ends a request now, if it has not ended: items that have not are cancelled. Its memory is the store's until the ticket is
/// released. Does not wait.
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

/// Whether the memory of a request is the caller's again: nothing reads or writes it any more. Requests release their memory
/// as they end, but for those that timed out or were cancelled: these release it once the system is done with it.
///
/// # Safety
/// `ticket` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_ticket_is_released(ticket: *const hoistway_kv_ticket) -> bool {
    // SAFETY: live, as the caller says.
    unsafe { ticket.as_ref() }.is_some_and(hoistway_kv_ticket::is_released)
}

/// Waits until the memory of a request is the caller's again, `timeout_ms` milliseconds at most; `UINT64_MAX` is for ever.
/// `HOISTWAY_PENDING` if the time ran out. `HOISTWAY_DEVICE` if the system or a device failed while it had the memory: then it
/// cannot be known when it is free, so keep it, and do not touch it, for as long as the process lives. `HOISTWAY_CLOSED` in a
/// child of `fork`.
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
            let reason = "the request is one of the parent of this process";
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

/// Frees a ticket. Cancels a request that has not ended, and waits until its memory is released: after that the memory is the
/// caller's, unless [`hoistway_kv_ticket_wait_released`] says `HOISTWAY_DEVICE`. To let a request go on, keep its ticket. In a
/// child of `fork` it does not wait. NULL is fine.
///
/// # Safety
/// `ticket` must come from `hoistway_kv_load` or `hoistway_kv_store`,
/// and not be in use nor have been freed.
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
