//! What a load delivers.
#![forbid(unsafe_code)]

use crate::{
    Dtype, Report,
    catalog::{TensorEntry, TensorId},
    memory::Block,
};
use std::{collections::HashMap, sync::Arc};

/// One tensor in memory. Clones share the bytes; the last one frees them.
#[derive(Clone, Debug)]
pub struct Tensor {
    id: TensorId,
    name: Arc<str>,
    dtype: Dtype,
    shape: Arc<[u64]>,
    block: Arc<Block>,
}

impl Tensor {
    pub(super) fn new(id: TensorId, entry: &TensorEntry, shape: &[u64], block: Block) -> Self {
        Self { id, name: entry.name.clone(), dtype: entry.dtype, shape: shape.into(), block: Arc::new(block) }
    }

    /// Its name in the checkpoint.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Type of each element.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Elements along each dimension, slowest first; empty for a scalar.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Its bytes: elements in row-major order, little-endian, packed if narrower than a byte.
    pub fn bytes(&self) -> &[u8] {
        &self.block
    }

    /// The memory that holds it, for those who hand it on.
    pub fn block(&self) -> &Arc<Block> {
        &self.block
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
