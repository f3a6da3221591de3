//! Uploads of Azure: blocks have names, and a list of these writes the blob. The store drops blocks that are in no list after a week.

use crate::location::{Target, encoded_value};
use base64::{Engine, engine::general_purpose::STANDARD};
use std::{
    hash::{BuildHasher, RandomState},
    process,
    sync::atomic::{AtomicU64, Ordering},
    time::SystemTime,
};

/// Longest list of a blob's blocks that is read.
pub(super) const MAX_LIST_BYTES: usize = 4 << 20;

/// What the names of an upload's blocks begin with, and those of no other. They tell after a lost answer whose blob is there, so
/// they come from the system's randomness; a child of `fork` has another number.
pub(super) fn new_id() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let own = (process::id(), SystemTime::now(), COUNT.fetch_add(1, Ordering::Relaxed));
    format!("hoistway{:016x}", RandomState::new().hash_one(own))
}

/// The name of a block. Those of a blob have one length, as the store demands.
fn name(id: &str, number: u64) -> String {
    STANDARD.encode(format!("{id}{number:06}"))
}

/// Where a block is sent.
pub(super) fn block_target(blob: &Target, id: &str, number: u64) -> Target {
    Target(format!("{}?blockid={}&comp=block", blob.0, encoded_value(&name(id, number))))
}

/// Where the list of a blob's blocks is sent.
pub(super) fn list_target(blob: &Target) -> Target {
    Target(format!("{}?comp=blocklist", blob.0))
}

/// Where the list of the blocks is asked for that a blob is made of.
pub(super) fn committed_target(blob: &Target) -> Target {
    Target(format!("{}?blocklisttype=committed&comp=blocklist", blob.0))
}

/// The list of so many blocks. A blob that a request wrote whose answer was lost is written again by the same list.
pub(super) fn list_text(id: &str, count: u64) -> String {
    let blocks: String = (0..count).map(|number| format!("<Latest>{}</Latest>", name(id, number))).collect();
    format!("<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList>{blocks}</BlockList>")
}

/// Whether a list of the store has these blocks and no others.
pub(super) fn are_listed(list: &[u8], id: &str, count: u64) -> bool {
    let text = String::from_utf8_lossy(list);
    let names = text.split("<Name>").skip(1).map(|rest| rest.split_once("</Name>").map(|(name, _)| name));
    let expected: Vec<_> = (0..count).map(|number| name(id, number)).collect();
    names.eq(expected.iter().map(|name| Some(&**name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_uploads_do_not_repeat_with_the_seed_of_other_random_numbers() {
        let seeded = || {
            fastrand::seed(5);
            new_id()
        };
        assert_ne!(seeded(), seeded());
    }

    #[test]
    fn a_blob_is_that_of_an_upload_if_it_has_its_blocks_in_order() {
        let list = |names: &[String]| {
            let blocks: String = names
                .iter()
                .map(|name| format!("<Block><Name>{name}</Name><Size>8</Size></Block>"))
                .collect();
            format!("\u{feff}<BlockList><CommittedBlocks>{blocks}</CommittedBlocks></BlockList>").into_bytes()
        };
        let (id, other) = (new_id(), new_id());
        assert_ne!(id, other);
        let own: Vec<_> = (0..3).map(|number| name(&id, number)).collect();
        assert!(are_listed(&list(&own), &id, 3));
        assert!(!are_listed(&list(&own[..2]), &id, 3) && !are_listed(&list(&own), &id, 2));
        assert!(!are_listed(&list(&own), &other, 3) && !are_listed(&list(&[]), &id, 3));
        let turned: Vec<_> = own.iter().rev().cloned().collect();
        assert!(!are_listed(&list(&turned), &id, 3));
        assert!((0..10_000).all(|number| name(&id, number).len() == own[0].len()));
    }
}
