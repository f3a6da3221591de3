//! Segments that are given up: for a larger one, because others need the room, or because the disk fails them.
#![forbid(unsafe_code)]

use super::{failed, lock, names, root::Limits, shares::Given, writer::Writer};
use crate::{Result, index::Entry};
use std::{
    collections::{HashSet, VecDeque},
    io,
    sync::{Mutex, atomic::Ordering},
};

/// Limit of the segments that are removed for a larger one.
const MOST_GIVEN_UP: usize = 64;

impl Writer {
    /// Removes segments for which `may_go` until a new one for a block of `bytes` bytes fits. Returns whether it does.
    pub(super) fn take_over(&self, bytes: u64, may_go: impl Fn(u32) -> bool) -> Result<bool> {
        if !lock(&self.slots).draining().is_empty() {
            // What was given up before comes first.
            self.finish_draining()?;
            if self.allocate(bytes)? {
                return Ok(true);
            }
        }
        if self.is_refused.load(Ordering::Acquire) || !lock(&self.slots).draining().is_empty() {
            return Ok(false);
        }
        let mut going: VecDeque<u32> = self.by_worth(&may_go).into();
        going.truncate(MOST_GIVEN_UP);
        if going.is_empty() {
            return Ok(false);
        }
        let Some(new) = self.new_segment(bytes, self.segment_bytes)? else { return Ok(false) };
        // Until the new one is there: others would take the room.
        let Some(locked) = self.lock_root()? else { return Ok(false) };
        let charges = self.shared.root.charges(&self.limits)?;
        if !charges.is_current || self.is_too_much(charges.total)? {
            // There would not be room for another. What is too much goes in time.
            return Ok(false);
        }
        let own = charges.of_writers.get(&self.id).copied().unwrap_or(0);
        let mut given = Given { own_before: own, bytes: 0 };
        // None goes in vain.
        let charge_of = |number: &u32| {
            self.shared
                .segment(0, *number)
                .and_then(|segment| Limits::segment_bytes(&segment.head))
                .unwrap_or(0)
        };
        let gained = going.iter().map(charge_of).fold(0, u64::saturating_add);
        if charges.total.saturating_sub(gained).saturating_add(new.charge) > self.limits.capacity {
            return Ok(false);
        }
        while let Some(number) = going.pop_front() {
            if !lock(&self.slots).may_give(number) {
                continue;
            }
            let len = self.shared.segment(0, number).and_then(|segment| segment.head.file_len());
            self.give_up(number)?;
            if lock(&self.slots).has(number) {
                // The segment is freed once its last reader is done, if it can be freed.
                break;
            }
            given.bytes = given.bytes.saturating_add(len.unwrap_or(0));
            let charges = self.charges()?;
            if !charges.is_current {
                // The charges still include the segment that was just removed.
                break;
            }
            if self.has_room(&charges, &new, &given, &locked)? {
                let made = self.make_segment(&new);
                self.is_refused.store(!matches!(made, Ok(true)), Ordering::Release);
                return made;
            }
        }
        Ok(false)
    }

    /// Removes a segment with all its blocks, once their last reader and writer are done.
    pub(super) fn give_up(&self, number: u32) -> Result<()> {
        lock(&self.slots).drain(number);
        self.finish_draining()
    }

    /// Returns the segment whose removal loses least, of those that can be removed at once.
    pub(super) fn least_useful(&self) -> Option<u32> {
        self.by_worth(|_| true).first().copied()
    }

    /// Returns the segments that can be removed at once and for which `may_go`, those first whose removal loses least.
    fn by_worth(&self, may_go: impl Fn(u32) -> bool) -> Vec<u32> {
        let survey = self.shared.index.survey();
        let slots = lock(&self.slots);
        let unused = slots.unused().into_iter();
        let used = survey.into_iter().filter(|worth| !worth.is_in_use).map(|worth| worth.segment);
        let segments = unused.chain(used).filter(|number| slots.may_give(*number));
        let segments: Vec<u32> = segments.collect();
        drop(slots);
        segments.into_iter().filter(|number| may_go(*number)).collect()
    }

    /// Removes draining segments that have no readers and no writers left.
    pub(super) fn finish_draining(&self) -> Result<()> {
        let with_blocks = lock(&self.slots).draining_with_blocks();
        if !with_blocks.is_empty() {
            let is_it = |entry: &Entry| entry.is_own() && with_blocks.contains(&entry.slot.segment);
            let pinned = Mutex::new(HashSet::new());
            let buried = self.bury(|| {
                let gone = self.shared.index.remove_all(|_, entry, is_pinned| {
                    if is_it(entry) && is_pinned {
                        lock(&pinned).insert(entry.slot.segment);
                    }
                    is_it(entry) && !is_pinned
                });
                self.shared.observed.evicted(&gone);
                gone
            });
            if let Err(error) = buried {
                // Records of a segment that is not there say nothing.
                tracing::debug!(%error, "blocks go with their segment");
            }
            let mut slots = lock(&self.slots);
            // How long blocks stay pinned is not known, so segments with pinned blocks are kept.
            lock(&pinned).drain().for_each(|number| slots.keep(number));
        }
        let drained: Vec<u32> = {
            let mut slots = lock(&self.slots);
            self.shared.index.freed().into_iter().for_each(|slot| slots.unread(slot));
            slots.draining().into_iter().filter(|number| slots.is_drained(*number)).collect()
        };
        drained.into_iter().try_for_each(|number| self.remove_segment(number))
    }

    fn remove_segment(&self, number: u32) -> Result<()> {
        let path = self.directory.join(names::segment(number));
        match self.shared.disk.remove(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("removing", &path)(error));
            }
            _ => {}
        }
        lock(&self.slots).remove(number);
        lock(&self.unburied).retain(|gone| gone.slot.segment != number);
        self.shared.forget_segment(0, number);
        self.is_full.store(false, Ordering::Release);
        let directory = &self.directory;
        self.shared.disk.sync_directory(directory).map_err(failed("syncing", directory))
    }
}
