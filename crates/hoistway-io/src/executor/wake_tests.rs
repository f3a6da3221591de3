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

/// The threads of eight that groups of `operations` each wake as they are submitted together.
fn woken(priority: Priority, operations: &[usize]) -> usize {
    let mut state = State::<Nothing>::new(Limits::NONE, &[QueueOptions::default()]);
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
    assert_eq!(woken(Priority::Prefetch, &[16]), 1);
    assert_eq!(woken(Priority::Prefetch, &[4, 4, 4]), 1);
    assert_eq!(woken(Priority::Background, &[2, 9]), 1);
    assert_eq!(woken(Priority::Prefetch, &[0]), 0);
}

#[test]
fn a_submission_in_demand_wakes_a_thread_for_each_operation() {
    assert_eq!(woken(Priority::Demand, &[3]), 3);
    assert_eq!(woken(Priority::Demand, &[3, 3]), 6);
    assert_eq!(woken(Priority::Demand, &[16]), 8);
}
