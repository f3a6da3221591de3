//! The public API of each published crate is what its `api.txt` lists, so that a change of it shows in the diff.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::{collections::BTreeSet, env, fs, path::Path, process::Command};

const PUBLISHED: [&str; 6] =
    ["hoistway", "hoistway-experts", "hoistway-kv", "hoistway-objects", "hoistway-trace", "hoistway-usrbio"];

#[test]
fn listings_are_what_the_code_says() {
    let is_update = env::var_os("HOISTWAY_UPDATE_API").is_some();
    let mut problems = String::new();
    for package in PUBLISHED {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates").join(package).join("api.txt");
        let now = listing(package);
        if is_update {
            fs::write(&path, &now).unwrap();
        }
        let listed = fs::read_to_string(&path).unwrap_or_default();
        let (listed, now): (BTreeSet<_>, BTreeSet<_>) = (listed.lines().collect(), now.lines().collect());
        listed.difference(&now).for_each(|line| problems += &format!("- {line}\n"));
        now.difference(&listed).for_each(|line| problems += &format!("+ {line}\n"));
    }
    assert!(problems.is_empty(), "the public API has changed; if it should, run 'just api':\n{problems}");
}

/// The public items of a crate without optional features, one a line.
fn listing(package: &str) -> String {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    // What is said of this test's package: build scripts that ask for it would run again, here and in the next build, and all that
    // depends on them would be built again.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_MANIFEST_") || text.starts_with("CARGO_PKG_") {
            cargo.env_remove(&name);
        }
    }
    let output = cargo
        .args(["rustdoc", "--quiet", "--lib", "--package", package])
        .arg("--target-dir")
        .arg(target)
        .args(["--", "-Zunstable-options", "--output-format=json"])
        .env("RUSTDOC", here.join("rustdoc"))
        .current_dir(here)
        .output()
        .unwrap();
    let messages = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "rustdoc failed on {package}:\n{messages}");
    let json = target.join("doc").join(package.replace('-', "_")).with_extension("json");
    public_api::Builder::from_rustdoc_json(json)
        .omit_auto_derived_impls(true)
        .omit_auto_trait_impls(true)
        .omit_blanket_impls(true)
        .build()
        .unwrap_or_else(|error| panic!("{package}: {error}; public-api is of another version than rustdoc"))
        .to_string()
}
