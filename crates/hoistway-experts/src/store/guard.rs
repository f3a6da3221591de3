//! A policy of the caller's: a panic in it closes the store, and does not leave the ledger half changed.
#![forbid(unsafe_code)]

use crate::{
    Error,
    error::guarded,
    policy::{ExpertId, Policy},
};

/// A policy that is not called again once it has panicked.
pub(super) struct GuardedPolicy {
    policy: Box<dyn Policy>,
    name: &'static str,
    panic: Option<String>,
}

impl GuardedPolicy {
    pub(super) fn new(policy: Box<dyn Policy>) -> Self {
        Self { name: policy.name(), policy, panic: None }
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// The message of its panic, if it has panicked.
    pub(super) fn panic(&self) -> Option<&str> {
        self.panic.as_deref()
    }

    pub(super) fn visit(&mut self, layer: u32, experts: &[(u32, f32)]) {
        self.call(|policy| policy.visit(layer, experts));
    }

    pub(super) fn insert(&mut self, expert: ExpertId) {
        self.call(|policy| policy.insert(expert));
    }

    pub(super) fn remove(&mut self, expert: ExpertId) {
        self.call(|policy| policy.remove(expert));
    }

    pub(super) fn victim(&mut self, may_evict: &mut dyn FnMut(ExpertId) -> bool) -> Option<ExpertId> {
        self.call(|policy| policy.victim(may_evict)).flatten()
    }

    pub(super) fn admit(&mut self, expert: ExpertId) -> bool {
        self.call(|policy| policy.admit(expert)).unwrap_or(true)
    }

    fn call<T>(&mut self, call: impl FnOnce(&mut dyn Policy) -> T) -> Option<T> {
        if self.panic.is_some() {
            return None;
        }
        match guarded("the policy", || call(&mut *self.policy)) {
            Ok(value) => Some(value),
            Err(error) => {
                tracing::error!(policy = self.name, %error, "the store is closed");
                self.panic = Some(match error {
                    Error::Panicked { message, .. } => message,
                    other => other.to_string(),
                });
                None
            }
        }
    }
}
