//! What takes the place of layout and engine, so that tests decide when what happens.
#![allow(unsafe_code, reason = "moves bytes between memory and a file")]

use crate::{
    DropReason, Fingerprint, Key, NamespaceId, NamespaceOptions, Result, Route,
    disk::{DataFile, FileAccess},
    format::{HEADER_LEN, ShardTable, header::BlockHeader},
    io::{Carrier, Checksums, DeviceRegion, Direction, Failure, Header, IoReport, Job, Outcome, Transfers},
    layout::{
        Administration, BlockPlace, Claim, Found, Layout, Listed, Lookup, NewBlock, Observed, Reservation,
        RoomWait, Sharing, Usage, Verdict, Written,
    },
};
use hoistway_io::parallel::lock;
use std::{
    collections::{HashMap, VecDeque},
    os::unix::fs::FileExt,
    path::Path,
    sync::{Arc, Condvar, Mutex},
    thread,
    time::{Duration, Instant, SystemTime},
};
use uuid::Uuid;

/// Bytes of a slot of [`Slots`].
const SLOT: u64 = 1 << 20;

/// Slots of one length in one file; nothing survives.
pub(super) struct Slots {
    file: Arc<DataFile>,
    pub(super) state: Arc<Mutex<State>>,
    /// Called before a place is given out.
    pub(super) on_reserve: Mutex<Option<Hook>>,
    /// Called before a block is found.
    pub(super) on_find: Mutex<Option<Hook>>,
    /// Called before a block is brought to the disk, to be committed.
    pub(super) on_prepare: Mutex<Option<Hook>>,
    find_waits: bool,
    observed: Observed,
}

type Hook = Box<dyn FnMut(&Key) + Send>;

#[derive(Default)]
pub(super) struct State {
    blocks: HashMap<Fingerprint, Block>,
    claimed: HashMap<Fingerprint, u64>,
    free: Vec<u64>,
    namespaces: Vec<(NamespaceId, String)>,
    /// Whether commits fail.
    pub(super) commits_fail: bool,
    /// Whether the owner of all places has given them to others since they were found.
    pub(super) has_moved: bool,
    pub(super) invalidated: u64,
    /// Claims that were given up after a write to their places failed.
    pub(super) failed: u64,
    /// Whether all blocks are another process's.
    pub(super) is_others: bool,
    /// How often blocks were listed.
    pub(super) lists: u64,
}

#[derive(Clone)]
struct Block {
    namespace: NamespaceId,
    key: Key,
    slot: u64,
    stride: u64,
    table: ShardTable,
    expires: Option<SystemTime>,
}

/// Gives the slot back unless it was committed.
struct SlotClaim {
    state: Arc<Mutex<State>>,
    block: Fingerprint,
}

impl Drop for SlotClaim {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        if let Some(slot) = state.claimed.remove(&self.block) {
            state.free.push(slot);
        }
    }
}

impl Slots {
    pub(super) fn new(root: &Path, slots: u64, find_waits: bool) -> Self {
        let path = root.join("slots");
        let file = DataFile::open(&path, FileAccess::CreateNew).unwrap();
        file.buffered().set_len(slots * SLOT).unwrap();
        let free = (0..slots).rev().map(|slot| slot * SLOT).collect();
        let state = State { free, ..State::default() };
        Self {
            file: Arc::new(file),
            state: Arc::new(Mutex::new(state)),
            on_reserve: Mutex::default(),
            on_find: Mutex::default(),
            on_prepare: Mutex::default(),
            find_waits,
            observed: Observed::default(),
        }
    }

    /// Changes a byte of a block on the disk.
    pub(super) fn damage(&self, key: &str, namespace: &crate::Namespace) {
        let fingerprint = Fingerprint::of(namespace.id(), key.as_bytes());
        let offset = lock(&self.state).blocks[&fingerprint].slot + HEADER_LEN as u64 + 1234;
        let mut byte = [0];
        self.file.buffered().read_exact_at(&mut byte, offset).unwrap();
        self.file.buffered().write_all_at(&[byte[0] ^ 4], offset).unwrap();
    }

    pub(super) fn free(&self) -> usize {
        lock(&self.state).free.len()
    }
}

impl Layout for Slots {
    fn room_stamp(&self) -> u64 {
        lock(&self.state).free.len() as u64
    }

    fn wait_for_room(&self, stamp: u64, until: Instant) -> RoomWait {
        loop {
            let state = lock(&self.state);
            let what = match state.claimed.is_empty() {
                _ if state.free.len() as u64 != stamp => RoomWait::Changed,
                true => RoomWait::Nothing,
                false => RoomWait::Writes,
            };
            if what != RoomWait::Writes || Instant::now() >= until {
                return what;
            }
            drop(state);
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn contains(&self, _: NamespaceId, blocks: &[(&[u8], Fingerprint)], found: &mut [bool]) {
        let state = lock(&self.state);
        for ((_, block), found) in blocks.iter().zip(found) {
            *found = state.blocks.contains_key(block);
        }
    }

    fn reserve(&self, block: NewBlock) -> Result<Reservation> {
        if let Some(hook) = &mut *lock(&self.on_reserve) {
            hook(&block.key);
        }
        let mut state = lock(&self.state);
        if state.blocks.contains_key(&block.fingerprint) {
            return Ok(Reservation::Exists);
        }
        if state.claimed.contains_key(&block.fingerprint) {
            return Ok(Reservation::InFlight);
        }
        let stride = block.stride().unwrap();
        if HEADER_LEN as u64 + stride * u64::from(block.shards) > SLOT {
            return Ok(Reservation::Dropped(DropReason::TooLarge));
        }
        let Some(slot) = state.free.pop() else {
            return Ok(Reservation::Full);
        };
        state.claimed.insert(block.fingerprint, slot);
        let place = BlockPlace {
            file: self.file.clone().into(),
            header: Some(slot),
            payload: slot + HEADER_LEN as u64,
            stride,
            shards: block.shards,
        };
        let token = SlotClaim { state: self.state.clone(), block: block.fingerprint };
        Ok(Reservation::Claimed(Claim {
            block,
            place,
            writer: Uuid::nil(),
            sequence: 0,
            token: Box::new(token),
        }))
    }

    fn prepare(&self, blocks: &mut [Written]) -> Vec<Result<()>> {
        if let Some(hook) = &mut *lock(&self.on_prepare) {
            blocks.iter().for_each(|block| hook(&block.claim.block.key));
        }
        blocks.iter().map(|_| Ok(())).collect()
    }

    fn commit(&self, blocks: Vec<Written>) -> Vec<Result<()>> {
        let mut state = lock(&self.state);
        if state.commits_fail {
            drop(state);
            return blocks.iter().map(|_| Err(crate::Error::Internal("no commits today".into()))).collect();
        }
        for Written { claim, table } in &blocks {
            let NewBlock { namespace, key, fingerprint, expires, .. } = claim.block.clone();
            let slot = state.claimed.remove(&fingerprint).unwrap();
            let stride = claim.place.stride;
            let block = Block { namespace, key, slot, stride, table: table.clone(), expires };
            state.blocks.insert(fingerprint, block);
        }
        drop(state);
        blocks.iter().map(|_| Ok(())).collect()
    }

    fn fail(&self, claim: Claim) {
        lock(&self.state).failed += 1;
        drop(claim);
    }

    fn lose(&self, claim: Claim) {
        lock(&self.state).claimed.remove(&claim.block.fingerprint);
    }

    fn find(&self, _: NamespaceId, key: &Key, fingerprint: Fingerprint) -> Lookup {
        if let Some(hook) = &mut *lock(&self.on_find) {
            hook(key);
        }
        let state = lock(&self.state);
        let Some(block) = state.blocks.get(&fingerprint) else {
            return Lookup::Miss;
        };
        if block.expires.is_some_and(|expires| expires <= SystemTime::now()) {
            return Lookup::Expired;
        }
        let place = BlockPlace {
            file: self.file.clone().into(),
            header: Some(block.slot),
            payload: block.slot + HEADER_LEN as u64,
            stride: block.stride,
            shards: block.table.0.len() as u32,
        };
        let token = Box::new((fingerprint, block.clone()));
        Lookup::Found(Found { place, is_held: false, is_proven: true, token })
    }

    fn check(&self, found: &Found, key: &Key, header: &[u8]) -> Verdict {
        let (_, block) = found.token.downcast_ref::<(Fingerprint, Block)>().unwrap();
        match BlockHeader::parse(header) {
            Ok(header) if header.key == *key && header.table == block.table => Verdict::Good(header.table),
            Ok(_) => Verdict::Moved,
            Err(why) => Verdict::Corrupt(why.to_string()),
        }
    }

    fn invalidate(&self, found: &Found) {
        let (block, _) = found.token.downcast_ref::<(Fingerprint, Block)>().unwrap();
        let mut state = lock(&self.state);
        state.blocks.remove(block);
        state.invalidated += 1;
    }

    fn touch(&self, _: &[Fingerprint]) {}

    fn pin(&self, block: Fingerprint) -> bool {
        lock(&self.state).blocks.contains_key(&block)
    }

    fn unpin(&self, _: Fingerprint) {}
}

impl Administration for Slots {
    fn open_namespace(&self, id: NamespaceId, description: &str, _: NamespaceOptions) -> Result<()> {
        let mut state = lock(&self.state);
        if !state.namespaces.iter().any(|(other, _)| *other == id) {
            state.namespaces.push((id, description.to_owned()));
        }
        Ok(())
    }

    fn namespaces(&self) -> Result<Vec<(NamespaceId, String)>> {
        Ok(lock(&self.state).namespaces.clone())
    }

    fn delete(&self, _: NamespaceId, blocks: &[(&[u8], Fingerprint)]) -> Result<usize> {
        let mut state = lock(&self.state);
        Ok(blocks.iter().filter(|(_, block)| state.blocks.remove(block).is_some()).count())
    }

    fn clear(&self, _: NamespaceId) -> Result<usize> {
        Ok(lock(&self.state).blocks.drain().count())
    }

    fn evict(&self, _: u64) -> Result<u64> {
        Ok(0)
    }

    fn list(&self, _: u64, _: usize, into: &mut Vec<Listed>) -> Option<u64> {
        let mut state = lock(&self.state);
        state.lists += 1;
        let is_own = !state.is_others;
        into.extend(state.blocks.iter().map(|(fingerprint, block)| Listed {
            namespace: block.namespace,
            fingerprint: *fingerprint,
            payload_len: block.stride,
            is_own,
            expires: block.expires,
        }));
        None
    }

    fn key_of(&self, block: Fingerprint) -> Result<Option<Key>> {
        Ok(lock(&self.state).blocks.get(&block).map(|block| block.key.clone()))
    }

    fn maintain(&self) -> Result<()> {
        Ok(())
    }

    fn usage(&self) -> Usage {
        let state = lock(&self.state);
        Usage { blocks: state.blocks.len() as u64, corrupt_blocks: state.invalidated, ..Usage::default() }
    }

    fn observed(&self) -> &Observed {
        &self.observed
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }
}

impl Sharing for Slots {
    fn find_waits(&self) -> bool {
        self.find_waits
    }

    fn is_still_there(&self, _: &Found) -> bool {
        !lock(&self.state).has_moved
    }
}

/// Moves bytes on a thread of its own, one transfer after the other, unless it is told to wait.
pub(super) struct OneThread {
    shared: Arc<Shared>,
    thread: Option<thread::JoinHandle<()>>,
}

#[derive(Default)]
pub(super) struct Shared {
    state: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Transfers of this direction do not begin.
    held: Option<Direction>,
    /// Transfers that have begun do not end.
    hung: bool,
    /// How the next transfers end: by the system's number, or well.
    failures: VecDeque<Option<i32>>,
    /// The end of the next transfer is never known.
    loses: bool,
    closed: bool,
    /// Transfers end as soon as they are submitted.
    refuses: bool,
    /// How many transfers were submitted together, time after time.
    submitted: Vec<usize>,
    /// How many transfers the thread has ended.
    ended: usize,
}

impl OneThread {
    pub(super) fn start() -> Self {
        let shared = Arc::new(Shared::default());
        let of_thread = shared.clone();
        Self { shared, thread: Some(thread::spawn(move || of_thread.run())) }
    }

    pub(super) fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }
}

impl Shared {
    pub(super) fn hold(&self, direction: Option<Direction>) {
        lock(&self.state).held = direction;
        self.changed.notify_all();
    }

    pub(super) fn hang(&self, hung: bool) {
        lock(&self.state).hung = hung;
        self.changed.notify_all();
    }

    pub(super) fn lose_next(&self) {
        lock(&self.state).loses = true;
    }

    /// How many transfers were submitted together since this was last asked for.
    pub(super) fn submitted(&self) -> Vec<usize> {
        std::mem::take(&mut lock(&self.state).submitted)
    }

    /// How many transfers wait for the thread.
    pub(super) fn waiting(&self) -> usize {
        lock(&self.state).jobs.len()
    }

    /// How many transfers the thread has ended.
    pub(super) fn ended(&self) -> usize {
        lock(&self.state).ended
    }

    pub(super) fn refuse(&self) {
        lock(&self.state).refuses = true;
    }

    pub(super) fn fail_next(&self, errno: i32) {
        self.fail_after(0, errno);
    }

    /// Lets so many transfers succeed first.
    pub(super) fn fail_after(&self, others: usize, errno: i32) {
        let mut state = lock(&self.state);
        state.failures.extend(std::iter::repeat_n(None, others));
        state.failures.push_back(Some(errno));
    }

    fn run(&self) {
        let mut state = lock(&self.state);
        loop {
            let held = state.held;
            let next = state.jobs.iter().position(|job| Some(job.direction) != held);
            let Some(job) = next.and_then(|next| state.jobs.remove(next)) else {
                if state.closed {
                    return;
                }
                state = self.changed.wait(state).unwrap();
                continue;
            };
            while state.hung {
                state = self.changed.wait(state).unwrap();
            }
            let failure = state.failures.pop_front().flatten();
            let is_lost = std::mem::take(&mut state.loses);
            drop(state);
            if is_lost {
                let lost = std::io::Error::from_raw_os_error(libc::EIO);
                end(job, Outcome::failed(Failure::Lost(lost)));
            } else {
                execute(job, failure);
            }
            state = lock(&self.state);
            state.ended += 1;
        }
    }
}

impl Transfers for OneThread {
    fn submit(&self, jobs: Vec<Job>) {
        let mut state = lock(&self.shared.state);
        if state.refuses {
            drop(state);
            let refused = || Failure::Io(std::io::Error::from_raw_os_error(libc::ENODEV));
            return jobs.into_iter().for_each(|job| end(job, Outcome::failed(refused())));
        }
        state.submitted.push(jobs.len());
        state.jobs.extend(jobs);
        drop(state);
        self.shared.changed.notify_all();
    }

    fn cancel(&self, tag: u64) -> usize {
        let mut state = lock(&self.shared.state);
        let (cancelled, kept): (VecDeque<_>, _) = state.jobs.drain(..).partition(|job| job.tag == tag);
        state.jobs = kept;
        drop(state);
        let count = cancelled.len();
        cancelled.into_iter().for_each(|job| end(job, Outcome::failed(Failure::Cancelled)));
        count
    }

    fn report(&self) -> IoReport {
        IoReport {
            route: Route::Threads,
            threads: 1,
            bounce_bytes: 0,
            numa_node: None,
            notes: Vec::new(),
            proofs: Vec::new(),
            refused: Vec::new(),
        }
    }

    unsafe fn register_device(&self, _: hoistway_device::DeviceId, _: u64, _: u64) -> Result<DeviceRegion> {
        Err(crate::Error::Internal("there are no devices here".into()))
    }
}

impl Drop for OneThread {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        state.closed = true;
        state.held = None;
        drop(state);
        self.shared.changed.notify_all();
        self.thread.take().unwrap().join().unwrap();
    }
}

fn end(job: Job, outcome: Outcome) {
    let Job { keep, done, .. } = job;
    match outcome.result {
        Err(Failure::Lost(_)) => std::mem::forget(keep),
        _ => drop(keep),
    }
    done(outcome);
}

fn execute(mut job: Job, failure: Option<i32>) {
    if let Some(errno) = failure {
        return end(job, Outcome::failed(Failure::Io(std::io::Error::from_raw_os_error(errno))));
    }
    let started = Some(Instant::now());
    let file = job.file.open().unwrap();
    let file = file.buffered();
    let (mut checksums, mut carried) = (Vec::new(), 0);
    for part in &job.parts {
        let mut bytes = vec![0; part.len as usize];
        let mut at = 0;
        if job.direction == Direction::Read {
            file.read_exact_at(&mut bytes, part.offset).unwrap();
        }
        for piece in &part.pieces {
            let len = piece.len as usize;
            let memory = std::ptr::with_exposed_provenance_mut::<u8>(piece.address as usize);
            // SAFETY: the maker of the request promised that this is memory, and keeps it.
            unsafe {
                match job.direction {
                    Direction::Read => memory.copy_from_nonoverlapping(bytes[at..].as_ptr(), len),
                    Direction::Write => memory.copy_to_nonoverlapping(bytes[at..].as_mut_ptr(), len),
                }
            }
            at += len;
        }
        if job.direction == Direction::Write {
            file.write_all_at(&bytes, part.offset).unwrap();
        }
        checksums.push(
            (job.checksums != Checksums::Skip)
                .then(|| crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &bytes) as u32),
        );
        carried += part.len;
    }
    let mut header = Vec::new();
    carried += if matches!(job.header, Header::None) { 0 } else { HEADER_LEN as u64 };
    match std::mem::replace(&mut job.header, Header::None) {
        Header::None => {}
        Header::Read { offset } => {
            header.resize(HEADER_LEN, 0);
            file.read_exact_at(&mut header, offset).unwrap();
        }
        Header::Write { offset, make } => file.write_all_at(&make(&checksums), offset).unwrap(),
    }
    let carried = vec![(Carrier::ThreadsBuffered, carried)];
    let outcome = Outcome { result: Ok(()), header, checksums, carried, bounced_bytes: 0, started };
    end(job, outcome);
}
