//! Reads of objects: as many requests at a time as the lane has reads, each on a connection and a thread of its own.
#![forbid(unsafe_code)]

use super::{Done, Lane, ReadOp};
use crate::{parallel::thread_named, source::objects::ObjectSource};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

/// How often a lane that waits for its reads lets its owner look whether the load is over.
const TICK: Duration = Duration::from_millis(50);

/// Requests for the reads of one thread. Those that are not needed any more end when the lane is dropped: it stops them and
/// waits for that.
pub(super) struct HttpLane {
    capacity: usize,
    in_flight: usize,
    threads: Vec<JoinHandle<()>>,
    /// Where its threads take reads from; `None` once they are to end.
    reads: Option<Sender<ReadOp>>,
    waiting: Receiver<ReadOp>,
    ends: Sender<Done>,
    ended: Receiver<Done>,
    stop: Arc<AtomicBool>,
}

impl HttpLane {
    pub(super) fn new(capacity: usize) -> Self {
        let (reads, waiting) = unbounded();
        let (ends, ended) = unbounded();
        let (threads, stop) = (Vec::new(), Arc::default());
        Self { capacity, in_flight: 0, threads, reads: Some(reads), waiting, ends, ended, stop }
    }

    /// Starts a thread that makes one read after the other.
    fn start(&mut self) -> io::Result<()> {
        let (waiting, ends, stop) = (self.waiting.clone(), self.ends.clone(), self.stop.clone());
        let thread = thread_named("windlass-http").spawn(move || {
            for mut op in waiting {
                let result = read(&mut op, &stop);
                if ends.send(Done { op, result }).is_err() {
                    return;
                }
            }
        })?;
        self.threads.push(thread);
        Ok(())
    }
}

fn read(op: &mut ReadOp, stop: &AtomicBool) -> io::Result<usize> {
    if stop.load(Ordering::Relaxed) {
        return Err(io::Error::other("the load has ended"));
    }
    let source = op.source.clone();
    let object = ObjectSource::of(&source).ok_or_else(|| io::Error::other("it is no object"))?;
    object.read(op.buffer.target(op.progress)?, op.progress.offset, stop)
}

impl Lane<ReadOp> for HttpLane {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn push(&mut self, op: ReadOp) {
        self.in_flight += 1;
        if self.threads.len() < self.in_flight {
            // Without one more thread the others make the read, or the owner of the lane.
            let _ = self.start();
        }
        if let Some(reads) = &self.reads {
            // The lane itself holds the other end.
            let _ = reads.send(op);
        }
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        if self.threads.is_empty()
            && let Ok(mut op) = self.waiting.try_recv()
        {
            let result = read(&mut op, &self.stop);
            self.in_flight -= 1;
            done.push(Done { op, result });
            return Ok(());
        }
        if self.in_flight == 0 {
            return Ok(());
        }
        match self.ended.recv_timeout(TICK) {
            Ok(first) => done.extend([first].into_iter().chain(self.ended.try_iter())),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(io::Error::other("the threads of the lane are gone"));
            }
        }
        self.in_flight -= done.len();
        Ok(())
    }
}

impl Drop for HttpLane {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.reads = None;
        for thread in self.threads.drain(..) {
            // A panic was told by the read that is missing.
            let _ = thread.join();
        }
    }
}
