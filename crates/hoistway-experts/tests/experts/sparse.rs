//! Stacked tensors in the address space of a device: what is mapped, when it is taken away, and what becomes of failures.

use crate::{
    beside::{Blocked, Gate, Work, open},
    kit::{self, LONG, Lru, Model, SHORT, until},
    stand_in::{STAND_IN, Turn},
};
use hoistway::{ByteRange, Checkpoint, DeviceId, Dtype, Route, read::ReaderOptions};
use hoistway_device::{CopyStream, Device, DeviceMemory, Fence};
use hoistway_experts::{
    Error, ExpertId,
    backing::Backing,
    catalog::{ExpertCatalog, Part},
    store::{Store, StoreOptions},
};
use std::{
    collections::VecDeque,
    fs,
    sync::{Arc, mpsc},
    thread,
};

const GRANULE: u64 = 2 << 20;
const LAYERS: u32 = 2;
const EXPERTS: u32 = 4;
const DEVICE: DeviceId = DeviceId::Cuda(0);
/// Bytes of an expert: two granules of one tensor, and one of the other.
const EXPERT: u64 = 3 * GRANULE;
const TENSORS: [(&str, u64); 2] = [("gate_up_proj", 2), ("down_proj", 1)];

/// A model whose slices are whole granules.
fn model() -> Model {
    let directory = kit::disk();
    let path = directory.path().join("model.safetensors");
    let names: Vec<(String, u64)> = (0..LAYERS)
        .flat_map(|layer| {
            TENSORS.map(|(name, granules)| (format!("model.layers.{layer}.mlp.experts.{name}"), granules))
        })
        .collect();
    let shapes: Vec<[u64; 2]> =
        names.iter().map(|(_, granules)| [EXPERTS.into(), granules * GRANULE]).collect();
    let mut tensors: Vec<(&str, Dtype, &[u64])> =
        names.iter().zip(&shapes).map(|((name, _), shape)| (&**name, Dtype::U8, &shape[..])).collect();
    tensors.push(("embed", Dtype::U8, &[50, 200]));
    kit::safetensors(&path, &tensors);
    let bytes = fs::read(&path).unwrap();
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let catalog = Arc::new(ExpertCatalog::of_checkpoint(&checkpoint, Some(1)).unwrap());
    Model { directory, path, bytes, checkpoint, catalog }
}

/// A budget of so many experts.
fn options(experts: u64) -> StoreOptions {
    StoreOptions::default()
        .budget_bytes(experts * EXPERT)
        .backing(Backing::DeviceSparse(DEVICE))
        .timeout(LONG)
}

fn tensor(layer: u32, name: &str) -> String {
    format!("model.layers.{layer}.mlp.experts.{name}")
}

fn blocks() -> u64 {
    STAND_IN.count("blocks")
}

fn unmapped_in_use() -> u64 {
    STAND_IN.count("unmapped_in_use")
}

/// Fails if more memory is held than the budget and one request's demand.
fn assert_within(store: &Store) {
    let stats = store.stats();
    let most = stats.budget_bytes + stats.largest_batch_bytes;
    assert!(stats.held_bytes <= most, "{stats:?}");
    // The shortest blocks are granules.
    assert!(blocks() * GRANULE <= most, "{} blocks: {stats:?}", blocks());
}

#[test]
fn experts_lie_at_their_strides_and_only_they_have_memory() {
    let turn = Turn::take();
    let model = model();
    let store = model.store(&options(2));
    for round in 0..3 {
        for layer in 0..LAYERS {
            for expert in 0..EXPERTS {
                let lease = store.ensure(layer, &[expert]).unwrap();
                model.assert_holds(&lease);
                for (part, (name, granules)) in lease.get(0).unwrap().parts().zip(TENSORS) {
                    let name = tensor(layer, name);
                    let (base, stride) =
                        (store.tensor_address(&name).unwrap(), store.tensor_stride(&name).unwrap());
                    assert_eq!(stride, granules * GRANULE);
                    assert_eq!(part.address(), base + u64::from(expert) * stride, "round {round}");
                }
                assert_within(&store);
            }
        }
    }
    assert_eq!(store.tensor_stride("embed"), None);
    let lease = store.ensure_tensors(&["embed"]).unwrap();
    model.assert_holds(&lease);
    assert_within(&store);
    // Memory is used again: no more was ever made than is held.
    assert!(blocks() * GRANULE <= 3 * EXPERT);
    drop((lease, store, model));
    turn.assert_nothing_left("the store");
}

#[test]
fn slices_off_the_granule_are_refused_with_both_numbers_unless_padded() {
    let turn = Turn::take();
    let model = Model::new();
    let slice = kit::SLICE_BYTES;
    let error = model.open(&options(8)).unwrap_err();
    assert!(matches!(error, Error::InvalidOption { option: "backing", .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains(&slice.to_string()) && text.contains(&GRANULE.to_string()), "{text}");
    assert!(text.contains("expert 0 of layer 0") && text.contains("blk.0.ffn_gate_exps.weight"), "{text}");
    // Each part takes a granule of the budget.
    let error = model.open(&options(1).budget_bytes(EXPERT - 1).pad_slices(true)).unwrap_err();
    assert!(matches!(error, Error::BudgetTooSmall { needed: EXPERT, .. }), "{error:?}");
    let store = model.store(&options(2).pad_slices(true));
    assert_eq!(store.stats().token_cycle_bytes, Some(2 * u64::from(kit::LAYERS) * EXPERT));
    let base = store.tensor_address("blk.2.ffn_up_exps.weight").unwrap();
    assert_eq!(store.tensor_stride("blk.2.ffn_up_exps.weight"), Some(GRANULE));
    let lease = store.ensure(2, &[7]).unwrap();
    model.assert_holds(&lease);
    let addresses: Vec<u64> = lease.get(0).unwrap().parts().map(|part| part.address()).collect();
    assert!(addresses.contains(&(base + 7 * GRANULE)), "{addresses:x?}");
    drop((lease, store));
    let error = model.open(&kit::budget_of(4).pad_slices(true)).unwrap_err();
    assert!(matches!(error, Error::InvalidOption { option: "pad_slices", .. }), "{error:?}");
    drop(model);
    turn.assert_nothing_left("the stores");
}

#[test]
fn devices_that_cannot_map_memory_are_refused_with_a_reason() {
    let turn = Turn::take();
    let model = model();
    let refused = |device: DeviceId| {
        let error = model.open(&options(2).backing(Backing::DeviceSparse(device))).unwrap_err();
        assert!(matches!(error, Error::Engine(hoistway::Error::DeviceUnavailable { .. })), "{error:?}");
        error.to_string()
    };
    assert!(refused(DeviceId::Rocm(0)).contains("use slots"));
    refused(DeviceId::Toy(0));
    STAND_IN.set("MAPS=0");
    assert!(refused(DEVICE).contains("maps no memory"));
    // It is asked as the device is opened.
    STAND_IN.set("MAPS=1");
    drop(model.store(&options(2)));
    drop(model);
    turn.assert_nothing_left("the stores");
}

/// A gate that opens as it is dropped, so that a test that fails ends.
struct Opened(Gate);

impl Drop for Opened {
    fn drop(&mut self) {
        open(&self.0);
    }
}

/// A lease of an expert whose memory a stream has yet to copy, and the memory that it is copied to.
struct InUse {
    work: Work,
    gate: Opened,
    copy: DeviceMemory,
    len: u64,
}

impl InUse {
    /// Queues a copy of the expert's first part, behind a gate.
    fn of(store: &Store, layer: u32, expert: u32, release: bool) -> Self {
        let device = Device::open(DEVICE).unwrap();
        let lease = store.ensure(layer, &[expert]).unwrap();
        let part = lease.get(0).unwrap().parts().next().unwrap();
        let (address, len) = (part.address(), part.part().bytes.len());
        let copy = DeviceMemory::new(&device, len).unwrap();
        let work = Work::new();
        let gate = Opened(work.gate());
        work.copy(copy.address(), address, len as usize);
        if release {
            // SAFETY: the stream lives.
            unsafe { lease.release_behind(work.stream.expose_provenance()) }.unwrap();
        }
        Self { work, gate, copy, len }
    }

    /// Fails unless the work saw the expert.
    fn assert_saw(self, model: &Model, layer: u32, expert: u32) {
        let Self { work, copy, len, gate } = self;
        drop(gate);
        Device::open(DEVICE).unwrap().settle().unwrap();
        let mut seen = vec![0; len as usize];
        let copies = CopyStream::new(copy.device()).unwrap();
        copies.read_back(copy.address(), &mut seen).unwrap();
        let range = model.catalog.expert(ExpertId { layer, expert }).unwrap().parts()[0].bytes;
        assert!(seen == model.bytes[range.start() as usize..range.end() as usize], "it saw another expert");
        drop((work, copy));
    }
}

#[test]
fn memory_is_not_taken_away_before_the_work_that_uses_it_has_ended() {
    let turn = Turn::take();
    for is_named in [true, false] {
        let model = model();
        let store = model.store(&options(1));
        let before = unmapped_in_use();
        let in_use = InUse::of(&store, 0, 0, is_named);
        // There is no memory for it but that of the first.
        let ticket = store.ensure_async(1, &[3]).unwrap();
        thread::sleep(SHORT);
        assert!(!ticket.is_ready(0));
        // Other callers go on meanwhile.
        assert!(!store.is_resident(ExpertId { layer: 0, expert: 0 }).unwrap());
        assert_within(&store);
        open(&in_use.gate.0);
        let lease = ticket.wait().unwrap();
        model.assert_holds(&lease);
        in_use.assert_saw(&model, 0, 0);
        assert_eq!(unmapped_in_use(), before);
        drop((lease, store, model));
        turn.assert_nothing_left("the store");
    }
}

#[test]
fn work_on_one_stream_does_not_keep_memory_from_being_used_that_another_has_left() {
    let turn = Turn::take();
    let model = model();
    let store = model.store(&options(2));
    let in_use = InUse::of(&store, 0, 0, true);
    let idle = Work::new();
    let lease = store.ensure(0, &[1]).unwrap();
    // SAFETY: the stream lives.
    unsafe { lease.release_behind(idle.stream.expose_provenance()) }.unwrap();
    let device = Device::open(DEVICE).unwrap();
    // SAFETY: as above.
    let fence = unsafe { Fence::of_stream(&device, idle.stream.expose_provenance()) }.unwrap();
    until("the stream to end", || fence.is_passed());
    // Both are evicted, and the memory of the second is free.
    assert_eq!(store.evict(0, &[0, 1]).unwrap(), 2);
    let lease = store.ensure(1, &[2]).unwrap();
    model.assert_holds(&lease);
    open(&in_use.gate.0);
    in_use.assert_saw(&model, 0, 0);
    drop((fence, device, idle, lease, store, model));
    turn.assert_nothing_left("the store");
}

#[test]
fn an_expert_that_is_requested_again_before_its_memory_is_needed_keeps_it() {
    let turn = Turn::take();
    let model = model();
    let store = model.store(&options(3));
    drop(store.ensure(0, &[0, 1]).unwrap());
    let calls = || ["calls.cuMemMap", "calls.cuMemUnmap"].map(|call| STAND_IN.count(call));
    let before = calls();
    assert_eq!(store.evict(0, &[0]).unwrap(), 1);
    let lease = store.ensure(0, &[0]).unwrap();
    model.assert_holds(&lease);
    assert_eq!(calls(), before);
    drop((lease, store, model));
    turn.assert_nothing_left("the store");
}

#[test]
fn what_is_requested_and_prefetched_is_read_without_another_call() {
    let turn = Turn::take();
    let model = model();
    let (options, script) = kit::scripted(options(4), |_, _| None);
    let store = model.store(&options);
    let ticket = store.ensure_async(1, &[0, 1]).unwrap();
    until("the parts of both to be read", || script.reads() >= 4);
    let lease = ticket.wait().unwrap();
    let before = script.reads();
    store.prefetch(0, &[2], None).unwrap();
    until("the parts of the third to be read", || script.reads() >= before + 2);
    drop((lease, store, model));
    turn.assert_nothing_left("the store");
}

#[test]
fn a_smaller_budget_and_a_dropped_store_give_memory_back() {
    let turn = Turn::take();
    let model = model();
    let store = model.store(&options(4));
    drop(store.ensure(0, &[0, 1, 2, 3]).unwrap());
    store.set_budget(EXPERT).unwrap();
    until("memory to be given back", || store.stats().held_bytes <= EXPERT);
    assert_eq!(store.stats().resident, 1);
    // A lease keeps its own memory, and no other.
    let lease = store.ensure(1, &[1]).unwrap();
    drop(store);
    until("memory of no lease to be given back", || blocks() == 2);
    model.assert_holds(&lease);
    drop((lease, model));
    turn.assert_nothing_left("the store");
}

#[test]
fn failures_of_the_driver_are_errors_and_the_store_serves_on() {
    let turn = Turn::take();
    let model = model();
    for function in ["cuMemGetAllocationGranularity", "cuMemAddressReserve"] {
        STAND_IN.configure(&format!("FAULTS={function}:*=999"));
        let error = model.open(&options(2)).unwrap_err();
        STAND_IN.reset();
        assert!(matches!(error, Error::Engine(hoistway::Error::Device { .. })), "{error:?}");
        assert!(error.to_string().contains(function), "{error}");
    }
    for function in ["cuMemCreate", "cuMemMap", "cuMemSetAccess"] {
        // The second part of an expert fails, once the first has its memory; then all of them.
        for nth in ["2", "*"] {
            let store = model.store(&options(2));
            STAND_IN.configure(&format!("FAULTS={function}:{nth}=999"));
            let error = store.ensure(0, &[0]).unwrap_err();
            STAND_IN.reset();
            let Error::NoMemory { unit, source } = &error else { panic!("{error:?}") };
            assert_eq!(unit, "expert 0 of layer 0");
            assert!(source.to_string().contains(function), "{error}");
            assert_eq!(store.stats().used_bytes, 0);
            for expert in 0..EXPERTS {
                model.assert_holds(&store.ensure(0, &[expert]).unwrap());
                assert_within(&store);
            }
            drop(store);
            assert_eq!(blocks(), 0, "{function}");
        }
    }
    // What cannot be unmapped stays, and is tried again.
    let store = model.store(&options(1));
    drop(store.ensure(0, &[0]).unwrap());
    STAND_IN.configure("FAULTS=cuMemUnmap:*=999");
    let error = store.ensure(0, &[1]).unwrap_err();
    assert!(matches!(error, Error::NoMemory { .. }) && error.to_string().contains("cuMemUnmap"), "{error:?}");
    assert_within(&store);
    STAND_IN.reset();
    model.assert_holds(&store.ensure(0, &[1]).unwrap());
    drop(store);
    assert_eq!(blocks(), 0, "memory that was not unmapped at first");
    // What got no access and cannot be unmapped is counted as long as it is there, and serves later.
    let store = model.store(&options(2));
    STAND_IN.configure("FAULTS=cuMemSetAccess:*=999,cuMemUnmap:*=999");
    for round in 0..2 {
        for expert in 0..EXPERTS {
            let error = store.ensure(0, &[expert]).unwrap_err();
            assert!(matches!(error, Error::NoMemory { .. }), "{error:?}");
            assert_within(&store);
            assert!(store.stats().held_bytes >= blocks() * GRANULE, "round {round}: {:?}", store.stats());
        }
    }
    STAND_IN.reset();
    for expert in 0..EXPERTS {
        model.assert_holds(&store.ensure(0, &[expert]).unwrap());
        assert_within(&store);
    }
    drop(store);
    assert_eq!(blocks(), 0, "memory that had no access");
    // Nor does a store end that cannot unmap its memory: the device keeps that until it tells.
    let store = model.store(&options(1));
    drop(store.ensure(0, &[0]).unwrap());
    STAND_IN.configure("FAULTS=cuMemUnmap:*=999");
    drop(store);
    STAND_IN.reset();
    drop(model);
    turn.assert_nothing_left("memory that was set aside");
}

#[test]
fn a_device_without_memory_is_an_error_of_the_request() {
    let turn = Turn::take();
    let model = model();
    // A lost device keeps what could not be unmapped.
    let left = STAND_IN.count("device_bytes.cuda").div_ceil(1 << 20);
    STAND_IN.set(&format!("MEMORY_MIB={}", left + 14));
    // cuFile's buffers would take some of it.
    let reader = ReaderOptions::default().huge_pages(false).route(Route::Threads);
    let store = model.store(&options(4).reader(reader));
    let lease = store.ensure(0, &[0, 1]).unwrap();
    let error = store.ensure(0, &[2]).unwrap_err();
    let Error::NoMemory { source, .. } = &error else { panic!("{error:?}") };
    assert!(matches!(**source, Error::Engine(hoistway::Error::MemoryBudget { .. })), "{error:?}");
    model.assert_holds(&lease);
    drop(lease);
    // What no expert needs is given back where the device has no more, although the budget would hold it.
    assert_eq!(store.evict(0, &[0]).unwrap(), 1);
    model.assert_holds(&store.ensure(0, &[2]).unwrap());
    drop((store, model));
    turn.assert_nothing_left("the store");
}

#[test]
fn a_device_without_memory_to_map_by_gets_what_no_expert_needs() {
    let turn = Turn::take();
    let model = model();
    for function in ["cuMemMap", "cuMemSetAccess"] {
        let store = model.store(&options(4));
        let refuse = || STAND_IN.configure(&format!("FAULTS={function}:1=2"));
        refuse();
        let error = store.ensure(0, &[0]).unwrap_err();
        let Error::NoMemory { source, .. } = &error else { panic!("{error:?}") };
        assert!(matches!(**source, Error::Engine(hoistway::Error::MemoryBudget { .. })), "{error:?}");
        STAND_IN.reset();
        model.assert_holds(&store.ensure(0, &[0]).unwrap());
        assert_eq!(store.evict(0, &[0]).unwrap(), 1);
        refuse();
        model.assert_holds(&store.ensure(0, &[1]).unwrap());
        STAND_IN.reset();
        drop(store);
        assert_eq!(blocks(), 0, "{function}");
    }
    drop(model);
    turn.assert_nothing_left("the stores");
}

#[test]
fn slices_of_one_tensor_have_one_length() {
    let turn = Turn::take();
    let model = model();
    let whole = model.catalog.expert(ExpertId { layer: 0, expert: 0 }).unwrap().parts()[0].clone();
    let mut builder = ExpertCatalog::builder();
    builder.file(&model.path);
    // The second expert's slice is half as long, and lies where its own length puts it.
    for (expert, granules) in [(0, 2), (1, 1)] {
        let start = whole.tensor_bytes.start() + u64::from(expert) * 2 * GRANULE;
        let bytes = ByteRange::at(start, granules * GRANULE).unwrap();
        builder = builder.expert(ExpertId { layer: 0, expert }, vec![Part { bytes, ..whole.clone() }]);
    }
    let catalog = Arc::new(builder.top_k(1).build().unwrap());
    let files = ExpertCatalog::open_files(&model.checkpoint);
    let error = Store::open(catalog, files, Box::new(Lru::default()), &options(4)).unwrap_err();
    assert!(matches!(error, Error::InvalidOption { option: "backing", .. }), "{error:?}");
    assert!(error.to_string().contains("one length"), "{error}");
    drop(model);
    turn.assert_nothing_left("the catalog");
}

/// To ask what a stream has done calls the driver, too.
#[test]
fn a_driver_that_does_not_answer_keeps_no_other_caller_waiting() {
    let turn = Turn::take();
    for function in ["cuEventQuery", "cuMemUnmap"] {
        let model = model();
        let store = Arc::new(model.store(&options(2)));
        let work = Work::new();
        let lease = store.ensure(0, &[0]).unwrap();
        let other = store.ensure(0, &[1]).unwrap();
        // SAFETY: the stream lives.
        unsafe { lease.release_behind(work.stream.expose_provenance()) }.unwrap();
        let (sender, answers) = mpsc::channel();
        let (answer, ticket) = {
            let blocked = Blocked::new(function);
            let before = blocked.calls();
            let ticket = store.ensure_async(1, &[3]).unwrap();
            until("the driver to be called", || blocked.calls() > before);
            let asked = store.clone();
            thread::spawn(move || {
                drop(other);
                _ = asked.stats();
                _ = asked.is_resident(ExpertId { layer: 0, expert: 1 });
                _ = sender.send(asked.evict(0, &[1]).unwrap());
            });
            (answers.recv_timeout(LONG), ticket)
        };
        assert_eq!(answer.ok(), Some(1), "{function}");
        model.assert_holds(&ticket.wait().unwrap());
        until("the thread to end", || Arc::strong_count(&store) == 1);
        drop((store, work, model));
        turn.assert_nothing_left("the store");
    }
}

#[test]
fn an_expert_that_has_its_memory_still_waits_for_no_other() {
    let turn = Turn::take();
    let model = model();
    let store = model.store(&options(6));
    drop(store.ensure(0, &[0]).unwrap());
    assert_eq!(store.evict(0, &[0]).unwrap(), 1);
    let blocked = Blocked::new("cuMemCreate");
    let before = blocked.calls();
    // As many as there are threads for.
    let tickets: Vec<_> = (0..EXPERTS).map(|expert| store.ensure_async(1, &[expert]).unwrap()).collect();
    until("the driver to be called", || blocked.calls() > before);
    model.assert_holds(&store.ensure(0, &[0]).unwrap());
    drop(blocked);
    for ticket in tickets {
        model.assert_holds(&ticket.wait().unwrap());
    }
    drop((store, model));
    turn.assert_nothing_left("the store");
}

#[test]
fn a_lost_device_fails_requests_and_ends_nothing_else() {
    let turn = Turn::take();
    let model = model();
    // With room for two, the second gets memory of its own.
    for (function, budget) in [("cuMemCreate", 2), ("cuMemMap", 2), ("cuMemMap", 1), ("cuMemUnmap", 1)] {
        let store = model.store(&options(budget));
        let lease = store.ensure(0, &[0]).unwrap();
        drop(lease);
        STAND_IN.configure(&format!("FAULTS={function}:*=700"));
        for expert in [1, 2] {
            let error = store.ensure(1, &[expert]).unwrap_err();
            assert!(matches!(error, Error::NoMemory { .. } | Error::Read { .. }), "{function}: {error:?}");
        }
        drop(store);
        STAND_IN.reset();
        hoistway_device::release_devices();
        let store = model.store(&options(1));
        model.assert_holds(&store.ensure(0, &[0]).unwrap());
    }
    drop((model, turn));
}

/// A generator of numbers that are the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    fn expert(&mut self) -> (u32, u32) {
        (self.below(LAYERS.into()) as u32, self.below(EXPERTS.into()) as u32)
    }
}

#[test]
fn whatever_is_asked_for_the_budget_holds_and_leases_have_the_bytes_of_the_file() {
    let turn = Turn::take();
    let model = model();
    let before = unmapped_in_use();
    let mut random = Random(7);
    for _ in 0..4 {
        let store = model.store(&options(2 + random.below(3)));
        let work = Work::new();
        let mut leases = VecDeque::new();
        for _ in 0..40 {
            let (layer, expert) = random.expert();
            match random.below(8) {
                0..=3 => {
                    let other = random.below(EXPERTS.into()) as u32;
                    // Room for it, whatever is leased.
                    leases.clear();
                    let lease = store.ensure(layer, &[expert, other]).unwrap();
                    model.assert_holds(&lease);
                    leases.push_back(lease);
                }
                4 => store.prefetch(layer, &[expert], None).unwrap(),
                5 => _ = store.evict(layer, &[expert]).unwrap(),
                6 => {
                    if let Some(lease) = leases.pop_front() {
                        // SAFETY: the stream lives.
                        unsafe { lease.release_behind(work.stream.expose_provenance()) }.unwrap();
                    }
                }
                _ => drop(store.ensure_tensors(&["embed"]).unwrap()),
            }
            assert_within(&store);
        }
        drop((leases, store, work));
        assert_eq!(blocks(), 0);
    }
    assert_eq!(unmapped_in_use(), before);
    drop(model);
    turn.assert_nothing_left("the stores");
}

#[test]
fn threads_that_share_a_store_get_the_bytes_of_the_file() {
    let turn = Turn::take();
    let model = model();
    let store = model.store(&options(3));
    let before = unmapped_in_use();
    thread::scope(|scope| {
        for seed in 1..=2 {
            let (store, model) = (&store, &model);
            scope.spawn(move || {
                let mut random = Random(seed);
                for _ in 0..40 {
                    let (layer, expert) = random.expert();
                    model.assert_holds(&store.ensure(layer, &[expert]).unwrap());
                    assert_within(store);
                }
            });
        }
    });
    assert_eq!(unmapped_in_use(), before);
    drop((store, model));
    turn.assert_nothing_left("the store");
}
