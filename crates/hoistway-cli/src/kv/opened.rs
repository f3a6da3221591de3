//! Stores, opened as the commands need them, and what they have in common.

use super::arguments::Root;
use hoistway_kv::{BlockEntry, NamespaceId, Result, Store, StoreAccess, StoreOptions};
use serde_json::Value;
use std::{collections::BTreeMap, ops::ControlFlow};

/// Blocks in one page of a listing.
const PAGE: usize = 4096;

impl Root {
    /// The store, to look at.
    pub(super) fn read(&self) -> Result<Store> {
        let mut options = StoreOptions::new(&self.root);
        options.access = StoreAccess::Read;
        Store::open(options)
    }

    /// The store, to change what is there; nothing is added to it. Files of a process that ended are taken over.
    /// Segments above `size` are given up.
    pub(super) fn tend(&self, size: Option<u64>) -> Result<Store> {
        // Makes sure that there is a store: opening one for writing would make it.
        drop(self.read()?);
        let mut options = StoreOptions::new(&self.root);
        options.capacity_bytes = Some(size.unwrap_or(i64::MAX.unsigned_abs()));
        // Nothing has to go because others have filled the disk.
        options.min_free_bytes = 0;
        options.for_upkeep = true;
        Store::open(options)
    }
}

/// Calls `each` for every block that is found.
pub(super) fn for_each_block(
    store: &Store,
    mut each: impl FnMut(BlockEntry) -> Result<ControlFlow<()>>,
) -> Result<()> {
    let mut cursor = Some(0);
    while let Some(at) = cursor {
        let page = store.list(at, PAGE)?;
        for block in page.blocks {
            if each(block)?.is_break() {
                return Ok(());
            }
        }
        cursor = page.next;
    }
    Ok(())
}

/// What a namespace holds.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub(super) struct Holding {
    /// `null` if blocks of it are there, but it was never described.
    pub(super) description: Option<Value>,
    pub(super) blocks: u64,
    pub(super) payload_bytes: u64,
}

/// What each namespace holds.
pub(super) fn holdings(store: &Store) -> Result<BTreeMap<NamespaceId, Holding>> {
    let mut holdings = BTreeMap::<NamespaceId, Holding>::new();
    for (id, description) in store.namespaces()? {
        // What is no JSON is shown as the text that it is.
        let description = serde_json::from_str(&description).unwrap_or(Value::String(description));
        holdings.entry(id).or_default().description = Some(description);
    }
    for_each_block(store, |block| {
        let holding = holdings.entry(block.namespace).or_default();
        holding.blocks += 1;
        holding.payload_bytes += block.payload_bytes;
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(holdings)
}

/// A namespace's description in few words: what is not empty.
pub(super) fn summary(description: Option<&Value>) -> String {
    let Some(Value::Object(fields)) = description else { return String::new() };
    let first = ["model", "dtype"].into_iter().filter_map(|name| fields.get_key_value(name));
    let others = fields.iter().filter(|(name, _)| *name != "model" && *name != "dtype");
    let shown = first.chain(others).filter_map(|(name, value)| match value {
        Value::String(text) if text.is_empty() => None,
        Value::String(text) if name == "model" || name == "dtype" => Some(text.clone()),
        Value::String(_) if name == "salt" => Some("salted".into()),
        Value::String(text) => Some(format!("{name} {text}")),
        Value::Number(number) if number.as_u64() == Some(0) => None,
        Value::Number(number) => Some(format!("{name} {number}")),
        Value::Object(rank) => match (rank.get("rank"), rank.get("size")) {
            (Some(rank), Some(size)) => Some(format!("{name} {rank} of {size}")),
            _ => {
                let pairs: Vec<_> = rank
                    .iter()
                    .map(|(key, value)| format!("{key} {}", value.as_str().unwrap_or_default()))
                    .collect();
                (!pairs.is_empty()).then(|| pairs.join(", "))
            }
        },
        _ => None,
    });
    shown.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use hoistway_kv::{NamespaceDescription, Rank};

    #[test]
    fn a_summary_has_what_is_not_empty() {
        let description = NamespaceDescription::default()
            .model("llama@1")
            .block_tokens(16)
            .tensor_parallel(Rank { rank: 1, size: 2 })
            .salt("s")
            .other([("lora".to_owned(), "x".to_owned())].into());
        let description = serde_json::from_str(&description.to_json().unwrap()).unwrap();
        let shown = summary(Some(&description));
        for part in ["llama@1", "block_tokens 16", "tensor_parallel 1 of 2", "salted", "lora x"] {
            assert!(shown.split(", ").any(|given| given == part), "{part}: {shown}");
        }
        assert!(!shown.contains("layers") && !shown.contains("context_parallel"), "{shown}");
    }
}
