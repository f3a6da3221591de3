//! A file on a 3FS, which the kernel reads as well. Once USRBIO reads it, the thread of the mount asks about it and closes
//! it: a daemon that hangs holds up no other.
#![forbid(unsafe_code)]

use super::{Extensions, Latency, Source, local::Local};
use crate::{ByteRange, Cancel, catalog::OpenFile, route::OpenMount, sys::files};
use arc_swap::ArcSwapOption;
use hoistway_io::file::{FileIdentity, FileSystem, FileSystemKind, LocalFile};
use std::{
    any::Any,
    io,
    path::Path,
    sync::{Arc, mpsc},
};

/// DeepSeek's 3FS, mounted by FUSE.
const THREEFS: FileSystem = FileSystem { name: "3fs", kind: FileSystemKind::Fuse };

/// A file on a 3FS.
#[derive(Debug)]
pub(crate) struct ThreeFs {
    // Dropped in this order.
    local: Arc<Local>,
    /// Tells the thread that closes the file that its turn has come.
    held: Option<mpsc::Sender<()>>,
    /// The 3FS that it was last read from by USRBIO. No lock, which a child of `fork` could wait for.
    mount: ArcSwapOption<OpenMount>,
}

/// Takes a file that lies on a 3FS.
pub(super) fn take(open: &Arc<OpenFile>, filesystem: FileSystem) -> Option<Arc<dyn Source>> {
    // Only FUSE file systems are asked: to others the question may mean something else.
    let Ok(file) = open.file() else { return None };
    let is_3fs = filesystem.kind == FileSystemKind::Fuse && hoistway_usrbio::is_3fs(&*file);
    is_3fs.then(|| Arc::new(ThreeFs::new(open.clone())) as Arc<dyn Source>)
}

impl ThreeFs {
    pub(super) fn new(open: Arc<OpenFile>) -> Self {
        let local = Arc::new(Local::new(open, THREEFS));
        Self { local, held: None, mount: ArcSwapOption::empty() }
    }

    /// The source as a file on a 3FS, if it is one.
    pub(crate) fn of(source: &Arc<dyn Source>) -> Option<&Self> {
        let source: &dyn Any = &**source.inner().unwrap_or(source);
        source.downcast_ref()
    }

    /// The file as the kernel reads it.
    pub(crate) fn file(&self) -> &LocalFile {
        self.local.file()
    }

    /// Its path, whatever the working directory is.
    pub(crate) fn absolute_path(&self) -> &Path {
        self.local.open.absolute_path()
    }

    /// Keeps a mount open as long as this file: the next load finds it so.
    pub(crate) fn keep_mount(&self, mount: &Arc<OpenMount>) {
        self.mount.store(Some(mount.clone()));
    }

    fn mount(&self) -> Option<Arc<OpenMount>> {
        self.mount.load_full()
    }
}

impl Source for ThreeFs {
    fn path(&self) -> &Path {
        self.local.path()
    }

    fn len(&self) -> u64 {
        self.local.len()
    }

    fn medium(&self) -> &'static str {
        self.local.medium()
    }

    fn latency(&self) -> Latency {
        self.local.latency()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64, cancel: &Cancel) -> io::Result<usize> {
        self.local.read_at(buffer, offset, cancel)
    }

    fn check_identity(&self, needed: ByteRange) -> hoistway_io::Result<()> {
        let Some(mount) = self.mount() else { return self.local.check_identity(needed) };
        let open = self.local.open.clone();
        let asked = mount.ask("asking about a file", move || FileIdentity::of(&*open.file()?));
        let now = asked.and_then(|identity| identity);
        // What an error of the system means there: that the mount has no daemon any more, if so.
        let explain = |error| if files::is_server_gone(&error) { mount.death(&error) } else { error };
        self.local.open.check_identity(now.map_err(explain), needed)
    }

    fn as_local(&self) -> Option<&LocalFile> {
        Some(self.file())
    }

    fn extensions(&self) -> &Extensions {
        // They are dropped before the file is closed, by the same thread.
        self.local.extensions()
    }
}

impl Drop for ThreeFs {
    fn drop(&mut self) {
        if let Some(mount) = self.mount() {
            // A daemon that hangs would be waited for. So the other thread closes: once this file's own hold is gone.
            let (held, gone) = mpsc::channel();
            self.held = Some(held);
            let local = self.local.clone();
            mount.later(move || {
                let _ = gone.recv();
                drop(local);
            });
        }
    }
}
