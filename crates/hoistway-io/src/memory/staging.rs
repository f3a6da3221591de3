//! Host memory that devices copy from: pinned in long pieces, and kept for each device of the process between its uses.
//!
//! To pin memory takes longer than to read into it, and the driver pins for one thread at a time. So threads that are about to fill a
//! segment touch it side by side, one of them pins it by one call, and the next load finds it pinned. Where the system lets too little
//! be pinned for whole segments, slots are pinned one by one, and those that it refuses are not used.
#![allow(unsafe_code)]

use super::{HUGE_PAGE_BYTES, Mapping, PageKind, Pinning, off_node};
use crate::{ByteRange, Error, Result, parallel::lock};
use bytesize::ByteSize;
use hoistway_device::{Device, Pinned, drop_aside, keep_while_used, look_again, on_idle, on_release};
use std::{
    io,
    mem::ManuallyDrop,
    process,
    ptr::NonNull,
    sync::{
        Arc, Mutex, Once, OnceLock,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    time::Instant,
};

/// The longest segment, unless one slot is longer: the first slots of a load should not wait until all are touched.
const SEGMENT_BYTES: usize = 32 << 20;
/// Bytes that are kept for one device, at most: as many as a load has.
const KEPT_BYTES: usize = 128 << 20;

/// Host memory that is pinned for a device by one call.
#[derive(Debug)]
struct Segment {
    device: Arc<Device>,
    node: Option<u32>,
    /// What a report says if it is not on that node.
    off_node: Option<String>,
    pinned: OnceLock<Pinned>,
    /// For each slot, if it could not be pinned as a whole. None of a segment that is kept are.
    parts: Box<[OnceLock<Pinned>]>,
    mapping: ManuallyDrop<Mapping>,
    /// Where the next thread begins to touch it.
    untouched: AtomicUsize,
}

impl Segment {
    fn new(device: &Arc<Device>, node: Option<u32>, len: usize) -> io::Result<Self> {
        let kind = PageKind::TransparentHuge;
        let (mut mapping, refusal) = Mapping::anonymous_near(len, kind, node)?;
        let off_node = node.zip(refusal).map(|(node, error)| off_node("staging memory", node, &error));
        // A child of fork has no use for it, and a page that a read is filling must not become a copy.
        mapping.hide_from_children();
        Ok(Self {
            device: device.clone(),
            node,
            off_node,
            pinned: OnceLock::new(),
            parts: Box::default(),
            mapping: ManuallyDrop::new(mapping),
            untouched: AtomicUsize::new(0),
        })
    }

    fn len(&self) -> usize {
        self.mapping.len()
    }

    fn is_pinned(&self) -> bool {
        self.pinned.get().is_some()
    }

    /// Pins it all, unless it is pinned. One thread calls this at a time.
    fn pin(&self) -> hoistway_device::Result<()> {
        self.pin_range(&self.pinned, 0, self.len())
    }

    /// Pins one of the slots that it is divided in.
    fn pin_part(&self, part: usize) -> hoistway_device::Result<()> {
        let len = self.len() / self.parts.len();
        self.pin_range(&self.parts[part], part * len, len)
    }

    fn pin_range(&self, place: &OnceLock<Pinned>, start: usize, len: usize) -> hoistway_device::Result<()> {
        if place.get().is_none() {
            // SAFETY: it is unmapped after it was unpinned.
            let pinned = unsafe { Pinned::new(&self.device, self.mapping.pointer(start).as_ptr(), len)? };
            // No other thread has pinned it in the meantime.
            let _ = place.set(pinned);
        }
        Ok(())
    }

    /// Touches what no other thread has touched or is touching. Where the system cannot do that ahead, the driver does.
    fn touch(&self) {
        loop {
            let start = self.untouched.fetch_add(HUGE_PAGE_BYTES, Ordering::Relaxed);
            let end = start.saturating_add(HUGE_PAGE_BYTES).min(self.len());
            let Some(range) = ByteRange::new(start as u64, end as u64).filter(|range| !range.is_empty())
            else {
                return;
            };
            if self.mapping.populate(range).is_err() {
                return self.untouched.store(self.len(), Ordering::Relaxed);
            }
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // Memory that may be pinned still keeps its address, so that no other memory gets it.
        let pinned = self.parts.iter_mut().chain([&mut self.pinned]).filter_map(OnceLock::take);
        if Pinned::unpin_all(pinned) {
            // SAFETY: dropped once, and not used again.
            unsafe { ManuallyDrop::drop(&mut self.mapping) };
        }
    }
}

/// Segments for slots of one length. Given back when it is dropped.
#[derive(Debug)]
pub(super) struct Staging {
    segments: Vec<Segment>,
    /// For each slot its segment, and its number there.
    places: Box<[(usize, usize)]>,
    slot_bytes: usize,
    /// Held while the driver pins: it does so for one thread at a time.
    limit: Mutex<Limit>,
}

/// How much the system lets be pinned.
#[derive(Debug, Default)]
enum Limit {
    /// As much as was asked for so far.
    #[default]
    Unknown,
    /// Less than a segment more.
    Slots,
    /// Less than a slot more, for this reason.
    Reached(String),
}

impl Staging {
    /// Memory for `count` slots of `slot_bytes`, whole pages, to copy to a device from; on a node, if one is given. What is pinned
    /// comes first.
    ///
    /// # Errors
    /// [`Error::Allocation`].
    pub(super) fn new(
        device: &Arc<Device>,
        node: Option<u32>,
        count: usize,
        slot_bytes: usize,
    ) -> Result<Self> {
        let (segments, places, limit) = (Vec::new(), Box::default(), Mutex::default());
        let mut staging = Self { segments, places, slot_bytes, limit };
        let mut missing = count;
        let slots_in = |segment: &Segment| segment.len() / slot_bytes.max(1);
        while missing > 0 {
            let Some(segment) = take(device, node, slot_bytes, missing) else { break };
            missing = missing.saturating_sub(slots_in(&segment));
            staging.segments.push(segment);
        }
        if missing > 0 {
            // What is kept and does not do would be pinned beside what is made now.
            drop(let_go(|idle| Arc::ptr_eq(&idle.device, device)));
        }
        while missing > 0 {
            let slots = (SEGMENT_BYTES / slot_bytes.max(1)).clamp(1, missing);
            let len = slots * slot_bytes;
            let no_memory = |source| Error::Allocation { bytes: len as u64, kind: "staging memory", source };
            staging.segments.push(Segment::new(device, node, len).map_err(no_memory)?);
            missing -= slots;
        }
        for segment in &mut staging.segments {
            // Those that were kept may be somewhat longer than their slots, and are pinned as a whole.
            segment.parts = (0..slots_in(segment)).map(|_| OnceLock::new()).collect();
        }
        let places = staging
            .segments
            .iter()
            .enumerate()
            .flat_map(|(number, segment)| (0..segment.parts.len()).map(move |slot| (number, slot)));
        staging.places = places.take(count).collect();
        Ok(staging)
    }

    /// Address of a slot.
    pub(super) fn pointer(&self, slot: usize) -> NonNull<u8> {
        let (segment, number) = self.places[slot];
        self.segments[segment].mapping.pointer(number * self.slot_bytes)
    }

    /// Pins the segment that a slot is in; the slot alone where the system does not let as much be pinned.
    /// [`Short`](Pinning::Short) if it lets no more be pinned, and other slots are.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn pin(&self, slot: usize) -> hoistway_device::Result<Pinning> {
        if self.pinned(slot).is_some() {
            return Ok(Pinning::Ready);
        }
        let (number, part) = self.places[slot];
        let segment = &self.segments[number];
        // Threads that come here at once share the work.
        segment.touch();
        let mut limit = lock(&self.limit);
        if self.pinned(slot).is_some() {
            return Ok(Pinning::Ready);
        }
        if let Limit::Unknown = *limit {
            let is_pinned = || match segment.pin() {
                Err(error) if is_shortage(&error) => Ok(false),
                pinned => pinned.map(|()| true),
            };
            // What is kept for other devices, or for slots of another length, counts too.
            if is_pinned()? || (release_idle_staging() && is_pinned()?) {
                return Ok(Pinning::Ready);
            }
            *limit = Limit::Slots;
        }
        let has_pinned = || (0..self.places.len()).any(|other| self.pinned(other).is_some());
        if matches!(*limit, Limit::Reached(_)) && has_pinned() {
            return Ok(Pinning::Short);
        }
        match segment.pin_part(part) {
            Err(error) if is_shortage(&error) && has_pinned() => {
                *limit = Limit::Reached(error.to_string());
                Ok(Pinning::Short)
            }
            pinned => pinned.map(|()| Pinning::Ready),
        }
    }

    /// What pins a slot, if it is pinned.
    pub(super) fn pinned(&self, slot: usize) -> Option<&Pinned> {
        let (segment, part) = self.places[slot];
        let segment = &self.segments[segment];
        segment.pinned.get().or_else(|| segment.parts[part].get())
    }

    /// Why some of it is not on the node that was asked for.
    pub(super) fn off_node(&self) -> Option<String> {
        self.segments.iter().find_map(|segment| segment.off_node.clone())
    }

    /// How much is pinned, and why no more is, if the system has refused some.
    pub(super) fn shortage(&self) -> Option<String> {
        let limit = lock(&self.limit);
        let why = match &*limit {
            Limit::Unknown => return None,
            Limit::Slots => None,
            Limit::Reached(why) => Some(why),
        };
        let slots = (0..self.places.len()).filter(|&slot| self.pinned(slot).is_some()).count();
        // If there are none, the error tells.
        (slots > 0).then(|| shortage_of(slots * self.slot_bytes, why.map(String::as_str)))
    }
}

/// What a report says where the system has refused to pin more than `pinned` bytes, or more than one slot at a time.
pub(super) fn shortage_of(pinned: usize, why_no_more: Option<&str>) -> String {
    let pinned = ByteSize(pinned as u64);
    let why = why_no_more.map_or_else(|| "in pieces of one slot".into(), |why| format!("and no more: {why}"));
    format!("{pinned} of staging memory were pinned, {why}")
}

/// Whether the system lets too little memory be pinned.
pub(super) fn is_shortage(error: &hoistway_device::Error) -> bool {
    matches!(error, hoistway_device::Error::Allocation { .. })
}

impl Drop for Staging {
    fn drop(&mut self) {
        keep(std::mem::take(&mut self.segments));
    }
}

/// What is kept for the devices of the process.
struct Kept {
    segments: Vec<Idle>,
}

struct Idle {
    segment: Segment,
    since: Instant,
}

static KEPT: Mutex<Kept> = Mutex::new(Kept { segments: Vec::new() });
/// The process whose they are. A child of `fork` has none of them, and the lock may be held in its copy for ever.
static PROCESS: AtomicU32 = AtomicU32::new(0);

fn is_foreign() -> bool {
    let own = process::id();
    PROCESS.compare_exchange(0, own, Ordering::AcqRel, Ordering::Acquire).is_err_and(|other| other != own)
}

/// Takes a segment with room for slots of this length out of what is kept: the shortest that has all that are missing, or the longest.
fn take(device: &Arc<Device>, node: Option<u32>, slot_bytes: usize, missing: usize) -> Option<Segment> {
    if is_foreign() {
        return None;
    }
    let mut kept = lock(&KEPT);
    let has_all = |len: usize| len / slot_bytes.max(1) >= missing;
    let fitting = kept.segments.iter().enumerate().filter(|(_, Idle { segment, .. })| {
        // Not one of which slots of this length leave much unused.
        let used = segment.len() / slot_bytes.max(1) * slot_bytes;
        Arc::ptr_eq(&segment.device, device) && segment.node == node && used >= segment.len() / 8 * 7
    });
    let best = fitting.max_by_key(|(_, Idle { segment, .. })| {
        let len = segment.len();
        (has_all(len), if has_all(len) { usize::MAX - len } else { len })
    });
    let position = best?.0;
    Some(kept.segments.swap_remove(position).segment)
}

/// Keeps segments that are pinned for devices that the process keeps. Others are let go, and so are the shortest if there are too many.
fn keep(segments: Vec<Segment>) {
    if is_foreign() {
        return;
    }
    static RELEASES: Once = Once::new();
    RELEASES.call_once(|| {
        on_release(|device| drop(let_go(|idle| Arc::ptr_eq(&idle.device, device))));
        on_idle(give_back);
    });
    let since = Instant::now();
    let mut kept = lock(&KEPT);
    let is_wanted = |segment: &mut Segment| segment.is_pinned() && segment.device.is_kept();
    let (wanted, mut gone): (Vec<_>, Vec<_>) = {
        let mut segments = segments;
        let wanted = segments.extract_if(.., is_wanted).collect();
        (wanted, segments)
    };
    for segment in wanted {
        let device = segment.device.clone();
        kept.segments.push(Idle { segment, since });
        gone.extend(kept.beyond(&device));
    }
    let is_empty = kept.segments.is_empty();
    // Without the lock: to unpin waits for the device.
    drop(kept);
    drop(gone);
    if !is_empty && !keep_while_used() {
        // No thread would ever let them go.
        drop(let_go(|_| true));
    }
}

impl Kept {
    /// Takes the shortest segments of a device out, as long as there are too many.
    fn beyond(&mut self, device: &Arc<Device>) -> Vec<Segment> {
        let mut gone = Vec::new();
        loop {
            let own = self
                .segments
                .iter()
                .enumerate()
                .filter(|(_, idle)| Arc::ptr_eq(&idle.segment.device, device));
            let lengths: Vec<_> = own.map(|(position, idle)| (idle.segment.len(), position)).collect();
            let bytes: usize = lengths.iter().map(|(len, _)| len).sum();
            match lengths.into_iter().min() {
                Some((_, shortest)) if bytes > KEPT_BYTES => {
                    gone.push(self.segments.swap_remove(shortest).segment)
                }
                _ => return gone,
            }
        }
    }
}

/// Takes segments out of what is kept.
fn let_go(is_meant: impl Fn(&Segment) -> bool) -> Vec<Segment> {
    if is_foreign() {
        return Vec::new();
    }
    let mut kept = lock(&KEPT);
    let gone: Vec<_> =
        kept.segments.extract_if(.., |idle| is_meant(&idle.segment)).map(|idle| idle.segment).collect();
    let is_empty = kept.segments.is_empty();
    drop(kept);
    if is_empty && !gone.is_empty() {
        // The thread may have nothing more to wait for.
        look_again();
    }
    gone
}

/// Lets all pinned memory go that is kept for later uses. Returns whether there was any.
pub fn release_idle_staging() -> bool {
    !let_go(|_| true).is_empty()
}

/// Lets go what nothing has used for long.
fn give_back(is_old: &dyn Fn(Instant) -> bool) -> Option<Instant> {
    let mut kept = lock(&KEPT);
    let gone = kept.segments.extract_if(.., |idle| is_old(idle.since)).map(|idle| idle.segment);
    let gone: Vec<_> = gone.collect();
    let oldest = kept.segments.iter().map(|idle| idle.since).min();
    drop(kept);
    if !gone.is_empty() {
        // The end of the process waits for that, so that the driver is not gone meanwhile.
        drop_aside(gone);
    }
    oldest
}
