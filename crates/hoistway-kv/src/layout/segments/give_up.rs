//! Segments that are given up: for a larger one, because others need the room, or because the disk fails them.
#![forbid(unsafe_code)]

use super::{failed, lock, names, root::Limits, shares::Given, sweep::Region, writer::Writer};
use crate::{Result, index::PlacedBlock};
use std::{
    collections::VecDeque,
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
        if self.is_refused.load(Ordering::Acquire) || lock(&self.slots).is_about_to_drain() {
            return Ok(false);
        }
        let may_go_now = |number| may_go(number) && lock(&self.slots).may_give(number);
        let mut going = self.take_regions(may_go_now);
        let made = if going.is_empty() { Ok(false) } else { self.take_over_from(&mut going, bytes) };
        self.keep_regions(going);
        made
    }

    /// As [`Writer::take_over`], of the first of these segments.
    fn take_over_from(&self, going: &mut VecDeque<Region>, bytes: u64) -> Result<bool> {
        // Until the new one has its room: others would take it.
        let Some(locked) = self.lock_root()? else { return Ok(false) };
        let charges = self.shared.root.charges(&self.limits)?;
        let Some((new, _)) = self.next_segment_of(bytes, &charges, &locked)? else { return Ok(false) };
        if !charges.is_current || self.is_too_much(charges.total)? {
            // There would not be room for another. What is too much goes in time.
            return Ok(false);
        }
        let own_charge = charges.of_writers.get(&self.id).copied().unwrap_or(0);
        let mut given = Given { own_before: own_charge, bytes: 0 };
        // None goes in vain.
        let charge_of = |region: &Region| {
            self.shared
                .segment(0, region.segment)
                .and_then(|segment| Limits::segment_bytes(&segment.head))
                .unwrap_or(0)
        };
        let gained = going.iter().map(charge_of).fold(0, u64::saturating_add);
        if charges.total.saturating_sub(gained).saturating_add(new.charge) > self.limits.capacity {
            return Ok(false);
        }
        while let Some(region) = going.pop_front() {
            let number = region.segment;
            if !lock(&self.slots).may_give(number) {
                continue;
            }
            let len = self.shared.segment(0, number).and_then(|segment| segment.head.file_len());
            self.give_up(&region)?;
            if lock(&self.slots).has(number) {
                // The segment is freed once its last reader is done, if it can be freed. What was looked up of the others
                // may be out of date, too.
                going.clear();
                break;
            }
            given.bytes = given.bytes.saturating_add(len.unwrap_or(0));
            let charges = self.charges()?;
            if !charges.is_current {
                // The charges still include the segment that was just removed.
                break;
            }
            if self.has_room(&charges, &new, &given, &locked)? {
                let made = self.make_segment(&new, locked);
                self.is_refused.store(!matches!(made, Ok(true)), Ordering::Release);
                return made;
            }
        }
        Ok(false)
    }

    /// Removes a segment with all its blocks, once their last reader and writer are done.
    pub(super) fn give_up(&self, region: &Region) -> Result<()> {
        lock(&self.slots).drain(region.segment);
        self.empty_draining(&region.blocks);
        self.finish_draining()
    }

    /// Returns the segment whose removal loses least: of those that can be removed at once, or else of those that are
    /// written to, as a process that always writes would never give up any.
    pub(super) fn least_useful(&self) -> Option<Region> {
        let least = self.least_at_once();
        // One that is written to is enough: some writes take long.
        if least.is_some() || !lock(&self.slots).draining().is_empty() {
            return least;
        }
        self.take_regions(|_| true).pop_front()
    }

    /// Returns the segment whose removal loses least, of those that can be removed at once.
    pub(super) fn least_at_once(&self) -> Option<Region> {
        self.take_regions(|number| lock(&self.slots).may_give(number)).pop_front()
    }

    /// Returns the coldest segment that can be removed at once, if a block of `bytes` bytes has room in it.
    pub(super) fn coldest_long_enough(&self, bytes: u64) -> Option<Region> {
        let is_long = |number| lock(&self.slots).long_enough(number, bytes).is_some();
        let mut regions = self.take_regions(|number| lock(&self.slots).may_give(number));
        let coldest = regions.pop_front_if(|region| is_long(region.segment));
        self.keep_regions(regions);
        coldest
    }

    /// Returns the segments without blocks in use for which `may_go`, those first whose removal loses least: some of them,
    /// with their blocks. Where there are many blocks, the housekeeping looks them up, and there are none until then.
    fn take_regions(&self, may_go: impl Fn(u32) -> bool) -> VecDeque<Region> {
        let segments: Vec<u32> = lock(&self.slots).all().map(|segment| segment.head.number).collect();
        if !segments.into_iter().any(&may_go) {
            return VecDeque::new();
        }
        let regions = match self.has_few_blocks() {
            true => self.removable_regions(),
            false => self.removable_regions_before(),
        };
        let (going, rest) = regions.into_iter().partition(|region| may_go(region.segment));
        self.keep_regions(rest);
        going
    }

    /// As [`Writer::take_regions`], by looking at all blocks.
    pub(super) fn removable_regions(&self) -> VecDeque<Region> {
        let survey = self.shared.index.survey();
        let mut segments = lock(&self.slots).unused();
        segments.extend(survey.into_iter().filter(|worth| !worth.is_in_use).map(|worth| worth.segment));
        {
            let slots = lock(&self.slots);
            segments.retain(|number| slots.has(*number));
            // Those that can go at once come first, in the order of their worth.
            segments.sort_by_key(|number| !slots.may_give(*number));
        }
        segments.truncate(MOST_GIVEN_UP);
        self.regions(&segments)
    }

    /// Has the blocks of draining segments go. Waits for no sync: the lock of the store may be held.
    pub(super) fn empty_draining(&self, blocks: &[PlacedBlock]) {
        let pinned = Mutex::new(Vec::new());
        let written = self.tombstone_unsynced(|| {
            let (gone, stay) = self.shared.index.remove_placed(blocks);
            lock(&pinned).extend(stay);
            self.shared.observed.evicted(&gone);
            gone
        });
        if let Err(error) = written {
            // Records of a segment that is not there say nothing.
            tracing::debug!(%error, "blocks go with their segment");
        }
        // How long blocks stay pinned is not known, so segments with pinned blocks are kept.
        let mut slots = lock(&self.slots);
        lock(&pinned).drain(..).for_each(|block: PlacedBlock| slots.keep(block.slot.segment));
    }

    /// Looks up the blocks that draining segments have. Looks at all blocks, if there may be any.
    pub(super) fn blocks_of_draining(&self) -> Vec<PlacedBlock> {
        let with_blocks = lock(&self.slots).draining_with_blocks();
        if with_blocks.is_empty() {
            return Vec::new();
        }
        self.shared.index.placed(|segment| with_blocks.contains(&segment))
    }

    /// Removes draining segments that have no readers and no writers left. Where there are many blocks, the housekeeping
    /// has those go first that are still there.
    pub(super) fn finish_draining(&self) -> Result<()> {
        if self.has_few_blocks() {
            self.empty_draining(&self.blocks_of_draining());
        }
        let drained: Vec<u32> = {
            let mut slots = lock(&self.slots);
            self.shared.index.freed().into_iter().for_each(|slot| slots.unread(slot));
            slots.draining().into_iter().filter(|number| slots.is_drained(*number)).collect()
        };
        drained.into_iter().try_for_each(|number| self.remove_segment(number))
    }

    /// Removes a segment. Its name goes from the disk with the next [`Writer::sync_removed`]: the lock of the store may be
    /// held.
    fn remove_segment(&self, number: u32) -> Result<()> {
        let path = self.directory.join(names::segment(number));
        match self.shared.disk.remove(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("removing", &path)(error));
            }
            _ => {}
        }
        lock(&self.slots).remove(number);
        lock(&self.missing_tombstones).retain(|gone| gone.slot.segment != number);
        self.shared.forget_segment(0, number);
        self.is_full.store(false, Ordering::Release);
        self.removed.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }
}
