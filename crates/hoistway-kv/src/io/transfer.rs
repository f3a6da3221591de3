//! Jobs that were taken on together: their steps, and what is known of their outcomes.
#![forbid(unsafe_code)]

use super::{
    AwaitedEvent, Carrier, Checksums, Direction, Done, Failure, Header, Job, MakeHeader, Outcome, Part,
    Withdrawn,
    checksum::PartSum,
    join::MOST_GAP,
    plan::{DevicePieces, Grid, Limits, Step, Wanted},
    worker::Mover,
};
use crate::{
    KeepAlive, Priority,
    disk::{DataFile, LazyFile},
    format::HEADER_LEN,
};
use hoistway_io::{
    executor::{GroupId, Reason, Scheduler, Whose},
    parallel::lock,
};
use std::{
    collections::VecDeque,
    fmt, io, mem,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

/// The caller's memory, which every operation of a transfer holds.
pub(super) type Kept = Arc<Vec<KeepAlive>>;

/// Jobs that were taken on together. They differ in nothing but their bytes.
pub(super) struct Transfer {
    pub(super) direction: Direction,
    pub(super) file: LazyFile,
    pub(super) checksums: Checksums,
    /// Those of all jobs.
    pub(super) parts: Vec<Part>,
    members: Vec<Member>,
    order: Order,
    /// What carries out jobs again.
    pub(super) scheduler: Weak<Scheduler<Mover>>,
    state: Mutex<State>,
}

/// One of the jobs.
#[derive(Debug)]
struct Member {
    /// Its parts among those of all.
    parts: Range<usize>,
    header: HeaderPlace,
}

/// What decides when a job begins.
#[derive(Debug)]
struct Order {
    tag: u64,
    priority: Priority,
    deadline: Option<Instant>,
    withdrawn: Withdrawn,
}

/// Where a header is, if it is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeaderPlace {
    None,
    Read(u64),
    Write(u64),
}

impl HeaderPlace {
    fn offset(self) -> Option<u64> {
        match self {
            Self::None => None,
            Self::Read(offset) | Self::Write(offset) => Some(offset),
        }
    }
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
    /// Of each member, as it was read or made.
    headers: Vec<Vec<u8>>,
    /// Of each member; `None` once the header is made.
    make_headers: Vec<Option<MakeHeader>>,
    kept: Option<Kept>,
    /// Of each member.
    done: Vec<Done>,
    carried: Vec<(Carrier, u64)>,
    bounced_bytes: u64,
    failure: Option<Failure>,
    started: Option<Instant>,
    permit: Option<LazyFilePermit>,
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
pub(super) struct LazyFilePermit(Arc<AtomicUsize>);

impl LazyFilePermit {
    /// `None` if there are `most`.
    pub(super) fn open(count: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let one_more = |open| (open < most).then_some(open + 1);
        count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(Self(count.clone()))
    }
}

impl Drop for LazyFilePermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Transfer {
    /// Jobs that are alike: the first says how they are carried out. `None` if there is none.
    pub(super) fn new(jobs: Vec<Job>, scheduler: Weak<Scheduler<Mover>>) -> Option<Arc<Self>> {
        let Job { tag, direction, priority, ref file, checksums, deadline, ref withdrawn, .. } =
            *jobs.first()?;
        let (file, order) = (file.clone(), Order { tag, priority, deadline, withdrawn: withdrawn.clone() });
        let count = jobs.len();
        let (mut parts, mut members, mut make_headers) = (Vec::new(), Vec::with_capacity(count), Vec::new());
        let (mut kept, mut done) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for job in jobs {
            let (header, make_header) = match job.header {
                Header::None => (HeaderPlace::None, None),
                Header::Read { offset } => (HeaderPlace::Read(offset), None),
                Header::Write { offset, make } => (HeaderPlace::Write(offset), Some(make)),
            };
            let start = parts.len();
            parts.extend(job.parts);
            members.push(Member { parts: start..parts.len(), header });
            make_headers.push(make_header);
            kept.push(job.keep);
            done.push(job.done);
        }
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
            headers: vec![Vec::new(); count],
            make_headers,
            kept: Some(Arc::new(kept)),
            done,
            carried: Vec::new(),
            bounced_bytes: 0,
            failure: None,
            started: None,
            permit: None,
            groups: 1,
            helpers: None,
        };
        let state = Mutex::new(state);
        Some(Arc::new(Self { direction, file, checksums, parts, members, order, scheduler, state }))
    }

    /// What its event is, which keeps the caller's memory and so the event.
    pub(super) fn event(&self, handle: u64) -> AwaitedEvent {
        let devices = self.parts.iter().flat_map(|part| &part.pieces).map(|piece| piece.device);
        AwaitedEvent::new(handle, devices, self.kept().as_ref().clone())
    }

    pub(super) fn kept(&self) -> Kept {
        self.state().kept.clone().unwrap_or_default()
    }

    pub(super) fn len_bytes(&self) -> u64 {
        self.parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.len))
    }

    /// Bytes of its headers.
    pub(super) fn header_bytes(&self) -> u64 {
        let headers = self.members.iter().filter(|member| member.header != HeaderPlace::None);
        (headers.count() * HEADER_LEN) as u64
    }

    /// Bytes of its parts that have pieces on devices.
    pub(super) fn device_bytes(&self) -> u64 {
        let has_device = |part: &&Part| part.pieces.iter().any(|piece| !piece.device.is_host());
        self.parts.iter().filter(has_device).fold(0, |sum: u64, part| sum.saturating_add(part.len))
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
        let headers = self.members.iter().enumerate();
        let headers: Vec<(usize, u64)> =
            headers.filter_map(|(number, member)| Some((number, member.header.offset()?))).collect();
        // One job alone depends on no bytes but its own.
        let is_joined = self.direction == Direction::Read && self.members.len() > 1;
        let gap = if is_joined { MOST_GAP } else { 0 };
        let wanted = Wanted { headers: &headers, parts: &self.parts, gap, grid, devices, limits };
        let steps = wanted.steps()?;
        if steps.len() == 1 || self.direction == Direction::Read {
            return Ok(steps);
        }
        // Headers that are written come last: they have the checksums of the others.
        let mut steps = Wanted { headers: &[], ..wanted }.steps()?;
        steps.extend(Wanted { parts: &[], ..wanted }.steps()?);
        Ok(steps)
    }

    /// Its file, once it is open and the steps are planned.
    pub(super) fn opened(&self) -> Option<Arc<DataFile>> {
        self.state().file.clone()
    }

    /// Its file is open, and these are its steps.
    pub(super) fn open(&self, file: Arc<DataFile>, permit: Option<LazyFilePermit>, steps: VecDeque<Step>) {
        let mut state = self.state();
        state.undone = steps.len();
        (state.file, state.permit, state.steps) = (Some(file), permit, steps);
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

    /// Returns the next step to begin, of at most so many bytes. The step with the header waits until all others are summed:
    /// the thread that sums the last one begins it.
    pub(super) fn next_step(&self, most: u64) -> Option<Step> {
        let mut state = self.state();
        if state.failure.is_some() {
            return None;
        }
        if let Some(long) = state.steps.pop_front_if(|step| step.len > most && !step.is_devices) {
            let (steps, headers) = self.cut(long, most);
            state.undone += steps.len() + headers.len() - 1;
            steps.into_iter().rev().for_each(|step| state.steps.push_front(step));
            state.steps.extend(headers);
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

    /// Cuts a step into steps of at most so many bytes. Where it is written with headers, these follow the bytes that they
    /// describe: members stay whole that are short enough, and the headers of others come last.
    fn cut(&self, step: Step, most: u64) -> (Vec<Step>, Vec<Step>) {
        if self.direction == Direction::Read || !has_header(&step) {
            return (step.cut_into(most), Vec::new());
        }
        let (mut steps, mut headers): (Vec<Step>, Vec<Step>) = (Vec::new(), Vec::new());
        for member in step.cut_by(|part| self.members.iter().position(|member| member.parts.contains(&part)))
        {
            match steps.last_mut() {
                Some(last) if last.len + member.len <= most && last.precedes(&member) => last.append(member),
                _ if member.len <= most + HEADER_LEN as u64 => steps.push(member),
                _ => {
                    let (header, payload): (Vec<Step>, Vec<Step>) =
                        member.without_headers().into_iter().partition(has_header);
                    headers.extend(header);
                    steps.extend(payload.into_iter().flat_map(|step| step.cut_into(most)));
                }
            }
        }
        (steps, headers)
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

    /// Bytes of a step that is to be written were summed. Returns the headers that the step has, each with its member.
    pub(super) fn gathered(&self, step: &Step, sums: Vec<PartSum>) -> Vec<(usize, Vec<u8>)> {
        let mut state = self.state();
        state.gathering -= 1;
        state.add_sums(sums);
        if !has_header(step) {
            return Vec::new();
        }
        let sums = state.sums(&self.parts, |sums| sums.to_vec());
        let makes: Vec<_> =
            step.headers().map(|member| (member, state.make_headers[member].take())).collect();
        drop(state);
        let mut headers = Vec::with_capacity(makes.len());
        for (member, make) in makes {
            headers.extend(make.map(|make| (member, make(&sums[self.members[member].parts.clone()]))));
        }
        if self.members.len() > 1 {
            // For a write of the member alone.
            let mut state = self.state();
            headers.iter().for_each(|(member, header)| state.headers[*member].clone_from(header));
        }
        headers
    }

    /// Bytes of a step that was read were summed, and these are the headers of members that it has.
    pub(super) fn scattered(&self, sums: Vec<PartSum>, headers: impl Iterator<Item = (usize, Vec<u8>)>) {
        let mut state = self.state();
        state.add_sums(sums);
        headers.for_each(|(member, header)| state.headers[member].extend(header));
    }

    /// Notes bytes that were moved.
    pub(super) fn account(&self, carrier: Carrier, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let carried = &mut self.state().carried;
        match carried.iter_mut().find(|(known, _)| *known == carrier) {
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

    /// Notes that what devices moved went through host memory.
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

    /// Lets the memory go, and says how it went. Returns jobs that are to be carried out again, each alone: where there are
    /// several, the failure of one is not that of the others.
    pub(super) fn end(&self) -> Vec<Job> {
        let mut state = self.state();
        let (file, permit, kept, done) =
            (state.file.take(), state.permit.take(), state.kept.take(), mem::take(&mut state.done));
        let (headers, mut carried) = (mem::take(&mut state.headers), mem::take(&mut state.carried));
        let make_headers = mem::take(&mut state.make_headers);
        let (started, mut bounced_bytes) = (state.started, state.bounced_bytes);
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
        drop((file, permit, helpers));
        // An operation that is never dropped holds it still: the system or a device may use the memory.
        let kept = match kept.map(Arc::try_unwrap) {
            Some(Err(_)) => {
                if !matches!(failure, Some(Failure::Lost(_))) {
                    let error =
                        failure.map_or_else(|| "an operation is lost".into(), |failure| failure.to_string());
                    failure = Some(Failure::Lost(io::Error::other(error)));
                }
                Vec::new()
            }
            Some(Ok(kept)) => kept,
            None => Vec::new(),
        };
        let ends = self.members.iter().zip(done).zip(headers).zip(make_headers);
        let may_be_of_one = match &failure {
            Some(Failure::Io(_) | Failure::Short { .. }) => true,
            // Where a device could not be asked after its event, the memory must not be used.
            Some(Failure::Device(_)) => started.is_some(),
            _ => false,
        };
        if self.members.len() > 1 && may_be_of_one {
            let alone = ends.zip(kept).map(|((((member, done), header), make), keep)| {
                self.job(member, make.unwrap_or_else(|| Box::new(move |_| header)), keep, done)
            });
            return alone.collect();
        }
        drop(kept);
        for (number, (((member, done), header), _)) in ends.enumerate() {
            let is_last = number + 1 == self.members.len();
            let copied = failure.as_ref().map(Failure::copied);
            let result = if is_last { failure.take() } else { copied }.map_or(Ok(()), Err);
            let checksums = checksums[member.parts.clone()].to_vec();
            // What carried them all is counted once.
            let carried = mem::take(&mut carried);
            let bounced_bytes = mem::take(&mut bounced_bytes);
            done(Outcome { result, header, checksums, carried, bounced_bytes, started });
        }
        Vec::new()
    }

    /// The job of a member, to be carried out alone.
    fn job(&self, member: &Member, make: MakeHeader, keep: KeepAlive, done: Done) -> Job {
        let header = match member.header {
            HeaderPlace::None => Header::None,
            HeaderPlace::Read(offset) => Header::Read { offset },
            HeaderPlace::Write(offset) => Header::Write { offset, make },
        };
        let Order { tag, priority, deadline, withdrawn } = &self.order;
        Job {
            tag: *tag,
            direction: self.direction,
            priority: *priority,
            file: self.file.clone(),
            header,
            parts: self.parts[member.parts.clone()].to_vec(),
            checksums: self.checksums,
            deadline: *deadline,
            withdrawn: withdrawn.clone(),
            wait_event: None,
            keep,
            done,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    fn add_sums(&mut self, sums: Vec<PartSum>) {
        for (all, sum) in self.sums.iter_mut().zip(sums) {
            all.merge(sum);
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
    step.headers().next().is_some()
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
    use hoistway_device::DeviceId;
    use std::{path::Path, sync::mpsc};

    #[test]
    fn a_transfer_is_done_only_with_all_its_steps() {
        for (completed, taken, is_done) in [(2, 2, true), (1, 2, false), (1, 1, false)] {
            let (sender, outcome) = mpsc::channel();
            let file = Arc::new(DataFile::in_name_only(Path::new("data")).unwrap());
            let piece = Piece { address: 4096, len: 8192, device: DeviceId::Cpu };
            let job = Job {
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
            };
            let transfer = Transfer::new(vec![job], Weak::new()).unwrap();
            let limits = Limits { step_bytes: 4096, segments: 8, bounce_bytes: 4096 };
            let steps = transfer.plan(&file, limits, DevicePieces::Staged).unwrap();
            assert_eq!(steps.len(), 2);
            transfer.open(file, None, steps);
            assert_eq!((0..taken).filter_map(|_| transfer.next_step(u64::MAX)).count(), taken);
            (0..completed).for_each(|_| transfer.completed());
            assert!(transfer.left());
            transfer.end();
            let result = outcome.recv().unwrap().result;
            assert_eq!(result.is_ok(), is_done, "{completed} of 2 steps, {taken} begun: {result:?}");
        }
    }
}
