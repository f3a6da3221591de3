//! The formats on disk: pure functions between values and bytes. Nothing here trusts a number that it reads.
//!
//! All integers are little-endian. Everything has a CRC-32C of its own, so that what was torn or flipped is not taken.
#![forbid(unsafe_code)]

pub(crate) mod checkpoint;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
pub(crate) mod header;
pub(crate) mod heat;
pub(crate) mod lease;
pub(crate) mod record;
pub(crate) mod segment;
pub(crate) mod superblock;

use std::time::{Duration, SystemTime, UNIX_EPOCH};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, little_endian::U32};

/// The version of most that is written. Another one is refused.
pub(crate) const VERSION: u32 = 1;
/// The version of segments in which blocks lie page by page, and of stores that may have some.
pub(crate) const PAGED_VERSION: u32 = 2;
/// Bytes of what is written and read as one: superblock, heads of files, headers of blocks.
pub(crate) const PAGE: usize = 4096;
/// Bytes of the header of a block.
pub(crate) const HEADER_LEN: usize = PAGE;
/// Multiple of the offsets and lengths of direct reads and writes.
pub(crate) const BLOCK_LEN: u64 = 4096;
/// Shards that a block may have.
pub(crate) const MAX_SHARDS: u32 = 256;

/// Length and checksum of each shard of a block, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ShardTable(pub(crate) Vec<Shard>);

/// Length and checksum of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shard {
    pub(crate) len: u64,
    /// CRC-32C of its bytes; `None` if a device wrote it directly.
    pub(crate) checksum: Option<u32>,
}

/// Why bytes are not what they should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Invalid {
    /// They are something else, or nothing.
    #[error("it does not begin as {what} does")]
    Magic {
        /// The kind of data that was expected.
        what: &'static str,
    },
    #[error("it ends after {len} bytes")]
    Short { len: usize },
    #[error("its format is {found}")]
    Version { found: u32 },
    #[error("its bytes do not match its checksum")]
    Checksum,
    #[error("{0}")]
    Value(&'static str),
}

/// CRC-32C.
pub(crate) fn checksum(bytes: &[u8]) -> u32 {
    // The algorithm has 32 bits; the function answers for those of 64 bits too.
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// The CRC-32C of bytes and of the `second_len` bytes behind them, from that of each.
pub(crate) fn joined_checksum(first: u32, second: u32, second_len: u64) -> u32 {
    let algorithm = crc_fast::CrcAlgorithm::Crc32Iscsi;
    crc_fast::checksum_combine(algorithm, first.into(), second.into(), second_len) as u32
}

/// Bytes before the body of everything that is written by [`sealed`]: what it is, its version, its checksum.
const PREFIX: usize = 16;
/// The offset of the checksum, which covers all bytes after it.
const SUM_AT: usize = 12;

/// `len` bytes that begin as `magic` says and go on with `body` and zeros.
fn sealed(magic: [u8; 8], body: &(impl IntoBytes + Immutable), len: usize) -> Vec<u8> {
    sealed_as(VERSION, magic, body, len)
}

/// As [`sealed`], of another version.
fn sealed_as(version: u32, magic: [u8; 8], body: &(impl IntoBytes + Immutable), len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    bytes[..8].copy_from_slice(&magic);
    bytes[8..SUM_AT].copy_from_slice(&version.to_le_bytes());
    bytes[PREFIX..PREFIX + size_of_val(body)].copy_from_slice(body.as_bytes());
    let sum = checksum(&bytes[PREFIX..]);
    bytes[SUM_AT..PREFIX].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// The body of what [`sealed`] wrote.
fn unseal<'a, Body: FromBytes + Immutable + KnownLayout + Unaligned>(
    bytes: &'a [u8],
    magic: [u8; 8],
    what: &'static str,
    len: usize,
) -> Result<&'a Body, Invalid> {
    unseal_up_to(VERSION, bytes, magic, what, len).map(|(_, body)| body)
}

/// The version and the body of what [`sealed_as`] wrote, if its version is at most `known`.
fn unseal_up_to<'a, Body: FromBytes + Immutable + KnownLayout + Unaligned>(
    known: u32,
    bytes: &'a [u8],
    magic: [u8; 8],
    what: &'static str,
    len: usize,
) -> Result<(u32, &'a Body), Invalid> {
    let short = Invalid::Short { len: bytes.len() };
    let bytes = bytes.get(..len).ok_or(short.clone())?;
    let (prefix, rest) = bytes.split_at_checked(PREFIX).ok_or(short.clone())?;
    if !prefix.starts_with(&magic) {
        return Err(Invalid::Magic { what });
    }
    let numbers = <[U32; 2]>::ref_from_bytes(&prefix[8..]).map_err(|_| short.clone())?;
    let found = numbers[0].get();
    if !(VERSION..=known).contains(&found) {
        return Err(Invalid::Version { found });
    }
    if numbers[1] != checksum(rest) {
        return Err(Invalid::Checksum);
    }
    Ok((found, Body::ref_from_prefix(rest).map_err(|_| short)?.0))
}

/// Seconds since 1970, rounded up, as times of expiry are written; 0 is never. Times before 1970 are the first second.
pub(crate) fn expiry_seconds(expires: Option<SystemTime>) -> u32 {
    let Some(time) = expires else { return 0 };
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since.as_secs().saturating_add(u64::from(since.subsec_nanos() > 0));
    u32::try_from(seconds.max(1)).unwrap_or(u32::MAX)
}

/// The time that [`expiry_seconds`] wrote.
pub(crate) fn expiry_time(seconds: u32) -> Option<SystemTime> {
    (seconds != 0).then(|| UNIX_EPOCH + Duration::from_secs(seconds.into()))
}

/// The wall clock in seconds since 1970; only times of expiry are compared with it.
pub(crate) fn now_seconds() -> u32 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u32::try_from(since.as_secs()).unwrap_or(u32::MAX)
}
