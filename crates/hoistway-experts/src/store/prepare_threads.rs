//! A few threads that prepare units, first those that requests wait for.
#![forbid(unsafe_code)]

use crate::backing::Waits;
use hoistway_io::parallel::lock;
use std::{
    collections::VecDeque,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
};

/// Most threads at once.
const MOST: usize = 4;
/// Most of them that prepare units which no request waits for. They may wait for work of a device.
const MOST_OTHERS: usize = 2;

type Job = Box<dyn FnOnce() + Send>;

/// Threads, which end once nothing is left to do. Dropping this [ends](Self::end) them.
#[derive(Default)]
pub(super) struct PrepareThreads {
    threads: Waits,
    queue: Arc<Mutex<Queue>>,
}

/// What has not begun, by unit, and how many threads there are.
#[derive(Default)]
struct Queue {
    demand: VecDeque<(usize, Job)>,
    others: VecDeque<(usize, Job)>,
    threads: usize,
    /// Those that are at one of `others`.
    at_others: usize,
    /// Whether nothing is begun any more.
    is_over: bool,
}

impl PrepareThreads {
    /// Has `job` done for a unit, without a wait.
    ///
    /// # Errors
    /// The system's, if it has no thread and there is none. Then `job` is dropped.
    pub(super) fn start(
        &self,
        unit: usize,
        is_demand: bool,
        job: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let mut queue = lock(&self.queue);
        if queue.is_over {
            return Ok(());
        }
        let line = if is_demand { &mut queue.demand } else { &mut queue.others };
        line.push_back((unit, Box::new(job)));
        if queue.threads == MOST || !is_demand && queue.at_others == MOST_OTHERS {
            return Ok(());
        }
        let shared = self.queue.clone();
        match self.threads.start(move || work(&shared)) {
            Ok(()) => queue.threads += 1,
            Err(error) if queue.threads == 0 => {
                let line = if is_demand { &mut queue.demand } else { &mut queue.others };
                line.pop_back();
                return Err(error);
            }
            // Those that there are do it.
            Err(_) => {}
        }
        Ok(())
    }

    /// A request waits for a unit.
    pub(super) fn promote(&self, unit: usize) {
        let mut queue = lock(&self.queue);
        if let Some(place) = queue.others.iter().position(|(other, _)| *other == unit)
            && let Some(job) = queue.others.remove(place)
        {
            queue.demand.push_back(job);
            // All threads may be at others, or have found too many there.
            if queue.threads < MOST {
                let shared = self.queue.clone();
                if self.threads.start(move || work(&shared)).is_ok() {
                    queue.threads += 1;
                }
            }
        }
    }

    /// Waits for what the threads do, and forgets what they have not begun. What is started after that is dropped.
    pub(super) fn end(&self) {
        // In a child of fork, no thread unlocks the copy.
        if self.threads.are_own() {
            let mut queue = lock(&self.queue);
            queue.is_over = true;
            let left = (std::mem::take(&mut queue.demand), std::mem::take(&mut queue.others));
            drop(queue);
            drop(left);
            self.threads.wait();
        }
    }
}

impl Drop for PrepareThreads {
    fn drop(&mut self) {
        self.end();
    }
}

impl Queue {
    /// What is to be done next, and whether no request waits for it.
    fn next(&mut self) -> Option<(Job, bool)> {
        if let Some((_, job)) = self.demand.pop_front() {
            return Some((job, false));
        }
        if self.at_others == MOST_OTHERS {
            // Those threads do it.
            return None;
        }
        let (_, job) = self.others.pop_front()?;
        self.at_others += 1;
        Some((job, true))
    }
}

/// Does what is to be done, until nothing is left.
fn work(queue: &Mutex<Queue>) {
    let mut was_other = false;
    loop {
        let mut state = lock(queue);
        if was_other {
            state.at_others -= 1;
        }
        let Some((job, is_other)) = state.next() else {
            state.threads -= 1;
            return;
        };
        drop(state);
        was_other = is_other;
        // A panic was reported where it happened.
        _ = catch_unwind(AssertUnwindSafe(job));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    };

    #[test]
    fn few_threads_do_all_and_demand_comes_first() {
        let threads = PrepareThreads::default();
        let (began, starts) = mpsc::channel();
        let (open, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let most = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)));
        let job = |unit: usize| {
            let (began, gate, most) = (began.clone(), gate.clone(), most.clone());
            move || {
                most.1.fetch_max(most.0.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                began.send(unit).unwrap();
                // Until the other end is gone.
                _ = lock(&gate).recv();
                most.0.fetch_sub(1, Ordering::SeqCst);
            }
        };
        for unit in 0..20 {
            threads.start(unit, false, job(unit)).unwrap();
        }
        // Two are under way, whatever else waits.
        let mut first = [starts.recv().unwrap(), starts.recv().unwrap()];
        first.sort_unstable();
        assert_eq!(first, [0, 1]);
        // Demand has threads still.
        threads.start(100, true, job(100)).unwrap();
        assert_eq!(starts.recv().unwrap(), 100);
        threads.promote(19);
        assert_eq!(starts.recv().unwrap(), 19);
        threads.start(101, true, job(101)).unwrap();
        threads.promote(18);
        drop(open);
        let rest: Vec<usize> = (0..18).map(|_| starts.recv().unwrap()).collect();
        let place = |unit| rest.iter().position(|other| *other == unit).unwrap();
        // Each thread takes one of them before any other.
        assert!(place(101) < MOST && place(18) < MOST, "{rest:?}");
        drop(threads);
        assert!(most.1.load(Ordering::SeqCst) <= MOST);
    }

    #[test]
    fn what_has_not_begun_is_forgotten_with_the_threads() {
        let threads = PrepareThreads::default();
        let (began, starts) = mpsc::channel();
        let (open, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        for unit in 0..20 {
            let (began, gate) = (began.clone(), gate.clone());
            let job = move || {
                began.send(unit).unwrap();
                _ = lock(&gate).recv();
            };
            threads.start(unit, false, job).unwrap();
        }
        drop(began);
        starts.recv().unwrap();
        starts.recv().unwrap();
        let queue = threads.queue.clone();
        let dropped = std::thread::spawn(move || drop(threads));
        while !lock(&queue).others.is_empty() {
            std::thread::yield_now();
        }
        drop(open);
        dropped.join().unwrap();
        assert!(starts.recv().is_err());
    }

    #[test]
    fn a_panic_ends_no_thread() {
        let threads = PrepareThreads::default();
        let (told, hear) = mpsc::channel();
        for unit in 0..2 * MOST {
            threads.start(unit, true, || panic!("of a test")).unwrap();
        }
        threads.start(99, true, move || told.send(()).unwrap()).unwrap();
        hear.recv().unwrap();
    }
}
