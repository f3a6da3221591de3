//! Puts the parts of experts together, and checks that each expert of a layer has the same ones.
#![forbid(unsafe_code)]

use super::{
    ExpertCatalog, MAX_EXPERTS, MAX_LAYERS, Part, Role,
    names::{self, Name},
    whole,
};
use crate::{Error, ExpertId, Result};
use hoistway::{
    ByteRange, Catalog,
    catalog::{FileFormat, TensorEntry, TensorId},
    plan::PlanError,
};
use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::Arc,
};

/// Most parts of all experts together. The largest models have a sixth of that.
const MAX_PARTS: usize = 1 << 20;
/// Scales of fewer bytes an expert stay resident: reading one costs a block.
const SMALL_BYTES: u64 = 4096;

/// The experts of a checkpoint, without the number that a token uses.
///
/// # Errors
/// [`Error::InvalidExperts`]; [`Error::Engine`] if experts are big-endian or of an unknown type.
pub(super) fn collect(catalog: &Catalog) -> Result<ExpertCatalog> {
    let mut collected = Collected::default();
    for id in catalog.ids() {
        collected.add(catalog, id)?;
    }
    let Collected { experts, dense, resident, stacked, unreadable, .. } = collected;
    let experts = checked(catalog, experts)?;
    let mut found = ExpertCatalog::new(paths(catalog), experts, dense);
    (found.resident, found.stacked, found.unreadable) = (resident, stacked, unreadable);
    Ok(found)
}

#[derive(Default)]
struct Collected {
    experts: BTreeMap<ExpertId, Vec<Part>>,
    dense: Vec<Part>,
    resident: Vec<u32>,
    stacked: Vec<Arc<str>>,
    unreadable: HashMap<Arc<str>, PlanError>,
    /// The components that there are, so that parts share their names.
    components: HashMap<String, Arc<str>>,
    /// Parts of all experts.
    parts: usize,
}

impl Collected {
    fn add(&mut self, catalog: &Catalog, id: TensorId) -> Result<()> {
        let entry = catalog.tensor(id);
        let name = match catalog.file(entry.file).format {
            FileFormat::Gguf(_) => Name::of_gguf(&entry.name),
            _ => Name::of_safetensors(&entry.name),
        };
        let Some(name) = name else {
            let component = self.component("");
            self.push_dense(catalog, id, whole(entry, Role::Dense, component));
            return Ok(());
        };
        let invalid = |reason: String| invalid(catalog, entry, reason);
        let layer = u32::try_from(name.layer).ok().filter(|layer| *layer < MAX_LAYERS);
        let layer =
            layer.ok_or_else(|| invalid(format!("is of layer {}: more than there can be", name.layer)))?;
        let component = self.component(name.component);
        let experts = match name.expert {
            Some(_) => 1,
            None => *entry.shape.first().ok_or_else(|| invalid("has no dimension of experts".into()))?,
        };
        if experts == 0 || experts > u64::from(MAX_EXPERTS) {
            return Err(invalid(format!("stacks {experts} experts: it can be 1 to {MAX_EXPERTS}")));
        }
        let slice_bytes = entry.bytes.len() / experts;
        let is_small = !names::is_payload(name.component) && slice_bytes < SMALL_BYTES;
        if is_small || names::stays_resident(name.component) {
            self.resident.push(self.dense.len() as u32);
            self.push_dense(catalog, id, whole(entry, name.role, component));
            return Ok(());
        }
        catalog.check_readable(&[id]).map_err(hoistway::Error::from)?;
        // A header of a few bytes can claim any number of them.
        if slice_bytes == 0 {
            return Err(invalid("gives experts no bytes".into()));
        }
        if experts > (MAX_PARTS - self.parts) as u64 {
            return Err(invalid(format!("makes more than {MAX_PARTS} parts of experts")));
        }
        self.parts += experts as usize;
        match name.expert {
            Some(expert) => {
                let expert = u32::try_from(expert).ok().filter(|expert| *expert < MAX_EXPERTS);
                let expert = expert.ok_or_else(|| invalid(format!("is of an expert past {MAX_EXPERTS}")))?;
                self.push(catalog, ExpertId { layer, expert }, whole(entry, name.role, component))?;
            }
            None => {
                let shape: Arc<[u64]> = entry.shape[1..].into();
                if entry.dtype.size_of(&shape) != Ok(slice_bytes)
                    || slice_bytes * experts != entry.bytes.len()
                {
                    let reason = format!("of shape {:?} cannot be cut into {experts} experts", entry.shape);
                    return Err(invalid(reason));
                }
                for expert in 0..experts as u32 {
                    // Within the tensor, whose end the engine has checked.
                    let start = entry.bytes.start() + u64::from(expert) * slice_bytes;
                    let bytes = ByteRange::at(start, slice_bytes);
                    let bytes = bytes.ok_or_else(|| invalid("ends past 2^64".into()))?;
                    let part =
                        Part { bytes, shape: shape.clone(), ..whole(entry, name.role, component.clone()) };
                    self.push(catalog, ExpertId { layer, expert }, part)?;
                }
            }
        }
        self.stacked.push(entry.name.clone());
        Ok(())
    }

    /// A model may have dense tensors that its runtime reads itself: only a store that reads one refuses it.
    fn push_dense(&mut self, catalog: &Catalog, id: TensorId, part: Part) {
        if let Err(error) = catalog.check_readable(&[id]) {
            self.unreadable.insert(part.tensor.clone(), error);
        }
        self.dense.push(part);
    }

    fn push(&mut self, catalog: &Catalog, id: ExpertId, part: Part) -> Result<()> {
        let parts = self.experts.entry(id).or_default();
        if let Some(first) = parts.iter().find(|known| key(known) == key(&part)) {
            return Err(Error::InvalidExperts {
                path: path(catalog, part.file),
                reason: format!(
                    "and '{}' are the same part of one expert: name the files of one model",
                    first.tensor
                ),
                tensor: part.tensor.to_string(),
            });
        }
        parts.push(part);
        Ok(())
    }

    fn component(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.components.get(name) {
            return known.clone();
        }
        let shared: Arc<str> = name.into();
        self.components.insert(name.to_owned(), shared.clone());
        shared
    }
}

/// The key that distinguishes the parts of an expert.
fn key(part: &Part) -> (Role, &str) {
    (part.role, &part.component)
}

/// The experts in order, if each layer has all of them and each of these the same parts.
fn checked(catalog: &Catalog, experts: BTreeMap<ExpertId, Vec<Part>>) -> Result<Vec<(ExpertId, Vec<Part>)>> {
    let mut checked: Vec<(ExpertId, Vec<Part>)> = Vec::with_capacity(experts.len());
    // Where the layer begins in `checked`.
    let mut first = 0;
    for (id, mut parts) in experts {
        parts.sort_by(|a, b| key(a).cmp(&key(b)));
        let invalid = |part: Option<&Part>, reason: String| Error::InvalidExperts {
            path: part.map_or_else(PathBuf::new, |part| path(catalog, part.file)),
            tensor: part.map_or_else(String::new, |part| part.tensor.to_string()),
            reason,
        };
        if checked.last().is_none_or(|(last, _)| last.layer != id.layer) {
            first = checked.len();
        }
        let expected = (checked.len() - first) as u32;
        if id.expert != expected {
            let reason =
                format!("is of expert {} of layer {}, and expert {expected} is missing", id.expert, id.layer);
            return Err(invalid(parts.first(), reason));
        }
        if let Some((model, whole)) = checked.get(first)
            && !whole.iter().map(key).eq(parts.iter().map(key))
        {
            let has = |parts: &[Part]| {
                let names: Vec<String> =
                    parts.iter().map(|part| format!("{} {}", part.role, part.component)).collect();
                names.join(", ")
            };
            let reason = format!(
                "belongs to expert {} of layer {}, which has {}, while expert {} has {}",
                id.expert,
                id.layer,
                has(&parts),
                model.expert,
                has(whole)
            );
            return Err(invalid(parts.first(), reason));
        }
        checked.push((id, parts));
    }
    Ok(checked)
}

fn invalid(catalog: &Catalog, entry: &TensorEntry, reason: String) -> Error {
    let (path, tensor) = (path(catalog, entry.file.index()), entry.name.to_string());
    Error::InvalidExperts { path, tensor, reason }
}

fn path(catalog: &Catalog, file: usize) -> PathBuf {
    catalog.files().get(file).map_or_else(PathBuf::new, |file| file.source.as_path().to_owned())
}

fn paths(catalog: &Catalog) -> Vec<PathBuf> {
    catalog.files().iter().map(|file| file.source.as_path().to_owned()).collect()
}
