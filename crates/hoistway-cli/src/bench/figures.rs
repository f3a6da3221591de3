//! Figures of what `hoistway bench read` measured, and the names of their files.

use super::tables::Summary;
use crate::charts::{Bar, Bars, Cell, Figure, HeatMap, Line, Lines, Panel, sizes};
use hoistway::counted;

/// Returns all figures: throughput by each size, of each pair of sizes, and with the best.
pub(super) fn of(summaries: &[Summary]) -> Vec<(String, Figure)> {
    let mut figures: Vec<_> = AXES.iter().flat_map(|axis| by_size(axis, summaries)).collect();
    // Combinations of one kind were measured one after the other.
    let kinds = summaries.chunk_by(|one, other| kind(one) == kind(other));
    figures.extend(kinds.map(by_both_sizes));
    figures.push(("throughput_by_processes.svg".into(), by_processes(summaries)));
    figures
}

/// What a chart has on its horizontal axis; there is one chart for each value of the other.
struct Axis {
    name: &'static str,
    across: fn(&Summary) -> f64,
    other_name: &'static str,
    other: fn(&Summary) -> f64,
}

const AXES: [Axis; 2] = [
    Axis {
        name: "buffer",
        across: |summary| summary.buffer_size_mb,
        other_name: "chunk",
        other: |summary| summary.chunk_size_mb,
    },
    Axis {
        name: "chunk",
        across: |summary| summary.chunk_size_mb,
        other_name: "buffer",
        other: |summary| summary.buffer_size_mb,
    },
];

/// Lines of throughput for each route and number of processes: a figure for each value of the other axis.
fn by_size(axis: &Axis, summaries: &[Summary]) -> Vec<(String, Figure)> {
    let figure = |other: f64| {
        let chosen: Vec<&Summary> =
            summaries.iter().filter(|summary| (axis.other)(summary) == other).collect();
        let lines = chosen.chunk_by(|one, other| kind(one) == kind(other)).map(|line| {
            let mut points: Vec<_> =
                line.iter().map(|summary| ((axis.across)(summary), summary.throughput_gbps_median)).collect();
            points.sort_by(|one, other| one.0.total_cmp(&other.0));
            Line { label: label(kind(line[0])), points }
        });
        let lines = Lines {
            title: String::new(),
            size_name: format!("{} size, MiB", axis.name),
            value_name: "GB/s, median".into(),
            lines: lines.collect(),
        };
        let name = format!("throughput_by_{}_{}_{other}MiB.svg", axis.name, axis.other_name);
        let (routes, by, others) = (routes(chosen.into_iter()), axis.name, axis.other_name);
        let title = format!("{routes}: throughput by {by} size, {others}s of {other} MiB");
        (name, Figure::of(title, Panel::Lines(lines)))
    };
    sizes(summaries.iter().map(axis.other)).into_iter().map(figure).collect()
}

/// Throughput of each buffer size with each chunk size, for one route and number of processes.
fn by_both_sizes(group: &[Summary]) -> (String, Figure) {
    let (route, count) = kind(&group[0]);
    let cell = |summary: &Summary| Cell {
        across: summary.buffer_size_mb,
        up: summary.chunk_size_mb,
        value: summary.throughput_gbps_median,
    };
    let map = HeatMap {
        title: String::new(),
        across_name: "buffer size, MiB".into(),
        up_name: "chunk size, MiB".into(),
        cells: group.iter().map(cell).collect(),
    };
    let title = format!("{}: GB/s, median", label((route, count)));
    (format!("heatmap_{route}_{count}procs.svg"), Figure::of(title, Panel::HeatMap(map)))
}

/// Throughput of each route and number of processes with the best sizes.
fn by_processes(summaries: &[Summary]) -> Figure {
    let mut kinds: Vec<(&'static str, u16)> = summaries.iter().map(kind).collect();
    kinds.sort_by_key(|(_, count)| *count);
    kinds.dedup();
    let mut known: Vec<&str> = summaries.iter().map(|summary| summary.backend).collect();
    known.dedup();
    let bar = |bar_kind: (&'static str, u16)| {
        let rate = |summary: &&Summary| summary.throughput_gbps_median;
        let all = summaries.iter().filter(|summary| kind(summary) == bar_kind);
        let best = all.max_by(|one, other| rate(one).total_cmp(&rate(other)))?;
        Some(Bar {
            label: label(bar_kind),
            series: known.iter().position(|route| *route == bar_kind.0).unwrap_or_default(),
            value: best.throughput_gbps_median,
            range: (best.throughput_gbps_min, best.throughput_gbps_max),
        })
    };
    let bars = Bars {
        title: String::new(),
        value_name: "GB/s, median".into(),
        bars: kinds.into_iter().filter_map(bar).collect(),
        limits: Vec::new(),
    };
    let title = format!("{}: throughput with the best sizes", routes(summaries.iter()));
    Figure::of(title, Panel::Bars(bars))
}

/// What distinguishes lines and bars.
fn kind(summary: &Summary) -> (&'static str, u16) {
    (summary.backend, summary.num_processes)
}

fn label((route, count): (&str, u16)) -> String {
    format!("{route}, {}", counted(count, "process", "processes"))
}

/// The routes that were measured, for a title.
fn routes<'a>(summaries: impl Iterator<Item = &'a Summary>) -> String {
    let mut names: Vec<&str> = summaries.map(|summary| summary.backend).collect();
    names.dedup();
    names.join(", ")
}
