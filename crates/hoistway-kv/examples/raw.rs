//! What a drive takes and gives without a store: direct writes and reads of one file, from deep queues. As a store does it,
//! neighbouring blocks are moved together, and several threads have a ring each.
//!
//! `cargo run --release --example raw -- FILE BYTES SECONDS BLOCK_BYTES...` makes the file, writes it once, then writes and
//! reads it for so many seconds each. Blocks of these lengths come in turn. Then single reads at random are timed, alone and
//! while one write of so many bytes is in flight at any time. Prints a line of JSON, in GB/s; the file is removed.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example")]

use io_uring::{IoUring, opcode, types::Fd};
use serde_json::json;
use std::{
    env,
    error::Error,
    fs::{self, File, OpenOptions},
    ops::Range,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::Path,
    process,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Threads, each of which moves a part of the file.
const THREADS: u64 = 4;
/// Transfers that a thread has in flight at any time.
const DEPTH: u32 = 64;
/// Bytes that a thread has in flight at any time, unless one block has more.
const WINDOW: usize = 16 << 20;
/// Bytes of neighbouring blocks that are moved together.
const JOINED: usize = 1 << 20;
const PAGE: usize = 4096;
/// Single reads that are timed, and the bytes of each of them.
const READS: usize = 4000;
const READ_BYTES: usize = 64 << 10;
/// Bytes of the writes that reads are timed beside.
const BESIDE: [usize; 3] = [0, 256 << 10, 1 << 20];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Write,
    Read,
}

/// The blocks of a part of a file, in turn.
struct Blocks<'a> {
    lens: &'a [usize],
    part: Range<u64>,
    number: usize,
    offset: u64,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [path, bytes, seconds, lens @ ..] = &arguments[..] else {
        return Err("arguments: FILE BYTES SECONDS BLOCK_BYTES...".into());
    };
    let (path, file_len, time) = (Path::new(path), bytes.parse()?, Duration::from_secs_f64(seconds.parse()?));
    let lens = lens.iter().map(|len| Ok(len.parse::<usize>()?)).collect::<Result<Vec<_>>>()?;
    if lens.is_empty() || lens.iter().any(|len| *len == 0 || len % PAGE != 0 || *len as u64 > file_len) {
        return Err(format!("blocks of {lens:?} bytes: whole pages, of at most {file_len} bytes").into());
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).custom_flags(libc::O_DIRECT);
    let file = options.open(path)?;
    let rates = measure(&file, file_len, &lens, time);
    fs::remove_file(path)?;
    println!("{}", rates?);
    Ok(())
}

fn measure(file: &File, file_len: u64, lens: &[usize], time: Duration) -> Result<serde_json::Value> {
    rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, file_len)?;
    let once = together(file, file_len, lens, Direction::Write, None)?;
    let write = together(file, file_len, lens, Direction::Write, Some(time))?;
    let read = together(file, file_len, lens, Direction::Read, Some(time))?;
    let demand =
        BESIDE.iter().map(|bytes| single_reads(file, file_len, *bytes)).collect::<Result<Vec<_>>>()?;
    Ok(json!({ "once": once, "write": write, "read": read, "demand": demand }))
}

/// Times single reads at random of the first half of a file, while one write to the second is in flight at any time.
fn single_reads(file: &File, file_len: u64, beside: usize) -> Result<serde_json::Value> {
    let is_over = AtomicBool::new(false);
    let half = file_len / 2;
    let begin = Instant::now();
    let (times, written) = thread::scope(|scope| {
        let writing = scope.spawn(|| -> std::io::Result<u64> {
            let memory = vec![7; beside + PAGE];
            let start = memory.as_ptr().align_offset(PAGE);
            let (mut written, places) = (0, (half / beside.max(1) as u64).max(1));
            while beside > 0 && !is_over.load(Ordering::Relaxed) {
                let at = half + written / beside as u64 % places * beside as u64;
                file.write_all_at(&memory[start..start + beside], at / PAGE as u64 * PAGE as u64)?;
                written += beside as u64;
            }
            Ok(written)
        });
        let times = times_of_reads(file, half);
        is_over.store(true, Ordering::Relaxed);
        let written = writing.join().map_err(|_| std::io::Error::other("a thread ended"))?;
        Ok::<_, std::io::Error>((times?, written?))
    })?;
    let at = |part: usize| times[times.len() * part / 100] * 1e3;
    let rate = written as f64 / begin.elapsed().as_secs_f64() / 1e9;
    Ok(
        json!({ "beside": beside, "median_ms": at(50), "p95_ms": at(95), "p99_ms": at(99), "stored_gb_per_s": rate }),
    )
}

/// Seconds of each read of the first so many bytes of a file, the shortest first.
fn times_of_reads(file: &File, len: u64) -> std::io::Result<Vec<f64>> {
    let mut memory = vec![0; READ_BYTES + PAGE];
    let start = memory.as_ptr().align_offset(PAGE);
    let places = (len / READ_BYTES as u64).max(1);
    let mut chance = 7u64;
    let mut times = Vec::with_capacity(READS);
    for _ in 0..READS {
        chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let begin = Instant::now();
        file.read_exact_at(
            &mut memory[start..start + READ_BYTES],
            (chance >> 33) % places * READ_BYTES as u64,
        )?;
        times.push(begin.elapsed().as_secs_f64());
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok(times)
}

/// Moves the file's blocks for so long, or all of them once, in GB/s of all threads.
fn together(
    file: &File,
    file_len: u64,
    lens: &[usize],
    direction: Direction,
    time: Option<Duration>,
) -> Result<f64> {
    let longest = lens.iter().copied().max().unwrap_or(PAGE) as u64;
    let threads = THREADS.min(file_len / longest).max(1);
    let len = file_len / threads / PAGE as u64 * PAGE as u64;
    let begin = Instant::now();
    let moved: Vec<_> = thread::scope(|scope| {
        let started: Vec<_> = (0..threads)
            .map(|number| {
                let part = number * len..(number + 1) * len;
                let blocks = Blocks { lens, offset: part.start, part, number: 0 };
                scope.spawn(move || moved(file, blocks, direction, time).map_err(|error| error.to_string()))
            })
            .collect();
        started
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a thread ended".into())))
            .collect()
    });
    let bytes = moved.into_iter().sum::<std::result::Result<u64, String>>()?;
    Ok(bytes as f64 / begin.elapsed().as_secs_f64() / 1e9)
}

impl Blocks<'_> {
    /// Where the next transfer begins, and its length. Behind the last block that has room comes the start of the part.
    fn step(&mut self) -> (u64, usize) {
        let mut len = self.lens[self.number % self.lens.len()];
        self.number += 1;
        if self.offset + len as u64 > self.part.end {
            self.offset = self.part.start;
        }
        loop {
            let next = self.lens[self.number % self.lens.len()];
            if len + next > JOINED || self.offset + (len + next) as u64 > self.part.end {
                break;
            }
            len += next;
            self.number += 1;
        }
        let offset = self.offset;
        self.offset += len as u64;
        (offset, len)
    }
}

/// Moves blocks for so long, or all once. Returns their bytes.
fn moved(file: &File, mut blocks: Blocks<'_>, direction: Direction, time: Option<Duration>) -> Result<u64> {
    let longest = blocks.lens.iter().copied().max().unwrap_or(PAGE).max(JOINED);
    let most = blocks.part.end - blocks.part.start;
    let depth = (WINDOW / longest).clamp(1, DEPTH as usize);
    let mut memory = vec![7_u8; depth * longest + PAGE];
    let start = memory.as_ptr().align_offset(PAGE);
    let buffers: Vec<*mut u8> =
        memory[start..].chunks_exact_mut(longest).take(depth).map(<[u8]>::as_mut_ptr).collect();
    let mut ring = IoUring::new(DEPTH)?;
    let begin = Instant::now();
    let (mut free, mut moved, mut failed) = ((0..buffers.len()).collect::<Vec<_>>(), 0_u64, None);
    let mut lens = vec![0; buffers.len()];
    let mut queued = 0_u64;
    loop {
        let goes_on = |queued: u64| match time {
            Some(time) => begin.elapsed() < time,
            None => queued < most,
        };
        while failed.is_none()
            && goes_on(queued)
            && let Some(number) = free.pop()
        {
            let (offset, len) = blocks.step();
            let (buffer, fd) = (buffers[number], Fd(file.as_raw_fd()));
            let entry = match direction {
                Direction::Write => opcode::Write::new(fd, buffer, len as u32).offset(offset).build(),
                Direction::Read => opcode::Read::new(fd, buffer, len as u32).offset(offset).build(),
            };
            // SAFETY: the buffer lives until this function returns, which waits for all transfers, and no other transfer in
            // flight has it.
            unsafe { ring.submission().push(&entry.user_data(number as u64)) }?;
            lens[number] = len;
            queued += len as u64;
        }
        if free.len() == buffers.len() {
            break;
        }
        if let Err(error) = ring.submit_and_wait(1) {
            // The system may still use the buffers.
            eprintln!("waiting for transfers: {error}");
            process::exit(1);
        }
        for completion in ring.completion() {
            let number = completion.user_data() as usize;
            match usize::try_from(completion.result()) {
                Ok(len) if len == lens[number] => moved += len as u64,
                Ok(len) => failed = Some(format!("{len} of {} bytes were moved", lens[number])),
                Err(_) => failed = Some(std::io::Error::from_raw_os_error(-completion.result()).to_string()),
            }
            free.push(number);
        }
    }
    match failed {
        Some(why) => Err(why.into()),
        None => Ok(moved),
    }
}
