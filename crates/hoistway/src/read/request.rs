//! What is read, and where to.
#![allow(unsafe_code)]

use crate::{
    ByteRange, DeviceId, Error, Result,
    catalog::{OpenFile, OpenOptions},
    device::Fence,
    memory::SpareMemory,
    plan::Runs,
    source::{Source, registry},
    sys::files,
};
use std::{fmt, fs::File, path::Path, ptr::NonNull, sync::Arc, time::Instant};

/// What a sink says if it does not take the bytes.
pub type SinkError = Box<dyn std::error::Error + Send + Sync>;

/// An open file to read from. Clones are the same file.
///
/// A file that changes after it was opened fails the reads that notice.
#[derive(Clone, Debug)]
pub struct ReadFile(pub(super) Arc<dyn Source>);

impl ReadFile {
    /// Opens a regular file, or the source of a URL.
    ///
    /// # Errors
    /// [`Error::NotFound`](crate::Error::NotFound); [`Error::InvalidFile`](crate::Error::InvalidFile) if it is no regular
    /// file; [`Error::Io`](crate::Error::Io); [`Error::InvalidOption`](crate::Error::InvalidOption) for a URL whose scheme no
    /// source has.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Ok(Self::from_source(registry::open(path.as_ref(), &OpenOptions::default())?))
    }

    /// Takes an open file over. `path` is what messages call it.
    ///
    /// # Errors
    /// Those of [`ReadFile::open`].
    pub fn from_file(file: File, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if files::is_direct(&file) {
            // Reads through the page cache need a description of their own: the flag is shared by duplicates.
            let again = files::reopen(&file).map_err(|source| Error::Io {
                operation: "open",
                path: path.to_owned(),
                tensor: None,
                range: None,
                source,
            })?;
            return Self::from_file(again, path);
        }
        Ok(Self::from_source(registry::of_file(OpenFile::from_file(file, path)?)?))
    }

    pub(crate) fn from_source(source: Arc<dyn Source>) -> Self {
        // What a file can do is found out ahead of reads.
        source.as_local();
        Self(source)
    }

    /// Length in bytes when it was opened.
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What messages call it.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Its identity when it was opened. `None` if it is no file of this machine.
    #[doc(hidden)]
    pub fn identity(&self) -> Option<hoistway_io::file::FileIdentity> {
        self.0.as_local().map(hoistway_io::file::LocalFile::identity)
    }
}

/// Bytes of a file, and where they go.
#[derive(Debug)]
pub struct ReadRequest {
    pub(super) file: ReadFile,
    pub(super) range: ByteRange,
    pub(super) target: Target,
    pub(super) name: Option<Arc<str>>,
    pub(super) on_end: Option<OnEnd>,
    pub(super) begin_by: Option<Instant>,
    pub(super) packed: Option<Runs>,
    pub(super) fences: Vec<Fence>,
}

impl ReadRequest {
    /// The bytes `range` of `file` to `target`: all of them, or an error.
    pub fn new(file: &ReadFile, range: ByteRange, target: Target) -> Self {
        let (name, on_end, begin_by, packed) = (None, None, None, None);
        let fences = match target.0 {
            TargetKind::Device(..) => vec![Fence::of_default_stream()],
            _ => Vec::new(),
        };
        Self { file: file.clone(), range, target, name, on_end, begin_by, packed, fences }
    }

    /// Has copies to the memory of a device wait for these alone. Without this, they wait for what is queued on the legacy
    /// default stream of the device by the time that the request is submitted.
    #[must_use]
    pub fn after(mut self, fences: impl IntoIterator<Item = Fence>) -> Self {
        self.fences = fences.into_iter().collect();
        self
    }

    /// Gives it a name for messages, such as that of the tensor.
    #[must_use]
    pub fn named(mut self, name: impl Into<Arc<str>>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Has `on_end` called once the read has ended, well or not, on one of the reader's threads or, if there is nothing
    /// to do or it is cancelled, on the caller's. It should be quick, and must not wait for reads, nor drop a batch, which
    /// waits for its reads.
    #[must_use]
    pub fn on_end(mut self, on_end: impl FnOnce(std::result::Result<(), &Error>) + Send + 'static) -> Self {
        self.on_end = Some(OnEnd(Box::new(on_end)));
        self
    }

    /// Ends it with [`Error::Cancelled`](crate::Error::Cancelled) if `deadline` passes before it begins. What of it has
    /// begun by then ends as it may. The deadline is looked at when a lane asks for work, so while all lanes are busy the
    /// read ends later than that.
    #[must_use]
    pub fn begin_by(mut self, deadline: Instant) -> Self {
        self.begin_by = Some(deadline);
        self
    }
}

impl ReadRequest {
    /// To memory of the caller's, of a device or not, go only the bytes of `runs`, one after the other. It needs no more room than
    /// they do, and only they count as delivered.
    #[must_use]
    pub(crate) fn packing(mut self, runs: Runs) -> Self {
        self.packed = Some(runs);
        self
    }

    /// The memory of the host that it fills, if it is the caller's.
    pub(super) fn borrowed(&self) -> Option<ByteRange> {
        let TargetKind::Host(start) = self.target.0 else { return None };
        let len = self.packed.as_ref().map_or(self.range.len(), Runs::total_len);
        ByteRange::at(start.pointer().addr().get() as u64, len)
    }
}

type EndCallback = Box<dyn FnOnce(std::result::Result<(), &Error>) + Send>;

pub(super) struct OnEnd(pub(super) EndCallback);

impl fmt::Debug for OnEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnEnd")
    }
}

/// Where bytes go.
pub struct Target(pub(super) TargetKind);

pub(super) enum TargetKind {
    Memory(Option<SpareMemory>),
    Host(HostAddress),
    Device(DeviceId, u64),
    Scratch(DeviceId),
    Sink(Arc<Sink>),
    Discard,
}

/// Takes bytes: their position in the read, and the bytes.
pub(super) type Sink = dyn Fn(u64, &[u8]) -> std::result::Result<(), SinkError> + Send + Sync;

/// Where the caller's memory begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostAddress(NonNull<u8>);

// SAFETY: an address; who may use the memory is said by `Target::host`.
unsafe impl Send for HostAddress {}

impl HostAddress {
    pub(super) fn pointer(self) -> NonNull<u8> {
        self.0
    }
}

impl TargetKind {
    pub(super) fn is_on_device(&self) -> bool {
        matches!(self, Self::Device(..) | Self::Scratch(_))
    }
}

impl Target {
    /// Memory of the reader's, which [`Batch::take`](super::Batch::take) hands out. It lies so that direct reads need no
    /// copy.
    pub fn memory() -> Self {
        Self(TargetKind::Memory(None))
    }

    /// As [`memory`](Self::memory), which earlier such reads had, if there is some. It comes back once the bytes are dropped.
    pub fn memory_of(memory: &SpareMemory) -> Self {
        Self(TargetKind::Memory(Some(memory.clone())))
    }

    /// The caller's memory.
    ///
    /// # Safety
    /// As many bytes from `start` on as the request reads must be valid for reads and writes and initialised, whatever
    /// they are, and nothing else may use them, until the read has ended: until its [`ReadStatus`](super::ReadStatus) is no longer pending, or the batch
    /// was dropped.
    pub unsafe fn host(start: NonNull<u8>) -> Self {
        Self(TargetKind::Host(HostAddress(start)))
    }

    /// Memory of a device, such as a pointer of its driver, which belongs to the caller.
    ///
    /// # Safety
    /// As many bytes from `address` on as the request reads must be memory of that device, in its primary context, and
    /// nothing but work of the device that the request comes [after](ReadRequest::after) may use them until the read has ended; if it ended with [`Error::Device`](crate::Error::Device), until
    /// the device was waited for besides, since the copy may be under way still.
    pub unsafe fn device(device: DeviceId, address: u64) -> Self {
        Self(TargetKind::Device(device, address))
    }

    /// A function that gets the bytes in pieces, with their position in the read, in any order and from several threads
    /// at once. Each byte is there once, unless the read fails; an error of the function fails it.
    pub fn sink(
        sink: impl Fn(u64, &[u8]) -> std::result::Result<(), SinkError> + Send + Sync + 'static,
    ) -> Self {
        Self(TargetKind::Sink(Arc::new(sink)))
    }

    /// One chunk of memory of a device, which all such reads of a reader overwrite. For measurements.
    pub fn scratch(device: DeviceId) -> Self {
        Self(TargetKind::Scratch(device))
    }

    /// Nowhere: the bytes are read and forgotten. For measurements.
    pub fn discard() -> Self {
        Self(TargetKind::Discard)
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            TargetKind::Memory(_) => f.write_str("Memory"),
            TargetKind::Host(address) => write!(f, "Host({:p})", address.0),
            TargetKind::Device(device, address) => write!(f, "Device({device}, {address:#x})"),
            TargetKind::Scratch(device) => write!(f, "Scratch({device})"),
            TargetKind::Sink(_) => f.write_str("Sink"),
            TargetKind::Discard => f.write_str("Discard"),
        }
    }
}
