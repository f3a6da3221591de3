//! Helpers for threads: parallel maps, locks, names and stacks.
#![forbid(unsafe_code)]

use once_cell::race::OnceNonZeroUsize;
use std::{
    num::NonZeroUsize,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

/// Locks data that every statement leaves consistent, so that a panic in another thread does no harm.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of a thread's stack. Set for each, as `RUST_MIN_STACK` may give others too little.
pub const STACK_BYTES: usize = 2 << 20;

/// Returns a builder of threads with this name, and a stack that any work fits in.
pub fn thread_named(name: &str) -> thread::Builder {
    thread::Builder::new().name(name.into()).stack_size(STACK_BYTES)
}

/// Calls `work` for each item on up to `threads` threads; answers in the order of the items.
pub fn map<T: Send, I: Sync>(items: &[I], threads: usize, work: impl Fn(&I) -> T + Sync) -> Vec<T> {
    map_positions(items.len(), threads, |position| work(&items[position]))
}

/// Like [`map`], but skips an item once an earlier one has failed.
///
/// # Errors
/// Returns the error of the first item, in order, that failed.
pub fn try_map<T: Send, E: Send, I: Sync>(
    items: &[I],
    threads: usize,
    work: impl Fn(&I) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let first_failed = AtomicUsize::new(usize::MAX);
    let answers = map_positions(items.len(), threads, |position| {
        // An item before it may be the first to fail.
        if position > first_failed.load(Ordering::Relaxed) {
            return None;
        }
        let answer = work(&items[position]);
        if answer.is_err() {
            first_failed.fetch_min(position, Ordering::Relaxed);
        }
        Some(answer)
    });
    answers.into_iter().flatten().collect()
}

fn map_positions<T: Send>(len: usize, threads: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    if len <= 1 || threads <= 1 {
        return (0..len).map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let take_some = || {
        let mut answers = Vec::new();
        loop {
            let position = next.fetch_add(1, Ordering::Relaxed);
            if position >= len {
                return answers;
            }
            answers.push((position, work(position)));
        }
    };
    let mut answers: Vec<(usize, T)> = thread::scope(|scope| {
        // As many threads as the system gives: this one does what is left.
        let workers: Vec<_> = (1..len.min(threads))
            .map_while(|_| thread_named("hoistway-map").spawn_scoped(scope, take_some).ok())
            .collect();
        let mut answers = take_some();
        for worker in workers {
            // A panic is a bug; it goes on in this thread rather than as a missing answer.
            answers.extend(worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        answers
    });
    answers.sort_by_key(|(position, _)| *position);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// Returns the number of cores that this process may use. Kept once known, as the answer takes a look at the cgroups. A child of
/// `fork` waits for no thread of its parent that looks.
pub fn cores() -> usize {
    static CORES: OnceNonZeroUsize = OnceNonZeroUsize::new();
    CORES.get_or_init(|| thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)).get()
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, AtomicUsize, Ordering},
        thread,
        time::{Duration, Instant},
    };

    #[test]
    fn answers_keep_the_order_of_the_items() {
        let items: Vec<usize> = (0..1000).collect();
        assert_eq!(super::map(&items, 7, |item| item * 2), (0..2000).step_by(2).collect::<Vec<_>>());
        assert!(super::map(&[] as &[usize], 7, |item| *item).is_empty());
    }

    #[test]
    fn the_first_failure_in_order_is_told_and_ends_the_work() {
        let items: Vec<usize> = (0..10_000).collect();
        for threads in [1, 7] {
            let calls = AtomicUsize::new(0);
            let work = |item: &usize| {
                calls.fetch_add(1, Ordering::Relaxed);
                if *item >= 20 { Err(*item) } else { Ok(*item) }
            };
            assert_eq!(super::try_map(&items, threads, work), Err(20));
            // Each thread fails at most once.
            assert!((21..=20 + threads).contains(&calls.into_inner()));
            let all = super::try_map(&items, threads, |item| Ok::<_, ()>(item + 1));
            assert_eq!(all, Ok((1..10_001).collect()));
        }
    }

    #[test]
    fn the_first_failure_in_order_is_told_if_a_later_item_fails_before() {
        let later_fails = AtomicBool::new(false);
        let work = |item: &usize| {
            if *item == 1 {
                later_fails.store(true, Ordering::Relaxed);
                return Err(1);
            }
            let deadline = Instant::now() + Duration::from_secs(60);
            while !later_fails.load(Ordering::Relaxed) {
                assert!(Instant::now() < deadline, "the other thread does not come to its item");
                thread::yield_now();
            }
            Err::<(), _>(0)
        };
        assert_eq!(super::try_map(&[0, 1], 2, work), Err(0));
    }
}
