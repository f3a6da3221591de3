//! NUMA nodes, their cores, and the node that a block device hangs off.
#![forbid(unsafe_code)]

use super::read_number;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// One NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) id: u32,
    pub(crate) cpus: Vec<usize>,
}

/// The machine's nodes in order; empty if the kernel does not say.
pub(crate) fn nodes() -> Vec<Node> {
    let Ok(entries) = fs::read_dir("/sys/devices/system/node") else {
        return Vec::new();
    };
    let mut nodes: Vec<Node> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let id = path.file_name()?.to_str()?.strip_prefix("node")?.parse().ok()?;
            let cpus = parse_list(fs::read_to_string(path.join("cpulist")).ok()?.trim());
            Some(Node { id, cpus })
        })
        .collect();
    nodes.sort_by_key(|node| node.id);
    nodes
}

/// The node of the device with this `st_dev`, if it is a block device that has one.
pub(crate) fn node_of_device(device: u64) -> Option<u32> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let link = Path::new("/sys/dev/block").join(format!("{major}:{minor}"));
    let device: PathBuf = fs::canonicalize(link).ok()?;
    device
        .ancestors()
        .take_while(|ancestor| ancestor.starts_with("/sys/devices"))
        .find_map(|ancestor| read_number::<i32>(ancestor.join("numa_node")))
        .and_then(|node| u32::try_from(node).ok())
}

/// The node of the device at this place of the PCI bus, such as `0000:3b:00.0`.
pub(crate) fn node_of_pci(address: &str) -> Option<u32> {
    let node: i32 = read_number(Path::new("/sys/bus/pci/devices").join(address).join("numa_node"))?;
    u32::try_from(node).ok()
}

/// `0-3,8` → 0, 1, 2, 3, 8.
fn parse_list(text: &str) -> Vec<usize> {
    text.split(',')
        .filter_map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            Some(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?)
        })
        .flatten()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_lists_are_read() {
        assert_eq!(parse_list("0-3,8"), [0, 1, 2, 3, 8]);
        assert_eq!(parse_list(""), [] as [usize; 0]);
        assert_eq!(parse_list("7"), [7]);
    }
}
