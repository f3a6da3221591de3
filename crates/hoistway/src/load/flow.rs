//! In which order a load hands its tensors out, and how far it may run ahead of the caller that takes them.
#![forbid(unsafe_code)]

use super::Tensor;
use crate::{
    Alignment,
    catalog::TensorId,
    plan::{Plan, PlanOptions},
};
use std::collections::{HashMap, VecDeque};

/// Shorter reads than this are not worth a tighter bound.
const MIN_CHUNK_BYTES: u64 = 64 << 10;
/// Reads, and arenas of a device, that fit into the bound, at least.
const PARTS: u64 = 8;

/// The order in which tensors are handed out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Order {
    /// As they become complete.
    #[default]
    Arrival,
    /// That of the checkpoint: file by file, in the order of their bytes.
    File,
}

/// How a load hands its tensors out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamOptions {
    /// In which order.
    pub order: Order,
    /// Most bytes of tensors that were read, or are being read, and not handed out yet, with the one that was handed out
    /// last. A tensor that is larger is loaded alone, with no more of its neighbours than the reads at its ends bring.
    /// On a device, up to two pieces of memory of tensors that were dropped are kept besides, of at most half as many bytes, for the next
    /// ones.
    /// Reserved huge pages are taken for all tensors at once nevertheless. Default: no bound.
    pub max_in_flight_bytes: Option<u64>,
}

hoistway_io::setters! {
    StreamOptions {
        order: Order,
        max_in_flight_bytes: Option<u64>,
    }
}

impl StreamOptions {
    /// Shortens reads, and arenas of a device, to parts of the bound.
    pub(super) fn limit(&self, plan: &mut PlanOptions) {
        if let Some(limit) = self.max_in_flight_bytes {
            let part = Alignment::BLOCK.down(limit / PARTS).max(MIN_CHUNK_BYTES);
            plan.chunk_bytes = plan.chunk_bytes.min(part);
            plan.device_arena_bytes = plan.device_arena_bytes.min(part);
        }
    }
}

/// Tensors on their way from a load to its owner.
#[derive(Debug)]
pub(super) struct Flow {
    order: Order,
    limit: u64,
    /// In the order of the checkpoint.
    tensors: Box<[Expected]>,
    /// Bytes of tensors in the extents before each.
    before: Box<[u64]>,
    /// The first tensor that was not handed out.
    next: usize,
    /// Bytes of tensors that were handed out, but for the last.
    released: u64,
    last: u64,
    /// Complete, and not handed out yet.
    arrived: VecDeque<Tensor>,
    /// The same, by position, where their order is that of the checkpoint.
    waiting: HashMap<usize, Tensor>,
}

#[derive(Debug)]
struct Expected {
    tensor: TensorId,
    len: u64,
    /// Extents from the first on that it takes to complete the tensor.
    extents: usize,
    was_handed_out: bool,
}

impl Flow {
    pub(super) fn new(plan: &Plan, options: &StreamOptions) -> Self {
        let is_plain = options.order == Order::Arrival && options.max_in_flight_bytes.is_none();
        let mut flow = Self {
            order: options.order,
            limit: options.max_in_flight_bytes.unwrap_or(u64::MAX),
            tensors: Box::default(),
            before: Box::default(),
            next: 0,
            released: 0,
            last: 0,
            arrived: VecDeque::new(),
            waiting: HashMap::new(),
        };
        if !is_plain {
            flow.expect(plan);
        }
        flow
    }

    fn expect(&mut self, plan: &Plan) {
        let mut extents = vec![0; plan.tensors().len()];
        let mut before = Vec::with_capacity(plan.extents().len() + 1);
        let mut total = 0u64;
        before.push(0);
        for (number, extent) in plan.extents().iter().enumerate() {
            for piece in plan.pieces(extent, extent.read) {
                extents[piece.tensor] = number + 1;
                total = total.saturating_add(piece.place.len());
            }
            before.push(total);
        }
        if total <= self.limit {
            self.limit = u64::MAX;
        }
        let tensors = plan.tensors().iter().zip(extents).map(|(planned, extents)| Expected {
            tensor: planned.tensor,
            len: planned.place.len(),
            extents,
            was_handed_out: false,
        });
        let mut tensors: Vec<Expected> = tensors.collect();
        tensors.sort_unstable_by_key(|expected| expected.tensor);
        (self.tensors, self.before) = (tensors.into(), before.into());
    }

    /// Whether the load has to wait for its owner now and then.
    pub(super) fn is_bounded(&self) -> bool {
        self.limit < u64::MAX
    }

    /// Bytes of tensors that are in memory at once, beside one that is longer. `None` if there is no bound.
    pub(super) fn bound(&self) -> Option<u64> {
        self.is_bounded().then_some(self.limit)
    }

    /// Bytes of tensors that are in memory at once while their owner keeps none, at most.
    pub(super) fn most_bytes(&self) -> u64 {
        let longest = self.tensors.iter().map(|expected| expected.len).max().unwrap_or(0);
        let longest_read =
            self.before.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).max().unwrap_or(0);
        self.limit.max(longest.saturating_add(longest_read))
    }

    /// How many extents, from the first on, may be read.
    pub(super) fn admitted(&self) -> usize {
        if !self.is_bounded() {
            return usize::MAX;
        }
        let most = self.limit.saturating_add(self.released);
        // `before` begins with the 0 bytes of no extent.
        let fitting = self.before.partition_point(|&bytes| bytes <= most).saturating_sub(1);
        // A caller that waits for a tensor must get it, however large it is.
        let needed = self.tensors.get(self.next).map_or(0, |expected| expected.extents);
        fitting.max(needed)
    }

    /// The owner asks for another tensor: what it got last is its own affair from now on.
    pub(super) fn release_last(&mut self) {
        self.released = self.released.saturating_add(std::mem::take(&mut self.last));
    }

    /// Tensors have become complete.
    pub(super) fn add(&mut self, tensors: VecDeque<Tensor>) {
        match self.order {
            Order::Arrival if self.arrived.is_empty() => self.arrived = tensors,
            Order::Arrival => self.arrived.extend(tensors),
            Order::File => {
                let placed = tensors.into_iter().map(|tensor| (self.position(&tensor), tensor));
                let placed: Vec<_> = placed.collect();
                self.waiting.extend(placed);
            }
        }
    }

    /// The next tensor to hand out, if it is there.
    pub(super) fn take(&mut self) -> Option<Tensor> {
        let tensor = match self.order {
            Order::Arrival => self.arrived.pop_front()?,
            Order::File => self.waiting.remove(&self.next)?,
        };
        if !self.tensors.is_empty() {
            let position = self.position(&tensor);
            let expected = &mut self.tensors[position];
            expected.was_handed_out = true;
            self.last = expected.len;
            while self.tensors.get(self.next).is_some_and(|expected| expected.was_handed_out) {
                self.next += 1;
            }
        }
        Some(tensor)
    }

    pub(super) fn clear(&mut self) {
        self.arrived.clear();
        self.waiting.clear();
    }

    /// Position among the tensors of the load. All that arrive are expected.
    fn position(&self, tensor: &Tensor) -> usize {
        self.tensors.partition_point(|expected| expected.tensor < tensor.id())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Checkpoint, LoadOptions,
        plan::{Layout, PlanOptions, Selection},
    };

    #[test]
    fn a_tensor_counts_until_the_next_one_is_asked_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.safetensors");
        let tensors: Vec<_> = (0..8)
            .map(|at| {
                (
                    format!("t{at}"),
                    safetensors::tensor::TensorView::new(safetensors::Dtype::U8, vec![4096], &[7; 4096])
                        .unwrap(),
                )
            })
            .collect();
        std::fs::write(&path, safetensors::serialize(tensors, None).unwrap()).unwrap();
        let checkpoint = Checkpoint::open(&[path]).unwrap();
        let requests = Selection::all().resolve(checkpoint.catalog()).unwrap();
        let options = PlanOptions {
            chunk_bytes: 4096,
            coalesce_gap_bytes: 0,
            layout: Layout::Tensor,
            ..PlanOptions::default()
        };
        let plan = Plan::new(checkpoint.catalog(), &requests, &options).unwrap();
        let mut flow = Flow::new(&plan, &StreamOptions::default().max_in_flight_bytes(5 * 4096));
        // More than the next tensor needs, which would be admitted in any case.
        let before = flow.admitted();
        assert!(before < plan.extents().len());
        flow.add(checkpoint.load(&LoadOptions::default()).unwrap().into_tensors().into());
        let taken = flow.take().unwrap();
        assert_eq!(flow.admitted(), before, "{} is its owner's", taken.name());
        flow.release_last();
        assert!(flow.admitted() > before);
    }
}
