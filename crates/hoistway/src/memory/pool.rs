//! Memory that is touched once and lent to one load after another.
//!
//! First touch of fresh memory can cost more than the drive, most of all in virtual machines. A server that swaps
//! models keeps a pool.
#![forbid(unsafe_code)]

use crate::{
    ByteRange, Error, Result,
    parallel::{self, lock},
};
use bytesize::ByteSize;
use hoistway_io::memory::{HUGE_PAGE_BYTES, Mapping, PageKind};
use std::{
    collections::BTreeMap,
    io::ErrorKind,
    process,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard},
};

/// Memory that one thread touches at a time.
const TOUCH_BYTES: usize = 32 << 20;

/// A region of host memory of fixed size, already touched, from which loads take their arenas.
///
/// A piece comes back when the last tensor on it is dropped. Clones share the region. A child of `fork` keeps the tensors of its parent,
/// and needs a pool of its own for its loads: in that of its parent no byte is free for it.
///
/// ```
/// use hoistway::{LoadOptions, memory::MemoryPool};
/// let pool = MemoryPool::new(64 << 20)?;
/// let options = LoadOptions::default().pool(pool.clone());
/// assert_eq!(pool.free_bytes(), 64 << 20);
/// # Ok::<(), hoistway::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MemoryPool {
    shared: Arc<PoolMemory>,
}

#[derive(Debug)]
struct PoolMemory {
    mapping: Mapping,
    /// The process whose loads take pieces.
    process: u32,
    /// Start and length of each free piece; neighbours are merged.
    free: Mutex<BTreeMap<usize, usize>>,
}

impl MemoryPool {
    /// A pool of at least `bytes`, rounded up to huge pages. Touches them all, on all cores.
    ///
    /// # Errors
    /// [`Error::Allocation`], or [`Error::MemoryBudget`] if the machine or its cgroup has less to give.
    pub fn new(bytes: u64) -> Result<Self> {
        let rounded = bytes.checked_next_multiple_of(HUGE_PAGE_BYTES as u64).unwrap_or(u64::MAX);
        super::budget::check(rounded, 0, None)?;
        let len = rounded as usize;
        let failed = |source| Error::Allocation { bytes: rounded, kind: "pooled memory", source };
        let mut mapping = Mapping::anonymous(len, PageKind::TransparentHuge).map_err(failed)?;
        match touch(&mapping) {
            // Before Linux 5.14, and on systems without such a call.
            Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => {
                mapping.fill_with_zeros();
            }
            touched => touched.map_err(failed)?,
        }
        let free = if len > 0 { BTreeMap::from([(0, len)]) } else { BTreeMap::new() };
        Ok(Self { shared: Arc::new(PoolMemory { mapping, process: process::id(), free: Mutex::new(free) }) })
    }

    /// Size of the whole pool in bytes.
    pub fn capacity_bytes(&self) -> u64 {
        self.shared.mapping.len() as u64
    }

    /// Bytes that no load holds.
    pub fn free_bytes(&self) -> u64 {
        self.shared.free().map_or(0, |free| free.values().map(|&len| len as u64).sum())
    }

    /// Takes the first piece of `len` bytes.
    ///
    /// # Errors
    /// [`Error::MemoryBudget`], [`Error::Forked`].
    pub(super) fn take(&self, len: usize) -> Result<PoolPiece> {
        let needed = len.checked_next_multiple_of(HUGE_PAGE_BYTES).unwrap_or(usize::MAX);
        let mut free = self.shared.free().ok_or(Error::Forked)?;
        let Some((&start, &found)) = free.iter().find(|(_, found)| **found >= needed) else {
            let largest = free.values().copied().max().unwrap_or(0);
            return Err(Error::MemoryBudget {
                needed: needed as u64,
                available: largest as u64,
                limit_name: format!("the memory pool of {}", ByteSize(self.capacity_bytes())),
                fix: "make the pool larger, or drop tensors of earlier loads".into(),
            });
        };
        free.remove(&start);
        if found > needed {
            free.insert(start + needed, found - needed);
        }
        drop(free);
        Ok(PoolPiece { shared: self.shared.clone(), start, len: needed })
    }
}

impl PoolMemory {
    /// The free pieces. `None` in a child of `fork`: a thread of its parent may have had the lock.
    fn free(&self) -> Option<MutexGuard<'_, BTreeMap<usize, usize>>> {
        (self.process == process::id()).then(|| lock(&self.free))
    }
}

/// A piece of a pool, given back on drop.
#[derive(Debug)]
pub(super) struct PoolPiece {
    shared: Arc<PoolMemory>,
    start: usize,
    len: usize,
}

impl PoolPiece {
    pub(super) fn pointer(&self, offset: usize) -> NonNull<u8> {
        assert!(offset <= self.len, "offset {offset} of a piece of {} bytes", self.len);
        self.shared.mapping.pointer(self.start + offset)
    }
}

impl Drop for PoolPiece {
    fn drop(&mut self) {
        let Some(mut free) = self.shared.free() else { return };
        let (mut start, mut len) = (self.start, self.len);
        if let Some((&before, &before_len)) = free.range(..start).next_back()
            && before + before_len == start
        {
            free.remove(&before);
            (start, len) = (before, len + before_len);
        }
        if let Some(after_len) = free.remove(&(start + len)) {
            len += after_len;
        }
        free.insert(start, len);
    }
}

fn touch(mapping: &Mapping) -> std::io::Result<()> {
    let parts: Vec<ByteRange> = (0..mapping.len())
        .step_by(TOUCH_BYTES)
        .filter_map(|start| ByteRange::new(start as u64, mapping.len().min(start + TOUCH_BYTES) as u64))
        .collect();
    parallel::map(&parts, parallel::cores(), |part| mapping.populate(*part)).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The child neither waits for the lock, which no thread of it has, nor says that its parent's piece is free.
    #[test]
    #[cfg(unix)]
    fn a_child_of_fork_takes_no_lock_of_its_parents() {
        let pool = MemoryPool::new(1).unwrap();
        let mut piece = Some(pool.take(1).unwrap());
        let held = lock(&pool.shared.free);
        super::super::in_child(|| {
            drop(piece.take());
            assert_eq!(pool.free_bytes(), 0);
            assert!(matches!(pool.take(1), Err(Error::Forked)));
        });
        drop(held);
        drop(piece);
        assert_eq!(pool.free_bytes(), pool.capacity_bytes());
    }

    #[test]
    fn pieces_come_back_and_merge() {
        let pool = MemoryPool::new(5 * HUGE_PAGE_BYTES as u64 - 1).unwrap();
        assert_eq!(pool.capacity_bytes(), 5 * HUGE_PAGE_BYTES as u64);
        let a = pool.take(1).unwrap();
        let b = pool.take(2 * HUGE_PAGE_BYTES).unwrap();
        let c = pool.take(2 * HUGE_PAGE_BYTES).unwrap();
        assert_eq!(pool.free_bytes(), 0);
        assert!(matches!(pool.take(1), Err(Error::MemoryBudget { .. })));
        drop(b);
        drop(a);
        drop(c);
        assert_eq!(pool.free_bytes(), pool.capacity_bytes());
        pool.take(5 * HUGE_PAGE_BYTES).expect("the pieces merged into one");
    }
}
