//! How many reads a ring of USRBIO keeps in flight: as many as their delay asks for, and no more.
//!
//! Memory that is read into again soon is still in the processor's cache, for whoever writes to it and for the copy out
//! of it. So a ring that has much memory does not use all of it for the sake of having it.
#![forbid(unsafe_code)]

use std::time::Duration;

/// Reads to begin with.
const FIRST_READS: usize = 4;
const FEWEST_READS: usize = 2;
/// A read that takes so many times as long as the fastest has waited for others.
const QUEUED: u32 = 2;
/// So many reads that came and wait to be copied show that copying is what takes the time.
const BACKLOG: usize = 2;

/// A number of reads that grows while reads do not wait for each other, and shrinks while they wait to be copied.
#[derive(Debug)]
pub(super) struct Allowance {
    reads: usize,
    most: usize,
    /// The longest read so far, and the least time that one of that length took.
    longest: usize,
    fastest: Duration,
}

impl Allowance {
    /// Up to `most` reads.
    pub(super) fn up_to(most: usize) -> Self {
        Self { reads: FIRST_READS.min(most), most, longest: 0, fastest: Duration::MAX }
    }

    /// Reads that may be in flight now.
    pub(super) fn reads(&self) -> usize {
        self.reads
    }

    /// A read of `len` bytes came after so long, and with it so many others.
    pub(super) fn came(&mut self, len: usize, took: Duration, others: usize) {
        if len > self.longest {
            (self.longest, self.fastest) = (len, took);
        }
        // Shorter ones say little of how long others should take.
        if len == self.longest {
            self.fastest = self.fastest.min(took);
        }
        if took < self.fastest.saturating_mul(QUEUED) {
            self.reads = (self.reads + 1).min(self.most);
        } else if others >= BACKLOG {
            self.reads = (self.reads - 1).max(FEWEST_READS.min(self.most));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    const LEN: usize = 1 << 20;

    /// The reads that are allowed in the end, of a daemon whose reads take `delay` and then pass one by one, `each` time
    /// after the other, to a client that copies for `copy`.
    fn settle(most: usize, delay: u64, each: u64, copy: u64) -> usize {
        let mut allowance = Allowance::up_to(most);
        let (mut now, mut link) = (0u64, 0u64);
        // When reads began, and when they come.
        let mut in_flight: VecDeque<(u64, u64)> = VecDeque::new();
        let mut ended = 0;
        for _ in 0..10_000 {
            while in_flight.len() + ended < allowance.reads() {
                link = link.max(now + delay) + each;
                in_flight.push_back((now, link));
            }
            if ended == 0 {
                now = now.max(in_flight.front().unwrap().1);
                let came = in_flight.iter().take_while(|(_, comes)| *comes <= now).count();
                for (begun, _) in in_flight.drain(..came) {
                    allowance.came(LEN, Duration::from_micros(now - begun), came - 1);
                }
                ended = came;
            }
            now += copy;
            ended -= 1;
        }
        allowance.reads()
    }

    #[test]
    fn long_delays_are_hidden_by_many_reads() {
        assert_eq!(settle(64, 3000, 10, 1), 64);
        assert!(settle(64, 3000, 100, 1) >= 30);
    }

    #[test]
    fn without_delay_a_few_reads_are_enough() {
        assert!(settle(64, 0, 100, 1) < 8);
        assert!(settle(64, 10, 100, 300) < 8);
    }

    proptest! {
        #[test]
        fn reads_are_never_none_and_never_more_than_there_is_memory_for(
            most in 1..64usize,
            came in prop::collection::vec((1..3usize, 0..1000u64, 0..64usize), 0..200),
        ) {
            let mut allowance = Allowance::up_to(most);
            for (len, took, others) in came {
                allowance.came(len, Duration::from_micros(took), others);
                prop_assert!((1..=most).contains(&allowance.reads()));
            }
        }
    }
}
