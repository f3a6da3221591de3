//! What has happened so far, by name.

use std::{
    collections::HashMap,
    io::Write,
    sync::{
        LazyLock, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// A count that only grows.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    const fn new() -> Counter {
        Counter(AtomicU64::new(0))
    }

    pub(crate) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

pub(crate) static COPIES: Counter = Counter::new();
/// Copies on streams from or to host memory that is not pinned.
pub(crate) static PAGEABLE_COPIES: Counter = Counter::new();
pub(crate) static COPIED_BYTES: Counter = Counter::new();
pub(crate) static KERNELS: Counter = Counter::new();
/// Things that were destroyed together with their context, or with cuFile's driver, because the caller had not done
/// it before.
pub(crate) static LEAKED: Counter = Counter::new();
/// Fences that were destroyed while a stream had yet to wait for them.
pub(crate) static DESTROYED_IN_USE: Counter = Counter::new();
/// Memory that was unmapped while a stream had yet to use it.
pub(crate) static UNMAPPED_IN_USE: Counter = Counter::new();
pub(crate) static CUFILE_READS: Counter = Counter::new();
pub(crate) static CUFILE_WRITES: Counter = Counter::new();

static CALLS: LazyLock<Mutex<HashMap<&'static str, u64>>> = LazyLock::new(Mutex::default);

/// Counts a call of a driver or cuFile function, whatever comes of it.
pub(crate) fn called(function: &'static str) {
    *CALLS.lock().unwrap_or_else(PoisonError::into_inner).entry(function).or_default() += 1;
}

/// Calls by threads that held Python's interpreter meanwhile.
pub(crate) static UNDER_INTERPRETER: Counter = Counter::new();

/// Counts a call by a thread that holds Python's interpreter, and says which the first was.
pub(crate) fn called_under_interpreter(function: &'static str) {
    if UNDER_INTERPRETER.get() == 0 {
        let _ = writeln!(std::io::stderr(), "fake-cuda: {function} was called with the interpreter held");
    }
    UNDER_INTERPRETER.add(1);
}

pub(crate) fn calls_of(function: &str) -> u64 {
    CALLS.lock().unwrap_or_else(PoisonError::into_inner).get(function).copied().unwrap_or(0)
}
