//! Copies between host and device, of one range or of equally distant rows.

use super::context::Owner;
use crate::{
    control::{control, costs, settings},
    memory::{device, host},
    status::{Code, ILLEGAL_ADDRESS},
    system,
};

/// Rows of bytes to copy. One row has no pitch to speak of.
#[derive(Clone)]
pub(crate) struct Copy {
    pub(crate) source: Side,
    pub(crate) destination: Side,
    pub(crate) width: usize,
    pub(crate) rows: usize,
    /// When it was given to its stream.
    pub(crate) queued_ns: u64,
}

/// Where the first row begins and how far the next one is.
#[derive(Clone)]
pub(crate) struct Side {
    pub(crate) place: Endpoint,
    pub(crate) pitch: usize,
}

/// Memory that a copy reads or writes when its stream gets to it.
#[derive(Clone)]
pub(crate) enum Endpoint {
    /// Of the stream's own device.
    Device(u64),
    /// Of any device: only a copy that the caller waits for.
    AnyDevice(u64),
    /// Must still be pinned then.
    Pinned(usize),
    /// The caller waits, so that the memory stays.
    Waiting(usize),
    /// Read beforehand: the caller's memory may have changed since.
    Staged(Box<[u8]>),
}

impl Endpoint {
    fn is_device(&self) -> bool {
        matches!(self, Endpoint::Device(_) | Endpoint::AnyDevice(_))
    }
}

impl Copy {
    /// What the trace calls it.
    pub(crate) fn kind(&self) -> &'static str {
        match (self.source.place.is_device(), self.destination.place.is_device()) {
            (false, true) => "h2d",
            (true, false) => "d2h",
            (true, true) => "d2d",
            (false, false) => "h2h",
        }
    }

    /// Where it begins in memory of devices, and how far it goes.
    pub(super) fn device_ranges(&self) -> [Option<(u64, u64)>; 2] {
        [&self.source, &self.destination].map(|side| match side.place {
            Endpoint::Device(address) | Endpoint::AnyDevice(address) => {
                Some((address, (side.pitch * self.rows.saturating_sub(1) + self.width) as u64))
            }
            _ => None,
        })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.width as u64 * self.rows as u64
    }

    /// Takes the time that the settings say. The bytes move at its end: so a source that is changed too early
    /// is seen changed.
    pub(super) fn delay(&self, is_over: impl Fn() -> bool) {
        control().wait_for_transfer(self.bytes(), is_over);
        if self.source.place.is_device() != self.destination.place.is_device() {
            let is_pinned = |side: &Side| matches!(side.place, Endpoint::Pinned(_));
            costs::copy(
                self.bytes(),
                is_pinned(&self.source) || is_pinned(&self.destination),
                self.queued_ns,
            );
        }
    }

    pub(super) fn run(&self, owner: &Owner) -> Result<(), Code> {
        if self.bytes() == 0 {
            return Ok(());
        }
        let pinned = host::pinned();
        let source = self.resolve(&self.source, owner, &pinned)?;
        let destination = self.resolve(&self.destination, owner, &pinned)?;
        if !settings().moves {
            return Ok(());
        }
        let is_view = match self.source.place {
            Endpoint::Pinned(address) => {
                pinned.find(owner.driver(), address).is_some_and(|found| found.is_view)
            }
            _ => false,
        };
        for row in 0..self.rows {
            // SAFETY: `resolve` found all rows of both sides in memory that is live: allocations stay mapped,
            // pinned ranges stay while `pinned` is held, and otherwise the caller waits. They may overlap. Of a view of a
            // file no byte is touched.
            unsafe {
                let from = source.add(row * self.source.pitch);
                let to = destination.add(row * self.destination.pitch);
                match is_view {
                    true => system::copy_from_view(from, to, self.width),
                    false => from.copy_to(to, self.width),
                }
            }
        }
        Ok(())
    }

    fn resolve(&self, side: &Side, owner: &Owner, pinned: &host::Pinned) -> Result<*mut u8, Code> {
        let span = side.pitch * (self.rows - 1) + self.width;
        let memory = match side.place {
            Endpoint::Device(_) => device::of_device(owner.device),
            Endpoint::AnyDevice(address) => device::of_address(address),
            _ => None,
        };
        match &side.place {
            Endpoint::Device(address) | Endpoint::AnyDevice(address) => {
                match memory.ok_or(ILLEGAL_ADDRESS)?.shadow(*address, span as u64) {
                    // Devices reach pinned memory under the address that it has for the host.
                    Err(_) if pinned.covers(owner.driver(), *address as usize, span) => {
                        Ok(*address as *mut u8)
                    }
                    shadow => shadow,
                }
            }
            Endpoint::Pinned(address) if !pinned.covers(owner.driver(), *address, span) => {
                Err(ILLEGAL_ADDRESS)
            }
            Endpoint::Pinned(address) | Endpoint::Waiting(address) => Ok(*address as *mut u8),
            Endpoint::Staged(bytes) => Ok(bytes.as_ptr().cast_mut()),
        }
    }
}

/// Copies rows of the caller's memory together, so that it may change from now on.
///
/// # Safety
/// `rows` rows of `width` bytes, `pitch` apart from `address` on, can be read.
pub(crate) unsafe fn stage(address: usize, pitch: usize, width: usize, rows: usize) -> Box<[u8]> {
    let mut staged = Vec::with_capacity(width * rows);
    for row in 0..rows {
        // SAFETY: the caller promised that each row can be read; the capacity is for all of them.
        let bytes = unsafe { std::slice::from_raw_parts((address + row * pitch) as *const u8, width) };
        staged.extend_from_slice(bytes);
    }
    staged.into_boxed_slice()
}
