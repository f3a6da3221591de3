//! A thread whose end is waited for with a limit: it may hang in a daemon that does not answer.
#![forbid(unsafe_code)]

use std::{
    io,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    sync::{Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

/// How long the end is waited for.
const FAREWELL: Duration = Duration::from_secs(1);

/// Bytes of the thread's stack. Set, as `RUST_MIN_STACK` may give threads too little.
const STACK_BYTES: usize = 2 << 20;

#[derive(Debug)]
pub(crate) struct Worker {
    thread: Option<JoinHandle<()>>,
    /// Disconnected when the thread has ended.
    ended: Mutex<Receiver<()>>,
}

impl Worker {
    pub(crate) fn spawn(job: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let (alive, ended) = channel();
        let builder = thread::Builder::new().name("hoistway-usrbio".into()).stack_size(STACK_BYTES);
        let thread = builder.spawn(move || {
            let _alive: Sender<()> = alive;
            job();
        })?;
        Ok(Self { thread: Some(thread), ended: Mutex::new(ended) })
    }

    /// Waits for the end, which the caller has asked the thread for.
    pub(crate) fn finish(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        // Dropped by its own last task, a thread cannot wait for itself.
        if thread.thread().id() == thread::current().id() {
            return;
        }
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner).recv_timeout(FAREWELL);
        if ended == Err(RecvTimeoutError::Disconnected) {
            let _ = thread.join();
        }
    }
}
