//! `hoistway inspect`.

use crate::{arguments, failure::Failure, key_values, output, tree::Tree};
use bytesize::ByteSize;
use hoistway::{Checkpoint, catalog::FileEntry, counted};
use serde_json::json;
use std::{collections::BTreeMap, fmt::Write};

pub(crate) fn run(arguments: &arguments::Inspect) -> Result<(), Failure> {
    let checkpoint = arguments.paths.open()?;
    if arguments.json {
        output::write_json(&as_json(&checkpoint, arguments.all)?)
    } else {
        output::write_text(&as_text(&checkpoint, arguments.all)?)
    }
}

fn as_json(checkpoint: &Checkpoint, all: bool) -> hoistway::Result<serde_json::Value> {
    let catalog = checkpoint.catalog();
    let describe = |(id, file): (_, &FileEntry)| {
        let mut described = json!({
            "path": file.source.to_string(),
            "bytes": file.len,
            "format": file.format.name(),
            "tensors": file.tensors().len(),
            "metadata": file.metadata(),
        });
        if let Some(header) = file.gguf() {
            described["gguf"] = key_values::as_json(checkpoint, id, header, all)?;
        }
        Ok(described)
    };
    let files =
        catalog.file_ids().zip(catalog.files()).map(describe).collect::<hoistway::Result<Vec<_>>>()?;
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
    Ok(json!({ "files": files, "tensors": tensors, "notes": catalog.notes() }))
}

fn as_text(checkpoint: &Checkpoint, all: bool) -> hoistway::Result<String> {
    let catalog = checkpoint.catalog();
    let mut text = String::new();
    for (id, file) in catalog.file_ids().zip(catalog.files()) {
        let _ = writeln!(
            text,
            "{}  {}, {}",
            file.source,
            ByteSize(file.len),
            counted(file.tensors().len(), "tensor", "tensors")
        );
        for (key, value) in file.metadata().into_iter().flatten() {
            let _ = writeln!(text, "  {}: {}", output::printable(key), output::printable(value));
        }
        if let Some(header) = file.gguf() {
            key_values::write(&mut text, checkpoint, id, header, all)?;
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
        let _ = writeln!(
            text,
            "{dtype:<12} {:>15} {:>10}",
            counted(count, "tensor", "tensors"),
            ByteSize(bytes).to_string()
        );
    }
    for note in catalog.notes() {
        let _ = writeln!(text, "note: {note}");
    }
    Ok(text)
}
