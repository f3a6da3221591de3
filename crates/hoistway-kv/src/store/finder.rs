//! Loads whose turn has come, where finding blocks may wait for the disk: a thread of their own finds them, so that those
//! which move bytes, or watch deadlines, do not.
#![forbid(unsafe_code)]

use super::{Core, gate::Waiting, load::WaitingLoad};
use hoistway_io::parallel::lock;
use std::{
    collections::VecDeque,
    mem,
    sync::{Condvar, Mutex, PoisonError},
};

#[derive(Default)]
pub(crate) struct Finder {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    loads: VecDeque<WaitingLoad>,
    is_closed: bool,
}

impl Finder {
    /// Adds loads; those come back that are to be cancelled.
    pub(crate) fn push(&self, loads: Vec<WaitingLoad>) -> Vec<Waiting> {
        let mut state = lock(&self.state);
        // With the lock: who withdraws a load says so before it looks for it here.
        let is_refused = |load: &WaitingLoad| state.is_closed || load.is_withdrawn();
        let (refused, taken): (Vec<_>, Vec<_>) = loads.into_iter().partition(is_refused);
        state.loads.extend(taken);
        drop(state);
        self.changed.notify_all();
        refused.into_iter().map(waiting).collect()
    }

    /// Takes back what waits for a request.
    pub(crate) fn withdraw(&self, tag: u64) -> Vec<Waiting> {
        let mut state = lock(&self.state);
        let (withdrawn, kept): (VecDeque<_>, _) =
            mem::take(&mut state.loads).into_iter().partition(|load| load.tag() == tag);
        state.loads = kept;
        withdrawn.into_iter().map(waiting).collect()
    }

    /// Ends [`Finder::run`]. What still waits comes back.
    pub(crate) fn close(&self) -> Vec<Waiting> {
        let mut state = lock(&self.state);
        state.is_closed = true;
        self.changed.notify_all();
        mem::take(&mut state.loads).into_iter().map(waiting).collect()
    }

    /// Begins loads, one after the other, until this is closed.
    pub(crate) fn run(&self, core: &Core) {
        let mut state = lock(&self.state);
        while !state.is_closed {
            let Some(load) = state.loads.pop_front() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            core.begin(vec![waiting(load)]);
            state = lock(&self.state);
        }
    }
}

fn waiting(load: WaitingLoad) -> Waiting {
    Waiting::Load(Box::new(load))
}
