//! On to a device: pinned slots, copies that are queued as reads end, and a thread that waits for them.
#![allow(unsafe_code)]

use super::{options::ReaderOptions, queue::Taken, usrbio::UsrbioPath};
use crate::{
    Error, Result,
    device::{Allocation, CopyQueue, Device},
    memory::{Copying, Slot, SlotKind, Slots},
    parallel::lock,
    plan::Transfer,
    report::Carrier,
    route::Unavailable,
};
use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// Slots beside those that reads fill: what is being copied meanwhile.
const COPYING_SLOTS: usize = 4;

/// One device's share of a reader.
#[derive(Debug)]
pub(super) struct DeviceLine {
    /// Copies that were queued, oldest first.
    sent: Mutex<Sent>,
    changed: Condvar,
    slots: Slots,
    /// Memory of one chunk that reads for measurements overwrite, once there was one.
    scratch: Mutex<Option<Allocation>>,
    chunk_bytes: u64,
    queue: CopyQueue,
    /// Whether nobody knows if the copy that was waited for last has ended, so that its slot was given up.
    in_doubt: Arc<AtomicBool>,
}

#[derive(Debug, Default)]
struct Sent {
    waiting: VecDeque<(Copying<Slot>, Delivery)>,
    closed: bool,
}

/// A piece on its way to the device, and who read it.
#[derive(Debug)]
struct Delivery {
    taken: Taken,
    carriers: Vec<Carrier>,
}

impl Delivery {
    fn end(self, result: Result<()>) {
        let staged_bytes = self.taken.piece.wanted.len();
        self.taken.end_carried(self.carriers, staged_bytes, result);
    }
}

impl DeviceLine {
    /// `usrbio` has the memory that reads land in, if they come from a 3FS.
    pub(super) fn new(
        ordinal: u32,
        options: &ReaderOptions,
        usrbio: Option<&UsrbioPath>,
    ) -> Result<Arc<Self>> {
        let device = Device::open(ordinal)?;
        let affordable = (options.memory_budget_bytes / options.chunk_bytes) as usize;
        let count = (options.in_flight + COPYING_SLOTS).min(affordable);
        let slot_bytes = options.chunk_bytes as usize;
        let slots = match usrbio {
            Some(path) => path.slots(count, slot_bytes, Some(&device))?,
            None => Slots::new(count, slot_bytes, SlotKind::Pinned(&device, device.info().numa_node))?,
        };
        Ok(Arc::new(Self {
            sent: Mutex::default(),
            changed: Condvar::new(),
            slots,
            scratch: Mutex::default(),
            chunk_bytes: options.chunk_bytes,
            queue: CopyQueue::new(&device)?,
            in_doubt: Arc::default(),
        }))
    }

    /// Returns the address of memory of one chunk on the device, which is allocated by the first call.
    pub(super) fn scratch(&self) -> Result<u64> {
        let mut scratch = lock(&self.scratch);
        if let Some(allocation) = &*scratch {
            return Ok(allocation.address());
        }
        let allocation = self.queue.allocate(self.chunk_bytes)?;
        let address = allocation.address();
        *scratch = Some(allocation);
        Ok(address)
    }

    /// A free slot. `None` if none is free and `may_wait` does not hold.
    pub(super) fn slot(&self, may_wait: bool) -> Result<Option<Slot>> {
        let slot = if may_wait { self.slots.take() } else { self.slots.try_take() };
        match slot {
            Some(slot) => slot.pin().map(|()| Some(slot)),
            None if !self.slots.is_exhausted() => Ok(None),
            None => Err(Error::DeviceUnavailable {
                device: self.queue.device().name(),
                why: Unavailable::new(
                    "reads and copies of which nobody knows whether they have ended hold all staging memory",
                    "make a new reader",
                ),
            }),
        }
    }

    /// Copies the bytes of a piece, which `carriers` have read and which are the `len` from `source` on in the slot, to
    /// `address`; then it ends.
    pub(super) fn send(
        &self,
        slot: Slot,
        source: u64,
        address: u64,
        len: u64,
        taken: Taken,
        carriers: Vec<Carrier>,
    ) {
        let delivery = Delivery { taken, carriers };
        let transfer = Transfer::Linear { source, arena: 0, destination: 0, len };
        // SAFETY: the slot is full and goes into `Copying`, which frees it when the copy is done. The piece ends only
        // then, and until it does the memory at `address` is this read's alone (`Target::device`).
        let queued = unsafe { self.queue.transfer(slot.source(), &[transfer], &[address], None) };
        match queued.and_then(|_| self.queue.mark()) {
            Ok(ticket) => {
                let copying = Copying::new(ticket, slot, self.in_doubt.clone());
                lock(&self.sent).waiting.push_back((copying, delivery));
                self.changed.notify_one();
            }
            Err(error) => {
                // Some of it may be under way, and reads the slot.
                if self.queue.synchronize().is_err_and(|error| error.leaves_doubt()) {
                    std::mem::forget(slot);
                    self.slots.give_one_up();
                }
                delivery.end(Err(error.into()));
            }
        }
    }

    /// Waits for copies, one after the other, until the line is closed and empty.
    pub(super) fn serve(&self) {
        loop {
            let mut sent = lock(&self.sent);
            let (copying, delivery) = loop {
                if let Some(next) = sent.waiting.pop_front() {
                    break next;
                }
                if sent.closed {
                    return;
                }
                sent = self.changed.wait(sent).unwrap_or_else(PoisonError::into_inner);
            };
            drop(sent);
            let result = copying.wait();
            drop(copying);
            if self.in_doubt.swap(false, Ordering::Relaxed) {
                self.slots.give_one_up();
            }
            delivery.end(result);
        }
    }

    /// Nobody waits for a slot any more.
    pub(super) fn close_slots(&self) {
        self.slots.close();
    }

    /// Nothing will be sent any more.
    pub(super) fn close(&self) {
        lock(&self.sent).closed = true;
        self.changed.notify_all();
    }
}
