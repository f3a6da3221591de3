//! Drives a lane: takes pieces from the queue, reads them, and sees to it that they get where they belong.
#![forbid(unsafe_code)]

use super::{
    pieces::{Destination, Piece, Taken},
    queue::{PIECES, Reads},
    request::SinkError,
    shared::ReaderShared,
    state::ReadState,
};
use crate::{
    Alignment, ByteRange, Error, Result,
    memory::{Slot, WriteRegion},
    plan::{self, Runs, Transfer},
    report::Refusal,
    route::{
        Access, Buffer, CarriedRead, Done, Lane, ReadLane, Unavailable,
        member::{Grain, Landing, Member},
    },
    source::Source,
    transfer::{self, Read},
};
use hoistway_io::{
    executor::{self, Flight, InFlightLimit, Next, Patience, Service},
    file::Residency,
};
use std::{
    borrow::Cow,
    io,
    ops::ControlFlow,
    panic::{self, AssertUnwindSafe},
    sync::Arc,
};

/// What one thread does with pieces.
pub(super) struct Worker<'a> {
    shared: &'a ReaderShared,
    /// The route that its lane was made for.
    main: Arc<dyn Member>,
    /// Copies from the page cache, for routes that look there first.
    cached: Option<RouteLane>,
}

/// The lanes of a thread: the one that it was made for, and those of routes past the host.
struct Lanes<'a> {
    shared: &'a ReaderShared,
    // Dropped before what they read: a lane waits for the kernel.
    lanes: Vec<RouteLane>,
    /// What could not be given to a lane.
    refused: Vec<Done>,
}

/// A lane of a route.
struct RouteLane {
    lane: Box<ReadLane>,
    member: Arc<dyn Member>,
}

impl Lane<CarriedRead> for Lanes<'_> {
    fn capacity(&self) -> usize {
        self.lanes[0].lane.capacity()
    }

    fn allowed(&self) -> usize {
        self.lanes[0].lane.allowed()
    }

    fn in_flight(&self) -> usize {
        self.lanes.iter().map(|own| own.lane.in_flight()).sum::<usize>() + self.refused.len()
    }

    fn push(&mut self, op: CarriedRead) {
        let direct = Piece::in_lane(&op).and_then(|piece| piece.direct.clone());
        match direct.map_or(Ok(0), |member| self.lane_of(&member)) {
            Ok(lane) => self.lanes[lane].lane.push(op),
            Err(why) => {
                let result = Err(io::Error::other(format!("no lane takes the read: {why}")));
                self.refused.push(Done { op, result });
            }
        }
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        done.append(&mut self.refused);
        let mut busy = self.lanes.iter_mut().filter(|own| own.lane.in_flight() > 0);
        busy.try_for_each(|own| own.lane.submit_and_wait(done))
    }
}

impl Lanes<'_> {
    /// The lane of a member, which is made if it is not there.
    fn lane_of(&mut self, member: &Arc<dyn Member>) -> std::result::Result<usize, Unavailable> {
        if let Some(known) = self.lanes.iter().position(|own| Arc::ptr_eq(&own.member, member)) {
            return Ok(known);
        }
        let lane = self.shared.with_faults(member.lane(1)?);
        self.lanes.push(RouteLane { lane, member: member.clone() });
        Ok(self.lanes.len() - 1)
    }
}

impl executor::Handler<Reads> for Worker<'_> {
    fn begin(&mut self, flight: Flight<Reads>) -> Next<Reads> {
        Taken::of(flight).map_or(Next::Ended, |taken| self.look(taken))
    }

    fn settle(&mut self, flight: Flight<Reads>, result: io::Result<usize>) -> Next<Reads> {
        Taken::of(flight).map_or(Next::Ended, |taken| self.follow(taken, result))
    }
}

impl<'a> Worker<'a> {
    /// Serves the queue with a lane of `member`, until it is closed.
    pub(super) fn run(shared: &'a ReaderShared, member: Arc<dyn Member>, lane: Box<ReadLane>) {
        let cached = shared.cached.clone().and_then(|member| {
            let lane = shared.with_faults(member.lane(1).ok()?);
            Some(RouteLane { lane, member })
        });
        let limit = InFlightLimit::fixed(lane.capacity());
        let lanes = vec![RouteLane { lane: shared.with_faults(lane), member: member.clone() }];
        let lanes = Lanes { shared, lanes, refused: Vec::new() };
        let service = Service { queues: &[PIECES], limit, patience: Patience::UntilOver };
        shared.scheduler.serve(lanes, &mut Self { shared, main: member, cached }, service);
    }

    /// Starts with a piece: copies what is cached, if the route does that, or aims a read.
    fn look(&mut self, mut taken: Taken) -> Next<Reads> {
        let piece = &taken.piece;
        if piece.batch().cancel.is_cancelled() {
            return taken.fail(Error::Cancelled);
        }
        if let Some(error) = self.shared.loss(piece) {
            return taken.fail(error);
        }
        let access = match self.access(piece, &*taken.op.source) {
            Ok(access) => access,
            Err(error) => return taken.fail(error),
        };
        if self.may_be_cached(piece, &taken.op.source, access) {
            taken = match self.copy_cached(taken) {
                ControlFlow::Continue(missed) => missed,
                ControlFlow::Break(next) => return next,
            };
        }
        if let Some(cached) = self.cached.as_ref().filter(|own| self.is_named(&own.member)) {
            let error = not_cached(&taken, &cached.member);
            return taken.fail(error);
        }
        self.aim(taken, access)
    }

    /// Aims a read at a piece, into its place or a slot.
    fn aim(&mut self, mut taken: Taken, access: Access) -> Next<Reads> {
        let (piece, op) = (&mut taken.piece, &mut taken.op);
        let wanted = piece.wanted;
        let blocks = blocks_of(wanted, op.source.len());
        piece.direct = direct_member(piece, blocks);
        let facts = piece.direct.as_ref().unwrap_or(&self.main).facts();
        op.access = if facts.grain.is_any() { Access::Direct } else { access };
        let (is_shared, is_direct) = (facts.landing == Landing::Shared, op.access == Access::Direct);
        let may_borrow = !is_shared && facts.landing != Landing::Kept;
        (op.buffer, piece.range) = match piece.place.take() {
            Some(Destination::Own(region)) if !is_shared => (Buffer::InPlace(region), blocks),
            Some(Destination::Borrowed(region))
                if may_borrow && (!is_direct || is_whole_blocks(region.address() as u64, wanted)) =>
            {
                (Buffer::InPlace(region), wanted)
            }
            place => {
                piece.place = place;
                let slot = match self.slot(piece, &*op.source) {
                    Ok(Some(slot)) => slot,
                    Ok(None) => return Next::PutBack(taken.into_flight()),
                    Err(error) => return taken.fail(error),
                };
                let is_own = matches!(piece.place, Some(Destination::Own(_)));
                let range = if is_own || is_direct && !is_shared { blocks } else { wanted };
                (Buffer::Staged { slot: Some(slot), pieces: put_aside(piece) }, range)
            }
        };
        op.aim(piece.range);
        Next::Carry(taken.into_flight())
    }

    /// Whether a piece is read past the page cache.
    fn access(&self, piece: &Piece, source: &dyn Source) -> Result<Access> {
        let (access, refusal) = self.shared.options.wanted(None).access(source)?;
        refusal.into_iter().for_each(|refusal| piece.batch().tally().refuse(refusal));
        Ok(access)
    }

    fn is_named(&self, member: &Arc<dyn Member>) -> bool {
        member.route() == self.shared.options.route
    }

    /// A slot to read a piece into. `None` if none is free.
    fn slot(&self, piece: &Piece, source: &dyn Source) -> Result<Option<Slot>> {
        match &piece.place {
            Some(Destination::Device { line, .. }) => line.slot(piece.direct.is_some()),
            _ => self.host_slot(source),
        }
    }

    fn host_slot(&self, source: &dyn Source) -> Result<Option<Slot>> {
        let slots = self.shared.host_slots();
        let slots = slots.ok_or_else(|| Error::Internal("there are no slots for the host".into()))?;
        match slots.try_take() {
            None if slots.is_exhausted() => {
                let reason = "reads that failed may still arrive in any of its memory";
                let why = Unavailable::new(reason, "open the reader, or the store that reads by it, anew");
                let (route, path) = (self.main.route(), Some(source.path().to_owned()));
                Err(Error::RouteUnavailable { route, path, why })
            }
            slot => Ok(slot),
        }
    }

    /// Whether the page cache seems to hold a piece, and the route looks there.
    fn may_be_cached(&self, piece: &Piece, source: &Arc<dyn Source>, access: Access) -> bool {
        let Some(RouteLane { member, .. }) = &self.cached else { return false };
        match member.add(source, access) {
            Ok(true) => source.residency(piece.wanted) == Residency::Cached,
            Ok(false) => false,
            Err(why) => {
                let path = Some(source.path().to_owned());
                piece.batch().tally().refuse(Refusal::new(member.route().name(), path, why));
                false
            }
        }
    }

    /// Copies a piece from the page cache. If that does not hold all of it, the piece comes back.
    fn copy_cached(&mut self, mut taken: Taken) -> ControlFlow<Next<Reads>, Taken> {
        let (piece, op) = (&mut taken.piece, &mut taken.op);
        let (is_own, buffer) = match piece.place.take() {
            // Memory of the reader's has room for all blocks.
            Some(Destination::Own(region)) => (true, Buffer::InPlace(region)),
            Some(Destination::Borrowed(region)) => (false, Buffer::InPlace(region)),
            place => {
                (piece.place, piece.direct) = (place, None);
                match self.slot(piece, &*op.source) {
                    Ok(Some(slot)) => (false, Buffer::Staged { slot: Some(slot), pieces: Vec::new() }),
                    Ok(None) => return ControlFlow::Break(Next::PutBack(taken.into_flight())),
                    Err(error) => return ControlFlow::Break(taken.fail(error)),
                }
            }
        };
        let Some(RouteLane { lane, member }) = &mut self.cached else {
            let error = Error::Internal("the reader does not copy from the page cache".into());
            return ControlFlow::Break(taken.fail(error));
        };
        piece.range = if is_own { blocks_of(piece.wanted, op.source.len()) } else { piece.wanted };
        (op.buffer, op.access) = (buffer, Access::Buffered);
        op.aim(piece.range);
        let Some((mut taken, result)) = taken.read_now(&mut **lane) else {
            return ControlFlow::Break(Next::Ended);
        };
        let Taken { piece, op, .. } = &mut taken;
        // If it failed, the route that reads from the device will see what is wrong, if anything is.
        let count = result.unwrap_or(0);
        if count > 0 {
            op.progress.filled = count as u64;
            transfer::account(&**piece, op, member.route(), count, 0);
        }
        if op.progress.filled == piece.range.len() {
            complete(self.shared, taken);
            return ControlFlow::Break(Next::Ended);
        }
        if let Buffer::InPlace(region) = std::mem::replace(&mut op.buffer, Buffer::NONE) {
            piece.place = Some(if is_own { Destination::Own(region) } else { Destination::Borrowed(region) });
        }
        // It starts over, so these bytes were read for nothing.
        op.begin_again();
        piece.note(&mut op.account, 0);
        ControlFlow::Continue(taken)
    }

    /// What came of a read.
    fn follow(&mut self, mut taken: Taken, result: io::Result<usize>) -> Next<Reads> {
        if result.is_ok()
            && let Some(error) = self.shared.loss(&taken.piece)
        {
            // What came cannot be asked about any more.
            return taken.fail(error);
        }
        let Taken { piece, op, .. } = &mut taken;
        let direct = piece.direct.clone();
        let member = direct.as_ref().unwrap_or(&self.main);
        if let Some(why) = member.gives_up(op, &result) {
            return hand_over(taken, &**member, why);
        }
        match transfer::settle(&**piece, &**member, op, result) {
            Ok(true) => complete(self.shared, taken),
            Ok(false) => {
                op.aim(piece.range);
                return Next::Carry(taken.into_flight());
            }
            Err(error) => fail(self.shared, taken, error),
        }
        Next::Ended
    }
}

/// A route past the host gives up: the piece waits again, for a lane that reads it otherwise.
fn hand_over(mut taken: Taken, member: &dyn Member, why: Unavailable) -> Next<Reads> {
    let Taken { piece, op, .. } = &mut taken;
    piece.batch().tally().refuse(Refusal::new(member.route().name(), None, why.clone()));
    if let Some(Destination::Device { line, .. }) = &piece.place
        && let Some(direct) = line.direct()
    {
        direct.give_up(why);
    }
    // Its slot goes back before another is taken.
    op.buffer = Buffer::NONE;
    op.begin_again();
    piece.note(&mut op.account, 0);
    let flight = taken.into_flight();
    let charge = flight.ticket().charge();
    Next::HandOver(flight, PIECES, charge)
}

/// What reads a piece past the host, if anything does.
fn direct_member(piece: &Piece, blocks: ByteRange) -> Option<Arc<dyn Member>> {
    let Some(Destination::Device { line, is_direct: true, .. }) = &piece.place else { return None };
    let direct = line.direct().filter(|direct| direct.is_open())?;
    let is_cut_short =
        direct.member.facts().grain == Grain::InWholeBlocks && !Alignment::BLOCK.divides(blocks.end());
    (!is_cut_short).then(|| direct.member.clone())
}

/// All bytes of a piece were read: they go where they belong.
fn complete(shared: &ReaderShared, mut taken: Taken) {
    let Taken { piece, op, .. } = &mut taken;
    let changed = match piece.place {
        // It would have used the bytes by the end of the read.
        Some(Destination::Sink(_)) => piece.check_unchanged(op),
        _ => piece.of().check_first(|| piece.check_unchanged(op)),
    };
    if let Err(error) = changed {
        return fail(shared, taken, error);
    }
    let wanted = piece.wanted;
    let skip = wanted.start() - piece.range.start();
    let (mut slot, region) = match std::mem::replace(&mut op.buffer, Buffer::NONE) {
        Buffer::InPlace(region) => {
            let result = piece.of().complete(region);
            return taken.end(0, result);
        }
        Buffer::Staged { slot: None, .. } | Buffer::SharedStaging { .. } => {
            return taken.end(0, Err(Error::Internal("a read has no slot".into())));
        }
        Buffer::Staged { slot: Some(slot), mut pieces } => (slot, pieces.pop()),
    };
    let result = match (region, piece.place.take()) {
        (Some(mut region), _) => {
            // Memory of the reader's own holds whole blocks, all of which were read.
            let (skip, len) = if piece.of().is_owned { (0, piece.range.len()) } else { (skip, wanted.len()) };
            let target = region.as_mut_slice().get_mut(..len as usize);
            let target = target.ok_or_else(|| Error::Internal("a region is too short for its bytes".into()));
            target
                .and_then(|target| Ok(slot.copy_to(skip as usize, target)?))
                .and_then(|()| piece.of().complete(region))
        }
        (None, Some(Destination::Device { line, address, .. })) => {
            let read = piece.of();
            let ordered = read.fences.iter().try_for_each(|fence| line.come_after(fence));
            match ordered.and_then(|()| transfers(&mut slot, skip, wanted, read.packed.as_ref())) {
                Ok(transfers) if !transfers.is_empty() => {
                    return taken.copy_on(&line, slot, &transfers, address);
                }
                packed => packed.map(drop),
            }
        }
        (None, Some(Destination::Sink(sink))) => part(&mut slot, skip, wanted.len()).and_then(|bytes| {
            let bytes = &*bytes;
            let read = piece.of();
            let position = wanted.start() - read.range.start();
            // The panic hook has told what; here it is a refusal like others.
            panic::catch_unwind(AssertUnwindSafe(|| sink(position, bytes)))
                .unwrap_or_else(|_| Err("it panicked".into()))
                .map_err(|source| sink_error(read, wanted, source))
        }),
        (None, Some(Destination::Discard)) => Ok(()),
        (None, _) => Err(Error::Internal("a piece has no place".into())),
    };
    drop(slot);
    taken.end(wanted.len(), result);
}

/// How the bytes of `wanted`, which are those of a slot after the first `skip`, get from there to a device: all of them, or
/// the runs of them that are wanted, which are moved together first if they are in host memory.
fn transfers(slot: &mut Slot, skip: u64, wanted: ByteRange, packed: Option<&Runs>) -> Result<Vec<Transfer>> {
    let (before, len) = match packed {
        None => (0, wanted.len()),
        Some(runs) if slot.device_address().is_some() => {
            return Ok(plan::packed(runs, wanted, wanted.start() - skip));
        }
        Some(runs) => pack(slot, skip, wanted, runs)?,
    };
    let linear = Transfer::Linear { source: skip, arena: 0, destination: before, len };
    Ok(if len > 0 { vec![linear] } else { Vec::new() })
}

/// Moves the runs that lie in `wanted`, whose bytes are those of a slot after the first `skip`, together. How many bytes of
/// runs come before them, and how many they are.
fn pack(slot: &mut Slot, skip: u64, wanted: ByteRange, runs: &Runs) -> Result<(u64, u64)> {
    if slot.is_shared() {
        // Another process can write to it, so nothing else may look at it.
        let mut bytes = vec![0; wanted.len() as usize];
        slot.copy_to(skip as usize, &mut bytes)?;
        let (first, len) = move_together(&mut bytes, wanted, runs);
        slot.copy_from(skip as usize, &bytes[..len as usize])?;
        return Ok((first, len));
    }
    let bytes = slot.as_mut_slice();
    let bytes = bytes.get_mut(skip as usize..(skip + wanted.len()) as usize);
    let bytes = bytes.ok_or_else(|| Error::Internal("a piece does not fit its slot".into()))?;
    Ok(move_together(bytes, wanted, runs))
}

fn move_together(bytes: &mut [u8], wanted: ByteRange, runs: &Runs) -> (u64, u64) {
    let (mut first, mut len) = (None, 0);
    for (part, before) in runs.within(wanted) {
        let start = (part.start() - wanted.start()) as usize;
        bytes.copy_within(start..start + part.len() as usize, len as usize);
        first.get_or_insert(before);
        len += part.len();
    }
    (first.unwrap_or_default(), len)
}

/// The `len` bytes of a slot after the first `skip`.
fn part(slot: &mut Slot, skip: u64, len: u64) -> Result<Cow<'_, [u8]>> {
    let (start, len) = (skip as usize, len as usize);
    if slot.is_shared() {
        // Another process can write to it, so nothing else may look at it.
        let mut bytes = vec![0; len];
        slot.copy_to(start, &mut bytes)?;
        return Ok(bytes.into());
    }
    let bytes = start.checked_add(len).and_then(|end| slot.as_mut_slice().get(start..end));
    bytes.map(Cow::Borrowed).ok_or_else(|| Error::Internal("a piece does not fit its slot".into()))
}

/// What a read by way of a slot fills in the end, if that is a region; else the place stays the piece's.
fn put_aside(piece: &mut Piece) -> Vec<WriteRegion> {
    match piece.place.take() {
        Some(Destination::Own(region) | Destination::Borrowed(region)) => vec![region],
        place => {
            piece.place = place;
            Vec::new()
        }
    }
}

/// The blocks that `wanted` lies in, as far as the file goes.
fn blocks_of(wanted: ByteRange, file_len: u64) -> ByteRange {
    let block = Alignment::BLOCK;
    let end = block.up(wanted.end()).unwrap_or(wanted.end()).min(file_len);
    ByteRange::new(block.down(wanted.start()), end).unwrap_or(wanted)
}

/// Whether `wanted` can be read directly to `address`, in blocks and with nothing around them.
fn is_whole_blocks(address: u64, wanted: ByteRange) -> bool {
    [address, wanted.start(), wanted.end()].iter().all(|place| Alignment::BLOCK.divides(*place))
}

/// A piece ends with an error, and with it all others, if that says that its route brings nothing any more.
fn fail(shared: &ReaderShared, taken: Taken, error: Error) {
    if let Error::Io { source, .. } = &error
        && shared.is_lost_by(source)
    {
        shared.lose(&source.to_string());
    }
    taken.end(0, Err(error));
}

/// The error of a route that copies from the page cache where that does not hold a piece.
fn not_cached(taken: &Taken, member: &Arc<dyn Member>) -> Error {
    let Taken { piece, op, .. } = taken;
    if let Err(changed) = piece.check_unchanged(op) {
        return changed;
    }
    let reason = format!("the page cache does not hold all of bytes {}", piece.wanted);
    let why = Unavailable::new(reason, "run 'hoistway warm' first, or choose route auto");
    Error::RouteUnavailable { route: member.route(), path: Some(op.source.path().to_owned()), why }
}

fn sink_error(read: &ReadState, range: ByteRange, source: SinkError) -> Error {
    Error::Sink { path: read.file.path().to_owned(), tensor: read.name(), range, source }
}
