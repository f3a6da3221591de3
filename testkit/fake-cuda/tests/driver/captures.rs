//! Captures of streams, and the calls that do not go with one.

use crate::fixture::Session;
use std::thread;

const GLOBAL: i32 = 0;
const THREAD_LOCAL: i32 = 1;
const RELAXED: i32 = 2;

/// Begins a capture of a stream by this thread.
fn begin(session: &Session, stream: usize, mode: i32) {
    assert_eq!(session.cuStreamBeginCapture_v2(stream, mode), 0);
}

/// Ends it, and returns what that returns.
fn end(session: &Session, stream: usize) -> i32 {
    let mut graph = 0;
    let code = session.cuStreamEndCapture(stream, &mut graph);
    assert_eq!(code == 0, graph != 0);
    if graph != 0 {
        assert_eq!(session.cuGraphDestroy(graph), 0);
    }
    code
}

/// What a call of another thread returns, whose mode of capture is this.
fn elsewhere(session: &Session, mode: i32, call: impl FnOnce() -> i32 + Send) -> i32 {
    thread::scope(|scope| {
        let call = || {
            assert_eq!(session.cuCtxSetCurrent(session.context), 0);
            let mut mode = mode;
            assert_eq!(session.cuThreadExchangeStreamCaptureMode(&mut mode), 0);
            call()
        };
        scope.spawn(call).join().unwrap()
    })
}

#[test]
fn a_graph_does_what_was_captured_each_time_it_is_launched() {
    let session = Session::new();
    let (stream, memory) = (session.stream(), session.upload(&[0; 64]));
    let (mut graph, mut executable) = (0, 0);
    begin(&session, stream, GLOBAL);
    assert_eq!(session.cuMemsetD8Async(memory, 7, 64, stream), 0);
    assert_eq!(session.cuStreamEndCapture(stream, &mut graph), 0);
    assert_eq!(session.cuStreamSynchronize(stream), 0);
    assert_eq!(session.download(memory, 64), [0; 64], "nothing runs while it is captured");
    assert_eq!(session.cuGraphInstantiateWithFlags(&mut executable, graph, 0), 0);
    for value in [1, 2] {
        assert_eq!(session.cuMemsetD8Async(memory, value, 64, stream), 0);
        assert_eq!(session.cuGraphLaunch(executable, stream), 0);
        assert_eq!(session.cuStreamSynchronize(stream), 0);
        assert_eq!(session.download(memory, 64), [7; 64]);
    }
    assert_eq!([session.cuGraphExecDestroy(executable), session.cuGraphDestroy(graph)], [0, 0]);
}

#[test]
fn unsafe_calls_of_other_threads_invalidate_a_global_capture_unless_they_are_relaxed() {
    let session = Session::new();
    let (stream, event) = (session.stream(), session.event());
    for (captured, caller, expected) in [
        (GLOBAL, GLOBAL, 900),
        (GLOBAL, THREAD_LOCAL, 0),
        (GLOBAL, RELAXED, 0),
        (THREAD_LOCAL, GLOBAL, 0),
        (RELAXED, GLOBAL, 0),
    ] {
        begin(&session, stream, captured);
        assert_eq!(elsewhere(&session, caller, || session.cuEventQuery(event)), expected);
        assert_eq!(end(&session, stream), if expected == 0 { 0 } else { 901 });
    }
    // The capturing thread itself.
    for (captured, expected) in [(GLOBAL, 900), (THREAD_LOCAL, 900), (RELAXED, 0)] {
        begin(&session, stream, captured);
        assert_eq!(session.cuEventQuery(event), expected);
        assert_eq!(end(&session, stream), if expected == 0 { 0 } else { 901 });
    }
}

#[test]
fn to_wait_for_the_context_or_for_what_is_captured_conflicts_in_every_mode() {
    let session = Session::new();
    let (stream, event) = (session.stream(), session.event());
    begin(&session, stream, RELAXED);
    assert_eq!(elsewhere(&session, RELAXED, || session.cuCtxSynchronize()), 900);
    assert_eq!(end(&session, stream), 901);
    begin(&session, stream, RELAXED);
    assert_eq!(elsewhere(&session, RELAXED, || session.cuStreamSynchronize(stream)), 900);
    assert_eq!(end(&session, stream), 901);
    begin(&session, stream, RELAXED);
    assert_eq!(session.cuEventRecord(event, stream), 0);
    assert_eq!(elsewhere(&session, RELAXED, || session.cuEventQuery(event)), 907);
    assert_eq!(end(&session, stream), 901);
}

#[test]
fn the_legacy_stream_is_not_used_while_a_stream_is_captured_that_is_ordered_with_it() {
    let session = Session::new();
    let (mut blocking, event, mut status) = (0, session.event(), 7);
    assert_eq!(session.cuStreamCreate(&mut blocking, 0), 0);
    begin(&session, blocking, RELAXED);
    assert_eq!(session.cuStreamIsCapturing(0, &mut status), 906);
    assert_eq!((session.cuStreamIsCapturing(blocking, &mut status), status), (0, 1));
    assert_eq!(end(&session, blocking), 0, "to ask does no harm");
    begin(&session, blocking, RELAXED);
    assert_eq!(session.cuEventRecord(event, 0), 906);
    assert_eq!((session.cuStreamIsCapturing(blocking, &mut status), status), (0, 2));
    assert_eq!(end(&session, blocking), 901);
    assert_eq!((session.cuStreamIsCapturing(0, &mut status), status), (0, 0));
}

#[test]
fn a_stream_that_waits_for_a_captured_event_is_captured_too() {
    let session = Session::new();
    let (stream, other, event, mut status) = (session.stream(), session.stream(), session.event(), 7);
    let memory = session.upload(&[0; 4]);
    begin(&session, stream, GLOBAL);
    assert_eq!(session.cuEventRecord(event, stream), 0);
    assert_eq!(session.cuStreamWaitEvent(other, event, 0), 0);
    assert_eq!((session.cuStreamIsCapturing(other, &mut status), status), (0, 1));
    assert_eq!(session.cuMemsetD8Async(memory, 1, 4, other), 0);
    assert_eq!(end(&session, stream), 904, "it was not joined back");
    assert_eq!(session.download(memory, 4), [0; 4], "it was not done");
    assert_eq!(session.cuStreamWaitEvent(other, event, 0), 907);
}

#[test]
fn another_thread_does_not_end_a_capture() {
    let session = Session::new();
    let stream = session.stream();
    begin(&session, stream, GLOBAL);
    assert_eq!(elsewhere(&session, GLOBAL, || end(&session, stream)), 908);
    assert_eq!([end(&session, stream), end(&session, stream)], [0, 903]);
}

#[test]
fn blocking_streams_are_in_order_with_the_legacy_one() {
    let session = Session::new();
    let (mut blocking, free) = (0, session.stream());
    assert_eq!(session.cuStreamCreate(&mut blocking, 0), 0);
    let memory = session.upload(&[0; 4]);
    let gate = session.gate(blocking);
    assert_eq!(session.cuMemsetD8Async(memory, 1, 1, 0), 0);
    assert_eq!([session.cuStreamQuery(0), session.cuStreamQuery(free)], [600, 0]);
    drop(gate);
    assert_eq!(session.cuStreamSynchronize(0), 0);
    let gate = session.gate(0);
    assert_eq!(session.cuMemsetD8Async(memory + 1, 2, 1, blocking), 0);
    assert_eq!(session.cuMemsetD8Async(memory + 2, 3, 1, free), 0);
    assert_eq!(session.cuStreamSynchronize(free), 0);
    assert_eq!(session.cuStreamQuery(blocking), 600);
    drop(gate);
    assert_eq!(session.cuStreamSynchronize(blocking), 0);
    assert_eq!(session.download(memory, 3), [1, 2, 3]);
}
