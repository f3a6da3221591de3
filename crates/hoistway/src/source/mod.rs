//! Where the bytes of a file come from. A kind of sources is a file here and, if it is not a plain local file, a line in
//! `registry`.
#![forbid(unsafe_code)]

mod bytes;
#[cfg(test)]
mod conformance;
mod extensions;
#[cfg(feature = "objects")]
mod hub;
mod local;
mod name;
#[cfg(feature = "objects")]
pub(crate) mod objects;
pub(crate) mod registry;
#[cfg(target_os = "linux")]
pub(crate) mod threefs;

pub(crate) use bytes::Bytes;
pub(crate) use extensions::Extensions;
pub use name::SourceName;

use crate::{ByteRange, Cancel, Error, Result, Route, catalog::gguf::ByteSource};
use hoistway_device::Unavailable;
use hoistway_io::file::{LocalFile, Residency};
use once_cell::race::OnceBox;
#[cfg(target_os = "linux")]
use std::sync::Arc;
use std::{any::Any, fmt, io, path::Path};

/// One open file of a checkpoint.
pub(crate) trait Source: Any + fmt::Debug + Send + Sync {
    /// Its name in messages: its path, or the text of its URL.
    fn path(&self) -> &Path;

    /// Length in bytes when it was opened.
    fn len(&self) -> u64;

    /// The file system or store of its bytes, such as `ext4`.
    fn medium(&self) -> &'static str;

    /// How long its reads take to answer.
    fn latency(&self) -> Latency {
        Latency::Local
    }

    /// Reads bytes from `offset` on, and waits for them, until `cancel` ends that. Returns how many came: 0 at the end.
    ///
    /// # Errors
    /// The system's.
    fn read_at(&self, buffer: &mut [u8], offset: u64, cancel: &Cancel) -> io::Result<usize>;

    /// Frees data that was kept for reading its header, which ends at byte `end`.
    fn header_was_read(&self, _end: u64) {}

    /// Forgets what was kept of its header, which is invalid.
    fn header_is_invalid(&self) {}

    /// Fails if its bytes may be others than when it was opened. `needed` are the bytes at stake.
    ///
    /// # Errors
    /// [`Truncated`](hoistway_io::Error::Truncated); [`Changed`](hoistway_io::Error::Changed);
    /// [`Io`](hoistway_io::Error::Io).
    fn check_identity(&self, needed: ByteRange) -> hoistway_io::Result<()>;

    /// What tells this version of it from others, if it is no file of this machine by its own name.
    fn version(&self) -> Option<&str> {
        None
    }

    /// What keeps a rewrite of it from being noticed for certain, for reports.
    fn caveat(&self) -> Option<String> {
        None
    }

    /// The source of which it is another name.
    #[cfg(target_os = "linux")]
    fn inner(&self) -> Option<&Arc<dyn Source>> {
        None
    }

    /// The file of this machine that it is, for routes that read by file descriptors. What the file can do is found out by
    /// the first call.
    fn as_local(&self) -> Option<&LocalFile> {
        None
    }

    /// The state that routes keep about it. The source drops it before it closes its file.
    fn extensions(&self) -> &Extensions;
}

/// How long the reads of a source take to answer, however fast they are in bulk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Latency {
    /// As long as those of this machine.
    Local,
    /// As long as those of a server elsewhere.
    Remote,
}

impl dyn Source + '_ {
    /// The file of this machine that it is.
    ///
    /// # Errors
    /// That it is none.
    pub(crate) fn local(&self) -> Result<&LocalFile, Unavailable> {
        self.as_local().ok_or_else(|| not_local().clone())
    }

    /// The same, for a route that needs it.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`].
    pub(crate) fn local_for(&self, route: Route) -> Result<&LocalFile> {
        let path = || Some(self.path().to_owned());
        self.local().map_err(|why| Error::RouteUnavailable { route, path: path(), why })
    }

    /// Why direct reads cannot be used, or `None` if they can.
    pub(crate) fn direct_refusal(&self) -> Option<&Unavailable> {
        self.as_local().map_or_else(|| Some(not_local()), LocalFile::direct_refusal)
    }

    /// Notes that a direct read was refused: from now on this source is read without any.
    pub(crate) fn refuse_direct(&self, why: Unavailable) {
        if let Some(local) = self.as_local() {
            local.refuse_direct(why);
        }
    }

    /// The part of `range` that the page cache holds.
    pub(crate) fn residency(&self, range: ByteRange) -> Residency {
        self.as_local().map_or(Residency::Cold, |local| local.residency(range))
    }

    /// Fails if the source is no longer what it was when its header was read. `needed` are the bytes at stake,
    /// `tensor_at` gives the tensor that holds one of them.
    pub(crate) fn check_unchanged(
        &self,
        needed: ByteRange,
        tensor_at: impl FnOnce(u64) -> Option<String>,
    ) -> Result<()> {
        self.check_identity(needed).map_err(|error| match error {
            hoistway_io::Error::Io { operation, path, source, .. } => {
                let tensor = tensor_at(needed.start());
                Error::Io { operation, path, tensor, range: Some(needed), source }
            }
            error => Error::of_file(error, tensor_at),
        })
    }

    /// Fills `buffer` with the bytes from `offset` on, which are those of `tensor` if it is one's.
    ///
    /// # Errors
    /// [`Error::Truncated`] or [`Error::Changed`] if that is why they cannot be read; [`Error::Cancelled`]; [`Error::Io`].
    pub(crate) fn read_exactly(
        &self,
        buffer: &mut [u8],
        offset: u64,
        tensor: Option<&str>,
        cancel: &Cancel,
    ) -> Result<()> {
        let range = ByteRange::at(offset, buffer.len() as u64).unwrap_or_default();
        self.until(cancel).read_exact_at(buffer, offset).map_err(|error| match cancel.is_cancelled() {
            true => Error::Cancelled,
            false => self.read_error(range, tensor, error),
        })
    }

    /// Its bytes, for a reader that `cancel` ends.
    pub(crate) fn until<'a>(&'a self, cancel: &'a Cancel) -> Until<'a, Self> {
        Until { source: self, cancel }
    }

    /// The error of a failed read of `range`. A source that was cut or rewritten explains it better than the system does.
    pub(crate) fn read_error(&self, range: ByteRange, tensor: Option<&str>, source: io::Error) -> Error {
        let tensor = tensor.map(str::to_owned);
        match self.check_unchanged(range, |_| tensor.clone()) {
            Err(changed) => changed,
            Ok(()) => {
                let path = self.path().to_owned();
                Error::Io { operation: "read", path, tensor, range: Some(range), source }
            }
        }
    }
}

fn not_local() -> &'static Unavailable {
    static NOT_LOCAL: OnceBox<Unavailable> = OnceBox::new();
    let make = || Unavailable::new("it is not a file of this machine", "choose route auto or threads");
    NOT_LOCAL.get_or_init(|| Box::new(make()))
}

/// The bytes of a source, until a token ends their reading.
pub(crate) struct Until<'a, S: ?Sized> {
    source: &'a S,
    cancel: &'a Cancel,
}

impl ByteSource for Until<'_, dyn Source + '_> {
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.source.len())
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            let at = offset.saturating_add(filled as u64);
            match self.source.read_at(&mut buffer[filled..], at, self.cancel) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted && !self.cancel.is_cancelled() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
