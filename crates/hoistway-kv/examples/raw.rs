//! What a drive takes and gives without a store: direct writes and reads of one file, from deep queues.
//!
//! `cargo run --release --example raw -- FILE BYTES SECONDS BLOCK_BYTES...` makes the file, writes it once, then writes and
//! reads it for so many seconds each. Blocks of these lengths come in turn. Prints a line of JSON, in GB/s; the file is
//! removed.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example")]

use io_uring::{IoUring, opcode, types::Fd};
use serde_json::json;
use std::{
    env,
    error::Error,
    fs::{self, File, OpenOptions},
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::Path,
    process,
    time::{Duration, Instant},
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Transfers that are in flight at any time.
const DEPTH: u32 = 32;
/// Bytes in flight at any time, unless one block has more.
const WINDOW: usize = 32 << 20;
const PAGE: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Write,
    Read,
}

/// The blocks of a file, in turn.
struct Blocks {
    lens: Vec<usize>,
    file_len: u64,
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
    let blocks = || Blocks { lens: lens.to_vec(), file_len, number: 0, offset: 0 };
    let once = rate(file, blocks(), Direction::Write, Some(file_len), Duration::MAX)?;
    let write = rate(file, blocks(), Direction::Write, None, time)?;
    let read = rate(file, blocks(), Direction::Read, None, time)?;
    Ok(json!({ "once": once, "write": write, "read": read }))
}

impl Blocks {
    /// Where the next block lies, and its length. Behind the last one that has room comes the start of the file.
    fn step(&mut self) -> (u64, usize) {
        let len = self.lens[self.number % self.lens.len()];
        self.number += 1;
        if self.offset + len as u64 > self.file_len {
            self.offset = 0;
        }
        let offset = self.offset;
        self.offset += len as u64;
        (offset, len)
    }
}

/// Moves blocks for so long, or until there were so many bytes. Returns GB/s.
fn rate(
    file: &File,
    mut blocks: Blocks,
    direction: Direction,
    most: Option<u64>,
    time: Duration,
) -> Result<f64> {
    let longest = blocks.lens.iter().copied().max().unwrap_or(PAGE);
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
        let goes_on = |queued: u64| failed.is_none() && most.is_none_or(|most| queued < most);
        while goes_on(queued)
            && begin.elapsed() < time
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
        None => Ok(moved as f64 / begin.elapsed().as_secs_f64() / 1e9),
    }
}
