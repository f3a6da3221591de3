//! Reads of a batch as the engine carries them: what is read of a file, and where its bytes go.
#![allow(unsafe_code)]

use super::{
    SinkError,
    device::DeviceShare,
    state::{BatchState, Destination, ReadState},
};
use crate::{
    Alignment, ByteRange, DeviceId, Error, Result,
    memory::Slot,
    parallel::lock,
    plan::{self, Runs, Transfer},
    report::{Account, Onward, Tally},
    route::{
        Access, Buffer, DirectIo, DirectRoute, Part, Route, Unavailable,
        member::{Facts, Grain, Landing},
    },
    transfer::{Failure, InCopy, Order, Placed},
};
use std::{
    borrow::Cow,
    io,
    panic::{self, AssertUnwindSafe},
    sync::{Arc, MutexGuard, Weak, atomic::Ordering},
};

impl Order for BatchState {
    fn chosen(&self) -> (Route, DirectIo) {
        self.chosen
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        BatchState::tally(self)
    }

    fn name_at(&self, item: usize, _: u64) -> Option<String> {
        self.read(item).name()
    }

    fn delivered_bytes(&self, item: usize, range: ByteRange) -> u64 {
        self.read(item).packed.as_ref().map_or(range.len(), |runs| runs.packed(range).len())
    }

    fn onward(&self, item: usize) -> Onward {
        match self.read(item).place {
            Destination::Device { .. } => Onward::ToDevice,
            _ => Onward::Stay,
        }
    }

    fn may_begin(&self, part: &Part) -> Result<(), Failure> {
        if self.cancel.is_cancelled() {
            return Err(Failure::OfRead(Error::Cancelled));
        }
        self.may_go_on(part)
    }

    fn may_go_on(&self, part: &Part) -> Result<(), Failure> {
        let Some(reason) = self.lost.get() else { return Ok(()) };
        // A file cannot be asked about any more, so what came of it proves nothing, and nothing more comes.
        let (read, source) = (self.read(part.item), io::Error::other(reason.clone()));
        let (path, tensor, range) = (read.file.path().to_owned(), read.name(), Some(part.wanted));
        Err(Failure::OfRead(Error::Io { operation: "read", path, tensor, range, source }))
    }

    fn past_host(&self, part: &Part) -> Option<Arc<DirectRoute>> {
        let read = self.read(part.item);
        let Destination::Device { line, is_direct: true, .. } = &read.place else { return None };
        let line = line.upgrade()?;
        let direct = line.direct().filter(|direct| direct.is_open())?;
        let is_cut_short = direct.member.facts().grain == Grain::InWholeBlocks
            && !Alignment::BLOCK.divides(blocks_of(part.wanted, read.file.len()).end());
        (!is_cut_short).then(|| direct.clone())
    }

    fn take_slot(&self, item: usize, past_host: Option<&DirectRoute>) -> Result<Option<Option<Slot>>> {
        match &self.read(item).place {
            Destination::Device { device, line, .. } => {
                held(line, *device)?.slot(past_host.is_some()).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn begins(&self, part: &mut Part, buffer: &mut Buffer, facts: &Facts, access: Access) -> Result<()> {
        let read = self.read(part.item);
        let (is_shared, is_direct) = (facts.landing == Landing::Shared, access == Access::Direct);
        let is_owned = matches!(read.place, Destination::Own);
        let is_in_place = match (&*buffer, &read.place) {
            (Buffer::InPlace(_) | Buffer::Through { .. }, Destination::Own) => !is_shared,
            (Buffer::InPlace(region) | Buffer::Through { region, .. }, _) => {
                read.packed.is_none()
                    && !is_shared
                    && facts.landing != Landing::Kept
                    && (!is_direct || is_whole_blocks(region.address() as u64, part.wanted))
            }
            _ => false,
        };
        buffer.set_staged(!is_in_place);
        let takes_blocks = is_owned || is_direct && !is_shared && !is_in_place;
        part.range = if takes_blocks { blocks_of(part.wanted, read.file.len()) } else { part.wanted };
        Ok(())
    }

    fn check_arrived(&self, part: &Part, check: &dyn Fn() -> Result<()>) -> Result<()> {
        let read = self.read(part.item);
        match read.place {
            // It would have used the bytes by the end of the read.
            Destination::Sink(_) => check(),
            _ => read.check_first(check),
        }
    }

    fn place(&self, part: &Part, buffer: &mut Buffer) -> Result<Placed> {
        let (read, wanted) = (self.read(part.item), part.wanted);
        let skip = wanted.start() - part.range.start();
        match buffer {
            Buffer::InPlace(_) => return Ok(Placed::Here(0)),
            Buffer::Through { .. } => {
                // Memory of the reader's own holds whole blocks, all of which were read.
                let is_owned = matches!(read.place, Destination::Own);
                let (skip, len) = if is_owned { (0, part.range.len()) } else { (skip, wanted.len()) };
                let all = ByteRange::at(skip, len).unwrap_or_default();
                match &read.packed {
                    None => buffer.fill_from_slot([all], len)?,
                    Some(runs) => {
                        let parts = runs.within(wanted).map(|(run, _)| {
                            ByteRange::at(run.start() - part.range.start(), run.len()).unwrap_or_default()
                        });
                        buffer.fill_from_slot(parts, runs.packed(wanted).len())?;
                    }
                }
                buffer.give_slot_back();
            }
            Buffer::Staged { .. } => {
                let mut slot = buffer.take_slot()?;
                match &read.place {
                    Destination::Device { .. } => return Ok(Placed::InSlot(slot)),
                    Destination::Sink(sink) => {
                        let bytes = bytes_of(&mut slot, skip, wanted.len())?;
                        let position = wanted.start() - read.range.start();
                        let sink = lock(sink).clone();
                        let sink =
                            sink.ok_or_else(|| Error::Internal("a read to a function has ended".into()))?;
                        // The panic hook has told what; here it is a refusal like others.
                        panic::catch_unwind(AssertUnwindSafe(|| sink(position, &bytes)))
                            .unwrap_or_else(|_| Err("it panicked".into()))
                            .map_err(|source| sink_error(read, wanted, source))?;
                    }
                    Destination::Discard => {}
                    Destination::Own | Destination::Borrowed => {
                        return Err(Error::Internal("a piece has no place".into()));
                    }
                }
            }
        }
        Ok(Placed::Here(self.delivered_bytes(part.item, wanted)))
    }

    fn copy_on(&self, mut slot: Slot, read: InCopy) {
        let (part, state) = (read.part, self.read(read.part.item));
        let Destination::Device { device, line, address, is_spread, .. } = &state.place else {
            drop(slot);
            return read.end(Err(Error::Internal("a piece has no device".into())));
        };
        let way = held(line, *device).and_then(|line| {
            state.fences.iter().try_for_each(|fence| line.come_after(fence))?;
            let skip = part.wanted.start() - part.range.start();
            Ok((line, transfers(&mut slot, skip, part.wanted, state.packed.as_ref())?))
        });
        let before = if *is_spread { part.wanted.start() - state.range.start() } else { 0 };
        match way {
            Ok((line, transfers)) if !transfers.is_empty() => {
                if let Some(short) = line.pinned_short() {
                    lock(&self.pinned_short).insert(*device, short);
                }
                // SAFETY: the slot is full, and the transfers lie in it and in the memory from that address on (`transfers`). Until
                // the read has ended, that memory is its alone (`Target::device`), and it ends after its pieces. Only memory whose
                // bytes are not read is written to by several reads at a time (`Target::scratch`).
                unsafe { line.line.send(slot, transfers, (Arc::new([address + before]), Vec::new()), read) }
            }
            way => {
                drop(slot);
                read.end(way.map(drop));
            }
        }
    }

    fn complete(&self, part: &Part, buffer: Buffer) -> Result<()> {
        match buffer {
            Buffer::InPlace(region) | Buffer::Through { region, .. } => self.read(part.item).complete(region),
            Buffer::Staged { .. } => Ok(()),
        }
    }

    fn note_delivered(&self, part: &Part, _: &Account) {
        self.bytes_done.fetch_add(part.wanted.len(), Ordering::Relaxed);
    }

    fn failed(&self, error: Error) -> Failure {
        if let Error::Io { source, .. } = &error
            && let Some(reader) = self.reader.upgrade()
        {
            reader.note_error(source);
        }
        Failure::OfRead(error)
    }

    fn ended(&self, item: usize, result: Result<(), Failure>) {
        self.end(item, result.map_err(Error::from));
    }
}

/// The way to a device, unless the device was lost.
fn held(line: &Weak<DeviceShare>, device: DeviceId) -> Result<Arc<DeviceShare>> {
    line.upgrade().ok_or_else(|| {
        let why = Unavailable::new("the device was lost while it was read to", "read again");
        Error::DeviceUnavailable { device: device.to_string(), why }
    })
}

/// How the bytes of `wanted`, which are those of a slot after the first `skip`, get from there to a device: all of them, or
/// the runs of them that are wanted, which are moved together first if they are in host memory.
fn transfers(slot: &mut Slot, skip: u64, wanted: ByteRange, packed: Option<&Runs>) -> Result<Vec<Transfer>> {
    if skip.checked_add(wanted.len()).is_none_or(|end| end > slot.len() as u64) {
        return Err(Error::Internal("a piece does not fit its slot".into()));
    }
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
    let mut len = 0;
    for (part, _) in runs.within(wanted) {
        let start = (part.start() - wanted.start()) as usize;
        bytes.copy_within(start..start + part.len() as usize, len as usize);
        len += part.len();
    }
    (runs.packed(wanted).start(), len)
}

/// The `len` bytes of a slot after the first `skip`.
fn bytes_of(slot: &mut Slot, skip: u64, len: u64) -> Result<Cow<'_, [u8]>> {
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

fn sink_error(read: &ReadState, range: ByteRange, source: SinkError) -> Error {
    Error::Sink { path: read.file.path().to_owned(), tensor: read.name(), range, source }
}
