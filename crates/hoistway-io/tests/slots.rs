//! Staging slots and children of `fork`.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

use hoistway_device::{
    Device, DeviceId,
    toy::{self, Fault},
};
use hoistway_io::memory::{Mapping, PageKind, Pinning, SharedMemory, SlotKind, Slots};
use std::{ptr::NonNull, sync::Arc};

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

#[derive(Debug)]
struct Memory(Mapping);

// SAFETY: the mapping lives as long, and has as many bytes.
unsafe impl SharedMemory for Memory {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn address(&self, offset: usize) -> NonNull<u8> {
        self.0.pointer(offset)
    }

    fn off_node(&self) -> Option<String> {
        Some("not on its node".into())
    }

    fn copy_to(&self, _: usize, _: usize, _: &mut [u8]) -> bool {
        false
    }

    fn copy_from(&self, _: usize, _: usize, _: &[u8]) -> bool {
        false
    }

    fn is_lent(&self, _: usize) -> bool {
        false
    }
}

#[test]
fn shared_slots_that_cannot_be_pinned_are_short_beside_those_that_can() {
    let device = Device::open(DeviceId::Toy(0)).unwrap();
    let mapping = Mapping::anonymous(4 * 4096, PageKind::Default).unwrap();
    let memory: Arc<dyn SharedMemory> = Arc::new(Memory(mapping));
    let slots = Slots::new(4, 4096, SlotKind::Shared { memory: &memory, device: Some(&device) }).unwrap();
    assert_eq!(slots.off_node().as_deref(), Some("not on its node"));
    let [first, second, third] = [(); 3].map(|()| slots.try_take().unwrap());
    toy::fail(Fault::PinLimit, Some(1));
    assert!(first.pin().is_err(), "not even one");
    toy::reset();
    assert_eq!(first.pin().unwrap(), Pinning::Ready);
    assert_eq!(slots.pinned_short(), None);
    toy::fail(Fault::PinLimit, Some(1));
    assert_eq!(second.pin().unwrap(), Pinning::Short);
    toy::reset();
    assert_eq!(third.pin().unwrap(), Pinning::Short, "no more are asked for");
    let short = slots.pinned_short().unwrap();
    assert!(short.contains("4.0 KiB of staging memory were pinned, and no more: "), "{short}");
    second.withdraw();
    drop((first, third, slots));
    hoistway_device::release_devices();
}

/// A node's refusal costs speed, no bytes, and is told.
#[test]
fn slots_on_a_node_that_is_not_there_are_on_any() {
    let slots = Slots::new(2, 4096, SlotKind::HostOn(900)).unwrap();
    let mut slot = slots.try_take().unwrap();
    slot.as_mut_slice().fill(7);
    let note = slots.off_node().unwrap();
    assert!(note.contains("any node") && note.contains("NUMA node 900"), "{note}");
    assert_eq!(Slots::new(2, 4096, SlotKind::Host).unwrap().off_node(), None);
}
