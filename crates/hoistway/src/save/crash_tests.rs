//! Sharded saves that end between any two steps, as if killed: a load of the directory finds one save. And that each
//! step is on the disk before the next that rests on it, so that a loss of power is no worse.

use super::{SaveOptions, Sharding, TensorBytes, TensorData, save, save_sharded};
use crate::{Dtype, LoadOptions, Result};
use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
    fs,
    ops::ControlFlow,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::{Path, PathBuf},
};

thread_local! {
    /// Steps of this thread's saves before the crash.
    static STEPS_LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
    /// Steps of this thread's saves so far.
    static LOG: RefCell<Vec<Step>> = const { RefCell::new(Vec::new()) };
}

/// What a save does.
#[derive(Debug)]
pub(super) enum Step {
    /// Bytes of a file reach the disk.
    SyncFile(PathBuf),
    /// Names in a folder reach the disk.
    SyncFolder(PathBuf),
    /// A name is given.
    Rename(PathBuf, PathBuf),
    /// A name is taken.
    Remove(PathBuf),
}

/// Notes a step, and crashes before it if it is to: one that changes what others see, a name that is given or taken.
pub(super) fn step(step: Step) {
    let is_seen = matches!(step, Step::Rename(..) | Step::Remove(_));
    LOG.with_borrow_mut(|log| log.push(step));
    if !is_seen {
        return;
    }
    match STEPS_LEFT.get() {
        // Not by the panic handler: it is no failure.
        0 => resume_unwind(Box::new("the crash")),
        left => STEPS_LEFT.set(left - 1),
    }
}

/// A save that crashes after so many steps. `false` if it had no more.
fn crashes(steps: usize, save: impl FnOnce()) -> bool {
    STEPS_LEFT.set(steps);
    let crashed = catch_unwind(AssertUnwindSafe(save)).is_err();
    STEPS_LEFT.set(usize::MAX);
    crashed
}

/// Tensors of each kind of save: those of one, a single file, two shards, three, and again three of other tensors.
const TENSORS: [&[&str]; 4] =
    [&["a", "b"], &["a", "b", "c", "d"], &["a", "b", "c", "d", "e"], &["v", "w", "x", "y", "z"]];

/// Saves tensors of that kind, all of whose bytes are `generation`.
fn save_kind(directory: &Path, kind: usize, generation: u8) {
    save_kind_synced(directory, kind, generation, false);
}

fn save_kind_synced(directory: &Path, kind: usize, generation: u8, sync: bool) {
    let bytes = [generation; 100];
    let data = |name: &&'static str| TensorData {
        name,
        dtype: Dtype::U8,
        shape: &[100],
        bytes: TensorBytes::Host(&bytes),
    };
    let tensors: Vec<_> = TENSORS[kind].iter().map(data).collect();
    let sharding = Sharding { max_shard_bytes: 200, ..Sharding::default() };
    let mut options = SaveOptions::default();
    (options.sync, options.threads) = (sync, Some(1));
    let go_on = |_| ControlFlow::Continue(());
    save_sharded(directory, &tensors, None, &sharding, &options, go_on).unwrap();
}

/// The generation that is there, all tensors of its kind.
fn found(directory: &Path) -> Result<u8> {
    let loaded = crate::load(&[directory], &LoadOptions::default())?;
    let names: BTreeSet<&str> = loaded.tensors().iter().map(|tensor| tensor.name()).collect();
    let is_whole = TENSORS.iter().any(|kind| kind.iter().copied().collect::<BTreeSet<_>>() == names);
    assert!(is_whole, "{names:?}: {:?}", entries(directory));
    let all: BTreeSet<u8> =
        loaded.tensors().iter().flat_map(|tensor| tensor.bytes().unwrap().into_owned()).collect();
    assert_eq!(all.len(), 1, "tensors of several saves: {all:?}");
    Ok(*all.first().unwrap())
}

fn entries(directory: &Path) -> BTreeSet<PathBuf> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Nothing is there but the files of one save of that kind.
fn assert_is_tidy(directory: &Path, kind: usize) {
    let shards = TENSORS[kind].len().div_ceil(2);
    let expected = if shards == 1 { 1 } else { shards + 1 };
    assert_eq!(entries(directory).len(), expected, "{:?}", entries(directory));
}

/// A folder in memory, where there is one: these tests make thousands.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// What lies in a directory before: a save of that kind, with or without its index.
fn prepared(kind: usize, has_index: bool) -> tempfile::TempDir {
    let directory = folder();
    save_kind(directory.path(), kind, 1);
    if !has_index {
        let _ = fs::remove_file(directory.path().join("model.safetensors.index.json"));
    }
    directory
}

#[test]
fn a_crash_between_any_two_steps_leaves_the_old_save_or_the_new() {
    for (old, new) in (0..16).map(|pair| (pair / 4, pair % 4)) {
        for has_index in [true, false] {
            for steps in 0.. {
                let directory = prepared(old, has_index);
                let directory = directory.path();
                let crashed = crashes(steps, || save_kind(directory, new, 2));
                let generation = found(directory).unwrap_or_else(|error| {
                    panic!("{old} to {new}, {steps} steps: {error}, {:?}", entries(directory))
                });
                if !crashed {
                    assert_eq!(generation, 2);
                    assert_is_tidy(directory, new);
                    break;
                }
                assert!([1, 2].contains(&generation));
            }
        }
    }
}

#[test]
fn a_save_over_what_a_crash_left_may_crash_too() {
    for (old, new, third) in (0..32).map(|all| (all / 8, all / 2 % 4, all % 2 * 2)) {
        for first_steps in 0..8 {
            for steps in 0.. {
                let directory = prepared(old, true);
                let directory = directory.path();
                if !crashes(first_steps, || save_kind(directory, new, 2)) {
                    break;
                }
                let before = found(directory).unwrap();
                let crashed = crashes(steps, || save_kind(directory, third, 3));
                let generation = found(directory).unwrap_or_else(|error| {
                    panic!("{old}, {new}, {third}, {first_steps} and {steps} steps: {error}")
                });
                if !crashed {
                    assert_eq!(generation, 3);
                    assert_is_tidy(directory, third);
                    break;
                }
                assert!([before, 3].contains(&generation), "{before}, {generation}");
            }
        }
    }
}

#[test]
fn a_first_save_that_crashes_leaves_nothing_that_passes_for_a_checkpoint() {
    for kind in 0..4 {
        for steps in 0.. {
            let directory = folder();
            let directory = directory.path();
            let crashed = crashes(steps, || save_kind(directory, kind, 1));
            match found(directory) {
                Ok(generation) => assert_eq!(generation, 1),
                Err(error) => assert!(crashed, "{error}"),
            }
            save_kind(directory, kind, 2);
            assert_eq!(found(directory).unwrap(), 2);
            assert_is_tidy(directory, kind);
            if !crashed {
                break;
            }
        }
    }
}

/// Fails unless files were on the disk before they got names, and each kind of change to the folder before the next kind.
fn assert_is_in_order(log: &[Step]) {
    let mut synced = BTreeSet::new();
    let mut pending: Option<(bool, bool)> = None;
    for step in log {
        let path = match step {
            Step::SyncFile(path) => {
                synced.insert(path);
                continue;
            }
            Step::SyncFolder(_) => {
                pending = None;
                continue;
            }
            Step::Rename(from, to) => {
                assert!(synced.contains(from), "{} has a name before its bytes: {log:#?}", to.display());
                to
            }
            Step::Remove(path) => path,
        };
        let kind = (matches!(step, Step::Remove(_)), path.extension().is_some_and(|ending| ending == "json"));
        assert!(pending.is_none_or(|pending| pending == kind), "before {}: {log:#?}", path.display());
        pending = Some(kind);
    }
    assert!(pending.is_none(), "at the end: {log:#?}");
}

#[test]
fn each_step_is_on_the_disk_before_the_next() {
    for (old, new, has_index) in (0..32).map(|all| (all / 8, all / 2 % 4, all % 2 == 0)) {
        let directory = prepared(old, has_index);
        LOG.take();
        save_kind_synced(directory.path(), new, 2, true);
        assert_is_in_order(&LOG.take());
    }
    let directory = folder();
    let data = TensorData { name: "a", dtype: Dtype::U8, shape: &[1], bytes: TensorBytes::Host(&[1]) };
    let options = SaveOptions { threads: Some(1), ..SaveOptions::default() };
    save(&directory.path().join("m"), &[data], None, &options, |_| ControlFlow::Continue(())).unwrap();
    assert_is_in_order(&LOG.take());
}

#[test]
fn every_new_level_of_a_folder_is_on_the_disk() {
    let directory = folder();
    let levels = ["", "a", "a/b", "a/b/c"].map(|level| directory.path().join(level));
    LOG.take();
    save_kind_synced(&levels[3], 1, 1, true);
    let synced: Vec<PathBuf> = LOG
        .take()
        .into_iter()
        .filter_map(|step| if let Step::SyncFolder(path) = step { Some(path) } else { None })
        .collect();
    for level in &levels {
        assert!(
            synced.iter().any(|path| path == level || path.components().eq(level.components())),
            "{level:?}"
        );
    }
}
