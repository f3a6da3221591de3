//! The suite that every policy passes. The driver is a store without bytes.
#![forbid(unsafe_code)]

use super::{CatalogShape, ExpertId, Future, LayerShape, Policy, PolicyInput, Profile, by_name, names};
use proptest::{collection::vec, prelude::*};
use std::collections::BTreeSet;

/// Experts of each layer: not all have some, and not as many.
const EXPERTS: [u32; 4] = [5, 0, 7, 6];
const EXPERTS_PER_TOKEN: u32 = 2;

/// A visit: the layer, and the experts that its router chose.
pub(super) type Visit = (u32, Vec<(u32, f32)>);

pub(super) fn shape() -> CatalogShape {
    let layers = EXPERTS.map(|experts| LayerShape { experts, expert_bytes: 1 });
    CatalogShape::new(EXPERTS_PER_TOKEN, layers.to_vec()).unwrap()
}

/// Makes the policy of a name for these visits.
pub(super) fn make(name: &str, visits: &[Visit]) -> Box<dyn Policy> {
    let shape = shape();
    let seen = visits.iter().map(|(layer, experts)| (*layer, &experts[..]));
    let (profile, future) = (Profile::new(&shape, seen.clone()), Future::new(&shape, seen));
    let input = PolicyInput { shape: &shape, profile: Some(&profile), future: Some(&future) };
    by_name(name, input).unwrap()
}

/// A visit of so many tokens.
pub(super) fn visit(tokens: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Visit> {
    let layer = prop_oneof![Just(0_u32), Just(2), Just(3)];
    (layer, vec((0..7_u32, 0..7_u32), tokens)).prop_map(|(layer, tokens)| {
        let experts = EXPERTS[layer as usize];
        let chosen = tokens.into_iter().flat_map(|(one, other)| {
            let one = one % experts;
            [one, (one + 1 + other % (experts - 1)) % experts]
        });
        (layer, chosen.map(|expert| (expert, 0.5)).collect())
    })
}

/// A store without bytes, which checks what its policy says.
pub(super) struct Driver {
    pub(super) policy: Box<dyn Policy>,
    pub(super) resident: BTreeSet<ExpertId>,
    capacity: usize,
    pub(super) hits: u32,
    pub(super) evicted: Vec<ExpertId>,
}

/// The order in which the reads of a visit end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadOrder {
    Asked,
    Reversed,
}

impl Driver {
    pub(super) fn new(policy: Box<dyn Policy>, capacity: usize) -> Self {
        Self { policy, resident: BTreeSet::new(), capacity, hits: 0, evicted: Vec::new() }
    }

    /// Visits a layer; `pinned` stay, and so does what the visit uses.
    pub(super) fn visit(&mut self, (layer, experts): &Visit, pinned: &BTreeSet<ExpertId>, order: ReadOrder) {
        self.policy.visit(*layer, experts);
        let used: BTreeSet<_> =
            experts.iter().map(|&(expert, _)| ExpertId { layer: *layer, expert }).collect();
        let in_use: BTreeSet<_> = used.union(pinned).copied().collect();
        let missing: Vec<_> = used.difference(&self.resident).copied().collect();
        self.hits += (used.len() - missing.len()) as u32;
        let mut kept = Vec::new();
        for id in missing {
            let mut has_room = self.resident.len() + kept.len() < self.capacity;
            if !has_room && !self.policy.admit(id) {
                continue;
            }
            while !has_room && self.evict(&in_use).is_some() {
                has_room = self.resident.len() + kept.len() < self.capacity;
            }
            kept.push(id);
        }
        if order == ReadOrder::Reversed {
            kept.reverse();
        }
        kept.into_iter().for_each(|id| self.insert(id));
    }

    pub(super) fn insert(&mut self, id: ExpertId) {
        self.policy.insert(id);
        self.resident.insert(id);
    }

    /// Evicts what the policy says, which must be resident and not in use, and the same if it is asked twice.
    pub(super) fn evict(&mut self, in_use: &BTreeSet<ExpertId>) -> Option<ExpertId> {
        let mut ask = || {
            let (mut asked, mut allowed) = (BTreeSet::new(), 0);
            let victim = self.policy.victim(&mut |id| {
                assert!(self.resident.contains(&id), "{id} is not resident");
                assert!(asked.insert(id), "{id} is asked about twice");
                allowed += u32::from(!in_use.contains(&id));
                !in_use.contains(&id)
            });
            assert!(allowed <= 1, "the first that may be evicted is the victim");
            victim
        };
        let (victim, again) = (ask(), ask());
        assert_eq!(victim, again);
        match victim {
            Some(id) => {
                assert!(self.resident.contains(&id) && !in_use.contains(&id), "{id}");
                self.policy.remove(id);
                self.resident.remove(&id);
                self.evicted.push(id);
            }
            None => assert!(self.resident.is_subset(in_use), "there is one that may be evicted"),
        }
        victim
    }
}

fn pins() -> impl Strategy<Value = BTreeSet<ExpertId>> {
    let id = (0..4_u32, 0..7_u32).prop_map(|(layer, expert)| ExpertId { layer, expert });
    proptest::collection::btree_set(id, 0..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn victims_are_resident_and_may_be_evicted(
        visits in vec((visit(0..=4), pins()), 1..60),
        capacity in 1..12_usize,
    ) {
        let all: Vec<Visit> = visits.iter().map(|(visit, _)| visit.clone()).collect();
        for name in names() {
            let mut driver = Driver::new(make(name, &all), capacity);
            for (visit, pinned) in &visits {
                driver.visit(visit, pinned, ReadOrder::Asked);
            }
            // Nothing is left behind.
            while driver.evict(&BTreeSet::new()).is_some() {}
            prop_assert_eq!(driver.resident.len(), 0);
        }
    }

    #[test]
    fn the_order_of_reads_changes_nothing(
        visits in vec(visit(1..=3), 1..60),
        capacity in 1..12_usize,
    ) {
        for name in names() {
            let [one, other] = [ReadOrder::Asked, ReadOrder::Reversed].map(|order| {
                let mut driver = Driver::new(make(name, &visits), capacity);
                for visit in &visits {
                    driver.visit(visit, &BTreeSet::new(), order);
                }
                driver.evicted
            });
            prop_assert_eq!(one, other, "{}", name);
        }
    }

    #[test]
    fn none_hits_more_than_belady(visits in vec(visit(1..=1), 1..120), capacity in 2..12_usize) {
        let hits = |name| {
            let mut driver = Driver::new(make(name, &visits), capacity);
            visits.iter().for_each(|visit| driver.visit(visit, &BTreeSet::new(), ReadOrder::Asked));
            driver.hits
        };
        let most = hits("belady");
        for name in names() {
            prop_assert!(hits(name) <= most, "{name}: {} of {most}", hits(name));
        }
    }
}

#[test]
fn what_is_not_there_is_ignored() {
    let visits: Vec<Visit> = vec![(0, vec![(1, 0.5), (99, 0.5)]), (1, vec![(0, 1.0)]), (77, vec![(0, 1.0)])];
    for name in names() {
        let mut policy = make(name, &visits);
        for (layer, experts) in &visits {
            policy.visit(*layer, experts);
        }
        for (layer, expert) in [(0, 99), (1, 0), (77, 0), (u32::MAX, u32::MAX)] {
            policy.insert(ExpertId { layer, expert });
            policy.remove(ExpertId { layer, expert });
            policy.insert(ExpertId { layer, expert });
            policy.admit(ExpertId { layer, expert });
        }
        assert_eq!(policy.victim(&mut |_| true), None, "{name}");
        let known = ExpertId { layer: 0, expert: 1 };
        policy.remove(known);
        policy.insert(known);
        policy.insert(known);
        assert_eq!(policy.victim(&mut |_| true), Some(known), "{name}");
        policy.remove(known);
        policy.remove(known);
        assert_eq!(policy.victim(&mut |_| true), None, "{name}");
        assert_eq!(policy.name(), name);
    }
}
