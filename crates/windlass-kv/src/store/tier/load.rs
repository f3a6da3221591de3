//! Loads from the far tier into the memory of the caller.
#![allow(unsafe_code, reason = "the memory of the caller is handed on, with its lease")]

use super::{Behind, LOADERS, TICK, Tier, add};
use crate::{
    Completion, Item, KeepAlive, Request, Status,
    store::{
        group::Group,
        load::{LoadOptions, absent},
    },
    ticket::{Lease, Settled},
};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};
use windlass_io::parallel::lock;

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
    /// Threads that carry out a load.
    busy: usize,
    is_closed: bool,
}

impl State {
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
    lease: Arc<Lease>,
}

struct Pending {
    options: Arc<LoadOptions>,
    items: Vec<usize>,
    deadline: Instant,
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

    fn next(&self) -> Option<Load> {
        let mut state = lock(&self.state);
        while !state.is_closed {
            if let Some(load) = state.waiting.pop_front() {
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
        lease: Arc<Lease>,
    ) {
        let mut state = lock(&self.loads.state);
        if behind.far().is_none() || state.is_closed {
            drop(state);
            drop(lease);
            return self.settle_missing(options, &groups);
        }
        let (behind, options) = (behind.clone(), options.clone());
        state.waiting.push_back(Load { behind, options, groups, lease });
        drop(state);
        self.loads.changed.notify_one();
    }

    fn settle_missing(&self, options: &LoadOptions, groups: &[Group]) {
        let settled: Vec<_> = groups.iter().flat_map(|group| absent(options, group, Status::Miss)).collect();
        add(&self.counters.misses, settled.len() as u64);
        options.ticket.settle(settled, None);
    }

    pub(super) fn run_loads(self: &Arc<Self>) {
        while let Some(load) = self.loads.next() {
            if load.options.ticket.has_ended() {
                continue;
            }
            let Load { options, groups, .. } = &load;
            let longest = self.longest(groups.iter().map(Group::len_bytes).sum());
            let items = groups.iter().flat_map(|group| group.items.iter().map(|item| item.item)).collect();
            let mut state = lock(&self.loads.state);
            let number = state.next;
            state.next += 1;
            state.busy += 1;
            // The far store ends its request first, unless it waits for its file system.
            let deadline = Instant::now() + longest + TICK * 2;
            state.pending.insert(number, Pending { options: options.clone(), items, deadline });
            drop(state);
            self.carry_out(load, longest);
            let mut state = lock(&self.loads.state);
            state.busy -= 1;
            state.pending.remove(&number);
        }
    }

    /// Ends items whose load takes longer than the far tier may take, and those that wait for a far tier that cannot be
    /// used, or whose threads never come back. Memory stays leased as long as it is used.
    pub(super) fn end_late_loads(&self, now: Instant) {
        let mut state = lock(&self.loads.state);
        let late: Vec<_> = state.pending.extract_if(.., |_, pending| pending.deadline <= now).collect();
        let waits = self.link.is_up() && !state.is_stuck();
        let waiting = if waits { VecDeque::new() } else { std::mem::take(&mut state.waiting) };
        drop(state);
        for Load { options, groups, lease, .. } in waiting {
            drop(lease);
            self.settle_missing(&options, &groups);
        }
        for (_, Pending { options, items, .. }) in late {
            self.failed("loading", &"it took too long");
            let settled = items.into_iter().map(|item| Settled { item, status: Status::TimedOut, bytes: 0 });
            options.ticket.settle(settled.collect::<Vec<_>>(), None);
        }
    }

    fn carry_out(self: &Arc<Self>, load: Load, longest: Duration) {
        let Load { behind, options, mut groups, lease } = load;
        let Some(far) = behind.far() else {
            drop(lease);
            return self.settle_missing(&options, &groups);
        };
        let mut items = Vec::new();
        for group in &mut groups {
            for item in &mut group.items {
                let pieces = std::mem::take(&mut item.pieces);
                items.push(Item::new(group.key.clone(), item.shard, pieces));
            }
        }
        let started = Instant::now();
        let mut request = Request::new(items, KeepAlive::new(lease));
        let own = options.ticket.deadline.map(|deadline| deadline.saturating_duration_since(started));
        request.timeout = Some(own.map_or(longest, |own| own.min(longest)));
        (request.priority, request.wait_event) = (Some(options.priority), options.wait_event);
        // SAFETY: the request keeps the lease of the memory, and the caller of the near tier answers for the rest.
        let ended = match unsafe { far.load(request) } {
            Ok(ticket) => loop {
                if let Ok(completion) = ticket.wait(Some(TICK)) {
                    // A caller with less time than the far tier may take says nothing of that tier.
                    if own.is_none_or(|own| own >= longest) {
                        self.note_statuses("loading", &completion.items);
                    }
                    options.ticket.moved_by_far(&ticket, &completion);
                    break Some(completion);
                }
                if options.ticket.has_ended() {
                    ticket.cancel();
                }
            },
            // It was given up just now.
            Err(_) if behind.far().is_none() => return self.settle_missing(&options, &groups),
            Err(error) => {
                self.failed("loading", &error);
                None
            }
        };
        self.settle(&behind, &options, &groups, ended.as_ref(), started);
    }

    fn settle(
        self: &Arc<Self>,
        behind: &Arc<Behind>,
        options: &LoadOptions,
        groups: &[Group],
        ended: Option<&Completion>,
        started: Instant,
    ) {
        let mut statuses = ended.iter().flat_map(|completion| completion.items.iter().copied());
        let (mut settled, mut loaded) = (Vec::new(), Vec::new());
        let counters = &options.counters;
        for group in groups {
            let mut is_whole = true;
            for item in &group.items {
                let status = statuses.next().unwrap_or(Status::Io(libc::EIO));
                let bytes = if status == Status::Ok { item.len } else { 0 };
                match status {
                    Status::Ok => {
                        add(&self.counters.hits, 1);
                        add(&self.counters.loaded_bytes, bytes);
                        counters.loaded_bytes.inc_by(bytes);
                        counters.hits.inc()
                    }
                    Status::Miss => {
                        add(&self.counters.misses, 1);
                        counters.misses.inc()
                    }
                    Status::Expired => counters.expired.inc(),
                    Status::Corrupt => counters.corrupt.inc(),
                    _ => 0,
                };
                is_whole &= status == Status::Ok;
                settled.push(Settled { item: item.item, status, bytes });
            }
            if is_whole {
                loaded.push((group.key.clone(), group.len_bytes()));
            }
        }
        options.ticket.settle(settled, Some(started));
        if self.options.promote && self.stores() {
            for (key, bytes) in loaded {
                self.promote(behind, key, bytes);
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
