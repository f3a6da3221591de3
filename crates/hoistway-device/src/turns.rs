//! Who calls the driver, where calls take long: to pin a window, or to allocate much, holds up every other call, as drivers do one
//! at a time.
#![forbid(unsafe_code)]

use std::{
    fmt, mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

type Work = Box<dyn FnOnce() + Send>;

/// Gives each caller of a driver its turn.
#[derive(Default)]
pub(crate) struct Turns {
    state: Mutex<State>,
    /// Another turn may begin.
    next: Condvar,
}

#[derive(Default)]
struct State {
    /// The turns that were asked for, and those that are over: the others go in the order in which they were asked for.
    asked: u64,
    over: u64,
    /// What was left to the thread whose turn it is.
    left: Vec<Work>,
}

impl Turns {
    /// Makes long calls when it is this thread's turn, and short ones then that were left to it meanwhile.
    pub(crate) fn take<T>(&self, long: impl FnOnce() -> T) -> T {
        let mut state = self.state();
        let number = state.asked;
        state.asked += 1;
        let waits = |state: &mut State| state.over < number;
        drop(self.next.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner));
        let _turn = Turn(self);
        long()
    }

    /// Makes a short call: now, or after the long ones of a thread whose turn it is, on that thread.
    pub(crate) fn between(&self, short: impl FnOnce() + Send + 'static) {
        let mut state = self.state();
        if state.asked > state.over {
            return state.left.push(Box::new(short));
        }
        drop(state);
        short();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Kept consistent by every statement, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Turn<'a>(&'a Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        loop {
            let mut state = self.0.state();
            let left = mem::take(&mut state.left);
            if left.is_empty() {
                state.over += 1;
                break;
            }
            drop(state);
            for short in left {
                // It is another thread's, whose fault is none of this one. It has told the panic already, and to drop what it threw may
                // panic too.
                if let Err(thrown) = catch_unwind(AssertUnwindSafe(short)) {
                    mem::forget(thrown);
                }
            }
        }
        self.0.next.notify_all();
    }
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turns").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::mpsc, thread};

    #[test]
    fn short_calls_are_made_at_once_unless_it_is_anothers_turn() {
        let (turns, (tells, hears)) = (Turns::default(), mpsc::channel());
        let tell = |what: &'static str| {
            let tells = tells.clone();
            move || tells.send(what).unwrap()
        };
        turns.between(tell("before"));
        assert_eq!(hears.try_recv(), Ok("before"));
        turns.take(|| {
            thread::scope(|scope| {
                scope.spawn(|| [tell("first"), tell("second")].map(|short| turns.between(short)));
            });
            assert!(hears.try_recv().is_err(), "it would wait for the long call");
        });
        assert_eq!(hears.try_iter().collect::<Vec<_>>(), ["first", "second"]);
    }

    #[test]
    fn what_was_left_is_done_although_calls_panic() {
        for long_panics in [false, true] {
            let (turns, (tells, hears)) = (Turns::default(), mpsc::channel());
            let long = || {
                turns.between(|| panic!("the short call, for the test"));
                turns.between(move || tells.send(()).unwrap());
                assert!(!long_panics, "the long call, for the test");
            };
            assert_eq!(catch_unwind(AssertUnwindSafe(|| turns.take(long))).is_err(), long_panics);
            assert!(hears.try_recv().is_ok());
            turns.take(|| ());
        }
    }

    #[test]
    fn turns_come_one_after_the_other() {
        let (turns, (tells, hears)) = (Turns::default(), mpsc::channel());
        thread::scope(|scope| {
            turns.take(|| {
                scope.spawn(|| turns.take(|| tells.send("second").unwrap()));
                while turns.state().asked < 2 {
                    thread::yield_now();
                }
                assert!(hears.try_recv().is_err());
                tells.send("first").unwrap();
            });
        });
        assert_eq!(hears.try_iter().collect::<Vec<_>>(), ["first", "second"]);
    }
}
