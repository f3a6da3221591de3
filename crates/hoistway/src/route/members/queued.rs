//! Common code of the routes that keep many direct reads in flight from one thread: `io_uring`, `overlapped`.
#![forbid(unsafe_code)]

use crate::{
    route::{
        Access, ReadLane, Route, Unavailable,
        member::{ALONE, Demand, Facts, Landing, Member, Share, Wanted},
    },
    source::Source,
};
use hoistway_io::file::LocalFile;
use std::{fmt, sync::Arc};

/// Reads in flight of a load on the caller's thread.
pub(super) const INLINE_DEPTH: usize = 8;

/// The differences between such routes.
pub(super) struct Kind {
    pub(super) route: Route,
    pub(super) thread_name: &'static str,
    /// Why lanes cannot read a file; `None` if they can.
    pub(super) refusal: fn(&LocalFile) -> Option<Unavailable>,
    /// A lane for so many reads.
    pub(super) lane: fn(usize) -> Result<Box<ReadLane>, Unavailable>,
}

struct Queued {
    kind: &'static Kind,
    is_named: bool,
    is_inline: bool,
}

/// Opens it if it is named, or the route chooses. It leaves the ends of files that go past the host to threads: they are
/// not worth a lane.
pub(super) fn open(
    kind: &'static Kind,
    wanted: &Wanted<'_>,
    before: &[Arc<dyn Member>],
) -> Option<Arc<dyn Member>> {
    let is_named = wanted.route == kind.route;
    let is_past_host = before.iter().any(|member| member.facts().landing == Landing::Device);
    let is_chosen = wanted.route.chooses() && !wanted.copies_on_lanes && !is_past_host;
    let is_inline = wanted.is_inline;
    (is_named || is_chosen).then(|| Arc::new(Queued { kind, is_named, is_inline }) as Arc<dyn Member>)
}

impl Member for Queued {
    fn facts(&self) -> Facts {
        Facts { landing: Landing::Kept, most_lanes: 1, ..Facts::of(self.kind.route, self.kind.thread_name) }
    }

    fn add(&self, source: &Arc<dyn Source>, access: Access) -> Result<bool, Unavailable> {
        match (self.kind.refusal)(source.local()?) {
            Some(why) => Err(why),
            None => Ok(self.is_named || access == Access::Direct),
        }
    }

    fn lane(&self, depth: usize) -> Result<Box<ReadLane>, Unavailable> {
        if self.is_inline && !self.is_named {
            return Err(Unavailable::new(ALONE, ""));
        }
        (self.kind.lane)(depth)
    }

    fn share(&self, demand: &Demand<'_>) -> Share {
        let depth = if demand.is_inline { (INLINE_DEPTH, INLINE_DEPTH) } else { demand.threads.depth };
        Share { threads: demand.threads.rings, depth, slots: 0, slot_bytes: 0 }
    }
}

impl fmt::Debug for Queued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queued").field("route", &self.kind.route).finish_non_exhaustive()
    }
}
