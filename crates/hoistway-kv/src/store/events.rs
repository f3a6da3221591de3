//! The log of events, kept until the caller takes them.
#![forbid(unsafe_code)]

use crate::{Event, EventKind, Key, NamespaceId};
use hoistway_io::parallel::lock;
use std::{
    collections::VecDeque,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

/// Events that are remembered; older ones are forgotten.
const MOST_EVENTS: usize = 1024;

#[derive(Default)]
pub(crate) struct Events {
    queue: Mutex<VecDeque<Event>>,
    forgotten: AtomicU64,
}

impl Events {
    /// Notes what happened to a block, or to the store.
    pub(crate) fn note(
        &self,
        kind: EventKind,
        block: Option<(NamespaceId, &Key)>,
        reason: impl Into<String>,
    ) {
        let event = Event {
            at: SystemTime::now(),
            kind,
            namespace: block.map(|(namespace, _)| namespace),
            key: block.map(|(_, key)| key.clone()),
            reason: reason.into(),
        };
        tracing::warn!(kind = ?event.kind, namespace = ?event.namespace, key = ?event.key, "{}", event.reason);
        let mut queue = lock(&self.queue);
        if queue.len() == MOST_EVENTS {
            queue.pop_front();
            self.forgotten.fetch_add(1, Ordering::Relaxed);
        }
        queue.push_back(event);
    }

    pub(crate) fn drain(&self) -> Vec<Event> {
        lock(&self.queue).drain(..).collect()
    }

    pub(crate) fn forgotten(&self) -> u64 {
        self.forgotten.load(Ordering::Relaxed)
    }
}
