//! Loads into memory of the caller's: whole tensors, or parts of them, as one batch of reads.
#![allow(unsafe_code)]

use super::{
    LoadOptions, Order,
    waves::{Ended, TargetReads, Waves},
};
use crate::{
    Catalog, DeviceId, Error, Report, Result,
    device::Device,
    memory::HugePages,
    metrics::{self, Outcome},
    plan::{PlannedTensor, TensorRequest},
    read::{ReadFile, Reader, ReaderOptions},
    report::add_new,
    source::Source,
    sys::usage::Usage,
};
#[cfg(feature = "objects")]
use crate::{report::ChecksumReport, route::ObjectNotes, source::objects::ObjectSource};
use std::{
    any::Any,
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

/// A tensor, or a part of one, and the memory of the caller's that it goes to.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FillTarget {
    /// What to load.
    pub request: TensorRequest,
    /// Whose memory it is.
    pub device: DeviceId,
    /// Address of the first byte.
    pub address: u64,
    /// Bytes that there are, which must be those of the tensor or part.
    pub len_bytes: u64,
}

impl FillTarget {
    /// The `len_bytes` bytes at `address` of `device`, for what `request` names.
    pub fn new(request: TensorRequest, device: DeviceId, address: u64, len_bytes: u64) -> Self {
        Self { request, device, address, len_bytes }
    }
}

/// A load into memory of the caller's. Dropping it cancels it, as [`Filling::cancel`] does, whose errors are only logged then.
#[derive(Debug)]
pub struct Filling {
    waves: Option<Waves>,
    /// Those of the targets, until it is known that they write to none.
    devices: Vec<Arc<Device>>,
    /// Whether what owns the targets is kept until then.
    is_set_aside: bool,
    order: Order,
    /// For each target, the reads that have not ended.
    pending: Vec<u64>,
    /// Targets that are filled, and were not told.
    filled: VecDeque<usize>,
    /// Targets and reads of them that failed, as they did.
    failed: Vec<(usize, usize)>,
    /// Targets that were told.
    told: usize,
    report: Report,
    #[cfg(feature = "objects")]
    objects: ObjectNotes,
    usage: Usage,
    process: u32,
}

/// Why there is no next target.
enum Stopped {
    Cancelled,
    Forked,
    /// By the error of this read.
    By(usize),
}

/// What [`Filling::next_within`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// This target, by its position, holds its tensor.
    Target(usize),
    /// None was filled in time.
    Pending,
    /// All were told.
    Finished,
}

impl Filling {
    /// A load that has not begun, to targets on these devices. Its report, which it adds to, is that of a load that began at
    /// `usage`.
    pub(super) fn new(order: Order, report: Report, usage: Usage, devices: Vec<Arc<Device>>) -> Self {
        Self {
            waves: None,
            devices,
            is_set_aside: false,
            order,
            pending: Vec::new(),
            filled: VecDeque::new(),
            failed: Vec::new(),
            told: 0,
            report,
            #[cfg(feature = "objects")]
            objects: ObjectNotes::default(),
            usage,
            process: std::process::id(),
        }
    }

    /// Begins to read, by `reader`, what each target is to hold.
    ///
    /// # Safety
    /// As for [`Checkpoint::fill`](super::Checkpoint::fill). A target has as many bytes as its tensor's runs.
    pub(super) unsafe fn begin(
        mut self,
        reader: Reader,
        catalog: &Catalog,
        sources: &[Arc<dyn Source>],
        parts: &[(&FillTarget, &PlannedTensor)],
        coalesce_gap_bytes: u64,
    ) -> Result<Self> {
        let reads = parts.iter().map(|(target, planned)| {
            let entry = catalog.tensor(planned.tensor);
            let file = ReadFile::from_source(sources[entry.file.index()].clone());
            let (name, runs) = (entry.name.clone(), planned.runs().clone());
            // SAFETY: the caller's promise.
            unsafe { TargetReads::new(file, name, (target.device, target.address), runs, coalesce_gap_bytes) }
        });
        let reads: Vec<_> = reads.collect();
        self.pending = reads.iter().map(TargetReads::count).collect();
        #[cfg(feature = "objects")]
        {
            self.objects = ObjectNotes::of(sources);
            self.report.notes.extend(self.objects.first.iter().cloned());
            let objects = sources.iter().filter(|source| ObjectSource::of(source).is_some()).count();
            if objects > 0 {
                let mut checksums = ChecksumReport::default();
                checksums.add_uncompared("it is read into memory of the caller's", objects);
                self.report.checksums = Some(checksums);
            }
        }
        let waves = Waves::new(reader, reads)?;
        self.report.memory.staging_bytes = waves.staging_bytes();
        self.waves = Some(waves);
        Ok(self)
    }

    /// The next target to be filled, waiting no longer than `timeout`.
    ///
    /// # Errors
    /// Why a target cannot be filled. In the order of arrival the first such error is told, in the order of the
    /// targets the error of the first such target.
    pub fn next_within(&mut self, timeout: Duration) -> Result<Filled, &Error> {
        static CANCELLED: Error = Error::Cancelled;
        static FORKED: Error = Error::Forked;
        self.advance(timeout).map_err(|stopped| match stopped {
            Stopped::Cancelled => &CANCELLED,
            Stopped::Forked => &FORKED,
            Stopped::By(read) => {
                self.waves.as_ref().and_then(|waves| waves.error(read)).unwrap_or(&CANCELLED)
            }
        })
    }

    /// Does what [`Filling::next_within`] does. The caller shares an error with it.
    #[doc(hidden)]
    pub fn next_or_failure(&mut self, timeout: Duration) -> Result<Filled, Arc<Error>> {
        self.advance(timeout).map_err(|stopped| match stopped {
            Stopped::Cancelled => Error::Cancelled.into(),
            Stopped::Forked => Error::Forked.into(),
            Stopped::By(read) => {
                let error = self.waves.as_ref().and_then(|waves| waves.shared_error(read));
                error.unwrap_or_else(|| Error::Cancelled.into())
            }
        })
    }

    /// Does what [`Filling::next_within`] does. An error ends the load, and is given away.
    pub(super) fn next_or_end(&mut self, timeout: Duration) -> Result<Filled> {
        self.advance(timeout).map_err(|stopped| match stopped {
            Stopped::Cancelled => Error::Cancelled,
            Stopped::Forked => Error::Forked,
            Stopped::By(read) => {
                let error = self.waves.as_ref().and_then(|waves| waves.shared_error(read));
                // From then on nothing else has it.
                self.stop();
                let copied = |shared: Arc<Error>| shared.copied();
                error.map_or(Error::Cancelled, |error| Arc::try_unwrap(error).unwrap_or_else(copied))
            }
        })
    }

    fn advance(&mut self, timeout: Duration) -> Result<Filled, Stopped> {
        if self.process != std::process::id() {
            return Err(Stopped::Forked);
        }
        if self.told == self.pending.len() {
            return Ok(Filled::Finished);
        }
        let deadline = Instant::now().checked_add(timeout);
        let Some(waves) = &mut self.waves else { return Err(Stopped::Cancelled) };
        loop {
            let next = match self.order {
                Order::Arrival => self.filled.pop_front(),
                Order::File => Some(self.told).filter(|&next| self.pending[next] == 0),
            };
            let failed = match self.order {
                Order::Arrival if next.is_none() => self.failed.first(),
                Order::Arrival => None,
                Order::File => self.failed.iter().find(|(target, _)| *target == self.told),
            };
            if let Some((_, read)) = failed {
                return Err(Stopped::By(*read));
            }
            if let Some(target) = next {
                self.told += 1;
                return Ok(Filled::Target(target));
            }
            let left =
                deadline.map_or(timeout, |deadline| deadline.saturating_duration_since(Instant::now()));
            // More is asked for in the process alone that began.
            let Ok(ended) = waves.next_ended(left) else { return Err(Stopped::Forked) };
            let Some(Ended { target, failed }) = ended else { return Ok(Filled::Pending) };
            self.pending[target] -= 1;
            if let Some(read) = failed {
                self.failed.push((target, read));
            } else if self.pending[target] == 0
                && self.order == Order::Arrival
                && !self.failed.iter().any(|(failed, _)| *failed == target)
            {
                self.filled.push_back(target);
            }
        }
    }

    /// Ends it early, and waits until nothing writes to the targets any more.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] if it is unknown whether a device still writes to targets. Another call asks it again.
    pub fn cancel(&mut self) -> Result<()> {
        self.stop();
        if self.process != std::process::id() {
            return Ok(());
        }
        // Copies that failed may be under way still.
        while let Some(device) = self.devices.last() {
            device.regain()?;
            self.devices.pop();
        }
        Ok(())
    }

    /// Keeps `memory`, such as what owns the targets, until no device may write to targets any more, and ends the load early:
    /// for a caller whom [`cancel`](Self::cancel) has failed. Another call of that asks the devices, and so do later loads to
    /// them and [`release_devices`](crate::device::release_devices).
    pub fn set_aside(&mut self, memory: impl Any + Send + Sync) {
        // Copies that are under way are known to the devices after that.
        self.stop();
        let memory = Arc::new(memory);
        for device in &self.devices {
            device.set_aside_with_copies(memory.clone());
        }
        self.is_set_aside = true;
    }

    /// Ends it early, and waits for its reads, and copies as far as devices tell their ends.
    pub(super) fn stop(&mut self) {
        if let Some(waves) = &self.waves
            && self.process == std::process::id()
        {
            let outcome = match self.failed.first() {
                _ if self.told == self.pending.len() => Outcome::Ok,
                None => Outcome::Cancelled,
                Some((_, read)) => waves.error(*read).map_or(Outcome::Failed, Outcome::of),
            };
            self.report = self.report();
            metrics::count(&self.report, outcome, self.told);
        }
        self.waves = None;
    }

    /// What was done so far.
    pub fn report(&self) -> Report {
        let mut report = self.report.clone();
        let Some(waves) = &self.waves else { return report };
        let Some(done) = waves.report() else { return report };
        report.memory.staging_bytes = waves.staging_bytes();
        report.read_bytes = done.read_bytes;
        report.staged_bytes = done.staged_bytes;
        report.carriers = done.carriers;
        report.carriers.sort_by_key(|carrier| std::cmp::Reverse(carrier.tensor_bytes));
        report.refused = done.refused;
        if let Some(device) = &mut report.device {
            device.proof = done.proof;
        }
        add_new(&mut report.notes, done.notes);
        report.retries = done.retries;
        #[cfg(feature = "objects")]
        report.notes.extend(self.objects.last());
        let (time, now) = (&mut report.time, Usage::now());
        time.transfer_seconds = done.seconds;
        time.total_seconds = time.open_seconds + time.prepare_seconds + done.seconds;
        time.cpu_seconds = now.cpu.saturating_sub(self.usage.cpu).as_secs_f64();
        time.page_faults = now.page_faults.saturating_sub(self.usage.page_faults);
        report
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        if self.is_set_aside {
            self.stop();
        } else if let Err(error) = self.cancel() {
            tracing::error!(%error, "memory of the caller's may be written to after this");
        }
    }
}

/// What a reader is to be told.
pub(super) fn reader_options(options: &LoadOptions, has_device: bool) -> Result<ReaderOptions> {
    if !has_device && options.route.leads_to_device() {
        let reason = "it leads to a device, and all targets are host memory".into();
        return Err(Error::InvalidOption { option: "route", value: options.route.to_string(), reason });
    }
    let (defaults, loads) = (ReaderOptions::default(), LoadOptions::default());
    let chunk_bytes =
        if options.chunk_bytes == loads.chunk_bytes { defaults.chunk_bytes } else { options.chunk_bytes };
    let by_bytes = options.in_flight_bytes.map(|bytes| (bytes / chunk_bytes.max(1)).clamp(1, 256) as usize);
    let budget = options.memory_budget_bytes.unwrap_or(u64::MAX);
    Ok(ReaderOptions {
        route: options.route,
        direct: options.direct,
        in_flight: options.threads.into_iter().chain(by_bytes).min().unwrap_or(defaults.in_flight),
        chunk_bytes,
        memory_budget_bytes: defaults.memory_budget_bytes.min(budget),
        huge_pages: options.huge_pages != HugePages::Never,
        usrbio: options.usrbio,
        usrbio_directories: options.usrbio_directories.clone(),
        cancel: options.cancel.clone(),
        #[cfg(feature = "fault-injection")]
        faults: options.faults.clone(),
    })
}
