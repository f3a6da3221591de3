//! Memory that direct transfers take.
#![forbid(unsafe_code)]

use hoistway_io::Alignment;

/// Bytes that begin at a multiple of a block.
#[derive(Debug)]
pub(super) struct AlignedBytes {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBytes {
    pub(super) fn new(len: usize) -> Self {
        let block = Alignment::BLOCK.bytes() as usize;
        let bytes = vec![0; len + block];
        let address = bytes.as_ptr().addr();
        Self { start: address.next_multiple_of(block) - address, bytes, len }
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// Whether direct transfers take this memory.
pub(super) fn is_aligned(bytes: &[u8]) -> bool {
    (bytes.as_ptr().addr() as u64).is_multiple_of(Alignment::BLOCK.bytes())
}
