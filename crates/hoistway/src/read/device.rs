//! One device of a reader: the way there, its slots, and what reads there past the host.
#![forbid(unsafe_code)]

use super::options::ReaderOptions;
use crate::{
    DeviceId, Error, Result,
    device::{CopyStream, Device, DeviceMemory, Fence},
    memory::{Slot, SlotKind, Slots, first_pinned},
    parallel::lock,
    route::{
        DirectRoute, Route, Unavailable,
        member::{Landing, Member},
        registry::NotOpened,
    },
    source::Source,
    transfer::DeviceLine,
};
use std::sync::{Arc, Mutex};

/// Slots beside those that reads fill: what is being copied meanwhile.
const COPYING_SLOTS: usize = 4;

/// One device's share of a reader.
#[derive(Debug)]
pub(super) struct DeviceShare {
    pub(super) line: DeviceLine,
    slots: Slots,
    /// The route past the host, or why there is none if there might be.
    direct: std::result::Result<Option<Arc<DirectRoute>>, (Route, NotOpened)>,
    /// Memory of one chunk that reads for measurements overwrite, once there was one.
    scratch: Mutex<Option<DeviceMemory>>,
    chunk_bytes: u64,
    slot_count: usize,
}

/// Slots for the reads in flight, and what is copied meanwhile, as far as the budget goes.
fn slot_count(options: &ReaderOptions) -> usize {
    let affordable = usize::try_from(options.memory_budget_bytes / options.chunk_bytes).unwrap_or(usize::MAX);
    (options.most_reads() + COPYING_SLOTS).min(affordable)
}

impl DeviceShare {
    /// `main` has the memory that reads land in, if that is its own.
    pub(super) fn new(
        device: DeviceId,
        options: &ReaderOptions,
        main: Option<&Arc<dyn Member>>,
    ) -> Result<Arc<Self>> {
        let device = Device::open(device)?;
        // Before all else: this fails if the device is lost.
        let queue = CopyStream::new(&device)?;
        let (count, slot_bytes) = (slot_count(options), options.chunk_bytes as usize);
        let node = device.info().numa_node;
        let slots = match main.filter(|main| main.facts().landing == Landing::Shared) {
            Some(main) => main.slots(count, slot_bytes, Some(&device), node)?,
            None => Slots::new(count, slot_bytes, SlotKind::Pinned(&device, node))?,
        };
        let direct = DirectRoute::open(&options.wanted(Some(&device)));
        Ok(Arc::new(Self {
            line: DeviceLine::new(queue, None, false)?,
            slots,
            direct,
            slot_count: count,
            scratch: Mutex::default(),
            chunk_bytes: options.chunk_bytes,
        }))
    }

    fn device(&self) -> &Arc<Device> {
        self.line.device()
    }

    /// The route past the host.
    pub(super) fn direct(&self) -> Option<&Arc<DirectRoute>> {
        self.direct.as_ref().ok()?.as_ref()
    }

    /// Makes a file ready to be read past the host. `false` if no route was asked for that does.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`] if such a route is wanted and cannot be used; what it lacks memory for.
    pub(super) fn add_direct(&self, source: &Arc<dyn Source>) -> Result<bool> {
        match &self.direct {
            Ok(None) => Ok(false),
            Ok(Some(direct)) => direct.add(source, self.slot_count, self.chunk_bytes as usize).map(|()| true),
            Err((route, NotOpened { path, why })) => {
                Err(Error::RouteUnavailable { route: *route, path: path.clone(), why: why.clone() })
            }
        }
    }

    /// Returns the address of memory of one chunk on the device, which is allocated by the first call.
    pub(super) fn scratch(&self) -> Result<u64> {
        let mut scratch = lock(&self.scratch);
        if let Some(allocation) = &*scratch {
            return Ok(allocation.address());
        }
        let allocation = DeviceMemory::new(self.device(), self.chunk_bytes)?;
        let address = allocation.address();
        *scratch = Some(allocation);
        Ok(address)
    }

    /// Has later copies wait for a fence.
    pub(super) fn come_after(&self, fence: &Fence) -> Result<()> {
        self.line.come_after(fence)
    }

    /// A free slot, on the device if it is for a read past the host. `None` if none is free.
    ///
    /// # Errors
    /// The device's, also if none is free and copies of unknown fate may have them all.
    pub(super) fn slot(&self, is_direct: bool) -> Result<Option<Slot>> {
        let slots = self.slots(is_direct)?;
        let mut slot = first_pinned(|| slots.try_take())?;
        if slot.is_none() && self.device().is_in_doubt() {
            self.device().regain()?;
            slot = first_pinned(|| slots.try_take())?;
        }
        if slot.is_none() && slots.is_exhausted() {
            let reason = "reads that failed may still arrive in any of its staging memory";
            let why = Unavailable::new(reason, "open the reader, or the store that reads by it, anew");
            return Err(Error::DeviceUnavailable { device: self.device().name(), why });
        }
        Ok(slot)
    }

    /// How much staging is pinned, if the system has refused some.
    pub(super) fn pinned_short(&self) -> Option<String> {
        self.slots.pinned_short()
    }

    fn slots(&self, is_direct: bool) -> Result<&Slots> {
        if !is_direct {
            return Ok(&self.slots);
        }
        let slots = self.direct().and_then(|direct| direct.slots.get());
        slots.ok_or_else(|| Error::Internal("there are no slots on the device".into()))
    }

    /// Whether its device does nothing more.
    pub(super) fn is_lost(&self) -> bool {
        self.device().is_lost()
    }
}
