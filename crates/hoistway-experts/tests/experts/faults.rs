//! Faults of files and drives under a store: a lease has the right bytes, or there is none.

use crate::kit::{EXPERTS, LAYERS, Model, budget_of, let_file_time_pass, scripted, until};
use hoistway::{Route, route::fault::Fault};
use hoistway_experts::{Error, ExpertId, backing::Backing};
use std::{
    fs,
    io::{Seek, SeekFrom, Write},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

fn backings() -> [Backing; 2] {
    [Backing::HostSlots, Backing::HostSparse]
}

#[test]
fn an_error_in_one_part_of_three_fails_its_expert_and_no_other() {
    let model = Model::new();
    for backing in backings() {
        let bad = model.catalog.expert(ExpertId { layer: 1, expert: 4 }).unwrap().parts()[1].bytes;
        let broken = Arc::new(AtomicBool::new(true));
        let is_broken = broken.clone();
        let (options, _) = scripted(budget_of(6).backing(backing), move |_, offset| {
            // From the block that it begins in, to the one that the next expert begins in.
            let is_bad = (bad.start() / 4096 * 4096..bad.end() / 4096 * 4096).contains(&offset);
            (is_bad && is_broken.load(Ordering::Relaxed)).then_some(Fault::Broken)
        });
        let store = model.store(&options);
        let error = store.ensure(1, &[4]).unwrap_err();
        let Error::Read { unit, source } = &error else { panic!("{error:?}") };
        assert_eq!(unit, "expert 4 of layer 1");
        let hoistway::Error::Io { path, tensor, range, .. } = source.error() else { panic!("{error:?}") };
        assert_eq!((path, tensor.as_deref()), (&model.path, Some("blk.1.ffn_up_exps.weight")));
        assert!(range.is_some());
        assert_eq!(source.error().errno(), Fault::Broken.errno());
        assert!(!store.is_resident(ExpertId { layer: 1, expert: 4 }).unwrap());
        let used = store.stats().used_bytes;
        assert_eq!(used, 0, "what was read of it is given back");
        model.assert_holds(&store.ensure(1, &[0, 7]).unwrap());
        broken.store(false, Ordering::Relaxed);
        model.assert_holds(&store.ensure(1, &[4, 0]).unwrap());
    }
}

#[test]
fn reads_that_come_short_or_fail_at_random_give_right_bytes_or_errors() {
    let model = Model::new();
    for backing in backings() {
        let (options, script) = scripted(budget_of(4).backing(backing), |number, _| {
            match number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 59 {
                0..4 => Some(Fault::Short(100)),
                4 => Some(Fault::Broken),
                5 => Some(Fault::Interrupted),
                _ => None,
            }
        });
        // What the page cache fails to give would be read again.
        let reader = options.reader.clone().route(Route::Threads);
        let store = model.store(&options.reader(reader));
        let (mut good, mut bad) = (0, 0);
        thread::scope(|scope| {
            let threads: Vec<_> = (0..3u32)
                .map(|thread| {
                    let (store, model) = (&store, &model);
                    scope.spawn(move || {
                        let (mut good, mut bad) = (0, 0);
                        for round in 0..40 {
                            let experts = [(round + thread) % EXPERTS, (round * 3) % EXPERTS];
                            match store.ensure((round + thread) % LAYERS, &experts) {
                                Ok(lease) => {
                                    model.assert_holds(&lease);
                                    good += 1;
                                }
                                Err(Error::Read { .. }) => bad += 1,
                                Err(other) => panic!("{other:?}"),
                            }
                        }
                        (good, bad)
                    })
                })
                .collect();
            for thread in threads {
                let (one_good, one_bad) = thread.join().unwrap();
                good += one_good;
                bad += one_bad;
            }
        });
        assert!(good > 0 && bad > 0, "{good} leases, {bad} errors, {} reads", script.reads());
        // A request that failed leaves the reads of its other expert.
        until("the budget", || store.stats().used_bytes <= budget_of(4).budget_bytes);
    }
}

#[test]
fn a_file_that_shrinks_is_truncated_and_not_zeros() {
    for backing in backings() {
        let (model, writer) = Model::with_writer();
        let store = model.store(&budget_of(4).backing(backing));
        let kept = store.ensure(0, &[0]).unwrap();
        let last = model.catalog.expert(ExpertId { layer: 2, expert: 7 }).unwrap();
        let end = last.parts()[2].bytes.start() + 5;
        writer.set_len(end).unwrap();
        drop(writer);
        for (layer, expert) in [(2, 7), (0, 1)] {
            let error = store.ensure(layer, &[expert]).unwrap_err();
            let Error::Read { source, .. } = &error else { panic!("{error:?}") };
            let is_told =
                matches!(source.error(), hoistway::Error::Truncated { .. } | hoistway::Error::Changed { .. });
            assert!(is_told && error.to_string().contains("model.gguf"), "{error:?}");
        }
        // What was leased before stays what it was.
        model.assert_holds(&kept);
        assert_eq!(store.stats().resident, 1);
    }
}

#[test]
fn a_file_that_changes_under_the_store_is_found_out() {
    let (model, mut file) = Model::with_writer();
    let store = model.store(&budget_of(4));
    drop(store.ensure(0, &[0]).unwrap());
    let_file_time_pass(&model.path);
    let place = model.catalog.expert(ExpertId { layer: 0, expert: 1 }).unwrap().parts()[0].bytes;
    file.seek(SeekFrom::Start(place.start())).unwrap();
    file.write_all(&[1, 2, 3]).unwrap();
    drop(file);
    let error = store.ensure(0, &[1]).unwrap_err();
    let Error::Read { source, .. } = &error else { panic!("{error:?}") };
    assert!(matches!(source.error(), hoistway::Error::Changed { .. }), "{error:?}");
    model.assert_holds(&store.ensure(0, &[0]).unwrap());
}

#[test]
fn a_file_that_is_too_short_is_refused_at_opening() {
    let model = Model::new();
    let mut files = hoistway_experts::catalog::ExpertCatalog::open_files(&model.checkpoint);
    let other = model.directory.path().join("other");
    fs::copy(&model.path, &other).unwrap();
    let other = hoistway::read::ReadFile::open(&other).unwrap();
    let more = vec![files[0].clone(), other.clone()];
    fs::OpenOptions::new().write(true).open(&model.path).unwrap().set_len(100).unwrap();
    files[0] = hoistway::read::ReadFile::open(&model.path).unwrap();
    let policy = || Box::new(crate::kit::Lru::default());
    let options = budget_of(2);
    let open = |files| hoistway_experts::store::Store::open(model.catalog.clone(), files, policy(), &options);
    let error = open(files).unwrap_err();
    assert!(matches!(error, Error::Engine(hoistway::Error::Truncated { .. })), "{error:?}");
    // A file of the same length need not have the same bytes.
    for files in [vec![other], Vec::new(), more] {
        let error = open(files).unwrap_err();
        assert!(matches!(error, Error::InvalidOption { option: "files", .. }), "{error:?}");
    }
}
