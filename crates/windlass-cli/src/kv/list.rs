//! `windlass kv ls`.

use super::{
    archive::to_hex,
    arguments,
    opened::{for_each_block, holdings},
    stat::table,
};
use crate::{failure::Failure, output};
use bytesize::ByteSize;
use serde::Serialize;
use std::{ops::ControlFlow, time::SystemTime};
use windlass_kv::{BlockEntry, Namespace, NamespaceId, Owner, ShardInfo, Store};

pub(super) fn run(arguments: &arguments::List) -> Result<(), Failure> {
    let store = arguments.root.read()?;
    match arguments.namespace {
        Some(id) => blocks(&store, id, arguments),
        None => namespaces(&store, arguments),
    }
}

fn namespaces(store: &Store, arguments: &arguments::List) -> Result<(), Failure> {
    let holdings = holdings(store)?;
    if arguments.json {
        return output::write_json(&holdings);
    }
    if !arguments.long {
        return output::write_text(&table(&holdings));
    }
    let described = holdings.iter().map(|(id, holding)| {
        let description = holding.description.as_ref().map(ToString::to_string).unwrap_or_default();
        format!("{id}  {} blocks, {}\n  {description}", holding.blocks, ByteSize(holding.payload_bytes))
    });
    output::write_text(&described.collect::<Vec<_>>().join("\n"))
}

/// A block as it is shown.
#[derive(Debug, Serialize)]
struct Shown {
    key: String,
    key_hex: String,
    #[serde(flatten)]
    entry: BlockEntry,
    /// With `--long`.
    #[serde(skip_serializing_if = "Option::is_none")]
    shards: Option<Vec<ShardInfo>>,
}

fn blocks(store: &Store, id: NamespaceId, arguments: &arguments::List) -> Result<(), Failure> {
    let namespace = store.existing_namespace(id)?;
    let mut listed = Vec::new();
    for_each_block(store, |entry| {
        if entry.namespace == id
            // Else it went meanwhile.
            && let Some(key) = store.key_of(entry.fingerprint)?
        {
            let shards = if arguments.long { shards(&namespace, key.as_bytes())? } else { None };
            let key_hex = to_hex(key.as_bytes());
            listed.push(Shown { key: key.to_string(), key_hex, entry, shards });
        }
        Ok(ControlFlow::Continue(()))
    })?;
    listed.sort_by(|one, other| one.key_hex.cmp(&other.key_hex));
    if arguments.json {
        return output::write_json(&listed);
    }
    let now = SystemTime::now();
    let line = |shown: &Shown| if arguments.long { long(shown, now) } else { shown.key.clone() };
    output::write_text(&listed.iter().map(line).collect::<Vec<_>>().join("\n"))
}

fn shards(namespace: &Namespace, key: &[u8]) -> windlass_kv::Result<Option<Vec<ShardInfo>>> {
    Ok(namespace.block(key)?.map(|info| info.shards))
}

fn long(shown: &Shown, now: SystemTime) -> String {
    let shards = shown.shards.as_deref().unwrap_or_default();
    let checked = shards.iter().filter(|shard| shard.checksum.is_some()).count();
    let of_shards = match (shards.len(), checked) {
        (1, 1) => "checksum".to_owned(),
        (1, _) => "no checksum".to_owned(),
        (count, checked) => format!("{count} shards, {checked} checksums"),
    };
    let owner = match shown.entry.owner {
        Owner::This => "",
        Owner::Other => ", of a process that runs",
    };
    let expires = match shown.entry.expires.map(|expires| expires.duration_since(now)) {
        Some(Ok(left)) => format!(", expires in {} s", left.as_secs()),
        Some(Err(_)) => ", expired".to_owned(),
        None => String::new(),
    };
    let size = ByteSize(shown.entry.payload_bytes).to_string();
    format!("{size:>10}  {}  ({of_shards}{owner}{expires})", output::printable(&shown.key))
}
