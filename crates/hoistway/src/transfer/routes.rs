//! The routes of one order, in order of preference: which files each reads, through which slots, on how many threads.
#![forbid(unsafe_code)]

use super::device::{Needs, SlotCounts};
use crate::{
    Alignment, Error, Result,
    memory::{self, Slots},
    plan::{Extent, Plan, PlanOptions, Transfer},
    report::{Refusal, add_new},
    route::{
        Access, DirectIo, NameCheck, Route, Unavailable,
        member::{Demand, Files, Grain, Landing, Member, Share, ThreadPlan, Wanted},
        registry::{self, Entry, NotOpened},
    },
    source::Source,
    sys,
};
use hoistway_io::executor::QueueId;
use std::{path::PathBuf, sync::Arc};

/// Longest chunk of a file that reads are made as long as.
const MAX_CHUNK_BYTES: u64 = 32 << 20;

/// The routes that may make a read, as bits: a route's place in the order of preference is its number, and that of its queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Takers(u8);

impl Takers {
    /// Most routes of an order: as many as a scheduler has queues.
    const MOST: usize = u8::BITS as usize;

    pub(super) fn of(routes: impl IntoIterator<Item = usize>) -> Self {
        Self(routes.into_iter().fold(0, |bits, route| bits | 1 << route))
    }

    /// The best of them, from number `first` on.
    pub(crate) fn from(self, first: usize) -> Option<usize> {
        let bits = self.0.checked_shr(first as u32)?;
        (bits != 0).then(|| first + bits.trailing_zeros() as usize)
    }

    pub(crate) fn has(self, route: usize) -> bool {
        self.from(route) == Some(route)
    }
}

/// The queue of a route.
pub(crate) fn queue_of(route: usize) -> QueueId {
    QueueId(route as u8)
}

/// A route that reads.
#[derive(Debug)]
pub(crate) struct OpenRoute {
    // Before the member, which the memory belongs to.
    slots: Option<Slots>,
    pub(crate) member: Arc<dyn Member>,
    pub(crate) share: Share,
    /// Whether it reads each file of the catalog.
    files: Box<[bool]>,
    pub(crate) name_check: NameCheck,
}

impl OpenRoute {
    /// A route that reads the first file.
    #[cfg(test)]
    pub(super) fn new(member: Arc<dyn Member>, share: Share) -> Self {
        let name_check = NameCheck::of(&member);
        Self { slots: None, member, share, files: Box::new([true]), name_check }
    }

    /// Slots of its own, if it does not read into those of the order.
    pub(crate) fn slots(&self) -> Option<&Slots> {
        self.slots.as_ref()
    }

    fn takes(&self, plan: &Plan, extent: &Extent) -> bool {
        takes(&*self.member, &self.files, plan, extent)
    }
}

/// Whether a member that reads these files reads an extent.
fn takes(member: &dyn Member, files: &[bool], plan: &Plan, extent: &Extent) -> bool {
    let facts = member.facts();
    files[extent.file.index()]
        && (facts.grain != Grain::InWholeBlocks || Plan::is_whole_blocks(extent))
        && (facts.landing != Landing::View || plan.transfers(extent).iter().all(is_long))
}

/// Whether slots of a member need memory of the device beside them.
fn needs_device_memory(member: &dyn Member) -> bool {
    matches!(member.facts().landing, Landing::Device | Landing::View)
}

/// Whether a copy is so long that the driver surely leaves it to the device: a processor that copied from pages of a file
/// would be ended by one that was cut.
fn is_long(copy: &Transfer) -> bool {
    /// What drivers copy by themselves is at most this long.
    const SHORT_BYTES: u64 = 64 << 10;
    match *copy {
        Transfer::Linear { len, .. } => len > SHORT_BYTES,
        Transfer::Pitched { .. } => false,
        Transfer::Converted { elements, conversion, .. } => {
            elements.saturating_mul(conversion.from().bytes()) > SHORT_BYTES
        }
    }
}

/// The memory and threads that there are for routes.
pub(crate) struct Room<'a> {
    pub(crate) threads: &'a ThreadPlan,
    pub(crate) numa_node: Option<u32>,
    /// Bytes of host memory that the order needs besides.
    pub(crate) least_bytes: u64,
    /// Bytes of slots in host memory, at most.
    pub(crate) staging_bytes: u64,
    pub(crate) needs: Needs,
    /// Bytes in flight, rings, and bytes of host memory in all, if the caller chose them.
    pub(crate) in_flight_bytes: Option<u64>,
    pub(crate) rings: Option<usize>,
    pub(crate) budget_bytes: Option<u64>,
}

/// The routes of an order while they are opened.
pub(crate) struct Opening<'a> {
    wanted: Wanted<'a>,
    sources: &'a [Arc<dyn Source>],
    /// How each file is read, once that was asked.
    access: Vec<Option<Access>>,
    routes: Vec<OpenRoute>,
    /// How many of them were opened first.
    first: usize,
    refused: Vec<Refusal>,
}

impl<'a> Opening<'a> {
    /// `refused` is what was refused before.
    pub(crate) fn new(wanted: Wanted<'a>, sources: &'a [Arc<dyn Source>], refused: Vec<Refusal>) -> Self {
        Self { wanted, sources, access: vec![None; sources.len()], routes: Vec::new(), first: 0, refused }
    }

    /// Opens the routes that say how long reads should be.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`] if the route that the caller named cannot be.
    pub(crate) fn open_first(&mut self, plan: &Plan) -> Result<()> {
        registry::readers().filter(|entry| entry.is_first).try_for_each(|entry| self.open(entry, plan))
    }

    /// The length of reads: `chosen`, made to take whole chunks of the files unless the caller chose it.
    pub(crate) fn chunk_bytes(&self, chosen: u64) -> u64 {
        let by_default = PlanOptions::default().chunk_bytes;
        let chunk = self.routes.iter().filter_map(|route| route.member.facts().chunk_bytes).max();
        let whole = chunk.and_then(|chunk| by_default.checked_next_multiple_of(chunk));
        match whole.filter(|&whole| whole <= MAX_CHUNK_BYTES && Alignment::BLOCK.divides(whole)) {
            Some(whole) if chosen == by_default => whole,
            _ => chosen,
        }
    }

    /// Where the reads of the tensor that comes first are cut apart from others, and for each file whether they may be, if a route
    /// wants that.
    pub(crate) fn first_step(&self) -> Option<(Alignment, &[bool])> {
        self.routes.iter().find_map(|route| Some((route.member.facts().first_step?, &*route.files)))
    }

    /// Bytes of host memory that routes which read into slots of their own need at least: one slot each.
    pub(crate) fn least_shared_bytes(&self, plan: &Plan) -> u64 {
        let page = sys::pages::page_size() as u64;
        let shared = self.routes.iter().filter(|route| route.member.facts().landing == Landing::Shared);
        let slot_bytes = shared.map(|route| {
            let taken = plan.extents().iter().filter(|extent| route.takes(plan, extent));
            let longest = taken.map(|extent| extent.read.len()).max().unwrap_or(0);
            longest.checked_next_multiple_of(page).unwrap_or(longest)
        });
        slot_bytes.fold(0, u64::saturating_add)
    }

    /// Makes the memory of the routes that were opened first.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`] if the caller named one; [`Error::MemoryBudget`].
    pub(crate) fn ready_first(&mut self, plan: &Plan, room: &Room<'_>) -> Result<()> {
        for position in (0..self.routes.len()).rev() {
            self.make_ready(position, plan, room)?;
        }
        Ok(())
    }

    /// Bytes of host memory that the routes have taken.
    pub(crate) fn host_bytes(&self) -> u64 {
        self.routes.iter().filter_map(OpenRoute::slots).map(Slots::host_bytes).sum()
    }

    /// Whether an extent will need a slot of the order's own, if it is staged.
    pub(crate) fn needs_host_slot(&self, extent: &Extent) -> bool {
        let is_past_host = self.wanted.route.is_past_host() && Plan::is_whole_blocks(extent);
        let has_slots = |route: &OpenRoute| {
            matches!(route.member.facts().landing, Landing::Shared | Landing::Device)
                && route.files[extent.file.index()]
        };
        !is_past_host && !self.routes.iter().any(has_slots)
    }

    /// How many slots of which kind extents come in, of which `own` in host memory are the order's own.
    pub(crate) fn slot_counts(&self, own: usize) -> SlotCounts {
        let count = |landing| -> usize {
            let routes = self.routes.iter().filter(|route| route.member.facts().landing == landing);
            routes.filter_map(OpenRoute::slots).map(Slots::count).sum()
        };
        SlotCounts {
            host: own + count(Landing::Shared) + count(Landing::View),
            device: count(Landing::Device),
        }
    }

    /// Opens the other routes and makes their memory, after the memory that tensors need.
    ///
    /// # Errors
    /// Those of [`Opening::open_first`].
    pub(crate) fn open_others(&mut self, plan: &Plan, room: &Room<'_>) -> Result<()> {
        if self.wanted.direct == DirectIo::Never {
            self.refuse(
                "direct reads",
                None,
                Unavailable::new("switched off by the option direct=never", ""),
            );
        }
        self.first = self.routes.len();
        for entry in registry::readers().filter(|entry| !entry.is_first) {
            let before = self.routes.len();
            self.open(entry, plan)?;
            if self.routes.len() > before {
                self.make_ready(before, plan, room)?;
            }
        }
        Ok(())
    }

    /// Drops one of the other routes whose slots need memory of the device, unless the caller named it. Returns whether there was one.
    pub(crate) fn drop_one_of_device(&mut self, why: &Error) -> bool {
        let is_meant = |route: &OpenRoute| {
            needs_device_memory(&*route.member) && !self.wanted.names(route.member.route())
        };
        let Some(position) = self.routes.iter().skip(self.first).rposition(is_meant) else { return false };
        let route = self.routes.remove(self.first + position);
        self.refuse(route.member.route().name(), None, Unavailable::new(why.to_string(), ""));
        true
    }

    /// What to do where the device has too little memory beside one slot of the order's own.
    pub(crate) fn how_to_need_less(&self) -> &'static str {
        // Those that are left after `drop_one_of_device` were named.
        if self.routes.iter().skip(self.first).any(|route| needs_device_memory(&*route.member)) {
            "free memory of the device, set a smaller memory_budget, or use route=auto"
        } else {
            "free memory of the device, or set a smaller memory_budget"
        }
    }

    /// The routes, for each extent those that take it, and what was refused.
    ///
    /// # Errors
    /// [`Error::Internal`] if no route takes an extent.
    pub(crate) fn assign(self, plan: &Plan) -> Result<Assigned> {
        let Self { access, routes, refused, .. } = self;
        let takers = plan.extents().iter().map(|extent| {
            let takers = routes.iter().enumerate().filter(|(_, route)| route.takes(plan, extent));
            let takers = Takers::of(takers.map(|(number, _)| number));
            let none = || Error::Internal("no route takes an extent".into());
            takers.from(0).map(|_| takers).ok_or_else(none)
        });
        let takers = takers.collect::<Result<_>>()?;
        let access = access.into_iter().map(|access| access.unwrap_or(Access::Direct)).collect();
        Ok(Assigned { routes, takers, access, refused })
    }

    fn open(&mut self, entry: &Entry, plan: &Plan) -> Result<()> {
        let read = self.files_of(plan, false);
        let sources: Vec<_> = read.iter().map(|&file| &self.sources[file]).collect();
        let before: Vec<_> = self.routes.iter().map(|route| route.member.clone()).collect();
        let member = match (entry.open)(&self.wanted, &sources, &before) {
            Ok(Some(member)) => member,
            Ok(None) => return Ok(()),
            Err(NotOpened { path, why }) => return self.refuse_route(entry.route, path, why),
        };
        let mut files = vec![false; self.sources.len()].into_boxed_slice();
        for file in self.files_for(&*member, read, plan) {
            let access = match member.facts().files.access() {
                Some(access) => access,
                None => self.access(file)?,
            };
            let source = &self.sources[file];
            match member.add(source, access) {
                Ok(true) => {
                    files[file] = true;
                    self.access[file] = Some(access);
                }
                Ok(false) => {}
                Err(why) => self.refuse_route(entry.route, Some(source.path().to_owned()), why)?,
            }
        }
        let is_used = plan.extents().iter().any(|extent| takes(&*member, &files, plan, extent));
        if is_used && self.routes.len() < Takers::MOST {
            self.refused.extend(member.refusals(self.wanted.device.map(|device| device.id())));
            let share = Share { threads: 0, depth: (1, 1), slots: 0, slot_bytes: 0 };
            let name_check = NameCheck::of(&member);
            self.routes.push(OpenRoute { slots: None, member, share, files, name_check });
        }
        Ok(())
    }

    /// Those of `files` that a member is asked about, the ones that prove most first. A route that is named must be able
    /// to read also those whose only block is cut short, which it leaves to others.
    fn files_for(&self, member: &dyn Member, mut files: Vec<usize>, plan: &Plan) -> Vec<usize> {
        if member.facts().grain == Grain::InWholeBlocks {
            let whole = self.files_of(plan, true);
            let has_whole_blocks = |file: &usize| whole.binary_search(file).is_ok();
            match self.wanted.names(member.route()) {
                true => files.sort_by_key(|file| !has_whole_blocks(file)),
                false => files.retain(has_whole_blocks),
            }
        }
        files
    }

    /// Gives a route its part of the reads, or drops it if it has no memory.
    fn make_ready(&mut self, position: usize, plan: &Plan, room: &Room<'_>) -> Result<()> {
        let taken = self.host_bytes();
        let route = &mut self.routes[position];
        let reads = || plan.extents().iter().filter(|extent| route.takes(plan, extent));
        let demand = Demand {
            threads: room.threads,
            is_inline: self.wanted.is_inline,
            has_device: self.wanted.device.is_some(),
            reads: reads().count(),
            longest_bytes: reads().map(|extent| extent.read.len()).max().unwrap_or(0),
            in_flight_bytes: room.in_flight_bytes,
            rings: room.rings,
            budget_bytes: room.staging_bytes.saturating_sub(taken),
            slot_bytes: (room.needs.slot_bytes, room.needs.table_bytes),
        };
        let (share, landing) = (route.member.share(&demand), route.member.facts().landing);
        let fits = match landing {
            Landing::Any | Landing::Kept | Landing::View | Landing::Device => Ok(()),
            Landing::Shared => {
                let bytes = taken.saturating_add(share.slot_bytes.saturating_mul(share.slots as u64));
                memory::budget::check(room.least_bytes, bytes, room.budget_bytes)
            }
        };
        let slots = fits.and_then(|()| match landing {
            Landing::Any | Landing::Kept => Ok(None),
            Landing::Shared | Landing::View | Landing::Device => route
                .member
                .slots(share.slots, share.slot_bytes as usize, self.wanted.device, room.numa_node)
                .map(Some),
        });
        let opened = slots.and_then(|slots| {
            route.member.open_lanes(share.threads, share.depth.1)?;
            Ok(slots)
        });
        match opened {
            Ok(slots) => {
                route.share = share;
                route.slots = slots;
                Ok(())
            }
            Err(error) if self.wanted.names(route.member.route()) => Err(error),
            Err(error) => {
                let name = route.member.route();
                self.routes.remove(position);
                let why = match error {
                    Error::RouteUnavailable { why, .. } => why,
                    error => Unavailable::new(error.to_string(), ""),
                };
                self.refuse_route(name, None, why)
            }
        }
    }

    /// The files that the plan reads, or reads whole blocks of, but for those that a route serves alone.
    fn files_of(&self, plan: &Plan, whole_blocks: bool) -> Vec<usize> {
        let extents = plan.extents().iter().filter(|extent| !whole_blocks || Plan::is_whole_blocks(extent));
        let mut files: Vec<usize> = extents.map(|extent| extent.file.index()).collect();
        files.sort_unstable();
        files.dedup();
        files.retain(|&file| !self.is_served_alone(file));
        files
    }

    fn is_served_alone(&self, file: usize) -> bool {
        self.routes
            .iter()
            .any(|route| route.files[file] && matches!(route.member.facts().files, Files::Alone(_)))
    }

    /// How a file is read by routes that go through the kernel.
    fn access(&mut self, file: usize) -> Result<Access> {
        if let Some(access) = self.access[file] {
            return Ok(access);
        }
        let source = &self.sources[file];
        let (access, refusal) = self.wanted.access(&**source)?;
        add_new(&mut self.refused, refusal);
        self.access[file] = Some(access);
        Ok(access)
    }

    /// # Errors
    /// [`Error::RouteUnavailable`] if the caller named the route.
    fn refuse_route(&mut self, route: Route, path: Option<PathBuf>, why: Unavailable) -> Result<()> {
        if self.wanted.names(route) {
            return Err(Error::RouteUnavailable { route: self.wanted.route, path, why });
        }
        self.refuse(route.name(), path, why);
        Ok(())
    }

    fn refuse(&mut self, what: &str, path: Option<PathBuf>, why: Unavailable) {
        add_new(&mut self.refused, [Refusal::new(what, path, why)]);
    }
}

/// The routes of an order, and what they read.
pub(crate) struct Assigned {
    pub(crate) routes: Vec<OpenRoute>,
    /// For each extent, the routes that may read it.
    pub(crate) takers: Box<[Takers]>,
    /// For each file, how it is read.
    pub(crate) access: Vec<Access>,
    pub(crate) refused: Vec<Refusal>,
}
