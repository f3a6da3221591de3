//! `windlass kv rm`.

use super::{archive::from_hex, arguments};
use crate::{failure::Failure, output};
use windlass_kv::Error;

pub(super) fn run(arguments: &arguments::Remove) -> Result<(), Failure> {
    let keys = arguments.keys.iter().map(|key| bytes_of(key, arguments)).collect::<Result<Vec<_>, _>>()?;
    let store = arguments.root.tend()?;
    let namespace = store.existing_namespace(arguments.namespace)?;
    let removed = if arguments.all { namespace.clear()? } else { namespace.delete(&keys)? };
    let left = if arguments.all { Vec::new() } else { namespace.lookup(&keys)? };
    store.close(None)?;
    let noun = if removed == 1 { "block" } else { "blocks" };
    output::write_text(&format!("{removed} {noun} removed"))?;
    match arguments
        .keys
        .iter()
        .zip(left)
        .filter(|(_, is_left)| *is_left)
        .map(|(key, _)| key.as_str())
        .collect::<Vec<_>>()
    {
        left if left.is_empty() => Ok(()),
        left => {
            let message = format!(
                "{} stayed: a process that runs has stored that, and alone can remove it",
                left.join(", ")
            );
            Err(Failure::told(message, 1))
        }
    }
}

fn bytes_of(key: &str, arguments: &arguments::Remove) -> Result<Vec<u8>, Error> {
    if !arguments.hex {
        return Ok(key.as_bytes().to_vec());
    }
    from_hex(key).ok_or_else(|| Error::InvalidOption {
        option: "key",
        value: key.to_owned(),
        reason: "with --hex it is pairs of hexadecimal digits".into(),
    })
}
