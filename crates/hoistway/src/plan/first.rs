//! The tensor that a loop gets first: its reads are cut apart from those of its neighbours, and made before all others. A long read
//! from a server far away takes many round trips to come, and so would every tensor in it.
#![forbid(unsafe_code)]

use super::{Extent, Plan, Target};
use crate::{Alignment, ByteRange, catalog::FileId};

/// Reads of the tensor, at most: as many as are in flight at first.
const READS: u64 = 64;
/// Bytes of each: shorter ones come no sooner, and longer ones take the time that is to be saved.
const READ_BYTES: (u64, u64) = (1 << 20, 4 << 20);

impl Plan {
    /// Reads that [`Plan::hasten_first`] adds, at most: those of the tensor, and what lies before and after them.
    pub(crate) const MORE_READS: u64 = READS + 2;

    /// Cuts the reads of one tensor apart from those around it, at multiples of `step`, and has them made first: the first tensor if
    /// tensors are handed out in order, else the smallest. Changes nothing if that takes too many reads, if the tensor is not read
    /// in place, or if `may_cut` refuses its file.
    pub(crate) fn hasten_first(
        &mut self,
        step: Alignment,
        is_in_order: bool,
        may_cut: impl Fn(FileId) -> bool,
    ) {
        if let Some(position) = self.first_tensor(is_in_order, may_cut) {
            self.cut_apart(position, step, READS, READ_BYTES);
        }
    }

    /// Cuts the reads of a tensor apart, and puts them before all others. Changes nothing if that takes more than `reads`, each of
    /// at most so many bytes.
    pub(super) fn cut_apart(
        &mut self,
        position: usize,
        step: Alignment,
        reads: u64,
        (least_bytes, most_bytes): (u64, u64),
    ) {
        let (file, bytes) = (self.tensors[position].file, self.tensors[position].runs.get(0));
        let Some(hull) = bytes.aligned_hull(step) else { return };
        let piece_of = |extent: &Extent| {
            let is_of_it = extent.file == file && is_in_place(extent) && extent.tensors.contains(&position);
            if is_of_it { hull.intersection(extent.read) } else { None }
        };
        let pieces: Vec<ByteRange> = self.extents.iter().filter_map(piece_of).collect();
        let mut steps = least_bytes / step.bytes()..=most_bytes / step.bytes();
        let count = |steps: u64| pieces.iter().map(|&piece| reads_of(piece, step, steps)).sum::<u64>();
        let Some(steps) = steps.find(|&steps| steps > 0 && count(steps) <= reads) else { return };
        let (mut first, mut others) = (Vec::new(), Vec::with_capacity(self.extents.len() + 2));
        for extent in &self.extents {
            let Some(piece) = piece_of(extent) else {
                others.push(extent.clone());
                continue;
            };
            let Some(parts) = self.parts_of(extent, piece, step, steps) else { return };
            for part in parts {
                let is_of_it = part.wanted.intersection(bytes).is_some();
                (if is_of_it { &mut first } else { &mut others }).push(part);
            }
        }
        first.append(&mut others);
        self.extents = first;
    }

    /// The position of the tensor that comes first, if it is read in place and from a file that may be cut.
    pub(super) fn first_tensor(&self, is_in_order: bool, may_cut: impl Fn(FileId) -> bool) -> Option<usize> {
        let may_cut = |position: &usize| may_cut(self.tensors[*position].file);
        let in_place = || self.extents.iter().filter(|extent| is_in_place(extent));
        if !is_in_order {
            let positions = in_place().flat_map(|extent| extent.tensors.clone()).filter(may_cut);
            return positions.min_by_key(|&position| self.tensors[position].place.len());
        }
        let filled = self.tensors.iter().enumerate().filter(|(_, tensor)| !tensor.place.is_empty());
        let (position, _) = filled.min_by_key(|(_, tensor)| tensor.tensor)?;
        let is_read_in_place = in_place().any(|extent| extent.tensors.contains(&position));
        Some(position).filter(|position| is_read_in_place && may_cut(position))
    }

    /// An extent that is read in place, in parts: what lies before `piece`, `piece` by reads of at most so many steps, and the rest.
    fn parts_of(
        &self,
        extent: &Extent,
        piece: ByteRange,
        step: Alignment,
        steps: u64,
    ) -> Option<Vec<Extent>> {
        let begin = step.down(piece.start());
        let (total, count) = (steps_of(piece, step), reads_of(piece, step, steps));
        // As long as each other, as far as steps allow.
        let cuts = (1..count).map(|number| begin + (number * total).div_ceil(count) * step.bytes());
        let ends = [piece.start()].into_iter().chain(cuts).chain([piece.end(), extent.read.end()]);
        let mut start = extent.read.start();
        let mut parts = Vec::new();
        for end in ends {
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

/// Steps that `piece` touches.
fn steps_of(piece: ByteRange, step: Alignment) -> u64 {
    (piece.end() - step.down(piece.start())).div_ceil(step.bytes())
}

/// Reads of at most so many steps that `piece` takes.
fn reads_of(piece: ByteRange, step: Alignment, steps: u64) -> u64 {
    steps_of(piece, step).div_ceil(steps)
}

fn is_in_place(extent: &Extent) -> bool {
    matches!(extent.target, Target::InPlace { .. })
}
