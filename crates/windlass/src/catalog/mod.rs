//! What a checkpoint holds: files, tensors, metadata. Plain data, read once, never believed unchecked.
//!
//! [`Catalog::open`] is the door: paths → files (`discover`), files → headers ([`safetensors`]), headers → one
//! list of tensors with unique names.
#![forbid(unsafe_code)]

mod discover;
pub mod index;
pub mod safetensors;

use crate::{ByteRange, Dtype, Error, Result, parallel};
use discover::FileSet;
use safetensors::{Header, HeaderError, LENGTH_PREFIX_BYTES, Metadata};
use std::{
    collections::HashMap,
    fs::File,
    io,
    ops::Range,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
};

/// Headers that are read at the same time.
const PARALLEL_HEADERS: usize = 16;

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
    pub path: PathBuf,
    /// Its length in bytes.
    pub len: u64,
    /// Its `__metadata__`, if it has one.
    pub metadata: Option<Metadata>,
    tensors: Range<u32>,
}

impl FileEntry {
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
    /// Its bytes in that file.
    pub bytes: ByteRange,
}

/// What tells a file from another of the same name, and from itself before it was rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
    len: u64,
    modified_ns: i128,
}

impl FileIdentity {
    /// The identity of an open file.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn of(file: &File) -> io::Result<Self> {
        let stat = file.metadata()?;
        Ok(Self {
            device: stat.dev(),
            inode: stat.ino(),
            len: stat.len(),
            modified_ns: i128::from(stat.mtime()) * 1_000_000_000 + i128::from(stat.mtime_nsec()),
        })
    }

    /// Length of the file in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file has no byte.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device number that the file lies on.
    pub const fn device(&self) -> u64 {
        self.device
    }

    /// What is different in `now`, in words, or `None` if it is the same file, unchanged.
    pub fn change(&self, now: &Self) -> Option<String> {
        if (self.device, self.inode) != (now.device, now.inode) {
            Some("another file has taken its name".into())
        } else if self.len != now.len {
            Some(format!("it had {} bytes and now has {}", self.len, now.len))
        } else if self.modified_ns != now.modified_ns {
            Some("its modification time moved".into())
        } else {
            None
        }
    }
}

/// A file of a catalog, still open from the reading of its header: nobody can swap it for another.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    pub(crate) identity: FileIdentity,
}

impl Catalog {
    /// Reads the headers behind `paths`: safetensors files, `*.safetensors.index.json` files, directories that
    /// hold either, or glob patterns.
    ///
    /// ```no_run
    /// let catalog = windlass::Catalog::open(&["models/llama"])?;
    /// println!("{} tensors in {} files", catalog.tensors().len(), catalog.files().len());
    /// # Ok::<(), windlass::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::InvalidFile`], [`Error::InvalidIndex`], [`Error::DuplicateTensor`] or
    /// [`Error::Io`].
    pub fn open<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        Self::open_files(paths).map(|(catalog, _)| catalog)
    }

    /// Like [`Catalog::open`], and hands out the open files in the order of [`Catalog::files`].
    pub(crate) fn open_files<P: AsRef<Path>>(paths: &[P]) -> Result<(Self, Vec<OpenFile>)> {
        let mut builder = Builder::default();
        let mut open_files = Vec::new();
        for path in paths {
            let FileSet { files, index } = discover::resolve(path.as_ref())?;
            let first_file = builder.files.len();
            for (open_file, header) in read_headers(&files)? {
                builder.add_file(&open_file.path, open_file.identity.len(), header, index.as_ref())?;
                open_files.push(open_file);
            }
            if let Some((path, index)) = &index {
                builder.check_index(path, index, first_file)?;
            }
        }
        Ok((builder.finish(), open_files))
    }

    /// A catalog of one file whose header was read by other means: `len` is the length of the whole file.
    ///
    /// # Errors
    /// [`Error::InvalidFile`].
    pub fn from_header(path: &Path, len: u64, header: Header) -> Result<Self> {
        let mut builder = Builder::default();
        builder.add_file(path, len, header, None)?;
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

    /// The `__metadata__` of all files; where two files disagree on an entry, the first one's stands.
    ///
    /// `None` if no file has any.
    pub fn metadata(&self) -> Option<Metadata> {
        let mut all = self.files.iter().filter_map(|file| file.metadata.as_ref()).peekable();
        all.peek()?;
        let mut merged = Metadata::new();
        for metadata in all {
            for (key, value) in metadata {
                merged.entry(key.clone()).or_insert_with(|| value.clone());
            }
        }
        Some(merged)
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
            .max_by_key(|name| (common_ends(name, pattern), std::cmp::Reverse(name.len())));
        Error::NoSuchTensor { pattern: pattern.to_owned(), nearest: nearest.map(|name| name.to_string()) }
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

#[derive(Default)]
struct Builder {
    files: Vec<FileEntry>,
    tensors: Vec<TensorEntry>,
    by_name: HashMap<Arc<str>, TensorId>,
    notes: Vec<String>,
}

impl Builder {
    fn add_file(
        &mut self,
        path: &Path,
        len: u64,
        header: Header,
        index: Option<&(PathBuf, index::Index)>,
    ) -> Result<()> {
        let file = file_id(self.files.len());
        let first_tensor = tensor_id(self.tensors.len());
        // Data offsets count from the end of the header; the file ends where the last tensor does.
        let data_len = header.tensors.last().map_or(0, |tensor| tensor.data.end());
        let data_start = len.saturating_sub(data_len);
        let mut unlisted = 0usize;
        self.tensors.reserve(header.tensors.len());
        self.by_name.reserve(header.tensors.len());
        for tensor in header.tensors {
            if let Some((index_path, index)) = index {
                let folder = index_path.parent().unwrap_or(Path::new(""));
                match index.weight_map.get(&tensor.name) {
                    Some(owner) if folder.join(owner) != path => {
                        self.notes.push(format!(
                            "tensor '{}' of {} is left out: the index takes it from '{owner}'",
                            tensor.name,
                            path.display()
                        ));
                        continue;
                    }
                    Some(_) => {}
                    None => unlisted += 1,
                }
            }
            let bytes = data_start
                .checked_add(tensor.data.start())
                .and_then(|start| ByteRange::at(start, tensor.data.len()))
                .ok_or_else(|| Error::Internal(format!("tensor '{}' ends past 2^64", tensor.name)))?;
            let name: Arc<str> = tensor.name.into();
            let id = tensor_id(self.tensors.len());
            if let Some(first) = self.by_name.insert(name.clone(), id) {
                let first = self.tensors[first.index()].file;
                return Err(Error::DuplicateTensor {
                    tensor: name.to_string(),
                    first: self.files[first.index()].path.clone(),
                    second: path.to_owned(),
                });
            }
            let shape = tensor.shape.into();
            self.tensors.push(TensorEntry { name, dtype: tensor.dtype, shape, file, bytes });
        }
        if unlisted > 0 {
            self.notes.push(format!(
                "{unlisted} tensors of {} are not in the index; they are included",
                path.display()
            ));
        }
        if u32::try_from(self.tensors.len()).is_err() || u32::try_from(self.files.len()).is_err() {
            return Err(Error::Internal("more than 2^32 tensors or files in one catalog".into()));
        }
        let tensors = first_tensor.0..tensor_id(self.tensors.len()).0;
        self.files.push(FileEntry { path: path.to_owned(), len, metadata: header.metadata, tensors });
        Ok(())
    }

    /// Each tensor that the index lists must be in the file that it names.
    fn check_index(&self, path: &Path, index: &index::Index, first_file: usize) -> Result<()> {
        for (tensor, file) in &index.weight_map {
            let found = self.by_name.get(tensor.as_str()).map(|id| self.tensors[id.index()].file);
            if found.is_none_or(|found| found.index() < first_file) {
                let problem = index::IndexError::MissingTensor { tensor: tensor.clone(), file: file.clone() };
                return Err(Error::InvalidIndex { path: path.to_owned(), problem });
            }
        }
        Ok(())
    }

    fn finish(self) -> Catalog {
        let Self { files, tensors, by_name, notes } = self;
        Catalog { files, tensors, by_name, notes }
    }
}

/// Opens the files and parses their headers, several at a time, keeping their order.
fn read_headers(paths: &[PathBuf]) -> Result<Vec<(OpenFile, Header)>> {
    parallel::map(paths, PARALLEL_HEADERS, |path| read_header(path)).into_iter().collect()
}

fn read_header(path: &Path) -> Result<(OpenFile, Header)> {
    let io_error = |operation, range| {
        move |source| Error::Io { operation, path: path.to_owned(), tensor: None, range, source }
    };
    // Before it is opened: opening a pipe waits for whoever writes to it.
    let stat = std::fs::metadata(path).map_err(|source| open_error(path, source))?;
    if !stat.is_file() {
        return Err(Error::NotFound { path: path.to_owned(), reason: "not a regular file".into() });
    }
    let file = File::open(path).map_err(|source| open_error(path, source))?;
    let identity = FileIdentity::of(&file).map_err(io_error("stat", None))?;
    let invalid = |problem| Error::InvalidFile { path: path.to_owned(), problem };
    let file_len = identity.len();
    if file_len < LENGTH_PREFIX_BYTES {
        return Err(invalid(HeaderError::TooShort { file_len }));
    }
    let mut prefix = [0; 8];
    read_exactly(&file, path, &mut prefix, 0)?;
    let header_len = safetensors::header_len(prefix, file_len).map_err(invalid)?;
    let mut text =
        vec![0; usize::try_from(header_len).map_err(|_| invalid(HeaderError::TooLarge { header_len }))?];
    read_exactly(&file, path, &mut text, LENGTH_PREFIX_BYTES)?;
    let header = Header::parse(&text, file_len).map_err(invalid)?;
    Ok((OpenFile { path: path.to_owned(), file, identity }, header))
}

fn read_exactly(file: &File, path: &Path, buffer: &mut [u8], offset: u64) -> Result<()> {
    let range = ByteRange::at(offset, buffer.len() as u64);
    file.read_exact_at(buffer, offset).map_err(|source| match range {
        // The length was checked before: the file shrank in between.
        Some(needed) if source.kind() == io::ErrorKind::UnexpectedEof => Error::Truncated {
            path: path.to_owned(),
            tensor: None,
            needed,
            file_len: file.metadata().map_or(0, |stat| stat.len()),
        },
        _ => Error::Io { operation: "read", path: path.to_owned(), tensor: None, range, source },
    })
}

/// The error of a failed `open`.
pub(crate) fn open_error(path: &Path, source: io::Error) -> Error {
    if source.kind() == io::ErrorKind::NotFound {
        return Error::NotFound { path: path.to_owned(), reason: "no such file".into() };
    }
    Error::Io { operation: "open", path: path.to_owned(), tensor: None, range: None, source }
}
