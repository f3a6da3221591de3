//! Moves the bytes of planned files onto the disk: extents, on threads, past the page cache where that is possible.
#![forbid(unsafe_code)]

use super::{
    SaveOptions, SaveReport,
    content::{TensorBytes, TensorData},
    gather::{Devices, host_part, misfit},
    io_error,
    plan::Piece,
    target::{Target, refuse_direct},
    temp::TempFile,
};
use crate::{
    Alignment, ByteRange, DirectIo, Error, Refusal, Result,
    memory::{Slot, SlotKind, Slots, unpinned_note},
    parallel::{self, lock},
    report::add_new,
    route::Unavailable,
};
use hoistway_io::{
    Placement,
    executor::{
        Charge, Customer, Flight, Gate, Handler, InFlightLimit, Limits, Next, Operation, Patience, QueueId,
        QueueOptions, Reason, Scheduler, Service, Submission,
    },
    file::{is_refusal_of_direct, write_all_at},
    lane::NoLane,
};
use std::{
    convert::Infallible,
    fs::File,
    io::{self, IoSlice},
    iter,
    marker::PhantomData,
    mem,
    ops::ControlFlow,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};
use tracing::trace_span;

/// Bytes of one write, on a grid of file offsets.
const EXTENT_BYTES: u64 = 4 << 20;

/// The queue of all that is written.
const FILES: QueueId = QueueId(0);

/// The writing of all files of a save.
pub(super) struct Writing<'a> {
    tensors: &'a [TensorData<'a>],
    targets: Vec<Target>,
    options: &'a SaveOptions,
    go_on: &'a (dyn Fn(u64) -> ControlFlow<()> + Sync),
    devices: Devices,
    /// Why what comes from devices passes memory that is not pinned, if it does.
    unpinned: OnceLock<String>,
    /// Why threads do not stay near the devices, although these are of one node.
    far: OnceLock<String>,
    direct_bytes: AtomicU64,
    buffered_bytes: AtomicU64,
    staged_bytes: AtomicU64,
}

/// The result of a save. Files are groups: their writes, then their syncs.
struct Files<'a> {
    result: Mutex<Result<()>>,
    targets: PhantomData<&'a Target>,
}

/// A step in the writing of a file.
struct Step<'a> {
    target: &'a Target,
    /// What is written; `None` stands for the file's sync.
    extent: Option<ByteRange>,
}

impl<'a> Customer for Files<'a> {
    type Operation = Step<'a>;
    type Group = ();
    type Event = Infallible;
    type Error = Error;

    fn ended(&self, (): (), result: Result<()>) {
        let mut first = lock(&self.result);
        // What stopped the others is the error to tell of, rather than that they were stopped.
        if matches!(*first, Ok(()) | Err(Error::Cancelled)) && result.is_err() {
            *first = result;
        }
    }
}

/// One thread's share of the writing.
struct Writer<'a> {
    writing: &'a Writing<'a>,
    slots: &'a Slots,
}

impl<'a> Handler<Files<'a>> for Writer<'a> {
    fn begin(&mut self, flight: Flight<Files<'a>>) -> Next<Files<'a>> {
        let Step { target, extent } = flight.content;
        let path = target.path.display();
        let result = match extent {
            Some(extent) => trace_span!("write", file = %path, offset = extent.start(), bytes = extent.len())
                .in_scope(|| self.writing.write(target, extent, self.slots)),
            None => trace_span!("sync", file = %path)
                .in_scope(|| target.temp.sync())
                .map_err(|source| io_error("sync", &target.path, source)),
        };
        let (has_failed, scheduler) = (result.is_err(), flight.ticket().scheduler().clone());
        flight.end(result);
        if has_failed {
            scheduler.close(Reason::Closed);
        }
        Next::Ended
    }

    fn settle(&mut self, flight: Flight<Files<'a>>, _: io::Result<usize>) -> Next<Files<'a>> {
        flight.end(Err(Error::Internal("a save has no lane".into())));
        Next::Ended
    }
}

impl<'a> Writing<'a> {
    pub(super) fn new(
        tensors: &'a [TensorData<'a>],
        options: &'a SaveOptions,
        targets: Vec<Target>,
        go_on: &'a (dyn Fn(u64) -> ControlFlow<()> + Sync),
    ) -> Result<Self> {
        let devices = Devices::of(tensors)?;
        let zero = || AtomicU64::new(0);
        Ok(Self {
            tensors,
            targets,
            options,
            go_on,
            devices,
            unpinned: OnceLock::new(),
            far: OnceLock::new(),
            direct_bytes: zero(),
            buffered_bytes: zero(),
            staged_bytes: zero(),
        })
    }

    /// Writes everything, and syncs it if asked to. The files have all their bytes then, but not their names, and those of
    /// a set are closed.
    pub(super) fn run(self, report: &mut SaveReport) -> Result<Vec<TempFile>> {
        let started = Instant::now();
        self.write_all()?;
        self.tell(report);
        report.write_seconds += started.elapsed().as_secs_f64();
        Ok(self.targets.into_iter().map(|target| target.temp).collect())
    }

    fn write_all(&self) -> Result<()> {
        let files = Files { result: Mutex::new(Ok(())), targets: PhantomData };
        let scheduler = Scheduler::new(files, Limits::NONE, &[QueueOptions::default()]);
        let mut steps = 0;
        for target in &self.targets {
            let operations = self.steps(target);
            steps += operations.len();
            let group = Submission { gate: Gate::Stages, ..Submission::new((), operations) };
            scheduler.submit(group).map_err(|refused| Error::from(refused.reason.clone()))?;
        }
        scheduler.seal();
        let near = self.devices.placement(self.tensors);
        // Writes wait more than they compute, and a few in flight keep a drive busy.
        let threads = self.options.threads.unwrap_or_else(|| (2 * near.cores()).clamp(4, 16));
        let threads = threads.min(steps);
        let kind = match self.devices.pinning() {
            Some(device) => SlotKind::Pinned(device, device.info().numa_node),
            None => SlotKind::Host,
        };
        let slots = Slots::new(threads, EXTENT_BYTES as usize, kind)?;
        if let Some(note) = &near.note {
            let _ = self.far.set(note.clone());
        }
        let serve = || {
            let service =
                Service { queues: &[FILES], limit: InFlightLimit::fixed(1), patience: Patience::UntilOver };
            scheduler.serve(NoLane::default(), &mut Writer { writing: self, slots: &slots }, service);
        };
        let serve_near = || {
            if let Err(error) = near.bind() {
                let _ = self.far.set(Placement::unbound(&error));
            }
            serve();
        };
        thread::scope(|scope| {
            let mut started = 0;
            // The caller's thread stays where it is, so it works only where its own place is as good.
            let others = if near.cpus.is_some() { threads } else { threads.saturating_sub(1) };
            while started < others
                && parallel::thread_named("hoistway-save").spawn_scoped(scope, serve_near).is_ok()
            {
                started += 1;
            }
            // As many as the system gives; this one works in any case where there is none.
            if near.cpus.is_none() || started == 0 {
                serve();
            }
        });
        if let Some(note) = unpinned_note(&[&slots], "from") {
            let _ = self.unpinned.set(note);
        }
        mem::replace(&mut *lock(&scheduler.customer().result), Ok(()))
    }

    /// The writes of a file, and its sync if one is asked for.
    fn steps<'s>(&'s self, target: &'s Target) -> Vec<Operation<Step<'s>>> {
        let writes = extents(target.plan.len()).map(|extent| (0, Some(extent)));
        let sync = self.options.sync.then_some((1, None));
        let steps = writes.chain(sync).map(|(order, extent)| Operation {
            queue: FILES,
            charge: Charge::of_bytes(extent.map_or(0, ByteRange::len)),
            order,
            content: Step { target, extent },
        });
        steps.collect()
    }

    fn tell(&self, report: &mut SaveReport) {
        report.files += self.targets.len();
        for target in &self.targets {
            report.tensor_bytes += target.plan.tensor_bytes();
            report.file_bytes += target.plan.len();
            if let Some(why) = target.direct_failed.get().or(target.refused.as_ref()) {
                let path = Some(target.path.clone());
                report.refused.push(Refusal::new("direct writes", path, why.clone()));
            }
        }
        report.direct_bytes += self.direct_bytes.load(Ordering::Relaxed);
        report.buffered_bytes += self.buffered_bytes.load(Ordering::Relaxed);
        report.staged_bytes += self.staged_bytes.load(Ordering::Relaxed);
        add_new(&mut report.notes, self.unpinned.get().cloned());
        add_new(&mut report.notes, self.far.get().cloned());
    }

    fn write(&self, target: &Target, extent: ByteRange, slots: &Slots) -> Result<()> {
        if (self.go_on)(0).is_break() {
            return Err(Error::Cancelled);
        }
        let mut slot = None;
        let whole_blocks = ByteRange::new(extent.start(), Alignment::BLOCK.down(extent.end()));
        let mut rest = extent;
        if let (Some(direct), Some(blocks)) =
            (target.direct(), whole_blocks.filter(|range| !range.is_empty()))
            && self.write_direct(target, direct, blocks, extent, slots, &mut slot)?
        {
            self.direct_bytes.fetch_add(blocks.len(), Ordering::Relaxed);
            rest = ByteRange::new(blocks.end(), extent.end()).unwrap_or_default();
        }
        if !rest.is_empty() {
            self.write_buffered(target, rest, extent, slots, &mut slot)?;
            self.buffered_bytes.fetch_add(rest.len(), Ordering::Relaxed);
        }
        if (self.go_on)(extent.len()).is_break() { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// Writes whole blocks past the page cache; `false` if the file system refuses although it let the file be opened.
    fn write_direct(
        &self,
        target: &Target,
        direct: &File,
        blocks: ByteRange,
        extent: ByteRange,
        slots: &Slots,
        slot: &mut Option<Slot>,
    ) -> Result<bool> {
        let bytes = match self.aligned_in_memory(target, blocks)? {
            Some(bytes) => bytes,
            None => &self.stage(target, extent, slots, slot)?[..blocks.len() as usize],
        };
        let mut slices = [IoSlice::new(bytes)];
        let mut offset = blocks.start();
        match write_all_at(direct, &mut slices, &mut offset, Alignment::BLOCK) {
            Ok(()) => Ok(true),
            Err(error) if is_refusal_of_direct(&error) => {
                let reason = format!("direct writes were refused: {error}");
                if self.options.direct == DirectIo::Always {
                    return Err(refuse_direct(&target.path, &reason));
                }
                let _ = target.direct_failed.set(Unavailable::new(reason, ""));
                Ok(false)
            }
            Err(source) => Err(self.failed(target, offset, blocks, source)),
        }
    }

    fn write_buffered(
        &self,
        target: &Target,
        range: ByteRange,
        extent: ByteRange,
        slots: &Slots,
        slot: &mut Option<Slot>,
    ) -> Result<()> {
        let staged;
        let mut slices = Vec::new();
        if slot.is_some() || self.needs_copies(target, range) {
            staged = self.stage(target, extent, slots, slot)?;
            let start = (range.start() - extent.start()) as usize;
            slices.push(IoSlice::new(&staged[start..start + range.len() as usize]));
        } else {
            // The kernel copies them together from where they are.
            for piece in target.plan.pieces(range) {
                slices.push(IoSlice::new(match piece {
                    Piece::Header(header) => header,
                    Piece::Tensor(tensor, part) => match &self.tensors[tensor].bytes {
                        TensorBytes::Host(bytes) => host_part(bytes, part)?,
                        TensorBytes::Device(_) => return Err(misfit()),
                    },
                }));
            }
        }
        let mut offset = range.start();
        let file = target.temp.file().map_err(|source| self.failed(target, offset, range, source))?;
        write_all_at(file, &mut slices, &mut offset, Alignment::BYTE)
            .map_err(|source| self.failed(target, offset, range, source))
    }

    /// A failure at `offset` of the writing of `range`.
    fn failed(&self, target: &Target, offset: u64, range: ByteRange, source: io::Error) -> Error {
        let range = ByteRange::new(offset, range.end()).unwrap_or(range);
        target.error(self.tensors, range, source)
    }

    /// Bytes of a single tensor that lie in host memory as direct writes need them.
    fn aligned_in_memory(&self, target: &Target, range: ByteRange) -> Result<Option<&'a [u8]>> {
        let mut pieces = target.plan.pieces(range);
        let (Some(Piece::Tensor(tensor, part)), None) = (pieces.next(), pieces.next()) else {
            return Ok(None);
        };
        let TensorBytes::Host(bytes) = self.tensors[tensor].bytes else { return Ok(None) };
        let bytes = host_part(bytes, part)?;
        Ok(Some(bytes).filter(|bytes| Alignment::BLOCK.divides(bytes.as_ptr().addr() as u64)))
    }

    fn needs_copies(&self, target: &Target, range: ByteRange) -> bool {
        target.plan.pieces(range).any(|piece| match piece {
            Piece::Header(_) => false,
            Piece::Tensor(tensor, _) => matches!(self.tensors[tensor].bytes, TensorBytes::Device(_)),
        })
    }

    /// The bytes of an extent, put together in a slot, which is filled but once.
    fn stage<'s>(
        &self,
        target: &Target,
        extent: ByteRange,
        slots: &Slots,
        slot: &'s mut Option<Slot>,
    ) -> Result<&'s [u8]> {
        if slot.is_none() {
            let free = slots.take().ok_or_else(misfit)?;
            *slot = Some(self.devices.gather_in_slot(&target.plan, self.tensors, extent, free)?);
            self.staged_bytes.fetch_add(extent.len(), Ordering::Relaxed);
        }
        let slot = slot.as_mut().ok_or_else(misfit)?;
        slot.as_mut_slice().get(..extent.len() as usize).ok_or_else(misfit)
    }
}

/// The parts that a file of `len` bytes is written in.
pub(super) fn extents(len: u64) -> impl Iterator<Item = ByteRange> {
    let mut start = 0;
    iter::from_fn(move || {
        let end = len.min(start + EXTENT_BYTES);
        let extent = ByteRange::new(start, end).filter(|extent| !extent.is_empty());
        start = end;
        extent
    })
}

#[cfg(test)]
mod tests {
    use super::{
        super::{folder::Folder, plan::PlannedFile},
        *,
    };
    use crate::Dtype;

    #[test]
    fn a_file_is_synced_in_a_stage_after_its_writes() {
        let directory = tempfile::tempdir().unwrap();
        let bytes = vec![0; 3 * EXTENT_BYTES as usize];
        let shape = [bytes.len() as u64];
        let tensors = [TensorData::new("a", Dtype::U8, &shape, TensorBytes::Host(&bytes))];
        let options = SaveOptions::default();
        let path = directory.path().join("model.safetensors");
        let folder = Folder::of_file(&path, true).unwrap();
        let plan = PlannedFile::new(&tensors, &shape, vec![0], None, options.alignment).unwrap();
        let target = Target::new(plan, folder.new_temp().unwrap(), path, &options).unwrap();
        let go_on = |_| ControlFlow::Continue(());
        let writing = Writing::new(&tensors, &options, vec![target], &go_on).unwrap();
        let steps = writing.steps(&writing.targets[0]);
        let stage = |is_write: bool| {
            let of_stage = steps.iter().filter(move |step| step.content.extent.is_some() == is_write);
            of_stage.map(|step| step.order).collect::<Vec<_>>()
        };
        assert_eq!((stage(true).len(), stage(false).len()), (4, 1));
        assert!(stage(true).iter().all(|order| *order < stage(false)[0]));
    }

    #[test]
    fn extents_cover_a_file_once() {
        for len in [1, EXTENT_BYTES - 1, EXTENT_BYTES, EXTENT_BYTES + 1, 3 * EXTENT_BYTES] {
            let mut end = 0;
            for extent in extents(len) {
                assert_eq!(extent.start(), end);
                assert!(!extent.is_empty() && Alignment::BLOCK.divides(extent.start()));
                end = extent.end();
            }
            assert_eq!(end, len);
        }
    }
}
