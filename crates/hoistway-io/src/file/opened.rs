//! A file that stays open: it cannot be replaced, and a rewrite is noticed.
#![forbid(unsafe_code)]

use super::{
    FileIdentity, Held,
    descriptor::{Descriptor, with_descriptor},
};
use crate::{ByteRange, Error, Result, sys};
use arc_swap::ArcSwap;
use std::{
    fs::File,
    io,
    path::{self, Path, PathBuf},
    sync::Arc,
};

/// An open regular file, and its identity when it was opened.
#[derive(Debug)]
pub struct OpenFile {
    /// The path that it was opened by.
    pub path: PathBuf,
    /// The same from the root on: where it is found again once the working directory is another.
    absolute_path: PathBuf,
    /// The file itself, for reads through the page cache.
    file: Descriptor,
    /// Its identity when it was opened.
    pub identity: FileIdentity,
    has_writer: bool,
    /// Without a lock, which a child of `fork` might find taken.
    names: ArcSwap<Names>,
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
        Self { identity, name: sys::files::name(file) }
    }
}

impl OpenFile {
    /// Opens a regular file.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::NotRegular`]; [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self> {
        // Before it is opened: opening a device may do something.
        let found = sys::files::irregular_path(path).map_err(|source| Error::opening(path, source))?;
        check_regular(found, path)?;
        let opened = with_descriptor(|| sys::files::open_without_waiting(path));
        let (file, has_writer) = opened.map_err(|source| Error::opening(path, source))?;
        Ok(Self { has_writer, ..Self::new(file, path, Descriptor::new)? })
    }

    /// Takes ownership of an open file, which must be a regular one.
    ///
    /// # Errors
    /// [`Error::NotRegular`]; [`Error::Io`].
    pub fn from_file(file: File, path: &Path) -> Result<Self> {
        Self::new(file, path, Descriptor::only)
    }

    fn new(file: File, path: &Path, keep: impl FnOnce(File) -> Descriptor) -> Result<Self> {
        let stat = |source| Error::Io { operation: "stat", path: path.to_owned(), range: None, source };
        check_regular(sys::files::irregular(&file).map_err(stat)?, path)?;
        let identity = FileIdentity::of(&file).map_err(stat)?;
        let names = ArcSwap::from_pointee(Names::of(&file, identity));
        // Without a working directory, a relative path is all there is.
        let absolute_path = path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let (path, file) = (path.to_owned(), keep(file));
        Ok(Self { path, absolute_path, file, identity, has_writer: false, names })
    }

    /// Returns whether a program had it open for writing when it was opened, on a system where a rewrite may not be noticed
    /// then.
    pub fn has_writer(&self) -> bool {
        self.has_writer
    }

    pub(super) fn is_kept(&self) -> bool {
        self.file.is_kept()
    }

    /// The file itself, for reads through the page cache. Where a process has very many, it is opened again.
    ///
    /// # Errors
    /// The system's; that another file has its name by now.
    pub fn file(&self) -> io::Result<Held<'_>> {
        self.file.held(|| {
            let file = self.open_again()?;
            let now = FileIdentity::of(&file)?;
            if (now.device(), now.inode()) == (self.identity.device(), self.identity.inode()) {
                return Ok(file);
            }
            let reason = "another file has taken its name, and it was closed, as the process may have few files open: \
                          raise ulimit -n";
            Err(io::Error::other(reason))
        })
    }

    /// Fails if the file was replaced or rewritten since it was opened. The error names the bytes that were `needed`.
    ///
    /// # Errors
    /// [`Error::Truncated`]; [`Error::Changed`]; [`Error::Io`].
    pub fn check_unchanged(&self, needed: ByteRange) -> Result<()> {
        // Also of another file that has its name by now.
        let now = self.file.held(|| self.open_again()).and_then(|file| FileIdentity::of(&file));
        self.check_identity(now, needed)
    }

    fn open_again(&self) -> io::Result<File> {
        Ok(with_descriptor(|| sys::files::open_without_waiting(&self.absolute_path))?.0)
    }

    /// Does what [`check_unchanged`](Self::check_unchanged) does, with an identity that the caller has queried.
    ///
    /// # Errors
    /// [`Error::Truncated`]; [`Error::Changed`]; [`Error::Io`].
    pub fn check_identity(&self, now: io::Result<FileIdentity>, needed: ByteRange) -> Result<()> {
        let now = now.map_err(|source| self.io_error("stat", source))?;
        let Some(change) = self.change(&now) else { return Ok(()) };
        let (path, file_len) = (self.path.clone(), now.len());
        Err(if file_len < needed.end() {
            Error::Truncated { path, needed, file_len }
        } else {
            Error::Changed { path, needed, change }
        })
    }

    /// Describes what is different `now`. `None` if its bytes are the same.
    ///
    /// A file that gets another name, loses one or is replaced keeps its bytes, and its change time moves. Such a change
    /// is accepted once: from then on, its new change time counts.
    fn change(&self, now: &FileIdentity) -> Option<String> {
        // Also what a thread asked before another accepted a change.
        if self.identity == *now {
            return None;
        }
        let mut known = self.names.load_full();
        if !known.identity.is_touched(now) {
            return known.identity.change(now);
        }
        let renamed = self.file().map_or(Names { identity: *now, name: None }, |file| Names::of(&file, *now));
        let renamed = Arc::new(renamed);
        loop {
            let is_renamed = renamed.identity.links() != known.identity.links() || renamed.name != known.name;
            if !is_renamed || !known.identity.is_touched(now) {
                return known.identity.change(now);
            }
            let before = self.names.compare_and_swap(&known, renamed.clone());
            if Arc::ptr_eq(&before, &known) {
                return None;
            }
            // Another thread has seen a change of the names meanwhile.
            known = Arc::clone(&before);
        }
    }

    /// The path that it was opened by, from the root on: it leads to the same file once the working directory is another.
    pub fn absolute_path(&self) -> &Path {
        &self.absolute_path
    }

    /// The error of an operation on the file.
    pub fn io_error(&self, operation: &'static str, source: io::Error) -> Error {
        Error::Io { operation, path: self.path.clone(), range: None, source }
    }
}

fn check_regular(irregular: Option<&'static str>, path: &Path) -> Result<()> {
    irregular.map_or(Ok(()), |kind| Err(Error::NotRegular { path: path.to_owned(), kind }))
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
        // Windows lets no writer in later.
        let writer = File::options().write(true).open(&path).unwrap();
        let open_file = OpenFile::open(&path).unwrap();
        let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
        tick(&open_file);
        change(&path);
        writer.set_modified(modified).unwrap();
        open_file.check_unchanged(ByteRange::default())
    }

    /// Waits until a change of a file would move its times: the clock of a file system is coarse.
    fn tick(open_file: &OpenFile) {
        let changed = |file: &File| FileIdentity::of(file).unwrap().changed_ns;
        let changed_at = changed(&open_file.file().unwrap());
        let mut probe = tempfile::tempfile_in(open_file.path.parent().unwrap()).unwrap();
        let begin = std::time::Instant::now();
        while changed(&probe) <= changed_at {
            assert!(begin.elapsed().as_secs() < 60, "the clock of the file system stands still");
            std::thread::sleep(std::time::Duration::from_millis(1));
            probe.write_all(b".").unwrap();
        }
    }

    fn rewrite(path: &Path) {
        File::options().write(true).open(path).unwrap().write_all(&[8; 64]).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn a_fifo_that_takes_the_place_of_a_file_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.safetensors");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        // As if it had been a file when `open` looked.
        let (file, _) = sys::files::open_without_waiting(&path).unwrap();
        let found = OpenFile::from_file(file, &path);
        assert!(matches!(&found, Err(Error::NotRegular { kind, .. }) if kind.contains("FIFO")), "{found:?}");
    }

    #[test]
    fn a_rewritten_file_is_changed_although_its_modification_time_is_set_back() {
        let error = found_after(rewrite).unwrap_err();
        assert!(matches!(&error, Error::Changed { change, .. } if change.contains("change time")), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn new_permissions_look_like_a_rewrite_and_the_error_says_so() {
        let read_only = |path: &Path| {
            let mut permissions = std::fs::metadata(path).unwrap().permissions();
            permissions.set_readonly(true);
            std::fs::set_permissions(path, permissions).unwrap();
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
            let writer = File::options().write(true).open(&path).unwrap();
            let open_file = OpenFile::open(&path).unwrap();
            tick(&open_file);
            change(&path);
            for _ in 0..2 {
                open_file.check_unchanged(ByteRange::default()).expect(what);
            }
            tick(&open_file);
            (&writer).write_all(&[8; 64]).unwrap();
            writer.set_modified(modified).unwrap();
            let found = open_file.check_unchanged(ByteRange::default());
            assert!(matches!(found, Err(Error::Changed { .. })), "{what}: {found:?}");
        }
    }
}
