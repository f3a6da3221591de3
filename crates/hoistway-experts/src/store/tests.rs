//! The ledger under random requests, ends, failures and prefetches: what is leased stays, and the budget holds.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::{
    ledger::{Command, Ended, Entry, Ledger, Limits, Refusal, RequestId, Status},
    stats::{Change, Events},
};
use crate::policy::{ExpertId, Policy};
use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Instant,
};

const EXPERTS: usize = 12;
const UNITS: usize = EXPERTS + 3;

/// Evicts what was used least recently, and admits no expert with an odd number.
#[derive(Default)]
struct Lru(VecDeque<ExpertId>);

impl Policy for Lru {
    fn visit(&mut self, layer: u32, experts: &[(u32, f32)]) {
        for (expert, _) in experts {
            let id = ExpertId { layer, expert: *expert };
            if let Some(position) = self.0.iter().position(|other| *other == id) {
                self.0.remove(position);
                self.0.push_back(id);
            }
        }
    }

    fn insert(&mut self, expert: ExpertId) {
        assert!(!self.0.contains(&expert), "{expert:?} becomes resident twice");
        self.0.push_back(expert);
    }

    fn remove(&mut self, expert: ExpertId) {
        let position = self.0.iter().position(|other| *other == expert);
        self.0.remove(position.unwrap_or_else(|| panic!("{expert:?} was not resident")));
    }

    fn victim(&mut self, may_evict: &mut dyn FnMut(ExpertId) -> bool) -> Option<ExpertId> {
        self.0.iter().copied().find(|other| may_evict(*other))
    }

    fn admit(&mut self, expert: ExpertId) -> bool {
        expert.expert.is_multiple_of(2)
    }

    fn name(&self) -> &'static str {
        "lru"
    }
}

fn entries() -> Vec<Entry> {
    let expert = |number: usize| ExpertId { layer: number as u32 / 4, expert: number as u32 % 4 };
    (0..UNITS)
        .map(|unit| Entry {
            expert: (unit < EXPERTS).then(|| expert(unit)),
            cost: 10 + unit as u64,
            bytes: 8 + unit as u64,
        })
        .collect()
}

/// Plays what carries out commands.
struct Play {
    ledger: Ledger<&'static str>,
    rooms: BTreeSet<usize>,
    loading: BTreeSet<usize>,
    filled: BTreeSet<usize>,
    held: BTreeMap<RequestId, Vec<usize>>,
    /// Requests that were released while units of theirs were being read.
    leaving: Vec<Vec<usize>>,
    max_experts: usize,
    max_dense_bytes: u64,
    /// Bytes of rooms that were lost.
    lost: u64,
    /// Whether rooms that are in doubt are lost.
    loses: bool,
    /// The largest budget since the budget was last kept.
    top: u64,
}

impl Play {
    fn new(budget: u64, max_experts: usize) -> Self {
        Self::of(Box::new(Lru::default()), Limits { budget, max_experts, max_dense_bytes: u64::MAX })
    }

    fn of(policy: Box<dyn Policy>, limits: Limits) -> Self {
        let Limits { budget, max_experts, max_dense_bytes } = limits;
        let ledger = Ledger::new(entries(), policy, limits, Events::new(1 << 16));
        let (rooms, loading, filled, held, leaving) = Default::default();
        let (lost, loses, top) = (0, false, budget);
        Self { ledger, rooms, loading, filled, held, leaving, max_experts, max_dense_bytes, lost, loses, top }
    }

    /// What takes memory is the budget at most, or cannot be evicted; and one request's demand beside the budget at most.
    fn assert_within_budget(&mut self) {
        let (used, budget) = (self.ledger.used(), self.ledger.budget());
        let pinned = self.held.iter().filter(|(id, _)| self.ledger.status(**id) != Status::Queued);
        let stays: BTreeSet<usize> =
            pinned.flat_map(|(_, units)| units).chain(&self.loading).copied().collect();
        let stays = self.ledger.cost_of(stays.into_iter().filter(|unit| self.rooms.contains(unit)));
        assert!(used <= budget.max(stays + self.lost), "{used} of {budget}, and {stays} cannot be evicted");
        let Self { ledger, leaving, loading, .. } = self;
        leaving.retain(|units| units.iter().any(|unit| loading.contains(unit)));
        let alive = self.held.values().chain(&*leaving);
        let demand = alive.map(|units| ledger.cost_of(units.iter().copied())).max().unwrap_or_default();
        self.top = if used <= budget { budget } else { self.top.max(budget) };
        assert!(used <= self.top + demand + self.lost, "{used} of {}, and a demand of {demand}", self.top);
    }

    fn carry_out(&mut self, commands: Vec<Command>) {
        for command in commands {
            match command {
                Command::Start { unit, .. } => {
                    self.rooms.insert(unit);
                    assert!(self.loading.insert(unit), "{unit} is read twice at a time");
                    assert!(!self.filled.contains(&unit), "{unit} is read although it is there");
                }
                Command::Cancel { unit } | Command::Promote { unit } => {
                    assert!(self.loading.contains(&unit), "{unit} is not being read");
                }
                Command::Release { unit } => {
                    assert!(
                        !self.loading.contains(&unit),
                        "the room of {unit} is taken while it is read into"
                    );
                    assert!(self.rooms.remove(&unit), "{unit} has no room");
                    self.filled.remove(&unit);
                    if self.loses {
                        self.ledger.lose(unit);
                        self.lost += self.ledger.cost_of([unit].into_iter());
                    }
                }
            }
        }
        let dense = self.ledger.cost_of(self.rooms.iter().copied().filter(|unit| *unit >= EXPERTS));
        assert!(dense <= self.max_dense_bytes, "{dense} bytes of dense tensors");
        let experts = self.rooms.iter().filter(|unit| **unit < EXPERTS).count();
        assert!(experts <= self.max_experts, "{experts} slots of {}", self.max_experts);
        assert_eq!(self.ledger.used(), self.ledger.cost_of(self.rooms.iter().copied()) + self.lost);
        for (id, units) in &self.held {
            if self.ledger.status(*id) == Status::Ready {
                assert!(
                    units.iter().all(|unit| self.filled.contains(unit)),
                    "{id:?} is ready without its bytes"
                );
            }
        }
    }

    fn apply(&mut self, change: impl FnOnce(&mut Ledger<&'static str>, &mut Vec<Command>)) {
        let mut commands = Vec::new();
        change(&mut self.ledger, &mut commands);
        self.carry_out(commands);
    }

    fn request(&mut self, units: BTreeSet<usize>) {
        let units: Vec<usize> = units.into_iter().collect();
        let mut made = Err(Refusal::Closed);
        self.apply(|ledger, commands| made = ledger.request(units.clone(), commands));
        let experts = units.iter().filter(|unit| **unit < EXPERTS).count();
        match made {
            Ok(id) => _ = self.held.insert(id, units),
            Err(Refusal::TooLarge { needed }) => {
                let dense = units.iter().copied().filter(|unit| *unit >= EXPERTS);
                assert!(experts > self.max_experts || self.ledger.cost_of(dense) > self.max_dense_bytes);
                assert_eq!(needed, self.ledger.cost_of(units.into_iter()));
            }
            Err(Refusal::Closed) => panic!("the policy has not panicked"),
        }
    }

    fn release(&mut self, number: usize) {
        if let Some(id) = self.held.keys().nth(number % self.held.len().max(1)).copied() {
            self.leaving.extend(self.held.remove(&id));
            self.apply(|ledger, commands| ledger.release(id, commands));
        }
    }

    fn end(&mut self, number: usize, how: u8) {
        let Some(unit) = self.loading.iter().nth(number % self.loading.len().max(1)).copied() else { return };
        self.loading.remove(&unit);
        let ended = match how {
            0 => Ended::Cancelled("cancelled"),
            1 => Ended::Failed("failed"),
            2 => Ended::Again,
            _ => {
                self.filled.insert(unit);
                Ended::Delivered
            }
        };
        self.apply(|ledger, commands| ledger.ended(unit, ended, commands));
    }
}

#[derive(Clone, Debug)]
enum Step {
    Request(BTreeSet<usize>),
    Release(usize),
    End(usize, u8),
    Prefetch(Vec<usize>),
    CancelBefore(u32),
    Visit(u32, u32),
    Evict(usize),
    SetBudget(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => prop::collection::btree_set(0..UNITS, 1..5).prop_map(Step::Request),
        3 => any::<usize>().prop_map(Step::Release),
        6 => (any::<usize>(), 0..8u8).prop_map(|(number, how)| Step::End(number, how)),
        2 => prop::collection::vec(0..UNITS, 1..4).prop_map(Step::Prefetch),
        1 => (0..4u32).prop_map(Step::CancelBefore),
        2 => (0..3u32, 0..4u32).prop_map(|(layer, expert)| Step::Visit(layer, expert)),
        1 => (0..UNITS).prop_map(Step::Evict),
        1 => (30..160u64).prop_map(Step::SetBudget),
    ]
}

proptest! {
    #[test]
    fn leases_hold_and_the_budget_does(
        steps in prop::collection::vec(step(), 1..120),
        budget in 30..160u64,
        max_experts in 4..=EXPERTS,
        max_dense_bytes in prop_oneof![Just(u64::MAX), 24..60u64],
    ) {
        let limits = Limits { budget, max_experts, max_dense_bytes };
        let mut play = Play::of(Box::new(Lru::default()), limits);
        for step in steps {
            match step {
                Step::Request(units) => play.request(units),
                Step::Release(number) => play.release(number),
                Step::End(number, how) => play.end(number, how),
                Step::Prefetch(units) => play.apply(|ledger, commands| ledger.prefetch(&units, None, commands)),
                Step::CancelBefore(layer) => play.apply(|ledger, commands| {
                    ledger.cancel_prefetches(|entry| entry.expert.is_some_and(|id| id.layer < layer), commands);
                }),
                Step::Visit(layer, expert) => play.ledger.visit(layer, &[(expert, 1.0)]),
                Step::Evict(unit) => play.apply(|ledger, commands| _ = ledger.evict_all(&[unit], commands)),
                Step::SetBudget(bytes) => play.apply(|ledger, commands| ledger.set_budget(bytes, commands)),
            }
            play.assert_within_budget();
        }
        // Every request is served once others are released, and nothing is left over.
        while !play.held.is_empty() {
            while !play.loading.is_empty() {
                play.end(0, 7);
            }
            let ended = |status: &Status<_>| matches!(status, Status::Ready | Status::Failed(..));
            let served = play.held.keys().find(|id| ended(&play.ledger.status(**id))).copied();
            let served = served.unwrap_or_else(|| panic!("{} requests wait for nothing", play.held.len()));
            play.held.remove(&served);
            play.apply(|ledger, commands| ledger.release(served, commands));
        }
        while !play.loading.is_empty() {
            play.end(0, 0);
        }
        prop_assert!(play.ledger.used() <= play.ledger.budget());
        prop_assert_eq!(play.ledger.pinned(), 0);
        let (events, lost) = play.ledger.take_events();
        prop_assert_eq!(lost, 0);
        let mut resident = BTreeSet::new();
        for (unit, change) in events {
            let is_change = match change {
                Change::Resident => resident.insert(unit),
                Change::Evicted => resident.remove(&unit),
            };
            prop_assert!(is_change, "{change:?} of {unit} twice");
        }
        prop_assert_eq!(resident, play.filled);
    }
}

fn ready(play: &mut Play, units: &[usize]) -> RequestId {
    let before: BTreeSet<RequestId> = play.held.keys().copied().collect();
    play.request(units.iter().copied().collect());
    while !play.loading.is_empty() {
        play.end(0, 7);
    }
    play.held.keys().copied().find(|id| !before.contains(id)).unwrap()
}

#[test]
fn one_request_may_exceed_the_budget_and_the_next_waits_for_it() {
    let mut play = Play::new(30, EXPERTS);
    let first = ready(&mut play, &[0, 2, 4, 6]);
    assert_eq!(play.ledger.status(first), Status::Ready);
    assert_eq!(play.ledger.used(), 52);
    let second = ready(&mut play, &[8]);
    assert_eq!(play.ledger.status(second), Status::Queued);
    // What is there needs no room.
    let hit = ready(&mut play, &[2]);
    assert_eq!(play.ledger.status(hit), Status::Ready);
    play.held.remove(&first);
    play.apply(|ledger, commands| ledger.release(first, commands));
    play.end(0, 7);
    assert_eq!(play.ledger.status(second), Status::Ready);
    assert!(play.ledger.used() <= 30);
}

#[test]
fn experts_that_are_not_admitted_go_first() {
    let mut play = Play::new(40, EXPERTS);
    let request = ready(&mut play, &[0, 1, 2]);
    play.held.remove(&request);
    play.apply(|ledger, commands| ledger.release(request, commands));
    ready(&mut play, &[4]);
    assert!(!play.ledger.is_resident(1), "expert 1 was read for one visit");
    assert!(play.ledger.is_resident(0) && play.ledger.is_resident(2));
}

#[test]
fn prefetches_take_a_quarter_and_go_before_demand() {
    let mut play = Play::new(80, EXPERTS);
    play.apply(|ledger, commands| ledger.prefetch(&[0, 1, 2], None, commands));
    assert_eq!(play.loading, BTreeSet::from([0]), "two would be more than a quarter");
    assert_eq!(play.ledger.counts().refused_prefetches, 2);
    play.request([5].into());
    // The prefetch was cancelled before it began.
    play.end(0, 0);
    assert_eq!((play.loading.clone(), play.ledger.counts().dropped_prefetches), (BTreeSet::from([5]), 1));
}

#[test]
fn a_request_for_what_was_cancelled_has_it_read_again() {
    let mut play = Play::new(80, EXPERTS);
    play.request([3].into());
    play.release(0);
    play.request([3].into());
    play.end(0, 0);
    assert_eq!(play.loading, BTreeSet::from([3]), "it is read again");
    play.end(0, 7);
    let id = *play.held.keys().next().unwrap();
    assert_eq!(play.ledger.status(id), Status::Ready);
}

#[test]
fn a_prefetch_of_what_was_cancelled_has_it_read_again_as_late_as_it_allows() {
    let mut play = Play::new(80, EXPERTS);
    let deadline = Some(Instant::now());
    let prefetch = |play: &mut Play, begin_by| {
        play.apply(|ledger, commands| ledger.prefetch(&[3], begin_by, commands));
    };
    let cancel =
        |play: &mut Play| play.apply(|ledger, commands| ledger.cancel_prefetches(|_| true, commands));
    let end = |play: &mut Play| {
        let mut commands = Vec::new();
        play.loading.remove(&3);
        play.ledger.ended(3, Ended::Cancelled("cancelled"), &mut commands);
        play.carry_out(commands.clone());
        commands
    };
    prefetch(&mut play, None);
    cancel(&mut play);
    prefetch(&mut play, deadline);
    assert_eq!(end(&mut play), [Command::Start { unit: 3, is_demand: false, begin_by: deadline }]);
    let counts = play.ledger.counts();
    assert_eq!((counts.prefetches, counts.dropped_prefetches, counts.refused_prefetches), (2, 1, 0));
    // Cancelled again, or used since and given up, it is not read.
    cancel(&mut play);
    prefetch(&mut play, None);
    cancel(&mut play);
    assert_eq!(end(&mut play), [Command::Release { unit: 3 }]);
    prefetch(&mut play, None);
    cancel(&mut play);
    prefetch(&mut play, None);
    play.request([3].into());
    play.release(0);
    assert!(play.ledger.awaits_ends());
    assert_eq!(end(&mut play), [Command::Release { unit: 3 }]);
    assert_eq!(play.ledger.used(), 0);
    assert!(!play.ledger.awaits_ends());
    let counts = play.ledger.counts();
    assert_eq!((counts.prefetches, counts.dropped_prefetches, counts.useful_prefetches), (5, 4, 1));
}

#[test]
fn a_prefetch_that_gets_no_room_evicts_nothing() {
    // Only the smallest expert may go, and the next one needs more than that leaves.
    let mut play = Play::new(80, EXPERTS);
    for units in [&[0][..], &[1, 7, 8, 9]] {
        ready(&mut play, units);
    }
    play.release(0);
    play.apply(|ledger, commands| ledger.prefetch(&[10], None, commands));
    let counts = play.ledger.counts();
    assert_eq!((counts.refused_prefetches, counts.evictions), (1, 0));
    assert!(play.ledger.is_resident(0));
}

#[test]
fn prefetches_of_one_call_evict_no_more_than_may_go() {
    // Two of the experts in four slots may go.
    let limits = Limits { budget: 1000, max_experts: 4, max_dense_bytes: u64::MAX };
    let mut play = Play::of(Box::new(Lru::default()), limits);
    for units in [&[0][..], &[1], &[2, 3]] {
        ready(&mut play, units);
    }
    play.release(0);
    play.release(0);
    play.apply(|ledger, commands| ledger.prefetch(&[4, 5, 6], None, commands));
    let counts = play.ledger.counts();
    assert_eq!((counts.prefetches, counts.refused_prefetches, counts.evictions), (2, 1, 2));
    assert_eq!(play.loading, BTreeSet::from([4, 5]));
}

/// What a second level has lost is read again for those who want it, and as urgently as they do.
#[test]
fn what_a_second_level_has_lost_is_read_if_it_is_wanted() {
    let mut play = Play::new(80, EXPERTS);
    let again = |play: &mut Play| {
        let mut commands = Vec::new();
        play.loading.remove(&0);
        play.ledger.ended(0, Ended::Again, &mut commands);
        play.carry_out(commands.clone());
        commands
    };
    let start = |is_demand| vec![Command::Start { unit: 0, is_demand, begin_by: None }];
    play.apply(|ledger, commands| ledger.prefetch(&[0], None, commands));
    assert_eq!(again(&mut play), start(false));
    play.apply(|ledger, commands| ledger.cancel_prefetches(|_| true, commands));
    play.request([0].into());
    assert_eq!(again(&mut play), start(true), "it was cancelled, and is wanted since");
    play.release(0);
    assert_eq!(again(&mut play), [Command::Release { unit: 0 }], "no request wants it");
    play.apply(|ledger, commands| ledger.prefetch(&[0], None, commands));
    play.apply(|ledger, commands| ledger.cancel_prefetches(|_| true, commands));
    assert_eq!(again(&mut play), [Command::Release { unit: 0 }]);
    assert_eq!((play.ledger.used(), play.ledger.counts().dropped_prefetches), (0, 1));
}

#[test]
fn dense_tensors_are_evicted_after_experts_and_the_oldest_first() {
    let mut play = Play::new(80, EXPERTS);
    let (a, b, expert) = (EXPERTS, EXPERTS + 1, 0);
    for units in [[a], [b], [expert], [a]] {
        let request = ready(&mut play, &units);
        play.held.remove(&request);
        play.apply(|ledger, commands| ledger.release(request, commands));
    }
    play.apply(|ledger, commands| ledger.set_budget(50, commands));
    assert!(!play.ledger.is_resident(expert) && play.ledger.is_resident(a) && play.ledger.is_resident(b));
    play.apply(|ledger, commands| ledger.set_budget(30, commands));
    assert!(play.ledger.is_resident(a) && !play.ledger.is_resident(b));
}

#[test]
fn a_room_that_is_lost_counts_as_used_and_its_slot_is_gone() {
    let limits = Limits { budget: 80, max_experts: 3, max_dense_bytes: 30 };
    let mut play = Play::of(Box::new(Lru::default()), limits);
    play.loses = true;
    play.request([2, EXPERTS].into());
    for unit in [2, EXPERTS] {
        play.loading.remove(&unit);
        let ended = Ended::Failed("failed");
        play.apply(|ledger, commands| ledger.ended(unit, ended, commands));
    }
    play.release(0);
    assert_eq!((play.ledger.used(), play.lost), (12 + 22, 12 + 22));
    let refusal = |units: &[usize]| play.ledger.check(units).unwrap_err();
    assert_eq!(refusal(&[0, 1, 3]), Refusal::TooLarge { needed: 10 + 11 + 13 });
    assert_eq!(refusal(&[EXPERTS]), Refusal::TooLarge { needed: 22 });
    // What is left serves on.
    let request = ready(&mut play, &[0, 1]);
    assert_eq!(play.ledger.status(request), Status::Ready);
    assert_eq!(play.ledger.used(), 34 + 21);
}

#[test]
fn a_request_that_has_joined_a_prefetch_ends_it_as_it_is_released() {
    let mut play = Play::new(80, EXPERTS);
    play.apply(|ledger, commands| ledger.prefetch(&[0], None, commands));
    play.request([0].into());
    let id = *play.held.keys().next().unwrap();
    let mut commands = Vec::new();
    play.ledger.release(id, &mut commands);
    assert_eq!(commands, [Command::Cancel { unit: 0 }]);
    // A prefetch that no request has joined goes on.
    let mut play = Play::new(80, EXPERTS);
    play.apply(|ledger, commands| ledger.prefetch(&[0], None, commands));
    play.request([EXPERTS].into());
    while !play.loading.is_empty() {
        play.end(0, 7);
    }
    let id = *play.held.keys().next().unwrap();
    play.apply(|ledger, commands| ledger.prefetch(&[1], None, commands));
    let mut commands = Vec::new();
    play.ledger.release(id, &mut commands);
    assert_eq!(commands, []);
}

#[test]
fn a_prefetch_that_fails_is_counted() {
    let mut play = Play::new(80, EXPERTS);
    play.apply(|ledger, commands| ledger.prefetch(&[0], None, commands));
    play.end(0, 1);
    let counts = play.ledger.counts();
    assert_eq!((counts.failed_prefetches, counts.dropped_prefetches, play.ledger.used()), (1, 0, 0));
}

#[test]
fn dense_tensors_make_room_among_themselves() {
    let limits = Limits { budget: 80, max_experts: EXPERTS, max_dense_bytes: 50 };
    let mut play = Play::of(Box::new(Lru::default()), limits);
    for units in [[0], [EXPERTS], [EXPERTS + 1], [EXPERTS + 2]] {
        let request = ready(&mut play, &units);
        play.held.remove(&request);
        play.apply(|ledger, commands| ledger.release(request, commands));
    }
    let resident: Vec<usize> = (0..UNITS).filter(|unit| play.ledger.is_resident(*unit)).collect();
    assert_eq!(resident, [0, EXPERTS + 1, EXPERTS + 2], "no expert makes room for them");
}

/// Panics as it is asked for a victim.
#[derive(Default)]
struct Panics(Lru);

impl Policy for Panics {
    fn visit(&mut self, layer: u32, experts: &[(u32, f32)]) {
        self.0.visit(layer, experts);
    }

    fn insert(&mut self, expert: ExpertId) {
        self.0.insert(expert);
    }

    fn remove(&mut self, expert: ExpertId) {
        self.0.remove(expert);
    }

    fn victim(&mut self, _: &mut dyn FnMut(ExpertId) -> bool) -> Option<ExpertId> {
        panic!("no victim");
    }

    fn name(&self) -> &'static str {
        "panics"
    }
}

#[test]
fn a_policy_that_panics_closes_the_store_and_wakes_who_waits() {
    let limits = Limits { budget: 30, max_experts: EXPERTS, max_dense_bytes: u64::MAX };
    let mut play = Play::of(Box::<Panics>::default(), limits);
    let leased = ready(&mut play, &[0, 2]);
    assert!(!play.ledger.take_wake());
    let waits = ready(&mut play, &[4]);
    assert_eq!(play.ledger.policy_panic(), Some("no victim"), "room for 14 more was asked for");
    assert_eq!((play.ledger.status(leased), play.ledger.status(waits)), (Status::Ready, Status::Closed));
    assert_eq!(play.ledger.check(&[0]), Err(Refusal::Closed));
    assert!(play.ledger.take_wake() && !play.ledger.take_wake(), "it is told once");
    play.release(1);
    play.release(0);
    assert_eq!(play.ledger.pinned(), 0);
}
