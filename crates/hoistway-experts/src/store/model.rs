//! The store's monitor and ledger under shuttle: the same files, with locks that try every order of threads, or many.
//!
//! `HOISTWAY_MODEL_ITERATIONS` says how many orders each test tries.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::duplicate_mod,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]

#[path = "guard.rs"]
mod guard;
#[path = "ledger.rs"]
mod ledger;
#[path = "monitor.rs"]
mod monitor;
#[path = "stats.rs"]
mod stats;

/// The locks of the model.
mod sync {
    pub(super) use shuttle::sync::{Condvar, Mutex, MutexGuard};
}

use crate::policy::{ExpertId, Policy};
use ledger::{Ended, Entry, Ledger, Limits};
use monitor::{Elsewhere, Io, Monitor, NotReady, Notice};
use shuttle::{
    sync::{Condvar, Mutex},
    thread,
};
use stats::Events;
use std::{
    collections::{BTreeSet, VecDeque},
    env,
    sync::Arc,
    time::Instant,
};

const COST: u64 = 10;
const UNITS: usize = 4;

/// How the disk treats the reads of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Delivers,
    /// Is not in a second level at first, and then delivers.
    IsGone,
    /// Is dropped by its deadline at first, and then delivers.
    IsLate,
    Fails,
}

/// Evicts the first that may be.
#[derive(Default)]
struct First(BTreeSet<ExpertId>);

impl Policy for First {
    fn visit(&mut self, _: u32, _: &[(u32, f32)]) {}

    fn insert(&mut self, expert: ExpertId) {
        assert!(self.0.insert(expert));
    }

    fn remove(&mut self, expert: ExpertId) {
        assert!(self.0.remove(&expert));
    }

    fn victim(&mut self, may_evict: &mut dyn FnMut(ExpertId) -> bool) -> Option<ExpertId> {
        self.0.iter().copied().find(|expert| may_evict(*expert))
    }

    fn name(&self) -> &'static str {
        "first"
    }
}

/// A read that the disk has not begun.
struct Waiting {
    unit: usize,
    load: Arc<ToyLoad>,
    notice: Notice,
}

#[derive(Default)]
struct ToyLoad(Mutex<Option<ToyEnd>>);

#[derive(Clone, Copy, PartialEq, Eq)]
enum ToyEnd {
    Delivered,
    Gone,
    Failed,
    Cancelled,
}

/// Reads units on a thread of its own, and knows which rooms hold bytes.
struct Disk {
    queue: Mutex<(VecDeque<Waiting>, bool)>,
    changed: Condvar,
    rooms: Mutex<Rooms>,
    fates: Vec<Fate>,
    /// Units that were found gone, or late.
    gone: Mutex<BTreeSet<usize>>,
    /// How many ends were told.
    told: Mutex<usize>,
}

#[derive(Default)]
struct Rooms {
    prepared: BTreeSet<usize>,
    reserved: BTreeSet<usize>,
    filled: BTreeSet<usize>,
    most: usize,
}

impl Disk {
    fn new(fates: &[Fate]) -> Arc<Self> {
        let (queue, rooms) = (Mutex::new((VecDeque::new(), false)), Mutex::default());
        Arc::new(Self {
            queue,
            changed: Condvar::new(),
            rooms,
            fates: fates.to_vec(),
            gone: Mutex::default(),
            told: Mutex::default(),
        })
    }

    fn serve(&self) {
        loop {
            let mut queue = self.queue.lock().unwrap();
            while queue.0.is_empty() && !queue.1 {
                queue = self.changed.wait(queue).unwrap();
            }
            let Some(Waiting { unit, load, notice }) = queue.0.pop_front() else { return };
            drop(queue);
            thread::yield_now();
            let end = match self.fates[unit] {
                Fate::IsGone if self.gone.lock().unwrap().insert(unit) => ToyEnd::Gone,
                Fate::IsLate if self.gone.lock().unwrap().insert(unit) => ToyEnd::Cancelled,
                Fate::Delivers | Fate::IsGone | Fate::IsLate => {
                    let mut rooms = self.rooms.lock().unwrap();
                    assert!(rooms.reserved.contains(&unit), "{unit} is read into memory that was given back");
                    rooms.filled.insert(unit);
                    ToyEnd::Delivered
                }
                Fate::Fails => ToyEnd::Failed,
            };
            *load.0.lock().unwrap() = Some(end);
            match end {
                ToyEnd::Gone => notice.tell_gone(),
                _ => notice.tell(),
            }
            *self.told.lock().unwrap() += 1;
        }
    }

    fn close(&self) {
        self.queue.lock().unwrap().1 = true;
        self.changed.notify_all();
    }
}

struct ToyIo(Arc<Disk>);

impl Io for ToyIo {
    type Failure = &'static str;
    type Load = Arc<ToyLoad>;
    type Room = ();

    /// Every other unit has to be prepared first.
    fn reserve(&self, unit: usize, _: u64) -> Result<Option<()>, &'static str> {
        let mut rooms = self.0.rooms.lock().unwrap();
        if unit % 2 == 1 && !rooms.prepared.remove(&unit) {
            return Ok(None);
        }
        assert!(rooms.reserved.insert(unit), "{unit} has room already");
        rooms.most = rooms.most.max(rooms.reserved.len());
        Ok(Some(()))
    }

    fn prepare(
        &self,
        unit: usize,
        _: bool,
        then: impl FnOnce() + Send + 'static,
    ) -> Result<(), &'static str> {
        let disk = self.0.clone();
        let prepare = move || {
            assert!(disk.rooms.lock().unwrap().prepared.insert(unit), "{unit} is prepared already");
            then();
        };
        drop(thread::spawn(prepare));
        Ok(())
    }

    fn elsewhere(&self) -> Elsewhere {
        Box::new(|job| drop(thread::spawn(job)))
    }

    fn end_preparing(&self) {}

    fn start(
        &self,
        unit: usize,
        (): &(),
        _: bool,
        _: Option<Instant>,
        notice: Notice,
    ) -> Result<Arc<ToyLoad>, &'static str> {
        let load = Arc::new(ToyLoad::default());
        // Another thread may have the store's lock.
        thread::yield_now();
        self.0.queue.lock().unwrap().0.push_back(Waiting { unit, load: load.clone(), notice });
        self.0.changed.notify_all();
        Ok(load)
    }

    fn outcome(&self, load: Arc<ToyLoad>) -> Ended<&'static str> {
        let end = load.0.lock().unwrap().expect("a load is settled that has not ended");
        match end {
            ToyEnd::Delivered => Ended::Delivered,
            ToyEnd::Gone => Ended::Again,
            ToyEnd::Failed => Ended::Failed("failed"),
            ToyEnd::Cancelled => Ended::Cancelled("cancelled"),
        }
    }

    fn cancel(&self, load: &Arc<ToyLoad>) {
        let mut queue = self.0.queue.lock().unwrap();
        let position = queue.0.iter().position(|waiting| Arc::ptr_eq(&waiting.load, load));
        let cancelled = position.and_then(|position| queue.0.remove(position));
        drop(queue);
        if let Some(Waiting { load, notice, .. }) = cancelled {
            *load.0.lock().unwrap() = Some(ToyEnd::Cancelled);
            notice.tell();
        }
    }

    fn promote(&self, _: &Arc<ToyLoad>) {}

    fn release(&self, unit: usize, (): &(), _: u64) -> bool {
        let mut rooms = self.0.rooms.lock().unwrap();
        assert!(rooms.reserved.remove(&unit), "{unit} has no room");
        rooms.filled.remove(&unit);
        true
    }
}

type Model = Arc<Monitor<ToyIo>>;

fn model(disk: &Arc<Disk>, budget: u64) -> Model {
    let entry = |unit| Entry { expert: Some(ExpertId { layer: 0, expert: unit }), cost: COST, bytes: COST };
    let entries = (0..UNITS as u32).map(entry).collect();
    let limits = Limits { budget, max_experts: usize::MAX, max_dense_bytes: u64::MAX };
    let ledger = Ledger::new(entries, Box::new(First::default()), limits, Events::new(0));
    Arc::new(Monitor::new(ledger, ToyIo(disk.clone())))
}

/// Requests units, checks that their bytes are there as long as they are leased, and releases them.
fn lease(model: &Model, units: &[usize]) -> Result<(), usize> {
    let (id, rooms) =
        model.request(units, |ledger, commands| ledger.request(units.to_vec(), commands)).unwrap();
    let answer = match rooms {
        Some(_) => Ok(()),
        None => model.wait(id, units, None).map(|rooms| assert!(rooms.is_some(), "{units:?} have no room")),
    };
    if answer.is_ok() {
        for _ in 0..2 {
            let rooms = model.io().0.rooms.lock().unwrap();
            assert!(units.iter().all(|unit| rooms.filled.contains(unit)), "a lease of {units:?} lacks bytes");
            drop(rooms);
            thread::yield_now();
        }
    }
    model.change(|ledger, commands| ledger.release(id, commands));
    match answer {
        Ok(()) => Ok(()),
        Err(NotReady::Failed(unit, _)) => Err(unit),
        Err(other) => panic!("{other:?} without a deadline"),
    }
}

/// Runs threads on a model and its disk, in as many orders as are asked for.
fn check(fates: &'static [Fate], budget: u64, threads: Vec<fn(&Model)>) {
    let iterations = env::var("HOISTWAY_MODEL_ITERATIONS").ok().and_then(|number| number.parse().ok());
    shuttle::check_random(
        move || {
            let disk = Disk::new(fates);
            let serving = disk.clone();
            let server = thread::spawn(move || serving.serve());
            let model = model(&disk, budget);
            let running = threads.iter().copied().map(|run| {
                let model = model.clone();
                thread::spawn(move || run(&model))
            });
            let running: Vec<_> = running.collect();
            running.into_iter().for_each(|thread| thread.join().unwrap());
            // A thread that looks for others may have begun a read that nothing wants by now.
            while model.look(|ledger| ledger.is_reading_unpinned()) {
                thread::yield_now();
            }
            disk.close();
            server.join().unwrap();
            let (used, pinned) = model.look(|ledger| (ledger.used(), ledger.pinned()));
            assert!(used <= budget && pinned == 0, "{used} bytes are used, {pinned} pinned");
            let rooms = disk.rooms.lock().unwrap();
            assert_eq!(rooms.reserved, rooms.filled, "what is resident at the end is whole");
        },
        iterations.unwrap_or(1000),
    );
}

const ALL_WELL: &[Fate] = &[Fate::Delivers; UNITS];

#[test]
fn threads_that_want_the_same_expert_get_it() {
    check(
        ALL_WELL,
        2 * COST,
        vec![|model| lease(model, &[0, 1]).unwrap(), |model| lease(model, &[1, 2]).unwrap()],
    );
}

#[test]
fn requests_that_exceed_the_budget_together_take_turns() {
    let three: fn(&Model) = |model| {
        lease(model, &[0, 1, 2]).unwrap();
        lease(model, &[3]).unwrap();
    };
    check(
        ALL_WELL,
        COST,
        vec![three, |model| lease(model, &[1, 3]).unwrap(), |model| lease(model, &[2]).unwrap()],
    );
}

#[test]
fn a_request_that_is_given_up_blocks_no_other() {
    let gives_up: fn(&Model) = |model| {
        let id = model.change(|ledger, commands| ledger.request(vec![0, 1], commands)).unwrap();
        thread::yield_now();
        model.change(|ledger, commands| ledger.release(id, commands));
    };
    check(ALL_WELL, COST, vec![gives_up, |model| lease(model, &[0, 2]).unwrap()]);
}

#[test]
fn prefetches_come_to_demand_or_go() {
    let prefetches: fn(&Model) = |model| {
        model.change(|ledger, commands| ledger.prefetch(&[0, 1], None, commands));
        thread::yield_now();
        model.change(|ledger, commands| ledger.cancel_prefetches(|_| true, commands));
    };
    check(ALL_WELL, 8 * COST, vec![prefetches, |model| lease(model, &[0, 2]).unwrap()]);
}

#[test]
fn a_store_that_is_drained_serves_what_was_requested_and_keeps_nothing() {
    let drains: fn(&Model) = |model| {
        model.change(|ledger, commands| ledger.prefetch(&[0, 3], None, commands));
        model.drain();
        assert!(model.look(|ledger| !ledger.is_resident(3)));
    };
    check(ALL_WELL, 8 * COST, vec![drains, |model| lease(model, &[0, 2]).unwrap()]);
}

#[test]
fn a_failure_reaches_all_who_wait_and_no_other() {
    const ONE_FAILS: &[Fate] = &[Fate::Delivers, Fate::Fails, Fate::Delivers, Fate::Delivers];
    let fails: fn(&Model) = |model| assert_eq!(lease(model, &[0, 1]), Err(1));
    check(ONE_FAILS, 2 * COST, vec![fails, fails, |model| lease(model, &[0, 2]).unwrap()]);
}

#[test]
fn what_a_second_level_has_lost_is_read_or_given_up() {
    const SOME_GONE: &[Fate] = &[Fate::IsGone, Fate::Delivers, Fate::IsGone, Fate::Delivers];
    let prefetches: fn(&Model) = |model| {
        model.change(|ledger, commands| ledger.prefetch(&[0, 2], None, commands));
        thread::yield_now();
        model.change(|ledger, commands| ledger.cancel_prefetches(|_| true, commands));
    };
    let gives_up: fn(&Model) = |model| {
        let id = model.change(|ledger, commands| ledger.request(vec![2], commands)).unwrap();
        thread::yield_now();
        model.change(|ledger, commands| ledger.release(id, commands));
    };
    check(SOME_GONE, 8 * COST, vec![prefetches, gives_up, |model| lease(model, &[0, 1]).unwrap()]);
}

#[test]
fn what_a_deadline_has_dropped_can_be_prefetched_at_once() {
    const ONE_LATE: &[Fate] = &[Fate::IsLate, Fate::Delivers, Fate::Delivers, Fate::Delivers];
    let prefetches: fn(&Model) = |model| {
        let prefetch = || model.change(|ledger, commands| ledger.prefetch(&[0], None, commands));
        prefetch();
        while *model.io().0.told.lock().unwrap() == 0 {
            thread::yield_now();
        }
        prefetch();
        let counts =
            |ledger: &mut Ledger<_>| (ledger.counts().prefetches, ledger.counts().dropped_prefetches);
        assert_eq!(model.look(counts), (2, 1));
    };
    check(ONE_LATE, 8 * COST, vec![prefetches]);
}

#[test]
fn a_request_that_waits_for_room_is_read_without_another_call() {
    let requests: fn(&Model) = |model| {
        let request = |unit| model.change(|ledger, commands| ledger.request(vec![unit], commands)).unwrap();
        let first = request(0);
        thread::yield_now();
        let second = request(2);
        model.change(|ledger, commands| ledger.release(first, commands));
        while !model.io().0.rooms.lock().unwrap().filled.contains(&2) {
            thread::yield_now();
        }
        model.change(|ledger, commands| ledger.release(second, commands));
    };
    check(ALL_WELL, COST - 1, vec![requests]);
}
