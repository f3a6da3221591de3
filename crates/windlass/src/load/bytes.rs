//! Tensors of a file that is in memory already.
#![forbid(unsafe_code)]

use super::{Tensor, TensorMemory};
use crate::{
    ByteRange, Catalog, DeviceId, Error, Result,
    catalog::{OpenOptions, header_of_bytes},
    memory::{self, Fill, MemoryRequest, WriteRegion},
    parallel::{self, lock},
    plan::{Layout, Plan, PlanOptions, PlannedTensor, Selection},
};
use std::{
    path::Path,
    sync::{Arc, Mutex},
};

/// Threads that copy, at most: a few saturate memory.
const MAX_COPIERS: usize = 4;
/// What messages call a file that has no name.
const NAME: &str = "<bytes>";

/// The tensors of a file whose bytes are `data`, in the order of the file: copies, which share one arena.
///
/// ```
/// let header = br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
/// let mut file = (header.len() as u64).to_le_bytes().to_vec();
/// file.extend_from_slice(header);
/// file.extend_from_slice(&[1, 2]);
/// let tensors = windlass::load_bytes(&file, &Default::default())?;
/// assert_eq!(tensors[0].bytes()?, [1, 2].as_slice());
/// # Ok::<(), windlass::Error>(())
/// ```
///
/// # Errors
/// Those that opening the file would have, and [`Error::MemoryBudget`].
pub fn load_bytes(data: &[u8], options: &OpenOptions) -> Result<Vec<Tensor>> {
    let name = Path::new(NAME);
    let header = header_of_bytes(data, name, options)?;
    let catalog = Catalog::from_header(name, data.len() as u64, header)?;
    let requests = Selection::all().resolve(&catalog)?;
    let plan =
        Plan::new(&catalog, &requests, &PlanOptions { layout: Layout::Packed, ..PlanOptions::default() })?;
    memory::budget::check(plan.arena_bytes(), 0, None)?;
    let arenas = plan.arenas().iter().map(|&len| memory::allocate(len, &MemoryRequest::default()));
    let arenas: Vec<_> = arenas.collect::<Result<_>>()?;

    let mut copies: Vec<Copy<'_>> = Vec::new();
    let mut fills = Vec::with_capacity(arenas.len());
    for (number, arena) in arenas.into_iter().enumerate() {
        let placed = plan.tensors().iter().enumerate();
        let placed = placed.filter(|(_, tensor)| tensor.arena == number && !tensor.place.is_empty());
        let tensors: Vec<(usize, ByteRange)> =
            placed.map(|(position, tensor)| (position, tensor.place)).collect();
        let writes: Vec<ByteRange> = tensors.iter().map(|(_, place)| *place).collect();
        let (fill, regions) = Fill::new(arena, tensors.iter().copied(), &writes)?;
        for ((position, _), region) in tensors.into_iter().zip(regions) {
            let bytes = plan.tensors()[position].bytes_in_file();
            let bytes = bytes.and_then(|bytes| data.get(bytes.start() as usize..bytes.end() as usize));
            let missing = || Error::Internal("a tensor leaves the file that was checked".into());
            copies.push(Copy {
                arena: number,
                from: bytes.ok_or_else(missing)?,
                to: Mutex::new(Some(region)),
            });
        }
        fills.push(fill);
    }
    let written = parallel::map(&copies, parallel::cores().min(MAX_COPIERS), |copy| {
        let mut region = lock(&copy.to).take()?;
        region.as_mut_slice().copy_from_slice(copy.from);
        Some((copy.arena, region))
    });

    let mut memories: Vec<TensorMemory> =
        plan.tensors().iter().map(|_| TensorMemory::Host(Arc::new(memory::Block::empty()))).collect();
    for (arena, region) in written.into_iter().flatten() {
        fills[arena].complete(region, |position, block| {
            memories[position] = TensorMemory::Host(Arc::new(block));
        })?;
    }
    let mut tensors: Vec<_> = plan.tensors().iter().zip(memories).collect();
    tensors.sort_by_key(|(planned, _)| planned.tensor);
    let tensor = |(planned, memory): (&PlannedTensor, _)| {
        Tensor::new(catalog.tensor(planned.tensor), planned, DeviceId::Cpu, memory)
    };
    Ok(tensors.into_iter().map(tensor).collect())
}

/// Bytes of a tensor on their way to its place.
struct Copy<'a> {
    arena: usize,
    from: &'a [u8],
    to: Mutex<Option<WriteRegion>>,
}
