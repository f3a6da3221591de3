//! Loads of a program that has several subscribers of `tracing`.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{tensor, write_model};
use hoistway::{Checkpoint, Dtype, LoadOptions, Route};
use std::sync::{Arc, Mutex};
use tracing::{Subscriber, span};
use tracing_subscriber::{
    Layer,
    layer::{Context, SubscriberExt as _},
    registry::LookupSpan,
};

/// The name of a span, and that of its parent.
type Named = (String, Option<String>);

/// What spans there were.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Vec<Named>>>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Spans {
    fn on_new_span(&self, _: &span::Attributes<'_>, id: &span::Id, context: Context<'_, S>) {
        let span = context.span(id).unwrap();
        let parent = span.parent().map(|parent| parent.name().to_owned());
        self.0.lock().unwrap().push((span.name().to_owned(), parent));
    }
}

impl Spans {
    fn count(&self, name: &str, parent: &str) -> usize {
        let spans = self.0.lock().unwrap();
        spans.iter().filter(|(own, of)| own == name && of.as_deref() == Some(parent)).count()
    }
}

#[test]
fn reads_are_spans_of_the_subscriber_of_their_load() {
    let (everywhere, here) = (Spans::default(), Spans::default());
    let global = tracing_subscriber::registry().with(everywhere.clone());
    tracing::subscriber::set_global_default(global).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    // A load of many bytes has threads of its own.
    for (number, elements) in [1 << 10, 4 << 20].into_iter().enumerate() {
        write_model(&path, &[tensor("w", Dtype::U8, &[elements])], 0, 1);
        let checkpoint = Checkpoint::open(&[&path]).unwrap();
        let options = LoadOptions::default().route(Route::Threads);
        let local = tracing_subscriber::registry().with(here.clone());
        let loading = tracing::subscriber::with_default(local, || checkpoint.start(&options));
        loading.unwrap().wait().unwrap();
        assert!(here.count("read", "transfer") > number);
    }
    assert_eq!(everywhere.count("read", "transfer"), 0);
}
