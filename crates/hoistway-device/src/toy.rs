//! Devices in host memory that copy and do nothing else: no kernels, no direct path. For tests, and an example of a
//! kind. Each stream has a thread, so that copies are in flight as those of a real device are.
#![allow(unsafe_code)]

use crate::{
    DeviceId, DeviceInfo, DriverError, Error, Fate, Result, Unavailable,
    backend::{Address, Backend, Event, Kind, Opened, Pending, Stream, Work},
};
use std::{
    alloc::{self, Layout},
    collections::BTreeMap,
    io, process, ptr,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// How many there are.
const COUNT: u32 = 2;
/// Alignment of allocations.
const ALIGNMENT: u64 = 256;
/// Bytes of memory of each device, unless that is set.
const MEMORY: u64 = 16 << 30;
/// What fresh memory holds.
const POISON: u8 = 0xa5;

/// Bytes of memory of each device.
static MEMORY_BYTES: AtomicU64 = AtomicU64::new(MEMORY);
/// Microseconds that each batch of copies takes.
static DELAY_US: AtomicU64 = AtomicU64::new(0);
/// Batches of copies that were queued and have not ended, on all devices.
static BATCHES_LEFT: AtomicU64 = AtomicU64::new(0);
/// Threads that wait for all work of a device.
static WAITING: AtomicU64 = AtomicU64::new(0);
/// How many hold copies back.
static HOLDS: Mutex<u64> = Mutex::new(0);
static HOLDS_CHANGED: Condvar = Condvar::new();
/// What exists on all devices.
static STATE: Mutex<State> =
    Mutex::new(State { allocations: BTreeMap::new(), pins: BTreeMap::new(), faults: Vec::new() });

/// What a device can be made to fail at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// Asking how much memory is free.
    AskMemory,
    /// An allocation.
    Allocate,
    /// An allocation, for want of memory.
    Exhaust,
    /// Pinning host memory.
    Pin,
    /// Pinning host memory, since the system lets no more be pinned.
    PinLimit,
    /// Making a stream.
    MakeStream,
    /// Queueing work.
    Queue,
    /// Making an event.
    Mark,
    /// A copy. The device is lost with it: it does nothing more until it is opened anew.
    Copy,
    /// Waiting for an event. The device is lost.
    Lose,
    /// Waiting for an event or for the device, or asking after an event: it is not known whether the work has ended.
    Doubt,
}

/// A fault to come.
struct Plan {
    fault: Fault,
    /// From 1; each time if absent.
    nth: Option<u64>,
    seen: u64,
}

struct State {
    /// By address: the device and the length.
    allocations: BTreeMap<u64, (u32, u64)>,
    /// Lengths, by address.
    pins: BTreeMap<u64, u64>,
    faults: Vec<Plan>,
}

impl State {
    fn get() -> MutexGuard<'static, Self> {
        // Kept consistent by every statement, so a panic elsewhere does not spoil it.
        STATE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an occasion for a fault, and says whether that happens.
    fn strikes(fault: Fault) -> bool {
        let mut state = Self::get();
        let plans = state.faults.iter_mut().filter(|plan| plan.fault == fault);
        let strikes = plans.map(|plan| {
            plan.seen += 1;
            plan.nth.is_none_or(|nth| nth == plan.seen)
        });
        strikes.fold(false, |any, strikes| any | strikes)
    }

    fn allocated_on(&self, device: u32) -> u64 {
        self.allocations.values().filter(|(owner, _)| *owner == device).map(|(_, len)| len).sum()
    }

    fn owner_of(&self, address: u64, len: u64) -> Option<u32> {
        let (start, (device, bytes)) = self.allocations.range(..=address).next_back()?;
        (address.checked_add(len)? <= start + bytes).then_some(*device)
    }

    fn is_pinned(&self, address: u64, len: u64) -> bool {
        let below = self.pins.range(..=address).next_back();
        below.is_some_and(|(start, bytes)| address.saturating_add(len) <= start + bytes)
    }
}

/// Sets how much memory each device has.
pub fn set_memory_bytes(bytes: u64) {
    MEMORY_BYTES.store(bytes, Ordering::Relaxed);
}

/// Makes each batch of copies take so long.
pub fn set_delay(delay: Duration) {
    DELAY_US.store(u64::try_from(delay.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// Makes the devices fail: the `nth` time from now on, counted from 1, or each time.
pub fn fail(fault: Fault, nth: Option<u64>) {
    State::get().faults.push(Plan { fault, nth, seen: 0 });
}

/// While it lives, no batch of copies begins.
#[derive(Debug)]
#[must_use]
pub struct Held(());

/// Holds back the copies of all devices that have not begun.
pub fn hold_copies() -> Held {
    *holds() += 1;
    Held(())
}

impl Drop for Held {
    fn drop(&mut self) {
        *holds() -= 1;
        HOLDS_CHANGED.notify_all();
    }
}

fn holds() -> MutexGuard<'static, u64> {
    HOLDS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait_until_none_holds() {
    let mut holds = holds();
    while *holds > 0 {
        holds = HOLDS_CHANGED.wait(holds).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Counts the batches of copies that were queued and have not ended.
pub fn batches_left() -> u64 {
    BATCHES_LEFT.load(Ordering::Acquire)
}

/// Counts the threads that wait for all work of a device.
pub fn waiting() -> u64 {
    WAITING.load(Ordering::Acquire)
}

/// The toys, to oneself: what is set is the process's.
#[cfg(test)]
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    reset();
    turn
}

/// Takes back what was set, but for what holds copies back.
pub fn reset() {
    set_memory_bytes(MEMORY);
    set_delay(Duration::ZERO);
    State::get().faults.clear();
}

/// Counts what exists on the devices: bytes allocated, bytes of host memory pinned.
pub fn in_use() -> (u64, u64) {
    let state = State::get();
    (state.allocations.values().map(|(_, len)| len).sum(), state.pins.values().sum())
}

/// The kind.
pub(crate) struct Toy;

impl Kind for Toy {
    fn opened(&self) -> &'static Opened {
        static OPENED: Opened = Opened::new(BTreeMap::new());
        &OPENED
    }

    fn open(&self, ordinal: u32) -> Result<Arc<dyn Backend>> {
        if ordinal >= COUNT {
            let reason = format!("there are {COUNT} toy devices, toy:0 to toy:{}", COUNT - 1);
            let why = Unavailable::new(reason, "choose another device");
            return Err(Error::DeviceUnavailable { device: DeviceId::Toy(ordinal).to_string(), why });
        }
        let (info, process) = (describe(ordinal), process::id());
        Ok(Arc::new(ToyDevice { info, process, lost: Arc::default(), streams: Mutex::default() }))
    }

    /// They are found by their names only: a program does not come upon them by chance.
    fn devices(&self) -> Result<Vec<DeviceInfo>, Unavailable> {
        Ok(Vec::new())
    }

    fn owner_of(&self, address: u64) -> Result<Option<u32>> {
        Ok(State::get().owner_of(address, 1))
    }

    fn dlpack_types(&self) -> &'static [i32] {
        /// `kDLExtDev`.
        const EXTENSION: i32 = 12;
        &[EXTENSION]
    }
}

fn describe(ordinal: u32) -> DeviceInfo {
    DeviceInfo {
        id: DeviceId::Toy(ordinal),
        ordinal,
        name: "toy".into(),
        memory_bytes: MEMORY_BYTES.load(Ordering::Relaxed),
        pci: String::new(),
        uuid: format!("{ordinal:032x}"),
        luid: None,
        numa_node: None,
        architecture: "toy".into(),
        is_integrated: false,
        reads_pageable_memory: false,
        has_memory_pools: false,
        has_gpudirect_rdma: false,
        pins_read_only: false,
        uses_host_page_tables: false,
        has_kernels: false,
    }
}

#[derive(Debug)]
struct ToyDevice {
    info: DeviceInfo,
    /// The process that opened it: a child of fork has none of its threads.
    process: u32,
    /// Whether it does nothing more.
    lost: Arc<AtomicBool>,
    streams: Mutex<Vec<Weak<Progress>>>,
}

impl ToyDevice {
    fn check_process(&self) -> Result<()> {
        if self.process == process::id() { Ok(()) } else { Err(Error::Forked) }
    }

    /// Fails if the device is lost, or has a fault to come here.
    fn check(&self, operation: &'static str, fault: Fault) -> Result<()> {
        self.check_process()?;
        if self.lost.load(Ordering::Acquire) {
            return Err(self.error(operation, "the device is lost", true));
        }
        if State::strikes(fault) { Err(self.refuse(operation, "a test wants it so")) } else { Ok(()) }
    }

    fn refuse(&self, operation: &'static str, reason: &str) -> Error {
        self.error(operation, reason, false)
    }

    fn error(&self, operation: &'static str, reason: &str, ends_work: bool) -> Error {
        let (name, description) = ("an error".into(), reason.into());
        let source = DriverError { function: "toy", code: 1, name, description, ends_work };
        Error::Device { device: self.info.id.to_string(), operation, source }
    }

    fn wait_for_streams(&self) {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner).clone();
        streams.iter().filter_map(Weak::upgrade).for_each(|stream| stream.wait_for(stream.queued()));
    }

    fn check_inside(&self, address: u64, len: u64) -> Result<()> {
        match State::get().owner_of(address, len) {
            Some(device) if device == self.info.ordinal => Ok(()),
            _ => Err(self.refuse("copying", "the bytes are not in the memory of the device")),
        }
    }
}

fn layout(len: u64) -> Option<Layout> {
    Layout::from_size_align(usize::try_from(len.max(1)).ok()?, ALIGNMENT as usize).ok()
}

impl Backend for ToyDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    fn memory(&self) -> Result<(u64, u64)> {
        self.check("asking for its free memory", Fault::AskMemory)?;
        let total = MEMORY_BYTES.load(Ordering::Relaxed);
        Ok((total.saturating_sub(State::get().allocated_on(self.info.ordinal)), total))
    }

    fn allocate(&self, len: u64) -> Result<u64> {
        self.check("allocating memory", Fault::Allocate)?;
        let (mut available, _) = self.memory()?;
        if State::strikes(Fault::Exhaust) {
            available = 0;
        }
        let too_little = Error::OutOfMemory { device: self.info.id.to_string(), needed: len, available };
        let Some(layout) = layout(len).filter(|_| len <= available) else { return Err(too_little) };
        // SAFETY: the layout has a size.
        let memory = unsafe { alloc::alloc(layout) };
        if memory.is_null() {
            return Err(too_little);
        }
        // SAFETY: just allocated, of this size.
        unsafe { memory.write_bytes(POISON, layout.size()) };
        let address = memory.expose_provenance() as u64;
        State::get().allocations.insert(address, (self.info.ordinal, len));
        Ok(address)
    }

    unsafe fn free(&self, address: u64, len: u64) -> Fate {
        if let Err(forked) = self.check_process() {
            return Fate::Failed(forked);
        }
        self.wait_for_streams();
        let was_there = State::get().allocations.remove(&address).is_some();
        if let Some(layout) = layout(len).filter(|_| was_there) {
            // SAFETY: allocated with this layout, and not freed before: it was still noted.
            unsafe { alloc::dealloc(ptr::with_exposed_provenance_mut(address as usize), layout) };
        }
        Fate::Done
    }

    unsafe fn pin(&self, memory: *mut u8, len: usize, _is_read_only: bool) -> Result<()> {
        self.check("pinning host memory", Fault::Pin)?;
        if State::strikes(Fault::PinLimit) {
            let source = io::ErrorKind::OutOfMemory.into();
            return Err(Error::Allocation { bytes: len as u64, kind: "pinned memory", source });
        }
        let (address, len) = (memory.addr() as u64, len as u64);
        let mut state = State::get();
        let below = state.pins.range(..address + len).next_back();
        if below.is_some_and(|(start, bytes)| start + bytes > address) {
            return Err(self.refuse("pinning host memory", "part of it is pinned already"));
        }
        state.pins.insert(address, len);
        Ok(())
    }

    unsafe fn unpin(&self, memory: *mut u8) -> bool {
        if self.check_process().is_ok() {
            State::get().pins.remove(&(memory.addr() as u64));
        }
        true
    }

    fn stream(self: Arc<Self>) -> Result<Arc<dyn Stream>> {
        self.check("making a stream", Fault::MakeStream)?;
        let progress = Arc::new(Progress::default());
        let (sender, receiver) = mpsc::channel::<Vec<Rows>>();
        let (worker, lost) = (progress.clone(), self.lost.clone());
        let work = move || {
            for batch in receiver {
                wait_until_none_holds();
                thread::sleep(Duration::from_micros(DELAY_US.load(Ordering::Relaxed)));
                for rows in &batch {
                    if State::strikes(Fault::Copy) {
                        lost.store(true, Ordering::Release);
                    }
                    if !lost.load(Ordering::Acquire) {
                        // SAFETY: the caller of `queue` keeps both sides until the work is done.
                        unsafe { rows.copy() };
                    }
                }
                worker.end_one();
            }
        };
        let started = thread::Builder::new().name("hoistway-toy".into()).spawn(work);
        let failed = |error: io::Error| self.refuse("making a stream", &error.to_string());
        let thread = started.map_err(failed)?;
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(&progress));
        drop(streams);
        let sender = Mutex::new(Some(sender));
        Ok(Arc::new(ToyStream { device: self, progress, sender, thread: Mutex::new(Some(thread)) }))
    }

    unsafe fn mark(self: Arc<Self>, _stream: usize) -> Result<Box<dyn Event>> {
        Err(self.refuse("making an event", "programs have no streams of toy devices"))
    }

    fn wait_for_all(&self) -> Fate {
        if let Err(forked) = self.check_process() {
            return Fate::Failed(forked);
        }
        if State::strikes(Fault::Doubt) {
            return Fate::Unknown(self.refuse("waiting for its work", "a test wants it so"));
        }
        WAITING.fetch_add(1, Ordering::AcqRel);
        self.wait_for_streams();
        WAITING.fetch_sub(1, Ordering::AcqRel);
        Fate::Done
    }

    unsafe fn is_event_reached(&self, _event: u64) -> Result<bool> {
        Err(self.refuse("asking whether an event is reached", "programs have no events of toy devices"))
    }
}

/// How far a stream is.
#[derive(Debug, Default)]
struct Progress {
    /// Batches queued, and batches done.
    batches: Mutex<(u64, u64)>,
    changed: Condvar,
}

impl Progress {
    fn batches(&self) -> MutexGuard<'_, (u64, u64)> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queued(&self) -> u64 {
        self.batches().0
    }

    fn is_done(&self, batch: u64) -> bool {
        self.batches().1 >= batch
    }

    fn begin_one(&self) {
        self.batches().0 += 1;
        BATCHES_LEFT.fetch_add(1, Ordering::AcqRel);
    }

    fn end_one(&self) {
        self.batches().1 += 1;
        BATCHES_LEFT.fetch_sub(1, Ordering::AcqRel);
        self.changed.notify_all();
    }

    fn wait_for(&self, batch: u64) {
        let mut batches = self.batches();
        while batches.1 < batch {
            batches = self.changed.wait(batches).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A copy of rows between addresses of this process.
#[derive(Clone, Copy, Debug)]
struct Rows {
    from: usize,
    from_pitch: usize,
    to: usize,
    to_pitch: usize,
    width: usize,
    height: usize,
}

impl Rows {
    /// # Safety
    /// Both sides must be allocated, and not used in a way that copies forbid.
    unsafe fn copy(&self) {
        for row in 0..self.height {
            let from = ptr::with_exposed_provenance::<u8>(self.from + row * self.from_pitch);
            let to = ptr::with_exposed_provenance_mut::<u8>(self.to + row * self.to_pitch);
            // SAFETY: passed on; `copy` allows both sides to overlap.
            unsafe { ptr::copy(from, to, self.width) };
        }
    }
}

#[derive(Debug)]
struct ToyStream {
    device: Arc<ToyDevice>,
    progress: Arc<Progress>,
    /// Where the thread takes work from; `None` once the stream is dropped.
    sender: Mutex<Option<mpsc::Sender<Vec<Rows>>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl ToyStream {
    /// As [`ToyDevice::check`]; nothing is in flight after an error.
    fn check(&self, operation: &'static str, fault: Fault) -> Result<()> {
        let checked = self.device.check(operation, fault);
        if checked.as_ref().is_err_and(|error| !matches!(error, Error::Forked)) {
            self.progress.wait_for(self.progress.queued());
        }
        checked
    }

    /// The address of one side of a copy, and whether the host may use its bytes once the copy is queued.
    fn side(&self, place: Address, span: u64) -> Result<(usize, bool)> {
        match place {
            Address::Host(start) => {
                let address = start.expose_provenance();
                Ok((address, !State::get().is_pinned(address as u64, span)))
            }
            Address::Device(address) => {
                self.device.check_inside(address, span)?;
                Ok((address as usize, false))
            }
        }
    }

    /// A step as a copy of rows, and whether it must be waited for.
    fn rows(&self, work: &Work) -> Result<(Rows, bool)> {
        let (from, from_pitch, to, to_pitch, width, height) = match *work {
            Work::Copy { from, to, len } => (from, len, to, len, len, 1),
            Work::CopyRows { from, from_pitch, to, to_pitch, width, height } => {
                (from, from_pitch, to, to_pitch, width, height)
            }
            Work::Run { .. } => return Err(self.device.refuse("starting a kernel", "it has none")),
        };
        let span = |pitch: u64| pitch * height.saturating_sub(1) + width;
        let (from, reads_callers) = self.side(from, span(from_pitch))?;
        let (to, writes_callers) = self.side(to, span(to_pitch))?;
        let [from_pitch, to_pitch, width, height] =
            [from_pitch, to_pitch, width, height].map(|number| number as usize);
        Ok((Rows { from, from_pitch, to, to_pitch, width, height }, reads_callers || writes_callers))
    }
}

impl Stream for ToyStream {
    unsafe fn queue(&self, work: &[Work]) -> Result<()> {
        self.check("copying", Fault::Queue)?;
        let rows: Vec<(Rows, bool)> = work.iter().map(|work| self.rows(work)).collect::<Result<_>>()?;
        let must_wait = rows.iter().any(|(_, must_wait)| *must_wait);
        let sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        // Before the thread can end it.
        self.progress.begin_one();
        let batch = rows.into_iter().map(|(rows, _)| rows).collect();
        let sent = sender.as_ref().is_some_and(|sender| sender.send(batch).is_ok());
        drop(sender);
        if !sent {
            self.progress.end_one();
            return Err(self.device.refuse("copying", "its thread has ended"));
        }
        if must_wait { self.synchronize() } else { Ok(()) }
    }

    unsafe fn wait_for(&self, stream: usize) -> Result<()> {
        match stream {
            0 => Ok(()),
            _ => Err(self.device.refuse("waiting for a stream", "programs have no streams of toy devices")),
        }
    }

    unsafe fn wait_for_event(&self, _event: u64) -> Result<()> {
        Err(self.device.refuse("waiting for an event", "programs have no events of toy devices"))
    }

    fn mark(&self) -> Result<Box<dyn Event>> {
        self.check("making an event", Fault::Mark)?;
        let (progress, batch) = (self.progress.clone(), self.progress.queued());
        Ok(Box::new(ToyEvent { device: self.device.clone(), progress, batch }))
    }

    fn can_be_kept(&self) -> bool {
        true
    }

    fn pending(&self) -> Result<Pending> {
        self.device.check_process()?;
        if self.device.is_lost() {
            return Err(self.device.refuse("asking whether a stream has work", "the device is lost"));
        }
        let is_done = self.progress.is_done(self.progress.queued());
        Ok(if is_done { Pending::Nothing } else { Pending::Work })
    }

    fn synchronize(&self) -> Result<()> {
        let (progress, batch) = (self.progress.clone(), self.progress.queued());
        ToyEvent { device: self.device.clone(), progress, batch }.wait()
    }
}

impl Drop for ToyStream {
    fn drop(&mut self) {
        let take = |thread: &Mutex<Option<JoinHandle<()>>>| {
            thread.lock().unwrap_or_else(PoisonError::into_inner).take()
        };
        // In a child of fork there is no thread.
        if self.device.check_process().is_ok() {
            drop(self.sender.lock().unwrap_or_else(PoisonError::into_inner).take());
            // It ends when its work is done, and does not panic.
            let _ = take(&self.thread).map(JoinHandle::join);
        } else {
            std::mem::forget(take(&self.thread));
        }
    }
}

#[derive(Debug)]
struct ToyEvent {
    device: Arc<ToyDevice>,
    progress: Arc<Progress>,
    batch: u64,
}

impl Event for ToyEvent {
    fn wait(&self) -> Result<()> {
        self.device.check_process()?;
        if State::strikes(Fault::Doubt) {
            return Err(self.device.refuse("waiting for copies", "a test wants it so"));
        }
        self.progress.wait_for(self.batch);
        if State::strikes(Fault::Lose) {
            self.device.lost.store(true, Ordering::Release);
        }
        match self.device.lost.load(Ordering::Acquire) {
            true => Err(self.device.error("waiting for copies", "the device is lost", true)),
            false => Ok(()),
        }
    }

    fn handle(&self) -> u64 {
        0
    }

    fn is_reached(&self) -> Result<bool> {
        self.device.check_process()?;
        if State::strikes(Fault::Doubt) {
            return Err(self.device.refuse("waiting for copies", "a test wants it so"));
        }
        Ok(self.progress.is_done(self.batch))
    }
}
