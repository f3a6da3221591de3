//! What the caller holds of reads on their way.
#![forbid(unsafe_code)]

use super::{
    BatchReport, Priority,
    state::{BatchState, Progress},
};
use crate::{
    DeviceId, Error,
    memory::Block,
    parallel::lock,
    report::{Tally, few_files_note},
    transfer::Reads,
};
use hoistway_io::{
    cancel::Registration,
    executor::{Scheduler, Whose},
};
use std::{
    sync::{Arc, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

/// Reads on their way, numbered in the order in which they were submitted.
///
/// Each succeeds or fails for itself. Dropping the batch cancels what has not begun and waits for what the kernel or a
/// device has: after that, nothing uses the caller's memory any more.
///
/// In a child of `fork`, all of them have failed with [`Error::Forked`]: nothing reads there.
#[derive(Debug)]
pub struct Batch {
    state: Arc<BatchState>,
    scheduler: Arc<Scheduler<Reads>>,
    /// Has reads that wait for a lane end once they are cancelled.
    _on_cancel: Registration,
}

/// What a child of `fork` is told of each read.
static FORKED: Error = Error::Forked;

/// How far a read has got.
#[derive(Clone, Copy, Debug)]
pub enum ReadStatus<'a> {
    /// Waiting, or under way.
    Pending,
    /// All bytes are in their place.
    Delivered,
    /// It has ended without all of its bytes; what lies in its place is worth nothing.
    Failed(&'a Error),
}

impl<'a> ReadStatus<'a> {
    /// Whether it has not ended.
    pub fn is_pending(self) -> bool {
        matches!(self, Self::Pending)
    }

    /// Why it failed, if it did.
    pub fn error(self) -> Option<&'a Error> {
        match self {
            Self::Failed(error) => Some(error),
            Self::Pending | Self::Delivered => None,
        }
    }
}

impl Batch {
    pub(super) fn new(state: Arc<BatchState>, scheduler: Arc<Scheduler<Reads>>) -> Self {
        let (tag, waiting) = (Whose::Tag(state.number), scheduler.clone());
        let on_cancel = state.cancel.on_cancel(move || _ = waiting.cancel(tag));
        Self { state, scheduler, _on_cancel: on_cancel }
    }

    /// Number of reads.
    pub fn len(&self) -> usize {
        self.state.reads.len()
    }

    /// Whether it has no read.
    pub fn is_empty(&self) -> bool {
        self.state.reads.is_empty()
    }

    /// Number of reads that have ended, well or not.
    pub fn ended(&self) -> usize {
        if self.is_foreign() { self.len() } else { self.state.progress().ended }
    }

    /// Bytes that have reached their place.
    pub fn bytes_done(&self) -> u64 {
        self.state.bytes_done.load(Ordering::Relaxed)
    }

    /// Bytes that were asked for.
    pub fn bytes_total(&self) -> u64 {
        self.state.reads.iter().fold(0, |sum, read| sum.saturating_add(read.range.len()))
    }

    /// How far a read has got. One that does not exist is pending for ever.
    pub fn status(&self, read: usize) -> ReadStatus<'_> {
        if self.is_foreign() {
            return ReadStatus::Failed(&FORKED);
        }
        let has_ended = self.state.progress().has_ended.get(read).copied().unwrap_or(false);
        match self.state.reads.get(read) {
            Some(state) if has_ended => {
                state.error.get().map_or(ReadStatus::Delivered, |error| ReadStatus::Failed(error))
            }
            _ => ReadStatus::Pending,
        }
    }

    /// Why a read failed, to be kept longer than the batch and its memory. `None` if it has not failed, or not yet.
    pub fn error(&self, read: usize) -> Option<Arc<Error>> {
        if self.is_foreign() {
            return Some(Arc::new(Error::Forked));
        }
        self.status(read).error()?;
        self.state.reads.get(read)?.error.get().cloned()
    }

    /// Waits for all reads, which makes their priority [`Demand`](Priority::Demand).
    ///
    /// # Errors
    /// That of the first read that failed, in the order of the reads. The others have ended too.
    pub fn wait(&self) -> Result<(), &Error> {
        // No timeout, so it does not run out.
        self.wait_within(Duration::MAX).unwrap_or(Ok(()))
    }

    /// Like [`wait`](Batch::wait), but no longer than `timeout`: `None` if some read is still pending then.
    pub fn wait_within(&self, timeout: Duration) -> Option<Result<(), &Error>> {
        if self.is_foreign() {
            return Some(Err(&FORKED));
        }
        self.promote_if(|progress| progress.ended < self.len(), None);
        let ended = self.wait_until(timeout, |progress| (progress.ended == self.len()).then_some(()));
        ended.map(|()| {
            let mut errors = self.state.reads.iter().filter_map(|read| read.error.get());
            errors.next().map_or(Ok(()), |error| Err(&**error))
        })
    }

    /// Waits for one read no longer than `timeout`, which makes its priority [`Demand`](Priority::Demand).
    pub fn wait_read(&self, read: usize, timeout: Duration) -> ReadStatus<'_> {
        if read < self.len() && !self.is_foreign() {
            self.promote_if(|progress| !progress.has_ended[read], Some(read));
            self.wait_until(timeout, |progress| progress.has_ended[read].then_some(()));
        }
        self.status(read)
    }

    /// The next read to end, each once, in the order in which they end. Waits no longer than `timeout`; `None` if none
    /// ended, or all were told.
    pub fn next_ended(&self, timeout: Duration) -> Option<usize> {
        if self.is_foreign() {
            return None;
        }
        let told = self.wait_until(timeout, |progress| {
            let next = progress.untold.pop_front();
            (next.is_some() || progress.ended == self.len()).then_some(next)
        });
        told.flatten()
    }

    /// The bytes of a read into [`Target::memory`](super::Target::memory), once; `None` before they are there.
    pub fn take(&self, read: usize) -> Option<Block> {
        let state = self.state.reads.get(read).filter(|_| !self.is_foreign())?;
        lock(&state.block).take()
    }

    /// Makes the priority of reads that have not begun demand.
    pub fn promote(&self) {
        self.promote_if(|progress| progress.ended < self.len(), None);
    }

    /// Reads that have not begun will not, and those that wait for a server end soon: with [`Error::Cancelled`]. Those that
    /// the kernel or a device has end as they may.
    pub fn cancel(&self) {
        if self.is_foreign() {
            return;
        }
        self.state.cancel.cancel();
    }

    /// What it has done so far. A child of `fork` learns only what was asked for.
    pub fn report(&self) -> BatchReport {
        let state = &self.state;
        let (ended, failed, ended_at, tally, priority) = if self.is_foreign() {
            (self.len(), self.len(), None, Tally::default(), Priority::default())
        } else {
            let progress = state.progress();
            let failed = state.reads.iter().zip(&progress.has_ended);
            let failed = failed.filter(|(read, has_ended)| **has_ended && read.error.get().is_some()).count();
            let (tally, priority) = (state.tally().clone(), *lock(&state.priority));
            (progress.ended, failed, progress.ended_at, tally, priority)
        };
        let Tally { mut carriers, refused, retries, staged_bytes } = tally;
        let mut proof = None;
        for (_, name_check) in state.direct.iter().filter(|_| !self.is_foreign()) {
            proof = proof.or(name_check.name_truly(&mut carriers));
        }
        let mut report = BatchReport {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            route: state.chosen.0,
            priority,
            reads: self.len(),
            delivered: ended - failed,
            failed,
            bytes: self.bytes_total(),
            delivered_bytes: carriers.iter().map(|carrier| carrier.tensor_bytes).sum(),
            read_bytes: carriers.iter().map(|carrier| carrier.read_bytes).sum(),
            staged_bytes,
            carriers,
            proof,
            refused,
            notes: few_files_note(state.asked_for).into_iter().collect(),
            retries,
            seconds: ended_at.unwrap_or_else(Instant::now).duration_since(state.started).as_secs_f64(),
        };
        if !self.is_foreign() {
            // What could not be pinned once is not used again.
            let note = |(device, short): (&DeviceId, &String)| {
                format!("{device}: {short}; to pin more, open the reader anew")
            };
            report.notes.extend(lock(&state.pinned_short).iter().map(note));
        }
        let direct = state.direct.iter().map(|(route, _)| &route.remarks);
        for route in state.main.as_deref().into_iter().chain(direct) {
            route.add_to(&report.carriers, &mut report.notes, &mut report.refused);
        }
        report
    }

    fn promote_if(&self, is_wanted: impl FnOnce(&Progress) -> bool, read: Option<usize>) {
        if self.is_foreign() || !is_wanted(&self.state.progress()) {
            return;
        }
        let mut priority = lock(&self.state.priority);
        if *priority == Priority::Demand {
            return;
        }
        let whose = match read {
            None => {
                *priority = Priority::Demand;
                Some(Whose::Tag(self.state.number))
            }
            Some(read) => self.state.reads[read].group.get().copied().map(Whose::Group),
        };
        drop(priority);
        whose.into_iter().for_each(|whose| self.scheduler.promote(whose));
    }

    /// Whether this process is a child of `fork` in which nothing reads: locks may be held by threads that it lacks.
    fn is_foreign(&self) -> bool {
        self.state.process != std::process::id()
    }

    fn wait_until<T>(
        &self,
        timeout: Duration,
        mut ready: impl FnMut(&mut Progress) -> Option<T>,
    ) -> Option<T> {
        let deadline = Instant::now().checked_add(timeout);
        let mut progress = self.state.progress();
        loop {
            if let Some(value) = ready(&mut progress) {
                return Some(value);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            progress = match left {
                Some(Duration::ZERO) => return None,
                Some(left) => {
                    let woken = self.state.changed.wait_timeout(progress, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.state.changed.wait(progress).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if self.is_foreign() {
            return;
        }
        self.cancel();
        let _ = self.wait_until(Duration::MAX, |progress| (progress.ended == self.len()).then_some(()));
        // Lanes may hold the state a little longer; memory that was not taken is free now.
        for read in &*self.state.reads {
            let block = lock(&read.block).take();
            drop(block);
        }
    }
}
