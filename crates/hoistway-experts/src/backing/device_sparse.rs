//! Memory of a device in which every stacked tensor has its whole length in address space, and slices of resident experts have
//! memory. Dense tensors have allocations of their own.
//!
//! A device maps memory by granules. A slice begins at a granule and ends at one, or is padded to that. To take memory away from
//! addresses waits for no work of the device, so this does, on threads of its own: a unit that was evicted keeps its memory
//! until that is needed, and until what may still use it has ended. Driver calls are made without a lock.
#![forbid(unsafe_code)]

use super::{
    PartPlace, UnitMemory, UnitRoom, add,
    device_slots::{aligned, padded_bytes},
    uses::{Uses, passed},
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

/// Where a tensor lies in the space, how long its slices are, and how far apart.
#[derive(Clone, Copy, Debug)]
struct Stack {
    start: u64,
    len: u64,
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
    /// Memory of dense tensors that no unit has.
    unwanted: Vec<DeviceMemory>,
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
    next_leaving: u64,
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
    number: u64,
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
            match tensors.entry(key(part)) {
                Entry::Vacant(vacant) => {
                    vacant.insert(Stack { start: end, len, stride });
                    let slices = part.tensor_bytes.len().div_ceil(len);
                    let whole = slices
                        .checked_mul(stride)
                        .ok_or_else(|| Error::Internal("a tensor does not fit 64 bits".into()))?;
                    end = add(end, whole)?;
                }
                Entry::Occupied(occupied) if occupied.get().len != len => {
                    let (unit, tensor, other) = (unit.label(), &part.tensor, occupied.get().len);
                    let reason = format!(
                        "{unit} has {len} bytes of tensor '{tensor}', and another expert {other}: slices of a tensor have one length"
                    );
                    return Err(Error::invalid_option("backing", "device_sparse", reason));
                }
                Entry::Occupied(_) => {}
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
        if state.held_bytes <= state.keep_bytes || !state.has_free() || state.is_trimming {
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
        state.unwanted.push(dense);
        let memory = self.memory.clone();
        // Where there is no thread, the next unit that is prepared frees it.
        _ = self.threads.start(move || memory.free_unwanted());
    }
}

impl UnitMemory for DeviceSparse {
    fn cost_bytes(&self, unit: usize) -> u64 {
        self.memory.cost_bytes(unit).unwrap_or(u64::MAX)
    }

    fn reserve(&self, unit: usize, keep_bytes: u64) -> Result<Option<UnitRoom>> {
        let mut state = self.memory.state();
        state.keep_bytes = keep_bytes;
        let prepared = match state.prepared.remove(&unit) {
            Some(prepared) => prepared?,
            None => match state.take_back(unit) {
                Some(prepared) => prepared,
                // To map memory calls the driver, and may wait for the device.
                None => return Ok(None),
            },
        };
        let room = match &prepared {
            Prepared::Dense(dense) => self.memory.dense_room(unit, dense.address()),
            Prepared::Expert(_, after) => self.memory.expert_room(unit, after.clone()),
        };
        match room {
            Ok(room) => {
                state.keep(unit, prepared);
                Ok(Some(room))
            }
            Err(error) => {
                state.leave(unit, prepared);
                Err(error)
            }
        }
    }

    fn prepare(&self, unit: usize) {
        self.memory.free_unwanted();
        let prepared = self.memory.prepare(unit);
        let mut state = self.memory.state();
        if let Some(Ok(before)) = state.prepared.insert(unit, prepared) {
            state.leave(unit, before);
        }
    }

    fn used(&self, unit: usize, fence: Option<&Fence>) {
        let full = self.memory.state().uses.full(unit);
        let passed = passed(full);
        self.memory.state().uses.note(unit, fence, &passed);
    }

    fn release(&self, unit: usize, room: &UnitRoom, keep_bytes: u64) -> bool {
        let mut state = self.memory.state();
        state.keep_bytes = keep_bytes;
        let fences = state.uses.take_fences(unit, room, &self.memory.device);
        if let Some(mapped) = state.experts.remove(&unit) {
            state.push_leaving(unit, true, mapped, fences);
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

impl State {
    /// Whether there is memory that no unit has.
    fn has_free(&self) -> bool {
        !self.spare.is_empty() || !self.unwanted.is_empty() || !self.leaving.is_empty()
    }

    /// The memory of an expert that was evicted, which still lies at its addresses. Reads come to it after what has used it.
    fn take_back(&mut self, unit: usize) -> Option<Prepared> {
        let place = self.leaving.iter().position(|leaving| leaving.unit == unit && leaving.is_whole)?;
        let Leaving { mapped, fences, .. } = self.leaving.remove(place);
        Some(Prepared::Expert(mapped, fences))
    }

    /// A unit has memory from now on.
    fn keep(&mut self, unit: usize, prepared: Prepared) {
        match prepared {
            Prepared::Dense(dense) => self.unwanted.extend(self.dense.insert(unit, dense)),
            Prepared::Expert(mapped, _) => {
                if let Some(before) = self.experts.insert(unit, mapped) {
                    self.push_leaving(unit, false, before, Vec::new());
                }
            }
        }
    }

    /// No unit has this memory. To drop it would wait for the device, so that is left to who prepares the next unit.
    fn leave(&mut self, unit: usize, prepared: Prepared) {
        match prepared {
            Prepared::Dense(dense) => self.unwanted.push(dense),
            Prepared::Expert(mapped, fences) => self.push_leaving(unit, true, mapped, fences),
        }
    }

    fn push_leaving(&mut self, unit: usize, is_whole: bool, mapped: Vec<Mapped>, fences: Vec<Fence>) {
        let number = self.next_leaving;
        self.next_leaving += 1;
        self.leaving.push(Leaving { number, unit, is_whole, mapped, fences });
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

    fn room(&self, places: Vec<PartPlace>, after: Vec<Fence>) -> UnitRoom {
        let memory = self.device.id();
        UnitRoom { memory, slot: None, places: places.into(), after: Some(after.into()) }
    }

    fn dense_room(&self, unit: usize, base: u64) -> Result<UnitRoom> {
        let (mut next, mut places) = (base, Vec::new());
        for stored in self.catalog.stored(unit)? {
            places.push(PartPlace::exact(next, stored));
            next = add(next, aligned(stored.bytes.len())?)?;
        }
        Ok(self.room(places, Vec::new()))
    }

    fn expert_room(&self, unit: usize, after: Vec<Fence>) -> Result<UnitRoom> {
        let base = self.space.as_ref().map_or(0, |space| space.address());
        let mut places = Vec::new();
        for (part, stored) in self.unit(unit)?.parts().iter().zip(self.catalog.stored(unit)?) {
            let offset = if part.bytes.is_empty() { 0 } else { self.offset(part)? };
            places.push(PartPlace::exact(base + offset, stored));
        }
        Ok(self.room(places, after))
    }

    /// Where a part that has bytes lies in the space.
    fn offset(&self, part: &Part) -> Result<u64> {
        let stack = self.tensors.get(&key(part));
        let Stack { start, stride, .. } =
            stack.ok_or_else(|| Error::Internal("a part has no place".into()))?;
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
            if let Some(prepared) = state.take_back(unit) {
                return Ok(prepared);
            }
            if let Some(place) = state.leaving.iter().position(|leaving| leaving.unit == unit) {
                let leaving = state.leaving.remove(place);
                self.make_spare(state, leaving)?;
            } else if state.unmapping.contains(&unit) {
                drop(self.given_back.wait(state).unwrap_or_else(PoisonError::into_inner));
            } else {
                break;
            }
        }
        let mut mapped = Vec::new();
        for part in self.unit(unit)?.parts().iter().filter(|part| !part.bytes.is_empty()) {
            if let Err(error) = self.map(part, &mut mapped) {
                // Nothing has used it. It is unmapped as its memory or its addresses are needed.
                self.state().push_leaving(unit, false, mapped, Vec::new());
                return Err(error);
            }
        }
        Ok(Prepared::Expert(mapped, Vec::new()))
    }

    /// Maps memory for a part. What is in `mapped` is mapped, and counted, also if this fails.
    fn map(&self, part: &Part, mapped: &mut Vec<Mapped>) -> Result<()> {
        let space = self.space.as_ref().ok_or_else(|| Error::Internal("there is no address space".into()))?;
        let (len, offset) = (padded_to(self.granule, part.bytes.len())?, self.offset(part)?);
        let mut block = match self.claim(len, true)? {
            Some(block) => Some(block),
            None => Some(self.made(len, || DeviceBlock::new(&self.device, len))?),
        };
        let part = self.with_memory(|| space.map(offset, &mut block));
        // It was not taken if that failed.
        self.state().spare.extend(block);
        let part = part?;
        let allowed = self.with_memory(|| part.allow());
        mapped.push(part);
        allowed
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

    /// Makes calls that need memory of the device, until it has some: all that no unit has is given back first.
    fn with_memory<T>(&self, mut make: impl FnMut() -> hoistway_device::Result<T>) -> Result<T> {
        loop {
            match make() {
                Err(error @ hoistway_device::Error::OutOfMemory { .. }) => {
                    if let Gave::Nothing(state) = self.give_some_back(self.state())? {
                        drop(state);
                        return Err(hoistway::Error::from(error).into());
                    }
                }
                other => return other.map_err(|error| hoistway::Error::from(error).into()),
            }
        }
    }

    /// Allocates memory that was claimed.
    fn made<T>(&self, len: u64, make: impl Fn() -> hoistway_device::Result<T>) -> Result<T> {
        let made = self.with_memory(make);
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

    /// Frees memory of dense tensors that no unit has.
    fn free_unwanted(&self) {
        let mut state = self.state();
        while let Some(dense) = state.unwanted.pop() {
            state.giving_back += 1;
            drop(state);
            let len = dense.len();
            drop(dense);
            self.gave_back(len);
            state = self.state();
        }
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
        if !state.unwanted.is_empty() {
            drop(state);
            self.free_unwanted();
            return Ok(Gave::Some);
        }
        let started = Instant::now();
        while !state.leaving.is_empty() {
            let fences: Vec<(u64, Vec<Fence>)> =
                state.leaving.iter().map(|leaving| (leaving.number, leaving.fences.clone())).collect();
            // To ask for the state of a fence calls the driver, which may take as long as other calls of it do.
            drop(state);
            let first = |is_meant: fn(&Fence) -> bool| {
                fences.iter().find(|(_, fences)| fences.iter().all(is_meant)).map(|(number, _)| *number)
            };
            // To wait for all work of the device takes no less than to wait for a stream.
            let unused = first(Fence::is_passed);
            let on_streams = if unused.is_none() { first(Fence::is_queued) } else { None };
            if unused.is_none() && on_streams.is_some() && started.elapsed() < PATIENCE {
                // Until some stream, whichever it is, has used what it was to use.
                thread::sleep(PAUSE);
                state = self.state();
                continue;
            }
            let oldest = fences.first().map(|(number, _)| *number);
            drop(fences);
            state = self.state();
            let chosen = unused.or(on_streams).or(oldest);
            // Another thread may have taken it meanwhile.
            if let Some(place) = state.leaving.iter().position(|leaving| Some(leaving.number) == chosen) {
                let leaving = state.leaving.remove(place);
                return self.make_spare(state, leaving).map(|()| Gave::Some);
            }
        }
        if !state.spare.is_empty() || !state.unwanted.is_empty() {
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
        let mut spare = Vec::new();
        if outcome.is_ok() {
            leaving.fences.clear();
            leaving.mapped.retain_mut(|mapped| {
                match mapped.unmap() {
                    Ok(block) => spare.push(block),
                    Err(error) => outcome = Err(error),
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
        self.gave_back(0);
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
            if state.held_bytes <= state.keep_bytes || !state.has_free() {
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
         device_slots, or from Rust (pad_slices) and Python (pad) pad slices: each of this tensor takes {padded} bytes then"
    );
    Error::invalid_option("backing", "device_sparse", reason)
}
