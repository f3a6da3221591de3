//! The daemon's threads: one for each priority looks for submissions, and others carry them out.
#![allow(unsafe_code)]

use crate::{
    faults::Faults,
    jobs::{Job, Jobs, Link, Running, Stage},
    mapping::NamedSemaphore,
    nodes::Nodes,
    registry::Registry,
    served::{Batch, ServedRing},
};
use hoistway_usrbio::{
    Direction, RingPriority,
    proto::{IoArgs, Sqe},
};
use std::{
    collections::VecDeque,
    fs, io,
    num::NonZero,
    os::fd::AsRawFd,
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Threads that carry out transfers: more than there are processors would only take turns.
const MOST_WORKERS: usize = 8;
const MOST_BATCHES_OF_A_RING: usize = 32;
const TICK: Duration = Duration::from_millis(50);
/// The bit by which a ring asks for errors instead of zeros.
const FORBID_READ_HOLES: u64 = 2;
const SLOW_FACTOR: u32 = 10;

/// In the order of their semaphores.
const PRIORITIES: [RingPriority; 3] = [RingPriority::High, RingPriority::Normal, RingPriority::Low];

/// Everything but the file system.
pub(crate) struct Engine {
    pub(crate) nodes: Nodes,
    pub(crate) registry: Registry,
    faults: Mutex<Faults>,
    semaphores: Mutex<Vec<Arc<NamedSemaphore>>>,
    jobs: Mutex<Jobs>,
    changed: Condvar,
    link: Link,
    transfers: AtomicU64,
    stopped: AtomicBool,
}

impl Engine {
    pub(crate) fn start(root: PathBuf, chunk_bytes: u32) -> io::Result<Arc<Self>> {
        let engine = Arc::new(Self {
            nodes: Nodes::new(root, chunk_bytes),
            registry: Registry::default(),
            faults: Mutex::default(),
            semaphores: Mutex::new(semaphores()?),
            jobs: Mutex::default(),
            link: Link::new(),
            changed: Condvar::new(),
            transfers: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
        });
        for position in 0..PRIORITIES.len() {
            let watcher = engine.clone();
            thread::Builder::new().name("usrbiod-watch".into()).spawn(move || watcher.watch(position))?;
        }
        let workers = thread::available_parallelism().map_or(1, NonZero::get).min(MOST_WORKERS);
        for _ in 0..workers {
            let worker = engine.clone();
            thread::Builder::new().name("usrbiod-work".into()).spawn(move || worker.work())?;
        }
        Ok(engine)
    }

    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.changed.notify_all();
        lock(&self.semaphores).clear();
    }

    pub(crate) fn faults(&self) -> Faults {
        *lock(&self.faults)
    }

    pub(crate) fn behave(&self, faults: Faults) {
        *lock(&self.faults) = faults;
        self.transfers.store(0, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Calls `answer` once files are spoken of, at once if they are.
    pub(crate) fn when_not_mute(self: &Arc<Self>, answer: impl FnOnce(&Self) + Send + 'static) {
        if !self.faults().mute {
            return answer(self);
        }
        let engine = self.clone();
        thread::spawn(move || {
            while engine.faults().mute && !engine.is_stopped() {
                thread::sleep(TICK);
            }
            answer(&engine);
        });
    }

    /// How many transfers there were since the faults were set.
    pub(crate) fn transfers(&self) -> u64 {
        self.transfers.load(Ordering::Relaxed)
    }

    /// Becomes another daemon, which knows no client.
    pub(crate) fn restart(&self) -> io::Result<()> {
        let fresh = semaphores()?;
        self.registry.clear();
        lock(&self.jobs).clear();
        *lock(&self.semaphores) = fresh;
        Ok(())
    }

    /// The names of the links to the semaphores, and where they point.
    pub(crate) fn submit_links(&self) -> Vec<(&'static str, PathBuf)> {
        let semaphores = lock(&self.semaphores);
        PRIORITIES
            .iter()
            .zip(semaphores.iter())
            .map(|(priority, one)| (priority.submit_link(), one.path().to_owned()))
            .collect()
    }

    fn watch(&self, position: usize) {
        wake_on_time();
        while !self.is_stopped() {
            let Some(semaphore) = lock(&self.semaphores).get(position).cloned() else { return };
            // Without a post there is no look, as in the original: a client that does not submit is to notice.
            if !semaphore.wait(TICK) {
                continue;
            }
            let priority = PRIORITIES[position];
            for (_, registration) in self.registry.all() {
                let Some(ring) = registration.ring.as_ref().filter(|ring| ring.key().priority == priority)
                else {
                    continue;
                };
                ring.take_batches(MOST_BATCHES_OF_A_RING).into_iter().for_each(|batch| self.admit(batch));
            }
        }
    }

    /// All transfers of a batch are under way from now on, or the first if they go one by one.
    fn admit(&self, batch: Batch) {
        let mut transfers: VecDeque<_> = batch.transfers().into();
        let running = Arc::new(Running::new(batch, transfers.len()));
        if self.faults().serial
            && let Some(first) = transfers.pop_front()
        {
            *lock(&running.queued) = std::mem::replace(&mut transfers, [first].into());
        }
        for (sqe, args) in transfers {
            self.begin(&running, sqe, args);
        }
    }

    /// A transfer is on its way to where the bytes lie.
    fn begin(&self, running: &Arc<Running>, sqe: Sqe, args: Option<IoArgs>) {
        let number = self.transfers.fetch_add(1, Ordering::Relaxed) + 1;
        let faults = self.faults();
        let slow = Faults::hits(number, faults.slow_every);
        let due = Instant::now() + faults.delay * if slow { SLOW_FACTOR } else { 1 };
        self.push(Job { running: running.clone(), sqe, due, stage: Stage::Begin { number, args } });
    }

    fn push(&self, job: Job) {
        lock(&self.jobs).push(job);
        self.changed.notify_one();
    }

    fn work(&self) {
        wake_on_time();
        while let Some(job) = self.next_job() {
            let Job { running, sqe, stage, .. } = job;
            match stage {
                Stage::Begin { number, args } => {
                    let (begun, ring) = (Instant::now(), &running.ring);
                    let result = args.ok_or(libc::EINVAL).and_then(|args| self.transfer(ring, &args, number));
                    let result = result.unwrap_or_else(|errno| -i64::from(errno));
                    match (u64::try_from(result), self.faults().bytes_per_second) {
                        (Ok(bytes), 1..) => {
                            let due = self.link.pass(begun, bytes, self.faults().bytes_per_second);
                            self.push(Job { running, sqe, due, stage: Stage::Finish(result) });
                        }
                        _ => self.finish(&running, sqe, result),
                    }
                }
                Stage::Finish(result) => self.finish(&running, sqe, result),
            }
        }
    }

    fn finish(&self, running: &Arc<Running>, sqe: Sqe, result: i64) {
        let next = lock(&running.queued).pop_front();
        if running.finish(sqe, result) {
            let position = PRIORITIES.iter().position(|one| *one == running.ring.key().priority);
            let semaphore = position.and_then(|position| lock(&self.semaphores).get(position).cloned());
            semaphore.inspect(|semaphore| semaphore.post());
        }
        if let Some((sqe, args)) = next {
            self.begin(running, sqe, args);
        }
    }

    fn next_job(&self) -> Option<Job> {
        let mut jobs = lock(&self.jobs);
        while !self.is_stopped() {
            let Faults { stall, reorder, .. } = self.faults();
            if !stall && let Some(job) = jobs.take_due(Instant::now(), reorder) {
                // Another worker has to take the other jobs.
                if !jobs.is_empty() {
                    self.changed.notify_one();
                }
                return Some(job);
            }
            let watched = if stall { None } else { jobs.watch() };
            let limit = watched.map_or(TICK, |due| due.saturating_duration_since(Instant::now()).min(TICK));
            jobs = self.changed.wait_timeout(jobs, limit).unwrap_or_else(PoisonError::into_inner).0;
            if let Some(due) = watched {
                jobs.unwatch(due);
            }
        }
        None
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Carries out one transfer: bytes, or an error's number.
    fn transfer(&self, ring: &ServedRing, args: &IoArgs, number: u64) -> Result<i64, i32> {
        let faults = self.faults();
        if Faults::hits(number, faults.error_every) {
            return Err(if faults.errno == 0 { libc::EREMOTEIO } else { faults.errno });
        }
        let buffer = self.registry.by_id(args.buffer).ok_or(libc::EINVAL)?;
        let memory = buffer.memory.as_ref().ok_or(libc::EINVAL)?;
        let len = usize::try_from(args.len).map_err(|_| libc::EINVAL)?;
        let end =
            args.buffer_offset.checked_add(len).filter(|&end| end <= memory.len()).ok_or(libc::EINVAL)?;
        let block = buffer.key.block_bytes;
        if block != 0 && len > 0 && args.buffer_offset / block != (end - 1) / block {
            return Err(libc::EINVAL);
        }
        // SAFETY: inside the mapping, as was just checked.
        let target = unsafe { memory.base().add(args.buffer_offset) };
        let file = self.nodes.file(args.inode).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        let reads = ring.key().direction == Direction::Read;
        let mut done = 0;
        while done < len {
            let offset = i64::try_from(args.file_offset + done).map_err(|_| libc::EINVAL)?;
            // SAFETY: `len` bytes at `target` are inside the mapping, whose holder, `buffer`, outlives the call.
            let result = unsafe {
                let place = target.add(done).as_ptr().cast();
                if reads {
                    libc::pread(file.as_raw_fd(), place, len - done, offset)
                } else {
                    libc::pwrite(file.as_raw_fd(), place, len - done, offset)
                }
            };
            match usize::try_from(result) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(_) => return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)),
            }
        }
        if reads {
            let data = before_last_hole(&file, args.file_offset, done);
            if ring.key().flags & FORBID_READ_HOLES != 0 && data < done {
                return Err(libc::ENODATA);
            }
            if faults.holes {
                done = data;
            }
            if faults.corrupt && done > 0 {
                // SAFETY: `done` bytes at `target` were just written.
                unsafe { *target.as_ptr() ^= 1 };
            }
        }
        if Faults::hits(number, faults.short_every) {
            done /= 2;
        }
        Ok(done as i64)
    }
}

/// How many of `len` bytes at `offset` come before the hole that they end in.
fn before_last_hole(file: &fs::File, offset: usize, len: usize) -> usize {
    use rustix::fs::{SeekFrom, seek};
    let (start, end) = (offset as u64, (offset + len) as u64);
    let mut data_end = start;
    let mut position = start;
    while position < end {
        match seek(file, SeekFrom::Data(position)) {
            Ok(data) if data < end => {
                position = seek(file, SeekFrom::Hole(data)).unwrap_or(end).min(end);
                data_end = position;
            }
            _ => break,
        }
    }
    (data_end - start) as usize
}

/// Has this thread's waits end when they should, rather than up to 50 microseconds later.
fn wake_on_time() {
    // Best effort: without it, delays are somewhat longer.
    let _ = rustix::thread::set_current_timer_slack(NonZero::new(1));
}

fn semaphores() -> io::Result<Vec<Arc<NamedSemaphore>>> {
    PRIORITIES.iter().map(|_| NamedSemaphore::create().map(Arc::new)).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
