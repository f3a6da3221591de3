//! From the paths a user gives to the files to open: a file, a URL, an index, a directory, a glob, or a list of these.
#![forbid(unsafe_code)]

use super::{
    OpenOptions, SourceName,
    gguf::split,
    index::{Index, IndexError, MAX_INDEX_BYTES},
    open, shard_name,
};
use crate::{Error, Result, counted, memory, source::registry};
use hoistway_io::file::with_descriptor;
use std::{
    collections::HashSet,
    fs,
    path::{Component, Path, PathBuf},
};

/// The index that is meant where there are several.
const STANDARD_INDEX: &str = "model.safetensors.index.json";

/// Files that belong together, and the index that says so, if there is one.
#[derive(Debug)]
pub(super) struct FileSet {
    pub(super) files: Vec<PathBuf>,
    pub(super) index: Option<(SourceName, Index)>,
    /// What reports of loads say of what was left out.
    pub(super) notes: Vec<String>,
}

impl FileSet {
    fn without_index(files: Vec<PathBuf>) -> Self {
        Self { files, index: None, notes: Vec::new() }
    }

    /// The error of a file that cannot be opened, with what the index has there if that names it.
    pub(super) fn explain(&self, error: Error) -> Error {
        match (error, &self.index) {
            (Error::NotFound { path, reason }, Some((name, index))) => {
                let tensors = index.weight_map.iter().filter(|(_, file)| name.beside(file) == path);
                let told = |tensor| {
                    format!("{reason}; the index {} has tensor '{tensor}' there", name.as_path().display())
                };
                let told = tensors.map(|(tensor, _)| tensor).min().map(told);
                Error::NotFound { path, reason: told.unwrap_or(reason) }
            }
            (error, _) => error,
        }
    }
}

/// What one path given by the user stands for.
pub(super) fn resolve(path: &Path, options: &OpenOptions) -> Result<FileSet> {
    let name = SourceName::from(path);
    if name.has_query() {
        return Ok(FileSet::without_index(vec![path.to_owned()]));
    }
    let is_url = matches!(name, SourceName::Url(_));
    name.check_meant()?;
    if !is_url && path.is_dir() {
        return resolve_directory(path, list(path)?, options);
    }
    if let Some(files) = registry::list(path, options)? {
        return resolve_directory(path, files, options);
    }
    if path.extension().is_some_and(|extension| extension == "json") {
        return resolve_index(path, options);
    }
    let pattern = path.to_str().filter(|text| text.contains(['*', '?', '[']));
    match pattern {
        // A name that exists means itself, whatever characters it has.
        Some(pattern) if !is_url && !path.exists() => resolve_glob(path, pattern),
        None if !is_url && is_like_hub_id(path) && !path.exists() => {
            let reason = format!("no such file; a model of the hub is written hf://{}", path.display());
            Err(Error::NotFound { path: path.to_owned(), reason })
        }
        _ => Ok(FileSet::without_index(vec![path.to_owned()])),
    }
}

/// Whether a path has the form of a hub's model, `organisation/name`, and not that of a file.
fn is_like_hub_id(path: &Path) -> bool {
    let formats = ["safetensors", "gguf", "json"];
    let is_file = path.extension().is_some_and(|extension| formats.iter().any(|format| extension == *format));
    let is_part = |part: &str| part.starts_with(|c: char| c.is_ascii_alphanumeric());
    let parts = path.to_str().and_then(|text| text.split_once('/'));
    !is_file && parts.is_some_and(|(owner, name)| is_part(owner) && is_part(name) && !name.contains('/'))
}

/// What a directory holds.
fn list(directory: &Path) -> Result<Vec<PathBuf>> {
    let list_error = |source| io_error("list", directory, source);
    let entries = with_descriptor(|| fs::read_dir(directory)).map_err(list_error)?;
    entries.map(|entry| Ok(entry.map_err(list_error)?.path())).collect()
}

fn resolve_directory(directory: &Path, entries: Vec<PathBuf>, options: &OpenOptions) -> Result<FileSet> {
    let mut files = Vec::new();
    let mut ggufs = Vec::new();
    let mut indexes = Vec::new();
    for path in entries.into_iter().filter(|path| !is_hidden(path)) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.ends_with(".safetensors.index.json") {
            indexes.push(path);
        } else if name.ends_with(".safetensors") {
            files.push(path);
        } else if name.ends_with(".gguf") {
            ggufs.push(path);
        }
    }
    let mut set = match indexes.as_slice() {
        [] if files.is_empty() => return only_model(directory, ggufs),
        [] => {
            files.sort();
            // Without an index nothing else tells that some of a model is missing.
            if let Some(reason) = shard_name::incomplete_set(&files) {
                let reason = format!("{reason} and no index; was a save or a download interrupted?");
                return Err(Error::NotFound { path: directory.to_owned(), reason });
            }
            FileSet::without_index(files)
        }
        [only] => resolve_index_of(directory, only, &files, options)?,
        several => {
            match several.iter().find(|path| path.file_name().is_some_and(|name| name == STANDARD_INDEX)) {
                Some(standard) => resolve_index_of(directory, standard, &files, options)?,
                None => {
                    let reason =
                        format!("the directory holds {} indexes; name the one to load", several.len());
                    return Err(Error::NotFound { path: directory.to_owned(), reason });
                }
            }
        }
    };
    if let Some(first) = ggufs.iter().min().and_then(|path| path.file_name()) {
        let files = counted(ggufs.len(), "GGUF file", "GGUF files");
        let first = first.to_string_lossy();
        set.notes.push(format!("left out, as there are safetensors files: {files}, the first is {first}"));
    }
    Ok(set)
}

/// Whether a listing leaves this out, as shells do: programs put files of their own beside others under such names, as macOS
/// does on file systems of other systems (`._model.safetensors`).
fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

/// How many names in a path, or a pattern of paths, are those of hidden files and folders.
fn hidden_parts(path: &Path) -> usize {
    let is_name = |part: &Component<'_>| matches!(part, Component::Normal(_));
    path.components().filter(|part| is_name(part) && is_hidden(part.as_ref())).count()
}

/// The files that the index of a directory names. `files` are those that the directory holds.
fn resolve_index_of(
    directory: &Path,
    index: &Path,
    files: &[PathBuf],
    options: &OpenOptions,
) -> Result<FileSet> {
    let mut set = resolve_index(index, options)?;
    let name_of = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let index_name = name_of(index).unwrap_or_default();
    let single = index_name.strip_suffix(".index.json").unwrap_or_default();
    let held: HashSet<_> = files.iter().filter_map(|file| name_of(file)).collect();
    let named = set.index.iter().flat_map(|(_, index)| index.files());
    // What lies in a folder below the directory is not listed.
    let missing = named.clone().find(|file| !file.contains('/') && !held.contains(*file));
    // Programs that save a model whole leave the index of its former shards.
    match missing {
        Some(missing) if held.contains(single) && !named.clone().any(|file| file == single) => {
            let reason = format!(
                "its index {index_name} names {missing}, which is not there; the index may be older than {single}: load that \
                 file by its name, or remove the index"
            );
            Err(Error::NotFound { path: directory.to_owned(), reason })
        }
        _ => {
            let named: HashSet<_> = named.collect();
            let mut others: Vec<_> = held.iter().filter(|file| !named.contains(file.as_str())).collect();
            others.sort_unstable();
            let names = || others.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
            if !others.is_empty() {
                set.notes
                    .push(format!("left out, as the index {index_name} does not name them: {}", names()));
            }
            Ok(set)
        }
    }
}

/// The GGUF files of a directory, if they are one model.
fn only_model(directory: &Path, mut files: Vec<PathBuf>) -> Result<FileSet> {
    files.sort();
    let not_found = |reason| Error::NotFound { path: directory.to_owned(), reason };
    let Some((first, others)) = files.split_first() else {
        let reason = "the directory holds no *.safetensors and no *.gguf file; hidden ones do not count";
        return Err(not_found(reason.into()));
    };
    let is_one_model = match split::Name::of(first) {
        None => others.is_empty(),
        Some(name) => {
            others.iter().all(|other| split::Name::of(other).is_some_and(|other| other.is_sibling(&name)))
        }
    };
    if !is_one_model {
        let names: Vec<_> =
            files.iter().filter_map(|file| file.file_name()).map(|name| name.to_string_lossy()).collect();
        let reason =
            format!("the directory holds several models; name the one to load of {}", names.join(", "));
        return Err(not_found(reason));
    }
    Ok(FileSet::without_index(files))
}

fn resolve_glob(path: &Path, pattern: &str) -> Result<FileSet> {
    let not_found = |reason: String| Error::NotFound { path: path.to_owned(), reason };
    let matches = glob::glob(pattern).map_err(|error| not_found(explain(&error)))?;
    let hidden_in_pattern = hidden_parts(Path::new(pattern));
    let (mut files, mut packs) = (Vec::new(), Vec::new());
    for entry in matches {
        let file = entry.map_err(|error| {
            let path = error.path().to_owned();
            io_error("list", &path, error.into())
        })?;
        // `*` and the like match no dot at the start of a name.
        if file.is_file() && hidden_parts(&file) <= hidden_in_pattern {
            let is_pack = file.extension().is_some_and(|extension| extension == "experts");
            if is_pack { packs.push(file) } else { files.push(file) }
        }
    }
    let packs: Vec<_> = packs.iter().map(|pack| pack.display().to_string()).collect();
    if files.is_empty() && !packs.is_empty() {
        let packs = packs.join(", ");
        return Err(not_found(format!("only packed experts match this pattern: {packs}; name the model")));
    }
    if files.is_empty() {
        return Err(not_found(
            "no file matches this pattern; hidden ones match patterns with their dot".into(),
        ));
    }
    let mut set = FileSet::without_index(files);
    if !packs.is_empty() {
        set.notes.push(format!("left out, as packed experts: {}", packs.join(", ")));
    }
    Ok(set)
}

/// What is wrong with a pattern, and what to write instead.
fn explain(error: &glob::PatternError) -> String {
    let place = error.pos + 1;
    if error.msg.contains("range") {
        format!(
            "there is no file of this name, and as a pattern it lacks the ']' of the '[' at character {place}; write '[[]' \
             for a '[' in a name"
        )
    } else {
        format!(
            "there is no file of this name, and '**' at character {place} is not a pattern; write '*' for any part of a name, \
             and '**' alone between two '/' for any folders"
        )
    }
}

fn resolve_index(path: &Path, options: &OpenOptions) -> Result<FileSet> {
    let invalid = |problem| Error::InvalidIndex { path: path.to_owned(), problem };
    let source = registry::open(path, options)?;
    let len = source.len();
    if len > MAX_INDEX_BYTES {
        return Err(invalid(IndexError::TooLarge { len }));
    }
    let mut text = memory::zeroed(len, "memory for an index")?;
    open::unchanged(&*source, source.read_exactly(&mut text, 0, None, &options.cancel_token()))?;
    let index = Index::parse(&text).map_err(invalid)?;
    let name = SourceName::from(source.path());
    index.check_names(&name).map_err(invalid)?;
    let files = index.files().into_iter().map(|file| name.beside(file)).collect();
    Ok(FileSet { files, index: Some((name, index)), notes: Vec::new() })
}

fn io_error(operation: &'static str, path: &Path, source: std::io::Error) -> Error {
    Error::Io { operation, path: path.to_owned(), tensor: None, range: None, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hub_id_without_its_scheme_is_told_how_to_be_written() {
        for (path, is_told) in [
            ("meta-llama/Llama-3.1-8B", true),
            ("models/llama.safetensors", false),
            ("a/b/c", false),
            ("./a", false),
            ("/a", false),
            ("a", false),
        ] {
            let told = match resolve(Path::new(path), &OpenOptions::default()) {
                Err(Error::NotFound { reason, .. }) => reason.ends_with(&format!("written hf://{path}")),
                Ok(_) => false,
                Err(other) => panic!("{other:?}"),
            };
            assert_eq!(told, is_told, "{path}");
        }
    }

    #[test]
    fn what_is_no_pattern_is_told_with_what_to_write() {
        for (path, told) in [
            ("[", "lacks the ']' of the '[' at character 1; write '[[]'"),
            ("/models/a[b.safetensors", "the '[' at character 10"),
            ("/models/***", "'**' alone between two '/'"),
            ("/models/a**", "'**' alone between two '/'"),
        ] {
            match resolve(Path::new(path), &OpenOptions::default()).unwrap_err() {
                Error::NotFound { reason, .. } => assert!(reason.contains(told), "{path}: {reason}"),
                other => panic!("{other:?}"),
            }
        }
    }
}
