//! Reads of objects, from their store or the node's cache: as many at a time as the lane has, each on a thread of its own.
#![forbid(unsafe_code)]

use super::{CarriedRead, Done, Lane, ReadOp};
use crate::{parallel::thread_named, source::objects::ObjectSource};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use std::{
    io,
    panic::{self, AssertUnwindSafe},
    thread::JoinHandle,
    time::Duration,
};

/// How often a lane that waits for its reads lets its owner look whether the load is over.
const TICK: Duration = Duration::from_millis(50);

/// Makes a read of an object. Returns how many bytes came.
pub(super) type ReadObject = fn(&ObjectSource, &mut ReadOp) -> io::Result<usize>;

/// The reads of one thread. Dropping the lane waits for those that are in flight, which end soon once they are cancelled.
pub(super) struct ObjectLane {
    read: ReadObject,
    /// The name of its threads.
    name: &'static str,
    capacity: usize,
    in_flight: usize,
    threads: Vec<JoinHandle<()>>,
    /// The queue of its threads; `None` once they are to end.
    reads: Option<Sender<CarriedRead>>,
    waiting: Receiver<CarriedRead>,
    ends: Sender<Done>,
    ended: Receiver<Done>,
}

impl ObjectLane {
    pub(super) fn new(name: &'static str, capacity: usize, read: ReadObject) -> Self {
        let (reads, waiting) = unbounded();
        let (ends, ended) = unbounded();
        Self {
            read,
            name,
            capacity,
            in_flight: 0,
            threads: Vec::new(),
            reads: Some(reads),
            waiting,
            ends,
            ended,
        }
    }

    /// Starts a thread that makes one read after the other.
    fn start(&mut self) -> io::Result<()> {
        let (waiting, ends) = (self.waiting.clone(), self.ends.clone());
        let read = self.read;
        let thread = thread_named(self.name).spawn(move || {
            for mut op in waiting {
                let result = caught(|| carry_out(read, &mut op));
                if ends.send(Done { op, result }).is_err() {
                    return;
                }
            }
        })?;
        self.threads.push(thread);
        Ok(())
    }
}

/// The result of a read. A panic in it becomes an error, since the owner of the lane waits for each read.
fn caught(read: impl FnOnce() -> io::Result<usize>) -> io::Result<usize> {
    let result = panic::catch_unwind(AssertUnwindSafe(read));
    result.unwrap_or_else(|_| Err(io::Error::other("the read panicked: this is a bug in hoistway")))
}

fn carry_out(read: ReadObject, op: &mut ReadOp) -> io::Result<usize> {
    if op.cancel.is_cancelled() {
        return Err(io::Error::other("it was cancelled"));
    }
    let source = op.source.clone();
    let object = ObjectSource::of(&source).ok_or_else(|| io::Error::other("it is no object"))?;
    read(object, op)
}

impl Lane<CarriedRead> for ObjectLane {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn push(&mut self, op: CarriedRead) {
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
            let result = carry_out(self.read, &mut op);
            self.in_flight -= 1;
            done.push(Done { op, result });
            return Ok(());
        }
        if self.in_flight == 0 {
            return Ok(());
        }
        // Other lanes may have put theirs there.
        let before = done.len();
        match self.ended.recv_timeout(TICK) {
            Ok(first) => done.extend([first].into_iter().chain(self.ended.try_iter())),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(io::Error::other("the threads of the lane are gone"));
            }
        }
        self.in_flight -= done.len() - before;
        Ok(())
    }
}

impl Drop for ObjectLane {
    fn drop(&mut self) {
        self.reads = None;
        for thread in self.threads.drain(..) {
            // No panic of a read ends it.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::tests::lone_read;

    #[test]
    fn what_other_lanes_brought_is_not_counted() {
        let mut lane = ObjectLane::new("hoistway-test", 2, |_, _| Ok(0));
        let mut done: Vec<_> = (0..2).map(|_| Done { op: lone_read(), result: Ok(0) }).collect();
        lane.push(lone_read());
        while lane.in_flight() > 0 {
            lane.submit_and_wait(&mut done).unwrap();
        }
        assert_eq!(done.len(), 3);
    }

    #[test]
    fn a_read_that_panics_is_an_error_of_that_read() {
        assert!(caught(|| panic!("for the test")).is_err());
        assert_eq!(caught(|| Ok(5)).ok(), Some(5));
    }
}
