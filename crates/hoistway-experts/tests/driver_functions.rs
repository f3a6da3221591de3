//! Each function of a driver that the engine calls, refused once: at its first call, its second and so on, in loads, streams, saves,
//! reads, KV stores and leases of experts. The engine says which functions it calls.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

#[path = "../../hoistway/tests/common/child.rs"]
mod child;
#[path = "../../hoistway/tests/common/gguf.rs"]
mod gguf;
#[path = "experts/kit.rs"]
#[allow(dead_code)]
mod kit;
#[path = "../../hoistway/tests/common/page_cache.rs"]
mod page_cache;
#[path = "../../hoistway/tests/common/stand_in.rs"]
#[allow(dead_code, unreachable_pub)]
mod stand_in;

use hoistway::{
    Arrival, ByteRange, Checkpoint, Dtype, LoadOptions, Route, StreamOptions, Tensor,
    plan::{Layout, Selection, TensorSlice},
    read::{Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target},
    save::{SaveOptions, TensorData, save},
};
use hoistway_device::{CopyStream, Device, DeviceMemory};
use hoistway_experts::{
    backing::Backing,
    catalog::ExpertCatalog,
    store::{Lease, StoreOptions},
};
use hoistway_kv::{
    BufferItem, DeviceBuffer, DirectPath, Key, NamespaceDescription, NamespaceOptions, Region, Status,
    TransferOptions,
};
use kit::{LONG, Model, bytes_of};
use page_cache::{Warm, drop_from_cache};
use stand_in::{STAND_IN, Turn, Vendor};
use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::ControlFlow,
    path::PathBuf,
    sync::{Arc, LazyLock},
};

/// What a driver says that gives no reason: whether work has ended stays open.
const UNKNOWN: i32 = 999;
/// The device does nothing more, so that all of its work has ended.
const LOST: i32 = 719;
/// How many of the first calls of a function are refused, beside the last of all.
const CALLS: u64 = 2;
/// Each other call comes after these. So more of the last are refused, where things are given back.
const ENTERING: [&str; 2] = ["hipGetDevice", "hipSetDevice"];
const LAST_CALLS: u64 = 10;
/// They return nothing, texts, a number, or the code of another call, and none that could refuse them.
const WITHOUT_CODE: [&str; 7] = [
    "cuGetErrorName",
    "cuGetErrorString",
    "cuFileHandleDeregister",
    "cuFileUseCount",
    "hipDrvGetErrorName",
    "hipDrvGetErrorString",
    "hipGetLastError",
];
/// What is read past the host is copied within the device, and HIP has no such reads. No stream of HIP is kept that could have work
/// left, and the stand-in's HIP has no captures.
const UNUSED: [&str; 3] = ["hipMemcpyDtoDAsync", "hipStreamQuery", "hipStreamIsCapturing"];

/// What a use does after what was prepared for it. Else the text of its error, with all reasons.
type Act = Box<dyn FnOnce() -> Result<(), String>>;

/// What a program does with a device.
struct Use {
    name: &'static str,
    vendors: &'static [Vendor],
    prepare: fn(&Files, Vendor) -> Act,
    /// Whether its errors have the words of the driver. A KV store has a number for each item.
    tells: bool,
}

const CUDA: &[Vendor] = &[Vendor::Cuda];

const LOAD: Use = Use { name: "load", vendors: &Vendor::ALL, prepare: load, tells: true };
const CONVERSION: Use = Use { name: "conversion", vendors: &Vendor::ALL, prepare: conversion, tells: true };
const SLICE: Use = Use { name: "slice", vendors: &Vendor::ALL, prepare: slice, tells: true };
const PINNED_CACHE: Use = Use { name: "pinned cache", vendors: CUDA, prepare: pinned_cache, tells: true };
const DIRECT: Use = Use { name: "direct load", vendors: CUDA, prepare: direct, tells: true };
const STREAM: Use = Use { name: "stream", vendors: &Vendor::ALL, prepare: stream, tells: true };
const READ: Use = Use { name: "read", vendors: &Vendor::ALL, prepare: read, tells: true };
const SAVE: Use = Use { name: "save", vendors: &Vendor::ALL, prepare: save_again, tells: true };
const KV: Use = Use { name: "KV store", vendors: &Vendor::ALL, prepare: kv, tells: false };
const KV_DIRECT: Use = Use { name: "direct KV store", vendors: CUDA, prepare: kv_direct, tells: false };
const EXPERTS: Use = Use { name: "experts", vendors: &Vendor::ALL, prepare: experts, tells: true };
const SPARSE: Use = Use { name: "sparse experts", vendors: CUDA, prepare: sparse_experts, tells: true };

const USES: [Use; 12] =
    [LOAD, CONVERSION, SLICE, PINNED_CACHE, DIRECT, STREAM, READ, SAVE, KV, KV_DIRECT, EXPERTS, SPARSE];

/// What uses read.
struct Files {
    directory: tempfile::TempDir,
    /// Keeps the file of tensors in the page cache.
    warm: RefCell<Option<Warm>>,
    model: LazyLock<Arc<Model>>,
    sparse: LazyLock<Arc<Model>>,
}

/// A matrix, and the columns that are loaded of it.
const MATRIX: [u64; 2] = [75, 4000];
const COLUMNS: u64 = 3000;

/// Tensors of a checkpoint: a matrix, a few that take several reads, and many that are odd and short.
static TENSORS: LazyLock<Vec<(String, Dtype, Vec<u64>)>> = LazyLock::new(|| {
    let large = (0..6).map(|at| (format!("large.{at}"), Dtype::Bf16, vec![1 << 15]));
    let small = (0..40).map(|at| (format!("small.{at}"), Dtype::U8, vec![37 + at]));
    large.chain(small).chain([("matrix".to_owned(), Dtype::U8, MATRIX.to_vec())]).collect()
});

impl Files {
    fn new() -> Self {
        let directory = kit::disk();
        let all: Vec<(&str, Dtype, &[u64])> =
            TENSORS.iter().map(|(name, dtype, shape)| (&**name, *dtype, &shape[..])).collect();
        kit::safetensors(&directory.path().join("model.safetensors"), &all);
        Self {
            directory,
            warm: RefCell::default(),
            model: LazyLock::new(|| Arc::new(Model::new())),
            sparse: LazyLock::new(|| Arc::new(sparse_model())),
        }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("model.safetensors")
    }

    /// With its bytes in the page cache.
    fn warm(&self) -> PathBuf {
        self.warm.borrow_mut().get_or_insert_with(|| Warm::make(&self.path()));
        self.path()
    }

    /// Without.
    fn cold(&self) -> PathBuf {
        self.warm.take();
        drop_from_cache(&fs::File::open(self.path()).unwrap());
        self.path()
    }
}

/// An error with all its reasons.
fn text(error: impl std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text += &format!(": {error}");
        source = error.source();
    }
    text
}

fn check(tensors: &[Tensor]) -> Result<(), String> {
    tensors.iter().try_for_each(check_tensor)
}

fn check_tensor(tensor: &Tensor) -> Result<(), String> {
    let (name, dtype, shape) = TENSORS.iter().find(|(name, ..)| name == tensor.name()).unwrap();
    let (dtype, expected) = (*dtype, bytes_of(name, dtype.size_of(shape).unwrap()));
    let found = tensor.bytes().map_err(text)?;
    if tensor.shape() != *shape {
        let rows = expected.chunks_exact(MATRIX[1] as usize);
        let expected = rows.flat_map(|row| &row[..COLUMNS as usize]).copied().collect::<Vec<_>>();
        assert!(*found == expected[..], "columns of {name} have other bytes");
        return Ok(());
    }
    if tensor.dtype() == dtype {
        assert!(*found == expected[..], "{name} has other bytes");
        return Ok(());
    }
    // Half of a float of 32 bits is one of BF16.
    assert_eq!((dtype, tensor.dtype(), found.len()), (Dtype::Bf16, Dtype::F32, 2 * expected.len()));
    for (found, expected) in found.chunks_exact(4).zip(expected.chunks_exact(2)) {
        let found = u32::from_le_bytes(found.try_into().unwrap());
        let expected = u32::from(u16::from_le_bytes(expected.try_into().unwrap())) << 16;
        let are_nan = f32::from_bits(found).is_nan() && f32::from_bits(expected).is_nan();
        assert!(found == expected || are_nan, "{name}: {found:#x} is not {expected:#x}");
    }
    Ok(())
}

fn to(vendor: Vendor, route: Route) -> LoadOptions {
    LoadOptions::default().device(vendor.device(0)).route(route).chunk_bytes(32 << 10)
}

fn load_by(path: PathBuf, options: LoadOptions) -> Act {
    Box::new(move || check(hoistway::load(&[path], &options).map_err(text)?.tensors()))
}

fn load(files: &Files, vendor: Vendor) -> Act {
    load_by(files.cold(), to(vendor, Route::Staged))
}

fn conversion(files: &Files, vendor: Vendor) -> Act {
    load_by(files.warm(), to(vendor, Route::Staged).dtype(Dtype::F32))
}

fn slice(files: &Files, vendor: Vendor) -> Act {
    let columns = TensorSlice::new(vec![0..MATRIX[0], 0..COLUMNS]);
    let selection = Selection::all().select("matrix").slice("matrix", columns);
    load_by(files.warm(), to(vendor, Route::Staged).selection(selection))
}

fn pinned_cache(files: &Files, vendor: Vendor) -> Act {
    load_by(files.warm(), to(vendor, Route::PinnedCache))
}

fn direct(files: &Files, vendor: Vendor) -> Act {
    load_by(files.cold(), to(vendor, Route::Gds))
}

/// Tensors are dropped one after the other, and their memory is used again.
fn stream(files: &Files, vendor: Vendor) -> Act {
    let (path, options) = (files.warm(), to(vendor, Route::Staged).layout(Layout::Tensor));
    Box::new(move || {
        let bound = StreamOptions::default().max_in_flight_bytes(256 << 10);
        let mut loading = Checkpoint::open(&[path]).map_err(text)?.stream(&options, &bound).map_err(text)?;
        loop {
            match loading.next_within(LONG).map_err(text)? {
                Arrival::Tensor(tensor) => check_tensor(&tensor)?,
                Arrival::Finished => return Ok(()),
                _ => {}
            }
        }
    })
}

/// Reads to memory of the caller's.
fn read(files: &Files, vendor: Vendor) -> Act {
    const LEN: u64 = 300_001;
    let path = files.warm();
    let device = Device::open(vendor.device(0)).unwrap();
    let memory = DeviceMemory::new(&device, LEN + 3).unwrap();
    Box::new(move || {
        let reader = Reader::new(&ReaderOptions::default().chunk_bytes(32 << 10)).map_err(text)?;
        let range = ByteRange::at(5, LEN).unwrap();
        assert_eq!(hoistway_device::device_of(memory.address()).map_err(text)?, device.id());
        // SAFETY: within the memory, which outlives the reader.
        let target = unsafe { Target::device(device.id(), memory.address() + 3) };
        let request = ReadRequest::new(&ReadFile::open(&path).map_err(text)?, range, target);
        reader.submit([request], Priority::Demand).map_err(text)?.wait().map_err(text)?;
        let mut found = vec![0; LEN as usize];
        let copies = CopyStream::new(&device).map_err(text)?;
        copies.read_back(memory.address() + 3, &mut found).map_err(text)?;
        assert!(found == fs::read(&path).unwrap()[5..][..LEN as usize]);
        Ok(())
    })
}

fn save_again(files: &Files, vendor: Vendor) -> Act {
    let loaded = hoistway::load(&[files.warm()], &to(vendor, Route::Staged)).unwrap();
    let folder = tempfile::tempdir_in(files.directory.path()).unwrap();
    Box::new(move || {
        let path = folder.path().join("copy.safetensors");
        let tensors: Vec<_> = loaded.tensors().iter().map(TensorData::from).collect();
        let go_on = |_| ControlFlow::Continue(());
        save(&path, &tensors, None, &SaveOptions::default(), go_on).map_err(text)?;
        drop(tensors);
        check(hoistway::load(&[path], &LoadOptions::default()).unwrap().tensors())
    })
}

fn kv(files: &Files, vendor: Vendor) -> Act {
    blocks(files, vendor, DirectPath::Off)
}

fn kv_direct(files: &Files, vendor: Vendor) -> Act {
    blocks(files, vendor, DirectPath::Prefer)
}

/// Stores blocks, and loads them.
fn blocks(files: &Files, vendor: Vendor, direct: DirectPath) -> Act {
    const LEN: usize = 100_000;
    const NAMES: [&str; 3] = ["a", "b", "c"];
    fn items(buffers: Vec<DeviceBuffer>) -> Vec<BufferItem<DeviceBuffer>> {
        let item =
            |(name, buffer): (&&str, _)| BufferItem::new(Key::new(name.as_bytes()).unwrap(), 0, buffer);
        NAMES.iter().zip(buffers).map(item).collect()
    }
    let root = tempfile::tempdir_in(files.directory.path()).unwrap();
    let mut options = hoistway_kv::StoreOptions::new(root.path().join("kv")).direct(direct);
    (options.capacity_bytes, options.min_free_bytes) = (Some(64 << 20), 0);
    let store = hoistway_kv::Store::open(options).unwrap();
    let description = NamespaceDescription::default().model("m");
    let namespace = store.namespace(&description, NamespaceOptions::default()).unwrap();
    Box::new(move || {
        let outcome = (|| {
            let mut buffers = DeviceBuffer::allocate(vendor.device(0), LEN, NAMES.len()).map_err(text)?;
            let regions: Vec<Region> = match direct {
                DirectPath::Off => Vec::new(),
                _ => store.register_buffers(&buffers).map_err(text)?,
            };
            for (name, buffer) in NAMES.iter().zip(&mut buffers) {
                buffer.write(&bytes_of(name, LEN as u64)).map_err(text)?;
            }
            let whole = |completion: hoistway_kv::Completion| match completion.is_ok() {
                true => Ok(()),
                false => {
                    let known = |status: &Status| matches!(status, Status::Ok | Status::Io(_) | Status::Miss);
                    assert!(completion.items.iter().all(known), "{completion:?}");
                    Err(format!("{completion:?}"))
                }
            };
            let options = TransferOptions::default();
            let stored = namespace.store_buffers(items(buffers), &options).map_err(text)?;
            let (completion, mut buffers) = stored.wait(Some(LONG)).map_err(text)?;
            whole(completion)?;
            for buffer in &mut buffers {
                buffer.write(&[0; LEN]).map_err(text)?;
            }
            let loaded = namespace.load_buffers(items(buffers), &options).map_err(text)?;
            let (completion, buffers) = loaded.wait(Some(LONG)).map_err(text)?;
            whole(completion)?;
            for (name, buffer) in NAMES.iter().zip(&buffers) {
                let found = buffer.read(LEN).map_err(text)?;
                assert!(found[..] == bytes_of(name, LEN as u64)[..], "block {name} has other bytes");
            }
            drop(regions);
            Ok(())
        })();
        STAND_IN.configure("FAULTS=");
        drop(namespace);
        store.close(Some(LONG)).map_err(text)?;
        drop(root);
        outcome
    })
}

/// Leases experts, more than there are slots for.
fn experts(files: &Files, vendor: Vendor) -> Act {
    let options = kit::budget_of(4).backing(Backing::DeviceSlots(vendor.device(0)));
    lease(&files.model, options)
}

/// A model whose slices are whole granules.
fn sparse_model() -> Model {
    let directory = kit::disk();
    let path = directory.path().join("model.safetensors");
    let names = ["gate_up_proj", "down_proj"].map(|name| format!("model.layers.0.mlp.experts.{name}"));
    let tensors: Vec<(&str, Dtype, &[u64])> =
        names.iter().map(|name| (&**name, Dtype::U8, &[3, 2 << 20][..])).collect();
    kit::safetensors(&path, &tensors);
    let bytes = fs::read(&path).unwrap();
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let catalog = Arc::new(ExpertCatalog::of_checkpoint(&checkpoint, Some(1)).unwrap());
    Model { directory, path, bytes, checkpoint, catalog }
}

fn sparse_experts(files: &Files, vendor: Vendor) -> Act {
    let options = StoreOptions::default().budget_bytes(2 * (4 << 20)).timeout(LONG);
    lease(&files.sparse, options.backing(Backing::DeviceSparse(vendor.device(0))))
}

fn lease(model: &Arc<Model>, options: StoreOptions) -> Act {
    let model = model.clone();
    Box::new(move || {
        let store = model.open(&options).map_err(text)?;
        let all: u32 = if model.bytes.len() > 4 << 20 { 3 } else { kit::EXPERTS };
        for expert in (0..all).chain([0]) {
            let lease = store.ensure(0, &[expert]).map_err(text)?;
            compare(&model, &lease)?;
            // SAFETY: the default stream lives as long as the device.
            unsafe { lease.release_behind(0) }.map_err(text)?;
        }
        Ok(())
    })
}

/// Fails unless each part of a lease is what the file has at its place.
fn compare(model: &Model, lease: &Lease) -> Result<(), String> {
    for part in lease.units().flat_map(|unit| unit.parts().collect::<Vec<_>>()) {
        let range = part.part().bytes;
        let expected = &model.bytes[range.start() as usize..range.end() as usize];
        let mut found = vec![0; expected.len()];
        let device = Device::open(part.memory()).map_err(text)?;
        let copies = CopyStream::new(&device).map_err(text)?;
        copies.read_back(part.address(), &mut found).map_err(text)?;
        assert!(found == expected, "{} has other bytes", part.part().role);
    }
    Ok(())
}

/// How often each function was called so far.
fn calls() -> BTreeMap<&'static str, u64> {
    let names = hoistway_device::driver_functions()
        .into_iter()
        .filter(|name| !WITHOUT_CODE.contains(name) && !UNUSED.contains(name));
    names.map(|name| (name, STAND_IN.count(&format!("calls.{name}")))).collect()
}

/// Runs a use on a device that is opened for it, and returns how often it called each function.
fn run(of: &Use, files: &Files, vendor: Vendor) -> BTreeMap<&'static str, u64> {
    let act = (of.prepare)(files, vendor);
    let before = calls();
    act().unwrap_or_else(|error| panic!("{} on {vendor:?}: {error}", of.name));
    hoistway_device::release_devices();
    calls().into_iter().map(|(name, count)| (name, count - before[name])).collect()
}

/// Whether a function gives something back: what it is refused for stays in the driver. So does a stream of HIP whose work may be
/// under way, since the wait for it was refused.
fn gives_back(function: &str) -> bool {
    let words = ["Free", "Destroy", "Release", "Unregister", "Deregister", "Unload", "Unmap"];
    function == "hipStreamSynchronize" || words.iter().any(|word| function.contains(word))
}

/// Whether it depends on the time if a use calls a function: several copies are one call if they are ready together, and what has ended
/// need not be asked or waited for.
fn depends_on_time(function: &str) -> bool {
    ["Memcpy", "Event", "Query"].iter().any(|word| function.contains(word))
}

/// Refuses each function that a use calls, at its first calls and at its last.
fn refuse_each(of: &Use) {
    let turn = Turn::take();
    let files = Files::new();
    for &vendor in of.vendors {
        // The first use of a process starts what stays.
        run(of, &files, vendor);
        let counts = run(of, &files, vendor);
        for (&function, &count) in counts.iter().filter(|(_, count)| **count > 0) {
            let last = if ENTERING.contains(&function) { LAST_CALLS } else { 1 };
            let nths: BTreeSet<u64> =
                (1..=count.min(CALLS)).chain(count.saturating_sub(last) + 1..=count).collect();
            // What a lost device does not give back goes with its context, which the stand-in makes usable again instead.
            let lost = (!gives_back(function)).then_some((1, LOST));
            for (nth, code) in nths.into_iter().map(|nth| (nth, UNKNOWN)).chain(lost) {
                let was_refused = refuse(of, &files, vendor, (function, nth, code));
                let may_be_missed = nth > 1 || depends_on_time(function);
                assert!(was_refused || may_be_missed, "{} on {vendor:?} did not call {function}", of.name);
                if !was_refused {
                    eprintln!("{} on {vendor:?} called {function} fewer than {nth} times", of.name);
                }
            }
        }
    }
    drop(turn);
}

/// Whether an error says which function was refused. Without its statistics, nothing proves that cuFile's reads are direct, which is what
/// is said then.
fn names(error: &str, function: &str) -> bool {
    error.contains(function.trim_end_matches("_v2"))
        || function.starts_with("cuFile") && error.contains("cuFile")
}

/// A use whose driver refuses a call ends with the right bytes or an error that says so, and leaves nothing. The next succeeds.
/// Returns whether it came to that call.
fn refuse(of: &Use, files: &Files, vendor: Vendor, (function, nth, code): (&str, u64, i32)) -> bool {
    let fault = format!("{function}:{nth}={code}");
    let calls = || STAND_IN.count(&format!("calls.{function}"));
    let what = format!("{} on {vendor:?}, {fault}", of.name);
    let before = (STAND_IN.leftovers(), STAND_IN.count("leaked"));
    let act = (of.prepare)(files, vendor);
    let called = calls();
    STAND_IN.configure(&format!("FAULTS={fault}"));
    let outcome = act();
    // What is given back later is refused too.
    hoistway_device::release_devices();
    let was_refused = calls() - called >= nth;
    STAND_IN.reset();
    if let Err(error) = &outcome {
        // A device that is lost may be found to be by another call.
        let words = ["returned", "was lost", "cuFile error"];
        let is_of_loss = code == LOST && words.iter().any(|words| error.contains(words));
        assert!(names(error, function) || is_of_loss || !of.tells, "{what}: {error}");
    }
    let after = (STAND_IN.leftovers(), STAND_IN.count("leaked"));
    assert!(after == before || gives_back(function), "{what}: {before:?} became {after:?}, {outcome:?}");
    let again = (of.prepare)(files, vendor)();
    again.unwrap_or_else(|error| panic!("{what}: the next one failed: {error}"));
    was_refused
}

/// No function is left out: what a process calls once is refused in a process of its own.
#[test]
fn every_function_is_called_and_refused() {
    const TEST: &str = "every_function_is_called_and_refused";
    if let Some(function) = child::case() {
        return refuse_first(&function);
    }
    let _turn = Turn::take();
    let files = Files::new();
    let mut left: Vec<&str> = calls().into_keys().collect();
    for of in &USES {
        for &vendor in of.vendors {
            run(of, &files, vendor);
            let counts = run(of, &files, vendor);
            left.retain(|function| counts[function] == 0);
        }
    }
    left.into_iter().for_each(|function| child::run_again(TEST, function));
}

/// In a process that has not started a driver.
fn refuse_first(function: &str) {
    let turn = Turn::take();
    let files = Files::new();
    if function == "cuMemcpyBatchAsync_v2" {
        turn.configure("DRIVER_VERSION=13000");
    }
    let called = || turn.count(&format!("calls.{function}"));
    turn.configure(&format!("FAULTS={function}:1={UNKNOWN}"));
    for of in [LOAD, CONVERSION, DIRECT, PINNED_CACHE, STREAM, EXPERTS] {
        for &vendor in of.vendors {
            let outcome = (of.prepare)(&files, vendor)();
            if called() == 0 {
                assert!(outcome.is_ok(), "{}: {outcome:?}", of.name);
                continue;
            }
            turn.configure("FAULTS=");
            // What was refused once is not asked again: then each use says why.
            for outcome in [outcome, (of.prepare)(&files, vendor)()] {
                let is_named = outcome.as_ref().err().is_none_or(|error| names(error, function));
                assert!(is_named, "{function}: {outcome:?}");
            }
            return;
        }
    }
    panic!("no use calls {function}");
}

macro_rules! each_is_refused {
    ($($name:ident = $of:ident;)*) => {
        $(#[test]
        fn $name() {
            refuse_each(&$of);
        })*
    };
}

each_is_refused! {
    functions_are_refused_to_a_load = LOAD;
    functions_are_refused_to_a_conversion = CONVERSION;
    functions_are_refused_to_a_load_of_columns = SLICE;
    functions_are_refused_to_a_load_from_pinned_pages = PINNED_CACHE;
    functions_are_refused_to_a_direct_load = DIRECT;
    functions_are_refused_to_a_stream = STREAM;
    functions_are_refused_to_a_read = READ;
    functions_are_refused_to_a_save = SAVE;
    functions_are_refused_to_a_kv_store = KV;
    functions_are_refused_to_a_direct_kv_store = KV_DIRECT;
    functions_are_refused_to_leases_of_experts = EXPERTS;
    functions_are_refused_to_leases_of_sparse_experts = SPARSE;
}
