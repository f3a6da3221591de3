//! The layout of a ring in shared memory, and the `ioctl`s by which a 3FS makes itself known.
//!
//! Both sides map the same file: the client appends to the submission ring, the daemon to the completion ring. Each
//! has one more slot than it holds entries, so that a full ring differs from an empty one.
#![allow(unsafe_code)]

use std::{mem::offset_of, ptr::NonNull, sync::atomic::AtomicI32};

/// What the `ioctl` [`GET_MAGIC`] answers on a 3FS.
pub const MAGIC: u32 = 0x8f3f_5fff;
/// The only version of the protocol that there has been.
pub const VERSION: u32 = 1;
/// `_IOR('h', 2, u32)`: is this a 3FS?
pub const GET_MAGIC: u32 = ior(2);
/// `_IOR('h', 3, u32)`: which version of these calls?
pub const GET_VERSION: u32 = ior(3);
/// The most entries that a ring of this crate has.
pub const MAX_ENTRIES: usize = 65536;

/// The directory of the mount in which memory is registered.
pub const IOVS: &str = "3fs-virt/iovs";

const COUNTERS_BYTES: usize = 4 * size_of::<AtomicI32>();
const SPARE_BYTES: usize = 4096;

const fn ior(number: u32) -> u32 {
    const READ: u32 = 2;
    (READ << 30) | ((size_of::<u32>() as u32) << 16) | ((b'h' as u32) << 8) | number
}

/// A request of a client.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoArgs {
    /// The buffer, by the number in its registration's name.
    pub buffer: [u8; 16],
    /// The offset in the buffer that the bytes go to, or come from.
    pub buffer_offset: usize,
    /// The file's inode number.
    pub inode: u64,
    /// The offset in the file.
    pub file_offset: usize,
    /// Length in bytes.
    pub len: u64,
    /// The client's own mark.
    pub user_data: u64,
}

/// An answer of the daemon.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cqe {
    /// The index of the [`IoArgs`] that ended.
    pub index: i32,
    /// Unused.
    pub reserved: i32,
    /// Bytes transferred, or a negative error number.
    pub result: i64,
    /// The mark that the client gave.
    pub user_data: u64,
}

/// An entry of the submission ring.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sqe {
    /// The index of the [`IoArgs`] to carry out.
    pub index: i32,
    /// Unused.
    pub reserved: i32,
    /// The client's own mark.
    pub user_data: u64,
}

const _: () = {
    assert!(size_of::<IoArgs>() == 56 && align_of::<IoArgs>() == 8);
    assert!(offset_of!(IoArgs, buffer_offset) == 16 && offset_of!(IoArgs, inode) == 24);
    assert!(offset_of!(IoArgs, file_offset) == 32 && offset_of!(IoArgs, len) == 40);
    assert!(offset_of!(IoArgs, user_data) == 48);
    assert!(size_of::<Cqe>() == 24 && offset_of!(Cqe, result) == 8 && offset_of!(Cqe, user_data) == 16);
    assert!(size_of::<Sqe>() == 16 && offset_of!(Sqe, user_data) == 8);
    assert!(size_of::<libc::sem_t>() == 32);
    assert!(GET_MAGIC == 0x8004_6802 && GET_VERSION == 0x8004_6803);
    assert!(ring_bytes(64) == 10384);
};

const SLOT_BYTES: usize = size_of::<IoArgs>() + size_of::<Cqe>() + size_of::<Sqe>();

/// Returns the bytes of memory that a ring with this number of entries takes.
pub const fn ring_bytes(entries: usize) -> usize {
    COUNTERS_BYTES + size_of::<libc::sem_t>() + SPARE_BYTES + SLOT_BYTES * (entries + 1)
}

/// Returns the number of slots, one more than entries, of a ring in this many bytes; `None` if no entry fits.
pub const fn ring_slots(bytes: usize) -> Option<i32> {
    let Some(slots) = bytes.checked_sub(COUNTERS_BYTES + size_of::<libc::sem_t>() + SPARE_BYTES) else {
        return None;
    };
    let slots = slots / SLOT_BYTES;
    if slots < 2 || slots > i32::MAX as usize { None } else { Some(slots as i32) }
}

/// The places of a ring's parts. Their contents are not trusted: the other side can write anything at any time.
#[derive(Clone, Copy, Debug)]
pub struct RingLayout {
    base: NonNull<u8>,
    slots: i32,
}

// SAFETY: a layout is an address and a number; what lies there is reached through unsafe methods and atomics only.
unsafe impl Send for RingLayout {}

impl RingLayout {
    /// The ring in `bytes` bytes at `base`; `None` if they are too few, or `base` is not aligned to 8.
    ///
    /// # Safety
    /// The memory must be mapped and writable for as long as the layout is used, and shared with the other side.
    pub unsafe fn new(base: NonNull<u8>, bytes: usize) -> Option<Self> {
        let slots = ring_slots(bytes)?;
        base.cast::<u64>().is_aligned().then_some(Self { base, slots })
    }

    /// How many slots: one more than entries.
    pub fn slots(&self) -> i32 {
        self.slots
    }

    /// Where the client appends next.
    pub fn sqe_head(&self) -> &AtomicI32 {
        self.counter(0)
    }

    /// How far the daemon has got.
    pub fn sqe_tail(&self) -> &AtomicI32 {
        self.counter(1)
    }

    /// Where the daemon appends next.
    pub fn cqe_head(&self) -> &AtomicI32 {
        self.counter(2)
    }

    /// How far the client has got.
    pub fn cqe_tail(&self) -> &AtomicI32 {
        self.counter(3)
    }

    /// Where the arguments with this index lie; `None` if there is no such index.
    pub fn args(&self, index: i32) -> Option<NonNull<IoArgs>> {
        Some(self.part(0, self.checked(index)?))
    }

    /// Where the completion with this index lies; `None` if there is no such index.
    pub fn cqe(&self, index: i32) -> Option<NonNull<Cqe>> {
        Some(self.part(size_of::<IoArgs>(), self.checked(index)?))
    }

    /// Where the submission with this index lies; `None` if there is no such index.
    pub fn sqe(&self, index: i32) -> Option<NonNull<Sqe>> {
        Some(self.part(size_of::<IoArgs>() + size_of::<Cqe>(), self.checked(index)?))
    }

    /// The semaphore that the daemon posts after completions.
    pub fn semaphore(&self) -> *mut libc::sem_t {
        self.part::<libc::sem_t>(SLOT_BYTES, 0).as_ptr()
    }

    /// The index after this one.
    pub fn next(&self, index: i32) -> i32 {
        index.wrapping_add(1).rem_euclid(self.slots)
    }

    /// How many entries lie from `tail` on up to `head`; some number below `slots` if they are no indices.
    pub fn distance(&self, head: i32, tail: i32) -> i32 {
        // In the ring's range again after the remainder.
        (i64::from(head) - i64::from(tail)).rem_euclid(i64::from(self.slots)) as i32
    }

    /// `index` if it is one.
    pub fn checked(&self, index: i32) -> Option<usize> {
        (0..self.slots).contains(&index).then_some(index as usize)
    }

    fn counter(&self, number: usize) -> &AtomicI32 {
        // SAFETY: the caller of `new` promised mapped, shared memory, which begins with four aligned counters;
        // any bit pattern is an integer.
        unsafe { self.base.cast::<AtomicI32>().add(number).as_ref() }
    }

    /// Element `index` of the array that begins after `before` bytes for each slot.
    fn part<T>(&self, before: usize, index: usize) -> NonNull<T> {
        let start = COUNTERS_BYTES + before * self.slots as usize;
        // SAFETY: arrays and semaphore lie in the `ring_bytes` bytes that `new` was promised.
        unsafe { self.base.add(start).cast::<T>().add(index) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_where_the_daemon_looks_for_them() {
        let bytes = ring_bytes(7);
        let mut memory = vec![0u64; bytes / 8];
        let base = NonNull::new(memory.as_mut_ptr()).unwrap().cast::<u8>();
        // SAFETY: the memory lives as long as the test.
        let ring = unsafe { RingLayout::new(base, bytes) }.unwrap();
        let offset = |address: usize| address - base.as_ptr() as usize;
        assert_eq!(ring.slots(), 8);
        assert_eq!(offset(ring.sqe_head() as *const _ as usize), 0);
        assert_eq!(offset(ring.sqe_tail() as *const _ as usize), 4);
        assert_eq!(offset(ring.cqe_head() as *const _ as usize), 8);
        assert_eq!(offset(ring.cqe_tail() as *const _ as usize), 12);
        assert_eq!(offset(ring.args(1).unwrap().as_ptr() as usize), 16 + 56);
        assert_eq!(offset(ring.cqe(1).unwrap().as_ptr() as usize), 16 + 8 * 56 + 24);
        assert_eq!(offset(ring.sqe(1).unwrap().as_ptr() as usize), 16 + 8 * (56 + 24) + 16);
        assert_eq!(offset(ring.semaphore() as usize), 16 + 8 * (56 + 24 + 16));
        assert!(ring.args(8).is_none() && ring.cqe(-1).is_none() && ring.sqe(i32::MAX).is_none());
    }

    #[test]
    fn a_ring_is_as_large_as_its_bytes_say() {
        for entries in [1, 2, 63, 64, MAX_ENTRIES] {
            assert_eq!(ring_slots(ring_bytes(entries)), Some(entries as i32 + 1));
            assert_eq!(ring_slots(ring_bytes(entries) - 1), (entries > 1).then_some(entries as i32));
        }
        assert_eq!(ring_slots(0), None);
    }
}
