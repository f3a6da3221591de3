//! An object in a store, or a file of a web server. It is pinned when it is opened: each answer is compared with that version.
#![forbid(unsafe_code)]

use super::{Extensions, Latency, Source, SourceName};
use crate::{ByteRange, Error, Result, catalog::OpenOptions};
use std::{
    any::Any,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, atomic::AtomicBool},
};
use windlass_objects::{Object, Problem};

/// The name that the files of a web server's folder begin with: such folders cannot be listed.
const INDEX: &str = "model.safetensors.index.json";
const WHOLE: &str = "model.safetensors";
/// Bytes that are read at once of a header that goes on past the first answer: twice as many each time.
const MAX_AHEAD_BYTES: usize = 8 << 20;

/// An object.
#[derive(Debug)]
pub(crate) struct ObjectSource {
    object: Object,
    ahead: Mutex<Ahead>,
    extensions: Extensions,
}

/// Bytes that came before they were wanted: those of the header.
#[derive(Default)]
struct Ahead {
    start: u64,
    bytes: Vec<u8>,
}

impl std::fmt::Debug for Ahead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ahead").field("start", &self.start).field("len", &self.bytes.len()).finish()
    }
}

/// Opens an object by its URL.
pub(super) fn open(url: &str, options: &OpenOptions) -> Result<Arc<dyn Source>> {
    let (object, head) =
        Object::open_with_head(url, &options.store.clone().unwrap_or_default()).map_err(failed("open"))?;
    let ahead = Mutex::new(Ahead { start: 0, bytes: head });
    Ok(Arc::new(ObjectSource { object, ahead, extensions: Extensions::default() }))
}

/// The files in a folder. Of a web server's, its index or its only file.
pub(super) fn list(url: &str, options: &OpenOptions) -> Result<Vec<PathBuf>> {
    let folder = SourceName::Url(url.to_owned());
    let names = if url.starts_with("s3:") {
        let listed = windlass_objects::list(url, &options.store.clone().unwrap_or_default());
        listed.map_err(failed("list"))?
    } else {
        match open(&format!("{url}{INDEX}"), options) {
            Ok(_) => vec![INDEX.to_owned()],
            Err(Error::NotFound { .. }) => vec![WHOLE.to_owned()],
            Err(error) => return Err(error),
        }
    };
    Ok(names.iter().map(|name| folder.beside(name)).collect())
}

fn failed(operation: &'static str) -> impl Fn(windlass_objects::Error) -> Error {
    move |error| {
        let windlass_objects::Error { url, problem, .. } = error;
        match problem {
            Problem::Invalid(reason) => Error::InvalidOption { option: "path", value: url, reason },
            problem @ Problem::NotFound { .. } => {
                Error::NotFound { path: url.into(), reason: problem.to_string() }
            }
            problem => {
                let source = io::Error::new(problem.kind(), problem);
                Error::Io { operation, path: url.into(), tensor: None, range: None, source }
            }
        }
    }
}

impl ObjectSource {
    /// The source as an object, if it is one.
    pub(crate) fn of(source: &Arc<dyn Source>) -> Option<&Self> {
        let source: &dyn Any = &**source;
        source.downcast_ref()
    }

    /// The object.
    pub(crate) fn object(&self) -> &Object {
        &self.object
    }

    /// Frees what was read of the header.
    pub(crate) fn forget_head(&self) {
        if let Ok(mut ahead) = self.ahead.try_lock() {
            *ahead = Ahead::default();
        }
    }

    /// Reads from the store, until `stop` is set. Returns how many bytes came: fewer at the end alone.
    pub(crate) fn read(&self, buffer: &mut [u8], offset: u64, stop: &AtomicBool) -> io::Result<usize> {
        // The error of the load has the URL and the range.
        let read = self.object.read(offset, buffer, stop);
        read.map_err(|error| io::Error::new(error.problem.kind(), error.problem))
    }
}

impl Ahead {
    /// Copies what it has of the bytes from `offset` on.
    fn copy(&self, buffer: &mut [u8], offset: u64) -> usize {
        let start = offset.checked_sub(self.start).and_then(|start| usize::try_from(start).ok());
        let own = start.and_then(|start| self.bytes.get(start..)).unwrap_or_default();
        let count = own.len().min(buffer.len());
        buffer[..count].copy_from_slice(&own[..count]);
        count
    }
}

impl Source for ObjectSource {
    fn path(&self) -> &Path {
        self.object.url().as_ref()
    }

    fn len(&self) -> u64 {
        self.object.len()
    }

    fn medium(&self) -> &'static str {
        "an object store"
    }

    fn latency(&self) -> Latency {
        Latency::Remote
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let never = AtomicBool::new(false);
        // A reader that finds another at it asks the store: no child of `fork` waits for a thread of its parent.
        if let Ok(mut ahead) = self.ahead.try_lock() {
            let count = ahead.copy(buffer, offset);
            let end = ahead.start + ahead.bytes.len() as u64;
            if count > 0 || offset != end || end == 0 || buffer.len() >= MAX_AHEAD_BYTES {
                if count > 0 || buffer.is_empty() {
                    return Ok(count);
                }
            } else {
                // What reads on where the last bytes ended is a header.
                let len = (ahead.bytes.len() * 2).clamp(buffer.len(), MAX_AHEAD_BYTES);
                let mut bytes = vec![0; len];
                let count = self.read(&mut bytes, offset, &never)?;
                bytes.truncate(count);
                *ahead = Ahead { start: offset, bytes };
                return Ok(ahead.copy(buffer, offset));
            }
        }
        self.read(buffer, offset, &never)
    }

    fn check_identity(&self, needed: ByteRange) -> windlass_io::Result<()> {
        // Each answer was compared before its bytes were taken.
        match self.object.change() {
            None => Ok(()),
            Some(change) => {
                let (path, change) = (self.path().to_owned(), change.to_owned());
                Err(windlass_io::Error::Changed { path, needed, change })
            }
        }
    }

    fn extensions(&self) -> &Extensions {
        &self.extensions
    }
}
