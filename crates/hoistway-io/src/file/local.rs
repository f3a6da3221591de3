//! A file of this machine: its two descriptors, and what each can do.
#![forbid(unsafe_code)]

use super::{
    FileIdentity, FileSystem, FileUse, Held, OpenFile, Probe, Residency, descriptor::Descriptor, direct,
};
use crate::{Alignment, ByteRange, sys};
use hoistway_device::Unavailable;
use once_cell::race::OnceBox;
use std::{
    fs::File,
    io,
    path::Path,
    sync::{Arc, Mutex},
};

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
    /// A part of a file in memory that had no hole when that was asked last.
    without_hole: Mutex<ByteRange>,
}

impl LocalFile {
    /// Finds out what can be done with an open file that lies on `filesystem`.
    pub fn new(open: Arc<OpenFile>, filesystem: FileSystem) -> Self {
        let (direct, direct_failed, probe) = (OnceBox::new(), OnceBox::new(), OnceBox::new());
        let without_hole = Mutex::default();
        let local = Self { open, filesystem, direct, direct_failed, probe, without_hole };
        // Finding the probe may bring the first page into the cache, so it is done before the first question about
        // pages.
        local.probe();
        local
    }

    /// Returns where it lies.
    pub fn absolute_path(&self) -> &Path {
        self.open.absolute_path()
    }

    /// Returns its identity when it was opened.
    pub fn identity(&self) -> FileIdentity {
        self.open.identity
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

    /// Returns whether the page cache is known to hold all of `range`, as [`Probe::is_whole`] does. Of a file in memory, the last
    /// answer is kept, since the system looks at every page up to the next hole. A hole that is made later changes the file's times.
    pub fn is_whole(&self, range: ByteRange) -> bool {
        let Ok(file) = self.open.file() else { return false };
        match self.probe() {
            probe @ Probe::Memory => {
                probe.is_resident(&file, range)
                    || self.has_no_hole(range, |offset| sys::files::first_hole(&file, offset))
            }
            probe => probe.is_whole(&file, range),
        }
    }

    fn has_no_hole(&self, range: ByteRange, first_hole: impl FnOnce(u64) -> io::Result<u64>) -> bool {
        // In a child of `fork`, it may be locked for ever.
        let mut known = self.without_hole.try_lock().ok();
        if let Some(known) = &known
            && known.start() <= range.start()
            && range.start() < known.end()
        {
            return range.end() <= known.end();
        }
        let Ok(hole) = first_hole(range.start()) else { return false };
        if let (Some(known), Some(found)) = (&mut known, ByteRange::new(range.start(), hole)) {
            **known = found;
        }
        range.end() <= hole
    }

    /// Returns whether reads find the file open, as far as it was opened.
    pub fn stays_open(&self) -> bool {
        let direct = self.direct.get().and_then(|direct| direct.as_ref().ok());
        self.open.is_kept() && direct.is_none_or(Descriptor::is_kept)
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
    fn reads_of_a_file_in_memory_look_for_its_next_hole_once() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = Arc::new(OpenFile::open(file.path()).unwrap());
        let filesystem = FileSystem::of(&open.file().unwrap()).unwrap();
        let local = LocalFile::new(open, filesystem);
        let asked = std::cell::RefCell::new(Vec::new());
        // Holes from 100 to 200, and from 1000 on, where the file ends.
        let first_hole = |offset| {
            asked.borrow_mut().push(offset);
            match offset {
                0..100 => Ok(100),
                100..200 => Ok(offset),
                200..1000 => Ok(1000),
                _ => Err(io::Error::other("beyond the end")),
            }
        };
        for start in (0..1100).step_by(10) {
            let range = ByteRange::at(start, 10).unwrap();
            let is_whole = start < 100 || (200..1000).contains(&start);
            assert_eq!(local.has_no_hole(range, first_hole), is_whole, "{range}");
        }
        // In the holes, the system answers without a search.
        let searches = asked.borrow().iter().filter(|&&at| at < 100 || (200..1000).contains(&at)).count();
        assert_eq!(searches, 2, "{asked:?}");
        let across = ByteRange::new(990, 1010).unwrap();
        assert!(!local.has_no_hole(across, first_hole));
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
