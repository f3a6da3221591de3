//! State that the threads of a store share.
#![forbid(unsafe_code)]

use super::{
    Assemblies, Events, Gate, Requests,
    commit::CommitTask,
    finder::Finder,
    gate::{Charge, Waiting},
    placement::StoreTask,
    unreadable::Unreadable,
};
use crate::{
    Error, EventKind, Key, NamespaceId, NamespaceOptions, Result, Stats, Status, StoreAccess, StoreOptions,
    io::{Direction, Failure, Job, Outcome, Transfers},
    layout::{Layout, Notice},
    metrics::Metrics,
    ticket::TicketState,
};
use crossbeam_channel::Sender;
use hoistway_io::parallel::lock;
use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    io::ErrorKind,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

/// Warnings that a report has.
const MOST_WARNINGS: usize = 64;

pub(crate) struct Core {
    pub(crate) options: StoreOptions,
    pub(crate) root: Arc<Path>,
    pub(crate) process: u32,
    pub(crate) layout: Arc<dyn Layout>,
    pub(crate) requests: Arc<Requests>,
    pub(crate) gate: Gate,
    /// Of use where finding blocks may wait.
    pub(crate) finder: Finder,
    pub(crate) assemblies: Assemblies,
    /// Blocks that the drive failed to give.
    pub(crate) unreadable: Unreadable,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) events: Events,
    /// Options of namespaces, which their handles hold, too.
    pub(crate) namespaces: Mutex<HashMap<NamespaceId, Arc<Mutex<NamespaceOptions>>>>,
    /// What reports warn of.
    pub(crate) warnings: Mutex<Vec<String>>,
    pub(crate) placement: Sender<Message<StoreTask>>,
    pub(crate) commits: Sender<Message<CommitTask>>,
    /// Gone once the store is closed: it is not dropped here, as the last to hold this may be one of its threads.
    pub(crate) transfers: RwLock<Option<Arc<dyn Transfers>>>,
    /// Whether callers are refused.
    pub(crate) closing: AtomicBool,
    /// Whether the far tier is refused, too, which moves blocks until then.
    pub(crate) ending: AtomicBool,
    /// Whether the system may write to places of this process as long as it lives, whatever has ended.
    pub(crate) has_lost: AtomicBool,
}

/// What a thread gets to do.
pub(crate) enum Message<T> {
    Task(T),
    /// It is to end, after what came before.
    Stop,
}

impl Core {
    /// An error if the store is closed, or this is a child of `fork`, where locks may be held by threads that it lacks.
    pub(crate) fn check_open(&self) -> Result<()> {
        if std::process::id() != self.process || self.closing.load(Ordering::Acquire) {
            return Err(self.closed());
        }
        Ok(())
    }

    /// As [`Core::check_open`] for the far tier, which may move blocks while the store closes.
    pub(crate) fn check_running(&self) -> Result<()> {
        if std::process::id() != self.process || self.ending.load(Ordering::Acquire) {
            return Err(self.closed());
        }
        Ok(())
    }

    pub(crate) fn closed(&self) -> Error {
        Error::Closed { path: self.root.to_path_buf() }
    }

    /// Returns the engine that moves bytes; `None` once the store is closed.
    pub(crate) fn transfers(&self) -> Option<Arc<dyn Transfers>> {
        self.transfers.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes the engine out: later calls of [`Core::transfers`] return `None`.
    pub(crate) fn take_transfers(&self) -> Option<Arc<dyn Transfers>> {
        self.transfers.write().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(crate) fn check_writable(&self) -> Result<()> {
        match self.options.access {
            StoreAccess::ReadWrite => Ok(()),
            StoreAccess::Read => Err(Error::ReadOnly { path: self.root.to_path_buf() }),
        }
    }

    pub(crate) fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    /// Has transfers of a request begin as there is room for them.
    pub(crate) fn enter(&self, ticket: &TicketState, transfers: Vec<(Charge, Waiting)>) {
        if transfers.is_empty() {
            return;
        }
        self.submit(self.gate.enter_or_queue(transfers));
        if ticket.withdrawn.is_set() {
            // It has ended meanwhile, and they may have come after it looked for them.
            self.take_back(ticket);
        }
    }

    /// A transfer that entered the gate has ended.
    pub(crate) fn left(&self, charge: Charge) {
        self.submit(self.gate.leave(charge));
    }

    /// Hands transfers to the engine. Once the store is closed, they end as cancelled.
    pub(crate) fn submit(&self, transfers: Vec<Waiting>) {
        if !self.layout.find_waits() {
            return self.begin(transfers);
        }
        let (mut loads, mut others) = (Vec::new(), Vec::new());
        for transfer in transfers {
            match transfer {
                Waiting::Load(load) => loads.push(*load),
                Waiting::Job(_) => others.push(transfer),
            }
        }
        self.begin(others);
        if !loads.is_empty() {
            refuse(self.finder.push(loads));
        }
    }

    /// As [`Core::submit`], by a thread that may find blocks.
    pub(crate) fn begin(&self, transfers: Vec<Waiting>) {
        if !transfers.is_empty() {
            submit_in_turn(self.transfers(), transfers);
        }
    }

    /// Finds no blocks for loads any more.
    pub(crate) fn close_finder(&self) {
        refuse(self.finder.close());
    }

    /// Counts what a transfer did.
    pub(crate) fn note_outcome(&self, direction: Direction, outcome: &Outcome) {
        self.metrics.transferred(direction, outcome);
        let has_failed = match &outcome.result {
            // A block that was removed before its file was opened is a miss.
            Err(Failure::Io(error)) => direction == Direction::Write || error.kind() != ErrorKind::NotFound,
            Err(Failure::Lost(_) | Failure::Short { .. } | Failure::Device(_)) => true,
            Err(Failure::TimedOut | Failure::Cancelled) | Ok(()) => false,
        };
        if has_failed {
            self.metrics.io_errors.inc();
        }
    }

    /// A request has ended early: takes back what has not begun of it.
    pub(crate) fn withdraw(&self, ticket: &TicketState, status: Status) {
        self.take_back(ticket);
        if !ticket.is_released() && status == Status::TimedOut {
            self.events.note(
                EventKind::Leased,
                None,
                format!("request {} took too long; its memory is in use until the system is done", ticket.id),
            );
        }
    }

    fn take_back(&self, ticket: &TicketState) {
        // In the order in which transfers go from one to the other.
        self.gate.withdraw(ticket.id).into_iter().for_each(cancel);
        self.finder.withdraw(ticket.id).into_iter().for_each(cancel);
        if let Some(transfers) = self.transfers() {
            transfers.cancel(ticket.id);
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let usage = self.layout.usage();
        let mut stats = Stats {
            blocks: usage.blocks,
            payload_bytes: usage.payload_bytes,
            allocated_bytes: usage.allocated_bytes,
            root_bytes: usage.root_bytes,
            capacity_bytes: self.options.capacity_bytes,
            index_bytes: usage.index_bytes,
            recovery: usage.recovery,
            lost_on_recovery: usage.lost_on_recovery,
            damaged_records: usage.damaged_records,
            evicted_blocks: usage.evicted_blocks,
            expired_blocks: usage.expired_blocks,
            corrupt_blocks: usage.corrupt_blocks,
            unusable_namespaces: usage.unusable_namespaces,
            open_requests: self.requests.open_count() as u64,
            in_flight_bytes: self.gate.in_flight_bytes(),
            queued_loads: self.gate.waiting_loads() as u64,
            partial_blocks: self.assemblies.len() as u64,
            leased_requests: self.requests.leased_count() as u64,
            forgotten_events: self.events.forgotten(),
            ..Stats::default()
        };
        self.metrics.count_into(&mut stats);
        stats
    }

    /// Lets the layout forget namespaces of which there are no handles any more.
    pub(crate) fn close_namespaces(&self) -> Result<()> {
        let mut namespaces = lock(&self.namespaces);
        let mut closed = Ok(());
        namespaces.retain(|id, options| {
            // A handle is made with the lock held.
            if Arc::strong_count(options) > 1 {
                return true;
            }
            let forgotten = self.layout.close_namespace(*id);
            let is_open = !matches!(forgotten, Ok(true));
            if !is_open {
                self.metrics.forget(*id);
            }
            if let Err(error) = forgotten {
                closed = Err(error);
            }
            is_open
        });
        closed
    }

    /// Makes events of what the layout has noticed.
    pub(crate) fn note_notices(&self) {
        self.layout.observed().take_notices().into_iter().for_each(|notice| self.warn(notice));
    }

    /// Makes an event of a notice, and has reports say it.
    pub(crate) fn warn(&self, Notice { kind, reason }: Notice) {
        let mut warnings = lock(&self.warnings);
        if warnings.len() < MOST_WARNINGS && !warnings.contains(&reason) {
            warnings.push(reason.clone());
        }
        drop(warnings);
        self.events.note(kind, None, reason);
    }

    pub(crate) fn note_block(
        &self,
        kind: EventKind,
        namespace: NamespaceId,
        key: &Key,
        reason: impl Into<String>,
    ) {
        self.events.note(kind, Some((namespace, key)), reason);
    }
}

/// Transfers, and the engine that moves them.
type Submission = (Option<Arc<dyn Transfers>>, Vec<Waiting>);

thread_local! {
    /// What this thread is to submit after what it submits now; `None` while it submits nothing.
    static NEXT: RefCell<Option<VecDeque<Submission>>> = const { RefCell::new(None) };
}

/// Submits transfers. One that is refused, or finds its block gone, ends at once, and its end may submit the next, which
/// ends too: those are submitted one after the other here, not each within the other.
fn submit_in_turn(transfers: Option<Arc<dyn Transfers>>, waiting: Vec<Waiting>) {
    let mut submission = Some((transfers, waiting));
    NEXT.with_borrow_mut(|next| match next {
        Some(next) => next.extend(submission.take()),
        None => *next = Some(VecDeque::new()),
    });
    if submission.is_none() {
        return;
    }
    let _done = Done;
    while let Some((transfers, waiting)) = submission {
        match transfers {
            Some(transfers) => {
                let jobs: Vec<Job> = waiting.into_iter().filter_map(begin).collect();
                if !jobs.is_empty() {
                    transfers.submit(jobs);
                }
            }
            None => waiting.into_iter().for_each(cancel),
        }
        submission = NEXT.with_borrow_mut(|next| next.as_mut().and_then(VecDeque::pop_front));
    }
}

/// Ends transfers as cancelled.
fn refuse(transfers: Vec<Waiting>) {
    if !transfers.is_empty() {
        submit_in_turn(None, transfers);
    }
}

/// Also if a transfer's end panics, this thread may submit others later.
struct Done;

impl Drop for Done {
    fn drop(&mut self) {
        drop(NEXT.take());
    }
}

/// What is to be moved; `None` if that is nothing any more.
fn begin(transfer: Waiting) -> Option<Job> {
    match transfer {
        Waiting::Job(job) => Some(*job),
        Waiting::Load(load) => load.begin(),
    }
}

/// Ends a transfer that was never begun.
fn cancel(transfer: Waiting) {
    match transfer {
        Waiting::Job(job) => {
            let Job { keep, done, .. } = *job;
            drop(keep);
            done(Outcome::failed(Failure::Cancelled));
        }
        Waiting::Load(load) => load.cancel(),
    }
}
