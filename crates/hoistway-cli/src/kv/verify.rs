//! `hoistway kv verify`.

use super::arguments;
use crate::{failure::Failure, output};
use bytesize::ByteSize;
use hoistway::counted;
use hoistway_kv::{Event, EventKind, Verified};
use std::ops::ControlFlow;

pub(super) fn run(arguments: &arguments::Verify) -> Result<(), Failure> {
    let store = if arguments.repair { arguments.root.tend(None)? } else { arguments.root.read()? };
    let bar = output::progress_bar(store.stats()?.payload_bytes);
    let mut events = Vec::new();
    let verified = store.verify(|so_far| {
        bar.set_position(so_far.bytes);
        // Fetched as they come: the store remembers only so many.
        events.extend(store.events().into_iter().filter(is_of_a_block));
        ControlFlow::Continue(())
    });
    bar.finish_and_clear();
    let verified = verified?;
    events.extend(store.events().into_iter().filter(is_of_a_block));
    store.close(None)?;
    // Blocks of processes that run are theirs to remove.
    let left = if arguments.repair { verified.corrupt_of_others } else { verified.corrupt };
    let removed = verified.corrupt - left;
    let mut lines: Vec<String> = events.iter().map(described).collect();
    let written = if arguments.json {
        output::write_json(&serde_json::json!({ "verified": verified, "events": events }))
    } else {
        let mut text = as_text(&verified);
        if removed > 0 {
            text += &format!("; {} damaged and removed", counted(removed, "block", "blocks"));
        }
        if left == 0 && verified.failed == 0 {
            text = [lines.as_slice(), &[text]].concat().join("\n");
        }
        output::write_text(&text)
    };
    // The exit status has the verdict also when the reader of the output stops early.
    if left == 0 && verified.failed == 0 {
        return written;
    }
    if left > 0 {
        let outcome = if arguments.repair {
            "damaged and kept: only the running process that stored them can remove them"
        } else {
            "damaged; --repair removes them"
        };
        lines.push(format!("{} {outcome}", counted(left, "block", "blocks")));
    }
    if verified.failed > 0 {
        lines.push(format!("{} could not be read", counted(verified.failed, "block", "blocks")));
    }
    Err(Failure::Different(lines))
}

fn is_of_a_block(event: &Event) -> bool {
    matches!(event.kind, EventKind::CorruptBlock | EventKind::LoadFailed)
}

fn described(event: &Event) -> String {
    match (&event.namespace, &event.key) {
        (Some(namespace), Some(key)) => format!("block {key} of namespace {namespace}: {}", event.reason),
        _ => event.reason.clone(),
    }
}

fn as_text(verified: &Verified) -> String {
    let Verified { bytes, without_checksum, corrupt, gone, .. } = *verified;
    let good = verified.blocks.saturating_sub(corrupt);
    let mut text = format!(
        "{} read, {}; {good} are as they were stored",
        counted(verified.blocks, "block", "blocks"),
        ByteSize(bytes)
    );
    if without_checksum > 0 {
        text += &format!(
            ", {} of them without a checksum to compare",
            counted(without_checksum, "shard", "shards")
        );
    }
    if gone > 0 {
        text += &format!("; {} removed in the meantime", counted(gone, "block", "blocks"));
    }
    text
}
