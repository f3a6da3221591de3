//! The codes and structures of `cufile.h`.

use std::ffi::{c_int, c_uint};

/// A `CUfileOpError`, positive.
pub(super) type Error = c_int;

/// Where the codes begin.
pub(super) const OPERATIONS: Error = 5000;
pub(super) const DRIVER_NOT_INITIALIZED: Error = 5001;
pub(super) const DRIVER_CLOSING: Error = 5006;
pub(super) const IO_NOT_SUPPORTED: Error = 5008;
pub(super) const CUDA_DRIVER_ERROR: Error = 5011;
pub(super) const CUDA_POINTER_INVALID: Error = 5012;
pub(super) const CUDA_MEMORY_TYPE_INVALID: Error = 5013;
pub(super) const CUDA_POINTER_RANGE_ERROR: Error = 5014;
pub(super) const INVALID_MAPPING_RANGE: Error = 5017;
pub(super) const INVALID_FILE_TYPE: Error = 5018;
pub(super) const INVALID_FILE_OPEN_FLAG: Error = 5019;
pub(super) const INVALID_VALUE: Error = 5022;
pub(super) const MEMORY_ALREADY_REGISTERED: Error = 5023;
pub(super) const DRIVER_ALREADY_OPEN: Error = 5026;
pub(super) const HANDLE_NOT_REGISTERED: Error = 5027;
pub(super) const HANDLE_ALREADY_REGISTERED: Error = 5028;
pub(super) const INTERNAL_ERROR: Error = 5030;
pub(super) const NVFS_SETUP_ERROR: Error = 5033;

/// `CUfileError_t`.
#[repr(C)]
pub(super) struct Status {
    pub(super) error: Error,
    /// The driver's code, where cuFile passes one on.
    pub(super) cuda: c_int,
}

/// `CUfileDrvProps_t`.
#[repr(C)]
pub(super) struct DriverProperties {
    pub(super) nvfs_major: c_uint,
    pub(super) nvfs_minor: c_uint,
    pub(super) poll_threshold_size: usize,
    pub(super) max_direct_io_size: usize,
    pub(super) status_flags: c_uint,
    pub(super) control_flags: c_uint,
    pub(super) feature_flags: c_uint,
    pub(super) max_device_cache_size: c_uint,
    pub(super) per_buffer_cache_size: c_uint,
    pub(super) max_device_pinned_memory_size: c_uint,
    pub(super) max_batch_io_size: c_uint,
    pub(super) max_batch_io_timeout_ms: c_uint,
}

/// `CUfileDescr_t`.
#[repr(C)]
pub(super) struct FileDescription {
    pub(super) kind: c_int,
    /// A union of a pointer and a descriptor, which is its lower half.
    pub(super) handle: u64,
    pub(super) operations: usize,
}

pub(super) const HANDLE_TYPE_OPAQUE_FD: c_int = 1;
pub(super) const HANDLE_TYPE_USERSPACE_FS: c_int = 3;

/// `CUfileOpCounter_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct OperationCounter {
    pub(super) succeeded: u64,
    pub(super) failed: u64,
}

/// `CUfileStatsLevel1_t`, of which only reads and writes are counted.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct BasicStats {
    pub(super) reads: OperationCounter,
    pub(super) writes: OperationCounter,
    pub(super) registrations: [OperationCounter; 4],
    pub(super) read_bytes: u64,
    pub(super) write_bytes: u64,
    pub(super) uncounted: [u64; 64],
}

/// `CUfileStatsLevel2_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DetailedStats {
    pub(super) basic: BasicStats,
    pub(super) read_sizes_kib: [u64; 32],
    pub(super) write_sizes_kib: [u64; 32],
}

/// What `CUfilePerGpuStats_t` says both of reads and of writes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct TransferStats {
    pub(super) bytes: u64,
    pub(super) bandwidth: u64,
    pub(super) utilization: u64,
    pub(super) duration_us: u64,
    pub(super) total: u64,
    pub(super) peer_to_peer: u64,
    pub(super) nvfs: u64,
    pub(super) posix: u64,
    pub(super) unaligned: u64,
    pub(super) dynamically_routed: u64,
}

/// `CUfilePerGpuStats_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DeviceStats {
    pub(super) uuid: [u8; 16],
    pub(super) reads: TransferStats,
    pub(super) sparse_regions: u64,
    pub(super) inline_regions: u64,
    pub(super) failed_reads: u64,
    pub(super) writes: TransferStats,
    pub(super) failed_writes: u64,
    /// Of registered buffers; not counted.
    pub(super) mappings: [u64; 5],
}

/// `CUfileStatsLevel3_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct AllStats {
    pub(super) detailed: DetailedStats,
    pub(super) devices: u32,
    pub(super) per_device: [DeviceStats; 16],
}

// As a C compiler has them for version 1.20.
const _: () = {
    assert!(size_of::<Status>() == 8);
    assert!(size_of::<DriverProperties>() == 56);
    assert!(std::mem::offset_of!(DriverProperties, feature_flags) == 32);
    assert!(size_of::<FileDescription>() == 24);
    assert!(std::mem::offset_of!(FileDescription, handle) == 8);
    assert!(size_of::<BasicStats>() == 624);
    assert!(std::mem::offset_of!(BasicStats, read_bytes) == 96);
    assert!(size_of::<DetailedStats>() == 1136);
    assert!(size_of::<DeviceStats>() == 248);
    assert!(std::mem::offset_of!(DeviceStats, writes) == 120);
    assert!(size_of::<AllStats>() == 5112);
};
