//! A ring as the daemon serves it: batches in, completions out.
#![allow(unsafe_code)]

use crate::mapping::Mapping;
use hoistway_usrbio::{
    RingKey,
    proto::{Cqe, IoArgs, RingLayout, Sqe},
};
use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering::SeqCst},
};

/// One ring, and how far the daemon is with it.
pub(crate) struct ServedRing {
    layout: RingLayout,
    // What `layout` points to.
    _mapping: Mapping,
    key: RingKey,
    progress: Mutex<Progress>,
}

// SAFETY: the layout is only an address; what lies there is changed under the lock of `progress`, or by the client.
unsafe impl Sync for ServedRing {}

#[derive(Default)]
struct Progress {
    /// Up to where submissions are in batches.
    taken: i32,
    /// How many transfers are in batches.
    processing: i32,
    /// Whether there are submissions that found no room.
    waiting: bool,
    /// The batches, in order: where each ends, and whether it is done.
    batches: VecDeque<(i32, bool)>,
}

/// Submissions that are carried out together.
pub(crate) struct Batch {
    pub(crate) ring: Arc<ServedRing>,
    start: i32,
    count: i32,
}

impl ServedRing {
    /// Takes over a client's ring; `None` if the memory is too little.
    pub(crate) fn new(mapping: Mapping, key: RingKey) -> Option<Self> {
        // SAFETY: the mapping is kept as long as the layout.
        let layout = unsafe { RingLayout::new(mapping.base(), mapping.len()) }?;
        if key.io_depth >= layout.slots() {
            return None;
        }
        // SAFETY: the semaphore is inside the mapping, and nothing waits on it yet.
        unsafe { libc::sem_init(layout.semaphore(), 1, 0) };
        Some(Self { layout, _mapping: mapping, key, progress: Mutex::default() })
    }

    pub(crate) fn key(&self) -> &RingKey {
        &self.key
    }

    /// Up to `most` batches of what was submitted.
    pub(crate) fn take_batches(self: &Arc<Self>, most: usize) -> Vec<Batch> {
        let (ring, mut batches) = (&self.layout, Vec::new());
        let mut progress = self.progress();
        let head = ring.sqe_head().load(SeqCst).rem_euclid(ring.slots());
        let mut pending = ring.distance(head, progress.taken);
        let uncollected = ring.distance(ring.cqe_head().load(SeqCst), ring.cqe_tail().load(SeqCst));
        let mut room = ring.slots() - 1 - progress.processing - uncollected;
        while batches.len() < most && pending > 0 {
            let depth = self.key.io_depth;
            let count = match depth {
                1.. if depth > pending || depth > room => 0,
                1.. => depth,
                0 => pending.min(room),
                ..0 => pending.min(room).min(depth.saturating_neg()),
            };
            if count <= 0 {
                break;
            }
            batches.push(Batch { ring: self.clone(), start: progress.taken, count });
            progress.taken = (progress.taken + count) % ring.slots();
            progress.processing += count;
            let end = progress.taken;
            progress.batches.push_back((end, false));
            pending -= count;
            room -= count;
        }
        progress.waiting = pending > 0;
        batches
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Batch {
    /// What is to be done; `None` for a submission that names no arguments.
    pub(crate) fn transfers(&self) -> Vec<(Sqe, Option<IoArgs>)> {
        let ring = &self.ring.layout;
        (0..self.count)
            .filter_map(|position| {
                let place = ring.sqe((self.start + position) % ring.slots())?;
                // SAFETY: inside the ring; any bit pattern is a submission.
                let sqe = unsafe { place.read_volatile() };
                // SAFETY: as above.
                Some((sqe, ring.args(sqe.index).map(|place| unsafe { place.read_volatile() })))
            })
            .collect()
    }

    /// Tells the client of results. Whether the ring has submissions that there may be room for now.
    pub(crate) fn complete(self, results: impl Iterator<Item = (Sqe, i64)>) -> bool {
        let ring = &self.ring.layout;
        let end = (self.start + self.count) % ring.slots();
        let mut progress = self.ring.progress();
        if let Some(batch) = progress.batches.iter_mut().find(|(batch, done)| *batch == end && !done) {
            batch.1 = true;
        }
        // Entries are given back in the order of batches, whichever is done first.
        while let Some((end, true)) = progress.batches.front().copied() {
            ring.sqe_tail().store(end, SeqCst);
            progress.batches.pop_front();
        }
        for (sqe, result) in results {
            let head = ring.cqe_head().load(SeqCst);
            let Some(place) = ring.cqe(head) else { break };
            // SAFETY: inside the ring; the client reads it after `cqe_head` has moved.
            unsafe {
                place.write_volatile(Cqe { index: sqe.index, reserved: 0, result, user_data: sqe.user_data })
            };
            ring.cqe_head().store(ring.next(head), SeqCst);
        }
        progress.processing -= self.count;
        let waiting = progress.waiting;
        drop(progress);
        // SAFETY: initialised by `new`, inside the mapping.
        unsafe { libc::sem_post(ring.semaphore()) };
        waiting
    }
}
