//! `windlass kv gc`.

use super::arguments;
use crate::{failure::Failure, output};
use bytesize::ByteSize;
use serde::Serialize;

/// What was done.
#[derive(Debug, Serialize)]
struct Collected {
    before_bytes: u64,
    after_bytes: u64,
    expired_blocks: u64,
    evicted_blocks: u64,
}

pub(super) fn run(arguments: &arguments::Collect) -> Result<(), Failure> {
    let before = arguments.root.read()?.stats()?;
    let store = arguments.root.tend()?;
    store.maintain_now()?;
    let stats = store.stats()?;
    if let Some(excess) = arguments.size.and_then(|size| stats.root_bytes.checked_sub(size)) {
        store.evict(excess)?;
        store.maintain_now()?;
    }
    let after = store.stats()?;
    store.close(None)?;
    let collected = Collected {
        before_bytes: before.root_bytes,
        after_bytes: after.root_bytes,
        expired_blocks: after.expired_blocks,
        evicted_blocks: after.evicted_blocks,
    };
    let written = if arguments.json {
        output::write_json(&collected)
    } else {
        output::write_text(&collected.as_text())
    };
    match arguments.size {
        // Whoever stops reading early still gets the verdict.
        Some(size) if collected.after_bytes > size => {
            let rest = "processes that run evict their own blocks; pinned ones stay";
            let took = ByteSize(collected.after_bytes);
            Err(Failure::told(format!("the files still take {took}: {rest}"), 1))
        }
        _ => written,
    }
}

impl Collected {
    fn as_text(&self) -> String {
        format!(
            "{} blocks were expired, {} evicted; the files take {}, and took {}",
            self.expired_blocks,
            self.evicted_blocks,
            ByteSize(self.after_bytes),
            ByteSize(self.before_bytes),
        )
    }
}
