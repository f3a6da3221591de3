//! A job that has begun: its steps, and what is known of its outcome.
#![forbid(unsafe_code)]

use super::{
    Carrier, Checksums, Direction, Done, Failure, Header, Job, MakeHeader, Outcome,
    checksum::PartSum,
    file::DataFile,
    plan::{DevicePieces, Grid, Limits, Step, Wanted},
};
use crate::KeepAlive;
use std::{collections::VecDeque, io, mem, sync::Arc, time::Instant};

/// The steps of a job, as things stand with its file.
pub(super) fn plan(
    job: &Job,
    file: &DataFile,
    limits: Limits,
    devices: DevicePieces,
) -> Result<VecDeque<Step>, &'static str> {
    let grid = match file.direct() {
        Ok(direct) => Grid { memory: direct.memory_alignment.max(1), offset: direct.offset_alignment.max(1) },
        Err(_) => Grid::BUFFERED,
    };
    let wanted = Wanted { header: None, parts: &job.parts, grid, devices, limits };
    match job.header {
        Header::None => wanted.steps(),
        Header::Read { offset } => Wanted { header: Some(offset), ..wanted }.steps(),
        Header::Write { offset, .. } => {
            let steps = Wanted { header: Some(offset), ..wanted }.steps()?;
            if steps.len() == 1 {
                return Ok(steps);
            }
            // The header comes last: it has the checksums of the others.
            let mut steps = wanted.steps()?;
            steps.extend(Wanted { header: Some(offset), parts: &[], ..wanted }.steps()?);
            Ok(steps)
        }
    }
}

/// A job that has begun.
pub(super) struct Transfer {
    pub(super) direction: Direction,
    pub(super) file: Arc<DataFile>,
    /// Whether the file is open for this transfer's sake.
    pub(super) is_late: bool,
    pub(super) is_demand: bool,
    /// Steps that have not begun.
    pub(super) steps: VecDeque<Step>,
    /// Steps that have begun and not ended.
    pub(super) running: usize,
    /// What is known of each part's checksum; empty if nobody asks.
    pub(super) sums: Vec<PartSum>,
    pub(super) header: Vec<u8>,
    make_header: Option<MakeHeader>,
    lens: Vec<u64>,
    keep: KeepAlive,
    done: Done,
    carried: Vec<(Carrier, u64)>,
    bounced_bytes: u64,
    failure: Option<Failure>,
    started: Instant,
}

impl Transfer {
    pub(super) fn begin(job: Job, file: Arc<DataFile>, steps: VecDeque<Step>) -> Self {
        let make_header = match job.header {
            Header::Write { make, .. } => Some(make),
            Header::None | Header::Read { .. } => None,
        };
        let sums = match job.checksums {
            Checksums::Compute | Checksums::Require => vec![PartSum::default(); job.parts.len()],
            Checksums::Skip => Vec::new(),
        };
        Self {
            direction: job.direction,
            file,
            is_late: job.file.is_late(),
            is_demand: job.priority == super::Priority::Demand,
            steps,
            running: 0,
            sums,
            header: Vec::new(),
            make_header,
            lens: job.parts.iter().map(|part| part.len).collect(),
            keep: job.keep,
            done: job.done,
            carried: Vec::new(),
            bounced_bytes: 0,
            failure: None,
            started: Instant::now(),
        }
    }

    /// The header to write, once all other bytes have been summed.
    pub(super) fn make_header(&mut self) -> Vec<u8> {
        let sums: Vec<Option<u32>> = if self.sums.is_empty() {
            vec![None; self.lens.len()]
        } else {
            self.sums.iter().zip(&self.lens).map(|(sum, len)| sum.clone().finish(*len)).collect()
        };
        self.make_header.take().map_or_else(Vec::new, |make| make(&sums))
    }

    /// Notes bytes that were moved.
    pub(super) fn account(&mut self, carrier: Carrier, bytes: u64) {
        if bytes == 0 {
            return;
        }
        match self.carried.iter_mut().find(|(own, _)| *own == carrier) {
            Some((_, sum)) => *sum += bytes,
            None => self.carried.push((carrier, bytes)),
        }
    }

    /// Notes bytes of the caller's that went by way of our memory.
    pub(super) fn account_bounced(&mut self, step: &Step) {
        self.bounced_bytes += step.bounced_payload();
    }

    /// Notes that a step failed: no other begins.
    pub(super) fn fail(&mut self, failure: Failure) {
        self.steps.clear();
        self.failure.get_or_insert(failure);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    pub(super) fn is_over(&self) -> bool {
        self.steps.is_empty() && self.running == 0
    }

    /// Lets the memory go, and says how it went.
    pub(super) fn end(self) {
        let Self { file, keep, done, sums, lens, header, carried, bounced_bytes, failure, started, .. } =
            self;
        // Who learns of the end may begin with another.
        drop(file);
        match failure {
            Some(Failure::Lost(_)) => mem::forget(keep),
            _ => drop(keep),
        }
        let checksums = if sums.is_empty() || failure.is_some() {
            vec![None; lens.len()]
        } else {
            sums.into_iter().zip(lens).map(|(sum, len)| sum.finish(len)).collect()
        };
        done(Outcome {
            result: failure.map_or(Ok(()), Err),
            header,
            checksums,
            carried,
            bounced_bytes,
            started: Some(started),
        });
    }

    /// Notes that nobody knows what becomes of a step: its memory is never let go.
    pub(super) fn lose(&mut self, error: io::Error) {
        self.steps.clear();
        self.failure = Some(Failure::Lost(error));
    }

    /// Notes that what cuFile moved went through host memory.
    pub(super) fn was_not_direct(&mut self) {
        for (carrier, _) in &mut self.carried {
            if *carrier == Carrier::Gds {
                *carrier = Carrier::GdsCompat;
            }
        }
    }

    pub(super) fn used_gds(&self) -> bool {
        self.carried.iter().any(|(carrier, _)| *carrier == Carrier::Gds)
    }
}
