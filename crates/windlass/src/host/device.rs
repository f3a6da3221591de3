//! Block devices, as far as they matter to how a file is read.
#![forbid(unsafe_code)]

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Hardware queues of the device with this `st_dev`; 0 if it is none, or does not say.
pub(crate) fn queues(device: u64) -> usize {
    directory(device)
        .and_then(|directory| fs::read_dir(directory.join("mq")).ok())
        .map_or(0, |queues| queues.count())
}

/// The folder of a whole device in `/sys`, also if `device` is one of its partitions.
fn directory(device: u64) -> Option<PathBuf> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let link = Path::new("/sys/dev/block").join(format!("{major}:{minor}"));
    let path = fs::canonicalize(link).ok()?;
    if path.join("partition").exists() { path.parent().map(Path::to_owned) } else { Some(path) }
}
