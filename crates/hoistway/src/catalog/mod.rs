//! What a checkpoint holds: files, tensors, metadata. Plain data, read once, never believed unchecked.
//!
//! [`Catalog::open`] is the door: paths → files (`discover`), files → headers ([`safetensors`], [`gguf`]) of all
//! files that belong together (`open`), headers → one list of tensors with unique names (`build`).
#![forbid(unsafe_code)]

mod build;
mod discover;
mod format;
pub mod gguf;
pub mod index;
mod open;
mod options;
pub mod safetensors;
pub(crate) mod shard_name;

pub use crate::source::SourceName;
pub use format::{FileFormat, FileHeader, FormatError};
pub use hoistway_io::file::FileIdentity;
pub(crate) use hoistway_io::file::OpenFile;
#[cfg(feature = "objects")]
pub(crate) use open::empty_file;
pub(crate) use open::gguf_error;
pub use open::header_texts;
pub use options::OpenOptions;

use crate::{
    ByteRange, Dtype, Error, Result,
    plan::PlanError,
    source::{Source, registry},
};
use build::Builder;
use discover::FileSet;
use gguf::ByteOrder;
use safetensors::Metadata;
use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    path::Path,
    sync::Arc,
};

/// Position of a file in [`Catalog::files`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(u32);

impl FileId {
    /// As an index into [`Catalog::files`].
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Position of a tensor in [`Catalog::tensors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(u32);

impl TensorId {
    /// As an index into [`Catalog::tensors`].
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The files and tensors of a checkpoint.
#[derive(Clone, Debug)]
pub struct Catalog {
    files: Vec<FileEntry>,
    tensors: Vec<TensorEntry>,
    by_name: HashMap<Arc<str>, TensorId>,
    notes: Vec<String>,
}

/// One file of a checkpoint.
#[derive(Clone, Debug)]
pub struct FileEntry {
    /// Where it was found.
    pub source: SourceName,
    /// Its length in bytes.
    pub len: u64,
    /// Its format, and what it says about itself.
    pub format: FileFormat,
    tensors: Range<u32>,
}

impl FileEntry {
    /// Its `__metadata__`, if it is a safetensors file that has one.
    pub fn metadata(&self) -> Option<&Metadata> {
        match &self.format {
            FileFormat::Safetensors { metadata } => metadata.as_ref(),
            FileFormat::Gguf(_) => None,
        }
    }

    /// What its header says but for the tensors, if it is a GGUF file.
    pub fn gguf(&self) -> Option<&gguf::Header> {
        match &self.format {
            FileFormat::Safetensors { .. } => None,
            FileFormat::Gguf(header) => Some(header),
        }
    }

    /// Its tensors, as positions in [`Catalog::tensors`], in the order of their bytes.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorId> + use<> {
        (self.tensors.start as usize..self.tensors.end as usize).map(tensor_id)
    }
}

/// One tensor of a checkpoint.
#[derive(Clone, Debug)]
pub struct TensorEntry {
    /// Unique in the catalog.
    pub name: Arc<str>,
    /// Type of each element.
    pub dtype: Dtype,
    /// Elements along each dimension, slowest first; empty for a scalar.
    pub shape: Box<[u64]>,
    /// The file that holds it.
    pub file: FileId,
    /// Its bytes in that file. Of [`Dtype::UnknownGgml`] at most these.
    pub bytes: ByteRange,
}

impl Catalog {
    /// Reads the headers behind `paths`: safetensors and GGUF files, `*.safetensors.index.json` files, directories
    /// that hold any of these, or glob patterns. Any one file of a split GGUF model stands for all of them. The format is
    /// what the first bytes say, whatever the name is.
    ///
    /// ```no_run
    /// let catalog = hoistway::Catalog::open(&["models/llama"])?;
    /// println!("{} tensors in {} files", catalog.tensors().len(), catalog.files().len());
    /// # Ok::<(), hoistway::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::InvalidFile`], [`Error::InvalidIndex`], [`Error::DuplicateTensor`] or
    /// [`Error::Io`]; [`Error::InvalidOption`] for a URL whose scheme no source has.
    pub fn open<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        Self::open_with(paths, &OpenOptions::default())
    }

    /// Like [`Catalog::open`], with options.
    ///
    /// # Errors
    /// Those of [`Catalog::open`].
    pub fn open_with<P: AsRef<Path>>(paths: &[P], options: &OpenOptions) -> Result<Self> {
        Self::open_sources(paths, options).map(|(catalog, _)| catalog)
    }

    /// Like [`Catalog::open_with`], and hands out the open sources in the order of [`Catalog::files`].
    pub(crate) fn open_sources<P: AsRef<Path>>(
        paths: &[P],
        options: &OpenOptions,
    ) -> Result<(Self, Vec<Arc<dyn Source>>)> {
        let mut builder = Builder::default();
        let mut sources = Vec::new();
        let (mut split_models, mut opened) = (HashSet::new(), Vec::new());
        let names: Vec<_> = paths.iter().map(AsRef::as_ref).collect();
        for path in registry::pinned(&names, options)? {
            let set = discover::resolve(&path, options)?;
            let first_file = builder.file_count();
            let found = open::read_headers(&set.files, options).map_err(|error| set.explain(error))?;
            let FileSet { index, notes, .. } = set;
            builder.add_notes(notes);
            let first_opened = opened.len();
            opened.extend(found.iter().map(|(source, _)| source.clone()));
            let add = || {
                for (source, header) in open::with_siblings(found, &mut split_models, &mut opened, options)? {
                    builder.add_file(source.path(), source.len(), header, index.as_ref())?;
                    builder.add_notes(source.caveat());
                    sources.push(source);
                }
                match &index {
                    Some((path, index)) => builder.check_index(path.as_path(), index, first_file),
                    None => Ok(()),
                }
            };
            add().inspect_err(|error| {
                open::distrust_headers(&opened[first_opened..], index.is_some(), error);
            })?;
        }
        Ok((builder.finish(), sources))
    }

    /// A catalog of one open source.
    ///
    /// # Errors
    /// Those of [`Catalog::open`], less those of opening.
    pub(crate) fn of_source(source: &dyn Source, options: &OpenOptions) -> Result<Self> {
        Self::from_header(source.path(), source.len(), open::header_of(source, options)?)
    }

    /// A catalog of one file whose header was read by other means: `len` is the length of the whole file, which is the
    /// one that the header was checked against. A header of one file of a split GGUF model gives a catalog of that file
    /// alone.
    ///
    /// # Errors
    /// [`Error::InvalidFile`] if the file has more tensors than a catalog can hold; [`Error::Internal`] if the header
    /// says that a tensor ends past 2^64, which no parser here lets through.
    pub fn from_header(path: &Path, len: u64, header: impl Into<FileHeader>) -> Result<Self> {
        let mut builder = Builder::default();
        builder.add_file(path, len, header.into(), None)?;
        Ok(builder.finish())
    }

    /// The files, in the order in which they were given or, within a directory or index, in name order.
    pub fn files(&self) -> &[FileEntry] {
        &self.files
    }

    /// The tensors, file by file, in the order of their bytes.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// Every position in [`Catalog::tensors`].
    pub fn ids(&self) -> impl ExactSizeIterator<Item = TensorId> + use<> {
        (0..self.tensors.len()).map(tensor_id)
    }

    /// Every position in [`Catalog::files`].
    pub fn file_ids(&self) -> impl ExactSizeIterator<Item = FileId> + use<> {
        (0..self.files.len()).map(file_id)
    }

    /// The tensor of that name.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        self.by_name.get(name).copied()
    }

    /// The tensor at a position that this catalog gave out.
    pub fn tensor(&self, id: TensorId) -> &TensorEntry {
        &self.tensors[id.index()]
    }

    /// The file at a position that this catalog gave out.
    pub fn file(&self, id: FileId) -> &FileEntry {
        &self.files[id.index()]
    }

    /// Fails for tensors whose bytes do not mean in memory what their type says: those of big-endian files, unless their
    /// elements are single bytes, and those of types that are not known. Whatever hands out bytes of tensors asks this first.
    ///
    /// # Errors
    /// [`PlanError::ByteOrder`], [`PlanError::UnknownType`], with the first such tensor and how many there are.
    pub fn check_readable(&self, tensors: &[TensorId]) -> Result<(), PlanError> {
        let is_unknown = |entry: &&TensorEntry| matches!(entry.dtype, Dtype::UnknownGgml(_));
        let is_reversed = |entry: &&TensorEntry| {
            let is_single_bytes = (entry.dtype.block_len(), entry.dtype.block_bits()) == (1, 8);
            let header = self.file(entry.file).gguf();
            !is_single_bytes && header.is_some_and(|header| header.byte_order == ByteOrder::Big)
        };
        let entries = tensors.iter().map(|id| self.tensor(*id));
        let first = entries.clone().find(|entry| is_unknown(entry) || is_reversed(entry));
        let Some(TensorEntry { name, dtype, file, .. }) = first else { return Ok(()) };
        let tensor = name.to_string();
        Err(match *dtype {
            Dtype::UnknownGgml(id) => PlanError::UnknownType {
                tensor,
                path: self.file(*file).source.as_path().to_owned(),
                id,
                count: entries.filter(is_unknown).count(),
            },
            dtype => PlanError::ByteOrder { tensor, dtype, count: entries.filter(is_reversed).count() },
        })
    }

    /// [`check_readable`](Self::check_readable) for the tensors that have bytes in a range of a file.
    ///
    /// # Errors
    /// Those of [`check_readable`](Self::check_readable).
    #[doc(hidden)]
    pub fn check_readable_range(&self, file: FileId, range: ByteRange) -> Result<(), PlanError> {
        let Range { start, end } = self.file(file).tensors;
        // In the order of their bytes.
        let tensors = &self.tensors[start as usize..end as usize];
        let first = tensors.partition_point(|entry| entry.bytes.end() <= range.start());
        let count = tensors[first..].partition_point(|entry| entry.bytes.start() < range.end());
        let first = start as usize + first;
        self.check_readable(&(first..first + count).map(tensor_id).collect::<Vec<_>>())
    }

    /// The `__metadata__` of all files; where two files disagree on an entry, the first one's stands.
    ///
    /// `None` if no file has any. GGUF files have [`key_values`](Self::key_values) instead.
    pub fn metadata(&self) -> Option<Metadata> {
        let mut all = self.files.iter().filter_map(FileEntry::metadata).peekable();
        all.peek()?;
        let mut merged = Metadata::new();
        for metadata in all {
            for (key, value) in metadata {
                merged.entry(key.clone()).or_insert_with(|| value.clone());
            }
        }
        Some(merged)
    }

    /// The keys and values of all GGUF files, with the file that each is from, in order; where two files have the same
    /// key, the first one's value stands.
    pub fn key_values(&self) -> Vec<(&str, &gguf::Value, FileId)> {
        let mut keys = HashSet::new();
        let of_file = |(id, file)| FileEntry::gguf(file).map(|header| (id, header));
        self.file_ids()
            .zip(&self.files)
            .filter_map(of_file)
            .flat_map(|(id, header)| header.metadata.iter().map(move |(key, value)| (key, value, id)))
            .filter(|(key, ..)| keys.insert(*key))
            .collect()
    }

    /// What a reader of the checkpoint should know, such as tensors that its index leaves out.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The error for a name that is not here, with the most similar name that is.
    pub fn no_such_tensor(&self, pattern: &str) -> Error {
        let nearest = self
            .tensors
            .iter()
            .map(|tensor| &tensor.name)
            .filter(|name| name.contains(pattern) || common_ends(name, pattern) * 2 > pattern.len())
            .max_by_key(|name| (common_ends(name, pattern), std::cmp::Reverse(name.len())))
            .or_else(|| self.misspelt(pattern));
        Error::NoSuchTensor { pattern: pattern.to_owned(), nearest: nearest.map(|name| name.to_string()) }
    }

    /// The name that is meant by one with a typo: a letter too many, too few, wrong, or in its neighbour's place. Of a glob
    /// pattern, what is before its first wildcard counts.
    fn misspelt<'a>(&'a self, pattern: &str) -> Option<&'a Arc<str>> {
        let literal = pattern.split(['*', '?', '[']).next().unwrap_or_default();
        let most_edits = if literal.len() < SHORT_NAME { 1 } else { 2 };
        if literal.len() <= most_edits || literal.len() > LONGEST_TYPO {
            return None;
        }
        let compared = |name: &'a Arc<str>| match literal.len() == pattern.len() {
            true => (name.len().abs_diff(literal.len()) <= most_edits).then_some(&**name),
            false => name.get(..literal.len()),
        };
        let letters = Letters::of(literal);
        // An edit takes one character, of up to four bytes.
        let most_lacking = if literal.is_ascii() { most_edits } else { 4 * most_edits };
        self.tensors
            .iter()
            .filter_map(|tensor| Some((compared(&tensor.name)?, &tensor.name)))
            .filter(|(part, _)| letters.lacking_in(part) <= most_lacking)
            .take(MOST_COMPARED)
            .map(|(part, name)| (strsim::osa_distance(literal, part), name))
            .filter(|(edits, _)| *edits <= most_edits)
            .min_by_key(|(edits, name)| (*edits, name.len()))
            .map(|(_, name)| name)
    }
}

/// A shorter name differs by one edit at most from the one that it stands for.
const SHORT_NAME: usize = 8;

/// Longer names are compared by their ends only: the number of edits takes the product of both lengths to count.
const LONGEST_TYPO: usize = 128;

/// Names that have nearly the letters of another, and that are compared with it. Programs look up names to learn whether
/// they are there, and a checkpoint may have a hundred thousand.
const MOST_COMPARED: usize = 2048;

/// How often each byte is in a name of at most [`LONGEST_TYPO`] bytes.
struct Letters {
    counts: [u8; 256],
    len: usize,
}

impl Letters {
    fn of(name: &str) -> Self {
        let mut counts = [0_u8; 256];
        for byte in name.bytes() {
            counts[usize::from(byte)] = counts[usize::from(byte)].saturating_add(1);
        }
        Self { counts, len: name.len() }
    }

    /// How many of them another name lacks: at least as many letters are other ones.
    fn lacking_in(&self, other: &str) -> usize {
        let mut counts = self.counts;
        let mut lacking = self.len;
        for byte in other.bytes() {
            let left = &mut counts[usize::from(byte)];
            if *left > 0 {
                *left -= 1;
                lacking -= 1;
            }
        }
        lacking
    }
}

/// Bytes that two names share at their beginning and end.
fn common_ends(a: &str, b: &str) -> usize {
    let equal = |(x, y): &(u8, u8)| x == y;
    let prefix = a.bytes().zip(b.bytes()).take_while(equal).count();
    let suffix = a.bytes().rev().zip(b.bytes().rev()).take_while(equal).count();
    (prefix + suffix).min(a.len().min(b.len()))
}

// Both are in range: `Builder` refuses checkpoints of more than `u32::MAX` tensors or files.
#[allow(clippy::cast_possible_truncation)]
const fn tensor_id(index: usize) -> TensorId {
    TensorId(index as u32)
}

#[allow(clippy::cast_possible_truncation)]
const fn file_id(index: usize) -> FileId {
    FileId(index as u32)
}
