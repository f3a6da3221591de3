//! What several tests share: models on disk, and what must be left behind after a load.
#![allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod bytes;
pub mod child;
pub mod gguf;
#[cfg(target_os = "linux")]
pub mod nodes;
pub mod on_device;
pub mod reading;
pub mod saving;
pub mod stand_in;
pub mod system;

pub use bytes::noise;
use hoistway::{DeviceId, DirectIo, Dtype, Loaded, Route};
use requirements::{Requirement, skip};
use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};
use system::change_time;
pub use system::{Footprint, drop_from_cache};

/// The route that keeps many direct reads in flight from one thread on this system.
pub const QUEUED: Route = if cfg!(windows) { Route::Overlapped } else { Route::IoUring };

/// Whether drives can write to memory of a device here, as far as the system goes.
pub const HAS_DIRECT_PATH: bool = cfg!(target_os = "linux");

/// One tensor of a test model.
#[derive(Clone, Debug)]
pub struct TestTensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
}

pub fn tensor(name: &str, dtype: Dtype, shape: &[u64]) -> TestTensor {
    TestTensor { name: name.into(), dtype, shape: shape.to_vec() }
}

/// Writes a safetensors file whose byte `i` is a function of `i` and `seed`; `padding` blanks follow the header.
pub fn write_model(path: &Path, tensors: &[TestTensor], padding: usize, seed: u64) -> Vec<u8> {
    let mut offset = 0;
    let mut entries = Vec::new();
    for TestTensor { name, dtype, shape } in tensors {
        let end = offset + dtype.size_of(shape).unwrap();
        entries.push(format!(
            r#"{}:{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{offset},{end}]}}"#,
            serde_json::to_string(name).unwrap()
        ));
        offset = end;
    }
    let text = format!("{{{}}}{}", entries.join(","), " ".repeat(padding));
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(text.as_bytes());
    file.extend_from_slice(&noise(&seed.to_le_bytes(), offset));
    fs::write(path, &file).unwrap();
    file
}

/// The bytes of a tensor, read from the file by the reference crate.
pub fn expected(file: &[u8], name: &str) -> Vec<u8> {
    let reference = safetensors::SafeTensors::deserialize(file).unwrap();
    reference.tensor(name).unwrap().data().to_vec()
}

/// Fails unless `loaded` is exactly the tensors of `file`.
pub fn assert_is_file(loaded: &Loaded, file: &[u8]) {
    let reference = safetensors::SafeTensors::deserialize(file).unwrap();
    assert_eq!(loaded.tensors().len(), reference.len());
    for (name, view) in reference.tensors() {
        let tensor = loaded.get(&name).unwrap_or_else(|| panic!("{name} is missing"));
        let shape: Vec<u64> = view.shape().iter().map(|&dim| dim as u64).collect();
        assert_eq!(tensor.shape(), shape, "{name}");
        assert_eq!(tensor.dtype().to_string(), view.dtype().to_string(), "{name}");
        assert!(*tensor.bytes().unwrap() == *view.data(), "{name} has other bytes");
    }
}

/// A model with every dtype, sizes from nothing to several chunks, and tensors at odd offsets.
pub fn mixed_model(directory: &Path) -> (PathBuf, Vec<u8>) {
    let mut tensors: Vec<TestTensor> =
        Dtype::ALL.iter().map(|&dtype| tensor(&format!("small.{dtype}"), dtype, &[3, 8])).collect();
    tensors.push(tensor("empty", Dtype::F32, &[0, 7]));
    tensors.push(tensor("scalar", Dtype::F64, &[]));
    tensors.push(tensor("large", Dtype::Bf16, &[1500, 2048]));
    tensors.push(tensor("odd", Dtype::U8, &[999_983]));
    tensors.push(tensor("misaligned", Dtype::F32, &[300_000]));
    tensors.push(tensor("tail", Dtype::I16, &[77]));
    let path = directory.join("mixed.safetensors");
    let file = write_model(&path, &tensors, 3, 7);
    (path, file)
}

/// A tensor of a GGUF file, as it must come out of a load.
#[derive(Clone, Debug)]
pub struct GgufTensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

/// A tensor whose bytes are a function of its name. `shape` is slowest first, as everywhere but in the file.
pub fn gguf_tensor(name: &str, type_id: u32, shape: &[u64]) -> (GgufTensor, gguf::Tensor) {
    let dtype = Dtype::from_ggml(type_id).unwrap();
    let bytes = noise(name.as_bytes(), dtype.size_of(shape).unwrap());
    let dimensions: Vec<u64> = shape.iter().rev().copied().collect();
    let written = gguf::Tensor { name: name.into(), dimensions, type_id, offset: None, bytes: bytes.clone() };
    (GgufTensor { name: name.into(), dtype, shape: shape.to_vec(), bytes }, written)
}

/// Writes a GGUF file of these tensors and a few keys.
pub fn write_gguf(path: &Path, tensors: &[(&str, u32, &[u64])]) -> Vec<GgufTensor> {
    let mut writer = gguf::Writer::default().key("general.architecture", "test");
    let mut expected = Vec::new();
    for (name, type_id, shape) in tensors {
        let (tensor, written) = gguf_tensor(name, *type_id, shape);
        expected.push(tensor);
        writer.tensors.push(written);
    }
    fs::write(path, writer.finish()).unwrap();
    expected
}

/// A GGUF model with every type of ggml, sizes from nothing to several chunks.
pub fn mixed_gguf(directory: &Path) -> (PathBuf, Vec<GgufTensor>) {
    let known = |&id: &u32| Dtype::from_ggml(id).is_some_and(|dtype| !matches!(dtype, Dtype::UnknownGgml(_)));
    let names: Vec<(String, u32)> = (0..43).filter(known).map(|id| (format!("small.{id}"), id)).collect();
    let mut tensors: Vec<(&str, u32, &[u64])> =
        names.iter().map(|(name, id)| (name.as_str(), *id, [3, 256].as_slice())).collect();
    tensors.push(("empty", 12, &[0, 256]));
    tensors.push(("scalar", 28, &[]));
    tensors.push(("large", 12, &[3000, 2048]));
    tensors.push(("experts", 39, &[8, 64, 2048]));
    tensors.push(("tail", 24, &[77]));
    let path = directory.join("mixed.gguf");
    let expected = write_gguf(&path, &tensors);
    (path, expected)
}

/// Fails unless `loaded` is exactly these tensors.
pub fn assert_is_gguf(loaded: &Loaded, expected: &[GgufTensor]) {
    assert_eq!(loaded.tensors().len(), expected.len());
    for GgufTensor { name, dtype, shape, bytes } in expected {
        let tensor = loaded.get(name).unwrap_or_else(|| panic!("{name} is missing"));
        assert_eq!((tensor.dtype(), tensor.shape()), (*dtype, shape.as_slice()), "{name}");
        assert!(*tensor.bytes().unwrap() == **bytes, "{name} has other bytes");
    }
}

/// Everywhere that tensors can go to. Devices are those of the stand-in.
pub fn devices() -> [DeviceId; 2] {
    std::sync::LazyLock::force(&stand_in::STAND_IN);
    [DeviceId::Cpu, DeviceId::Cuda(0)]
}

/// As [`devices`], with another vendor's device, and one that only copies.
pub fn all_devices() -> impl Iterator<Item = DeviceId> {
    devices().into_iter().chain([on_device::ROCM, on_device::TOY])
}

/// Fails unless this process comes to have no more than it had `before`. A thread that was joined may still be listed for a
/// moment: now, and also when it was counted before.
pub fn assert_nothing_left(before: &Footprint) {
    // Pinned memory is kept for the next load until then.
    hoistway_device::release_devices();
    let deadline = std::time::Instant::now() + reading::LONG;
    while Footprint::now().exceeds(before) && std::time::Instant::now() < deadline {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let now = Footprint::now();
    assert!(
        !now.exceeds(before),
        "something was left behind: {before:?} became {now:?}; open are {:?}",
        system::open_files()
    );
    // A device ends its work in its own time.
    let mut left = stand_in::STAND_IN.leftovers();
    while !left.is_empty() && std::time::Instant::now() < deadline {
        std::thread::sleep(std::time::Duration::from_millis(1));
        left = stand_in::STAND_IN.leftovers();
    }
    assert_eq!(left, [], "something was left on the device");
    assert_eq!(hoistway_device::toy::in_use(), (0, 0), "something was left on the device that only copies");
}

/// Returns whether a route can read files of this directory with this access. A container may forbid io_uring, and its
/// file system may lack direct reads: what remains is tested all the same, unless both are required.
#[track_caller]
pub fn can_read(directory: &Path, route: Route, direct: DirectIo) -> bool {
    let folder = tempfile::tempdir_in(directory).unwrap();
    let path = folder.path().join("probe.safetensors");
    write_model(&path, &[tensor("probe", Dtype::U8, &[2 << 20])], 0, 1);
    let options = hoistway::LoadOptions::default().route(route).direct(direct);
    match hoistway::load(&[&path], &options) {
        Ok(_) => true,
        Err(hoistway::Error::RouteUnavailable { why, .. }) => {
            // A ring that reads through the page cache needs nothing else.
            let has_ring = route != Route::IoUring
                || direct != DirectIo::Never && can_read(directory, route, DirectIo::Never);
            if has_ring {
                skip(Requirement::Direct, why);
            } else if direct == DirectIo::Never {
                skip(Requirement::IoUring, why);
            }
            false
        }
        Err(other) => panic!("{other:?}"),
    }
}

/// A folder of a file system in memory, or `None` where there is none.
#[track_caller]
pub fn in_memory() -> Option<tempfile::TempDir> {
    system::in_memory().inspect_err(|error| skip(Requirement::Shm, error)).ok()
}

/// Drops a file from the page cache.
pub fn make_cold(path: &Path) {
    drop_from_cache(&fs::File::open(path).unwrap());
}

/// Waits until a change of the file would move its times: the clock of a file system is coarse.
pub fn let_file_time_pass(path: &Path) {
    let changed_at = change_time(&fs::File::open(path).unwrap());
    let mut probe = tempfile::tempfile_in(path.parent().unwrap()).unwrap();
    reading::until("the clock of the file system moves on", || {
        probe.write_all(b".").unwrap();
        change_time(&probe) > changed_at
    });
}

/// Brings a file into the page cache. What asserts that it is still there holds a [`Warm`](reading::Warm) beside.
pub fn make_warm(path: &Path) {
    fs::read(path).unwrap();
}
