//! Blocks that are looked for, and whether what is there is what was stored.
#![forbid(unsafe_code)]

use super::{FilesShared, MOST_ABSENT, checksum, lock, names::Tree, namespaces::Namespace};
use crate::{
    Error, Fingerprint, Key, NamespaceId, Result,
    disk::{Disk, FileAccess, LazyFile, metadata, open_regular},
    format::{BLOCK_LEN, Invalid, PAGE, Shard, ShardTable, expiry_seconds, header::BlockHeader, now_seconds},
    index::{self, Entry, Existing, Inserted, ReadHold, Slot},
    layout::{BlockPlace, Found, Lookup, Verdict},
};
use std::{
    fs::{File, Metadata},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

/// The slot of an entry says how many shards its block has. 0: the file has not been read yet.
pub(super) const UNKNOWN_SHARDS: Slot = Slot { segment: 0, slot: 0 };

/// The identity of a file. Numbers of inodes are reused, and times of modification are set back by programs that copy
/// files. The time of the last change is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId {
    device: u64,
    inode: u64,
    len: u64,
    changed: (i64, i64),
}

impl FileId {
    pub(super) fn of(metadata: &Metadata) -> Self {
        let changed = (metadata.ctime(), metadata.ctime_nsec());
        Self { device: metadata.dev(), inode: metadata.ino(), len: metadata.len(), changed }
    }

    /// Whether both have the same number, which tells little of when.
    pub(super) fn is_same_inode(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }

    /// The number of its file system.
    pub(super) fn device(&self) -> u64 {
        self.device
    }
}

/// A block that is being read.
#[derive(Debug)]
struct FileFound {
    namespace: Arc<Namespace>,
    fingerprint: Fingerprint,
    id: FileId,
    file_len: u64,
    /// Of a block without a page that describes it.
    checksum: Option<u32>,
    /// Blocks that are being read are evicted last.
    _hold: Option<ReadHold>,
}

impl FilesShared {
    pub(super) fn find(&self, namespace: NamespaceId, key: &Key, fingerprint: Fingerprint) -> Lookup {
        let Some(namespace) = self.namespaces.get(namespace) else { return Lookup::Miss };
        let now = now_seconds();
        let (known, hold) = match self.index.get(&fingerprint, now) {
            index::Lookup::Found(entry, hold) => (Some(entry), Some(hold)),
            index::Lookup::Expired => return Lookup::Expired,
            index::Lookup::Miss => (None, None),
        };
        let Some(path) = namespace.path(fingerprint, Some(key.as_bytes())) else { return Lookup::Miss };
        let metadata = match metadata(&path) {
            Ok(metadata) if metadata.is_file() => metadata,
            Ok(_) => return Lookup::Miss,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.vanished(&namespace, &fingerprint);
                return Lookup::Miss;
            }
            Err(error) => return Lookup::Failed(error),
        };
        let entry = match known {
            Some(entry) => entry,
            None => match self.adopt(&namespace, fingerprint, key.as_bytes(), &metadata, &path) {
                Some(entry) if entry.is_expired(now) => return Lookup::Expired,
                Some(entry) => entry,
                None => return Lookup::Miss,
            },
        };
        let is_bare = namespace.tree.is_bare();
        let checksum = if is_bare { checksum::read(&path, &metadata) } else { None };
        match self.place(&namespace, fingerprint, entry, path, &metadata) {
            Ok(place) => {
                // Bare files are synced before they have their names. Others have pages with checksums.
                let is_proven = is_bare || !self.unsynced.is_there();
                let token = FileFound {
                    fingerprint,
                    id: FileId::of(&metadata),
                    file_len: metadata.len(),
                    checksum,
                    namespace,
                    _hold: hold,
                };
                Lookup::Found(Found { place, is_held: true, is_proven, token: Box::new(token) })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Lookup::Miss,
            Err(error) => Lookup::Failed(error),
        }
    }

    /// The places of header and shards, if the file is what it should be. If it is not, reading them shows it.
    fn place(
        &self,
        namespace: &Namespace,
        fingerprint: Fingerprint,
        entry: Entry,
        path: PathBuf,
        metadata: &Metadata,
    ) -> io::Result<BlockPlace> {
        let len = metadata.len();
        if namespace.tree.is_bare() {
            let stride = len.checked_next_multiple_of(BLOCK_LEN).unwrap_or(len);
            let file = LazyFile::found(path, metadata);
            return Ok(BlockPlace { file, header: None, payload: 0, stride, shards: 1 });
        }
        // A file that was cut short has no page there, or another one.
        let header = len.div_ceil(BLOCK_LEN).saturating_sub(1) * BLOCK_LEN;
        let mut shards = entry.slot.segment;
        if shards == 0 {
            shards = read_shards(&open_regular(&path, FileAccess::Read)?, header)?;
            self.index.amend(&fingerprint, |entry| entry.slot.segment = shards);
        }
        let stride = (header / u64::from(shards.max(1))) / BLOCK_LEN * BLOCK_LEN;
        let file = LazyFile::found(path, metadata);
        Ok(BlockPlace { file, header: Some(header), payload: 0, stride, shards })
    }

    pub(super) fn check(&self, found: &Found, key: &Key, header: &[u8]) -> Verdict {
        let Some(token) = found.token.downcast_ref::<FileFound>() else {
            return Verdict::Moved;
        };
        if token.namespace.tree.is_bare() {
            return Verdict::Good(ShardTable(vec![Shard { len: token.file_len, checksum: token.checksum }]));
        }
        let corrupt = |why: String| Verdict::Corrupt(format!("{}: {why}", found.place.file.path().display()));
        let header = match BlockHeader::parse(header) {
            Ok(header) => header,
            // Another version's. It is none of ours, but nothing is wrong with it.
            Err(Invalid::Version { .. }) => return Verdict::Moved,
            Err(why) => return corrupt(why.to_string()),
        };
        let payload_len = header.stride.checked_mul(header.table.0.len() as u64);
        if header.fingerprint != token.fingerprint || payload_len != found.place.header {
            return corrupt("it is another block's file, or has another length".into());
        }
        if header.key != *key || header.namespace != token.namespace.id {
            return Verdict::Moved;
        }
        if header.expires != 0 && header.expires <= now_seconds() {
            self.index.amend(&token.fingerprint, |entry| entry.expires = header.expires);
            return Verdict::Moved;
        }
        let shards = header.table.0.len() as u32;
        if header.stride != found.place.stride || shards != found.place.shards {
            // What the index knew was about an earlier file.
            self.index.amend(&token.fingerprint, |entry| entry.slot.segment = shards);
            return Verdict::Moved;
        }
        Verdict::Good(header.table)
    }

    /// Removes the very file that is damaged. Without that, the block could never be stored again.
    pub(super) fn invalidate(&self, found: &Found) {
        let Some(token) = found.token.downcast_ref::<FileFound>() else { return };
        self.invalidate_file(token.fingerprint, token.id, found.place.file.path());
    }

    pub(super) fn invalidate_file(&self, fingerprint: Fingerprint, id: FileId, path: &Path) {
        self.observed.corrupt();
        let bytes = self.index.remove(&fingerprint).map_or(0, |known| known.entry.slot_bytes);
        let is_same = metadata(path).is_ok_and(|metadata| FileId::of(&metadata) == id);
        if !is_same {
            self.peers.vanished(bytes);
            return;
        }
        let removed = match &self.writer {
            Some(_) => self.disk.remove(path),
            None => Err(io::ErrorKind::ReadOnlyFilesystem.into()),
        };
        match removed {
            Ok(()) => self.room.removed(bytes),
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "a damaged block is left where it is");
                // The file is in no index, and takes room all the same.
                self.peers.vanished(bytes);
                lock(&self.damaged).insert(fingerprint, id);
            }
        }
    }

    /// Whether a block that is not in the index is there all the same.
    pub(super) fn asks(&self, namespace: &Arc<Namespace>, fingerprint: Fingerprint, key: &[u8]) -> bool {
        if self.index.peek(&fingerprint).is_some() {
            // It is known, and its time is over.
            return false;
        }
        let absent = lock(&self.absent).get(&fingerprint);
        if absent.is_some_and(|since| since.elapsed() < self.timing.absence) {
            return false;
        }
        let Some(path) = namespace.path(fingerprint, Some(key)) else { return false };
        match metadata(&path) {
            Ok(metadata) => {
                let entry = self.adopt(namespace, fingerprint, key, &metadata, &path);
                entry.is_some_and(|entry| !entry.is_expired(now_seconds()))
            }
            Err(_) => {
                lock(&self.absent).insert(&fingerprint, Instant::now(), MOST_ABSENT);
                false
            }
        }
    }

    /// Takes in a file that is there. `None` if it is none, or is known to be damaged.
    pub(super) fn adopt(
        &self,
        namespace: &Arc<Namespace>,
        fingerprint: Fingerprint,
        key: &[u8],
        metadata: &Metadata,
        path: &Path,
    ) -> Option<Entry> {
        let is_damaged = lock(&self.damaged).get(&fingerprint) == Some(&FileId::of(metadata));
        if !metadata.is_file() || is_damaged {
            return None;
        }
        if let Some(known) = self.index.peek(&fingerprint) {
            return Some(known);
        }
        let modified = metadata.modified().ok()?;
        let mut expires = expiry_seconds(namespace.expires(modified));
        if namespace.has_expiring()
            && let Ok(file) = open_regular(path, FileAccess::Read)
            && let Some(header) = read_page(&file).ok().and_then(|page| BlockHeader::parse(&page).ok())
            && header.expires != 0
        {
            expires = if expires == 0 { header.expires } else { expires.min(header.expires) };
        }
        let entry = self.entry_of(namespace, metadata.len(), expires);
        namespace.note_key(fingerprint, key);
        match self.index.insert(fingerprint, &entry, Existing::Keep) {
            Inserted::Kept(known) => Some(known),
            _ => {
                // Files in a layout of others may be there although no writer reported them. A block that this process
                // is storing now counts as one of its blocks.
                if !namespace.tree.is_bare() && !lock(&self.in_flight).contains(&fingerprint) {
                    self.peers.adopted(entry.slot_bytes);
                }
                Some(entry)
            }
        }
    }

    /// Another process has removed it.
    fn vanished(&self, namespace: &Namespace, fingerprint: &Fingerprint) {
        if let Some(known) = self.index.remove(fingerprint) {
            self.peers.vanished(known.entry.slot_bytes);
            namespace.forget_key(fingerprint);
        }
    }

    pub(super) fn key_of(&self, fingerprint: Fingerprint) -> Result<Option<Key>> {
        let Some(entry) = self.index.peek(&fingerprint) else { return Ok(None) };
        let Some(namespace) = self.namespaces.numbered(entry.namespace) else { return Ok(None) };
        if let Tree::Bare(_) = namespace.tree {
            return Ok(namespace.key_of(&fingerprint).and_then(|key| Key::new(&key).ok()));
        }
        let Some(path) = namespace.path(fingerprint, None) else { return Ok(None) };
        let file = match open_regular(&path, FileAccess::Read) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(super::failed("reading", &path)(error)),
        };
        let reason = match read_page(&file) {
            Ok(page) => match BlockHeader::parse(&page) {
                Ok(header) if header.fingerprint == fingerprint => return Ok(Some(header.key)),
                Ok(_) => "it is another block's file".into(),
                // Another version's. It is none of ours, but nothing is wrong with it.
                Err(Invalid::Version { .. }) => return Ok(None),
                Err(why) => why.to_string(),
            },
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => "it was cut short".into(),
            Err(error) => return Err(super::failed("reading", &path)(error)),
        };
        let metadata = file.metadata().map_err(super::failed("reading", &path))?;
        self.invalidate_file(fingerprint, FileId::of(&metadata), &path);
        Err(Error::DamagedBlock { fingerprint, reason: format!("{}: {reason}", path.display()) })
    }
}

/// The page that describes a block.
fn read_page(file: &File) -> io::Result<Vec<u8>> {
    let mut page = vec![0; PAGE];
    let len = file.metadata()?.len();
    file.read_exact_at(&mut page, len.saturating_sub(PAGE as u64))?;
    Ok(page)
}

/// The number of shards that a block's description gives; 1 if it has none.
fn read_shards(file: &File, header: u64) -> io::Result<u32> {
    let mut page = vec![0; PAGE];
    match file.read_exact_at(&mut page, header) {
        Ok(()) => Ok(BlockHeader::parse(&page).map_or(1, |header| header.table.0.len() as u32)),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(1),
        Err(error) => Err(error),
    }
}
