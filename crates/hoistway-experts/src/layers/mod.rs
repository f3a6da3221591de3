//! Layers of dense models larger than memory: they stream in, in the order of use, while others compute.
//!
//! [`LayerStream`] goes through the layers again and again. As many as the budget holds stay resident, spread over the pass
//! so that reading never stops; the next ones are prefetched while one computes. `plan` decides which stay, and which bytes
//! a layer is. A pass in a fixed order is the worst case of LRU and the best one of a plan: what stays is known.
//!
//! Layers use memory of earlier ones again: in host memory, of those that were dropped; on a device, after the work that has used it.
#![allow(unsafe_code)]

mod device;
mod plan;
mod room;

pub use plan::{LayerSpec, numbered_layers};

use crate::{Error, ReadFailure, Result};
use device::{Buffer, Buffers};
use hoistway::{
    ByteRange, Checkpoint, DeviceId, Dtype,
    memory::{Block, SpareMemory},
    read::{Batch, Priority, ReadFile, ReadRequest, Reader, Target},
};
use hoistway_device::Fence;
use hoistway_io::parallel::lock;
use plan::{LayerPlan, PlannedTensor, Residency};
use room::{Claim, LayerRoom};
use serde::Serialize;
use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// Options of a stream of layers.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LayerOptions {
    /// Bytes of all layers in memory: those that stay, those that callers hold, and those that are being read.
    pub budget_bytes: u64,
    /// Layers that are read ahead of the one that computes. Fewer if the budget does not hold as many.
    pub ahead: usize,
    /// How long a layer waits for room that callers hold.
    pub timeout: Duration,
    /// The device whose memory layers are read to, which the budget then bounds.
    pub device: DeviceId,
}

hoistway_io::setters! {
    LayerOptions {
        budget_bytes: u64,
        ahead: usize,
        timeout: Duration,
        device: DeviceId,
    }
}

impl Default for LayerOptions {
    fn default() -> Self {
        Self { budget_bytes: 4 << 30, ahead: 1, timeout: Duration::from_secs(60), device: DeviceId::Cpu }
    }
}

/// Layers of a model, one after the other, again and again.
///
/// ```no_run
/// use std::sync::Arc;
/// use hoistway::{Checkpoint, read::{Reader, ReaderOptions}};
/// use hoistway_experts::layers::{LayerOptions, LayerStream, numbered_layers};
/// let checkpoint = Checkpoint::open(&["models/llama"])?;
/// let reader = Arc::new(Reader::new(&ReaderOptions::default())?);
/// let layers = numbered_layers(checkpoint.catalog());
/// let mut stream = LayerStream::new(&checkpoint, &reader, &layers, &LayerOptions::default().budget_bytes(8 << 30))?;
/// for _token in 0..16 {
///     for layer in stream.pass() {
///         let layer = layer?;
///         println!("{}: {} tensors", layer.name(), layer.tensors().len());
///     }
/// }
/// # Ok::<(), hoistway_experts::Error>(())
/// ```
#[derive(Debug)]
pub struct LayerStream {
    reader: Arc<Reader>,
    files: Vec<ReadFile>,
    layers: Vec<Arc<LayerPlan>>,
    residency: Residency,
    kept: HashMap<usize, Arc<Resident>>,
    /// Layers that are being read, in the order of use.
    pending: VecDeque<PendingLayer>,
    /// The layer that is next.
    next: usize,
    room: Arc<LayerRoom>,
    /// The memory of layers in host memory.
    memory: SpareMemory,
    /// The memory of layers on a device, if they go there.
    buffers: Option<Arc<Buffers>>,
    timeout: Duration,
    stats: Arc<Mutex<LayerStats>>,
}

/// Tells what a stream of layers has done while another thread waits for its next layer, and ends such a wait.
#[derive(Clone, Debug)]
pub struct LayerWatch {
    room: Arc<LayerRoom>,
    memory: SpareMemory,
    buffers: Option<Arc<Buffers>>,
    stats: Arc<Mutex<LayerStats>>,
}

/// Statistics of a stream of layers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LayerStats {
    /// Layers of a pass.
    pub layers: usize,
    /// Layers that stay resident.
    pub kept: usize,
    /// Layers that are read ahead.
    pub ahead: usize,
    /// Layers that were handed out.
    pub served: u64,
    /// Bytes of layers that were read.
    pub bytes_read: u64,
    /// How long callers waited for layers.
    pub stall: Duration,
    /// Bytes in memory at most.
    pub peak_bytes: u64,
    /// Bytes that were allocated on the device at most.
    pub peak_device_bytes: u64,
    /// How often memory was allocated. Other layers were read to memory of layers that were dropped.
    pub allocations: u64,
}

/// A layer that is being read. Fields are dropped in this order: a batch waits for its reads.
#[derive(Debug)]
struct PendingLayer {
    layer: usize,
    batch: Batch,
    buffer: Option<Buffer>,
    claim: Claim,
}

/// A layer in memory.
#[derive(Debug)]
struct Resident {
    plan: Arc<LayerPlan>,
    memory: LayerMemory,
    /// After the bytes: room is free once they are gone.
    _claim: Claim,
}

#[derive(Debug)]
enum LayerMemory {
    /// The bytes of each extent.
    Host(Vec<Block>),
    Device(Buffer),
}

/// A layer whose bytes are in memory as long as it is held.
///
/// The memory is used again once it is dropped. Work that reads a layer on a device may be queued still then. Work that reads one in host
/// memory must have ended, also where a device reads it: from memory that was pinned, or by HMM.
#[derive(Debug)]
pub struct Layer {
    resident: Arc<Resident>,
    /// Whether what has used it was said.
    is_told: AtomicBool,
}

/// A tensor of a layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerTensor<'a> {
    tensor: &'a PlannedTensor,
    place: TensorPlace<'a>,
}

#[derive(Clone, Copy, Debug)]
enum TensorPlace<'a> {
    Host(&'a [u8]),
    Device(DeviceId, u64),
}

impl LayerStream {
    /// Streams `layers` of a checkpoint. Reads nothing yet. The reader may be one that other reads share.
    ///
    /// # Errors
    /// [`Error::BudgetTooSmall`] if the budget does not hold the largest layer; [`Error::InvalidOption`] if there is no layer,
    /// or one has no tensor; [`Error::Engine`] if there is no such tensor, or it is big-endian or of an unknown type.
    pub fn new(
        checkpoint: &Checkpoint,
        reader: &Arc<Reader>,
        layers: &[LayerSpec],
        options: &LayerOptions,
    ) -> Result<Self> {
        let catalog = checkpoint.catalog();
        let layers = layers.iter().map(|spec| LayerPlan::new(catalog, spec, options.device).map(Arc::new));
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let residency = Residency::new(&layers, options.budget_bytes, options.ahead)?;
        let buffers = match options.device {
            DeviceId::Cpu => None,
            device => Some(Buffers::new(device, options.budget_bytes)?),
        };
        let files = catalog.file_ids().filter_map(|file| checkpoint.read_file(file)).collect();
        let stats = LayerStats {
            layers: layers.len(),
            kept: residency.kept(),
            ahead: residency.ahead,
            ..LayerStats::default()
        };
        Ok(Self {
            reader: reader.clone(),
            files,
            layers,
            residency,
            kept: HashMap::new(),
            pending: VecDeque::new(),
            next: 0,
            room: LayerRoom::new(options.budget_bytes),
            memory: SpareMemory::new(options.budget_bytes),
            buffers,
            timeout: options.timeout,
            stats: Arc::new(Mutex::new(stats)),
        })
    }

    /// Goes through the layers that are left of the pass: all of them, unless one before was left early.
    pub fn pass(&mut self) -> Pass<'_> {
        Pass { stream: self, is_over: false }
    }

    /// The next layer, behind the last of which the first comes again. Starts to read the layers after it.
    ///
    /// # Errors
    /// [`Error::Read`]; [`Error::NoRoom`] if callers hold layers until the timeout; [`Error::Engine`], also after
    /// [`LayerWatch::stop`]. The layer is next again then.
    pub fn next_layer(&mut self) -> Result<Layer> {
        let layer = self.next;
        let resident = match self.kept.get(&layer) {
            Some(kept) => kept.clone(),
            None => {
                let resident = Arc::new(self.read(layer)?);
                if self.residency.is_kept(layer) {
                    self.kept.insert(layer, resident.clone());
                }
                resident
            }
        };
        let next = (layer + 1) % self.layers.len();
        self.read_ahead(next)?;
        self.next = next;
        lock(&self.stats).served += 1;
        Ok(Layer::of(resident))
    }

    /// Its statistics.
    pub fn stats(&self) -> LayerStats {
        self.watch().stats()
    }

    /// What other threads may use while this one waits.
    pub fn watch(&self) -> LayerWatch {
        LayerWatch {
            room: self.room.clone(),
            memory: self.memory.clone(),
            buffers: self.buffers.clone(),
            stats: self.stats.clone(),
        }
    }

    /// Waits for a layer.
    fn read(&mut self, layer: usize) -> Result<Resident> {
        // Layers that were prefetched in another order are dropped.
        let ahead = self.pending.pop_front().filter(|pending| pending.layer == layer);
        if let Some(ahead) = ahead {
            match self.finish(ahead) {
                // Layers that have been dropped since have left some.
                Err(error) if lacks_memory(&error) => {}
                finished => return finished,
            }
        }
        self.pending.clear();
        let claim = self.room.claim(self.layers[layer].bytes, self.timeout)?;
        self.finish(self.start(layer, claim, Priority::Demand)?)
    }

    /// Waits for a layer that is being read.
    fn finish(&self, pending: PendingLayer) -> Result<Resident> {
        let PendingLayer { layer, batch, buffer, claim } = pending;
        let asked = Instant::now();
        let is_whole = batch.wait().is_ok();
        lock(&self.stats).stall += asked.elapsed();
        let plan = self.layers[layer].clone();
        if !is_whole {
            let failed = (0..batch.len()).find(|read| batch.status(*read).error().is_some());
            let source = ReadFailure::of_batch(&batch, failed.unwrap_or_default());
            // Some copies may not have waited for what had used the memory before, and that may not be over.
            buffer.iter().for_each(|buffer| buffer.used(None));
            return Err(Error::Read { unit: format!("layer '{}'", plan.name), source });
        }
        let memory = match buffer {
            Some(buffer) => {
                lock(&self.stats).bytes_read += batch.bytes_total();
                buffer.filled();
                LayerMemory::Device(buffer)
            }
            None => {
                let blocks: Option<Vec<Block>> = (0..batch.len()).map(|read| batch.take(read)).collect();
                let blocks = blocks.ok_or_else(|| Error::Internal("a read has no memory".into()))?;
                lock(&self.stats).bytes_read += blocks.iter().map(|block| block.len() as u64).sum::<u64>();
                LayerMemory::Host(blocks)
            }
        };
        Ok(Resident { plan, memory, _claim: claim })
    }

    /// Starts to read layers from `next` on, as far as there is room.
    fn read_ahead(&mut self, next: usize) -> Result<()> {
        let count = self.layers.len();
        let absent = (0..count).map(|step| (next + step) % count);
        let absent = absent.filter(|layer| !self.kept.contains_key(layer));
        // Those that are pending are the first of them, in this order.
        let wanted: Vec<usize> = absent.take(self.residency.ahead).collect();
        for layer in wanted.into_iter().skip(self.pending.len()) {
            let Some(claim) = self.room.try_claim(self.layers[layer].bytes) else { return Ok(()) };
            match self.start(layer, claim, Priority::Prefetch) {
                Ok(pending) => self.pending.push_back(pending),
                // Others have the memory now. If it is lacking later too, the layer that needs it says so.
                Err(error) if lacks_memory(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn start(&self, layer: usize, claim: Claim, priority: Priority) -> Result<PendingLayer> {
        let (batch, buffer) = match self.submit(layer, priority) {
            Err(error) if lacks_memory(&error) && self.memory.clear() > 0 => self.submit(layer, priority)?,
            submitted => submitted?,
        };
        Ok(PendingLayer { layer, batch, buffer, claim })
    }

    fn submit(&self, layer: usize, priority: Priority) -> Result<(Batch, Option<Buffer>)> {
        let plan = &self.layers[layer];
        let file =
            |number| self.files.get(number).ok_or_else(|| Error::Internal("a layer has no file".into()));
        let mut requests = Vec::with_capacity(plan.extents.len());
        let (Some(buffers), Some(starts)) = (&self.buffers, &plan.on_device) else {
            for extent in &plan.extents {
                let target = Target::memory_of(&self.memory);
                let request = ReadRequest::new(file(extent.file)?, extent.bytes, target);
                requests.push(request.named(plan.name.clone()));
            }
            let batch = self.reader.submit(requests, priority)?;
            return Ok((batch, None));
        };
        let buffer = buffers.take(plan.bytes)?;
        let fences = buffer.fences();
        for (tensor, start) in plan.tensors.iter().zip(starts) {
            let extent = &plan.extents[tensor.extent];
            let range = ByteRange::at(extent.bytes.start() + tensor.place.start(), tensor.place.len());
            let range = range.filter(|range| !range.is_empty());
            let Some(range) = range else { continue };
            // SAFETY: the buffer has room for each tensor, which no other request gets. It is given back once its reads have ended, and
            // what copies of unknown fate may write to is used after all work of the device alone.
            let target = unsafe { Target::device(buffers.device().id(), buffer.address() + start) };
            let request = ReadRequest::new(file(extent.file)?, range, target).after(fences.iter().cloned());
            requests.push(request.named(tensor.name.clone()));
        }
        let batch = self.reader.submit(requests, priority)?;
        Ok((batch, Some(buffer)))
    }
}

impl LayerWatch {
    /// The statistics of the stream. Does not wait for a layer that another thread waits for.
    pub fn stats(&self) -> LayerStats {
        let (peak_device_bytes, allocations) = match &self.buffers {
            Some(buffers) => (buffers.peak_bytes(), buffers.allocations()),
            None => (0, self.memory.allocations()),
        };
        let peak_bytes = self.room.peak_bytes();
        LayerStats { peak_bytes, peak_device_bytes, allocations, ..lock(&self.stats).clone() }
    }

    /// Ends waits for room: [`LayerStream::next_layer`] fails with [`hoistway::Error::Cancelled`] where it would wait, now and later.
    pub fn stop(&self) {
        self.room.stop();
    }
}

impl Drop for LayerStream {
    fn drop(&mut self) {
        // What callers do not hold goes now, whatever they hold: layers, or a watch.
        self.pending.clear();
        self.kept.clear();
        self.memory.retire();
        if let Some(buffers) = &self.buffers {
            buffers.close();
        }
    }
}

/// Whether a layer got no memory.
fn lacks_memory(error: &Error) -> bool {
    let source = match error {
        Error::Engine(source) => source,
        Error::Read { source, .. } => source.error(),
        _ => return false,
    };
    matches!(source, hoistway::Error::MemoryBudget { .. } | hoistway::Error::Allocation { .. })
}

/// The layers that are left of one pass.
#[derive(Debug)]
pub struct Pass<'a> {
    stream: &'a mut LayerStream,
    is_over: bool,
}

impl Iterator for Pass<'_> {
    type Item = Result<Layer>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let layer = self.stream.next_layer();
        self.is_over = layer.is_err() || self.stream.next == 0;
        Some(layer)
    }
}

impl Layer {
    fn of(resident: Arc<Resident>) -> Self {
        Self { resident, is_told: AtomicBool::new(false) }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.resident.plan.name
    }

    /// Says what uses a layer on a device through this value: work that is queued by now on `stream`, a handle of the device, 0 for the
    /// legacy default stream. Reads to its memory come after that. Otherwise they come after all work of the device, for which
    /// a thread of the reader waits. Each clone says so for itself. Where several streams use it, name each by a call of its own.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] if the layer is in host memory, whose use must have ended before it is dropped. [`Error::Engine`] if
    /// the stream cannot be used, as while it is captured. Reads then come after all work of the device, whatever was said before.
    ///
    /// # Safety
    /// It must be a live stream of the device. Nothing else uses the bytes through this value, now or later, but work on streams that
    /// are named too.
    pub unsafe fn used_behind(&self, stream: usize) -> Result<()> {
        let Resident { memory: LayerMemory::Device(buffer), .. } = &*self.resident else {
            let reason = "the layer is in host memory: end all work on it before you free it";
            return Err(Error::invalid_option("stream", format_args!("{stream:#x}"), reason));
        };
        // SAFETY: passed on.
        let fence = unsafe { Fence::of_stream(buffer.opened(), stream) };
        match fence {
            Ok(fence) => {
                buffer.used(Some(fence));
                self.is_told.store(true, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => {
                // Another stream may have been named before.
                buffer.used(None);
                Err(hoistway::Error::from(error).into())
            }
        }
    }

    /// Its tensors, in the order in which they were named.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = LayerTensor<'_>> {
        let Resident { plan, memory, .. } = &*self.resident;
        plan.tensors.iter().enumerate().map(move |(number, tensor)| {
            let place = match memory {
                LayerMemory::Host(blocks) => {
                    let place = tensor.place.start() as usize..tensor.place.end() as usize;
                    TensorPlace::Host(&blocks[tensor.extent][place])
                }
                LayerMemory::Device(buffer) => {
                    let start = plan.on_device.as_ref().and_then(|starts| starts.get(number));
                    TensorPlace::Device(
                        buffer.device(),
                        buffer.address() + start.copied().unwrap_or_default(),
                    )
                }
            };
            LayerTensor { tensor, place }
        })
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<LayerTensor<'_>> {
        self.tensors().find(|found| found.name() == name)
    }
}

impl Clone for Layer {
    fn clone(&self) -> Self {
        Self::of(self.resident.clone())
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        if let LayerMemory::Device(buffer) = &self.resident.memory
            && !self.is_told.load(Ordering::Relaxed)
        {
            buffer.used(None);
        }
    }
}

impl<'a> LayerTensor<'a> {
    /// Its name in the checkpoint.
    pub fn name(self) -> &'a str {
        &self.tensor.name
    }

    /// Type of each element.
    pub fn dtype(self) -> Dtype {
        self.tensor.dtype
    }

    /// Elements along each dimension, slowest first.
    pub fn shape(self) -> &'a [u64] {
        &self.tensor.shape
    }

    /// Its bytes; none if they are in memory of a device.
    pub fn bytes(self) -> &'a [u8] {
        match self.place {
            TensorPlace::Host(bytes) => bytes,
            TensorPlace::Device(..) => &[],
        }
    }

    /// Its length in bytes.
    pub fn len(self) -> u64 {
        self.tensor.place.len()
    }

    /// Whether it has no byte.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The device that its bytes are on.
    pub fn device(self) -> DeviceId {
        match self.place {
            TensorPlace::Host(_) => DeviceId::Cpu,
            TensorPlace::Device(device, _) => device,
        }
    }

    /// Address of its first byte, in memory of [`device`](Self::device).
    pub fn address(self) -> u64 {
        match self.place {
            TensorPlace::Host(bytes) => bytes.as_ptr().expose_provenance() as u64,
            TensorPlace::Device(_, address) => address,
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::{fs, io::Write};

    /// The bytes of a layer for which no processor has addresses.
    const ENDLESS: u64 = 1 << 62;

    #[test]
    fn a_layer_that_found_no_memory_as_it_was_read_ahead_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.safetensors");
        let header = r#"{"layers.0.w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"layers.1.w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#;
        let mut file = fs::File::create(&path).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(header.as_bytes()).unwrap();
        file.write_all(b"thisthat").unwrap();
        drop(file);
        let checkpoint = Checkpoint::open(&[&path]).unwrap();
        let reader = Arc::new(Reader::new(&hoistway::read::ReaderOptions::default()).unwrap());
        let layers = numbered_layers(checkpoint.catalog());
        let options = LayerOptions::default().budget_bytes(2 * 8192);
        let mut stream = LayerStream::new(&checkpoint, &reader, &layers, &options).unwrap();
        drop(stream.next_layer().unwrap());
        // In memory, where a file may have any length.
        let endless = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        endless.as_file().set_len(ENDLESS).unwrap();
        let endless = ReadFile::open(endless.path()).unwrap();
        let all = ByteRange::new(0, ENDLESS).unwrap();
        let request = ReadRequest::new(&endless, all, Target::memory_of(&stream.memory));
        let batch = reader.submit(vec![request], Priority::Prefetch).unwrap();
        assert!(matches!(batch.wait(), Err(hoistway::Error::Allocation { .. })));
        stream.pending.clear();
        let claim = stream.room.claim(8192, Duration::ZERO).unwrap();
        stream.pending.push_back(PendingLayer { layer: 1, batch, buffer: None, claim });
        let layer = stream.next_layer().unwrap();
        assert_eq!(layer.tensor("layers.1.w").unwrap().bytes(), b"that");
    }
}
