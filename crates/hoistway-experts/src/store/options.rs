//! Options of a store.
#![forbid(unsafe_code)]

use crate::backing::Backing;
use hoistway::read::ReaderOptions;
use std::time::Duration;

/// Options of a store.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Bytes that resident experts and tensors may take, and what is being read. A request may exceed it by its own demand,
    /// one at a time; what exceeds it is evicted once the lease is dropped.
    pub budget_bytes: u64,
    /// The memory that they lie in.
    pub backing: Backing,
    /// Bytes beside the budget that are allocated at the start where the backing allocates all slots at once, for the demand
    /// of one request. By default that of one token in one layer, or of 8 experts if that is not known. Other backings refuse it.
    pub batch_bytes: Option<u64>,
    /// Bytes of the budget that are set apart for dense tensors where the backing allocates all slots at once, which take the
    /// rest. By default those of all dense tensors, but no more than an eighth of the budget. Other backings refuse it.
    pub dense_bytes: Option<u64>,
    /// With [`Backing::DeviceSlots`]: bytes of pinned host memory beside the budget, which evicted experts stay in. One that is
    /// requested again is copied from there, rather than read. Allocated and pinned at the start. By default none.
    pub host_level_bytes: Option<u64>,
    /// With [`Backing::DeviceSparse`]: whether slices of experts are padded to whole granules of the device. Each takes the padded
    /// length of the budget, and kernels have to be given that as the stride. By default not: such slices are refused.
    pub pad_slices: bool,
    /// How long requests wait for room and for reads.
    pub timeout: Duration,
    /// Changes of residency that are kept until [`Store::take_events`](super::Store::take_events) asks for them; 0 keeps
    /// none.
    pub events: usize,
    /// How bytes are read.
    pub reader: ReaderOptions,
}

hoistway_io::setters! {
    StoreOptions {
        budget_bytes: u64,
        backing: Backing,
        batch_bytes: Option<u64>,
        dense_bytes: Option<u64>,
        host_level_bytes: Option<u64>,
        pad_slices: bool,
        timeout: Duration,
        events: usize,
        reader: ReaderOptions,
    }
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            budget_bytes: 4 << 30,
            backing: Backing::default(),
            batch_bytes: None,
            dense_bytes: None,
            host_level_bytes: None,
            pad_slices: false,
            timeout: Duration::from_secs(60),
            events: 0,
            // Slots are not advised: what is committed is what is used.
            reader: ReaderOptions::default().huge_pages(false),
        }
    }
}
