//! The entries of a cache together: how much of the drive they take, and which goes first.
#![forbid(unsafe_code)]

use super::{
    OBJECTS, TEMPORARY,
    entry::{BLOCK_BYTES, DATA, Entry, META, Meta},
    io_error, unique,
};
use crate::{Result, parallel::lock, sys::files};
use bytesize::ByteSize;
use hoistway_io::file::{try_lock, unlock};
use serde::Serialize;
use std::{
    fs::{self, File, Metadata},
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, SystemTime},
};

/// Bytes that are written before the room is looked at again, and that part of the limit at most.
const LOOK_EVERY_BYTES: u64 = 64 << 20;
const LOOK_EVERY_PART: u64 = 16;
/// The part of the drive that stays free where no limit is given.
const FREE_PART: u64 = 10;
/// Age after which an unfinished entry was left by a process that was killed.
const LEFT_BEHIND: Duration = Duration::from_secs(3600);

/// An object in the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CacheEntry {
    /// Its URL, without what is secret.
    pub url: String,
    /// Its length.
    pub len: u64,
    /// Bytes of the drive that it takes.
    pub taken_bytes: u64,
    /// When it was last opened.
    pub last_use: SystemTime,
    #[serde(skip)]
    folder: PathBuf,
    #[serde(skip)]
    is_readable: bool,
}

/// The result of verifying the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Verified {
    /// Bytes of blocks that are right.
    pub bytes: u64,
    /// Blocks that were damaged, and are not there any more.
    pub damaged_blocks: u64,
    /// URLs of the objects that they belong to.
    pub damaged: Vec<String>,
}

/// The evicted entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Collected {
    /// Entries.
    pub entries: usize,
    /// Bytes of the drive that they took.
    pub bytes: u64,
    /// Bytes that the others take.
    pub left_bytes: u64,
}

#[derive(Debug)]
pub(super) struct Room {
    root: PathBuf,
    max_bytes: Option<u64>,
    /// Bytes that may be written before the room is looked at again.
    before_look: Mutex<u64>,
}

impl Room {
    pub(super) fn new(root: &Path, max_bytes: Option<u64>) -> Self {
        Self { root: root.to_owned(), max_bytes, before_look: Mutex::new(0) }
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn objects(&self) -> PathBuf {
        self.root.join(OBJECTS)
    }

    /// Entries that are being made or removed.
    pub(super) fn temporary(&self) -> PathBuf {
        self.root.join(TEMPORARY)
    }

    /// The bytes that entries may take, where they take so many now.
    pub(super) fn limit(&self, taken: u64) -> io::Result<u64> {
        if let Some(bytes) = self.max_bytes {
            return Ok(bytes);
        }
        let space = files::space(&self.root)?;
        Ok((taken + space.free_bytes).saturating_sub(space.total_bytes / FREE_PART))
    }

    /// Makes room for `bytes`, and returns whether there is.
    pub(super) fn make(&self, bytes: u64) -> Result<bool> {
        let mut before_look = lock(&self.before_look);
        if let Some(left) = before_look.checked_sub(bytes) {
            *before_look = left;
            return Ok(true);
        }
        let entries = self.entries()?;
        let taken: u64 = entries.iter().map(|entry| entry.taken_bytes).sum();
        let limit =
            self.limit(taken).map_err(|source| io_error("look at the space of", &self.root, source))?;
        let ahead = LOOK_EVERY_BYTES.min(limit / LOOK_EVERY_PART).max(bytes);
        let most = limit.saturating_sub(ahead);
        let taken = if taken > most { self.evict(entries, most)?.left_bytes } else { taken };
        let has_room = taken + bytes <= limit;
        *before_look = ahead.min(limit.saturating_sub(taken)).saturating_sub(bytes);
        Ok(has_room)
    }

    /// Why there is no room, and what would make some.
    pub(super) fn why_full(&self) -> String {
        let space = files::space(&self.root);
        match (self.max_bytes, space) {
            (Some(bytes), _) => {
                format!("what it holds is in use, and its limit of {} has no room for more", ByteSize(bytes))
            }
            (None, Ok(space)) => format!(
                "a tenth of its drive stays free, which has {} free of {}: HOISTWAY_CACHE_BYTES sets another limit",
                ByteSize(space.free_bytes),
                ByteSize(space.total_bytes)
            ),
            (None, Err(_)) => "what it holds is in use, and there is no room for more".to_owned(),
        }
    }

    /// The entries, the one that was used last first.
    pub(super) fn entries(&self) -> Result<Vec<CacheEntry>> {
        let folders = match fs::read_dir(self.objects()) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            folders => folders.map_err(|source| io_error("list", &self.objects(), source))?,
        };
        let entry = |folder: PathBuf| -> Option<CacheEntry> {
            let meta = fs::read(folder.join(META)).ok()?;
            let Meta { url, len } = serde_json::from_slice(&meta).ok()?;
            let last_use = fs::metadata(folder.join(META)).and_then(|meta| meta.modified()).ok()?;
            let taken_bytes = taken_bytes(&fs::metadata(folder.join(DATA)).ok()?);
            Some(CacheEntry { url, len, taken_bytes, last_use, folder, is_readable: true })
        };
        let mut entries: Vec<_> = folders
            .filter_map(|listed| {
                let folder = listed.ok()?.path();
                entry(folder.clone()).or_else(|| unreadable(folder))
            })
            .collect();
        entries.sort_by_key(|entry| std::cmp::Reverse((entry.is_readable, entry.last_use)));
        Ok(entries)
    }

    pub(super) fn collect(&self, max_bytes: Option<u64>) -> Result<Collected> {
        let left =
            fs::read_dir(self.temporary()).into_iter().flatten().filter_map(|left_over| left_over.ok());
        for left_over in left {
            let age = left_over
                .metadata()
                .and_then(|meta| meta.modified())
                .ok()
                .and_then(|time| time.elapsed().ok());
            if age.is_some_and(|age| age >= LEFT_BEHIND) {
                let _ = fs::remove_dir_all(left_over.path());
            }
        }
        let entries = self.entries()?;
        let taken = entries.iter().map(|entry| entry.taken_bytes).sum();
        let limit =
            self.limit(taken).map_err(|source| io_error("look at the space of", &self.root, source))?;
        self.evict(entries, max_bytes.unwrap_or(limit))
    }

    /// Removes entries that are not in use until those that are left take `most` bytes: those that cannot be read, all of
    /// them, and then the least recently used first.
    fn evict(&self, mut entries: Vec<CacheEntry>, most: u64) -> Result<Collected> {
        let mut done = Collected {
            left_bytes: entries.iter().map(|entry| entry.taken_bytes).sum(),
            ..Collected::default()
        };
        while let Some(entry) = entries.pop()
            && (done.left_bytes > most || !entry.is_readable)
        {
            match self.remove_unused(&entry.folder) {
                Ok(true) => {
                    done.entries += 1;
                    done.bytes += entry.taken_bytes;
                    done.left_bytes -= entry.taken_bytes;
                }
                Ok(false) => {}
                // Another process has evicted it.
                Err(error) if error.kind() == ErrorKind::NotFound => done.left_bytes -= entry.taken_bytes,
                Err(source) => return Err(io_error("evict", &entry.folder, source)),
            }
        }
        Ok(done)
    }

    /// Removes an entry unless a process has it open, and returns whether it did.
    fn remove_unused(&self, folder: &Path) -> io::Result<bool> {
        let Some(unused) = Unused::lock(folder) else { return Ok(false) };
        if !cfg!(windows) {
            // Held until it is gone, so that no process that opens it takes it for one that stays.
            return self.remove(folder).map(|()| true);
        }
        // Windows renames no folder while a file in it is open, the locked one too. It refuses this rename if a process opens
        // the entry now.
        drop(unused);
        match self.remove(folder) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => Ok(false),
            removed => removed.map(|()| true),
        }
    }

    /// Removes an entry: at once for those that open it, and then its bytes.
    pub(super) fn remove(&self, folder: &Path) -> io::Result<()> {
        let old = unique(&self.temporary());
        fs::rename(folder, &old)?;
        fs::remove_dir_all(&old)
    }

    pub(super) fn verify(&self) -> Result<Verified> {
        let mut found = Verified::default();
        let mut bytes = vec![0; BLOCK_BYTES as usize];
        for listed in self.entries()? {
            let entry = match Entry::at(&listed.folder) {
                Ok(entry) => entry,
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InvalidData) => {
                    continue;
                }
                Err(source) => return Err(io_error("open", &listed.folder, source)),
            };
            for block in entry.present_blocks() {
                found.bytes += entry.read(block * BLOCK_BYTES, &mut bytes) as u64;
            }
            let (damaged, ..) = entry.counts();
            if damaged > 0 {
                found.damaged_blocks += damaged;
                found.damaged.push(listed.url);
            }
        }
        Ok(found)
    }
}

/// An entry whose description or bytes cannot be read; `None` if it is evicted in the meantime. Entries are renamed into place
/// whole, so that it is not one that is being made.
fn unreadable(folder: PathBuf) -> Option<CacheEntry> {
    let meta = fs::metadata(&folder).ok().filter(Metadata::is_dir)?;
    let files = fs::read_dir(&folder).ok()?.filter_map(|file| file.ok()?.metadata().ok());
    Some(CacheEntry {
        url: format!("unreadable entry {}", folder.file_name()?.to_string_lossy()),
        len: 0,
        taken_bytes: files.map(|file| taken_bytes(&file)).sum(),
        last_use: meta.modified().unwrap_or(SystemTime::UNIX_EPOCH),
        folder,
        is_readable: false,
    })
}

/// The lock of an entry that no process has open. An entry that has no file to lock has none.
struct Unused(Option<File>);

impl Unused {
    /// Locks an entry; `None` if a process has it open.
    fn lock(folder: &Path) -> Option<Self> {
        let Ok(data) = File::open(folder.join(DATA)) else { return Some(Self(None)) };
        match try_lock(&data) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            locked => Some(Self(locked.is_ok().then_some(data))),
        }
    }
}

impl Drop for Unused {
    fn drop(&mut self) {
        // Not only closed: a child of `fork` may have it too.
        self.0.iter().for_each(unlock);
    }
}

/// Bytes of the drive that a file takes.
#[cfg(unix)]
fn taken_bytes(metadata: &Metadata) -> u64 {
    // The unit of the system, whatever the blocks of the drive are.
    std::os::unix::fs::MetadataExt::blocks(metadata) * 512
}

/// Bytes of the drive that a file takes, at most.
#[cfg(not(unix))]
fn taken_bytes(metadata: &Metadata) -> u64 {
    metadata.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hoistway_io::file::try_lock_shared;

    #[test]
    fn an_unreadable_entry_is_counted_and_collected_unless_it_is_in_use() {
        let root = tempfile::tempdir().unwrap();
        let room = Room::new(root.path(), Some(1 << 30));
        fs::create_dir(room.temporary()).unwrap();
        let folder = room.objects().join("broken");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(META), "no JSON").unwrap();
        fs::write(folder.join(DATA), vec![1; 1 << 20]).unwrap();
        let entries = room.entries().unwrap();
        assert_eq!(entries.len(), 1);
        assert!(entries[0].url.contains("broken"), "{entries:?}");
        assert_eq!(room.verify().unwrap(), Verified::default());

        let data = File::open(folder.join(DATA)).unwrap();
        try_lock_shared(&data).unwrap();
        assert_eq!(room.collect(None).unwrap().entries, 0, "it is in use");
        drop(data);
        assert_eq!(room.collect(None).unwrap().entries, 1);
        assert!(!folder.exists());
    }

    #[test]
    fn what_was_used_longest_ago_is_evicted_first() {
        const BYTES: u64 = 64 << 10;
        let root = tempfile::tempdir().unwrap();
        let room = Room::new(root.path(), Some(1 << 30));
        [room.objects(), room.temporary()].iter().for_each(|folder| fs::create_dir(folder).unwrap());
        for (url, minutes) in [("c", 3), ("a", 1), ("d", 4), ("b", 2)] {
            drop(Entry::open(&room, url, url, BYTES).unwrap());
            let folder = room.objects().join(url);
            fs::write(folder.join(DATA), vec![1; BYTES as usize]).unwrap();
            let used = SystemTime::now() - Duration::from_secs(60 * minutes);
            File::options().write(true).open(folder.join(META)).unwrap().set_modified(used).unwrap();
        }
        let left = || room.entries().unwrap().into_iter().map(|entry| entry.url).collect::<Vec<_>>();
        assert_eq!(left(), ["a", "b", "c", "d"]);
        for count in [3, 1] {
            room.collect(Some(count as u64 * BYTES)).unwrap();
            assert_eq!(left(), ["a", "b", "c"][..count]);
        }
    }
}
