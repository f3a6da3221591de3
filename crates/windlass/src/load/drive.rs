//! Drives lanes: takes reads from the queue, and decides what each completion means. The same for every backend.
#![forbid(unsafe_code)]

use super::{DirectIo, job::Job, queue::Line, window::Window};
use crate::{
    Alignment, Error,
    memory::Slot,
    parallel::thread_named,
    report::Refusal,
    route::{
        Access, AnyLane, BlockingLane, Buffer, Done, Lane, Outcome, ReadOp, Route, Unavailable, UringLane,
        is_daemon_lost,
    },
};
use std::{io, thread, time::Instant};
use windlass_io::file::{Residency, is_transient};

/// Serves the ring line with one ring, or with one cuFile read after the other if the load has a direct path. Where that
/// is refused, route `auto` goes on with `pool_threads` threads instead.
pub(super) fn serve_ring(job: &Job, window: Window, pool_threads: usize) {
    // Nothing cold, no ring.
    let Some(first) = job.queue.next(Line::Ring) else {
        return;
    };
    job.queue.put_back(Line::Ring, first);
    let (route, window, lane) = match &job.direct_path {
        Some(path) => (path.route, Window::fixed(1), Ok(AnyLane::Gds(path.lane()))),
        None => {
            let lane = UringLane::new(window.max()).map(|lane| AnyLane::Uring(Box::new(lane)));
            (Route::IoUring, window, lane)
        }
    };
    let refused = match lane {
        Ok(lane) => drive(job, with_faults(job, lane), window, route, Line::Ring),
        Err(why) => Some(why),
    };
    match refused {
        None => {}
        Some(why) if job.route == route => {
            job.fail(Error::RouteUnavailable { route, path: None, why });
        }
        Some(why) => {
            job.note_refusal(Refusal { what: route.to_string(), path: None, why });
            if !job.queue.give_ring_to_pool() {
                return;
            }
            thread::scope(|scope| {
                for _ in 1..pool_threads {
                    // As many as the system gives; this one works in any case.
                    let _ = thread_named("windlass-read").spawn_scoped(scope, || serve_pool(job));
                }
                serve_pool(job);
            });
        }
    }
}

/// Serves the pool line with one thread's blocking reads.
pub(super) fn serve_pool(job: &Job) {
    let lane = with_faults(job, AnyLane::Pread(BlockingLane::default()));
    // Threads that read give up nothing.
    let _ = drive(job, lane, Window::fixed(1), Route::Threads, Line::Pool);
}

/// Serves the line of USRBIO with one ring.
pub(super) fn serve_usrbio(job: &Job) {
    let Some(path) = &job.usrbio else { return };
    let Some(lane) = path.take_lane() else { return };
    let lane = with_faults(job, AnyLane::Usrbio(Box::new(lane)));
    // What goes wrong here ends the load: nobody else was asked to be ready for its reads.
    let _ = drive(job, lane, Window::fixed(path.depth), Route::Usrbio, Line::Usrbio);
}

/// Copies what the page cache holds, hands the rest to the ring line, and then touches memory ahead of the reads,
/// leaving out the first `ahead` extents.
pub(super) fn serve_cached(job: &Job, ahead: usize) {
    let mut lane = with_faults(job, AnyLane::Cached(BlockingLane::default()));
    let mut done = Vec::new();
    while let Some(mut op) = job.queue.next_planned(Line::Unprobed) {
        let extent = job.extent(&op);
        if op.source.residency(extent.read) == Residency::Cold {
            if !hand_over_cold(job, op) {
                return;
            }
            continue;
        }
        if !take_slot(job, &mut op, Route::Cached, true) {
            return;
        }
        let cold_access = std::mem::replace(&mut op.access, Access::Buffered);
        if !aim(job, &mut op, Route::Cached) {
            return;
        }
        lane.push(op);
        if let Err(error) = lane.submit_and_wait(&mut done) {
            job.fail(Error::Internal(format!("a cached read: {error}")));
            return;
        }
        for Done { op, result } in done.drain(..) {
            if !settle_cached(job, op, result, cold_access) {
                return;
            }
        }
    }
    while job.touch_ahead(ahead) {}
}

/// What came of a copy from the cache. `false` if the load is over.
fn settle_cached(job: &Job, mut op: ReadOp, result: io::Result<usize>, cold_access: Access) -> bool {
    let whole = job.extent(&op).read.len();
    let count = match result {
        Ok(count) => count,
        Err(error) if job.route == Route::Cached && !is_transient(&error) => {
            job.fail(read_error(job, &op, error));
            return false;
        }
        // Whoever reads it from the device will see what is wrong, if anything is.
        Err(_) => 0,
    };
    if count as u64 == whole {
        job.account(&mut op, Route::Cached, count, whole);
        return complete(job, op);
    }
    // The cache ends here: the rest is cold. Staged extents start over rather than hold a slot while they wait.
    match &mut op.buffer {
        Buffer::Staged { slot, .. } | Buffer::Landing { slot, .. } => *slot = None,
        // Direct reads go on at a whole block.
        Buffer::InPlace(_) if count > 0 => {
            job.account(&mut op, Route::Cached, count, Alignment::BLOCK.down(count as u64));
        }
        Buffer::InPlace(_) => {}
    }
    op.access = cold_access;
    hand_over_cold(job, op)
}

/// Sends a read that the cache cannot serve to those who can. `false` if nobody may.
fn hand_over_cold(job: &Job, op: ReadOp) -> bool {
    if job.route == Route::Cached {
        if let Err(error) = job.check_unchanged(&op) {
            job.fail(error);
            return false;
        }
        let offset = job.extent(&op).read.start() + op.filled;
        let tensor = job.tensor_name(&op).map(|tensor| format!(" (tensor '{tensor}')")).unwrap_or_default();
        let reason = format!("the page cache does not hold byte {offset}{tensor}");
        let why = Unavailable::new(reason, "run 'windlass warm' first, or choose route auto");
        job.fail(Error::RouteUnavailable {
            route: Route::Cached,
            path: Some(op.source.path().to_owned()),
            why,
        });
        return false;
    }
    job.queue.hand_over(job.cold_line(&op), op);
    true
}

/// Keeps a lane full until its line is empty for good or the load is over. Gives the reason if the lane gave up, with
/// reads left for others.
fn drive(job: &Job, mut lane: AnyLane, mut window: Window, route: Route, line: Line) -> Option<Unavailable> {
    let mut done = Vec::new();
    let mut refused = None;
    loop {
        while refused.is_none() && lane.in_flight() < window.reads().min(lane.allowed()) {
            let idle = lane.in_flight() == 0;
            let next = if idle { job.queue.next(line) } else { job.queue.try_next(line) };
            let Some(mut op) = next else { break };
            if route.is_cufile() && job.queue.is_without_ring() {
                // Another thread has given cuFile up, and this read is the pool's.
                job.queue.put_back(Line::Pool, op);
                return None;
            }
            if !take_slot(job, &mut op, route, idle) {
                if job.queue.is_stopped() {
                    return None;
                }
                job.queue.put_back(line, op);
                break;
            }
            if !aim(job, &mut op, route) {
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
            // Nobody waits for the rest any more, and it may never come.
            return None;
        }
        let now = Instant::now();
        for Done { op, result } in done.drain(..) {
            window.arrived(*result.as_ref().unwrap_or(&0) as u64, now);
            if let Some(why) = gives_up(job, &op, &result, route) {
                refused.get_or_insert(why);
                return_unread(job, op, route, line);
                continue;
            }
            if let Some(op) = settle(job, op, result, route) {
                lane.push(op);
            }
        }
    }
}

/// Why cuFile is not to be used any more under route `auto`: it failed a read where others may not.
fn gives_up(job: &Job, op: &ReadOp, result: &io::Result<usize>, route: Route) -> Option<Unavailable> {
    match result {
        Err(error)
            if route == Route::Gds
                && job.route == Route::Auto
                && (!is_transient(error) || op.is_out_of_patience()) =>
        {
            Some(Unavailable::new(error.to_string(), "see 'windlass doctor'"))
        }
        _ => None,
    }
}

/// Puts a read back as if it had never been taken.
fn return_unread(job: &Job, mut op: ReadOp, route: Route, line: Line) {
    job.take_back(&mut op, route);
    if let Buffer::Staged { slot, .. } = &mut op.buffer {
        *slot = None;
    }
    job.queue.put_back(line, op);
}

/// Gives a staged read its slot. `false` if none is free and the caller cannot wait for one, or the load is over.
fn take_slot(job: &Job, op: &mut ReadOp, route: Route, may_wait: bool) -> bool {
    let slots = match (&job.direct_path, &job.usrbio) {
        (Some(path), _) if route.is_cufile() => &path.slots,
        (_, Some(path)) if route == Route::Usrbio => &path.slots,
        _ => &job.slots,
    };
    match &mut op.buffer {
        Buffer::Staged { slot: slot @ None, .. } | Buffer::Landing { slot: slot @ None, .. } => {
            *slot = if may_wait { slots.take() } else { slots.try_take() };
            match slot.as_ref().map(Slot::pin) {
                Some(Err(error)) => {
                    job.fail(error);
                    false
                }
                pinned => pinned.is_some(),
            }
        }
        _ => true,
    }
}

/// Points a read at the bytes of its extent that are missing. `false` if there is no memory for them: the load is over.
fn aim(job: &Job, op: &mut ReadOp, route: Route) -> bool {
    let extent = job.extent(op);
    if let Err(error) = job.note_reached(op) {
        job.fail(error);
        return false;
    }
    if op.access == Access::Direct
        && route != Route::Usrbio
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
fn settle(job: &Job, mut op: ReadOp, result: io::Result<usize>, route: Route) -> Option<ReadOp> {
    if job.queue.is_stopped() {
        return None;
    }
    let whole = job.extent(&op).read.len();
    let outcome = op.outcome(whole, result, route, |op, count, filled| job.account(op, route, count, filled));
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
            job.fail(read_error(job, &op, error));
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
    let fix = "choose route auto or threads, or set direct to never";
    let why = Unavailable::new(why.reason, fix);
    Error::RouteUnavailable { route: job.route, path: Some(op.source.path().to_owned()), why }
}

/// The error of a read that cannot be repeated.
fn read_error(job: &Job, op: &ReadOp, source: io::Error) -> Error {
    let extent = job.extent(op);
    // A file that was cut or swapped explains most read errors better than the error does. A daemon that hangs would not
    // say so, ever.
    if !is_daemon_lost(&source)
        && let Err(changed) = job.check_unchanged(op)
    {
        return changed;
    }
    let tensor = job.tensor_name(op);
    let range = crate::ByteRange::new(extent.read.start() + op.filled, extent.read.end());
    Error::Io { operation: "read", path: op.source.path().to_owned(), tensor, range, source }
}

fn with_faults(job: &Job, lane: AnyLane) -> AnyLane {
    #[cfg(feature = "fault-injection")]
    if let Some(faults) = &job.faults {
        return faults.wrap(lane);
    }
    let _ = job;
    lane
}
