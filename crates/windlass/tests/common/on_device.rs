//! What tests of devices share: a turn at the stand-in, options, a file of several chunks.

use super::{TestTensor, tensor, write_model};
use std::path::{Path, PathBuf};
use windlass::{DeviceId, Dtype, LoadOptions, Route};

pub fn disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub fn to_device() -> LoadOptions {
    LoadOptions::default().device(DeviceId::Cuda(0))
}

pub fn staged() -> LoadOptions {
    to_device().route(Route::Staged)
}

/// A file of several chunks, and its bytes.
pub fn chunky(directory: &Path) -> (PathBuf, Vec<u8>) {
    let path = directory.join("chunky.safetensors");
    let tensors: Vec<TestTensor> = (0..8).map(|i| tensor(&format!("t{i}"), Dtype::U8, &[3 << 20])).collect();
    let file = write_model(&path, &tensors, 0, 3);
    (path, file)
}

/// cuFile starts threads when it is first used: before anybody counts.
pub fn start_threads_that_stay(path: &Path) {
    drop(windlass::load(&[path], &to_device().route(Route::GdsCompat)).unwrap());
}
