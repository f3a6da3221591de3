//! Memory of a device in which every stacked tensor has its whole length in address space, and slices of resident experts have
//! memory. Dense tensors have allocations of their own.
//!
//! A device maps memory by granules. A slice begins at a granule and ends at one, or is padded to that. To take memory away from
//! addresses waits for no work of the device, so this does, on threads of its own: a unit that was evicted keeps its memory
//! until that is needed, and until what may still use it has ended. Driver calls are made without a lock.
#![forbid(unsafe_code)]

use super::{
    Place, UnitMemory, UnitRoom, add,
    device_slots::{aligned, padded_bytes},
    uses::Uses,
    waits::Waits,
};
use crate::{
    Error, Result,
    catalog::{ExpertCatalog, Part, Unit},
};
use bytesize::ByteSize;
use hoistway::{Alignment, ByteRange, DeviceId};
use hoistway_device::{AddressSpace, CopyStream, Device, DeviceBlock, DeviceMemory, Fate, Fence, Mapped};
use hoistway_io::parallel::lock;
use std::{
    collections::{HashMap, hash_map::Entry},
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// How long memory is looked for that no work uses any more, before a thread waits for the first of several streams.
const PATIENCE: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_micros(100);

/// Memory of a device in which stacked tensors are whole in address space.
#[derive(Debug)]
pub(super) struct DeviceSparse {
    /// Before what its threads use.
    threads: Waits,
    memory: Arc<Memory>,
}

/// What the threads use.
struct Memory {
    catalog: Arc<ExpertCatalog>,
    device: Arc<Device>,
    /// `None` for a model without experts.
    space: Option<Arc<AddressSpace>>,
    tensors: HashMap<TensorKey, Stack>,
    granule: Alignment,
    state: Mutex<State>,
    /// Memory was given back.
    given_back: Condvar,
}

/// A tensor: its file, its bytes there, and its name.
type TensorKey = (usize, ByteRange, Arc<str>);

/// Where a tensor lies in the space, and how far its slices are apart.
#[derive(Clone, Copy, Debug)]
struct Stack {
    start: u64,
    stride: u64,
}

#[derive(Debug, Default)]
struct State {
    /// The memory of experts that have room.
    experts: HashMap<usize, Vec<Mapped>>,
    dense: HashMap<usize, DeviceMemory>,
    /// Units that have memory but no room yet, or why there is none.
    prepared: HashMap<usize, Result<Prepared>>,
    /// Memory of experts that were evicted, oldest first.
    leaving: Vec<Leaving>,
    /// Memory without addresses.
    spare: Vec<DeviceBlock>,
    /// Threads that give memory back.
    giving_back: usize,
    /// Experts whose memory threads are unmapping.
    unmapping: Vec<usize>,
    is_trimming: bool,
    /// Bytes of all memory, with what is being allocated and given back.
    held_bytes: u64,
    /// Bytes that may be held without need.
    keep_bytes: u64,
    /// Work that has used units since they were read.
    uses: Uses,
}

#[derive(Debug)]
enum Prepared {
    /// The memory of an expert, and what reads to it come after.
    Expert(Vec<Mapped>, Vec<Fence>),
    Dense(DeviceMemory),
}

/// Memory that no unit has, and that work of the device may still use.
#[derive(Debug)]
struct Leaving {
    /// The expert at whose addresses it lies.
    unit: usize,
    /// Whether it is all of the expert's memory.
    is_whole: bool,
    mapped: Vec<Mapped>,
    /// What may use it.
    fences: Vec<Fence>,
}

/// The outcome of giving some memory back.
enum Gave<'a> {
    Some,
    /// There is none that no unit has.
    Nothing(MutexGuard<'a, State>),
}

impl DeviceSparse {
    pub(super) fn new(
        catalog: &Arc<ExpertCatalog>,
        device: DeviceId,
        is_padded: bool,
        budget_bytes: u64,
    ) -> Result<Self> {
        let device = Device::open(device).map_err(hoistway::Error::from)?;
        let granule = AddressSpace::granule_of(&device).map_err(hoistway::Error::from)?;
        let bad_granule = || Error::Internal(format!("a granule has {granule} bytes"));
        let granule = Alignment::new(granule).ok_or_else(bad_granule)?;
        let (mut tensors, mut end, mut used, mut padded) = (HashMap::new(), 0, 0, 0);
        for (unit, part) in
            catalog.experts().iter().flat_map(|unit| unit.parts().iter().map(move |part| (unit, part)))
        {
            let len = part.bytes.len();
            if len == 0 {
                continue;
            }
            let stride = padded_to(granule, len)?;
            if stride != len && !is_padded {
                return Err(off_granule(unit, part, &device, granule, stride));
            }
            if !(part.bytes.start() - part.tensor_bytes.start()).is_multiple_of(len) {
                let reason =
                    format!("{} is no slice of its length of tensor '{}'", unit.label(), part.tensor);
                return Err(Error::invalid_option("backing", "device_sparse", reason));
            }
            (used, padded) = (add(used, len)?, add(padded, stride)?);
            if let Entry::Vacant(vacant) = tensors.entry(key(part)) {
                vacant.insert(Stack { start: end, stride });
                let slices = part.tensor_bytes.len().div_ceil(len);
                let whole = slices
                    .checked_mul(stride)
                    .ok_or_else(|| Error::Internal("a tensor does not fit 64 bits".into()))?;
                end = add(end, whole)?;
            }
        }
        if padded > used {
            tracing::warn!(
                device = %device.id(),
                experts = %ByteSize(used),
                with_padding = %ByteSize(padded),
                "experts take more memory than bytes, and the budget counts that: their slices are padded to granules"
            );
        }
        let space = match end {
            0 => None,
            _ => Some(AddressSpace::reserve(&device, end).map_err(hoistway::Error::from)?),
        };
        let state = Mutex::new(State { keep_bytes: budget_bytes, ..State::default() });
        let given_back = Condvar::new();
        let memory = Memory { catalog: catalog.clone(), device, space, tensors, granule, state, given_back };
        Ok(Self { threads: Waits::default(), memory: Arc::new(memory) })
    }

    /// Gives memory back on a thread if more is held than `state` lets be kept.
    fn trim_aside(&self, state: &mut State) {
        let has_free = !state.spare.is_empty() || !state.leaving.is_empty();
        if state.held_bytes <= state.keep_bytes || !has_free || state.is_trimming {
            return;
        }
        state.is_trimming = true;
        let memory = self.memory.clone();
        if self.threads.start(move || memory.trim()).is_err() {
            // The next unit that needs memory, or the end of the store, gives it back.
            state.is_trimming = false;
        }
    }

    /// Frees a dense tensor on a thread, as that waits for the device.
    fn free_aside(&self, state: &mut State, dense: DeviceMemory) {
        let (memory, len) = (self.memory.clone(), dense.len());
        state.giving_back += 1;
        let freed = move || {
            drop(dense);
            memory.gave_back(len);
        };
        if self.threads.start(freed).is_err() {
            // It was freed here.
            state.giving_back -= 1;
            state.held_bytes = state.held_bytes.saturating_sub(len);
        }
    }
}

impl UnitMemory for DeviceSparse {
    fn cost_bytes(&self, unit: usize) -> u64 {
        self.memory.cost_bytes(unit).unwrap_or(u64::MAX)
    }

    fn reserve(&self, unit: usize, keep_bytes: u64) -> Result<Option<UnitRoom>> {
        let mut state = self.memory.state();
        state.keep_bytes = keep_bytes;
        // To map memory calls the driver, and may wait for the device.
        let Some(prepared) = state.prepared.remove(&unit) else { return Ok(None) };
        let (room, prepared) = match prepared? {
            Prepared::Dense(dense) => {
                let room = self.memory.dense_room(unit, dense.address())?;
                (room, Prepared::Dense(dense))
            }
            Prepared::Expert(mapped, after) => {
                let room = self.memory.expert_room(unit, after)?;
                (room, Prepared::Expert(mapped, Vec::new()))
            }
        };
        match prepared {
            Prepared::Dense(dense) => drop(state.dense.insert(unit, dense)),
            Prepared::Expert(mapped, _) => drop(state.experts.insert(unit, mapped)),
        }
        Ok(Some(room))
    }

    fn prepare(&self, unit: usize) {
        let prepared = self.memory.prepare(unit);
        self.memory.state().prepared.insert(unit, prepared);
    }

    fn used(&self, unit: usize, fence: Option<&Fence>) {
        self.memory.state().uses.note(unit, fence);
    }

    fn release(&self, unit: usize, room: &UnitRoom, keep_bytes: u64) -> bool {
        let mut state = self.memory.state();
        state.keep_bytes = keep_bytes;
        let fences = state.uses.take_fences(unit, room, &self.memory.device);
        if let Some(mapped) = state.experts.remove(&unit) {
            state.leaving.push(Leaving { unit, is_whole: true, mapped, fences });
        } else if let Some(dense) = state.dense.remove(&unit) {
            self.free_aside(&mut state, dense);
        }
        self.trim_aside(&mut state);
        true
    }

    fn trim(&self, keep_bytes: u64) {
        let mut state = self.memory.state();
        state.keep_bytes = keep_bytes;
        self.trim_aside(&mut state);
    }

    fn held_bytes(&self) -> u64 {
        self.memory.state().held_bytes
    }

    fn tensor_address(&self, part: &Part) -> Option<u64> {
        let stack = self.memory.tensors.get(&key(part))?;
        Some(self.memory.space.as_ref()?.address() + stack.start)
    }

    fn tensor_stride(&self, part: &Part) -> Option<u64> {
        self.memory.tensors.get(&key(part)).map(|stack| stack.stride)
    }
}

impl Memory {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn unit(&self, unit: usize) -> Result<&Unit> {
        self.catalog.units().get(unit).ok_or_else(|| Error::Internal(format!("there is no unit {unit}")))
    }

    fn is_expert(&self, unit: usize) -> bool {
        unit < self.catalog.experts().len()
    }

    fn cost_bytes(&self, unit: usize) -> Result<u64> {
        let description = self.unit(unit)?;
        if !self.is_expert(unit) {
            return dense_bytes(description);
        }
        let mut parts = description.parts().iter();
        parts.try_fold(0, |sum, part| add(sum, padded_to(self.granule, part.bytes.len())?))
    }

    fn room(&self, places: Vec<Place>, after: Vec<Fence>) -> UnitRoom {
        let memory = self.device.id();
        UnitRoom { memory, slot: None, places: places.into(), after: Some(after.into()) }
    }

    fn dense_room(&self, unit: usize, base: u64) -> Result<UnitRoom> {
        let (mut next, mut places) = (base, Vec::new());
        for stored in self.catalog.stored(unit)? {
            places.push(Place::exact(next, stored));
            next = add(next, aligned(stored.bytes.len())?)?;
        }
        Ok(self.room(places, Vec::new()))
    }

    fn expert_room(&self, unit: usize, after: Vec<Fence>) -> Result<UnitRoom> {
        let base = self.space.as_ref().map_or(0, |space| space.address());
        let mut places = Vec::new();
        for (part, stored) in self.unit(unit)?.parts().iter().zip(self.catalog.stored(unit)?) {
            let offset = if part.bytes.is_empty() { 0 } else { self.offset(part)? };
            places.push(Place::exact(base + offset, stored));
        }
        Ok(self.room(places, after))
    }

    /// Where a part that has bytes lies in the space.
    fn offset(&self, part: &Part) -> Result<u64> {
        let stack = self.tensors.get(&key(part));
        let Stack { start, stride } = stack.ok_or_else(|| Error::Internal("a part has no place".into()))?;
        let slice = (part.bytes.start() - part.tensor_bytes.start()) / part.bytes.len();
        Ok(start + slice * stride)
    }

    /// Gets memory for a unit. Waits for the device where memory is used again.
    fn prepare(&self, unit: usize) -> Result<Prepared> {
        if !self.is_expert(unit) {
            return self.allocate(dense_bytes(self.unit(unit)?)?).map(Prepared::Dense);
        }
        loop {
            let mut state = self.state();
            if let Some(place) = state.leaving.iter().position(|leaving| leaving.unit == unit) {
                let leaving = state.leaving.remove(place);
                if leaving.is_whole {
                    // It has its own memory still, which reads come to after what has used it.
                    return Ok(Prepared::Expert(leaving.mapped, leaving.fences));
                }
                self.make_spare(state, leaving)?;
            } else if state.unmapping.contains(&unit) {
                drop(self.given_back.wait(state).unwrap_or_else(PoisonError::into_inner));
            } else {
                break;
            }
        }
        let mut mapped = Vec::new();
        for part in self.unit(unit)?.parts().iter().filter(|part| !part.bytes.is_empty()) {
            match self.map(part) {
                Ok(part) => mapped.push(part),
                Err(error) => {
                    // Nothing has used it.
                    let leaving = Leaving { unit, is_whole: false, mapped, fences: Vec::new() };
                    self.state().leaving.push(leaving);
                    return Err(error);
                }
            }
        }
        Ok(Prepared::Expert(mapped, Vec::new()))
    }

    fn map(&self, part: &Part) -> Result<Mapped> {
        let space = self.space.as_ref().ok_or_else(|| Error::Internal("there is no address space".into()))?;
        let (len, offset) = (padded_to(self.granule, part.bytes.len())?, self.offset(part)?);
        let block = match self.claim(len, true)? {
            Some(block) => block,
            None => self.made(len, || DeviceBlock::new(&self.device, len))?,
        };
        space.map(offset, block).map_err(|error| {
            self.forget(len);
            hoistway::Error::from(error).into()
        })
    }

    /// Memory for a dense tensor.
    fn allocate(&self, len: u64) -> Result<DeviceMemory> {
        self.claim(len, false)?;
        self.made(len, || DeviceMemory::new(&self.device, len))
    }

    /// Counts memory that is about to be allocated, once what no unit has was given back as far as needed. Returns a spare block of
    /// that length instead, if one `may` serve.
    fn claim(&self, len: u64, may: bool) -> Result<Option<DeviceBlock>> {
        loop {
            let mut state = self.state();
            if let Some(place) = state.spare.iter().position(|spare| may && spare.len() == len) {
                return Ok(Some(state.spare.swap_remove(place)));
            }
            let fits = state.held_bytes.saturating_add(len) <= state.keep_bytes;
            if !fits {
                match self.give_some_back(state)? {
                    Gave::Some => continue,
                    // Units need all of it, as far as the budget and a request's demand let them.
                    Gave::Nothing(unused) => state = unused,
                }
            }
            state.held_bytes = state.held_bytes.saturating_add(len);
            return Ok(None);
        }
    }

    /// Allocates memory that was claimed. If the device has none, all that no unit has is given back first.
    fn made<T>(&self, len: u64, make: impl Fn() -> hoistway_device::Result<T>) -> Result<T> {
        let made = loop {
            match make() {
                Err(error @ hoistway_device::Error::OutOfMemory { .. }) => {
                    match self.give_some_back(self.state()) {
                        Ok(Gave::Some) => {}
                        Ok(Gave::Nothing(state)) => {
                            drop(state);
                            break Err(hoistway::Error::from(error).into());
                        }
                        Err(error) => break Err(error),
                    }
                }
                other => break other.map_err(|error| hoistway::Error::from(error).into()),
            }
        };
        if made.is_err() {
            self.forget(len);
        }
        made
    }

    /// Memory that was claimed is none.
    fn forget(&self, len: u64) {
        let mut state = self.state();
        state.held_bytes = state.held_bytes.saturating_sub(len);
    }

    /// Memory that a thread gave back is gone.
    fn gave_back(&self, len: u64) {
        let mut state = self.state();
        state.giving_back -= 1;
        state.held_bytes = state.held_bytes.saturating_sub(len);
        drop(state);
        self.given_back.notify_all();
    }

    /// Gives some memory back that no unit has: frees a spare block, or makes the memory of an expert that was evicted spare, once
    /// what may use it has ended. If other threads do that, waits for one.
    fn give_some_back<'a>(&'a self, mut state: MutexGuard<'a, State>) -> Result<Gave<'a>> {
        if let Some(block) = state.spare.pop() {
            state.giving_back += 1;
            drop(state);
            let len = block.len();
            drop(block);
            self.gave_back(len);
            return Ok(Gave::Some);
        }
        let started = Instant::now();
        while !state.leaving.is_empty() {
            let place = |is_meant: fn(&Fence) -> bool| {
                state.leaving.iter().position(|leaving| leaving.fences.iter().all(is_meant))
            };
            // To wait for all work of the device takes no less than to wait for a stream.
            let (unused, on_streams) = (place(Fence::is_passed), place(Fence::is_queued));
            if unused.is_none() && on_streams.is_some() && started.elapsed() < PATIENCE {
                // Until some stream, whichever it is, has used what it was to use.
                drop(state);
                thread::sleep(PAUSE);
                state = self.state();
                continue;
            }
            let leaving = state.leaving.remove(unused.or(on_streams).unwrap_or(0));
            return self.make_spare(state, leaving).map(|()| Gave::Some);
        }
        if !state.spare.is_empty() {
            return Ok(Gave::Some);
        }
        if state.giving_back > 0 {
            drop(self.given_back.wait(state).unwrap_or_else(PoisonError::into_inner));
            return Ok(Gave::Some);
        }
        Ok(Gave::Nothing(state))
    }

    /// Unmaps the memory of an expert that was evicted. What cannot be unmapped leaves still.
    fn make_spare(&self, mut state: MutexGuard<'_, State>, mut leaving: Leaving) -> Result<()> {
        let unit = leaving.unit;
        state.giving_back += 1;
        state.unmapping.push(unit);
        drop(state);
        let mut outcome = self.wait_for(&leaving.fences);
        let (mut spare, mut lost) = (Vec::new(), 0);
        if outcome.is_ok() {
            leaving.fences.clear();
            leaving.mapped.retain_mut(|mapped| {
                let len = mapped.len();
                match mapped.unmap() {
                    Ok(block) => spare.push(block),
                    Err(error) => {
                        lost += if mapped.is_empty() { len } else { 0 };
                        outcome = Err(error);
                    }
                }
                !mapped.is_empty()
            });
            leaving.is_whole = false;
        }
        let mut state = self.state();
        state.spare.extend(spare);
        state.unmapping.retain(|other| *other != unit);
        if !leaving.mapped.is_empty() {
            state.leaving.push(leaving);
        }
        drop(state);
        self.gave_back(lost);
        outcome.map_err(|error| hoistway::Error::from(error).into())
    }

    /// Waits for what fences lie behind.
    ///
    /// # Errors
    /// [`hoistway_device::Error::DeviceUnavailable`] or [`hoistway_device::Error::Device`] if it is not known whether that has ended.
    fn wait_for(&self, fences: &[Fence]) -> hoistway_device::Result<()> {
        if fences.iter().all(Fence::is_passed) {
            return Ok(());
        }
        let copies = CopyStream::new(&self.device);
        match copies
            .and_then(|copies| fences.iter().try_for_each(|fence| fence.order(&copies)).map(|()| copies))
        {
            Ok(copies) => match copies.synchronize() {
                // Work that has failed is over too.
                Fate::Done | Fate::Failed(_) => Ok(()),
                Fate::Unknown(error) => Err(error),
            },
            Err(_) => self.device.settle(),
        }
    }

    /// Gives memory back that no unit has, until no more is held than may be kept.
    fn trim(&self) {
        loop {
            let mut state = self.state();
            let has_free = !state.spare.is_empty() || !state.leaving.is_empty();
            if state.held_bytes <= state.keep_bytes || !has_free {
                state.is_trimming = false;
                return;
            }
            if let Err(error) = self.give_some_back(state).map(drop) {
                tracing::warn!(%error, "memory of experts that were evicted is not given back yet");
                self.state().is_trimming = false;
                return;
            }
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let State { experts, leaving, prepared, .. } = std::mem::take(state);
        let mut left: Vec<Mapped> = experts.into_values().flatten().collect();
        left.extend(leaving.into_iter().flat_map(|leaving| leaving.mapped));
        for prepared in prepared.into_values() {
            if let Ok(Prepared::Expert(mapped, _)) = prepared {
                left.extend(mapped);
            }
        }
        if left.is_empty() {
            return;
        }
        // One wait for all.
        if self.device.settle().is_ok() {
            left.retain_mut(|mapped| mapped.unmap().is_err() && !mapped.is_empty());
        }
        if !left.is_empty() {
            self.device.set_aside(left);
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("space", &self.space).finish_non_exhaustive()
    }
}

fn key(part: &Part) -> TensorKey {
    (part.file, part.tensor_bytes, part.tensor.clone())
}

/// What a dense tensor is allocated with.
fn dense_bytes(unit: &Unit) -> Result<u64> {
    Ok(padded_bytes(unit)?.max(1))
}

fn padded_to(granule: Alignment, len: u64) -> Result<u64> {
    granule.up(len).ok_or_else(|| Error::Internal(format!("{len} bytes do not fit 64 bits")))
}

/// The error of a slice that does not end at a granule.
fn off_granule(unit: &Unit, part: &Part, device: &Device, granule: Alignment, padded: u64) -> Error {
    let (unit, tensor, len) = (unit.label(), &part.tensor, part.bytes.len());
    let (device, granule) = (device.id(), granule.bytes());
    let reason = format!(
        "{unit} has {len} bytes of tensor '{tensor}', and memory of {device} is mapped by granules of {granule} bytes; use \
         device_slots, or pad slices: each of this tensor takes {padded} bytes then"
    );
    Error::invalid_option("backing", "device_sparse", reason)
}
