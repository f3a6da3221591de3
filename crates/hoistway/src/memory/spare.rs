//! Memory that later reads take over from earlier ones, so that its pages are touched once.
#![allow(unsafe_code)]

use crate::{ByteRange, Error, Result, parallel::lock};
use hoistway_io::memory::{Mapping, PageKind};
use std::{
    collections::VecDeque,
    ptr::NonNull,
    sync::{Arc, Mutex, Weak},
};

/// Fresh memory is a multiple of this long, so that reads of nearly one length can use it in turn.
const GRID_BYTES: usize = 64 << 10;

/// Host memory that reads take over from earlier reads whose bytes were dropped.
///
/// The system zeroes fresh memory, and gives it page by page as it is touched, which can take longer than the read. Memory that comes
/// back was touched before. What is still held keeps its memory, also after the last clone of this is gone, which frees what is spare.
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
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Memory that nothing uses, the oldest first.
    spare: VecDeque<Touched>,
    /// Bytes of all memory, used or spare, that may have been touched.
    bytes: u64,
    allocations: u64,
}

/// Memory, of which bytes at its start may have been touched.
#[derive(Debug)]
struct Touched {
    mapping: Mapping,
    bytes: usize,
}

/// Memory of one read. It is spare once it is dropped.
#[derive(Debug)]
pub(super) struct SparePiece {
    /// Until it is dropped.
    memory: Option<Touched>,
    home: Weak<Spares>,
}

impl SpareMemory {
    /// Makes one without memory. Spare memory is freed as far as that, together with what is used, exceeds `limit_bytes`. Reads that
    /// need more get it all the same.
    pub fn new(limit_bytes: u64) -> Self {
        Self(Arc::new(Spares { limit_bytes, state: Mutex::default() }))
    }

    /// Returns the bytes of all memory, used or spare, in whole blocks of reads.
    pub fn bytes(&self) -> u64 {
        lock(&self.0.state).bytes
    }

    /// Returns how often memory was allocated because none was spare that was long enough.
    pub fn allocations(&self) -> u64 {
        lock(&self.0.state).allocations
    }

    /// Takes memory for `len` bytes. They hold zeros, or what earlier reads left.
    pub(super) fn take(&self, len: usize) -> Result<SparePiece> {
        let mut state = lock(&self.0.state);
        // What is far longer is left to reads of that length: here its end would be given back to the system.
        let fitting = state.spare.iter().enumerate().filter(|(_, spare)| {
            spare.mapping.len() >= len && spare.mapping.len() / 2 <= len.max(GRID_BYTES)
        });
        let shortest = fitting.min_by_key(|(_, spare)| spare.mapping.len()).map(|(position, _)| position);
        let reused = shortest.and_then(|position| state.spare.remove(position));
        let touched = reused.as_ref().map_or(0, |spare| spare.bytes);
        state.bytes = state.bytes.saturating_sub(touched as u64).saturating_add(len as u64);
        state.allocations += u64::from(reused.is_none());
        let excess = state.excess(self.0.limit_bytes);
        // Without the lock: the system takes its time.
        drop(state);
        drop(excess);
        let memory = match reused {
            Some(Touched { mapping, .. }) => {
                if let Some(end) = ByteRange::new(len as u64, touched as u64) {
                    // SAFETY: an arena had the memory, and was dropped: nothing refers to its bytes. Those from `len` on are not
                    // asked for while this piece is used.
                    unsafe { mapping.release(end) };
                }
                Ok(mapping)
            }
            None => {
                let rounded = len.checked_next_multiple_of(GRID_BYTES).unwrap_or(len);
                Mapping::anonymous(rounded, PageKind::TransparentHuge)
            }
        };
        match memory {
            Ok(mapping) => {
                let memory = Some(Touched { mapping, bytes: len });
                Ok(SparePiece { memory, home: Arc::downgrade(&self.0) })
            }
            Err(source) => {
                lock(&self.0.state).bytes -= len as u64;
                Err(Error::Allocation { bytes: len as u64, kind: "memory", source })
            }
        }
    }
}

impl State {
    /// Takes out spare memory, the oldest first, as far as all memory exceeds `limit_bytes`.
    fn excess(&mut self, limit_bytes: u64) -> Vec<Touched> {
        let mut excess = Vec::new();
        while self.bytes > limit_bytes
            && let Some(oldest) = self.spare.pop_front()
        {
            self.bytes -= oldest.bytes as u64;
            excess.push(oldest);
        }
        excess
    }
}

impl SparePiece {
    pub(super) fn pointer(&self, offset: usize) -> NonNull<u8> {
        match &self.memory {
            Some(memory) => memory.mapping.pointer(offset),
            None => unreachable!("memory is asked for while it is dropped"),
        }
    }
}

impl Drop for SparePiece {
    fn drop(&mut self) {
        let (Some(memory), Some(home)) = (self.memory.take(), self.home.upgrade()) else { return };
        let mut state = lock(&home.state);
        state.spare.push_back(memory);
        let excess = state.excess(home.limit_bytes);
        drop(state);
        drop(excess);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn memory_that_comes_back_is_taken_again() {
        let memory = SpareMemory::new(8 * MIB as u64);
        let (first, second) = (memory.take(2 * MIB).unwrap(), memory.take(2 * MIB).unwrap());
        let (kept, address) = (second.pointer(0), first.pointer(0));
        assert_ne!(kept, address);
        drop(first);
        // Lengths that differ by less than the grid share memory.
        let third = memory.take(2 * MIB - 4096).unwrap();
        assert_eq!(third.pointer(0), address);
        assert_eq!((memory.allocations(), memory.bytes()), (2, 4 * MIB as u64 - 4096));
        let fourth = memory.take(2 * MIB).unwrap();
        assert_ne!(fourth.pointer(0), kept);
        assert_eq!(memory.allocations(), 3);
    }

    #[test]
    fn what_lies_past_the_end_of_a_shorter_read_is_given_back() {
        let memory = SpareMemory::new(8 * MIB as u64);
        let first = memory.take(2 * MIB).unwrap();
        // SAFETY: the piece has these bytes, and nothing else refers to them.
        let byte = |piece: &SparePiece, offset| unsafe { piece.pointer(offset).read() };
        // SAFETY: as above.
        unsafe { first.pointer(0).write_bytes(7, 2 * MIB) };
        drop(first);
        let shorter = memory.take(MIB + 4096).unwrap();
        assert_eq!(memory.bytes(), MIB as u64 + 4096);
        assert_eq!((byte(&shorter, 0), byte(&shorter, MIB + 4095)), (7, 7));
        assert_eq!(byte(&shorter, 2 * MIB - 1), 0);
    }

    #[test]
    fn spare_memory_makes_room_within_the_limit() {
        let memory = SpareMemory::new(4 * MIB as u64);
        let pieces = [memory.take(MIB).unwrap(), memory.take(2 * MIB).unwrap()];
        drop(pieces);
        assert_eq!(memory.bytes(), 3 * MIB as u64);
        // Neither is long enough, and both make room.
        let long = memory.take(3 * MIB - 4096).unwrap();
        assert_eq!((memory.bytes(), memory.allocations()), (3 * MIB as u64 - 4096, 3));
        // More than the limit is given, and not kept.
        let over = memory.take(2 * MIB).unwrap();
        assert_eq!(memory.bytes(), 5 * MIB as u64 - 4096);
        drop(over);
        assert_eq!(memory.bytes(), 3 * MIB as u64 - 4096);
        drop(long);
        // Far shorter reads leave it to others.
        let short = memory.take(MIB).unwrap();
        assert_eq!((memory.bytes(), memory.allocations()), (4 * MIB as u64 - 4096, 5));
        drop(memory);
        assert_eq!(short.home.strong_count(), 0);
    }
}
