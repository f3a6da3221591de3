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
    LoadOptions, NumaPlacement,
    save::{SaveOptions, TensorData},
};
use hoistway_io::{
    memory::{Mapping, PageKind},
    sys::threads::run_on,
};
use std::{collections::BTreeSet, fs, ops::ControlFlow, path::Path, thread};

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

/// Has the engine see two nodes, of the first and the second half of these processors, and the device at the second.
fn see_two_nodes(root: &Path, cpus: &[usize]) -> BTreeSet<usize> {
    let list = |cpus: &[usize]| cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",") + "\n";
    let (low, high) = (&cpus[..cpus.len().div_ceil(2)], &cpus[cpus.len() / 2..]);
    // SAFETY: other threads of this process read the environment through the standard library, which takes turns with this.
    #[allow(unsafe_code)]
    unsafe {
        std::env::set_var("HOISTWAY_SYSFS", root);
    }
    let address =
        hoistway_device::devices().unwrap().into_iter().find(|device| device.id == CUDA).unwrap().pci;
    write(root, "devices/system/node/node0/cpulist", &list(low));
    write(root, "devices/system/node/node1/cpulist", &list(high));
    write(root, &format!("bus/pci/devices/{address}/numa_node"), "1\n");
    high.iter().copied().collect()
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
    let near = see_two_nodes(&directory.path().join("sys"), &all);
    // The device is opened anew.
    STAND_IN.set("COPY_LATENCY_US=0");
    let loaded = hoistway::load(&[&path], &LoadOptions::default().device(CUDA)).unwrap();
    let data: Vec<TensorData<'_>> = loaded.tensors().iter().map(TensorData::from).collect();
    let to = directory.path().join("saved.safetensors");
    let own = cpus_in(&fs::read_to_string("/proc/thread-self/status").unwrap());
    // No copy ends before the settings are taken back.
    STAND_IN.configure("COPY_LATENCY_US=600000000");
    let report = thread::scope(|scope| {
        let save = scope.spawn(|| {
            let options = SaveOptions::default().sync(false);
            let report = hoistway::save::save(&to, &data, None, &options, |_| ControlFlow::Continue(()));
            let left = cpus_in(&fs::read_to_string("/proc/thread-self/status").unwrap());
            assert_eq!(left, own, "the caller's thread stays where it is");
            report
        });
        until("threads of the save near the device", || {
            cpus_of("hoistway-save").is_some_and(|found| found.iter().all(|cpus| *cpus == near))
        });
        STAND_IN.reset();
        save.join().unwrap().unwrap()
    });
    assert!(!report.notes.iter().any(|note| note.contains("any node")), "{report}");
    assert_is_file(&hoistway::load(&[&to], &LoadOptions::default()).unwrap(), &file);
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
    let root = directory.path().join("sys");
    // SAFETY: other threads of this process read the environment through the standard library, which takes turns with this.
    #[allow(unsafe_code)]
    unsafe {
        std::env::set_var("HOISTWAY_SYSFS", &root);
    }
    let address =
        hoistway_device::devices().unwrap().into_iter().find(|device| device.id == CUDA).unwrap().pci;
    let node = format!("bus/pci/devices/{address}/numa_node");
    let (auto, unbound) = (NumaPlacement::Auto, NumaPlacement::Unbound);
    let whole: Vec<usize> = all.iter().copied().collect();
    // Half of the processors each, one of which both have where their number is odd.
    let (low, high) = (&whole[..whole.len().div_ceil(2)], &whole[whole.len() / 2..]);
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
    let list = |cpus: &[usize]| cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",") + "\n";
    write(&root, "devices/system/node/node0/cpulist", &list(low));
    for (usable, second, of_device, numa, expected, reported) in cases {
        let case = format!("{usable:?} {second:?} {of_device} {numa:?}");
        write(&root, "devices/system/node/node1/cpulist", &list(second));
        write(&root, &node, &format!("{of_device}\n"));
        // The device is opened anew. No copy ends before the settings are taken back.
        STAND_IN.set("COPY_LATENCY_US=600000000");
        // There are fewer slots than reads, so that threads wait for one.
        let options = staged().threads(2).chunk_bytes(1 << 20).memory_budget_bytes(4 << 20).numa(numa);
        let loaded = thread::scope(|scope| {
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
            STAND_IN.reset();
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
