//! Tickets: a caller's handles of requests.
#![forbid(unsafe_code)]

use crate::{
    Carrier, Completion, Error, KeepAlive, Notify, Result, Status,
    io::{Failure, Outcome, Withdrawn},
    store::Core,
};
use hoistway_io::parallel::lock;
use hoistway_io::span::OwnSpan;
use std::{
    collections::BTreeMap,
    fmt, mem,
    path::Path,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tracing::{Span, debug_span, field::Empty};

/// A request under way. Dropping it changes nothing: the request goes on.
#[derive(Clone)]
pub struct Ticket {
    state: Arc<TicketState>,
}

impl Ticket {
    pub(crate) fn new(state: Arc<TicketState>) -> Self {
        Self { state }
    }

    /// Returns its number, which [`Completion::ticket`] repeats. Each store counts from 1.
    pub fn id(&self) -> u64 {
        self.state.id
    }

    /// Returns how it ended; `None` if it has not. In a child of `fork` it never ends.
    pub fn poll(&self) -> Option<Completion> {
        if self.state.is_forked() {
            return None;
        }
        lock(&self.state.progress).completion.as_deref().cloned()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// [`Error::TimedOut`] if it does not end within `timeout`: it goes on then. [`Error::Closed`] in a child of
    /// `fork`.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Completion> {
        if self.state.is_forked() {
            return Err(Error::Closed { path: self.state.root.to_path_buf() });
        }
        let begin = Instant::now();
        let mut progress = lock(&self.state.progress);
        loop {
            if let Some(completion) = &progress.completion {
                return Ok(Completion::clone(completion));
            }
            progress = match timeout {
                None => self.state.ended.wait(progress).unwrap_or_else(PoisonError::into_inner),
                Some(timeout) => {
                    let left = timeout.saturating_sub(begin.elapsed());
                    if left.is_zero() {
                        return Err(Error::TimedOut { what: "the request", waited_ms: timeout.as_millis() });
                    }
                    self.state.ended.wait_timeout(progress, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Cancels it: items that have not ended are [`Status::Cancelled`]. Transfers in flight go on: see
    /// [`Ticket::is_released`]. Returns `false` if it had ended before.
    pub fn cancel(&self) -> bool {
        !self.state.is_forked() && self.state.abort(Status::Cancelled)
    }

    /// Whether nothing reads or writes the memory any more, and what keeps it has been dropped. After a time-out or a
    /// cancellation that may be later than the end. In a child of `fork` it is not known, and `false`.
    pub fn is_released(&self) -> bool {
        !self.state.is_forked() && self.state.is_released()
    }

    /// Whether the memory was not free when the request ended, and may never be: a ring or a device failed while it used the
    /// memory. It is kept until the process ends, or until the device tells that it has ended its copies. Only then
    /// [`Ticket::is_released`] becomes true.
    pub fn is_lost(&self) -> bool {
        self.state.is_lost.load(Ordering::Acquire)
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket").field("id", &self.state.id).finish_non_exhaustive()
    }
}

/// Permission to touch the memory of a request: held by whatever does, or is about to.
pub(crate) struct MemoryLease {
    /// The caller's: dropped with the last lease.
    _keep: KeepAlive,
    /// Dropped after it, as fields are in their order: until then the memory counts as in use.
    _held: Arc<Held>,
}

/// Lives until what the caller gave to keep the memory has been dropped.
struct Held;

/// One request, as its ticket, its transfers and the store's threads share it.
pub(crate) struct TicketState {
    pub(crate) id: u64,
    pub(crate) submitted: Instant,
    pub(crate) deadline: Option<Instant>,
    pub(crate) notify: Notify,
    pub(crate) kind: Kind,
    /// Set if it ends early.
    pub(crate) withdrawn: Withdrawn,
    process: u32,
    root: Arc<Path>,
    core: Weak<Core>,
    progress: Mutex<Progress>,
    ended: Condvar,
    /// What transfers that are still to be made will clone; gone once the request has ended, or all are made.
    lease: Mutex<Option<Arc<MemoryLease>>>,
    memory: Weak<Held>,
    /// Whether a transfer failed after which the memory may be in use for ever.
    is_lost: AtomicBool,
}

struct Progress {
    /// Until the request ends.
    span: OwnSpan,
    items: Vec<Option<Status>>,
    open: usize,
    bytes: u64,
    carried: BTreeMap<Carrier, u64>,
    bounced_bytes: u64,
    far_bytes: u64,
    /// Blocks that the far tier is not known to have taken.
    far_missing: u64,
    started: Option<Instant>,
    /// What is to happen once all items have ended, before the request does.
    last_step: Option<LastStep>,
    /// Whether the last step is under way.
    is_held: bool,
    has_ended: bool,
    completion: Option<Arc<Completion>>,
}

/// Is given the ticket and the statuses of its items; [`TicketState::conclude`] ends the request.
pub(crate) type LastStep = Box<dyn FnOnce(&Arc<TicketState>, &[Status]) + Send>;

/// What a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Load,
    Store,
}

/// What a request is from its beginning.
pub(crate) struct TicketOptions {
    pub(crate) id: u64,
    pub(crate) items: usize,
    pub(crate) deadline: Option<Instant>,
    pub(crate) notify: Notify,
    pub(crate) kind: Kind,
    pub(crate) keep: KeepAlive,
}

/// How one item ended.
pub(crate) struct Settled {
    /// Its number in the request.
    pub(crate) item: usize,
    pub(crate) status: Status,
    /// Bytes that were delivered or stored.
    pub(crate) bytes: u64,
}

impl TicketState {
    pub(crate) fn new(core: &Arc<Core>, options: TicketOptions) -> Arc<Self> {
        let held = Arc::new(Held);
        let memory = Arc::downgrade(&held);
        let lease = Arc::new(MemoryLease { _keep: options.keep, _held: held });
        let (ticket, items) = (options.id, options.items);
        let span = match options.kind {
            Kind::Load => debug_span!("kv.load", ticket, items, bytes = Empty),
            Kind::Store => debug_span!("kv.store", ticket, items, bytes = Empty),
        };
        Arc::new(Self {
            id: options.id,
            submitted: Instant::now(),
            deadline: options.deadline,
            notify: options.notify,
            kind: options.kind,
            withdrawn: Withdrawn::default(),
            process: core.process,
            root: core.root.clone(),
            core: Arc::downgrade(core),
            progress: Mutex::new(Progress {
                span: span.into(),
                items: vec![None; options.items],
                open: options.items,
                bytes: 0,
                carried: BTreeMap::new(),
                bounced_bytes: 0,
                far_bytes: 0,
                far_missing: 0,
                started: None,
                last_step: None,
                is_held: false,
                has_ended: false,
                completion: None,
            }),
            ended: Condvar::new(),
            memory,
            lease: Mutex::new(Some(lease)),
            is_lost: AtomicBool::new(false),
        })
    }

    /// Locks of a child of `fork` may be held by threads that it lacks.
    fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    pub(crate) fn has_ended(&self) -> bool {
        lock(&self.progress).has_ended
    }

    pub(crate) fn is_released(&self) -> bool {
        self.memory.strong_count() == 0
    }

    /// For a transfer of this request; `None` if it has ended, and its memory is not to be touched any more.
    pub(crate) fn lease(&self) -> Option<Arc<MemoryLease>> {
        lock(&self.lease).clone()
    }

    /// No more transfers will be made for it.
    pub(crate) fn release(&self) {
        let lease = lock(&self.lease).take();
        drop(lease);
    }

    /// Notes what a transfer that had its memory came to. Called before the transfer's items are settled, so that who
    /// learns of the end knows.
    pub(crate) fn transferred(&self, outcome: &Outcome) {
        if matches!(outcome.result, Err(Failure::Lost(_))) {
            self.is_lost.store(true, Ordering::Release);
        }
        let mut progress = lock(&self.progress);
        if progress.has_ended {
            return;
        }
        for (carrier, bytes) in &outcome.carried {
            *progress.carried.entry(*carrier).or_default() += bytes;
        }
        progress.bounced_bytes += outcome.bounced_bytes;
    }

    /// Notes how items ended, as far as the request has not ended before.
    pub(crate) fn settle(
        self: &Arc<Self>,
        items: impl IntoIterator<Item = Settled>,
        started: Option<Instant>,
    ) {
        let mut progress = lock(&self.progress);
        if progress.has_ended {
            return;
        }
        progress.started = match (progress.started, started) {
            (Some(first), Some(other)) => Some(first.min(other)),
            (first, other) => first.or(other),
        };
        for settled in items {
            let slot = &mut progress.items[settled.item];
            if slot.is_none() {
                *slot = Some(settled.status);
                progress.open -= 1;
                progress.bytes = progress.bytes.saturating_add(settled.bytes);
            }
        }
        if progress.open > 0 || progress.is_held {
            return;
        }
        let Some(last_step) = progress.last_step.take() else {
            return self.end(progress, None);
        };
        progress.is_held = true;
        let statuses: Vec<_> = progress.items.iter().copied().flatten().collect();
        drop(progress);
        last_step(self, &statuses);
    }

    /// Sets what happens before the request ends, unless it ends early. Called before any item is settled. `far_missing`:
    /// blocks that count as not taken by the far tier until [`TicketState::conclude`] says how many those are.
    pub(crate) fn set_last_step(&self, last_step: LastStep, far_missing: u64) {
        let mut progress = lock(&self.progress);
        if !progress.has_ended {
            progress.far_missing = far_missing;
            progress.last_step = Some(last_step);
        }
    }

    /// Ends the request after its last step. `far_missing`: blocks that the far tier has not taken.
    pub(crate) fn conclude(self: &Arc<Self>, far_missing: u64) {
        let mut progress = lock(&self.progress);
        if !progress.has_ended {
            progress.far_missing = far_missing;
            self.end(progress, None);
        }
    }

    /// Notes what a request to the far tier has moved for this one.
    pub(crate) fn moved_by_far(&self, far: &Ticket, completion: &Completion) {
        if far.is_lost() {
            self.is_lost.store(true, Ordering::Release);
        }
        let mut progress = lock(&self.progress);
        if progress.has_ended {
            return;
        }
        for (carrier, bytes) in &completion.carried {
            *progress.carried.entry(*carrier).or_default() += bytes;
        }
        progress.bounced_bytes += completion.bounced_bytes;
        progress.far_bytes += completion.bytes;
    }

    /// Ends it now, with this status for what has not ended. Whether it had not ended before.
    pub(crate) fn abort(self: &Arc<Self>, status: Status) -> bool {
        let mut progress = lock(&self.progress);
        if progress.has_ended {
            return false;
        }
        for slot in &mut progress.items {
            slot.get_or_insert(status);
        }
        self.end(progress, Some(status));
        true
    }

    /// Everything is accounted for before the end is reported, and the memory is free then unless a transfer has
    /// it. `early`: what items ended as that had not ended.
    fn end(self: &Arc<Self>, mut progress: MutexGuard<'_, Progress>, early: Option<Status>) {
        let now = Instant::now();
        let started = progress.started.unwrap_or(now);
        let completion = Arc::new(Completion {
            ticket: self.id,
            items: mem::take(&mut progress.items).into_iter().flatten().collect(),
            bytes: progress.bytes,
            carried: mem::take(&mut progress.carried),
            bounced_bytes: progress.bounced_bytes,
            far_bytes: progress.far_bytes,
            far_missing: progress.far_missing,
            queued: started.saturating_duration_since(self.submitted),
            moving: now.saturating_duration_since(started),
        });
        progress.has_ended = true;
        let span = mem::replace(&mut progress.span, Span::none().into());
        span.record("bytes", completion.bytes);
        let last_step = progress.last_step.take();
        drop(progress);
        // It holds the store open for `flush`, and a caller may keep the ticket for ever.
        drop(last_step);
        drop(span);
        if early.is_some() {
            self.withdrawn.set();
        }
        self.release();
        let core = self.core.upgrade();
        if let Some(core) = &core {
            if let Some(status) = early {
                core.withdraw(self, status);
            }
            core.requests.ended(self, &completion);
        }
        lock(&self.progress).completion = Some(completion.clone());
        self.ended.notify_all();
        if let Some(core) = core.filter(|_| self.notify == Notify::EventFd) {
            core.requests.announce(&completion);
        }
    }
}
