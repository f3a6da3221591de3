//! Block devices, as far as they matter to how a file is read. Windows does not say it without administrator rights.
#![forbid(unsafe_code)]

/// Hardware queues of the device with this number: not known.
pub fn queues(_device: u64) -> usize {
    0
}

/// The NUMA node of the device with this number: not known.
pub fn numa_node(_device: u64) -> Option<u32> {
    None
}
