//! Work of devices that still uses units after their last lease.
#![forbid(unsafe_code)]

use hoistway_device::Fence;
use std::collections::HashMap;

/// Fences that are remembered for a unit. For one that stays resident and is leased again and again, all work of the device is
/// waited for in their place.
const MOST_FENCES: usize = 16;

/// Uses of units since they were read.
#[derive(Debug, Default)]
pub(super) struct Uses(HashMap<usize, Use>);

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
        let uses = self.0.entry(unit).or_default();
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
        self.0.remove(&unit).unwrap_or_default()
    }
}
