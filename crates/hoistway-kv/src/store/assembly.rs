//! Blocks that have some of their shards.
#![forbid(unsafe_code)]

use super::group::{Group, GroupItem};
use crate::{
    Fingerprint, Key, NamespaceId, Status,
    format::{Shard, ShardTable},
    io::Failure,
    layout::{BlockPlace, Claim, Layout, NewBlock, Written},
};
use hoistway_io::parallel::lock;
use std::{
    collections::HashMap,
    mem,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// What the failure of a write says of the place that was written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PlaceFailure {
    /// Nothing: a full disk, for one, has no room anywhere.
    None,
    /// The drive failed. The place may be the reason.
    Suspected,
    /// The drive says that the place is bad.
    Certain,
}

impl PlaceFailure {
    pub(crate) fn of(failure: &Failure) -> Self {
        let Failure::Io(error) = failure else { return Self::None };
        match error.raw_os_error() {
            Some(libc::EIO | libc::EREMOTEIO) => Self::Suspected,
            // An error of the medium, or of the protection of its sectors.
            Some(libc::ENODATA | libc::EILSEQ) => Self::Certain,
            _ => Self::None,
        }
    }

    /// Leaves a place of which this is known.
    pub(crate) fn leave(self, layout: &dyn Layout, claim: Claim) {
        match self {
            Self::None => drop(claim),
            Self::Suspected => layout.fail(claim),
            Self::Certain => layout.lose(claim),
        }
    }
}

/// Every block that is being written by this process, until it is found or given up.
#[derive(Default)]
pub(crate) struct Assemblies {
    blocks: Mutex<HashMap<Fingerprint, Arc<Assembly>>>,
}

impl Assemblies {
    pub(crate) fn get(&self, block: Fingerprint) -> Option<Arc<Assembly>> {
        lock(&self.blocks).get(&block).cloned()
    }

    pub(crate) fn insert(&self, block: Fingerprint, assembly: Arc<Assembly>) {
        lock(&self.blocks).insert(block, assembly);
    }

    /// It is found, or was given up.
    pub(crate) fn remove(&self, assembly: &Arc<Assembly>) {
        let mut blocks = lock(&self.blocks);
        if blocks.get(&assembly.fingerprint).is_some_and(|other| Arc::ptr_eq(other, assembly)) {
            blocks.remove(&assembly.fingerprint);
        }
    }

    pub(crate) fn len(&self) -> usize {
        lock(&self.blocks).len()
    }

    /// Gives up blocks to which nothing was added for this long.
    pub(crate) fn abandon_older_than(&self, age: Duration, layout: &dyn Layout) -> Vec<Arc<Assembly>> {
        let all: Vec<_> = lock(&self.blocks).values().cloned().collect();
        let abandon = |assembly: &Arc<Assembly>| {
            let Some((claim, failure)) = assembly.abandon_if(age) else { return false };
            failure.leave(layout, claim);
            self.remove(assembly);
            true
        };
        all.into_iter().filter(abandon).collect()
    }
}

/// One block that is being written.
pub(crate) struct Assembly {
    pub(crate) namespace: NamespaceId,
    pub(crate) key: Key,
    pub(crate) fingerprint: Fingerprint,
    shards: u32,
    place: BlockPlace,
    progress: Mutex<Progress>,
}

struct Progress {
    phase: Phase,
    /// The worst that is known of its place.
    failure: PlaceFailure,
    shards: Vec<ShardState>,
    touched: Instant,
}

enum Phase {
    /// Shards are missing, or being written.
    Gathering(Claim),
    /// The header is being written, by itself or with the last shards.
    Completing(Claim),
    /// It is whole: the group that it is committed with has the claim.
    Committing,
    /// Given up.
    Abandoned,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ShardState {
    Missing,
    Writing,
    Written(Shard),
}

/// What to do with a group of items that wants to be part of a block.
pub(crate) enum Joined {
    /// Write these; end others as it says.
    Write { items: Vec<GroupItem>, others: Vec<(GroupItem, Status)>, part: Share },
    /// The block was given up just now: begin a new one.
    Abandoned(Group),
}

/// What part of the block a transfer writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    /// Some shards: others are missing, or on their way.
    Some,
    /// All that were missing, so that it can write the header too.
    Last,
}

/// What follows from shards that were written.
pub(crate) enum Progressed {
    /// Others are missing, or on their way.
    Waiting,
    /// All are there: the header is to be written now.
    HeaderNext,
    /// It is whole, with its header.
    Whole(Box<Written>),
    /// It was given up meanwhile, and will never be found.
    Abandoned,
}

impl Assembly {
    pub(crate) fn new(claim: Claim) -> Self {
        let NewBlock { namespace, key, fingerprint, shards, .. } = &claim.block;
        Self {
            namespace: *namespace,
            key: key.clone(),
            fingerprint: *fingerprint,
            shards: *shards,
            place: claim.place.clone(),
            progress: Mutex::new(Progress {
                shards: vec![ShardState::Missing; *shards as usize],
                phase: Phase::Gathering(claim),
                failure: PlaceFailure::None,
                touched: Instant::now(),
            }),
        }
    }

    /// Where it is written to.
    pub(crate) fn place(&self) -> &BlockPlace {
        &self.place
    }

    /// Takes on those items that the block lacks. `shards` is what their request says of it.
    pub(crate) fn join(&self, group: Group, shards: u32) -> Joined {
        let mut progress = lock(&self.progress);
        if matches!(progress.phase, Phase::Abandoned) {
            return Joined::Abandoned(group);
        }
        let is_gathering = matches!(progress.phase, Phase::Gathering(_));
        let (mut items, mut others) = (Vec::new(), Vec::new());
        for item in group.items {
            let fits = shards == self.shards && item.len <= self.place.stride && group.key == self.key;
            let status = if !fits {
                Some(Status::Mismatch)
            } else if !is_gathering {
                Some(Status::Exists)
            } else {
                match progress.shards.get_mut(item.shard as usize) {
                    Some(state @ ShardState::Missing) => {
                        *state = ShardState::Writing;
                        None
                    }
                    Some(_) => Some(Status::Exists),
                    None => Some(Status::Mismatch),
                }
            };
            match status {
                None => items.push(item),
                Some(status) => others.push((item, status)),
            }
        }
        items.sort_by_key(|item| item.shard);
        progress.touched = Instant::now();
        let written = progress.shards.iter().filter(|state| matches!(state, ShardState::Written(_))).count();
        let part = if !items.is_empty() && written + items.len() == progress.shards.len() {
            progress.complete();
            Share::Last
        } else {
            Share::Some
        };
        Joined::Write { items, others, part }
    }

    /// The header of the block, once the checksums of the shards are known that are written with it.
    pub(crate) fn header(&self, last: &[(u32, Shard)]) -> Vec<u8> {
        let progress = lock(&self.progress);
        let table = progress.table(last);
        match &progress.phase {
            Phase::Gathering(claim) | Phase::Completing(claim) => claim.header(&table),
            Phase::Committing | Phase::Abandoned => Vec::new(),
        }
    }

    /// Shards have been written.
    pub(crate) fn written(&self, shards: &[(u32, Shard)], part: Share) -> Progressed {
        let mut progress = lock(&self.progress);
        if matches!(progress.phase, Phase::Abandoned) {
            return Progressed::Abandoned;
        }
        for (number, shard) in shards {
            progress.shards[*number as usize] = ShardState::Written(*shard);
        }
        progress.touched = Instant::now();
        if part == Share::Last {
            return progress.commit();
        }
        if progress.shards.iter().all(|state| matches!(state, ShardState::Written(_))) {
            progress.complete();
            return Progressed::HeaderNext;
        }
        Progressed::Waiting
    }

    /// Its header has been written by itself.
    pub(crate) fn header_written(&self) -> Progressed {
        lock(&self.progress).commit()
    }

    /// Shards could not be written, or were not: they are missing again. The claim of the block if it is given up, as it has
    /// none: its place is to be left, as what is known of it says, before another request can claim the block.
    pub(crate) fn failed(
        &self,
        shards: impl IntoIterator<Item = u32>,
        failure: PlaceFailure,
    ) -> Option<(Claim, PlaceFailure)> {
        let mut progress = lock(&self.progress);
        progress.failure = progress.failure.max(failure);
        for shard in shards {
            progress.shards[shard as usize] = ShardState::Missing;
        }
        progress.gather();
        let has_none = progress.shards.iter().all(|state| *state == ShardState::Missing);
        if has_none { progress.give_up() } else { None }
    }

    /// Its place is not to be used any more. The claim, if it still has it.
    pub(crate) fn lose(&self) -> Option<(Claim, PlaceFailure)> {
        lock(&self.progress).give_up()
    }

    fn abandon_if(&self, age: Duration) -> Option<(Claim, PlaceFailure)> {
        let mut progress = lock(&self.progress);
        let is_stale = matches!(progress.phase, Phase::Gathering(_))
            && progress.touched.elapsed() >= age
            && !progress.shards.contains(&ShardState::Writing);
        if is_stale { progress.give_up() } else { None }
    }
}

impl Progress {
    fn complete(&mut self) {
        self.phase = match mem::replace(&mut self.phase, Phase::Abandoned) {
            Phase::Gathering(claim) => Phase::Completing(claim),
            other => other,
        };
    }

    fn gather(&mut self) {
        self.phase = match mem::replace(&mut self.phase, Phase::Abandoned) {
            Phase::Completing(claim) => Phase::Gathering(claim),
            other => other,
        };
    }

    /// The claim, if it still has it, and what is known of its place.
    fn give_up(&mut self) -> Option<(Claim, PlaceFailure)> {
        match mem::replace(&mut self.phase, Phase::Abandoned) {
            Phase::Gathering(claim) | Phase::Completing(claim) => Some((claim, self.failure)),
            Phase::Committing | Phase::Abandoned => None,
        }
    }

    fn commit(&mut self) -> Progressed {
        match mem::replace(&mut self.phase, Phase::Committing) {
            Phase::Gathering(claim) | Phase::Completing(claim) => {
                Progressed::Whole(Box::new(Written { claim, table: self.table(&[]) }))
            }
            other => {
                self.phase = other;
                Progressed::Abandoned
            }
        }
    }

    fn table(&self, last: &[(u32, Shard)]) -> ShardTable {
        let unknown = Shard { len: 0, checksum: None };
        let shard = |(number, state): (usize, &ShardState)| match state {
            ShardState::Written(shard) => *shard,
            _ => {
                last.iter().find(|(other, _)| *other as usize == number).map_or(unknown, |(_, shard)| *shard)
            }
        };
        ShardTable(self.shards.iter().enumerate().map(shard).collect())
    }
}
