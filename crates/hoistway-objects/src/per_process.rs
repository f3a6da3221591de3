//! State that a child of `fork` has anew: connections and locks of its parent are of no use to it.

use std::{process, sync::OnceLock};

/// A value for each process. No lock is held while a value is used.
#[derive(Debug)]
pub(crate) struct PerProcess<T>(OnceLock<Box<Own<T>>>);

#[derive(Debug)]
struct Own<T> {
    process: u32,
    value: T,
    children: PerProcess<T>,
}

impl<T> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// The value of this process, which its first call makes.
    pub(crate) fn get(&self, make: impl Fn() -> T) -> &T {
        let process = process::id();
        let mut at = self;
        loop {
            let own = at.0.get_or_init(|| Box::new(Own { process, value: make(), children: Self::new() }));
            if own.process == process {
                return &own.value;
            }
            at = &own.children;
        }
    }
}
