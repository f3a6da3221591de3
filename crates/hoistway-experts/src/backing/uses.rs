//! Work of devices that still uses units after their last lease.
#![forbid(unsafe_code)]

use super::UnitRoom;
use hoistway_device::{Device, Fence};
use std::collections::HashMap;

/// Fences that are remembered for a unit. For one that stays resident and is leased again and again, all work of the device is
/// waited for in their place.
const MOST_FENCES: usize = 16;

/// Uses of units since they were read.
#[derive(Debug, Default)]
pub(super) struct Uses {
    units: HashMap<usize, Use>,
    /// The last fence of all work of the device. It serves every room that becomes free before its wait begins.
    shared: Option<Fence>,
}

/// The uses of one unit.
#[derive(Debug, Default)]
pub(super) struct Use {
    /// The streams that callers have named.
    pub(super) fences: Vec<Fence>,
    /// Whether there are others, which come before anything that is queued later.
    pub(super) has_others: bool,
}

impl Uses {
    /// A lease of a unit has ended. Its uses come before `fence`; they are not named if there is none.
    pub(super) fn note(&mut self, unit: usize, fence: Option<&Fence>) {
        let uses = self.units.entry(unit).or_default();
        match fence {
            Some(fence) if !uses.has_others && uses.fences.len() < MOST_FENCES => {
                uses.fences.push(fence.clone());
            }
            _ => {
                // All work of the device is waited for, that of these fences too.
                uses.has_others = true;
                uses.fences.clear();
            }
        }
    }

    /// The uses of a unit, which are forgotten.
    pub(super) fn take(&mut self, unit: usize) -> Use {
        self.units.remove(&unit).unwrap_or_default()
    }

    /// What comes before the next use of a unit's room, on a device: kernels that were queued before leases ended may still read
    /// its bytes, and a copy of unknown fate may still write to them. The uses are forgotten.
    pub(super) fn take_fences(&mut self, unit: usize, room: &UnitRoom, device: &Device) -> Vec<Fence> {
        let Use { fences: mut after, has_others } = self.take(unit);
        if has_others || device.is_in_doubt() {
            // One wait serves all rooms that become free before it begins.
            let shared = self.shared.take().filter(Fence::covers_now);
            let fence = shared.unwrap_or_else(|| Fence::of_device(device.id()));
            self.shared = Some(fence.clone());
            after = vec![fence];
            // A read that ended early has not waited for the save of what the room had before, which may not be queued yet.
            let before = room.after.iter().flat_map(|before| before.iter());
            let is_left = |fence: &&Fence| !fence.is_queued() && !fence.is_passed() && !after.contains(fence);
            let left: Vec<Fence> = before.filter(is_left).cloned().collect();
            after.extend(left);
        } else if let Some(before) = &room.after
            && after.is_empty()
        {
            // Nothing used what was read, or was to be read.
            after = before.to_vec();
        }
        after
    }
}
