//! Loads: found and submitted on the caller's thread, judged on the thread that moved the bytes.
#![forbid(unsafe_code)]

use super::{
    Core,
    gate::{Charge, Waiting},
    group::{Group, GroupItem},
    tier::Behind,
};
use crate::{
    DropReason, EventKind, Fingerprint, KeepAlive, Key, NamespaceId, Priority, Status,
    format::ShardTable,
    io::{Checksums, Direction, Failure, Header, Job, Outcome},
    layout::{Found, Lookup, Verdict},
    metrics::NamespaceCounters,
    ticket::{MemoryLease, Settled, TicketState},
};
use std::{io::ErrorKind, sync::Arc, time::Instant};

/// What loads of one request have in common.
pub(crate) struct LoadOptions {
    pub(crate) namespace: NamespaceId,
    pub(crate) counters: Arc<NamespaceCounters>,
    pub(crate) priority: Priority,
    pub(crate) wait_event: Option<u64>,
    pub(crate) ticket: Arc<TicketState>,
    /// Loads what this tier lacks.
    pub(crate) far: Option<Arc<Behind>>,
}

impl LoadOptions {
    /// Counts how an item has ended.
    pub(super) fn count(&self, status: Status, bytes: u64) {
        let counters = &self.counters;
        match status {
            Status::Ok => counters.hits.inc(),
            Status::Miss => counters.misses.inc(),
            Status::Expired => counters.expired.inc(),
            Status::Corrupt => counters.corrupt.inc(),
            _ => 0,
        };
        counters.loaded_bytes.inc_by(bytes);
    }

    /// Counts and ends the items of blocks that are in no tier.
    pub(super) fn settle_absent(&self, groups: &[Group], status: Status) {
        let settled: Vec<_> = groups.iter().flat_map(|group| group.settled(status)).collect();
        settled.iter().for_each(|_| self.count(status, 0));
        self.ticket.settle(settled, None);
    }
}

/// Begins to load the blocks of a request.
pub(crate) fn load(core: &Arc<Core>, options: LoadOptions, groups: Vec<Group>) {
    let options = Arc::new(options);
    let ticket = &options.ticket;
    if !core.gate.take_loads(options.priority, groups.len()) {
        let busy = |group: &Group| group.settled(Status::Dropped(DropReason::Busy)).collect::<Vec<_>>();
        let settled: Vec<_> = groups.iter().flat_map(busy).collect();
        settled.iter().for_each(|_| core.metrics.dropped(DropReason::Busy));
        ticket.release();
        return ticket.settle(settled, None);
    }
    let (mut settled, mut jobs, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
    let mut missed = Vec::new();
    let mut touched = Vec::with_capacity(groups.len());
    for group in groups {
        let admitted = Admitted(core.clone());
        let found = match find(core, &options, &group) {
            Ok(found) => found,
            Err(status) if status.is_absent() && options.far.is_some() => {
                missed.push(group);
                continue;
            }
            Err(status) => {
                group.items.iter().for_each(|_| options.count(status, 0));
                settled.extend(group.settled(status));
                continue;
            }
        };
        touched.push(group.fingerprint);
        // The request may have ended meanwhile.
        let Some(lease) = ticket.lease() else { continue };
        let charge = Charge::of(group.len_bytes());
        let load =
            WaitingLoad { core: core.clone(), options: options.clone(), group, charge, lease, admitted };
        if waiting.is_empty() && core.gate.try_enter(charge) {
            jobs.push(Waiting::Job(Box::new(load.job(found))));
        } else {
            waiting.push((charge, Waiting::Load(Box::new(load))));
        }
    }
    if let Some((far, lease)) = options.far.as_ref().filter(|_| !missed.is_empty()).zip(ticket.lease()) {
        far.load(&options, missed, lease, Status::Miss);
    }
    // The transfers have their own leases.
    ticket.release();
    core.submit(jobs);
    core.enter(ticket, waiting);
    core.layout.touch(&touched);
    ticket.settle(settled, None);
}

/// Where a block is, or what its items end as.
fn find(core: &Core, options: &LoadOptions, group: &Group) -> Result<Found, Status> {
    match core.layout.find(options.namespace, &group.key, group.fingerprint) {
        Lookup::Found(found) => Ok(found),
        Lookup::Miss => Err(Status::Miss),
        Lookup::Expired => Err(Status::Expired),
        Lookup::Failed(error) => {
            core.note_block(EventKind::LoadFailed, options.namespace, &group.key, error.to_string());
            Err(Status::Io(error.raw_os_error().unwrap_or(libc::EIO)))
        }
    }
}

/// The load of a block that waits until fewer bytes are under way. It does not hold the block's place meanwhile, or
/// those that wait would keep the store from using any place anew.
pub(crate) struct WaitingLoad {
    core: Arc<Core>,
    options: Arc<LoadOptions>,
    group: Group,
    charge: Charge,
    lease: Arc<MemoryLease>,
    admitted: Admitted,
}

/// A load that [`Gate::take_loads`](super::Gate::take_loads) has admitted. It counts for the gate until this is dropped.
struct Admitted(Arc<Core>);

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.gate.load_ended();
    }
}

impl WaitingLoad {
    pub(crate) fn tag(&self) -> u64 {
        self.options.ticket.id
    }

    pub(crate) fn priority(&self) -> Priority {
        self.options.priority
    }

    pub(crate) fn is_withdrawn(&self) -> bool {
        self.options.ticket.withdrawn.is_set()
    }

    /// Starts the admitted load. Returns `None` if the block is gone, or the request was cancelled.
    pub(crate) fn begin(self) -> Option<Job> {
        if self.is_withdrawn() {
            self.cancel();
            return None;
        }
        match find(&self.core, &self.options, &self.group) {
            Ok(found) => Some(self.job(found)),
            Err(status) => {
                let Self { core, options, group, charge, lease, admitted } = self;
                match &options.far {
                    Some(far) if status.is_absent() => {
                        drop(admitted);
                        core.left(charge);
                        far.load(&options, vec![group], lease, status);
                    }
                    _ => {
                        drop((lease, admitted));
                        core.left(charge);
                        options.settle_absent(&[group], status);
                    }
                }
                None
            }
        }
    }

    pub(crate) fn cancel(self) {
        self.end(Status::Cancelled);
    }

    fn end(self, status: Status) {
        let Self { core, options, group, charge, lease, admitted } = self;
        drop((lease, admitted));
        core.left(charge);
        options.ticket.settle(group.settled(status), None);
    }

    /// The transfer of a block that was found. It has entered the gate.
    fn job(self, found: Found) -> Job {
        let Self { core, options, group, charge, lease, admitted } = self;
        let Group { key, fingerprint, mut items } = group;
        items.sort_by_key(|item| item.shard);
        let far = options.far.as_ref().map(|far| (far.clone(), lease.clone()));
        let (mut fitting, mut others, mut parts) = (Vec::with_capacity(items.len()), Vec::new(), Vec::new());
        for mut item in items {
            let pieces = far.as_ref().map(|_| item.pieces.clone());
            match item.take_part(&found.place) {
                Some(part) => {
                    parts.push(part);
                    // They are loaded again if the block turns out to be gone.
                    item.pieces = pieces.unwrap_or_default();
                    fitting.push(item);
                }
                None => others.push(item),
            }
        }
        let read_items = fitting.len();
        // Whether these do not fit the block, or the block is damaged, the header tells.
        fitting.append(&mut others);
        let items = fitting;
        let ticket = options.ticket.clone();
        let file = found.place.file.clone();
        let header = found.place.header.map_or(Header::None, |offset| Header::Read { offset });
        let checksums = match (found.is_proven, core.options.verify) {
            (false, _) => Checksums::Require,
            (true, true) => Checksums::Compute,
            (true, false) => Checksums::Skip,
        };
        if !found.is_proven {
            core.metrics.unsynced_loads.inc_by(items.len() as u64);
        }
        let (priority, wait_event) = (options.priority, options.wait_event);
        let load = BlockLoad { core, options, key, fingerprint, found, items, read_items, admitted, far };
        Job {
            tag: ticket.id,
            direction: Direction::Read,
            priority,
            file,
            header,
            parts,
            checksums,
            deadline: ticket.deadline,
            withdrawn: ticket.withdrawn.clone(),
            wait_event,
            keep: KeepAlive::new(lease),
            done: Box::new(move |outcome| {
                // First: a caller that learns of the end finds room for more.
                load.core.left(charge);
                load.arrived(outcome);
            }),
        }
    }
}

/// The load of one block whose bytes are on their way.
struct BlockLoad {
    core: Arc<Core>,
    options: Arc<LoadOptions>,
    key: Key,
    fingerprint: Fingerprint,
    found: Found,
    /// First those that are read, in the order of their parts, then those that the place cannot have. The former have
    /// their pieces only if `far` may need them.
    items: Vec<GroupItem>,
    /// Items that are read: the first ones.
    read_items: usize,
    admitted: Admitted,
    /// Loads the block if it turns out to be gone or damaged, and the lease of the memory for that.
    far: Option<(Arc<Behind>, Arc<MemoryLease>)>,
}

/// What is known of an item when its bytes are there.
enum Judged {
    Is(Status),
    /// It has the checksum that was stored.
    Proven,
    /// Checksums were not compared: a device read or wrote it directly, or the options ask for no check.
    Unproven,
    /// Its checksum is another one.
    Differs {
        stored: u32,
        computed: u32,
    },
}

impl BlockLoad {
    fn arrived(self, outcome: Outcome) {
        self.core.note_outcome(Direction::Read, &outcome);
        self.options.ticket.transferred(&outcome);
        let started = outcome.started;
        match outcome.result {
            Ok(()) => match self.read(&outcome.header) {
                Verdict::Good(table) => {
                    let judged = self.judge(&table, &outcome.checksums);
                    self.conclude(judged, started);
                }
                Verdict::Moved => self.end(Status::Miss, started),
                Verdict::Corrupt(reason) => self.corrupt(reason, started),
            },
            Err(Failure::TimedOut) => self.end(Status::TimedOut, started),
            Err(Failure::Cancelled) => self.end(Status::Cancelled, started),
            // It was removed before its file was opened.
            Err(Failure::Io(error)) if error.kind() == ErrorKind::NotFound => self.end(Status::Miss, started),
            Err(Failure::Io(error)) if self.is_given_up(&error) => {
                let path = self.found.place.file.path().display();
                let reason = format!("reading {path} failed again: {error}");
                self.invalidate(reason);
                self.end(Status::Io(libc::EIO), started);
            }
            Err(failure) => {
                let reason = format!("reading {}: {failure}", self.found.place.file.path().display());
                match failure {
                    // It was whole once.
                    Failure::Short { .. } => self.corrupt(reason, started),
                    _ => {
                        self.core.note_block(
                            EventKind::LoadFailed,
                            self.options.namespace,
                            &self.key,
                            reason,
                        );
                        self.end(Status::Io(failure.errno()), started);
                    }
                }
            }
        }
    }

    fn shards_read(&self) -> impl Iterator<Item = u32> {
        self.items.iter().take(self.read_items).map(|item| item.shard)
    }

    fn read(&self, header: &[u8]) -> Verdict {
        self.core.unreadable.read(&self.fingerprint, self.shards_read());
        self.core.layout.check(&self.found, &self.key, header)
    }

    /// Whether the drive fails to give the block for the second time: a cache is better without it. A file system over a
    /// network may fail for a while.
    fn is_given_up(&self, error: &std::io::Error) -> bool {
        // Errors of the drive, of its medium, and of the protection of its sectors.
        let errnos = [libc::EIO, libc::EREMOTEIO, libc::ENODATA, libc::EILSEQ];
        let is_drives = errnos.iter().any(|errno| error.raw_os_error() == Some(*errno));
        if !is_drives || self.core.layout.find_waits() {
            return false;
        }
        let first = self.shards_read().min().unwrap_or_default();
        self.core.unreadable.failed(&self.fingerprint, first) && self.is_still_there()
    }

    fn judge(&self, table: &ShardTable, computed: &[Option<u32>]) -> Vec<Judged> {
        let verify = self.core.options.verify || !self.found.is_proven;
        let judge = |(number, item): (usize, &GroupItem)| match table.0.get(item.shard as usize) {
            // The header describes another block than the place that was found: nothing was read for this item.
            Some(shard) if shard.len == item.len && number >= self.read_items => Judged::Is(Status::Miss),
            Some(shard) if shard.len == item.len => {
                match (shard.checksum, computed.get(number).copied().flatten()) {
                    (Some(stored), Some(computed)) if verify && stored != computed => {
                        Judged::Differs { stored, computed }
                    }
                    (Some(_), Some(_)) if verify => Judged::Proven,
                    _ => Judged::Unproven,
                }
            }
            _ => Judged::Is(Status::Mismatch),
        };
        self.items.iter().enumerate().map(judge).collect()
    }

    /// Places of other processes may get other bytes at any time, of which headers tell nothing: they are written last.
    /// What no checksum vouches for is the block's only if its owner still says so after it was read. And bytes with
    /// another checksum are not damaged if that is what happened.
    fn conclude(self, judged: Vec<Judged>, started: Option<Instant>) {
        let is_settled = |judged: &Judged| matches!(judged, Judged::Is(_) | Judged::Proven);
        let is_gone = !judged.iter().all(is_settled) && !self.is_still_there();
        self.settle(judged, is_gone.then_some(Status::Miss), started);
    }

    /// Whether what was read until now was read from the block's place.
    fn is_still_there(&self) -> bool {
        self.found.is_held || self.core.layout.is_still_there(&self.found)
    }

    /// Ends the items. `change`: what became of those that no checksum vouches for.
    fn settle(self, judged: Vec<Judged>, change: Option<Status>, started: Option<Instant>) {
        let mut damage = None;
        let status_of = |(item, judged): (&GroupItem, &Judged)| match (judged, change) {
            (Judged::Is(status), _) => *status,
            (Judged::Proven, _) | (Judged::Unproven, None) => Status::Ok,
            (_, Some(status)) => status,
            (Judged::Differs { stored, computed }, None) => {
                damage.get_or_insert_with(|| {
                    format!("shard {} has the checksum {computed:08x} instead of {stored:08x}", item.shard)
                });
                Status::Corrupt
            }
        };
        let statuses = self.items.iter().zip(&judged).map(status_of).collect();
        if let Some(reason) = damage {
            self.invalidate(reason);
        }
        self.finish(statuses, started);
    }

    fn corrupt(self, reason: String, started: Option<Instant>) {
        if !self.is_still_there() {
            return self.end(Status::Miss, started);
        }
        self.invalidate(reason);
        self.end(Status::Corrupt, started);
    }

    /// Invalidates the block, before the request ends: a later lookup does not find it.
    fn invalidate(&self, reason: String) {
        self.core.layout.invalidate(&self.found);
        let file = self.found.place.file.path();
        self.core.events.note_damage(file, self.options.namespace, &self.key, reason);
    }

    fn end(self, status: Status, started: Option<Instant>) {
        let statuses = vec![status; self.items.len()];
        self.finish(statuses, started);
    }

    /// Ends items, but for those that the far tier may still have: it loads them.
    fn finish(self, statuses: Vec<Status>, started: Option<Instant>) {
        let Self { options, key, fingerprint, found, items, admitted, far, .. } = self;
        // The place first: a caller that sees the end can have the block removed.
        drop(found);
        let is_gone = |status: Status| far.is_some() && matches!(status, Status::Miss | Status::Corrupt);
        let (mut settled, mut rest, mut why) = (Vec::with_capacity(items.len()), Vec::new(), Status::Miss);
        for (item, status) in items.into_iter().zip(statuses) {
            if is_gone(status) {
                why = status;
                rest.push(item);
                continue;
            }
            let bytes = if status == Status::Ok { item.len } else { 0 };
            options.count(status, bytes);
            settled.push(Settled { item: item.item, status, bytes });
        }
        match far {
            Some((far, lease)) if !rest.is_empty() => {
                drop(admitted);
                options.ticket.settle(settled, started);
                let group = Group { key, fingerprint, items: rest };
                far.load(&options, vec![group], lease, why);
            }
            far => {
                drop((far, admitted));
                options.ticket.settle(settled, started);
            }
        }
    }
}
