//! What a caller holds of a request.
#![forbid(unsafe_code)]

use crate::{Completion, Result};
use std::{sync::Arc, time::Duration};

/// A request under way. Dropping it changes nothing: the request goes on.
#[derive(Clone, Debug)]
pub struct Ticket {
    state: Arc<()>,
}

impl Ticket {
    /// Its number: what [`Completion::ticket`] says. Counted from 1 for each store.
    pub fn id(&self) -> u64 {
        0
    }

    /// How it ended; `None` if it has not.
    pub fn poll(&self) -> Option<Completion> {
        None
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut) if it does not end within `timeout`: it goes on then.
    /// [`Error::Closed`](crate::Error::Closed) in a child of `fork`.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Completion> {
        let _ = timeout;
        Err(crate::Error::Internal("not yet".into()))
    }

    /// Ends it now: items that have not ended are [`Status::Cancelled`](crate::Status::Cancelled). What the kernel has
    /// is not taken back: see [`Ticket::is_released`]. Whether it had not ended before.
    pub fn cancel(&self) -> bool {
        false
    }

    /// Whether nothing reads or writes the memory any more. After a time-out or a cancellation that may be later than
    /// the end.
    pub fn is_released(&self) -> bool {
        true
    }
}
