//! Memory that later reads take over from earlier ones, so that its pages are touched once.
#![allow(unsafe_code)]

use crate::{Alignment, ByteRange, Error, Result, parallel::lock};
use arc_swap::ArcSwapOption;
use hoistway_io::memory::{Mapping, PageKind};
use std::{
    collections::VecDeque,
    mem, process,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, Weak},
};

/// All that has spare memory, for those that find too little. No lock, which a child of `fork` could wait for.
static ALL: ArcSwapOption<Vec<Weak<Spares>>> = ArcSwapOption::const_empty();

/// Host memory that reads take over from earlier reads whose bytes were dropped.
///
/// The system zeroes fresh memory, and gives it page by page as it is touched, which can take longer than the read. Memory that comes
/// back was touched before. Reads of one length use it in turn; it is never cut. What is still held keeps its memory, also after the last
/// clone of this is gone, which frees what is spare. Spare memory is also freed where this process finds too little. A child of `fork`
/// keeps what its parent holds, and needs spare memory of its own for its reads.
///
/// ```
/// # let path = std::env::temp_dir().join(format!("hoistway-doc-spare-{}", std::process::id()));
/// # std::fs::write(&path, [7; 9000])?;
/// use hoistway::{ByteRange, memory::SpareMemory, read::{Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target}};
/// let (reader, file) = (Reader::new(&ReaderOptions::default())?, ReadFile::open(&path)?);
/// let memory = SpareMemory::new(1 << 20);
/// for start in [0, 3000, 6000] {
///     let range = ByteRange::at(start, 3000).unwrap();
///     let batch = reader.submit([ReadRequest::new(&file, range, Target::memory_of(&memory))], Priority::Demand)?;
///     batch.wait().unwrap();
///     let bytes = batch.take(0).unwrap();
///     assert_eq!(bytes[..], [7; 3000]);
/// }
/// assert_eq!(memory.allocations(), 1);
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct SpareMemory(Arc<Spares>);

#[derive(Debug)]
struct Spares {
    limit_bytes: u64,
    /// The process whose reads take memory.
    process: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Memory that nothing uses, the oldest first.
    spare: VecDeque<Mapping>,
    /// Bytes of all memory, used or spare.
    bytes: u64,
    allocations: u64,
    /// Nothing stays spare.
    is_retired: bool,
}

/// Memory of one read. It is spare once it is dropped.
#[derive(Debug)]
pub(super) struct SparePiece {
    /// Until it is dropped.
    mapping: Option<Mapping>,
    home: Weak<Spares>,
}

impl SpareMemory {
    /// Makes one without memory. Spare memory is freed as far as that, together with what is used, exceeds `limit_bytes`. Reads that
    /// need more get it all the same.
    pub fn new(limit_bytes: u64) -> Self {
        let spares = Arc::new(Spares { limit_bytes, process: process::id(), state: Mutex::default() });
        ALL.rcu(|all| {
            let all = all.iter().flat_map(|all| all.iter()).filter(|spares| spares.strong_count() > 0);
            Some(Arc::new(all.cloned().chain([Arc::downgrade(&spares)]).collect()))
        });
        Self(spares)
    }

    /// Bytes of memory for a read of `range`, with room for the blocks that it touches. Reads of one length need as many wherever they
    /// begin, unless it is a multiple of a block. `None` if they end past 2^64.
    pub fn bytes_for(range: ByteRange) -> Option<u64> {
        let blocks = range.aligned_hull(Alignment::BLOCK)?;
        if range.is_empty() || Alignment::BLOCK.divides(range.len()) {
            return Some(blocks.len());
        }
        Alignment::BLOCK.up(range.len())?.checked_add(Alignment::BLOCK.bytes())
    }

    /// Returns the bytes of all memory, used or spare.
    pub fn bytes(&self) -> u64 {
        self.0.state().map_or(0, |state| state.bytes)
    }

    /// Returns how often memory was allocated because none of that length was spare.
    pub fn allocations(&self) -> u64 {
        self.0.state().map_or(0, |state| state.allocations)
    }

    /// Frees spare memory. Returns its bytes.
    pub fn clear(&self) -> u64 {
        self.0.clear()
    }

    /// Frees spare memory, and from now on memory that comes back.
    pub fn retire(&self) {
        if let Some(mut state) = self.0.state() {
            state.is_retired = true;
        }
        self.clear();
    }

    /// Takes `len` bytes. They hold zeros, or what earlier reads left.
    ///
    /// # Errors
    /// [`Error::Allocation`], [`Error::Forked`].
    pub(super) fn take(&self, len: usize) -> Result<SparePiece> {
        let piece = |mapping| SparePiece { mapping: Some(mapping), home: Arc::downgrade(&self.0) };
        let mut state = self.0.state().ok_or(Error::Forked)?;
        let same = state.spare.iter().position(|spare| spare.len() == len);
        if let Some(mapping) = same.and_then(|position| state.spare.remove(position)) {
            return Ok(piece(mapping));
        }
        state.bytes = state.bytes.saturating_add(len as u64);
        let excess = state.excess(&self.0);
        // Without the lock: the system takes its time.
        drop(state);
        drop(excess);
        let allocate = || Mapping::anonymous(len, PageKind::HugeWithin);
        let allocated = match allocate() {
            Err(_) if self.clear() > 0 => allocate(),
            other => other,
        };
        let mut state = self.0.state().ok_or(Error::Forked)?;
        match allocated {
            Ok(mapping) => {
                state.allocations += 1;
                Ok(piece(mapping))
            }
            Err(source) => {
                state.bytes -= len as u64;
                Err(Error::Allocation { bytes: len as u64, kind: "memory", source })
            }
        }
    }
}

/// Frees all memory of this process that is spare. Returns whether there was any.
pub(super) fn clear_all() -> bool {
    let all = ALL.load_full();
    let all = all.iter().flat_map(|all| all.iter()).filter_map(Weak::upgrade);
    all.map(|spares| spares.clear()).sum::<u64>() > 0
}

impl Spares {
    /// What it has. `None` in a child of `fork`: a thread of its parent may have had the lock.
    fn state(&self) -> Option<MutexGuard<'_, State>> {
        (self.process == process::id()).then(|| lock(&self.state))
    }

    fn clear(&self) -> u64 {
        let Some(mut state) = self.state() else { return 0 };
        let spare = mem::take(&mut state.spare);
        let bytes = spare.iter().map(|mapping| mapping.len() as u64).sum();
        state.bytes -= bytes;
        drop(state);
        bytes
    }
}

impl State {
    /// Takes out spare memory, the oldest first, as far as all memory exceeds the limit.
    fn excess(&mut self, spares: &Spares) -> Vec<Mapping> {
        let mut excess = Vec::new();
        while (self.is_retired || self.bytes > spares.limit_bytes)
            && let Some(oldest) = self.spare.pop_front()
        {
            self.bytes -= oldest.len() as u64;
            excess.push(oldest);
        }
        excess
    }
}

impl SparePiece {
    pub(super) fn pointer(&self, offset: usize) -> NonNull<u8> {
        match &self.mapping {
            Some(mapping) => mapping.pointer(offset),
            None => unreachable!("memory is asked for while it is dropped"),
        }
    }
}

impl Drop for SparePiece {
    fn drop(&mut self) {
        let (Some(mapping), Some(home)) = (self.mapping.take(), self.home.upgrade()) else { return };
        let Some(mut state) = home.state() else { return };
        state.spare.push_back(mapping);
        let excess = state.excess(&home);
        drop(state);
        drop(excess);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn nothing_stays_spare_once_it_is_retired() {
        let memory = SpareMemory::new(8 * MIB as u64);
        let (first, second) = (memory.take(2 * MIB).unwrap(), memory.take(MIB).unwrap());
        drop(first);
        memory.retire();
        assert_eq!((memory.bytes(), memory.allocations()), (MIB as u64, 2));
        drop(second);
        assert_eq!((memory.bytes(), memory.allocations()), (0, 2));
    }

    #[test]
    fn memory_that_comes_back_is_taken_again() {
        let memory = SpareMemory::new(8 * MIB as u64);
        let (first, second) = (memory.take(2 * MIB).unwrap(), memory.take(2 * MIB).unwrap());
        let (kept, address) = (second.pointer(0), first.pointer(0));
        assert_ne!(kept, address);
        drop(first);
        // Of other lengths, none is.
        let shorter = memory.take(2 * MIB - 4096).unwrap();
        assert_ne!(shorter.pointer(0), address);
        assert_eq!((memory.allocations(), memory.bytes()), (3, 6 * MIB as u64 - 4096));
        let third = memory.take(2 * MIB).unwrap();
        assert_eq!(third.pointer(0), address);
        assert_eq!((memory.allocations(), memory.bytes()), (3, 6 * MIB as u64 - 4096));
        assert_ne!(memory.take(2 * MIB).unwrap().pointer(0), kept);
        assert_eq!(memory.allocations(), 4);
    }

    /// The child waits for none: no thread of it has the lock.
    #[test]
    #[cfg(unix)]
    fn a_child_of_fork_takes_no_lock_of_its_parents() {
        let memory = SpareMemory::new(MIB as u64);
        let mut piece = Some(memory.take(MIB).unwrap());
        let held = lock(&memory.0.state);
        super::super::in_child(|| {
            drop(piece.take());
            assert_eq!((memory.bytes(), memory.allocations(), memory.clear()), (0, 0, 0));
            assert!(matches!(memory.take(MIB), Err(Error::Forked)));
            drop(SpareMemory::new(MIB as u64).take(MIB).unwrap());
            clear_all();
        });
        drop(held);
        drop(piece);
        assert_eq!(memory.clear(), MIB as u64);
    }

    #[test]
    fn spare_memory_makes_room_within_the_limit() {
        let memory = SpareMemory::new(4 * MIB as u64);
        let pieces = [memory.take(MIB).unwrap(), memory.take(2 * MIB).unwrap()];
        drop(pieces);
        assert_eq!(memory.bytes(), 3 * MIB as u64);
        // Neither has that length, and both make room.
        let long = memory.take(3 * MIB).unwrap();
        assert_eq!((memory.bytes(), memory.allocations()), (3 * MIB as u64, 3));
        // More than the limit is given, and not kept.
        let over = memory.take(2 * MIB).unwrap();
        assert_eq!(memory.bytes(), 5 * MIB as u64);
        drop(over);
        assert_eq!(memory.bytes(), 3 * MIB as u64);
        drop(long);
        let short = memory.take(MIB).unwrap();
        assert_eq!((memory.bytes(), memory.allocations()), (4 * MIB as u64, 5));
        // What is held stays.
        assert_eq!((memory.clear(), memory.clear()), (3 * MIB as u64, 0));
        assert_eq!(memory.bytes(), MIB as u64);
        drop(memory);
        assert_eq!(short.home.strong_count(), 0);
    }

    #[test]
    fn memory_that_cannot_be_had_frees_what_is_spare_and_does_not_count() {
        let memory = SpareMemory::new(u64::MAX);
        drop(memory.take(MIB).unwrap());
        assert_eq!(memory.bytes(), MIB as u64);
        let error = memory.take(usize::MAX >> 1).unwrap_err();
        assert!(matches!(error, Error::Allocation { .. }), "{error}");
        assert_eq!((memory.bytes(), memory.allocations()), (0, 1));
    }

    #[test]
    fn reads_of_one_length_take_as_much_memory_wherever_they_begin() {
        let bytes = |start, len| SpareMemory::bytes_for(ByteRange::at(start, len).unwrap());
        for start in [0, 1, 4095, 4096, 5000] {
            for (len, expected) in [(1, 8192), (4095, 8192), (4097, 12288), (0, 0)] {
                let found = bytes(start, len).unwrap();
                assert!(found == expected || len == 0 && found <= 4096, "{len} at {start}: {found}");
            }
        }
        assert_eq!((bytes(8192, 4096), bytes(8191, 4096)), (Some(4096), Some(8192)));
        assert_eq!(bytes(u64::MAX - 3, 2), None);
    }
}
