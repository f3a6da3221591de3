//! Experts that are described by hand, for formats and names that are not known here.
#![forbid(unsafe_code)]

use super::{ExpertCatalog, MAX_EXPERTS, MAX_LAYERS, Part};
use crate::{Error, ExpertId, Result};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::PathBuf,
};

/// Collects experts and dense tensors.
///
/// ```
/// use std::path::PathBuf;
/// use hoistway::{ByteRange, Dtype};
/// use hoistway_experts::{ExpertId, catalog::{ExpertCatalog, Part, Role}};
/// let mut builder = ExpertCatalog::builder().top_k(1);
/// let file = builder.file("experts.bin");
/// for expert in 0..4 {
///     let bytes = ByteRange::at(u64::from(expert) * 4096, 4096).unwrap();
///     let part = Part {
///         tensor: format!("expert {expert}").into(),
///         file,
///         bytes,
///         tensor_bytes: bytes,
///         dtype: Dtype::U8,
///         shape: [4096].into(),
///         role: Role::Gate,
///         component: "weight".into(),
///     };
///     builder = builder.expert(ExpertId { layer: 0, expert }, vec![part]);
/// }
/// assert_eq!(builder.build()?.token_cycle_bytes(), Some(4096));
/// # Ok::<(), hoistway_experts::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Builder {
    files: Vec<PathBuf>,
    experts: BTreeMap<ExpertId, Vec<Part>>,
    dense: Vec<Part>,
    top_k: Option<u32>,
    /// An expert that was given twice.
    twice: Option<ExpertId>,
}

impl Builder {
    /// Adds a file, and returns its position for [`Part::file`].
    pub fn file(&mut self, path: impl Into<PathBuf>) -> usize {
        self.files.push(path.into());
        self.files.len() - 1
    }

    /// Adds an expert.
    #[must_use]
    pub fn expert(mut self, id: ExpertId, parts: Vec<Part>) -> Self {
        if self.experts.insert(id, parts).is_some() {
            self.twice = self.twice.or(Some(id));
        }
        self
    }

    /// Adds a dense tensor.
    #[must_use]
    pub fn dense(mut self, part: Part) -> Self {
        self.dense.push(part);
        self
    }

    /// Says how many experts a token uses in each layer.
    #[must_use]
    pub fn top_k(mut self, top_k: u32) -> Self {
        self.top_k = Some(top_k);
        self
    }

    /// Checks what was described.
    ///
    /// # Errors
    /// [`Error::InvalidExpert`] if an expert was given twice, has no parts, lies in a file that was not added, outside of
    /// its tensor, or over bytes of another part, or is missing between others; [`Error::InvalidOption`] for a dense tensor
    /// like that.
    pub fn build(self) -> Result<ExpertCatalog> {
        let Self { files, experts, dense, top_k, twice } = self;
        let invalid =
            |ExpertId { layer, expert }, reason: String| Error::InvalidExpert { layer, expert, reason };
        if let Some(id) = twice {
            return Err(invalid(id, "it was given twice".into()));
        }
        if top_k == Some(0) {
            return Err(Error::invalid_option("top_k", 0, "a token uses one expert at least"));
        }
        let mut last: Option<ExpertId> = None;
        for (id, parts) in &experts {
            let expected = last.filter(|last| last.layer == id.layer).map_or(0, |last| last.expert + 1);
            if id.layer >= MAX_LAYERS || id.expert >= MAX_EXPERTS {
                return Err(invalid(
                    *id,
                    format!("there are {MAX_LAYERS} layers of {MAX_EXPERTS} experts at most"),
                ));
            }
            if id.expert != expected {
                return Err(invalid(*id, format!("expert {expected} of the layer is missing")));
            }
            if parts.is_empty() {
                return Err(invalid(*id, "it has no parts".into()));
            }
            for part in parts {
                check(part, files.len()).map_err(|reason| invalid(*id, reason))?;
            }
            last = Some(*id);
        }
        let mut names = HashSet::new();
        for part in &dense {
            check(part, files.len())
                .and_then(
                    |()| if names.insert(&part.tensor) { Ok(()) } else { Err("it was given twice".into()) },
                )
                .map_err(|reason| Error::invalid_option("dense", &part.tensor, reason))?;
        }
        check_apart(&experts, &dense)?;
        let mut catalog = ExpertCatalog::new(files, experts.into_iter().collect(), dense);
        catalog.top_k = top_k;
        Ok(catalog)
    }
}

fn check(part: &Part, files: usize) -> Result<(), String> {
    if part.file >= files {
        return Err(format!("its file {} was not added", part.file));
    }
    if !part.tensor_bytes.contains(part.bytes) {
        return Err(format!("bytes {} are not in its tensor, which has {}", part.bytes, part.tensor_bytes));
    }
    Ok(())
}

/// Fails if two parts have bytes in common, or a tensor has two places: evicting one would take bytes of the other.
fn check_apart(experts: &BTreeMap<ExpertId, Vec<Part>>, dense: &[Part]) -> Result<()> {
    let of_experts = experts.iter().flat_map(|(id, parts)| parts.iter().map(|part| (Some(*id), part)));
    let mut parts: Vec<_> = of_experts.chain(dense.iter().map(|part| (None, part))).collect();
    let invalid = |(id, part): (Option<ExpertId>, &Part), reason: String| match id {
        Some(ExpertId { layer, expert }) => Error::InvalidExpert { layer, expert, reason },
        None => Error::invalid_option("dense", &part.tensor, reason),
    };
    let mut tensors = HashMap::new();
    for (id, part) in &parts {
        let first = *tensors.entry((part.file, &part.tensor)).or_insert(part.tensor_bytes);
        if first != part.tensor_bytes {
            let reason = format!(
                "tensor '{}' has bytes {}, and {first} in another part",
                part.tensor, part.tensor_bytes
            );
            return Err(invalid((*id, part), reason));
        }
    }
    parts.retain(|(_, part)| !part.bytes.is_empty());
    parts.sort_by_key(|(_, part)| (part.file, part.bytes.start()));
    for pair in parts.windows(2) {
        let [(_, before), (id, part)] = pair else { continue };
        if before.file == part.file && before.bytes.end() > part.bytes.start() {
            let reason = format!(
                "bytes {} of '{}' are also in '{}', at {}",
                part.bytes, part.tensor, before.tensor, before.bytes
            );
            return Err(invalid((*id, part), reason));
        }
    }
    Ok(())
}
