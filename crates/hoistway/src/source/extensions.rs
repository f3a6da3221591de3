//! State that routes keep about a source.
#![forbid(unsafe_code)]

use std::{any::Any, sync::OnceLock};

/// One value of each type that was asked for. No lock is held while a value is used, so a child of `fork` never waits for a
/// thread of its parent.
#[derive(Debug, Default)]
pub(crate) struct Extensions(OnceLock<Box<Extension>>);

#[derive(Debug)]
struct Extension {
    value: Box<dyn Any + Send + Sync>,
    others: Extensions,
}

impl Extensions {
    /// The value of this type, which the first call makes.
    pub(crate) fn get<T: Any + Default + Send + Sync>(&self) -> &T {
        let make = || Box::new(Extension { value: Box::new(T::default()), others: Self::default() });
        let first = self.0.get_or_init(make);
        first.value.downcast_ref().unwrap_or_else(|| first.others.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn there_is_one_value_of_each_type() {
        let extensions = Extensions::default();
        let (number, text) = (extensions.get::<AtomicU32>(), extensions.get::<OnceLock<String>>());
        number.store(7, Ordering::Relaxed);
        text.set("seven".into()).unwrap();
        assert_eq!(extensions.get::<AtomicU32>().load(Ordering::Relaxed), 7);
        assert_eq!(extensions.get::<OnceLock<String>>().get().map(String::as_str), Some("seven"));
    }
}
