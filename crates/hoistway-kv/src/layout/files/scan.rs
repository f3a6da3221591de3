//! All files that there are, looked at when a store is opened, and now and then afterwards, a few at a time: others write
//! and remove some.
#![forbid(unsafe_code)]

use super::{
    FilesShared, failed,
    liveness::Liveness,
    lock,
    names::{Named, Tree},
    namespaces::Namespace,
    writer,
};
use crate::{
    EventKind, Fingerprint, Result,
    disk::before_call,
    format::{PAGE, expiry_seconds},
    index::Existing,
};
use std::{
    collections::{HashMap, VecDeque},
    fs::Metadata,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

/// Longest time that one call spends, but for a directory that it has begun with.
const SLICE: Duration = Duration::from_millis(10);
/// Between two scans that a request waits for lies this many times the duration of the last scan.
const LOOK_SHARE: u32 = 10;
/// Files that were cut short, and cannot be removed, which are remembered; further ones do not count.
const MOST_CUT_SHORT: usize = 4096;

/// The look that is under way.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// Marks what this look has seen: other than the last one's.
    generation: u8,
    /// What is still to be looked at.
    rest: VecDeque<(Arc<Namespace>, PathBuf)>,
    /// The first number that blocks had that came while it went on. They are not missed.
    first_new: u64,
    is_under_way: bool,
    /// Whether something could not be looked at, so that what was not seen may be there all the same.
    is_partial: bool,
    begun: Option<Instant>,
    ended: Option<Instant>,
    /// How long the last one took.
    took: Duration,
    /// Files that were cut short, and the generation of the look that has seen them last: each counts once.
    cut_short: HashMap<PathBuf, u8>,
}

impl Scan {
    fn has_ended_within(&self, time: Duration) -> bool {
        self.ended.is_some_and(|ended| ended.elapsed() < time)
    }

    /// Has all files looked at again soon.
    pub(super) fn repeat(&mut self) {
        self.ended = None;
    }

    pub(super) fn generation(&self) -> u8 {
        self.generation
    }

    #[cfg(test)]
    pub(super) fn cut_short(&self) -> usize {
        self.cut_short.len()
    }

    /// Whether this file was not seen before that was cut short and cannot be removed.
    fn is_first_cut_short(&mut self, path: &Path) -> bool {
        if let Some(seen) = self.cut_short.get_mut(path) {
            *seen = self.generation;
            return false;
        }
        let has_room = self.cut_short.len() < MOST_CUT_SHORT;
        if has_room {
            self.cut_short.insert(path.to_owned(), self.generation);
        }
        has_room
    }
}

/// A block's file.
pub(super) struct BlockFile {
    pub(super) fingerprint: Fingerprint,
    key: Option<Vec<u8>>,
    pub(super) path: PathBuf,
    metadata: Metadata,
}

/// The directories of a tree that have files.
pub(super) fn directories(tree: &Tree) -> Result<Vec<PathBuf>> {
    let mut level = vec![tree.root().to_owned()];
    for _ in 0..tree.depth() {
        let mut below = Vec::new();
        for directory in &level {
            for entry in entries(directory)? {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    below.push(entry.path());
                }
            }
        }
        level = below;
    }
    Ok(level)
}

/// The blocks in a directory.
pub(super) fn files(namespace: &Namespace, directory: &Path) -> Result<Vec<BlockFile>> {
    let mut files = Vec::new();
    for entry in entries(directory)? {
        let name = entry.file_name();
        let Some(named) = name.to_str().and_then(|name| namespace.tree.parse(directory, name)) else {
            continue;
        };
        let metadata = match entry.metadata() {
            Ok(metadata) if metadata.is_file() => metadata,
            Ok(_) => continue,
            // It was removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed("asking for", &entry.path())(error)),
        };
        let (fingerprint, key) = match named {
            Named::Fingerprint(fingerprint) => (fingerprint, None),
            Named::Key(key) => (Fingerprint::of(namespace.id, &key), Some(key)),
        };
        files.push(BlockFile { fingerprint, key, path: entry.path(), metadata });
    }
    Ok(files)
}

fn entries(directory: &Path) -> Result<Vec<std::fs::DirEntry>> {
    before_call(directory);
    let listed = std::fs::read_dir(directory).and_then(Iterator::collect);
    match listed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        listed => listed.map_err(failed("listing", directory)),
    }
}

impl FilesShared {
    /// Looks at everything.
    pub(super) fn scan_all(&self) -> Result<()> {
        self.listen()?;
        self.peers.look_begins();
        for namespace in self.namespaces.all() {
            if let Err(error) = self.scan_namespace(&namespace) {
                let reason = format!("blocks of namespace {} cannot be looked for: {error}", namespace.id);
                self.observed.note(EventKind::NamespaceUnusable, reason);
            }
        }
        self.listen()?;
        self.peers.look_ends();
        lock(&self.scan).ended = Some(Instant::now());
        Ok(())
    }

    /// Looks at the blocks of a namespace, and takes them in from the oldest to the newest.
    pub(super) fn scan_namespace(&self, namespace: &Arc<Namespace>) -> Result<()> {
        let mut all = Vec::new();
        let directories = directories(&namespace.tree)?;
        self.room.note_directories(namespace, directories.len());
        for directory in directories {
            all.extend(files(namespace, &directory)?);
        }
        all.sort_by_cached_key(|file| file.metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH));
        all.iter().for_each(|file| self.see(namespace, file));
        Ok(())
    }

    /// Reads what other writers have written and removed. If some have come or gone, all files are looked at again.
    pub(super) fn listen(&self) -> Result<()> {
        if self.read_others()? {
            lock(&self.scan).repeat();
        }
        Ok(())
    }

    fn read_others(&self) -> Result<bool> {
        let directories = writer::peers(&self.disk, &self.root, self.writer.as_ref())?;
        let is_living = |directory: &Path| matches!(self.judge(directory), Liveness::Living);
        Ok(self.peers.read(&self.disk, &self.root, &directories, is_living))
    }

    /// Looks at everything, or at the rest of it, at once, unless too much time would go into that.
    pub(super) fn scan_now(&self) {
        {
            let mut scan = lock(&self.scan);
            if scan.has_ended_within(scan.took.saturating_mul(LOOK_SHARE)) {
                return;
            }
            if !scan.is_under_way {
                scan.ended = None;
            }
        }
        loop {
            self.scan_some();
            if !lock(&self.scan).is_under_way {
                return;
            }
        }
    }

    /// Looks at a few directories. What fails is tried again the next time.
    pub(super) fn scan_some(&self) {
        let _one = lock(&self.scanning);
        let started = Instant::now();
        loop {
            let is_under_way = {
                let scan = lock(&self.scan);
                if !scan.is_under_way && scan.has_ended_within(self.timing.rescan) {
                    return;
                }
                scan.is_under_way
            };
            if !is_under_way {
                self.begin();
            }
            let next = lock(&self.scan).rest.pop_front();
            let Some((namespace, directory)) = next else {
                self.end_scan();
                return;
            };
            match files(&namespace, &directory) {
                Ok(files) => files.iter().for_each(|file| self.see(&namespace, file)),
                Err(error) => {
                    tracing::warn!(%error, "blocks cannot be looked for");
                    lock(&self.scan).is_partial = true;
                }
            }
            if started.elapsed() >= SLICE {
                return;
            }
        }
    }

    fn begin(&self) {
        let mut is_partial = self.read_others().is_err();
        self.peers.look_begins();
        {
            // What comes from now on is not missed.
            let mut scan = lock(&self.scan);
            scan.generation = scan.generation.wrapping_add(1);
            scan.is_under_way = true;
            scan.begun = Some(Instant::now());
            scan.first_new = self.number();
        }
        is_partial |= self.read_namespaces().is_err();
        let mut rest = VecDeque::new();
        for namespace in self.namespaces.all() {
            match directories(&namespace.tree) {
                Ok(directories) => {
                    self.room.note_directories(&namespace, directories.len());
                    let directories = directories.into_iter();
                    rest.extend(directories.map(|directory| (Arc::clone(&namespace), directory)));
                }
                Err(_) => is_partial = true,
            }
        }
        let mut scan = lock(&self.scan);
        (scan.rest, scan.is_partial) = (rest, is_partial);
    }

    /// Forgets what has not been seen.
    fn end_scan(&self) {
        let others = self.read_others();
        let mut scan = lock(&self.scan);
        scan.is_under_way = false;
        scan.took = scan.begun.map_or(Duration::ZERO, |begun| begun.elapsed());
        // Who came or went meanwhile may have done what was not seen.
        scan.ended = (!others.as_ref().is_ok_and(|have_changed| *have_changed)).then(Instant::now);
        let (generation, first_new, is_partial) = (scan.generation, scan.first_new, scan.is_partial);
        if !is_partial {
            scan.cut_short.retain(|_, seen| *seen == generation);
        }
        drop(scan);
        if is_partial || others.is_err() {
            return;
        }
        // Before what is gone is forgotten: rather too much is counted than too little.
        self.peers.look_ends();
        let unseen = |entry: &crate::index::Entry| entry.flags != generation && entry.sequence < first_new;
        for removed in self.index.remove_all(|_, entry, _| unseen(entry)) {
            if let Some(namespace) = self.namespaces.numbered(removed.entry.namespace) {
                namespace.forget_key(&removed.fingerprint);
            }
        }
    }

    /// A file is there: it is known from now on, unless it cannot be a block.
    fn see(&self, namespace: &Arc<Namespace>, file: &BlockFile) {
        let len = file.metadata.len();
        let page = PAGE as u64;
        let is_whole = namespace.tree.is_bare() || (len.is_multiple_of(page) && len > page);
        if !is_whole {
            // Files have their length before they have their name.
            let removed = self.writer.as_ref().map(|_| std::fs::remove_file(&file.path));
            if matches!(removed, Some(Ok(()))) || lock(&self.scan).is_first_cut_short(&file.path) {
                self.observed.corrupt();
                tracing::warn!(path = %file.path.display(), len, ?removed, "a file of a block was cut short");
            }
            return;
        }
        let key = file.key.as_deref().unwrap_or_default();
        let Some(known) = self.adopt(namespace, file.fingerprint, key, &file.metadata, &file.path) else {
            return;
        };
        let generation = lock(&self.scan).generation();
        // The namespace's time to live may be known since it was opened only.
        let modified = file.metadata.modified().unwrap_or_else(|_| SystemTime::now());
        let ends = expiry_seconds(namespace.expires(modified));
        let ends_sooner = ends != 0 && (known.expires == 0 || ends < known.expires);
        if known.slot_bytes != len.next_multiple_of(page) {
            // Another process has removed the block, and stored it again with other shards.
            let entry = self.entry_of(namespace, len, known.expires);
            self.index.insert(file.fingerprint, &entry, Existing::Replace);
        } else if known.flags != generation || ends_sooner {
            self.index.amend(&file.fingerprint, |entry| {
                entry.flags = generation;
                entry.expires = if ends_sooner { ends } else { entry.expires };
            });
        }
    }
}
