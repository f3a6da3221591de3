//! Limits on accepted loads, and on bytes in flight.
#![forbid(unsafe_code)]

use super::load::WaitingLoad;
use crate::{Priority, io::Job};
use hoistway_io::parallel::lock;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

/// The least that a transfer counts, so that their number is limited too.
const LEAST_CHARGE: u64 = 4096;
/// Of this many transfers, one is taken from the lesser queue, where both have some.
const OTHERS_TURN: u64 = 8;
/// Loads of blocks that have not ended: at most this many. A quarter of them is for demand only.
const MOST_LOADS: usize = 1 << 16;
/// Waiting transfers start once this many bytes are free: they start together, so that neighbours move together.
const TOGETHER: u64 = 1 << 20;

/// Limits the bytes in flight. A transfer larger than the limit runs alone.
///
/// Each request is admitted or refused as a whole when it arrives. The transfers of admitted requests wait.
pub(crate) struct Gate {
    limit: u64,
    /// Admitted loads that have not ended.
    loads: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    in_flight: u64,
    /// Bytes of admitted stores that have not ended, whether they wait, are in flight, or are still to be placed.
    stores: u64,
    /// Waiting transfers, oldest first: those that a caller waits for, and the rest.
    lines: [BTreeMap<u64, (Charge, Waiting)>; 2],
    /// Tag, line and number of each that waits.
    by_tag: BTreeSet<(u64, usize, u64)>,
    waiting_loads: usize,
    numbered: u64,
    admitted: u64,
}

/// The bytes for which a transfer counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Charge(u64);

impl Charge {
    pub(crate) fn of(len_bytes: u64) -> Self {
        Self(len_bytes.max(LEAST_CHARGE))
    }
}

/// A transfer that waits for admission.
pub(crate) enum Waiting {
    Job(Box<Job>),
    Load(Box<WaitingLoad>),
}

impl Waiting {
    fn tag(&self) -> u64 {
        match self {
            Self::Job(job) => job.tag,
            Self::Load(load) => load.tag(),
        }
    }

    fn priority(&self) -> Priority {
        match self {
            Self::Job(job) => job.priority,
            Self::Load(load) => load.priority(),
        }
    }
}

impl Gate {
    pub(crate) fn new(limit: u64) -> Self {
        Self { limit, loads: AtomicUsize::new(0), state: Mutex::default() }
    }

    /// Admits a request to load `count` blocks, unless too many loads have not ended. Each of its blocks counts until
    /// [`Gate::load_ended`]. Returns whether it was admitted.
    pub(crate) fn take_loads(&self, priority: Priority, count: usize) -> bool {
        let most = most_loads(priority);
        let with = |loads: usize| {
            let sum = loads.saturating_add(count);
            (loads == 0 || sum <= most).then_some(sum)
        };
        self.loads.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with).is_ok()
    }

    /// Whether a load of one block would be admitted now.
    pub(crate) fn may_load(&self, priority: Priority) -> bool {
        self.loads.load(Ordering::Relaxed) < most_loads(priority)
    }

    /// Whether a store of this transfer would be admitted now.
    pub(crate) fn may_store(&self, charge: Charge) -> bool {
        let stores = lock(&self.state).stores;
        stores == 0 || stores.saturating_add(charge.0) <= self.limit
    }

    /// A load has ended.
    pub(crate) fn load_ended(&self) {
        self.loads.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether a store of these transfers may wait for its turn: it may unless others leave it no room. If so, each of
    /// them counts until [`Gate::store_ended`].
    pub(crate) fn admit_store(&self, charges: impl Iterator<Item = Charge>) -> bool {
        let sum = charges.fold(0, |sum: u64, charge| sum.saturating_add(charge.0));
        let mut state = lock(&self.state);
        let total = state.stores.saturating_add(sum);
        let fits = state.stores == 0 || total <= self.limit;
        if fits {
            state.stores = total;
        }
        fits
    }

    /// A transfer of a store has ended, or will not be made.
    pub(crate) fn store_ended(&self, charge: Charge) {
        let mut state = lock(&self.state);
        state.stores = state.stores.saturating_sub(charge.0);
    }

    /// Whether a transfer may begin, which none may that would overtake those that wait. If so, it counts until
    /// [`Gate::leave`].
    pub(crate) fn try_enter(&self, charge: Charge) -> bool {
        let mut state = lock(&self.state);
        state.by_tag.is_empty() && state.try_enter(charge, self.limit)
    }

    /// Those of these transfers that may begin. The others come out of [`Gate::leave`] in time.
    pub(crate) fn enter_or_queue(&self, transfers: Vec<(Charge, Waiting)>) -> Vec<Waiting> {
        let mut state = lock(&self.state);
        for (charge, transfer) in transfers {
            state.queue(charge, transfer);
        }
        state.admit(self.limit)
    }

    /// A transfer has ended. Those that may begin now.
    pub(crate) fn leave(&self, charge: Charge) -> Vec<Waiting> {
        let mut state = lock(&self.state);
        state.in_flight = state.in_flight.saturating_sub(charge.0);
        let free = self.limit.saturating_sub(state.in_flight);
        if state.in_flight > 0 && free < TOGETHER.min(self.limit / 4) {
            return Vec::new();
        }
        state.admit(self.limit)
    }

    /// Takes back what waits for a request. It counts as if it had begun, until it ends: that lets in those behind it.
    pub(crate) fn withdraw(&self, tag: u64) -> Vec<Waiting> {
        let mut state = lock(&self.state);
        let places: Vec<_> = state.by_tag.range((tag, 0, 0)..=(tag, usize::MAX, u64::MAX)).copied().collect();
        let mut withdrawn = Vec::with_capacity(places.len());
        for (_, line, number) in places {
            if let Some((charge, transfer)) = state.remove(line, number) {
                state.in_flight = state.in_flight.saturating_add(charge.0);
                withdrawn.push(transfer);
            }
        }
        withdrawn
    }

    pub(crate) fn in_flight_bytes(&self) -> u64 {
        lock(&self.state).in_flight
    }

    pub(crate) fn waiting_loads(&self) -> usize {
        lock(&self.state).waiting_loads
    }
}

fn most_loads(priority: Priority) -> usize {
    if priority == Priority::Demand { MOST_LOADS } else { MOST_LOADS - MOST_LOADS / 4 }
}

impl State {
    fn try_enter(&mut self, charge: Charge, limit: u64) -> bool {
        let sum = self.in_flight.saturating_add(charge.0);
        let fits = self.in_flight == 0 || sum <= limit;
        if fits {
            self.in_flight = sum;
        }
        fits
    }

    fn queue(&mut self, charge: Charge, transfer: Waiting) {
        let line = usize::from(transfer.priority() != Priority::Demand);
        let number = self.numbered;
        self.numbered += 1;
        self.waiting_loads += usize::from(matches!(transfer, Waiting::Load(_)));
        self.by_tag.insert((transfer.tag(), line, number));
        self.lines[line].insert(number, (charge, transfer));
    }

    fn remove(&mut self, line: usize, number: u64) -> Option<(Charge, Waiting)> {
        let (charge, transfer) = self.lines[line].remove(&number)?;
        self.by_tag.remove(&(transfer.tag(), line, number));
        self.waiting_loads -= usize::from(matches!(transfer, Waiting::Load(_)));
        Some((charge, transfer))
    }

    /// Within a line in the order in which they came: none overtakes one that does not fit yet.
    fn admit(&mut self, limit: u64) -> Vec<Waiting> {
        let mut admitted = Vec::new();
        loop {
            let is_others_turn = (self.admitted + 1).is_multiple_of(OTHERS_TURN);
            let order = if is_others_turn { [1, 0] } else { [0, 1] };
            let next = order.into_iter().find_map(|line| {
                self.lines[line].first_key_value().map(|(number, (charge, _))| (line, *number, *charge))
            });
            let Some((line, number, charge)) = next else { break };
            if !self.try_enter(charge, limit) {
                break;
            }
            self.admitted += 1;
            admitted.extend(self.remove(line, number).map(|(_, transfer)| transfer));
        }
        admitted
    }
}
