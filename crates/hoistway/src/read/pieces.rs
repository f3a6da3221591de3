//! Cutting requests into pieces: one read each, no longer than a chunk.
#![allow(unsafe_code)]

use super::{
    ReadRequest, device,
    queue::Reads,
    request::{self, Sink},
    state::{BatchState, ReadState},
};
use crate::{
    Alignment, ByteRange, Error, Result,
    memory::{self, Fill, MemoryRequest, Slot, WriteRegion},
    plan::Transfer,
    report::{Account, Onward, Tally},
    route::{Access, Buffer, CarriedRead, DirectIo, Done, ReadLane, ReadOp, Route, member::Member},
    transfer::Read,
};
use hoistway_io::executor::{Flight, Next, Ticket};
use std::{
    io,
    sync::{Arc, MutexGuard},
    time::Instant,
};

/// One device's share of a reader.
pub(super) type DeviceShare = device::DeviceShare<Taken>;

/// One read's worth of a request. It goes with its read, also into a lane.
#[derive(Debug)]
pub(super) struct Piece {
    batch: Arc<BatchState>,
    read: usize,
    /// The bytes of the file that it delivers.
    pub(super) wanted: ByteRange,
    /// The bytes that are read: those, or the blocks they lie in.
    pub(super) range: ByteRange,
    /// Where they go. `None` while they are read.
    pub(super) place: Option<Destination>,
    /// The route past the host that reads it, if one does.
    pub(super) direct: Option<Arc<dyn Member>>,
}

/// A piece that was taken out, until its read has ended.
#[derive(Debug)]
pub(super) struct Taken {
    // Before the piece, whose route may own its slot.
    pub(super) op: ReadOp,
    pub(super) piece: Box<Piece>,
    ticket: Ticket<Reads>,
}

/// Where the bytes of a piece go.
pub(super) enum Destination {
    /// Memory of the reader's: whole blocks are read right there. It has room for all blocks of the piece.
    Own(WriteRegion),
    /// The caller's memory, of exactly the bytes that are wanted.
    Borrowed(WriteRegion),
    /// To a device, at this address; all of what is packed begins there. Past the host, if the line's
    /// [`DeviceShare::direct`] has the file ready.
    Device {
        line: Arc<DeviceShare>,
        address: u64,
        is_direct: bool,
    },
    Sink(Arc<Sink>),
    /// The bytes are not wanted.
    Discard,
}

/// A request without its pieces, and what to make them of.
pub(super) struct Cut {
    pub(super) state: ReadState,
    pub(super) pieces: Vec<(ByteRange, Destination)>,
    /// Pieces that have not begun by then do not begin.
    pub(super) begin_by: Option<Instant>,
}

impl Piece {
    /// The operation of a piece, which has no memory yet.
    pub(super) fn operation(
        batch: &Arc<BatchState>,
        read: usize,
        wanted: ByteRange,
        place: Destination,
    ) -> ReadOp {
        let (source, cancel) = (batch.read(read).file.0.clone(), batch.cancel.clone());
        let (batch, place) = (batch.clone(), Some(place));
        let piece = Self { batch, read, wanted, range: wanted, place, direct: None };
        let mut op = ReadOp::new(0, source, Access::Direct, Buffer::NONE, cancel);
        op.piece = Some(Box::new(piece));
        op
    }

    /// Adds what was read of it to what its batch has done, `staged_bytes` of it by way of a slot.
    pub(super) fn note(&self, account: &mut Account, staged_bytes: u64) {
        if !account.is_empty() || staged_bytes > 0 {
            self.batch.tally().add(std::mem::take(account), staged_bytes);
        }
    }

    /// The piece of an operation that a lane has.
    pub(super) fn in_lane(op: &ReadOp) -> Option<&Self> {
        op.piece.as_ref()?.downcast_ref()
    }

    pub(super) fn batch(&self) -> &BatchState {
        &self.batch
    }

    /// What it is a piece of.
    pub(super) fn of(&self) -> &ReadState {
        self.batch.read(self.read)
    }
}

impl Read for Piece {
    fn chosen(&self) -> (Route, DirectIo) {
        self.batch.chosen
    }

    fn range(&self, _: &ReadOp) -> ByteRange {
        self.range
    }

    fn name_at(&self, _: &ReadOp, _: u64) -> Option<String> {
        self.of().name()
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.batch.tally()
    }

    fn delivered_bytes(&self, _: &ReadOp, range: ByteRange) -> u64 {
        let delivered = range.intersection(self.wanted).unwrap_or_default();
        let counted = &self.of().counted;
        counted.as_ref().map_or(delivered.len(), |counted| counted.in_window(delivered))
    }

    fn onward(&self) -> Onward {
        match self.place {
            Some(Destination::Device { .. }) => Onward::ToDevice,
            _ => Onward::Stay,
        }
    }

    fn check_unchanged(&self, op: &ReadOp) -> Result<()> {
        op.source.check_unchanged(self.wanted, |_| self.of().name())
    }
}

impl Destination {
    /// Whether the bytes go to a device past the host.
    fn is_direct(&self) -> bool {
        matches!(self, Self::Device { is_direct: true, .. })
    }
}

impl std::fmt::Debug for Destination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Own(_) => "Own",
            Self::Borrowed(_) => "Borrowed",
            Self::Device { .. } => "Device",
            Self::Sink(_) => "Sink",
            Self::Discard => "Discard",
        })
    }
}

impl Taken {
    /// The piece of an operation, which waits or comes back from a lane. One that is none has failed.
    pub(super) fn of(flight: Flight<Reads>) -> Option<Self> {
        let (mut op, ticket) = flight.into_parts();
        match op.piece.take().map(|piece| piece.downcast()) {
            Some(Ok(piece)) => Some(Self { piece, op, ticket }),
            _ => {
                drop(op);
                ticket.end(Err(Error::Internal("a read of a reader is of no piece".into())));
                None
            }
        }
    }

    /// The operation again, for the scheduler.
    pub(super) fn into_flight(self) -> Flight<Reads> {
        let Self { piece, mut op, ticket } = self;
        op.piece = Some(piece);
        Flight::new(op, ticket)
    }

    /// Has a lane that nothing else is in make the read now. `None` if the lane has lost it.
    pub(super) fn read_now(self, lane: &mut ReadLane) -> Option<(Self, io::Result<usize>)> {
        let Self { piece, op, ticket } = self;
        let mut done = Vec::with_capacity(1);
        lane.push(CarriedRead::alone(op));
        match lane.submit_and_wait(&mut done).ok().and_then(|()| done.pop()) {
            Some(Done { op, result }) => Some((Self { piece, op: op.content, ticket }, result)),
            None => {
                drop(piece);
                ticket.end(Err(Error::Internal("a lane has lost a read that it made at once".into())));
                None
            }
        }
    }

    /// Its memory is not used any more: `staged_bytes` of it passed a slot.
    pub(super) fn end(self, staged_bytes: u64, result: Result<()>) {
        let Self { piece, mut op, ticket } = self;
        let mut account = std::mem::take(&mut op.account);
        drop(op);
        match &result {
            Ok(()) => piece.batch().deliver(piece.wanted.len()),
            // It was read for nothing.
            Err(_) => account.take_back(),
        }
        piece.note(&mut account, staged_bytes);
        drop(piece);
        ticket.end(result);
    }

    /// Copies its bytes from a slot to the memory of a device at `address`, as `transfers` say; then it ends. The transfers lie in the
    /// slot and in that memory.
    pub(super) fn copy_on(mut self, to: &DeviceShare, slot: Slot, transfers: &[Transfer], address: u64) {
        // Copies may wait longer than descriptors may be kept.
        self.op.wait();
        // SAFETY: the slot is full. Until the read has ended, the memory at `address` is its alone (`Target::device`), and it ends
        // after its pieces.
        let ended = unsafe { to.line.send(slot, transfers, (&[address], Vec::new()), self) };
        if let Some((taken, result)) = ended {
            taken.end_copied(result);
        }
    }

    /// The copies to a device are over.
    pub(super) fn end_copied(self, result: Result<()>) {
        let staged_bytes = self.piece.wanted.len();
        self.end(staged_bytes, result);
    }

    /// It fails.
    pub(super) fn fail(self, error: Error) -> Next<Reads> {
        self.end(0, Err(error));
        Next::Ended
    }
}

/// Cuts a request at multiples of `chunk` bytes of its file. `line` gives the way to a device, and whether it leads past the
/// host.
pub(super) fn cut(
    request: ReadRequest,
    chunk: u64,
    usable: Result<()>,
    line: impl FnOnce(crate::DeviceId) -> Result<(Arc<DeviceShare>, bool)>,
) -> std::result::Result<Cut, Box<(ReadState, Error)>> {
    let ReadRequest { file, range, target, name, on_end, begin_by, counted, packed, fences } = request;
    let (file_len, path) = (file.len(), file.path().to_owned());
    let is_owned = matches!(target.0, request::TargetKind::Memory);
    let placed = match target.0 {
        // Nothing has a place then, so nothing is read.
        _ if usable.is_err() => usable.map(|()| (None, Vec::new())),
        _ if range.end() > file_len => {
            let tensor = name.as_ref().map(|name| name.to_string());
            Err(Error::Truncated { path, tensor, needed: range, file_len })
        }
        _ if range.is_empty() => Ok((None, Vec::new())),
        request::TargetKind::Memory => own(range, chunk).map(|(fill, pieces)| (Some(fill), pieces)),
        request::TargetKind::Host(start) => {
            // SAFETY: `Target::host` passes the condition on: nothing else uses the bytes until the read has ended, and
            // it ends after its last region is gone.
            let arena = unsafe { memory::borrow(start.pointer(), range.len() as usize) };
            let misplacement = (start.pointer().addr().get() as u64).wrapping_sub(range.start());
            let is_congruent = Alignment::BLOCK.divides(misplacement);
            let parts = parts(range, chunk, is_congruent);
            let writes: Vec<ByteRange> = parts.iter().map(|part| relative(*part, range.start())).collect();
            let whole = [(0, relative(range, range.start()))];
            Fill::new(arena, whole, &writes).map(|(fill, regions)| {
                (Some(fill), parts.into_iter().zip(regions.into_iter().map(Destination::Borrowed)).collect())
            })
        }
        request::TargetKind::Device(_, address) if address.checked_add(range.len()).is_none() => {
            let reason = format!("{} bytes from there end past 2^64", range.len());
            Err(Error::InvalidOption { option: "device", value: format!("{address:#x}"), reason })
        }
        request::TargetKind::Device(device, address) => line(device).map(|(line, is_direct)| {
            let place = |part: ByteRange| {
                let before = if packed.is_some() { 0 } else { part.start() - range.start() };
                Destination::Device { line: line.clone(), address: address + before, is_direct }
            };
            let parts = device_parts(range, chunk, is_direct.then_some(file_len));
            (None, parts.map(|part| (part, place(part))).collect())
        }),
        request::TargetKind::Scratch(device) => line(device).and_then(|(line, is_direct)| {
            let address = line.scratch()?;
            let place = |part| (part, Destination::Device { line: line.clone(), address, is_direct });
            Ok((None, device_parts(range, chunk, is_direct.then_some(file_len)).map(place).collect()))
        }),
        request::TargetKind::Sink(sink) => {
            let parts = parts(range, chunk, false).into_iter();
            Ok((None, parts.map(|part| (part, Destination::Sink(sink.clone()))).collect()))
        }
        request::TargetKind::Discard => {
            let parts = parts(range, chunk, false).into_iter();
            Ok((None, parts.map(|part| (part, Destination::Discard)).collect()))
        }
    };
    match placed {
        Ok((fill, pieces)) => {
            let mut state = ReadState::new(file, range, name, on_end, fill, is_owned);
            (state.counted, state.packed) = (counted, packed);
            state.fences = fences.into_iter().filter(|fence| !fence.is_queued()).collect();
            state.is_promised = pieces.iter().any(|(_, place)| place.is_direct());
            Ok(Cut { state, pieces, begin_by })
        }
        Err(error) => Err(Box::new((ReadState::new(file, range, name, on_end, None, is_owned), error))),
    }
}

/// Memory for `range` with room for whole blocks, and the pieces that fill it.
fn own(range: ByteRange, chunk: u64) -> Result<(Fill, Vec<(ByteRange, Destination)>)> {
    let blocks = range
        .aligned_hull(Alignment::BLOCK)
        .ok_or_else(|| Error::Internal(format!("bytes {range} end past 2^64")))?;
    let arena = memory::allocate(blocks.len(), &MemoryRequest::default())?;
    let parts = parts(blocks, chunk, false);
    let writes: Vec<ByteRange> = parts.iter().map(|part| relative(*part, blocks.start())).collect();
    let (fill, regions) = Fill::new(arena, [(0, relative(range, blocks.start()))], &writes)?;
    let wanted = parts.into_iter().map(|part| part.intersection(range).unwrap_or_default());
    Ok((fill, wanted.zip(regions.into_iter().map(Destination::Own)).collect()))
}

/// `range`, cut at multiples of `chunk` and, if it goes past the host, at the last block of a file of `direct_len` bytes if
/// that is cut short: only whole blocks do.
fn device_parts(range: ByteRange, chunk: u64, direct_len: Option<u64>) -> impl Iterator<Item = ByteRange> {
    let last = direct_len.map_or(range.end(), |len| Alignment::BLOCK.down(len));
    let cut = last.clamp(range.start(), range.end());
    let halves = [ByteRange::new(range.start(), cut), ByteRange::new(cut, range.end())];
    halves.into_iter().flatten().flat_map(move |half| parts(half, chunk, false))
}

/// `range`, cut at multiples of `chunk`. With `blocks_apart` partial blocks at its ends are parts of their own, so that the rest can
/// be read in place.
fn parts(range: ByteRange, chunk: u64, blocks_apart: bool) -> Vec<ByteRange> {
    let block = Alignment::BLOCK;
    let mut parts = Vec::new();
    let mut start = range.start();
    while start < range.end() {
        let mut end = range.end().min((start / chunk + 1).saturating_mul(chunk));
        if blocks_apart && !block.divides(start) {
            end = end.min(block.up(start).unwrap_or(end));
        } else if blocks_apart && block.down(end) > start {
            end = block.down(end);
        }
        parts.extend(ByteRange::new(start, end));
        start = end;
    }
    parts
}

/// `range`, counted from `origin`.
fn relative(range: ByteRange, origin: u64) -> ByteRange {
    ByteRange::at(range.start() - origin, range.len()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_are_the_range_in_order_and_none_crosses_a_chunk(
            start in 0..1u64 << 24,
            len in 0..1u64 << 22,
            blocks in 1..64u64,
            blocks_apart: bool,
        ) {
            let (range, chunk) = (ByteRange::at(start, len).unwrap(), blocks * 4096);
            let mut next = range.start();
            for part in parts(range, chunk, blocks_apart) {
                prop_assert_eq!(part.start(), next);
                prop_assert!(!part.is_empty());
                prop_assert_eq!(part.start() / chunk, (part.end() - 1) / chunk);
                let is_whole = part.start() % 4096 == 0 && part.end() % 4096 == 0;
                prop_assert!(!blocks_apart || is_whole || part.len() < 4096);
                next = part.end();
            }
            prop_assert_eq!(next, range.end());
        }
    }
}
