//! How many bytes may be under way.
#![forbid(unsafe_code)]

use crate::{io::Job, sync::lock};
use std::{collections::VecDeque, sync::Mutex};

/// The least that a transfer counts, so that their number is limited too.
const LEAST_CHARGE: u64 = 4096;

/// Lets transfers begin as long as they have not more than so many bytes together. One that has more goes alone.
pub(crate) struct Gate {
    limit: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    in_flight: u64,
    waiting: VecDeque<(Charge, Job)>,
}

/// What a transfer counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Charge(u64);

impl Charge {
    pub(crate) fn of(len_bytes: u64) -> Self {
        Self(len_bytes.max(LEAST_CHARGE))
    }
}

impl Gate {
    pub(crate) fn new(limit: u64) -> Self {
        Self { limit, state: Mutex::default() }
    }

    /// Whether a transfer may begin, which none may that would overtake those that wait. If so, it counts until
    /// [`Gate::leave`].
    pub(crate) fn try_enter(&self, charge: Charge) -> bool {
        let mut state = lock(&self.state);
        state.waiting.is_empty() && state.try_enter(charge, self.limit)
    }

    /// Those of these transfers that may begin. The others come out of [`Gate::leave`] in time.
    pub(crate) fn enter_or_queue(&self, jobs: Vec<(Charge, Job)>) -> Vec<Job> {
        let mut state = lock(&self.state);
        state.waiting.extend(jobs);
        state.admit(self.limit)
    }

    /// A transfer has ended. Those that may begin now.
    pub(crate) fn leave(&self, charge: Charge) -> Vec<Job> {
        let mut state = lock(&self.state);
        state.in_flight = state.in_flight.saturating_sub(charge.0);
        state.admit(self.limit)
    }

    /// Takes back what waits for a request.
    pub(crate) fn withdraw(&self, tag: u64) -> Vec<Job> {
        let mut state = lock(&self.state);
        if !state.waiting.iter().any(|(_, job)| job.tag == tag) {
            return Vec::new();
        }
        let (withdrawn, kept): (VecDeque<_>, VecDeque<_>) =
            state.waiting.drain(..).partition(|(_, job)| job.tag == tag);
        state.waiting = kept;
        withdrawn.into_iter().map(|(_, job)| job).collect()
    }

    pub(crate) fn in_flight_bytes(&self) -> u64 {
        lock(&self.state).in_flight
    }

    pub(crate) fn waiting(&self) -> usize {
        lock(&self.state).waiting.len()
    }
}

impl State {
    fn try_enter(&mut self, charge: Charge, limit: u64) -> bool {
        let sum = self.in_flight.saturating_add(charge.0);
        let fits = self.in_flight == 0 || sum <= limit;
        if fits {
            self.in_flight = sum;
        }
        fits
    }

    /// In the order in which they came: none overtakes one that does not fit yet.
    fn admit(&mut self, limit: u64) -> Vec<Job> {
        let mut admitted = Vec::new();
        while let Some((charge, _)) = self.waiting.front() {
            if !self.try_enter(*charge, limit) {
                break;
            }
            admitted.extend(self.waiting.pop_front().map(|(_, job)| job));
        }
        admitted
    }
}
