//! A program's own work on a device beside a store: what is queued there sees the bytes that it was queued for, and what waits
//! for it is not the store.

use crate::{
    kit::{LONG, Model, SHORT, budget_of, bytes_of, until},
    layers,
    stand_in::{STAND_IN, Turn},
};
use hoistway::{DeviceId, read::ReaderOptions};
use hoistway_device::{CopyStream, Device, DeviceMemory};
use hoistway_experts::{
    Error, ExpertId,
    backing::{Backing, External, ExternalPlace},
    catalog::{Part, Unit},
    layers::LayerOptions,
    store::Store,
};
use std::{
    ffi::c_void,
    ptr,
    sync::{Arc, Condvar, Mutex, mpsc},
    thread,
};

type Handle = *mut c_void;

/// A stream of the program's on the first device, in no order with the default one, and the context that it is of.
pub(crate) struct Work {
    context: Handle,
    pub(crate) stream: Handle,
}

/// What a stream waits for.
pub(crate) type Gate = Arc<(Mutex<bool>, Condvar)>;

impl Work {
    pub(crate) fn new() -> Self {
        let retain: unsafe extern "C" fn(*mut Handle, i32) -> i32 =
            STAND_IN.function("cuDevicePrimaryCtxRetain");
        let create: unsafe extern "C" fn(*mut Handle, u32) -> i32 = STAND_IN.function("cuStreamCreate");
        let mut work = Self { context: ptr::null_mut(), stream: ptr::null_mut() };
        // SAFETY: of these signatures in the driver.
        unsafe { assert_eq!(retain(&mut work.context, 0), 0) };
        let mut stream = ptr::null_mut();
        // SAFETY: as above.
        work.with(|| unsafe { assert_eq!(create(&mut stream, 1), 0) });
        work.stream = stream;
        work
    }

    /// Calls the driver with the context current.
    fn with(&self, call: impl FnOnce()) {
        let push: unsafe extern "C" fn(Handle) -> i32 = STAND_IN.function("cuCtxPushCurrent_v2");
        let pop: unsafe extern "C" fn(*mut Handle) -> i32 = STAND_IN.function("cuCtxPopCurrent_v2");
        // SAFETY: of these signatures in the driver.
        unsafe { assert_eq!(push(self.context), 0) };
        call();
        // SAFETY: as above.
        unsafe { assert_eq!(pop(&mut ptr::null_mut()), 0) };
    }

    /// Holds the stream up until the gate is opened.
    pub(crate) fn gate(&self) -> Gate {
        unsafe extern "C" fn wait(gate: Handle) {
            // SAFETY: given away below, once.
            let gate = unsafe { Arc::from_raw(gate.cast::<(Mutex<bool>, Condvar)>().cast_const()) };
            drop(gate.1.wait_while(gate.0.lock().unwrap(), |is_open| !*is_open).unwrap());
        }
        type Function = unsafe extern "C" fn(Handle);
        let launch: unsafe extern "C" fn(Handle, Function, Handle) -> i32 =
            STAND_IN.function("cuLaunchHostFunc");
        let gate = Gate::default();
        let argument = Arc::into_raw(gate.clone()).cast_mut().cast();
        // SAFETY: of this signature in the driver.
        self.with(|| unsafe { assert_eq!(launch(self.stream, wait, argument), 0) });
        gate
    }

    /// Queues a copy on the device.
    pub(crate) fn copy(&self, to: u64, of: u64, len: usize) {
        let copy: unsafe extern "C" fn(u64, u64, usize, Handle) -> i32 =
            STAND_IN.function("cuMemcpyDtoDAsync_v2");
        // SAFETY: of this signature in the driver; the memory outlives the copy.
        self.with(|| unsafe { assert_eq!(copy(to, of, len, self.stream), 0) });
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let release: unsafe extern "C" fn(i32) -> i32 = STAND_IN.function("cuDevicePrimaryCtxRelease_v2");
        let destroy: unsafe extern "C" fn(Handle) -> i32 = STAND_IN.function("cuStreamDestroy_v2");
        // SAFETY: of these signatures in the driver; made once, given back once.
        self.with(|| unsafe { assert_eq!(destroy(self.stream), 0) });
        // SAFETY: as above.
        unsafe { assert_eq!(release(0), 0) };
    }
}

/// Calls that have queued copies to a device.
fn copies() -> u64 {
    ["calls.cuMemcpyHtoDAsync_v2", "calls.cuMemcpyBatchAsync"].map(|call| STAND_IN.count(call)).iter().sum()
}

pub(crate) fn open(gate: &Gate) {
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
}

/// Places of the caller's on the first device, the same for each expert: one part lies behind the other.
fn one_place(memory: &Arc<DeviceMemory>) -> Backing {
    let memory = memory.clone();
    let locate = move |unit: &Unit, part: &Part| {
        let before = unit.parts().iter().take_while(|earlier| earlier.tensor != part.tensor);
        let start: u64 = before.map(|earlier| earlier.bytes.len().next_multiple_of(256)).sum();
        Some(ExternalPlace { memory: DeviceId::Cuda(0), address: memory.address() + start })
    };
    // SAFETY: the memory lives as long as the closure, and one unit has it at a time.
    Backing::External(unsafe { External::new(locate, |_| ()) })
}

#[test]
fn reads_to_a_place_of_the_callers_come_after_the_stream_that_its_lease_was_released_behind() {
    let turn = Turn::take();
    let model = Model::new();
    let expert = |expert| model.catalog.expert(ExpertId { layer: 0, expert }).unwrap();
    let bytes: u64 = expert(0).parts().iter().map(|part| part.bytes.len().next_multiple_of(256)).sum();
    let device = Device::open(DeviceId::Cuda(0)).unwrap();
    let [memory, earlier] = [(); 2].map(|()| Arc::new(DeviceMemory::new(&device, bytes).unwrap()));
    let options = budget_of(1).budget_bytes(expert(0).bytes()).backing(one_place(&memory));
    let store = model.store(&options);
    let work = Work::new();
    let mut first = vec![0; expert(0).parts()[0].bytes.len() as usize];

    let lease = store.ensure(0, &[0]).unwrap();
    model.assert_holds(&lease);
    let gate = work.gate();
    work.copy(earlier.address(), memory.address(), first.len());
    // SAFETY: the stream lives.
    unsafe { lease.release_behind(work.stream.expose_provenance()) }.unwrap();
    let before = copies();
    let ticket = store.ensure_async(0, &[1]).unwrap();
    // The other parts are queued once this one is copied.
    until("a copy of the next expert", || copies() > before);
    open(&gate);
    let lease = ticket.wait().unwrap();
    model.assert_holds(&lease);
    device.settle().unwrap();
    let copies = CopyStream::new(&device).unwrap();
    copies.read_back(earlier.address(), &mut first).unwrap();
    let range = expert(0).parts()[0].bytes;
    assert!(first == model.bytes[range.start() as usize..range.end() as usize], "it saw the next expert");
    drop((lease, store, options, work, copies, memory, earlier, device, model));
    turn.assert_nothing_left("the store");
}

/// Both layers have their memory again for the layers after them: one once its work is over, the other at once.
#[test]
fn reads_of_later_layers_come_after_the_stream_that_a_layer_was_used_on_and_after_no_other() {
    let turn = Turn::take();
    let dense = layers::dense();
    let device = Device::open(DeviceId::Cuda(0)).unwrap();
    let earlier = DeviceMemory::new(&device, layers::ON_DEVICE).unwrap();
    // The next layer gets the memory of this one.
    let options = LayerOptions::default().device(DeviceId::Cuda(0)).timeout(LONG).ahead(0);
    let options = options.budget_bytes(layers::ON_DEVICE);
    let mut stream = layers::open_with(&dense, options, ReaderOptions::default()).unwrap();
    let [work, other] = [Work::new(), Work::new()];

    let layer = stream.next_layer().unwrap();
    // Until the next layer is read, this stream is held up: no read waits for it.
    let others = other.gate();
    let gate = work.gate();
    let tensor = layer.tensors().next().unwrap();
    work.copy(earlier.address(), tensor.address(), tensor.len() as usize);
    let mut copied = vec![0; tensor.len() as usize];
    let expected = bytes_of(tensor.name(), tensor.len());
    // SAFETY: the stream lives, and nothing else uses the layer.
    unsafe { layer.used_behind(work.stream.expose_provenance()) }.unwrap();
    drop(layer);
    let before = copies();
    let (sender, answers) = mpsc::channel();
    let asking = thread::spawn(move || {
        sender.send(stream.next_layer().unwrap()).unwrap();
        stream
    });
    // They are queued, and would be over soon if they waited for nothing.
    until("copies of the next layer", || copies() > before);
    open(&gate);
    let next = answers.recv_timeout(LONG);
    open(&others);
    layers::assert_is(&next.unwrap(), 1);
    let stream = asking.join().unwrap();
    device.settle().unwrap();
    CopyStream::new(&device).unwrap().read_back(earlier.address(), &mut copied).unwrap();
    assert!(copied == expected, "it saw a later layer");
    drop((stream, work, other, earlier, device, dense));
    turn.assert_nothing_left("the stream");
}

/// A stream that cannot be named is not forgotten because another one was.
#[test]
fn reads_of_later_layers_come_after_all_work_if_one_of_the_streams_of_a_layer_cannot_be_used() {
    let turn = Turn::take();
    let dense = layers::dense();
    let device = Device::open(DeviceId::Cuda(0)).unwrap();
    let earlier = DeviceMemory::new(&device, layers::ON_DEVICE).unwrap();
    let options = LayerOptions::default().device(DeviceId::Cuda(0)).timeout(LONG).ahead(0);
    let options = options.budget_bytes(layers::ON_DEVICE);
    let mut stream = layers::open_with(&dense, options, ReaderOptions::default()).unwrap();
    let [named, other] = [Work::new(), Work::new()];

    let layer = stream.next_layer().unwrap();
    let gate = other.gate();
    let tensor = layer.tensors().next().unwrap();
    other.copy(earlier.address(), tensor.address(), tensor.len() as usize);
    let mut copied = vec![0; tensor.len() as usize];
    let expected = bytes_of(tensor.name(), tensor.len());
    // SAFETY: the stream lives, and the other one is named next.
    unsafe { layer.used_behind(named.stream.expose_provenance()) }.unwrap();
    STAND_IN.configure("FAULTS=cuEventRecord:*=900");
    // SAFETY: as above.
    let error = unsafe { layer.used_behind(other.stream.expose_provenance()) }.unwrap_err();
    STAND_IN.reset();
    assert!(matches!(error, Error::Engine(_)), "{error}");
    drop(layer);
    let (sender, answers) = mpsc::channel();
    let asking = thread::spawn(move || {
        sender.send(stream.next_layer().unwrap()).unwrap();
        stream
    });
    // A read that waits for the named stream alone is over by then.
    let early = answers.recv_timeout(SHORT);
    open(&gate);
    assert!(early.is_err(), "a read did not wait for the other stream");
    layers::assert_is(&answers.recv_timeout(LONG).unwrap(), 1);
    let stream = asking.join().unwrap();
    device.settle().unwrap();
    CopyStream::new(&device).unwrap().read_back(earlier.address(), &mut copied).unwrap();
    assert!(copied == expected, "it saw a later layer");
    drop((stream, named, other, earlier, device, dense));
    turn.assert_nothing_left("the stream");
}

/// Memory for a dense tensor may have to wait for what is being freed, which waits for the device.
#[test]
fn a_dense_tensor_that_waits_for_memory_keeps_no_other_caller_waiting() {
    let turn = Turn::take();
    let model = Model::new();
    let [one, other] = ["blk.0.attn_q.weight", "blk.1.attn_q.weight"];
    let device = Device::open(DeviceId::Cuda(0)).unwrap();
    let options = budget_of(2).backing(Backing::DeviceSlots(DeviceId::Cuda(0)));
    let store = Arc::new(model.store(&options.dense_bytes(6000).batch_bytes(0)));
    drop(store.ensure_tensors(&[one]).unwrap());
    // There is none for the second until the first is freed.
    STAND_IN.set("POISON=0");
    let full = DeviceMemory::new(&device, device.memory().unwrap().0).unwrap();
    let work = Work::new();
    let gate = work.gate();
    let frees = || STAND_IN.count("calls.cuMemFree_v2");
    let before = frees();
    let (sender, answers) = mpsc::channel();
    let asking = store.clone();
    let asks = thread::spawn(move || {
        let ticket = asking.ensure_tensors_async(&[other]).unwrap();
        until("the first to be freed", || frees() > before);
        sender.send(asking.is_tensor_resident(other).unwrap()).unwrap();
        asking.prefetch(0, &[0], None).unwrap();
        sender.send(asking.is_tensor_resident(one).unwrap()).unwrap();
        ticket
    });
    let answers: Vec<_> = (0..2).map(|_| answers.recv_timeout(LONG)).collect();
    open(&gate);
    assert_eq!(answers, [Ok(false), Ok(false)]);
    let lease = asks.join().unwrap().wait().unwrap();
    model.assert_holds(&lease);
    drop((lease, store, work, full, device, model));
    turn.assert_nothing_left("the store");
}

/// To free memory waits for the device, and the next tensor for that, rather than take more than the share.
#[test]
fn dense_tensors_that_a_busy_device_has_not_freed_count() {
    let turn = Turn::take();
    let model = Model::new();
    let [one, other] = ["blk.0.attn_q.weight", "blk.1.attn_q.weight"];
    let options = budget_of(2).backing(Backing::DeviceSlots(DeviceId::Cuda(0)));
    let options = options.dense_bytes(6000).batch_bytes(0);
    let store = model.store(&options);
    drop(store.ensure_tensors(&[one]).unwrap());
    let device_bytes = || STAND_IN.count("device_bytes");
    let before = (device_bytes(), store.stats().held_bytes);
    let blocked = Blocked::new("cuMemFree_v2");
    let frees = blocked.calls();
    let ticket = store.ensure_tensors_async(&[other]).unwrap();
    until("the first to be freed", || blocked.calls() > frees);
    let (sender, answers) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || sender.send(ticket.wait()).unwrap());
        // One that waits for nothing is over by then.
        let early = answers.recv_timeout(SHORT);
        let after = (device_bytes(), store.stats().held_bytes);
        drop(blocked);
        assert!(early.is_err(), "it did not wait");
        assert_eq!(after, before);
        model.assert_holds(&answers.recv_timeout(LONG).unwrap().unwrap());
    });
    drop((store, model));
    turn.assert_nothing_left("the store");
}

/// A store whose experts have places of the caller's on the first device, one behind the other, and the experts that were given
/// back, in this order.
struct Places {
    store: Arc<Store>,
    given_back: Arc<Mutex<Vec<String>>>,
    device: Arc<Device>,
    model: Model,
}

impl Places {
    fn new() -> Self {
        let model = Model::new();
        let device = Device::open(DeviceId::Cuda(0)).unwrap();
        let room = model.catalog.expert_bytes(0).next_multiple_of(256) + 4096;
        let experts = model.catalog.experts().len() as u64;
        let memory = DeviceMemory::new(&device, experts * room).unwrap();
        let units: Vec<String> = model.catalog.experts().iter().map(Unit::label).collect();
        let locate = move |unit: &Unit, part: &Part| {
            let place = units.iter().position(|label| *label == unit.label()).unwrap() as u64;
            let before = unit.parts().iter().take_while(|earlier| earlier.tensor != part.tensor);
            let start: u64 = before.map(|earlier| earlier.bytes.len().next_multiple_of(256)).sum();
            Some(ExternalPlace {
                memory: DeviceId::Cuda(0),
                address: memory.address() + place * room + start,
            })
        };
        let given_back = Arc::<Mutex<Vec<String>>>::default();
        let told = given_back.clone();
        let evicted = move |unit: &Unit| told.lock().unwrap().push(unit.label());
        // SAFETY: the memory lives as long as the closure, and each unit has a place of its own.
        let backing = Backing::External(unsafe { External::new(locate, evicted) });
        let store = Arc::new(model.store(&budget_of(8).backing(backing)));
        Self { store, given_back, device, model }
    }

    fn given_back(&self) -> Vec<String> {
        self.given_back.lock().unwrap().clone()
    }

    /// Reads an expert of the first layer.
    fn read(&self, expert: u32) {
        self.model.assert_holds(&self.store.ensure(0, &[expert]).unwrap());
    }

    /// Evicts it, on a thread that must come back whatever the device does.
    fn evict(&self, expert: u32, gate: &Gate) {
        let (sender, answer) = mpsc::channel();
        let store = self.store.clone();
        let evicts = thread::spawn(move || sender.send(store.evict(0, &[expert]).unwrap()));
        let answer = answer.recv_timeout(LONG);
        if answer.is_err() {
            open(gate);
        }
        evicts.join().unwrap().unwrap();
        assert_eq!(answer, Ok(1), "it waits for the device");
    }
}

fn frees() -> u64 {
    STAND_IN.count("calls.cuMemFree_v2")
}

/// To free what earlier work has left waits for the device, which the store is no place for.
#[test]
fn an_eviction_does_not_free_what_earlier_work_has_left() {
    let turn = Turn::take();
    let places = Places::new();
    places.read(0);
    let copies = CopyStream::new(&places.device).unwrap();
    // Its event is reached.
    copies.park(DeviceMemory::new(&places.device, 4096).unwrap());
    let work = Work::new();
    let gate = work.gate();
    places.evict(0, &gate);
    open(&gate);
    until("the place to come back", || places.given_back() == ["expert 0 of layer 0"]);
    drop((copies, places, work));
    turn.assert_nothing_left("the store");
}

#[test]
fn a_place_that_comes_into_doubt_during_a_wait_is_waited_for_again() {
    let turn = Turn::take();
    let places = Places::new();
    (0..2).for_each(|expert| places.read(expert));
    places.device.set_aside(());
    let work = Work::new();
    let (gate, before) = (work.gate(), frees());
    places.evict(0, &gate);
    until("the wait for the first", || frees() > before);
    places.evict(1, &gate);
    assert!(places.given_back().is_empty());
    open(&gate);
    let both = ["expert 0 of layer 0", "expert 1 of layer 0"];
    until("both to come back", || places.given_back() == both);
    assert_eq!(frees() - before, 2, "what the first wait says is nothing about the second");
    drop((places, work));
    turn.assert_nothing_left("the store");
}

#[test]
fn a_place_whose_wait_did_not_tell_comes_back_with_a_later_one() {
    let turn = Turn::take();
    let places = Places::new();
    places.read(0);
    places.device.set_aside(());
    let before = frees();
    STAND_IN.configure("FAULTS=cuMemFree_v2:*=999");
    places.evict(0, &Gate::default());
    until("the wait", || frees() > before);
    STAND_IN.reset();
    assert!(places.given_back().is_empty());
    until("the place to come back", || {
        places.read(1);
        places.evict(1, &Gate::default());
        places.given_back().iter().any(|unit| unit == "expert 0 of layer 0")
    });
    drop(places);
    turn.assert_nothing_left("the store");
}

/// Calls of a function of the driver that do not begin as long as this lives.
pub(crate) struct Blocked(&'static str);

impl Blocked {
    pub(crate) fn new(function: &'static str) -> Self {
        STAND_IN.configure(&format!("BLOCKS={function}"));
        Self(function)
    }

    pub(crate) fn calls(&self) -> u64 {
        STAND_IN.count(&format!("calls.{}", self.0))
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        STAND_IN.configure("BLOCKS=");
    }
}

/// To submit reads calls the driver: to make what copies to the device need, and to put them behind its default stream.
#[test]
fn a_driver_that_does_not_answer_the_one_who_reads_keeps_no_other_caller_waiting() {
    let turn = Turn::take();
    for function in ["cuStreamCreate", "cuEventRecord"] {
        let places = Places::new();
        let (sender, answers) = mpsc::channel();
        let answered = thread::scope(|scope| {
            let blocked = Blocked::new(function);
            let before = blocked.calls();
            // More than one, which another caller might submit.
            let reads = scope.spawn(|| places.store.prefetch(0, &[0, 1, 2, 3], None).unwrap());
            until("the driver to be called", || blocked.calls() > before);
            let store = places.store.clone();
            scope.spawn(move || {
                for expert in 0..4 {
                    let _ = sender.send(store.is_resident(ExpertId { layer: 0, expert }).unwrap());
                }
            });
            let answered: Vec<_> = (0..4).map_while(|_| answers.recv_timeout(LONG).ok()).collect();
            drop(blocked);
            reads.join().unwrap();
            answered
        });
        assert_eq!(answered, [false; 4], "{function}");
        (0..4).for_each(|expert| places.read(expert));
        drop(places);
        turn.assert_nothing_left(function);
    }
}
