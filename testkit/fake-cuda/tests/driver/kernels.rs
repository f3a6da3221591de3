//! The engine's kernels, as the stand-in runs them.

use crate::fixture::{Session, pattern};
use std::{
    ffi::{CString, c_void},
    fs, ptr,
};

/// Loads an image of the engine's.
fn load(session: &Session, image: &str) -> usize {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/hoistway-device/src/cuda/kernels");
    let mut image = fs::read(format!("{folder}/{image}")).unwrap();
    image.push(0);
    let mut module = 0;
    assert_eq!(session.cuModuleLoadData(&mut module, image.as_ptr().cast()), 0);
    module
}

fn module(session: &Session) -> usize {
    load(session, "compute_60.ptx")
}

fn function(session: &Session, module: usize, name: &str) -> Result<usize, i32> {
    let name = CString::new(name).unwrap();
    let mut function = 0;
    match session.cuModuleGetFunction(&mut function, module, name.as_ptr()) {
        0 => Ok(function),
        code => Err(code),
    }
}

fn launch(
    session: &Session,
    function: usize,
    grid: [u32; 2],
    threads: u32,
    table: &u64,
    stream: usize,
) -> i32 {
    let parameters = [ptr::from_ref(table).cast::<c_void>()];
    let [x, y] = grid;
    session.cuLaunchKernel(function, x, y, 1, threads, 1, 1, 0, stream, parameters.as_ptr(), ptr::null())
}

/// Runs a kernel over segments of source, destination and count.
fn run(session: &Session, name: &str, segments: &[[u64; 3]]) -> i32 {
    let stream = session.stream();
    let words: Vec<u8> = segments.as_flattened().iter().flat_map(|word| word.to_ne_bytes()).collect();
    let table = session.upload(&words);
    let function = function(session, module(session), name).unwrap();
    assert_eq!(launch(session, function, [2, segments.len() as u32], 64, &table, stream), 0);
    session.cuStreamSynchronize(stream)
}

#[test]
fn segments_are_copied_from_and_to_any_address() {
    let session = Session::new();
    let source = pattern(50_000);
    let (from, to) = (session.upload(&source), session.allocate(50_000));
    let kernels = session.count("kernels");
    let segments = [[from + 3, to + 5, 20_001], [from + 30_000, to + 30_000, 1], [from, to, 0]];
    assert_eq!(run(&session, "hoistway_copy", &segments), 0);
    let result = session.download(to, 50_000);
    assert!(result[5..20_006] == source[3..20_004]);
    assert_eq!(
        (result[30_000], result[4], result[20_006], result[30_001]),
        (source[30_000], 0xA5, 0xA5, 0xA5)
    );
    assert_eq!(session.count("kernels"), kernels + 1);
}

#[test]
fn elements_are_cast() {
    let session = Session::new();
    let floats: Vec<f32> = (0..1000).map(|number| number as f32 / 7.0 - 70.0).collect();
    let source: Vec<u8> = floats.iter().flat_map(|float| float.to_ne_bytes()).collect();
    let (from, to) = (session.upload(&source), session.allocate(2000));
    assert_eq!(run(&session, "hoistway_cast_f32_bf16", &[[from, to, 1000]]), 0);
    for (float, bytes) in floats.iter().zip(session.download(to, 2000).as_chunks::<2>().0) {
        let cast = f32::from_bits(u32::from(u16::from_ne_bytes(*bytes)) << 16);
        assert!((cast - float).abs() <= float.abs() / 256.0, "{float} became {cast}");
    }
}

#[test]
fn all_agreed_kernels_are_there() {
    for image in ["compute_60.ptx", "sm_70.cubin", "sm_90.cubin", "sm_120.cubin"] {
        assert_all_kernels_are_in(image);
    }
}

fn assert_all_kernels_are_in(image: &str) {
    let session = Session::new();
    let module = load(&session, image);
    let casts = ["f32_f16", "f32_bf16", "f16_f32", "f16_bf16", "bf16_f32", "bf16_f16"];
    let small = ["f8e4m3", "f8e5m2"].map(|from| ["f32", "f16", "bf16"].map(|to| format!("{from}_{to}")));
    for cast in casts.map(String::from).iter().chain(small.as_flattened()) {
        function(&session, module, &format!("hoistway_cast_{cast}")).unwrap();
    }
    assert_eq!(function(&session, module, "hoistway_cast_f32_f32"), Err(500));
    assert_eq!(session.count("modules"), 1);
    assert_eq!(session.cuModuleUnload(module), 0);
    assert_eq!(function(&session, module, "hoistway_copy"), Err(400));
}

#[test]
fn kernels_stay_within_allocations() {
    let session = Session::new();
    let (from, to) = (session.allocate(100), session.allocate(99));
    assert_eq!(run(&session, "hoistway_copy", &[[from, to, 100]]), 700);
}

#[test]
fn kernels_reach_pinned_memory_and_no_other() {
    let session = Session::new();
    let pinned = session.pinned(&pattern(100));
    let pageable = pattern(100);
    let to = session.allocate(100);
    assert_eq!(run(&session, "hoistway_copy", &[[pinned.as_ptr() as u64, to, 100]]), 0);
    assert!(session.download(to, 100) == pinned);
    assert_eq!(run(&session, "hoistway_copy", &[[pageable.as_ptr() as u64, to, 100]]), 700);
    session.fake_cuda_reset();
    session.configure("INTEGRATED=1");
    assert_eq!(run(&session, "hoistway_copy", &[[pageable.as_ptr() as u64, to, 100]]), 0);
}

#[test]
fn kernels_fail_on_request() {
    let session = Session::new();
    session.configure("FAULTS=kernel:1=719");
    let address = session.allocate(1);
    assert_eq!(run(&session, "hoistway_copy", &[[address, address, 1]]), 719);
}

#[test]
fn what_cannot_be_launched_is_refused() {
    let session = Session::new();
    let mut handle = 0;
    let no_machine_code = [b"\x7fELF".as_slice(), &[0; 64]].concat();
    assert_eq!(session.cuModuleLoadData(&mut handle, no_machine_code.as_ptr().cast()), 200);
    // A module that names no kernels is taken to have them all.
    assert_eq!(session.cuModuleLoadData(&mut handle, c".version 8.0".as_ptr()), 0);
    let function = function(&session, handle, "hoistway_copy").unwrap();
    for (grid, threads) in [([0, 1], 1), ([1, 65_536], 1), ([1, 1], 1025)] {
        assert_eq!(launch(&session, function, grid, threads, &0, 0), 1);
    }
    assert_eq!(launch(&session, handle, [1, 1], 1, &0, 0), 400);
}
