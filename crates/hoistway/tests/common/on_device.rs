//! What tests of devices share: the devices, their faults, options, a file of several chunks.

use super::{
    TestTensor,
    stand_in::{STAND_IN, Turn, Vendor},
    tensor, write_model,
};
use hoistway::{DeviceId, Dtype, LoadOptions, Route};
use hoistway_device::toy;
pub use hoistway_device::toy::Fault;
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

pub const CUDA: DeviceId = DeviceId::Cuda(0);
pub const ROCM: DeviceId = DeviceId::Rocm(0);
pub const TOY: DeviceId = DeviceId::Toy(0);

/// The kinds of devices that every test of devices runs on, each played by a stand-in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Played {
    /// By a driver in host memory. It has all that CUDA has.
    Cuda,
    /// By the same driver under HIP's names. It has all but a direct path.
    Rocm,
    /// By a device that copies and does nothing else.
    Toy,
}

impl Played {
    pub const ALL: [Self; 3] = [Self::Cuda, Self::Rocm, Self::Toy];

    /// The device of this number.
    pub fn device(self, ordinal: u32) -> DeviceId {
        self.vendor().map_or(DeviceId::Toy(ordinal), |vendor| vendor.device(ordinal))
    }

    /// Whose driver it is, if it is one.
    pub fn vendor(self) -> Option<Vendor> {
        match self {
            Self::Cuda => Some(Vendor::Cuda),
            Self::Rocm => Some(Vendor::Rocm),
            Self::Toy => None,
        }
    }

    /// Loads to the first device, by whichever route.
    pub fn options(self) -> LoadOptions {
        LoadOptions::default().device(self.device(0))
    }

    pub fn staged(self) -> LoadOptions {
        self.options().route(Route::Staged)
    }

    /// Makes the devices fail: the `nth` time from now on, counted from 1, or each time.
    pub fn fail(self, fault: Fault, nth: Option<u64>) {
        let Some(vendor) = self.vendor() else {
            // As what is set of a driver: what is kept is made anew.
            hoistway_device::release_devices();
            return toy::fail(fault, nth);
        };
        let (function, code) = Self::of_driver(fault);
        let nth = nth.map_or("*".into(), |nth| nth.to_string());
        STAND_IN.set(&vendor.faults(&format!("{function}:{nth}={code}")));
    }

    /// The function of CUDA's driver that a fault is one of, and what it returns.
    fn of_driver(fault: Fault) -> (&'static str, i32) {
        match fault {
            Fault::AskMemory => ("cuMemGetInfo_v2", 999),
            Fault::Allocate => ("cuMemAlloc_v2", 999),
            Fault::Exhaust => ("cuMemAlloc_v2", 2),
            Fault::Pin => ("cuMemHostRegister_v2", 999),
            Fault::PinLimit => ("cuMemHostRegister_v2", 2),
            Fault::MakeStream => ("cuStreamCreate", 2),
            Fault::Queue => ("cuMemcpyHtoDAsync_v2", 1),
            Fault::Mark => ("cuEventRecord", 700),
            Fault::Copy => ("copy", 719),
            Fault::Lose => ("cuEventSynchronize", 719),
            Fault::Doubt => ("cuEventSynchronize", 999),
            other => panic!("drivers have no {other:?}"),
        }
    }

    /// Makes the devices fail several times, counted from 1.
    pub fn fail_each(self, fault: Fault, times: &[u64]) {
        let Some(vendor) = self.vendor() else {
            hoistway_device::release_devices();
            return times.iter().for_each(|&nth| toy::fail(fault, Some(nth)));
        };
        let (function, code) = Self::of_driver(fault);
        let each: Vec<_> = times.iter().map(|nth| format!("{function}:{nth}={code}")).collect();
        STAND_IN.set(&vendor.faults(&each.join(",")));
    }

    /// Makes copies take so long at least; on a driver none as long as the other.
    pub fn delay(self, delay: Duration) {
        match self {
            Self::Cuda | Self::Rocm => ["COPY_LATENCY_US", "JITTER_US"]
                .map(|setting| STAND_IN.set(&format!("{setting}={}", delay.as_micros())))
                .into_iter()
                .collect(),
            Self::Toy => toy::set_delay(delay),
        }
    }

    pub fn set_memory_mib(self, mib: u64) {
        match self {
            Self::Cuda | Self::Rocm => STAND_IN.set(&format!("MEMORY_MIB={mib}")),
            Self::Toy => toy::set_memory_bytes(mib << 20),
        }
    }

    /// Takes back what was set.
    pub fn reset(self) {
        match self {
            Self::Cuda | Self::Rocm => STAND_IN.reset(),
            Self::Toy => toy::reset(),
        }
    }

    /// Bytes that are allocated on the devices.
    pub fn device_bytes(self) -> u64 {
        self.vendor().map_or_else(|| toy::in_use().0, |vendor| vendor.count("device_bytes"))
    }

    /// Bytes of host memory that are pinned.
    pub fn pinned_bytes(self) -> u64 {
        self.vendor().map_or_else(|| toy::in_use().1, |vendor| vendor.count("pinned_bytes"))
    }
}

pub fn disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub fn to_device() -> LoadOptions {
    LoadOptions::default().device(DeviceId::Cuda(0))
}

pub fn staged() -> LoadOptions {
    to_device().route(Route::Staged)
}

/// A file of several chunks, and its bytes.
pub fn chunky(directory: &Path) -> (PathBuf, Vec<u8>) {
    let path = directory.join("chunky.safetensors");
    let tensors: Vec<TestTensor> = (0..8).map(|i| tensor(&format!("t{i}"), Dtype::U8, &[3 << 20])).collect();
    let file = write_model(&path, &tensors, 0, 3);
    (path, file)
}

/// Before a test counts: cuFile starts threads when it is first used, and the stand-in opens the memory of a device.
pub fn start_threads_that_stay(path: &Path) {
    drop(hoistway::load(&[path], &to_device().route(Route::GdsCompat)).unwrap());
    for played in Played::ALL {
        drop(hoistway::load(&[path], &played.staged()).unwrap());
    }
}

/// All devices of the tests, to oneself: what is set and counted is the process's.
pub struct Devices(Turn);

impl Devices {
    pub fn take() -> Self {
        let turn = Turn::take();
        toy::reset();
        Self(turn)
    }

    /// Each kind, with nothing set.
    pub fn each(&self) -> impl Iterator<Item = Played> {
        Played::ALL.into_iter().inspect(|played| played.reset())
    }

    pub fn assert_nothing_left(&self, of: &str) {
        self.0.assert_nothing_left(of);
        assert_eq!(toy::in_use(), (0, 0), "{of}");
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        toy::reset();
    }
}
