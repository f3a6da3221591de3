//! Submissions of customers: operations, groups, priorities.
#![forbid(unsafe_code)]

use super::customer::Customer;
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// How urgent operations are. More urgent ones begin first, but never keep others from beginning: see
/// [`Priority::most_overtakings`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// A caller waits for them.
    #[default]
    Demand,
    /// A caller will probably want them.
    Prefetch,
    /// No caller waits for them, such as stores of blocks and maintenance.
    Background,
}

impl Priority {
    /// All priorities, the most urgent first.
    pub const ALL: [Self; 3] = [Self::Demand, Self::Prefetch, Self::Background];
}

/// The number of a queue: its position in the list that the scheduler was made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueId(pub u8);

/// The number of a group of one scheduler. Numbers are not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub(super) u64);

/// The room that an operation takes while it is in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Charge {
    /// Bytes that it moves.
    pub bytes: u64,
    /// Slots of its queue that it stages bytes in; 0 if it moves them in place.
    pub slots: u32,
}

impl Charge {
    /// The room of an operation that needs no slot.
    pub const fn of_bytes(bytes: u64) -> Self {
        Self { bytes, slots: 0 }
    }
}

/// One read, write or sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation<O> {
    /// The queue that it waits in.
    pub queue: QueueId,
    /// The room that it uses while it is in flight.
    pub charge: Charge,
    /// Its place in the group, by which a [`Gate`] opens. Ignored if the gate is open.
    pub order: u64,
    /// The customer's operation, which owns the memory.
    pub content: O,
}

/// When operations of a group may begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gate {
    /// All may begin at once.
    #[default]
    Open,
    /// Those whose order is below this number may begin. [`Scheduler::admit`](super::Scheduler::admit) raises it as the
    /// consumer of a stream proceeds.
    Below(u64),
    /// Those of the lowest order may begin, and those of the next order once all of these have succeeded: writes, then
    /// their sync.
    Stages,
}

/// A group of operations that ends once: when all of its operations have ended, with its first error.
///
/// After an error, operations of the group that have not begun do not begin.
#[derive(Debug)]
pub struct Submission<C: Customer> {
    /// Comes back with the end of the group.
    pub group: C::Group,
    /// Its operations.
    pub operations: Vec<Operation<C::Operation>>,
    /// The number that [`Whose::Tag`] selects it by.
    pub tag: u64,
    /// How urgent it is.
    pub priority: Priority,
    /// Operations that have not begun by then do not begin.
    pub deadline: Option<Instant>,
    /// The event of a device that must be reached before any of them begins.
    pub event: Option<C::Event>,
    /// When its operations may begin.
    pub gate: Gate,
}

impl<C: Customer> Submission<C> {
    /// A demand group without tag, deadline or event, whose operations may begin at once.
    pub fn new(group: C::Group, operations: Vec<Operation<C::Operation>>) -> Self {
        Self {
            group,
            operations,
            tag: 0,
            priority: Priority::Demand,
            deadline: None,
            event: None,
            gate: Gate::Open,
        }
    }
}

/// Selects groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// One group.
    Group(GroupId),
    /// All groups with this tag.
    Tag(u64),
}

/// The operations that [`Scheduler::cancel`](super::Scheduler::cancel) found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cancelled {
    /// Operations that had not begun, and will not.
    pub not_begun: usize,
    /// Operations that a lane, the system or a device has: they end as they may, and use their memory until then.
    pub in_flight: usize,
}
