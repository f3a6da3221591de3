//! Where nobody can say whether a copy has ended, its memory is leaked, never used for something else. A program of its
//! own, since what is leaked here stays.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    reading::{Kind, LONG, Place, TestFile, assert_all_hold, range, submit},
    stand_in::{STAND_IN, Turn},
    tensor, write_model,
};
use windlass::{
    DeviceId, Dtype, Error, LoadOptions, Route,
    read::{Priority, Reader, ReaderOptions},
};

#[test]
fn memory_that_may_still_be_copied_is_not_freed() {
    let _turn = Turn::take();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("m.safetensors");
    write_model(&path, &[tensor("t", Dtype::U8, &[24 << 20])], 0, 3);
    let options = LoadOptions::default().device(DeviceId::Cuda(0)).route(Route::Staged);
    // The context may live, and so may the copy: a busy device, a stream that is being captured, an unknown error.
    for code in [46, 900, 999] {
        let before = STAND_IN.count("pinned_bytes");
        STAND_IN.set("COPY_LATENCY_US=2000");
        STAND_IN.set(&format!("FAULTS=cuEventSynchronize:*={code}"));
        let error = windlass::load(&[&path], &options).unwrap_err();
        assert!(matches!(&error, Error::Device { source, .. } if source.code == code), "{error:?}");
        assert!(STAND_IN.count("pinned_bytes") > before, "slots of copies in doubt stay ({code})");
        STAND_IN.reset();
    }

    STAND_IN.reset();
    let loaded = windlass::load(&[&path], &options).unwrap();
    let with_tensors = STAND_IN.count("device_bytes");
    STAND_IN.set("FAULTS=cuMemFree_v2:*=900");
    drop(loaded);
    assert_eq!(STAND_IN.count("device_bytes"), with_tensors, "kernels may still read it");
}

/// A reader stays: it does without the slots that are in doubt, and when none is left says so rather than wait for one.
#[test]
fn memory_that_may_still_be_copied_is_not_freed_by_a_reader_which_goes_on_without_it() {
    let stand_in = Turn::take();
    let file = TestFile::new(1 << 20);
    let chunk_bytes = 64 << 10;
    let options = ReaderOptions::default().chunk_bytes(chunk_bytes).memory_budget_bytes(3 * chunk_bytes);
    let reader = Reader::new(&options).unwrap();
    let (open, before) = (file.open(), stand_in.count("pinned_bytes"));
    for lost in 1..=3 {
        stand_in.set("FAULTS=cuEventSynchronize:*=900");
        let mut places =
            [Place::new(Kind::Device(0), range(0, 1000)), Place::new(Kind::Memory, range(0, 1000))];
        let batch = submit(&reader, &open, &mut places, Priority::Demand);
        let error = batch.wait_read(0, LONG).error().unwrap().to_string();
        assert!(error.contains("cuEventSynchronize"), "{error}");
        assert!(batch.wait_read(1, LONG).error().is_none());
        stand_in.reset();
        let mut places = [0, 300_000].map(|start| Place::new(Kind::Device(1), range(start, 200_000)));
        let batch = submit(&reader, &open, &mut places, Priority::Demand);
        match batch.wait_within(LONG).expect("nobody waits for a slot that never comes back") {
            Ok(()) => {
                assert!(lost < 3);
                assert_all_hold(&file, &places, &batch);
            }
            Err(Error::DeviceUnavailable { device, why }) => {
                assert!(lost == 3 && device == "cuda:0" && why.fix.contains("new reader"), "{why}");
                assert_eq!(batch.report().failed, 2);
            }
            Err(other) => panic!("{other:?}"),
        }
    }
    drop(reader);
    assert!(stand_in.count("pinned_bytes") >= before + 3 * chunk_bytes, "slots of copies in doubt stay");
    let mut place = [Place::new(Kind::Device(0), range(5, 1000))];
    let reader = Reader::new(&options).unwrap();
    let batch = submit(&reader, &open, &mut place, Priority::Demand);
    batch.wait().unwrap_or_else(|error| panic!("{error}"));
    assert_all_hold(&file, &place, &batch);
}
