//! Programs in C and C++ that use the library as its users do.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

use requirements::{Requirement, skip};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// A shared library that cargo builds beside the tests.
fn library(name: &str) -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let directory = program.parent().unwrap();
    let names = [directory.join(name), directory.join("..").join(name)];
    names.into_iter().find(|path| path.exists()).expect("the library was not built beside the tests")
}

/// A checkpoint with tensors of no bytes, few and several chunks, at odd offsets.
fn write_checkpoint(path: &Path) {
    let sizes = [5_000_001u64, 0, 7, 4096, 123_457];
    let (mut entries, mut offset) = (Vec::new(), 0);
    for (number, size) in sizes.iter().enumerate() {
        entries.push(format!(
            r#""tensor.{number}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{offset},{}]}}"#,
            offset + size
        ));
        offset += size;
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend((0..offset).map(|place| (place.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8));
    fs::write(path, file).unwrap();
}

/// Compiles a program with `compiler` and runs it on a checkpoint.
fn compile_and_run(compiler: &str, arguments: &[&str], source: &str) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (program, checkpoint) =
        (directory.path().join("program"), directory.path().join("model.safetensors"));
    let library = library("libwindlass_capi.so");
    let compiled = Command::new(compiler)
        .args(arguments)
        .args(["-Wall", "-Wextra", "-Werror", "-O1", "-pthread", "-o"])
        .arg(&program)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("c").join(source))
        .arg(&library)
        .arg(format!("-Wl,-rpath,{}", library.parent().unwrap().display()))
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    write_checkpoint(&checkpoint);
    let mut command = Command::new(&program);
    command.arg(&checkpoint).env("WINDLASS_CUDA_DRIVER", crate::library("libfake_cuda.so"));
    let ran = command.output().unwrap();
    assert!(ran.status.success(), "{:?}: {}", ran.status, String::from_utf8_lossy(&ran.stderr));
    assert_eq!(String::from_utf8_lossy(&ran.stdout), "ok\n");
}

#[test]
fn a_c_program_gets_what_the_header_promises() {
    compile_and_run("cc", &["-std=c11"], "conformance.c");
}

#[test]
fn a_c_program_reads_into_memory_of_a_device() {
    compile_and_run("cc", &["-std=c11", "-ldl"], "device.c");
}

#[test]
fn a_cpp_program_gets_what_the_header_promises() {
    if let Err(error) = Command::new("c++").arg("--version").output() {
        skip(Requirement::Cxx, format!("c++: {error}"));
        return;
    }
    compile_and_run("c++", &["-std=c++17"], "conformance.cpp");
}
