//! Streams, events and host functions.

use crate::{
    fixture::Session,
    library::{Library, library},
};
use std::{
    ffi::c_void,
    ptr,
    sync::{Mutex, atomic::AtomicI32, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

#[test]
fn streams_wait_for_events_alone() {
    let session = Session::new();
    let (held, free, event) = (session.stream(), session.stream(), session.event());
    let gate = session.gate(held);
    assert_eq!(session.cuEventRecord(event, held), 0);
    assert_eq!(session.cuStreamSynchronize(free), 0);
    assert_eq!(session.cuStreamSynchronize(0), 0);
    assert_eq!(session.cuStreamWaitEvent(free, event, 0), 0);
    assert_eq!([session.cuStreamQuery(free), session.cuEventQuery(event)], [600, 600]);
    drop(gate);
    assert_eq!(session.cuEventSynchronize(event), 0);
    assert_eq!(session.cuEventQuery(event), 0);
    assert_eq!(session.cuStreamSynchronize(free), 0);
}

#[test]
fn a_wait_is_for_what_was_recorded_when_it_was_asked_for() {
    let session = Session::new();
    let (first, second, waiting, event) =
        (session.stream(), session.stream(), session.stream(), session.event());
    // Nothing was recorded yet, so that this waits for nothing.
    assert_eq!(session.cuStreamWaitEvent(waiting, event, 0), 0);
    assert_eq!(session.cuEventRecord(event, first), 0);
    assert_eq!(session.cuStreamWaitEvent(waiting, event, 0), 0);
    let gate = session.gate(second);
    assert_eq!(session.cuEventRecord(event, second), 0);
    assert_eq!(session.cuStreamSynchronize(waiting), 0);
    assert_eq!(session.cuEventQuery(event), 600);
    drop(gate);
    assert_eq!(session.cuEventSynchronize(event), 0);
}

#[test]
fn a_later_mark_does_not_stand_for_an_earlier_one() {
    let session = Session::new();
    let (held, free, waiting, event) =
        (session.stream(), session.stream(), session.stream(), session.event());
    let gate = session.gate(held);
    assert_eq!(session.cuEventRecord(event, held), 0);
    assert_eq!(session.cuStreamWaitEvent(waiting, event, 0), 0);
    assert_eq!(session.cuEventRecord(event, free), 0);
    assert_eq!(session.cuEventSynchronize(event), 0);
    assert_eq!(session.cuStreamQuery(waiting), 600);
    drop(gate);
    assert_eq!(session.cuStreamSynchronize(waiting), 0);
}

#[test]
fn handles_end_with_their_thing() {
    let session = Session::new();
    let (stream, event) = (session.stream(), session.event());
    assert_eq!((session.count("streams"), session.count("events")), (1, 1));
    assert_eq!([session.cuStreamDestroy_v2(stream), session.cuEventDestroy_v2(event)], [0, 0]);
    assert_eq!((session.count("streams"), session.count("events")), (0, 0));
    let later = [
        session.cuStreamDestroy_v2(stream),
        session.cuStreamSynchronize(stream),
        session.cuEventDestroy_v2(event),
        session.cuEventRecord(event, 0),
        session.cuStreamWaitEvent(0, event, 0),
        session.cuMemcpyDtoDAsync_v2(0, 0, 0, stream),
    ];
    assert_eq!(later, [400; 6]);
}

#[test]
fn a_destroyed_stream_finishes_its_work() {
    let session = Session::new();
    let stream = session.stream();
    let destination = session.allocate(4);
    let gate = session.gate(stream);
    assert_eq!(session.cuMemcpyHtoDAsync_v2(destination, b"data".as_ptr(), 4, stream), 0);
    assert_eq!(session.cuStreamDestroy_v2(stream), 0);
    drop(gate);
    assert_eq!(session.cuCtxSynchronize(), 0);
    assert_eq!(session.download(destination, 4), b"data");
}

#[test]
fn each_thread_has_a_mode_of_capture() {
    let session = Session::new();
    let swap = |mut mode| (session.cuThreadExchangeStreamCaptureMode(&mut mode), mode);
    assert_eq!([swap(2), swap(1)], [(0, 0), (0, 2)]);
    thread::scope(|scope| {
        scope.spawn(|| assert_eq!(swap(2), (0, 0)));
    });
    assert_eq!([swap(3), swap(-1)], [(1, 3), (1, -1)]);
    assert_eq!(session.cuThreadExchangeStreamCaptureMode(ptr::null_mut()), 1);
    assert_eq!(swap(0), (0, 1));
}

#[test]
fn host_functions_run_in_order_and_may_not_call_the_driver() {
    static SEEN: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    static CODE: AtomicI32 = AtomicI32::new(0);
    extern "C" fn note(argument: *mut c_void) {
        SEEN.lock().unwrap().push(argument.addr());
        CODE.store(Library::cuInit(library(), 0), Ordering::SeqCst);
    }
    let session = Session::new();
    let stream = session.stream();
    for number in 1..=3 {
        assert_eq!(session.cuLaunchHostFunc(stream, note, ptr::without_provenance_mut(number)), 0);
    }
    assert_eq!(session.cuStreamSynchronize(stream), 0);
    assert_eq!(*SEEN.lock().unwrap(), [1, 2, 3]);
    assert_eq!(CODE.load(Ordering::SeqCst), 800);
}

#[test]
fn copies_can_be_slow() {
    let session = Session::configured(&["COPY_MIB_S=1"]);
    let stream = session.stream();
    let source = session.pinned(&[0; 1 << 20]);
    let destination = session.allocate(1 << 20);
    let gate = session.gate(stream);
    // The call doesn't wait, or it would not return.
    assert_eq!(session.cuMemcpyHtoDAsync_v2(destination, source.as_ptr(), 1 << 20, stream), 0);
    let begin = Instant::now();
    drop(gate);
    assert_eq!(session.cuStreamSynchronize(stream), 0);
    assert!(begin.elapsed() >= Duration::from_secs(1));
}

#[test]
fn jitter_changes_no_order_within_a_stream() {
    let session = Session::configured(&["JITTER_US=200"]);
    let streams: Vec<_> = (0..4).map(|_| session.stream()).collect();
    let addresses: Vec<_> = (0..4).map(|_| session.allocate(1)).collect();
    for value in 0..20 {
        for (stream, address) in streams.iter().zip(&addresses) {
            assert_eq!(session.cuMemsetD8Async(*address, value, 1, *stream), 0);
        }
    }
    assert_eq!(session.cuCtxSynchronize(), 0);
    for address in addresses {
        assert_eq!(session.download(address, 1), [19]);
    }
}
