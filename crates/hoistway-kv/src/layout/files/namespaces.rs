//! The namespaces that are known, and the trees that their blocks are in.
#![forbid(unsafe_code)]

use super::{
    failed, lock,
    names::{self, Tree},
    ownership,
    writer::Writer,
};
use crate::{
    Error, EventKind, Fingerprint, NamespaceId, Result,
    disk::{RealDisk, expect_directory, metadata},
    layout::{
        Observed,
        directory::{Described, described, of_namespace},
    },
};
use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

/// A namespace.
#[derive(Debug)]
pub(super) struct Namespace {
    pub(super) id: NamespaceId,
    /// Its number in the index.
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

    /// The time at which a file that was written then expires.
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
        if !is_known.load(Ordering::Relaxed) && metadata(path).is_ok() {
            is_known.store(true, Ordering::Relaxed);
        }
        is_known.load(Ordering::Relaxed)
    }

    /// Its directory was removed, with what it said.
    pub(super) fn forget_files(&self) {
        self.expiring.1.store(false, Ordering::Relaxed);
        lock(&self.keys).clear();
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
    /// Those that can be used.
    by_id: HashMap<NamespaceId, Arc<Namespace>>,
    /// Those that cannot, and why.
    unusable: HashMap<NamespaceId, String>,
}

impl Namespaces {
    pub(super) fn get(&self, id: NamespaceId) -> Option<Arc<Namespace>> {
        self.known().by_id.get(&id).cloned()
    }

    pub(super) fn numbered(&self, number: u16) -> Option<Arc<Namespace>> {
        self.known().by_number.get(usize::from(number)).cloned()
    }

    /// Those that can be used.
    pub(super) fn all(&self) -> Vec<Arc<Namespace>> {
        let known = self.known();
        known.by_number.iter().filter(|namespace| known.by_id.contains_key(&namespace.id)).cloned().collect()
    }

    pub(super) fn described(&self) -> Vec<(NamespaceId, String)> {
        self.all().iter().map(|namespace| (namespace.id, namespace.description.clone())).collect()
    }

    /// The number of namespaces that cannot be used.
    pub(super) fn unusable(&self) -> u64 {
        self.known().unusable.len() as u64
    }

    fn known(&self) -> RwLockReadGuard<'_, Known> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a namespace in, or finds it.
    pub(super) fn add(&self, root: &Path, id: NamespaceId, description: &str) -> Result<Arc<Namespace>> {
        let tree = Tree::of(root, of_namespace(root, id), description)?;
        match expect_directory(tree.root()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("opening", tree.root())(error));
            }
            _ => {}
        }
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = known.by_id.get(&id) {
            return Ok(Arc::clone(found));
        }
        if let Some(other) = known.by_id.values().find(|other| other.tree == tree) {
            return Err(taken(&tree, other.id));
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
            expiring: (of_namespace(root, id).join(names::EXPIRING), AtomicBool::new(false)),
            keys: Mutex::default(),
        });
        known.by_number.push(Arc::clone(&namespace));
        known.by_id.insert(id, Arc::clone(&namespace));
        known.unusable.remove(&id);
        Ok(namespace)
    }

    /// Takes in those that are written down. One that cannot be read, or whose directory another namespace has, costs
    /// itself alone. Returns those that were used until now, and cannot be used any more.
    pub(super) fn read(
        &self,
        disk: &RealDisk,
        root: &Path,
        observed: &Observed,
    ) -> Result<Vec<Arc<Namespace>>> {
        let mut lost = Vec::new();
        let found = described(disk, root)?;
        let bare = self.all().into_iter().filter(|namespace| namespace.tree.is_bare());
        for namespace in bare {
            match ownership::expect(disk, root, &namespace.tree, namespace.id, &found) {
                Ok(()) => {}
                Err(error @ Error::InvalidOption { .. }) => {
                    self.reject(namespace.id, &error.to_string(), observed);
                    lost.push(namespace);
                }
                // The claim was that of this namespace until now. The next look asks again.
                Err(error) => {
                    tracing::warn!(namespace = %namespace.id, %error, "a claim cannot be read");
                }
            }
        }
        for (id, description) in found.iter().filter(|(id, _)| self.get(**id).is_none()) {
            let add =
                |text: &String| self.add_owned(disk, root, *id, text, &found).map_err(|e| e.to_string());
            if let Err(reason) = description.as_ref().map_err(Clone::clone).and_then(add) {
                self.reject(*id, &reason, observed);
            }
        }
        Ok(lost)
    }

    fn add_owned(
        &self,
        disk: &RealDisk,
        root: &Path,
        id: NamespaceId,
        description: &str,
        found: &Described,
    ) -> Result<()> {
        let tree = Tree::of(root, of_namespace(root, id), description)?;
        if tree.is_bare() {
            ownership::expect(disk, root, &tree, id, found)?;
        }
        self.add(root, id, description).map(drop)
    }

    fn reject(&self, id: NamespaceId, reason: &str, observed: &Observed) {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        known.by_id.remove(&id);
        if known.unusable.get(&id).is_some_and(|known| known == reason)
            || known.unusable.len() >= MOST_UNUSABLE
        {
            return;
        }
        known.unusable.insert(id, reason.to_owned());
        observed.note(EventKind::NamespaceUnusable, format!("namespace {id} cannot be used: {reason}"));
    }
}

/// Most namespaces of which it is remembered that they cannot be used.
const MOST_UNUSABLE: usize = 1024;

/// The error of a namespace whose tree belongs to another one.
pub(super) fn taken(tree: &Tree, owner: NamespaceId) -> Error {
    let value = tree.root().file_name().unwrap_or_default().to_string_lossy().into_owned();
    let reason = format!(
        "the namespace {owner} of the store has another description, and its blocks are there; use another directory"
    );
    Error::InvalidOption { option: names::VLLM_DIRECTORY, value, reason }
}
