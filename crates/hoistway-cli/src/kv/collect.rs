//! `hoistway kv gc`.

use super::arguments;
use crate::{failure::Failure, output};
use bytesize::ByteSize;
use hoistway::counted;
use hoistway_kv::Store;
use serde::Serialize;
use std::{thread, time::Duration};

/// Time between two looks at what is left.
const ROUND: Duration = Duration::from_millis(20);
/// Rounds without any change after which no more is expected: a reader may hold the segment of its block for a moment.
const PATIENCE: u32 = 50;

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
    let store = arguments.root.tend(arguments.size)?;
    shrink(&store, arguments.size.unwrap_or(u64::MAX))?;
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
        // The exit status has the verdict also when the reader of the output stops early.
        Some(size) if collected.after_bytes > size => {
            let rest = "those of running processes stay, and so do the files that every store needs";
            let took = ByteSize(collected.after_bytes);
            Err(Failure::told(format!("the files still take {took}: {rest}"), 1))
        }
        _ => written,
    }
}

/// Gives up segments until the files take no more than `size`, or nothing goes any more.
fn shrink(store: &Store, size: u64) -> Result<(), Failure> {
    let mut least = u64::MAX;
    let mut rounds_left = PATIENCE;
    while rounds_left > 0 {
        store.maintain_now()?;
        let taken = store.stats()?.root_bytes;
        if taken <= size {
            return Ok(());
        }
        rounds_left = if taken < least { PATIENCE } else { rounds_left - 1 };
        least = least.min(taken);
        thread::sleep(ROUND);
    }
    Ok(())
}

impl Collected {
    fn as_text(&self) -> String {
        format!(
            "{} expired, {} evicted; the files take {}, and took {}",
            counted(self.expired_blocks, "block", "blocks"),
            self.evicted_blocks,
            ByteSize(self.after_bytes),
            ByteSize(self.before_bytes),
        )
    }
}
