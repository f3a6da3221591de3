//! Tensors to save, and what a directory holds afterwards.

use super::noise;
use hoistway::{
    Dtype, Loaded,
    save::{TensorBytes, TensorData},
};
use std::{collections::BTreeSet, fs, ops::ControlFlow, path::Path};

/// A tensor in memory of the test's.
#[derive(Clone, Debug)]
pub struct Owned {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

/// A tensor of bytes that depend on its name and `seed`.
pub fn owned(name: &str, dtype: Dtype, shape: &[u64], seed: u8) -> Owned {
    let bytes = noise(format!("{seed} {name}").as_bytes(), dtype.size_of(shape).unwrap());
    Owned { name: name.into(), dtype, shape: shape.to_vec(), bytes }
}

/// Every type, sizes from nothing to several extents, at odd offsets.
pub fn mixed() -> Vec<Owned> {
    let mut tensors: Vec<_> =
        Dtype::ALL.iter().map(|&dtype| owned(&format!("small.{dtype}"), dtype, &[3, 8], 1)).collect();
    tensors.push(owned("large", Dtype::Bf16, &[2500, 2048], 2));
    tensors.push(owned("empty", Dtype::F32, &[0, 7], 3));
    tensors.push(owned("odd", Dtype::U8, &[999_983], 4));
    tensors.push(owned("wide", Dtype::F64, &[700_001], 5));
    tensors.push(owned("scalar", Dtype::I64, &[], 6));
    tensors
}

pub fn data(tensors: &[Owned]) -> Vec<TensorData<'_>> {
    tensors
        .iter()
        .map(|tensor| {
            TensorData::new(&tensor.name, tensor.dtype, &tensor.shape, TensorBytes::Host(&tensor.bytes))
        })
        .collect()
}

/// The file that the reference crate makes of them.
pub fn reference(tensors: &[Owned]) -> Vec<u8> {
    let views = tensors.iter().map(|tensor| {
        let dtype = serde_json::from_str(&format!("\"{}\"", tensor.dtype)).unwrap();
        let shape = tensor.shape.iter().map(|&size| size as usize).collect();
        (&tensor.name, safetensors::tensor::TensorView::new(dtype, shape, &tensor.bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

/// Fails unless `loaded` is exactly these tensors.
pub fn assert_is(loaded: &Loaded, tensors: &[Owned]) {
    assert_eq!(loaded.tensors().len(), tensors.len());
    for Owned { name, dtype, shape, bytes } in tensors {
        let tensor = loaded.get(name).unwrap_or_else(|| panic!("{name} is missing"));
        assert_eq!((tensor.dtype(), tensor.shape()), (*dtype, shape.as_slice()), "{name}");
        assert!(*tensor.bytes().unwrap() == **bytes, "{name} has other bytes");
    }
}

/// The names in a directory.
pub fn names(directory: &Path) -> BTreeSet<String> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// A save that is not stopped.
pub fn go_on(_: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}
