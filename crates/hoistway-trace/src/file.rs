//! The file: an array of events, which viewers take without its end too, should the process be killed.
#![forbid(unsafe_code)]

use crate::fields::Fields;
use serde_json::json;
use std::{
    collections::HashMap,
    io::{self, BufWriter, Write},
    process,
    thread::{Thread, ThreadId},
    time::Instant,
};
use tracing::Level;

/// What lasts from one time to another.
pub(crate) struct Slice<'a> {
    pub(crate) name: &'a str,
    pub(crate) target: &'a str,
    pub(crate) begun: Instant,
    pub(crate) ended: Instant,
    pub(crate) fields: &'a Fields,
}

/// Writes events as they come.
pub(crate) struct Writer<W: Write> {
    output: BufWriter<W>,
    /// The first error. Nothing is written after it.
    failed: Option<io::Error>,
    process: u32,
    origin: Instant,
    is_first: bool,
    /// The row of each thread, with its name.
    threads: HashMap<ThreadId, (u64, String)>,
    /// Rows by what they are beside, and what they hold.
    beside: HashMap<(String, String), Vec<Row>>,
    rows: u64,
}

/// A row beside a thread or a track.
struct Row {
    number: u64,
    /// When its last slice ended.
    free_from: Instant,
}

impl<W: Write> Writer<W> {
    pub(crate) fn new(output: W) -> Self {
        let mut writer = Self {
            output: BufWriter::new(output),
            failed: None,
            process: process::id(),
            origin: Instant::now(),
            is_first: true,
            threads: HashMap::new(),
            beside: HashMap::new(),
            rows: 0,
        };
        let name = format!("hoistway {}", writer.process);
        writer
            .write(json!({"name": "process_name", "ph": "M", "pid": writer.process, "args": {"name": name}}));
        writer
    }

    /// Gives a thread a row, if it has none.
    pub(crate) fn name(&mut self, thread: &Thread) {
        if self.threads.contains_key(&thread.id()) {
            return;
        }
        let name = thread.name().unwrap_or("thread").to_owned();
        let number = self.row(&name);
        // Threads of one name are told apart.
        self.threads.insert(thread.id(), (number, format!("{name} {number}")));
    }

    /// Writes what a thread did; or what happened there, if it has a level.
    pub(crate) fn on_thread(&mut self, thread: ThreadId, level: Option<&Level>, slice: Slice<'_>) {
        let row = self.threads.get(&thread).map_or(0, |(number, _)| *number);
        self.put(row, level, &slice);
    }

    /// Writes what a thread had in flight, or a track.
    pub(crate) fn beside(&mut self, track: Result<&str, ThreadId>, slice: Slice<'_>) {
        let track = match track {
            Ok(track) => track.to_owned(),
            Err(thread) => self.threads.get(&thread).map(|(_, name)| name.clone()).unwrap_or_default(),
        };
        let key = (track, slice.name.to_owned());
        let rows = self.beside.get_mut(&key);
        let free = rows.and_then(|rows| rows.iter_mut().find(|row| row.free_from <= slice.begun));
        let number = match free {
            Some(row) => {
                row.free_from = slice.ended;
                row.number
            }
            None => {
                let number = self.row(&format!("{}: {}", key.0, key.1));
                self.beside.entry(key).or_default().push(Row { number, free_from: slice.ended });
                number
            }
        };
        self.put(number, None, &slice);
    }

    /// A new row of this name.
    fn row(&mut self, name: &str) -> u64 {
        self.rows += 1;
        let (process, number) = (self.process, self.rows);
        self.write(
            json!({"name": "thread_name", "ph": "M", "pid": process, "tid": number, "args": {"name": name}}),
        );
        number
    }

    fn put(&mut self, row: u64, level: Option<&Level>, slice: &Slice<'_>) {
        let since = |time: Instant, origin: Instant| {
            time.saturating_duration_since(origin).as_nanos() as f64 / 1000.0
        };
        let mut event = json!({
            "name": slice.name,
            "cat": slice.target,
            "ts": since(slice.begun, self.origin),
            "pid": self.process,
            "tid": row,
            "args": slice.fields.as_map(),
        });
        match level {
            None => {
                event["ph"] = "X".into();
                event["dur"] = since(slice.ended, slice.begun).into();
            }
            Some(level) => {
                event["ph"] = "i".into();
                event["s"] = "t".into();
                event["args"]["level"] = level.as_str().into();
            }
        }
        self.write(event);
    }

    fn write(&mut self, event: serde_json::Value) {
        if self.failed.is_some() {
            return;
        }
        let before: &[u8] = if std::mem::replace(&mut self.is_first, false) { b"[\n" } else { b",\n" };
        let written = self
            .output
            .write_all(before)
            .and_then(|()| serde_json::to_writer(&mut self.output, &event).map_err(io::Error::from));
        self.failed = written.err();
    }

    /// Completes the file.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        if let Some(error) = self.failed.take() {
            // What is buffered would fail again.
            let _ = self.output.into_parts();
            return Err(error);
        }
        self.output.write_all(b"\n]\n")?;
        self.output.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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

    #[test]
    fn a_full_disk_is_an_error_of_the_end() {
        for room in [0, 1 << 16] {
            let mut writer = Writer::new(Full(room));
            let fields = Fields::default();
            for _ in 0..10_000 {
                let now = Instant::now();
                writer.beside(
                    Ok("cuda:0"),
                    Slice { name: "copy", target: "test", begun: now, ended: now, fields: &fields },
                );
            }
            assert_eq!(writer.finish().unwrap_err().kind(), io::ErrorKind::StorageFull);
        }
    }

    #[test]
    fn slices_of_a_row_do_not_overlap() {
        let mut bytes = Vec::new();
        let mut writer = Writer::new(&mut bytes);
        let (origin, fields) = (writer.origin, Fields::default());
        // In the order in which they end.
        for (begun, ended) in [(0, 10), (5, 12), (10, 15), (0, 20), (13, 30)] {
            let [begun, ended] = [begun, ended].map(|time| origin + Duration::from_micros(time));
            writer.beside(Ok("ring"), Slice { name: "read", target: "test", begun, ended, fields: &fields });
        }
        writer.finish().unwrap();
        let events: Vec<serde_json::Value> = serde_json::from_slice(&bytes).unwrap();
        let slices = events.iter().filter(|event| event["ph"] == "X");
        let rows: Vec<_> = slices.map(|slice| slice["tid"].as_u64().unwrap()).collect();
        assert_eq!(rows, [1, 2, 1, 3, 2]);
    }
}
