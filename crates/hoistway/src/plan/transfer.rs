//! How the bytes of a staged extent get from its slot to a device: as few copies as their places allow.
#![forbid(unsafe_code)]

use super::{Extent, Plan, Runs};
use crate::ByteRange;
use hoistway_device::Transfer;

/// The transfers that deliver a staged extent of a plan for a device.
pub(super) fn transfers(plan: &Plan, extent: &Extent) -> Vec<Transfer> {
    joined(plan.tensors[extent.tensors.clone()].iter().flat_map(|tensor| {
        tensor.runs.within(extent.wanted).map(move |(part, before)| {
            let (source, arena) = (part.start() - extent.read.start(), tensor.arena);
            match tensor.cast {
                None => Transfer::Linear {
                    source,
                    arena,
                    destination: tensor.place.start() + before,
                    len: part.len(),
                },
                Some(cast) => Transfer::Converted {
                    conversion: cast.conversion(),
                    source,
                    arena,
                    destination: tensor.place.start() + cast.resize(before).unwrap_or(u64::MAX),
                    elements: part.len() / (cast.from().block_bits() / 8),
                },
            }
        })
    }))
}

/// The transfers of the runs that lie in `window`, one after the other to an arena of their own, from a slot whose bytes
/// begin at `start` of the file.
pub(crate) fn packed(runs: &Runs, window: ByteRange, start: u64) -> Vec<Transfer> {
    joined(runs.within(window).map(|(part, before)| Transfer::Linear {
        source: part.start() - start,
        arena: 0,
        destination: before,
        len: part.len(),
    }))
}

fn joined(transfers: impl Iterator<Item = Transfer>) -> Vec<Transfer> {
    let mut done = Vec::new();
    let mut last: Option<Transfer> = None;
    for next in transfers {
        match last.map(|last| join(last, next)) {
            Some(Some(joined)) => last = Some(joined),
            _ => done.extend(last.replace(next)),
        }
    }
    done.extend(last);
    done
}

/// Two neighbours as one transfer, if the places allow that.
fn join(last: Transfer, next: Transfer) -> Option<Transfer> {
    match (last, next) {
        (
            Transfer::Linear { source, arena, destination, len },
            Transfer::Linear {
                source: next_source,
                arena: next_arena,
                destination: next_destination,
                len: next_len,
            },
        ) => {
            if arena != next_arena {
                return None;
            }
            let (pitch, step) = (next_source - source, next_destination.checked_sub(destination)?);
            // The same distance on both sides: what lies between belongs to no tensor.
            if pitch == step {
                return Some(Transfer::Linear { source, arena, destination, len: pitch + next_len });
            }
            let is_row = len == next_len && step == len;
            is_row.then_some(Transfer::Pitched { source, pitch, arena, destination, width: len, height: 2 })
        }
        (
            Transfer::Pitched { source, pitch, arena, destination, width, height },
            Transfer::Linear { source: next_source, arena: next_arena, destination: next_destination, len },
        ) => {
            let continues = arena == next_arena
                && len == width
                && next_source == source + height * pitch
                && next_destination == destination + height * width;
            continues.then_some(Transfer::Pitched {
                source,
                pitch,
                arena,
                destination,
                width,
                height: height + 1,
            })
        }
        _ => None,
    }
}
