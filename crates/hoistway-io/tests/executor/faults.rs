//! Faults at every step: errors, panics, lanes that fail, handlers that forget their operations.

use crate::kit::{
    Act, FIRST, Failure, Job, Kit, Memory, Pace, SECOND, Script, lock, serve_inline, spawn, submit,
};
use hoistway_io::{
    executor::{
        Carried, Executor, Flight, Gate, Handler, InFlightLimit, Limits, Next, Patience, QueueOptions,
        Reason, Scheduler, Served, Service,
    },
    lane::{Done, Lane},
};
use std::{io, sync::Arc, time::Instant};

fn scheduler() -> Arc<Scheduler<Kit>> {
    Kit::scheduler(Limits::NONE, &[QueueOptions { slots: Some(1), ..QueueOptions::default() }])
}

/// Ends of a group whose first operation acts so, and of one behind it.
fn ends(acts: &[Act]) -> (Result<(), Failure>, Result<(), Failure>) {
    let scheduler = scheduler();
    let kit = scheduler.customer();
    for group in 0..2 {
        let mut submission = kit.group(group, FIRST, &[if group == 0 { acts } else { &[Act::Move] }]);
        submission.operations[0].charge.slots = 1;
        submit(&scheduler, submission);
    }
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!(kit.live(), 0);
    (kit.end_of(0), kit.end_of(1))
}

#[test]
fn an_error_at_any_attempt_ends_the_operation_and_frees_its_room() {
    let denied = io::ErrorKind::PermissionDenied;
    let failed = (Err(Failure::Io(denied)), Ok(()));
    assert_eq!(ends(&[Act::Refuse(denied)]), failed);
    assert_eq!(ends(&[Act::Move, Act::Refuse(denied)]), failed);
    let interrupted = Act::Refuse(io::ErrorKind::Interrupted);
    assert_eq!(ends(&[interrupted.clone(), Act::Move, interrupted, Act::Move]), (Ok(()), Ok(())));
    assert_eq!(ends(&[Act::Fail("at once")]), (Err(Failure::Said("at once")), Ok(())));
}

#[test]
fn a_handler_that_panics_loses_one_operation() {
    let abandoned = (Err(Failure::Reason(Reason::Abandoned)), Ok(()));
    assert_eq!(ends(&[Act::Panic]), abandoned);
    assert_eq!(ends(&[Act::Move, Act::Panic]), abandoned);
}

#[test]
fn an_end_that_panics_harms_nothing() {
    let scheduler = scheduler();
    let kit = scheduler.customer();
    lock(&kit.panicking).insert(0);
    submit(&scheduler, kit.group(0, FIRST, &[&[], &[]]));
    submit(&scheduler, kit.group(1, FIRST, &[&[]]));
    // An empty group ends at once, by the thread that submits it.
    lock(&kit.panicking).insert(2);
    submit(&scheduler, kit.group(2, FIRST, &[]));
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!([0, 1, 2].map(|group| kit.end_of(group)), [Ok(()), Ok(()), Ok(())]);
}

#[test]
fn a_handler_that_panics_without_an_operation_harms_nothing() {
    struct Bomb(Script);
    impl Handler<Kit> for Bomb {
        fn begin(&mut self, flight: Flight<Kit>) -> Next<Kit> {
            self.0.begin(flight)
        }
        fn settle(&mut self, flight: Flight<Kit>, _: io::Result<usize>) -> Next<Kit> {
            let (job, ticket) = flight.into_parts();
            drop(job);
            drop(ticket);
            panic!("after the ticket was dropped");
        }
    }
    let scheduler = scheduler();
    let kit = scheduler.customer();
    submit(&scheduler, kit.group(0, FIRST, &[&[Act::Move]]));
    submit(&scheduler, kit.group(1, FIRST, &[&[]]));
    let service = Service { queues: &[FIRST], limit: InFlightLimit::fixed(1), patience: Patience::None };
    scheduler.serve(Memory::new(1), &mut Bomb(Script), service);
    assert_eq!(kit.end_of(0), Err(Failure::Reason(Reason::Abandoned)));
    assert_eq!(kit.end_of(1), Ok(()));
}

#[test]
fn a_lane_that_fails_loses_what_it_has_and_closes_the_scheduler() {
    let scheduler = scheduler();
    let (executor, pace) = (Executor::new(scheduler.clone()), Arc::new(Pace::default()));
    spawn(&executor, &[FIRST], Memory::paced(2, &pace));
    let kit = scheduler.customer();
    let mut submission = kit.group(0, FIRST, &[&[Act::Move], &[Act::Move], &[Act::Move]]);
    submission.operations[0].charge.slots = 1;
    submit(&scheduler, submission);
    submit(&scheduler, kit.group(1, FIRST, &[&[Act::Move]]));
    pace.wait_for_waits(1);
    pace.fail();
    executor.join();
    let Err(Failure::Reason(Reason::Lost(why))) = kit.end_of(0) else { panic!("{:?}", kit.end_of(0)) };
    let Err(Failure::Reason(Reason::Broken(reason))) = kit.end_of(1) else { panic!("{:?}", kit.end_of(1)) };
    assert_eq!(reason, why);
    assert_eq!(scheduler.figures().lost_slots, 1);
}

/// A lane that panics when it is given an operation, or when it is waited for.
struct Mine {
    op: Option<Carried<Job>>,
    is_in_push: bool,
}

impl Lane<Carried<Job>> for Mine {
    fn capacity(&self) -> usize {
        1
    }

    fn in_flight(&self) -> usize {
        self.op.iter().len()
    }

    fn push(&mut self, op: Carried<Job>) {
        self.op = Some(op);
        assert!(!self.is_in_push, "a lane that panics");
    }

    fn submit_and_wait(&mut self, _: &mut Vec<Done<Carried<Job>>>) -> io::Result<()> {
        panic!("a lane that panics");
    }
}

#[test]
fn a_lane_that_panics_is_one_that_fails() {
    for is_in_push in [false, true] {
        let scheduler = scheduler();
        let kit = scheduler.customer();
        submit(&scheduler, kit.group(0, FIRST, &[&[Act::Move]]));
        submit(&scheduler, kit.group(1, FIRST, &[&[Act::Move]]));
        let service = Service { queues: &[FIRST], limit: InFlightLimit::fixed(1), patience: Patience::None };
        let served = scheduler.serve(Mine { op: None, is_in_push }, &mut Script, service);
        assert!(matches!(served, Served::Failed { .. }), "{served:?}");
        let why: Arc<str> = "the lane panicked".into();
        assert_eq!(kit.end_of(0), Err(Failure::Reason(Reason::Lost(why.clone()))));
        assert_eq!(kit.end_of(1), Err(Failure::Reason(Reason::Broken(why))));
    }
}

#[test]
fn groups_whose_event_cannot_be_asked_for_fail() {
    let scheduler = scheduler();
    let kit = scheduler.customer();
    let mut unwatched = kit.group(9, FIRST, &[&[]]);
    unwatched.event = Some(1);
    assert_eq!(scheduler.submit(unwatched).unwrap_err().reason, Reason::Unserved);
    scheduler.expect_watcher();
    for group in 0..4 {
        let mut submission = kit.group(group, FIRST, &[&[]]);
        submission.event = Some(if group == 3 { 2 } else { 1 });
        submit(&scheduler, submission);
    }
    assert!(!scheduler.look(Instant::now()), "no event is reached");
    lock(&kit.broken_events).insert(1);
    while scheduler.look(Instant::now()) {}
    for group in 0..3 {
        assert_eq!(kit.end_of(group), Err(Failure::Said("the device is lost")));
    }
    lock(&kit.reached).insert(2);
    assert!(scheduler.look(Instant::now()));
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!(kit.end_of(3), Ok(()));
}

#[test]
fn the_event_of_a_group_without_operations_is_not_asked_for() {
    let scheduler = scheduler();
    let kit = scheduler.customer();
    scheduler.expect_watcher();
    let mut empty = kit.group(0, FIRST, &[]);
    (empty.event, empty.deadline) = (Some(1), Some(Instant::now()));
    submit(&scheduler, empty);
    assert_eq!(kit.end_of(0), Ok(()));
    lock(&kit.broken_events).insert(1);
    assert!(!scheduler.look(Instant::now()), "a watcher would go on for ever");
}

#[test]
fn a_stage_that_fails_is_not_followed_by_the_next() {
    let scheduler = scheduler();
    let kit = scheduler.customer();
    let mut staged = kit.group(0, FIRST, &[&[Act::Fail("the write")], &[Act::Panic]]);
    staged.gate = Gate::Stages;
    submit(&scheduler, staged);
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!(kit.end_of(0), Err(Failure::Said("the write")));
    assert_eq!(*lock(&kit.begun), [(0, 0)]);
}

#[test]
fn queues_that_do_not_exist_or_wait_for_nothing_are_refused() {
    let scheduler = scheduler();
    let kit = scheduler.customer();
    assert_eq!(scheduler.submit(kit.group(0, SECOND, &[&[]])).unwrap_err().reason, Reason::Unserved);
    let over = Act::HandOver(SECOND, hoistway_io::executor::Charge::default());
    submit(&scheduler, kit.group(1, FIRST, &[&[over]]));
    assert!(matches!(serve_inline(&scheduler, &[FIRST, SECOND], 1), Served::Over));
    assert_eq!(kit.end_of(1), Err(Failure::Reason(Reason::Unserved)));
    assert!(!scheduler.redirect(FIRST, SECOND));
    let queues = [QueueOptions::default(), QueueOptions::default()];
    let undeclared = Kit::scheduler(Limits::NONE, &queues);
    let over = Act::HandOver(SECOND, hoistway_io::executor::Charge::default());
    submit(&undeclared, undeclared.customer().group(0, FIRST, &[&[over]]));
    assert!(matches!(serve_inline(&undeclared, &[FIRST], 1), Served::Over));
    assert_eq!(undeclared.customer().end_of(0), Err(Failure::Reason(Reason::Unserved)));
    scheduler.seal();
    assert_eq!(scheduler.submit(kit.group(2, FIRST, &[&[]])).unwrap_err().reason, Reason::Unserved);
    assert_eq!(kit.live(), 0);
}
