//! Finds out how many experts a token uses: in a GGUF file's keys, or in a `config.json` beside the files.
#![forbid(unsafe_code)]

use crate::{Error, Result};
use hoistway::Catalog;
use serde_json::Value;
use std::{
    fs::File,
    io::{ErrorKind, Read},
    path::Path,
};

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
/// Longest `config.json`.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// The number of experts that a token uses in each layer, or `None` if neither keys nor a configuration says it.
///
/// # Errors
/// [`Error::InvalidConfig`].
pub(super) fn top_k(catalog: &Catalog) -> Result<Option<u32>> {
    for (key, value, _) in catalog.key_values() {
        if key.ends_with(GGUF_KEY)
            && let Some(number) = value.as_u64().and_then(|number| u32::try_from(number).ok())
            && number > 0
        {
            return Ok(Some(number));
        }
    }
    let folder = catalog.files().first().and_then(|file| file.source.as_path().parent());
    folder.map_or(Ok(None), |folder| of_config(&folder.join("config.json")))
}

/// The number in a configuration, or `None` if there is no file, or no number in it.
fn of_config(path: &Path) -> Result<Option<u32>> {
    let invalid = |reason: String| Error::InvalidConfig { path: path.to_owned(), reason };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        // Another number of experts may be in it: a guess would be silent.
        Err(error) => return Err(invalid(error.to_string())),
    };
    let mut text = Vec::new();
    file.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut text).map_err(|error| invalid(error.to_string()))?;
    if text.len() as u64 > MAX_CONFIG_BYTES {
        return Err(invalid(format!("it is longer than {MAX_CONFIG_BYTES} bytes")));
    }
    let config: Value = serde_json::from_slice(&text).map_err(|error| invalid(error.to_string()))?;
    // Models of several modalities have their text model's configuration inside.
    let sections = [Some(&config), config.get("text_config")];
    let found = sections.into_iter().flatten().find_map(|section| {
        CONFIG_KEYS.iter().find_map(|key| section.get(key).filter(|value| !value.is_null()))
    });
    let Some(value) = found else { return Ok(None) };
    let number = value.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|number| *number > 0);
    number.map(Some).ok_or_else(|| invalid(format!("{value} is not a number of experts")))
}
