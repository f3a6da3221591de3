//! How many requests a server gets at once, how long it is waited for, and how often what failed is tried again.

use crate::{
    Problem,
    http::{TICK, Waiting},
};
use std::{
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Requests in flight, at most.
const MOST: f64 = 256.0;
/// How many more requests a server that was too busy gets each second.
const REGAINED: f64 = 1.0;
/// Least time between two halvings.
const HALVED_EVERY: Duration = Duration::from_millis(500);
/// Failed attempts that are tried again, at first and at most, and what an answer and a second add.
const RETRIES: f64 = 100.0;
const RETRIES_PER_ANSWER: f64 = 0.2;
const RETRIES_PER_SECOND: f64 = 1.0;
/// How many times the mean time to the first byte an answer may take, and the bounds of that.
const PATIENCE_FACTOR: f64 = 8.0;
const LEAST_PATIENCE: Duration = Duration::from_secs(1);
const MOST_PATIENCE: Duration = Duration::from_secs(10);
/// How long an attempt after failed ones waits: twice as long after each.
const LAST_PATIENCE: Duration = Duration::from_secs(30);
/// Failed attempts in a row without a byte.
const MOST_ATTEMPTS: u32 = 10;
/// Time without a byte: no pause goes on after it, and no attempt begins.
const STALL: Duration = Duration::from_secs(60);
/// Pauses between attempts: a random part of a span that doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// What is known of a server.
#[derive(Debug)]
pub(crate) struct Pace {
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Debug)]
struct State {
    in_flight: u32,
    /// Requests in flight, as of `since`.
    limit: f64,
    since: Instant,
    /// Failed attempts that may be tried again, as of `counted`.
    retries: f64,
    counted: Instant,
    /// Mean time to the first byte, in seconds.
    first_byte: Option<f64>,
}

/// Why an attempt brought less than all.
#[derive(Debug)]
pub(crate) enum Fault {
    /// Another attempt would not help.
    Final(Problem),
    /// Another attempt may help.
    Again {
        why: String,
        /// Whether some bytes came.
        progressed: bool,
        /// Whether the server is too busy, and how long it wants to be left alone.
        busy: Option<Option<Duration>>,
    },
}

impl From<Problem> for Fault {
    fn from(problem: Problem) -> Self {
        Self::Final(problem)
    }
}

/// Leave to send one request.
#[derive(Debug)]
pub(crate) struct Permit<'a>(&'a Pace);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.lock().in_flight -= 1;
        self.0.freed.notify_one();
    }
}

impl Pace {
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        let state =
            State { in_flight: 0, limit: MOST, since: now, retries: RETRIES, counted: now, first_byte: None };
        Self { state: Mutex::new(state), freed: Condvar::new() }
    }

    /// Tries until an attempt succeeds, or trying again is of no use.
    pub(crate) fn persist<T>(
        &self,
        stop: &AtomicBool,
        mut attempt: impl FnMut(&Waiting<'_>) -> Result<T, Fault>,
    ) -> Result<T, Problem> {
        let (mut attempts, mut since) = (0, Instant::now());
        loop {
            let permit = self.enter(stop)?;
            let patience = self.patience().saturating_mul(1 << attempts).min(LAST_PATIENCE);
            let result = attempt(&Waiting { stop, patience });
            drop(permit);
            let (why, progressed, busy) = match result {
                Ok(done) => {
                    self.lock().add_retries(RETRIES_PER_ANSWER);
                    return Ok(done);
                }
                Err(Fault::Final(problem)) => return Err(problem),
                Err(Fault::Again { why, progressed, busy }) => (why, progressed, busy),
            };
            if progressed {
                (attempts, since) = (0, Instant::now());
            }
            attempts += 1;
            let may_retry = self.note_failure(busy.is_some());
            if attempts >= MOST_ATTEMPTS || since.elapsed() >= STALL {
                return Err(Problem::Unreliable { attempts, last: why });
            }
            if !may_retry {
                let last = format!("{why}; of late so many requests failed that this one is not repeated");
                return Err(Problem::Unreliable { attempts, last });
            }
            let span = FIRST_PAUSE.saturating_mul(1 << attempts.min(10)).min(LONGEST_PAUSE);
            let pause = span.mul_f64(fastrand::f64()).max(busy.flatten().unwrap_or_default());
            if pause >= STALL.saturating_sub(since.elapsed()) {
                let last = format!("{why}; the next attempt would begin after too long without a byte");
                return Err(Problem::Unreliable { attempts, last });
            }
            sleep(pause, stop)?;
        }
    }

    /// How long the server may take for its next byte.
    fn patience(&self) -> Duration {
        let mean = self.lock().first_byte;
        mean.map_or(MOST_PATIENCE, |mean| {
            Duration::from_secs_f64(mean * PATIENCE_FACTOR).clamp(LEAST_PATIENCE, MOST_PATIENCE)
        })
    }

    /// Notes how long the server took for its first byte.
    pub(crate) fn note_first_byte(&self, took: Duration) {
        let mut state = self.lock();
        let took = took.as_secs_f64();
        state.first_byte = Some(state.first_byte.map_or(took, |mean| mean * 0.9 + took * 0.1));
    }

    /// Waits until there may be one more request.
    fn enter(&self, stop: &AtomicBool) -> Result<Permit<'_>, Problem> {
        let mut state = self.lock();
        while f64::from(state.in_flight) >= state.limit_at(Instant::now()) {
            if stop.load(Ordering::Relaxed) {
                return Err(Problem::Stopped);
            }
            state = self.freed.wait_timeout(state, TICK).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.in_flight += 1;
        Ok(Permit(self))
    }

    /// Notes that an attempt failed. Returns whether one more may be made.
    fn note_failure(&self, is_busy: bool) -> bool {
        let (mut state, now) = (self.lock(), Instant::now());
        if is_busy && (state.limit >= MOST || now.duration_since(state.since) >= HALVED_EVERY) {
            // This one request has ended already.
            let in_flight = f64::from(state.in_flight + 1);
            state.limit = (state.limit_at(now).min(in_flight) / 2.0).max(1.0);
            state.since = now;
        }
        let since = now.saturating_duration_since(state.counted);
        state.counted = now;
        state.add_retries(since.as_secs_f64() * RETRIES_PER_SECOND);
        let may_retry = state.retries >= 1.0;
        if may_retry {
            state.retries -= 1.0;
        }
        may_retry
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn add_retries(&mut self, retries: f64) {
        self.retries = (self.retries + retries).min(RETRIES);
    }

    fn limit_at(&self, now: Instant) -> f64 {
        (self.limit + now.duration_since(self.since).as_secs_f64() * REGAINED).min(MOST)
    }
}

fn sleep(pause: Duration, stop: &AtomicBool) -> Result<(), Problem> {
    let until = Instant::now() + pause;
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err(Problem::Stopped);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(TICK));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_server_gets_fewer_requests_and_then_more_again() {
        let pace = Pace::new();
        let stop = AtomicBool::new(false);
        // So many that the limit is below them for 49 seconds.
        let permits: Vec<_> = (0..99).map(|_| pace.enter(&stop).unwrap()).collect();
        pace.note_failure(true);
        let (limit, since) = {
            let state = pace.lock();
            (state.limit, state.since)
        };
        assert!((limit - 50.0).abs() < 0.1, "{limit}");
        let later = since + Duration::from_secs(3);
        assert!((pace.lock().limit_at(later) - 53.0).abs() < 0.1);
        stop.store(true, Ordering::Relaxed);
        assert!(matches!(pace.enter(&stop), Err(Problem::Stopped)));
        drop(permits);
        assert!(pace.enter(&stop).is_ok());
    }

    #[test]
    fn a_server_that_wants_to_be_left_alone_for_long_is_not_waited_for() {
        let (pace, begun, mut attempts) = (Pace::new(), Instant::now(), 0);
        let failed: Result<(), _> = pace.persist(&AtomicBool::new(false), |_| {
            attempts += 1;
            let busy = Some(Some(Duration::from_secs(3600)));
            Err(Fault::Again { why: "the server said status 503".into(), progressed: true, busy })
        });
        assert!(matches!(failed, Err(Problem::Unreliable { attempts: 1, .. })), "{failed:?}");
        assert!(attempts == 1 && begun.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn retries_have_a_budget() {
        let (begun, pace) = (Instant::now(), Pace::new());
        let retries = (0..).take_while(|_| pace.note_failure(false)).count();
        // Each second adds one.
        let added = begun.elapsed().as_secs() as usize;
        assert!((100..=100 + added).contains(&retries), "{retries} in {added} s");
    }
}
