//! From headers to a catalog: one list of tensors with unique names.
#![forbid(unsafe_code)]

use super::{
    Catalog, FileEntry, FileFormat, FileHeader, SourceName, TensorEntry, TensorId, file_id, format::Located,
    gguf::GGML_NAME_BYTES, index, tensor_id,
};
use crate::{Error, Result, counted};
use std::{collections::HashMap, path::Path, sync::Arc};

/// A catalog to which files are still being added.
#[derive(Default)]
pub(super) struct Builder {
    files: Vec<FileEntry>,
    tensors: Vec<TensorEntry>,
    by_name: HashMap<Arc<str>, TensorId>,
    notes: Vec<String>,
}

impl Builder {
    pub(super) fn file_count(&self) -> usize {
        self.files.len()
    }

    /// Adds what reports of loads say.
    pub(super) fn add_notes(&mut self, notes: impl IntoIterator<Item = String>) {
        self.notes.extend(notes);
    }

    pub(super) fn add_file(
        &mut self,
        path: &Path,
        len: u64,
        header: FileHeader,
        index: Option<&(SourceName, index::Index)>,
    ) -> Result<()> {
        let file = file_id(self.files.len());
        let first_tensor = tensor_id(self.tensors.len());
        let (format, tensors) = header.into_parts()?;
        let mut unlisted = 0usize;
        // Tensors that the index takes from another file: how many, and the first with its file.
        let mut elsewhere: (usize, Option<(String, &str)>) = (0, None);
        self.tensors.reserve(tensors.len());
        self.by_name.reserve(tensors.len());
        for Located { name, dtype, shape, bytes } in tensors {
            if let Some((index_path, index)) = index {
                match index.weight_map.get(&name) {
                    Some(owner) if index_path.beside(owner) != path => {
                        elsewhere.0 += 1;
                        elsewhere.1.get_or_insert((name, owner));
                        continue;
                    }
                    Some(_) => {}
                    None => unlisted += 1,
                }
            }
            let name: Arc<str> = name.into();
            let id = tensor_id(self.tensors.len());
            if let Some(first) = self.by_name.insert(name.clone(), id) {
                let first = self.tensors[first.index()].file;
                return Err(Error::DuplicateTensor {
                    tensor: name.to_string(),
                    first: self.files[first.index()].source.as_path().to_owned(),
                    second: path.to_owned(),
                });
            }
            self.tensors.push(TensorEntry { name, dtype, shape: shape.into(), file, bytes });
        }
        let added = &self.tensors[first_tensor.index()..];
        let long = added.iter().filter(|tensor| tensor.name.len() > GGML_NAME_BYTES).count();
        if long > 0 && matches!(format, FileFormat::Gguf(_)) {
            self.notes.push(format!(
                "names of more than {GGML_NAME_BYTES} bytes, which llama.cpp refuses and stable-diffusion.cpp writes: {} of {}",
                counted(long, "tensor", "tensors"),
                path.display()
            ));
        }
        if let (count, Some((name, owner))) = elsewhere {
            self.notes.push(format!(
                "left out, as the index takes them from other files: {} of {}, the first is '{name}', which is in '{owner}'",
                counted(count, "tensor", "tensors"),
                path.display()
            ));
        }
        if unlisted > 0 {
            self.notes.push(format!(
                "included, though not in the index: {} of {}",
                counted(unlisted, "tensor", "tensors"),
                path.display()
            ));
        }
        if u32::try_from(self.tensors.len()).is_err() || u32::try_from(self.files.len()).is_err() {
            return Err(Error::Internal("more than 2^32 tensors or files in one catalog".into()));
        }
        let tensors = first_tensor.0..tensor_id(self.tensors.len()).0;
        self.files.push(FileEntry { source: path.into(), len, format, tensors });
        Ok(())
    }

    /// Each tensor that the index lists must be in the file that it names.
    pub(super) fn check_index(&self, path: &Path, index: &index::Index, first_file: usize) -> Result<()> {
        let is_missing = |tensor: &str| {
            let found = self.by_name.get(tensor).map(|id| self.tensors[id.index()].file);
            found.is_none_or(|found| found.index() < first_file)
        };
        match index.weight_map.iter().filter(|(tensor, _)| is_missing(tensor)).min() {
            None => Ok(()),
            Some((tensor, file)) => {
                let problem = index::IndexError::MissingTensor { tensor: tensor.clone(), file: file.clone() };
                Err(Error::InvalidIndex { path: path.to_owned(), problem })
            }
        }
    }

    pub(super) fn finish(self) -> Catalog {
        let Self { files, tensors, by_name, notes } = self;
        Catalog { files, tensors, by_name, notes }
    }
}
