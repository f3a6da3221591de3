//! The file: an array of events, which viewers take without its end too, should the process be killed.
#![forbid(unsafe_code)]

use crate::fields::Fields;
use serde_json::Value;
use std::{
    collections::HashMap,
    io::{self, Write},
    process,
    time::{Duration, Instant},
};
use tracing::{Level, Metadata};

/// Bytes that wait to be written, at most, but for one event.
const BUFFER_BYTES: usize = 1 << 20;
/// How long they wait while events come.
const FLUSH_AFTER: Duration = Duration::from_millis(500);
/// Bytes of a file, at most.
pub(crate) const MOST_BYTES: u64 = 1 << 30;

/// A span of time on a row, or an instant.
pub(crate) struct Slice {
    name: String,
    begun: Instant,
    ended: Instant,
    /// What the file has of it but for its time and row.
    json: Vec<u8>,
}

/// What each file begins with: a file that does not is no timeline of this library. An event that names the process.
pub(crate) const BEGINS_WITH: &str =
    "[\n{\"name\":\"process_name\",\"ph\":\"M\",\"args\":{\"name\":\"hoistway ";

impl Slice {
    /// `name` is that of the metadata unless one is given; an instant has a level.
    pub(crate) fn new(
        metadata: &Metadata<'_>,
        (begun, ended): (Instant, Instant),
        fields: &Fields,
        instant: Option<(&str, &Level)>,
    ) -> Self {
        let name = instant.map_or(metadata.name(), |(name, _)| name).to_owned();
        let mut event = serde_json::Map::new();
        event.insert("name".into(), name.as_str().into());
        event.insert("cat".into(), metadata.target().into());
        event.insert("pid".into(), process::id().into());
        let mut args = fields.as_map().clone();
        match instant {
            None => {
                event.insert("ph".into(), "X".into());
                event.insert("dur".into(), microseconds(begun, ended).into());
            }
            Some((_, level)) => {
                event.insert("ph".into(), "i".into());
                event.insert("s".into(), "t".into());
                args.insert("level".into(), level.as_str().into());
            }
        }
        event.insert("args".into(), args.into());
        Self { name, begun, ended, json: Value::Object(event).to_string().into_bytes() }
    }
}

fn microseconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_nanos() as f64 / 1000.0
}

/// Writes events as they come.
pub(crate) struct Writer<W: Write> {
    output: W,
    /// Whole events that are not written yet.
    buffer: Vec<u8>,
    flushed: Instant,
    written: u64,
    most_bytes: u64,
    /// The first error. Nothing is written after it.
    failed: Option<io::Error>,
    origin: Instant,
    /// The names of all rows. Their numbers begin with 1.
    rows: Vec<String>,
    /// Rows of threads that have ended, by their name.
    left: HashMap<String, Vec<u64>>,
    /// Rows by what they are beside, and what they hold.
    beside: HashMap<(String, String), Vec<Row>>,
}

/// A row beside a thread or a track.
struct Row {
    number: u64,
    /// When its last slice ended.
    free_from: Instant,
}

impl<W: Write> Writer<W> {
    pub(crate) fn new(output: W, most_bytes: u64) -> Self {
        let now = Instant::now();
        let mut writer = Self {
            output,
            buffer: Vec::new(),
            flushed: now,
            written: 0,
            most_bytes,
            failed: None,
            origin: now,
            rows: Vec::new(),
            left: HashMap::new(),
            beside: HashMap::new(),
        };
        let process = process::id();
        writer.buffer.extend_from_slice(format!("{BEGINS_WITH}{process}\"}},\"pid\":{process}}}").as_bytes());
        // So that others see at once whose file it is.
        writer.flush();
        writer
    }

    /// Whether it takes no more events.
    pub(crate) fn is_over(&self) -> bool {
        self.failed.is_some()
    }

    /// A row for a thread of this name: that of one that has ended, if there is one.
    pub(crate) fn enlist(&mut self, thread: &str) -> u64 {
        if let Some(row) = self.left.get_mut(thread).and_then(Vec::pop) {
            return row;
        }
        // Threads of one name are told apart.
        self.add_row(thread.to_owned(), |number| format!("{thread} {number}"))
    }

    /// A thread of this name has ended.
    pub(crate) fn leave(&mut self, thread: String, row: u64) {
        self.left.entry(thread).or_default().push(row);
    }

    /// Writes what a thread did, or what happened there.
    pub(crate) fn on_thread(&mut self, row: u64, slice: &Slice) {
        self.put(row, slice);
    }

    /// Writes what the thread of a row had in flight, or a track.
    pub(crate) fn beside(&mut self, track: Result<&str, u64>, slice: &Slice) {
        let track = match track {
            Ok(track) => track,
            Err(row) => {
                let position = usize::try_from(row).ok().and_then(|row| row.checked_sub(1));
                position.and_then(|position| self.rows.get(position)).map_or("", String::as_str)
            }
        };
        let key = (track.to_owned(), slice.name.clone());
        let rows = self.beside.get_mut(&key);
        let free = rows.and_then(|rows| rows.iter_mut().find(|row| row.free_from <= slice.begun));
        let number = match free {
            Some(row) => {
                row.free_from = slice.ended;
                row.number
            }
            None => {
                let name = format!("{}: {}", key.0, key.1);
                let number = self.add_row(name.clone(), |_| name);
                self.beside.entry(key).or_default().push(Row { number, free_from: slice.ended });
                number
            }
        };
        self.put(number, slice);
    }

    /// A new row, which the file calls `shown`. What is beside it is named after `named`.
    fn add_row(&mut self, shown: String, named: impl FnOnce(u64) -> String) -> u64 {
        let number = self.rows.len() as u64 + 1;
        let row = serde_json::json!({
            "name": "thread_name", "ph": "M", "pid": process::id(), "tid": number, "args": {"name": shown},
        });
        self.rows.push(named(number));
        self.append(row.to_string().as_bytes());
        number
    }

    fn put(&mut self, row: u64, slice: &Slice) {
        let [inner @ .., b'}'] = &*slice.json else { return };
        let end = format!(",\"ts\":{:.3},\"tid\":{row}}}", microseconds(self.origin, slice.begun));
        let mut event = Vec::with_capacity(inner.len() + end.len());
        event.extend_from_slice(inner);
        event.extend_from_slice(end.as_bytes());
        self.append(&event);
        if self.buffer.len() >= BUFFER_BYTES || self.flushed.elapsed() >= FLUSH_AFTER {
            self.flush();
        }
    }

    fn append(&mut self, event: &[u8]) {
        if self.failed.is_some() {
            return;
        }
        self.buffer.extend_from_slice(b",\n");
        self.buffer.extend_from_slice(event);
        if self.written + self.buffer.len() as u64 > self.most_bytes {
            self.flush();
            let error = self.complete().err();
            let limit = format!("limit reached: a timeline has {} bytes at most", self.most_bytes);
            self.failed = Some(error.unwrap_or_else(|| io::Error::new(io::ErrorKind::FileTooLarge, limit)));
        }
    }

    fn flush(&mut self) {
        if self.failed.is_some() {
            return;
        }
        self.failed = self.output.write_all(&self.buffer).and_then(|()| self.output.flush()).err();
        self.written += self.buffer.len() as u64;
        self.buffer.clear();
        self.flushed = Instant::now();
    }

    /// Ends the array, of which all was written.
    fn complete(&mut self) -> io::Result<()> {
        match self.failed.take() {
            None => self.output.write_all(b"\n]\n").and_then(|()| self.output.flush()),
            Some(error) => Err(error),
        }
    }

    /// Completes the file.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.flush();
        self.complete()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tracing::Callsite as _;

    /// A disk that is full after so many bytes.
    struct Full(usize);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if bytes.len() > self.0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.0 -= bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn slice(begun: Instant, ended: Instant) -> Slice {
        let callsite = tracing::callsite! {
            name: "read", kind: tracing::metadata::Kind::SPAN, fields: offset
        };
        Slice::new(callsite.metadata(), (begun, ended), &Fields::default(), None)
    }

    #[test]
    fn a_full_disk_is_an_error_of_the_end() {
        let now = Instant::now();
        for room in [0, 1 << 16] {
            let mut writer = Writer::new(Full(room), MOST_BYTES);
            for _ in 0..10_000 {
                writer.beside(Ok("cuda:0"), &slice(now, now));
            }
            assert_eq!(writer.finish().unwrap_err().kind(), io::ErrorKind::StorageFull);
        }
    }

    #[test]
    fn slices_of_a_row_do_not_overlap() {
        let mut bytes = Vec::new();
        let mut writer = Writer::new(&mut bytes, MOST_BYTES);
        let origin = writer.origin;
        // In the order in which they end.
        for (begun, ended) in [(0, 10), (5, 12), (10, 15), (0, 20), (13, 30)] {
            let [begun, ended] = [begun, ended].map(|time| origin + Duration::from_micros(time));
            writer.beside(Ok("ring"), &slice(begun, ended));
        }
        writer.finish().unwrap();
        let events: Vec<Value> = serde_json::from_slice(&bytes).unwrap();
        let slices = events.iter().filter(|event| event["ph"] == "X");
        let rows: Vec<_> = slices.map(|slice| slice["tid"].as_u64().unwrap()).collect();
        assert_eq!(rows, [1, 2, 1, 3, 2]);
    }

    #[test]
    fn what_was_written_when_the_process_is_killed_is_whole_events() {
        let mut bytes = Vec::new();
        let now = Instant::now();
        let count = 3 * BUFFER_BYTES / slice(now, now).json.len();
        for events in [0, count] {
            bytes.clear();
            let mut writer = Writer::new(&mut bytes, MOST_BYTES);
            (0..events).for_each(|_| writer.on_thread(1, &slice(now, now)));
            drop(writer);
            let is_large = bytes.len() > BUFFER_BYTES;
            bytes.push(b']');
            let found: Vec<Value> = serde_json::from_slice(&bytes).unwrap();
            assert_eq!((found[0]["name"].as_str(), is_large), (Some("process_name"), events > 0));
        }
    }

    #[test]
    fn a_file_has_a_limit_and_an_end() {
        let mut bytes = Vec::new();
        let mut writer = Writer::new(&mut bytes, 10_000);
        let now = Instant::now();
        (0..1000).for_each(|_| writer.on_thread(1, &slice(now, now)));
        assert!(writer.is_over());
        let error = writer.finish().unwrap_err();
        assert_eq!((error.kind(), bytes.len() < 20_000), (io::ErrorKind::FileTooLarge, true));
        assert!(serde_json::from_slice::<Vec<Value>>(&bytes).unwrap().len() > 10);
    }

    #[test]
    fn a_thread_has_the_row_of_one_that_has_ended() {
        let mut writer = Writer::new(Vec::new(), MOST_BYTES);
        let (first, second) = (writer.enlist("a"), writer.enlist("a"));
        writer.leave("a".into(), first);
        assert_eq!([writer.enlist("b"), writer.enlist("a"), writer.enlist("a")], [3, first, 4]);
        assert_ne!(first, second);
    }
}
