//! Backings: the memory of resident bytes. One trait, a file for each kind of memory.
//!
//! [`Backing`] is what callers choose, `UnitMemory` what each kind implements. A store asks for room for a unit, reads into
//! it, and gives it back once nothing uses the unit any more. `host_sparse` and `device_sparse` keep stacked tensors whole in
//! address space, `host_slots` and `device_slots` have slots of equal length, and `external` is memory of the caller's. To add a
//! kind, add a file and a variant.

mod dense_memory;
mod device_slots;
mod device_sparse;
mod external;
mod host_level;
mod host_slots;
mod host_sparse;
pub(crate) mod host_view;
mod uses;
mod waits;

pub use external::{External, ExternalPlace};
pub use host_level::HostLevelStats;
pub(crate) use host_level::{Fetched, HostLevel};
pub(crate) use waits::Waits;

use crate::{
    Error, Result,
    catalog::{ExpertCatalog, Part, Stored},
    store::StoreOptions,
};
use device_slots::DeviceSlots;
use device_sparse::DeviceSparse;
use hoistway::{Alignment, ByteRange, DeviceId};
use hoistway_device::Fence;
use host_slots::HostSlots;
use host_sparse::HostSparse;
use std::{fmt, sync::Arc};

/// The memory that experts and dense tensors are resident in.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Backing {
    /// Host memory in which each tensor has its whole length in address space, and only the slices of resident experts have
    /// pages. Expert `e` lies at `base + e * stride`, so kernels that take a stacked tensor need no change.
    HostSparse,
    /// Host memory in slots of equal length: an expert lies in any of them, and the lease says in which. Slots lie so that
    /// direct reads need no copy, and are touched once.
    #[default]
    HostSlots,
    /// Memory of a device in slots of equal length, in one allocation.
    DeviceSlots(DeviceId),
    /// Memory of a CUDA device in which each stacked tensor has its whole length in address space, and only the slices of resident
    /// experts have memory, which is mapped by granules of the device, of 2 MiB today. Expert `e` lies at `base + e * stride`, so
    /// kernels that take a stacked tensor need no change. Slices that are no whole granules are refused, unless
    /// [padded](StoreOptions::pad_slices).
    DeviceSparse(DeviceId),
    /// Memory of the caller's.
    External(External),
}

impl Backing {
    /// Its name in options and reports.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::HostSparse => "host_sparse",
            Self::HostSlots => "host_slots",
            Self::DeviceSlots(_) => "device_slots",
            Self::DeviceSparse(_) => "device_sparse",
            Self::External(_) => "external",
        }
    }

    /// Makes the memory. `batch_bytes` is the demand of one request, beside the budget, where slots are allocated at once.
    pub(crate) fn open(
        &self,
        catalog: &Arc<ExpertCatalog>,
        file_lens: &[u64],
        options: &StoreOptions,
        batch_bytes: u64,
    ) -> Result<Arc<dyn UnitMemory>> {
        let of_slots = [
            ("host_level_bytes", options.host_level_bytes),
            ("dense_bytes", options.dense_bytes),
            ("batch_bytes", options.batch_bytes),
        ];
        for (option, bytes) in of_slots {
            if let (Some(bytes), false) = (bytes, matches!(self, Self::DeviceSlots(_))) {
                let reason = format!("it is of slots on a device, and the backing is {}", self.name());
                return Err(Error::invalid_option(option, bytes, reason));
            }
        }
        if options.pad_slices && !matches!(self, Self::DeviceSparse(_)) {
            let reason = format!("it is of device_sparse, and the backing is {}", self.name());
            return Err(Error::invalid_option("pad_slices", true, reason));
        }
        Ok(match self {
            Self::HostSparse => Arc::new(HostSparse::new(catalog)?),
            Self::HostSlots => Arc::new(HostSlots::new(catalog, file_lens)?),
            Self::DeviceSlots(device) => Arc::new(DeviceSlots::new(catalog, *device, options, batch_bytes)?),
            Self::DeviceSparse(device) => {
                Arc::new(DeviceSparse::new(catalog, *device, options.pad_slices, options.budget_bytes)?)
            }
            Self::External(external) => Arc::new(external.open(catalog)),
        })
    }
}

/// One kind of memory. Units are named by their position in the catalog.
pub(crate) trait UnitMemory: fmt::Debug + Send + Sync {
    /// Bytes that a unit occupies while it has room.
    fn cost_bytes(&self, unit: usize) -> u64;

    /// Experts that can have room at a time.
    fn max_experts(&self) -> usize {
        usize::MAX
    }

    /// Bytes of dense tensors that can have room at a time.
    fn max_dense_bytes(&self) -> u64 {
        u64::MAX
    }

    /// The largest budget that it has memory for.
    fn max_budget_bytes(&self) -> u64 {
        u64::MAX
    }

    /// Takes room for a unit that has none. Bytes in it are arbitrary. Gives back memory that no unit has first, if it would
    /// hold more than `keep_bytes` otherwise. `None` if the unit has to be [prepared](Self::prepare) first. Called with the
    /// store locked: waits for no device.
    ///
    /// # Errors
    /// [`Error::Engine`] if there is no memory; [`Error::Internal`] if the unit has room, or too many have.
    fn reserve(&self, unit: usize, keep_bytes: u64) -> Result<Option<UnitRoom>>;

    /// Does for a unit what has to be done before it gets room, and may wait for a device. Called without the store's lock.
    fn prepare(&self, _unit: usize) {}

    /// Takes the room of a unit back, which nothing uses any more: no lease and no read. A device [in doubt](hoistway_device::Device::is_in_doubt)
    /// may still write to it. Keeps no more than `keep_bytes` of memory that no unit has. Returns `false` if the room is lost.
    /// Called with the store locked: waits for nothing.
    fn release(&self, unit: usize, room: &UnitRoom, keep_bytes: u64) -> bool;

    /// A lease of a unit has ended, whose bytes work of the device may still use that comes before `fence`; before anything
    /// that is queued later, if there is none. Called without the store's lock: it may ask the driver.
    fn used(&self, _unit: usize, _fence: Option<&Fence>) {}

    /// The second level of its memory, if it has one.
    fn level(&self) -> Option<&HostLevel> {
        None
    }

    /// Gives back memory that no unit has, until it holds no more than `keep_bytes`, if it can.
    fn trim(&self, _keep_bytes: u64) {}

    /// Bytes of memory that it holds, whether units have them or not.
    fn held_bytes(&self) -> u64;

    /// The address of the first byte of a part's tensor, if tensors are whole in address space.
    fn tensor_address(&self, _part: &Part) -> Option<u64> {
        None
    }

    /// Bytes from one slice of that tensor to the next.
    fn tensor_stride(&self, _part: &Part) -> Option<u64> {
        None
    }
}

/// The room of one unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnitRoom {
    /// The owner of the memory.
    pub(crate) memory: DeviceId,
    /// The number of the slot, if it is one.
    pub(crate) slot: Option<u32>,
    /// A place for each part of the unit.
    pub(crate) places: Arc<[PartPlace]>,
    /// The fences that reads to it come after. `None` means the work on the legacy default stream of the device.
    pub(crate) after: Option<Arc<[Fence]>>,
}

/// The place of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartPlace {
    /// Address of the part's first byte.
    pub(crate) address: u64,
    /// The file that is read: its position among those of the store.
    pub(crate) file: usize,
    /// The bytes of the file that are read: the part, and perhaps the rest of its first and last block.
    pub(crate) read: ByteRange,
    /// Address of the first byte that is read.
    pub(crate) target: u64,
}

impl PartPlace {
    /// A place that holds the bytes of a part and no others.
    fn exact(address: u64, Stored { file, bytes }: Stored) -> Self {
        Self { address, file, read: bytes, target: address }
    }

    /// The addresses that are read to.
    fn addresses(&self) -> ByteRange {
        ByteRange::at(self.target, self.read.len()).unwrap_or_default()
    }
}

/// The blocks that `bytes` lie in, as far as the file goes.
fn blocks_of(bytes: ByteRange, file_len: u64) -> Result<ByteRange> {
    let past_end = || Error::Internal(format!("bytes {bytes} end past 2^64"));
    let hull = bytes.aligned_hull(Alignment::BLOCK).ok_or_else(past_end)?;
    ByteRange::new(hull.start(), hull.end().min(file_len.max(bytes.end()))).ok_or_else(past_end)
}

/// `bytes`, rounded up to whole blocks.
fn whole_blocks(bytes: u64) -> Result<u64> {
    Alignment::BLOCK.up(bytes).ok_or_else(|| Error::Internal(format!("{bytes} bytes do not fit 64 bits")))
}

/// The sum, as long as it fits the address space.
fn add(sum: u64, bytes: u64) -> Result<u64> {
    let total = sum.checked_add(bytes).filter(|total| *total <= isize::MAX as u64);
    total.ok_or_else(|| Error::Internal("the model does not fit the address space".into()))
}
