//! The second level of slots on a device: pinned host memory that evicted experts stay in, up to a bound.
//!
//! One thread saves evicted experts, and another fetches those that are requested again, each on a stream of its own, as a bus may
//! carry bytes both ways at once; what that gains was not measured. Jobs of one host slot are done one by one, in the order in which
//! they are asked for: what is fetched was saved before, and a slot is not filled with another expert before the last fetch from it has
//! ended. What is read to a slot of the device next waits until its expert is saved. A save only reads bytes, so it comes after no work
//! that reads them too; a fetch begins once the work that has used its slot of the device has ended, and other fetches go first until
//! then. Prefetches come last. A fetched expert keeps its host slot until another needs it: bytes never change, so its next eviction
//! copies nothing.
#![allow(unsafe_code)]

use super::{UnitRoom, Waits, uses};
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
    time::{Duration, Instant},
};

/// How often the device is asked whether the work has ended that fetches come after, where nothing else is to do.
const ASK_EVERY: Duration = Duration::from_micros(200);

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
    /// It was cancelled, or had not begun by its deadline.
    Cancelled,
    /// The device's error.
    Failed(hoistway_device::Error),
}

/// The second level of a device's slots. Dropping it ends its threads, which end the copies that they are making.
pub(crate) struct HostLevel {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// The process that has the threads.
    process: u32,
}

struct Shared {
    device: Arc<Device>,
    /// The address of the first host slot. The threads have the memory, and the last gives it back as it ends.
    base: usize,
    slot_bytes: u64,
    state: Mutex<State>,
    changed: Condvar,
}

/// The memory that copies use, both sides together: those of unknown fate may use either.
struct BothSides {
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
    /// The host slots that jobs are using which have begun: of the save, and of the fetch.
    in_use: [Option<u32>; 2],
    /// The host slots that hold what their entries say, as far as jobs were done.
    saved: HashSet<u32>,
    /// Fences of jobs that threads of their own wait for, and whether these have ended.
    asked: Vec<(Fence, bool)>,
    /// Whether the threads have ended, or are about to.
    is_closed: bool,
    threads: usize,
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
    Fetch(Fetch),
}

struct Fetch {
    reply: Reply,
    /// Bytes of the unit's parts.
    bytes: u64,
    is_demand: bool,
    begin_by: Option<Instant>,
}

/// Tells how a fetch ended, once. One that is dropped tells that the unit is gone.
struct Reply(Option<Box<dyn FnOnce(Fetched) + Send>>);

impl Reply {
    fn tell(mut self, ended: Fetched) {
        if let Some(end) = self.0.take() {
            end(ended);
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(end) = self.0.take() {
            end(Fetched::Gone);
        }
    }
}

impl Job {
    fn direction(&self) -> CopyDirection {
        match self.kind {
            JobKind::Save(_) => CopyDirection::ToHost,
            JobKind::Fetch(_) => CopyDirection::ToDevice,
        }
    }

    /// The fetch, if it is one of `unit`.
    fn fetch_of(&mut self, unit: usize) -> Option<&mut Fetch> {
        match &mut self.kind {
            JobKind::Fetch(fetch) if self.unit == unit => Some(fetch),
            _ => None,
        }
    }

    fn is_prefetch(&self) -> bool {
        matches!(self.kind, JobKind::Fetch(Fetch { is_demand: false, .. }))
    }

    fn is_late(&self) -> bool {
        let JobKind::Fetch(Fetch { begin_by: Some(deadline), .. }) = &self.kind else { return false };
        *deadline < Instant::now()
    }
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
        let base = memory.host.pointer(0).as_ptr().expose_provenance();
        let state = State {
            free: (0..slots as u32).rev().collect(),
            stats: HostLevelStats { held_bytes, ..HostLevelStats::default() },
            ..State::default()
        };
        let (device, state) = (slab.device().clone(), Mutex::new(state));
        let shared = Arc::new(Shared { device, base, slot_bytes, state, changed: Condvar::new() });
        let mut level = Self { shared, threads: Vec::new(), process: process::id() };
        level.start("hoistway-evict", CopyDirection::ToHost, memory.clone())?;
        level.start("hoistway-fetch", CopyDirection::ToDevice, memory)?;
        Ok(level)
    }

    /// Starts the thread that copies in one direction.
    fn start(&mut self, name: &str, direction: CopyDirection, memory: Arc<BothSides>) -> Result<()> {
        let works = self.shared.clone();
        lock(&works.state).threads += 1;
        let thread = thread_named(name).spawn(move || works.work(direction, memory));
        let thread = thread.map_err(|source| {
            lock(&self.shared.state).threads -= 1;
            let (bytes, kind) = (hoistway_io::parallel::STACK_BYTES as u64, "a thread's stack");
            hoistway::Error::Allocation { bytes, kind, source }
        })?;
        self.threads.push(thread);
        Ok(())
    }

    /// All bytes of a unit are on the device.
    pub(crate) fn delivered(&self, unit: usize) {
        let mut state = lock(&self.shared.state);
        state.whole.insert(unit);
        // Its slot is the first to be taken.
        state.turn(unit, false);
    }

    /// Starts to copy a unit to its room on the device. `end` is called once that has ended, without a lock of the level. Returns
    /// `false` if the unit is not here, and drops `end` then.
    pub(crate) fn fetch(
        &self,
        unit: usize,
        room: &UnitRoom,
        is_demand: bool,
        begin_by: Option<Instant>,
        end: impl FnOnce(Fetched) + Send + 'static,
    ) -> bool {
        let Some(first) = room.places.first() else { return false };
        let bytes = room.places.iter().map(|place| place.read.len()).sum();
        let mut state = lock(&self.shared.state);
        if state.is_closed {
            return false;
        }
        let Some(&Entry { slot, len, .. }) = state.entries.get(&unit) else { return false };
        let copy = self.shared.copy(slot, first.address, len);
        let after = room.after.iter().flat_map(|fences| fences.iter().cloned()).collect();
        let fetch = Fetch { reply: Reply(Some(Box::new(end))), bytes, is_demand, begin_by };
        state.jobs.push_back(Job { unit, copy, slot, after, kind: JobKind::Fetch(fetch) });
        self.shared.changed.notify_all();
        true
    }

    /// Ends the fetch of a unit, if it has not begun.
    pub(crate) fn cancel(&self, unit: usize) {
        let job = {
            let mut state = lock(&self.shared.state);
            let position = state.jobs.iter_mut().position(|job| job.fetch_of(unit).is_some());
            // Others of its slot may be done now.
            self.shared.changed.notify_all();
            position.and_then(|position| state.jobs.remove(position))
        };
        if let Some(Job { kind: JobKind::Fetch(fetch), .. }) = job {
            fetch.reply.tell(Fetched::Cancelled);
        }
    }

    /// The fetch of a unit comes before prefetches from now on, and has no deadline.
    pub(crate) fn promote(&self, unit: usize) {
        let mut state = lock(&self.shared.state);
        if let Some(fetch) = state.jobs.iter_mut().find_map(|job| job.fetch_of(unit)) {
            (fetch.is_demand, fetch.begin_by) = (true, None);
        }
    }

    /// Saves and fetches nothing more: what has not begun is dropped, the threads end, and the host memory is given back once they
    /// have. Waits for nothing.
    pub(crate) fn close(&self) {
        drop(self.shared.close());
    }

    /// A unit has lost its slot at `address` on the device, whose next use comes after `after`. Has it saved first, if it is whole
    /// and not here: that comes after nothing, as what `after` stands for has filled the slot before, or reads it too. Returns what
    /// the next use comes after then. Waits for nothing.
    pub(super) fn evicted(&self, unit: usize, address: u64, len: u64, mut after: Vec<Fence>) -> Vec<Fence> {
        let mut state = lock(&self.shared.state);
        if !state.whole.remove(&unit) || state.is_closed || state.turn(unit, true) {
            return after;
        }
        if !state.in_doubt.is_empty() && !self.shared.device.is_in_doubt() {
            let back = std::mem::take(&mut state.in_doubt);
            state.free.extend(back);
        }
        let Some(slot) = state.take_slot() else {
            state.stats.failed += 1;
            return after;
        };
        let turn = state.next_turn(true);
        state.entries.insert(unit, Entry { slot, len, turn });
        state.order.insert(turn, unit);
        let (fence, gate) = Fence::gated();
        let copy = self.shared.copy(slot, address, len);
        state.jobs.push_back(Job { unit, copy, slot, after: Vec::new(), kind: JobKind::Save(gate) });
        self.shared.changed.notify_all();
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
        // A child of fork has no such threads, and the lock may be held in its copy for ever.
        if self.process != process::id() {
            return;
        }
        self.close();
        for thread in self.threads.drain(..) {
            // A panic was reported where it happened.
            _ = thread.join();
        }
    }
}

impl Shared {
    /// The copy between a host slot and a slot of the device, whichever way it goes.
    fn copy(&self, slot: u32, device: u64, len: u64) -> HostCopy {
        let host = self.base + (u64::from(slot) * self.slot_bytes) as usize;
        HostCopy { host, device, len: len.min(self.slot_bytes) as usize }
    }

    /// Takes no more jobs. Returns those that have not begun: to drop them opens their gates, and tells of units that are gone.
    fn close(&self) -> VecDeque<Job> {
        let mut state = lock(&self.state);
        state.is_closed = true;
        self.changed.notify_all();
        std::mem::take(&mut state.jobs)
    }

    /// Makes copies of one direction until the level is closed.
    fn work(self: &Arc<Self>, direction: CopyDirection, memory: Arc<BothSides>) {
        // Threads that wait for all work of the device. What is dropped before this is waited for by nothing.
        let waits = Waits::default();
        let _closing = Closing(self);
        let held = memory;
        let mut stream = None;
        // Host slots that a save of unknown fate may still write to.
        let mut in_doubt = HashSet::new();
        while let Some(Job { unit, copy, slot, after, kind }) = self.next(direction, &waits) {
            match kind {
                JobKind::Save(gate) => {
                    if !in_doubt.is_empty() && !self.device.is_in_doubt() {
                        in_doubt.clear();
                    }
                    let fate = if in_doubt.contains(&slot) {
                        let why = "an earlier copy may still write to its slot in host memory";
                        Fate::Unknown(hoistway_device::Error::Internal(why.into()))
                    } else {
                        self.run(&held, &mut stream, direction, copy, &after)
                    };
                    if !fate.is_known() {
                        in_doubt.insert(slot);
                    }
                    if matches!(fate, Fate::Done) {
                        let mut state = lock(&self.state);
                        state.saved.insert(slot);
                        state.stats.saved += 1;
                    } else {
                        tracing::warn!(
                            unit,
                            ?fate,
                            "an evicted expert was not saved, and will be read again"
                        );
                        lock(&self.state).lose(unit, slot, fate.is_known());
                    }
                    // Before the other thread is told to look.
                    drop(gate);
                    self.end_use(direction);
                }
                JobKind::Fetch(fetch) if !lock(&self.state).saved.contains(&slot) => {
                    self.end_use(direction);
                    fetch.reply.tell(Fetched::Gone);
                }
                JobKind::Fetch(Fetch { reply, bytes, .. }) => {
                    let fate = self.run(&held, &mut stream, direction, copy, &after);
                    self.end_use(direction);
                    reply.tell(match fate.result() {
                        Ok(()) => {
                            let stats = &mut lock(&self.state).stats;
                            stats.hits += 1;
                            stats.bytes_copied += bytes;
                            Fetched::Copied
                        }
                        Err(error) => Fetched::Failed(error),
                    });
                }
            }
        }
    }

    /// Ends the use of a host slot, so that the next job of it may begin.
    fn end_use(&self, direction: CopyDirection) {
        lock(&self.state).in_use[direction as usize] = None;
        self.changed.notify_all();
    }

    /// Waits for a job of this direction, and begins to use its host slot. `None` once the level is closed.
    fn next(self: &Arc<Self>, direction: CopyDirection, waits: &Waits) -> Option<Job> {
        let mut state = lock(&self.state);
        loop {
            let asked = state.queued(direction);
            let mut passed = Vec::new();
            if !asked.is_empty() {
                // To ask calls the driver, which may take as long as other calls of it do.
                drop(state);
                passed = uses::passed(asked);
                state = lock(&self.state);
            }
            if state.is_closed {
                return None;
            }
            if let Some(late) = state.jobs.iter().position(Job::is_late) {
                let job = state.jobs.remove(late);
                // Others of its slot may be done now, by the other thread too.
                self.changed.notify_all();
                drop(state);
                if let Some(Job { kind: JobKind::Fetch(fetch), .. }) = job {
                    fetch.reply.tell(Fetched::Cancelled);
                }
                state = lock(&self.state);
                continue;
            }
            let Choice { job, has_to_ask } = self.choose(&mut state, direction, &passed, waits);
            if let Some(job) = job.and_then(|position| state.jobs.remove(position)) {
                state.in_use[direction as usize] = Some(job.slot);
                return Some(job);
            }
            state = if has_to_ask {
                let woken = self.changed.wait_timeout(state, ASK_EVERY);
                woken.unwrap_or_else(PoisonError::into_inner).0
            } else {
                self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
            };
        }
    }

    /// Chooses the first job of this direction that may be done now, a prefetch only if there is no other. What each waits for comes
    /// before it, so the first of all waits at most for the device. Of fences that streams wait for, these are known to be passed.
    fn choose(
        self: &Arc<Self>,
        state: &mut State,
        direction: CopyDirection,
        passed: &[Fence],
        waits: &Waits,
    ) -> Choice {
        let State { jobs, asked, in_use, .. } = state;
        let mut choice = Choice { job: None, has_to_ask: false };
        let mut slots: HashSet<u32> = in_use.iter().flatten().copied().collect();
        asked.retain(|(fence, _)| jobs.iter().any(|job| job.after.contains(fence)));
        for (position, job) in jobs.iter().enumerate() {
            let is_first = slots.insert(job.slot);
            if !is_first || job.direction() != direction || (choice.job.is_some() && job.is_prefetch()) {
                continue;
            }
            let mut is_ready = true;
            let is_passed =
                |fence: &Fence| if fence.is_queued() { passed.contains(fence) } else { fence.is_passed() };
            for fence in job.after.iter().filter(|fence| !is_passed(fence)) {
                if fence.is_gate() {
                    is_ready = false;
                } else if fence.is_queued() {
                    // What a device that is lost refuses is told by the copy.
                    is_ready &= self.device.is_lost();
                    choice.has_to_ask = true;
                } else if let Some((_, has_ended)) = asked.iter().find(|asked| asked.0 == *fence) {
                    is_ready &= *has_ended;
                } else {
                    let has_ended = !self.wait_beside(waits, fence);
                    asked.push((fence.clone(), has_ended));
                    is_ready &= has_ended;
                }
            }
            if is_ready {
                choice.job = Some(position);
                if !job.is_prefetch() {
                    break;
                }
            }
        }
        choice
    }

    /// Has a thread of its own wait for all work of the device. Returns `false` if the system has none.
    fn wait_beside(self: &Arc<Self>, waits: &Waits, fence: &Fence) -> bool {
        let (shared, fence) = (self.clone(), fence.clone());
        let wait = move || {
            // What fails here fails again where the copy is made, which tells of it.
            _ = CopyStream::new(&shared.device).and_then(|stream| fence.order(&stream));
            let mut state = lock(&shared.state);
            state.asked.iter_mut().filter(|asked| asked.0 == fence).for_each(|asked| asked.1 = true);
            shared.changed.notify_all();
        };
        waits.start(wait).is_ok()
    }

    /// Makes a copy behind these fences, and waits for its end.
    fn run(
        &self,
        memory: &Arc<BothSides>,
        kept: &mut Option<CopyStream>,
        direction: CopyDirection,
        copy: HostCopy,
        after: &[Fence],
    ) -> Fate {
        let stream = match kept.take().map_or_else(|| CopyStream::new(&self.device), Ok) {
            Ok(stream) => stream,
            Err(error) => return Fate::Failed(error),
        };
        if let Err(error) = after.iter().try_for_each(|fence| fence.order(&stream)) {
            // Nothing of it was queued.
            *kept = Some(stream);
            return Fate::Failed(error);
        }
        // SAFETY: the slot is pinned, and no other job uses it meanwhile, as those of one slot are done one by one. The unit's place
        // on the device is allocated; nothing else writes to it before its gate opens, or before the end of the fetch is told. Where
        // the fate is unknown, both are parked.
        let fate = unsafe { stream.run(direction, &[copy]) };
        if fate.is_known() {
            *kept = Some(stream);
        } else {
            stream.park(memory.clone());
        }
        fate
    }
}

/// The job to do next, if there is one, and whether others wait for work of which only the device can tell.
struct Choice {
    job: Option<usize>,
    has_to_ask: bool,
}

/// Closes the level as one of its threads ends, however that comes.
struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        drop(self.0.close());
        let mut state = lock(&self.0.state);
        state.threads -= 1;
        if state.threads == 0 {
            state.entries.clear();
            state.order.clear();
            state.stats.held_bytes = 0;
        }
    }
}

impl State {
    /// The fences that copies of this direction come after and that streams wait for.
    fn queued(&self, direction: CopyDirection) -> Vec<Fence> {
        let jobs = self.jobs.iter().filter(|job| job.direction() == direction);
        jobs.flat_map(|job| &job.after).filter(|fence| fence.is_queued()).cloned().collect()
    }

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

    /// A slot for another unit, which a fetch that has begun may still read. `None` if each is to be fetched from, which may have to
    /// wait for work of the caller's, or a copy of unknown fate may write to it.
    fn take_slot(&mut self) -> Option<u32> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        let fetched =
            |slot: u32| self.jobs.iter().any(|job| job.slot == slot && matches!(job.kind, JobKind::Fetch(_)));
        let idle = |unit: &usize| self.entries.get(unit).is_some_and(|entry| !fetched(entry.slot));
        let (turn, unit) =
            self.order.iter().find(|(_, unit)| idle(unit)).map(|(turn, unit)| (*turn, *unit))?;
        self.order.remove(&turn);
        self.entries.remove(&unit).map(|entry| entry.slot)
    }

    /// A unit was not saved to its slot.
    fn lose(&mut self, unit: usize, slot: u32, is_known: bool) {
        self.stats.failed += 1;
        self.saved.remove(&slot);
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
        let node = device.info().numa_node;
        let (mut host, refusal) = Mapping::anonymous_near(bytes, kind, node).map_err(no_memory)?;
        if let Some(error) = refusal {
            tracing::warn!(bytes, node, %error, "the second level is not on the NUMA node of its device: copies are slower");
        }
        host.hide_from_children();
        // SAFETY: it is unmapped after it was unpinned.
        let pinned = unsafe { Pinned::new(device, host.pointer(0).as_ptr(), host.len()) };
        let pinned = Some(pinned.map_err(hoistway::Error::from)?);
        Ok(Self { host: ManuallyDrop::new(host), pinned, _slab: slab.clone() })
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

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use crate::backing::PartPlace;
    use hoistway::{ByteRange, DeviceId};
    use std::sync::mpsc;

    const SLOT: u64 = 256;
    const LONG: Duration = Duration::from_secs(60);

    fn wait_for(fences: &[Fence]) {
        let end = Instant::now() + LONG;
        while !fences.iter().all(Fence::is_passed) {
            assert!(Instant::now() < end, "a gate stays shut");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_thread_that_panics_opens_gates_and_tells_of_what_is_gone() {
        let device = Device::open(DeviceId::Toy(0)).unwrap();
        let slab = Arc::new(DeviceMemory::new(&device, 4 * SLOT).unwrap());
        let level = HostLevel::new(&slab, SLOT, 4, 4 * SLOT).unwrap();
        let read = ByteRange::at(0, SLOT).unwrap();
        let place = PartPlace { address: slab.address(), file: 0, read, target: slab.address() };
        let (memory, places) = (device.id(), Arc::from([place]));
        let room = UnitRoom { memory, slot: Some(0), places, after: Some(Arc::default()) };
        (0..2).for_each(|unit| level.delivered(unit));
        wait_for(&level.evicted(0, slab.address(), SLOT, Vec::new()));

        let (go, goes) = mpsc::channel::<()>();
        let (ends, ended) = mpsc::channel();
        let panics = move |_| {
            _ = goes.recv();
            panic!("as a test asks for");
        };
        assert!(level.fetch(0, &room, true, None, panics));
        let gates = level.evicted(1, slab.address() + SLOT, SLOT, Vec::new());
        assert!(gates.len() == 1 && level.fetch(0, &room, true, None, move |end| ends.send(end).unwrap()));
        go.send(()).unwrap();
        assert!(matches!(ended.recv_timeout(LONG), Ok(Fetched::Gone)));
        wait_for(&gates);
        assert!(!level.fetch(0, &room, true, None, |_| panic!("it was refused")));
        level.delivered(2);
        assert!(level.evicted(2, slab.address(), SLOT, Vec::new()).is_empty(), "nothing is saved any more");
    }

    /// A save waits behind the late fetch of its host slot, which the other thread ends.
    #[test]
    fn the_end_of_a_late_fetch_is_told_to_the_thread_of_the_next_job_of_its_slot() {
        let device = Device::open(DeviceId::Toy(0)).unwrap();
        let shared =
            Shared { device, base: 0, slot_bytes: SLOT, state: Mutex::default(), changed: Condvar::new() };
        let shared = Arc::new(shared);
        let (ends, ended) = mpsc::channel();
        let (fetch_fence, fetch_gate) = Fence::gated();
        let (_, save_gate) = Fence::gated();
        let begin_by = Instant::now() + Duration::from_millis(100);
        let end = move |end| ends.send(end).unwrap();
        let fetch = Fetch {
            reply: Reply(Some(Box::new(end))),
            bytes: SLOT,
            is_demand: false,
            begin_by: Some(begin_by),
        };
        let copy = || shared.copy(0, 0, SLOT);
        let (late, save) = (JobKind::Fetch(fetch), JobKind::Save(save_gate));
        // As is left where the save of the first expert fails, and another is evicted before the fetch has begun.
        lock(&shared.state).jobs = VecDeque::from([
            Job { unit: 0, copy: copy(), slot: 0, after: vec![fetch_fence], kind: late },
            Job { unit: 1, copy: copy(), slot: 0, after: Vec::new(), kind: save },
        ]);
        let (found, finds) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let job = shared.next(CopyDirection::ToHost, &Waits::default());
                found.send(job.map(|job| job.unit)).unwrap();
            });
            // The thread of saves has begun to wait.
            std::thread::sleep(Duration::from_millis(200));
            let fetching = scope.spawn(|| shared.next(CopyDirection::ToDevice, &Waits::default()).is_none());
            let found = finds.recv_timeout(LONG);
            let told = ended.recv_timeout(LONG);
            drop(shared.close());
            assert!(fetching.join().unwrap());
            assert!(matches!((found, told), (Ok(Some(1)), Ok(Fetched::Cancelled))));
        });
        drop(fetch_gate);
    }
}
