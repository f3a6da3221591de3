//! Jobs whose event is not reached yet. One thread asks after all of them, so that no other waits for a device.
#![forbid(unsafe_code)]

use super::{
    Failure, Job,
    queue::{Queue, Queued},
};
use crate::sync::lock;
use std::{
    collections::HashMap,
    sync::{Condvar, Mutex, PoisonError},
    time::Duration,
};

/// Time between questions.
const PAUSE: Duration = Duration::from_micros(100);

#[derive(Debug, Default)]
pub(super) struct EventLine {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    by_tag: HashMap<u64, Vec<Job>>,
    is_closed: bool,
}

impl EventLine {
    /// Adds a job whose event was not reached just now.
    pub(super) fn push(&self, job: Job) {
        let mut state = lock(&self.state);
        if state.is_closed {
            drop(state);
            return end(job, Failure::Cancelled);
        }
        if state.by_tag.is_empty() {
            self.changed.notify_all();
        }
        state.by_tag.entry(job.tag).or_default().push(job);
    }

    /// Ends the jobs of this tag; says how many.
    pub(super) fn cancel(&self, tag: u64) -> usize {
        let cancelled = lock(&self.state).by_tag.remove(&tag).unwrap_or_default();
        let count = cancelled.len();
        cancelled.into_iter().for_each(|job| end(job, Failure::Cancelled));
        count
    }

    /// Ends all jobs, and takes no more.
    pub(super) fn close(&self, failure: impl Fn() -> Failure) {
        let jobs = {
            let mut state = lock(&self.state);
            state.is_closed = true;
            self.changed.notify_all();
            std::mem::take(&mut state.by_tag)
        };
        jobs.into_values().flatten().for_each(|job| end(job, failure()));
    }

    /// Hands jobs on to the queue as their events are reached, until this is closed.
    pub(super) fn watch(&self, queue: &Queue, is_reached: impl Fn(&Job) -> windlass::Result<bool>) {
        let mut state = lock(&self.state);
        while !state.is_closed {
            if state.by_tag.is_empty() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            // With the lock: an event lives as long as its job is not ended, and nobody ends it meanwhile.
            let answered = state.ask(&is_reached);
            if answered.is_empty() {
                state = self.changed.wait_timeout(state, PAUSE).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            drop(state);
            for (mut job, answer) in answered {
                job.wait_event = None;
                match answer {
                    Ok(_) => {
                        if let Err(jobs) = queue.push(vec![job]) {
                            jobs.into_iter().for_each(|job| end(job, Failure::Cancelled));
                        }
                    }
                    Err(error) => end(job, Failure::Device(error)),
                }
            }
            state = lock(&self.state);
        }
    }
}

impl State {
    /// Takes out the jobs whose events are reached, or cannot be asked after.
    fn ask(
        &mut self,
        is_reached: impl Fn(&Job) -> windlass::Result<bool>,
    ) -> Vec<(Job, windlass::Result<bool>)> {
        // Most jobs of a request wait for the same.
        let mut known = HashMap::new();
        let mut answered = Vec::new();
        self.by_tag.retain(|_, jobs| {
            for job in std::mem::take(jobs) {
                let answer = match known.get(&job.wait_event) {
                    Some(known) => Ok(*known),
                    None => is_reached(&job),
                };
                known.extend(answer.as_ref().ok().map(|answer| (job.wait_event, *answer)));
                match answer {
                    Ok(false) => jobs.push(job),
                    answer => answered.push((job, answer)),
                }
            }
            !jobs.is_empty()
        });
        answered
    }
}

fn end(job: Job, failure: Failure) {
    Queued { job, steps: None }.end(failure);
}
