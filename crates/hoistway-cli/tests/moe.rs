//! `hoistway moe`: replays, plans and made traces, as people and scripts meet them.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

#[path = "../../hoistway/tests/common/gguf.rs"]
mod gguf;

fn hoistway(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hoistway")).arg("moe").args(arguments).output().unwrap()
}

/// Standard output of a command that succeeds and says nothing else.
fn ok(arguments: &[&str]) -> String {
    let output = hoistway(arguments);
    let complaints = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && complaints.is_empty(), "{arguments:?}: {complaints}");
    String::from_utf8(output.stdout).unwrap()
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&ok(arguments)).unwrap()
}

/// What a command that fails says.
fn fails(code: i32, arguments: &[&str]) -> String {
    let output = hoistway(arguments);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "", "{arguments:?}");
    said
}

/// A trace of 60 tokens of 8 layers after a prompt of 20, and the directory that it is in.
fn trace(format: &str) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace");
    let output = path.to_str().unwrap();
    let shape = ["--layers=8", "--experts=32", "--experts-per-token=4", "--prefill=20", "--tokens=60"];
    let size = "--expert-bytes=2MiB";
    let said =
        ok(&[&["generate", "sticky", "--format", format, "--output", output, size], &shape[..]].concat());
    assert_eq!(said, "");
    (directory, path)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn each_policy_is_replayed_with_each_budget() {
    let (_directory, path) = trace("csv");
    let arguments = [
        "replay",
        text(&path),
        "--budget=2c",
        "--budget",
        "0.9c,96MiB",
        "--policy=lru",
        "--policy",
        "belady,ewma2",
    ];
    let found = json(&[&arguments[..], &["--json"]].concat());
    let rows = found["rows"].as_array().unwrap();
    let kind =
        |row: &Value| (row["policy"].as_str().unwrap().to_owned(), row["budget_cycles"].as_f64().unwrap());
    let expected: Vec<_> = [2.0, 0.9, 1.5]
        .into_iter()
        .flat_map(|cycles| ["lru", "belady", "ewma2"].map(|policy| (policy.to_owned(), cycles)))
        .collect();
    let kinds: Vec<_> = rows.iter().map(kind).collect();
    assert!(
        kinds
            .iter()
            .zip(&expected)
            .all(|(found, other)| found.0 == other.0 && (found.1 - other.1).abs() < 1e-6),
        "{kinds:?}"
    );
    assert_eq!(kinds.len(), expected.len());
    for row in rows {
        let number = |name: &str| row[name].as_f64().unwrap();
        assert_eq!((number("lookups"), number("tokens")), (60.0 * 8.0 * 4.0, 60.0));
        assert!((number("hit_rate") - number("hits") / number("lookups")).abs() < 1e-12);
        assert!((number("faults_per_token") - 32.0 * (1.0 - number("hit_rate"))).abs() < 1e-9, "{row}");
        assert!((number("mib_per_token") - 2.0 * number("faults_per_token")).abs() < 1e-9, "{row}");
        assert!((number("belady_gap") + number("hit_rate") - number("belady_hit_rate")).abs() < 1e-12);
        assert_eq!(row["cliff"], number("budget_cycles") < 1.0);
        assert_eq!(row["tokens_per_second"], Value::Null);
        assert_eq!(row["holes"]["visits"], 0);
    }
    assert_eq!(rows[3]["hit_rate"], 0.0, "LRU below one cycle");
    assert_eq!(rows[1]["belady_gap"], 0.0);
}

#[test]
fn the_table_is_for_people_and_the_chart_is_drawn() {
    let (directory, path) = trace("jsonl");
    let chart = directory.path().join("chart.svg");
    let shown =
        ok(&["replay", text(&path), "--drive-rate=1GiB/s", "--compute-ms=10", "--chart", text(&chart)]);
    for part in [
        "synthetic: 8 layers with 256 experts of 512.0 MiB, 4 a token; one token's cycle is 64.0 MiB; 60 tokens",
        "tokens/s",
        "note: with less than one token's cycle of 64.0 MiB",
        "experts of a layer",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    // LRU with 0.9 cycles: 64 MiB at 1 GiB/s are 62.5 ms.
    let row = shown.lines().find(|line| line.contains("0.90") && line.contains("lru")).unwrap();
    assert!(row.contains("0.0 %") && row.ends_with("13.79 to 16.00"), "{row}");
    assert!(!shown.contains("static-profile"), "it has no profile: {shown}");
    let svg = fs::read_to_string(&chart).unwrap();
    for part in ["<svg", "synthetic: hit rate by budget", "ewma2", "belady", "budget, token cycles", "1.25"] {
        assert!(svg.contains(part), "{part}: {svg}");
    }
    let profiled = ok(&["replay", text(&path), "--budget=2c", "--profile", text(&path)]);
    assert!(profiled.contains("static-profile"), "{profiled}");
}

#[test]
fn what_is_missing_from_a_trace_is_said() {
    let (_directory, path) = trace("csv");
    let all = fs::read_to_string(&path).unwrap();
    // The answer begins with token 20.
    let kept: String =
        all.lines().filter(|line| !line.starts_with("0,1,22,3,")).map(|line| format!("{line}\n")).collect();
    fs::write(&path, kept).unwrap();
    let shown = ok(&["replay", text(&path), "--budget=2c", "--policy=lru"]);
    let note = "note: the trace lacks 0 tokens and 1 visit of others, and 0 visits have fewer experts than a token uses, \
                first at turn 0, step 22, layer 3";
    assert!(shown.contains(note), "{shown}");
    let found = json(&["replay", text(&path), "--budget=2c", "--policy=lru", "--json"]);
    assert_eq!(found["rows"][0]["holes"]["visits"], 1);
    assert_eq!(found["rows"][0]["lookups"], (60 * 8 - 1) * 4);
}

#[test]
fn errors_have_exit_codes_and_say_what_to_do() {
    let (directory, path) = trace("csv");
    let said = fails(2, &["replay", text(&path), "--policy=mru"]);
    for name in ["'mru'", "ewma2", "lru", "slru", "lfu", "arc", "static-profile", "belady"] {
        assert!(said.contains(name), "{name}: {said}");
    }
    assert!(fails(2, &["replay", text(&path), "--budget=2x"]).contains("2c"));
    assert!(fails(2, &["replay", text(&path), "--budget=1MiB"]).contains("does not hold one expert"));
    assert!(fails(2, &["replay", text(&path), "--policy=static-profile"]).contains("needs a profile"));
    assert!(fails(2, &["generate", "zipf", "--experts=2"]).contains("at most the number of experts"));
    assert!(fails(3, &["replay", "/nonexistent.csv"]).contains("/nonexistent.csv"));

    let lying = fs::read_to_string(&path).unwrap().replacen("n_expert=32", "n_expert=3", 1);
    fs::write(&path, lying).unwrap();
    let said = fails(4, &["replay", text(&path)]);
    assert!(said.contains(", line ") && said.contains("in layer 0: it has 3"), "{said}");
    let prompt = directory.path().join("prompt");
    ok(&["generate", "uniform", "--prefill=3", "--tokens=0", "--output", text(&prompt)]);
    assert!(fails(4, &["replay", text(&prompt)]).contains("prefill alone"));
    let unsized_ = directory.path().join("unsized");
    fs::write(&unsized_, "step,layer,expert\n0,0,1\n1,0,0\n").unwrap();
    assert!(fails(4, &["replay", text(&unsized_)]).contains("how many bytes"));
    assert!(ok(&["replay", text(&unsized_), "--expert-bytes=1MiB", "--budget=1c"]).contains("lru"));
}

#[test]
fn made_traces_go_to_standard_output_and_are_the_same_again() {
    let arguments = ["generate", "zipf", "--tokens=3", "--layers=2", "--seed=7"];
    let one = ok(&arguments);
    assert_eq!(one, ok(&arguments));
    assert_eq!(one.lines().filter(|line| !line.starts_with('#')).count(), 1 + 3 * 2 * 4);
    assert_ne!(one, ok(&["generate", "zipf", "--tokens=3", "--layers=2", "--seed=8"]));
}

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

const EXPERTS: u64 = 16;
/// Rows and columns of F16, and the bytes of an expert, which has three of them.
const ROWS: u64 = 32;
const EXPERT_BYTES: u64 = 3 * ROWS * ROWS * 2;

/// A GGUF model of two layers of 16 experts, of which a token uses 4, and of 8 KiB that are of no expert.
fn model(directory: &Path, says_top_k: bool) -> PathBuf {
    let mut writer = gguf::Writer::default().key("general.architecture", "test");
    if says_top_k {
        writer = writer.key("test.expert_used_count", gguf::Item::U32(4));
    }
    writer = writer.tensor("token_embd.weight", &[64, 64], 1, vec![0; 8192]);
    for layer in 0..2 {
        for part in ["gate", "up", "down"] {
            let name = format!("blk.{layer}.ffn_{part}_exps.weight");
            writer = writer.tensor(
                &name,
                &[ROWS, ROWS, EXPERTS],
                1,
                vec![0; (ROWS * ROWS * EXPERTS * 2) as usize],
            );
        }
    }
    let path = directory.join("model.gguf");
    fs::write(&path, writer.finish()).unwrap();
    path
}

#[test]
fn a_plan_says_what_is_left_to_experts() {
    let directory = tempfile::tempdir().unwrap();
    let path = model(directory.path(), true);
    let cycle = 2 * 4 * EXPERT_BYTES;
    // What is of no expert, what a token uses of a layer, and two cycles.
    let memory = 8192 + 4 * EXPERT_BYTES + 2 * cycle;
    let memory = format!("--memory={memory}");
    let plan = json(&["plan", text(&path), &memory, "--json"]);
    for (name, value) in [
        ("dense_bytes", 8192),
        ("cycle_bytes", cycle),
        ("expert_bytes", 2 * EXPERTS * EXPERT_BYTES),
        ("experts_per_token", 4),
        ("experts", 2 * EXPERTS),
        ("layer_demand_bytes", 4 * EXPERT_BYTES),
        ("budget_bytes", 2 * cycle),
    ] {
        assert_eq!(plan[name], value, "{name}: {plan}");
    }
    assert_eq!(
        (&plan["budget_cycles"], &plan["residency"], &plan["cliff"]),
        (&2.0.into(), &0.5.into(), &false.into())
    );
    assert_eq!(plan["expected"], Value::Null);

    let trace = directory.path().join("trace.csv");
    let shape = ["--layers=2", "--experts=16", "--experts-per-token=4", "--tokens=50"];
    ok(&[&["generate", "zipf", "--output", text(&trace)], &shape[..]].concat());
    let plan = json(&["plan", text(&path), &memory, "--json", "--trace", text(&trace)]);
    let replayed = json(&["replay", text(&trace), "--budget=2c", "--policy=ewma2", "--json"]);
    assert_eq!(plan["expected"]["hit_rate"], replayed["rows"][0]["hit_rate"]);
    assert_eq!(plan["notes"], serde_json::json!([]));
    let shown = ok(&["plan", text(&path), &memory, "--trace", text(&trace), "--policy=lru"]);
    assert!(
        shown.contains("2.00 token cycles, 50.0 % of the experts") && shown.contains("with lru"),
        "{shown}"
    );

    let all = ok(&["plan", text(&path), "--memory=1GiB"]);
    assert!(all.contains("everything fits"), "{all}");
    let little = format!("--memory={}", 8192 + 6 * EXPERT_BYTES);
    assert!(ok(&["plan", text(&path), &little]).contains("below one token's cycle"));
    let other = directory.path().join("other.csv");
    ok(&["generate", "zipf", "--tokens=5", "--output", text(&other)]);
    let file = directory.path().join("model");
    fs::write(&file, [7; 100]).unwrap();
    assert!(fails(5, &["generate", "zipf", "--output", text(&file)]).contains("is not a trace"));
    assert!(
        fails(5, &["replay", text(&other), "--budget=2c", "--policy=lru", "--chart", text(&file)])
            .contains("is not a chart")
    );
    assert_eq!(fs::read(&file).unwrap(), [7; 100]);
    let chart = ["replay", text(&other), "--budget=2c", "--policy=lru", "--chart", text(&file)];
    fs::write(&file, "<?xml version=\"1.0\"?><project/>").unwrap();
    assert!(fails(5, &chart).contains("is not a chart"));
    // Before the trace is looked at.
    assert!(
        fails(5, &["replay", "none.csv", "--budget=2c", "--chart", text(&file)]).contains("is not a chart")
    );
    fs::write(&file, "<?xml version=\"1.0\"?>\n<svg/>").unwrap();
    ok(&chart);
    assert!(ok(&["plan", text(&path), &memory, "--trace", text(&other)]).contains("other layers or experts"));
}

/// Runs a plan of a model by its URL, which a store has whose keys the environment has.
fn plan_of(server: &objectd::Server, url: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hoistway"))
        .envs([
            ("AWS_ENDPOINT_URL", &*server.url()),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("HF_ENDPOINT", &*server.url()),
        ])
        .env("HF_HUB_CACHE", env!("CARGO_TARGET_TMPDIR"))
        .args(["moe", "plan", url, "--memory=1GiB", "--json"])
        .output()
        .unwrap()
}

/// A safetensors file of a layer with two experts.
fn safetensors() -> Vec<u8> {
    let tensors: Vec<String> = (0..2)
        .flat_map(|expert| ["gate", "up", "down"].map(|part| (expert, part)))
        .enumerate()
        .map(|(number, (expert, part))| {
            let (start, end) = (number * 8, number * 8 + 8);
            format!(
                r#""model.layers.0.mlp.experts.{expert}.{part}_proj.weight":{{"dtype":"U8","shape":[2,4],"data_offsets":[{start},{end}]}}"#
            )
        })
        .collect();
    let header = format!("{{{}}}", tensors.join(","));
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 48]].concat()
}

#[test]
fn a_plan_of_a_url_reads_the_configuration_beside_it() {
    let config = br#"{"num_experts_per_tok": 2}"#;
    let server = objectd::Server::start().unwrap();
    server.put("models/moe/model.safetensors", &safetensors());
    let web = format!("{}/models/moe/model.safetensors", server.url());
    let output = plan_of(&server, "s3://models/moe/");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("--experts-per-token"), "{said}");
    server.put("models/moe/config.json", config);
    let hub = objectd::Server::start().unwrap();
    hub.put_model("org/moe", COMMIT);
    hub.put_file("org/moe", "model.safetensors", &safetensors(), false);
    hub.put_file("org/moe", "config.json", config, false);
    for (server, url) in [
        (&server, "s3://models/moe/"),
        (&server, &*web),
        (&hub, "hf://org/moe"),
        (&hub, "hf://org/moe/model.safetensors"),
    ] {
        let output = plan_of(server, url);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{url}: {said}");
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(
            (&plan["experts_per_token"], &plan["cycle_bytes"]),
            (&2.into(), &48.into()),
            "{url}: {plan}"
        );
    }
    // A URL that may be signed names one file.
    let output = plan_of(&server, &format!("{web}?X-Amz-Signature=none"));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    server.put("models/moe/config.json", b"{");
    let output = plan_of(&server, "s3://models/moe/");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("s3://models/moe/config.json") && said.contains("instead"), "{said}");
}

#[test]
fn a_plan_that_cannot_be_made_says_why() {
    let directory = tempfile::tempdir().unwrap();
    let path = model(directory.path(), false);
    assert!(fails(2, &["plan", text(&path), "--memory=1GiB"]).contains("--experts-per-token"));
    let given = ok(&["plan", text(&path), "--memory=1GiB", "--experts-per-token=2"]);
    assert!(given.contains("2 of each"), "{given}");
    let said = fails(7, &["plan", text(&path), "--memory=16KiB", "--experts-per-token=2"]);
    assert!(said.contains("does not hold one expert"), "{said}");
    let dense = directory.path().join("dense.gguf");
    let writer = gguf::Writer::default().tensor("token_embd.weight", &[64, 64], 1, vec![0; 8192]);
    fs::write(&dense, writer.finish()).unwrap();
    assert!(fails(4, &["plan", text(&dense), "--memory=1GiB"]).contains("no experts"));
    assert!(fails(3, &["plan", "/nonexistent.gguf", "--memory=1GiB"]).contains("/nonexistent.gguf"));
}

/// A model of four experts in a directory of its own.
fn model_of(part_bytes: u64) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("model.safetensors");
    let names = (0..4).flat_map(|expert| ["gate", "up", "down"].map(|part| format!("{expert}.{part}_proj")));
    let tensors: Vec<String> = names
        .enumerate()
        .map(|(number, name)| {
            let start = number as u64 * part_bytes;
            let end = start + part_bytes;
            format!(
                r#""model.layers.0.mlp.experts.{name}.weight":{{"dtype":"U8","shape":[{part_bytes}],"data_offsets":[{start},{end}]}}"#
            )
        })
        .collect();
    let header = format!("{{{}}}", tensors.join(","));
    fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    // Zeros, in a hole.
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(8 + header.len() as u64 + 12 * part_bytes).unwrap();
    (directory, path)
}

#[test]
fn experts_are_packed_and_a_plan_says_so() {
    let (directory, path) = model_of(5000);
    let pack = directory.path().join("model.safetensors.experts");
    assert!(ok(&["pack", text(&path)]).contains("4 experts of 58.6 KiB, written and read again"));
    assert!(pack.is_file());
    let report = json(&["pack", text(&path), "--check", "--json"]);
    assert_eq!((&report["path"], &report["experts"]), (&text(&pack).into(), &4.into()));
    let plan = ["plan", text(&path), "--memory=1GiB", "--experts-per-token=1"];
    assert!(
        ok(&plan)
            .contains(&format!("note: stores in memory of the host read experts from {}", pack.display()))
    );
    // A change of the model, if only of its time.
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    drop(file);
    let said = hoistway(&plan);
    let (shown, warned) = (String::from_utf8(said.stdout).unwrap(), String::from_utf8(said.stderr).unwrap());
    assert!(
        shown.contains("note: packed experts are not used") && shown.contains("pack again"),
        "{shown}{warned}"
    );
    assert!(fails(4, &["pack", text(&path), "--check"]).contains("changed or copied"));
    // Elsewhere, and damaged.
    let elsewhere = directory.path().join("elsewhere");
    ok(&["pack", text(&path), "--output", text(&elsewhere)]);
    let mut bytes = fs::read(&elsewhere).unwrap();
    bytes[4096] ^= 1;
    fs::write(&elsewhere, bytes).unwrap();
    let said = fails(4, &["pack", text(&path), "--output", text(&elsewhere), "--check"]);
    assert!(said.contains("expert 0 of layer 0"), "{said}");
    let dense = directory.path().join("dense.safetensors");
    let header = br#"{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    fs::write(&dense, [&(header.len() as u64).to_le_bytes()[..], header, &[0]].concat()).unwrap();
    assert!(fails(4, &["pack", text(&dense)]).contains("has no experts"));
}

#[test]
#[cfg(target_os = "linux")]
fn a_pack_that_is_interrupted_leaves_nothing() {
    use std::{process::Stdio, thread, time::Duration};

    let signal = |id: u32, name: &str| {
        assert!(Command::new("kill").args(["-s", name, &id.to_string()]).status().unwrap().success());
    };
    loop {
        let (directory, path) = model_of(32 << 20);
        let names = || {
            let entries = fs::read_dir(directory.path()).unwrap();
            let mut names: Vec<_> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        let mut packing = Command::new(env!("CARGO_BIN_EXE_hoistway"))
            .args(["moe", "pack", text(&path)])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        while names().len() == 1 && packing.try_wait().unwrap().is_none() {
            thread::sleep(Duration::from_millis(1));
        }
        // It stands still while the signal comes.
        signal(packing.id(), "STOP");
        signal(packing.id(), "TERM");
        let is_done = names().contains(&"model.safetensors.experts".to_owned());
        signal(packing.id(), "CONT");
        let output = packing.wait_with_output().unwrap();
        // It was faster than the signals: again.
        if is_done || output.status.success() {
            continue;
        }
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(130), "{said}");
        assert!(said.contains("nothing was packed"), "{said}");
        assert_eq!(names(), ["model.safetensors"]);
        return;
    }
}
