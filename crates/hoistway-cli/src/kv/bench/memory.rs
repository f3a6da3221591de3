//! Memory that blocks are stored from and loaded to: of the host, or of a device.

use crate::failure::Failure;
use hoistway::DeviceId;
use hoistway_kv::{Buffer, DeviceBuffer, Lend, Region, Store};

/// Bytes of a buffer on a device that are compared after the last load.
const COMPARED: usize = 64;

/// A buffer to measure with.
pub(super) trait Memory: Lend + Sized {
    /// Allocates buffers, and makes them known to the store.
    fn allocate(
        store: &Store,
        id: DeviceId,
        len: usize,
        count: usize,
    ) -> Result<(Vec<Self>, Vec<Region>), Failure>;

    /// Sets its bytes.
    fn fill(&mut self, bytes: &[u8]) -> Result<(), Failure>;

    /// Writes the number of the block that it holds into it, where that takes no time.
    fn mark(&mut self, number: u64);

    /// Whether it holds the block of this number, as far as `mark` wrote it.
    fn is_marked(&self, number: u64) -> bool;

    /// Whether it holds these bytes, as far as `mark` does not say.
    fn holds(&self, bytes: &[u8]) -> Result<bool, Failure>;
}

impl Memory for Buffer {
    fn allocate(
        _store: &Store,
        _id: DeviceId,
        len: usize,
        count: usize,
    ) -> Result<(Vec<Self>, Vec<Region>), Failure> {
        Ok(((0..count).map(|_| Self::zeroed(len)).collect(), Vec::new()))
    }

    fn fill(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.copy_from_slice(bytes);
        Ok(())
    }

    fn mark(&mut self, number: u64) {
        let len = self.len().min(8);
        self[..len].copy_from_slice(&number.to_le_bytes()[..len]);
    }

    fn is_marked(&self, number: u64) -> bool {
        let len = self.len().min(8);
        self[..len] == number.to_le_bytes()[..len]
    }

    fn holds(&self, _bytes: &[u8]) -> Result<bool, Failure> {
        Ok(true)
    }
}

impl Memory for DeviceBuffer {
    fn allocate(
        store: &Store,
        id: DeviceId,
        len: usize,
        count: usize,
    ) -> Result<(Vec<Self>, Vec<Region>), Failure> {
        let buffers = Self::allocate(id, len, count)?;
        let regions = store.register_buffers(&buffers)?;
        Ok((buffers, regions))
    }

    fn fill(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        Ok(self.write(bytes)?)
    }

    fn mark(&mut self, _number: u64) {}

    fn is_marked(&self, _number: u64) -> bool {
        true
    }

    fn holds(&self, bytes: &[u8]) -> Result<bool, Failure> {
        let len = bytes.len().min(COMPARED);
        Ok(self.read(len)?[..] == bytes[..len])
    }
}
