//! Hands events of `tracing` to Python's `logging`.
//!
//! An event may come from any thread, which may hold any lock of hoistway, so no thread waits for the interpreter here. Events
//! are queued, and a thread of Python's that exists only while there are any hands them over. `pyo3-log` logs on the thread of
//! the event, which would wait for the interpreter under such a lock: another thread that holds the interpreter and waits for
//! the lock would wait for ever.

use arc_swap::ArcSwap;
use pyo3::{exceptions::PyValueError, prelude::*};
use std::{
    collections::VecDeque,
    fmt::Write as _,
    io::{self, Write as _},
    mem, process,
    sync::{
        Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{EnvFilter, Layer, layer::Context, layer::SubscriberExt as _};

/// Events that wait at most. More are counted, and dropped.
const QUEUED: usize = 1024;

/// Events that are handed over in one piece. A fork and the exit of the interpreter come between pieces.
const PIECE: usize = 16;

/// How long a fork and the exit of the interpreter wait for handlers of the program's.
const PATIENCE: Duration = Duration::from_secs(2);

/// An event for `logging`: the number of its level, the logger's name, the text, and the seconds since 1970.
type Record = (u8, String, String, f64);

static LOG: LazyLock<ArcSwap<Log>> = LazyLock::new(ArcSwap::default);

/// This process runs the command: its events go to standard error at once.
static IS_COMMAND: AtomicBool = AtomicBool::new(false);

/// Sends events from now on to `logging`. `directives` are in the form of the variable `HOISTWAY_LOG`; without any, what
/// hoistway warns of and informs of is sent. A `ValueError` says which directive has no meaning.
#[pyfunction]
pub(crate) fn start_log(directives: Option<&str>) -> PyResult<()> {
    let wanted = directives.unwrap_or("hoistway=info");
    if wanted.contains('[') {
        let why = "a directive names a span, such as [load], and events alone are logged";
        return Err(PyValueError::new_err(why));
    }
    let filter = EnvFilter::try_new(wanted).map_err(|error| PyValueError::new_err(error.to_string()))?;
    // A child of `fork` would make spans in the registry, which has locks, and which a thread of its parent may have had.
    let filter = hoistway_trace::events_alone(filter);
    let queue = Queue { least_of_command: if directives.is_some() { Level::TRACE } else { Level::ERROR } };
    // One that was set before stays.
    let _ = tracing::subscriber::set_global_default(
        tracing_subscriber::registry().with(queue.with_filter(filter)).with(crate::trace::timeline().layer()),
    );
    Ok(())
}

/// Writes events to standard error from now on, as the program of the command does.
pub(crate) fn log_as_command() {
    IS_COMMAND.store(true, Ordering::Relaxed);
}

/// Takes some queued events, and the number of those that were dropped; or ends the hand-over.
#[pyfunction]
pub(crate) fn take_log() -> Option<(Vec<Record>, u64)> {
    LOG.load().take()
}

/// Holds events back until [`resume_log`], before a fork: the child would wait for ever for the locks of a handler that is
/// writing then.
#[pyfunction]
pub(crate) fn pause_log(py: Python<'_>) {
    py.detach(|| LOG.load().pause());
}

/// Hands over what was held back, after a fork.
#[pyfunction]
pub(crate) fn resume_log() {
    Log::resume(&LOG.load_full());
}

/// Forgets what the parent process had queued, after a fork, and leaves its timeline to it.
#[pyfunction]
pub(crate) fn reset_log() {
    crate::trace::timeline().leave_to_parent();
    LOG.store(Arc::default());
}

/// Ends the hand-over, before the interpreter ends: waits for the events that are queued, and drops later ones.
#[pyfunction]
pub(crate) fn stop_log(py: Python<'_>) {
    py.detach(|| LOG.load().stop());
}

/// Where warnings come from that users of the command see, too: of misspelt variables, and of servers that do not answer.
const SHOWN: [&str; 2] = ["hoistway::environment", "hoistway_objects::pace"];

/// Queues events.
struct Queue {
    /// Of a command. Less important events are not written, but those of [`SHOWN`].
    least_of_command: Level,
}

impl<S: Subscriber> Layer<S> for Queue {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let mut text = Text::default();
        event.record(&mut text);
        let text = text.finish();
        if IS_COMMAND.load(Ordering::Relaxed) {
            if *metadata.level() <= self.least_of_command || SHOWN.contains(&metadata.target()) {
                // If nothing listens, there is no one to tell.
                let _ = writeln!(io::stderr(), "{:>5} {}: {text}", metadata.level(), metadata.target());
            }
            return;
        }
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let logger = metadata.target().replace("::", ".");
        Log::push(&LOG.load_full(), (number(*metadata.level()), logger, text, time.as_secs_f64()));
    }
}

/// The number that `logging` has for a level. It has none for traces.
fn number(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

/// An event in words: its message, then its fields.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Text {
    /// Control characters of names of files and tensors are escaped: a terminal would obey them.
    fn finish(self) -> String {
        let whole = if self.message.is_empty() { self.fields } else { self.message + &self.fields };
        whole.trim_start().chars().fold(String::new(), |mut text, letter| {
            if letter.is_control() {
                text.extend(letter.escape_default());
            } else {
                text.push(letter);
            }
            text
        })
    }
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        // Without quotes, as most values are.
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

struct Log {
    /// In a child of a fork that Python did not make, no thread hands over, and a lock may never be free.
    process: u32,
    state: Mutex<State>,
    /// Told as the hand-over ends.
    ended: Condvar,
}

impl Default for Log {
    fn default() -> Self {
        Self { process: process::id(), state: Mutex::default(), ended: Condvar::new() }
    }
}

#[derive(Default)]
struct State {
    queued: VecDeque<Record>,
    dropped: u64,
    /// A thread hands over, or will.
    is_running: bool,
    /// Threads that start one, and are in the interpreter for that: as it ends, it would end them amid Rust's frames.
    starters: usize,
    /// Forks under way. Until they are over, no hand-over begins or goes on.
    forks: usize,
    is_stopped: bool,
}

impl Log {
    fn push(log: &Arc<Self>, record: Record) {
        if log.process != process::id() {
            return;
        }
        let mut state = log.lock();
        if state.is_stopped {
            return;
        }
        if state.queued.len() == QUEUED {
            state.dropped += 1;
        } else {
            state.queued.push_back(record);
        }
        Self::start(log, state);
    }

    /// Starts the hand-over, if there is something to hand over.
    fn start(log: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        if state.forks > 0 || state.queued.is_empty() || mem::replace(&mut state.is_running, true) {
            return;
        }
        state.starters += 1;
        drop(state);
        let starter = Arc::clone(log);
        // It waits for the interpreter in the place of the thread that this event came from.
        let thread = thread::Builder::new().name("hoistway-log".into()).stack_size(super::STACK_BYTES);
        if thread.spawn(move || starter.start_in_python()).is_err() {
            // The next event tries again.
            log.lock().starters -= 1;
            log.end();
        }
    }

    fn start_in_python(&self) {
        let started = Python::try_attach(|py| {
            let started = PyModule::import(py, "hoistway._logging")?.call_method0("hand_over_soon");
            started.map(drop).inspect_err(|error| error.clone_ref(py).write_unraisable(py, None))
        });
        let mut state = self.lock();
        state.starters -= 1;
        state.is_running &= matches!(started, Some(Ok(())));
        drop(state);
        self.ended.notify_all();
    }

    fn take(&self) -> Option<(Vec<Record>, u64)> {
        let mut state = self.lock();
        if state.forks > 0 || state.is_stopped || state.queued.is_empty() {
            drop(state);
            self.end();
            return None;
        }
        let piece = state.queued.len().min(PIECE);
        Some((state.queued.drain(..piece).collect(), mem::take(&mut state.dropped)))
    }

    fn end(&self) {
        self.lock().is_running = false;
        self.ended.notify_all();
    }

    fn pause(&self) {
        self.lock().forks += 1;
        drop(self.wait());
    }

    fn resume(log: &Arc<Self>) {
        let mut state = log.lock();
        state.forks = state.forks.saturating_sub(1);
        Self::start(log, state);
    }

    fn stop(&self) {
        if self.process == process::id() {
            let mut state = self.wait();
            state.is_stopped = true;
            state.queued.clear();
        }
    }

    /// Waits for the end of the hand-over, but not for long.
    fn wait(&self) -> MutexGuard<'_, State> {
        let waited = self
            .ended
            .wait_timeout_while(self.lock(), PATIENCE, |state| state.is_running || state.starters > 0);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
