//! The memory that the kernel counts for a process while threads use a store.

use crate::kit::{LONG, Lru, disk};
use hoistway::{Checkpoint, read::ReaderOptions};
use hoistway_experts::{
    backing::Backing,
    catalog::ExpertCatalog,
    store::{Store, StoreOptions},
};
use std::{
    env,
    fs::{self, File},
    io::Write,
    path::Path,
    process::Command,
    sync::Arc,
    thread,
};

/// Names the backing of a child of these tests.
const CHILD: &str = "HOISTWAY_TEST_RESIDENT";
const LAYERS: u32 = 4;
const EXPERTS: u32 = 32;
/// Bytes of the parts of an expert. The first is no whole number of blocks, so that most experts share blocks with others.
const PARTS: [u64; 2] = [(3 << 20) + 100, 1 << 20];
const BUDGET: u64 = 64 << 20;
const THREADS: u32 = 4;
/// Experts of a request.
const BATCH: u32 = 4;
const ROUNDS: u32 = 40;
/// More than a reader's memory for four pieces of a mebibyte, and what threads and the allocator take; less than two more
/// requests would.
const BESIDE: u64 = 24 << 20;

#[test]
fn the_kernel_counts_the_budget_and_one_request_in_slots() {
    in_a_child("host_slots");
}

#[test]
fn the_kernel_counts_the_budget_and_one_request_in_sparse_tensors() {
    in_a_child("host_sparse");
}

/// Runs the child in a process that does nothing else.
fn in_a_child(backing: &str) {
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "resident::child", "--ignored", "--nocapture"])
        .env(CHILD, backing)
        .output()
        .unwrap();
    let said = [&*output.stdout, &*output.stderr].map(String::from_utf8_lossy).concat();
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "the other tests of this module run it, each in a process of its own"]
fn child() {
    let Ok(backing) = env::var(CHILD) else { return };
    let backing = [Backing::HostSlots, Backing::HostSparse].into_iter().find(|own| own.name() == backing);
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    large_model(&path);
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let catalog = Arc::new(ExpertCatalog::of_checkpoint(&checkpoint, Some(BATCH)).unwrap());
    let files = ExpertCatalog::open_files(&checkpoint);
    let reader = ReaderOptions::default().huge_pages(false).in_flight(4).chunk_bytes(1 << 20);
    let options =
        StoreOptions::default().budget_bytes(BUDGET).timeout(LONG).backing(backing.unwrap()).reader(reader);
    let before = anonymous_bytes();
    let store = Store::open(catalog, files, Box::new(Lru::default()), &options).unwrap();
    let mut most = 0;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|number| {
                scope.spawn({
                    let store = &store;
                    move || use_experts(store, number)
                })
            })
            .collect();
        while !threads.iter().all(thread::ScopedJoinHandle::is_finished) {
            most = most.max(anonymous_bytes());
        }
    });
    let stats = store.stats();
    // The largest request, with what alignment adds.
    let bound = before + BUDGET + stats.largest_batch_bytes + BESIDE;
    assert!(most <= bound, "{most} bytes at most, and {bound} are allowed: {before} before; {stats:?}");
    let after = anonymous_bytes();
    assert!(after >= before + BUDGET / 2, "{after} bytes, {before} before: the experts are not counted");
    assert!(stats.evictions > 0, "{stats:?}");
}

/// Requests experts that are mostly not resident, of all layers.
fn use_experts(store: &Store, thread: u32) {
    let mut random = fastrand::Rng::with_seed(thread.into());
    for round in 0..ROUNDS {
        let experts: Vec<u32> = (0..BATCH).map(|_| random.u32(0..EXPERTS)).collect();
        let lease = store.ensure((round + thread) % LAYERS, &experts).unwrap();
        assert_eq!(lease.len(), BATCH as usize);
    }
}

/// A model of half a gibibyte of zeros, which take no room on the disk.
fn large_model(path: &Path) {
    let mut end = 0;
    let tensors: Vec<String> = (0..LAYERS)
        .flat_map(|layer| {
            ["gate_up", "down"].into_iter().zip(PARTS).map(move |(name, bytes)| (layer, name, bytes))
        })
        .map(|(layer, name, bytes)| {
            let start = end;
            end += u64::from(EXPERTS) * bytes;
            let name = format!("model.layers.{layer}.mlp.experts.{name}_proj");
            format!(r#""{name}":{{"dtype":"U8","shape":[{EXPERTS},{bytes}],"data_offsets":[{start},{end}]}}"#)
        })
        .collect();
    let header = format!("{{{}}}", tensors.join(","));
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + end).unwrap();
}

/// Bytes of anonymous memory of this process, resident or swapped out. The count of `/proc/self/status` may lag behind by some pages
/// for each processor; this one does not.
fn anonymous_bytes() -> u64 {
    let text = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let kibibytes = |name: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse().ok())
            .unwrap_or_else(|| panic!("{name} is not in {text}"))
    };
    (kibibytes("Anonymous:") + kibibytes("Swap:")) << 10
}
