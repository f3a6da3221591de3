//! A disk in memory that keeps apart what was synced and what was not. At a crash, any of the sectors and names that
//! were not synced survive, in any of the states that they had; the dice are seeded.
#![forbid(unsafe_code)]

use super::{DataFile, Disk, DiskFile, Extend, FileAccess, Listing};
use hoistway_io::sys::files::Space;
use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
};

/// What a disk writes as a whole.
const SECTOR: usize = 512;

/// What an operation does, for scripts of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Open,
    List,
    Create,
    Write,
    Sync,
    Allocate,
    Rename,
    Remove,
    SyncDirectory,
}

/// What happens instead of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// It fails with this `errno`, and does nothing.
    Fail(i32),
    /// A write ends after so many bytes.
    Cut(usize),
}

/// A line of a script: of the operations of this kind on files whose names contain `name`, the one after `skip` others,
/// and the `times - 1` that follow.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) operation: Operation,
    pub(crate) name: &'static str,
    pub(crate) skip: u32,
    pub(crate) times: u32,
    pub(crate) effect: Effect,
}

/// Pseudo-random numbers: SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub(crate) fn one_in(&mut self, sides: u64) -> bool {
        self.below(sides) == 0
    }
}

/// The names of a file system that is not mounted.
pub(crate) struct Unmounted {
    names: BTreeMap<PathBuf, Named>,
    durable_names: BTreeMap<PathBuf, Named>,
    unsynced_names: BTreeMap<PathBuf, Vec<Option<Named>>>,
    /// The number that it is mounted with.
    pub(crate) file_system: u64,
}

type FileId = u64;
type Sector = [u8; SECTOR];

/// A file. Its bytes are those of `current`; those that survive a crash for certain are `durable`.
#[derive(Debug, Default)]
struct Inode {
    current: Vec<u8>,
    durable: BTreeMap<usize, Sector>,
    durable_len: usize,
    /// What sectors were since the last sync, oldest first.
    unsynced: BTreeMap<usize, Vec<Sector>>,
    /// Lengths since the last sync.
    unsynced_lens: Vec<usize>,
    /// What `allocate` gave it.
    allocated: u64,
    locked_by: Option<u64>,
}

impl Inode {
    fn write(&mut self, bytes: &[u8], offset: usize) {
        let end = offset + bytes.len();
        if end > self.current.len() {
            self.current.resize(end, 0);
            self.unsynced_lens.push(end);
        }
        self.current[offset..end].copy_from_slice(bytes);
        if bytes.is_empty() {
            return;
        }
        for number in offset / SECTOR..=(end - 1) / SECTOR {
            let sector = self.sector(number);
            self.unsynced.entry(number).or_default().push(sector);
        }
    }

    fn sector(&self, number: usize) -> Sector {
        let mut sector = [0; SECTOR];
        let start = (number * SECTOR).min(self.current.len());
        let bytes = &self.current[start..self.current.len().min(start + SECTOR)];
        sector[..bytes.len()].copy_from_slice(bytes);
        sector
    }

    fn sync(&mut self) {
        for (number, mut states) in std::mem::take(&mut self.unsynced) {
            if let Some(last) = states.pop() {
                self.durable.insert(number, last);
            }
        }
        self.durable_len = self.current.len();
        self.unsynced_lens.clear();
    }

    /// A sync that failed: what was to be written counts as clean, and is on the disk or not.
    fn sync_badly(&mut self, dice: &mut Dice) {
        for (number, states) in std::mem::take(&mut self.unsynced) {
            if dice.one_in(2)
                && let Some(last) = states.last()
            {
                self.durable.insert(number, *last);
            }
        }
        if dice.one_in(2) {
            self.durable_len = self.current.len();
        }
        self.unsynced_lens.clear();
    }

    fn crash(&mut self, dice: &mut Dice) {
        for (number, states) in std::mem::take(&mut self.unsynced) {
            let chosen = dice.below(states.len() as u64 + 1) as usize;
            if let Some(state) = chosen.checked_sub(1).and_then(|chosen| states.get(chosen)) {
                self.durable.insert(number, *state);
            }
        }
        let lens = std::mem::take(&mut self.unsynced_lens);
        let chosen = dice.below(lens.len() as u64 + 1) as usize;
        if let Some(len) = chosen.checked_sub(1).and_then(|chosen| lens.get(chosen)) {
            self.durable_len = *len;
        }
        self.current = vec![0; self.durable_len];
        for (number, sector) in &self.durable {
            let start = number * SECTOR;
            let end = (start + SECTOR).min(self.current.len());
            if start < end {
                self.current[start..end].copy_from_slice(&sector[..end - start]);
            }
        }
        self.locked_by = None;
    }

    fn takes(&self) -> u64 {
        (self.current.len().next_multiple_of(4096) as u64).max(self.allocated)
    }
}

/// What a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    File(FileId),
    Directory,
}

/// What a test does at a moment of its choice.
struct Hook(Option<Box<dyn FnOnce() + Send>>);

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Hook").field(&self.0.is_some()).finish()
    }
}

/// What a test does at all moments of a kind.
struct EachTime(Option<Arc<dyn Fn() + Send + Sync>>);

impl std::fmt::Debug for EachTime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("EachTime").field(&self.0.is_some()).finish()
    }
}

#[derive(Debug)]
struct State {
    inodes: BTreeMap<FileId, Inode>,
    next: FileId,
    names: BTreeMap<PathBuf, Named>,
    /// Names that survive for certain.
    durable_names: BTreeMap<PathBuf, Named>,
    /// What names were since their directory was synced, oldest first.
    unsynced_names: BTreeMap<PathBuf, Vec<Option<Named>>>,
    capacity: u64,
    /// The number of the file system that all paths are on.
    file_system: u64,
    faults: Vec<Fault>,
    /// What happens during the next sync.
    during_sync: Hook,
    /// What happens during all syncs of files and directories.
    during_syncs: EachTime,
    /// Operations that are still done before the power is cut.
    left: u64,
    done: u64,
    dice: Dice,
    /// The most bytes that all files ever took.
    most_used: u64,
    /// Bytes that were read.
    read: u64,
    /// Bytes that were written.
    written: u64,
}

/// The disk. Clones are the same one.
#[derive(Clone, Debug)]
pub(crate) struct SimulatedDisk(Arc<Mutex<State>>);

impl SimulatedDisk {
    pub(crate) fn new(seed: u64, capacity: u64) -> Self {
        let names: BTreeMap<_, _> = [(PathBuf::from("/"), Named::Directory)].into();
        Self(Arc::new(Mutex::new(State {
            inodes: BTreeMap::new(),
            next: 1,
            durable_names: names.clone(),
            names,
            unsynced_names: BTreeMap::new(),
            capacity,
            file_system: 1,
            faults: Vec::new(),
            during_sync: Hook(None),
            during_syncs: EachTime(None),
            left: u64::MAX,
            done: 0,
            dice: Dice(seed),
            most_used: 0,
            read: 0,
            written: 0,
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub(crate) fn script(&self, fault: Fault) {
        self.state().faults.push(fault);
    }

    /// Does this during the next sync, after what it syncs was settled.
    pub(crate) fn during_next_sync(&self, act: impl FnOnce() + Send + 'static) {
        self.state().during_sync = Hook(Some(Box::new(act)));
    }

    /// Does this during all syncs of files and directories from now on.
    pub(crate) fn during_syncs(&self, act: impl Fn() + Send + Sync + 'static) {
        self.state().during_syncs = EachTime(Some(Arc::new(act)));
    }

    pub(crate) fn end_faults(&self) {
        self.state().faults.clear();
    }

    pub(crate) fn set_capacity(&self, bytes: u64) {
        self.state().capacity = bytes;
    }

    /// Removes all that lies below a directory. Open files live on, as those of a process do.
    pub(crate) fn empty(&self, directory: &Path) {
        let mut state = self.state();
        let below = |path: &Path| path != directory && path.starts_with(directory);
        state.names.retain(|path, _| !below(path));
        state.durable_names.retain(|path, _| !below(path));
        state.unsynced_names.retain(|path, _| !below(path));
    }

    /// Unmounts the file system: its directory is empty, and another file system's.
    pub(crate) fn unmount(&self, directory: &Path) -> Unmounted {
        let unmounted = {
            let state = self.state();
            Unmounted {
                names: state.names.clone(),
                durable_names: state.durable_names.clone(),
                unsynced_names: state.unsynced_names.clone(),
                file_system: state.file_system,
            }
        };
        self.empty(directory);
        self.state().file_system += 1;
        unmounted
    }

    /// Mounts it again.
    pub(crate) fn mount(&self, unmounted: Unmounted) {
        let mut state = self.state();
        let Unmounted { names, durable_names, unsynced_names, file_system } = unmounted;
        (state.names, state.durable_names) = (names, durable_names);
        (state.unsynced_names, state.file_system) = (unsynced_names, file_system);
    }

    /// Cuts the power after so many more operations that change something.
    pub(crate) fn cut_power_after(&self, operations: u64) {
        self.state().left = operations;
    }

    pub(crate) fn is_without_power(&self) -> bool {
        self.state().left == 0
    }

    /// Operations that changed something, so far.
    pub(crate) fn operations(&self) -> u64 {
        self.state().done
    }

    /// What is there when the power is back.
    pub(crate) fn crash(&self) {
        let mut state = self.state();
        let state = &mut *state;
        for (path, states) in std::mem::take(&mut state.unsynced_names) {
            let chosen = state.dice.below(states.len() as u64 + 1) as usize;
            match chosen.checked_sub(1).and_then(|chosen| states.get(chosen)) {
                Some(Some(named)) => drop(state.durable_names.insert(path, *named)),
                Some(None) => drop(state.durable_names.remove(&path)),
                None => {}
            }
        }
        // What lies in a directory that did not survive is gone with it.
        let directories: Vec<PathBuf> = state.durable_names.keys().cloned().collect();
        state.durable_names.retain(|path, _| {
            path.ancestors().skip(1).all(|parent| directories.iter().any(|known| known == parent))
        });
        state.names = state.durable_names.clone();
        for inode in state.inodes.values_mut() {
            inode.crash(&mut state.dice);
        }
        state.left = u64::MAX;
        state.faults.clear();
    }

    /// A process that dies loses its locks, and nothing else. Files that it had open are closed by dropping them.
    pub(crate) fn flip(&self, path: &Path, bit: u64) {
        let mut state = self.state();
        let id = state.file(path).unwrap();
        let inode = state.inodes.get_mut(&id).unwrap();
        let (byte, mask) = ((bit / 8) as usize, 1 << (bit % 8));
        inode.current[byte] ^= mask;
        let sector = inode.sector(byte / SECTOR);
        inode.durable.insert(byte / SECTOR, sector);
    }

    pub(crate) fn truncate(&self, path: &Path, len: usize) {
        let mut state = self.state();
        let id = state.file(path).unwrap();
        let inode = state.inodes.get_mut(&id).unwrap();
        inode.current.truncate(len);
        inode.durable_len = len;
        inode.unsynced_lens.clear();
        inode.durable.retain(|number, _| number * SECTOR < len);
        inode.unsynced.retain(|number, _| number * SECTOR < len);
    }

    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        self.state().names.keys().cloned().collect()
    }

    /// Bytes that all files take.
    pub(crate) fn used(&self) -> u64 {
        self.state().used()
    }

    /// The most that [`SimulatedDisk::used`] ever was.
    pub(crate) fn most_used(&self) -> u64 {
        self.state().most_used
    }

    /// Bytes that were read of open files, so far.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.state().read
    }

    /// Bytes that were written to all files.
    pub(crate) fn bytes_written(&self) -> u64 {
        self.state().written
    }

    pub(crate) fn forget_most_used(&self) {
        let mut state = self.state();
        state.most_used = state.used();
    }

    /// Returns the bytes that a read of the file sees now; fewer at its end.
    pub(crate) fn read(&self, path: &Path, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let state = self.state();
        let inode = &state.inodes[&state.file(path)?];
        let start = (offset as usize).min(inode.current.len());
        Ok(inode.current[start..inode.current.len().min(start + len)].to_vec())
    }

    /// Writes as the store's transfers do: not synced.
    pub(crate) fn write(&self, path: &Path, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.state();
        let state = &mut *state;
        state.begin(Operation::Write, path)?;
        let id = state.file(path)?;
        state.inodes.get_mut(&id).unwrap().write(bytes, offset as usize);
        Ok(())
    }
}

fn system(errno: rustix::io::Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.raw_os_error())
}

impl State {
    fn file(&self, path: &Path) -> io::Result<FileId> {
        match self.names.get(path) {
            Some(Named::File(id)) => Ok(*id),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Counts an operation, and says whether it is done: else why not, with the bytes that are written nevertheless.
    fn begin_cut(&mut self, operation: Operation, path: &Path) -> Result<(), (usize, io::Error)> {
        if self.left == 0 {
            return Err((0, system(rustix::io::Errno::IO)));
        }
        let name = path.to_string_lossy();
        for fault in &mut self.faults {
            if fault.operation != operation || !name.contains(fault.name) || fault.times == 0 {
                continue;
            }
            if fault.skip > 0 {
                fault.skip -= 1;
                continue;
            }
            fault.times -= 1;
            return Err(match fault.effect {
                Effect::Fail(errno) => (0, io::Error::from_raw_os_error(errno)),
                Effect::Cut(len) => (len, io::ErrorKind::WriteZero.into()),
            });
        }
        self.left -= 1;
        self.done += 1;
        Ok(())
    }

    fn begin(&mut self, operation: Operation, path: &Path) -> io::Result<()> {
        self.begin_cut(operation, path).map_err(|(_, error)| error)
    }

    fn name(&mut self, path: &Path, named: Option<Named>) {
        match named {
            Some(named) => self.names.insert(path.to_owned(), named),
            None => self.names.remove(path),
        };
        self.unsynced_names.entry(path.to_owned()).or_default().push(named);
    }

    fn used(&self) -> u64 {
        let ids = self.names.values().filter_map(|named| match named {
            Named::File(id) => Some(*id),
            Named::Directory => None,
        });
        ids.map(|id| self.inodes[&id].takes()).sum()
    }

    fn grew(&mut self) {
        self.most_used = self.most_used.max(self.used());
    }
}

impl Disk for SimulatedDisk {
    fn open(&self, path: &Path, access: FileAccess) -> io::Result<Box<dyn DiskFile>> {
        let mut state = self.state();
        let id = match (state.file(path), access) {
            (Ok(_), FileAccess::CreateNew) => return Err(io::ErrorKind::AlreadyExists.into()),
            (Err(_), FileAccess::CreateNew) => {
                state.begin(Operation::Create, path)?;
                if state.names.get(path.parent().unwrap()) != Some(&Named::Directory) {
                    return Err(io::ErrorKind::NotFound.into());
                }
                let id = state.next;
                state.next += 1;
                state.inodes.insert(id, Inode::default());
                state.name(path, Some(Named::File(id)));
                id
            }
            (Ok(id), _) => {
                if !state.faults.is_empty() {
                    state.begin(Operation::Open, path)?;
                }
                id
            }
            (Err(error), _) => return Err(error),
        };
        let opening = state.next;
        state.next += 1;
        let file_system = state.file_system;
        Ok(Box::new(SimulatedFile { disk: self.clone(), id, file_system, opening, path: path.to_owned() }))
    }

    fn open_data(&self, path: &Path, access: FileAccess) -> io::Result<(Box<dyn DiskFile>, Arc<DataFile>)> {
        Ok((self.open(path, access)?, Arc::new(DataFile::in_name_only(path)?)))
    }

    fn create_directory(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        if !state.names.contains_key(path) {
            state.begin(Operation::Create, path)?;
            state.name(path, Some(Named::Directory));
        }
        Ok(())
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<Listing>> {
        let mut state = self.state();
        if state.names.get(directory) != Some(&Named::Directory) {
            return Err(io::ErrorKind::NotFound.into());
        }
        if !state.faults.is_empty() {
            state.begin(Operation::List, directory)?;
        }
        let children = state.names.iter().filter(|(path, _)| path.parent() == Some(directory));
        Ok(children
            .map(|(path, named)| Listing {
                name: path.file_name().unwrap().to_str().unwrap().to_owned(),
                is_directory: *named == Named::Directory,
                allocated: match named {
                    Named::File(id) => state.inodes[id].takes(),
                    Named::Directory => 0,
                },
            })
            .collect())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.begin(Operation::Rename, from)?;
        let id = state.file(from)?;
        state.name(to, Some(Named::File(id)));
        state.name(from, None);
        Ok(())
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        if self.state().names.contains_key(to) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.begin(Operation::Remove, path)?;
        state.file(path)?;
        state.name(path, None);
        Ok(())
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.begin(Operation::Remove, path)?;
        if state.names.keys().any(|other| other.parent() == Some(path)) {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        state.name(path, None);
        Ok(())
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        let mut locked = self.state();
        let state = &mut *locked;
        state.begin(Operation::SyncDirectory, path)?;
        let unsynced = std::mem::take(&mut state.unsynced_names);
        for (name, mut states) in unsynced {
            if name.parent() != Some(path) {
                state.unsynced_names.insert(name, states);
                continue;
            }
            match states.pop().flatten() {
                Some(named) => drop(state.durable_names.insert(name, named)),
                None => drop(state.durable_names.remove(&name)),
            }
        }
        let each_time = state.during_syncs.0.clone();
        drop(locked);
        if let Some(act) = each_time {
            act();
        }
        Ok(())
    }

    fn file_system(&self, path: &Path) -> io::Result<u64> {
        let state = self.state();
        match state.names.contains_key(path) {
            true => Ok(state.file_system),
            false => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn free_space(&self, _: &Path) -> io::Result<Space> {
        let state = self.state();
        Ok(Space { total_bytes: state.capacity, free_bytes: state.capacity.saturating_sub(state.used()) })
    }
}

#[derive(Debug)]
struct SimulatedFile {
    disk: SimulatedDisk,
    id: FileId,
    /// The number of its file system when it was opened.
    file_system: u64,
    opening: u64,
    path: PathBuf,
}

impl DiskFile for SimulatedFile {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut state = self.disk.state();
        let state = &mut *state;
        let current = &state.inodes[&self.id].current;
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(current.len());
        let read = into.len().min(current.len() - start);
        into[..read].copy_from_slice(&current[start..start + read]);
        state.read += read as u64;
        Ok(read)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let mut state = self.disk.state();
        let state = &mut *state;
        let begun = state.begin_cut(Operation::Write, &self.path);
        let inode = state.inodes.get_mut(&self.id).unwrap();
        let offset = offset as usize;
        if let Err((len, error)) = begun {
            let len = len.min(bytes.len());
            inode.write(&bytes[..len], offset);
            return if len > 0 { Ok(len) } else { Err(error) };
        }
        let end = offset + bytes.len();
        let more = (end.next_multiple_of(4096) as u64).saturating_sub(inode.takes());
        if more > 0 && state.used() + more > state.capacity {
            return Err(system(rustix::io::Errno::NOSPC));
        }
        state.inodes.get_mut(&self.id).unwrap().write(bytes, offset);
        state.written += bytes.len() as u64;
        state.grew();
        Ok(bytes.len())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut locked = self.disk.state();
        let state = &mut *locked;
        let has_power = state.left > 0;
        let begun = state.begin(Operation::Sync, &self.path);
        let inode = state.inodes.get_mut(&self.id).unwrap();
        match begun {
            Ok(()) => inode.sync(),
            Err(error) => {
                if has_power {
                    inode.sync_badly(&mut state.dice);
                }
                return Err(error);
            }
        }
        let (during, each_time) = (state.during_sync.0.take(), state.during_syncs.0.clone());
        drop(locked);
        if let Some(act) = during {
            act();
        }
        if let Some(act) = each_time {
            act();
        }
        Ok(())
    }

    fn allocate(&self, len: u64, extend: Extend) -> io::Result<()> {
        let mut state = self.disk.state();
        let state = &mut *state;
        state.begin(Operation::Allocate, &self.path)?;
        let more = len.saturating_sub(state.inodes[&self.id].takes());
        if state.used() + more > state.capacity {
            return Err(system(rustix::io::Errno::NOSPC));
        }
        let inode = state.inodes.get_mut(&self.id).unwrap();
        inode.allocated = inode.allocated.max(len);
        if extend == Extend::Yes && inode.current.len() < len as usize {
            match inode.current.is_empty() {
                // Large files take no memory before they are written to.
                true => inode.current = vec![0; len as usize],
                false => inode.current.resize(len as usize, 0),
            }
            inode.unsynced_lens.push(len as usize);
        }
        state.grew();
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.disk.state().inodes[&self.id].current.len() as u64)
    }

    fn is_named(&self, path: &Path) -> io::Result<bool> {
        let state = self.disk.state();
        Ok(state.file_system == self.file_system && state.file(path).is_ok_and(|id| id == self.id))
    }

    fn try_lock(&self) -> io::Result<bool> {
        let mut state = self.disk.state();
        let lock = &mut state.inodes.get_mut(&self.id).unwrap().locked_by;
        if lock.is_some_and(|by| by != self.opening) {
            return Ok(false);
        }
        *lock = Some(self.opening);
        Ok(true)
    }

    fn unlock(&self) -> io::Result<()> {
        let mut state = self.disk.state();
        let lock = &mut state.inodes.get_mut(&self.id).unwrap().locked_by;
        if *lock == Some(self.opening) {
            *lock = None;
        }
        Ok(())
    }
}

impl Drop for SimulatedFile {
    fn drop(&mut self) {
        let _ = self.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::write_full;

    fn disk(seed: u64) -> SimulatedDisk {
        SimulatedDisk::new(seed, 1 << 20)
    }

    #[test]
    fn what_was_synced_survives_and_the_rest_may_not() {
        let path = Path::new("/file");
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..64 {
            let disk = disk(seed);
            let file = disk.open(path, FileAccess::CreateNew).unwrap();
            write_full(&*file, &[1; 1024], 0).unwrap();
            file.sync_data().unwrap();
            disk.sync_directory(Path::new("/")).unwrap();
            write_full(&*file, &[2; 1024], 0).unwrap();
            write_full(&*file, &[3; 512], 512).unwrap();
            disk.crash();
            let bytes = disk.read(path, 0, 4096).unwrap();
            seen.insert((bytes.len(), bytes[0], bytes[1023]));
        }
        assert_eq!(seen, [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)].map(|(a, b)| (1024, a, b)).into());
    }

    #[test]
    fn names_that_were_not_synced_may_go() {
        let survives = |seed| {
            let disk = disk(seed);
            disk.open(Path::new("/file"), FileAccess::CreateNew).unwrap();
            disk.crash();
            disk.paths().len() == 2
        };
        assert!((0..32).any(survives) && !(0..32).all(survives));
    }

    #[test]
    fn a_failed_sync_is_not_made_good_by_the_next() {
        let is_lost = |seed| {
            let disk = disk(seed);
            let file = disk.open(Path::new("/file"), FileAccess::CreateNew).unwrap();
            disk.sync_directory(Path::new("/")).unwrap();
            write_full(&*file, &[1; 512], 0).unwrap();
            let (operation, effect) = (Operation::Sync, Effect::Fail(5));
            disk.script(Fault { operation, name: "file", skip: 0, times: 1, effect });
            assert_eq!(file.sync_data().unwrap_err().raw_os_error(), Some(5));
            file.sync_data().unwrap();
            disk.crash();
            disk.read(Path::new("/file"), 0, 512).unwrap() != [1; 512]
        };
        assert!((0..32).any(is_lost) && !(0..32).all(is_lost));
    }
}
