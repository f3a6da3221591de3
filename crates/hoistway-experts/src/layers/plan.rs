//! The bytes of each layer, and the layers that stay resident. Pure.
#![forbid(unsafe_code)]

use super::device::aligned;
use crate::{Error, Result};
use hoistway::{ByteRange, Catalog, DeviceId, Dtype, memory::SpareMemory};
use std::{collections::BTreeMap, sync::Arc};

/// Gaps between tensors that are read along rather than skipped.
const MAX_GAP_BYTES: u64 = 64 << 10;

/// A layer, as callers name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    /// Its name in reports and messages.
    pub name: String,
    /// Names of its tensors.
    pub tensors: Vec<String>,
}

/// The layers that the names of tensors count (`blk.N.`, `layers.N.`, `h.N.`, `blocks.N.`), in order. Tensors without such a
/// number, such as embeddings, are in none of them.
pub fn numbered_layers(catalog: &Catalog) -> Vec<LayerSpec> {
    let mut layers: BTreeMap<(String, u64), Vec<String>> = BTreeMap::new();
    for entry in catalog.tensors() {
        let mut before = "";
        for (start, _) in entry.name.match_indices('.') {
            let segment = &entry.name[before.len()..start];
            let prefix = before.trim_end_matches('.');
            let kind = prefix.rsplit('.').next().unwrap_or_default();
            if matches!(kind, "blk" | "layers" | "layer" | "h" | "blocks")
                && segment.bytes().all(|byte| byte.is_ascii_digit())
                && let Ok(number) = segment.parse()
            {
                layers.entry((prefix.to_owned(), number)).or_default().push(entry.name.to_string());
                break;
            }
            before = &entry.name[..=start];
        }
    }
    let spec = |((prefix, number), tensors)| LayerSpec { name: format!("{prefix}.{number}"), tensors };
    layers.into_iter().map(spec).collect()
}

/// A layer, and where its bytes are.
#[derive(Debug)]
pub(super) struct LayerPlan {
    pub(super) name: Arc<str>,
    pub(super) extents: Vec<Extent>,
    pub(super) tensors: Vec<PlannedTensor>,
    /// Bytes of memory that it takes.
    pub(super) bytes: u64,
    /// Where each tensor begins in memory of a device, if it goes there.
    pub(super) on_device: Option<Box<[u64]>>,
}

/// Bytes of a file that are read together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) file: usize,
    pub(super) bytes: ByteRange,
}

/// A tensor, and where it lies in its extent.
#[derive(Debug)]
pub(super) struct PlannedTensor {
    pub(super) name: Arc<str>,
    pub(super) dtype: Dtype,
    pub(super) shape: Box<[u64]>,
    pub(super) extent: usize,
    pub(super) place: ByteRange,
}

impl LayerPlan {
    pub(super) fn new(catalog: &Catalog, spec: &LayerSpec, device: DeviceId) -> Result<Self> {
        if spec.tensors.is_empty() {
            return Err(Error::invalid_option("layers", &spec.name, "the layer has no tensor"));
        }
        let mut ids = Vec::with_capacity(spec.tensors.len());
        for name in &spec.tensors {
            ids.push(catalog.find(name).ok_or_else(|| catalog.no_such_tensor(name))?);
        }
        catalog.check_readable(&ids).map_err(hoistway::Error::from)?;
        let entries: Vec<_> = ids.into_iter().map(|id| catalog.tensor(id)).collect();
        let mut pieces: Vec<Extent> =
            entries.iter().map(|entry| Extent { file: entry.file.index(), bytes: entry.bytes }).collect();
        pieces.sort_unstable_by_key(|piece| (piece.file, piece.bytes));
        let extents = merged(pieces);
        let place = |entry: &&hoistway::catalog::TensorEntry| {
            let is_here =
                |extent: &Extent| extent.file == entry.file.index() && extent.bytes.contains(entry.bytes);
            let extent = extents.iter().position(is_here)?;
            let start = entry.bytes.start() - extents[extent].bytes.start();
            let place = ByteRange::at(start, entry.bytes.len())?;
            let (name, dtype, shape) = (entry.name.clone(), entry.dtype, entry.shape.clone());
            Some(PlannedTensor { name, dtype, shape, extent, place })
        };
        let tensors: Option<Vec<_>> = entries.iter().map(place).collect();
        let tensors =
            tensors.ok_or_else(|| Error::Internal("a tensor is in no extent of its layer".into()))?;
        let bytes = extents
            .iter()
            .try_fold(0u64, |sum, extent| sum.checked_add(SpareMemory::bytes_for(extent.bytes)?));
        let too_long = || Error::Internal("a layer ends past 2^64".into());
        let (mut bytes, mut on_device) = (bytes.ok_or_else(too_long)?, None);
        if !device.is_host() {
            let mut starts = Vec::with_capacity(tensors.len());
            bytes = 0;
            for tensor in &tensors {
                starts.push(bytes);
                bytes = aligned(tensor.place.len())?.checked_add(bytes).ok_or_else(too_long)?;
            }
            on_device = Some(starts.into());
        }
        Ok(Self { name: spec.name.as_str().into(), extents, tensors, bytes, on_device })
    }
}

/// Pieces in order, those with small gaps between them together.
fn merged(pieces: Vec<Extent>) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    for piece in pieces {
        match extents.last_mut() {
            Some(last)
                if last.file == piece.file
                    && piece.bytes.start() <= last.bytes.end().saturating_add(MAX_GAP_BYTES) =>
            {
                let end = last.bytes.end().max(piece.bytes.end());
                last.bytes = ByteRange::new(last.bytes.start(), end).unwrap_or(last.bytes);
            }
            _ => extents.push(piece),
        }
    }
    extents
}

/// The layers that stay resident, and the number that is read ahead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Residency {
    is_kept: Vec<bool>,
    pub(super) ahead: usize,
}

impl Residency {
    /// Keeps as many layers as fit beside the one that computes and those that are read ahead, evenly over the pass.
    pub(super) fn new(layers: &[Arc<LayerPlan>], budget: u64, ahead: usize) -> Result<Self> {
        let sizes: Vec<u64> = layers.iter().map(|layer| layer.bytes).collect();
        let largest = layers.iter().max_by_key(|layer| layer.bytes);
        let largest =
            largest.ok_or_else(|| Error::invalid_option("layers", "empty", "there is no layer to stream"))?;
        if largest.bytes > budget {
            let unit = format!("layer '{}'", largest.name);
            return Err(Error::BudgetTooSmall { budget, needed: largest.bytes, unit });
        }
        Ok(Self::of_sizes(&sizes, budget, ahead))
    }

    fn of_sizes(sizes: &[u64], budget: u64, ahead: usize) -> Self {
        // What is read ahead shrinks before the budget is exceeded; one layer fits.
        for ahead in (0..=ahead.min(sizes.len().saturating_sub(1))).rev() {
            for count in (0..=sizes.len()).rev() {
                let is_kept = spread(sizes.len(), count);
                if needed(sizes, &is_kept, ahead).is_some_and(|needed| needed <= budget) {
                    return Self { is_kept, ahead };
                }
            }
        }
        Self { is_kept: vec![false; sizes.len()], ahead: 0 }
    }

    pub(super) fn is_kept(&self, layer: usize) -> bool {
        self.is_kept.get(layer).copied().unwrap_or(false)
    }

    pub(super) fn kept(&self) -> usize {
        self.is_kept.iter().filter(|is_kept| **is_kept).count()
    }
}

/// `count` of `all` layers, evenly apart.
fn spread(all: usize, count: usize) -> Vec<bool> {
    (0..all).map(|layer| (layer + 1) * count / all > layer * count / all).collect()
}

/// Bytes of the layers that stay, and of the largest others: one that computes and those ahead of it.
fn needed(sizes: &[u64], is_kept: &[bool], ahead: usize) -> Option<u64> {
    let (mut kept, mut streamed) = (0u64, Vec::new());
    for (size, is_kept) in sizes.iter().zip(is_kept) {
        if *is_kept {
            kept = kept.checked_add(*size)?;
        } else {
            streamed.push(*size);
        }
    }
    streamed.sort_unstable_by(|a, b| b.cmp(a));
    streamed.iter().take(ahead + 1).try_fold(kept, |sum, size| sum.checked_add(*size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_stays_and_what_streams_fits_the_budget(
            sizes in prop::collection::vec(1..100u64, 1..40),
            budget in 100..2000u64,
            ahead in 0..4usize,
        ) {
            let residency = Residency::of_sizes(&sizes, budget, ahead);
            prop_assert!(residency.ahead <= ahead);
            let needed = needed(&sizes, &residency.is_kept, residency.ahead).unwrap();
            prop_assert!(needed <= budget, "{needed} of {budget}");
            if sizes.iter().sum::<u64>() <= budget {
                prop_assert_eq!(residency.kept(), sizes.len());
            }
        }

        #[test]
        fn layers_that_stay_are_spread_evenly(all in 1..60usize, share in 0..=60usize) {
            let count = share.min(all);
            let kept = spread(all, count);
            prop_assert_eq!(kept.iter().filter(|is_kept| **is_kept).count(), count);
            // No half of a pass has more than its share, but for one.
            let half = kept[..all / 2].iter().filter(|is_kept| **is_kept).count();
            prop_assert!(half.abs_diff(count * (all / 2) / all) <= 1);
        }
    }

    #[test]
    fn neighbours_are_read_together() {
        let extent = |file, start, len| Extent { file, bytes: ByteRange::at(start, len).unwrap() };
        let far = 1000 + MAX_GAP_BYTES + 1;
        let pieces = vec![extent(0, 0, 100), extent(0, 900, 100), extent(0, far, 7), extent(1, far, 7)];
        assert_eq!(merged(pieces), [extent(0, 0, 1000), extent(0, far, 7), extent(1, far, 7)]);
    }
}
