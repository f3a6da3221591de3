//! How many bytes a request of a read asks for, where answers end early that can only be compared whole. What came of them has
//! no digest of its own, so it is discarded: over a server that breaks each body off, a read goes on by asking for less. A state
//! machine without clocks and sockets, as those of [`policy`](crate::policy).

use crate::policy::Failure;
use std::ops::Range;

/// The shortest range that is asked for because of answers that ended early.
const FLOOR_BYTES: u64 = 64 << 10;
/// How much shorter than the last range the next one is at most: one break may come early by chance.
const MOST_SHRINK: u64 = 8;
/// Whole answers in a row after which requests ask for twice as much.
const WHOLE_ANSWERS: u32 = 4;
/// Bodies in a row that fell silent, from which on requests ask for less: for the first ones, more patience may be enough.
const SILENT_ANSWERS: u32 = 3;

/// The length of the requests of one read.
#[derive(Clone, Debug)]
pub(crate) struct RequestSize {
    most: u64,
    /// Whole answers since `most` changed.
    whole: u32,
    /// Bodies that fell silent since an answer came whole.
    silent: u32,
    /// Whether `most` was doubled last: half of it came whole.
    was_doubled: bool,
}

impl RequestSize {
    /// Without a bound, until an answer ends early.
    pub(crate) fn new() -> Self {
        Self { most: u64::MAX, whole: 0, silent: 0, was_doubled: false }
    }

    /// The part of `range` that the next request asks for.
    pub(crate) fn first_of(&self, range: &Range<u64>) -> Range<u64> {
        range.start..range.end.min(range.start.saturating_add(self.most))
    }

    /// Notes that an answer of `asked` bytes failed after `came`, which were discarded. Returns what the attempt counts as: the
    /// server is there, and of a break there is nothing to wait for.
    pub(crate) fn ended_early(&mut self, failure: Failure, asked: u64, came: u64) -> Failure {
        if failure == Failure::Silent {
            self.silent += 1;
        }
        if failure != Failure::Silent || self.silent >= SILENT_ANSWERS || self.was_doubled {
            let next = (asked / 2).min(came.max(asked / MOST_SHRINK)).max(FLOOR_BYTES);
            (self.most, self.whole, self.was_doubled) = (self.most.min(next), 0, false);
        }
        if failure == Failure::Broken { Failure::BrokenOff } else { failure }
    }

    /// Notes that an answer came whole.
    pub(crate) fn came_whole(&mut self) {
        (self.whole, self.silent) = (self.whole + 1, 0);
        if self.whole >= WHOLE_ANSWERS && self.most < u64::MAX {
            (self.most, self.whole, self.was_doubled) = (self.most.saturating_mul(2), 0, true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Action, Limit, Limits, Retry};
    use proptest::prelude::*;
    use std::time::{Duration, Instant};

    /// What ends the bodies of a simulated server.
    #[derive(Clone, Copy, Debug)]
    enum Ends {
        /// The connection ends after so many bytes of a longer body.
        Break(u64),
        /// Nothing comes after so many bytes of a longer body.
        Silence(u64),
        /// A pause in the middle of each body.
        Pause(Duration),
    }

    /// The end of a simulated read.
    struct End {
        filled: u64,
        requests: u64,
        limit: Option<Limit>,
    }

    /// Reads `len` bytes, all of which are compared.
    fn read(len: u64, ends: Ends, luck: f64) -> End {
        let (mut now, mut size) = (Instant::now(), RequestSize::new());
        let mut retry = Retry::new(now, true, Limits::default());
        let (mut filled, mut requests) = (0, 0);
        loop {
            requests += 1;
            now += Duration::from_millis(1);
            let patience = retry.terms(now, Some(Duration::from_millis(30))).patience;
            let asked = size.first_of(&(filled..len));
            let asked = asked.end - asked.start;
            let (early, came) = match ends {
                Ends::Break(most) if most < asked => (Some(Failure::Broken), most),
                Ends::Silence(most) if most < asked => (Some(Failure::Silent), most),
                Ends::Pause(time) if time >= patience => (Some(Failure::Silent), asked / 2),
                Ends::Pause(time) => {
                    now += time;
                    (None, asked)
                }
                _ => (None, asked),
            };
            let (failure, bytes) = match early {
                None => {
                    size.came_whole();
                    (Failure::Part, asked)
                }
                Some(failure) => {
                    now += if failure == Failure::Silent { patience } else { Duration::ZERO };
                    let failure = if came > 0 { size.ended_early(failure, asked, came) } else { failure };
                    retry.discarded(came);
                    (failure, 0)
                }
            };
            filled += bytes;
            if filled == len {
                return End { filled, requests, limit: None };
            }
            match retry.failed(failure, false, bytes, now, luck) {
                Action::Ask => {}
                Action::AskAfter(pause) => now += pause,
                Action::GiveUp(limit) => return End { filled, requests, limit: Some(limit) },
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
            let End { filled, requests, .. } = read(len, Ends::Break(most), luck);
            prop_assert_eq!(filled, len);
            // Each range has half of what comes at least, and of five one breaks off.
            let bound = len / (most / 2).max(FLOOR_BYTES) * 5 / 4 + 10;
            prop_assert!(requests <= bound, "{} of {}", requests, bound);
        }

        #[test]
        fn a_server_whose_bodies_fall_silent_is_read_in_shorter_ranges(
            len in 1u64..(16 << 20),
            most in FLOOR_BYTES..(16 << 20),
            luck in 0.0f64..1.0,
        ) {
            let End { filled, limit, .. } = read(len, Ends::Silence(most), luck);
            prop_assert_eq!(filled, len, "{:?}", limit);
        }

        #[test]
        fn a_server_whose_bodies_pause_is_waited_for(
            // Of less, a quarter is so little that long pauses are no progress.
            len in (512u64 << 10)..(64 << 20),
            pause in 0u64..14_000,
            luck in 0.0f64..1.0,
        ) {
            let End { filled, requests, limit } = read(len, Ends::Pause(Duration::from_millis(pause)), luck);
            prop_assert_eq!(filled, len, "{:?}", limit);
            // Pauses of up to four seconds change nothing of what is asked for.
            prop_assert!(pause >= 4000 || requests <= 3, "{}", requests);
        }

        #[test]
        fn a_server_that_breaks_off_all_that_is_asked_for_is_given_up(
            len in FLOOR_BYTES..(64 << 20),
            most in 0u64..FLOOR_BYTES,
            luck in 0.05f64..1.0,
        ) {
            let End { filled, requests, limit } = read(len, Ends::Break(most), luck);
            prop_assert_eq!(filled, 0);
            prop_assert!(requests <= 500, "{}", requests);
            // What came is told from what could be compared.
            let is_of_comparison = matches!(limit, Some(Limit::Comparison(_)));
            prop_assert_eq!(is_of_comparison, most * requests >= crate::policy::PROGRESS_BYTES, "{:?}", limit);
        }
    }

    #[test]
    fn one_early_break_costs_few_requests() {
        let mut size = RequestSize::new();
        assert_eq!(size.ended_early(Failure::Broken, 8 << 20, 3), Failure::BrokenOff);
        let (mut start, end, mut requests) = (0, 8 << 20, 0);
        while start < end {
            start = size.first_of(&(start..end)).end;
            size.came_whole();
            requests += 1;
        }
        assert!(requests <= 8, "{requests}");
        // What is shorter already stays as it is.
        let mut short = RequestSize::new();
        short.ended_early(Failure::Broken, 1000, 10);
        assert_eq!(short.first_of(&(5..1005)), 5..1005);
    }

    #[test]
    fn slow_bodies_and_silent_ones_count_as_such() {
        let mut size = RequestSize::new();
        assert_eq!(size.ended_early(Failure::Silent, 8 << 20, 4 << 20), Failure::Silent);
        assert_eq!(size.first_of(&(0..8 << 20)), 0..8 << 20);
        assert_eq!(size.ended_early(Failure::Slow, 8 << 20, 3 << 20), Failure::Slow);
        assert_eq!(size.first_of(&(0..8 << 20)), 0..3 << 20);
    }
}
