//! Measurements, and their table and figure.

use super::{Combination, Moved};
use crate::{
    bench::results::Spread,
    charts::{Bar, Bars, Figure, Panel, Scale},
};
use bytesize::ByteSize;
use hoistway::{DeviceId, counted};
use serde::Serialize;

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Operation {
    Store,
    LoadCold,
    LoadWarm,
}

impl Operation {
    const ALL: [Self; 3] = [Self::Store, Self::LoadCold, Self::LoadWarm];

    fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::LoadCold => "load, cold",
            Self::LoadWarm => "load, warm",
        }
    }
}

/// One iteration. Throughput is in 10^9 bytes a second.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Measurement {
    operation: Operation,
    block_bytes: u64,
    threads: u16,
    batch: u32,
    iteration: u32,
    bytes: u64,
    seconds: f64,
    throughput_gbps: f64,
    limit_gbps: f64,
    device: DeviceId,
    routes: String,
    bounced_bytes: u64,
    #[serde(skip)]
    combination: Combination,
}

/// All iterations of one operation and combination.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Summary {
    operation: Operation,
    block_bytes: u64,
    threads: u16,
    batch: u32,
    throughput_gbps_median: f64,
    throughput_gbps_min: f64,
    throughput_gbps_max: f64,
    blocks_per_second_median: f64,
    limit_gbps_median: f64,
    /// Throughput by limit.
    share_of_limit: f64,
    num_iterations: usize,
    device: DeviceId,
    routes: String,
}

impl Measurement {
    pub(super) fn new(
        operation: Operation,
        combination: Combination,
        iteration: u32,
        bytes: u64,
        seconds: f64,
        limit: f64,
        moved: &Moved,
    ) -> Self {
        Self {
            operation,
            block_bytes: combination.block_bytes,
            threads: combination.threads,
            batch: combination.batch,
            iteration,
            bytes,
            seconds,
            throughput_gbps: if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 },
            limit_gbps: limit / 1e9,
            device: combination.device,
            routes: moved.routes(),
            bounced_bytes: moved.bounced_bytes,
            combination,
        }
    }
}

/// Summaries of the combinations, in the order in which they were measured.
pub(super) fn summaries(measurements: &[Measurement]) -> Vec<Summary> {
    let combinations = measurements.chunk_by(|one, other| one.combination == other.combination);
    let of_operation = |group: &[Measurement], operation| {
        let group: Vec<&Measurement> = group.iter().filter(|one| one.operation == operation).collect();
        let first = group.first()?;
        let rate = Spread::of(group.iter().map(|one| one.throughput_gbps));
        let limit = Spread::of(group.iter().map(|one| one.limit_gbps));
        Some(Summary {
            operation,
            block_bytes: first.block_bytes,
            threads: first.threads,
            batch: first.batch,
            throughput_gbps_median: rate.median,
            throughput_gbps_min: rate.min,
            throughput_gbps_max: rate.max,
            blocks_per_second_median: rate.median * 1e9 / first.block_bytes.max(1) as f64,
            limit_gbps_median: limit.median,
            share_of_limit: if limit.median > 0.0 { rate.median / limit.median } else { 0.0 },
            num_iterations: group.len(),
            device: first.device,
            routes: first.routes.clone(),
        })
    };
    combinations
        .flat_map(|group| {
            Operation::ALL.into_iter().filter_map(move |operation| of_operation(group, operation))
        })
        .collect()
}

impl Summary {
    /// Lines for people.
    pub(super) fn table(summaries: &[Self]) -> String {
        let mut lines = vec![format!(
            "{:<12} {:>10} {:>8} {:>14} {:>18} {:>10} {:>9}  routes",
            "", "block", "threads", "GB/s (median)", "least to most", "limit", "of limit"
        )];
        for summary in summaries {
            lines.push(format!(
                "{:<12} {:>10} {:>8} {:>14.2} {:>18} {:>10.2} {:>8.0}%  {}",
                summary.operation.name(),
                ByteSize(summary.block_bytes).to_string(),
                summary.threads,
                summary.throughput_gbps_median,
                format!("{:.2} to {:.2}", summary.throughput_gbps_min, summary.throughput_gbps_max),
                summary.limit_gbps_median,
                summary.share_of_limit * 100.0,
                summary.routes,
            ));
        }
        lines.join("\n")
    }

    /// A panel for each operation: bars of throughput, each above that of its limit.
    pub(super) fn figure(summaries: &[Self]) -> Figure {
        let panel = |operation: Operation| {
            let shown = summaries.iter().filter(|summary| summary.operation == operation);
            Panel::Bars(Bars {
                title: operation.name().into(),
                value_name: "GB/s, median".into(),
                bars: shown.flat_map(Self::bars).collect(),
                limits: Vec::new(),
            })
        };
        Figure {
            title: "Throughput of blocks beside the drive's".into(),
            columns: 1,
            scale: Scale::Shared,
            panels: Operation::ALL.map(panel).into(),
        }
    }

    fn bars(&self) -> [Bar; 2] {
        let threads = counted(self.threads, "thread", "threads");
        let (rate, limit) = (self.throughput_gbps_median, self.limit_gbps_median);
        [
            Bar {
                label: format!("{}, {threads}", ByteSize(self.block_bytes)),
                series: 0,
                value: rate,
                range: (self.throughput_gbps_min, self.throughput_gbps_max),
            },
            Bar { label: "limit".into(), series: 1, value: limit, range: (limit, limit) },
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_compared_with_the_limit_of_their_own_direction() {
        let combination =
            Combination { block_bytes: 1 << 20, threads: 8, batch: 4, blocks: 1000, device: DeviceId::Cpu };
        let one = |operation, iteration, seconds, limit| {
            Measurement::new(
                operation,
                combination,
                iteration,
                1_000_000_000,
                seconds,
                limit,
                &Moved::default(),
            )
        };
        let measured = [
            one(Operation::Store, 0, 1.0, 2e9),
            one(Operation::LoadCold, 0, 0.5, 4e9),
            one(Operation::Store, 1, 4.0, 2e9),
            one(Operation::LoadCold, 1, 0.25, 4e9),
        ];
        let summaries = summaries(&measured);
        let [store, load] = &summaries[..] else { panic!("{summaries:?}") };
        assert_eq!((store.throughput_gbps_median, store.share_of_limit), (0.625, 0.3125));
        assert_eq!((load.throughput_gbps_median, load.share_of_limit), (3.0, 0.75));
        assert_eq!(
            (store.throughput_gbps_min, store.throughput_gbps_max, store.num_iterations),
            (0.25, 1.0, 2)
        );
    }
}
