//! The places in the arenas of a plan: those of tensors, and those that reads fill.
#![forbid(unsafe_code)]

use super::{Plan, Target};
use crate::ByteRange;

/// The tensors of an arena by their positions in the plan, and the places in it that reads fill, in the order of extents.
#[derive(Clone, Debug, Default)]
pub(crate) struct ArenaPlaces {
    pub(crate) tensors: Vec<(usize, ByteRange)>,
    pub(crate) writes: Vec<ByteRange>,
}

/// The places in each arena.
pub(crate) fn arena_places(plan: &Plan) -> Vec<ArenaPlaces> {
    let mut places = vec![ArenaPlaces::default(); plan.arenas().len()];
    for extent in plan.extents() {
        match extent.target {
            Target::InPlace { arena, room } => places[arena].writes.push(room),
            Target::Staged => plan
                .pieces(extent, extent.read)
                .for_each(|piece| places[piece.arena].writes.push(piece.place)),
        }
    }
    for (places, tensors) in places.iter_mut().zip(tensor_places(plan)) {
        places.tensors = tensors;
    }
    places
}

/// The tensors in each arena, by their positions in the plan.
pub(crate) fn tensor_places(plan: &Plan) -> Vec<Vec<(usize, ByteRange)>> {
    let mut places = vec![Vec::new(); plan.arenas().len()];
    for (position, tensor) in plan.tensors().iter().enumerate() {
        if !tensor.place.is_empty() {
            places[tensor.arena].push((position, tensor.place));
        }
    }
    places
}
