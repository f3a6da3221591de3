//! Descriptors of files that are read for long: they stay open as long as the process may have enough of them, and are
//! opened for their reads alone beyond that.
#![forbid(unsafe_code)]

use crate::sys::machine;
use std::{
    fs::File,
    io,
    ops::Deref,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// The part of the process's descriptors that files keep. As many are for the reads in flight of others, and the rest is
/// for the rest of the program.
const KEPT_PART: u64 = 4;
/// The limit of open files that is assumed where the system does not tell it: what most systems begin with.
const USUAL_LIMIT: u64 = 1024;

/// Descriptors that files keep now.
static KEPT: AtomicU64 = AtomicU64::new(0);

/// A file that is open.
#[derive(Debug)]
pub enum Held<'a> {
    /// It stays open.
    Kept(&'a Arc<File>),
    /// It is closed once its last user is gone.
    Opened(Arc<File>),
}

impl Deref for Held<'_> {
    type Target = File;

    fn deref(&self) -> &File {
        match self {
            Self::Kept(file) => file,
            Self::Opened(file) => file,
        }
    }
}

/// A file that can be opened again.
#[derive(Debug)]
pub(super) struct Descriptor {
    kept: Option<Kept>,
    /// The file, while some read has it.
    opened: Mutex<Weak<File>>,
}

/// A file that stays open, and its part of [`KEPT`].
#[derive(Debug)]
struct Kept {
    file: Arc<File>,
    is_counted: bool,
}

impl Descriptor {
    /// A file that is closed if the process keeps as many open as it should.
    pub(super) fn new(file: File) -> Self {
        let kept = KEPT.fetch_add(1, Ordering::Relaxed);
        if kept < most_kept(kept + 1) {
            return Self {
                kept: Some(Kept { file: Arc::new(file), is_counted: true }),
                opened: Mutex::default(),
            };
        }
        KEPT.fetch_sub(1, Ordering::Relaxed);
        Self { kept: None, opened: Mutex::default() }
    }

    /// A file that cannot be opened again.
    pub(super) fn only(file: File) -> Self {
        Self { kept: Some(Kept { file: Arc::new(file), is_counted: false }), opened: Mutex::default() }
    }

    pub(super) fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// The file, which `open` opens if it is closed.
    pub(super) fn held(&self, open: impl FnOnce() -> io::Result<File>) -> io::Result<Held<'_>> {
        if let Some(kept) = &self.kept {
            return Ok(Held::Kept(&kept.file));
        }
        // A thread that finds another at it opens the file for itself: no child of `fork` waits for a thread of its parent.
        let mut opened = self.opened.try_lock();
        if let Ok(opened) = &opened
            && let Some(file) = opened.upgrade()
        {
            return Ok(Held::Opened(file));
        }
        let file = Arc::new(open()?);
        if let Ok(opened) = &mut opened {
            **opened = Arc::downgrade(&file);
        }
        Ok(Held::Opened(file))
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.is_counted {
            KEPT.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// As many descriptors as files may keep, at least one. If that is less than `wanted`, the limit of the process is raised to what it may
/// be: no sooner, as the program's children have it too. No child of `fork` waits for a thread of its parent that does it.
fn most_kept(wanted: u64) -> u64 {
    static MOST: AtomicU64 = AtomicU64::new(0);
    static IS_RAISED: AtomicBool = AtomicBool::new(false);
    let look = || {
        let limit = machine::open_files().map_or(Some(USUAL_LIMIT), |limit| limit.current);
        let most = limit.map_or(u64::MAX, |limit| limit / KEPT_PART).max(1);
        // Another thread may have looked later.
        MOST.fetch_max(most, Ordering::Relaxed).max(most)
    };
    let mut most = match MOST.load(Ordering::Relaxed) {
        0 => look(),
        most => most,
    };
    if most < wanted {
        if IS_RAISED.load(Ordering::Acquire) {
            // Another thread may have raised it since.
            most = MOST.load(Ordering::Relaxed);
        } else {
            machine::raise_open_files();
            most = look();
            IS_RAISED.store(true, Ordering::Release);
        }
    }
    most
}

/// Returns how many reads may be in flight, as each may have opened its file for itself: at least one. Where so many are `wanted`, the
/// process is let have more files open if it may.
pub fn most_reads(wanted: usize) -> usize {
    usize::try_from(most_kept(wanted as u64)).unwrap_or(usize::MAX)
}

/// Opens a file or a folder. If the process has as many open as it may, it is let have more if that is possible; else the error says
/// what helps.
///
/// # Errors
/// Those of `open`.
pub fn with_descriptor<T>(open: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let again = |error: io::Error| {
        if !machine::is_out_of_descriptors(&error) {
            return Err(error);
        }
        machine::raise_open_files();
        open().map_err(explained)
    };
    open().or_else(again)
}

/// An error of opening a file, with what helps if the process has too many open.
fn explained(error: io::Error) -> io::Error {
    if !machine::is_out_of_descriptors(&error) {
        return error;
    }
    let limit = machine::open_files().ok().and_then(|limit| limit.current);
    let limit = limit.map_or_else(String::new, |limit| format!(" ({limit})"));
    let reason = format!("{error}: the process has as many files open as it may{limit}; raise ulimit -n");
    io::Error::new(error.kind(), reason)
}
