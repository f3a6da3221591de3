//! Every kind of sources, and what it opens. A new one is a file beside this one and a line here.
#![forbid(unsafe_code)]

use super::{Source, SourceName, local::Local, name::scheme_of};
use crate::{
    ByteRange, Error, Result,
    catalog::{FormatError, OpenFile, OpenOptions},
    memory,
};
use hoistway_io::file::FileSystem;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// Takes a file that lies on this file system, if it is of the kind.
type Take = fn(&Arc<OpenFile>, FileSystem) -> Option<Arc<dyn Source>>;
/// The URLs of one scheme.
struct Scheme {
    name: &'static str,
    open: fn(&str, &OpenOptions) -> Result<Arc<dyn Source>>,
    is_folder: fn(&str) -> bool,
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
    objects("s3"),
    #[cfg(feature = "objects")]
    objects("gs"),
    #[cfg(feature = "objects")]
    objects("az"),
    #[cfg(feature = "objects")]
    objects("abfs"),
    #[cfg(feature = "objects")]
    objects("abfss"),
    #[cfg(feature = "objects")]
    Scheme { open: super::hub::open, is_folder: hoistway_objects::is_folder, ..objects("hf") },
    #[cfg(feature = "objects")]
    Scheme { list: super::objects::list_web, ..objects("https") },
    #[cfg(feature = "objects")]
    Scheme { list: super::objects::list_web, ..objects("http") },
    #[cfg(feature = "fault-injection")]
    Scheme {
        name: "toy",
        open: |url, _| crate::toy::open_source(url),
        is_folder: ends_with_slash,
        list: |_, _| Ok(Vec::new()),
    },
];

/// The objects of a store.
#[cfg(feature = "objects")]
const fn objects(name: &'static str) -> Scheme {
    Scheme { name, open: super::objects::open, is_folder: ends_with_slash, list: super::objects::list }
}

#[cfg(any(feature = "objects", feature = "fault-injection"))]
fn ends_with_slash(url: &str) -> bool {
    url.ends_with('/')
}

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

/// The names of one opening, with what may change meanwhile replaced by what it is now: revisions of models on the hub by
/// their commits, so that all files are of one commit. One name alone is resolved when it is opened.
///
/// # Errors
/// Those of [`open`].
pub(crate) fn pinned(names: &[&Path], options: &OpenOptions) -> Result<Vec<PathBuf>> {
    #[cfg(feature = "objects")]
    if names.len() > 1 {
        return super::hub::pinned(names, options);
    }
    let _ = options;
    Ok(names.iter().map(|name| (*name).to_owned()).collect())
}

/// The files in the folder of this name. `None` if the name is a path of this machine, or the URL of a file.
///
/// # Errors
/// Those of [`open`].
pub(crate) fn list(name: &Path, options: &OpenOptions) -> Result<Option<Vec<PathBuf>>> {
    match SourceName::from(name) {
        SourceName::Path(_) => Ok(None),
        SourceName::Url(url) => {
            let scheme = scheme(&url)?;
            (scheme.is_folder)(&url).then(|| (scheme.list)(&url, options)).transpose()
        }
    }
}

/// All bytes of a small file in the folder of this source. `None` if it is not there.
///
/// # Errors
/// Those of [`open`]; [`Error::InvalidFile`] if it has more than `most_bytes`; those of reading it.
pub(crate) fn read_beside(
    name: &SourceName,
    file: &str,
    most_bytes: u64,
    options: &OpenOptions,
) -> Result<Option<Vec<u8>>> {
    let source = match open(&name.beside(file), options) {
        Err(Error::NotFound { .. }) => return Ok(None),
        opened => opened?,
    };
    let len = source.len();
    if len > most_bytes {
        let problem = FormatError::TooLong { len, most: most_bytes };
        return Err(Error::InvalidFile { path: source.path().to_owned(), problem });
    }
    let mut text = memory::zeroed(len, "memory for a small file")?;
    let read = source.read_exactly(&mut text, 0, None, &options.cancel_token());
    source.check_unchanged(ByteRange::default(), |_| None)?;
    read.map(|()| Some(text))
}

fn scheme(url: &str) -> Result<&'static Scheme> {
    let name = scheme_of(url).unwrap_or_default();
    SCHEMES.iter().find(|scheme| scheme.name == name).ok_or_else(|| {
        let known: Vec<_> = SCHEMES.iter().map(|own| format!("{}://", own.name)).collect();
        let url = match known.is_empty() {
            true => String::new(),
            false => format!(", or a URL that begins with one of {}", known.join(", ")),
        };
        let reason = format!("there is no scheme '{name}'; give a path of this machine{url}");
        // What follows may be secret: a password, or a signature in the query.
        Error::InvalidOption { option: "path", value: format!("{name}://..."), reason }
    })
}

/// The source that an open file is.
///
/// # Errors
/// The system's, if it does not say where the file lies.
pub(crate) fn of_file(open: OpenFile) -> Result<Arc<dyn Source>> {
    let filesystem = open.file().and_then(|file| FileSystem::of(&file));
    let filesystem = filesystem.map_err(|source| open.io_error("statfs", source))?;
    let open = Arc::new(open);
    let special = FILES.iter().find_map(|take| take(&open, filesystem));
    Ok(special.unwrap_or_else(|| Arc::new(Local::new(open, filesystem))))
}
