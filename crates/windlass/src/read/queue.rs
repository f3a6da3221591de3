//! Which piece is next: demand before prefetch, each in the order in which it was asked for.
#![forbid(unsafe_code)]

use super::pieces::Piece;
use crate::{Error, Result, parallel::lock, report::Carrier};
use serde::{Deserialize, Serialize};
use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// How urgent a batch is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Priority {
    /// Somebody waits for it.
    #[default]
    Demand,
    /// Somebody will want it, perhaps. Read when nothing is in demand, by half of the lanes at most (but by one at
    /// least), so that demand finds one free.
    Prefetch,
}

/// Pieces that wait for a lane.
#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    /// Pieces that may be prefetched at once.
    max_prefetching: usize,
}

#[derive(Debug, Default)]
struct State {
    demand: VecDeque<Piece>,
    prefetch: VecDeque<Piece>,
    prefetching: usize,
    /// Why nobody serves it any more.
    closed: Option<String>,
}

/// A piece that was taken out, until its read has ended.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) piece: Piece,
    turn: Turn,
}

/// A lane's turn at a piece: prefetching counts until this is dropped.
#[derive(Debug)]
struct Turn {
    queue: Arc<Queue>,
    is_prefetch: bool,
}

impl Taken {
    /// Nobody uses the piece's memory any more.
    pub(super) fn end(self, result: Result<()>) {
        // The turn first: who waits for the read may look for a free lane at once.
        drop(self.turn);
        self.piece.end(result);
    }

    /// The same, and notes who read it: `staged_bytes` of it by way of a slot.
    pub(super) fn end_carried(self, carriers: Vec<Carrier>, staged_bytes: u64, result: Result<()>) {
        self.piece.batch().account(carriers, staged_bytes, result.is_ok());
        self.end(result);
    }
}

impl Queue {
    pub(super) fn new(lanes: usize) -> Arc<Self> {
        let max_prefetching = (lanes / 2).max(1);
        Arc::new(Self { state: Mutex::default(), changed: Condvar::new(), max_prefetching })
    }

    /// Adds pieces at the end of their line. If nobody will serve it, they end.
    pub(super) fn push(&self, pieces: Vec<Piece>, priority: Priority) {
        let mut state = self.state();
        if let Some(reason) = state.closed.clone() {
            drop(state);
            give_up(pieces, &reason);
            return;
        }
        let count = pieces.len();
        match priority {
            Priority::Demand => state.demand.extend(pieces),
            Priority::Prefetch => state.prefetch.extend(pieces),
        }
        drop(state);
        if count == 1 { self.changed.notify_one() } else { self.changed.notify_all() }
    }

    /// The next piece, if there is one now.
    pub(super) fn try_next(self: &Arc<Self>) -> Option<Taken> {
        self.pop(&mut self.state())
    }

    /// The next piece. Waits for one; `None` once the queue was closed.
    pub(super) fn next(self: &Arc<Self>) -> Option<Taken> {
        let mut state = self.state();
        loop {
            if let Some(taken) = self.pop(&mut state) {
                return Some(taken);
            }
            if state.closed.is_some() {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn pop(self: &Arc<Self>, state: &mut State) -> Option<Taken> {
        let (piece, is_prefetch) = match state.demand.pop_front() {
            Some(piece) => (piece, false),
            None if state.prefetching < self.max_prefetching => (state.prefetch.pop_front()?, true),
            None => return None,
        };
        state.prefetching += usize::from(is_prefetch);
        Some(Taken { piece, turn: Turn { queue: self.clone(), is_prefetch } })
    }

    /// A piece that was taken goes back to where it was, before all others.
    pub(super) fn put_back(&self, taken: Taken) {
        let Taken { piece, turn } = taken;
        let mut state = self.state();
        // Even if the queue was closed: whoever closes it lets the lanes empty it.
        if turn.is_prefetch && !piece.of().is_urgent() {
            state.prefetch.push_front(piece)
        } else {
            state.demand.push_front(piece)
        }
    }

    /// What waits of a batch, or of one of its reads, is in demand now.
    pub(super) fn promote(&self, batch: u64, read: Option<usize>) {
        let mut state = self.state();
        if state.prefetch.is_empty() {
            return;
        }
        let (wanted, others) = std::mem::take(&mut state.prefetch)
            .into_iter()
            .partition(|piece| piece.is_of(batch) && read.is_none_or(|read| piece.read_index() == read));
        state.prefetch = others;
        state.demand.extend::<VecDeque<Piece>>(wanted);
        drop(state);
        self.changed.notify_all();
    }

    /// Takes out what waits of a batch.
    pub(super) fn remove(&self, batch: u64) -> Vec<Piece> {
        let mut state = self.state();
        let mut removed = Vec::new();
        let State { demand, prefetch, .. } = &mut *state;
        for line in [demand, prefetch] {
            if line.iter().any(|piece| piece.is_of(batch)) {
                let (of_batch, others) =
                    std::mem::take(line).into_iter().partition::<VecDeque<_>, _>(|piece| piece.is_of(batch));
                *line = others;
                removed.extend(of_batch);
            }
        }
        removed
    }

    /// Nobody serves it any more, or will. What waits ends: cancelled, if there is no other reason.
    pub(super) fn close(&self, reason: impl Into<String>) {
        let mut state = self.state();
        let reason = state.closed.get_or_insert(reason.into()).clone();
        let State { demand, prefetch, .. } = &mut *state;
        let waited = demand.drain(..).chain(prefetch.drain(..)).collect();
        drop(state);
        self.changed.notify_all();
        give_up(waited, &reason);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

fn give_up(pieces: Vec<Piece>, reason: &str) {
    for piece in pieces {
        piece.end(Err(if reason.is_empty() { Error::Cancelled } else { Error::Internal(reason.to_owned()) }));
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.is_prefetch {
            self.queue.state().prefetching -= 1;
            self.queue.changed.notify_one();
        }
    }
}
