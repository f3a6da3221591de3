//! Tickets for experts and tensors that are being read, and leases of those that are resident.
#![allow(unsafe_code)]

use super::{
    StoreShared,
    ledger::RequestId,
    monitor::{Monitor, NotReady},
    reading::{Failure, ReaderIo},
};
use crate::{
    Error, ExpertId, Result,
    backing::{UnitRoom, host_view},
    catalog::{Part, Unit, UnitId},
};
use hoistway::DeviceId;
use hoistway_device::{Device, Fence};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// Experts or tensors that are being read. Dropping it gives them up: reads that have not begun do not begin.
#[derive(Debug)]
#[must_use = "dropping a ticket cancels its reads"]
pub struct Ticket {
    request: Held,
}

/// Experts or tensors that are resident, and stay where they are until it is dropped.
#[derive(Debug)]
#[must_use = "dropping a lease lets its experts be evicted"]
pub struct Lease {
    request: Held,
    /// In the order of the request.
    rooms: Vec<UnitRoom>,
}

/// One expert or tensor of a lease.
#[derive(Clone, Copy, Debug)]
pub struct LeasedUnit<'a> {
    unit: &'a Unit,
    room: &'a UnitRoom,
}

/// One part of an expert of a lease.
#[derive(Clone, Copy, Debug)]
pub struct LeasedPart<'a> {
    part: &'a Part,
    room: &'a UnitRoom,
    position: usize,
}

/// A request of the ledger, which ends as this is dropped.
#[derive(Debug)]
pub(super) struct Held {
    shared: Arc<StoreShared>,
    id: RequestId,
    /// Positions in the catalog, in the order in which the caller named them.
    units: Vec<usize>,
    asked: Instant,
    /// Whether the caller was shown where they lie, so that work of a device may use them.
    was_shown: AtomicBool,
    /// The fence behind that work, if the caller has named one.
    fence: Option<Fence>,
}

impl Held {
    pub(super) fn new(shared: Arc<StoreShared>, id: RequestId, units: Vec<usize>) -> Self {
        let (was_shown, fence) = (AtomicBool::new(false), None);
        Self { shared, id, units, asked: Instant::now(), was_shown, fence }
    }

    fn label(&self, unit: usize) -> String {
        self.shared.catalog.units().get(unit).map_or_else(String::new, Unit::label)
    }

    fn error(&self, not_ready: NotReady<Failure>) -> Error {
        let waited = self.asked.elapsed();
        match not_ready {
            NotReady::Loading(unit) => Error::TimedOut { unit: self.label(unit), waited },
            NotReady::Failed(unit, Failure::Read(source)) => Error::Read { unit: self.label(unit), source },
            NotReady::Failed(unit, Failure::Memory(error)) => {
                Error::NoMemory { unit: self.label(unit), source: error }
            }
            NotReady::Closed => self.shared.monitor.look(|ledger| self.shared.closed(ledger)),
            NotReady::NoRoom => {
                let mut units = self.units.clone();
                units.sort_unstable();
                units.dedup();
                let (needed, leased, budget) = self
                    .shared
                    .monitor
                    .look(|ledger| (ledger.cost_of(units.into_iter()), ledger.pinned(), ledger.budget()));
                Error::NoRoom { needed, leased, budget, waited }
            }
        }
    }

    /// A wait of the caller's for a request that is not ready: what it waits for, or why that does not come.
    fn wait<T>(
        &self,
        timeout: Duration,
        wait: impl FnOnce(&Monitor<ReaderIo>, Option<Instant>) -> Result<Option<T>, NotReady<Failure>>,
    ) -> Result<T> {
        let waited = Instant::now();
        let answer = wait(self.shared.monitor()?, waited.checked_add(timeout));
        self.shared.note_stall(waited.elapsed());
        let rooms = answer.map_err(|not_ready| self.error(not_ready))?;
        self.was_shown.store(true, Ordering::Relaxed);
        rooms.ok_or_else(|| Error::Internal("what is resident has no room".into()))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // In a child of `fork` it pins nothing: the lock may be held by a thread that is not there.
        if let Ok(monitor) = self.shared.monitor() {
            if *self.was_shown.get_mut() {
                // Before they may be evicted.
                let memory = monitor.io().memory();
                self.units.iter().for_each(|unit| memory.used(*unit, self.fence.as_ref()));
            }
            monitor.change(|ledger, commands| ledger.release(self.id, commands));
        }
    }
}

impl Ticket {
    pub(super) fn new(request: Held) -> Self {
        Self { request }
    }

    /// Number of experts or tensors.
    pub fn len(&self) -> usize {
        self.request.units.len()
    }

    /// Returns whether it has no expert and no tensor.
    pub fn is_empty(&self) -> bool {
        self.request.units.is_empty()
    }

    /// Whether the expert at this position of the request is resident.
    pub fn is_ready(&self, position: usize) -> bool {
        let Self { request } = self;
        let Some(unit) = request.units.get(position) else { return false };
        let monitor = request.shared.monitor();
        monitor.is_ok_and(|monitor| monitor.look(|ledger| ledger.is_leased(request.id, *unit)))
    }

    /// Waits until the expert at this position of the request is resident, and shows where it lies. Others may still
    /// be being read.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::NoRoom`], [`Error::NoMemory`], [`Error::TimedOut`]; [`Error::InvalidOption`] if there is no such position.
    pub fn wait_one(&self, position: usize, timeout: Duration) -> Result<ReadyUnit<'_>> {
        let Self { request } = self;
        let Some(unit) = request.units.get(position).copied() else {
            let reason = format!("the request has {} experts, counted from 0", request.units.len());
            return Err(Error::invalid_option("position", position, reason));
        };
        let room = request.wait(timeout, |monitor, deadline| monitor.wait_for(request.id, unit, deadline))?;
        Ok(ReadyUnit { ticket: self, unit, room })
    }

    /// Waits until all are resident, as long as the store's [`timeout`](super::StoreOptions::timeout).
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::NoRoom`], [`Error::NoMemory`], [`Error::TimedOut`]. Then nothing is leased.
    pub fn wait(self) -> Result<Lease> {
        let timeout = self.request.shared.options.timeout;
        self.wait_within(timeout)
    }

    /// Like [`wait`](Self::wait), but no longer than `timeout`.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_within(self, timeout: Duration) -> Result<Lease> {
        let Self { request } = self;
        let wait = |monitor: &Monitor<ReaderIo>, deadline| monitor.wait(request.id, &request.units, deadline);
        let rooms = request.wait(timeout, wait)?;
        Ok(Lease { request, rooms })
    }
}

/// One expert of a ticket that is resident, while others may still be being read.
#[derive(Debug)]
pub struct ReadyUnit<'a> {
    ticket: &'a Ticket,
    unit: usize,
    room: UnitRoom,
}

impl ReadyUnit<'_> {
    /// Returns the expert or tensor, and where it lies.
    pub fn get(&self) -> LeasedUnit<'_> {
        LeasedUnit { unit: &self.ticket.request.shared.catalog.units()[self.unit], room: &self.room }
    }
}

impl Lease {
    /// The lease of a request whose units are resident.
    pub(super) fn new(mut request: Held, rooms: Vec<UnitRoom>) -> Self {
        *request.was_shown.get_mut() = true;
        Self { request, rooms }
    }

    /// Number of experts or tensors.
    pub fn len(&self) -> usize {
        self.rooms.len()
    }

    /// Returns whether it has no expert and no tensor.
    pub fn is_empty(&self) -> bool {
        self.rooms.is_empty()
    }

    /// The experts or tensors, in the order of the request.
    pub fn units(&self) -> impl ExactSizeIterator<Item = LeasedUnit<'_>> {
        let catalog = &self.request.shared.catalog;
        let units = self.request.units.iter().zip(&self.rooms);
        units.map(|(unit, room)| LeasedUnit { unit: &catalog.units()[*unit], room })
    }

    /// The expert or tensor at this position of the request.
    pub fn get(&self, position: usize) -> Option<LeasedUnit<'_>> {
        self.units().nth(position)
    }

    /// Ends the lease of experts whose last use by the device is queued on `stream`, a handle of the device: 0 is the legacy
    /// default stream. What is read to their memory next waits on the device for what is queued there so far, and no thread
    /// of the host does. A lease that is dropped does not say that, so reads to its memory wait for all work of the device.
    ///
    /// # Errors
    /// [`Error::Engine`] if the stream cannot be used, as while it is captured. The lease ends all the same, as if dropped.
    ///
    /// # Safety
    /// It must be a live stream of the device.
    pub unsafe fn release_behind(mut self, stream: usize) -> Result<()> {
        let memory = self.rooms.first().map_or(DeviceId::Cpu, |room| room.memory);
        if !memory.is_host() {
            // SAFETY: passed on.
            let fence = Device::open(memory).and_then(|device| unsafe { Fence::of_stream(&device, stream) });
            self.request.fence = Some(fence.map_err(hoistway::Error::from)?);
        }
        Ok(())
    }

    /// An expert of the lease.
    pub fn expert(&self, id: ExpertId) -> Option<LeasedUnit<'_>> {
        self.units().find(|leased| leased.unit.id() == UnitId::Expert(id))
    }
}

impl<'a> LeasedUnit<'a> {
    /// Returns the catalog's description of it.
    pub fn unit(self) -> &'a Unit {
        self.unit
    }

    /// The number of the slot that it lies in, if the backing has slots.
    pub fn slot(self) -> Option<u32> {
        self.room.slot
    }

    /// Its parts, in the order of [`Unit::parts`].
    pub fn parts(self) -> impl ExactSizeIterator<Item = LeasedPart<'a>> {
        let Self { unit, room } = self;
        unit.parts().iter().enumerate().map(move |(position, part)| LeasedPart { part, room, position })
    }
}

impl<'a> LeasedPart<'a> {
    /// Returns the catalog's description of it.
    pub fn part(self) -> &'a Part {
        self.part
    }

    /// Returns the device whose memory it lies in.
    pub fn memory(self) -> DeviceId {
        self.room.memory
    }

    /// Address of its first byte.
    pub fn address(self) -> u64 {
        self.room.places.get(self.position).map_or(0, |place| place.address)
    }

    /// Returns its bytes, or `None` if they are not in host memory.
    pub fn bytes(self) -> Option<&'a [u8]> {
        let place = self.room.places.get(self.position)?;
        // SAFETY: the lease or ticket that this was borrowed from has pinned the unit, which was resident: its reads have
        // delivered all bytes, and its room is not released before.
        unsafe { host_view::bytes(self.room, place, self.part.bytes.len()) }
    }
}
