//! `hoistway moe replay`.

use super::{
    arguments,
    traces::{notes, summary},
};
use crate::{
    charts::{Figure, Line, Lines, Panel},
    failure::Failure,
    output,
};
use bytesize::ByteSize;
use hoistway_experts::{
    policy,
    replay::{Outcome, TokenRate},
    trace::{Holes, Trace},
};
use serde::Serialize;

/// One policy with one budget.
#[derive(Debug, Serialize)]
struct Row<'a> {
    #[serde(flatten)]
    outcome: Outcome,
    /// With a rate of the drive.
    tokens_per_second: Option<TokenRate>,
    /// What is missing from the trace.
    holes: &'a Holes,
}

pub(super) fn run(arguments: &arguments::Replay) -> Result<(), Failure> {
    // Before all is replayed.
    arguments.chart.as_deref().map(Figure::check_place).transpose()?;
    let trace = arguments.reading.open(&arguments.trace)?;
    let mut replay = arguments.reading.replay(&trace)?;
    let mut policies: Vec<&str> = arguments.policy.iter().map(String::as_str).collect();
    if policies.is_empty() {
        let has_profile = arguments.reading.profile.is_some();
        for name in policy::names().filter(|name| has_profile || *name != policy::STATIC_PROFILE) {
            policies.push(name);
        }
    }
    let mut rows = Vec::new();
    for &budget in &arguments.budget {
        for policy in &policies {
            let outcome = replay.run(policy, budget)?;
            let rate = arguments.drive_rate.map(|rate| rate as f64);
            let tokens_per_second = rate.and_then(|rate| outcome.token_rate(rate, arguments.compute_ms));
            rows.push(Row { outcome, tokens_per_second, holes: trace.holes() });
        }
    }
    if let Some(path) = &arguments.chart {
        figure(&trace, &rows).write(path)?;
    }
    if arguments.json {
        return output::write_json(&std::collections::BTreeMap::from([("rows", rows)]));
    }
    output::write_text(&table(&trace, &rows))
}

fn table(trace: &Trace, rows: &[Row<'_>]) -> String {
    let tokens = rows.first().map_or(0, |row| row.outcome.tokens);
    let mut lines = vec![format!("{}; {tokens} tokens", summary(trace)), String::new()];
    let has_rate = rows.iter().any(|row| row.tokens_per_second.is_some());
    let mut head = format!(
        "{:>10} {:>7}  {:<14} {:>7} {:>10} {:>13} {:>10} {:>7}",
        "budget", "cycles", "policy", "hits", "to belady", "faults/token", "MiB/token", "cold"
    );
    if has_rate {
        head += &format!(" {:>20}", "tokens/s");
    }
    lines.push(head);
    for Row { outcome, tokens_per_second, .. } in rows {
        let mut line = format!(
            "{:>10} {:>7.2}  {:<14} {:>5.1} % {:>10.1} {:>13.1} {:>10.1} {:>7}",
            ByteSize(outcome.budget_bytes).to_string(),
            outcome.budget_cycles,
            outcome.policy,
            outcome.hit_rate * 100.0,
            outcome.belady_gap * 100.0,
            outcome.faults_per_token,
            outcome.mib_per_token,
            outcome.cold_misses,
        );
        if let Some(TokenRate { overlapped, serial }) = tokens_per_second {
            line += &format!(" {:>20}", format!("{serial:.2} to {overlapped:.2}"));
        }
        lines.push(line);
    }
    lines.push(String::new());
    if let Some(Row { outcome, .. }) = rows.iter().find(|row| row.outcome.cliff) {
        let cycle = ByteSize(outcome.cycle_bytes);
        lines.push(format!(
            "note: with less than one token's cycle of {cycle}, lru evicts every expert before it is used again; \
             slru and arc then find next to nothing, too"
        ));
    }
    if let Some(Row { outcome, .. }) = rows.first() {
        let demand = outcome.largest_layer_demand;
        lines.push(format!(
            "note: one visit uses up to {} experts of a layer, {}: a store needs as much beside its budget",
            demand.experts,
            ByteSize(demand.bytes)
        ));
    }
    lines.extend(notes(trace).into_iter().map(|note| format!("note: {note}")));
    lines.join("\n")
}

/// Hit rates by budget, a line for each policy.
fn figure(trace: &Trace, rows: &[Row<'_>]) -> Figure {
    let mut lines: Vec<Line> = Vec::new();
    for Row { outcome, .. } in rows {
        // As many digits as a label has room for.
        let cycles = (outcome.budget_cycles * 100.0).round() / 100.0;
        let point = (cycles, outcome.hit_rate * 100.0);
        match lines.iter_mut().find(|line| line.label == outcome.policy) {
            Some(line) => line.points.push(point),
            None => lines.push(Line { label: outcome.policy.to_owned(), points: vec![point] }),
        }
    }
    for line in &mut lines {
        line.points.sort_by(|one, other| one.0.total_cmp(&other.0));
    }
    let lines = Lines {
        title: String::new(),
        size_name: "budget, token cycles".into(),
        value_name: "uses that find their expert resident, %".into(),
        lines,
    };
    let model = trace.model().map(|model| format!("{}: ", output::printable(model))).unwrap_or_default();
    Figure::of(format!("{model}hit rate by budget"), Panel::Lines(lines))
}
