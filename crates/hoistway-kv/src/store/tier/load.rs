//! Loads from the far tier into the memory of the caller.
#![allow(unsafe_code, reason = "the memory of the caller is handed on, with its lease")]

use super::{Behind, LOADERS, TICK, Tier, add, moves::staged_bytes};
use crate::{
    Completion, Item, KeepAlive, Request, Status,
    store::{group::Group, load::LoadOptions},
    ticket::{MemoryLease, Settled},
};
use hoistway_io::parallel::lock;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Blocks of loads that wait for the far tier or are under way there: at most this many. A load beyond them is a miss.
const MOST_BLOCKS: usize = 1 << 16;

/// Loads that wait for a thread, and those under way.
#[derive(Default)]
pub(super) struct Loads {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Load>,
    /// What is settled if a load that a thread has taken takes too long, by number.
    pending: BTreeMap<u64, Pending>,
    next: u64,
    /// Blocks of both.
    blocks: usize,
    /// Threads that carry out a load.
    busy: usize,
    is_closed: bool,
}

impl State {
    /// Whether a load of so many blocks may wait. If so, they count until the load ends, or takes too long.
    fn take(&mut self, blocks: usize) -> bool {
        let sum = self.blocks.saturating_add(blocks);
        let fits = self.blocks == 0 || sum <= MOST_BLOCKS;
        if fits {
            self.blocks = sum;
        }
        fits
    }

    /// Whether all threads have loads that took too long, and may never come back.
    fn is_stuck(&self) -> bool {
        self.busy.saturating_sub(self.pending.len()) >= LOADERS
    }
}

/// Blocks of one request.
struct Load {
    behind: Arc<Behind>,
    options: Arc<LoadOptions>,
    groups: Vec<Group>,
    lease: Arc<MemoryLease>,
    /// What items end as that the far tier lacks, too.
    absent: Status,
}

struct Pending {
    options: Arc<LoadOptions>,
    items: Vec<usize>,
    deadline: Instant,
    blocks: usize,
}

/// How the far store has ended a load.
enum Ended {
    /// It cannot be used.
    Missing,
    Failed,
    With(Completion),
}

impl Loads {
    /// Ends the threads. The store ends the requests.
    pub(super) fn close(&self) {
        let mut state = lock(&self.state);
        state.is_closed = true;
        let dropped = (std::mem::take(&mut state.waiting), std::mem::take(&mut state.pending));
        drop(state);
        drop(dropped);
        self.changed.notify_all();
    }

    pub(super) fn are_stuck(&self) -> bool {
        lock(&self.state).is_stuck()
    }

    /// A thread is done with a load.
    fn leave(&self, number: u64) {
        let mut state = lock(&self.state);
        state.busy -= 1;
        let pending = state.pending.remove(&number);
        state.blocks -= pending.as_ref().map_or(0, |pending| pending.blocks);
        drop(state);
        drop(pending);
    }

    fn next(&self) -> Option<Load> {
        let mut state = lock(&self.state);
        while !state.is_closed {
            if let Some(load) = state.waiting.pop_front() {
                // A request that has ended already has no thread to wait for.
                if load.options.ticket.has_ended() {
                    state.blocks -= load.groups.len();
                    drop(state);
                    drop(load);
                    state = lock(&self.state);
                    continue;
                }
                return Some(load);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }
}

impl Tier {
    /// Takes over the groups of a load that the near tier lacks.
    pub(super) fn load(
        &self,
        behind: &Arc<Behind>,
        options: &Arc<LoadOptions>,
        groups: Vec<Group>,
        lease: Arc<MemoryLease>,
        absent: Status,
    ) {
        let (behind, options) = (behind.clone(), options.clone());
        let load = Load { behind, options, groups, lease, absent };
        let mut state = lock(&self.loads.state);
        if load.behind.far().is_none() || state.is_closed || !state.take(load.groups.len()) {
            drop(state);
            return self.settle_missing(load);
        }
        state.waiting.push_back(load);
        drop(state);
        self.loads.changed.notify_one();
    }

    fn settle_missing(&self, Load { options, groups, lease, absent, .. }: Load) {
        drop(lease);
        add(&self.counters.misses, groups.iter().map(|group| group.items.len() as u64).sum());
        options.settle_absent(&groups, absent);
    }

    pub(super) fn run_loads(self: &Arc<Self>) {
        while let Some(mut load) = self.loads.next() {
            let bytes = load.groups.iter().fold(0, |sum: u64, group| sum.saturating_add(group.len_bytes()));
            let longest = self.longest(bytes);
            let items = load.groups.iter().flat_map(|group| group.items.iter().map(|item| item.item));
            let started = Instant::now();
            let pending = Pending {
                options: load.options.clone(),
                items: items.collect(),
                // The far store ends its request first, unless it waits for its file system.
                deadline: started + longest + TICK * 2,
                blocks: load.groups.len(),
            };
            let mut state = lock(&self.loads.state);
            let number = state.next;
            state.next += 1;
            state.busy += 1;
            state.pending.insert(number, pending);
            drop(state);
            let ended = self.carry_out(&mut load, longest, started);
            // First: a caller that learns of the end finds room for more.
            self.loads.leave(number);
            match ended {
                Ended::Missing => self.settle_missing(load),
                Ended::Failed => self.settle(load, &[], started),
                Ended::With(completion) => self.settle(load, &completion.items, started),
            }
        }
    }

    /// Ends items whose load takes longer than the far tier may take, and those that wait for a far tier that cannot be
    /// used, or whose threads never come back. Memory stays leased as long as it is used.
    pub(super) fn end_late_loads(&self, now: Instant) {
        let mut state = lock(&self.loads.state);
        let late: Vec<_> = state.pending.extract_if(.., |_, pending| pending.deadline <= now).collect();
        let waits = self.link.is_up() && !state.is_stuck();
        let waiting = if waits { VecDeque::new() } else { std::mem::take(&mut state.waiting) };
        state.blocks -= late.iter().map(|(_, pending)| pending.blocks).sum::<usize>();
        state.blocks -= waiting.iter().map(|load| load.groups.len()).sum::<usize>();
        drop(state);
        waiting.into_iter().for_each(|load| self.settle_missing(load));
        for (_, Pending { options, items, .. }) in late {
            self.failed("loading", &"it took too long");
            let settled = items.into_iter().map(|item| Settled { item, status: Status::TimedOut, bytes: 0 });
            options.ticket.settle(settled.collect::<Vec<_>>(), None);
        }
    }

    fn carry_out(&self, load: &mut Load, longest: Duration, started: Instant) -> Ended {
        let Some(far) = load.behind.far() else { return Ended::Missing };
        let options = &load.options;
        let mut items = Vec::new();
        for group in &mut load.groups {
            for item in &mut group.items {
                let pieces = std::mem::take(&mut item.pieces);
                items.push(Item::new(group.key.clone(), item.shard, pieces));
            }
        }
        let mut request = Request::new(items, KeepAlive::new(load.lease.clone()));
        let remaining = options.ticket.deadline.map(|deadline| deadline.saturating_duration_since(started));
        request.timeout = Some(remaining.map_or(longest, |remaining| remaining.min(longest)));
        (request.priority, request.wait_event) = (Some(options.priority), options.wait_event);
        // SAFETY: the request keeps the lease of the memory, and the caller of the near tier answers for the rest.
        let ticket = match unsafe { far.load(request) } {
            Ok(ticket) => ticket,
            // It was given up just now.
            Err(_) if load.behind.far().is_none() => return Ended::Missing,
            Err(error) => {
                self.failed("loading", &error);
                return Ended::Failed;
            }
        };
        loop {
            if let Ok(completion) = ticket.wait(Some(TICK)) {
                // A caller with less time than the far tier may take says nothing of that tier.
                if remaining.is_none_or(|remaining| remaining >= longest) {
                    self.note_statuses("loading", &completion.items);
                }
                options.ticket.moved_by_far(&ticket, &completion);
                return Ended::With(completion);
            }
            if options.ticket.has_ended() {
                ticket.cancel();
            }
        }
    }

    /// Ends items with the statuses that the far store has ended them with.
    fn settle(self: &Arc<Self>, load: Load, statuses: &[Status], started: Instant) {
        let Load { behind, options, groups, lease, absent, .. } = load;
        drop(lease);
        let mut statuses = statuses.iter().copied();
        let (mut settled, mut loaded) = (Vec::new(), Vec::new());
        for group in &groups {
            let mut is_whole = true;
            for item in &group.items {
                let mut status = statuses.next().unwrap_or(Status::Io(libc::EIO));
                let bytes = if status == Status::Ok { item.len } else { 0 };
                add(&self.counters.hits, u64::from(status == Status::Ok));
                add(&self.counters.loaded_bytes, bytes);
                match status {
                    Status::Miss => {
                        add(&self.counters.misses, 1);
                        status = absent;
                    }
                    // The far store was given up. The caller has not, and the memory may be in use still.
                    Status::Cancelled => status = Status::TimedOut,
                    _ => {}
                }
                options.count(status, bytes);
                is_whole &= status == Status::Ok;
                settled.push(Settled { item: item.item, status, bytes });
            }
            if is_whole {
                let staged = group.items.iter().map(|item| staged_bytes(item.len));
                let staged = staged.fold(0, u64::saturating_add);
                loaded.push((group.key.clone(), group.len_bytes(), staged));
            }
        }
        options.ticket.settle(settled, Some(started));
        if self.options.promote && self.stores() {
            for (key, bytes, staged_bytes) in loaded {
                self.promote(&behind, key, bytes, staged_bytes);
            }
        }
    }

    /// Counts the failures among the ends of items, as one for each request.
    pub(super) fn note_statuses(&self, operation: &str, statuses: &[Status]) {
        let mut last = None;
        for status in statuses {
            match status {
                Status::Io(_) | Status::TimedOut => return self.failed(operation, status),
                _ => last = Some(status),
            }
        }
        if last.is_some_and(|status| *status != Status::Cancelled) {
            self.link.note_success();
        }
    }
}
