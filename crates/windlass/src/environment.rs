//! Options from environment variables: one way for all of them.
#![forbid(unsafe_code)]

use crate::{Error, Result};

/// Calls `set` with the name of the option and the value of each variable that is set.
///
/// # Errors
/// That of `set`; an [`Error::InvalidOption`] names the variable rather than the option.
pub(crate) fn apply(
    variables: &[(&'static str, &'static str)],
    mut set: impl FnMut(&'static str, &str) -> Result<()>,
) -> Result<()> {
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

/// `true` or `false`, in any case.
pub(crate) fn boolean(option: &'static str, value: &str) -> Result<bool> {
    value.to_ascii_lowercase().parse().map_err(|_| Error::InvalidOption {
        option,
        value: value.to_owned(),
        reason: "it is true or false".into(),
    })
}
