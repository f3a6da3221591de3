//! Contexts.

use crate::fixture::{Driver, Session};

#[test]
fn calls_without_a_context_are_refused() {
    let driver = Driver::new();
    let (mut place, mut handle) = (0, 0);
    assert_eq!(driver.cuMemAlloc_v2(&mut place, 1), 201);
    assert_eq!(driver.cuStreamCreate(&mut handle, 0), 201);
    assert_eq!(driver.cuMemcpyHtoD_v2(0, [0].as_ptr(), 1), 201);
    assert_eq!(driver.cuModuleLoadData(&mut handle, c".version 8.0".as_ptr()), 201);
    assert_eq!(driver.cuCtxSynchronize(), 201);
}

#[test]
fn each_thread_has_a_stack_of_contexts() {
    let session = Session::new();
    let mut other = 0;
    assert_eq!(session.cuCtxCreate_v2(&mut other, 0, 1), 0);
    let current = || {
        let (mut context, mut device) = (0, -1);
        assert_eq!(session.cuCtxGetCurrent(&mut context), 0);
        (context, session.cuCtxGetDevice(&mut device), device, session.count("context_depth"))
    };
    assert_eq!(current(), (other, 0, 1, 2));
    assert_eq!(session.cuCtxPushCurrent_v2(session.context), 0);
    assert_eq!(current(), (session.context, 0, 0, 3));
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(current(), (0, 201, -1, 0)));
    });
    let mut popped = 0;
    assert_eq!((session.cuCtxPopCurrent_v2(&mut popped), popped), (0, session.context));
    assert_eq!(session.cuCtxDestroy_v2(other), 0);
    assert_eq!(current(), (session.context, 0, 0, 1));
    assert_eq!(session.cuCtxPushCurrent_v2(other), 201);
    assert_eq!(session.cuCtxSetCurrent(0), 0);
    assert_eq!(session.cuCtxPopCurrent_v2(&mut popped), 201);
}

#[test]
fn the_last_release_destroys_what_is_left() {
    let driver = Driver::new();
    let leaked = driver.count("leaked");
    let mut context = 0;
    for _ in 0..2 {
        assert_eq!(driver.cuDevicePrimaryCtxRetain(&mut context, 1), 0);
    }
    assert_eq!((driver.count("contexts"), driver.cuCtxSetCurrent(context)), (2, 0));
    let (mut address, mut pool_address, mut stream, mut event, mut module) = (0, 0, 0, 0, 0);
    assert_eq!(driver.cuStreamCreate(&mut stream, 0), 0);
    assert_eq!(driver.cuEventCreate(&mut event, 0), 0);
    assert_eq!(driver.cuMemAlloc_v2(&mut address, 1), 0);
    assert_eq!(driver.cuMemAllocAsync(&mut pool_address, 1, stream), 0);
    assert_eq!(driver.cuModuleLoadData(&mut module, c".version 8.0".as_ptr()), 0);
    let host = [0u8; 64];
    assert_eq!(driver.cuMemHostRegister_v2(host.as_ptr(), 64, 0), 0);

    assert_eq!(driver.cuDevicePrimaryCtxRelease_v2(1), 0);
    assert_eq!(driver.count("leaked"), leaked);
    assert_eq!(driver.cuDevicePrimaryCtxRelease_v2(1), 0);
    assert_eq!(driver.count("leaked"), leaked + 6);
    assert_eq!(driver.cuDevicePrimaryCtxRelease_v2(1), 201);
    let (mut flags, mut active) = (1, 1);
    assert_eq!((driver.cuDevicePrimaryCtxGetState(1, &mut flags, &mut active), active), (0, 0));
    // The handle is current but means nothing, until the context is retained again: as a new one.
    assert_eq!(driver.cuMemAlloc_v2(&mut address, 1), 709);
    assert_eq!(driver.cuDevicePrimaryCtxRetain(&mut context, 1), 0);
    assert_eq!((driver.cuMemAlloc_v2(&mut address, 1), driver.cuMemFree_v2(address)), (0, 0));
    assert_eq!(driver.cuStreamSynchronize(stream), 400);
    assert_eq!(driver.cuDevicePrimaryCtxRelease_v2(1), 0);
    assert_eq!(driver.cuCtxSetCurrent(0), 0);
}

/// A handle of a stream that was made before the reset is that of another stream afterwards.
#[test]
fn a_reset_makes_the_context_anew_and_gives_handles_of_streams_out_again() {
    let driver = Driver::new();
    let leaked = driver.count("leaked");
    let (mut context, mut again, mut id, mut id_again, mut other) = (0, 0, 0, 0, 0);
    assert_eq!((driver.cuDevicePrimaryCtxRetain(&mut context, 1), driver.cuCtxSetCurrent(context)), (0, 0));
    assert_eq!((driver.cuCtxGetId(context, &mut id), driver.cuCtxGetId(0, &mut other)), (0, 0));
    assert_eq!(id, other);
    let mut streams = [0; 3];
    for stream in &mut streams {
        assert_eq!(driver.cuStreamCreate(stream, 1), 0);
        assert_eq!(driver.count("newest_stream"), *stream as u64);
    }
    assert_eq!(driver.cuDevicePrimaryCtxReset_v2(1), 0);
    assert_eq!(driver.cuCtxGetId(context, &mut other), 201);
    assert_eq!(driver.cuCtxPushCurrent_v2(context), 201);
    assert_eq!(driver.cuDevicePrimaryCtxRetain(&mut again, 1), 0);
    assert_eq!((again, driver.cuCtxGetId(context, &mut id_again)), (context, 0));
    assert_ne!(id, id_again);
    assert_eq!(driver.cuStreamQuery(streams[0]), 400);
    for stream in &streams {
        let mut next = 0;
        assert_eq!((driver.cuStreamCreate(&mut next, 1), next), (0, *stream));
    }
    assert_eq!(streams.map(|stream| driver.cuStreamDestroy_v2(stream)), [0; 3]);
    assert_eq!(driver.cuStreamCreate(&mut streams[0], 1), 0);
    assert_eq!(driver.cuCtxSetCurrent(0), 0);
    assert_eq!([0, 0].map(|_| driver.cuDevicePrimaryCtxRelease_v2(1)), [0, 0]);
    assert_eq!(driver.count("leaked"), leaked + 1, "only what was left to the last release");
}

#[test]
fn a_handle_of_another_context_is_refused() {
    let session = Session::new();
    let (stream, event) = (session.stream(), session.event());
    let address = session.allocate(4);
    let mut other = 0;
    assert_eq!(session.cuCtxCreate_v2(&mut other, 0, 1), 0);
    assert_eq!(session.cuMemcpyHtoDAsync_v2(address, [0; 4].as_ptr(), 4, stream), 400);
    assert_eq!(session.cuStreamSynchronize(stream), 400);
    assert_eq!(session.cuEventRecord(event, 0), 400);
    // Events are waited for across contexts, and a copy that the caller waits for finds its device.
    assert_eq!(session.cuStreamWaitEvent(0, event, 0), 0);
    assert_eq!(session.cuMemcpyHtoD_v2(address, b"abcd".as_ptr(), 4), 0);
    assert_eq!(session.cuCtxDestroy_v2(other), 0);
    assert_eq!(session.download(address, 4), b"abcd");
}

#[test]
fn a_stream_reaches_only_its_own_device() {
    let session = Session::new();
    let address = session.allocate(4);
    let mut other = 0;
    assert_eq!(session.cuCtxCreate_v2(&mut other, 0, 1), 0);
    assert_eq!(session.cuMemcpyHtoDAsync_v2(address, [0; 4].as_ptr(), 4, 0), 0);
    assert_eq!(session.cuCtxSynchronize(), 700);
    assert_eq!(session.cuCtxDestroy_v2(other), 0);
    assert_eq!(session.cuCtxSynchronize(), 0, "the error was the other context's");
}
