//! What a layout notices on its own, until the store makes events of it.
#![forbid(unsafe_code)]

use crate::EventKind;
use std::{collections::VecDeque, sync::Mutex};
use windlass_io::parallel::lock;

/// Notices that are kept; older ones are forgotten.
const MOST_NOTICES: usize = 1024;

/// Something that happened to the store, rather than to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Notice {
    pub(crate) kind: EventKind,
    /// What exactly, as a sentence.
    pub(crate) reason: String,
}

/// Notices of a layout, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Notices(Mutex<VecDeque<Notice>>);

impl Notices {
    pub(crate) fn note(&self, kind: EventKind, reason: String) {
        let mut notices = lock(&self.0);
        if notices.len() == MOST_NOTICES {
            notices.pop_front();
        }
        notices.push_back(Notice { kind, reason });
    }

    /// The notices since the last call.
    pub(crate) fn take(&self) -> Vec<Notice> {
        lock(&self.0).drain(..).collect()
    }
}
