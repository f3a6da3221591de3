//! From paths to open sources and their headers, of split models those of every file.
#![forbid(unsafe_code)]

use super::{
    FileHeader, FormatError, OpenOptions,
    format::foreign,
    gguf::{self, Gguf, GgufError, split::Part},
    safetensors::{self, Header, HeaderError, LENGTH_PREFIX_BYTES},
};
use crate::{
    ByteRange, Cancel, Error, Result, memory, parallel,
    source::{Source, SourceName, registry},
};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    path::{Path, PathBuf},
    sync::Arc,
};

/// Headers that are read at the same time.
const PARALLEL_HEADERS: usize = 16;

/// An open source and its header.
type Opened = (Arc<dyn Source>, FileHeader);

/// Opens the files and parses their headers, several at a time, keeping their order.
pub(super) fn read_headers(paths: &[PathBuf], options: &OpenOptions) -> Result<Vec<Opened>> {
    let open = |path: &PathBuf| {
        let source = registry::open(path, options)?;
        let header = header_of(&*source, options).inspect_err(|error| {
            if matches!(error, Error::InvalidFile { .. }) {
                source.header_is_invalid();
            }
        })?;
        source.header_was_read(header.data_start());
        Ok((source, header))
    };
    parallel::try_map(paths, PARALLEL_HEADERS, open)
}

/// The headers of safetensors files as the text that they are, not parsed, and the files' lengths. On up to `threads`
/// threads; answers in the order of the paths.
///
/// # Errors
/// [`Error::NotFound`], [`Error::Io`], [`Error::Changed`], and [`Error::InvalidFile`] if the header's length is impossible
/// or it is no text.
pub fn header_texts(paths: &[PathBuf], threads: usize) -> Result<Vec<(String, u64)>> {
    let read = |path: &PathBuf| {
        let source = registry::open(path, &OpenOptions::default())?;
        let text = unchanged(&*source, safetensors_text(&*source, &Cancel::default()));
        let text = String::from_utf8(text?).map_err(|error| {
            let offset = LENGTH_PREFIX_BYTES + error.utf8_error().valid_up_to() as u64;
            invalid(source.path(), HeaderError::NotUtf8 { offset })
        })?;
        Ok((text, source.len()))
    };
    parallel::try_map(paths, threads, read)
}

/// The files that were `found`, with all others of those that are part of a split model, in order. `split_models` are
/// the first files of those that are complete already: any other file of them is not wanted again. Adds the sources that it opens to
/// `opened`.
pub(super) fn with_siblings(
    found: Vec<Opened>,
    split_models: &mut HashSet<PathBuf>,
    opened: &mut Vec<Arc<dyn Source>>,
    options: &OpenOptions,
) -> Result<Vec<Opened>> {
    let mut complete = Vec::with_capacity(found.len());
    let mut waiting = VecDeque::from(found);
    while let Some((file, header)) = waiting.pop_front() {
        let Some(gguf) = header.gguf() else {
            complete.push((file, header));
            continue;
        };
        let Some(part) = Part::of(&gguf.header) else {
            Part::check_whole(&gguf.header, gguf.tensors.len() as u64)
                .map_err(|problem| invalid(file.path(), problem))?;
            complete.push((file, header));
            continue;
        };
        let siblings = part.siblings(file.path()).map_err(|problem| invalid(file.path(), problem))?;
        if siblings.first().is_some_and(|first| !split_models.insert(first.clone())) {
            continue;
        }
        let names: HashSet<&Path> = siblings.iter().map(PathBuf::as_path).collect();
        let (together, others): (Vec<_>, Vec<_>) =
            waiting.into_iter().partition(|(other, _)| names.contains(other.path()));
        waiting = others.into();
        let path = file.path().to_owned();
        let mut model: HashMap<PathBuf, _> = [(file, header)]
            .into_iter()
            .chain(together)
            .map(|(file, header)| (file.path().to_owned(), (file, header)))
            .collect();
        let missing: Vec<_> =
            siblings.iter().filter(|sibling| !model.contains_key(*sibling)).cloned().collect();
        for (file, header) in read_siblings(&missing, &path, options)? {
            opened.push(file.clone());
            model.insert(file.path().to_owned(), (file, header));
        }
        let in_order = siblings.iter().filter_map(|sibling| model.remove(sibling)).collect();
        if let Some(left_over) = model.keys().next() {
            let path = left_over.display();
            return Err(Error::Internal(format!("{path} is not among the files of its own model")));
        }
        complete.extend(checked_model(part, in_order, &options.cancel_token())?);
    }
    Ok(complete)
}

/// Has the next opening take the headers of a set from their stores which the node's cache gave, if an error says that they do not
/// match each other or their index: the cache may hold what came with a flipped bit, and no load would compare it.
pub(super) fn distrust_headers(set: &[Arc<dyn Source>], has_index: bool, error: &Error) {
    let is_of_headers = match error {
        Error::InvalidFile { .. } | Error::InvalidIndex { .. } | Error::NotFound { .. } => true,
        // Without an index, or of two sets, the choice of files is as likely.
        Error::DuplicateTensor { first, .. } => {
            has_index && set.iter().any(|source| Path::new(source.path()) == first)
        }
        _ => false,
    };
    if is_of_headers {
        set.iter().for_each(|source| source.header_is_invalid());
    }
}

fn read_siblings(missing: &[PathBuf], of: &Path, options: &OpenOptions) -> Result<Vec<Opened>> {
    read_headers(missing, options).map_err(|error| match error {
        Error::NotFound { path, reason } => {
            let reason = format!("{reason}; {} is part of the same split model", of.display());
            Error::NotFound { path, reason }
        }
        other => other,
    })
}

/// All files of a split model, in order, if each of them says so.
fn checked_model(part: Part, model: Vec<Opened>, cancel: &Cancel) -> Result<Vec<Opened>> {
    let mut tensors = 0;
    for (number, (file, header)) in (0..).zip(&model) {
        let Some(gguf) = header.gguf() else {
            return Err(gguf_error(&**file, gguf::no_magic(&file.until(cancel), 0), cancel));
        };
        part.check_member(&gguf.header, number).map_err(|problem| invalid(file.path(), problem))?;
        tensors += gguf.tensors.len() as u64;
    }
    if let Some((file, header)) = model.first()
        && let Some(gguf) = header.gguf()
    {
        part.check_tensors(&gguf.header, tensors).map_err(|problem| invalid(file.path(), problem))?;
    }
    Ok(model)
}

/// The header of a source, whose format is what its first bytes say.
///
/// # Errors
/// [`Error::InvalidFile`]; [`Error::Changed`], [`Error::Truncated`], [`Error::Io`].
pub(super) fn header_of(source: &dyn Source, options: &OpenOptions) -> Result<FileHeader> {
    let header = parsed_header(source, options).map_err(|error| match (error, source.as_local()) {
        // A file of the hub's cache: the one of this machine is wrong, and not the one that its name means.
        (Error::InvalidFile { problem, .. }, Some(file)) if is_url(source) => {
            Error::InvalidFile { path: file.absolute_path().to_owned(), problem }
        }
        (error, _) => error,
    });
    unchanged(source, header)
}

fn is_url(source: &dyn Source) -> bool {
    matches!(SourceName::from(source.path()), SourceName::Url(_))
}

/// What was found in a source, unless that has changed: a file that is being written may say anything.
pub(super) fn unchanged<T>(source: &dyn Source, found: Result<T>) -> Result<T> {
    source.check_unchanged(ByteRange::default(), |_| None)?;
    found
}

fn parsed_header(source: &dyn Source, options: &OpenOptions) -> Result<FileHeader> {
    if is_gguf(source, options)? {
        return read_gguf(source, options);
    }
    let is_named_gguf =
        source.path().extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    match read_safetensors(source, options) {
        // It was meant to be a GGUF: that it is none is what is wrong with it.
        Err(Error::InvalidFile { .. }) if is_named_gguf => read_gguf(source, options),
        header => header.map(FileHeader::from),
    }
}

/// What is wrong with a file that has no bytes.
#[cfg(feature = "objects")]
pub(crate) fn empty_file(path: &Path, options: &OpenOptions) -> Error {
    let is_named_gguf = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    match Gguf::parse(&[].as_slice(), options) {
        Err(problem) if is_named_gguf || options.offset > 0 => invalid(path, problem),
        _ => invalid(path, HeaderError::TooShort { file_len: 0 }),
    }
}

fn read_gguf(source: &dyn Source, options: &OpenOptions) -> Result<FileHeader> {
    let cancel = options.cancel_token();
    let parsed = Gguf::parse(&source.until(&cancel), options);
    let parsed = parsed.map_err(|problem| gguf_error(source, problem, &cancel));
    parsed.map(FileHeader::from)
}

/// Whether the first bytes are those of GGUF. Nothing else can be looked for inside a file.
fn is_gguf(source: &dyn Source, options: &OpenOptions) -> Result<bool> {
    let mut magic = [0; gguf::MAGIC.len()];
    if options.offset == 0 && source.len() >= magic.len() as u64 {
        source.read_exactly(&mut magic, 0, None, &options.cancel_token())?;
    }
    Ok(options.offset > 0 || magic == gguf::MAGIC)
}

fn read_safetensors(source: &dyn Source, options: &OpenOptions) -> Result<Header> {
    let text = safetensors_text(source, &options.cancel_token())?;
    Header::parse_with(&text, source.len(), options).map_err(|problem| invalid(source.path(), problem))
}

fn safetensors_text(source: &dyn Source, cancel: &Cancel) -> Result<Vec<u8>> {
    let (path, file_len) = (source.path(), source.len());
    if file_len < LENGTH_PREFIX_BYTES {
        return Err(invalid(path, HeaderError::TooShort { file_len }));
    }
    let mut prefix = [0; 8];
    source.read_exactly(&mut prefix, 0, None, cancel)?;
    let header_len = safetensors::header_len(prefix, file_len).map_err(|problem| {
        // Text and archives look like a header of many exabytes.
        let mut beginning = [0; 32];
        let len = beginning.len().min(file_len as usize);
        let what = source
            .read_exactly(&mut beginning[..len], 0, None, cancel)
            .ok()
            .and_then(|()| foreign(&beginning));
        match what {
            Some(what) => invalid(path, FormatError::Foreign { what }),
            None => invalid(path, problem),
        }
    })?;
    let mut text = memory::zeroed(header_len, "memory for a header")?;
    source.read_exactly(&mut text, LENGTH_PREFIX_BYTES, None, cancel)?;
    Ok(text)
}

fn invalid(path: &Path, problem: impl Into<FormatError>) -> Error {
    Error::InvalidFile { path: path.to_owned(), problem: problem.into() }
}

/// The error of a GGUF file that could not be used.
pub(crate) fn gguf_error(of: &dyn Source, problem: GgufError, cancel: &Cancel) -> Error {
    match problem {
        GgufError::Io { .. } if cancel.is_cancelled() => Error::Cancelled,
        GgufError::Allocation { range, source } => {
            Error::Allocation { bytes: range.len(), kind: "memory for a part of a header", source }
        }
        GgufError::Io { range, source } => of.read_error(range, None, source),
        problem => invalid(of.path(), problem),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs::File, io::Write};

    #[test]
    fn a_file_system_without_memory_is_an_error_of_the_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.gguf");
        std::fs::write(&path, [0; 64]).unwrap();
        let source = registry::open(&path, &OpenOptions::default()).unwrap();
        let error = || std::io::ErrorKind::OutOfMemory.into();
        let range = ByteRange::at(0, 9).unwrap();
        let found = gguf_error(&*source, GgufError::Io { range, source: error() }, &Cancel::default());
        assert!(matches!(&found, Error::Io { path: named, .. } if *named == path), "{found:?}");
        let found =
            gguf_error(&*source, GgufError::Allocation { range, source: error() }, &Cancel::default());
        assert!(matches!(found, Error::Allocation { bytes: 9, .. }), "{found:?}");
    }

    #[test]
    fn a_file_that_is_written_while_its_header_is_read_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.gguf");
        std::fs::write(&path, [b"GGUF".as_slice(), &3u32.to_le_bytes(), &[0; 16]].concat()).unwrap();
        // Windows lets no writer in later.
        let mut writer = File::options().append(true).open(&path).unwrap();
        let source = registry::open(&path, &OpenOptions::default()).unwrap();
        assert!(header_of(&*source, &OpenOptions::default()).is_ok());
        writer.write_all(b"more").unwrap();
        let found = header_of(&*source, &OpenOptions::default()).unwrap_err();
        assert!(matches!(found, Error::Changed { tensor: None, .. }), "{found:?}");
        std::fs::write(&path, b"{}").unwrap();
        let found = header_of(&*source, &OpenOptions::default()).unwrap_err();
        assert!(matches!(found, Error::Changed { tensor: None, .. }), "{found:?}");
    }
}
