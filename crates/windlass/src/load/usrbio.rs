//! USRBIO's part in a load: which files lie on a 3FS, and the memory and rings that they are read through.
#![forbid(unsafe_code)]

use super::{
    DirectIo, LoadOptions,
    job::{ALONE, Place},
};
use crate::{
    Alignment, Error, Result, memory,
    memory::{SlotKind, Slots},
    parallel::lock,
    plan::{Extent, Plan, PlanOptions},
    report::Refusal,
    route::{OpenMount, Route, SourceFile, Unavailable, UsrbioClient, UsrbioFiles, UsrbioLane, host_rings},
    sys,
};
use std::sync::{Arc, Mutex};

/// Bytes in flight: more of them, and copies find them no longer in the processor's cache.
const IN_FLIGHT_BYTES: u64 = 32 << 20;
/// Longest chunk of a file that reads are made as long as.
const MAX_CHUNK_BYTES: u64 = 32 << 20;

/// What a load will read by USRBIO.
#[derive(Debug)]
pub(super) struct Shared {
    mount: Arc<OpenMount>,
    files: Arc<UsrbioFiles>,
    /// Whether each file of the catalog is among them.
    takes: Vec<bool>,
    /// The longest chunk of theirs.
    file_chunk_bytes: u64,
}

impl Shared {
    /// Opens the 3FS that a load of `plan` reads from, if its route may or must. Adds to `refused` why files are not read
    /// from there, if they need not.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`] if the caller named the route and it cannot be.
    pub(super) fn find(
        plan: &Plan,
        sources: &[Arc<SourceFile>],
        options: &LoadOptions,
        is_inline: bool,
        refused: &mut Vec<Refusal>,
    ) -> Result<Option<Self>> {
        let is_named = options.route == Route::Usrbio;
        if !is_named && !options.route.chooses() {
            return Ok(None);
        }
        let mut used: Vec<usize> = plan.extents().iter().map(|extent| extent.file.index()).collect();
        used.dedup();
        let (on_3fs, elsewhere): (Vec<usize>, Vec<usize>) =
            used.into_iter().partition(|&file| sources[file].is_on_3fs());
        let mut refuse = |source: Option<&SourceFile>, why: Unavailable| match source {
            Some(source) if is_named => {
                let path = Some(source.path().to_owned());
                Err(Error::RouteUnavailable { route: Route::Usrbio, path, why })
            }
            _ => {
                let path = source.map(|source| source.path().to_owned());
                refused.push(Refusal { what: Route::Usrbio.to_string(), path, why });
                Ok(())
            }
        };
        if let (true, Some(&file)) = (is_named, elsewhere.first()) {
            let filesystem = sources[file].filesystem();
            let reason = format!("it lies on {filesystem}, and not on a 3FS whose daemon lives");
            refuse(Some(&sources[file]), Unavailable::new(reason, "choose route auto"))?;
        }
        let Some(&first) = on_3fs.first() else { return Ok(None) };
        if options.direct == DirectIo::Never {
            refuse(None, Unavailable::new("switched off by the option direct=never", ""))?;
            return Ok(None);
        }
        if is_inline && !is_named {
            refuse(None, Unavailable::new(ALONE, ""))?;
            return Ok(None);
        }
        let first = &sources[first];
        let mount =
            match OpenMount::of(first.device(), first.path(), options.usrbio, &options.usrbio_directories) {
                Ok(mount) => mount,
                Err(why) => {
                    refuse(Some(first), why)?;
                    return Ok(None);
                }
            };
        let (files, mut takes) = (UsrbioFiles::default(), vec![false; sources.len()]);
        let mut file_chunk_bytes = 0;
        for position in on_3fs {
            let source = &sources[position];
            match files.add(source, || mount.file(source)) {
                Ok(()) => {
                    source.keep_mount(&mount);
                    takes[position] = true;
                    file_chunk_bytes = file_chunk_bytes.max(source.preferred_bytes());
                }
                Err(why) => refuse(Some(source), why)?,
            }
        }
        if options.usrbio == UsrbioClient::Auto && mount.client() == UsrbioClient::Native {
            let reason = format!("{}; windlass's own client reads", mount.reason());
            let what = format!("{} by the vendor's library", Route::Usrbio);
            refused.push(Refusal { what, path: None, why: Unavailable::new(reason, "") });
        }
        let files = Arc::new(files);
        Ok(takes.contains(&true).then(|| Self { mount, files, takes, file_chunk_bytes }))
    }

    /// The length of reads: that of the options, made to take whole chunks of the files unless the caller chose it.
    pub(super) fn chunk_bytes(&self, options: &LoadOptions) -> u64 {
        let by_default = PlanOptions::default().chunk_bytes;
        let whole = by_default.checked_next_multiple_of(self.file_chunk_bytes);
        match whole.filter(|&whole| whole <= MAX_CHUNK_BYTES && Alignment::BLOCK.divides(whole)) {
            Some(whole) if options.chunk_bytes == by_default => whole,
            _ => options.chunk_bytes,
        }
    }

    /// What a report says of it.
    pub(super) fn note(&self) -> String {
        format!("usrbio on {} by the {} client", self.mount.point().display(), self.mount.client())
    }

    /// Whether a file is read by USRBIO.
    pub(super) fn takes(&self, file: usize) -> bool {
        self.takes[file]
    }

    fn extents<'a>(&'a self, plan: &'a Plan) -> impl Iterator<Item = &'a Extent> {
        plan.extents().iter().filter(|extent| self.takes(extent.file.index()))
    }
}

/// The memory and rings of USRBIO that a load reads through.
pub(super) struct UsrbioPath {
    /// Whether each file of the catalog is read by it.
    pub(super) files: Vec<bool>,
    pub(super) slots: Slots,
    /// Reads in flight in each ring.
    pub(super) depth: usize,
    /// The rings that no thread has taken.
    lanes: Mutex<Vec<UsrbioLane>>,
    // Outlives what belongs to it.
    _mount: Arc<OpenMount>,
}

impl UsrbioPath {
    /// Registers memory and rings, as many as `options` and `fresh` bytes for tensors leave room for. Adds to `refused`
    /// why that cannot be, if it need not.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`] if the caller named the route; [`Error::MemoryBudget`].
    pub(super) fn open(
        shared: &Shared,
        plan: &Plan,
        options: &LoadOptions,
        place: &Place<'_>,
        fresh: u64,
        refused: &mut Vec<Refusal>,
    ) -> Result<Option<Self>> {
        let longest = shared.extents(plan).map(|extent| extent.read.len()).max().unwrap_or(0);
        let page = sys::pages::page_size() as u64;
        let slot_bytes = longest.checked_next_multiple_of(page).unwrap_or(longest).max(page);
        let in_flight = options.in_flight_bytes.unwrap_or(IN_FLIGHT_BYTES).div_ceil(slot_bytes);
        let rings = if place.is_inline { 1 } else { rings(options, place) };
        // Beside the reads in flight: to a device as many whose copies are under way, else one that each thread copies.
        let copied = if place.device.is_some() { in_flight } else { rings as u64 };
        let budget = match (place.device, options.memory_budget_bytes) {
            (Some(_), _) => place.staging_bytes,
            (None, Some(budget)) => budget.saturating_sub(fresh),
            (None, None) => u64::MAX,
        };
        let count = (in_flight + copied).min(budget / slot_bytes).max(1);
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(shared.extents(plan).count()).max(1);
        let bytes = slot_bytes.saturating_mul(count as u64);
        memory::budget::check(fresh, bytes, options.memory_budget_bytes)?;

        let rings = rings.min(count);
        let depth = usize::try_from(in_flight).unwrap_or(usize::MAX).min(count).div_ceil(rings).max(1);
        let numa_node = place.memory.numa_node;
        let memory = shared.mount.memory(usize::try_from(bytes).unwrap_or(usize::MAX), numa_node);
        let lanes = memory.and_then(|memory| {
            let lane = |_| shared.mount.lane(shared.files.clone(), depth);
            Ok((memory, (0..rings).map(lane).collect::<Result<Vec<_>, _>>()?))
        });
        let (memory, lanes) = match lanes {
            Ok(made) => made,
            Err(why) if options.route == Route::Usrbio => {
                let (route, path) = (Route::Usrbio, Some(shared.mount.point().to_owned()));
                return Err(Error::RouteUnavailable { route, path, why });
            }
            Err(why) => {
                refused.push(Refusal { what: Route::Usrbio.to_string(), path: None, why });
                return Ok(None);
            }
        };
        let kind = SlotKind::Shared { iov: &memory, device: place.device };
        let slots = Slots::new(count, slot_bytes as usize, kind)?;
        let (files, mount) = (shared.takes.clone(), shared.mount.clone());
        Ok(Some(Self { files, slots, depth, lanes: Mutex::new(lanes), _mount: mount }))
    }

    /// Whether a file is read by it.
    pub(super) fn takes(&self, file: usize) -> bool {
        self.files[file]
    }

    /// How many threads it is for.
    pub(super) fn rings(&self) -> usize {
        lock(&self.lanes).len()
    }

    /// A ring for the thread that calls.
    pub(super) fn take_lane(&self) -> Option<UsrbioLane> {
        lock(&self.lanes).pop()
    }
}

/// Rings, and threads that use them. To a device one starts all copies; to host memory each copies by itself.
fn rings(options: &LoadOptions, place: &Place<'_>) -> usize {
    options.rings.unwrap_or_else(|| if place.device.is_some() { 1 } else { host_rings() })
}
