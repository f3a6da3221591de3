//! Brings the bytes of a part of a file together, from host memory and from devices.
#![forbid(unsafe_code)]

use super::{
    content::{TensorBytes, TensorData},
    plan::{Piece, PlannedFile},
};
use crate::{
    ByteRange, DeviceId, Error, Result,
    device::{CopyStream, Device},
    memory::{DevicePart, Slot},
};
use hoistway_io::Placement;
use std::{collections::BTreeMap, mem, sync::Arc};

/// Queues of copies from the devices that tensors are on.
#[derive(Debug)]
pub(super) struct Devices {
    queues: BTreeMap<DeviceId, CopyStream>,
}

impl Devices {
    /// Those of these tensors. Waits for what is still computing them.
    pub(super) fn of(tensors: &[TensorData<'_>]) -> Result<Self> {
        let mut queues = BTreeMap::new();
        for tensor in tensors {
            let TensorBytes::Device(bytes) = &tensor.bytes else { continue };
            let device = bytes.device.id();
            if tensor.bytes.is_empty() || queues.contains_key(&device) {
                continue;
            }
            // Else the file could have values from before that work.
            bytes.device.settle()?;
            queues.insert(device, CopyStream::new(&bytes.device)?);
        }
        Ok(Self { queues })
    }

    /// Whether bytes come from a device.
    #[cfg(feature = "objects")]
    pub(super) fn is_used(&self) -> bool {
        !self.queues.is_empty()
    }

    /// A device that staging memory may be pinned for, so that each of these copies to it; `None` if they are of several kinds.
    pub(super) fn pinning(&self) -> Option<&Arc<Device>> {
        let mut devices = self.queues.values().map(CopyStream::device);
        let first = devices.next()?;
        let kind = |device: &Arc<Device>| mem::discriminant(&device.id());
        devices.all(|device| kind(device) == kind(first)).then_some(first)
    }

    /// Where threads run that save these tensors: near the devices if most bytes come from these, and else where the system has them
    /// run.
    pub(super) fn placement(&self, tensors: &[TensorData<'_>]) -> Placement {
        let bytes = |tensor: &TensorData<'_>| u128::from(tensor.bytes.len());
        let of_devices = |tensor: &&TensorData<'_>| matches!(tensor.bytes, TensorBytes::Device(_));
        let all: u128 = tensors.iter().map(bytes).sum();
        let copied: u128 = tensors.iter().filter(of_devices).map(bytes).sum();
        let nearest = self.nearest().filter(|_| 2 * copied > all);
        nearest.map_or_else(Placement::default, |near| Placement::near_device(near))
    }

    /// A device of the one NUMA node that all of them hang off; `None` if they are of several.
    fn nearest(&self) -> Option<&Arc<Device>> {
        let mut devices = self.queues.values().map(CopyStream::device);
        let first = devices.next()?;
        devices.all(|device| device.info().numa_node == first.info().numa_node).then_some(first)
    }

    /// Fills `into` with the bytes of `range` of a file.
    pub(super) fn gather(
        &self,
        plan: &PlannedFile,
        tensors: &[TensorData<'_>],
        range: ByteRange,
        into: &mut [u8],
    ) -> Result<()> {
        let mut parts: BTreeMap<DeviceId, Vec<(u64, &mut [u8])>> = BTreeMap::new();
        let mut rest = into;
        for piece in plan.pieces(range) {
            let (place, after) = rest.split_at_mut_checked(piece.len()).ok_or_else(misfit)?;
            rest = after;
            match source(tensors, &piece)? {
                Source::Host(bytes) => place.copy_from_slice(bytes),
                Source::Device(device, address) => parts.entry(device).or_default().push((address, place)),
            }
        }
        if !rest.is_empty() {
            return Err(misfit());
        }
        for (device, parts) in parts {
            self.queue(device)?.read_back_all(parts)?;
        }
        Ok(())
    }

    /// Fills the beginning of a slot with the bytes of `range` of a file.
    pub(super) fn gather_in_slot(
        &self,
        plan: &PlannedFile,
        tensors: &[TensorData<'_>],
        range: ByteRange,
        mut slot: Slot,
    ) -> Result<Slot> {
        let mut parts: BTreeMap<DeviceId, Vec<DevicePart>> = BTreeMap::new();
        let bytes = slot.as_mut_slice();
        let mut offset = 0;
        for piece in plan.pieces(range) {
            let len = piece.len();
            match source(tensors, &piece)? {
                Source::Host(host) => {
                    bytes.get_mut(offset..offset + len).ok_or_else(misfit)?.copy_from_slice(host);
                }
                Source::Device(device, address) => {
                    parts.entry(device).or_default().push(DevicePart { offset, address, len });
                }
            }
            offset += len;
        }
        // The slot has old bytes, which are not to be written.
        if offset as u64 != range.len() {
            return Err(misfit());
        }
        for (device, parts) in parts {
            slot = slot.read_from(self.queue(device)?, &parts)?;
        }
        Ok(slot)
    }

    fn queue(&self, device: DeviceId) -> Result<&CopyStream> {
        self.queues.get(&device).ok_or_else(misfit)
    }
}

/// Where bytes of a file come from.
enum Source<'a> {
    Host(&'a [u8]),
    /// The memory of a device, from this address on.
    Device(DeviceId, u64),
}

fn source<'a>(tensors: &'a [TensorData<'_>], piece: &Piece<'a>) -> Result<Source<'a>> {
    Ok(match piece {
        Piece::Header(header) => Source::Host(header),
        Piece::Tensor(tensor, part) => match &tensors[*tensor].bytes {
            TensorBytes::Host(bytes) => Source::Host(host_part(bytes, *part)?),
            TensorBytes::Device(bytes) => Source::Device(bytes.device.id(), bytes.address + part.start()),
        },
    })
}

/// A part of a tensor's bytes.
pub(super) fn host_part(bytes: &[u8], part: ByteRange) -> Result<&[u8]> {
    bytes.get(part.start() as usize..part.end() as usize).ok_or_else(misfit)
}

/// A broken promise of the planner's.
pub(super) fn misfit() -> Error {
    Error::Internal("a save's plan does not fit its tensors".into())
}
