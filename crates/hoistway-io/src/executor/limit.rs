//! How many operations a lane keeps in flight on its device: as many as make it faster, found by trying.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// A number of operations in flight that adapts to the device.
#[derive(Clone, Debug)]
pub struct InFlightLimit(Policy);

#[derive(Clone, Debug)]
enum Policy {
    Fixed(usize),
    Throughput(Throughput),
    Delay(Delay),
}

impl InFlightLimit {
    /// Allows always `operations`, at least one.
    pub const fn fixed(operations: usize) -> Self {
        Self(Policy::Fixed(if operations == 0 { 1 } else { operations }))
    }

    /// Begins with `operations` and doubles up to `most` as long as that makes the device faster. For drives.
    pub fn by_throughput(operations: usize, most: usize) -> Self {
        Self::growing(operations, most, false)
    }

    /// Like [`by_throughput`](Self::by_throughput), for operations that each need a connection: the time in which new ones
    /// are made does not count.
    pub fn by_connections(operations: usize, most: usize) -> Self {
        Self::growing(operations, most, true)
    }

    fn growing(operations: usize, most: usize, connects: bool) -> Self {
        if operations >= most {
            return Self::fixed(operations);
        }
        let throughput = Throughput {
            operations: operations.max(1),
            most,
            is_growing: true,
            connects,
            is_connecting: connects,
            rate_before: None,
            epoch_start: None,
            epoch_bytes: 0,
        };
        Self(Policy::Throughput(throughput))
    }

    /// Grows up to `most` while operations do not wait for each other, and shrinks while they wait to be copied. For
    /// memory that is copied from and should stay in the processor's cache.
    pub fn by_delay(most: usize) -> Self {
        let most = most.max(1);
        let operations = Delay::FIRST.min(most);
        Self(Policy::Delay(Delay { operations, most, longest: 0, fastest: Duration::MAX }))
    }

    /// Returns how many operations may be in flight now.
    pub fn operations(&self) -> usize {
        match &self.0 {
            Policy::Fixed(operations) => *operations,
            Policy::Throughput(throughput) => throughput.operations,
            Policy::Delay(delay) => delay.operations,
        }
    }

    /// Notes an operation that moved `bytes` and ended at `now`. `others` ended with it and are not settled yet.
    pub fn ended(&mut self, bytes: usize, took: Duration, others: usize, now: Instant) {
        match &mut self.0 {
            Policy::Fixed(_) => {}
            Policy::Throughput(throughput) => throughput.ended(bytes as u64, now),
            Policy::Delay(delay) => delay.ended(bytes, took, others),
        }
    }
}

/// Doubles as long as that makes the device faster.
#[derive(Clone, Debug)]
struct Throughput {
    operations: usize,
    most: usize,
    is_growing: bool,
    /// Whether the epoch after it grew does not count, and whether this one is such.
    connects: bool,
    is_connecting: bool,
    /// Bytes per second with half as many operations.
    rate_before: Option<f64>,
    epoch_start: Option<Instant>,
    epoch_bytes: u64,
}

impl Throughput {
    /// Time over which a rate is measured: long against one operation, short against a load.
    const EPOCH: Duration = Duration::from_millis(100);
    /// Growth of the rate that makes twice as many operations worth it.
    const WORTH: f64 = 1.05;

    fn ended(&mut self, bytes: u64, now: Instant) {
        if !self.is_growing {
            return;
        }
        // An epoch begins with an arrival, whose bytes were under way before it.
        let Some(start) = self.epoch_start else {
            self.epoch_start = Some(now);
            return;
        };
        self.epoch_bytes += bytes;
        let time = now.saturating_duration_since(start);
        if time < Self::EPOCH {
            return;
        }
        if std::mem::take(&mut self.is_connecting) {
            (self.epoch_start, self.epoch_bytes) = (Some(now), 0);
            return;
        }
        let rate = self.epoch_bytes as f64 / time.as_secs_f64();
        if self.rate_before.is_some_and(|before| rate < before * Self::WORTH) {
            self.operations /= 2;
            self.is_growing = false;
            return;
        }
        if self.operations == self.most {
            self.is_growing = false;
            return;
        }
        self.rate_before = Some(rate);
        self.operations = (self.operations * 2).min(self.most);
        self.is_connecting = self.connects;
        self.epoch_start = None;
        self.epoch_bytes = 0;
    }
}

/// Grows while operations do not wait for each other.
#[derive(Clone, Debug)]
struct Delay {
    operations: usize,
    most: usize,
    /// The longest operation so far, and the least time that one of that length took.
    longest: usize,
    fastest: Duration,
}

impl Delay {
    /// Operations to begin with.
    const FIRST: usize = 4;
    const FEWEST: usize = 2;
    /// An operation that takes so many times as long as the fastest has waited for others.
    const QUEUED: u32 = 2;
    /// So many operations that came and wait to be copied show that copying is what takes the time.
    const BACKLOG: usize = 2;

    fn ended(&mut self, bytes: usize, took: Duration, others: usize) {
        if bytes > self.longest {
            (self.longest, self.fastest) = (bytes, took);
        }
        // Shorter ones say little of how long others should take.
        if bytes == self.longest {
            self.fastest = self.fastest.min(took);
        }
        if took < self.fastest.saturating_mul(Self::QUEUED) {
            self.operations = (self.operations + 1).min(self.most);
        } else if others >= Self::BACKLOG {
            self.operations = (self.operations - 1).max(Self::FEWEST.min(self.most));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    const LEN: usize = 1 << 20;

    /// Feeds a limit from a device that needs `saturated_by` operations for its full rate.
    fn settle(mut limit: InFlightLimit, saturated_by: usize) -> usize {
        let mut now = Instant::now();
        for _ in 0..20_000 {
            let busy = limit.operations().min(saturated_by) as u64;
            now += Duration::from_micros(2000 / busy);
            limit.ended(4 << 20, Duration::from_millis(1), 0, now);
        }
        limit.operations()
    }

    #[test]
    fn throughput_grows_as_far_as_the_device_gets_faster() {
        assert_eq!(settle(InFlightLimit::by_throughput(8, 64), 8), 8);
        assert_eq!(settle(InFlightLimit::by_throughput(8, 64), 32), 32);
        assert_eq!(settle(InFlightLimit::by_throughput(8, 64), 1000), 64);
    }

    #[test]
    fn connections_that_are_being_made_do_not_count() {
        let settled = |mut limit: InFlightLimit| {
            let (mut now, mut before, mut grew) = (Instant::now(), limit.operations(), None);
            for _ in 0..20_000 {
                if limit.operations() > before {
                    (before, grew) = (limit.operations(), Some(now));
                }
                // What is new brings nothing at first.
                let is_new = grew.is_some_and(|grew| now.duration_since(grew) < Duration::from_millis(99));
                let busy = if is_new { before / 2 } else { limit.operations() }.max(1);
                now += Duration::from_micros(20_000 / busy as u64);
                limit.ended(4 << 20, Duration::from_millis(20), 0, now);
            }
            limit.operations()
        };
        assert_eq!(settled(InFlightLimit::by_connections(16, 128)), 128);
        assert!(settled(InFlightLimit::by_throughput(16, 128)) < 128);
    }

    #[test]
    fn a_number_given_by_the_caller_stays() {
        assert_eq!(settle(InFlightLimit::fixed(3), 1000), 3);
    }

    #[test]
    fn one_operation_is_always_allowed() {
        for mut limit in
            [InFlightLimit::fixed(0), InFlightLimit::by_throughput(0, 8), InFlightLimit::by_delay(0)]
        {
            assert!(limit.operations() >= 1, "{limit:?}");
            let now = Instant::now();
            for others in [0, 2, 2] {
                limit.ended(1, Duration::from_secs(others), others as usize, now);
            }
            assert!(limit.operations() >= 1, "{limit:?}");
        }
    }

    /// The operations that are allowed in the end, of a daemon whose reads take `delay` and then pass one by one, `each`
    /// time after the other, to a client that copies for `copy`.
    fn settle_delay(most: usize, delay: u64, each: u64, copy: u64) -> usize {
        let mut limit = InFlightLimit::by_delay(most);
        let begin = Instant::now();
        let (mut now, mut link) = (0u64, 0u64);
        // When operations began, and when they come.
        let mut in_flight: VecDeque<(u64, u64)> = VecDeque::new();
        let mut ended = 0;
        for _ in 0..10_000 {
            while in_flight.len() + ended < limit.operations() {
                link = link.max(now + delay) + each;
                in_flight.push_back((now, link));
            }
            if ended == 0 {
                now = now.max(in_flight.front().unwrap().1);
                let came = in_flight.iter().take_while(|(_, comes)| *comes <= now).count();
                for (begun, _) in in_flight.drain(..came) {
                    limit.ended(LEN, Duration::from_micros(now - begun), came - 1, begin);
                }
                ended = came;
            }
            now += copy;
            ended -= 1;
        }
        limit.operations()
    }

    #[test]
    fn long_delays_are_hidden_by_many_operations() {
        assert_eq!(settle_delay(64, 3000, 10, 1), 64);
        assert!(settle_delay(64, 3000, 100, 1) >= 30);
    }

    #[test]
    fn without_delay_a_few_operations_are_enough() {
        assert!(settle_delay(64, 0, 100, 1) < 8);
        assert!(settle_delay(64, 10, 100, 300) < 8);
    }

    proptest! {
        #[test]
        fn operations_are_never_none_and_never_more_than_there_is_memory_for(
            most in 1..64usize,
            came in prop::collection::vec((1..3usize, 0..1000u64, 0..64usize), 0..200),
        ) {
            let mut limit = InFlightLimit::by_delay(most);
            let now = Instant::now();
            for (len, took, others) in came {
                limit.ended(len, Duration::from_micros(took), others, now);
                prop_assert!((1..=most).contains(&limit.operations()));
            }
        }
    }
}
