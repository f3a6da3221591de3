//! What crosses the edge to `dstorage.dll`: the part of `dstorage.h` (1.3, MIT licence) that is used here, for 64-bit systems.
//!
//! An interface is a pointer to an object whose first word is the address of its table of functions.

use std::{
    ffi::{c_char, c_void},
    fmt,
};

/// A result: negative for an error.
pub type HResult = i32;
/// A handle of the system.
pub type Handle = *mut c_void;
/// An object with a table of functions.
pub type Object = *mut c_void;

/// The result of what has not ended.
pub const E_PENDING: HResult = 0x8000_000A_u32.cast_signed();
/// The result of what the runtime does not have.
pub const E_NOTIMPL: HResult = 0x8000_4001_u32.cast_signed();
/// The result of asking an object for an interface that it does not have.
pub const E_NOINTERFACE: HResult = 0x8000_4002_u32.cast_signed();
/// An error without a more precise number.
pub const E_FAIL: HResult = 0x8000_4005_u32.cast_signed();
/// The capacity of a queue is out of bounds.
pub const E_DSTORAGE_INVALID_QUEUE_CAPACITY: HResult = 0x8924_0003_u32.cast_signed();
/// A request goes past the end of its file.
pub const E_DSTORAGE_END_OF_FILE: HResult = 0x8924_0007_u32.cast_signed();
/// A request is longer than the staging buffer.
pub const E_DSTORAGE_REQUEST_TOO_LARGE: HResult = 0x8924_0008_u32.cast_signed();
/// The file of a request was closed.
pub const E_DSTORAGE_FILE_NOT_OPEN: HResult = 0x8924_000B_u32.cast_signed();
/// A reserved field is not zero.
pub const E_DSTORAGE_RESERVED_FIELDS: HResult = 0x8924_000C_u32.cast_signed();
/// A queue or a file is open, so that the size of the staging buffer cannot change.
pub const E_DSTORAGE_STAGING_BUFFER_LOCKED: HResult = 0x8924_001F_u32.cast_signed();
/// The graphics device was removed.
pub const DXGI_ERROR_DEVICE_REMOVED: HResult = 0x887A_0005_u32.cast_signed();
/// A request was cancelled: `ERROR_OPERATION_ABORTED`.
pub const ABORTED: HResult = 0x8007_03E3_u32.cast_signed();

/// The least and the most entries of a queue.
pub const QUEUE_CAPACITY: (u16, u16) = (0x80, 0x2000);

/// The name of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Guid(u32, u16, u16, [u8; 8]);

impl Guid {
    /// A name as it is written, without its hyphens.
    pub const fn new(number: u128) -> Self {
        let [a, b, c, d, e, f, g, h, rest @ ..] = number.to_be_bytes();
        Self(u32::from_be_bytes([a, b, c, d]), u16::from_be_bytes([e, f]), u16::from_be_bytes([g, h]), rest)
    }
}

/// `IUnknown`
pub const IID_UNKNOWN: Guid = Guid::new(0x00000000_0000_0000_C000_000000000046);
/// `IDStorageFactory`
pub const IID_FACTORY: Guid = Guid::new(0x6924ea0c_c3cd_4826_b10a_f64f4ed927c1);
/// `IDStorageFile`
pub const IID_FILE: Guid = Guid::new(0x5de95e7b_955a_4868_a73c_243b29f4b8da);
/// `IDStorageQueue`
pub const IID_QUEUE: Guid = Guid::new(0xcfdbd83f_9e06_4fda_8ea5_69042137f49b);
/// `IDStorageQueue1`
pub const IID_QUEUE_1: Guid = Guid::new(0xdd2f482c_5eff_41e8_9c9e_d2374b278128);
/// `IDStorageStatusArray`
pub const IID_STATUS_ARRAY: Guid = Guid::new(0x82397587_7cd5_453b_a02e_31379bd64656);

/// `DStorageSetConfiguration1`
pub type SetConfiguration1 = unsafe extern "system" fn(*const Configuration1) -> HResult;
/// `DStorageGetFactory`
pub type GetFactory = unsafe extern "system" fn(*const Guid, *mut Object) -> HResult;

/// `DSTORAGE_CONFIGURATION1`; zeros are the defaults.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Configuration1 {
    /// 0: as many as the runtime finds good.
    pub submit_threads: u32,
    /// 0: as many as the runtime finds good. -1: none.
    pub cpu_decompression_threads: i32,
    /// Whether files are mapped where that is not needed.
    pub force_mapping_layer: i32,
    /// Whether reads never bypass the filters of file systems.
    pub disable_bypass_io: i32,
    /// Whether Microsoft is told nothing.
    pub disable_telemetry: i32,
    /// Whether the driver's way to decompress is left out.
    pub disable_gpu_decompression_metacommand: i32,
    /// Whether devices decompress nothing.
    pub disable_gpu_decompression: i32,
    /// Whether reads go through the cache.
    pub force_file_buffering: i32,
}

/// `DSTORAGE_QUEUE_DESC`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct QueueDescription {
    /// 0: files.
    pub source_type: u64,
    /// Entries, within [`QUEUE_CAPACITY`].
    pub capacity: u16,
    /// 0: normal.
    pub priority: i8,
    /// A text that ends with a zero, or null.
    pub name: *const c_char,
    /// The D3D12 device that requests write to; null: host memory alone.
    pub device: Object,
}

/// [`Request::kinds`] of a request from a file to host memory.
pub const KINDS_MEMORY: u64 = 0;
/// [`Request::kinds`] of a request from a file to a buffer of D3D12.
pub const KINDS_BUFFER: u64 = 1 << 1;

/// `DSTORAGE_REQUEST` from a file.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Request {
    /// How the bytes are compressed, in the first byte; 0: not at all.
    pub compression: u64,
    /// The kind of source in the lowest bit, 0: a file; that of the destination in the next seven, 0: host memory. The rest is 0.
    pub kinds: u64,
    /// `DSTORAGE_SOURCE_FILE`
    pub source: Source,
    /// As `kinds` says.
    pub destination: Destination,
    /// As long as source and destination.
    pub uncompressed_bytes: u32,
    /// A number of the caller's, by which requests are cancelled.
    pub cancellation_tag: u64,
    /// A text that ends with a zero, or null.
    pub name: *const c_char,
}

/// `DSTORAGE_SOURCE_FILE`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Source {
    /// An `IDStorageFile`.
    pub file: Object,
    /// The first byte.
    pub offset: u64,
    /// Never 0.
    pub bytes: u32,
}

/// `DSTORAGE_DESTINATION`
#[derive(Clone, Copy)]
#[repr(C)]
pub union Destination {
    /// Of [`KINDS_MEMORY`].
    pub memory: MemoryDestination,
    /// Of [`KINDS_BUFFER`].
    pub buffer: BufferDestination,
    /// All of it.
    pub words: [u64; 5],
}

impl fmt::Debug for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Destination")
    }
}

/// `DSTORAGE_DESTINATION_MEMORY`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MemoryDestination {
    /// The first byte.
    pub memory: *mut c_void,
    /// As long as the source.
    pub bytes: u32,
}

/// `DSTORAGE_DESTINATION_BUFFER`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BufferDestination {
    /// An `ID3D12Resource`.
    pub resource: Object,
    /// The first byte.
    pub offset: u64,
    /// As long as the source.
    pub bytes: u32,
}

/// `DSTORAGE_ERROR_RECORD`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ErrorRecord {
    /// Failures since the last record was taken.
    pub count: u32,
    _padding: u32,
    /// The result of the first one.
    pub first: HResult,
    /// What kind of entry failed.
    pub command: i32,
    /// What the entry was.
    pub parameters: [u64; 86],
}

impl Default for ErrorRecord {
    fn default() -> Self {
        Self { count: 0, _padding: 0, first: 0, command: 0, parameters: [0; 86] }
    }
}

/// `BY_HANDLE_FILE_INFORMATION`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct FileInformation {
    /// `FILE_ATTRIBUTE_…`
    pub attributes: u32,
    /// Of creation, access and write.
    pub times: [u32; 6],
    /// The number of the volume.
    pub volume: u32,
    /// High and low half of the length.
    pub len: [u32; 2],
    /// Names of the file.
    pub links: u32,
    /// High and low half of the file's number on the volume.
    pub index: [u32; 2],
}

/// The table of `IUnknown`
#[derive(Debug)]
#[repr(C)]
pub struct UnknownTable {
    /// `QueryInterface`
    pub query: unsafe extern "system" fn(Object, *const Guid, *mut Object) -> HResult,
    /// `AddRef`
    pub add_ref: unsafe extern "system" fn(Object) -> u32,
    /// `Release`
    pub release: unsafe extern "system" fn(Object) -> u32,
}

/// The table of `IDStorageFactory`
#[derive(Debug)]
#[repr(C)]
pub struct FactoryTable {
    /// What all objects have.
    pub unknown: UnknownTable,
    /// `CreateQueue`
    pub create_queue:
        unsafe extern "system" fn(Object, *const QueueDescription, *const Guid, *mut Object) -> HResult,
    /// `OpenFile`
    pub open_file: unsafe extern "system" fn(Object, *const u16, *const Guid, *mut Object) -> HResult,
    /// `CreateStatusArray`
    pub create_status_array:
        unsafe extern "system" fn(Object, u32, *const c_char, *const Guid, *mut Object) -> HResult,
    /// `SetDebugFlags`
    pub set_debug_flags: unsafe extern "system" fn(Object, u32),
    /// `SetStagingBufferSize`
    pub set_staging_buffer_size: unsafe extern "system" fn(Object, u32) -> HResult,
}

/// The table of `IDStorageFile`
#[derive(Debug)]
#[repr(C)]
pub struct FileTable {
    /// What all objects have.
    pub unknown: UnknownTable,
    /// `Close`
    pub close: unsafe extern "system" fn(Object),
    /// `GetFileInformation`
    pub information: unsafe extern "system" fn(Object, *mut FileInformation) -> HResult,
}

/// The table of `IDStorageStatusArray`
#[derive(Debug)]
#[repr(C)]
pub struct StatusArrayTable {
    /// What all objects have.
    pub unknown: UnknownTable,
    /// `IsComplete`; 0 is false.
    pub is_complete: unsafe extern "system" fn(Object, u32) -> u8,
    /// `GetHResult`
    pub result: unsafe extern "system" fn(Object, u32) -> HResult,
}

/// The table of `IDStorageQueue1`
#[derive(Debug)]
#[repr(C)]
pub struct QueueTable {
    /// What all objects have.
    pub unknown: UnknownTable,
    /// `EnqueueRequest`
    pub enqueue_request: unsafe extern "system" fn(Object, *const Request),
    /// `EnqueueStatus`
    pub enqueue_status: unsafe extern "system" fn(Object, Object, u32),
    /// `EnqueueSignal`
    pub enqueue_signal: unsafe extern "system" fn(Object, Object, u64),
    /// `Submit`
    pub submit: unsafe extern "system" fn(Object),
    /// `CancelRequestsWithTag`
    pub cancel: unsafe extern "system" fn(Object, u64, u64),
    /// `Close`
    pub close: unsafe extern "system" fn(Object),
    /// `GetErrorEvent`
    pub error_event: unsafe extern "system" fn(Object) -> Handle,
    /// `RetrieveErrorRecord`
    pub error_record: unsafe extern "system" fn(Object, *mut ErrorRecord),
    /// `Query`
    pub query: unsafe extern "system" fn(Object, *mut c_void),
    /// `EnqueueSetEvent`
    pub enqueue_set_event: unsafe extern "system" fn(Object, Handle),
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{align_of, offset_of, size_of};

    #[test]
    fn structures_lie_as_the_header_has_them() {
        assert_eq!((size_of::<Request>(), align_of::<Request>()), (104, 8));
        assert_eq!(offset_of!(Request, kinds), 8);
        assert_eq!(offset_of!(Request, source), 16);
        assert_eq!(offset_of!(Request, destination), 40);
        assert_eq!(offset_of!(Request, uncompressed_bytes), 80);
        assert_eq!(offset_of!(Request, cancellation_tag), 88);
        assert_eq!(offset_of!(Request, name), 96);
        assert_eq!((size_of::<Source>(), offset_of!(Source, bytes)), (24, 16));
        assert_eq!((size_of::<Destination>(), offset_of!(MemoryDestination, bytes)), (40, 8));
        assert_eq!((offset_of!(BufferDestination, offset), offset_of!(BufferDestination, bytes)), (8, 16));
        assert_eq!((size_of::<QueueDescription>(), offset_of!(QueueDescription, name)), (32, 16));
        assert_eq!(size_of::<Configuration1>(), 32);
        assert_eq!((size_of::<ErrorRecord>(), offset_of!(ErrorRecord, first)), (704, 8));
        assert_eq!((size_of::<FileInformation>(), offset_of!(FileInformation, index)), (52, 44));
        assert_eq!((size_of::<Guid>(), align_of::<Guid>()), (16, 4));
        assert_eq!(size_of::<QueueTable>(), 13 * 8);
        assert_eq!(offset_of!(FactoryTable, set_staging_buffer_size), 7 * 8);
    }

    #[test]
    fn a_name_is_as_it_is_written() {
        assert_eq!(
            IID_FILE,
            Guid(0x5de9_5e7b, 0x955a, 0x4868, [0xa7, 0x3c, 0x24, 0x3b, 0x29, 0xf4, 0xb8, 0xda])
        );
    }
}
