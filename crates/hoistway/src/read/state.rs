//! What is known of the reads of a batch while they are on their way.
#![forbid(unsafe_code)]

use super::{
    Priority, ReadFile,
    device::DeviceShare,
    request::{OnEnd, Sink},
    shared::ReaderShared,
};
use crate::{
    ByteRange, Cancel, DeviceId, Error, Result,
    device::Fence,
    memory::{Block, Fill, WriteRegion},
    parallel::lock,
    plan::Runs,
    report::{Refusal, RouteRemarks, Tally},
    route::{DirectIo, DirectRoute, NameCheck, Route},
};
use hoistway_io::executor::GroupId;
use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    panic::{self, AssertUnwindSafe},
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak, atomic::AtomicU64},
    time::Instant,
};

/// What caller and lanes share of a batch.
#[derive(Debug)]
pub(super) struct BatchState {
    pub(super) number: u64,
    /// Ends its reads.
    pub(super) cancel: Cancel,
    pub(super) reads: Box<[ReadState]>,
    /// The route, and the way to read directly, that the caller chose.
    pub(super) chosen: (Route, DirectIo),
    pub(super) priority: Mutex<Priority>,
    pub(super) bytes_done: AtomicU64,
    progress: Mutex<Progress>,
    pub(super) changed: Condvar,
    tally: Mutex<Tally>,
    /// For each device that a piece was copied to, how much staging was pinned, if the system has refused some.
    pub(super) pinned_short: Mutex<BTreeMap<DeviceId, String>>,
    pub(super) started: Instant,
    pub(super) process: u32,
    /// The route of its other reads.
    pub(super) main: Option<Arc<RouteRemarks>>,
    /// The routes past the host that its reads may take.
    pub(super) direct: Vec<(Arc<DirectRoute>, NameCheck)>,
    /// As many reads in flight as the reader was asked for.
    pub(super) asked_for: usize,
    /// Its reader, as long as that is there.
    pub(super) reader: Weak<ReaderShared>,
    /// Why nothing comes any more.
    pub(super) lost: Arc<OnceLock<String>>,
}

/// Where the bytes of a read go.
pub(super) enum Destination {
    /// Memory of the reader's, with room for whole blocks, that the caller takes.
    Own,
    /// The caller's memory.
    Borrowed,
    /// To a device, at this address: with all of what is packed there, or else as they lie in the file. Past the host, if the
    /// line's [`DeviceShare::direct`] has the file ready.
    Device { device: DeviceId, line: Weak<DeviceShare>, address: u64, is_spread: bool, is_direct: bool },
    /// To a function, which is gone before the read has ended.
    Sink(Mutex<Option<Arc<Sink>>>),
    /// They are not wanted.
    Discard,
}

impl fmt::Debug for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Own => "Own",
            Self::Borrowed => "Borrowed",
            Self::Device { .. } => "Device",
            Self::Sink(_) => "Sink",
            Self::Discard => "Discard",
        })
    }
}

/// One read.
#[derive(Debug)]
pub(super) struct ReadState {
    pub(super) file: ReadFile,
    pub(super) range: ByteRange,
    pub(super) name: Option<Arc<str>>,
    pub(super) place: Destination,
    /// What its pieces are parts of, if they are parts of memory.
    fill: Option<Fill>,
    /// Which of its bytes go to memory of the caller's, if not all.
    pub(super) packed: Option<Runs>,
    /// What its copies to a device wait for on the thread that queues them.
    pub(super) fences: Vec<Fence>,
    /// What the scheduler calls it, once it waits there.
    pub(super) group: OnceLock<GroupId>,
    /// Whether its file was unchanged when the first piece had come.
    was_unchanged: OnceLock<bool>,
    pub(super) error: OnceLock<Arc<Error>>,
    pub(super) block: Mutex<Option<Block>>,
    on_end: Mutex<Option<OnEnd>>,
}

#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) has_ended: Vec<bool>,
    pub(super) ended: usize,
    /// Those that have ended and that the caller was not told of.
    pub(super) untold: VecDeque<usize>,
    pub(super) ended_at: Option<Instant>,
}

impl ReadState {
    pub(super) fn new(
        file: ReadFile,
        range: ByteRange,
        name: Option<Arc<str>>,
        on_end: Option<OnEnd>,
        place: Destination,
        fill: Option<Fill>,
    ) -> Self {
        let (group, error) = (OnceLock::new(), OnceLock::new());
        let (block, on_end) = (Mutex::default(), Mutex::new(on_end));
        let (packed, was_unchanged) = (None, OnceLock::new());
        Self {
            file,
            range,
            name,
            place,
            fill,
            packed,
            fences: Vec::new(),
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
                if matches!(self.place, Destination::Own) {
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
        priority: Priority,
        direct: Vec<Arc<DirectRoute>>,
        reader: &Arc<ReaderShared>,
    ) -> Self {
        let progress = Progress { has_ended: vec![false; reads.len()], ..Progress::default() };
        Self {
            number,
            cancel,
            reads: reads.into(),
            chosen: (reader.options.route, reader.options.direct),
            priority: Mutex::new(priority),
            bytes_done: AtomicU64::new(0),
            progress: Mutex::new(progress),
            changed: Condvar::new(),
            tally: Mutex::default(),
            pinned_short: Mutex::default(),
            started: Instant::now(),
            process: std::process::id(),
            main: reader.remarks.get().cloned(),
            direct: direct.into_iter().map(|own| (own.clone(), NameCheck::of(&own.member))).collect(),
            asked_for: reader.options.in_flight,
            reader: Arc::downgrade(reader),
            lost: reader.lost.clone(),
        }
    }

    pub(super) fn read(&self, read: usize) -> &ReadState {
        &self.reads[read]
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
        // The name of a route past the host is a promise.
        let is_promised = matches!(read.place, Destination::Device { is_direct: true, .. });
        for (direct, name_check) in self.direct.iter().filter(|_| is_promised) {
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
        if matches!(self.reads[read].place, Destination::Own) {
            *lock(&self.reads[read].block) = Some(Block::empty());
        }
        self.end_read(read);
    }

    fn end_read(&self, read: usize) {
        let state = &self.reads[read];
        if state.error.get().is_some() {
            *lock(&state.block) = None;
        }
        if let Destination::Sink(sink) = &state.place {
            let sink = lock(sink).take();
            contain(|| drop(sink));
        }
        let on_end = lock(&state.on_end).take();
        if let Some(OnEnd(on_end)) = on_end {
            let outcome = state.error.get().map_or(Ok(()), |error| Err(&**error));
            contain(|| on_end(outcome));
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

    pub(super) fn progress(&self) -> MutexGuard<'_, Progress> {
        lock(&self.progress)
    }
}

/// Calls code of the caller's. If it panics, the panic hook has told, and the lane has others to serve.
fn contain(call: impl FnOnce()) {
    let _ = panic::catch_unwind(AssertUnwindSafe(call));
}
