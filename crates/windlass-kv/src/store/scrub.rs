//! Reads blocks in the background, at most so many bytes a second, to find damage before somebody asks for them.
#![forbid(unsafe_code)]

use super::{
    Core,
    housekeeping::Bell,
    verify::{self, PAGE},
};
use crate::{
    Priority, Verified,
    layout::{HEADER_LEN, Listed},
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// Time between rounds.
const ROUND: Duration = Duration::from_millis(100);

/// Reads own blocks, again and again, until the bell is rung. Others look after theirs.
pub(crate) fn run(core: &Arc<Core>, bell: &Bell) {
    let rate = core.options.scrub_bytes_per_second as f64;
    // Bytes that may be read now.
    let mut credit = 0.0;
    let mut last = Instant::now();
    let mut page: Vec<Listed> = Vec::new();
    let mut next = 0;
    while !bell.wait(ROUND) {
        // What was not read for lack of blocks is not made up for.
        credit = f64::min(credit + last.elapsed().as_secs_f64() * rate, rate);
        last = Instant::now();
        while credit > 0.0 && !bell.wait(Duration::ZERO) {
            let Some(block) = page.pop() else {
                next = core.layout.list(next, PAGE, &mut page).unwrap_or(0);
                if next == 0 && page.is_empty() {
                    break;
                }
                continue;
            };
            if block.is_own {
                verify::verify_one(core, &block, Priority::Idle, &mut Verified::default());
                credit -= (block.payload_len + HEADER_LEN as u64) as f64;
            }
        }
    }
}
