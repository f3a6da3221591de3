//! From paths to open files and their headers, of split models those of every file.
#![forbid(unsafe_code)]

use super::{
    FileHeader, FormatError, OpenOptions,
    format::foreign,
    gguf::{self, ByteSource, Gguf, GgufError, split::Part},
    safetensors::{self, Header, HeaderError, LENGTH_PREFIX_BYTES},
};
use crate::{ByteRange, Error, Result, parallel};
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    fs::{File, FileType},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    sync::Mutex,
};

/// Headers that are read at the same time.
const PARALLEL_HEADERS: usize = 16;

/// What tells a file from another of the same name, and from itself before it was rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
    len: u64,
    modified_ns: i128,
    changed_ns: i128,
    links: u64,
}

impl FileIdentity {
    /// The identity of an open file.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn of(file: &File) -> io::Result<Self> {
        let stat = file.metadata()?;
        let in_ns = |seconds, nanoseconds| i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
        Ok(Self {
            device: stat.dev(),
            inode: stat.ino(),
            len: stat.len(),
            modified_ns: in_ns(stat.mtime(), stat.mtime_nsec()),
            changed_ns: in_ns(stat.ctime(), stat.ctime_nsec()),
            links: stat.nlink(),
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

    /// The file's number on that device.
    pub const fn inode(&self) -> u64 {
        self.inode
    }

    /// What is different in `now`, in words, or `None` if it is the same file, unchanged.
    ///
    /// The change time (`ctime`) counts too: programs set a modification time back, as `cp -p` does, but cannot set a
    /// change time. A new or removed link also moves the change time. It is not a change if the number of links
    /// differs.
    pub fn change(&self, now: &Self) -> Option<String> {
        if (self.device, self.inode) != (now.device, now.inode) {
            Some("another file has taken its name".into())
        } else if self.len != now.len {
            Some(format!("it had {} bytes and now has {}", self.len, now.len))
        } else if self.modified_ns != now.modified_ns {
            Some("its modification time moved".into())
        } else if self.is_touched(now) && self.links == now.links {
            let reasons = "it was rewritten and its modification time set back, or its permissions, owner or attributes changed";
            Some(format!("only its change time moved: {reasons}"))
        } else {
            None
        }
    }

    /// Whether the change time moved and nothing else that tells of other bytes.
    fn is_touched(&self, now: &Self) -> bool {
        let bytes = |of: &Self| (of.device, of.inode, of.len, of.modified_ns);
        bytes(self) == bytes(now) && self.changed_ns != now.changed_ns
    }
}

/// A file of a catalog, still open from the reading of its header: nobody can swap it for another.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    /// Its identity when it was opened.
    pub(crate) identity: FileIdentity,
    names: Mutex<Names>,
}

/// The identity of a file after the last change of its names that was seen.
#[derive(Debug)]
struct Names {
    identity: FileIdentity,
    /// The path that the kernel has for the open file; `None` where it does not say.
    name: Option<PathBuf>,
}

impl Names {
    fn of(file: &File, identity: FileIdentity) -> Self {
        let name = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok();
        Self { identity, name }
    }
}

impl OpenFile {
    /// Opens a regular file.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        // Before it is opened: opening a device may do something.
        let stat = std::fs::metadata(path).map_err(|source| open_error(path, source))?;
        check_regular(stat.file_type(), path)?;
        Self::from_file(open_without_waiting(path).map_err(|source| open_error(path, source))?, path)
    }

    /// Takes an open file over, which must be a regular one.
    pub(crate) fn from_file(file: File, path: &Path) -> Result<Self> {
        let stat = |source| Error::Io {
            operation: "stat",
            path: path.to_owned(),
            tensor: None,
            range: None,
            source,
        };
        check_regular(file.metadata().map_err(stat)?.file_type(), path)?;
        let identity = FileIdentity::of(&file).map_err(stat)?;
        let names = Mutex::new(Names::of(&file, identity));
        Ok(Self { path: path.to_owned(), file, identity, names })
    }

    /// Fails if the file is no longer what it was when its header was read. `needed` are the bytes at stake,
    /// `tensor_at` gives the tensor that holds one of them.
    pub(crate) fn check_unchanged(
        &self,
        needed: ByteRange,
        tensor_at: impl FnOnce(u64) -> Option<String>,
    ) -> Result<()> {
        self.check_identity(FileIdentity::of(&self.file), needed, tensor_at)
    }

    /// The same, of what somebody else has found out about it `now`.
    pub(crate) fn check_identity(
        &self,
        now: io::Result<FileIdentity>,
        needed: ByteRange,
        tensor_at: impl FnOnce(u64) -> Option<String>,
    ) -> Result<()> {
        let now = now.map_err(|source| self.io_error("stat", source))?;
        let Some(change) = self.change(&now) else { return Ok(()) };
        let (path, file_len) = (self.path.clone(), now.len());
        Err(if file_len < needed.end() {
            let tensor = tensor_at(file_len.max(needed.start()));
            Error::Truncated { path, tensor, needed, file_len }
        } else {
            Error::Changed { path, tensor: tensor_at(needed.start()), change }
        })
    }

    /// What is different `now`, in words, or `None` if its bytes are the same.
    ///
    /// A file that gets another name, loses one or is replaced keeps its bytes, and its change time moves. Such a change
    /// is accepted once: from then on, its new change time counts.
    fn change(&self, now: &FileIdentity) -> Option<String> {
        // Also what a thread asked before another accepted a change.
        if self.identity == *now {
            return None;
        }
        let mut names = parallel::lock(&self.names);
        if names.identity.is_touched(now) {
            let renamed = Names::of(&self.file, *now);
            if renamed.identity.links != names.identity.links || renamed.name != names.name {
                *names = renamed;
                return None;
            }
        }
        names.identity.change(now)
    }

    pub(crate) fn io_error(&self, operation: &'static str, source: io::Error) -> Error {
        Error::Io { operation, path: self.path.clone(), tensor: None, range: None, source }
    }
}

/// Opens a file that may have become a FIFO since it was looked at: that would wait for a writer.
fn open_without_waiting(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags | OFlags::NONBLOCK, Mode::empty()) {
        // A program has a lease of it, which only regular files have, and is given time to let it go.
        Err(Errno::WOULDBLOCK) => return Ok(rustix::fs::open(path, flags, Mode::empty())?.into()),
        opened => opened?,
    };
    // Reads wait as usual, also those of rings.
    rustix::fs::fcntl_setfl(&file, OFlags::empty())?;
    Ok(file.into())
}

fn check_regular(file_type: FileType, path: &Path) -> Result<()> {
    let kind = match file_type {
        regular if regular.is_file() => return Ok(()),
        other if other.is_dir() => "a directory",
        other if other.is_fifo() => "a FIFO (a named pipe)",
        other if other.is_socket() => "a socket",
        other if other.is_char_device() => "a character device",
        other if other.is_block_device() => "a block device",
        _ => "something else",
    };
    Err(invalid(path, FormatError::NotRegular { kind }))
}

impl ByteSource for OpenFile {
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.identity.len())
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(&self.file, buffer, offset)
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
        open_file.check_unchanged(ByteRange::default(), |_| None)?;
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
            return Err(file.gguf_error(gguf::no_magic(file, 0)));
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
    open_file.check_unchanged(ByteRange::default(), |_| None)?;
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
    let parsed = Gguf::parse(open_file, options).map_err(|problem| open_file.gguf_error(problem));
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
        open_file.read_error(range, source)
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
    open_file.read_exact_at(buffer, offset).map_err(|source| open_file.read_error(range, source))
}

impl OpenFile {
    /// The error of a failed read of bytes that the file had when it was opened.
    fn read_error(&self, range: ByteRange, source: io::Error) -> Error {
        let path = self.path.clone();
        if source.kind() == io::ErrorKind::UnexpectedEof {
            let file_len = self.file.metadata().map_or(0, |stat| stat.len());
            return Error::Truncated { path, tensor: None, needed: range, file_len };
        }
        Error::Io { operation: "read", path, tensor: None, range: Some(range), source }
    }

    /// The error of a GGUF file that could not be used.
    pub(crate) fn gguf_error(&self, problem: GgufError) -> Error {
        match problem {
            GgufError::Io { range, source } => self.read_error(range, source),
            problem => invalid(&self.path, problem),
        }
    }
}

/// The error of a failed `open`.
pub(crate) fn open_error(path: &Path, source: io::Error) -> Error {
    if source.kind() == io::ErrorKind::NotFound {
        return Error::NotFound { path: path.to_owned(), reason: "no such file".into() };
    }
    Error::Io { operation: "open", path: path.to_owned(), tensor: None, range: None, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// What `check_unchanged` says after `change` was done to a file and its modification time set back.
    fn found_after(change: impl FnOnce(&Path)) -> Result<()> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.safetensors");
        std::fs::write(&path, [7; 64]).unwrap();
        let open_file = OpenFile::open(&path).unwrap();
        let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
        tick();
        let writer = File::options().write(true).open(&path).unwrap();
        change(&path);
        writer.set_modified(modified).unwrap();
        open_file.check_unchanged(ByteRange::default(), |_| None)
    }

    /// Waits until the clock of the file system's times has moved.
    fn tick() {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }

    fn rewrite(path: &Path) {
        File::options().write(true).open(path).unwrap().write_all(&[8; 64]).unwrap();
    }

    #[test]
    fn a_fifo_that_takes_the_place_of_a_file_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.safetensors");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        // As if it had been a file when `open` looked.
        let file = open_without_waiting(&path).unwrap();
        let found = OpenFile::from_file(file, &path);
        assert!(
            matches!(&found, Err(Error::InvalidFile { problem: FormatError::NotRegular { kind }, .. }) if kind.contains("FIFO")),
            "{found:?}"
        );
    }

    #[test]
    fn reads_of_an_opened_file_wait() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open_file = OpenFile::open(file.path()).unwrap();
        assert!(!rustix::fs::fcntl_getfl(&open_file.file).unwrap().contains(OFlags::NONBLOCK));
    }

    #[test]
    fn a_rewritten_file_is_changed_although_its_modification_time_is_set_back() {
        let error = found_after(rewrite).unwrap_err();
        assert!(matches!(&error, Error::Changed { change, .. } if change.contains("change time")), "{error}");
    }

    #[test]
    fn new_permissions_look_like_a_rewrite_and_the_error_says_so() {
        let read_only = |path: &Path| {
            std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o400)).unwrap();
        };
        let error = found_after(read_only).unwrap_err();
        assert!(error.to_string().contains("or its permissions, owner or attributes changed"), "{error}");
    }

    #[test]
    fn other_names_change_no_bytes_but_hide_no_later_rewrite() {
        let name = |path: &Path, name: &str| path.with_extension(name);
        type Change<'a> = (&'a str, &'a dyn Fn(&Path));
        let changes: [Change<'_>; 4] = [
            ("link", &|path| std::fs::hard_link(path, name(path, "link")).unwrap()),
            ("rename", &|path| std::fs::rename(path, name(path, "old")).unwrap()),
            ("remove", &|path| std::fs::remove_file(path).unwrap()),
            ("replace", &|path| {
                std::fs::write(name(path, "new"), [8; 64]).unwrap();
                std::fs::rename(name(path, "new"), path).unwrap();
            }),
        ];
        for (what, change) in changes {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("model.safetensors");
            std::fs::write(&path, [7; 64]).unwrap();
            let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
            let open_file = OpenFile::open(&path).unwrap();
            let writer = File::options().write(true).open(&path).unwrap();
            tick();
            change(&path);
            for _ in 0..2 {
                open_file.check_unchanged(ByteRange::default(), |_| None).expect(what);
            }
            tick();
            (&writer).write_all(&[8; 64]).unwrap();
            writer.set_modified(modified).unwrap();
            let found = open_file.check_unchanged(ByteRange::default(), |_| None);
            assert!(matches!(found, Err(Error::Changed { .. })), "{what}: {found:?}");
        }
    }

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
