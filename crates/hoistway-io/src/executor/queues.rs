//! Operations that wait, and which of them is next. Pure: no locks, no clock.
//!
//! The order, in all queues together: more urgent operations first, and among these the one that was submitted first. One
//! rule prevents starvation: at most [`Priority::most_overtakings`] more urgent operations overtake an operation, or so many
//! times its bytes if they are larger. Then it is the next. If the next operation lacks room, no other takes that room.
#![forbid(unsafe_code)]

use super::{
    admission::{Room, Verdict},
    operation::{Charge, GroupId, Priority, QueueId},
};
use std::collections::BTreeMap;

/// Queues of a scheduler, at most.
pub(super) const MAX_QUEUES: usize = 8;
const PRIORITIES: usize = Priority::ALL.len();

/// A set of queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct QueueSet(u8);

impl QueueSet {
    pub(super) fn of(queues: &[QueueId]) -> Self {
        queues.iter().fold(Self::default(), |set, queue| set.with(*queue))
    }

    pub(super) fn with(self, queue: QueueId) -> Self {
        Self(self.0 | 1u8.checked_shl(queue.0.into()).unwrap_or(0))
    }

    pub(super) fn has(self, queue: QueueId) -> bool {
        self.0 & 1u8.checked_shl(queue.0.into()).unwrap_or(0) != 0
    }

    pub(super) fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn iter(self) -> impl Iterator<Item = QueueId> {
        (0..MAX_QUEUES as u8).map(QueueId).filter(move |queue| self.has(*queue))
    }
}

/// The properties of a queue.
#[derive(Clone, Debug, Default)]
pub struct QueueOptions {
    /// Staging slots that its operations share. `None` if they need none, or get them elsewhere.
    pub slots: Option<u32>,
    /// Queues that its handlers hand operations over to.
    pub hands_over_to: Vec<QueueId>,
}

/// An operation that waits.
#[derive(Debug)]
pub(super) struct Waiting<O> {
    pub(super) content: O,
    pub(super) charge: Charge,
    pub(super) group: GroupId,
    /// Its position in the group.
    pub(super) index: u64,
}

/// The place of an operation that has begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct Position {
    pub(super) group: GroupId,
    pub(super) index: u64,
    pub(super) queue: QueueId,
    pub(super) priority: Priority,
    pub(super) charge: Charge,
}

/// The answer to a thread that asks for an operation.
#[derive(Debug)]
pub(super) enum Chosen<O> {
    Begun(Position, O),
    /// The queue of this group's operation will never have enough slots for it.
    Impossible(GroupId),
    /// None may begin now.
    Nothing,
}

#[derive(Debug)]
struct Queue<O> {
    /// One map for each priority. The operation with the lowest number is the next.
    lines: [BTreeMap<u64, Waiting<O>>; PRIORITIES],
    /// What has begun while the first of a line waited.
    overtaken: [Overtaken; PRIORITIES],
    /// Slots that are free, and slots that are not lost.
    slots: Option<(u32, u32)>,
    /// Queues whose operations may be handed over to this one, and this one.
    feeders: QueueSet,
    /// The queue that replaces this one.
    redirected: Option<QueueId>,
    /// Operations that belong to it: held, waiting or begun.
    unended: usize,
}

/// More urgent operations that have begun while another waited.
#[derive(Clone, Copy, Debug, Default)]
struct Overtaken {
    operations: u32,
    bytes: u64,
}

/// The next state of an operation that frees its room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freed {
    /// It waits for room again.
    Waits,
    Ended,
    /// It has ended, and its slots are never free again.
    Lost,
}

/// The order in which operations are next, the lowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    /// Lines that were overtaken often enough come first, the least urgent first. The others follow by priority.
    class: usize,
    number: u64,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    rank: Rank,
    queue: QueueId,
    priority: Priority,
}

#[derive(Debug)]
pub(super) struct Queues<O> {
    queues: Vec<Queue<O>>,
    room: Room,
    /// The operation that waits for room, which others must leave to it.
    claim: Option<Candidate>,
    /// The operation that waits for room that is not reserved for demand. Demand may go before it.
    rest_claim: Option<Candidate>,
    waiting: usize,
    lost_slots: u32,
}

impl Priority {
    /// How many more urgent operations may begin while one of this priority is the first of its queue, or how many times its
    /// bytes, if they are larger: what moves in short steps has the share of what moves in long ones.
    pub const fn most_overtakings(self) -> u32 {
        match self {
            Self::Demand => 0,
            Self::Prefetch => 7,
            Self::Background => 63,
        }
    }
}

impl<O> Queues<O> {
    /// Makes at most [`MAX_QUEUES`] queues. Others are left out.
    pub(super) fn new(options: &[QueueOptions], room: Room) -> Self {
        let count = options.len().min(MAX_QUEUES);
        let mut feeders: Vec<QueueSet> =
            (0..count).map(|number| QueueSet::default().with(QueueId(number as u8))).collect();
        // As often as there are queues, so that every path is followed to its end.
        for _ in 0..count {
            for (from, options) in options.iter().enumerate().take(count) {
                for to in &options.hands_over_to {
                    let all = feeders[from];
                    if let Some(feeder) = feeders.get_mut(usize::from(to.0)) {
                        *feeder = feeder.union(all);
                    }
                }
            }
        }
        let queues = feeders.into_iter().zip(options).map(|(feeders, options)| Queue {
            lines: Default::default(),
            overtaken: Default::default(),
            slots: options.slots.map(|slots| (slots, slots)),
            feeders,
            redirected: None,
            unended: 0,
        });
        Self { queues: queues.collect(), room, claim: None, rest_claim: None, waiting: 0, lost_slots: 0 }
    }

    pub(super) fn has(&self, queue: QueueId) -> bool {
        usize::from(queue.0) < self.queues.len()
    }

    /// Whether operations of `from` may be handed over to `to`: threads of `to` wait for them.
    pub(super) fn hands_over(&self, from: QueueId, to: QueueId) -> bool {
        self.has(to) && self.queues[usize::from(self.resolve(to).0)].feeders.has(from)
    }

    /// Returns the number of operations that wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Returns the number of operations that wait in queues.
    pub(super) fn waiting_in(&self, queues: QueueSet) -> usize {
        let found = queues.iter().filter_map(|queue| self.queues.get(usize::from(queue.0)));
        found.flat_map(|queue| &queue.lines).map(BTreeMap::len).sum()
    }

    pub(super) fn room(&self) -> &Room {
        &self.room
    }

    pub(super) fn lost_slots(&self) -> u32 {
        self.lost_slots
    }

    /// Counts operations among those of a queue, before they wait there.
    pub(super) fn expect(&mut self, queue: QueueId) {
        self.queue(queue).unended += 1;
    }

    /// Operations of a queue have ended, or belong to another one. `true` if it has none any more.
    pub(super) fn forget(&mut self, queue: QueueId) -> bool {
        let queue = self.queue(queue);
        queue.unended -= 1;
        queue.unended == 0
    }

    /// Whether no operation can come to these queues any more, if no further ones are submitted.
    pub(super) fn are_over(&self, queues: QueueSet) -> bool {
        let found = queues.iter().filter_map(|queue| self.queues.get(usize::from(queue.0)));
        found
            .filter(|queue| queue.redirected.is_none())
            .all(|queue| queue.feeders.iter().all(|feeder| self.queues[usize::from(feeder.0)].unended == 0))
    }

    /// Adds an operation that counts among those of `from`, at the place that its number gives it.
    pub(super) fn insert(
        &mut self,
        (from, to): (QueueId, QueueId),
        priority: Priority,
        number: u64,
        waiting: Waiting<O>,
    ) {
        let to = self.resolve(to);
        self.queue(from).unended -= 1;
        self.queue(to).unended += 1;
        self.queue(to).lines[priority as usize].insert(number, waiting);
        self.waiting += 1;
    }

    /// Takes out the operations with these numbers, with their queues.
    pub(super) fn remove(&mut self, numbers: std::ops::Range<u64>) -> Vec<(QueueId, Waiting<O>)> {
        let mut removed = Vec::new();
        for (position, queue) in self.queues.iter_mut().enumerate() {
            for line in &mut queue.lines {
                while let Some((&number, _)) = line.range(numbers.clone()).next() {
                    removed.extend(line.remove(&number).map(|waiting| (QueueId(position as u8), waiting)));
                }
            }
        }
        self.waiting -= removed.len();
        removed
    }

    /// Moves the operations of `from`, and those that will come to it, to `to`. `false` if `from` is redirected already, or
    /// `to` to it.
    pub(super) fn redirect(&mut self, from: QueueId, to: QueueId) -> bool {
        let to = self.resolve(to);
        if self.queue(from).redirected.is_some() || from == to {
            return false;
        }
        let lines = std::mem::take(&mut self.queue(from).lines);
        let (feeders, mut moved) = (self.queue(from).feeders, 0);
        for (line, target) in lines.into_iter().zip(&mut self.queue(to).lines) {
            moved += line.len();
            target.extend(line);
        }
        self.queue(from).redirected = Some(to);
        self.queue(from).unended -= moved;
        self.queue(to).unended += moved;
        for queue in &mut self.queues {
            if queue.feeders.has(to) {
                queue.feeders = queue.feeders.union(feeders);
            }
        }
        true
    }

    /// Returns the queue that serves the operations of this one.
    fn resolve(&self, queue: QueueId) -> QueueId {
        let mut current = queue;
        while let Some(next) = self.queues.get(usize::from(current.0)).and_then(|queue| queue.redirected) {
            current = next;
        }
        current
    }

    /// Begins the next operation of these queues, if one may begin now.
    pub(super) fn begin(&mut self, served: QueueSet) -> Chosen<O> {
        let (choice, rest_claim) = self.choose(served);
        self.rest_claim = rest_claim;
        match choice {
            Choice::Begin(candidate) => self.take(candidate).unwrap_or(Chosen::Nothing),
            Choice::Impossible(group) => Chosen::Impossible(group),
            Choice::Claim(candidate) => {
                self.claim = Some(candidate);
                Chosen::Nothing
            }
            Choice::Nothing => Chosen::Nothing,
        }
    }

    /// Whether [`Queues::begin`] would find something to do.
    pub(super) fn may_begin(&self, served: QueueSet) -> bool {
        matches!(self.choose(served).0, Choice::Begin(_) | Choice::Impossible(_))
    }

    /// Frees the room of an operation. Slots that are lost are not free until they are [regained](Self::regain).
    pub(super) fn free(&mut self, position: &Position, freed: Freed) {
        let charge = position.charge;
        self.room.give(position.priority, charge.bytes, 1);
        if freed != Freed::Waits {
            self.room.note_end(position.priority);
        }
        if let Some((free, whole)) = &mut self.queue(position.queue).slots {
            if freed == Freed::Lost {
                *whole -= charge.slots;
                self.lost_slots += charge.slots;
            } else {
                *free += charge.slots;
            }
        }
    }

    /// Slots that were lost are free again.
    pub(super) fn regain(&mut self, queue: QueueId, slots: u32) {
        if let Some((free, whole)) = &mut self.queue(queue).slots {
            *free += slots;
            *whole += slots;
            self.lost_slots -= slots;
        }
    }

    /// Returns what these queues may do next, and the operation that waits for room that is not reserved for demand.
    fn choose(&self, served: QueueSet) -> (Choice, Option<Candidate>) {
        if self.waiting == 0 {
            return (Choice::Nothing, None);
        }
        let mut candidates = [None; MAX_QUEUES * PRIORITIES];
        let mut count = 0;
        for id in served.iter().filter(|id| self.has(*id)) {
            for priority in Priority::ALL {
                if let Some(candidate) = self.candidate(id, priority) {
                    candidates[count] = Some(candidate);
                    count += 1;
                }
            }
        }
        candidates[..count].sort_unstable_by_key(|candidate| candidate.map(|candidate| candidate.rank));
        let claim = self.claim.and_then(|claim| self.still_first(claim));
        let mut rest_claim = self.rest_claim.and_then(|claim| self.still_first(claim));
        let mut short_of_slots = QueueSet::default();
        for candidate in candidates.into_iter().flatten() {
            let Candidate { rank, queue: id, priority } = candidate;
            let queue = &self.queues[usize::from(id.0)];
            let Some((_, first)) = queue.lines[priority as usize].first_key_value() else { continue };
            if priority != Priority::Demand && rest_claim.is_some_and(|claim| claim.rank < rank) {
                continue;
            }
            let is_full = match self.room.verdict(priority, first.charge.bytes, 1) {
                Verdict::RestIsFull => {
                    rest_claim = Some(candidate);
                    continue;
                }
                Verdict::Full => true,
                Verdict::Fits => false,
            };
            if let Some((free, whole)) = queue.slots
                && first.charge.slots > free
            {
                if first.charge.slots > whole {
                    return (Choice::Impossible(first.group), rest_claim);
                }
                short_of_slots = short_of_slots.with(id);
            }
            // The next that becomes free is for the first that waits.
            if short_of_slots.has(id) {
                continue;
            }
            let choice = match claim {
                Some(claim) if claim.rank < rank => Choice::Nothing,
                _ if is_full => Choice::Claim(candidate),
                _ => Choice::Begin(candidate),
            };
            return (choice, rest_claim);
        }
        (Choice::Nothing, rest_claim)
    }

    /// An operation that waits for room, with its rank now, if it is still the first of its line.
    fn still_first(&self, claim: Candidate) -> Option<Candidate> {
        let first = self.candidate(claim.queue, claim.priority)?;
        (first.rank.number == claim.rank.number).then_some(first)
    }

    /// The first operation of a line.
    fn candidate(&self, id: QueueId, priority: Priority) -> Option<Candidate> {
        let queue = &self.queues[usize::from(id.0)];
        let line = priority as usize;
        let (&number, first) = queue.lines[line].first_key_value()?;
        let (overtaken, most) = (queue.overtaken[line], priority.most_overtakings());
        let most_bytes = first.charge.bytes.max(1).saturating_mul(u64::from(most));
        let is_due =
            priority != Priority::Demand && (overtaken.operations >= most || overtaken.bytes >= most_bytes);
        let class = if is_due { PRIORITIES - 1 - line } else { PRIORITIES + line };
        Some(Candidate { rank: Rank { class, number }, queue: id, priority })
    }

    fn take(&mut self, candidate: Candidate) -> Option<Chosen<O>> {
        let Candidate { queue: id, priority, .. } = candidate;
        let queue = self.queue(id);
        let (_, Waiting { content, charge, group, index }) = queue.lines[priority as usize].pop_first()?;
        queue.overtaken[priority as usize] = Overtaken::default();
        if let Some((free, _)) = &mut queue.slots {
            *free -= charge.slots;
        }
        self.room.take(priority, charge.bytes, 1);
        self.waiting -= 1;
        if self.claim.is_some_and(|claim| claim.rank.number == candidate.rank.number) {
            self.claim = None;
        }
        for queue in &mut self.queues {
            for lesser in priority as usize + 1..PRIORITIES {
                if !queue.lines[lesser].is_empty() {
                    let overtaken = &mut queue.overtaken[lesser];
                    overtaken.operations = overtaken.operations.saturating_add(1);
                    overtaken.bytes = overtaken.bytes.saturating_add(charge.bytes);
                }
            }
        }
        Some(Chosen::Begun(Position { group, index, queue: id, priority, charge }, content))
    }

    /// Returns a queue that exists: ids are checked where they come in.
    fn queue(&mut self, id: QueueId) -> &mut Queue<O> {
        &mut self.queues[usize::from(id.0)]
    }
}

enum Choice {
    Begin(Candidate),
    Claim(Candidate),
    Impossible(GroupId),
    Nothing,
}
