//! Spans that end on other threads than they began on.
#![forbid(unsafe_code)]

use std::{mem, ops::Deref};
use tracing::{Span, dispatcher};

/// A span that may end where another subscriber of `tracing` is the default. A registry of `tracing-subscriber` closes the parent
/// of a span in the default subscriber, which may not know it, and panics then: so its own is the default while it ends.
#[derive(Debug)]
pub struct OwnSpan(Span);

impl From<Span> for OwnSpan {
    fn from(span: Span) -> Self {
        Self(span)
    }
}

impl Deref for OwnSpan {
    type Target = Span;

    fn deref(&self) -> &Span {
        &self.0
    }
}

impl Drop for OwnSpan {
    fn drop(&mut self) {
        let span = mem::replace(&mut self.0, Span::none());
        if let Some(own) = span.with_subscriber(|(_, dispatch)| dispatch.clone()) {
            dispatcher::with_default(&own, || drop(span));
        }
    }
}
