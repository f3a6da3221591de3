//! A process that reads: what the command tells it, and what it answers, a line of JSON each.

use crate::failure::{Failure, Told};
use hoistway::{
    ByteRange, Carrier, DeviceId, DirectIo, Route, UsrbioClient,
    read::{Batch, Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    collections::{BTreeSet, VecDeque},
    ffi::OsString,
    io::{self, BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Instant,
};

/// The task of one process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Job {
    pub(super) route: Route,
    pub(super) direct: DirectIo,
    pub(super) usrbio: UsrbioClient,
    pub(super) buffer_bytes: u64,
    pub(super) chunk_bytes: u64,
    pub(super) device: DeviceId,
    /// Whether the bytes are brought to memory, rather than forgotten.
    pub(super) is_kept: bool,
    pub(super) parts: Vec<Part>,
}

/// Part of a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) path: PathBuf,
    pub(super) start: u64,
    pub(super) end: u64,
}

/// The reads of one process in one iteration.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Reading {
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    pub(super) carriers: Vec<Carrier>,
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Ready,
    Read(Reading),
    Failed(Told),
}

/// A process that reads, as the command sees it. Ends when dropped.
pub(super) struct Worker {
    child: Child,
    // Closed before the child is waited for, which ends it.
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    files: usize,
}

impl Worker {
    /// Starts `program`, which is this command, as a worker.
    pub(super) fn start(program: &[OsString], job: &Job) -> Result<Self, Failure> {
        let unknown = || {
            Failure::told("the path of this program is unknown, so that it cannot start reading processes", 5)
        };
        let (program, selecting) = program.split_first().ok_or_else(unknown)?;
        let mut command = Command::new(program);
        command.args(selecting).args(["bench", "worker"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(Failure::output)?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (mut orders, answers) = pipes.ok_or_else(|| Failure::output(io::ErrorKind::BrokenPipe))?;
        write_line(&mut orders, job).map_err(Failure::output)?;
        let files = job.parts.iter().map(|part| &part.path).collect::<BTreeSet<_>>().len();
        Ok(Self { child, orders: Some(orders), answers: BufReader::new(answers), files })
    }

    /// How many files it reads from.
    pub(super) fn files(&self) -> usize {
        self.files
    }

    pub(super) fn expect_ready(&mut self) -> Result<(), Failure> {
        self.answer().map(drop)
    }

    /// Has it read its part.
    pub(super) fn go(&mut self) -> Result<(), Failure> {
        let orders = self.orders.as_mut().ok_or_else(|| Failure::output(io::ErrorKind::BrokenPipe))?;
        write_line(orders, &()).map_err(Failure::output)
    }

    /// What it has read, once it has.
    pub(super) fn result(&mut self) -> Result<Reading, Failure> {
        self.answer().map(Option::unwrap_or_default)
    }

    fn answer(&mut self) -> Result<Option<Reading>, Failure> {
        match read_line(&mut self.answers).map_err(Failure::output)? {
            Some(Answer::Ready) => Ok(None),
            Some(Answer::Read(reading)) => Ok(Some(reading)),
            Some(Answer::Failed(told)) => Err(Failure::Told(told)),
            None => {
                let message = "a reading process has ended".to_owned();
                Err(Failure::Told(Told { message, exit_code: 1 }))
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.orders.take());
        let _ = self.child.wait();
    }
}

/// The other end: does what it is told until it is told nothing more.
pub(super) fn serve() -> Result<(), Failure> {
    let (mut orders, mut answers) = (io::stdin().lock(), io::stdout().lock());
    let Some(job) = read_line::<Job>(&mut orders).map_err(Failure::output)? else { return Ok(()) };
    let opened = Opened::new(job);
    let mut answer = |answer: Answer| write_line(&mut answers, &answer).map_err(Failure::output);
    let opened = match opened {
        Ok(opened) => opened,
        Err(told) => return answer(Answer::Failed(told)),
    };
    answer(Answer::Ready)?;
    while read_line::<()>(&mut orders).map_err(Failure::output)?.is_some() {
        answer(opened.read().map_or_else(Answer::Failed, Answer::Read))?;
    }
    Ok(())
}

/// A job that can begin.
struct Opened {
    reader: Reader,
    parts: Vec<(ReadFile, ByteRange)>,
    /// Bytes that are asked for at once.
    window_bytes: u64,
    device: DeviceId,
    is_kept: bool,
}

impl Opened {
    fn new(job: Job) -> Result<Self, Told> {
        let in_flight = usize::try_from(job.buffer_bytes / job.chunk_bytes.max(1)).unwrap_or(usize::MAX);
        let reader = Reader::new(
            &ReaderOptions::default()
                .route(job.route)
                .direct(job.direct)
                .usrbio(job.usrbio)
                .in_flight(in_flight.min(ReaderOptions::MAX_IN_FLIGHT))
                .chunk_bytes(job.chunk_bytes)
                .memory_budget_bytes(job.buffer_bytes),
        )?;
        let parts = job.parts.iter().map(|part| Ok((ReadFile::open(&part.path)?, part.range())));
        let parts: Vec<_> = parts.collect::<hoistway::Result<_>>()?;
        let window_bytes = job.buffer_bytes.saturating_mul(4);
        let opened = Self { reader, parts, window_bytes, device: job.device, is_kept: job.is_kept };
        opened.open_route()?;
        Ok(opened)
    }

    /// Has the route make what it makes with the first read.
    fn open_route(&self) -> Result<(), Told> {
        let Some((file, range)) = self.parts.first() else { return Ok(()) };
        let first = ByteRange::at(range.start(), range.len().min(1)).unwrap_or_default();
        let target = if self.device == DeviceId::Cpu { Target::discard() } else { self.target() };
        let request = ReadRequest::new(file, first, target);
        Ok(self.reader.submit([request], Priority::Demand)?.wait()?)
    }

    fn target(&self) -> Target {
        match (self.device, self.is_kept) {
            (DeviceId::Cpu, true) => Target::memory(),
            (DeviceId::Cpu, false) => Target::discard(),
            (device, _) => Target::scratch(device),
        }
    }

    /// Reads everything once. Two windows are under way, so that no thread ever waits for the next.
    fn read(&self) -> Result<Reading, Told> {
        let start = Instant::now();
        let mut reading = Reading::default();
        let mut under_way = VecDeque::new();
        for (file, range) in &self.parts {
            let mut position = range.start();
            while position < range.end() {
                let len = self.window_bytes.min(range.end() - position);
                let window = ByteRange::at(position, len).unwrap_or_default();
                let request = ReadRequest::new(file, window, self.target());
                under_way.push_back(self.reader.submit([request], Priority::Demand)?);
                position += len;
                if under_way.len() > 2
                    && let Some(batch) = under_way.pop_front()
                {
                    reading.take(&batch)?;
                }
            }
        }
        for batch in under_way {
            reading.take(&batch)?;
        }
        reading.seconds = start.elapsed().as_secs_f64();
        Ok(reading)
    }
}

impl Reading {
    fn take(&mut self, batch: &Batch) -> Result<(), Told> {
        batch.wait()?;
        let report = batch.report();
        self.bytes += report.delivered_bytes;
        self.carriers.extend(report.carriers);
        Ok(())
    }
}

fn write_line(output: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    output.write_all(&line)?;
    output.flush()
}

fn read_line<T: DeserializeOwned>(input: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = String::new();
    if input.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_str(&line)?))
}
