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
                Reservation::Full => continue,
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

fn description(number: u32, len: usize) -> (NamespaceId, String) {
    let text = format!("{{\"other\":{{\"{number}\":\"{}\"}}}}", "x".repeat(len));
    (NamespaceId::of_description(&text), text)
}

#[test]
fn descriptions_of_namespaces_count_and_are_bounded() {
    let mut bench = Bench::new();
    bench.options.capacity_bytes = Some(4 << 20);
    let store = bench.open();
    let open = |number, len| {
        let (id, text) = description(number, len);
        store.open_namespace(id, &text, NamespaceOptions::default())
    };
    assert!(matches!(open(0, 1 << 20), Err(Error::InvalidRequest(_))), "it is too long");
    let opened = (1..150).filter(|number| open(*number, 60 << 10).is_ok()).count();
    assert!((10..20).contains(&opened), "{opened}");
    assert!(bench.disk.used() <= 4 << 20);
    for number in 0..200 {
        bench.put_all(&store, &[&format!("{number}")]);
        store.maintain().unwrap();
    }
    assert!(bench.disk.most_used() <= 4 << 20, "{}", bench.disk.most_used());
    assert!(store.usage().root_bytes >= opened as u64 * (60 << 10));
}

#[test]
fn a_namespace_goes_with_its_last_block_and_its_number_is_used_again() {
    let bench = Bench::new();
    let store = bench.open();
    let other = bench.open();
    let (first, text) = description(1, 10);
    let key = Key::new(b"key").unwrap();
    let put = |id: NamespaceId| {
        let block = NewBlock {
            namespace: id,
            key: key.clone(),
            fingerprint: Fingerprint::of(id, b"key"),
            shards: 1,
            shard_len: LEN as u64,
            expires: None,
            following: 0,
            is_partial: false,
        };
        let Reservation::Claimed(claim) = store.reserve(block).unwrap() else { panic!() };
        let written = bench.write(claim, &content("key", LEN));
        store.commit(vec![written]).pop().unwrap().unwrap();
    };
    store.open_namespace(first, &text, NamespaceOptions::default()).unwrap();
    let number = store.shared.namespaces.known(first).unwrap();
    put(first);
    assert!(!store.close_namespace(first).unwrap(), "it has a block");
    store.clear(first).unwrap();
    assert!(store.close_namespace(first).unwrap());
    assert_eq!(store.namespaces().unwrap(), []);
    let (second, text) = description(2, 10);
    store.open_namespace(second, &text, NamespaceOptions::default()).unwrap();
    assert_eq!(store.shared.namespaces.known(second), Some(number));
    put(second);
    other.maintain().unwrap();
    let found = |store: &Segments| {
        [first, second]
            .map(|id| matches!(store.find(id, &key, Fingerprint::of(id, b"key")), Lookup::Found(_)))
    };
    assert_eq!(found(&other), [false, true]);
    let of_second = other.shared.namespaces.known(second).unwrap();
    assert_eq!(other.shared.index.totals(Some(of_second)).foreign_blocks, 1);
    drop((store, other));
    let store = bench.open();
    assert_eq!(found(&store), [false, true]);
    assert_eq!(store.clear(second).unwrap(), 1);
}

#[test]
fn an_open_namespace_that_another_process_forgets_is_described_again() {
    let bench = Bench::new();
    let (one, two) = (bench.open(), bench.open());
    let (id, text) = description(1, 10);
    for store in [&one, &two] {
        store.open_namespace(id, &text, NamespaceOptions::default()).unwrap();
    }
    assert!(one.close_namespace(id).unwrap());
    two.maintain().unwrap();
    assert_eq!(two.namespaces().unwrap(), [(id, text)]);
}

#[test]
fn more_namespaces_than_there_are_numbers_are_opened_one_after_the_other() {
    let namespaces = Namespaces::default();
    for number in 0..200_000_u32 {
        let mut id = [0; 16];
        id[..4].copy_from_slice(&number.to_le_bytes());
        let id = NamespaceId(id);
        assert_eq!(namespaces.number(id).unwrap(), 0);
        assert_eq!(namespaces.forget(id), Some(0));
    }
}
