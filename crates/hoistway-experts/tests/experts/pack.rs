//! Packed experts: written, used by every backing, refused, damaged.

use crate::{
    kit::{self, EXPERTS, LAYERS, LONG, Lru, Model, budget_of, let_file_time_pass, scripted},
    stand_in::Turn,
};
use hoistway::{Cancel, Checkpoint, DeviceId, Dtype, route::fault::Fault};
use hoistway_experts::{
    Error, ExpertId,
    backing::Backing,
    catalog::ExpertCatalog,
    pack::{self, PackChoice, PackOptions, Packing},
    store::{Store, StoreOptions},
};
use std::{
    fs::{self, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

fn path_of(model: &Model) -> PathBuf {
    pack::path_of(&model.catalog).unwrap()
}

fn write(model: &Model) -> PathBuf {
    let path = path_of(model);
    let options = PackOptions::default();
    let mut told = 0;
    let report =
        pack::write(&model.checkpoint, &model.catalog, &path, &options, |bytes| told += bytes).unwrap();
    assert_eq!((&report.path, report.experts), (&path, (LAYERS * EXPERTS) as usize));
    assert_eq!(report.bytes, model.catalog.total_expert_bytes());
    assert_eq!(told, 2 * report.bytes, "written, and read again");
    assert_eq!(fs::metadata(&path).unwrap().len(), report.file_bytes);
    path
}

/// A model whose catalog is with the pack of `choice`.
fn with_pack(mut model: Model, choice: &PackChoice) -> Model {
    let catalog = Arc::unwrap_or_clone(model.catalog.clone()).with_pack(choice).unwrap();
    model.catalog = Arc::new(catalog);
    model
}

/// What a store says of the pack beside a model.
fn reason(model: &Model) -> String {
    let catalog = Arc::unwrap_or_clone(model.catalog.clone()).with_pack(&PackChoice::Auto).unwrap();
    let Packing::Refused { path, reason } = catalog.packing().clone() else {
        panic!("{:?}", catalog.packing())
    };
    assert_eq!(path, path_of(model));
    // Its experts come from the model.
    let store = open(catalog.clone(), model);
    assert_eq!(store.stats().packing, *catalog.packing());
    model.assert_holds(&store.ensure(1, &[0, 7]).unwrap());
    let named = Arc::unwrap_or_clone(model.catalog.clone()).with_pack(&PackChoice::At(path.clone()));
    match named.unwrap_err() {
        Error::InvalidPack { path: found, reason: told } => assert_eq!((found, &told), (path, &reason)),
        other => panic!("{other}"),
    }
    reason
}

fn open(catalog: ExpertCatalog, model: &Model) -> Store {
    let files = ExpertCatalog::open_files(&model.checkpoint);
    Store::open(Arc::new(catalog), files, Box::new(Lru::default()), &budget_of(4)).unwrap()
}

#[test]
fn every_backing_serves_packed_experts_or_says_why_not() {
    let _turn = Turn::take();
    let backings = [
        (Backing::HostSlots, None),
        (Backing::HostSparse, Some("no whole blocks")),
        (Backing::DeviceSlots(DeviceId::Cuda(0)), Some("memory of a device")),
        (Backing::DeviceSlots(DeviceId::Toy(0)), Some("memory of a device")),
    ];
    for (backing, refused) in backings {
        let model = Model::new();
        let path = write(&model);
        let model = with_pack(model, &PackChoice::Auto);
        assert_eq!(*model.catalog.packing(), Packing::Used { path: path.clone() });
        let options = budget_of(5).backing(backing.clone());
        let store = model.store(&options);
        match (store.stats().packing, refused) {
            (Packing::Used { .. }, None) => {}
            (Packing::Refused { reason, .. }, Some(expected)) if reason.contains(expected) => {
                let named =
                    Arc::unwrap_or_clone(model.catalog.clone()).with_pack(&PackChoice::At(path)).unwrap();
                let files = ExpertCatalog::open_files(&model.checkpoint);
                let named = Store::open(Arc::new(named), files, Box::new(Lru::default()), &options);
                assert!(matches!(&named, Err(Error::InvalidPack { .. })), "{named:?}");
            }
            (packing, _) => panic!("{}: {packing:?}", backing.name()),
        }
        for token in 0..4 {
            for layer in 0..LAYERS {
                model.assert_holds(&store.ensure(layer, &[token, (token + 3) % EXPERTS]).unwrap());
            }
            model.assert_holds(&store.ensure_tensors(&["token_embd.weight"]).unwrap());
        }
        assert!(store.stats().evictions > 0, "{}", backing.name());
    }
}

/// Reads of one expert of [`kit::gguf_model`] into slots.
fn reads_of_an_expert(choice: &PackChoice) -> (u64, u64) {
    let model = Model::new();
    write(&model);
    let model = with_pack(model, choice);
    let reads = Arc::new(AtomicU64::new(0));
    let counted = reads.clone();
    let (options, _) = scripted(budget_of(4), move |_, _| {
        counted.fetch_add(1, Ordering::Relaxed);
        None
    });
    let store = model.store(&options);
    model.assert_holds(&store.ensure(1, &[3]).unwrap());
    (reads.load(Ordering::Relaxed), store.stats().used_bytes)
}

#[test]
fn a_packed_expert_is_one_read_and_takes_fewer_blocks() {
    let (apart, apart_bytes) = reads_of_an_expert(&PackChoice::Never);
    let (packed, packed_bytes) = reads_of_an_expert(&PackChoice::Auto);
    assert_eq!((apart, packed), (3, 1));
    assert!(packed_bytes <= apart_bytes, "{packed_bytes} {apart_bytes}");
}

#[test]
fn an_error_of_a_read_for_several_tensors_names_the_first() {
    let model = Model::new();
    write(&model);
    let model = with_pack(model, &PackChoice::Auto);
    // Opening reads three experts.
    let fails = Arc::new(AtomicBool::new(false));
    let is_failing = fails.clone();
    let (options, _) =
        scripted(budget_of(4), move |_, _| is_failing.load(Ordering::Relaxed).then_some(Fault::Broken));
    let store = model.store(&options);
    fails.store(true, Ordering::Relaxed);
    let error = store.ensure(1, &[3]).unwrap_err();
    let Error::Read { unit, source } = &error else { panic!("{error:?}") };
    assert_eq!(unit, "expert 3 of layer 1");
    let hoistway::Error::Io { tensor, .. } = source.error() else { panic!("{error:?}") };
    let parts = model.catalog.expert(ExpertId { layer: 1, expert: 3 }).unwrap().parts();
    assert_eq!(tensor.as_deref(), Some(&*parts[0].tensor));
}

/// A model whose slices are whole blocks that begin within a block of the file.
fn whole_blocks() -> (tempfile::TempDir, PathBuf) {
    let directory = kit::disk();
    let path = directory.path().join("model.safetensors");
    let stacked: &[u64] = &[4, 32, 128];
    let tensors: Vec<(&str, Dtype, &[u64])> = vec![
        ("model.layers.0.mlp.experts.gate_up_proj", Dtype::U8, stacked),
        ("model.layers.0.mlp.experts.down_proj", Dtype::U8, stacked),
    ];
    kit::safetensors(&path, &tensors);
    (directory, path)
}

#[test]
fn sparse_slices_of_whole_blocks_have_no_ends_to_stage() {
    let (_directory, path) = whole_blocks();
    let reads = |choice: &PackChoice| {
        let checkpoint = Checkpoint::open(&[&path]).unwrap();
        let catalog = ExpertCatalog::of_checkpoint(&checkpoint, Some(1)).unwrap();
        let beside = pack::path_of(&catalog).unwrap();
        pack::write(&checkpoint, &catalog, &beside, &PackOptions::default(), |_| ()).unwrap();
        let catalog = Arc::new(catalog.with_pack(choice).unwrap());
        let count = Arc::new(AtomicU64::new(0));
        let counted = count.clone();
        let options = StoreOptions::default().backing(Backing::HostSparse).timeout(LONG);
        let (options, _) = scripted(options, move |_, _| {
            counted.fetch_add(1, Ordering::Relaxed);
            None
        });
        let files = ExpertCatalog::open_files(&checkpoint);
        let store = Store::open(catalog.clone(), files, Box::new(Lru::default()), &options).unwrap();
        let lease = store.ensure(0, &[2]).unwrap();
        let bytes = fs::read(&path).unwrap();
        for part in lease.get(0).unwrap().parts() {
            let range = part.part().bytes;
            assert_eq!(part.bytes().unwrap(), &bytes[range.start() as usize..range.end() as usize]);
            let base = store.tensor_address(&part.part().tensor).unwrap();
            assert_eq!(part.address(), base + 2 * range.len(), "its stride is that of the tensor");
        }
        count.load(Ordering::Relaxed)
    };
    let (apart, packed) = (reads(&PackChoice::Never), reads(&PackChoice::Auto));
    assert_eq!(packed, 2, "one for each tensor");
    assert!(apart > packed, "{apart}: both ends of a slice are apart");
}

#[test]
fn without_a_pack_nothing_is_refused() {
    let model = Model::new();
    let catalog = || Arc::unwrap_or_clone(model.catalog.clone());
    assert_eq!(*catalog().with_pack(&PackChoice::Auto).unwrap().packing(), Packing::None);
    let missing = catalog().with_pack(&PackChoice::At(path_of(&model))).unwrap_err();
    assert!(
        matches!(&missing, Error::InvalidPack { reason, .. } if reason.contains("moe pack")),
        "{missing}"
    );
    let path = write(&model);
    assert_eq!(*catalog().with_pack(&PackChoice::Never).unwrap().packing(), Packing::None);
    // One that lies elsewhere is found where it is said to be.
    let elsewhere = model.directory.path().join("other.experts");
    fs::rename(&path, &elsewhere).unwrap();
    assert_eq!(*catalog().with_pack(&PackChoice::Auto).unwrap().packing(), Packing::None);
    let named = catalog().with_pack(&PackChoice::At(elsewhere.clone())).unwrap();
    assert_eq!(*named.packing(), Packing::Used { path: elsewhere });
}

#[test]
#[cfg_attr(windows, ignore = "writes to a file that is open, which Windows does not let")]
fn the_pack_of_a_model_that_has_changed_is_refused() {
    let model = Model::new();
    write(&model);
    let_file_time_pass(&model.path);
    // The same bytes, written again.
    fs::write(&model.path, &model.bytes).unwrap();
    let again = Checkpoint::open(&[&model.path]).unwrap();
    let model = Model { checkpoint: again, ..model };
    let said = reason(&model);
    assert!(said.contains("'model.gguf' was changed or copied"), "{said}");
    // Packed again, it is used.
    write(&model);
    let model = with_pack(model, &PackChoice::Auto);
    assert!(matches!(model.catalog.packing(), Packing::Used { .. }));
}

#[test]
#[cfg_attr(windows, ignore = "writes to a file that is open, which Windows does not let")]
fn the_pack_of_another_model_is_refused() {
    let (model, other) = (Model::new(), Model::new());
    let path = write(&other);
    let mut file = OpenOptions::new().append(true).open(&model.path).unwrap();
    file.write_all(&[0; 32]).unwrap();
    drop(file);
    let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
    let mut bytes = model.bytes.clone();
    bytes.extend([0; 32]);
    let model = Model { checkpoint, bytes, ..model };
    fs::copy(path, path_of(&model)).unwrap();
    let said = reason(&model);
    assert!(said.contains("bytes when it was packed"), "{said}");
}

#[test]
fn a_damaged_pack_is_refused_or_found_by_a_check() {
    let model = Model::new();
    let path = write(&model);
    let whole = fs::read(&path).unwrap();
    let check = || pack::check(&model.checkpoint, &model.catalog, &path, &PackOptions::default(), |_| ());
    assert_eq!(check().unwrap().experts, (LAYERS * EXPERTS) as usize);

    let changed = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    let index = whole.len() - 10;
    let cases = [
        (Vec::new(), "holds no packed experts"),
        (whole[..4096].to_vec(), "cut or damaged"),
        (whole[..whole.len() - 1].to_vec(), "cut or damaged"),
        (changed(0), "holds no packed experts"),
        (changed(16), "has version"),
        (changed(31), "cut or damaged"),
        (changed(39), "cut or damaged"),
        (changed(41), "index is damaged"),
        (changed(index), "index is damaged"),
    ];
    for (bytes, expected) in cases {
        fs::write(&path, &bytes).unwrap();
        let said = reason(&model);
        assert!(said.contains(expected), "{said}, expected {expected}");
        let error = check().unwrap_err();
        assert!(matches!(&error, Error::InvalidPack { reason, .. } if *reason == said), "{error}");
    }
    // The first byte of an expert.
    fs::write(&path, changed(4096)).unwrap();
    let error = check().unwrap_err();
    assert!(
        matches!(&error, Error::InvalidPack { reason, .. } if reason.contains("expert 0 of layer 0")),
        "{error}"
    );
}

#[test]
fn a_pack_that_is_not_written_to_its_end_leaves_the_one_before() {
    let model = Model::new();
    let path = write(&model);
    let before = fs::read(&path).unwrap();
    let files = |directory: &Path| fs::read_dir(directory).unwrap().count();
    let count = files(model.directory.path());
    let cancel = Cancel::default();
    let options = PackOptions::default().cancel(cancel.clone());
    let cancelled = pack::write(&model.checkpoint, &model.catalog, &path, &options, |_| cancel.cancel());
    assert!(matches!(cancelled, Err(Error::Engine(hoistway::Error::Cancelled))), "{cancelled:?}");
    assert_eq!((fs::read(&path).unwrap() == before, files(model.directory.path())), (true, count));
}

#[test]
#[cfg(target_os = "linux")]
fn a_path_that_is_no_text_is_shown_in_statistics() {
    use std::os::unix::ffi::OsStrExt;

    let model = Model::new();
    let path = write(&model);
    let odd = model.directory.path().join(std::ffi::OsStr::from_bytes(b"\xff.experts"));
    fs::rename(path, &odd).unwrap();
    let model = with_pack(model, &PackChoice::At(odd));
    let stats = serde_json::to_value(model.store(&budget_of(4)).stats()).unwrap();
    assert_eq!(stats["packing"]["state"], "used");
    assert!(stats["packing"]["path"].as_str().unwrap().ends_with(".experts"), "{stats}");
}

#[test]
fn a_model_without_experts_is_not_packed() {
    let directory = kit::disk();
    let path = directory.path().join("dense.safetensors");
    kit::safetensors(&path, &[("x", Dtype::U8, &[8])]);
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let catalog = ExpertCatalog::of_checkpoint(&checkpoint, None).unwrap();
    let beside = pack::path_of(&catalog).unwrap();
    let refused = pack::write(&checkpoint, &catalog, &beside, &PackOptions::default(), |_| ());
    assert!(matches!(refused, Err(Error::InvalidOption { option: "pack", .. })), "{refused:?}");
    assert!(!beside.exists());
    assert_eq!(*catalog.with_pack(&PackChoice::Auto).unwrap().packing(), Packing::None);
}

#[test]
fn a_pack_that_is_cut_under_a_store_is_a_typed_error() {
    let model = Model::new();
    let path = write(&model);
    let cut = OpenOptions::new().write(true).open(&path).unwrap();
    let model = with_pack(model, &PackChoice::Auto);
    let store = model.store(&budget_of(4));
    model.assert_holds(&store.ensure(0, &[0]).unwrap());
    cut.set_len(5000).unwrap();
    let last = ExpertId { layer: LAYERS - 1, expert: EXPERTS - 1 };
    match store.ensure(last.layer, &[last.expert]).unwrap_err() {
        Error::Read { unit, source } => {
            assert_eq!(unit, format!("expert {} of layer {}", last.expert, last.layer));
            assert!(source.to_string().contains("model.gguf.experts"), "{source}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_pack_that_would_replace_the_model_is_refused() {
    let model = Model::new();
    let write = |output: &Path| {
        pack::write(&model.checkpoint, &model.catalog, output, &PackOptions::default(), |_| ())
    };
    let mut outputs = vec![model.path.clone()];
    let hard = model.directory.path().join("hard");
    fs::hard_link(&model.path, &hard).unwrap();
    outputs.push(hard);
    #[cfg(unix)]
    {
        let soft = model.directory.path().join("soft");
        std::os::unix::fs::symlink(&model.path, &soft).unwrap();
        outputs.push(soft);
    }
    for output in outputs {
        let refused = write(&output);
        assert!(matches!(&refused, Err(Error::InvalidOption { option: "output", .. })), "{refused:?}");
    }
    assert!(fs::read(&model.path).unwrap() == model.bytes);
}

/// Puts another model of the same layout at the path of a model, whose files stay open.
fn replace(model: &Model) -> Checkpoint {
    let other = model.directory.path().join("other.gguf");
    let mut bytes = model.bytes.clone();
    bytes.iter_mut().rev().take(1000).for_each(|byte| *byte ^= 1);
    let_file_time_pass(&model.path);
    fs::write(&other, bytes).unwrap();
    fs::rename(other, &model.path).unwrap();
    Checkpoint::open(&[&model.path]).unwrap()
}

#[test]
#[cfg_attr(windows, ignore = "replaces a file that is open, which Windows does not let")]
fn a_model_that_was_replaced_since_it_was_opened_is_not_packed() {
    let model = Model::new();
    replace(&model);
    let path = path_of(&model);
    let refused = pack::write(&model.checkpoint, &model.catalog, &path, &PackOptions::default(), |_| ());
    assert!(
        matches!(&refused, Err(Error::InvalidPack { reason, .. }) if reason.contains("replaced")),
        "{refused:?}"
    );
    assert!(!path.exists());
}

#[test]
#[cfg_attr(windows, ignore = "replaces a file that is open, which Windows does not let")]
fn a_store_compares_a_pack_with_the_files_that_it_reads() {
    let model = Model::new();
    let now = replace(&model);
    let catalog = ExpertCatalog::of_checkpoint(&now, None).unwrap();
    pack::write(&now, &catalog, &path_of(&model), &PackOptions::default(), |_| ()).unwrap();
    // It is that of the path, and not that of the open file.
    let model = with_pack(model, &PackChoice::Auto);
    assert!(matches!(model.catalog.packing(), Packing::Used { .. }));
    let store = model.store(&budget_of(4));
    match store.stats().packing {
        Packing::Refused { reason, .. } => assert!(reason.contains("changed or copied"), "{reason}"),
        packing => panic!("{packing:?}"),
    }
    model.assert_holds(&store.ensure(LAYERS - 1, &[EXPERTS - 1]).unwrap());
}

/// Changes the first byte of an expert in the model, and sets the time of its file back.
fn rewritten(model: Model, expert: ExpertId) -> Model {
    let at = model.catalog.expert(expert).unwrap().parts()[0].bytes.start() as usize;
    let modified = fs::metadata(&model.path).unwrap().modified().unwrap();
    let mut bytes = model.bytes.clone();
    bytes[at] ^= 1;
    fs::write(&model.path, &bytes).unwrap();
    OpenOptions::new().write(true).open(&model.path).unwrap().set_modified(modified).unwrap();
    let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
    Model { checkpoint, bytes, ..model }
}

#[test]
#[cfg_attr(windows, ignore = "writes to a file that is open, which Windows does not let")]
fn other_bytes_of_the_same_length_and_time_are_found() {
    for (expert, is_sampled) in
        [(ExpertId { layer: 0, expert: 0 }, true), (ExpertId { layer: 0, expert: 1 }, false)]
    {
        let model = Model::new();
        let path = write(&model);
        let model = with_pack(rewritten(model, expert), &PackChoice::Auto);
        let label = format!("expert {} of layer 0 of the model", expert.expert);
        let error = pack::check(&model.checkpoint, &model.catalog, &path, &PackOptions::default(), |_| ());
        assert!(
            matches!(&error, Err(Error::InvalidPack { reason, .. }) if reason.contains(&label)),
            "{error:?}"
        );
        if is_sampled {
            let store = model.store(&budget_of(4));
            let packing = store.stats().packing;
            assert!(
                matches!(&packing, Packing::Refused { reason, .. } if reason.contains(&label)),
                "{packing:?}"
            );
            model.assert_holds(&store.ensure(expert.layer, &[expert.expert]).unwrap());
        }
    }
}

#[test]
fn a_damaged_expert_is_found_as_it_is_read() {
    let model = Model::new();
    let path = write(&model);
    let mut bytes = fs::read(&path).unwrap();
    bytes[4096] ^= 1;
    fs::write(&path, bytes).unwrap();
    let model = with_pack(model, &PackChoice::Auto);
    let store = model.store(&budget_of(4));
    for _ in 0..2 {
        match store.ensure(0, &[0]).unwrap_err() {
            Error::Read { unit, source } => {
                let said = source.to_string();
                assert_eq!(unit, "expert 0 of layer 0");
                assert!(said.contains("model.gguf.experts") && said.contains("damaged"), "{said}");
            }
            other => panic!("{other}"),
        }
    }
    model.assert_holds(&store.ensure(0, &[1]).unwrap());
}

#[test]
#[cfg(target_os = "linux")]
fn a_pipe_in_place_of_a_pack_is_refused_at_once() {
    let model = Model::new();
    let made = std::process::Command::new("mkfifo").arg(path_of(&model)).status().unwrap();
    assert!(made.success());
    let said = reason(&model);
    assert!(said.contains("regular file"), "{said}");
}

#[test]
#[cfg(unix)]
fn the_pack_of_a_private_model_is_private() {
    use std::os::unix::fs::PermissionsExt;

    let model = Model::new();
    fs::set_permissions(&model.path, fs::Permissions::from_mode(0o600)).unwrap();
    // The change time of an open file has moved.
    let model = Model { checkpoint: Checkpoint::open(&[&model.path]).unwrap(), ..model };
    let path = write(&model);
    assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_pack_replaces_nothing_but_a_pack() {
    let model = Model::new();
    let other = model.directory.path().join("other.safetensors");
    kit::safetensors(&other, &[("a", Dtype::U8, &[4096])]);
    let before = fs::read(&other).unwrap();
    let write_to =
        |path: &Path| pack::write(&model.checkpoint, &model.catalog, path, &PackOptions::default(), |_| ());
    let error = write_to(&other).unwrap_err().to_string();
    assert!(error.contains("is not a file of packed experts; choose another name"), "{error}");
    assert_eq!(fs::read(&other).unwrap(), before);
    // An empty file, as of `mktemp`, and an earlier pack.
    let empty = model.directory.path().join("empty");
    fs::write(&empty, "").unwrap();
    for _ in 0..2 {
        write_to(&empty).unwrap();
    }
}

#[test]
fn a_pattern_of_the_model_leaves_its_pack_out() {
    let model = Model::new();
    let path = write(&model);
    let all = Checkpoint::open(&[model.directory.path().join("model.gguf*")]).unwrap();
    let catalog = ExpertCatalog::of_checkpoint(&all, None).unwrap();
    assert_eq!(catalog.files(), model.catalog.files());
    let packs = Checkpoint::open(&[model.directory.path().join("*.experts")]).unwrap_err().to_string();
    // With the separators of the system, unlike the path of the test.
    assert!(packs.contains(path.file_name().unwrap().to_str().unwrap()), "{packs}");
}

#[test]
fn dense_tensors_of_whole_blocks_stay_in_place_beside_packed_experts() {
    let directory = kit::disk();
    let path = directory.path().join("model.safetensors");
    let tensors: Vec<(&str, Dtype, &[u64])> = vec![
        ("odd", Dtype::U8, &[100]),
        ("model.layers.0.mlp.experts.gate_up_proj", Dtype::U8, &[4, 32, 128]),
        ("model.layers.0.mlp.experts.down_proj", Dtype::U8, &[4, 32, 128]),
        ("dense", Dtype::U8, &[2, 4096]),
    ];
    kit::safetensors(&path, &tensors);
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let catalog = ExpertCatalog::of_checkpoint(&checkpoint, Some(1)).unwrap();
    let beside = pack::path_of(&catalog).unwrap();
    pack::write(&checkpoint, &catalog, &beside, &PackOptions::default(), |_| ()).unwrap();
    let catalog = Arc::new(catalog.with_pack(&PackChoice::Auto).unwrap());
    let options = StoreOptions::default().backing(Backing::HostSparse).timeout(LONG);
    let files = ExpertCatalog::open_files(&checkpoint);
    let store = Store::open(catalog, files, Box::new(Lru::default()), &options).unwrap();
    assert!(matches!(store.stats().packing, Packing::Used { .. }));
    let lease = store.ensure_tensors(&["dense"]).unwrap();
    let part = lease.get(0).unwrap().parts().next().unwrap();
    assert_eq!(part.address() % 4096, part.part().bytes.start() % 4096);
}
