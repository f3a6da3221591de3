//! Staging slots and children of `fork`.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

use hoistway_io::memory::{SlotKind, Slots};

/// A page that a read or a device fills must not become a copy when the process forks.
#[test]
fn children_of_fork_do_not_get_slots() {
    let slots = Slots::new(2, 4096, SlotKind::Host).unwrap();
    let mut slot = slots.try_take().unwrap();
    slot.as_mut_slice().fill(7);
    let page = slot.as_mut_slice().as_mut_ptr().cast();
    let is_mapped = || {
        let mut is_resident = 0u8;
        // SAFETY: asks about one page, and writes one byte. Fails if the page is not mapped.
        unsafe { libc::mincore(page, 4096, &raw mut is_resident) == 0 }
    };
    assert!(is_mapped());
    // SAFETY: the child makes one system call and leaves.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_there = is_mapped();
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(i32::from(is_there)) };
    }
    let mut status = -1;
    // SAFETY: a child of this test, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child has the slots");
}
