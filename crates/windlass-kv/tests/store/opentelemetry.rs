//! What OpenTelemetry is told is what the store says itself.

use crate::common::*;
use opentelemetry::metrics::MeterProvider;
use opentelemetry_sdk::{
    error::OTelSdkResult,
    metrics::{
        PeriodicReader, SdkMeterProvider, Temporality,
        data::{AggregatedMetrics, MetricData, ResourceMetrics},
        exporter::PushMetricExporter,
    },
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};
use windlass_kv::{Status, Store};

/// Values by name and labels: `name{label=value,…}`.
type Values = BTreeMap<String, u64>;

/// Keeps what was exported last.
#[derive(Clone, Default)]
struct Exporter(Arc<Mutex<Values>>);

impl PushMetricExporter for Exporter {
    async fn export(&self, metrics: &ResourceMetrics) -> OTelSdkResult {
        let mut values = Values::new();
        for metric in metrics.scope_metrics().flat_map(|scope| scope.metrics()) {
            let points: Vec<(String, u64)> = match metric.data() {
                AggregatedMetrics::U64(MetricData::Gauge(gauge)) => {
                    gauge.data_points().map(|point| (labels(point.attributes()), point.value())).collect()
                }
                AggregatedMetrics::U64(MetricData::Sum(sum)) => {
                    assert!(sum.is_monotonic(), "{}", metric.name());
                    sum.data_points().map(|point| (labels(point.attributes()), point.value())).collect()
                }
                other => panic!("{}: {other:?}", metric.name()),
            };
            values.extend(
                points.into_iter().map(|(labels, value)| (metric.name().to_owned() + &labels, value)),
            );
        }
        *self.0.lock().unwrap() = values;
        Ok(())
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }

    fn temporality(&self) -> Temporality {
        Temporality::Cumulative
    }
}

fn labels<'a>(labels: impl Iterator<Item = &'a opentelemetry::KeyValue>) -> String {
    let mut labels: Vec<String> = labels.map(|label| format!("{}={}", label.key, label.value)).collect();
    labels.sort_unstable();
    if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) }
}

#[test]
fn what_the_store_says_is_exported() {
    let exporter = Exporter::default();
    let reader = PeriodicReader::builder(exporter.clone()).with_interval(Duration::from_secs(3600)).build();
    let provider = SdkMeterProvider::builder().with_reader(reader).build();
    let exported = || {
        provider.force_flush().unwrap();
        exporter.0.lock().unwrap().clone()
    };
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(options(&root)).unwrap();
    store.observe(&provider.meter("test")).unwrap();
    let blocks = namespace(&store);
    let shape = Shape::of(2, 65536);
    for number in 0..3 {
        put(&blocks, &format!("block {number}"), shape);
    }
    assert_eq!(get_status(&blocks, "block 1", shape), Status::Ok);
    assert_eq!(get_status(&blocks, "none", shape), Status::Miss);

    let values = exported();
    let stats = store.stats().unwrap();
    let id = &stats.namespaces[0].namespace;
    for (name, expected) in [
        ("blocks".to_owned(), 3),
        ("payload_bytes".to_owned(), 6 * 65536),
        ("index_bytes".to_owned(), stats.index_bytes),
        ("corrupt_blocks".to_owned(), 0),
        (format!("stored_blocks{{namespace={id}}}"), 3),
        (format!("stored_bytes{{namespace={id}}}"), 6 * 65536),
        (format!("hits{{namespace={id}}}"), 2),
        (format!("misses{{namespace={id}}}"), 2),
        (format!("loaded_bytes{{namespace={id}}}"), 2 * 65536),
        ("dropped{reason=no_room}".to_owned(), 0),
    ] {
        assert_eq!(values.get(&format!("windlass_kv.{name}")), Some(&expected), "{name} of {values:?}");
    }
    let carried = |direction: &str| {
        let is_it = |name: &str| name.starts_with("windlass_kv.carried_bytes{") && name.contains(direction);
        values.iter().filter(|(name, _)| is_it(name)).map(|(_, bytes)| bytes).sum::<u64>()
    };
    assert!(carried("direction=write") >= 6 * 65536 && carried("direction=read") >= 2 * 65536, "{values:?}");

    // A store that is closed has nothing to say any more.
    store.close(LONG).unwrap();
    assert!(!exported().contains_key("windlass_kv.blocks"));
}
