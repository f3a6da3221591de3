//! `node-cache`: takes objects that have an entry in the node's cache, and leaves to `http` what that does not hold.
#![forbid(unsafe_code)]

use crate::{
    route::{
        Access, ReadLane, Route, Unavailable,
        member::{CacheFacts, Demand, Facts, Files, Member, Share, Wanted},
        object_lane::ObjectLane,
        registry::NotOpened,
    },
    source::{Source, objects::ObjectSource},
};
use std::sync::Arc;

/// Reads in flight: fewer than a load has slots, as some wait for what another process is about to bring.
const DEPTH: usize = 8;
const THREAD: &str = "hoistway-node";
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
    let is_direct = entries.iter().all(|entry| entry.is_direct());
    let access = if is_direct { Access::Direct } else { Access::Buffered };
    Ok(Some(Arc::new(NodeCache { is_named, access })))
}

impl Member for NodeCache {
    fn facts(&self) -> Facts {
        // Only the read tells what is held: another process may be about to bring it.
        let cache = CacheFacts {
            access: self.access,
            is_seen: false,
            name: "the node's cache",
            fix: "run 'hoistway cache warm' first, or choose route auto",
        };
        Facts {
            files: Files::Own(Access::Buffered),
            cache: Some(cache),
            most_lanes: 1,
            ..Facts::of(Route::NodeCache, THREAD)
        }
    }

    fn add(&self, source: &Arc<dyn Source>, _: Access) -> Result<bool, Unavailable> {
        match ObjectSource::of(source).filter(|object| object.entry().is_some()) {
            Some(object) => {
                object.forget_ahead();
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
        Ok(Box::new(ObjectLane::new(THREAD, depth, ObjectSource::read_kept)))
    }

    fn share(&self, demand: &Demand<'_>) -> Share {
        let depth = demand.reads.clamp(1, DEPTH);
        Share { threads: 1, depth: (depth, depth), slots: 0, slot_bytes: 0 }
    }
}
