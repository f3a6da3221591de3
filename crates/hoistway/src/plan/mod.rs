//! Which bytes of which file go to which place of memory. Pure: no I/O, no clock, no unsafe.
//!
//! [`Plan::new`] takes requests for tensors, lays their bytes out in arenas (`layout`) and cuts the reading into
//! extents (`extents`). A backend reads one extent at a time, in any order.
#![forbid(unsafe_code)]

mod cast;
mod extents;
mod first;
mod layout;
mod places;
mod select;
mod slice;
mod transfer;

#[doc(hidden)]
pub use cast::Cast;
pub(crate) use places::{ArenaPlaces, arena_places, tensor_places};
pub use select::{Selection, TensorRequest};
pub use slice::{SliceError, TensorSlice};
pub(crate) use transfer::packed;

use crate::{
    Alignment, ByteRange, Catalog, Dtype,
    catalog::{FileId, TensorId, safetensors::shown_shape},
};
#[doc(hidden)]
pub use hoistway_device::Transfer;
use serde::{Deserialize, Serialize};
pub(crate) use slice::Runs;
use std::{collections::HashSet, ops::Range, path::PathBuf};

/// Reads of one plan, at most: 64 TiB in chunks of the default size.
const MAX_READS: u64 = 1 << 24;
/// Bytes of the longest element of any type.
const MAX_ELEMENT_BYTES: u64 = 8;

/// How tensors share memory. Every layout gives pages back as soon as no tensor in use lies on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Layout {
    /// One arena a file, tensors at the distances that they have in the file. Fastest: whole runs of tensors are
    /// read in place, however small each is. On devices several arenas a file, of 64 MiB or one larger tensor, so
    /// that memory comes back as tensors are dropped.
    #[default]
    File,
    /// One arena for everything, tensors back to back. Small tensors are copied into place.
    Packed,
    /// One arena a tensor of 1 MiB or more; smaller neighbours share arenas of up to 16 MiB.
    Tensor,
}

/// What a plan may do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct PlanOptions {
    /// How tensors share memory.
    pub layout: Layout,
    /// Offsets, lengths and addresses that direct reads need multiples of. At least as long as any element.
    pub block: Alignment,
    /// Longest extent in bytes; a multiple of `block`. 4 MiB is the knee of drives and of staging copies.
    pub chunk_bytes: u64,
    /// Unwanted bytes between two wanted ranges that are read along rather than skipped.
    pub coalesce_gap_bytes: u64,
    /// The kind of memory that tensors go to.
    pub destination: Destination,
    /// Arenas of a device that several tensors share grow no further, whatever the layout is.
    pub device_arena_bytes: u64,
}

/// The kind of memory that a plan delivers to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(hidden)]
pub enum Destination {
    /// Host memory, which reads can fill directly.
    #[default]
    Host,
    /// Memory of a device: everything is staged, and copied in as few [`Transfer`]s as possible.
    Device {
        /// The type that floats are converted to on the way, one of [`Cast::TARGETS`].
        dtype: Option<Dtype>,
    },
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            layout: Layout::default(),
            block: Alignment::BLOCK,
            chunk_bytes: 4 << 20,
            coalesce_gap_bytes: 64 << 10,
            destination: Destination::default(),
            device_arena_bytes: u64::MAX,
        }
    }
}

/// Why requests cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A slice does not fit its tensor.
    #[error("cannot slice tensor '{tensor}' of shape {}: {problem}", shown_shape(shape))]
    Slice {
        /// Name of the tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// What is wrong.
        problem: SliceError,
    },
    /// A tensor's elements cannot be converted to the type asked for.
    #[error(
        "tensor '{tensor}' is of type {from}, which cannot be converted to {to}; exclude it or load it as it is"
    )]
    Cast {
        /// Name of the tensor.
        tensor: String,
        /// Its type.
        from: Dtype,
        /// The type asked for.
        to: Dtype,
    },
    /// A tensor is of a type that only its number is known of, so its size is not.
    #[error(
        "tensor '{tensor}' of {} is of ggml type {id}, which this version does not know{}; exclude {}, or use a version that \
         knows the type",
        path.display(), others(*count, "such types"), if *count == 1 { "it" } else { "them" }
    )]
    UnknownType {
        /// Name of the first such tensor.
        tensor: String,
        /// Its file.
        path: PathBuf,
        /// Its type's number.
        id: u32,
        /// How many tensors that are wanted are of unknown types.
        count: usize,
    },
    /// A tensor's numbers are in the other byte order, which nothing here would turn round.
    #[error(
        "tensor '{tensor}' of type {dtype} is big-endian{}; exclude {}, or convert the model to little-endian",
        others(*count, "that order"), if *count == 1 { "it" } else { "them" }
    )]
    ByteOrder {
        /// Name of the first such tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// How many tensors that are wanted are in that order.
        count: usize,
    },
    /// One tensor is requested more than once.
    #[error("tensor '{tensor}' is requested twice in one load")]
    RequestedTwice {
        /// Name of the tensor.
        tensor: String,
    },
    /// The block is shorter than an element, so that reading in place would misalign elements.
    #[error("blocks of {block} bytes are shorter than the longest element, {MAX_ELEMENT_BYTES} bytes")]
    Block {
        /// The block asked for.
        block: u64,
    },
    /// The chunk is not a positive multiple of the block.
    #[error("chunks of {chunk_bytes} bytes are not a multiple of the block of {block} bytes")]
    Chunk {
        /// The chunk asked for.
        chunk_bytes: u64,
        /// The block that direct reads need.
        block: u64,
    },
    /// More reads than a plan can hold.
    #[error("reads of {chunk_bytes} bytes are too short for {bytes} bytes; choose a larger chunk")]
    TooManyReads {
        /// Bytes to read.
        bytes: u64,
        /// The chunk asked for.
        chunk_bytes: u64,
    },
    /// Some offset or size does not fit 64 bits.
    #[error("the tensors are larger than any address space")]
    TooLarge,
}

/// Says how many tensors have the same problem as the one that is named.
fn others(count: usize, what: &str) -> String {
    if count > 1 { format!(", and {count} tensors in all are of {what}") } else { String::new() }
}

/// Sizes come from files, which may lie as far as a sparse file can: no plan may exhaust memory by itself.
fn number_of_reads(wanted: &[layout::Wanted], options: &PlanOptions) -> Result<u64, PlanError> {
    let (mut reads, mut bytes) = (0u64, 0u64);
    for layout::Wanted { runs, .. } in wanted {
        let span = runs.span().map_or(0, |span| span.len());
        let sparse = runs.widest_gap() > options.coalesce_gap_bytes;
        let single = if sparse { runs.count() } else { 0 };
        bytes = bytes.checked_add(span).ok_or(PlanError::TooLarge)?;
        reads = reads.saturating_add(span / options.chunk_bytes).saturating_add(single);
    }
    if reads > MAX_READS {
        return Err(PlanError::TooManyReads { bytes, chunk_bytes: options.chunk_bytes });
    }
    Ok(reads)
}

/// Which bytes go where.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Plan {
    pub(crate) arenas: Vec<u64>,
    pub(crate) tensors: Vec<PlannedTensor>,
    pub(crate) extents: Vec<Extent>,
}

/// One tensor, or part of one, and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct PlannedTensor {
    /// Which tensor.
    pub tensor: TensorId,
    /// Its element type in memory.
    pub dtype: Dtype,
    /// Its shape after slicing.
    pub shape: Box<[u64]>,
    /// The arena that holds it; meaningless if it has no bytes.
    pub arena: usize,
    /// Where it lies in the arena.
    pub place: ByteRange,
    runs: Runs,
    cast: Option<Cast>,
    file: FileId,
}

impl PlannedTensor {
    /// Its file.
    pub(crate) fn file(&self) -> FileId {
        self.file
    }

    /// Its bytes in the file.
    pub(crate) fn runs(&self) -> &Runs {
        &self.runs
    }

    /// Its bytes in the file, if they are in one piece; `None` also if it has none.
    pub fn bytes_in_file(&self) -> Option<ByteRange> {
        (self.runs.count() == 1).then(|| self.runs.get(0))
    }
}

/// Bytes of one file that are read together.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Extent {
    /// The file.
    pub file: FileId,
    /// What to read: begins on a block, ends on a block or at the end of the file. No longer than a chunk, but for
    /// converted elements that lie across the end of one.
    pub read: ByteRange,
    /// The bytes inside `read` that this extent is there for.
    pub wanted: ByteRange,
    /// Where they go.
    pub target: Target,
    /// The tensors that have bytes in it, as positions in [`Plan::tensors`].
    tensors: Range<usize>,
}

/// Where the bytes of an extent go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Target {
    /// Straight to their final place: file offset and address agree modulo the block.
    InPlace {
        /// The arena.
        arena: usize,
        /// Bytes of the arena that belong to this extent alone: room for `read` rounded up to blocks.
        room: ByteRange,
    },
    /// To a staging slot, from which runs are copied to the places of the extent's tensors.
    Staged,
}

/// A copy from an extent's staging slot to a tensor's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Copy {
    /// The bytes in the file.
    pub source: ByteRange,
    /// Offset in the arena of the first of them.
    pub destination: u64,
}

/// The bytes of one tensor that an extent delivers: contiguous in the tensor's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Piece {
    /// Position in [`Plan::tensors`].
    pub tensor: usize,
    /// The arena of the tensor.
    pub arena: usize,
    /// The bytes of the arena.
    pub place: ByteRange,
}

impl Plan {
    /// Plans to deliver `requests` of `catalog`.
    ///
    /// ```no_run
    /// use hoistway::{Catalog, plan::{Plan, PlanOptions, Selection}};
    /// let catalog = Catalog::open(&["model.safetensors"])?;
    /// let requests = Selection::all().select("*.weight").resolve(&catalog)?;
    /// let plan = Plan::new(&catalog, &requests, &PlanOptions::default())?;
    /// println!("{} bytes in {} reads", plan.tensor_bytes(), plan.extents().len());
    /// # Ok::<(), hoistway::Error>(())
    /// ```
    ///
    /// # Errors
    /// Any [`PlanError`].
    pub fn new(
        catalog: &Catalog,
        requests: &[TensorRequest],
        options: &PlanOptions,
    ) -> Result<Self, PlanError> {
        Self::within(catalog, requests, options, |_| Ok(()))
    }

    /// Like [`Plan::new`]. `may_make` is asked about the number of reads before memory is taken for them.
    pub(crate) fn within<E: From<PlanError>>(
        catalog: &Catalog,
        requests: &[TensorRequest],
        options: &PlanOptions,
        may_make: impl FnOnce(u64) -> Result<(), E>,
    ) -> Result<Self, E> {
        let may_make = |wanted: &[layout::Wanted]| may_make(number_of_reads(wanted, options)?);
        let laid_out = Self::laid_out(catalog, requests, options, may_make)?;
        let extents = extents::cut(&laid_out, catalog, options)?;
        let layout::LaidOut { arenas, tensors, .. } = laid_out;
        Ok(Self { arenas, tensors, extents })
    }

    /// Like [`Plan::new`], without reads, each of which takes memory: a part of a tensor may be of millions of runs.
    pub(crate) fn without_reads(
        catalog: &Catalog,
        requests: &[TensorRequest],
        options: &PlanOptions,
    ) -> Result<Self, PlanError> {
        let may_make = |_: &[layout::Wanted]| Ok::<(), PlanError>(());
        let layout::LaidOut { arenas, tensors, .. } = Self::laid_out(catalog, requests, options, may_make)?;
        Ok(Self { arenas, tensors, extents: Vec::new() })
    }

    fn laid_out<E: From<PlanError>>(
        catalog: &Catalog,
        requests: &[TensorRequest],
        options: &PlanOptions,
        may_make: impl FnOnce(&[layout::Wanted]) -> Result<(), E>,
    ) -> Result<layout::LaidOut, E> {
        if options.block.bytes() < MAX_ELEMENT_BYTES {
            return Err(PlanError::Block { block: options.block.bytes() }.into());
        }
        if options.chunk_bytes == 0 || !options.block.divides(options.chunk_bytes) {
            let PlanOptions { chunk_bytes, block, .. } = *options;
            return Err(PlanError::Chunk { chunk_bytes, block: block.bytes() }.into());
        }
        catalog.check_readable(&requests.iter().map(|request| request.tensor).collect::<Vec<_>>())?;
        let mut seen = HashSet::with_capacity(requests.len());
        let mut wanted = Vec::with_capacity(requests.len());
        for request in requests {
            let entry = catalog.tensor(request.tensor);
            if !seen.insert(request.tensor) {
                return Err(PlanError::RequestedTwice { tensor: entry.name.to_string() }.into());
            }
            let not_sliceable = |problem| PlanError::Slice {
                tensor: entry.name.to_string(),
                shape: entry.shape.to_vec(),
                problem,
            };
            let shape = request.slice.shape(&entry.shape).map_err(not_sliceable)?.into();
            let runs = Runs::new(entry.bytes.start(), entry.dtype, &entry.shape, &request.slice)
                .map_err(not_sliceable)?;
            let cast = match options.destination {
                Destination::Device { dtype: Some(to) } => Cast::between(entry.dtype, to)
                    .map_err(|(from, to)| PlanError::Cast { tensor: entry.name.to_string(), from, to })?,
                _ => None,
            };
            wanted.push(layout::Wanted {
                tensor: request.tensor,
                file: entry.file,
                dtype: cast.map_or(entry.dtype, Cast::to),
                shape,
                runs,
                cast,
            });
        }
        may_make(&wanted)?;
        Ok(layout::lay_out(wanted, options)?)
    }

    /// Length of each arena in bytes.
    pub fn arenas(&self) -> &[u64] {
        &self.arenas
    }

    /// The tensors: those read in place, then those staged, then those without bytes; file order within each.
    pub fn tensors(&self) -> &[PlannedTensor] {
        &self.tensors
    }

    /// The reads, in the order in which they begin: that of the files. Only a load that hastens a tensor has the reads of that
    /// before all others.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Bytes of all planned tensors in their files.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.runs.total_len()).sum()
    }

    /// Bytes of all reads: tensors, gaps that are read along, and padding to whole blocks.
    pub fn read_bytes(&self) -> u64 {
        self.extents.iter().map(|extent| extent.read.len()).sum()
    }

    /// Bytes of all arenas: tensors, gaps and padding.
    pub fn arena_bytes(&self) -> u64 {
        self.arenas.iter().sum()
    }

    /// Whether any extent needs a staging slot.
    pub fn is_staged(&self) -> bool {
        self.extents.iter().any(|extent| extent.target == Target::Staged)
    }

    /// The tensor bytes of `window` of an extent's file that the extent delivers, tensor by tensor.
    pub fn pieces(&self, extent: &Extent, window: ByteRange) -> impl Iterator<Item = Piece> + '_ {
        let window = extent.wanted.intersection(window);
        extent.tensors.clone().filter_map(move |position| {
            let tensor = &self.tensors[position];
            // Ascending in the file is ascending in the tensor, so what a window holds of it is contiguous.
            let mut parts = tensor.runs.within(window?);
            let (first, before) = parts.next()?;
            let len = first.len() + parts.map(|(part, _)| part.len()).sum::<u64>();
            let in_memory = |bytes| tensor.cast.map_or(Some(bytes), |cast| cast.resize(bytes));
            let place = ByteRange::at(tensor.place.start() + in_memory(before)?, in_memory(len)?)?;
            Some(Piece { tensor: position, arena: tensor.arena, place })
        })
    }

    /// Bytes of tensors in `window` of an extent's file that the extent delivers.
    pub fn delivered_bytes(&self, extent: &Extent, window: ByteRange) -> u64 {
        let Some(window) = extent.wanted.intersection(window) else { return 0 };
        let tensors = &self.tensors[extent.tensors.clone()];
        tensors.iter().flat_map(|tensor| tensor.runs.within(window)).map(|(part, _)| part.len()).sum()
    }

    /// Whether reads in whole blocks deliver an extent: it does not end in a file's last block, cut short.
    pub(crate) fn is_whole_blocks(extent: &Extent) -> bool {
        Alignment::BLOCK.divides(extent.read.end())
    }

    /// The copies that take a staged extent from its slot to a device.
    pub fn transfers(&self, extent: &Extent) -> Vec<Transfer> {
        transfer::transfers(self, extent)
    }

    /// Bytes that a staging slot must hold; 0 if none is needed.
    pub fn slot_bytes(&self, options: &PlanOptions) -> u64 {
        let staged = self.extents.iter().filter(|extent| extent.target == Target::Staged);
        let longest = staged.map(|extent| extent.read.len()).max().unwrap_or(0);
        options.block.up(longest).unwrap_or(longest)
    }

    /// The copies that fill `piece` from a staged extent.
    pub fn copies(&self, extent: &Extent, piece: Piece) -> impl Iterator<Item = Copy> + '_ {
        let tensor = &self.tensors[piece.tensor];
        tensor
            .runs
            .within(extent.wanted)
            .map(|(source, before)| Copy { source, destination: tensor.place.start() + before })
    }

    /// The tensor that byte `offset` of a file belongs to, among those that `extent` delivers.
    pub(crate) fn tensor_at(&self, extent: &Extent, offset: u64) -> Option<TensorId> {
        let mut touched = extent.tensors.clone();
        let position = touched
            .clone()
            .find(|&position| self.tensors[position].runs.span().is_some_and(|span| offset < span.end()));
        position.or(touched.next_back()).map(|position| self.tensors[position].tensor)
    }
}

#[cfg(test)]
mod tests;
