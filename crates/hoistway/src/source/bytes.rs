//! Bytes that are in memory already.
#![forbid(unsafe_code)]

use super::{Extensions, Source};
use crate::{ByteRange, Cancel};
use hoistway_io::Error;
use std::{fmt, io, path::Path};

/// What messages call a source that has no name.
const NAME: &str = "<bytes>";

/// Bytes of any owner.
pub(crate) struct Bytes<T> {
    data: T,
    len: u64,
    extensions: Extensions,
}

impl<T: AsRef<[u8]>> Bytes<T> {
    pub(crate) fn new(data: T) -> Self {
        let len = data.as_ref().len() as u64;
        Self { data, len, extensions: Extensions::default() }
    }
}

impl<T: AsRef<[u8]> + Send + Sync + 'static> Source for Bytes<T> {
    fn path(&self) -> &Path {
        NAME.as_ref()
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn medium(&self) -> &'static str {
        "memory"
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64, _: &Cancel) -> io::Result<usize> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let left = self.data.as_ref().get(start..).unwrap_or_default();
        let count = left.len().min(buffer.len());
        buffer[..count].copy_from_slice(&left[..count]);
        Ok(count)
    }

    fn check_identity(&self, needed: ByteRange) -> hoistway_io::Result<()> {
        let (path, file_len) = (NAME.into(), self.data.as_ref().len() as u64);
        if file_len < needed.end() {
            return Err(Error::Truncated { path, needed, file_len });
        }
        if file_len != self.len {
            let change = format!("it had {} bytes and now has {file_len}", self.len);
            return Err(Error::Changed { path, needed, change });
        }
        Ok(())
    }

    fn extensions(&self) -> &Extensions {
        &self.extensions
    }
}

impl<T> fmt::Debug for Bytes<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bytes").field("len", &self.len).finish_non_exhaustive()
    }
}
