//! Compiles the engine's GPU kernels for the CPU, so that the stand-in runs the code that a GPU runs.

use std::{env, path::PathBuf};

fn main() {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let kernels = manifest.join("../../crates/hoistway-device/src/driver/kernels.cu");
    println!("cargo::rerun-if-changed={}", kernels.display());
    println!("cargo::rerun-if-changed=src/kernels_shim.cpp");
    let is_linux = env::var_os("CARGO_CFG_TARGET_OS").is_some_and(|system| system == "linux");
    let mut build = cc::Build::new();
    if env::var_os("CARGO_CFG_TARGET_ENV").is_some_and(|libc| libc == "gnu") {
        // A thread's variables without a call for each use: the calls took a third of the time of kernels. glibc keeps room
        // for the few hundred bytes of a library that is loaded late.
        build.flag("-ftls-model=initial-exec");
    }
    build
        .cpp(true)
        .std("c++17")
        .file("src/kernels_shim.cpp")
        .define("HOISTWAY_HOST_KERNELS", None)
        .define("KERNELS_SOURCE", Some(format!("\"{}\"", kernels.display()).as_str()))
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        // Even in a debug build: kernels run once for every simulated thread.
        .opt_level(2)
        // Nothing of the C++ runtime is used, so nothing of it has to be there.
        .cpp_link_stdlib(None)
        .compile("hoistway_kernels");
    if is_linux {
        // Streams are threads, and a thread can't go on in a library that was unloaded.
        println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
}
