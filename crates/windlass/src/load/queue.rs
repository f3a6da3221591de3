//! Which read is next. One lock, taken a few times an extent: at 4 MiB each it is never contended.
#![forbid(unsafe_code)]

use crate::route::ReadOp;
use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

/// The routes that may make a read, as bits: a route's place in the load's order of preference is its number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Takers(u32);

impl Takers {
    /// Most routes of a load.
    pub(super) const MOST: usize = u32::BITS as usize;

    pub(super) fn of(routes: impl IntoIterator<Item = usize>) -> Self {
        Self(routes.into_iter().fold(0, |bits, route| bits | 1 << route))
    }

    /// The best of them, from number `first` on.
    pub(super) fn from(self, first: usize) -> Option<usize> {
        let bits = self.0.checked_shr(first as u32)?;
        (bits != 0).then(|| first + bits.trailing_zeros() as usize)
    }

    fn without(self, given_up: Self) -> Self {
        Self(self.0 & !given_up.0)
    }
}

/// Reads that wait, a queue for each route, and how many are not finished in all.
#[derive(Debug)]
pub(super) struct ReadQueue {
    state: Mutex<State>,
    changed: Condvar,
    /// For each extent, who may read it.
    takers: Box<[Takers]>,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<VecDeque<ReadOp>>,
    /// Reads of extents that may not be read yet, in their order.
    closed: VecDeque<ReadOp>,
    /// How many extents, from the first on, may be read.
    admitted: usize,
    unfinished: usize,
    stopped: bool,
    given_up: Takers,
    /// One thread does everything: no other adds anything while it waits.
    is_alone: bool,
}

impl ReadQueue {
    /// Reads in the order of their extents, with the routes of each, of which the first `admitted` may begin. `is_alone`:
    /// all are made by one thread, which gets what there is and never waits.
    pub(super) fn new(reads: Vec<(Takers, ReadOp)>, routes: usize, admitted: usize, is_alone: bool) -> Self {
        let (takers, closed): (Vec<_>, VecDeque<_>) = reads.into_iter().unzip();
        let waiting = (0..routes).map(|_| VecDeque::new()).collect();
        let state = State { waiting, unfinished: closed.len(), closed, is_alone, ..State::default() };
        let queue = Self { state: Mutex::new(state), changed: Condvar::new(), takers: takers.into() };
        queue.admit(admitted);
        queue
    }

    /// The next read of a route, if there is one now.
    pub(super) fn try_next(&self, route: usize) -> Option<ReadOp> {
        let mut state = self.state();
        if state.stopped { None } else { state.waiting[route].pop_front() }
    }

    /// The next read of a route. Waits while others may still add one; `None` once none will.
    pub(super) fn next(&self, route: usize) -> Option<ReadOp> {
        self.wait_for(route, |state| state.unfinished == 0 || state.given_up.from(route) == Some(route))
    }

    /// The next read of a route that gets none but by [`ReadQueue::admit`]. Waits as long as that may still happen.
    pub(super) fn next_planned(&self, route: usize) -> Option<ReadOp> {
        self.wait_for(route, |state| state.closed.is_empty())
    }

    fn wait_for(&self, route: usize, is_over: impl Fn(&State) -> bool) -> Option<ReadOp> {
        let mut state = self.state();
        loop {
            if state.stopped {
                return None;
            }
            if let Some(op) = state.waiting[route].pop_front() {
                return Some(op);
            }
            if state.is_alone || is_over(&state) {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Lets the reads of the first `extents` begin.
    pub(super) fn admit(&self, extents: usize) {
        let mut state = self.state();
        state.admitted = state.admitted.max(extents);
        let admitted = state.admitted;
        let mut is_changed = false;
        while let Some(op) = state.closed.pop_front_if(|op| op.extent < admitted) {
            if let Some(route) = self.first(&state, &op, 0) {
                state.waiting[route].push_back(op);
            }
            is_changed = true;
        }
        drop(state);
        if is_changed {
            self.changed.notify_all();
        }
    }

    /// The route of a read, from number `first` on.
    fn first(&self, state: &State, op: &ReadOp, first: usize) -> Option<usize> {
        self.takers[op.extent].without(state.given_up).from(first)
    }

    /// Whether the reads of an extent may begin.
    pub(super) fn is_admitted(&self, extent: usize) -> bool {
        extent < self.state().admitted
    }

    /// Moves a read that was taken by `route` to the end of the queue of the next one. `false` if there is none.
    pub(super) fn hand_over(&self, route: usize, op: ReadOp) -> bool {
        let mut state = self.state();
        let Some(next) = self.first(&state, &op, route + 1) else { return false };
        state.waiting[next].push_back(op);
        drop(state);
        self.changed.notify_all();
        true
    }

    /// Puts a read that was taken back to the front of its queue, or of the next route's if its own was given up.
    pub(super) fn put_back(&self, route: usize, op: ReadOp) {
        let mut state = self.state();
        if let Some(route) = self.first(&state, &op, route) {
            state.waiting[route].push_front(op);
        }
        drop(state);
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

    /// Whether other routes can make all reads of one that is given up.
    pub(super) fn can_do_without(&self, route: usize) -> bool {
        let given_up = self.state().given_up;
        let own = self.takers.iter().filter(|takers| takers.from(route) == Some(route));
        own.into_iter().all(|takers| takers.without(given_up).from(route + 1).is_some())
    }

    /// A route reads no more: what waits or will wait for it is for those after it. `true` for the first who says so.
    pub(super) fn give_up(&self, route: usize) -> bool {
        let mut state = self.state();
        let is_first = state.given_up.from(route) != Some(route);
        state.given_up = Takers(state.given_up.0 | 1 << route);
        for op in std::mem::take(&mut state.waiting[route]) {
            if let Some(next) = self.first(&state, &op, route) {
                state.waiting[next].push_back(op);
            }
        }
        drop(state);
        self.changed.notify_all();
        is_first
    }

    /// No route gets another read.
    pub(super) fn stop(&self) {
        let dropped = {
            let mut state = self.state();
            state.stopped = true;
            let State { waiting, closed, .. } = &mut *state;
            (waiting.iter_mut().map(std::mem::take).collect::<Vec<_>>(), std::mem::take(closed))
        };
        self.changed.notify_all();
        drop(dropped);
    }

    /// Whether any read is for a route at first, or as soon as one before it that `is_cache` does not hold it.
    pub(super) fn will_have_any(&self, route: usize, is_cache: impl Fn(usize) -> bool) -> bool {
        self.takers.iter().any(|takers| match takers.from(0) {
            Some(first) if is_cache(first) => first == route || takers.from(first + 1) == Some(route),
            first => first == Some(route),
        })
    }

    /// Whether no route will get another read: all are finished, or the load was stopped.
    pub(super) fn is_over(&self) -> bool {
        let state = self.state();
        state.stopped || state.unfinished == 0
    }

    /// Whether [`ReadQueue::stop`] was called.
    pub(super) fn is_stopped(&self) -> bool {
        self.state().stopped
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change leaves the state consistent, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
