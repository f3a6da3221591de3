//! A ring whose client is the vendor's library.
#![allow(unsafe_code)]

use super::{
    Library,
    abi::{self, Cqe},
};
use crate::{
    Direction, Error, Result, RingPriority,
    driver::{Driver, Prepare, Prepared, RawCompletion},
    key::RingKey,
    mount::Inner,
    semaphore::absolute,
};
use std::{
    os::fd::{AsFd, AsRawFd},
    sync::Arc,
    time::Duration,
};

pub(crate) struct VendorRing {
    /// `None` only while it is dropped.
    ring: Option<Handle>,
    library: Arc<Library>,
    mount: Arc<Inner>,
    for_read: bool,
    arrived: Vec<Cqe>,
}

/// The library's struct, on its way between threads.
struct Handle(Box<abi::Ior>);

// SAFETY: the library lets a ring be used by any thread, one at a time: the owner of this.
unsafe impl Send for Handle {}

// SAFETY: as above; completions are only numbers here.
unsafe impl Send for VendorRing {}

impl VendorRing {
    pub(crate) fn create(
        mount: &Arc<Inner>,
        library: &Arc<Library>,
        entries: usize,
        ring: &RingKey,
    ) -> Result<Self> {
        let point = library.mount_point(&mount.point)?;
        let for_read = ring.direction == Direction::Read;
        let priority = match ring.priority {
            RingPriority::High => -1,
            RingPriority::Normal => 0,
            RingPriority::Low => 1,
        };
        let count =
            i32::try_from(entries).map_err(|_| Error::Invalid(format!("{entries} entries are too many")))?;
        let (io_depth, creator, destroyer) = (ring.io_depth, library.clone(), library.clone());
        let check = mount.daemon_check();
        let made = mount.control.run("creating a ring", move || {
            check()?;
            let mut ior = Box::new(abi::Ior::empty());
            // SAFETY: `ior` is writable, `point` ends in NUL and is short enough; `entries` and `io_depth` are in the
            // bounds that `Ring::create` keeps.
            let result = unsafe {
                let create = creator.functions.ior_create;
                create(&raw mut *ior, point.as_ptr(), count, for_read, io_depth, priority, -1)
            };
            Ok((result, Abandoned { ring: Some(Handle(ior)).filter(|_| result == 0), library: destroyer }))
        })??;
        match made {
            (0, mut made) => {
                let empty = Cqe { index: 0, reserved: 0, result: 0, user_data: std::ptr::null() };
                let arrived = vec![empty; entries];
                let (ring, library, mount) = (made.ring.take(), library.clone(), mount.clone());
                Ok(Self { ring, library, mount, for_read, arrived })
            }
            (errno, _) => Err(refusal(library, mount, errno)),
        }
    }

    fn handle(&self) -> Result<*const abi::Ior> {
        match &self.ring {
            Some(Handle(ring)) => Ok(&raw const **ring),
            None => Err(Error::Invalid("the ring was given back".into())),
        }
    }

    fn broken(&self, detail: String) -> Error {
        Error::Protocol { mount: self.mount.point.clone(), detail }
    }
}

fn refusal(library: &Library, mount: &Inner, errno: i32) -> Error {
    let point = mount.point.clone();
    match errno.saturating_neg() {
        // Depth, entries and name are right, so it is what the daemon cannot see.
        libc::EINVAL => Error::SharedMemoryNamespace { mount: point, name: "hf3fs-iov-*".into() },
        libc::EROFS => Error::ReadOnlyMount { mount: point },
        errno @ libc::ENOTCONN => {
            Error::DaemonDead { mount: point, reason: std::io::Error::from_raw_os_error(errno).to_string() }
        }
        _ => library.refused("hf3fs_iorcreate2", errno),
    }
}

impl Driver for VendorRing {
    fn prepare(&mut self, transfer: Prepared<'_>) -> Result<Prepare> {
        let iov = transfer
            .iov
            .vendor()
            .ok_or_else(|| Error::Invalid("the buffer was not made for the vendor's library".into()))?;
        let file_offset = usize::try_from(transfer.file_offset)
            .map_err(|_| Error::Invalid(format!("offset {} is too large", transfer.file_offset)))?;
        // SAFETY: `Ring` has checked that the range is inside the buffer.
        let target = unsafe { transfer.iov.base().add(transfer.iov_offset) };
        let mark = std::ptr::without_provenance(transfer.mark as usize);
        // SAFETY: ring and buffer are alive; the file is registered and open until the completion; the mark is never
        // followed.
        let index = unsafe {
            (self.library.functions.prep_io)(
                self.handle()?,
                iov.as_ptr(),
                self.for_read,
                target.as_ptr().cast(),
                transfer.file.as_fd().as_raw_fd(),
                file_offset,
                transfer.len as u64,
                mark,
            )
        };
        match index {
            0.. => Ok(Prepare::Done),
            full if full == -libc::EAGAIN => Ok(Prepare::Full),
            errno => Err(self.library.refused("hf3fs_prep_io", errno)),
        }
    }

    fn submit(&mut self) -> Result<()> {
        // SAFETY: the ring is alive.
        match unsafe { (self.library.functions.submit_ios)(self.handle()?) } {
            errno @ ..0 => Err(self.library.refused("hf3fs_submit_ios", errno)),
            _ => Ok(()),
        }
    }

    fn wait(&mut self, limit: Duration, completions: &mut Vec<RawCompletion>) -> Result<()> {
        let until = absolute(limit);
        let least = i32::from(!limit.is_zero());
        // No overflow: there are as many places as entries.
        let most = self.arrived.len() as i32;
        let ring = self.handle()?;
        // SAFETY: the ring is alive, there are `most` places, and a time is always given: without one, the library
        // never returns if the daemon is dead.
        let count = unsafe {
            (self.library.functions.wait_for_ios)(
                ring,
                self.arrived.as_mut_ptr(),
                most,
                least,
                &raw const until,
            )
        };
        match usize::try_from(count) {
            Ok(count) => {
                let arrived = self.arrived.get(..count).ok_or_else(|| {
                    self.broken(format!("the library reports {count} completions of at most {most}"))
                })?;
                completions.extend(
                    arrived
                        .iter()
                        .map(|cqe| RawCompletion { mark: cqe.user_data.addr() as u64, result: cqe.result }),
                );
                Ok(())
            }
            Err(_) => Err(self.library.refused("hf3fs_wait_for_ios", count)),
        }
    }

    fn key(&self) -> Option<&str> {
        // The library names it.
        None
    }
}

impl Drop for VendorRing {
    fn drop(&mut self) {
        let abandoned = Abandoned { ring: self.ring.take(), library: self.library.clone() };
        if self.mount.is_own_process() {
            self.mount.control.post(move || drop(abandoned));
        } else {
            // The parent's.
            std::mem::forget(abandoned);
        }
    }
}

/// A ring that is destroyed where it is dropped: on the control thread, if its creation was given up.
struct Abandoned {
    ring: Option<Handle>,
    library: Arc<Library>,
}

impl Drop for Abandoned {
    fn drop(&mut self) {
        if let Some(Handle(mut ring)) = self.ring.take() {
            // SAFETY: created by `create`, and no longer used.
            unsafe { (self.library.functions.ior_destroy)(&raw mut *ring) };
        }
    }
}
