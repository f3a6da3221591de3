//! A thread that takes jobs, cuts them into steps, has its lane carry these, and ends the jobs.
#![allow(unsafe_code)]

use super::{
    Carrier, Direction, Failure, Job,
    bounce::{BouncePool, Lease, NoLease, Urgency},
    device::DeviceLane,
    engine::Shared,
    file::DataFile,
    lane::{Done, Lane, Op},
    memory,
    outcome::{Next, settle},
    plan::{Content, DevicePieces, Limits, Step},
    queue::{Accept, Closing, Queued, copy_of},
    transfer::{Transfer, plan},
    wake::Wake,
};
use crate::layout::BLOCK_LEN;
use std::{collections::VecDeque, io, mem, sync::Arc, time::Instant};
use windlass_device::CopyError;
use windlass_io::file::Access;

/// Bytes of one step.
const STEP_BYTES: u64 = 8 << 20;
/// Pieces of the caller's memory in one step: the system takes 1024, and memory of ours needs some.
const STEP_SEGMENTS: usize = 512;
/// Of so many steps one is taken from jobs that nobody waits for, where others have some too.
const RESTS_TURN: u64 = 8;
/// Files that all workers together have open for single transfers: half as many as descriptors.
const MOST_LATE_FILES: usize = 128;

/// One worker of several.
pub(super) struct Worker {
    number: usize,
    shared: Arc<Shared>,
    pool: Arc<BouncePool>,
    lane: Lane,
    /// Of workers that serve devices.
    devices: Option<DeviceLane>,
    wake: Arc<Wake>,
    /// Jobs that have begun, by the number that their operations carry.
    transfers: Vec<Option<Transfer>>,
    free: Vec<usize>,
    /// Of these, those that have steps to begin, oldest first, by urgency.
    unfinished: [VecDeque<usize>; 2],
    /// Steps that were begun.
    begun: u64,
    /// Bytes that are with the lane.
    in_flight_bytes: u64,
    /// Of these, those that nobody waits for.
    background_bytes: u64,
    background_steps: usize,
    /// Files that are open for single transfers.
    late_files: usize,
    /// Whether there was no memory for the next step, by urgency.
    is_short: [bool; 2],
    /// Whether the pool knows that this worker waits.
    waits: [bool; 2],
    /// Whether there was no descriptor for the next job.
    lacks_descriptor: bool,
}

impl Worker {
    pub(super) fn new(
        (number, wake): (usize, Arc<Wake>),
        shared: Arc<Shared>,
        pool: Arc<BouncePool>,
        lane: Lane,
        devices: Option<DeviceLane>,
    ) -> Self {
        Self {
            number,
            shared,
            pool,
            lane,
            devices,
            wake,
            transfers: Vec::new(),
            free: Vec::new(),
            unfinished: Default::default(),
            begun: 0,
            in_flight_bytes: 0,
            background_bytes: 0,
            background_steps: 0,
            late_files: 0,
            is_short: [false; 2],
            waits: [false; 2],
            lacks_descriptor: false,
        }
    }

    /// Works until the queue is closed and everything that has begun has ended.
    pub(super) fn run(mut self) {
        let mut done = Vec::new();
        loop {
            self.is_short = [false; 2];
            self.lacks_descriptor = false;
            if !self.is_rests_turn() {
                // Before the room is taken by jobs that nobody waits for, and that have begun.
                self.take_jobs();
            }
            self.begin_steps();
            self.take_jobs();
            if self.is_idle() && self.shared.queue.is_closed() {
                break;
            }
            self.leave_pool();
            let accept = self.accept();
            let is_parked = self.takes_jobs();
            if is_parked && !self.shared.queue.park(self.number, &self.wake, accept) {
                continue;
            }
            let waited = self.lane.wait(&self.wake, &mut done);
            if is_parked {
                self.shared.queue.unpark(self.number);
            }
            done.drain(..).for_each(|done| self.ended(done));
            if let Err(error) = waited {
                return self.give_up(&error);
            }
        }
        self.is_short = [false; 2];
        self.leave_pool();
    }

    fn is_idle(&self) -> bool {
        self.lane.in_flight() == 0 && self.unfinished.iter().all(VecDeque::is_empty)
    }

    /// Does not wait for memory that nothing lacks any more.
    fn leave_pool(&mut self) {
        for urgency in Urgency::ALL {
            if !self.is_short[urgency as usize] && mem::take(&mut self.waits[urgency as usize]) {
                self.pool.leave(urgency, &self.wake);
            }
        }
    }

    /// Memory of ours for a step.
    fn take_memory(&mut self, step: &Step, urgency: Urgency) -> Result<Lease, NoLease> {
        let taken = self.pool.try_take(step.bounced, urgency, &self.wake);
        let waits = matches!(taken, Err(NoLease::Later));
        self.is_short[urgency as usize] = waits;
        // A step that needs none does not take this worker's place.
        if waits || step.bounced > 0 {
            self.waits[urgency as usize] = waits;
        }
        taken
    }

    /// Whether a step may begin. Demand has some room of its own.
    fn has_room(&self, urgency: Urgency) -> bool {
        let window = self.shared.window_bytes;
        let is_free = self.in_flight_bytes < window;
        self.lane.has_room()
            && match urgency {
                Urgency::Demand => is_free || self.in_flight_bytes - self.background_bytes < window / 4,
                Urgency::Rest => is_free && !self.has_enough_of_rest(),
            }
    }

    fn may_open(&self) -> bool {
        self.late_files < (MOST_LATE_FILES / self.shared.workers.max(1)).max(1)
    }

    /// Whether it has enough of what nobody waits for, of a ring's room.
    fn has_enough_of_rest(&self) -> bool {
        let most = self.lane.capacity() - self.lane.capacity() / 4;
        let is_full = self.background_bytes >= self.shared.window_bytes / 4 * 3;
        self.lane.is_ring() && (is_full || self.background_steps >= most)
    }

    fn accept(&self) -> Accept {
        let is_full =
            if self.lane.is_ring() { self.has_enough_of_rest() } else { self.shared.background.is_full() };
        let rest = Urgency::Rest as usize;
        if is_full || self.is_short[rest] || !self.unfinished[rest].is_empty() {
            Accept::Demand
        } else {
            Accept::Everything
        }
    }

    /// Whether it could begin a job that somebody waits for.
    fn takes_jobs(&self) -> bool {
        let demand = Urgency::Demand as usize;
        let is_held_up =
            self.is_short[demand] || !self.unfinished[demand].is_empty() || self.lacks_descriptor;
        self.has_room(Urgency::Demand) && self.may_open() && !is_held_up
    }

    fn limits(&self) -> Limits {
        // Where all is lost, the step finds that out.
        let bounce_bytes = self.pool.len().clamp(BLOCK_LEN, STEP_BYTES + BLOCK_LEN);
        Limits { step_bytes: STEP_BYTES, segments: STEP_SEGMENTS, bounce_bytes }
    }

    /// Begins steps of jobs that have begun.
    fn begin_steps(&mut self) {
        while let Some(urgency) = self.next_urgency() {
            let line = urgency as usize;
            let Some(&number) = self.unfinished[line].front() else { return };
            let Some(transfer) = self.transfers.get_mut(number).and_then(Option::as_mut) else {
                self.unfinished[line].pop_front();
                continue;
            };
            let Some(step) = transfer.steps.pop_front() else {
                self.unfinished[line].pop_front();
                self.end_if_over(number);
                continue;
            };
            if step.is_devices {
                self.begun += 1;
                self.move_directly(number, &step);
                continue;
            }
            match self.take_memory(&step, urgency) {
                Ok(lease) => self.begin(number, step, lease),
                Err(NoLease::Later) => self.put_step_back(number, step),
                Err(NoLease::Never) => self.fail(number, Failure::Io(no_memory_left())),
            }
        }
    }

    fn is_rests_turn(&self) -> bool {
        (self.begun + 1).is_multiple_of(RESTS_TURN)
    }

    /// Whose step is the next.
    fn next_urgency(&self) -> Option<Urgency> {
        let may = |urgency: &Urgency| {
            let line = *urgency as usize;
            !self.unfinished[line].is_empty() && !self.is_short[line] && self.has_room(*urgency)
        };
        let [first, second] = Urgency::ALL;
        let order = if self.is_rests_turn() { [second, first] } else { [first, second] };
        order.into_iter().find(may)
    }

    fn put_step_back(&mut self, number: usize, step: Step) {
        if let Some(transfer) = self.transfers.get_mut(number).and_then(Option::as_mut) {
            transfer.steps.push_front(step);
        }
    }

    fn fail(&mut self, number: usize, failure: Failure) {
        if let Some(transfer) = self.transfers.get_mut(number).and_then(Option::as_mut) {
            transfer.fail(failure);
        }
    }

    /// Takes a share of the jobs that wait.
    fn take_jobs(&mut self) {
        let share = self.shared.queue.len().div_ceil(self.shared.workers).max(1);
        for _ in 0..share {
            if !self.takes_jobs() {
                return;
            }
            let Some(queued) = self.shared.queue.take(self.accept()) else { return };
            self.begin_job(queued);
        }
    }

    /// Begins a job. If there is no memory or no descriptor for it, it waits again.
    fn begin_job(&mut self, queued: Queued) {
        let Queued { job, steps } = queued;
        if job.withdrawn.is_set() {
            return Queued { job, steps }.end(Failure::Cancelled);
        }
        if job.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return Queued { job, steps }.end(Failure::TimedOut);
        }
        let file = match job.file.open() {
            Ok(file) => file,
            // There is one when another has ended.
            Err(error) if is_out_of_descriptors(&error) && self.lane.in_flight() > 0 => {
                self.lacks_descriptor = true;
                return self.shared.queue.put_back(Queued { job, steps });
            }
            Err(error) => return Queued { job, steps }.end(Failure::Io(error)),
        };
        let planned = match steps {
            Some(steps) => Ok(steps),
            None => self.plan(&job, &file),
        };
        let mut steps = match planned {
            Ok(steps) => steps,
            Err(failure) => return Queued { job, steps: None }.end(failure),
        };
        let urgency = Urgency::of(job.priority);
        // Without memory for its first step it has not begun: it can still be cancelled, or be too late.
        let first = match steps.pop_front() {
            None => None,
            Some(step) if step.is_devices => {
                steps.push_front(step);
                None
            }
            Some(step) => match self.take_memory(&step, urgency) {
                Ok(lease) => Some((step, lease)),
                Err(NoLease::Later) => {
                    steps.push_front(step);
                    return self.shared.queue.put_back(Queued { job, steps: Some(steps) });
                }
                Err(NoLease::Never) => {
                    return Queued { job, steps: None }.end(Failure::Io(no_memory_left()));
                }
            },
        };
        let number = self.free.pop().unwrap_or_else(|| {
            self.transfers.push(None);
            self.transfers.len() - 1
        });
        let transfer = Transfer::begin(job, file, steps);
        self.shared.background.began(transfer.is_demand);
        self.late_files += usize::from(transfer.is_late);
        self.transfers[number] = Some(transfer);
        if let Some((step, lease)) = first {
            self.begin(number, step, lease);
        }
        self.unfinished[urgency as usize].push_back(number);
        self.begin_steps();
    }

    /// The steps of a job, as things stand with its file and its memory.
    fn plan(&self, job: &Job, file: &DataFile) -> Result<VecDeque<Step>, Failure> {
        if let Err(why) = file.direct() {
            self.shared.refusals.add("direct transfers", job.file.path(), why);
        }
        let pieces = match &self.devices {
            Some(devices) => devices.side().pieces(job, file)?,
            None => DevicePieces::Staged,
        };
        let steps = plan(job, file, self.limits(), pieces)
            .map_err(|what| Failure::Io(io::Error::new(io::ErrorKind::InvalidInput, what)))?;
        if let (Some(devices), DevicePieces::Direct) = (&self.devices, pieces)
            && steps.iter().any(Step::bounces_devices)
        {
            devices.side().note_unaligned(file);
        }
        Ok(steps)
    }

    /// Has a device move a step; what it does not take goes by way of host memory, if it may.
    fn move_directly(&mut self, number: usize, step: &Step) {
        let (Some(devices), Some(transfer)) =
            (&self.devices, self.transfers.get_mut(number).and_then(Option::as_mut))
        else {
            return;
        };
        match devices.move_directly(transfer.direction, step, &transfer.file) {
            Ok(bytes) => transfer.account(Carrier::Gds, bytes),
            Err(why) if devices.side().is_required() => {
                transfer.fail(Failure::Io(io::Error::other(why.to_string())));
            }
            Err(why) => {
                devices.side().give_up_file(&transfer.file, &why);
                transfer.steps.push_front(step.bounced());
            }
        }
    }

    /// Looks whether what devices moved directly was.
    fn check_direct(&self, transfer: &mut Transfer) {
        let Some(devices) = &self.devices else { return };
        if !transfer.used_gds() {
            return;
        }
        if let Err(why) = devices.side().check_kept() {
            transfer.was_not_direct();
            devices.side().give_up(&transfer.file, &why);
            if devices.side().is_required() {
                transfer.fail(Failure::Io(io::Error::other(why.to_string())));
            }
        }
    }

    /// Hands a step to the lane.
    fn begin(&mut self, number: usize, step: Step, lease: Lease) {
        let Some(transfer) = self.transfers.get_mut(number).and_then(Option::as_mut) else { return };
        if transfer.has_failed() {
            return;
        }
        self.begun += 1;
        if transfer.direction == Direction::Write {
            if let Some(devices) = &mut self.devices {
                // SAFETY: whoever submits a job vouches for its memory; the lease is ours.
                let copied = unsafe { devices.copy(Direction::Write, &step, &lease) };
                if let Err(failed) = copied {
                    return fail_copy(transfer, failed, lease);
                }
            }
            // SAFETY: the caller's memory is left alone until `keep` of the job is dropped, and the lease is ours.
            unsafe { memory::gather(&step, &lease, &mut transfer.sums) };
            if step.spans.iter().any(|span| span.content == Content::Header) {
                let header = transfer.make_header();
                memory::put_header(&step, &lease, &header);
            }
        }
        transfer.running += 1;
        transfer.account_bounced(&step);
        let access = if transfer.file.direct().is_ok() { Access::Direct } else { Access::Buffered };
        self.in_flight_bytes += step.len;
        if !transfer.is_demand {
            self.background_bytes += step.len;
            self.background_steps += 1;
        }
        let mut op = Op {
            transfer: number,
            file: transfer.file.clone(),
            direction: transfer.direction,
            access,
            step,
            lease,
            filled: 0,
            stalls: 0,
            segments: Vec::new(),
        };
        op.aim();
        self.lane.push(op);
    }

    /// Does with an operation that ended what is to be done next.
    fn ended(&mut self, done: Done) {
        let Done { mut op, result } = done;
        let carrier = match (self.lane.is_ring(), op.access) {
            (true, Access::Direct) => Carrier::IoUringDirect,
            (true, Access::Buffered) => Carrier::IoUringBuffered,
            (false, Access::Direct) => Carrier::ThreadsDirect,
            (false, Access::Buffered) => Carrier::ThreadsBuffered,
        };
        let Some(transfer) = self.transfers.get_mut(op.transfer).and_then(Option::as_mut) else { return };
        let before = op.filled;
        let moved = result.as_ref().map_or(0, |count| *count as u64);
        let mut copied = Ok(());
        match settle(&mut op, result) {
            Next::Again => {
                transfer.account(carrier, op.filled - before);
                if let (true, Err(why)) = (op.access == Access::Buffered, op.file.direct()) {
                    self.shared.refusals.add("direct transfers", op.file.path(), why);
                }
                op.aim();
                self.lane.push(op);
                return;
            }
            Next::Complete => {
                transfer.account(carrier, moved);
                if transfer.direction == Direction::Read && !transfer.has_failed() {
                    // SAFETY: the caller's memory is the transfer's until `keep` of the job is dropped; the kernel is
                    // done with it and with the lease.
                    unsafe { memory::scatter(&op.step, &op.lease, &mut transfer.sums) };
                    memory::take_header(&op.step, &op.lease, &mut transfer.header);
                    if let Some(devices) = &mut self.devices {
                        // SAFETY: as above; whoever submits a job vouches for memory of devices too.
                        copied = unsafe { devices.copy(Direction::Read, &op.step, &op.lease) };
                    }
                }
            }
            Next::Failed(failure) => transfer.fail(failure),
        }
        transfer.running -= 1;
        self.in_flight_bytes -= op.step.len;
        if !transfer.is_demand {
            self.background_bytes -= op.step.len;
            self.background_steps -= 1;
        }
        let Op { transfer: number, lease, .. } = op;
        match copied {
            Ok(()) => drop(lease),
            Err(failed) => fail_copy(transfer, failed, lease),
        }
        self.end_if_over(number);
    }

    fn end_if_over(&mut self, number: usize) {
        let Some(place) = self.transfers.get_mut(number) else { return };
        if let Some(mut transfer) = place.take_if(|transfer| transfer.is_over()) {
            self.free.push(number);
            let line = if transfer.is_demand { Urgency::Demand } else { Urgency::Rest };
            self.unfinished[line as usize].retain(|own| *own != number);
            self.check_direct(&mut transfer);
            self.shared.background.ended(transfer.is_demand);
            self.late_files -= usize::from(transfer.is_late);
            transfer.end();
        }
    }

    /// The lane is of no use any more. What was with it is lost; nobody else is kept waiting.
    fn give_up(&mut self, error: &io::Error) {
        tracing::error!(%error, "a ring cannot be waited for: memory is leaked, and the store takes no more requests");
        for mut transfer in self.transfers.drain(..).flatten() {
            if transfer.running > 0 {
                transfer.lose(copy_of(error));
            } else {
                transfer.fail(Failure::Io(copy_of(error)));
            }
            transfer.end();
        }
        self.is_short = [false; 2];
        self.leave_pool();
        // In the order in which jobs go from one to the other.
        self.shared.events.close(Closing::Broken(copy_of(error)));
        self.shared.queue.close(Closing::Broken(copy_of(error)));
    }
}

/// A device failed to copy. If it may go on, nobody may use the memory again.
fn fail_copy(transfer: &mut Transfer, failed: CopyError, lease: Lease) {
    if failed.is_in_doubt {
        tracing::error!(error = %failed.error, "memory is leaked, since nobody knows whether a device still copies it");
        lease.lose();
        transfer.lose(io::Error::other(failed.error));
    } else {
        transfer.fail(Failure::Device(failed.error));
    }
}

/// What a step fails with that needs more of our memory than was not lost.
fn no_memory_left() -> io::Error {
    io::Error::other(
        "most of the memory that bytes pass through is lost: devices or the system may still use it",
    )
}

fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}
