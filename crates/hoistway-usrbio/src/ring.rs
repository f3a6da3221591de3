//! Rings: many transfers in flight from one thread, each owning its file and its memory.
#![forbid(unsafe_code)]

use crate::{
    Client, Error, File, IovSlot, Result,
    driver::{Driver, Prepare, Prepared, RawCompletion},
    error::hint,
    key::{Direction, RingKey, RingPriority},
    mount::Inner,
    native::NativeRing,
    proto::MAX_ENTRIES,
    setters::setters,
    vendor::VendorRing,
};
use std::{
    cell::Cell,
    collections::{HashMap, VecDeque},
    marker::PhantomData,
    sync::Arc,
    time::{Duration, Instant},
};

/// Longest sleep before the state of the daemon is looked at.
const NAP: Duration = Duration::from_millis(50);
/// The daemon is asked whether it lives when nothing has ended for this long.
const SILENCE: Duration = Duration::from_millis(150);
const MIN_ENTRIES: usize = 64;
/// The daemon frees entries batch by batch, in order, though it completes out of order: with fewer entries than this
/// for each transfer in flight, a slow batch holds up the others.
const ENTRIES_PER_TRANSFER: usize = 4;

/// Options of a ring.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RingOptions {
    /// Most transfers in flight.
    pub depth: usize,
    /// Reads or writes.
    pub direction: Direction,
    /// Which of the daemon's queues.
    pub priority: RingPriority,
    /// How many transfers the daemon puts in a batch at most. The completions of a batch come together, at its end, so 1
    /// is best for transfers of a MiB and more.
    pub batch: usize,
    /// In-flight transfers are given up if none of them completes for this long: [`Error::Timeout`].
    pub stall_limit: Duration,
    /// How long a ring that is dropped waits for the transfers that it still has.
    pub farewell: Duration,
}

setters! {
    RingOptions {
        depth: usize,
        direction: Direction,
        priority: RingPriority,
        batch: usize,
        stall_limit: Duration,
        farewell: Duration,
    }
}

impl Default for RingOptions {
    fn default() -> Self {
        Self {
            depth: 16,
            direction: Direction::Read,
            priority: RingPriority::Normal,
            batch: 1,
            stall_limit: Duration::from_secs(60),
            farewell: Duration::from_secs(1),
        }
    }
}

/// One transfer: a read from a file into a slot, or a write to it, whichever the ring does.
#[derive(Debug)]
#[non_exhaustive]
pub struct Transfer {
    /// The file.
    pub file: Arc<File>,
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// Number of bytes.
    pub len: usize,
    /// The memory.
    pub slot: IovSlot,
    /// Offset of the first byte in the slot. Default: 0.
    pub slot_offset: usize,
    /// A number of the caller's, which comes back with the completion. Default: 0.
    pub token: u64,
}

setters! {
    Transfer {
        slot_offset: usize,
        token: u64,
    }
}

impl Transfer {
    /// A transfer between `len` bytes of a file, from `offset` on, and the start of a slot.
    pub fn new(file: Arc<File>, offset: u64, len: usize, slot: IovSlot) -> Self {
        Self { file, offset, len, slot, slot_offset: 0, token: 0 }
    }
}

/// A transfer that has ended. Its slot is no longer written to, unless it failed with an error that
/// [says otherwise](Error::leaves_memory_in_doubt).
#[derive(Debug)]
pub struct Completion {
    /// The transfer as it was pushed.
    pub transfer: Transfer,
    /// How many bytes came, or went. Fewer than asked for only where the file ends now.
    pub result: Result<usize>,
}

/// A transfer that a ring did not take, and gives back.
#[derive(Debug)]
pub enum Refused {
    /// There is no room. Wait for a completion, then push it again.
    Full(Transfer),
    /// It cannot be, or the ring has failed.
    Failed(Transfer, Error),
}

/// A queue of transfers that the daemon carries out. Used by one thread at a time.
pub struct Ring {
    // Before `mount`, whose thread frees it.
    driver: Box<dyn Driver>,
    mount: Arc<Inner>,
    options: RingOptions,
    in_flight: HashMap<u64, InFlight>,
    next_mark: u64,
    /// Transfers that came short once and wait for room to go on, by mark.
    resuming: VecDeque<u64>,
    raw: Vec<RawCompletion>,
    unsubmitted: bool,
    last_progress: Instant,
    /// The question to the watch that is open.
    asked: Option<u64>,
    failure: Option<Error>,
    one_thread: PhantomData<Cell<()>>,
}

struct InFlight {
    transfer: Transfer,
    /// Bytes that came before the transfer went on.
    got: usize,
    resumed: bool,
}

enum Step {
    Ended(Result<usize>),
    Resume,
}

impl Ring {
    pub(crate) fn create(mount: &Arc<Inner>, options: &RingOptions) -> Result<Self> {
        mount.check_process()?;
        let RingOptions { depth, batch, direction, priority, .. } = *options;
        let entries = depth.saturating_mul(ENTRIES_PER_TRANSFER).max(MIN_ENTRIES);
        if depth == 0 || entries > MAX_ENTRIES || batch == 0 || batch > entries {
            let problem = format!("a ring cannot have {depth} transfers in flight in batches of {batch}");
            return Err(Error::Invalid(problem));
        }
        // Negative: up to so many; the daemon does not wait for a batch to fill. `entries` keeps it inside an i32.
        let io_depth = -(batch as i32);
        let ring = RingKey { direction, io_depth, priority, timeout_ms: 0, flags: 0 };
        let driver: Box<dyn Driver> = match &mount.client {
            Client::Native => Box::new(NativeRing::create(mount, entries, ring)?),
            Client::Vendor(library) => Box::new(VendorRing::create(mount, library, entries, &ring)?),
        };
        Ok(Self {
            driver,
            mount: mount.clone(),
            options: options.clone(),
            in_flight: HashMap::with_capacity(depth),
            next_mark: 1,
            resuming: VecDeque::new(),
            raw: Vec::with_capacity(depth),
            unsubmitted: false,
            last_progress: Instant::now(),
            asked: None,
            failure: None,
            one_thread: PhantomData,
        })
    }

    /// Returns the number of transfers in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Appends a transfer. It may begin at once, and has to be [submitted](Self::submit).
    ///
    /// # Errors
    /// Transfers that were not accepted are given back with the reason.
    #[allow(clippy::result_large_err, reason = "the transfer goes back to its owner")]
    pub fn push(&mut self, transfer: Transfer) -> Result<(), Refused> {
        if let Err(error) = self.usable().and_then(|()| self.check(&transfer)) {
            return Err(Refused::Failed(transfer, error));
        }
        // Those that wait to go on come first.
        if self.in_flight.len() >= self.options.depth || !self.resuming.is_empty() {
            return Err(Refused::Full(transfer));
        }
        let mark = self.next_mark;
        match self.driver.prepare(prepared(&transfer, 0, mark)) {
            Ok(Prepare::Done) => {}
            // All has ended, and yet there is no room: it would never come.
            Ok(Prepare::Full) if self.in_flight.is_empty() => {
                let error = self.broken("the ring is full and nothing is in flight".into());
                return Err(Refused::Failed(transfer, error));
            }
            Ok(Prepare::Full) => return Err(Refused::Full(transfer)),
            Err(error) => return Err(Refused::Failed(transfer, self.fail(error))),
        }
        if self.in_flight.is_empty() {
            self.progressed();
        }
        self.next_mark += 1;
        self.unsubmitted = true;
        self.in_flight.insert(mark, InFlight { transfer, got: 0, resumed: false });
        Ok(())
    }

    /// Tells the daemon of what was pushed.
    ///
    /// # Errors
    /// [`Error::Forked`], and whatever the ring has failed with.
    pub fn submit(&mut self) -> Result<()> {
        self.usable()?;
        if self.unsubmitted {
            self.driver.submit().map_err(|error| self.fail(error))?;
            self.unsubmitted = false;
        }
        Ok(())
    }

    /// Waits until at least one transfer has ended, and appends what has; submits first. Nothing after `limit` is no
    /// error: `0` comes back, and the caller may wait again or give up. Once the ring has failed, each call says so; its
    /// transfers go with it.
    ///
    /// # Errors
    /// [`Error::DaemonDead`], [`Error::DaemonRestarted`], [`Error::IovRemoved`], [`Error::Protocol`],
    /// [`Error::Forked`], and [`Error::Timeout`] if nothing ended for as long as the options allow.
    pub fn wait(&mut self, limit: Duration, completions: &mut Vec<Completion>) -> Result<usize> {
        self.submit()?;
        let end = Instant::now().checked_add(limit);
        let before = completions.len();
        while !self.in_flight.is_empty() {
            self.resume()?;
            let left = end.map_or(NAP, |end| end.saturating_duration_since(Instant::now()));
            self.driver.wait(left.min(NAP), &mut self.raw).map_err(|error| self.fail(error))?;
            self.sort(completions)?;
            if completions.len() > before || left.is_zero() {
                break;
            }
            self.listen()?;
        }
        Ok(completions.len() - before)
    }

    fn usable(&mut self) -> Result<()> {
        self.mount.check_process()?;
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn fail(&mut self, error: Error) -> Error {
        self.failure.get_or_insert(error).clone()
    }

    fn broken(&mut self, detail: String) -> Error {
        self.fail(Error::Protocol { mount: self.mount.point.clone(), detail })
    }

    fn progressed(&mut self) {
        self.last_progress = Instant::now();
        self.asked = None;
    }

    fn check(&self, transfer: &Transfer) -> Result<()> {
        let Transfer { file, offset, len, slot, slot_offset, .. } = transfer;
        slot.check(*slot_offset, *len)?;
        slot.check_block(*slot_offset, *len)?;
        let invalid = |problem: &str| Err(Error::Invalid(format!("{}: {problem}", file.path().display())));
        if *len == 0 || offset.checked_add(*len as u64).is_none_or(|end| i64::try_from(end).is_err()) {
            return invalid(&format!("{len} bytes at offset {offset} are no range of a file"));
        }
        if !Arc::ptr_eq(file.mount(), &self.mount) || !Arc::ptr_eq(slot.iov().mount(), &self.mount) {
            return invalid("file, buffer and ring must belong to the same open mount");
        }
        if self.options.direction == Direction::Write && file.direction() != Direction::Write {
            return invalid("it was not opened for writing");
        }
        Ok(())
    }

    /// Sends on what came short.
    fn resume(&mut self) -> Result<()> {
        while let Some(mark) = self.resuming.front() {
            if let Some(op) = self.in_flight.get(mark) {
                match self.driver.prepare(prepared(&op.transfer, op.got, *mark)) {
                    Ok(Prepare::Done) => {}
                    Ok(Prepare::Full) => break,
                    Err(error) => return Err(self.fail(error)),
                }
                self.unsubmitted = true;
            }
            self.resuming.pop_front();
        }
        self.submit()
    }

    /// Sorts what the driver brought into transfers that ended and such that go on.
    fn sort(&mut self, completions: &mut Vec<Completion>) -> Result<()> {
        for RawCompletion { mark, result } in std::mem::take(&mut self.raw) {
            let Some(op) = self.in_flight.get_mut(&mark) else {
                let detail = format!("a completion bears the mark {mark}, which no transfer has");
                return Err(self.broken(detail));
            };
            let wanted = op.transfer.len - op.got;
            let step = match usize::try_from(result) {
                Ok(got) if got > wanted => {
                    let detail = format!("a completion reports {got} of {wanted} bytes");
                    return Err(self.broken(detail));
                }
                Ok(got) => {
                    op.got += got;
                    op.after_bytes(self.options.direction)
                }
                Err(_) => Step::Ended(Err(op.error(result))),
            };
            self.progressed();
            match step {
                Step::Resume => self.resuming.push_back(mark),
                Step::Ended(result) => completions.extend(
                    self.in_flight.remove(&mark).map(|op| Completion { transfer: op.transfer, result }),
                ),
            }
        }
        Ok(())
    }

    /// Asks after the daemon when no transfer has ended for a while.
    fn listen(&mut self) -> Result<()> {
        let silence = self.last_progress.elapsed();
        if silence < SILENCE {
            return Ok(());
        }
        match self.asked {
            None => self.asked = Some(self.mount.watch.ask()),
            Some(number) => {
                if let Some(verdict) = self.mount.watch.answer(number) {
                    self.asked = None;
                    let buffers = self.in_flight.values().map(|op| op.transfer.slot.iov().key());
                    let keys = self.driver.key().into_iter().chain(buffers);
                    if let Some(error) = verdict.into_error(&self.mount.point, keys) {
                        return Err(self.fail(error));
                    }
                }
            }
        }
        if silence > self.options.stall_limit {
            let what = format!("waiting for {} transfers", self.in_flight.len());
            let (mount, limit) = (self.mount.point.clone(), self.options.stall_limit);
            return Err(self.fail(Error::Timeout { mount, what, limit }));
        }
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if !self.mount.is_own_process() {
            return;
        }
        // What has not ended by then keeps its memory to itself: a slot that is dropped is never handed out again.
        let end = Instant::now() + self.options.farewell;
        let mut ended = Vec::new();
        while !self.in_flight.is_empty() && Instant::now() < end {
            if self.wait(end.saturating_duration_since(Instant::now()), &mut ended).is_err() {
                break;
            }
        }
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("key", &self.driver.key())
            .field("options", &self.options)
            .field("in_flight", &self.in_flight.len())
            .field("failure", &self.failure)
            .finish_non_exhaustive()
    }
}

impl InFlight {
    /// What follows from the bytes that there are now.
    fn after_bytes(&mut self, direction: Direction) -> Step {
        let Transfer { file, offset, len, .. } = &self.transfer;
        if self.got == *len {
            return Step::Ended(Ok(self.got));
        }
        // By the thread that may hang in the daemon, and that is waited for only so long.
        let asked = file.clone();
        let answer = file.mount().control.run("asking for a file's length", move || asked.len_now());
        let file_len = match answer.flatten() {
            Ok(file_len) => file_len,
            Err(error) => return Step::Ended(Err(error)),
        };
        // No overflow: both were checked when the transfer was pushed.
        if direction == Direction::Read && offset + self.got as u64 >= file_len {
            return Step::Ended(Ok(self.got));
        }
        if !self.resumed {
            self.resumed = true;
            return Step::Resume;
        }
        let path = file.path().to_owned();
        Step::Ended(Err(Error::ShortTransfer { path, offset: *offset, len: *len, got: self.got, file_len }))
    }

    fn error(&self, result: i64) -> Error {
        let Transfer { file, offset, len, .. } = &self.transfer;
        let errno = result.checked_neg().and_then(|errno| i32::try_from(errno).ok()).unwrap_or(libc::EIO);
        Error::Io {
            path: file.path().to_owned(),
            offset: *offset,
            len: *len,
            got: self.got,
            errno,
            hint: hint(errno),
        }
    }
}

/// The part of a transfer after its first `got` bytes.
fn prepared(transfer: &Transfer, got: usize, mark: u64) -> Prepared<'_> {
    Prepared {
        file: &transfer.file,
        file_offset: transfer.offset + got as u64,
        iov: transfer.slot.iov(),
        iov_offset: transfer.slot.offset() + transfer.slot_offset + got,
        len: transfer.len - got,
        mark,
    }
}
