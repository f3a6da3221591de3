//! `windlass bench read`: what it measures, and what it writes.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use requirements::{Requirement, skip};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};
use usrbiod::Daemon;

const LENGTHS: [usize; 3] = [3 << 20, 1_000_003, 5];

/// Files of [`LENGTHS`], on a disk.
struct Files {
    directory: tempfile::TempDir,
    paths: Vec<PathBuf>,
}

impl Files {
    fn new() -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let write = |(number, len): (usize, &usize)| {
            let path = directory.path().join(format!("{number}.bin"));
            fs::write(&path, vec![number as u8; *len]).unwrap();
            path
        };
        let paths = LENGTHS.iter().enumerate().map(write).collect();
        Self { directory, paths }
    }

    fn bench(&self, arguments: &[&str]) -> Output {
        bench(&self.paths, arguments)
    }
}

fn bench(paths: &[PathBuf], arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_windlass"));
    command.args(["bench", "read"]).args(arguments).args(paths).output().unwrap()
}

fn columns(path: &Path) -> Vec<Vec<String>> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| line.split(',').map(Into::into).collect()).collect()
}

#[test]
fn every_combination_is_measured_and_written() {
    let files = Files::new();
    let output_dir = files.directory.path().join("new/results");
    let output = files.bench(&[
        "--route=threads",
        "--buffer-sizes=1,2MiB",
        "--chunk-sizes=64KiB,1,2",
        "--num-processes=1,3",
        "--iterations=2",
        "--warmup=0",
        "--download-only",
        "--output-dir",
        output_dir.to_str().unwrap(),
    ]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let raw = columns(&output_dir.join("benchmark_raw.csv"));
    let expected = "backend,buffer_size,chunk_size,num_processes,rank,iteration,num_files,total_bytes_read,read_time,\
                    throughput_mbps,throughput_gbps,round_wall_time,carriers";
    assert_eq!(raw[0].join(","), expected);
    // Two chunk sizes fit the first buffer, three the second; each twice, by one process and by three.
    assert_eq!(raw.len() - 1, 5 * 2 * (1 + 3));
    let total: usize = raw[1..].iter().map(|row| row[7].parse::<usize>().unwrap()).sum();
    assert_eq!(total, 5 * 2 * 2 * LENGTHS.iter().sum::<usize>());
    for row in &raw[1..] {
        let number = |column: usize| row[column].parse::<f64>().unwrap();
        assert!(number(8) <= number(11), "a process is part of its round: {row:?}");
        assert!((number(7) / number(8) / 1e9 - number(10)).abs() < 1e-6, "{row:?}");
    }

    let summary = columns(&output_dir.join("benchmark_summary.csv"));
    assert_eq!(summary.len() - 1, 5 * 2);
    assert!(summary[0].iter().any(|name| name == "throughput_gbps_median"));
    for chart in [
        "by_buffer_chunk_0.0625",
        "by_buffer_chunk_1",
        "by_buffer_chunk_2",
        "by_chunk_buffer_1",
        "by_chunk_buffer_2",
    ] {
        let chart = fs::read_to_string(output_dir.join(format!("throughput_{chart}MiB.svg"))).unwrap();
        assert!(chart.starts_with("<svg") && chart.contains("3 processes"), "{chart}");
    }
}

#[test]
fn single_measures_the_first_of_each() {
    let files = Files::new();
    let arguments =
        ["--mode=single", "--buffer-sizes=2,4", "--chunk-sizes=1,2", "--num-processes=2,1", "--json"];
    let output = files.bench(&arguments);
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let [summary] = &found["summary"].as_array().unwrap()[..] else { panic!("{found}") };
    assert_eq!(
        (&summary["buffer_size_mb"], &summary["chunk_size_mb"], &summary["num_processes"]),
        (&2.0.into(), &1.0.into(), &2.into()),
    );
    assert_eq!(summary["num_iterations"], 3);
    assert_eq!(found["measurements"].as_array().unwrap().len(), 3 * 2);
}

#[test]
fn what_cannot_be_measured_is_an_error_of_its_own_kind() {
    let files = Files::new();
    for (arguments, code, message) in [
        (&["--route=usrbio"][..], 6, "not on a 3FS"),
        (&["--route=mapped"], 2, "route cannot be 'mapped'"),
        (&["--route=fast"], 2, "route cannot be 'fast'"),
        (&["--chunk-sizes=5000B"], 2, "multiple of 4096"),
        (&["--chunk-sizes=8", "--buffer-sizes=4"], 2, "longer than each of the buffers"),
        (&["--num-processes=0"], 2, "somebody has to read"),
        (&["--buffer-sizes=much"], 2, "much"),
    ] {
        let output = files.bench(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(message), "{arguments:?}: {said}");
        assert!(output.stdout.is_empty());
    }
    let output = bench(&[files.directory.path().join("missing")], &[]);
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn a_3fs_is_read_by_usrbio_by_several_processes() {
    let files = Files::new();
    let mount_point = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let daemon = match Daemon::mount(files.directory.path(), mount_point.path(), &usrbiod::Options::default())
    {
        Ok(daemon) => daemon,
        Err(error) => {
            skip(Requirement::Fuse, error);
            return;
        }
    };
    let paths: Vec<PathBuf> =
        (0..LENGTHS.len()).map(|number| daemon.mount_point().join(format!("{number}.bin"))).collect();
    for kept in [&["--download-only"][..], &[]] {
        let arguments =
            ["--route=usrbio", "--usrbio=native", "--num-processes=2", "--chunk-sizes=1", "--json"];
        let output = bench(&paths, &[&arguments[..], kept].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(found["summary"][0]["carriers"], "usrbio direct");
        let read = found["measurements"]
            .as_array()
            .unwrap()
            .iter()
            .map(|own| own["total_bytes_read"].as_u64().unwrap());
        assert_eq!(read.sum::<u64>(), 3 * LENGTHS.iter().sum::<usize>() as u64);
    }
    assert!(daemon.registrations().is_empty(), "processes leave nothing behind");
}
