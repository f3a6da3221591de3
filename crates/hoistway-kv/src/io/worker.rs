//! What threads do with operations: open files, take memory, copy and sum bytes, and say how transfers ended.
#![allow(unsafe_code)]

use super::{
    AwaitedEvent, Carrier, Direction, Failure,
    device::{DeviceLane, DeviceSide, FailedCopies},
    engine::{self, BYTES_BESIDE_DEMAND, Refusals, STEP_BYTES},
    memory,
    operation::{Attempted, Operation},
    plan::{DevicePieces, Limits, Step},
    staging::{Staging, StagingLease},
    transfer::{LazyFilePermit, Transfer},
};
use crate::{disk::DataFile, format::BLOCK_LEN};
use hoistway_io::{
    executor::{self, Charge, Customer, Flight, Handler, LostSlots, Next, Priority, QueueId, Submission},
    file::Access,
    sys::machine::is_out_of_descriptors,
};
use std::{
    io,
    sync::{Arc, atomic::AtomicUsize},
};
use tracing::{Span, trace_span};

/// Where transfers wait that have not begun.
pub(super) const WAITING: QueueId = QueueId(0);
/// Where they wait for staging slots.
pub(super) const STAGED: QueueId = QueueId(1);
/// Pieces of the caller's memory in one step: the system takes 1024, and memory of ours needs some.
const STEP_SEGMENTS: usize = 512;
/// Operations that carry out steps of one transfer at a time.
const MOST_OPERATIONS: usize = 4;
/// Files that are open for single transfers: half as many as descriptors.
const MOST_LAZY_FILES: usize = 128;

/// The store as a customer of the scheduler.
pub(super) struct Mover {
    /// Of threads that serve devices.
    pub(super) side: Option<Arc<DeviceSide>>,
}

/// Operations of a transfer.
pub(super) struct Party {
    pub(super) transfer: Arc<Transfer>,
    /// Whether it helps others, which carry out all steps if it does not begin.
    is_helper: bool,
}

impl Party {
    pub(super) fn new(transfer: &Arc<Transfer>) -> Self {
        Self { transfer: transfer.clone(), is_helper: false }
    }
}

impl Customer for Mover {
    type Operation = Operation;
    type Group = Party;
    type Event = AwaitedEvent;
    type Error = Failure;

    fn ended(&self, group: Party, result: Result<(), Failure>) {
        let Party { transfer, is_helper } = group;
        match result {
            Err(Failure::Cancelled | Failure::TimedOut) if is_helper => {}
            Err(failure) => {
                transfer.fail(failure);
                transfer.release_helpers();
            }
            Ok(()) => {}
        }
        if transfer.left() {
            self.check_direct(&transfer);
            engine::end(&transfer);
        }
    }

    fn is_reached(&self, event: &AwaitedEvent) -> Result<bool, Failure> {
        let Some(side) = &self.side else { return Ok(true) };
        // SAFETY: the submitter of a job keeps its event valid until `keep` is dropped, and the event holds `keep`.
        unsafe { side.is_reached(event) }.map_err(Failure::Device)
    }
}

impl Mover {
    /// Looks whether what devices moved directly was.
    fn check_direct(&self, transfer: &Transfer) {
        let Some(side) = &self.side else { return };
        if !transfer.used_gds() {
            return;
        }
        if let Err(why) = side.check_kept() {
            transfer.was_not_direct();
            side.give_up(transfer.file.path(), &why);
            if side.is_required() {
                transfer.fail(Failure::Io(io::Error::other(why.to_string())));
            }
        }
    }
}

/// What all threads of an engine share that serve the same queues.
#[derive(Debug)]
pub(super) struct WorkersShared {
    pub(super) staging: Arc<Staging>,
    pub(super) refusals: Arc<Refusals>,
    /// Files that are open for single transfers.
    pub(super) lazy_files: Arc<AtomicUsize>,
}

/// One thread of several.
pub(super) struct Worker {
    pub(super) shared: Arc<WorkersShared>,
    pub(super) is_ring: bool,
    /// Of threads that serve devices.
    pub(super) devices: Option<DeviceLane>,
}

/// Why a transfer is not open.
enum NotOpen {
    /// There is a descriptor when another has ended.
    Later,
    Failed(Failure),
}

impl From<Failure> for NotOpen {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl Handler<Mover> for Worker {
    fn begin(&mut self, flight: Flight<Mover>) -> Next<Mover> {
        let (queue, charge) = (flight.ticket().queue(), flight.ticket().charge());
        let bytes = next_bytes(&flight);
        if bytes < charge.bytes {
            // Demand has come meanwhile.
            return Next::HandOver(flight, queue, Charge { bytes, ..charge });
        }
        match self.open(&flight) {
            Ok(file) => self.go_on(flight, &file),
            Err(NotOpen::Later) => Next::PutBack(flight),
            Err(NotOpen::Failed(failure)) => {
                flight.content.transfer.fail(failure);
                end(flight)
            }
        }
    }

    fn settle(&mut self, mut flight: Flight<Mover>, result: io::Result<usize>) -> Next<Mover> {
        let operation = &mut flight.content;
        let transfer = operation.transfer.clone();
        let Some(file) = transfer.opened() else { return end(flight) };
        let carrier = match (self.is_ring, operation.access()) {
            (true, Access::Direct) => Carrier::IoUringDirect,
            (true, Access::Buffered) => Carrier::IoUringBuffered,
            (false, Access::Direct) => Carrier::ThreadsDirect,
            (false, Access::Buffered) => Carrier::ThreadsBuffered,
        };
        let before = operation.filled();
        let moved = result.as_ref().map_or(0, |count| *count as u64);
        match operation.attempted(result) {
            Attempted::Again => {
                transfer.account(carrier, operation.filled() - before);
                if let (Access::Buffered, Err(why)) = (operation.access(), file.direct()) {
                    self.shared.refusals.add("direct transfers", file.path(), why);
                }
                return Next::Carry(flight);
            }
            Attempted::Complete => {
                transfer.account(carrier, moved);
                if let Some(step) = operation.landed()
                    && transfer.direction == Direction::Read
                    && !transfer.has_failed()
                    && let Err(failed) = self.deliver(operation, &step)
                {
                    return self.fail_copy(flight, *failed);
                }
                transfer.completed();
            }
            Attempted::Failed(failure) => {
                operation.landed();
                transfer.fail(failure);
            }
        }
        if flight.ticket().priority() != Priority::Demand && transfer.has_steps() {
            // What callers wait for goes between two steps.
            let charge = Charge { bytes: next_bytes(&flight), ..flight.ticket().charge() };
            flight.content.lease = StagingLease::default();
            return Next::HandOver(flight, if charge.slots > 0 { STAGED } else { WAITING }, charge);
        }
        self.go_on(flight, &file)
    }

    fn span(&self, operation: &Operation) -> Span {
        let Some(step) = &operation.step else { return Span::none() };
        let route = if self.is_ring { "io_uring" } else { "threads" };
        let direct = operation.access() == Access::Direct;
        let file = operation.transfer.file.path().display();
        let offset = step.offset + operation.filled();
        let bytes = step.len - operation.filled();
        match operation.transfer.direction {
            Direction::Read => trace_span!("kv.read", route, direct, %file, offset, bytes),
            Direction::Write => trace_span!("kv.write", route, direct, %file, offset, bytes),
        }
    }
}

impl Worker {
    /// The file of a transfer, whose steps the first of its operations plans.
    fn open(&self, flight: &Flight<Mover>) -> Result<Arc<DataFile>, NotOpen> {
        let transfer = &flight.content.transfer;
        if let Some(file) = transfer.opened() {
            return Ok(file);
        }
        let permit = match transfer.file.is_lazy() {
            true => {
                Some(LazyFilePermit::open(&self.shared.lazy_files, MOST_LAZY_FILES).ok_or(NotOpen::Later)?)
            }
            false => None,
        };
        let scheduler = flight.ticket().scheduler();
        let file = match transfer.file.open() {
            Ok(file) => file,
            Err(error) if is_out_of_descriptors(&error) && scheduler.figures().in_flight > 1 => {
                return Err(NotOpen::Later);
            }
            Err(error) => return Err(Failure::Io(error).into()),
        };
        if let Err(why) = file.direct() {
            self.shared.refusals.add("direct transfers", transfer.file.path(), why);
        }
        let pieces = match &self.devices {
            Some(devices) => devices.side().pieces(transfer, &file)?,
            None => DevicePieces::Staged,
        };
        let steps = transfer
            .plan(&file, self.limits(), pieces)
            .map_err(|what| Failure::Io(io::Error::new(io::ErrorKind::InvalidInput, what)))?;
        if let (Some(devices), DevicePieces::Direct) = (&self.devices, pieces)
            && steps.iter().any(Step::bounces_devices)
        {
            devices.side().note_unaligned(&file);
        }
        transfer.open(file.clone(), permit, steps);
        Ok(file)
    }

    fn limits(&self) -> Limits {
        // Where all is lost, the scheduler finds that out.
        let bounce_bytes = self.shared.staging.len().clamp(BLOCK_LEN, STEP_BYTES + BLOCK_LEN);
        // What a device does not take after all, it passes through memory of ours.
        let step_bytes = if self.devices.is_some() { STEP_BYTES.min(bounce_bytes) } else { STEP_BYTES };
        Limits { step_bytes, segments: STEP_SEGMENTS, bounce_bytes }
    }

    /// Begins the next step of a transfer.
    fn go_on(&mut self, mut flight: Flight<Mover>, file: &Arc<DataFile>) -> Next<Mover> {
        loop {
            let transfer = flight.content.transfer.clone();
            let is_short = flight.ticket().charge().bytes <= BYTES_BESIDE_DEMAND;
            let is_cut = is_short && transfer.len_bytes() > BYTES_BESIDE_DEMAND;
            let Some(step) = transfer.next_step(if is_cut { BYTES_BESIDE_DEMAND } else { u64::MAX }) else {
                transfer.release_helpers();
                return end(flight);
            };
            if step.is_devices {
                self.call_helpers(&flight);
                self.move_directly(&transfer, step, file);
                continue;
            }
            if flight.content.lease.len() < step.bounced {
                let slots = self.shared.staging.slots_for(step.bounced);
                let Charge { bytes, slots: granted } = flight.ticket().charge();
                flight.content.lease = StagingLease::default();
                if slots > granted {
                    // As many as any step needs, so that it does not wait again.
                    let slots = slots.max(self.shared.staging.slots_for(transfer.most_bounced()));
                    transfer.put_step_back(step);
                    return Next::HandOver(flight, STAGED, Charge { bytes, slots });
                }
                if let Some(devices) = &mut self.devices
                    && let Err(failure) = devices.place(&transfer)
                {
                    transfer.fail(failure);
                    return end(flight);
                }
                let Some(lease) = self.shared.staging.try_take(granted) else {
                    transfer.put_step_back(step);
                    return Next::PutBack(flight);
                };
                flight.content.lease = lease;
            }
            self.call_helpers(&flight);
            return match self.prepare(&mut flight.content, step) {
                Ok(()) => {
                    flight.content.aim(file.clone());
                    Next::Carry(flight)
                }
                Err(failed) => self.fail_copy(flight, *failed),
            };
        }
    }

    /// A transfer begins: other threads are to help with its further steps.
    fn call_helpers(&self, flight: &Flight<Mover>) {
        let transfer = &flight.content.transfer;
        let Some(further) = transfer.begin() else { return };
        let count = further.min(MOST_OPERATIONS - 1);
        if count == 0 {
            return;
        }
        transfer.joined();
        let operation = || executor::Operation {
            queue: WAITING,
            charge: Charge::of_bytes(flight.ticket().charge().bytes),
            order: 0,
            content: Operation::new(transfer),
        };
        let group = Party { transfer: transfer.clone(), is_helper: true };
        let operations = (0..count).map(|_| operation()).collect();
        let (tag, priority) = (HELPERS, flight.ticket().priority());
        let submission = Submission { tag, priority, ..Submission::new(group, operations) };
        let scheduler = flight.ticket().scheduler();
        match scheduler.submit(submission) {
            Ok(group) => transfer.helped_by(scheduler.clone(), group),
            Err(refused) => {
                drop(refused);
                // This operation carries out all steps, and has not ended.
                transfer.left();
            }
        }
    }

    /// Fills our part of a step that is to be written.
    fn prepare(&mut self, operation: &mut Operation, step: Step) -> Result<(), Box<FailedCopies>> {
        let transfer = operation.transfer.clone();
        if transfer.direction == Direction::Write {
            if let Some(devices) = &mut self.devices {
                // SAFETY: the submitter of a job keeps its memory valid; this operation holds the lease.
                unsafe { devices.copy(Direction::Write, &step, &operation.lease)? };
            }
            let mut sums = transfer.empty_sums();
            // SAFETY: the caller's memory is left alone until `keep` of the job is dropped, and the lease is ours.
            unsafe { memory::gather(&step, &operation.lease, &mut sums) };
            for (member, header) in transfer.gathered(&step, sums) {
                memory::put_header(&step, &operation.lease, member, &header);
            }
        }
        transfer.account_bounced(&step);
        operation.step = Some(step);
        Ok(())
    }

    /// Gives the caller what a step has read.
    fn deliver(&mut self, operation: &Operation, step: &Step) -> Result<(), Box<FailedCopies>> {
        let mut sums = operation.transfer.empty_sums();
        // SAFETY: the caller's memory is the transfer's until `keep` of the job is dropped; the kernel is done with it and
        // with the lease.
        unsafe { memory::scatter(step, &operation.lease, &mut sums) };
        let headers = step.headers().map(|member| (member, memory::header(step, &operation.lease, member)));
        operation.transfer.scattered(sums, headers);
        match &mut self.devices {
            // SAFETY: the submitter of a job keeps its memory valid, that of devices too.
            Some(devices) => unsafe { devices.copy(Direction::Read, step, &operation.lease) },
            None => Ok(()),
        }
    }

    /// Has a device move a step; what it does not take goes by way of host memory, if it may.
    fn move_directly(&self, transfer: &Transfer, step: Step, file: &DataFile) {
        let Some(devices) = &self.devices else { return };
        match devices.move_directly(transfer.direction, &step, file) {
            Ok(bytes) => {
                transfer.account(Carrier::Gds, bytes);
                transfer.skipped();
                transfer.completed();
            }
            Err(why) if devices.side().is_required() => {
                transfer.fail(Failure::Io(io::Error::other(why.to_string())));
            }
            Err(why) => {
                devices.side().give_up_file(file, &why);
                transfer.put_step_back(step.bounced());
            }
        }
    }

    /// A device failed to copy. If it may go on, nothing uses the memory until it is known that it has ended.
    fn fail_copy(&self, flight: Flight<Mover>, failed: FailedCopies) -> Next<Mover> {
        let (error, parking) = match failed {
            FailedCopies::Unknown(error, parking) => (error, parking),
            FailedCopies::Failed(error) => {
                flight.content.transfer.fail(Failure::Device(error));
                return end(flight);
            }
        };
        let (mut operation, ticket) = flight.into_parts();
        let lease =
            self.shared.staging.set_aside(std::mem::take(&mut operation.lease), ticket.charge().slots);
        // Before the request ends: the next one asks the device first.
        parking.park((operation.kept.clone(), lease));
        operation.transfer.fail(Failure::Lost(io::Error::other(error)));
        drop(operation);
        let slots = ticket.lose(Failure::Lost(io::Error::other("a device may still use its memory")));
        parking.park(GivesBack(Some(slots)));
        Next::Ended
    }
}

/// Bytes that the next step of an operation may be.
fn next_bytes(flight: &Flight<Mover>) -> u64 {
    let ticket = flight.ticket();
    engine::step_bytes(&flight.content.transfer, ticket.priority(), ticket.scheduler())
}

/// Gives slots back to the scheduler when it is dropped.
struct GivesBack(Option<LostSlots<Mover>>);

impl Drop for GivesBack {
    fn drop(&mut self) {
        if let Some(slots) = self.0.take() {
            slots.give_back();
        }
    }
}

/// What helpers are known by: no request has this number.
const HELPERS: u64 = u64::MAX;

/// Failures are the transfer's.
fn end(flight: Flight<Mover>) -> Next<Mover> {
    flight.end(Ok(()));
    Next::Ended
}
