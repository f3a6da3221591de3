//! The state of a scheduler: groups, their operations, the threads that serve them. Pure: no locks, no clock.
#![forbid(unsafe_code)]

use super::{
    admission::{Limits, Room, Verdict},
    customer::{Customer, Reason},
    operation::{Cancelled, Charge, Gate, GroupId, Operation, Priority, QueueId, Submission, Whose},
    queues::{Chosen, Freed, Position, QueueOptions, QueueSet, Queues, Waiting},
    sync::Condvar,
};
use std::{
    collections::{BTreeSet, HashMap, VecDeque, hash_map::Entry},
    mem,
    sync::Arc,
    task::Waker,
    time::Instant,
};

/// How much a scheduler has to do, and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Groups that have not ended.
    pub groups: usize,
    /// Operations that wait for a lane or for room.
    pub waiting: usize,
    /// Operations that have begun and not ended.
    pub in_flight: usize,
    /// Bytes of the operations in flight.
    pub in_flight_bytes: u64,
    /// Operations that have begun, by priority. One that was handed over begins once more.
    pub begun: [u64; 3],
    /// Slots that are never used again, as the system or a device may still write to them.
    pub lost_slots: u32,
}

/// A group that has not ended.
struct Group<C: Customer> {
    data: C::Group,
    tag: u64,
    priority: Priority,
    deadline: Option<Instant>,
    event: Option<C::Event>,
    gate: Gate,
    /// Number of its first operation; the others follow.
    first: u64,
    len: u64,
    /// Operations that have not ended.
    unended: usize,
    /// Operations that its gate or its event holds back: its last ones, in their order.
    held: VecDeque<Operation<C::Operation>>,
    error: Option<C::Error>,
    /// Why operations that return to their queue do not begin again.
    cancelled: Option<Reason>,
    accepted_as: Priority,
    accepted_bytes: u64,
}

/// A thread that serves queues.
pub(super) struct Worker {
    serves: QueueSet,
    /// Where it sleeps with an empty lane.
    pub(super) condvar: Arc<Condvar>,
    parked: Option<Parked>,
    /// The number of operations that had ended when it began its last one.
    pub(super) began_at: u64,
    /// Set if it has put an operation back: it is woken once more operations than these have ended.
    pub(super) held_up_at: Option<u64>,
}

/// Where a thread waits.
pub(super) enum Parked {
    /// It waits for its condition variable.
    Idle(Arc<Condvar>),
    /// It waits in its lane, which has room.
    InLane(Waker),
}

impl Parked {
    pub(super) fn wake(self) {
        match self {
            Self::Idle(condvar) => condvar.notify_one(),
            Self::InLane(waker) => waker.wake(),
        }
    }
}

/// Operations that wait for threads since a moment ago.
///
/// The thread that submits them wakes a thread for each that is in demand, but no more than there are other processors: a thread
/// beyond these would have to take the processor of the one that wakes it, before the others are awake. It wakes one thread for
/// all operations that are not in demand, as their caller has work of its own. Each thread that begins an operation wakes the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wakes {
    demand: usize,
    others: usize,
}

impl Wakes {
    pub(super) fn and(self, more: Self) -> Self {
        Self { demand: self.demand + more.demand, others: self.others + more.others }
    }
}

/// A group that has ended, with its result.
pub(super) struct Ended<C: Customer> {
    pub(super) data: C::Group,
    pub(super) result: Result<(), C::Error>,
}

/// Operations of a group that were taken out before they began.
pub(super) struct Removed<O> {
    pub(super) group: GroupId,
    pub(super) contents: Vec<O>,
}

pub(super) struct State<C: Customer> {
    pub(super) queues: Queues<C::Operation>,
    accepted: Room,
    groups: HashMap<GroupId, Group<C>>,
    by_tag: BTreeSet<(u64, GroupId)>,
    deadlines: BTreeSet<(Instant, GroupId)>,
    /// Groups that wait for each event.
    awaited: HashMap<C::Event, Vec<GroupId>>,
    workers: Vec<Option<Worker>>,
    /// Threads that wait. The last is woken first: its caches are warm.
    parked: Vec<usize>,
    /// Threads that must be woken once the lock is free.
    pub(super) woken: Vec<Parked>,
    /// Threads that the thread of a submission wakes at most.
    most_wakes: usize,
    next_group: u64,
    next_number: u64,
    begun: [u64; 3],
    /// Operations that have ended, or were handed over.
    pub(super) ends: u64,
    pub(super) is_watched: bool,
    is_sealed: bool,
    pub(super) closed: Option<Reason>,
}

impl<C: Customer> State<C> {
    /// A submission wakes `most_wakes` threads at most.
    pub(super) fn new(limits: Limits, queues: &[QueueOptions], most_wakes: usize) -> Self {
        Self {
            most_wakes,
            queues: Queues::new(queues, Room::new(limits.in_flight)),
            accepted: Room::new(limits.accepted),
            groups: HashMap::new(),
            by_tag: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            awaited: HashMap::new(),
            workers: Vec::new(),
            parked: Vec::new(),
            woken: Vec::new(),
            next_group: 0,
            next_number: 0,
            begun: [0; 3],
            ends: 0,
            is_watched: false,
            is_sealed: false,
            closed: None,
        }
    }

    pub(super) fn figures(&self) -> Figures {
        Figures {
            groups: self.groups.len(),
            waiting: self.queues.waiting(),
            in_flight: self.queues.room().operations(),
            in_flight_bytes: self.queues.room().bytes(),
            begun: self.begun,
            lost_slots: self.queues.lost_slots(),
        }
    }

    /// Returns why a group is refused, if it is.
    pub(super) fn refusal(&self, submission: &Submission<C>) -> Option<Reason> {
        if let Some(reason) = &self.closed {
            return Some(reason.clone());
        }
        let is_served = submission.operations.iter().all(|operation| self.queues.has(operation.queue));
        if self.is_sealed || !is_served || submission.event.is_some() && !self.is_watched {
            return Some(Reason::Unserved);
        }
        let (bytes, count) = sum(&submission.operations);
        match self.accepted.verdict(submission.priority, bytes, count) {
            Verdict::Fits => None,
            Verdict::Full | Verdict::RestIsFull => Some(Reason::Full),
        }
    }

    /// Accepts a group that is not refused. Returns how many threads should be [woken](State::wake) for it.
    pub(super) fn accept(&mut self, submission: Submission<C>) -> (GroupId, Wakes) {
        let Submission { group: data, mut operations, tag, priority, deadline, event, gate } = submission;
        let id = GroupId(self.next_group);
        self.next_group += 1;
        let (bytes, count) = sum(&operations);
        self.accepted.take(priority, bytes, count);
        // Those of one order stay in the order in which they were given.
        operations.sort_by_key(|operation| operation.order);
        operations.iter().for_each(|operation| self.queues.expect(operation.queue));
        self.by_tag.insert((tag, id));
        self.deadlines.extend(deadline.map(|deadline| (deadline, id)));
        if let Some(event) = event.clone() {
            self.awaited.entry(event).or_default().push(id);
        }
        let group = Group {
            data,
            tag,
            priority,
            deadline,
            event,
            gate,
            first: self.next_number,
            len: count as u64,
            unended: count,
            held: operations.into(),
            error: None,
            cancelled: None,
            accepted_as: priority,
            accepted_bytes: bytes,
        };
        self.next_number += group.len;
        self.groups.insert(id, group);
        (id, self.let_through(id))
    }

    /// Moves operations of a group to their queues that its gate and its event let through, and wakes threads for them.
    fn release(&mut self, id: GroupId) {
        let wakes = self.let_through(id);
        self.wake_for(wakes);
    }

    /// Wakes threads for operations that were let through.
    pub(super) fn wake_for(&mut self, Wakes { demand, others }: Wakes) {
        self.wake(demand.min(self.most_wakes).max((demand + others).min(1)));
    }

    /// Moves operations of a group to their queues that its gate and its event let through.
    fn let_through(&mut self, id: GroupId) -> Wakes {
        let none = Wakes::default();
        let Some(group) = self.groups.get_mut(&id) else { return none };
        let (gate, stage) = (group.gate, group.held.front().map(|held| held.order));
        let is_in_stage = gate == Gate::Stages && group.unended > group.held.len();
        if group.event.is_some() || group.error.is_some() || is_in_stage {
            return none;
        }
        let may_begin = |held: &mut Operation<C::Operation>| match gate {
            Gate::Open => true,
            Gate::Below(end) => held.order < end,
            Gate::Stages => Some(held.order) == stage,
        };
        let mut index = group.len - group.held.len() as u64;
        let first = index;
        while let Some(Operation { queue, charge, content, .. }) = group.held.pop_front_if(may_begin) {
            let waiting = Waiting { content, charge, group: id, index };
            self.queues.insert((queue, queue), group.priority, group.first + index, waiting);
            index += 1;
        }
        let count = (index - first) as usize;
        match group.priority {
            Priority::Demand => Wakes { demand: count, others: 0 },
            _ => Wakes { demand: 0, others: count },
        }
    }

    /// Raises the gate of a group that is bounded.
    pub(super) fn admit(&mut self, id: GroupId, end: u64) {
        if let Some(group) = self.groups.get_mut(&id)
            && let Gate::Below(bound) = &mut group.gate
            && *bound < end
        {
            *bound = end;
            self.release(id);
        }
    }

    /// Makes groups demand.
    pub(super) fn promote(&mut self, whose: Whose) {
        let mut wakes = Wakes::default();
        for id in self.select(whose) {
            let Some(group) = self.groups.get_mut(&id).filter(|group| group.priority != Priority::Demand)
            else {
                continue;
            };
            group.priority = Priority::Demand;
            let (old, new) = (group.first, self.next_number);
            // Behind what is in demand already.
            group.first = new;
            self.next_number += group.len;
            let moved = self.queues.remove(old..old + group.len);
            wakes = wakes.and(Wakes { demand: moved.len(), others: 0 });
            for (queue, waiting) in moved {
                let number = new + waiting.index;
                self.queues.insert((queue, queue), Priority::Demand, number, waiting);
            }
        }
        self.wake_for(wakes);
    }

    /// Returns the groups whose deadlines have passed.
    pub(super) fn expired(&self, now: Instant) -> Vec<GroupId> {
        self.deadlines.iter().take_while(|(deadline, _)| *deadline <= now).map(|(_, id)| *id).collect()
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// Returns the events that groups wait for.
    pub(super) fn events(&self) -> Vec<C::Event> {
        self.awaited.keys().cloned().collect()
    }

    /// Returns a group that waits for an event.
    pub(super) fn awaiting(&self, event: &C::Event) -> Option<GroupId> {
        self.awaited.get(event)?.first().copied()
    }

    pub(super) fn has_events(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// Releases the groups that wait for an event.
    pub(super) fn reached(&mut self, event: &C::Event) {
        for id in self.awaited.remove(event).unwrap_or_default() {
            if let Some(group) = self.groups.get_mut(&id) {
                group.event = None;
                self.release(id);
            }
        }
    }

    /// Returns the groups that are selected.
    pub(super) fn select(&self, whose: Whose) -> Vec<GroupId> {
        match whose {
            Whose::Group(id) => self.groups.contains_key(&id).then_some(id).into_iter().collect(),
            Whose::Tag(tag) => {
                let tagged = self.by_tag.range((tag, GroupId(0))..=(tag, GroupId(u64::MAX)));
                tagged.map(|(_, id)| *id).collect()
            }
        }
    }

    /// Returns all groups.
    pub(super) fn all(&self) -> Vec<GroupId> {
        self.groups.keys().copied().collect()
    }

    /// Removes the operations of a group that have not begun. They count until [`State::settle`] is called after they are
    /// dropped. If there are none, the group fails only if one returns to its queue.
    pub(super) fn cancel(&mut self, id: GroupId, reason: Reason) -> (Removed<C::Operation>, Cancelled) {
        let Some(group) = self.groups.get_mut(&id) else {
            return (Removed { group: id, contents: Vec::new() }, Cancelled::default());
        };
        group.cancelled.get_or_insert_with(|| reason.clone());
        let waiting = self.queues.remove(group.first..group.first + group.len);
        let waiting = waiting.into_iter().map(|(queue, waiting)| (queue, waiting.content));
        let held = mem::take(&mut group.held).into_iter().map(|held| (held.queue, held.content));
        let contents = waiting.chain(held).map(|(queue, content)| {
            self.queues.forget(queue);
            content
        });
        let contents: Vec<_> = contents.collect();
        let count = Cancelled { not_begun: contents.len(), in_flight: group.unended - contents.len() };
        if !contents.is_empty() {
            group.error.get_or_insert_with(|| reason.into());
        }
        let watched = (group.deadline.take(), group.event.take());
        self.stop_watching(id, watched);
        // What it claimed is free, and its queues may be over.
        self.wake(1);
        self.wake_if_over();
        (Removed { group: id, contents }, count)
    }

    /// Forgets the deadline and the event of a group.
    fn stop_watching(&mut self, id: GroupId, (deadline, event): (Option<Instant>, Option<C::Event>)) {
        if let Some(deadline) = deadline {
            self.deadlines.remove(&(deadline, id));
        }
        if let Some(event) = event
            && let Some(mut groups) = self.awaited.remove(&event)
        {
            groups.retain(|other| *other != id);
            // A clone of a group that still waits: what that of this one kept is free.
            let first = groups.first().and_then(|first| self.groups.get(first)?.event.clone());
            self.awaited.extend(first.map(|event| (event, groups)));
        }
    }

    /// Fails a group and removes its operations that have not begun.
    pub(super) fn fail(&mut self, id: GroupId, error: C::Error) -> Removed<C::Operation> {
        let Some(group) = self.groups.get_mut(&id) else {
            return Removed { group: id, contents: Vec::new() };
        };
        match group.error {
            // The first error stands, and it removed them.
            Some(_) => Removed { group: id, contents: Vec::new() },
            None => {
                group.error = Some(error);
                self.cancel(id, Reason::Cancelled).0
            }
        }
    }

    /// Counts operations of a group that have ended and are dropped. Returns the group if they were its last.
    pub(super) fn settle(&mut self, id: GroupId, count: usize) -> Option<Ended<C>> {
        let Entry::Occupied(mut entry) = self.groups.entry(id) else { return None };
        let group = entry.get_mut();
        group.unended -= count;
        if group.unended > 0 {
            if group.gate == Gate::Stages && group.unended == group.held.len() {
                self.release(id);
            }
            return None;
        }
        let group = entry.remove();
        self.by_tag.remove(&(group.tag, id));
        self.stop_watching(id, (group.deadline, group.event));
        self.accepted.give(group.accepted_as, group.accepted_bytes, group.len as usize);
        Some(Ended { data: group.data, result: group.error.map_or(Ok(()), Err) })
    }

    /// Begins the next operation of these queues, if one may begin now.
    pub(super) fn begin(&mut self, serves: QueueSet) -> Chosen<C::Operation> {
        let chosen = self.queues.begin(serves);
        if let Chosen::Begun(position, _) = &chosen {
            self.begun[position.priority as usize] += 1;
            // Others may begin what this thread leaves.
            self.wake(1);
        }
        chosen
    }

    /// Frees the room of an operation that has begun.
    pub(super) fn free(&mut self, position: &Position, freed: Freed) {
        self.queues.free(position, freed);
    }

    /// Slots that were lost can be used again.
    pub(super) fn regain(&mut self, queue: QueueId, slots: u32) {
        self.queues.regain(queue, slots);
        // Threads that found no room look again.
        self.ends += 1;
        self.wake(1);
    }

    /// Ends an operation that has begun, whose room is free.
    pub(super) fn forget(&mut self, position: &Position) {
        self.queues.forget(position.queue);
        self.ends += 1;
        self.wake(1);
        self.wake_if_over();
    }

    /// Puts an operation that has begun, and whose room is free, into `to`. Returns it with the reason if it must not begin
    /// again.
    pub(super) fn wait_again(
        &mut self,
        position: &Position,
        to: QueueId,
        charge: Charge,
        content: C::Operation,
    ) -> Result<(), (C::Operation, Reason)> {
        let group = self.groups.get(&position.group);
        let Some(group) = group.filter(|_| self.queues.hands_over(position.queue, to)) else {
            return Err((content, Reason::Unserved));
        };
        if let Some(reason) = &group.cancelled {
            return Err((content, reason.clone()));
        }
        let Position { group: id, index, queue: from, .. } = *position;
        let (priority, number) = (group.priority, group.first + index);
        let waiting = Waiting { content, charge, group: id, index };
        self.queues.insert((from, to), priority, number, waiting);
        self.wake(1);
        self.wake_if_over();
        Ok(())
    }

    pub(super) fn redirect(&mut self, from: QueueId, to: QueueId) -> bool {
        let is_new = self.queues.has(from) && self.queues.has(to) && self.queues.redirect(from, to);
        if is_new {
            self.wake(usize::MAX);
            self.wake_if_over();
        }
        is_new
    }

    /// No further groups are submitted.
    pub(super) fn seal(&mut self) {
        self.is_sealed = true;
        self.wake_if_over();
    }

    /// Wakes all threads. The first reason stands, and is returned.
    pub(super) fn close(&mut self, reason: Reason) -> Reason {
        let reason = self.closed.get_or_insert(reason).clone();
        while let Some(worker) = self.parked.pop() {
            self.unpark(worker);
        }
        reason
    }

    /// Returns whether nothing is left to watch: it is closed, or sealed and without groups.
    pub(super) fn has_ended(&self) -> bool {
        self.closed.is_some() || self.is_sealed && self.groups.is_empty()
    }

    /// Returns whether no operation will come to these queues any more.
    pub(super) fn is_over(&self, serves: QueueSet) -> bool {
        self.closed.is_some() || self.is_sealed && self.queues.are_over(serves)
    }

    /// Adds a thread that serves queues.
    pub(super) fn enlist(&mut self, serves: QueueSet) -> usize {
        let worker =
            Worker { serves, condvar: Arc::new(Condvar::new()), parked: None, began_at: 0, held_up_at: None };
        match self.workers.iter().position(Option::is_none) {
            Some(free) => {
                self.workers[free] = Some(worker);
                free
            }
            None => {
                self.workers.push(Some(worker));
                self.workers.len() - 1
            }
        }
    }

    pub(super) fn discharge(&mut self, worker: usize) {
        self.leave(worker);
        self.workers[worker] = None;
    }

    pub(super) fn worker(&mut self, worker: usize) -> Option<&mut Worker> {
        self.workers.get_mut(worker)?.as_mut()
    }

    /// Notes that a thread waits for work.
    pub(super) fn park(&mut self, worker: usize, parked: Parked) {
        if let Some(worker_state) = self.worker(worker) {
            worker_state.parked = Some(parked);
            self.parked.push(worker);
        }
    }

    pub(super) fn is_parked(&mut self, worker: usize) -> bool {
        self.worker(worker).is_some_and(|worker_state| worker_state.parked.is_some())
    }

    /// Notes that a thread does not wait any more.
    pub(super) fn leave(&mut self, worker: usize) {
        if let Some(worker_state) = self.worker(worker)
            && worker_state.parked.take().is_some()
        {
            self.parked.retain(|parked| *parked != worker);
        }
    }

    fn unpark(&mut self, worker: usize) {
        let parked = self.worker(worker).and_then(|worker_state| worker_state.parked.take());
        self.woken.extend(parked);
    }

    /// Wakes as many threads that could begin something. Each that begins one wakes the next.
    fn wake(&mut self, most: usize) {
        let (mut woken, mut position, mut idle_queues) = (0, self.parked.len(), None);
        while position > 0 && woken < most && self.queues.waiting() > 0 {
            position -= 1;
            let number = self.parked[position];
            let Some(worker) = &self.workers[number] else { continue };
            let (serves, held_up_at) = (worker.serves, worker.held_up_at);
            if idle_queues == Some(serves) || held_up_at == Some(self.ends) {
                continue;
            }
            if self.queues.may_begin(serves) {
                self.parked.remove(position);
                self.unpark(number);
                woken += 1;
            } else {
                idle_queues = Some(serves);
            }
        }
    }

    /// Wakes the threads whose queues are over.
    fn wake_if_over(&mut self) {
        if !self.is_sealed {
            return;
        }
        let mut position = self.parked.len();
        while position > 0 {
            position -= 1;
            let number = self.parked[position];
            if self.workers[number].as_ref().is_some_and(|worker| self.queues.are_over(worker.serves)) {
                self.parked.remove(position);
                self.unpark(number);
            }
        }
    }
}

impl Worker {
    /// Keeps the thread from beginning operations until one has ended since it began its last: what that lacked may be free
    /// then.
    pub(super) fn hold_up(&mut self) {
        self.held_up_at = Some(self.began_at);
    }

    pub(super) fn is_held_up(&self, ends: u64) -> bool {
        self.held_up_at == Some(ends)
    }
}

fn sum<O>(operations: &[Operation<O>]) -> (u64, usize) {
    let bytes = operations.iter().fold(0u64, |sum, operation| sum.saturating_add(operation.charge.bytes));
    (bytes, operations.len())
}
