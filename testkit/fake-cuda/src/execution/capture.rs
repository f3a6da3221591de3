//! Captures: what is queued on a stream becomes a graph, and calls that do not go with that are refused.
//!
//! The rules are those that `cuda.h` states of `cuStreamBeginCapture`, `cuThreadExchangeStreamCaptureMode` and the codes
//! from 900 on. Which calls are "potentially unsafe" it does not list: here they are those that allocate, free, pin, load
//! modules, ask after events, or wait.

use super::{context::Owner, event::Event, handles::Table, operation::Operation, stream::Stream};
use crate::status::{
    CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED,
    CAPTURE_WRONG_THREAD, CAPTURED_EVENT, Code,
};
use std::{
    cell::Cell,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, ThreadId},
};

/// `CUstreamCaptureMode`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

/// What was captured.
pub(crate) struct Graph(Vec<Operation>);

/// Graphs, and what was instantiated of them.
pub(crate) static GRAPHS: Table<Graph> = Table::new(0x6A00_0000_0000);

struct Capture {
    stream: Arc<Stream>,
    /// Streams that waited for an event of the capture, and are captured since.
    joined: Vec<Arc<Stream>>,
    thread: ThreadId,
    mode: Mode,
    is_invalidated: bool,
    operations: Vec<Operation>,
}

static CAPTURES: Mutex<Vec<Capture>> = Mutex::new(Vec::new());
/// As many as there are captures: spares the lock while there are none.
static COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

impl Mode {
    pub(crate) fn of(number: i32) -> Option<Mode> {
        [Mode::Global, Mode::ThreadLocal, Mode::Relaxed].into_iter().find(|mode| *mode as i32 == number)
    }
}

/// Swaps the calling thread's mode.
pub(crate) fn exchange_mode(mode: Mode) -> Mode {
    MODE.replace(mode)
}

/// Begins to capture a stream.
pub(crate) fn begin(stream: Arc<Stream>, mode: Mode) -> Result<(), Code> {
    let mut captures = captures();
    if stream.is_legacy() || captures.iter().any(|capture| Arc::ptr_eq(&capture.stream, &stream)) {
        return Err(CAPTURE_UNSUPPORTED);
    }
    let thread = thread::current().id();
    let (joined, operations) = (Vec::new(), Vec::new());
    captures.push(Capture { stream, joined, thread, mode, is_invalidated: false, operations });
    COUNT.store(captures.len(), Ordering::SeqCst);
    Ok(())
}

/// Ends the capture of a stream, and returns the handle of its graph.
pub(crate) fn end(stream: &Arc<Stream>) -> Result<usize, Code> {
    let mut captures = captures();
    let place = captures.iter().position(|capture| Arc::ptr_eq(&capture.stream, stream));
    let place = place.ok_or(CAPTURE_UNMATCHED)?;
    if captures[place].mode != Mode::Relaxed && captures[place].thread != thread::current().id() {
        return Err(CAPTURE_WRONG_THREAD);
    }
    let capture = captures.remove(place);
    COUNT.store(captures.len(), Ordering::SeqCst);
    if capture.is_invalidated {
        return Err(CAPTURE_INVALIDATED);
    }
    // Nothing joins them back here.
    if !capture.joined.is_empty() {
        return Err(CAPTURE_UNJOINED);
    }
    Ok(GRAPHS.insert(Arc::new(Graph(capture.operations))))
}

/// Makes a stream a part of the capture that an event was recorded in.
pub(crate) fn join(stream: &Arc<Stream>, event: &Arc<Event>) -> Result<(), Code> {
    let mut captures = captures();
    let capture = captures.iter_mut().find(|capture| capture.has_mark(event)).ok_or(CAPTURED_EVENT)?;
    if !capture.has(stream) {
        capture.joined.push(Arc::clone(stream));
    }
    Ok(())
}

/// Invalidates the capture that an event was recorded in, as NVIDIA's driver does when it is asked after the event (580.159 on an
/// H100).
pub(crate) fn invalidate(event: &Arc<Event>) {
    if let Some(capture) = captures().iter_mut().find(|capture| capture.has_mark(event)) {
        capture.is_invalidated = true;
    }
}

/// `CUstreamCaptureStatus` of a stream.
pub(crate) fn status(stream: &Arc<Stream>) -> Result<i32, Code> {
    if COUNT.load(Ordering::SeqCst) == 0 {
        return Ok(0);
    }
    let captures = captures();
    if stream.is_legacy() {
        let is_implicit = captures.iter().any(|capture| capture.is_ordered_with(stream));
        return if is_implicit { Err(CAPTURE_IMPLICIT) } else { Ok(0) };
    }
    let capture = captures.iter().find(|capture| capture.has(stream));
    Ok(capture.map_or(0, |capture| 1 + i32::from(capture.is_invalidated)))
}

/// Whether a call is potentially unsafe.
pub(crate) fn is_unsafe(name: &str) -> bool {
    matches!(
        name,
        "cuMemAlloc_v2"
            | "cuMemFree_v2"
            | "cuMemHostRegister_v2"
            | "cuMemHostUnregister"
            | "cuMemHostAlloc"
            | "cuMemFreeHost"
            | "cuModuleLoadData"
            | "cuModuleUnload"
            | "cuEventQuery"
            | "cuEventSynchronize"
            | "cuStreamSynchronize"
            | "cuStreamQuery"
    )
}

/// Refuses a potentially unsafe call where the thread's mode and the captures do not permit it.
pub(crate) fn check_unsafe() -> Result<(), Code> {
    let this_thread = thread::current().id();
    let is_forbidden = |capture: &Capture| match MODE.get() {
        Mode::Relaxed => false,
        Mode::ThreadLocal => capture.thread == this_thread && capture.mode != Mode::Relaxed,
        Mode::Global if capture.thread == this_thread => capture.mode != Mode::Relaxed,
        Mode::Global => capture.mode == Mode::Global,
    };
    refuse(is_forbidden, CAPTURE_UNSUPPORTED)
}

/// Refuses to wait for a context in which something is captured, in every mode.
pub(crate) fn check_context(owner: &Arc<Owner>) -> Result<(), Code> {
    refuse(|capture| Arc::ptr_eq(&capture.stream.owner, owner), CAPTURE_UNSUPPORTED)
}

/// Refuses to wait for a stream that is captured, or to ask after it.
pub(crate) fn check_wait(stream: &Arc<Stream>) -> Result<(), Code> {
    check_use(stream)?;
    refuse(|capture| Arc::ptr_eq(&capture.stream, stream), CAPTURE_UNSUPPORTED)
}

/// Refuses work on the legacy default stream while a stream is captured that is ordered with it.
pub(crate) fn check_use(stream: &Arc<Stream>) -> Result<(), Code> {
    if !stream.is_legacy() {
        return Ok(());
    }
    refuse(|capture| capture.is_ordered_with(stream), CAPTURE_IMPLICIT)
}

/// Takes an operation if its stream is captured.
pub(super) fn take(stream: &Stream, operation: Operation) -> Option<Operation> {
    if COUNT.load(Ordering::SeqCst) == 0 {
        return Some(operation);
    }
    let mut captures = captures();
    let Some(capture) = captures.iter_mut().find(|capture| capture.has(stream)) else {
        return Some(operation);
    };
    if let Operation::Record(event, generation) = &operation {
        event.capture(*generation);
    }
    capture.operations.push(operation);
    None
}

impl Capture {
    fn has(&self, stream: &Stream) -> bool {
        std::iter::once(&self.stream).chain(&self.joined).any(|joined| std::ptr::eq(&**joined, stream))
    }

    fn has_mark(&self, event: &Arc<Event>) -> bool {
        let is_mark = |operation: &Operation| matches!(operation, Operation::Record(mark, _) if Arc::ptr_eq(mark, event));
        self.operations.iter().any(is_mark)
    }

    fn is_ordered_with(&self, legacy: &Stream) -> bool {
        self.stream.is_blocking() && Arc::ptr_eq(&self.stream.owner, &legacy.owner)
    }
}

impl Graph {
    /// Queues what was captured once more.
    pub(crate) fn launch(&self, stream: &Stream) {
        for operation in &self.0 {
            stream.push(operation.clone());
        }
    }
}

/// Invalidates the captures that a call does not go with.
fn refuse(is_meant: impl Fn(&Capture) -> bool, code: Code) -> Result<(), Code> {
    if COUNT.load(Ordering::SeqCst) == 0 {
        return Ok(());
    }
    let mut is_refused = false;
    for capture in captures().iter_mut().filter(|capture| is_meant(capture)) {
        capture.is_invalidated = true;
        is_refused = true;
    }
    if is_refused { Err(code) } else { Ok(()) }
}

fn captures() -> MutexGuard<'static, Vec<Capture>> {
    CAPTURES.lock().unwrap_or_else(PoisonError::into_inner)
}
