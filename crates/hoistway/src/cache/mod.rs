//! The node's cache: what was loaded from stores, kept on a drive of this machine and shared by its processes.
//!
//! An object is an entry: a sparse file with its bytes, and a map with the checksum of each block that is there. So partial
//! loads are kept too, and a process that is killed leaves what it had. Nothing is synced: a block whose checksum is wrong is
//! read from the store again, whatever made it so. The entry of an object is named by its server, its name and its version: an
//! object that changed has another entry, and two processes that write a block write the same bytes.
//!
//! `entry` reads and writes blocks, `writer` writes them behind loads, `room` evicts.
#![forbid(unsafe_code)]

mod aligned;
mod entry;
mod room;
mod writer;

pub(crate) use entry::{Claims, Entry, Holds};
pub use room::{CacheEntry, Collected, Verified};

use crate::{Error, Result, environment, memory::Ledger};
use hoistway_objects::Object;
use room::Room;
use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use writer::Writer;

/// The file that marks a cache.
const MARKER: &str = "format";
/// The contents of a directory's marker.
const FORMAT: &str = "hoistway cache 1\n";
/// The same format, as marked by versions from before the project's renaming.
const FORMER_FORMAT: &str = "windlass cache 1\n";
/// The folders of a cache: its entries, and what is being made or removed.
const OBJECTS: &str = "objects";
const TEMPORARY: &str = "temporary";
/// The time that the end of a cache waits for pending writes.
const LAST_WRITES: Duration = Duration::from_secs(2);

/// A directory of this machine that keeps what is loaded from stores. Clones are one cache.
///
/// ```no_run
/// use hoistway::{Checkpoint, cache::NodeCache, catalog::OpenOptions};
/// let cache = NodeCache::open("/nvme/hoistway", Some(500 << 30))?;
/// let options = OpenOptions::default().cache(cache);
/// let checkpoint = Checkpoint::open_with(&["s3://models/llama/"], &options)?;
/// # Ok::<(), hoistway::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct NodeCache(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// As it was named.
    directory: PathBuf,
    writer: Writer,
}

impl Inner {
    fn room(&self) -> &Room {
        self.writer.room()
    }
}

/// Options are equal that name the same cache.
impl PartialEq for NodeCache {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for NodeCache {}

impl NodeCache {
    /// Opens the cache in a directory, which is made if it is not there. It takes `max_bytes` of the drive at most; by
    /// default it leaves a tenth of the drive free.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] if the directory has something else in it, or a cache of another version; [`Error::Io`].
    pub fn open(directory: impl AsRef<Path>, max_bytes: Option<u64>) -> Result<Self> {
        let root = directory.as_ref();
        let invalid = |reason: &str| Error::invalid_option("cache", root.display(), reason);
        let failed = |operation| move |source| io_error(operation, root, source);
        if root.as_os_str().is_empty() {
            return Err(invalid("name a directory"));
        }
        make_private(root).map_err(failed("create"))?;
        let marker = root.join(MARKER);
        let read = || read_marker(&marker).map_err(failed("open the cache"));
        let mut format = read()?;
        if !format.is_written() {
            let mut names =
                fs::read_dir(root).map_err(failed("list"))?.filter_map(|entry| Some(entry.ok()?.file_name()));
            let is_cache = |name: &str| {
                name.starts_with("format") || format == Marker::Empty && [OBJECTS, TEMPORARY].contains(&name)
            };
            let is_other = names.any(|name| !is_cache(&name.to_string_lossy()));
            // Another process may have made the cache in the meantime.
            if is_other && !read()?.is_written() {
                return Err(invalid(
                    "it is not empty, and holds no cache of hoistway; name another directory",
                ));
            }
            mark(root, &marker).map_err(failed("create a cache in"))?;
            format = read()?;
        }
        if !format.is_known() {
            return Err(invalid(
                "it holds a cache of another version of hoistway; name another directory, or remove this one",
            ));
        }
        let inner = Inner { directory: root.to_owned(), writer: Writer::of(root, max_bytes) };
        // A cache that was made ready and is not written to has them already.
        for folder in [inner.room().objects(), inner.room().temporary()] {
            match make_private(&folder) {
                Err(error) if !is_read_only(&error) => return Err(failed("create a folder in")(error)),
                _ => {}
            }
        }
        Ok(Self(Arc::new(inner)))
    }

    /// Opens the cache in `directory`, or the one that `HOISTWAY_CACHE` names; `None` if neither is there. It takes
    /// `max_bytes` at most, or what `HOISTWAY_CACHE_BYTES` says.
    ///
    /// # Errors
    /// Those of [`NodeCache::open`], and [`Error::InvalidOption`] if the size is none.
    pub fn chosen(directory: Option<&Path>, max_bytes: Option<u64>) -> Result<Option<Self>> {
        choice(directory, max_bytes)?.map(|(directory, most)| Self::open(directory, most)).transpose()
    }

    /// Like [`NodeCache::chosen`], for those who look at what is there: no cache is made.
    ///
    /// # Errors
    /// Those of [`NodeCache::chosen`], and [`Error::NotFound`] if there is no cache.
    pub fn chosen_existing(directory: Option<&Path>, max_bytes: Option<u64>) -> Result<Option<Self>> {
        let Some((directory, most)) = choice(directory, max_bytes)? else { return Ok(None) };
        let is_there = directory.join(MARKER).try_exists();
        if !is_there.map_err(|source| io_error("open the cache", &directory, source))? {
            let reason = "there is no cache of hoistway in it".into();
            return Err(Error::NotFound { path: directory, reason });
        }
        Self::open(directory, most).map(Some)
    }

    /// Returns its directory.
    pub fn directory(&self) -> &Path {
        &self.0.directory
    }

    /// Returns the bytes that it may take of the drive now.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn max_bytes(&self) -> Result<u64> {
        let room = self.0.room();
        let taken = room.entries()?.iter().map(|entry| entry.taken_bytes).sum();
        room.limit(taken).map_err(|source| io_error("look at the space of", room.root(), source))
    }

    /// Returns what it holds, the entry that was used last first.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn entries(&self) -> Result<Vec<CacheEntry>> {
        self.0.room().entries()
    }

    /// Reads every block and compares it with its checksum. Those that are damaged are removed.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn verify(&self) -> Result<Verified> {
        self.0.room().verify()
    }

    /// Evicts entries that are not in use, least recently used first, until it takes no more than `max_bytes`, or than it
    /// may. Removes what interrupted processes left.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn collect(&self, max_bytes: Option<u64>) -> Result<Collected> {
        self.0.room().collect(max_bytes)
    }

    /// Sets how long a block of a cache is waited for that this process has claimed and does not bring. For tests.
    #[cfg(feature = "fault-injection")]
    pub fn set_claim_time(time: Duration) {
        entry::set_claim_time(time);
    }

    /// Waits until all that was loaded is written.
    pub fn flush(&self) {
        self.0.writer.flush(None);
    }

    /// The entry of an object that begins with `head`, and why there is none. Two objects that a server names and versions
    /// alike have two entries if their first bytes differ.
    pub(crate) fn entry(&self, object: &Object, head: &[u8]) -> std::result::Result<Arc<Entry>, String> {
        let identity =
            object.identity().ok_or("nothing that the server says tells its version for certain")?;
        let identity = format!("{identity}\n{}", blake3::hash(head).to_hex());
        let key = blake3::hash(identity.as_bytes()).to_hex()[..32].to_owned();
        let opened = Entry::open(self.0.room(), &key, object.url(), object.len());
        opened.map(Arc::new).map_err(|error| format!("the entry in the cache cannot be opened: {error}"))
    }

    /// Keeps the whole blocks of what came from the store. A block is not kept that the backlog has no room for, or the
    /// `ledger` of the load no memory.
    pub(crate) fn keep(&self, entry: &Arc<Entry>, offset: u64, bytes: &[u8], ledger: Option<&Arc<Ledger>>) {
        self.0.writer.keep(entry, offset, bytes, ledger);
    }
}

/// The directory of a cache and its limit, as they are given or as the environment names them.
fn choice(directory: Option<&Path>, max_bytes: Option<u64>) -> Result<Option<(PathBuf, Option<u64>)>> {
    let (mut directory, mut most) = (directory.map(Path::to_owned), max_bytes);
    let variables = [("HOISTWAY_CACHE", "cache"), ("HOISTWAY_CACHE_BYTES", "cache_bytes")];
    environment::apply(&variables, |option, value| {
        match option {
            "cache" if directory.is_none() && !value.is_empty() => directory = Some(value.into()),
            "cache_bytes" if most.is_none() && !value.is_empty() => {
                most = Some(environment::bytes(option, value)?)
            }
            _ => {}
        }
        Ok(())
    })?;
    Ok(directory.map(|path| (environment::with_home(&path), most)))
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.writer.close(LAST_WRITES);
    }
}

/// The contents of the file that marks a cache.
#[derive(PartialEq, Eq)]
enum Marker {
    Missing,
    /// A power cut leaves it so, if its name came to the disk before its bytes.
    Empty,
    Text(String),
}

impl Marker {
    fn is_written(&self) -> bool {
        matches!(self, Self::Text(_))
    }

    fn is_known(&self) -> bool {
        matches!(self, Self::Text(text) if [FORMAT, FORMER_FORMAT].contains(&&**text))
    }
}

fn read_marker(path: &Path) -> std::io::Result<Marker> {
    match fs::read_to_string(path) {
        Ok(text) if text.bytes().all(|byte| byte == 0) => Ok(Marker::Empty),
        Ok(text) => Ok(Marker::Text(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Marker::Missing),
        Err(error) => Err(error),
    }
}

/// Makes the file that says that this is a cache, whole from the start. Another process may have made it.
fn mark(root: &Path, marker: &Path) -> std::io::Result<()> {
    let name = unique(root).file_name().map(|name| name.to_string_lossy().into_owned());
    let new = root.join(format!("format.{}", name.unwrap_or_default()));
    let mut file = fs::File::create_new(&new)?;
    let written = std::io::Write::write_all(&mut file, FORMAT.as_bytes()).and_then(|()| file.sync_all());
    let made = written.and_then(|()| match fs::hard_link(&new, marker) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists && read_marker(marker)?.is_written() => Ok(()),
        // Some file systems have no second names, and an empty marker is replaced.
        Err(_) => fs::rename(&new, marker),
        Ok(()) => Ok(()),
    });
    let _ = fs::remove_file(&new);
    made
}

/// Makes a folder that no other user can write to: what lies in it becomes weights. One that is there must be so.
fn make_private(path: &Path) -> std::io::Result<()> {
    private_folders().recursive(true).create(path)?;
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::MetadataExt;
        let (folder, user) = (fs::metadata(path)?, rustix::process::geteuid().as_raw());
        let refuse = |why: String| Err(std::io::Error::other(why));
        if ![user, 0].contains(&folder.uid()) {
            return refuse("it belongs to another user, who could change what is loaded".to_owned());
        }
        // The bits of the group stand for an access control list, too.
        let who = [(0o002, "every user"), (0o020, "its group")]
            .into_iter()
            .find(|group| folder.mode() & group.0 != 0);
        if let Some((_, who)) = who {
            return refuse(format!(
                "{who} may write to it, and could change what is loaded; run 'chmod go-w {}'",
                path.display()
            ));
        }
    }
    Ok(())
}

/// Makes folders for this user alone, whatever the process's mask says.
#[cfg(unix)]
fn private_folders() -> fs::DirBuilder {
    let mut builder = fs::DirBuilder::new();
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder
}

/// Makes folders with the rights that theirs gives them.
#[cfg(not(unix))]
fn private_folders() -> fs::DirBuilder {
    fs::DirBuilder::new()
}

fn is_read_only(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem)
}

fn io_error(operation: &'static str, path: &Path, source: std::io::Error) -> Error {
    Error::Io { operation, path: path.to_owned(), tensor: None, range: None, source }
}

/// A name that no other process and no other thread makes at the same time.
fn unique(folder: &Path) -> PathBuf {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let nanoseconds = std::time::UNIX_EPOCH.elapsed().map_or(0, |elapsed| elapsed.as_nanos());
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    folder.join(format!("{}-{nanoseconds}-{number}", std::process::id()))
}
