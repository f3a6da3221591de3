//! How many threads a submission wakes.
#![forbid(unsafe_code)]

use super::{
    Customer, Limits, Operation, Priority, QueueId, QueueOptions, Reason, Submission,
    operation::{Charge, Whose},
    queues::QueueSet,
    scheduler::Scheduler,
    state::{Parked, State, Wakes},
};
use std::sync::{Arc, Mutex, OnceLock, Weak};

struct Nothing;

impl Customer for Nothing {
    type Operation = ();
    type Group = ();
    type Event = u8;
    type Error = Reason;

    fn ended(&self, (): (), _: Result<(), Reason>) {}
}

const QUEUE: QueueId = QueueId(0);

/// The state of a scheduler whose eight threads wait.
fn idle(most_wakes: usize) -> State<Nothing> {
    let mut state = State::new(Limits::NONE, &[QueueOptions::default()], most_wakes);
    for _ in 0..8 {
        let worker = state.enlist(QueueSet::of(&[QUEUE]));
        let condvar = state.worker(worker).unwrap().condvar.clone();
        state.park(worker, Parked::Idle(condvar));
    }
    state
}

fn submission<C>(priority: Priority, operations: usize) -> Submission<C>
where
    C: Customer<Operation = (), Group = ()>,
{
    let operation = || Operation { queue: QUEUE, charge: Charge::default(), order: 0, content: () };
    let operations = std::iter::repeat_with(operation).take(operations).collect();
    Submission { priority, ..Submission::new((), operations) }
}

/// How many of eight threads groups of so many operations wake as they are submitted together.
fn woken(priority: Priority, operations: &[usize], most_wakes: usize) -> usize {
    let mut state = idle(most_wakes);
    let mut wakes = Wakes::default();
    for count in operations {
        wakes = wakes.and(state.accept(submission(priority, *count)).1);
    }
    state.wake_for(wakes);
    state.woken.len()
}

#[test]
fn groups_that_become_demand_wake_as_many_threads_as_a_submission() {
    for (groups, most_wakes, expected) in [(6, 2, 2), (6, 63, 6), (1, 0, 1), (0, 2, 0)] {
        let mut state = idle(most_wakes);
        for _ in 0..groups {
            state.accept(submission(Priority::Prefetch, 1));
        }
        state.promote(Whose::Tag(0));
        assert_eq!(state.woken.len(), expected, "{groups} groups, {most_wakes} wakes");
    }
}

/// Notes how many groups there are as one ends.
#[derive(Default)]
struct Counts {
    scheduler: OnceLock<Weak<Scheduler<Counts>>>,
    groups: Mutex<Vec<usize>>,
}

impl Customer for Counts {
    type Operation = ();
    type Group = ();
    type Event = u8;
    type Error = Reason;

    fn ended(&self, (): (), _: Result<(), Reason>) {
        let scheduler = self.scheduler.get().and_then(Weak::upgrade);
        self.groups.lock().unwrap().extend(scheduler.map(|scheduler| scheduler.figures().groups));
    }
}

#[test]
fn a_long_submission_is_accepted_in_parts() {
    let scheduler = Scheduler::new(Counts::default(), Limits::NONE, &[QueueOptions::default()]);
    scheduler.customer().scheduler.set(Arc::downgrade(&scheduler)).unwrap();
    // A group without operations ends as its part is accepted.
    let operations = |number: usize| usize::from(!number.is_multiple_of(64));
    let all = (0..130).map(|number| submission(Priority::Demand, operations(number))).collect();
    assert!(scheduler.submit_all(all).iter().all(Result::is_ok));
    assert_eq!(*scheduler.customer().groups.lock().unwrap(), [63, 126, 127]);
}

#[test]
fn a_submission_that_no_caller_waits_for_wakes_one_thread() {
    for most_wakes in [0, 1, 63] {
        assert_eq!(woken(Priority::Prefetch, &[16], most_wakes), 1);
        assert_eq!(woken(Priority::Prefetch, &[4, 4, 4], most_wakes), 1);
        assert_eq!(woken(Priority::Background, &[2, 9], most_wakes), 1);
        assert_eq!(woken(Priority::Prefetch, &[0], most_wakes), 0);
    }
}

#[test]
fn a_submission_in_demand_wakes_a_thread_for_each_operation_and_other_processor() {
    assert_eq!(woken(Priority::Demand, &[3], 63), 3);
    assert_eq!(woken(Priority::Demand, &[3, 3], 63), 6);
    assert_eq!(woken(Priority::Demand, &[16], 63), 8);
    assert_eq!(woken(Priority::Demand, &[3, 3], 1), 1);
    assert_eq!(woken(Priority::Demand, &[3, 3], 3), 3);
    assert_eq!(woken(Priority::Demand, &[16], 0), 1);
    assert_eq!(woken(Priority::Demand, &[], 1), 0);
}
