//! How many threads a submission wakes.
#![forbid(unsafe_code)]

use super::{
    Customer, Limits, Operation, Priority, QueueId, QueueOptions, Reason, Submission,
    operation::Charge,
    queues::QueueSet,
    state::{Parked, State, Wakes},
};

struct Nothing;

impl Customer for Nothing {
    type Operation = ();
    type Group = ();
    type Event = u8;
    type Error = Reason;

    fn ended(&self, (): (), _: Result<(), Reason>) {}
}

const QUEUE: QueueId = QueueId(0);

/// How many of eight threads groups of so many operations wake as they are submitted together.
fn woken(priority: Priority, operations: &[usize], most_wakes: usize) -> usize {
    let mut state = State::<Nothing>::new(Limits::NONE, &[QueueOptions::default()], most_wakes);
    for _ in 0..8 {
        let worker = state.enlist(QueueSet::of(&[QUEUE]));
        let condvar = state.worker(worker).unwrap().condvar.clone();
        state.park(worker, Parked::Idle(condvar));
    }
    let mut wakes = Wakes::default();
    for count in operations {
        let operation = Operation { queue: QUEUE, charge: Charge::default(), order: 0, content: () };
        let submission =
            Submission { priority, ..Submission::new((), std::iter::repeat_n(operation, *count).collect()) };
        wakes = wakes.and(state.accept(submission).1);
    }
    state.wake_for(wakes);
    state.woken.len()
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
