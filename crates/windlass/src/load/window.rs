//! How many reads a ring keeps in flight: enough to fill the device, found by trying.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// Time over which a rate is measured: long against one read, short against a load.
const EPOCH: Duration = Duration::from_millis(100);
/// Growth of the rate that makes twice as many reads worth it.
const WORTH: f64 = 1.05;

/// A number of reads in flight that doubles as long as that makes the device faster.
#[derive(Debug)]
pub(super) struct Window {
    reads: usize,
    max: usize,
    growing: bool,
    /// Bytes per second with half as many reads.
    rate_before: Option<f64>,
    epoch_start: Option<Instant>,
    epoch_bytes: u64,
}

impl Window {
    /// From `reads` up to `max`.
    pub(super) fn between(reads: usize, max: usize) -> Self {
        let growing = reads < max;
        Self { reads, max, growing, rate_before: None, epoch_start: None, epoch_bytes: 0 }
    }

    /// Reads that may be in flight now.
    pub(super) fn reads(&self) -> usize {
        self.reads
    }

    /// `bytes` arrived at `now`.
    pub(super) fn arrived(&mut self, bytes: u64, now: Instant) {
        if !self.growing {
            return;
        }
        // An epoch begins with an arrival, whose bytes were under way before it.
        let Some(start) = self.epoch_start else {
            self.epoch_start = Some(now);
            return;
        };
        self.epoch_bytes += bytes;
        let time = now.saturating_duration_since(start);
        if time < EPOCH {
            return;
        }
        let rate = self.epoch_bytes as f64 / time.as_secs_f64();
        if self.rate_before.is_some_and(|before| rate < before * WORTH) {
            self.reads /= 2;
            self.growing = false;
            return;
        }
        if self.reads == self.max {
            self.growing = false;
            return;
        }
        self.rate_before = Some(rate);
        self.reads = (self.reads * 2).min(self.max);
        self.epoch_start = None;
        self.epoch_bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds a window from a device that needs `saturated_by` reads for its full rate.
    fn settle(mut window: Window, saturated_by: usize) -> usize {
        const READ_BYTES: u64 = 4 << 20;
        let mut now = Instant::now();
        for _ in 0..20_000 {
            let busy = window.reads().min(saturated_by) as u64;
            now += Duration::from_micros(2000 / busy);
            window.arrived(READ_BYTES, now);
        }
        window.reads()
    }

    #[test]
    fn it_grows_as_far_as_the_device_gets_faster() {
        assert_eq!(settle(Window::between(8, 64), 8), 8);
        assert_eq!(settle(Window::between(8, 64), 32), 32);
        assert_eq!(settle(Window::between(8, 64), 1000), 64);
    }

    #[test]
    fn a_number_given_by_the_caller_stays() {
        assert_eq!(settle(Window::between(3, 3), 1000), 3);
    }
}
