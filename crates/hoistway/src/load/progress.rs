//! What the caller is told of a load in progress.
#![forbid(unsafe_code)]

use super::Tensor;

/// How far a load has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Bytes of tensors that have arrived.
    pub bytes_done: u64,
    /// Bytes of tensors in all.
    pub bytes_total: u64,
    /// Tensors that are complete.
    pub tensors_done: usize,
    /// Tensors in all.
    pub tensors_total: usize,
}

/// What [`Loading::next_within`](super::Loading::next_within) found.
#[derive(Debug)]
pub enum Arrival {
    /// A tensor is complete.
    Tensor(Tensor),
    /// None became complete in time.
    Pending,
    /// All tensors were handed out.
    Finished,
}
