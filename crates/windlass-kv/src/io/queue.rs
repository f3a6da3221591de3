//! Jobs that wait for a worker: what is waited for first, but nothing for ever; what waits for too long not at all.
#![forbid(unsafe_code)]

use super::{Failure, Job, Outcome, Priority, plan::Step, wake::Wake};
use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

/// Of so many jobs one is taken from the lesser line, where both have some.
const BACKGROUND_TURN: u64 = 8;
const IDLE_TURN: u64 = 64;

/// A job, and how it will be done if somebody has thought about that.
#[derive(Debug)]
pub(super) struct Queued {
    pub(super) job: Job,
    pub(super) steps: Option<VecDeque<Step>>,
}

impl Queued {
    /// Ends it, not having begun.
    pub(super) fn end(self, failure: Failure) {
        let Job { keep, done, parts, .. } = self.job;
        drop(keep);
        done(Outcome {
            result: Err(failure),
            header: Vec::new(),
            checksums: vec![None; parts.len()],
            carried: Vec::new(),
            bounced_bytes: 0,
            started: None,
        });
    }
}

/// What a worker takes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accept {
    Everything,
    /// It has enough of what nobody waits for.
    Demand,
}

#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    /// For who ends jobs whose time is over.
    changed: Condvar,
}

#[derive(Debug)]
struct Parked {
    worker: usize,
    wake: Arc<Wake>,
    accept: Accept,
}

#[derive(Debug, Default)]
struct State {
    jobs: HashMap<u64, Queued>,
    /// The jobs of each priority; some may have ended already.
    lines: [VecDeque<u64>; 3],
    /// How many of each priority there are.
    waiting: [usize; 3],
    deadlines: BTreeSet<(Instant, u64)>,
    /// Workers that have nothing to do, or could do more.
    parked: Vec<Parked>,
    numbered: u64,
    taken: u64,
    is_closed: bool,
}

impl State {
    fn remove(&mut self, number: u64) -> Option<Queued> {
        let queued = self.jobs.remove(&number)?;
        self.waiting[queued.job.priority as usize] -= 1;
        if let Some(deadline) = queued.job.deadline {
            self.deadlines.remove(&(deadline, number));
        }
        Some(queued)
    }

    /// The next that is still there.
    fn next_of(&mut self, line: Priority) -> Option<Queued> {
        while let Some(number) = self.lines[line as usize].pop_front() {
            if let Some(queued) = self.remove(number) {
                return Some(queued);
            }
        }
        None
    }

    fn number(&mut self, queued: Queued) -> (u64, Priority) {
        let (number, priority) = (self.numbered, queued.job.priority);
        self.numbered += 1;
        if let Some(deadline) = queued.job.deadline {
            self.deadlines.insert((deadline, number));
        }
        self.waiting[priority as usize] += 1;
        self.jobs.insert(number, queued);
        (number, priority)
    }
}

impl Queue {
    pub(super) fn new() -> Self {
        Self { state: Mutex::default(), changed: Condvar::new() }
    }

    /// Adds jobs, and wakes as many workers. Gives them back if the queue is closed.
    pub(super) fn push(&self, jobs: Vec<Job>) -> Result<(), Vec<Job>> {
        let woken = {
            let mut state = self.lock();
            if state.is_closed {
                return Err(jobs);
            }
            if jobs.iter().any(|job| job.deadline.is_some()) {
                self.changed.notify_all();
            }
            let mut woken = Vec::new();
            for job in jobs {
                let (number, priority) = state.number(Queued { job, steps: None });
                state.lines[priority as usize].push_back(number);
                let takes =
                    |parked: &Parked| priority == Priority::Demand || parked.accept == Accept::Everything;
                if let Some(place) = state.parked.iter().rposition(takes) {
                    woken.push(state.parked.remove(place).wake);
                }
            }
            woken
        };
        woken.iter().for_each(|wake| wake.notify());
        Ok(())
    }

    /// Gives back a job that was taken and could not begin: it is the next.
    pub(super) fn put_back(&self, queued: Queued) {
        let mut state = self.lock();
        if state.is_closed {
            drop(state);
            return queued.end(Failure::Cancelled);
        }
        let has_deadline = queued.job.deadline.is_some();
        let (number, priority) = state.number(queued);
        state.lines[priority as usize].push_front(number);
        if has_deadline {
            self.changed.notify_all();
        }
    }

    /// The next job.
    pub(super) fn take(&self, accept: Accept) -> Option<Queued> {
        use Priority::{Background, Demand, Idle};
        let mut state = self.lock();
        let turn = state.taken + 1;
        let order: &[Priority] = match accept {
            Accept::Demand => &[Demand],
            Accept::Everything if turn.is_multiple_of(IDLE_TURN) => &[Idle, Background, Demand],
            Accept::Everything if turn.is_multiple_of(BACKGROUND_TURN) => &[Background, Demand, Idle],
            Accept::Everything => &[Demand, Background, Idle],
        };
        let queued = order.iter().find_map(|&line| state.next_of(line))?;
        state.taken += 1;
        Some(queued)
    }

    /// Jobs that wait.
    pub(super) fn len(&self) -> usize {
        self.lock().jobs.len()
    }

    /// Lets a worker be woken by the next job that it could take; `false` if there is one.
    pub(super) fn park(&self, worker: usize, wake: &Arc<Wake>, accept: Accept) -> bool {
        let mut state = self.lock();
        let is_work = match accept {
            Accept::Everything => !state.jobs.is_empty(),
            Accept::Demand => state.waiting[Priority::Demand as usize] > 0,
        };
        if is_work {
            return false;
        }
        state.parked.retain(|parked| parked.worker != worker);
        state.parked.push(Parked { worker, wake: wake.clone(), accept });
        true
    }

    pub(super) fn unpark(&self, worker: usize) {
        self.lock().parked.retain(|parked| parked.worker != worker);
    }

    /// Ends the jobs of this tag that no worker has begun; says how many.
    pub(super) fn cancel(&self, tag: u64) -> usize {
        let cancelled: Vec<Queued> = {
            let mut state = self.lock();
            let own = state.jobs.iter().filter(|(_, queued)| queued.job.tag == tag);
            let numbers: Vec<u64> = own.map(|(number, _)| *number).collect();
            numbers.into_iter().filter_map(|number| state.remove(number)).collect()
        };
        let count = cancelled.len();
        cancelled.into_iter().for_each(|queued| queued.end(Failure::Cancelled));
        count
    }

    /// Ends jobs whose time is over, as it comes to that, until the queue is closed.
    pub(super) fn expire(&self) {
        let mut state = self.lock();
        while !state.is_closed {
            let now = Instant::now();
            let mut expired = Vec::new();
            while let Some(&(deadline, number)) = state.deadlines.first()
                && deadline <= now
            {
                state.deadlines.pop_first();
                expired.extend(state.remove(number));
            }
            if !expired.is_empty() {
                drop(state);
                expired.into_iter().for_each(|queued: Queued| queued.end(Failure::TimedOut));
                state = self.lock();
                continue;
            }
            state = match state.deadlines.first().copied() {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some((deadline, _)) => {
                    let waited = self.changed.wait_timeout(state, deadline.saturating_duration_since(now));
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    /// Ends the jobs that wait, and takes no more.
    pub(super) fn close(&self, failure: impl Fn() -> Failure) {
        let left: Vec<Queued> = {
            let mut state = self.lock();
            state.is_closed = true;
            state.deadlines.clear();
            state.waiting = [0; 3];
            self.changed.notify_all();
            state.jobs.drain().map(|(_, queued)| queued).collect()
        };
        left.into_iter().for_each(|queued| queued.end(failure()));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Kept consistent by every statement, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
