//! Facts about this machine, read from `/proc` and `/sys`: memory limits, NUMA nodes, block devices.

pub(crate) mod device;
pub(crate) mod memory;
pub(crate) mod numa;
pub(crate) mod usage;

use std::{fs, path::Path, str::FromStr};

/// A number that stands alone in a file of `/proc` or `/sys`.
pub(crate) fn read_number<T: FromStr>(path: impl AsRef<Path>) -> Option<T> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
