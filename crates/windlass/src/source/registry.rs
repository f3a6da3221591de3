//! Every kind of sources, and what it opens.
#![forbid(unsafe_code)]

use super::{Source, local::Local};
use crate::{Result, catalog::OpenFile};
use std::{path::Path, sync::Arc};
use windlass_io::file::FileSystem;

/// Takes a file that lies on this file system, if it is of the kind.
type Take = fn(&Arc<OpenFile>, FileSystem) -> Option<Arc<dyn Source>>;

/// The kinds of files that are more than local ones.
static FILES: &[Take] = &[
    #[cfg(target_os = "linux")]
    super::threefs::take,
];

/// Opens the source at `path`.
///
/// # Errors
/// [`Error::NotFound`](crate::Error::NotFound), [`Error::InvalidFile`](crate::Error::InvalidFile) if it is no regular
/// file, or [`Error::Io`](crate::Error::Io).
pub(crate) fn open(path: &Path) -> Result<Arc<dyn Source>> {
    of_file(OpenFile::open(path)?)
}

/// The source that an open file is.
///
/// # Errors
/// The system's, if it does not say where the file lies.
pub(crate) fn of_file(open: OpenFile) -> Result<Arc<dyn Source>> {
    let filesystem = FileSystem::of(&open.file).map_err(|source| open.io_error("statfs", source))?;
    let open = Arc::new(open);
    let special = FILES.iter().find_map(|take| take(&open, filesystem));
    Ok(special.unwrap_or_else(|| Arc::new(Local::new(open, filesystem))))
}
