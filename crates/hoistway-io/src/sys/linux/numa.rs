//! NUMA nodes and their cores.
#![forbid(unsafe_code)]

pub use crate::sys::common::Node;
use std::fs;

/// The machine's nodes in order; empty if the kernel does not say.
pub fn nodes() -> Vec<Node> {
    let Ok(entries) = fs::read_dir(hoistway_device::sysfs().join("devices/system/node")) else {
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
