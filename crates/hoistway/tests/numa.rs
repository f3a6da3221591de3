//! Where loads to a device and saves from one run on a machine of two NUMA nodes, which this test makes the engine see.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    assert_is_file, make_warm,
    on_device::{CUDA, Devices, chunky, disk, staged},
    reading::until,
    stand_in::STAND_IN,
};
use hoistway::{
    Dtype, LoadOptions, NumaPlacement,
    save::{SaveOptions, TensorBytes, TensorData},
};
use hoistway_io::{
    memory::{Mapping, PageKind},
    sys::threads::run_on,
};
use std::{
    collections::BTreeSet,
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
    thread,
};

/// A processor that no machine has.
const ABSENT: usize = 100_000;

/// What nodes of the machine have, not those that the engine is made to see.
fn has_memory_for_us(node: u32) -> bool {
    Mapping::anonymous_on(4096, PageKind::Default, node).is_ok()
}

/// The processors that threads of the load whose names begin so may use; `None` while there is no such thread.
fn cpus_of(name: &str) -> Option<Vec<BTreeSet<usize>>> {
    let mut found = Vec::new();
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let path = task.unwrap().path();
        // It may have ended.
        let Ok(comm) = fs::read_to_string(path.join("comm")) else { continue };
        let Ok(status) = fs::read_to_string(path.join("status")) else { continue };
        if comm.starts_with(name) {
            found.push(cpus_in(&status));
        }
    }
    (!found.is_empty()).then_some(found)
}

fn cpus_in(status: &str) -> BTreeSet<usize> {
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let ranges = line.trim().split(',').map(|part| part.split_once('-').unwrap_or((part, part)));
    ranges.flat_map(|(first, last)| first.parse().unwrap()..=last.parse().unwrap()).collect()
}

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Two nodes that the engine is made to see.
struct Nodes {
    root: PathBuf,
    /// The file that says which one the device is at.
    of_device: String,
}

impl Nodes {
    fn new(root: PathBuf) -> Self {
        // SAFETY: other threads of this process read the environment through the standard library, which takes turns with this.
        #[allow(unsafe_code)]
        unsafe {
            std::env::set_var("HOISTWAY_SYSFS", &root);
        }
        let devices = hoistway_device::devices().unwrap();
        let address = devices.into_iter().find(|device| device.id == CUDA).unwrap().pci;
        Self { root, of_device: format!("bus/pci/devices/{address}/numa_node") }
    }

    /// The processors of each, and the node of the device.
    fn set(&self, first: &[usize], second: &[usize], of_device: &str) {
        for (node, cpus) in [first, second].into_iter().enumerate() {
            let list = cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",") + "\n";
            write(&self.root, &format!("devices/system/node/node{node}/cpulist"), &list);
        }
        write(&self.root, &self.of_device, &format!("{of_device}\n"));
    }
}

/// The first and the second half, which share one processor where their number is odd.
fn halves(cpus: &[usize]) -> (&[usize], &[usize]) {
    (&cpus[..cpus.len().div_ceil(2)], &cpus[cpus.len() / 2..])
}

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
    let all: Vec<usize> =
        cpus_in(&fs::read_to_string("/proc/thread-self/status").unwrap()).into_iter().collect();
    if all.len() == 1 {
        eprintln!("skipped: the process may use one processor");
        return;
    }
    let (low, high) = halves(&all);
    Nodes::new(directory.path().join("sys")).set(low, high, "1");
    // The device is opened anew.
    STAND_IN.set("COPY_LATENCY_US=0");
    let loaded = hoistway::load(&[&path], &LoadOptions::default().device(CUDA)).unwrap();
    let mut data: Vec<TensorData<'_>> = loaded.tensors().iter().map(TensorData::from).collect();
    let to = directory.path().join("saved.safetensors");
    let own = cpus_in(&fs::read_to_string("/proc/thread-self/status").unwrap());
    let save_on = |data: &[TensorData<'_>], expected: &[usize]| {
        let expected: BTreeSet<usize> = expected.iter().copied().collect();
        let report = thread::scope(|scope| {
            let held = Held::new();
            let save = scope.spawn(|| {
                let options = SaveOptions::default().sync(false);
                let report = hoistway::save::save(&to, data, None, &options, |_| ControlFlow::Continue(()));
                let left = cpus_in(&fs::read_to_string("/proc/thread-self/status").unwrap());
                assert_eq!(left, own, "the caller's thread stays where it is");
                report
            });
            until("threads of the save where they should be", || {
                cpus_of("hoistway-save").is_some_and(|found| found.iter().all(|cpus| *cpus == expected))
            });
            drop(held);
            save.join().unwrap().unwrap()
        });
        assert!(!report.notes.iter().any(|note| note.contains("any node")), "{report}");
    };
    save_on(&data, high);
    assert_is_file(&hoistway::load(&[&to], &LoadOptions::default()).unwrap(), &file);
    // As many bytes of the host's.
    let len = data.iter().map(|tensor| tensor.bytes.len()).sum::<u64>();
    let (of_host, shape) = (vec![7; len as usize], [len]);
    data.push(TensorData::new("of the host", Dtype::U8, &shape, TensorBytes::Host(&of_host)));
    save_on(&data, &all);
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
    let all = cpus_in(&fs::read_to_string("/proc/thread-self/status").unwrap());
    let (first, last) = (*all.first().unwrap(), *all.last().unwrap());
    if first == last {
        eprintln!("skipped: the process may use one processor");
        return;
    }
    let nodes = Nodes::new(directory.path().join("sys"));
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
                run_on(usable);
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
