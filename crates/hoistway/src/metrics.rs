//! What the loads of this process have done in all, for monitoring.
#![forbid(unsafe_code)]

use crate::{
    Error, Report, Route,
    report::{Carrier, TimeReport},
    route::Access,
};
use std::{
    fmt::Write as _,
    sync::atomic::{AtomicU64, Ordering},
};

/// How a load ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Outcome {
    /// All tensors were delivered.
    Ok,
    /// By an error.
    Failed,
    /// Its caller cancelled or dropped it.
    Cancelled,
}

const OUTCOMES: [(Outcome, &str); 3] =
    [(Outcome::Ok, "ok"), (Outcome::Failed, "failed"), (Outcome::Cancelled, "cancelled")];
const ACCESSES: [Access; 2] = [Access::Direct, Access::Buffered];
const VIAS: [Option<Route>; 3] = [None, Some(Route::Staged), Some(Route::Unified)];
const STEPS: [&str; 3] = ["open", "prepare", "transfer"];

/// More routes than there are.
const MOST_ROUTES: usize = 32;

/// Counters. They have no lock, which a child of `fork` could wait for.
static LOADS: [AtomicU64; OUTCOMES.len()] = [const { AtomicU64::new(0) }; OUTCOMES.len()];
static TENSORS: AtomicU64 = AtomicU64::new(0);
static NANOSECONDS: [AtomicU64; STEPS.len()] = [const { AtomicU64::new(0) }; STEPS.len()];
static RETRIES: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
/// By the position of the route; the last one is what is no route.
static REFUSED: [AtomicU64; MOST_ROUTES] = [const { AtomicU64::new(0) }; MOST_ROUTES];
static CARRIED: [[[Carried; VIAS.len()]; ACCESSES.len()]; MOST_ROUTES] =
    [const { [const { [const { Carried::new() }; VIAS.len()] }; ACCESSES.len()] }; MOST_ROUTES];
const _: () = assert!(Route::ALL.len() < MOST_ROUTES);

struct Carried {
    tensor_bytes: AtomicU64,
    read_bytes: AtomicU64,
    reads: AtomicU64,
}

impl Carried {
    const fn new() -> Self {
        Self { tensor_bytes: AtomicU64::new(0), read_bytes: AtomicU64::new(0), reads: AtomicU64::new(0) }
    }
}

fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// The position of a route among all; beyond them, if there is none of this name.
fn position(name: &str) -> usize {
    Route::ALL.iter().position(|route| route.name() == name).unwrap_or(Route::ALL.len())
}

impl Outcome {
    /// That of a load that `error` has ended.
    pub(crate) fn of(error: &Error) -> Self {
        match error {
            Error::Cancelled => Self::Cancelled,
            _ => Self::Failed,
        }
    }
}

/// Counts a load that `error` has ended before it began.
pub(crate) fn count_unbegun(error: &Error) {
    add(&LOADS[Outcome::of(error) as usize], 1);
}

/// Counts a load that has ended, of which `tensors` were delivered.
pub(crate) fn count(report: &Report, outcome: Outcome, tensors: usize) {
    add(&LOADS[outcome as usize], 1);
    add(&TENSORS, tensors as u64);
    let TimeReport { open_seconds, prepare_seconds, transfer_seconds, .. } = report.time;
    for (counter, seconds) in NANOSECONDS.iter().zip([open_seconds, prepare_seconds, transfer_seconds]) {
        // Times are positive, and their sum is that of centuries at most.
        add(counter, (seconds.max(0.0) * 1e9) as u64);
    }
    for (counter, retries) in RETRIES.iter().zip([report.retries.short, report.retries.interrupted]) {
        add(counter, retries);
    }
    for refusal in &report.refused {
        add(&REFUSED[position(&refusal.what)], 1);
    }
    for &Carrier { route, access, via, tensor_bytes, read_bytes, reads } in &report.carriers {
        let access = ACCESSES.iter().position(|other| *other == access).unwrap_or_default();
        let via = VIAS.iter().position(|other| *other == via).unwrap_or_default();
        let carried = &CARRIED[position(route.name())][access][via];
        add(&carried.tensor_bytes, tensor_bytes);
        add(&carried.read_bytes, read_bytes);
        add(&carried.reads, reads);
    }
}

/// Returns what the loads of this process have done since its start, as OpenMetrics text for Prometheus: loads by how they ended,
/// bytes and reads by route, seconds by step, refusals.
///
/// A load counts once it has ended, one of a checkpoint's tensors as well as one of all. A child of `fork` goes on from the
/// counts of its parent.
///
/// ```
/// assert!(hoistway::metrics().contains("hoistway_loads_total{outcome=\"ok\"} "));
/// ```
pub fn metrics() -> String {
    let mut text = String::new();
    let mut family = |name: &str, unit: &str, help: &str, samples: Vec<(String, String)>| {
        // Writing to a string does not fail.
        let _ = write!(text, "# HELP {name} {help}.\n# TYPE {name} counter\n");
        if !unit.is_empty() {
            let _ = writeln!(text, "# UNIT {name} {unit}");
        }
        for (labels, value) in samples {
            let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
            let _ = writeln!(text, "{name}_total{labels} {value}");
        }
    };
    let label = |label: &str, value: &str, counter: &AtomicU64| {
        (format!("{label}=\"{value}\""), get(counter).to_string())
    };
    let loads = OUTCOMES.iter().map(|&(outcome, name)| label("outcome", name, &LOADS[outcome as usize]));
    family("hoistway_loads", "", "Loads that have ended, by how", loads.collect());
    let tensors = (String::new(), get(&TENSORS).to_string());
    family("hoistway_load_tensors", "", "Tensors that loads have delivered", vec![tensors]);
    let seconds = STEPS
        .iter()
        .zip(&NANOSECONDS)
        .map(|(step, counter)| (format!("step=\"{step}\""), format!("{:?}", get(counter) as f64 / 1e9)));
    family("hoistway_load_seconds", "seconds", "Time of loads by step", seconds.collect());
    type Of = (&'static str, &'static str, &'static str, fn(&Carried) -> &AtomicU64);
    const OF: [Of; 3] = [
        ("hoistway_load_bytes", "bytes", "Bytes of tensors that loads have delivered, by route", |carried| {
            &carried.tensor_bytes
        }),
        (
            "hoistway_load_read_bytes",
            "bytes",
            "Bytes that loads have read, gaps and padding included",
            |carried| &carried.read_bytes,
        ),
        ("hoistway_load_reads", "", "Reads that loads have made, by route", |carried| &carried.reads),
    ];
    for (name, unit, help, of) in OF {
        family(name, unit, help, by_route(of));
    }
    let retries = ["short", "interrupted"].iter().zip(&RETRIES);
    let retries = retries.map(|(kind, counter)| label("kind", kind, counter));
    family("hoistway_load_retries", "", "Reads of loads that were repeated", retries.collect());
    let names = Route::ALL.iter().map(|route| route.name()).chain(["other"]);
    let refused = names.zip(&REFUSED).map(|(name, counter)| label("what", name, counter));
    let help = "Refusals of faster routes to loads, by route";
    family("hoistway_load_refusals", "", help, refused.filter(|(_, count)| count != "0").collect());
    text + "# EOF\n"
}

/// A sample for each way that has moved bytes.
fn by_route(of: fn(&Carried) -> &AtomicU64) -> Vec<(String, String)> {
    let mut samples = Vec::new();
    for (route, by_access) in Route::ALL.iter().zip(&CARRIED) {
        for (access, by_via) in ACCESSES.iter().zip(by_access) {
            for (via, carried) in VIAS.iter().zip(by_via) {
                if get(&carried.reads) > 0 || get(&carried.tensor_bytes) > 0 {
                    let via = via.map_or("", Route::name);
                    let labels = format!("route=\"{route}\",access=\"{access}\",via=\"{via}\"");
                    samples.push((labels, get(of(carried)).to_string()));
                }
            }
        }
    }
    samples
}
