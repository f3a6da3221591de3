//! Directories of vLLM's that two descriptions name, and descriptions that are damaged.
#![forbid(unsafe_code)]

use super::{
    Files, names,
    tests::{HASTY, bench, hasty, vllm_key},
};
use crate::{
    Error, EventKind, NamespaceDescription, NamespaceId, NamespaceOptions, Result, StoreAccess, StoreOptions,
    layout::{
        Administration, Layout, Lookup,
        conformance::{Bench, Loaded, Stored, block, bytes, contains, load, open_namespace, store},
    },
};
use std::{
    fs,
    path::{Path, PathBuf},
    thread,
};

const DIRECTORY: &str = "org_model_0123456789ab_r0";

fn describe(dtype: &str, directory: &str) -> (NamespaceId, String) {
    let description = NamespaceDescription {
        model: dtype.into(),
        other: [(names::VLLM_DIRECTORY.into(), directory.into())].into(),
        ..Default::default()
    };
    (description.id().unwrap(), description.to_json().unwrap())
}

fn open(layout: &dyn Layout, (id, text): &(NamespaceId, String)) -> Result<()> {
    layout.open_namespace(*id, text, NamespaceOptions::default())
}

fn description_of(root: &Path, id: NamespaceId) -> PathBuf {
    root.join(names::NAMESPACES).join(id.to_string()).join(names::DESCRIPTION)
}

/// Writes a description down as a version did that made no claims.
fn write_down(root: &Path, (id, text): &(NamespaceId, String)) {
    let path = description_of(root, *id);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn unusable(layout: &Files) -> (u64, usize) {
    let notices = layout.observed().take_notices();
    let noticed = notices.iter().filter(|notice| notice.kind == EventKind::NamespaceUnusable).count();
    (layout.usage().unusable_namespaces, noticed)
}

fn is_refused(opened: &Result<()>, owner: NamespaceId) -> bool {
    matches!(opened, Err(Error::InvalidOption { option: names::VLLM_DIRECTORY, reason, .. })
        if reason.contains(&owner.to_string()))
}

#[test]
fn a_directory_has_one_of_two_descriptions() {
    let bench = bench();
    let (bf16, fp8) = (describe("bf16", DIRECTORY), describe("fp8", DIRECTORY));
    let second = hasty(&bench.options);
    open(bench.layout(), &bf16).unwrap();
    let key = vllm_key(b'a');
    let shards = [bytes("a", 8192)];
    assert_eq!(store(bench.layout(), &block(bf16.0, &key, &shards), &shards), Stored::Committed);

    // It has not seen the first one's description yet.
    let refused = open(&second, &fp8);
    assert!(is_refused(&refused, bf16.0), "{refused:?}");
    assert_eq!(load(&second, fp8.0, &key), Loaded::Miss);
    assert!(!contains(&second, fp8.0, &key));
    assert!(!description_of(&bench.options.root, fp8.0).exists());

    let third = Files::open(&bench.options).unwrap();
    open(&third, &bf16).unwrap();
    assert_eq!(unusable(&third), (0, 0));
    assert_eq!(load(&third, bf16.0, &key), Loaded::Shards(shards.to_vec()));
}

#[test]
fn of_many_that_open_a_directory_at_once_one_gets_it() {
    let bench = bench();
    let layouts: Vec<Files> = (0..8).map(|_| Files::open(&bench.options).unwrap()).collect();
    let opened: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = layouts
            .iter()
            .enumerate()
            .map(|(number, layout)| {
                scope.spawn(move || open(layout, &describe(&number.to_string(), DIRECTORY)))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let owner = opened.iter().position(Result::is_ok).expect("one gets it");
    let owner = describe(&owner.to_string(), DIRECTORY).0;
    let refused = opened.iter().filter(|opened| is_refused(opened, owner)).count();
    assert_eq!(refused, 7, "{opened:?}");
    assert_eq!(unusable(&Files::open(&bench.options).unwrap()), (0, 0));
}

/// The descriptions of a conflict, that of the lower identity first.
fn conflict() -> [(NamespaceId, String); 2] {
    let mut both = [describe("bf16", DIRECTORY), describe("fp8", DIRECTORY)];
    both.sort();
    both
}

#[test]
fn of_two_that_have_a_directory_already_the_lower_identity_keeps_it() {
    let bench = bench();
    let [winner, loser] = conflict();
    for description in [&winner, &loser] {
        write_down(&bench.options.root, description);
    }
    let key = vllm_key(b'a');
    let shards = [bytes("a", 8192)];
    let readers = StoreOptions { access: StoreAccess::Read, ..bench.options.clone() };
    for options in [&readers, &bench.options, &readers] {
        let layout = Files::open_timed(options, HASTY).unwrap();
        assert_eq!(unusable(&layout), (1, 1));
        let refused = open(&layout, &loser);
        assert!(is_refused(&refused, winner.0), "{refused:?}");
        open(&layout, &winner).unwrap();
        if options.access == StoreAccess::ReadWrite {
            assert_eq!(store(&layout, &block(winner.0, &key, &shards), &shards), Stored::Committed);
        }
        for _ in 0..3 {
            layout.maintain().unwrap();
        }
        assert_eq!(unusable(&layout), (1, 0), "it is told once");
        assert_eq!(load(&layout, loser.0, &key), Loaded::Miss);
        assert!(!contains(&layout, loser.0, &key));
    }
    let reader = Files::open(&readers).unwrap();
    open(&reader, &winner).unwrap();
    assert_eq!(load(&reader, winner.0, &key), Loaded::Shards(shards.to_vec()));
}

#[test]
fn a_reader_stops_using_a_directory_that_turns_out_to_be_anothers() {
    let bench = bench();
    let [winner, loser] = conflict();
    write_down(&bench.options.root, &loser);
    let key = vllm_key(b'a');
    let path = bench.options.root.join(DIRECTORY).join("616/16_g2").join("61".repeat(32) + ".bin");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, bytes("a", 8192)).unwrap();
    let readers = StoreOptions { access: StoreAccess::Read, ..bench.options.clone() };
    let reader = Files::open_timed(&readers, HASTY).unwrap();
    open(&reader, &loser).unwrap();
    assert_eq!(load(&reader, loser.0, &key), Loaded::Shards(vec![bytes("a", 8192)]));

    write_down(&bench.options.root, &winner);
    reader.maintain().unwrap();
    assert_eq!(unusable(&reader), (1, 1));
    let found = reader.find(
        loser.0,
        &crate::Key::new(key.as_bytes()).unwrap(),
        crate::Fingerprint::of(loser.0, key.as_bytes()),
    );
    assert!(matches!(found, Lookup::Miss), "{found:?}");
}

#[test]
fn a_damaged_claim_is_made_anew() {
    for damage in ["", "{}", "\u{0}"] {
        let bench = bench();
        let (bf16, fp8) = (describe("bf16", DIRECTORY), describe("fp8", DIRECTORY));
        open(bench.layout(), &bf16).unwrap();
        let claim = bench.options.root.join(names::NAMESPACES).join(format!("{DIRECTORY}.claim"));
        assert_eq!(fs::read_to_string(&claim).unwrap(), bf16.1);
        fs::write(&claim, damage).unwrap();
        let second = Files::open(&bench.options).unwrap();
        let refused = open(&second, &fp8);
        assert!(is_refused(&refused, bf16.0), "{refused:?}");
        assert_eq!(fs::read_to_string(&claim).unwrap(), bf16.1);
        open(&second, &bf16).unwrap();
    }
}

/// Opens a store in which one description is damaged; says how that is told.
fn with_damaged(damage: impl FnOnce(&Bench, &Path, NamespaceId)) -> String {
    let bench = bench();
    let shards = [bytes("a", 5000)];
    assert_eq!(bench.store("a", &shards), Stored::Committed);
    let other = open_namespace(bench.layout(), "other", NamespaceOptions::default());
    damage(&bench, &description_of(&bench.options.root, other), other);
    let layout = Files::open_timed(&bench.options, HASTY).unwrap();
    open_namespace(&layout, "model", NamespaceOptions::default());
    assert_eq!(load(&layout, bench.namespace, "a"), Loaded::Shards(shards.to_vec()));
    layout.maintain().unwrap();
    assert_eq!(layout.usage().unusable_namespaces, 1);
    let mut notices = layout.observed().take_notices();
    assert_eq!(notices.len(), 1, "{notices:?}");
    notices.remove(0).reason
}

#[test]
fn a_damaged_description_costs_its_namespace_alone() {
    let long = with_damaged(|_, path, _| fs::write(path, vec![b' '; 3 << 20]).unwrap());
    assert!(long.contains("longer than 1 MiB"), "{long}");
    let no_text = with_damaged(|_, path, _| fs::write(path, [0xff; 100]).unwrap());
    assert!(no_text.contains("not text"), "{no_text}");
    let another = with_damaged(|_, path, _| fs::write(path, "{}").unwrap());
    assert!(another.contains("another namespace"), "{another}");
    let directory = with_damaged(|_, path, _| {
        fs::remove_file(path).unwrap();
        fs::create_dir(path).unwrap();
    });
    assert!(directory.contains("it is a directory"), "{directory}");
    let elsewhere = with_damaged(|bench, path, _| {
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
        write_down(&bench.options.root, &describe("bf16", "../elsewhere"));
    });
    assert!(elsewhere.contains("vllm_directory cannot be ../elsewhere"), "{elsewhere}");
}
