//! `gds`: from the drive to a device past the host's memory (GPUDirect Storage), by the device's library for that. Without
//! a proof that reads take that path, they are `gds-compat`.
#![forbid(unsafe_code)]

use super::{BlockingRead, Buffer, ReadOp, Unavailable};
use crate::{device::Device, source::Source};
use hoistway_device::RegisteredFile;
use hoistway_io::direct_path;
pub(crate) use hoistway_io::direct_path::{counters_stopped, reads_through_host};
use std::{
    io,
    sync::{Arc, OnceLock},
};

/// A source as the library knows it, once that was asked for.
#[derive(Debug, Default)]
struct Registered(OnceLock<Result<RegisteredFile, Unavailable>>);

/// The source as the library knows it, which the first call registers, or why the library does not take it.
pub(super) fn registered(source: &dyn Source) -> Result<&RegisteredFile, Unavailable> {
    let register = || match source.local()?.direct_file() {
        Ok(file) => RegisteredFile::register(&file),
        Err(error) => Err(Unavailable::new(error.to_string(), "")),
    };
    let kept = source.extensions().get::<Registered>();
    kept.0.get_or_init(register).as_ref().map_err(Clone::clone)
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

impl BlockingRead<ReadOp> for DirectRead {
    fn read(&self, op: &mut ReadOp) -> io::Result<usize> {
        let file = registered(&*op.source).map_err(|why| io::Error::other(why.to_string()))?;
        let no_room = || io::Error::other("a read does not fit its slot");
        let Buffer::Staged { slot: Some(slot), .. } = &op.buffer else { return Err(no_room()) };
        let fits = op.progress.position.checked_add(op.progress.len).is_some_and(|end| end <= slot.len());
        let (buffer, start) = slot.direct_buffer().filter(|_| fits).ok_or_else(no_room)?;
        file.read_at(buffer, start + op.progress.position as u64, op.progress.len, op.progress.offset)
    }
}
