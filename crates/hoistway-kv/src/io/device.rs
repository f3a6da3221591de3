//! Bytes in the memory of devices: by way of pinned host memory, or directly where that is proven to go past the host.
#![allow(unsafe_code)]

use super::{
    AwaitedEvent, Checksums, Direction, Failure, Job,
    engine::Refusals,
    join::DEVICE_BYTES,
    plan::{Content, DevicePieces, SpanMemory, Step},
    staging::{Staging, StagingLease},
    transfer::Transfer,
};
use crate::{DirectPath, Error, Piece, Result, disk::DataFile, format::BLOCK_LEN};
use hoistway_device::{
    self as device, CopyDirection, CopyStream, Device, DeviceId, DirectBuffer, Fate, HostCopy, Pinned,
    Unavailable,
};
use hoistway_io::{Placement, direct_path::DirectProof, memory::release_idle_staging, parallel::lock};
use std::{
    any::Any,
    collections::{BTreeMap, HashMap},
    io,
    mem::{self, Discriminant},
    path::{Path, PathBuf},
    ptr::{self, NonNull},
    sync::{Arc, Mutex, MutexGuard, OnceLock, Weak},
};

/// Host memory that bytes of devices pass through, if the options do not say: less than 64 MiB.
const STAGING_BYTES: u64 = 60 * DEVICE_BYTES;
/// What it is given out in, which is what jobs are joined to: a copy of less costs nearly as much time.
const STAGING_SLOT_BYTES: usize = DEVICE_BYTES as usize;
/// What refusals and errors call the direct path.
const GDS: &str = "gds";

/// What all workers that serve devices share.
#[derive(Debug)]
pub(super) struct DeviceSide {
    direct: DirectPath,
    root: PathBuf,
    refusals: Arc<Refusals>,
    /// Memory that devices move directly. Locked for a look only, as threads of callers ask; no driver is called meanwhile.
    regions: Mutex<Vec<Arc<DirectBuffer>>>,
    /// Slots that bytes of devices pass through, in bytes.
    staging_bytes: u64,
    /// Locked for a look only, as `regions`.
    state: Mutex<State>,
    /// The pool as it is pinned, by kind of devices: each has a driver of its own. `None` where the platform pins no memory. Locked
    /// while the driver pins it, which takes long.
    pinned: Mutex<HashMap<Discriminant<DeviceId>, Option<Pinned>>>,
    /// Where the pool is, and the threads that use it: chosen for the first request that needs it.
    near: OnceLock<Near>,
    /// Locked while the pool gets its memory; no driver is called meanwhile.
    placing: Mutex<()>,
    pool: Mutex<Option<Arc<Staging>>>,
}

/// Where bytes of devices pass through the host's memory.
#[derive(Debug)]
struct Near {
    place: Placement,
    /// Whether it was chosen for a device.
    is_of_device: bool,
    /// Why a thread does not stay there.
    unbound: OnceLock<String>,
}

#[derive(Debug, Default)]
struct State {
    /// What shows, for each device, that they do.
    proofs: HashMap<DeviceId, Arc<DirectProof>>,
    /// Devices whose events were asked after.
    devices: HashMap<DeviceId, Arc<Device>>,
    /// The queues of copies of each worker, so that any of them lets go a device that is lost.
    queues: HashMap<(u64, DeviceId), Arc<CopyStream>>,
    /// How many workers there were, ever.
    workers: u64,
    /// Devices on NUMA nodes of which the pool is not, and these.
    far: BTreeMap<DeviceId, u32>,
}

impl DeviceSide {
    /// # Errors
    /// [`Error::RouteUnavailable`] if the direct path is required, and this machine cannot have it.
    pub(super) fn new(
        direct: DirectPath,
        root: PathBuf,
        staging_bytes: Option<u64>,
        refusals: Arc<Refusals>,
    ) -> Result<Self> {
        if direct == DirectPath::Require
            && let Err(why) = device::may_have_direct_path()
        {
            return Err(Error::RouteUnavailable { route: GDS.into(), path: root, why });
        }
        let (regions, state, pinned) = (Mutex::default(), Mutex::default(), Mutex::default());
        // No more than was asked for, in whole slots.
        let staging_bytes = staging_bytes.map_or(STAGING_BYTES, |bytes| bytes / DEVICE_BYTES * DEVICE_BYTES);
        let (near, placing, pool) = (OnceLock::new(), Mutex::default(), Mutex::new(None));
        Ok(Self { direct, root, refusals, regions, staging_bytes, state, pinned, near, placing, pool })
    }

    /// Chooses where threads run, and gets the memory there, that bytes of devices pass through. It is chosen once: near a device of the
    /// first job that needs it. On a thread of its own, as it may open the device, which may take long.
    ///
    /// # Errors
    /// The device's, if it cannot be opened: the next job chooses then. [`Failure::Io`] if there is no memory.
    fn place(&self, job: &Transfer, pool: &Staging) -> std::result::Result<&Near, Failure> {
        if let Some(near) = self.near.get() {
            return Ok(near);
        }
        let mut pieces = job.parts.iter().flat_map(|part| &part.pieces);
        let first = pieces.find(|piece| !piece.device.is_host());
        let device = first.map(|piece| self.device(piece.device)).transpose().map_err(Failure::Device)?;
        let _placing = lock(&self.placing);
        if let Some(near) = self.near.get() {
            return Ok(near);
        }
        let is_of_device = device.is_some();
        let place = device.map_or_else(Placement::default, |device| Placement::near_device(&device));
        pool.get_memory(place.node).map_err(Failure::Io)?;
        Ok(self.near.get_or_init(|| Near { place, is_of_device, unbound: OnceLock::new() }))
    }

    /// The NUMA node of that memory, if it is to be of one, and what users should know of it.
    pub(super) fn placed(&self) -> (Option<u32>, Vec<String>) {
        let Some(Near { place, unbound, .. }) = self.near.get() else { return (None, Vec::new()) };
        let pool = lock(&self.pool).clone();
        let off_node = pool.and_then(|pool| pool.slots()?.off_node());
        let far: Vec<(DeviceId, u32)> = self.lock().far.iter().map(|(id, own)| (*id, *own)).collect();
        let far = far.into_iter().map(|(id, own)| match place.node {
            Some(node) => format!(
                "{id} is on NUMA node {own}, but those of its bytes that are staged pass memory that was asked for on node {node}"
            ),
            None => format!(
                "{id} is on NUMA node {own}, but those of its bytes that are staged pass memory of any node, by threads on any: the \
                 first request that needed them had no memory of a device"
            ),
        });
        let notes = place.note.iter().chain(unbound.get()).cloned();
        (place.node, notes.chain(off_node).chain(far).collect())
    }

    /// What bytes pass through; it has no memory before the first job that needs it.
    pub(super) fn pool(&self) -> io::Result<Arc<Staging>> {
        let mut pool = lock(&self.pool);
        if let Some(pool) = &*pool {
            return Ok(pool.clone());
        }
        let made = Arc::new(Staging::without_memory(self.staging_bytes, STAGING_SLOT_BYTES)?);
        Ok(pool.insert(made).clone())
    }

    /// Notes that a device is used whose node is not that of the pool.
    fn note_far(&self, device: &Device) {
        let (Some(near), Some(own)) = (self.near.get(), device.info().numa_node) else { return };
        let is_far = match near.place.node {
            Some(node) => node != own,
            None => !near.is_of_device && Placement::near_device(device).node.is_some(),
        };
        if is_far {
            self.lock().far.insert(device.id(), own);
        }
    }

    /// Makes memory of a device known to the direct path, if it may take that. Otherwise the report says why not.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`] if the direct path is required, and there is none; the device's error if it cannot be
    /// used at all.
    ///
    /// # Safety
    /// It must be memory of this device, and stay allocated until the result is dropped.
    pub(super) unsafe fn register(self: &Arc<Self>, id: DeviceId, address: u64, len: u64) -> Result<Region> {
        if Device::get(id).is_some_and(|device| device.is_lost()) {
            self.unpin_lost();
        }
        let device = self.device(id)?;
        // SAFETY: passed on.
        let buffer = unsafe { self.register_directly(&device, address, len) };
        let buffer = match buffer {
            Ok(buffer) => Some(Arc::new(buffer)),
            Err(why) if self.direct == DirectPath::Require => return Err(self.unavailable(why)),
            Err(why) => {
                self.refusals.add(GDS, &self.root, &why);
                None
            }
        };
        let region = buffer.as_ref().map_or_else(Weak::new, Arc::downgrade);
        lock(&self.regions).extend(buffer);
        Ok(Region { side: self.clone(), buffer: region, process: std::process::id() })
    }

    /// # Safety
    /// As for [`DeviceSide::register`].
    unsafe fn register_directly(
        &self,
        device: &Arc<Device>,
        address: u64,
        len: u64,
    ) -> std::result::Result<DirectBuffer, Unavailable> {
        if self.direct == DirectPath::Off {
            let reason = "switched off by the option direct=off".into();
            return Err(Unavailable { reason, fix: String::new() });
        }
        device.may_have_direct_path()?;
        let id = device.id();
        if !self.lock().proofs.contains_key(&id) {
            let proof = Arc::new(DirectProof::find(device, &self.root)?);
            tracing::info!(device = device.name(), proof = proof.text(), "the direct path is proven");
            let earlier = self.lock().proofs.insert(id, proof);
            drop(earlier);
        }
        // SAFETY: passed on.
        let buffer = unsafe { DirectBuffer::of_callers(device, address, len) };
        buffer.map_err(|error| Unavailable { reason: error.to_string(), fix: String::new() })
    }

    fn unavailable(&self, why: Unavailable) -> Error {
        Error::RouteUnavailable { route: GDS.into(), path: self.root.clone(), why }
    }

    /// The region that has all these bytes.
    fn region_of(&self, id: DeviceId, address: u64, len: u64) -> Option<Arc<DirectBuffer>> {
        lock(&self.regions).iter().find(|region| has(region, id, address, len)).cloned()
    }

    /// How a job's pieces on devices are moved.
    ///
    /// # Errors
    /// If they must be moved directly, and cannot.
    pub(super) fn pieces(
        &self,
        job: &Transfer,
        file: &DataFile,
    ) -> std::result::Result<DevicePieces, Failure> {
        let direct = match self.direct {
            DirectPath::Off => return Ok(DevicePieces::Staged),
            DirectPath::Prefer | DirectPath::Require => self.can_move(job, file),
        };
        match direct {
            Ok(()) => Ok(DevicePieces::Direct),
            Err(why) if self.direct == DirectPath::Require => Err(failure(&self.unavailable(why))),
            Err(why) => {
                self.refusals.add(GDS, job.file.path(), &why);
                Ok(DevicePieces::Staged)
            }
        }
    }

    /// Whether a device may move bytes of a job itself, as far as that is known before its file is open.
    pub(super) fn may_move(&self, job: &Job) -> bool {
        if self.direct == DirectPath::Off || job.checksums == Checksums::Require {
            return false;
        }
        let mut pieces =
            job.parts.iter().flat_map(|part| &part.pieces).filter(|piece| !piece.device.is_host());
        let regions = lock(&self.regions);
        let is_in =
            |region: &Arc<DirectBuffer>, piece: &Piece| has(region, piece.device, piece.address, piece.len);
        !regions.is_empty() && pieces.any(|piece| regions.iter().any(|region| is_in(region, piece)))
    }

    fn can_move(&self, job: &Transfer, file: &DataFile) -> std::result::Result<(), Unavailable> {
        if job.checksums == Checksums::Require {
            return Err(Unavailable {
                reason: "no sync covers the block, so its checksums are compared on the host".into(),
                fix: "store blocks with durability=batched or durability=sync".into(),
            });
        }
        for piece in job.parts.iter().flat_map(|part| &part.pieces) {
            if !piece.device.is_host() && self.region_of(piece.device, piece.address, piece.len).is_none() {
                return Err(Unavailable {
                    reason: "memory of a device was not registered, the direct path was given up, or the device was lost".into(),
                    fix: "register it with the store (register_device)".into(),
                });
            }
        }
        file.registered().map(|_| ()).map_err(Clone::clone)
    }

    /// Whether an event is reached.
    ///
    /// # Errors
    /// The device's, and [`device::Error::DeviceUnavailable`] if it is unknown whose event it is.
    ///
    /// # Safety
    /// It must be a live event.
    pub(super) unsafe fn is_reached(&self, event: &AwaitedEvent) -> device::Result<bool> {
        let id = event.id.ok_or_else(|| {
            let reason = "the request has memory on devices of several kinds, or of none while the process has \
                          drivers of several";
            let fix = "make one request for each kind of devices, or synchronize instead of passing an event";
            device::Error::DeviceUnavailable {
                device: "of the event".into(),
                why: Unavailable { reason: reason.into(), fix: fix.into() },
            }
        })?;
        let device = self.device(id)?;
        // SAFETY: passed on.
        Ok(unsafe { device.is_event_reached(event.handle)? })
    }

    /// A device, which stays open: it is asked after often.
    fn device(&self, id: DeviceId) -> device::Result<Arc<Device>> {
        let open = self.lock().devices.get(&id).cloned();
        if let Some(device) = open.filter(|device| !device.is_lost()) {
            return Ok(device);
        }
        // What uses one that is lost keeps it from being opened anew.
        self.forget_lost();
        let device = Device::open(id)?;
        // Let go without the lock, as all that may call the driver.
        let earlier = self.lock().devices.insert(id, device.clone());
        drop(earlier);
        Ok(device)
    }

    /// The direct path is not taken any more for a file.
    pub(super) fn give_up_file(&self, file: &DataFile, why: &Unavailable) {
        self.refusals.add(GDS, file.path(), why);
        file.refuse_registered(why);
    }

    /// Says that pieces of registered memory go by way of the host for how they lie.
    pub(super) fn note_unaligned(&self, file: &DataFile) {
        let reason = format!("pieces of a device's memory do not begin and end at multiples of {BLOCK_LEN}");
        let fix = format!("align the address and the length of each piece to {BLOCK_LEN} bytes");
        self.refusals.add(GDS, file.path(), &Unavailable { reason, fix });
    }

    /// The direct path is not taken any more, for any file.
    pub(super) fn give_up(&self, path: &Path, why: &Unavailable) {
        self.refusals.add(GDS, path, why);
        if self.direct != DirectPath::Require {
            let regions = mem::take(&mut *lock(&self.regions));
            drop(regions);
        }
    }

    /// Whether bytes must be moved directly or not at all.
    pub(super) fn is_required(&self) -> bool {
        self.direct == DirectPath::Require
    }

    /// Fails if what was moved directly since the proof was not.
    pub(super) fn check_kept(&self) -> std::result::Result<(), Unavailable> {
        let proofs: Vec<Arc<DirectProof>> = self.lock().proofs.values().cloned().collect();
        proofs.iter().try_for_each(|proof| proof.check_kept())
    }

    /// What shows that devices move bytes directly.
    pub(super) fn proofs(&self) -> Vec<String> {
        self.lock().proofs.iter().map(|(id, proof)| format!("{id}: {}", proof.text())).collect()
    }

    /// Pins the memory that bytes pass through, once for all devices of a kind, and anew if it was pinned in the context of one
    /// that is lost.
    fn pin(&self, device: &Arc<Device>, pool: &Staging) -> Result<(), device::Error> {
        self.unpin_lost();
        let mut all = lock(&self.pinned);
        let kind = mem::discriminant(&device.id());
        if let (false, Some((memory, len))) = (all.contains_key(&kind), host_memory(pool)) {
            // SAFETY: this has the pool, which it drops after it has unpinned it, or never.
            let pin = || unsafe { Pinned::new(device, memory.as_ptr(), len) };
            let pinned = match pin() {
                // What loads have left pinned counts too.
                Err(device::Error::Allocation { .. }) if release_idle_staging() => pin(),
                pinned => pinned,
            };
            let pinned = match pinned {
                Ok(pinned) => Some(pinned),
                Err(error) if error.is_unsupported() => {
                    let why = Unavailable { reason: error.to_string(), fix: String::new() };
                    self.refusals.add("pinned staging", &self.root, &why);
                    None
                }
                Err(error) => return Err(error),
            };
            all.insert(kind, pinned);
        }
        Ok(())
    }

    /// Lets devices go that are lost and had the pool pinned. May wait while another thread pins it.
    fn unpin_lost(&self) {
        let is_lost = |pinned: &Option<Pinned>| pinned.as_ref().is_some_and(|own| own.device().is_lost());
        let lost: Vec<_> = lock(&self.pinned).extract_if(|_, pinned| is_lost(pinned)).collect();
        self.unpin_all(lost.into_iter().filter_map(|(_, pinned)| pinned));
    }

    fn unpin_all(&self, pinned: impl Iterator<Item = Pinned>) {
        if !Pinned::unpin_all(pinned) {
            // Memory that may be pinned still keeps its address, so that no other memory gets it.
            mem::forget(lock(&self.pool).clone());
        }
    }

    /// Lets devices go that are lost, and what was registered with them.
    fn forget_lost(&self) {
        let mut regions = lock(&self.regions);
        let registered: Vec<_> = regions.extract_if(.., |region| region.device().is_lost()).collect();
        drop(regions);
        let mut state = self.lock();
        let is_lost = |id| Device::get(id).is_some_and(|device| device.is_lost());
        let proofs: Vec<_> = state.proofs.extract_if(|id, _| is_lost(*id)).collect();
        let queues: Vec<_> = state.queues.extract_if(|_, queue| queue.device().is_lost()).collect();
        let devices: Vec<_> = state.devices.extract_if(|_, device| device.is_lost()).collect();
        drop(state);
        drop((registered, proofs, queues, devices));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Drop for DeviceSide {
    fn drop(&mut self) {
        let pinned = self.pinned.get_mut().map(mem::take).unwrap_or_default();
        self.unpin_all(pinned.into_values().flatten());
    }
}

/// The memory of a pool, if it has some.
fn host_memory(pool: &Staging) -> Option<(NonNull<u8>, usize)> {
    pool.slots()?.host_memory()
}

/// Whether a region has all these bytes, and the device is there that has them.
fn has(region: &DirectBuffer, id: DeviceId, address: u64, len: u64) -> bool {
    region.device().id() == id
        && !region.device().is_lost()
        && region.address() <= address
        && address.checked_add(len).is_some_and(|end| end <= region.address() + region.len())
}

/// Memory of a device that is known to the direct path as long as this lives.
#[derive(Debug)]
pub(crate) struct Region {
    side: Arc<DeviceSide>,
    /// Gone once the direct path was given up, or the device was lost.
    buffer: Weak<DirectBuffer>,
    process: u32,
}

impl Region {
    /// Whether its bytes go past the host's memory.
    pub(crate) fn is_direct(&self) -> bool {
        !self.is_childs() && lock(&self.side.regions).iter().any(|region| self.is(region))
    }

    fn is(&self, region: &Arc<DirectBuffer>) -> bool {
        ptr::eq(Arc::as_ptr(region), self.buffer.as_ptr())
    }

    /// Locks what a thread may hold while another forks.
    #[cfg(test)]
    pub(super) fn hold(&self) -> impl Sized + '_ {
        (self.side.lock(), lock(&self.side.regions))
    }

    /// Whether this is a copy in a child of fork, where locks may be held by threads that it lacks.
    fn is_childs(&self) -> bool {
        self.process != std::process::id()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.is_childs() {
            // The memory is known to the parent's driver, which the child must not call.
            mem::forget(self.side.clone());
            return;
        }
        let mut regions = lock(&self.side.regions);
        let own: Vec<_> = regions.extract_if(.., |region| self.is(region)).collect();
        drop(regions);
        drop(own);
    }
}

/// Copies that were not all made.
#[derive(Debug)]
pub(super) enum FailedCopies {
    /// They have ended.
    Failed(device::Error),
    /// Whether they have ended is unknown: what they use is to be parked.
    Unknown(device::Error, Parking),
}

/// Where memory is kept that copies of unknown fate use.
#[derive(Debug)]
pub(super) struct Parking {
    /// The queue of the copies.
    queue: Arc<CopyStream>,
    side: Arc<DeviceSide>,
}

impl Parking {
    /// Keeps memory until the device tells that it does not use it, with the pool that is pinned for the copies.
    pub(super) fn park(&self, memory: impl Any + Send) {
        self.queue.park((memory, self.side.clone()));
    }
}

/// One worker's queues of copies.
#[derive(Debug)]
pub(super) struct DeviceLane {
    side: Arc<DeviceSide>,
    pool: Arc<Staging>,
    worker: u64,
    /// Whether its thread was put where the pool is.
    is_placed: bool,
}

impl Drop for DeviceLane {
    fn drop(&mut self) {
        let mut state = self.side.lock();
        let own: Vec<_> = state.queues.extract_if(|(worker, _), _| *worker == self.worker).collect();
        drop(state);
        drop(own);
    }
}

impl DeviceLane {
    pub(super) fn new(side: Arc<DeviceSide>, pool: Arc<Staging>) -> Self {
        let mut state = side.lock();
        let worker = state.workers;
        state.workers += 1;
        drop(state);
        Self { side, pool, worker, is_placed: false }
    }

    /// Sees to it that the pool has memory, and that this thread runs near it.
    ///
    /// # Errors
    /// Why it has none.
    pub(super) fn place(&mut self, job: &Transfer) -> std::result::Result<(), Failure> {
        if self.is_placed {
            return Ok(());
        }
        let near = self.side.place(job, &self.pool)?;
        if let Err(error) = near.place.bind() {
            let _ = near.unbound.set(Placement::unbound(&error));
        }
        self.is_placed = true;
        Ok(())
    }

    pub(super) fn side(&self) -> &DeviceSide {
        &self.side
    }

    /// Copies the bounced pieces of a step that are on devices, from them before a write, to them after a read, and
    /// waits for that.
    ///
    /// # Errors
    /// What became of them. If that is unknown, what they use is to be [parked](Parking::park).
    ///
    /// # Safety
    /// The pieces must be allocated on their devices, and nothing may use them, or the lease, in a way that copies forbid.
    pub(super) unsafe fn copy(
        &self,
        direction: Direction,
        step: &Step,
        lease: &StagingLease,
    ) -> std::result::Result<(), Box<FailedCopies>> {
        let direction = match direction {
            Direction::Read => CopyDirection::ToDevice,
            Direction::Write => CopyDirection::ToHost,
        };
        for (id, copies) in copies(step, lease) {
            let queue = self.queue(id).map_err(FailedCopies::Failed)?;
            // SAFETY: the caller vouches for the pieces; the lease is pinned memory, and ours.
            match unsafe { queue.run(direction, &copies) } {
                Fate::Done => {}
                Fate::Failed(error) => return Err(FailedCopies::Failed(error).into()),
                Fate::Unknown(error) => {
                    let parking = Parking { queue, side: self.side.clone() };
                    return Err(FailedCopies::Unknown(error, parking).into());
                }
            }
        }
        Ok(())
    }

    fn queue(&self, id: DeviceId) -> Result<Arc<CopyStream>, device::Error> {
        let open = self.side.lock().queues.get(&(self.worker, id)).cloned();
        let queue = match open.filter(|queue| !queue.device().is_lost()) {
            Some(queue) => queue,
            None => {
                self.side.forget_lost();
                self.side.unpin_lost();
                let queue = Arc::new(CopyStream::new(&Device::open(id)?)?);
                self.side.note_far(queue.device());
                let earlier = self.side.lock().queues.insert((self.worker, id), queue.clone());
                drop(earlier);
                queue
            }
        };
        // Also for a queue that has been here for long: another device may have had the pool pinned, and be lost.
        self.side.pin(queue.device(), &self.pool)?;
        // Else each further copy would set memory aside, until none is left for other devices.
        queue.device().regain()?;
        Ok(queue)
    }

    /// Has the library of devices move a step, and says how many bytes that was.
    ///
    /// # Errors
    /// Why it did not move all of them.
    pub(super) fn move_directly(
        &self,
        direction: Direction,
        step: &Step,
        file: &DataFile,
    ) -> std::result::Result<u64, Unavailable> {
        let handle = file.registered().map_err(Clone::clone)?;
        let mut offset = step.offset;
        for piece in pieces(step) {
            let region = self
                .side
                .region_of(piece.id, piece.address, piece.len)
                .ok_or_else(|| Unavailable::new("memory is not registered any more", ""))?;
            let failed = |why: &dyn std::fmt::Display| failed(region.device(), why);
            let end = offset + piece.len;
            let mut at = piece.address - region.address();
            while offset < end {
                let len = (end - offset) as usize;
                let moved = match direction {
                    Direction::Read => handle.read_at(&region, at, len, offset),
                    Direction::Write => handle.write_at(&region, at, len, offset),
                };
                match moved {
                    Ok(0) => return Err(failed(&"nothing was moved")),
                    Ok(count) => {
                        let count = (count as u64).min(end - offset);
                        (offset, at) = (offset + count, at + count);
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(failed(&error)),
                }
            }
        }
        Ok(step.len)
    }
}

fn failed(device: &Device, why: &dyn std::fmt::Display) -> Unavailable {
    match device.direct_library() {
        Ok(library) => {
            Unavailable::new(format!("{} did not move all bytes: {why}", library.name), library.log)
        }
        Err(gone) => gone,
    }
}

/// An error of the store's as one of a transfer.
pub(super) fn failure(error: &Error) -> Failure {
    Failure::Io(io::Error::new(io::ErrorKind::Unsupported, error.to_string()))
}

/// Memory of a device in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DevicePiece {
    id: DeviceId,
    address: u64,
    len: u64,
}

/// The pieces of a step that a device moves, neighbours together.
fn pieces(step: &Step) -> Vec<DevicePiece> {
    let mut pieces: Vec<DevicePiece> = Vec::new();
    for span in &step.spans {
        let Content::Payload { address, device: id, .. } = span.content else { continue };
        if id.is_host() {
            continue;
        }
        match pieces.last_mut() {
            Some(last) if last.id == id && last.address + last.len == address => last.len += span.len,
            _ => pieces.push(DevicePiece { id, address, len: span.len }),
        }
    }
    pieces
}

/// The copies that a step needs, by device, in the order of the file; neighbours together.
fn copies(step: &Step, lease: &StagingLease) -> Vec<(DeviceId, Vec<HostCopy>)> {
    let mut all: Vec<(DeviceId, Vec<HostCopy>)> = Vec::new();
    for span in &step.spans {
        let Content::Payload { mut address, device: id, .. } = span.content else { continue };
        if id.is_host() {
            continue;
        }
        let SpanMemory::Bounced(at) = span.place else { continue };
        let place = all.iter().position(|(other, _)| *other == id).unwrap_or_else(|| {
            all.push((id, Vec::new()));
            all.len() - 1
        });
        let copies = &mut all[place].1;
        for (host, len) in lease.runs(at, span.len) {
            let host = host.expose_provenance();
            match copies.last_mut() {
                Some(last) if last.host + last.len == host && last.device + last.len as u64 == address => {
                    last.len += len;
                }
                _ => copies.push(HostCopy { host, device: address, len }),
            }
            address += len as u64;
        }
    }
    all
}
