//! Brings the bytes of a part of a file together, from host memory and from devices.
#![forbid(unsafe_code)]

use super::{
    content::{TensorBytes, TensorData},
    plan::{Piece, PlannedFile},
};
use crate::{ByteRange, DeviceId, Error, Result, device::CopyStream};
use std::collections::BTreeMap;

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

    /// Fills `into` with the bytes of `range` of a file.
    pub(super) fn gather(
        &self,
        plan: &PlannedFile,
        tensors: &[TensorData<'_>],
        range: ByteRange,
        into: &mut [u8],
    ) -> Result<()> {
        let mut rest = into;
        for piece in plan.pieces(range) {
            let len = match piece {
                Piece::Header(header) => header.len(),
                Piece::Tensor(_, part) => part.len() as usize,
            };
            let Some((place, after)) = rest.split_at_mut_checked(len) else { return Err(misfit()) };
            rest = after;
            match piece {
                Piece::Header(header) => place.copy_from_slice(header),
                Piece::Tensor(tensor, part) => match &tensors[tensor].bytes {
                    TensorBytes::Host(bytes) => place.copy_from_slice(host_part(bytes, part)?),
                    TensorBytes::Device(bytes) => {
                        let queue = self.queues.get(&bytes.device.id()).ok_or_else(misfit)?;
                        queue.read_back(bytes.address + part.start(), place)?;
                    }
                },
            }
        }
        if rest.is_empty() { Ok(()) } else { Err(misfit()) }
    }
}

/// A part of a tensor's bytes.
pub(super) fn host_part(bytes: &[u8], part: ByteRange) -> Result<&[u8]> {
    bytes.get(part.start() as usize..part.end() as usize).ok_or_else(misfit)
}

/// A broken promise of the planner's.
pub(super) fn misfit() -> Error {
    Error::Internal("a save's plan does not fit its tensors".into())
}
