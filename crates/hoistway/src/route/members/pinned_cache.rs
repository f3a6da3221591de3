//! `pinned-cache`: has a device copy what the page cache holds from where it lies, and leaves the rest to the routes after
//! it.
//!
//! A window of a file is mapped, pinned for the device, and copied from: no processor copies a byte, and none passes through
//! staging memory. To unpin waits for copies that are under way, so windows stay pinned until the load is over, or hold too much.
#![forbid(unsafe_code)]

use crate::{
    ByteRange, DeviceId,
    device::Device,
    memory::{self, MemoryLimit, PinnedView, SlotKind, Slots},
    parallel::{lock, thread_named},
    route::{
        Access, Buffer, CarriedRead, DirectIo, Done, Lane, ReadLane, ReadOp, Route, Unavailable,
        member::{ALONE, CacheFacts, Demand, Facts, Landing, Member, Share, Stage, Wanted},
        registry::NotOpened,
    },
    source::Source,
};
use bytesize::ByteSize;
use hoistway_io::file::{LocalFile, Probe};
use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    time::Duration,
};

/// Reads that are pinned at once: to pin a long window costs little more than to pin a short one.
const DEPTH: usize = 16;
/// Reads whose copies are under way besides.
const COPYING: usize = 32;
/// All of them, where each needs memory on the device besides.
const WITH_SCRATCH: usize = 8;
/// The longest window: while the driver pins one, copies of other threads wait.
const LONGEST_BYTES: u64 = 128 << 20;
/// Shorter windows take longer to pin than a processor takes to copy them.
const SHORTEST_BYTES: u64 = 256 << 10;
/// Windows of a load that stay pinned, at most: each is a mapping, and systems limit their number.
const MOST_WINDOWS: usize = 1024;
/// Windows that are let go at once where there are too many.
const FEW_WINDOWS: usize = 16;
/// A route that is chosen pins no more than this part of the machine's memory in one process: the system cannot use pinned pages for
/// anything else.
const PINNED_SHARE: u64 = 4;
/// Nor more than this part of what is free when the load begins.
const PINNED_SHARE_OF_REST: u64 = 2;
/// How long the first page of a file system may take to be read and pinned.
const TRIAL_TIME: Duration = Duration::from_secs(5);
/// So many threads sooner copy files in memory than one pins them, as their pages are small: an H100 with 16 processors got 13 GB/s
/// of them by pinning, and 37 by copying.
const MANY_COPIERS: usize = 8;
/// Loads of up to so many bytes are copied by processors, if there are threads and reads enough. The staging memory that they pass is
/// pinned for later loads too, and a window for one load.
const SMALL_BYTES: u64 = 64 << 20;
/// Bytes of a small load that one thread copies. That this takes about as long as to pin a window is assumed, and was not measured: an H100's
/// driver took 0.9 ms to pin 16 MiB, and processors beside it 2.6 seconds for 8.65 GB by `staged`, which is 1.3 ms for so many bytes
/// (bench/results/gpu-turns.md).
const COPIED_BYTES: u64 = 4 << 20;
const FIX: &str = "choose route auto or staged";

/// Bytes of all windows of this process.
static PINNED_BYTES: AtomicU64 = AtomicU64::new(0);

#[derive(Debug)]
struct PinnedCache {
    windows: Arc<Windows>,
    /// Threads that may copy the same pages.
    copiers: usize,
}

/// The windows of one load.
#[derive(Debug)]
struct Windows {
    device: Arc<Device>,
    is_named: bool,
    /// The bytes that this process may pin at once.
    most_bytes: u64,
    /// Held while one is pinned.
    pinning: Mutex<()>,
    /// The pinned windows, oldest first.
    pinned: Mutex<Vec<Window>>,
    /// How many groups of windows other threads unpin.
    aside: Arc<AtomicUsize>,
    /// Bytes of all that were.
    bytes: AtomicU64,
    /// One could not be pinned, so that no more are.
    has_failed: AtomicBool,
    /// No more are, since staging memory could not be pinned beside them.
    has_made_room: AtomicBool,
    /// The last could not be pinned, as no more may be at once.
    is_full: AtomicBool,
    /// Bytes that processors copied, as no more may be pinned.
    beyond_bytes: AtomicU64,
}

/// A pinned view that the process counts.
#[derive(Debug)]
struct Window(Arc<PinnedView>);

impl Window {
    fn new(view: PinnedView) -> Self {
        PINNED_BYTES.fetch_add(view.len(), Ordering::Relaxed);
        Self(Arc::new(view))
    }

    fn is_used(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        PINNED_BYTES.fetch_sub(self.0.len(), Ordering::Relaxed);
    }
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
    if wanted.direct == DirectIo::Always {
        return Err(Unavailable::new("switched off by the option direct=always", "").into());
    }
    if !is_named && wanted.is_inline {
        return Err(Unavailable::new(ALONE, "").into());
    }
    check(device).map_err(|reason| Unavailable::new(reason, if is_named { FIX } else { "" }))?;
    // A thread has a read, or nothing to do.
    let copiers = wanted.copiers.min(wanted.reads) as u64;
    let copied = copiers.saturating_mul(COPIED_BYTES).min(SMALL_BYTES);
    if !is_named && wanted.read_bytes <= copied {
        let reason = "the load is small, and little of it comes to each thread that may copy";
        return Err(Unavailable::new(reason, "").into());
    }
    let share = |limit: MemoryLimit| {
        (limit.total_bytes / PINNED_SHARE).min(limit.available_bytes / PINNED_SHARE_OF_REST)
    };
    let most_bytes = memory::limits().into_iter().map(share).min().unwrap_or(u64::MAX);
    let windows = Windows::new(device.clone(), is_named, most_bytes);
    Ok(Some(Arc::new(PinnedCache { windows: Arc::new(windows), copiers: wanted.copiers })))
}

/// Whether a device is one that copies from pages of files at the speed of its link.
fn check(device: &Device) -> Result<(), String> {
    let info = device.info();
    let refuse = |reason: &str| Err(format!("{} {reason}", device.name()));
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

/// Whether pages of the file system that a file lies on can be pinned: tried once, with the file's first page. That is read on
/// another thread and before the driver is asked, so that a file system that hangs holds neither up. As long as a trial hangs, there is
/// no other.
fn try_file_system(device: &Arc<Device>, source: &Arc<dyn Source>) -> Result<(), String> {
    type Known = HashMap<(u64, DeviceId), Result<(), String>>;
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    let local =
        |source: &Arc<dyn Source>| source.local().map(LocalFile::device).map_err(|why| why.to_string());
    let key = (local(source)?, device.id());
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let keep = move |known: &mut Option<Known>, verdict: Result<(), String>| {
        known.get_or_insert_default().insert(key, verdict);
    };
    if let Some(verdict) = known().get_or_insert_default().get(&key) {
        return verdict.clone();
    }
    let (tells, hears) = mpsc::channel();
    let (own_device, own_source) = (device.clone(), source.clone());
    let trial = move || {
        let first = ByteRange::at(0, 1).unwrap_or_default();
        let tried = pin(&own_device, &own_source, first, true);
        let (verdict, is_lasting) = match &tried {
            Ok(_) => (Ok(()), true),
            Err(hoistway_io::Error::Device(error)) => {
                let reason = format!("pages of its file system cannot be pinned: {error}");
                (Err(reason), refuses_for_good(error))
            }
            // It may be this file or this moment: the load finds out.
            Err(_) => (Ok(()), false),
        };
        // To unpin waits for work of the device, and the load does not wait for that. Before the verdict is told: what waits for the end of
        // all that is let go of finds it.
        hoistway_device::drop_aside(tried.ok());
        let mut known = known();
        // In place of what a load has kept that did not wait so long. The next load tries again, if it may be the moment.
        match is_lasting {
            true => keep(&mut known, verdict.clone()),
            false => drop(known.get_or_insert_default().remove(&key)),
        }
        drop(tells.send(verdict));
    };
    // A trial that hangs keeps its thread.
    thread_named("hoistway-trial")
        .spawn(trial)
        .map_err(|error| format!("no thread can be started to try it: {error}"))?;
    hears.recv_timeout(TRIAL_TIME).unwrap_or_else(|_| {
        let mut known = known();
        // It may have ended just now.
        hears.try_recv().unwrap_or_else(|_| {
            let waited = TRIAL_TIME.as_secs();
            let verdict = Err(format!("its first page could not be pinned within {waited} seconds"));
            keep(&mut known, verdict.clone());
            verdict
        })
    })
}

/// Whether a driver that fails to pin pages says that of the pages, rather than of the moment.
fn refuses_for_good(error: &hoistway_device::Error) -> bool {
    const INVALID_VALUE: i32 = 1;
    let is_of_pages =
        matches!(error, hoistway_device::Error::Device { source, .. } if source.code == INVALID_VALUE);
    is_of_pages || error.is_unsupported()
}

fn pin(
    device: &Arc<Device>,
    source: &Arc<dyn Source>,
    range: ByteRange,
    reads_ahead: bool,
) -> Result<PinnedView, hoistway_io::Error> {
    let opening = |error| hoistway_io::Error::opening(source.path(), error);
    let local = source.local().map_err(|why| opening(io::Error::other(why.to_string())))?;
    let file = local.buffered_file().map_err(opening)?;
    PinnedView::new(device, &file, range, reads_ahead)
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
        let fix = if self.windows.is_named { FIX } else { "" };
        match source.local()?.probe() {
            Probe::Memory if !self.windows.is_named && self.copiers >= MANY_COPIERS => {
                let reason =
                    "the file lives in memory, where many threads copy faster than a device's driver pins";
                return Err(Unavailable::new(reason, ""));
            }
            Probe::Cachestat | Probe::Memory => {}
            Probe::None(why) => return Err(why.clone()),
            // To pin a page that is not there reads it, and says nothing.
            Probe::Nowait => {
                let reason = "the system does not say what its cache holds of a file that is another's and that one \
                              may not write";
                return Err(Unavailable::new(reason, fix));
            }
        }
        let tried = try_file_system(&self.windows.device, source);
        tried.map(|()| true).map_err(|reason| Unavailable::new(reason, fix))
    }

    fn share(&self, demand: &Demand<'_>) -> Share {
        let (slot_bytes, beside) = demand.slot_bytes;
        let most = match beside {
            0 => DEPTH + COPYING,
            // Each has memory of the device of its own then, and a table that is pinned.
            _ => {
                let affordable = demand.budget_bytes / (slot_bytes + beside).max(1);
                WITH_SCRATCH.min(usize::try_from(affordable).unwrap_or(usize::MAX))
            }
        };
        let slots = most.min(demand.reads).max(1);
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

    fn make_room(&self) -> bool {
        let windows = &self.windows;
        windows.has_made_room.store(true, Ordering::Relaxed);
        // What is being pinned now is seen, and what another caller unpins is waited for.
        let _pinning = lock(&windows.pinning);
        let (unused, used) = {
            let mut pinned = lock(&windows.pinned);
            let unused: Vec<_> = pinned.extract_if(.., |window| !window.is_used()).collect();
            (unused, pinned.len())
        };
        let had = !unused.is_empty();
        drop(unused);
        had || used > 0 || windows.aside.load(Ordering::Acquire) > 0
    }

    fn goes_on(&self) -> bool {
        let Windows { is_named, has_failed, has_made_room, is_full, .. } = &*self.windows;
        *is_named
            || [has_failed, has_made_room, is_full].iter().all(|is_over| !is_over.load(Ordering::Relaxed))
    }

    fn notes(&self, stage: Stage) -> Vec<String> {
        if stage != Stage::Over {
            return Vec::new();
        }
        let bytes =
            |of: &AtomicU64| Some(of.load(Ordering::Relaxed)).filter(|&bytes| bytes > 0).map(ByteSize);
        let pinned = bytes(&self.windows.bytes);
        let beyond = bytes(&self.windows.beyond_bytes);
        let pinned = pinned.map(|bytes| format!("{bytes} of the page cache were pinned where they lay"));
        let beyond = beyond.map(|bytes| {
            let most = ByteSize(self.windows.most_bytes);
            format!(
                "{bytes} of the page cache were copied by processors: one process pins at most {most}, and one load \
                 {MOST_WINDOWS} windows"
            )
        });
        let made_room = pinned.is_some() && self.windows.has_made_room.load(Ordering::Relaxed);
        let made_room = made_room.then(|| {
            "pages of the page cache were unpinned, and no more pinned, since staging memory could not be pinned beside them"
                .into()
        });
        pinned.into_iter().chain(beyond).chain(made_room).collect()
    }
}

impl Drop for PinnedCache {
    fn drop(&mut self) {
        let pinned = std::mem::take(&mut *lock(&self.windows.pinned));
        if !pinned.is_empty() {
            // It takes a third of the time that the load took.
            hoistway_device::drop_aside(pinned);
        }
    }
}

/// Windows that another thread unpins.
struct Aside(Vec<Window>, Arc<AtomicUsize>);

impl Aside {
    fn new(windows: Vec<Window>, count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(windows, count.clone())
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        self.0.clear();
        self.1.fetch_sub(1, Ordering::Release);
    }
}

impl Windows {
    fn new(device: Arc<Device>, is_named: bool, most_bytes: u64) -> Self {
        Self {
            device,
            is_named,
            most_bytes,
            pinning: Mutex::default(),
            pinned: Mutex::default(),
            aside: Arc::default(),
            bytes: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
            has_made_room: AtomicBool::new(false),
            is_full: AtomicBool::new(false),
            beyond_bytes: AtomicU64::new(0),
        }
    }

    /// Pins what reads of neighbouring bytes of one file want. `None` if no more may be pinned.
    fn pin(
        &self,
        source: &Arc<dyn Source>,
        range: ByteRange,
    ) -> Result<Option<Arc<PinnedView>>, hoistway_io::Error> {
        let _pinning = lock(&self.pinning);
        if self.has_made_room.load(Ordering::Relaxed) && !self.is_named {
            return Ok(None);
        }
        if !self.has_room(range.len()) && !self.is_named {
            self.beyond_bytes.fetch_add(range.len(), Ordering::Relaxed);
            self.is_full.store(true, Ordering::Relaxed);
            return Ok(None);
        }
        self.is_full.store(false, Ordering::Relaxed);
        let window = Window::new(pin(&self.device, source, range, is_in_memory(source))?);
        let view = window.0.clone();
        self.bytes.fetch_add(view.len(), Ordering::Relaxed);
        lock(&self.pinned).push(window);
        Ok(Some(view))
    }

    /// Whether a window of so many bytes has room. If not, windows are let go that nothing copies from any more, the oldest first:
    /// on another thread, as that waits for all work of the device, the program's too.
    fn has_room(&self, bytes: u64) -> bool {
        let few = {
            let mut pinned = lock(&self.pinned);
            let taken = PINNED_BYTES.load(Ordering::Relaxed).saturating_add(bytes);
            if pinned.len() < MOST_WINDOWS && taken <= self.most_bytes {
                return true;
            }
            let few: Vec<_> = pinned.extract_if(.., |window| !window.is_used()).take(FEW_WINDOWS).collect();
            // Counted before they are missed.
            (!few.is_empty()).then(|| Aside::new(few, &self.aside))
        };
        if let Some(few) = few {
            hoistway_device::drop_aside(few);
        }
        false
    }
}

fn range_of(op: &ReadOp) -> ByteRange {
    ByteRange::at(op.progress.offset, op.progress.len as u64).unwrap_or_default()
}

/// Whether a file is in memory: several threads map its pages before they are pinned, as the driver would map one after the other, and
/// wait for those that were swapped out.
fn is_in_memory(source: &Arc<dyn Source>) -> bool {
    source.local().is_ok_and(|local| local.probe() == Probe::Memory)
}

/// Whether the page cache holds what an operation reads.
fn is_held(op: &ReadOp) -> bool {
    op.source.local().is_ok_and(|local| local.is_whole(range_of(op)))
}

/// Has the slot of a read show its bytes.
fn show(op: &mut ReadOp, view: &Arc<PinnedView>) -> io::Result<usize> {
    let range = range_of(op);
    let Buffer::Staged { slot: Some(slot), .. } = &mut op.buffer else {
        return Err(io::Error::other("a read from pinned pages has no slot"));
    };
    slot.show(view, range).map_err(io::Error::other)?;
    Ok(op.progress.len)
}

/// How many of the first reads, which are in order, are of neighbouring bytes of one file, and no more than a window holds.
fn first_window(ops: &[CarriedRead]) -> usize {
    let Some(first) = ops.first() else { return 0 };
    let start = range_of(first).start();
    let goes_on = |pair: &[CarriedRead]| {
        Arc::ptr_eq(&pair[0].source, &pair[1].source)
            && range_of(&pair[0]).end() == range_of(&pair[1]).start()
            && range_of(&pair[1]).end() - start <= LONGEST_BYTES
    };
    1 + ops.windows(2).take_while(|pair| goes_on(pair)).count()
}

/// Pins all reads that wait in it at once, those of neighbouring bytes as one window.
struct PinLane {
    windows: Arc<Windows>,
    depth: usize,
    waiting: Vec<CarriedRead>,
}

impl Lane<CarriedRead> for PinLane {
    fn capacity(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn push(&mut self, op: CarriedRead) {
        self.waiting.push(op);
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        let windows = &self.windows;
        let may_pin = windows.is_named || !windows.has_failed.load(Ordering::Relaxed);
        let (mut held, missed): (Vec<_>, Vec<_>) =
            self.waiting.drain(..).partition(|op| may_pin && is_held(op));
        // None of their bytes are there: the routes after this one read them.
        let miss = |op| Done { op, result: Ok(0) };
        done.extend(missed.into_iter().map(miss));
        held.sort_by_key(|op| (Arc::as_ptr(&op.source).addr(), op.progress.offset));
        while let Some(first) = held.first() {
            let source = first.source.clone();
            let rest = held.split_off(first_window(&held));
            let ops = std::mem::replace(&mut held, rest);
            let bounds = ops.first().zip(ops.last());
            let range = bounds
                .and_then(|(first, last)| ByteRange::new(range_of(first).start(), range_of(last).end()));
            let range = range.unwrap_or_default();
            if range.len() < SHORTEST_BYTES && !windows.is_named {
                done.extend(ops.into_iter().map(miss));
                continue;
            }
            match windows.pin(&source, range) {
                Ok(None) => done.extend(ops.into_iter().map(miss)),
                Ok(Some(view)) => done.extend(ops.into_iter().map(|mut op| {
                    let result = show(&mut op, &view);
                    Done { op, result }
                })),
                Err(error) => {
                    windows.has_failed.store(true, Ordering::Relaxed);
                    let why = error.to_string();
                    let fail = |op| Done { op, result: Err(io::Error::other(why.clone())) };
                    done.extend(ops.into_iter().map(fail));
                }
            }
        }
        Ok(())
    }
}

#[cfg(all(test, feature = "toy-device"))]
mod tests {
    use super::*;
    use crate::catalog::{Catalog, OpenOptions};
    use std::fs;

    /// What is full may have room again, when windows are unpinned.
    #[test]
    fn it_goes_on_when_windows_are_pinned_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("m.safetensors");
        let header = br#"{"t":{"dtype":"U8","shape":[8192],"data_offsets":[0,8192]}}"#;
        let len = (header.len() as u64).to_le_bytes();
        fs::write(&path, [&len[..], header, &[1; 8192]].concat()).unwrap();
        let (_, sources) = Catalog::open_sources(&[&path], &OpenOptions::default()).unwrap();
        let windows = Windows::new(Device::open(DeviceId::Toy(0)).unwrap(), false, 0);
        let mut member = PinnedCache { windows: Arc::new(windows), copiers: 1 };
        let first = ByteRange::at(0, 4096).unwrap();
        assert!(member.goes_on());
        assert!(member.windows.pin(&sources[0], first).unwrap().is_none());
        assert!(!member.goes_on(), "it is full");
        Arc::get_mut(&mut member.windows).unwrap().most_bytes = 1 << 30;
        assert!(member.windows.pin(&sources[0], first).unwrap().is_some());
        assert!(member.goes_on(), "a window is pinned again");
    }
}
