//! What is counted, and how Prometheus gets it.
#![forbid(unsafe_code)]

use crate::{
    Completion, DropReason, Dropped, NamespaceId, NamespaceStats, Result, Stats, Status,
    io::{Carrier, Direction, Outcome},
    report::CarrierShare,
    ticket::Kind,
};
use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{self, Registry, Unit},
};
use std::{
    collections::BTreeMap,
    fmt::Debug,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use windlass_io::parallel::lock;

/// Gauges of this hold bytes and counts.
type Level = Gauge<u64, AtomicU64>;

/// Everything that a store counts.
pub(crate) struct Metrics {
    registry: Mutex<Registry>,
    levels: Levels,
    totals: Totals,
    capacity_bytes: Level,
    recovery_seconds: Gauge<f64, AtomicU64>,
    namespaces: Mutex<BTreeMap<NamespaceId, Arc<NamespaceCounters>>>,
    by_namespace: NamespaceFamilies,
    dropped: Family<Reason, Counter>,
    ended: Family<Ended, Counter>,
    seconds: Family<Phase, Histogram, fn() -> Histogram>,
    lookup_seconds: Histogram,
    pub(crate) io_errors: Counter,
    pub(crate) commits: Counter,
    pub(crate) abandoned: Counter,
    pub(crate) unsynced_loads: Counter,
    carried: Family<CarrierLabel, Counter>,
    carriers: Mutex<BTreeMap<Carrier, CarrierShare>>,
    bounced: Counter,
}

/// What is asked of one namespace.
pub(crate) struct NamespaceCounters {
    pub(crate) lookups: Counter,
    pub(crate) found: Counter,
    pub(crate) hits: Counter,
    pub(crate) misses: Counter,
    pub(crate) expired: Counter,
    pub(crate) corrupt: Counter,
    pub(crate) loaded_bytes: Counter,
    pub(crate) stored_blocks: Counter,
    pub(crate) stored_bytes: Counter,
    pub(crate) exists: Counter,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfNamespace {
    namespace: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Phase {
    operation: &'static str,
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CarrierLabel {
    route: &'static str,
    access: &'static str,
    direction: &'static str,
}

impl CarrierLabel {
    fn new(carrier: Carrier, direction: &'static str) -> Self {
        Self { route: carrier.route(), access: carrier.access().name(), direction }
    }
}

/// Registers a metric, with the unit that its name ends in.
fn register(registry: &mut Registry, name: &str, help: &str, metric: impl registry::Metric) {
    let units = [("_bytes", Unit::Bytes), ("_seconds", Unit::Seconds)];
    match units.into_iter().find_map(|(end, unit)| Some((name.strip_suffix(end)?, unit))) {
        Some((name, unit)) => registry.register_with_unit(name, help, unit, metric),
        None => registry.register(name, help, metric),
    }
}

macro_rules! measured {
    ($kind:ident of $metric:ty { $($(#[doc = $help:literal])* $name:ident,)+ }) => {
        /// What is measured when somebody asks.
        #[derive(Default)]
        struct $kind {
            $($name: $metric,)+
        }

        impl $kind {
            fn register(&self, registry: &mut Registry) {
                $(register(registry, stringify!($name), concat!($($help),*).trim(), self.$name.clone());)+
            }

            fn set(&self, stats: &Stats) {
                $(set(&self.$name, stats.$name);)+
            }
        }
    };
}

measured! { Levels of Level {
    /// Blocks that are found
    blocks,
    /// Bytes of their shards
    payload_bytes,
    /// Bytes that the files of this process take
    allocated_bytes,
    /// Bytes that the files of all processes take
    root_bytes,
    /// Bytes of host memory that the index takes
    index_bytes,
    /// Requests that have not ended
    open_requests,
    /// Bytes of transfers under way
    in_flight_bytes,
    /// Loads that wait, because too many bytes are under way
    queued_loads,
    /// Blocks that have some of their shards
    partial_blocks,
    /// Requests that have ended, but whose memory may still be read or written
    leased_requests,
    /// Namespaces that are there, but cannot be used
    unusable_namespaces,
} }

measured! { Totals of Counter {
    /// Blocks that went to make room
    evicted_blocks,
    /// Blocks whose time was over
    expired_blocks,
    /// Blocks that were found damaged
    corrupt_blocks,
    /// Blocks that were known when the store was opened, but were not whole
    lost_on_recovery,
    /// Records of other logs that cannot be read
    damaged_records,
    /// Events that nobody fetched
    forgotten_events,
} }

/// A level, or a count that only grows, that is measured elsewhere.
trait Measured {
    fn atomic(&self) -> &AtomicU64;
}

impl Measured for Level {
    fn atomic(&self) -> &AtomicU64 {
        self.inner()
    }
}

impl Measured for Counter {
    fn atomic(&self) -> &AtomicU64 {
        self.inner()
    }
}

fn set(measured: &impl Measured, value: u64) {
    measured.atomic().store(value, Ordering::Relaxed);
}

macro_rules! namespace_families {
    ($($(#[doc = $help:literal])* $name:ident,)+) => {
        #[derive(Default)]
        struct NamespaceFamilies {
            $($name: Family<OfNamespace, Counter>,)+
        }

        impl NamespaceFamilies {
            fn register(&self, registry: &mut Registry) {
                $(register(registry, stringify!($name), concat!($($help),*).trim(), self.$name.clone());)+
            }

            fn of(&self, namespace: NamespaceId) -> NamespaceCounters {
                let label = OfNamespace { namespace: namespace.to_string() };
                NamespaceCounters { $($name: self.$name.get_or_create(&label).clone(),)+ }
            }
        }

        impl NamespaceCounters {
            fn stats(&self, namespace: NamespaceId) -> NamespaceStats {
                NamespaceStats { namespace, $($name: self.$name.get(),)+ }
            }
        }
    };
}

namespace_families! {
    /// Keys that were looked up
    lookups,
    /// Keys that were looked up and there
    found,
    /// Items that were loaded
    hits,
    /// Items that were to be loaded, but not there
    misses,
    /// Items that were to be loaded, but whose time was over
    expired,
    /// Items that were to be loaded, but damaged
    corrupt,
    /// Bytes that were loaded
    loaded_bytes,
    /// Blocks that were stored
    stored_blocks,
    /// Bytes that were stored
    stored_bytes,
    /// Items that were to be stored, but were there already
    exists,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("windlass_kv");
        let metrics = Self {
            levels: Levels::default(),
            totals: Totals::default(),
            capacity_bytes: Level::default(),
            recovery_seconds: Gauge::default(),
            namespaces: Mutex::default(),
            by_namespace: NamespaceFamilies::default(),
            dropped: Family::default(),
            ended: Family::default(),
            seconds: Family::new_with_constructor(|| Histogram::new(exponential_buckets(20e-6, 2.0, 20))),
            lookup_seconds: Histogram::new(exponential_buckets(0.5e-6, 2.0, 20)),
            io_errors: Counter::default(),
            commits: Counter::default(),
            abandoned: Counter::default(),
            unsynced_loads: Counter::default(),
            carried: Family::default(),
            carriers: Mutex::default(),
            bounced: Counter::default(),
            registry: Mutex::new(Registry::default()),
        };
        metrics.levels.register(&mut registry);
        metrics.totals.register(&mut registry);
        metrics.begin();
        metrics.by_namespace.register(&mut registry);
        register(
            &mut registry,
            "capacity_bytes",
            "Most bytes that the files of all processes may take; 0 if this process may not write",
            metrics.capacity_bytes.clone(),
        );
        register(
            &mut registry,
            "recovery_seconds",
            "Time that it took to open",
            metrics.recovery_seconds.clone(),
        );
        register(
            &mut registry,
            "dropped",
            "Items that were to be stored, but were refused",
            metrics.dropped.clone(),
        );
        register(&mut registry, "requests", "Requests that have ended, by how", metrics.ended.clone());
        register(
            &mut registry,
            "request_seconds",
            "Time of requests, queued and moving",
            metrics.seconds.clone(),
        );
        register(
            &mut registry,
            "lookup_seconds",
            "Time of lookups, of any number of keys",
            metrics.lookup_seconds.clone(),
        );
        register(&mut registry, "io_errors", "Transfers that failed", metrics.io_errors.clone());
        register(&mut registry, "commits", "Groups of blocks that were committed", metrics.commits.clone());
        register(
            &mut registry,
            "abandoned",
            "Blocks that never got all their shards",
            metrics.abandoned.clone(),
        );
        register(
            &mut registry,
            "unsynced_loads",
            "Items of blocks that no sync covers, whose checksums are always compared",
            metrics.unsynced_loads.clone(),
        );
        register(&mut registry, "carried_bytes", "Bytes by the way that they took", metrics.carried.clone());
        register(
            &mut registry,
            "bounced_bytes",
            "Bytes that went by way of memory of the store's",
            metrics.bounced.clone(),
        );
        Self { registry: Mutex::new(registry), ..metrics }
    }

    /// Makes all series, so that they are there before anything happens.
    fn begin(&self) {
        for reason in DROP_REASONS {
            let _ = self.dropped.get_or_create(&Reason { reason: name_of(reason) });
        }
        for status in ["ok", "partial", "timed_out", "cancelled"] {
            let _ = self.ended.get_or_create(&Ended { status });
        }
        for operation in ["load", "store"] {
            for phase in ["queued", "moving"] {
                let _ = self.seconds.get_or_create(&Phase { operation, phase });
            }
        }
        for carrier in Carrier::ALL {
            for direction in ["read", "write"] {
                let _ = self.carried.get_or_create(&CarrierLabel::new(carrier, direction));
            }
        }
    }

    pub(crate) fn namespace(&self, namespace: NamespaceId) -> Arc<NamespaceCounters> {
        lock(&self.namespaces)
            .entry(namespace)
            .or_insert_with(|| Arc::new(self.by_namespace.of(namespace)))
            .clone()
    }

    pub(crate) fn looked_up(&self, namespace: &NamespaceCounters, keys: usize, found: usize, begin: Instant) {
        namespace.lookups.inc_by(keys as u64);
        namespace.found.inc_by(found as u64);
        self.lookup_seconds.observe(begin.elapsed().as_secs_f64());
    }

    pub(crate) fn dropped(&self, reason: DropReason) {
        self.dropped.get_or_create(&Reason { reason: name_of(reason) }).inc();
    }

    pub(crate) fn request_ended(&self, kind: Kind, completion: &Completion) {
        let has = |wanted| completion.items.contains(&wanted);
        let status = match () {
            () if has(Status::TimedOut) => "timed_out",
            () if has(Status::Cancelled) => "cancelled",
            () if completion.is_ok() => "ok",
            () => "partial",
        };
        self.ended.get_or_create(&Ended { status }).inc();
        let operation = match kind {
            Kind::Load => "load",
            Kind::Store => "store",
        };
        for (phase, time) in [("queued", completion.queued), ("moving", completion.moving)] {
            self.observe(Phase { operation, phase }, time);
        }
    }

    fn observe(&self, phase: Phase, time: Duration) {
        self.seconds.get_or_create(&phase).observe(time.as_secs_f64());
    }

    pub(crate) fn transferred(&self, direction: Direction, outcome: &Outcome) {
        self.bounced.inc_by(outcome.bounced_bytes);
        if outcome.carried.is_empty() {
            return;
        }
        let direction_name = match direction {
            Direction::Read => "read",
            Direction::Write => "write",
        };
        let mut carriers = lock(&self.carriers);
        for (carrier, bytes) in &outcome.carried {
            self.carried.get_or_create(&CarrierLabel::new(*carrier, direction_name)).inc_by(*bytes);
            let share = carriers.entry(*carrier).or_insert(CarrierShare {
                carrier: *carrier,
                read_bytes: 0,
                written_bytes: 0,
            });
            match direction {
                Direction::Read => share.read_bytes += bytes,
                Direction::Write => share.written_bytes += bytes,
            }
        }
    }

    /// Which way moved how much.
    pub(crate) fn carriers(&self) -> Vec<CarrierShare> {
        lock(&self.carriers).values().copied().collect()
    }

    pub(crate) fn bounced_bytes(&self) -> u64 {
        self.bounced.get()
    }

    /// Adds what is counted here to what was measured elsewhere.
    pub(crate) fn count_into(&self, stats: &mut Stats) {
        stats.namespaces =
            lock(&self.namespaces).iter().map(|(namespace, counters)| counters.stats(*namespace)).collect();
        let dropped =
            |reason| self.dropped.get(&Reason { reason: name_of(reason) }).map_or(0, |counter| counter.get());
        stats.dropped = Dropped {
            no_room: dropped(DropReason::NoRoom),
            quota: dropped(DropReason::Quota),
            busy: dropped(DropReason::Busy),
            not_admitted: dropped(DropReason::NotAdmitted),
            too_large: dropped(DropReason::TooLarge),
        };
        let ended = |status| self.ended.get(&Ended { status }).map_or(0, |counter| counter.get());
        stats.timed_out = ended("timed_out");
        stats.cancelled = ended("cancelled");
        stats.io_errors = self.io_errors.get();
        stats.commits = self.commits.get();
        stats.abandoned = self.abandoned.get();
        stats.unsynced_loads = self.unsynced_loads.get();
    }

    /// As OpenMetrics text.
    pub(crate) fn encode(&self, stats: &Stats) -> Result<String> {
        self.levels.set(stats);
        self.totals.set(stats);
        self.capacity_bytes.set(stats.capacity_bytes.unwrap_or(0));
        self.recovery_seconds.set(stats.recovery.as_secs_f64());
        let mut text = String::new();
        text::encode(&mut text, &lock(&self.registry))
            .map_err(|error| crate::Error::Internal(error.to_string()))?;
        Ok(text)
    }
}

const DROP_REASONS: [DropReason; 5] =
    [DropReason::NoRoom, DropReason::Quota, DropReason::Busy, DropReason::NotAdmitted, DropReason::TooLarge];

fn name_of(reason: DropReason) -> &'static str {
    match reason {
        DropReason::NoRoom => "no_room",
        DropReason::Quota => "quota",
        DropReason::Busy => "busy",
        DropReason::NotAdmitted => "not_admitted",
        DropReason::TooLarge => "too_large",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The rules of OpenMetrics, which prometheus_client's parser and Prometheus itself keep.
    #[test]
    fn counters_end_in_total_and_units_are_those_of_the_names() {
        let metrics = Metrics::new();
        metrics.namespace(NamespaceId([1; 16])).hits.inc();
        let text = metrics.encode(&Stats::default()).unwrap();
        assert!(text.ends_with("# EOF\n"));
        let (mut types, mut units, mut helps) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        for line in text.lines().filter(|line| *line != "# EOF") {
            match line.split_once(' ') {
                Some(("#", said)) => {
                    let mut words = said.splitn(3, ' ');
                    let (what, name, value) = (words.next(), words.next().unwrap(), words.next().unwrap());
                    match what.unwrap() {
                        "TYPE" => assert_eq!(types.insert(name, value), None, "{name} is described twice"),
                        "UNIT" => assert_eq!(units.insert(name, value), None),
                        "HELP" => {
                            assert!(helps.insert(name) && value.ends_with('.') && value.len() > 9, "{line}")
                        }
                        other => panic!("{other}: {line}"),
                    }
                }
                _ => {
                    let sample = line.split(['{', ' ']).next().unwrap();
                    let (family, kind) = types.iter().rfind(|(name, _)| sample.starts_with(**name)).unwrap();
                    let ends: &[&str] = match *kind {
                        "counter" => &["_total"],
                        "gauge" => &[""],
                        "histogram" => &["_bucket", "_count", "_sum"],
                        other => panic!("{other}"),
                    };
                    assert!(
                        ends.iter().any(|end| sample == format!("{family}{end}")),
                        "{line} is of a {kind}"
                    );
                }
            }
        }
        assert!(types.keys().all(|name| name.starts_with("windlass_kv_") && helps.contains(name)));
        for name in types.keys() {
            let unit = ["bytes", "seconds"].into_iter().find(|unit| name.ends_with(&format!("_{unit}")));
            assert_eq!(units.get(name).copied(), unit, "{name}");
            assert!(!name.ends_with("_total"), "the end of a sample is no part of the name {name}");
        }
    }
}
