//! `hoistway kv`: what it shows, removes, repairs and carries, and what it says when it cannot.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use hoistway_kv::{
    Buffer, BufferItem, Key, Namespace, NamespaceDescription, NamespaceId, NamespaceOptions, Store,
    StoreOptions, TransferOptions,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

const LEN: usize = 10_000;

/// A store of five blocks in two namespaces, that no process has open.
struct Stored {
    directory: tempfile::TempDir,
    root: PathBuf,
    first: NamespaceId,
    second: NamespaceId,
}

fn options(root: &Path) -> StoreOptions {
    let mut options = StoreOptions::new(root);
    options.capacity_bytes = Some(256 << 20);
    options.min_free_bytes = 0;
    options
}

fn description(model: &str) -> NamespaceDescription {
    NamespaceDescription::default().model(model).block_tokens(16).salt("secret")
}

fn put(namespace: &Namespace, key: &[u8], shards: &[&[u8]], ttl: Option<Duration>) {
    let items = (0..).zip(shards).map(|(shard, bytes)| {
        let mut buffer = Buffer::zeroed(bytes.len());
        buffer.copy_from_slice(bytes);
        BufferItem::new(Key::new(key).unwrap(), shard, buffer)
    });
    let mut options = TransferOptions::default();
    (options.shards, options.ttl) = (shards.len() as u32, ttl);
    let (completion, _) = namespace.store_buffers(items.collect(), &options).unwrap().wait(None).unwrap();
    assert!(completion.is_ok(), "{completion:?}");
}

fn get(namespace: &Namespace, key: &[u8], lens: &[usize]) -> Option<Vec<Vec<u8>>> {
    let items = (0..)
        .zip(lens)
        .map(|(shard, len)| BufferItem::new(Key::new(key).unwrap(), shard, Buffer::zeroed(*len)));
    let transfer = namespace.load_buffers(items.collect(), &TransferOptions::default()).unwrap();
    let (completion, buffers) = transfer.wait(None).unwrap();
    completion.is_ok().then(|| buffers.iter().map(|buffer| buffer.to_vec()).collect())
}

fn bytes(number: u8) -> Vec<u8> {
    (0..LEN).map(|position| (position % 249) as u8 ^ number).collect()
}

impl Stored {
    fn new() -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let root = directory.path().join("store");
        let store = Store::open(options(&root)).unwrap();
        let first = store.namespace(&description("llama"), NamespaceOptions::default()).unwrap();
        let second = store.namespace(&description("qwen"), NamespaceOptions::default()).unwrap();
        for number in 0..3 {
            put(&first, format!("block {number}").as_bytes(), &[&bytes(number)], None);
        }
        put(&second, &[0xff, 0x00, 0x1b], &[&bytes(7), b"short"], None);
        put(&second, b"for a while", &[&bytes(8)], Some(Duration::from_secs(3600)));
        store.close(None).unwrap();
        Self { root, first: first.id(), second: second.id(), directory }
    }

    /// Changes a byte of a block on the disk.
    fn damage(&self, block: &[u8]) {
        self.flip(block, 500);
    }

    /// Flips a bit at a distance from where a block's bytes begin.
    fn flip(&self, block: &[u8], distance: isize) {
        for path in files(&self.root) {
            let mut file = fs::read(&path).unwrap();
            if let Some(position) = file.windows(64).position(|window| window == &block[..64]) {
                file[position.strict_add_signed(distance)] ^= 1;
                fs::write(&path, file).unwrap();
                return;
            }
        }
        panic!("the block is in no file");
    }

    fn run(&self, command: &str, arguments: &[&str]) -> Output {
        hoistway(command, &self.root, arguments)
    }

    fn ok(&self, command: &str, arguments: &[&str]) -> String {
        let output = self.run(command, arguments);
        let complaints = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{command} {arguments:?}: {complaints}");
        assert_eq!(complaints, "", "{command} {arguments:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, command: &str, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(command, &[arguments, &["--json"]].concat())).unwrap()
    }

    fn fails(&self, code: i32, command: &str, arguments: &[&str]) -> String {
        failed(code, &self.run(command, arguments))
    }

    fn keys(&self, namespace: NamespaceId) -> Vec<String> {
        let listed = self.json("ls", &["--namespace", &namespace.to_string()]);
        let blocks = listed["blocks"].as_array().unwrap();
        blocks.iter().map(|block| block["key_hex"].as_str().unwrap().to_owned()).collect()
    }
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

fn hoistway(command: &str, root: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hoistway"))
        .args(["kv", command])
        .arg(root)
        .args(arguments)
        .output()
        .unwrap()
}

fn failed(code: i32, output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(said.lines().all(|line| line.starts_with("hoistway: ")), "{said}");
    said
}

#[test]
fn stat_says_what_a_store_holds_and_changes_nothing() {
    let stored = Stored::new();
    let before = files(&stored.root).len();
    let text = stored.ok("stat", &[]);
    assert!(text.contains("5 blocks") && text.contains("layout segments"), "{text}");
    assert!(text.contains(" of 256.0 MiB"), "{text}");
    let writer = text.lines().find(|line| line.starts_with("writer ")).unwrap();
    assert!(
        writer.contains(&format!("process {} has ended, durability batched, 5 blocks, ", std::process::id())),
        "{writer}"
    );
    let line = text.lines().find(|line| line.starts_with(&stored.first.to_string())).unwrap();
    assert!(line.contains(" 3 ") && line.contains("llama, block_tokens 16, salted"), "{line}");
    let value = stored.json("stat", &[]);
    assert_eq!(value["stats"]["blocks"], 5);
    assert_eq!(value["stats"]["capacity_bytes"], 256 << 20);
    assert_eq!(value["report"]["layout"], "segments");
    assert!(value["report"].get("durability").is_none(), "that is the command's");
    assert_eq!(value["writers"][0]["durability"], "batched");
    assert_eq!(value["namespaces"][stored.second.to_string()]["payload_bytes"], 2 * LEN + 5);
    assert!(!value.to_string().contains("secret"));
    assert_eq!(files(&stored.root).len(), before);

    let store = Store::open(options(&stored.root)).unwrap();
    let writers = &stored.json("stat", &[])["writers"];
    assert_eq!((&writers[0]["is_alive"], &writers[0]["blocks"]), (&true.into(), &5.into()), "{writers}");
    store.close(None).unwrap();
}

#[test]
fn what_a_process_that_runs_has_stored_is_not_repaired() {
    let stored = Stored::new();
    let store = Store::open(options(&stored.root)).unwrap();
    stored.damage(&bytes(1));
    let said = stored.fails(4, "verify", &["--repair"]);
    assert!(said.contains("1 block damaged and kept: only the running process"), "{said}");
    store.close(None).unwrap();
}

/// Where the child of the test below opens a store.
const ROOT_OF_WRITER: &str = "HOISTWAY_TEST_ROOT_OF_WRITER";

#[test]
#[ignore = "the child of a_killed_writer_is_gone_at_once"]
fn a_writer_until_it_is_killed() {
    let Some(root) = std::env::var_os(ROOT_OF_WRITER) else { return };
    let store = Store::open(options(Path::new(&root))).unwrap();
    // Its parent keeps the other end until it kills this process.
    std::io::stdin().read_line(&mut String::new()).unwrap();
    store.close(None).unwrap();
}

#[test]
fn a_killed_writer_is_gone_at_once() {
    let stored = Stored::new();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "a_writer_until_it_is_killed"])
        .env(ROOT_OF_WRITER, &stored.root)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let is_alive = || {
        let writers = stored.json("stat", &[])["writers"].clone();
        writers.as_array().unwrap().iter().any(|writer| writer["is_alive"] == true)
    };
    let begin = std::time::Instant::now();
    while !is_alive() {
        assert!(begin.elapsed() < Duration::from_secs(60), "the writer never begins");
        thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!is_alive(), "it said a moment ago that it lives");
}

#[test]
fn ls_lists_namespaces_and_blocks() {
    let stored = Stored::new();
    let text = stored.ok("ls", &[]);
    assert!(text.contains(&stored.first.to_string()) && text.contains(&stored.second.to_string()), "{text}");
    assert!(stored.ok("ls", &["--long"]).contains(r#""model":"qwen""#));
    let text = stored.ok("ls", &["--namespace", &stored.first.to_string()]);
    assert_eq!(text, "block 0\nblock 1\nblock 2\n");
    let long = stored.ok("ls", &["--namespace", &stored.second.to_string(), "--long"]);
    let shown: Vec<&str> = long.lines().collect();
    assert!(shown[0].contains("for a while  (checksum, expires in 3"), "{long}");
    assert!(shown[1].contains("ff001b  (2 shards, 2 checksums)"), "{long}");
    assert!(!long.contains('\u{1b}'), "{long:?}");
    assert_eq!(
        stored.keys(stored.second),
        [b"for a while".map(|byte| format!("{byte:02x}")).concat(), "ff001b".into()]
    );
    let said = stored.fails(2, "ls", &["--namespace", &"0".repeat(32)]);
    assert!(said.contains("has no namespace 0000") && said.contains("hoistway kv ls"), "{said}");
    assert_eq!(stored.run("ls", &["--namespace", "x"]).status.code(), Some(2));
}

#[test]
fn verify_finds_damage_and_repair_forgets_it() {
    let stored = Stored::new();
    assert!(stored.ok("verify", &[]).starts_with("5 blocks read"));
    stored.damage(&bytes(1));
    let said = stored.fails(4, "verify", &[]);
    assert!(said.contains("block block 1 of namespace") && said.contains("1 block damaged"), "{said}");
    assert_eq!(stored.keys(stored.first).len(), 3, "it was only looked at");
    let text = stored.ok("verify", &["--repair"]);
    assert!(text.contains("block block 1 of namespace"), "{text}");
    assert!(text.contains("; 1 block damaged and removed"), "{text}");
    assert_eq!(stored.keys(stored.first), ["626c6f636b2030", "626c6f636b2032"]);
    let value = stored.json("verify", &[]);
    assert_eq!((&value["verified"]["blocks"], &value["verified"]["corrupt"]), (&4.into(), &0.into()));
}

#[test]
fn a_damaged_header_is_damage_to_verify() {
    let stored = Stored::new();
    stored.flip(&bytes(1), -4000);
    let said = stored.fails(4, "verify", &[]);
    assert!(said.contains("its header is damaged") && said.contains("1 block damaged"), "{said}");
    assert_eq!(stored.keys(stored.first).len(), 2);
    let text = stored.ok("verify", &["--repair"]);
    assert!(text.contains("1 block damaged and removed"), "{text}");
    assert_eq!(stored.json("stat", &[])["stats"]["capacity_bytes"], 256 << 20, "repairs leave it");
    let text = stored.ok("verify", &[]);
    assert!(text.starts_with("4 blocks read") && text.contains("; 4 are as they were stored"), "{text}");
}

#[test]
fn rm_removes_blocks_by_key_and_all_of_a_namespace() {
    let stored = Stored::new();
    let (first, second) = (stored.first.to_string(), stored.second.to_string());
    assert_eq!(stored.ok("rm", &["--namespace", &first, "block 1", "missing"]), "1 block removed\n");
    assert_eq!(stored.keys(stored.first).len(), 2);
    assert_eq!(stored.ok("rm", &["--namespace", &second, "--hex", "FF001b"]), "1 block removed\n");
    assert_eq!(stored.ok("rm", &["--namespace", &first, "--all"]), "2 blocks removed\n");
    assert!(stored.keys(stored.first).is_empty());
    assert_eq!(stored.keys(stored.second).len(), 1);
    let said = stored.fails(2, "rm", &["--namespace", &second, "--hex", "xyz"]);
    assert!(said.contains("hexadecimal"), "{said}");
    assert_eq!(stored.run("rm", &["--namespace", &second]).status.code(), Some(2), "neither keys nor --all");
}

#[test]
fn blocks_of_a_process_that_runs_stay_its_own() {
    let stored = Stored::new();
    let store = Store::open(options(&stored.root)).unwrap();
    let namespace = store.namespace(&description("llama"), NamespaceOptions::default()).unwrap();
    put(&namespace, b"mine", &[b"bytes"], None);
    let first = stored.first.to_string();
    assert!(stored.ok("ls", &["--namespace", &first]).contains("mine"));
    let said = stored.fails(1, "rm", &["--namespace", &first, "mine"]);
    assert!(said.contains("mine stayed"), "{said}");
    let said = stored.fails(1, "rm", &["--namespace", &first, "--all"]);
    assert!(said.contains("4 blocks stayed"), "{said}");
    assert_eq!(get(&namespace, b"mine", &[5]), Some(vec![b"bytes".to_vec()]));
}

#[test]
fn gc_evicts_down_to_a_size() {
    let stored = Stored::new();
    let value = stored.json("gc", &[]);
    assert_eq!(value["evicted_blocks"], 0);
    let before = stored.json("stat", &[]);
    assert_eq!(before["stats"]["blocks"], 5);
    let taken = before["stats"]["root_bytes"].as_u64().unwrap();
    assert!(taken > 4 << 20, "a segment: {before}");
    let output = stored.run("gc", &["--size", "2MiB", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let after = stored.json("stat", &[]);
    assert!(after["stats"]["root_bytes"].as_u64().unwrap() <= 2 << 20, "{after}");
    assert_eq!(after["stats"]["blocks"], 0);
    assert_eq!(
        after["stats"]["capacity_bytes"],
        256 << 20,
        "it is told what was chosen, not to what gc shrank it"
    );
    assert!(stored.fails(1, "gc", &["--size", "1B"]).contains("still take"));
}

#[test]
fn a_copy_of_the_directory_is_the_store() {
    let stored = Stored::new();
    let elsewhere = stored.directory.path().join("elsewhere");
    let copied = Command::new("cp").arg("-a").arg(&stored.root).arg(&elsewhere).status().unwrap();
    assert!(copied.success());
    let store = Store::open(options(&elsewhere)).unwrap();
    let first = store.namespace(&description("llama"), NamespaceOptions::default()).unwrap();
    let second = store.namespace(&description("qwen"), NamespaceOptions::default()).unwrap();
    for number in 0..3 {
        let found = get(&first, format!("block {number}").as_bytes(), &[LEN]);
        assert_eq!(found, Some(vec![bytes(number)]));
    }
    assert_eq!(get(&second, &[0xff, 0x00, 0x1b], &[LEN, 5]), Some(vec![bytes(7), b"short".to_vec()]));
    drop((first, second, store));
    let long = hoistway("ls", &elsewhere, &["--namespace", &stored.second.to_string(), "--long"]);
    assert!(String::from_utf8(long.stdout).unwrap().contains("for a while  (checksum, expires in 3"));
}

#[test]
fn where_there_is_no_store_none_is_made() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let missing = directory.path().join("missing");
    let id = "0".repeat(32);
    for (command, arguments) in [
        ("stat", &[][..]),
        ("ls", &[]),
        ("verify", &[]),
        ("verify", &["--repair"]),
        ("gc", &[]),
        ("rm", &["--namespace", &id, "--all"]),
    ] {
        let said = failed(3, &hoistway(command, &missing, arguments));
        assert!(said.contains("is not a KV store"), "{command}: {said}");
        assert!(!missing.exists(), "{command}");
    }
}

#[test]
fn bench_measures_beside_the_limit_and_leaves_nothing() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (here, results) = (directory.path().join("here"), directory.path().join("results"));
    let arguments = [
        "--block-sizes=64KiB,1000000B",
        "--threads=1,3",
        "--batch=2",
        "--bytes=4MiB",
        "--iterations=2",
        "--json",
        "--output-dir",
        results.to_str().unwrap(),
    ];
    let output = hoistway("bench", &here, &arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let summary = found["summary"].as_array().unwrap();
    assert_eq!(summary.len(), 2 * 2 * 3);
    for row in summary {
        assert!(row["throughput_gbps_median"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["limit_gbps_median"].as_f64().unwrap() > 0.0, "{row}");
        assert_eq!(row["num_iterations"], 2);
        assert_eq!(row["device"], "cpu");
        assert_ne!(row["routes"], "");
    }
    assert_eq!(found["measurements"].as_array().unwrap().len(), 2 * 2 * 3 * 2);
    let raw = fs::read_to_string(results.join("kv_raw.csv")).unwrap();
    assert!(raw.starts_with(
        "operation,block_bytes,threads,batch,iteration,bytes,seconds,throughput_gbps,limit_gbps,device,routes,\
         bounced_bytes\n"
    ));
    assert_eq!(raw.lines().count(), 1 + 24);
    let chart = fs::read_to_string(results.join("kv_throughput.svg")).unwrap();
    let texts = |text: &str| chart.lines().filter(|line| *line == text).count();
    // A bar for each operation and combination, and one for its limit.
    assert_eq!(
        (texts("64.0 KiB, 1 thread"), texts("64.0 KiB, 3 threads"), texts("limit")),
        (3, 3, 12),
        "{chart}"
    );
    assert_eq!((texts("store"), texts("load, cold"), texts("load, warm")), (1, 1, 1), "{chart}");
    assert_eq!(fs::read_dir(&here).unwrap().count(), 0);
    let said = failed(2, &hoistway("bench", &here, &["--block-sizes=2GiB", "--bytes=1GiB"]));
    assert!(said.contains("block-sizes"), "{said}");
}

/// `hoistway kv bench` on a machine with CUDA devices: those of the stand-in driver.
#[test]
fn a_bench_that_is_ended_leaves_nothing() {
    for signal in [Signal::INT, Signal::TERM] {
        let here = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_hoistway"));
        // More than it gets to.
        let flags = ["--bytes=4MiB", "--block-sizes=1MiB", "--threads=1", "--iterations=10000"];
        let mut bench = command.args(["kv", "bench"]).arg(here.path()).args(flags).spawn().unwrap();
        let is_empty = || fs::read_dir(here.path()).unwrap().next().is_none();
        while is_empty() {
            assert_eq!(bench.try_wait().unwrap(), None, "it has ended by itself");
            thread::yield_now();
        }
        kill_process(Pid::from_child(&bench), signal).unwrap();
        assert_eq!(bench.wait().unwrap().code(), Some(130));
        assert!(is_empty(), "its files are still there");
    }
}

fn bench_with_devices(here: &Path, arguments: &[&str]) -> Output {
    let stand_in = std::env::current_exe().unwrap().with_file_name("libfake_cuda.so");
    assert!(stand_in.exists(), "{} was not built", stand_in.display());
    Command::new(env!("CARGO_BIN_EXE_hoistway"))
        .envs(["HOISTWAY_CUDA_DRIVER", "HOISTWAY_CUFILE"].map(|variable| (variable, &stand_in)))
        .env("FAKE_CUDA_CUFILE_MODE", "nvfs")
        .args(["kv", "bench", "--threads=2", "--batch=3", "--bytes=4MiB", "--iterations=1"])
        .args(arguments)
        .arg(here)
        .output()
        .unwrap()
}

#[test]
fn bench_of_a_device_says_which_way_its_blocks_took() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // The last size is no multiple of a page.
    let sizes = "--block-sizes=64KiB,100000B";
    for (direct, expected) in
        [("require", &["gds direct"][..]), ("off", &["io_uring direct", "threads direct"])]
    {
        let flag = format!("--direct={direct}");
        let output = bench_with_devices(directory.path(), &[sizes, "--device=cuda:1", &flag, "--json"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        let measurements = found["measurements"].as_array().unwrap();
        assert_eq!(measurements.len(), 2 * 3);
        for measurement in measurements {
            assert_eq!(measurement["device"], "cuda:1");
            let first = measurement["routes"].as_str().unwrap().split('+').next().unwrap();
            assert!(expected.contains(&first), "{measurement}");
            let (bytes, bounced) =
                (measurement["bytes"].as_u64().unwrap(), measurement["bounced_bytes"].as_u64().unwrap());
            let is_by_host = direct == "off";
            assert_eq!(bounced >= bytes, is_by_host, "{measurement}");
        }
    }
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
}

#[test]
fn bench_of_a_device_that_is_not_there_says_so() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let said = failed(6, &bench_with_devices(directory.path(), &["--block-sizes=64KiB", "--device=cuda:7"]));
    assert!(said.contains("cuda:7"), "{said}");
    let output = bench_with_devices(directory.path(), &["--device=tpu:0"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("device cannot be 'tpu:0'"));
}
