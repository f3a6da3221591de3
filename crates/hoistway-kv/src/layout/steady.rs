//! The time by which blocks are deleted because they have expired: the wall clock, unless that jumps ahead of the monotonic
//! one. Loads believe the wall clock at once; a jump that is taken back has deleted nothing.
#![forbid(unsafe_code)]

use hoistway_io::parallel::lock;
use std::{sync::Mutex, time::Duration};

/// Seconds that the wall clock may gain in a moment without being doubted.
const SLACK_S: u32 = 60;
/// A wall clock that stays ahead for this long is right.
const DOUBT: Duration = Duration::from_secs(600);

/// The steady clock.
#[derive(Debug, Default)]
pub(super) struct Steady(Mutex<Option<State>>);

#[derive(Clone, Copy, Debug)]
struct State {
    /// The wall clock when it was last believed, and the monotonic one then.
    believed: (u32, Duration),
    /// Since when the wall clock is ahead.
    ahead_since: Option<Duration>,
}

impl Steady {
    /// The time, where the wall clock says `wall`.
    pub(super) fn now(&self, wall: u32, monotonic: Duration) -> u32 {
        let mut state = lock(&self.0);
        let known = *state.get_or_insert(State { believed: (wall, monotonic), ahead_since: None });
        let (believed, then) = known.believed;
        let passed = monotonic.saturating_sub(then).as_secs();
        let expected = believed.saturating_add(u32::try_from(passed).unwrap_or(u32::MAX));
        let since = known.ahead_since.unwrap_or(monotonic);
        let is_ahead = wall > expected.saturating_add(SLACK_S);
        if is_ahead && monotonic.saturating_sub(since) < DOUBT {
            *state = Some(State { ahead_since: Some(since), ..known });
            return expected;
        }
        *state = Some(State { believed: (wall, monotonic), ahead_since: None });
        wall
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_jump_that_is_taken_back_was_never_believed() {
        let clock = Steady::default();
        assert_eq!(clock.now(1000, at(0)), 1000);
        assert_eq!(clock.now(1010, at(10)), 1010);
        assert_eq!(clock.now(90_000, at(20)), 1020);
        assert_eq!(clock.now(90_300, at(320)), 1320);
        assert_eq!(clock.now(1330, at(330)), 1330);
        assert_eq!(clock.now(1900, at(900)), 1900);
    }

    #[test]
    fn a_clock_that_stays_ahead_is_believed_in_time() {
        let clock = Steady::default();
        assert_eq!(clock.now(1000, at(0)), 1000);
        assert_eq!(clock.now(90_000, at(1)), 1001);
        assert_eq!(clock.now(90_599, at(600)), 1600);
        assert_eq!(clock.now(90_600, at(601)), 90_600);
        assert_eq!(clock.now(90_601, at(602)), 90_601);
    }

    #[test]
    fn small_steps_and_steps_back_are_believed_at_once() {
        let clock = Steady::default();
        assert_eq!(clock.now(1000, at(0)), 1000);
        assert_eq!(clock.now(1060, at(0)), 1060);
        assert_eq!(clock.now(500, at(1)), 500);
    }
}
