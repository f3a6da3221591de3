//! State that a child of `fork` has anew: connections and locks of its parent are of no use to it.

use once_cell::race::OnceBox;
use std::process;

/// A value for each process. No lock is held while a value is made or used: a child waits for no thread of its parent.
#[derive(Debug)]
pub(crate) struct PerProcess<T>(OnceBox<Own<T>>);

#[derive(Debug)]
struct Own<T> {
    process: u32,
    value: T,
    children: PerProcess<T>,
}

impl<T> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(OnceBox::new())
    }

    /// The value of this process, which its first call makes. If others make one too, one of them is kept.
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

#[cfg(test)]
mod tests {
    use super::PerProcess;
    use std::{sync::Barrier, thread};

    /// As a child of `fork` finds it, whose parent was making the value.
    #[test]
    fn a_value_is_made_while_another_thread_makes_one() {
        let (value, gate) = (PerProcess::new(), Barrier::new(2));
        let make_slowly = || {
            gate.wait();
            gate.wait();
            "slow"
        };
        thread::scope(|scope| {
            let slow = scope.spawn(|| *value.get(make_slowly));
            gate.wait();
            assert_eq!(*value.get(|| "fast"), "fast");
            gate.wait();
            assert_eq!(slow.join().unwrap(), "fast", "one of them is kept");
        });
    }
}
