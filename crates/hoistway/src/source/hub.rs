//! A file of a model on the hub of Hugging Face: an object, or the file of this machine that the hub's own client keeps. Its
//! commit is found out when it is opened, and is a part of its name from then on.
#![forbid(unsafe_code)]

use super::{Extensions, Latency, Source, SourceName, objects, registry};
use crate::{
    ByteRange, Cancel, Result,
    catalog::{OpenFile, OpenOptions},
};
use hoistway_io::file::LocalFile;
use hoistway_objects::{HubCommits, HubFile};
use std::{io, path::Path, path::PathBuf, sync::Arc};

/// A file in the cache of the hub's client, by the name that it has on the hub: other files of its model lie beside that.
#[derive(Debug)]
struct Cached {
    file: Arc<dyn Source>,
    url: PathBuf,
}

/// Opens a file of a model by its URL.
pub(super) fn open(url: &str, options: &OpenOptions) -> Result<Arc<dyn Source>> {
    let store = options.store.clone().unwrap_or_default();
    match HubFile::find(url, &store, options.cancel_token().flag()).map_err(objects::failed("open"))? {
        HubFile { url, cached: None } => objects::open(&url, options),
        HubFile { url, cached: Some(path) } => {
            Ok(Arc::new(Cached { file: registry::of_file(OpenFile::open(&path)?)?, url: url.into() }))
        }
    }
}

/// Names of one opening, those of models on the hub with their commit.
pub(super) fn pinned(names: &[&Path], options: &OpenOptions) -> Result<Vec<PathBuf>> {
    let (store, stop) = (options.store.clone().unwrap_or_default(), options.cancel_token());
    let mut commits = HubCommits::default();
    let pin = |name: &&Path| match SourceName::from(*name) {
        SourceName::Url(url) if url.starts_with("hf://") => {
            Ok(commits.pin(&url, &store, stop.flag()).map_err(objects::failed("open"))?.into())
        }
        _ => Ok(name.to_path_buf()),
    };
    names.iter().map(pin).collect()
}

impl Source for Cached {
    fn path(&self) -> &Path {
        &self.url
    }

    fn len(&self) -> u64 {
        self.file.len()
    }

    fn medium(&self) -> &'static str {
        self.file.medium()
    }

    fn latency(&self) -> Latency {
        self.file.latency()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64, cancel: &Cancel) -> io::Result<usize> {
        self.file.read_at(buffer, offset, cancel)
    }

    fn version(&self) -> Option<&str> {
        // Its name has the commit.
        Some("")
    }

    fn check_identity(&self, needed: ByteRange) -> hoistway_io::Result<()> {
        self.file.check_identity(needed)
    }

    fn caveat(&self) -> Option<String> {
        self.file.caveat()
    }

    #[cfg(target_os = "linux")]
    fn inner(&self) -> Option<&Arc<dyn Source>> {
        Some(&self.file)
    }

    fn as_local(&self) -> Option<&LocalFile> {
        self.file.as_local()
    }

    fn extensions(&self) -> &Extensions {
        self.file.extensions()
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::source::threefs::ThreeFs;

    #[test]
    fn a_file_in_the_cache_is_on_the_file_system_of_the_cache() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let threefs: Arc<dyn Source> = Arc::new(ThreeFs::new(OpenFile::open(file.path()).unwrap().into()));
        let cached: Arc<dyn Source> = Arc::new(Cached { file: threefs, url: "hf://a/b/c".into() });
        assert_eq!(ThreeFs::of(&cached).unwrap().absolute_path(), file.path());
    }
}
