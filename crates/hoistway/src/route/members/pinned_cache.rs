//! `pinned-cache`: has a device copy what the page cache holds from where it lies, and leaves the rest to the routes after
//! it.
//!
//! A window of a file is mapped, pinned for the device, and copied from: no processor copies a byte, and no staging memory is
//! needed. To unpin waits for copies that are under way, so windows stay pinned until the load is over, or hold too much.
#![forbid(unsafe_code)]

use crate::{
    ByteRange, DeviceId,
    device::Device,
    memory::{self, PinnedView, SlotKind, Slots},
    parallel::{lock, thread_named},
    route::{
        Access, Buffer, DirectIo, Done, Lane, ReadLane, ReadOp, Route, Unavailable,
        member::{ALONE, CacheFacts, Demand, Facts, Landing, Member, Share, Stage, Wanted},
        registry::NotOpened,
    },
    source::Source,
};
use bytesize::ByteSize;
use hoistway_io::file::{LocalFile, Probe, Residency};
use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

/// Reads that are pinned at once: to pin a long window costs little more than to pin a short one.
const DEPTH: usize = 16;
/// Reads whose copies are under way besides.
const COPYING: usize = 32;
/// Shorter windows take longer to pin than a processor takes to copy them.
const SHORTEST_BYTES: u64 = 256 << 10;
/// What may stay pinned, as a part of the machine's memory: pages that are pinned cannot be given up for others.
const PINNED_SHARE: u64 = 4;
/// How long the first page of a file system may take to be pinned. Some were reported to hang.
const TRIAL_TIME: Duration = Duration::from_secs(5);
const FIX: &str = "choose route auto or staged";

#[derive(Debug)]
struct PinnedCache {
    windows: Arc<Windows>,
}

/// The windows of one load.
#[derive(Debug)]
struct Windows {
    device: Arc<Device>,
    is_named: bool,
    /// What may stay pinned at once.
    most_bytes: u64,
    /// Those that are pinned.
    pinned: Mutex<Vec<Arc<PinnedView>>>,
    /// Bytes of all that were.
    bytes: AtomicU64,
    /// Why one could not be.
    refused: OnceLock<String>,
}

/// Opens it for a device that can pin what cannot be written, if it is named or the route chooses.
pub(in crate::route) fn open(
    wanted: &Wanted<'_>,
    _: &[&Arc<dyn Source>],
    _: &[Arc<dyn Member>],
) -> Result<Option<Arc<dyn Member>>, NotOpened> {
    let is_named = wanted.route == Route::PinnedCache;
    let may_be_chosen = wanted.route == Route::Auto && !wanted.copies_on_lanes;
    let Some(device) = wanted.device.filter(|_| is_named || may_be_chosen) else { return Ok(None) };
    if !is_named && wanted.direct == DirectIo::Always {
        return Err(Unavailable::new("switched off by the option direct=always", "").into());
    }
    if !is_named && wanted.is_inline {
        return Err(Unavailable::new(ALONE, "").into());
    }
    check(device)?;
    let memory = memory::limits().iter().map(|limit| limit.total_bytes).min();
    let most_bytes = memory.map_or(u64::MAX, |bytes| bytes / PINNED_SHARE);
    let (device, pinned, bytes) = (device.clone(), Mutex::default(), AtomicU64::new(0));
    let windows = Windows { device, is_named, most_bytes, pinned, bytes, refused: OnceLock::new() };
    Ok(Some(Arc::new(PinnedCache { windows: Arc::new(windows) })))
}

/// Whether a device is one that copies from pages of files at the speed of its link.
fn check(device: &Device) -> Result<(), Unavailable> {
    let info = device.info();
    let refuse = |reason: &str| Err(Unavailable::new(format!("{} {reason}", device.name()), FIX));
    if info.is_integrated {
        return refuse("shares the host's memory, and gains nothing from pinned pages");
    }
    if info.uses_host_page_tables {
        return refuse("reaches pages of files by the host's page tables, which is slow");
    }
    if !info.pins_read_only {
        return refuse("pins no memory that cannot be written, as pages of files are");
    }
    Ok(())
}

/// Whether pages of the file system that a file lies on can be pinned: tried once, with the file's first page.
fn try_file_system(device: &Arc<Device>, source: &Arc<dyn Source>) -> Result<(), Unavailable> {
    type Known = HashMap<(u64, DeviceId), Result<(), Unavailable>>;
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    let key = (source.local()?.device(), device.id());
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(verdict) = known().get_or_insert_default().get(&key) {
        return verdict.clone();
    }
    let (tells, hears) = mpsc::channel();
    let (own_device, own_source) = (device.clone(), source.clone());
    let trial = move || {
        let pinned = own_source.local().map_err(|why| why.to_string()).and_then(|local| {
            let first = ByteRange::new(0, local.len_bytes().min(1)).unwrap_or_default();
            pin(&own_device, local, first)
        });
        drop(tells.send(pinned.map(drop)));
    };
    let refuse = |reason: String| Unavailable::new(reason, FIX);
    // A trial that hangs keeps its thread.
    let thread = thread_named("hoistway-trial").spawn(trial);
    thread.map_err(|error| refuse(format!("no thread can be started to try it: {error}")))?;
    let verdict = match hears.recv_timeout(TRIAL_TIME) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(why)) => Err(refuse(format!("pages of its file system cannot be pinned: {why}"))),
        Err(_) => {
            let waited = TRIAL_TIME.as_secs();
            Err(refuse(format!("to pin a page of its file system took longer than {waited} seconds")))
        }
    };
    known().get_or_insert_default().insert(key, verdict.clone());
    verdict
}

fn pin(device: &Arc<Device>, local: &LocalFile, range: ByteRange) -> Result<PinnedView, String> {
    let file = local.buffered_file().map_err(|error| error.to_string())?;
    PinnedView::new(device, &file, range).map_err(|error| error.to_string())
}

impl Member for PinnedCache {
    fn facts(&self) -> Facts {
        Facts {
            landing: Landing::View,
            cache: Some(CacheFacts::PAGES),
            ..Facts::of(Route::PinnedCache, "hoistway-pages")
        }
    }

    fn add(&self, source: &Arc<dyn Source>, _: Access) -> Result<bool, Unavailable> {
        if let Probe::None(why) = source.local()?.probe() {
            return Err(why.clone());
        }
        try_file_system(&self.windows.device, source).map(|()| true)
    }

    fn share(&self, demand: &Demand<'_>) -> Share {
        let slots = (DEPTH + COPYING).min(demand.reads).max(1);
        let depth = DEPTH.min(slots);
        Share { threads: 1, depth: (depth, depth), slots, slot_bytes: demand.longest_bytes }
    }

    fn slots(
        &self,
        count: usize,
        slot_bytes: usize,
        _: Option<&Arc<Device>>,
        _: Option<u32>,
    ) -> crate::Result<Slots> {
        Ok(Slots::new(count, slot_bytes, SlotKind::Views)?)
    }

    fn lane(&self, depth: usize) -> Result<Box<ReadLane>, Unavailable> {
        Ok(Box::new(PinLane { windows: self.windows.clone(), depth, waiting: Vec::new() }))
    }

    fn notes(&self, stage: Stage) -> Vec<String> {
        let mut notes = Vec::new();
        let bytes = self.windows.bytes.load(Ordering::Relaxed);
        if stage == Stage::Over && bytes > 0 {
            notes.push(format!("{} of the page cache were pinned where they lay", ByteSize(bytes)));
        }
        if let (Stage::Over, Some(why)) = (stage, self.windows.refused.get()) {
            notes.push(format!("not all of the page cache could be pinned: {why}"));
        }
        notes
    }
}

impl Drop for PinnedCache {
    fn drop(&mut self) {
        let pinned = std::mem::take(&mut *lock(&self.windows.pinned));
        if !pinned.is_empty() {
            // It takes a third of the time that the load took.
            self.windows.device.drop_aside(pinned);
        }
    }
}

impl Windows {
    /// Pins a window, if so much may be.
    fn pin(&self, local: &LocalFile, range: ByteRange) -> Result<Arc<PinnedView>, String> {
        let mut pinned = lock(&self.pinned);
        if pinned.iter().map(|view| view.len()).sum::<u64>() + range.len() > self.most_bytes {
            // To unpin waits for all copies that are under way.
            pinned.retain(|view| Arc::strong_count(view) > 1);
        }
        drop(pinned);
        let view = Arc::new(pin(&self.device, local, range)?);
        self.bytes.fetch_add(view.len(), Ordering::Relaxed);
        lock(&self.pinned).push(view.clone());
        Ok(view)
    }

    /// Has the slot of a read show its bytes.
    fn show(&self, op: &mut ReadOp, view: &Arc<PinnedView>) -> io::Result<usize> {
        let range = range_of(op);
        let Buffer::Staged { slot: Some(slot), .. } = &mut op.buffer else {
            return Err(io::Error::other("a read from pinned pages has no slot"));
        };
        slot.show(view, range).map_err(io::Error::other)?;
        Ok(op.progress.len)
    }

    /// Pins what reads of neighbouring bytes of one file want.
    fn pin_all(&self, ops: &[ReadOp]) -> Result<Arc<PinnedView>, String> {
        let bounds = ops.first().zip(ops.last());
        let window =
            bounds.and_then(|(first, last)| ByteRange::new(range_of(first).start(), range_of(last).end()));
        let (Some(window), Some(first)) = (window, ops.first()) else {
            return Err("there is nothing to pin".into());
        };
        let source = first.source.clone();
        self.pin(source.local().map_err(|why| why.to_string())?, window)
    }
}

fn range_of(op: &ReadOp) -> ByteRange {
    ByteRange::at(op.progress.offset, op.progress.len as u64).unwrap_or_default()
}

/// Whether the page cache holds what an operation reads.
fn is_held(op: &ReadOp) -> bool {
    let (Ok(local), range) = (op.source.local(), range_of(op)) else { return false };
    match local.probe() {
        Probe::Cachestat => local.buffered_file().is_ok_and(|file| local.probe().is_whole(&file, range)),
        _ => local.residency(range) == Residency::Cached,
    }
}

/// Pins all reads that wait in it at once, those of neighbouring bytes as one window.
struct PinLane {
    windows: Arc<Windows>,
    depth: usize,
    waiting: Vec<ReadOp>,
}

impl Lane<ReadOp> for PinLane {
    fn capacity(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn push(&mut self, op: ReadOp) {
        self.waiting.push(op);
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        let windows = &self.windows;
        let may_pin = windows.is_named || windows.refused.get().is_none();
        let (mut held, others): (Vec<_>, Vec<_>) =
            self.waiting.drain(..).partition(|op| may_pin && is_held(op));
        done.extend(others.into_iter().map(|op| Done { op, result: Ok(0) }));
        held.sort_by_key(|op| (Arc::as_ptr(&op.source).addr(), op.progress.offset));
        while !held.is_empty() {
            let next = held.windows(2).position(|pair| !are_neighbours(&pair[0], &pair[1]));
            let rest = held.split_off(next.map_or(held.len(), |last| last + 1));
            let ops = std::mem::replace(&mut held, rest);
            let bytes: u64 = ops.iter().map(|op| range_of(op).len()).sum();
            if bytes < SHORTEST_BYTES && !windows.is_named {
                done.extend(ops.into_iter().map(|op| Done { op, result: Ok(0) }));
                continue;
            }
            match windows.pin_all(&ops) {
                Ok(view) => done.extend(ops.into_iter().map(|mut op| {
                    let result = windows.show(&mut op, &view);
                    Done { op, result }
                })),
                Err(why) => {
                    let _ = windows.refused.set(why.clone());
                    done.extend(
                        ops.into_iter().map(|op| Done { op, result: Err(io::Error::other(why.clone())) }),
                    );
                }
            }
        }
        Ok(())
    }
}

/// Whether the second of two reads goes on where the first ends.
fn are_neighbours(first: &ReadOp, second: &ReadOp) -> bool {
    Arc::ptr_eq(&first.source, &second.source) && range_of(first).end() == range_of(second).start()
}
