//! Where each tensor lies: which arena, at which offset, and whether it can be read there directly.
#![forbid(unsafe_code)]

use super::{Cast, Destination, Layout, PlanError, PlanOptions, PlannedTensor, slice::Runs};
use crate::{
    Alignment, ByteRange, Dtype,
    catalog::{FileId, TensorId},
};
use std::{collections::BTreeMap, ops::Range};

/// Tensors of this many bytes get an arena of their own under [`Layout::Tensor`].
const LARGE_TENSOR_BYTES: u64 = 1 << 20;
/// Smaller ones share arenas of at most this many bytes.
const SHARED_ARENA_BYTES: u64 = 16 << 20;
/// Under [`Layout::Packed`], shorter regions are staged: the padding to whole blocks would outweigh the copy.
const PACKED_REGION_BYTES: u64 = 256 << 10;
/// Alignment of tensors that are copied into place: a cache line, the widest vector load.
const COPIED_ALIGNMENT: Alignment = match Alignment::new(64) {
    Some(alignment) => alignment,
    None => Alignment::BYTE,
};

/// Alignment of memory that a device's allocator gives, and of tensors that do not follow their neighbour.
const DEVICE_ALIGNMENT: Alignment = match Alignment::new(256) {
    Some(alignment) => alignment,
    None => Alignment::BYTE,
};
/// Alignment that kernels with wide loads need. Files only promise 8.
const KERNEL_ALIGNMENT: Alignment = match Alignment::new(16) {
    Some(alignment) => alignment,
    None => Alignment::BYTE,
};
/// What ggml promises its kernels of every tensor, and GGUF files keep by default.
const QUANTIZED_ALIGNMENT: Alignment = match Alignment::new(32) {
    Some(alignment) => alignment,
    None => Alignment::BYTE,
};
/// Longest gap between two tensors that is kept on a device, so that one copy takes both.
const MAX_KEPT_GAP_BYTES: u64 = 4096;

/// Arenas of a device grow no further, so that memory comes back bit by bit as tensors are dropped: than this, or than this many times
/// their smallest tensor. A driver takes as long for a long arena as for a short one.
const DEVICE_ARENA_BYTES: u64 = 64 << 20;
const DEVICE_ARENA_TENSORS: u64 = 4;

/// A tensor to lay out.
pub(super) struct Wanted {
    pub(super) tensor: TensorId,
    pub(super) file: FileId,
    /// In memory.
    pub(super) dtype: Dtype,
    pub(super) shape: Box<[u64]>,
    pub(super) runs: Runs,
    pub(super) cast: Option<Cast>,
}

/// Tensors with their places.
pub(super) struct LaidOut {
    pub(super) arenas: Vec<u64>,
    /// Read in place first, then staged, then empty; file order within each.
    pub(super) tensors: Vec<PlannedTensor>,
    /// Positions of the staged ones in `tensors`.
    pub(super) staged: Range<usize>,
    pub(super) regions: Vec<Region>,
}

/// Neighbouring tensors of one file that keep their distances in memory.
pub(super) struct Region {
    pub(super) file: FileId,
    /// From the first byte of the first tensor to the last byte of the last.
    pub(super) wanted: ByteRange,
    pub(super) arena: usize,
    /// Where the block that holds the first byte goes.
    pub(super) offset: u64,
    /// Its tensors, as positions in [`LaidOut::tensors`].
    pub(super) tensors: Range<usize>,
}

pub(super) fn lay_out(mut wanted: Vec<Wanted>, options: &PlanOptions) -> Result<LaidOut, PlanError> {
    wanted.sort_by_key(|tensor| (tensor.file, tensor.runs.span()));
    let (filled, empty): (Vec<_>, Vec<_>) = wanted.into_iter().partition(|tensor| tensor.runs.count() > 0);
    if let Destination::Device { .. } = options.destination {
        return lay_out_on_device(filled, empty, options);
    }
    let (in_place, mut staged): (Vec<_>, Vec<_>) = filled.into_iter().partition(can_be_read_in_place);

    let mut groups = group(in_place, options);
    if options.layout == Layout::Packed {
        let (long, short): (Vec<_>, Vec<_>) =
            groups.into_iter().partition(|group| group.wanted.len() >= PACKED_REGION_BYTES);
        groups = long;
        staged.extend(short.into_iter().flat_map(|group| group.tensors));
        staged.sort_by_key(|tensor| (tensor.file, tensor.runs.span()));
    }

    let mut arenas = Arenas::new(options);
    let mut tensors = Vec::new();
    let mut regions = Vec::new();
    for Group { file, wanted, tensors: members } in groups {
        let hull = wanted.aligned_hull(options.block).ok_or(PlanError::TooLarge)?;
        let (arena, offset) = arenas.allocate(file, hull.len(), options.block)?;
        let first = tensors.len();
        for member in members {
            let start = member.runs.get(0).start() - hull.start() + offset;
            tensors.push(placed(member, arena, start)?);
        }
        regions.push(Region { file, wanted, arena, offset, tensors: first..tensors.len() });
    }
    let first_staged = tensors.len();
    for tensor in staged {
        let (arena, offset) = arenas.allocate(tensor.file, tensor.runs.total_len(), COPIED_ALIGNMENT)?;
        tensors.push(placed(tensor, arena, offset)?);
    }
    let staged = first_staged..tensors.len();
    for tensor in empty {
        tensors.push(placed(tensor, 0, 0)?);
    }
    let round_up = |len| options.block.up(len).ok_or(PlanError::TooLarge);
    let arenas = arenas.lengths.into_iter().map(round_up).collect::<Result<_, _>>()?;
    Ok(LaidOut { arenas, tensors, staged, regions })
}

/// Everything is copied to its place, wherever that is: aligned as kernels like it, and at the distances of the file
/// where that costs no alignment, so that one copy takes many tensors.
fn lay_out_on_device(
    filled: Vec<Wanted>,
    empty: Vec<Wanted>,
    options: &PlanOptions,
) -> Result<LaidOut, PlanError> {
    let mut arenas = Arenas::new(options);
    let mut tensors: Vec<PlannedTensor> = Vec::with_capacity(filled.len() + empty.len());
    for tensor in filled {
        let len = memory_len(&tensor)?;
        let gap = tensors.last().and_then(|last| kept_gap(last, &tensor));
        // Only behind the arena's last tensor.
        let shared = arenas.shared(tensor.file, len).filter(|&arena| {
            tensors
                .last()
                .is_some_and(|last| last.arena == arena && last.place.end() == arenas.lengths[arena])
        });
        let (arena, offset) = match (shared, gap) {
            (Some(arena), Some(gap)) => arenas.extend(arena, gap, len)?,
            _ => arenas.allocate(tensor.file, len, DEVICE_ALIGNMENT)?,
        };
        tensors.push(placed(tensor, arena, offset)?);
    }
    let staged = 0..tensors.len();
    for tensor in empty {
        tensors.push(placed(tensor, 0, 0)?);
    }
    Ok(LaidOut { arenas: arenas.lengths, tensors, staged, regions: Vec::new() })
}

/// The gap from `last` to `next` in their file, if `next` may follow at that distance in memory too.
fn kept_gap(last: &PlannedTensor, next: &Wanted) -> Option<u64> {
    let is_plain = |runs: &Runs, cast: Option<Cast>| runs.count() == 1 && cast.is_none();
    if last.file != next.file || !is_plain(&last.runs, last.cast) || !is_plain(&next.runs, next.cast) {
        return None;
    }
    let gap = next.runs.get(0).start().checked_sub(last.runs.get(0).end())?;
    let alignment = if next.dtype.block_len() > 1 { QUANTIZED_ALIGNMENT } else { KERNEL_ALIGNMENT };
    (gap <= MAX_KEPT_GAP_BYTES && alignment.divides(last.place.end() + gap)).then_some(gap)
}

/// One run of bytes, where the elements are aligned in memory if they are in the file.
fn can_be_read_in_place(tensor: &Wanted) -> bool {
    tensor.runs.count() == 1 && tensor.runs.get(0).start().is_multiple_of(tensor.dtype.alignment())
}

/// Bytes that a tensor takes in memory.
fn memory_len(tensor: &Wanted) -> Result<u64, PlanError> {
    let len = tensor.runs.total_len();
    tensor.cast.map_or(Some(len), |cast| cast.resize(len)).ok_or(PlanError::TooLarge)
}

fn placed(wanted: Wanted, arena: usize, start: u64) -> Result<PlannedTensor, PlanError> {
    let place = ByteRange::at(start, memory_len(&wanted)?).ok_or(PlanError::TooLarge)?;
    let Wanted { tensor, file, dtype, shape, runs, cast } = wanted;
    Ok(PlannedTensor { tensor, dtype, shape, arena, place, runs, cast, file })
}

struct Group {
    file: FileId,
    wanted: ByteRange,
    tensors: Vec<Wanted>,
}

/// Neighbours that are read as one region: near enough in the file, and allowed to share memory.
fn group(tensors: Vec<Wanted>, options: &PlanOptions) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for tensor in tensors {
        let bytes = tensor.runs.get(0);
        if let Some(group) = groups.last_mut()
            && group.file == tensor.file
            && let Some(gap) = bytes.start().checked_sub(group.wanted.end())
            && let Some(joined) = ByteRange::new(group.wanted.start(), bytes.end())
            && match options.layout {
                Layout::File => gap <= options.coalesce_gap_bytes,
                Layout::Packed => gap == 0,
                Layout::Tensor => {
                    // A large tensor is alone in its group.
                    let only_small = group.tensors.len() > 1 || group.wanted.len() < LARGE_TENSOR_BYTES;
                    only_small
                        && bytes.len() < LARGE_TENSOR_BYTES
                        && gap <= options.coalesce_gap_bytes
                        && joined.len() <= SHARED_ARENA_BYTES
                }
            }
        {
            group.wanted = joined;
            group.tensors.push(tensor);
        } else {
            groups.push(Group { file: tensor.file, wanted: bytes, tensors: vec![tensor] });
        }
    }
    groups
}

/// Hands out places in arenas that grow as needed.
struct Arenas {
    layout: Layout,
    /// Length beyond which an arena takes no more tensors, unless it is shorter than so many times its smallest tensor.
    limit: u64,
    tensors: u64,
    /// Length that no arena of several tensors exceeds.
    most: u64,
    lengths: Vec<u64>,
    /// Bytes of the smallest tensor of each.
    smallest: Vec<u64>,
    /// The arena that takes the next allocation of each file; under [`Layout::Packed`], of all files.
    current: BTreeMap<Option<FileId>, usize>,
}

impl Arenas {
    fn new(options: &PlanOptions) -> Self {
        let of_layout = match (options.layout, options.destination) {
            (Layout::Tensor, _) => SHARED_ARENA_BYTES,
            (Layout::File, Destination::Device { .. }) => DEVICE_ARENA_BYTES,
            (Layout::File | Layout::Packed, _) => u64::MAX,
        };
        let (tensors, most) = match (options.layout, options.destination) {
            (_, Destination::Host) => (0, u64::MAX),
            (Layout::File, Destination::Device { .. }) => (DEVICE_ARENA_TENSORS, options.device_arena_bytes),
            (_, Destination::Device { .. }) => (0, options.device_arena_bytes),
        };
        let (lengths, smallest, current) = (Vec::new(), Vec::new(), BTreeMap::new());
        Self { layout: options.layout, limit: of_layout, tensors, most, lengths, smallest, current }
    }

    fn owner(&self, file: FileId) -> Option<FileId> {
        (self.layout != Layout::Packed).then_some(file)
    }

    /// Whether a tensor of `len` bytes shares no arena.
    fn is_alone(&self, len: u64) -> bool {
        self.layout == Layout::Tensor && len >= LARGE_TENSOR_BYTES
    }

    /// The arena that a tensor of `file` with `len` bytes may share.
    fn shared(&self, file: FileId, len: u64) -> Option<usize> {
        let arena = *self.current.get(&self.owner(file))?;
        let smallest = self.smallest[arena].min(len);
        let limit = self.limit.max(smallest.saturating_mul(self.tensors)).min(self.most);
        let fits = self.lengths[arena].saturating_add(len) <= limit;
        (fits && !self.is_alone(len)).then_some(arena)
    }

    /// `len` bytes at a multiple of `alignment`.
    fn allocate(&mut self, file: FileId, len: u64, alignment: Alignment) -> Result<(usize, u64), PlanError> {
        let arena = self.shared(file, len).unwrap_or_else(|| {
            self.lengths.push(0);
            self.smallest.push(len);
            self.lengths.len() - 1
        });
        self.smallest[arena] = self.smallest[arena].min(len);
        if !self.is_alone(len) {
            self.current.insert(self.owner(file), arena);
        }
        let offset = alignment.up(self.lengths[arena]).ok_or(PlanError::TooLarge)?;
        self.lengths[arena] = offset.checked_add(len).ok_or(PlanError::TooLarge)?;
        Ok((arena, offset))
    }

    /// `len` bytes `gap` bytes behind the end of an arena.
    fn extend(&mut self, arena: usize, gap: u64, len: u64) -> Result<(usize, u64), PlanError> {
        self.smallest[arena] = self.smallest[arena].min(len);
        let offset = self.lengths[arena].checked_add(gap).ok_or(PlanError::TooLarge)?;
        self.lengths[arena] = offset.checked_add(len).ok_or(PlanError::TooLarge)?;
        Ok((arena, offset))
    }
}
