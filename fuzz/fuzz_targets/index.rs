//! Indexes: no panic, and no file outside the index's folder.
#![no_main]

use hoistway::catalog::index::Index;
use libfuzzer_sys::fuzz_target;
use std::path::{Component, Path};

fuzz_target!(|text: &[u8]| {
    let Ok(index) = Index::parse(text) else { return };
    assert!(!index.weight_map.is_empty());
    for file in index.files() {
        assert!(!file.is_empty());
        assert!(Path::new(file).components().all(|part| matches!(part, Component::Normal(_))));
    }
});
