//! What a load delivers.
#![forbid(unsafe_code)]

use crate::{
    DeviceId, Dtype, Report, Result,
    catalog::{TensorEntry, TensorId},
    memory::{Block, DeviceBlock},
    plan::PlannedTensor,
};
use std::{borrow::Cow, collections::HashMap, sync::Arc};

/// One tensor in memory. Clones share the bytes; the last one frees them.
#[derive(Clone, Debug)]
pub struct Tensor {
    id: TensorId,
    name: Arc<str>,
    dtype: Dtype,
    shape: Arc<[u64]>,
    target: DeviceId,
    memory: TensorMemory,
}

/// The memory that holds a tensor.
#[derive(Clone, Debug)]
pub enum TensorMemory {
    /// Host memory.
    Host(Arc<Block>),
    /// Memory of a device.
    Device(Arc<DeviceBlock>),
}

impl Tensor {
    pub(super) fn new(
        entry: &TensorEntry,
        planned: &PlannedTensor,
        target: DeviceId,
        memory: TensorMemory,
    ) -> Self {
        Self {
            id: planned.tensor,
            name: entry.name.clone(),
            dtype: planned.dtype,
            shape: planned.shape.as_ref().into(),
            target,
            memory,
        }
    }

    /// Its name in the checkpoint.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its place in the order of the checkpoint: tensors that arrived in another order can be sorted by it.
    pub fn id(&self) -> TensorId {
        self.id
    }

    /// Type of each element.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Elements along each dimension, slowest first; empty for a scalar.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Where it is. A device that has no memory of its own uses tensors in host memory as they are.
    pub fn device(&self) -> DeviceId {
        self.target
    }

    /// Size in bytes.
    pub fn len_bytes(&self) -> u64 {
        match &self.memory {
            TensorMemory::Host(block) => block.len() as u64,
            TensorMemory::Device(block) => block.len(),
        }
    }

    /// Its bytes: elements in row-major order, little-endian, packed if narrower than a byte. A copy if they are in the
    /// memory of a device.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if the device fails, [`Error::Allocation`](crate::Error::Allocation) if there is no memory
    /// for the copy; never if they are in host memory.
    pub fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        match &self.memory {
            TensorMemory::Host(block) => Ok(Cow::Borrowed(block)),
            TensorMemory::Device(block) => block.read_back().map(Cow::Owned),
        }
    }

    /// Address of the first byte, in host memory or in that of its device.
    pub fn address(&self) -> u64 {
        match &self.memory {
            TensorMemory::Host(block) => block.as_ptr().expose_provenance() as u64,
            TensorMemory::Device(block) => block.address(),
        }
    }

    /// The memory that holds it, for those who hand it on.
    pub fn memory(&self) -> &TensorMemory {
        &self.memory
    }
}

/// Every tensor of a load, and how it went.
#[derive(Clone, Debug)]
pub struct Loaded {
    tensors: Vec<Tensor>,
    by_name: HashMap<Arc<str>, usize>,
    report: Report,
}

impl Loaded {
    /// `tensors` in any order.
    pub(super) fn new(mut tensors: Vec<Tensor>, report: Report) -> Self {
        tensors.sort_by_key(|tensor| tensor.id);
        let by_name = tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        Self { tensors, by_name, report }
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// The tensors in the order of the checkpoint.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The tensors themselves.
    pub fn into_tensors(self) -> Vec<Tensor> {
        self.tensors
    }

    /// What the load did.
    pub fn report(&self) -> &Report {
        &self.report
    }

    pub(super) fn report_mut(&mut self) -> &mut Report {
        &mut self.report
    }
}
