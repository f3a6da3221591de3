//! Measurements, and their table for people.

use super::{Combination, results::Spread, worker::Reading};
use bytesize::ByteSize;
use hoistway::DeviceId;
use serde::Serialize;
use std::collections::BTreeMap;

const MEBIBYTE: f64 = (1 << 20) as f64;

/// How many bytes came which way.
type WayBytes = BTreeMap<String, u64>;

/// The measurement of one process in one iteration. Sizes are in MiB, times in seconds, throughput in 10^9 and 10^6 bytes a second.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Measurement {
    backend: &'static str,
    buffer_size: f64,
    chunk_size: f64,
    num_processes: u16,
    rank: usize,
    iteration: u32,
    num_files: usize,
    total_bytes_read: u64,
    read_time: f64,
    throughput_mbps: f64,
    throughput_gbps: f64,
    /// From the iteration's start to the end of its last process.
    round_wall_time: f64,
    carriers: String,
    device: DeviceId,
    #[serde(skip)]
    way_bytes: WayBytes,
    #[serde(skip)]
    combination: Combination,
}

/// The measurements of all processes in all iterations of one combination.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Summary {
    pub(super) backend: &'static str,
    pub(super) buffer_size_mb: f64,
    pub(super) chunk_size_mb: f64,
    pub(super) num_processes: u16,
    pub(super) throughput_gbps_median: f64,
    throughput_gbps_mean: f64,
    pub(super) throughput_gbps_min: f64,
    pub(super) throughput_gbps_max: f64,
    throughput_gbps_std: f64,
    wall_time_median: f64,
    wall_time_mean: f64,
    num_iterations: usize,
    carriers: String,
    device: DeviceId,
}

impl Measurement {
    pub(super) fn new(
        combination: Combination,
        rank: usize,
        iteration: u32,
        files: usize,
        reading: Reading,
        round_seconds: f64,
    ) -> Self {
        let rate = if reading.seconds > 0.0 { reading.bytes as f64 / reading.seconds } else { 0.0 };
        let mut way_bytes = WayBytes::new();
        for carrier in &reading.carriers {
            let via = carrier.via.map(|via| format!(" {via}")).unwrap_or_default();
            let way = format!("{} {}{via}", carrier.route, carrier.access);
            *way_bytes.entry(way).or_default() += carrier.tensor_bytes;
        }
        Self {
            backend: combination.backend,
            buffer_size: combination.buffer_bytes as f64 / MEBIBYTE,
            chunk_size: combination.chunk_bytes as f64 / MEBIBYTE,
            num_processes: combination.processes,
            rank,
            iteration,
            num_files: files,
            total_bytes_read: reading.bytes,
            read_time: reading.seconds,
            throughput_mbps: rate / 1e6,
            throughput_gbps: rate / 1e9,
            round_wall_time: round_seconds,
            carriers: ways([&way_bytes]),
            device: combination.device,
            way_bytes,
            combination,
        }
    }
}

/// The ways that bytes came, those of most bytes first.
fn ways<'a>(counts: impl IntoIterator<Item = &'a WayBytes>) -> String {
    let mut sums = BTreeMap::<&str, u64>::new();
    for (way, bytes) in counts.into_iter().flatten() {
        *sums.entry(way).or_default() += bytes;
    }
    let mut ways: Vec<_> = sums.into_iter().filter(|(_, bytes)| *bytes > 0).collect();
    ways.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    ways.into_iter().map(|(way, _)| way).collect::<Vec<_>>().join(", ")
}

/// Summaries of the combinations, in the order in which they were measured.
pub(super) fn summaries(measurements: &[Measurement]) -> Vec<Summary> {
    measurements
        .chunk_by(|one, other| one.combination == other.combination)
        .filter_map(|group| {
            let first = group.first()?;
            let rounds: Vec<&[Measurement]> =
                group.chunk_by(|one, other| one.iteration == other.iteration).collect();
            let seconds: Vec<f64> = rounds.iter().map(|round| round[0].round_wall_time).collect();
            let bytes = |round: &&[Measurement]| round.iter().map(|one| one.total_bytes_read).sum::<u64>();
            let rates =
                rounds.iter().zip(&seconds).map(|(round, seconds)| bytes(round) as f64 / seconds / 1e9);
            let (rate, wall_time) = (Spread::of(rates), Spread::of(seconds.iter().copied()));
            Some(Summary {
                backend: first.backend,
                buffer_size_mb: first.buffer_size,
                chunk_size_mb: first.chunk_size,
                num_processes: first.num_processes,
                throughput_gbps_median: rate.median,
                throughput_gbps_mean: rate.mean,
                throughput_gbps_min: rate.min,
                throughput_gbps_max: rate.max,
                throughput_gbps_std: rate.deviation,
                wall_time_median: wall_time.median,
                wall_time_mean: wall_time.mean,
                num_iterations: rounds.len(),
                carriers: ways(group.iter().map(|one| &one.way_bytes)),
                device: first.device,
            })
        })
        .collect()
}

impl Summary {
    /// Lines for people.
    pub(super) fn table(summaries: &[Self]) -> String {
        let mut lines = vec![format!(
            "{:>8} {:>10} {:>10} {:>10} {:>14} {:>18}  {}",
            "route", "processes", "buffer", "chunk", "GB/s (median)", "least to most", "carriers"
        )];
        for summary in summaries {
            let size = |mebibytes: f64| ByteSize((mebibytes * MEBIBYTE) as u64).to_string();
            lines.push(format!(
                "{:>8} {:>10} {:>10} {:>10} {:>14.2} {:>18}  {}",
                summary.backend,
                summary.num_processes,
                size(summary.buffer_size_mb),
                size(summary.chunk_size_mb),
                summary.throughput_gbps_median,
                format!("{:.2} to {:.2}", summary.throughput_gbps_min, summary.throughput_gbps_max),
                summary.carriers,
            ));
        }
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hoistway::Route;

    fn of(backend: &'static str) -> Combination {
        let (buffer_bytes, chunk_bytes) = (64 << 20, 8 << 20);
        Combination { backend, device: DeviceId::Cpu, buffer_bytes, chunk_bytes, processes: 2 }
    }

    #[test]
    fn a_round_is_as_long_as_its_slowest_process() {
        let combination = of("threads");
        let one = |rank, iteration, seconds, round| {
            let reading = Reading { bytes: 500_000_000, seconds, carriers: Vec::new() };
            Measurement::new(combination, rank, iteration, 1, reading, round)
        };
        // Two rounds of 1 GB: in 1 s and in 4 s.
        let measured = [one(0, 0, 0.5, 1.0), one(1, 0, 1.0, 1.0), one(0, 1, 4.0, 4.0), one(1, 1, 2.0, 4.0)];
        let [summary] = &summaries(&measured)[..] else { panic!("one combination has one summary") };
        assert_eq!(summary.num_iterations, 2);
        assert_eq!((summary.throughput_gbps_min, summary.throughput_gbps_max), (0.25, 1.0));
        assert_eq!((summary.throughput_gbps_median, summary.wall_time_median), (0.625, 2.5));
    }

    #[test]
    fn a_summary_has_the_carriers_of_every_process_and_iteration() {
        let combination = of("auto");
        let one = |rank, iteration, route, tensor_bytes| {
            let carrier = serde_json::json!({
                "route": route, "access": "direct", "tensor_bytes": tensor_bytes, "read_bytes": tensor_bytes, "reads": 1
            });
            let carriers = vec![serde_json::from_value(carrier).unwrap()];
            let reading = Reading { bytes: tensor_bytes, seconds: 1.0, carriers };
            Measurement::new(combination, rank, iteration, 1, reading, 1.0)
        };
        let measured = [
            one(0, 0, Route::Cached, 10),
            one(1, 0, Route::Threads, 20),
            one(0, 1, Route::Usrbio, 15),
            one(1, 1, Route::Cached, 20),
        ];
        assert_eq!(measured[1].carriers, "threads direct");
        let [summary] = &summaries(&measured)[..] else { panic!("one combination has one summary") };
        assert_eq!(summary.carriers, "cached direct, threads direct, usrbio direct");
    }
}
