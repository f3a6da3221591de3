//! `hoistway bench headers`: headers of many files, a batch at a time.

use super::{arguments::Headers, results::Spread};
use crate::{
    charts::{Bar, Bars, Figure, Panel},
    failure::Failure,
};
use hoistway::{catalog::header_texts, counted};
use serde::Serialize;
use std::{path::PathBuf, time::Instant};

/// One iteration over all files. Times are in seconds.
#[derive(Clone, Debug, Serialize)]
struct Measurement {
    batch_size: u32,
    num_threads: u16,
    iteration: u32,
    num_files: usize,
    header_bytes: u64,
    wall_time: f64,
    headers_per_second: f64,
}

/// All iterations of one batch size and number of threads.
#[derive(Clone, Debug, Serialize)]
struct Summary {
    batch_size: u32,
    num_threads: u16,
    headers_per_second_median: f64,
    headers_per_second_mean: f64,
    headers_per_second_min: f64,
    headers_per_second_max: f64,
    headers_per_second_std: f64,
    wall_time_median: f64,
    wall_time_mean: f64,
    num_iterations: usize,
}

pub(super) fn run(arguments: &Headers) -> Result<(), Failure> {
    let files = arguments.files.resolve()?;
    arguments.output.prepare(&["headers_per_second"])?;
    let (mut measurements, mut summaries) = (Vec::new(), Vec::new());
    let runs = &arguments.runs;
    for &batch_size in runs.mode.of(&arguments.batch_sizes) {
        for &num_threads in runs.mode.of(&arguments.num_threads) {
            for _ in 0..runs.warmup {
                measure(&files, batch_size, num_threads, 0)?;
            }
            let rounds: Vec<Measurement> = (0..runs.iterations)
                .map(|iteration| measure(&files, batch_size, num_threads, iteration))
                .collect::<hoistway::Result<_>>()?;
            summaries.extend(Summary::of(&rounds));
            measurements.extend(rounds);
        }
    }
    let figures = vec![("headers_per_second.svg".into(), figure(&summaries))];
    arguments.output.write_files("benchmark_headers_batch", &measurements, &summaries, figures)?;
    let results = serde_json::json!({ "measurements": measurements, "summary": summaries });
    arguments.output.print(&results, &Summary::table(&summaries))
}

/// Reads the header of each file once.
fn measure(
    files: &[PathBuf],
    batch_size: u32,
    num_threads: u16,
    iteration: u32,
) -> hoistway::Result<Measurement> {
    let start = Instant::now();
    let mut header_bytes = 0;
    for batch in files.chunks(batch_size as usize) {
        let headers = header_texts(batch, usize::from(num_threads))?;
        header_bytes += headers.iter().map(|(text, _)| text.len() as u64).sum::<u64>();
    }
    let wall_time = start.elapsed().as_secs_f64();
    let headers_per_second = files.len() as f64 / wall_time.max(f64::MIN_POSITIVE);
    let num_files = files.len();
    Ok(Measurement {
        batch_size,
        num_threads,
        iteration,
        num_files,
        header_bytes,
        wall_time,
        headers_per_second,
    })
}

impl Summary {
    /// Returns `None` for no measurement.
    fn of(rounds: &[Measurement]) -> Option<Self> {
        let &Measurement { batch_size, num_threads, .. } = rounds.first()?;
        let rate = Spread::of(rounds.iter().map(|one| one.headers_per_second));
        let seconds = Spread::of(rounds.iter().map(|one| one.wall_time));
        Some(Self {
            batch_size,
            num_threads,
            headers_per_second_median: rate.median,
            headers_per_second_mean: rate.mean,
            headers_per_second_min: rate.min,
            headers_per_second_max: rate.max,
            headers_per_second_std: rate.deviation,
            wall_time_median: seconds.median,
            wall_time_mean: seconds.mean,
            num_iterations: rounds.len(),
        })
    }

    /// Lines for people.
    fn table(summaries: &[Self]) -> String {
        let mut lines = vec![format!(
            "{:>10} {:>10} {:>18} {:>20}",
            "batch", "threads", "headers/s (median)", "least to most"
        )];
        for summary in summaries {
            lines.push(format!(
                "{:>10} {:>10} {:>18.0} {:>20}",
                summary.batch_size,
                summary.num_threads,
                summary.headers_per_second_median,
                format!("{:.0} to {:.0}", summary.headers_per_second_min, summary.headers_per_second_max),
            ));
        }
        lines.join("\n")
    }
}

/// Bars of headers a second, one colour for each number of threads.
fn figure(summaries: &[Summary]) -> Figure {
    let mut counts: Vec<u16> = summaries.iter().map(|summary| summary.num_threads).collect();
    counts.sort_unstable();
    counts.dedup();
    let bar = |summary: &Summary| Bar {
        label: format!(
            "batches of {}, {}",
            summary.batch_size,
            counted(summary.num_threads, "thread", "threads")
        ),
        series: counts.iter().position(|count| *count == summary.num_threads).unwrap_or_default(),
        value: summary.headers_per_second_median,
        range: (summary.headers_per_second_min, summary.headers_per_second_max),
    };
    let bars = Bars {
        title: String::new(),
        value_name: "headers/s".into(),
        bars: summaries.iter().map(bar).collect(),
        limits: Vec::new(),
    };
    Figure::of("Headers a second, median".into(), Panel::Bars(bars))
}
