//! What a sleeping worker is woken by: a descriptor, so that a ring can wait for it too.
#![forbid(unsafe_code)]

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    io::Errno,
};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

/// A signal to one worker: it stays until it is taken.
#[derive(Debug)]
pub(super) struct Wake(OwnedFd);

impl Wake {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Wakes the worker, now or when it next wants to sleep.
    pub(super) fn notify(&self) {
        // Fails if the signal was given so often that it does not fit any more: then it is there.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Takes the signal.
    pub(super) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    /// Sleeps until there is a signal, and takes it.
    pub(super) fn wait(&self) {
        while let Err(Errno::INTR) = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], None) {}
        self.clear();
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
