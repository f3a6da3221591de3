//! What a kind of device implements: the interface below [`Device`](crate::Device) and
//! [`CopyStream`](crate::CopyStream), which are all that other crates see.
#![allow(unsafe_code)]

use crate::{Conversion, Device, DeviceInfo, Error, Fate, Finding, Result, Unavailable};
use crate::{CopyDirection, DirectLibrary, ExternalKind, PathCounts, RegisteredFile};
use std::{
    collections::BTreeMap,
    ffi::c_void,
    fmt,
    sync::{Arc, Mutex, Weak},
};

/// The devices of a kind that were opened, by their numbers.
pub(crate) type Opened = Mutex<BTreeMap<u32, OpenDevice>>;

/// A device that was opened.
#[derive(Default)]
pub(crate) struct OpenDevice {
    pub(crate) device: Weak<Device>,
    /// Keeps it although nothing uses it: to make a context takes long.
    pub(crate) kept: Option<Arc<Device>>,
    /// Held while this device is opened, which takes long. Other devices can be opened meanwhile.
    pub(crate) opening: Arc<Mutex<()>>,
}

/// A kind of devices, such as those of one vendor.
pub(crate) trait Kind: Sync {
    /// Checks whether this process may use the kind. Takes no lock that a child of `fork` may find taken.
    ///
    /// # Errors
    /// Why not.
    fn check(&self) -> Result<(), Unavailable> {
        Ok(())
    }

    /// Whether the driver is loaded in this process. Loads nothing.
    fn is_in_process(&self) -> bool {
        false
    }

    /// Whether this process has started the driver. Starts nothing, and takes no lock.
    fn is_started(&self) -> bool {
        true
    }

    /// Opens the device of this number.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] if there is no such device; [`Error::Device`] if it does not start.
    fn open(&self, ordinal: u32) -> Result<Arc<dyn Backend>>;

    /// The devices that were opened. Locked after `check` alone, so that no child of `fork` finds it locked, and never while
    /// the driver is called.
    fn opened(&self) -> &'static Opened;

    /// Describes the devices that this process sees.
    ///
    /// # Errors
    /// Why the kind cannot be used here.
    fn devices(&self) -> Result<Vec<DeviceInfo>, Unavailable>;

    /// The number of the device whose memory an address is in; `None` if it is in no device's.
    ///
    /// # Errors
    /// Why the driver does not say.
    fn owner_of(&self, address: u64) -> Result<Option<u32>>;

    /// Checks whether this machine may have a direct path from files to devices of the kind. Opens no library.
    ///
    /// # Errors
    /// What is missing.
    fn may_have_direct_path(&self) -> Result<(), Unavailable> {
        Err(no_direct_path())
    }

    /// Looks at what the kind needs of the machine, for people. Devices are looked at apart.
    fn examine(&self) -> Vec<Finding> {
        Vec::new()
    }

    /// The types of DLPack (`DLDeviceType`) that mean this kind: first its own, then those of memory that others allocate.
    fn dlpack_types(&self) -> &'static [i32];
}

/// One device.
pub(crate) trait Backend: fmt::Debug + Send + Sync {
    /// What it is, and what it can do.
    fn info(&self) -> &DeviceInfo;

    /// Whether it does nothing more. It may serve again once everything of it is dropped, and it is opened anew.
    fn is_lost(&self) -> bool;

    /// Bytes of its memory that are free, and that it has in all.
    fn memory(&self) -> Result<(u64, u64)>;

    /// Allocates `len` bytes, aligned to 256, and returns the address of the first.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`].
    fn allocate(&self, len: u64) -> Result<u64>;

    /// Frees memory after all work of the device that may use it. If it is unknown whether that has ended, the memory stays.
    ///
    /// # Safety
    /// `allocate` has returned the address, and it is freed once.
    unsafe fn free(&self, address: u64, len: u64) -> Fate;

    /// Pins host memory, faulting it in: for reads by the device alone, if `is_read_only`, as memory must be that cannot be
    /// written.
    ///
    /// # Errors
    /// [`Error::Allocation`] if the system lets no more be pinned; [`Error::Device`].
    ///
    /// # Safety
    /// The memory must stay mapped until it is unpinned.
    unsafe fn pin(&self, memory: *mut u8, len: usize, is_read_only: bool) -> Result<()>;

    /// Unpins host memory. `false` if it may be pinned still, so that its address must not be used for other memory.
    ///
    /// # Safety
    /// `pin` was called with this address, and it is unpinned once.
    unsafe fn unpin(&self, memory: *mut u8) -> bool;

    /// Makes a stream, whose work is in no order with that of others.
    fn stream(self: Arc<Self>) -> Result<Arc<dyn Stream>>;

    /// An event behind everything queued so far on a stream of the caller's; 0 is the default stream.
    ///
    /// # Safety
    /// It must be a live stream of the device.
    unsafe fn mark(self: Arc<Self>, stream: usize) -> Result<Box<dyn Event>>;

    /// Waits for all work on the device.
    fn wait_for_all(&self) -> Fate;

    /// Begins to load its kernels on a thread, if it has some and nothing has begun that yet.
    fn prepare_kernels(self: Arc<Self>) {}

    /// What reports say of how its kernels were loaded, if anything.
    fn kernels_note(&self) -> Option<String> {
        None
    }

    /// Whether an event of the caller's is reached.
    ///
    /// # Safety
    /// It must be a live event of this kind of devices.
    unsafe fn is_event_reached(&self, event: u64) -> Result<bool>;

    /// Reads and writes of files past the host's memory.
    ///
    /// # Errors
    /// Why there are none.
    fn direct(&self) -> Result<&dyn Direct, Unavailable> {
        Err(no_direct_path())
    }

    /// What other interfaces to the device have made.
    ///
    /// # Errors
    /// Why it imports none.
    fn external(&self) -> Result<&dyn External, Unavailable> {
        Err(no_external())
    }

    /// Its address space, which memory is mapped into by the caller.
    ///
    /// # Errors
    /// Why memory cannot be mapped so.
    fn virtual_memory(&self) -> Result<&dyn Virtual, Unavailable> {
        Err(no_virtual_memory())
    }
}

/// What is still to come of a stream that nothing uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pending {
    /// It is free.
    Nothing,
    /// Work that was queued is not done.
    Work,
    /// A capture of the program has taken it in, which its end would invalidate.
    Capture,
}

/// Work of a device, done in the order in which it is queued. Dropping it does not cancel work that is in flight.
pub(crate) trait Stream: fmt::Debug + Send + Sync {
    /// Queues work in its order, but copies of bytes in a row that follow each other in any order. Where the host's side of a
    /// [`Work::Copy`] is not pinned, the copy may be done when this returns. That of [`Work::CopyRows`] must be pinned: some drivers
    /// return from such a copy before it is done.
    ///
    /// # Errors
    /// [`Error::Device`]; then some of the work may have been queued.
    ///
    /// # Safety
    /// What the work names must stay allocated until the work is done, and must not be used in a way that copies forbid.
    unsafe fn queue(&self, work: &[Work]) -> Result<()>;

    /// Makes later work wait for what is queued so far on a stream of the caller's; 0 is the default stream.
    ///
    /// # Safety
    /// It must be a live stream of the device.
    unsafe fn wait_for(&self, stream: usize) -> Result<()>;

    /// Makes later work wait for an event.
    ///
    /// # Errors
    /// [`Error::Device`], also if the event was recorded in a capture: the stream would become a part of that.
    ///
    /// # Safety
    /// It must be a live event of the device that was recorded.
    unsafe fn wait_for_event(&self, event: u64) -> Result<()>;

    /// Makes later work wait for a value of a semaphore that was imported.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// It is one of the device's, and stays so until that work is done.
    unsafe fn wait_for_external(&self, _semaphore: usize, _value: u64) -> Result<()> {
        Err(Error::Internal(no_external().reason))
    }

    /// An event behind everything queued so far.
    fn mark(&self) -> Result<Box<dyn Event>>;

    /// Waits for everything queued so far.
    fn synchronize(&self) -> Result<()>;

    /// Whether it may be kept when nothing uses it: it finds out whether its context is still there.
    fn can_be_kept(&self) -> bool;

    /// What keeps it from being used for something else. Waits for nothing.
    ///
    /// # Errors
    /// [`Error::Device`], also if its context is gone; then it must not be used again.
    fn pending(&self) -> Result<Pending>;

    /// Allocates memory in the order of the stream; `None` if the device cannot.
    fn allocate(&self, _len: u64) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Frees memory after the work that is queued so far.
    ///
    /// # Safety
    /// `allocate` of this stream has returned the address, and it is freed once.
    unsafe fn free(&self, _address: u64, _len: u64) -> Fate {
        Fate::Done
    }
}

/// A place in a stream.
pub(crate) trait Event: fmt::Debug + Send {
    /// Waits until the work before it is done.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn wait(&self) -> Result<()>;

    /// Whether the work is done. Waits for nothing.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn is_reached(&self) -> Result<bool>;

    /// As [`Stream::wait_for_event`] takes it.
    fn handle(&self) -> u64;
}

/// Reads and writes between files and the memory of a device, past the host's.
pub(crate) trait Direct {
    /// Fails if all of it would go through host memory after all.
    fn check(&self) -> Result<(), Unavailable>;

    /// Registers memory of the device.
    ///
    /// # Safety
    /// The memory must stay allocated until it is deregistered.
    unsafe fn register(&self, address: u64, len: u64) -> Result<()>;

    /// Deregisters memory.
    ///
    /// # Safety
    /// It is registered, and no request is in flight.
    unsafe fn deregister(&self, address: u64);

    /// Moves bytes between a file and registered memory, and returns how many.
    ///
    /// # Safety
    /// The memory at `address` is registered, and has `len` bytes from `offset` on.
    unsafe fn transfer(
        &self,
        direction: CopyDirection,
        file: &RegisteredFile,
        file_offset: i64,
        address: u64,
        offset: i64,
        len: usize,
    ) -> std::io::Result<usize>;

    /// What people are told of the library.
    fn library(&self) -> &'static DirectLibrary;

    /// Counts reads into the device by path, if the library counts them.
    fn reads(&self) -> Option<PathCounts>;

    /// Counts writes from the device by path, if the library counts them.
    fn writes(&self) -> Option<PathCounts>;
}

/// Memory and fences that another interface to the same device has made.
pub(crate) trait External {
    /// Imports memory, and maps all of it. Returns what names the import, and the address.
    ///
    /// # Safety
    /// The handle is of an object of this kind and length, on this device, which lives until the import is released.
    unsafe fn import_memory(&self, kind: ExternalKind, handle: *mut c_void, len: u64)
    -> Result<(usize, u64)>;

    /// Releases memory after all work of the device that may use it. If it is unknown whether that has ended, the memory stays.
    ///
    /// # Safety
    /// It was imported, and is released once.
    unsafe fn release_memory(&self, memory: usize, address: u64) -> Fate;

    /// Imports a fence, and returns what names the import.
    ///
    /// # Safety
    /// The handle is one of a fence on this device.
    unsafe fn import_semaphore(&self, handle: *mut c_void) -> Result<usize>;

    /// Releases a fence.
    ///
    /// # Safety
    /// It was imported, is released once, and no work waits for it.
    unsafe fn release_semaphore(&self, semaphore: usize);

    /// Makes later work of a stream wait for a value.
    ///
    /// # Safety
    /// Both are the device's and live until that work is done.
    unsafe fn wait(&self, stream: *mut c_void, semaphore: usize, value: u64) -> Result<()>;
}

/// Address space of a device, and memory that is mapped into it, by granules.
pub(crate) trait Virtual {
    /// Bytes of a granule, a power of two: what is reserved, allocated and mapped is a multiple of it.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn granule(&self) -> Result<u64>;

    /// Reserves addresses, which begin at a multiple of the granule. They have no memory.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::OutOfMemory`] if there are no addresses left.
    fn reserve(&self, len: u64, granule: u64) -> Result<u64>;

    /// Gives addresses back.
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::Forked`].
    ///
    /// # Safety
    /// `reserve` has returned them, nothing is mapped there, and they are given back once.
    unsafe fn unreserve(&self, address: u64, len: u64) -> Result<()>;

    /// Allocates memory without an address, and returns its handle.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`].
    fn create(&self, len: u64) -> Result<u64>;

    /// Frees memory that `create` made.
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::Forked`].
    ///
    /// # Safety
    /// It is freed once, and was unmapped.
    unsafe fn destroy(&self, memory: u64) -> Result<()>;

    /// Maps all of some memory. The device may not use it until [`Virtual::allow`] was called.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`].
    ///
    /// # Safety
    /// The memory is `len` bytes long and not mapped; the addresses are reserved and nothing is mapped there.
    unsafe fn map(&self, memory: u64, address: u64, len: u64) -> Result<()>;

    /// Lets the device read and write what is mapped.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`].
    ///
    /// # Safety
    /// Memory is mapped there.
    unsafe fn allow(&self, address: u64, len: u64) -> Result<()>;

    /// Unmaps memory. Waits for no work of the device. If it is unknown whether that was done, it may be tried again.
    ///
    /// # Safety
    /// `map` has mapped it there, and no work of the device uses it any more.
    unsafe fn unmap(&self, address: u64, len: u64) -> Fate;
}

/// A place in memory.
#[derive(Clone, Copy, Debug)]
pub enum Address {
    /// In host memory.
    Host(*mut u8),
    /// In the device's own memory.
    Device(u64),
}

impl Address {
    /// The place `offset` bytes further.
    pub(crate) fn at(self, offset: u64) -> Self {
        match self {
            Self::Host(start) => Self::Host(start.wrapping_add(offset as usize)),
            Self::Device(start) => Self::Device(start + offset),
        }
    }
}

/// One step of a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    /// Copies bytes in a row.
    Copy { from: Address, to: Address, len: u64 },
    /// Copies `height` rows of `width` bytes.
    CopyRows { from: Address, from_pitch: u64, to: Address, to_pitch: u64, width: u64, height: u64 },
    /// Runs a kernel over a table of [`Segment`]s in the device's memory, the longest of them `longest`.
    Run { kernel: Kernel, table: u64, segments: usize, longest: u64 },
}

/// What a kernel does to each segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kernel {
    Copy,
    Convert(Conversion),
}

impl Kernel {
    /// Bytes of a segment's source.
    pub(crate) fn source_len(self, segment: &Segment) -> u64 {
        match self {
            Self::Copy => segment.count,
            Self::Convert(conversion) => segment.count * conversion.from().bytes(),
        }
    }
}

/// What a kernel works on: `Segment` of `kernels.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) source: u64,
    pub(crate) destination: u64,
    /// Bytes of copies, elements of conversions.
    pub(crate) count: u64,
}

/// Why devices of a kind without a library for it are not read to directly.
fn no_direct_path() -> Unavailable {
    Unavailable::new("devices of this kind have no direct path to files", "use route staged")
}

/// Why devices of a kind import nothing of other interfaces.
pub(crate) fn no_external() -> Unavailable {
    Unavailable::new("devices of this kind import no memory of other interfaces", "")
}

/// Why devices of a kind have no memory that is mapped.
pub(crate) fn no_virtual_memory() -> Unavailable {
    Unavailable::new("memory of devices of this kind is not mapped by hoistway", "use slots")
}

/// The error of a device whose kind has no kernels, and cannot convert.
pub(crate) fn no_conversions(device: String) -> Error {
    let why = Unavailable::new("it converts no elements", "load without dtype, and convert afterwards");
    Error::DeviceUnavailable { device, why }
}
