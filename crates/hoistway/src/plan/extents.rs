//! Cuts the wanted bytes of each file into extents: on a fixed grid of file offsets, so that reads stay aligned
//! to stripes, and so that two extents never read into the same block of an arena.
#![forbid(unsafe_code)]

use super::{
    Destination, Extent, PlanError, PlanOptions, Target,
    layout::{LaidOut, Region},
};
use crate::{ByteRange, Catalog, catalog::FileId};
use std::ops::Range;

pub(super) fn cut(
    laid_out: &LaidOut,
    catalog: &Catalog,
    options: &PlanOptions,
) -> Result<Vec<Extent>, PlanError> {
    let mut extents = Vec::new();
    for region in &laid_out.regions {
        cut_region(region, laid_out, catalog, options, &mut extents)?;
    }
    cut_staged(laid_out, catalog, options, &mut extents)?;
    extents.sort_by_key(|extent| (extent.file, extent.read.start()));
    Ok(extents)
}

fn cut_region(
    region: &Region,
    laid_out: &LaidOut,
    catalog: &Catalog,
    options: &PlanOptions,
    extents: &mut Vec<Extent>,
) -> Result<(), PlanError> {
    let hull = region.wanted.aligned_hull(options.block).ok_or(PlanError::TooLarge)?;
    // Extents ascend and tensors do not overlap: each search begins where the last one ended.
    let mut first = region.tensors.start;
    for cell in cells(hull, options.chunk_bytes) {
        let Some(wanted) = cell.intersection(region.wanted) else {
            continue;
        };
        let bytes_of = |position: usize| laid_out.tensors[position].runs.get(0);
        while first < region.tensors.end && bytes_of(first).end() <= wanted.start() {
            first += 1;
        }
        let mut end = first;
        while end < region.tensors.end && bytes_of(end).start() < wanted.end() {
            end += 1;
        }
        let room = ByteRange::at(region.offset + (cell.start() - hull.start()), cell.len());
        extents.push(Extent {
            file: region.file,
            read: within_file(cell, region.file, catalog),
            wanted,
            target: Target::InPlace { arena: region.arena, room: room.ok_or(PlanError::TooLarge)? },
            tensors: first..end,
        });
    }
    Ok(())
}

fn cut_staged(
    laid_out: &LaidOut,
    catalog: &Catalog,
    options: &PlanOptions,
    extents: &mut Vec<Extent>,
) -> Result<(), PlanError> {
    let mut pending: Option<(FileId, ByteRange, Range<usize>)> = None;
    let mut push = |(file, wanted, tensors): (FileId, ByteRange, Range<usize>)| {
        let hull = wanted.aligned_hull(options.block).ok_or(PlanError::TooLarge)?;
        let read = within_file(hull, file, catalog);
        extents.push(Extent { file, read, wanted, target: Target::Staged, tensors });
        Ok(())
    };
    for position in laid_out.staged.clone() {
        let tensor = &laid_out.tensors[position];
        let runs = &tensor.runs;
        // What reads to a device past the host's memory cannot serve is kept apart: the last block, if it is not whole.
        let tail = match options.destination {
            Destination::Host => u64::MAX,
            Destination::Device { .. } => options.block.down(catalog.file(tensor.file).len),
        };
        // No converted element may lie in two extents.
        let element = tensor.cast.map_or(1, |cast| cast.from().block_bits() / 8);
        // Runs with small gaps are read through; the others one by one.
        let dense = (runs.widest_gap() <= options.coalesce_gap_bytes).then(|| runs.span()).flatten();
        let sparse = (0..if dense.is_some() { 0 } else { runs.count() }).map(|i| runs.get(i));
        for bytes in dense.into_iter().chain(sparse) {
            for part in parts(bytes, options.chunk_bytes, tail, element) {
                if let Some((file, wanted, tensors)) = &mut pending
                    && *file == tensor.file
                    && wanted.start() / options.chunk_bytes == part.start() / options.chunk_bytes
                    && (wanted.end() <= tail) == (part.end() <= tail)
                    && part.start() - wanted.end() <= options.coalesce_gap_bytes
                    && let Some(joined) = ByteRange::new(wanted.start(), part.end())
                {
                    *wanted = joined;
                    tensors.end = position + 1;
                } else if let Some(done) = pending.replace((tensor.file, part, position..position + 1)) {
                    push(done)?;
                }
            }
        }
    }
    pending.map_or(Ok(()), push)
}

/// `bytes` in pieces: the elements that begin in each cell of the grid, those that reach beyond `tail` apart.
fn parts(bytes: ByteRange, chunk: u64, tail: u64, element: u64) -> impl Iterator<Item = ByteRange> {
    let whole = move |offset: u64| (offset - bytes.start()) / element * element + bytes.start();
    let in_cell = move |cell: ByteRange| {
        let up = |offset: u64| whole(offset.saturating_add(element - 1)).min(bytes.end());
        ByteRange::new(up(cell.start()), up(cell.end())).filter(|part| !part.is_empty())
    };
    cells(bytes, chunk).filter_map(in_cell).flat_map(move |part| {
        let cut = whole(tail.clamp(part.start(), part.end()));
        let two = [ByteRange::new(part.start(), cut), ByteRange::new(cut, part.end())];
        two.into_iter().flatten().filter(|part| !part.is_empty())
    })
}

/// The parts of `range` in each cell of the grid. Ends only on multiples of `chunk` or at the range's own ends.
fn cells(range: ByteRange, chunk: u64) -> impl Iterator<Item = ByteRange> {
    let mut start = range.start();
    std::iter::from_fn(move || {
        let next = (start / chunk + 1).saturating_mul(chunk).min(range.end());
        let cell = ByteRange::new(start, next).filter(|cell| !cell.is_empty())?;
        start = next;
        Some(cell)
    })
}

/// The last block of a file is rarely whole.
fn within_file(range: ByteRange, file: FileId, catalog: &Catalog) -> ByteRange {
    ByteRange::new(range.start(), range.end().min(catalog.file(file).len)).unwrap_or(range)
}
