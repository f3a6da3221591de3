//! Every kind of sources, and what it opens. A new one is a file beside this one and a line here.
#![forbid(unsafe_code)]

use super::{Source, SourceName, local::Local, name::scheme_of};
use crate::{
    Error, Result,
    catalog::{OpenFile, OpenOptions},
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};
use windlass_io::file::FileSystem;

/// Takes a file that lies on this file system, if it is of the kind.
type Take = fn(&Arc<OpenFile>, FileSystem) -> Option<Arc<dyn Source>>;
/// The URLs of one scheme.
struct Scheme {
    name: &'static str,
    open: fn(&str, &OpenOptions) -> Result<Arc<dyn Source>>,
    /// The files in a folder.
    list: fn(&str, &OpenOptions) -> Result<Vec<PathBuf>>,
}

/// The kinds of files that are more than local ones.
static FILES: &[Take] = &[
    #[cfg(target_os = "linux")]
    super::threefs::take,
];

/// The schemes of URLs.
static SCHEMES: &[Scheme] = &[
    #[cfg(feature = "objects")]
    Scheme { name: "s3", open: super::objects::open, list: super::objects::list },
    #[cfg(feature = "objects")]
    Scheme { name: "https", open: super::objects::open, list: super::objects::list },
    #[cfg(feature = "objects")]
    Scheme { name: "http", open: super::objects::open, list: super::objects::list },
    #[cfg(feature = "fault-injection")]
    Scheme { name: "toy", open: |url, _| crate::toy::open_source(url), list: |_, _| Ok(Vec::new()) },
];

/// Opens the source of this name: a path, or a URL.
///
/// # Errors
/// [`Error::NotFound`], [`Error::InvalidFile`] if it is no regular file, [`Error::Io`]; [`Error::InvalidOption`] if no
/// source has the scheme of the URL.
pub(crate) fn open(name: &Path, options: &OpenOptions) -> Result<Arc<dyn Source>> {
    match SourceName::from(name) {
        SourceName::Path(path) => of_file(OpenFile::open(&path)?),
        SourceName::Url(url) => (scheme(&url)?.open)(&url, options),
    }
}

/// The files in the folder of this name. `None` if the name is a path of this machine, or the URL of a file.
///
/// # Errors
/// Those of [`open`].
pub(crate) fn list(name: &Path, options: &OpenOptions) -> Result<Option<Vec<PathBuf>>> {
    match SourceName::from(name) {
        SourceName::Url(url) if url.ends_with('/') => (scheme(&url)?.list)(&url, options).map(Some),
        _ => Ok(None),
    }
}

fn scheme(url: &str) -> Result<&'static Scheme> {
    let name = scheme_of(url).unwrap_or_default();
    SCHEMES.iter().find(|own| own.name == name).ok_or_else(|| {
        let known: String =
            SCHEMES.iter().map(|own| format!(", or a URL that begins with {}://", own.name)).collect();
        let reason = format!("no source has the scheme '{name}'; give a path of this machine{known}");
        // What follows may be secret.
        let value = url.split('?').next().unwrap_or_default().to_owned();
        Error::InvalidOption { option: "path", value, reason }
    })
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
