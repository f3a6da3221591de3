//! Namespaces: groups of blocks of one model, layout and tenant. Blocks of different namespaces are never mixed.
#![forbid(unsafe_code)]

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, str::FromStr, time::Duration};

/// The properties that must be equal for processes to share blocks. Every field is part of the namespace's identity, so
/// a process with another element type, layout or tensor-parallel size sees none of these blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct NamespaceDescription {
    /// The model, by a name that changes when its weights do.
    pub model: String,
    /// Element type of the cache, such as `bfloat16` or `fp8_e4m3`.
    pub dtype: String,
    /// How a block's bytes are arranged, such as `[layer][k/v][block][tokens][heads][dim]`.
    pub layout: String,
    /// Layers that a block has parts of.
    pub layers: u32,
    /// Heads of keys and values, of this rank.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Ranks that share each layer, and which of them this is; `None` where blocks are those of all ranks.
    pub tensor_parallel: Option<Rank>,
    /// Ranks that share the layers.
    pub pipeline_parallel: Option<Rank>,
    /// Ranks that share the context.
    pub context_parallel: Option<Rank>,
    /// How the engine makes keys of tokens.
    pub key_algorithm: String,
    /// A tenant's secret: hashed, never written down. A process finds only blocks of its own salt. A salt is
    /// no access control: a process that can read the store's directory can read all blocks, and can guess a short salt.
    #[serde(skip_serializing_if = "String::is_empty", serialize_with = "hashed")]
    pub salt: String,
    /// Whatever else tells blocks apart, by name.
    pub other: BTreeMap<String, String>,
}

hoistway_io::setters! {
    NamespaceDescription {
        model: String,
        dtype: String,
        layout: String,
        layers: u32,
        kv_heads: u32,
        head_dim: u32,
        block_tokens: u32,
        tensor_parallel: Option<Rank>,
        pipeline_parallel: Option<Rank>,
        context_parallel: Option<Rank>,
        key_algorithm: String,
        salt: String,
        other: BTreeMap<String, String>,
    }
}

/// One of several processes that share something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rank {
    /// The number of this rank, from 0.
    pub rank: u32,
    /// The number of ranks.
    pub size: u32,
}

impl NamespaceDescription {
    /// The description as it is written down: JSON of fields in a fixed order.
    ///
    /// # Errors
    /// [`Error::Internal`]; in fact never.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| Error::Internal(error.to_string()))
    }

    /// Its identity: BLAKE3 of [`NamespaceDescription::to_json`], cut to 128 bits.
    ///
    /// # Errors
    /// As [`NamespaceDescription::to_json`].
    pub fn id(&self) -> Result<NamespaceId> {
        Ok(NamespaceId::of_description(&self.to_json()?))
    }

    /// An error if it cannot be meant.
    pub(crate) fn check(&self) -> Result<()> {
        let ranks = [
            ("tensor_parallel", self.tensor_parallel),
            ("pipeline_parallel", self.pipeline_parallel),
            ("context_parallel", self.context_parallel),
        ];
        for (option, rank) in ranks {
            if let Some(Rank { rank, size }) = rank.filter(|Rank { rank, size }| rank >= size) {
                let value = format!("({rank}, {size})");
                let reason = format!("{size} ranks have numbers below {size}, from 0");
                return Err(Error::InvalidOption { option, value, reason });
            }
        }
        Ok(())
    }
}

/// Identities of namespaces depend on this context, so it keeps the name that the project had when it was set.
const SALT_CONTEXT: &str = "windlass-kv 2026-11 namespace salt";

/// A salt is part of the identity by its digest alone.
fn hashed<S: serde::Serializer>(salt: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(
        &blake3::derive_key(SALT_CONTEXT, salt.as_bytes())
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>(),
    )
}

/// Identity of a namespace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespaceId(pub(crate) [u8; 16]);

impl NamespaceId {
    /// The identity of a description as it is written to disk.
    pub(crate) fn of_description(json: &str) -> Self {
        let mut id = [0; 16];
        id.copy_from_slice(&blake3::hash(json.as_bytes()).as_bytes()[..16]);
        Self(id)
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for NamespaceId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for NamespaceId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = || Error::InvalidOption {
            option: "namespace",
            value: text.to_owned(),
            reason: "it must be 32 hexadecimal digits, as 'hoistway kv ls' shows them".into(),
        };
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(invalid());
        }
        let value = u128::from_str_radix(text, 16).map_err(|_| invalid())?;
        Ok(Self(value.to_be_bytes()))
    }
}

/// The limits of a namespace. Each process that opens one says so for itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct NamespaceOptions {
    /// How long a block is kept after it was stored, at most.
    pub ttl: Option<Duration>,
    /// Most bytes of storage that the blocks of the namespace take, of all processes together, with headers.
    pub quota_bytes: Option<u64>,
}

hoistway_io::setters! {
    NamespaceOptions {
        ttl: Option<Duration>,
        quota_bytes: Option<u64>,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_is_part_of_the_identity() {
        let base = NamespaceDescription { model: "m".into(), ..Default::default() };
        let others = [
            NamespaceDescription { dtype: "float16".into(), ..base.clone() },
            NamespaceDescription { layout: "page".into(), ..base.clone() },
            NamespaceDescription { layers: 2, ..base.clone() },
            NamespaceDescription { tensor_parallel: Some(Rank { rank: 0, size: 2 }), ..base.clone() },
            NamespaceDescription { tensor_parallel: Some(Rank { rank: 1, size: 2 }), ..base.clone() },
            NamespaceDescription { salt: "a".into(), ..base.clone() },
            NamespaceDescription { salt: "b".into(), ..base.clone() },
            NamespaceDescription { other: [("lora".into(), "x".into())].into(), ..base.clone() },
        ];
        let mut ids: Vec<_> =
            others.iter().chain([&base]).map(|description| description.id().unwrap()).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 9);
        assert_eq!(base.id().unwrap(), base.clone().id().unwrap());
    }

    #[test]
    fn a_rank_is_one_of_its_ranks() {
        let of = |rank, size| NamespaceDescription::default().pipeline_parallel(Rank { rank, size }).check();
        assert!(of(0, 1).is_ok() && of(4, 5).is_ok());
        for (rank, size) in [(5, 2), (2, 2), (0, 0)] {
            let error = of(rank, size).unwrap_err().to_string();
            assert!(error.contains(&format!("pipeline_parallel cannot be ({rank}, {size})")), "{error}");
        }
    }

    #[test]
    fn a_salt_is_never_written_down() {
        let description = NamespaceDescription { salt: "secret of a tenant".into(), ..Default::default() };
        let json = description.to_json().unwrap();
        assert!(!json.contains("secret"));
        // Stores on disk have this digest.
        assert!(json.contains("be89c582a2a59dc996fe9cb0f273463d1dcfca83a8c0d4f1b04f89ee065984ec"), "{json}");
    }

    #[test]
    fn ids_are_read_as_they_are_written() {
        let id = NamespaceDescription::default().id().unwrap();
        assert_eq!(id.to_string().parse::<NamespaceId>().unwrap(), id);
        for text in ["", "xyz", "+0000000000000000000000000000000"] {
            assert!(text.parse::<NamespaceId>().is_err(), "{text}");
        }
    }
}
