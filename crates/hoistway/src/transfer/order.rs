//! What an owner supplies to have its reads carried, and the ways in which a read ends.
#![forbid(unsafe_code)]

use crate::{
    ByteRange, Error, Result,
    memory::Slot,
    report::{Account, Onward, Tally},
    route::{Access, Buffer, DirectIo, DirectRoute, Part, ReadOp, Route, member::Facts},
    source::Source,
};
use hoistway_io::executor::{Customer, Flight, Next, Reason, Ticket};
use std::{
    convert::Infallible,
    fmt, io,
    sync::{Arc, MutexGuard},
};
use tracing::Span;

/// The reads of orders. A group of them is an order, or an item of one.
#[derive(Debug)]
pub(crate) struct Reads;

impl Customer for Reads {
    type Operation = ReadOp;
    type Group = (Arc<dyn Order>, usize);
    type Event = Infallible;
    type Error = Failure;

    fn ended(&self, (order, item): Self::Group, result: Result<(), Failure>) {
        order.ended(item, result);
    }
}

/// Why reads of a group failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// By the error of a read.
    OfRead(Error),
    /// The scheduler has ended one.
    Unmade(Reason),
}

impl From<Reason> for Failure {
    fn from(reason: Reason) -> Self {
        Self::Unmade(reason)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::OfRead(error) => error,
            Failure::Unmade(reason) => reason.into(),
        }
    }
}

/// What is asked for: its reads, and what becomes of them. Threads of an engine call it without locks.
pub(crate) trait Order: Send + Sync {
    /// The route, and the way to read directly, that the caller chose.
    fn chosen(&self) -> (Route, DirectIo);

    /// The span that its reads belong to, if it has one.
    fn span(&self) -> Option<&Span> {
        None
    }

    /// What it has done so far.
    fn tally(&self) -> MutexGuard<'_, Tally>;

    /// What messages call the byte at `offset` of an item's file: the tensor that holds it.
    fn name_at(&self, item: usize, offset: u64) -> Option<String>;

    /// How many of the bytes in a range of an item's file it delivers.
    fn delivered_bytes(&self, item: usize, range: ByteRange) -> u64;

    /// What becomes of an item's bytes once they are in host memory.
    fn onward(&self, item: usize) -> Onward;

    /// Fails if a read is not to be made.
    fn may_begin(&self, part: &Part) -> Result<(), Failure> {
        self.may_go_on(part)
    }

    /// Fails if a read that was made is not wanted any more.
    fn may_go_on(&self, part: &Part) -> Result<(), Failure>;

    /// The route past the host that may make a read.
    fn past_host(&self, part: &Part) -> Option<Arc<DirectRoute>> {
        let _ = part;
        None
    }

    /// A slot for a read to a device, if the order has slots for it: its own, or with `past_host` those of that route. `None` inside
    /// if none is free.
    fn take_slot(&self, item: usize, past_host: Option<&DirectRoute>) -> Result<Option<Option<Slot>>> {
        let _ = (item, past_host);
        Ok(None)
    }

    /// A route begins to read, past the page cache or not: it may have to read more than is wanted, or by way of a slot.
    ///
    /// # Errors
    /// [`Error::MemoryBudget`] if the system has no memory for it any more.
    fn begins(&self, part: &mut Part, buffer: &mut Buffer, facts: &Facts, access: Access) -> Result<()>;

    /// Fails if a read has brought bytes of another file than it should. `check` finds that out.
    fn check_arrived(&self, part: &Part, check: &dyn Fn() -> Result<()>) -> Result<()> {
        let _ = part;
        check()
    }

    /// Moves all bytes of a read from its slot, if it has one, to where they belong in host memory.
    fn place(&self, part: &Part, buffer: &mut Buffer) -> Result<Placed>;

    /// Has all bytes of a read copied to a device.
    fn copy_on(&self, slot: Slot, read: InCopy);

    /// All bytes of a read are in their places.
    fn complete(&self, part: &Part, buffer: Buffer) -> Result<()>;

    /// Notes bytes that are about to be complete.
    fn note_delivered(&self, part: &Part, account: &Account);

    /// A read has failed. Returns what its group ends with.
    fn failed(&self, error: Error) -> Failure;

    /// All reads of an item have ended, or of the order if it is one group.
    fn ended(&self, item: usize, result: Result<(), Failure>);
}

/// An order that has an [engine](super::Engine) of its own, and ends with the first error.
pub(crate) trait EngineOwner: Order {
    /// It is over. The first reason given is the one that its owner sees.
    fn fail(&self, error: Error);

    /// The error of a lane that cannot find out what becomes of its reads, by the position of the first of them.
    fn lost_reads(&self, first: Option<u64>, source: io::Error) -> Error;
}

impl fmt::Debug for dyn Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Order")
    }
}

/// Where the bytes of a read are.
pub(crate) enum Placed {
    /// In their places: so many came by way of a slot.
    Here(u64),
    /// In a slot, from which a device is to copy them.
    InSlot(Slot),
}

impl dyn Order {
    /// All bytes of a read are where they belong, `staged_bytes` of them by way of a slot. Before they are complete: another read
    /// may hand them out.
    pub(super) fn deliver(&self, part: &Part, account: Account, staged_bytes: u64) {
        self.note_delivered(part, &account);
        self.tally().add(account, staged_bytes);
    }

    /// What was read so far was read for nothing.
    pub(super) fn note_undelivered(&self, mut account: Account) {
        if !account.is_empty() {
            account.take_back();
            self.tally().add(account, 0);
        }
    }
}

/// A read fails.
pub(super) fn fail(flight: Flight<Reads>, error: Error) -> Next<Reads> {
    let failure = flight.content.order.failed(error);
    drop_read(flight, failure)
}

/// A read ends without its bytes.
pub(super) fn drop_read(mut flight: Flight<Reads>, failure: Failure) -> Next<Reads> {
    let op = &mut flight.content;
    op.order.note_undelivered(std::mem::take(&mut op.account));
    flight.end(Err(failure));
    Next::Ended
}

/// A read whose bytes are copied to a device.
#[derive(Debug)]
pub(crate) struct InCopy {
    order: Arc<dyn Order>,
    pub(crate) part: Part,
    /// Whose own pages are copied, if they are not those of a slot.
    shown: Option<Arc<dyn Source>>,
    account: Account,
    ticket: Ticket<Reads>,
}

impl InCopy {
    /// A read whose bytes are in a slot, or are pages that it `shows`. Its file is closed if it was open for this alone: copies
    /// take longer than files may be kept open.
    pub(super) fn of(mut op: ReadOp, ticket: Ticket<Reads>, shows: bool) -> Self {
        let shown = shows.then(|| op.source.clone());
        Self { account: std::mem::take(&mut op.account), order: op.order, part: op.part, shown, ticket }
    }

    /// The copies are over.
    pub(crate) fn end(self, result: Result<()>) {
        let Self { order, part, shown, account, ticket } = self;
        // Pages of a file may have changed until they were copied, which its read does not know.
        let unchanged = || match &shown {
            Some(source) => source.check_unchanged(part.range, |offset| order.name_at(part.item, offset)),
            None => Ok(()),
        };
        let ended = match result.and_then(|()| unchanged()) {
            Ok(()) => {
                let staged = if shown.is_none() { order.delivered_bytes(part.item, part.wanted) } else { 0 };
                order.deliver(&part, account, staged);
                order.complete(&part, Buffer::SLOT)
            }
            Err(error) => {
                order.note_undelivered(account);
                Err(error)
            }
        };
        ticket.end(ended.map_err(|error| order.failed(error)));
    }
}
