//! The ledger: units that are resident, pinned, being read or waiting for room, and the commands that follow. No I/O,
//! no clock, no lock.
//!
//! The rule of the budget: units that have room take no more than the budget, plus the demand of one request. A request is
//! admitted as a whole, once evicting what is not pinned has brought the rest down to the budget; no other with a miss is
//! admitted before that holds again. A request that waits pins nothing, so two that wait cannot block each other.
#![forbid(unsafe_code)]

use super::{
    guard::GuardedPolicy,
    stats::{Change, Counts, Events},
};
use crate::policy::{ExpertId, Policy};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Instant,
};

/// The part of the budget that units may have that were prefetched and not yet used: a quarter.
const PREFETCH_SHARE: u64 = 4;

/// A request of the ledger. Numbers are not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RequestId(u64);

/// A command for the caller of the ledger, carried out in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// Read a unit, into new room unless it has some.
    Start { unit: usize, is_demand: bool, begin_by: Option<Instant> },
    /// End reads of a unit that have not begun.
    Cancel { unit: usize },
    /// Make the reads of a unit demand.
    Promote { unit: usize },
    /// Take the room of a unit back.
    Release { unit: usize },
}

/// The bounds of the budget.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) budget: u64,
    pub(super) max_experts: usize,
    pub(super) max_dense_bytes: u64,
}

/// Why a request is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It needs as many bytes, and there can never be room for them.
    TooLarge { needed: u64 },
    /// The policy has panicked.
    Closed,
}

/// The needs of units without room.
#[derive(Clone, Copy, Debug, Default)]
struct Demand {
    bytes: u64,
    experts: usize,
    dense_bytes: u64,
}

/// Experts that a prefetch may evict.
#[derive(Clone, Copy, Debug, Default)]
struct Spare {
    bytes: u64,
    experts: usize,
}

/// The progress of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Status<F> {
    /// It waits for room.
    Queued,
    /// It waits for room, and the policy that makes it has panicked.
    Closed,
    /// This unit is being read.
    Loading(usize),
    /// All units are resident and pinned.
    Ready,
    /// A unit could not be read.
    Failed(usize, F),
}

/// The outcome of a unit's reads.
#[derive(Clone, Debug)]
pub(super) enum Ended<F> {
    /// All bytes are in their place.
    Delivered,
    /// All bytes are in their place, and came from a second level.
    Copied,
    /// They are not in the second level any more, and have to be read.
    Again,
    /// A read was cancelled, or did not begin by its deadline.
    Cancelled(F),
    /// A read failed.
    Failed(F),
}

/// One unit, as the ledger is told of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// `None` for a dense tensor.
    pub(super) expert: Option<ExpertId>,
    /// Bytes that it occupies while it has room.
    pub(super) cost: u64,
    /// Bytes that are read.
    pub(super) bytes: u64,
}

#[derive(Debug)]
struct UnitState {
    entry: Entry,
    phase: Phase,
    pins: u32,
    /// Whether it was prefetched, and not used since.
    is_unused: bool,
    /// When it was used last, in requests.
    last_used: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Absent,
    Loading {
        is_demand: bool,
        is_cancelled: bool,
        /// Whether it was prefetched again since it was cancelled.
        is_wanted: bool,
        begin_by: Option<Instant>,
    },
    Resident,
}

#[derive(Debug)]
struct Request<F> {
    units: Vec<usize>,
    is_admitted: bool,
    failed: Option<(usize, F)>,
}

/// The state of a store.
pub(super) struct Ledger<F> {
    units: Vec<UnitState>,
    policy: GuardedPolicy,
    limits: Limits,
    /// Bytes of units that have room, and of room that was lost.
    used: u64,
    /// Experts that have room.
    experts: usize,
    /// Bytes of dense tensors that have room.
    dense_bytes: u64,
    requests: BTreeMap<RequestId, Request<F>>,
    queue: VecDeque<RequestId>,
    next_request: u64,
    /// Resident experts that the policy did not admit.
    transient: BTreeSet<usize>,
    /// Dense tensors that are resident, by when they were used last.
    dense: BTreeSet<(u64, usize)>,
    unused_bytes: u64,
    /// Units being read whose reads were cancelled, or may be dropped by a deadline, although a request pins them.
    in_doubt: BTreeSet<usize>,
    /// Whether a request that waited was admitted, or cannot be any more, since the last call of `take_wake`.
    wakes: bool,
    /// Whether `take_wake` has told that the policy has panicked.
    has_told_panic: bool,
    /// Whether what is not pinned is evicted at once.
    is_draining: bool,
    events: Events,
    counts: Counts,
}

impl<F: Clone> Ledger<F> {
    /// `entries` are the experts by layer and number, then the dense tensors.
    pub(super) fn new(entries: Vec<Entry>, policy: Box<dyn Policy>, limits: Limits, events: Events) -> Self {
        let state =
            |entry| UnitState { entry, phase: Phase::Absent, pins: 0, is_unused: false, last_used: 0 };
        Self {
            units: entries.into_iter().map(state).collect(),
            policy: GuardedPolicy::new(policy),
            limits,
            used: 0,
            experts: 0,
            dense_bytes: 0,
            requests: BTreeMap::new(),
            queue: VecDeque::new(),
            next_request: 0,
            transient: BTreeSet::new(),
            dense: BTreeSet::new(),
            unused_bytes: 0,
            in_doubt: BTreeSet::new(),
            wakes: false,
            has_told_panic: false,
            is_draining: false,
            events,
            counts: Counts::default(),
        }
    }

    /// Tells the policy of a router's choice.
    pub(super) fn visit(&mut self, layer: u32, experts: &[(u32, f32)]) {
        self.policy.visit(layer, experts);
    }

    /// Fails unless a request for these units, each named once, is taken.
    pub(super) fn check(&self, units: &[usize]) -> Result<(), Refusal> {
        if self.policy.panic().is_some() {
            return Err(Refusal::Closed);
        }
        let Demand { bytes, experts, dense_bytes } = self.demand_of(units);
        if experts > self.limits.max_experts || dense_bytes > self.limits.max_dense_bytes {
            return Err(Refusal::TooLarge { needed: bytes });
        }
        Ok(())
    }

    /// Starts to make units resident and to pin them; each is named once.
    pub(super) fn request(
        &mut self,
        units: Vec<usize>,
        commands: &mut Vec<Command>,
    ) -> Result<RequestId, Refusal> {
        self.check(&units)?;
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let missing = self.missing(&units);
        // One without a miss needs no room, so it waits for none.
        let is_next = self.queue.is_empty() || missing.is_empty();
        let is_admitted = is_next && self.try_admit(&units, &missing, commands);
        self.requests.insert(id, Request { units, is_admitted, failed: None });
        if !is_admitted {
            self.queue.push_back(id);
        }
        Ok(id)
    }

    /// Admits requests that wait, in order, as far as there is room.
    pub(super) fn admit(&mut self, commands: &mut Vec<Command>) {
        while let Some(id) = self.queue.front().copied() {
            // One that has ended is not in the queue.
            if let Some(request) = self.requests.get_mut(&id) {
                let units = std::mem::take(&mut request.units);
                let missing = self.missing(&units);
                let is_admitted = self.try_admit(&units, &missing, commands);
                if let Some(request) = self.requests.get_mut(&id) {
                    (request.units, request.is_admitted) = (units, is_admitted);
                }
                if !is_admitted {
                    return;
                }
            }
            self.queue.pop_front();
            self.wakes = true;
        }
    }

    /// Whether threads that wait have to look again, although no command says so.
    pub(super) fn take_wake(&mut self) -> bool {
        let has_panicked = self.policy.panic().is_some();
        let is_closed_now = has_panicked && !std::mem::replace(&mut self.has_told_panic, has_panicked);
        std::mem::take(&mut self.wakes) || is_closed_now
    }

    /// Whether something may have to be read as soon as the reads of a unit have ended.
    pub(super) fn awaits_ends(&self) -> bool {
        !self.queue.is_empty() || !self.in_doubt.is_empty()
    }

    pub(super) fn status(&self, id: RequestId) -> Status<F> {
        let Some(request) = self.requests.get(&id) else { return Status::Queued };
        if let Some((unit, failure)) = &request.failed {
            return Status::Failed(*unit, failure.clone());
        }
        if !request.is_admitted {
            return if self.policy.panic().is_some() { Status::Closed } else { Status::Queued };
        }
        let loading = request.units.iter().find(|unit| self.units[**unit].phase != Phase::Resident);
        loading.map_or(Status::Ready, |unit| Status::Loading(*unit))
    }

    /// Whether a unit of a request is pinned, and all of its bytes are there.
    pub(super) fn is_leased(&self, id: RequestId, unit: usize) -> bool {
        let is_admitted = self.requests.get(&id).is_some_and(|request| request.is_admitted);
        is_admitted && self.units[unit].phase == Phase::Resident
    }

    /// Ends a request: its units are pinned by it no more.
    pub(super) fn release(&mut self, id: RequestId, commands: &mut Vec<Command>) {
        self.queue.retain(|queued| *queued != id);
        let Some(request) = self.requests.remove(&id) else { return };
        if request.is_admitted {
            for unit in request.units {
                self.unpin(unit);
                let state = &mut self.units[unit];
                if let Phase::Loading { is_cancelled, .. } = &mut state.phase
                    && state.pins == 0
                    && !state.is_unused
                    && !std::mem::replace(is_cancelled, true)
                {
                    self.in_doubt.insert(unit);
                    commands.push(Command::Cancel { unit });
                }
            }
        }
        self.trim(commands);
        self.admit(commands);
    }

    /// Starts to read what will probably be requested, where there is room, or room can be made without evicting what was
    /// prefetched before.
    pub(super) fn prefetch(
        &mut self,
        units: &[usize],
        begin_by: Option<Instant>,
        commands: &mut Vec<Command>,
    ) {
        let mut spare = None;
        for &unit in units {
            let state = &self.units[unit];
            let is_leaving = state.pins == 0
                && matches!(state.phase, Phase::Loading { is_cancelled: true, is_wanted: false, .. });
            if !is_leaving && state.phase != Phase::Absent || !self.queue.is_empty() {
                continue;
            }
            let was_unused = state.is_unused;
            let more_bytes = if was_unused { 0 } else { state.entry.cost };
            let has_share =
                self.unused_bytes.saturating_add(more_bytes) <= self.limits.budget / PREFETCH_SHARE;
            // What is being cancelled has its room still.
            if !has_share || !is_leaving && !self.make_prefetch_room(unit, &mut spare, commands) {
                self.counts.refused_prefetches += 1;
                continue;
            }
            self.counts.prefetches += 1;
            self.units[unit].is_unused = true;
            self.unused_bytes += more_bytes;
            if is_leaving {
                self.counts.dropped_prefetches += u64::from(was_unused);
                self.units[unit].phase =
                    Phase::Loading { is_demand: false, is_cancelled: true, is_wanted: true, begin_by };
            } else {
                self.start(unit, false, begin_by, commands);
            }
        }
    }

    /// Evicts experts for a prefetch, but what was prefetched before, if that makes room enough. `spare` is what may go, once
    /// it was counted.
    fn make_prefetch_room(
        &mut self,
        unit: usize,
        spare: &mut Option<Spare>,
        commands: &mut Vec<Command>,
    ) -> bool {
        let demand = self.demand_of(&[unit]);
        if self.has_room_for(demand) {
            return true;
        }
        let may_go =
            |state: &UnitState| is_evictable(state) && !state.is_unused && state.entry.expert.is_some();
        let spare = spare.get_or_insert_with(|| {
            let units = self.units.iter().filter(|state| may_go(state));
            units.fold(Spare::default(), |sum, state| Spare {
                bytes: sum.bytes + state.entry.cost,
                experts: sum.experts + 1,
            })
        });
        let has_bytes = (self.used - spare.bytes).saturating_add(demand.bytes) <= self.limits.budget;
        let has_slots = self.experts - spare.experts + demand.experts <= self.limits.max_experts;
        if !has_bytes || !has_slots || !self.has_dense_room_for(demand) {
            return false;
        }
        while !self.has_room_for(demand)
            && let Some(victim) = self.victim(may_go, false)
        {
            spare.bytes -= self.units[victim].entry.cost;
            spare.experts -= 1;
            self.evict(victim, commands);
        }
        self.has_room_for(demand)
    }

    /// Cancels prefetches that have not begun, of units for which `is_meant` is true.
    pub(super) fn cancel_prefetches(
        &mut self,
        is_meant: impl Fn(Entry) -> bool,
        commands: &mut Vec<Command>,
    ) {
        for (unit, state) in self.units.iter_mut().enumerate() {
            if let Phase::Loading { is_demand: false, is_cancelled, is_wanted, .. } = &mut state.phase
                && state.pins == 0
                && is_meant(state.entry)
            {
                *is_wanted = false;
                if !std::mem::replace(is_cancelled, true) {
                    self.in_doubt.insert(unit);
                    commands.push(Command::Cancel { unit });
                }
            }
        }
    }

    /// The reads of a unit have ended.
    pub(super) fn ended(&mut self, unit: usize, ended: Ended<F>, commands: &mut Vec<Command>) {
        let Phase::Loading { is_demand, is_cancelled, is_wanted, begin_by } = self.units[unit].phase else {
            return;
        };
        self.in_doubt.remove(&unit);
        let pins = self.units[unit].pins;
        match ended {
            Ended::Delivered | Ended::Copied => {
                let state = &mut self.units[unit];
                state.phase = Phase::Resident;
                if matches!(ended, Ended::Delivered) {
                    self.counts.bytes_read += state.entry.bytes;
                }
                self.events.push(unit, Change::Resident);
                match state.entry.expert {
                    Some(expert) => {
                        self.policy.insert(expert);
                        if is_demand && !self.policy.admit(expert) {
                            self.transient.insert(unit);
                        }
                    }
                    None => _ = self.dense.insert((state.last_used, unit)),
                }
            }
            Ended::Again | Ended::Cancelled(_) if is_wanted => {
                self.read(unit, false, begin_by, commands);
                return;
            }
            // No lease and no request wants the unit any more.
            Ended::Again if is_cancelled && pins == 0 => {
                self.counts.dropped_prefetches += u64::from(!is_demand);
                self.vacate(unit, commands);
            }
            Ended::Again => {
                // As late as this, a deadline would only drop it.
                self.read(unit, is_demand || pins > 0, None, commands);
                return;
            }
            // Another request wants it by now, which cancelled nothing and has no deadline.
            Ended::Cancelled(_) if pins > 0 && (is_cancelled || begin_by.is_some()) => {
                self.read(unit, true, None, commands);
                return;
            }
            Ended::Cancelled(failure) => {
                self.counts.dropped_prefetches += u64::from(!is_demand);
                self.fail(unit, failure, commands);
            }
            Ended::Failed(failure) => {
                self.counts.failed_prefetches += u64::from(!is_demand);
                self.fail(unit, failure, commands);
            }
        }
        self.trim(commands);
        self.admit(commands);
    }

    /// The room of a unit was taken back and is lost: it counts as used from now on. So ends room whose owner does not come back
    /// from its callback; room that a device in doubt may write to comes back when that is known.
    pub(super) fn lose(&mut self, unit: usize) {
        let Demand { bytes, experts, dense_bytes } = self.demand_of(&[unit]);
        self.used = self.used.saturating_add(bytes);
        // Where the number has no limit, a lost room does not set one.
        if self.limits.max_experts != usize::MAX {
            self.limits.max_experts = self.limits.max_experts.saturating_sub(experts);
        }
        if self.limits.max_dense_bytes != u64::MAX {
            self.limits.max_dense_bytes = self.limits.max_dense_bytes.saturating_sub(dense_bytes);
        }
    }

    /// Sets the budget, and evicts what exceeds it and is not pinned.
    pub(super) fn set_budget(&mut self, budget: u64, commands: &mut Vec<Command>) {
        self.limits.budget = budget;
        self.trim(commands);
        self.admit(commands);
    }

    /// Evicts what is not pinned, now and as requests end. Prefetches that have not begun are cancelled.
    pub(super) fn drain(&mut self, commands: &mut Vec<Command>) {
        self.is_draining = true;
        self.cancel_prefetches(|_| true, commands);
        self.trim(commands);
        self.admit(commands);
    }

    /// Whether a unit is being read that no request pins.
    pub(super) fn is_reading_unpinned(&self) -> bool {
        self.units.iter().any(|state| state.pins == 0 && matches!(state.phase, Phase::Loading { .. }))
    }

    /// Evicts units that are resident and not pinned. Returns how many.
    pub(super) fn evict_all(&mut self, units: &[usize], commands: &mut Vec<Command>) -> usize {
        let mut evicted = 0;
        for &unit in units {
            if is_evictable(&self.units[unit]) {
                self.evict(unit, commands);
                evicted += 1;
            }
        }
        self.admit(commands);
        evicted
    }

    pub(super) fn unit_count(&self) -> usize {
        self.units.len()
    }

    pub(super) fn is_resident(&self, unit: usize) -> bool {
        self.units[unit].phase == Phase::Resident
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }

    pub(super) fn counts_mut(&mut self) -> &mut Counts {
        &mut self.counts
    }

    pub(super) fn budget(&self) -> u64 {
        self.limits.budget
    }

    /// Bytes of memory that may be kept without a unit in it.
    pub(super) fn keep_bytes(&self) -> u64 {
        if self.is_draining { 0 } else { self.limits.budget }
    }

    /// Bytes of units that have room.
    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// Bytes of units that are pinned.
    pub(super) fn pinned(&self) -> u64 {
        let pinned = self.units.iter().filter(|state| state.pins > 0);
        pinned.fold(0, |sum, state| sum + state.entry.cost)
    }

    /// Units that are resident.
    pub(super) fn resident(&self) -> usize {
        self.units.iter().filter(|state| state.phase == Phase::Resident).count()
    }

    pub(super) fn policy_name(&self) -> &'static str {
        self.policy.name()
    }

    /// The message of the policy's panic, if it has panicked: no request that has to wait is admitted then.
    pub(super) fn policy_panic(&self) -> Option<&str> {
        self.policy.panic()
    }

    /// What became resident and what was evicted since the last call, in order, and how many changes before that were lost.
    pub(super) fn take_events(&mut self) -> (Vec<(usize, Change)>, u64) {
        self.events.take()
    }

    pub(super) fn cost_of(&self, units: impl Iterator<Item = usize>) -> u64 {
        units.fold(0, |sum, unit| sum.saturating_add(self.units[unit].entry.cost))
    }

    fn missing(&self, units: &[usize]) -> Vec<usize> {
        units.iter().copied().filter(|unit| self.units[*unit].phase == Phase::Absent).collect()
    }

    /// Pins the units of a request and starts to read those that are missing, if there is room for them.
    fn try_admit(&mut self, units: &[usize], missing: &[usize], commands: &mut Vec<Command>) -> bool {
        units.iter().for_each(|unit| self.pin(*unit));
        if !missing.is_empty() {
            let demand = self.demand_of(missing);
            self.drop_prefetches(commands);
            // Only dense tensors give room back that is set apart for them.
            while !self.has_dense_room_for(demand)
                && let Some(victim) = self.dense_victim()
            {
                self.evict(victim, commands);
            }
            while !self.has_room_for(demand)
                && self.has_dense_room_for(demand)
                && let Some(victim) = self.victim(|_| true, true)
            {
                self.evict(victim, commands);
            }
            let has_slots = self.experts + demand.experts <= self.limits.max_experts;
            // A policy that has panicked in the meantime admits nothing.
            let is_closed = self.policy.panic().is_some();
            if is_closed || self.used > self.limits.budget || !has_slots || !self.has_dense_room_for(demand) {
                units.iter().for_each(|unit| self.unpin(*unit));
                return false;
            }
        }
        for &unit in units {
            self.use_unit(unit, commands);
        }
        for &unit in missing {
            self.start(unit, true, None, commands);
        }
        self.counts.hits += (units.len() - missing.len()) as u64;
        self.counts.misses += missing.len() as u64;
        let requested = self.cost_of(units.iter().copied());
        self.counts.largest_batch_bytes = self.counts.largest_batch_bytes.max(requested);
        true
    }

    /// Demand has the drive to itself: prefetches that have not begun are dropped.
    fn drop_prefetches(&mut self, commands: &mut Vec<Command>) {
        if self.unused_bytes > 0 {
            self.cancel_prefetches(|_| true, commands);
        }
    }

    /// A request that is admitted uses a unit, which a prefetch may be reading.
    fn use_unit(&mut self, unit: usize, commands: &mut Vec<Command>) {
        let state = &mut self.units[unit];
        if let Phase::Loading { is_demand, is_cancelled, is_wanted, begin_by } = &mut state.phase {
            *is_wanted = false;
            if !std::mem::replace(is_demand, true) && !*is_cancelled {
                commands.push(Command::Promote { unit });
            }
            if begin_by.is_some() {
                self.in_doubt.insert(unit);
            }
        }
        if std::mem::take(&mut state.is_unused) {
            self.unused_bytes -= state.entry.cost;
            self.counts.useful_prefetches += 1;
        }
        let before = std::mem::replace(&mut state.last_used, self.next_request);
        if state.entry.expert.is_none() && self.dense.remove(&(before, unit)) {
            self.dense.insert((state.last_used, unit));
        }
        self.transient.remove(&unit);
    }

    fn start(
        &mut self,
        unit: usize,
        is_demand: bool,
        begin_by: Option<Instant>,
        commands: &mut Vec<Command>,
    ) {
        let state = &self.units[unit];
        self.used += state.entry.cost;
        match state.entry.expert {
            Some(_) => self.experts += 1,
            None => self.dense_bytes += state.entry.cost,
        }
        self.counts.peak_bytes = self.counts.peak_bytes.max(self.used);
        self.read(unit, is_demand, begin_by, commands);
    }

    /// Has a unit read into the room that it has.
    fn read(&mut self, unit: usize, is_demand: bool, begin_by: Option<Instant>, commands: &mut Vec<Command>) {
        self.units[unit].phase =
            Phase::Loading { is_demand, is_cancelled: false, is_wanted: false, begin_by };
        commands.push(Command::Start { unit, is_demand, begin_by });
    }

    fn demand_of(&self, units: &[usize]) -> Demand {
        units.iter().fold(Demand::default(), |sum, unit| {
            let Entry { cost, expert, .. } = self.units[*unit].entry;
            let dense_bytes = if expert.is_none() { cost } else { 0 };
            Demand {
                bytes: sum.bytes.saturating_add(cost),
                experts: sum.experts + usize::from(expert.is_some()),
                dense_bytes: sum.dense_bytes.saturating_add(dense_bytes),
            }
        })
    }

    fn has_room_for(&self, demand: Demand) -> bool {
        self.used.saturating_add(demand.bytes) <= self.limits.budget
            && self.experts + demand.experts <= self.limits.max_experts
            && self.has_dense_room_for(demand)
    }

    fn has_dense_room_for(&self, demand: Demand) -> bool {
        let needs = demand.dense_bytes > 0;
        !needs || self.dense_bytes.saturating_add(demand.dense_bytes) <= self.limits.max_dense_bytes
    }

    /// Chooses what to evict next: experts that were read for one visit, then what the policy names, then the dense tensor
    /// that was used least recently.
    fn victim(&mut self, may: impl Fn(&UnitState) -> bool, with_dense: bool) -> Option<usize> {
        let units = &self.units;
        let is_candidate = |unit: usize| is_evictable(&units[unit]) && may(&units[unit]);
        if let Some(unit) = self.transient.iter().copied().find(|unit| is_candidate(*unit)) {
            return Some(unit);
        }
        let position = |id: ExpertId| {
            let found = units.binary_search_by(|state| match state.entry.expert {
                Some(expert) => expert.cmp(&id),
                // Dense tensors come after all experts.
                None => std::cmp::Ordering::Greater,
            });
            found.ok()
        };
        let mut may_evict = |id: ExpertId| position(id).is_some_and(is_candidate);
        let chosen = self.policy.victim(&mut may_evict);
        match chosen.and_then(position) {
            Some(unit) if is_candidate(unit) => return Some(unit),
            None if chosen.is_none() => {}
            _ => tracing::error!(
                policy = self.policy.name(),
                ?chosen,
                "a policy named a victim that may not be evicted"
            ),
        }
        self.dense.iter().map(|(_, unit)| *unit).find(|unit| with_dense && is_candidate(*unit))
    }

    /// The dense tensor that was used least recently, of those that may be evicted.
    fn dense_victim(&self) -> Option<usize> {
        self.dense.iter().map(|(_, unit)| *unit).find(|unit| is_evictable(&self.units[*unit]))
    }

    fn evict(&mut self, unit: usize, commands: &mut Vec<Command>) {
        self.counts.evictions += 1;
        self.counts.wasted_prefetches += u64::from(self.units[unit].is_unused);
        self.events.push(unit, Change::Evicted);
        if let Some(expert) = self.units[unit].entry.expert {
            self.policy.remove(expert);
        }
        self.vacate(unit, commands);
    }

    /// A unit has no room any more.
    fn vacate(&mut self, unit: usize, commands: &mut Vec<Command>) {
        let state = &mut self.units[unit];
        state.phase = Phase::Absent;
        self.used -= state.entry.cost;
        match state.entry.expert {
            Some(_) => self.experts -= 1,
            None => self.dense_bytes -= state.entry.cost,
        }
        if std::mem::take(&mut state.is_unused) {
            self.unused_bytes -= state.entry.cost;
        }
        self.dense.remove(&(state.last_used, unit));
        self.transient.remove(&unit);
        commands.push(Command::Release { unit });
    }

    /// The reads of a unit have failed, and with them all requests that pin it.
    fn fail(&mut self, unit: usize, failure: F, commands: &mut Vec<Command>) {
        for request in self.requests.values_mut() {
            if request.is_admitted && request.failed.is_none() && request.units.contains(&unit) {
                request.failed = Some((unit, failure.clone()));
            }
        }
        self.vacate(unit, commands);
    }

    /// Evicts until the budget holds, as far as units are not pinned.
    fn trim(&mut self, commands: &mut Vec<Command>) {
        if self.is_draining {
            // A policy that has panicked names no victim.
            for unit in 0..self.units.len() {
                if is_evictable(&self.units[unit]) {
                    self.evict(unit, commands);
                }
            }
        }
        while self.used > self.limits.budget
            && let Some(victim) = self.victim(|_| true, true)
        {
            self.evict(victim, commands);
        }
    }

    fn pin(&mut self, unit: usize) {
        self.units[unit].pins += 1;
    }

    fn unpin(&mut self, unit: usize) {
        let pins = &mut self.units[unit].pins;
        *pins = pins.saturating_sub(1);
    }
}

fn is_evictable(state: &UnitState) -> bool {
    state.phase == Phase::Resident && state.pins == 0
}
