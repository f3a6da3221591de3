//! Finds out how many experts a token uses: in a GGUF file's keys, or in a `config.json` beside the files.
#![forbid(unsafe_code)]

use crate::{Error, Result};
use hoistway::{Cancel, Checkpoint};
use serde_json::Value;

/// The end of a GGUF key.
const GGUF_KEY: &str = ".expert_used_count";
/// Names of the number in `config.json`, as models of transformers have them.
const CONFIG_KEYS: [&str; 6] = [
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
];
/// The configuration that models of transformers have beside their files.
const CONFIG: &str = "config.json";
/// Longest `config.json`.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// The number of experts that a token uses in each layer, or `None` if neither keys nor a configuration says it.
///
/// # Errors
/// [`Error::InvalidConfig`]; [`Error::Engine`] if reading it was cancelled.
pub(super) fn top_k(cancel: Option<&Cancel>, checkpoint: &Checkpoint) -> Result<Option<u32>> {
    for (key, value, _) in checkpoint.catalog().key_values() {
        if key.ends_with(GGUF_KEY)
            && let Some(number) = value.as_u64().and_then(|number| u32::try_from(number).ok())
            && number > 0
        {
            return Ok(Some(number));
        }
    }
    let first = checkpoint.catalog().files().first();
    let invalid = |reason: String| {
        let path = first.map(|file| file.source.beside(CONFIG)).unwrap_or_default();
        Error::InvalidConfig { path, reason }
    };
    let read = match cancel {
        Some(cancel) => checkpoint.read_beside_until(cancel, CONFIG, MAX_CONFIG_BYTES),
        None => checkpoint.read_beside(CONFIG, MAX_CONFIG_BYTES),
    };
    match read {
        Ok(None) => Ok(None),
        Ok(Some(text)) => of_config(&text).map_err(invalid),
        Err(error @ (hoistway::Error::Cancelled | hoistway::Error::Forked)) => Err(error.into()),
        // Another number of experts may be in it: a guess would be silent.
        Err(hoistway::Error::InvalidFile { problem, .. }) => Err(invalid(problem.to_string())),
        Err(hoistway::Error::Io { source, .. }) => Err(invalid(source.to_string())),
        Err(error) => Err(invalid(error.to_string())),
    }
}

/// The number in a configuration, or `None` if there is no number in it.
fn of_config(text: &[u8]) -> Result<Option<u32>, String> {
    let config: Value = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    // Models of several modalities have their text model's configuration inside.
    let sections = [Some(&config), config.get("text_config")];
    let found = sections.into_iter().flatten().find_map(|section| {
        CONFIG_KEYS.iter().find_map(|key| section.get(key).filter(|value| !value.is_null()))
    });
    let Some(value) = found else { return Ok(None) };
    let number = value.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|number| *number > 0);
    number.map(Some).ok_or_else(|| format!("{value} is not a number of experts"))
}
