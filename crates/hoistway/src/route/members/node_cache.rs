//! `node-cache`: takes objects that have an entry in the node's cache, and leaves to `http` what that does not hold.
#![forbid(unsafe_code)]

use crate::{
    ByteRange,
    route::{
        Access, ReadLane, Route, Unavailable,
        member::{Demand, Member, Share, Wanted},
        object_lane::ObjectLane,
        registry::NotOpened,
    },
    source::{Source, objects::ObjectSource},
};
use hoistway_io::file::Residency;
use std::sync::Arc;

/// Reads in flight: fewer than a load has slots, as some wait for what another process is about to bring.
const DEPTH: usize = 8;
const NO_ENTRY: &str = "it has no entry in a cache of this node";

#[derive(Debug)]
struct NodeCache {
    is_named: bool,
    access: Access,
}

/// Opens it for the objects among the files that have an entry, if it is named or the route chooses.
pub(in crate::route) fn open(
    wanted: &Wanted<'_>,
    files: &[&Arc<dyn Source>],
    _: &[Arc<dyn Member>],
) -> Result<Option<Arc<dyn Member>>, NotOpened> {
    let is_named = wanted.route == Route::NodeCache;
    if !is_named && !wanted.route.chooses() {
        return Ok(None);
    }
    let entries: Vec<_> = files.iter().filter_map(|file| ObjectSource::of(file)?.entry()).collect();
    if !is_named && entries.is_empty() {
        return Ok(None);
    }
    let is_direct = entries.iter().all(|own| own.is_direct());
    let access = if is_direct { Access::Direct } else { Access::Buffered };
    Ok(Some(Arc::new(NodeCache { is_named, access })))
}

impl Member for NodeCache {
    fn route(&self) -> Route {
        Route::NodeCache
    }

    fn add(&self, source: &Arc<dyn Source>, _: Access) -> Result<bool, Unavailable> {
        match ObjectSource::of(source).and_then(ObjectSource::entry) {
            Some(_) => {
                source.header_was_read();
                Ok(true)
            }
            None if self.is_named => Err(Unavailable::new(
                NO_ENTRY,
                "open the checkpoint with the option cache, or choose route auto",
            )),
            None => Ok(false),
        }
    }

    fn lane(&self, depth: usize) -> Result<Box<ReadLane>, Unavailable> {
        Ok(Box::new(ObjectLane::new(self.thread_name(), depth, ObjectSource::read_kept)))
    }

    fn share(&self, demand: &Demand<'_>) -> Share {
        let depth = demand.reads.clamp(1, DEPTH);
        Share { threads: 1, depth: (depth, depth), slots: 0, slot_bytes: 0 }
    }

    fn lanes(&self, in_flight: usize) -> (usize, usize) {
        (1, in_flight)
    }

    fn thread_name(&self) -> &'static str {
        "hoistway-node"
    }

    fn is_cache(&self) -> bool {
        true
    }

    fn holds(&self, _: &dyn Source, _: ByteRange) -> Residency {
        // Only the read tells: another process may be about to bring it.
        Residency::Cached
    }

    fn cache_access(&self) -> Access {
        self.access
    }

    fn own_access(&self) -> Option<Access> {
        Some(Access::Buffered)
    }

    fn not_held(&self) -> (&'static str, &'static str) {
        ("the node's cache", "run 'hoistway cache warm' first, or choose route auto")
    }
}
