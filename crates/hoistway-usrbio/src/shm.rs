//! Memory that the daemon can map too. It has a name in `/dev/shm` only while the daemon looks it up.
#![allow(unsafe_code)]

use crate::{Error, Result};
use rustix::{
    fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags},
    io::{Errno, retry_on_intr},
    mm::{Advice, MapFlags, ProtFlags},
};
use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    ptr::NonNull,
};
use uuid::Uuid;

/// Where POSIX shared memory lies on Linux. The protocol has this path in it.
pub(crate) const DIRECTORY: &str = "/dev/shm";

/// A mapping shared with each process that was told its name in time. All its pages exist, so that touching it
/// cannot fail for want of memory.
#[derive(Debug)]
pub struct SharedMemory {
    base: NonNull<u8>,
    len: usize,
    file: OwnedFd,
    /// The NUMA node that was asked for, and why the system does not prefer it.
    off_node: Option<(u32, io::Error)>,
    /// The name in `/dev/shm`, while there is one.
    name: Option<PathBuf>,
}

// SAFETY: it is an address, a length and a descriptor; all access to the bytes goes through raw pointers.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; `&SharedMemory` reads no byte of the mapping.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Maps `len` bytes of zeros, from the NUMA node if one is given and the system lets it: [`off_node`](Self::off_node) says.
    ///
    /// # Errors
    /// [`Error::SharedMemoryFull`] if `/dev/shm` has no room, [`Error::Invalid`] for a length of 0,
    /// [`Error::System`] otherwise.
    pub fn create(len: usize, numa_node: Option<u32>) -> Result<Self> {
        let directory = Path::new(DIRECTORY);
        let len_file = match i64::try_from(len) {
            Ok(len) if len > 0 => len as u64,
            _ => return Err(Error::Invalid(format!("shared memory of {len} bytes cannot be made"))),
        };
        // Without a name, so that nothing is left behind should this process be killed.
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = retry_on_intr(|| rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR))
            .map_err(|error| Error::system("make shared memory", directory, error))?;
        retry_on_intr(|| rustix::fs::ftruncate(&file, len_file))
            .map_err(|error| Error::system("size shared memory", directory, error))?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        }
        .map_err(|error| Error::system("map shared memory", directory, error))?;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| Error::system("map shared memory", directory, Errno::NOMEM))?;
        let mut memory = Self { base, len, file, off_node: None, name: None };
        memory.off_node = numa_node.and_then(|node| Some((node, memory.prefer(node).err()?)));
        memory.allocate(len_file)?;
        // Faults in one go; where the kernel cannot, the first touch does it.
        // SAFETY: the range is this mapping; populating changes no byte.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), len, Advice::LinuxPopulateWrite) };
        Ok(memory)
    }

    /// The first byte.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty. It never is.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The NUMA node that was asked for, and why the system does not prefer it.
    pub fn off_node(&self) -> Option<(u32, &io::Error)> {
        self.off_node.as_ref().map(|(node, error)| (*node, error))
    }

    /// Gives the memory a name, and says which. [`conceal`](Self::conceal) takes it back; that happens once.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn publish(&mut self) -> Result<&Path> {
        let name = Path::new(DIRECTORY).join(format!("hf3fs-iov-{}", Uuid::new_v4().hyphenated()));
        let itself = format!("/proc/self/fd/{}", self.file.as_fd().as_raw_fd());
        rustix::fs::linkat(CWD, itself.as_str(), CWD, &name, AtFlags::SYMLINK_FOLLOW)
            .map_err(|error| Error::system("name shared memory", &name, error))?;
        Ok(self.name.insert(name))
    }

    /// Takes the name away; mappings stay.
    pub fn conceal(&mut self) {
        if let Some(name) = self.name.take() {
            // Fails only if another process has removed it.
            let _ = rustix::fs::unlink(&name);
        }
    }

    /// Gets the pages now: a page that cannot be got later is a SIGBUS.
    fn allocate(&self, len: u64) -> Result<()> {
        match retry_on_intr(|| rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, len)) {
            Ok(()) => Ok(()),
            Err(Errno::NOSPC) => {
                let free_bytes = retry_on_intr(|| rustix::fs::statvfs(DIRECTORY))
                    .ok()
                    .and_then(|room| room.f_bavail.checked_mul(room.f_frsize));
                Err(Error::SharedMemoryFull { needed_bytes: len, free_bytes })
            }
            Err(error) => Err(Error::system("allocate shared memory", Path::new(DIRECTORY), error)),
        }
    }

    fn prefer(&self, node: u32) -> io::Result<()> {
        const WORDS: usize = 16;
        const BITS_A_WORD: u32 = usize::BITS;
        let mut mask = [0usize; WORDS];
        let word = mask
            .get_mut((node / BITS_A_WORD) as usize)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        *word |= 1 << (node % BITS_A_WORD);
        // SAFETY: `mask` outlives the call, and the kernel reads one bit less than it is told; the range is this mapping.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.len,
                libc::MPOL_PREFERRED,
                mask.as_ptr(),
                WORDS * BITS_A_WORD as usize + 1,
                0usize,
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        self.conceal();
        // SAFETY: made by `create`, and every user of addresses into it holds this object.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_a_name_only_while_published() {
        let mut memory = SharedMemory::create(8192, None).unwrap();
        let name = memory.publish().unwrap().to_owned();
        assert_eq!(std::fs::metadata(&name).unwrap().len(), 8192);
        // SAFETY: inside the mapping.
        unsafe { memory.base().add(8191).write(7) };
        assert_eq!(std::fs::read(&name).unwrap()[8191], 7);
        memory.conceal();
        assert!(!name.exists());
        let mut memory = SharedMemory::create(1, None).unwrap();
        let name = memory.publish().unwrap().to_owned();
        drop(memory);
        assert!(!name.exists());
    }

    #[test]
    fn more_than_there_is_room_for_is_an_error_that_says_so() {
        let too_much = 1usize << 50;
        match SharedMemory::create(too_much, None).unwrap_err() {
            Error::SharedMemoryFull { needed_bytes, free_bytes } => {
                assert_eq!(needed_bytes, too_much as u64);
                assert!(free_bytes.is_some());
            }
            // Where /dev/shm has no limit of its own, the address space has.
            error => assert!(matches!(error, Error::System { .. }), "{error}"),
        }
        assert!(matches!(SharedMemory::create(0, None), Err(Error::Invalid(_))));
    }

    #[test]
    fn a_node_that_is_not_there_is_told() {
        assert!(SharedMemory::create(1, None).unwrap().off_node().is_none());
        let memory = SharedMemory::create(1, Some(900)).unwrap();
        assert_eq!(memory.off_node().unwrap().0, 900);
    }
}
