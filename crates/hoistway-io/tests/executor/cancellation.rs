//! Cancellation, deadlines and the end of a scheduler, at every step of an operation.

use crate::kit::{
    Act, FIRST, Failure, Kit, Memory, Pace, SECOND, eventually, lock, serve_inline, spawn, submit,
};
use hoistway_io::executor::{
    Cancelled, Charge, Executor, Gate, Limits, QueueOptions, Reason, Scheduler, Whose,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

fn scheduler() -> Arc<Scheduler<Kit>> {
    let queues =
        [QueueOptions { hands_over_to: vec![SECOND], ..QueueOptions::default() }, QueueOptions::default()];
    Kit::scheduler(Limits::NONE, &queues)
}

const NOT_BEGUN: Cancelled = Cancelled { not_begun: 2, in_flight: 0 };
const IN_FLIGHT: Cancelled = Cancelled { not_begun: 0, in_flight: 2 };
const CANCELLED: Result<(), Failure> = Err(Failure::Reason(Reason::Cancelled));

#[test]
fn what_waits_in_a_queue_does_not_begin() {
    let scheduler = scheduler();
    let kit = scheduler.customer();
    let group = submit(&scheduler, kit.group(0, FIRST, &[&[], &[]]));
    assert_eq!(scheduler.cancel(Whose::Group(group)), NOT_BEGUN);
    assert_eq!(kit.end_of(0), CANCELLED);
    assert_eq!(scheduler.cancel(Whose::Group(group)), Cancelled::default(), "it has ended");
    serve_inline(&scheduler, &[FIRST], 1);
    assert!(lock(&kit.begun).is_empty());
}

#[test]
fn what_a_gate_or_an_event_holds_back_does_not_begin() {
    let scheduler = scheduler();
    let kit = scheduler.customer();
    scheduler.expect_watcher();
    for (number, gate, event) in [
        (0, Gate::Below(0), None),
        (1, Gate::Open, Some(7)),
        (2, Gate::Stages, Some(7)),
        (3, Gate::Open, Some(7)),
    ] {
        let mut held = kit.group(number, FIRST, &[&[], &[]]);
        (held.gate, held.event, held.tag) = (gate, event, 5);
        if number == 3 {
            held.tag = 6;
        }
        submit(&scheduler, held);
    }
    assert_eq!(scheduler.cancel(Whose::Tag(5)), Cancelled { not_begun: 6, in_flight: 0 });
    assert!((0..3).all(|group| kit.end_of(group) == CANCELLED));
    lock(&kit.reached).insert(7);
    assert!(scheduler.look(Instant::now()));
    assert!(!scheduler.look(Instant::now()), "nothing waits for the event any more");
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!(kit.end_of(3), Ok(()));
}

#[test]
fn what_a_lane_has_ends_as_it_may() {
    for act in [Act::Move, Act::Refuse(std::io::ErrorKind::NotFound)] {
        let scheduler = scheduler();
        let (executor, pace) = (Executor::new(scheduler.clone()), Arc::new(Pace::default()));
        spawn(&executor, &[FIRST], Memory::paced(2, &pace));
        let kit = scheduler.customer();
        let group = submit(&scheduler, kit.group(0, FIRST, &[std::slice::from_ref(&act), &[Act::Move]]));
        pace.wait_for_waits(1);
        assert_eq!(scheduler.cancel(Whose::Group(group)), IN_FLIGHT);
        assert!(kit.ends().is_empty(), "its memory is in use");
        pace.permit(2);
        kit.wait(1);
        let end = if act == Act::Move { Ok(()) } else { Err(Failure::Io(std::io::ErrorKind::NotFound)) };
        assert_eq!(kit.end_of(0), end);
    }
}

#[test]
fn what_a_device_has_ends_as_it_may() {
    let scheduler = scheduler();
    let kit = scheduler.customer();
    let group = submit(&scheduler, kit.group(0, FIRST, &[&[Act::Move, Act::Keep], &[Act::Keep]]));
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!(scheduler.cancel(Whose::Group(group)), IN_FLIGHT);
    assert!(kit.ends().is_empty());
    kit.take_kept().into_iter().for_each(|(_, ticket)| ticket.end(Ok(())));
    assert_eq!(kit.end_of(0), Ok(()), "all of it had begun");
}

#[test]
fn what_has_begun_in_part_fails_once_the_rest_is_done() {
    let scheduler = scheduler();
    let kit = scheduler.customer();
    let mut stream = kit.group(0, FIRST, &[&[Act::Keep], &[]]);
    stream.gate = Gate::Below(1);
    let group = submit(&scheduler, stream);
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!(scheduler.cancel(Whose::Group(group)), Cancelled { not_begun: 1, in_flight: 1 });
    assert!(kit.ends().is_empty());
    kit.take_kept().into_iter().for_each(|(_, ticket)| ticket.end(Ok(())));
    assert_eq!(kit.end_of(0), CANCELLED);
}

#[test]
fn what_returns_to_a_queue_after_the_cancellation_does_not_begin_again() {
    let returns = [Act::HandOver(SECOND, Charge::default()), Act::PutBack, Act::GiveUp];
    for act in returns {
        let scheduler = scheduler();
        let (executor, pace) = (Executor::new(scheduler.clone()), Arc::new(Pace::default()));
        spawn(&executor, &[FIRST], Memory::paced(1, &pace));
        let kit = scheduler.customer();
        let group = submit(&scheduler, kit.group(0, FIRST, &[&[Act::Move, act.clone(), Act::Move]]));
        pace.wait_for_waits(1);
        assert_eq!(scheduler.cancel(Whose::Group(group)), Cancelled { not_begun: 0, in_flight: 1 });
        pace.permit(2);
        kit.wait(1);
        assert_eq!(kit.end_of(0), CANCELLED, "after {act:?}");
        assert_eq!(scheduler.figures().waiting, 0);
    }
}

#[test]
fn an_operation_that_fails_keeps_others_of_its_group_from_beginning() {
    let scheduler = scheduler();
    let kit = scheduler.customer();
    submit(&scheduler, kit.group(0, FIRST, &[&[Act::Fail("first")], &[Act::Fail("second")], &[]]));
    submit(&scheduler, kit.group(1, FIRST, &[&[]]));
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!(kit.end_of(0), Err(Failure::Said("first")));
    assert_eq!(kit.end_of(1), Ok(()));
    assert_eq!(*lock(&kit.begun), [(0, 0), (1, 0)]);
}

#[test]
fn a_group_can_be_failed_from_outside() {
    let scheduler = scheduler();
    let kit = scheduler.customer();
    let group = submit(&scheduler, kit.group(0, FIRST, &[&[Act::Keep], &[Act::Keep]]));
    serve_inline(&scheduler, &[FIRST], 1);
    scheduler.fail(group, Failure::Said("no longer wanted"));
    scheduler.fail(group, Failure::Said("twice"));
    kit.take_kept().into_iter().for_each(|(_, ticket)| ticket.end(Ok(())));
    assert_eq!(kit.end_of(0), Err(Failure::Said("no longer wanted")));
}

#[test]
fn what_has_not_begun_by_its_deadline_does_not_begin() {
    let scheduler = scheduler();
    let kit = scheduler.customer();
    let now = Instant::now();
    let timed_out = Err(Failure::Reason(Reason::TimedOut));
    for (group, deadline) in [(0, now), (1, now + Duration::from_secs(3600)), (2, now)] {
        let mut submission = kit.group(group, FIRST, &[&[Act::Keep], &[]]);
        submission.deadline = Some(deadline);
        if group == 2 {
            submission.gate = Gate::Below(0);
        }
        submit(&scheduler, submission);
    }
    // Without a thread that watches, threads that take operations find out.
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!((kit.end_of(0), kit.end_of(2)), (timed_out.clone(), timed_out));
    assert_eq!(*lock(&kit.begun), [(1, 0), (1, 1)]);
    // One that has begun ends as it may.
    assert!(scheduler.look(now + Duration::from_secs(3601)));
    assert!(!scheduler.look(now + Duration::from_secs(3601)));
    kit.take_kept().into_iter().for_each(|(_, ticket)| ticket.end(Ok(())));
    assert_eq!(kit.end_of(1), Ok(()));
}

#[test]
fn a_watcher_ends_groups_at_their_deadlines_while_all_lanes_are_busy() {
    let scheduler = scheduler();
    let (executor, pace) = (Executor::new(scheduler.clone()), Arc::new(Pace::default()));
    executor.spawn_watcher("watcher").unwrap();
    spawn(&executor, &[FIRST], Memory::paced(1, &pace));
    let kit = scheduler.customer();
    submit(&scheduler, kit.group(0, FIRST, &[&[Act::Move]]));
    pace.wait_for_waits(1);
    let mut late = kit.group(1, FIRST, &[&[]]);
    late.deadline = Some(Instant::now() + Duration::from_millis(5));
    submit(&scheduler, late);
    kit.wait(1);
    assert_eq!(kit.end_of(1), Err(Failure::Reason(Reason::TimedOut)));
    pace.permit(1);
    kit.wait(2);
    assert_eq!(kit.end_of(0), Ok(()));
}

#[test]
fn a_scheduler_that_is_closed_ends_what_has_not_begun_and_waits_for_the_rest() {
    let scheduler = scheduler();
    let (executor, pace) = (Executor::new(scheduler.clone()), Arc::new(Pace::default()));
    spawn(&executor, &[FIRST], Memory::paced(1, &pace));
    let kit = scheduler.customer();
    submit(&scheduler, kit.group(0, FIRST, &[&[Act::Move], &[]]));
    submit(&scheduler, kit.group(1, FIRST, &[&[Act::Move]]));
    let mut stream = kit.group(2, FIRST, &[&[]]);
    stream.gate = Gate::Below(0);
    submit(&scheduler, stream);
    pace.wait_for_waits(1);
    scheduler.close(Reason::Closed);
    scheduler.close(Reason::Cancelled);
    let closed = Err(Failure::Reason(Reason::Closed));
    assert_eq!((kit.end_of(1), kit.end_of(2)), (closed.clone(), closed.clone()));
    assert!(!kit.ends().iter().any(|(group, _)| *group == 0), "the lane has an operation of it");
    let refused = scheduler.submit(kit.group(3, FIRST, &[&[]])).unwrap_err();
    assert_eq!(refused.reason, Reason::Closed);
    assert_eq!(refused.submission.operations.len(), 1, "it comes back");
    drop(refused);
    pace.permit(1);
    executor.join();
    assert_eq!(kit.end_of(0), closed);
    assert_eq!(kit.live(), 0);
}

#[test]
fn a_lane_that_is_woken_by_the_close_keeps_what_it_has() {
    let scheduler = scheduler();
    let (executor, pace) = (Executor::new(scheduler.clone()), Arc::new(Pace::default()));
    spawn(&executor, &[FIRST], Memory::paced(2, &pace).with_waker());
    let kit = scheduler.customer();
    submit(&scheduler, kit.group(0, FIRST, &[&[Act::Move]]));
    pace.wait_for_waits(1);
    scheduler.close(Reason::Closed);
    pace.wait_for_waits(2);
    pace.permit(1);
    executor.join();
    assert_eq!(kit.end_of(0), Ok(()));
}

#[test]
fn threads_do_not_wait_for_what_may_never_come_once_it_is_closed() {
    let scheduler = scheduler();
    let (executor, pace) = (Executor::new(scheduler.clone()), Arc::new(Pace::default()));
    // A lane that returns when it is woken, as one does that looks whether a daemon lives.
    spawn(&executor, &[FIRST], Memory::paced(1, &pace).with_waker());
    let kit = scheduler.customer();
    submit(&scheduler, kit.group(0, FIRST, &[&[Act::Move]]));
    pace.wait_for_waits(1);
    scheduler.close(Reason::Closed);
    let waker = std::task::Waker::from(pace);
    eventually("its operation is waited for", || {
        waker.wake_by_ref();
        !kit.ends().is_empty()
    });
    drop(executor);
    assert_eq!(kit.end_of(0), Err(Failure::Reason(Reason::Lost("the scheduler was closed".into()))));
}

#[test]
fn the_last_reference_may_go_in_a_callback() {
    let scheduler = scheduler();
    let executor = Arc::new(Executor::new(scheduler.clone()));
    let held = executor.clone();
    executor
        .spawn("holder", move |_| {
            // Waits until the test has let go.
            eventually("the test keeps its reference", || Arc::strong_count(&held) == 1);
            drop(held);
        })
        .unwrap();
    drop(executor);
    eventually("it is not closed", || scheduler.is_closed());
    assert_eq!(
        scheduler.submit(scheduler.customer().group(0, FIRST, &[])).unwrap_err().reason,
        Reason::Closed
    );
}
