//! Decides the next step after an attempt of a read, for loads and readers.
#![forbid(unsafe_code)]

use crate::{
    ByteRange, Error, Result,
    report::{Carrier, Onward, Tally},
    route::{
        Access, Buffer, DirectIo, Outcome, ReadOp, Route, Unavailable,
        member::{Member, no_direct_reads, refused_direct_reads},
    },
};
use std::{io, sync::MutexGuard};

/// A read as the load or the batch knows it that it is part of.
pub(crate) trait Read {
    /// The route, and the way to read directly, that the caller chose.
    fn chosen(&self) -> (Route, DirectIo);

    /// Bytes of the file that are read.
    fn range(&self, op: &ReadOp) -> ByteRange;

    /// What messages call the byte at `offset` of the file: the tensor that holds it.
    fn name_at(&self, op: &ReadOp, offset: u64) -> Option<String>;

    /// What the load or the batch has done so far.
    fn tally(&self) -> MutexGuard<'_, Tally>;

    /// How many of the bytes in a range of the file it delivers.
    fn delivered_bytes(&self, op: &ReadOp, range: ByteRange) -> u64;

    /// What becomes of its bytes once they are in host memory.
    fn onward(&self) -> Onward;

    /// Fails if its file is no longer the one whose header was read.
    fn check_unchanged(&self, op: &ReadOp) -> Result<()> {
        op.source.check_unchanged(self.range(op), |offset| self.name_at(op, offset))
    }
}

/// Notes what came of an attempt by `member`, and says whether all bytes are there. If not, the read is ready to be aimed
/// again.
///
/// # Errors
/// Why another attempt would not help.
pub(crate) fn settle(
    read: &(impl Read + ?Sized),
    member: &dyn Member,
    op: &mut ReadOp,
    result: io::Result<usize>,
) -> Result<bool> {
    let (before, count) = (op.progress.filled, result.as_ref().map_or(0, |&count| count));
    let takes_blocks = op.access == Access::Direct && !member.facts().grain.is_any();
    let outcome = op.progress.outcome(read.range(op).len(), result, takes_blocks);
    if op.progress.filled > before {
        account(read, op, member.route(), count, before);
    }
    if outcome.is_short() {
        read.tally().retries.short += 1;
        read.check_unchanged(op)?;
    }
    let (route, direct) = read.chosen();
    match outcome {
        Outcome::Complete => return Ok(true),
        Outcome::Short => {}
        Outcome::Interrupted => read.tally().retries.interrupted += 1,
        Outcome::DirectEndsEarly { is_final } => {
            let why = Unavailable::new(format!("{} ends direct reads early", op.source.medium()), "");
            if direct != DirectIo::Always {
                read_buffered(read, op, why);
            } else if is_final {
                return Err(no_direct_reads(route, &*op.source, &why));
            }
        }
        Outcome::DirectRefused(error) => {
            let reason = format!("{} refused a direct read: {error}", op.source.medium());
            let why = Unavailable::new(reason, "");
            if !route.may_read_buffered(direct) {
                return Err(no_direct_reads(route, &*op.source, &why));
            }
            op.source.refuse_direct(why.clone());
            read_buffered(read, op, why);
        }
        Outcome::Failed(error) => return Err(failed(read, member, op, error)),
    }
    Ok(false)
}

/// Notes that a read got further than byte `before`, by `count` bytes that `route` has read.
pub(crate) fn account(read: &(impl Read + ?Sized), op: &mut ReadOp, route: Route, count: usize, before: u64) {
    let start = read.range(op).start();
    let window = ByteRange::new(start + before, start + op.progress.filled).unwrap_or_default();
    let onward = match (read.onward(), &op.buffer) {
        (Onward::ToDevice, Buffer::Staged { slot: Some(slot), .. })
            if slot.device_address().is_none() && !slot.is_view() =>
        {
            Onward::ToDevice
        }
        (Onward::ToDevice, _) => Onward::Stay,
        (onward, _) => onward,
    };
    let delivered = read.delivered_bytes(op, window);
    op.account.add(Carrier::new(route, op.access, onward).of_read(count, delivered));
}

/// Has the rest read through the page cache.
pub(crate) fn read_buffered(read: &(impl Read + ?Sized), op: &mut ReadOp, why: Unavailable) {
    read.tally().refuse(refused_direct_reads(&*op.source, why));
    op.access = Access::Buffered;
}

/// The error of a read that cannot be repeated.
pub(crate) fn failed(
    read: &(impl Read + ?Sized),
    member: &dyn Member,
    op: &ReadOp,
    source: io::Error,
) -> Error {
    // A file that was cut or swapped explains most read errors better than the error does. A daemon that hangs would not
    // say so, ever.
    if !member.is_lost(&source)
        && let Err(changed) = read.check_unchanged(op)
    {
        return changed;
    }
    let range = read.range(op);
    let offset = range.start() + op.progress.filled;
    Error::Io {
        operation: "read",
        path: op.source.path().to_owned(),
        tensor: read.name_at(op, offset),
        range: ByteRange::new(offset, range.end()),
        source,
    }
}
