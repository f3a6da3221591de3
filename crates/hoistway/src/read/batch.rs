//! What the caller holds of reads on their way.
#![forbid(unsafe_code)]

use super::{
    BatchReport, Priority, ReadFile,
    device::DirectRoute,
    queue::Reads,
    report::RouteRemarks,
    request::{Counted, OnEnd},
};
use crate::{
    ByteRange, Cancel, Error, Result,
    device::Fence,
    memory::{Block, Fill, WriteRegion},
    parallel::lock,
    plan::Runs,
    report::{Refusal, Tally, few_files_note},
    route::{DirectIo, NameCheck, Route},
};
use hoistway_io::{
    cancel::Registration,
    executor::{GroupId, Scheduler, Whose},
};
use std::{
    collections::VecDeque,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
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

/// What caller and lanes share of a batch.
#[derive(Debug)]
pub(super) struct BatchState {
    pub(super) number: u64,
    /// Ends its reads.
    pub(super) cancel: Cancel,
    reads: Box<[ReadState]>,
    /// The route, and the way to read directly, that the caller chose.
    pub(super) chosen: (Route, DirectIo),
    priority: Mutex<Priority>,
    bytes_done: AtomicU64,
    progress: Mutex<Progress>,
    changed: Condvar,
    tally: Mutex<Tally>,
    started: Instant,
    process: u32,
    /// The route of its other reads.
    main: Option<Arc<RouteRemarks>>,
    /// The routes past the host that its reads may take.
    direct: Vec<(Arc<DirectRoute>, NameCheck)>,
    /// As many reads in flight as the reader was asked for.
    asked_for: usize,
}

/// One read.
#[derive(Debug)]
pub(super) struct ReadState {
    pub(super) file: ReadFile,
    pub(super) range: ByteRange,
    pub(super) name: Option<Arc<str>>,
    /// What its pieces are parts of, if they are parts of memory.
    pub(super) fill: Option<Fill>,
    /// Whether the memory is the reader's, and the caller takes it.
    pub(super) is_owned: bool,
    /// Which of its bytes count as delivered, if not all.
    pub(super) counted: Option<Counted>,
    /// Which of its bytes go to the device, if not all.
    pub(super) packed: Option<Runs>,
    /// What its copies to a device wait for on the thread that queues them.
    pub(super) fences: Vec<Fence>,
    /// Whether it goes by a route whose name is a promise that its end has to check.
    pub(super) is_promised: bool,
    /// What the scheduler calls it, once it waits there.
    pub(super) group: OnceLock<GroupId>,
    /// Whether its file was unchanged when the first piece had come.
    was_unchanged: OnceLock<bool>,
    error: OnceLock<Arc<Error>>,
    block: Mutex<Option<Block>>,
    on_end: Mutex<Option<OnEnd>>,
}

#[derive(Debug, Default)]
struct Progress {
    has_ended: Vec<bool>,
    ended: usize,
    /// Those that have ended and that [`Batch::next_ended`] has not told.
    untold: VecDeque<usize>,
    ended_at: Option<Instant>,
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
        self.state.reads.iter().map(|read| read.range.len()).sum()
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
        let direct = state.direct.iter().map(|(route, _)| &route.remarks);
        state.main.as_deref().into_iter().chain(direct).for_each(|route| report.remark(route));
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
    }
}

impl ReadState {
    pub(super) fn new(
        file: ReadFile,
        range: ByteRange,
        name: Option<Arc<str>>,
        on_end: Option<OnEnd>,
        fill: Option<Fill>,
        is_owned: bool,
    ) -> Self {
        let (group, error) = (OnceLock::new(), OnceLock::new());
        let (block, on_end) = (Mutex::default(), Mutex::new(on_end));
        let (counted, packed, is_promised, was_unchanged) = (None, None, false, OnceLock::new());
        Self {
            file,
            range,
            name,
            fill,
            is_owned,
            counted,
            packed,
            fences: Vec::new(),
            is_promised,
            group,
            was_unchanged,
            error,
            block,
            on_end,
        }
    }

    /// A name for error messages.
    pub(super) fn name(&self) -> Option<String> {
        self.name.as_ref().map(|name| name.to_string())
    }

    /// Does `check` for the first piece that comes, and for others if it failed: nothing of a file that had changed before
    /// counts as delivered. One that changes later is found out at the end of the read.
    pub(super) fn check_first(&self, check: impl Fn() -> Result<()>) -> Result<()> {
        if *self.was_unchanged.get_or_init(|| check().is_ok()) { Ok(()) } else { check() }
    }

    /// All bytes of a piece are in its region.
    pub(super) fn complete(&self, region: WriteRegion) -> Result<()> {
        match &self.fill {
            Some(fill) => fill.complete(region, |_, block| {
                if self.is_owned {
                    *lock(&self.block) = Some(block);
                }
            }),
            None => Err(Error::Internal("a region was completed of a read without memory".into())),
        }
    }
}

impl BatchState {
    pub(super) fn new(
        number: u64,
        cancel: Cancel,
        reads: Vec<ReadState>,
        chosen: (Route, DirectIo),
        priority: Priority,
        (main, direct): (Option<Arc<RouteRemarks>>, Vec<Arc<DirectRoute>>),
        asked_for: usize,
    ) -> Self {
        let progress = Progress { has_ended: vec![false; reads.len()], ..Progress::default() };
        Self {
            number,
            cancel,
            reads: reads.into(),
            chosen,
            priority: Mutex::new(priority),
            bytes_done: AtomicU64::new(0),
            progress: Mutex::new(progress),
            changed: Condvar::new(),
            tally: Mutex::default(),
            started: Instant::now(),
            process: std::process::id(),
            main,
            direct: direct.into_iter().map(|own| (own.clone(), NameCheck::of(&own.member))).collect(),
            asked_for,
        }
    }

    pub(super) fn read(&self, read: usize) -> &ReadState {
        &self.reads[read]
    }

    /// All bytes of a piece are in their place.
    pub(super) fn deliver(&self, bytes: u64) {
        self.bytes_done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// All pieces of a read have ended: their lanes, the kernel and the device are done with their memory.
    pub(super) fn end(&self, read: usize, result: Result<()>) {
        let state = &self.reads[read];
        // Not for each piece: the daemon of a network's file system is asked, and takes its time.
        let result = result.map_err(|error| match error {
            Error::Io { .. } if self.cancel.is_cancelled() => Error::Cancelled,
            error => error,
        });
        if let Err(error) = result.and_then(|()| self.check_ended(state)) {
            let _ = state.error.set(Arc::new(error));
        }
        self.end_read(read);
    }

    /// Fails if a read whose pieces have all come is worth nothing nevertheless.
    fn check_ended(&self, read: &ReadState) -> Result<()> {
        read.file.0.check_unchanged(read.range, |_| read.name())?;
        let route = self.chosen.0;
        for (direct, name_check) in self.direct.iter().filter(|_| read.is_promised) {
            if direct.member.route() == route
                && let Err(why) = name_check.look()
            {
                return Err(Error::RouteUnavailable { route, path: None, why });
            }
        }
        Ok(())
    }

    /// Finds out at the end of the batch whether its routes have done what their names promise. One that was chosen and has
    /// not is not used any more.
    fn check_kept(&self) {
        for (direct, name_check) in &self.direct {
            let (route, kept) = (direct.member.route(), name_check.check());
            if let (false, Err(why)) = (route == self.chosen.0, kept) {
                self.tally().refuse(Refusal::new(route.name(), None, why.clone()));
                direct.give_up(why);
            }
        }
    }

    /// A read ends before it began.
    pub(super) fn fail(&self, read: usize, error: Error) {
        let _ = self.reads[read].error.set(Arc::new(error));
        self.end_read(read);
    }

    /// A read of no bytes ends.
    pub(super) fn end_empty(&self, read: usize) {
        if self.reads[read].is_owned {
            *lock(&self.reads[read].block) = Some(Block::empty());
        }
        self.end_read(read);
    }

    fn end_read(&self, read: usize) {
        let state = &self.reads[read];
        if state.error.get().is_some() {
            *lock(&state.block) = None;
        }
        if let Some(OnEnd(on_end)) = lock(&state.on_end).take() {
            let outcome = state.error.get().map_or(Ok(()), |error| Err(&**error));
            // The panic hook has told; the lane has others to serve.
            let _ = panic::catch_unwind(AssertUnwindSafe(|| on_end(outcome)));
        }
        let mut progress = self.progress();
        if progress.ended + 1 == self.reads.len() {
            drop(progress);
            // No other read ends after this one.
            self.check_kept();
            progress = self.progress();
        }
        progress.has_ended[read] = true;
        progress.untold.push_back(read);
        progress.ended += 1;
        if progress.ended == self.reads.len() {
            progress.ended_at = Some(Instant::now());
        }
        drop(progress);
        self.changed.notify_all();
    }

    /// What its reads have done so far.
    pub(super) fn tally(&self) -> MutexGuard<'_, Tally> {
        lock(&self.tally)
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        lock(&self.progress)
    }
}
