//! Decides the next step after an attempt of a read.
#![forbid(unsafe_code)]

#[cfg(feature = "objects")]
use crate::source::objects::checksum_mismatch;
use crate::{
    ByteRange, Error, Result,
    report::{Carrier, Onward},
    route::{
        Access, Buffer, DirectIo, Outcome, ReadOp, Route, Unavailable,
        member::{Member, no_direct_reads, refused_direct_reads},
    },
};
use std::io;

/// Notes what came of an attempt by `member`, and says whether all bytes are there. If not, the read is ready to be aimed
/// again.
///
/// # Errors
/// Why another attempt would not help.
pub(super) fn settle(member: &dyn Member, op: &mut ReadOp, result: io::Result<usize>) -> Result<bool> {
    let (before, count) = (op.progress.filled, result.as_ref().map_or(0, |&count| count));
    let takes_blocks = op.access == Access::Direct && !member.facts().grain.is_any();
    let outcome = op.progress.outcome(op.part.range.len(), result, takes_blocks);
    if op.progress.filled > before {
        account(op, member.route(), count, before);
    }
    if outcome.is_short() {
        op.order.tally().retries.short += 1;
        op.check_unchanged()?;
    }
    let (route, direct) = op.order.chosen();
    match outcome {
        Outcome::Complete => return Ok(true),
        Outcome::Short => {}
        Outcome::Interrupted => op.order.tally().retries.interrupted += 1,
        Outcome::DirectEndsEarly { is_final } => {
            let why = Unavailable::new(format!("{} ends direct reads early", op.source.medium()), "");
            if direct != DirectIo::Always {
                read_buffered(op, why);
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
            read_buffered(op, why);
        }
        Outcome::Failed(error) => return Err(failed(member, op, error)),
    }
    Ok(false)
}

/// Notes that a read got further than byte `before`, by `count` bytes that `route` has read.
pub(super) fn account(op: &mut ReadOp, route: Route, count: usize, before: u64) {
    let (item, start) = (op.part.item, op.part.range.start());
    let window = ByteRange::new(start + before, start + op.progress.filled).unwrap_or_default();
    let onward = match (op.order.onward(item), &op.buffer) {
        (Onward::ToDevice, Buffer::Staged { slot: Some(slot), .. })
            if slot.device_address().is_none() && !slot.is_view() =>
        {
            Onward::ToDevice
        }
        (Onward::ToDevice, _) => Onward::Stay,
        (onward, _) => onward,
    };
    let window = window.intersection(op.part.wanted).unwrap_or_default();
    let delivered = op.order.delivered_bytes(item, window);
    op.account.add(Carrier::new(route, op.access, onward).of_read(count, delivered));
}

/// Has the rest read through the page cache.
pub(super) fn read_buffered(op: &mut ReadOp, why: Unavailable) {
    op.order.tally().refuse(refused_direct_reads(&*op.source, why));
    op.access = Access::Buffered;
}

/// The error of a read that cannot be repeated.
pub(super) fn failed(member: &dyn Member, op: &ReadOp, source: io::Error) -> Error {
    // A file that was cut or swapped explains most read errors better than the error does. A daemon that hangs would not
    // say so, ever.
    if !member.is_lost(&source)
        && let Err(changed) = op.check_unchanged()
    {
        return changed;
    }
    #[cfg(feature = "objects")]
    if let Some(mismatch) = checksum_mismatch(op.source.path(), &source) {
        return mismatch;
    }
    let range = op.part.range;
    let offset = range.start() + op.progress.filled;
    Error::Io {
        operation: "read",
        path: op.source.path().to_owned(),
        tensor: op.order.name_at(op.part.item, offset),
        range: ByteRange::new(offset, range.end()),
        source,
    }
}
