//! Jobs that wait for a worker: what is waited for first, but nothing for ever.
#![forbid(unsafe_code)]

use super::{Failure, Job, Outcome, Priority, plan::Step, wake::Wake};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io, mem,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};
use windlass_io::parallel::lock;

/// Every so many jobs, one that nobody waits for is taken first.
const REST_TURN: u64 = 8;
/// Every so many jobs, one of [`Priority::Background`] is taken first.
const BACKGROUND_TURN: u64 = 64;

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

/// Why no jobs are taken any more.
#[derive(Debug)]
pub(super) enum Closing {
    /// Nobody wants them moved.
    Dropped,
    /// Nobody can move them.
    Broken(io::Error),
}

impl Closing {
    /// What jobs end with.
    pub(super) fn failure(&self) -> Failure {
        match self {
            Self::Dropped => Failure::Cancelled,
            Self::Broken(error) => Failure::Io(copy_of(error)),
        }
    }
}

/// Errors of the system are not cloned.
pub(super) fn copy_of(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| io::Error::other(error.to_string()), io::Error::from_raw_os_error)
}

/// What a worker takes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accept {
    Everything,
    /// It has enough of what nobody waits for.
    Demand,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    /// What `state` says, for who asks often.
    len: AtomicUsize,
    is_closed: AtomicBool,
}

#[derive(Debug)]
struct Parked {
    worker: usize,
    wake: Arc<Wake>,
    accept: Accept,
}

#[derive(Debug, Default)]
struct State {
    /// The jobs of each priority, by number: the lowest is the next.
    lines: [BTreeMap<i64, Queued>; 3],
    /// Tag, line and number of each job.
    by_tag: BTreeSet<(u64, usize, i64)>,
    /// Workers that have nothing to do, or could do more.
    parked: Vec<Parked>,
    /// Number of the last job that was put at the end, or, counted down, at the front.
    last: i64,
    first: i64,
    taken: u64,
    closing: Option<Closing>,
}

impl State {
    /// What a job ends with that is not to wait here. Asked with the lock: who withdraws a job says so before it looks
    /// for it here.
    fn refusal(&self, job: &Job) -> Option<Failure> {
        match &self.closing {
            Some(closing) => Some(closing.failure()),
            None => job.withdrawn.is_set().then_some(Failure::Cancelled),
        }
    }

    fn insert(&mut self, number: i64, queued: Queued) {
        let line = queued.job.priority as usize;
        self.by_tag.insert((queued.job.tag, line, number));
        self.lines[line].insert(number, queued);
    }

    fn next_of(&mut self, line: Priority) -> Option<Queued> {
        let (number, queued) = self.lines[line as usize].pop_first()?;
        self.by_tag.remove(&(queued.job.tag, line as usize, number));
        Some(queued)
    }
}

impl Queue {
    /// Adds jobs, and wakes as many workers.
    pub(super) fn push(&self, jobs: Vec<Job>) {
        if jobs.is_empty() {
            return;
        }
        let (mut woken, mut refused) = (Vec::new(), Vec::new());
        {
            let mut state = self.lock();
            for job in jobs {
                if let Some(failure) = state.refusal(&job) {
                    refused.push((job, failure));
                    continue;
                }
                let priority = job.priority;
                state.last += 1;
                let number = state.last;
                state.insert(number, Queued { job, steps: None });
                let takes =
                    |parked: &Parked| priority == Priority::Demand || parked.accept == Accept::Everything;
                if let Some(place) = state.parked.iter().rposition(takes) {
                    woken.push(state.parked.remove(place).wake);
                }
            }
            self.note(&state);
        }
        woken.iter().for_each(|wake| wake.notify());
        refused.into_iter().for_each(|(job, failure)| Queued { job, steps: None }.end(failure));
    }

    /// Gives back a job that was taken and could not begin: it is the next.
    pub(super) fn put_back(&self, queued: Queued) {
        let mut state = self.lock();
        if let Some(failure) = state.refusal(&queued.job) {
            drop(state);
            return queued.end(failure);
        }
        state.first -= 1;
        let number = state.first;
        state.insert(number, queued);
        self.note(&state);
    }

    /// The next job.
    pub(super) fn take(&self, accept: Accept) -> Option<Queued> {
        use Priority::{Background, Demand, Prefetch};
        if self.len() == 0 {
            return None;
        }
        let mut state = self.lock();
        let turn = state.taken + 1;
        let order: &[Priority] = match accept {
            Accept::Demand => &[Demand],
            Accept::Everything if turn.is_multiple_of(BACKGROUND_TURN) => &[Background, Prefetch, Demand],
            Accept::Everything if turn.is_multiple_of(REST_TURN) => &[Prefetch, Background, Demand],
            Accept::Everything => &Priority::ALL,
        };
        let queued = order.iter().find_map(|&line| state.next_of(line))?;
        state.taken += 1;
        self.note(&state);
        Some(queued)
    }

    /// Jobs that wait.
    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Lets a worker be woken by the next job that it could take; `false` if there is one.
    pub(super) fn park(&self, worker: usize, wake: &Arc<Wake>, accept: Accept) -> bool {
        let mut state = self.lock();
        let is_work = match accept {
            Accept::Everything => state.lines.iter().any(|line| !line.is_empty()),
            Accept::Demand => !state.lines[Priority::Demand as usize].is_empty(),
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
        let mut cancelled = Vec::new();
        {
            let mut state = self.lock();
            let places = state.by_tag.range((tag, 0, i64::MIN)..=(tag, usize::MAX, i64::MAX));
            for place in places.copied().collect::<Vec<_>>() {
                let (_, line, number) = place;
                cancelled.extend(state.lines[line].remove(&number));
                state.by_tag.remove(&place);
            }
            self.note(&state);
        }
        let count = cancelled.len();
        cancelled.into_iter().for_each(|queued| queued.end(Failure::Cancelled));
        count
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Ends the jobs that wait, and takes no more.
    pub(super) fn close(&self, closing: Closing) {
        let ended: Vec<_> = {
            let mut state = self.lock();
            state.by_tag.clear();
            let lines = mem::take(&mut state.lines);
            let closing = state.closing.get_or_insert(closing);
            let ended = lines.into_iter().flat_map(BTreeMap::into_values);
            let ended = ended.map(|queued| (queued, closing.failure())).collect();
            self.note(&state);
            ended
        };
        ended.into_iter().for_each(|(queued, failure)| queued.end(failure));
    }

    /// Only with the lock, so that what is noted last is so.
    fn note(&self, state: &State) {
        self.len.store(state.lines.iter().map(BTreeMap::len).sum(), Ordering::Relaxed);
        self.is_closed.store(state.closing.is_some(), Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}
