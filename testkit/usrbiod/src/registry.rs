//! What clients have registered in `3fs-virt/iovs`.

use crate::{mapping::Mapping, served::ServedRing};
use fuser::Errno;
use hoistway_usrbio::Key;
use std::{
    collections::{BTreeMap, HashMap},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Memory that a client has registered.
pub(crate) struct Registration {
    pub(crate) name: String,
    pub(crate) target: PathBuf,
    pub(crate) key: Key,
    pub(crate) uid: u32,
    /// The thread that made it, which the kernel calls its process.
    pid: u32,
    /// `None` for rings, which have it themselves.
    pub(crate) memory: Option<Mapping>,
    pub(crate) ring: Option<Arc<ServedRing>>,
}

/// All of them, by number, and the open handles of their directory.
#[derive(Default)]
pub(crate) struct Registry {
    registered: Mutex<BTreeMap<u64, Arc<Registration>>>,
    handles: Mutex<HashMap<u64, u32>>,
}

impl Registry {
    /// Registers what a new link names.
    pub(crate) fn add(
        &self,
        name: &str,
        target: &Path,
        uid: u32,
        pid: u32,
    ) -> Result<(u64, Arc<Registration>), Errno> {
        let key: Key = name.parse().map_err(|_| Errno::EINVAL)?;
        let metadata = target.metadata().map_err(|_| Errno::EINVAL)?;
        if !metadata.is_file() || !target.starts_with("/dev/shm") || key.block_bytes as u64 > metadata.len() {
            return Err(Errno::EINVAL);
        }
        let mapping = Mapping::open(target).map_err(|_: io::Error| Errno::EACCES)?;
        let (memory, ring) = match &key.ring {
            None => (Some(mapping), None),
            Some(ring) => {
                let served = ServedRing::new(mapping, ring.clone()).ok_or(Errno::EINVAL)?;
                (None, Some(Arc::new(served)))
            }
        };
        let registration = Arc::new(Registration {
            name: name.into(),
            target: target.to_owned(),
            key,
            uid,
            pid,
            memory,
            ring,
        });
        let mut all = self.registered();
        if all.values().any(|other| other.name == name) {
            return Err(Errno::EEXIST);
        }
        let number = (0..).find(|number| !all.contains_key(number)).unwrap_or_default();
        all.insert(number, registration.clone());
        Ok((number, registration))
    }

    pub(crate) fn remove(&self, name: &str, uid: u32) -> Result<(), Errno> {
        let mut all = self.registered();
        let number = all
            .iter()
            .find(|(_, one)| one.name == name)
            .map(|(number, one)| (*number, one.uid))
            .ok_or(Errno::ENOENT)?;
        if number.1 != uid {
            return Err(Errno::EPERM);
        }
        all.remove(&number.0);
        Ok(())
    }

    pub(crate) fn find(&self, name: &str) -> Option<(u64, Arc<Registration>)> {
        self.registered().iter().find(|(_, one)| one.name == name).map(|(number, one)| (*number, one.clone()))
    }

    pub(crate) fn get(&self, number: u64) -> Option<Arc<Registration>> {
        self.registered().get(&number).cloned()
    }

    pub(crate) fn by_id(&self, id: [u8; 16]) -> Option<Arc<Registration>> {
        self.registered().values().find(|one| one.key.id.into_bytes() == id).cloned()
    }

    pub(crate) fn all(&self) -> Vec<(u64, Arc<Registration>)> {
        self.registered().iter().map(|(number, one)| (*number, one.clone())).collect()
    }

    pub(crate) fn clear(&self) {
        self.registered().clear();
    }

    /// A thread has opened the directory.
    pub(crate) fn opened(&self, handle: u64, pid: u32) {
        self.handles().insert(handle, pid);
    }

    /// A handle of the directory is closed: what its thread has registered goes.
    pub(crate) fn closed(&self, handle: u64) {
        if let Some(pid) = self.handles().remove(&handle) {
            self.registered().retain(|_, one| one.pid != pid);
        }
    }

    fn registered(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Registration>>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handles(&self) -> MutexGuard<'_, HashMap<u64, u32>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
