//! How much of the capacity holds blocks, whatever their sizes, and whether those of one request lie next to each other.

use super::*;

const GIB: u64 = 1 << 30;
/// KiB of the payloads of blocks; the first are used.
const SIZES: [usize; 12] = [1024, 64, 256, 2048, 128, 512, 96, 768, 192, 1536, 384, 3072];
/// Blocks of a request.
const TOGETHER: usize = 8;

/// What a workload came to.
struct Measured {
    /// Part of the capacity that is payload of blocks that are found.
    share: f64,
    /// Bytes that were written, by those of blocks with their headers.
    written: f64,
    /// Blocks of a request that lie one behind the other, on average.
    run: f64,
}

/// Stores requests of blocks of so many sizes until the store has been filled some times over. Of so many requests, the
/// blocks of one are used once more.
fn measure(capacity: u64, sizes: &[usize], writers: usize, used: u64) -> Measured {
    let mut bench = Bench::new();
    bench.disk = SimulatedDisk::new(7, 2 * capacity);
    bench.options.capacity_bytes = Some(capacity);
    bench.options.segment_bytes = None;
    bench.options.durability = Durability::None;
    let stores: Vec<Segments> = (0..writers).map(|_| bench.open()).collect();
    let mut dice = Dice(3);
    let (mut stored, mut blocks, mut runs) = (0_u64, 0_u64, 0_u64);
    for number in 0.. {
        let store = &stores[number % writers];
        let len = sizes[dice.below(sizes.len() as u64) as usize] << 10;
        let keys: Vec<String> = (0..TOGETHER).map(|block| format!("{number} {block}")).collect();
        let mut next = None;
        let mut written = Vec::new();
        for (place, key) in keys.iter().enumerate() {
            let claim = match bench.reserve_of_many(store, key, len, TOGETHER - 1 - place).unwrap() {
                Reservation::Claimed(claim) => claim,
                Reservation::Dropped(DropReason::NoRoom) => continue,
                other => panic!("{other:?}"),
            };
            let place = (claim.place.file.path().to_owned(), claim.place.header.unwrap());
            if stored > capacity {
                blocks += 1;
                runs += u64::from(next.as_ref() != Some(&place));
            }
            next = Some((place.0, claim.place.payload + len as u64));
            let table = ShardTable(vec![Shard { len: len as u64, checksum: Some(0) }]);
            written.push(Written { claim, table });
            stored += len as u64 + HEADER_LEN as u64;
        }
        assert!(store.commit(written).iter().all(Result::is_ok));
        if used > 0 && dice.one_in(used) {
            let prints: Vec<Fingerprint> = keys.iter().map(|key| fingerprint(key)).collect();
            store.touch(&prints);
        }
        if number % 16 == 0 {
            bench.now.fetch_add(1, Ordering::Relaxed);
            stores.iter().for_each(|store| store.maintain().unwrap());
        }
        if stored > 4 * capacity {
            break;
        }
    }
    assert!(bench.disk.most_used() <= capacity, "{}", bench.disk.most_used());
    let payload: u64 = stores.iter().map(|store| store.shared.index.totals(None).own_payload_bytes).sum();
    Measured {
        share: payload as f64 / capacity as f64,
        written: (stored + bench.disk.bytes_written()) as f64 / stored as f64,
        run: blocks as f64 / runs as f64,
    }
}

/// Measures, and says what came out.
fn check(capacity: u64, sizes: &[usize], writers: usize, used: u64) {
    let Measured { share, written, run } = measure(capacity, sizes, writers, used);
    let sizes = sizes.len();
    println!("{sizes:5} {writers:7} {used:4} {share:5.3} {written:7.4} {run:4.2}");
    assert!(share >= 0.85, "{share} of the capacity is payload: {sizes} sizes, {writers} writers");
    assert!(written <= 1.1, "{written} times as much was written: {sizes} sizes, {writers} writers");
    assert!(writers > 1 || run >= 3.0, "{run} blocks lie together: {sizes} sizes");
}

#[test]
fn blocks_of_many_sizes_fill_the_capacity() {
    println!("sizes writers used share written  run");
    for used in [0, 3] {
        for writers in [1, 8] {
            for sizes in [1, 2, 3, 6, 12] {
                check(GIB, &SIZES[..sizes], writers, used);
            }
        }
    }
    let dozens: Vec<usize> = (1..=48).map(|size| 20 * size).collect();
    check(4 * GIB, &dozens, 1, 3);
}
