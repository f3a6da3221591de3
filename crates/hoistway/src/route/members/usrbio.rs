//! `usrbio`: takes files on one 3FS, with memory and rings that its daemon shares.
#![forbid(unsafe_code)]

use crate::{
    Error,
    device::{Device, DeviceId},
    memory::{SlotKind, Slots},
    parallel::lock,
    report::Refusal,
    route::{
        Access, DirectIo, OpenMount, Progress, ReadLane, Route, SharedSlots, Unavailable, UsrbioClient,
        UsrbioFiles, UsrbioLane, host_rings, is_daemon_lost,
        member::{Demand, Facts, Files, Grain, Landing, Member, Share, Stage, Verdict, Wanted},
        registry::NotOpened,
    },
    source::{Source, threefs::ThreeFs},
    sys,
};
use hoistway_io::memory::SharedMemory;
use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

/// Bytes in flight: more of them, and copies find them no longer in the processor's cache.
const IN_FLIGHT_BYTES: u64 = 32 << 20;

#[derive(Debug)]
struct Usrbio {
    files: Arc<UsrbioFiles>,
    /// The longest chunk of the files.
    chunk_bytes: AtomicU64,
    /// The rings that no thread has taken.
    lanes: Mutex<Vec<UsrbioLane>>,
    is_named: bool,
    wants_vendor: bool,
    // Outlives what belongs to it.
    mount: Arc<OpenMount>,
}

/// Opens the 3FS that the first file on one lies on, if the route is named or chooses.
pub(in crate::route) fn open(
    wanted: &Wanted<'_>,
    files: &[&Arc<dyn Source>],
    _: &[Arc<dyn Member>],
) -> Result<Option<Arc<dyn Member>>, NotOpened> {
    let is_named = wanted.route == Route::Usrbio;
    if !is_named && (!wanted.route.chooses() || wanted.copies_on_lanes) {
        return Ok(None);
    }
    if let (true, Some(elsewhere)) = (is_named, files.iter().find(|file| ThreeFs::of(file).is_none())) {
        return Err(NotOpened { path: Some(elsewhere.path().to_owned()), why: not_on_3fs(elsewhere) });
    }
    let Some(first) = files.iter().find_map(|file| ThreeFs::of(file)) else { return Ok(None) };
    if wanted.direct == DirectIo::Never && !is_named {
        return Err(Unavailable::new("switched off by the option direct=never", "").into());
    }
    let (device, path) = (first.file().device(), first.absolute_path());
    let mount = OpenMount::of(device, path, wanted.usrbio, wanted.usrbio_directories)
        .map_err(|why| NotOpened { path: Some(first.path().to_owned()), why })?;
    let (files, chunk_bytes, lanes) = (Arc::default(), AtomicU64::new(0), Mutex::default());
    let wants_vendor = wanted.usrbio == UsrbioClient::Auto;
    Ok(Some(Arc::new(Usrbio { files, chunk_bytes, lanes, is_named, wants_vendor, mount })))
}

fn not_on_3fs(source: &Arc<dyn Source>) -> Unavailable {
    let reason = format!("it lies on {}, and not on a 3FS whose daemon lives", source.medium());
    Unavailable::new(reason, "choose route auto")
}

impl Usrbio {
    fn unavailable(&self, why: Unavailable) -> Error {
        Error::RouteUnavailable { route: Route::Usrbio, path: Some(self.mount.point().to_owned()), why }
    }
}

impl Member for Usrbio {
    fn facts(&self) -> Facts {
        Facts {
            landing: Landing::Shared,
            files: Files::Alone(Access::Direct),
            grain: Grain::AnyBytes,
            chunk_bytes: Some(self.chunk_bytes.load(Ordering::Relaxed)),
            most_lanes: host_rings(),
            ..Facts::of(Route::Usrbio, "hoistway-3fs")
        }
    }

    fn add(&self, source: &Arc<dyn Source>, _: Access) -> Result<bool, Unavailable> {
        let Some(threefs) = ThreeFs::of(source) else {
            return if self.is_named { Err(not_on_3fs(source)) } else { Ok(false) };
        };
        self.files.add(source, || {
            threefs.keep_mount(&self.mount);
            // Asked once: a daemon that hangs does not answer.
            self.chunk_bytes.fetch_max(threefs.file().preferred_bytes(), Ordering::Relaxed);
            self.mount.file(threefs)
        })?;
        Ok(true)
    }

    fn lane(&self, depth: usize) -> Result<Box<ReadLane>, Unavailable> {
        let ready = lock(&self.lanes).pop();
        Ok(Box::new(ready.map_or_else(|| self.mount.lane(self.files.clone(), depth), Ok)?))
    }

    fn open_lanes(&self, count: usize, depth: usize) -> crate::Result<()> {
        let lane = |_| self.mount.lane(self.files.clone(), depth);
        let lanes = (0..count).map(lane).collect::<Result<_, _>>();
        *lock(&self.lanes) = lanes.map_err(|why| self.unavailable(why))?;
        Ok(())
    }

    fn share(&self, demand: &Demand<'_>) -> Share {
        let page = sys::pages::page_size() as u64;
        let longest = demand.longest_bytes;
        let slot_bytes = longest.checked_next_multiple_of(page).unwrap_or(longest).max(page);
        let in_flight = demand.in_flight_bytes.unwrap_or(IN_FLIGHT_BYTES).div_ceil(slot_bytes);
        // To a device one thread starts all copies; to host memory each copies by itself.
        let by_default = if demand.has_device { 1 } else { host_rings() };
        let rings = if demand.is_inline { 1 } else { demand.rings.unwrap_or(by_default) };
        // Beside the reads in flight: to a device as many whose copies are under way, else one that each thread copies.
        let copied = if demand.has_device { in_flight } else { rings as u64 };
        let count = (in_flight + copied).min(demand.budget_bytes / slot_bytes).max(1);
        let slots = usize::try_from(count).unwrap_or(usize::MAX).min(demand.reads).max(1);
        let threads = rings.min(slots);
        let depth = usize::try_from(in_flight).unwrap_or(usize::MAX).min(slots).div_ceil(threads).max(1);
        Share { threads, depth: (depth, depth), slots, slot_bytes }
    }

    fn slots(
        &self,
        count: usize,
        slot_bytes: usize,
        device: Option<&Arc<Device>>,
        numa_node: Option<u32>,
    ) -> crate::Result<Slots> {
        // Slots that are pinned one by one begin at pages.
        let slot_bytes = slot_bytes.next_multiple_of(sys::pages::page_size());
        let memory = self.mount.memory(count.saturating_mul(slot_bytes), numa_node);
        let memory = memory.map_err(|why| self.unavailable(why))?;
        let memory = SharedSlots::new(memory, count, slot_bytes)
            .ok_or_else(|| Error::Internal("shared memory is too short for its slots".into()))?;
        let memory: Arc<dyn SharedMemory> = Arc::new(memory);
        Ok(Slots::new(count, slot_bytes, SlotKind::Shared { memory: &memory, device })?)
    }

    fn verdict(&self, error: &io::Error, _: Progress) -> Verdict {
        if is_daemon_lost(error) { Verdict::Lost } else { Verdict::OfRead }
    }

    fn notes(&self, stage: Stage) -> Vec<String> {
        let (point, client) = (self.mount.point().display(), self.mount.client());
        let note = || format!("usrbio on {point} by the {client} client");
        (stage == Stage::Open).then(note).into_iter().collect()
    }

    fn refusals(&self, _: Option<DeviceId>) -> Vec<Refusal> {
        if !self.wants_vendor || self.mount.client() != UsrbioClient::Native {
            return Vec::new();
        }
        let reason = format!("{}; hoistway's own client reads", self.mount.reason());
        let what = format!("{} by the vendor's library", Route::Usrbio);
        vec![Refusal::new(what, None, Unavailable::new(reason, ""))]
    }
}
