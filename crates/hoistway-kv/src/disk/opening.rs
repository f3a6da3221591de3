//! Opens names below a store's root that another user may have planted: follows no link, and waits for no FIFO.
#![forbid(unsafe_code)]

use super::{before_call, file::FileAccess};
use rustix::{
    fs::{FileType, Mode, OFlags, fcntl_setfl, fstat, lstat},
    io::{Errno, retry_on_intr},
};
use std::{fmt, fs::File, io, path::Path};

/// What a name is that a store expects to be something else. The source of the [`io::Error`] that openings return.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is {}, not {expected}: remove it, and let no other user write to the store's directories", Article(*.found))]
pub(crate) struct UnexpectedKind {
    expected: &'static str,
    pub(crate) found: FileType,
}

const REGULAR: &str = "a regular file";
const DIRECTORY: &str = "a directory";

struct Article(FileType);

impl fmt::Display for Article {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            FileType::RegularFile => REGULAR,
            FileType::Directory => DIRECTORY,
            FileType::Symlink => "a symbolic link",
            FileType::Fifo => "a FIFO",
            FileType::Socket => "a socket",
            FileType::CharacterDevice | FileType::BlockDevice => "a device",
            FileType::Unknown => "of a kind that is not known",
        })
    }
}

/// Opens a regular file. A new one is for its owner alone (0600).
///
/// # Errors
/// The system's; an [`UnexpectedKind`] in an [`io::Error`] if the name is no regular file.
pub(crate) fn open_regular(path: &Path, access: FileAccess) -> io::Result<File> {
    let flags = match access {
        FileAccess::Read => OFlags::RDONLY,
        FileAccess::ReadWrite => OFlags::RDWR,
        FileAccess::CreateNew => OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
    };
    before_call(path);
    let always = OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = match retry_on_intr(|| rustix::fs::open(path, flags | always, Mode::RUSR | Mode::WUSR)) {
        Ok(opened) => opened,
        // The kinds that an opening itself refuses.
        Err(errno @ (Errno::LOOP | Errno::ISDIR | Errno::NXIO | Errno::NODEV)) => {
            expect(path, FileType::RegularFile)?;
            return Err(errno.into());
        }
        Err(errno) => return Err(errno.into()),
    };
    let found = FileType::from_raw_mode(fstat(&opened)?.st_mode);
    if found != FileType::RegularFile {
        return Err(unexpected(FileType::RegularFile, found));
    }
    // A ring returns EAGAIN for reads of a file that is not to block.
    fcntl_setfl(&opened, OFlags::empty())?;
    Ok(File::from(opened))
}

/// Whether an opening failed as the name is of another kind.
pub(crate) fn is_unexpected_kind(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|source| source.is::<UnexpectedKind>())
}

/// Returns an error unless a name is a directory itself, rather than a link to one.
///
/// # Errors
/// The system's; an [`UnexpectedKind`] in an [`io::Error`].
pub(crate) fn expect_directory(path: &Path) -> io::Result<()> {
    expect(path, FileType::Directory)
}

fn expect(path: &Path, expected: FileType) -> io::Result<()> {
    before_call(path);
    let found = FileType::from_raw_mode(lstat(path)?.st_mode);
    if found == expected { Ok(()) } else { Err(unexpected(expected, found)) }
}

fn unexpected(expected: FileType, found: FileType) -> io::Error {
    let expected = if expected == FileType::Directory { DIRECTORY } else { REGULAR };
    io::Error::other(UnexpectedKind { expected, found })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::CWD;
    use std::{fs, os::unix::fs::symlink};

    fn found(result: io::Result<impl fmt::Debug>) -> FileType {
        let error = result.unwrap_err();
        let kind = error.get_ref().and_then(|source| source.downcast_ref::<UnexpectedKind>());
        kind.unwrap_or_else(|| panic!("{error:?}")).found
    }

    #[test]
    fn only_regular_files_are_opened() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        fs::write(path("file"), "bytes").unwrap();
        fs::create_dir(path("directory")).unwrap();
        symlink(path("file"), path("link")).unwrap();
        rustix::fs::mknodat(CWD, path("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
        for access in [FileAccess::Read, FileAccess::ReadWrite] {
            open_regular(&path("file"), access).unwrap();
            assert_eq!(found(open_regular(&path("link"), access)), FileType::Symlink);
            assert_eq!(found(open_regular(&path("fifo"), access)), FileType::Fifo);
            assert_eq!(found(open_regular(&path("directory"), access)), FileType::Directory);
            assert_eq!(found(open_regular(&path("socket"), access)), FileType::Socket);
            assert_eq!(found(open_regular(Path::new("/dev/null"), access)), FileType::CharacterDevice);
        }
        let new = open_regular(&path("fifo"), FileAccess::CreateNew).unwrap_err();
        assert_eq!(new.kind(), io::ErrorKind::AlreadyExists);
        let text = open_regular(&path("fifo"), FileAccess::Read).unwrap_err().to_string();
        assert!(text.starts_with("it is a FIFO, not a regular file"), "{text}");
    }

    #[test]
    fn an_opened_file_blocks_as_a_ring_needs_it() {
        let root = tempfile::tempdir().unwrap();
        let file = open_regular(&root.path().join("file"), FileAccess::CreateNew).unwrap();
        assert!(!rustix::fs::fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));
    }

    #[test]
    fn a_link_to_a_directory_is_no_directory() {
        let root = tempfile::tempdir().unwrap();
        let link = root.path().join("link");
        symlink(root.path(), &link).unwrap();
        expect_directory(root.path()).unwrap();
        assert_eq!(found(expect_directory(&link)), FileType::Symlink);
    }
}
