//! `io_uring`: takes files that can be read past the page cache by a ring.
#![forbid(unsafe_code)]

use super::queued::{self, INLINE_DEPTH, Kind};
use crate::{
    route::{
        CarriedRead, Route, Unavailable, UringLane,
        member::{Member, Wanted},
        registry::NotOpened,
    },
    source::Source,
};
use hoistway_io::file::LocalFile;
use std::sync::Arc;

static KIND: Kind = Kind {
    route: Route::IoUring,
    thread_name: "hoistway-ring",
    refusal: LocalFile::ring_refusal,
    lane: |depth| Ok(Box::new(UringLane::new(depth)?)),
};

/// Opens it if it is named, or the route chooses.
pub(in crate::route) fn open(
    wanted: &Wanted<'_>,
    _: &[&Arc<dyn Source>],
    before: &[Arc<dyn Member>],
) -> Result<Option<Arc<dyn Member>>, NotOpened> {
    Ok(queued::open(&KIND, wanted, before))
}

/// Whether rings can be made.
///
/// # Errors
/// Why not.
pub(crate) fn probe_ring() -> Result<(), Unavailable> {
    UringLane::<CarriedRead>::new(INLINE_DEPTH).map(drop)
}
