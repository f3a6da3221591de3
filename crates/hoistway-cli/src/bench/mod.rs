//! `hoistway bench read`: raw reads by any route, by processes of their own. `headers` is `hoistway bench headers`.
//!
//! Each process is this command again, as `hoistway bench worker`: it opens its part of the files, says that it is ready,
//! and reads it whenever it is told to. `worker` is both ends of that; `tables` sums up what was measured, `figures`
//! shows it, and `results` writes both. `chart` draws a figure that the harness in `bench/` describes.

mod arguments;
mod figures;
mod headers;
pub(crate) mod results;
mod tables;
mod worker;

pub(crate) use arguments::Bench;

use crate::{charts::Figure, failure::Failure};
use arguments::{Backend, Read};
use hoistway::{ByteRange, DeviceId, DirectIo, Error, LoadOptions, Route, UsrbioClient, read::ReadFile};
use std::{
    ffi::OsString,
    io,
    path::{Path, PathBuf},
    time::Instant,
};
use tables::{Measurement, Summary};
use worker::{Job, Part, Worker};

pub(crate) fn run(bench: &Bench, program: &[OsString]) -> Result<(), Failure> {
    match bench {
        Bench::Read(arguments) => read(arguments, program),
        Bench::Headers(arguments) => headers::run(arguments),
        Bench::Chart { output } => chart(output),
        Bench::Worker => worker::serve(),
    }
}

/// One combination of what is varied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Combination {
    /// The name of what reads.
    backend: &'static str,
    device: DeviceId,
    buffer_bytes: u64,
    chunk_bytes: u64,
    processes: u16,
}

fn read(arguments: &Read, program: &[OsString]) -> Result<(), Failure> {
    let backends = backends(arguments)?;
    let files =
        arguments.files.resolve()?.into_iter().map(|path| Ok((path.clone(), ReadFile::open(path)?.len())));
    let files: Vec<(PathBuf, u64)> = files.collect::<hoistway::Result<_>>()?;
    let mut combinations = Vec::new();
    for (name, options) in arguments.runs.mode.of(&backends) {
        combinations.extend(
            self::combinations(arguments, name)?.into_iter().map(|combination| (options, combination)),
        );
    }
    arguments.output.prepare(&["throughput_by_", "heatmap_"])?;
    let mut measurements = Vec::new();
    let mut failed = None;
    for (options, combination) in combinations {
        if let Err(failure) = measure(arguments, program, options, &files, combination, &mut measurements) {
            failed = Some(failure);
            break;
        }
    }
    let summaries = tables::summaries(&measurements);
    arguments.output.write_files("benchmark", &measurements, &summaries, figures::of(&summaries))?;
    if let Some(failure) = failed {
        return Err(failure);
    }
    let results = serde_json::json!({ "measurements": measurements, "summary": summaries });
    arguments.output.print(&results, &Summary::table(&summaries))
}

/// Draws the figure that standard input describes.
fn chart(path: &Path) -> Result<(), Failure> {
    let figure: Figure = serde_json::from_reader(io::stdin().lock())
        .map_err(|error| Failure::told(format!("standard input is not a figure: {error}"), 2))?;
    figure.write(path)
}

/// What reads, by its name.
fn backends(arguments: &Read) -> hoistway::Result<Vec<(&'static str, LoadOptions)>> {
    if arguments.backends.is_empty() {
        let options = arguments.route.iter().map(|route| options(arguments, route));
        return options.map(|options| options.map(|options| (options.route.name(), options))).collect();
    }
    let named = arguments.backends.iter().map(|backend| {
        let options = LoadOptions::from_env()?;
        let usrbio = |options: LoadOptions, client| options.route(Route::Usrbio).usrbio(client);
        Ok(match backend {
            Backend::Cpp => ("cpp", usrbio(options, UsrbioClient::Vendor)),
            Backend::Python => ("python", usrbio(options, UsrbioClient::Native)),
            Backend::Mock => ("mock", options.route(Route::Threads).direct(DirectIo::Never)),
        })
    });
    named.collect()
}

fn options(arguments: &Read, route: &str) -> hoistway::Result<LoadOptions> {
    let mut options = LoadOptions::from_env()?;
    options.set("route", route)?;
    for (name, value) in [("direct", &arguments.direct), ("usrbio", &arguments.usrbio)] {
        if let Some(value) = value {
            options.set(name, value)?;
        }
    }
    Ok(options)
}

fn combinations(arguments: &Read, backend: &'static str) -> hoistway::Result<Vec<Combination>> {
    let Read { buffer_sizes, chunk_sizes, num_processes, runs, device, .. } = arguments;
    let mode = runs.mode;
    let mut combinations = Vec::new();
    if chunk_sizes.contains(&0) {
        let (value, reason) = ("0".to_owned(), "a chunk has at least one byte".to_owned());
        return Err(Error::InvalidOption { option: "chunk-sizes", value, reason });
    }
    for &processes in mode.of(num_processes) {
        if processes == 0 {
            let (value, reason) = ("0".to_owned(), "at least one process has to read".to_owned());
            return Err(Error::InvalidOption { option: "num-processes", value, reason });
        }
        for &buffer_bytes in mode.of(buffer_sizes) {
            let chunks = mode.of(chunk_sizes).iter().filter(|&&chunk_bytes| chunk_bytes <= buffer_bytes);
            combinations.extend(chunks.map(|&chunk_bytes| Combination {
                backend,
                device: *device,
                buffer_bytes,
                chunk_bytes,
                processes,
            }));
        }
    }
    if combinations.is_empty() {
        let reason = "every chunk is larger than every buffer".to_owned();
        let value = chunk_sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        return Err(Error::InvalidOption { option: "chunk-sizes", value, reason });
    }
    Ok(combinations)
}

/// Measures one combination as often as asked for.
fn measure(
    arguments: &Read,
    program: &[OsString],
    options: &LoadOptions,
    files: &[(PathBuf, u64)],
    combination: Combination,
    measurements: &mut Vec<Measurement>,
) -> Result<(), Failure> {
    let mut workers = Vec::new();
    for parts in deal(files, combination.processes, combination.chunk_bytes) {
        let job = Job {
            route: options.route,
            direct: options.direct,
            usrbio: options.usrbio,
            buffer_bytes: combination.buffer_bytes,
            chunk_bytes: combination.chunk_bytes,
            device: combination.device,
            is_kept: !arguments.download_only,
            parts,
        };
        workers.push(Worker::start(program, &job)?);
    }
    for worker in &mut workers {
        worker.expect_ready()?;
    }
    for iteration in 0..arguments.runs.warmup + arguments.runs.iterations {
        let start = Instant::now();
        for worker in &mut workers {
            worker.go()?;
        }
        let results = workers.iter_mut().map(Worker::result).collect::<Result<Vec<_>, _>>()?;
        let seconds = start.elapsed().as_secs_f64();
        let Some(iteration) = iteration.checked_sub(arguments.runs.warmup) else { continue };
        for (rank, (result, worker)) in results.into_iter().zip(&workers).enumerate() {
            measurements.push(Measurement::new(
                combination,
                rank,
                iteration,
                worker.files(),
                result,
                seconds,
            ));
        }
    }
    Ok(())
}

/// The bytes of all files in as many parts of equal length, cut at chunks.
fn deal(files: &[(PathBuf, u64)], processes: u16, chunk_bytes: u64) -> Vec<Vec<Part>> {
    let chunks: u64 = files.iter().map(|(_, len)| len.div_ceil(chunk_bytes)).sum();
    let mut dealt = vec![Vec::<Part>::new(); usize::from(processes)];
    let mut position = 0;
    for (path, len) in files {
        for start in (0..*len).step_by(usize::try_from(chunk_bytes).unwrap_or(usize::MAX)) {
            let owner = (position * u64::from(processes) / chunks.max(1)) as usize;
            let end = len.min(&(start + chunk_bytes)).to_owned();
            position += 1;
            match dealt[owner].last_mut() {
                Some(part) if part.path == *path && part.end == start => part.end = end,
                _ => dealt[owner].push(Part { path: path.clone(), start, end }),
            }
        }
    }
    dealt
}

impl Part {
    fn range(&self) -> ByteRange {
        ByteRange::new(self.start, self.end).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_dealt_once_and_evenly() {
        let files = [("a".into(), 10_000), ("b".into(), 0), ("c".into(), 4096 * 7), ("d".into(), 1)];
        for processes in [1, 2, 3, 8, 20] {
            let dealt = deal(&files, processes, 4096);
            assert_eq!(dealt.len(), usize::from(processes));
            let chunks = |parts: &Vec<Part>| -> u64 {
                parts.iter().map(|part| (part.end - part.start).div_ceil(4096)).sum()
            };
            let (least, most) = (dealt.iter().map(chunks).min(), dealt.iter().map(chunks).max());
            assert!(most <= least.map(|least| least + 1), "{dealt:?}");
            for (path, len) in &files {
                let mut parts: Vec<&Part> =
                    dealt.iter().flatten().filter(|part| part.path == *path).collect();
                parts.sort_by_key(|part| part.start);
                let mut next = 0;
                for part in parts {
                    assert_eq!(part.start, next);
                    next = part.end;
                }
                assert_eq!(next, *len);
            }
        }
    }
}
