//! A mounted daemon with files, both clients, and reads of a line.

use hoistway_usrbio::{
    Client, Completion, Error, File as UsrbioFile, IovOptions, IovSlot, Library, LibrarySearch, Mount,
    Refused, Result, Ring, RingOptions, Transfer,
};
use requirements::{Requirement, skip};
use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use usrbiod::{Options, Spawned};

/// Longer than anything here takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Fixture {
    pub(crate) daemon: Spawned,
    root: tempfile::TempDir,
    mount_point: tempfile::TempDir,
}

impl Fixture {
    /// `None`, and a line that says why, where FUSE cannot be used.
    #[track_caller]
    pub(crate) fn start() -> Option<Self> {
        Self::start_with(&Options::default())
    }

    #[track_caller]
    pub(crate) fn start_with(options: &Options) -> Option<Self> {
        if let Err(error) = usrbiod::is_usable() {
            skip(Requirement::Fuse, error);
            return None;
        }
        let (root, mount_point) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        match Spawned::start(&daemon_program(), root.path(), mount_point.path(), options) {
            Ok(daemon) => Some(Self { daemon, root, mount_point }),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                skip(Requirement::Fuse, error);
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// A daemon in the place of one that was killed.
    pub(crate) fn start_again(&mut self) {
        self.daemon.unmount().unwrap();
        self.daemon =
            Spawned::start(&daemon_program(), self.root.path(), self.mount_point.path(), &Options::default())
                .unwrap();
    }

    /// Where a file is on the mount.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.daemon.mount_point().join(name)
    }

    /// Where it really is.
    pub(crate) fn behind(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Makes a file of bytes that differ at each place.
    pub(crate) fn write(&self, name: &str, len: usize) -> PathBuf {
        std::fs::write(self.behind(name), pattern(0, len)).unwrap();
        self.path(name)
    }

    pub(crate) fn mount(&self, client: Client) -> Mount {
        Mount::open(self.daemon.mount_point(), client).unwrap()
    }
}

pub(crate) fn pattern(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(|at| (at % 251) as u8 ^ (at >> 12) as u8).collect()
}

pub(crate) fn daemon_program() -> PathBuf {
    env!("CARGO_BIN_EXE_usrbiod").into()
}

/// Cargo puts it beside the test programs.
pub(crate) fn library_path() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let directory = program.parent().unwrap();
    let name = "libhf3fs_api_shared.so";
    let places = [directory.join(name), directory.join("..").join(name)];
    places.into_iter().find(|path| path.exists()).expect("the stand-in was not built beside the tests")
}

pub(crate) fn search() -> LibrarySearch {
    LibrarySearch::default().library(library_path())
}

pub(crate) fn clients() -> [Client; 2] {
    [Client::Native, Client::Vendor(Library::find(&search()).unwrap())]
}

/// A ring, slots and files of one mount.
pub(crate) struct Session {
    pub(crate) mount: Mount,
    pub(crate) ring: Ring,
    pub(crate) slots: Vec<IovSlot>,
}

impl Session {
    pub(crate) fn new(mount: Mount, slots: usize, slot_bytes: usize) -> Self {
        Self::with(mount, slots, slot_bytes, &RingOptions::default().depth(slots))
    }

    pub(crate) fn with(mount: Mount, slots: usize, slot_bytes: usize, options: &RingOptions) -> Self {
        let iov = mount.create_iov(&IovOptions::default().len(slots * slot_bytes)).unwrap();
        let ring = mount.create_ring(options).unwrap();
        Self { mount, ring, slots: iov.slots(slot_bytes) }
    }

    #[allow(clippy::result_large_err, reason = "as the ring has it")]
    pub(crate) fn push(&mut self, file: &Arc<UsrbioFile>, offset: u64, len: usize) -> Result<(), Refused> {
        let slot = self.slots.pop().expect("a slot is free");
        self.ring.push(Transfer::new(file.clone(), offset, len, slot).token(offset))
    }

    /// Waits for whatever is in flight.
    pub(crate) fn drain(&mut self) -> Result<Vec<Completion>> {
        let (end, mut completions) = (Instant::now() + PATIENCE, Vec::new());
        while self.ring.in_flight() > 0 {
            assert!(Instant::now() < end, "transfers neither ended nor failed");
            self.ring.wait(Duration::from_secs(1), &mut completions)?;
        }
        Ok(completions)
    }

    /// One read: what came.
    pub(crate) fn read(&mut self, file: &Arc<UsrbioFile>, offset: u64, len: usize) -> Result<Vec<u8>> {
        match self.push(file, offset, len) {
            Ok(()) => {}
            Err(Refused::Failed(_, error)) => return Err(error),
            Err(Refused::Full(_)) => panic!("an empty ring is full"),
        }
        let completion = self.drain()?.pop().unwrap();
        self.keep(completion).1
    }

    /// Takes the slot back, and the bytes out.
    pub(crate) fn keep(&mut self, completion: Completion) -> (u64, Result<Vec<u8>>) {
        let slot = completion.transfer.slot;
        let bytes = completion.result.map(|got| {
            let mut bytes = vec![0; got];
            slot.copy_to(0, &mut bytes).unwrap();
            bytes
        });
        self.slots.push(slot);
        (completion.transfer.token, bytes)
    }

    /// Reads a range in pieces, many in flight, and compares with the file behind the mount.
    pub(crate) fn compare(&mut self, path: &Path, behind: &Path, ranges: impl Iterator<Item = (u64, usize)>) {
        let (file, behind) = (self.mount.open_file(path).unwrap(), File::open(behind).unwrap());
        let mut ranges = ranges.peekable();
        let mut completions = Vec::new();
        let mut expected = Vec::new();
        while ranges.peek().is_some() || self.ring.in_flight() > 0 {
            while !self.slots.is_empty()
                && let Some((offset, len)) = ranges.peek().copied()
            {
                match self.push(&file, offset, len) {
                    Ok(()) => drop(ranges.next()),
                    Err(Refused::Full(transfer)) => {
                        self.slots.push(transfer.slot);
                        break;
                    }
                    Err(Refused::Failed(_, error)) => panic!("{error}"),
                }
            }
            self.ring.wait(PATIENCE, &mut completions).unwrap();
            for completion in completions.drain(..) {
                let wanted = completion.transfer.len;
                let (offset, bytes) = self.keep(completion);
                let bytes = bytes.unwrap();
                expected.resize(wanted, 0);
                behind.read_exact_at(&mut expected, offset).unwrap();
                assert!(bytes == expected, "{wanted} bytes at {offset} differ");
            }
        }
    }
}

/// Waits until something is so; the daemon hears of ends by and by.
pub(crate) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Checks that an operation fails in time.
pub(crate) fn fails_within<T>(limit: Duration, operation: impl FnOnce() -> Result<T>) -> Error {
    let start = Instant::now();
    let Err(error) = operation() else { panic!("it did not fail") };
    let took = start.elapsed();
    assert!(took <= limit, "it took {took:?} to say: {error}");
    error
}
