//! What most tests need: the stand-in to themselves, and a context.

use crate::library::{Library, library};
use std::{
    ffi::c_void,
    ops::Deref,
    ptr,
    sync::{Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

/// A latency of copies that outlasts every test. A reset ends it.
pub(crate) const ENDLESS: &str = "COPY_LATENCY_US=600000000";

/// Tests take turns: what is set is the process's.
pub(crate) static ALONE: Mutex<()> = Mutex::new(());

/// An initialized library with default settings, for one test at a time. When dropped, it checks that the
/// test left nothing behind.
pub(crate) struct Driver {
    library: &'static Library,
    _alone: MutexGuard<'static, ()>,
}

impl Driver {
    pub(crate) fn new() -> Driver {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let library = library();
        library.fake_cuda_reset();
        assert_eq!(library.cuInit(0), 0);
        Driver { library, _alone: alone }
    }
}

impl Deref for Driver {
    type Target = Library;

    fn deref(&self) -> &Library {
        self.library
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.fake_cuda_reset();
        if !thread::panicking() {
            for name in ["contexts", "context_depth", "device_bytes", "pinned_bytes", "streams", "events"] {
                assert_eq!(self.count(name), 0, "{name}");
            }
        }
    }
}

/// A driver, and a device's primary context that is current.
pub(crate) struct Session {
    driver: Driver,
    device: i32,
    pub(crate) context: usize,
}

impl Session {
    pub(crate) fn new() -> Session {
        Session::with(Driver::new())
    }

    /// With settings that must be in place before.
    pub(crate) fn configured(settings: &[&str]) -> Session {
        let driver = Driver::new();
        for setting in settings {
            driver.configure(setting);
        }
        Session::with(driver)
    }

    fn with(driver: Driver) -> Session {
        let mut context = 0;
        assert_eq!(driver.cuDevicePrimaryCtxRetain(&mut context, 0), 0);
        assert_eq!(driver.cuCtxSetCurrent(context), 0);
        Session { driver, device: 0, context }
    }

    pub(crate) fn stream(&self) -> usize {
        let mut stream = 0;
        assert_eq!(self.cuStreamCreateWithPriority(&mut stream, 1, -1), 0);
        stream
    }

    pub(crate) fn event(&self) -> usize {
        let mut event = 0;
        assert_eq!(self.cuEventCreate(&mut event, 2), 0);
        event
    }

    pub(crate) fn allocate(&self, bytes: usize) -> u64 {
        let mut address = 0;
        assert_eq!(self.cuMemAlloc_v2(&mut address, bytes), 0);
        address
    }

    /// Device memory with these contents.
    pub(crate) fn upload(&self, bytes: &[u8]) -> u64 {
        let address = self.allocate(bytes.len());
        assert_eq!(self.cuMemcpyHtoD_v2(address, bytes.as_ptr(), bytes.len()), 0);
        address
    }

    pub(crate) fn download(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut contents = vec![0; bytes];
        assert_eq!(self.cuMemcpyDtoH_v2(contents.as_mut_ptr(), address, bytes), 0);
        contents
    }

    /// Pinned memory with these contents.
    pub(crate) fn pinned(&self, contents: &[u8]) -> &'static mut [u8] {
        let mut address = ptr::null_mut();
        assert_eq!(self.cuMemHostAlloc(&mut address, contents.len(), 0), 0);
        // SAFETY: just allocated with this length; it is freed at the end of a test that uses it no more.
        let pinned = unsafe { std::slice::from_raw_parts_mut(address, contents.len()) };
        pinned.copy_from_slice(contents);
        pinned
    }

    /// Holds up a stream until the gate is dropped.
    pub(crate) fn gate(&self, stream: usize) -> Gate {
        extern "C" fn wait(gate: *mut c_void) {
            // SAFETY: the receiver that `gate` gave away, once.
            let gate = unsafe { Box::from_raw(gate.cast::<mpsc::Receiver<()>>()) };
            // The error is the signal: the sender is gone.
            let _ = gate.recv();
        }
        let (sender, receiver) = mpsc::channel();
        let argument = Box::into_raw(Box::new(receiver)).cast();
        assert_eq!(self.cuLaunchHostFunc(stream, wait, argument), 0);
        Gate(sender)
    }
}

impl Deref for Session {
    type Target = Library;

    fn deref(&self) -> &Library {
        &self.driver
    }
}

impl Drop for Session {
    /// The last release frees what the test allocated.
    fn drop(&mut self) {
        self.cuCtxSetCurrent(0);
        self.cuDevicePrimaryCtxRelease_v2(self.device);
    }
}

/// Keeps a stream waiting.
pub(crate) struct Gate(#[expect(dead_code, reason = "held to be dropped")] mpsc::Sender<()>);

/// Waits until something holds. Returns `false` if it does not within a minute.
pub(crate) fn comes_to_hold(mut holds: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Bytes in which no stretch repeats soon.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    let mut state = 0x2545_F491_4F6C_DD1Du64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}
