//! What a store warns of on its own: an event, a line of its report, and a number.

use crate::common::*;
use hoistway_kv::{EventKind, LayoutKind, Store};
use std::{fs, os::unix::fs::PermissionsExt};

#[test]
fn a_namespace_that_cannot_be_read_is_told_of_and_costs_itself_alone() {
    let root = tempfile::tempdir().unwrap();
    let mut options = options(&root);
    options.layout = Some(LayoutKind::Files);
    let first = Store::open(options.clone()).unwrap();
    assert_eq!(first.stats().unwrap().unusable_namespaces, 0);
    put(&namespace(&first), "block", Shape::of(1, 5000));
    drop(first);
    let damaged = options.root.join("ns/00112233445566778899aabbccddeeff");
    fs::create_dir(&damaged).unwrap();
    fs::write(damaged.join("NAMESPACE.json"), vec![b' '; 2 << 20]).unwrap();

    let store = Store::open(options).unwrap();
    assert!(
        get(&namespace(&store), "block", Shape::of(1, 5000))
            .iter()
            .all(|status| *status == hoistway_kv::Status::Ok)
    );
    let events = store.events();
    let event = events.iter().find(|event| event.kind == EventKind::NamespaceUnusable).unwrap();
    assert!(event.reason.contains("00112233445566778899aabbccddeeff"), "{}", event.reason);
    assert!(store.report().unwrap().warnings.contains(&event.reason));
    assert_eq!(store.stats().unwrap().unusable_namespaces, 1);
    let root = store.root().display().to_string();
    let line = format!("hoistway_kv_unusable_namespaces{{store=\"{root}\"}} 1\n");
    assert!(store.metrics().unwrap().contains(&line));
}

#[test]
fn a_root_that_others_can_write_to_is_warned_of() {
    for layout in [LayoutKind::Segments, LayoutKind::Files] {
        let root = tempfile::tempdir().unwrap();
        let mut options = options(&root);
        options.layout = Some(layout);
        let safe = Store::open(options.clone()).unwrap();
        assert!(safe.report().unwrap().warnings.is_empty(), "{:?}", safe.report().unwrap().warnings);
        drop(safe);
        fs::set_permissions(&options.root, fs::Permissions::from_mode(0o770)).unwrap();
        let store = Store::open(options).unwrap();
        let events = store.events();
        let event = events.iter().find(|event| event.kind == EventKind::UnsafeRoot).unwrap();
        assert!(event.reason.contains("mode 0770"), "{}", event.reason);
        assert!(store.report().unwrap().warnings.contains(&event.reason));
    }
}
