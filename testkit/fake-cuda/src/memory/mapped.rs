//! Memory without an address, addresses without memory, and what is mapped where. All of it is the process's, not a context's.

use super::device::{self, DeviceMemory};
use crate::{
    control::counters::UNMAPPED_IN_USE,
    execution::{
        context::{self, Owner},
        handles::Table,
    },
    status::{Code, INVALID_VALUE, OUT_OF_MEMORY},
};
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// What memory is allocated and mapped by, as on devices of today.
pub(crate) const GRANULE: u64 = 2 << 20;

/// Memory that was made and not released.
pub(crate) static BLOCKS: Table<Block> = Table::new(0x97B0_0000_0000);

/// Memory of a device. It lives until it is released and mapped nowhere.
pub(crate) struct Block {
    device: usize,
    bytes: u64,
}

struct Space {
    bytes: u64,
    /// Of the window.
    range: Range<u64>,
    device: usize,
    /// By address.
    mapped: BTreeMap<u64, Arc<Block>>,
}

/// Reserved addresses, by the first.
static SPACES: Mutex<BTreeMap<u64, Space>> = Mutex::new(BTreeMap::new());

/// Addresses that are reserved, and blocks that are mapped.
pub(crate) fn counts() -> (u64, u64) {
    let spaces = spaces();
    (spaces.len() as u64, spaces.values().map(|space| space.mapped.len() as u64).sum())
}

pub(crate) fn create(device: usize, bytes: u64) -> Result<usize, Code> {
    check_granules(bytes)?;
    memory(device)?.charge(bytes)?;
    Ok(BLOCKS.insert(Arc::new(Block { device, bytes })))
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Ok(memory) = memory(self.device) {
            memory.discharge(self.bytes);
        }
    }
}

pub(crate) fn reserve(device: usize, bytes: u64) -> Result<u64, Code> {
    check_granules(bytes)?;
    let (address, range) = memory(device)?.reserve(bytes, GRANULE)?;
    spaces().insert(address, Space { bytes, range, device, mapped: BTreeMap::new() });
    Ok(address)
}

/// Gives all of some addresses back, where nothing is mapped any more.
pub(crate) fn unreserve(address: u64, bytes: u64) -> Result<(), Code> {
    let mut spaces = spaces();
    spaces
        .get(&address)
        .filter(|space| space.bytes == bytes && space.mapped.is_empty())
        .ok_or(INVALID_VALUE)?;
    if let Some(space) = spaces.remove(&address) {
        memory(space.device)?.unreserve(space.range);
    }
    Ok(())
}

/// Maps all of a block, which is mapped nowhere else: here, one block at two places would not have one content.
pub(crate) fn map(owner: &Arc<Owner>, address: u64, bytes: u64, handle: usize) -> Result<(), Code> {
    let block = BLOCKS.get(handle).ok_or(INVALID_VALUE)?;
    let mut spaces = spaces();
    if block.bytes != bytes
        || spaces.values().any(|space| space.mapped.values().any(|other| Arc::ptr_eq(other, &block)))
    {
        return Err(INVALID_VALUE);
    }
    let (start, space) = spaces.range_mut(..=address).next_back().ok_or(INVALID_VALUE)?;
    let end = address.checked_add(bytes).filter(|_| address.is_multiple_of(GRANULE)).ok_or(INVALID_VALUE)?;
    let is_free =
        space.mapped.range(..end).next_back().is_none_or(|(first, other)| first + other.bytes <= address);
    if end > start + space.bytes || !is_free || space.device != block.device {
        return Err(INVALID_VALUE);
    }
    memory(block.device)?.map(owner, address, bytes)?;
    space.mapped.insert(address, block);
    Ok(())
}

pub(crate) fn allow(address: u64, bytes: u64) -> Result<(), Code> {
    let spaces = spaces();
    let block = find(&spaces, address, bytes).ok_or(INVALID_VALUE)?;
    memory(block.device)?.allow(address);
    Ok(())
}

/// Unmaps a block. Waits for nothing; counts what streams have yet to do with it.
pub(crate) fn unmap(address: u64, bytes: u64) -> Result<(), Code> {
    let mut spaces = spaces();
    let block = find(&spaces, address, bytes).ok_or(INVALID_VALUE)?.clone();
    if context::has_work_with(block.device, address..address + bytes) {
        UNMAPPED_IN_USE.add(1);
    }
    memory(block.device)?.unmap(address);
    for space in spaces.values_mut() {
        space.mapped.remove(&address);
    }
    Ok(())
}

/// The block that is mapped at an address, with this length.
fn find(spaces: &BTreeMap<u64, Space>, address: u64, bytes: u64) -> Option<&Arc<Block>> {
    let (_, space) = spaces.range(..=address).next_back()?;
    space.mapped.get(&address).filter(|block| block.bytes == bytes)
}

fn check_granules(bytes: u64) -> Result<(), Code> {
    if bytes > 0 && bytes.is_multiple_of(GRANULE) { Ok(()) } else { Err(INVALID_VALUE) }
}

fn memory(device: usize) -> Result<&'static DeviceMemory, Code> {
    device::of_device(device).ok_or(OUT_OF_MEMORY)
}

fn spaces() -> MutexGuard<'static, BTreeMap<u64, Space>> {
    SPACES.lock().unwrap_or_else(PoisonError::into_inner)
}
