//! What concerns the whole process: initialization, the environment, forks, and devices.

use crate::{
    fixture::{Driver, Session},
    library::library,
};
use std::{
    env,
    ffi::{CStr, c_char},
    process::Command,
    ptr,
};

/// Runs a test of this file in a process of its own.
fn in_new_process(test: &str, environment: &[(&str, &str)]) -> bool {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--ignored"])
        .envs(environment.iter().copied())
        .status()
        .unwrap()
        .success()
}

#[test]
fn the_environment_is_read_and_restored() {
    let environment = [
        ("FAKE_CUDA_DEVICES", "3"),
        ("FAKE_CUDA_DRIVER_VERSION", "13000"),
        ("FAKE_CUDA_FAULTS", "cuDriverGetVersion:2=999"),
    ];
    assert!(in_new_process("process::child_of_an_environment", &environment));
}

#[test]
#[ignore = "only as a child"]
fn child_of_an_environment() {
    let library = library();
    let (mut count, mut version) = (0, 0);
    assert_eq!(library.cuDeviceGetCount(&mut count), 3, "not initialized");
    assert_eq!(library.cuInit(0), 0);
    assert_eq!((library.cuDeviceGetCount(&mut count), count), (0, 3));
    assert_eq!((library.cuDriverGetVersion(&mut version), version), (0, 13_000));
    assert_eq!(library.cuDriverGetVersion(&mut version), 999);
    library.configure("DEVICES=1");
    assert_eq!((library.cuDeviceGetCount(&mut count), count), (0, 1));
    library.fake_cuda_reset();
    assert_eq!((library.cuDeviceGetCount(&mut count), count), (0, 3));
    let versions: Vec<_> = (0..2).map(|_| library.cuDriverGetVersion(&mut version)).collect();
    assert_eq!(versions, [0, 999], "faults count from when they were set");
}

#[test]
fn a_variable_that_makes_no_sense_is_not_overlooked() {
    for variable in [("FAKE_CUDA_FAULT", "cuInit:1=2"), ("FAKE_CUDA_DEVICES", "many")] {
        assert!(in_new_process("process::child_that_cannot_start", &[variable]));
    }
}

#[test]
#[ignore = "only as a child"]
fn child_that_cannot_start() {
    assert_eq!(library().cuInit(0), 1);
}

#[test]
fn a_machine_without_devices_says_so() {
    assert!(in_new_process("process::child_without_devices", &[("FAKE_CUDA_DEVICES", "0")]));
}

#[test]
#[ignore = "only as a child"]
fn child_without_devices() {
    assert_eq!(library().cuInit(0), 100);
}

/// The status of a child that does `action` and exits with what it returns.
fn in_fork(action: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child only calls the stand-in, which takes no locks there, and functions that may be called
    // after a fork.
    unsafe {
        match libc::fork() {
            0 => {
                let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                libc::setrlimit(libc::RLIMIT_CORE, &no_core);
                libc::_exit(action())
            }
            child => {
                let mut status = 0;
                assert_eq!(libc::waitpid(child, &mut status, 0), child);
                status
            }
        }
    }
}

#[test]
fn a_forked_child_gets_nothing() {
    let session = Session::new();
    let address = session.allocate(1);
    let status = in_fork(|| {
        let mut place = 0;
        let calls = [
            session.cuInit(0),
            session.cuMemAlloc_v2(&mut place, 1),
            session.cuMemFree_v2(address),
            session.cuCtxSynchronize(),
            session.cuFileDriverOpen().cuda,
        ];
        i32::from(calls != [3; 5])
    });
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
}

#[test]
fn the_host_cannot_follow_a_device_address() {
    let session = Session::new();
    let address = session.upload(b"secret");
    // SAFETY: not safe at all: the child must crash here.
    let status = in_fork(|| unsafe { ptr::read_volatile(address as *const u8) }.into());
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV);
}

#[test]
fn errors_have_their_names() {
    let driver = Driver::new();
    let ask = |function: &dyn Fn(*mut *const c_char) -> i32| {
        let mut text = ptr::null();
        let code = function(&mut text);
        // SAFETY: null or a text of the library, which stays loaded.
        let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_str().unwrap());
        (code, text)
    };
    let name = |error| ask(&|place| driver.cuGetErrorName(error, place));
    assert_eq!(name(2), (0, Some("CUDA_ERROR_OUT_OF_MEMORY")));
    assert_eq!(name(700), (0, Some("CUDA_ERROR_ILLEGAL_ADDRESS")));
    assert_eq!(name(12345), (1, None));
    assert_eq!(ask(&|place| driver.cuGetErrorString(2, place)), (0, Some("out of memory")));
}

#[test]
fn devices_describe_themselves() {
    let driver = Driver::new();
    let attribute = |attribute| {
        let mut value = -1;
        assert_eq!(driver.cuDeviceGetAttribute(&mut value, attribute, 1), 0);
        value
    };
    // Multiprocessors, integrated, host memory, bus, device, unified, domain, capability, pageable access,
    // pools, RDMA.
    let values = [16, 18, 19, 33, 34, 41, 50, 75, 76, 88, 100, 115, 116].map(attribute);
    assert_eq!(values, [132, 0, 1, 2, 0, 1, 0, 9, 0, 0, 0, 1, 1]);
    driver.configure("INTEGRATED=1");
    driver.configure("POOLS=0");
    assert_eq!([18, 88, 100, 115].map(attribute), [1, 1, 1, 0]);

    let mut device = -1;
    assert_eq!((driver.cuDeviceGet(&mut device, 1), device), (0, 1));
    assert_eq!(driver.cuDeviceGet(&mut device, 2), 101);
    let mut text = [0xFF; 32];
    assert_eq!(driver.cuDeviceGetPCIBusId(text.as_mut_ptr(), 32, 1), 0);
    assert_eq!(CStr::from_bytes_until_nul(&text).unwrap(), c"0000:02:00.0");
    assert_eq!(driver.cuDeviceGetName(text.as_mut_ptr(), 6, 1), 0);
    assert_eq!(CStr::from_bytes_until_nul(&text).unwrap(), c"Stand");
    let mut total = 0;
    driver.configure("MEMORY_MIB=3");
    assert_eq!((driver.cuDeviceTotalMem_v2(&mut total, 0), total), (0, 3 << 20));
    let mut uuids = [[0; 16]; 2];
    for (device, uuid) in uuids.iter_mut().enumerate() {
        assert_eq!(driver.cuDeviceGetUuid_v2(uuid, device as i32), 0);
    }
    assert_ne!(uuids[0], uuids[1]);
}
