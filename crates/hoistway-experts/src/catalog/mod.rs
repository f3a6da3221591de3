//! The units that a model streams: (layer, expert) to parts of files, from headers alone.
//!
//! [`ExpertCatalog::of_checkpoint`] is the door. `names` tells the tensors of experts from others, `collect` puts their
//! parts together and checks them, `config` finds out how many experts a token uses, and `builder` takes experts that
//! were described by hand. No format is parsed here: the engine's catalog has done that.
#![forbid(unsafe_code)]

mod builder;
mod collect;
mod config;
mod names;

pub use builder::Builder;

use crate::{
    Error, ExpertId, Result,
    pack::{Packed, Packing},
};
use hoistway::{
    ByteRange, Cancel, Checkpoint, Dtype,
    catalog::{Catalog, TensorEntry},
    plan::PlanError,
    read::ReadFile,
};
use std::{collections::HashMap, fmt, ops::Range, path::PathBuf, sync::Arc};

/// Most experts of a layer. A header that claims more is refused.
pub const MAX_EXPERTS: u32 = 1 << 16;
/// Most layers. A name that claims more is refused.
pub const MAX_LAYERS: u32 = 1 << 16;

/// The role of a part of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Role {
    /// The projection whose output the activation function gets.
    Gate,
    /// The projection that is multiplied with that.
    Up,
    /// Gate and up in one matrix.
    GateUp,
    /// The projection back to the hidden size.
    Down,
    /// All of a dense tensor.
    Dense,
}

impl Role {
    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gate => "gate",
            Self::Up => "up",
            Self::GateUp => "gate_up",
            Self::Down => "down",
            Self::Dense => "dense",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Bytes of a file that belong to one expert, or to one dense tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The tensor that holds it.
    pub tensor: Arc<str>,
    /// Position of its file in [`ExpertCatalog::files`].
    pub file: usize,
    /// Its bytes in that file.
    pub bytes: ByteRange,
    /// The bytes of the whole tensor in that file. More than `bytes` if the tensor stacks several experts.
    pub tensor_bytes: ByteRange,
    /// Type of each element.
    pub dtype: Dtype,
    /// Elements along each dimension, slowest first; without the dimension that counts experts.
    pub shape: Arc<[u64]>,
    /// The role of the part.
    pub role: Role,
    /// The component of its role: `weight`, `blocks`, `scales`, or whatever else the tensor's name ends with.
    pub component: Arc<str>,
}

/// A unit of residency: an expert, or a dense tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    id: UnitId,
    parts: Vec<Part>,
    bytes: u64,
}

/// Names a [`Unit`] of a catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum UnitId {
    /// An expert.
    Expert(ExpertId),
    /// The dense tensor at this position among [`ExpertCatalog::dense`].
    Dense(u32),
}

impl Unit {
    /// Its name.
    pub fn id(&self) -> UnitId {
        self.id
    }

    /// Its parts, in the order of their roles.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Bytes of all parts together.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Its name in messages.
    pub fn label(&self) -> String {
        match self.id {
            UnitId::Expert(ExpertId { layer, expert }) => format!("expert {expert} of layer {layer}"),
            UnitId::Dense(_) => {
                self.parts.first().map_or_else(String::new, |part| format!("tensor '{}'", part.tensor))
            }
        }
    }
}

/// The experts of a model and its dense tensors: which bytes of which files each of them is. Plain data.
#[derive(Clone, Debug)]
pub struct ExpertCatalog {
    files: Vec<PathBuf>,
    /// Experts by layer and number, then dense tensors.
    units: Vec<Unit>,
    layers: Vec<Layer>,
    first_dense: usize,
    dense_by_name: HashMap<Arc<str>, usize>,
    /// Tensors of experts that stay resident, as positions among the dense ones.
    resident: Vec<u32>,
    /// Tensors that are cut into experts.
    stacked: Vec<Arc<str>>,
    /// Dense tensors that no store reads, and why.
    unreadable: HashMap<Arc<str>, PlanError>,
    top_k: Option<u32>,
    /// The file that experts are read from instead of the model's, if there is one.
    packed: Option<Packed>,
    packing: Packing,
}

/// Where a part is read from: the model's file, or that of packed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    /// Position of the file among those of a store.
    pub(crate) file: usize,
    pub(crate) bytes: ByteRange,
}

impl Stored {
    /// The place of a part in the model's file.
    pub(crate) fn of_model(part: &Part) -> Self {
        Self { file: part.file, bytes: part.bytes }
    }
}

#[derive(Clone, Debug)]
struct Layer {
    number: u32,
    units: Range<usize>,
    expert_bytes: u64,
}

impl ExpertCatalog {
    /// Finds the experts of a checkpoint.
    ///
    /// GGUF: `blk.N.ffn_{gate,up,down,gate_up}_exps.weight`, stacked or one tensor an expert. Safetensors:
    /// `layers.N.….experts.E.{gate,up,down}_proj.*` (also `w1`, `w3`, `w2`), and stacked `experts.{gate_up,down}_proj`,
    /// MXFP4 as `_blocks` and `_scales`. Biases, and scales of fewer than 4096 bytes an expert, stay resident: they are
    /// dense tensors. `top_k` is the number of experts that a token uses in each layer; without it, GGUF's key
    /// `*.expert_used_count` or a `config.json` beside the files says it, if one is there; also in an object store.
    ///
    /// # Errors
    /// [`Error::InvalidExperts`], [`Error::InvalidConfig`], [`Error::InvalidOption`]; [`Error::Engine`] if experts are big-endian or
    /// of an unknown type.
    pub fn of_checkpoint(checkpoint: &Checkpoint, top_k: Option<u32>) -> Result<Self> {
        Self::found_in(None, checkpoint, top_k)
    }

    /// Like [`ExpertCatalog::of_checkpoint`], until `cancel` ends it: also a read that waits for a server.
    ///
    /// # Errors
    /// Those of [`ExpertCatalog::of_checkpoint`]; [`Error::Engine`] with [`hoistway::Error::Cancelled`].
    pub fn of_checkpoint_until(cancel: &Cancel, checkpoint: &Checkpoint, top_k: Option<u32>) -> Result<Self> {
        Self::found_in(Some(cancel), checkpoint, top_k)
    }

    fn found_in(cancel: Option<&Cancel>, checkpoint: &Checkpoint, top_k: Option<u32>) -> Result<Self> {
        if top_k == Some(0) {
            return Err(Error::invalid_option("top_k", 0, "a token uses one expert at least"));
        }
        let mut found = collect::collect(checkpoint.catalog())?;
        found.top_k = match top_k {
            Some(given) => Some(given),
            None => config::top_k(cancel, checkpoint)?,
        };
        Ok(found)
    }

    /// Finds the experts of a catalog, of which a token uses `top_k`. For fuzzing.
    #[doc(hidden)]
    pub fn of_catalog(catalog: &Catalog, top_k: u32) -> Result<Self> {
        let mut found = collect::collect(catalog)?;
        found.top_k = Some(top_k);
        Ok(found)
    }

    /// The files of a checkpoint in the order that parts name them in, for a [`Store`](crate::store::Store).
    pub fn open_files(checkpoint: &Checkpoint) -> Vec<ReadFile> {
        checkpoint.catalog().file_ids().filter_map(|file| checkpoint.read_file(file)).collect()
    }

    /// Starts a catalog of experts that are described by hand.
    pub fn builder() -> Builder {
        Builder::default()
    }

    fn new(files: Vec<PathBuf>, experts: Vec<(ExpertId, Vec<Part>)>, dense: Vec<Part>) -> Self {
        let mut units = Vec::with_capacity(experts.len() + dense.len());
        let mut layers: Vec<Layer> = Vec::new();
        for (id, parts) in experts {
            let bytes = total(&parts);
            let position = units.len();
            units.push(Unit { id: UnitId::Expert(id), parts, bytes });
            match layers.last_mut() {
                Some(layer) if layer.number == id.layer => {
                    layer.units.end = position + 1;
                    layer.expert_bytes = layer.expert_bytes.max(bytes);
                }
                _ => layers.push(Layer {
                    number: id.layer,
                    units: position..position + 1,
                    expert_bytes: bytes,
                }),
            }
        }
        let first_dense = units.len();
        let mut dense_by_name = HashMap::with_capacity(dense.len());
        for (number, part) in (0u32..).zip(dense) {
            let bytes = part.bytes.len();
            dense_by_name.insert(part.tensor.clone(), units.len());
            units.push(Unit { id: UnitId::Dense(number), parts: vec![part], bytes });
        }
        Self {
            files,
            units,
            layers,
            first_dense,
            dense_by_name,
            resident: Vec::new(),
            stacked: Vec::new(),
            unreadable: HashMap::new(),
            top_k: None,
            packed: None,
            packing: Packing::None,
        }
    }

    /// The same experts, read from a file of [packed experts](crate::pack).
    pub(crate) fn with_packing(self, packing: Packing, packed: Option<Packed>) -> Self {
        Self { packing, packed, ..self }
    }

    /// Whether a store reads experts from a file of [packed experts](crate::pack).
    pub fn packing(&self) -> &Packing {
        &self.packing
    }

    /// The packed experts that a store reads.
    pub(crate) fn packed(&self) -> Option<&Packed> {
        self.packed.as_ref()
    }

    /// The file of packed experts that a store reads after the model's.
    pub(crate) fn packed_file(&self) -> Option<&ReadFile> {
        self.packed.as_ref().map(Packed::file)
    }

    /// Where the parts of a unit are read from.
    pub(crate) fn stored(&self, unit: usize) -> Result<Vec<Stored>> {
        if let Some(bytes) = self.packed.as_ref().and_then(|packed| packed.parts(unit)) {
            let file = self.files.len();
            return Ok(bytes.iter().map(|bytes| Stored { file, bytes: *bytes }).collect());
        }
        let found =
            self.units.get(unit).ok_or_else(|| Error::Internal(format!("there is no unit {unit}")))?;
        Ok(found.parts.iter().map(Stored::of_model).collect())
    }

    /// The files that parts lie in.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// The numbers of the layers that have experts, in order.
    pub fn layers(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.layers.iter().map(|layer| layer.number)
    }

    /// The number of experts of a layer; 0 if it has none.
    pub fn expert_count(&self, layer: u32) -> u32 {
        self.layer(layer).map_or(0, |layer| layer.units.len() as u32)
    }

    /// All experts, by layer and number.
    pub fn experts(&self) -> &[Unit] {
        &self.units[..self.first_dense]
    }

    /// An expert.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::NoSuchExpert`].
    pub fn expert(&self, id: ExpertId) -> Result<&Unit> {
        Ok(&self.units[self.expert_position(id)?])
    }

    /// The tensors that are no experts, as one unit each.
    pub fn dense(&self) -> &[Unit] {
        &self.units[self.first_dense..]
    }

    /// The biases and small scales of experts, which stay resident. They are among the [dense](Self::dense) tensors.
    pub fn resident(&self) -> impl ExactSizeIterator<Item = &Unit> {
        self.resident.iter().map(|number| &self.units[self.first_dense + *number as usize])
    }

    /// The number of experts that a token uses in each layer, if that is known.
    pub fn top_k(&self) -> Option<u32> {
        self.top_k
    }

    /// Bytes of the largest expert of a layer; 0 if the layer has none.
    pub fn expert_bytes(&self, layer: u32) -> u64 {
        self.layer(layer).map_or(0, |layer| layer.expert_bytes)
    }

    /// Bytes of the experts that one token uses in one layer, the largest ones if they differ. `None` if it is not known how
    /// many these are, or the layer has none.
    pub fn layer_demand_bytes(&self, layer: u32) -> Option<u64> {
        self.layer_demand(self.layer(layer)?, |unit| self.units[unit].bytes)
    }

    /// Bytes of the experts that one token uses in all layers. `None` if it is not known how many these are.
    ///
    /// A policy that evicts what was used least recently finds nothing resident with a smaller budget.
    pub fn token_cycle_bytes(&self) -> Option<u64> {
        self.token_cycle(|unit| self.units[unit].bytes)
    }

    /// The [token cycle](Self::token_cycle_bytes) of units, by position, that are as large as `size` says.
    pub(crate) fn token_cycle(&self, size: impl Fn(usize) -> u64) -> Option<u64> {
        let mut demands = self.layers.iter().map(|layer| self.layer_demand(layer, &size));
        demands.try_fold(0u64, |sum, demand| Some(sum.saturating_add(demand?)))
    }

    /// The sizes of a layer's largest units, of as many as a token uses.
    fn layer_demand(&self, layer: &Layer, size: impl Fn(usize) -> u64) -> Option<u64> {
        let top_k = self.top_k?;
        let mut sizes: Vec<u64> = layer.units.clone().map(size).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        Some(sizes.iter().take(top_k as usize).fold(0, |sum, size| sum.saturating_add(*size)))
    }

    /// Bytes of all experts.
    pub fn total_expert_bytes(&self) -> u64 {
        total_units(self.experts())
    }

    /// Bytes of all dense tensors.
    pub fn total_dense_bytes(&self) -> u64 {
        total_units(self.dense())
    }

    pub(crate) fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Position of an expert among all units.
    pub(crate) fn expert_position(&self, ExpertId { layer, expert }: ExpertId) -> Result<usize> {
        let Some(found) = self.layer(layer) else {
            let range = self.layers.first().zip(self.layers.last());
            let range = range.map(|(first, last)| (first.number, last.number));
            return Err(Error::NoSuchLayer { layer, range });
        };
        let position = found.units.clone().nth(expert as usize);
        let experts = found.units.len() as u32;
        position.ok_or(Error::NoSuchExpert { layer, expert, experts })
    }

    /// Whether a store can read a dense tensor.
    pub(crate) fn check_dense_readable(&self, name: &str) -> Result<()> {
        self.unreadable.get(name).map_or(Ok(()), |error| Err(hoistway::Error::from(error.clone()).into()))
    }

    /// Position of a dense tensor among all units.
    pub(crate) fn dense_position(&self, name: &str) -> Result<usize> {
        let position = self.dense_by_name.get(name).copied();
        position.ok_or_else(|| {
            let is_expert = self.stacked.iter().any(|stacked| &**stacked == name);
            Error::NoSuchTensor { name: name.to_owned(), is_expert }
        })
    }

    fn layer(&self, number: u32) -> Option<&Layer> {
        let position = self.layers.binary_search_by_key(&number, |layer| layer.number).ok()?;
        self.layers.get(position)
    }
}

fn total(parts: &[Part]) -> u64 {
    parts.iter().fold(0, |sum, part| sum.saturating_add(part.bytes.len()))
}

fn total_units(units: &[Unit]) -> u64 {
    units.iter().fold(0, |sum, unit| sum.saturating_add(unit.bytes))
}

/// All of a tensor, as one part.
fn whole(entry: &TensorEntry, role: Role, component: Arc<str>) -> Part {
    Part {
        tensor: entry.name.clone(),
        file: entry.file.index(),
        bytes: entry.bytes,
        tensor_bytes: entry.bytes,
        dtype: entry.dtype,
        shape: entry.shape.clone().into(),
        role,
        component,
    }
}
