//! Work that threads hand over to one thread.
#![forbid(unsafe_code)]

use crate::parallel::lock;
use std::sync::{
    Mutex,
    mpsc::{self, Receiver, Sender},
};

/// Items that one thread takes, the oldest first. Items that are left are dropped with it.
#[derive(Debug)]
pub(crate) struct Handoff<T> {
    /// `None` once it is closed.
    sender: Mutex<Option<Sender<T>>>,
    receiver: Mutex<Receiver<T>>,
}

impl<T> Handoff<T> {
    /// What hands items over, after this is closed too. `None` if it is closed already.
    pub(crate) fn sender(&self) -> Option<Sender<T>> {
        lock(&self.sender).clone()
    }

    /// The next item. Waits for it; `None` once there is none, it is closed, and no [sender](Handoff::sender) is left.
    pub(crate) fn next(&self) -> Option<T> {
        lock(&self.receiver).recv().ok()
    }

    /// The next item, if it is there.
    pub(crate) fn try_next(&self) -> Option<T> {
        lock(&self.receiver).try_recv().ok()
    }

    /// No item is sent any more.
    pub(crate) fn close(&self) {
        *lock(&self.sender) = None;
    }
}

impl<T> Default for Handoff<T> {
    fn default() -> Self {
        let (sender, receiver) = mpsc::channel();
        Self { sender: Mutex::new(Some(sender)), receiver: Mutex::new(receiver) }
    }
}
