//! `hoistway load`.

use crate::{arguments, failure::Failure, output};
use console::Style;
use hoistway::{
    Arrival, Checkpoint, Error, LoadOptions, Loaded, Report, Route, plan::Selection, verify::Manifest,
};
use hoistway_trace::Timeline;
use std::{io, path::Path, time::Duration};

/// Time between two looks at the progress.
const TICK: Duration = Duration::from_millis(50);

pub(crate) fn run(arguments: &arguments::Load, timeline: &Timeline) -> Result<(), Failure> {
    let options = options(arguments)?;
    let recorded = arguments.trace.as_deref();
    let recording = recorded.map(|path| timeline.record(path).map_err(|source| trace_error(path, source)));
    let recording = recording.transpose()?;
    let loaded = load_and_compare(arguments, &options)?;
    if let Some((path, recording)) = recorded.zip(recording) {
        recording.finish().map_err(|source| trace_error(path, source))?;
    }
    show(arguments, loaded.report())
}

fn trace_error(path: &Path, source: io::Error) -> Error {
    Error::Io { operation: "write", path: path.to_owned(), tensor: None, range: None, source }
}

fn load_and_compare(arguments: &arguments::Load, options: &LoadOptions) -> Result<Loaded, Failure> {
    let compares = arguments.verify || arguments.manifest.is_some();
    if let (Some(dtype), true) = (options.dtype, compares) {
        return Err(Failure::Hoistway(Error::InvalidOption {
            option: "dtype",
            value: dtype.to_string(),
            reason: "converted elements cannot be compared; leave --verify and --manifest out".into(),
        }));
    }
    let manifest = match &arguments.manifest {
        Some(path) => Some((path.as_path(), Manifest::read(path)?)),
        None => None,
    };
    let checkpoint = arguments.paths.open()?;
    let mut loaded = load(&checkpoint, options)?;
    if compares {
        checkpoint.verify(&mut loaded, manifest.as_ref().map(|(path, manifest)| (*path, manifest)))?;
    }
    Ok(loaded)
}

fn show(arguments: &arguments::Load, report: &Report) -> Result<(), Failure> {
    if arguments.json {
        return output::write_json(report);
    }
    let text = report.to_string();
    if arguments.report {
        return output::write_labelled(&text, INDENT, label);
    }
    let verified = text.lines().find(|line| line.trim_start().starts_with("verified"));
    let shown: Vec<&str> = text.lines().take(1).chain(verified).collect();
    output::write_text(&shown.join("\n"))
}

/// Columns of a report's labels, with the space behind them.
const INDENT: usize = 12;

fn label(line: &str) -> Option<(usize, Style)> {
    let trimmed = line.trim_start();
    if trimmed.len() == line.len() {
        return Some((line.len(), Style::new().bold()));
    }
    let warned = ["not used:", "note:"].into_iter().find(|warned| trimmed.starts_with(warned))?;
    Some((line.len() - trimmed.len() + warned.len(), Style::new().yellow()))
}

fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> hoistway::Result<Loaded> {
    if options.route == Route::Mapped {
        return checkpoint.load(options);
    }
    let mut loading = checkpoint.start(options)?;
    let bar = output::progress_bar(loading.progress().bytes_total);
    let mut tensors = Vec::new();
    loop {
        let arrival = loading.next_within(TICK);
        bar.set_position(loading.progress().bytes_done);
        match arrival {
            Ok(Arrival::Tensor(tensor)) => tensors.push(tensor),
            Ok(Arrival::Pending) => {}
            Ok(Arrival::Finished) => break,
            Err(error) => {
                bar.finish_and_clear();
                return Err(error);
            }
        }
    }
    bar.finish_and_clear();
    Ok(loading.into_loaded(tensors))
}

fn options(arguments: &arguments::Load) -> hoistway::Result<LoadOptions> {
    let mut options = LoadOptions::from_env()?;
    if let Some(route) = &arguments.route {
        options.set("route", route)?;
    }
    if options.route == Route::Mapped {
        // What the environment says of it is for loads that allocate memory; an argument is an error.
        options = options.without_memory();
    }
    let tuning = &arguments.tuning;
    let named = [
        ("device", &arguments.device),
        ("dtype", &arguments.dtype),
        ("direct", &arguments.direct),
        ("usrbio", &arguments.usrbio),
        ("layout", &arguments.layout),
        ("chunk", &tuning.chunk),
        ("coalesce_gap", &tuning.coalesce_gap),
        ("in_flight", &tuning.in_flight),
        ("rings", &tuning.rings),
        ("threads", &tuning.threads),
        ("huge_pages", &tuning.huge_pages),
        ("numa", &tuning.numa),
        ("memory_budget", &tuning.memory_budget),
    ];
    for (name, value) in named {
        if let Some(value) = value {
            options.set(name, value)?;
        }
    }
    options.populate |= tuning.populate;
    let selected = arguments.select.iter().fold(Selection::all(), |selection, glob| selection.select(glob));
    options.selection = arguments.exclude.iter().fold(selected, |selection, glob| selection.exclude(glob));
    Ok(options)
}
