//! What a store counts, for OpenTelemetry.
#![forbid(unsafe_code)]

use super::{Core, Store};
use crate::{CarrierShare, Dropped, NamespaceStats, Result, Stats};
use opentelemetry::{KeyValue, metrics::Meter};
use std::sync::{Arc, Weak};

/// A counter or level of the store as a whole: its name, what it says, and where it is found.
type OfStore = (&'static str, &'static str, fn(&Stats) -> u64);
/// A counter of each namespace.
type OfNamespace = (&'static str, &'static str, fn(&NamespaceStats) -> u64);

const LEVELS: [OfStore; 11] = [
    ("blocks", "Blocks that are found", |stats| stats.blocks),
    ("payload_bytes", "Bytes of their shards", |stats| stats.payload_bytes),
    ("allocated_bytes", "Bytes that the files of this process take", |stats| stats.allocated_bytes),
    ("root_bytes", "Bytes that the files of all processes take", |stats| stats.root_bytes),
    ("index_bytes", "Bytes of host memory that the index takes", |stats| stats.index_bytes),
    ("open_requests", "Requests that have not ended", |stats| stats.open_requests),
    ("in_flight_bytes", "Bytes of transfers under way", |stats| stats.in_flight_bytes),
    ("queued_loads", "Loads that wait for others to end", |stats| stats.queued_loads),
    ("partial_blocks", "Blocks that have some of their shards", |stats| stats.partial_blocks),
    ("leased_requests", "Requests that have ended, but whose memory is in use", |stats| {
        stats.leased_requests
    }),
    ("unusable_namespaces", "Namespaces that are there, but cannot be used", |stats| {
        stats.unusable_namespaces
    }),
];

const COUNTERS: [OfStore; 11] = [
    ("evicted_blocks", "Blocks that went to make room", |stats| stats.evicted_blocks),
    ("expired_blocks", "Blocks whose time was over", |stats| stats.expired_blocks),
    ("corrupt_blocks", "Blocks that were found damaged", |stats| stats.corrupt_blocks),
    ("lost_on_recovery", "Blocks that were not whole when the store was opened", |stats| {
        stats.lost_on_recovery
    }),
    ("damaged_records", "Records of other logs that cannot be read", |stats| stats.damaged_records),
    ("timed_out", "Requests that took too long", |stats| stats.timed_out),
    ("cancelled", "Requests that were given up", |stats| stats.cancelled),
    ("io_errors", "Transfers that failed", |stats| stats.io_errors),
    ("commits", "Groups of blocks that were committed", |stats| stats.commits),
    ("abandoned", "Blocks that never got all their shards", |stats| stats.abandoned),
    ("unsynced_loads", "Items of blocks that no sync covers", |stats| stats.unsynced_loads),
];

const OF_NAMESPACES: [OfNamespace; 10] = [
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

impl Store {
    /// Makes instruments on `meter` that say what the store holds and did, as long as it is open. Their names are those of
    /// [`Stats`], after `windlass_kv.`.
    ///
    /// # Errors
    /// [`Error::Closed`](crate::Error::Closed).
    pub fn observe(&self, meter: &Meter) -> Result<()> {
        self.core().check_open()?;
        let core = Arc::downgrade(self.core());
        for (name, description, value) in LEVELS {
            let core = core.clone();
            meter
                .u64_observable_gauge(format!("windlass_kv.{name}"))
                .with_description(description)
                .with_callback(move |observer| {
                    if let Some(stats) = stats(&core) {
                        observer.observe(value(&stats), &[]);
                    }
                })
                .build();
        }
        for (name, description, value) in COUNTERS {
            count(meter, name, description, &core, move |stats| vec![(value(stats), Vec::new())]);
        }
        for (name, description, value) in OF_NAMESPACES {
            count(meter, name, description, &core, move |stats| {
                let labelled = |namespace: &NamespaceStats| {
                    let label = KeyValue::new("namespace", namespace.namespace.to_string());
                    (value(namespace), vec![label])
                };
                stats.namespaces.iter().map(labelled).collect()
            });
        }
        count(meter, "dropped", "Items that were to be stored, but were refused", &core, |stats| {
            let Dropped { no_room, quota, busy, not_admitted, too_large } = stats.dropped;
            [
                ("no_room", no_room),
                ("quota", quota),
                ("busy", busy),
                ("not_admitted", not_admitted),
                ("too_large", too_large),
            ]
            .map(|(reason, count)| (count, vec![KeyValue::new("reason", reason)]))
            .into()
        });
        self.observe_carriers(meter);
        Ok(())
    }

    fn observe_carriers(&self, meter: &Meter) {
        let metrics = self.core().metrics.clone();
        meter
            .u64_observable_counter("windlass_kv.carried_bytes")
            .with_description("Bytes by the way that they took")
            .with_callback(move |observer| {
                for CarrierShare { carrier, read_bytes, written_bytes } in metrics.carriers() {
                    for (direction, bytes) in [("read", read_bytes), ("write", written_bytes)] {
                        let labels = [
                            KeyValue::new("route", carrier.route()),
                            KeyValue::new("access", carrier.access().name()),
                            KeyValue::new("direction", direction),
                        ];
                        observer.observe(bytes, &labels);
                    }
                }
            })
            .build();
    }
}

fn stats(core: &Weak<Core>) -> Option<Stats> {
    core.upgrade().filter(|core| core.check_open().is_ok()).map(|core| core.stats())
}

fn count(
    meter: &Meter,
    name: &str,
    description: &'static str,
    core: &Weak<Core>,
    values: impl Fn(&Stats) -> Vec<(u64, Vec<KeyValue>)> + Send + Sync + 'static,
) {
    let core = core.clone();
    meter
        .u64_observable_counter(format!("windlass_kv.{name}"))
        .with_description(description)
        .with_callback(move |observer| {
            for (value, labels) in stats(&core).iter().flat_map(&values) {
                observer.observe(value, &labels);
            }
        })
        .build();
}
