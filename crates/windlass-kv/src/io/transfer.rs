//! A job that was taken on: its steps, and what is known of its outcome.
#![forbid(unsafe_code)]

use super::{
    AwaitedEvent, Carrier, Checksums, Direction, Done, Failure, Header, Job, MakeHeader, Outcome, Part,
    checksum::PartSum,
    plan::{Content, DevicePieces, Grid, Limits, Step, Wanted},
    worker::Mover,
};
use crate::{
    KeepAlive,
    disk::{DataFile, FileRef},
};
use std::{
    collections::VecDeque,
    fmt, io, mem,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};
use windlass_io::{
    executor::{GroupId, Reason, Scheduler, Whose},
    parallel::lock,
};

/// The caller's memory, which every operation of a transfer holds.
pub(super) type Kept = Arc<KeepAlive>;

/// A job that was taken on.
pub(super) struct Transfer {
    pub(super) direction: Direction,
    pub(super) file: FileRef,
    pub(super) checksums: Checksums,
    pub(super) parts: Vec<Part>,
    header: HeaderPlace,
    state: Mutex<State>,
}

/// Where the header is, if it is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeaderPlace {
    None,
    Read(u64),
    Write(u64),
}

struct State {
    /// Once it has begun.
    file: Option<Arc<DataFile>>,
    /// Steps that have not begun.
    steps: VecDeque<Step>,
    /// Steps that are not done, whether they have begun or not.
    undone: usize,
    /// Steps of a write whose bytes are being summed.
    gathering: usize,
    /// The checksum of each part as far as it is known; empty if checksums are skipped.
    sums: Vec<PartSum>,
    header: Vec<u8>,
    make_header: Option<MakeHeader>,
    kept: Option<Kept>,
    done: Option<Done>,
    carried: Vec<(Carrier, u64)>,
    bounced_bytes: u64,
    failure: Option<Failure>,
    started: Option<Instant>,
    late: Option<LateFile>,
    /// Groups of operations that have not ended.
    groups: usize,
    helpers: Option<Helpers>,
}

/// The group of operations that help with further steps.
struct Helpers {
    scheduler: Arc<Scheduler<Mover>>,
    group: GroupId,
}

/// One of the files that are open for single transfers.
#[derive(Debug)]
pub(super) struct LateFile(Arc<AtomicUsize>);

impl LateFile {
    /// `None` if there are `most`.
    pub(super) fn open(count: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let one_more = |open| (open < most).then_some(open + 1);
        count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(Self(count.clone()))
    }
}

impl Drop for LateFile {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Transfer {
    pub(super) fn new(job: Job) -> Arc<Self> {
        let Job { direction, file, header, parts, checksums, keep, done, .. } = job;
        let (header, make_header) = match header {
            Header::None => (HeaderPlace::None, None),
            Header::Read { offset } => (HeaderPlace::Read(offset), None),
            Header::Write { offset, make } => (HeaderPlace::Write(offset), Some(make)),
        };
        let sums = match checksums {
            Checksums::Compute | Checksums::Require => vec![PartSum::default(); parts.len()],
            Checksums::Skip => Vec::new(),
        };
        let state = State {
            file: None,
            steps: VecDeque::new(),
            undone: 0,
            gathering: 0,
            sums,
            header: Vec::new(),
            make_header,
            kept: Some(Arc::new(keep)),
            done: Some(done),
            carried: Vec::new(),
            bounced_bytes: 0,
            failure: None,
            started: None,
            late: None,
            groups: 1,
            helpers: None,
        };
        Arc::new(Self { direction, file, checksums, parts, header, state: Mutex::new(state) })
    }

    /// What its event is, which keeps the caller's memory and so the event.
    pub(super) fn event(&self, handle: u64) -> AwaitedEvent {
        let devices = self.parts.iter().flat_map(|part| &part.pieces).map(|piece| piece.device);
        AwaitedEvent::new(handle, devices, self.kept().as_ref().clone())
    }

    pub(super) fn kept(&self) -> Kept {
        self.state().kept.clone().unwrap_or_else(|| Arc::new(KeepAlive::by_caller()))
    }

    pub(super) fn len_bytes(&self) -> u64 {
        self.parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.len))
    }

    /// Its steps, as things stand with its file.
    pub(super) fn plan(
        &self,
        file: &DataFile,
        limits: Limits,
        devices: DevicePieces,
    ) -> Result<VecDeque<Step>, &'static str> {
        let grid = match file.direct() {
            Ok(direct) => {
                Grid { memory: direct.memory_alignment.max(1), offset: direct.offset_alignment.max(1) }
            }
            Err(_) => Grid::BUFFERED,
        };
        let wanted = Wanted { header: None, parts: &self.parts, grid, devices, limits };
        match self.header {
            HeaderPlace::None => wanted.steps(),
            HeaderPlace::Read(offset) => Wanted { header: Some(offset), ..wanted }.steps(),
            HeaderPlace::Write(offset) => {
                let steps = Wanted { header: Some(offset), ..wanted }.steps()?;
                if steps.len() == 1 {
                    return Ok(steps);
                }
                // The header comes last: it has the checksums of the others.
                let mut steps = wanted.steps()?;
                steps.extend(Wanted { header: Some(offset), parts: &[], ..wanted }.steps()?);
                Ok(steps)
            }
        }
    }

    /// Its file, once it is open and the steps are planned.
    pub(super) fn opened(&self) -> Option<Arc<DataFile>> {
        self.state().file.clone()
    }

    /// Its file is open, and these are its steps.
    pub(super) fn open(&self, file: Arc<DataFile>, late: Option<LateFile>, steps: VecDeque<Step>) {
        let mut state = self.state();
        state.undone = steps.len();
        (state.file, state.late, state.steps) = (Some(file), late, steps);
    }

    /// A further group of operations carries out steps.
    pub(super) fn joined(&self) {
        self.state().groups += 1;
    }

    /// This group, which has [joined](Self::joined), helps.
    pub(super) fn helped_by(&self, scheduler: Arc<Scheduler<Mover>>, group: GroupId) {
        self.state().helpers = Some(Helpers { scheduler, group });
    }

    /// Where all steps are done, or one has failed, helpers that wait are not to begin, and the end does not wait for them.
    pub(super) fn release_helpers(&self) {
        let mut state = self.state();
        if state.undone > 0 && state.failure.is_none() {
            return;
        }
        let helpers = state.helpers.take();
        drop(state);
        if let Some(Helpers { scheduler, group }) = helpers {
            scheduler.cancel(Whose::Group(group));
        }
    }

    /// Returns the next step to begin. The step with the header waits until all others are summed: the thread that sums
    /// the last one begins it.
    pub(super) fn next_step(&self) -> Option<Step> {
        let mut state = self.state();
        if state.failure.is_some() {
            return None;
        }
        let is_write = self.direction == Direction::Write;
        let waits = |step: &Step| is_write && has_header(step);
        if state.gathering > 0 && state.steps.front().is_some_and(waits) {
            return None;
        }
        let step = state.steps.pop_front()?;
        state.gathering += usize::from(is_write);
        Some(step)
    }

    /// A step that was taken has not begun, or is to be done in another way.
    pub(super) fn put_step_back(&self, step: Step) {
        let mut state = self.state();
        state.gathering -= usize::from(self.direction == Direction::Write);
        state.steps.push_front(step);
    }

    /// Whether there are steps that have not begun.
    pub(super) fn has_steps(&self) -> bool {
        !self.state().steps.is_empty()
    }

    /// A step begins. Returns how many others there are if it is the first.
    pub(super) fn begin(&self) -> Option<usize> {
        let mut state = self.state();
        let is_first = state.started.is_none();
        state.started.get_or_insert_with(Instant::now);
        is_first.then_some(state.steps.len())
    }

    /// A step was moved without being summed.
    pub(super) fn skipped(&self) {
        self.state().gathering -= usize::from(self.direction == Direction::Write);
    }

    /// All bytes of a step are where they are to be.
    pub(super) fn completed(&self) {
        self.state().undone -= 1;
    }

    /// Bytes of our memory that its steps need, at most.
    pub(super) fn most_bounced(&self) -> u64 {
        self.state().steps.iter().map(|step| step.bounced).max().unwrap_or(0)
    }

    /// Returns sums of no bytes, for a step to add to; none if checksums are skipped.
    pub(super) fn empty_sums(&self) -> Vec<PartSum> {
        let count = if self.checksums == Checksums::Skip { 0 } else { self.parts.len() };
        vec![PartSum::default(); count]
    }

    /// Bytes of a step that is to be written were summed. Returns the header, if the step has it.
    pub(super) fn gathered(&self, step: &Step, sums: Vec<PartSum>) -> Option<Vec<u8>> {
        let mut state = self.state();
        state.gathering -= 1;
        state.add_sums(sums);
        if !has_header(step) {
            return None;
        }
        let sums = state.sums(&self.parts, |sums| sums.to_vec());
        let make = state.make_header.take();
        drop(state);
        Some(make.map_or_else(Vec::new, |make| make(&sums)))
    }

    /// Bytes of a step that was read were summed.
    pub(super) fn scattered(&self, sums: Vec<PartSum>, header: Vec<u8>) {
        let mut state = self.state();
        state.add_sums(sums);
        state.header.extend(header);
    }

    /// Notes bytes that were moved.
    pub(super) fn account(&self, carrier: Carrier, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let carried = &mut self.state().carried;
        match carried.iter_mut().find(|(own, _)| *own == carrier) {
            Some((_, sum)) => *sum += bytes,
            None => carried.push((carrier, bytes)),
        }
    }

    /// Notes bytes of the caller's that went by way of our memory.
    pub(super) fn account_bounced(&self, step: &Step) {
        self.state().bounced_bytes += step.bounced_payload();
    }

    /// Notes that a step failed: no other begins.
    pub(super) fn fail(&self, failure: Failure) {
        let mut state = self.state();
        state.steps.clear();
        match failure {
            lost @ Failure::Lost(_) => state.failure = Some(lost),
            failure => _ = state.failure.get_or_insert(failure),
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.state().failure.is_some()
    }

    /// Whether a device has moved bytes directly.
    pub(super) fn used_gds(&self) -> bool {
        self.state().carried.iter().any(|(carrier, _)| *carrier == Carrier::Gds)
    }

    /// Notes that what cuFile moved went through host memory.
    pub(super) fn was_not_direct(&self) {
        for (carrier, _) in &mut self.state().carried {
            if *carrier == Carrier::Gds {
                *carrier = Carrier::GdsCompat;
            }
        }
    }

    /// A group of its operations has ended. `true` for the last one, which is to [end](Self::end) it.
    pub(super) fn left(&self) -> bool {
        let mut state = self.state();
        state.groups -= 1;
        state.groups == 0
    }

    /// Lets the memory go, and says how it went.
    pub(super) fn end(&self) {
        let mut state = self.state();
        let (file, late, kept, done) =
            (state.file.take(), state.late.take(), state.kept.take(), state.done.take());
        let (header, carried) = (mem::take(&mut state.header), mem::take(&mut state.carried));
        let (started, bounced_bytes) = (state.started, state.bounced_bytes);
        let (helpers, mut failure) = (state.helpers.take(), state.failure.take());
        if failure.is_none() && state.undone > 0 {
            // No operation is left that would carry them out.
            let reason = if state.steps.is_empty() { Reason::Abandoned } else { Reason::Cancelled };
            failure = Some(reason.into());
        }
        let checksums =
            if failure.is_some() { vec![None; self.parts.len()] } else { state.sums(&self.parts, mem::take) };
        drop(state);
        // Who learns of the end may begin with another.
        drop((file, late, helpers));
        // An operation that is never dropped holds it still: the system or a device may use the memory.
        if let Some(Err(_)) = kept.map(Arc::try_unwrap)
            && !matches!(failure, Some(Failure::Lost(_)))
        {
            let error = failure.map_or_else(|| "an operation is lost".into(), |failure| failure.to_string());
            failure = Some(Failure::Lost(io::Error::other(error)));
        }
        let Some(done) = done else { return };
        let result = failure.map_or(Ok(()), Err);
        done(Outcome { result, header, checksums, carried, bounced_bytes, started });
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    fn add_sums(&mut self, sums: Vec<PartSum>) {
        for (all, own) in self.sums.iter_mut().zip(sums) {
            all.merge(own);
        }
    }

    /// The checksums of the parts, as far as all bytes are summed.
    fn sums(
        &mut self,
        parts: &[Part],
        take: impl FnOnce(&mut Vec<PartSum>) -> Vec<PartSum>,
    ) -> Vec<Option<u32>> {
        if self.sums.is_empty() {
            return vec![None; parts.len()];
        }
        take(&mut self.sums).into_iter().zip(parts).map(|(sum, part)| sum.finish(part.len)).collect()
    }
}

fn has_header(step: &Step) -> bool {
    step.spans.iter().any(|span| span.content == Content::Header)
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer")
            .field("direction", &self.direction)
            .field("file", &self.file.path())
            .field("parts", &self.parts)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Piece, Priority, io::Withdrawn};
    use std::{path::Path, sync::mpsc};
    use windlass_device::DeviceId;

    #[test]
    fn a_transfer_is_done_only_with_all_its_steps() {
        for (completed, taken, is_done) in [(2, 2, true), (1, 2, false), (1, 1, false)] {
            let (sender, outcome) = mpsc::channel();
            let file = Arc::new(DataFile::in_name_only(Path::new("data")).unwrap());
            let piece = Piece { address: 4096, len: 8192, device: DeviceId::Cpu };
            let transfer = Transfer::new(Job {
                tag: 0,
                direction: Direction::Read,
                priority: Priority::Demand,
                file: file.clone().into(),
                header: Header::None,
                parts: vec![Part { offset: 0, pieces: vec![piece], len: 8192 }],
                checksums: Checksums::Skip,
                deadline: None,
                withdrawn: Withdrawn::default(),
                wait_event: None,
                keep: KeepAlive::by_caller(),
                done: Box::new(move |outcome| _ = sender.send(outcome)),
            });
            let limits = Limits { step_bytes: 4096, segments: 8, bounce_bytes: 4096 };
            let steps = transfer.plan(&file, limits, DevicePieces::Staged).unwrap();
            assert_eq!(steps.len(), 2);
            transfer.open(file, None, steps);
            assert_eq!((0..taken).filter_map(|_| transfer.next_step()).count(), taken);
            (0..completed).for_each(|_| transfer.completed());
            assert!(transfer.left());
            transfer.end();
            let result = outcome.recv().unwrap().result;
            assert_eq!(result.is_ok(), is_done, "{completed} of 2 steps, {taken} begun: {result:?}");
        }
    }
}
