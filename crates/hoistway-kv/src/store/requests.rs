//! The requests that have not ended, their deadlines, and the completions that wait to be drained.
#![forbid(unsafe_code)]

use super::Metrics;
use crate::{Completion, Error, Notify, Result, Status, ticket::TicketState};
use hoistway_io::parallel::lock;
use rustix::event::{EventfdFlags, eventfd};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// Requests with [`Notify::EventFd`] that have not ended, or were not drained: at most this many.
const MOST_COMPLETIONS: usize = 1 << 16;

pub(crate) struct Requests {
    next: AtomicU64,
    open: Mutex<HashMap<u64, Arc<TicketState>>>,
    deadlines: Mutex<Deadlines>,
    /// Told when a deadline comes before all others, or when the store ends.
    earlier: Condvar,
    /// Requests that ended while a transfer had their memory.
    leased: Mutex<Vec<Arc<TicketState>>>,
    /// Numbers of stores that have not ended wholly: not in the kernel, nor in a group to be committed.
    stores: Mutex<BTreeSet<u64>>,
    stored: Condvar,
    event: OwnedFd,
    completions: Mutex<VecDeque<Completion>>,
    to_drain: AtomicUsize,
    metrics: Arc<Metrics>,
}

#[derive(Default)]
struct Deadlines {
    by_time: BTreeMap<(Instant, u64), Arc<TicketState>>,
    closed: bool,
}

impl Requests {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Result<Self> {
        let event =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| Error::Io {
                operation: "making an event descriptor for",
                path: "completions".into(),
                source: error.into(),
            })?;
        Ok(Self {
            next: AtomicU64::new(1),
            open: Mutex::default(),
            deadlines: Mutex::default(),
            earlier: Condvar::new(),
            leased: Mutex::default(),
            stores: Mutex::default(),
            stored: Condvar::new(),
            event,
            completions: Mutex::default(),
            to_drain: AtomicUsize::new(0),
            metrics,
        })
    }

    /// A number for a request that is about to be made, if there is room for its completion.
    pub(crate) fn number(&self, notify: Notify) -> Result<u64> {
        if notify == Notify::EventFd {
            let room = |count: usize| (count < MOST_COMPLETIONS).then_some(count + 1);
            self.to_drain
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, room)
                .map_err(|_| Error::TooManyCompletions { most: MOST_COMPLETIONS })?;
        }
        Ok(self.next.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn begin(&self, ticket: &Arc<TicketState>) {
        lock(&self.open).insert(ticket.id, ticket.clone());
        if let Some(deadline) = ticket.deadline {
            let mut deadlines = lock(&self.deadlines);
            let is_first =
                deadlines.by_time.first_key_value().is_none_or(|((first, _), _)| deadline < *first);
            deadlines.by_time.insert((deadline, ticket.id), ticket.clone());
            if is_first {
                self.earlier.notify_all();
            }
        }
        if ticket.has_ended() {
            // Closed, or out of time, before it was entered here.
            self.forget(ticket);
        }
    }

    fn forget(&self, ticket: &TicketState) {
        lock(&self.open).remove(&ticket.id);
        if let Some(deadline) = ticket.deadline {
            lock(&self.deadlines).by_time.remove(&(deadline, ticket.id));
        }
    }

    /// Called exactly once for each request, before its end can be observed.
    pub(crate) fn ended(&self, ticket: &Arc<TicketState>, completion: &Completion) {
        self.forget(ticket);
        self.metrics.request_ended(ticket.kind, completion);
        if !ticket.is_released() {
            let mut leased = lock(&self.leased);
            leased.retain(|ticket| !ticket.is_released());
            leased.push(ticket.clone());
        }
    }

    /// Tells those who watch the event descriptor of an end.
    pub(crate) fn announce(&self, completion: &Completion) {
        lock(&self.completions).push_back(completion.clone());
        // It cannot fail: the counter is far from full, and the descriptor is ours.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    pub(crate) fn drain(&self) -> Vec<Completion> {
        // The descriptor first: a completion that comes in between makes it readable again.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        let drained: Vec<Completion> = lock(&self.completions).drain(..).collect();
        self.to_drain.fetch_sub(drained.len(), Ordering::Relaxed);
        drained
    }

    pub(crate) fn open(&self) -> Vec<Arc<TicketState>> {
        lock(&self.open).values().cloned().collect()
    }

    pub(crate) fn open_count(&self) -> usize {
        lock(&self.open).len()
    }

    /// How many requests have ended, but not given back their memory.
    pub(crate) fn leased_count(&self) -> usize {
        let mut leased = lock(&self.leased);
        leased.retain(|ticket| !ticket.is_released());
        leased.len()
    }

    /// Ends requests whose time is over, until [`Requests::close`].
    pub(crate) fn watch_deadlines(&self) {
        let mut deadlines = lock(&self.deadlines);
        while !deadlines.closed {
            let now = Instant::now();
            let first = deadlines.by_time.first_entry().filter(|entry| entry.key().0 <= now);
            if let Some(entry) = first {
                let ticket = entry.remove();
                drop(deadlines);
                ticket.abort(Status::TimedOut);
                deadlines = lock(&self.deadlines);
                continue;
            }
            let next = deadlines.by_time.first_key_value().map(|((deadline, _), _)| *deadline - now);
            deadlines = match next {
                Some(time) => {
                    self.earlier.wait_timeout(deadlines, time).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.earlier.wait(deadlines).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Ends [`Requests::watch_deadlines`].
    pub(crate) fn close(&self) {
        lock(&self.deadlines).closed = true;
        self.earlier.notify_all();
    }

    /// Notes that a store begins. It is under way until the last clone of the returned value is dropped.
    pub(crate) fn begin_store(self: &Arc<Self>, number: u64) -> Arc<StoreUnderWay> {
        lock(&self.stores).insert(number);
        Arc::new(StoreUnderWay { requests: self.clone(), number })
    }

    /// Waits for all stores that have begun.
    pub(crate) fn flush(&self, timeout: Option<Duration>) -> Result<()> {
        let end = self.next.load(Ordering::Relaxed);
        let begin = Instant::now();
        let mut stores = lock(&self.stores);
        while stores.first().is_some_and(|first| *first < end) {
            stores = match timeout {
                None => self.stored.wait(stores).unwrap_or_else(PoisonError::into_inner),
                Some(timeout) => {
                    let left = timeout.saturating_sub(begin.elapsed());
                    if left.is_zero() {
                        return Err(Error::TimedOut {
                            what: "what is being stored",
                            waited_ms: timeout.as_millis(),
                        });
                    }
                    self.stored.wait_timeout(stores, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        Ok(())
    }
}

/// A store that has not ended wholly.
pub(crate) struct StoreUnderWay {
    requests: Arc<Requests>,
    number: u64,
}

impl Drop for StoreUnderWay {
    fn drop(&mut self) {
        lock(&self.requests.stores).remove(&self.number);
        self.requests.stored.notify_all();
    }
}
