//! `io_uring`: takes files that can be read past the page cache by a ring.
#![forbid(unsafe_code)]

use crate::{
    route::{
        Access, ReadLane, ReadOp, Route, Unavailable, UringLane,
        member::{ALONE, Demand, Landing, Member, Share, Wanted},
        registry::NotOpened,
    },
    source::Source,
};
use std::sync::Arc;

/// Reads in flight of a load on the caller's thread.
const INLINE_DEPTH: usize = 8;

#[derive(Debug)]
struct Rings {
    is_named: bool,
    is_inline: bool,
}

/// Opens it if it is named, or the route chooses. It leaves the ends of files that go past the host to threads: they are
/// not worth a ring.
pub(in crate::route) fn open(
    wanted: &Wanted<'_>,
    _: &[&Arc<dyn Source>],
    before: &[Arc<dyn Member>],
) -> Result<Option<Arc<dyn Member>>, NotOpened> {
    let is_named = wanted.route == Route::IoUring;
    let is_past_host = before.iter().any(|member| member.landing() == Landing::Device);
    let is_chosen = wanted.route.chooses() && !wanted.copies_on_lanes && !is_past_host;
    let is_inline = wanted.is_inline;
    Ok((is_named || is_chosen).then(|| Arc::new(Rings { is_named, is_inline }) as Arc<dyn Member>))
}

/// Whether rings can be made.
///
/// # Errors
/// Why not.
pub(crate) fn probe_ring() -> Result<(), Unavailable> {
    UringLane::<ReadOp>::new(INLINE_DEPTH).map(drop)
}

impl Member for Rings {
    fn route(&self) -> Route {
        Route::IoUring
    }

    fn add(&self, source: &Arc<dyn Source>, access: Access) -> Result<bool, Unavailable> {
        match source.local()?.ring_refusal() {
            Some(why) => Err(why),
            None => Ok(self.is_named || access == Access::Direct),
        }
    }

    fn lane(&self, depth: usize) -> Result<Box<ReadLane>, Unavailable> {
        if self.is_inline && !self.is_named {
            return Err(Unavailable::new(ALONE, ""));
        }
        Ok(Box::new(UringLane::new(depth)?))
    }

    fn share(&self, demand: &Demand<'_>) -> Share {
        let depth = if demand.is_inline { (INLINE_DEPTH, INLINE_DEPTH) } else { demand.threads.depth };
        Share { threads: demand.threads.rings, depth, slots: 0, slot_bytes: 0 }
    }

    fn may_outlive_lane(&self) -> bool {
        true
    }

    fn lanes(&self, in_flight: usize) -> (usize, usize) {
        (1, in_flight)
    }

    fn thread_name(&self) -> &'static str {
        "hoistway-ring"
    }
}
