//! What layout `files` does beyond what all layouts do.
#![forbid(unsafe_code)]

use super::{Files, Timing, checksum, find::FileId, lock, names};
use crate::{
    DropReason, Durability, EventKind, Fingerprint, Key, NamespaceDescription, NamespaceId, NamespaceOptions,
    StoreAccess, StoreOptions,
    layout::{
        Administration, Layout, Lookup, Reservation,
        conformance::{
            Bench, CAPACITY, Loaded, Stored, block, bytes, conformance, contains, eventually, load, on_disk,
            open_namespace, store, write,
        },
    },
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

conformance!(|options| Ok(Box::new(Files::open(options)?)));

pub(super) fn bench() -> Bench {
    Bench::new(|options| Ok(Box::new(Files::open(options)?)))
}

/// Scans at every occasion, and takes a silent writer for dead at once.
pub(super) const HASTY: Timing = Timing {
    rescan: Duration::ZERO,
    heartbeat: Duration::ZERO,
    follow: Duration::ZERO,
    silence: Duration::ZERO,
    absence: Duration::ZERO,
    clock: Instant::now,
};

pub(super) fn hasty(options: &StoreOptions) -> Files {
    let layout = Files::open_timed(options, HASTY).unwrap();
    open_namespace(&layout, "model", NamespaceOptions::default());
    layout
}

#[test]
fn processes_keep_the_capacity_together() {
    const LEN: usize = 256 << 10;
    let bench = bench();
    let others: Vec<Files> = (0..2).map(|_| Files::open(&bench.options).unwrap()).collect();
    for other in &others {
        open_namespace(other, "model", NamespaceOptions::default());
    }
    let layouts: Vec<&dyn Layout> =
        others.iter().map(|other| other as &dyn Layout).chain([bench.layout()]).collect();
    let count = 4 * CAPACITY as usize / LEN;
    for number in 0..count {
        let (key, layout) = (number.to_string(), layouts[number % layouts.len()]);
        let shards = [bytes(&key, LEN)];
        // A process that has evicted all blocks in its index has to scan for blocks of others, and scans are rare.
        eventually(layout, "room", || {
            let stored = store(layout, &block(bench.namespace, &key, &shards), &shards);
            assert!(matches!(stored, Stored::Committed | Stored::Dropped(DropReason::NoRoom)), "{stored:?}");
            stored == Stored::Committed
        });
        assert!(on_disk(&bench.options.root) <= CAPACITY, "after {key}");
        if number % 7 == 0 {
            // One reads what another one wrote.
            let reader = layouts[(number + 1) % layouts.len()];
            assert_eq!(load(reader, bench.namespace, &key), Loaded::Shards(shards.to_vec()));
        }
        if number % 16 == 0 {
            layouts.iter().for_each(|layout| layout.maintain().unwrap());
        }
    }
    let left = on_disk(&bench.options.root);
    assert!(left > CAPACITY / 2, "{left} bytes are left of {CAPACITY}");
}

#[test]
fn a_writer_that_came_and_went_is_noticed() {
    const LEN: usize = 1 << 20;
    let bench = bench();
    let count = CAPACITY as usize / LEN / 2;
    let guest = hasty(&bench.options);
    for number in 0..count {
        let key = format!("guest {number}");
        let shards = [bytes(&key, LEN)];
        assert_eq!(store(&guest, &block(bench.namespace, &key, &shards), &shards), Stored::Committed);
    }
    drop(guest);
    eventually(bench.layout(), "seeing what the guest stored", || {
        bench.layout().usage().blocks == count as u64
    });
}

#[test]
fn what_is_given_up_takes_no_room_for_long() {
    let bench = bench();
    let before = bench.layout().usage().allocated_bytes;
    let shards = [bytes("a", 1 << 20)];
    let reserved = bench.layout().reserve(block(bench.namespace, "a", &shards)).unwrap();
    let Reservation::Claimed(claim) = reserved else { panic!("{reserved:?}") };
    let temporary = claim.place.file.path().to_owned();
    assert!(temporary.exists());
    drop(claim);
    bench.layout().maintain().unwrap();
    assert!(!temporary.exists());
    assert_eq!(bench.layout().usage().allocated_bytes, before);
    assert_eq!(bench.store("a", &shards), Stored::Committed);
}

/// All files below a directory.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found
}

fn file_of(bench: &Bench, key: &str) -> PathBuf {
    let name = format!("{:?}.kvb", Fingerprint::of(bench.namespace, key.as_bytes()));
    files(&bench.options.root).into_iter().find(|path| path.ends_with(&name)).unwrap()
}

#[test]
fn files_are_for_their_owner_alone() {
    let bench = bench();
    assert_eq!(bench.store("a", &[bytes("a", 5000)]), Stored::Committed);
    let path = file_of(&bench, "a");
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    for directory in path.ancestors().skip(1).take(4) {
        assert_eq!(directory.metadata().unwrap().permissions().mode() & 0o777, 0o700, "{directory:?}");
    }
    assert_eq!(path.metadata().unwrap().len(), 8192 + 4096);
}

#[test]
fn a_file_that_was_cut_short_or_is_longer_is_no_block() {
    for len in [0, 1, 4095, 4096, 8192, 9000, 12288, 16384, 20480] {
        let bench = bench();
        assert_eq!(bench.store("a", &[bytes("a", 5000), bytes("b", 10)]), Stored::Committed);
        let path = file_of(&bench, "a");
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 20480);
        if len == 20480 {
            file.set_len(24576).unwrap();
        } else {
            file.set_len(len).unwrap();
        }
        assert_eq!(bench.load("a"), Loaded::Corrupt, "{len} bytes");
        assert!(!path.exists());
        assert_eq!(bench.load("a"), Loaded::Miss);
        assert_eq!(bench.store("a", &[bytes("a", 5000)]), Stored::Committed);
    }
}

#[test]
fn files_that_were_cut_short_are_removed_when_a_store_is_opened() {
    let bench = bench();
    assert_eq!(bench.store("a", &[bytes("a", 5000)]), Stored::Committed);
    let path = file_of(&bench, "a");
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
    let again = Files::open(&bench.options).unwrap();
    assert!(!path.exists());
    assert_eq!((again.usage().blocks, again.usage().corrupt_blocks), (0, 1));
}

#[test]
fn a_reader_counts_a_file_that_was_cut_short_once() {
    let bench = bench();
    assert_eq!(bench.store("a", &[bytes("a", 5000)]), Stored::Committed);
    fs::OpenOptions::new().write(true).open(file_of(&bench, "a")).unwrap().set_len(0).unwrap();
    let reader = Files::open(&bench.options.clone().access(StoreAccess::Read)).unwrap();
    for _ in 0..3 {
        lock(&reader.shared.scan).repeat();
        reader.shared.scan_now();
    }
    assert_eq!(reader.usage().corrupt_blocks, 1);
    assert_eq!(lock(&reader.shared.scan).cut_short(), 1);
    fs::remove_file(file_of(&bench, "a")).unwrap();
    lock(&reader.shared.scan).repeat();
    reader.shared.scan_now();
    assert_eq!(lock(&reader.shared.scan).cut_short(), 0);
}

#[test]
fn a_file_that_is_gone_is_a_miss_and_can_be_stored_again() {
    let bench = bench();
    assert_eq!(bench.store("a", &[bytes("a", 5000)]), Stored::Committed);
    fs::remove_file(file_of(&bench, "a")).unwrap();
    assert_eq!(bench.load("a"), Loaded::Miss);
    assert!(!bench.contains("a"));
    assert_eq!(bench.layout().usage().corrupt_blocks, 0);
    assert_eq!(bench.store("a", &[bytes("a", 5000)]), Stored::Committed);
    assert_eq!(bench.load("a"), Loaded::Shards(vec![bytes("a", 5000)]));
}

#[test]
fn a_file_with_another_name_is_not_another_block() {
    let bench = bench();
    assert_eq!(bench.store("a", &[bytes("a", 5000)]), Stored::Committed);
    assert_eq!(bench.store("b", &[bytes("b", 5000)]), Stored::Committed);
    fs::rename(file_of(&bench, "a"), file_of(&bench, "b")).unwrap();
    assert_eq!(bench.load("b"), Loaded::Corrupt);
    assert_eq!(bench.load("a"), Loaded::Miss);
}

#[test]
fn the_first_of_two_writers_wins() {
    let bench = bench();
    let second = hasty(&bench.options);
    let (first_shards, second_shards) = ([bytes("first", 5000)], [bytes("second", 5000)]);
    let first_claim = bench.layout().reserve(block(bench.namespace, "a", &first_shards)).unwrap();
    assert!(matches!(first_claim, Reservation::Claimed(_)));
    assert_eq!(
        store(&second, &block(bench.namespace, "a", &second_shards), &second_shards),
        Stored::Committed
    );
    let Reservation::Claimed(claim) = first_claim else { return };
    let written = write(claim, &first_shards);
    bench.layout().commit(vec![written]).pop().unwrap().unwrap();
    for layout in [bench.layout(), &second] {
        assert_eq!(load(layout, bench.namespace, "a"), Loaded::Shards(second_shards.to_vec()));
    }
    bench.layout().maintain().unwrap();
    let temporary = files(&bench.options.root)
        .into_iter()
        .filter(|path| path.extension().is_some_and(|end| end == "tmp"));
    assert_eq!(temporary.count(), 0);
}

#[test]
fn what_others_remove_is_forgotten_without_being_asked_for() {
    let bench = bench();
    for key in ["a", "b", "c"] {
        assert_eq!(bench.store(key, &[bytes(key, 5000)]), Stored::Committed);
    }
    let second = hasty(&bench.options);
    assert_eq!(second.usage().blocks, 3);
    fs::remove_file(file_of(&bench, "b")).unwrap();
    eventually(&second, "the end of a block", || second.usage().blocks == 2);
    assert_eq!(bench.store("d", &[bytes("d", 5000)]), Stored::Committed);
    eventually(&second, "a new block", || second.usage().blocks == 3);
    assert_eq!(load(&second, bench.namespace, "d"), Loaded::Shards(vec![bytes("d", 5000)]));
}

#[test]
fn what_dead_writers_left_is_swept_and_what_living_ones_write_is_not() {
    let bench = bench();
    let shards = [bytes("a", 5000)];
    let Reservation::Claimed(claim) = bench.layout().reserve(block(bench.namespace, "a", &shards)).unwrap()
    else {
        panic!("there is room")
    };
    let living = claim.place.file.path().to_owned();
    let dead = bench.options.root.join(format!("{}{}", names::WRITER_PREFIX, uuid::Uuid::new_v4()));
    fs::create_dir(&dead).unwrap();
    fs::write(dead.join("1.tmp"), "half a bl").unwrap();
    let second = hasty(&bench.options);
    second.maintain().unwrap();
    assert!(!dead.exists());
    assert!(living.exists());
    drop(claim);
    bench.layout().maintain().unwrap();
    assert!(!living.exists());
}

#[test]
fn a_writer_that_is_closed_leaves_nothing_but_blocks() {
    let bench = bench();
    let second = hasty(&bench.options);
    assert_eq!(store(&second, &block(bench.namespace, "a", &[vec![1]]), &[vec![1]]), Stored::Committed);
    let writers = || {
        let entries = fs::read_dir(&bench.options.root).unwrap();
        entries
            .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("w-"))
            .count()
    };
    assert_eq!(writers(), 2);
    second.close().unwrap();
    drop(second);
    assert_eq!(writers(), 1);
    assert!(bench.load("a") == Loaded::Shards(vec![vec![1]]));
}

#[test]
fn a_ttl_holds_for_what_others_have_written() {
    let bench = bench();
    assert_eq!(bench.store("a", &[bytes("a", 100)]), Stored::Committed);
    let old = std::time::SystemTime::now() - Duration::from_secs(100);
    fs::File::open(file_of(&bench, "a")).unwrap().set_modified(old).unwrap();
    let second = Files::open_timed(&bench.options, HASTY).unwrap();
    let ttl = NamespaceOptions { ttl: Some(Duration::from_secs(50)), quota_bytes: None };
    open_namespace(&second, "model", ttl);
    assert!(!contains(&second, bench.namespace, "a"));
    assert!(bench.contains("a"), "each process says for itself");
}

/// A namespace whose files are those of vLLM.
fn bare(layout: &dyn Layout) -> NamespaceId {
    let description = NamespaceDescription {
        other: [(names::VLLM_DIRECTORY.into(), "org_model_0123456789ab_r0".into())].into(),
        ..Default::default()
    };
    let id = description.id().unwrap();
    layout.open_namespace(id, &description.to_json().unwrap(), NamespaceOptions::default()).unwrap();
    id
}

/// A key of vLLM's: a hash, and a group.
pub(super) fn vllm_key(seed: u8) -> String {
    String::from_utf8([vec![seed; 32], vec![0, 0, 0, 2]].concat()).unwrap()
}

const VLLM_FILE: &str = "org_model_0123456789ab_r0/616/16_g2/6161616161616161616161616161616161616161616161616161616161616161.bin";

#[test]
fn vllm_reads_what_was_stored() {
    let bench = bench();
    let (namespace, key) = (bare(bench.layout()), vllm_key(b'a'));
    for shards in [[bytes("a", 12345)], [bytes("b", 8192)]] {
        assert_eq!(store(bench.layout(), &block(namespace, &key, &shards), &shards), Stored::Committed);
        assert!(fs::read(bench.options.root.join(VLLM_FILE)).unwrap() == shards[0]);
        assert_eq!(load(bench.layout(), namespace, &key), Loaded::Shards(shards.to_vec()));
        let name = Fingerprint::of(namespace, key.as_bytes());
        assert_eq!(bench.layout().key_of(name).unwrap().unwrap().as_bytes(), key.as_bytes());
        assert_eq!(bench.layout().delete(namespace, &[(key.as_bytes(), name)]).unwrap(), 1);
    }
}

#[test]
fn what_vllm_has_stored_is_loaded() {
    let bench = bench();
    let (namespace, key) = (bare(bench.layout()), vllm_key(b'a'));
    let path = bench.options.root.join(VLLM_FILE);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, bytes("vllm", 8192)).unwrap();
    assert!(contains(bench.layout(), namespace, &key));
    assert_eq!(load(bench.layout(), namespace, &key), Loaded::Shards(vec![bytes("vllm", 8192)]));
    let same = [bytes("other", 8192)];
    assert_eq!(store(bench.layout(), &block(namespace, &key, &same), &same), Stored::Exists);

    // One that was there before the store was opened is evicted like any other.
    let second = Files::open(&bench.options).unwrap();
    assert_eq!(second.usage().blocks, 1);
    assert_eq!(second.evict(1).unwrap(), 8192);
    assert!(!path.exists());
}

#[test]
fn a_flipped_bit_is_found_by_the_checksum_of_a_bare_file() {
    for durability in Durability::ALL {
        let bench = Bench::with(
            |options| Ok(Box::new(Files::open(options)?)),
            |options| {
                options.durability = *durability;
            },
        );
        let (namespace, key) = (bare(bench.layout()), vllm_key(b'a'));
        let shards = [bytes("a", 12345)];
        assert_eq!(store(bench.layout(), &block(namespace, &key, &shards), &shards), Stored::Committed);
        assert_eq!(bench.layout().observed().take_notices(), []);
        let second = hasty(&bench.options);
        bench.layout().close().unwrap();
        let path = bench.options.root.join(VLLM_FILE);
        let modified = path.metadata().unwrap().modified().unwrap();
        let mut damaged = shards[0].clone();
        damaged[777] ^= 1;
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &damaged, 0).unwrap();
        file.set_modified(modified).unwrap();
        // Another process finds it too, and when its writer has ended.
        assert_eq!(load(&second, namespace, &key), Loaded::Corrupt);
        assert_eq!(load(bench.layout(), namespace, &key), Loaded::Miss);
    }
}

#[test]
fn a_checksum_counts_for_the_bytes_that_it_was_written_for() {
    let bench = bench();
    let (namespace, key) = (bare(bench.layout()), vllm_key(b'a'));
    let shards = [bytes("a", 8192)];
    assert_eq!(store(bench.layout(), &block(namespace, &key, &shards), &shards), Stored::Committed);
    let path = bench.options.root.join(VLLM_FILE);
    assert!(checksum::read(&path, &path.metadata().unwrap()).is_some());
    // vLLM writes it anew, in place.
    fs::write(&path, bytes("vllm", 8192)).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_modified(std::time::SystemTime::now() + Duration::from_secs(1)).unwrap();
    assert_eq!(checksum::read(&path, &path.metadata().unwrap()), None);
    assert_eq!(load(bench.layout(), namespace, &key), Loaded::Shards(vec![bytes("vllm", 8192)]));
    // An attribute that is none of ours counts for nothing.
    for value in [&b"1"[..], &[0; 17]] {
        rustix::fs::fsetxattr(&file, checksum::ATTRIBUTE, value, rustix::fs::XattrFlags::empty()).unwrap();
        assert_eq!(load(bench.layout(), namespace, &key), Loaded::Shards(vec![bytes("vllm", 8192)]));
    }
}

#[test]
fn a_checksum_under_the_former_name_counts() {
    let bench = bench();
    let (namespace, key) = (bare(bench.layout()), vllm_key(b'a'));
    let shards = [bytes("a", 8192)];
    assert_eq!(store(bench.layout(), &block(namespace, &key, &shards), &shards), Stored::Committed);
    let path = bench.options.root.join(VLLM_FILE);
    let mut value = [0; 16];
    rustix::fs::lgetxattr(&path, checksum::ATTRIBUTE, &mut value).unwrap();
    let file = fs::File::open(&path).unwrap();
    rustix::fs::fremovexattr(&file, checksum::ATTRIBUTE).unwrap();
    assert_eq!(checksum::read(&path, &path.metadata().unwrap()), None);
    rustix::fs::fsetxattr(&file, checksum::FORMER_ATTRIBUTE, &value, rustix::fs::XattrFlags::empty())
        .unwrap();
    assert!(checksum::read(&path, &path.metadata().unwrap()).is_some());
}

#[test]
fn keys_that_vllm_has_none_of_are_refused() {
    let bench = bench();
    let namespace = bare(bench.layout());
    for (key, shards) in [("abc", 1), (&*vllm_key(b'a'), 2)] {
        let shards: Vec<_> = (0..shards).map(|_| vec![1]).collect();
        let refused = bench.layout().reserve(block(namespace, key, &shards));
        assert!(matches!(refused, Err(crate::Error::InvalidRequest(_))), "{refused:?}");
    }
    let key = Key::new(b"abc").unwrap();
    let found = bench.layout().find(namespace, &key, Fingerprint::of(namespace, b"abc"));
    assert!(matches!(found, Lookup::Miss));
    assert!(!contains(bench.layout(), namespace, "abc"));
}

#[test]
fn a_damaged_file_that_could_not_be_removed_is_replaced() {
    let bench = bench();
    let (first, second) = ([bytes("first", 5000)], [bytes("second", 5000)]);
    assert_eq!(bench.store("a", &first), Stored::Committed);
    let layout = hasty(&bench.options);
    let fingerprint = Fingerprint::of(bench.namespace, b"a");
    let id = FileId::of(&file_of(&bench, "a").metadata().unwrap());
    layout.shared.damaged.lock().unwrap().insert(fingerprint, id);
    layout.shared.index.remove(&fingerprint);
    assert_eq!(store(&layout, &block(bench.namespace, "a", &second), &second), Stored::Committed);
    assert_eq!(load(&layout, bench.namespace, "a"), Loaded::Shards(second.to_vec()));
}

#[test]
fn what_has_the_name_and_is_no_file_is_an_error() {
    let bench = bench();
    let shards = [bytes("a", 5000)];
    assert_eq!(bench.store("a", &shards), Stored::Committed);
    let path = file_of(&bench, "a");
    assert_eq!(
        bench.layout().delete(bench.namespace, &[(b"a", Fingerprint::of(bench.namespace, b"a"))]).unwrap(),
        1
    );
    fs::create_dir(&path).unwrap();
    let Reservation::Claimed(claim) = bench.layout().reserve(block(bench.namespace, "a", &shards)).unwrap()
    else {
        panic!("it was deleted")
    };
    let written = write(claim, &shards);
    bench.layout().commit(vec![written]).pop().unwrap().unwrap_err();
    assert!(!bench.contains("a"));
}

/// Descriptors of this process for files below a directory, but for those of its writer.
fn descriptors(root: &Path) -> usize {
    let is_blocks = |path: &Path| path.starts_with(root) && !path.ends_with(names::LEASE);
    let open =
        fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    open.filter(|path| is_blocks(path)).count()
}

#[test]
fn what_waits_for_its_transfer_needs_no_descriptor() {
    let bench = bench();
    let shards = [bytes("a", 100)];
    let (mut claims, mut found) = (Vec::new(), Vec::new());
    for number in 0..50 {
        let (written, waiting) = (format!("written {number}"), format!("waiting {number}"));
        assert_eq!(bench.store(&written, &shards), Stored::Committed);
        claims.push(bench.layout().reserve(block(bench.namespace, &waiting, &shards)).unwrap());
        let fingerprint = Fingerprint::of(bench.namespace, written.as_bytes());
        let key = Key::new(written.as_bytes()).unwrap();
        found.push(bench.layout().find(bench.namespace, &key, fingerprint));
    }
    assert!(claims.iter().all(|claim| matches!(claim, Reservation::Claimed(_))));
    assert_eq!(descriptors(&bench.options.root), 0);
    let Lookup::Found(first) = &found[0] else { panic!("it was stored") };
    let open = first.place.file.open().unwrap();
    assert!(descriptors(&bench.options.root) > 0);
    drop(open);
    assert_eq!(descriptors(&bench.options.root), 0);
}

#[test]
fn a_file_system_without_attributes_is_told_of_once() {
    let bench = bench();
    let namespace = bare(bench.layout());
    std::thread::scope(|scope| {
        // A filter of system calls stays with its thread.
        let stores = scope.spawn(|| {
            let refuse = SeccompAction::Errno(libc::EOPNOTSUPP as u32);
            let calls = [(libc::SYS_fsetxattr, Vec::new())].into();
            let arch = std::env::consts::ARCH.try_into().unwrap();
            let filter = SeccompFilter::new(calls, SeccompAction::Allow, refuse, arch).unwrap();
            seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
            for name in [b'a', b'b'] {
                let (key, shards) = (vllm_key(name), [bytes("a", 5000)]);
                let stored = store(bench.layout(), &block(namespace, &key, &shards), &shards);
                assert_eq!(stored, Stored::Committed);
                assert_eq!(load(bench.layout(), namespace, &key), Loaded::Shards(shards.to_vec()));
            }
        });
        stores.join().unwrap();
    });
    let notices = bench.layout().observed().take_notices();
    assert!(matches!(&*notices, [one] if one.kind == EventKind::NoChecksums), "{notices:?}");
}

#[test]
fn a_store_whose_directory_is_emptied_goes_on_and_says_so_once() {
    let bench = bench();
    let layout = bench.layout();
    let shards = |key: &str| [bytes(key, 64 << 10)];
    let put = |key: &str| store(layout, &block(bench.namespace, key, &shards(key)), &shards(key));
    assert_eq!(put("a"), Stored::Committed);
    for entry in fs::read_dir(&bench.options.root).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
    }
    layout.maintain().unwrap();
    assert!(!contains(layout, bench.namespace, "a"));
    assert_eq!(put("b"), Stored::Committed);
    layout.maintain().unwrap();
    let notices = layout.observed().take_notices();
    let restarted = notices.iter().filter(|notice| notice.kind == EventKind::WriterRestarted).count();
    assert_eq!(restarted, 1, "{notices:?}");
    assert_eq!(layout.observed().take_evicted().blocks.len(), 1);
    let again = Files::open(&bench.options).unwrap();
    open_namespace(&again, "model", NamespaceOptions::default());
    assert_eq!(load(&again, bench.namespace, "b"), Loaded::Shards(shards("b").to_vec()));
    assert_eq!(again.namespaces().unwrap().len(), 1);
}

#[test]
fn a_block_has_its_name_only_once_its_bytes_are_on_the_disk() {
    let open =
        |options: &StoreOptions| -> crate::Result<Box<dyn Layout>> { Ok(Box::new(Files::open(options)?)) };
    let bench = Bench::with(open, |options| options.durability = Durability::Batched);
    let is_refused = std::thread::scope(|scope| {
        // A filter of system calls stays with its thread.
        let stores = scope.spawn(|| {
            let refuse = SeccompAction::Errno(libc::EIO as u32);
            let calls = [(libc::SYS_fdatasync, Vec::new())].into();
            let arch = std::env::consts::ARCH.try_into().unwrap();
            let filter = SeccompFilter::new(calls, SeccompAction::Allow, refuse, arch).unwrap();
            seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
            let shards = [bytes("a", 5000)];
            let reserved = bench.layout().reserve(block(bench.namespace, "a", &shards)).unwrap();
            let Reservation::Claimed(claim) = reserved else { panic!("{reserved:?}") };
            bench.layout().commit(vec![write(claim, &shards)]).pop().unwrap().is_err()
        });
        stores.join().unwrap()
    });
    assert!(is_refused);
    assert!(!bench.contains("a"));
    assert_eq!(bench.store("a", &[bytes("a", 5000)]), Stored::Committed);
}

#[test]
fn a_file_with_the_old_time_of_another_is_not_taken_for_it() {
    let bench = bench();
    let shards = [bytes("a", 5000)];
    assert_eq!(bench.store("a", &shards), Stored::Committed);
    let layout = hasty(&bench.options);
    let fingerprint = Fingerprint::of(bench.namespace, b"a");
    let path = file_of(&bench, "a");
    let before = path.metadata().unwrap();
    let damaged = FileId::of(&before);
    layout.shared.damaged.lock().unwrap().insert(fingerprint, damaged);
    layout.shared.index.remove(&fingerprint);
    assert!(!contains(&layout, bench.namespace, "a"), "it is known to be damaged");
    // Restored from a copy, with its times, in the place of the one that was damaged.
    let good = fs::read(&path).unwrap();
    let changed = |metadata: &fs::Metadata| (metadata.ctime(), metadata.ctime_nsec());
    while changed(&path.metadata().unwrap()) == changed(&before) {
        fs::write(&path, &good).unwrap();
        fs::File::open(&path).unwrap().set_modified(before.modified().unwrap()).unwrap();
    }
    layout.shared.absent.lock().unwrap().clear();
    assert!(contains(&layout, bench.namespace, "a"));
}

#[test]
fn a_store_whose_superblock_was_touched_is_the_same() {
    let bench = bench();
    assert_eq!(bench.store("a", &[bytes("a", 5000)]), Stored::Committed);
    let superblock = bench.options.root.join(names::SUPERBLOCK);
    let later = std::time::SystemTime::now() + Duration::from_secs(9);
    fs::File::open(&superblock).unwrap().set_modified(later).unwrap();
    bench.layout().maintain().unwrap();
    assert_eq!(bench.layout().observed().take_notices(), []);
    assert_eq!(bench.layout().observed().take_evicted().blocks, []);
    // It is another store if that is what it says.
    fs::remove_file(&superblock).unwrap();
    bench.layout().maintain().unwrap();
    assert_eq!(bench.layout().observed().take_notices().len(), 1);
}
