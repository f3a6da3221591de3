//! Keys of blocks, and their fingerprints.
#![forbid(unsafe_code)]

use crate::{Error, NamespaceId, Result};
use serde::{Serialize, Serializer};
use std::fmt;

/// The name of a block in its namespace: 1 to 1024 bytes, of any values.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Box<[u8]>);

impl Key {
    /// The longest key, in bytes.
    pub const MAX_LEN: usize = 1024;

    /// A key of these bytes.
    ///
    /// # Errors
    /// [`Error::InvalidKey`] if there are none, or too many.
    pub fn new(bytes: &[u8]) -> Result<Self> {
        Self::check(bytes)?;
        Ok(Self(bytes.into()))
    }

    /// Whether a key can have these bytes.
    pub(crate) fn check(bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() || bytes.len() > Self::MAX_LEN {
            return Err(Error::InvalidKey { len: bytes.len() });
        }
        Ok(())
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// As text where it is text that can be shown, else in hex.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match std::str::from_utf8(&self.0) {
            Ok(text) if !text.chars().any(char::is_control) => f.write_str(text),
            _ => self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
        }
    }
}

impl Serialize for Key {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The fingerprint by which a block is found: BLAKE3 of its namespace and its key, cut to 128 bits. Two keys of one
/// fingerprint, should they ever be met, are told apart when a block is read: its header has the whole key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub(crate) [u8; 16]);

impl Fingerprint {
    /// The fingerprint of a key in a namespace.
    pub fn of(namespace: NamespaceId, key: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(namespace.as_bytes());
        hasher.update(key);
        let mut fingerprint = [0; 16];
        fingerprint.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Self(fingerprint)
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// 32 bits of it that tell most blocks apart.
    pub(crate) fn tag(&self) -> u32 {
        u32::from_le_bytes([self.0[4], self.0[5], self.0[6], self.0[7]])
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Fingerprint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_bounded() {
        assert!(matches!(Key::new(b""), Err(Error::InvalidKey { len: 0 })));
        assert!(Key::new(&[0; Key::MAX_LEN]).is_ok());
        assert!(matches!(Key::new(&[0; 1025]), Err(Error::InvalidKey { len: 1025 })));
    }

    #[test]
    fn keys_are_shown_as_text_or_hex() {
        assert_eq!(Key::new(b"model@0").unwrap().to_string(), "model@0");
        assert_eq!(Key::new(&[0xff, 0]).unwrap().to_string(), "ff00");
        assert_eq!(Key::new(b"a\n").unwrap().to_string(), "610a");
    }
}
