//! Claims: places for blocks that are to be written.
#![forbid(unsafe_code)]

use super::{lock, room::Room, segment::Segment, slots::ClaimEnd, writer::Writer};
use crate::{
    DropReason, Error, Fingerprint, Result,
    format::{self, HEADER_LEN, MAX_SHARDS, header::MAX_SHARD_LEN, record::MAX_PAYLOAD_LEN},
    index::{Candidates, MAX_SLOT_BYTES, Slot, Want},
    layout::{BlockPlace, Claim, NewBlock, Reservation, RoomWait},
};
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

/// Part of the capacity that blocks may take which lack shards.
const PARTIAL_PART: u64 = 16;

/// Blocks that are being written.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pub(super) blocks: HashSet<Fingerprint>,
    /// Bytes of each namespace.
    pub(super) bytes: HashMap<u16, u64>,
    /// Bytes of blocks that may lack shards for long.
    partial_bytes: u64,
    /// Counts the moments at which room may have grown: a claim ended, or upkeep ran.
    room_changes: u64,
}

impl Pending {
    /// Bytes of blocks whose writes are under way.
    fn whole_bytes(&self) -> u64 {
        let all = self.bytes.values().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        all.saturating_sub(self.partial_bytes)
    }
}

/// The state of a claim.
pub(super) struct Token {
    pub(super) writer: Arc<Writer>,
    pub(super) segment: Arc<Segment>,
    /// Syncs of the segment that had failed before anything was written to the slot.
    pub(super) failures: u64,
    pub(super) slot: Slot,
    pub(super) namespace: u16,
    pub(super) fingerprint: Fingerprint,
    pub(super) sequence: u64,
    pub(super) stride: u64,
    pub(super) shards: u16,
    pub(super) expires: u32,
    is_partial: bool,
    /// Whether its bytes are on the disk.
    pub(super) is_synced: bool,
    pub(super) end: ClaimEnd,
}

impl Writer {
    /// A place for a block.
    pub(super) fn reserve(self: &Arc<Self>, mut block: NewBlock) -> Result<Reservation> {
        self.check_open()?;
        let shape = Shape::of(&block)?;
        let bytes = HEADER_LEN as u64 + shape.payload;
        if bytes > self.largest_block.min(MAX_SLOT_BYTES) {
            return Ok(Reservation::Dropped(DropReason::TooLarge));
        }
        let _numbering = self.shared.numbering.read().unwrap_or_else(PoisonError::into_inner);
        let namespace = self.shared.namespaces.number(block.namespace)?;
        let now = self.shared.now();
        let mut turn = Turn::of(self, block.fingerprint);
        if !turn.is_first {
            return Ok(Reservation::InFlight);
        }
        if self.shared.index.contains(&block.fingerprint, now) {
            return Ok(Reservation::Exists);
        }
        if !self.shared.index.admit(&block.fingerprint, now) {
            return Ok(Reservation::Dropped(DropReason::NotAdmitted));
        }
        if self.log.is_in_doubt() || self.is_gone.load(Ordering::Acquire) {
            // Nothing could be committed; and places of blocks whose commit failed may not be used again yet.
            return Ok(Reservation::Dropped(DropReason::NoRoom));
        }
        if block.is_partial && !self.may_be_partial(bytes) {
            return Ok(Reservation::Dropped(DropReason::NoRoom));
        }
        if !self.may_have_room(bytes) {
            return Ok(Reservation::Full);
        }
        if !self.make_quota(namespace, bytes)? {
            return Ok(Reservation::Dropped(DropReason::Quota));
        }
        let (segment, slot) = match self.take_slot(bytes, block.following)? {
            Room::Taken(segment, slot) => (segment, slot),
            Room::NotYet => return Ok(Reservation::Full),
            Room::Never => return Ok(Reservation::Dropped(DropReason::NoRoom)),
        };
        let Some(offset) = segment.head.offset(slot.slot) else {
            return Err(Error::Internal(format!("{slot:?} is not in its segment")));
        };
        turn.hand_over();
        {
            let mut pending = lock(&self.pending);
            *pending.bytes.entry(namespace).or_default() += bytes;
            pending.partial_bytes += if block.is_partial { bytes } else { 0 };
        }
        let expires = self.expiry(&block, now);
        block.expires = format::expiry_time(expires);
        let token = Token {
            writer: Arc::clone(self),
            failures: segment.failures(),
            slot,
            namespace,
            fingerprint: block.fingerprint,
            sequence: self.next_sequence.fetch_add(1, Ordering::Relaxed),
            stride: shape.stride,
            shards: shape.shards,
            expires,
            is_partial: block.is_partial,
            is_synced: false,
            end: ClaimEnd::Unused,
            segment,
        };
        let place = BlockPlace {
            file: Arc::clone(&token.segment.data).into(),
            header: Some(offset),
            payload: offset + HEADER_LEN as u64,
            stride: shape.stride,
            shards: shape.shards.into(),
        };
        Ok(Reservation::Claimed(Claim {
            block,
            place,
            writer: self.id,
            sequence: token.sequence,
            token: Box::new(token),
        }))
    }

    /// As [`Layout::room_stamp`](crate::layout::Layout::room_stamp).
    pub(super) fn room_stamp(&self) -> u64 {
        lock(&self.pending).room_changes
    }

    /// As [`Layout::wait_for_room`](crate::layout::Layout::wait_for_room).
    pub(super) fn wait_for_room(&self, stamp: u64, until: Instant) -> RoomWait {
        let pending = lock(&self.pending);
        if pending.room_changes != stamp {
            return RoomWait::Changed;
        }
        let has_asked = self.waits_for_others();
        let is_looked_for = self.has_stretches_to_come.load(Ordering::Acquire);
        let waits = match pending.whole_bytes() {
            0 if is_looked_for => RoomWait::Lookup,
            0 if has_asked => RoomWait::Others,
            0 => return RoomWait::Nothing,
            _ => RoomWait::Writes,
        };
        let time = until.saturating_duration_since(Instant::now());
        let is_same = |pending: &mut Pending| pending.room_changes == stamp;
        let waited = self.room_changed.wait_timeout_while(pending, time, is_same);
        let (pending, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if pending.room_changes == stamp { waits } else { RoomWait::Changed }
    }

    /// There may be more room.
    pub(super) fn note_room(&self) {
        lock(&self.pending).room_changes += 1;
        self.room_changed.notify_all();
    }

    /// When a block expires: by its time to live, or by that of its namespace.
    fn expiry(&self, block: &NewBlock, now: u32) -> u32 {
        let of_block = format::expiry_seconds(block.expires);
        let seconds = |ttl: Duration| u32::try_from(ttl.as_secs()).unwrap_or(u32::MAX).max(1);
        let ttl = self.shared.namespaces.options(block.namespace).ttl;
        let of_namespace = ttl.map_or(0, |ttl| now.saturating_add(seconds(ttl)));
        [of_block, of_namespace].into_iter().filter(|seconds| *seconds != 0).min().unwrap_or(0)
    }

    /// Whether blocks of a namespace are being written.
    pub(super) fn has_pending(&self, namespace: u16) -> bool {
        lock(&self.pending).bytes.get(&namespace).is_some_and(|bytes| *bytes > 0)
    }

    /// Whether so many bytes more may wait for shards that may never come.
    fn may_be_partial(&self, bytes: u64) -> bool {
        let partial = lock(&self.pending).partial_bytes;
        partial == 0 || partial.saturating_add(bytes) <= self.limits.capacity / PARTIAL_PART
    }

    /// Whether a namespace may have so many bytes more, once blocks are evicted for them. Evicts none if that is not
    /// enough.
    fn make_quota(&self, namespace: u16, bytes: u64) -> Result<bool> {
        let excess = || {
            let pending = lock(&self.pending).bytes.get(&namespace).copied().unwrap_or(0);
            self.shared.index.quota_excess(namespace, bytes.saturating_add(pending))
        };
        let too_many = excess();
        if too_many == 0 {
            return Ok(true);
        }
        let from = Candidates::Namespace(namespace);
        if too_many > self.shared.index.evictable(from) {
            return Ok(false);
        }
        let want = Want { from, bytes: too_many };
        self.evict(&want)?;
        Ok(excess() == 0)
    }
}

/// Gives a claim up.
pub(super) fn give_up(mut claim: Claim, end: ClaimEnd) {
    if let Some(token) = claim.token.downcast_mut::<Token>() {
        token.end = end;
    }
}

impl Token {
    /// Bytes that it takes.
    fn bytes(&self) -> u64 {
        HEADER_LEN as u64 + self.stride * u64::from(self.shards)
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        lock(&self.writer.slots).end_claim(self.slot, self.bytes(), self.end);
        let mut pending = lock(&self.writer.pending);
        pending.blocks.remove(&self.fingerprint);
        if self.is_partial {
            pending.partial_bytes = pending.partial_bytes.saturating_sub(self.bytes());
        }
        if let Some(bytes) = pending.bytes.get_mut(&self.namespace) {
            *bytes = bytes.saturating_sub(self.bytes());
        }
        // In the same step: a thread that finds no claims in progress has seen this.
        pending.room_changes += 1;
        drop(pending);
        self.writer.room_changed.notify_all();
    }
}

/// The room that a block needs.
struct Shape {
    stride: u64,
    shards: u16,
    payload: u64,
}

impl Shape {
    fn of(block: &NewBlock) -> Result<Self> {
        let shards = u16::try_from(block.shards).ok().filter(|_| (1..=MAX_SHARDS).contains(&block.shards));
        let shards = shards.ok_or_else(|| {
            Error::InvalidRequest(format!("a block of {} shards: it has 1 to {MAX_SHARDS}", block.shards))
        })?;
        let stride = block.stride().filter(|_| block.shard_len <= MAX_SHARD_LEN);
        let payload = stride.and_then(|stride| stride.checked_mul(shards.into()));
        match (stride, payload) {
            (Some(stride), Some(payload)) if payload <= MAX_PAYLOAD_LEN => {
                Ok(Self { stride, shards, payload })
            }
            _ => Err(Error::InvalidRequest(format!("a shard of {} bytes is too long", block.shard_len))),
        }
    }
}

/// The right to write a block, until a claim has it.
struct Turn<'a> {
    writer: &'a Writer,
    fingerprint: Fingerprint,
    is_first: bool,
}

impl<'a> Turn<'a> {
    fn of(writer: &'a Writer, fingerprint: Fingerprint) -> Self {
        let is_first = lock(&writer.pending).blocks.insert(fingerprint);
        Self { writer, fingerprint, is_first }
    }

    fn hand_over(&mut self) {
        self.is_first = false;
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.is_first {
            lock(&self.writer.pending).blocks.remove(&self.fingerprint);
        }
    }
}
