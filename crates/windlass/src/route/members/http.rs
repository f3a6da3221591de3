//! `http`: takes objects, each read of which is a request for a range.
#![forbid(unsafe_code)]

use crate::{
    route::{
        Access, ReadLane, Route, Unavailable,
        http::HttpLane,
        member::{Demand, Member, Share, Wanted},
        registry::NotOpened,
    },
    source::{Source, objects::ObjectSource},
};
use std::sync::Arc;

/// Bytes of a request: longer ones lose less to the wait for the first byte.
const REQUEST_BYTES: u64 = 8 << 20;
/// Requests in flight, at first and at most.
const DEPTH: (usize, usize) = (16, 128);
/// Requests in flight of a load on the caller's thread.
const INLINE_DEPTH: usize = 8;

#[derive(Debug)]
struct Http {
    is_named: bool,
    has_device: bool,
    notes: Vec<String>,
}

/// Opens it for the objects among the files, if it is named or the route chooses.
pub(in crate::route) fn open(
    wanted: &Wanted<'_>,
    files: &[&Arc<dyn Source>],
    _: &[Arc<dyn Member>],
) -> Result<Option<Arc<dyn Member>>, NotOpened> {
    let is_named = wanted.route == Route::Http;
    if !is_named && !wanted.route.chooses() {
        return Ok(None);
    }
    let objects: Vec<_> = files.iter().filter_map(|file| ObjectSource::of(file)).collect();
    if !is_named && objects.is_empty() {
        return Ok(None);
    }
    let mut notes = Vec::new();
    for object in objects {
        let (url, server) = (object.object().url(), object.object().server());
        notes.push(format!("objects came from {server}"));
        if !object.object().has_etag() {
            notes.push(format!("{url} has no strong ETag: its length and date were compared instead"));
        }
    }
    notes.dedup();
    Ok(Some(Arc::new(Http { is_named, has_device: wanted.device.is_some(), notes })))
}

impl Member for Http {
    fn route(&self) -> Route {
        Route::Http
    }

    fn add(&self, source: &Arc<dyn Source>, _: Access) -> Result<bool, Unavailable> {
        match ObjectSource::of(source) {
            Some(object) => {
                object.forget_head();
                Ok(true)
            }
            None if self.is_named => {
                let reason = format!("it lies on {}, and not in an object store", source.medium());
                Err(Unavailable::new(reason, "choose route auto"))
            }
            None => Ok(false),
        }
    }

    fn lane(&self, depth: usize) -> Result<Box<ReadLane>, Unavailable> {
        Ok(Box::new(HttpLane::new(depth)))
    }

    fn share(&self, demand: &Demand<'_>) -> Share {
        let chosen = demand.in_flight_bytes.map(|bytes| (bytes / demand.longest_bytes.max(1)) as usize);
        let (first, most) = match chosen {
            _ if demand.is_inline => (INLINE_DEPTH, INLINE_DEPTH),
            Some(depth) => (depth, depth),
            None => DEPTH,
        };
        let most = most.min(demand.reads).clamp(1, DEPTH.1);
        Share { threads: 1, depth: (first.clamp(1, most), most), slots: 0, slot_bytes: 0 }
    }

    fn lanes(&self, in_flight: usize) -> (usize, usize) {
        (1, in_flight)
    }

    fn connects(&self) -> bool {
        true
    }

    fn thread_name(&self) -> &'static str {
        "windlass-http"
    }

    fn serves_alone(&self) -> Option<Access> {
        Some(Access::Buffered)
    }

    fn chunk_bytes(&self) -> Option<u64> {
        // A device has its reads in pinned slots, and many of them.
        (!self.has_device).then_some(REQUEST_BYTES)
    }

    fn note(&self) -> Option<String> {
        (!self.notes.is_empty()).then(|| self.notes.join("; "))
    }
}
