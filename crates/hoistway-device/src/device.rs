//! Devices, whatever their kind.
#![allow(unsafe_code)]

use crate::{
    DeviceId, DirectLibrary, Error, PathCounts, Result, Transfer, Unavailable, aside,
    backend::{Backend, Kind, OpenDevice, no_conversions},
    fate::Parked,
    id::kinds,
    idle,
    reused_memory::{ReusedMemory, Wanting},
    spare_streams::SpareStreams,
    stream,
    turns::Turns,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

/// Drops what is kept for a device between uses.
type LetGo = fn(&Arc<Device>);

/// What is called for a device that is released or lost.
static KEEPERS: Mutex<Vec<LetGo>> = Mutex::new(Vec::new());

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Its name in options, reports and messages.
    pub id: DeviceId,
    /// Its number among the visible devices of its kind.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Its place on the PCI bus, such as `0000:3b:00.0`.
    pub pci: String,
    /// Its UUID, in hex.
    pub uuid: String,
    /// Its locally unique identifier, which other APIs of Windows name it by. `None` also if it is linked to
    /// another device, whose identifier it shares.
    pub luid: Option<[u8; 8]>,
    /// The NUMA node that it hangs off, if the system says.
    pub numa_node: Option<u32>,
    /// What its kernels are compiled for, such as `compute capability 9.0` or `gfx942`.
    pub architecture: String,
    /// Whether it shares the host's memory rather than having its own.
    pub is_integrated: bool,
    /// Whether it reads host memory that is not pinned.
    pub reads_pageable_memory: bool,
    /// Whether it reads host memory by the host's own page tables.
    pub uses_host_page_tables: bool,
    /// Whether it allocates in the order of a stream.
    pub has_memory_pools: bool,
    /// Whether other devices can read and write its memory.
    pub has_gpudirect_rdma: bool,
    /// Whether it pins host memory that cannot be written, such as a view of a file.
    pub pins_read_only: bool,
    /// Whether it runs kernels: copies of many short pieces at once, and conversions.
    pub has_kernels: bool,
}

/// An open device.
pub struct Device {
    backend: Arc<dyn Backend>,
    /// What it may still use of memory that others have let go.
    parked: Parked,
    turns: Turns,
    spare_streams: SpareStreams,
    /// What streams of tensors keep for their next ones.
    reused_memory: Mutex<Vec<Weak<ReusedMemory>>>,
}

/// The devices of all kinds that this process sees.
///
/// ```
/// match hoistway_device::devices() {
///     Ok(devices) => println!("{} devices", devices.len()),
///     Err(why) => println!("no devices: {why}"),
/// }
/// ```
///
/// # Errors
/// Why there are none.
pub fn devices() -> Result<Vec<DeviceInfo>, Unavailable> {
    let (mut found, mut missing) = (Vec::new(), None);
    for (kind, _) in kinds() {
        match kind.devices() {
            Ok(devices) => found.extend(devices),
            Err(why) => _ = missing.get_or_insert(why),
        }
    }
    missing.filter(|_| found.is_empty()).map_or(Ok(found), Err)
}

/// Something of the machine that devices of a kind need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at.
    pub name: &'static str,
    /// How it is.
    pub condition: Condition,
    /// What was found.
    pub text: String,
    /// What would make it better; empty if nothing needs to.
    pub fix: String,
}

/// How something of the machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// As it should be.
    Ok,
    /// Not here, and needed only for what it serves.
    Absent,
    /// Not usable although it is here.
    Slower,
}

impl Finding {
    pub(crate) fn ok(name: &'static str, text: impl Into<String>) -> Self {
        Self { name, condition: Condition::Ok, text: text.into(), fix: String::new() }
    }

    pub(crate) fn absent(name: &'static str, text: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, condition: Condition::Absent, text: text.into(), fix: fix.into() }
    }

    pub(crate) fn slower(name: &'static str, text: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, condition: Condition::Slower, text: text.into(), fix: fix.into() }
    }
}

/// Looks at what each kind of devices needs of the machine.
pub fn examine() -> Vec<Finding> {
    kinds().flat_map(|(kind, _)| kind.examine()).collect()
}

/// Checks whether this machine may have a direct path from files to devices of some kind.
///
/// # Errors
/// What the kind that is looked for first lacks.
pub fn may_have_direct_path() -> Result<(), Unavailable> {
    let mut first = None;
    for (kind, _) in kinds() {
        match kind.may_have_direct_path() {
            Ok(()) => return Ok(()),
            Err(why) => _ = first.get_or_insert(why),
        }
    }
    first.map_or(Ok(()), Err)
}

/// The device whose memory an address is in; [`DeviceId::Cpu`] for every address that is no device's.
///
/// # Errors
/// [`Error::Device`] if a driver does not say whether it is memory of its devices.
pub fn device_of(address: u64) -> Result<DeviceId> {
    for (kind, id) in kinds() {
        if let Some(ordinal) = kind.owner_of(address)? {
            return Ok(id(ordinal));
        }
    }
    Ok(DeviceId::Cpu)
}

/// Drops what a device takes long to let go of, such as much pinned memory, on a thread of its own. [`release_devices`] and the
/// end of the process wait for it, but no longer than ten seconds.
pub fn drop_aside(what: impl Send + 'static) {
    aside::run("hoistway-unpin", move || drop(what));
}

/// Has `let_go` called for each device that is released or lost from now on. It drops what its crate keeps for the device between
/// uses, which keeps the device open.
pub fn on_release(let_go: LetGo) {
    KEEPERS.lock().unwrap_or_else(PoisonError::into_inner).push(let_go);
}

fn let_go(device: &Arc<Device>) {
    let keepers = KEEPERS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    keepers.into_iter().for_each(|let_go| let_go(device));
    device.spare_streams.let_go();
}

/// The devices that are open.
pub(crate) fn open_devices() -> Vec<Arc<Device>> {
    let started = kinds().filter(|(kind, _)| kind.is_started());
    started
        .flat_map(|(kind, _)| {
            opened(kind).values().filter_map(|open| open.device.upgrade()).collect::<Vec<_>>()
        })
        .collect()
}

/// Lets the devices go that the process has opened, with their contexts: at once where nothing uses them, else with what
/// does. They are opened again when they are needed. Waits for all work of a device where memory is parked, which comes back if the
/// device tells that it has ended.
pub fn release_devices() {
    // One for all waits: what hangs is not waited for again.
    let deadline = aside::deadline();
    aside::wait(deadline);
    for (kind, _) in kinds() {
        // Also true in a child of fork, which has none to release.
        if !kind.is_started() {
            continue;
        }
        let open: Vec<_> = opened(kind).values().filter_map(|open| open.device.upgrade()).collect();
        // Parked memory uses its device.
        for device in &open {
            if let Err(error) = device.regain() {
                tracing::warn!(%error, "a device stays open, with memory that it may still use");
            }
        }
        let kept: Vec<_> = opened(kind).values_mut().filter_map(|open| open.kept.take()).collect();
        // After that, nothing more is kept for them.
        open.iter().for_each(let_go);
        // They may do that on a thread of their own.
        aside::wait(deadline);
        // Without the lock: to close a device waits for its work.
        drop((open, kept));
    }
    // That thread may have been the last to use one, and leaves it to another thread then.
    idle::look_again_until(deadline);
    aside::wait(deadline);
}

fn opened(kind: &dyn Kind) -> MutexGuard<'static, BTreeMap<u32, OpenDevice>> {
    // Kept consistent by every statement, so a panic elsewhere does not spoil it.
    kind.opened().lock().unwrap_or_else(PoisonError::into_inner)
}

/// A device that is open, which the process keeps from now on, unless it is lost.
fn find(kind: &dyn Kind, ordinal: u32) -> Option<Arc<Device>> {
    let mut opened = opened(kind);
    let open = opened.get_mut(&ordinal)?;
    let device = open.device.upgrade()?;
    if !device.is_lost() {
        open.kept = Some(device.clone());
    }
    Some(device)
}

impl Device {
    /// Opens a device, or returns it if it is open. The process keeps it until [`release_devices`]. For one that is open, the
    /// driver is not called.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] if there is no such device; [`Error::Device`] if it does not start.
    pub fn open(id: DeviceId) -> Result<Arc<Self>> {
        let Some((kind, ordinal)) = id.kind() else {
            let why = Unavailable::new(
                "host memory is no device",
                format!("name a device, such as {}", DeviceId::first_kind()),
            );
            return Err(Error::DeviceUnavailable { device: id.to_string(), why });
        };
        // Before the lock, and before a device is found that a parent of this process opened.
        kind.check().map_err(|why| Error::DeviceUnavailable { device: id.to_string(), why })?;
        if let Some(device) = find(kind, ordinal) {
            if !device.is_lost() {
                return Ok(device);
            }
            // It does nothing more, and what is parked or kept for it would keep it open.
            device.ask_again();
            let_go(&device);
        }
        let opening = opened(kind).entry(ordinal).or_default().opening.clone();
        let _opening = opening.lock().unwrap_or_else(PoisonError::into_inner);
        // One that is lost is opened anew as soon as nothing uses it.
        let is_lost = |kept: &mut Arc<Self>| kept.is_lost();
        let lost = opened(kind).get_mut(&ordinal).and_then(|open| open.kept.take_if(is_lost));
        drop(lost);
        if let Some(device) = find(kind, ordinal) {
            return Ok(device);
        }
        let device = Arc::new(Self {
            backend: kind.open(ordinal)?,
            parked: Parked::default(),
            turns: Turns::default(),
            spare_streams: SpareStreams::new(),
            reused_memory: Mutex::default(),
        });
        let mut opened = opened(kind);
        let open = opened.entry(ordinal).or_default();
        (open.device, open.kept) = (Arc::downgrade(&device), Some(device.clone()));
        Ok(device)
    }

    /// A device that is open; `None` if it is not. Calls no driver and waits for nothing, so that a lock may be held.
    pub fn get(id: DeviceId) -> Option<Arc<Self>> {
        let (kind, ordinal) = id.kind()?;
        // A child of `fork` may find the lock taken.
        kind.is_started().then(|| opened(kind).get(&ordinal)?.device.upgrade()).flatten()
    }

    /// What it is.
    pub fn info(&self) -> &DeviceInfo {
        self.backend.info()
    }

    /// Its name as a value.
    pub fn id(&self) -> DeviceId {
        self.info().id
    }

    /// Its name in options, reports and messages.
    pub fn name(&self) -> String {
        self.id().to_string()
    }

    /// Whether a call said that it does nothing more, as after the program has reset it: all of its work has ended. It is opened
    /// anew once nothing uses it.
    pub fn is_lost(&self) -> bool {
        self.backend.is_lost()
    }

    /// Whether the process keeps it although nothing may use it: until [`release_devices`], or until it is lost.
    pub fn is_kept(&self) -> bool {
        let Some((kind, ordinal)) = self.id().kind() else { return false };
        let is_this = |kept: &Arc<Self>| std::ptr::eq(&**kept, self);
        !self.is_lost()
            && opened(kind).get(&ordinal).is_some_and(|open| open.kept.as_ref().is_some_and(is_this))
    }

    /// Bytes of its memory that are free, and that it has in all.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.backend.memory()
    }

    /// The error of an operation that needs more of its memory than there is.
    pub fn too_little_memory(&self, needed: u64, available: u64) -> Error {
        Error::OutOfMemory { device: self.name(), needed, available }
    }

    /// Whether tensors in host memory are the device's as they are: it has no memory of its own to copy them to.
    pub fn shares_host_memory(&self) -> bool {
        self.info().is_integrated && self.info().reads_pageable_memory
    }

    /// Whether an event of the caller's, as its driver names it, is reached.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// It must be a live event of this device.
    pub unsafe fn is_event_reached(&self, event: u64) -> Result<bool> {
        // SAFETY: passed on.
        unsafe { self.backend.is_event_reached(event) }
    }

    /// Fails if it has no direct path to any file. Success is no proof that it has one to a certain file.
    ///
    /// # Errors
    /// Why not.
    pub fn check_direct(&self) -> Result<(), Unavailable> {
        self.backend.direct()?.check()
    }

    /// Checks whether this machine may have a direct path from files to it. Asked before the library for that is opened
    /// unless the caller insists: opening costs time and memory of the device, and where nothing is prepared for it, some
    /// versions misbehave.
    ///
    /// # Errors
    /// What is missing.
    pub fn may_have_direct_path(&self) -> Result<(), Unavailable> {
        self.id().kind().map_or(Ok(()), |(kind, _)| kind.may_have_direct_path())
    }

    /// Fails if there is no library for it that may read files past the host.
    ///
    /// # Errors
    /// Why not.
    pub fn check_direct_library(&self) -> Result<(), Unavailable> {
        self.backend.direct().map(drop)
    }

    /// What people are told of the library that reads files into it past the host.
    ///
    /// # Errors
    /// Why there is none.
    pub fn direct_library(&self) -> Result<&'static DirectLibrary, Unavailable> {
        Ok(self.backend.direct()?.library())
    }

    /// Counts direct reads into it by path, if the library counts them.
    pub fn direct_reads(&self) -> Option<PathCounts> {
        self.backend.direct().ok()?.reads()
    }

    /// Counts direct writes from it by path, if the library counts them.
    pub fn direct_writes(&self) -> Option<PathCounts> {
        self.backend.direct().ok()?.writes()
    }

    /// Makes a short call of the driver: now, or where another thread is making long ones, right after them and on that thread.
    pub fn between_long_calls(&self, short: impl FnOnce() + Send + 'static) {
        self.turns.between(short);
    }

    /// Makes calls of the driver that take long together, such as many allocations. Others that do so wait, and short calls are left
    /// to this thread ([`Device::between_long_calls`]): `long` must neither wait for one, nor call this again.
    pub fn make_long_calls<T>(&self, long: impl FnOnce() -> T) -> T {
        self.turns.take(long)
    }

    /// Begins to load its kernels on a thread of its own, if nothing has yet. Work that needs them waits for that, or loads them if it
    /// failed. [`release_devices`] and the end of the process wait for the thread, but no longer than ten seconds.
    pub fn prepare_kernels(&self) {
        self.backend.clone().prepare_kernels();
    }

    /// What a report says of how its kernels were loaded; `None` if they were loaded as they should be, or not yet.
    pub fn kernels_note(&self) -> Option<String> {
        self.backend.kernels_note()
    }

    /// Bytes of the table that transfers need beside their slot; 0 if they need no kernel.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] if they convert, and the device cannot.
    pub fn table_bytes(&self, transfers: &[Transfer]) -> Result<u64> {
        let converts = transfers.iter().any(|transfer| matches!(transfer, Transfer::Converted { .. }));
        match self.info().has_kernels {
            true if converts || stream::has_many_short(transfers) => Ok(stream::table_bytes(transfers.len())),
            false if converts => Err(no_conversions(self.name())),
            _ => Ok(0),
        }
    }

    pub(crate) fn spare_streams(&self) -> &SpareStreams {
        &self.spare_streams
    }

    pub(crate) fn add_reused_memory(&self, reused: &Arc<ReusedMemory>) {
        let mut all = self.reused_memory.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|reused| reused.strong_count() > 0);
        all.push(Arc::downgrade(reused));
    }

    /// Frees the memory that streams of tensors keep for their next ones. They keep none as long as the result lives, which is empty if
    /// there are no such streams.
    fn make_room(&self) -> Vec<Wanting> {
        let all = self.reused_memory.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let wanting: Vec<_> = all.iter().filter_map(|reused| reused.upgrade()?.want()).collect();
        wanting.iter().for_each(Wanting::let_go);
        wanting
    }

    /// Allocates memory, once more without what streams of tensors keep for their next ones if the device has too little. To free that
    /// waits for its work, so no [turn](Self::make_long_calls) may be held.
    ///
    /// # Errors
    /// Those of `allocate`.
    pub fn with_room<T>(&self, mut allocate: impl FnMut() -> Result<T>) -> Result<T> {
        let allocated = allocate();
        if !matches!(allocated, Err(Error::OutOfMemory { .. })) {
            return allocated;
        }
        let wanting = self.make_room();
        if wanting.is_empty() { allocated } else { allocate() }
    }

    /// Bytes of its memory that are free, `needed` at least if it takes no more than what streams of tensors keep for their next ones.
    ///
    /// # Errors
    /// Those of [`Device::memory`].
    pub fn free_bytes_for(&self, needed: u64) -> Result<u64> {
        let (free, _) = self.memory()?;
        if free >= needed || self.make_room().is_empty() { Ok(free) } else { Ok(self.memory()?.0) }
    }

    pub(crate) fn turns(&self) -> &Turns {
        &self.turns
    }

    pub(crate) fn parked(&self) -> &Parked {
        &self.parked
    }

    pub(crate) fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("info", self.info()).finish_non_exhaustive()
    }
}
