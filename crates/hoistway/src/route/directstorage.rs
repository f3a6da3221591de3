//! `directstorage`: files as DirectStorage opens them, and a lane of its reads into host memory or buffers of D3D12.
#![allow(unsafe_code)]

use super::{Buffer, CarriedRead, Done, Lane, ReadOp, Unavailable, graphics::Graphics};
use crate::{Error, parallel::lock, source::Source, sys};
use hoistway_device::{ExternalSemaphore, ExternalSignal};
use hoistway_directstorage::{Ended, Queue, Read, Runtime, SharedBuffer, StorageFile, Target};
use hoistway_io::lane::ReadsFile;
use std::{
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

/// How long a lane waits for the end of a read before it gives up all of its own. A drive that was asleep takes seconds.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long it waits at once. Its owner looks between whether the load is over.
const TICK: Duration = Duration::from_millis(100);
const OTHER_ROUTE: &str = "choose route auto or overlapped";

/// A source as DirectStorage has it open, once it has.
#[derive(Debug, Default)]
struct Opened(Mutex<Option<Arc<StorageFile>>>);

/// The source as DirectStorage has it open. It is opened by its name, and must be the file that the source has open.
///
/// # Errors
/// Why DirectStorage does not take it.
pub(super) fn opened(source: &dyn Source) -> Result<Arc<StorageFile>, Unavailable> {
    let opened = source.extensions().get::<Opened>();
    let mut opened = lock(&opened.0);
    if let Some(file) = &*opened {
        return Ok(file.clone());
    }
    // What refuses it now may pass, such as a writer.
    let file = Arc::new(open(source)?);
    Ok(opened.insert(file).clone())
}

fn open(source: &dyn Source) -> Result<StorageFile, Unavailable> {
    let runtime = Runtime::get()?;
    let not_known = |error: io::Error| Unavailable::new(error.to_string(), OTHER_ROUTE);
    let opened = source.local()?.buffered_file().map_err(not_known)?;
    let path = sys::files::name(&opened).unwrap_or_else(|| source.path().to_owned());
    let file = runtime.open_file(&path).map_err(|failure| {
        let fix = if failure.fix().is_empty() { OTHER_ROUTE } else { failure.fix() };
        Unavailable::new(failure.to_string(), fix)
    })?;
    if !file.is_same(&opened).map_err(not_known)? {
        let reason = format!("{} is another file now than the one whose header was read", path.display());
        return Err(Unavailable::new(reason, "load again once nothing replaces it"));
    }
    Ok(file)
}

/// Reads by DirectStorage: many in flight from one thread.
#[derive(Debug)]
pub(super) struct DirectStorageLane {
    queue: Queue<CarriedRead>,
    /// The queue's fence, as the CUDA device has imported it, if reads go to buffers of D3D12.
    semaphore: Option<Arc<ExternalSemaphore>>,
    /// Reads that ended before DirectStorage had them.
    rejected: Vec<Done>,
    ended: Vec<Ended<CarriedRead>>,
}

impl DirectStorageLane {
    /// Makes a queue for up to `depth` reads.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn new(depth: usize) -> Result<Self, Unavailable> {
        let queue = Runtime::get()?.queue(depth, PATIENCE, CarriedRead::abandon)?;
        Ok(Self { queue, semaphore: None, rejected: Vec::new(), ended: Vec::new() })
    }

    /// The same for reads into buffers of D3D12.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn to_device(depth: usize, graphics: &Graphics) -> Result<Self, Unavailable> {
        let queue = Runtime::get()?.queue_to(graphics.device(), depth, PATIENCE, CarriedRead::abandon)?;
        let semaphore = match queue.fence() {
            Some(fence) => graphics.semaphore(fence),
            None => Err(Error::Internal("a queue to a device has no fence".into())),
        };
        let semaphore = semaphore.map_err(|error| Unavailable::new(error.to_string(), OTHER_ROUTE))?;
        let semaphore = Some(Arc::new(semaphore));
        Ok(Self { queue, semaphore, rejected: Vec::new(), ended: Vec::new() })
    }

    /// What an operation fills, and how much of it.
    fn target(&self, op: &mut ReadOp) -> io::Result<(Target, usize)> {
        if self.semaphore.is_none() {
            let target = op.buffer.target(op.progress)?;
            return Ok((Target::Memory(target.as_mut_ptr()), target.len()));
        }
        let no_room = || io::Error::other("a read does not fit its slot");
        let Buffer::Staged { slot: Some(slot), .. } = &op.buffer else { return Err(no_room()) };
        let fits = op.progress.position.checked_add(op.progress.len).is_some_and(|end| end <= slot.len());
        let (memory, start) = slot.external_memory().filter(|_| fits).ok_or_else(no_room)?;
        let buffer = memory.owner::<SharedBuffer>().ok_or_else(no_room)?;
        let offset = start + op.progress.position as u64;
        Ok((Target::Buffer { buffer, offset }, op.progress.len))
    }
}

impl Lane<CarriedRead> for DirectStorageLane {
    fn capacity(&self) -> usize {
        self.queue.depth()
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight() + self.rejected.len()
    }

    fn push(&mut self, mut op: CarriedRead) {
        let offset = op.progress.offset;
        let target = opened(&*op.source).map_err(|why| io::Error::other(why.to_string())).and_then(|file| {
            let (target, len) = self.target(&mut op)?;
            Ok(Read { file, offset, target, len })
        });
        match target {
            // SAFETY: the operation holds the region or slot that it fills, which is its alone until it is dropped and does not move
            // with it. It leaks that if it is abandoned (`ReadsFile`).
            Ok(read) => unsafe { self.queue.push(op, read) },
            Err(error) => self.rejected.push(Done { op, result: Err(error) }),
        }
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        if !self.rejected.is_empty() {
            done.append(&mut self.rejected);
            return Ok(());
        }
        self.queue.wait(&mut self.ended, TICK)?;
        for Ended { owner: op, result, signal } in self.ended.drain(..) {
            // Also of a read that failed: it may be made again by another lane, and the copy waits for both.
            if let (Some(semaphore), Buffer::Staged { slot: Some(slot), .. }, 1..) =
                (&self.semaphore, &op.buffer, signal)
            {
                slot.add_signal(ExternalSignal { semaphore: semaphore.clone(), value: signal });
            }
            done.push(Done { op, result: result.map_err(Into::into) });
        }
        Ok(())
    }
}
