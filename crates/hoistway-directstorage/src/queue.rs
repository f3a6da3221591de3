//! Reads in flight.
#![allow(unsafe_code)]

use crate::{
    Failure, GraphicsDevice, REQUEST_BYTES, SharedBuffer, SharedFence, StorageFile,
    abi::{
        self, BufferDestination, Destination, ErrorRecord, FactoryTable, KINDS_BUFFER, KINDS_MEMORY,
        MemoryDestination, QUEUE_CAPACITY, QueueTable, Request, Source, StatusArrayTable,
    },
    interface::Reference,
    pieces, runtime,
};
use std::{
    collections::VecDeque,
    fmt, io,
    mem::{self, ManuallyDrop},
    os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle},
    ptr,
    sync::Arc,
    time::{Duration, Instant},
};
use windows_sys::Win32::{
    Foundation::{WAIT_FAILED, WAIT_OBJECT_0},
    System::Threading::{CreateEventW, WaitForMultipleObjects},
};

/// The longest wait before results are looked at again, whatever events tell.
const SLICE: Duration = Duration::from_secs(1);
/// How long reads may take to end whose queue is dropped, at most.
const END_PATIENCE: Duration = Duration::from_secs(10);
/// Entries of a read beside its requests: its result, and the event that tells of it.
const MORE_ENTRIES: usize = 2;
/// Entries of reads in flight, at most: an entry that finds the queue full would wait for another to end. There is room left for the
/// last one.
const MOST_ENTRIES: usize = QUEUE_CAPACITY.1 as usize - 64;

/// Reads that one thread has in flight, of any files, into host memory or buffers of one device.
///
/// What the runtime writes to belongs to the owner of a read, which the queue keeps until the read has ended. A read that ends is told by
/// its own result, which the runtime writes before it sets the event; an event alone tells nothing. With a device, a read has ended once its
/// fence has reached the value of the read, too: the device's own work is over by then.
///
/// No read is cancelled: by its header a cancelled request may still be carried out, and nothing says that its result comes after its
/// last write. A queue that is dropped waits for its reads. If that takes longer than 10 s, or than it has patience, their files and
/// targets are leaked, and so is the queue; owners are abandoned by the function that it was made with.
pub struct Queue<T> {
    queue: ManuallyDrop<Reference<QueueTable>>,
    /// A result for each read, and one more for the end.
    statuses: ManuallyDrop<Reference<StatusArrayTable>>,
    /// Set after each result: by the runtime, or by the fence.
    told: ManuallyDrop<OwnedHandle>,
    /// Of the device that it writes to.
    signals: ManuallyDrop<Option<Signals>>,
    in_flight: Vec<Option<InFlight<T>>>,
    free: Vec<usize>,
    /// Reads for whose requests the queue has no entries left.
    waiting: VecDeque<(T, Read)>,
    /// Reads that ended without a request.
    ended: Vec<Ended<T>>,
    /// Entries that reads in flight take of the queue.
    entries: usize,
    needs_submit: bool,
    patience: Duration,
    /// Gives up the owner of a read that the runtime may still carry out.
    abandon: fn(T),
    /// How long it has waited since a read ended, or was submitted where there was none.
    silent: Duration,
    /// The first failure that the error event told of.
    first_failure: Option<i32>,
    /// Why the ends of reads will not be told.
    broken: Option<Failure>,
}

/// The values of a device's fence that tell of reads.
struct Signals {
    fence: Arc<SharedFence>,
    last: u64,
}

/// Where the bytes of a read go.
#[derive(Clone, Debug)]
pub enum Target {
    /// To host memory.
    Memory(*mut u8),
    /// To a buffer of the queue's device.
    Buffer {
        /// The buffer.
        buffer: Arc<SharedBuffer>,
        /// The first byte.
        offset: u64,
    },
}

/// What a read fills.
#[derive(Debug)]
pub struct Read {
    /// The file.
    pub file: Arc<StorageFile>,
    /// The first byte.
    pub offset: u64,
    /// Where it goes.
    pub target: Target,
    /// How many bytes. What lies past the end of the file is not read.
    pub len: usize,
}

// SAFETY: the memory belongs to the owner of the read, which may be sent.
unsafe impl Send for Target {}

/// A read that has ended.
#[derive(Debug)]
pub struct Ended<T> {
    /// The owner of its memory.
    pub owner: T,
    /// How many bytes came, or why none did. None come from past the end of the file.
    pub result: Result<usize, Failure>,
    /// The value of the queue's fence that other interfaces to the device wait for before they look at the bytes; 0 if it has none.
    pub signal: u64,
}

#[derive(Debug)]
struct InFlight<T> {
    owner: T,
    len: usize,
    entries: usize,
    signal: u64,
    /// Open as long as it is read, and kept as long as it is written.
    uses: (Arc<StorageFile>, Target),
}

impl<T> Queue<T> {
    pub(crate) fn new(
        factory: &Reference<FactoryTable>,
        device: Option<&Arc<GraphicsDevice>>,
        depth: usize,
        patience: Duration,
        abandon: fn(T),
    ) -> Result<Self, Failure> {
        let signals = match device {
            Some(device) => Some(Signals { fence: Arc::new(device.fence()?), last: 0 }),
            None => None,
        };
        let statuses = u32::try_from(depth).ok().and_then(|depth| depth.checked_add(1));
        let too_deep = || Failure::new("CreateQueue", abi::E_DSTORAGE_INVALID_QUEUE_CAPACITY);
        let statuses = runtime::create_statuses(factory, statuses.ok_or_else(too_deep)?)?;
        let queue = runtime::create_queue(factory, device.map(|device| &**device), QUEUE_CAPACITY.1)?;
        let told = event().map_err(|error| {
            Failure::new("CreateQueue", abi::E_FAIL).with(format!("no event can be made: {error}"))
        })?;
        Ok(Self {
            queue: ManuallyDrop::new(queue),
            statuses: ManuallyDrop::new(statuses),
            told: ManuallyDrop::new(told),
            signals: ManuallyDrop::new(signals),
            in_flight: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            waiting: VecDeque::new(),
            ended: Vec::new(),
            entries: 0,
            needs_submit: false,
            patience,
            abandon,
            silent: Duration::ZERO,
            first_failure: None,
            broken: None,
        })
    }

    /// Returns how many reads it takes.
    pub fn depth(&self) -> usize {
        self.in_flight.len()
    }

    /// Returns the fence that tells of reads into buffers of its device, if it has one.
    pub fn fence(&self) -> Option<&Arc<SharedFence>> {
        self.signals.as_ref().map(|signals| &signals.fence)
    }

    /// Returns how many reads were pushed and have not come back.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len() - self.free.len() + self.waiting.len() + self.ended.len()
    }

    /// Adds a read. The next [`wait`](Self::wait) submits all that were added.
    ///
    /// # Safety
    /// Until it has come back, the target of `read` is valid and stays where it is, and nothing else uses it: `owner` sees to that
    /// until it is dropped, also while it is moved, and for ever if it is abandoned. A buffer is one of the queue's device.
    pub unsafe fn push(&mut self, owner: T, read: Read) {
        let refusal = match &read.target {
            _ if self.in_flight() >= self.depth() => Some("more reads were pushed than the queue takes"),
            Target::Buffer { .. } if self.signals.is_none() => Some("the queue has no device"),
            // A range past the end of a buffer is one that the runtime does not check.
            Target::Buffer { buffer, offset } => {
                let fits = offset.checked_add(read.len as u64).is_some_and(|end| end <= buffer.len());
                (!fits).then_some("the read does not fit its buffer")
            }
            Target::Memory(_) => None,
        };
        if let Some(refusal) = refusal {
            let failure = Failure::new("EnqueueRequest", abi::E_FAIL).with(refusal);
            return self.ended.push(Ended { owner, result: Err(failure), signal: 0 });
        }
        if self.in_flight() == 0 {
            self.silent = Duration::ZERO;
        }
        self.waiting.push_back((owner, read));
        self.start_waiting();
    }

    /// Submits what was added, waits for `most` until a read has ended, and appends those that have. Returns at once if none is in
    /// flight.
    ///
    /// # Errors
    /// That the runtime has told the end of none for as long as the queue has patience: what becomes of them is not known, and the queue
    /// is of no use any more.
    pub fn wait(&mut self, ended: &mut Vec<Ended<T>>, most: Duration) -> Result<(), Failure> {
        self.check()?;
        let (started, before) = (Instant::now(), ended.len());
        while self.in_flight() > 0 {
            self.collect(ended);
            self.start_waiting();
            self.check()?;
            ended.append(&mut self.ended);
            self.submit();
            if ended.len() > before {
                self.silent = Duration::ZERO;
                break;
            }
            let patience = self.patience.saturating_sub(self.silent);
            if patience.is_zero() {
                return Err(self.silence(self.silent));
            }
            let rest = most.saturating_sub(started.elapsed());
            if rest.is_zero() {
                break;
            }
            // Only waits count: neither what the caller does meanwhile, nor a machine that sleeps.
            let (slice, waited_from) = (rest.min(patience).min(SLICE), Instant::now());
            self.wait_for_event(slice)?;
            self.silent += waited_from.elapsed().min(slice);
        }
        Ok(())
    }

    /// Fails if the ends of reads will not be told.
    fn check(&self) -> Result<(), Failure> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// Takes what has ended.
    fn collect(&mut self, ended: &mut Vec<Ended<T>>) {
        ended.append(&mut self.ended);
        for slot in 0..self.in_flight.len() {
            let Some(result) = self.in_flight[slot].as_ref().and_then(|own| self.end_of(slot, own.signal))
            else {
                continue;
            };
            if let Some(InFlight { owner, len, entries, signal, .. }) = self.in_flight[slot].take() {
                self.free.push(slot);
                self.entries -= entries;
                ended.push(Ended { owner, result: result.map(|()| len), signal });
            }
        }
    }

    /// What a read has ended with, once it has.
    fn end_of(&self, slot: usize, signal: u64) -> Option<Result<(), Failure>> {
        let has_reached = match &*self.signals {
            Some(signals) => signals.fence.has_reached(signal),
            None => Ok(true),
        };
        match has_reached {
            // Only its result tells that the runtime has let go of its file and its target.
            Err(removal) => self.is_complete(slot).then_some(Err(removal)),
            Ok(has_reached) => (has_reached && self.is_complete(slot)).then(|| self.result(slot)),
        }
    }

    /// Enqueues the reads that the queue has entries for, in their order. The queue is broken once the end of one will not be told.
    fn start_waiting(&mut self) {
        while let Some((_, read)) = self.waiting.front() {
            let len = read.file.len().saturating_sub(read.offset);
            let len = usize::try_from(len).map_or(read.len, |rest| rest.min(read.len));
            let entries = pieces(read.offset, len, REQUEST_BYTES).count() + MORE_ENTRIES;
            let is_full = self.entries > 0 && self.entries + entries > MOST_ENTRIES;
            if is_full {
                break;
            }
            let Some((owner, read)) = self.waiting.pop_front() else { break };
            let slot = if len == 0 { None } else { self.free.pop() };
            let Some(slot) = slot else {
                // A request of no bytes would end the process.
                self.ended.push(Ended { owner, result: Ok(0), signal: 0 });
                continue;
            };
            let signal = self.enqueue(slot, &read, len);
            self.entries += entries;
            self.in_flight[slot] =
                Some(InFlight { owner, len, entries, signal, uses: (read.file, read.target) });
            if let Some(Signals { fence, .. }) = &*self.signals {
                // SAFETY: the event is open until the last value is reached: see `drop`.
                let told = unsafe { fence.set_event(signal, self.told.as_raw_handle()) };
                if let Err(failure) = told {
                    self.broken = Some(failure);
                    return;
                }
            }
        }
    }

    /// Enqueues a read, and returns the value of the fence that tells of it.
    fn enqueue(&mut self, slot: usize, read: &Read, len: usize) -> u64 {
        let (table, queue) = (self.queue.table(), self.queue.object());
        for (offset, position, bytes) in pieces(read.offset, len, REQUEST_BYTES) {
            let mut destination = Destination { words: [0; 5] };
            let kinds = match &read.target {
                Target::Memory(memory) => {
                    let memory = memory.wrapping_add(position).cast();
                    destination.memory = MemoryDestination { memory, bytes };
                    KINDS_MEMORY
                }
                Target::Buffer { buffer, offset } => {
                    let (resource, offset) = (buffer.object(), offset + position as u64);
                    destination.buffer = BufferDestination { resource, offset, bytes };
                    KINDS_BUFFER
                }
            };
            let request = Request {
                compression: 0,
                kinds,
                source: Source { file: read.file.reference().object(), offset, bytes },
                destination,
                uncompressed_bytes: bytes,
                cancellation_tag: 0,
                name: ptr::null(),
            };
            // SAFETY: the queue copies the request. Its file and memory are kept by `in_flight` until its result is there.
            unsafe { (table.enqueue_request)(queue, &raw const request) };
        }
        // The result first: what is enqueued after the event or the signal is not there when that is told.
        // SAFETY: all objects and the event live until the last entry is done: see `drop`.
        unsafe {
            (table.enqueue_status)(queue, self.statuses.object(), slot as u32);
            match &mut *self.signals {
                None => (table.enqueue_set_event)(queue, self.told.as_raw_handle()),
                Some(signals) => {
                    signals.last += 1;
                    (table.enqueue_signal)(queue, signals.fence.object(), signals.last);
                }
            }
        }
        self.needs_submit = true;
        self.signals.as_ref().map_or(0, |signals| signals.last)
    }

    fn submit(&mut self) {
        if mem::take(&mut self.needs_submit) {
            // SAFETY: the queue lives.
            unsafe { (self.queue.table().submit)(self.queue.object()) };
        }
    }

    fn is_complete(&self, slot: usize) -> bool {
        // SAFETY: the array has a result for each slot, and one more.
        unsafe { (self.statuses.table().is_complete)(self.statuses.object(), slot as u32) != 0 }
    }

    fn result(&self, slot: usize) -> Result<(), Failure> {
        // SAFETY: as above.
        let result = unsafe { (self.statuses.table().result)(self.statuses.object(), slot as u32) };
        Failure::check("read", result)
    }

    /// Waits until an event is set, or the time is over.
    fn wait_for_event(&mut self, time: Duration) -> Result<(), Failure> {
        // SAFETY: the queue lives, and owns the event.
        let failed = unsafe { (self.queue.table().error_event)(self.queue.object()) };
        let handles = [self.told.as_raw_handle(), failed];
        let count = if failed.is_null() { 1 } else { 2 };
        let time = u32::try_from(time.as_millis()).unwrap_or(u32::MAX - 1).max(1);
        // SAFETY: the handles are open.
        match unsafe { WaitForMultipleObjects(count, handles.as_ptr(), 0, time) } {
            WAIT_FAILED => {
                let error = io::Error::last_os_error();
                Err(Failure::new("event", abi::E_FAIL).with(error.to_string()))
            }
            set if set == WAIT_OBJECT_0 + 1 => {
                let mut record = ErrorRecord::default();
                // SAFETY: the structure is that of the header.
                unsafe { (self.queue.table().error_record)(self.queue.object(), &raw mut record) };
                self.first_failure.get_or_insert(record.first);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The failure of a queue that tells nothing.
    fn silence(&self, waited: Duration) -> Failure {
        let first =
            self.first_failure.map(|code| format!("; {}", Failure::new("first request that failed", code)));
        Failure::new("read", abi::E_PENDING).with(format!(
            "it has told the end of none of {} reads for {:.1} s{}",
            self.in_flight(),
            waited.as_secs_f64(),
            first.unwrap_or_default()
        ))
    }

    /// Waits for the end of every entry. `false` if that does not come.
    fn finish(&mut self) -> bool {
        let last = self.in_flight.len();
        let (table, queue) = (self.queue.table(), self.queue.object());
        // SAFETY: as in `enqueue`. This result comes after all events.
        unsafe {
            (table.enqueue_status)(queue, self.statuses.object(), last as u32);
            (table.submit)(queue);
        }
        let started = Instant::now();
        let mut pause = Duration::from_micros(20);
        while !self.is_over(last) {
            if started.elapsed() >= END_PATIENCE.min(self.patience) {
                return false;
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(Duration::from_millis(5));
        }
        true
    }
}

impl<T> Queue<T> {
    /// Whether every entry is done, of which the last has this result.
    fn is_over(&self, last: usize) -> bool {
        let has_reached = match &*self.signals {
            Some(Signals { fence, last }) => fence.has_reached(*last).unwrap_or(true),
            None => true,
        };
        has_reached && self.is_complete(last)
    }
}

impl<T> Drop for Queue<T> {
    fn drop(&mut self) {
        if self.finish() {
            // SAFETY: every entry is done, so that nothing uses them; they are not used after this.
            unsafe {
                (self.queue.table().close)(self.queue.object());
                ManuallyDrop::drop(&mut self.queue);
                ManuallyDrop::drop(&mut self.statuses);
                ManuallyDrop::drop(&mut self.told);
                ManuallyDrop::drop(&mut self.signals);
            }
        } else {
            // The runtime may still write to their memory: none is freed, even if one of the calls panics. The rest is leaked by not
            // being dropped.
            let mut lost = ManuallyDrop::new(mem::take(&mut self.in_flight).into_iter());
            for InFlight { owner, uses, .. } in lost.by_ref().flatten() {
                mem::forget(uses);
                (self.abandon)(owner);
            }
        }
    }
}

impl<T> fmt::Debug for Queue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

/// An event that a wait takes back.
fn event() -> io::Result<OwnedHandle> {
    // SAFETY: no attributes and no name; it is reset by a wait, and not set.
    let event = unsafe { CreateEventW(ptr::null(), 0, 0, ptr::null()) };
    if event.is_null() {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new handle, which has no other owner.
    Ok(unsafe { OwnedHandle::from_raw_handle(event) })
}
