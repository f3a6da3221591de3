//! Queues: a thread each carries out what was submitted, in order.
#![allow(unsafe_code)]

use crate::{
    control::{self, state, violation},
    factory::STAGING_BYTES,
    file::{self, File, Opened},
    object::{Kind, kind, unknown},
    status::{Results, Statuses},
};
use hoistway_directstorage::{
    abi::{
        ABORTED, DXGI_ERROR_DEVICE_REMOVED, E_DSTORAGE_END_OF_FILE, E_DSTORAGE_REQUEST_TOO_LARGE,
        E_DSTORAGE_RESERVED_FIELDS, E_PENDING, ErrorRecord, Guid, HResult, Handle, IID_QUEUE, IID_QUEUE_1,
        KINDS_BUFFER, KINDS_MEMORY, Object, QueueTable, Request,
    },
    graphics_abi::FenceTable,
};
use std::{
    ffi::{c_int, c_void},
    mem,
    os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle},
    ptr, slice,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};
use windows_sys::{
    Win32::System::{
        LibraryLoader::{GetModuleHandleW, GetProcAddress},
        Threading::{CreateEventW, ResetEvent, SetEvent},
    },
    w,
};

enum Entry {
    Request(Read),
    Status(Results, usize),
    Event(usize),
    Signal(usize, u64),
}

struct Read {
    file: Opened,
    offset: u64,
    target: Target,
    bytes: u32,
    tag: u64,
    /// Why it is refused, if it is.
    refusal: HResult,
    number: u64,
}

#[derive(Clone, Copy)]
enum Target {
    Memory(usize),
    /// A buffer of D3D12, and an offset in it.
    Buffer(usize, u64),
}

/// What a queue and its thread share.
struct Shared {
    failed: OwnedHandle,
    record: Mutex<(u32, HResult)>,
    /// Requests up to this number that have such a tag are cancelled: number, mask, value.
    cancelled: Mutex<Vec<(u64, u64, u64)>>,
    is_closed: AtomicBool,
    /// Entries that are not done.
    entries: AtomicU64,
}

pub(crate) struct Queue {
    shared: Arc<Shared>,
    pending: Mutex<Vec<Entry>>,
    submitted: mpsc::Sender<Vec<Entry>>,
    enqueued: AtomicU64,
    capacity: u16,
    has_device: bool,
}

impl Kind for Queue {
    type Table = QueueTable;
    const TABLE: &'static QueueTable = &QueueTable {
        unknown: unknown::<Self>(),
        enqueue_request,
        enqueue_status,
        enqueue_signal,
        submit,
        cancel,
        close,
        error_event,
        error_record,
        query,
        enqueue_set_event,
    };
    const IDS: &'static [Guid] = &[IID_QUEUE, IID_QUEUE_1];
}

impl Queue {
    pub(crate) fn new(capacity: u16, has_device: bool) -> Option<Self> {
        // SAFETY: no attributes and no name; it is reset by hand, and not set.
        let failed = unsafe { CreateEventW(ptr::null(), 1, 0, ptr::null()) };
        if failed.is_null() {
            return None;
        }
        // SAFETY: a new handle, which has no other owner.
        let failed = unsafe { OwnedHandle::from_raw_handle(failed) };
        let shared = Arc::new(Shared {
            failed,
            record: Mutex::default(),
            cancelled: Mutex::default(),
            is_closed: AtomicBool::new(false),
            entries: AtomicU64::new(0),
        });
        let (submitted, taken) = mpsc::channel();
        let of_thread = shared.clone();
        thread::spawn(move || of_thread.run(taken));
        state().count("queues");
        let enqueued = AtomicU64::new(0);
        Some(Self { shared, pending: Mutex::default(), submitted, enqueued, capacity, has_device })
    }

    fn enqueue(&self, entry: Entry) {
        if self.shared.entries.fetch_add(1, Ordering::AcqRel) >= self.capacity.into() {
            state().count("blocked");
        }
        let mut pending = lock(&self.pending);
        pending.push(entry);
        if pending.len() >= usize::from(self.capacity / 2) {
            self.submit(pending);
        }
    }

    fn submit(&self, mut pending: MutexGuard<'_, Vec<Entry>>) {
        let entries = mem::take(&mut *pending);
        let mut state = state();
        state.count("submits");
        entries
            .iter()
            .filter(|entry| matches!(entry, Entry::Request(_)))
            .for_each(|_| _ = state.count("pending"));
        let is_early = state.get("early") != 0;
        drop(state);
        if is_early {
            for entry in &entries {
                match entry {
                    Entry::Event(event) => set(*event),
                    Entry::Signal(fence, value) => signal(*fence, *value),
                    Entry::Request(_) | Entry::Status(..) => {}
                }
            }
        }
        let _ = self.submitted.send(entries);
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.shared.is_closed.store(true, Ordering::Release);
        control::wake();
        state().discount("queues");
    }
}

impl Shared {
    fn run(&self, taken: mpsc::Receiver<Vec<Entry>>) {
        for entries in taken {
            let is_reversed = state().get("reverse") != 0;
            let mut results: Vec<Option<HResult>> = entries.iter().map(|_| None).collect();
            if is_reversed {
                for (position, entry) in entries.iter().enumerate().rev() {
                    if let Entry::Request(read) = entry {
                        results[position] = Some(self.carry_out(read));
                    }
                }
            }
            // The first failure since the last result.
            let mut failure = 0;
            for (entry, result) in entries.iter().zip(results) {
                match entry {
                    Entry::Request(read) => {
                        let result = result.unwrap_or_else(|| self.carry_out(read));
                        failure = if failure == 0 { result } else { failure };
                    }
                    Entry::Status(results, index) => {
                        results[*index].store(mem::take(&mut failure), Ordering::Release);
                    }
                    Entry::Event(event) => set(*event),
                    Entry::Signal(fence, value) => signal(*fence, *value),
                }
                self.entries.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    fn carry_out(&self, read: &Read) -> HResult {
        let result = self.result_of(read);
        if result != 0 {
            let mut record = lock(&self.record);
            if record.0 == 0 {
                record.1 = result;
            }
            record.0 += 1;
            // SAFETY: the handle is open.
            unsafe { SetEvent(self.failed.as_raw_handle()) };
        }
        state().discount("pending");
        result
    }

    fn result_of(&self, read: &Read) -> HResult {
        let mut state = state();
        let number = state.count("requests");
        while state.get("stall_at") != 0
            && number >= state.get("stall_at")
            && (state.get("deaf") != 0 || !self.is_closed.load(Ordering::Acquire) && !self.is_cancelled(read))
        {
            state = control::wait(state);
        }
        let delay = Duration::from_millis(state.get("delay_ms"));
        let fail_at = state.get("fail_at");
        let code = (state.get("code") as u32).cast_signed();
        let fail_len = state.get("fail_len");
        let is_removed = state.get("remove_at") != 0 && number >= state.get("remove_at");
        let is_spoiled = state.get("spoil") != 0;
        drop(state);
        thread::sleep(delay);
        if self.is_closed.load(Ordering::Acquire) || self.is_cancelled(read) {
            return ABORTED;
        }
        let mut buffered = Vec::new();
        let memory = match read.target {
            // SAFETY: its owner keeps the memory until the result is told.
            Target::Memory(memory) => unsafe {
                slice::from_raw_parts_mut(memory as *mut u8, read.bytes as usize)
            },
            Target::Buffer(..) => {
                buffered.resize(read.bytes as usize, 0);
                &mut buffered[..]
            }
        };
        let is_struck = number == fail_at || fail_len != 0 && file::len(&read.file) == Some(fail_len);
        let failure = match () {
            () if read.refusal != 0 => read.refusal,
            () if is_removed => DXGI_ERROR_DEVICE_REMOVED,
            () if is_struck && code != 0 => code,
            () if is_struck => E_DSTORAGE_END_OF_FILE,
            () => 0,
        };
        let failure = if failure == 0 { file::read(&read.file, read.offset, memory) } else { failure };
        if failure != 0 && is_spoiled {
            memory.fill(0xDD);
        }
        if let Target::Buffer(buffer, offset) = read.target
            && (failure == 0 || is_spoiled)
        {
            write(buffer, offset, memory);
        }
        failure
    }

    fn is_cancelled(&self, read: &Read) -> bool {
        let cancelled = lock(&self.cancelled);
        cancelled.iter().any(|&(until, mask, value)| read.number <= until && read.tag & mask == value)
    }
}

/// Writes to a buffer of D3D12.
fn write(buffer: usize, offset: u64, bytes: &[u8]) {
    type Write = unsafe extern "C" fn(Object, u64, *const u8, usize) -> c_int;
    // SAFETY: texts that end with a zero; the function has this signature, and the buffer lives until the result is told.
    let code = unsafe {
        let function =
            GetProcAddress(GetModuleHandleW(w!("fake_graphics.dll")), c"fake_d3d12_write".as_ptr().cast());
        function.map(|function| {
            let write: Write = mem::transmute(function);
            write(buffer as Object, offset, bytes.as_ptr(), bytes.len())
        })
    };
    if code != Some(0) {
        violation();
    }
}

/// Has a fence of D3D12 reach a value.
fn signal(fence: usize, value: u64) {
    // SAFETY: its owner keeps it until the entry is done.
    unsafe {
        let table = &**(fence as *const *const FenceTable);
        (table.signal)(fence as Object, value);
    }
}

fn set(event: usize) {
    // SAFETY: its owner keeps it until the entry is done.
    if unsafe { SetEvent(event as Handle) } == 0 {
        violation();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

unsafe extern "system" fn enqueue_request(object: Object, request: *const Request) {
    // SAFETY: callers give living objects and a valid pointer.
    let (queue, request) = unsafe { (kind::<Queue>(object), &*request) };
    let (source, destination) = (&request.source, &request.destination);
    // What ends the process of who asks the real one for it.
    // SAFETY: as its kind says, and all kinds are plain numbers.
    let (target, destination_bytes) = unsafe {
        let (memory, buffer) = (destination.memory, destination.buffer);
        match request.kinds {
            KINDS_BUFFER => (Target::Buffer(buffer.resource as usize, buffer.offset), buffer.bytes),
            _ => (Target::Memory(memory.memory as usize), memory.bytes),
        }
    };
    if matches!(target, Target::Buffer(..)) && !queue.has_device {
        return violation();
    }
    let lengths = [source.bytes, destination_bytes, request.uncompressed_bytes];
    if source.bytes == 0 || lengths.iter().any(|&len| len != source.bytes) || source.file.is_null() {
        return violation();
    }
    let refusal = match () {
        () if !matches!(request.kinds, KINDS_MEMORY | KINDS_BUFFER) || request.compression != 0 => {
            E_DSTORAGE_RESERVED_FIELDS
        }
        // Such a request is refused, and nothing is written to its memory.
        () if source.bytes > STAGING_BYTES.load(Ordering::Acquire) => E_DSTORAGE_REQUEST_TOO_LARGE,
        () => 0,
    };
    // SAFETY: callers give a living file.
    let file = unsafe { kind::<File>(source.file) }.opened().clone();
    state().count("enqueued");
    let number = queue.enqueued.fetch_add(1, Ordering::Relaxed) + 1;
    queue.enqueue(Entry::Request(Read {
        file,
        offset: source.offset,
        target,
        bytes: source.bytes,
        tag: request.cancellation_tag,
        refusal,
        number,
    }));
}

unsafe extern "system" fn enqueue_status(object: Object, statuses: Object, index: u32) {
    // SAFETY: callers give living objects.
    let (queue, statuses) = unsafe { (kind::<Queue>(object), kind::<Statuses>(statuses)) };
    let results = statuses.results().clone();
    if results[index as usize].swap(E_PENDING, Ordering::AcqRel) == E_PENDING {
        // A result may be enqueued again once it is there.
        violation();
    }
    queue.enqueue(Entry::Status(results, index as usize));
}

unsafe extern "system" fn enqueue_signal(object: Object, fence: Object, value: u64) {
    // SAFETY: callers give a living object.
    let queue = unsafe { kind::<Queue>(object) };
    if !queue.has_device || fence.is_null() {
        return violation();
    }
    queue.enqueue(Entry::Signal(fence as usize, value));
}

unsafe extern "system" fn submit(object: Object) {
    // SAFETY: callers give a living object.
    let queue = unsafe { kind::<Queue>(object) };
    queue.submit(lock(&queue.pending));
}

unsafe extern "system" fn cancel(object: Object, mask: u64, value: u64) {
    // SAFETY: callers give a living object.
    let queue = unsafe { kind::<Queue>(object) };
    lock(&queue.shared.cancelled).push((queue.enqueued.load(Ordering::Relaxed), mask, value));
    control::wake();
}

unsafe extern "system" fn close(object: Object) {
    // SAFETY: callers give a living object.
    let queue = unsafe { kind::<Queue>(object) };
    queue.shared.is_closed.store(true, Ordering::Release);
    control::wake();
}

unsafe extern "system" fn error_event(object: Object) -> Handle {
    // SAFETY: callers give a living object.
    unsafe { kind::<Queue>(object) }.shared.failed.as_raw_handle()
}

unsafe extern "system" fn error_record(object: Object, out: *mut ErrorRecord) {
    // SAFETY: callers give a living object and a valid pointer.
    unsafe {
        let shared = &kind::<Queue>(object).shared;
        let (count, first) = mem::take(&mut *lock(&shared.record));
        let mut record = ErrorRecord::default();
        (record.count, record.first) = (count, first);
        out.write(record);
        ResetEvent(shared.failed.as_raw_handle());
    }
}

unsafe extern "system" fn query(_: Object, _: *mut c_void) {
    violation();
}

unsafe extern "system" fn enqueue_set_event(object: Object, event: Handle) {
    // SAFETY: callers give a living object.
    unsafe { kind::<Queue>(object) }.enqueue(Entry::Event(event as usize));
}
