//! Host memory in which every tensor has its whole length in address space, and slices of resident experts have pages.
//!
//! A tensor lies as it does in its file, modulo a block, so that direct reads go in place but for the blocks at the ends of
//! a slice. These hold bytes of its neighbours too: they have pages as long as one of them is resident. Packed experts, whose slices are
//! whole blocks then, have none, as their tensors begin at a page.
#![allow(unsafe_code)]

use super::{PartPlace, UnitMemory, UnitRoom, add, whole_blocks};
use crate::{
    Error, Result,
    catalog::{ExpertCatalog, Part, Stored},
};
use hoistway::{Alignment, ByteRange, DeviceId};
use hoistway_io::{memory::Mapping, parallel::lock, sys::pages::page_size};
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex},
};

/// Host memory in which tensors are whole in address space.
pub(super) struct HostSparse {
    catalog: Arc<ExpertCatalog>,
    space: Mapping,
    /// Length of a page, and a block at least.
    page: Alignment,
    /// The start of each tensor in the space. Tensors without bytes have none.
    starts: HashMap<TensorKey, u64>,
    pages: Mutex<PageUse>,
}

/// A tensor: its file, its bytes there, and its name. Two names of the same bytes have a place each, so that neither gives
/// back pages that the other needs.
type TensorKey = (usize, ByteRange, Arc<str>);

#[derive(Debug, Default)]
struct PageUse {
    /// For pages that slices share, the number of units that need them.
    shared: HashMap<u64, u32>,
    /// Bytes of pages that units have.
    held_bytes: u64,
}

impl HostSparse {
    pub(super) fn new(catalog: &Arc<ExpertCatalog>) -> Result<Self> {
        let (mut starts, mut end) = (HashMap::new(), 0u64);
        let units = catalog.units().iter().enumerate();
        for (unit, part) in units.flat_map(|(unit, parts)| parts.parts().iter().map(move |part| (unit, part)))
        {
            let tensor = part.tensor_bytes;
            let key = key(part);
            // A tensor without bytes begins where the next one does, and needs no place.
            if tensor.is_empty() || starts.contains_key(&key) {
                continue;
            }
            let skip = match unit < catalog.experts().len() && catalog.packed_file().is_some() {
                true => 0,
                false => tensor.start() - Alignment::BLOCK.down(tensor.start()),
            };
            starts.insert(key, add(end, skip)?);
            end = add(end, whole_blocks(add(skip, tensor.len())?)?)?;
        }
        let space = Mapping::reserve(end as usize).map_err(no_memory(end, "address space"))?;
        space.pointer(0).as_ptr().expose_provenance();
        let page = Alignment::new(page_size() as u64).unwrap_or(Alignment::BLOCK).max(Alignment::BLOCK);
        Ok(Self { catalog: catalog.clone(), space, page, starts, pages: Mutex::default() })
    }

    /// The places of a unit's parts in the space.
    fn ranges(&self, unit: usize) -> Result<Vec<ByteRange>> {
        let unit = self.catalog.units().get(unit);
        let unit = unit.ok_or_else(|| Error::Internal("there is no such unit".into()))?;
        let place = |part: &Part| {
            if part.bytes.is_empty() {
                return Some(ByteRange::default());
            }
            let start = self.starts.get(&key(part))?;
            ByteRange::at(start + (part.bytes.start() - part.tensor_bytes.start()), part.bytes.len())
        };
        let ranges = unit.parts().iter().map(place);
        ranges.collect::<Option<_>>().ok_or_else(|| Error::Internal("a part has no place".into()))
    }
}

impl HostSparse {
    /// The pages that hold bytes of this range alone; none if it lies within a page or two.
    fn inner(&self, range: ByteRange) -> ByteRange {
        let start = self.page.up(range.start());
        start.and_then(|start| ByteRange::new(start, self.page.down(range.end()))).unwrap_or_default()
    }
}

impl UnitMemory for HostSparse {
    fn cost_bytes(&self, unit: usize) -> u64 {
        let ranges = self.ranges(unit).unwrap_or_default();
        let pages = ranges.iter().filter_map(|range| range.aligned_hull(self.page));
        pages.fold(0, |sum, hull| sum.saturating_add(hull.len()))
    }

    fn reserve(&self, unit: usize, _keep_bytes: u64) -> Result<Option<UnitRoom>> {
        let ranges = self.ranges(unit)?;
        let stored = self.catalog.stored(unit)?;
        for range in &ranges {
            self.space.commit(*range).map_err(no_memory(range.len(), "memory"))?;
        }
        let mut pages = lock(&self.pages);
        for range in &ranges {
            pages.held_bytes += self.inner(*range).len();
            for page in end_pages(*range, self.page) {
                let users = pages.shared.entry(page).or_default();
                *users += 1;
                if *users == 1 {
                    pages.held_bytes += self.page.bytes();
                }
            }
        }
        drop(pages);
        let place = |(range, stored): (&ByteRange, Stored)| {
            let address = self.space.pointer(range.start() as usize).addr().get() as u64;
            PartPlace::exact(address, stored)
        };
        let places = ranges.iter().zip(stored).map(place).collect();
        Ok(Some(UnitRoom { memory: DeviceId::Cpu, slot: None, places, after: None }))
    }

    fn release(&self, unit: usize, _room: &UnitRoom, _keep_bytes: u64) -> bool {
        let mut pages = lock(&self.pages);
        for range in self.ranges(unit).unwrap_or_default() {
            for page in end_pages(range, self.page) {
                let left = pages.shared.get_mut(&page).map_or(0, |users| {
                    *users = users.saturating_sub(1);
                    *users
                });
                if left == 0 {
                    pages.shared.remove(&page);
                    pages.held_bytes = pages.held_bytes.saturating_sub(self.page.bytes());
                    let end = (page + self.page.bytes()).min(self.space.len() as u64);
                    // SAFETY: no resident unit has bytes on this page, so nothing refers to them.
                    unsafe { self.space.release(ByteRange::new(page, end).unwrap_or_default()) };
                }
            }
            let inner = self.inner(range);
            pages.held_bytes = pages.held_bytes.saturating_sub(inner.len());
            // SAFETY: these pages hold bytes of this unit alone, which no lease shows and no read fills any more.
            unsafe { self.space.release(inner) };
        }
        true
    }

    fn held_bytes(&self) -> u64 {
        lock(&self.pages).held_bytes
    }

    fn tensor_address(&self, part: &Part) -> Option<u64> {
        let start = self.starts.get(&key(part))?;
        Some(self.space.pointer(*start as usize).addr().get() as u64)
    }

    fn tensor_stride(&self, part: &Part) -> Option<u64> {
        self.starts.get(&key(part)).map(|_| part.bytes.len())
    }
}

impl fmt::Debug for HostSparse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostSparse").field("bytes", &self.space.len()).finish_non_exhaustive()
    }
}

fn key(part: &Part) -> TensorKey {
    (part.file, part.tensor_bytes, part.tensor.clone())
}

/// The pages at the ends of a range that it shares with what lies beside it.
fn end_pages(range: ByteRange, page: Alignment) -> impl Iterator<Item = u64> {
    let (first, last) = (page.down(range.start()), page.down(range.end()));
    let head = (!page.divides(range.start()) && !range.is_empty()).then_some(first);
    let tail = (!page.divides(range.end()) && !range.is_empty() && head != Some(last)).then_some(last);
    head.into_iter().chain(tail)
}

fn no_memory(bytes: u64, kind: &'static str) -> impl Fn(std::io::Error) -> Error {
    move |source| hoistway::Error::Allocation { bytes, kind, source }.into()
}
