//! The scheduler under shuttle: the same files, with locks that try every order of threads, or many.
//!
//! `HOISTWAY_MODEL_ITERATIONS` says how many orders each test tries.
#![allow(dead_code, unreachable_pub, clippy::duplicate_mod)]

#[path = "admission.rs"]
mod admission;
#[path = "customer.rs"]
mod customer;
#[path = "flight.rs"]
mod flight;
#[path = "operation.rs"]
mod operation;
#[path = "queues.rs"]
mod queues;
#[path = "scheduler.rs"]
mod scheduler;
#[path = "state.rs"]
mod state;
#[path = "worker.rs"]
mod worker;

/// The locks of the model.
mod sync {
    pub(super) use shuttle::sync::{Condvar, Mutex, MutexGuard};
}

use super::limit;
use crate::lane::{Done, Lane};
use admission::{Bound, Limits};
use customer::{Customer, Handler, Next, Reason};
use flight::{Flight, Ticket};
use limit::InFlightLimit;
use operation::{Charge, Gate, Operation, Priority, QueueId, Submission, Whose};
use queues::QueueOptions;
use scheduler::Scheduler;
use shuttle::{
    sync::{Condvar, Mutex},
    thread,
};
use std::{
    env, io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};
use worker::{Carried, Patience, Served, Service};

const FIRST: QueueId = QueueId(0);
const SECOND: QueueId = QueueId(1);
const THIRD: QueueId = QueueId(2);

/// What happens to an operation, step by step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Carry,
    HandOver(QueueId),
    PutBack,
    GiveUp,
    Fail,
    /// A device keeps the ticket.
    Keep,
}

struct Content {
    group: usize,
    steps: Vec<Step>,
    live: Arc<Vec<AtomicUsize>>,
}

impl Drop for Content {
    fn drop(&mut self) {
        self.live[self.group].fetch_sub(1, Ordering::SeqCst);
    }
}

#[derive(Default)]
struct Told {
    /// How often each group has ended, and how it ended last.
    ends: Vec<(usize, Option<Reason>)>,
}

struct Model {
    live: Arc<Vec<AtomicUsize>>,
    told: Mutex<Told>,
    changed: Condvar,
    kept: Mutex<Vec<Ticket<Model>>>,
    in_flight: AtomicUsize,
    most: usize,
}

impl Customer for Model {
    type Operation = Content;
    type Group = usize;
    type Event = u8;
    type Error = Reason;

    fn ended(&self, group: usize, result: Result<(), Reason>) {
        assert_eq!(self.live[group].load(Ordering::SeqCst), 0, "operations of {group} outlive it");
        let mut told = self.told.lock().unwrap();
        told.ends[group].0 += 1;
        told.ends[group].1 = result.err();
        drop(told);
        self.changed.notify_all();
    }
}

/// Takes the next step of operations.
struct Stepper(Arc<Scheduler<Model>>);

impl Stepper {
    fn next(&self, mut flight: Flight<Model>) -> Next<Model> {
        let model = self.0.customer();
        let charge = flight.ticket().charge();
        let next = if flight.content.steps.is_empty() { None } else { Some(flight.content.steps.remove(0)) };
        if next != Some(Step::Carry) {
            model.in_flight.fetch_sub(1, Ordering::SeqCst);
        }
        match next {
            None => flight.end(Ok(())),
            Some(Step::Carry) => return Next::Carry(flight),
            Some(Step::HandOver(to)) => return Next::HandOver(flight, to, charge),
            Some(Step::PutBack) => return Next::PutBack(flight),
            Some(Step::GiveUp) => return Next::GiveUp(flight),
            Some(Step::Fail) => flight.end(Err(Reason::NoMemory)),
            Some(Step::Keep) => {
                let (content, ticket) = flight.into_parts();
                drop(content);
                model.kept.lock().unwrap().push(ticket);
                model.changed.notify_all();
            }
        }
        Next::Ended
    }
}

impl Handler<Model> for Stepper {
    fn begin(&mut self, flight: Flight<Model>) -> Next<Model> {
        let model = self.0.customer();
        let before = model.in_flight.fetch_add(1, Ordering::SeqCst);
        assert!(before < model.most, "{} in flight, {} at most", before + 1, model.most);
        self.next(flight)
    }

    fn settle(&mut self, flight: Flight<Model>, result: io::Result<usize>) -> Next<Model> {
        assert!(result.is_ok());
        self.next(flight)
    }
}

/// Gives operations back, the last first.
struct Stack(Vec<Carried<Content>>, usize);

impl Lane<Carried<Content>> for Stack {
    fn capacity(&self) -> usize {
        self.1
    }

    fn in_flight(&self) -> usize {
        self.0.len()
    }

    fn push(&mut self, op: Carried<Content>) {
        assert!(self.0.len() < self.1);
        self.0.push(op);
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done<Carried<Content>>>) -> io::Result<()> {
        thread::yield_now();
        done.extend(self.0.pop().map(|op| Done { op, result: Ok(1) }));
        Ok(())
    }
}

/// Gives its operation back once two lanes have one.
struct Meeting(Option<Carried<Content>>, Arc<(Mutex<usize>, Condvar)>);

impl Lane<Carried<Content>> for Meeting {
    fn capacity(&self) -> usize {
        1
    }

    fn in_flight(&self) -> usize {
        self.0.iter().len()
    }

    fn push(&mut self, op: Carried<Content>) {
        self.0 = Some(op);
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done<Carried<Content>>>) -> io::Result<()> {
        let (count, changed) = &*self.1;
        let mut met = count.lock().unwrap();
        *met += 1;
        changed.notify_all();
        while *met < 2 {
            met = changed.wait(met).unwrap();
        }
        done.extend(self.0.take().map(|op| Done { op, result: Ok(1) }));
        Ok(())
    }
}

fn scheduler(groups: usize, most: usize, queues: &[QueueOptions]) -> Arc<Scheduler<Model>> {
    let model = Model {
        live: Arc::new((0..groups).map(|_| AtomicUsize::new(0)).collect()),
        told: Mutex::new(Told { ends: vec![(0, None); groups] }),
        changed: Condvar::new(),
        kept: Mutex::default(),
        in_flight: AtomicUsize::new(0),
        most,
    };
    let in_flight = Bound::new(most as u64, most);
    // Fewer than threads wait, so that they wake each other.
    Scheduler::waking(model, Limits { accepted: Bound::NONE, in_flight }, queues, 1)
}

fn submission(model: &Model, group: usize, operations: &[(QueueId, &[Step])]) -> Submission<Model> {
    let operations = operations.iter().enumerate().map(|(order, (queue, steps))| {
        model.live[group].fetch_add(1, Ordering::SeqCst);
        let content = Content { group, steps: steps.to_vec(), live: model.live.clone() };
        Operation { queue: *queue, charge: Charge { bytes: 1, slots: 1 }, order: order as u64, content }
    });
    Submission::new(group, operations.collect())
}

fn serve(
    scheduler: &Arc<Scheduler<Model>>,
    queues: &'static [QueueId],
    capacity: usize,
) -> thread::JoinHandle<Served> {
    let scheduler = scheduler.clone();
    thread::spawn(move || {
        let service =
            Service { queues, limit: InFlightLimit::fixed(capacity), patience: Patience::UntilOver };
        let mut stepper = Stepper(scheduler.clone());
        scheduler.serve(Stack(Vec::new(), capacity), &mut stepper, service)
    })
}

/// Every group has ended once. Returns how.
fn ends(scheduler: &Scheduler<Model>) -> Vec<Option<Reason>> {
    let told = scheduler.customer().told.lock().unwrap();
    let figures = scheduler.figures();
    assert_eq!((figures.groups, figures.waiting, figures.in_flight), (0, 0, 0));
    told.ends
        .iter()
        .enumerate()
        .map(|(group, (count, reason))| {
            assert_eq!(*count, 1, "ends of group {group}");
            reason.clone()
        })
        .collect()
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let iterations = env::var("HOISTWAY_MODEL_ITERATIONS").ok().and_then(|count| count.parse().ok());
    let iterations = iterations.unwrap_or(300);
    let model = Arc::new(model);
    let random = model.clone();
    shuttle::check_random(move || random(), iterations);
    shuttle::check_pct(move || model(), iterations, 3);
}

#[test]
fn groups_end_once_while_they_are_cancelled_and_promoted() {
    check(|| {
        let queues = [QueueOptions { slots: Some(2), ..QueueOptions::default() }];
        let scheduler = scheduler(3, 2, &queues);
        let workers = [serve(&scheduler, &[FIRST], 1), serve(&scheduler, &[FIRST], 2)];
        let model = scheduler.customer();
        let carry: &[Step] = &[Step::Carry];
        for (group, priority) in [(0, Priority::Prefetch), (1, Priority::Demand), (2, Priority::Background)] {
            let mut submission =
                submission(model, group, &[(FIRST, carry), (FIRST, &[Step::Carry, Step::Carry])]);
            (submission.priority, submission.tag) = (priority, group as u64);
            scheduler.submit(submission).unwrap();
        }
        let other = scheduler.clone();
        let canceller = thread::spawn(move || other.cancel(Whose::Tag(2)));
        scheduler.promote(Whose::Tag(0));
        scheduler.seal();
        let cancelled = canceller.join().unwrap();
        for worker in workers {
            assert!(matches!(worker.join().unwrap(), Served::Over));
        }
        let ends = ends(&scheduler);
        assert_eq!(ends[..2], [None, None]);
        assert_eq!(ends[2], (cancelled.not_begun > 0).then_some(Reason::Cancelled));
    });
}

#[test]
fn operations_find_another_queue_when_lanes_are_given_up() {
    check(|| {
        let queues = [
            QueueOptions { hands_over_to: vec![SECOND], ..QueueOptions::default() },
            QueueOptions::default(),
            QueueOptions::default(),
        ];
        let scheduler = scheduler(2, 4, &queues);
        let workers = [serve(&scheduler, &[FIRST], 1), serve(&scheduler, &[FIRST], 1)];
        let rings: Vec<_> = (0..2)
            .map(|_| {
                let ring = serve(&scheduler, &[SECOND], 2);
                let scheduler = scheduler.clone();
                thread::spawn(move || {
                    let served = ring.join().unwrap();
                    let is_first = scheduler.redirect(SECOND, THIRD);
                    if matches!(served, Served::GaveUp) && is_first {
                        serve(&scheduler, &[THIRD], 1).join().unwrap();
                        true
                    } else {
                        is_first
                    }
                })
            })
            .collect();
        let model = scheduler.customer();
        let hands_over: &[Step] = &[Step::Carry, Step::HandOver(SECOND), Step::Carry];
        let gives_up: &[Step] = &[Step::HandOver(SECOND), Step::Carry, Step::GiveUp, Step::Carry];
        scheduler.submit(submission(model, 0, &[(FIRST, hands_over), (FIRST, gives_up)])).unwrap();
        scheduler.submit(submission(model, 1, &[(FIRST, &[Step::Carry]), (FIRST, hands_over)])).unwrap();
        scheduler.seal();
        for worker in workers {
            assert!(matches!(worker.join().unwrap(), Served::Over));
        }
        let firsts = rings.into_iter().filter(|_| true).map(|ring| ring.join().unwrap());
        let firsts: Vec<bool> = firsts.collect();
        // The ring that was the first to end without giving up leaves its queue to a pool that does not exist.
        let leftover = scheduler.figures().waiting;
        if leftover > 0 {
            serve(&scheduler, &[THIRD], 1).join().unwrap();
        }
        assert_eq!(firsts.iter().filter(|is_first| **is_first).count(), 1);
        assert_eq!(ends(&scheduler), [None, None]);
    });
}

#[test]
fn stages_wait_for_each_other_and_gates_for_their_consumer() {
    check(|| {
        let scheduler = scheduler(2, 2, &[QueueOptions::default()]);
        let workers = [serve(&scheduler, &[FIRST], 2), serve(&scheduler, &[FIRST], 1)];
        let model = scheduler.customer();
        let carry: &[Step] = &[Step::Carry];
        let mut staged = submission(model, 0, &[(FIRST, carry), (FIRST, carry), (FIRST, carry)]);
        staged.gate = Gate::Stages;
        staged.operations[1].order = 0;
        scheduler.submit(staged).unwrap();
        let mut stream = submission(model, 1, &[(FIRST, carry), (FIRST, carry), (FIRST, carry)]);
        stream.gate = Gate::Below(1);
        let stream = scheduler.submit(stream).unwrap();
        scheduler.seal();
        for end in 2..=3 {
            thread::yield_now();
            scheduler.admit(stream, end);
        }
        for worker in workers {
            worker.join().unwrap();
        }
        assert_eq!(ends(&scheduler), [None, None]);
    });
}

#[test]
fn what_cannot_begin_now_begins_later() {
    check(|| {
        let queues = [QueueOptions { slots: Some(1), ..QueueOptions::default() }];
        let scheduler = scheduler(2, 2, &queues);
        let workers = [serve(&scheduler, &[FIRST], 2), serve(&scheduler, &[FIRST], 1)];
        let model = scheduler.customer();
        let put_back: &[Step] = &[Step::PutBack, Step::Carry];
        scheduler.submit(submission(model, 0, &[(FIRST, put_back), (FIRST, &[Step::Keep])])).unwrap();
        scheduler.submit(submission(model, 1, &[(FIRST, put_back)])).unwrap();
        scheduler.seal();
        let mut kept = model.kept.lock().unwrap();
        while kept.is_empty() {
            kept = model.changed.wait(kept).unwrap();
        }
        let tickets = std::mem::take(&mut *kept);
        drop(kept);
        tickets.into_iter().for_each(|ticket| ticket.end(Ok(())));
        for worker in workers {
            worker.join().unwrap();
        }
        assert_eq!(ends(&scheduler), [None, None]);
    });
}

#[test]
fn room_for_two_wakes_two() {
    check(|| {
        let scheduler = scheduler(3, 2, &[QueueOptions::default()]);
        let model = scheduler.customer();
        // It takes all the room, and a device keeps it.
        let mut large = submission(model, 0, &[(FIRST, &[Step::Keep])]);
        large.operations[0].charge.bytes = 2;
        scheduler.submit(large).unwrap();
        let service = Service { queues: &[FIRST], limit: InFlightLimit::fixed(1), patience: Patience::None };
        scheduler.serve(Stack(Vec::new(), 1), &mut Stepper(scheduler.clone()), service);
        let kept = std::mem::take(&mut *model.kept.lock().unwrap());
        assert_eq!(kept.len(), 1);
        let met = Arc::new((Mutex::new(0), Condvar::new()));
        let lanes = [0, 1].map(|_| {
            let (scheduler, lane) = (scheduler.clone(), Meeting(None, met.clone()));
            thread::spawn(move || {
                let service = Service {
                    queues: &[FIRST],
                    limit: InFlightLimit::fixed(1),
                    patience: Patience::UntilOver,
                };
                scheduler.serve(lane, &mut Stepper(scheduler.clone()), service)
            })
        });
        let carry: &[Step] = &[Step::Carry];
        for group in 1..3 {
            scheduler.submit(submission(model, group, &[(FIRST, carry)])).unwrap();
        }
        scheduler.seal();
        kept.into_iter().for_each(|ticket| ticket.end(Ok(())));
        for lane in lanes {
            lane.join().unwrap();
        }
        assert_eq!(ends(&scheduler), [None, None, None]);
    });
}

#[test]
fn threads_that_wake_each_other_serve_all_that_was_submitted_at_once() {
    check(|| {
        let scheduler = scheduler(2, 2, &[QueueOptions::default()]);
        let model = scheduler.customer();
        let met = Arc::new((Mutex::new(0), Condvar::new()));
        let lanes = [0, 1].map(|_| {
            let (scheduler, lane) = (scheduler.clone(), Meeting(None, met.clone()));
            thread::spawn(move || {
                let service = Service {
                    queues: &[FIRST],
                    limit: InFlightLimit::fixed(1),
                    patience: Patience::UntilOver,
                };
                scheduler.serve(lane, &mut Stepper(scheduler.clone()), service)
            })
        });
        // Neither ends before both are in a lane, and the submission wakes one thread.
        let carry: &[Step] = &[Step::Carry];
        let prefetch = |group| Submission {
            priority: Priority::Prefetch,
            ..submission(model, group, &[(FIRST, carry)])
        };
        let answers = scheduler.submit_all(vec![prefetch(0), prefetch(1)]);
        assert!(answers.iter().all(Result::is_ok));
        scheduler.seal();
        for lane in lanes {
            lane.join().unwrap();
        }
        assert_eq!(ends(&scheduler), [None, None]);
    });
}

#[test]
fn a_scheduler_that_is_closed_at_any_time_ends_every_group() {
    check(|| {
        let queues = [
            QueueOptions { hands_over_to: vec![SECOND], ..QueueOptions::default() },
            QueueOptions::default(),
        ];
        let scheduler = scheduler(3, 2, &queues);
        let workers = [serve(&scheduler, &[FIRST], 1), serve(&scheduler, &[SECOND, FIRST], 2)];
        let closing = scheduler.clone();
        let closer = thread::spawn(move || closing.close(Reason::Closed));
        let model = scheduler.customer();
        let steps: [&[Step]; 3] =
            [&[Step::Carry, Step::HandOver(SECOND), Step::Carry], &[Step::Fail], &[Step::PutBack]];
        for (group, steps) in steps.into_iter().enumerate() {
            let submission = submission(model, group, &[(FIRST, steps), (SECOND, &[Step::Carry])]);
            if let Err(refused) = scheduler.submit(submission) {
                assert_eq!(refused.reason, Reason::Closed);
                drop(refused);
                model.ended(group, Err(Reason::Cancelled));
            }
        }
        closer.join().unwrap();
        for worker in workers {
            worker.join().unwrap();
        }
        for (group, reason) in ends(&scheduler).into_iter().enumerate() {
            match (group, reason) {
                (_, None | Some(Reason::Closed | Reason::Cancelled)) | (1, Some(Reason::NoMemory)) => {}
                (group, reason) => panic!("group {group} ended with {reason:?}"),
            }
        }
    });
}
