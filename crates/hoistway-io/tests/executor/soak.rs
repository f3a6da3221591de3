//! Everything at once, for as long as one likes: `just soak-executor`.

use crate::kit::{Act, FIRST, Failure, Kit, Memory, PATIENCE, SECOND, THIRD, lock, spawn, with_priority};
use hoistway_io::executor::{
    Bound, Charge, Executor, Gate, GroupId, Limits, Priority, QueueOptions, Reason, Whose,
};
use std::{
    env, io,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

const SUBMITTERS: u64 = 3;
const SLOTS: u32 = 6;

/// A small generator of numbers: the same in every run, for the seed that is printed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }

    fn acts(&mut self) -> Vec<Act> {
        (0..self.below(4))
            .map(|_| match self.below(40) {
                0 => Act::Refuse(io::ErrorKind::NotFound),
                1 => Act::Panic,
                2 => Act::Fail("a fault"),
                3..=5 => Act::Refuse(io::ErrorKind::Interrupted),
                6..=7 => Act::PutBack,
                8..=13 => Act::Keep,
                14..=20 => Act::HandOver(SECOND, Charge { bytes: 1, slots: 1 }),
                _ => Act::Move,
            })
            .collect()
    }
}

#[test]
#[ignore = "takes 10 seconds, or as many as HOISTWAY_SOAK_SECONDS says: just soak-executor"]
fn soak() {
    // The hook would print a backtrace for each fault.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if info.payload_as_str() != Some("a handler that panics") {
            hook(info);
        }
    }));
    let seconds = env::var("HOISTWAY_SOAK_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(10));
    let mut rounds = 0;
    while Instant::now() < end {
        round(rounds, Duration::from_secs(5).min(end.saturating_duration_since(Instant::now())));
        rounds += 1;
    }
    let _ = std::panic::take_hook();
}

/// Some seconds of one scheduler, which then must be empty, or is closed at its busiest.
fn round(seed: u64, duration: Duration) {
    let queues = [
        QueueOptions { slots: Some(SLOTS), hands_over_to: vec![SECOND] },
        QueueOptions { slots: Some(SLOTS), ..QueueOptions::default() },
        QueueOptions::default(),
    ];
    let in_flight =
        Bound { rest_bytes: 30, rest_operations: 8, rest_bytes_beside_demand: 10, ..Bound::new(40, 12) };
    let limits = Limits { accepted: Bound::new(10_000, 400), in_flight };
    let scheduler = Kit::scheduler(limits, &queues);
    let executor = Executor::new(scheduler.clone());
    executor.spawn_watcher("watch").unwrap();
    for _ in 0..2 {
        spawn(&executor, &[FIRST], Memory::new(1));
        spawn(&executor, &[SECOND, FIRST], Memory::new(4));
        spawn(&executor, &[THIRD], Memory::new(2));
    }
    let (is_over, submitted, refused) = (AtomicBool::new(false), AtomicU32::new(0), AtomicU32::new(0));
    let (kit, is_closed_early) = (scheduler.customer(), seed % 2 == 1);
    thread::scope(|scope| {
        for submitter in 0..SUBMITTERS {
            let (scheduler, is_over, submitted, refused) = (&scheduler, &is_over, &submitted, &refused);
            scope.spawn(move || {
                let mut random = Random(1 + seed * SUBMITTERS + submitter);
                let mut groups: Vec<GroupId> = Vec::new();
                while !is_over.load(Ordering::Relaxed) {
                    let number = submitted.fetch_add(1, Ordering::Relaxed);
                    let acts: Vec<_> = (0..random.below(5)).map(|_| random.acts()).collect();
                    let acts: Vec<_> = acts.iter().map(Vec::as_slice).collect();
                    let mut submission =
                        kit.group(number, [FIRST, SECOND, THIRD][random.below(3) as usize], &acts);
                    for operation in &mut submission.operations {
                        operation.charge.bytes = random.below(12);
                        operation.charge.slots = random.below(3) as u32;
                    }
                    submission.tag = submitter;
                    submission.gate = [Gate::Open, Gate::Stages, Gate::Below(1)][random.below(3) as usize];
                    let in_some_time = || Instant::now() + Duration::from_micros(500);
                    submission.deadline = (random.below(8) == 0).then(in_some_time);
                    submission.event = (random.below(8) == 0).then(|| random.below(50) as u32);
                    let submission = with_priority(submission, Priority::ALL[random.below(3) as usize]);
                    match scheduler.submit(submission) {
                        Ok(id) => groups.push(id),
                        Err(why) => {
                            assert!(matches!(why.reason, Reason::Full | Reason::Closed), "{:?}", why.reason);
                            refused.fetch_add(1, Ordering::Relaxed);
                            thread::sleep(Duration::from_micros(200));
                        }
                    }
                    for id in groups.split_off(groups.len().saturating_sub(20)) {
                        match random.below(30) {
                            0 => _ = scheduler.cancel(Whose::Group(id)),
                            1 => scheduler.promote(Whose::Group(id)),
                            2 => scheduler.fail(id, Failure::Said("from outside")),
                            _ => scheduler.admit(id, 2 + random.below(4)),
                        }
                        groups.push(id);
                    }
                    if random.below(2000) == 0 {
                        scheduler.cancel(Whose::Tag(submitter));
                    }
                }
                groups.into_iter().for_each(|id| scheduler.admit(id, u64::MAX));
            });
        }
        // A device, which copies for a while, and reaches events.
        scope.spawn(|| {
            let mut random = Random(99 + seed);
            let begin = Instant::now();
            while begin.elapsed() < duration {
                lock(&kit.reached).insert(random.below(50) as u32);
                end_kept(kit);
                let figures = scheduler.figures();
                assert!(figures.in_flight <= in_flight.operations, "{figures:?}");
                assert!(figures.in_flight_bytes <= in_flight.bytes, "{figures:?}");
                thread::sleep(Duration::from_micros(50));
            }
            is_over.store(true, Ordering::Relaxed);
        });
    });
    if is_closed_early {
        scheduler.close(Reason::Closed);
    }
    lock(&kit.reached).extend(0..50);
    let accepted = submitted.into_inner() - refused.into_inner();
    let begin = Instant::now();
    while kit.ends().len() < accepted as usize {
        assert!(begin.elapsed() < PATIENCE, "seed {seed}: {:?}", scheduler.figures());
        // Groups that were refused room at first are admitted by their submitters, which are done.
        end_kept(kit);
        thread::sleep(Duration::from_millis(1));
    }
    scheduler.seal();
    drop(executor);
    let mut ends = kit.ends();
    let count = ends.len();
    ends.sort_by_key(|(group, _)| *group);
    ends.dedup_by_key(|(group, _)| *group);
    assert_eq!((ends.len(), count), (accepted as usize, accepted as usize), "groups end once");
    assert!(!ends.iter().any(|(_, end)| *end == Err(Failure::Said("its operations outlive it"))));
    assert_eq!(kit.live(), 0);
    let good = ends.iter().filter(|(_, end)| end.is_ok()).count();
    eprintln!("seed {seed}: {accepted} groups, of which {good} ended well: {:?}", scheduler.figures().begun);
}

fn end_kept(kit: &Kit) {
    for (group, ticket) in kit.take_kept() {
        ticket.end(if group % 50 == 0 { Err(Failure::Said("a copy failed")) } else { Ok(()) });
    }
}
