//! Threads and lanes: how they end, how they are woken, what they do when a lane is refused; and `fork`.

use crate::kit::{
    Act, FIRST, Kit, Memory, PATIENCE, Pace, SECOND, Script, THIRD, eventually, lock, serve_inline, spawn,
    submit,
};
use hoistway_io::{
    executor::{
        Charge, Executor, Flight, Handler, InFlightLimit, Limits, Next, Patience, QueueOptions, Scheduler,
        Served, Service,
    },
    lane::NoLane,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

/// A cached probe, which hands over to a ring, which a pool may replace.
fn queues() -> [QueueOptions; 3] {
    [
        QueueOptions { hands_over_to: vec![SECOND], ..QueueOptions::default() },
        QueueOptions::default(),
        QueueOptions::default(),
    ]
}

fn over() -> Act {
    Act::HandOver(SECOND, Charge::of_bytes(1))
}

#[test]
fn a_thread_ends_once_nothing_can_come_to_its_queue() {
    let scheduler = Kit::scheduler(Limits::NONE, &queues());
    let (executor, pace) = (Executor::new(scheduler.clone()), Arc::new(Pace::default()));
    let (tell, told) = mpsc::channel();
    for (name, queue) in [("probe", &[FIRST]), ("ring", &[SECOND])] {
        let lane = if name == "ring" { Memory::paced(1, &pace) } else { Memory::new(1) };
        let tell = tell.clone();
        executor
            .spawn(name, move |scheduler| {
                let service =
                    Service { queues: queue, limit: InFlightLimit::fixed(1), patience: Patience::UntilOver };
                let served = scheduler.serve(lane, &mut Script, service);
                tell.send((name, matches!(served, Served::Over))).unwrap();
            })
            .unwrap();
    }
    let kit = scheduler.customer();
    submit(&scheduler, kit.group(0, FIRST, &[&[over(), Act::Move], &[Act::Move]]));
    pace.wait_for_waits(1);
    assert!(told.recv_timeout(Duration::from_millis(20)).is_err(), "more may be submitted");
    scheduler.seal();
    // The probe's thread has other work to do while the ring reads.
    assert_eq!(told.recv_timeout(PATIENCE), Ok(("probe", true)));
    assert!(told.try_recv().is_err());
    pace.permit(1);
    assert_eq!(told.recv_timeout(PATIENCE), Ok(("ring", true)));
    assert_eq!(kit.end_of(0), Ok(()));
}

#[test]
fn a_lane_that_is_given_up_hands_its_operations_to_the_next_queue() {
    let scheduler = Kit::scheduler(Limits::NONE, &queues());
    let kit = scheduler.customer();
    submit(&scheduler, kit.group(0, FIRST, &[&[over(), Act::Move, Act::GiveUp, Act::Move]]));
    submit(&scheduler, kit.group(1, FIRST, &[&[over(), Act::Move]]));
    scheduler.seal();
    serve_inline(&scheduler, &[FIRST], 1);
    assert!(matches!(serve_inline(&scheduler, &[SECOND], 1), Served::GaveUp));
    assert!(scheduler.redirect(SECOND, THIRD));
    assert!(!scheduler.redirect(SECOND, THIRD), "another was the first to say so");
    assert!(!scheduler.redirect(THIRD, SECOND), "it would go in a circle");
    // Threads of the ring have nothing to wait for, and what is handed over later goes to the pool.
    let service =
        Service { queues: &[SECOND], limit: InFlightLimit::fixed(1), patience: Patience::UntilOver };
    assert!(matches!(scheduler.serve(Memory::new(1), &mut Script, service), Served::Over));
    let service = Service { queues: &[THIRD], limit: InFlightLimit::fixed(1), patience: Patience::UntilOver };
    assert!(matches!(scheduler.serve(Memory::new(1), &mut Script, service), Served::Over));
    assert_eq!((kit.end_of(0), kit.end_of(1)), (Ok(()), Ok(())));
}

#[test]
fn one_thread_does_everything_where_there_is_no_other() {
    let scheduler = Kit::scheduler(Limits::NONE, &queues());
    let kit = scheduler.customer();
    let mut stream = kit.group(0, FIRST, &[&[over(), Act::Move], &[Act::Move], &[over()]]);
    stream.gate = hoistway_io::executor::Gate::Below(1);
    let group = submit(&scheduler, stream);
    scheduler.redirect(SECOND, THIRD);
    for end in 2..=4 {
        assert!(kit.ends().is_empty());
        serve_inline(&scheduler, &[FIRST], 1);
        serve_inline(&scheduler, &[THIRD], 1);
        scheduler.admit(group, end);
    }
    assert_eq!(kit.end_of(0), Ok(()));
    assert_eq!(lock(&kit.begun).len(), 5);
}

#[test]
fn a_lane_with_room_is_woken_for_what_comes() {
    let scheduler = Kit::scheduler(Limits::NONE, &queues());
    let (executor, pace) = (Executor::new(scheduler.clone()), Arc::new(Pace::default()));
    spawn(&executor, &[FIRST], Memory::paced(2, &pace).with_waker());
    let kit = scheduler.customer();
    submit(&scheduler, kit.group(0, FIRST, &[&[Act::Move]]));
    pace.wait_for_waits(1);
    // No attempt ends, yet the next begins.
    submit(&scheduler, kit.group(1, FIRST, &[&[Act::Move]]));
    eventually("the lane sleeps on", || lock(&kit.begun).len() == 2);
    pace.permit(2);
    kit.wait(2);
}

#[test]
fn an_operation_that_was_put_back_is_offered_again() {
    let scheduler = Kit::scheduler(Limits::NONE, &queues());
    let executor = Executor::new(scheduler.clone());
    spawn(&executor, &[FIRST], Memory::new(1));
    let kit = scheduler.customer();
    // Nothing else is in flight, whose end would be a reason to try again.
    submit(&scheduler, kit.group(0, FIRST, &[&[Act::PutBack, Act::PutBack, Act::Move]]));
    kit.wait(1);
    assert_eq!(kit.end_of(0), Ok(()));
    assert_eq!(lock(&kit.begun).len(), 3);
}

#[test]
fn an_operation_that_was_put_back_waits_for_the_end_of_another() {
    let scheduler = Kit::scheduler(Limits::NONE, &queues());
    let executor = Executor::new(scheduler.clone());
    let kit = scheduler.customer();
    submit(&scheduler, kit.group(0, FIRST, &[&[Act::Keep]]));
    serve_inline(&scheduler, &[FIRST], 1);
    spawn(&executor, &[FIRST], Memory::new(1));
    submit(&scheduler, kit.group(1, FIRST, &[&[Act::PutBack, Act::Move]]));
    eventually("it does not begin", || lock(&kit.begun).len() == 2);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(lock(&kit.begun).len(), 2, "it is offered although nothing has changed");
    kit.take_kept().into_iter().for_each(|(_, ticket)| ticket.end(Ok(())));
    kit.wait(2);
    assert_eq!(kit.end_of(1), Ok(()));
}

#[test]
fn an_operation_that_was_put_back_is_offered_again_when_another_is_handed_over() {
    let mut queues = queues();
    queues[usize::from(THIRD.0)].hands_over_to = vec![SECOND];
    let scheduler = Kit::scheduler(Limits::NONE, &queues);
    let executor = Executor::new(scheduler.clone());
    let kit = scheduler.customer();
    submit(&scheduler, kit.group(0, FIRST, &[&[Act::Keep]]));
    serve_inline(&scheduler, &[FIRST], 1);
    spawn(&executor, &[FIRST], Memory::new(1));
    submit(&scheduler, kit.group(1, FIRST, &[&[Act::PutBack, Act::Move]]));
    eventually("it does not begin", || lock(&kit.begun).len() == 2);
    // What it frees may be what the other lacks, although none of the operations in flight ends.
    submit(&scheduler, kit.group(2, THIRD, &[&[over(), Act::Move]]));
    serve_inline(&scheduler, &[THIRD], 1);
    kit.wait(1);
    assert_eq!(kit.end_of(1), Ok(()));
    serve_inline(&scheduler, &[SECOND], 1);
    kit.take_kept().into_iter().for_each(|(_, ticket)| ticket.end(Ok(())));
    kit.wait(3);
}

#[test]
fn what_becomes_free_while_an_operation_is_put_back_is_not_missed() {
    struct Late;
    impl Handler<Kit> for Late {
        fn begin(&mut self, flight: Flight<Kit>) -> Next<Kit> {
            let kit = flight.ticket().scheduler().clone();
            // It finds no memory, which then becomes free.
            let kept = lock(&kit.customer().kept).pop();
            match kept {
                Some((_, ticket)) if !flight.content.acts.is_empty() => {
                    ticket.end(Ok(()));
                    let mut flight = flight;
                    flight.content.acts.clear();
                    Next::PutBack(flight)
                }
                kept => {
                    lock(&kit.customer().kept).extend(kept);
                    flight.end(Ok(()));
                    Next::Ended
                }
            }
        }
        fn settle(&mut self, flight: Flight<Kit>, _: std::io::Result<usize>) -> Next<Kit> {
            Next::Carry(flight)
        }
    }
    let scheduler = Kit::scheduler(Limits::NONE, &queues());
    let kit = scheduler.customer();
    submit(&scheduler, kit.group(0, FIRST, &[&[Act::Keep], &[Act::Keep]]));
    serve_inline(&scheduler, &[FIRST], 1);
    submit(&scheduler, kit.group(1, FIRST, &[&[Act::Move]]));
    let service = Service { queues: &[FIRST], limit: InFlightLimit::fixed(1), patience: Patience::None };
    scheduler.serve(NoLane::default(), &mut Late, service);
    assert_eq!(kit.end_of(1), Ok(()));
    let kept = kit.take_kept();
    assert_eq!(kept.len(), 1, "another operation is in flight all the time");
    kept.into_iter().for_each(|(_, ticket)| ticket.end(Ok(())));
}

#[test]
fn operations_that_were_put_back_by_turns_are_all_offered_again() {
    /// Begins an operation if it has what it needs.
    struct Needs<F>(F);
    impl<F: FnMut() -> bool> Handler<Kit> for Needs<F> {
        fn begin(&mut self, flight: Flight<Kit>) -> Next<Kit> {
            if !(self.0)() {
                return Next::PutBack(flight);
            }
            flight.end(Ok(()));
            Next::Ended
        }
        fn settle(&mut self, flight: Flight<Kit>, _: std::io::Result<usize>) -> Next<Kit> {
            Next::Carry(flight)
        }
    }
    let scheduler = Kit::scheduler(Limits::NONE, &queues());
    let executor = Executor::new(scheduler.clone());
    let kit = scheduler.customer();
    let [has_begun, is_held_up, is_free] = [(); 3].map(|()| Arc::new(AtomicBool::new(false)));
    let service = |queues| Service { queues, limit: InFlightLimit::fixed(1), patience: Patience::UntilOver };
    let flags = (has_begun.clone(), is_held_up.clone(), is_free.clone());
    let second = move |scheduler: &Arc<Scheduler<Kit>>| {
        let (has_begun, is_held_up, is_free) = flags;
        let mut needs = Needs(|| {
            has_begun.store(true, Ordering::SeqCst);
            eventually("the other is not put back", || is_held_up.load(Ordering::SeqCst));
            // The other thread sleeps by now, and would be woken by the end of this one.
            std::thread::sleep(Duration::from_millis(20));
            is_free.store(true, Ordering::SeqCst);
            scheduler.customer().ends().len() == 1
        });
        scheduler.serve(NoLane::default(), &mut needs, service(&[SECOND]));
    };
    executor.spawn("second", second).unwrap();
    submit(&scheduler, kit.group(0, SECOND, &[&[]]));
    eventually("it does not begin", || has_begun.load(Ordering::SeqCst));
    let first = move |scheduler: &Arc<Scheduler<Kit>>| {
        let mut needs = Needs(|| {
            is_held_up.store(true, Ordering::SeqCst);
            is_free.load(Ordering::SeqCst)
        });
        scheduler.serve(NoLane::default(), &mut needs, service(&[FIRST]));
    };
    executor.spawn("first", first).unwrap();
    submit(&scheduler, kit.group(1, FIRST, &[&[]]));
    kit.wait(2);
    assert_eq!(kit.ends(), [(1, Ok(())), (0, Ok(()))]);
}

#[test]
fn a_watcher_ends_with_the_last_group_of_a_sealed_scheduler() {
    for is_sealed_first in [false, true] {
        let scheduler = Kit::scheduler(Limits::NONE, &queues());
        let executor = Executor::new(scheduler.clone());
        executor.spawn_watcher("watcher").unwrap();
        let kit = scheduler.customer();
        let mut submission = kit.group(0, FIRST, &[&[Act::Move]]);
        submission.event = Some(1);
        submit(&scheduler, submission);
        if is_sealed_first {
            scheduler.seal();
        }
        spawn(&executor, &[FIRST], Memory::new(1));
        lock(&kit.reached).insert(1);
        kit.wait(1);
        scheduler.seal();
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            executor.join();
            tell.send(()).unwrap();
        });
        assert_eq!(told.recv_timeout(PATIENCE), Ok(()), "a thread goes on");
    }
}

#[test]
fn many_threads_serve_many_submitters() {
    const SUBMITTERS: u32 = 4;
    const EACH: u32 = 500;
    let scheduler = Kit::scheduler(Limits::NONE, &queues());
    let executor = Executor::new(scheduler.clone());
    for _ in 0..4 {
        spawn(&executor, &[FIRST], Memory::new(1));
        spawn(&executor, &[SECOND, THIRD], Memory::new(4));
    }
    std::thread::scope(|scope| {
        for submitter in 0..SUBMITTERS {
            let scheduler = &scheduler;
            scope.spawn(move || {
                let kit = scheduler.customer();
                for number in 0..EACH {
                    let group = submitter * EACH + number;
                    submit(scheduler, kit.group(group, FIRST, &[&[over(), Act::Move], &[Act::Move]]));
                }
            });
        }
    });
    let kit = scheduler.customer();
    kit.wait((SUBMITTERS * EACH) as usize);
    assert!(kit.ends().iter().all(|(_, end)| end.is_ok()));
    assert_eq!(kit.live(), 0);
    let ended = Arc::downgrade(&scheduler);
    drop(executor);
    drop(scheduler);
    assert_eq!(ended.strong_count(), 0, "a thread lives on");
}

#[cfg(unix)]
mod fork {
    use super::*;
    use hoistway_io::executor::{Reason, Whose};

    #[test]
    fn a_child_of_fork_learns_that_it_is_one() {
        let scheduler = Kit::scheduler(Limits::NONE, &queues());
        let (executor, pace) = (Executor::new(scheduler.clone()), Arc::new(Pace::default()));
        spawn(&executor, &[FIRST], Memory::paced(1, &pace));
        let kit = scheduler.customer();
        let group = submit(&scheduler, kit.group(0, FIRST, &[&[Act::Move], &[Act::Move]]));
        pace.wait_for_waits(1);
        let submission = kit.group(1, FIRST, &[&[]]);
        let (of_parent, of_child) = (Some((executor, scheduler.clone())), scheduler.clone());
        let mut of_parent = of_parent;
        let code = in_child(|| {
            let scheduler = of_child;
            let refused = scheduler.submit(submission).is_err_and(|refused| refused.reason == Reason::Forked);
            scheduler.promote(Whose::Group(group));
            scheduler.close(Reason::Closed);
            let is_idle = scheduler.cancel(Whose::Group(group)) == Default::default()
                && matches!(serve_inline(&scheduler, &[FIRST], 1), Served::Over)
                && scheduler.figures().groups == 0;
            drop((of_parent.take(), scheduler));
            i32::from(!(refused && is_idle))
        });
        assert_eq!(code, 0);
        pace.permit(2);
    }

    /// Runs `work` in a child of `fork`, and returns its exit code.
    fn in_child(work: impl FnOnce() -> i32) -> i32 {
        // SAFETY: the child allocates nothing that a thread of the parent may hold a lock of, but for the allocator, whose
        // locks `fork` of the C library takes; it ends by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(101);
            // SAFETY: it ends the child, and nothing else.
            unsafe { libc::_exit(code) };
        }
        assert!(child > 0, "fork failed");
        let mut status = 0;
        // SAFETY: `status` is written once, by the end of a child of this test.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(libc::WIFEXITED(status), "the child was killed");
        libc::WEXITSTATUS(status)
    }
}
