//! `windlass inspect`.

use crate::{arguments, failure::Failure, output, tree::Tree};
use bytesize::ByteSize;
use serde_json::json;
use std::{collections::BTreeMap, fmt::Write};
use windlass::Catalog;

pub(crate) fn run(arguments: &arguments::Inspect) -> Result<(), Failure> {
    let catalog = Catalog::open(&arguments.paths.paths)?;
    if arguments.json {
        output::write_json(&as_json(&catalog))
    } else {
        output::write_text(&as_text(&catalog, arguments.all))
    }
}

fn as_json(catalog: &Catalog) -> serde_json::Value {
    let files: Vec<_> = catalog
        .files()
        .iter()
        .map(|file| {
            json!({
                "path": file.path.to_string_lossy(),
                "bytes": file.len,
                "tensors": file.tensors().len(),
                "metadata": file.metadata,
            })
        })
        .collect();
    let tensors: Vec<_> = catalog
        .tensors()
        .iter()
        .map(|tensor| {
            json!({
                "name": &*tensor.name,
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "bytes": tensor.bytes.len(),
                "file": tensor.file.index(),
                "file_offset": tensor.bytes.start(),
            })
        })
        .collect();
    json!({ "files": files, "tensors": tensors, "notes": catalog.notes() })
}

fn tensors(count: usize) -> String {
    format!("{count} {}", if count == 1 { "tensor" } else { "tensors" })
}

fn as_text(catalog: &Catalog, all: bool) -> String {
    let mut text = String::new();
    for file in catalog.files() {
        let _ = writeln!(
            text,
            "{}  {}, {}",
            file.path.display(),
            ByteSize(file.len),
            tensors(file.tensors().len())
        );
        for (key, value) in file.metadata.iter().flatten() {
            let _ = writeln!(text, "  {}: {}", output::printable(key), output::printable(value));
        }
    }
    let mut dtypes: BTreeMap<_, (usize, u64)> = BTreeMap::new();
    let mut tree = Tree::default();
    for tensor in catalog.tensors() {
        let total = dtypes.entry(tensor.dtype).or_default();
        total.0 += 1;
        total.1 += tensor.bytes.len();
        tree.insert(tensor);
    }
    let _ = writeln!(text);
    tree.write(&mut text, all);
    let _ = writeln!(text);
    for (dtype, (count, bytes)) in dtypes {
        let _ = writeln!(text, "{dtype:<12} {:>15} {:>10}", tensors(count), ByteSize(bytes).to_string());
    }
    for note in catalog.notes() {
        let _ = writeln!(text, "note: {note}");
    }
    text
}
