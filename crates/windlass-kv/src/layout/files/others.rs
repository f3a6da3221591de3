//! What other processes have written and removed since this one last looked at all files, by what they say themselves.
//!
//! Where it is not certain, more is assumed: what was written while files were looked at counts twice until the next
//! look, and so does what was removed meanwhile.
#![forbid(unsafe_code)]

use super::{lock, names};
use crate::{
    disk::{Disk, RealDisk},
    format::lease::{Account, LEASE_LEN, Lease},
};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Mutex,
    time::SystemTime,
};

/// The other writers.
#[derive(Debug, Default)]
pub(super) struct Others {
    state: Mutex<State>,
    /// Held by who reads what they say, so that nobody takes it for newer than it is.
    reading: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    /// By their directories.
    writers: HashMap<PathBuf, Known>,
    /// Bytes of their blocks that are in the index, although they came after the last look.
    adopted: u64,
    /// Bytes of blocks that others removed, and that are not in the index any more.
    vanished: u64,
    /// When writers last came or went.
    changed: Option<SystemTime>,
}

#[derive(Debug, Default)]
struct Known {
    now: Account,
    /// What it had written when the last look began.
    settled_before: u64,
    /// What it had removed when that look ended.
    removed_before: u64,
    /// What it had written when the look began that is under way.
    settled_at_begin: u64,
    is_gone: bool,
    /// Whether it was when that look began.
    was_gone_at_begin: bool,
}

impl Others {
    /// Reads what writers say, of which these are the directories. Whether some have come or gone, so that what they did
    /// meanwhile is not known.
    pub(super) fn read(&self, disk: &RealDisk, root: &Path, directories: &[PathBuf]) -> bool {
        let _one = lock(&self.reading);
        let changed = root.metadata().and_then(|metadata| metadata.modified()).ok();
        let said: Vec<_> = directories
            .iter()
            .filter_map(|directory| {
                let bytes = disk.read_file(&directory.join(names::LEASE), LEASE_LEN).ok()?;
                Some((directory, Lease::parse(&bytes).ok()?.account))
            })
            .collect();
        let mut state = lock(&self.state);
        for (directory, account) in said {
            state.writers.entry(directory.clone()).or_default().now = account;
        }
        for (directory, known) in &mut state.writers {
            known.is_gone = !directories.contains(directory);
        }
        let before = std::mem::replace(&mut state.changed, changed);
        before.is_some() && before != changed
    }

    /// All files will be looked at.
    pub(super) fn look_begins(&self) {
        for known in lock(&self.state).writers.values_mut() {
            (known.settled_at_begin, known.was_gone_at_begin) = (known.now.settled, known.is_gone);
        }
    }

    /// All files that were there when that began, and still are, are in the index.
    pub(super) fn look_ends(&self) {
        let mut state = lock(&self.state);
        state.writers.retain(|_, known| !known.was_gone_at_begin);
        for known in state.writers.values_mut() {
            known.settled_before = known.settled_at_begin;
            known.removed_before = known.now.removed;
        }
        (state.adopted, state.vanished) = (0, 0);
    }

    /// A block of another process is in the index now.
    pub(super) fn adopted(&self, bytes: u64) {
        let mut state = lock(&self.state);
        state.adopted = state.adopted.saturating_add(bytes);
    }

    /// A block that another process removed is not in the index any more.
    pub(super) fn vanished(&self, bytes: u64) {
        let mut state = lock(&self.state);
        state.vanished = state.vanished.saturating_add(bytes);
    }

    /// Bytes that their files take, besides those in the index.
    pub(super) fn bytes(&self) -> u64 {
        let state = lock(&self.state);
        let wide = i128::from;
        let changes = state.writers.values().map(|known| {
            let written = wide(known.now.taken) - wide(known.settled_before);
            written - (wide(known.now.removed) - wide(known.removed_before))
        });
        let sum = changes.sum::<i128>() - wide(state.adopted) + wide(state.vanished);
        u64::try_from(sum.max(0)).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(taken: u64, settled: u64, removed: u64) -> Account {
        Account { taken, settled, removed }
    }

    fn with(accounts: &[Account]) -> Others {
        let others = Others::default();
        say(&others, accounts);
        others
    }

    fn say(others: &Others, accounts: &[Account]) {
        let mut state = lock(&others.state);
        for (number, account) in accounts.iter().enumerate() {
            state.writers.entry(PathBuf::from(number.to_string())).or_default().now = *account;
        }
    }

    #[test]
    fn what_is_written_counts_until_it_is_in_the_index() {
        let others = with(&[account(100, 60, 0), account(7, 7, 7)]);
        assert_eq!(others.bytes(), 100);
        others.adopted(60);
        assert_eq!(others.bytes(), 40);
        others.look_begins();
        others.look_ends();
        // What was in flight when the look began may not have been seen.
        assert_eq!(others.bytes(), 40);
        say(&others, &[account(100, 100, 0)]);
        others.look_begins();
        others.look_ends();
        assert_eq!(others.bytes(), 0);
    }

    #[test]
    fn what_is_written_during_a_look_counts_after_it() {
        let others = with(&[account(10, 10, 0)]);
        others.look_begins();
        say(&others, &[account(30, 30, 5)]);
        others.look_ends();
        assert_eq!(others.bytes(), 20);
        say(&others, &[account(30, 30, 15)]);
        assert_eq!(others.bytes(), 10);
    }

    #[test]
    fn what_others_remove_is_not_missed_twice() {
        let others = with(&[account(50, 50, 0)]);
        others.look_begins();
        others.look_ends();
        say(&others, &[account(90, 90, 30)]);
        assert_eq!(others.bytes(), 10);
        others.vanished(30);
        assert_eq!(others.bytes(), 40);
        say(&others, &[account(90, 90, 90)]);
        assert_eq!(others.bytes(), 0);
    }

    #[test]
    fn a_writer_that_has_ended_counts_until_the_next_look() {
        let others = with(&[account(50, 50, 0)]);
        others.look_begins();
        say(&others, &[account(70, 70, 0)]);
        lock(&others.state).writers.values_mut().for_each(|known| known.is_gone = true);
        assert_eq!(others.bytes(), 70);
        // Some may have been written where that look had passed.
        others.look_ends();
        assert_eq!(others.bytes(), 20);
        others.look_begins();
        others.look_ends();
        assert_eq!(others.bytes(), 0);
    }

    #[test]
    fn lies_do_not_overflow() {
        let others = with(&[account(u64::MAX, 0, 0), account(u64::MAX, 0, 0), account(0, 0, u64::MAX)]);
        assert_eq!(others.bytes(), u64::MAX);
        others.adopted(u64::MAX);
        others.adopted(1);
        assert_eq!(others.bytes(), 0);
    }
}
