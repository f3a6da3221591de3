//! A thread that takes jobs, cuts them into steps, has its lane carry these, and ends the jobs.
#![allow(unsafe_code)]

use super::{
    Carrier, Direction, Failure, Job, Priority,
    bounce::{BouncePool, Lease, NoLease},
    device::DeviceLane,
    engine::Shared,
    file::DataFile,
    lane::{Done, Lane, Op},
    memory,
    outcome::{Next, settle},
    plan::{Content, DevicePieces, Limits, Step},
    queue::{Accept, Queued},
    transfer::{Transfer, plan},
    wake::Wake,
};
use crate::layout::BLOCK_LEN;
use std::{collections::VecDeque, io, sync::Arc};
use windlass::{DeviceId, device::CopyError, route::Access};

/// Bytes of one step.
const STEP_BYTES: u64 = 8 << 20;
/// Pieces of the caller's memory in one step: the system takes 1024, and memory of ours needs some.
const STEP_SEGMENTS: usize = 512;
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
    /// Of these, those that have steps to begin, oldest first.
    unfinished: VecDeque<usize>,
    /// Bytes that are with the lane.
    in_flight_bytes: u64,
    /// Of these, those that nobody waits for.
    background_bytes: u64,
    /// Files that are open for single transfers.
    late_files: usize,
    /// Whether there was no memory for the next step, or no descriptor for the next job.
    is_short: bool,
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
            unfinished: VecDeque::new(),
            in_flight_bytes: 0,
            background_bytes: 0,
            late_files: 0,
            is_short: false,
        }
    }

    /// Works until the queue is closed and everything that has begun has ended.
    pub(super) fn run(mut self) {
        let mut done = Vec::new();
        loop {
            self.begin_steps();
            self.take_jobs();
            if self.is_idle() && self.shared.queue.is_closed() {
                break;
            }
            if !self.is_short {
                self.pool.leave(&self.wake);
            }
            let accept = self.accept();
            let is_parked = self.has_room() && self.may_open() && !self.is_short;
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
        self.pool.leave(&self.wake);
    }

    fn is_idle(&self) -> bool {
        self.lane.in_flight() == 0 && self.unfinished.is_empty()
    }

    fn has_room(&self) -> bool {
        self.lane.has_room() && self.in_flight_bytes < self.shared.window_bytes
    }

    fn may_open(&self) -> bool {
        self.late_files < (MOST_LATE_FILES / self.shared.workers.max(1)).max(1)
    }

    /// Demand finds room whatever else there is to do.
    fn accept(&self) -> Accept {
        let is_full = if self.lane.is_ring() {
            self.background_bytes >= self.shared.window_bytes / 4 * 3
        } else {
            self.shared.background.is_full()
        };
        if is_full || self.shared.background.is_blocked() { Accept::Demand } else { Accept::Everything }
    }

    fn limits(&self) -> Limits {
        // Where all is lost, the step finds that out.
        let bounce_bytes = self.pool.len().clamp(BLOCK_LEN, STEP_BYTES + BLOCK_LEN);
        Limits { step_bytes: STEP_BYTES, segments: STEP_SEGMENTS, bounce_bytes }
    }

    /// Begins steps of jobs that have begun.
    fn begin_steps(&mut self) {
        self.is_short = false;
        while let Some(&number) = self.unfinished.front() {
            let Some(transfer) = self.transfers.get_mut(number).and_then(Option::as_mut) else {
                self.unfinished.pop_front();
                continue;
            };
            let Some(step) = transfer.steps.pop_front() else {
                self.unfinished.pop_front();
                self.end_if_over(number);
                continue;
            };
            if step.is_devices {
                self.move_directly(number, &step);
                continue;
            }
            if !self.has_room() {
                self.put_step_back(number, step);
                return;
            }
            match self.pool.try_take(step.bounced, &self.wake) {
                Ok(lease) => self.begin(number, step, lease),
                Err(NoLease::Later) => {
                    self.put_step_back(number, step);
                    self.is_short = true;
                    return;
                }
                Err(NoLease::Never) => self.fail(number, Failure::Io(no_memory_left())),
            }
        }
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
        if !self.unfinished.is_empty() {
            return;
        }
        let share = self.shared.queue.len().div_ceil(self.shared.workers).max(1);
        for _ in 0..share {
            if !self.has_room() || !self.may_open() || !self.unfinished.is_empty() {
                return;
            }
            let Some(queued) = self.shared.queue.take(self.accept()) else { return };
            if !self.begin_job(queued) {
                return;
            }
        }
    }

    /// Begins a job; `false` if there is no memory or no descriptor for it, and it waits again.
    fn begin_job(&mut self, queued: Queued) -> bool {
        let Queued { job, steps } = queued;
        if job.deadline.is_some_and(|deadline| deadline <= std::time::Instant::now()) {
            Queued { job, steps }.end(Failure::TimedOut);
            return true;
        }
        let file = match job.file.open() {
            Ok(file) => file,
            // There is one when another has ended.
            Err(error) if is_out_of_descriptors(&error) && self.lane.in_flight() > 0 => {
                self.is_short = true;
                self.shared.queue.put_back(Queued { job, steps });
                return false;
            }
            Err(error) => {
                Queued { job, steps }.end(Failure::Io(error));
                return true;
            }
        };
        let planned = match steps {
            Some(steps) => Ok(steps),
            None => self.plan(&job, &file),
        };
        let mut steps = match planned {
            Ok(steps) => steps,
            Err(failure) => {
                Queued { job, steps: None }.end(failure);
                return true;
            }
        };
        // Whoever waits for the event of a job that nobody waits for does nothing else meanwhile: some are kept free.
        let shared = self.shared.clone();
        let is_blocking =
            job.wait_event.is_some() && self.devices.is_some() && job.priority != Priority::Demand;
        let blocked = if is_blocking { shared.background.block() } else { None };
        if is_blocking && blocked.is_none() {
            self.shared.queue.put_back(Queued { job, steps: Some(steps) });
            return false;
        }
        // Without memory for its first step it has not begun: it can still be cancelled, or be too late.
        let first = match steps.pop_front() {
            None => None,
            Some(step) if step.is_devices => {
                steps.push_front(step);
                None
            }
            Some(step) => match self.pool.try_take(step.bounced, &self.wake) {
                Ok(lease) => Some((step, lease)),
                Err(NoLease::Later) => {
                    steps.push_front(step);
                    self.is_short = true;
                    self.shared.queue.put_back(Queued { job, steps: Some(steps) });
                    return false;
                }
                Err(NoLease::Never) => {
                    Queued { job, steps: None }.end(Failure::Io(no_memory_left()));
                    return true;
                }
            },
        };
        let number = self.free.pop().unwrap_or_else(|| {
            self.transfers.push(None);
            self.transfers.len() - 1
        });
        let waited = self.wait_for_event(&job, &steps);
        drop(blocked);
        let mut transfer = Transfer::begin(job, file, steps);
        if let Err(error) = waited {
            transfer.fail(Failure::Device(error));
        }
        self.shared.background.began(transfer.is_demand);
        self.late_files += usize::from(transfer.is_late);
        self.transfers[number] = Some(transfer);
        if let Some((step, lease)) = first {
            self.begin(number, step, lease);
        }
        self.unfinished.push_back(number);
        self.begin_steps();
        true
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

    /// Waits for a job's event, if others than queues of copies are to touch its memory, or if nobody waits for the job:
    /// its copies then do not keep this thread waiting.
    fn wait_for_event(&self, job: &Job, steps: &VecDeque<Step>) -> windlass::Result<()> {
        let (Some(event), Some(devices)) = (job.wait_event, &self.devices) else { return Ok(()) };
        let is_hosts =
            job.parts.iter().flat_map(|part| &part.pieces).any(|piece| piece.device == DeviceId::Cpu);
        if is_hosts || job.priority != Priority::Demand || steps.iter().any(|step| step.is_devices) {
            // SAFETY: whoever submits a job vouches for its event.
            unsafe { devices.wait_for(job, event)? };
        }
        Ok(())
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
        if transfer.direction == Direction::Write {
            if let Some(devices) = &mut self.devices {
                // SAFETY: whoever submits a job vouches for its memory and its event; the lease is ours.
                let copied = unsafe { devices.copy(Direction::Write, &step, &lease, transfer.wait_event) };
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
            (true, Access::Direct) => Carrier::UringDirect,
            (true, Access::Buffered) => Carrier::UringBuffered,
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
                        let after = transfer.wait_event;
                        // SAFETY: as above; whoever submits a job vouches for memory of devices, and for its event, too.
                        copied = unsafe { devices.copy(Direction::Read, &op.step, &op.lease, after) };
                    }
                }
            }
            Next::Failed(failure) => transfer.fail(failure),
        }
        transfer.running -= 1;
        self.in_flight_bytes -= op.step.len;
        if !transfer.is_demand {
            self.background_bytes -= op.step.len;
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
            self.unfinished.retain(|own| *own != number);
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
        self.pool.leave(&self.wake);
        self.shared.queue.close(|| Failure::Io(copy_of(error)));
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

/// Errors of the system are not cloned.
fn copy_of(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| io::Error::other(error.to_string()), io::Error::from_raw_os_error)
}
