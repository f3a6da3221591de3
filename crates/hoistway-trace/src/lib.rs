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
//!     tracing::info_span!(target: "hoistway", "open", file = "model.safetensors").in_scope(|| ());
//!     recording.finish()
//! })?;
//! assert!(std::fs::read_to_string(path)?.contains("model.safetensors"));
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! Only what hoistway's crates do is recorded: others may have secrets in their spans. While nothing is recorded, the layer wants no
//! span, and `tracing` makes none.
#![forbid(unsafe_code)]

mod fields;
mod file;

use fields::Fields;
use file::{BEGINS_WITH, Slice, Writer};
use std::{
    cell::RefCell,
    collections::HashMap,
    fmt,
    fs::File,
    io::{self, Read as _, Seek as _},
    path::Path,
    process,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
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
    filter::{FilterExt as _, filter_fn},
    layer::{Context, Filter},
    registry::LookupSpan,
};

/// No process: nothing is recorded.
const NONE: u32 = 0;

/// The number of the last recording.
static RECORDINGS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The rows that this thread has, one for each recording that it is in.
    static ROWS: RefCell<Vec<OwnRow>> = const { RefCell::new(Vec::new()) };
}

/// Records timelines, one at a time, of what hoistway's crates do that a subscriber with its [layer](Self::layer) sees.
#[derive(Clone, Default)]
pub struct Timeline(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// The process that records. A child of `fork` does not: its parent has the file.
    process: AtomicU32,
    /// The number of what is recorded.
    number: AtomicU64,
    /// Whether its file takes no more.
    is_over: AtomicBool,
    /// Whether a subscriber with the layer was found.
    is_connected: AtomicBool,
    recorded: Mutex<Option<Recorded>>,
}

struct Recorded {
    number: u64,
    writer: Writer<Box<dyn io::Write + Send>>,
    /// Spans that have not ended.
    open: HashMap<u64, OpenSpan>,
}

/// A span that has not ended.
struct OpenSpan {
    metadata: &'static Metadata<'static>,
    fields: Arc<Fields>,
    begun: Instant,
    /// That of the thread that made it.
    row: u64,
    /// The rows of threads that are in it, and since when.
    entered: Vec<(u64, Instant)>,
    was_entered: bool,
}

/// The row of a thread, until it ends.
struct OwnRow {
    shared: Weak<Shared>,
    recording: u64,
    thread: String,
    row: u64,
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

    /// Records to a file until the result is [finished](Recording::finish), or the file has 1 GiB. An earlier timeline there is
    /// replaced. A named pipe that no program reads is waited for, five seconds at most.
    ///
    /// # Errors
    /// [`io::ErrorKind::ResourceBusy`] if something is recorded already, or another process records to the file;
    /// [`io::ErrorKind::AlreadyExists`] if the file is there and no timeline, and not empty; [`io::ErrorKind::NotConnected`] if no
    /// subscriber has the [layer](Self::layer); [`io::ErrorKind::BrokenPipe`] if no program reads the pipe; those of making the file.
    pub fn record(&self, path: &Path) -> io::Result<Recording> {
        self.record_while(path, &|| true)
    }

    /// Does what [`record`](Self::record) does, and waits for a pipe only as long as `go_on` is true.
    ///
    /// # Errors
    /// As [`record`](Self::record).
    pub fn record_while(&self, path: &Path, go_on: &dyn Fn() -> bool) -> io::Result<Recording> {
        self.record_to(|| open(path, go_on))
    }

    fn record_to(
        &self,
        open: impl FnOnce() -> io::Result<Box<dyn io::Write + Send>>,
    ) -> io::Result<Recording> {
        let (shared, own) = (&self.0, process::id());
        // In a child of `fork` the lock may be held by a thread that it lacks, so it is not taken before this.
        if let Err(other) = shared.process.compare_exchange(NONE, own, Ordering::AcqRel, Ordering::Acquire) {
            let why = match other == own {
                true => "a timeline is recorded already",
                false => "the parent process records a timeline",
            };
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, why));
        }
        let begun = self.connect().and_then(|()| open());
        let output = begun.inspect_err(|_| shared.rest())?;
        let number = RECORDINGS.fetch_add(1, Ordering::Relaxed) + 1;
        let writer = Writer::new(output, file::MOST_BYTES);
        // First: threads know by it that their rows are of another recording.
        shared.number.store(number, Ordering::Release);
        *shared.lock() = Some(Recorded { number, writer, open: HashMap::new() });
        Ok(Recording(Some((shared.clone(), number))))
    }

    /// Leaves what is recorded to the parent, in a child of `fork`. To be called before anything else there: the registry of
    /// `tracing_subscriber` has locks, which a thread of the parent may have had. After this the child makes no spans for the
    /// timeline. That is enough in programs whose only subscriber is the one with its layer, and whose other layers want no spans.
    pub fn leave_to_parent(&self) {
        // A thread of the parent may have ended a recording, and not yet have told the callsites.
        let recorder = self.0.process.load(Ordering::Acquire);
        let was_used = recorder != NONE || self.0.number.load(Ordering::Acquire) != 0;
        if was_used && recorder != process::id() {
            tracing::callsite::rebuild_interest_cache();
        }
    }

    /// Has subscribers send what they see.
    fn connect(&self) -> io::Result<()> {
        self.0.is_over.store(false, Ordering::Release);
        self.0.is_connected.store(false, Ordering::Release);
        // Asks each subscriber for its level, and so the layer.
        tracing::callsite::rebuild_interest_cache();
        if self.0.is_connected.load(Ordering::Acquire) {
            return Ok(());
        }
        let why = "no subscriber of tracing has the timeline's layer, so nothing would be recorded";
        Err(io::Error::new(io::ErrorKind::NotConnected, why))
    }
}

/// Opens a file to be written, and empties it if it is a timeline.
fn open(path: &Path, go_on: &dyn Fn() -> bool) -> io::Result<Box<dyn io::Write + Send>> {
    // A pipe cannot be read.
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        return Ok(Box::new(open_special(path, go_on)?));
    }
    let file = LockedFile::open(path)?;
    let mut begins_with = Vec::new();
    (&file.file).take(BEGINS_WITH.len() as u64).read_to_end(&mut begins_with)?;
    if !begins_with.is_empty() && begins_with != BEGINS_WITH.as_bytes() {
        let why = "it is there already, and is not a timeline; choose another name";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
    }
    file.file.set_len(0)?;
    (&file.file).rewind()?;
    Ok(Box::new(file))
}

/// Opens what is no regular file, such as a pipe. One that no program reads is asked for again, as the program may be starting: to
/// wait in the system would never end, and would not ask `go_on`.
#[cfg(target_os = "linux")]
fn open_special(path: &Path, go_on: &dyn Fn() -> bool) -> io::Result<File> {
    use rustix::{
        fs::{Mode, OFlags, fcntl_setfl, open},
        io::{Errno, retry_on_intr},
    };
    use std::{os::unix::fs::FileTypeExt as _, thread, time::Duration};
    /// A program that reads is given so long to start.
    const READER_LIMIT: Duration = Duration::from_secs(5);
    const READER_TICK: Duration = Duration::from_millis(20);
    let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let end = Instant::now() + READER_LIMIT;
    let file = loop {
        match retry_on_intr(|| open(path, flags, Mode::empty())) {
            // Sockets say so too.
            Err(Errno::NXIO) if path.metadata().is_ok_and(|found| found.file_type().is_fifo()) => {
                if !go_on() || Instant::now() >= end {
                    let why = "it is a pipe, and no program reads what is written to it";
                    return Err(io::Error::new(io::ErrorKind::BrokenPipe, why));
                }
                thread::sleep(READER_TICK);
            }
            opened => break opened?,
        }
    };
    // Writes wait as usual.
    fcntl_setfl(&file, OFlags::empty())?;
    Ok(file.into())
}

#[cfg(not(target_os = "linux"))]
fn open_special(path: &Path, _: &dyn Fn() -> bool) -> io::Result<File> {
    File::options().write(true).open(path)
}

/// A file that no other recording has, on file systems that have locks. It can be read meanwhile.
struct LockedFile {
    file: File,
    #[cfg(not(windows))]
    process: u32,
}

impl LockedFile {
    #[cfg(not(windows))]
    fn open(path: &Path) -> io::Result<Self> {
        use std::fs::TryLockError;
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        loop {
            match file.try_lock() {
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => (),
                Err(TryLockError::WouldBlock) => return Err(in_use()),
                // Some file systems have none.
                Ok(()) | Err(TryLockError::Error(_)) => break,
            }
        }
        Ok(Self { file, process: process::id() })
    }

    /// A lock would keep programs from reading it.
    #[cfg(windows)]
    fn open(path: &Path) -> io::Result<Self> {
        use std::os::windows::fs::OpenOptionsExt as _;
        const FILE_SHARE_READ: u32 = 1;
        const ERROR_SHARING_VIOLATION: i32 = 32;
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).share_mode(FILE_SHARE_READ);
        match options.open(path) {
            Err(error) if error.raw_os_error() == Some(ERROR_SHARING_VIOLATION) => Err(in_use()),
            file => Ok(Self { file: file? }),
        }
    }
}

fn in_use() -> io::Error {
    let why = "another recording writes to it, or a child of a killed one has it open; choose another name, such as one with the \
               rank of the process";
    io::Error::new(io::ErrorKind::ResourceBusy, why)
}

impl io::Write for LockedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(not(windows))]
impl Drop for LockedFile {
    fn drop(&mut self) {
        // A child of `fork` has the same lock: closing the file does not end it, and the child must not end its parent's.
        if self.process == process::id() {
            let _ = self.file.unlock();
        }
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline").field("is_recording", &self.0.is_recording()).finish()
    }
}

/// A timeline that is recorded. Dropping it finishes it, too.
#[must_use = "dropping it ends the recording"]
pub struct Recording(Option<(Arc<Shared>, u64)>);

impl Recording {
    /// Ends the recording, and completes the file. Spans that have not ended are written as far as they got, with `unfinished`.
    /// Does nothing in a child of `fork`.
    ///
    /// # Errors
    /// The first error of writing the file, or [`io::ErrorKind::FileTooLarge`] if it has reached 1 GiB: what followed is not
    /// there.
    pub fn finish(mut self) -> io::Result<()> {
        self.end()
    }

    fn end(&mut self) -> io::Result<()> {
        self.0.take().map_or(Ok(()), |(shared, number)| shared.finish(number))
    }
}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recording").field("number", &self.0.as_ref().map(|(_, number)| number)).finish()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // An error here has no caller to report to.
        let _ = self.end();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Option<Recorded>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_recording(&self) -> bool {
        self.is_recorder() && !self.is_over.load(Ordering::Acquire)
    }

    fn is_recorder(&self) -> bool {
        let recorder = self.process.load(Ordering::Acquire);
        recorder != NONE && recorder == process::id()
    }

    /// Records nothing any more.
    fn rest(&self) {
        self.process.store(NONE, Ordering::Release);
        tracing::callsite::rebuild_interest_cache();
    }

    fn finish(&self, number: u64) -> io::Result<()> {
        if !self.is_recorder() {
            return Ok(());
        }
        let ended = self.lock().take_if(|recorded| recorded.number == number);
        let Some(Recorded { mut writer, open, .. }) = ended else { return Ok(()) };
        // From here on another recording may begin.
        self.rest();
        let now = Instant::now();
        for mut span in open.into_values() {
            Arc::make_mut(&mut span.fields).add("unfinished", true.into());
            for (row, since) in std::mem::take(&mut span.entered) {
                writer.on_thread(row, &span.slice(since, now));
            }
            if !span.was_entered {
                writer.beside(span.fields.track().ok_or(span.row), &span.slice(span.begun, now));
            }
        }
        writer.finish()
    }

    /// Calls `act` with what is recorded, if it is.
    fn with<T>(&self, act: impl FnOnce(&mut Recorded) -> T) -> Option<T> {
        if !self.is_recording() {
            return None;
        }
        let mut recorded = self.lock();
        let recorded = recorded.as_mut()?;
        let result = act(recorded);
        if recorded.writer.is_over() {
            self.is_over.store(true, Ordering::Release);
        }
        Some(result)
    }

    /// Like `with`, if that recording is still recorded.
    fn with_same(&self, number: u64, act: impl FnOnce(&mut Recorded)) {
        self.with(|recorded| {
            if recorded.number == number {
                act(recorded);
            }
        });
    }

    /// The number of what is recorded, and the row of this thread there. `None` if nothing is, or the thread is about to end.
    fn row(self: &Arc<Self>) -> Option<(u64, u64)> {
        let current = self.number.load(Ordering::Acquire);
        let known = |rows: &RefCell<Vec<OwnRow>>| {
            rows.borrow().iter().find(|row| row.recording == current).map(|row| (current, row.row))
        };
        if let Some(row) = ROWS.try_with(known).ok()? {
            return Some(row);
        }
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("thread").to_owned();
        let (recording, row) = self.with(|recorded| (recorded.number, recorded.writer.enlist(&thread)))?;
        let own = OwnRow { shared: Arc::downgrade(self), recording, thread, row };
        let keep = |rows: &RefCell<Vec<OwnRow>>| {
            let mut rows = rows.borrow_mut();
            rows.retain(OwnRow::is_current);
            rows.push(own);
        };
        ROWS.try_with(keep).ok()?;
        Some((recording, row))
    }
}

impl OwnRow {
    fn is_current(&self) -> bool {
        let shared = self.shared.upgrade();
        shared.is_some_and(|shared| shared.number.load(Ordering::Acquire) == self.recording)
    }
}

impl Drop for OwnRow {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let thread = std::mem::take(&mut self.thread);
        shared.with_same(self.recording, |recorded| recorded.writer.leave(thread, self.row));
    }
}

impl OpenSpan {
    fn slice(&self, begun: Instant, ended: Instant) -> Slice {
        Slice::new(self.metadata, (begun, ended), &self.fields, None)
    }
}

/// Writes what is recorded. What it writes is made before the lock is taken.
struct Recorder(Arc<Shared>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Recorder {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, _: Context<'_, S>) {
        let begun = Instant::now();
        let Some((number, row)) = self.0.row() else { return };
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let span = OpenSpan {
            metadata: attributes.metadata(),
            fields: fields.into(),
            begun,
            row,
            entered: Vec::new(),
            was_entered: false,
        };
        self.0.with_same(number, |recorded| {
            recorded.open.insert(id.into_u64(), span);
        });
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        values.record(&mut fields);
        self.0.with(|recorded| {
            if let Some(span) = recorded.open.get_mut(&id.into_u64()) {
                Arc::make_mut(&mut span.fields).extend(fields);
            }
        });
    }

    fn on_enter(&self, id: &Id, _: Context<'_, S>) {
        let now = Instant::now();
        let Some((number, row)) = self.0.row() else { return };
        self.0.with_same(number, |recorded| {
            if let Some(span) = recorded.open.get_mut(&id.into_u64()) {
                span.was_entered = true;
                span.entered.push((row, now));
            }
        });
    }

    fn on_exit(&self, id: &Id, _: Context<'_, S>) {
        let now = Instant::now();
        let Some((number, row)) = self.0.row() else { return };
        let position = |span: &OpenSpan| span.entered.iter().rposition(|(entered, _)| *entered == row);
        let left = self.0.with(|recorded| {
            let span = recorded.open.get(&id.into_u64())?;
            Some((span.metadata, span.fields.clone(), span.entered[position(span)?].1))
        });
        let Some((metadata, fields, since)) = left.flatten() else { return };
        let slice = Slice::new(metadata, (since, now), &fields, None);
        // It stays open until it is written: what ends the recording before that writes it, too.
        self.0.with_same(number, |recorded| {
            let Some(span) = recorded.open.get_mut(&id.into_u64()) else { return };
            if let Some(position) = position(span) {
                span.entered.remove(position);
                recorded.writer.on_thread(row, &slice);
            }
        });
    }

    fn on_close(&self, id: Id, _: Context<'_, S>) {
        let now = Instant::now();
        let closed = self.0.with(|recorded| {
            let span = recorded.open.get(&id.into_u64())?;
            Some((
                recorded.number,
                span.was_entered,
                span.metadata,
                span.fields.clone(),
                span.begun,
                span.row,
            ))
        });
        let Some((number, was_entered, metadata, fields, begun, row)) = closed.flatten() else { return };
        let slice = (!was_entered).then(|| Slice::new(metadata, (begun, now), &fields, None));
        let track = fields.track().ok_or(row);
        // As in `on_exit`.
        self.0.with_same(number, |recorded| {
            let is_open = recorded.open.remove(&id.into_u64()).is_some();
            if let Some(slice) = slice.filter(|_| is_open) {
                recorded.writer.beside(track, &slice);
            }
        });
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let now = Instant::now();
        let Some((number, row)) = self.0.row() else { return };
        let mut fields = Fields::default();
        event.record(&mut fields);
        let message = fields.take_message();
        let metadata = event.metadata();
        let name = message.as_deref().unwrap_or(metadata.name());
        let slice = Slice::new(metadata, (now, now), &fields, Some((name, metadata.level())));
        self.0.with_same(number, |recorded| recorded.writer.on_thread(row, &slice));
    }
}

/// Returns a filter that lets through the events that `filter` does, and no span: for layers beside a timeline's that make
/// nothing of spans, so that a child of `fork` need not make any.
#[doc(hidden)]
pub fn events_alone<S>(filter: impl Filter<S> + 'static) -> impl Filter<S>
where
    S: 'static,
{
    // Without its level, what no one wants would cost as much as what is logged.
    filter
        .and(filter_fn(|metadata: &Metadata<'_>| !metadata.is_span()).with_max_level_hint(LevelFilter::TRACE))
}

/// Wants all spans of hoistway's crates while something is recorded, and none otherwise.
struct WhileRecording(Arc<Shared>);

fn is_own(metadata: &Metadata<'_>) -> bool {
    let rest = metadata.target().strip_prefix("hoistway");
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::") || rest.starts_with('_'))
}

impl<S> Filter<S> for WhileRecording {
    fn enabled(&self, metadata: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        self.0.is_recording() && is_own(metadata)
    }

    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        // A child of `fork` that does not ask anew is told each time that nothing is recorded.
        if self.0.is_recorder() && is_own(metadata) { Interest::sometimes() } else { Interest::never() }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        self.0.is_connected.store(true, Ordering::Release);
        Some(if self.0.is_recorder() { LevelFilter::TRACE } else { LevelFilter::OFF })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use tracing_subscriber::{Registry, layer::SubscriberExt as _};

    /// Says that it is flushed for the last time, and waits until it may be.
    struct Blocking(Sender<()>, Receiver<()>, bool);

    impl io::Write for Blocking {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.2 |= bytes == b"\n]\n";
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            if self.2 {
                self.0.send(()).map_err(io::Error::other)?;
                self.1.recv().map_err(io::Error::other)?;
            }
            Ok(())
        }
    }

    /// Spans that no layer wants have a place in the registry all the same, unless their callsites are switched off.
    #[test]
    fn a_child_of_fork_makes_no_spans() {
        let timeline = Timeline::new();
        let subscriber = tracing_subscriber::registry().with(timeline.layer());
        tracing::subscriber::with_default(subscriber, || {
            let span = || tracing::debug_span!(target: "hoistway", "load");
            let recording = timeline.record_to(|| Ok(Box::new(io::sink()))).unwrap();
            assert!(!span().is_disabled());
            // As a child of the process that records has it.
            timeline.0.process.store(process::id() + 1, Ordering::Release);
            timeline.leave_to_parent();
            assert!(span().is_disabled());
            timeline.0.process.store(process::id(), Ordering::Release);
            recording.finish().unwrap();

            let recording = timeline.record_to(|| Ok(Box::new(io::sink()))).unwrap();
            assert!(!span().is_disabled());
            // As a child has it whose parent ends the recording at that moment.
            timeline.0.process.store(NONE, Ordering::Release);
            timeline.leave_to_parent();
            assert!(span().is_disabled());
            drop(recording);
        });
    }

    #[test]
    fn a_layer_of_events_alone_has_no_spans_made() {
        let timeline = Timeline::new();
        let filter = events_alone::<Registry>(LevelFilter::DEBUG);
        assert_eq!(filter.max_level_hint(), Some(LevelFilter::DEBUG));
        let events = tracing_subscriber::fmt::layer().with_writer(io::sink).with_filter(filter);
        let subscriber = tracing_subscriber::registry().with(events).with(timeline.layer());
        tracing::subscriber::with_default(subscriber, || {
            assert!(tracing::debug_span!(target: "hoistway", "load").is_disabled());
            assert!(tracing::enabled!(target: "hoistway", tracing::Level::DEBUG));
            assert!(!tracing::enabled!(target: "hoistway", tracing::Level::TRACE));
            let recording = timeline.record_to(|| Ok(Box::new(io::sink()))).unwrap();
            assert!(!tracing::debug_span!(target: "hoistway", "load").is_disabled());
            recording.finish().unwrap();
        });
    }

    #[test]
    fn a_recording_that_ends_leaves_the_next_one_alone() {
        let timeline = Timeline::new();
        let subscriber = tracing_subscriber::registry().with(timeline.layer());
        tracing::subscriber::with_default(subscriber, || {
            let ((says, said), (lets, let_go)) = (channel(), channel());
            let first = timeline.record_to(|| Ok(Box::new(Blocking(says, let_go, false)))).unwrap();
            let ending = std::thread::spawn(move || first.finish());
            said.recv().unwrap();
            let second = timeline.record_to(|| Ok(Box::new(io::sink()))).unwrap();
            lets.send(()).unwrap();
            ending.join().unwrap().unwrap();
            assert!(timeline.0.is_recording() && timeline.0.lock().is_some());
            second.finish().unwrap();
            assert!(!timeline.0.is_recording());
        });
    }
}
