//! A file as a source of bytes, with what 3FS and cuFile know of it.
#![forbid(unsafe_code)]

use super::{OpenMount, Unavailable, threefs};
use crate::{ByteRange, Error, Result, catalog::OpenFile, device::CuFileHandle, sys};
use std::{
    io,
    ops::Deref,
    sync::{Arc, OnceLock, PoisonError, RwLock, mpsc},
};
use windlass_io::file::{FileIdentity, LocalFile};

/// One open file of a checkpoint.
#[derive(Debug)]
pub(crate) struct SourceFile {
    file: Arc<LocalFile>,
    /// Dropped after `file` and before `mount`: tells the thread that closes the file that its turn has come.
    held: Option<mpsc::Sender<()>>,
    /// The file as cuFile knows it, once it was asked for.
    cufile: OnceLock<Result<CuFileHandle, Unavailable>>,
    /// The 3FS that it was last read from by USRBIO. A child of `fork` can read it, also if a thread of its parent was
    /// about to.
    mount: RwLock<Option<Arc<OpenMount>>>,
}

impl SourceFile {
    /// Finds out what can be done with an open file.
    pub(crate) fn new(open: Arc<OpenFile>) -> Result<Self> {
        let filesystem =
            threefs::filesystem_of(&open.file).map_err(|source| open.io_error("statfs", source))?;
        let file = Arc::new(LocalFile::new(open, filesystem));
        Ok(Self { file, held: None, cufile: OnceLock::new(), mount: RwLock::default() })
    }

    /// Keeps a mount of 3FS open as long as this file: the next load finds it so.
    #[cfg(target_os = "linux")]
    pub(crate) fn keep_mount(&self, mount: &Arc<OpenMount>) {
        let mut kept = self.mount.write().unwrap_or_else(PoisonError::into_inner);
        let before = kept.replace(mount.clone());
        drop(kept);
        // To close a mount takes time.
        drop(before);
    }

    /// Whether it lies on a 3FS, which USRBIO can read.
    #[cfg(target_os = "linux")]
    pub(crate) fn is_on_3fs(&self) -> bool {
        threefs::is_3fs(self.filesystem())
    }

    /// What an error of the system means on a 3FS that the file was read from: that it has no daemon any more, if so.
    fn explain(&self, error: io::Error) -> io::Error {
        match self.mount() {
            Some(mount) if sys::files::is_server_gone(&error) => mount.death(&error),
            _ => error,
        }
    }

    /// The file as cuFile knows it, or why it does not take it.
    pub(crate) fn cufile(&self) -> Result<&CuFileHandle, Unavailable> {
        let register = || CuFileHandle::register(self.opened_for_direct().map_err(Clone::clone)?);
        self.cufile.get_or_init(register).as_ref().map_err(Clone::clone)
    }

    /// Fails if the file is no longer what it was when its header was read. `needed` are the bytes at stake,
    /// `tensor_at` gives the tensor that holds one of them.
    pub(crate) fn check_unchanged(
        &self,
        needed: ByteRange,
        tensor_at: impl FnOnce(u64) -> Option<String>,
    ) -> Result<()> {
        let now = match self.mount() {
            Some(mount) => {
                let open = self.open_file().clone();
                let asked = mount.ask("asking about a file", move || FileIdentity::of(&open.file));
                asked.and_then(|identity| identity)
            }
            None => FileIdentity::of(self.buffered_file()),
        };
        let now = now.map_err(|error| self.explain(error));
        self.open_file().check_identity(now, needed).map_err(|error| Error::of_file(error, tensor_at))
    }

    fn mount(&self) -> Option<Arc<OpenMount>> {
        self.mount.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Deref for SourceFile {
    type Target = LocalFile;

    fn deref(&self) -> &LocalFile {
        &self.file
    }
}

impl Drop for SourceFile {
    fn drop(&mut self) {
        if let Some(mount) = self.mount() {
            // A daemon that hangs would be waited for. So the other thread closes: once this file's own hold is gone.
            let (held, gone) = mpsc::channel();
            self.held = Some(held);
            let file = self.file.clone();
            mount.later(move || {
                let _ = gone.recv();
                drop(file);
            });
        }
    }
}
