//! A file under a temporary name, until it is complete.
//!
//! Its writer holds a lock on it. So the next save to the folder can tell files whose writer was killed, and removes them. Locks
//! are released by a call, not by closing: a child of `fork` has the descriptors too. As the file gets its name, it gets the
//! mode and the owner of the file that it replaces.
#![forbid(unsafe_code)]

use super::io_error;
use crate::{
    ByteRange, Error, Result,
    sys::{files, folders},
};
use hoistway_io::file::{FileIdentity, try_lock, unlock, with_descriptor};
use std::{
    collections::hash_map::RandomState,
    ffi::OsStr,
    fs::{self, File, OpenOptions},
    hash::{BuildHasher, Hasher},
    io,
    path::{Path, PathBuf},
};

/// What stands in the names of temporary files between the name of the file and a random number.
pub(super) const MARK: &str = ".hoistway-";
/// What they end with.
pub(super) const SUFFIX: &str = ".tmp";
/// Names that are tried before giving up.
const ATTEMPTS: usize = 100;

/// A new file. Removed when dropped, unless it was given its name.
///
/// It is locked as long as it is being written, so that others can tell it from one whose writer is gone: the lock goes
/// with the process. The files of a set are not locked, and may be closed: the file that they are under is locked for them.
#[derive(Debug)]
pub(super) struct TempFile {
    /// `None` while it is closed.
    file: Option<File>,
    path: PathBuf,
    is_named: bool,
}

impl TempFile {
    /// A new file; `path_of` gives a path for a random number.
    pub(super) fn new(path_of: impl Fn(u64) -> PathBuf) -> Result<Self> {
        for _ in 0..ATTEMPTS {
            let path = path_of(RandomState::new().build_hasher().finish());
            // Until it has its name, no other user may open it.
            let file = match with_descriptor(|| folders::create_private(&path)) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                // The caller named the folder, and has never heard of the file.
                Err(source) if source.kind() == io::ErrorKind::NotFound => {
                    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
                    return Err(io_error("create a file", folder.unwrap_or(Path::new(".")), source));
                }
                Err(source) => return Err(io_error("create", &path, source)),
            };
            // Another process may have removed it as a file without a writer: then it has no name any more.
            let locked = try_lock(&file);
            let identity = FileIdentity::of(&file).map_err(|source| io_error("stat", &path, source));
            let temp = Self { file: Some(file), path, is_named: false };
            if !locked.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) && identity?.links() > 0
            {
                return Ok(temp);
            }
        }
        let path = path_of(0);
        Err(io_error("create", &path, io::Error::other("every name that was tried is taken")))
    }

    /// File `number` of a set, whose lock this one is. It is closed.
    pub(super) fn under(&self, number: usize) -> Result<Self> {
        // The number goes before the suffix.
        let mut name = self.path.file_stem().unwrap_or_default().to_owned();
        name.push(format!("-{number}{SUFFIX}"));
        let path = self.path.with_file_name(name);
        with_descriptor(|| folders::create_private(&path))
            .map_err(|source| io_error("create", &path, source))?;
        Ok(Self { file: None, path, is_named: false })
    }

    /// The file, while it is open.
    pub(super) fn file(&self) -> io::Result<&File> {
        self.file.as_ref().ok_or_else(|| io::Error::other("it is closed"))
    }

    /// The file, which is opened if it is closed.
    pub(super) fn opened(&mut self) -> Result<&File> {
        if self.file.is_none() {
            let file = with_descriptor(|| folders::open_private(&self.path));
            self.file = Some(file.map_err(|source| io_error("open", &self.path, source))?);
        }
        self.file().map_err(|source| io_error("open", &self.path, source))
    }

    /// Closes a file of a set, which messages call `shown`.
    pub(super) fn close(&mut self, shown: &Path) -> Result<()> {
        self.file.take().map_or(Ok(()), files::close).map_err(|source| io_error("close", shown, source))
    }

    /// Fails if the file system says, as a file is closed, that what was written is lost.
    pub(super) fn close_copy(&self, shown: &Path) -> Result<()> {
        self.file.iter().try_for_each(files::close_copy).map_err(|source| io_error("close", shown, source))
    }

    /// Sees to it that its bytes are on the disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        #[cfg(test)]
        super::crash_tests::step(super::crash_tests::Step::SyncFile(self.path.clone()));
        self.file()?.sync_all()
    }

    /// Makes it `len` bytes long, on blocks that are reserved where the file system can do that.
    /// `shown` is what messages call it.
    pub(super) fn allocate(&mut self, len: u64, shown: &Path) -> Result<()> {
        files::allocate(self.opened()?, len).map_err(|source| Error::Io {
            operation: "allocate",
            path: shown.to_owned(),
            tensor: None,
            range: ByteRange::at(0, len),
            source,
        })
    }

    /// Gives it its name, in place of a file that has it.
    pub(super) fn persist(mut self, path: &Path) -> Result<()> {
        self.close_copy(path)?;
        #[cfg(test)]
        super::crash_tests::step(super::crash_tests::Step::Rename(self.path.clone(), path.to_owned()));
        folders::rename(&self.path, path).map_err(|source| io_error("rename", path, source))?;
        self.is_named = true;
        Ok(())
    }

    /// Gives a file that is closed its name, unless a file has that: `false` then.
    pub(super) fn persist_new(&mut self, path: &Path) -> Result<bool> {
        #[cfg(test)]
        super::crash_tests::step(super::crash_tests::Step::Rename(self.path.clone(), path.to_owned()));
        match folders::rename_new(&self.path, path) {
            Ok(()) => {
                self.is_named = true;
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(source) => Err(io_error("rename", path, source)),
        }
    }

    /// Whether it has its name.
    pub(super) fn is_named(&self) -> bool {
        self.is_named
    }

    /// Takes back the name that [`persist_new`](Self::persist_new) gave it, if it did.
    pub(super) fn take_back(&mut self, path: &Path) {
        if self.is_named && folders::rename(path, &self.path).is_ok() {
            self.is_named = false;
        }
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if !self.is_named {
            // What stays is removed by the next save to the folder.
            let _ = fs::remove_file(&self.path);
        }
        self.file.iter().for_each(unlock);
    }
}

/// Removes the file if no process is writing it. An error if that is not known, or the file cannot be removed.
pub(super) fn remove_if_stale(path: &Path) -> io::Result<()> {
    if let Some(lock) = lock_of(path)? {
        // Without it, the process that wrote the set is gone, or about to remove this file too.
        return match OpenOptions::new().read(true).write(true).open(lock).map(|file| (try_lock(&file), file))
        {
            Ok((Err(error), _)) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Ok((Err(error), _)) => Err(error),
            Ok((Ok(()), file)) => {
                let removed = removed(path);
                unlock(&file);
                removed
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => removed(path),
            Err(error) => Err(error),
        };
    }
    // Network file systems lock what is open for writing alone.
    let removed =
        OpenOptions::new().read(true).write(true).open(path).and_then(|file| match try_lock(&file) {
            Ok(()) => {
                let removed = fs::remove_file(path);
                unlock(&file);
                removed
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        });
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn removed(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// The parts of the name of a temporary file: `.model.safetensors.hoistway-0123456789abcdef.tmp`, of a file of a set
/// `.model.safetensors.hoistway-0123456789abcdef-7.tmp`.
pub(super) struct TempName<'a> {
    /// Up to the random number.
    pub(super) prefix: &'a [u8],
    /// The number in the set, and what stands before it.
    number: &'a [u8],
}

impl<'a> TempName<'a> {
    /// `None` if a file is called otherwise.
    pub(super) fn of(name: &'a OsStr) -> Option<Self> {
        let stem =
            name.as_encoded_bytes().strip_suffix(SUFFIX.as_bytes()).filter(|stem| stem.starts_with(b"."))?;
        let prefix_len = stem.windows(MARK.len()).rposition(|window| window == MARK.as_bytes())? + MARK.len();
        let (prefix, rest) = stem.split_at(prefix_len);
        let (random, number) = rest.split_first_chunk::<16>()?;
        let is_number = match number {
            [] => true,
            [b'-', digits @ ..] => !digits.is_empty() && digits.iter().all(u8::is_ascii_digit),
            _ => false,
        };
        (is_number && random.iter().all(u8::is_ascii_hexdigit)).then_some(Self { prefix, number })
    }
}

/// The file that is locked for a file of a set; `None` for one that is locked itself. An error if it cannot be named.
fn lock_of(path: &Path) -> io::Result<Option<PathBuf>> {
    let Some(name) = path.file_name() else { return Ok(None) };
    let number = match TempName::of(name) {
        Some(temp) if !temp.number.is_empty() => temp.number,
        _ => return Ok(None),
    };
    let stem = name.to_str().and_then(|name| name.strip_suffix(SUFFIX));
    let stem = stem.ok_or_else(|| io::Error::other("its name is no text, so its lock is not known"))?;
    Ok(Some(path.with_file_name(format!("{}{SUFFIX}", &stem[..stem.len() - number.len()]))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn a_file_of_a_set_whose_lock_cannot_be_named_stays() {
        use std::os::unix::ffi::OsStrExt;
        let folder = tempfile::tempdir().unwrap();
        let name = OsStr::from_bytes(b".\xe6\xa8.hoistway-0123456789012345-7.tmp");
        fs::write(folder.path().join(name), "of a save that goes on").unwrap();
        remove_if_stale(&folder.path().join(name)).unwrap_err();
        assert!(folder.path().join(name).exists());
    }

    #[test]
    fn where_there_is_no_folder_the_error_names_it() {
        let folder = tempfile::tempdir().unwrap().path().join("none");
        let error = TempFile::new(|_| folder.join(".a.hoistway-0123456789012345.tmp")).unwrap_err();
        assert!(matches!(&error, Error::Io { path, .. } if *path == folder), "{error}");
    }

    #[test]
    fn a_set_is_stale_once_its_lock_is_free() {
        let folder = tempfile::tempdir().unwrap();
        let name = |end: &str| folder.path().join(format!(".a.hoistway-0123456789012345{end}.tmp"));
        let lock = TempFile::new(|_| name("")).unwrap();
        let file = lock.under(7).unwrap();
        let path = file.path.clone();
        assert_eq!(path, name("-7"));
        remove_if_stale(&path).unwrap();
        assert!(path.exists(), "its lock is held");
        unlock(lock.file().unwrap());
        remove_if_stale(&path).unwrap();
        assert!(!path.exists());
        drop(lock);
        fs::write(&path, "of a save that was killed").unwrap();
        remove_if_stale(&path).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_name_that_is_taken_is_not_given_again() {
        let folder = tempfile::tempdir().unwrap();
        let [taken, free] = ["taken", "free"].map(|name| folder.path().join(name));
        fs::write(&taken, "another's").unwrap();
        let mut temp = TempFile::new(|random| folder.path().join(random.to_string())).unwrap();
        assert!(!temp.persist_new(&taken).unwrap());
        assert_eq!(fs::read(&taken).unwrap(), b"another's");
        assert!(temp.persist_new(&free).unwrap());
        temp.take_back(&free);
        drop(temp);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
