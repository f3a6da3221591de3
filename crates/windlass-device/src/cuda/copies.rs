//! A queue of copies to one device, and what tells when they are done.
#![allow(unsafe_code)]

use super::{
    Device,
    driver::{self, Copy2d, Handle},
    kernels::{Kernel, Segment},
    memory::Allocation,
};
use crate::{Error, Result, Transfer};
use std::{ffi::c_void, ptr, sync::Arc};

/// Pieces of this length are not short.
const LONG_PIECE_BYTES: u64 = 64 << 10;

/// A stream of a device, in no order with other streams.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    handle: Handle,
}

// SAFETY: a stream may be used from any thread, by several at once.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    fn new(device: &Arc<Device>) -> Result<Self> {
        let _entered = device.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle; the context is current.
        let code =
            unsafe { (device.driver.functions.stream_create)(&mut handle, driver::STREAM_NON_BLOCKING) };
        device.check("making a stream", "cuStreamCreate", code)?;
        Ok(Self { device: device.clone(), handle })
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: made by `new`, destroyed once. What is still queued on it goes on, and holds what it needs
            // by its `Ticket`.
            unsafe { (self.device.driver.functions.stream_destroy)(self.handle) };
        }
    }
}

/// Tells when the work that was queued before it is done.
#[derive(Debug)]
pub struct Ticket {
    device: Arc<Device>,
    event: Handle,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for Ticket {}

impl Ticket {
    /// Waits until the work is done.
    ///
    /// # Errors
    /// [`Error::Device`]; unless it ends the context, the work may still be under way.
    pub fn wait(&self) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: the event was recorded by `CopyQueue::ticket`.
        let code = unsafe { (self.device.driver.functions.event_synchronize)(self.event) };
        self.device.check("copying to it", "cuEventSynchronize", code)
    }

    /// Whether the work is done, or failed.
    pub fn is_over(&self) -> bool {
        let Ok(_entered) = self.device.enter() else { return true };
        // SAFETY: the event was recorded by `CopyQueue::ticket`.
        let code = unsafe { (self.device.driver.functions.event_query)(self.event) };
        code != driver::NOT_READY
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: made by `CopyQueue::ticket`, destroyed once; the driver keeps what waits for it.
            unsafe { (self.device.driver.functions.event_destroy)(self.event) };
        }
    }
}

/// Where the bytes of a slot are.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// Pinned host memory.
    Host(*const u8),
    /// The device's own memory.
    Device(u64),
}

/// Copies to one device, done in the order in which they were queued.
#[derive(Debug)]
pub struct CopyQueue {
    stream: Arc<Stream>,
    device: Arc<Device>,
}

impl CopyQueue {
    /// More short pieces than this of one slot go by a kernel: a copy takes microseconds, however short.
    pub const MAX_COPIES: usize = 16;

    /// A queue of this device.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        Ok(Self { stream: Arc::new(Stream::new(device)?), device: device.clone() })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn stream_handle(&self) -> Handle {
        self.stream.handle
    }

    /// Memory for tensors: other devices, processes and network cards can be given it, which they cannot memory of a
    /// stream-ordered pool.
    pub fn allocate(&self, len: u64) -> Result<Allocation> {
        Allocation::plain(&self.device, len)
    }

    /// Memory for the work of this queue alone.
    pub fn allocate_scratch(&self, len: u64) -> Result<Allocation> {
        Allocation::ordered(&self.device, len, &self.stream)
    }

    /// Makes later copies wait for what others have queued on `stream` so far: a handle of the same device, 0 for the
    /// default stream.
    ///
    /// # Safety
    /// `stream` must be a live stream of the device.
    pub unsafe fn wait_for(&self, stream: usize) -> Result<()> {
        let _entered = self.device.enter()?;
        let stream = ptr::with_exposed_provenance_mut::<c_void>(stream);
        let ticket = self.ticket(stream)?;
        // SAFETY: both are live and of this device; the wait refers to the record that `ticket` just made.
        let code =
            unsafe { (self.device.driver.functions.stream_wait_event)(self.stream.handle, ticket.event, 0) };
        self.device.check("waiting for a stream", "cuStreamWaitEvent", code)
    }

    /// Queues the transfers of one slot. `addresses` are those of the arenas; `scratch` is needed where
    /// [`CopyQueue::may_need_kernels`] says so. Returns how many copies and kernels that made.
    ///
    /// # Errors
    /// [`Error::Device`]; then some of it may have been queued.
    ///
    /// # Safety
    /// Until the work that this queues is done, which a later [`CopyQueue::mark`] tells, or [`CopyQueue::synchronize`]:
    /// the slot's bytes must stay as they are; slot, scratch and arenas must stay allocated; and nobody else may use
    /// the scratch and the places of the transfers. The transfers must lie inside slot and arenas.
    pub unsafe fn transfer(
        &self,
        slot: Source,
        transfers: &[Transfer],
        addresses: &[u64],
        scratch: Option<Scratch<'_>>,
    ) -> Result<u64> {
        let _entered = self.device.enter()?;
        let by_kernel = Self::has_many_short(transfers);
        let mut segments: Vec<(Kernel, Segment)> = Vec::new();
        let mut operations = 0;
        for transfer in transfers {
            match *transfer {
                Transfer::Linear { source, arena, destination, len } => {
                    let destination = addresses[arena] + destination;
                    if by_kernel && len < LONG_PIECE_BYTES {
                        segments.push((Kernel::Copy, Segment { source, destination, count: len }));
                    } else {
                        // SAFETY: passed on.
                        unsafe { self.copy(slot, source, destination, len)? };
                        operations += 1;
                    }
                }
                Transfer::Pitched { source, pitch, arena, destination, width, height } => {
                    let destination = addresses[arena] + destination;
                    // SAFETY: passed on.
                    unsafe { self.copy_rows(slot, source, pitch, destination, width, height)? };
                    operations += 1;
                }
                Transfer::Converted { conversion, source, arena, destination, elements } => {
                    let destination = addresses[arena] + destination;
                    segments.push((
                        Kernel::Convert(conversion),
                        Segment { source, destination, count: elements },
                    ));
                }
            }
        }
        if segments.is_empty() {
            return Ok(operations);
        }
        let Some(scratch) = scratch else {
            return Err(Error::Internal("a plan with conversions has no scratch memory".into()));
        };
        // SAFETY: passed on.
        Ok(operations + unsafe { self.run_kernels(slot, &mut segments, scratch)? })
    }

    /// Whether [`CopyQueue::transfer`] would need scratch memory for these.
    pub fn may_need_kernels(transfers: &[Transfer]) -> bool {
        transfers.iter().any(|transfer| matches!(transfer, Transfer::Converted { .. }))
            || Self::has_many_short(transfers)
    }

    fn has_many_short(transfers: &[Transfer]) -> bool {
        let is_short = |transfer: &&Transfer| matches!(transfer, Transfer::Linear { len, .. } if *len < LONG_PIECE_BYTES);
        transfers.iter().filter(is_short).count() > Self::MAX_COPIES
    }

    /// A ticket for everything queued so far.
    pub fn mark(&self) -> Result<Ticket> {
        let _entered = self.device.enter()?;
        self.ticket(self.stream.handle)
    }

    /// Copies `len` bytes of the device to the host, and waits for them.
    pub fn read_back(&self, address: u64, into: &mut [u8]) -> Result<()> {
        let _entered = self.device.enter()?;
        let functions = &self.device.driver.functions;
        // SAFETY: `into` is writable, and outlives the copy, which is waited for, also if the wait fails: the driver
        // makes copies to memory that is not pinned itself, before the call returns.
        let code = unsafe {
            (functions.copy_to_host)(into.as_mut_ptr().cast(), address, into.len(), self.stream.handle)
        };
        self.device.check("copying from it", "cuMemcpyDtoHAsync", code)?;
        self.synchronize()
    }

    /// Waits for everything queued so far.
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: a live stream of the current context.
        let code = unsafe { (self.device.driver.functions.stream_synchronize)(self.stream.handle) };
        self.device.check("copying to it", "cuStreamSynchronize", code)
    }

    fn ticket(&self, stream: Handle) -> Result<Ticket> {
        let functions = &self.device.driver.functions;
        let mut event = ptr::null_mut();
        // SAFETY: writes one handle; the caller has made the context current.
        let code = unsafe { (functions.event_create)(&mut event, driver::EVENT_QUIET) };
        self.device.check("making an event", "cuEventCreate", code)?;
        let ticket = Ticket { device: self.device.clone(), event };
        // SAFETY: both are live and of this device.
        let code = unsafe { (functions.event_record)(event, stream) };
        self.device.check("recording an event", "cuEventRecord", code)?;
        Ok(ticket)
    }

    /// # Safety
    /// As for [`CopyQueue::transfer`].
    unsafe fn copy(&self, slot: Source, offset: u64, destination: u64, len: u64) -> Result<()> {
        let functions = &self.device.driver.functions;
        let (stream, len) = (self.stream.handle, len as usize);
        let (function, code) = match slot {
            Source::Host(start) => {
                // SAFETY: the caller promises that the bytes lie inside slot and arena, and stay.
                let code = unsafe {
                    let source = start.add(offset as usize).cast();
                    (functions.copy_to_device)(destination, source, len, stream)
                };
                ("cuMemcpyHtoDAsync", code)
            }
            Source::Device(start) => {
                // SAFETY: as above.
                let code = unsafe { (functions.copy_on_device)(destination, start + offset, len, stream) };
                ("cuMemcpyDtoDAsync", code)
            }
        };
        self.device.check("copying to it", function, code)
    }

    /// # Safety
    /// As for [`CopyQueue::transfer`].
    unsafe fn copy_rows(
        &self,
        slot: Source,
        offset: u64,
        pitch: u64,
        destination: u64,
        width: u64,
        height: u64,
    ) -> Result<()> {
        let (source_type, source_host, source_device) = match slot {
            Source::Host(start) => (driver::MEMORY_HOST, start.wrapping_add(offset as usize).cast(), 0),
            Source::Device(start) => (driver::MEMORY_DEVICE, ptr::null(), start + offset),
        };
        let copy = Copy2d {
            source_x: 0,
            source_y: 0,
            source_type,
            source_host,
            source_device,
            source_array: ptr::null_mut(),
            source_pitch: pitch as usize,
            destination_x: 0,
            destination_y: 0,
            destination_type: driver::MEMORY_DEVICE,
            destination_host: ptr::null_mut(),
            destination_device: destination,
            destination_array: ptr::null_mut(),
            destination_pitch: width as usize,
            width: width as usize,
            height: height as usize,
        };
        // SAFETY: the driver copies the description; the caller promises that the rows lie inside slot and arena.
        let code = unsafe { (self.device.driver.functions.copy_2d)(&copy, self.stream.handle) };
        self.device.check("copying rows to it", "cuMemcpy2DAsync", code)
    }

    /// # Safety
    /// As for [`CopyQueue::transfer`].
    unsafe fn run_kernels(
        &self,
        slot: Source,
        segments: &mut [(Kernel, Segment)],
        scratch: Scratch<'_>,
    ) -> Result<u64> {
        segments.sort_by_key(|(_, segment)| segment.source);
        let (data, mut operations) = match slot {
            Source::Device(start) => (start, 0),
            // SAFETY: passed on.
            Source::Host(_) => (scratch.data, unsafe { self.copy_clusters(slot, segments, scratch.data)? }),
        };
        // Segments of one launch share its number of blocks, so long and short ones go apart.
        let group = |(kernel, segment): &(Kernel, Segment)| (*kernel, segment.count >= LONG_PIECE_BYTES);
        segments.sort_by_key(|entry| (group(entry), entry.1.source));
        let bytes = segments.len() * size_of::<Segment>();
        let Some(table) = scratch.host_table.get_mut(..bytes) else {
            return Err(Error::Internal(format!("{} segments do not fit their table", segments.len())));
        };
        for (row, (_, segment)) in table.chunks_exact_mut(size_of::<Segment>()).zip(segments.iter()) {
            for (place, number) in
                row.chunks_exact_mut(8).zip([data + segment.source, segment.destination, segment.count])
            {
                place.copy_from_slice(&number.to_ne_bytes());
            }
        }
        // SAFETY: pinned, and kept by the caller until the work is done, as is the room at `table`.
        let code = unsafe {
            (self.device.driver.functions.copy_to_device)(
                scratch.table,
                table.as_ptr().cast(),
                table.len(),
                self.stream.handle,
            )
        };
        self.device.check("copying to it", "cuMemcpyHtoDAsync", code)?;
        operations += 1;
        let kernels = self.device.kernels()?;
        let mut first = 0;
        for launch in segments.chunk_by(|a, b| group(a) == group(b)) {
            let (kernel, address) = (launch[0].0, scratch.table + (first * size_of::<Segment>()) as u64);
            let longest = launch.iter().map(|(_, segment)| segment.count).max().unwrap_or(0);
            // SAFETY: the table's addresses are those that the caller promises to keep.
            unsafe { kernels.launch(&self.device, &self.stream, kernel, address, launch.len(), longest)? };
            first += launch.len();
            operations += 1;
        }
        Ok(operations)
    }

    /// Copies what segments need to the same places of the scratch, and little else: in one piece where they lie near
    /// each other. They ascend.
    ///
    /// # Safety
    /// As for [`CopyQueue::transfer`].
    unsafe fn copy_clusters(
        &self,
        slot: Source,
        segments: &[(Kernel, Segment)],
        scratch: u64,
    ) -> Result<u64> {
        let mut copies = 0;
        let mut cluster: Option<(u64, u64)> = None;
        let ranges = segments
            .iter()
            .map(|(kernel, segment)| (segment.source, segment.source + kernel.source_len(segment)));
        for (start, end) in ranges {
            match &mut cluster {
                Some((_, last)) if start <= *last + LONG_PIECE_BYTES => *last = end.max(*last),
                _ => {
                    if let Some((start, end)) = cluster.replace((start, end)) {
                        // SAFETY: passed on.
                        unsafe { self.copy(slot, start, scratch + start, end - start)? };
                        copies += 1;
                    }
                }
            }
        }
        if let Some((start, end)) = cluster {
            // SAFETY: passed on.
            unsafe { self.copy(slot, start, scratch + start, end - start)? };
            copies += 1;
        }
        Ok(copies)
    }
}

/// Memory beside a slot, for what kernels need.
#[derive(Debug)]
pub struct Scratch<'a> {
    /// On the device, as long as the slot; not used if the slot itself is on the device.
    pub data: u64,
    /// On the device, for the table of segments.
    pub table: u64,
    /// Pinned, for the same table.
    pub host_table: &'a mut [u8],
}

/// Bytes that the table of so many transfers takes.
pub fn table_bytes(transfers: usize) -> u64 {
    (transfers * size_of::<Segment>()) as u64
}
