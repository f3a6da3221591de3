//! The directory of a store: what both layouts have in it.
//!
//! ```text
//! <root>/STORE                            superblock
//! <root>/ns/<namespace>/NAMESPACE.json    description of a namespace
//! <root>/w-<writer>/LEASE                 what a writing process says of itself
//! ```
#![forbid(unsafe_code)]

use crate::{
    Error, LayoutKind, NamespaceId, Result, WriterStats,
    disk::{Disk, TEMPORARY, create_over, write_full},
    format::{
        Invalid, PAGE, PAGED_VERSION,
        lease::{LEASE_LEN, Lease},
        now_seconds,
        superblock::Superblock,
    },
    options::Creation,
};
use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};
use uuid::Uuid;

pub(super) const SUPERBLOCK: &str = "STORE";
pub(super) const NAMESPACES: &str = "ns";
pub(super) const DESCRIPTION: &str = "NAMESPACE.json";
pub(super) const LEASE: &str = "LEASE";
pub(super) const WRITER_PREFIX: &str = "w-";

/// Longest description of a namespace that is read.
const MAX_DESCRIPTION_LEN: usize = 1 << 20;
/// Longest description of a namespace that is written.
const MAX_NEW_DESCRIPTION_LEN: usize = 64 << 10;
/// Seconds that a writer is taken to live after it last wrote its lease.
const SILENCE_S: u64 = 60;

/// The error of an operation on a file.
pub(super) fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::Io { operation, path, source }
}

/// Makes a store where there is none, as far as `creation` allows it. A name that is not whole is `STORE-<uuid>.tmp`.
pub(super) fn create(disk: &dyn Disk, root: &Path, layout: LayoutKind, creation: Creation) -> Result<()> {
    let file = root.join(SUPERBLOCK);
    let is_there = || disk.read_file(&file, PAGE).is_ok_and(|page| !page.is_empty());
    if creation == Creation::Nothing || is_there() {
        return Ok(());
    }
    let mut missing = Vec::new();
    let makes_directory = creation == Creation::Directory;
    for ancestor in root.ancestors().take_while(|path| makes_directory && !path.as_os_str().is_empty()) {
        if !disk.list(ancestor).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            break;
        }
        missing.push(ancestor);
    }
    for directory in missing.into_iter().rev() {
        disk.create_directory(directory).map_err(failed("making", directory))?;
        if let Some(parent) = directory.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            disk.sync_directory(parent).map_err(failed("syncing", parent))?;
        }
    }
    let namespaces = root.join(NAMESPACES);
    disk.create_directory(&namespaces).map_err(failed("making", &namespaces))?;
    let superblock = Superblock { store: Uuid::new_v4(), layout, created: now_seconds().into() };
    let temporary = root.join(format!("{SUPERBLOCK}-{}{TEMPORARY}", superblock.store));
    let made = create_over(disk, &temporary)
        .and_then(|temporary| {
            write_full(&*temporary, &superblock.to_bytes(), 0)?;
            temporary.sync_data()
        })
        .and_then(|()| disk.rename_new(&temporary, &file));
    if let Err(error) = made {
        let _ = disk.remove(&temporary);
        // Another process was faster, and may have removed this one's file as a leftover. What has the name else is read next.
        if error.kind() != io::ErrorKind::AlreadyExists && !is_there() {
            return Err(failed("making", &file)(error));
        }
    }
    disk.sync_directory(root).map_err(failed("syncing", root))
}

/// Returns what `STORE` says: an error unless there is a store of this layout.
pub(super) fn expect(disk: &dyn Disk, root: &Path, layout: LayoutKind) -> Result<Superblock> {
    let path = root.join(SUPERBLOCK);
    let no_store = |reason: String| Error::NotAStore { path: root.to_owned(), reason };
    let bytes = disk.read_file(&path, PAGE).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound
            if disk.file_system(root).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) =>
        {
            no_store("there is no such directory".into())
        }
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => no_store("it has no file STORE".into()),
        _ => failed("reading", &path)(error),
    })?;
    match Superblock::parse(&bytes) {
        Ok(superblock) if superblock.layout == layout => Ok(superblock),
        Ok(superblock) => Err(Error::InvalidOption {
            option: "layout",
            value: layout.name().into(),
            reason: format!("{} was made with layout {}", root.display(), superblock.layout),
        }),
        Err(Invalid::Version { found }) => Err(Error::UnknownFormat { path, found, known: PAGED_VERSION }),
        Err(why) => Err(no_store(format!("its file STORE cannot be read: {why}"))),
    }
}

/// An error if a store's path has another store, or none, on another file system than before: the store's was unmounted,
/// and the disk below its mount is not what it may fill. Some file systems have another number whenever they are mounted.
pub(super) fn expect_place(disk: &dyn Disk, root: &Path, store: Uuid, before: u64) -> Result<()> {
    let found = disk.read_file(&root.join(SUPERBLOCK), PAGE).ok();
    if found.and_then(|bytes| Superblock::parse(&bytes).ok()).is_some_and(|found| found.store == store) {
        return Ok(());
    }
    if root.ancestors().find_map(|path| disk.file_system(path).ok()) == Some(before) {
        return Ok(());
    }
    let unmounted = io::Error::other("it is on another file system than before: mount the store's again");
    Err(failed("opening", root)(unmounted))
}

/// The directory of a namespace.
pub(super) fn of_namespace(root: &Path, id: NamespaceId) -> PathBuf {
    root.join(NAMESPACES).join(id.to_string())
}

/// Descriptions that are on the disk, or why one cannot be read, in the order of the identities.
pub(super) type Described = BTreeMap<NamespaceId, Result<String, String>>;

/// Reads all descriptions. If one cannot be read, only its namespace is affected.
pub(super) fn described(disk: &dyn Disk, root: &Path) -> Result<Described> {
    let all = root.join(NAMESPACES);
    let listing = match disk.list(&all) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Described::new()),
        listing => listing.map_err(failed("listing", &all))?,
    };
    let described = listing.into_iter().filter_map(|entry| {
        let id: NamespaceId =
            entry.name.parse().ok().filter(|id: &NamespaceId| id.to_string() == entry.name)?;
        let path = all.join(&entry.name);
        if !entry.is_directory {
            return Some((id, Err(format!("{} is not a directory", path.display()))));
        }
        let path = path.join(DESCRIPTION);
        match read_description(disk, &path) {
            Ok(description) if NamespaceId::of_description(&description) == id => Some((id, Ok(description))),
            Ok(_) => Some((id, Err(format!("{} describes another namespace", path.display())))),
            // Its maker has not written it yet, or never will.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => Some((id, Err(failed("reading", &path)(error).to_string()))),
        }
    });
    Ok(described.collect())
}

/// Reads a file that has the description of a namespace.
pub(super) fn read_description(disk: &dyn Disk, path: &Path) -> io::Result<String> {
    let bytes = disk.read_file(path, MAX_DESCRIPTION_LEN + 1)?;
    if bytes.len() > MAX_DESCRIPTION_LEN {
        return Err(io::Error::other("it is longer than 1 MiB"));
    }
    String::from_utf8(bytes).map_err(|_| io::Error::other("it is not text"))
}

/// Writes a description down by `write`, where there is none.
pub(super) fn describe(
    disk: &dyn Disk,
    root: &Path,
    id: NamespaceId,
    description: &str,
    write: impl FnOnce(&Path, &[u8]) -> Result<()>,
) -> Result<()> {
    let directory = of_namespace(root, id);
    let path = directory.join(DESCRIPTION);
    match disk.read_file(&path, MAX_DESCRIPTION_LEN + 1) {
        Ok(bytes) if bytes == description.as_bytes() => return Ok(()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("reading", &path)(error)),
        _ => {}
    }
    if description.len() > MAX_NEW_DESCRIPTION_LEN {
        let problem = format!("the description of namespace {id} is longer than 64 KiB");
        return Err(Error::InvalidRequest(problem));
    }
    let all = root.join(NAMESPACES);
    for (directory, parent) in [(&*all, root), (&directory, &all)] {
        disk.create_directory(directory).map_err(failed("making", directory))?;
        disk.sync_directory(parent).map_err(failed("syncing", parent))?;
    }
    write(&path, description.as_bytes())
}

/// Removes the description of a namespace, and its directory if nothing else is in there.
pub(super) fn remove_description(disk: &dyn Disk, root: &Path, id: NamespaceId) -> Result<()> {
    let directory = of_namespace(root, id);
    let listing = match disk.list(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        listing => listing.map_err(failed("listing", &directory))?,
    };
    for file in listing.iter().filter(|file| file.name == DESCRIPTION || file.name.ends_with(TEMPORARY)) {
        let path = directory.join(&file.name);
        disk.remove(&path).map_err(failed("removing", &path))?;
    }
    // Another process may be describing it anew just now.
    let _ = disk.remove_directory(&directory);
    let all = root.join(NAMESPACES);
    disk.sync_directory(&all).map_err(failed("syncing", &all))
}

/// The directory of a writer.
#[derive(Clone, Debug)]
pub(super) struct WriterDirectory {
    pub(super) id: Uuid,
    pub(super) path: PathBuf,
}

impl WriterDirectory {
    pub(super) fn new(root: &Path, id: Uuid) -> Self {
        Self { id, path: root.join(format!("{WRITER_PREFIX}{id}")) }
    }

    /// What the writer says of itself; `None` if it says nothing that can be read.
    pub(super) fn lease(&self, disk: &dyn Disk) -> Option<Lease> {
        read_lease(disk, &self.path)
    }

    /// Whether the writer has said lately that it lives. One that was killed may have said so a moment ago.
    pub(super) fn says_it_lives(&self, disk: &dyn Disk, now: u32) -> bool {
        self.lease(disk).is_some_and(|lease| is_alive(&lease, now))
    }

    /// Describes the writer by its lease, which may be missing or damaged.
    pub(super) fn describe(&self, disk: &dyn Disk, now: u32) -> WriterStats {
        let lease = self.lease(disk);
        WriterStats {
            id: self.id.to_string(),
            process: lease.map_or(0, |lease| lease.process),
            is_alive: lease.is_some_and(|lease| is_alive(&lease, now)),
            durability: lease.and_then(|lease| lease.durability),
            capacity_bytes: lease.map(|lease| lease.capacity).filter(|capacity| *capacity > 0),
            allocated_bytes: None,
            blocks: None,
        }
    }
}

fn is_alive(lease: &Lease, now: u32) -> bool {
    u64::from(now).saturating_sub(lease.heartbeat) <= SILENCE_S
}

/// The lease in a writer's directory; `None` if there is none that can be read.
pub(super) fn read_lease(disk: &dyn Disk, directory: &Path) -> Option<Lease> {
    Lease::parse(&disk.read_file(&directory.join(LEASE), LEASE_LEN).ok()?).ok()
}

/// Directories of all writers, living or dead, in the order of their names.
pub(super) fn writers(disk: &dyn Disk, root: &Path) -> Result<Vec<WriterDirectory>> {
    let listing = disk.list(root).map_err(failed("listing", root))?.into_iter();
    let mut writers: Vec<_> = listing
        .filter_map(|entry| {
            let id = Uuid::parse_str(entry.name.strip_prefix(WRITER_PREFIX)?).ok()?;
            let directory = WriterDirectory::new(root, id);
            // Only the name that a writer gives is that of its directory.
            (entry.is_directory && directory.path == root.join(entry.name)).then_some(directory)
        })
        .collect();
    writers.sort_by_key(|writer| writer.id);
    Ok(writers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::RealDisk;
    use std::fs;

    #[test]
    fn only_the_names_that_writers_give_are_their_directories() {
        let root = tempfile::tempdir().unwrap();
        let writer = |number| WriterDirectory::new(root.path(), Uuid::from_u128(number));
        for path in [&writer(0xb).path, &writer(0xa).path] {
            fs::create_dir(path).unwrap();
        }
        fs::write(writer(0xc).path, "").unwrap();
        for other in ["w-x", "w-0000000000000000000000000000000D", "x-1", "W-1"] {
            fs::create_dir(root.path().join(other)).unwrap();
        }
        let found = writers(&RealDisk, root.path()).unwrap();
        let ids: Vec<_> = found.iter().map(|writer| writer.id.as_u128()).collect();
        assert_eq!(ids, [0xa, 0xb]);
        assert_eq!(found[0].path, writer(0xa).path);
    }

    #[test]
    fn a_store_is_made_once_and_keeps_its_layout() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b");
        assert!(matches!(expect(&RealDisk, &path, LayoutKind::Files), Err(Error::NotAStore { .. })));
        let refused = create(&RealDisk, &path, LayoutKind::Files, Creation::Store);
        assert!(matches!(refused, Err(Error::Io { operation: "making", .. })), "{refused:?}");
        create(&RealDisk, &path, LayoutKind::Files, Creation::Nothing).unwrap();
        assert!(!root.path().join("a").exists());
        create(&RealDisk, &path, LayoutKind::Files, Creation::Directory).unwrap();
        let superblock = fs::read(path.join(SUPERBLOCK)).unwrap();
        create(&RealDisk, &path, LayoutKind::Segments, Creation::Directory).unwrap();
        assert_eq!(fs::read(path.join(SUPERBLOCK)).unwrap(), superblock);
        expect(&RealDisk, &path, LayoutKind::Files).unwrap();
        let refused = expect(&RealDisk, &path, LayoutKind::Segments);
        assert!(matches!(refused, Err(Error::InvalidOption { option: "layout", .. })), "{refused:?}");
        let mut names: Vec<_> = RealDisk.list(&path).unwrap().into_iter().map(|entry| entry.name).collect();
        names.sort();
        assert_eq!(names, [SUPERBLOCK, NAMESPACES]);
    }
}
