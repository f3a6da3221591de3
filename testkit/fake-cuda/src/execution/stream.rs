//! Streams: each a thread that executes one operation after another, with no order between streams.

use super::{capture, context::Owner, event::Event, handles::Table, operation::Operation};
use crate::control::settings;
use std::{
    collections::VecDeque,
    io,
    ops::Range,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// All streams that were created and not destroyed; not the default ones of contexts.
pub(crate) static STREAMS: Table<Stream> = Table::new(0x97E0_0000_0000);

/// A stream of operations.
pub(crate) struct Stream {
    pub(crate) owner: Arc<Owner>,
    /// Tells streams apart in the trace.
    pub(crate) number: u64,
    kind: Kind,
    queue: Mutex<Queue>,
    arrived: Condvar,
    finished: Condvar,
}

/// Which order a stream is in with the legacy default stream of its context.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It is that stream.
    Legacy,
    /// Work on either waits for what was queued before on the other.
    Blocking,
    /// None.
    NonBlocking,
}

#[derive(Default)]
struct Queue {
    /// With the eras of their context.
    waiting: VecDeque<(u64, Operation)>,
    submitted: u64,
    completed: u64,
    /// The thread ends when nothing waits.
    closed: bool,
    /// Copies and kernels that wait are left out.
    abandoned: bool,
    /// The era of the last work that was left out because that had ended.
    left_out: Option<u64>,
}

/// Destroys what a context left behind, and says how many streams that were.
pub(crate) fn release_all(owner: &Arc<Owner>) -> u64 {
    let left = STREAMS.remove_if(|stream| Arc::ptr_eq(&stream.owner, owner));
    for stream in &left {
        stream.close();
    }
    left.len() as u64
}

impl Stream {
    pub(crate) fn start(owner: &Arc<Owner>, kind: Kind) -> io::Result<Arc<Stream>> {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let stream = Arc::new(Stream {
            owner: Arc::clone(owner),
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            kind,
            queue: Mutex::default(),
            arrived: Condvar::new(),
            finished: Condvar::new(),
        });
        let worker = Arc::clone(&stream);
        thread::Builder::new().name(format!("fake-cuda-{}", stream.number)).spawn(move || worker.run())?;
        owner.adopt(&stream);
        Ok(stream)
    }

    pub(crate) fn is_legacy(&self) -> bool {
        self.kind == Kind::Legacy
    }

    pub(crate) fn is_blocking(&self) -> bool {
        self.kind == Kind::Blocking
    }

    /// Queues an operation, behind those on other streams that it is in order with.
    pub(crate) fn push(&self, operation: Operation) {
        let Some(operation) = capture::take(self, operation) else { return };
        let is_ordered_with = |other: &Arc<Stream>| match self.kind {
            Kind::Legacy => other.is_blocking(),
            Kind::Blocking => other.is_legacy(),
            Kind::NonBlocking => false,
        };
        if self.kind != Kind::NonBlocking {
            for other in self.owner.live_streams().into_iter().filter(is_ordered_with) {
                let event = Event::new(&self.owner);
                let generation = event.record();
                if other.append(Operation::Record(Arc::clone(&event), generation)) {
                    self.append(Operation::Wait(event, generation));
                }
            }
        }
        self.append(operation);
    }

    /// Queues an operation, unless the stream has ended.
    fn append(&self, operation: Operation) -> bool {
        let mut queue = self.queue();
        // Within the lock, so that eras are in order.
        let era = self.owner.era();
        if queue.closed && queue.completed == queue.submitted {
            return false;
        }
        queue.waiting.push_back((era, operation));
        queue.submitted += 1;
        self.arrived.notify_one();
        true
    }

    /// Waits for all that was pushed so far.
    pub(crate) fn synchronize(&self) {
        let queue = self.queue();
        let goal = queue.submitted;
        let behind = |queue: &mut Queue| queue.completed < goal;
        drop(self.finished.wait_while(queue, behind).unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn is_idle(&self) -> bool {
        let queue = self.queue();
        queue.completed == queue.submitted
    }

    /// Whether it has yet to copy from or to a range of the device's memory, or to fill it.
    pub(super) fn has_work_with(&self, range: &Range<u64>) -> bool {
        self.queue().waiting.iter().any(|(_, operation)| operation.touches(range))
    }

    /// Ends the stream after what was pushed so far.
    pub(crate) fn close(&self) {
        self.queue().closed = true;
        self.arrived.notify_one();
    }

    /// Ends the stream after the operation that is under way.
    pub(crate) fn abandon(&self) {
        let mut queue = self.queue();
        (queue.closed, queue.abandoned) = (true, true);
        drop(queue);
        self.arrived.notify_one();
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.queue().abandoned
    }

    fn run(&self) {
        let mut jitter = Jitter::new(self.number);
        while let Some((era, operation)) = self.next() {
            jitter.delay();
            match operation {
                // Who sees the last event passed sees the stream idle.
                Operation::Record(event, generation) => {
                    let mut queue = self.queue();
                    let is_lost = queue.left_out.is_some_and(|era| !self.owner.was_reset_since(era));
                    if is_lost || self.owner.era() != era {
                        event.lose(generation);
                    } else {
                        event.pass(generation);
                    }
                    queue.completed += 1;
                }
                _ => {
                    let is_left_out = !operation.execute(era, self);
                    let mut queue = self.queue();
                    if is_left_out {
                        queue.left_out = Some(era);
                    }
                    queue.completed += 1;
                }
            }
            self.finished.notify_all();
        }
    }

    fn next(&self) -> Option<(u64, Operation)> {
        let idle = |queue: &mut Queue| queue.waiting.is_empty() && !queue.closed;
        let queue = self.queue();
        let mut queue = self.arrived.wait_while(queue, idle).unwrap_or_else(PoisonError::into_inner);
        queue.waiting.pop_front()
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Delays that look random and are the same in each run.
pub(crate) struct Jitter(u64);

impl Jitter {
    pub(crate) fn new(seed: u64) -> Jitter {
        Jitter(seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    /// Sleeps for up to as long as the settings say.
    pub(crate) fn delay(&mut self) {
        match settings().jitter_us {
            0 => (),
            most => thread::sleep(Duration::from_micros(self.below(most + 1))),
        }
    }

    /// A number below `bound`, which isn't 0.
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}
