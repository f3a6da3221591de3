//! `http`: takes objects, each read of which is a request for a range.
#![forbid(unsafe_code)]

use super::object_notes::ObjectNotes;
use crate::{
    Alignment,
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
/// The same, at most, where the wait is long.
const FAR_REQUEST_BYTES: u64 = 16 << 20;
/// Requests in flight, at first and at most.
const DEPTH: (usize, usize) = (16, 128);
/// Requests in flight at first where the server takes as long as [`FAR`] for its first byte: its connections are slow to speed
/// up, and a load would be over before it had tried more of them.
const FAR_DEPTH: usize = 64;
const FAR: Duration = Duration::from_millis(5);
/// The same, at least, where there is less to read than that many requests for: a connection more brings it sooner.
const LEAST_FAR_REQUEST_BYTES: u64 = 4 << 20;
/// Lengths of requests are multiples of this: of a block of the node's cache.
const REQUEST_STEP: Alignment = match Alignment::new(256 << 10) {
    Some(step) => step,
    None => Alignment::BLOCK,
};
/// Requests in flight of a load on the caller's thread.
const INLINE_DEPTH: usize = 8;

#[derive(Debug)]
struct Http {
    is_named: bool,
    has_device: bool,
    /// Requests in flight at first, and bytes of each.
    first_depth: usize,
    request_bytes: u64,
    /// Whether the server is far.
    is_far: bool,
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
    let first_bytes: Vec<_> = objects.iter().map(|object| object.object().first_byte()).collect();
    let is_far = first_bytes.into_iter().flatten().any(|time| time >= FAR);
    let lens: Vec<u64> = objects.iter().map(|object| object.len()).collect();
    let (first_depth, request_bytes) = if is_far {
        (FAR_DEPTH, far_request_bytes(&lens, wanted.read_bytes))
    } else {
        (DEPTH.0, REQUEST_BYTES)
    };
    let (has_device, notes) = (wanted.device.is_some(), ObjectNotes::of_route(wanted, files));
    Ok(Some(Arc::new(Http { is_named, has_device, first_depth, request_bytes, is_far, notes })))
}

/// The length of requests to a far server for so many bytes of objects of these lengths: as few rounds of those that may be in flight
/// at first as can be, all of one length. Between rounds all wait for the server at once, and a last round of few takes as long as one
/// of many.
fn far_request_bytes(lens: &[u64], read_bytes: u64) -> u64 {
    let in_flight = FAR_DEPTH as u64;
    let total = lens.iter().fold(0u64, |sum, len| sum.saturating_add(*len)).min(read_bytes);
    // The last request of each object is cut short.
    let cut_short = (lens.len() as u64).min(in_flight / 2);
    let rounds = total.div_ceil((in_flight - cut_short) * FAR_REQUEST_BYTES).max(1);
    let even = REQUEST_STEP.up(total.div_ceil(rounds * in_flight - cut_short));
    // Shorter ones cost the server more requests, and gain little.
    even.unwrap_or(FAR_REQUEST_BYTES).clamp(LEAST_FAR_REQUEST_BYTES, FAR_REQUEST_BYTES)
}

impl Member for Http {
    fn facts(&self) -> Facts {
        Facts {
            files: Files::Alone(Access::Buffered),
            connects: true,
            // A device has its reads in pinned slots, and many of them.
            chunk_bytes: (!self.has_device).then_some(self.request_bytes),
            first_step: (self.is_far && !self.has_device).then_some(REQUEST_STEP),
            most_lanes: 1,
            ..Facts::of(Route::Http, THREAD)
        }
    }

    fn add(&self, source: &Arc<dyn Source>, _: Access) -> Result<bool, Unavailable> {
        match ObjectSource::of(source) {
            Some(object) => {
                object.forget_ahead();
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

#[cfg(test)]
mod tests {
    use super::*;
    use hoistway_io::executor::InFlightLimit;
    use std::time::Instant;

    const RATE: f64 = 90e6;
    const LATENCY: f64 = 0.030;

    /// Seconds that requests of these lengths take from a server that waits before each answer and has so much for each connection
    /// and for all.
    fn seconds(mut requests: Vec<u64>, mut limit: InFlightLimit, link: f64) -> f64 {
        const STEP: f64 = 0.001;
        let begin = Instant::now();
        let (mut now, mut most) = (0.0, 0);
        // When each begins to come, and the bytes that it lacks.
        let mut under_way: Vec<(f64, f64, u64)> = Vec::new();
        requests.reverse();
        while !requests.is_empty() || !under_way.is_empty() {
            while under_way.len() < limit.operations()
                && let Some(len) = requests.pop()
            {
                // One more round trip for a connection that is new.
                let wait = if under_way.len() < most { LATENCY } else { 2.0 * LATENCY };
                most = most.max(under_way.len() + 1);
                under_way.push((now + wait, len as f64, len));
            }
            now += STEP;
            let coming = under_way.iter().filter(|(from, ..)| *from <= now).count();
            let each = RATE.min(link / coming.max(1) as f64) * STEP;
            for request in under_way.iter_mut().filter(|(from, ..)| *from <= now) {
                request.1 -= each;
            }
            let at = begin + Duration::from_secs_f64(now);
            for (.., len) in under_way.extract_if(.., |request| request.1 <= 0.0) {
                limit.ended(len as usize, Duration::from_millis(1), 0, at);
            }
        }
        now
    }

    fn requests(lens: &[u64], request_bytes: u64) -> Vec<u64> {
        let cut = |len: &u64| {
            (0..*len)
                .step_by(request_bytes as usize)
                .map(|at| request_bytes.min(len - at))
                .collect::<Vec<_>>()
        };
        lens.iter().flat_map(cut).collect()
    }

    /// As much as 48 connections with requests of 8 MiB, which fill a link of 25 Gb/s.
    #[test]
    fn a_far_server_gives_what_raw_sockets_get_of_it() {
        for link in [1.5e9, 3.1e9, 12e9] {
            for total in [200u64 << 20, 600 << 20, 1_000_000_000, 1_100_000_000, 2 << 30, 5 << 30] {
                for objects in [1, 2, 4, 9] {
                    let lens = vec![total / objects; objects as usize];
                    let raw = seconds(requests(&lens, REQUEST_BYTES), InFlightLimit::fixed(48), link);
                    let limit = InFlightLimit::by_connections(FAR_DEPTH, DEPTH.1);
                    let cut = seconds(requests(&lens, far_request_bytes(&lens, u64::MAX)), limit, link);
                    assert!(
                        raw / cut >= 0.85,
                        "{total} bytes of {objects} over {link}: {cut} s, raw {raw} s"
                    );
                }
            }
        }
    }

    #[test]
    fn requests_to_a_far_server_end_together() {
        for (lens, expected) in [
            (&[1_100_000_000][..], 128),
            (&[550_000_000, 550_000_000], 128),
            (&[1_000_000_000], 64),
            (&[500_000_000, 500_000_000], 64),
            (&[500_000_000], 64),
            (&[32_000_000], 8),
            (&[10 << 30], 704),
        ] {
            let count = requests(lens, far_request_bytes(lens, u64::MAX)).len();
            assert!(count <= expected && count * 100 >= expected * 95, "{lens:?}: {count} requests");
        }
        for lens in [&[][..], &[1], &[u64::MAX, u64::MAX], &[1000; 5000]] {
            let bytes = far_request_bytes(lens, u64::MAX);
            let bounds = LEAST_FAR_REQUEST_BYTES..=FAR_REQUEST_BYTES;
            assert!(bounds.contains(&bytes) && REQUEST_STEP.divides(bytes));
        }
        // A load of a part asks for that, however long the object is.
        assert_eq!(requests(&[100_000_000], far_request_bytes(&[10 << 30], 100_000_000)).len(), 24);
    }
}
