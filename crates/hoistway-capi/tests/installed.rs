//! What `install.sh` installs: a library with versioned symbols, and what finds it.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn run(command: &mut Command) -> String {
    let done = command.output().unwrap();
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// Installs into a stage of this test's own.
fn install() -> (tempfile::TempDir, PathBuf) {
    let stage = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let script = Path::new(ROOT).join("install.sh");
    run(Command::new("sh").arg(script).args(["/opt/hoistway", "lib64"]).env("DESTDIR", stage.path()));
    let prefix = stage.path().join("opt/hoistway");
    (stage, prefix)
}

/// Installs the library of the folder that `BUILT` names, or builds it for release first (`just test-capi`,
/// `just test-capi-release`).
#[test]
#[ignore = "may build the library for release: just test-capi"]
fn programs_find_and_use_what_is_installed() {
    let (stage, prefix) = install();
    let library = prefix.join("lib64");

    let symbols = run(Command::new("nm").args(["-D", "--defined-only"]).arg(library.join("libhoistway.so")));
    let exported: BTreeSet<&str> = symbols
        .lines()
        .filter_map(|line| line.rsplit(' ').next())
        .filter(|name| *name != "HOISTWAY_1")
        .collect();
    let promised = include_str!("../abi/1.txt");
    let functions: BTreeSet<String> = promised
        .lines()
        .filter(|line| line.ends_with(')') && !line.starts_with("typedef"))
        .filter_map(|line| line.split('(').next()?.rsplit([' ', '*']).next())
        .map(|name| format!("{name}@@HOISTWAY_1"))
        .collect();
    assert_eq!(exported, functions.iter().map(String::as_str).collect());

    let described = fs::read_to_string(library.join("pkgconfig/hoistway.pc")).unwrap();
    assert!(
        described.contains("prefix=/opt/hoistway\n") && described.contains("libdir=/opt/hoistway/lib64\n")
    );
    assert!(!described.contains(&stage.path().display().to_string()), "no installed file names the stage");

    // The symbols' version is what a program asks for, and the soname what it looks for.
    let compiled = |source: &str| {
        let program = stage.path().join(source).with_extension("");
        run(Command::new("cc")
            .arg(Path::new(ROOT).join("c").join(source))
            .args(["-std=c11", "-pthread", "-o"])
            .arg(&program)
            .arg(format!("-I{}", prefix.join("include").display()))
            .args([format!("-L{}", library.display()), "-lhoistway".into(), "-ldl".into()]));
        program
    };
    let program = compiled("conformance.c");
    let needed = run(Command::new("readelf").args(["-dV"]).arg(&program));
    assert!(needed.contains("[libhoistway.so.1]") && needed.contains("HOISTWAY_1"), "{needed}");

    let checkpoint = stage.path().join("model.safetensors");
    let header = r#"{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]},"b":{"dtype":"U8","shape":[0],"data_offsets":[9,9]},"c":{"dtype":"U8","shape":[3],"data_offsets":[9,12]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(b"twelve bytes");
    fs::write(&checkpoint, file).unwrap();
    let said = run(Command::new(&program).arg(&checkpoint).env("LD_LIBRARY_PATH", &library));
    assert_eq!(said, "ok\n");
    let (kv, root) = (compiled("kv.c"), stage.path().join("store"));
    let said =
        run(Command::new(&kv).arg(&root).env_remove("HOISTWAY_CUDA_DRIVER").env("LD_LIBRARY_PATH", &library));
    assert_eq!(said, "ok\n");
}
