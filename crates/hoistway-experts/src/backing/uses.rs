//! Work of devices that still uses units after their last lease.
#![forbid(unsafe_code)]

use super::UnitRoom;
use hoistway_device::{Device, Fence};
use std::collections::HashMap;

/// Fences that are remembered for a unit. If there are more that have not been passed, all work of the device is waited for in their
/// place.
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
    /// The fences of a unit, if it has as many as are remembered. Those that were [passed](passed) make room for others.
    pub(super) fn full(&self, unit: usize) -> Vec<Fence> {
        let full = self.units.get(&unit).filter(|uses| uses.fences.len() >= MOST_FENCES);
        full.map(|uses| uses.fences.clone()).unwrap_or_default()
    }

    /// A lease of a unit has ended. Its uses come before `fence`; they are not named if there is none. Earlier fences of it that were
    /// passed are forgotten.
    pub(super) fn note(&mut self, unit: usize, fence: Option<&Fence>, passed: &[Fence]) {
        let uses = self.units.entry(unit).or_default();
        uses.fences.retain(|earlier| !passed.contains(earlier));
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

/// Those of some fences that were passed. It asks the driver, which may take long: no lock must be held.
pub(super) fn passed(fences: Vec<Fence>) -> Vec<Fence> {
    fences.into_iter().filter(Fence::is_passed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One that stays resident and is leased again and again.
    #[test]
    fn fences_that_were_passed_make_room_for_others() {
        let mut uses = Uses::default();
        let note = |uses: &mut Uses, fence: &Fence| {
            let passed = passed(uses.full(0));
            uses.note(0, Some(fence), &passed);
        };
        for _ in 0..10 * MOST_FENCES {
            let (fence, gate) = Fence::gated();
            note(&mut uses, &fence);
            drop(gate);
        }
        let Use { fences, has_others } = uses.take(0);
        assert!(!has_others && !fences.is_empty() && fences.len() <= MOST_FENCES);
        // Those that were not are not forgotten.
        let gates: Vec<_> = (0..=MOST_FENCES).map(|_| Fence::gated()).collect();
        gates.iter().for_each(|(fence, _)| note(&mut uses, fence));
        let Use { fences, has_others } = uses.take(0);
        assert!(has_others && fences.is_empty());
    }
}
