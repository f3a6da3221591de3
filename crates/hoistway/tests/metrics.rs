//! How loads are counted by the way in which they end.
#![allow(missing_docs, unsafe_code, clippy::unwrap_used)]

mod common;

use common::{tensor, write_model};
use hoistway::{
    Cancel, Checkpoint, DeviceId, Dtype, Error, FillTarget, LoadOptions, Order, Route, StreamOptions,
    plan::TensorRequest,
};
use std::{fs::File, sync::Mutex, time::Duration};

/// Counts are of the whole process, so these tests take turns.
static TURN: Mutex<()> = Mutex::new(());
const BYTES: u64 = 4 << 20;

/// Loads that ended well, that failed, and that were cancelled.
fn counts() -> [u64; 3] {
    let text = hoistway::metrics();
    ["ok", "failed", "cancelled"].map(|outcome| {
        let name = format!("hoistway_loads_total{{outcome=\"{outcome}\"}} ");
        text.lines().find_map(|line| line.strip_prefix(&name)).unwrap().parse().unwrap()
    })
}

/// Checks what `work` adds to the counts.
fn assert_adds(expected: [u64; 3], work: impl FnOnce(&Checkpoint, &File)) {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let tensors: Vec<_> = (0..4).map(|i| tensor(&format!("w{i}"), Dtype::U8, &[BYTES])).collect();
    write_model(&path, &tensors, 0, 1);
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let before = counts();
    work(&checkpoint, &File::options().write(true).open(&path).unwrap());
    let after = counts();
    assert_eq!([0, 1, 2].map(|outcome| after[outcome] - before[outcome]), expected);
}

fn options() -> LoadOptions {
    LoadOptions::default().route(Route::Threads)
}

/// Calls `work` with memory for the first tensor.
fn with_target(checkpoint: &Checkpoint, missing_bytes: u64, work: impl FnOnce(&[FillTarget])) {
    let mut memory = vec![0_u8; BYTES as usize];
    let id = checkpoint.catalog().find("w0").unwrap();
    let address = memory.as_mut_ptr().expose_provenance() as u64;
    work(&[FillTarget::new(TensorRequest::whole(id), DeviceId::Cpu, address, BYTES - missing_bytes)]);
}

#[test]
fn a_load_that_is_dropped_early_is_cancelled() {
    assert_adds([0, 0, 1], |checkpoint, _| {
        let stream = StreamOptions::default().max_in_flight_bytes(BYTES);
        let mut loading = checkpoint.stream(&options(), &stream).unwrap();
        loading.next().unwrap().unwrap();
    });
}

#[test]
fn a_load_that_is_cancelled_is_no_failure() {
    assert_adds([0, 0, 1], |checkpoint, _| {
        let stream = StreamOptions::default().max_in_flight_bytes(BYTES);
        let mut loading = checkpoint.stream(&options(), &stream).unwrap();
        loading.cancel();
        assert!(matches!(loading.next_within(Duration::MAX), Err(Error::Cancelled)));
    });
}

#[test]
fn a_fill_that_is_cancelled_is_no_failure() {
    for waits in [false, true] {
        assert_adds([0, 0, 1], |checkpoint, _| {
            with_target(checkpoint, 0, |targets| {
                let cancel = Cancel::default();
                cancel.cancel();
                let options = options().cancel(cancel);
                // SAFETY: the memory outlives the load, and is used by nothing else.
                let filling = unsafe { checkpoint.fill(targets, &options, Order::Arrival) };
                if let (Ok(mut filling), true) = (filling, waits) {
                    assert!(filling.next_within(Duration::from_secs(60)).is_err());
                }
            });
        });
    }
}

#[test]
fn a_fill_fails_once() {
    assert_adds([0, 1, 0], |checkpoint, _| {
        with_target(checkpoint, 1, |targets| {
            // SAFETY: as above.
            assert!(unsafe { checkpoint.fill(targets, &options(), Order::Arrival) }.is_err());
        });
    });
    assert_adds([0, 1, 0], |checkpoint, file| {
        file.set_len(1 << 10).unwrap();
        with_target(checkpoint, 0, |targets| {
            // SAFETY: as above.
            if let Ok(mut filling) = unsafe { checkpoint.fill(targets, &options(), Order::Arrival) } {
                assert!(filling.next_within(Duration::from_secs(60)).is_err());
            }
        });
    });
}
