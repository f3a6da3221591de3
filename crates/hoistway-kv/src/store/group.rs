//! The items of a request by block, checked.
#![forbid(unsafe_code)]

use crate::{
    Error, Fingerprint, Item, Key, NamespaceId, Piece, Result, Status, format::MAX_SHARDS, io::Part,
    layout::BlockPlace, ticket::Settled,
};
use std::{collections::HashMap, mem};

/// The items of one block.
pub(crate) struct Group {
    pub(crate) key: Key,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) items: Vec<GroupItem>,
}

/// One item, of which all lengths are known to add up.
pub(crate) struct GroupItem {
    /// Its number in the request.
    pub(crate) item: usize,
    pub(crate) shard: u32,
    pub(crate) len: u64,
    pub(crate) pieces: Vec<Piece>,
}

impl Group {
    pub(crate) fn len_bytes(&self) -> u64 {
        self.items.iter().fold(0, |sum, item| sum.saturating_add(item.len))
    }

    fn has(&self, shard: u32) -> bool {
        self.items.iter().any(|item| item.shard == shard)
    }

    /// Ends all its items alike.
    pub(crate) fn settled(&self, status: Status) -> impl Iterator<Item = Settled> {
        self.items.iter().map(move |item| item.settled(status))
    }
}

impl GroupItem {
    /// It has ended without bytes.
    pub(crate) fn settled(&self, status: Status) -> Settled {
        Settled { item: self.item, status, bytes: 0 }
    }

    /// Where its bytes are in a file, with its pieces, which it has no more then; `None` if the place cannot have them.
    pub(crate) fn take_part(&mut self, place: &BlockPlace) -> Option<Part> {
        let offset = place.stride.checked_mul(u64::from(self.shard))?.checked_add(place.payload)?;
        let is_there = self.shard < place.shards && self.len <= place.stride;
        (is_there && offset.checked_add(place.stride).is_some()).then(|| Part {
            offset,
            pieces: mem::take(&mut self.pieces),
            len: self.len,
        })
    }
}

/// Items by block, in the order of the first item of each. Who asks for a shard twice gets another group for that.
///
/// # Errors
/// [`Error::InvalidRequest`] if an item makes no sense.
pub(crate) fn group(namespace: NamespaceId, items: Vec<Item>) -> Result<Vec<Group>> {
    let mut groups: Vec<Group> = Vec::with_capacity(items.len());
    let mut places: HashMap<Fingerprint, usize> = HashMap::with_capacity(items.len());
    for (number, Item { key, shard, pieces }) in items.into_iter().enumerate() {
        let len = checked_len(number, &key, shard, &pieces)?;
        let item = GroupItem { item: number, shard, len, pieces };
        if let Some(last) = groups.last_mut().filter(|last| last.key == key && !last.has(shard)) {
            last.items.push(item);
            continue;
        }
        let fingerprint = Fingerprint::of(namespace, key.as_bytes());
        match places.get(&fingerprint) {
            Some(place) if groups[*place].key == key && !groups[*place].has(shard) => {
                groups[*place].items.push(item);
            }
            _ => {
                places.insert(fingerprint, groups.len());
                groups.push(Group { key, fingerprint, items: vec![item] });
            }
        }
    }
    Ok(groups)
}

fn checked_len(number: usize, key: &Key, shard: u32, pieces: &[Piece]) -> Result<u64> {
    let invalid = |what: String| Err(Error::InvalidRequest(format!("item {number} (key {key}): {what}")));
    if shard >= MAX_SHARDS {
        return invalid(format!(
            "there is no shard {shard}: blocks have at most {MAX_SHARDS}, counted from 0"
        ));
    }
    let mut len = 0_u64;
    for piece in pieces {
        if piece.address == 0 || piece.len == 0 {
            return invalid(format!(
                "a piece of {} bytes at address {:#x} is no memory",
                piece.len, piece.address
            ));
        }
        let end = piece.address.checked_add(piece.len).filter(|end| *end <= i64::MAX as u64);
        match (end, len.checked_add(piece.len)) {
            (Some(_), Some(sum)) => len = sum,
            _ => {
                return invalid(format!(
                    "a piece of {} bytes at address {:#x} is no memory",
                    piece.len, piece.address
                ));
            }
        }
    }
    if len == 0 || len > i64::MAX as u64 {
        return invalid(format!("{len} bytes"));
    }
    Ok(len)
}
