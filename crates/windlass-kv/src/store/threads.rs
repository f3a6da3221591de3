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
use crate::{Error, Result, Status, io::Transfers, sync::lock};
use crossbeam_channel::Receiver;
use std::{
    mem,
    sync::{Arc, PoisonError, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

/// Time that the system gets to end what it has when the store closes.
const GRACE: Duration = Duration::from_secs(10);

pub(crate) struct Threads {
    placement: Thread,
    commit: Thread,
    deadlines: Thread,
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
        thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                run();
                drop(end);
            })
            .map_err(|source| Error::Io { doing: "starting the thread", path: name.into(), source })?;
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
        let (placing, committing, keeping) = (core.clone(), core.clone(), (core.clone(), bell.clone()));
        let scrubbing = (core.options.scrub_bytes_per_second > 0).then(|| (core.clone(), bell.clone()));
        let scrub = |(core, bell): (Arc<Core>, Arc<Bell>)| {
            Thread::start("windlass-kv-scrub", move || scrub::run(&core, &bell))
        };
        Ok(Self {
            placement: Thread::start("windlass-kv-place", move || placement::run(&placing, &places))?,
            commit: Thread::start("windlass-kv-commit", move || commit::run(&committing, &groups))?,
            deadlines: Thread::start("windlass-kv-clock", with(|core| core.requests.watch_deadlines()))?,
            housekeeping: Thread::start("windlass-kv-house", move || {
                housekeeping::run(&keeping.0, &keeping.1)
            })?,
            scrub: scrubbing.map(scrub).transpose()?,
            bell,
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
        let mut threads = lock(&self.threads);
        let Some(running) = threads.take() else {
            return Ok(());
        };
        core.closing.store(true, Ordering::Release);
        let flushed = core.requests.flush(timeout);
        core.requests.open().iter().for_each(|ticket| {
            ticket.abort(Status::Cancelled);
        });
        let ended = running.end(core, Instant::now() + GRACE);
        // What never got all its shards gives back its places.
        core.assemblies.abandon_older_than(Duration::ZERO);
        let closed = core.layout.close();
        if !ended {
            return Err(Error::TimedOut { what: "closing the store", waited_ms: GRACE.as_millis() });
        }
        flushed.and(closed)
    }
}

impl Threads {
    /// Whether all have ended by then. Those that have not do so once the system lets them.
    fn end(self, core: &Arc<Core>, deadline: Instant) -> bool {
        // First who makes transfers, then who moves them, then who commits what was moved.
        let _ = core.placement.send(Message::Stop);
        self.bell.ring();
        // Its reads go by, one after the other, once the bell is rung.
        let scrubbed = self.scrub.is_none_or(|scrub| scrub.ends_by(deadline));
        let mut ended = self.placement.ends_by(deadline) & self.housekeeping.ends_by(deadline) & scrubbed;
        let transfers = core.transfers.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(transfers) = transfers {
            ended &= drop_by(transfers, deadline);
        }
        let _ = core.commits.send(Message::Stop);
        ended &= self.commit.ends_by(deadline);
        core.requests.close();
        ended & self.deadlines.ends_by(deadline)
    }
}

/// Ends the engine, which waits for what the kernel has. Whether it has ended by then.
fn drop_by(transfers: Arc<dyn Transfers>, deadline: Instant) -> bool {
    match Thread::start("windlass-kv-end", move || drop(transfers)) {
        Ok(thread) => thread.ends_by(deadline),
        // It was dropped with the thread that could not be made.
        Err(_) => true,
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.core.is_forked() {
            // The threads are the parent's, and locks may be held by them: nothing here is touched, nor freed.
            mem::forget(self.core.clone());
            if let Ok(threads) = self.threads.get_mut() {
                mem::forget(threads.take());
            }
            return;
        }
        if let Err(error) = self.close(Some(Duration::ZERO)) {
            tracing::warn!(root = %self.core.root.display(), "{error}");
        }
    }
}
