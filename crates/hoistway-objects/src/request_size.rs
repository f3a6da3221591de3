//! How many bytes a request of a read asks for, where answers break off that can only be compared whole. Bytes before the
//! break have no digest of their own, so they are discarded: over a server that breaks each body off, a read goes on by
//! asking for less. A state machine without clocks and sockets, as those of [`policy`](crate::policy).

use std::ops::Range;

/// The shortest range that is asked for because of answers that broke off.
const FLOOR_BYTES: u64 = 64 << 10;
/// How much shorter than the last range the next one is at most: one break may come early by chance.
const MOST_SHRINK: u64 = 8;
/// Whole answers in a row after which requests ask for twice as much.
const WHOLE_ANSWERS: u32 = 4;

/// The length of the requests of one read.
#[derive(Clone, Debug)]
pub(crate) struct RequestSize {
    most: u64,
    /// Whole answers since `most` changed.
    whole: u32,
}

impl RequestSize {
    /// Without a bound, until an answer breaks off.
    pub(crate) fn new() -> Self {
        Self { most: u64::MAX, whole: 0 }
    }

    /// The part of `range` that the next request asks for.
    pub(crate) fn first_of(&self, range: &Range<u64>) -> Range<u64> {
        range.start..range.end.min(range.start.saturating_add(self.most))
    }

    /// Notes that an answer of `asked` bytes broke off after `came`, which were discarded.
    pub(crate) fn broke_off(&mut self, asked: u64, came: u64) {
        let next = (asked / 2).min(came.max(asked / MOST_SHRINK)).max(FLOOR_BYTES);
        (self.most, self.whole) = (self.most.min(next), 0);
    }

    /// Notes that an answer came whole.
    pub(crate) fn came_whole(&mut self) {
        self.whole += 1;
        if self.whole >= WHOLE_ANSWERS {
            (self.most, self.whole) = (self.most.saturating_mul(2), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Action, Failure, Limits, Retry};
    use proptest::prelude::*;
    use std::time::{Duration, Instant};

    /// Reads `len` bytes of a server that breaks each body off after `most` bytes. Returns the bytes that came, and the number
    /// of requests.
    fn read(len: u64, most: u64, luck: f64) -> (u64, u64) {
        let (mut now, mut size) = (Instant::now(), RequestSize::new());
        let mut retry = Retry::new(now, true, Limits::default());
        let (mut filled, mut requests) = (0, 0);
        loop {
            requests += 1;
            now += Duration::from_millis(1);
            let asked = size.first_of(&(filled..len));
            let asked = asked.end - asked.start;
            let (failure, bytes) = if asked <= most {
                size.came_whole();
                (Failure::Part, asked)
            } else {
                size.broke_off(asked, most);
                (Failure::BrokenOff, 0)
            };
            filled += bytes;
            if filled == len {
                return (filled, requests);
            }
            match retry.failed(failure, false, bytes, now, luck) {
                Action::Ask => {}
                Action::AskAfter(pause) => now += pause,
                Action::GiveUp(_) => return (filled, requests),
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn a_server_that_breaks_bodies_off_is_read_in_shorter_ranges(
            len in 1u64..(64 << 20),
            most in FLOOR_BYTES..(16 << 20),
            luck in 0.0f64..1.0,
        ) {
            let (filled, requests) = read(len, most, luck);
            prop_assert_eq!(filled, len);
            // Each range has half of what comes at least, and of five one breaks off.
            let bound = len / (most / 2).max(FLOOR_BYTES) * 5 / 4 + 10;
            prop_assert!(requests <= bound, "{} of {}", requests, bound);
        }

        #[test]
        fn a_server_that_breaks_off_all_that_is_asked_for_is_given_up(
            len in FLOOR_BYTES..(64 << 20),
            most in 0u64..FLOOR_BYTES,
            luck in 0.05f64..1.0,
        ) {
            let (filled, requests) = read(len, most, luck);
            prop_assert_eq!(filled, 0);
            prop_assert!(requests <= 500, "{}", requests);
        }
    }

    #[test]
    fn one_early_break_costs_few_requests() {
        let mut size = RequestSize::new();
        size.broke_off(8 << 20, 3);
        let (mut start, end, mut requests) = (0, 8 << 20, 0);
        while start < end {
            start = size.first_of(&(start..end)).end;
            size.came_whole();
            requests += 1;
        }
        assert!(requests <= 8, "{requests}");
        // What is shorter already stays as it is.
        let mut short = RequestSize::new();
        short.broke_off(1000, 10);
        assert_eq!(short.first_of(&(5..1005)), 5..1005);
    }
}
