//! Compares the public API of each published crate with the listing beside its manifest, so that a change of it shows in the diff.
//!
//! Reads what `document.sh` has rustdoc write. With the argument `write` it writes the listings.
#![forbid(unsafe_code)]

use std::{collections::BTreeSet, env, error::Error, fs, path::Path, process::ExitCode};

const PUBLISHED: [&str; 6] =
    ["hoistway", "hoistway-experts", "hoistway-kv", "hoistway-objects", "hoistway-trace", "hoistway-usrbio"];

#[allow(clippy::print_stderr, reason = "it is a program for terminals")]
fn main() -> Result<ExitCode, Box<dyn Error>> {
    let is_write = env::args().nth(1).is_some_and(|argument| argument == "write");
    let mut differences = String::new();
    for package in PUBLISHED {
        let path = Path::new("crates").join(package).join("api.txt");
        let now = listing(package)?;
        if is_write {
            fs::write(&path, &now)?;
        }
        let listed = fs::read_to_string(&path)?;
        let (listed, now): (BTreeSet<_>, BTreeSet<_>) = (listed.lines().collect(), now.lines().collect());
        listed.difference(&now).for_each(|line| differences += &format!("- {line}\n"));
        now.difference(&listed).for_each(|line| differences += &format!("+ {line}\n"));
    }
    if differences.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    eprint!("the public API has changed; if it should, run 'just api':\n{differences}");
    Ok(ExitCode::FAILURE)
}

/// The public items of a crate with all features, one a line.
fn listing(package: &str) -> Result<String, Box<dyn Error>> {
    let json = Path::new("target/doc").join(package.replace('-', "_")).with_extension("json");
    let api = public_api::Builder::from_rustdoc_json(json)
        .omit_auto_derived_impls(true)
        .omit_auto_trait_impls(true)
        .omit_blanket_impls(true)
        .build()
        .map_err(|error| format!("{package}: {error}; public-api may be of another version than rustdoc"))?;
    Ok(api.to_string())
}
