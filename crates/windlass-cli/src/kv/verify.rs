//! `windlass kv verify`.

use super::arguments;
use crate::{failure::Failure, output};
use bytesize::ByteSize;
use std::ops::ControlFlow;
use windlass::counted;
use windlass_kv::{Event, EventKind, Verified};

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
    let written = if arguments.json {
        output::write_json(&serde_json::json!({ "verified": verified, "events": events }))
    } else {
        output::write_text(&as_text(&verified))
    };
    // Whoever stops reading early still gets the verdict.
    if verified.corrupt == 0 && verified.failed == 0 {
        return written;
    }
    let mut lines: Vec<String> = events.iter().map(described).collect();
    if verified.corrupt > 0 {
        let outcome = if arguments.repair { "forgotten" } else { "damaged; --repair forgets them" };
        lines.push(format!("{} {outcome}", counted(verified.corrupt, "block", "blocks")));
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
        text += &format!("; {} went meanwhile", counted(gone, "block", "blocks"));
    }
    text
}
