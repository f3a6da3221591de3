//! cuFile: opening, properties, reads and writes.

use crate::{
    fixture::{Driver, ENDLESS, Session, comes_to_hold, pattern},
    library::CufileStatus,
};
use std::{
    env,
    fs::{self, File},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::PathBuf,
    process,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

pub(crate) const OK: CufileStatus = CufileStatus { error: 0, cuda: 0 };

fn error(error: i32) -> CufileStatus {
    CufileStatus { error, cuda: 0 }
}

/// A file of test bytes that is registered, and a driver that is open.
pub(crate) struct Fixture {
    pub(crate) session: Session,
    pub(crate) bytes: Vec<u8>,
    pub(crate) handle: usize,
    pub(crate) file: File,
    path: PathBuf,
}

impl Fixture {
    pub(crate) fn new(settings: &[&str], flags: i32) -> Fixture {
        static NUMBERS: AtomicU32 = AtomicU32::new(0);
        let session = Session::configured(settings);
        assert_eq!(session.cuFileDriverOpen(), OK);
        let bytes = pattern(3_000_001);
        let name = format!("fake-cufile-{}-{}", process::id(), NUMBERS.fetch_add(1, Ordering::Relaxed));
        let path = env::temp_dir().join(name);
        fs::write(&path, &bytes).unwrap();
        let file = File::options().read(true).write(true).custom_flags(flags).open(&path).unwrap();
        let mut handle = 0;
        assert_eq!(session.cuFileHandleRegister(&mut handle, &description(file.as_raw_fd())), OK);
        Fixture { session, bytes, handle, file, path }
    }

    pub(crate) fn read(&self, address: u64, size: usize, file_offset: i64, buffer_offset: i64) -> isize {
        self.session.cuFileRead(self.handle, address, size, file_offset, buffer_offset)
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.session.cuFileHandleDeregister(self.handle);
        self.session.cuFileDriverClose_v2();
        let _ = fs::remove_file(&self.path);
        if !thread::panicking() {
            for name in ["cufile_handles", "cufile_buffers"] {
                assert_eq!(self.session.count(name), 0, "{name}");
            }
            assert_eq!(self.session.cuFileUseCount(), 0);
        }
    }
}

fn description(fd: i32) -> [u64; 3] {
    [1, fd as u64, 0]
}

#[test]
fn parameters_are_set_before_the_driver_opens() {
    let driver = Driver::new();
    let mut version = 0;
    assert_eq!((driver.cuFileGetVersion(&mut version), version), (OK, 1200));
    assert_eq!(driver.cuFileSetParameterString(1, c"/dev/null".as_ptr()), OK);
    assert_eq!(driver.cuFileSetParameterSizeT(5, 1024), OK);
    assert_eq!(driver.cuFileSetParameterBool(1, false), OK);
    assert_eq!(driver.cuFileSetParameterBool(99, false), error(5022));
    let mut allowed = true;
    assert_eq!((driver.cuFileGetParameterBool(1, &mut allowed), allowed), (OK, false));
    let mut properties = [0; 14];
    assert_eq!(driver.cuFileDriverGetProperties(&mut properties), OK);
    assert_eq!((properties[4], properties[7]), (1024, 0));

    assert_eq!(driver.cuFileDriverOpen(), OK);
    assert_eq!(driver.cuFileUseCount(), 1);
    for status in [
        driver.cuFileSetParameterString(1, c"/dev/null".as_ptr()),
        driver.cuFileSetParameterSizeT(5, 16384),
        driver.cuFileSetParameterBool(1, true),
    ] {
        assert_eq!(status, error(5026));
    }
    assert_eq!(driver.cuFileDriverClose_v2(), OK);
    assert_eq!(driver.cuFileDriverClose_v2(), error(5001));

    driver.configure("CUFILE_MODE=compat_strict");
    assert_eq!(driver.cuFileDriverOpen(), error(5033));
    assert_eq!(driver.cuFileSetParameterSizeT(5, 16384), OK);
    assert_eq!(driver.cuFileSetParameterBool(1, true), OK);
    assert_eq!((driver.cuFileDriverOpen(), driver.cuFileDriverClose_v2()), (OK, OK));
    driver.configure("CUFILE_MODE=closed");
    assert_eq!(driver.cuFileDriverOpen(), error(5033));
}

#[test]
fn the_mode_shows_in_properties_and_statistics() {
    // Version of nvidia-fs, status, control and feature flags, and which counter of reads grows.
    for (mode, nvfs, status, features, counter) in
        [("nvfs", 2, 1 << 4, 15, 8), ("p2pdma", 0, 1 << 4, 31, 7), ("compat", 0, 0, 15, 9)]
    {
        let fixture = Fixture::new(&[&format!("CUFILE_MODE={mode}")], 0);
        let mut properties = [0; 14];
        assert_eq!(fixture.session.cuFileDriverGetProperties(&mut properties), OK);
        assert_eq!((properties[0], properties[6], properties[8]), (nvfs, status, features), "{mode}");
        assert_eq!(properties[7], 2, "compatibility is allowed");

        let stats = || {
            let mut stats = [0; 639];
            assert_eq!(fixture.session.cuFileGetStatsL3(&mut stats), OK);
            // From the first device's UUID on.
            stats[143..174].to_vec()
        };
        assert_eq!(fixture.session.cuFileSetStatsLevel(3), OK);
        assert_eq!(fixture.session.cuFileStatsStart(), OK);
        let before = stats();
        let address = fixture.session.allocate(4096);
        assert_eq!(fixture.read(address, 4096, 0, 0), 4096);
        let after = stats();
        let grown: Vec<_> = (6..10).filter(|field| after[*field] == before[*field] + 1).collect();
        assert_eq!(grown, [6, counter], "{mode}");
        assert_eq!(after[2], before[2] + 4096);
        fixture.session.configure("CUFILE_STATS=0");
        assert_eq!(fixture.session.cuFileGetStatsL3(&mut [0; 639]), error(5022));
    }
}

#[test]
fn files_are_registered_once_and_only_while_open() {
    let fixture = Fixture::new(&["CUFILE_MODE=nvfs"], 0);
    let mut handle = 0;
    let mut register = |fd| fixture.session.cuFileHandleRegister(&mut handle, &description(fd));
    assert_eq!(register(fixture.file.as_raw_fd()), error(5028));
    assert_eq!(register(-1), error(5022));
    let folder = File::open("/").unwrap();
    assert_eq!(register(folder.as_raw_fd()), error(5018));
    fixture.session.configure("CUFILE_REFUSE_FS=1");
    let again = fixture.file.try_clone().unwrap();
    assert_eq!(register(again.as_raw_fd()), error(5030));
    let address = fixture.session.allocate(1);
    assert_eq!(fixture.session.cuFileRead(fixture.handle + 16, address, 1, 0, 0), -5027);
    drop(fixture);
    let driver = Driver::new();
    assert_eq!(driver.cuFileHandleRegister(&mut handle, &description(again.as_raw_fd())), error(5001));
}

#[test]
fn reads_arrive_in_device_memory() {
    for flags in [0, libc::O_DIRECT] {
        let fixture = Fixture::new(&[], flags);
        let len = fixture.bytes.len();
        let address = fixture.session.allocate(len + 10);
        // Whole, unaligned on all sides, at the end, and behind it.
        for (file_offset, size, buffer_offset) in
            [(0, len, 0), (4097, 1_500_001, 7), (len - 5, 10, 3), (len, 10, 0), (len + 5000, 1, 0), (0, 0, 0)]
        {
            let expected = size.min(len.saturating_sub(file_offset));
            let read = fixture.read(address, size, file_offset as i64, buffer_offset as i64);
            assert_eq!(read, expected as isize, "{file_offset} {flags}");
            let there = fixture.session.download(address + buffer_offset as u64, expected.max(1));
            if expected > 0 {
                assert!(there == fixture.bytes[file_offset..][..expected], "{file_offset} {flags}");
            }
        }
    }
}

#[test]
fn writes_arrive_in_the_file() {
    for flags in [0, libc::O_DIRECT] {
        let fixture = Fixture::new(&[], flags);
        let address = fixture.session.upload(b"device memory");
        assert_eq!(fixture.session.cuFileWrite(fixture.handle, address, 6, 101, 7), 6);
        assert_eq!(
            fs::read(&fixture.path).unwrap()[100..108],
            *[&[fixture.bytes[100]], &b"memory"[..], &[fixture.bytes[107]]].concat()
        );
        assert_eq!(fixture.session.cuFileRead(fixture.handle, address, 6, 101, 0), 6);
        assert_eq!(fixture.session.download(address, 7), b"memory ");
    }
}

#[test]
fn many_threads_read_and_write_at_once() {
    const THREADS: usize = 64;
    const BLOCK: usize = 10_000;
    for flags in [0, libc::O_DIRECT] {
        let fixture = Fixture::new(&[ENDLESS, "JITTER_US=1000"], flags);
        let address = fixture.session.allocate(THREADS * BLOCK);
        let counts = || ["cufile_reads", "cufile_writes"].map(|name| fixture.session.count(name));
        let before = counts();
        thread::scope(|scope| {
            for number in 0..THREADS {
                let fixture = &fixture;
                scope.spawn(move || {
                    let place = (number * BLOCK) as i64;
                    // Into another block's place, from where it is written back behind the others.
                    let swapped = ((THREADS - 1 - number) * BLOCK) as i64;
                    assert_eq!(fixture.read(address, BLOCK, place, swapped), BLOCK as isize);
                    let behind = (THREADS * BLOCK) as i64 + place;
                    let session = &fixture.session;
                    let written = session.cuFileWrite(fixture.handle, address, BLOCK, behind, swapped);
                    assert_eq!(written, BLOCK as isize);
                });
            }
            // No call ends before the reset.
            let is_parallel = comes_to_hold(|| counts()[0] == before[0] + THREADS as u64);
            fixture.session.fake_cuda_reset();
            assert!(is_parallel, "one call waits for another");
        });
        assert_eq!(counts(), before.map(|count| count + THREADS as u64));
        let blocks = &fixture.bytes[..THREADS * BLOCK];
        let swapped: Vec<_> = blocks.rchunks(BLOCK).flatten().copied().collect();
        assert!(fixture.session.download(address, THREADS * BLOCK) == swapped);
        assert!(fs::read(&fixture.path).unwrap()[THREADS * BLOCK..][..THREADS * BLOCK] == *blocks);
    }
}

#[test]
fn each_call_has_its_delay() {
    let fixture = Fixture::new(&["COPY_MIB_S=100"], 0);
    let address = fixture.session.allocate(1 << 20);
    let time_of = |calls: usize, size: usize| {
        let begin = Instant::now();
        for _ in 0..calls {
            assert_eq!(fixture.read(address, size, 0, 0), size as isize);
            assert_eq!(fixture.session.cuFileWrite(fixture.handle, address, size, 0, 0), size as isize);
        }
        begin.elapsed()
    };
    assert!(time_of(1, 1 << 20) >= Duration::from_millis(20));
    fixture.session.configure("COPY_MIB_S=0");
    fixture.session.configure("JITTER_US=10000");
    assert!(time_of(10, 1) >= Duration::from_millis(20), "a fifth of what is to be expected");
    fixture.session.configure("JITTER_US=0");
    fixture.session.configure("COPY_LATENCY_US=20000");
    assert!(time_of(1, 1) >= Duration::from_millis(40));
    let closing = thread::scope(|scope| {
        fixture.session.configure(ENDLESS);
        let reads = fixture.session.count("cufile_reads");
        scope.spawn(|| fixture.read(address, 1, 0, 0));
        while fixture.session.count("cufile_reads") == reads {
            thread::yield_now();
        }
        let closing = fixture.session.cuFileDriverClose_v2();
        fixture.session.fake_cuda_reset();
        closing
    });
    assert_eq!(closing, error(5006), "a call is under way");
}

#[test]
fn buffers_must_be_device_memory() {
    let fixture = Fixture::new(&[], 0);
    let session = &fixture.session;
    let address = session.allocate(1000);
    let pinned = session.pinned(&[0; 100]).as_ptr() as u64;
    assert_eq!(fixture.read((&raw const fixture).addr() as u64, 10, 0, 0), -5012);
    assert_eq!(fixture.read(pinned, 10, 0, 0), -5013);
    assert_eq!(fixture.read(address, 1000, 0, 1), -5014);
    assert_eq!(fixture.read(address, 10, 0, -1), -5022);

    assert_eq!(session.cuFileBufRegister(address, 1001, 0), error(5014));
    assert_eq!(session.cuFileBufRegister(address, 0, 0), error(5022));
    assert_eq!(session.cuFileBufRegister(address, 500, 0), OK);
    assert_eq!(session.cuFileBufRegister(address + 100, 10, 0), error(5023));
    assert_eq!(session.count("cufile_buffers"), 1);
    assert_eq!(fixture.read(address, 10, 0, 490), 10);
    assert_eq!(fixture.read(address, 11, 0, 490), -5017);
    assert_eq!(session.cuFileBufDeregister(address), OK);
    assert_eq!(session.cuFileBufDeregister(address), error(5022));
    assert_eq!(session.cuMemFree_v2(address), 0);
    assert_eq!(fixture.read(address, 10, 0, 0), -5012);
}

#[test]
fn reads_fail_on_request() {
    let fixture = Fixture::new(&[], 0);
    let address = fixture.session.allocate(10_000);
    fixture.session.configure("CUFILE_READ_FAULTS=1=-5012,2=short:4096,3=-5");
    let reads = fixture.session.count("cufile_reads");
    assert_eq!(fixture.read(address, 10_000, 0, 0), -5012);
    assert_eq!(fixture.read(address, 10_000, 0, 0), 4096);
    assert_eq!(fixture.read(address, 10_000, 0, 0), -1);
    assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EIO));
    assert_eq!(fixture.read(address, 10_000, 0, 0), 10_000);
    assert_eq!(fixture.session.count("cufile_reads"), reads + 4);
    fixture.session.configure("FAULTS=cuFileRead:1=5016,cuFileBufRegister:1=801");
    assert_eq!(fixture.read(address, 10_000, 0, 0), -5016);
    let refused = CufileStatus { error: 5011, cuda: 801 };
    assert_eq!(fixture.session.cuFileBufRegister(address, 10, 0), refused);
}

#[test]
fn a_descriptor_that_means_another_file_is_not_read() {
    let fixture = Fixture::new(&[], 0);
    let address = fixture.session.allocate(1);
    let other = File::open("/proc/self/exe").unwrap();
    let kept = fixture.file.try_clone().unwrap();
    // SAFETY: both descriptors are open; the registered one means the other file until it is put back.
    unsafe { libc::dup2(other.as_raw_fd(), fixture.file.as_raw_fd()) };
    assert_eq!(fixture.read(address, 1, 0, 0), -1);
    // SAFETY: as before.
    unsafe { libc::dup2(kept.as_raw_fd(), fixture.file.as_raw_fd()) };
    assert_eq!(fixture.read(address, 1, 0, 0), 1);
}

#[test]
fn what_is_left_when_the_driver_closes_is_counted() {
    let fixture = Fixture::new(&[], 0);
    let leaked = fixture.session.count("leaked");
    let address = fixture.session.allocate(10);
    assert_eq!(fixture.session.cuFileBufRegister(address, 10, 0), OK);
    assert_eq!((fixture.session.cuFileDriverOpen(), fixture.session.cuFileDriverClose_v2()), (OK, OK));
    assert_eq!(fixture.session.count("leaked"), leaked);
    assert_eq!(fixture.session.cuFileDriverClose_v2(), OK);
    assert_eq!(fixture.session.count("leaked"), leaked + 2);
}
