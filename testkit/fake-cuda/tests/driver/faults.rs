//! Faults on request.

use crate::fixture::{ENDLESS, Session};
use std::ffi::CString;

#[test]
fn the_nth_call_fails_and_does_nothing() {
    let session = Session::new();
    session.configure("FAULTS=cuMemAlloc_v2:2=2,cuEventCreate:*=1");
    let mut addresses = [0; 3];
    let codes = addresses.each_mut().map(|address| session.cuMemAlloc_v2(address, 16));
    assert_eq!((codes, addresses[1]), ([0, 2, 0], 0));
    assert_eq!(session.count("device_bytes"), 32);
    let mut event = 0;
    assert_eq!([0; 3].map(|_: i32| session.cuEventCreate(&mut event, 0)), [1; 3]);
    session.configure("FAULTS=");
    assert_eq!(session.cuEventCreate(&mut event, 0), 0);
}

#[test]
fn some_codes_stay() {
    let session = Session::new();
    let mut address = 0;
    for (code, later) in [(700, 700), (719, 719), (46, 0), (999, 0)] {
        session.configure(&format!("FAULTS=cuMemAlloc_v2:1={code}"));
        assert_eq!(session.cuMemAlloc_v2(&mut address, 16), code);
        assert_eq!(session.cuCtxSynchronize(), later);
        session.fake_cuda_reset();
        assert_eq!(session.cuCtxSynchronize(), 0);
    }
}

#[test]
fn a_copy_fails_when_it_runs() {
    let session = Session::new();
    let (stream, event) = (session.stream(), session.event());
    let destination = session.upload(b"before");
    let source = session.pinned(b"behind");
    session.configure("FAULTS=copy:2=719");
    let gate = session.gate(stream);
    for offset in 0..3 {
        let from = source[offset..].as_ptr();
        assert_eq!(session.cuMemcpyHtoDAsync_v2(destination + offset as u64, from, 1, stream), 0);
    }
    assert_eq!(session.cuEventRecord(event, stream), 0);
    drop(gate);
    assert_eq!(session.cuEventSynchronize(event), 719);
    assert_eq!(session.cuStreamQuery(stream), 719);
    assert_eq!(session.cuMemcpyHtoDAsync_v2(destination, source.as_ptr(), 1, stream), 719);
    session.fake_cuda_reset();
    assert_eq!(session.download(destination, 6), b"before", "only the first of three ran");
}

/// A program may do with the memory what it likes as soon as it is told that nothing uses it, also after a reset.
#[test]
fn a_call_that_says_that_the_context_is_of_no_use_ends_its_work() {
    for (fault, code, later) in [
        ("cuEventSynchronize:1=719", 719, 719),
        ("cuMemGetInfo_v2:1=700", 700, 700),
        ("cuCtxPushCurrent_v2:1=201", 201, 0),
    ] {
        let session = Session::new();
        let (stream, event) = (session.stream(), session.event());
        let destination = session.upload(b"before");
        let source = session.pinned(b"behind");
        let gate = session.gate(stream);
        for offset in [0, 3] {
            let from = source[offset..].as_ptr();
            assert_eq!(session.cuMemcpyHtoDAsync_v2(destination + offset as u64, from, 3, stream), 0);
        }
        assert_eq!(session.cuEventRecord(event, stream), 0);
        session.configure(&format!("FAULTS={fault}"));
        let (mut free, mut total) = (0, 0);
        let told = match code {
            719 => session.cuEventSynchronize(event),
            700 => session.cuMemGetInfo_v2(&mut free, &mut total),
            _ => session.cuCtxPushCurrent_v2(session.context),
        };
        assert_eq!(told, code, "{fault}");
        assert_eq!(session.cuMemFreeHost(source.as_mut_ptr()), later, "{fault}");
        session.fake_cuda_reset();
        drop(gate);
        assert_eq!(session.cuStreamSynchronize(stream), 0, "{fault}: a copy went on");
        assert_eq!(session.download(destination, 6), b"before", "{fault}");
        assert_eq!(session.cuEventQuery(event), 400, "{fault}: what was left out counts as done");
        assert_eq!(session.cuEventSynchronize(event), 400, "{fault}");
        assert_eq!(session.cuEventRecord(event, stream), 0, "{fault}");
        assert_eq!(session.cuEventSynchronize(event), 0, "{fault}: the context is as new");
    }
}

/// A copy that has begun is over too, without the bytes that it had still to move.
#[test]
fn a_copy_that_is_under_way_ends_with_the_work_of_its_context() {
    let session = Session::new();
    let stream = session.stream();
    let destination = session.upload(b"before");
    let source = session.pinned(b"behind");
    session.configure(ENDLESS);
    assert_eq!(session.cuMemcpyHtoDAsync_v2(destination, source.as_ptr(), 6, stream), 0);
    session.configure("FAULTS=cuMemGetInfo_v2:1=719");
    let (mut free, mut total) = (0, 0);
    assert_eq!(session.cuMemGetInfo_v2(&mut free, &mut total), 719);
    assert_eq!(session.cuStreamSynchronize(stream), 719, "nothing is waited for");
    session.fake_cuda_reset();
    assert_eq!(session.cuStreamSynchronize(stream), 0);
    assert_eq!(session.download(destination, 6), b"before");
}

/// The copies in front of an event were left out, although it was recorded after the end of the context.
#[test]
fn an_event_behind_copies_that_were_left_out_is_lost() {
    let session = Session::new();
    let (stream, event) = (session.stream(), session.event());
    let destination = session.upload(b"before");
    let source = session.pinned(b"behind");
    let gate = session.gate(stream);
    assert_eq!(session.cuMemcpyHtoDAsync_v2(destination, source.as_ptr(), 6, stream), 0);
    session.configure("FAULTS=cuCtxPushCurrent_v2:1=201");
    assert_eq!(session.cuCtxPushCurrent_v2(session.context), 201);
    assert_eq!(session.cuEventRecord(event, stream), 0);
    drop(gate);
    assert_eq!(session.cuEventSynchronize(event), 400);
    assert_eq!(session.cuEventQuery(event), 400);
}

/// The codes that the engine takes for the end of all work.
#[test]
fn calls_that_end_work_are_those_that_the_engine_knows() {
    let session = Session::new();
    let (mut free, mut total) = (0, 0);
    for code in [214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719] {
        session.configure(&format!("FAULTS=cuMemGetInfo_v2:1={code}"));
        assert_eq!(session.cuMemGetInfo_v2(&mut free, &mut total), code);
        assert_eq!(session.cuCtxSynchronize(), code);
        session.fake_cuda_reset();
    }
    for code in [1, 2, 46, 201, 400, 701, 999] {
        session.configure(&format!("FAULTS=cuMemGetInfo_v2:1={code}"));
        assert_eq!(session.cuMemGetInfo_v2(&mut free, &mut total), code);
        assert_eq!(session.cuCtxSynchronize(), 0, "{code}");
    }
}

#[test]
fn calls_are_counted() {
    let session = Session::new();
    let before = session.count("calls.cuStreamQuery");
    session.configure("FAULTS=cuStreamQuery:1=1");
    let codes = [0, 0, 99].map(|stream| session.cuStreamQuery(stream));
    assert_eq!(codes, [1, 0, 400]);
    assert_eq!(session.count("calls.cuStreamQuery"), before + 3);
    assert_eq!((session.count("calls.nothing"), session.count("nothing")), (0, u64::MAX));
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let session = Session::new();
    for text in ["", "POISON", "POISON=2", "DEVICES=17", "ALIGNMENT=3", "CUFILE_MODE=x", "FAULTS=a", "X=1"] {
        let text = CString::new(text).unwrap();
        assert_eq!(session.fake_cuda_configure(text.as_ptr()), 1, "{text:?}");
    }
}
