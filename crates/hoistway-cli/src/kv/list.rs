//! `hoistway kv ls`.

use super::{
    arguments,
    opened::{for_each_block, holdings},
    stat::table,
};
use crate::{failure::Failure, output};
use bytesize::ByteSize;
use hoistway::counted;
use hoistway_kv::{Error, Fingerprint, Namespace, NamespaceId, Result, ShardInfo, Store};
use serde::Serialize;
use std::{collections::BTreeMap, ops::ControlFlow, time::UNIX_EPOCH};

pub(super) fn run(arguments: &arguments::List) -> std::result::Result<(), Failure> {
    let store = arguments.root.read()?;
    match arguments.namespace {
        Some(id) => blocks(&store, id, arguments),
        None => namespaces(&store, arguments),
    }
}

fn namespaces(store: &Store, arguments: &arguments::List) -> std::result::Result<(), Failure> {
    let holdings = holdings(store)?;
    if arguments.json {
        return output::write_json(&BTreeMap::from([("namespaces", holdings)]));
    }
    if !arguments.long {
        return output::write_text(&table(&holdings));
    }
    let described = holdings.iter().map(|(id, holding)| {
        let description = holding.description.as_ref().map(ToString::to_string).unwrap_or_default();
        format!(
            "{id}  {}, {}\n  {description}",
            counted(holding.blocks, "block", "blocks"),
            ByteSize(holding.payload_bytes)
        )
    });
    output::write_text(&described.collect::<Vec<_>>().join("\n"))
}

/// A block as it is shown.
#[derive(Debug, Serialize)]
struct Shown {
    key: String,
    key_hex: String,
    fingerprint: Fingerprint,
    payload_bytes: u64,
    /// In seconds since 1970.
    expires: Option<f64>,
    /// With `--long`.
    #[serde(skip_serializing_if = "Option::is_none")]
    shards: Option<Vec<ShardInfo>>,
}

fn blocks(store: &Store, id: NamespaceId, arguments: &arguments::List) -> std::result::Result<(), Failure> {
    let namespace = store.existing_namespace(id)?;
    let mut listed = Vec::new();
    for_each_block(store, |entry| {
        if entry.namespace == id
            // Else it went meanwhile, or is damaged.
            && let Some(key) = known(store.key_of(entry.fingerprint))?
        {
            let shards = if arguments.long { shards(&namespace, key.as_bytes())? } else { None };
            let key_hex = key.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
            let since_1970 = entry.expires.and_then(|expires| expires.duration_since(UNIX_EPOCH).ok());
            listed.push(Shown {
                key: key.to_string(),
                key_hex,
                fingerprint: entry.fingerprint,
                payload_bytes: entry.payload_bytes,
                expires: since_1970.map(|duration| duration.as_secs_f64()),
                shards,
            });
        }
        Ok(ControlFlow::Continue(()))
    })?;
    listed.sort_by(|one, other| one.key_hex.cmp(&other.key_hex));
    if arguments.json {
        return output::write_json(&BTreeMap::from([("blocks", listed)]));
    }
    let now = UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
    let line = |shown: &Shown| if arguments.long { long(shown, now) } else { shown.key.clone() };
    output::write_text(&listed.iter().map(line).collect::<Vec<_>>().join("\n"))
}

fn shards(namespace: &Namespace, key: &[u8]) -> Result<Option<Vec<ShardInfo>>> {
    Ok(known(namespace.block(key))?.map(|info| info.shards))
}

/// A damaged block is as one that is not there: `verify` looks for those.
fn known<T>(answer: Result<Option<T>>) -> Result<Option<T>> {
    match answer {
        Err(Error::DamagedBlock { .. }) => Ok(None),
        answer => answer,
    }
}

fn long(shown: &Shown, now: f64) -> String {
    let shards = shown.shards.as_deref().unwrap_or_default();
    let checked = shards.iter().filter(|shard| shard.checksum.is_some()).count();
    let of_shards = match (shards.len(), checked) {
        (1, 1) => "checksum".to_owned(),
        (1, _) => "no checksum".to_owned(),
        (count, checked) => format!("{count} shards, {}", counted(checked, "checksum", "checksums")),
    };
    let expires = match shown.expires.map(|expires| expires - now) {
        Some(left) if left > 0.0 => format!(", expires in {left:.0} s"),
        Some(_) => ", expired".to_owned(),
        None => String::new(),
    };
    let size = ByteSize(shown.payload_bytes).to_string();
    format!("{size:>10}  {}  ({of_shards}{expires})", output::printable(&shown.key))
}
