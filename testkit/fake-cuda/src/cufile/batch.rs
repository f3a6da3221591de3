//! Batches of reads and writes.

use super::{
    abi::{
        BATCH_FULL, BATCH_SUBMIT_FAILED, BatchEntry, BatchEvent, Error, INTERNAL_ERROR, INVALID_VALUE,
        MODE_BATCH, OPERATION_READ, OPERATION_WRITE, STATUS_CANCELED, STATUS_COMPLETE, STATUS_FAILED, Status,
    },
    answer, file, parameters,
    pool::{self, Job},
    put, session,
    transfer::{Direction, Failure, Transfer},
};
use crate::{execution::handles::Table, gate};
use std::{
    collections::VecDeque,
    ffi::c_uint,
    slice,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// All batches that exist.
pub(crate) static BATCHES: Table<Batch> = Table::new(0xBA70_0000_0000);

/// A batch: entries that were submitted together and complete one by one.
pub(crate) struct Batch {
    capacity: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Submitted and not complete.
    outstanding: usize,
    /// Complete and not reported.
    events: VecDeque<BatchEvent>,
}

/// Ends what exists, and says how many batches that were.
pub(super) fn release_all() -> u64 {
    let batches = BATCHES.remove_if(|_| true);
    for batch in &batches {
        batch.abandon();
    }
    batches.len() as u64
}

impl Batch {
    fn submit(self: &Arc<Batch>, entries: &[BatchEntry]) -> Result<(), Error> {
        if entries.len() > self.capacity {
            return Err(BATCH_FULL);
        }
        let jobs = entries.iter().map(|entry| self.job(entry)).collect::<Result<Vec<_>, _>>()?;
        let mut state = self.state();
        // Also while events weren't fetched: the caller can't know that all is complete.
        if state.outstanding > 0 || !state.events.is_empty() {
            return Err(BATCH_SUBMIT_FAILED);
        }
        state.outstanding = jobs.len();
        drop(state);
        pool::submit(jobs).map_err(|_| {
            self.state().outstanding = 0;
            INTERNAL_ERROR
        })
    }

    fn job(self: &Arc<Batch>, entry: &BatchEntry) -> Result<Job, Error> {
        let direction = match entry.operation {
            OPERATION_READ => Direction::Read,
            OPERATION_WRITE => Direction::Write,
            _ => return Err(INVALID_VALUE),
        };
        if entry.mode != MODE_BATCH {
            return Err(INVALID_VALUE);
        }
        let transfer = Transfer {
            direction,
            file: file::get(entry.file)?,
            base: entry.base,
            buffer_offset: entry.buffer_offset,
            file_offset: entry.file_offset,
            size: entry.size,
        };
        Ok(Job { batch: Arc::clone(self), transfer, cookie: entry.cookie })
    }

    /// Notes what became of an entry.
    pub(super) fn finish(&self, cookie: usize, outcome: Result<u64, Failure>) {
        let (status, result) = match outcome {
            Ok(bytes) => (STATUS_COMPLETE, bytes as isize),
            Err(Failure::Cufile(error) | Failure::Errno(error)) => (STATUS_FAILED, -(error as isize)),
        };
        self.complete([BatchEvent { cookie, status, result }]);
    }

    /// Cancels what no thread has begun.
    fn cancel(self: &Arc<Batch>) {
        let canceled = |job: Job| BatchEvent { cookie: job.cookie, status: STATUS_CANCELED, result: 0 };
        self.complete(pool::withdraw(self).into_iter().map(canceled));
    }

    /// Waits until nothing uses the caller's memory any more.
    fn abandon(self: &Arc<Batch>) {
        self.cancel();
        let busy = |state: &mut State| state.outstanding > 0;
        drop(self.changed.wait_while(self.state(), busy).unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits for at least so many events, or until no more can come, and takes as many as asked for.
    fn take(&self, least: usize, most: usize, timeout: Option<Duration>) -> Vec<BatchEvent> {
        let lacking = |state: &mut State| state.events.len() < least && state.outstanding > 0;
        let mut state = match timeout {
            None => self.changed.wait_while(self.state(), lacking).unwrap_or_else(PoisonError::into_inner),
            Some(timeout) => {
                self.changed
                    .wait_timeout_while(self.state(), timeout, lacking)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
            }
        };
        let count = most.min(state.events.len());
        state.events.drain(..count).collect()
    }

    fn complete(&self, events: impl IntoIterator<Item = BatchEvent>) {
        let mut state = self.state();
        for event in events {
            state.outstanding = state.outstanding.saturating_sub(1);
            state.events.push_back(event);
        }
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuFileBatchIOSetUp(place: *mut usize, entries: c_uint) -> Status {
    answer("cuFileBatchIOSetUp", || {
        session::mode()?;
        let capacity = entries as usize;
        if capacity == 0 || capacity > parameters::size(parameters::BATCH_SIZE) || place.is_null() {
            return Err(INVALID_VALUE);
        }
        let batch = Batch { capacity, state: Mutex::default(), changed: Condvar::new() };
        // SAFETY: the place is the caller's.
        unsafe { put(place, BATCHES.insert(Arc::new(batch))) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuFileBatchIOSubmit(
    batch: usize,
    count: c_uint,
    entries: *const BatchEntry,
    flags: c_uint,
) -> Status {
    answer("cuFileBatchIOSubmit", || {
        let batch = BATCHES.get(batch).ok_or(INVALID_VALUE)?;
        if entries.is_null() || count == 0 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's array, with as many entries as it says.
        batch.submit(unsafe { slice::from_raw_parts(entries, count as usize) })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuFileBatchIOGetStatus(
    batch: usize,
    least: c_uint,
    count: *mut c_uint,
    events: *mut BatchEvent,
    timeout: *const libc::timespec,
) -> Status {
    answer("cuFileBatchIOGetStatus", || {
        let batch = BATCHES.get(batch).ok_or(INVALID_VALUE)?;
        if count.is_null() || events.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, so the caller's. The timeout is null or the caller's.
        let (most, timeout) = unsafe { (*count, timeout.as_ref()) };
        if least > most {
            return Err(INVALID_VALUE);
        }
        let timeout = timeout.map(duration).transpose()?;
        let taken = batch.take(least as usize, most as usize, timeout);
        // SAFETY: the caller's array has room for `most` events, and no more were taken.
        unsafe {
            events.copy_from_nonoverlapping(taken.as_ptr(), taken.len());
            count.write(taken.len() as c_uint);
        }
        Ok(())
    })
}

/// Entries that are being executed complete; the others are reported as canceled.
#[unsafe(no_mangle)]
extern "C" fn cuFileBatchIOCancel(batch: usize) -> Status {
    answer("cuFileBatchIOCancel", || {
        BATCHES.get(batch).ok_or(INVALID_VALUE)?.cancel();
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileBatchIODestroy(batch: usize) {
    if gate::admit("cuFileBatchIODestroy").is_ok()
        && let Some(batch) = BATCHES.remove(batch)
    {
        batch.abandon();
    }
}

fn duration(time: &libc::timespec) -> Result<Duration, Error> {
    match (u64::try_from(time.tv_sec), time.tv_nsec) {
        (Ok(seconds), 0..1_000_000_000) => Ok(Duration::new(seconds, time.tv_nsec as u32)),
        _ => Err(INVALID_VALUE),
    }
}
