//! Catalogs of made models, good and bad ones.

use crate::{
    gguf,
    kit::{EXPERTS, LAYERS, Lru, Model, SLICE_BYTES, add, bytes_of, disk, safetensors},
};
use hoistway::{
    ByteRange, Checkpoint, Dtype,
    read::{Reader, ReaderOptions},
};
use hoistway_experts::{
    Error, ExpertId, Result,
    catalog::{ExpertCatalog, Part, Role, UnitId},
    layers::{LayerOptions, LayerStream, numbered_layers},
    rows::Rows,
    store::{Store, StoreOptions},
};
use proptest::prelude::*;
use std::{collections::BTreeMap, fs, path::Path, sync::Arc};

fn of(path: &Path) -> Result<ExpertCatalog> {
    ExpertCatalog::of_checkpoint(&Checkpoint::open(&[path]).unwrap(), None)
}

fn id(layer: u32, expert: u32) -> ExpertId {
    ExpertId { layer, expert }
}

#[test]
fn experts_of_a_gguf_model_are_slices_of_stacked_tensors() {
    let model = Model::new();
    let catalog = &model.catalog;
    assert_eq!(catalog.layers().collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!((catalog.expert_count(1), catalog.expert_count(9)), (EXPERTS, 0));
    assert_eq!(catalog.top_k(), Some(2));
    assert_eq!(catalog.expert_bytes(2), 3 * SLICE_BYTES);
    assert_eq!(catalog.layer_demand_bytes(0), Some(6 * SLICE_BYTES));
    assert_eq!(catalog.token_cycle_bytes(), Some(18 * SLICE_BYTES));
    assert_eq!(catalog.total_expert_bytes(), u64::from(LAYERS * EXPERTS) * 3 * SLICE_BYTES);
    for layer in 0..LAYERS {
        for expert in 0..EXPERTS {
            let unit = catalog.expert(id(layer, expert)).unwrap();
            let roles: Vec<Role> = unit.parts().iter().map(|part| part.role).collect();
            assert_eq!(roles, [Role::Gate, Role::Up, Role::Down]);
            for part in unit.parts() {
                assert_eq!(
                    (part.dtype, &*part.shape, &*part.component),
                    (Dtype::F16, [37, 96].as_slice(), "weight")
                );
                let start = part.tensor_bytes.start() + u64::from(expert) * SLICE_BYTES;
                assert_eq!(Some(part.bytes), ByteRange::at(start, SLICE_BYTES));
            }
        }
    }
    // Biases stay resident.
    let resident: Vec<&str> = catalog.resident().map(|unit| &*unit.parts()[0].tensor).collect();
    assert_eq!(
        resident,
        ["blk.0.ffn_gate_exps.bias", "blk.1.ffn_gate_exps.bias", "blk.2.ffn_gate_exps.bias"]
    );
    assert_eq!(catalog.dense().len(), 1 + 2 * LAYERS as usize);
}

/// Whether an operation refuses tensors that are big-endian or of an unknown type.
fn is_refused<T: std::fmt::Debug>(found: Result<T>) -> bool {
    use hoistway::{Error::Plan, plan::PlanError};
    matches!(&found, Err(Error::Engine(Plan(PlanError::ByteOrder { .. } | PlanError::UnknownType { .. }))))
}

#[test]
fn what_has_no_meaning_in_memory_is_refused_by_all_that_reads_tensors() {
    const I8: u32 = 24;
    let directory = disk();
    let reader = Arc::new(Reader::new(&ReaderOptions::default()).unwrap());
    let model = |name: &str, big_endian: bool, type_id: u32| {
        let mut writer = gguf::Writer { big_endian, ..gguf::Writer::default() };
        for role in ["gate", "up", "down"] {
            add(&mut writer, &format!("blk.0.ffn_{role}_exps.weight"), I8, &[2, 64, 96]);
        }
        writer = writer.tensor("blk.0.attn_q.weight", &[8], type_id, vec![7; 32]);
        add(&mut writer, "blk.0.bytes", I8, &[32]);
        let path = directory.path().join(name);
        fs::write(&path, writer.finish()).unwrap();
        Checkpoint::open(&[&path]).unwrap()
    };
    for checkpoint in [model("big.gguf", true, 0), model("unknown.gguf", false, 97)] {
        assert!(is_refused(Rows::of_tensor(&reader, &checkpoint, "blk.0.attn_q.weight")));
        let rows = Rows::of_tensor(&reader, &checkpoint, "blk.0.bytes").unwrap();
        assert_eq!(rows.gather(&[0]).unwrap().row(0), Some(&bytes_of("blk.0.bytes", 32)[..1]));
        let layers = numbered_layers(checkpoint.catalog());
        assert!(is_refused(LayerStream::new(&checkpoint, &reader, &layers, &LayerOptions::default())));
        // Experts of single bytes are as they are in memory, and so is what lies beside the tensor that is refused.
        let catalog = Arc::new(ExpertCatalog::of_checkpoint(&checkpoint, Some(1)).unwrap());
        let files = ExpertCatalog::open_files(&checkpoint);
        let options = StoreOptions::default().budget_bytes(1 << 20);
        let store = Store::open(catalog, files, Box::new(Lru::default()), &options).unwrap();
        assert!(is_refused(store.ensure_tensors(&["blk.0.attn_q.weight"])));
        // What reads nothing needs no meaning.
        assert!(!store.is_tensor_resident("blk.0.attn_q.weight").unwrap());
        assert_eq!(store.evict_tensors(&["blk.0.attn_q.weight"]).unwrap(), 0);
        assert!(is_refused(store.ensure_tensors_async(&["blk.0.bytes", "blk.0.attn_q.weight"])));
        let lease = store.ensure_tensors(&["blk.0.bytes"]).unwrap();
        let found = lease.units().next().unwrap().parts().next().unwrap().bytes().unwrap().to_vec();
        assert_eq!(found, bytes_of("blk.0.bytes", 32));
        assert!(store.ensure(0, &[1]).is_ok());
    }
    // Experts themselves.
    for (big_endian, type_id) in [(true, 1), (false, 97)] {
        let mut writer = gguf::Writer { big_endian, ..gguf::Writer::default() };
        for role in ["gate", "up", "down"] {
            let name = format!("blk.0.ffn_{role}_exps.weight");
            writer = writer.tensor(&name, &[96, 64, 2], type_id, bytes_of(&name, 2 * 96 * 64 * 2));
        }
        let path = directory.path().join("experts.gguf");
        fs::write(&path, writer.finish()).unwrap();
        assert!(is_refused(of(&path)), "{big_endian} {type_id}");
    }
}

#[test]
fn what_is_not_there_is_an_error_that_says_what_is() {
    let model = Model::new();
    let missing = |id| model.catalog.expert(id).map(|_| ()).unwrap_err().to_string();
    assert_eq!(missing(id(7, 0)), "layer 7 has no experts; layers between 0 and 2 have");
    assert_eq!(missing(id(1, 8)), "layer 1 has 8 experts, counted from 0: there is no expert 8");
}

#[test]
fn fused_and_single_tensors_of_gguf_are_found() {
    let directory = disk();
    let mut writer = gguf::Writer::default();
    add(&mut writer, "blk.4.ffn_gate_up_exps.weight", 8, &[4, 64, 32]);
    add(&mut writer, "blk.4.ffn_down_exps.weight", 8, &[4, 32, 64]);
    add(&mut writer, "blk.4.ffn_down_exps.scale", 0, &[4]);
    for expert in 0..2 {
        for role in ["gate", "up", "down"] {
            add(&mut writer, &format!("blk.5.ffn_{role}.{expert}.weight"), 0, &[8, 8]);
        }
    }
    let path = directory.path().join("model.gguf");
    fs::write(&path, writer.finish()).unwrap();
    let catalog = of(&path).unwrap();
    assert_eq!((catalog.expert_count(4), catalog.expert_count(5), catalog.top_k()), (4, 2, None));
    assert_eq!(catalog.token_cycle_bytes(), None);
    let fused = catalog.expert(id(4, 3)).unwrap();
    assert_eq!(fused.parts().iter().map(|part| part.role).collect::<Vec<_>>(), [Role::GateUp, Role::Down]);
    assert_eq!(fused.bytes(), 64 * 34 + 64 * 34);
    let single = catalog.expert(id(5, 1)).unwrap();
    assert!(single.parts().iter().all(|part| part.bytes == part.tensor_bytes && part.bytes.len() == 256));
    assert_eq!(catalog.resident().len(), 1);
}

#[test]
fn tensors_of_single_experts_in_safetensors_are_parts() {
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    let names: Vec<String> = (0..3)
        .flat_map(|expert| {
            let prefix = format!("model.layers.2.mlp.experts.{expert}");
            [
                "gate_proj.weight",
                "up_proj.weight",
                "down_proj.weight",
                "down_proj.weight_scale",
                "up_proj.input_scale",
            ]
            .map(|rest| format!("{prefix}.{rest}"))
        })
        .collect();
    let mut tensors: Vec<(&str, Dtype, &[u64])> = Vec::new();
    for name in &names {
        tensors.push(match name {
            name if name.ends_with("weight_scale") => (name, Dtype::F32, &[32, 64]),
            name if name.ends_with("input_scale") => (name, Dtype::F32, &[]),
            name => (name, Dtype::F8E4M3, &[64, 64]),
        });
    }
    tensors.push(("model.layers.2.mlp.shared_experts.gate_proj.weight", Dtype::Bf16, &[8, 8]));
    safetensors(&path, &tensors);
    fs::write(directory.path().join("config.json"), r#"{"text_config":{"num_experts_per_tok":2}}"#).unwrap();
    let catalog = of(&path).unwrap();
    assert_eq!((catalog.expert_count(2), catalog.top_k()), (3, Some(2)));
    let parts = catalog.expert(id(2, 1)).unwrap().parts();
    let found: Vec<(Role, &str)> = parts.iter().map(|part| (part.role, &*part.component)).collect();
    // Scales of whole blocks are read with their expert, scalars stay.
    assert_eq!(
        found,
        [(Role::Gate, "weight"), (Role::Up, "weight"), (Role::Down, "weight"), (Role::Down, "weight_scale")]
    );
    assert_eq!((catalog.resident().len(), catalog.dense().len()), (3, 4));
    assert_eq!(catalog.expert_bytes(2), 3 * 4096 + 8192);
}

#[test]
fn stacked_mxfp4_is_blocks_and_scales() {
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    let name = |rest: &str| format!("model.layers.0.mlp.experts.{rest}");
    let names = [
        name("gate_up_proj_blocks"),
        name("gate_up_proj_scales"),
        name("gate_up_proj_bias"),
        name("down_proj_blocks"),
        name("down_proj_scales"),
    ];
    safetensors(
        &path,
        &[
            (&names[0], Dtype::U8, &[4, 64, 2, 16]),
            (&names[1], Dtype::U8, &[4, 64, 2]),
            (&names[2], Dtype::Bf16, &[4, 64]),
            (&names[3], Dtype::U8, &[4, 64, 1, 16]),
            (&names[4], Dtype::U8, &[4, 64, 1]),
        ],
    );
    let catalog = of(&path).unwrap();
    let parts = catalog.expert(id(0, 3)).unwrap().parts();
    let found: Vec<(Role, &str, u64)> =
        parts.iter().map(|part| (part.role, &*part.component, part.bytes.len())).collect();
    assert_eq!(
        found,
        [
            (Role::GateUp, "blocks", 2048),
            (Role::GateUp, "scales", 128),
            (Role::Down, "blocks", 1024),
            (Role::Down, "scales", 64)
        ]
    );
    assert_eq!(catalog.top_k(), None);
    assert_eq!(catalog.resident().len(), 1);
    let error = catalog.expert(id(0, 4)).unwrap_err();
    assert!(matches!(error, Error::NoSuchExpert { experts: 4, .. }), "{error}");
}

#[test]
fn checkpoints_that_contradict_themselves_name_the_tensor() {
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    let name = |expert: u32, role: &str| format!("model.layers.0.mlp.experts.{expert}.{role}_proj.weight");
    type Tensors = Vec<(String, Vec<u64>)>;
    let cases: [(Tensors, &str); 5] = [
        (vec![(name(0, "up"), vec![4, 4]), (name(2, "up"), vec![4, 4])], "expert 1 is missing"),
        (
            vec![(name(0, "up"), vec![4, 4]), (name(1, "up"), vec![4, 4]), (name(1, "down"), vec![4, 4])],
            "belongs to expert 1 of layer 0, which has up weight, down weight, while expert 0 has up weight",
        ),
        (
            vec![(name(0, "up"), vec![4, 4]), ("other.layers.0.mlp.experts.0.w3.weight".into(), vec![4, 4])],
            "are the same part of one expert",
        ),
        (
            vec![("model.layers.0.mlp.experts.gate_up_proj.weight".into(), vec![70_000, 1])],
            "stacks 70000 experts: it can be 1 to 65536",
        ),
        (
            vec![(format!("model.layers.{}.mlp.experts.0.w1.weight", 1u64 << 40), vec![4])],
            "more than there can be",
        ),
    ];
    for (tensors, expected) in cases {
        let tensors: Vec<(&str, Dtype, &[u64])> =
            tensors.iter().map(|(name, shape)| (name.as_str(), Dtype::U8, shape.as_slice())).collect();
        safetensors(&path, &tensors);
        let error = of(&path).unwrap_err();
        assert!(matches!(error, Error::InvalidExperts { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(expected) && text.contains("model.safetensors"), "{text}");
        assert!(tensors.iter().any(|(name, ..)| text.contains(name)), "{text} names no tensor");
    }
}

#[test]
fn a_config_that_is_none_is_an_error_and_not_a_guess() {
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    safetensors(&path, &[("model.layers.0.mlp.experts.0.up_proj.weight", Dtype::U8, &[4, 4])]);
    let config = directory.path().join("config.json");
    for text in ["{", r#"{"num_experts_per_tok": 0}"#, r#"{"num_experts_per_tok": "two"}"#] {
        fs::write(&config, text).unwrap();
        let error = of(&path).unwrap_err();
        assert!(matches!(error, Error::InvalidConfig { .. }), "{text}: {error:?}");
        // What is given needs no file.
        let checkpoint = Checkpoint::open(&[&path]).unwrap();
        assert_eq!(ExpertCatalog::of_checkpoint(&checkpoint, Some(1)).unwrap().top_k(), Some(1));
    }
    fs::File::create(&config).unwrap().set_len((16 << 20) + 1).unwrap();
    let error = of(&path).unwrap_err();
    assert!(
        matches!(error, Error::InvalidConfig { .. }) && error.to_string().contains("at most"),
        "{error:?}"
    );
    fs::write(&config, r#"{"num_experts_per_tok": null}"#).unwrap();
    assert_eq!(of(&path).unwrap().top_k(), None);
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let error = ExpertCatalog::of_checkpoint(&checkpoint, Some(0)).unwrap_err();
    assert!(matches!(error, Error::InvalidOption { option: "top_k", .. }), "{error:?}");
}

fn part(file: usize, start: u64, len: u64) -> Part {
    let bytes = ByteRange::at(start, len).unwrap();
    Part {
        tensor: format!("at {start}").into(),
        file,
        bytes,
        tensor_bytes: bytes,
        dtype: Dtype::U8,
        shape: [len].into(),
        role: Role::Gate,
        component: "weight".into(),
    }
}

#[test]
fn what_is_described_by_hand_is_checked() {
    let with_file = || {
        let mut builder = ExpertCatalog::builder();
        builder.file("experts.bin");
        builder
    };
    let good = with_file()
        .expert(id(3, 0), vec![part(0, 0, 8)])
        .expert(id(3, 1), vec![part(0, 8, 9)])
        .dense(part(0, 17, 4));
    let catalog = good.top_k(1).build().unwrap();
    assert_eq!(catalog.token_cycle_bytes(), Some(9));
    assert_eq!(catalog.dense()[0].id(), UnitId::Dense(0));
    let outside = Part { tensor_bytes: ByteRange::at(0, 4).unwrap(), ..part(0, 0, 8) };
    for builder in [
        with_file().expert(id(0, 1), vec![part(0, 0, 8)]),
        with_file().expert(id(0, 0), vec![]),
        with_file().expert(id(0, 0), vec![part(1, 0, 8)]),
        with_file().expert(id(0, 0), vec![outside]),
        with_file().expert(id(0, 0), vec![part(0, 0, 8)]).expert(id(0, 0), vec![part(0, 8, 8)]),
        with_file().expert(id(1 << 16, 0), vec![part(0, 0, 8)]),
    ] {
        let error = builder.build().unwrap_err();
        assert!(matches!(error, Error::InvalidExpert { .. }), "{error:?}");
    }
    for builder in [with_file().dense(part(1, 0, 4)), with_file().dense(part(0, 0, 4)).dense(part(0, 0, 4))] {
        let error = builder.build().unwrap_err();
        assert!(matches!(error, Error::InvalidOption { option: "dense", .. }), "{error:?}");
    }
}

/// Names that are experts' or nearly so.
fn name() -> impl Strategy<Value = String> {
    let layer = prop_oneof![4 => (0..3u64).prop_map(|n| n.to_string()), 1 => "[0-9a-z]{1,22}"];
    let expert = prop_oneof![3 => (0..3u64).prop_map(|n| format!("{n}.")), 1 => Just(String::new()), 1 => "[0-9.]{0,12}"];
    let role = prop::sample::select(vec![
        "gate_proj",
        "up_proj",
        "down_proj",
        "gate_up_proj",
        "w1",
        "w2",
        "norm",
        "",
    ]);
    let rest = prop::sample::select(vec![
        "",
        ".weight",
        "_blocks",
        "_scales",
        "_bias",
        ".weight_scale",
        ".input_scale",
        ".",
    ]);
    let segment = prop::sample::select(vec![".experts.", ".shared_experts.", ".experts", "."]);
    (layer, segment, expert, role, rest).prop_map(|(layer, segment, expert, role, rest)| {
        format!("model.layers.{layer}.mlp{segment}{expert}{role}{rest}")
    })
}

proptest! {
    #[test]
    fn any_names_and_shapes_give_a_catalog_that_holds_together_or_an_error(
        tensors in prop::collection::btree_map(name(), prop::collection::vec(0..6u64, 0..4), 0..12),
    ) {
        let directory = disk();
        let path = directory.path().join("model.safetensors");
        let given: Vec<(&str, Dtype, &[u64])> =
            tensors.iter().map(|(name, shape)| (name.as_str(), Dtype::U8, shape.as_slice())).collect();
        safetensors(&path, &given);
        let checkpoint = Checkpoint::open(&[&path]).unwrap();
        match ExpertCatalog::of_checkpoint(&checkpoint, Some(2)) {
            Ok(catalog) => {
                // Every byte of every tensor is in one unit.
                let mut covered: BTreeMap<String, u64> = BTreeMap::new();
                for part in catalog.experts().iter().chain(catalog.dense()).flat_map(|unit| unit.parts()) {
                    prop_assert!(part.tensor_bytes.contains(part.bytes));
                    prop_assert_eq!(part.dtype.size_of(&part.shape), Ok(part.bytes.len()));
                    *covered.entry(part.tensor.to_string()).or_default() += part.bytes.len();
                }
                for (name, shape) in &tensors {
                    prop_assert_eq!(covered.get(name).copied(), Some(shape.iter().product::<u64>()), "{}", name);
                }
                for layer in catalog.layers() {
                    for expert in 0..catalog.expert_count(layer) {
                        prop_assert_eq!(catalog.expert(id(layer, expert)).unwrap().id(), UnitId::Expert(id(layer, expert)));
                    }
                }
                prop_assert!(catalog.token_cycle_bytes().unwrap() <= catalog.total_expert_bytes());
            }
            Err(Error::InvalidExperts { tensor, .. }) => prop_assert!(tensors.contains_key(&tensor), "{tensor}"),
            Err(other) => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_short_header_makes_no_more_experts_than_there_can_be() {
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    safetensors(&path, &[("model.layers.0.mlp.experts.gate_up_proj", Dtype::U8, &[65536, 0])]);
    let error = of(&path).unwrap_err();
    assert!(matches!(error, Error::InvalidExperts { .. }), "{error:?}");
    assert!(error.to_string().contains("gives experts no bytes"), "{error}");
    let names: Vec<String> =
        (0..17).map(|layer| format!("model.layers.{layer}.mlp.experts.gate_up_proj")).collect();
    let tensors: Vec<(&str, Dtype, &[u64])> =
        names.iter().map(|name| (name.as_str(), Dtype::U8, [65536, 1].as_slice())).collect();
    safetensors(&path, &tensors);
    let error = of(&path).unwrap_err().to_string();
    assert!(error.contains("makes more than 1048576 parts"), "{error}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_config_that_does_not_open_is_an_error() {
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    safetensors(&path, &[("model.layers.0.mlp.experts.gate_up_proj", Dtype::U8, &[4, 8])]);
    assert_eq!(of(&path).unwrap().top_k(), None);
    // A link to itself.
    std::os::unix::fs::symlink("config.json", directory.path().join("config.json")).unwrap();
    let error = of(&path).unwrap_err();
    assert!(matches!(error, Error::InvalidConfig { .. }), "{error:?}");
}

#[test]
fn parts_that_have_bytes_in_common_are_refused() {
    let with = |second: Part| {
        let mut builder = ExpertCatalog::builder();
        builder.file("f");
        let builder = builder.expert(id(0, 0), vec![part(0, 100, 50)]);
        builder.expert(id(0, 1), vec![second]).build()
    };
    let other = |start, len| Part { tensor: "other".into(), ..part(0, start, len) };
    assert!(with(other(150, 50)).is_ok() && with(other(120, 0)).is_ok());
    let error = with(other(149, 50)).unwrap_err();
    assert!(matches!(error, Error::InvalidExpert { expert: 1, .. }), "{error:?}");
    // The same tensor at another place.
    let error = with(Part { tensor: "at 100".into(), ..part(0, 200, 50) }).unwrap_err();
    assert!(error.to_string().contains("in another part"), "{error}");
    let mut builder = ExpertCatalog::builder();
    builder.file("f");
    let error = builder.dense(part(0, 0, 10)).dense(other(9, 10)).build().unwrap_err();
    assert!(matches!(error, Error::InvalidOption { option: "dense", .. }), "{error:?}");
}
