//! `usrbio`: reads from a 3FS into memory shared with its daemon, many in flight from one thread.
#![forbid(unsafe_code)]

use super::{CarriedRead, Done, Lane, ReadOp, SharedSlots, Unavailable};
use crate::{
    parallel::{self, lock},
    source::Source,
};
use hoistway_io::{executor::InFlightLimit, file::LocalFile};
use hoistway_usrbio::{Completion, Error, File, Refused, Ring, Transfer};
use std::{
    collections::{HashMap, VecDeque},
    fmt, io,
    sync::{Arc, Mutex, Weak},
    time::{Duration, Instant},
};

/// Longest wait for a completion before the lane's owner is asked whether it still wants one.
const PATIENCE: Duration = Duration::from_millis(100);

/// Files by their inode, as the daemon of one mount knows them: each as long as it is read.
#[derive(Debug, Default)]
pub(crate) struct Files(Mutex<HashMap<u64, Opened>>);

#[derive(Debug)]
struct Opened {
    file: Arc<File>,
    readers: Vec<Weak<dyn Source>>,
}

impl Files {
    /// Has `source` read through what `open` opens, which is not asked if it is open already.
    pub(crate) fn add(
        &self,
        source: &Arc<dyn Source>,
        open: impl FnOnce() -> Result<Arc<File>, Unavailable>,
    ) -> Result<(), Unavailable> {
        let inode = inode_of(&**source)?;
        let is_own = |reader: &Weak<dyn Source>| std::ptr::addr_eq(reader.as_ptr(), Arc::as_ptr(source));
        if lock(&self.0).get(&inode).is_some_and(|opened| opened.readers.iter().any(is_own)) {
            return Ok(());
        }
        let file = open()?;
        let mut files = lock(&self.0);
        files.retain(|_, opened| {
            opened.readers.retain(|reader| reader.strong_count() > 0);
            !opened.readers.is_empty()
        });
        let opened = files.entry(inode).or_insert_with(|| Opened { file, readers: Vec::new() });
        opened.readers.push(Arc::downgrade(source));
        Ok(())
    }

    fn get(&self, source: &dyn Source) -> Option<Arc<File>> {
        let inode = inode_of(source).ok()?;
        lock(&self.0).get(&inode).map(|opened| opened.file.clone())
    }
}

fn inode_of(source: &dyn Source) -> Result<u64, Unavailable> {
    source.local().map(LocalFile::inode)
}

/// Rings to host memory, and threads that copy out of them.
pub(crate) fn host_rings() -> usize {
    match parallel::cores() {
        8.. => 4,
        cores => cores.min(2),
    }
}

/// One ring and the reads that are in it.
pub(crate) struct UsrbioLane {
    ring: Ring,
    files: Arc<Files>,
    /// The reads that the ring has, by the token of their transfer. Their slots' memory is lent to the transfers: should
    /// one never end, its memory is never used again.
    reads: Vec<Option<(CarriedRead, Instant)>>,
    /// Memory that is read into again soon is still in the processor's cache: a ring that has much does not use all of it.
    limit: InFlightLimit,
    free: Vec<usize>,
    /// Transfers that the ring had no room for.
    waiting: VecDeque<Transfer>,
    /// Reads that ended and were not asked for yet.
    ended: VecDeque<Done>,
    completions: Vec<Completion>,
}

impl fmt::Debug for UsrbioLane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UsrbioLane").field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

impl UsrbioLane {
    /// A lane for up to `depth` reads of `files`, which belong to the mount of `ring`.
    pub(crate) fn new(ring: Ring, files: Arc<Files>, depth: usize) -> Self {
        Self {
            ring,
            files,
            reads: (0..depth).map(|_| None).collect(),
            limit: InFlightLimit::by_delay(depth),
            free: (0..depth).rev().collect(),
            waiting: VecDeque::new(),
            ended: VecDeque::new(),
            completions: Vec::new(),
        }
    }

    fn transfer(&self, token: usize, op: &mut ReadOp) -> io::Result<Transfer> {
        let file = self.files.get(&*op.source);
        let file = file.ok_or_else(|| io::Error::other("the file was not opened for USRBIO"))?;
        // Whole blocks go past the end of the file; asking for that would make the client look for the end.
        let left = usize::try_from(op.source.len().saturating_sub(op.progress.offset)).unwrap_or(usize::MAX);
        let len = op.progress.len.min(left);
        let slot = op.buffer.slot().and_then(|slot| slot.as_ref());
        let slot = slot.and_then(|slot| slot.shared_memory::<SharedSlots>()?.lend(slot.index()));
        let slot = slot.ok_or_else(|| io::Error::other("a read by USRBIO has no shared memory"))?;
        let transfer = Transfer::new(file, op.progress.offset, len, slot);
        Ok(transfer.slot_offset(op.progress.position).token(token as u64))
    }

    fn offer(&mut self, transfer: Transfer) {
        match self.ring.push(transfer) {
            Ok(()) => {}
            Err(Refused::Full(transfer)) => self.waiting.push_back(transfer),
            Err(Refused::Failed(transfer, error)) => self.end(transfer, Err(error)),
        }
    }

    /// A transfer is over: its memory is the slot's again, unless a server may still write to it.
    fn end(&mut self, transfer: Transfer, result: Result<usize, Error>) {
        let token = transfer.token as usize;
        let Some((mut op, _)) = self.reads.get_mut(token).and_then(Option::take) else { return };
        self.free.push(token);
        let in_doubt = result.as_ref().is_err_and(Error::leaves_memory_in_doubt);
        if let (Some(Some(slot)), false) = (op.buffer.slot(), in_doubt)
            && let Some(memory) = slot.shared_memory::<SharedSlots>()
        {
            memory.give_back(slot.index(), transfer.slot);
        }
        self.ended.push_back(Done { op, result: result.map_err(failed) });
    }

    /// The ring has failed, and with it all that is in it. Whether the daemon still writes is unknown.
    fn give_up(&mut self, error: &Error) {
        for transfer in std::mem::take(&mut self.waiting) {
            self.end(transfer, Err(error.clone()));
        }
        for (token, op) in self.reads.iter_mut().enumerate() {
            if let Some((op, _)) = op.take() {
                self.free.push(token);
                self.ended.push_back(Done { op, result: Err(failed(error.clone())) });
            }
        }
    }
}

impl Lane<CarriedRead> for UsrbioLane {
    fn capacity(&self) -> usize {
        self.reads.len()
    }

    fn allowed(&self) -> usize {
        self.limit.operations()
    }

    fn in_flight(&self) -> usize {
        self.reads.len() - self.free.len() + self.ended.len()
    }

    fn push(&mut self, mut op: CarriedRead) {
        let Some(token) = self.free.pop() else {
            let result = Err(io::Error::other("more reads were pushed than the ring holds"));
            self.ended.push_back(Done { op, result });
            return;
        };
        match self.transfer(token, &mut op) {
            Ok(transfer) => {
                self.reads[token] = Some((op, Instant::now()));
                self.offer(transfer);
            }
            Err(error) => {
                self.free.push(token);
                self.ended.push_back(Done { op, result: Err(error) });
            }
        }
    }

    /// Returns one read at a time: when its owner has copied it, the next one begins before the owner copies more. May also
    /// return without a read after a while, so that a load that is over does not wait for a daemon that hangs.
    fn submit_and_wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        for transfer in std::mem::take(&mut self.waiting) {
            self.offer(transfer);
        }
        if !self.ended.is_empty() {
            // A ring that has failed says so when it is waited for.
            let _ = self.ring.submit();
        } else if self.in_flight() > 0 {
            let waited = self.ring.wait(PATIENCE, &mut self.completions);
            let completions = std::mem::take(&mut self.completions);
            let (now, others) = (Instant::now(), completions.len().saturating_sub(1));
            for Completion { transfer, result } in completions {
                if let Some(Some((_, begun))) = self.reads.get(transfer.token as usize) {
                    self.limit.ended(transfer.len, now.saturating_duration_since(*begun), others, now);
                }
                self.end(transfer, result);
            }
            if let Err(error) = waited {
                self.give_up(&error);
            }
        }
        done.extend(self.ended.pop_front());
        Ok(())
    }
}

/// A client's error as that of one read, of which the reader knows file and offset.
pub(super) fn failed(error: Error) -> io::Error {
    let kind = error.errno().map(|errno| io::Error::from_raw_os_error(errno).kind());
    // What the daemon gave up on is not repeated, though the same number of the kernel's asks for that.
    let is_final =
        |kind: &io::ErrorKind| !matches!(kind, io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
    io::Error::new(kind.filter(is_final).unwrap_or(io::ErrorKind::Other), Failed(error))
}

/// The system's number behind an error of a read, also if the daemon has said it.
pub(crate) fn errno(error: &io::Error) -> Option<i32> {
    error.raw_os_error().or_else(|| client_error(error)?.errno())
}

/// Whether the daemon of a 3FS is gone or hangs, so that no question about a file gets an answer.
pub(crate) fn is_daemon_lost(error: &io::Error) -> bool {
    let is_lost = |error: &Error| {
        matches!(
            error,
            Error::DaemonDead { .. }
                | Error::DaemonRestarted { .. }
                | Error::IovRemoved { .. }
                | Error::Timeout { .. }
                | Error::Protocol { .. }
                | Error::LibraryUnusable { .. }
        )
    };
    client_error(error).is_some_and(is_lost)
}

fn client_error(error: &io::Error) -> Option<&Error> {
    error.get_ref()?.downcast_ref::<Failed>().map(|failed| &failed.0)
}

/// An error of the client, without the place of the read.
#[derive(Debug)]
struct Failed(Error);

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Error::Io { errno, hint, .. } => {
                write!(f, "3FS says: {} ({hint})", io::Error::from_raw_os_error(*errno))
            }
            Error::ShortTransfer { len, got, .. } => {
                write!(
                    f,
                    "3FS gave {got} of {len} bytes twice: the file has a hole there, or is being written"
                )
            }
            Error::System { action, source, .. } => write!(f, "cannot {action} it: {source}"),
            error => error.fmt(f),
        }
    }
}

impl std::error::Error for Failed {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}
