//! Copies between a device and pinned memory of the host, both ways, for programs that stage bytes themselves.
#![allow(unsafe_code)]

use super::{
    Device,
    copies::CopyQueue,
    driver::{self, Copy2d},
};
use crate::{Error, Result};
use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::Arc,
};

/// So many pieces of one length at one distance are copied as rows of one matrix.
const FEWEST_ROWS: usize = 4;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// From the device to the host.
    ToHost,
    /// From the host to the device.
    ToDevice,
}

/// Bytes in a row, on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCopy {
    /// Address in host memory.
    pub host: usize,
    /// Address in the memory of the device.
    pub device: u64,
    /// How many bytes.
    pub len: usize,
}

/// Why copies failed.
#[derive(Debug)]
pub struct CopyError {
    /// What went wrong.
    pub error: Error,
    /// Whether they may go on all the same. Then nobody may ever use or free the memory again.
    pub is_in_doubt: bool,
}

/// A queue of copies between one device and the host, in no order with other queues.
#[derive(Debug)]
pub struct HostCopies(CopyQueue);

impl HostCopies {
    /// A queue of a device's.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        Ok(Self(CopyQueue::new(device)?))
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        self.0.device()
    }

    /// Makes copies, and waits for their end; `after` is an event (`CUevent`) of the device's that must be reached
    /// before the first begins.
    ///
    /// # Errors
    /// [`CopyError`], which says whether copies may be under way still.
    ///
    /// # Safety
    /// The host's bytes must be pinned, the device's allocated on this device; neither may be freed, nor used by others
    /// in a way that copies forbid, until this returns. `after` must be a live event.
    pub unsafe fn run(
        &self,
        direction: CopyDirection,
        copies: &[HostCopy],
        after: Option<u64>,
    ) -> std::result::Result<(), CopyError> {
        // SAFETY: passed on.
        let queued = unsafe { self.queue(direction, copies, after) };
        // What was queued before an error goes on.
        let waited = self.0.mark().and_then(|ticket| ticket.wait()).or_else(|_| self.0.synchronize());
        let is_in_doubt = waited.as_ref().is_err_and(Error::leaves_doubt);
        queued.and(waited).map_err(|error| CopyError { error, is_in_doubt })
    }

    /// # Safety
    /// As for [`HostCopies::run`].
    unsafe fn queue(&self, direction: CopyDirection, copies: &[HostCopy], after: Option<u64>) -> Result<()> {
        let device = self.device();
        let _entered = device.enter()?;
        let functions = &device.driver.functions;
        let stream = self.0.stream_handle();
        if let Some(event) = after {
            let event = ptr::with_exposed_provenance_mut::<c_void>(event as usize);
            // SAFETY: the caller's event lives; the stream is ours.
            let code = unsafe { (functions.stream_wait_event)(stream, event, 0) };
            device.check("waiting for an event", "cuStreamWaitEvent", code)?;
        }
        let mut left = copies;
        while let Some(first) = left.first() {
            let rows = rows(left);
            if rows.count >= FEWEST_ROWS {
                let copy = matrix(direction, first, &rows);
                // SAFETY: the driver copies the description; its rows are the caller's pieces.
                let code = unsafe { (functions.copy_2d)(&copy, stream) };
                device.check("copying rows", "cuMemcpy2DAsync", code)?;
                left = &left[rows.count..];
                continue;
            }
            let host = ptr::with_exposed_provenance_mut::<c_void>(first.host);
            // SAFETY: the caller vouches for both sides.
            let (function, code) = unsafe {
                match direction {
                    CopyDirection::ToHost => {
                        let code = (functions.copy_to_host)(host, first.device, first.len, stream);
                        ("cuMemcpyDtoHAsync", code)
                    }
                    CopyDirection::ToDevice => {
                        let code = (functions.copy_to_device)(first.device, host, first.len, stream);
                        ("cuMemcpyHtoDAsync", code)
                    }
                }
            };
            let operation = match direction {
                CopyDirection::ToHost => "copying from it",
                CopyDirection::ToDevice => "copying to it",
            };
            device.check(operation, function, code)?;
            left = &left[1..];
        }
        Ok(())
    }
}

impl Device {
    /// Whether an event (`CUevent`) of this device is reached.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// It must be a live event.
    pub unsafe fn is_event_reached(&self, event: u64) -> Result<bool> {
        let _entered = self.enter()?;
        let event = ptr::with_exposed_provenance_mut::<c_void>(event as usize);
        // SAFETY: the caller's event lives.
        let code = unsafe { (self.driver.functions.event_query)(event) };
        if code == driver::NOT_READY {
            return Ok(false);
        }
        self.check("asking after an event", "cuEventQuery", code).map(|()| true)
    }
}

/// The first of several copies, as rows: of one length, side by side on the host, at one distance on the device.
#[derive(Debug, PartialEq, Eq)]
struct Rows {
    count: usize,
    pitch: usize,
}

fn rows(copies: &[HostCopy]) -> Rows {
    let [first, second, ..] = copies else { return Rows { count: copies.len(), pitch: 0 } };
    let Some(pitch) = second.device.checked_sub(first.device).and_then(|pitch| usize::try_from(pitch).ok())
    else {
        return Rows { count: 1, pitch: 0 };
    };
    // The driver takes no longer ones.
    if pitch < first.len || c_int::try_from(pitch).is_err() {
        return Rows { count: 1, pitch: 0 };
    }
    let follows = |pair: &&[HostCopy]| {
        pair[1].len == first.len
            && pair[0].host + first.len == pair[1].host
            && pair[0].device + pitch as u64 == pair[1].device
    };
    Rows { count: 1 + copies.windows(2).take_while(follows).count(), pitch }
}

fn matrix(direction: CopyDirection, first: &HostCopy, rows: &Rows) -> Copy2d {
    let host = ptr::with_exposed_provenance_mut::<c_void>(first.host);
    let (none, zero) = (ptr::null_mut(), 0);
    let copy = Copy2d {
        source_x: 0,
        source_y: 0,
        source_type: driver::MEMORY_HOST,
        source_host: host,
        source_device: zero,
        source_array: none,
        source_pitch: first.len,
        destination_x: 0,
        destination_y: 0,
        destination_type: driver::MEMORY_DEVICE,
        destination_host: none,
        destination_device: first.device,
        destination_array: none,
        destination_pitch: rows.pitch,
        width: first.len,
        height: rows.count,
    };
    match direction {
        CopyDirection::ToDevice => copy,
        CopyDirection::ToHost => Copy2d {
            source_type: driver::MEMORY_DEVICE,
            source_host: none,
            source_device: first.device,
            source_pitch: rows.pitch,
            destination_type: driver::MEMORY_HOST,
            destination_host: host,
            destination_device: zero,
            destination_pitch: first.len,
            ..copy
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_at_one_distance_are_rows() {
        let piece = |row: usize, pitch: u64| HostCopy {
            host: 1000 + row * 16,
            device: 5000 + row as u64 * pitch,
            len: 16,
        };
        let pieces: Vec<HostCopy> = (0..5).map(|row| piece(row, 100)).collect();
        assert_eq!(rows(&pieces), Rows { count: 5, pitch: 100 });
        let mut broken = pieces.clone();
        broken[3].device += 1;
        assert_eq!(rows(&broken).count, 3);
        broken = pieces.clone();
        broken[2].host += 1;
        assert_eq!(rows(&broken).count, 2);
        broken = pieces.clone();
        broken[1].len = 8;
        assert_eq!(rows(&broken).count, 1);
        assert_eq!(rows(&pieces[..1]).count, 1);
        let apart: Vec<HostCopy> = (0..5).map(|row| piece(row, 1 << 31)).collect();
        assert_eq!(rows(&apart).count, 1, "further than the driver's rows may be");
        let overlapping: Vec<HostCopy> = (0..5).map(|row| piece(row, 8)).collect();
        assert_eq!(rows(&overlapping).count, 1);
    }
}
