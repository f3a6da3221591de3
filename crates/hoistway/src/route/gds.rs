//! `gds`: from the drive to a device past the host's memory (GPUDirect Storage), by the device's library for that. Without
//! a proof that reads take that path, they are `gds-compat`.
#![forbid(unsafe_code)]

use super::{BlockingRead, Buffer, CarriedRead, Unavailable};
use crate::{device::Device, parallel::lock, source::Source};
use hoistway_device::RegisteredFile;
pub(crate) use hoistway_io::direct_path::{counters_stopped, reads_through_host};
use hoistway_io::{direct_path, file::Held};
use std::{
    io,
    sync::{Arc, Mutex},
};

/// A source that stays open as the library knows it, once that was asked for, or why the library does not take it.
#[derive(Debug, Default)]
struct Registered(Mutex<Option<Result<Arc<RegisteredFile>, Unavailable>>>);

/// The source as the library knows it: registered by the first call if it stays open, else as long as the result lives. Takes
/// no descriptor that stays open.
///
/// # Errors
/// Why the library does not take it, or that it cannot be opened now.
pub(super) fn registered(source: &dyn Source) -> Result<Arc<RegisteredFile>, Unavailable> {
    let registered = source.extensions().get::<Registered>();
    let mut registered = lock(&registered.0);
    if let Some(known) = &*registered {
        return known.clone();
    }
    let file = source.local()?.direct_file().map_err(|error| Unavailable::new(error.to_string(), ""))?;
    match &file {
        Held::Kept(file) => {
            registered.insert(RegisteredFile::register_shared(Arc::clone(file)).map(Arc::new)).clone()
        }
        // Another read may have it too, and a descriptor is registered once.
        Held::Opened(file) => {
            drop(registered);
            RegisteredFile::register(file).map(Arc::new)
        }
    }
}

/// What proves that reads of a file into a device take the direct path: found once for each file system and device.
///
/// # Errors
/// Why there is no proof.
pub(crate) fn prove(device: &Arc<Device>, source: &dyn Source) -> Result<String, Unavailable> {
    direct_path::prove(device, source.local()?, || registered(source))
}

/// Direct reads into slots on a device.
#[derive(Debug)]
pub(crate) struct DirectRead;

impl BlockingRead<CarriedRead> for DirectRead {
    fn read(&self, op: &mut CarriedRead) -> io::Result<usize> {
        let file = registered(&*op.source).map_err(|why| io::Error::other(why.to_string()))?;
        let no_room = || io::Error::other("a read does not fit its slot");
        let Buffer::Staged { slot: Some(slot), .. } = &op.buffer else { return Err(no_room()) };
        let fits = op.progress.position.checked_add(op.progress.len).is_some_and(|end| end <= slot.len());
        let (buffer, start) = slot.direct_buffer().filter(|_| fits).ok_or_else(no_room)?;
        file.read_at(buffer, start + op.progress.position as u64, op.progress.len, op.progress.offset)
    }
}
