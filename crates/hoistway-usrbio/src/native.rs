//! A ring whose client is this crate.
#![allow(unsafe_code)]

use crate::{
    Error, Result,
    driver::{Driver, Prepare, Prepared, RawCompletion},
    key::{Key, RingKey},
    mount::{Inner, Registered},
    proto::{Cqe, IoArgs, RingLayout, Sqe, ring_bytes},
    semaphore::{self, SubmitSemaphore},
    shm::SharedMemory,
};
use std::{
    path::PathBuf,
    ptr::NonNull,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};
use uuid::Uuid;

/// The client's end of a ring. Trusts nothing that the daemon can write: what counts is kept in private memory, and what
/// is read from shared memory is copied, then checked.
#[derive(Debug)]
pub struct RingClient {
    mount: PathBuf,
    layout: RingLayout,
    submit: SubmitSemaphore,
    sqe_head: i32,
    cqe_tail: i32,
    free: Vec<i32>,
    /// The marks of the transfers that the daemon has, by index.
    marks: Vec<Option<u64>>,
}

impl RingClient {
    /// Takes over a ring that the daemon has just been told of.
    ///
    /// # Safety
    /// The memory must stay mapped as long as this exists.
    ///
    /// # Errors
    /// [`Error::SharedMemoryNamespace`], [`Error::Protocol`], [`Error::System`].
    pub unsafe fn new(
        mount: PathBuf,
        base: NonNull<u8>,
        bytes: usize,
        submit_target: &std::path::Path,
    ) -> Result<Self> {
        // SAFETY: the caller's promise.
        let layout = unsafe { RingLayout::new(base, bytes) }
            .ok_or_else(|| Error::Invalid(format!("{bytes} bytes are too few for a ring")))?;
        let submit = SubmitSemaphore::open(&mount, submit_target)?;
        let entries = layout.slots() - 1;
        let marks = (0..layout.slots()).map(|_| None).collect();
        Ok(Self {
            mount,
            layout,
            submit,
            sqe_head: 0,
            cqe_tail: 0,
            free: (0..entries).rev().collect(),
            marks,
        })
    }

    /// Returns the number of transfers that there is room for.
    pub fn entries(&self) -> i32 {
        self.layout.slots() - 1
    }

    /// Appends a transfer, and says which index it has; `None` if there is no room.
    ///
    /// # Errors
    /// [`Error::Protocol`].
    pub fn prepare(&mut self, args: IoArgs) -> Result<Option<i32>> {
        let tail = self.index("sqe tail", self.layout.sqe_tail().load(SeqCst))?;
        let next = self.layout.next(self.sqe_head);
        if next == tail {
            return Ok(None);
        }
        let Some(index) = self.free.pop() else { return Ok(None) };
        let place =
            (self.layout.args(index), self.layout.sqe(self.sqe_head), self.marks.get_mut(index as usize));
        let (Some(args_place), Some(sqe_place), Some(mark)) = place else {
            return Err(self.broken(format!("index {index} is none")));
        };
        // SAFETY: both places are inside the ring. The daemon reads them only after `sqe_head` has moved.
        unsafe {
            args_place.write_volatile(args);
            sqe_place.write_volatile(Sqe { index, reserved: 0, user_data: args.user_data });
        }
        *mark = Some(args.user_data);
        self.sqe_head = next;
        self.layout.sqe_head().store(next, SeqCst);
        Ok(Some(index))
    }

    /// Tells the daemon to look.
    pub fn submit(&self) {
        self.submit.post();
    }

    /// Takes a completion, if there is one.
    ///
    /// # Errors
    /// [`Error::Protocol`] for one that belongs to no transfer.
    pub fn reap(&mut self) -> Result<Option<Cqe>> {
        let head = self.index("cqe head", self.layout.cqe_head().load(SeqCst))?;
        if head == self.cqe_tail {
            return Ok(None);
        }
        let place = self.layout.cqe(self.cqe_tail).ok_or_else(|| self.broken("no completion".into()))?;
        // SAFETY: inside the ring; any bit pattern is a `Cqe`.
        let cqe = unsafe { place.read_volatile() };
        let known = self.layout.checked(cqe.index).and_then(|index| self.marks.get_mut(index));
        match known.and_then(|mark| mark.take_if(|mark| *mark == cqe.user_data)) {
            Some(_) => {}
            None => {
                let detail = format!("a completion has index {} and no transfer has", cqe.index);
                return Err(self.broken(detail));
            }
        }
        self.cqe_tail = self.layout.next(self.cqe_tail);
        self.layout.cqe_tail().store(self.cqe_tail, SeqCst);
        self.free.push(cqe.index);
        Ok(Some(cqe))
    }

    /// Where the parts of the ring lie.
    pub fn layout(&self) -> RingLayout {
        self.layout
    }

    /// Waits until the daemon has posted completions, or `limit` is over.
    fn sleep(&self, limit: Duration) {
        // SAFETY: the semaphore is part of the ring, which `new` was promised stays mapped.
        unsafe { semaphore::wait(self.layout.semaphore(), limit) };
    }

    fn index(&self, what: &str, value: i32) -> Result<i32> {
        match self.layout.checked(value) {
            Some(_) => Ok(value),
            None => Err(self.broken(format!("{what} is {value} in a ring of {} slots", self.layout.slots()))),
        }
    }

    fn broken(&self, detail: String) -> Error {
        Error::Protocol { mount: self.mount.clone(), detail }
    }
}

/// A registered ring, and its client's end.
pub(crate) struct NativeRing {
    client: RingClient,
    registered: Registered,
}

impl NativeRing {
    pub(crate) fn create(mount: &Arc<Inner>, entries: usize, ring: RingKey) -> Result<Self> {
        let memory = SharedMemory::create(ring_bytes(entries), None)?;
        let submit_target = mount.submit_target(ring.priority)?;
        let key = Key { id: Uuid::new_v4(), block_bytes: 0, ring: Some(ring) };
        let registered = mount.register(memory, key)?;
        let memory = &registered.memory;
        // SAFETY: `registered` is dropped after `client`.
        let client =
            unsafe { RingClient::new(mount.point.clone(), memory.base(), memory.len(), &submit_target) }?;
        Ok(Self { client, registered })
    }
}

impl Driver for NativeRing {
    fn prepare(&mut self, transfer: Prepared<'_>) -> Result<Prepare> {
        let args = IoArgs {
            buffer: transfer.iov.id().into_bytes(),
            buffer_offset: transfer.iov_offset,
            inode: transfer.file.inode(),
            file_offset: usize::try_from(transfer.file_offset)
                .map_err(|_| Error::Invalid(format!("offset {} is too large", transfer.file_offset)))?,
            len: transfer.len as u64,
            user_data: transfer.mark,
        };
        Ok(self.client.prepare(args)?.map_or(Prepare::Full, |_| Prepare::Done))
    }

    fn submit(&mut self) -> Result<()> {
        self.client.submit();
        Ok(())
    }

    fn wait(&mut self, limit: Duration, completions: &mut Vec<RawCompletion>) -> Result<()> {
        for may_sleep in [true, false] {
            let before = completions.len();
            while let Some(cqe) = self.client.reap()? {
                completions.push(RawCompletion { mark: cqe.user_data, result: cqe.result });
            }
            if completions.len() > before {
                // The daemon takes nothing on that it has no room to complete: there is room now.
                self.client.submit();
                break;
            }
            if may_sleep && !limit.is_zero() {
                self.client.sleep(limit);
            }
        }
        Ok(())
    }

    fn key(&self) -> Option<&str> {
        Some(&self.registered.name)
    }
}
