//! Blocks that move between the tiers in the background: writes to the far one, promotions to the near one.
//!
//! A block is read back from one tier and stored in the other, whatever memory it came from, with its checksums compared.
#![forbid(unsafe_code)]

use super::{Behind, MOVERS, Stored, TICK, Tier, add};
use crate::{
    Buffer, BufferItem, Completion, DropReason, Error, FarOptions, FarPolicy, Key, Lend, Namespace,
    NamespaceId, Piece, PinGuard, Priority, Status, Transfer, TransferOptions, buffer::sealed::Piecewise,
    format::BLOCK_LEN, store::requests::StoreUnderWay, ticket::TicketState,
};
use hoistway_io::parallel::lock;
use std::{
    collections::{BTreeMap, HashMap, VecDeque, btree_map::Entry},
    mem,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

/// Attempts to write a block to the far tier.
const MOST_ATTEMPTS: u32 = 4;

/// Blocks that wait to be written, whatever their size.
const MOST_BACKLOG_BLOCKS: u64 = 1 << 20;

/// Blocks that a thread moves together: far fewer than a store loads at a time.
const MOST_BATCH_BLOCKS: usize = 1 << 13;

/// Time for which no block has room, after which that is an event.
const LONG_WAIT: Duration = Duration::from_secs(1);

/// The tier that a block moves to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum To {
    Far,
    Near,
}

/// A block that is to be moved.
struct Move {
    to: To,
    behind: Arc<Behind>,
    key: Key,
    bytes: u64,
    /// What it takes of the staging memory, at most.
    staged_bytes: u64,
    attempts: u32,
    /// Keeps the block in the near tier until it is written to the far one.
    _pin: Option<PinGuard>,
    /// What the block takes in the near tier while it is pinned there.
    pinned_bytes: u64,
    waiters: Arc<Waiters>,
}

/// The stores that wait for a move.
type Waiters = Mutex<Vec<Arc<WriteThrough>>>;

impl Move {
    /// What a failed step is: a failure of the far tier where moves `to` this tier take the step there.
    fn failure_of(&self, to: To) -> Moved {
        if self.to == to { Moved::Failed } else { Moved::Skipped }
    }

    /// What there is no room in, as [`Move::failure_of`].
    fn lack_of(&self, to: To) -> Lack {
        if self.to == to { Lack::Far } else { Lack::Near }
    }
}

/// What became of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moved {
    Done,
    /// The target has the block already.
    Exists,
    /// The block is gone, or its memory is short: a later load or store may try again.
    Skipped,
    /// There is no room for it now.
    Later(Lack),
    /// It is larger than the staging memory.
    TooLarge,
    /// The target does not take it.
    Refused(Status),
    /// The far tier failed.
    Failed,
}

/// What a block waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lack {
    /// Staging memory, or room in the far tier, which that tier's reads and writes give back.
    Far,
    /// Room in the near tier.
    Near,
}

/// Writes to the far tier that all have no room, one after the other.
#[derive(Clone, Copy)]
struct Waiting {
    since: Instant,
    /// When it counts as a failure.
    fails: Instant,
    is_said: bool,
}

pub(super) struct Moves {
    state: Mutex<State>,
    changed: Condvar,
    /// Bytes of staging memory in use.
    staged: Arc<AtomicU64>,
    backlog_bytes: u64,
    staging_bytes: u64,
}

#[derive(Default)]
struct State {
    to_far: VecDeque<Move>,
    to_near: VecDeque<Move>,
    /// Blocks that are queued or in flight, so that none is queued twice, and the requests that wait for them.
    known: HashMap<(To, NamespaceId, Key), Weak<Waiters>>,
    /// Of blocks that are to be written, those that are written just now among them.
    backlog_blocks: u64,
    backlog_bytes: u64,
    /// The same blocks by namespace.
    by_namespace: BTreeMap<NamespaceId, (Arc<Behind>, u64)>,
    promotion_bytes: u64,
    /// Batches that are moved.
    running: usize,
    /// When the step is late that each batch takes to be read or written; `None` once it is.
    steps: BTreeMap<u64, Option<Instant>>,
    batches: u64,
    paused: usize,
    /// Whether the last write was refused, so that an event is noted once.
    is_refusing: bool,
    /// Since when all writes have no room.
    waiting: Option<Waiting>,
    /// Threads whose block has no room, and that wait before the next attempt.
    pauses: usize,
    late: VecDeque<(Instant, Weak<WriteThrough>)>,
    /// Blocks that were to be written after it was closed.
    too_late: u64,
    is_closed: bool,
}

impl State {
    /// Whether all threads take a step that took too long, and may never come back.
    fn is_stuck(&self) -> bool {
        self.late_steps() >= MOVERS
    }

    /// Steps that took too long, and have not ended.
    fn late_steps(&self) -> usize {
        self.steps.values().filter(|late_from| late_from.is_none()).count()
    }

    /// Whether blocks are to be written that the far tier can take now.
    fn can_write(&self) -> bool {
        self.by_namespace.values().any(|(behind, _)| behind.far().is_some())
    }

    fn forget(&mut self, moved: &Move) {
        self.known.remove(&(moved.to, moved.behind.id(), moved.key.clone()));
        match moved.to {
            To::Far => {
                self.backlog_blocks -= 1;
                self.backlog_bytes -= moved.pinned_bytes;
                if let Entry::Occupied(mut of) = self.by_namespace.entry(moved.behind.id()) {
                    of.get_mut().1 -= 1;
                    // It keeps the namespace open.
                    if of.get().1 == 0 {
                        of.remove();
                    }
                }
            }
            To::Near => self.promotion_bytes -= moved.bytes,
        }
    }
}

/// A store that ends once its blocks are written to the far tier: when the last reference goes, or at a deadline.
pub(super) struct WriteThrough {
    ticket: Arc<TicketState>,
    /// Blocks that are not written.
    left: AtomicU64,
    under_way: Mutex<Option<Arc<StoreUnderWay>>>,
}

impl WriteThrough {
    fn end(&self) {
        self.ticket.conclude(self.left.load(Ordering::Relaxed));
        drop(lock(&self.under_way).take());
    }
}

impl Drop for WriteThrough {
    fn drop(&mut self) {
        self.end();
    }
}

/// Memory of the staging budget, which gets it back when nothing uses the memory any more.
#[derive(Debug)]
struct Staged {
    buffer: Buffer,
    budget: Arc<AtomicU64>,
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.budget.fetch_sub(staged_bytes(self.buffer.len() as u64), Ordering::Relaxed);
    }
}

/// Bytes of the budget that a shard takes: its buffer begins at a multiple of a block, wherever its allocation does.
pub(super) fn staged_bytes(len: u64) -> u64 {
    len.saturating_add(BLOCK_LEN)
}

impl Lend for Staged {}

impl Piecewise for Staged {
    fn piece(&mut self) -> Piece {
        self.buffer.piece()
    }
}

/// No batch begins while this lives.
pub(super) struct Paused<'a>(&'a Moves);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).paused -= 1;
        self.0.changed.notify_all();
    }
}

impl Moves {
    pub(super) fn new(options: &FarOptions, near_capacity: Option<u64>) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            staged: Arc::default(),
            // Blocks that wait are pinned, and the near tier needs room for others.
            backlog_bytes: options.backlog_bytes.min(near_capacity.unwrap_or(u64::MAX) / 4),
            staging_bytes: options.staging_bytes,
        }
    }

    /// Blocks and bytes that wait to be written.
    pub(super) fn backlog(&self) -> (u64, u64) {
        let state = lock(&self.state);
        (state.backlog_blocks, state.backlog_bytes)
    }

    /// Has no more batches begin. Returns how many blocks wait to be written then: what a batch gives up later is still counted.
    pub(super) fn close(&self) -> u64 {
        let mut state = lock(&self.state);
        state.is_closed = true;
        let unwritten = state.backlog_blocks;
        let dropped = (mem::take(&mut state.to_far), mem::take(&mut state.to_near));
        let namespaces = mem::take(&mut state.by_namespace);
        drop(state);
        drop((dropped, namespaces));
        self.changed.notify_all();
        unwritten
    }

    pub(super) fn are_stuck(&self) -> bool {
        lock(&self.state).is_stuck()
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Keeps batches from beginning, and waits for those under way; `None` if that takes longer.
    pub(super) fn pause(&self, timeout: Duration) -> Option<Paused<'_>> {
        let deadline = Instant::now() + timeout;
        let mut state = lock(&self.state);
        state.paused += 1;
        let paused = Paused(self);
        while state.running > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(state);
                return None;
            }
            state = self.wait(state, left);
        }
        drop(state);
        Some(paused)
    }

    /// Moves no blocks of a namespace that `is_gone` names. Returns those of them that were to be written to the far tier.
    pub(super) fn forget(&self, namespace: NamespaceId, is_gone: impl Fn(&Key) -> bool) -> Vec<Key> {
        let mut state = lock(&self.state);
        let is_gone = |moved: &Move| moved.behind.id() == namespace && is_gone(&moved.key);
        let (gone_far, to_far) = mem::take(&mut state.to_far).into_iter().partition(is_gone);
        let (gone_near, to_near) = mem::take(&mut state.to_near).into_iter().partition(is_gone);
        (state.to_far, state.to_near) = (to_far, to_near);
        let (gone_far, gone_near): (VecDeque<_>, VecDeque<_>) = (gone_far, gone_near);
        gone_far.iter().chain(&gone_near).for_each(|moved| state.forget(moved));
        drop(state);
        drop(gone_near);
        gone_far.into_iter().map(|moved| moved.key).collect()
    }

    /// Whether a block may be read now, as far as staging memory goes. One that may need more than there is may try.
    fn has_room(&self, staged_bytes: u64) -> bool {
        let used = self.staged.load(Ordering::Relaxed);
        staged_bytes > self.staging_bytes || used.saturating_add(staged_bytes) <= self.staging_bytes
    }

    fn stage(&self, len: u64) -> Option<Staged> {
        let take = |used: u64| used.checked_add(staged_bytes(len)).filter(|used| *used <= self.staging_bytes);
        self.staged.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok()?;
        // At most the budget, which is memory that this process is to have.
        Some(Staged { buffer: Buffer::zeroed(usize::try_from(len).ok()?), budget: self.staged.clone() })
    }
}

impl Tier {
    /// A store that is to end with its writes to the far tier.
    pub(super) fn write_through(
        &self,
        ticket: &Arc<TicketState>,
        under_way: Arc<StoreUnderWay>,
    ) -> Arc<WriteThrough> {
        let under_way = Mutex::new(Some(under_way));
        let through = Arc::new(WriteThrough { ticket: ticket.clone(), left: AtomicU64::new(0), under_way });
        let deadline = Instant::now() + self.options.timeout;
        lock(&self.moves.state).late.push_back((deadline, Arc::downgrade(&through)));
        through
    }

    /// Has a block of the near tier written to the far one.
    pub(super) fn write(
        &self,
        behind: &Arc<Behind>,
        Stored { key, bytes, staged_bytes, pinned_bytes }: Stored,
        through: Option<Arc<WriteThrough>>,
    ) {
        if let Some(through) = &through {
            through.left.fetch_add(1, Ordering::Relaxed);
            if behind.far().is_none() {
                return add(&self.counters.unwritten_blocks, 1);
            }
        }
        let pin = behind.near().pin(&[key.as_bytes()]).ok();
        let mut state = lock(&self.moves.state);
        if state.is_closed {
            state.too_late += 1;
            drop(state);
            return;
        }
        let place = (To::Far, behind.id(), key.clone());
        if let Some(waiters) = state.known.get(&place) {
            let waiters = waiters.upgrade();
            if let Some((waiters, through)) = waiters.zip(through) {
                lock(&waiters).push(through);
            }
            return;
        }
        let waiters: Arc<Waiters> = Arc::new(Mutex::new(through.into_iter().collect()));
        state.known.insert(place, Arc::downgrade(&waiters));
        state.backlog_blocks += 1;
        state.backlog_bytes += pinned_bytes;
        state.by_namespace.entry(behind.id()).or_insert_with(|| (behind.clone(), 0)).1 += 1;
        let behind = behind.clone();
        let to = To::Far;
        state.to_far.push_back(Move {
            to,
            behind,
            key,
            bytes,
            staged_bytes,
            attempts: 0,
            _pin: pin,
            pinned_bytes,
            waiters,
        });
        let mut dropped = Vec::new();
        // The newest waits whatever its size.
        while (state.backlog_bytes > self.moves.backlog_bytes || state.backlog_blocks > MOST_BACKLOG_BLOCKS)
            && state.to_far.len() > 1
            && let Some(oldest) = state.to_far.pop_front()
        {
            state.forget(&oldest);
            dropped.push(oldest);
        }
        let is_first = !dropped.is_empty() && !mem::replace(&mut state.is_refusing, true);
        drop(state);
        add(&self.counters.unwritten_blocks, dropped.len() as u64);
        if is_first {
            self.event("blocks are not written, because too many wait".into());
        }
        drop(dropped);
        self.moves.changed.notify_all();
    }

    /// Has a block of the far tier stored in the near one, unless too many wait for that.
    pub(super) fn promote(&self, behind: &Arc<Behind>, key: Key, bytes: u64, staged_bytes: u64) {
        let mut state = lock(&self.moves.state);
        let sum = state.promotion_bytes.saturating_add(bytes);
        if state.is_closed || sum > self.moves.staging_bytes {
            return add(&self.counters.unpromoted_blocks, 1);
        }
        let place = (To::Near, behind.id(), key.clone());
        if state.known.contains_key(&place) {
            return;
        }
        let waiters = Arc::default();
        state.known.insert(place, Arc::downgrade(&waiters));
        state.promotion_bytes = sum;
        let behind = behind.clone();
        state.to_near.push_back(Move {
            to: To::Near,
            behind,
            key,
            bytes,
            staged_bytes,
            attempts: 0,
            _pin: None,
            pinned_bytes: 0,
            waiters,
        });
        drop(state);
        self.moves.changed.notify_all();
    }

    /// Ends stores whose blocks are not written in time. The blocks are written all the same if that can be done.
    pub(super) fn end_late_stores(&self, now: Instant) {
        let mut state = lock(&self.moves.state);
        let (mut late, mut first) = (Vec::new(), None);
        while let Some((deadline, through)) = state.late.front() {
            match through.upgrade() {
                through @ Some(_) if *deadline > now => {
                    // It may be the last reference, and its end takes other locks.
                    first = through;
                    break;
                }
                through => late.extend(through),
            }
            state.late.pop_front();
        }
        drop(state);
        drop(first);
        late.iter().for_each(|through| through.end());
    }

    /// Waits until nothing is to be written to the far tier that it can take.
    pub(crate) fn drain(&self, timeout: Option<Duration>) {
        let begin = Instant::now();
        let mut state = lock(&self.moves.state);
        while state.can_write() && timeout.is_none_or(|timeout| begin.elapsed() < timeout) {
            state = self.moves.wait(state, TICK);
        }
    }

    /// Moves no more blocks. Says how many wait to be written, which the near tier alone has.
    pub(crate) fn stop_moves(&self) -> u64 {
        self.moves.close()
    }

    /// Blocks that were acknowledged after [`Tier::stop_moves`].
    pub(crate) fn too_late(&self) -> u64 {
        lock(&self.moves.state).too_late
    }

    pub(super) fn run_moves(self: &Arc<Self>) {
        while let Some((number, batch)) = self.next_batch() {
            self.move_batch(number, batch);
            let mut state = lock(&self.moves.state);
            state.running -= 1;
            state.steps.remove(&number);
            drop(state);
            self.moves.changed.notify_all();
        }
    }

    /// Blocks of one namespace that fit into a thread's part of the staging memory together.
    fn next_batch(&self) -> Option<(u64, Vec<Move>)> {
        let moves = &self.moves;
        let mut state = lock(&moves.state);
        while !state.is_closed {
            if state.backlog_blocks == 0 || !self.link.is_up() {
                state.waiting = None;
            }
            let is_idle = state.to_far.is_empty() && state.to_near.is_empty();
            if is_idle || state.paused > 0 || !self.link.is_up() {
                let time = if state.backlog_blocks > 0 { TICK } else { TICK * 10 };
                state = moves.wait(state, time);
                continue;
            }
            // One thread promotes while the other one writes.
            let writes = state.to_near.is_empty() || (state.running == 0 && !state.to_far.is_empty());
            let queue = if writes { &mut state.to_far } else { &mut state.to_near };
            let (mut batch, mut bytes) = (Vec::<Move>::new(), 0_u64);
            while let Some(next) = queue.front() {
                bytes = bytes.saturating_add(next.staged_bytes);
                let fits = bytes <= moves.staging_bytes / MOVERS as u64 && batch.len() < MOST_BATCH_BLOCKS;
                let joins = |first: &Move| Arc::ptr_eq(&first.behind, &next.behind) && fits;
                if !batch.first().is_none_or(joins) {
                    break;
                }
                batch.extend(queue.pop_front());
            }
            state.running += 1;
            state.batches += 1;
            return Some((state.batches, batch));
        }
        None
    }

    /// Notes that a thread takes the next step of a batch: a read or a write of a block, with calls of the file system that
    /// have no bound.
    fn begin_step(&self, batch: u64, moved: &Move) {
        // The transfer of the step ends in time by itself.
        let late_from = Instant::now() + self.longest(moved.bytes).saturating_mul(2) + TICK * 2;
        lock(&self.moves.state).steps.insert(batch, Some(late_from));
    }

    /// Counts steps that took too long, each once.
    pub(super) fn note_late_moves(&self, now: Instant) {
        let mut state = lock(&self.moves.state);
        let mut late = 0;
        for late_from in state.steps.values_mut() {
            if late_from.take_if(|late_from| *late_from <= now).is_some() {
                late += 1;
            }
        }
        drop(state);
        (0..late).for_each(|_| self.failed("moving a block", &"its file system does not answer"));
    }

    fn move_batch(&self, number: u64, mut batch: Vec<Move>) {
        let Some((to, behind)) = batch.first().map(|first| (first.to, first.behind.clone())) else { return };
        let Some(far) = behind.far() else {
            self.put_back(batch);
            // The namespace alone may be missing there, for long.
            return thread::sleep(TICK * 10);
        };
        let near = behind.near();
        let (source, target) = match to {
            To::Far => (near, &far),
            To::Near => (&far, near),
        };
        let mut reads = Vec::with_capacity(batch.len());
        for moved in &batch {
            self.begin_step(number, moved);
            reads.push(self.read(moved, source, target));
            // Those after it wait, too: the oldest are moved first.
            if matches!(reads.last(), Some(Err(Moved::Later(_)))) {
                break;
            }
        }
        let untried = batch.split_off(reads.len());
        let writes: Vec<_> = batch
            .iter()
            .zip(reads)
            .map(|(moved, read)| {
                self.begin_step(number, moved);
                read.and_then(|(transfer, options)| self.store(moved, transfer, &options, target))
            })
            .collect();
        let (mut lack, mut waiting, mut is_any_moved) = (None, Vec::new(), false);
        for (moved, write) in batch.into_iter().zip(writes) {
            self.begin_step(number, &moved);
            let outcome = write.and_then(|transfer| {
                let (completion, _) = self.wait(transfer, &moved, To::Far)?;
                Ok(match completion.items.iter().find(|status| **status != Status::Ok) {
                    None => Moved::Done,
                    Some(Status::Exists) => Moved::Exists,
                    // The far store was given up if it was cancelled.
                    Some(Status::Io(_) | Status::TimedOut | Status::Cancelled) => moved.failure_of(To::Far),
                    Some(Status::Dropped(DropReason::Busy)) => Moved::Later(moved.lack_of(To::Far)),
                    Some(status) => Moved::Refused(*status),
                })
            });
            let outcome = outcome.unwrap_or_else(|outcome| outcome);
            if let Moved::Later(of) = outcome {
                lack.get_or_insert((of, self.longest(moved.bytes)));
                if to == To::Far {
                    waiting.push(moved);
                    continue;
                }
            }
            is_any_moved = true;
            self.moved(moved, outcome);
        }
        waiting.extend(untried);
        self.wait_for_room(to, waiting, lack, is_any_moved);
    }

    /// Queues blocks again that have no room, as the oldest, and waits a little if there is a lack of room. After long it
    /// counts as a failure of the far tier, unless the near one is busy.
    fn wait_for_room(&self, to: To, blocks: Vec<Move>, lack: Option<(Lack, Duration)>, is_any_moved: bool) {
        let (mut given_up, mut is_first, mut fails) = (Vec::new(), false, false);
        let mut state = lock(&self.moves.state);
        if state.is_closed {
            blocks.iter().for_each(|moved| state.forget(moved));
            given_up = blocks;
        } else {
            let queue = match to {
                To::Far => &mut state.to_far,
                To::Near => &mut state.to_near,
            };
            blocks.into_iter().rev().for_each(|moved| queue.push_front(moved));
        }
        if to == To::Far && is_any_moved {
            state.waiting = None;
        } else if to == To::Far
            && let Some((lack, longest)) = lack
        {
            let now = Instant::now();
            // What other threads move just now has its own time, and may have all the memory.
            let is_stuck = lack == Lack::Near || state.running <= state.pauses + state.late_steps() + 1;
            let new = Waiting { since: now, fails: now + longest, is_said: false };
            let waiting = state.waiting.get_or_insert(new);
            if !is_stuck {
                waiting.since = now;
            }
            let is_long = is_stuck && now - waiting.since >= LONG_WAIT;
            is_first = is_long && !mem::replace(&mut waiting.is_said, true);
            fails = lack == Lack::Far && is_stuck && waiting.fails <= now;
            if fails || lack == Lack::Near {
                waiting.fails = now + longest;
            }
        }
        state.pauses += usize::from(lack.is_some());
        drop(state);
        self.count_dropped(&given_up);
        drop(given_up);
        let Some((lack, _)) = lack else { return };
        if is_first {
            self.event(match lack {
                Lack::Far => "blocks wait to be written: reads and writes before them do not end".into(),
                Lack::Near => "blocks wait to be written: the near tier has too many loads open".into(),
            });
        }
        if fails {
            self.failed("moving a block", &"no staging memory comes back");
        }
        // Others have the staging memory, or the tier's time, and give it back.
        thread::sleep(TICK);
        lock(&self.moves.state).pauses -= 1;
    }

    /// Begins to read a block.
    fn read(
        &self,
        moved: &Move,
        source: &Namespace,
        target: &Namespace,
    ) -> Result<(Transfer<Staged>, TransferOptions), Moved> {
        // First, as it asks no drive.
        if !source.may_load(Priority::Background) {
            return Err(Moved::Later(moved.lack_of(To::Near)));
        }
        if !target.may_store(moved.bytes) {
            return Err(Moved::Later(moved.lack_of(To::Far)));
        }
        if !self.moves.has_room(moved.staged_bytes) {
            return Err(Moved::Later(Lack::Far));
        }
        if target.contains(&[moved.key.as_bytes()]).is_ok_and(|found| found == [true]) {
            return Err(Moved::Exists);
        }
        let failed = |error| match error {
            Error::DamagedBlock { .. } => Moved::Skipped,
            _ => moved.failure_of(To::Near),
        };
        let info = source.block_within(&moved.key, self.options.timeout).map_err(failed)?;
        let info = info.ok_or(Moved::Skipped)?;
        let ttl = match info.expires {
            None => None,
            Some(expires) => Some(expires.duration_since(SystemTime::now()).map_err(|_| Moved::Skipped)?),
        };
        let staged = info.shards.iter().fold(0_u64, |sum, shard| sum.saturating_add(staged_bytes(shard.len)));
        if staged > self.moves.staging_bytes {
            return Err(Moved::TooLarge);
        }
        let mut items = Vec::with_capacity(info.shards.len());
        for (number, shard) in (0_u32..).zip(&info.shards) {
            let memory = self.moves.stage(shard.len).ok_or(Moved::Later(Lack::Far))?;
            items.push(BufferItem::new(moved.key.clone(), number, memory));
        }
        let options = TransferOptions {
            shards: u32::try_from(items.len()).map_err(|_| Moved::Skipped)?,
            timeout: Some(self.longest(moved.bytes)),
            ttl,
            priority: Some(Priority::Background),
        };
        let transfer = source.load_buffers(items, &options).map_err(failed)?;
        Ok((transfer, options))
    }

    /// Begins to store a block once it is read.
    fn store(
        &self,
        moved: &Move,
        read: Transfer<Staged>,
        options: &TransferOptions,
        target: &Namespace,
    ) -> Result<Transfer<Staged>, Moved> {
        let (completion, memory) = self.wait(read, moved, To::Near)?;
        match completion.items.iter().find(|status| !status.is_ok()) {
            None => {}
            Some(Status::Io(_) | Status::TimedOut | Status::Cancelled) => {
                return Err(moved.failure_of(To::Near));
            }
            Some(Status::Dropped(DropReason::Busy)) => return Err(Moved::Later(moved.lack_of(To::Near))),
            Some(_) => return Err(Moved::Skipped),
        }
        if !target.may_store(moved.bytes) {
            return Err(Moved::Later(moved.lack_of(To::Far)));
        }
        let items = (0..)
            .zip(memory)
            .map(|(shard, memory)| BufferItem::new(moved.key.clone(), shard, memory))
            .collect();
        target.store_buffers(items, options).map_err(|_| moved.failure_of(To::Far))
    }

    /// Waits for a read or write, which ends in time by itself. `to`: which moves have the far tier at its other end.
    fn wait(
        &self,
        transfer: Transfer<Staged>,
        moved: &Move,
        to: To,
    ) -> Result<(Completion, Vec<Staged>), Moved> {
        let longest = self.longest(moved.bytes) + TICK;
        transfer.wait(Some(longest)).map_err(|_| moved.failure_of(to))
    }

    /// Notes what became of a move; one to the far tier that failed may be tried again.
    fn moved(&self, mut moved: Move, outcome: Moved) {
        let counters = &self.counters;
        match (moved.to, outcome) {
            (To::Far, Moved::Done) => {
                add(&counters.written_blocks, 1);
                add(&counters.written_bytes, moved.bytes);
            }
            (To::Near, Moved::Done) => add(&counters.promoted_blocks, 1),
            (To::Far, _) | (To::Near, Moved::Exists) => {}
            (To::Near, _) => add(&counters.unpromoted_blocks, 1),
        }
        if outcome == Moved::Failed {
            self.failed("moving a block", &"the far store returned an error or took too long");
            moved.attempts += 1;
            let repeats = self.options.policy == FarPolicy::WriteBack && moved.attempts < MOST_ATTEMPTS;
            if moved.to == To::Far && repeats {
                return self.put_back(vec![moved]);
            }
        }
        let mut refusal = None;
        let mut state = lock(&self.moves.state);
        state.forget(&moved);
        if moved.to == To::Far {
            match outcome {
                Moved::Done | Moved::Exists => state.is_refusing = false,
                Moved::Refused(_) | Moved::TooLarge if !mem::replace(&mut state.is_refusing, true) => {
                    refusal = Some(match outcome {
                        Moved::Refused(status) => status.to_string(),
                        _ => "they are larger than the staging memory".into(),
                    });
                }
                _ => {}
            }
        }
        drop(state);
        if let Some(why) = refusal {
            self.event(format!("it does not take blocks: {why}"));
        }
        if matches!(outcome, Moved::Done | Moved::Exists) {
            self.link.note_success();
            for through in &*lock(&moved.waiters) {
                through.left.fetch_sub(1, Ordering::Relaxed);
            }
        } else if moved.to == To::Far {
            add(&counters.unwritten_blocks, 1);
        }
    }

    /// Queues blocks again that could not be moved now. Promotions, and writes that a store waits for, are dropped.
    fn put_back(&self, batch: Vec<Move>) {
        let mut dropped = Vec::new();
        let mut state = lock(&self.moves.state);
        for moved in batch {
            let waits = moved.to == To::Far && lock(&moved.waiters).is_empty();
            if waits && !state.is_closed {
                state.to_far.push_back(moved);
            } else {
                state.forget(&moved);
                dropped.push(moved);
            }
        }
        drop(state);
        self.count_dropped(&dropped);
    }

    fn count_dropped(&self, dropped: &[Move]) {
        let unwritten = dropped.iter().filter(|moved| moved.to == To::Far).count() as u64;
        add(&self.counters.unwritten_blocks, unwritten);
        add(&self.counters.unpromoted_blocks, dropped.len() as u64 - unwritten);
    }
}
