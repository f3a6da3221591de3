//! Writes spans of `tracing` to a file as a timeline, in the JSON of Chrome's trace viewer, which <https://ui.perfetto.dev> opens.
//!
//! A span that is entered is a slice of the thread that entered it. A span that never is, such as a read in flight beside others, is
//! a slice of a row beside the thread that made it, or beside the track that its field `track` names. A row has one slice at a time.
//! An event is an instant of its thread.
//!
//! ```
//! use hoistway_trace::Timeline;
//! use tracing_subscriber::layer::SubscriberExt as _;
//!
//! # let directory = tempfile::tempdir().unwrap();
//! # let path = directory.path().join("timeline.json");
//! let timeline = Timeline::new();
//! let subscriber = tracing_subscriber::registry().with(timeline.layer());
//! tracing::subscriber::with_default(subscriber, || {
//!     let recording = timeline.record(&path)?;
//!     tracing::info_span!("open", file = "model.safetensors").in_scope(|| ());
//!     recording.finish()
//! })?;
//! assert!(std::fs::read_to_string(path)?.contains("model.safetensors"));
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! While nothing is recorded, the layer wants no span, and `tracing` makes none.
#![forbid(unsafe_code)]

mod fields;
mod file;

use fields::Fields;
use file::Writer;
use std::{
    collections::HashMap,
    fmt,
    fs::File,
    io,
    path::Path,
    process,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread::ThreadId,
    time::Instant,
};
use tracing::{
    Event, Metadata, Subscriber,
    level_filters::LevelFilter,
    span::{Attributes, Id, Record},
    subscriber::Interest,
};
use tracing_subscriber::{
    Layer,
    layer::{Context, Filter},
    registry::LookupSpan,
};

/// No process: nothing is recorded.
const NONE: u32 = 0;

/// Records timelines, one at a time, of what a subscriber with its [layer](Self::layer) sees.
#[derive(Clone, Default)]
pub struct Timeline(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// The process that records. A child of `fork` does not: its parent has the file.
    process: AtomicU32,
    recorded: Mutex<Option<Recorded>>,
}

struct Recorded {
    writer: Writer<File>,
    /// Spans that have not ended.
    open: HashMap<u64, OpenSpan>,
}

/// A span that has not ended.
struct OpenSpan {
    name: &'static str,
    target: &'static str,
    fields: Fields,
    begun: Instant,
    thread: ThreadId,
    /// The threads that are in it, and since when.
    entered: Vec<(ThreadId, Instant)>,
    was_entered: bool,
}

impl Timeline {
    /// Returns a timeline that records nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the layer of a subscriber that sees what is to be recorded.
    pub fn layer<S>(&self) -> impl Layer<S> + Send + Sync + use<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        Recorder(self.0.clone()).with_filter(WhileRecording(self.0.clone()))
    }

    /// Records to a file, which is replaced, until the result is [finished](Recording::finish).
    ///
    /// # Errors
    /// [`io::ErrorKind::ResourceBusy`] if something is recorded already; those of making the file.
    pub fn record(&self, path: &Path) -> io::Result<Recording> {
        // In a child of `fork` the lock may be held by a thread that it lacks.
        if ![NONE, process::id()].contains(&self.0.process.load(Ordering::Acquire)) {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "the parent process records a timeline"));
        }
        let mut recorded = self.0.lock();
        if recorded.is_some() {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "a timeline is recorded already"));
        }
        *recorded = Some(Recorded { writer: Writer::new(File::create(path)?), open: HashMap::new() });
        drop(recorded);
        self.0.process.store(process::id(), Ordering::Release);
        tracing::callsite::rebuild_interest_cache();
        Ok(Recording(self.0.clone()))
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline").field("is_recording", &self.0.is_recording()).finish()
    }
}

/// A timeline that is recorded. Dropping it finishes it, too.
#[must_use = "what is dropped is not recorded on"]
pub struct Recording(Arc<Shared>);

impl Recording {
    /// Ends the recording, and completes the file. Spans that have not ended are written as far as they got, with `unfinished`.
    /// Does nothing in a child of `fork`.
    ///
    /// # Errors
    /// The first error of writing the file: what followed it is not there.
    pub fn finish(self) -> io::Result<()> {
        self.0.finish()
    }
}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recording").field("is_recording", &self.0.is_recording()).finish()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // What no one asks for, no one learns.
        let _ = self.0.finish();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Option<Recorded>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_recording(&self) -> bool {
        let recorder = self.process.load(Ordering::Acquire);
        recorder != NONE && recorder == process::id()
    }

    fn finish(&self) -> io::Result<()> {
        if !self.is_recording() {
            return Ok(());
        }
        self.process.store(NONE, Ordering::Release);
        let recorded = self.lock().take();
        tracing::callsite::rebuild_interest_cache();
        let Some(Recorded { mut writer, mut open }) = recorded else { return Ok(()) };
        let now = Instant::now();
        for span in open.values_mut() {
            span.fields.add("unfinished", true.into());
            for (thread, since) in std::mem::take(&mut span.entered) {
                writer.on_thread(thread, None, span.slice(since, now));
            }
            span.end(&mut writer, now);
        }
        writer.finish()
    }

    /// Calls `act` with what is recorded, if it is.
    fn with(&self, act: impl FnOnce(&mut Recorded)) {
        if self.is_recording()
            && let Some(recorded) = &mut *self.lock()
        {
            act(recorded);
        }
    }
}

impl OpenSpan {
    fn slice(&self, begun: Instant, ended: Instant) -> file::Slice<'_> {
        file::Slice { name: self.name, target: self.target, begun, ended, fields: &self.fields }
    }

    /// Writes a span that was never entered.
    fn end(&self, writer: &mut Writer<File>, now: Instant) {
        if !self.was_entered {
            writer.beside(self.fields.track().ok_or(self.thread), self.slice(self.begun, now));
        }
    }
}

/// Writes what is recorded.
struct Recorder(Arc<Shared>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Recorder {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, _: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let thread = std::thread::current();
        let metadata = attributes.metadata();
        self.0.with(|recorded| {
            recorded.writer.name(&thread);
            let span = OpenSpan {
                name: metadata.name(),
                target: metadata.target(),
                fields,
                begun: Instant::now(),
                thread: thread.id(),
                entered: Vec::new(),
                was_entered: false,
            };
            recorded.open.insert(id.into_u64(), span);
        });
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        self.0.with(|recorded| {
            if let Some(span) = recorded.open.get_mut(&id.into_u64()) {
                values.record(&mut span.fields);
            }
        });
    }

    fn on_enter(&self, id: &Id, _: Context<'_, S>) {
        let thread = std::thread::current();
        self.0.with(|recorded| {
            recorded.writer.name(&thread);
            if let Some(span) = recorded.open.get_mut(&id.into_u64()) {
                span.was_entered = true;
                span.entered.push((thread.id(), Instant::now()));
            }
        });
    }

    fn on_exit(&self, id: &Id, _: Context<'_, S>) {
        let now = Instant::now();
        let thread = std::thread::current().id();
        self.0.with(|Recorded { writer, open }| {
            let Some(span) = open.get_mut(&id.into_u64()) else { return };
            let Some(position) = span.entered.iter().rposition(|(entered, _)| *entered == thread) else {
                return;
            };
            let (_, since) = span.entered.remove(position);
            writer.on_thread(thread, None, span.slice(since, now));
        });
    }

    fn on_close(&self, id: Id, _: Context<'_, S>) {
        let now = Instant::now();
        self.0.with(|Recorded { writer, open }| {
            if let Some(span) = open.remove(&id.into_u64()) {
                span.end(writer, now);
            }
        });
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let now = Instant::now();
        let mut fields = Fields::default();
        event.record(&mut fields);
        let message = fields.take_message();
        let thread = std::thread::current();
        let metadata = event.metadata();
        self.0.with(|recorded| {
            recorded.writer.name(&thread);
            let name = message.as_deref().unwrap_or(metadata.name());
            let slice =
                file::Slice { name, target: metadata.target(), begun: now, ended: now, fields: &fields };
            recorded.writer.on_thread(thread.id(), Some(metadata.level()), slice);
        });
    }
}

/// Wants all spans while something is recorded, and none otherwise.
struct WhileRecording(Arc<Shared>);

impl<S> Filter<S> for WhileRecording {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        self.0.is_recording()
    }

    fn callsite_enabled(&self, _: &'static Metadata<'static>) -> Interest {
        // Whether a child of `fork` records is asked each time.
        match self.0.process.load(Ordering::Acquire) {
            NONE => Interest::never(),
            _ => Interest::sometimes(),
        }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        match self.0.process.load(Ordering::Acquire) {
            NONE => Some(LevelFilter::OFF),
            _ => Some(LevelFilter::TRACE),
        }
    }
}
