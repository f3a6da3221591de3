//! Bounds are never exceeded, and every group ends once, whatever customers do.

use crate::kit::{Act, FIRST, Failure, Kit, SECOND, lock, serve_inline, submit, with_priority};
use hoistway_io::executor::{
    Bound, Charge, Gate, GroupId, Limits, LostSlots, Operation, Priority, QueueOptions, Reason, Submission,
    Ticket, Whose,
};
use proptest::prelude::*;

const SLOTS: u32 = 3;

#[derive(Clone, Debug)]
enum Action {
    Submit { priority: usize, gate: usize, operations: Vec<(bool, u64, u32, bool)> },
    Serve { is_first: bool },
    End { which: usize, is_good: bool },
    Lose { which: usize },
    Cancel { which: usize },
    Promote { which: usize },
    Admit { which: usize, end: u64 },
}

fn action() -> impl Strategy<Value = Action> {
    let operation = (any::<bool>(), 0..12u64, 0..=SLOTS, any::<bool>());
    let submit = (0..3usize, 0..3usize, prop::collection::vec(operation, 0..6))
        .prop_map(|(priority, gate, operations)| Action::Submit { priority, gate, operations });
    prop_oneof![
        4 => submit,
        6 => any::<bool>().prop_map(|is_first| Action::Serve { is_first }),
        6 => (any::<usize>(), prop::bool::weighted(0.9)).prop_map(|(which, is_good)| Action::End { which, is_good }),
        1 => any::<usize>().prop_map(|which| Action::Lose { which }),
        1 => any::<usize>().prop_map(|which| Action::Cancel { which }),
        1 => any::<usize>().prop_map(|which| Action::Promote { which }),
        2 => (any::<usize>(), 0..6u64).prop_map(|(which, end)| Action::Admit { which, end }),
    ]
}

fn submission(kit: &Kit, number: u32, action: &Action) -> Option<Submission<Kit>> {
    let Action::Submit { priority, gate, operations } = action else { return None };
    let operations = operations.iter().enumerate().map(|(order, (is_first, bytes, slots, moves))| {
        let over = Act::HandOver(SECOND, Charge::of_bytes(*bytes));
        Operation {
            queue: if *is_first { FIRST } else { SECOND },
            charge: Charge { bytes: *bytes, slots: if *is_first { *slots } else { 0 } },
            order: order as u64,
            content: kit.job(number, order as u32, &[if *moves { Act::Move } else { over }, Act::Keep]),
        }
    });
    let mut submission = Submission::new(number, operations.collect());
    submission.gate = [Gate::Open, Gate::Below(1), Gate::Stages][*gate];
    Some(with_priority(submission, Priority::ALL[*priority]))
}

proptest! {
    #[test]
    fn bounds_are_never_exceeded_and_every_group_ends_once(actions in prop::collection::vec(action(), 1..80)) {
        let in_flight = Bound { rest_bytes: 12, rest_operations: 3, ..Bound::new(20, 5) };
        let accepted = Bound { rest_bytes: 80, rest_operations: 18, ..Bound::new(100, 24) };
        let queues = [
            QueueOptions { slots: Some(SLOTS), hands_over_to: vec![SECOND] },
            QueueOptions::default(),
        ];
        let scheduler = Kit::scheduler(Limits { accepted, in_flight }, &queues);
        let kit = scheduler.customer();
        let mut groups: Vec<(u32, GroupId)> = Vec::new();
        for (number, action) in actions.iter().enumerate() {
            let number = number as u32;
            let pick = |which: &usize| (!groups.is_empty()).then(|| groups[which % groups.len()].1);
            let take = |which: &usize| {
                let mut kept = lock(&kit.kept);
                (!kept.is_empty()).then(|| which % kept.len()).map(|which| kept.swap_remove(which).1)
            };
            match action {
                Action::Submit { .. } => {
                    let Some(submission) = submission(kit, number, action) else { continue };
                    match scheduler.submit(submission) {
                        Ok(id) => groups.push((number, id)),
                        Err(refused) => prop_assert_eq!(&refused.reason, &Reason::Full),
                    }
                }
                Action::Serve { is_first } => {
                    serve_inline(&scheduler, if *is_first { &[FIRST] } else { &[SECOND] }, 2);
                }
                Action::End { which, is_good } => {
                    let result = if *is_good { Ok(()) } else { Err(Failure::Said("no")) };
                    take(which).into_iter().for_each(|ticket: Ticket<Kit>| ticket.end(result.clone()));
                }
                Action::Lose { which } => {
                    take(which).into_iter().for_each(|ticket| _ = ticket.lose(Failure::Said("lost")));
                }
                Action::Cancel { which } => {
                    pick(which).into_iter().for_each(|group| _ = scheduler.cancel(Whose::Group(group)));
                }
                Action::Promote { which } => {
                    pick(which).into_iter().for_each(|group| scheduler.promote(Whose::Group(group)));
                }
                Action::Admit { which, end } => {
                    pick(which).into_iter().for_each(|group| scheduler.admit(group, *end));
                }
            }
            let kept = lock(&kit.kept);
            let figures = scheduler.figures();
            prop_assert_eq!(figures.in_flight, kept.len());
            let sum = |charges: &mut dyn Iterator<Item = Charge>| {
                charges.fold((0, 0), |(bytes, slots), charge| (bytes + charge.bytes, slots + charge.slots))
            };
            let (bytes, _) = sum(&mut kept.iter().map(|(_, ticket)| ticket.charge()));
            prop_assert_eq!(figures.in_flight_bytes, bytes);
            prop_assert!(bytes <= in_flight.bytes && kept.len() <= in_flight.operations || kept.len() == 1);
            let of_first = kept.iter().filter(|(_, ticket)| ticket.queue() == FIRST);
            let (_, slots) = sum(&mut of_first.map(|(_, ticket)| ticket.charge()));
            prop_assert!(slots + figures.lost_slots <= SLOTS);
            let rest = kept.iter().filter(|(_, ticket)| ticket.priority() != Priority::Demand);
            let rest: Vec<_> = rest.map(|(_, ticket)| ticket.charge()).collect();
            let (rest_bytes, _) = sum(&mut rest.iter().copied());
            prop_assert!(
                rest_bytes <= in_flight.rest_bytes && rest.len() <= in_flight.rest_operations || rest.len() == 1
            );
        }
        // Without further cancellations all ends, well or not.
        for (_, id) in &groups {
            scheduler.admit(*id, u64::MAX);
        }
        scheduler.seal();
        for _ in 0..10_000 {
            if scheduler.figures().groups == 0 {
                break;
            }
            serve_inline(&scheduler, &[FIRST], 2);
            serve_inline(&scheduler, &[SECOND], 2);
            kit.take_kept().into_iter().for_each(|(_, ticket)| ticket.end(Ok(())));
        }
        for (number, _) in &groups {
            let end = kit.end_of(*number);
            let is_known = matches!(
                &end,
                Ok(()) | Err(Failure::Said("no" | "lost") | Failure::Reason(Reason::Cancelled | Reason::NoMemory))
            );
            prop_assert!(is_known, "group {} ended with {:?}", number, end);
        }
        prop_assert_eq!(kit.ends().len(), groups.len());
        prop_assert_eq!(kit.live(), 0);
    }
}

#[test]
fn what_is_too_much_is_refused_until_other_groups_have_ended() {
    let accepted = Bound { rest_bytes: 2, rest_operations: 2, ..Bound::new(4, 3) };
    let limits = Limits { accepted, in_flight: Bound::NONE };
    let scheduler = Kit::scheduler(limits, &[QueueOptions::default()]);
    let kit = scheduler.customer();
    let refusal = |submission| scheduler.submit(submission).map_err(|refused| refused.reason.clone());
    let prefetch = |group, count: usize| {
        with_priority(kit.group(group, FIRST, &[&[][..]; 8][..count]), Priority::Prefetch)
    };
    // More than the bound is taken on alone.
    assert!(refusal(prefetch(0, 8)).is_ok());
    assert_eq!(refusal(prefetch(1, 1)), Err(Reason::Full));
    assert_eq!(refusal(kit.group(2, FIRST, &[&[]])), Err(Reason::Full));
    serve_inline(&scheduler, &[FIRST], 1);
    assert!(refusal(prefetch(3, 2)).is_ok());
    assert_eq!(refusal(prefetch(4, 1)), Err(Reason::Full), "room for demand");
    assert!(refusal(kit.group(5, FIRST, &[&[]])).is_ok());
    assert_eq!(refusal(kit.group(6, FIRST, &[&[]])), Err(Reason::Full));
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!(kit.ends().len(), 3);
}

#[test]
fn what_needs_more_slots_than_are_left_fails() {
    let queues = [QueueOptions { slots: Some(2), ..QueueOptions::default() }];
    let scheduler = Kit::scheduler(Limits::NONE, &queues);
    let kit = scheduler.customer();
    let with_slots = |group, slots, acts: &[Act]| {
        let mut submission = kit.group(group, FIRST, &[acts]);
        submission.operations[0].charge.slots = slots;
        submit(&scheduler, submission);
        serve_inline(&scheduler, &[FIRST], 1);
    };
    with_slots(0, 3, &[]);
    assert_eq!(kit.end_of(0), Err(Failure::Reason(Reason::NoMemory)));
    with_slots(1, 2, &[Act::Keep]);
    with_slots(2, 2, &[]);
    let kept = kit.take_kept();
    assert_eq!(kept.len(), 1, "the second must wait for slots");
    kept.into_iter().for_each(|(_, ticket)| ticket.end(Ok(())));
    serve_inline(&scheduler, &[FIRST], 1);
    assert_eq!(kit.end_of(2), Ok(()));
    // A slot that a device may still write to is not used again.
    with_slots(3, 1, &[Act::Keep]);
    let lost = kit.take_kept().into_iter().map(|(_, ticket)| ticket.lose(Failure::Said("in doubt")));
    let lost: Vec<_> = lost.collect();
    assert_eq!(scheduler.figures().lost_slots, 1);
    with_slots(4, 2, &[]);
    assert_eq!(kit.end_of(4), Err(Failure::Reason(Reason::NoMemory)));
    with_slots(5, 1, &[]);
    assert_eq!(kit.end_of(5), Ok(()));
    // Once it is known that nothing writes to it, it is.
    lost.into_iter().for_each(LostSlots::give_back);
    assert_eq!(scheduler.figures().lost_slots, 0);
    with_slots(6, 2, &[]);
    assert_eq!(kit.end_of(6), Ok(()));
}
