//! When a failed request is repeated, on which connection, after how long, and when it is given up. Two state machines
//! without clocks, sockets and locks: [`Retry`] of one read, and [`InFlightLimit`] of one server. Time and chance are
//! arguments, so that tests simulate any server.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// A read fails when fewer than [`PROGRESS_BYTES`] have come in this time and it is not complete. Bytes that were discarded, as
/// they could not be compared, do not count.
pub(crate) const STALL: Duration = Duration::from_secs(60);
/// The same for a server that never answered this process: its address may be wrong.
const UNREACHED: Duration = Duration::from_secs(10);
/// Bytes that are progress.
pub(crate) const PROGRESS_BYTES: u64 = 256 << 10;
/// Answers in a row with an error that may pass.
const MOST_REFUSALS: u32 = 10;
/// Pauses between attempts: a random part of a span that doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// How many times the mean time to the first byte a byte may take, and the bounds of that.
const PATIENCE_FACTOR: f64 = 8.0;
const LEAST_PATIENCE: Duration = Duration::from_secs(1);
const MOST_PATIENCE: Duration = Duration::from_secs(10);
/// How long an attempt after silent ones waits: twice as long after each.
const LAST_PATIENCE: Duration = Duration::from_secs(30);
/// How many times the mean time to the first byte the last requests of a load wait before they are asked a second time.
const HEDGE_FACTOR: f64 = 4.0;
const LEAST_HEDGE: Duration = Duration::from_millis(100);

/// What bounds the attempts of a read. Those of reads are the defaults; tests have shorter ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Time without progress.
    pub(crate) stall: Duration,
    /// The same for a server that never answered.
    pub(crate) unreached: Duration,
    pub(crate) longest_pause: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { stall: STALL, unreached: UNREACHED, longest_pause: LONGEST_PAUSE }
    }
}

/// Why an attempt brought less than all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// No connection could be made.
    Unreached,
    /// The connection ended, or what came on it was no answer.
    Broken,
    /// What came was no answer, and the server has given none to this process: it may be another one than was meant.
    NoHttp,
    /// No byte came in time.
    Silent,
    /// The body came much more slowly than those of other requests.
    Slow,
    /// The body ended early, and what came of it was discarded: it could only be compared whole. A body that fell silent or was
    /// slow is [`Failure::Silent`] or [`Failure::Slow`] then too, without bytes.
    BrokenOff,
    /// The server is too busy, and may say how long it wants to be left alone.
    Busy(Option<Duration>),
    /// The same in the words of a proxy, which may have passed the request on before.
    Unavailable(Option<Duration>),
    /// The server answered with another error that may pass.
    Refused,
    /// A part of the range came whole: one that was asked for, or a shorter one, as servers may send it.
    Part,
}

/// What follows a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Ask,
    AskAfter(Duration),
    GiveUp(Limit),
}

/// What a read that is given up ran into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// Too few bytes came in this time.
    Time(Duration),
    /// Enough bytes came in this time, and too few of them could be compared.
    Comparison(Duration),
    /// The server answered with errors so many times in a row.
    Refusals(u32),
    /// The server wants to be left alone for longer than a read waits.
    LeftAlone(Duration),
}

/// How an attempt is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    /// Whether it needs a new connection: one that was kept may be dead, as the last one was.
    pub(crate) is_new: bool,
    /// Time without a byte. It ends when the read does.
    pub(crate) patience: Duration,
}

/// The attempts of one read.
#[derive(Clone, Debug)]
pub(crate) struct Retry {
    /// When the last [`PROGRESS_BYTES`] were complete, and the bytes since.
    since: Instant,
    bytes: u64,
    /// Bytes since that came and could not be compared.
    discarded: u64,
    /// Attempts that failed since.
    attempts: u32,
    /// Attempts in a row that brought nothing; of these, errors that the server answered with, and silent ones.
    failures: u32,
    refusals: u32,
    silent: u32,
    /// Whether the last attempt failed.
    is_after_failure: bool,
    /// Whether the server answered this process before.
    is_known: bool,
    limits: Limits,
}

impl Retry {
    pub(crate) fn new(now: Instant, is_known: bool, limits: Limits) -> Self {
        Self {
            since: now,
            bytes: 0,
            discarded: 0,
            attempts: 0,
            failures: 0,
            refusals: 0,
            silent: 0,
            is_after_failure: false,
            is_known,
            limits,
        }
    }

    /// Time that passed while the read waited for its turn does not count.
    pub(crate) fn waited(&mut self, time: Duration) {
        self.since += time;
    }

    /// Notes bytes of the attempt that ends which came and could not be compared.
    pub(crate) fn discarded(&mut self, bytes: u64) {
        self.discarded += bytes;
    }

    /// How many attempts failed since there was progress.
    pub(crate) fn attempts(&self) -> u32 {
        self.attempts
    }

    /// How an attempt that begins now is made. `first_byte` is the mean time to the first byte of an answer.
    pub(crate) fn terms(&self, now: Instant, first_byte: Option<Duration>) -> Terms {
        let usual = first_byte
            .map_or(MOST_PATIENCE, |mean| mean.mul_f64(PATIENCE_FACTOR).clamp(LEAST_PATIENCE, MOST_PATIENCE));
        let patience = usual.saturating_mul(1 << self.silent.min(5)).min(LAST_PATIENCE);
        Terms { is_new: self.is_after_failure, patience: patience.min(self.left(now)) }
    }

    /// Time that is left without progress.
    fn left(&self, now: Instant) -> Duration {
        self.limits.stall.saturating_sub(now.saturating_duration_since(self.since))
    }

    /// What follows an attempt that ended at `now` with a failure and brought so many bytes. `was_reused` says whether its
    /// connection had carried another answer; `luck` is a random number from 0 to 1.
    pub(crate) fn failed(
        &mut self,
        failure: Failure,
        was_reused: bool,
        bytes: u64,
        now: Instant,
        luck: f64,
    ) -> Action {
        self.bytes += bytes;
        if self.bytes >= PROGRESS_BYTES {
            (self.since, self.bytes, self.discarded, self.attempts) = (now, 0, 0, 0);
        }
        self.attempts += u32::from(failure != Failure::Part);
        if bytes > 0 {
            (self.failures, self.refusals) = (0, 0);
            // The next body may pause for as long as one that came whole.
            self.silent = if failure == Failure::Part { self.silent.saturating_sub(1) } else { 0 };
        }
        self.is_known |= !matches!(failure, Failure::Unreached | Failure::NoHttp);
        self.is_after_failure = failure != Failure::Part;
        let most = if self.is_known { self.limits.stall } else { self.limits.unreached };
        let left = most.saturating_sub(now.saturating_duration_since(self.since));
        if left.is_zero() {
            let came = self.bytes + self.discarded;
            let limit = if came < PROGRESS_BYTES { Limit::Time(most) } else { Limit::Comparison(most) };
            return Action::GiveUp(limit);
        }
        // What was kept may have died meanwhile, which tells nothing of the server.
        let was_dead = was_reused && bytes == 0 && matches!(failure, Failure::Broken | Failure::Silent);
        if was_dead || matches!(failure, Failure::Part | Failure::Slow) {
            return Action::Ask;
        }
        self.failures += 1;
        self.refusals += u32::from(failure == Failure::Refused);
        self.silent += u32::from(failure == Failure::Silent);
        if self.refusals >= MOST_REFUSALS {
            return Action::GiveUp(Limit::Refusals(self.refusals));
        }
        let asked = match failure {
            Failure::Busy(asked) | Failure::Unavailable(asked) => asked.unwrap_or_default(),
            _ => Duration::ZERO,
        };
        if asked >= left {
            return Action::GiveUp(Limit::LeftAlone(asked));
        }
        let span = FIRST_PAUSE.saturating_mul(1 << self.failures.min(10)).min(self.limits.longest_pause);
        // The last attempt begins before the end, with time for an answer.
        Action::AskAfter(span.mul_f64(luck).max(asked).min(left / 2).max(asked))
    }
}

/// Requests in flight, at most.
const MOST: f64 = 256.0;
/// How many more requests a server that was too busy gets each second.
const REGAINED: f64 = 1.0;
/// Least time between two halvings.
const HALVED_EVERY: Duration = Duration::from_millis(500);
/// Requests that are asked a second time: at most so many, and one more for so many answers.
const HEDGES: f64 = 4.0;
const ANSWERS_PER_HEDGE: f64 = 20.0;
/// A load is at its end where not more than this part of its requests is still in flight.
const LAST_PART: u32 = 4;
/// How long the most requests in flight are remembered.
const PEAK_FOR: Duration = Duration::from_secs(2);

/// The requests that a server gets at once. Too busy a server gets half, and one more a second. A server that cannot be
/// reached gets half, and what it had as soon as it answers.
#[derive(Clone, Debug)]
pub(crate) struct InFlightLimit {
    in_flight: u32,
    /// As of `since`.
    limit: f64,
    since: Instant,
    /// When it was halved.
    halved: Option<Instant>,
    /// Up to here each answer adds a request.
    threshold: f64,
    /// The most in flight of late.
    peak: (u32, Instant),
    hedges: f64,
    /// When requests began to fail, if none succeeded since.
    failing_since: Option<Instant>,
}

impl InFlightLimit {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            in_flight: 0,
            limit: MOST,
            since: now,
            halved: None,
            threshold: MOST,
            peak: (0, now),
            hedges: HEDGES,
            failing_since: None,
        }
    }

    /// Counts a request, if there may be one more.
    pub(crate) fn begin(&mut self, now: Instant) -> bool {
        if f64::from(self.in_flight) >= self.limit_at(now) {
            return false;
        }
        self.in_flight += 1;
        if self.in_flight >= self.peak.0 || now.saturating_duration_since(self.peak.1) >= PEAK_FOR {
            self.peak = (self.in_flight, now);
        }
        true
    }

    pub(crate) fn end(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Notes that a request succeeded.
    pub(crate) fn succeeded(&mut self, now: Instant) {
        self.failing_since = None;
        self.hedges = (self.hedges + 1.0 / ANSWERS_PER_HEDGE).min(HEDGES);
        if self.limit < self.threshold {
            let limit = self.limit_at(now);
            (self.limit, self.since) = ((limit + 1.0).min(MOST), now);
        }
    }

    /// Notes that a request failed, or brought a part of what is wanted.
    pub(crate) fn failed(&mut self, failure: Failure, bytes: u64, now: Instant) {
        if failure == Failure::Part {
            return self.succeeded(now);
        }
        if bytes > 0 {
            self.failing_since = None;
            return;
        }
        self.failing_since.get_or_insert(now);
        let is_busy = matches!(failure, Failure::Busy(_) | Failure::Unavailable(_));
        let is_away =
            matches!(failure, Failure::Unreached | Failure::Broken | Failure::NoHttp | Failure::Silent);
        let may_halve =
            self.halved.is_none_or(|halved| now.saturating_duration_since(halved) >= HALVED_EVERY);
        if !(is_busy || is_away) || !may_halve {
            return;
        }
        // This one request has ended already.
        let before = self.limit_at(now).min(f64::from(self.in_flight + 1));
        (self.limit, self.since, self.halved) = ((before / 2.0).max(1.0), now, Some(now));
        self.threshold = if is_busy { self.limit } else { self.threshold.min(MOST).max(before) };
    }

    /// Whether everything failed for longer than a read waits.
    pub(crate) fn is_away(&self, now: Instant) -> bool {
        self.failing_since.is_some_and(|since| now.saturating_duration_since(since) >= STALL)
    }

    /// After how long a request of those that end a load is asked a second time.
    pub(crate) fn hedge_after(first_byte: Option<Duration>) -> Option<Duration> {
        Some(first_byte?.mul_f64(HEDGE_FACTOR).max(LEAST_HEDGE))
    }

    /// Counts a second request for what one is slow to bring, if it is among the last of a load, and the server not busy.
    pub(crate) fn begin_hedge(&mut self, now: Instant) -> bool {
        let is_last = self.peak.0 > LAST_PART && self.in_flight <= self.peak.0 / LAST_PART;
        let may = is_last && self.hedges >= 1.0 && f64::from(self.in_flight) < self.limit_at(now);
        if may {
            self.hedges -= 1.0;
            self.in_flight += 1;
        }
        may
    }

    fn limit_at(&self, now: Instant) -> f64 {
        (self.limit + now.saturating_duration_since(self.since).as_secs_f64() * REGAINED).min(MOST)
    }
}

/// A body that brings fewer bytes in this long is given up.
const LEAST_BYTES: u64 = 128 << 10;
const LEAST_BYTES_IN: Duration = Duration::from_secs(20);
/// A body is slow that is slower than this part of the mean for so many seconds in a row.
const SLOW_PART: u64 = 8;
const SLOW_SECONDS: u32 = 3;
const SECOND: Duration = Duration::from_secs(1);

/// The mean speed of the bodies of a server, in bytes a second. 0 if it is not known.
#[derive(Debug, Default)]
pub(crate) struct MeanSpeed(AtomicU64);

impl MeanSpeed {
    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds a measurement. Of two at the same time, one may be lost.
    fn add(&self, bytes: u64, time: Duration) {
        let speed = bytes as f64 / time.as_secs_f64().max(1e-6);
        let mean = self.get() as f64;
        let mean = if mean == 0.0 { speed } else { mean * 0.9 + speed * 0.1 };
        self.0.store(mean as u64, Ordering::Relaxed);
    }
}

/// How fast one body comes.
#[derive(Clone, Debug)]
pub(crate) struct Speed {
    /// When the head had come.
    begun: Instant,
    /// Bytes of the second that began at this time.
    second: (u64, Instant),
    /// Bytes of the last [`LEAST_BYTES_IN`].
    least: (u64, Instant),
    slow_seconds: u32,
}

impl Speed {
    /// Of a body whose head came at `now`: how long the server took to answer says nothing of its speed.
    pub(crate) fn new(now: Instant) -> Self {
        Self { begun: now, second: (0, now), least: (0, now), slow_seconds: 0 }
    }

    /// Notes that bytes came by `now`.
    ///
    /// # Errors
    /// What is said of a body that is too slow.
    pub(crate) fn came(&mut self, bytes: u64, now: Instant, mean: &MeanSpeed) -> Result<(), String> {
        self.least.0 += bytes;
        let passed = now.saturating_duration_since(self.least.1);
        if passed >= LEAST_BYTES_IN {
            if self.least.0 < LEAST_BYTES {
                return Err(format!("only {} bytes came in {:.0} s", self.least.0, passed.as_secs_f64()));
            }
            self.least = (0, now);
        }
        self.second.0 += bytes;
        let passed = now.saturating_duration_since(self.second.1);
        if passed < SECOND {
            return Ok(());
        }
        let speed = (self.second.0 as f64 / passed.as_secs_f64()) as u64;
        let usual = mean.get();
        mean.add(self.second.0, passed);
        self.second = (0, now);
        if speed >= usual / SLOW_PART {
            self.slow_seconds = 0;
            return Ok(());
        }
        // A pause counts once, however long: the caller's patience ends it.
        self.slow_seconds += 1;
        if self.slow_seconds < SLOW_SECONDS {
            return Ok(());
        }
        Err(format!("it came with {speed} bytes a second, where others came with {usual}"))
    }

    /// Notes the end of a body that has come since its request was sent.
    pub(crate) fn ended(&self, bytes: u64, sent: Instant, now: Instant, mean: &MeanSpeed) {
        // Shorter ones say more of the wait than of the speed.
        if bytes >= PROGRESS_BYTES && self.second.1 == self.begun {
            mean.add(bytes, now.saturating_duration_since(sent));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What a simulated server does with an attempt.
    #[derive(Clone, Copy, Debug)]
    enum Deed {
        Refuse,
        Reset,
        Silence,
        Say(u16),
        LeaveAlone(u64),
        /// So many bytes, then the end of the connection.
        Cut(u64),
        /// A shorter part, whole.
        Part(u64),
        /// So many bytes, and then no more.
        Stop(u64),
        Whole,
    }

    fn deeds() -> impl Strategy<Value = Deed> {
        prop_oneof![
            2 => Just(Deed::Refuse),
            2 => Just(Deed::Reset),
            2 => Just(Deed::Silence),
            1 => prop_oneof![Just(Deed::Say(500)), Just(Deed::Say(503))],
            1 => (0u64..100).prop_map(Deed::LeaveAlone),
            2 => (0u64..3 << 20).prop_map(Deed::Cut),
            1 => (1u64..3 << 20).prop_map(Deed::Part),
            1 => (0u64..3 << 20).prop_map(Deed::Stop),
            1 => Just(Deed::Whole),
        ]
    }

    /// The end of a simulated read: how long it took, and whether all bytes came.
    struct End {
        took: Duration,
        is_complete: bool,
        attempts: usize,
    }

    /// Reads `len` bytes from a server that does `deeds` in turn, and the last for ever. `pooled` connections were kept, all
    /// of which are dead. No attempt may get one after a failure.
    fn simulate(len: u64, deeds: &[Deed], mut pooled: usize, is_known: bool, luck: f64) -> End {
        let begun = Instant::now();
        let (mut now, mut left, mut attempts) = (begun, len, 0);
        let mut retry = Retry::new(now, is_known, Limits::default());
        // The fastest attempt takes this long.
        let trip = Duration::from_millis(1);
        let mut has_failed = false;
        loop {
            attempts += 1;
            let terms = retry.terms(now, is_known.then_some(Duration::from_millis(30)));
            assert!(terms.is_new || !has_failed, "a kept connection after a failure");
            let was_reused = !terms.is_new && pooled > 0;
            let (failure, bytes, time) = if was_reused {
                pooled -= 1;
                (Failure::Silent, 0, terms.patience)
            } else {
                match deeds[(attempts - 1).min(deeds.len() - 1)] {
                    Deed::Refuse => (Failure::Unreached, 0, trip),
                    Deed::Reset => (Failure::Broken, 0, trip),
                    Deed::Silence => (Failure::Silent, 0, terms.patience),
                    Deed::Say(500) => (Failure::Refused, 0, trip),
                    Deed::Say(_) => (Failure::Busy(None), 0, trip),
                    Deed::LeaveAlone(time) => (Failure::Busy(Some(Duration::from_secs(time))), 0, trip),
                    Deed::Cut(bytes) => (Failure::Broken, bytes.min(left - 1), trip),
                    Deed::Part(bytes) if bytes < left => (Failure::Part, bytes, trip),
                    Deed::Stop(bytes) => (Failure::Silent, bytes.min(left - 1), terms.patience),
                    Deed::Part(_) | Deed::Whole => {
                        let took = now.saturating_duration_since(begun) + trip;
                        return End { took, is_complete: true, attempts };
                    }
                }
            };
            left -= bytes;
            now += time.max(trip);
            has_failed = failure != Failure::Part;
            match retry.failed(failure, was_reused, bytes, now, luck) {
                Action::Ask => {}
                Action::AskAfter(pause) => now += pause,
                Action::GiveUp(_) => {
                    return End { took: now - begun, is_complete: false, attempts };
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn a_read_ends_within_its_bound_and_never_trusts_a_kept_connection_after_a_failure(
            len in 1u64..(20 << 20),
            deeds in prop::collection::vec(deeds(), 1..30),
            pooled in 0usize..300,
            is_known: bool,
            luck in 0.0f64..1.0,
        ) {
            let end = simulate(len, &deeds, pooled, is_known, luck);
            let bound = STALL * (1 + (len / PROGRESS_BYTES) as u32) + Duration::from_secs(1);
            prop_assert!(end.took <= bound, "{:?} of {bound:?}", end.took);
        }

        #[test]
        fn a_server_that_comes_back_within_ten_seconds_fails_no_read(
            away in prop_oneof![Just(Deed::Refuse), Just(Deed::Reset), Just(Deed::Say(503))],
            seconds in 1u64..10,
            luck in 0.01f64..1.0,
        ) {
            let begun = Instant::now();
            let (mut now, mut retry) = (begun, Retry::new(begun, true, Limits::default()));
            let failure = match away {
                Deed::Refuse => Failure::Unreached,
                Deed::Reset => Failure::Broken,
                _ => Failure::Busy(None),
            };
            while now.duration_since(begun) < Duration::from_secs(seconds) {
                now += Duration::from_millis(1);
                match retry.failed(failure, false, 0, now, luck) {
                    Action::AskAfter(pause) => now += pause,
                    other => prop_assert!(false, "{other:?} after {:?}", now.duration_since(begun)),
                }
            }
        }

        #[test]
        fn in_flight_stays_in_its_bounds(events in prop::collection::vec(0u8..8, 0..500)) {
            let mut now = Instant::now();
            let mut limit = InFlightLimit::new(now);
            for event in events {
                now += Duration::from_millis(100);
                match event {
                    0..=2 => drop(limit.begin(now)),
                    3 => limit.end(),
                    4 => limit.failed(Failure::Busy(None), 0, now),
                    5 => limit.failed(Failure::Unreached, 0, now),
                    6 => limit.succeeded(now),
                    _ => drop(limit.begin_hedge(now)),
                }
                prop_assert!((1.0..=MOST).contains(&limit.limit_at(now)) && f64::from(limit.in_flight) <= MOST);
            }
        }
    }

    #[test]
    fn dead_kept_connections_cost_one_short_wait() {
        let end = simulate(8 << 20, &[Deed::Whole], 256, true, 0.5);
        assert!(end.is_complete && end.attempts == 2 && end.took < Duration::from_secs(2), "{:?}", end.took);
    }

    #[test]
    fn a_server_that_was_never_reached_is_given_up_soon_and_a_known_one_later() {
        let never = simulate(8 << 20, &[Deed::Refuse], 0, false, 0.9);
        assert!(!never.is_complete && never.took < Duration::from_secs(16), "{:?}", never.took);
        let known = simulate(8 << 20, &[Deed::Refuse], 0, true, 0.9);
        assert!(!known.is_complete && known.took > Duration::from_secs(50), "{:?}", known.took);
    }

    #[test]
    fn a_server_that_wants_to_be_left_alone_for_long_is_not_waited_for() {
        let now = Instant::now();
        let long = Duration::from_secs(3600);
        let action =
            Retry::new(now, true, Limits::default()).failed(Failure::Busy(Some(long)), false, 0, now, 0.5);
        assert_eq!(action, Action::GiveUp(Limit::LeftAlone(long)));
        let short = Duration::from_secs(7);
        let action =
            Retry::new(now, true, Limits::default()).failed(Failure::Busy(Some(short)), false, 0, now, 0.5);
        assert_eq!(action, Action::AskAfter(short));
    }

    #[test]
    fn parts_that_come_whole_count_as_answers() {
        let now = Instant::now();
        let mut limit = InFlightLimit::new(now);
        (0..100).for_each(|_| assert!(limit.begin(now)));
        limit.failed(Failure::Broken, 0, now);
        (limit.in_flight, limit.peak, limit.hedges) = (1, (100, now), 0.5);
        (0..49).for_each(|_| limit.failed(Failure::Part, 1, now));
        assert!(limit.limit_at(now) > 99.0, "{limit:?}");
        assert!(limit.begin_hedge(now), "{limit:?}");
    }

    #[test]
    fn a_busy_server_regains_slowly_and_one_that_was_away_at_once() {
        let now = Instant::now();
        let mut busy = InFlightLimit::new(now);
        (0..100).for_each(|_| assert!(busy.begin(now)));
        busy.failed(Failure::Busy(None), 0, now);
        assert!((busy.limit_at(now) - 50.5).abs() < 0.1, "{busy:?}");
        assert!((busy.limit_at(now + Duration::from_secs(3)) - 53.5).abs() < 0.1);
        assert!(!busy.begin(now));
        (0..100).for_each(|_| busy.succeeded(now));
        assert!(busy.limit_at(now) < 52.0, "{busy:?}");
        // Answers meanwhile do not put off that a busy server gets half.
        let later = now + HALVED_EVERY;
        let mut restarted = InFlightLimit::new(now);
        (0..100).for_each(|_| assert!(restarted.begin(now)));
        restarted.failed(Failure::Broken, 0, now);
        restarted.succeeded(later);
        let before = restarted.limit_at(later);
        restarted.failed(Failure::Busy(None), 0, later);
        assert!(restarted.limit_at(later) < before * 0.6, "{restarted:?}");
        let mut away = InFlightLimit::new(now);
        (0..100).for_each(|_| assert!(away.begin(now)));
        away.failed(Failure::Broken, 0, now);
        (0..49).for_each(|_| away.succeeded(now));
        assert!(away.limit_at(now) > 99.0, "{away:?}");
    }

    #[test]
    fn only_the_last_requests_of_a_load_are_asked_twice_and_few_of_them() {
        let now = Instant::now();
        let mut limit = InFlightLimit::new(now);
        (0..40).for_each(|_| assert!(limit.begin(now)));
        assert!(!limit.begin_hedge(now), "in the middle of a load");
        (0..32).for_each(|_| limit.end());
        let hedges = (0..10).take_while(|_| limit.begin_hedge(now)).count();
        assert_eq!(hedges, 3, "with the hedges, not more than a quarter");
        // One request alone is no end of a load.
        let mut single = InFlightLimit::new(now);
        assert!(single.begin(now) && !single.begin_hedge(now));
    }

    #[test]
    fn a_body_that_trickles_is_given_up_and_one_that_is_as_slow_as_others_is_not() {
        let begun = Instant::now();
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        let fast = MeanSpeed::default();
        (0..10).for_each(|_| fast.add(100 << 20, SECOND));
        let mut trickle = Speed::new(begun);
        trickle.came(1000, at(1), &fast).unwrap();
        trickle.came(1000, at(2), &fast).unwrap();
        let said = trickle.came(1000, at(3), &fast).unwrap_err();
        assert!(said.starts_with("it came with 1000 bytes a second"), "{said}");
        // As slow as all others, which have become slow together.
        let slow = MeanSpeed::default();
        slow.add(20_000, SECOND);
        let mut speed = Speed::new(begun);
        (1..100).for_each(|second| speed.came(10_000, at(second), &slow).unwrap());
        // However slow others are, there is a floor.
        let mut paused = Speed::new(begun);
        paused.came(1000, at(10), &fast).unwrap();
        paused.came(1 << 30, at(11), &fast).unwrap();

        let mut floor = Speed::new(begun);
        let given_up = (1..100).find(|second| floor.came(1000, at(*second), &MeanSpeed::default()).is_err());
        assert_eq!(given_up, Some(20));
    }
}
