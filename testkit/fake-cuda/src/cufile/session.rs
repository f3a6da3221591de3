//! Opening and closing cuFile's driver, and what it says of itself.

use super::{
    abi::{
        DRIVER_ALREADY_OPEN, DRIVER_CLOSING, DRIVER_NOT_INITIALIZED, DriverProperties, Error,
        NVFS_SETUP_ERROR, Status,
    },
    answer, buffer, file, parameters, put, transfer,
};
use crate::{
    control::{
        counters::LEAKED,
        settings,
        settings::CufileMode::{self, Closed, Compat, CompatStrict, Nvfs, PeerToPeer},
    },
    gate,
};
use std::{
    ffi::{c_int, c_long},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// 1.20: 1000 for a major version, 10 for a minor one.
const VERSION: c_int = 1200;

/// How often the driver is open.
static OPENED: Mutex<Session> = Mutex::new(Session { count: 0, mode: Compat });

struct Session {
    count: c_long,
    /// As it was when the driver was opened.
    mode: CufileMode,
}

/// The mode of the open driver.
pub(super) fn mode() -> Result<CufileMode, Error> {
    let session = session();
    if session.count > 0 { Ok(session.mode) } else { Err(DRIVER_NOT_INITIALIZED) }
}

/// Parameters can be set only before the driver opens.
pub(super) fn check_closed() -> Result<(), Error> {
    if session().count > 0 { Err(DRIVER_ALREADY_OPEN) } else { Ok(()) }
}

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverOpen() -> Status {
    answer("cuFileDriverOpen", || {
        let mode = settings().cufile_mode;
        if mode == Closed || mode == CompatStrict && !parameters::allow_compat() {
            return Err(NVFS_SETUP_ERROR);
        }
        let mut session = session();
        if session.count == 0 {
            session.mode = mode;
        }
        session.count += 1;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverClose() -> Status {
    answer("cuFileDriverClose", close)
}

/// What `cuFileDriverClose` means to programs that include `cufile.h`.
#[unsafe(no_mangle)]
extern "C" fn cuFileDriverClose_v2() -> Status {
    answer("cuFileDriverClose_v2", close)
}

fn close() -> Result<(), Error> {
    let mut session = session();
    if session.count == 0 {
        return Err(DRIVER_NOT_INITIALIZED);
    }
    if session.count == 1 {
        if transfer::is_under_way() {
            return Err(DRIVER_CLOSING);
        }
        LEAKED.add(buffer::release_all() + file::release_all());
    }
    session.count -= 1;
    Ok(())
}

/// How often the driver is open; 0 in a forked child.
#[unsafe(no_mangle)]
extern "C" fn cuFileUseCount() -> c_long {
    if gate::is_forked() { 0 } else { session().count }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuFileGetVersion(version: *mut c_int) -> Status {
    // SAFETY: the place is the caller's.
    answer("cuFileGetVersion", || unsafe { put(version, VERSION) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuFileDriverGetProperties(place: *mut DriverProperties) -> Status {
    answer("cuFileDriverGetProperties", || {
        let properties = properties(mode().unwrap_or(settings().cufile_mode));
        // SAFETY: the place is the caller's.
        unsafe { put(place, properties) }
    })
}

fn properties(mode: CufileMode) -> DriverProperties {
    const NVME_SUPPORTED: u32 = 1 << 4;
    const ALLOW_COMPAT_MODE: u32 = 1 << 1;
    // Dynamic routing, batches, streams, parallel I/O.
    const FEATURES: u32 = 0b1111;
    const PEER_TO_PEER_SUPPORTED: u32 = 1 << 4;
    let (nvfs_major, nvfs_minor) = if mode == Nvfs { (2, 25) } else { (0, 0) };
    DriverProperties {
        nvfs_major,
        nvfs_minor,
        poll_threshold_size: parameters::size(parameters::POLL_THRESHOLD_KB),
        max_direct_io_size: parameters::size(parameters::MAX_DIRECT_IO_SIZE_KB),
        status_flags: if matches!(mode, Nvfs | PeerToPeer) { NVME_SUPPORTED } else { 0 },
        control_flags: if parameters::allow_compat() { ALLOW_COMPAT_MODE } else { 0 },
        feature_flags: if mode == PeerToPeer { FEATURES | PEER_TO_PEER_SUPPORTED } else { FEATURES },
        max_device_cache_size: parameters::size(parameters::MAX_DEVICE_CACHE_SIZE_KB) as u32,
        per_buffer_cache_size: parameters::size(parameters::PER_BUFFER_CACHE_SIZE_KB) as u32,
        max_device_pinned_memory_size: parameters::size(parameters::MAX_DEVICE_PINNED_MEM_SIZE_KB) as u32,
        max_batch_io_size: parameters::size(parameters::BATCH_SIZE) as u32,
        max_batch_io_timeout_ms: parameters::size(parameters::BATCH_TIMEOUT_MS) as u32,
    }
}

fn session() -> MutexGuard<'static, Session> {
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}
