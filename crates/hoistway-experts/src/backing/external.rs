//! Memory of the caller's: a place for each part, such as buffers of an inference engine.
#![allow(unsafe_code)]

use super::{
    PartPlace, UnitMemory, UnitRoom,
    uses::{Use, Uses, passed},
    waits::Waits,
};
use crate::{
    Error, Result,
    catalog::{ExpertCatalog, Part, Stored, Unit},
    error::guarded,
};
use hoistway::{ByteRange, DeviceId};
use hoistway_device::{Device, Fence};
use hoistway_io::parallel::lock;
use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

/// Uses of places that were given back which are remembered for a device. If there are more that have not ended, all work of the
/// device is waited for in their place.
const MOST_PAST: usize = 64;

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
    /// whose bytes are worth nothing any more, and may give their memory back; where it is unknown whether a device still copies
    /// to it, that is once it is known, from a thread of the store. It is also told of a unit of which some parts
    /// got a place and another got none. Neither may call the store.
    ///
    /// Reads to a place on a device come after what is queued on the legacy default stream, and after the streams of leases that
    /// were [released behind](crate::store::Lease::release_behind) one, whichever unit had the place.
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
        let (external, catalog, held_bytes) = (self.clone(), catalog.clone(), AtomicU64::new(0));
        let inner = Inner { external, catalog, held_bytes, state: Mutex::default() };
        Opened { waits: Waits::default(), inner: Arc::new(inner) }
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
    /// Threads that wait for devices in doubt.
    waits: Waits,
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    external: External,
    catalog: Arc<ExpertCatalog>,
    held_bytes: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    uses: Uses,
    /// Work that uses places that were given back.
    past: Vec<Past>,
    /// Rooms of units that a device in doubt may still write to, by unit: they are not given back yet.
    in_doubt: BTreeMap<usize, InDoubt>,
    /// The number of units that were ever in doubt.
    doubts: u64,
    /// Devices that a thread waits for.
    awaited: BTreeSet<DeviceId>,
}

#[derive(Debug)]
struct InDoubt {
    /// The number of units that were in doubt before it.
    number: u64,
    room: UnitRoom,
}

/// Work that uses bytes of a device.
#[derive(Debug)]
struct Past {
    memory: DeviceId,
    addresses: ByteRange,
    fences: Vec<Fence>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        // A child of fork has no such thread, and no thread that unlocks the copy.
        if !self.waits.are_own() {
            return;
        }
        self.waits.wait();
        let left: BTreeSet<DeviceId> =
            lock(&self.inner.state).in_doubt.values().map(|doubt| doubt.room.memory).collect();
        left.into_iter().for_each(|memory| self.inner.give_back_known(memory));
        for unit in lock(&self.inner.state).in_doubt.keys() {
            tracing::error!(unit, "a device may still write to memory of a caller whose store has ended");
        }
    }
}

impl State {
    fn has_doubt(&self, memory: DeviceId) -> bool {
        self.in_doubt.values().any(|doubt| doubt.room.memory == memory)
    }

    /// The fences that reads to places on a device come after.
    fn take_past(&mut self, memory: DeviceId, places: &[PartPlace]) -> Vec<Fence> {
        let (mut found, mut left) = (Vec::new(), Vec::new());
        for past in std::mem::take(&mut self.past) {
            let overlapping = |place: &&PartPlace| {
                past.memory == memory && place.addresses().intersection(past.addresses).is_some()
            };
            let Some(place) = places.iter().find(overlapping) else {
                left.push(past);
                continue;
            };
            for fence in &past.fences {
                if !found.contains(fence) {
                    found.push(fence.clone());
                }
            }
            if !place.addresses().contains(past.addresses) {
                left.push(past);
            }
        }
        self.past = left;
        found
    }

    fn add_past(&mut self, room: &UnitRoom, fences: &[Fence]) {
        let count = |all: &[Past]| all.iter().filter(|past| past.memory == room.memory).count();
        if count(&self.past) > MOST_PAST {
            self.past.retain(|past| past.memory != room.memory);
            self.past.push(Past {
                memory: room.memory,
                addresses: ByteRange::at(0, u64::MAX).unwrap_or_default(),
                fences: vec![Fence::of_device(room.memory)],
            });
        }
        let past = |place: &PartPlace| Past {
            memory: room.memory,
            addresses: place.addresses(),
            fences: fences.to_vec(),
        };
        self.past.extend(room.places.iter().map(past));
    }
}

impl Inner {
    /// Gives back what a device in doubt may have written to, once it is known that it does not. Waits for the device.
    fn give_back_known(&self, memory: DeviceId) {
        loop {
            // What comes while this waits may be used by work that it does not wait for.
            let before = lock(&self.state).doubts;
            let known = Device::open(memory).and_then(|device| device.settle());
            // Locked while the callback runs: the unit gets no other place before it.
            let mut state = lock(&self.state);
            if let Err(error) = known {
                tracing::warn!(%error, "memory of evicted units is given back later");
                state.awaited.remove(&memory);
                return;
            }
            let is_known = |doubt: &InDoubt| doubt.room.memory == memory && doubt.number < before;
            let rooms = state.in_doubt.extract_if(.., |_, doubt| is_known(doubt));
            for unit in rooms.filter_map(|(unit, _)| self.catalog.units().get(unit)) {
                self.give_back(unit);
            }
            if !state.has_doubt(memory) {
                state.awaited.remove(&memory);
                return;
            }
        }
    }

    fn place(&self, unit: &Unit, part: &Part) -> Result<Option<ExternalPlace>> {
        guarded("the callback that locates parts", || (self.external.locate)(unit, part))
    }

    /// Tells the caller that a unit's places are not used any more. Returns whether the callback came back.
    fn give_back(&self, unit: &Unit) -> bool {
        let told = guarded("the callback that is told of evicted units", || (self.external.evicted)(unit));
        match &told {
            Ok(()) => _ = self.held_bytes.fetch_sub(unit.bytes(), Ordering::Relaxed),
            Err(error) => {
                tracing::error!(%error, unit = unit.label(), "its memory counts as used from now on");
            }
        }
        told.is_ok()
    }

    /// A place for each part of a unit, and whose memory they are in.
    fn places(&self, unit: &Unit, stored: Vec<Stored>) -> Result<(DeviceId, Arc<[PartPlace]>)> {
        let mut given = false;
        let mut memory = None;
        let places = unit.parts().iter().zip(stored).map(|(part, stored)| {
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
            // Packed experts are compared with their digests, which memory of a device cannot be.
            let stored = if place.memory.is_host() { stored } else { Stored::of_model(part) };
            Ok(PartPlace::exact(place.address, stored))
        });
        // Also of a unit of which only some parts get places.
        self.held_bytes.fetch_add(unit.bytes(), Ordering::Relaxed);
        match places.collect::<Result<Arc<[PartPlace]>>>() {
            Ok(places) => Ok((memory.unwrap_or_default(), places)),
            Err(error) => {
                // The parts before have places that nothing uses.
                if given {
                    self.give_back(unit);
                } else {
                    self.held_bytes.fetch_sub(unit.bytes(), Ordering::Relaxed);
                }
                Err(error)
            }
        }
    }
}

impl Opened {
    /// Has a thread wait for a device in doubt. Without one the next unit that is released tries again.
    fn wait_for(&self, state: &mut State, memory: DeviceId) {
        if state.awaited.insert(memory) {
            let inner = self.inner.clone();
            if self.waits.start(move || inner.give_back_known(memory)).is_err() {
                state.awaited.remove(&memory);
            }
        }
    }
}

impl UnitMemory for Opened {
    fn cost_bytes(&self, unit: usize) -> u64 {
        self.inner.catalog.units().get(unit).map_or(u64::MAX, Unit::bytes)
    }

    fn reserve(&self, unit: usize, _keep_bytes: u64) -> Result<Option<UnitRoom>> {
        let mut state = lock(&self.inner.state);
        if let Entry::Occupied(entry) = state.in_doubt.entry(unit) {
            let after = Some([Fence::of_device(entry.get().room.memory)].into());
            return Ok(Some(UnitRoom { after, ..entry.remove().room }));
        }
        let stored = self.inner.catalog.stored(unit)?;
        let unit = self.inner.catalog.units().get(unit);
        let unit = unit.ok_or_else(|| Error::Internal("there is no such unit".into()))?;
        let (memory, places) = self.inner.places(unit, stored)?;
        let mut after = state.take_past(memory, &places);
        if !after.is_empty() {
            after.push(Fence::of_default_stream());
        }
        let after = Some(after).filter(|after| !after.is_empty()).map(Arc::from);
        Ok(Some(UnitRoom { memory, slot: None, places, after }))
    }

    fn used(&self, unit: usize, fence: Option<&Fence>) {
        // The default stream is waited for in any case.
        if fence.is_none() {
            return;
        }
        let state = lock(&self.inner.state);
        let mut asked = state.uses.full(unit);
        if state.past.len() > MOST_PAST / 2 {
            asked.extend(state.past.iter().flat_map(|past| past.fences.iter().cloned()));
        }
        drop(state);
        let passed = passed(asked);
        let mut state = lock(&self.inner.state);
        state.past.retain(|past| !past.fences.iter().all(|fence| passed.contains(fence)));
        state.uses.note(unit, fence, &passed);
    }

    fn release(&self, unit: usize, room: &UnitRoom, _keep_bytes: u64) -> bool {
        let mut state = lock(&self.inner.state);
        let Use { mut fences, has_others } = state.uses.take(unit);
        if !room.memory.is_host() {
            // Memory in doubt keeps its device open.
            let is_in_doubt = Device::get(room.memory).is_some_and(|device| device.is_in_doubt());
            if is_in_doubt {
                let number = state.doubts;
                state.doubts += 1;
                state.in_doubt.insert(unit, InDoubt { number, room: room.clone() });
            }
            // Also for others, whose wait did not tell.
            if state.has_doubt(room.memory) {
                self.wait_for(&mut state, room.memory);
            }
            if is_in_doubt {
                return true;
            }
            if has_others {
                fences.push(Fence::of_device(room.memory));
            } else if let (Some(before), true) = (&room.after, fences.is_empty()) {
                // Nothing that was named used what was read, or was to be read.
                fences = before.to_vec();
            }
            if !fences.is_empty() {
                state.add_past(room, &fences);
            }
        }
        drop(state);
        self.inner.catalog.units().get(unit).is_none_or(|unit| self.inner.give_back(unit))
    }

    fn held_bytes(&self) -> u64 {
        self.inner.held_bytes.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(memory: DeviceId, number: u64) -> UnitRoom {
        let bytes = ByteRange::at(0, 256).unwrap();
        let places = [PartPlace::exact((number + 1) * 4096, Stored { file: 0, bytes })].into();
        UnitRoom { memory, slot: None, places, after: None }
    }

    /// Uses that never come to be known as ended, of places that never come again.
    #[test]
    fn uses_of_places_that_do_not_come_back_are_bounded() {
        let (device, other) = (DeviceId::Cuda(0), DeviceId::Cuda(1));
        let mut state = State::default();
        state.add_past(&room(other, 0), &[Fence::of_default_stream()]);
        for number in 0..1000 {
            state.add_past(&room(device, number), &[Fence::of_default_stream()]);
            assert!(state.past.len() <= MOST_PAST + 3, "{}", state.past.len());
        }
        // Reads to the first place come after all work of the device, which its use is a part of.
        let fences = state.take_past(device, &room(device, 0).places);
        assert!(!fences.is_empty() && fences.iter().all(|fence| !fence.is_queued()), "{fences:?}");
        let fences = state.take_past(other, &room(other, 0).places);
        assert_eq!(fences, [Fence::of_default_stream()], "another device's is remembered as it was");
    }
}
