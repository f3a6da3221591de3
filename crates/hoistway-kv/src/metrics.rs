//! Metrics, and their text for Prometheus.
#![forbid(unsafe_code)]

use crate::{
    Completion, DropReason, Dropped, FarStats, NamespaceDescription, NamespaceId, NamespaceStats, Rank,
    Result, Stats, Status,
    io::{Carrier, Direction, Outcome},
    report::CarrierShare,
    ticket::Kind,
};
use hoistway_io::parallel::lock;
use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::{ConstGauge, Gauge},
        histogram::{Histogram, exponential_buckets},
    },
    registry::{self, Registry, Unit},
};
use std::{
    borrow::Cow,
    collections::{BTreeMap, HashSet},
    fmt::Debug,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// Everything that a store counts.
pub(crate) struct Metrics {
    namespaces: Mutex<BTreeMap<NamespaceId, Arc<NamespaceCounters>>>,
    described: Mutex<BTreeMap<NamespaceId, NamespaceInfo>>,
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
#[derive(Default)]
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

impl NamespaceCounters {
    fn stats(&self, namespace: NamespaceId) -> NamespaceStats {
        NamespaceStats {
            namespace,
            lookups: self.lookups.get(),
            found: self.found.get(),
            hits: self.hits.get(),
            misses: self.misses.get(),
            expired: self.expired.get(),
            corrupt: self.corrupt.get(),
            loaded_bytes: self.loaded_bytes.get(),
            stored_blocks: self.stored_blocks.get(),
            stored_bytes: self.stored_bytes.get(),
            exists: self.exists.get(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfNamespace {
    namespace: String,
}

/// What tells people which namespace it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NamespaceInfo {
    namespace: String,
    model: String,
    dtype: String,
    block_tokens: u32,
    tensor_parallel: String,
    pipeline_parallel: String,
    context_parallel: String,
}

impl NamespaceInfo {
    fn of(namespace: NamespaceId, description: NamespaceDescription) -> Self {
        let rank =
            |rank: Option<Rank>| rank.map(|Rank { rank, size }| format!("{rank}/{size}")).unwrap_or_default();
        Self {
            namespace: namespace.to_string(),
            model: description.model,
            dtype: description.dtype,
            block_tokens: description.block_tokens,
            tensor_parallel: rank(description.tensor_parallel),
            pipeline_parallel: rank(description.pipeline_parallel),
            context_parallel: rank(description.context_parallel),
        }
    }
}

/// Joins OpenMetrics texts, such as those of several stores, to one: a metric that several have is there once, with the samples of
/// all.
///
/// ```
/// let one = "# TYPE hoistway_kv_blocks gauge\nhoistway_kv_blocks{store=\"/one\"} 1\n# EOF\n";
/// let both = hoistway_kv::join_metrics(&[one, &one.replace("/one", "/two")]);
/// assert_eq!(both.matches("# TYPE").count(), 1);
/// assert!(both.contains("/one") && both.contains("/two"));
/// ```
pub fn join_metrics<T: AsRef<str>>(texts: &[T]) -> String {
    let mut families: Vec<(&str, Vec<&str>, Vec<&str>)> = Vec::new();
    // A store may be named twice, whose samples may not be.
    let mut known_samples = HashSet::new();
    for text in texts {
        let mut position = 0;
        for line in text.as_ref().lines().filter(|line| *line != "# EOF") {
            let said = line.strip_prefix("# ").map(|said| said.split(' ').nth(1).unwrap_or_default());
            match said {
                Some(name) => {
                    let known = families.iter().position(|(known, ..)| *known == name);
                    position = known.unwrap_or_else(|| {
                        families.push((name, Vec::new(), Vec::new()));
                        families.len() - 1
                    });
                    let heads = &mut families[position].1;
                    if !heads.contains(&line) {
                        heads.push(line);
                    }
                }
                // Samples follow what is said of their family.
                None if !known_samples.insert(line.rsplit_once(' ').map_or(line, |(sample, _)| sample)) => {}
                None => families.get_mut(position).into_iter().for_each(|(.., samples)| samples.push(line)),
            }
        }
    }
    let lines = families.iter().flat_map(|(_, heads, samples)| heads.iter().chain(samples));
    lines.copied().chain(["# EOF"]).fold(String::new(), |text, line| text + line + "\n")
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

/// The name of a metric, what it says, and where it is in the statistics.
type Of<S> = (&'static str, &'static str, fn(&S) -> u64);

const LEVELS: [Of<Stats>; 12] = [
    ("blocks", "Blocks that are found", |stats| stats.blocks),
    ("payload_bytes", "Bytes of their shards", |stats| stats.payload_bytes),
    ("allocated_bytes", "Bytes that the files of this process take", |stats| stats.allocated_bytes),
    ("root_bytes", "Bytes that the files of all processes take", |stats| stats.root_bytes),
    ("capacity_bytes", "Most bytes that these may take; 0 if this process may not write", |stats| {
        stats.capacity_bytes.unwrap_or(0)
    }),
    ("index_bytes", "Bytes of host memory that the index takes", |stats| stats.index_bytes),
    ("open_requests", "Requests that have not ended", |stats| stats.open_requests),
    ("in_flight_bytes", "Bytes of transfers under way", |stats| stats.in_flight_bytes),
    ("queued_loads", "Loads that wait, because too many bytes are under way", |stats| stats.queued_loads),
    ("partial_blocks", "Blocks that have some of their shards", |stats| stats.partial_blocks),
    ("leased_requests", "Requests that have ended, but whose memory may still be read or written", |stats| {
        stats.leased_requests
    }),
    ("unusable_namespaces", "Namespaces that are there, but cannot be used", |stats| {
        stats.unusable_namespaces
    }),
];

const TOTALS: [Of<Stats>; 10] = [
    ("evicted_blocks", "Blocks that went to make room", |stats| stats.evicted_blocks),
    ("expired_blocks", "Blocks whose time was over", |stats| stats.expired_blocks),
    ("corrupt_blocks", "Blocks that were found damaged", |stats| stats.corrupt_blocks),
    ("lost_on_recovery", "Blocks that were known when the store was opened, but were not whole", |stats| {
        stats.lost_on_recovery
    }),
    ("damaged_records", "Records of other logs that cannot be read", |stats| stats.damaged_records),
    ("forgotten_events", "Events that were not fetched in time", |stats| stats.forgotten_events),
    ("io_errors", "Transfers that failed", |stats| stats.io_errors),
    ("commits", "Groups of blocks that were committed", |stats| stats.commits),
    ("abandoned", "Blocks that never got all their shards", |stats| stats.abandoned),
    ("unsynced_loads", "Items of blocks that no sync covers, whose checksums are always compared", |stats| {
        stats.unsynced_loads
    }),
];

const OF_NAMESPACES: [Of<NamespaceStats>; 10] = [
    ("lookups", "Keys that were looked up", |stats| stats.lookups),
    ("found", "Keys that were looked up and there", |stats| stats.found),
    ("hits", "Items that were loaded", |stats| stats.hits),
    ("misses", "Items that were to be loaded, but not there", |stats| stats.misses),
    ("expired", "Items that were to be loaded, but whose time was over", |stats| stats.expired),
    ("corrupt", "Items that were to be loaded, but damaged", |stats| stats.corrupt),
    ("loaded_bytes", "Bytes that were loaded", |stats| stats.loaded_bytes),
    ("stored_blocks", "Blocks that were stored", |stats| stats.stored_blocks),
    ("stored_bytes", "Bytes that were stored", |stats| stats.stored_bytes),
    ("exists", "Items that were to be stored, but were there already", |stats| stats.exists),
];

const FAR_LEVELS: [Of<FarStats>; 3] = [
    ("far_up", "Whether the far tier can be used: 1 or 0", |far| far.is_up.into()),
    ("far_backlog_blocks", "Blocks that wait to be written to the far tier", |far| far.backlog_blocks),
    ("far_backlog_bytes", "Bytes of blocks that wait to be written to the far tier", |far| far.backlog_bytes),
];

const FAR_TOTALS: [Of<FarStats>; 11] = [
    ("far_outages", "Times that the far tier could not be used", |far| far.outages),
    ("far_hits", "Items that were loaded from the far tier", |far| far.hits),
    ("far_misses", "Items that neither tier had", |far| far.misses),
    ("far_loaded_bytes", "Bytes that were loaded from the far tier", |far| far.loaded_bytes),
    ("far_written_blocks", "Blocks that were written to the far tier", |far| far.written_blocks),
    ("far_written_bytes", "Bytes of blocks that were written to the far tier", |far| far.written_bytes),
    ("far_unwritten_blocks", "Blocks that were not written to the far tier", |far| far.unwritten_blocks),
    ("far_promoted_blocks", "Blocks of the far tier that were stored in the near one", |far| {
        far.promoted_blocks
    }),
    ("far_unpromoted_blocks", "Blocks of the far tier that were not stored in the near one", |far| {
        far.unpromoted_blocks
    }),
    ("far_failures", "Operations of the far tier that failed or took too long", |far| far.failures),
    ("far_lookup_timeouts", "Lookups that the near tier answered alone", |far| far.lookup_timeouts),
];

/// Registers a metric, with the unit that its name ends in.
fn register(registry: &mut Registry, name: &str, help: &str, metric: impl registry::Metric) {
    let units = [("_bytes", Unit::Bytes), ("_seconds", Unit::Seconds)];
    match units.into_iter().find_map(|(end, unit)| Some((name.strip_suffix(end)?, unit))) {
        Some((name, unit)) => registry.register_with_unit(name, help, unit, metric),
        None => registry.register(name, help, metric),
    }
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let metrics = Self {
            namespaces: Mutex::default(),
            described: Mutex::default(),
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
        };
        metrics.begin();
        metrics
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
        Arc::clone(lock(&self.namespaces).entry(namespace).or_default())
    }

    /// Notes what a namespace is that was opened, from its description as JSON. One of a later version is known by its number
    /// alone.
    pub(crate) fn describe(&self, namespace: NamespaceId, description: &str) {
        let description = serde_json::from_str(description).unwrap_or_default();
        lock(&self.described).insert(namespace, NamespaceInfo::of(namespace, description));
    }

    /// Forgets a namespace that was closed, and what was counted of it.
    pub(crate) fn forget(&self, namespace: NamespaceId) {
        lock(&self.namespaces).remove(&namespace);
        lock(&self.described).remove(&namespace);
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

    /// As OpenMetrics text, each sample with the store's directory as label `store`.
    pub(crate) fn encode(&self, root: &Path, stats: &Stats) -> Result<String> {
        let store = (Cow::from("store"), Cow::from(root.display().to_string()));
        let registry = &mut Registry::with_prefix_and_labels("hoistway_kv", [store].into_iter());
        let infos = Family::<NamespaceInfo, Gauge>::default();
        for info in lock(&self.described).values() {
            infos.get_or_create(info).set(1);
        }
        let help = "What namespaces are, by the label that other metrics have";
        register(registry, "namespace_info", help, infos);
        for (name, help, value) in LEVELS {
            register(registry, name, help, ConstGauge::new(value(stats)));
        }
        for (name, help, value) in TOTALS {
            register(registry, name, help, ConstCounter::new(value(stats)));
        }
        for far in stats.far.iter() {
            for (name, help, value) in FAR_LEVELS {
                register(registry, name, help, ConstGauge::new(value(far)));
            }
            for (name, help, value) in FAR_TOTALS {
                register(registry, name, help, ConstCounter::new(value(far)));
            }
        }
        for (name, help, value) in OF_NAMESPACES {
            let family = Family::<OfNamespace, Counter>::default();
            for of in &stats.namespaces {
                let label = OfNamespace { namespace: of.namespace.to_string() };
                family.get_or_create(&label).inc_by(value(of));
            }
            register(registry, name, help, family);
        }
        let opening = ConstGauge::new(stats.recovery.as_secs_f64());
        register(registry, "recovery_seconds", "Time that it took to open", opening);
        let refused = "Items that were to be stored, or loaded, but were refused";
        register(registry, "dropped", refused, self.dropped.clone());
        register(registry, "requests", "Requests that have ended, by how", self.ended.clone());
        let time = "Time of requests, queued and moving";
        register(registry, "request_seconds", time, self.seconds.clone());
        let time = "Time of lookups, of any number of keys";
        register(registry, "lookup_seconds", time, self.lookup_seconds.clone());
        register(registry, "carried_bytes", "Bytes by the way that they took", self.carried.clone());
        let bounced = "Bytes that went by way of memory of the store's";
        register(registry, "bounced_bytes", bounced, self.bounced.clone());
        let mut text = String::new();
        text::encode(&mut text, registry).map_err(|error| crate::Error::Internal(error.to_string()))?;
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

    fn encode(metrics: &Metrics, stats: &Stats) -> String {
        let description = r#"{"model":"llama","block_tokens":16,"tensor_parallel":{"rank":1,"size":2}}"#;
        metrics.describe(NamespaceId([1; 16]), description);
        metrics.describe(NamespaceId([2; 16]), r#"{"of a later version":1}"#);
        metrics.encode(Path::new("/kv"), stats).unwrap()
    }

    /// The rules of OpenMetrics, which prometheus_client's parser and Prometheus itself keep.
    #[test]
    fn counters_end_in_total_and_units_are_those_of_the_names() {
        let metrics = Metrics::new();
        metrics.namespace(NamespaceId([1; 16])).hits.inc();
        let mut stats = Stats::default();
        metrics.count_into(&mut stats);
        assert!(!encode(&metrics, &stats).contains("far_"), "there is no far tier");
        stats.far = Some(FarStats { is_up: true, hits: 7, loaded_bytes: 8, ..FarStats::default() });
        let text = encode(&metrics, &stats);
        let hits = r#"hits_total{store="/kv",namespace="01010101010101010101010101010101"} 1"#;
        for line in [
            r#"far_up{store="/kv"} 1"#,
            r#"far_hits_total{store="/kv"} 7"#,
            r#"far_loaded_bytes_total{store="/kv"} 8"#,
            r#"far_backlog_bytes{store="/kv"} 0"#,
            hits,
        ] {
            assert!(text.contains(&format!("\nhoistway_kv_{line}\n")), "{line}: {text}");
        }
        let info = r#"model="llama",dtype="",block_tokens="16",tensor_parallel="1/2""#;
        assert!(text.contains(info), "{text}");
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
        assert!(types.keys().all(|name| name.starts_with("hoistway_kv_") && helps.contains(name)));
        for name in types.keys() {
            let unit = ["bytes", "seconds"].into_iter().find(|unit| name.ends_with(&format!("_{unit}")));
            assert_eq!(units.get(name).copied(), unit, "{name}");
            assert!(!name.ends_with("_total"), "the end of a sample is no part of the name {name}");
        }
    }

    #[test]
    fn stores_share_a_metric_of_a_name() {
        let metrics = Metrics::new();
        let stats = Stats { far: Some(FarStats::default()), ..Stats::default() };
        let of = |root: &str, stats: &Stats| metrics.encode(Path::new(root), stats).unwrap();
        let text = join_metrics(&[of("/one", &Stats::default()), of("/two", &stats)]);
        let blocks = text.lines().filter(|line| line.contains("hoistway_kv_blocks")).collect::<Vec<_>>();
        let wanted = [
            "# HELP hoistway_kv_blocks Blocks that are found.",
            "# TYPE hoistway_kv_blocks gauge",
            r#"hoistway_kv_blocks{store="/one"} 0"#,
            r#"hoistway_kv_blocks{store="/two"} 0"#,
        ];
        assert_eq!(blocks, wanted);
        assert!(text.contains("far_up{store=\"/two\"} 0\n") && text.ends_with("# EOF\n"));
        assert_eq!(text.matches("# EOF").count(), 1);
        assert_eq!(join_metrics::<&str>(&[]), "# EOF\n");
    }
}
