//! A queue of copies between the host and one device, and what tells when they are done.
#![allow(unsafe_code)]

use crate::{
    Device, DeviceMemory, Error, Fate, InUse, Pinned, Result, Transfer,
    backend::{Address, Event, Kernel, Segment, Stream, Work, no_conversions},
    fate::{self, Sign},
    spare_streams,
};
use std::{
    any::Any,
    mem, ptr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Pieces of this length are not short.
const LONG_PIECE_BYTES: u64 = 64 << 10;
/// Most bytes that are copied at once from or to memory that is not pinned.
const BOUNCE_BYTES: usize = 4 << 20;
/// Fewest pieces of one length at one distance that are copied as rows of one matrix.
const FEWEST_ROWS: usize = 4;
/// The longest distance of rows that drivers take.
const MAX_PITCH: usize = i32::MAX as usize;

/// Copies between the host and one device, done in the order in which they are queued, and in no order with other
/// streams.
#[derive(Debug)]
pub struct CopyStream {
    /// For bytes of the host that are not pinned, if none uses it.
    bounce: Mutex<Option<Bounce>>,
    stream: Arc<dyn Stream>,
    device: Arc<Device>,
}

/// Tells when the work that was queued before it is done.
#[derive(Debug)]
pub struct Ticket {
    event: Box<dyn Event>,
    stream: Arc<dyn Stream>,
    device: Arc<Device>,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// From the device to the host.
    ToHost,
    /// From the host to the device.
    ToDevice,
}

/// Bytes in a row, on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCopy {
    /// Address in host memory.
    pub host: usize,
    /// Address in the memory of the device.
    pub device: u64,
    /// Length in bytes.
    pub len: usize,
}

/// Memory beside a slot, for what kernels need.
#[derive(Debug)]
pub struct Scratch<'a> {
    /// On the device, as long as the slot; not used if the slot itself is on the device.
    pub data: u64,
    /// On the device, for the table of segments.
    pub table: u64,
    /// Pinned, for the same table.
    pub host_table: &'a mut [u8],
}

impl CopyStream {
    /// More short pieces than this of one slot go by a kernel: a copy takes microseconds, however short.
    pub const MAX_COPIES: usize = 16;

    /// A stream of this device: one that it keeps from an earlier use, or a new one.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        let kept = spare_streams::take(device);
        let stream = kept.map_or_else(|| device.backend().clone().stream(), Ok)?;
        Ok(Self { bounce: Mutex::default(), stream, device: device.clone() })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn stream(&self) -> &dyn Stream {
        &*self.stream
    }

    /// Memory for the work of this stream alone.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`].
    pub fn allocate_scratch(&self, len: u64) -> Result<DeviceMemory> {
        DeviceMemory::ordered(&self.device, len, &self.stream)
    }

    /// Makes later copies wait for what others have queued on `stream` so far: a handle of the same device, 0 for the
    /// default stream.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// `stream` must be a live stream of the device.
    pub unsafe fn wait_for(&self, stream: usize) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.stream.wait_for(stream) }
    }

    /// Makes later copies wait for what was queued so far on another stream of the device, and for what that waits for.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn follow(&self, other: &Self) -> Result<()> {
        let event = other.stream.mark()?;
        // SAFETY: an event of this value, for which the driver waits although it be destroyed.
        unsafe { self.stream.wait_for_event(event.handle()) }
    }

    /// Makes later copies wait for what is queued so far on the legacy default stream, and so on every stream that is in
    /// order with it.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn wait_for_default(&self) -> Result<()> {
        // SAFETY: the default stream lives as long as the device.
        unsafe { self.wait_for(0) }
    }

    /// Makes copies, and waits for their end. Pieces at one distance are copied as rows.
    ///
    /// # Safety
    /// The host's bytes must be pinned, the device's allocated on this device; neither may be freed, nor used by others
    /// in a way that copies forbid, until this returns, nor after that if their fate is unknown: then what owns them is
    /// to be [parked](Self::park).
    pub unsafe fn run(&self, direction: CopyDirection, copies: &[HostCopy]) -> Fate {
        let mut work: Vec<Work> = Vec::new();
        let mut left = copies;
        while let Some(first) = left.first() {
            let rows = rows(left);
            let count = if rows.count < FEWEST_ROWS { 1 } else { rows.count };
            work.push(host_copy(direction, first, count, &rows));
            left = &left[count..];
        }
        // SAFETY: passed on.
        unsafe { self.finish(&work) }
    }

    /// Makes copies, and waits for their end. None is made with others, as pieces of different allocations must not be.
    ///
    /// # Safety
    /// That of [`CopyStream::run`].
    unsafe fn run_pieces(&self, direction: CopyDirection, copies: &[HostCopy]) -> Fate {
        let work: Vec<Work> = copies.iter().map(|copy| host_copy(direction, copy, 1, &Rows::NONE)).collect();
        // SAFETY: passed on.
        unsafe { self.finish(&work) }
    }

    /// Queues work, and waits for its end.
    ///
    /// # Safety
    /// That of [`Stream::queue`].
    unsafe fn finish(&self, work: &[Work]) -> Fate {
        // SAFETY: passed on.
        let queued = unsafe { self.stream.queue(work) };
        // What was queued before an error goes on.
        let ended = match self.mark().map(|ticket| ticket.wait()) {
            Ok(Fate::Done) => Fate::Done,
            _ => self.synchronize(),
        };
        match (ended, queued) {
            (ended, Ok(())) => ended,
            (Fate::Unknown(_), Err(error)) => Fate::Unknown(error),
            (_, Err(error)) => Fate::Failed(error),
        }
    }

    /// Keeps memory that copies use which were queued last, until they are over. `queued` is what came of queueing them.
    ///
    /// # Errors
    /// That of `queued`, and [`Error::Device`]. No such copy is under way then, or the memory is parked.
    pub fn keep<T: Send + 'static>(&self, memory: T, queued: Result<()>) -> Result<InUse<T>> {
        match queued.and_then(|()| self.mark()) {
            Ok(ticket) => Ok(ticket.keep(memory)),
            Err(error) => {
                // Some of them may be under way.
                if !self.synchronize().is_known() {
                    self.park(memory);
                }
                Err(error)
            }
        }
    }

    /// Keeps memory that copies of unknown fate use, until the device tells that they have ended.
    pub fn park(&self, memory: impl Any + Send) {
        let sign = self.stream.mark().map_or(Sign::Wait, Sign::Event);
        self.device.park(Some(self.stream.clone()), sign, memory);
    }

    /// Queues the transfers of one slot. `addresses` are those of the arenas; `scratch` is needed where
    /// [`Device::table_bytes`] says so. Returns how many copies and kernels that made.
    ///
    /// # Errors
    /// [`Error::Device`]; then some of it may have been queued.
    ///
    /// # Safety
    /// Until the work that this queues is done, which a later [`CopyStream::mark`] tells, or
    /// [`CopyStream::synchronize`]: the slot's bytes must stay as they are; slot, scratch and arenas must stay
    /// allocated; and others must not use the scratch and the places of the transfers. The transfers must lie inside
    /// slot and arenas.
    pub unsafe fn transfer(
        &self,
        slot: Address,
        transfers: &[Transfer],
        addresses: &[u64],
        scratch: Option<Scratch<'_>>,
    ) -> Result<u64> {
        let has_kernels = self.device.info().has_kernels;
        let by_kernel = has_kernels && has_many_short(transfers);
        let mut work = Vec::with_capacity(transfers.len());
        let mut segments: Vec<(Kernel, Segment)> = Vec::new();
        for transfer in transfers {
            match *transfer {
                Transfer::Linear { source, arena, destination, len }
                    if by_kernel && len < LONG_PIECE_BYTES =>
                {
                    let destination = addresses[arena] + destination;
                    segments.push((Kernel::Copy, Segment { source, destination, count: len }));
                }
                Transfer::Converted { conversion, source, arena, destination, elements } => {
                    let destination = addresses[arena] + destination;
                    let segment = Segment { source, destination, count: elements };
                    segments.push((Kernel::Convert(conversion), segment));
                }
                _ => work.extend(copy_of(slot, transfer, addresses)),
            }
        }
        if !segments.is_empty() {
            if !has_kernels {
                return Err(no_conversions(self.device.name()));
            }
            let no_scratch = || Error::Internal("a plan with conversions has no scratch memory".into());
            run_kernels(slot, &mut segments, scratch.ok_or_else(no_scratch)?, &mut work)?;
        }
        // SAFETY: passed on.
        unsafe { self.stream.queue(&work)? };
        Ok(work.len() as u64)
    }

    /// Queues the transfers of several slots, none of which may convert, without kernels. They are in no order with each other.
    /// Returns how many copies that made.
    ///
    /// # Errors
    /// [`Error::Device`]; then some of it may have been queued.
    ///
    /// # Safety
    /// That of [`CopyStream::transfer`], for each of them.
    pub unsafe fn transfer_all<'a>(
        &self,
        slots: impl IntoIterator<Item = (Address, &'a [Transfer], &'a [u64])>,
    ) -> Result<u64> {
        let converts = || Error::Internal("copies that convert have no scratch memory".into());
        let mut work = Vec::new();
        for (slot, transfers, addresses) in slots {
            for transfer in transfers {
                work.push(copy_of(slot, transfer, addresses).ok_or_else(converts)?);
            }
        }
        // SAFETY: passed on.
        unsafe { self.stream.queue(&work)? };
        Ok(work.len() as u64)
    }

    /// A ticket for everything queued so far.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn mark(&self) -> Result<Ticket> {
        let event = self.stream.mark()?;
        Ok(Ticket { event, stream: self.stream.clone(), device: self.device.clone() })
    }

    /// Copies bytes of the device, from `address` on, to the host, and waits for them. They are those that the work queued
    /// so far on the default stream leaves there.
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::Allocation`].
    pub fn read_back(&self, address: u64, into: &mut [u8]) -> Result<()> {
        self.read_back_all(vec![(address, into)])
    }

    /// The same for several pieces: addresses of the device, and where the bytes from there go. Waits as rarely as possible.
    ///
    /// # Errors
    /// Those of [`CopyStream::read_back`].
    pub fn read_back_all(&self, pieces: Vec<(u64, &mut [u8])>) -> Result<()> {
        self.wait_for_default()?;
        let mut bounce = self.bounce(pieces.iter().map(|(_, into)| into.len()).sum())?;
        let room = bounce.memory.len();
        let cut = |(address, into): (u64, _)| {
            let chunks = <[u8]>::chunks_mut(into, room).enumerate();
            chunks.map(move |(number, chunk)| (address + (number * room) as u64, chunk))
        };
        let mut left = pieces.into_iter().flat_map(cut).peekable();
        while left.peek().is_some() {
            let (mut filled, mut some) = (0, Vec::new());
            while let Some((address, chunk)) = left.next_if(|(_, chunk)| filled + chunk.len() <= room) {
                filled += chunk.len();
                some.push((address, chunk));
            }
            let places: Vec<_> = some.iter().map(|(address, chunk)| (*address, chunk.len())).collect();
            // SAFETY: the device refuses what is none of its memory.
            bounce = unsafe { bounce.copy(self, CopyDirection::ToHost, &places)? };
            let mut rest = &bounce.memory[..];
            for (_, chunk) in some {
                let (bytes, after) = rest.split_at(chunk.len());
                chunk.copy_from_slice(bytes);
                rest = after;
            }
        }
        self.keep_bounce(bounce);
        Ok(())
    }

    /// Copies bytes of the device to `memory`, which is pinned, and waits for them. If that may still be going on after an error,
    /// the memory is parked.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// The host's bytes of the copies are pinned, and `memory` alone has them, wherever it is moved to. Nothing else uses the device's
    /// bytes in a way that copies forbid.
    pub unsafe fn fill<T: Send + 'static>(&self, memory: T, copies: &[HostCopy]) -> Result<T> {
        // SAFETY: passed on.
        match unsafe { self.run_pieces(CopyDirection::ToHost, copies) } {
            Fate::Done => Ok(memory),
            Fate::Failed(error) => Err(error),
            Fate::Unknown(error) => {
                self.park(memory);
                Err(error)
            }
        }
    }

    /// Copies bytes of the host to the device, and waits for that.
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::Allocation`].
    ///
    /// # Safety
    /// As many bytes must be allocated on this device from `address` on, and not be used by others meanwhile.
    pub unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        let mut bounce = self.bounce(bytes.len())?;
        for (number, chunk) in bytes.chunks(bounce.memory.len()).enumerate() {
            let place = address + (number * bounce.memory.len()) as u64;
            bounce.memory[..chunk.len()].copy_from_slice(chunk);
            // SAFETY: passed on.
            bounce = unsafe { bounce.copy(self, CopyDirection::ToDevice, &[(place, chunk.len())])? };
        }
        self.keep_bounce(bounce);
        Ok(())
    }

    /// Pinned memory for `len` bytes, or for as many as go at once.
    fn bounce(&self, len: usize) -> Result<Bounce> {
        let len = len.clamp(1, BOUNCE_BYTES);
        let kept = self.kept_bounce().take().filter(|kept| kept.memory.len() >= len);
        kept.map_or_else(|| Bounce::new(&self.device, len), Ok)
    }

    /// Keeps it for later copies, unless more memory may be pinned by then.
    fn keep_bounce(&self, bounce: Bounce) {
        *self.kept_bounce() = Some(bounce).filter(|bounce| !bounce.is_short);
    }

    fn kept_bounce(&self) -> MutexGuard<'_, Option<Bounce>> {
        self.bounce.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for everything queued so far.
    pub fn synchronize(&self) -> Fate {
        Fate::of(self.stream.synchronize())
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        spare_streams::keep(&self.device, &self.stream);
    }
}

impl Ticket {
    /// Keeps memory that the work uses until it is over.
    pub fn keep<T: Send + 'static>(self, memory: T) -> InUse<T> {
        InUse::new(self, memory)
    }

    /// Waits until the work is done.
    pub fn wait(&self) -> Fate {
        Fate::of(self.event.wait())
    }

    /// Whether the work is done, or failed.
    pub fn is_over(&self) -> bool {
        fate::is_over(&*self.event)
    }

    /// Keeps memory that the work uses until the device tells that it has ended.
    pub(crate) fn park(self, memory: impl Any + Send) {
        self.device.park(Some(self.stream), Sign::Event(self.event), memory);
    }
}

/// Pinned memory that bytes pass which lie where a device may not, or may at any later time, reach them.
#[derive(Debug)]
struct Bounce {
    /// `None` where the platform pins none, or no more.
    pinned: Option<Pinned>,
    /// Whether the platform pins memory, and no more now.
    is_short: bool,
    memory: Vec<u8>,
}

impl Bounce {
    fn new(device: &Arc<Device>, len: usize) -> Result<Self> {
        let (mut memory, mut is_short) = (vec![0; len], false);
        // SAFETY: the memory is dropped after it was unpinned, or never.
        let pinned = match unsafe { Pinned::new(device, memory.as_mut_ptr(), memory.len()) } {
            Err(error) if error.is_unsupported() => None,
            Err(error @ Error::Allocation { .. }) => {
                tracing::warn!(bytes = len, %error, "bytes of a device pass memory that is not pinned");
                is_short = true;
                None
            }
            pinned => Some(pinned?),
        };
        Ok(Self { pinned, is_short, memory })
    }

    /// Copies between its first bytes and the device's at these places, each an address and a length: no more than it has. If that
    /// may still be going on after an error, the memory is parked.
    ///
    /// # Safety
    /// The device's bytes are allocated, and are not used by others in a way that copies forbid.
    unsafe fn copy(
        mut self,
        stream: &CopyStream,
        direction: CopyDirection,
        places: &[(u64, usize)],
    ) -> Result<Self> {
        let mut host = self.memory.as_mut_ptr().expose_provenance();
        let copies = places.iter().map(|&(device, len)| {
            let copy = HostCopy { host, device, len };
            host += len;
            copy
        });
        let copies: Vec<HostCopy> = copies.collect();
        // SAFETY: the host's bytes are this value's alone, pinned or pageable, and stay until the copies have ended: `run_pieces`
        // waits for that, or the value is parked. The caller vouches for the device's.
        match unsafe { stream.run_pieces(direction, &copies) } {
            Fate::Done => Ok(self),
            Fate::Failed(error) => Err(error),
            Fate::Unknown(error) => {
                stream.park(self);
                Err(error)
            }
        }
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        // Memory that may be pinned still keeps its address, so that no other memory gets it.
        if !self.pinned.take().is_none_or(Pinned::unpin) {
            mem::forget(mem::take(&mut self.memory));
        }
    }
}

/// The copy that a transfer is, unless it converts.
fn copy_of(slot: Address, transfer: &Transfer, addresses: &[u64]) -> Option<Work> {
    Some(match *transfer {
        Transfer::Linear { source, arena, destination, len } => {
            Work::Copy { from: slot.at(source), to: Address::Device(addresses[arena] + destination), len }
        }
        Transfer::Pitched { source, pitch, arena, destination, width, height } => Work::CopyRows {
            from: slot.at(source),
            from_pitch: pitch,
            to: Address::Device(addresses[arena] + destination),
            to_pitch: width,
            width,
            height,
        },
        Transfer::Converted { .. } => return None,
    })
}

/// Whether there are more short pieces than are worth a copy each.
pub(crate) fn has_many_short(transfers: &[Transfer]) -> bool {
    let is_short =
        |transfer: &&Transfer| matches!(transfer, Transfer::Linear { len, .. } if *len < LONG_PIECE_BYTES);
    transfers.iter().filter(is_short).count() > CopyStream::MAX_COPIES
}

/// Returns the bytes that the table of a number of transfers takes.
pub(crate) fn table_bytes(transfers: usize) -> u64 {
    (transfers * size_of::<Segment>()) as u64
}

/// The work of kernels over `segments`: their bytes and their table go to the device first.
fn run_kernels(
    slot: Address,
    segments: &mut [(Kernel, Segment)],
    scratch: Scratch<'_>,
    work: &mut Vec<Work>,
) -> Result<()> {
    segments.sort_by_key(|(_, segment)| segment.source);
    let data = match slot {
        Address::Device(start) => start,
        Address::Host(_) => {
            copy_clusters(slot, segments, scratch.data, work);
            scratch.data
        }
    };
    // Segments of one launch share its number of blocks, so long and short ones go apart.
    let group = |(kernel, segment): &(Kernel, Segment)| (*kernel, segment.count >= LONG_PIECE_BYTES);
    segments.sort_by_key(|entry| (group(entry), entry.1.source));
    let len = table_bytes(segments.len());
    let Some(table) = scratch.host_table.get_mut(..len as usize) else {
        return Err(Error::Internal(format!("{} segments do not fit their table", segments.len())));
    };
    for (row, (_, segment)) in table.chunks_exact_mut(size_of::<Segment>()).zip(segments.iter()) {
        let numbers = [data + segment.source, segment.destination, segment.count];
        for (place, number) in row.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_ne_bytes());
        }
    }
    let from = Address::Host(table.as_mut_ptr());
    work.push(Work::Copy { from, to: Address::Device(scratch.table), len });
    let mut table = scratch.table;
    for launch in segments.chunk_by(|a, b| group(a) == group(b)) {
        let longest = launch.iter().map(|(_, segment)| segment.count).max().unwrap_or(0);
        work.push(Work::Run { kernel: launch[0].0, table, segments: launch.len(), longest });
        table += table_bytes(launch.len());
    }
    Ok(())
}

/// Copies what segments need to the same places of the scratch, and little else: in one piece where they lie near each
/// other. They ascend.
fn copy_clusters(slot: Address, segments: &[(Kernel, Segment)], scratch: u64, work: &mut Vec<Work>) {
    let mut clusters: Vec<(u64, u64)> = Vec::new();
    for (kernel, segment) in segments {
        let (start, end) = (segment.source, segment.source + kernel.source_len(segment));
        match clusters.last_mut() {
            Some((_, last)) if start <= *last + LONG_PIECE_BYTES => *last = end.max(*last),
            _ => clusters.push((start, end)),
        }
    }
    work.extend(clusters.into_iter().map(|(start, end)| Work::Copy {
        from: slot.at(start),
        to: Address::Device(scratch + start),
        len: end - start,
    }));
}

/// A copy of `count` pieces from `first` on, which are rows if there are several.
fn host_copy(direction: CopyDirection, first: &HostCopy, count: usize, rows: &Rows) -> Work {
    let host = (Address::Host(ptr::with_exposed_provenance_mut(first.host)), rows.host_pitch as u64);
    let device = (Address::Device(first.device), rows.pitch as u64);
    let ((from, from_pitch), (to, to_pitch)) = match direction {
        CopyDirection::ToHost => (device, host),
        CopyDirection::ToDevice => (host, device),
    };
    let (width, height) = (first.len as u64, count as u64);
    match count {
        1 => Work::Copy { from, to, len: width },
        _ => Work::CopyRows { from, from_pitch, to, to_pitch, width, height },
    }
}

/// The first of several copies, as rows: of one length, at one distance on the host, and at one on the device.
#[derive(Debug, PartialEq, Eq)]
struct Rows {
    count: usize,
    host_pitch: usize,
    pitch: usize,
}

impl Rows {
    const NONE: Self = Self { count: 1, host_pitch: 0, pitch: 0 };
}

fn rows(copies: &[HostCopy]) -> Rows {
    let [first, second, ..] = copies else { return Rows::NONE };
    let pitch = second.device.checked_sub(first.device).and_then(|pitch| usize::try_from(pitch).ok());
    let (Some(host_pitch), Some(pitch)) = (second.host.checked_sub(first.host), pitch) else {
        return Rows::NONE;
    };
    if [host_pitch, pitch].iter().any(|pitch| *pitch < first.len || *pitch > MAX_PITCH) {
        return Rows::NONE;
    }
    let follows = |pair: &&[HostCopy]| {
        pair[1].len == first.len
            && pair[0].host.checked_add(host_pitch) == Some(pair[1].host)
            && pair[0].device.checked_add(pitch as u64) == Some(pair[1].device)
    };
    Rows { count: 1 + copies.windows(2).take_while(follows).count(), host_pitch, pitch }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_at_one_distance_are_rows() {
        let piece = |row: usize, pitch: u64| HostCopy {
            host: 1000 + row * 16,
            device: 5000 + row as u64 * pitch,
            len: 16,
        };
        let pieces: Vec<HostCopy> = (0..5).map(|row| piece(row, 100)).collect();
        assert_eq!(rows(&pieces), Rows { count: 5, host_pitch: 16, pitch: 100 });
        let apart: Vec<HostCopy> =
            (0..5).map(|row| HostCopy { host: 1000 + row * 40, ..piece(row, 16) }).collect();
        assert_eq!(rows(&apart), Rows { count: 5, host_pitch: 40, pitch: 16 });
        let mut broken = pieces.clone();
        broken[3].device += 1;
        assert_eq!(rows(&broken).count, 3);
        broken = pieces.clone();
        broken[2].host += 1;
        assert_eq!(rows(&broken).count, 2);
        broken = pieces.clone();
        broken[1].len = 8;
        assert_eq!(rows(&broken).count, 1);
        assert_eq!(rows(&pieces[..1]).count, 1);
        let apart: Vec<HostCopy> = (0..5).map(|row| piece(row, 1 << 31)).collect();
        assert_eq!(rows(&apart).count, 1, "further than the driver's rows may be");
        let overlapping: Vec<HostCopy> = (0..5).map(|row| piece(row, 8)).collect();
        assert_eq!(rows(&overlapping).count, 1);
    }
}
