//! Catalogs of experts from headers: no panic, every byte of every tensor in one unit, and layers that hold together.
#![no_main]

use hoistway::{
    Catalog,
    catalog::{OpenOptions, gguf::Gguf, safetensors::Header},
};
use hoistway_experts::{
    Error, ExpertId,
    catalog::{ExpertCatalog, UnitId},
};
use libfuzzer_sys::fuzz_target;
use std::{collections::HashMap, path::Path};

fuzz_target!(|input: (bool, u16, &[u8])| {
    let (is_gguf, data_len, header) = input;
    let path = Path::new("/nonexistent/model");
    let catalog = if is_gguf {
        let file = [header, &vec![0; data_len.into()]].concat();
        let Ok(gguf) = Gguf::parse(&file.as_slice(), &OpenOptions::default()) else { return };
        Catalog::from_header(path, file.len() as u64, gguf)
    } else {
        let len = 8 + header.len() as u64 + u64::from(data_len);
        let Ok(parsed) = Header::parse(header, len) else { return };
        Catalog::from_header(path, len, parsed)
    };
    let catalog = catalog.expect("the catalog is valid");
    let experts = match ExpertCatalog::of_catalog(&catalog, 2) {
        Ok(experts) => experts,
        Err(Error::InvalidExperts { tensor, .. }) => {
            assert!(catalog.find(&tensor).is_some(), "'{tensor}' is no tensor");
            return;
        }
        Err(other) => panic!("{other}"),
    };
    let mut covered: HashMap<&str, u64> = HashMap::new();
    for part in experts.experts().iter().chain(experts.dense()).flat_map(|unit| unit.parts()) {
        assert!(part.tensor_bytes.contains(part.bytes), "a part of '{}' leaves it", part.tensor);
        *covered.entry(&part.tensor).or_default() += part.bytes.len();
    }
    for tensor in catalog.tensors() {
        assert_eq!(covered.get(&*tensor.name).copied(), Some(tensor.bytes.len()), "'{}'", tensor.name);
    }
    for layer in experts.layers() {
        for expert in 0..experts.expert_count(layer) {
            let id = ExpertId { layer, expert };
            let unit = experts.expert(id).expect("the layer has it");
            assert!(unit.id() == UnitId::Expert(id) && unit.bytes() > 0);
        }
    }
    assert!(experts.token_cycle_bytes().expect("the number is given") <= experts.total_expert_bytes());
});
