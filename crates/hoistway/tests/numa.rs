//! Where loads to a device and saves from one run on a machine of two NUMA nodes, which this test makes the engine see.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    assert_is_file, in_memory, make_warm,
    nodes::{ABSENT, Nodes, cpus_of, halves, has_memory_for_us, own_cpus},
    on_device::{CUDA, Devices, chunky, disk, staged},
    reading::until,
    stand_in::STAND_IN,
    tensor, write_model,
};
use hoistway::{
    Dtype, LoadOptions, NumaPlacement,
    save::{SaveOptions, TensorBytes, TensorData},
};
use hoistway_io::sys::threads::run_on;
use std::{collections::BTreeSet, ops::ControlFlow, path::Path, thread};

/// Copies do not end until this is dropped, also by a panic.
struct Held;

impl Held {
    fn new() -> Self {
        STAND_IN.configure("COPY_LATENCY_US=600000000");
        Self
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        STAND_IN.reset();
    }
}

#[test]
fn threads_of_a_save_are_on_the_node_of_its_device() {
    let devices = Devices::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    let all: Vec<usize> = own_cpus().into_iter().collect();
    if all.len() == 1 {
        eprintln!("skipped: the process may use one processor");
        return;
    }
    let (low, high) = halves(&all);
    let nodes = Nodes::new(directory.path().join("sys"), CUDA);
    nodes.set(low, high, "1");
    // The device is opened anew.
    STAND_IN.set("COPY_LATENCY_US=0");
    let loaded = hoistway::load(&[&path], &LoadOptions::default().device(CUDA)).unwrap();
    let mut data: Vec<TensorData<'_>> = loaded.tensors().iter().map(TensorData::from).collect();
    let to = directory.path().join("saved.safetensors");
    let own = own_cpus();
    let save_on = |to: &Path, options: &SaveOptions, data: &[TensorData<'_>], threads, expected: &[usize]| {
        let expected: BTreeSet<usize> = expected.iter().copied().collect();
        let report = thread::scope(|scope| {
            let held = Held::new();
            let save = scope.spawn(|| {
                let report = hoistway::save::save(to, data, None, options, |_| ControlFlow::Continue(()));
                assert_eq!(own_cpus(), own, "the caller's thread stays where it is");
                report
            });
            until("threads of the save where they should be", || {
                cpus_of(threads).is_some_and(|found| found.iter().all(|cpus| *cpus == expected))
            });
            drop(held);
            save.join().unwrap().unwrap()
        });
        assert!(!report.notes.iter().any(|note| note.contains("any node")), "{report}");
    };
    let options = SaveOptions::default().sync(false);
    save_on(&to, &options, &data, "hoistway-save", high);
    assert_is_file(&hoistway::load(&[&to], &LoadOptions::default()).unwrap(), &file);
    #[cfg(feature = "objects")]
    {
        let server = objectd::Server::start().unwrap();
        let mut store = hoistway::objects::StoreOptions::default();
        let keys = [("endpoint", &*server.url()), ("access_key_id", "key"), ("secret_access_key", "secret")];
        keys.into_iter().for_each(|(name, value)| store.set(name, value).unwrap());
        let options = SaveOptions::default().store(store);
        save_on("s3://models/model.safetensors".as_ref(), &options, &data, "hoistway-upload", high);
        assert!(server.object("models/model.safetensors").unwrap() == std::fs::read(&to).unwrap());
    }
    // As many bytes of the host's.
    let len = data.iter().map(|tensor| tensor.bytes.len()).sum::<u64>();
    let (of_host, shape) = (vec![7; len as usize], [len]);
    data.push(TensorData::new("of the host", Dtype::U8, &shape, TensorBytes::Host(&of_host)));
    save_on(&to, &options, &data, "hoistway-save", &all);
    drop(data);
    drop(loaded);
    devices.assert_nothing_left("a save");
}

#[test]
fn threads_and_staging_of_a_load_are_on_the_node_of_its_device() {
    let devices = Devices::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    make_warm(&path);
    let all = own_cpus();
    let (first, last) = (*all.first().unwrap(), *all.last().unwrap());
    if first == last {
        eprintln!("skipped: the process may use one processor");
        return;
    }
    let nodes = Nodes::new(directory.path().join("sys"), CUDA);
    let (auto, unbound) = (NumaPlacement::Auto, NumaPlacement::Unbound);
    let whole: Vec<usize> = all.iter().copied().collect();
    let (low, high) = halves(&whole);
    let (node_0, node_1) = (NumaPlacement::Node(0), NumaPlacement::Node(1));
    // Processors that the process may use, those of the second node, the node of the device, what is asked for; where threads run, and
    // the node of the report.
    type Case<'a> = (&'a [usize], &'a [usize], &'a str, NumaPlacement, &'a [usize], Option<u32>);
    let cases: [Case<'_>; 9] = [
        (&whole, high, "1", auto, high, Some(1)),
        (&whole, high, "0", auto, low, Some(0)),
        (&whole, high, "1", node_0, low, Some(0)),
        (&whole, high, "1", unbound, &whole, None),
        (&whole, high, "-1", auto, &whole, None),
        (&whole, &[ABSENT], "1", auto, &whole, Some(1)),
        (&[first], high, "1", node_0, &[first], Some(0)),
        (&[first], &[last], "0", node_1, &[first], Some(1)),
        (&[first], &[], "0", node_1, &[first], Some(1)),
    ];
    for (usable, second, of_device, numa, expected, reported) in cases {
        let case = format!("{usable:?} {second:?} {of_device} {numa:?}");
        nodes.set(low, second, of_device);
        // The device is opened anew.
        STAND_IN.set("COPY_LATENCY_US=0");
        // There are fewer slots than reads, so that threads wait for one.
        let options = staged().threads(2).chunk_bytes(1 << 20).memory_budget_bytes(4 << 20).numa(numa);
        let loaded = thread::scope(|scope| {
            let held = Held::new();
            let load = scope.spawn(|| {
                run_on(usable).unwrap();
                hoistway::load(&[&path], &options)
            });
            let expected: BTreeSet<usize> = expected.iter().copied().collect();
            for name in ["hoistway-device", "hoistway-copy"] {
                let is_there =
                    || cpus_of(name).is_some_and(|found| found.iter().all(|cpus| *cpus == expected));
                until(&format!("{case}: {name} on {expected:?}"), is_there);
            }
            drop(held);
            load.join().unwrap().unwrap()
        });
        assert_is_file(&loaded, &file);
        let report = loaded.report();
        assert_eq!(report.memory.numa_node, reported, "{case}");
        let (text, of_node) = (report.to_string(), if reported == Some(0) { low } else { second });
        let is_far = reported.is_some() && !usable.iter().any(|cpu| of_node.contains(cpu));
        assert_eq!(text.contains("asked for"), reported.is_some(), "{text}");
        assert_eq!(text.contains("threads ran on any node"), is_far, "{text}");
        let is_refused = reported.is_some_and(|node| !has_memory_for_us(node));
        assert_eq!(text.contains("staging memory may be on any node"), is_refused, "{text}");
    }
    devices.assert_nothing_left("loads on nodes");
}

#[test]
fn a_load_says_that_the_node_of_a_drive_is_not_known() {
    let Some(directory) = in_memory() else { return };
    let path = directory.path().join("model.safetensors");
    let options = LoadOptions::default().numa(NumaPlacement::NearStorage);
    // The caller's thread makes the load of few bytes.
    for len in [2 << 20, 5000] {
        let file = write_model(&path, &[tensor("a", Dtype::U8, &[len])], 0, 1);
        let loaded = hoistway::load(&[&path], &options).unwrap();
        assert_is_file(&loaded, &file);
        let (report, name) = (loaded.report(), path.display().to_string());
        let is_it = |note: &String| note.contains("at which NUMA node the drive of") && note.contains(&name);
        assert!(report.notes.iter().any(is_it) && report.memory.numa_node.is_none(), "{report}");
    }
}
