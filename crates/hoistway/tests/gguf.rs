//! GGUF files from the outside: how they are found, what is loaded of them, and what is refused.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    GgufTensor, all_devices, assert_is_gguf, devices,
    gguf::{Item, Writer},
    gguf_tensor, let_file_time_pass, mixed_gguf,
    system::{is_open, write_all_at},
    tensor, write_gguf, write_model,
};
use hoistway::{
    ByteRange, Catalog, Checkpoint, Dtype, Error, GgmlType, LoadOptions, Loaded, Route,
    catalog::{
        FormatError, OpenOptions,
        gguf::{ArrayValues, GgufError, Value},
    },
    plan::{PlanError, Selection, SliceError, TensorSlice},
    verify::Manifest,
};
use std::{
    fs,
    path::{Path, PathBuf},
};

const F32: u32 = 0;
const Q4_0: u32 = 2;
const Q8_0: u32 = 8;
const I8: u32 = 24;
const UNKNOWN: u32 = 97;

fn load(path: &Path) -> hoistway::Result<Loaded> {
    hoistway::load(&[path], &LoadOptions::default())
}

fn gguf_problem(result: hoistway::Result<Catalog>) -> (PathBuf, GgufError) {
    match result {
        Err(Error::InvalidFile { path, problem: FormatError::Gguf(problem) }) => (path, problem),
        other => panic!("{other:?}"),
    }
}

type Keys = Vec<(Vec<u8>, Item)>;

/// Writes the files of a split model; `change` may spoil them.
fn split_model(
    directory: &Path,
    count: u16,
    change: impl Fn(u16, &mut Keys),
) -> (Vec<PathBuf>, Vec<GgufTensor>) {
    let (mut paths, mut tensors) = (Vec::new(), Vec::new());
    for number in 0..count {
        let mut writer = Writer::default();
        if number == 0 {
            writer = writer.key("general.name", "split").key("list", Item::strings(["a", "b"]));
        }
        writer = writer
            .key("split.no", Item::U16(number))
            .key("split.count", Item::U16(count))
            .key("split.tensors.count", Item::I32((2 * count).into()));
        change(number, &mut writer.keys);
        for i in 0..2 {
            let (tensor, written) = gguf_tensor(&format!("blk.{number}.{i}"), Q8_0, &[5, 64]);
            tensors.push(tensor);
            writer.tensors.push(written);
        }
        let path = directory.join(format!("model-{:05}-of-{count:05}.gguf", number + 1));
        fs::write(&path, writer.finish()).unwrap();
        paths.push(path);
    }
    (paths, tensors)
}

#[test]
fn the_format_is_what_the_first_bytes_say() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let tensors = write_gguf(&path, &[("a", F32, &[3])]);
    assert_is_gguf(&load(&path).unwrap(), &tensors);
    let path = directory.path().join("model.gguf");
    write_model(&path, &[tensor("a", Dtype::U8, &[3])], 0, 1);
    let catalog = Catalog::open(&[&path]).unwrap();
    assert_eq!(catalog.files()[0].format.name(), "safetensors");
    for text in ["version https://git-lfs.github.com/spec/v1\n", "<html>", ""] {
        fs::write(&path, text).unwrap();
        let (at, problem) = gguf_problem(Catalog::open(&[&path]));
        assert!(at == path && matches!(problem, GgufError::NoMagic { .. }), "{problem:?}");
    }
    fs::write(&path, b"GGUF").unwrap();
    let (at, problem) = gguf_problem(Catalog::open(&[&path]));
    assert!(at == path && matches!(problem, GgufError::PastEnd { .. }), "{problem:?}");
}

#[test]
fn any_file_of_a_split_model_stands_for_all() {
    let directory = tempfile::tempdir().unwrap();
    let (paths, tensors) = split_model(directory.path(), 3, |_, _| {});
    let glob = directory.path().join("*.gguf");
    let given: Vec<Vec<&Path>> = vec![
        vec![&paths[0]],
        vec![&paths[1]],
        vec![&paths[2]],
        vec![&paths[2], &paths[0], &paths[1]],
        vec![&glob],
        vec![directory.path()],
        vec![directory.path(), &paths[1]],
    ];
    for paths_given in given {
        let checkpoint = Checkpoint::open(&paths_given).unwrap();
        let found: Vec<_> = checkpoint.catalog().files().iter().map(|file| file.source.as_path()).collect();
        assert_eq!(found, paths.iter().collect::<Vec<_>>());
        assert_is_gguf(&checkpoint.load(&LoadOptions::default()).unwrap(), &tensors);
        let keys = checkpoint.catalog().key_values();
        let number: Vec<_> = keys.iter().filter(|(key, ..)| *key == "split.no").collect();
        assert!(matches!(number.as_slice(), [(_, Value::U16(0), _)]), "{number:?}");
        let list = checkpoint.metadata_array(keys[0].2, "list").unwrap();
        assert_eq!(list, Some(ArrayValues::String(vec!["a".into(), "b".into()])));
        assert_eq!(checkpoint.metadata_array(keys[0].2, "general.name").unwrap(), None);
    }
}

#[test]
fn a_split_model_that_does_not_add_up_is_refused() {
    let open = |change: &dyn Fn(u16, &mut Keys)| {
        let directory = tempfile::tempdir().unwrap();
        let (paths, _) = split_model(directory.path(), 3, change);
        let (path, problem) = gguf_problem(Catalog::open(&[&paths[0]]));
        (paths.iter().position(|shard| *shard == path).unwrap(), problem)
    };
    let set = |number: u16, key: &'static str, value: Item| {
        move |shard: u16, keys: &mut Keys| {
            if shard == number {
                keys.iter_mut()
                    .filter(|(name, _)| name == key.as_bytes())
                    .for_each(|entry| entry.1 = value.clone());
            }
        }
    };
    let (at, problem) = open(&set(1, "split.no", Item::U16(2)));
    assert!(
        at == 1 && matches!(problem, GgufError::Split { key: "split.no", expected: 1, .. }),
        "{problem:?}"
    );
    let (at, problem) = open(&set(2, "split.count", Item::U16(4)));
    assert!(
        at == 2 && matches!(problem, GgufError::Split { key: "split.count", expected: 3, .. }),
        "{problem:?}"
    );
    let (at, problem) = open(&set(0, "split.tensors.count", Item::I32(7)));
    assert!(
        at == 0 && matches!(problem, GgufError::SplitTensors { promised: 7, found: 6, .. }),
        "{problem:?}"
    );
    let (at, problem) = open(&|number, keys: &mut Keys| {
        if number == 1 {
            keys.clear();
        }
    });
    assert!(at == 1 && matches!(problem, GgufError::Split { key: "split.count", .. }), "{problem:?}");

    let directory = tempfile::tempdir().unwrap();
    let (paths, _) = split_model(directory.path(), 3, |_, _| {});
    fs::remove_file(&paths[1]).unwrap();
    match Catalog::open(&[&paths[2]]) {
        Err(Error::NotFound { path, reason }) => {
            assert_eq!(path, paths[1]);
            assert!(reason.contains("model-00003-of-00003.gguf"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    let renamed = directory.path().join("renamed.gguf");
    fs::rename(&paths[2], &renamed).unwrap();
    let (at, problem) = gguf_problem(Catalog::open(&[&renamed]));
    assert!(at == renamed && problem.to_string().contains("-00003-of-00003.gguf"), "{problem}");
    fs::copy(&paths[0], &paths[1]).unwrap();
    fs::copy(&paths[0], &paths[2]).unwrap();
    let (at, _) = gguf_problem(Catalog::open(&[&paths[0]]));
    assert_eq!(at, paths[1]);
}

#[test]
fn tensors_in_two_files_of_a_split_model_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (paths, _) = split_model(directory.path(), 2, |_, _| {});
    let mut writer = Writer::default().key("split.no", Item::U16(1)).key("split.count", Item::U16(2));
    writer.tensors = vec![gguf_tensor("blk.0.0", F32, &[1]).1, gguf_tensor("b", F32, &[1]).1];
    fs::write(&paths[1], writer.finish()).unwrap();
    let found = Catalog::open(&[&paths[0]]).unwrap_err();
    assert!(matches!(&found, Error::DuplicateTensor { tensor, .. } if tensor == "blk.0.0"), "{found:?}");
}

#[test]
fn a_directory_is_its_one_model() {
    let directory = tempfile::tempdir().unwrap();
    let first = directory.path().join("a.gguf");
    let tensors = write_gguf(&first, &[("a", F32, &[3])]);
    assert_is_gguf(&load(directory.path()).unwrap(), &tensors);
    fs::write(directory.path().join("._a.gguf"), b"\0\x05\x16\x07").unwrap();
    assert_is_gguf(&load(directory.path()).unwrap(), &tensors);
    write_gguf(&directory.path().join("b.gguf"), &[("b", F32, &[3])]);
    match load(directory.path()) {
        Err(Error::NotFound { reason, .. }) => assert!(reason.contains("a.gguf, b.gguf"), "{reason}"),
        other => panic!("{other:?}"),
    }
    // Safetensors come first, as they always did.
    write_model(&directory.path().join("c.safetensors"), &[tensor("c", Dtype::U8, &[1])], 0, 1);
    assert_eq!(load(directory.path()).unwrap().tensors()[0].name(), "c");
}

#[test]
fn long_names_are_taken_and_noted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("sd.gguf");
    let long = "conditioner.embedders.0.transformer.text_model.encoder.layers.0.layer_norm1.weight";
    let tensors = write_gguf(&path, &[("short", F32, &[3]), (long, F32, &[3])]);
    assert_is_gguf(&load(&path).unwrap(), &tensors);
    let catalog = Catalog::open(&[&path]).unwrap();
    let [note] = catalog.notes() else { panic!("{:?}", catalog.notes()) };
    assert!(note.contains("63 bytes") && note.contains("1 tensor of"), "{note}");
}

#[test]
fn slices_of_quantised_tensors_are_whole_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let file = write_gguf(&path, &[("experts", Q4_0, &[8, 10, 96])]);
    let row = 96 / 32 * 18;
    let slice = |ranges: Vec<_>| {
        let selection = Selection::all().slice("experts", TensorSlice::new(ranges));
        let options = all_devices().map(|device| LoadOptions::default().device(device));
        let loaded = options.map(|options| hoistway::load(&[&path], &options.selection(selection.clone())));
        loaded.collect::<Vec<_>>()
    };
    for loaded in slice(vec![3..4]) {
        let loaded = loaded.unwrap();
        let expert = &loaded.tensors()[0];
        assert_eq!(expert.shape(), [1, 10, 96]);
        assert!(*expert.bytes().unwrap() == file[0].bytes[3 * 10 * row..4 * 10 * row]);
    }
    for loaded in slice(vec![0..8, 2..4, 32..64]) {
        let loaded = loaded.unwrap();
        let bytes: Vec<u8> = (0..8)
            .flat_map(|expert| (2..4).map(move |line| (expert * 10 + line) * row + 18))
            .flat_map(|start| file[0].bytes[start..start + 18].to_vec())
            .collect();
        assert_eq!(loaded.tensors()[0].shape(), [8, 2, 32]);
        assert!(*loaded.tensors()[0].bytes().unwrap() == *bytes);
    }
    for loaded in slice(vec![0..8, 0..10, 16..64]) {
        let partial = SliceError::PartialBlock { block_len: 32 };
        assert!(
            matches!(&loaded, Err(Error::Plan(PlanError::Slice { problem, .. })) if *problem == partial),
            "{loaded:?}"
        );
    }
}

#[test]
fn conversions_leave_quantised_tensors_as_they_are() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let file = write_gguf(&path, &[("norm", F32, &[64]), ("weight", Q8_0, &[64, 64])]);
    let [_, device] = devices();
    let options = LoadOptions::default().device(device).dtype(Dtype::Bf16);
    let loaded = hoistway::load(&[&path], &options).unwrap();
    assert_eq!(loaded.get("norm").unwrap().dtype(), Dtype::Bf16);
    let weight = loaded.get("weight").unwrap();
    assert_eq!(weight.dtype(), Dtype::Quantized(GgmlType::Q8_0));
    assert!(*weight.bytes().unwrap() == *file[1].bytes);
}

#[test]
fn what_has_no_meaning_in_memory_is_listed_but_not_loaded() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let bytes = |name| gguf_tensor(name, I8, &[40]).0.bytes;
    let unknown =
        Writer::default().tensor("new", &[9], UNKNOWN, bytes("new")).tensor("a", &[40], I8, bytes("a"));
    let unknown = unknown.tensor("newer", &[9], UNKNOWN + 1, bytes("newer"));
    fs::write(&path, unknown.finish()).unwrap();
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    assert_eq!(checkpoint.catalog().tensors()[0].dtype, Dtype::UnknownGgml(UNKNOWN));
    for route in [Route::Auto, Route::Mapped] {
        let found = checkpoint.load(&LoadOptions::default().route(route)).unwrap_err();
        assert!(
            matches!(&found, Error::Plan(PlanError::UnknownType { id: UNKNOWN, count: 2, .. })),
            "{found:?}"
        );
        let told = found.to_string();
        assert!(told.contains("2 tensors") && told.contains(&path.display().to_string()), "{told}");
    }
    let known = LoadOptions::default().selection(Selection::all().exclude("new*"));
    assert!(*checkpoint.load(&known).unwrap().get("a").unwrap().bytes().unwrap() == *bytes("a"));

    let big = Writer { big_endian: true, ..Writer::default() }.key("name", "big");
    let big = big.tensor("wide", &[2], F32, vec![0; 8]).tensor("long", &[1], F32, vec![0; 4]).tensor(
        "a",
        &[40],
        I8,
        bytes("a"),
    );
    // Windows lets no writer in while it is open.
    drop(checkpoint);
    fs::write(&path, big.finish()).unwrap();
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    assert_eq!(checkpoint.catalog().key_values()[0].1.as_str(), Some("big"));
    let found = checkpoint.load(&LoadOptions::default()).unwrap_err();
    assert!(
        matches!(&found, Error::Plan(PlanError::ByteOrder { tensor, count: 2, .. }) if tensor == "wide"),
        "{found:?}"
    );
    // Ranges of the file too, as C reads them: a byte of `wide`, and the bytes of `a` alone.
    let catalog = checkpoint.catalog();
    let [wide, a] = ["wide", "a"].map(|name| catalog.tensor(catalog.find(name).unwrap()).clone());
    let last = ByteRange::new(wide.bytes.end() - 1, a.bytes.end()).unwrap();
    assert!(matches!(catalog.check_readable_range(wide.file, last), Err(PlanError::ByteOrder { .. })));
    assert_eq!(catalog.check_readable_range(a.file, a.bytes), Ok(()));
    let single = LoadOptions::default().selection(Selection::all().select("a"));
    assert!(*checkpoint.load(&single).unwrap().get("a").unwrap().bytes().unwrap() == *bytes("a"));
}

#[test]
fn a_gguf_inside_another_file_loads_from_its_offset() {
    let directory = tempfile::tempdir().unwrap();
    let (path, tensors) = mixed_gguf(directory.path());
    let embedded = directory.path().join("image.bin");
    fs::write(&embedded, [vec![5; 1003], fs::read(&path).unwrap(), vec![6; 10]].concat()).unwrap();
    let options = OpenOptions::default().offset(1003);
    let checkpoint = Checkpoint::open_with(&[&embedded], &options).unwrap();
    for device in all_devices() {
        let options = LoadOptions::default().device(device);
        assert_is_gguf(&checkpoint.load(&options).unwrap(), &tensors);
    }
    let wrong = OpenOptions::default().offset(1002);
    let (_, problem) = gguf_problem(Catalog::open_with(&[&embedded], &wrong));
    assert!(matches!(problem, GgufError::NoMagic { offset: 1002, .. }), "{problem:?}");
}

#[test]
fn lenient_files_load_whole_from_unaligned_places() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let (first, second) = (gguf_tensor("a", F32, &[1000]).0, gguf_tensor("b", Q8_0, &[9, 64]).0);
    let writer = Writer { alignment: 1, ..Writer::default() };
    let mut writer = writer.key("general.alignment", Item::U32(1));
    writer = writer.tensor("pad", &[3], I8, vec![0; 3]);
    writer.tensors.extend([&first, &second].map(|tensor| {
        gguf_tensor(
            &tensor.name,
            match tensor.dtype {
                Dtype::F32 => F32,
                _ => Q8_0,
            },
            &tensor.shape,
        )
        .1
    }));
    fs::write(&path, writer.finish()).unwrap();
    let (_, problem) = gguf_problem(Catalog::open(&[&path]));
    assert!(matches!(problem, GgufError::Alignment { alignment: 1 }), "{problem:?}");
    let options = OpenOptions::default().lenient(true);
    let checkpoint = Checkpoint::open_with(&[&path], &options).unwrap();
    for device in all_devices() {
        let loaded = checkpoint.load(&LoadOptions::default().device(device)).unwrap();
        for expected in [&first, &second] {
            let tensor = loaded.get(&expected.name).unwrap();
            assert!(*tensor.bytes().unwrap() == *expected.bytes);
            assert_eq!(tensor.address() % expected.dtype.alignment(), 0);
        }
    }
}

#[test]
fn arrays_of_a_file_that_changed_are_errors() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let tokens: Vec<String> = (0..10_000).map(|i| format!("token {i}")).collect();
    let writer = Writer::default().key("tokens", Item::strings(tokens.iter().map(String::as_str)));
    fs::write(&path, writer.finish()).unwrap();
    // Windows lets a writer in beside the first alone, and may have the times of the file late until it is closed.
    let write = || fs::OpenOptions::new().write(true).open(&path).unwrap();
    let writer = write();
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let file = checkpoint.catalog().file_ids().next().unwrap();
    assert_eq!(checkpoint.metadata_array(file, "tokens").unwrap(), Some(ArrayValues::String(tokens)));
    let_file_time_pass(&path);
    write_all_at(&writer, &[0xFF; 64], 200);
    drop(writer);
    let changed = checkpoint.metadata_array(file, "tokens").unwrap_err();
    assert!(matches!(changed, Error::Changed { .. }), "{changed:?}");
    write().set_len(100).unwrap();
    let truncated = checkpoint.metadata_array(file, "tokens").unwrap_err();
    assert!(matches!(truncated, Error::Truncated { .. }), "{truncated:?}");
}

#[test]
fn an_array_belongs_to_its_file_and_keeps_no_other_open() {
    let directory = tempfile::tempdir().unwrap();
    let (paths, _) = split_model(directory.path(), 3, |number, keys| {
        keys.push((b"own".into(), Item::Array(4, vec![Item::U32(number.into())])));
    });
    let checkpoint = Checkpoint::open(&[&paths[0]]).unwrap();
    let ids: Vec<_> = checkpoint.catalog().file_ids().collect();
    let arrays: Vec<_> = ids.iter().map(|&id| checkpoint.array(id, "own").unwrap().unwrap()).collect();
    assert!(checkpoint.array(ids[1], "list").unwrap().is_none());
    let single = directory.path().join("single.gguf");
    write_gguf(&single, &[("a", F32, &[3])]);
    let other = Checkpoint::open(&[&single]).unwrap();
    for found in [other.array(ids[2], "own").map(|_| ()), other.metadata_array(ids[2], "own").map(|_| ())] {
        assert!(matches!(found, Err(Error::InvalidOption { option: "file", .. })), "{found:?}");
    }

    drop(checkpoint);
    for (number, array) in (0..).zip(&arrays) {
        assert_eq!(array.read().unwrap(), ArrayValues::U32(vec![number]));
    }
    let mut arrays = arrays.into_iter();
    let first = arrays.next();
    drop(arrays);
    assert_eq!([0, 1, 2].map(|i| is_open(&paths[i].canonicalize().unwrap())), [true, false, false]);
    drop(first);
    assert!(!is_open(&paths[0].canonicalize().unwrap()));
}

#[test]
fn manifests_and_warming_know_gguf() {
    let directory = tempfile::tempdir().unwrap();
    let (path, tensors) = mixed_gguf(directory.path());
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let manifest = Manifest::of(&checkpoint, |_| std::ops::ControlFlow::Continue(())).unwrap();
    assert_eq!(manifest.tensors.len(), tensors.len());
    let text = serde_json::to_string(&manifest).unwrap();
    assert_eq!(serde_json::from_str::<Manifest>(&text).unwrap(), manifest);
    let mut loaded = checkpoint.load(&LoadOptions::default()).unwrap();
    checkpoint.verify(&mut loaded, Some((Path::new("manifest"), &manifest))).unwrap();
    let warmed = checkpoint.warm(|_| std::ops::ControlFlow::Continue(())).unwrap();
    assert_eq!(warmed.bytes, fs::metadata(&path).unwrap().len());
}

#[test]
fn a_mapped_gguf_is_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let (path, tensors) = mixed_gguf(directory.path());
    let options = LoadOptions::default().route(Route::Mapped);
    assert_is_gguf(&hoistway::load(&[&path], &options).unwrap(), &tensors);
}
