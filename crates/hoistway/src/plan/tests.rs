//! Properties of plans: every wanted byte is delivered exactly once, to the right place, by reads that the
//! hardware can do.

use super::*;
use crate::{
    Dtype, GgmlType,
    catalog::{
        gguf::{self, ByteOrder, Gguf, GgufTensor},
        safetensors::Header,
    },
};
use hoistway_device::Conversion;
use proptest::prelude::*;
use std::path::Path;

/// A safetensors file: the catalog that describes it, and its bytes.
fn model(tensors: &[(Dtype, Vec<u64>)], padding: usize) -> (Catalog, Vec<u8>) {
    let (catalog, len) = catalog(tensors, padding);
    (catalog, (0..len).map(|i| ((i * 31) >> 3) as u8 ^ i as u8).collect())
}

/// The catalog of a file that can hold these tensors, and its length.
fn catalog(tensors: &[(Dtype, Vec<u64>)], padding: usize) -> (Catalog, u64) {
    if tensors.iter().any(|(dtype, _)| !dtype.is_of_safetensors()) {
        return catalog_of_gguf(tensors, padding as u64);
    }
    let mut offset = 0;
    let mut entries = Vec::new();
    for (i, (dtype, shape)) in tensors.iter().enumerate() {
        let end = offset + dtype.size_of(shape).unwrap();
        entries.push(format!(
            r#""t{i}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{offset},{end}]}}"#
        ));
        offset = end;
    }
    let text = format!("{{{}}}{}", entries.join(","), " ".repeat(padding));
    let len = 8 + text.len() as u64 + offset;
    let header = Header::parse(text.as_bytes(), len).unwrap();
    (Catalog::from_header(Path::new("model.safetensors"), len, header).unwrap(), len)
}

/// The catalog of a GGUF file that is embedded in another, and the length of that.
fn catalog_of_gguf(tensors: &[(Dtype, Vec<u64>)], offset: u64) -> (Catalog, u64) {
    let data_start = offset + 64;
    let mut end = data_start;
    let place = |(i, (dtype, shape)): (usize, &(Dtype, Vec<u64>))| {
        let start = data_start + (end - data_start).next_multiple_of(32);
        let bytes = ByteRange::at(start, dtype.size_of(shape).unwrap()).unwrap();
        end = bytes.end();
        GgufTensor { name: format!("t{i}"), dtype: *dtype, shape: shape.clone(), bytes }
    };
    let tensors = tensors.iter().enumerate().map(place).collect();
    let header = gguf::Header {
        version: 3,
        byte_order: ByteOrder::Little,
        alignment: 32,
        offset,
        data_start,
        metadata: gguf::KeyValues::default(),
    };
    (Catalog::from_header(Path::new("model.gguf"), end, Gguf { header, tensors }).unwrap(), end)
}

/// Does what an executor does, with `Vec`s for arenas.
fn execute(plan: &Plan, file: &[u8], options: &PlanOptions) -> Vec<Vec<Option<u8>>> {
    let mut arenas: Vec<Vec<Option<u8>>> =
        plan.arenas().iter().map(|&len| vec![None; len as usize]).collect();
    let mut put = |arena: usize, offset: u64, byte: u8| {
        let cell = &mut arenas[arena][offset as usize];
        assert_eq!(cell.replace(byte), None, "byte {offset} of arena {arena} is written twice");
    };
    for extent in plan.extents() {
        match extent.target {
            Target::InPlace { arena, room } => {
                for i in 0..extent.read.len() {
                    put(arena, room.start() + i, file[(extent.read.start() + i) as usize]);
                }
            }
            Target::Staged if matches!(options.destination, Destination::Device { .. }) => {
                for transfer in plan.transfers(extent) {
                    carry_out(
                        transfer,
                        &file[extent.read.start() as usize..extent.read.end() as usize],
                        &mut put,
                    );
                }
            }
            Target::Staged => {
                for piece in plan.pieces(extent, extent.read) {
                    let mut copied = 0;
                    for copy in plan.copies(extent, piece) {
                        assert!(extent.read.contains(copy.source));
                        assert_eq!(copy.destination, piece.place.start() + copied);
                        copied += copy.source.len();
                        for i in 0..copy.source.len() {
                            put(piece.arena, copy.destination + i, file[(copy.source.start() + i) as usize]);
                        }
                    }
                    assert_eq!(copied, piece.place.len());
                }
            }
        }
    }
    arenas
}

/// Does what a device does with a slot.
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
            let len = elements * conversion.from().bytes();
            let converted = converted(conversion, &slot[source as usize..(source + len) as usize]);
            for (i, byte) in converted.into_iter().enumerate() {
                put(arena, destination + i as u64, byte);
            }
        }
    }
}

/// Stands for a conversion: each element longer or shorter, and inverted.
fn converted(conversion: Conversion, bytes: &[u8]) -> Vec<u8> {
    let (from, to) = (conversion.from().bytes() as usize, conversion.to().bytes() as usize);
    let resized = |element: &[u8]| element.iter().cycle().take(to).map(|byte| !byte).collect::<Vec<u8>>();
    bytes.chunks_exact(from).flat_map(resized).collect()
}

fn check(plan: &Plan, catalog: &Catalog, file: &[u8], requests: &[TensorRequest], options: &PlanOptions) {
    let block = options.block;
    for extent in plan.extents() {
        assert!(block.divides(extent.read.start()));
        assert!(block.divides(extent.read.end()) || extent.read.end() == file.len() as u64);
        let converts = matches!(options.destination, Destination::Device { dtype: Some(_) });
        let slack = if converts { 8u64.next_multiple_of(block.bytes()) } else { 0 };
        assert!(extent.read.len() <= options.chunk_bytes + slack && extent.read.contains(extent.wanted));
        assert!(extent.target != Target::Staged || extent.read.len() <= plan.slot_bytes(options));
        assert!(!extent.wanted.is_empty());
        if let Target::InPlace { arena, room } = extent.target {
            assert!(block.divides(room.start()) && block.divides(room.len()));
            assert!(room.len() >= extent.read.len() && room.end() <= plan.arenas()[arena]);
        }
    }
    let arenas = execute(plan, file, options);
    assert_eq!(plan.tensors().len(), requests.len());
    let (mut delivered, mut in_memory) = (0, 0);
    for request in requests {
        let planned = plan.tensors().iter().find(|planned| planned.tensor == request.tensor).unwrap();
        let entry = catalog.tensor(request.tensor);
        let runs = Runs::new(entry.bytes.start(), entry.dtype, &entry.shape, &request.slice).unwrap();
        let expected: Vec<u8> = (0..runs.count())
            .flat_map(|i| &file[runs.get(i).start() as usize..runs.get(i).end() as usize])
            .copied()
            .collect();
        delivered += expected.len() as u64;
        in_memory += planned.place.len();
        let expected = match planned.cast {
            Some(cast) => converted(cast.conversion(), &expected),
            None => expected,
        };
        assert_eq!(planned.place.len(), expected.len() as u64);
        if expected.is_empty() {
            continue;
        }
        let alignment = match options.destination {
            Destination::Host => entry.dtype.alignment(),
            Destination::Device { .. } if entry.dtype.block_len() > 1 => 32,
            Destination::Device { .. } => 16,
        };
        assert_eq!(planned.place.start() % alignment, 0, "{} is misaligned", entry.name);
        let place = planned.place.start() as usize..planned.place.end() as usize;
        let found: Vec<Option<u8>> = arenas[planned.arena][place].to_vec();
        assert_eq!(found, expected.into_iter().map(Some).collect::<Vec<_>>(), "tensor {}", entry.name);
    }
    assert_eq!(plan.tensor_bytes(), delivered);
    let pieces: u64 = plan
        .extents()
        .iter()
        .flat_map(|extent| plan.pieces(extent, extent.read))
        .map(|piece| piece.place.len())
        .sum();
    assert_eq!(pieces, in_memory, "the pieces of all extents are the tensors");
    let counted: u64 = plan.extents().iter().map(|extent| plan.delivered_bytes(extent, extent.read)).sum();
    assert_eq!(counted, delivered);
}

fn dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::ALL)
}

prop_compose! {
    fn tensor()(dtype in dtype(), shape in prop::collection::vec(0..24u64, 0..4)) -> (Dtype, Vec<u64>) {
        let mut shape = shape;
        if dtype.block_bits() < 8 {
            // Whole bytes, as a valid file has.
            shape.push(4);
        }
        (dtype, shape)
    }
}

prop_compose! {
    fn tensor_of_gguf()(
        block in prop::sample::select(GgmlType::ALL),
        shape in prop::collection::vec(0..4u64, 1..4),
        is_plain in prop::bool::weighted(0.2),
    ) -> (Dtype, Vec<u64>) {
        let dtype = if is_plain { Dtype::F32 } else { Dtype::Quantized(block) };
        let mut shape = shape;
        *shape.last_mut().unwrap() *= dtype.block_len();
        (dtype, shape)
    }
}

fn tensors() -> impl Strategy<Value = Vec<(Dtype, Vec<u64>)>> {
    prop_oneof![prop::collection::vec(tensor(), 0..12), prop::collection::vec(tensor_of_gguf(), 0..6)]
}

prop_compose! {
    fn options()(
        layout in prop::sample::select(&[Layout::File, Layout::Packed, Layout::Tensor][..]),
        block_shift in 0..9u32,
        blocks_a_chunk in 1..9u64,
        coalesce_gap_bytes in prop::sample::select(&[0u64, 1, 100, 5000][..]),
        destination in prop::sample::select(&[
            Destination::Host,
            Destination::Device { dtype: None },
            Destination::Device { dtype: Some(Dtype::Bf16) },
            Destination::Device { dtype: Some(Dtype::F32) },
        ][..]),
    ) -> PlanOptions {
        let block = Alignment::new(8 << block_shift).unwrap();
        PlanOptions { layout, block, chunk_bytes: block.bytes() * blocks_a_chunk, coalesce_gap_bytes, destination, ..PlanOptions::default() }
    }
}

/// For each tensor: leave it out, or take the part that these fractions cut from each dimension.
type Wish = Option<Vec<(f64, f64)>>;

fn wishes(tensors: usize) -> impl Strategy<Value = Vec<Wish>> {
    let cut = prop::collection::vec((0.0..1.0f64, 0.0..1.0f64), 0..4);
    prop::collection::vec(prop::option::weighted(0.8, cut), tensors)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 8 } else { 512 }))]

    #[test]
    fn every_wanted_byte_arrives_once_and_in_place(
        (tensors, wishes) in tensors()
            .prop_flat_map(|tensors| { let count = tensors.len(); (Just(tensors), wishes(count)) }),
        padding in 0..70usize,
        options in options(),
        (is_in_order, reads, shift, (least, more)) in (any::<bool>(), 1..12u64, 0..4u32, (0..3u64, 0..4u64)),
    ) {
        let (catalog, file) = model(&tensors, padding);
        let mut requests = Vec::new();
        for (id, wish) in catalog.ids().zip(wishes) {
            let Some(cut) = wish else { continue };
            let entry = catalog.tensor(id);
            let ranges = cut.iter().zip(&*entry.shape).map(|((a, b), &size)| {
                let (a, b) = ((a * (size + 1) as f64) as u64, (b * (size + 1) as f64) as u64);
                let (start, end) = (a.min(b), a.max(b));
                // Half of the cuts through quantised rows fall between blocks.
                let unit = if (start + end) % 2 == 0 { entry.dtype.block_len() } else { 1 };
                let unit = if size.is_multiple_of(unit) { unit } else { 1 };
                start / unit * unit..end / unit * unit
            });
            let slice = TensorSlice::new(ranges.collect());
            match Plan::new(&catalog, &[TensorRequest { tensor: id, slice: slice.clone() }], &options) {
                Ok(_) => requests.push(TensorRequest { tensor: id, slice }),
                Err(PlanError::Cast { from, .. }) => prop_assert!(!Cast::SOURCES.contains(&from)),
                Err(PlanError::Slice { problem: SliceError::PartialByte, .. }) => {
                    prop_assert!(entry.dtype.block_bits() < 8);
                }
                Err(PlanError::Slice { problem: SliceError::PartialBlock { block_len }, .. }) => {
                    prop_assert!(block_len > 1 && block_len == entry.dtype.block_len());
                }
                Err(error) => prop_assert!(false, "{}", error),
            }
        }
        let mut plan = Plan::new(&catalog, &requests, &options).unwrap();
        check(&plan, &catalog, &file, &requests, &options);
        let Some(position) = plan.first_tensor(is_in_order, |_| true) else { return Ok(()) };
        let (bytes, before) = (plan.tensors()[position].runs.get(0), plan.clone());
        let step = Alignment::new(options.block.bytes() << shift).unwrap();
        let read_bytes = (step.bytes() * least, step.bytes() * (least + more));
        plan.cut_apart(position, step, reads, read_bytes);
        check(&plan, &catalog, &file, &requests, &options);
        if plan == before {
            return Ok(());
        }
        // What is read first is the tensor, with what shares a step of its ends.
        let hull = bytes.aligned_hull(step).unwrap();
        let is_of_it = |extent: &&Extent| extent.tensors.contains(&position);
        let first: Vec<_> = plan.extents().iter().take_while(is_of_it).collect();
        let delivered: u64 = first.iter().map(|extent| extent.wanted.intersection(bytes).unwrap().len()).sum();
        prop_assert_eq!(delivered, bytes.len());
        prop_assert!(first.len() as u64 <= reads && plan.extents().len() as u64 <= before.extents().len() as u64 + reads + 2);
        for extent in first {
            prop_assert!(hull.contains(extent.read) && extent.read.len() <= read_bytes.1);
        }
    }
}

#[test]
fn neighbouring_tensors_are_read_in_one_extent() {
    let (catalog, file) = model(&vec![(Dtype::F32, vec![64]); 100], 0);
    let requests: Vec<_> = catalog.ids().map(TensorRequest::whole).collect();
    let plan = Plan::new(&catalog, &requests, &PlanOptions::default()).unwrap();
    assert_eq!(plan.extents().len(), 1);
    assert_eq!(plan.arenas().len(), 1);
    check(&plan, &catalog, &file, &requests, &PlanOptions::default());
}

#[test]
fn many_small_tensors_go_to_a_device_in_one_copy_and_columns_in_a_pitched_one() {
    let options = PlanOptions { destination: Destination::Device { dtype: None }, ..PlanOptions::default() };
    let (catalog, _) = model(&vec![(Dtype::F32, vec![64]); 100], 1);
    let requests: Vec<_> = catalog.ids().map(TensorRequest::whole).collect();
    let transfers_of = |plan: &Plan| -> Vec<Transfer> {
        plan.extents().iter().flat_map(|extent| plan.transfers(extent)).collect()
    };
    let transfers = transfers_of(&Plan::new(&catalog, &requests, &options).unwrap());
    // The file's last block, cut short, is apart.
    let [Transfer::Linear { len: first, .. }, Transfer::Linear { len: second, .. }] = transfers[..] else {
        panic!("{transfers:?}");
    };
    assert_eq!(first + second, 25600);

    let (catalog, _) = model(&[(Dtype::F32, vec![64, 32]), (Dtype::U8, vec![5000])], 0);
    let tensor = catalog.ids().next().unwrap();
    let slice = TensorSlice::new(vec![0..64, 8..16]);
    let transfers = transfers_of(&Plan::new(&catalog, &[TensorRequest { tensor, slice }], &options).unwrap());
    assert!(
        matches!(transfers[..], [Transfer::Pitched { pitch: 128, width: 32, height: 64, .. }]),
        "{transfers:?}"
    );
}

#[test]
fn memory_of_a_device_is_cut_so_that_it_can_come_back() {
    let (catalog, _) = catalog(&vec![(Dtype::U8, vec![40 << 20]); 3], 0);
    let requests: Vec<_> = catalog.ids().map(TensorRequest::whole).collect();
    let arenas = |layout| {
        let destination = Destination::Device { dtype: None };
        let options = PlanOptions { layout, destination, ..PlanOptions::default() };
        Plan::new(&catalog, &requests, &options).unwrap().arenas().to_vec()
    };
    assert_eq!(arenas(Layout::Tensor), [40 << 20; 3]);
    assert_eq!(arenas(Layout::File), [120 << 20], "three times the smallest");
    assert_eq!(arenas(Layout::Packed), [120 << 20]);
}

/// A small tensor keeps 64 MiB at most, a large one four times its own length.
#[test]
fn large_tensors_share_memory_of_a_device_that_no_small_one_keeps() {
    let sizes = [1, 40 << 20, 40 << 20, 40 << 20, 40 << 20, 40 << 20, 30 << 20, 1, 30 << 20];
    let tensors: Vec<_> = sizes.iter().map(|&size| (Dtype::U8, vec![size])).collect();
    let (catalog, _) = catalog(&tensors, 0);
    let requests: Vec<_> = catalog.ids().map(TensorRequest::whole).collect();
    let destination = Destination::Device { dtype: None };
    let arenas = |device_arena_bytes| {
        let options = PlanOptions { destination, device_arena_bytes, ..PlanOptions::default() };
        let plan = Plan::new(&catalog, &requests, &options).unwrap();
        for (arena, &len) in plan.arenas().iter().enumerate() {
            let own = plan.tensors().iter().filter(|tensor| tensor.arena == arena);
            let smallest = own.map(|tensor| tensor.place.len()).min().unwrap();
            // What lies between tensors aligns them.
            assert!(len <= (64 << 20).max(4 * smallest) + 4096, "{len} bytes for one of {smallest}");
        }
        plan.arenas().len()
    };
    assert_eq!(arenas(u64::MAX), 3);
    assert!(arenas(64 << 20) > 4, "a bound holds");
}

#[test]
fn gaps_beyond_the_limit_are_skipped() {
    let (catalog, _) =
        model(&[(Dtype::U8, vec![10_000]), (Dtype::U8, vec![500_000]), (Dtype::U8, vec![10_000])], 0);
    let requests: Vec<_> = catalog.ids().step_by(2).map(TensorRequest::whole).collect();
    let skipping = Plan::new(&catalog, &requests, &PlanOptions::default()).unwrap();
    assert_eq!(skipping.extents().len(), 2);
    assert!(skipping.read_bytes() < 40_000);
    let reading_through = PlanOptions { coalesce_gap_bytes: 1 << 20, ..PlanOptions::default() };
    assert_eq!(Plan::new(&catalog, &requests, &reading_through).unwrap().extents().len(), 1);
}

#[test]
fn a_column_of_a_matrix_reads_only_its_part_of_each_row() {
    let rows_of_80_kib = (Dtype::U8, vec![8, 80 << 10]);
    let (catalog, _) = model(&[rows_of_80_kib], 0);
    let tensor = catalog.ids().next().unwrap();
    let slice = TensorSlice::new(vec![0..8, 0..4096]);
    let plan = Plan::new(&catalog, &[TensorRequest { tensor, slice }], &PlanOptions::default()).unwrap();
    assert_eq!(plan.extents().len(), 8);
    assert!(plan.read_bytes() <= 8 * 3 * 4096, "{} bytes are read", plan.read_bytes());
    assert_eq!(plan.tensor_bytes(), 8 * 4096);
}

#[test]
fn misaligned_elements_are_staged_and_land_aligned() {
    // A header of odd length, which the format allows, puts every element at an odd address.
    let (catalog, file) = model(&[(Dtype::F64, vec![100])], 1);
    let misaligned = catalog.tensors()[0].bytes.start() % 8 != 0;
    let (catalog, file) = if misaligned { (catalog, file) } else { model(&[(Dtype::F64, vec![100])], 2) };
    let requests: Vec<_> = catalog.ids().map(TensorRequest::whole).collect();
    let plan = Plan::new(&catalog, &requests, &PlanOptions::default()).unwrap();
    assert!(plan.is_staged());
    check(&plan, &catalog, &file, &requests, &PlanOptions::default());
}

#[test]
fn a_tensor_requested_twice_is_refused() {
    let (catalog, _) = model(&[(Dtype::U8, vec![1])], 0);
    let id = catalog.ids().next().unwrap();
    let requests = [TensorRequest::whole(id), TensorRequest::whole(id)];
    assert!(matches!(
        Plan::new(&catalog, &requests, &PlanOptions::default()),
        Err(PlanError::RequestedTwice { tensor }) if tensor == "t0"
    ));
}

#[test]
fn large_tensors_get_their_own_arena_when_asked() {
    let (catalog, _) =
        catalog(&[(Dtype::U8, vec![3 << 20]), (Dtype::U8, vec![10]), (Dtype::U8, vec![2 << 20])], 0);
    let requests: Vec<_> = catalog.ids().map(TensorRequest::whole).collect();
    let options = PlanOptions { layout: Layout::Tensor, ..PlanOptions::default() };
    let plan = Plan::new(&catalog, &requests, &options).unwrap();
    assert_eq!(plan.arenas().len(), 3);
}

#[test]
fn a_part_of_very_many_runs_needs_no_more_memory_than_others_without_reads() {
    let rows = MAX_READS + 1;
    let (catalog, _) = catalog(&[(Dtype::U8, vec![rows, 1 << 20])], 0);
    let slice = TensorSlice::new(vec![0..rows, 0..1]);
    let requests = Selection::all().slice("t0", slice).resolve(&catalog).unwrap();
    let options = PlanOptions::default();
    let refused = Plan::new(&catalog, &requests, &options).unwrap_err();
    assert!(matches!(refused, PlanError::TooManyReads { .. }), "{refused}");
    let plan = Plan::without_reads(&catalog, &requests, &options).unwrap();
    assert_eq!((plan.tensors().len(), plan.tensor_bytes()), (1, rows));
}
