//! Memory of the caller's: a place for each part, such as buffers of an inference engine.
#![allow(unsafe_code)]

use super::{Place, UnitMemory, UnitRoom};
use crate::{
    Error, Result,
    catalog::{ExpertCatalog, Part, Unit},
    error::guarded,
};
use hoistway::DeviceId;
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// The place of a part in memory of the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExternalPlace {
    /// The device whose memory it is; [`DeviceId::Cpu`] for the host's.
    pub memory: DeviceId,
    /// Address of the first byte.
    pub address: u64,
}

type Locate = dyn Fn(&Unit, &Part) -> Option<ExternalPlace> + Send + Sync;
type Evicted = dyn Fn(&Unit) + Send + Sync;

/// Memory of the caller's, and how its places are found.
#[derive(Clone)]
pub struct External {
    locate: Arc<Locate>,
    evicted: Arc<Evicted>,
}

impl External {
    /// `locate` gives the place of a part that is about to be read, or `None` if there is none. `evicted` is told of units
    /// whose bytes are worth nothing any more, and may give their memory back. It is also told of a unit of which some parts
    /// got a place and another got none. Neither may call the store.
    ///
    /// If `locate` panics, the request fails with [`Error::Panicked`]. If `evicted` panics, the unit's bytes count as used
    /// until the store is dropped.
    ///
    /// # Safety
    /// Between a call of `locate` and the call of `evicted` for the same unit, or the end of the store and all of its leases,
    /// as many bytes from the place on as the part has must be valid for reads and writes and initialised, and nothing but
    /// the store may write to them. Host addresses must be exposed (`expose_provenance` of pointers).
    pub unsafe fn new(
        locate: impl Fn(&Unit, &Part) -> Option<ExternalPlace> + Send + Sync + 'static,
        evicted: impl Fn(&Unit) + Send + Sync + 'static,
    ) -> Self {
        Self { locate: Arc::new(locate), evicted: Arc::new(evicted) }
    }

    pub(super) fn open(&self, catalog: &Arc<ExpertCatalog>) -> Opened {
        Opened { external: self.clone(), catalog: catalog.clone(), held_bytes: AtomicU64::new(0) }
    }
}

impl fmt::Debug for External {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("External")
    }
}

/// The places of one store's units in memory of the caller's.
#[derive(Debug)]
pub(super) struct Opened {
    external: External,
    catalog: Arc<ExpertCatalog>,
    held_bytes: AtomicU64,
}

impl Opened {
    fn place(&self, unit: &Unit, part: &Part) -> Result<Option<ExternalPlace>> {
        guarded("the callback that locates parts", || (self.external.locate)(unit, part))
    }

    /// Tells the caller that a unit's places are not used any more. Returns whether the callback came back.
    fn give_back(&self, unit: &Unit) -> bool {
        let told = guarded("the callback that is told of evicted units", || (self.external.evicted)(unit));
        if let Err(error) = &told {
            tracing::error!(%error, unit = unit.label(), "its memory counts as used from now on");
        }
        told.is_ok()
    }
}

impl UnitMemory for Opened {
    fn cost_bytes(&self, unit: usize) -> u64 {
        self.catalog.units().get(unit).map_or(u64::MAX, Unit::bytes)
    }

    fn reserve(&self, unit: usize, _keep_bytes: u64) -> Result<UnitRoom> {
        let unit = self.catalog.units().get(unit);
        let unit = unit.ok_or_else(|| Error::Internal("there is no such unit".into()))?;
        let mut given = false;
        let mut memory = None;
        let places = unit.parts().iter().map(|part| {
            let refused = |reason: &str| {
                Error::invalid_option("external", format!("the place of '{}'", part.tensor), reason)
            };
            let place = self.place(unit, part)?.ok_or_else(|| refused("the caller gave none"))?;
            given = true;
            if *memory.get_or_insert(place.memory) != place.memory {
                return Err(refused("the parts of one unit lie in one device's memory"));
            }
            if place.address.checked_add(part.bytes.len()).is_none() || place.address == 0 {
                return Err(refused("it has no address"));
            }
            Ok(Place::exact(place.address, part.bytes))
        });
        match places.collect::<Result<Arc<[Place]>>>() {
            Ok(places) => {
                self.held_bytes.fetch_add(unit.bytes(), Ordering::Relaxed);
                Ok(UnitRoom { memory: memory.unwrap_or_default(), slot: None, places, after: None })
            }
            Err(error) => {
                // The parts before have places that nothing uses.
                if given {
                    self.give_back(unit);
                }
                Err(error)
            }
        }
    }

    fn release(&self, unit: usize, room: &UnitRoom, in_doubt: bool, _keep_bytes: u64) -> bool {
        let Some(unit) = self.catalog.units().get(unit) else { return true };
        if in_doubt && !room.memory.is_host() {
            let device = hoistway_device::Device::open(room.memory);
            if !device.is_ok_and(|device| device.wait_for_all()) {
                return false;
            }
        }
        let is_free = self.give_back(unit);
        if is_free {
            self.held_bytes.fetch_sub(unit.bytes(), Ordering::Relaxed);
        }
        is_free
    }

    fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Ordering::Relaxed)
    }
}
