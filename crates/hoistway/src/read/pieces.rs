//! Cutting requests into pieces: one read each, no longer than a chunk.
#![allow(unsafe_code)]

use super::{
    ReadRequest,
    device::DeviceShare,
    request::TargetKind,
    state::{Destination, ReadState},
};
use crate::{
    Alignment, ByteRange, DeviceId, Error, Result,
    memory::{self, Fill, MemoryRequest, SpareMemory},
    plan::Runs,
    route::Buffer,
};
use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

/// A request without its pieces, and what to make them of.
pub(super) struct Cut {
    pub(super) state: ReadState,
    /// The bytes of the file that each delivers, and the memory of the host that they go to, if they do.
    pub(super) pieces: Vec<(ByteRange, Buffer)>,
    /// Pieces that have not begun by then do not begin.
    pub(super) begin_by: Option<Instant>,
}

/// Cuts a request at multiples of `chunk` bytes of its file. `line` gives the way to a device, and whether it leads past the
/// host.
pub(super) fn cut(
    request: ReadRequest,
    chunk: u64,
    usable: Result<()>,
    line: impl FnOnce(DeviceId) -> Result<(Arc<DeviceShare>, bool)>,
) -> std::result::Result<Cut, Box<(ReadState, Error)>> {
    let ReadRequest { file, range, target, name, on_end, begin_by, packed, fences } = request;
    let (file_len, path) = (file.len(), file.path().to_owned());
    let with_slots = |parts: Vec<ByteRange>| parts.into_iter().map(|part| (part, Buffer::SLOT)).collect();
    let placed = match target.0 {
        // Nothing has a place then, so nothing is read.
        _ if usable.is_err() => usable.map(|()| (Destination::Discard, None, Vec::new())),
        _ if range.end() > file_len => {
            let tensor = name.as_ref().map(|name| name.to_string());
            Err(Error::Truncated { path, tensor, needed: range, file_len })
        }
        TargetKind::Memory(_) if range.is_empty() => Ok((Destination::Own, None, Vec::new())),
        _ if range.is_empty() => Ok((Destination::Discard, None, Vec::new())),
        TargetKind::Memory(spare) => {
            own(range, chunk, spare.as_ref()).map(|(fill, pieces)| (Destination::Own, Some(fill), pieces))
        }
        TargetKind::Host(start) => {
            let len = packed.as_ref().map_or(range.len(), Runs::total_len);
            // SAFETY: `Target::host` passes the condition on: nothing else uses the bytes until the read has ended, and
            // it ends after its last region is gone.
            let arena = unsafe { memory::borrow(start.pointer(), len as usize) };
            let misplacement = (start.pointer().addr().get() as u64).wrapping_sub(range.start());
            let is_congruent = Alignment::BLOCK.divides(misplacement) && packed.is_none();
            let mut parts = parts(range, chunk, is_congruent);
            let place = |part: ByteRange| match &packed {
                Some(runs) => runs.packed(part),
                None => relative(part, range.start()),
            };
            // Some may lie between two runs.
            parts.retain(|part| !place(*part).is_empty());
            let writes: Vec<ByteRange> = parts.iter().map(|part| place(*part)).collect();
            Fill::new(arena, [(0, place(range))], &writes).map(|(fill, regions)| {
                let regions = regions.into_iter().map(Buffer::InPlace);
                (Destination::Borrowed, Some(fill), parts.into_iter().zip(regions).collect())
            })
        }
        TargetKind::Device(_, address) if address.checked_add(range.len()).is_none() => {
            let reason = format!("{} bytes from there end past 2^64", range.len());
            Err(Error::InvalidOption { option: "device", value: format!("{address:#x}"), reason })
        }
        TargetKind::Device(device, address) => line(device).map(|(line, is_direct)| {
            let parts = with_slots(device_parts(range, chunk, is_direct.then_some(file_len)));
            let (line, is_spread) = (Arc::downgrade(&line), packed.is_none());
            (Destination::Device { device, line, address, is_spread, is_direct }, None, parts)
        }),
        TargetKind::Scratch(device) => line(device).and_then(|(line, is_direct)| {
            let address = line.scratch()?;
            let parts = with_slots(device_parts(range, chunk, is_direct.then_some(file_len)));
            let line = Arc::downgrade(&line);
            Ok((Destination::Device { device, line, address, is_spread: false, is_direct }, None, parts))
        }),
        TargetKind::Sink(sink) => {
            let place = Destination::Sink(Mutex::new(Some(sink)));
            Ok((place, None, with_slots(parts(range, chunk, false))))
        }
        TargetKind::Discard => Ok((Destination::Discard, None, with_slots(parts(range, chunk, false)))),
    };
    match placed {
        Ok((place, fill, pieces)) => {
            let mut state = ReadState::new(file, range, name, on_end, place, fill);
            state.packed = packed;
            state.fences = fences.into_iter().filter(|fence| !fence.is_queued()).collect();
            Ok(Cut { state, pieces, begin_by })
        }
        Err(error) => {
            Err(Box::new((ReadState::new(file, range, name, on_end, Destination::Discard, None), error)))
        }
    }
}

/// Memory for `range` with room for whole blocks, of earlier reads or fresh, and the pieces that fill it.
fn own(
    range: ByteRange,
    chunk: u64,
    spare: Option<&SpareMemory>,
) -> Result<(Fill, Vec<(ByteRange, Buffer)>)> {
    let blocks = range
        .aligned_hull(Alignment::BLOCK)
        .ok_or_else(|| Error::Internal(format!("bytes {range} end past 2^64")))?;
    let arena = match spare {
        Some(spare) => memory::take_spare(spare, range)?,
        None => memory::allocate(blocks.len(), &MemoryRequest::default())?,
    };
    let parts = parts(blocks, chunk, false);
    let writes: Vec<ByteRange> = parts.iter().map(|part| relative(*part, blocks.start())).collect();
    let (fill, regions) = Fill::new(arena, [(0, relative(range, blocks.start()))], &writes)?;
    let wanted = parts.into_iter().map(|part| part.intersection(range).unwrap_or_default());
    Ok((fill, wanted.zip(regions.into_iter().map(Buffer::InPlace)).collect()))
}

/// `range`, cut at multiples of `chunk` and, if it goes past the host, at the last block of a file of `direct_len` bytes if
/// that is cut short: only whole blocks do.
fn device_parts(range: ByteRange, chunk: u64, direct_len: Option<u64>) -> Vec<ByteRange> {
    let last = direct_len.map_or(range.end(), |len| Alignment::BLOCK.down(len));
    let cut = last.clamp(range.start(), range.end());
    let halves = [ByteRange::new(range.start(), cut), ByteRange::new(cut, range.end())];
    halves.into_iter().flatten().flat_map(|half| parts(half, chunk, false)).collect()
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
