//! Any job, compared with a plain model of what it says.

use super::*;
use crate::format::{BLOCK_LEN, HEADER_LEN};
use proptest::prelude::*;

/// A part: its length, the lengths that its pieces are cut to, and how far each is from alignment.
#[derive(Clone, Debug)]
struct PartShape {
    len: usize,
    cuts: Vec<usize>,
    skews: Vec<usize>,
    /// Blocks that are left out before it.
    gap: u64,
}

impl PartShape {
    fn lens(&self) -> Vec<usize> {
        let mut cuts: Vec<usize> = self.cuts.iter().map(|cut| cut % self.len.max(1)).collect();
        cuts.extend([0, self.len]);
        cuts.sort_unstable();
        cuts.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }
}

fn part_shape() -> impl Strategy<Value = PartShape> {
    let len = prop_oneof![1usize..300_000, (1usize..70).prop_map(|blocks| blocks * 4096), Just(1), Just(0)];
    let cut = prop_oneof![any::<usize>(), (0usize..70).prop_map(|blocks| blocks * 4096)];
    let skew = prop_oneof![4 => Just(0usize), 1 => Just(512), 1 => 0usize..4096];
    let gap = prop_oneof![4 => Just(0u64), 1 => 1u64..5];
    (len, prop::collection::vec(cut, 0..12), prop::collection::vec(skew, 1..5), gap)
        .prop_map(|(len, cuts, skews, gap)| PartShape { len, cuts, skews, gap })
}

/// Memory and places of parts after a header; returns where the last ends.
fn lay_out(
    shapes: &[PartShape],
    contents: Option<&[Vec<u8>]>,
    turn: usize,
) -> (Vec<Vec<Memory>>, Vec<Part>, u64) {
    let mut offset = HEADER_LEN as u64;
    let (mut memories, mut parts) = (Vec::new(), Vec::new());
    for (index, shape) in shapes.iter().enumerate() {
        offset += shape.gap * BLOCK_LEN;
        let mut start = 0;
        let mut of_job: Vec<Memory> = Vec::new();
        for (number, len) in shape.lens().into_iter().enumerate() {
            let skew = shape.skews[(number + turn) % shape.skews.len()];
            of_job.push(match contents {
                Some(contents) => Memory::of(&contents[index][start..start + len], skew),
                None => Memory::new(len, skew, 0xEE),
            });
            start += len;
        }
        let pieces = of_job.iter_mut().map(Memory::piece).collect();
        parts.push(Part { offset, pieces, len: shape.len as u64 });
        offset += (shape.len as u64).next_multiple_of(BLOCK_LEN);
        memories.push(of_job);
    }
    (memories, parts, offset)
}

fn crc(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    AsTheFileAllows,
    Buffered,
}

fn check(route: crate::Route, way: Way, bounce_bytes: u64, shapes: &[PartShape], seed: u64) {
    let directory = disk();
    let Some(engine) =
        start(IoOptions { staging_bytes: Some(bounce_bytes), ..options(directory.path(), route) })
    else {
        return;
    };
    let file = new_file(directory.path(), "data");
    if way == Way::Buffered {
        file.refuse_direct(&io::Error::from_raw_os_error(libc::EINVAL));
    }
    let contents: Vec<Vec<u8>> =
        shapes.iter().enumerate().map(|(index, shape)| pattern(shape.len, seed + index as u64)).collect();
    let sums: Vec<Option<u32>> = contents.iter().map(|content| Some(crc(content))).collect();

    let (_memory, parts, end) = lay_out(shapes, Some(&contents), 0);
    let expected_sums = sums.clone();
    let header = Header::Write {
        offset: 0,
        make: Box::new(move |sums| {
            assert_eq!(sums, expected_sums);
            pattern(HEADER_LEN, seed)
        }),
    };
    let written = run(&engine, |done| Job { header, ..job(Direction::Write, &file, parts.clone(), done) });
    written.result.unwrap();
    assert_eq!(written.checksums, sums);

    // The file, read plainly.
    let mut model = vec![0; end as usize];
    model[..HEADER_LEN].copy_from_slice(&pattern(HEADER_LEN, seed));
    for (part, content) in parts.iter().zip(&contents) {
        model[part.offset as usize..][..content.len()].copy_from_slice(content);
    }
    let mut on_disk = std::fs::read(file.path()).unwrap();
    on_disk.resize(end as usize, 0);
    assert!(on_disk == model, "the file is not what was written");

    let (memory, parts, _) = lay_out(shapes, None, 1);
    let header = Header::Read { offset: 0 };
    let read = run(&engine, |done| Job { header, ..job(Direction::Read, &file, parts, done) });
    read.result.unwrap();
    assert_eq!(read.checksums, sums);
    assert_eq!(read.header, pattern(HEADER_LEN, seed));
    for (pieces, content) in memory.iter().zip(&contents) {
        let bytes: Vec<u8> = pieces.iter().flat_map(|memory| memory.as_slice().to_vec()).collect();
        assert!(bytes == *content, "what was read is not what was written");
    }
    for piece in memory.iter().flatten() {
        let (before, after) = (&piece.bytes[..piece.start], &piece.bytes[piece.start + piece.len..]);
        assert!(before.iter().chain(after).all(|byte| *byte == 0xEE), "bytes beside a piece were written");
    }
    let payload: u64 = shapes.iter().map(|shape| shape.len as u64).sum();
    for outcome in [&written.carried, &read.carried] {
        let is_direct = outcome
            .iter()
            .all(|(carrier, _)| matches!(carrier, Carrier::IoUringDirect | Carrier::ThreadsDirect));
        assert_eq!(is_direct, file.direct().is_ok(), "{outcome:?}");
        assert!(outcome.iter().map(|(_, bytes)| bytes).sum::<u64>() >= payload, "{outcome:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_read(
        shapes in prop::collection::vec(part_shape(), 1..5),
        route in prop::sample::select(&ROUTES[..]),
        way in prop_oneof![Just(Way::AsTheFileAllows), Just(Way::Buffered)],
        bounce_bytes in prop_oneof![Just(64u64 << 10), Just(192 << 10), Just(16 << 20)],
        seed in any::<u32>(),
    ) {
        check(route, way, bounce_bytes, &shapes, u64::from(seed));
    }
}

#[test]
fn many_small_pieces_are_one_request() {
    let directory = disk();
    for route in ROUTES {
        let Some(engine) = start(options(directory.path(), route)) else { continue };
        let file = new_file(directory.path(), route.name());
        let content = pattern(3000 * 100, 7);
        let mut memory = Memory::of(&content, 3);
        let whole = memory.piece();
        let pieces: Vec<Piece> = (0..3000)
            .map(|number| Piece { address: whole.address + number * 100, len: 100, ..whole })
            .collect();
        let parts = vec![Part { offset: 4096, len: whole.len, pieces }];
        let written = run(&engine, |done| job(Direction::Write, &file, parts, done));
        written.result.unwrap();
        assert_eq!(written.checksums, [Some(crc(&content))]);
        let [(_, bytes)] = written.carried[..] else { panic!("{:?}", written.carried) };
        assert_eq!(bytes, whole.len.next_multiple_of(4096));
        assert_eq!(&std::fs::read(file.path()).unwrap()[4096..][..content.len()], content);
    }
}

#[test]
fn aligned_memory_is_not_copied() {
    let directory = disk();
    for route in ROUTES {
        let Some(engine) = start(options(directory.path(), route)) else { continue };
        let file = new_file(directory.path(), route.name());
        let mut memory = Memory::of(&pattern(20 << 20, 1), 0);
        for direction in [Direction::Write, Direction::Read] {
            let parts = vec![part(4096, &mut memory)];
            let outcome = run(&engine, |done| job(direction, &file, parts, done));
            outcome.result.unwrap();
            assert_eq!(outcome.bounced_bytes, 0);
        }
        let mut memory = Memory::of(&pattern(1 << 20, 1), 8);
        let parts = vec![part(4096, &mut memory)];
        let outcome = run(&engine, |done| job(Direction::Write, &file, parts, done));
        assert_eq!(outcome.bounced_bytes, if file.direct().is_ok() { 1 << 20 } else { 0 });
    }
}

#[test]
fn a_truncated_file_is_said_to_be_short() {
    let directory = disk();
    for route in ROUTES {
        for way in [Way::AsTheFileAllows, Way::Buffered] {
            let Some(engine) = start(options(directory.path(), route)) else { continue };
            let path = directory.path().join(format!("{route} {way:?}"));
            std::fs::write(&path, pattern(10_000, 1)).unwrap();
            let file = Arc::new(DataFile::open(&path, FileAccess::Read).unwrap());
            if way == Way::Buffered {
                file.refuse_direct(&io::Error::from_raw_os_error(libc::EINVAL));
            }
            let read = |len, skew| {
                let mut memory = Memory::new(len, skew, 0);
                let parts = vec![part(4096, &mut memory)];
                let outcome = run(&engine, |done| job(Direction::Read, &file, parts, done));
                (outcome, memory)
            };
            for skew in [0, 5] {
                let (outcome, memory) = read(10_000 - 4096, skew);
                outcome.result.unwrap();
                assert_eq!(memory.as_slice(), &pattern(10_000, 1)[4096..]);
                for len in [10_001 - 4096, 8192, 1 << 20] {
                    let (outcome, _) = read(len, skew);
                    assert!(
                        matches!(outcome.result, Err(Failure::Short { file_len: 10_000 })),
                        "{len}: {outcome:?}"
                    );
                    assert_eq!(outcome.checksums, [None]);
                }
            }
        }
    }
}

#[test]
fn jobs_that_make_no_sense_fail() {
    let directory = disk();
    let engine = start(options(directory.path(), crate::Route::Auto)).unwrap();
    let file = new_file(directory.path(), "data");
    let mut memory = Memory::new(8192, 0, 0);
    let piece = memory.piece();
    let good = Part { offset: 4096, len: 8192, pieces: vec![piece] };
    let far = Piece { address: u64::MAX - 100, ..piece };
    let bad = [
        vec![Part { offset: 100, ..good.clone() }],
        vec![Part { len: 4096, ..good.clone() }],
        vec![Part { len: 8193, ..good.clone() }],
        vec![Part { offset: u64::MAX - 8191, ..good.clone() }],
        vec![Part { offset: i64::MAX as u64 - 4095, ..good.clone() }],
        vec![good.clone(), Part { offset: 8192, ..good.clone() }],
        vec![Part { pieces: vec![far], ..good.clone() }],
        vec![Part { pieces: vec![Piece { len: u64::MAX, ..piece }, piece], ..good.clone() }],
    ];
    for parts in bad {
        let outcome = run(&engine, |done| job(Direction::Write, &file, parts.clone(), done));
        assert!(
            matches!(&outcome.result, Err(Failure::Io(error)) if error.kind() == io::ErrorKind::InvalidInput),
            "{parts:?}: {outcome:?}"
        );
    }
    assert_eq!(std::fs::metadata(file.path()).unwrap().len(), 0);
}
