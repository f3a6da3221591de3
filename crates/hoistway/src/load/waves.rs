//! The reads of a load into memory of the caller's, a wave at a time: a part of a tensor may be of millions of runs.
#![allow(unsafe_code)]

use crate::{
    ByteRange, DeviceId, Error, Result,
    plan::Runs,
    read::{Batch, BatchReport, Priority, ReadFile, ReadRequest, Reader, Target},
};
use std::{
    collections::VecDeque,
    ptr::NonNull,
    sync::Arc,
    time::{Duration, Instant},
};

/// Reads of a wave.
const WAVE_READS: usize = 4096;

/// Waves at once, so that lanes have work while the next one is made.
const WAVES: usize = 2;

/// Reads that are known at once.
pub(super) const MOST_READS: u64 = (WAVE_READS * WAVES) as u64;

/// A target, and the runs of bytes that go there one after the other.
#[derive(Debug)]
pub(super) struct TargetReads {
    file: ReadFile,
    name: Arc<str>,
    device: DeviceId,
    address: u64,
    runs: Runs,
    /// Whether all that lies between the first byte and the last is read at once.
    is_dense: bool,
}

impl TargetReads {
    /// # Safety
    /// As many bytes from the target's address on as all runs have must be valid for reads and writes and initialised, and
    /// nothing else may use them, until the reads have ended.
    pub(super) unsafe fn new(
        file: ReadFile,
        name: Arc<str>,
        (device, address): (DeviceId, u64),
        runs: Runs,
        coalesce_gap_bytes: u64,
    ) -> Self {
        let is_dense = runs.count() > 1 && runs.widest_gap() <= coalesce_gap_bytes;
        Self { file, name, device, address, runs, is_dense }
    }

    /// How many reads it takes; at least one.
    pub(super) fn count(&self) -> u64 {
        if self.is_dense { 1 } else { self.runs.count().max(1) }
    }

    fn read(&self, number: u64) -> ReadRequest {
        // What was queued on the devices has ended: the load has waited for it.
        let read =
            |range, target| ReadRequest::new(&self.file, range, target).named(self.name.clone()).after([]);
        let Some(span) = self.runs.span() else { return read(ByteRange::default(), Target::memory()) };
        match self.device {
            // SAFETY: the promise to `new`; of the span only the runs get there.
            device if self.is_dense => unsafe {
                read(span, target_at(device, self.address)).packing(self.runs.clone())
            },
            device => {
                let run = self.runs.get(number);
                // SAFETY: the promise to `new`: each byte of a target is of one run.
                read(run, unsafe { target_at(device, self.address + number * run.len()) })
            }
        }
    }
}

/// # Safety
/// That of [`Target::host`] or [`Target::device`].
unsafe fn target_at(device: DeviceId, address: u64) -> Target {
    if device != DeviceId::Cpu {
        // SAFETY: passed on.
        return unsafe { Target::device(device, address) };
    }
    let start = NonNull::new(std::ptr::with_exposed_provenance_mut(address as usize));
    // SAFETY: passed on.
    unsafe { Target::host(start.unwrap_or(NonNull::dangling())) }
}

/// The reads of all targets, in their order. After a read has failed, no more waves begin.
#[derive(Debug)]
pub(super) struct Waves {
    // Before the reader, whose threads carry them out. A read that failed is always of the first.
    running: VecDeque<Wave>,
    reader: Reader,
    targets: Vec<TargetReads>,
    /// Target, and number in it, of the first read that was not submitted.
    next: (usize, u64),
    has_failed: bool,
    started: Instant,
    /// What waves did that are over.
    done: Option<BatchReport>,
}

#[derive(Debug)]
struct Wave {
    batch: Batch,
    /// The target of each read.
    target_of: Vec<usize>,
    /// Reads that were told to have ended.
    told: usize,
    /// After how long it was submitted.
    since: Duration,
}

/// A read that has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended {
    pub(super) target: usize,
    /// Its number for [`Waves::error`], if it failed.
    pub(super) failed: Option<usize>,
}

impl Waves {
    /// Submits the first reads.
    pub(super) fn new(reader: Reader, targets: Vec<TargetReads>) -> Result<Self> {
        let (running, next, has_failed) = (VecDeque::new(), (0, 0), false);
        let started = Instant::now();
        let mut waves = Self { running, reader, targets, next, has_failed, started, done: None };
        waves.submit()?;
        Ok(waves)
    }

    /// The next read to end, each once. `None` if none ended in time, or all were told.
    pub(super) fn next_ended(&mut self, timeout: Duration) -> Result<Option<Ended>> {
        loop {
            let Some(wave) = self.running.front_mut() else { return Ok(None) };
            if let Some(read) = wave.batch.next_ended(timeout) {
                wave.told += 1;
                let failed = wave.batch.status(read).error().map(|_| read);
                self.has_failed |= failed.is_some();
                return Ok(Some(Ended { target: wave.target_of[read], failed }));
            }
            if wave.told < wave.batch.len() || self.has_failed {
                return Ok(None);
            }
            self.done = gathered(self.done.take(), self.running.pop_front().iter());
            self.submit()?;
        }
    }

    /// Why a read failed that was told last of all, or with others since the first that did.
    pub(super) fn error(&self, read: usize) -> Option<&Error> {
        self.running.front().and_then(|wave| wave.batch.status(read).error())
    }

    /// The same, to be kept longer than the reads.
    pub(super) fn shared_error(&self, read: usize) -> Option<Arc<Error>> {
        self.running.front().and_then(|wave| wave.batch.error(read))
    }

    /// What was done so far. `None` if there is nothing to do.
    pub(super) fn report(&self) -> Option<BatchReport> {
        gathered(self.done.clone(), self.running.iter())
    }

    pub(super) fn staging_bytes(&self) -> u64 {
        self.reader.staging_bytes()
    }

    /// Begins as many waves as there may be at once.
    fn submit(&mut self) -> Result<()> {
        while self.running.len() < WAVES && self.next.0 < self.targets.len() {
            let (mut reads, mut target_of) = (Vec::new(), Vec::new());
            while reads.len() < WAVE_READS
                && let Some(target) = self.targets.get(self.next.0)
            {
                reads.push(target.read(self.next.1));
                target_of.push(self.next.0);
                self.next.1 += 1;
                if self.next.1 == target.count() {
                    self.next = (self.next.0 + 1, 0);
                }
            }
            let since = self.started.elapsed();
            let batch = self.reader.submit(reads, Priority::Demand)?;
            self.running.push_back(Wave { batch, target_of, told: 0, since });
        }
        Ok(())
    }
}

/// What waves did after `done`.
fn gathered<'a>(mut done: Option<BatchReport>, waves: impl Iterator<Item = &'a Wave>) -> Option<BatchReport> {
    for wave in waves {
        let mut report = wave.batch.report();
        report.seconds += wave.since.as_secs_f64();
        match &mut done {
            Some(done) => done.merge(report),
            None => done = Some(report),
        }
    }
    done
}

impl Drop for Waves {
    fn drop(&mut self) {
        // All before any is waited for.
        for wave in &self.running {
            wave.batch.cancel();
        }
    }
}
