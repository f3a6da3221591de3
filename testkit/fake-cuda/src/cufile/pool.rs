//! The threads that execute the entries of batches, in no particular order.

use super::{batch::Batch, transfer::Transfer};
use crate::execution::stream::Jitter;
use std::{
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

const THREADS: u64 = 3;

/// An entry that waits for a thread.
pub(super) struct Job {
    pub(super) batch: Arc<Batch>,
    pub(super) transfer: Transfer,
    pub(super) cookie: usize,
}

struct Pool {
    jobs: Vec<Job>,
    is_started: bool,
}

static POOL: Mutex<Pool> = Mutex::new(Pool { jobs: Vec::new(), is_started: false });
static ARRIVED: Condvar = Condvar::new();

/// Hands entries to the threads, and starts those if need be.
pub(super) fn submit(jobs: Vec<Job>) -> io::Result<()> {
    let mut pool = pool();
    if !pool.is_started {
        for number in 0..THREADS {
            thread::Builder::new().name(format!("fake-cufile-{number}")).spawn(move || work(number))?;
        }
        pool.is_started = true;
    }
    pool.jobs.extend(jobs);
    ARRIVED.notify_all();
    Ok(())
}

/// Takes back the entries of a batch that no thread has begun.
pub(super) fn withdraw(batch: &Arc<Batch>) -> Vec<Job> {
    pool().jobs.extract_if(.., |job| Arc::ptr_eq(&job.batch, batch)).collect()
}

fn work(number: u64) {
    let mut jitter = Jitter::new(number);
    loop {
        let mut pool =
            ARRIVED.wait_while(pool(), |pool| pool.jobs.is_empty()).unwrap_or_else(PoisonError::into_inner);
        let chosen = jitter.below(pool.jobs.len() as u64) as usize;
        let Job { batch, transfer, cookie } = pool.jobs.swap_remove(chosen);
        drop(pool);
        jitter.delay();
        batch.finish(cookie, transfer.run());
    }
}

fn pool() -> MutexGuard<'static, Pool> {
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}
