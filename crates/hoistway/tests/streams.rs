//! Streams and loads into the caller's memory, on every route and under faults: order, bound, errors, ends.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{
    Footprint, HAS_DIRECT_PATH, QUEUED, assert_nothing_left, can_read, devices, expected, make_cold,
    make_warm, mixed_model,
    on_device::{ROCM, TOY},
};
use hoistway::{
    Checkpoint, DeviceId, DirectIo, Error, FillTarget, Filled, LoadOptions, Order, Route, StreamOptions,
    plan::{Layout, Selection, TensorSlice},
    route::fault::{Fault, FaultScript},
};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard},
    time::Duration,
};

/// Footprints are of the whole process, so these tests take turns.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

struct Model {
    _directory: tempfile::TempDir,
    path: PathBuf,
    file: Vec<u8>,
}

fn model() -> Model {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, file) = mixed_model(directory.path());
    Model { _directory: directory, path, file }
}

/// Every lane of loads, and whether the file is cached for it.
fn lanes() -> Vec<(LoadOptions, bool)> {
    let ([host, device], rocm, toy) = (devices(), ROCM, TOY);
    let all = [
        (host, Route::Auto, DirectIo::Auto, true),
        (host, Route::Auto, DirectIo::Auto, false),
        (host, QUEUED, DirectIo::Auto, false),
        (host, Route::Threads, DirectIo::Never, false),
        (host, Route::Toy, DirectIo::Auto, false),
        (device, Route::Toy, DirectIo::Auto, false),
        (device, Route::Staged, DirectIo::Auto, true),
        (device, Route::Auto, DirectIo::Auto, false),
        (device, Route::GdsCompat, DirectIo::Auto, false),
        (rocm, Route::Staged, DirectIo::Auto, true),
        (rocm, Route::Auto, DirectIo::Auto, false),
        (toy, Route::Staged, DirectIo::Auto, true),
        (toy, Route::Auto, DirectIo::Auto, false),
    ];
    let usable = all.into_iter().filter(|(_, route, direct, _)| {
        if !HAS_DIRECT_PATH && *route == Route::GdsCompat {
            return false;
        }
        let by = if matches!(route, Route::Staged | Route::GdsCompat) { Route::Threads } else { *route };
        can_read(Path::new(env!("CARGO_TARGET_TMPDIR")), by, *direct)
    });
    start_threads_that_stay();
    let layouts = [Layout::File, Layout::Packed, Layout::Tensor];
    usable
        .flat_map(|(device, route, direct, warm)| {
            layouts.map(|layout| {
                let chunk_bytes = 64 << 10;
                (
                    LoadOptions::default()
                        .device(device)
                        .route(route)
                        .direct(direct)
                        .layout(layout)
                        .chunk_bytes(chunk_bytes),
                    warm,
                )
            })
        })
        .collect()
}

/// cuFile starts threads when it is first used: before a test counts them.
fn start_threads_that_stay() {
    static STARTED: std::sync::Once = std::sync::Once::new();
    STARTED.call_once(|| {
        let model = model();
        let [_, device] = devices();
        let options = LoadOptions::default().device(device).route(Route::GdsCompat);
        // Where the file system has no direct reads, there is no cuFile either.
        let _ = hoistway::load(&[&model.path], &options);
    });
}

fn prepare(model: &Model, warm: bool) {
    if warm { make_warm(&model.path) } else { make_cold(&model.path) }
}

#[test]
fn tensors_come_in_order_and_reads_stay_within_the_bound() {
    let _turn = turn();
    let model = model();
    let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
    let names: Vec<String> = checkpoint.catalog().tensors().iter().map(|t| t.name.to_string()).collect();
    let largest = checkpoint.catalog().tensors().iter().map(|t| t.bytes.len()).max().unwrap();
    for (options, warm) in lanes() {
        for bound in [0, 100_000, 2 * largest] {
            prepare(&model, warm);
            let shorts = FaultScript::new(|number, _| (number % 5 == 0).then_some(Fault::Short(5000)));
            let options = options.clone().faults(shorts);
            let stream = StreamOptions::default().order(Order::File).max_in_flight_bytes(bound);
            let mut loading = checkpoint.stream(&options, &stream).unwrap();
            let (mut given, mut taken) = (Vec::new(), 0);
            while let Some(tensor) = loading.next() {
                let tensor = tensor.unwrap();
                let carried = loading.progress().bytes_done;
                let most = bound.max(tensor.len_bytes() + 2 * options.chunk_bytes);
                assert!(carried <= taken + most, "{carried} > {taken} + {most}: {options:?}");
                assert_eq!(
                    tensor.bytes().unwrap(),
                    expected(&model.file, tensor.name()),
                    "{}",
                    tensor.name()
                );
                taken += tensor.len_bytes();
                given.push(tensor.name().to_owned());
            }
            assert_eq!(given, names, "{options:?}");
            assert_eq!(loading.report().tensor_bytes, taken);
        }
    }
}

#[test]
fn what_was_whole_before_an_error_is_handed_out_first() {
    let _turn = turn();
    let model = model();
    let middle = model.file.len() as u64 / 2;
    let lanes = lanes();
    let before = Footprint::now();
    for (options, warm) in lanes {
        prepare(&model, warm);
        let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
        let fails = FaultScript::new(move |_, offset| (offset >= middle).then_some(Fault::Broken));
        let options = options.faults(fails);
        let stream = StreamOptions::default().order(Order::File).max_in_flight_bytes(200_000);
        let mut loading = checkpoint.stream(&options, &stream).unwrap();
        let mut position = 0;
        let error = loop {
            match loading.next().expect("a fault ends in an error") {
                Ok(tensor) => {
                    let entry = &checkpoint.catalog().tensors()[position];
                    assert_eq!(tensor.name(), &*entry.name);
                    assert_eq!(tensor.bytes().unwrap(), expected(&model.file, tensor.name()));
                    position += 1;
                }
                Err(error) => break error,
            }
        };
        assert!(matches!(&error, Error::Io { tensor: Some(_), .. }), "{error:?}");
        // With so tight a bound all that lie well before the fault were given.
        let next = &checkpoint.catalog().tensors()[position];
        assert!(next.bytes.end() + 400_000 > middle, "{} of {:?}", next.name, options);
        assert!(loading.next().is_none());
        assert!(matches!(loading.wait(), Err(Error::Cancelled)), "nothing partial is delivered");
        drop(checkpoint);
        assert_nothing_left(&before);
    }
}

#[test]
fn a_stream_that_is_left_leaves_nothing() {
    let _turn = turn();
    let model = model();
    let lanes = lanes();
    // The memory of a device of the stand-in has a file, which stays.
    drop(hoistway::load(&[&model.path], &LoadOptions::default().device(ROCM)).unwrap());
    let before = Footprint::now();
    for (options, warm) in lanes {
        prepare(&model, warm);
        let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
        let stream = StreamOptions::default().order(Order::Arrival).max_in_flight_bytes(100_000);
        let mut loading = checkpoint.stream(&options, &stream).unwrap();
        drop(loading.next().unwrap().unwrap());
        drop(loading);
        drop(checkpoint.stream(&options, &stream).unwrap());
        drop(checkpoint);
        assert_nothing_left(&before);
    }
}

/// A target in memory of the host for each tensor.
fn targets(checkpoint: &Checkpoint) -> (Vec<FillTarget>, Vec<Vec<u8>>) {
    let requests = Selection::all().resolve(checkpoint.catalog()).unwrap();
    let mut memory: Vec<Vec<u8>> = requests
        .iter()
        .map(|request| vec![0xA5; checkpoint.catalog().tensor(request.tensor).bytes.len() as usize])
        .collect();
    let target = |(request, memory): (_, &mut Vec<u8>)| {
        let address = memory.as_mut_ptr().expose_provenance() as u64;
        FillTarget::new(request, DeviceId::Cpu, address, memory.len() as u64)
    };
    let targets = requests.into_iter().zip(&mut memory).map(target).collect();
    (targets, memory)
}

#[test]
fn a_fill_that_fails_has_filled_what_it_told_of() {
    let _turn = turn();
    let model = model();
    let middle = model.file.len() as u64 / 2;
    let (targets, mut memory) = targets(&Checkpoint::open(&[&model.path]).unwrap());
    // What the first fill advises about the targets stays.
    let mut before = None;
    for (route, warm) in [(Route::Auto, true), (Route::Auto, false), (QUEUED, false), (Route::Threads, false)]
    {
        if !can_read(Path::new(env!("CARGO_TARGET_TMPDIR")), route, DirectIo::Auto) {
            continue;
        }
        for order in [Order::Arrival, Order::File] {
            prepare(&model, warm);
            let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
            memory.iter_mut().for_each(|memory| memory.fill(0xA5));
            let fails = FaultScript::new(move |_, offset| (offset >= middle).then_some(Fault::Broken));
            let options = LoadOptions::default().route(route).faults(fails);
            // SAFETY: `memory` is used by nothing else before a target is told, and outlives the load.
            #[allow(unsafe_code)]
            let mut filling = unsafe { checkpoint.fill(&targets, &options, order) }.unwrap();
            let mut told = Vec::new();
            loop {
                match filling.next_within(Duration::from_millis(50)) {
                    Ok(Filled::Target(target)) => told.push(target),
                    Ok(Filled::Pending) => {}
                    Ok(Filled::Finished) => panic!("the fault was not told"),
                    Err(error) => {
                        assert!(matches!(error, Error::Io { tensor: Some(_), .. }), "{error:?}");
                        break;
                    }
                }
            }
            filling.cancel().unwrap();
            assert!(!told.is_empty());
            assert!(order == Order::Arrival || told.is_sorted());
            for target in told {
                let name = &checkpoint.catalog().tensors()[target].name;
                assert_eq!(memory[target], expected(&model.file, name), "{name}");
            }
            drop((filling, checkpoint));
            assert_nothing_left(before.get_or_insert_with(Footprint::now));
        }
    }
}

#[test]
fn targets_of_another_size_or_that_overlap_are_refused() {
    let _turn = turn();
    let model = model();
    let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
    let (targets, memory) = targets(&checkpoint);
    let large: HashMap<usize, u64> =
        targets.iter().map(|target| target.len_bytes).enumerate().filter(|(_, len)| *len > 1000).collect();
    let position = *large.keys().min().unwrap();
    let mut wrong: Vec<Vec<FillTarget>> = vec![targets.clone(); 4];
    wrong[0][position].len_bytes -= 1;
    wrong[1][position].request.slice = TensorSlice::new(vec![0..1]);
    wrong[2][position].address = 0;
    let other = *large.keys().find(|&&other| other != position).unwrap();
    wrong[3][position].address = targets[other].address + 1;
    for targets in wrong {
        // SAFETY: nothing is read.
        #[allow(unsafe_code)]
        let error =
            unsafe { checkpoint.fill(&targets, &LoadOptions::default(), Order::Arrival) }.unwrap_err();
        assert!(matches!(error, Error::InvalidOption { option: "copy_into", .. }), "{error:?}");
    }
    assert!(memory.iter().flatten().all(|&byte| byte == 0xA5));
}

/// Options that are not the default, each for one field that a fill has no use for.
fn useless_options() -> Vec<(&'static str, LoadOptions)> {
    let set = |option: &'static str, value: &str| {
        let mut options = LoadOptions::default();
        options.set(option, value).unwrap();
        (option, options)
    };
    // SAFETY: it gives nothing.
    #[allow(unsafe_code)]
    let allocator = unsafe { hoistway::DeviceAllocator::new(|_| Err(Error::Cancelled)) };
    let defaults = LoadOptions::default;
    vec![
        set("device", "cuda:0"),
        set("dtype", "bfloat16"),
        set("layout", "packed"),
        set("rings", "2"),
        set("huge_pages", "reserved"),
        set("numa", "99"),
        set("populate", "true"),
        ("select", defaults().selection(Selection::all().select("*"))),
        ("pool", defaults().pool(hoistway::memory::MemoryPool::new(4096).unwrap())),
        ("allocator", defaults().allocator(allocator)),
    ]
}

#[test]
fn a_fill_refuses_options_that_it_has_no_use_for() {
    let _turn = turn();
    let model = model();
    let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
    let (targets, memory) = targets(&checkpoint);
    for (expected, options) in useless_options() {
        // SAFETY: nothing is read.
        #[allow(unsafe_code)]
        let error = unsafe { checkpoint.fill(&targets, &options, Order::Arrival) }.unwrap_err();
        assert!(
            matches!(error, Error::InvalidOption { option, .. } if option == expected),
            "{expected}: {error:?}"
        );
    }
    assert!(memory.iter().flatten().all(|&byte| byte == 0xA5));
}

#[test]
fn the_first_target_that_failed_is_told() {
    let _turn = turn();
    let model = model();
    let (targets, memory) = targets(&Checkpoint::open(&[&model.path]).unwrap());
    for _ in 0..8 {
        prepare(&model, false);
        let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
        let fails = FaultScript::new(|_, _| Some(Fault::Broken));
        let options = LoadOptions::default().route(Route::Threads).threads(1).faults(fails);
        // SAFETY: `memory` is used by nothing else and outlives the load.
        #[allow(unsafe_code)]
        let mut filling = unsafe { checkpoint.fill(&targets, &options, Order::Arrival) }.unwrap();
        std::iter::repeat_with(|| filling.next_within(Duration::from_millis(50)).map_err(drop))
            .take(1000)
            .find(Result::is_err)
            .unwrap()
            .unwrap_err();
        let told: Vec<String> =
            (0..4).map(|_| filling.next_within(Duration::from_millis(50)).unwrap_err().to_string()).collect();
        let first = checkpoint.catalog().tensors().iter().find(|tensor| !tensor.bytes.is_empty()).unwrap();
        assert!(told.iter().all(|told| told.contains(&*first.name)), "{told:?}");
    }
    drop(memory);
}
