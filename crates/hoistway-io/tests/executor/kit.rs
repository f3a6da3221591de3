//! A customer whose operations follow a script, and a lane in memory.

use hoistway_io::{
    executor::{
        Carried, Charge, Customer, Executor, Flight, GroupId, Handler, InFlightLimit, Limits, Next,
        Operation, Patience, Priority, QueueId, QueueOptions, Reason, Scheduler, Served, Service, Submission,
        Ticket,
    },
    lane::{Done, Lane},
};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::{Wake, Waker},
    time::{Duration, Instant},
};

pub(crate) const FIRST: QueueId = QueueId(0);
pub(crate) const SECOND: QueueId = QueueId(1);
pub(crate) const THIRD: QueueId = QueueId(2);

/// Longer than anything takes that is not stuck.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What happens to an operation next.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Act {
    /// The lane makes an attempt that moves something.
    Move,
    /// The lane makes an attempt that fails. Interruptions are followed by the next act.
    Refuse(io::ErrorKind),
    HandOver(QueueId, Charge),
    PutBack,
    GiveUp,
    /// A device keeps the ticket: see [`Kit::kept`].
    Keep,
    Panic,
    /// The operation ends with an error.
    Fail(&'static str),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Failure {
    Reason(Reason),
    Io(io::ErrorKind),
    Said(&'static str),
}

impl From<Reason> for Failure {
    fn from(reason: Reason) -> Self {
        Self::Reason(reason)
    }
}

/// An operation of group `group`.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) group: u32,
    pub(crate) number: u32,
    pub(crate) acts: VecDeque<Act>,
    next_result: Option<io::ErrorKind>,
    live: Arc<Mutex<HashMap<u32, usize>>>,
}

impl Drop for Job {
    fn drop(&mut self) {
        *lock(&self.live).entry(self.group).or_default() -= 1;
    }
}

#[derive(Default)]
pub(crate) struct Kit {
    /// Operations of each group that are not dropped.
    live: Arc<Mutex<HashMap<u32, usize>>>,
    ends: Mutex<Vec<(u32, Result<(), Failure>)>>,
    changed: Condvar,
    /// Group and number of operations, in the order in which they begin.
    pub(crate) begun: Mutex<Vec<(u32, u32)>>,
    pub(crate) kept: Mutex<Vec<(u32, Ticket<Kit>)>>,
    /// Events that devices have reached, and those that cannot be asked for.
    pub(crate) reached: Mutex<HashSet<u32>>,
    pub(crate) broken_events: Mutex<HashSet<u32>>,
    /// Groups whose end panics.
    pub(crate) panicking: Mutex<HashSet<u32>>,
}

impl Customer for Kit {
    type Operation = Job;
    type Group = u32;
    type Event = u32;
    type Error = Failure;

    fn ended(&self, group: u32, result: Result<(), Failure>) {
        let live = lock(&self.live).get(&group).copied().unwrap_or(0);
        let result = if live == 0 { result } else { Err(Failure::Said("its operations outlive it")) };
        lock(&self.ends).push((group, result));
        self.changed.notify_all();
        if lock(&self.panicking).contains(&group) {
            panic!("an end that panics");
        }
    }

    fn is_reached(&self, event: &u32) -> Result<bool, Failure> {
        if lock(&self.broken_events).contains(event) {
            return Err(Failure::Said("the device is lost"));
        }
        Ok(lock(&self.reached).contains(event))
    }
}

impl Kit {
    pub(crate) fn scheduler(limits: Limits, queues: &[QueueOptions]) -> Arc<Scheduler<Self>> {
        Scheduler::new(Self::default(), limits, queues)
    }

    /// A group with an operation for each list of acts, each of one byte.
    pub(crate) fn group(&self, group: u32, queue: QueueId, acts: &[&[Act]]) -> Submission<Self> {
        let operations = acts.iter().enumerate().map(|(number, acts)| Operation {
            queue,
            charge: Charge::of_bytes(1),
            order: number as u64,
            content: self.job(group, number as u32, acts),
        });
        Submission::new(group, operations.collect())
    }

    pub(crate) fn job(&self, group: u32, number: u32, acts: &[Act]) -> Job {
        *lock(&self.live).entry(group).or_default() += 1;
        let acts = acts.iter().cloned().collect();
        Job { group, number, acts, next_result: None, live: self.live.clone() }
    }

    /// How groups have ended, in the order of their ends.
    pub(crate) fn ends(&self) -> Vec<(u32, Result<(), Failure>)> {
        lock(&self.ends).clone()
    }

    /// How a group has ended. Fails if it has not, or twice.
    pub(crate) fn end_of(&self, group: u32) -> Result<(), Failure> {
        let ends = self.ends();
        let mut of_group = ends.iter().filter(|(of_group, _)| *of_group == group);
        let (_, end) = of_group.next().unwrap_or_else(|| panic!("group {group} has not ended"));
        assert_eq!(of_group.next(), None, "group {group} has ended twice");
        end.clone()
    }

    /// Waits until so many groups have ended.
    pub(crate) fn wait(&self, count: usize) {
        let begin = Instant::now();
        let mut ends = lock(&self.ends);
        while ends.len() < count {
            assert!(begin.elapsed() < PATIENCE, "{} of {count} groups have ended: {ends:?}", ends.len());
            ends = self.changed.wait_timeout(ends, PATIENCE).unwrap().0;
        }
    }

    pub(crate) fn take_kept(&self) -> Vec<(u32, Ticket<Self>)> {
        std::mem::take(&mut *lock(&self.kept))
    }

    pub(crate) fn live(&self) -> usize {
        lock(&self.live).values().sum()
    }
}

/// Follows the scripts of operations.
#[derive(Default)]
pub(crate) struct Script;

impl Script {
    fn follow(mut flight: Flight<Kit>) -> Next<Kit> {
        let Some(act) = flight.content.acts.pop_front() else {
            flight.end(Ok(()));
            return Next::Ended;
        };
        flight.content.next_result = None;
        match act {
            Act::Move => return Next::Carry(flight),
            Act::Refuse(kind) => {
                flight.content.next_result = Some(kind);
                return Next::Carry(flight);
            }
            Act::HandOver(queue, charge) => return Next::HandOver(flight, queue, charge),
            Act::PutBack => return Next::PutBack(flight),
            Act::GiveUp => return Next::GiveUp(flight),
            Act::Keep => {
                let scheduler = flight.ticket().scheduler().clone();
                let (job, ticket) = flight.into_parts();
                let group = job.group;
                drop(job);
                lock(&scheduler.customer().kept).push((group, ticket));
                scheduler.customer().changed.notify_all();
            }
            Act::Panic => panic!("a handler that panics"),
            Act::Fail(why) => flight.end(Err(Failure::Said(why))),
        }
        Next::Ended
    }
}

impl Handler<Kit> for Script {
    fn begin(&mut self, flight: Flight<Kit>) -> Next<Kit> {
        let scheduler = flight.ticket().scheduler().clone();
        lock(&scheduler.customer().begun).push((flight.content.group, flight.content.number));
        Self::follow(flight)
    }

    fn settle(&mut self, flight: Flight<Kit>, result: io::Result<usize>) -> Next<Kit> {
        match result {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                flight.end(Err(Failure::Io(error.kind())));
                Next::Ended
            }
            _ => Self::follow(flight),
        }
    }
}

/// Says when a lane's attempts end, and wakes lanes that wait for that.
#[derive(Default)]
pub(crate) struct Pace {
    state: Mutex<PaceState>,
    changed: Condvar,
}

#[derive(Default)]
struct PaceState {
    permits: usize,
    is_woken: bool,
    has_failed: bool,
    waits: usize,
}

impl Pace {
    /// Lets so many attempts end.
    pub(crate) fn permit(&self, count: usize) {
        lock(&self.state).permits += count;
        self.changed.notify_all();
    }

    pub(crate) fn fail(&self) {
        lock(&self.state).has_failed = true;
        self.changed.notify_all();
    }

    /// Waits until a lane has waited so often.
    pub(crate) fn wait_for_waits(&self, count: usize) {
        let mut state = lock(&self.state);
        while state.waits < count {
            let waited = self.changed.wait_timeout(state, PATIENCE).unwrap();
            assert!(!waited.1.timed_out(), "no lane waits");
            state = waited.0;
        }
    }
}

impl Wake for Pace {
    fn wake(self: Arc<Self>) {
        lock(&self.state).is_woken = true;
        self.changed.notify_all();
    }
}

/// A lane in memory: attempts end in order, at once or as its pace says.
pub(crate) struct Memory {
    ops: VecDeque<Carried<Job>>,
    capacity: usize,
    pace: Option<Arc<Pace>>,
    has_waker: bool,
}

impl Memory {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { ops: VecDeque::new(), capacity, pace: None, has_waker: false }
    }

    pub(crate) fn paced(capacity: usize, pace: &Arc<Pace>) -> Self {
        Self { pace: Some(pace.clone()), ..Self::new(capacity) }
    }

    pub(crate) fn with_waker(mut self) -> Self {
        self.has_waker = true;
        self
    }
}

impl Lane<Carried<Job>> for Memory {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn in_flight(&self) -> usize {
        self.ops.len()
    }

    fn push(&mut self, op: Carried<Job>) {
        assert!(self.ops.len() < self.capacity, "a lane has more than it has room for");
        self.ops.push_back(op);
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done<Carried<Job>>>) -> io::Result<()> {
        if let Some(pace) = &self.pace {
            let mut state = lock(&pace.state);
            state.waits += 1;
            pace.changed.notify_all();
            loop {
                if state.has_failed {
                    return Err(io::Error::from(io::ErrorKind::BrokenPipe));
                }
                if state.permits > 0 {
                    state.permits -= 1;
                    break;
                }
                if std::mem::take(&mut state.is_woken) {
                    return Ok(());
                }
                state = pace.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        if let Some(op) = self.ops.pop_front() {
            let result = op.content.next_result.map_or(Ok(1), |kind| Err(kind.into()));
            done.push(Done { op, result });
        }
        Ok(())
    }

    fn waker(&self) -> Option<Waker> {
        self.pace.clone().filter(|_| self.has_waker).map(Waker::from)
    }
}

/// Serves queues on this thread, until nothing may begin.
pub(crate) fn serve_inline(scheduler: &Arc<Scheduler<Kit>>, queues: &[QueueId], capacity: usize) -> Served {
    let service = Service { queues, limit: InFlightLimit::fixed(capacity), patience: Patience::None };
    scheduler.serve(Memory::new(capacity), &mut Script, service)
}

/// Starts a thread that serves queues until they are over.
pub(crate) fn spawn(executor: &Executor<Kit>, queues: &'static [QueueId], lane: Memory) {
    let work = move |scheduler: &Arc<Scheduler<Kit>>| {
        let limit = InFlightLimit::fixed(lane.capacity);
        scheduler.serve(lane, &mut Script, Service { queues, limit, patience: Patience::UntilOver });
    };
    executor.spawn("kit", work).unwrap();
}

pub(crate) fn with_priority(mut submission: Submission<Kit>, priority: Priority) -> Submission<Kit> {
    submission.priority = priority;
    submission
}

pub(crate) fn submit(scheduler: &Scheduler<Kit>, submission: Submission<Kit>) -> GroupId {
    scheduler.submit(submission).unwrap()
}

/// Waits until something is so.
pub(crate) fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
