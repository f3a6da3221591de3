//! The command as people and scripts meet it: output, messages, exit codes.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use serde_json::Value;
use std::{
    env::consts::{DLL_PREFIX, DLL_SUFFIX},
    fs,
    io::{BufRead, BufReader, Read},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

#[path = "../../hoistway/tests/common/gguf.rs"]
mod gguf;

const LAYERS: usize = 3;
const LAYER_BYTES: usize = 1 << 20;

/// A model of three alike layers and a tensor with a hostile name; on a disk, so that direct reads work.
struct Model {
    directory: tempfile::TempDir,
    path: PathBuf,
    data_start: usize,
}

const HOSTILE: &str = "evil\u{1b}[31m\nname";

impl Model {
    fn new() -> Self {
        let mut header = serde_json::Map::new();
        let mut data = Vec::new();
        let mut add = |name: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>| {
            let offsets = [data.len(), data.len() + bytes.len()];
            let entry = serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
            header.insert(name.into(), entry);
            data.extend(bytes);
        };
        for layer in 0..LAYERS {
            let bytes = (0..LAYER_BYTES).map(|i| (i % 253) as u8 ^ layer as u8).collect();
            add(&format!("layers.{layer}.weight"), "BF16", &[LAYER_BYTES / 2 / 64, 64], bytes);
        }
        add(HOSTILE, "U8", &[3], vec![1, 2, 3]);
        header.insert("__metadata__".into(), serde_json::json!({"note": "one\u{7}two"}));
        let text = Value::Object(header).to_string();
        let mut file = (text.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(text.as_bytes());
        let data_start = file.len();
        file.extend(data);
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = directory.path().join("model.safetensors");
        fs::write(&path, file).unwrap();
        Self { directory, path, data_start }
    }

    fn in_directory(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Changes one byte of the data.
    fn damage(&self) {
        let mut file = fs::read(&self.path).unwrap();
        file[self.data_start + LAYER_BYTES + 5] ^= 1;
        fs::write(&self.path, file).unwrap();
    }
}

fn hoistway(arguments: &[&str], path: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hoistway")).args(arguments).arg(path).output().unwrap()
}

/// A library of every machine, which is no driver.
const OTHER_LIBRARY: &str = if cfg!(windows) { "kernel32.dll" } else { "libc.so.6" };

/// What names the libraries of devices' vendors.
const DRIVERS: [&str; 3] = ["HOISTWAY_CUDA_DRIVER", "HOISTWAY_CUFILE", "HOISTWAY_HIP_DRIVER"];

/// The same on a machine with devices of CUDA and of ROCm: those of the stand-in driver, with these settings.
fn hoistway_with_devices(arguments: &[&str], path: &Path, settings: &[(&str, &str)]) -> Output {
    let stand_in = stand_in();
    Command::new(env!("CARGO_BIN_EXE_hoistway"))
        .envs(DRIVERS.map(|variable| (variable, &stand_in)))
        .envs(settings.iter().copied())
        .args(arguments)
        .arg(path)
        .output()
        .unwrap()
}

/// The stand-in driver: Cargo puts it beside the test programs.
fn stand_in() -> PathBuf {
    let name = format!("{DLL_PREFIX}fake_cuda{DLL_SUFFIX}");
    let stand_in = std::env::current_exe().unwrap().parent().unwrap().join(name);
    assert!(stand_in.exists(), "{} was not built", stand_in.display());
    stand_in
}

/// Standard output of a command that succeeds and says nothing else.
fn ok(arguments: &[&str], path: &Path) -> String {
    let output = hoistway(arguments, path);
    let complaints = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{arguments:?}: {complaints}");
    assert_eq!(complaints, "", "{arguments:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn json(arguments: &[&str], path: &Path) -> Value {
    serde_json::from_str(&ok(arguments, path)).unwrap()
}

/// What a command that fails says, which must be one sentence without output before it.
fn fails(code: i32, arguments: &[&str], path: &Path) -> String {
    let output = hoistway(arguments, path);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "", "{arguments:?}");
    assert!(said.starts_with("hoistway: ") && said.lines().count() == 1, "{said}");
    said
}

#[test]
fn inspect_folds_layers_that_are_alike() {
    let model = Model::new();
    let text = ok(&["inspect"], &model.path);
    assert!(text.contains("0..2") && text.contains("1.0 MiB each"), "{text}");
    assert!(!text.contains("layers.1"), "{text}");
    let all = ok(&["inspect", "--all"], &model.path);
    assert!(!all.contains("0..2") && all.matches("BF16 [8192, 64]").count() == LAYERS, "{all}");
}

#[test]
fn inspect_as_json_has_names_offsets_and_metadata_as_they_are() {
    let model = Model::new();
    let value = json(&["inspect", "--json"], &model.path);
    assert_eq!(value["files"][0]["metadata"]["note"], "one\u{7}two");
    let hostile =
        value["tensors"].as_array().unwrap().iter().find(|tensor| tensor["name"] == HOSTILE).unwrap();
    assert_eq!(hostile["bytes"], 3);
    let offset = hostile["file_offset"].as_u64().unwrap() as usize;
    assert_eq!(fs::read(&model.path).unwrap()[offset..offset + 3], [1, 2, 3]);
}

#[test]
fn nothing_in_a_file_gets_control_of_the_terminal() {
    let model = Model::new();
    let manifest = model.in_directory("manifest.json");
    let save = ["verify", "--save", manifest.to_str().unwrap()];
    for text in [ok(&["inspect", "--all"], &model.path), ok(&save, &model.path)] {
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        assert!(text.lines().any(|line| line.contains(r"evil\u{1b}[31m\nname")), "{text}");
    }
    let escaped = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, escaped.replace("evil", "missing")).unwrap();
    let output = hoistway(&["verify", "--against", manifest.to_str().unwrap()], &model.path);
    assert_eq!(output.status.code(), Some(4));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.lines().all(|line| line.starts_with("hoistway: ")), "{said:?}");
    assert_eq!(said.lines().count(), 3, "{said}");
}

#[test]
fn load_says_how_and_stays_quiet_without_a_terminal() {
    let model = Model::new();
    let line = ok(&["load"], &model.path);
    assert!(line.starts_with("4 tensors, 3.0 MiB from 1 file in") && line.lines().count() == 1, "{line}");
    let report = ok(&["load", "--report", "--verify"], &model.path);
    assert!(report.contains("verified  4 tensors"), "{report}");
    let value = json(&["load", "--json", "--route", "threads"], &model.path);
    assert_eq!(value["route"], "threads");
    let carriers = value["carriers"].as_array().unwrap();
    let carried: u64 = carriers.iter().map(|carrier| carrier["tensor_bytes"].as_u64().unwrap()).sum();
    assert_eq!(carried, (LAYERS * LAYER_BYTES + 3) as u64);
    assert!(carriers.iter().all(|carrier| carrier["route"] == "threads"), "{value}");
}

#[test]
#[cfg_attr(windows, ignore = "script, which gives a terminal, is a program of Unix")]
fn a_terminal_sees_a_bar_that_is_gone_at_the_end() {
    let model = Model::new();
    // `script` runs the command with a terminal of its own.
    let program = env!("CARGO_BIN_EXE_hoistway");
    let command = format!("{program} verify --json {} > /dev/null", model.path.display());
    let output = Command::new("script")
        .args(["--quiet", "--return", "--command", &command, "/dev/null"])
        .env("TERM", "xterm")
        .output()
        .unwrap();
    let seen = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{seen}");
    assert!(seen.contains("3.00 MiB"), "{seen:?}");
    assert!(seen.ends_with("\u{1b}[2K"), "the line is cleared: {seen:?}");
}

/// What a command writes to a terminal of 80 columns.
fn on_a_terminal(arguments: &str, variables: &[(&str, &str)]) -> String {
    let command = format!("stty columns 80 rows 24; {} {arguments}", env!("CARGO_BIN_EXE_hoistway"));
    let output = Command::new("script")
        .args(["--quiet", "--return", "--command", &command, "/dev/null"])
        .env("TERM", "xterm")
        .env_remove("NO_COLOR")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
#[cfg_attr(windows, ignore = "script, which gives a terminal, is a program of Unix")]
fn a_terminal_gets_colours_and_lines_that_fit_it() {
    let model = Model::new();
    let folder = model.directory.path().display();
    let load = format!("load --report --route threads --direct never {}", model.path.display());
    let (doctor, load) = (on_a_terminal(&format!("doctor {folder}"), &[]), on_a_terminal(&load, &[]));
    assert!(doctor.contains("\u{1b}[32mok\u{1b}[0m"), "{doctor:?}");
    assert!(load.contains("\u{1b}[1m4 tensors"), "{load:?}");
    let plain = on_a_terminal(&format!("doctor {folder}"), &[("NO_COLOR", "1")]);
    assert!(!plain.contains('\u{1b}'), "{plain:?}");
    // A path may have more, and is not broken.
    let is_wide = |line: &&str| line.chars().count() > 80 && line.contains(' ') && !line.contains(".tmp");
    assert_eq!(plain.lines().find(is_wide), None);
    assert!(plain.lines().any(|line| line.starts_with("        ")), "{plain}");
}

#[test]
fn load_selects_and_excludes() {
    let model = Model::new();
    let value = json(&["load", "--json", "--select", "layers.*", "--exclude", "layers.1.*"], &model.path);
    assert_eq!(value["tensors"], 2);
    let said = fails(3, &["load", "--select", "layer.*"], &model.path);
    assert!(said.contains("layer.*"), "{said}");
}

#[test]
fn the_environment_sets_options_and_flags_win() {
    let model = Model::new();
    let run = |route: &str, flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hoistway"));
        command.env("HOISTWAY_ROUTE", route).args(["load", "--json"]).args(flags).arg(&model.path);
        command.output().unwrap()
    };
    let route = |output: Output| serde_json::from_slice::<Value>(&output.stdout).unwrap()["route"].clone();
    assert_eq!(route(run("threads", &[])), "threads");
    assert_eq!(route(run("threads", &["--route", "auto"])), "auto");
    let refused = run("warp", &[]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8(refused.stderr).unwrap().contains("HOISTWAY_ROUTE"));
}

#[test]
fn a_misspelt_variable_is_named() {
    let model = Model::new();
    let mut command = Command::new(env!("CARGO_BIN_EXE_hoistway"));
    let output = command.env("HOISTWAY_ROUT", "threads").arg("load").arg(&model.path).output().unwrap();
    assert!(output.status.success());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("HOISTWAY_ROUT is not one of hoistway's: is HOISTWAY_ROUTE meant?"), "{said}");
}

#[test]
fn a_server_that_refuses_is_told_of_before_it_is_given_up() {
    // No server listens on port 1.
    let url = "http://127.0.0.1:1/model.safetensors";
    let mut command = Command::new(env!("CARGO_BIN_EXE_hoistway"));
    let mut running = command.args(["inspect", url]).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(running.stderr.take().unwrap()).read_line(&mut line).unwrap();
    running.kill().unwrap();
    running.wait().unwrap();
    assert!(line.contains("cannot be reached") && line.ends_with("; trying again\n"), "{line}");
}

#[test]
fn exit_codes_tell_what_kind_of_failure_it_was() {
    let model = Model::new();
    let said = fails(2, &["load", "--route", "warp"], &model.path);
    assert!(said.contains("auto, io_uring, overlapped, threads, cached, pinned-cache, mapped"), "{said}");
    fails(3, &["inspect"], &model.in_directory("nowhere.safetensors"));
    fails(5, &["load", "--manifest", "/nonexistent/manifest.json"], &model.path);
    let said = fails(7, &["load", "--memory-budget", "1MiB"], &model.path);
    assert!(said.contains("MiB"), "{said}");

    let short = model.in_directory("short.safetensors");
    let file = fs::read(&model.path).unwrap();
    fs::write(&short, &file[..file.len() - 1]).unwrap();
    let said = fails(4, &["load"], &short);
    assert!(said.contains("short.safetensors") && said.contains(r"evil\u{1b}[31m\nname"), "{said}");
}

#[test]
fn running_programs_is_refused_without_the_python_package() {
    let said = fails(1, &["run", "--report", "--"], Path::new("generate.py"));
    assert!(said.contains("'generate.py' is not run") && said.contains("install"), "{said}");
}

/// What is in the way of a file that replaces another is none of the earlier file's.
#[test]
#[cfg_attr(windows, ignore = "Windows has no limit of the length of files")]
fn a_result_that_cannot_be_written_leaves_the_earlier_file() {
    let model = Model::new();
    let manifest = model.in_directory("manifest.json");
    let trace = model.in_directory("trace.csv");
    for (arguments, path) in [
        (format!("verify '{}' --save '{}'", model.path.display(), manifest.display()), &manifest),
        (format!("moe generate zipf --output '{}'", trace.display()), &trace),
    ] {
        let run = |before: &str| {
            let command = format!("{before} exec '{}' {arguments}", env!("CARGO_BIN_EXE_hoistway"));
            Command::new("sh").args(["-c", &command]).stdout(Stdio::null()).output().unwrap()
        };
        assert!(run("").status.success());
        let earlier = fs::read_to_string(path).unwrap();
        let output = run("trap '' XFSZ; ulimit -f 0 &&");
        assert_eq!(output.status.code(), Some(5), "{arguments}: {output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("write failed") && said.contains(path.to_str().unwrap()), "{said}");
        assert_eq!(fs::read_to_string(path).unwrap(), earlier, "{arguments}");
        let left = fs::read_dir(model.directory.path())
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().ends_with(".tmp"));
        assert_eq!(left.count(), 0, "{arguments}");
    }
    assert_eq!(ok(&["moe", "generate", "zipf", "--output"], Path::new("/dev/null")), "");
}

#[cfg(windows)]
#[test]
fn a_subcommand_of_linux_says_so() {
    let said = fails(6, &["kv", "stat", "--json"], Path::new("root"));
    assert!(said.contains("available on Linux only"), "{said}");
}

#[cfg(target_os = "linux")]
#[test]
fn what_is_not_cached_cannot_be_loaded_from_the_cache_until_it_is_warm() {
    let model = Model::new();
    let file = fs::File::open(&model.path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let said = fails(6, &["load", "--route", "cached"], &model.path);
    assert!(said.contains("hoistway warm"), "{said}");
    let warmed = json(&["warm", "--json"], &model.path);
    assert_eq!(warmed["cached_bytes"], file.metadata().unwrap().len());
    ok(&["load", "--route", "cached"], &model.path);
}

#[test]
fn a_mapped_load_says_that_nothing_was_read() {
    let model = Model::new();
    let path = model.in_directory("aligned.safetensors");
    let header = br#"{"a":{"dtype":"U8","shape":[4096],"data_offsets":[0,4096]}}"#;
    let length = (header.len() as u64).to_le_bytes();
    fs::write(&path, [&length[..], header, &[7; 4096]].concat()).unwrap();
    let line = ok(&["load", "--route", "mapped"], &path);
    assert!(line.starts_with("mapped 1 tensor, 4.0 KiB of 1 file in "), "{line}");
    assert!(line.ends_with(" s: nothing is read until it is used\n"), "{line}");
    let line = ok(&["load", "--route", "mapped", "--populate"], &path);
    assert!(line.starts_with("1 tensor, 4.0 KiB from 1 file in ") && line.ends_with("/s)\n"), "{line}");
    // What the environment says of memory is for loads that allocate any.
    let of_memory =
        [("HOISTWAY_LAYOUT", "packed"), ("HOISTWAY_NUMA", "0"), ("HOISTWAY_HUGE_PAGES", "reserved")];
    for (arguments, route) in [(&["load", "--route", "mapped"][..], "auto"), (&["load"], "mapped")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hoistway"));
        command.envs(of_memory).env("HOISTWAY_ROUTE", route).args(arguments).arg(&path);
        let output = command.output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
    let said = fails(2, &["load", "--route", "mapped", "--layout", "packed"], &path);
    assert!(said.contains("layout cannot be 'packed'"), "{said}");
}

#[test]
#[cfg_attr(windows, ignore = "the stack of a program for Windows is what its file says")]
fn a_stack_of_64_kib_is_enough() {
    let model = Model::new();
    for command in ["load", "inspect", "verify", "doctor", "warm"] {
        let limited = format!("ulimit -s 64 && exec '{}' {command} \"$1\"", env!("CARGO_BIN_EXE_hoistway"));
        let output = Command::new("sh").args(["-c", &limited, "sh"]).arg(&model.path).output().unwrap();
        assert!(output.status.success(), "{command}: {}, {output:?}", output.status);
    }
}

#[test]
fn one_thing_is_not_called_several() {
    let model = Model::new();
    let name = json(&["inspect", "--json"], &model.path)["tensors"][0]["name"].as_str().unwrap().to_owned();
    let report = ok(&["load", "--report", "--verify", "--select", &name], &model.path);
    for text in ["1 tensor, ", "1 read of ", "verified  1 tensor, "] {
        assert!(report.contains(text), "{text}: {report}");
    }
}

#[test]
fn a_manifest_replaces_no_other_file() {
    let model = Model::new();
    let before = fs::read(&model.path).unwrap();
    let said = fails(5, &["verify", "--save", model.path.to_str().unwrap()], &model.path);
    assert!(said.contains("it is there already, and is not a manifest"), "{said}");
    assert!(fs::read(&model.path).unwrap() == before);
    let manifest = model.in_directory("manifest.json");
    for _ in 0..2 {
        ok(&["verify", "--save", manifest.to_str().unwrap()], &model.path);
    }
    // As other programs write it.
    let value: Value = serde_json::from_slice(&fs::read(&manifest).unwrap()).unwrap();
    let reversed = format!("{{ \"tensors\": {}, \"algorithm\": {} }}", value["tensors"], value["algorithm"]);
    for text in [value.to_string(), reversed] {
        fs::write(&manifest, text).unwrap();
        ok(&["verify", "--save", manifest.to_str().unwrap()], &model.path);
    }
    fs::write(&manifest, "{\"tensors\": 3}").unwrap();
    let said = fails(5, &["verify", "--save", manifest.to_str().unwrap()], &model.path);
    assert!(said.contains("is not a manifest"), "{said}");
}

#[test]
fn a_damaged_tensor_is_found_by_its_digest() {
    let model = Model::new();
    let manifest = model.in_directory("manifest.json");
    let manifest = manifest.to_str().unwrap();
    ok(&["verify", "--save", manifest], &model.path);
    assert_eq!(ok(&["verify", "--against", manifest], &model.path), format!("4 tensors match {manifest}\n"));
    ok(&["load", "--manifest", manifest], &model.path);
    let more = model.in_directory("more.json");
    let entry = r#""tensors": {"lost": {"dtype": "U8", "shape": [1], "digest": ""},"#;
    fs::write(&more, fs::read_to_string(manifest).unwrap().replace(r#""tensors": {"#, entry)).unwrap();
    let said = fails(4, &["load", "--manifest", more.to_str().unwrap()], &model.path);
    assert!(said.contains("'lost'"), "{said}");

    model.damage();
    let output = hoistway(&["verify", "--against", manifest], &model.path);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("'layers.1.weight'") && said.contains("1 difference from"), "{said}");
    let said = fails(4, &["load", "--manifest", manifest], &model.path);
    assert!(said.contains("layers.1.weight"), "{said}");
}

#[test]
fn a_reader_of_the_output_may_leave() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_hoistway"))
        .args(["completions", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(child.wait().unwrap().success(), "{said}");
    assert_eq!(said, "");
}

#[test]
#[cfg_attr(windows, ignore = "Windows has no device that is full")]
fn output_that_cannot_be_written_is_an_error() {
    let model = Model::new();
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_hoistway"))
        .arg("inspect")
        .arg(&model.path)
        .stdout(full)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(5));
    assert!(String::from_utf8(output.stderr).unwrap().contains("cannot write the output"));
}

#[test]
fn doctor_examines_the_machine_and_a_path() {
    let model = Model::new();
    let checks = json(&["doctor", "--json"], model.directory.path());
    let names: Vec<_> =
        checks["checks"].as_array().unwrap().iter().map(|check| check["name"].as_str().unwrap()).collect();
    let machine: &[_] = if cfg!(windows) {
        &["system", "large pages", "NUMA"]
    } else {
        &["kernel", "io_uring", "transparent huge pages", "NUMA"]
    };
    for expected in machine {
        assert!(names.contains(expected), "{names:?}");
    }
    assert!(names.iter().any(|name| name.ends_with(": direct reads")), "{names:?}");
    let output = hoistway(&["doctor"], &model.in_directory("nowhere"));
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("broken  "));
    let verdict = text.lines().last().unwrap();
    assert!(verdict.starts_with("verdict loads fail here: ") && verdict.contains("nowhere"), "{verdict}");
    let text = ok(&["doctor"], model.directory.path());
    assert!(text.lines().last().unwrap().starts_with("verdict loads work here, "), "{text}");
}

#[test]
fn a_model_is_loaded_to_a_device_and_the_report_names_the_route_of_every_byte() {
    let model = Model::new();
    for (device, name) in [("cuda:1", "cuda:1"), ("rocm:1", "rocm:1"), ("hip", "rocm:0")] {
        let load = ["load", "--device", device, "--json", "--verify"];
        let output = hoistway_with_devices(&load, &model.path, &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["device"]["device"], name);
        let carriers = report["carriers"].as_array().unwrap();
        let moved: u64 = carriers.iter().map(|carrier| carrier["tensor_bytes"].as_u64().unwrap()).sum();
        assert_eq!(moved, report["tensor_bytes"].as_u64().unwrap());
        // What the page cache holds may be copied from where it lies.
        let is_named = |carrier: &Value| carrier["via"] == "staged" || carrier["route"] == "pinned-cache";
        assert!(carriers.iter().all(is_named), "{report}");
    }

    let load = ["load", "--device", "cuda", "--dtype", "float32", "--report", "--exclude", "evil*"];
    let text = hoistway_with_devices(&load, &model.path, &[]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("on cuda:0 (Stand-in device 0") && text.contains("converted to F32"), "{text}");
    assert_eq!(text.contains("not used: gds"), cfg!(target_os = "linux"), "{text}");
}

#[test]
fn devices_that_cannot_be_used_have_their_own_exit_code_and_a_fix() {
    let model = Model::new();
    let none = [("HOISTWAY_CUDA_DRIVER", "/nonexistent/libcuda.so.1")];
    let no_devices = [("FAKE_CUDA_DEVICES", "0")];
    let old = [("FAKE_CUDA_DRIVER_VERSION", "11040")];
    let compat = [("FAKE_CUDA_CUFILE_MODE", "compat")];
    let no_cufile = [("HOISTWAY_CUFILE", "/nonexistent/libcufile.so.0")];
    let full = [("FAKE_CUDA_MEMORY_MIB", "1")];
    let lost = [("FAKE_CUDA_FAULTS", "copy:1=719")];
    let no_hip = [("HOISTWAY_HIP_DRIVER", "/nonexistent/libamdhip64.so")];
    let other_library = [("HOISTWAY_HIP_DRIVER", OTHER_LIBRARY)];
    let unfit = std::env::join_paths([OTHER_LIBRARY, "/nonexistent/libamdhip64.so"]).unwrap().into_string();
    let unfit = unfit.unwrap();
    let only_unfit = [("HOISTWAY_HIP_DRIVER", unfit.as_str())];
    let lacks_init = format!("{OTHER_LIBRARY} has no function hipInit");
    // NVIDIA's and AMD's programs and packages, by system.
    let (install, lists) = match cfg!(windows) {
        true => ("install AMD's driver, or the HIP SDK", "hipInfo"),
        false => ("install ROCm 6.0 or later", "rocminfo"),
    };
    let (no_direct_path, get_cufile) = match cfg!(windows) {
        true => ("cuFile is a library of Linux", "use route staged"),
        false => ("compatibility mode", "pip install nvidia-cufile"),
    };
    let old_hip = [("FAKE_CUDA_HIP_VERSION", "50731921")];
    let no_kernels = [("FAKE_CUDA_HIP_ARCHITECTURE", "gfx803")];
    for (arguments, settings, code, words) in [
        (&["load", "--device", "cuda"][..], &none[..], 6, "install NVIDIA's driver"),
        (&["load", "--device", "cuda"], &no_devices, 6, "nvidia-smi"),
        (&["load", "--device", "cuda"], &old, 6, "CUDA 12.0 or later"),
        (&["load", "--device", "cuda:7"], &[], 6, "2 devices"),
        (&["load", "--device", "gpu"], &[], 2, "cuda:N"),
        (&["load", "--device", "cuda", "--route", "gds"], &compat, 6, no_direct_path),
        (&["load", "--device", "cuda", "--route", "gds"], &no_cufile, 6, get_cufile),
        (&["load", "--device", "cuda", "--route", "gds-compat"], &no_cufile, 6, get_cufile),
        (&["load", "--route", "gds"], &[], 2, "the target is cpu"),
        (&["load", "--device", "cuda"], &full, 7, "the memory of cuda:0"),
        (&["load", "--device", "cuda"], &lost, 5, "cuda:0"),
        (&["load", "--device", "rocm"], &no_hip, 6, install),
        (&["load", "--device", "rocm"], &other_library, 6, "has no function hipInit"),
        (&["load", "--device", "rocm"], &only_unfit, 6, &lacks_init),
        (&["load", "--device", "rocm"], &only_unfit, 6, "too old, or a stub; /nonexistent/libamdhip64.so"),
        (&["load", "--device", "rocm"], &old_hip, 6, "serves HIP 5.7"),
        (&["load", "--device", "rocm"], &no_devices, 6, lists),
        (&["load", "--device", "hip:7"], &[], 6, "rocm:0 to rocm:1"),
        (&["load", "--device", "rocm", "--dtype", "float32"], &no_kernels, 6, "converts no elements"),
        (&["load", "--device", "rocm", "--route", "gds"], &[], 6, "hipFile"),
        (&["load", "--device", "rocm"], &full, 7, "the memory of rocm:0"),
        (&["load", "--device", "rocm"], &lost, 5, "rocm:0"),
    ] {
        let output = hoistway_with_devices(arguments, &model.path, settings);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?} {settings:?}: {said}");
        assert!(said.contains(words) && said.lines().count() == 1, "{arguments:?} {settings:?}: {said}");
    }
}

#[test]
fn a_library_that_does_not_serve_is_passed_over_for_the_next() {
    let model = Model::new();
    let libraries =
        std::env::join_paths(["/nonexistent/libamdhip64.so".into(), OTHER_LIBRARY.into(), stand_in()]);
    let libraries = libraries.unwrap().into_string().unwrap();
    let settings = [("HOISTWAY_HIP_DRIVER", libraries.as_str())];
    let load = ["load", "--device", "rocm", "--exclude", "evil*"];
    let output = hoistway_with_devices(&load, &model.path, &settings);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn doctor_examines_devices_and_their_direct_path() {
    let model = Model::new();
    let examine = |settings: &[(&str, &str)]| -> Vec<(String, String)> {
        let output = hoistway_with_devices(&["doctor", "--json"], &model.path, settings);
        let checks: Value = serde_json::from_slice(&output.stdout).unwrap();
        let text = |check: &Value, key: &str| check[key].as_str().unwrap().to_owned();
        let checks = checks["checks"].as_array().unwrap();
        checks.iter().map(|check| (text(check, "name"), text(check, "finding"))).collect()
    };
    let checks = examine(&[("FAKE_CUDA_CUFILE_MODE", "p2pdma")]);
    let finding = |name: &str| {
        let found = checks.iter().find(|(label, _)| label.ends_with(name));
        &found.unwrap_or_else(|| panic!("{name} is missing: {checks:?}")).1
    };
    assert!(finding("CUDA driver").contains("12.8"));
    assert!(finding("cuda:0").contains("compute capability 9.0"));
    finding("NUMA");
    if cfg!(target_os = "linux") {
        for name in ["cuda:1 PCIe link", "cuda:1 BAR", "nvidia-fs", "P2PDMA", "cuFile"] {
            finding(name);
        }
    }
    assert!(finding("ROCm driver").contains("HIP 6.3"));
    assert!(finding("rocm:0").contains("gfx942"));
    if cfg!(target_os = "linux") {
        assert!(finding("gds to rocm:1").contains("hipFile"));
        if !finding("direct reads").contains("not") {
            assert!(finding("gds to cuda:1").contains("P2PDMA"));
        }
    }
    let compat = examine(&[("FAKE_CUDA_CUFILE_MODE", "compat")]);
    assert!(compat.iter().all(|(name, finding)| !name.contains("gds to") || finding.contains("staged")));
    let copying = examine(&[("FAKE_CUDA_HIP_ARCHITECTURE", "gfx803")]);
    assert!(copying.iter().any(|(name, finding)| name == "rocm:1" && finding.contains("copies only")));
    let none = examine(&[("HOISTWAY_CUDA_DRIVER", "/nonexistent")]);
    assert!(
        none.iter()
            .any(|(name, finding)| name == "CUDA driver" && finding.contains("no load goes to its devices"))
    );
}

#[test]
fn completions_and_manual_pages_know_every_subcommand() {
    let model = Model::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output =
            Command::new(env!("CARGO_BIN_EXE_hoistway")).args(["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(script.contains("inspect") && script.contains("doctor"), "{shell}");
    }
    // The other shells' scripts have no values.
    for shell in ["bash", "zsh", "fish"] {
        let output =
            Command::new(env!("CARGO_BIN_EXE_hoistway")).args(["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        for value in ["gds-compat", "rocm", "always", "packed", "near_storage", "BF16"] {
            assert!(script.contains(value), "{shell} offers {value}");
        }
    }
    let pages = model.in_directory("man");
    ok(&["man", "--directory"], &pages);
    for page in ["hoistway.1", "hoistway-load.1", "hoistway-doctor.1"] {
        let text = fs::read_to_string(pages.join(page)).unwrap();
        assert!(text.contains(".TH"), "{page}");
    }
}

/// A GGUF model of two blocks with a long vocabulary; its data breaks the default alignment.
fn gguf_model(alignment: u32) -> (tempfile::TempDir, PathBuf) {
    let tokens: Vec<String> = (0..20_000).map(|i| format!("token-{i}")).collect();
    let mut writer = gguf::Writer { alignment: alignment.into(), ..gguf::Writer::default() }
        .key("general.architecture", "llama")
        .key("general.alignment", gguf::Item::U32(alignment))
        .key("tokenizer.ggml.tokens", gguf::Item::strings(tokens.iter().map(String::as_str)))
        .key("template", format!("{}\u{1b}[31m", "long ".repeat(40)).as_str());
    for block in 0..2 {
        writer = writer.tensor(&format!("blk.{block}.weight"), &[256, 3], 12, vec![block; 3 * 144]);
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    fs::write(&path, writer.finish()).unwrap();
    (directory, path)
}

#[test]
fn inspect_shows_what_a_gguf_says_of_itself() {
    let (_directory, path) = gguf_model(32);
    let text = ok(&["inspect"], &path);
    for shown in
        ["GGUF version 3", "general.architecture: llama", "tokens: [string; 20000]", "0..1.weight", "Q4_K"]
    {
        assert!(text.contains(shown), "{text}");
    }
    assert!(!text.contains("token-0") && text.contains("... (20"), "{text}");
    let all = ok(&["inspect", "--all"], &path);
    assert!(all.contains(r#""token-0","token-1""#) && !all.contains("token-9"), "{all}");
    assert!(!all.contains('\u{1b}') && all.contains("  1.weight"), "{all}");

    let value = json(&["inspect", "--json"], &path);
    let file = &value["files"][0];
    assert_eq!((&file["format"], &file["gguf"]["version"]), (&"gguf".into(), &3.into()));
    let keys = file["gguf"]["key_values"].as_array().unwrap();
    assert_eq!(
        keys[0],
        serde_json::json!({"key": "general.architecture", "type": "string", "value": "llama"})
    );
    assert_eq!((&keys[2]["element"], &keys[2]["len"]), (&"string".into(), &20_000.into()));
    assert_eq!(value["tensors"][1]["dtype"], "Q4_K");
    assert_eq!(value["tensors"][1]["shape"], serde_json::json!([3, 256]));
    let all = json(&["inspect", "--all", "--json"], &path);
    assert_eq!(all["files"][0]["gguf"]["key_values"][2]["first"][7], "token-7");
}

#[test]
fn inspect_says_that_names_are_longer_than_llama_cpp_takes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("sd.gguf");
    let name = "conditioner.embedders.0.transformer.text_model.encoder.layers.0.layer_norm1.weight";
    fs::write(&path, gguf::Writer::default().tensor(name, &[3], 0, vec![0; 12]).finish()).unwrap();
    let text = ok(&["inspect", "--all"], &path);
    assert!(text.contains("63 bytes, which llama.cpp refuses"), "{text}");
    let notes = &json(&["inspect", "--json"], &path)["notes"];
    assert!(notes[0].as_str().unwrap().contains("1 tensor of"), "{notes}");
}

#[test]
fn inspect_writes_numbers_as_they_are_and_nothing_that_hides() {
    let hidden = "a\u{9b}31m\u{202e}b\u{200b}c\u{2066}d\u{feff}\u{2028}e";
    let long_key = "k".repeat(300);
    let writer = gguf::Writer::default()
        .key("epsilon", gguf::Item::F32(1e-5))
        .key("scale", gguf::Item::F64(0.1))
        .key("none", gguf::Item::F32(f32::NAN))
        .key("endless", gguf::Item::F64(f64::NEG_INFINITY))
        .key("scores", gguf::Item::Array(6, vec![gguf::Item::F32(0.1), gguf::Item::F32(f32::INFINITY)]))
        .key(hidden, hidden)
        .key(&long_key, gguf::Item::U8(1));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    fs::write(&path, writer.finish()).unwrap();

    let value = json(&["inspect", "--all", "--json"], &path);
    let values = value["files"][0]["gguf"]["key_values"].as_array().unwrap();
    let shown: Vec<_> = values.iter().map(|entry| entry["value"].to_string()).collect();
    assert_eq!(shown[..4], ["0.00001", "0.1", "\"NaN\"", "\"-inf\""]);
    assert_eq!(values[4]["first"].to_string(), r#"[0.1,"inf"]"#);
    assert_eq!(values[5]["value"], hidden);

    let text = ok(&["inspect"], &path);
    assert!(text.is_ascii() && text.contains("\\u{9b}31m\\u{202e}b\\u{200b}c\\u{2066}d\\u{feff}"), "{text}");
    assert!(!text.contains(&long_key) && text.contains("... (300 bytes): 1"), "{text}");
    assert!(ok(&["inspect", "--all"], &path).contains(&format!("{long_key}: 1")));
}

#[test]
fn gguf_files_load_verify_and_warm() {
    let (directory, path) = gguf_model(32);
    let text = ok(&["load", "--verify", "--report"], &path);
    assert!(text.contains("verified"), "{text}");
    let digests = ok(&["verify"], &path);
    assert!(digests.contains("blk.1.weight Q4_K [3, 256]"), "{digests}");
    assert_eq!(json(&["warm", "--json"], &path)["files"], 1);

    let embedded = directory.path().join("embedded.bin");
    fs::write(&embedded, [vec![0; 96], fs::read(&path).unwrap()].concat()).unwrap();
    fails(4, &["verify", "--offset", "95"], &embedded);
    assert_eq!(ok(&["verify", "--offset", "96"], &embedded), digests);
}

#[test]
fn tensors_that_cannot_be_loaded_are_wrong_data() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let unknown = gguf::Writer::default().tensor("new", &[32], 97, vec![0; 32]);
    let big =
        gguf::Writer { big_endian: true, ..gguf::Writer::default() }.tensor("big", &[8], 0, vec![0; 32]);
    for (writer, name) in [(unknown, "new"), (big, "big")] {
        fs::write(&path, writer.finish()).unwrap();
        ok(&["inspect"], &path);
        let message = fails(4, &["load"], &path);
        assert!(message.contains(&format!("tensor '{name}'")), "{message}");
    }
}

#[test]
fn lenient_is_a_flag_and_a_variable() {
    let (_directory, path) = gguf_model(4);
    let message = fails(4, &["load"], &path);
    assert!(message.contains("general.alignment is 4"), "{message}");
    ok(&["load", "--lenient"], &path);
    let with = |value: &str, flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hoistway"));
        command.arg("load").args(flags).arg(&path).env("HOISTWAY_LENIENT", value).output().unwrap()
    };
    assert!(with("true", &[]).status.success());
    assert!(with(" True ", &[]).status.success());
    assert_eq!(with("true", &["--lenient=false"]).status.code(), Some(4));
    assert!(with("perhaps", &["--lenient"]).status.success());
    let wrong = with("perhaps", &[]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("HOISTWAY_LENIENT cannot be 'perhaps'"));
}

#[test]
fn lenient_takes_safetensors_with_padding() {
    let model = Model::new();
    let digests = ok(&["verify"], &model.path);
    let mut file = fs::read(&model.path).unwrap();
    file.resize(file.len().next_multiple_of(4096) + 4096, 0);
    fs::write(&model.path, file).unwrap();
    let message = fails(4, &["load"], &model.path);
    assert!(message.contains("open it with lenient"), "{message}");
    assert_eq!(ok(&["verify", "--lenient"], &model.path), digests);
}

#[test]
fn a_log_filter_without_meaning_is_named_and_ignored() {
    let model = Model::new();
    let output = Command::new(env!("CARGO_BIN_EXE_hoistway"))
        .env("HOISTWAY_LOG", "hoistway=loud")
        .arg("inspect")
        .arg(&model.path)
        .output()
        .unwrap();
    assert!(output.status.success());
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.starts_with("hoistway: HOISTWAY_LOG=hoistway=loud is ignored: "), "{message}");
}

/// Runs the command against a store, whose keys the environment has.
fn with_store(server: &objectd::Server, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hoistway"))
        .envs([
            ("AWS_ENDPOINT_URL", &*server.url()),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "canary"),
        ])
        .env("HOISTWAY_CACHE_BYTES", "1GiB")
        .env("HOISTWAY_LOG", "trace")
        .args(arguments)
        .output()
        .unwrap()
}

#[test]
fn objects_are_inspected_loaded_and_verified_and_nothing_shows_a_secret() {
    let (model, server) = (Model::new(), objectd::Server::start().unwrap());
    server.put("models/llama/model.safetensors", &fs::read(&model.path).unwrap());
    let presigned = format!("{}/models/llama/model.safetensors?X-Amz-Signature=canary", server.url());
    let endpoint = format!("endpoint={}", server.url());
    let missing = format!("{presigned}s").replace("model.safetensors", "none.safetensors");
    let queued = if cfg!(windows) { "overlapped" } else { "io_uring" };
    for (arguments, code, told) in [
        (vec!["inspect", "s3://models/llama/"], 0, "0..2.weight"),
        (vec!["load", "--report", "s3://models/llama/"], 0, "http "),
        (vec!["load", "--report", "--route", "http", &presigned], 0, "http "),
        (vec!["load", "--report", "--store", "anonymous=true", "s3://models/llama/"], 0, "http "),
        (vec!["verify", &presigned], 0, ""),
        (vec!["load", &missing], 3, "no such object"),
        (vec!["load", "--route", queued, &presigned], 6, "not a file of this machine"),
        (
            vec!["load", "--store", "secret_access_key=canary", "s3://models/llama/"],
            2,
            "environment or a profile",
        ),
        (vec!["load", "--store", "colour=red", "s3://models/llama/"], 2, "no such option"),
        (vec!["load", "ftp://me:canary@models/llama/?token=canary"], 2, "there is no scheme 'ftp'"),
        (
            vec!["load", "--report", "--store", &endpoint, "--store", "anonymous=true", "gs://models/llama/"],
            0,
            "http ",
        ),
        (vec!["load", "--store", "token=canary", "hf://org/model"], 2, "environment or a profile"),
    ] {
        let output = with_store(&server, &arguments);
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
        assert!(text.contains(told), "{arguments:?}: {text}");
        assert!(!text.contains("canary"), "{arguments:?}: {text}");
    }
    let requests = server.take_requests();
    assert!(
        requests.iter().any(|request| request.authorization.is_none())
            && requests.iter().any(|request| request.authorization.is_some())
    );
}

/// A port that nothing listens on, and that no other program gets.
struct ClosedPort(TcpStream, #[expect(dead_code, reason = "it keeps the connection")] TcpListener);

impl ClosedPort {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Self(TcpStream::connect(listener.local_addr().unwrap()).unwrap(), listener)
    }

    fn url(&self) -> String {
        format!("http://{}", self.0.local_addr().unwrap())
    }
}

#[test]
fn doctor_asks_no_server_for_a_model_that_the_cache_of_the_hub_has() {
    let model = Model::new();
    let cache = model.path.with_file_name("hub");
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let snapshot = cache.join("models--org--model/snapshots").join(commit);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(cache.join("models--org--model/refs")).unwrap();
    fs::write(cache.join("models--org--model/refs/main"), commit).unwrap();
    fs::copy(&model.path, snapshot.join("model.safetensors")).unwrap();
    let closed = ClosedPort::new();
    let run = |command: &str, offline: &str, url: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_hoistway"))
            .env("HF_HUB_CACHE", &cache)
            .env("HF_ENDPOINT", closed.url())
            .env("HF_HUB_OFFLINE", offline)
            .args([command, url])
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let doctor = |offline: &str, url: &str| run("doctor", offline, url);
    let pinned = format!("hf://org/model@{commit}/model.safetensors");
    for (offline, url) in [("1", "hf://org/model"), ("1", &pinned), ("0", &pinned)] {
        let (code, text) = doctor(offline, url);
        assert!(code == Some(0) && text.contains("is on this machine"), "{offline} {url}: {text}");
        assert!(!text.contains("server"), "{offline} {url}: {text}");
    }
    // A file that is damaged is told by its name on this machine.
    let file = snapshot.join("model.safetensors");
    fs::write(&file, &fs::read(&file).unwrap()[..100]).unwrap();
    let (code, text) = run("load", "1", &pinned);
    assert!(code != Some(0) && text.contains(&format!("{}: ", file.display())), "{text}");
    let (code, text) = doctor("1", "hf://org/other");
    assert!(code == Some(1) && text.contains("unset HF_HUB_OFFLINE"), "{text}");
    assert!(!text.contains("127.0.0.1"), "{text}");
    // What has to be asked for is.
    let (code, text) = doctor("0", "hf://org/model");
    assert!(code == Some(1) && text.contains("127.0.0.1"), "{text}");
}

#[test]
fn doctor_examines_the_way_to_a_store_its_clock_and_its_caller() {
    let (model, server) = (Model::new(), objectd::Server::start().unwrap());
    server.put("models/llama/model.safetensors", &fs::read(&model.path).unwrap());
    let url = "s3://models/llama/model.safetensors";
    let check = |arguments: &[&str], name: &str| {
        let arguments = [&["doctor", "--json"], arguments, &[url]].concat();
        let output = with_store(&server, &arguments);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(!text.contains("canary"), "{text}");
        let checks: Value = serde_json::from_str(&text).unwrap();
        let name = format!("{url}: {name}");
        let found = checks["checks"].as_array().unwrap().iter().find(|check| check["name"] == *name).cloned();
        (found.unwrap_or_else(|| panic!("no {name} in {text}")), output.status.code())
    };
    let (found, code) = check(&[], "server");
    let told = format!("{} at 127.0.0.1 answers", server.url());
    assert!(found["finding"].as_str().unwrap().starts_with(&told), "{found}");
    assert_eq!((code, &found["status"]), (Some(0), &Value::from("ok")));
    let (found, _) = check(&[], "credentials");
    assert_eq!(found["finding"], "an access key of the environment");
    let (found, _) = check(&["--store", "anonymous=true"], "credentials");
    assert_eq!(found["finding"], "no credentials, as the store option anonymous says");
    let (found, _) = check(&[], "clock");
    assert_eq!(found["finding"], "the server does not say its time");
    server.say_date("Sun, 06 Nov 1994 08:49:37 GMT");
    // A store that accepts signatures all the same is one that loads.
    let (found, code) = check(&[], "clock");
    assert_eq!((code, &found["status"]), (Some(0), &Value::from("ok")), "{found}");
    let finding = found["finding"].as_str().unwrap();
    assert!(
        finding.contains("s ahead of the server's") && finding.contains("accepted a signature"),
        "{found}"
    );
    assert!(found["fix"].as_str().unwrap().contains("clock"), "{found}");
    server.fail(objectd::Faults::always(objectd::Fault::Status(403)));
    let (found, code) = check(&[], "clock");
    assert_eq!((code, &found["status"]), (Some(1), &Value::from("broken")), "{found}");
    assert!(found["finding"].as_str().unwrap().contains("stores refuse signatures"), "{found}");
    assert!(found["fix"].as_str().unwrap().contains("clock"), "{found}");
    server.fail(objectd::Faults::only(1, objectd::Fault::Status(503)));
    let (found, code) = check(&[], "server");
    assert_eq!((code, &found["status"]), (Some(0), &Value::from("slower")), "{found}");
    assert!(found["finding"].as_str().unwrap().ends_with("with status 503"), "{found}");
    server.fail(objectd::Faults::default());
    // Requests without a signature do not depend on it.
    let (found, code) = check(&["--store", "anonymous=true"], "clock");
    assert_eq!((code, &found["status"]), (Some(0), &Value::from("ok")), "{found}");
    let closed = ClosedPort::new();
    let endpoint = format!("endpoint={}", closed.url());
    let (found, code) = check(&["--store", &endpoint], "server");
    assert_eq!((code, &found["status"]), (Some(1), &Value::from("broken")), "{found}");
    assert!(found["fix"].as_str().unwrap().contains("endpoint"), "{found}");
    let output = with_store(&server, &["doctor", "--store", "token=canary", url]);
    assert_eq!(output.status.code(), Some(2));
}

/// Removes what this machine says of callers of AWS.
#[cfg(unix)]
fn without_callers(command: &mut Command) -> &mut Command {
    let names = std::env::vars_os().map(|(name, _)| name);
    let of_aws = names.filter(|name| name.to_str().is_some_and(|name| name.starts_with("AWS_")));
    of_aws.for_each(|name| {
        command.env_remove(name);
    });
    command
}

#[cfg(unix)]
#[test]
fn a_program_gives_credentials_once_for_all_regions() {
    use std::os::unix::fs::PermissionsExt;
    let (model, server) = (Model::new(), objectd::Server::start().unwrap());
    server.put("models/llama/model.safetensors", &fs::read(&model.path).unwrap());
    server.lie_in("eu-west-1", objectd::WrongRegion::Malformed);
    let place = |name: &str| model.path.with_file_name(name);
    let (program, ran, config) = (place("keys"), place("ran"), place("config"));
    let key = r#"{"Version": 1, "AccessKeyId": "printed", "SecretAccessKey": "canary"}"#;
    fs::write(&program, format!("#!/bin/sh\necho ran >> '{}'\necho '{key}'\n", ran.display())).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(&config, format!("[default]\ncredential_process = '{}'\n", program.display())).unwrap();
    let output = without_callers(&mut Command::new(env!("CARGO_BIN_EXE_hoistway")))
        .env("HOME", place("home"))
        .envs([("AWS_ENDPOINT_URL", server.url()), ("AWS_CONFIG_FILE", config.display().to_string())])
        .args(["load", "--report", "s3://models/llama/"])
        .output()
        .unwrap();
    let text = [&*output.stdout, &*output.stderr].map(String::from_utf8_lossy).concat();
    assert!(output.status.success() && text.contains("eu-west-1") && !text.contains("canary"), "{text}");
    assert_eq!(fs::read_to_string(&ran).unwrap(), "ran\n");
}

#[test]
fn the_cache_of_the_node_is_filled_shown_checked_and_emptied() {
    let (model, server) = (Model::new(), objectd::Server::start().unwrap());
    server.put("models/llama/model.safetensors", &fs::read(&model.path).unwrap());
    server.put("models/large", &vec![0; 17 << 20]);
    let directory = model.path.with_file_name("cache");
    let cache = directory.to_str().unwrap();
    for (arguments, code, said) in [
        (vec!["doctor", "s3://models/llama/"], 0, "an access key of the environment"),
        (vec!["doctor", "s3://models/llama/"], 0, "answers after"),
        (vec!["doctor", "s3://models/large"], 0, "B/s by one connection"),
        (vec!["doctor", "s3://models/none"], 1, "no such object"),
        (vec!["cache", "stat"], 2, "name its directory with --cache or HOISTWAY_CACHE"),
        (vec!["cache", "stat", "--cache", cache], 3, "there is no cache"),
        (vec!["cache", "gc", "--cache", cache], 0, "there is no cache of hoistway in it: nothing to evict"),
        (vec!["cache", "gc", "--json", "--cache", cache], 0, "\"entries\": 0"),
        (
            vec!["doctor", "https:/me:canary@host/a.safetensors?sig=canary"],
            1,
            "https://host/a.safetensors: access",
        ),
        (
            vec!["cache", "warm", "--cache", cache, "--cache-bytes", "1", "s3://models/llama/"],
            1,
            "does not hold 3.0 MiB",
        ),
        (vec!["cache", "warm", "--cache", cache, "s3://models/llama/"], 0, "are in the cache"),
        (vec!["load", "--report", "--cache", cache, "s3://models/llama/"], 0, "node-cache"),
        (vec!["load", "--route", "node-cache", "--cache", cache, "s3://models/llama/"], 0, "from 1 file"),
        (vec!["cache", "ls", "--cache", cache], 0, "s3://models/llama/model.safetensors"),
        (vec!["cache", "ls", "--json", "--cache", cache], 0, "taken_bytes"),
        (vec!["cache", "verify", "--cache", cache], 0, "match their checksums"),
        (vec!["cache", "gc", "--cache", cache, "--cache-bytes", "0"], 0, "1 object evicted"),
        (vec!["load", "--route", "node-cache", "--cache", cache, "s3://models/llama/"], 6, "does not hold"),
    ] {
        let output = with_store(&server, &arguments);
        let text = [&*output.stdout, &*output.stderr].map(String::from_utf8_lossy).concat();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
        // Rates are in powers of ten.
        assert!(text.contains(said) && !text.contains("iB/s"), "{arguments:?}: {text}");
    }
}

#[test]
fn a_timeline_has_every_byte_that_was_read() {
    let model = Model::new();
    let path = model.in_directory("timeline.json");
    let trace = path.to_str().unwrap();
    let output = hoistway(&["load", "--route", "threads", "--trace", trace, "--json"], &model.path);
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let events: Vec<Value> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let named = |name: &str| events.iter().filter(|event| event["name"] == name).collect::<Vec<_>>();
    let read: u64 = named("read").iter().map(|read| read["args"]["bytes"].as_u64().unwrap()).sum();
    // A span has what was asked for, some of which is asked for again after a short read.
    if report["retries"]["short"] == 0 && report["retries"]["interrupted"] == 0 {
        assert_eq!(Value::from(read), report["read_bytes"]);
    }
    assert!(named("read").iter().all(|read| read["args"]["route"] == "threads" && read["ph"] == "X"));
    assert_eq!(named("tensor").len(), LAYERS + 1);
    for name in ["open", "load", "prepare", "plan", "transfer", "deliver", "wait"] {
        assert!(!named(name).is_empty(), "{name}");
    }
}

#[test]
fn a_timeline_of_a_load_that_failed_is_whole() {
    let model = Model::new();
    let path = model.in_directory("timeline.json");
    let trace = path.to_str().unwrap();
    let output = hoistway(&["load", "--select", "none", "--trace", trace], &model.path);
    assert!(!output.status.success());
    assert!(serde_json::from_slice::<Vec<Value>>(&fs::read(&path).unwrap()).is_ok());
    let nowhere = model.in_directory("no/timeline.json");
    let nowhere = nowhere.to_str().unwrap();
    let output = hoistway(&["load", "--trace", nowhere], &model.path);
    assert_eq!(output.status.code(), Some(5), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains(nowhere), "{output:?}");
    let content = fs::read(&model.path).unwrap();
    let output = hoistway(&["load", "--trace", model.path.to_str().unwrap()], &model.path);
    assert_eq!(output.status.code(), Some(5), "{output:?}");
    assert!(fs::read(&model.path).unwrap() == content);
}

#[test]
fn a_timeline_has_no_secrets_of_urls() {
    let model = Model::new();
    let path = model.in_directory("timeline.json");
    let url = "http://me:secret@127.0.0.1:1/model.safetensors?X-Amz-Signature=secret";
    let output = hoistway(&["load", "--trace", path.to_str().unwrap()], url.as_ref());
    assert!(!output.status.success());
    let timeline = fs::read_to_string(&path).unwrap();
    assert!(timeline.contains("http://127.0.0.1:1/model.safetensors"), "{timeline}");
    for text in [timeline, String::from_utf8_lossy(&output.stderr).into_owned()] {
        assert!(!text.contains("secret"), "{text}");
    }
}
