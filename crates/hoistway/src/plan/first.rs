//! The tensor that comes first: its reads are cut apart from those of its neighbours, and made before all others. A long read from
//! a server far away takes many round trips to come, and so would every tensor in it.
#![forbid(unsafe_code)]

use super::{Extent, Plan, Target};
use crate::{Alignment, ByteRange};

/// The reads of the tensor, about: as many as are in flight at first.
const READS: u64 = 64;
/// Bytes of each: shorter ones come no sooner, and longer ones take the time that is to be saved.
const READ_BYTES: (u64, u64) = (1 << 20, 4 << 20);

impl Plan {
    /// Cuts the reads of one tensor apart from those around it, at multiples of `step`, and has them made first: the first tensor if
    /// tensors are handed out in order, else the smallest of those that the first `within` extents have whole. Changes nothing if
    /// the tensor is long, or not read in place.
    pub(crate) fn hasten_first(&mut self, step: Alignment, is_in_order: bool, within: usize) {
        let Some(position) = self.first_tensor(is_in_order, within) else { return };
        let read_bytes = step.up(self.tensors[position].runs.get(0).len().div_ceil(READS));
        if let Some(read_bytes) = read_bytes.filter(|&len| len <= READ_BYTES.1) {
            self.cut_apart(position, step, read_bytes.max(READ_BYTES.0));
        }
    }

    /// Cuts the reads of a tensor apart, into pieces of `piece_bytes`, and has them made first.
    pub(super) fn cut_apart(&mut self, position: usize, step: Alignment, piece_bytes: u64) {
        let (file, bytes) = (self.tensors[position].file, self.tensors[position].runs.get(0));
        let Some(hull) = bytes.aligned_hull(step) else { return };
        let extents = std::mem::take(&mut self.extents);
        let mut cut = Vec::with_capacity(extents.len() + READS as usize + 2);
        for extent in extents {
            let is_of_it = extent.file == file && is_in_place(&extent) && extent.tensors.contains(&position);
            let parts = is_of_it.then(|| self.parts_of(&extent, hull, piece_bytes)).flatten();
            for part in parts.unwrap_or_else(|| vec![extent]) {
                if is_of_it && part.wanted.intersection(bytes).is_some() {
                    let first = if self.first.is_empty() { cut.len() } else { self.first.start };
                    self.first = first..cut.len() + 1;
                }
                cut.push(part);
            }
        }
        self.extents = cut;
    }

    /// The position of the tensor that comes first, if it is read in place.
    pub(super) fn first_tensor(&self, is_in_order: bool, within: usize) -> Option<usize> {
        if is_in_order {
            return self.extents.first().filter(|extent| is_in_place(extent))?.tensors.clone().next();
        }
        let (inside, outside) = self.extents.split_at(within.min(self.extents.len()));
        let has_more = outside.first().map_or(0..0, |extent| extent.tensors.clone());
        let whole =
            inside.iter().filter(|extent| is_in_place(extent)).flat_map(|extent| extent.tensors.clone());
        let whole = whole.filter(|position| !has_more.contains(position));
        whole.min_by_key(|&position| self.tensors[position].place.len())
    }

    /// An extent that is read in place, in parts: what lies before `hull`, pieces of `hull`, and the rest.
    fn parts_of(&self, extent: &Extent, hull: ByteRange, piece_bytes: u64) -> Option<Vec<Extent>> {
        let pieces = (0..).map(|number| hull.start().saturating_add(number * piece_bytes));
        let ends = pieces.take_while(|&end| end < hull.end()).chain([hull.end(), extent.read.end()]);
        let mut start = extent.read.start();
        let mut parts = Vec::new();
        for end in ends.filter(|&end| end <= extent.read.end()) {
            if end > start {
                parts.push(self.part_of(extent, start, end)?);
                start = end;
            }
        }
        Some(parts)
    }

    /// The part of an extent that is read in place from `start` to `end`, which are multiples of a block or ends of its read.
    fn part_of(&self, extent: &Extent, start: u64, end: u64) -> Option<Extent> {
        let Target::InPlace { arena, room } = extent.target else { return None };
        let read = ByteRange::new(start, end)?;
        let wanted = extent.wanted.intersection(read)?;
        let room_end =
            if end == extent.read.end() { room.end() } else { room.start() + (end - extent.read.start()) };
        let room = ByteRange::new(room.start() + (start - extent.read.start()), room_end)?;
        let bytes = |position: &usize| self.tensors[*position].runs.get(0);
        // There is none in a gap.
        let mut positions = extent.tensors.clone();
        let first = positions.find(|position| bytes(position).end() > wanted.start());
        let first = first.unwrap_or(extent.tensors.end);
        let count =
            (first..extent.tensors.end).take_while(|position| bytes(position).start() < wanted.end()).count();
        let target = Target::InPlace { arena, room };
        Some(Extent { file: extent.file, read, wanted, target, tensors: first..first + count })
    }
}

fn is_in_place(extent: &Extent) -> bool {
    matches!(extent.target, Target::InPlace { .. })
}
