//! Loads and stores of memory that the store is given, and gives back: for programs that have no memory of their own to
//! fill, and need no `unsafe` this way.
#![allow(unsafe_code, reason = "transfers are given the addresses of buffers")]

use crate::{
    Completion, DeviceBuffer, Error, Item, KeepAlive, Key, Namespace, Piece, Priority, Request, Result,
    Ticket,
};
use std::{
    cell::UnsafeCell,
    fmt,
    ops::{Deref, DerefMut, Range},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// What direct transfers want the addresses of memory to be multiples of.
const ALIGNMENT: usize = 4096;

/// Host memory of a fixed length, aligned for direct transfers.
pub struct Buffer {
    memory: Box<[u8]>,
    bytes: Range<usize>,
}

impl Buffer {
    /// Zeros.
    pub fn zeroed(len: usize) -> Self {
        let memory = vec![0; len.saturating_add(ALIGNMENT)].into_boxed_slice();
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { memory, bytes: start..start + len }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.bytes.clone()]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.bytes.clone()]
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len())
    }
}

/// Memory that transfers can be lent: [`Buffer`] or [`DeviceBuffer`].
pub trait Lend: sealed::Piecewise + fmt::Debug + Send + 'static {}

impl Lend for Buffer {}
impl Lend for DeviceBuffer {}

pub(crate) mod sealed {
    use crate::Piece;

    /// Memory at an address that stays while the owner moves.
    pub trait Piecewise {
        /// All of it.
        fn piece(&mut self) -> Piece;
    }
}

impl sealed::Piecewise for Buffer {
    fn piece(&mut self) -> Piece {
        Piece::host(self.as_mut_ptr().cast_const(), self.len())
    }
}

/// A shard of a block and its memory.
#[derive(Debug)]
#[non_exhaustive]
pub struct BufferItem<B = Buffer> {
    /// The block.
    pub key: Key,
    /// Which of its shards, from 0.
    pub shard: u32,
    /// Its bytes, or the place for them: as long as the shard.
    pub buffer: B,
}

impl<B> BufferItem<B> {
    /// A shard of a block, and its memory.
    pub fn new(key: Key, shard: u32, buffer: B) -> Self {
        Self { key, shard, buffer }
    }
}

/// Buffers that are being loaded or stored.
#[derive(Debug)]
pub struct Transfer<B = Buffer> {
    ticket: Ticket,
    lent: Arc<Lent<B>>,
}

/// Buffers that belong to a transfer until it holds the last reference.
struct Lent<B>(UnsafeCell<Vec<B>>);

// SAFETY: what is inside is reached through `into_inner` alone, by the holder of the last reference; until then the addresses
// that were taken before are all that is used.
unsafe impl<B: Send> Sync for Lent<B> {}

impl<B> fmt::Debug for Lent<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lent")
    }
}

impl<B: Lend> Transfer<B> {
    /// The request.
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// Waits until it has ended and the buffers are free, and gives them back in the order of the items.
    ///
    /// # Errors
    /// [`Error::TimedOut`] if that takes longer: the buffers are freed when it does. As [`Ticket::wait`].
    pub fn wait(self, timeout: Option<Duration>) -> Result<(Completion, Vec<B>)> {
        let Self { ticket, mut lent } = self;
        let start = Instant::now();
        let completion = ticket.wait(timeout)?;
        drop(ticket);
        loop {
            lent = match Arc::try_unwrap(lent) {
                Ok(lent) => return Ok((completion, lent.0.into_inner())),
                Err(lent) => lent,
            };
            let waited = start.elapsed();
            if timeout.is_some_and(|timeout| waited >= timeout) {
                return Err(Error::TimedOut { what: "the release of memory", waited_ms: waited.as_millis() });
            }
            thread::sleep(Duration::from_micros(200));
        }
    }
}

/// How buffers are moved.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TransferOptions {
    /// How many shards each of the blocks has. Stores only.
    pub shards: u32,
    /// Time that it may take. Default: that of the store.
    pub timeout: Option<Duration>,
    /// How long the blocks are kept, at most. Stores only.
    pub ttl: Option<Duration>,
    /// What goes first: see [`Request::priority`].
    pub priority: Option<Priority>,
}

hoistway_io::setters! {
    TransferOptions {
        shards: u32,
        timeout: Option<Duration>,
        ttl: Option<Duration>,
        priority: Option<Priority>,
    }
}

impl Default for TransferOptions {
    fn default() -> Self {
        Self { shards: 1, timeout: None, ttl: None, priority: None }
    }
}

impl Namespace {
    /// Loads shards into buffers.
    ///
    /// # Errors
    /// As [`Namespace::load`].
    pub fn load_buffers<B: Lend>(
        &self,
        items: Vec<BufferItem<B>>,
        options: &TransferOptions,
    ) -> Result<Transfer<B>> {
        let (request, lent) = lend(items, options);
        // SAFETY: the request and the transfer have the buffers, which nothing else can reach until both gave them up.
        let ticket = unsafe { self.load(request)? };
        Ok(Transfer { ticket, lent })
    }

    /// Stores shards of blocks from buffers.
    ///
    /// # Errors
    /// As [`Namespace::store`].
    pub fn store_buffers<B: Lend>(
        &self,
        items: Vec<BufferItem<B>>,
        options: &TransferOptions,
    ) -> Result<Transfer<B>> {
        let (request, lent) = lend(items, options);
        // SAFETY: as in `load_buffers`.
        let ticket = unsafe { self.store(request)? };
        Ok(Transfer { ticket, lent })
    }
}

fn lend<B: Lend>(items: Vec<BufferItem<B>>, options: &TransferOptions) -> (Request, Arc<Lent<B>>) {
    let (names, mut buffers): (Vec<_>, Vec<_>) =
        items.into_iter().map(|BufferItem { key, shard, buffer }| ((key, shard), buffer)).unzip();
    // Addresses are taken where the buffers stay.
    let pieces = buffers.iter_mut().map(sealed::Piecewise::piece);
    let items =
        names.into_iter().zip(pieces).map(|((key, shard), piece)| Item { key, shard, pieces: vec![piece] });
    let items = items.collect();
    let lent = Arc::new(Lent(UnsafeCell::new(buffers)));
    let mut request = Request::new(items, KeepAlive::new(Arc::clone(&lent) as _));
    (request.shards, request.timeout, request.ttl) = (options.shards, options.timeout, options.ttl);
    request.priority = options.priority;
    (request, lent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_as_long_as_asked_for() {
        for len in [0, 1, 4095, 4096, 1 << 20] {
            let mut buffer = Buffer::zeroed(len);
            assert_eq!((buffer.len(), buffer.as_ptr() as usize % ALIGNMENT), (len, 0));
            buffer.fill(7);
            assert!(buffer.iter().all(|&byte| byte == 7));
        }
    }
}
