//! The layers of the crate: a module names those below it only. What a layer may name is the table [`LAYERS`].
#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Each layer, and the layers that it may name.
const LAYERS: [(&str, &[&str]); 6] = [
    ("format", &[]),
    ("disk", &[]),
    ("index", &["format"]),
    ("io", &["disk", "format"]),
    ("layout", &["disk", "format", "index"]),
    ("store", &["disk", "format", "index", "io", "layout"]),
];

#[test]
fn layers_name_only_those_below_them() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = Vec::new();
    for (place, (layer, below)) in LAYERS.iter().enumerate() {
        let lower: BTreeSet<_> = LAYERS[..place].iter().map(|(name, _)| *name).collect();
        assert!(
            below.iter().all(|name| lower.contains(name)),
            "{layer} is to name a layer above it: a circle"
        );
        let files = rust_files(&source.join(layer));
        assert!(!files.is_empty(), "the layer {layer} has no files");
        for file in files {
            let named = modules_named(&fs::read_to_string(&file).unwrap());
            let others = LAYERS.iter().map(|(name, _)| *name).filter(|name| name != layer);
            let not_allowed = others.filter(|name| named.contains(*name) && !below.contains(name));
            wrong.extend(not_allowed.map(|name| format!("{} names {name}", file.display())));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn modules_are_found_however_they_are_named() {
    let source = "use crate::{Error, io::{A, B}, layout::c};\nuse crate::index;\nfn f(_: crate::disk::D) {}\n\
                  // crate::store\n#[cfg(test)]\nmod tests { use crate::format::E; }\n";
    let expected = ["Error", "disk", "index", "io", "layout"].map(String::from);
    assert_eq!(modules_named(source), BTreeSet::from(expected));
}

/// Files of a layer, without those that have tests alone.
fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let stem = path.file_stem().unwrap().to_str().unwrap();
            let is_test = stem == "tests" || stem.ends_with("_tests") || stem == "conformance";
            match path.extension() {
                _ if is_test => {}
                None => folders.push(path),
                Some(_) => files.push(path),
            }
        }
    }
    files
}

/// What a file names as `crate::NAME`, outside of comments and of its module of tests.
fn modules_named(source: &str) -> BTreeSet<String> {
    let code = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
    let code = lines.collect::<Vec<_>>().join(" ");
    let mut named = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        match rest.strip_prefix('{') {
            None => named.extend(first_word(rest)),
            Some(group) => named.extend(members(group).into_iter().filter_map(first_word)),
        }
    }
    named
}

/// The members of a group of imports that has been opened.
fn members(group: &str) -> Vec<&str> {
    let (mut members, mut start, mut depth) = (Vec::new(), 0, 1);
    for (at, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 || (depth == 1 && character == ',') {
            members.push(&group[start..at]);
            start = at + 1;
        }
        if depth == 0 {
            break;
        }
    }
    members
}

fn first_word(text: &str) -> Option<String> {
    let word: String = text.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (!word.is_empty()).then_some(word)
}
