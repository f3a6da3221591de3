//! `windlass kv import`.

use super::{
    archive::{self, Block, Part, Problem},
    arguments,
};
use crate::{failure::Failure, output};
use bytesize::ByteSize;
use serde::Serialize;
use std::{
    collections::VecDeque,
    fs::File,
    io::{self, BufReader, Read},
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use windlass::counted;
use windlass_kv::{
    Buffer, BufferItem, Error, Namespace, NamespaceOptions, Status, Store, StoreOptions, Transfer,
    TransferOptions,
};

/// Blocks that are being stored while the next ones are read.
const IN_FLIGHT: usize = 16;

/// What was done.
#[derive(Debug, Default, Serialize)]
struct Imported {
    blocks: u64,
    bytes: u64,
    /// Blocks that the store had already.
    existed: u64,
    /// Blocks whose time is over.
    expired: u64,
    /// Blocks that the store did not take, by reason.
    refused: Vec<String>,
}

pub(super) fn run(arguments: &arguments::Import) -> Result<(), Failure> {
    let input = opened(&arguments.input)?;
    let mut options = StoreOptions::new(&arguments.root.root);
    options.capacity_bytes = Some(arguments.capacity);
    let mut import = Import {
        most_bytes: options.max_in_flight_bytes,
        namespace: None,
        under_way: VecDeque::new(),
        bytes_under_way: 0,
        done: Imported::default(),
    };
    let store = Store::open(options)?;
    let outcome = archive::read(input, |part| match part {
        Part::Namespace(id, description) => {
            import.namespace =
                Some(store.described_namespace(id, &description, NamespaceOptions::default())?);
            Ok(())
        }
        Part::Block(block, shards) => import.block(&block, shards),
    });
    while !import.under_way.is_empty() {
        import.end_one()?;
    }
    let done = import.done;
    store.close(None)?;
    outcome?;
    let written =
        if arguments.json { output::write_json(&done) } else { output::write_text(&done.as_text()) };
    if done.refused.is_empty() { written } else { Err(Failure::told(done.refusals(), 1)) }
}

fn opened(path: &Path) -> Result<Box<dyn Read>, Failure> {
    if path == Path::new("-") {
        return Ok(Box::new(BufReader::with_capacity(1 << 20, io::stdin())));
    }
    let file = File::open(path).map_err(|source| {
        let code = if source.kind() == io::ErrorKind::NotFound { 3 } else { 5 };
        Failure::told(format!("opening {}: {source}", path.display()), code)
    })?;
    Ok(Box::new(BufReader::with_capacity(1 << 20, file)))
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        match problem {
            // What the system did not say is about the bytes.
            Problem::Unreadable(error) if error.raw_os_error().is_none() => {
                Self::told(format!("this is no archive, or it is not whole: {error}"), 4)
            }
            Problem::Unreadable(error) => Self::told(format!("reading the archive: {error}"), 5),
            Problem::Wrong(sentence) => Self::told(sentence, 4),
        }
    }
}

struct Import {
    /// Of blocks that are being stored: the store refuses what is above.
    most_bytes: u64,
    namespace: Option<Namespace>,
    under_way: VecDeque<UnderWay>,
    bytes_under_way: u64,
    done: Imported,
}

/// A block that is being stored.
struct UnderWay {
    key: String,
    bytes: u64,
    transfer: Transfer,
}

impl Import {
    fn block(&mut self, block: &Block, shards: Vec<Vec<u8>>) -> Result<(), Failure> {
        let (Some(namespace), Some(key)) = (&self.namespace, block.key()) else {
            return Err(Error::Internal("a block without a namespace or a key".into()).into());
        };
        let ttl = match block.expires.map(left_until) {
            Some(None) => {
                self.done.expired += 1;
                return Ok(());
            }
            left => left.flatten(),
        };
        let items = (0..).zip(shards).map(|(shard, bytes)| {
            let mut buffer = Buffer::zeroed(bytes.len());
            buffer.copy_from_slice(&bytes);
            BufferItem::new(key.clone(), shard, buffer)
        });
        let mut options = TransferOptions::default();
        options.shards = u32::try_from(block.shards.len()).unwrap_or(u32::MAX);
        options.ttl = ttl;
        let items: Vec<_> = items.collect();
        let namespace = namespace.clone();
        let bytes = items.iter().fold(0, |sum, item| item.buffer.len() as u64 + sum);
        while !self.under_way.is_empty()
            && (self.under_way.len() >= IN_FLIGHT || self.bytes_under_way + bytes > self.most_bytes)
        {
            self.end_one()?;
        }
        let transfer = namespace.store_buffers(items, &options)?;
        self.bytes_under_way += bytes;
        self.under_way.push_back(UnderWay { key: key.to_string(), bytes, transfer });
        Ok(())
    }

    fn end_one(&mut self) -> Result<(), Failure> {
        let Some(UnderWay { key, bytes, transfer }) = self.under_way.pop_front() else { return Ok(()) };
        let (completion, _) = transfer.wait(None)?;
        self.bytes_under_way -= bytes;
        if completion.items.contains(&Status::Exists) {
            self.done.existed += 1;
        } else if let Some(status) = completion.items.iter().find(|status| !status.is_ok()) {
            self.done.refused.push(format!("block {key}: {status}"));
        } else {
            self.done.blocks += 1;
            self.done.bytes += completion.bytes;
        }
        Ok(())
    }
}

/// Time until a second since 1970; `None` if it is over.
fn left_until(expires: u64) -> Option<Duration> {
    UNIX_EPOCH.checked_add(Duration::from_secs(expires))?.duration_since(SystemTime::now()).ok()
}

impl Imported {
    fn as_text(&self) -> String {
        let mut text =
            format!("{} stored, {}", counted(self.blocks, "block", "blocks"), ByteSize(self.bytes));
        for (count, what) in [(self.existed, "were there already"), (self.expired, "had expired")] {
            if count > 0 {
                text += &format!("; {count} {what}");
            }
        }
        text
    }

    fn refusals(&self) -> String {
        let first = self.refused.first().map_or("", String::as_str);
        format!("{}; {} were not taken, the first: {first}", self.as_text(), self.refused.len())
    }
}
