//! How many threads copy from the page cache for a device: more of them as long as it waits for bytes.
#![forbid(unsafe_code)]

use super::{engine::Engine, order::EngineOwner, serve::serve};
use hoistway_io::sync::{spawn_scoped, thread};
use std::time::{Duration, Instant};

/// Time over which the work of the device is measured: many copies, and little of a load.
const EPOCH: Duration = Duration::from_millis(5);
/// A device that is idle for less than this part of the time, one tenth, gets bytes as fast as its link takes them.
const IDLE_SHARE: u32 = 10;

/// Calls `work` with a function that is told how long the device has worked in all, and starts threads that copy from the page cache
/// while it waits for them.
pub(crate) fn with_copiers(
    engine: &Engine,
    order: &dyn EngineOwner,
    work: impl FnOnce(&mut dyn FnMut(Duration)),
) {
    let Some(route) = (0..engine.routes.len()).find(|&route| engine.copies_pages(route)) else {
        return work(&mut |_| ());
    };
    let (own, queues) = (&engine.routes[route], engine.queues_of(route));
    let mut copiers = Copiers::new(own.share.threads);
    thread::scope(|scope| {
        work(&mut |worked| {
            let waiting = || engine.scheduler.waiting(&queues);
            let most = || engine.most_copiers();
            for _ in 0..copiers.wanted(Instant::now(), worked, most, waiting) {
                // As many as the system gives.
                let _ = spawn_scoped(scope, own.member.facts().thread_name, || serve(engine, order, route));
            }
        });
    });
}

/// The threads that copy for one device.
#[derive(Debug)]
struct Copiers {
    running: usize,
    /// The beginning of an epoch, and how long the device had worked until then.
    epoch: Option<(Instant, Duration)>,
}

impl Copiers {
    /// So many are running.
    fn new(running: usize) -> Self {
        Self { running, epoch: None }
    }

    /// How many threads should start at `now`, where the device has worked for `worked` in all, no more than `most` may run, and `waiting`
    /// reads wait for a thread.
    fn wanted(
        &mut self,
        now: Instant,
        worked: Duration,
        most: impl FnOnce() -> usize,
        waiting: impl FnOnce() -> usize,
    ) -> usize {
        let Some((since, before)) = self.epoch else {
            self.epoch = Some((now, worked));
            return 0;
        };
        let time = now.saturating_duration_since(since);
        if time < EPOCH {
            return 0;
        }
        let most = most();
        if self.running >= most {
            return 0;
        }
        self.epoch = Some((now, worked));
        let worked = worked.saturating_sub(before);
        let idle = time.saturating_sub(worked);
        if idle <= time / IDLE_SHARE || waiting() < self.running {
            return 0;
        }
        // As many as would fill the idle time, but no more than run already: others may be about to send something.
        let share = idle.as_secs_f64() / worked.as_secs_f64().max(f64::MIN_POSITIVE);
        let more = (self.running as f64 * share).ceil() as usize;
        let more = more.min(self.running).min(most - self.running);
        self.running += more;
        more
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs epochs in which the device works for `busy` percent of the time per thread, up to all of it.
    fn run(copiers: &mut Copiers, busy: u32, waiting: usize) {
        let (mut now, mut worked) = (Instant::now(), Duration::ZERO);
        for _ in 0..100 {
            copiers.wanted(now, worked, || 16, || waiting);
            now += EPOCH;
            worked += EPOCH * (busy * copiers.running as u32).min(100) / 100;
        }
    }

    #[test]
    fn there_are_as_many_as_keep_the_device_busy() {
        for (busy, expected) in [(50, 2..=2), (25, 4..=4), (12, 8..=9), (5, 16..=16), (0, 16..=16)] {
            let mut copiers = Copiers::new(2);
            run(&mut copiers, busy, 1000);
            assert!(expected.contains(&copiers.running), "{busy} %: {}", copiers.running);
        }
    }

    #[test]
    fn there_are_no_more_than_reads_that_wait() {
        for (waiting, expected) in [(1, 2), (3, 4), (4, 8)] {
            let mut copiers = Copiers::new(2);
            run(&mut copiers, 5, waiting);
            assert_eq!(copiers.running, expected);
        }
    }
}
