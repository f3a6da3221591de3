//! The second level of slots on a device: pinned host memory that evicted experts stay in, up to a bound.
//!
//! One thread saves evicted experts and fetches those that are requested again, in the order in which it is asked. So what is
//! fetched was saved before, and a slot is not filled with another expert before the last fetch from it. What is read to a slot of
//! the device next waits until its expert is saved. A fetched expert keeps its host slot until another needs it: bytes never
//! change, so its next eviction copies nothing.
#![allow(unsafe_code)]

use super::UnitRoom;
use crate::{Error, Result};
use hoistway_device::{CopyDirection, CopyStream, Device, DeviceMemory, Fate, Fence, Gate, HostCopy, Pinned};
use hoistway_io::{
    memory::{Mapping, PageKind},
    parallel::{lock, thread_named},
};
use serde::Serialize;
use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    fmt,
    mem::ManuallyDrop,
    process,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::JoinHandle,
};

/// What a second level holds, and what it has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct HostLevelStats {
    /// Bytes of pinned host memory that it holds: `host_level_bytes`, rounded down to whole experts.
    pub held_bytes: u64,
    /// Experts in it.
    pub experts: usize,
    /// Experts that were copied from it to the device, rather than read.
    pub hits: u64,
    /// Bytes of these.
    pub bytes_copied: u64,
    /// Evicted experts that were copied to it. One that is in it still is not copied again.
    pub saved: u64,
    /// Evicted experts that could not be copied to it, and have to be read again.
    pub failed: u64,
}

/// How a fetch ended.
#[derive(Debug)]
pub(crate) enum Fetched {
    /// All bytes are in their place on the device.
    Copied,
    /// They are not in the second level: they could not be saved.
    Gone,
    /// The device's error.
    Failed(hoistway_device::Error),
}

/// The second level of a device's slots. Dropping it ends its thread, which ends the copy that it is making.
pub(crate) struct HostLevel {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// The process that has the thread.
    process: u32,
}

struct Shared {
    /// Both sides of copies, together: those of unknown fate may use either.
    memory: Arc<BothSides>,
    slot_bytes: u64,
    state: Mutex<State>,
    changed: Condvar,
}

/// The memory that copies use.
struct BothSides {
    device: Arc<Device>,
    host: ManuallyDrop<Mapping>,
    pinned: Option<Pinned>,
    _slab: Arc<DeviceMemory>,
}

#[derive(Default)]
struct State {
    entries: HashMap<usize, Entry>,
    /// Units by when their slots may be taken: those that are resident on the device first, then those evicted longest ago.
    order: BTreeMap<Turn, usize>,
    turns: u64,
    /// Units whose bytes on the device are whole.
    whole: HashSet<usize>,
    free: Vec<u32>,
    /// Slots that a copy of unknown fate may still write to.
    in_doubt: Vec<u32>,
    jobs: VecDeque<Job>,
    is_closed: bool,
    stats: HostLevelStats,
}

/// Whether a unit was evicted, and when that or its fetch was.
type Turn = (bool, u64);

struct Entry {
    slot: u32,
    /// Bytes of its parts, with what lies between them.
    len: u64,
    turn: Turn,
}

struct Job {
    unit: usize,
    copy: HostCopy,
    slot: u32,
    /// What the copy comes after.
    after: Vec<Fence>,
    kind: JobKind,
}

enum JobKind {
    /// Opens the gate once the copy has ended.
    Save(Gate),
    Fetch(Box<dyn FnOnce(Fetched) + Send>),
}

impl HostLevel {
    /// A second level of at most `bytes` bytes for slots of `slot_bytes` in `slab`, which hold `experts` different experts.
    pub(super) fn new(slab: &Arc<DeviceMemory>, slot_bytes: u64, experts: usize, bytes: u64) -> Result<Self> {
        let slots = (bytes / slot_bytes.max(1)).min(experts as u64);
        if slots == 0 {
            let reason = format!("an expert takes {slot_bytes} bytes");
            return Err(Error::invalid_option("host_level_bytes", bytes, reason));
        }
        let held_bytes = slots * slot_bytes;
        let memory = Arc::new(BothSides::new(slab, held_bytes)?);
        let state = State {
            free: (0..slots as u32).rev().collect(),
            stats: HostLevelStats { held_bytes, ..HostLevelStats::default() },
            ..State::default()
        };
        let shared = Shared { memory, slot_bytes, state: Mutex::new(state), changed: Condvar::new() };
        let shared = Arc::new(shared);
        let works = shared.clone();
        let thread = thread_named("hoistway-level").spawn(move || works.work());
        let thread = thread.map_err(|source| {
            let (bytes, kind) = (hoistway_io::parallel::STACK_BYTES as u64, "a thread's stack");
            hoistway::Error::Allocation { bytes, kind, source }
        })?;
        Ok(Self { shared, thread: Some(thread), process: process::id() })
    }

    /// All bytes of a unit are on the device.
    pub(crate) fn delivered(&self, unit: usize) {
        let mut state = lock(&self.shared.state);
        state.whole.insert(unit);
        // Its slot is the first to be taken.
        state.turn(unit, false);
    }

    /// Starts to copy a unit to its room on the device. `end` is called once that has ended. Returns `false` if the unit is not
    /// here.
    pub(crate) fn fetch(
        &self,
        unit: usize,
        room: &UnitRoom,
        end: impl FnOnce(Fetched) + Send + 'static,
    ) -> bool {
        let Some(first) = room.places.first() else { return false };
        let mut state = lock(&self.shared.state);
        let Some(&Entry { slot, len, .. }) = state.entries.get(&unit) else { return false };
        let copy = self.shared.copy(slot, first.address, len);
        let after = room.after.iter().flat_map(|fences| fences.iter().cloned()).collect();
        state.jobs.push_back(Job { unit, copy, slot, after, kind: JobKind::Fetch(Box::new(end)) });
        self.shared.changed.notify_one();
        true
    }

    /// A unit has lost its slot at `address` on the device, whose next use comes after `after`. Has it saved first, if it is whole
    /// and not here. Returns what the next use comes after then. Waits for nothing.
    pub(super) fn evicted(&self, unit: usize, address: u64, len: u64, mut after: Vec<Fence>) -> Vec<Fence> {
        let mut state = lock(&self.shared.state);
        if !state.whole.remove(&unit) || state.turn(unit, true) {
            return after;
        }
        if !state.in_doubt.is_empty() && !self.shared.memory.device.is_in_doubt() {
            let back = std::mem::take(&mut state.in_doubt);
            state.free.extend(back);
        }
        let Some(slot) = state.take_slot() else { return after };
        let turn = state.next_turn(true);
        state.entries.insert(unit, Entry { slot, len, turn });
        state.order.insert(turn, unit);
        let (fence, gate) = Fence::gated();
        let copy = self.shared.copy(slot, address, len);
        state.jobs.push_back(Job { unit, copy, slot, after: after.clone(), kind: JobKind::Save(gate) });
        self.shared.changed.notify_one();
        // It saves nothing where it cannot wait for these, and opens its gate then.
        after.push(fence);
        after
    }

    /// Forgets that a unit is whole, which loses its room without being saved.
    pub(super) fn dropped(&self, unit: usize) {
        let mut state = lock(&self.shared.state);
        state.whole.remove(&unit);
        state.turn(unit, true);
    }

    pub(crate) fn stats(&self) -> HostLevelStats {
        let state = lock(&self.shared.state);
        HostLevelStats { experts: state.entries.len(), ..state.stats }
    }
}

impl Drop for HostLevel {
    fn drop(&mut self) {
        // A child of fork has no such thread, and the lock may be held in its copy for ever.
        if self.process != process::id() {
            return;
        }
        let jobs = {
            let mut state = lock(&self.shared.state);
            state.is_closed = true;
            std::mem::take(&mut state.jobs)
        };
        self.shared.changed.notify_all();
        drop(jobs);
        if let Some(thread) = self.thread.take() {
            // A panic was reported where it happened.
            _ = thread.join();
        }
    }
}

impl Shared {
    /// The copy between a host slot and a slot of the device, whichever way it goes.
    fn copy(&self, slot: u32, device: u64, len: u64) -> HostCopy {
        let start = (u64::from(slot) * self.slot_bytes) as usize;
        let host = self.memory.host.pointer(start).as_ptr().expose_provenance();
        HostCopy { host, device, len: len.min(self.slot_bytes) as usize }
    }

    /// Makes copies until the level is dropped.
    fn work(&self) {
        let mut stream = None;
        // The slots that hold what their entries say, as far as jobs were done.
        let mut saved = HashSet::new();
        // Those that a copy of unknown fate may still write to.
        let mut in_doubt = HashSet::new();
        while let Some(Job { unit, copy, slot, after, kind }) = self.next() {
            match kind {
                JobKind::Save(gate) => {
                    let is_usable = !in_doubt.contains(&slot) || !self.memory.device.is_in_doubt();
                    let fate = if is_usable {
                        self.run(&mut stream, CopyDirection::ToHost, copy, &after)
                    } else {
                        let why = "an earlier copy may still write to its slot in host memory";
                        Fate::Unknown(hoistway_device::Error::Internal(why.into()))
                    };
                    if fate.is_known() {
                        in_doubt.remove(&slot);
                    } else {
                        in_doubt.insert(slot);
                    }
                    if matches!(fate, Fate::Done) {
                        saved.insert(slot);
                        lock(&self.state).stats.saved += 1;
                    } else {
                        tracing::warn!(
                            unit,
                            ?fate,
                            "an evicted expert was not saved, and will be read again"
                        );
                        saved.remove(&slot);
                        lock(&self.state).lose(unit, slot, fate.is_known());
                    }
                    drop(gate);
                }
                JobKind::Fetch(end) if !saved.contains(&slot) => end(Fetched::Gone),
                JobKind::Fetch(end) => {
                    let fate = self.run(&mut stream, CopyDirection::ToDevice, copy, &after);
                    end(match fate.result() {
                        Ok(()) => {
                            let stats = &mut lock(&self.state).stats;
                            stats.hits += 1;
                            stats.bytes_copied += copy.len as u64;
                            Fetched::Copied
                        }
                        Err(error) => Fetched::Failed(error),
                    });
                }
            }
        }
    }

    /// Waits for a job. `None` once the level is dropped.
    fn next(&self) -> Option<Job> {
        let mut state = lock(&self.state);
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Makes a copy behind these fences, and waits for its end.
    fn run(
        &self,
        kept: &mut Option<CopyStream>,
        direction: CopyDirection,
        copy: HostCopy,
        after: &[Fence],
    ) -> Fate {
        let stream = match kept.take().map_or_else(|| CopyStream::new(&self.memory.device), Ok) {
            Ok(stream) => stream,
            Err(error) => return Fate::Failed(error),
        };
        if let Err(error) = after.iter().try_for_each(|fence| fence.order(&stream)) {
            // Nothing of it was queued.
            *kept = Some(stream);
            return Fate::Failed(error);
        }
        // SAFETY: the slot is pinned, and no other job uses it meanwhile, as they are done one by one. The unit's place on the
        // device is allocated; nothing else writes to it before its gate opens, or before the end of the fetch is told. Where the
        // fate is unknown, both are parked.
        let fate = unsafe { stream.run(direction, &[copy]) };
        if fate.is_known() {
            *kept = Some(stream);
        } else {
            stream.park(self.memory.clone());
        }
        fate
    }
}

impl State {
    fn next_turn(&mut self, is_evicted: bool) -> Turn {
        self.turns += 1;
        (is_evicted, self.turns)
    }

    /// Gives a unit that is here its turn anew. Returns whether it is here.
    fn turn(&mut self, unit: usize, is_evicted: bool) -> bool {
        let turn = self.next_turn(is_evicted);
        let Some(entry) = self.entries.get_mut(&unit) else { return false };
        self.order.remove(&entry.turn);
        entry.turn = turn;
        self.order.insert(turn, unit);
        true
    }

    /// A slot for another unit. `None` if a copy of unknown fate may write to each.
    fn take_slot(&mut self) -> Option<u32> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        let (_, unit) = self.order.pop_first()?;
        self.entries.remove(&unit).map(|entry| entry.slot)
    }

    /// A unit was not saved to its slot.
    fn lose(&mut self, unit: usize, slot: u32, is_known: bool) {
        self.stats.failed += 1;
        // Another unit may have the slot in the meantime, which is saved to it later.
        if self.entries.get(&unit).is_none_or(|entry| entry.slot != slot) {
            return;
        }
        if let Some(entry) = self.entries.remove(&unit) {
            self.order.remove(&entry.turn);
        }
        if is_known {
            self.free.push(slot);
        } else {
            self.in_doubt.push(slot);
        }
    }
}

impl BothSides {
    fn new(slab: &Arc<DeviceMemory>, len: u64) -> Result<Self> {
        let device = slab.device();
        let no_memory = |source| hoistway::Error::Allocation { bytes: len, kind: "memory", source };
        let (bytes, kind) = (len as usize, PageKind::TransparentHuge);
        // A node's refusal costs speed, no bytes.
        let near = device.info().numa_node.and_then(|node| Mapping::anonymous_on(bytes, kind, node).ok());
        let mut host = near.map_or_else(|| Mapping::anonymous(bytes, kind), Ok).map_err(no_memory)?;
        host.hide_from_children();
        // SAFETY: it is unmapped after it was unpinned.
        let pinned = unsafe { Pinned::new(device, host.pointer(0).as_ptr(), host.len()) };
        let pinned = Some(pinned.map_err(hoistway::Error::from)?);
        Ok(Self { device: device.clone(), host: ManuallyDrop::new(host), pinned, _slab: slab.clone() })
    }
}

impl Drop for BothSides {
    fn drop(&mut self) {
        // Memory that may be pinned still keeps its address, so that no other memory gets it.
        if self.pinned.take().is_none_or(Pinned::unpin) {
            // SAFETY: dropped once, and not used again.
            unsafe { ManuallyDrop::drop(&mut self.host) };
        }
    }
}

impl fmt::Debug for HostLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostLevel").field("slot_bytes", &self.shared.slot_bytes).finish_non_exhaustive()
    }
}
