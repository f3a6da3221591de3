//! `http`: takes objects, each read of which is a request for a range.
#![forbid(unsafe_code)]

use super::object_notes::ObjectNotes;
use crate::{
    route::{
        Access, ReadLane, Route, Unavailable,
        member::{Demand, Facts, Files, Member, Share, Stage, Wanted},
        object_lane::ObjectLane,
        registry::NotOpened,
    },
    source::{Source, objects::ObjectSource},
};
use std::{sync::Arc, time::Duration};

const THREAD: &str = "hoistway-http";
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
    notes: ObjectNotes,
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
    let first_bytes: Vec<_> = objects.iter().map(|own| own.object().first_byte()).collect();
    let is_far = first_bytes.into_iter().flatten().any(|time| time >= FAR);
    let first_depth = if is_far { FAR_DEPTH } else { DEPTH.0 };
    let (has_device, notes) = (wanted.device.is_some(), ObjectNotes::of(files.iter().copied()));
    Ok(Some(Arc::new(Http { is_named, has_device, first_depth, notes })))
}

impl Member for Http {
    fn facts(&self) -> Facts {
        Facts {
            files: Files::Alone(Access::Buffered),
            connects: true,
            // A device has its reads in pinned slots, and many of them.
            chunk_bytes: (!self.has_device).then_some(REQUEST_BYTES),
            most_lanes: 1,
            ..Facts::of(Route::Http, THREAD)
        }
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
        Ok(Box::new(ObjectLane::new(THREAD, depth, ObjectSource::read_asked)))
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

    fn notes(&self, stage: Stage) -> Vec<String> {
        self.notes.at(stage)
    }
}
