//! Limits of the drive: reads and writes of one file past the page cache, by many threads.

use crate::failure::Failure;
use hoistway_kv::Buffer;
use rustix::{
    fs::{Advice, Mode, OFlags, fadvise, open},
    io::{Errno, pread, pwrite},
};
use std::{
    fs::{self, File},
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Instant,
};

const THREADS: usize = 16;
const BLOCK: u64 = 4096;

/// A file to measure with.
pub(super) struct Limit {
    path: PathBuf,
    file: OwnedFd,
    piece: u64,
    pieces: u64,
}

impl Limit {
    /// A file of so many bytes, read and written in pieces of `piece` bytes, rounded up to whole pages.
    pub(super) fn new(path: &Path, bytes: u64, piece: u64) -> Result<Self, Failure> {
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let file = match open(path, flags | OFlags::DIRECT, mode) {
            // A file system without direct access is as fast as it is.
            Err(Errno::INVAL) => open(path, flags, mode),
            other => other,
        };
        let file = file.map_err(|error| failed(path, error))?;
        let piece = piece.next_multiple_of(BLOCK);
        Ok(Self { path: path.to_owned(), file, piece, pieces: (bytes / piece).max(1) })
    }

    /// Writes it all, and waits until it is on the disk. Bytes a second.
    pub(super) fn write(&self) -> Result<f64, Failure> {
        let start = Instant::now();
        self.each_piece(|buffer, offset| pwrite(&self.file, buffer, offset))?;
        rustix::io::retry_on_intr(|| rustix::fs::fdatasync(&self.file))
            .map_err(|error| failed(&self.path, error))?;
        Ok(self.rate(start))
    }

    /// Reads it all. Bytes a second.
    pub(super) fn read(&self) -> Result<f64, Failure> {
        forget(&self.file).map_err(|error| failed(&self.path, error))?;
        let start = Instant::now();
        self.each_piece(|buffer, offset| pread(&self.file, buffer, offset))?;
        Ok(self.rate(start))
    }

    fn rate(&self, start: Instant) -> f64 {
        (self.pieces * self.piece) as f64 / start.elapsed().as_secs_f64()
    }

    fn each_piece(
        &self,
        transfer: impl Fn(&mut [u8], u64) -> Result<usize, Errno> + Sync,
    ) -> Result<(), Failure> {
        let next = AtomicU64::new(0);
        let len = usize::try_from(self.piece).map_err(|_| Failure::told("a block does not fit memory", 7))?;
        let work = || {
            let mut buffer = Buffer::zeroed(len);
            buffer.iter_mut().enumerate().for_each(|(position, byte)| *byte = (position % 251) as u8);
            loop {
                let piece = next.fetch_add(1, Ordering::Relaxed);
                if piece >= self.pieces {
                    return Ok(());
                }
                let mut done = 0;
                while done < len {
                    match transfer(&mut buffer[done..], piece * self.piece + done as u64) {
                        Ok(0) => return Err(Errno::IO),
                        Ok(count) => done += count,
                        Err(Errno::INTR) => {}
                        Err(error) => return Err(error),
                    }
                }
            }
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| thread.join().unwrap_or(Err(Errno::IO)))
        })
        .map_err(|error| failed(&self.path, error))
    }
}

fn failed(path: &Path, error: Errno) -> Failure {
    Failure::told(format!("cannot measure with {}: {error}", path.display()), 5)
}

fn forget(file: impl AsFd) -> Result<(), Errno> {
    fadvise(file, 0, None, Advice::DontNeed)
}

/// Takes all files below a directory out of the page cache.
pub(super) fn drop_from_cache(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            drop_from_cache(&entry.path())?;
        } else if entry.file_type()?.is_file() {
            forget(&File::open(entry.path())?)?;
        }
    }
    Ok(())
}
