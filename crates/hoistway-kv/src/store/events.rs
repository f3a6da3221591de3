//! The log of events, kept until the caller takes them. Each is also a warning of the logger, but for damage of many blocks.
#![forbid(unsafe_code)]

use crate::{Event, EventKind, Key, NamespaceId};
use hoistway_io::parallel::lock;
use std::{
    collections::{HashMap, VecDeque},
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

/// Events that are remembered; older ones are forgotten.
const MOST_EVENTS: usize = 1024;
/// Time between two warnings of damaged blocks in one file.
const WARNING_PERIOD: Duration = Duration::from_secs(60);
/// Files whose last warning is remembered.
const MOST_FILES: usize = 1024;

#[derive(Default)]
pub(crate) struct Events {
    queue: Mutex<VecDeque<Event>>,
    forgotten: AtomicU64,
    warned: Mutex<Warned>,
}

impl Events {
    /// Notes what happened to a block, or to the store.
    pub(crate) fn note(
        &self,
        kind: EventKind,
        block: Option<(NamespaceId, &Key)>,
        reason: impl Into<String>,
    ) {
        let event = self.queued(kind, block, reason.into());
        tracing::warn!(kind = ?event.kind, namespace = ?event.namespace, key = ?event.key, "{}", event.reason);
    }

    /// Notes that a block in `file` is damaged. A file with many such blocks is warned of once a minute.
    pub(crate) fn note_damage(
        &self,
        file: &Path,
        namespace: NamespaceId,
        key: &Key,
        reason: impl Into<String>,
    ) {
        let event = self.queued(EventKind::CorruptBlock, Some((namespace, key)), reason.into());
        let Event { kind, namespace, key, reason, .. } = event;
        let path = file.display();
        match lock(&self.warned).due(file, Instant::now()) {
            None => tracing::debug!(?kind, ?namespace, ?key, %path, "{reason}"),
            Some(0) => tracing::warn!(?kind, ?namespace, ?key, %path, "{reason}"),
            Some(more) => tracing::warn!(
                ?kind, ?namespace, ?key, %path,
                "{reason}; {more} more blocks of the file were damaged since the last warning"
            ),
        }
    }

    fn queued(&self, kind: EventKind, block: Option<(NamespaceId, &Key)>, reason: String) -> Event {
        let event = Event {
            at: SystemTime::now(),
            kind,
            namespace: block.map(|(namespace, _)| namespace),
            key: block.map(|(_, key)| key.clone()),
            reason,
        };
        let mut queue = lock(&self.queue);
        if queue.len() == MOST_EVENTS {
            queue.pop_front();
            self.forgotten.fetch_add(1, Ordering::Relaxed);
        }
        queue.push_back(event.clone());
        event
    }

    pub(crate) fn drain(&self) -> Vec<Event> {
        lock(&self.queue).drain(..).collect()
    }

    pub(crate) fn forgotten(&self) -> u64 {
        self.forgotten.load(Ordering::Relaxed)
    }
}

/// The files whose damaged blocks were warned of: when, and how many were damaged since.
#[derive(Default)]
struct Warned(HashMap<PathBuf, (Instant, u64)>);

impl Warned {
    /// How many more damaged blocks a warning is due for, besides that of now; `None` if none is due yet.
    fn due(&mut self, file: &Path, now: Instant) -> Option<u64> {
        if let Some((last, more)) = self.0.get_mut(file) {
            if now.saturating_duration_since(*last) < WARNING_PERIOD {
                *more += 1;
                return None;
            }
            *last = now;
            return Some(std::mem::take(more));
        }
        if self.0.len() == MOST_FILES {
            self.0.retain(|_, (last, _)| now.saturating_duration_since(*last) < WARNING_PERIOD);
        }
        // As many files at once are no reason to be silent.
        if self.0.len() < MOST_FILES {
            self.0.insert(file.to_owned(), (now, 0));
        }
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_of_one_file_is_warned_of_once_a_minute_with_the_count() {
        let mut warned = Warned::default();
        let (one, other, start) = (Path::new("one"), Path::new("other"), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(warned.due(one, start), Some(0));
        assert_eq!([warned.due(one, at(1)), warned.due(one, at(59))], [None, None]);
        assert_eq!(warned.due(other, at(59)), Some(0), "each file has its own warnings");
        assert_eq!(warned.due(one, at(60)), Some(2));
        assert_eq!(warned.due(one, at(61)), None);
        assert_eq!(warned.due(one, at(121)), Some(1));
    }

    #[test]
    fn files_that_are_remembered_are_bounded() {
        let mut warned = Warned::default();
        let start = Instant::now();
        for file in 0..2 * MOST_FILES {
            assert_eq!(warned.due(&PathBuf::from(file.to_string()), start), Some(0));
        }
        assert_eq!(warned.0.len(), MOST_FILES);
        assert_eq!(warned.due(Path::new("late"), start + WARNING_PERIOD), Some(0));
        assert_eq!(warned.0.len(), 1, "those of the minute before are forgotten");
    }
}
