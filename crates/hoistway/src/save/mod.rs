//! Saving: tensors from memory to safetensors files, whole or not at all.
//!
//! [`save`] writes one file, [`save_sharded`] a set with its index. `content` is what can be saved, `plan` turns it into
//! headers and offsets, `write` moves the bytes into files (`target`) of temporary names (`temp`), and `commit` gives
//! these their names once all of them are complete. A reader finds the old files or the new ones, also after a crash.
//!
//! ```no_run
//! use hoistway::{Dtype, save::{SaveOptions, TensorBytes, TensorData, save}};
//! use std::ops::ControlFlow;
//!
//! let weight = TensorData::new("weight", Dtype::F32, &[2], TensorBytes::Host(&[0; 8]));
//! let go_on = |_written| ControlFlow::Continue(());
//! let report = save("model.safetensors".as_ref(), &[weight], None, &SaveOptions::default(), go_on)?;
//! print!("{report}");
//! # Ok::<(), hoistway::Error>(())
//! ```

mod commit;
mod content;
#[cfg(test)]
mod crash_tests;
mod folder;
mod gather;
mod lock;
mod options;
mod plan;
mod report;
#[cfg(feature = "objects")]
mod store;
mod target;
mod temp;
mod write;

pub use content::{ContentError, DeviceBytes, TensorBytes, TensorData};
pub use options::{SaveOptions, Sharding};
pub use report::SaveReport;

use crate::{
    Alignment, ByteRange, Dtype, Error, Result,
    catalog::{SourceName, safetensors::Metadata},
    sys::permissions::Permissions,
};
use commit::{Commit, ShardNames};
use folder::Folder;
use hoistway_io::file::write_all_at;
use plan::PlannedFile;
use std::{
    collections::VecDeque,
    fs,
    io::{self, IoSlice, Read},
    ops::ControlFlow,
    path::{Path, PathBuf, is_separator},
    time::Instant,
};
use target::Target;
use tracing::debug_span;
use write::Writing;

/// Saves `tensors` to one safetensors file, which takes its name when it is complete: until then, and if anything goes
/// wrong, a file that had the name stays as it is. With [`SaveOptions::sync`] it is on the disk when this returns.
///
/// With the default alignment the file has the bytes that the reference implementation writes. If `path` is a symbolic
/// link, the file that it leads to is replaced, not the link.
///
/// The file gets the mode of the file that it replaces, and its owner and group where the process may give these. Where it
/// may not give the group, the group gets no more than all others. A file that replaces none gets the mode of any new file:
/// what the process's mask (`umask`) leaves. Until it is complete, only its owner can read it. Access control lists and
/// extended attributes are not kept; the group of a file with such a list gets no more than all others either.
///
/// `go_on` is called with the number of bytes written since the last call, from any thread, until it breaks off; for the
/// last time before the first name is given. From there on the save completes.
///
/// With the feature `objects`, `path` may be an `s3://`, `gs://` or `az://` URL: the object is sent in parts of 8 MiB, several at a time,
/// each with its checksum, and the store shows it when it is complete. `go_on` is asked all the while, also with 0 bytes, until the
/// object is shown. What fails or is cancelled is aborted, which takes 10 s at most after `go_on` breaks off; Azure keeps blocks that
/// were sent, unseen, for a week, which a warning in the log says.
///
/// # Errors
/// [`Error::InvalidOption`], also if `path` is a URL that nothing is saved to, and [`Error::Content`] before anything is written; [`Error::Io`],
/// [`Error::RouteUnavailable`] if direct writes were asked for and are refused, [`Error::Device`], [`Error::Cancelled`]. The old file
/// is still there then; an object may have been replaced where an [`Error::Io`] says so. [`Error::NotSynced`] if a file was replaced,
/// but that may not be on the disk. [`Error::Io`] or [`Error::System`] in place of [`Error::Cancelled`] if something is left in the
/// store that the store does not drop by itself, which it names.
pub fn save(
    path: &Path,
    tensors: &[TensorData<'_>],
    metadata: Option<&Metadata>,
    options: &SaveOptions,
    go_on: impl Fn(u64) -> ControlFlow<()> + Sync,
) -> Result<SaveReport> {
    let started = Instant::now();
    let _saving =
        debug_span!("save", path = %SourceName::from(path).shown(), tensors = tensors.len()).entered();
    #[cfg(feature = "objects")]
    if let SourceName::Url(url) = SourceName::from(path) {
        return store::save(&url, tensors, metadata, options, &go_on);
    }
    options.check_for_path()?;
    let lens = content::check(tensors)?;
    let order: Vec<usize> = (0..tensors.len()).collect();
    let file = PlannedFile::new(tensors, &lens, order, metadata, options.alignment)?;
    let path = final_path(path)?;
    let folder = Folder::of_file(&path, options.sync)?;
    let mut report = SaveReport::new(tensors.len(), options);
    folder.remove_stale_temps(&mut report.notes);
    let mut temp = folder.new_temp()?;
    temp.allocate(file.len(), &path)?;
    let target = Target::new(file, temp, path.clone(), options)?;
    let files = Writing::new(tensors, options, vec![target], &go_on)?.run(&mut report)?;
    if go_on(0).is_break() {
        return Err(Error::Cancelled);
    }
    let permissions = Permissions::replacing(std::slice::from_ref(&path))?;
    for mut temp in files {
        permissions.give(temp.opened()?, &path, &mut report.notes);
        temp.persist(&path)?;
    }
    folder.sync_saved(&path)?;
    report.paths.push(path);
    report.finish(started);
    Ok(report)
}

/// Saves `tensors` to `directory` as shards of at most [`Sharding::max_shard_bytes`] of tensors each, and an index;
/// as a single file without index if all fit in one. Tensors are given out in order, as Hugging Face does it: one that
/// is larger than a shard gets a file of its own.
///
/// At every instant, also after a crash, the index names files of one save alone, all of them complete: new shards never
/// take names that exist already (`model-set2-00001-of-00003.safetensors` then, and so on), the index is replaced once
/// they are in place, and only then are earlier files of that name removed, which [`SaveReport::removed`] lists: shards and
/// single file of that name alone, and none that an index of another name names. An index that was there stays where other
/// safetensors files lie beside. Where there was no index but a single file or
/// complete shards, an index that names these is there meanwhile. A save into a new directory that was interrupted leaves
/// shards without an index, which [`Catalog::open`](crate::Catalog::open) refuses; the next save removes them.
///
/// With the feature `objects`, `directory` may be an `s3://`, `gs://` or `az://` URL. All parts of all shards are there before the first
/// shard is shown, and the index is replaced last. Earlier files stay, and [`SaveReport::notes`] lists them; one file alone has an
/// index too if the folder has one. Saves to one folder at the same time are not kept apart.
///
/// All files get what every file of the save that they replace allows, its index among them, and the owner and group of the
/// first; otherwise as in [`save`].
///
/// # Errors
/// Those of [`save`].
pub fn save_sharded(
    directory: &Path,
    tensors: &[TensorData<'_>],
    metadata: Option<&Metadata>,
    sharding: &Sharding,
    options: &SaveOptions,
    go_on: impl Fn(u64) -> ControlFlow<()> + Sync,
) -> Result<SaveReport> {
    let started = Instant::now();
    let _saving =
        debug_span!("save", path = %SourceName::from(directory).shown(), tensors = tensors.len()).entered();
    #[cfg(feature = "objects")]
    if let SourceName::Url(url) = SourceName::from(directory) {
        return store::save_sharded(&url, tensors, metadata, sharding, options, &go_on);
    }
    options.check_for_path()?;
    sharding.check()?;
    let lens = content::check(tensors)?;
    let files = plan::files(tensors, &lens, metadata, sharding.max_shard_bytes, options.alignment)?;
    let contents: Vec<Vec<&str>> =
        files.iter().map(|file| file.tensors().map(|tensor| tensors[tensor].name).collect()).collect();
    let names = ShardNames::new(&sharding.file_name);
    let folder = Folder::create(&absolute(directory)?, &sharding.file_name, options.sync)?;
    let mut report = SaveReport::new(tensors.len(), options);
    folder.remove_stale_temps(&mut report.notes);
    let count = files.len();
    // Dropped last: its lock says that the others have a writer.
    let set = folder.new_temp()?;
    let allocate = |(number, file): (usize, PlannedFile)| {
        let (mut temp, path) = (set.under(number)?, folder.path.join(names.plain(number, count)));
        temp.allocate(file.len(), &path)?;
        temp.close(&path)?;
        Ok((file, temp, path))
    };
    // A disk that is too small is found out before the first write.
    let mut files = (1..).zip(files).map(allocate).collect::<Result<VecDeque<_>>>()?;
    let mut temps = Vec::with_capacity(count);
    while !files.is_empty() {
        let open = files.drain(..files.len().min(OPEN_FILES));
        let targets = open.map(|(file, temp, path)| Target::new(file, temp, path, options));
        let targets = targets.collect::<Result<Vec<_>>>()?;
        let mut written = Writing::new(tensors, options, targets, &go_on)?.run(&mut report)?;
        for (temp, number) in written.iter_mut().zip(temps.len() + 1..) {
            temp.close(&folder.path.join(names.plain(number, count)))?;
        }
        temps.append(&mut written);
    }
    Commit::begin(&folder, &names, &go_on, &mut report)?.run(
        temps,
        &contents,
        lens.iter().sum(),
        &mut report,
    )?;
    report.finish(started);
    Ok(report)
}

/// Files of a set that are written at a time, each by two descriptors.
const OPEN_FILES: usize = 16;

/// Where [`save`] puts what in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileLayout {
    /// What the file begins with: the length of its text, the text, and blanks up to the first tensor.
    pub header: Vec<u8>,
    /// The bytes of each tensor in the file, in the order in which the tensors were given.
    pub tensors: Vec<ByteRange>,
    /// Bytes of the file.
    pub len: u64,
}

impl FileLayout {
    /// Returns the layout of a file that [`save`] makes of tensors of these names, types and shapes.
    ///
    /// # Errors
    /// [`Error::InvalidOption`], [`Error::Content`].
    pub fn new(
        tensors: &[(&str, Dtype, &[u64])],
        metadata: Option<&Metadata>,
        options: &SaveOptions,
    ) -> Result<Self> {
        options.check()?;
        let lens = content::lens(tensors.iter().copied())?;
        let without_bytes =
            |&(name, dtype, shape)| TensorData::new(name, dtype, shape, TensorBytes::Host(&[]));
        let described: Vec<_> = tensors.iter().map(without_bytes).collect();
        let all = (0..tensors.len()).collect();
        let file = PlannedFile::new(&described, &lens, all, metadata, options.alignment)?;
        let len = file.len();
        let (header, tensors) = file.into_layout(tensors.len());
        Ok(Self { header, tensors, len })
    }
}

/// A safetensors file that is to be in memory.
#[derive(Debug)]
pub struct Encoded<'a> {
    tensors: &'a [TensorData<'a>],
    file: PlannedFile,
}

impl<'a> Encoded<'a> {
    /// The file of these tensors.
    ///
    /// # Errors
    /// [`Error::Content`].
    pub fn new(tensors: &'a [TensorData<'a>], metadata: Option<&Metadata>) -> Result<Self> {
        let lens = content::check(tensors)?;
        let order = (0..tensors.len()).collect();
        let alignment = SaveOptions::default().alignment;
        Ok(Self { tensors, file: PlannedFile::new(tensors, &lens, order, metadata, alignment)? })
    }

    /// Its length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.file.len()
    }

    /// Writes it into memory of exactly that length.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] if the memory has another length; [`Error::Device`].
    pub fn write_to(&self, memory: &mut [u8]) -> Result<()> {
        if memory.len() as u64 != self.file.len() {
            let reason = format!("the file has {}", self.file.len());
            return Err(Error::invalid_option("memory", format!("{} bytes", memory.len()), reason));
        }
        let devices = gather::Devices::of(self.tensors)?;
        devices.gather(&self.file, self.tensors, self.file.range(), memory)
    }
}

/// Writes a file of at least `len` bytes by `fill`. It takes its name once `fill` has succeeded and it is on the disk: until then,
/// and if anything goes wrong, `path` has its earlier contents. `fill` gets the file open for reading and writing. It allows
/// no more than `path` and the files `like` do, and gets the owner and group of the first of these.
///
/// # Errors
/// Those of `fill`; [`Error::Io`], and [`Error::NotSynced`] as in [`save`].
#[doc(hidden)]
pub fn write_by<E: From<Error>>(
    path: &Path,
    len: u64,
    like: &[PathBuf],
    fill: impl FnOnce(&fs::File) -> Result<(), E>,
) -> Result<(), E> {
    let path = final_path(path)?;
    let folder = Folder::of_file(&path, true)?;
    folder.remove_stale_temps(&mut Vec::new());
    let mut temp = folder.new_temp()?;
    temp.allocate(len, &path)?;
    fill(temp.opened()?)?;
    temp.sync().map_err(|source| io_error("sync", &path, source))?;
    let like: Vec<PathBuf> = std::iter::once(&path).chain(like).cloned().collect();
    let permissions = Permissions::replacing(&like).map_err(Error::from)?;
    permissions.give(temp.opened()?, &path, &mut Vec::new());
    temp.persist(&path)?;
    Ok(folder.sync_saved(&path)?)
}

/// Fails if there is a file with other contents: so that a path which was meant for something else, as by a glob of a shell, costs
/// no file. `is_one` looks at how the contents begin, without white space.
///
/// # Errors
/// [`Error::Io`].
#[doc(hidden)]
pub fn refuse_others(path: &Path, what: &str, is_one: impl FnOnce(&[u8]) -> bool) -> Result<()> {
    const LOOKED_AT: u64 = 1024;
    if !fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() > 0) {
        return Ok(());
    }
    let mut begins = Vec::new();
    let file = fs::File::open(path).map_err(|source| io_error("open", path, source))?;
    file.take(LOOKED_AT).read_to_end(&mut begins).map_err(|source| io_error("read", path, source))?;
    begins.retain(|byte| !byte.is_ascii_whitespace());
    if is_one(&begins) {
        return Ok(());
    }
    let why = format!("it is there already, and is not {what}; choose another name");
    Err(io_error("replace", path, io::Error::new(io::ErrorKind::AlreadyExists, why)))
}

/// Writes a small file as a whole: `path` has its earlier contents until all of `bytes` are on the disk. What is not a regular
/// file, such as a pipe, is written where it is.
///
/// # Errors
/// [`Error::Io`]. The old file is still there then.
#[doc(hidden)]
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = |source| io_error("write", path, source);
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return fs::write(path, bytes).map_err(failed);
    }
    let path = final_path(path)?;
    let mut temp = Folder::of_file(&path, true)?.new_temp()?;
    let written = write_all_at(temp.opened()?, &mut [IoSlice::new(bytes)], &mut 0, Alignment::BYTE);
    written.and_then(|()| temp.sync()).map_err(failed)?;
    let permissions = Permissions::replacing(std::slice::from_ref(&path))?;
    permissions.give(temp.opened()?, &path, &mut Vec::new());
    temp.persist(&path)
}

/// The file that a save to `path` replaces: links are followed, also to where nothing is yet.
fn final_path(path: &Path) -> Result<PathBuf> {
    /// As many links in a row as the kernel follows.
    const MAX_LINKS: usize = 40;
    let ends_as_folder = |path: &Path| {
        let text = path.as_os_str().to_string_lossy();
        text.strip_suffix('.').unwrap_or(&text).ends_with(is_separator)
    };
    let given = path;
    let mut path = absolute(given)?;
    if ends_as_folder(given) && !ends_as_folder(&path) {
        // `absolute` leaves out a dot at the end.
        path.push(".");
    }
    for _ in 0..MAX_LINKS {
        match fs::symlink_metadata(&path) {
            Ok(stat) if stat.is_symlink() => {
                let next = fs::read_link(&path).map_err(|source| io_error("read link", &path, source))?;
                path = path.parent().unwrap_or(Path::new("/")).join(next);
            }
            Ok(stat) if !stat.is_file() => {
                let source = io::Error::other("it exists and is not a regular file");
                return Err(io_error("save", &path, source));
            }
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(io_error("stat", &path, source));
            }
            // What is there is a regular file, and the system finds none by a name that ends so.
            Err(_) if ends_as_folder(&path) => {
                let reason = "it ends as the name of a folder does: name a file in it";
                return Err(Error::invalid_option("path", path.display(), reason));
            }
            Ok(_) | Err(_) => return Ok(path),
        }
    }
    let too_many = || io::Error::other("there are too many symbolic links in a row");
    Err(io_error("follow links", &path, fs::metadata(&path).err().unwrap_or_else(too_many)))
}

/// The path from the root on, so that a change of the working directory meanwhile changes nothing.
///
/// # Errors
/// [`Error::InvalidOption`] if it is a URL; [`Error::Io`].
fn absolute(path: &Path) -> Result<PathBuf> {
    let name = SourceName::from(path);
    if let SourceName::Url(_) = name {
        return Err(Error::invalid_option(
            "path",
            name.shown(),
            "files are saved on this machine; give a path of it",
        ));
    }
    std::path::absolute(path).map_err(|source| io_error("find", path, source))
}

fn io_error(operation: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Io { operation, path: path.to_owned(), tensor: None, range: None, source }
}
