//! From paths to open files and their headers, of split models those of every file.
#![forbid(unsafe_code)]

use super::{
    FileHeader, FormatError, OpenOptions,
    format::foreign,
    gguf::{self, ByteSource, Gguf, GgufError, split::Part},
    safetensors::{self, Header, HeaderError, LENGTH_PREFIX_BYTES},
};
use crate::{ByteRange, Error, Result, parallel};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    io,
    path::{Path, PathBuf},
};
use windlass_io::file::{self, OpenFile};

/// Headers that are read at the same time.
const PARALLEL_HEADERS: usize = 16;

impl ByteSource for OpenFile {
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.identity.len())
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        file::read_exact_at(&self.file, buffer, offset)
    }
}

/// Opens the files and parses their headers, several at a time, keeping their order.
pub(super) fn read_headers(paths: &[PathBuf], options: &OpenOptions) -> Result<Vec<(OpenFile, FileHeader)>> {
    parallel::map(paths, PARALLEL_HEADERS, |path| read_header(path, options)).into_iter().collect()
}

/// The headers of safetensors files as the text that they are, not parsed, and the files' lengths. On up to `threads`
/// threads; answers in the order of the paths.
///
/// # Errors
/// [`Error::NotFound`], [`Error::Io`], [`Error::Changed`], and [`Error::InvalidFile`] if the header's length is impossible
/// or it is no text.
pub fn header_texts(paths: &[PathBuf], threads: usize) -> Result<Vec<(String, u64)>> {
    let read = |path: &PathBuf| {
        let open_file = OpenFile::open(path)?;
        let text = read_safetensors_text(&open_file);
        open_file.check_unchanged(ByteRange::default())?;
        let text = String::from_utf8(text?).map_err(|error| {
            let offset = LENGTH_PREFIX_BYTES + error.utf8_error().valid_up_to() as u64;
            invalid(path, HeaderError::NotUtf8 { offset })
        })?;
        Ok((text, open_file.identity.len()))
    };
    parallel::map(paths, threads, read).into_iter().collect()
}

/// The files that were `found`, with all others of those that are part of a split model, in order. `split_models` are
/// the first files of those that are complete already: any other file of them is not wanted again.
pub(super) fn with_siblings(
    found: Vec<(OpenFile, FileHeader)>,
    split_models: &mut HashSet<PathBuf>,
    options: &OpenOptions,
) -> Result<Vec<(OpenFile, FileHeader)>> {
    let mut complete = Vec::with_capacity(found.len());
    let mut waiting = VecDeque::from(found);
    while let Some((file, header)) = waiting.pop_front() {
        let Some(gguf) = header.gguf() else {
            complete.push((file, header));
            continue;
        };
        let Some(part) = Part::of(&gguf.header) else {
            Part::check_whole(&gguf.header, gguf.tensors.len() as u64)
                .map_err(|problem| invalid(&file.path, problem))?;
            complete.push((file, header));
            continue;
        };
        let siblings = part.siblings(&file.path).map_err(|problem| invalid(&file.path, problem))?;
        if siblings.first().is_some_and(|first| !split_models.insert(first.clone())) {
            continue;
        }
        let names: HashSet<&PathBuf> = siblings.iter().collect();
        let (together, others): (Vec<_>, Vec<_>) =
            waiting.into_iter().partition(|(other, _)| names.contains(&other.path));
        waiting = others.into();
        let path = file.path.clone();
        let mut model: HashMap<PathBuf, _> = [(file, header)]
            .into_iter()
            .chain(together)
            .map(|(file, header)| (file.path.clone(), (file, header)))
            .collect();
        let missing: Vec<_> =
            siblings.iter().filter(|sibling| !model.contains_key(*sibling)).cloned().collect();
        for (file, header) in read_siblings(&missing, &path, options)? {
            model.insert(file.path.clone(), (file, header));
        }
        let in_order = siblings.iter().filter_map(|sibling| model.remove(sibling)).collect();
        if let Some(left_over) = model.keys().next() {
            let path = left_over.display();
            return Err(Error::Internal(format!("{path} is not among the files of its own model")));
        }
        complete.extend(checked_model(part, in_order)?);
    }
    Ok(complete)
}

fn read_siblings(
    missing: &[PathBuf],
    of: &Path,
    options: &OpenOptions,
) -> Result<Vec<(OpenFile, FileHeader)>> {
    read_headers(missing, options).map_err(|error| match error {
        Error::NotFound { path, reason } => {
            let reason = format!("{reason}; {} is part of the same split model", of.display());
            Error::NotFound { path, reason }
        }
        other => other,
    })
}

/// All files of a split model, in order, if each of them says so.
fn checked_model(part: Part, model: Vec<(OpenFile, FileHeader)>) -> Result<Vec<(OpenFile, FileHeader)>> {
    let mut tensors = 0;
    for (number, (file, header)) in (0..).zip(&model) {
        let Some(gguf) = header.gguf() else {
            return Err(gguf_error(file, gguf::no_magic(file, 0)));
        };
        part.check_member(&gguf.header, number).map_err(|problem| invalid(&file.path, problem))?;
        tensors += gguf.tensors.len() as u64;
    }
    if let Some((file, header)) = model.first()
        && let Some(gguf) = header.gguf()
    {
        part.check_tensors(&gguf.header, tensors).map_err(|problem| invalid(&file.path, problem))?;
    }
    Ok(model)
}

fn read_header(path: &Path, options: &OpenOptions) -> Result<(OpenFile, FileHeader)> {
    let open_file = OpenFile::open(path)?;
    let header = header_of(&open_file, options)?;
    Ok((open_file, header))
}

fn header_of(open_file: &OpenFile, options: &OpenOptions) -> Result<FileHeader> {
    let header = parsed_header(open_file, options);
    // Before any error of the header: a file that is being written may say anything.
    open_file.check_unchanged(ByteRange::default())?;
    header
}

fn parsed_header(open_file: &OpenFile, options: &OpenOptions) -> Result<FileHeader> {
    if is_gguf(open_file, options)? {
        return read_gguf(open_file, options);
    }
    let is_named_gguf =
        open_file.path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    match read_safetensors(open_file, options) {
        // It was meant to be a GGUF: that it is none is what is wrong with it.
        Err(Error::InvalidFile { .. }) if is_named_gguf => read_gguf(open_file, options),
        header => header.map(FileHeader::from),
    }
}

fn read_gguf(open_file: &OpenFile, options: &OpenOptions) -> Result<FileHeader> {
    let parsed = Gguf::parse(open_file, options).map_err(|problem| gguf_error(open_file, problem));
    parsed.map(FileHeader::from)
}

/// Whether the first bytes are those of GGUF. Nothing else can be looked for inside a file.
fn is_gguf(open_file: &OpenFile, options: &OpenOptions) -> Result<bool> {
    let mut magic = [0; gguf::MAGIC.len()];
    if options.offset == 0 && open_file.identity.len() >= magic.len() as u64 {
        read_exactly(open_file, &mut magic, 0)?;
    }
    Ok(options.offset > 0 || magic == gguf::MAGIC)
}

fn read_safetensors(open_file: &OpenFile, options: &OpenOptions) -> Result<Header> {
    let text = read_safetensors_text(open_file)?;
    Header::parse_with(&text, open_file.identity.len(), options)
        .map_err(|problem| invalid(&open_file.path, problem))
}

fn read_safetensors_text(open_file: &OpenFile) -> Result<Vec<u8>> {
    safetensors_text(open_file, open_file.identity.len(), &open_file.path, |range, source| {
        open_file.read_error(range, source).into()
    })
}

/// The header of a file that is in memory already. `path` is what messages call it.
pub(crate) fn header_of_bytes(data: &[u8], path: &Path, options: &OpenOptions) -> Result<FileHeader> {
    let unreadable = |range, source| Error::Io {
        operation: "read",
        path: path.to_owned(),
        tensor: None,
        range: Some(range),
        source,
    };
    if options.offset > 0 || data.starts_with(&gguf::MAGIC) {
        let parsed = Gguf::parse(&data, options).map_err(|problem| match problem {
            GgufError::Io { range, source } => unreadable(range, source),
            problem => invalid(path, problem),
        });
        return parsed.map(FileHeader::from);
    }
    let file_len = data.len() as u64;
    let text = safetensors_text(&data, file_len, path, unreadable)?;
    let header = Header::parse_with(&text, file_len, options).map_err(|problem| invalid(path, problem))?;
    Ok(FileHeader::from(header))
}

fn safetensors_text(
    source: &impl ByteSource,
    file_len: u64,
    path: &Path,
    read_error: impl Fn(ByteRange, io::Error) -> Error,
) -> Result<Vec<u8>> {
    let read_exactly = |buffer: &mut [u8], offset| {
        let range = ByteRange::at(offset, buffer.len() as u64).unwrap_or_default();
        source.read_exact_at(buffer, offset).map_err(|source| read_error(range, source))
    };
    let invalid = |problem: HeaderError| invalid(path, problem);
    if file_len < LENGTH_PREFIX_BYTES {
        return Err(invalid(HeaderError::TooShort { file_len }));
    }
    let mut prefix = [0; 8];
    read_exactly(&mut prefix, 0)?;
    let header_len = safetensors::header_len(prefix, file_len).map_err(|problem| {
        // Text and archives look like a header of many exabytes.
        let mut beginning = [0; 32];
        let len = beginning.len().min(file_len as usize);
        let what = source.read_exact_at(&mut beginning[..len], 0).ok().and_then(|()| foreign(&beginning));
        match what {
            Some(what) => self::invalid(path, FormatError::Foreign { what }),
            None => invalid(problem),
        }
    })?;
    let mut text =
        vec![0; usize::try_from(header_len).map_err(|_| invalid(HeaderError::TooLarge { header_len }))?];
    read_exactly(&mut text, LENGTH_PREFIX_BYTES)?;
    Ok(text)
}

fn invalid(path: &Path, problem: impl Into<FormatError>) -> Error {
    Error::InvalidFile { path: path.to_owned(), problem: problem.into() }
}

fn read_exactly(open_file: &OpenFile, buffer: &mut [u8], offset: u64) -> Result<()> {
    let range = ByteRange::at(offset, buffer.len() as u64).unwrap_or_default();
    open_file.read_exact_at(buffer, offset).map_err(|source| open_file.read_error(range, source).into())
}

/// The error of a GGUF file that could not be used.
pub(crate) fn gguf_error(of: &OpenFile, problem: GgufError) -> Error {
    match problem {
        GgufError::Io { range, source } => of.read_error(range, source).into(),
        problem => invalid(&of.path, problem),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs::File, io::Write};

    #[test]
    fn a_file_that_is_written_while_its_header_is_read_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.gguf");
        std::fs::write(&path, [b"GGUF".as_slice(), &3u32.to_le_bytes(), &[0; 16]].concat()).unwrap();
        let open_file = OpenFile::open(&path).unwrap();
        assert!(header_of(&open_file, &OpenOptions::default()).is_ok());
        File::options().append(true).open(&path).unwrap().write_all(b"more").unwrap();
        let found = header_of(&open_file, &OpenOptions::default()).unwrap_err();
        assert!(matches!(found, Error::Changed { tensor: None, .. }), "{found:?}");
        std::fs::write(&path, b"{}").unwrap();
        let found = header_of(&open_file, &OpenOptions::default()).unwrap_err();
        assert!(matches!(found, Error::Changed { tensor: None, .. }), "{found:?}");
    }
}
