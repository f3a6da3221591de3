//! Options from text and from environment variables: one way for all of them.
#![forbid(unsafe_code)]

use crate::{Error, Result};
use bytesize::ByteSize;
use serde::Deserialize;
#[cfg(feature = "objects")]
use std::path::{Path, PathBuf};
use std::{
    str::FromStr,
    sync::atomic::{AtomicBool, Ordering},
};

/// All variables for users.
pub(crate) const KNOWN: [&str; 22] = [
    "HOISTWAY_CACHE",
    "HOISTWAY_CACHE_BYTES",
    "HOISTWAY_CHUNK",
    "HOISTWAY_COALESCE_GAP",
    "HOISTWAY_DEVICE",
    "HOISTWAY_DIRECT",
    "HOISTWAY_DIRECTSTORAGE_DIR",
    "HOISTWAY_DTYPE",
    "HOISTWAY_HUGE_PAGES",
    "HOISTWAY_IN_FLIGHT",
    "HOISTWAY_LAYOUT",
    "HOISTWAY_LENIENT",
    "HOISTWAY_LOG",
    "HOISTWAY_MEMORY_BUDGET",
    "HOISTWAY_NUMA",
    "HOISTWAY_POPULATE",
    "HOISTWAY_REPORT",
    "HOISTWAY_RINGS",
    "HOISTWAY_ROUTE",
    "HOISTWAY_SAFETENSORS",
    "HOISTWAY_THREADS",
    "HOISTWAY_USRBIO",
];

/// Calls `set` with the name of the option and the value of each variable that is set.
///
/// # Errors
/// That of `set`; an [`Error::InvalidOption`] names the variable rather than the option.
pub(crate) fn apply(
    variables: &[(&'static str, &'static str)],
    mut set: impl FnMut(&'static str, &str) -> Result<()>,
) -> Result<()> {
    // No lock, which a child of `fork` could wait for.
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        for (name, meant) in names.filter_map(|name| meant(&name).map(|meant| (name, meant))) {
            tracing::warn!("the environment variable {name} is not one of hoistway's: is {meant} meant?");
        }
    }
    for &(variable, option) in variables {
        let Some(value) = std::env::var_os(variable) else { continue };
        // What is not text is no value of any option: it is refused as the text that it comes closest to.
        set(option, value.to_string_lossy().trim()).map_err(|error| match error {
            Error::InvalidOption { value, reason, .. } => {
                Error::InvalidOption { option: variable, value, reason }
            }
            other => other,
        })?;
    }
    Ok(())
}

/// The variable of hoistway whose name is closest to a misspelt one. `None` if no name is close: the variable may belong to
/// another program.
fn meant(variable: &str) -> Option<&'static str> {
    let known = KNOWN.iter().map(|known| (strsim::damerau_levenshtein(variable, known), *known));
    let (distance, nearest) = known.min()?;
    matches!(distance, 1 | 2).then_some(nearest)
}

/// A path with the home directory in the place of a `~` at its start, as shells have it. Settings do not go through a shell.
#[cfg(feature = "objects")]
pub(crate) fn with_home(path: &Path) -> PathBuf {
    let below = path.strip_prefix("~").ok();
    match below.zip(std::env::home_dir()) {
        Some((below, home)) => home.join(below),
        None => path.to_owned(),
    }
}

/// `true` or `false`, in any case.
pub(crate) fn boolean(option: &'static str, value: &str) -> Result<bool> {
    value
        .to_ascii_lowercase()
        .parse()
        .map_err(|_| Error::invalid_option(option, value, "it must be true or false"))
}

/// A value of an enum, by its serialised name.
pub(crate) fn named<T: for<'de> Deserialize<'de>>(option: &'static str, value: &str) -> Result<T> {
    let text = serde::de::value::StrDeserializer::<serde::de::value::Error>::new(value);
    T::deserialize(text).map_err(|error| {
        let reason = match error.to_string().split_once("expected ") {
            Some((_, known)) => format!("it must be {}", known.replace('`', "")),
            None => error.to_string(),
        };
        Error::invalid_option(option, value, reason)
    })
}

/// A size such as `4194304`, `4MiB` or `1.5 GB`.
pub(crate) fn bytes(option: &'static str, value: &str) -> Result<u64> {
    ByteSize::from_str(value)
        .map(|size| size.as_u64())
        .map_err(|_| Error::invalid_option(option, value, "it must be a size such as 4194304, 4MiB or 8GB"))
}

/// A number from 1 to 256.
pub(crate) fn count(option: &'static str, value: &str) -> Result<usize> {
    match value.parse() {
        Ok(count @ 1..=256) => Ok(count),
        _ => Err(Error::invalid_option(option, value, "it must be a number from 1 to 256")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variable_is_in_the_reference() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/options.md");
        let page = std::fs::read_to_string(page).unwrap();
        for variable in KNOWN {
            assert!(page.contains(&format!("`{variable}`")), "{variable}");
        }
    }

    #[test]
    fn a_variable_that_is_nearly_one_of_ours_names_it() {
        assert_eq!(meant("HOISTWAY_ROUT"), Some("HOISTWAY_ROUTE"));
        assert_eq!(meant("HOISTWAY_CAHCE_BYTES"), Some("HOISTWAY_CACHE_BYTES"));
        assert_eq!(meant("HOISTWAY_MEMORYBUDGET"), Some("HOISTWAY_MEMORY_BUDGET"));
        for other in ["HOISTWAY_ROUTE", "HOISTWAY_VERSION", "HOISTWAY_TEST_REQUIRE", "ROUT"] {
            assert_eq!(meant(other), None, "{other}");
        }
    }
}
