//! Keys, pieces of memory and items, as C lays them out.
#![allow(unsafe_code)]

use crate::{
    HOISTWAY_TARGET_CUDA, HOISTWAY_TARGET_HOST, HOISTWAY_TARGET_ROCM,
    read::device_of,
    status::Failure,
    versioned::{self, Versioned},
};
use ::hoistway_kv::{Item, Key, Piece};
use hoistway::DeviceId;
use std::{ffi::c_void, marker::PhantomData, slice};

/// The name of a block in its namespace: 1 to 1024 bytes of any value. This structure never grows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_kv_key {
    /// The bytes.
    pub bytes: *const c_void,
    /// Number of bytes.
    pub length: u64,
}

/// A piece of the caller's memory. This structure never grows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_kv_piece {
    /// Host memory, or a device pointer.
    pub address: *mut c_void,
    /// Length of the piece in bytes.
    pub length: u64,
    /// `HOISTWAY_TARGET_HOST`, `HOISTWAY_TARGET_CUDA` or `HOISTWAY_TARGET_ROCM`.
    pub target: i32,
    /// Number of the device, for device memory.
    pub device: i32,
}

/// A shard of a block, and the memory to load it to or to store it from.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_kv_item {
    /// `sizeof(hoistway_kv_item)`, the same for all items of a request.
    pub size: u64,
    /// Key of the block.
    pub key: hoistway_kv_key,
    /// The memory, in the order of the bytes of the shard. The lengths of the pieces add up to the length of the
    /// shard.
    pub pieces: *const hoistway_kv_piece,
    /// Number of pieces.
    pub piece_count: u64,
    /// Number of the shard in the block, counted from 0.
    pub shard: u32,
    /// Must be 0.
    pub reserved: u32,
}

// SAFETY: numbers and pointers, of which the first is the size.
unsafe impl Versioned for hoistway_kv_item {
    const NAME: &str = "hoistway_kv_item";
    const FIRST_SIZE: usize = 48;
}

/// A key that is readable for `'a`.
#[repr(transparent)]
pub(super) struct BorrowedKey<'a>(hoistway_kv_key, PhantomData<&'a [u8]>);

impl AsRef<[u8]> for BorrowedKey<'_> {
    fn as_ref(&self) -> &[u8] {
        let hoistway_kv_key { bytes, length } = self.0;
        match usize::try_from(length) {
            // One byte more than a key has is enough to be refused, and what is not memory is not looked at.
            // SAFETY: readable: `borrow_keys` and `borrow_items` require it.
            Ok(length) if !bytes.is_null() => unsafe {
                slice::from_raw_parts(bytes.cast(), length.min(Key::MAX_LEN + 1))
            },
            _ => &[],
        }
    }
}

/// The caller's keys, where they are.
///
/// # Safety
/// `keys` must be `count` keys that are readable for `'a`.
pub(super) unsafe fn borrow_keys<'a>(
    keys: *const hoistway_kv_key,
    count: u64,
) -> Result<&'a [BorrowedKey<'a>], Failure> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        // SAFETY: as the caller says; a `BorrowedKey` is laid out as its key.
        Ok(count) if !keys.is_null() => Ok(unsafe { slice::from_raw_parts(keys.cast(), count) }),
        _ => Err(Failure::argument("the list of keys is NULL or too long")),
    }
}

/// The caller's items.
///
/// # Safety
/// `first` must be `count` items as their size says, with keys and pieces that are readable.
pub(super) unsafe fn borrow_items(first: *const hoistway_kv_item, count: u64) -> Result<Vec<Item>, Failure> {
    let make = |item: &hoistway_kv_item, index: usize| {
        let wrong = |what: &str| Failure::argument(format!("item {index}: {what}"));
        if item.reserved != 0 {
            return Err(wrong("its member 'reserved' is not 0"));
        }
        let pieces = match usize::try_from(item.piece_count) {
            Ok(0) => &[],
            // SAFETY: as the caller says.
            Ok(count) if !item.pieces.is_null() => unsafe { slice::from_raw_parts(item.pieces, count) },
            _ => return Err(wrong("its list of pieces is NULL or too long")),
        };
        let pieces = pieces.iter().map(hoistway_kv_piece::piece).collect::<Result<_, _>>()?;
        let key = Key::new(BorrowedKey(item.key, PhantomData).as_ref())?;
        Ok(Item::new(key, item.shard, pieces))
    };
    // SAFETY: as the caller says.
    unsafe { versioned::read_all(first, count, make) }
}

impl hoistway_kv_piece {
    pub(super) fn piece(&self) -> Result<Piece, Failure> {
        let address = self.address.expose_provenance() as u64;
        let device = match self.target {
            HOISTWAY_TARGET_HOST => DeviceId::Cpu,
            target @ (HOISTWAY_TARGET_CUDA | HOISTWAY_TARGET_ROCM) => device_of(target, self.device)
                .ok_or_else(|| Failure::argument("the device of a piece is negative"))?,
            other => return Err(Failure::argument(format!("the target {other} of a piece is unknown"))),
        };
        if address == 0 && self.length > 0 {
            return Err(Failure::argument(format!("a piece of {} bytes has the address NULL", self.length)));
        }
        Ok(Piece::new(device, address, self.length))
    }
}
