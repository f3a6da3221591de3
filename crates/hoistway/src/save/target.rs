//! One file that is being written: its plan, its descriptors, and how it may be written.
#![forbid(unsafe_code)]

use super::{SaveOptions, content::TensorData, plan::PlannedFile, temp::TempFile};
use crate::{ByteRange, DirectIo, Error, Result, Route, route::Unavailable};
use bytesize::ByteSize;
use hoistway_io::file::{FileUse, open_direct};
use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::OnceLock,
};

/// Files below this length are not worth the drive's wait.
const MIN_DIRECT_BYTES: u64 = 1 << 20;

/// One file that is being written, and is open.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) plan: PlannedFile,
    pub(super) temp: TempFile,
    /// What messages call it: the name that it will have.
    pub(super) path: PathBuf,
    /// A second descriptor for direct writes.
    pub(super) direct: Option<File>,
    /// Why there is none.
    pub(super) refused: Option<Unavailable>,
    /// Set when a direct write was refused although opening was not.
    pub(super) direct_failed: OnceLock<Unavailable>,
}

impl Target {
    /// A file of the planned length, without its bytes.
    pub(super) fn new(
        plan: PlannedFile,
        mut temp: TempFile,
        path: PathBuf,
        options: &SaveOptions,
    ) -> Result<Self> {
        let (direct, refused) = match open_for_direct(temp.opened()?, plan.len(), options) {
            Ok(direct) => (Some(direct), None),
            Err(why) => (None, Some(why)),
        };
        let refused = refused.filter(|_| options.direct != DirectIo::Never);
        if let (Some(why), DirectIo::Always) = (&refused, options.direct) {
            return Err(refuse_direct(&path, &why.reason));
        }
        Ok(Self { plan, temp, path, direct, refused, direct_failed: OnceLock::new() })
    }

    /// The descriptor for direct writes, as long as these are taken.
    pub(super) fn direct(&self) -> Option<&File> {
        self.direct.as_ref().filter(|_| self.direct_failed.get().is_none())
    }

    /// A failure at the first byte of `range`.
    pub(super) fn error(&self, tensors: &[TensorData<'_>], range: ByteRange, source: io::Error) -> Error {
        let tensor = self.plan.tensor_at(range.start()).map(|tensor| tensors[tensor].name.to_owned());
        Error::Io { operation: "write", path: self.path.clone(), tensor, range: Some(range), source }
    }
}

/// A descriptor for direct writes, or why there is to be none.
fn open_for_direct(file: &File, len: u64, options: &SaveOptions) -> Result<File, Unavailable> {
    let unwanted = match options.direct {
        DirectIo::Never => Some("they are not wanted".to_owned()),
        DirectIo::Auto if !options.sync => {
            Some("the save does not wait for the disk, and the page cache takes it faster".to_owned())
        }
        DirectIo::Auto if len < MIN_DIRECT_BYTES => {
            Some(format!("files below {} are not worth it", ByteSize(MIN_DIRECT_BYTES)))
        }
        DirectIo::Auto | DirectIo::Always => None,
    };
    if let Some(reason) = unwanted {
        return Err(Unavailable::new(reason, ""));
    }
    open_direct(file, FileUse::ReadWrite).map(|direct| direct.file)
}

/// The error where direct writes were asked for and are refused.
pub(super) fn refuse_direct(path: &Path, reason: &str) -> Error {
    let why = Unavailable::new(reason, "set direct to auto or never");
    Error::RouteUnavailable { route: Route::OF_SAVES, path: Some(path.to_owned()), why }
}
