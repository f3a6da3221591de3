//! Every kind of sources, and what it opens. A new one is a file beside this one and a line here.
#![forbid(unsafe_code)]

use super::{Source, SourceName, local::Local, name::scheme_of};
use crate::{Error, Result, catalog::OpenFile};
use std::{path::Path, sync::Arc};
use windlass_io::file::FileSystem;

/// Takes a file that lies on this file system, if it is of the kind.
type Take = fn(&Arc<OpenFile>, FileSystem) -> Option<Arc<dyn Source>>;
/// Opens a URL.
type Open = fn(&str) -> Result<Arc<dyn Source>>;

/// The kinds of files that are more than local ones.
static FILES: &[Take] = &[
    #[cfg(target_os = "linux")]
    super::threefs::take,
];

/// The schemes of URLs.
static SCHEMES: &[(&str, Open)] = &[
    #[cfg(feature = "fault-injection")]
    ("toy", crate::toy::open_source),
];

/// Opens the source of this name: a path, or a URL.
///
/// # Errors
/// [`Error::NotFound`], [`Error::InvalidFile`] if it is no regular file, [`Error::Io`]; [`Error::InvalidOption`] if no
/// source has the scheme of the URL.
pub(crate) fn open(name: &Path) -> Result<Arc<dyn Source>> {
    let SourceName::Url(url) = SourceName::from(name) else { return of_file(OpenFile::open(name)?) };
    let scheme = scheme_of(&url).unwrap_or_default();
    match SCHEMES.iter().find(|(own, _)| *own == scheme) {
        Some((_, open)) => open(&url),
        None => {
            let known: String =
                SCHEMES.iter().map(|(own, _)| format!(", or a URL that begins with {own}://")).collect();
            let reason = format!("no source has the scheme '{scheme}'; give a path of this machine{known}");
            Err(Error::InvalidOption { option: "path", value: url, reason })
        }
    }
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
