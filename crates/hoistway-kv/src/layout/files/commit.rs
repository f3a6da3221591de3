//! Blocks that are whole take their names.
#![forbid(unsafe_code)]

use super::{FilesShared, checksum, claim::FileClaim, failed, find::FileId, lock, names::Tree};
use crate::{
    Durability, Error, EventKind, Result,
    disk::{Disk, FileAccess, expect_directory, metadata, open_regular},
    format::{Shard, expiry_seconds},
    index::{Existing, Slot},
    layout::Written,
};
use hoistway_io::parallel::map;
use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

/// Threads that wait for the disk at the same time.
const SYNC_THREADS: usize = 16;

impl FilesShared {
    /// Data is on the disk before a block has its name, and names before it is told that they are.
    pub(super) fn commit(&self, blocks: Vec<Written>) -> Vec<Result<()>> {
        let mut results = map(&blocks, SYNC_THREADS, |block| self.finish(block));
        let mut directories = BTreeMap::<PathBuf, Vec<usize>>::new();
        for (number, (block, result)) in blocks.iter().zip(&mut results).enumerate() {
            if result.is_err() {
                continue;
            }
            match self.publish(block) {
                Ok(directory) => directories.entry(directory).or_default().push(number),
                Err(error) => *result = Err(error),
            }
        }
        if self.durability != Durability::None {
            let directories: Vec<_> = directories.into_iter().collect();
            let synced = map(&directories, SYNC_THREADS, |(directory, _)| {
                self.sync_names(directory).map_err(failed("syncing", directory))
            });
            for ((directory, numbers), synced) in directories.iter().zip(synced) {
                let Err(error) = synced else { continue };
                for &number in numbers {
                    // Whether the block would survive a crash is not known, so it must not be found.
                    if let Some(claim) = blocks[number].claim.token.downcast_ref::<FileClaim>()
                        && claim.is_published.load(Ordering::Acquire)
                    {
                        let _ = self.disk.remove(&claim.path);
                        self.index.remove(&blocks[number].claim.block.fingerprint);
                    }
                    results[number] = Err(Error::Io {
                        operation: "syncing",
                        path: directory.clone(),
                        source: io::Error::other(error.to_string()),
                    });
                }
            }
        }
        // From the last to the first: of a prefix, the tail goes first.
        for (block, result) in blocks.iter().zip(&mut results).rev() {
            if result.is_ok() {
                self.take_in(block);
            }
        }
        results
    }

    /// Syncs the names in a directory, the name of the directory, and those of the directories above it, also if another
    /// process made them.
    fn sync_names(&self, directory: &Path) -> io::Result<()> {
        self.disk.sync_directory(directory)?;
        let unproven: Vec<&Path> = directory
            .ancestors()
            .take_while(|above| above.starts_with(&self.root) && **above != self.root)
            .take_while(|above| !lock(&self.durable).contains(*above))
            .collect();
        for directory in &unproven {
            self.disk.sync_directory(directory.parent().unwrap_or(&self.root))?;
        }
        lock(&self.durable).extend(unproven.into_iter().map(Path::to_owned));
        Ok(())
    }

    /// Gives a file its length. Syncs its bytes if the durability asks for that, or if no checksum could show that they
    /// are not the bytes that were written.
    fn finish(&self, block: &Written) -> Result<()> {
        let claim = claim_of(block)?;
        let path = block.claim.place.file.path();
        let file = block.claim.place.file.open().map_err(failed("opening", path))?;
        let file = file.buffered();
        let is_bare = claim.namespace.tree.is_bare();
        if let ([shard], true) = (block.table.0.as_slice(), is_bare)
            && shard.len < claim.file_len
        {
            file.set_len(shard.len).map_err(failed("setting the length of", path))?;
        }
        let is_unproven = is_bare || block.table.0.iter().any(|shard| shard.checksum.is_none());
        if self.durability != Durability::None || is_unproven {
            file.sync_data().map_err(failed("syncing", path))?;
        }
        if let ([Shard { checksum: Some(checksum), .. }], true) = (block.table.0.as_slice(), is_bare)
            && let Err(error) = checksum::write(file, *checksum)
        {
            // The block is there all the same, and its checksum is not compared.
            self.note_no_checksums(&error);
        }
        Ok(())
    }

    fn note_no_checksums(&self, error: &io::Error) {
        self.told_of_checksums.call_once(|| {
            let reason = format!(
                "files as vLLM writes them have no checksums: the file system of {} takes no extended attribute: {error}",
                self.root.display()
            );
            self.observed.note(EventKind::NoChecksums, reason);
        });
    }

    /// Gives a file its name; says in which directory. If another process was faster, its block is as good, unless it is
    /// known to be damaged.
    fn publish(&self, block: &Written) -> Result<PathBuf> {
        let claim = claim_of(block)?;
        let temporary = block.claim.place.file.path();
        check_directories(&claim.namespace.tree, &claim.path)
            .map_err(failed("writing below", &claim.path))?;
        let mut renamed = self.disk.rename_new(temporary, &claim.path);
        if renamed.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            renamed = self
                .make_directories(&claim.namespace, &claim.path)
                .and_then(|()| self.disk.rename_new(temporary, &claim.path));
        }
        match renamed {
            Ok(()) => claim.is_published.store(true, Ordering::Release),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let there = metadata(&claim.path).map_err(failed("asking for", &claim.path))?;
                if !there.is_file() {
                    return Err(failed("giving its name to", &claim.path)(error));
                }
                let damaged = lock(&self.damaged).get(&block.claim.block.fingerprint).copied();
                if damaged == Some(FileId::of(&there)) {
                    let replaced = self.disk.rename(temporary, &claim.path);
                    replaced.map_err(failed("replacing the damaged block", &claim.path))?;
                    claim.is_published.store(true, Ordering::Release);
                } else if self.durability != Durability::None {
                    // The process that stored the block may not have synced it.
                    let synced =
                        open_regular(&claim.path, FileAccess::Read).and_then(|file| file.sync_data());
                    synced.map_err(failed("syncing", &claim.path))?;
                }
            }
            Err(error) => return Err(failed("giving its name to", &claim.path)(error)),
        }
        Ok(claim.path.parent().unwrap_or(Path::new(".")).to_owned())
    }

    /// From now on the block is found.
    fn take_in(&self, block: &Written) {
        let Ok(claim) = claim_of(block) else { return };
        let fingerprint = block.claim.block.fingerprint;
        lock(&self.absent).remove(&fingerprint);
        if !claim.is_published.load(Ordering::Acquire) {
            return;
        }
        lock(&self.damaged).remove(&fingerprint);
        claim.namespace.note_key(fingerprint, block.claim.block.key.as_bytes());
        let payload_len = block.table.0.iter().fold(0, |sum: u64, shard| sum.saturating_add(shard.len));
        let mut entry =
            self.entry_of(&claim.namespace, claim.file_len, expiry_seconds(block.claim.block.expires));
        entry.payload_len = payload_len;
        entry.slot = Slot { segment: block.table.0.len() as u32, slot: 0 };
        let mut bytes = self.room.lock();
        self.index.insert(fingerprint, &entry, Existing::Replace);
        bytes.settle(claim.reserved.swap(0, Ordering::AcqRel));
    }
}

/// Returns an error if a directory that a file is in is a link: the file would be another tree's.
fn check_directories(tree: &Tree, path: &Path) -> io::Result<()> {
    path.ancestors().skip(1).take(tree.depth() + 1).try_for_each(|directory| {
        match expect_directory(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            checked => checked,
        }
    })
}

fn claim_of(block: &Written) -> Result<&FileClaim> {
    let claim = block.claim.token.downcast_ref::<FileClaim>();
    claim.ok_or_else(|| Error::Internal("a claim of another layout".into()))
}
