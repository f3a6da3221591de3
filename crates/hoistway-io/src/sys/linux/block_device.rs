//! Block devices, as far as they matter to how a file is read.
#![forbid(unsafe_code)]

use super::read_number;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Hardware queues of the device with this number; 0 if it is none, or does not say.
pub fn queues(device: u64) -> usize {
    let Some(path) = folder(device) else { return 0 };
    // A partition has the queues of the whole device, whose folder it lies in.
    let whole = if path.join("partition").exists() { path.parent() } else { Some(&*path) };
    whole.and_then(|whole| fs::read_dir(whole.join("mq")).ok()).map_or(0, |queues| queues.count())
}

/// The NUMA node of the device with this number, if it is a block device that has one.
pub fn numa_node(device: u64) -> Option<u32> {
    folder(device)?
        .ancestors()
        .take_while(|ancestor| ancestor.starts_with("/sys/devices"))
        .find_map(|ancestor| read_number::<i32>(ancestor.join("numa_node")))
        .and_then(|node| u32::try_from(node).ok())
}

/// The folder of a device in `/sys`.
fn folder(device: u64) -> Option<PathBuf> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    fs::canonicalize(Path::new("/sys/dev/block").join(format!("{major}:{minor}"))).ok()
}
