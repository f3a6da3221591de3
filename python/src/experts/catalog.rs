//! The experts of a checkpoint.
#![forbid(unsafe_code)]

use crate::{cancellable, checkpoint::Checkpoint, error::IntoPython, options::count_of};
use hoistway::Cancel;
use hoistway_experts::pack::PackChoice;
use pyo3::prelude::*;
use serde_json::json;
use std::{path::PathBuf, sync::Arc};

/// Role, component, tensor, element type, shape and size of a part.
type Described = (String, String, String, String, Vec<u64>, u64);

/// The experts of a checkpoint and its dense tensors. `hoistway.experts.ExpertCatalog` shows it.
#[pyclass(frozen, module = "hoistway._native")]
pub(crate) struct ExpertCatalog {
    pub(super) catalog: Arc<hoistway_experts::catalog::ExpertCatalog>,
}

/// Whether experts are read from a pack: from one beside the model, from none, or from that of a path.
#[derive(FromPyObject)]
pub(crate) enum Packs {
    Named(bool),
    At(PathBuf),
}

#[pymethods]
impl ExpertCatalog {
    #[new]
    #[pyo3(signature = (checkpoint, top_k=None, pack=Packs::Named(false)))]
    fn new(
        py: Python<'_>,
        checkpoint: &Checkpoint,
        top_k: Option<Bound<'_, PyAny>>,
        pack: Packs,
    ) -> PyResult<Self> {
        let top_k = top_k.map(|value| count_of("top_k", &value)).transpose()?;
        let checkpoint = checkpoint.shared();
        let choice = match pack {
            Packs::Named(true) => PackChoice::Auto,
            Packs::Named(false) => PackChoice::Never,
            Packs::At(path) => PackChoice::At(path),
        };
        // A server may be asked for the model's configuration.
        let cancel = Cancel::default();
        let find = || {
            let found = hoistway_experts::catalog::ExpertCatalog::of_checkpoint_until;
            found(&cancel, &checkpoint, top_k)?.with_pack(&choice)
        };
        let found = cancellable(py, &cancel, || Ok(find()))?;
        Ok(Self { catalog: Arc::new(found.into_python(py)?) })
    }

    /// Layers, sizes and names, as JSON.
    fn facts(&self, py: Python<'_>) -> PyResult<String> {
        let catalog = &*self.catalog;
        let layers = catalog.layers().map(|layer| {
            json!({
                "layer": layer,
                "experts": catalog.expert_count(layer),
                "expert_bytes": catalog.expert_bytes(layer),
                "demand_bytes": catalog.layer_demand_bytes(layer),
            })
        });
        let names = |units: &mut dyn Iterator<Item = &hoistway_experts::catalog::Unit>| -> Vec<String> {
            units.flat_map(|unit| unit.parts()).map(|part| part.tensor.to_string()).collect()
        };
        let facts = json!({
            "layers": layers.collect::<Vec<_>>(),
            "top_k": catalog.top_k(),
            "token_cycle_bytes": catalog.token_cycle_bytes(),
            "total_expert_bytes": catalog.total_expert_bytes(),
            "total_dense_bytes": catalog.total_dense_bytes(),
            "dense": names(&mut catalog.dense().iter()),
            "resident": names(&mut catalog.resident()),
        });
        serde_json::to_string(&facts).into_python(py)
    }

    /// The parts of an expert.
    fn parts(&self, py: Python<'_>, layer: u32, expert: u32) -> PyResult<Vec<Described>> {
        let unit = self.catalog.expert(hoistway_experts::ExpertId { layer, expert }).into_python(py)?;
        let described = |part: &hoistway_experts::catalog::Part| {
            (
                part.role.to_string(),
                part.component.to_string(),
                part.tensor.to_string(),
                part.dtype.name().into_owned(),
                part.shape.to_vec(),
                part.bytes.len(),
            )
        };
        Ok(unit.parts().iter().map(described).collect())
    }
}
