//! The store: leases, budget, prefetches, tickets, dense tensors.

use crate::kit::{EXPERTS, LAYERS, LONG, Lru, Model, SHORT, budget_of, scripted, until};
use hoistway::{Cancel, Route, route::fault::Fault};
use hoistway_experts::{
    Error, ExpertId, Policy,
    catalog::{ExpertCatalog, Part, UnitId},
    store::{Change, Store, StoreOptions},
};
use proptest::prelude::*;
use std::{
    collections::BTreeSet,
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

fn id(layer: u32, expert: u32) -> ExpertId {
    ExpertId { layer, expert }
}

#[test]
fn hits_and_misses_are_counted_and_leases_hold_their_bytes() {
    let model = Model::new();
    let store = model.store(&budget_of(6));
    for _token in 0..2 {
        for layer in 0..LAYERS {
            let lease = store.ensure(layer, &[5, 1]).unwrap();
            let units: Vec<UnitId> = lease.units().map(|unit| unit.unit().id()).collect();
            assert_eq!(units, [UnitId::Expert(id(layer, 5)), UnitId::Expert(id(layer, 1))]);
            assert!(lease.expert(id(layer, 1)).is_some() && lease.expert(id(layer, 2)).is_none());
            model.assert_holds(&lease);
        }
    }
    let stats = store.stats();
    assert_eq!((stats.hits, stats.misses, stats.tokens, stats.resident), (6, 6, 2, 6));
    assert_eq!(stats.bytes_read, 6 * model.catalog.expert_bytes(0));
    assert_eq!((stats.hit_rate(), stats.faults_per_token()), (0.5, 3.0));
    assert_eq!(stats.bytes_per_token(), 3.0 * model.catalog.expert_bytes(0) as f64);
    assert_eq!((stats.policy, stats.backing), ("lru", "host_slots"));
    assert!(stats.largest_batch_bytes >= 2 * model.catalog.expert_bytes(0));
    // What the experts of a token occupy, with whole blocks for each part.
    assert_eq!(stats.token_cycle_bytes, Some(budget_of(6).budget_bytes));
    assert!(model.store(&budget_of(5)).stats().is_below_token_cycle);
    assert!(!stats.is_below_token_cycle);
}

#[test]
fn an_expert_that_is_named_twice_is_read_once() {
    let model = Model::new();
    let store = model.store(&budget_of(4));
    let lease = store.ensure(0, &[3, 3, 2]).unwrap();
    assert_eq!((lease.len(), store.stats().misses), (3, 2));
    let [first, second] = [0, 1].map(|position| lease.get(position).unwrap());
    assert_eq!((first.slot(), first.unit().id()), (second.slot(), second.unit().id()));
    model.assert_holds(&lease);
    assert!(store.ensure(0, &[]).unwrap().is_empty());
}

#[test]
fn what_cannot_be_asked_for_is_a_typed_error() {
    let model = Model::new();
    let store = model.store(&budget_of(4));
    assert!(matches!(store.ensure(0, &[EXPERTS]), Err(Error::NoSuchExpert { experts: 8, .. })));
    assert!(matches!(store.ensure(9, &[0]), Err(Error::NoSuchLayer { layer: 9, range: Some((0, 2)) })));
    assert!(matches!(store.ensure(9, &[]), Err(Error::NoSuchLayer { .. })));
    assert!(matches!(store.observe(0, &[(99, 1.0)]), Err(Error::NoSuchExpert { .. })));
    assert!(matches!(store.prefetch(0, &[99], None), Err(Error::NoSuchExpert { .. })));
    assert!(matches!(store.is_resident(id(0, 99)), Err(Error::NoSuchExpert { .. })));
    assert!(matches!(store.ensure_tensors(&["nothing"]), Err(Error::NoSuchTensor { is_expert: false, .. })));
    let stacked = store.ensure_tensors(&["blk.0.ffn_up_exps.weight"]).unwrap_err();
    assert!(matches!(stacked, Error::NoSuchTensor { is_expert: true, .. }), "{stacked}");
    // The store goes on.
    model.assert_holds(&store.ensure(0, &[0]).unwrap());
}

#[test]
fn a_budget_below_one_expert_is_an_error_and_one_below_a_token_says_so() {
    let model = Model::new();
    let error = model.open(&StoreOptions::default().budget_bytes(1000)).unwrap_err();
    let Error::BudgetTooSmall { budget: 1000, needed, .. } = error else { panic!("{error:?}") };
    assert_eq!(needed, 3 * 3 * 4096);
    let store = model.store(&budget_of(2));
    let stats = store.stats();
    assert!(stats.is_below_token_cycle);
    assert!(stats.budget_bytes < stats.token_cycle_bytes.unwrap());
    assert!(matches!(store.set_budget(1000), Err(Error::BudgetTooSmall { .. })));
    assert_eq!(store.stats().token_cycle_bytes, stats.token_cycle_bytes);
    assert_eq!(store.stats().budget_bytes, stats.budget_bytes);
}

#[test]
fn a_smaller_budget_evicts_and_a_larger_one_keeps() {
    let model = Model::new();
    let store = model.store(&budget_of(8));
    let all: Vec<u32> = (0..EXPERTS).collect();
    drop(store.ensure(0, &all).unwrap());
    assert_eq!(store.stats().resident, 8);
    store.set_budget(budget_of(3).budget_bytes).unwrap();
    assert_eq!((store.stats().resident, store.stats().used_bytes), (3, budget_of(3).budget_bytes));
    store.set_budget(budget_of(8).budget_bytes).unwrap();
    let lease = store.ensure(0, &all).unwrap();
    model.assert_holds(&lease);
    // What is leased stays until the lease goes.
    store.set_budget(budget_of(1).budget_bytes).unwrap();
    assert_eq!(store.stats().resident, 8);
    model.assert_holds(&lease);
    drop(lease);
    assert_eq!(store.stats().resident, 1);
}

#[test]
fn what_the_router_chose_is_told_once() {
    let model = Model::new();
    let store = model.store(&budget_of(2));
    drop(store.ensure(0, &[0]).unwrap());
    drop(store.ensure(0, &[1]).unwrap());
    // By the weights that were observed, and by the request, expert 0 was used last.
    store.observe(0, &[(0, 0.9)]).unwrap();
    drop(store.ensure(0, &[0]).unwrap());
    drop(store.ensure(0, &[2]).unwrap());
    assert!(store.is_resident(id(0, 0)).unwrap() && !store.is_resident(id(0, 1)).unwrap());
}

#[test]
fn two_threads_that_want_one_expert_share_its_reads() {
    let model = Model::new();
    let (options, script) = scripted(budget_of(4), |_, _| Some(Fault::Delay(Duration::from_millis(5))));
    let (store, barrier) = (model.store(&options), Arc::new(Barrier::new(4)));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                barrier.wait();
                model.assert_holds(&store.ensure(1, &[6]).unwrap());
            });
        }
    });
    let stats = store.stats();
    assert_eq!((stats.hits, stats.misses), (3, 1));
    // Three parts, of which none is read twice. A part may be cut where a chunk of the file ends.
    assert!((3..=6).contains(&script.reads()), "{} reads", script.reads());
}

#[test]
fn a_lease_that_is_held_for_ever_ends_a_request_with_an_error_at_its_deadline() {
    let model = Model::new();
    let store = model.store(&budget_of(2));
    let first = store.ensure(0, &[0, 1]).unwrap();
    // One request may exceed the budget by its own demand, the next waits for it.
    let second = store.ensure(0, &[2]).unwrap();
    let asked = Instant::now();
    let error = store.ensure_async(0, &[3]).unwrap().wait_within(SHORT).unwrap_err();
    let Error::NoRoom { needed, leased, budget, waited } = error else { panic!("{error:?}") };
    assert!(asked.elapsed() >= SHORT && waited >= SHORT);
    let expert = budget_of(1).budget_bytes;
    assert_eq!((needed, leased, budget), (expert, 3 * expert, 2 * expert));
    // What is there is leased all the same.
    model.assert_holds(&store.ensure(0, &[1]).unwrap());
    model.assert_holds(&first);
    drop(second);
    model.assert_holds(&store.ensure(0, &[3]).unwrap());
}

#[test]
fn a_request_that_waits_goes_on_when_a_lease_is_dropped() {
    let model = Model::new();
    let store = model.store(&budget_of(1));
    let (first, second) = (store.ensure(0, &[0]).unwrap(), store.ensure(0, &[1]).unwrap());
    thread::scope(|scope| {
        let waiting = scope.spawn(|| store.ensure(0, &[2]));
        thread::sleep(Duration::from_millis(20));
        assert!(!waiting.is_finished());
        drop(second);
        model.assert_holds(&waiting.join().unwrap().unwrap());
    });
    model.assert_holds(&first);
}

#[test]
fn experts_of_a_ticket_are_ready_each_for_itself() {
    let model = Model::new();
    let slow = model.catalog.expert(id(2, 7)).unwrap().parts()[1].bytes;
    let open = Arc::new(AtomicBool::new(false));
    let gate = open.clone();
    let (options, _) = scripted(budget_of(4), move |_, offset| {
        // Up to the block that the next tensor begins in.
        if (slow.start() / 4096 * 4096..slow.end() / 4096 * 4096).contains(&offset) {
            until("the gate", || gate.load(Ordering::Relaxed));
        }
        None
    });
    // Threads of which one waits at the gate: a ring's only thread would hold up the other expert.
    let reader = options.reader.clone().route(Route::Threads);
    let store = model.store(&options.reader(reader));
    let ticket = store.ensure_async(2, &[7, 0]).unwrap();
    model.assert_unit(ticket.wait_one(1, LONG).unwrap().get());
    assert!(ticket.is_ready(1) && !ticket.is_ready(0) && !ticket.is_ready(2));
    let error = ticket.wait_one(0, SHORT).unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error:?}");
    assert!(matches!(ticket.wait_one(2, SHORT), Err(Error::InvalidOption { option: "position", .. })));
    open.store(true, Ordering::Relaxed);
    model.assert_holds(&ticket.wait().unwrap());
}

#[test]
fn a_ticket_that_is_dropped_leaves_nothing_half_read() {
    let model = Model::new();
    let (options, _) = scripted(budget_of(3), |_, _| Some(Fault::Delay(Duration::from_millis(1))));
    let store = model.store(&options);
    for round in 0..40 {
        let ticket = store.ensure_async(round % LAYERS, &[0, 1, 2, 3]).unwrap();
        if round % 3 == 0 {
            let _ = ticket.wait_one(0, Duration::from_millis(2));
        }
        drop(ticket);
        if round % 4 == 0 {
            model.assert_holds(&store.ensure(round % LAYERS, &[0, 3]).unwrap());
        }
    }
    until("the budget", || store.stats().used_bytes <= budget_of(3).budget_bytes);
}

#[test]
fn prefetches_become_hits_and_demand_drops_what_has_not_begun() {
    let model = Model::new();
    let store = model.store(&budget_of(8));
    store.prefetch(1, &[4, 5], None).unwrap();
    until("the prefetch", || store.is_resident(id(1, 5)).unwrap());
    model.assert_holds(&store.ensure(1, &[4, 5]).unwrap());
    let stats = store.stats();
    assert_eq!((stats.hits, stats.misses, stats.prefetches, stats.useful_prefetches), (2, 0, 2, 2));
    // A quarter of the budget, and no more.
    store.prefetch(2, &[0, 1, 2], None).unwrap();
    assert_eq!(store.stats().refused_prefetches, 1);
}

#[test]
fn prefetches_end_at_their_deadline_and_when_their_layer_is_over() {
    let model = Model::new();
    let (released, gate) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (opened, begun) = (gate.clone(), released.clone());
    let (options, _) = scripted(budget_of(16), move |_, _| {
        begun.store(true, Ordering::Relaxed);
        until("the gate", || opened.load(Ordering::Relaxed));
        None
    });
    // One lane, which the first prefetch has.
    let reader = options.reader.clone().in_flight(1);
    let store = model.store(&options.reader(reader));
    store.prefetch(0, &[0], None).unwrap();
    until("the first read", || released.load(Ordering::Relaxed));
    store.prefetch(1, &[0], None).unwrap();
    store.prefetch(2, &[1], Some(Instant::now() + Duration::from_millis(10))).unwrap();
    store.prefetch(2, &[0], None).unwrap();
    thread::sleep(Duration::from_millis(30));
    store.cancel_before(2);
    gate.store(true, Ordering::Relaxed);
    until("what was not cancelled", || store.is_resident(id(2, 0)).unwrap());
    assert!(!store.is_resident(id(1, 0)).unwrap(), "its layer is over");
    assert!(!store.is_resident(id(2, 1)).unwrap(), "its deadline has passed");
    // The first had begun with one of its parts: the others were cancelled.
    assert!(!store.is_resident(id(0, 0)).unwrap());
    // A thread that has found the deadline to have passed may tell a moment later.
    until("three prefetches are dropped", || store.stats().dropped_prefetches >= 3);
    assert_eq!(store.stats().dropped_prefetches, 3);
    model.assert_holds(&store.ensure(2, &[0, 1]).unwrap());
    model.assert_holds(&store.ensure(0, &[0]).unwrap());
}

#[test]
fn a_store_that_is_cancelled_as_it_opens_allocates_nothing() {
    let model = Model::new();
    let open = |cancel: &Cancel| {
        let files = ExpertCatalog::open_files(&model.checkpoint);
        let (policy, options) = (Box::new(Lru::default()), StoreOptions::default().budget_bytes(1));
        Store::open_until(cancel, model.catalog.clone(), files, policy, &options).unwrap_err()
    };
    let cancel = Cancel::default();
    let error = open(&cancel);
    assert!(matches!(error, Error::BudgetTooSmall { .. }), "known once there is memory: {error:?}");
    cancel.cancel();
    let error = open(&cancel);
    assert!(matches!(error, Error::Engine(hoistway::Error::Cancelled)), "{error:?}");
}

#[test]
fn what_was_dropped_while_it_was_read_is_read_again_without_another_call() {
    let model = Model::new();
    for is_request in [false, true] {
        let (begun, gate) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (begins, opened) = (begun.clone(), gate.clone());
        let (options, script) = scripted(budget_of(16), move |_, _| {
            begins.store(true, Ordering::Relaxed);
            until("the gate", || opened.load(Ordering::Relaxed));
            None
        });
        let reader = options.reader.clone().in_flight(1);
        let store = model.store(&options.reader(reader));
        store.prefetch(0, &[3], None).unwrap();
        until("the first part", || begun.load(Ordering::Relaxed));
        // It ends after the call: one part is under way.
        store.cancel_before(1);
        let ticket = if is_request {
            Some(store.ensure_async(0, &[3]).unwrap())
        } else {
            store.prefetch(0, &[3], None).unwrap();
            None
        };
        gate.store(true, Ordering::Relaxed);
        let parts = model.catalog.expert(id(0, 3)).unwrap().parts().len() as u64;
        until("the parts to be read again", || script.reads() > parts);
        if let Some(ticket) = ticket {
            model.assert_holds(&ticket.wait().unwrap());
        }
    }
}

#[test]
fn a_request_outlives_the_deadline_of_the_prefetch_that_it_waits_for() {
    let model = Model::new();
    let (released, gate) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (opened, begun) = (gate.clone(), released.clone());
    let (options, _) = scripted(budget_of(16), move |_, _| {
        begun.store(true, Ordering::Relaxed);
        until("the gate", || opened.load(Ordering::Relaxed));
        None
    });
    let reader = options.reader.clone().in_flight(1);
    let store = model.store(&options.reader(reader));
    let (mut time, mut deadline) = (Duration::from_millis(300), Instant::now());
    while !released.load(Ordering::Relaxed) {
        // A busy machine may begin nothing by the deadline: then it was too early.
        let dropped = store.stats().dropped_prefetches;
        deadline = Instant::now() + time;
        store.prefetch(0, &[0], Some(deadline)).unwrap();
        until("the first read, or the deadline", || {
            released.load(Ordering::Relaxed) || store.stats().dropped_prefetches > dropped
        });
        time *= 4;
    }
    let ticket = store.ensure_async(0, &[0]).unwrap();
    thread::sleep(deadline.saturating_duration_since(Instant::now()) + Duration::from_millis(50));
    gate.store(true, Ordering::Relaxed);
    model.assert_holds(&ticket.wait().unwrap());
}

#[test]
fn dense_tensors_come_by_name_and_go_when_told() {
    let model = Model::new();
    let store = model.store(&budget_of(4).events(100));
    let names = ["blk.0.attn_q.weight", "token_embd.weight"];
    let lease = store.ensure_tensors(&names).unwrap();
    model.assert_holds(&lease);
    assert!(store.is_tensor_resident(names[1]).unwrap());
    assert_eq!(store.evict_tensors(&names).unwrap(), 0, "a lease pins them");
    drop(lease);
    assert_eq!(store.evict_tensors(&names).unwrap(), 2);
    assert!(!store.is_tensor_resident(names[1]).unwrap());
    drop(store.ensure(0, &[1]).unwrap());
    assert_eq!(store.evict(0, &[0, 1]).unwrap(), 1);
    let (events, lost) = store.take_events();
    let changes: Vec<Change> = events.iter().map(|event| event.change).collect();
    assert_eq!((changes.len(), lost), (6, 0));
    assert_eq!(changes.iter().filter(|change| **change == Change::Evicted).count(), 3);
    assert_eq!(events.last().map(|event| event.unit), Some(UnitId::Expert(id(0, 1))));
    assert_eq!(store.take_events(), (Vec::new(), 0));
}

#[test]
fn events_that_no_one_takes_are_bounded() {
    let model = Model::new();
    let store = model.store(&budget_of(1).events(3));
    for expert in 0..EXPERTS {
        drop(store.ensure(0, &[expert]).unwrap());
    }
    let (events, lost) = store.take_events();
    // 8 became resident, 7 were evicted.
    assert_eq!((events.len(), lost), (3, 12));
}

#[test]
fn threads_with_random_requests_get_the_right_bytes_within_the_budget() {
    let model = Model::new();
    let store = model.store(&budget_of(5));
    let over = AtomicU64::new(0);
    thread::scope(|scope| {
        for seed in 0..4u64 {
            let (store, model, over) = (&store, &model, &over);
            scope.spawn(move || {
                let mut state = seed * 77 + 1;
                let mut next = |below: u64| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 33) % below
                };
                for _ in 0..60 {
                    let layer = next(LAYERS.into()) as u32;
                    let experts: Vec<u32> = (0..=next(3)).map(|_| next(EXPERTS.into()) as u32).collect();
                    if next(4) == 0 {
                        store.prefetch((layer + 1) % LAYERS, &[next(EXPERTS.into()) as u32], None).unwrap();
                    }
                    model.assert_holds(&store.ensure(layer, &experts).unwrap());
                    let stats = store.stats();
                    let most = stats.budget_bytes + stats.largest_batch_bytes;
                    over.fetch_max(stats.peak_bytes.saturating_sub(most), Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(over.into_inner(), 0, "bytes past the budget and one request");
    until("the budget", || store.stats().used_bytes <= budget_of(5).budget_bytes);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn any_sequence_of_requests_is_served(
        requests in prop::collection::vec((0..LAYERS, prop::collection::btree_set(0..EXPERTS, 1..6)), 1..12),
        experts in 1..10u64,
    ) {
        let model = Model::new();
        let store = model.store(&budget_of(experts));
        let mut seen = BTreeSet::new();
        for (layer, chosen) in requests {
            let chosen: Vec<u32> = chosen.into_iter().collect();
            let lease = store.ensure(layer, &chosen).unwrap();
            model.assert_holds(&lease);
            seen.extend(chosen.iter().map(|expert| (layer, *expert)));
        }
        let stats = store.stats();
        prop_assert!(stats.used_bytes <= stats.budget_bytes);
        prop_assert!(stats.misses >= seen.len() as u64);
        prop_assert_eq!(stats.bytes_read, stats.misses * model.catalog.expert_bytes(0));
    }
}

/// What a policy was told of visits.
type Told = Arc<Mutex<Vec<(u32, Vec<(u32, f32)>)>>>;

/// Notes visits, and panics as it is asked for a victim once it is told to.
struct Notes {
    lru: Lru,
    visits: Told,
    panics: Arc<AtomicBool>,
}

impl Policy for Notes {
    fn visit(&mut self, layer: u32, experts: &[(u32, f32)]) {
        self.visits.lock().unwrap().push((layer, experts.to_vec()));
        self.lru.visit(layer, experts);
    }

    fn insert(&mut self, expert: ExpertId) {
        self.lru.insert(expert);
    }

    fn remove(&mut self, expert: ExpertId) {
        self.lru.remove(expert);
    }

    fn victim(&mut self, may_evict: &mut dyn FnMut(ExpertId) -> bool) -> Option<ExpertId> {
        assert!(!self.panics.load(Ordering::Relaxed), "no more victims");
        self.lru.victim(may_evict)
    }

    fn name(&self) -> &'static str {
        "notes"
    }
}

fn noting(model: &Model, options: &StoreOptions) -> (Store, Told, Arc<AtomicBool>) {
    let (visits, panics) = (Told::default(), Arc::new(AtomicBool::new(false)));
    let policy = Notes { lru: Lru::default(), visits: visits.clone(), panics: panics.clone() };
    let files = ExpertCatalog::open_files(&model.checkpoint);
    (Store::open(model.catalog.clone(), files, Box::new(policy), options).unwrap(), visits, panics)
}

#[test]
fn each_visit_is_told_once_in_any_order_of_layers() {
    let model = Model::new();
    let (store, visits, _) = noting(&model, &budget_of(8));
    for _token in 0..2 {
        store.observe(0, &[(1, 0.75), (2, 0.25)]).unwrap();
        store.observe(1, &[(3, 1.0)]).unwrap();
        // In waves, and after the next layer was observed.
        drop(store.ensure(0, &[1]).unwrap());
        drop(store.ensure(0, &[2]).unwrap());
        drop(store.ensure(1, &[3]).unwrap());
        // Not observed.
        drop(store.ensure(2, &[5, 5]).unwrap());
    }
    let token = [(0, vec![(1, 0.75), (2, 0.25)]), (1, vec![(3, 1.0)]), (2, vec![(5, 1.0)])];
    assert_eq!(*visits.lock().unwrap(), [token.clone(), token].concat());
    assert_eq!(store.stats().tokens, 2);
}

#[test]
fn a_policy_that_panics_closes_the_store_and_takes_no_lease() {
    let model = Model::new();
    let (store, _, panics) = noting(&model, &budget_of(2));
    let lease = store.ensure(0, &[0, 1]).unwrap();
    panics.store(true, Ordering::Relaxed);
    let error = store.ensure(0, &[2]).unwrap_err();
    assert!(matches!(error, Error::Closed { policy: "notes", .. }), "{error:?}");
    assert!(error.to_string().contains("no more victims"), "{error}");
    assert!(matches!(store.ensure(0, &[0]), Err(Error::Closed { .. })));
    assert!(matches!(store.observe(0, &[(0, 1.0)]), Err(Error::Closed { .. })));
    assert!(matches!(store.prefetch(0, &[3], None), Err(Error::Closed { .. })));
    assert!(matches!(store.set_budget(budget_of(1).budget_bytes), Err(Error::Closed { .. })));
    model.assert_holds(&lease);
    drop(lease);
    assert_eq!(store.stats().resident, 2);
}

#[test]
fn a_smaller_budget_has_to_hold_the_largest_tensor_of_a_model_without_experts() {
    let model = Model::new();
    let mut builder = ExpertCatalog::builder();
    let file = builder.file(&model.path);
    let part = model.catalog.dense()[0].parts()[0].clone();
    let catalog = builder.dense(Part { file, ..part }).build().unwrap();
    let files = ExpertCatalog::open_files(&model.checkpoint);
    let options = budget_of(1);
    let store = Store::open(Arc::new(catalog), files, Box::new(Lru::default()), &options).unwrap();
    assert!(matches!(store.set_budget(100), Err(Error::BudgetTooSmall { .. })));
}

#[cfg(target_os = "linux")]
#[test]
fn a_child_of_fork_is_told_so_and_waits_for_no_lock() {
    let model = Model::new();
    let gate = Arc::new(AtomicBool::new(true));
    let is_open = gate.clone();
    let (options, _) = scripted(budget_of(4), move |_, _| {
        until("the gate", || is_open.load(Ordering::Relaxed));
        None
    });
    let store = model.store(&options);
    let lease = store.ensure(0, &[0]).unwrap();
    gate.store(false, Ordering::Relaxed);
    let ticket = store.ensure_async(1, &[1]).unwrap();
    // SAFETY: the child calls nothing but the store's functions, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_forked = |error: &Error| matches!(error, Error::Engine(hoistway::Error::Forked));
        let is_told = !ticket.is_ready(0)
            && ticket.wait().is_err_and(|error| is_forked(&error))
            && store.ensure(0, &[0]).is_err_and(|error| is_forked(&error))
            && store.is_resident(id(0, 0)).is_err_and(|error| is_forked(&error))
            && store.stats().resident == 0
            && lease.units().all(|unit| unit.parts().all(|part| part.bytes().is_some()));
        store.cancel_before(2);
        drop(lease);
        drop(store);
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(if is_told { 0 } else { 1 }) };
    }
    let mut status = -1;
    until("the child ends", || {
        // SAFETY: a child of this test, and a place for its status.
        unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) == child }
    });
    gate.store(true, Ordering::Relaxed);
    assert_eq!(status, 0, "the child was not told");
    model.assert_holds(&ticket.wait().unwrap());
    model.assert_holds(&lease);
}
