//! Programs in C and C++ that use the library as its users do.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

#[path = "../../hoistway/tests/common/gguf.rs"]
mod gguf;

use requirements::{Requirement, skip};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};
use tempfile::TempDir;

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

/// A GGUF model of 3 layers with 8 experts, of which a token uses 2. No slice is a whole number of blocks.
fn write_experts(path: &Path) {
    let mut writer = gguf::Writer::default()
        .key("general.architecture", "test")
        .key("test.expert_used_count", gguf::Item::U32(2));
    let mut add = |name: String, type_id: u32, dimensions: &[u64]| {
        let len = dimensions.iter().product::<u64>() * if type_id == 0 { 4 } else { 2 };
        let seed = name.bytes().fold(7u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        let bytes = (seed..seed + len).map(|place| (place.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8);
        let (name, dimensions, bytes) = (name.into_bytes(), dimensions.to_vec(), bytes.collect());
        writer.tensors.push(gguf::Tensor { name, dimensions, type_id, offset: None, bytes });
    };
    add("token_embd.weight".into(), 0, &[16, 50]);
    for layer in 0..3 {
        for role in ["gate", "up", "down"] {
            add(format!("blk.{layer}.ffn_{role}_exps.weight"), 1, &[96, 37, 8]);
        }
        add(format!("blk.{layer}.ffn_gate_exps.bias"), 0, &[37, 8]);
        add(format!("blk.{layer}.attn_q.weight"), 0, &[41, 33]);
    }
    fs::write(path, writer.finish()).unwrap();
}

/// Compiles a program of the folder `c` with `compiler` and runs it on a checkpoint, or on an empty directory.
fn compile_and_run(compiler: &str, arguments: &[&str], source: &str) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("c").join(source);
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let input = match source.file_stem().unwrap().to_str().unwrap() {
        "kv" => directory.path().join("store"),
        "experts" => {
            let input = directory.path().join("model.gguf");
            write_experts(&input);
            input
        }
        _ => {
            let input = directory.path().join("model.safetensors");
            write_checkpoint(&input);
            input
        }
    };
    assert_eq!(compiled(compiler, arguments, &source, &directory, Some(&input)), "ok\n");
}

/// Compiles a program and runs it in `directory`. What it says.
fn compiled(
    compiler: &str,
    arguments: &[&str],
    source: &Path,
    directory: &TempDir,
    input: Option<&Path>,
) -> String {
    let program = directory.path().join("program");
    let library = library("libhoistway_capi.so");
    let compiled = Command::new(compiler)
        .args(arguments)
        .args(["-Wall", "-Wextra", "-Werror", "-O1", "-pthread", "-o"])
        .arg(&program)
        .arg(format!("-I{}/include", env!("CARGO_MANIFEST_DIR")))
        .arg(source)
        .arg(&library)
        .arg(format!("-Wl,-rpath,{}", library.parent().unwrap().display()))
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let mut command = Command::new(&program);
    let stand_in = crate::library("libfake_cuda.so");
    command.args(input).envs(["HOISTWAY_CUDA_DRIVER", "HOISTWAY_HIP_DRIVER"].map(|name| (name, &stand_in)));
    let ran = command.current_dir(directory).output().unwrap();
    assert!(ran.status.success(), "{:?}: {}", ran.status, String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).unwrap()
}

fn has_cxx() -> bool {
    let found = Command::new("c++").arg("--version").output();
    found.map_err(|error| skip(Requirement::Cxx, format!("c++: {error}"))).is_ok()
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
fn a_c_program_reads_from_an_object_store() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let input = directory.path().join("model.safetensors");
    write_checkpoint(&input);
    let server = objectd::Server::start().unwrap();
    server.put("models/llama/model.safetensors", &fs::read(&input).unwrap());
    // The program finds the server in its directory.
    fs::write(directory.path().join("endpoint"), server.url()).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("c/objects.c");
    assert_eq!(compiled("cc", &["-std=c11"], &source, &directory, Some(&input)), "ok\n");
    let requests = server.take_requests();
    let signed = |key: &str| {
        let key = format!("Credential={key}/");
        requests.iter().any(|own| own.authorization.as_ref().is_some_and(|text| text.contains(&key)))
    };
    assert!(signed("of-the-options") && signed("of-the-environment"));
}

#[test]
fn a_cpp_program_gets_what_the_header_promises() {
    if has_cxx() {
        compile_and_run("c++", &["-std=c++17"], "conformance.cpp");
    }
}

#[test]
fn a_c_program_stores_and_loads_blocks() {
    compile_and_run("cc", &["-std=c11", "-ldl"], "kv.c");
}

#[test]
fn a_cpp_program_stores_and_loads_blocks() {
    if has_cxx() {
        compile_and_run("c++", &["-std=c++17"], "kv.cpp");
    }
}

#[test]
fn a_c_program_streams_a_model_larger_than_memory() {
    compile_and_run("cc", &["-std=c11"], "experts.c");
}

#[test]
fn a_cpp_program_streams_a_model_larger_than_memory() {
    if has_cxx() {
        compile_and_run("c++", &["-std=c++17"], "experts.cpp");
    }
}

/// The programs of docs/c-abi.md, in their order, run in one directory.
#[test]
fn programs_of_the_documentation_do_what_they_say() {
    if !has_cxx() {
        return;
    }
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/c-abi.md")).unwrap();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    write_checkpoint(&directory.path().join("model.gguf"));
    write_experts(&directory.path().join("experts.gguf"));
    let source = directory.path().join("program.cpp");
    let said = text.split("```cpp\n").skip(1).map(|program| {
        fs::write(&source, program.split("```").next().unwrap()).unwrap();
        compiled("c++", &["-std=c++17"], &source, &directory, None)
    });
    let said: Vec<String> = said.collect();
    assert!(said.len() == 3 && said[0].contains("\"carriers\""), "{said:?}");
    assert!(said[1].starts_with("gate") && said[1].contains("\"misses\":2"), "{said:?}");
    assert_eq!(said[2], "2 of 3 blocks are there\n");
}
