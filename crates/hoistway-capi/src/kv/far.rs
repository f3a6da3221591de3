//! Options of a far tier, as C lays them out.
#![allow(unsafe_code)]

use super::{choose, milliseconds, set};
use crate::{
    status::Failure,
    text,
    versioned::{self, Versioned},
};
use ::hoistway_kv::FarOptions;
use std::ffi::c_char;

/// `hoistway_kv_far_options.flags`: do not store blocks in the near tier when they are loaded from the far tier.
pub const HOISTWAY_KV_NO_PROMOTE: u64 = 1;

/// A far tier: a second store behind the near one, for example on a shared file system. Lookups cover both. A load
/// reads from the far tier what the near tier lacks. A string that is NULL, or a number that is 0, stands for the
/// default; docs/kv/tiers.md explains the options.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_kv_far_options {
    /// `sizeof(hoistway_kv_far_options)`.
    pub size: u64,
    /// Directory of the far tier. It is not created: until it exists, the near tier works alone.
    pub root: *const c_char,
    /// "segments" or "files"; NULL for the layout of the existing store, or "segments" for a new one.
    pub layout: *const c_char,
    /// "none", "batched" or "sync"; NULL for "batched".
    pub durability: *const c_char,
    /// "write_through" or "write_back"; NULL for "write_through".
    pub policy: *const c_char,
    /// Limit in bytes of all files below `root`, of all processes. Required for writing.
    pub capacity_bytes: u64,
    /// Bytes to leave free on the file system; 0 for 1 GiB, 1 for none.
    pub min_free_bytes: u64,
    /// Milliseconds that one operation of the far tier may take; 0 for 5,000.
    pub timeout_ms: u64,
    /// Milliseconds that a lookup waits for a far tier with the layout "files"; 0 for 50.
    pub lookup_timeout_ms: u64,
    /// Limit in bytes of blocks that wait to be written to the far tier; 0 for 1 GiB.
    pub backlog_bytes: u64,
    /// Bytes of host memory for blocks that move between the tiers; 0 for 256 MiB.
    pub staging_bytes: u64,
    /// `HOISTWAY_KV_NO_PROMOTE` or 0.
    pub flags: u64,
}

// SAFETY: numbers and pointers, of which the first is the size.
unsafe impl Versioned for hoistway_kv_far_options {
    const NAME: &str = "hoistway_kv_far_options";
    const FIRST_SIZE: usize = 96;
}

/// # Safety
/// `options` must be NULL or as its size says.
pub(super) unsafe fn far_options(
    options: *const hoistway_kv_far_options,
) -> Result<Option<FarOptions>, Failure> {
    if options.is_null() {
        return Ok(None);
    }
    // SAFETY: readable, as the caller says.
    let options = unsafe { versioned::read(options)? };
    // SAFETY: a string, as the caller says.
    let root = unsafe { text::borrow_path(options.root)? };
    let root = root.ok_or_else(|| Failure::argument("hoistway_kv_far_options.root is NULL"))?;
    let mut chosen = FarOptions::new(root);
    // SAFETY: strings, as the caller says.
    unsafe {
        choose(options.durability, &mut chosen.durability)?;
        choose(options.policy, &mut chosen.policy)?;
        chosen.layout =
            text::borrow(options.layout, "the layout of the far tier")?.map(str::parse).transpose()?;
    }
    chosen.capacity_bytes = set(options.capacity_bytes);
    chosen.min_free_bytes = set(options.min_free_bytes).unwrap_or(chosen.min_free_bytes);
    chosen.timeout = milliseconds(options.timeout_ms).unwrap_or(chosen.timeout);
    chosen.lookup_timeout = milliseconds(options.lookup_timeout_ms).unwrap_or(chosen.lookup_timeout);
    chosen.backlog_bytes = set(options.backlog_bytes).unwrap_or(chosen.backlog_bytes);
    chosen.staging_bytes = set(options.staging_bytes).unwrap_or(chosen.staging_bytes);
    chosen.promote = options.flags & HOISTWAY_KV_NO_PROMOTE == 0;
    match options.flags & !HOISTWAY_KV_NO_PROMOTE {
        0 => Ok(Some(chosen)),
        other => {
            Err(Failure::argument(format!("hoistway_kv_far_options.flags has unknown bits: {other:#x}")))
        }
    }
}
