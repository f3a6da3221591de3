//! Each policy as its description says it, without structures that make it fast: a rank of each resident expert, the lowest
//! of which goes.
#![forbid(unsafe_code)]

use super::{
    ExpertId, Profile,
    conformance::{Driver, ReadOrder, Visit, make, shape, visit},
    names,
};
use proptest::{collection::vec, prelude::*};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A policy's state in its simplest form.
trait Model {
    fn visit(&mut self, visit: &Visit);
    fn insert(&mut self, _id: ExpertId) {}
    fn remove(&mut self, _id: ExpertId) {}
    /// A victim is about to be chosen among so many residents.
    fn need_room(&mut self, _residents: usize) {}
    /// The rank of a resident: the lowest is evicted.
    fn rank(&self, id: ExpertId) -> (f64, f64);
}

fn ids((layer, experts): &Visit) -> impl Iterator<Item = ExpertId> {
    experts.iter().map(|&(expert, _)| ExpertId { layer: *layer, expert })
}

fn distinct(visit: &Visit) -> BTreeSet<ExpertId> {
    ids(visit).collect()
}

/// When each expert was used last, or came without being used.
#[derive(Default)]
struct Uses {
    clock: u32,
    last: BTreeMap<ExpertId, u32>,
}

impl Uses {
    fn note(&mut self, id: ExpertId) {
        self.clock += 1;
        self.last.insert(id, self.clock);
    }

    fn last(&self, id: ExpertId) -> f64 {
        self.last.get(&id).copied().unwrap_or_default().into()
    }
}

#[derive(Default)]
struct Lru(Uses);

impl Model for Lru {
    fn visit(&mut self, visit: &Visit) {
        ids(visit).for_each(|id| self.0.note(id));
    }
    fn insert(&mut self, id: ExpertId) {
        if !self.0.last.contains_key(&id) {
            self.0.note(id);
        }
    }
    fn remove(&mut self, id: ExpertId) {
        self.0.last.remove(&id);
    }
    fn rank(&self, id: ExpertId) -> (f64, f64) {
        (self.0.last(id), 0.0)
    }
}

#[derive(Default)]
struct Lfu {
    uses: Uses,
    visits: BTreeMap<ExpertId, u32>,
}

impl Model for Lfu {
    fn visit(&mut self, visit: &Visit) {
        ids(visit).for_each(|id| self.uses.note(id));
        distinct(visit).into_iter().for_each(|id| *self.visits.entry(id).or_default() += 1);
    }
    fn rank(&self, id: ExpertId) -> (f64, f64) {
        (self.visits.get(&id).copied().unwrap_or_default().into(), self.uses.last(id))
    }
}

struct StaticProfile {
    uses: Uses,
    profile: Profile,
}

impl Model for StaticProfile {
    fn visit(&mut self, visit: &Visit) {
        ids(visit).for_each(|id| self.uses.note(id));
    }
    fn rank(&self, id: ExpertId) -> (f64, f64) {
        (self.profile.count(id) as f64, self.uses.last(id))
    }
}

struct Belady {
    visits: Vec<Visit>,
    now: usize,
}

impl Model for Belady {
    fn visit(&mut self, _visit: &Visit) {
        self.now += 1;
    }
    fn rank(&self, id: ExpertId) -> (f64, f64) {
        let next = self.visits[self.now..].iter().position(|visit| distinct(visit).contains(&id));
        (next.map_or(-1e9, |next| -(next as f64)), 0.0)
    }
}

/// The averages, from all visits of the layer, and what is added to those of its last token.
#[derive(Default)]
struct Ewma2 {
    visits: Vec<Visit>,
    /// How often experts of the token before were chosen again, and their averages.
    reuse: (f64, f64),
    bonus: BTreeMap<ExpertId, f64>,
}

impl Ewma2 {
    fn average(&self, id: ExpertId) -> f64 {
        let (mut score, mut age) = (0.0, 0.0);
        for visit in self.of_layer(id.layer) {
            let tokens = tokens(visit);
            let chosen = ids(visit).filter(|&other| other == id).count() as f64 / tokens;
            for half_life in [4.0, 32.0] {
                let weight = |age: f64| 0.5_f64.powf(age / half_life);
                score += chosen * (weight(age) - weight(age + tokens)) / 2.0;
            }
            age += tokens;
        }
        score
    }

    /// The visits of a layer, the last one first.
    fn of_layer(&self, layer: u32) -> impl Iterator<Item = &Visit> {
        self.visits.iter().rev().filter(move |visit| visit.0 == layer && !visit.1.is_empty())
    }
}

fn tokens(visit: &Visit) -> f64 {
    visit.1.len() as f64 / f64::from(shape().experts_per_token())
}

impl Model for Ewma2 {
    fn visit(&mut self, visit: &Visit) {
        let last = self.of_layer(visit.0).next().filter(|last| tokens(last) == 1.0);
        if let Some(last) = last.filter(|_| tokens(visit) == 1.0) {
            let count = distinct(last).len() as f64;
            let again = distinct(last).intersection(&distinct(visit)).count() as f64;
            let expected: f64 = distinct(last).into_iter().map(|id| self.average(id)).sum();
            let (rest, (chosen, average)) = (0.5_f64.powf(1.0 / 256.0), self.reuse);
            self.reuse = (
                chosen * rest + again / count * (1.0 - rest),
                average * rest + expected / count * (1.0 - rest),
            );
        }
        self.visits.push(visit.clone());
        if !visit.1.is_empty() {
            self.bonus.retain(|id, _| id.layer != visit.0);
        }
        if tokens(visit) == 1.0 {
            let bonus = (self.reuse.0 - self.reuse.1).max(0.0);
            self.bonus.extend(distinct(visit).into_iter().map(|id| (id, bonus)));
        }
    }
    fn rank(&self, id: ExpertId) -> (f64, f64) {
        (self.average(id) + self.bonus.get(&id).copied().unwrap_or_default(), 0.0)
    }
}

/// Lists as the papers have them.
type List = VecDeque<ExpertId>;

fn take(list: &mut List, id: ExpertId) -> bool {
    let found = list.iter().position(|&other| other == id);
    found.is_some_and(|at| list.remove(at).is_some())
}

fn position(list: &List, id: ExpertId) -> Option<f64> {
    list.iter().position(|&other| other == id).map(|at| at as f64)
}

#[derive(Default)]
struct Slru {
    resident: BTreeSet<ExpertId>,
    probation: List,
    protected: List,
}

impl Model for Slru {
    fn visit(&mut self, visit: &Visit) {
        for id in ids(visit) {
            take(&mut self.probation, id);
            take(&mut self.protected, id);
            let list = if self.resident.contains(&id) { &mut self.protected } else { &mut self.probation };
            list.push_back(id);
        }
        while self.protected.len() > self.resident.len() * 4 / 5 {
            self.probation.extend(self.protected.pop_front());
        }
    }
    fn insert(&mut self, id: ExpertId) {
        self.resident.insert(id);
        if !self.probation.contains(&id) && !self.protected.contains(&id) {
            self.probation.push_back(id);
        }
    }
    fn remove(&mut self, id: ExpertId) {
        self.resident.remove(&id);
        take(&mut self.probation, id);
        take(&mut self.protected, id);
    }
    fn rank(&self, id: ExpertId) -> (f64, f64) {
        match position(&self.probation, id) {
            Some(at) => (0.0, at),
            None => (1.0, position(&self.protected, id).unwrap()),
        }
    }
}

/// The paper's T1, T2, B1, B2, p and c.
#[derive(Default)]
struct Arc {
    resident: BTreeSet<ExpertId>,
    t1: List,
    t2: List,
    b1: List,
    b2: List,
    p: usize,
    c: usize,
}

impl Model for Arc {
    fn visit(&mut self, visit: &Visit) {
        for id in ids(visit) {
            let (len_1, len_2) = (self.b1.len(), self.b2.len());
            let is_once = take(&mut self.t1, id) && !self.resident.contains(&id);
            let was_again = take(&mut self.t2, id);
            if take(&mut self.b1, id) {
                self.p = self.c.min(self.p + 1.max(len_2 / len_1));
                self.t2.push_back(id);
            } else if take(&mut self.b2, id) {
                self.p = self.p.saturating_sub(1.max(len_1 / len_2));
                self.t2.push_back(id);
            } else if is_once || !(was_again || self.resident.contains(&id)) {
                self.t1.push_back(id);
            } else {
                self.t2.push_back(id);
            }
        }
    }
    fn insert(&mut self, id: ExpertId) {
        self.resident.insert(id);
        if !self.t1.contains(&id) && !self.t2.contains(&id) {
            take(&mut self.b1, id);
            take(&mut self.b2, id);
            self.t1.push_back(id);
        }
    }
    fn remove(&mut self, id: ExpertId) {
        self.resident.remove(&id);
        if take(&mut self.t2, id) {
            self.b2.push_back(id);
        } else if take(&mut self.t1, id) {
            self.b1.push_back(id);
        }
        while self.t1.len() + self.b1.len() > self.c && self.b1.pop_front().is_some() {}
        while self.b1.len() + self.b2.len() > self.c && self.b2.pop_front().is_some() {}
    }
    fn need_room(&mut self, residents: usize) {
        self.c = residents;
    }
    fn rank(&self, id: ExpertId) -> (f64, f64) {
        let is_first_once = self.t1.len() > self.p;
        match position(&self.t1, id) {
            Some(at) => (if is_first_once { 0.0 } else { 1.0 }, at),
            None => (0.5, position(&self.t2, id).unwrap()),
        }
    }
}

fn model(name: &str, visits: &[Visit]) -> Box<dyn Model> {
    let seen = visits.iter().map(|(layer, experts)| (*layer, &experts[..]));
    match name {
        "lru" => Box::new(Lru::default()),
        "slru" => Box::new(Slru::default()),
        "lfu" => Box::new(Lfu::default()),
        "arc" => Box::new(Arc::default()),
        "static-profile" => {
            Box::new(StaticProfile { uses: Uses::default(), profile: Profile::new(&shape(), seen) })
        }
        "belady" => Box::new(Belady { visits: visits.to_vec(), now: 0 }),
        "ewma2" => Box::new(Ewma2::default()),
        name => panic!("policy {name} has no model"),
    }
}

/// One thing that a store does.
#[derive(Clone, Debug)]
enum Step {
    Visit(Visit),
    /// A prefetch of an expert, without a visit.
    Prefetch(ExpertId),
    /// A new budget, which is lower by so much for a moment.
    Shrink(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => visit(1..=1).prop_map(Step::Visit),
        1 => visit(2..=6).prop_map(Step::Visit),
        1 => visit(1..=1).prop_map(|visit| Step::Prefetch(ids(&visit).next().unwrap())),
        1 => (0..4_usize).prop_map(Step::Shrink),
    ]
}

/// A driver beside a model of its policy.
struct Pair {
    driver: Driver,
    model: Box<dyn Model>,
    capacity: usize,
}

impl Pair {
    /// Evicts until there is room for one more, and compares.
    fn make_room(&mut self, capacity: usize, in_use: &BTreeSet<ExpertId>) {
        while self.driver.resident.len() >= capacity {
            self.model.need_room(self.driver.resident.len());
            let candidates: Vec<_> = self.driver.resident.difference(in_use).copied().collect();
            let Some(victim) = self.driver.evict(in_use) else { return };
            let rank = self.model.rank(victim);
            for other in candidates {
                let other_rank = self.model.rank(other);
                let is_alike = (rank.0 - other_rank.0).abs() <= 1e-4 * rank.0.abs();
                let is_right = if is_alike { rank.1 <= other_rank.1 } else { rank.0 < other_rank.0 };
                assert!(is_right, "{victim} of {rank:?} goes before {other} of {other_rank:?}");
            }
            self.model.remove(victim);
        }
    }

    fn insert(&mut self, id: ExpertId) {
        self.driver.insert(id);
        self.model.insert(id);
    }

    fn carry_out(&mut self, step: &Step) {
        match step {
            Step::Visit(visit) => {
                self.driver.policy.visit(visit.0, &visit.1);
                self.model.visit(visit);
                let used = distinct(visit);
                for id in &used {
                    if !self.driver.resident.contains(id) {
                        self.make_room(self.capacity, &used);
                        self.insert(*id);
                    }
                }
            }
            Step::Prefetch(id) => {
                if !self.driver.resident.contains(id) {
                    self.make_room(self.capacity, &BTreeSet::new());
                    self.insert(*id);
                }
            }
            Step::Shrink(by) => self.make_room(self.capacity.saturating_sub(*by).max(1), &BTreeSet::new()),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_policy_agrees_with_its_model(steps in vec(step(), 1..150), capacity in 1..14_usize) {
        let visits: Vec<Visit> = steps.iter().filter_map(|step| match step {
            Step::Visit(visit) => Some(visit.clone()),
            _ => None,
        }).collect();
        for name in names() {
            let driver = Driver::new(make(name, &visits), capacity);
            let mut pair = Pair { driver, model: model(name, &visits), capacity };
            steps.iter().for_each(|step| pair.carry_out(step));
        }
    }
}

#[test]
fn a_scan_does_not_evict_what_is_used_often() {
    let hot: Visit = (0, vec![(0, 0.5), (1, 0.5)]);
    // Tokens that go to all experts of another layer, once each.
    let scan: Visit = (2, (0..6).map(|expert| (expert, 0.5)).collect());
    let visits = [vec![hot.clone(); 8], vec![scan; 3], vec![hot.clone()]].concat();
    let expected: BTreeSet<_> = distinct(&hot);
    for (name, is_kept) in [("ewma2", true), ("lru", false)] {
        let mut driver = Driver::new(make(name, &visits), 2);
        for visit in &visits[..11] {
            driver.visit(visit, &BTreeSet::new(), ReadOrder::Asked);
        }
        assert_eq!(expected.is_subset(&driver.resident), is_kept, "{name}: {:?}", driver.resident);
    }
}
