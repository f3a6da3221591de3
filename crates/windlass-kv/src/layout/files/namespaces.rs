//! The namespaces that are known, and the trees that their blocks are in.
#![forbid(unsafe_code)]

use super::{
    failed, lock,
    names::{self, Tree},
    writer::Writer,
};
use crate::{
    Error, Fingerprint, NamespaceId, Result,
    disk::{Disk, RealDisk},
};
use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

/// A namespace.
#[derive(Debug)]
pub(super) struct Namespace {
    pub(super) id: NamespaceId,
    /// What the index calls it.
    pub(super) number: u16,
    pub(super) tree: Tree,
    description: String,
    /// Seconds that blocks are kept at most; 0: for ever.
    ttl_seconds: AtomicU64,
    /// Where it says that some blocks expire, and whether it does.
    expiring: (PathBuf, AtomicBool),
    /// Directories that its blocks are in.
    pub(super) directories: AtomicU64,
    /// Keys of blocks, where files are named by them.
    keys: Mutex<HashMap<Fingerprint, Box<[u8]>>>,
}

impl Namespace {
    pub(super) fn set_ttl(&self, ttl: Option<Duration>) {
        let seconds =
            ttl.map_or(0, |ttl| ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0)).max(1));
        self.ttl_seconds.store(seconds, Ordering::Relaxed);
    }

    /// When a file that was written then is not found any more.
    pub(super) fn expires(&self, modified: SystemTime) -> Option<SystemTime> {
        match self.ttl_seconds.load(Ordering::Relaxed) {
            0 => None,
            ttl => modified.checked_add(Duration::from_secs(ttl)),
        }
    }

    /// Whether files have to be asked when they end.
    pub(super) fn has_expiring(&self) -> bool {
        let (path, is_known) = &self.expiring;
        if self.tree.is_bare() {
            return false;
        }
        if !is_known.load(Ordering::Relaxed) && path.exists() {
            is_known.store(true, Ordering::Relaxed);
        }
        is_known.load(Ordering::Relaxed)
    }

    /// Says that some blocks expire, before there is one.
    pub(super) fn mark_expiring(&self, disk: &RealDisk, writer: &Writer) -> Result<()> {
        if !self.tree.is_bare() && !self.has_expiring() {
            let (path, is_known) = &self.expiring;
            writer.write_file(disk, path, b"").map_err(failed("writing to", path))?;
            is_known.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The file of a block whose key is known, or need not be.
    pub(super) fn path(&self, fingerprint: Fingerprint, key: Option<&[u8]>) -> Option<PathBuf> {
        match (&self.tree, key) {
            (Tree::Bare(_), None) => {
                self.tree.path(fingerprint, lock(&self.keys).get(&fingerprint).map(|key| &**key))
            }
            _ => self.tree.path(fingerprint, key),
        }
    }

    /// Notes the key of a block that is there.
    pub(super) fn note_key(&self, fingerprint: Fingerprint, key: &[u8]) {
        if self.tree.is_bare() {
            lock(&self.keys).entry(fingerprint).or_insert_with(|| key.into());
        }
    }

    pub(super) fn forget_key(&self, fingerprint: &Fingerprint) {
        if self.tree.is_bare() {
            lock(&self.keys).remove(fingerprint);
        }
    }

    pub(super) fn key_of(&self, fingerprint: &Fingerprint) -> Option<Box<[u8]>> {
        lock(&self.keys).get(fingerprint).cloned()
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Namespaces(RwLock<Known>);

#[derive(Debug, Default)]
struct Known {
    by_number: Vec<Arc<Namespace>>,
    by_id: HashMap<NamespaceId, Arc<Namespace>>,
}

impl Namespaces {
    pub(super) fn get(&self, id: NamespaceId) -> Option<Arc<Namespace>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).by_id.get(&id).cloned()
    }

    pub(super) fn numbered(&self, number: u16) -> Option<Arc<Namespace>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).by_number.get(usize::from(number)).cloned()
    }

    pub(super) fn all(&self) -> Vec<Arc<Namespace>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).by_number.clone()
    }

    pub(super) fn described(&self) -> Vec<(NamespaceId, String)> {
        self.all().iter().map(|namespace| (namespace.id, namespace.description.clone())).collect()
    }

    /// Takes a namespace in, or finds it.
    pub(super) fn add(&self, root: &Path, id: NamespaceId, description: &str) -> Result<Arc<Namespace>> {
        let tree = Tree::of(root, directory(root, id), description)?;
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = known.by_id.get(&id) {
            return Ok(Arc::clone(found));
        }
        if known.by_number.iter().any(|other| other.tree == tree) {
            return Err(Error::InvalidOption {
                option: names::VLLM_DIRECTORY,
                value: tree.root().display().to_string(),
                reason: "the store has a namespace with another description for it".into(),
            });
        }
        let number = u16::try_from(known.by_number.len()).map_err(|_| {
            Error::InvalidRequest(format!("{} has more than 65,536 namespaces", root.display()))
        })?;
        let namespace = Arc::new(Namespace {
            id,
            number,
            tree,
            description: description.to_owned(),
            ttl_seconds: AtomicU64::new(0),
            directories: AtomicU64::new(0),
            expiring: (directory(root, id).join(names::EXPIRING), AtomicBool::new(false)),
            keys: Mutex::default(),
        });
        known.by_number.push(Arc::clone(&namespace));
        known.by_id.insert(id, Arc::clone(&namespace));
        Ok(namespace)
    }

    /// Takes in those that are written down.
    pub(super) fn read(&self, disk: &RealDisk, root: &Path) -> Result<()> {
        let all = root.join(names::NAMESPACES);
        let listing = match disk.list(&all) {
            Ok(listing) => listing,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(failed("listing", &all)(error)),
        };
        for entry in listing {
            let Ok(id) = entry.name.parse::<NamespaceId>() else { continue };
            if !entry.is_directory || self.get(id).is_some() {
                continue;
            }
            let path = all.join(&entry.name).join(names::DESCRIPTION);
            let bytes = match disk.read_file(&path, MAX_DESCRIPTION_LEN) {
                Ok(bytes) => bytes,
                // Its maker has not written it yet, or never will.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(failed("reading", &path)(error)),
            };
            match String::from_utf8(bytes) {
                Ok(description) if is_of(id, &description) => {
                    self.add(root, id, &description)?;
                }
                _ => {
                    tracing::warn!(path = %path.display(), "it does not describe the namespace that it is named after")
                }
            }
        }
        Ok(())
    }
}

/// Longest description.
const MAX_DESCRIPTION_LEN: usize = 1 << 20;

/// A description is what its namespace's identity is a hash of.
fn is_of(id: NamespaceId, description: &str) -> bool {
    blake3::hash(description.as_bytes()).as_bytes()[..16] == id.as_bytes()[..]
}

/// The directory of a namespace.
pub(super) fn directory(root: &Path, id: NamespaceId) -> PathBuf {
    root.join(names::NAMESPACES).join(id.to_string())
}

/// Writes a description down, where there is none.
pub(super) fn write_down(
    disk: &RealDisk,
    writer: &Writer,
    root: &Path,
    id: NamespaceId,
    description: &str,
) -> Result<()> {
    let directory = directory(root, id);
    let path = directory.join(names::DESCRIPTION);
    match disk.read_file(&path, MAX_DESCRIPTION_LEN) {
        Ok(bytes) if bytes == description.as_bytes() => return Ok(()),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed("reading", &path)(error)),
    }
    disk.create_directory(&directory).map_err(failed("making", &directory))?;
    writer.write_file(disk, &path, description.as_bytes()).map_err(failed("writing to", &path))?;
    let all = root.join(names::NAMESPACES);
    disk.sync_directory(&all).map_err(failed("syncing", &all))
}
