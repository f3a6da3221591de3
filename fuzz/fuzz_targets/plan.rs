//! Plans: for any checkpoint, any slices and any options, each wanted byte is read once and lands in its place.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use std::path::Path;
use windlass::{
    Alignment, Catalog, Dtype,
    catalog::safetensors::Header,
    plan::{Layout, Plan, PlanError, PlanOptions, Target, TensorRequest, TensorSlice},
};

const MAX_TENSOR_BYTES: u64 = 1 << 16;

#[derive(Arbitrary, Debug)]
struct Input {
    tensors: Vec<Tensor>,
    padding: u8,
    layout: u8,
    block_shift: u8,
    blocks_a_chunk: u8,
    gap: u16,
}

#[derive(Arbitrary, Debug)]
struct Tensor {
    dtype: u8,
    shape: [u8; 3],
    rank: u8,
    wanted: bool,
    cuts: Vec<(u8, u8)>,
}

fuzz_target!(|input: Input| {
    let mut offset = 0;
    let mut entries = Vec::new();
    let mut wanted = Vec::new();
    for (i, tensor) in input.tensors.iter().take(40).enumerate() {
        let dtype = Dtype::ALL[tensor.dtype as usize % Dtype::ALL.len()];
        let shape: Vec<u64> =
            tensor.shape.iter().take(tensor.rank as usize % 4).map(|&dim| u64::from(dim)).collect();
        let Ok(size) = dtype.size_of(&shape) else { continue };
        if size > MAX_TENSOR_BYTES {
            continue;
        }
        let end = offset + size;
        entries.push(format!(
            r#""t{i}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{offset},{end}]}}"#
        ));
        offset = end;
        wanted.push(tensor);
    }
    let text = format!("{{{}}}{}", entries.join(","), " ".repeat(input.padding as usize));
    let len = 8 + text.len() as u64 + offset;
    let header = Header::parse(text.as_bytes(), len).expect("the header is valid");
    // Bytes of a file at `offset`: distinct near each other, so that a shift shows.
    let file: Vec<u8> = (0..len).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect();
    let catalog = Catalog::from_header(Path::new("f"), len, header).expect("the catalog is valid");

    let block = Alignment::new(8 << (input.block_shift % 10)).expect("a power of two");
    let options = PlanOptions {
        layout: [Layout::File, Layout::Packed, Layout::Tensor][input.layout as usize % 3],
        block,
        chunk_bytes: block.bytes() * u64::from(input.blocks_a_chunk % 16 + 1).max(4096 / block.bytes()),
        coalesce_gap_bytes: input.gap.into(),
    };
    let mut requests = Vec::new();
    for (id, tensor) in catalog.ids().zip(wanted) {
        if !tensor.wanted {
            continue;
        }
        let ranges = tensor.cuts.iter().take(5).map(|&(a, b)| u64::from(a)..u64::from(b)).collect();
        let request = TensorRequest { tensor: id, slice: TensorSlice::new(ranges) };
        match Plan::new(&catalog, std::slice::from_ref(&request), &options) {
            Ok(_) => requests.push(request),
            Err(PlanError::Slice { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
    let plan = Plan::new(&catalog, &requests, &options).expect("each request can be planned by itself");
    let mut arenas: Vec<Vec<Option<u8>>> =
        plan.arenas().iter().map(|&len| vec![None; len as usize]).collect();
    let mut put = |arena: usize, at: u64, byte: u8| {
        assert_eq!(arenas[arena][at as usize].replace(byte), None, "written twice");
    };
    for extent in plan.extents() {
        assert!(block.divides(extent.read.start()) && extent.read.len() <= options.chunk_bytes);
        assert!(block.divides(extent.read.end()) || extent.read.end() == len);
        match extent.target {
            Target::InPlace { arena, room } => {
                assert!(block.divides(room.start()) && room.len() >= extent.read.len());
                for i in 0..extent.read.len() {
                    put(arena, room.start() + i, file[(extent.read.start() + i) as usize]);
                }
            }
            Target::Staged => {
                for piece in plan.pieces(extent, extent.read) {
                    for copy in plan.copies(extent, piece) {
                        for i in 0..copy.source.len() {
                            put(piece.arena, copy.destination + i, file[(copy.source.start() + i) as usize]);
                        }
                    }
                }
            }
        }
    }
    for request in &requests {
        let entry = catalog.tensor(request.tensor);
        let planned =
            plan.tensors().iter().find(|planned| planned.tensor == request.tensor).expect("planned");
        assert_eq!(entry.dtype.size_of(&planned.shape), Ok(planned.place.len()));
        if planned.place.is_empty() {
            continue;
        }
        assert_eq!(planned.place.start() % entry.dtype.alignment(), 0);
        let arena = &arenas[planned.arena][planned.place.start() as usize..planned.place.end() as usize];
        if let Some(bytes) = planned.bytes_in_file() {
            let expected = &file[bytes.start() as usize..bytes.end() as usize];
            assert!(arena.iter().copied().eq(expected.iter().copied().map(Some)), "other bytes");
        } else {
            assert!(arena.iter().all(Option::is_some), "a byte was never written");
        }
    }
});
