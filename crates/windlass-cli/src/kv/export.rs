//! `windlass kv export`.

use super::{
    archive::{Block, Writer},
    arguments,
    opened::for_each_block,
};
use crate::{failure::Failure, output};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufWriter, IsTerminal, Write},
    ops::ControlFlow,
    path::Path,
    time::UNIX_EPOCH,
};
use windlass_kv::{
    BlockEntry, Buffer, BufferItem, Error, Namespace, NamespaceId, Status, Store, TransferOptions,
};

pub(super) fn run(arguments: &arguments::Export) -> Result<(), Failure> {
    let store = arguments.root.read()?;
    let mut wanted: BTreeMap<NamespaceId, String> = store.namespaces()?.into_iter().collect();
    for id in &arguments.namespace {
        // Fails if it is not there.
        store.existing_namespace(*id)?;
    }
    if !arguments.namespace.is_empty() {
        wanted.retain(|id, _| arguments.namespace.contains(id));
    }
    let mut blocks = BTreeMap::<NamespaceId, Vec<BlockEntry>>::new();
    for_each_block(&store, |block| {
        if wanted.contains_key(&block.namespace) {
            blocks.entry(block.namespace).or_default().push(block);
        }
        Ok(ControlFlow::Continue(()))
    })?;
    let total = blocks.values().flatten().map(|block| block.payload_bytes).sum();
    let bar = output::progress_bar(total);
    let mut writer = Writer::new(opened(&arguments.output)?);
    let mut lost = Vec::new();
    for (id, description) in &wanted {
        let namespace = store.existing_namespace(*id)?;
        writer.namespace(*id, description).map_err(Failure::output)?;
        for entry in blocks.remove(id).unwrap_or_default() {
            if let Err(reason) = exported(&store, &namespace, &entry, &mut writer)? {
                lost.push(reason);
            }
            bar.inc(entry.payload_bytes);
        }
    }
    bar.finish_and_clear();
    writer.finish().map_err(Failure::output)?;
    if lost.is_empty() {
        return Ok(());
    }
    let count = lost.len();
    let noun = if count == 1 { "block is" } else { "blocks are" };
    lost.push(format!("{count} {noun} not in the archive"));
    Err(Failure::Different(lost))
}

fn opened(path: &Path) -> Result<Box<dyn Write>, Failure> {
    if path != Path::new("-") {
        let file = File::create(path).map_err(Failure::output)?;
        return Ok(Box::new(BufWriter::with_capacity(1 << 20, file)));
    }
    if io::stdout().is_terminal() {
        return Err(Failure::told("an archive is not for a terminal: name a file by --output", 2));
    }
    Ok(Box::new(BufWriter::with_capacity(1 << 20, io::stdout())))
}

/// Writes one block, or says why it could not be had. Blocks that went meanwhile are nothing to say.
fn exported<W: Write>(
    store: &Store,
    namespace: &Namespace,
    entry: &BlockEntry,
    writer: &mut Writer<W>,
) -> Result<Result<(), String>, Failure> {
    let described = match store.key_of(entry.fingerprint) {
        Ok(Some(key)) => namespace.block(key.as_bytes()).map(|info| info.map(|info| (key, info))),
        Ok(None) => Ok(None),
        Err(error) => Err(error),
    };
    let (key, info) = match described {
        Ok(Some(described)) => described,
        Ok(None) => return Ok(Ok(())),
        Err(error @ Error::DamagedBlock { .. }) => return Ok(Err(error.to_string())),
        Err(error) => return Err(error.into()),
    };
    let mut items = Vec::new();
    for (shard, described) in (0..).zip(&info.shards) {
        let len =
            usize::try_from(described.len).map_err(|_| Failure::told("a shard does not fit memory", 7))?;
        items.push(BufferItem::new(key.clone(), shard, Buffer::zeroed(len)));
    }
    let (completion, buffers) = namespace.load_buffers(items, &TransferOptions::default())?.wait(None)?;
    match completion.items.iter().find(|status| !status.is_ok()) {
        None => {}
        Some(Status::Miss | Status::Expired) => return Ok(Ok(())),
        Some(status) => return Ok(Err(format!("block {key} of namespace {}: {status}", namespace.id()))),
    }
    let since_1970 = entry.expires.and_then(|expires| expires.duration_since(UNIX_EPOCH).ok());
    let block = Block::new(&key, &info, since_1970.map(|duration| duration.as_secs()));
    writer.block(namespace.id(), &block, buffers.iter().map(|buffer| &**buffer)).map_err(Failure::output)?;
    Ok(Ok(()))
}
