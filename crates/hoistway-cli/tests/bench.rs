//! `hoistway bench read`: what it measures, and what it writes.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use serde_json::Value;
use std::{
    env::consts::{DLL_PREFIX, DLL_SUFFIX},
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

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
    hoistway("read").args(arguments).args(paths).output().unwrap()
}

fn hoistway(what: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hoistway"));
    command.args(["bench", what]);
    command
}

/// What a command that succeeds prints as JSON.
fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Writes a safetensors file of one tensor of 4 bytes.
fn write_model(path: &Path) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let header = br#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let len = (header.len() as u64).to_le_bytes();
    fs::write(path, [&len[..], header, &[0; 4]].concat()).unwrap();
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
                    throughput_mbps,throughput_gbps,round_wall_time,carriers,device";
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
        assert!(chart.starts_with("<svg") && chart.contains("threads, 3 processes"), "{chart}");
    }
    let svg = |name: &str| fs::read_to_string(output_dir.join(name)).unwrap();
    let bars = svg("throughput_by_processes.svg");
    assert!(bars.contains("1 process") && bars.contains("3 processes") && bars.contains("threads"), "{bars}");
    for (name, processes) in [("heatmap_threads_1procs.svg", 1), ("heatmap_threads_3procs.svg", 3)] {
        let map = svg(name);
        let count = summary[1..].iter().filter(|row| row[3] == processes.to_string()).count();
        assert_eq!(count, 5);
        // A cell for each pair of sizes, one of which was not measured.
        assert_eq!(map.matches("fill=\"#E0E0E0\"").count(), 1, "{map}");
        assert!(map.contains("0.0625"), "{map}");
    }
}

#[test]
fn routes_are_compared() {
    let files = Files::new();
    let output_dir = files.directory.path().join("results");
    let output = files.bench(&[
        "--route=threads,auto",
        "--direct=never",
        "--chunk-sizes=1",
        "--iterations=1",
        "--warmup=0",
        "--json",
        "--output-dir",
        output_dir.to_str().unwrap(),
    ]);
    let found = json(&output);
    let routes: Vec<_> = found["summary"].as_array().unwrap().iter().map(|row| &row["backend"]).collect();
    assert_eq!(routes, ["threads", "auto"]);
    let bars = fs::read_to_string(output_dir.join("throughput_by_processes.svg")).unwrap();
    assert!(bars.contains("threads, auto: throughput"), "{bars}");
    assert!(output_dir.join("heatmap_threads_1procs.svg").exists());
    assert!(output_dir.join("heatmap_auto_1procs.svg").exists());
    let single = files.bench(&["--route=auto,threads", "--mode=single", "--iterations=1", "--json"]);
    assert_eq!(json(&single)["summary"].as_array().unwrap().len(), 1);
}

#[test]
fn chunks_may_be_longer_than_32_mib() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("large.bin");
    fs::File::create(&path).unwrap().set_len((66 << 20) + 5).unwrap();
    let arguments = [
        "--route=threads",
        "--buffer-sizes=128",
        "--chunk-sizes=64",
        "--iterations=1",
        "--warmup=0",
        "--json",
    ];
    let found = json(&bench(&[path], &arguments));
    assert_eq!(found["measurements"][0]["total_bytes_read"], (66 << 20) + 5);
    assert_eq!(found["summary"][0]["chunk_size_mb"], 64.0);
}

#[test]
fn bytes_are_copied_on_to_a_device() {
    let files = Files::new();
    let stand_in =
        std::env::current_exe().unwrap().with_file_name(format!("{DLL_PREFIX}fake_cuda{DLL_SUFFIX}"));
    // A file for each process: Wine loses lines that two append at the same time.
    let trace = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let output = hoistway("read")
        .env("HOISTWAY_CUDA_DRIVER", stand_in)
        .env("FAKE_CUDA_TRACE", trace.path())
        .args([
            "--device=cuda:1",
            "--route=threads",
            "--buffer-sizes=2",
            "--chunk-sizes=1",
            "--num-processes=2",
        ])
        .args(["--iterations=2", "--warmup=1", "--json"])
        .args(&files.paths)
        .output()
        .unwrap();
    let found = json(&output);
    assert_eq!(found["summary"][0]["device"], "cuda:1");
    let carriers = found["summary"][0]["carriers"].as_str().unwrap();
    assert!(
        carriers.split(", ").all(|way| way.starts_with("threads") && way.ends_with(" staged")),
        "{carriers}"
    );
    let traces =
        fs::read_dir(trace.path()).unwrap().map(|file| fs::read_to_string(file.unwrap().path()).unwrap());
    let trace: String = traces.collect();
    let copies = trace.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let copied: u64 =
        copies.filter(|copy| copy["device"] == 1).map(|copy| copy["bytes"].as_u64().unwrap()).sum();
    // Each process first has its route opened by one byte.
    assert_eq!(copied, 3 * LENGTHS.iter().sum::<usize>() as u64 + 2);
}

#[test]
fn files_are_named_below_a_mount_point() {
    let mount = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let below = |name: &str| mount.path().join(name);
    for name in ["a[1]/one.safetensors", "a[1]/two.safetensors", "top.safetensors"] {
        write_model(&below(name));
    }
    fs::write(below("a[1]/other.bin"), [0; 4096]).unwrap();
    // Hidden files and folders are read if a pattern names them.
    fs::create_dir(below(".hidden")).unwrap();
    for name in ["a[1]/._one.safetensors", "._top.safetensors", ".hidden/of.safetensors"] {
        fs::write(below(name), [0; 4096]).unwrap();
    }
    let point = mount.path().to_str().unwrap();
    let absolute = below("top.safetensors");
    for (patterns, files) in [
        (&[][..], 3),
        (&["a*/*"], 3),
        (&["a[1]/one.safetensors"], 1),
        (&["top.*", "a*/o*.bin"], 2),
        (&[".hidden/*"], 1),
        (&[absolute.to_str().unwrap()], 1),
    ] {
        let output = hoistway("read")
            .args(["--mount-point", point, "--iterations=1", "--warmup=0", "--json"])
            .args(patterns)
            .output()
            .unwrap();
        assert_eq!(json(&output)["measurements"][0]["num_files"], files, "{patterns:?}");
    }
    for (pattern, code, message) in [
        ("/etc/hostname", 2, "is not below it"),
        ("*.gguf", 3, "no file matches"),
        ("a***", 3, "not a valid pattern"),
    ] {
        let output = hoistway("read").args(["--mount-point", point, pattern]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{pattern}: {said}");
        assert!(said.contains(message), "{pattern}: {said}");
    }
}

#[test]
fn headers_are_read_in_batches() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let paths: Vec<PathBuf> =
        (0..10).map(|number| directory.path().join(format!("{number}.safetensors"))).collect();
    paths.iter().for_each(|path| write_model(path));
    let output_dir = directory.path().join("results");
    fs::create_dir(&output_dir).unwrap();
    // Only charts of the benchmark's own names are replaced, or refused.
    fs::write(output_dir.join("logo.svg"), "<!DOCTYPE svg><svg/>").unwrap();
    let chart = output_dir.join("headers_per_second.svg");
    fs::write(&chart, "a text").unwrap();
    let refused = hoistway("headers").arg("--output-dir").arg(&output_dir).args(&paths).output().unwrap();
    assert_eq!(refused.status.code(), Some(5), "{}", String::from_utf8_lossy(&refused.stderr));
    fs::remove_file(&chart).unwrap();
    let output = hoistway("headers")
        .args(["--batch-sizes=3,100", "--num-threads=1,4", "--iterations=2", "--json", "--output-dir"])
        .arg(&output_dir)
        .args(&paths)
        .output()
        .unwrap();
    let found = json(&output);
    assert_eq!(found["measurements"].as_array().unwrap().len(), 2 * 2 * 2);
    for measurement in found["measurements"].as_array().unwrap() {
        assert_eq!(
            (&measurement["num_files"], &measurement["header_bytes"]),
            (&10.into(), &(10 * 54).into()),
            "{measurement}"
        );
        let rate =
            measurement["headers_per_second"].as_f64().unwrap() * measurement["wall_time"].as_f64().unwrap();
        assert!((rate - 10.0).abs() < 1e-6, "{measurement}");
    }
    assert_eq!(columns(&output_dir.join("benchmark_headers_batch_raw.csv")).len(), 1 + 8);
    let summary = columns(&output_dir.join("benchmark_headers_batch_summary.csv"));
    assert_eq!((summary.len(), summary[0][2].as_str()), (1 + 4, "headers_per_second_median"));
    let chart = fs::read_to_string(output_dir.join("headers_per_second.svg")).unwrap();
    assert!(chart.contains("1 thread") && chart.contains("4 threads") && chart.contains("100"), "{chart}");

    fs::write(&paths[3], [0xFF; 64]).unwrap();
    let broken = hoistway("headers").args(&paths).output().unwrap();
    let said = String::from_utf8_lossy(&broken.stderr);
    assert!(!broken.status.success() && said.contains("3.safetensors"), "{said}");
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
    let not_3fs = if cfg!(target_os = "linux") { "not on a 3FS" } else { "Linux" };
    for (arguments, code, message) in [
        (&["--route=usrbio"][..], 6, not_3fs),
        (&["--route=mapped"], 2, "route cannot be 'mapped'"),
        (&["--route=fast"], 2, "route cannot be 'fast'"),
        (&["--backends=python"], 6, not_3fs),
        (&["--backends=fast"], 2, "cpp, python, mock"),
        (&["--backends=mock", "--route=threads"], 2, "cannot be used with"),
        (&["--chunk-sizes=5000B"], 2, "multiple of 4096"),
        (&["--chunk-sizes=8", "--buffer-sizes=4"], 2, "larger than every buffer"),
        (&["--num-processes=0"], 2, "at least one process has to read"),
        (&["--chunk-sizes=0"], 2, "a chunk has at least one byte"),
        (&["--device=gpu"], 2, "cuda:N"),
        (&["--device=cuda", "--download-only"], 2, "cannot be used with"),
        (&["--chunk-sizes=1028", "--buffer-sizes=2048"], 2, "up to 1.0 GiB"),
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

#[cfg(target_os = "linux")]
#[test]
fn a_3fs_is_read_by_usrbio_by_several_processes() {
    use requirements::{Requirement, skip};
    use std::{
        thread,
        time::{Duration, Instant},
    };
    use usrbiod::Daemon;

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
            .map(|measurement| measurement["total_bytes_read"].as_u64().unwrap());
        assert_eq!(read.sum::<u64>(), 3 * LENGTHS.iter().sum::<usize>() as u64);
    }
    let output_dir = files.directory.path().join("results");
    let arguments =
        ["--backends=mock,python", "--buffer-sizes=2,4", "--chunk-sizes=1", "--iterations=1", "--output-dir"];
    let output =
        bench(&paths, &[&arguments[..], &[output_dir.to_str().unwrap(), "--num-processes=1,2"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let summary = columns(&output_dir.join("benchmark_summary.csv"));
    assert_eq!(summary.len() - 1, 2 * 2 * 2);
    for row in &summary[1..] {
        let way = if row[0] == "python" { "usrbio direct" } else { "threads buffered" };
        assert!(["mock", "python"].contains(&&*row[0]) && row.contains(&way.into()), "{row:?}");
    }
    assert!(output_dir.join("heatmap_python_2procs.svg").exists());
    // The daemon hears of the end of a process a moment later.
    let begin = Instant::now();
    while !daemon.registrations().is_empty() {
        assert!(begin.elapsed() < Duration::from_secs(60), "processes leave something behind");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn figures_of_the_harness_are_drawn() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("figure.svg");
    let draw = |figure: &str| {
        let mut process =
            hoistway("chart").arg(&path).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        process.stdin.take().unwrap().write_all(figure.as_bytes()).unwrap();
        process.wait_with_output().unwrap()
    };
    let figure = serde_json::json!({ "title": "Both", "columns": 2, "scale": "own", "panels": [
        { "bars": {
            "title": "Warm",
            "value_name": "GB/s",
            "bars": [
                { "label": "ours", "series": 0, "value": 2.5, "range": [2.25, 2.75] },
                { "label": "a < b", "series": 1, "value": 1.25, "range": [1.0, 1.5] },
            ],
            "limits": [{ "label": "device", "value": 3.0 }, { "label": "memory", "value": 3.25 }],
        } },
        { "lines": {
            "title": "By size",
            "size_name": "buffer, MiB",
            "value_name": "GB/s",
            "lines": [{ "label": "ours", "points": [[8, 1.0], [128, 2.0]] }],
        } },
    ] });
    let output = draw(&figure.to_string());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let svg = fs::read_to_string(&path).unwrap();
    let texts = |text: &str| svg.lines().filter(|line| *line == text).count();
    for text in
        ["Both", "Warm", "By size", "a &lt; b", "2.50", "1.25", "device 3.00", "memory 3.25", "8", "128"]
    {
        assert_eq!(texts(text), 1, "{text}: {svg}");
    }
    // A bar, and the legend of a line.
    assert_eq!(texts("ours"), 2, "{svg}");
    // Names of limits that lie close to each other stand one above the other.
    let height = |name: &str| {
        let lines: Vec<&str> = svg.lines().collect();
        let name = lines.iter().position(|line| *line == name).unwrap();
        let (_, after) = lines[name - 1].split_once(" y=\"").unwrap();
        after.split('"').next().unwrap().parse::<i32>().unwrap()
    };
    assert!(height("memory 3.25") <= height("device 3.00") - 12, "{svg}");

    for (figure, message) in [
        ("", "EOF"),
        (r#"{ "title": "x" }"#, "missing field `columns`"),
        (&figure.to_string().replace("\"series\"", "\"colour\""), "unknown field `colour`"),
    ] {
        let output = draw(figure);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("standard input is not a figure") && said.contains(message), "{said}");
    }
}
