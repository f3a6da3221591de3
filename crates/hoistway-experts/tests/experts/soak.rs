//! Threads, faults, cancellations and a small budget at once, for as long as one likes: `just soak-experts`.

use crate::kit::{EXPERTS, LAYERS, Model, budget_of, scripted, until};
use hoistway::{Route, route::fault::Fault};
use hoistway_experts::{
    Error,
    backing::Backing,
    store::{Lease, Store},
};
use std::{
    env,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

const THREADS: u64 = 4;
/// Experts that the budget of a round holds at most.
const MOST: u64 = 9;

/// What the threads of a round share.
struct Round<'a> {
    store: &'a Store,
    model: &'a Model,
    is_over: AtomicBool,
    good: AtomicU64,
    refused: AtomicU64,
}

#[test]
#[ignore = "takes 10 seconds, or as many as HOISTWAY_SOAK_SECONDS says: just soak-experts"]
fn soak() {
    let seconds = env::var("HOISTWAY_SOAK_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(10));
    let model = Model::new();
    let (mut seed, mut good) = (0, 0);
    while Instant::now() < end {
        let left = end.saturating_duration_since(Instant::now());
        good += round(&model, seed, Duration::from_secs(5).min(left));
        seed += 1;
    }
    assert!(good > 0, "no request was served");
}

/// Some seconds of one store, which is then dropped before its leases, or after them. Returns the leases that were served.
fn round(model: &Model, seed: u64, duration: Duration) -> u64 {
    let mut random = fastrand::Rng::with_seed(seed);
    let backing = [Backing::HostSlots, Backing::HostSparse][seed as usize % 2].clone();
    let faults = random.u64(0..=40);
    let (options, script) = scripted(budget_of(MOST).backing(backing), move |number, offset| {
        let mut random = fastrand::Rng::with_seed(seed ^ number.rotate_left(32) ^ offset);
        match random.u64(0..1000) {
            fate if fate >= 5 * faults => None,
            fate => Some(match fate % 5 {
                0 => Fault::Broken,
                1 => Fault::Interrupted,
                2 => Fault::Again,
                3 => Fault::Short(random.usize(1..4096)),
                _ => Fault::Delay(Duration::from_micros(random.u64(0..2000))),
            }),
        }
    });
    let options = options.timeout(Duration::from_millis(random.u64(1..100)));
    let route = random.bool().then_some(Route::Threads);
    let reader = options.reader.clone().in_flight(random.usize(1..8));
    let reader = route.map_or(reader.clone(), |route| reader.route(route));
    let store = model.store(&options.reader(reader));
    let round = Round {
        store: &store,
        model,
        is_over: AtomicBool::new(false),
        good: AtomicU64::new(0),
        refused: AtomicU64::new(0),
    };
    let held = thread::scope(|scope| {
        let threads = (0..THREADS).map(|thread| {
            let round = &round;
            scope.spawn(move || round.work(fastrand::Rng::with_seed(1 + seed * THREADS + thread)))
        });
        let threads: Vec<_> = threads.collect();
        let begin = Instant::now();
        while begin.elapsed() < duration && !threads.iter().any(thread::ScopedJoinHandle::is_finished) {
            round.assert_within_budget();
            thread::yield_now();
        }
        round.is_over.store(true, Ordering::Relaxed);
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<Lease>>()
    });
    round.assert_within_budget();
    let Round { good, refused, .. } = round;
    let (good, refused, stats) = (good.into_inner(), refused.into_inner(), store.stats());
    eprintln!(
        "seed {seed}, {}: {good} leases, {refused} refused, {} reads, {} evictions, {} of {} prefetches used",
        stats.backing,
        script.reads(),
        stats.evictions,
        stats.useful_prefetches,
        stats.prefetches,
    );
    if random.bool() {
        drop(store);
        held.iter().for_each(|lease| model.assert_holds(lease));
        return good;
    }
    held.iter().for_each(|lease| model.assert_holds(lease));
    drop(held);
    store.set_budget(budget_of(1).budget_bytes).unwrap();
    until("the smallest budget", || {
        let stats = store.stats();
        stats.used_bytes <= stats.budget_bytes && stats.held_bytes <= stats.budget_bytes
    });
    good
}

impl Round<'_> {
    /// Uses the store until the round is over. Returns the leases that it holds then.
    fn work(&self, mut random: fastrand::Rng) -> Vec<Lease> {
        let mut held: Vec<Lease> = Vec::new();
        while !self.is_over.load(Ordering::Relaxed) {
            let layer = random.u32(0..LAYERS);
            let experts: Vec<u32> = (0..random.usize(0..4)).map(|_| random.u32(0..EXPERTS)).collect();
            match random.u32(0..20) {
                0 => {
                    let budget = budget_of(random.u64(1..=MOST)).budget_bytes;
                    self.store.set_budget(budget).unwrap();
                }
                1 => _ = self.store.evict(layer, &experts).unwrap(),
                2 => self.store.cancel_before(layer),
                3 => {
                    let observed: Vec<_> = experts.iter().map(|expert| (*expert, 0.5)).collect();
                    self.store.observe(layer, &observed).unwrap();
                }
                4..7 => {
                    let deadline = Instant::now() + Duration::from_micros(random.u64(0..3000));
                    let deadline = random.bool().then_some(deadline);
                    self.store.prefetch(layer, &experts, deadline).unwrap();
                }
                7 => {
                    let names = ["token_embd.weight", "blk.0.attn_q.weight"];
                    self.settle(
                        self.store.ensure_tensors(&names[..random.usize(1..=2)]),
                        &mut held,
                        &mut random,
                    );
                }
                8 => _ = self.store.evict_tensors(&["token_embd.weight"]).unwrap(),
                9..12 => self.give_up(layer, &experts, &mut random),
                _ => self.settle(self.store.ensure(layer, &experts), &mut held, &mut random),
            }
        }
        held
    }

    /// Looks at what a request got, and may hold it for a while.
    fn settle(
        &self,
        answer: hoistway_experts::Result<Lease>,
        held: &mut Vec<Lease>,
        random: &mut fastrand::Rng,
    ) {
        match answer {
            Ok(lease) => {
                self.model.assert_holds(&lease);
                self.good.fetch_add(1, Ordering::Relaxed);
                if random.u32(0..4) == 0 {
                    held.push(lease);
                }
            }
            Err(error) => {
                self.assert_refusal(&error);
                held.clear();
            }
        }
        while held.len() > 3 || (!held.is_empty() && random.bool()) {
            let lease = held.swap_remove(random.usize(..held.len()));
            self.model.assert_holds(&lease);
        }
    }

    /// Requests experts, and drops the ticket at some point of its way.
    fn give_up(&self, layer: u32, experts: &[u32], random: &mut fastrand::Rng) {
        let ticket = self.store.ensure_async(layer, experts).unwrap();
        if ticket.is_empty() || random.bool() {
            return;
        }
        let patience = Duration::from_micros(random.u64(0..2000));
        match ticket.wait_one(random.usize(..ticket.len()), patience) {
            Ok(ready) => self.model.assert_unit(ready.get()),
            Err(error) => self.assert_refusal(&error),
        }
    }

    fn assert_refusal(&self, error: &Error) {
        let is_expected = matches!(error, Error::Read { .. } | Error::NoRoom { .. } | Error::TimedOut { .. });
        assert!(is_expected, "{error:?}");
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// What is resident, or held by the backing, is the budget and the demand of one request at most.
    fn assert_within_budget(&self) {
        let stats = self.store.stats();
        let most = budget_of(MOST).budget_bytes + stats.largest_batch_bytes;
        assert!(
            stats.used_bytes <= most && stats.peak_bytes <= most && stats.held_bytes <= most,
            "{stats:?}"
        );
    }
}
