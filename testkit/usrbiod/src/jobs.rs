//! Transfers that wait for their time: for their delay to pass, or for the network to have brought their bytes.
#![forbid(unsafe_code)]

use crate::served::{Batch, ServedRing};
use hoistway_usrbio::proto::{IoArgs, Sqe};
use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// One transfer, and what is to be done with it at `due`.
pub(crate) struct Job {
    pub(crate) running: Arc<Running>,
    pub(crate) sqe: Sqe,
    pub(crate) due: Instant,
    pub(crate) stage: Stage,
}

/// How far a transfer is.
pub(crate) enum Stage {
    /// It is to be carried out; no arguments are an error.
    Begin {
        /// Its number, counted from 1.
        number: u64,
        args: Option<IoArgs>,
    },
    /// Its bytes are there, and the client is to hear of it.
    Finish(i64),
}

/// A batch whose transfers are under way. Its completions come together, at its end.
pub(crate) struct Running {
    pub(crate) ring: Arc<ServedRing>,
    batch: Mutex<Option<Batch>>,
    results: Mutex<Vec<(Sqe, i64)>>,
    left: AtomicUsize,
    /// Transfers that wait for one before them.
    pub(crate) queued: Mutex<VecDeque<(Sqe, Option<IoArgs>)>>,
}

impl Running {
    pub(crate) fn new(batch: Batch, transfers: usize) -> Self {
        Self {
            ring: batch.ring.clone(),
            batch: Mutex::new(Some(batch)),
            results: Mutex::new(Vec::with_capacity(transfers)),
            left: AtomicUsize::new(transfers),
            queued: Mutex::default(),
        }
    }

    /// One of its transfers is over. With the last one the client is told. Whether there may be room in the ring then for
    /// what found none.
    pub(crate) fn finish(&self, sqe: Sqe, result: i64) -> bool {
        let mut results = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        results.push((sqe, result));
        if self.left.fetch_sub(1, Ordering::Relaxed) != 1 {
            return false;
        }
        let batch = self.batch.lock().unwrap_or_else(PoisonError::into_inner).take();
        batch.is_some_and(|batch| batch.complete(std::mem::take(&mut *results).into_iter()))
    }
}

/// Jobs in the order in which they came.
#[derive(Default)]
pub(crate) struct Jobs {
    waiting: VecDeque<Job>,
    /// The time that a worker waits for already.
    watched: Option<Instant>,
}

impl Jobs {
    pub(crate) fn push(&mut self, job: Job) {
        self.waiting.push_back(job);
    }

    pub(crate) fn clear(&mut self) {
        self.waiting.clear();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// A job whose time has come: the first, or the last if they are to be reordered.
    pub(crate) fn take_due(&mut self, now: Instant, reorder: bool) -> Option<Job> {
        let is_due = |job: &Job| job.due <= now;
        let position = if reorder {
            self.waiting.iter().rposition(is_due)
        } else {
            self.waiting.iter().position(is_due)
        };
        self.waiting.remove(position?)
    }

    /// When the next job is due, if no worker waits for that yet: the caller does from now on, until
    /// [`unwatch`](Self::unwatch).
    pub(crate) fn watch(&mut self) -> Option<Instant> {
        let earliest = self.waiting.iter().map(|job| job.due).min()?;
        if self.watched.is_some_and(|watched| watched <= earliest) {
            return None;
        }
        self.watched = Some(earliest);
        self.watched
    }

    pub(crate) fn unwatch(&mut self, due: Instant) {
        self.watched.take_if(|watched| *watched == due);
    }
}

/// A network that all transfers share, one after the other.
pub(crate) struct Link(Mutex<Instant>);

impl Link {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Instant::now()))
    }

    /// When `bytes` that begin to pass at `now` have passed, after all that others send.
    pub(crate) fn pass(&self, now: Instant, bytes: u64, bytes_per_second: u64) -> Instant {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds = bytes as f64 / bytes_per_second as f64;
        *free = (*free).max(now) + Duration::from_secs_f64(seconds);
        *free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_pass_one_after_the_other_at_the_rate() {
        let (link, second) = (Link::new(), Duration::from_secs(1));
        let start = Instant::now() + second;
        assert_eq!(link.pass(start, 500, 1000), start + second / 2);
        assert_eq!(link.pass(start, 1000, 1000), start + second * 3 / 2);
        let later = start + 10 * second;
        assert_eq!(link.pass(later, 1000, 1000), later + second);
    }
}
