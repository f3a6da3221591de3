//! The threads of a store, and how they end.
#![forbid(unsafe_code)]

use super::{
    Core, Inner,
    commit::{self, CommitTask},
    core::Message,
    housekeeping::{self, Bell},
    placement::{self, StoreTask},
    scrub,
};
use crate::{Error, Result, Status, io::Transfers};
use crossbeam_channel::Receiver;
use hoistway_io::parallel::{lock, thread_named};
use std::{
    io, mem,
    sync::{Arc, Condvar, Mutex, PoisonError, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

/// Time that the system gets to end what it has when the store closes.
const GRACE: Duration = Duration::from_secs(10);

/// Time that the far tier gets at least to end what it has.
const FAR_GRACE: Duration = Duration::from_secs(1);

/// Why a store does not give back its directory that has ended otherwise.
const LOST: &str = "a ring or a device failed, and may write to its files until this process ends; end it, and the \
                    next process that stores takes its directory over";

pub(crate) struct Threads {
    placement: Thread,
    /// Syncs the bytes of blocks.
    prepare: Thread,
    commit: Thread,
    deadlines: Thread,
    /// Only where finding blocks may wait.
    finder: Option<Thread>,
    housekeeping: Thread,
    /// Only if blocks are to be scrubbed.
    scrub: Option<Thread>,
    bell: Arc<Bell>,
}

/// A thread that says when it ends, so that waiting for it can be given up.
struct Thread(Receiver<()>);

impl Thread {
    fn start(name: &str, run: impl FnOnce() + Send + 'static) -> Result<Self> {
        let (end, ended) = crossbeam_channel::bounded::<()>(0);
        thread_named(name)
            .spawn(move || {
                run();
                drop(end);
            })
            .map_err(|source| Error::Io { operation: "starting the thread", path: name.into(), source })?;
        Ok(Self(ended))
    }

    /// Whether it has ended by then.
    fn ends_by(&self, deadline: Instant) -> bool {
        // Nothing is ever sent: the channel breaks when the thread ends.
        matches!(self.0.recv_deadline(deadline), Err(error) if !error.is_timeout())
    }
}

impl Threads {
    pub(crate) fn start(
        core: &Arc<Core>,
        places: Receiver<Message<StoreTask>>,
        groups: Receiver<Message<CommitTask>>,
    ) -> Result<Self> {
        let bell = Arc::new(Bell::default());
        let with = |run: fn(&Arc<Core>)| {
            let core = core.clone();
            move || run(&core)
        };
        let (placing, preparing, committing) = (core.clone(), core.clone(), core.clone());
        let keeping = (core.clone(), bell.clone());
        // One group waits, so that the next one gathers meanwhile.
        let (prepared, groups_to_commit) = crossbeam_channel::bounded(1);
        // Who only reads owns no blocks.
        let scrubs = core.options.scrub_bytes_per_second > 0 && core.check_writable().is_ok();
        let scrubbing = scrubs.then(|| (core.clone(), bell.clone()));
        let scrub = |(core, bell): (Arc<Core>, Arc<Bell>)| {
            Thread::start("hoistway-kv-scrub", move || scrub::run(&core, &bell))
        };
        let finding = core.layout.find_waits().then(|| with(|core| core.finder.run(core)));
        let ringing = bell.clone();
        let start = || -> Result<Self> {
            Ok(Self {
                placement: Thread::start("hoistway-kv-place", move || placement::run(&placing, &places))?,
                prepare: Thread::start("hoistway-kv-sync", move || {
                    commit::prepare(&preparing, &groups, &prepared);
                })?,
                commit: Thread::start("hoistway-kv-commit", move || {
                    commit::run(&committing, &groups_to_commit);
                })?,
                deadlines: Thread::start("hoistway-kv-clock", with(|core| core.requests.watch_deadlines()))?,
                finder: finding.map(|find| Thread::start("hoistway-kv-find", find)).transpose()?,
                housekeeping: Thread::start("hoistway-kv-house", move || {
                    housekeeping::run(&keeping.0, &keeping.1)
                })?,
                scrub: scrubbing.map(scrub).transpose()?,
                bell,
            })
        };
        start().inspect_err(|_| {
            // Those that have started end by themselves.
            let _ = core.placement.send(Message::Stop);
            let _ = core.commits.send(Message::Stop);
            ringing.ring();
            core.close_finder();
            core.requests.close();
            if let Some(transfers) = core.take_transfers() {
                drop_by(transfers, Instant::now() + GRACE);
            }
        })
    }
}

impl Inner {
    /// See [`Store::close`](super::Store::close).
    pub(super) fn close(&self, timeout: Option<Duration>) -> Result<()> {
        let core = &self.core;
        if core.is_forked() {
            return Err(core.closed());
        }
        let Some(running) = self.threads.take(timeout)? else {
            return Ok(());
        };
        let _closed = ClosesOnDrop(&self.threads);
        let begin = Instant::now();
        let left = || timeout.map(|timeout| timeout.saturating_sub(begin.elapsed()));
        // No store is accepted from here on, and what was accepted is to reach the far tier, too.
        core.closing.store(true, Ordering::Release);
        let flushed = core.requests.flush(timeout);
        let mut unwritten = self.tier.as_ref().map_or(0, |tier| {
            tier.drain(left());
            tier.stop_moves()
        });
        core.ending.store(true, Ordering::Release);
        core.requests.open().iter().for_each(|ticket| {
            ticket.abort(Status::Cancelled);
        });
        if let Some(tier) = &self.tier {
            unwritten += tier.too_late();
            tier.end(left().unwrap_or(GRACE).max(FAR_GRACE));
        }
        let ended = running.end(core, Instant::now() + GRACE);
        let has_lost = core.has_lost.load(Ordering::Acquire);
        // What never got all its shards gives back its places.
        core.assemblies.abandon_older_than(Duration::ZERO, &*core.layout);
        if !ended || has_lost {
            // The system may still write to places of this process, so no other process may take over its directory
            // before this one ends. The process that takes it over finds what is not in the log.
            mem::forget(core.layout.clone());
            if has_lost {
                let path = core.root.to_path_buf();
                return Err(Error::Io { operation: "closing", path, source: io::Error::other(LOST) });
            }
            return Err(Error::TimedOut { what: "closing the store", waited_ms: GRACE.as_millis() });
        }
        core.layout.close()?;
        match &self.tier {
            Some(tier) if unwritten > 0 => {
                Err(Error::NotWrittenBack { blocks: unwritten, path: tier.root().to_path_buf() })
            }
            _ => flushed,
        }
    }
}

/// The threads of a store, until the store is closed.
pub(super) struct Running {
    state: Mutex<State>,
    closed: Condvar,
}

enum State {
    Open(Threads),
    /// A thread is closing the store.
    Closing,
    Closed,
}

impl Running {
    pub(super) fn new(threads: Threads) -> Self {
        Self { state: Mutex::new(State::Open(threads)), closed: Condvar::new() }
    }

    /// The threads, for the first caller. Others wait until that one has closed the store.
    fn take(&self, timeout: Option<Duration>) -> Result<Option<Threads>> {
        let mut state = lock(&self.state);
        match mem::replace(&mut *state, State::Closing) {
            State::Open(threads) => return Ok(Some(threads)),
            other => *state = other,
        }
        let is_closing = |state: &mut State| matches!(state, State::Closing);
        let Some(timeout) = timeout else {
            drop(self.closed.wait_while(state, is_closing).unwrap_or_else(PoisonError::into_inner));
            return Ok(None);
        };
        let (state, _) = self
            .closed
            .wait_timeout_while(state, timeout, is_closing)
            .unwrap_or_else(PoisonError::into_inner);
        match &*state {
            State::Closing => {
                Err(Error::TimedOut { what: "closing the store", waited_ms: timeout.as_millis() })
            }
            State::Open(_) | State::Closed => Ok(None),
        }
    }
}

/// Says that the store is closed, however closing it ends.
struct ClosesOnDrop<'a>(&'a Running);

impl Drop for ClosesOnDrop<'_> {
    fn drop(&mut self) {
        *lock(&self.0.state) = State::Closed;
        self.0.closed.notify_all();
    }
}

impl Threads {
    /// Whether all have ended by then. Those that have not do so once the system lets them.
    fn end(self, core: &Arc<Core>, deadline: Instant) -> bool {
        // First the threads that make transfers, then those that move them, then those that commit.
        let _ = core.placement.send(Message::Stop);
        core.close_finder();
        self.bell.ring();
        // Its reads go by, one after the other, once the bell is rung.
        let scrubbed = self.scrub.is_none_or(|scrub| scrub.ends_by(deadline));
        let found = self.finder.is_none_or(|finder| finder.ends_by(deadline));
        let mut ended =
            self.placement.ends_by(deadline) & self.housekeeping.ends_by(deadline) & scrubbed & found;
        if let Some(transfers) = core.take_transfers() {
            ended &= drop_by(transfers, deadline);
        }
        let _ = core.commits.send(Message::Stop);
        ended &= self.prepare.ends_by(deadline) & self.commit.ends_by(deadline);
        core.requests.close();
        ended & self.deadlines.ends_by(deadline)
    }
}

/// Ends the engine, which waits for what the kernel has. Whether it has ended by then.
fn drop_by(transfers: Arc<dyn Transfers>, deadline: Instant) -> bool {
    let (send, receive) = crossbeam_channel::bounded::<Arc<dyn Transfers>>(1);
    let end = move || {
        if let Ok(transfers) = receive.recv() {
            // A thread that submits transfers just now holds the engine too, for a moment.
            while Arc::strong_count(&transfers) > 1 {
                thread::sleep(Duration::from_millis(1));
            }
            drop(transfers);
        }
    };
    match Thread::start("hoistway-kv-end", end) {
        Ok(thread) => {
            let _ = send.send(transfers);
            thread.ends_by(deadline)
        }
        Err(_) => {
            // To end it here might take for ever.
            mem::forget(transfers);
            false
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.core.is_forked() {
            // The threads are the parent's, and locks may be held by them: nothing here is touched, nor freed.
            mem::forget(self.core.clone());
            if let Ok(state) = self.threads.state.get_mut() {
                mem::forget(mem::replace(state, State::Closed));
            }
            return;
        }
        if let Err(error) = self.close(Some(Duration::ZERO)) {
            tracing::warn!(root = %self.core.root.display(), "{error}");
        }
    }
}
