//! Drives lanes: takes reads from the queue, and decides what each completion means. The same for every backend.
#![forbid(unsafe_code)]

use super::{job::Job, routes::LoadRoute, window::Window};
use crate::{
    Alignment, Error,
    memory::Slot,
    parallel::thread_named,
    report::Refusal,
    route::{
        Access, Buffer, DirectIo, Done, Outcome, ReadLane, ReadOp, Unavailable, member::no_direct_reads,
    },
};
use std::{io, thread, time::Instant};
use windlass_io::file::{Residency, is_transient};

/// Serves the queue of a route with one lane. If the route gives up, those after it go on, with as many threads as they
/// should have.
pub(super) fn serve(job: &Job, route: usize) {
    let own = &job.routes[route];
    if own.member.is_cache() {
        return serve_cached(job, route);
    }
    // No read, no lane.
    let Some(first) = job.queue.next(route) else {
        return;
    };
    job.queue.put_back(route, first);
    let (first, most) = own.share.depth;
    let refused = match own.member.lane(most) {
        Ok(lane) => drive(job, with_faults(job, lane), Window::between(first, most), route),
        Err(why) => Some(why),
    };
    let Some(why) = refused else { return };
    let name = own.member.route();
    if job.route == name || !job.queue.can_do_without(route) {
        return job.fail(Error::RouteUnavailable { route: name, path: None, why });
    }
    job.note_refusal(Refusal { what: name.to_string(), path: None, why });
    if !job.queue.give_up(route) {
        return;
    }
    thread::scope(|scope| {
        let (job, mut own) = (&job, None);
        for later in route + 1..job.routes.len() {
            for _ in 0..job.routes[later].share.threads {
                match own {
                    None => own = Some(later),
                    // As many as the system gives; this one works in any case.
                    Some(_) => {
                        let name = job.routes[later].member.thread_name();
                        let _ = thread_named(name).spawn_scoped(scope, move || serve(job, later));
                    }
                }
            }
        }
        if let Some(later) = own {
            serve(job, later);
        }
    });
}

/// Touches memory ahead of the reads, leaving out the first `ahead` extents.
pub(super) fn touch(job: &Job, ahead: usize) {
    while job.touch_ahead(ahead) {}
}

/// Copies what the page cache holds, and hands the rest to the routes after it.
fn serve_cached(job: &Job, route: usize) {
    let own = &job.routes[route];
    let mut lane = match own.member.lane(1) {
        Ok(lane) => with_faults(job, lane),
        Err(why) => {
            return job.fail(Error::RouteUnavailable { route: own.member.route(), path: None, why });
        }
    };
    let mut done = Vec::new();
    while let Some(mut op) = job.queue.next_planned(route) {
        let extent = job.extent(&op);
        if op.source.residency(extent.read) == Residency::Cold {
            if !hand_over_cold(job, op, route) {
                return;
            }
            continue;
        }
        if !take_slot(job, &mut op, own, true) {
            return;
        }
        let cold_access = std::mem::replace(&mut op.access, Access::Buffered);
        if !aim(job, &mut op, own) {
            return;
        }
        lane.push(op);
        if let Err(error) = lane.submit_and_wait(&mut done) {
            job.fail(Error::Internal(format!("a cached read: {error}")));
            return;
        }
        for Done { op, result } in done.drain(..) {
            if !settle_cached(job, op, result, cold_access, route) {
                return;
            }
        }
    }
}

/// What came of a copy from the cache. `false` if the load is over.
fn settle_cached(
    job: &Job,
    mut op: ReadOp,
    result: io::Result<usize>,
    cold_access: Access,
    route: usize,
) -> bool {
    let whole = job.extent(&op).read.len();
    let own = &job.routes[route];
    let name = own.member.route();
    let count = match result {
        Ok(count) => count,
        Err(error) if job.route == name && !is_transient(&error) => {
            job.fail(read_error(job, &op, error, own));
            return false;
        }
        // The route that reads it from the device will see what is wrong, if anything is.
        Err(_) => 0,
    };
    if count as u64 == whole {
        op.progress.filled = whole;
        job.account(&op, name, count, 0);
        return complete(job, op);
    }
    // The cache ends here: the rest is cold. Staged extents start over rather than hold a slot while they wait.
    match &mut op.buffer {
        Buffer::Staged { slot, .. } | Buffer::SharedStaging { slot, .. } => *slot = None,
        // Direct reads go on at a whole block.
        Buffer::InPlace(_) if count > 0 => {
            op.progress.filled = Alignment::BLOCK.down(count as u64);
            job.account(&op, name, count, 0);
        }
        Buffer::InPlace(_) => {}
    }
    op.access = cold_access;
    hand_over_cold(job, op, route)
}

/// Sends a read that the cache cannot serve to the route after it. `false` if there is none.
fn hand_over_cold(job: &Job, op: ReadOp, route: usize) -> bool {
    let name = job.routes[route].member.route();
    if job.route == name {
        if let Err(error) = job.check_unchanged(&op) {
            job.fail(error);
            return false;
        }
        let offset = job.extent(&op).read.start() + op.progress.filled;
        let tensor = job.tensor_name(&op).map(|tensor| format!(" (tensor '{tensor}')")).unwrap_or_default();
        let reason = format!("the page cache does not hold byte {offset}{tensor}");
        let why = Unavailable::new(reason, "run 'windlass warm' first, or choose route auto");
        let path = Some(op.source.path().to_owned());
        job.fail(Error::RouteUnavailable { route: name, path, why });
        return false;
    }
    let is_taken = job.queue.hand_over(route, op);
    if !is_taken {
        job.fail(Error::Internal("no route takes what the page cache does not hold".into()));
    }
    is_taken
}

/// Keeps a lane full until its queue is empty for good or the load is over. Gives the reason if the route gives up, with
/// reads left for others.
fn drive(job: &Job, mut lane: Box<ReadLane>, mut window: Window, route: usize) -> Option<Unavailable> {
    let own = &job.routes[route];
    let mut done = Vec::new();
    let mut refused = None;
    loop {
        while refused.is_none() && lane.in_flight() < window.reads().min(lane.allowed()) {
            let idle = lane.in_flight() == 0;
            let next = if idle { job.queue.next(route) } else { job.queue.try_next(route) };
            let Some(mut op) = next else { break };
            if !take_slot(job, &mut op, own, idle) {
                if job.queue.is_stopped() {
                    return None;
                }
                job.queue.put_back(route, op);
                break;
            }
            if !aim(job, &mut op, own) {
                return None;
            }
            lane.push(op);
        }
        if lane.in_flight() == 0 {
            return refused;
        }
        if let Err(error) = lane.submit_and_wait(&mut done) {
            job.fail(Error::System { operation: "waiting for reads", source: error });
            return None;
        }
        if done.is_empty() && job.queue.is_stopped() {
            // The rest is not waited for any more, and it may never come.
            return None;
        }
        let now = Instant::now();
        for Done { op, result } in done.drain(..) {
            window.arrived(*result.as_ref().unwrap_or(&0) as u64, now);
            if let Some(why) = own.member.gives_up(&op, &result).filter(|_| job.queue.can_do_without(route)) {
                refused.get_or_insert(why);
                return_unread(job, op, route);
                continue;
            }
            if let Some(op) = settle(job, op, result, own) {
                lane.push(op);
            }
        }
    }
}

/// Puts a read back as if it had never been taken.
fn return_unread(job: &Job, mut op: ReadOp, route: usize) {
    job.take_back(&mut op, job.routes[route].member.route());
    if let Buffer::Staged { slot, .. } = &mut op.buffer {
        *slot = None;
    }
    job.queue.put_back(route, op);
}

/// Gives a staged read its slot. `false` if none is free and the caller cannot wait for one, or the load is over.
fn take_slot(job: &Job, op: &mut ReadOp, route: &LoadRoute, may_wait: bool) -> bool {
    let slots = route.slots().unwrap_or(&job.slots);
    match &mut op.buffer {
        Buffer::Staged { slot: slot @ None, .. } | Buffer::SharedStaging { slot: slot @ None, .. } => {
            *slot = if may_wait { slots.take() } else { slots.try_take() };
            match slot.as_ref().map(Slot::pin) {
                Some(Err(error)) => {
                    job.fail(error.into());
                    false
                }
                pinned => pinned.is_some(),
            }
        }
        _ => true,
    }
}

/// Points a read at the bytes of its extent that are missing. `false` if there is no memory for them: the load is over.
fn aim(job: &Job, op: &mut ReadOp, route: &LoadRoute) -> bool {
    let extent = job.extent(op);
    if let Err(error) = job.note_reached(op) {
        job.fail(error);
        return false;
    }
    if op.access == Access::Direct
        && !route.member.reads_any_bytes()
        && job.may_read_buffered()
        && let Some(why) = op.source.direct_refusal()
    {
        // Found out by an earlier read, perhaps of another load.
        let (what, path) = ("direct reads".into(), Some(op.source.path().to_owned()));
        job.note_refusal(Refusal { what, path, why: why.clone() });
        op.access = Access::Buffered;
    }
    op.aim(extent.read);
    true
}

/// What came of a read: `Some` if it must go on, `None` if it is finished or the load is over.
fn settle(job: &Job, mut op: ReadOp, result: io::Result<usize>, route: &LoadRoute) -> Option<ReadOp> {
    if job.queue.is_stopped() {
        return None;
    }
    let whole = job.extent(&op).read.len();
    let (name, any_bytes) = (route.member.route(), route.member.reads_any_bytes());
    let outcome =
        op.outcome(whole, result, any_bytes, |op, count, before| job.account(op, name, count, before));
    if outcome.is_short() {
        job.note_short_read();
        if let Err(error) = job.check_unchanged(&op) {
            job.fail(error);
            return None;
        }
    }
    match outcome {
        Outcome::Complete => {
            complete(job, op);
            return None;
        }
        Outcome::Short => {}
        Outcome::DirectEndsEarly { is_final } => {
            let reason = format!("{} ends direct reads early", op.source.filesystem());
            let why = Unavailable::new(reason, "");
            if job.direct != DirectIo::Always {
                let path = Some(op.source.path().to_owned());
                job.note_refusal(Refusal { what: "direct reads".into(), path, why });
                op.access = Access::Buffered;
            } else if is_final {
                job.fail(refused_direct(job, &op, why));
                return None;
            }
        }
        Outcome::Interrupted => job.note_interruption(),
        Outcome::DirectRefused(error) => {
            let reason = format!("{} refused a direct read: {error}", op.source.filesystem());
            let why = Unavailable::new(reason, "");
            if !job.may_read_buffered() {
                job.fail(refused_direct(job, &op, why));
                return None;
            }
            // `aim` reports it.
            op.source.refuse_direct(why);
        }
        Outcome::Failed(error) => {
            job.fail(read_error(job, &op, error, route));
            return None;
        }
    }
    aim(job, &mut op, route).then_some(op)
}

fn complete(job: &Job, op: ReadOp) -> bool {
    match job.complete(op) {
        Ok(()) => true,
        Err(error) => {
            job.fail(error);
            false
        }
    }
}

/// The error of a load that must read past the page cache and cannot.
fn refused_direct(job: &Job, op: &ReadOp, why: Unavailable) -> Error {
    let why = no_direct_reads(&why.reason);
    Error::RouteUnavailable { route: job.route, path: Some(op.source.path().to_owned()), why }
}

/// The error of a read that cannot be repeated.
fn read_error(job: &Job, op: &ReadOp, source: io::Error, route: &LoadRoute) -> Error {
    let extent = job.extent(op);
    // A file that was cut or swapped explains most read errors better than the error does. A daemon that hangs would not
    // say so, ever.
    if !route.member.is_lost(&source)
        && let Err(changed) = job.check_unchanged(op)
    {
        return changed;
    }
    let tensor = job.tensor_name(op);
    let range = crate::ByteRange::new(extent.read.start() + op.progress.filled, extent.read.end());
    Error::Io { operation: "read", path: op.source.path().to_owned(), tensor, range, source }
}

fn with_faults(job: &Job, lane: Box<ReadLane>) -> Box<ReadLane> {
    #[cfg(feature = "fault-injection")]
    if let Some(faults) = &job.faults {
        return faults.wrap(lane);
    }
    let _ = job;
    lane
}
