//! `windlass kv stat`.

use super::{
    arguments,
    opened::{Holding, holdings, summary},
};
use crate::{failure::Failure, output};
use bytesize::ByteSize;
use std::{collections::BTreeMap, fmt::Write};
use windlass_kv::{NamespaceId, Stats, StoreReport};

pub(super) fn run(arguments: &arguments::Stat) -> Result<(), Failure> {
    let store = arguments.root.read()?;
    let (stats, report, namespaces) = (store.stats()?, store.report()?, holdings(&store)?);
    if arguments.json {
        let shown = serde_json::json!({ "stats": stats, "report": report, "namespaces": namespaces });
        return output::write_json(&shown);
    }
    output::write_text(&as_text(&stats, &report, &namespaces))
}

fn as_text(stats: &Stats, report: &StoreReport, namespaces: &BTreeMap<NamespaceId, Holding>) -> String {
    let mut text = String::new();
    let of_capacity = match stats.capacity_bytes {
        Some(capacity) => format!(" of {}", ByteSize(capacity)),
        None => String::new(),
    };
    let _ = writeln!(text, "{}  layout {}", report.root.display(), report.layout);
    let _ = writeln!(
        text,
        "{} blocks, {} of payload; files take {}{of_capacity}",
        stats.blocks,
        ByteSize(stats.payload_bytes),
        ByteSize(stats.root_bytes),
    );
    let _ = writeln!(
        text,
        "opened in {:.3} s; the index takes {} of memory",
        stats.recovery.as_secs_f64(),
        ByteSize(stats.index_bytes),
    );
    if stats.lost_on_recovery > 0 {
        let _ = writeln!(text, "{} blocks were not whole, and are missing", stats.lost_on_recovery);
    }
    for refused in &report.refused {
        let _ = writeln!(text, "not used: {}: {}", refused.what, refused.why);
    }
    let _ = writeln!(text, "\n{}", table(namespaces));
    text
}

/// Namespaces in lines of their own.
pub(super) fn table(namespaces: &BTreeMap<NamespaceId, Holding>) -> String {
    let mut lines =
        vec![format!("{:<32} {:>12} {:>10}  {}", "namespace", "blocks", "payload", "description")];
    for (id, holding) in namespaces {
        lines.push(format!(
            "{id:<32} {:>12} {:>10}  {}",
            holding.blocks,
            ByteSize(holding.payload_bytes).to_string(),
            summary(holding.description.as_ref()),
        ));
    }
    lines.join("\n")
}
