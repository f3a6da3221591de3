//! Plans: for any checkpoint, any slices and any options, each wanted byte is read once and lands in its place.
#![no_main]

use arbitrary::Arbitrary;
use hoistway::{
    Alignment, Catalog, Dtype,
    catalog::safetensors::Header,
    plan::{
        Cast, Destination, Layout, Plan, PlanError, PlanOptions, Target, TensorRequest, TensorSlice, Transfer,
    },
};
use libfuzzer_sys::fuzz_target;
use std::path::Path;

const MAX_TENSOR_BYTES: u64 = 1 << 16;

#[derive(Arbitrary, Debug)]
struct Input {
    tensors: Vec<Tensor>,
    padding: u8,
    layout: u8,
    block_shift: u8,
    blocks_a_chunk: u8,
    gap: u16,
    destination: u8,
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
        destination: [
            Destination::Host,
            Destination::Device { dtype: None },
            Destination::Device { dtype: Some(Dtype::Bf16) },
            Destination::Device { dtype: Some(Dtype::F32) },
        ][input.destination as usize % 4],
        device_arena_bytes: if input.destination < 128 { u64::MAX } else { block.bytes() },
    };
    let mut requests = Vec::new();
    for (id, tensor) in catalog.ids().zip(wanted) {
        if !tensor.wanted {
            continue;
        }
        let ranges = tensor.cuts.iter().take(5).map(|&(a, b)| u64::from(a)..u64::from(b)).collect();
        let request = TensorRequest::new(id, TensorSlice::new(ranges));
        match Plan::new(&catalog, std::slice::from_ref(&request), &options) {
            Ok(_) => requests.push(request),
            Err(PlanError::Slice { .. }) => {}
            Err(PlanError::Cast { from, .. }) => assert!(!Cast::SOURCES.contains(&from)),
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
        // A converted element may reach past the end of a chunk.
        let slack =
            if options.destination == Destination::Host { 0 } else { 8u64.next_multiple_of(block.bytes()) };
        assert!(block.divides(extent.read.start()) && extent.read.len() <= options.chunk_bytes + slack);
        assert!(block.divides(extent.read.end()) || extent.read.end() == len);
        match extent.target {
            Target::InPlace { arena, room } => {
                assert!(block.divides(room.start()) && room.len() >= extent.read.len());
                for i in 0..extent.read.len() {
                    put(arena, room.start() + i, file[(extent.read.start() + i) as usize]);
                }
            }
            Target::Staged if options.destination != Destination::Host => {
                let slot = &file[extent.read.start() as usize..extent.read.end() as usize];
                for transfer in plan.transfers(extent) {
                    carry_out(transfer, slot, &mut put);
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
        assert_eq!(planned.dtype.size_of(&planned.shape), Ok(planned.place.len()));
        if planned.place.is_empty() {
            continue;
        }
        assert_eq!(planned.place.start() % planned.dtype.alignment(), 0);
        let arena = &arenas[planned.arena][planned.place.start() as usize..planned.place.end() as usize];
        if planned.dtype != entry.dtype {
            assert!(arena.iter().all(Option::is_some), "a byte was never written");
        } else if let Some(bytes) = planned.bytes_in_file() {
            let expected = &file[bytes.start() as usize..bytes.end() as usize];
            assert!(arena.iter().copied().eq(expected.iter().copied().map(Some)), "other bytes");
        } else {
            assert!(arena.iter().all(Option::is_some), "a byte was never written");
        }
    }
});

/// Does what a device does with a slot. Conversions only mark the bytes that they write.
fn carry_out(transfer: Transfer, slot: &[u8], put: &mut impl FnMut(usize, u64, u8)) {
    match transfer {
        Transfer::Linear { source, arena, destination, len } => {
            for i in 0..len {
                put(arena, destination + i, slot[(source + i) as usize]);
            }
        }
        Transfer::Pitched { source, pitch, arena, destination, width, height } => {
            for i in 0..width * height {
                put(arena, destination + i, slot[(source + i / width * pitch + i % width) as usize]);
            }
        }
        Transfer::Converted { conversion, source, arena, destination, elements } => {
            let (from, to) = (conversion.from().bytes(), conversion.to().bytes());
            assert!(source + elements * from <= slot.len() as u64, "elements beyond the slot");
            for i in 0..elements * to {
                put(arena, destination + i, 0);
            }
        }
    }
}
