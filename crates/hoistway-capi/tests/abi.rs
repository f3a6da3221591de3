//! The header is what the code says, and what version 1 promised is still there.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::{fs, path::Path};

/// The header, made of the code.
fn generated() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    let mut header = Vec::new();
    cbindgen::generate_with_config(root, config).unwrap().write(&mut header);
    // Headings and links are for Rust's documentation.
    let header =
        String::from_utf8(header).unwrap().replace("// # Safety\n", "// What the caller promises:\n");
    header.replace("[`", "`").replace("`]", "`")
}

/// Declarations without comments, a line each: structures with their members in order, functions with their types.
fn declarations(header: &str) -> Vec<String> {
    // What stands before the guard is one comment; all others end with their line.
    let (_, text) = header.split_once("#define HOISTWAY_H").unwrap();
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let (directives, code): (Vec<&str>, Vec<&str>) = lines.partition(|line| line.starts_with('#'));
    let numbers =
        directives.iter().filter(|line| line.contains("#define HOISTWAY_") && line.split(' ').count() == 3);
    let mut found: Vec<String> = numbers.map(|line| line.replacen("#define ", "", 1)).collect();
    let (mut depth, mut one) = (0, String::new());
    // What `extern "C" {` opens is no declaration.
    for letter in code.join(" ").replace("extern \"C\" {", "").chars() {
        depth += i32::from(letter == '{') - i32::from(letter == '}');
        if letter == ';' && depth == 0 {
            found.push(one.split_whitespace().collect::<Vec<_>>().join(" "));
            one.clear();
        } else if depth >= 0 {
            one.push(letter);
        } else {
            depth = 0;
        }
    }
    found.sort();
    found
}

#[test]
fn the_header_is_what_the_code_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/hoistway.h");
    let header = generated();
    if std::env::var_os("HOISTWAY_UPDATE_HEADER").is_some() {
        fs::write(&path, &header).unwrap();
    }
    let current = fs::read_to_string(&path).unwrap_or_default();
    assert!(current == header, "include/hoistway.h is not what the code says: run 'just capi-header'");
}

#[test]
fn nothing_that_version_1_promised_has_changed() {
    let promised = include_str!("../abi/1.txt");
    let now = declarations(&generated());
    // A structure, or the list of statuses, may have grown at its end.
    let is_kept = |line: &&str| {
        let (kept, grown) = line.rsplit_once(" }").unwrap_or((line, ""));
        let may_grow = line.starts_with("typedef struct {") || line.starts_with("enum");
        now.iter().any(|one| one == line || may_grow && one.starts_with(kept) && one.ends_with(grown))
    };
    let missing: Vec<&str> = promised.lines().filter(|line| !is_kept(line)).collect();
    assert!(
        missing.is_empty(),
        "changed or gone since version 1; raise HOISTWAY_ABI_VERSION and promise anew, or add instead:\n{}",
        missing.join("\n")
    );
    let unpromised: Vec<String> =
        now.into_iter().filter(|one| !promised.lines().any(|line| line == one)).collect();
    assert!(unpromised.is_empty(), "new, to be added to abi/1.txt:\n{}", unpromised.join("\n"));
}
