//! Transfers on both routes, past the page cache and through it, compared with what was written and with the file.
#![allow(unsafe_code)]

mod device;
mod faults;
mod join;
mod model;
mod order;

use super::*;
use crate::disk::{DataFile, FileAccess};
use requirements::{Requirement, skip};
use std::{
    path::Path,
    sync::{Arc, mpsc},
    time::Duration,
};

/// Long enough for anything that ends at all.
const PATIENCE: Duration = Duration::from_secs(60);

const ROUTES: [crate::Route; 2] = [crate::Route::IoUring, crate::Route::Threads];

fn disk() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn options(root: &Path, route: crate::Route) -> IoOptions {
    IoOptions { route, ..IoOptions::new(root) }
}

/// Starts an engine; where the machine has no rings, the test goes on without.
#[track_caller]
fn start(options: IoOptions) -> Option<IoEngine> {
    match IoEngine::start(options) {
        Ok(engine) => Some(engine),
        Err(crate::Error::RouteUnavailable { why, .. }) => {
            skip(Requirement::IoUring, why);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Memory that begins at a multiple of 4096, but for `skew` bytes.
struct Memory {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Memory {
    fn new(len: usize, skew: usize, fill: u8) -> Self {
        let mut bytes = vec![fill; len + 2 * 4096];
        let start = bytes.as_mut_ptr().align_offset(4096) + skew;
        Self { bytes, start, len }
    }

    fn of(content: &[u8], skew: usize) -> Self {
        let mut memory = Self::new(content.len(), skew, 0);
        memory.bytes[memory.start..][..content.len()].copy_from_slice(content);
        memory
    }

    fn piece(&mut self) -> Piece {
        let address = self.bytes[self.start..].as_mut_ptr();
        Piece::host(address, self.len)
    }

    fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..][..self.len]
    }
}

fn job(direction: Direction, file: &Arc<DataFile>, parts: Vec<Part>, done: Done) -> Job {
    Job {
        tag: 0,
        direction,
        priority: Priority::Demand,
        file: file.clone().into(),
        header: Header::None,
        parts,
        checksums: Checksums::Compute,
        deadline: None,
        withdrawn: Withdrawn::default(),
        wait_event: None,
        keep: KeepAlive::by_caller(),
        done,
    }
}

/// What calls back, and where the outcome comes out.
fn outcome() -> (Done, mpsc::Receiver<Outcome>) {
    let (sender, receiver) = mpsc::channel();
    (Box::new(move |outcome| _ = sender.send(outcome)), receiver)
}

/// Submits one job, and waits for its end.
fn run(engine: &IoEngine, make: impl FnOnce(Done) -> Job) -> Outcome {
    let (done, receiver) = outcome();
    engine.submit(vec![make(done)]);
    receiver.recv_timeout(PATIENCE).unwrap()
}

fn part(offset: u64, memory: &mut Memory) -> Part {
    Part { offset, len: memory.len as u64, pieces: vec![memory.piece()] }
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

fn new_file(directory: &Path, name: &str) -> Arc<DataFile> {
    Arc::new(DataFile::open(&directory.join(name), FileAccess::CreateNew).unwrap())
}
