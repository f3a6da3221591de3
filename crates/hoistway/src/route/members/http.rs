//! `http`: takes objects, each read of which is a request for a range.
#![forbid(unsafe_code)]

use crate::{
    cache::Entry,
    route::{
        Access, ReadLane, Route, Unavailable,
        member::{Demand, Member, Share, Wanted},
        object_lane::ObjectLane,
        registry::NotOpened,
    },
    source::{Source, objects::ObjectSource},
};
use bytesize::ByteSize;
use std::{collections::BTreeSet, sync::Arc, time::Duration};

/// Bytes of a request: longer ones lose less to the wait for the first byte.
const REQUEST_BYTES: u64 = 8 << 20;
/// Requests in flight, at first and at most.
const DEPTH: (usize, usize) = (16, 128);
/// Requests in flight at first where the server takes as long as [`FAR`] for its first byte: its connections are slow to speed
/// up, and a load would be over before it had tried more of them.
const FAR_DEPTH: usize = 64;
const FAR: Duration = Duration::from_millis(5);
/// Requests in flight of a load on the caller's thread.
const INLINE_DEPTH: usize = 8;

#[derive(Debug)]
struct Http {
    is_named: bool,
    has_device: bool,
    /// Requests in flight at first.
    first_depth: usize,
    notes: Vec<String>,
    /// The entries of its objects in the node's cache.
    entries: Vec<Arc<Entry>>,
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
    let servers: BTreeSet<_> = objects.iter().map(|own| own.object().server()).collect();
    let mut notes: Vec<_> = servers.iter().map(|server| format!("objects came from {server}")).collect();
    let entries = objects.iter().filter_map(|own| own.entry().cloned()).collect();
    let first_bytes: Vec<_> = objects.iter().map(|own| own.object().first_byte()).collect();
    for object in objects {
        if let Some(why) = object.uncached() {
            notes.push(format!("{} is not kept in the node's cache: {why}", object.object().url()));
        }
        let url = object.object().url();
        if !object.object().is_pinned() {
            notes.push(format!("{url} has no strong ETag: its length and date were compared instead"));
        }
    }
    let is_far = first_bytes.into_iter().flatten().any(|time| time >= FAR);
    let first_depth = if is_far { FAR_DEPTH } else { DEPTH.0 };
    let has_device = wanted.device.is_some();
    Ok(Some(Arc::new(Http { is_named, has_device, first_depth, notes, entries })))
}

impl Member for Http {
    fn route(&self) -> Route {
        Route::Http
    }

    fn add(&self, source: &Arc<dyn Source>, _: Access) -> Result<bool, Unavailable> {
        match ObjectSource::of(source) {
            Some(_) => {
                source.header_was_read();
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
        Ok(Box::new(ObjectLane::new(self.thread_name(), depth, ObjectSource::read_asked)))
    }

    fn share(&self, demand: &Demand<'_>) -> Share {
        let chosen = demand.in_flight_bytes.map(|bytes| (bytes / demand.longest_bytes.max(1)) as usize);
        let (first, most) = match chosen {
            _ if demand.is_inline => (INLINE_DEPTH, INLINE_DEPTH),
            Some(depth) => (depth, depth),
            None => (self.first_depth, DEPTH.1),
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
        "hoistway-http"
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

    fn last_notes(&self) -> Vec<String> {
        let (mut damaged, mut kept, mut left_out, mut notes) = (0, 0, 0, Vec::new());
        for entry in &self.entries {
            let counts = entry.counts();
            (damaged, kept, left_out) = (damaged + counts.0, kept + counts.1, left_out + counts.2);
            if let Some(why) = entry.refusal() {
                let note = format!("the node's cache is not written to: {why}");
                if !notes.contains(&note) {
                    notes.push(note);
                }
            }
        }
        if damaged > 0 {
            notes.push(format!("{damaged} blocks in the node's cache were damaged, and came from the store"));
        }
        if kept > 0 {
            notes.push(format!("{} were written to the node's cache so far", ByteSize(kept)));
        }
        if left_out > 0 {
            let bytes = ByteSize(left_out);
            notes.push(format!(
                "{bytes} are not kept in the node's cache: its drive is slower than the store, or memory_budget leaves \
                 no room for them to wait"
            ));
        }
        notes
    }
}
