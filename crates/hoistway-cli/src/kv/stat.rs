//! `hoistway kv stat`.

use super::{
    arguments::{self, Root},
    opened::{Holding, holdings, summary},
};
use crate::{failure::Failure, output};
use bytesize::ByteSize;
use hoistway::counted;
use hoistway_kv::{NamespaceId, Stats, StoreReport, WriterStats};
use std::{collections::BTreeMap, fmt::Write};

pub(super) fn run(arguments: &arguments::Stat) -> Result<(), Failure> {
    let near = Shown::of(&arguments.root)?;
    let far = match arguments.far.clone() {
        Some(root) => Some(Shown::of(&Root { root })?),
        None => None,
    };
    if arguments.json {
        let mut shown = near.as_json();
        if let Some(far) = far {
            shown["far"] = far.as_json();
        }
        return output::write_json(&shown);
    }
    let mut text = near.as_text();
    if let Some(far) = far {
        text += &format!("\nfar tier: {}", far.as_text());
    }
    output::write_text(&text)
}

/// What is shown of one store.
struct Shown {
    stats: Stats,
    report: StoreReport,
    namespaces: BTreeMap<NamespaceId, Holding>,
    writers: Vec<WriterStats>,
}

impl Shown {
    fn of(root: &Root) -> Result<Self, Failure> {
        let store = root.read()?;
        let (mut stats, report, namespaces) = (store.stats()?, store.report()?, holdings(&store)?);
        let writers = store.writers()?;
        // Of those who may write to it now, if there are any.
        let said = |alive: bool| {
            let known = writers.iter().filter(|writer| writer.is_alive || !alive);
            known.filter_map(|writer| writer.capacity_bytes).max()
        };
        stats.capacity_bytes = said(true).or_else(|| said(false));
        Ok(Self { stats, report, namespaces, writers })
    }

    fn as_json(&self) -> serde_json::Value {
        let Self { stats, report, namespaces, writers } = self;
        let mut shown = serde_json::json!({
            "stats": stats, "report": report, "namespaces": namespaces, "writers": writers
        });
        // They would be those of this command, which stores nothing and uses no device. Each writer has its own.
        if let Some(report) = shown["report"].as_object_mut() {
            for of_this_command in ["durability", "numa_node", "notes"] {
                report.remove(of_this_command);
            }
        }
        shown
    }

    fn as_text(&self) -> String {
        as_text(&self.stats, &self.report, &self.namespaces, &self.writers)
    }
}

fn as_text(
    stats: &Stats,
    report: &StoreReport,
    namespaces: &BTreeMap<NamespaceId, Holding>,
    writers: &[WriterStats],
) -> String {
    let mut text = String::new();
    let of_capacity = match stats.capacity_bytes {
        Some(capacity) => format!(" of {}", ByteSize(capacity)),
        None => String::new(),
    };
    let _ = writeln!(text, "{}  layout {}", report.root.display(), report.layout);
    let _ = writeln!(
        text,
        "{}, {} of payload; files take {}{of_capacity}",
        counted(stats.blocks, "block", "blocks"),
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
        let _ = writeln!(
            text,
            "incomplete, and therefore missing: {}",
            counted(stats.lost_on_recovery, "block", "blocks")
        );
    }
    for refused in &report.refused {
        let _ = writeln!(text, "not used: {}: {}", refused.what, refused.why);
    }
    for warning in &report.warnings {
        let _ = writeln!(text, "warning: {warning}");
    }
    for writer in writers {
        let _ = writeln!(text, "{}", described(writer));
    }
    let _ = writeln!(text, "\n{}", table(namespaces));
    text
}

fn described(writer: &WriterStats) -> String {
    let state = if writer.is_alive { "writes" } else { "has ended" };
    let mut text = format!("writer {}: process {} {state}", writer.id, writer.process);
    if let Some(durability) = writer.durability {
        text += &format!(", durability {durability}");
    }
    if let Some(blocks) = writer.blocks {
        text += &format!(", {}", counted(blocks, "block", "blocks"));
    }
    if let Some(bytes) = writer.allocated_bytes {
        text += &format!(", {}", ByteSize(bytes));
    }
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
