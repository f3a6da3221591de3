//! Writes blocks behind loads, by one thread with a bounded backlog.
#![forbid(unsafe_code)]

use super::{
    aligned::AlignedBytes,
    entry::{BLOCK_BYTES, Entry, padded},
    room::Room,
};
use crate::{
    memory::{Grant, Ledger},
    parallel::{lock, thread_named},
};
use hoistway_io::file::FileIdentity;
use std::{
    collections::VecDeque,
    fs::{self, File},
    ops::Range,
    path::{self, Path, PathBuf},
    process,
    sync::{
        Arc, Condvar, Mutex, PoisonError, TryLockError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Bytes that wait to be written, at most.
const BACKLOG_BYTES: u64 = 64 << 20;
/// Blocks that are written at once.
const UNIT_BLOCKS: u64 = 8;
/// How often the lock of the caches that are open is tried, a millisecond each. It is held for a look at a few names.
const LOCK_ATTEMPTS: u32 = 1000;
const UNIT_BYTES: usize = (UNIT_BLOCKS * BLOCK_BYTES) as usize;

/// The blocks of one cache that wait to be written. The thread that writes them ends when there are none.
#[derive(Debug)]
pub(super) struct Writer {
    shared: Arc<Shared>,
    /// A child of `fork` has no thread that writes, and writes nothing.
    process: u32,
}

#[derive(Debug)]
struct Shared {
    room: Room,
    /// Openings that have not ended.
    openings: AtomicUsize,
    state: Mutex<State>,
    drained: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Blocks>,
    bytes: u64,
    is_running: bool,
    /// Memory of blocks that were written, for whole units: no more of it than the backlog may have.
    free: Vec<AlignedBytes>,
}

/// Whole blocks of an entry.
#[derive(Debug)]
struct Blocks {
    entry: Arc<Entry>,
    blocks: Range<u64>,
    memory: AlignedBytes,
    len: u64,
    /// What their memory is of.
    grant: Option<Grant>,
}

/// What openings of a cache have in common that share a backlog: their process, the directory by its own name, which one it is (its
/// device and inode, where these can be had), and the limit.
type Opening = (u32, PathBuf, Option<(u64, u64)>, Option<u64>);

/// The caches that are open, or still written to.
static OPEN: Mutex<Vec<(Opening, Weak<Shared>)>> = Mutex::new(Vec::new());

impl Writer {
    /// The writer of a cache: one for all of its openings in this process.
    pub(super) fn of(root: &Path, max_bytes: Option<u64>) -> Self {
        // One that was named by a link, or from where the process is.
        let own = fs::canonicalize(root).or_else(|_| path::absolute(root));
        let root = own.unwrap_or_else(|_| root.to_owned());
        let make = || {
            let room = Room::new(&root, max_bytes);
            let (openings, state) = (AtomicUsize::new(0), Mutex::default());
            Arc::new(Shared { room, openings, state, drained: Condvar::new() })
        };
        let identity = File::open(&root).and_then(|folder| FileIdentity::of(&folder)).ok();
        let identity = identity.map(|own| (own.device(), own.inode()));
        let opening = (process::id(), root.clone(), identity, max_bytes);
        // A thread of its parent may hold it in a child of `fork`, which then has one for each opening.
        let mut attempts = 0..LOCK_ATTEMPTS;
        let mut open = loop {
            match OPEN.try_lock() {
                Ok(open) => break open,
                Err(TryLockError::Poisoned(open)) => break open.into_inner(),
                Err(TryLockError::WouldBlock) if attempts.next().is_none() => {
                    return Self::opened(make());
                }
                Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(1)),
            }
        };
        open.retain(|(_, shared)| shared.strong_count() > 0);
        let known = open.iter().find(|(own, _)| *own == opening).and_then(|(_, shared)| shared.upgrade());
        Self::opened(known.unwrap_or_else(|| {
            let shared = make();
            // One that ended a moment ago may still be there.
            open.retain(|(own, _)| *own != opening);
            open.push((opening, Arc::downgrade(&shared)));
            shared
        }))
    }

    fn opened(shared: Arc<Shared>) -> Self {
        shared.openings.fetch_add(1, Ordering::Relaxed);
        Self { shared, process: process::id() }
    }

    /// Ends this opening. The last one waits until all is written, no longer than `timeout`.
    pub(super) fn close(&self, timeout: Duration) {
        if self.shared.openings.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.flush(Some(timeout));
        }
    }

    /// The room of its cache.
    pub(super) fn room(&self) -> &Room {
        &self.shared.room
    }

    /// Keeps the whole blocks of `bytes` that are not there.
    pub(super) fn keep(&self, entry: &Arc<Entry>, offset: u64, bytes: &[u8], ledger: Option<&Arc<Ledger>>) {
        if self.process != process::id() {
            return;
        }
        let end = entry.whole_end(offset + bytes.len() as u64);
        let last = end.div_ceil(BLOCK_BYTES);
        let mut first = offset.div_ceil(BLOCK_BYTES);
        let len_of = |blocks: &Range<u64>| end.min(blocks.end * BLOCK_BYTES) - blocks.start * BLOCK_BYTES;
        while first < last {
            let unit = first..last.min(first + UNIT_BLOCKS);
            first = unit.end;
            if entry.refusal().is_some() {
                entry.release(unit);
            } else if !unit.clone().all(|block| entry.is_present(block)) {
                // As many of its blocks as the load has memory for.
                let parts = (unit.start + 1..=unit.end).rev().map(|end| unit.start..end);
                let mut grants = parts.filter_map(|part| {
                    let grant = ledger.map(|ledger| ledger.try_take(padded(len_of(&part))));
                    (!matches!(grant, Some(None))).then(|| (part, grant.flatten()))
                });
                let is_kept = grants.next().is_some_and(|(part, grant)| {
                    first = part.end;
                    let start = (part.start * BLOCK_BYTES - offset) as usize;
                    self.push(entry, &part, &bytes[start..start + len_of(&part) as usize], grant)
                });
                if !is_kept {
                    let left_out = unit.start..first;
                    entry.note_left_out(len_of(&left_out));
                    entry.release(left_out);
                }
            }
        }
    }

    /// `false` if the backlog has no room, or the system no thread.
    fn push(&self, entry: &Arc<Entry>, blocks: &Range<u64>, bytes: &[u8], grant: Option<Grant>) -> bool {
        let len = bytes.len() as u64;
        // What earlier loads have left waiting is in memory beside this one.
        let most = grant.as_ref().map_or(u64::MAX, Grant::limit_bytes).min(BACKLOG_BYTES);
        let mut state = lock(&self.shared.state);
        if state.bytes + len > most {
            return false;
        }
        state.bytes += len;
        entry.hand_to_writer(blocks.clone());
        let taken = padded(len) as usize;
        let free = if taken == UNIT_BYTES { state.free.pop() } else { None };
        drop(state);
        let mut memory = free.unwrap_or_else(|| AlignedBytes::new(taken));
        let place = memory.as_mut_slice();
        place[..bytes.len()].copy_from_slice(bytes);
        place[bytes.len()..].fill(0);
        let mut state = lock(&self.shared.state);
        if !state.is_running {
            let shared = self.shared.clone();
            state.is_running = thread_named("hoistway-cache").spawn(move || shared.write_all()).is_ok();
        }
        if !state.is_running {
            state.bytes -= len;
            return false;
        }
        state.waiting.push_back(Blocks { entry: entry.clone(), blocks: blocks.clone(), memory, len, grant });
        true
    }

    /// Waits until all is written, no longer than `timeout`.
    pub(super) fn flush(&self, timeout: Option<Duration>) {
        if self.process != process::id() {
            return;
        }
        let until = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = lock(&self.shared.state);
        while state.is_running {
            let left =
                until.map_or(Duration::from_secs(1), |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return;
            }
            state = self.shared.drained.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Shared {
    /// Writes until nothing waits.
    fn write_all(&self) {
        loop {
            let mut state = lock(&self.state);
            let Some(next) = state.waiting.pop_front() else {
                state.is_running = false;
                state.free.clear();
                self.drained.notify_all();
                return;
            };
            drop(state);
            let Blocks { entry, blocks, memory, len, grant } = next;
            self.write(&entry, blocks, memory.as_slice());
            drop(entry);
            let mut state = lock(&self.state);
            state.bytes -= len;
            // What is left of a load's budget is the load's again, once the memory is free.
            if memory.as_slice().len() == UNIT_BYTES && !grant.as_ref().is_some_and(Grant::is_limited) {
                state.free.push(memory);
            } else {
                drop(memory);
            }
            drop(grant);
        }
    }

    fn write(&self, entry: &Entry, blocks: Range<u64>, bytes: &[u8]) {
        if entry.refusal().is_none() {
            let written = match self.room.make(bytes.len() as u64) {
                Ok(true) if entry.is_removed() => Err("its entry was removed while it was open".to_owned()),
                Ok(true) => entry.write(blocks.start, bytes).map_err(|error| error.to_string()),
                Ok(false) => Err(self.room.why_full()),
                Err(error) => Err(error.to_string()),
            };
            match written {
                Ok(()) => return,
                Err(why) => entry.refuse(why),
            }
        }
        entry.release(blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn openings_of_a_cache_share_its_writer() {
        let (directory, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let of = |directory: &tempfile::TempDir, most| Writer::of(directory.path(), most);
        // By another name, which the room does not depend on.
        let above = directory.path().parent().unwrap();
        let name = directory.path().file_name().unwrap();
        let other_name = other.path().join("..").join(name);
        let by_other_name = Writer::of(&other_name, Some(5));
        assert_eq!(by_other_name.room().root(), fs::canonicalize(above).unwrap().join(name));
        let first = of(&directory, Some(5));
        let is_same = |own: &Writer| Arc::ptr_eq(&own.shared, &first.shared);
        let again: Vec<_> = (0..9).map(|_| of(&directory, Some(5))).collect();
        assert!(again.iter().all(is_same) && is_same(&by_other_name));
        drop(by_other_name);
        assert!(![of(&directory, Some(6)), of(&directory, None), of(&other, Some(5))].iter().any(is_same));
        drop(again);
        assert!(is_same(&of(&directory, Some(5))));
        // Kept no longer than it is open, or written to.
        let weak = Arc::downgrade(&first.shared);
        drop(first);
        assert!(weak.upgrade().is_none());
    }

    #[test]
    fn what_earlier_loads_have_left_waiting_is_part_of_the_budget_of_later_ones() {
        let directory = tempfile::tempdir().unwrap();
        let writer = Writer::of(directory.path(), Some(1 << 30));
        let room = writer.room();
        [room.objects(), room.temporary()].iter().for_each(|folder| fs::create_dir(folder).unwrap());
        let bytes = vec![7; UNIT_BYTES];
        let is_kept = |earlier_bytes, limit_bytes| {
            let entry = Entry::open(room, "entry", "https://example.org/entry", UNIT_BYTES as u64).unwrap();
            lock(&writer.shared.state).bytes = earlier_bytes;
            writer.keep(&Arc::new(entry), 0, &bytes, Some(&Ledger::new(limit_bytes)));
            writer.flush(None);
            let left = std::mem::take(&mut lock(&writer.shared.state).bytes);
            assert_eq!(left, earlier_bytes, "what was taken is given back");
            let entry = Entry::open(room, "entry", "https://example.org/entry", UNIT_BYTES as u64).unwrap();
            let is_kept = entry.is_present(0);
            drop(entry);
            fs::remove_dir_all(room.objects()).unwrap();
            fs::create_dir(room.objects()).unwrap();
            is_kept
        };
        let (unit, block) = (UNIT_BYTES as u64, BLOCK_BYTES);
        assert!(is_kept(0, unit) && is_kept(unit, 2 * unit) && is_kept(unit, u64::MAX));
        assert!(!is_kept(unit, unit) && !is_kept(2 * unit - block, 2 * unit - block));
        assert!(!is_kept(BACKLOG_BYTES, u64::MAX));
    }
}
