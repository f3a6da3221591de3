//! Engines whose files and lanes are in memory: what their threads do to each other, and to an order that ends meanwhile.
//!
//! With `--cfg shuttle`, each test tries `HOISTWAY_MODEL_ITERATIONS` orders of threads. All but those of devices run under Miri, too.
#![allow(unsafe_code)]

use super::{
    DeviceLine, Engine, EngineOwner, Failure, InCopy, OpenRoute, Order, Placed, queue_of, routes::Takers,
    scheduler, serve,
};
use crate::{
    ByteRange, Cancel, DeviceId, Error, Result,
    device::{CopyStream, Device, DeviceMemory},
    memory::{self, Fill, Slot, SlotKind, Slots},
    parallel::lock,
    plan::Transfer,
    report::{Account, Onward, Tally},
    route::{
        Access, Buffer, CarriedRead, DirectIo, Done, Lane, Part, ReadLane, ReadOp, Route, Unavailable,
        member::{CacheFacts, Demand, Facts, Landing, Member, Share, Verdict},
    },
    source::{Bytes, Source},
};
use hoistway_io::{
    executor::{Charge, Operation, Patience, Reason, Submission},
    lane::Progress,
    memory::SharedMemory,
    sync::{Mutex as Lock, MutexGuard as Locked, spawn_scoped, thread},
};
use std::{
    io,
    ptr::NonNull,
    slice,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU8, Ordering},
    },
};

/// Bytes of a read: more than a block, so that half of one counts.
const LEN: u64 = 8192;
const SLOTS: usize = 2;

/// Tries a test, with the locks of shuttle in many orders of threads.
fn check(test: impl Fn() + Send + Sync + 'static) {
    #[cfg(not(shuttle))]
    test();
    #[cfg(shuttle)]
    {
        use shuttle::{
            Config, Runner,
            scheduler::{PctScheduler, RandomScheduler},
        };
        let iterations = std::env::var("HOISTWAY_MODEL_ITERATIONS").ok().and_then(|count| count.parse().ok());
        let iterations = iterations.unwrap_or(300);
        let mut config = Config::new();
        config.stack_size = 1 << 20;
        let (test, again) = (Arc::new(test), config.clone());
        let first = test.clone();
        Runner::new(RandomScheduler::new(iterations), config).run(move || first());
        Runner::new(PctScheduler::new(3, iterations), again).run(move || test());
    }
}

/// What the lanes of a route do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Script {
    /// They make reads.
    Work,
    /// They bring the first half of each, as a cache may.
    HoldHalf,
    /// After so many reads of one, the route gives up.
    GiveUp(usize),
    /// After so many reads, they fail.
    Fail(usize),
}

#[derive(Clone, Copy, Debug)]
struct TestRoute {
    route: Route,
    script: Script,
    threads: usize,
    depth: usize,
    landing: Landing,
}

const POOL: TestRoute =
    TestRoute { route: Route::Threads, script: Script::Work, threads: 2, depth: 1, landing: Landing::Any };
const CACHE: TestRoute = TestRoute { route: Route::Cached, script: Script::HoldHalf, ..POOL };
const RING: TestRoute =
    TestRoute { route: Route::IoUring, script: Script::GiveUp(1), threads: 2, depth: 2, ..POOL };
/// Its reads pass slots, of which there are fewer than its lanes hold.
const SHARED: TestRoute = TestRoute { script: Script::Work, landing: Landing::Shared, ..RING };

impl Member for TestRoute {
    fn facts(&self) -> Facts {
        let cache = CacheFacts { is_seen: false, ..CacheFacts::PAGES };
        let cache = (self.script == Script::HoldHalf).then_some(cache);
        Facts { landing: self.landing, cache, ..Facts::of(self.route, "hoistway-test") }
    }

    fn add(&self, _: &Arc<dyn Source>, _: Access) -> Result<bool, Unavailable> {
        Ok(true)
    }

    fn share(&self, _: &Demand<'_>) -> Share {
        Share { threads: self.threads, depth: (self.depth, self.depth), slots: 0, slot_bytes: 0 }
    }

    fn lane(&self, depth: usize) -> Result<Box<ReadLane>, Unavailable> {
        Ok(Box::new(TestLane { script: self.script, capacity: depth, reads: Vec::new(), made: 0 }))
    }

    fn verdict(&self, error: &io::Error, _: Progress) -> Verdict {
        match error.kind() {
            io::ErrorKind::Unsupported => Verdict::GiveUp(Unavailable::new("it was told to", "")),
            _ => Verdict::OfRead,
        }
    }
}

struct TestLane {
    script: Script,
    capacity: usize,
    reads: Vec<CarriedRead>,
    made: usize,
}

impl Lane<CarriedRead> for TestLane {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn in_flight(&self) -> usize {
        self.reads.len()
    }

    fn push(&mut self, op: CarriedRead) {
        assert!(self.reads.len() < self.capacity);
        self.reads.push(op);
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        thread::yield_now();
        self.made += 1;
        if matches!(self.script, Script::Fail(after) if self.made > after) {
            return Err(io::Error::other("it tells nothing any more"));
        }
        let Some(mut op) = self.reads.pop() else { return Ok(()) };
        let result = match self.script {
            Script::GiveUp(after) if self.made > after => Err(io::ErrorKind::Unsupported.into()),
            Script::HoldHalf => read(&mut op, LEN / 2),
            _ => read(&mut op, LEN),
        };
        done.push(Done { op, result });
        Ok(())
    }
}

fn read(op: &mut ReadOp, most: u64) -> io::Result<usize> {
    let Progress { offset, position, len, .. } = op.progress;
    let mut bytes = vec![0; len.min(most as usize)];
    let count = op.source.read_at(&mut bytes, offset, &op.cancel)?;
    match op.buffer.slot() {
        Some(Some(slot)) if slot.is_shared() => {
            slot.copy_from(position, &bytes[..count]).map_err(io::Error::other)?;
        }
        _ => op.buffer.target(op.progress)?[..count].copy_from_slice(&bytes[..count]),
    }
    Ok(count)
}

/// Slots that are not mapped, which Miri could not do.
#[derive(Debug)]
struct Heap(Box<[AtomicU8]>);

impl Heap {
    fn of(&self, slot: usize, offset: usize, len: usize) -> &[AtomicU8] {
        let start = slot * LEN as usize + offset;
        &self.0[start..start + len]
    }
}

// SAFETY: the bytes live as long as the box.
unsafe impl SharedMemory for Heap {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn address(&self, offset: usize) -> NonNull<u8> {
        NonNull::from(&self.0[offset..]).cast()
    }

    fn copy_to(&self, slot: usize, offset: usize, bytes: &mut [u8]) -> bool {
        let from = self.of(slot, offset, bytes.len());
        bytes.iter_mut().zip(from).for_each(|(to, from)| *to = from.load(Ordering::Relaxed));
        true
    }

    fn copy_from(&self, slot: usize, offset: usize, bytes: &[u8]) -> bool {
        let to = self.of(slot, offset, bytes.len());
        bytes.iter().zip(to).for_each(|(from, to)| to.store(*from, Ordering::Relaxed));
        true
    }

    fn is_lent(&self, _: usize) -> bool {
        false
    }
}

/// The memory that an order fills.
struct Memory(NonNull<[u8]>);

impl Memory {
    fn new(len: usize) -> Self {
        Self(NonNull::from(Box::leak(vec![0; len].into_boxed_slice())))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: what filled it is gone, and it came from a box.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// Where an order panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Panics {
    Never,
    AsReadsArrive,
    AsCopiesEnd,
}

struct TestOrder {
    engine: Engine,
    fill: Fill,
    source: Arc<dyn Source>,
    reads: usize,
    cancel: Cancel,
    tally: Mutex<Tally>,
    state: Lock<State>,
    panics: Panics,
    device: Option<(DeviceLine, DeviceMemory)>,
}

#[derive(Default)]
struct State {
    whole: usize,
    error: Option<Error>,
    /// How it has ended, and how many of its reads were there then.
    ends: Vec<(bool, usize)>,
    /// Bytes of reads that were complete before they were accounted for.
    missing_bytes: u64,
}

impl TestOrder {
    fn state(&self) -> Locked<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes_by(&self, route: Route) -> u64 {
        let tally = lock(&self.tally);
        tally.carriers.iter().filter(|own| own.route == route).map(|own| own.tensor_bytes).sum()
    }

    fn bytes_done(&self) -> u64 {
        lock(&self.tally).carriers.iter().map(|own| own.tensor_bytes).sum()
    }
}

impl Order for TestOrder {
    fn chosen(&self) -> (Route, DirectIo) {
        self.engine.chosen
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        lock(&self.tally)
    }

    fn name_at(&self, item: usize, _: u64) -> Option<String> {
        Some(format!("t{item}"))
    }

    fn delivered_bytes(&self, _: usize, range: ByteRange) -> u64 {
        range.len()
    }

    fn onward(&self, _: usize) -> Onward {
        if self.device.is_some() { Onward::ToDevice } else { Onward::Stay }
    }

    fn may_go_on(&self, _: &Part) -> Result<(), Failure> {
        if self.cancel.is_cancelled() { Err(Reason::Cancelled.into()) } else { Ok(()) }
    }

    fn begins(&self, _: &mut Part, buffer: &mut Buffer, facts: &Facts, _: Access) -> Result<()> {
        buffer.set_staged(facts.landing == Landing::Shared);
        Ok(())
    }

    fn check_arrived(&self, _: &Part, check: &dyn Fn() -> Result<()>) -> Result<()> {
        assert!(self.panics != Panics::AsReadsArrive, "for the test");
        check()
    }

    fn place(&self, part: &Part, buffer: &mut Buffer) -> Result<Placed> {
        let len = part.range.len();
        match buffer {
            Buffer::InPlace(_) => Ok(Placed::Here(0)),
            Buffer::Through { .. } => {
                buffer.fill_from_slot(ByteRange::at(0, len), len)?;
                buffer.give_slot_back();
                Ok(Placed::Here(len))
            }
            Buffer::Staged { .. } => Ok(Placed::InSlot(buffer.take_slot()?)),
        }
    }

    fn copy_on(&self, slot: Slot, read: InCopy) {
        let Some((line, memory)) = &self.device else { return read.end(Ok(())) };
        let transfer = Transfer::Linear { source: 0, arena: 0, destination: 0, len: LEN };
        // SAFETY: the slot is full and as long as the memory, whose bytes are not read.
        unsafe { line.send(slot, vec![transfer], (Arc::new([memory.address()]), Vec::new()), read) }
    }

    fn complete(&self, _: &Part, buffer: Buffer) -> Result<()> {
        assert!(self.panics != Panics::AsCopiesEnd, "for the test");
        if let Buffer::InPlace(region) | Buffer::Through { region, .. } = buffer {
            self.fill.complete(region, |_, _| ())?;
        }
        let mut state = self.state();
        state.whole += 1;
        let whole_bytes = state.whole as u64 * LEN;
        state.missing_bytes += whole_bytes.saturating_sub(self.bytes_done());
        Ok(())
    }

    fn note_delivered(&self, _: &Part, _: &Account) {}

    fn failed(&self, error: Error) -> Failure {
        self.fail(error);
        Reason::Cancelled.into()
    }

    fn ended(&self, _: usize, result: Result<(), Failure>) {
        // Each read has the source, and so has the order.
        let there = Arc::strong_count(&self.source) - 1;
        self.state().ends.push((result.is_ok(), there));
    }
}

impl EngineOwner for TestOrder {
    fn fail(&self, error: Error) {
        self.state().error.get_or_insert(error);
        self.cancel.cancel();
        self.engine.close();
    }

    fn lost_reads(&self, _: Option<u64>, source: io::Error) -> Error {
        Error::System { operation: "waiting for reads", source }
    }
}

/// An order, and what its reads fill.
struct Bench {
    order: Arc<TestOrder>,
    memory: Memory,
    content: Arc<[u8]>,
}

impl Bench {
    fn new<const N: usize>(routes: [TestRoute; N], reads: usize, panics: Panics) -> Self {
        let heap: Arc<dyn SharedMemory> =
            Arc::new(Heap((0..SLOTS * LEN as usize).map(|_| AtomicU8::new(0)).collect()));
        let slots =
            Slots::new(SLOTS, LEN as usize, SlotKind::Shared { memory: &heap, device: None }).unwrap();
        Self::with(routes, reads, panics, slots, None)
    }

    fn with<const N: usize>(
        routes: [TestRoute; N],
        reads: usize,
        panics: Panics,
        slots: Slots,
        device: Option<(DeviceLine, DeviceMemory)>,
    ) -> Self {
        let len = reads * LEN as usize;
        let content: Arc<[u8]> = (0..len).map(|at| (at / 5) as u8 ^ (at >> 12) as u8).collect();
        let source: Arc<dyn Source> = Arc::new(Bytes::new(content.clone()));
        let memory = Memory::new(len);
        // SAFETY: a bench drops its order, and all that fills the memory, before the memory.
        let arena = unsafe { memory::borrow(memory.0.cast(), len) };
        let place = |item: usize| ByteRange::at(item as u64 * LEN, LEN).unwrap();
        let writes: Vec<_> = (0..reads).map(place).collect();
        let (fill, regions) =
            Fill::new(arena, [(0, ByteRange::at(0, len as u64).unwrap())], &writes).unwrap();
        let routes = routes.map(|route| {
            let share =
                Share { threads: route.threads, depth: (route.depth, route.depth), slots: 0, slot_bytes: 0 };
            OpenRoute::new(Arc::new(route), share)
        });
        let engine = Engine {
            chosen: (Route::Auto, DirectIo::Never),
            scheduler: scheduler(N),
            patience: if device.is_some() { Patience::None } else { Patience::UntilOver },
            routes: routes.into(),
            takers: (0..reads).map(|_| Takers::of(0..N)).collect(),
            slots,
            most_copiers: (1, 1),
            copiers: Default::default(),
            #[cfg(feature = "fault-injection")]
            faults: None,
        };
        let is_to_device = device.is_some();
        let order = Arc::new(TestOrder {
            engine,
            fill,
            source: source.clone(),
            reads,
            cancel: Cancel::default(),
            tally: Mutex::default(),
            state: Lock::new(State::default()),
            panics,
            device,
        });
        let operation = |(item, region)| {
            let (order, source, cancel) = (order.clone(), source.clone(), order.cancel.clone());
            let buffer = if is_to_device { Buffer::SLOT } else { Buffer::InPlace(region) };
            let content = ReadOp::new(order, (item, writes[item]), source, Access::Buffered, buffer, cancel);
            Operation { queue: queue_of(0), charge: Charge::of_bytes(LEN), order: item as u64, content }
        };
        let operations = regions.into_iter().enumerate().map(operation).collect();
        let owner: Arc<dyn Order> = order.clone();
        assert!(order.engine.scheduler.submit(Submission::new((owner, 0), operations)).is_ok());
        order.engine.scheduler.seal();
        drop(source);
        Self { order, memory, content }
    }

    /// Has threads serve the routes until all is over, while this one does something.
    fn run(self, meanwhile: impl FnOnce(&TestOrder)) -> Self {
        let order = &*self.order;
        thread::scope(|scope| {
            for (number, route) in order.engine.routes.iter().enumerate() {
                let threads = if order.engine.will_serve(number) { route.share.threads } else { 0 };
                for _ in 0..threads {
                    spawn_scoped(scope, "hoistway-test", move || serve(&order.engine, order, number))
                        .unwrap();
                }
            }
            meanwhile(order);
        });
        self
    }

    /// Fails unless the order has ended once, without reads, and has all of its bytes, or why not.
    fn assert_over(&self) -> bool {
        let order = &self.order;
        let state = order.state();
        let [(is_whole, there)] = state.ends[..] else { panic!("it has ended so: {:?}", state.ends) };
        assert_eq!((there, state.missing_bytes), (0, 0));
        let figures = order.engine.scheduler.figures();
        assert_eq!((figures.groups, figures.waiting, figures.in_flight), (0, 0, 0));
        if is_whole {
            assert_eq!((state.whole, order.bytes_done()), (order.reads, order.reads as u64 * LEN));
            // SAFETY: all reads have ended.
            let bytes =
                unsafe { slice::from_raw_parts(self.memory.0.as_ptr().cast::<u8>(), self.memory.0.len()) };
            assert!(*bytes == *self.content);
        } else {
            assert!(state.error.is_some());
        }
        drop(state);
        // Nothing that the order has keeps it.
        assert_eq!(Arc::strong_count(order), 1);
        is_whole
    }
}

#[test]
fn what_a_cache_lacks_is_read_by_the_next_route() {
    check(|| {
        let bench = Bench::new([CACHE, POOL], 4, Panics::Never).run(|_| ());
        assert!(bench.assert_over());
        let halves = 2 * LEN;
        assert_eq!(
            [Route::Cached, Route::Threads].map(|route| bench.order.bytes_by(route)),
            [halves, halves]
        );
    });
}

#[test]
fn a_route_that_gives_up_hands_all_its_reads_on() {
    check(|| {
        let bench = Bench::new([RING, POOL], 5, Panics::Never).run(|_| ());
        assert!(bench.assert_over());
        assert!(lock(&bench.order.tally).refused.iter().any(|own| own.why.reason == "it was told to"));
    });
}

/// Else each could wait for what another has in its lane.
#[test]
fn a_thread_with_reads_in_its_lane_waits_for_no_slot() {
    check(|| assert!(Bench::new([SHARED], 5, Panics::Never).run(|_| ()).assert_over()));
}

#[test]
fn a_lane_that_fails_ends_its_order_once() {
    check(|| {
        for after in 0..2 {
            let failing = TestRoute { script: Script::Fail(after), ..POOL };
            // Each thread has a lane of its own, and there are more reads than these make.
            let bench = Bench::new([failing], 5, Panics::Never).run(|_| ());
            assert!(!bench.assert_over());
            assert!(matches!(bench.order.state().error, Some(Error::System { .. })));
        }
    });
}

#[test]
fn an_order_ends_once_that_is_cancelled_while_its_routes_read_give_up_or_fail() {
    check(|| {
        let cancel = |order: &TestOrder| order.fail(Error::Cancelled);
        let failing = TestRoute { script: Script::Fail(1), ..POOL };
        Bench::new([CACHE, POOL], 3, Panics::Never).run(cancel).assert_over();
        Bench::new([RING, POOL], 3, Panics::Never).run(cancel).assert_over();
        Bench::new([SHARED], 4, Panics::Never).run(cancel).assert_over();
        Bench::new([failing], 3, Panics::Never).run(cancel).assert_over();
    });
}

/// Its memory is the caller's again once the order has ended.
#[test]
#[cfg(not(shuttle))]
fn a_read_whose_order_panics_is_gone_before_it_ends() {
    let bench = Bench::new([POOL], 1, Panics::AsReadsArrive).run(|_| ());
    assert_eq!(bench.order.state().ends, [(false, 0)]);
}

/// The copies have their order, which has the line to the device, which has the copies.
#[test]
#[cfg(all(feature = "toy-device", not(shuttle)))]
#[cfg_attr(miri, ignore = "slots are mapped")]
fn copies_that_no_thread_waits_for_any_more_do_not_keep_their_order() {
    let device = Device::open(DeviceId::Toy(0)).unwrap();
    let queue = CopyStream::new(&device).unwrap();
    let slots = Slots::new(SLOTS, LEN as usize, SlotKind::Pinned(&device, None)).unwrap();
    let line = DeviceLine::new(queue, None, false).unwrap();
    let memory = DeviceMemory::new(&device, LEN).unwrap();
    let waiter = line.waiter();
    let bench = Bench::with([POOL], SLOTS, Panics::AsCopiesEnd, slots, Some((line, memory)));
    serve(&bench.order.engine, &*bench.order, 0);
    // It panics at the end of the first, and the others wait.
    assert!(thread::spawn(move || waiter.serve(|_| ())).join().is_err());
    assert_eq!((bench.order.state().ends.len(), Arc::strong_count(&bench.order)), (1, 1));
}

/// An order that is asked nothing.
struct NoOrder(Mutex<Tally>);

impl Order for NoOrder {
    fn chosen(&self) -> (Route, DirectIo) {
        Default::default()
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        lock(&self.0)
    }

    fn name_at(&self, _: usize, _: u64) -> Option<String> {
        None
    }

    fn delivered_bytes(&self, _: usize, range: ByteRange) -> u64 {
        range.len()
    }

    fn onward(&self, _: usize) -> Onward {
        Onward::Stay
    }

    fn may_go_on(&self, _: &Part) -> Result<(), Failure> {
        Ok(())
    }

    fn begins(&self, _: &mut Part, _: &mut Buffer, _: &Facts, _: Access) -> Result<()> {
        Ok(())
    }

    fn place(&self, _: &Part, _: &mut Buffer) -> Result<Placed> {
        Ok(Placed::Here(0))
    }

    fn copy_on(&self, _: Slot, read: InCopy) {
        read.end(Ok(()));
    }

    fn complete(&self, _: &Part, _: Buffer) -> Result<()> {
        Ok(())
    }

    fn note_delivered(&self, _: &Part, _: &Account) {}

    fn failed(&self, error: Error) -> Failure {
        Failure::OfRead(error)
    }

    fn ended(&self, _: usize, _: Result<(), Failure>) {}
}

/// A read of no bytes, for tests of lanes.
pub(crate) fn lone_read() -> CarriedRead {
    let (order, source) = (Arc::new(NoOrder(Mutex::default())), Arc::new(Bytes::new(Vec::new())));
    let (wanted, cancel) = ((0, ByteRange::default()), Cancel::default());
    CarriedRead::alone(ReadOp::new(order, wanted, source, Access::Buffered, Buffer::SLOT, cancel))
}
