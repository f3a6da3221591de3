//! The fields of a span or an event, as JSON.
#![forbid(unsafe_code)]

use serde_json::{Map, Value};
use std::fmt::Debug;
use tracing::field::{Field, Visit};

/// Fields by name.
#[derive(Clone, Default)]
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    pub(crate) fn add(&mut self, name: &str, value: Value) {
        self.0.insert(name.into(), value);
    }

    pub(crate) fn extend(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    /// The track that a span asks for.
    pub(crate) fn track(&self) -> Option<&str> {
        self.0.get("track")?.as_str()
    }

    pub(crate) fn take_message(&mut self) -> Option<String> {
        match self.0.remove("message")? {
            Value::String(text) => Some(text),
            other => Some(other.to_string()),
        }
    }

    pub(crate) fn as_map(&self) -> &Map<String, Value> {
        &self.0
    }
}

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field.name(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field.name(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field.name(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field.name(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field.name(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add(field.name(), format!("{value:?}").into());
    }
}
