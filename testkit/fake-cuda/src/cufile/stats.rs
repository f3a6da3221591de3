//! cuFile's statistics: above all, which way the bytes took.

use super::{
    abi::{AllStats, DetailedStats, INVALID_VALUE, Status},
    answer, put, session,
    transfer::{Direction, Transfer},
};
use crate::{
    control::{
        settings,
        settings::CufileMode::{Nvfs, PeerToPeer},
    },
    driver,
};
use std::{
    ffi::c_int,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// The level that includes what each device did.
const LEVEL_OF_DEVICES: c_int = 3;

struct Stats {
    level: c_int,
    is_started: bool,
    all: AllStats,
}

static STATS: Mutex<Stats> = Mutex::new(Stats { level: 0, is_started: false, all: NOTHING });

// SAFETY: made of numbers, all of which may be 0.
const NOTHING: AllStats = unsafe { std::mem::zeroed() };

#[unsafe(no_mangle)]
extern "C" fn cuFileSetStatsLevel(level: c_int) -> Status {
    answer("cuFileSetStatsLevel", || {
        if !(0..=LEVEL_OF_DEVICES).contains(&level) {
            return Err(INVALID_VALUE);
        }
        stats().level = level;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileStatsStart() -> Status {
    answer("cuFileStatsStart", || {
        session::mode()?;
        stats().is_started = true;
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuFileGetStatsL3(place: *mut AllStats) -> Status {
    answer("cuFileGetStatsL3", || {
        session::mode()?;
        let stats = stats();
        if stats.level < LEVEL_OF_DEVICES || !stats.is_started || !settings().cufile_stats {
            return Err(INVALID_VALUE);
        }
        let mut all = stats.all;
        all.devices = settings().devices as u32;
        for (device, stats) in all.per_device.iter_mut().enumerate().take(settings().devices) {
            stats.uuid = driver::uuid(device);
        }
        // SAFETY: the place is the caller's.
        unsafe { put(place, all) }
    })
}

/// Counts a transfer of so many bytes, or one that failed.
pub(super) fn record(transfer: &Transfer, moved: Option<u64>, time: Duration) {
    let Ok(mode) = session::mode() else { return };
    let (device, is_unaligned) = (transfer.device(), transfer.is_unaligned());
    let mut stats = stats();
    if !stats.is_started || stats.level == 0 {
        return;
    }
    let (failure, bytes) = (u64::from(moved.is_none()), moved.unwrap_or(0));
    let AllStats { detailed, per_device, .. } = &mut stats.all;
    let DetailedStats { basic, read_sizes_kib, write_sizes_kib } = detailed;
    let (operations, total_bytes, sizes) = match transfer.direction {
        Direction::Read => (&mut basic.reads, &mut basic.read_bytes, read_sizes_kib),
        Direction::Write => (&mut basic.writes, &mut basic.write_bytes, write_sizes_kib),
    };
    operations.failed += failure;
    operations.succeeded += 1 - failure;
    *total_bytes += bytes;
    if let Some(slot) = sizes.get_mut((bytes >> 10).checked_ilog2().unwrap_or(0) as usize) {
        *slot += 1;
    }
    let Some(device) = device.and_then(|device| per_device.get_mut(device)) else { return };
    let (transfers, failures) = match transfer.direction {
        Direction::Read => (&mut device.reads, &mut device.failed_reads),
        Direction::Write => (&mut device.writes, &mut device.failed_writes),
    };
    *failures += failure;
    transfers.total += 1;
    transfers.bytes += bytes;
    transfers.duration_us += time.as_micros() as u64;
    transfers.unaligned += u64::from(is_unaligned);
    let route = match mode {
        _ if settings().cufile_goes_through_host => &mut transfers.posix,
        Nvfs => &mut transfers.nvfs,
        PeerToPeer => &mut transfers.peer_to_peer,
        _ => &mut transfers.posix,
    };
    *route += 1 - failure;
}

fn stats() -> MutexGuard<'static, Stats> {
    STATS.lock().unwrap_or_else(PoisonError::into_inner)
}
