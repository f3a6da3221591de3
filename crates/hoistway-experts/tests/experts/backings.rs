//! One suite for every kind of memory, and what is special about each.

use crate::{
    kit::{self, EXPERTS, LAYERS, LONG, Model, SHORT, budget_of},
    stand_in::Turn,
};
use hoistway::{Checkpoint, DeviceId, Dtype, Route, route::fault::Fault};
use hoistway_device::toy;
use hoistway_experts::{
    Error, ExpertId,
    backing::{Backing, External, ExternalPlace},
    catalog::{ExpertCatalog, Role, Unit},
    store::{StoreOptions, StoreStats},
};
use std::{
    collections::{BTreeSet, HashMap},
    fs, ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

/// A vector for each part.
type Vectors = Arc<Mutex<HashMap<String, Vec<u8>>>>;

/// Memory of the caller's.
fn external() -> (Backing, Vectors) {
    let memory = Vectors::default();
    let name = |unit: &Unit, tensor: &str| format!("{} {tensor}", unit.label());
    let (gives, takes) = (memory.clone(), memory.clone());
    let locate = move |unit: &Unit, part: &hoistway_experts::catalog::Part| {
        let mut bytes = vec![0xEE; part.bytes.len() as usize];
        let address = bytes.as_mut_ptr().expose_provenance() as u64;
        gives.lock().unwrap().insert(name(unit, &part.tensor), bytes);
        Some(ExternalPlace { memory: DeviceId::Cpu, address })
    };
    let evicted = move |unit: &Unit| {
        for part in unit.parts() {
            takes.lock().unwrap().remove(&name(unit, &part.tensor)).expect("it was given");
        }
    };
    // SAFETY: the vectors stay where they are until they are removed, and nothing looks at them.
    (Backing::External(unsafe { External::new(locate, evicted) }), memory)
}

fn budget(experts: u64, backing: Backing) -> StoreOptions {
    budget_of(experts).backing(backing)
}

#[test]
fn every_backing_serves_the_same_bytes() {
    let turn = Turn::take();
    // Staging memory that a test's copies left in doubt stays.
    let before = toy::in_use();
    let backings = [
        Backing::HostSlots,
        Backing::HostSparse,
        Backing::DeviceSlots(DeviceId::Cuda(0)),
        Backing::DeviceSlots(DeviceId::Rocm(0)),
        Backing::DeviceSlots(DeviceId::Toy(0)),
        Backing::DeviceSparse(DeviceId::Cuda(0)),
        external().0,
    ];
    for backing in backings {
        let model = Model::new();
        let options = match backing {
            // Each of three parts takes a granule.
            Backing::DeviceSparse(_) => StoreOptions::default()
                .budget_bytes(5 * 3 * (2 << 20))
                .backing(backing.clone())
                .pad_slices(true)
                .timeout(LONG),
            _ => budget(5, backing.clone()),
        };
        let store = model.store(&options);
        for token in 0..4 {
            for layer in 0..LAYERS {
                let experts = [token, (token + 3) % EXPERTS];
                if token == 1 {
                    store.prefetch((layer + 1) % LAYERS, &[token + 1], None).unwrap();
                }
                model.assert_holds(&store.ensure(layer, &experts).unwrap());
                let stats = store.stats();
                let most = stats.budget_bytes + stats.largest_batch_bytes;
                assert!(stats.held_bytes <= most && toy::in_use().0 <= most, "{stats:?}");
            }
            let names = ["token_embd.weight", "blk.1.ffn_gate_exps.bias"];
            model.assert_holds(&store.ensure_tensors(&names).unwrap());
        }
        let stats = store.stats();
        assert!(stats.evictions > 0 && stats.used_bytes <= stats.budget_bytes, "{stats:?}");
        assert!(stats.peak_bytes <= stats.budget_bytes + stats.largest_batch_bytes, "{stats:?}");
        assert_eq!(stats.backing, backing.name());
        // An open file keeps what cuFile knows of it.
        drop((store, model));
        turn.assert_nothing_left(backing.name());
        assert_eq!(toy::in_use(), before, "{}", backing.name());
    }
}

#[test]
#[cfg_attr(windows, ignore = "reads pages that were given back, which Windows does not let")]
fn a_sparse_tensor_has_its_experts_at_their_strides_and_gives_pages_back() {
    let model = Model::new();
    let store = model.store(&budget(20, Backing::HostSparse));
    let name = "blk.1.ffn_up_exps.weight";
    let base = store.tensor_address(name).unwrap();
    assert_eq!(store.tensor_address("nothing"), None);
    let stride = model.catalog.expert(ExpertId { layer: 1, expert: 0 }).unwrap().parts()[1].bytes.len();
    // Whole pages of an expert.
    let pages = |expert: u64| {
        (base + expert * stride).next_multiple_of(4096)..(base + (expert + 1) * stride) / 4096 * 4096
    };
    let chosen = (0..7).find(|expert| !pages(*expert).is_empty()).unwrap();
    let lease = store.ensure(1, &[chosen as u32, chosen as u32 + 1]).unwrap();
    for (leased, expert) in lease.units().zip([chosen, chosen + 1]) {
        let up = leased.parts().find(|part| &*part.part().tensor == name).unwrap();
        assert_eq!(up.address(), base + expert * stride);
    }
    drop(lease);
    // The end of the first shares a page with the beginning of the second, which stays.
    let lease = store.ensure(1, &[chosen as u32 + 1]).unwrap();
    assert_eq!(store.evict(1, &[chosen as u32]).unwrap(), 1);
    model.assert_holds(&lease);
    let middle = pages(chosen);
    for address in middle {
        let byte: *const u8 = ptr::with_exposed_provenance(address as usize);
        // SAFETY: a page of the store's address space, which reads as zero if it has no memory.
        assert_eq!(unsafe { byte.read() }, 0, "the pages of an expert that was evicted are gone");
    }
}

#[test]
fn slots_on_a_device_bound_a_request() {
    let _turn = Turn::take();
    let model = Model::new();
    let slot = model.catalog.expert_bytes(0).next_multiple_of(256);
    let options = StoreOptions::default()
        .budget_bytes(3 * slot)
        .batch_bytes(slot)
        .dense_bytes(0)
        .timeout(LONG)
        .backing(Backing::DeviceSlots(DeviceId::Toy(0)));
    let store = model.store(&options);
    let error = store.ensure(0, &[0, 1, 2, 3, 4]).unwrap_err();
    let Error::BatchTooLarge { is_dense: false, capacity, .. } = error else { panic!("{error:?}") };
    assert_eq!(capacity, 4 * slot);
    assert_eq!(store.stats().tokens, 0, "a request that was refused is no visit");
    let lease = store.ensure(0, &[0, 1, 2, 3]).unwrap();
    model.assert_holds(&lease);
    let error = store.ensure_async(0, &[4]).unwrap().wait_within(SHORT).unwrap_err();
    assert!(matches!(error, Error::NoRoom { .. }), "{error:?}");
    let error = store.set_budget(100 * slot).unwrap_err();
    assert!(matches!(error, Error::InvalidOption { option: "budget", .. }), "{error:?}");
    drop(lease);
    model.assert_holds(&store.ensure(0, &[4]).unwrap());
}

#[test]
fn a_copy_that_fails_leaves_no_expert_with_wrong_bytes() {
    let _turn = Turn::take();
    let model = Model::new();
    toy::reset();
    let options = budget(4, Backing::DeviceSlots(DeviceId::Toy(0)));
    let fails = |store: &hoistway_experts::store::Store| {
        let error = store.ensure(0, &[0, 1]).unwrap_err();
        let Error::Read { source, .. } = &error else { panic!("{error:?}") };
        assert!(matches!(source.error(), hoistway::Error::Device { .. }), "{error:?}");
    };
    // What was not queued is over: the device goes on.
    let store = model.store(&options);
    toy::fail(toy::Fault::Queue, Some(1));
    fails(&store);
    toy::reset();
    for layer in 0..LAYERS {
        model.assert_holds(&store.ensure(layer, &[0, 1]).unwrap());
    }
    // A device that is lost stays so.
    toy::fail(toy::Fault::Copy, Some(1));
    for _ in 0..2 {
        let error = store.ensure(0, &[5]).unwrap_err();
        let Error::Read { source, .. } = &error else { panic!("{error:?}") };
        assert!(matches!(source.error(), hoistway::Error::Device { .. }), "{error:?}");
        toy::reset();
    }
}

#[test]
fn a_device_without_memory_is_an_error_at_opening() {
    let _turn = Turn::take();
    let model = Model::new();
    toy::reset();
    toy::fail(toy::Fault::Exhaust, None);
    let error = model.open(&budget(4, Backing::DeviceSlots(DeviceId::Toy(0)))).unwrap_err();
    toy::reset();
    assert!(matches!(error, Error::Engine(hoistway::Error::MemoryBudget { .. })), "{error:?}");
    assert!(error.to_string().contains("set a smaller budget"), "{error}");
    let error = model.open(&budget(4, Backing::DeviceSlots(DeviceId::Toy(99)))).unwrap_err();
    assert!(matches!(error, Error::Engine(hoistway::Error::DeviceUnavailable { .. })), "{error:?}");
}

#[test]
fn a_device_that_runs_out_of_memory_for_a_dense_tensor_serves_on() {
    let _turn = Turn::take();
    let model = Model::new();
    toy::reset();
    let store = model.store(&budget(5, Backing::DeviceSlots(DeviceId::Toy(0))).dense_bytes(30_000));
    let kept = store.ensure_tensors(&["token_embd.weight"]).unwrap();
    let before = store.stats();
    toy::fail(toy::Fault::Exhaust, None);
    for _ in 0..3 {
        let error = store.ensure_tensors(&["token_embd.weight", "blk.1.attn_q.weight"]).unwrap_err();
        let Error::NoMemory { unit, source } = &error else { panic!("{error:?}") };
        assert_eq!(unit, "tensor 'blk.1.attn_q.weight'");
        assert!(matches!(**source, Error::Engine(hoistway::Error::MemoryBudget { .. })), "{error:?}");
        let stats = store.stats();
        let of = |stats: &StoreStats| (stats.used_bytes, stats.held_bytes, stats.resident);
        assert_eq!(of(&stats), of(&before), "nothing is left of it");
    }
    // Slots need no more memory, and what is leased stays.
    model.assert_holds(&store.ensure(0, &[0, 1]).unwrap());
    model.assert_holds(&kept);
    toy::reset();
    model.assert_holds(&store.ensure_tensors(&["token_embd.weight", "blk.1.attn_q.weight"]).unwrap());
}

#[test]
fn memory_of_the_callers_is_given_back_as_experts_are_evicted() {
    let model = Model::new();
    let (backing, memory) = external();
    let bytes = model.catalog.expert_bytes(0);
    let store = model.store(&StoreOptions::default().budget_bytes(2 * bytes).backing(backing).timeout(LONG));
    for expert in 0..EXPERTS {
        model.assert_holds(&store.ensure(0, &[expert]).unwrap());
        assert!(memory.lock().unwrap().len() <= 9);
    }
    assert_eq!(memory.lock().unwrap().len(), 6, "three parts of two experts");
    // SAFETY: it gives no place.
    let none = unsafe { External::new(|_, _| None, |_| ()) };
    let store =
        model.store(&StoreOptions::default().budget_bytes(2 * bytes).backing(Backing::External(none)));
    let error = store.ensure(0, &[0]).unwrap_err();
    assert!(matches!(error, Error::NoMemory { .. }) && error.to_string().contains("gave none"), "{error}");
    assert_eq!(store.stats().used_bytes, 0);
}

/// A model of these tensors in one safetensors file.
fn model_of(tensors: &[(&str, Dtype, &[u64])]) -> Model {
    let directory = kit::disk();
    let path = directory.path().join("model.safetensors");
    kit::safetensors(&path, tensors);
    let bytes = fs::read(&path).unwrap();
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let catalog = Arc::new(ExpertCatalog::of_checkpoint(&checkpoint, Some(2)).unwrap());
    Model { directory, path, bytes, checkpoint, catalog }
}

#[test]
fn tensors_without_bytes_take_no_place_of_others() {
    let model = model_of(&[
        // Both begin at the same byte.
        ("empty", Dtype::U8, &[0, 8]),
        ("embed", Dtype::U8, &[50, 200]),
        ("norm", Dtype::U8, &[50, 200]),
        ("model.layers.0.mlp.experts.gate_up_proj", Dtype::U8, &[4, 5000]),
        ("model.layers.0.mlp.experts.down_proj", Dtype::U8, &[4, 3000]),
        ("empty at the end", Dtype::U8, &[0]),
    ]);
    for backing in [Backing::HostSparse, Backing::HostSlots, external().0] {
        let store = model.store(&StoreOptions::default().budget_bytes(1 << 20).backing(backing));
        let tensors = store.ensure_tensors(&["empty", "embed", "norm", "empty at the end"]).unwrap();
        let lease = store.ensure(0, &[0, 1, 2, 3]).unwrap();
        model.assert_holds(&lease);
        model.assert_holds(&tensors);
        drop(tensors);
        assert_eq!(store.evict_tensors(&["empty"]).unwrap(), 1);
        model.assert_holds(&lease);
    }
}

#[test]
fn memory_that_no_expert_has_does_not_add_to_the_budget() {
    let model = Model::new();
    let all: Vec<u32> = (0..EXPERTS).collect();
    let store = model.store(&budget(EXPERTS.into(), Backing::HostSlots));
    drop(store.ensure(0, &all).unwrap());
    assert_eq!(store.evict(0, &all).unwrap(), 8);
    // Free slots keep their pages, for the next experts.
    assert_eq!((store.stats().used_bytes, store.stats().held_bytes), (0, store.stats().budget_bytes));
    let lease = store.ensure_tensors(&["token_embd.weight"]).unwrap();
    let stats = store.stats();
    assert!(stats.used_bytes > 0 && stats.held_bytes <= stats.budget_bytes, "{stats:?}");
    model.assert_holds(&lease);
    drop(lease);
    store.set_budget(budget_of(1).budget_bytes).unwrap();
    let stats = store.stats();
    assert!(stats.held_bytes <= stats.budget_bytes, "{stats:?}");
}

/// They would be ignored.
#[test]
fn options_of_slots_on_a_device_are_refused_elsewhere() {
    let _turn = Turn::take();
    let model = Model::new();
    let (external, _) = external();
    for backing in [Backing::HostSlots, Backing::HostSparse, external] {
        let options = budget(5, backing);
        for (refused, name) in [
            (options.clone().dense_bytes(1), "dense_bytes"),
            (options.clone().batch_bytes(0), "batch_bytes"),
            (options.clone().host_level_bytes(1 << 20), "host_level_bytes"),
        ] {
            let error = model.open(&refused).unwrap_err();
            assert!(matches!(error, Error::InvalidOption { option, .. } if option == name), "{error:?}");
        }
    }
}

#[test]
fn the_budget_that_a_store_on_a_device_was_opened_with_can_be_set_again() {
    let _turn = Turn::take();
    let model = Model::new();
    let options = budget(5, Backing::DeviceSlots(DeviceId::Toy(0))).dense_bytes(8192).batch_bytes(0);
    let store = model.store(&options);
    for bytes in [options.budget_bytes, options.budget_bytes - 1, options.budget_bytes] {
        store.set_budget(bytes).unwrap();
    }
    let error = store.set_budget(options.budget_bytes + 1).unwrap_err();
    assert!(matches!(error, Error::InvalidOption { option: "budget", .. }), "{error:?}");
    model.assert_holds(&store.ensure(0, &[0, 1]).unwrap());
}

#[test]
fn a_budget_beyond_what_dense_tensors_may_take_is_refused_although_all_experts_have_slots() {
    let _turn = Turn::take();
    let model = Model::new();
    let padded = |bytes: u64| bytes.next_multiple_of(256);
    let slot: u64 = model.catalog.experts()[0].parts().iter().map(|part| padded(part.bytes.len())).sum();
    let slots = slot * model.catalog.experts().len() as u64;
    let dense: u64 = model.catalog.dense().iter().map(|unit| padded(unit.bytes())).sum();
    let options = |dense| {
        let options = StoreOptions::default().batch_bytes(0).backing(Backing::DeviceSlots(DeviceId::Toy(0)));
        options.budget_bytes(slots + dense).dense_bytes(dense)
    };
    let store = model.store(&options(dense - 1));
    store.set_budget(slots + dense - 1).unwrap();
    let error = store.set_budget(slots + dense).unwrap_err();
    assert!(matches!(error, Error::InvalidOption { option: "budget", .. }), "{error:?}");
    model.store(&options(dense)).set_budget(u64::MAX).unwrap();
}

#[test]
fn dense_tensors_on_a_device_have_a_share_of_the_budget() {
    let _turn = Turn::take();
    let model = Model::new();
    let options = budget(5, Backing::DeviceSlots(DeviceId::Toy(0)));
    let names = ["blk.0.attn_q.weight", "blk.1.attn_q.weight", "blk.2.attn_q.weight", "token_embd.weight"];
    let error = model.open(&options.clone().dense_bytes(options.budget_bytes)).unwrap_err();
    assert!(matches!(error, Error::InvalidOption { option: "dense_bytes", .. }), "{error:?}");
    let store = model.store(&options.clone().dense_bytes(0).batch_bytes(0));
    let error = store.ensure_tensors(&names).unwrap_err();
    assert!(matches!(error, Error::BatchTooLarge { is_dense: true, .. }), "{error:?}");
    let store = model.store(&options.dense_bytes(30_000));
    let lease = store.ensure_tensors(&names).unwrap();
    model.assert_holds(&lease);
    model.assert_holds(&store.ensure(0, &[0, 1, 2]).unwrap());
}

#[test]
fn a_slot_is_not_filled_again_before_copies_that_hide_behind_another_error_have_ended() {
    let _turn = Turn::take();
    let model = model_of(&[("model.layers.0.mlp.experts.gate_up_proj", Dtype::U8, &[2, 5 << 20])]);
    let first = model.catalog.expert(ExpertId { layer: 0, expert: 0 }).unwrap().parts()[0].bytes;
    toy::reset();
    let options = StoreOptions::default()
        .budget_bytes(11 << 20)
        .timeout(LONG)
        .backing(Backing::DeviceSlots(DeviceId::Toy(0)));
    // A late piece fails first, while others are read. Their copies begin after that, and it is not known when they end.
    let (is_other_read, has_failed) = (AtomicBool::new(false), AtomicBool::new(false));
    let (options, _) = kit::scripted(options, move |_, offset| {
        if (first.start() + (3 << 20)..first.end() - (512 << 10)).contains(&offset) {
            kit::until("another read", || is_other_read.load(Ordering::Relaxed));
            has_failed.store(true, Ordering::Relaxed);
            return Some(Fault::Broken);
        }
        is_other_read.store(true, Ordering::Relaxed);
        kit::until("the failure", || has_failed.load(Ordering::Relaxed));
        Some(Fault::Delay(Duration::from_millis(200)))
    });
    let reader = options.reader.clone().route(Route::Threads).in_flight(4);
    let store = model.store(&options.reader(reader));
    let held = toy::hold_copies();
    toy::fail(toy::Fault::Doubt, None);
    let error = store.ensure(0, &[0]).unwrap_err();
    toy::reset();
    let Error::Read { source, .. } = &error else { panic!("{error:?}") };
    // The device's doubt, if a thread was late to tell of the failure.
    let is_doubt = matches!(source.error(), hoistway::Error::Device { .. });
    assert!(source.error().errno() == Fault::Broken.errno() || is_doubt, "{error:?}");
    assert_eq!(store.stats().used_bytes, 0);
    assert!(toy::batches_left() > 0);
    let ticket = store.ensure_async(0, &[1]).unwrap();
    kit::until("the wait for the copies", || toy::waiting() > 0);
    assert!(!ticket.is_ready(0));
    drop(held);
    let lease = ticket.wait().unwrap();
    // The same slot.
    assert_eq!(lease.get(0).unwrap().slot(), Some(0));
    model.assert_holds(&lease);
}

#[test]
fn places_of_a_unit_are_given_back_if_one_part_gets_none() {
    let model = Model::new();
    let (backing, memory) = external();
    let Backing::External(whole) = backing else { panic!("it is external") };
    drop(whole);
    let refuses = Arc::new(AtomicBool::new(true));
    let (is_refused, gives, takes) = (refuses.clone(), memory.clone(), memory.clone());
    let locate = move |unit: &Unit, part: &hoistway_experts::catalog::Part| {
        if part.role == Role::Down && is_refused.load(Ordering::Relaxed) {
            return None;
        }
        let mut bytes = vec![0xEE; part.bytes.len() as usize];
        let address = bytes.as_mut_ptr().expose_provenance() as u64;
        gives.lock().unwrap().insert(format!("{} {}", unit.label(), part.tensor), bytes);
        Some(ExternalPlace { memory: DeviceId::Cpu, address })
    };
    let evicted = move |unit: &Unit| {
        let label = format!("{} ", unit.label());
        takes.lock().unwrap().retain(|name, _| !name.starts_with(&label));
    };
    // SAFETY: the vectors stay where they are until they are removed, and nothing looks at them.
    let external = Backing::External(unsafe { External::new(locate, evicted) });
    let store = model.store(&budget(2, external));
    let error = store.ensure(0, &[0]).unwrap_err();
    assert!(matches!(error, Error::NoMemory { .. }), "{error:?}");
    assert_eq!((memory.lock().unwrap().len(), store.stats().held_bytes), (0, 0));
    refuses.store(false, Ordering::Relaxed);
    model.assert_holds(&store.ensure(0, &[0]).unwrap());
    assert_eq!(memory.lock().unwrap().len(), 3);
}

#[test]
fn a_store_that_is_dropped_gives_back_what_no_lease_holds() {
    let model = Model::new();
    let (backing, memory) = external();
    let store = model.store(&budget(8, backing));
    let held = || {
        let labels = memory.lock().unwrap();
        let labels =
            labels.keys().filter_map(|name| name.rsplit_once(' ').map(|(label, _)| label.to_owned()));
        labels.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    };
    let (lease, other) = (store.ensure(0, &[1, 2]).unwrap(), store.ensure(0, &[2, 3]).unwrap());
    drop(store.ensure(1, &[4, 5]).unwrap());
    drop(store.ensure_tensors(&["blk.1.attn_q.weight"]).unwrap());
    let clone = store.clone();
    drop(store);
    assert_eq!(held().len(), 6, "a clone is left");
    drop(clone);
    assert_eq!(held(), ["expert 1 of layer 0", "expert 2 of layer 0", "expert 3 of layer 0"]);
    drop(lease);
    assert_eq!(held(), ["expert 2 of layer 0", "expert 3 of layer 0"]);
    model.assert_holds(&other);
    drop(other);
    assert!(held().is_empty());
}

#[test]
fn a_ticket_outlives_its_store_and_keeps_nothing_else() {
    let model = Model::new();
    let gate = Arc::new(AtomicBool::new(true));
    let opened = gate.clone();
    let (backing, memory) = external();
    let (options, _) = kit::scripted(budget(8, backing), move |_, _| {
        kit::until("the gate", || opened.load(Ordering::Relaxed));
        None
    });
    let store = model.store(&options);
    drop(store.ensure(2, &[5]).unwrap());
    gate.store(false, Ordering::Relaxed);
    let ticket = store.ensure_async(0, &[1]).unwrap();
    // It waits for no read that the ticket holds.
    drop(store);
    gate.store(true, Ordering::Relaxed);
    let lease = ticket.wait().unwrap();
    model.assert_holds(&lease);
    assert!(memory.lock().unwrap().keys().all(|name| name.starts_with("expert 1 of layer 0 ")));
    drop(lease);
    assert!(memory.lock().unwrap().is_empty());
}

#[test]
fn a_store_that_is_dropped_waits_for_its_prefetches() {
    let model = Model::new();
    let gate = Arc::new(AtomicBool::new(true));
    let opened = gate.clone();
    let (backing, memory) = external();
    let (options, script) = kit::scripted(budget(8, backing), move |_, _| {
        kit::until("the gate", || opened.load(Ordering::Relaxed));
        None
    });
    let store = model.store(&options);
    let lease = store.ensure(0, &[1]).unwrap();
    gate.store(false, Ordering::Relaxed);
    let reads = script.reads();
    store.prefetch(1, &[2], None).unwrap();
    kit::until("a read of the prefetch", || script.reads() > reads);
    std::thread::scope(|scope| {
        scope.spawn(move || drop(store));
        gate.store(true, Ordering::Relaxed);
    });
    assert!(memory.lock().unwrap().keys().all(|name| name.starts_with("expert 1 of layer 0 ")));
    model.assert_holds(&lease);
}

#[test]
fn a_callback_that_panics_fails_its_unit_and_no_other() {
    let model = Model::new();
    let (locates, evictions) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (counts_locates, counts_evictions) = (locates.clone(), evictions.clone());
    let memory = Vectors::default();
    let locate = move |unit: &Unit, part: &hoistway_experts::catalog::Part| {
        assert!(counts_locates.fetch_add(1, Ordering::Relaxed) != 1, "the second call panics");
        let mut bytes = vec![0xEE; part.bytes.len() as usize];
        let address = bytes.as_mut_ptr().expose_provenance() as u64;
        memory.lock().unwrap().insert(format!("{} {}", unit.label(), part.tensor), bytes);
        Some(ExternalPlace { memory: DeviceId::Cpu, address })
    };
    let evicted =
        move |_: &Unit| assert!(counts_evictions.fetch_add(1, Ordering::Relaxed) != 1, "so does this one");
    // SAFETY: the vectors stay where they are, unless the same unit is located again.
    let external = Backing::External(unsafe { External::new(locate, evicted) });
    let bytes = model.catalog.expert_bytes(0);
    let options = StoreOptions::default().budget_bytes(4 * bytes).timeout(LONG).backing(external);
    let store = model.store(&options);
    let error = store.ensure(0, &[0]).unwrap_err();
    let Error::NoMemory { source, .. } = &error else { panic!("{error:?}") };
    assert!(matches!(**source, Error::Panicked { .. }), "{error}");
    assert_eq!(store.stats().used_bytes, 0);
    model.assert_holds(&store.ensure(0, &[0]).unwrap());
    // The callback does not come back, so the memory counts as used.
    assert_eq!(store.evict(0, &[0]).unwrap(), 1);
    assert_eq!(store.stats().used_bytes, bytes);
    model.assert_holds(&store.ensure(0, &[1, 2]).unwrap());
}
