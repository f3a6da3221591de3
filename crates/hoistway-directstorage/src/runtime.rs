//! The runtime: a process has one, which all its libraries share.
#![allow(unsafe_code)]

use crate::{
    Failure, GraphicsDevice, Queue, STAGING_BYTES, StorageFile,
    abi::{FactoryTable, QUEUE_CAPACITY, QueueDescription, QueueTable, StatusArrayTable},
    interface::Reference,
    libraries::Libraries,
};
use hoistway_device::Unavailable;
use std::{
    ffi::c_char,
    path::Path,
    ptr,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

/// The runtime of this process.
#[derive(Debug)]
pub struct Runtime {
    factory: Reference<FactoryTable>,
    libraries: &'static Libraries,
    /// While a queue exists, the runtime refuses other sizes of its staging buffer.
    _keeper: Reference<QueueTable>,
}

static LIBRARIES: OnceLock<Libraries> = OnceLock::new();
static RUNTIME: OnceLock<Runtime> = OnceLock::new();
/// Held by the thread that opens it.
static OPENING: Mutex<()> = Mutex::new(());

impl Runtime {
    /// Returns the runtime, which the first call loads and configures. It stays until the process ends. A refusal is found out again by
    /// the next call.
    ///
    /// # Errors
    /// Why there is none, and what to do about it.
    pub fn get() -> Result<&'static Self, Unavailable> {
        if let Some(runtime) = RUNTIME.get() {
            return Ok(runtime);
        }
        let _opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = RUNTIME.get() {
            return Ok(runtime);
        }
        let libraries = match LIBRARIES.get() {
            Some(libraries) => libraries,
            None => {
                let loaded = Libraries::load()?;
                LIBRARIES.get_or_init(|| loaded)
            }
        };
        let opened = Self::open(libraries).map_err(|failure| {
            Unavailable::new(format!("{}: {failure}", libraries.path.display()), failure.fix())
        })?;
        Ok(RUNTIME.get_or_init(|| opened))
    }

    fn open(libraries: &'static Libraries) -> Result<Self, Failure> {
        // SAFETY: the function gives an object with the table that it is asked for.
        let factory: Reference<FactoryTable> =
            unsafe { Reference::of("DStorageGetFactory", |id, object| (libraries.get_factory)(id, object))? };
        // SAFETY: the object lives during the call.
        let agreed = unsafe { (factory.table().set_staging_buffer_size)(factory.object(), STAGING_BYTES) };
        Failure::check("SetStagingBufferSize", agreed)?;
        let keeper = create_queue(&factory, None, QUEUE_CAPACITY.0)?;
        Ok(Self { factory, libraries, _keeper: keeper })
    }

    /// Returns the path of the library that it was loaded from.
    pub fn path(&self) -> &Path {
        &self.libraries.path
    }

    /// Returns the version that the library's file tells.
    pub fn version(&self) -> Option<&str> {
        self.libraries.version.as_deref()
    }

    /// Returns why the runtime is configured as another library of the process has chosen, telemetry included.
    pub fn not_configured(&self) -> Option<&Failure> {
        self.libraries.not_configured.as_ref()
    }

    /// Opens a file by its path.
    ///
    /// # Errors
    /// What the runtime answers.
    pub fn open_file(&self, path: &Path) -> Result<StorageFile, Failure> {
        StorageFile::open(&self.factory, path)
    }

    /// Makes a queue for up to `depth` reads. It waits up to `patience` for the end of one. `abandon` gives up the owner of a read whose
    /// end cannot be known: it leaks the target of the read, as [`Queue::push`] wants, and may drop the rest.
    ///
    /// # Errors
    /// What the runtime answers.
    pub fn queue<T>(&self, depth: usize, patience: Duration, abandon: fn(T)) -> Result<Queue<T>, Failure> {
        Queue::new(&self.factory, None, depth, patience, abandon)
    }

    /// The same for reads into buffers of a device.
    ///
    /// # Errors
    /// What the runtime answers.
    pub fn queue_to<T>(
        &self,
        device: &Arc<GraphicsDevice>,
        depth: usize,
        patience: Duration,
        abandon: fn(T),
    ) -> Result<Queue<T>, Failure> {
        Queue::new(&self.factory, Some(device), depth, patience, abandon)
    }
}

/// A queue for reads of files into host memory, and into buffers of a device.
pub(crate) fn create_queue(
    factory: &Reference<FactoryTable>,
    device: Option<&GraphicsDevice>,
    capacity: u16,
) -> Result<Reference<QueueTable>, Failure> {
    let description = QueueDescription {
        source_type: 0,
        capacity,
        priority: 0,
        name: NAME.as_ptr().cast::<c_char>(),
        device: device.map_or(ptr::null_mut(), GraphicsDevice::object),
    };
    let create = |id, object| {
        // SAFETY: the structure is that of the header, and outlives the call; the name ends with a zero.
        unsafe { (factory.table().create_queue)(factory.object(), &raw const description, id, object) }
    };
    // SAFETY: the function gives an object with the table that it is asked for.
    unsafe { Reference::of("CreateQueue", create) }
}

/// Results of `count` entries.
pub(crate) fn create_statuses(
    factory: &Reference<FactoryTable>,
    count: u32,
) -> Result<Reference<StatusArrayTable>, Failure> {
    let create = |id, object| {
        // SAFETY: the name ends with a zero.
        unsafe {
            (factory.table().create_status_array)(factory.object(), count, NAME.as_ptr().cast(), id, object)
        }
    };
    // SAFETY: the function gives an object with the table that it is asked for.
    unsafe { Reference::of("CreateStatusArray", create) }
}

const NAME: &[u8] = b"hoistway\0";
