//! Reads blocks in the background, at a limited rate, to find damage before a request asks for them.
#![forbid(unsafe_code)]

use super::{
    Core,
    housekeeping::Bell,
    verify::{self, PAGE},
};
use crate::{Priority, Verified, format::HEADER_LEN, layout::Listed};
use std::{
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

/// Time between rounds.
const ROUND: Duration = Duration::from_millis(100);

/// Of the time that it took to find nothing to read, so many times that passes before it looks again.
const IDLE_FACTOR: u32 = 20;

/// Reads own blocks, again and again, until the bell is rung. Others look after theirs.
pub(crate) fn run(core: &Arc<Core>, bell: &Bell) {
    let rate = core.options.scrub_bytes_per_second as f64;
    // Bytes that may be read now.
    let mut credit = 0.0;
    let mut last = Instant::now();
    let mut page: Vec<Listed> = Vec::new();
    let mut next = Some(0);
    let mut has_read = false;
    let mut pause = ROUND;
    while !bell.wait(pause) {
        // What was not read for lack of blocks is not made up for.
        credit = f64::min(credit + last.elapsed().as_secs_f64() * rate, rate);
        last = Instant::now();
        pause = ROUND;
        while credit > 0.0 && !bell.wait(Duration::ZERO) {
            if let Some(block) = page.pop() {
                if block.is_own {
                    verify::verify_one(core, &block, Priority::Background, &mut Verified::default());
                    credit -= (block.payload_len + HEADER_LEN as u64) as f64;
                    has_read = true;
                }
            } else if let Some(cursor) = next {
                next = core.layout.list(cursor, PAGE, &mut page);
            } else {
                next = Some(0);
                if !mem::take(&mut has_read) {
                    pause = pause.max(last.elapsed() * IDLE_FACTOR);
                }
                break;
            }
        }
    }
}
