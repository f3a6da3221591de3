//! Whether a server refuses what it is asked for besides the bytes, such as checksums.

use crate::Problem;
use std::sync::atomic::{AtomicU32, Ordering};

/// Refusals in a row that say no reason: one alone may be that of a proxy.
const MOST_UNEXPLAINED: u32 = 3;

/// How often a server refused in a row, where it did the same without what it refused.
#[derive(Debug, Default)]
pub(crate) struct Refusals(AtomicU32);

impl Refusals {
    /// Whether it is not asked any more.
    pub(crate) fn are_meant(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= MOST_UNEXPLAINED
    }

    /// Notes a refusal. That of a store has a code, and one is enough.
    pub(crate) fn note(&self, problem: &Problem) {
        let has_code = matches!(problem, Problem::Refused { said, .. } if said.contains(", "));
        let count = if has_code { MOST_UNEXPLAINED } else { 1 };
        let add = |own: u32| Some(own.saturating_add(count));
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// Notes that it did what it was asked for.
    pub(crate) fn forget(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_refusal_with_a_code_is_meant_and_without_one_several_in_a_row() {
        let refused = |said: &str| Problem::Refused { status: 501, said: said.into() };
        let (plain, coded) = (refused("status 501"), refused("status 501, NotImplemented"));
        let refusals = Refusals::default();
        refusals.note(&plain);
        refusals.note(&plain);
        refusals.forget();
        refusals.note(&plain);
        assert!(!refusals.are_meant());
        refusals.note(&plain);
        refusals.note(&plain);
        assert!(refusals.are_meant());
        let refusals = Refusals::default();
        refusals.note(&coded);
        assert!(refusals.are_meant());
    }
}
