//! `overlapped`: takes files that can be read past the cache of Windows, and has a completion port tell the ends of reads.
#![forbid(unsafe_code)]

use super::queued::{self, Kind};
use crate::{
    route::{
        PortLane, Route,
        member::{Member, Wanted},
        registry::NotOpened,
    },
    source::Source,
};
use std::sync::Arc;

static KIND: Kind = Kind {
    route: Route::Overlapped,
    thread_name: "hoistway-port",
    refusal: |_| None,
    lane: |depth| Ok(Box::new(PortLane::new(depth)?)),
};

/// Opens it if it is named, or the route chooses.
pub(in crate::route) fn open(
    wanted: &Wanted<'_>,
    _: &[&Arc<dyn Source>],
    before: &[Arc<dyn Member>],
) -> Result<Option<Arc<dyn Member>>, NotOpened> {
    Ok(queued::open(&KIND, wanted, before))
}
