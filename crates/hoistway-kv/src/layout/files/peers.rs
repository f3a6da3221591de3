//! Bytes that other processes have written and removed since this one last looked at all files, as their leases say.
//!
//! Where it is not certain, more is assumed: what was written while files were looked at counts twice until the next
//! look, and so does what was removed meanwhile. A writer that is not proven to live counts with what is on the disk alone.
#![forbid(unsafe_code)]

use super::{lock, writer};
use crate::{disk::RealDisk, format::lease::Account, layout::directory::read_lease};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Mutex,
    time::SystemTime,
};

/// The other writers.
#[derive(Debug, Default)]
pub(super) struct Peers {
    state: Mutex<State>,
    /// Locked while a thread reads the leases of the peers, so that no other thread takes the result for newer than
    /// it is.
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
    is_living: bool,
    /// Bytes of its files that are not whole, if it does not live.
    temporary: u64,
    /// What it had written when the last look began.
    settled_before: u64,
    /// What it had removed when that look ended.
    removed_before: u64,
    /// What it had written and removed in the middle of that look.
    middle: Account,
    /// What it had written and removed when the look began that is under way.
    at_begin: Account,
    is_gone: bool,
    /// Whether it was when that look began.
    was_gone_at_begin: bool,
}

impl Known {
    /// Bytes that it has written, or may write without saying so.
    fn announced(&self) -> u64 {
        match (self.is_living, self.is_gone) {
            (true, _) => self.now.taken,
            (false, true) => self.now.settled,
            (false, false) => self.now.settled.saturating_add(self.temporary),
        }
    }

    /// Bytes that it has written since it had written and removed so many.
    fn change(&self, settled: u64, removed: u64) -> i128 {
        let wide = i128::from;
        wide(self.announced()) - wide(settled) - (wide(self.now.removed) - wide(removed))
    }
}

impl Peers {
    /// Reads what writers say, of which these are the directories. Whether some have come or gone, so that what they did
    /// meanwhile is not known. `is_living` judges those that are new.
    pub(super) fn read(
        &self,
        disk: &RealDisk,
        root: &Path,
        directories: &[PathBuf],
        is_living: impl Fn(&Path) -> bool,
    ) -> bool {
        let _one = lock(&self.reading);
        let changed = root.metadata().and_then(|metadata| metadata.modified()).ok();
        let said: Vec<_> = directories
            .iter()
            .map(|directory| (directory, read_lease(disk, directory).map(|lease| lease.account)))
            .collect();
        let is_new = |directory: &&PathBuf| !lock(&self.state).writers.contains_key(*directory);
        let new: Vec<_> = directories
            .iter()
            .filter(is_new)
            .map(|directory| {
                let is_living = is_living(directory);
                let temporary = if is_living { 0 } else { writer::temporary_bytes(disk, directory) };
                (directory.clone(), Known { is_living, temporary, ..Known::default() })
            })
            .collect();
        let mut state = lock(&self.state);
        state.writers.extend(new);
        for (directory, account) in said {
            if let (Some(known), Some(account)) = (state.writers.get_mut(directory), account) {
                known.now = account;
            }
        }
        for (directory, known) in &mut state.writers {
            known.is_gone = !directories.contains(directory);
        }
        let before = std::mem::replace(&mut state.changed, changed);
        before.is_some() && before != changed
    }

    /// A writer was judged: its files that are not whole take so many bytes if it does not live. Whether it lived until
    /// now, so that what it did last is not known.
    pub(super) fn judged(&self, directory: &Path, temporary: Option<u64>) -> bool {
        let mut state = lock(&self.state);
        let Some(known) = state.writers.get_mut(directory) else { return false };
        let was_living = std::mem::replace(&mut known.is_living, temporary.is_none());
        known.temporary = temporary.unwrap_or(0);
        was_living && temporary.is_some()
    }

    /// Whether a writer has gone since the last look, so that more may be counted than is there.
    pub(super) fn have_departed(&self) -> bool {
        lock(&self.state).writers.values().any(|known| known.is_gone)
    }

    /// All files will be looked at.
    pub(super) fn look_begins(&self) {
        for known in lock(&self.state).writers.values_mut() {
            (known.at_begin, known.was_gone_at_begin) = (known.now, known.is_gone);
        }
    }

    /// All files that were there when that began, and still are, are in the index.
    pub(super) fn look_ends(&self) {
        let mut state = lock(&self.state);
        state.writers.retain(|_, known| !known.was_gone_at_begin);
        for known in state.writers.values_mut() {
            (known.settled_before, known.removed_before) = (known.at_begin.settled, known.now.removed);
            known.middle = Account {
                taken: 0,
                settled: known.at_begin.settled.midpoint(known.now.settled),
                removed: known.at_begin.removed.midpoint(known.now.removed),
            };
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

    /// Bytes that their files take at most, besides those in the index.
    pub(super) fn bytes(&self) -> u64 {
        let sum = self.sum(|known| known.change(known.settled_before, known.removed_before));
        u64::try_from(sum.max(0)).unwrap_or(u64::MAX)
    }

    /// About how many bytes their files take, besides those in the index; less than 0 if the index has some that they
    /// have removed. A look sees about what is there in its middle.
    pub(super) fn likely_bytes(&self) -> i64 {
        let sum = self.sum(|known| known.change(known.middle.settled, known.middle.removed));
        i64::try_from(sum).unwrap_or(if sum < 0 { i64::MIN } else { i64::MAX })
    }

    fn sum(&self, change: impl Fn(&Known) -> i128) -> i128 {
        let state = lock(&self.state);
        state.writers.values().map(change).sum::<i128>() - i128::from(state.adopted)
            + i128::from(state.vanished)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(taken: u64, settled: u64, removed: u64) -> Account {
        Account { taken, settled, removed }
    }

    fn with(accounts: &[Account]) -> Peers {
        let peers = Peers::default();
        say(&peers, accounts);
        peers
    }

    fn say(peers: &Peers, accounts: &[Account]) {
        let mut state = lock(&peers.state);
        for (number, account) in accounts.iter().enumerate() {
            let known = state.writers.entry(PathBuf::from(number.to_string())).or_default();
            (known.now, known.is_living) = (*account, true);
        }
    }

    #[test]
    fn what_is_written_counts_until_it_is_in_the_index() {
        let peers = with(&[account(100, 60, 0), account(7, 7, 7)]);
        assert_eq!(peers.bytes(), 100);
        peers.adopted(60);
        assert_eq!(peers.bytes(), 40);
        peers.look_begins();
        peers.look_ends();
        // What was in flight when the look began may not have been seen.
        assert_eq!(peers.bytes(), 40);
        say(&peers, &[account(100, 100, 0)]);
        peers.look_begins();
        peers.look_ends();
        assert_eq!(peers.bytes(), 0);
    }

    #[test]
    fn what_is_written_during_a_look_counts_after_it() {
        let peers = with(&[account(10, 10, 0)]);
        peers.look_begins();
        say(&peers, &[account(30, 30, 5)]);
        peers.look_ends();
        assert_eq!(peers.bytes(), 20);
        say(&peers, &[account(30, 30, 15)]);
        assert_eq!(peers.bytes(), 10);
    }

    #[test]
    fn what_others_remove_is_not_missed_twice() {
        let peers = with(&[account(50, 50, 0)]);
        peers.look_begins();
        peers.look_ends();
        say(&peers, &[account(90, 90, 30)]);
        assert_eq!(peers.bytes(), 10);
        peers.vanished(30);
        assert_eq!(peers.bytes(), 40);
        say(&peers, &[account(90, 90, 90)]);
        assert_eq!(peers.bytes(), 0);
    }

    #[test]
    fn a_writer_that_has_ended_counts_until_the_next_look() {
        let peers = with(&[account(50, 50, 0)]);
        peers.look_begins();
        say(&peers, &[account(70, 70, 0)]);
        lock(&peers.state).writers.values_mut().for_each(|known| known.is_gone = true);
        assert_eq!(peers.bytes(), 70);
        // Some may have been written where that look had passed.
        peers.look_ends();
        assert_eq!(peers.bytes(), 20);
        peers.look_begins();
        peers.look_ends();
        assert_eq!(peers.bytes(), 0);
    }

    #[test]
    fn what_is_written_and_removed_during_a_look_is_not_shown_twice() {
        let peers = with(&[account(100, 100, 0)]);
        peers.look_begins();
        say(&peers, &[account(150, 150, 50)]);
        peers.look_ends();
        // What may be there, and what is.
        assert_eq!((peers.bytes(), peers.likely_bytes()), (50, 0));
        say(&peers, &[account(160, 160, 90)]);
        assert_eq!(peers.likely_bytes(), -30);
        peers.vanished(40);
        assert_eq!(peers.likely_bytes(), 10);
    }

    #[test]
    fn writers_that_are_not_proven_to_live_count_with_what_is_on_the_disk() {
        let peers = with(&[account(960, 40, 0)]);
        let writer = Path::new("0");
        assert!(peers.judged(writer, Some(7)), "it lived until now");
        assert!(!peers.judged(writer, Some(7)));
        assert_eq!(peers.bytes(), 47);
        peers.look_begins();
        peers.look_ends();
        assert_eq!(peers.bytes(), 7);
        lock(&peers.state).writers.values_mut().for_each(|known| known.is_gone = true);
        assert!(peers.have_departed());
        assert_eq!(peers.bytes(), 0);
        lock(&peers.state).writers.values_mut().for_each(|known| known.is_gone = false);
        peers.judged(writer, None);
        assert_eq!(peers.bytes(), 920);
    }

    #[test]
    fn lies_do_not_overflow() {
        let peers = with(&[account(u64::MAX, 0, 0), account(u64::MAX, 0, 0), account(0, 0, u64::MAX)]);
        assert_eq!(peers.bytes(), u64::MAX);
        peers.adopted(u64::MAX);
        peers.adopted(1);
        assert_eq!(peers.bytes(), 0);
    }
}
