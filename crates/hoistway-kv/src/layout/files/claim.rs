//! Places for new blocks: files that do not have their final name yet.
#![forbid(unsafe_code)]

use super::{FilesShared, lock, namespaces::Namespace, writer::Writer};
use crate::{
    DropReason, Error, Result,
    disk::{Disk, Extend, FileAccess, LazyFile, expect_directory, metadata},
    format::{MAX_SHARDS, PAGE, header::MAX_SHARD_LEN, now_seconds},
    index::MAX_SLOT_BYTES,
    layout::{BlockPlace, Claim, NewBlock, Reservation},
};
use rustix::io::Errno;
use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// A file that a block is written to.
#[derive(Debug)]
pub(super) struct FileClaim {
    shared: Arc<FilesShared>,
    pub(super) namespace: Arc<Namespace>,
    fingerprint: crate::Fingerprint,
    /// The file that is being written, as soon as there is one.
    pub(super) temporary: Option<PathBuf>,
    /// The name that it will have.
    pub(super) path: PathBuf,
    /// Bytes of the file.
    pub(super) file_len: u64,
    /// Bytes that are taken for it, as it is not in the index: 0 before and afterwards.
    pub(super) reserved: AtomicU64,
    /// Whether the file has its final name: the temporary name is free, or belongs to another file, by now.
    pub(super) is_published: AtomicBool,
}

impl Drop for FileClaim {
    fn drop(&mut self) {
        let reserved = self.reserved.load(Ordering::Acquire);
        match self.temporary.take().filter(|_| !self.is_published.load(Ordering::Acquire)) {
            // The thread that drops a claim may not wait for the disk.
            Some(temporary) => lock(&self.shared.given_up).push((temporary, reserved)),
            None => self.shared.room.give_up(reserved),
        }
        lock(&self.shared.in_flight).remove(&self.fingerprint);
    }
}

impl FilesShared {
    /// Removes files of blocks that were given up.
    pub(super) fn sweep(&self) {
        let given_up = std::mem::take(&mut *lock(&self.given_up));
        for (temporary, reserved) in given_up {
            match self.disk.remove(&temporary) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::debug!(path = %temporary.display(), %error, "a file that was given up cannot be removed");
                    lock(&self.given_up).push((temporary, reserved));
                }
                _ => self.room.give_up(reserved),
            }
        }
    }

    pub(super) fn reserve(self: &Arc<Self>, block: NewBlock) -> Result<Reservation> {
        let writer = self.writer()?;
        let namespace = self.namespaces.get(block.namespace).ok_or_else(|| {
            Error::InvalidRequest(format!("the namespace {} was not opened", block.namespace))
        })?;
        let is_bare = namespace.tree.is_bare();
        let path = namespace.path(block.fingerprint, Some(block.key.as_bytes()));
        let Some(path) = path.filter(|_| !is_bare || block.shards == 1) else {
            return Err(Error::InvalidRequest(format!(
                "a block {} of {} shards: files as vLLM writes them have one shard, and are named by a hash of 3 to 120 \
                 bytes and the number of a group, in 4 bytes",
                block.key, block.shards
            )));
        };
        let Some((stride, payload_len, file_len)) = lengths(&block, is_bare) else {
            return Ok(Reservation::Dropped(DropReason::TooLarge));
        };
        let now = now_seconds();
        if self.index.contains(&block.fingerprint, now) || self.is_there(&namespace, &block, &path)? {
            return Ok(Reservation::Exists);
        }
        if !lock(&self.in_flight).insert(block.fingerprint) {
            return Ok(Reservation::InFlight);
        }
        // From here on, whatever happens is undone by dropping it.
        let mut claim = FileClaim {
            shared: Arc::clone(self),
            namespace,
            fingerprint: block.fingerprint,
            temporary: None,
            path,
            file_len,
            reserved: AtomicU64::new(0),
            is_published: AtomicBool::new(false),
        };
        if block.expires.is_some() {
            claim.namespace.mark_expiring(&self.disk, writer)?;
        }
        if !self.index.admit(&block.fingerprint, now) {
            return Ok(Reservation::Dropped(DropReason::NotAdmitted));
        }
        if let Err(reason) = self.take_room(claim.namespace.number, file_len) {
            return Ok(Reservation::Dropped(reason));
        }
        claim.reserved.store(file_len, Ordering::Release);
        let Some(file) = self.create(writer, &mut claim, file_len)? else {
            return Ok(Reservation::Dropped(DropReason::NoRoom));
        };
        let header = (!is_bare).then_some(payload_len);
        let place = BlockPlace { file, header, payload: 0, stride, shards: block.shards };
        Ok(Reservation::Claimed(Claim {
            block,
            place,
            writer: writer.id(),
            sequence: self.number(),
            token: Box::new(claim),
        }))
    }

    /// Whether another process has written it. One whose time is over goes, so that it can be written anew. A file of
    /// vLLM's that is longer than the block stays, as vLLM may load it: loads of it end as a mismatch.
    fn is_there(&self, namespace: &Arc<Namespace>, block: &NewBlock, path: &Path) -> Result<bool> {
        match metadata(path) {
            Ok(metadata) => {
                let Some(entry) =
                    self.adopt(namespace, block.fingerprint, block.key.as_bytes(), &metadata, path)
                else {
                    return Ok(false);
                };
                if !entry.is_expired(now_seconds()) {
                    return Ok(true);
                }
                let removed = self.index.remove_if(&block.fingerprint, |_, is_pinned| !is_pinned);
                if let Some(removed) = removed
                    && self.unlink(&removed)
                {
                    self.observed.expired(&[removed]);
                    return Ok(false);
                }
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(super::failed("asking for", path)(error)),
        }
    }

    /// Makes the file, with all the room that it needs. `None` if there is not enough.
    fn create(&self, writer: &Writer, claim: &mut FileClaim, file_len: u64) -> Result<Option<LazyFile>> {
        let mut temporary = writer.temporary();
        let mut made = self.disk.open(&temporary, FileAccess::CreateNew);
        if made.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            self.restart_writer()?;
            temporary = writer.temporary();
            made = self.disk.open(&temporary, FileAccess::CreateNew);
        }
        let file = match made {
            Ok(made) => made,
            Err(error) if is_full(&error) => return Ok(None),
            Err(error) => return Err(super::failed("making", &temporary)(error)),
        };
        claim.temporary = Some(temporary.clone());
        let mut allocated = file.allocate(file_len, Extend::Yes);
        if allocated.as_ref().is_err_and(is_full) && self.make_room(file_len) > 0 {
            allocated = file.allocate(file_len, Extend::Yes);
        }
        match allocated {
            Ok(()) => Ok(Some(LazyFile::made(temporary))),
            Err(error) if is_full(&error) => Ok(None),
            Err(error) => Err(super::failed("allocating", &temporary)(error)),
        }
    }

    /// Makes the directories that a file is in.
    pub(super) fn make_directories(&self, namespace: &Namespace, path: &Path) -> io::Result<()> {
        let mut missing: Vec<&Path> = path.ancestors().skip(1).take(namespace.tree.depth() + 1).collect();
        while let Some(directory) = missing.pop() {
            match expect_directory(directory) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
                Ok(()) => continue,
            }
            self.disk.create_directory(directory)?;
            lock(&self.durable).remove(directory);
            self.room.add_directory(namespace);
        }
        Ok(())
    }
}

fn is_full(error: &io::Error) -> bool {
    [Errno::NOSPC, Errno::DQUOT].iter().any(|full| error.raw_os_error() == Some(full.raw_os_error()))
}

/// Bytes between shards, of all shards, and of the file while it is written.
fn lengths(block: &NewBlock, is_bare: bool) -> Option<(u64, u64, u64)> {
    if block.shards == 0 || block.shards > MAX_SHARDS || block.shard_len > MAX_SHARD_LEN {
        return None;
    }
    let stride = block.stride()?;
    let payload_len = stride.checked_mul(block.shards.into())?;
    let file_len = if is_bare { payload_len } else { payload_len.checked_add(PAGE as u64)? };
    (file_len <= MAX_SLOT_BYTES && i64::try_from(file_len).is_ok()).then_some((stride, payload_len, file_len))
}
