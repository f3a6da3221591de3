//! NUMA nodes and their cores. A core's number is 64 times that of its processor group, plus its place in the group.
#![allow(unsafe_code)]

use super::CORES_A_GROUP;
pub use crate::sys::common::Node;
use windows_sys::Win32::System::{
    SystemInformation::GROUP_AFFINITY,
    Threading::{GetNumaHighestNodeNumber, GetNumaNodeProcessorMaskEx},
};

/// The machine's nodes in order; empty if the system does not say.
pub fn nodes() -> Vec<Node> {
    let mut highest = 0;
    // SAFETY: the number outlives the call.
    if unsafe { GetNumaHighestNodeNumber(&raw mut highest) } == 0 {
        return Vec::new();
    }
    (0..=highest).filter_map(|id| Some(Node { id, cpus: cpus(id)? })).collect()
}

fn cpus(node: u32) -> Option<Vec<usize>> {
    let mut affinity = GROUP_AFFINITY::default();
    // SAFETY: the structure outlives the call.
    if unsafe { GetNumaNodeProcessorMaskEx(u16::try_from(node).ok()?, &raw mut affinity) } == 0 {
        return None;
    }
    let first = usize::from(affinity.Group) * CORES_A_GROUP;
    let cores = (0..CORES_A_GROUP).filter(|core| affinity.Mask & (1 << core) != 0);
    Some(cores.map(|core| first + core).collect::<Vec<_>>()).filter(|cpus| !cpus.is_empty())
}
