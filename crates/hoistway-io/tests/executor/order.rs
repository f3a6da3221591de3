//! Which operation is next: priorities, starvation, promotion, room.

use crate::kit::{Act, FIRST, Kit, SECOND, lock, serve_inline, submit, with_priority};
use hoistway_io::executor::{Bound, Charge, Limits, Priority, QueueOptions, Reason, Whose};

fn one_queue() -> [QueueOptions; 1] {
    [QueueOptions::default()]
}

#[test]
fn demand_goes_first_and_the_older_before_the_younger() {
    let scheduler = Kit::scheduler(Limits::NONE, &one_queue());
    let kit = scheduler.customer();
    for (group, priority) in
        [(0, Priority::Background), (1, Priority::Prefetch), (2, Priority::Demand), (3, Priority::Demand)]
    {
        submit(&scheduler, with_priority(kit.group(group, FIRST, &[&[], &[]]), priority));
    }
    serve_inline(&scheduler, &[FIRST], 1);
    let order = [(2, 0), (2, 1), (3, 0), (3, 1), (1, 0), (1, 1), (0, 0), (0, 1)];
    assert_eq!(*lock(&kit.begun), order);
}

/// The most operations in a row that are more urgent than `priority`, before its last one.
fn longest_wait(begun: &[(u32, u32)], priority: Priority) -> usize {
    let of_priority = priority as u32;
    let last = begun.iter().rposition(|(group, _)| *group == of_priority).unwrap();
    let waits = begun[..last].split(|(group, _)| *group == of_priority);
    waits.map(|wait| wait.iter().filter(|(group, _)| *group < of_priority).count()).max().unwrap()
}

#[test]
fn an_operation_is_overtaken_a_bounded_number_of_times() {
    let scheduler = Kit::scheduler(Limits::NONE, &one_queue());
    let kit = scheduler.customer();
    let acts = vec![&[][..]; 6400];
    for (priority, count) in Priority::ALL.into_iter().zip([6400, 700, 100]) {
        submit(&scheduler, with_priority(kit.group(priority as u32, FIRST, &acts[..count]), priority));
    }
    serve_inline(&scheduler, &[FIRST], 1);
    let begun = lock(&kit.begun);
    assert_eq!(longest_wait(&begun, Priority::Prefetch), 7);
    assert_eq!(longest_wait(&begun, Priority::Background), 63);
    // While all three wait, one of 64 operations is background, and of the others one of 8 is prefetch.
    let of = |priority: Priority| begun[..640].iter().filter(|(group, _)| *group == priority as u32).count();
    assert_eq!(Priority::ALL.map(of), [552, 78, 10]);
    assert_eq!(scheduler.figures().begun, [6400, 700, 100]);
}

#[test]
fn an_operation_in_short_steps_is_overtaken_by_as_many_bytes_as_one_in_long_ones() {
    let scheduler = Kit::scheduler(Limits::NONE, &one_queue());
    let kit = scheduler.customer();
    let mut demand = kit.group(0, FIRST, &[&[][..]; 6400]);
    demand.operations.iter_mut().for_each(|operation| operation.charge.bytes = 20);
    submit(&scheduler, demand);
    submit(&scheduler, with_priority(kit.group(2, FIRST, &[&[][..]; 100]), Priority::Background));
    serve_inline(&scheduler, &[FIRST], 1);
    // 63 bytes are 4 operations of 20.
    assert_eq!(longest_wait(&lock(&kit.begun), Priority::Background), 4);
}

#[test]
fn what_waits_in_another_queue_is_not_starved_of_room() {
    let in_flight = Bound { rest_bytes: 4, ..Bound::new(4, 4) };
    let queues = [QueueOptions::default(), QueueOptions::default()];
    let scheduler = Kit::scheduler(Limits { accepted: Bound::NONE, in_flight }, &queues);
    let kit = scheduler.customer();
    // Demand takes all the room, and what becomes free of it.
    submit(&scheduler, kit.group(0, FIRST, &[&[Act::Keep][..]; 100]));
    serve_inline(&scheduler, &[FIRST], 1);
    let mut large = with_priority(kit.group(1, SECOND, &[&[]]), Priority::Prefetch);
    large.operations[0].charge.bytes = 3;
    submit(&scheduler, large);
    let mut ended = 0;
    while !lock(&kit.begun).contains(&(1, 0)) {
        let (_, ticket) = lock(&kit.kept).pop().unwrap();
        ticket.end(Ok(()));
        ended += 1;
        assert!(ended <= 10, "overtaken more than 7 times, or room for 3 did not become free");
        serve_inline(&scheduler, &[FIRST], 1);
        serve_inline(&scheduler, &[SECOND], 1);
    }
    assert_eq!(kit.end_of(1), Ok(()));
    scheduler.close(Reason::Closed);
    kit.take_kept().into_iter().for_each(|(_, ticket)| ticket.end(Ok(())));
}

#[test]
fn background_is_not_starved_of_the_room_that_prefetching_takes() {
    let in_flight = Bound { rest_bytes: 4, ..Bound::new(100, 100) };
    for queue in [FIRST, SECOND] {
        let queues = [QueueOptions::default(), QueueOptions::default()];
        let scheduler = Kit::scheduler(Limits { accepted: Bound::NONE, in_flight }, &queues);
        let kit = scheduler.customer();
        submit(&scheduler, with_priority(kit.group(0, FIRST, &[&[Act::Keep][..]; 200]), Priority::Prefetch));
        serve_inline(&scheduler, &[FIRST], 1);
        let mut large = with_priority(kit.group(1, queue, &[&[]]), Priority::Background);
        large.operations[0].charge.bytes = 3;
        submit(&scheduler, large);
        let mut ended = 0;
        while !lock(&kit.begun).contains(&(1, 0)) {
            let (_, ticket) = lock(&kit.kept).pop().unwrap();
            ticket.end(Ok(()));
            ended += 1;
            assert!(ended <= 66, "overtaken more than 63 times, or room for 3 did not become free");
            serve_inline(&scheduler, &[FIRST], 1);
            serve_inline(&scheduler, &[SECOND], 1);
            if ended == 65 {
                submit(&scheduler, kit.group(2, FIRST, &[&[]]));
                serve_inline(&scheduler, &[FIRST], 1);
                assert_eq!(kit.end_of(2), Ok(()), "demand has room");
            }
        }
        assert_eq!(kit.end_of(1), Ok(()));
        scheduler.close(Reason::Closed);
        kit.take_kept().into_iter().for_each(|(_, ticket)| ticket.end(Ok(())));
    }
}

#[test]
fn little_else_is_in_flight_while_there_is_demand() {
    let in_flight = Bound { rest_bytes_beside_demand: 2, ..Bound::new(100, 100) };
    let scheduler = Kit::scheduler(Limits { accepted: Bound::NONE, in_flight }, &one_queue());
    let kit = scheduler.customer();
    let end_oldest_of_background = || {
        let mut kept = lock(&kit.kept);
        let oldest = kept.iter().position(|(_, ticket)| ticket.priority() == Priority::Background).unwrap();
        let (_, ticket) = kept.remove(oldest);
        drop(kept);
        ticket.end(Ok(()));
        serve_inline(&scheduler, &[FIRST], 1);
    };
    let in_flight = || scheduler.figures().in_flight;
    submit(&scheduler, with_priority(kit.group(0, FIRST, &[&[Act::Keep][..]; 300]), Priority::Background));
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!(in_flight(), 75, "alone it takes all but what is kept for demand");
    submit(&scheduler, kit.group(1, FIRST, &[&[]]));
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!(kit.end_of(1), Ok(()));
    (0..73).for_each(|_| end_oldest_of_background());
    assert_eq!(in_flight(), 75, "demand of long ago counts no more");
    // Each demand finds at most two others before it, however many wait.
    submit(&scheduler, kit.group(2, FIRST, &[&[Act::Keep]]));
    serve_inline(&scheduler, &[FIRST], 1);
    (0..75).for_each(|_| end_oldest_of_background());
    assert_eq!(in_flight(), 3);
    (0..40).for_each(|_| end_oldest_of_background());
    assert_eq!(in_flight(), 3, "demand that is in flight is not forgotten");
    scheduler.close(Reason::Closed);
    kit.take_kept().into_iter().for_each(|(_, ticket)| ticket.end(Ok(())));
}

#[test]
fn steps_of_one_operation_do_not_make_demand_forgotten() {
    let scheduler = Kit::scheduler(Limits::NONE, &one_queue());
    let kit = scheduler.customer();
    let step = Act::HandOver(FIRST, Charge { bytes: 1, slots: 0 });
    submit(&scheduler, kit.group(0, FIRST, &[&[]]));
    serve_inline(&scheduler, &[FIRST], 1);
    submit(&scheduler, with_priority(kit.group(1, FIRST, &[&vec![step; 100]]), Priority::Background));
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!(kit.end_of(1), Ok(()));
    assert!(scheduler.has_demand());
    submit(&scheduler, with_priority(kit.group(2, FIRST, &[&[][..]; 15]), Priority::Background));
    serve_inline(&scheduler, &[FIRST], 1);
    assert!(!scheduler.has_demand(), "sixteen operations have ended since");
}

#[test]
fn a_large_operation_is_not_overtaken_for_the_room_that_it_waits_for() {
    let limits = Limits { accepted: Bound::NONE, in_flight: Bound::new(8, 100) };
    let scheduler = Kit::scheduler(limits, &one_queue());
    let kit = scheduler.customer();
    submit(&scheduler, kit.group(0, FIRST, &[&[Act::Keep][..]; 4]));
    serve_inline(&scheduler, &[FIRST], 1);
    let mut large = kit.group(1, FIRST, &[&[Act::Keep]]);
    large.operations[0].charge.bytes = 8;
    submit(&scheduler, large);
    submit(&scheduler, kit.group(2, FIRST, &[&[]]));
    let mut kept = kit.take_kept();
    while let Some((_, ticket)) = kept.pop() {
        serve_inline(&scheduler, &[FIRST], 1);
        assert_eq!(scheduler.figures().waiting, 2, "small ones take the room of a large one");
        ticket.end(Ok(()));
    }
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!(lock(&kit.begun).last(), Some(&(1, 0)));
    kit.take_kept().into_iter().for_each(|(_, ticket)| ticket.end(Ok(())));
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!(kit.end_of(2), Ok(()));
}

#[test]
fn demand_finds_room_that_prefetching_cannot_take() {
    let limits = Limits { accepted: Bound::NONE, in_flight: Bound::new(u64::MAX, 8) };
    let scheduler = Kit::scheduler(limits, &one_queue());
    let kit = scheduler.customer();
    submit(&scheduler, with_priority(kit.group(0, FIRST, &[&[Act::Keep][..]; 20]), Priority::Prefetch));
    submit(&scheduler, with_priority(kit.group(1, FIRST, &[&[Act::Keep][..]; 20]), Priority::Background));
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!(scheduler.figures().in_flight, 6);
    submit(&scheduler, kit.group(2, FIRST, &[&[Act::Keep][..]; 20]));
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!(scheduler.figures().in_flight, 8);
    assert_eq!(lock(&kit.kept).iter().filter(|(group, _)| *group == 2).count(), 2);
    scheduler.close(Reason::Closed);
    kit.take_kept().into_iter().for_each(|(_, ticket)| ticket.end(Ok(())));
}

#[test]
fn a_prefetch_that_is_waited_for_is_demand() {
    let limits = Limits { accepted: Bound::NONE, in_flight: Bound::new(u64::MAX, 4) };
    let scheduler = Kit::scheduler(limits, &one_queue());
    let kit = scheduler.customer();
    let mut groups = Vec::new();
    for group in 0..3 {
        let mut prefetch = with_priority(kit.group(group, FIRST, &[&[Act::Keep], &[]]), Priority::Prefetch);
        prefetch.tag = u64::from(group);
        groups.push(submit(&scheduler, prefetch));
    }
    submit(&scheduler, kit.group(3, FIRST, &[&[]]));
    scheduler.promote(Whose::Tag(2));
    scheduler.promote(Whose::Tag(2));
    scheduler.promote(Whose::Group(groups[1]));
    serve_inline(&scheduler, &[FIRST], 1);
    // Behind what was in demand before, in the order of promotion.
    assert_eq!(*lock(&kit.begun), [(3, 0), (2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1)]);
    assert_eq!(scheduler.figures().begun, [5, 2, 0]);
    kit.take_kept().into_iter().for_each(|(_, ticket)| ticket.end(Ok(())));
    assert!((0..4).all(|group| kit.end_of(group) == Ok(())));
}

#[test]
fn an_operation_keeps_its_place_when_it_is_put_back_or_handed_over() {
    let queues =
        [QueueOptions { hands_over_to: vec![SECOND], ..QueueOptions::default() }, QueueOptions::default()];
    let scheduler = Kit::scheduler(Limits::NONE, &queues);
    let kit = scheduler.customer();
    let over = Act::HandOver(SECOND, Charge::of_bytes(1));
    submit(&scheduler, kit.group(0, FIRST, &[&[Act::PutBack, over.clone()]]));
    submit(&scheduler, kit.group(1, SECOND, &[&[]]));
    // Nothing is in flight, so it is up to the caller when to try again.
    serve_inline(&scheduler, &[FIRST], 1);
    serve_inline(&scheduler, &[FIRST], 1);
    serve_inline(&scheduler, &[SECOND], 1);
    assert_eq!(*lock(&kit.begun), [(0, 0), (0, 0), (0, 0), (1, 0)]);
}
