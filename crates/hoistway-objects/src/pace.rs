//! How many requests a server gets at once, and how often what failed is tried again: carries out what the policy says.

use crate::{
    Problem,
    http::{End, TICK, Waiting},
    policy::{Action, Failure, InFlightLimit, Limit, Limits, MeanSpeed, PROGRESS_BYTES, Retry, STALL},
};
use std::{
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// What is known of a server.
#[derive(Debug)]
pub(crate) struct Pace {
    state: Mutex<State>,
    freed: Condvar,
    mean_speed: MeanSpeed,
}

#[derive(Debug)]
struct State {
    in_flight: InFlightLimit,
    /// Mean time to the first byte.
    first_byte: Option<Duration>,
    /// Whether a request has succeeded.
    has_answered: bool,
    /// Those of the reads that begin.
    limits: Limits,
}

/// Why an attempt brought less than all.
#[derive(Debug)]
pub(crate) enum Fault {
    /// Another attempt would not help.
    Final(Problem),
    /// Another attempt may help.
    Again(Again),
}

/// An attempt that may be made again.
#[derive(Debug)]
pub(crate) struct Again {
    pub(crate) failure: Failure,
    /// Empty if all came that was asked for.
    pub(crate) why: String,
    /// Whether its connection had carried another answer.
    pub(crate) was_reused: bool,
    /// Bytes that came all the same, and those that came and were discarded: they could not be compared.
    pub(crate) bytes: usize,
    pub(crate) discarded: usize,
}

impl Again {
    /// One that brought nothing.
    pub(crate) fn of(failure: Failure, why: String) -> Self {
        Self { failure, why, was_reused: false, bytes: 0, discarded: 0 }
    }
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
        self.0.lock().in_flight.end();
        self.0.freed.notify_one();
    }
}

impl Pace {
    pub(crate) fn new() -> Self {
        let in_flight = InFlightLimit::new(Instant::now());
        let state = State { in_flight, first_byte: None, has_answered: false, limits: Limits::default() };
        Self { state: Mutex::new(state), freed: Condvar::new(), mean_speed: MeanSpeed::default() }
    }

    /// Whether the server has answered.
    pub(crate) fn is_known(&self) -> bool {
        let state = self.lock();
        state.has_answered || state.first_byte.is_some()
    }

    /// Tries until an attempt succeeds, or trying again is of no use.
    pub(crate) fn persist<T>(
        &self,
        stop: &AtomicBool,
        mut attempt: impl FnMut(&Waiting<'_>) -> Result<T, Fault>,
    ) -> Result<T, Problem> {
        self.persist_sending(stop, None, |waiting| (attempt(waiting), Duration::ZERO))
    }

    /// Does the same, until a time at the latest, for attempts that say how long they sent: that does not count as time without
    /// progress. The caller limits their number.
    pub(crate) fn persist_sending<T>(
        &self,
        stop: &AtomicBool,
        until: Option<Instant>,
        mut attempt: impl FnMut(&Waiting<'_>) -> (Result<T, Fault>, Duration),
    ) -> Result<T, Problem> {
        let (is_known, limits) = (self.is_known(), self.lock().limits);
        let mut retry = Retry::new(Instant::now(), is_known, limits);
        let mut was_told = false;
        let mut last = String::new();
        loop {
            let asked = Instant::now();
            let permit = self.enter(stop, until, &last)?;
            let now = Instant::now();
            retry.waited(now - asked);
            let terms = retry.terms(now, self.lock().first_byte);
            let waiting = Waiting {
                stop,
                patience: until.map_or(terms.patience, |until| terms.patience.min(left(until))),
                is_new: terms.is_new,
                mean_speed: &self.mean_speed,
                end: End { at: until, after: None },
            };
            let (result, sent_for) = attempt(&waiting);
            drop(permit);
            retry.waited(sent_for);
            let now = Instant::now();
            let Again { failure, why, was_reused, bytes, discarded } = match result {
                Ok(done) => {
                    let mut state = self.lock();
                    state.has_answered = true;
                    state.in_flight.succeeded(now);
                    return Ok(done);
                }
                Err(Fault::Final(Problem::Stopped)) if !stop.load(Ordering::Relaxed) && is_past(until) => {
                    let last = if last.is_empty() { "no answer came".to_owned() } else { last };
                    return Err(late(retry.attempts() + 1, &last));
                }
                Err(Fault::Final(problem)) => return Err(problem),
                Err(Fault::Again(again)) => again,
            };
            retry.discarded(discarded as u64);
            let action = retry.failed(failure, was_reused, bytes as u64, now, fastrand::f64());
            if !was_reused {
                self.lock().in_flight.failed(failure, bytes as u64, now);
            }
            if !why.is_empty() {
                last = why;
            }
            let pause = if let Action::AskAfter(pause) = action { pause } else { Duration::ZERO };
            if until.is_some_and(|until| now + pause >= until) {
                return Err(late(retry.attempts(), &last));
            }
            match action {
                Action::Ask => {}
                Action::AskAfter(pause) => {
                    // The address of a server that never answered may be wrong, so the user is told early.
                    if !is_known && !was_told {
                        tracing::warn!("{last}; trying again");
                        was_told = true;
                    }
                    sleep(pause, stop)?;
                }
                Action::GiveUp(limit) => {
                    let attempts = retry.attempts();
                    return Err(Problem::Unreliable { attempts, last: format!("{last}; {}", told(limit)) });
                }
            }
        }
    }

    /// Has reads that begin later end sooner.
    #[cfg(test)]
    pub(crate) fn limit(&self, limits: Limits) {
        self.lock().limits = limits;
    }

    /// How long a request that ends a load is waited for before it is asked a second time.
    pub(crate) fn hedge_after(&self) -> Option<Duration> {
        InFlightLimit::hedge_after(self.lock().first_byte)
    }

    /// Leave to ask a second time, if the request is among the last of a load.
    pub(crate) fn hedge(&self) -> Option<Permit<'_>> {
        self.lock().in_flight.begin_hedge(Instant::now()).then(|| Permit(self))
    }

    /// How long the server takes for its first byte, of late.
    pub(crate) fn first_byte(&self) -> Option<Duration> {
        self.lock().first_byte
    }

    /// Notes how long the server took for its first byte.
    pub(crate) fn note_first_byte(&self, took: Duration) {
        let mut state = self.lock();
        state.first_byte = Some(state.first_byte.map_or(took, |mean| mean.mul_f64(0.9) + took.mul_f64(0.1)));
    }

    /// Waits until there may be one more request. `last` says why the last one failed.
    fn enter(&self, stop: &AtomicBool, until: Option<Instant>, last: &str) -> Result<Permit<'_>, Problem> {
        let begun = Instant::now();
        let mut state = self.lock();
        while !state.in_flight.begin(Instant::now()) {
            if stop.load(Ordering::Relaxed) {
                return Err(Problem::Stopped);
            }
            if is_past(until) {
                return Err(late(
                    0,
                    if last.is_empty() { "other requests to the server failed" } else { last },
                ));
            }
            if begun.elapsed() >= STALL && state.in_flight.is_away(Instant::now()) {
                let last = if last.is_empty() { "other requests to the server failed" } else { last };
                let told = told(Limit::Time(STALL));
                return Err(Problem::Unreliable { attempts: 0, last: format!("{last}; {told}") });
            }
            state = self.freed.wait_timeout(state, TICK).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(Permit(self))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

fn is_past(until: Option<Instant>) -> bool {
    until.is_some_and(|until| left(until).is_zero())
}

/// What is said once there is no time for another attempt.
fn late(attempts: u32, last: &str) -> Problem {
    Problem::Unreliable { attempts, last: format!("{last}; there was no time for more attempts") }
}

/// What a read ran into, as an error says it.
fn told(limit: Limit) -> String {
    match limit {
        Limit::Time(time) => {
            format!("less than {} KiB came in {} s", PROGRESS_BYTES >> 10, time.as_secs())
        }
        Limit::Comparison(time) => format!(
            "less than {} KiB could be compared in {} s, as answers ended early (with the store option checksums=off, a read \
             goes on after the last byte that came)",
            PROGRESS_BYTES >> 10,
            time.as_secs()
        ),
        Limit::Refusals(count) => format!("the server answered so {count} times in a row"),
        Limit::LeftAlone(time) => {
            format!("it wants to be asked again after {} s, which is too long", time.as_secs())
        }
    }
}

pub(crate) fn sleep(pause: Duration, stop: &AtomicBool) -> Result<(), Problem> {
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

    /// The error of a read whose attempts end so.
    fn error(limits: Limits, mut ends: Vec<Again>) -> String {
        let pace = Pace::new();
        pace.limit(limits);
        ends.reverse();
        let attempt = |_: &Waiting<'_>| Err::<(), _>(Fault::Again(ends.pop().unwrap()));
        pace.persist(&AtomicBool::new(false), attempt).unwrap_err().to_string()
    }

    #[test]
    fn what_came_is_told_from_what_could_be_compared() {
        let none = Limits { stall: Duration::ZERO, unreached: Duration::ZERO, ..Limits::default() };
        let again = |discarded| Again { discarded, ..Again::of(Failure::BrokenOff, "it was cut".into()) };
        let few = error(none, vec![again(1000)]);
        assert!(few.contains("it was cut; less than 256 KiB came in"), "{few}");
        let many = error(none, vec![again(1 << 20)]);
        assert!(many.contains("it was cut; less than 256 KiB could be compared in"), "{many}");
        assert!(many.contains("checksums=off"), "{many}");
    }

    #[test]
    fn a_part_that_came_whole_is_no_reason() {
        let part = Again { bytes: 1, ..Again::of(Failure::Part, String::new()) };
        let long = Failure::Busy(Some(Duration::from_secs(3600)));
        let cut = Again::of(Failure::Broken, "it was cut".into());
        let told = error(Limits::default(), vec![cut, part, Again::of(long, String::new())]);
        assert!(told.contains("it was cut; it wants to be asked again after 3600 s"), "{told}");
    }
}
