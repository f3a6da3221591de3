//! A file with the bytes of blocks, open for direct and for buffered transfers.
#![forbid(unsafe_code)]

use super::opening::open_regular;
use hoistway_device::{RegisteredFile, Unavailable};
use hoistway_io::file::{Access, DirectFile, FileUse, open_direct};
use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::OnceLock,
};

/// Whether a file is only read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileAccess {
    Read,
    ReadWrite,
    /// Read and write; it must not be there, and is made, for its owner alone (0600).
    CreateNew,
}

/// An open file.
#[derive(Debug)]
pub(crate) struct DataFile {
    path: PathBuf,
    buffered: File,
    /// The same file, opened past the page cache, or why that is refused.
    direct: Result<DirectFile, Unavailable>,
    /// Set when a direct transfer was refused although opening was not.
    direct_failed: OnceLock<Unavailable>,
    /// The file as the library of devices knows it, for both directions, once it was asked for.
    registered: OnceLock<Result<RegisteredFile, Unavailable>>,
    /// Set when that library failed to move bytes although it took the file.
    registered_failed: OnceLock<Unavailable>,
}

impl DataFile {
    /// Opens a file, once with `O_DIRECT` where the file system allows it.
    pub(crate) fn open(path: &Path, access: FileAccess) -> io::Result<Self> {
        let file_use = match access {
            FileAccess::Read => FileUse::Read,
            FileAccess::ReadWrite | FileAccess::CreateNew => FileUse::ReadWrite,
        };
        Ok(Self::of(path, open_regular(path, access)?, file_use))
    }

    fn of(path: &Path, buffered: File, file_use: FileUse) -> Self {
        let direct = open_direct(&buffered, file_use);
        Self {
            path: path.to_owned(),
            buffered,
            direct,
            direct_failed: OnceLock::new(),
            registered: OnceLock::new(),
            registered_failed: OnceLock::new(),
        }
    }

    /// A file that has nothing but a name, for tests whose disk is simulated.
    #[cfg(test)]
    pub(crate) fn in_name_only(path: &Path) -> io::Result<Self> {
        let null = File::options().read(true).write(true).open("/dev/null")?;
        Ok(Self::of(path, null, FileUse::ReadWrite))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn buffered(&self) -> &File {
        &self.buffered
    }

    /// The file past the page cache, or why there is no such way.
    pub(crate) fn direct(&self) -> Result<&DirectFile, &Unavailable> {
        match self.direct_failed.get() {
            Some(why) => Err(why),
            None => self.direct.as_ref(),
        }
    }

    /// The file as the library of devices knows it, or why that does not take it.
    pub(crate) fn registered(&self) -> Result<&RegisteredFile, &Unavailable> {
        if let Some(why) = self.registered_failed.get() {
            return Err(why);
        }
        let register = || {
            let direct = self.direct().map_err(Clone::clone)?;
            RegisteredFile::register(&direct.file)
        };
        self.registered.get_or_init(register).as_ref()
    }

    /// The library of devices failed to move bytes: from now on those of this file go by way of host memory.
    pub(crate) fn refuse_registered(&self, why: &Unavailable) {
        let _ = self.registered_failed.set(why.clone());
    }

    /// The descriptor for a transfer that was planned when `access` was allowed.
    pub(crate) fn descriptor(&self, access: Access) -> &File {
        match (access, &self.direct) {
            (Access::Direct, Ok(direct)) => &direct.file,
            _ => &self.buffered,
        }
    }

    /// A direct transfer was refused: from now on this file goes through the page cache.
    pub(crate) fn refuse_direct(&self, error: &io::Error) {
        let reason = format!("the file system refused a direct transfer: {error}");
        let fix = "use a file system that supports O_DIRECT".into();
        let _ = self.direct_failed.set(Unavailable { reason, fix });
    }
}
