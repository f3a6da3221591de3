//! State that routes keep about a source.
#![forbid(unsafe_code)]

use once_cell::race::OnceBox;
use std::any::Any;

/// One value of each type that was asked for. No lock is held while a value is made or used, so a child of `fork` never waits
/// for a thread of its parent.
#[derive(Debug, Default)]
pub(crate) struct Extensions(OnceBox<Extension>);

#[derive(Debug)]
struct Extension {
    value: Box<dyn Any + Send + Sync>,
    others: Extensions,
}

impl Extensions {
    /// The value of this type, which the first call makes. If others make one too, one of them is kept.
    pub(crate) fn get<T: Any + Default + Send + Sync>(&self) -> &T {
        let make = || Box::new(Extension { value: Box::new(T::default()), others: Self::default() });
        let first = self.0.get_or_init(make);
        first.value.downcast_ref().unwrap_or_else(|| first.others.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::{
            Barrier, OnceLock,
            atomic::{AtomicU32, Ordering},
        },
        thread,
    };

    #[test]
    fn there_is_one_value_of_each_type() {
        let extensions = Extensions::default();
        let (number, text) = (extensions.get::<AtomicU32>(), extensions.get::<OnceLock<String>>());
        number.store(7, Ordering::Relaxed);
        text.set("seven".into()).unwrap();
        assert_eq!(extensions.get::<AtomicU32>().load(Ordering::Relaxed), 7);
        assert_eq!(extensions.get::<OnceLock<String>>().get().map(String::as_str), Some("seven"));
    }

    /// As a child of `fork` finds it, whose parent was making the value.
    #[test]
    fn a_value_is_made_while_another_thread_makes_one() {
        static MADE: AtomicU32 = AtomicU32::new(0);
        static GATE: Barrier = Barrier::new(2);
        #[derive(Debug)]
        struct Slow(bool);
        impl Default for Slow {
            fn default() -> Self {
                let is_first = MADE.fetch_add(1, Ordering::Relaxed) == 0;
                if is_first {
                    // The test goes on, and then this does.
                    GATE.wait();
                    GATE.wait();
                }
                Self(is_first)
            }
        }
        let extensions = Extensions::default();
        thread::scope(|scope| {
            let first = scope.spawn(|| extensions.get::<Slow>().0);
            GATE.wait();
            assert!(!extensions.get::<Slow>().0);
            GATE.wait();
            assert!(!first.join().unwrap(), "there are two");
        });
    }
}
