//! `hoistway kv rm`.

use super::{arguments, opened::for_each_block};
use crate::{failure::Failure, output};
use hoistway_kv::{Error, LayoutKind, NamespaceId, Store};
use std::ops::ControlFlow;

pub(super) fn run(arguments: &arguments::Remove) -> Result<(), Failure> {
    let keys = arguments.keys.iter().map(|key| bytes_of(key, arguments)).collect::<Result<Vec<_>, _>>()?;
    let store = arguments.root.tend(None)?;
    let namespace = store.existing_namespace(arguments.namespace)?;
    let removed = if arguments.all { namespace.clear()? } else { namespace.delete(&keys)? };
    let left = if arguments.all {
        let left = count(&store, arguments.namespace)?;
        if left == 0 { Vec::new() } else { vec![blocks(left)] }
    } else {
        let keys = arguments.keys.iter().zip(namespace.lookup(&keys)?);
        keys.filter(|(_, is_left)| *is_left).map(|(key, _)| key.clone()).collect()
    };
    let why = match store.report()?.layout {
        LayoutKind::Files => "stored meanwhile",
        _ => "only the process that stored a block can remove it",
    };
    store.close(None)?;
    output::write_text(&format!("{} removed", blocks(removed)))?;
    if left.is_empty() {
        return Ok(());
    }
    let left = left.join(", ");
    Err(Failure::told(format!("{left} stayed: {why}"), 1))
}

fn blocks(count: usize) -> String {
    format!("{count} {}", if count == 1 { "block" } else { "blocks" })
}

/// Blocks of a namespace.
fn count(store: &Store, namespace: NamespaceId) -> Result<usize, Error> {
    let mut count = 0;
    for_each_block(store, |block| {
        count += usize::from(block.namespace == namespace);
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(count)
}

fn bytes_of(key: &str, arguments: &arguments::Remove) -> Result<Vec<u8>, Error> {
    if !arguments.hex {
        return Ok(key.as_bytes().to_vec());
    }
    from_hex(key).ok_or_else(|| Error::InvalidOption {
        option: "key",
        value: key.to_owned(),
        reason: "with --hex it must be pairs of hexadecimal digits".into(),
    })
}

/// Bytes of pairs of hexadecimal digits.
fn from_hex(digits: &str) -> Option<Vec<u8>> {
    let value = |digit: u8| char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok());
    let pairs = digits.as_bytes().chunks(2);
    pairs.map(|pair| Some(value(*pair.first()?)? << 4 | value(*pair.get(1)?)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_hexadecimal() {
        assert_eq!(from_hex("00fF"), Some(vec![0, 255]));
        for wrong in ["0", "0g", "+1", "é"] {
            assert_eq!(from_hex(wrong), None, "{wrong}");
        }
    }
}
