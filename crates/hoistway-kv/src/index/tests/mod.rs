//! Tests of the index as a whole.
#![forbid(unsafe_code)]

mod behaviour;
mod measure;
mod model;
mod threads;

use super::{Entry, Slot};
use crate::Fingerprint;

/// A fingerprint that looks like a real one.
fn fingerprint(number: u64) -> Fingerprint {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&blake3::hash(&number.to_le_bytes()).as_bytes()[..16]);
    Fingerprint(bytes)
}

/// An own block of one slot of 64 KiB.
fn block(number: u64) -> Entry {
    Entry {
        owner: 0,
        namespace: 0,
        class: 0,
        flags: 0,
        slot: Slot { segment: (number / 1024) as u32, slot: (number % 1024) as u32 },
        slot_bytes: 64 << 10,
        payload_len: 60 << 10,
        sequence: number,
        expires: 0,
    }
}
