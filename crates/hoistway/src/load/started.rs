//! A load in progress, as its owner sees it.
#![forbid(unsafe_code)]

use super::{
    Loaded, Tensor,
    loading::ThreadedLoad,
    progress::{Arrival, Progress},
    start::{NoLoad, Start},
    wave_load::WaveLoad,
};
use crate::{Error, Report, Result};
use hoistway_io::span::OwnSpan;
use std::time::Duration;

/// A load in progress, on threads of its own.
///
/// Iterate to get tensors as they become complete, or [`wait`](Loading::wait) for all. Dropping it cancels the
/// load, waits for reads that the kernel already has, and frees what was not handed out.
///
/// ```no_run
/// let checkpoint = hoistway::Checkpoint::open(&["model.safetensors"])?;
/// for tensor in checkpoint.start(&hoistway::LoadOptions::default())? {
///     let tensor = tensor?;
///     println!("{} {:?}", tensor.name(), tensor.shape());
/// }
/// # Ok::<(), hoistway::Error>(())
/// ```
pub struct Loading {
    kind: Kind,
    /// What is said after an error was told, which ends it.
    failed: Option<Error>,
    /// Until the load is dropped.
    _span: OwnSpan,
}

enum Kind {
    /// All reads are known from the start.
    Threaded(Box<ThreadedLoad>),
    /// Reads are asked for in waves.
    Waves(Box<WaveLoad>),
}

impl Loading {
    pub(super) fn start(start: &Start<'_>) -> Result<Self> {
        let kind = match ThreadedLoad::start(start) {
            Ok(load) => Kind::Threaded(load),
            Err(NoLoad::TooManyReads(_)) if WaveLoad::takes(start) => {
                Kind::Waves(Box::new(WaveLoad::start(start)?))
            }
            Err(NoLoad::TooManyReads(error) | NoLoad::Failed(error)) => return Err(error),
        };
        Ok(Self { kind, failed: None, _span: start.span.clone().into() })
    }

    /// The next tensor to become complete, waiting no longer than `timeout`.
    ///
    /// # Errors
    /// Whatever ended the load. After an error there are no more tensors.
    pub fn next_within(&mut self, timeout: Duration) -> Result<Arrival> {
        self.advance(Some(timeout))
    }

    /// The next tensor to hand out that is complete already. Never waits, and never tells of errors.
    pub fn next_arrived(&mut self) -> Option<Tensor> {
        if self.failed.is_some() {
            return None;
        }
        match &mut self.kind {
            Kind::Threaded(load) => load.next_arrived(),
            Kind::Waves(load) => load.next_arrived(),
        }
    }

    fn advance(&mut self, timeout: Option<Duration>) -> Result<Arrival> {
        if self.failed.is_some() {
            return Ok(Arrival::Finished);
        }
        let arrival = match &mut self.kind {
            Kind::Threaded(load) => load.advance(timeout),
            Kind::Waves(load) => load.advance(timeout),
        };
        self.failed = arrival.as_ref().err().map(|error| match error {
            Error::Forked => Error::Forked,
            _ => Error::Cancelled,
        });
        arrival
    }

    /// Waits for all tensors that were not handed out yet.
    ///
    /// # Errors
    /// Whatever ended the load; [`Error::Cancelled`] if the caller was told that before, or [`Error::Forked`] if that was it.
    pub fn wait(mut self) -> Result<Loaded> {
        let mut tensors = Vec::with_capacity(self.progress().tensors_total);
        loop {
            match self.advance(None)? {
                Arrival::Tensor(tensor) => tensors.push(tensor),
                Arrival::Pending => {}
                Arrival::Finished => break,
            }
        }
        match self.failed.take() {
            Some(error) => Err(error),
            None => Ok(self.into_loaded(tensors)),
        }
    }

    /// Puts `tensors`, taken from this load, into the order of the checkpoint and adds the report.
    pub fn into_loaded(self, tensors: Vec<Tensor>) -> Loaded {
        let report = self.report();
        Loaded::new(tensors, report)
    }

    /// Ends the load early. Tensors that were handed out stay valid.
    pub fn cancel(&mut self) {
        match &mut self.kind {
            Kind::Threaded(load) => load.cancel(),
            Kind::Waves(load) => load.cancel(),
        }
    }

    /// How far the load has got.
    pub fn progress(&self) -> Progress {
        match &self.kind {
            Kind::Threaded(load) => load.progress(),
            Kind::Waves(load) => load.progress(),
        }
    }

    /// What the load has done so far; the whole truth once all tensors were handed out. A child of `fork` learns
    /// only what was planned.
    pub fn report(&self) -> Report {
        match &self.kind {
            Kind::Threaded(load) => load.report(),
            Kind::Waves(load) => load.report(),
        }
    }
}

impl Iterator for Loading {
    type Item = Result<Tensor>;

    fn next(&mut self) -> Option<Result<Tensor>> {
        loop {
            match self.advance(None) {
                Ok(Arrival::Tensor(tensor)) => return Some(Ok(tensor)),
                Ok(Arrival::Pending) => {}
                Ok(Arrival::Finished) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

impl std::fmt::Debug for Loading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loading").field("progress", &self.progress()).finish_non_exhaustive()
    }
}
