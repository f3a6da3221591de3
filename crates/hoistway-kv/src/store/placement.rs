//! Stores: a thread finds places for blocks, which may wait for the disk, and submits the writes.
#![forbid(unsafe_code)]

use super::{
    Assembly, Core,
    assembly::{Joined, PlaceFailure, Progressed, Share},
    commit::{CommitTask, Waiter},
    core::Message,
    gate::{Charge, Waiting},
    group::{Group, GroupItem},
    requests::StoreUnderWay,
};
use crate::{
    DropReason, Error, EventKind, KeepAlive, NamespaceId, Priority, Status,
    format::{HEADER_LEN, Shard},
    io::{Checksums, Direction, Failure, Header, Job, MakeHeader, Outcome},
    layout::{NewBlock, Reservation, RoomWait, Written},
    metrics::NamespaceCounters,
    ticket::{Settled, TicketState},
};
use crossbeam_channel::Receiver;
use std::{
    collections::VecDeque,
    mem,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant, SystemTime},
};

/// Writes that are handed on together: each time costs locks, and wakes threads.
const MOST_TOGETHER: usize = 32;
/// Age of a request without a time-out after which its blocks wait no more for others of this process to be written, whose
/// room they can then have.
const WRITES_TIMEOUT: Duration = Duration::from_secs(5);
/// Part of its time-out that is the age of any other one: a store that is slower than its callers refuses, before it does
/// nothing in time.
const WRITES_PART: u32 = 8;
/// Longest time that a block waits for other processes to give up room.
const OTHERS_TIMEOUT: Duration = Duration::from_secs(1);
/// After a wait that failed, no block waits for the same reason for this long.
const WAIT_PAUSE: Duration = Duration::from_secs(5);
/// Time between looks whether a request that waits for room has ended.
const TICK: Duration = Duration::from_millis(20);

/// What the blocks of one request have in common.
pub(crate) struct StoreOptions {
    pub(crate) namespace: NamespaceId,
    pub(crate) counters: Arc<NamespaceCounters>,
    pub(crate) shards: u32,
    pub(crate) expires: Option<SystemTime>,
    pub(crate) priority: Priority,
    pub(crate) wait_event: Option<u64>,
    pub(crate) ticket: Arc<TicketState>,
    pub(crate) under_way: Arc<StoreUnderWay>,
}

/// A request to store, which the gate has admitted.
pub(crate) struct StoreTask {
    pub(crate) options: Arc<StoreOptions>,
    pub(crate) blocks: VecDeque<StoreBlock>,
}

/// A block of a request to store.
pub(crate) struct StoreBlock {
    pub(crate) admitted: AdmittedStore,
    pub(crate) group: Group,
    pub(crate) shape: Shape,
}

/// The room of the shards of one block.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// Bytes of the longest shard.
    pub(crate) shard_len: u64,
    /// Bytes between the starts of two shards.
    pub(crate) stride: u64,
}

impl Shape {
    /// Bytes that a block of so many shards takes, with its header.
    pub(crate) fn block_bytes(&self, shards: u32) -> u64 {
        self.stride.saturating_mul(shards.into()).saturating_add(HEADER_LEN as u64)
    }
}

/// Part of a store that was admitted. Counts for the gate until it has been written, or is given up.
pub(crate) struct AdmittedStore {
    core: Arc<Core>,
    charge: Charge,
}

impl AdmittedStore {
    /// Of a store that [`Gate::admit_store`](super::Gate::admit_store) has admitted.
    pub(crate) fn new(core: &Arc<Core>, charge: Charge) -> Self {
        Self { core: core.clone(), charge }
    }
}

impl Drop for AdmittedStore {
    fn drop(&mut self) {
        self.core.gate.store_ended(self.charge);
    }
}

/// Places blocks until it is told to stop.
pub(crate) fn run(core: &Arc<Core>, tasks: &Receiver<Message<StoreTask>>) {
    let mut pauses = Pauses::default();
    while let Ok(Message::Task(StoreTask { options, blocks })) = tasks.recv() {
        let mut placement = Placement { core, options: &options, writes: Vec::new(), pauses: &mut pauses };
        let len_of = |block: &StoreBlock| block.shape.block_bytes(options.shards);
        let mut following = blocks.iter().map(len_of).fold(0, u64::saturating_add);
        for block in blocks {
            if placement.writes.len() >= MOST_TOGETHER {
                placement.hand_on();
            }
            following = following.saturating_sub(len_of(&block));
            if !options.ticket.has_ended() {
                let write = placement.place(block, following);
                placement.writes.extend(write);
            }
        }
        let writes = placement.writes;
        // The writes have their own leases. Before they are handed on: who learns of their end finds the memory free.
        options.ticket.release();
        core.enter(&options.ticket, writes);
    }
}

/// The blocks of one request get their places.
struct Placement<'a> {
    core: &'a Arc<Core>,
    options: &'a Arc<StoreOptions>,
    /// Of blocks that have places, and are not handed on yet.
    writes: Vec<(Charge, Waiting)>,
    pauses: &'a mut Pauses,
}

/// Until when no block waits for room.
#[derive(Default)]
struct Pauses {
    /// That blocks of this process are written to, or that is looked up.
    writes: Option<Instant>,
    /// That other processes have.
    others: Option<Instant>,
}

impl Pauses {
    fn of(&mut self, wait: RoomWait) -> &mut Option<Instant> {
        match wait {
            RoomWait::Others => &mut self.others,
            _ => &mut self.writes,
        }
    }
}

/// What a block waits for, and since when.
struct Wait {
    what: RoomWait,
    since: Instant,
}

/// Ends items that are not written.
fn refuse(core: &Core, options: &StoreOptions, items: impl IntoIterator<Item = (GroupItem, Status)>) {
    let settled: Vec<_> = items
        .into_iter()
        .map(|(item, status)| {
            count_refused(core, options, status);
            item.settled(status)
        })
        .collect();
    options.ticket.settle(settled, None);
}

pub(crate) fn count_refused(core: &Core, options: &StoreOptions, status: Status) {
    match status {
        Status::Exists => {
            options.counters.exists.inc();
        }
        Status::Dropped(reason) => core.metrics.dropped(reason),
        _ => {}
    }
}

impl Placement<'_> {
    /// The write of a block's shards, if there is anything to write. So many bytes of the request's blocks follow.
    fn place(&mut self, block: StoreBlock, following: u64) -> Option<(Charge, Waiting)> {
        let (core, options) = (self.core, self.options);
        let StoreBlock { admitted, mut group, shape } = block;
        loop {
            let assembly = match core.assemblies.get(group.fingerprint) {
                Some(assembly) => assembly,
                None => match self.reserve(&group, shape, following) {
                    Ok(assembly) => assembly,
                    Err(status) => {
                        drop(admitted);
                        refuse(core, options, group.items.into_iter().map(|item| (item, status)));
                        return None;
                    }
                },
            };
            match assembly.join(group, options.shards) {
                Joined::Abandoned(same) => {
                    core.assemblies.remove(&assembly);
                    group = same;
                }
                Joined::Write { items, others, part } => {
                    if items.is_empty() {
                        drop(admitted);
                        refuse(core, options, others);
                        return None;
                    }
                    refuse(core, options, others);
                    return write(core, options, assembly, admitted, items, part);
                }
            }
        }
    }

    /// Reserves a place for a block that is not being written yet, or returns the status that its items end with.
    fn reserve(&mut self, group: &Group, shape: Shape, following: u64) -> Result<Arc<Assembly>, Status> {
        let (core, options) = (self.core, self.options);
        let is_partial = group.items.len() < options.shards as usize;
        let block = || NewBlock {
            namespace: options.namespace,
            key: group.key.clone(),
            fingerprint: group.fingerprint,
            shards: options.shards,
            shard_len: shape.shard_len,
            expires: options.expires,
            following,
            is_partial,
        };
        let mut wait = None;
        loop {
            let stamp = core.layout.room_stamp();
            return match core.layout.reserve(block()) {
                Ok(Reservation::Claimed(claim)) => {
                    let assembly = Arc::new(Assembly::new(claim));
                    core.assemblies.insert(group.fingerprint, assembly.clone());
                    Ok(assembly)
                }
                Ok(Reservation::Exists | Reservation::InFlight) => Err(Status::Exists),
                Ok(Reservation::Full) if !is_partial && self.wait_for_room(stamp, &mut wait) => continue,
                Ok(Reservation::Full) => Err(Status::Dropped(DropReason::NoRoom)),
                Ok(Reservation::Dropped(reason)) => Err(Status::Dropped(reason)),
                Err(error) => {
                    let status = status_of(&error);
                    core.note_block(EventKind::StoreFailed, options.namespace, &group.key, error.to_string());
                    Err(status)
                }
            };
        }
    }

    /// Waits until there may be more room than there was when the layout had this stamp. Returns whether there may be. `wait`
    /// is what the block has waited for so far. Meanwhile no other block gets a place.
    fn wait_for_room(&mut self, stamp: u64, wait: &mut Option<Wait>) -> bool {
        // What waits to be handed on may be what has the room.
        self.hand_on();
        loop {
            let now = Instant::now();
            let has_ended = self.options.ticket.has_ended();
            if has_ended && wait.is_none() {
                return false;
            }
            if let Some(Wait { what, since }) = wait
                && (has_ended || now >= self.end_of_wait(*what, *since))
            {
                if now.duration_since(*since) >= OTHERS_TIMEOUT.min(self.longest()) {
                    *self.pauses.of(*what) = Some(now + WAIT_PAUSE);
                }
                return false;
            }
            // Without waiting, which tells what there is to wait for.
            let what = self.core.layout.wait_for_room(stamp, now);
            match what {
                RoomWait::Changed => return true,
                RoomWait::Nothing => return false,
                RoomWait::Writes | RoomWait::Lookup | RoomWait::Others => {}
            }
            if self.pauses.of(what).is_some_and(|until| now < until) || now >= self.end_of_wait(what, now) {
                return false;
            }
            if wait.as_ref().is_none_or(|wait| wait.what != what) {
                *wait = Some(Wait { what, since: now });
            }
            self.core.layout.wait_for_room(stamp, now + TICK);
        }
    }

    /// When a block that has waited for this since then waits no more.
    fn end_of_wait(&self, what: RoomWait, since: Instant) -> Instant {
        match what {
            RoomWait::Others => since + OTHERS_TIMEOUT,
            _ => self.options.ticket.submitted + self.longest(),
        }
    }

    /// Age of the request after which its blocks wait no more for those of this process.
    fn longest(&self) -> Duration {
        let ticket = &self.options.ticket;
        ticket.deadline.map_or(WRITES_TIMEOUT, |deadline| {
            deadline.saturating_duration_since(ticket.submitted) / WRITES_PART
        })
    }

    fn hand_on(&mut self) {
        self.core.enter(&self.options.ticket, mem::take(&mut self.writes));
    }
}

/// What an error of the store as a whole is for one block.
pub(crate) fn status_of(error: &Error) -> Status {
    match error {
        Error::Io { source, .. } => status_of_errno(source.raw_os_error().unwrap_or(libc::EIO)),
        // It has more bytes than any layout can number.
        Error::InvalidRequest(_) => Status::Dropped(DropReason::TooLarge),
        _ => Status::Io(libc::EIO),
    }
}

fn status_of_errno(number: i32) -> Status {
    match number {
        libc::ENOSPC | libc::EDQUOT => Status::Dropped(DropReason::NoRoom),
        number => Status::Io(number),
    }
}

/// Some shards of a block, on their way to its place.
struct ShardWrite {
    core: Arc<Core>,
    options: Arc<StoreOptions>,
    assembly: Arc<Assembly>,
    items: Vec<GroupItem>,
    part: Share,
}

fn write(
    core: &Arc<Core>,
    options: &Arc<StoreOptions>,
    assembly: Arc<Assembly>,
    admitted: AdmittedStore,
    items: Vec<GroupItem>,
    part: Share,
) -> Option<(Charge, Waiting)> {
    let ticket = &options.ticket;
    let mut write = ShardWrite { core: core.clone(), options: options.clone(), assembly, items, part };
    let place = write.assembly.place().clone();
    let parts: Option<Vec<_>> = write.items.iter_mut().map(|item| item.take_part(&place)).collect();
    let (Some(parts), Some(lease)) = (parts, ticket.lease()) else {
        // The request has ended meanwhile; or the place is not what was asked for, which the layout would have to answer for.
        drop(admitted);
        write.failed(Status::Mismatch, None);
        return None;
    };
    let charge = admitted.charge;
    let header = match (part, place.header) {
        (Share::Last, Some(offset)) => Header::Write { offset, make: write.make_header() },
        _ => Header::None,
    };
    let job = Job {
        tag: ticket.id,
        direction: Direction::Write,
        priority: options.priority,
        file: place.file,
        header,
        parts,
        checksums: Checksums::Compute,
        deadline: ticket.deadline,
        withdrawn: ticket.withdrawn.clone(),
        wait_event: options.wait_event,
        keep: KeepAlive::new(lease),
        done: Box::new(move |outcome| {
            // First, so that who learns of the end finds room for more.
            drop(admitted);
            write.core.left(charge);
            write.core.note_outcome(Direction::Write, &outcome);
            write.options.ticket.transferred(&outcome);
            write.ended(outcome);
        }),
    };
    Some((charge, Waiting::Job(Box::new(job))))
}

impl ShardWrite {
    fn make_header(&self) -> MakeHeader {
        let assembly = self.assembly.clone();
        let lens: Vec<_> = self.items.iter().map(|item| (item.shard, item.len)).collect();
        Box::new(move |checksums| {
            let last = shards(lens.iter().copied(), checksums);
            assembly.header(&last)
        })
    }

    fn ended(self, outcome: Outcome) {
        let Outcome { result, checksums, started, .. } = outcome;
        if let Err(failure) = result {
            return self.failed_with(failure, started);
        }
        let written = shards(self.items.iter().map(|item| (item.shard, item.len)), &checksums);
        match self.assembly.written(&written, self.part) {
            Progressed::Waiting => {
                let settled: Vec<_> = self.items.iter().map(stored).collect();
                self.options.counters.stored_bytes.inc_by(settled.iter().map(|settled| settled.bytes).sum());
                self.options.ticket.settle(settled, started);
            }
            Progressed::HeaderNext => self.write_header(started),
            Progressed::Whole(written) => self.commit(*written, started),
            Progressed::Abandoned => self.failed(Status::Io(libc::EIO), started),
        }
    }

    /// All shards are there, but none of their transfers was the last to begin.
    fn write_header(self, started: Option<Instant>) {
        let place = self.assembly.place();
        let Some(offset) = place.header else {
            return match self.assembly.header_written() {
                Progressed::Whole(written) => self.commit(*written, started),
                _ => self.failed(Status::Io(libc::EIO), started),
            };
        };
        let assembly = self.assembly.clone();
        let make: MakeHeader = Box::new(move |_| assembly.header(&[]));
        let core = self.core.clone();
        let job = Job {
            tag: self.options.ticket.id,
            direction: Direction::Write,
            priority: self.options.priority,
            file: place.file.clone(),
            header: Header::Write { offset, make },
            parts: Vec::new(),
            checksums: Checksums::Skip,
            deadline: self.options.ticket.deadline,
            withdrawn: self.options.ticket.withdrawn.clone(),
            wait_event: None,
            keep: KeepAlive::by_caller(),
            done: Box::new(move |outcome| {
                self.core.note_outcome(Direction::Write, &outcome);
                // A header that is lost has none of the request's memory.
                if !matches!(outcome.result, Err(Failure::Lost(_))) {
                    self.options.ticket.transferred(&outcome);
                }
                match outcome.result {
                    Ok(()) => match self.assembly.header_written() {
                        Progressed::Whole(written) => self.commit(*written, started),
                        _ => self.failed(Status::Io(libc::EIO), started),
                    },
                    Err(failure) => self.failed_with(failure, started),
                }
            }),
        };
        core.submit(vec![Waiting::Job(Box::new(job))]);
    }

    fn commit(self, written: Written, started: Option<Instant>) {
        let settled: Vec<_> = self.items.iter().map(stored).collect();
        self.options.counters.stored_bytes.inc_by(settled.iter().map(|settled| settled.bytes).sum());
        let task = CommitTask {
            written,
            assembly: self.assembly,
            counters: self.options.counters.clone(),
            waiter: Waiter { ticket: self.options.ticket.clone(), settled, started },
            under_way: self.options.under_way.clone(),
        };
        // If the commit thread has ended, the store is closed, and has ended the request.
        let _ = self.core.commits.send(Message::Task(task));
    }

    fn failed_with(self, failure: Failure, started: Option<Instant>) {
        let status = match &failure {
            Failure::TimedOut => Status::TimedOut,
            Failure::Cancelled => Status::Cancelled,
            failure => {
                let path = self.assembly.place().file.path().display();
                let (namespace, key) = (self.assembly.namespace, &self.assembly.key);
                self.core.note_block(
                    EventKind::StoreFailed,
                    namespace,
                    key,
                    format!("writing to {path}: {failure}"),
                );
                status_of_errno(failure.errno())
            }
        };
        if matches!(failure, Failure::Lost(_)) {
            // The system may still write there: the place is never used again, and is not given to another process.
            self.core.has_lost.store(true, Ordering::Release);
            self.core.assemblies.remove(&self.assembly);
            if let Some((claim, _)) = self.assembly.lose() {
                self.core.layout.lose(claim);
            }
            let settled: Vec<_> = self.items.iter().map(|item| item.settled(status)).collect();
            return self.options.ticket.settle(settled, started);
        }
        self.give_up(status, started, PlaceFailure::of(&failure));
    }

    fn failed(self, status: Status, started: Option<Instant>) {
        self.give_up(status, started, PlaceFailure::None);
    }

    fn give_up(self, status: Status, started: Option<Instant>, failure: PlaceFailure) {
        let shards = self.items.iter().map(|item| item.shard);
        if let Some((claim, failure)) = self.assembly.failed(shards, failure) {
            failure.leave(&*self.core.layout, claim);
            self.core.assemblies.remove(&self.assembly);
        }
        let settled: Vec<_> = self.items.iter().map(|item| item.settled(status)).collect();
        settled.iter().for_each(|settled| count_refused(&self.core, &self.options, settled.status));
        self.options.ticket.settle(settled, started);
    }
}

fn stored(item: &GroupItem) -> Settled {
    Settled { item: item.item, status: Status::Ok, bytes: item.len }
}

/// Shards by number, with their checksums as far as they were computed.
fn shards(lens: impl Iterator<Item = (u32, u64)>, checksums: &[Option<u32>]) -> Vec<(u32, Shard)> {
    let checksum = |number: usize| checksums.get(number).copied().flatten();
    lens.enumerate()
        .map(|(number, (shard, len))| (shard, Shard { len, checksum: checksum(number) }))
        .collect()
}
