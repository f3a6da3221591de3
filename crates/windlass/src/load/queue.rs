//! Which read is next. One lock, taken a few times an extent: at 4 MiB each it is never contended.
#![forbid(unsafe_code)]

use crate::route::ReadOp;
use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

/// Reads that wait, and how many are not finished in all.
#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

/// Who a waiting read is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// Whoever copies from the page cache: nobody knows yet whether it is cached.
    Unprobed,
    /// A ring.
    Ring,
    /// The thread pool.
    Pool,
    /// Those who read from a 3FS by USRBIO.
    Usrbio,
}

#[derive(Debug, Default)]
struct State {
    unprobed: VecDeque<ReadOp>,
    ring: VecDeque<ReadOp>,
    pool: VecDeque<ReadOp>,
    usrbio: VecDeque<ReadOp>,
    /// Reads of extents that may not be read yet, in their order.
    closed: VecDeque<(Line, ReadOp)>,
    /// How many extents, from the first on, may be read.
    admitted: usize,
    unfinished: usize,
    stopped: bool,
    no_ring: bool,
    /// One thread does everything: no other adds anything while it waits.
    is_alone: bool,
}

impl State {
    fn line(&mut self, line: Line) -> &mut VecDeque<ReadOp> {
        match line {
            Line::Unprobed => &mut self.unprobed,
            Line::Ring if self.no_ring => &mut self.pool,
            Line::Ring => &mut self.ring,
            Line::Pool => &mut self.pool,
            Line::Usrbio => &mut self.usrbio,
        }
    }

    fn admit(&mut self, extents: usize) {
        self.admitted = self.admitted.max(extents);
        while let Some((line, op)) = self.closed.pop_front_if(|(_, op)| op.extent < self.admitted) {
            self.line(line).push_back(op);
        }
    }
}

impl Queue {
    /// Reads in the order of their extents, of which the first `admitted` may begin. `is_alone`: all are made by one
    /// thread, which gets what there is and never waits.
    pub(super) fn new(
        ops: impl IntoIterator<Item = (Line, ReadOp)>,
        admitted: usize,
        is_alone: bool,
    ) -> Self {
        let mut state = State { closed: ops.into_iter().collect(), is_alone, ..State::default() };
        state.unfinished = state.closed.len();
        state.admit(admitted);
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// The next read of a line, if there is one now.
    pub(super) fn try_next(&self, line: Line) -> Option<ReadOp> {
        let mut state = self.state();
        if state.stopped { None } else { state.line(line).pop_front() }
    }

    /// The next read of a line. Waits while others may still add one; `None` once nobody will.
    pub(super) fn next(&self, line: Line) -> Option<ReadOp> {
        let mut state = self.state();
        loop {
            if state.stopped {
                return None;
            }
            if let Some(op) = state.line(line).pop_front() {
                return Some(op);
            }
            if state.unfinished == 0 || state.is_alone {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The next read of a line that nobody adds to but [`Queue::admit`]. Waits as long as that may still happen.
    pub(super) fn next_planned(&self, line: Line) -> Option<ReadOp> {
        let mut state = self.state();
        loop {
            if state.stopped {
                return None;
            }
            if let Some(op) = state.line(line).pop_front() {
                return Some(op);
            }
            if state.closed.is_empty() || state.is_alone {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Lets the reads of the first `extents` begin.
    pub(super) fn admit(&self, extents: usize) {
        let mut state = self.state();
        if extents > state.admitted && !state.closed.is_empty() {
            state.admit(extents);
            self.changed.notify_all();
        }
    }

    /// Whether the reads of an extent may begin.
    pub(super) fn is_admitted(&self, extent: usize) -> bool {
        extent < self.state().admitted
    }

    /// Moves a read that was taken to the end of a line.
    pub(super) fn hand_over(&self, line: Line, op: ReadOp) {
        self.state().line(line).push_back(op);
        self.changed.notify_all();
    }

    /// Puts a read that was taken back to the front of its line.
    pub(super) fn put_back(&self, line: Line, op: ReadOp) {
        self.state().line(line).push_front(op);
        self.changed.notify_all();
    }

    /// One read that was taken is finished.
    pub(super) fn finish_one(&self) {
        let mut state = self.state();
        state.unfinished = state.unfinished.saturating_sub(1);
        if state.unfinished == 0 {
            self.changed.notify_all();
        }
    }

    /// There will be no ring: what waits or will wait for one is the pool's. `true` for the first who says so.
    pub(super) fn give_ring_to_pool(&self) -> bool {
        let mut state = self.state();
        let waiting = std::mem::take(&mut state.ring);
        state.pool.extend(waiting);
        self.changed.notify_all();
        !std::mem::replace(&mut state.no_ring, true)
    }

    /// Whether [`Queue::give_ring_to_pool`] was called.
    pub(super) fn is_without_ring(&self) -> bool {
        self.state().no_ring
    }

    /// Nobody gets another read.
    pub(super) fn stop(&self) {
        let dropped = {
            let mut state = self.state();
            state.stopped = true;
            let State { unprobed, ring, pool, usrbio, closed, .. } = &mut *state;
            ([unprobed, ring, pool, usrbio].map(std::mem::take), std::mem::take(closed))
        };
        self.changed.notify_all();
        drop(dropped);
    }

    /// Whether any read waits in a line, or will.
    pub(super) fn has_any(&self, line: Line) -> bool {
        let mut state = self.state();
        !state.line(line).is_empty() || state.closed.iter().any(|(own, _)| *own == line)
    }

    /// Whether nobody will get another read: all are finished, or the load was stopped.
    pub(super) fn is_over(&self) -> bool {
        let state = self.state();
        state.stopped || state.unfinished == 0
    }

    /// Whether [`Queue::stop`] was called.
    pub(super) fn is_stopped(&self) -> bool {
        self.state().stopped
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change leaves the state consistent, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
