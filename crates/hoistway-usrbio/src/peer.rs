//! The other side of a ring, in the test's hands: a plain directory stands for the mount, and the test itself answers.
#![allow(unsafe_code)]

use crate::{
    Client, IovOptions, IovSlot, Mount, Refused, Result, Ring, RingOptions, Transfer,
    key::Key,
    mount::Trust,
    proto::{Cqe, IOVS, IoArgs, RingLayout, Sqe},
};
use rustix::mm::{MapFlags, ProtFlags};
use std::{
    ffi::CString,
    fs::{self, File},
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::{Arc, Mutex, atomic::Ordering::SeqCst},
    time::Duration,
};
use uuid::Uuid;

pub(crate) const SLOT_BYTES: usize = 4096;
pub(crate) const FILE_BYTES: usize = 1 << 20;

/// A mount with no daemon behind it, one ring on it, and slots.
pub(crate) struct Peer {
    // Before the mount, as a client would have it.
    pub(crate) ring: Ring,
    pub(crate) slots: Vec<IovSlot>,
    pub(crate) file: Arc<crate::File>,
    pub(crate) mount: Mount,
    /// The daemon's view of the ring.
    pub(crate) layout: RingLayout,
    taken: i32,
    pub(crate) directory: FakeMount,
}

/// A directory like that of a mount.
pub(crate) struct FakeMount {
    pub(crate) directory: tempfile::TempDir,
    semaphore: CString,
}

impl FakeMount {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join(IOVS)).unwrap();
        let name = format!("hoistway-test.{}", Uuid::new_v4());
        let semaphore = CString::new(format!("/{name}")).unwrap();
        // SAFETY: the name ends in NUL; mode and value follow as `O_CREAT` demands.
        let opened = unsafe { libc::sem_open(semaphore.as_ptr(), libc::O_CREAT, 0o600 as libc::mode_t, 0) };
        assert_ne!(opened, libc::SEM_FAILED);
        let fake = Self { directory, semaphore };
        fake.point_submit_at(Path::new(&format!("/dev/shm/sem.{name}")));
        fs::write(fake.file(), vec![7; FILE_BYTES]).unwrap();
        fake
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.directory.path().join("file")
    }

    pub(crate) fn point_submit_at(&self, target: &Path) {
        let link = self.directory.path().join(IOVS).join("submit-ios");
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(target, link).unwrap();
    }

    pub(crate) fn mount(&self, tell: Arc<crate::mount::Tell>) -> Result<Mount> {
        Mount::open_at(self.directory.path().to_owned(), Client::Native, Trust::Peer(tell))
    }
}

impl Drop for FakeMount {
    fn drop(&mut self) {
        // SAFETY: the name ends in NUL.
        unsafe { libc::sem_unlink(self.semaphore.as_ptr()) };
    }
}

impl Peer {
    pub(crate) fn new(options: &RingOptions) -> Self {
        let directory = FakeMount::new();
        let told = Arc::new(Mutex::new(None));
        let tell = {
            let told = told.clone();
            move |key: &Key, name: &Path| {
                if key.ring.is_some() {
                    *told.lock().unwrap() = Some(map(name));
                }
            }
        };
        let mount = directory.mount(Arc::new(tell)).unwrap();
        let ring = mount.create_ring(options).unwrap();
        let len = options.depth * SLOT_BYTES;
        let iov = mount.create_iov(&IovOptions { len, ..IovOptions::default() }).unwrap();
        let file = mount.open_file(&directory.file()).unwrap();
        let (base, bytes) = told.lock().unwrap().take().unwrap();
        // SAFETY: the mapping is never taken away.
        let layout = unsafe { RingLayout::new(base.0, bytes) }.unwrap();
        Self { ring, slots: iov.slots(SLOT_BYTES), file, mount, layout, taken: 0, directory }
    }

    /// Pushes a read, which the peer will see.
    #[allow(clippy::result_large_err, reason = "as the ring has it")]
    pub(crate) fn push(&mut self, offset: u64, len: usize) -> Result<(), Refused> {
        let slot = self.slots.pop().unwrap();
        let transfer = Transfer::new(self.file.clone(), offset, len, slot).token(offset);
        self.ring.push(transfer)
    }

    /// What was submitted since the last call. Entries stay taken until [`release`](Self::release).
    pub(crate) fn take(&mut self) -> Vec<(Sqe, IoArgs)> {
        let mut taken = Vec::new();
        while self.taken != self.layout.sqe_head().load(SeqCst) {
            // SAFETY: the indices are the client's, inside the ring.
            unsafe {
                let sqe = self.layout.sqe(self.taken).unwrap().read_volatile();
                taken.push((sqe, self.layout.args(sqe.index).unwrap().read_volatile()));
            }
            self.taken = self.layout.next(self.taken);
        }
        taken
    }

    /// Gives the entries of all that was taken back.
    pub(crate) fn release(&self) {
        self.layout.sqe_tail().store(self.taken, SeqCst);
    }

    pub(crate) fn complete(&self, sqe: &Sqe, result: i64) {
        self.answer(Cqe { index: sqe.index, reserved: 0, result, user_data: sqe.user_data });
    }

    /// Writes any completion.
    pub(crate) fn answer(&self, cqe: Cqe) {
        let head = self.layout.cqe_head().load(SeqCst);
        // SAFETY: inside the ring.
        unsafe { self.layout.cqe(head).unwrap().write_volatile(cqe) };
        self.layout.cqe_head().store(self.layout.next(head), SeqCst);
        // SAFETY: inside the mapping.
        unsafe { libc::sem_post(self.layout.semaphore()) };
    }

    /// What a wait brings: tokens and results, the slots going back. It does not wait for what is not there.
    pub(crate) fn wait(&mut self) -> Result<Vec<(u64, Result<usize>)>> {
        let mut completions = Vec::new();
        self.ring.wait(Duration::ZERO, &mut completions)?;
        let ended = completions.into_iter().map(|completion| {
            self.slots.push(completion.transfer.slot);
            (completion.transfer.token, completion.result)
        });
        Ok(ended.collect())
    }
}

struct Base(NonNull<u8>);

// SAFETY: it is an address of a mapping that is never taken away.
unsafe impl Send for Base {}

/// Maps what a registration names, as the daemon would.
fn map(name: &Path) -> (Base, usize) {
    let file = File::options().read(true).write(true).open(name).unwrap();
    let len = file.metadata().unwrap().len() as usize;
    // SAFETY: a new mapping touches no other memory.
    let base = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            &file,
            0,
        )
    };
    let base = NonNull::new(base.unwrap().cast::<u8>()).unwrap();
    // SAFETY: the mapping holds a ring, if it is one's; a buffer of the tests is as long.
    unsafe {
        if let Some(layout) = RingLayout::new(base, len) {
            libc::sem_init(layout.semaphore(), 1, 0);
        }
    }
    (Base(base), len)
}
