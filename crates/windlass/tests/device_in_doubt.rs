//! Where nobody can say whether a copy has ended, its memory is leaked, never used for something else. A program of its
//! own, since what is leaked here stays.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{stand_in::STAND_IN, tensor, write_model};
use windlass::{DeviceId, Dtype, Error, LoadOptions, Route};

#[test]
fn memory_that_may_still_be_copied_is_not_freed() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("m.safetensors");
    write_model(&path, &[tensor("t", Dtype::U8, &[24 << 20])], 0, 3);
    let options = LoadOptions { device: DeviceId::Cuda(0), route: Route::Staged, ..LoadOptions::default() };
    // Error 900 says that a stream is being captured: the context lives, and so does the copy.
    STAND_IN.set("COPY_LATENCY_US=2000");
    STAND_IN.set("FAULTS=cuEventSynchronize:*=900");
    let error = windlass::load(&[&path], &options).unwrap_err();
    assert!(matches!(&error, Error::Device { source, .. } if source.code == 900), "{error:?}");
    assert!(STAND_IN.count("pinned_bytes") > 0, "slots of copies in doubt stay");

    STAND_IN.reset();
    let loaded = windlass::load(&[&path], &options).unwrap();
    let with_tensors = STAND_IN.count("device_bytes");
    STAND_IN.set("FAULTS=cuMemFree_v2:*=900");
    drop(loaded);
    assert_eq!(STAND_IN.count("device_bytes"), with_tensors, "kernels may still read it");
}
