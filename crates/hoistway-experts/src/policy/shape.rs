//! The shape of a model for policies and replays: layers, experts, sizes.
#![forbid(unsafe_code)]

use super::ExpertId;
use crate::catalog::ExpertCatalog;
use serde::Serialize;

/// The experts of one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LayerShape {
    /// Number of experts; 0 for a layer without.
    pub experts: u32,
    /// Bytes of each, the largest if they differ.
    pub expert_bytes: u64,
}

/// The number and the sizes of a model's experts.
///
/// ```
/// use hoistway_experts::policy::{CatalogShape, LayerShape};
/// let layers = vec![LayerShape { experts: 128, expert_bytes: 3 << 20 }; 48];
/// let shape = CatalogShape::new(8, layers).unwrap();
/// assert_eq!(shape.token_cycle_bytes(), 48 * 8 * (3 << 20));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CatalogShape {
    experts_per_token: u32,
    layers: Vec<LayerShape>,
    /// Number of the first expert of each layer, and at the end that of all experts.
    #[serde(skip)]
    starts: Vec<u32>,
}

/// Why there is no such model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// There are more layers than a model has.
    #[error("{layers} layers: at most {} are supported", CatalogShape::MAX_LAYERS)]
    Layers {
        /// How many.
        layers: usize,
    },
    /// The layers have more experts together than are supported.
    #[error("more than {} experts in all layers up to layer {layer}", CatalogShape::MAX_EXPERTS)]
    Experts {
        /// The layer that has one too many.
        layer: usize,
    },
    /// An expert is larger than is supported.
    #[error(
        "experts of {expert_bytes} bytes in layer {layer}: at most {} are supported",
        CatalogShape::MAX_EXPERT_BYTES
    )]
    ExpertBytes {
        /// The layer.
        layer: usize,
        /// Its size in bytes.
        expert_bytes: u64,
    },
    /// A token goes to no expert, or to more than are supported.
    #[error(
        "{experts_per_token} experts a token: from 1 to {} are supported",
        CatalogShape::MAX_EXPERTS_PER_TOKEN
    )]
    ExpertsPerToken {
        /// How many.
        experts_per_token: u32,
    },
    /// No layer has experts.
    #[error("no layer has experts")]
    NoExperts,
}

impl CatalogShape {
    /// Most layers.
    pub const MAX_LAYERS: usize = 4096;
    /// Most experts of all layers together.
    pub const MAX_EXPERTS: u32 = 1 << 20;
    /// Most bytes of one expert.
    pub const MAX_EXPERT_BYTES: u64 = 1 << 40;
    /// Most experts that a token goes to in one layer.
    pub const MAX_EXPERTS_PER_TOKEN: u32 = 1024;

    /// Describes a model by its layers, in their order, and the number of experts that each token goes to in a layer.
    ///
    /// # Errors
    /// [`ShapeError`] if a number is beyond what is supported, or no layer has experts.
    pub fn new(experts_per_token: u32, layers: Vec<LayerShape>) -> Result<Self, ShapeError> {
        if experts_per_token == 0 || experts_per_token > Self::MAX_EXPERTS_PER_TOKEN {
            return Err(ShapeError::ExpertsPerToken { experts_per_token });
        }
        if layers.len() > Self::MAX_LAYERS {
            return Err(ShapeError::Layers { layers: layers.len() });
        }
        let mut starts = Vec::with_capacity(layers.len() + 1);
        let mut all = 0_u32;
        starts.push(all);
        for (layer, shape) in layers.iter().enumerate() {
            if shape.expert_bytes > Self::MAX_EXPERT_BYTES {
                return Err(ShapeError::ExpertBytes { layer, expert_bytes: shape.expert_bytes });
            }
            let sum = all.checked_add(shape.experts).filter(|&sum| sum <= Self::MAX_EXPERTS);
            all = sum.ok_or(ShapeError::Experts { layer })?;
            starts.push(all);
        }
        if all == 0 { Err(ShapeError::NoExperts) } else { Ok(Self { experts_per_token, layers, starts }) }
    }

    /// Returns how many experts a token goes to in each layer.
    pub fn experts_per_token(&self) -> u32 {
        self.experts_per_token
    }

    /// Returns the layers, by their number.
    pub fn layers(&self) -> &[LayerShape] {
        &self.layers
    }

    /// Returns the number of experts of all layers.
    pub fn experts(&self) -> usize {
        self.starts.last().copied().unwrap_or_default() as usize
    }

    /// Returns whether there is such an expert.
    pub fn contains(&self, id: ExpertId) -> bool {
        self.index(id).is_some()
    }

    /// Returns the bytes of an expert, or 0 if there is none.
    pub fn expert_bytes(&self, id: ExpertId) -> u64 {
        match self.layers.get(id.layer as usize) {
            Some(layer) if id.expert < layer.experts => layer.expert_bytes,
            _ => 0,
        }
    }

    /// Returns the bytes that one token uses in all layers together. Below this budget, LRU keeps nothing that is used
    /// again.
    pub fn token_cycle_bytes(&self) -> u64 {
        let demand =
            |layer: &LayerShape| u64::from(layer.experts.min(self.experts_per_token)) * layer.expert_bytes;
        self.layers.iter().map(demand).sum()
    }

    /// Returns the bytes of all experts.
    pub fn total_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| u64::from(layer.experts) * layer.expert_bytes).sum()
    }

    /// The expert's number among those of all layers.
    pub(crate) fn index(&self, id: ExpertId) -> Option<usize> {
        let layer = self.layers.get(id.layer as usize)?;
        (id.expert < layer.experts).then(|| (self.starts[id.layer as usize] + id.expert) as usize)
    }

    /// The expert of a number that [`index`](Self::index) gave.
    pub(crate) fn id(&self, index: usize) -> ExpertId {
        let number = index as u32;
        // Layers without experts begin where the next one does.
        let layer = self.starts.partition_point(|&start| start <= number).saturating_sub(1);
        ExpertId { layer: layer as u32, expert: number - self.starts[layer] }
    }
}

impl TryFrom<&ExpertCatalog> for CatalogShape {
    type Error = ShapeError;

    /// Takes the layers of a catalog. If it is not known how many experts a token goes to, it is taken to be all of the layer
    /// that has the most: a policy then counts each visit as one token.
    fn try_from(catalog: &ExpertCatalog) -> Result<Self, ShapeError> {
        let mut layers: Vec<LayerShape> = Vec::new();
        for number in catalog.layers() {
            let at = number as usize;
            if at >= Self::MAX_LAYERS {
                return Err(ShapeError::Layers { layers: at.saturating_add(1) });
            }
            layers.resize(at, LayerShape::default());
            let (experts, expert_bytes) = (catalog.expert_count(number), catalog.expert_bytes(number));
            layers.push(LayerShape { experts, expert_bytes });
        }
        let most = layers.iter().map(|layer| layer.experts).max().unwrap_or_default();
        let unknown = most.clamp(1, Self::MAX_EXPERTS_PER_TOKEN);
        Self::new(catalog.top_k().unwrap_or(unknown), layers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_numbered_and_found_again() {
        let experts = [0, 3, 0, 0, 2, 0];
        let layers = experts.map(|experts| LayerShape { experts, expert_bytes: 10 }).to_vec();
        let shape = CatalogShape::new(2, layers).unwrap();
        assert_eq!(shape.experts(), 5);
        let mut number = 0;
        for (layer, experts) in experts.iter().enumerate() {
            for expert in 0..*experts {
                let id = ExpertId { layer: layer as u32, expert };
                assert_eq!((shape.index(id), shape.id(number)), (Some(number), id));
                number += 1;
            }
            assert_eq!(shape.index(ExpertId { layer: layer as u32, expert: *experts }), None);
        }
        assert_eq!(shape.index(ExpertId { layer: 6, expert: 0 }), None);
        assert_eq!((shape.token_cycle_bytes(), shape.total_bytes()), (40, 50));
    }

    #[test]
    fn what_no_model_has_is_refused() {
        let layer = |experts, expert_bytes| LayerShape { experts, expert_bytes };
        let most = CatalogShape::MAX_EXPERTS;
        assert_eq!(CatalogShape::new(1, vec![]), Err(ShapeError::NoExperts));
        assert_eq!(CatalogShape::new(1, vec![layer(0, 1)]), Err(ShapeError::NoExperts));
        assert_eq!(
            CatalogShape::new(0, vec![layer(1, 1)]),
            Err(ShapeError::ExpertsPerToken { experts_per_token: 0 })
        );
        assert!(CatalogShape::new(1, vec![layer(most, 1)]).is_ok());
        let too_many = CatalogShape::new(1, vec![layer(most, 1), layer(1, 1)]);
        assert_eq!(too_many, Err(ShapeError::Experts { layer: 1 }));
        let wrapping = CatalogShape::new(1, vec![layer(1, 1), layer(u32::MAX, 1)]);
        assert_eq!(wrapping, Err(ShapeError::Experts { layer: 1 }));
        let large = CatalogShape::MAX_EXPERT_BYTES + 1;
        let expected = ShapeError::ExpertBytes { layer: 0, expert_bytes: large };
        assert_eq!(CatalogShape::new(1, vec![layer(1, large)]), Err(expected));
        let layers = CatalogShape::MAX_LAYERS + 1;
        assert_eq!(CatalogShape::new(1, vec![layer(1, 1); layers]), Err(ShapeError::Layers { layers }));
    }

    #[test]
    fn sums_of_the_largest_model_do_not_wrap() {
        let layers = CatalogShape::MAX_LAYERS as u32;
        let layer = LayerShape {
            experts: CatalogShape::MAX_EXPERTS / layers,
            expert_bytes: CatalogShape::MAX_EXPERT_BYTES,
        };
        let shape =
            CatalogShape::new(CatalogShape::MAX_EXPERTS_PER_TOKEN, vec![layer; layers as usize]).unwrap();
        assert_eq!(shape.total_bytes(), 1 << 60);
        assert_eq!(shape.token_cycle_bytes(), 1 << 60);
    }
}
