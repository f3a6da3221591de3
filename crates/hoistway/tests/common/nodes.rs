//! NUMA nodes that the engine is made to see, and where threads of this process may run.

use hoistway_device::DeviceId;
use hoistway_io::memory::{Mapping, PageKind};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// A processor that no machine has.
pub const ABSENT: usize = 100_000;

/// What nodes of the machine have, not those that the engine is made to see.
pub fn has_memory_for_us(node: u32) -> bool {
    Mapping::anonymous_on(4096, PageKind::Default, node).is_ok()
}

/// The processors that this thread may use.
pub fn own_cpus() -> BTreeSet<usize> {
    cpus_in(&fs::read_to_string("/proc/thread-self/status").unwrap())
}

/// The processors that threads whose names begin so may use; `None` while there is no such thread.
pub fn cpus_of(name: &str) -> Option<Vec<BTreeSet<usize>>> {
    let mut found = Vec::new();
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let path = task.unwrap().path();
        // It may have ended.
        let Ok(comm) = fs::read_to_string(path.join("comm")) else { continue };
        let Ok(status) = fs::read_to_string(path.join("status")) else { continue };
        if comm.starts_with(name) {
            found.push(cpus_in(&status));
        }
    }
    (!found.is_empty()).then_some(found)
}

pub fn cpus_in(status: &str) -> BTreeSet<usize> {
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let ranges = line.trim().split(',').map(|part| part.split_once('-').unwrap_or((part, part)));
    ranges.flat_map(|(first, last)| first.parse().unwrap()..=last.parse().unwrap()).collect()
}

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Two nodes that the engine is made to see as long as this lives.
pub struct Nodes {
    root: PathBuf,
    device: DeviceId,
}

impl Nodes {
    pub fn new(root: PathBuf, device: DeviceId) -> Self {
        // SAFETY: other threads of this process read the environment through the standard library, which takes turns with this.
        #[allow(unsafe_code)]
        unsafe {
            std::env::set_var("HOISTWAY_SYSFS", &root);
        }
        Self { root, device }
    }

    /// The processors of each, and the node of the device.
    pub fn set(&self, first: &[usize], second: &[usize], of_device: &str) {
        for (node, cpus) in [first, second].into_iter().enumerate() {
            let list = cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",") + "\n";
            write(&self.root, &format!("devices/system/node/node{node}/cpulist"), &list);
        }
        self.put(self.device, of_device);
    }

    /// The node of any device.
    pub fn put(&self, device: DeviceId, node: &str) {
        let devices = hoistway_device::devices().unwrap();
        let address = devices.into_iter().find(|found| found.id == device).unwrap().pci;
        write(&self.root, &format!("bus/pci/devices/{address}/numa_node"), &format!("{node}\n"));
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        // SAFETY: as above.
        #[allow(unsafe_code)]
        unsafe {
            std::env::remove_var("HOISTWAY_SYSFS");
        }
    }
}

/// The first and the second half, which share one processor where their number is odd.
pub fn halves(cpus: &[usize]) -> (&[usize], &[usize]) {
    (&cpus[..cpus.len().div_ceil(2)], &cpus[cpus.len() / 2..])
}
