//! The memory of tensors. `allocate` makes an arena of the kind asked for; `arena` is the contract between those
//! who write it and those who read it.

mod arena;
mod borrowed;
pub(crate) mod budget;
mod coverage;
mod device;
#[cfg(feature = "objects")]
mod ledger;
mod pool;
mod promised;
mod spare;

pub use arena::Block;
pub(crate) use arena::{Arena, Fill, WriteRegion};
pub(crate) use borrowed::advise_huge_pages;
pub use budget::limits;
pub(crate) use device::{DeviceArena, DeviceFill};
pub use device::{DeviceBlock, LentMemory};
#[cfg(target_os = "linux")]
pub(crate) use hoistway_io::memory::PinnedView;
pub(crate) use hoistway_io::memory::{DevicePart, Slot, SlotKind, Slots};
pub use hoistway_io::sys::limits::MemoryLimit;
#[cfg(feature = "objects")]
pub(crate) use ledger::{Grant, Ledger};
pub use pool::MemoryPool;
pub(crate) use promised::Promise;
pub use spare::SpareMemory;

use crate::{ByteRange, Error, Result, device::Device};
use arena::Backing;
use borrowed::Borrowed;
use hoistway_io::memory::{Mapping, PageKind, Pinning, off_node};
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    ptr::NonNull,
    sync::{Arc, OnceLock},
};

/// The first slot of those that `take` gives which a device can copy from. Those that cannot be pinned are not used again.
pub(crate) fn first_pinned(mut take: impl FnMut() -> Option<Slot>) -> Result<Option<Slot>> {
    while let Some(slot) = take() {
        match slot.pin()? {
            Pinning::Ready => return Ok(Some(slot)),
            Pinning::Short => slot.withdraw(),
        }
    }
    Ok(None)
}

/// What a report says if some of these slots are used although they are not pinned. `way` is the direction of the copies.
pub(crate) fn unpinned_note(slots: &[&Slots], way: &str) -> Option<String> {
    let why = slots.iter().find_map(|slots| slots.why_unpinned())?;
    let is_part = slots.iter().any(|slots| slots.has_pinned());
    let what = if is_part { "only a part of staging is pinned" } else { "staging is not pinned" };
    Some(format!("{what}, so copies {way} the device are slow: {why}"))
}

/// Makes `len` zero bytes.
///
/// # Errors
/// [`Error::Allocation`].
#[doc(hidden)]
pub fn zeroed(len: u64, kind: &'static str) -> Result<Vec<u8>> {
    hoistway_io::memory::zeroed(len).map_err(|source| Error::Allocation { bytes: len, kind, source })
}

/// The pages of arenas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum HugePages {
    /// Transparent huge pages, asked for by `madvise`. The kernel gives small pages where it has no huge one. Windows has
    /// none.
    #[default]
    Transparent,
    /// The system's reserve (`vm.nr_hugepages`), large pages on Windows. An error if there are too few.
    Reserved,
    /// Small pages only, unless the system's own policy differs.
    Never,
}

impl HugePages {
    /// What the system makes of the request.
    pub(crate) fn on_this_system(self) -> Self {
        if self == Self::Transparent && cfg!(not(target_os = "linux")) { Self::Never } else { self }
    }
}

/// The memory that a load asks for.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryRequest {
    pub(crate) pages: HugePages,
    pub(crate) numa_node: Option<u32>,
    /// What a report says if the system refused memory of that node, once it has.
    pub(crate) off_node: OnceLock<String>,
    pub(crate) pool: Option<MemoryPool>,
    /// A device that uses the memory as it is.
    pub(crate) user: Option<Arc<Device>>,
}

impl MemoryRequest {
    /// Of `arena_bytes`, those that the machine must find now: a pool has them already, and reserved huge pages
    /// were set apart.
    pub(crate) fn fresh_bytes(&self, arena_bytes: u64) -> u64 {
        if self.pool.is_some() || self.pages == HugePages::Reserved { 0 } else { arena_bytes }
    }
}

/// An arena of `len` bytes, zeroed unless it comes from a pool.
pub(crate) fn allocate(len: u64, request: &MemoryRequest) -> Result<Arc<Arena>> {
    let len = len as usize;
    if let Some(pool) = &request.pool {
        return Ok(Arena::new(Backing::Pooled(pool.take(len)?), len, None));
    }
    let (pages, kind) = match request.pages {
        HugePages::Transparent => (PageKind::TransparentHuge, "memory"),
        HugePages::Reserved if cfg!(windows) => (
            PageKind::ReservedHuge,
            "large pages (they need the right to lock pages in memory, and contiguous memory)",
        ),
        HugePages::Reserved => {
            (PageKind::ReservedHuge, "reserved huge pages (vm.nr_hugepages says how many there are)")
        }
        HugePages::Never => (PageKind::Default, "memory"),
    };
    let (mapping, refusal) = Mapping::anonymous_near(len, pages, request.numa_node)
        .map_err(|source| Error::Allocation { bytes: len as u64, kind, source })?;
    if let Some((node, error)) = request.numa_node.zip(refusal) {
        request.off_node.get_or_init(|| off_node("the memory of tensors", node, &error));
    }
    Ok(Arena::new(Backing::Own(mapping), len, request.user.clone()))
}

/// Frees memory that is spare. Returns whether there was any.
pub(crate) fn clear_spare() -> bool {
    spare::clear_all()
}

/// An arena with room for the blocks of `range`, which hold zeros, or what earlier reads left.
pub(crate) fn take_spare(memory: &SpareMemory, range: ByteRange) -> Result<Arc<Arena>> {
    let len = SpareMemory::bytes_for(range).and_then(|len| usize::try_from(len).ok());
    let len = len.ok_or_else(|| Error::Internal(format!("bytes {range} end past 2^64")))?;
    Ok(Arena::new(Backing::Spare(memory.take(len)?), len, None))
}

/// An arena of `len` bytes that belong to the caller.
///
/// # Safety
/// The `len` bytes from `start` on must be valid for reads and writes and initialised, and nothing else may use them, as long as a caller
/// holds a region of the arena.
#[allow(unsafe_code)]
pub(crate) unsafe fn borrow(start: NonNull<u8>, len: usize) -> Arc<Arena> {
    // SAFETY: passed on; an arena asks for no byte past its length.
    Arena::new(Backing::Borrowed(unsafe { Borrowed::new(start) }), len, None)
}

/// An arena that is a private view of the first `len` bytes of a file.
pub(crate) fn map_file(file: &File, len: u64) -> Result<Arc<Arena>> {
    let mapping = Mapping::of_file(file, len as usize).map_err(|source| Error::Allocation {
        bytes: len,
        kind: "address space for a file",
        source,
    })?;
    Ok(Arena::new(Backing::File(mapping), len as usize, None))
}

/// Runs `work` in a child of `fork`, and fails unless that ends well within a minute.
#[cfg(all(test, unix))]
#[allow(unsafe_code)]
pub(crate) fn in_child(work: impl FnOnce()) {
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        thread,
        time::{Duration, Instant},
    };
    // SAFETY: the child runs `work` alone, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let ended_well = catch_unwind(AssertUnwindSafe(work)).is_ok();
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(i32::from(!ended_well)) };
    }
    let (mut status, deadline) = (-1, Instant::now() + Duration::from_secs(60));
    assert!(child > 0, "fork: {}", std::io::Error::last_os_error());
    loop {
        // SAFETY: a child of this test, and a place for its status.
        let ended = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
        assert!(ended >= 0, "waitpid: {}", std::io::Error::last_os_error());
        if ended == child {
            break;
        }
        if Instant::now() > deadline {
            // SAFETY: a child of this test, which was not waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(status, 0, "the child failed");
}
