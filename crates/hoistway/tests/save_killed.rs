//! Savers that are killed at any moment: a load finds one save, whole.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::saving::{Owned, data, go_on, names};
use hoistway::{
    Dtype, LoadOptions,
    save::{SaveOptions, Sharding, save, save_sharded},
};
use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader, Write},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

/// Where the child saves: set in the child alone.
const DIRECTORY: &str = "HOISTWAY_TEST_SAVE_TO";

fn disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// The tensors of one save: as many as `count`, and all of the same bytes.
fn generation(number: u64, count: u64) -> Vec<Owned> {
    let tensor = |i| Owned {
        name: format!("t{i}"),
        dtype: Dtype::U8,
        shape: vec![150_000],
        bytes: vec![number as u8; 150_000],
    };
    (0..count).map(tensor).collect()
}

/// Fails unless all that is loaded from `path` is of one save, and of all its tensors. Returns which.
fn only_generation(path: &Path, counts: &[u64]) -> u8 {
    let loaded = hoistway::load(&[path], &LoadOptions::default()).unwrap_or_else(|error| {
        panic!("{error}; there are {:?}", names(path.parent().unwrap()));
    });
    assert!(counts.contains(&(loaded.tensors().len() as u64)), "{} tensors", loaded.tensors().len());
    let mut all = BTreeSet::new();
    for tensor in loaded.tensors() {
        let bytes = tensor.bytes().unwrap();
        // Compared as a whole: a debug build takes half a second to look at each byte.
        assert!(*bytes == vec![bytes[0]; bytes.len()], "{} is of several saves", tensor.name());
        all.insert(bytes[0]);
    }
    assert_eq!(all.len(), 1, "tensors of several saves: {all:?}");
    *all.first().unwrap()
}

/// Files that a saver left behind that was killed.
fn temps(directory: &Path) -> usize {
    names(directory).iter().filter(|name| name.ends_with(".tmp")).count()
}

/// Saves without end, or kills such a saver again and again, and looks with `check` at what it left.
fn saver(test: &str, kills: usize, save_once: impl Fn(&Path, u64), check: impl Fn(&Path) -> u8) {
    if let Some(directory) = std::env::var_os(DIRECTORY) {
        let directory = PathBuf::from(directory);
        for number in 1.. {
            save_once(&directory, number);
            if number == 1 {
                std::io::stdout().write_all(b"saved\n").unwrap();
                std::io::stdout().flush().unwrap();
            }
        }
    }
    let directory = disk();
    let mut killed_under_way = 0;
    let mut random = 0x9E37_79B9_7F4A_7C15u64;
    let mut rounds = 0;
    // Where a save spends its time depends on the drive: kills go on until enough of them came while it wrote.
    while rounds < kills || killed_under_way <= 10 {
        rounds += 1;
        assert!(rounds <= 50 * kills, "only {killed_under_way} savers were killed while they wrote");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(DIRECTORY, directory.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.by_ref().any(|line| line.unwrap().ends_with("saved")), "the saver never began");
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(Duration::from_micros((random >> 33) % 30_000));
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
        killed_under_way += usize::from(temps(directory.path()) > 0);
        check(directory.path());
    }
    // The next save tidies up.
    save_once(directory.path(), 200);
    assert_eq!(check(directory.path()), 200);
    assert_eq!(temps(directory.path()), 0);
}

#[test]
fn a_file_is_the_old_or_the_new_one() {
    let save_once = |directory: &Path, number| {
        let path = directory.join("model.safetensors");
        save(&path, &data(&generation(number, 8)), None, &SaveOptions::default(), go_on).unwrap();
    };
    let check = |directory: &Path| only_generation(&directory.join("model.safetensors"), &[8]);
    saver("a_file_is_the_old_or_the_new_one", 105, save_once, check);
}

/// By turns two, three and four shards, and a single file.
fn save_by_turns(directory: &Path, number: u64) {
    let count = [4, 6, 2, 8][number as usize % 4];
    let sharding = Sharding::default().max_shard_bytes(300_000);
    let options = SaveOptions::default();
    save_sharded(directory, &data(&generation(number, count)), None, &sharding, &options, go_on).unwrap();
}

#[test]
fn a_directory_holds_one_save() {
    let check = |directory: &Path| only_generation(directory, &[2, 4, 6, 8]);
    saver("a_directory_holds_one_save", 60, save_by_turns, check);
}
