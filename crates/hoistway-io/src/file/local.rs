//! A file of this machine: its two descriptors, and what each can do.
#![forbid(unsafe_code)]

use super::{FileSystem, FileUse, Held, OpenFile, Probe, Residency, descriptor::Descriptor, direct};
use crate::{Alignment, ByteRange, sys};
use hoistway_device::Unavailable;
use once_cell::race::OnceBox;
use std::{fs::File, io, sync::Arc};

/// An open file to read from.
#[derive(Debug)]
pub struct LocalFile {
    open: Arc<OpenFile>,
    filesystem: FileSystem,
    /// The file for direct reads, once that was asked for. No thread waits for another that opens it: a child of `fork`
    /// lacks the threads of its parent.
    direct: OnceBox<Result<Descriptor, Unavailable>>,
    /// Set when a direct read was refused although opening was not.
    direct_failed: OnceBox<Unavailable>,
    /// How the page cache is asked, once that was found out.
    probe: OnceBox<Probe>,
}

impl LocalFile {
    /// Finds out what can be done with an open file that lies on `filesystem`.
    pub fn new(open: Arc<OpenFile>, filesystem: FileSystem) -> Self {
        let (direct, direct_failed, probe) = (OnceBox::new(), OnceBox::new(), OnceBox::new());
        let local = Self { open, filesystem, direct, direct_failed, probe };
        // Finding the probe may bring the first page into the cache, so it is done before the first question about
        // pages.
        local.probe();
        local
    }

    /// Returns the file system that the file lies on.
    pub fn filesystem(&self) -> FileSystem {
        self.filesystem
    }

    /// Returns how the page cache is asked. While the file cannot be opened, that is not known.
    pub fn probe(&self) -> Probe {
        self.probe_by(|| Ok(Probe::find(&*self.open.file()?)))
    }

    fn probe_by(&self, find: impl FnOnce() -> io::Result<Probe>) -> Probe {
        let found = self.probe.get_or_try_init(|| find().map(Box::new));
        found.map_or_else(|error| Probe::None(Unavailable::new(error.to_string(), "")), Clone::clone)
    }

    /// Returns the number of the device that the file lies on.
    pub fn device(&self) -> u64 {
        self.open.identity.device()
    }

    /// Returns the file's number on its file system.
    pub fn inode(&self) -> u64 {
        self.open.identity.inode()
    }

    /// Returns the length when it was opened.
    pub fn len_bytes(&self) -> u64 {
        self.open.identity.len()
    }

    /// Returns the length of reads that the file system prefers.
    pub fn preferred_bytes(&self) -> u64 {
        self.open.file().map_or(Alignment::BLOCK.bytes(), |file| sys::files::preferred_bytes(&file))
    }

    /// Returns the bytes that the page cache holds, if that can be known.
    pub fn cached_bytes(&self) -> Option<u64> {
        self.probe().cached_bytes(&*self.open.file().ok()?, self.len_bytes())
    }

    /// Returns what the page cache holds of `range`.
    pub fn residency(&self, range: ByteRange) -> Residency {
        self.open.file().map_or(Residency::Cold, |file| self.probe().ask(&file, range))
    }

    /// Returns the file for reads through the page cache.
    ///
    /// # Errors
    /// The system's, if it was closed and cannot be opened again.
    pub fn buffered_file(&self) -> io::Result<Held<'_>> {
        self.open.file()
    }

    /// Returns the file for direct reads, even if some were refused.
    ///
    /// # Errors
    /// [`Unsupported`](io::ErrorKind::Unsupported) if there is none; the system's, if it was closed and cannot be opened again.
    pub fn direct_file(&self) -> io::Result<Held<'_>> {
        let unsupported = |why: &Unavailable| io::Error::new(io::ErrorKind::Unsupported, why.to_string());
        let direct = self.direct()?.as_ref().map_err(unsupported)?;
        direct.held(|| self.open_direct()?.map_err(|why| unsupported(&why)))
    }

    /// The file for direct reads, which the first calls open: the first of them that is done has opened it for all.
    ///
    /// # Errors
    /// The system's, which may pass: the next call opens the file again.
    fn direct(&self) -> io::Result<&Result<Descriptor, Unavailable>> {
        self.direct_by(|| self.open_direct())
    }

    fn direct_by(
        &self,
        open: impl FnOnce() -> io::Result<Result<File, Unavailable>>,
    ) -> io::Result<&Result<Descriptor, Unavailable>> {
        self.direct.get_or_try_init(|| Ok(Box::new(open()?.map(Descriptor::new))))
    }

    fn open_direct(&self) -> io::Result<Result<File, Unavailable>> {
        let direct = direct::open_on(&*self.open.file()?, self.filesystem, FileUse::Read)?;
        Ok(direct.map(|direct| direct.file))
    }

    /// Returns why direct reads cannot be used, or `None` if they can. Where the file cannot be opened now, reads say why.
    pub fn direct_refusal(&self) -> Option<&Unavailable> {
        self.direct_failed.get().or_else(|| self.direct().ok()?.as_ref().err())
    }

    /// Returns why rings cannot be used, or `None` if they can.
    pub fn ring_refusal(&self) -> Option<Unavailable> {
        self.filesystem.ring_refusal()
    }

    /// Notes that a direct read was refused: from now on this file is read through the page cache.
    pub fn refuse_direct(&self, why: Unavailable) {
        let _ = self.direct_failed.set(Box::new(why));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_the_page_cache_is_asked_is_looked_for_again_where_the_file_could_not_be_opened() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = Arc::new(OpenFile::open(file.path()).unwrap());
        let filesystem = FileSystem::of(&open.file().unwrap()).unwrap();
        let local = LocalFile { probe: OnceBox::new(), ..LocalFile::new(open, filesystem) };
        let none_left = || Err(io::Error::other("no descriptor is left"));
        assert!(
            matches!(local.probe_by(none_left), Probe::None(why) if why.reason.contains("no descriptor"))
        );
        assert_eq!(local.probe_by(|| Ok(Probe::Nowait)), Probe::Nowait);
        assert_eq!(local.probe_by(none_left), Probe::Nowait);
    }

    #[test]
    fn who_opens_a_file_for_direct_reads_is_not_waited_for() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = Arc::new(OpenFile::open(file.path()).unwrap());
        let filesystem = FileSystem::of(&open.file().unwrap()).unwrap();
        let local = LocalFile::new(open, filesystem);
        let refused = |why: &str| Ok(Err(Unavailable::new(why, "")));
        // What the system lacks for a moment is no refusal.
        assert!(local.direct_by(|| Err(io::Error::other("no descriptor is left"))).is_err());
        // The second call stands for that of a child that was forked during the first.
        let first = local.direct_by(|| {
            assert_eq!(local.direct_by(|| refused("second")).unwrap().as_ref().unwrap_err().reason, "second");
            refused("first")
        });
        assert_eq!(first.unwrap().as_ref().unwrap_err().reason, "second");
    }
}
