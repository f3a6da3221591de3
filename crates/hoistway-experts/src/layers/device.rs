//! Memory of a device for layers: what one layer had, the next of its length gets, after the work that has used it.
#![forbid(unsafe_code)]

use crate::{Error, Result};
use hoistway::{Alignment, DeviceId};
use hoistway_device::{Device, DeviceMemory, Fence};
use hoistway_io::parallel::lock;
use std::{
    collections::VecDeque,
    mem,
    sync::{Arc, Mutex},
};

/// The alignment of tensors, for kernels and copies.
const ALIGNMENT: Alignment = match Alignment::new(256) {
    Some(alignment) => alignment,
    None => Alignment::BLOCK,
};

/// The memory of a stream's layers on a device: never more than the stream's budget, together with what is free.
#[derive(Debug)]
pub(super) struct Buffers {
    device: Arc<Device>,
    budget: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Memory that no layer has, and what the next copies to it come after. The oldest first.
    free: VecDeque<(DeviceMemory, Vec<Fence>)>,
    /// Bytes of all memory.
    bytes: u64,
    peak_bytes: u64,
    allocations: u64,
    /// Its stream is gone: what is given back is freed.
    is_closed: bool,
}

/// The memory of one layer. Dropped once no copy to it is under way, or its fate is unknown to the device.
#[derive(Debug)]
pub(super) struct Buffer {
    /// Until it is dropped.
    memory: Option<DeviceMemory>,
    buffers: Arc<Buffers>,
    /// What copies to it come after, and once it is filled, what the next ones do.
    after: Mutex<After>,
}

#[derive(Debug)]
enum After {
    Work(Vec<Fence>),
    /// What has used it was not said.
    Any,
}

/// Bytes of a layer's tensors on a device, where each begins at an aligned address.
pub(super) fn aligned(bytes: u64) -> Result<u64> {
    ALIGNMENT.up(bytes).ok_or_else(|| Error::Internal(format!("{bytes} bytes do not fit 64 bits")))
}

impl Buffers {
    pub(super) fn new(device: DeviceId, budget: u64) -> Result<Arc<Self>> {
        let device = Device::open(device).map_err(hoistway::Error::from)?;
        Ok(Arc::new(Self { device, budget, state: Mutex::default() }))
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn peak_bytes(&self) -> u64 {
        lock(&self.state).peak_bytes
    }

    pub(super) fn allocations(&self) -> u64 {
        lock(&self.state).allocations
    }

    /// Memory for a layer of `bytes` bytes, for which the budget has room.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Result<Buffer> {
        let len = bytes.max(1);
        let gone = {
            let mut state = lock(&self.state);
            if let Some(position) = state.free.iter().position(|(memory, _)| memory.len() == len) {
                let taken = state.free.remove(position);
                return taken
                    .map(|(memory, after)| self.buffer(memory, after))
                    .ok_or_else(|| Error::Internal("free memory is gone".into()));
            }
            let mut gone = Vec::new();
            while state.bytes.saturating_add(len) > self.budget
                && let Some((memory, _)) = state.free.pop_front()
            {
                state.bytes -= memory.len();
                gone.push(memory);
            }
            state.bytes += len;
            state.peak_bytes = state.peak_bytes.max(state.bytes);
            gone
        };
        // Without the lock: to free memory waits for all work of the device.
        drop(gone);
        let allocated = match DeviceMemory::new(&self.device, len) {
            Err(hoistway_device::Error::OutOfMemory { .. }) if self.free_all() => {
                DeviceMemory::new(&self.device, len)
            }
            other => other,
        };
        match allocated {
            Ok(memory) => {
                lock(&self.state).allocations += 1;
                Ok(self.buffer(memory, Vec::new()))
            }
            Err(error) => {
                lock(&self.state).bytes -= len;
                Err(hoistway::Error::from(error).into())
            }
        }
    }

    /// Frees what no layer has, and from now on what is given back.
    pub(super) fn close(&self) {
        lock(&self.state).is_closed = true;
        self.free_all();
    }

    /// Frees what no layer has. Returns whether there was any.
    fn free_all(&self) -> bool {
        let mut state = lock(&self.state);
        let free = mem::take(&mut state.free);
        state.bytes -= free.iter().map(|(memory, _)| memory.len()).sum::<u64>();
        drop(state);
        !free.is_empty()
    }

    fn buffer(self: &Arc<Self>, memory: DeviceMemory, after: Vec<Fence>) -> Buffer {
        Buffer { memory: Some(memory), buffers: self.clone(), after: Mutex::new(After::Work(after)) }
    }
}

impl Buffer {
    pub(super) fn device(&self) -> DeviceId {
        self.buffers.device.id()
    }

    pub(super) fn opened(&self) -> &Arc<Device> {
        &self.buffers.device
    }

    pub(super) fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, DeviceMemory::address)
    }

    /// What copies to it come after.
    pub(super) fn fences(&self) -> Vec<Fence> {
        match &*lock(&self.after) {
            After::Work(fences) => fences.clone(),
            After::Any => vec![Fence::of_device(self.device())],
        }
    }

    /// Copies have filled it: what came before them has ended.
    pub(super) fn filled(&self) {
        *lock(&self.after) = After::Work(Vec::new());
    }

    /// Notes work that uses it; `None` stands for any.
    pub(super) fn used(&self, fence: Option<Fence>) {
        let mut after = lock(&self.after);
        match (&mut *after, fence) {
            (After::Work(fences), Some(fence)) => {
                // A layer that stays is used in each pass.
                fences.retain(|earlier| !earlier.is_passed());
                fences.push(fence);
            }
            (After::Any, _) => {}
            (_, None) => *after = After::Any,
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let is_in_doubt = self.buffers.device.is_in_doubt();
        let mut fences = self.fences();
        if is_in_doubt {
            // A copy of unknown fate may still write to it.
            fences = vec![Fence::of_device(self.device())];
        }
        let Some(memory) = self.memory.take() else { return };
        let mut state = lock(&self.buffers.state);
        if state.is_closed {
            state.bytes -= memory.len();
            // To free it waits for all work of the device.
            drop(state);
            return drop(memory);
        }
        state.free.push_back((memory, fences));
    }
}
