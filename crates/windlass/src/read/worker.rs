//! Drives a lane: takes pieces from the queue, reads them, and sees to it that they get where they belong.
#![forbid(unsafe_code)]

use super::{
    batch::ReadState,
    pieces::{Piece, Place},
    queue::Taken,
    reader::Shared,
    request::SinkError,
};
use crate::{
    Alignment, ByteRange, Error, Result,
    load::DirectIo,
    memory::Slot,
    plan::Runs,
    report::{Carrier, Refusal},
    route::{
        Access, AnyLane, BlockingLane, Buffer, Done, Lane, Outcome, ReadOp, Route, SourceFile, Unavailable,
        is_daemon_lost,
    },
};
use std::{
    borrow::Cow,
    io,
    panic::{self, AssertUnwindSafe},
    sync::Arc,
};
use windlass_io::file::{Probe, Residency};

/// One thread's work.
pub(super) struct Worker<'a> {
    shared: &'a Shared,
    /// How the lane reads.
    route: Route,
    /// Copies from the page cache, for routes that look there first.
    cached: Option<AnyLane>,
    /// What the lane reads, by the number that its reads carry.
    reading: Vec<Option<Reading>>,
}

/// A piece that is being read.
#[derive(Debug)]
struct Reading {
    taken: Taken,
    /// The bytes that are wanted, or the blocks they lie in.
    range: ByteRange,
    carriers: Vec<Carrier>,
}

/// What became of a piece at the first look.
enum Begun {
    /// It is to be read.
    Reading(ReadOp),
    /// It has ended already.
    Ended,
    /// No slot is free.
    NoRoom(Taken),
}

impl<'a> Worker<'a> {
    /// Drives `lane`, which reads by `route`, until the queue is closed.
    pub(super) fn run(shared: &'a Shared, lane: AnyLane, route: Route) {
        let looks_in_cache = matches!(shared.options.route, Route::Auto | Route::Cached);
        let cached = looks_in_cache.then(|| shared.with_faults(AnyLane::Cached(BlockingLane::default())));
        let reading = (0..lane.capacity()).map(|_| None).collect();
        // The lane is dropped before what it reads: it waits for the kernel, and a piece that is dropped has ended.
        Self { shared, route, cached, reading }.drive(shared.with_faults(lane));
    }

    fn drive(mut self, mut lane: AnyLane) {
        let mut done = Vec::new();
        loop {
            while lane.in_flight() < lane.allowed() {
                let (queue, is_idle) = (&self.shared.queue, lane.in_flight() == 0);
                let next = if is_idle { queue.next() } else { queue.try_next() };
                let Some(taken) = next else { break };
                match self.begin(taken, is_idle) {
                    Begun::Reading(op) => lane.push(op),
                    Begun::Ended => {}
                    Begun::NoRoom(taken) => {
                        self.shared.queue.put_back(taken);
                        // Whoever waited was told that there never will be any: that ends the piece.
                        if is_idle {
                            continue;
                        }
                        break;
                    }
                }
            }
            if lane.in_flight() == 0 {
                return;
            }
            if let Err(error) = lane.submit_and_wait(&mut done) {
                // Nobody will serve the queue, so nobody may wait for it. What the lane has, it waits for or leaks.
                self.shared.queue.close(format!("waiting for reads failed: {error}"));
                return;
            }
            for Done { op, result } in done.drain(..) {
                if let Some(op) = self.settle(op, result) {
                    lane.push(op);
                }
            }
        }
    }

    /// Starts with a piece: copies what is cached, if the route does that, or aims a read.
    fn begin(&mut self, mut taken: Taken, may_wait: bool) -> Begun {
        let piece = &mut taken.piece;
        if piece.is_lost() {
            taken.end(Err(Error::Cancelled));
            return Begun::Ended;
        }
        let source = piece.of().file.0.clone();
        if let Some(error) = self.loss(piece) {
            taken.end(Err(error));
            return Begun::Ended;
        }
        let access = match self.access(piece, &source) {
            Ok(access) => access,
            Err(error) => {
                taken.end(Err(error));
                return Begun::Ended;
            }
        };
        let wanted = piece.wanted;
        // What is read: for memory of our own, all blocks that it has room for.
        let blocks = blocks_of(wanted, source.len());
        let (buffer, mut range, is_own) = match piece.place.take() {
            Some(Place::Own(region)) => (Buffer::InPlace(region), blocks, true),
            Some(Place::Borrowed(region)) => (Buffer::InPlace(region), wanted, false),
            place => {
                let slot = match self.slot(place.as_ref(), &source, may_wait) {
                    Ok(slot) => slot,
                    Err(error) => {
                        taken.end(Err(error));
                        return Begun::Ended;
                    }
                };
                piece.place = place;
                let Some(slot) = slot else { return Begun::NoRoom(taken) };
                (Buffer::Staged { slot: Some(slot), pieces: Vec::new() }, wanted, false)
            }
        };
        let mut op = new_read(source, access, buffer);
        let mut reading = Reading { taken, range, carriers: Vec::new() };
        if self.may_be_cached(&reading.taken.piece, &op, access) {
            op.access = Access::Buffered;
            op.aim(range);
            op = match self.copy_cached(&mut reading, op) {
                Some(op) if op.filled == range.len() => {
                    complete(self.shared, reading, op);
                    return Begun::Ended;
                }
                Some(op) => op,
                None => {
                    reading.end(Err(Error::Internal("a copy from the page cache was lost".into())));
                    return Begun::Ended;
                }
            };
            op.filled = 0;
        }
        if self.shared.options.route == Route::Cached {
            let error = not_cached(&reading.taken.piece, &op);
            drop(op);
            reading.end(Err(error));
            return Begun::Ended;
        }
        op.access = access;
        let is_direct = access == Access::Direct;
        let is_shared = self.route == Route::Usrbio;
        match op.buffer {
            // A ring that fails may leave reads with the kernel: those must not be in memory of the caller's. A daemon
            // reaches nothing but slots.
            Buffer::InPlace(region)
                if is_shared
                    || !is_own
                        && (self.route == Route::IoUring
                            || is_direct && !is_whole_blocks(region.address() as u64, wanted)) =>
            {
                let slot = match self.host_slot(&op.source, may_wait) {
                    Ok(Some(slot)) => slot,
                    Ok(None) => {
                        let place = if is_own { Place::Own(region) } else { Place::Borrowed(region) };
                        reading.taken.piece.place = Some(place);
                        return Begun::NoRoom(reading.taken);
                    }
                    Err(error) => {
                        drop(region);
                        reading.end(Err(error));
                        return Begun::Ended;
                    }
                };
                op.buffer = Buffer::Staged { slot: Some(slot), pieces: vec![region] };
                if !is_shared {
                    range = blocks;
                }
            }
            Buffer::Staged { .. } if is_direct && !is_shared => range = blocks,
            Buffer::InPlace(_) | Buffer::Landing { .. } | Buffer::Staged { .. } => {}
        }
        reading.range = range;
        let Some(number) = self.reading.iter().position(Option::is_none) else {
            reading.end(Err(Error::Internal("a lane has more reads than it has room for".into())));
            return Begun::Ended;
        };
        op.extent = number;
        op.aim(range);
        self.reading[number] = Some(reading);
        Begun::Reading(op)
    }

    /// Whether a piece is read past the page cache.
    fn access(&self, piece: &Piece, source: &SourceFile) -> Result<Access> {
        let options = &self.shared.options;
        let unavailable = |why: Unavailable| {
            Err(Error::RouteUnavailable { route: options.route, path: Some(source.path().to_owned()), why })
        };
        if options.route == Route::IoUring
            && let Some(why) = source.ring_refusal()
        {
            return unavailable(why);
        }
        match (options.direct, source.direct_refusal()) {
            _ if self.route == Route::Usrbio => Ok(Access::Direct),
            (DirectIo::Never, _) => Ok(Access::Buffered),
            (_, None) => Ok(Access::Direct),
            (_, Some(why)) if !self.may_read_buffered() => {
                unavailable(Unavailable::new(why.reason.clone(), FIX_DIRECT))
            }
            (_, Some(why)) => {
                let (what, path) = ("direct reads".into(), Some(source.path().to_owned()));
                piece.batch().note_refusal(Refusal { what, path, why: why.clone() });
                Ok(Access::Buffered)
            }
        }
    }

    fn may_read_buffered(&self) -> bool {
        let options = &self.shared.options;
        options.direct == DirectIo::Never
            || options.direct != DirectIo::Always && options.route != Route::IoUring
    }

    /// A slot to read a piece into that is not memory of the host. `None` if none is free.
    fn slot(&self, place: Option<&Place>, source: &SourceFile, may_wait: bool) -> Result<Option<Slot>> {
        match place {
            Some(Place::Device(line, _)) => line.slot(may_wait),
            _ => self.host_slot(source, may_wait),
        }
    }

    fn host_slot(&self, source: &SourceFile, may_wait: bool) -> Result<Option<Slot>> {
        let slots = self.shared.host_slots();
        match if may_wait { slots.take() } else { slots.try_take() } {
            None if slots.is_exhausted() => {
                let reason = "reads that failed may still arrive in any of its memory";
                let why = Unavailable::new(reason, "make a new reader");
                Err(Error::RouteUnavailable { route: self.route, path: Some(source.path().to_owned()), why })
            }
            slot => Ok(slot),
        }
    }

    /// Whether the page cache seems to hold a piece, and the route looks there.
    fn may_be_cached(&self, piece: &Piece, op: &ReadOp, access: Access) -> bool {
        // Buffered reads take what is cached from the cache by themselves.
        let is_asked = match self.shared.options.route {
            Route::Auto => access == Access::Direct && self.shared.options.direct != DirectIo::Always,
            Route::Cached => true,
            _ => false,
        };
        if let (true, Probe::None(why)) = (is_asked, op.source.probe()) {
            let (what, path) = (Route::Cached.to_string(), Some(op.source.path().to_owned()));
            piece.batch().note_refusal(Refusal { what, path, why: why.clone() });
        }
        is_asked && op.source.residency(piece.wanted) == Residency::Cached
    }

    /// Copies what the page cache holds.
    fn copy_cached(&mut self, reading: &mut Reading, op: ReadOp) -> Option<ReadOp> {
        let lane = self.cached.as_mut()?;
        let mut done = Vec::with_capacity(1);
        lane.push(op);
        lane.submit_and_wait(&mut done).ok()?;
        let Done { mut op, result } = done.pop()?;
        // If it failed, whoever reads from the device will see what is wrong, if anything is.
        let count = result.unwrap_or(0);
        if count > 0 {
            reading.account(&mut op, Route::Cached, count, count as u64);
        }
        if op.filled < reading.range.len() {
            // It starts over, so these bytes were read for nothing.
            reading.carriers.iter_mut().for_each(|carrier| carrier.tensor_bytes = 0);
        }
        Some(op)
    }

    /// What came of a read: `Some` if it must go on, `None` if its piece has ended.
    fn settle(&mut self, mut op: ReadOp, result: io::Result<usize>) -> Option<ReadOp> {
        let mut reading = self.reading.get_mut(op.extent)?.take()?;
        if result.is_ok()
            && let Some(error) = self.loss(&reading.taken.piece)
        {
            // What came cannot be asked about any more.
            drop(op);
            reading.end(Err(error));
            return None;
        }
        let (route, whole) = (self.route, reading.range.len());
        let outcome = op.outcome(whole, result, route, |op, count, filled| {
            reading.account(op, route, count, filled);
        });
        let batch = reading.taken.piece.batch();
        if outcome.is_short() {
            batch.note_short_read();
            if let Err(error) = check_unchanged(&reading.taken.piece) {
                drop(op);
                fail(self.shared, reading, error);
                return None;
            }
        }
        let refuse = |reason: String| {
            let why = Unavailable::new(reason, "");
            let (what, path) = ("direct reads".into(), Some(op.source.path().to_owned()));
            batch.note_refusal(Refusal { what, path, why: why.clone() });
            why
        };
        match outcome {
            Outcome::Complete => {
                complete(self.shared, reading, op);
                return None;
            }
            Outcome::Short => {}
            Outcome::Interrupted => batch.note_interruption(),
            Outcome::DirectEndsEarly { is_final } => {
                let reason = format!("{} ends direct reads early", op.source.filesystem());
                if self.may_read_buffered() {
                    refuse(reason);
                    op.access = Access::Buffered;
                } else if is_final {
                    let error = self.refused_direct(&op, reason);
                    drop(op);
                    reading.end(Err(error));
                    return None;
                }
            }
            Outcome::DirectRefused(error) => {
                let reason = format!("{} refused a direct read: {error}", op.source.filesystem());
                if !self.may_read_buffered() {
                    let error = self.refused_direct(&op, reason);
                    drop(op);
                    reading.end(Err(error));
                    return None;
                }
                let why = refuse(reason);
                op.source.refuse_direct(why);
                op.access = Access::Buffered;
            }
            Outcome::Failed(error) => {
                let error = read_error(&reading, &op, error);
                drop(op);
                fail(self.shared, reading, error);
                return None;
            }
        }
        op.aim(reading.range);
        let number = op.extent;
        self.reading[number] = Some(reading);
        Some(op)
    }

    /// Why a piece cannot be read any more, if so.
    fn loss(&self, piece: &Piece) -> Option<Error> {
        self.shared.usrbio.get()?.loss(piece)
    }

    fn refused_direct(&self, op: &ReadOp, reason: String) -> Error {
        let (route, path) = (self.shared.options.route, Some(op.source.path().to_owned()));
        Error::RouteUnavailable { route, path, why: Unavailable::new(reason, FIX_DIRECT) }
    }
}

/// What to do where direct reads are refused and nothing else is allowed.
const FIX_DIRECT: &str = "choose route auto or threads, or set direct to never";

impl Reading {
    /// `op` got as far as byte `filled` of what is read, `read` bytes of it by this route.
    fn account(&mut self, op: &mut ReadOp, route: Route, read: usize, filled: u64) {
        let start = self.range.start();
        let window = ByteRange::new(start + op.filled, start + filled).unwrap_or_default();
        op.filled = filled;
        let delivered = window.intersection(self.taken.piece.wanted).unwrap_or_default();
        let counted = &self.taken.piece.of().counted;
        let carrier = Carrier {
            route,
            access: op.access,
            via: matches!(self.taken.piece.place, Some(Place::Device(..))).then_some(Route::Staged),
            tensor_bytes: counted.as_ref().map_or(delivered.len(), |counted| counted.in_window(delivered)),
            read_bytes: read as u64,
            reads: 1,
        };
        match self.carriers.iter_mut().find(|own| own.is_same_way(&carrier)) {
            Some(own) => own.add(&carrier),
            None => self.carriers.push(carrier),
        }
    }

    fn end(self, result: Result<()>) {
        self.taken.end_carried(self.carriers, 0, result);
    }
}

/// All bytes of a piece were read: they go where they belong.
fn complete(shared: &Shared, mut reading: Reading, op: ReadOp) {
    let piece = &mut reading.taken.piece;
    let changed = match piece.place {
        // It would have used the bytes by the end of the read.
        Some(Place::Sink(_)) => check_unchanged(piece),
        _ => piece.of().check_first(|| check_unchanged(piece)),
    };
    if let Err(error) = changed {
        drop(op);
        fail(shared, reading, error);
        return;
    }
    let wanted = piece.wanted;
    let skip = wanted.start() - reading.range.start();
    let (mut slot, region) = match op.buffer {
        Buffer::InPlace(region) => {
            let result = piece.of().complete(region);
            reading.end(result);
            return;
        }
        Buffer::Staged { slot: None, .. } | Buffer::Landing { .. } => {
            reading.end(Err(Error::Internal("a read has no slot".into())));
            return;
        }
        Buffer::Staged { slot: Some(slot), mut pieces } => (slot, pieces.pop()),
    };
    let staged_bytes = wanted.len();
    let result = match (region, piece.place.take()) {
        (Some(mut region), _) => {
            // Memory of the reader's own holds whole blocks, all of which were read.
            let (skip, len) =
                if piece.of().is_owned { (0, reading.range.len()) } else { (skip, wanted.len()) };
            let target = region.as_mut_slice().get_mut(..len as usize);
            let target = target.ok_or_else(|| Error::Internal("a region is too short for its bytes".into()));
            target
                .and_then(|target| slot.copy_to(skip as usize, target))
                .and_then(|()| piece.of().complete(region))
        }
        (None, Some(Place::Device(line, address))) => {
            let packed = match &piece.of().packed {
                Some(runs) => pack(&mut slot, skip, wanted, runs),
                None => Ok((0, wanted.len())),
            };
            match packed {
                Ok((before, len)) if len > 0 => {
                    line.send(slot, skip, address + before, len, reading.taken, reading.carriers);
                    return;
                }
                packed => packed.map(|_| ()),
            }
        }
        (None, Some(Place::Sink(sink))) => part(&mut slot, skip, wanted.len()).and_then(|bytes| {
            let bytes = &*bytes;
            let read = piece.of();
            let position = wanted.start() - read.range.start();
            // The panic hook has told what; here it is a refusal like others.
            panic::catch_unwind(AssertUnwindSafe(|| sink(position, bytes)))
                .unwrap_or_else(|_| Err("it panicked".into()))
                .map_err(|source| sink_error(read, wanted, source))
        }),
        (None, Some(Place::Discard)) => Ok(()),
        (None, _) => Err(Error::Internal("a piece has no place".into())),
    };
    drop(slot);
    reading.taken.end_carried(reading.carriers, staged_bytes, result);
}

/// Moves the runs that lie in `wanted`, whose bytes are those of a slot after the first `skip`, together. How many bytes of
/// runs come before them, and how many they are.
fn pack(slot: &mut Slot, skip: u64, wanted: ByteRange, runs: &Runs) -> Result<(u64, u64)> {
    if slot.is_shared() {
        // Another process can write to it, so nobody else may look at it.
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
        // Another process can write to it, so nobody else may look at it.
        let mut bytes = vec![0; len];
        slot.copy_to(start, &mut bytes)?;
        return Ok(bytes.into());
    }
    let bytes = start.checked_add(len).and_then(|end| slot.as_mut_slice().get(start..end));
    bytes.map(Cow::Borrowed).ok_or_else(|| Error::Internal("a piece does not fit its slot".into()))
}

fn new_read(source: Arc<SourceFile>, access: Access, buffer: Buffer) -> ReadOp {
    ReadOp { extent: 0, source, access, buffer, offset: 0, position: 0, len: 0, filled: 0, stalls: 0 }
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

/// A piece ends with an error, and with it all others, if that says that the daemon of the 3FS is lost.
fn fail(shared: &Shared, reading: Reading, error: Error) {
    if let Error::Io { source, .. } = &error
        && is_daemon_lost(source)
    {
        shared.lose_daemon(&source.to_string());
    }
    reading.end(Err(error));
}

fn check_unchanged(piece: &Piece) -> Result<()> {
    let read = piece.of();
    read.file.0.check_unchanged(piece.wanted, |_| read.name())
}

/// The error of a read that cannot be repeated.
fn read_error(reading: &Reading, op: &ReadOp, source: io::Error) -> Error {
    let piece = &reading.taken.piece;
    // A file that was cut or swapped explains most read errors better than the error does. A daemon that hangs would not
    // say so, ever.
    if !is_daemon_lost(&source)
        && let Err(changed) = check_unchanged(piece)
    {
        return changed;
    }
    let range = ByteRange::new(reading.range.start() + op.filled, reading.range.end());
    Error::Io {
        operation: "read",
        path: op.source.path().to_owned(),
        tensor: piece.of().name(),
        range,
        source,
    }
}

/// The error of route `cached` where the page cache does not hold a piece.
fn not_cached(piece: &Piece, op: &ReadOp) -> Error {
    if let Err(changed) = check_unchanged(piece) {
        return changed;
    }
    let reason = format!("the page cache does not hold all of bytes {}", piece.wanted);
    let why = Unavailable::new(reason, "run 'windlass warm' first, or choose route auto");
    Error::RouteUnavailable { route: Route::Cached, path: Some(op.source.path().to_owned()), why }
}

fn sink_error(read: &ReadState, range: ByteRange, source: SinkError) -> Error {
    Error::Sink { path: read.file.path().to_owned(), tensor: read.name(), range, source }
}
