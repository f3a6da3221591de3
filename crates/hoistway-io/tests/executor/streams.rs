//! Streams whose consumer holds them back: ordered admission never stops for good.

use crate::kit::{Act, FIRST, Kit, Memory, SECOND, eventually, lock, serve_inline, spawn, submit};
use hoistway_io::executor::{Bound, Charge, Executor, Gate, Limits, QueueOptions};
use proptest::prelude::*;
use std::time::Duration;

/// Streams `orders.len()` operations, of which the consumer has at most `window` ahead. Returns the order of beginnings.
fn stream(orders: &[u64], window: u64, slots: u32, threads: usize, detour: bool) -> Vec<(u32, u32)> {
    let queues = [
        QueueOptions { slots: Some(slots), hands_over_to: vec![SECOND] },
        QueueOptions { slots: Some(slots), ..QueueOptions::default() },
    ];
    let limits = Limits { accepted: Bound::NONE, in_flight: Bound::new(16, 4) };
    let scheduler = Kit::scheduler(limits, &queues);
    let executor = Executor::new(scheduler.clone());
    for _ in 0..threads {
        spawn(&executor, &[FIRST], Memory::new(1));
        spawn(&executor, &[SECOND], Memory::new(2));
    }
    let kit = scheduler.customer();
    let over = Act::HandOver(SECOND, Charge { bytes: 1, slots: 1 });
    let acts: &[Act] = if detour { &[Act::Move, over, Act::Move] } else { &[Act::Move] };
    let mut submission = kit.group(0, FIRST, &vec![acts; orders.len()]);
    for (operation, order) in submission.operations.iter_mut().zip(orders) {
        operation.order = *order;
        operation.charge.slots = 1;
    }
    submission.gate = Gate::Below(window);
    let group = submit(&scheduler, submission);
    scheduler.seal();
    let last = orders.iter().copied().max().unwrap_or(0);
    // Consumes in order: what it waits for is always below the gate.
    for next in 0..=last {
        let before = orders.iter().filter(|order| **order <= next).count();
        eventually("the stream has stopped", || {
            let begun = lock(&kit.begun);
            let mut numbers: Vec<u32> = begun.iter().map(|(_, number)| *number).collect();
            numbers.sort_unstable();
            numbers.dedup();
            assert!(
                numbers.iter().all(|number| orders[*number as usize] < next + window),
                "an operation begins that was not admitted"
            );
            numbers.len() >= before
        });
        scheduler.admit(group, next + 1 + window);
    }
    kit.wait(1);
    executor.join();
    assert_eq!(kit.end_of(0), Ok(()));
    lock(&kit.begun).clone()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn streams_never_stop(
        orders in prop::collection::vec(0..12u64, 1..24),
        window in 1..5u64,
        slots in 1..3u32,
        threads in 1..3usize,
        detour: bool,
    ) {
        let mut sorted = orders.clone();
        sorted.sort_unstable();
        // The numbers of a group's operations are those of their order.
        stream(&sorted, window, slots, threads, detour);
    }
}

#[test]
fn one_thread_begins_operations_in_their_order() {
    let begun = stream(&[0, 1, 2, 3, 4, 5, 6, 7], 3, 1, 1, false);
    assert_eq!(begun, (0..8).map(|number| (0, number)).collect::<Vec<_>>());
}

#[test]
fn a_gate_that_is_lowered_or_not_bounded_stays() {
    let scheduler = Kit::scheduler(Limits::NONE, &[QueueOptions::default()]);
    let executor = Executor::new(scheduler.clone());
    spawn(&executor, &[FIRST], Memory::new(1));
    let kit = scheduler.customer();
    let mut submission = kit.group(0, FIRST, &[&[], &[], &[]]);
    submission.gate = Gate::Below(2);
    let bounded = submit(&scheduler, submission);
    let mut submission = kit.group(1, FIRST, &[&[Act::Keep], &[]]);
    submission.gate = Gate::Stages;
    let staged = submit(&scheduler, submission);
    scheduler.admit(bounded, 1);
    scheduler.admit(staged, 9);
    eventually("two of the first, one of the second", || lock(&kit.begun).len() == 3);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(lock(&kit.begun).len(), 3);
    scheduler.admit(bounded, 3);
    kit.take_kept().into_iter().for_each(|(_, ticket)| ticket.end(Ok(())));
    kit.wait(2);
}

#[test]
fn stages_may_have_any_order() {
    let scheduler = Kit::scheduler(Limits::NONE, &[QueueOptions::default()]);
    let kit = scheduler.customer();
    let mut staged = kit.group(0, FIRST, &[&[Act::Move][..]; 4]);
    for (operation, order) in staged.operations.iter_mut().zip([u64::MAX, 7, u64::MAX, 7]) {
        operation.order = order;
    }
    staged.gate = Gate::Stages;
    submit(&scheduler, staged);
    serve_inline(&scheduler, &[FIRST], 4);
    assert_eq!(*lock(&kit.begun), [(0, 1), (0, 3), (0, 0), (0, 2)]);
    assert_eq!(kit.end_of(0), Ok(()));
}
