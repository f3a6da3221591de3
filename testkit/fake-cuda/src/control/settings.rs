//! What can be set: devices, speed, and how cuFile behaves.

use std::time::Duration;

/// As many as cuFile's statistics have room for.
pub(crate) const DEVICES_MAX: usize = 16;
/// Half of a device's window, so that its addresses can be left to rest before they are used again.
pub(crate) const MEMORY_MAX_MIB: u64 = 256 << 10;

/// Room for the name of an architecture or a function, and a zero.
const NAME_MAX: usize = 256;

/// Everything but the faults and the trace, which have state of their own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) devices: usize,
    pub(crate) memory_bytes: u64,
    /// Host memory that may be pinned.
    pub(crate) pinned_bytes: u64,
    /// 0 for the least that the driver promises.
    pub(crate) alignment: u64,
    pub(crate) poison: bool,
    pub(crate) copy_latency: Duration,
    /// 0 for as fast as the host copies.
    pub(crate) copy_mib_s: u64,
    pub(crate) jitter_us: u64,
    /// Whether calls and copies take the time that they take on an H100.
    pub(crate) costs: bool,
    /// Whether copies between host and devices move bytes.
    pub(crate) moves: bool,
    /// The function whose calls do not begin until this is taken back.
    pub(crate) blocks: &'static str,
    pub(crate) driver_version: i32,
    pub(crate) hip_version: i32,
    /// What HIP calls its devices' architecture.
    pub(crate) hip_architecture: &'static str,
    pub(crate) integrated: bool,
    /// Whether devices have identifiers that other interfaces of Windows know.
    pub(crate) luids: bool,
    /// The nodes of its adapter that each device has, a bit each.
    pub(crate) luid_nodes: u32,
    pub(crate) pools: bool,
    /// Whether memory can be mapped into address space.
    pub(crate) maps: bool,
    /// Whether it pins memory that cannot be written.
    pub(crate) pins_read_only: bool,
    /// Whether it refuses to, whatever it says.
    pub(crate) refuses_read_only: bool,
    pub(crate) cufile_mode: CufileMode,
    pub(crate) cufile_stats: bool,
    pub(crate) cufile_refuses_files: bool,
    /// Whether reads go through host memory, whatever the mode says.
    pub(crate) cufile_goes_through_host: bool,
}

/// Which machine cuFile believes to run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CufileMode {
    /// The nvidia-fs kernel module is loaded.
    Nvfs,
    /// The kernel moves data between devices itself.
    PeerToPeer,
    /// Neither: reads go through host memory, and opening the driver succeeds nevertheless.
    Compat,
    /// As `Compat`, but a driver that may not use this mode doesn't open.
    CompatStrict,
    /// The driver doesn't open.
    Closed,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            devices: 2,
            memory_bytes: 8 << 30,
            pinned_bytes: MEMORY_MAX_MIB << 20,
            alignment: 0,
            poison: true,
            copy_latency: Duration::ZERO,
            copy_mib_s: 0,
            jitter_us: 0,
            costs: false,
            moves: true,
            blocks: "",
            driver_version: 12_080,
            hip_version: 60_342_134,
            hip_architecture: "gfx942:sramecc+:xnack-",
            integrated: false,
            luids: true,
            luid_nodes: 1,
            pools: true,
            maps: true,
            pins_read_only: true,
            refuses_read_only: false,
            cufile_mode: CufileMode::Compat,
            cufile_stats: true,
            cufile_refuses_files: false,
            cufile_goes_through_host: false,
        }
    }
}

/// A value that its key can't have, or a key that doesn't exist.
#[derive(Debug)]
pub(crate) struct Unacceptable;

impl Settings {
    /// How long the simulated device takes to move bytes, beyond what the host does.
    pub(crate) fn transfer_time(&self, bytes: u64) -> Duration {
        let moving = match self.copy_mib_s {
            0 => 0,
            speed => bytes.saturating_mul(1_000_000) / (speed << 20),
        };
        self.copy_latency + Duration::from_micros(moving)
    }

    /// Changes one setting. The error leaves all as they were.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Result<(), Unacceptable> {
        match key {
            "DEVICES" => self.devices = number(value, DEVICES_MAX as u64)? as usize,
            "MEMORY_MIB" => self.memory_bytes = number(value, MEMORY_MAX_MIB)? << 20,
            "PINNED_MIB" => self.pinned_bytes = number(value, MEMORY_MAX_MIB)? << 20,
            "ALIGNMENT" => self.alignment = alignment(value)?,
            "POISON" => self.poison = switch(value)?,
            "COPY_LATENCY_US" => self.copy_latency = Duration::from_micros(number(value, 1 << 30)?),
            "COPY_MIB_S" => self.copy_mib_s = number(value, 1 << 30)?,
            "COSTS" => self.costs = machine(value)?,
            "MOVES" => self.moves = switch(value)?,
            "JITTER_US" => self.jitter_us = number(value, 1 << 30)?,
            // Settings are copied all the time, and tests change this one rarely.
            "BLOCKS" if value.len() < NAME_MAX => self.blocks = value.to_owned().leak(),
            "DRIVER_VERSION" => self.driver_version = number(value, 1 << 30)? as i32,
            "HIP_VERSION" => self.hip_version = number(value, 1 << 30)? as i32,
            // Settings are copied all the time, and tests change this one rarely.
            "HIP_ARCHITECTURE" if value.len() < NAME_MAX => {
                self.hip_architecture = value.to_owned().leak();
            }
            "INTEGRATED" => self.integrated = switch(value)?,
            "LUIDS" => self.luids = switch(value)?,
            "LUID_NODES" => self.luid_nodes = number(value, u32::MAX.into())? as u32,
            "POOLS" => self.pools = switch(value)?,
            "MAPS" => self.maps = switch(value)?,
            "REFUSES_READ_ONLY" => self.refuses_read_only = switch(value)?,
            "PINS_READ_ONLY" => self.pins_read_only = switch(value)?,
            "CUFILE_MODE" => self.cufile_mode = mode(value)?,
            "CUFILE_STATS" => self.cufile_stats = switch(value)?,
            "CUFILE_REFUSE_FS" => self.cufile_refuses_files = switch(value)?,
            "CUFILE_THROUGH_HOST" => self.cufile_goes_through_host = switch(value)?,
            _ => return Err(Unacceptable),
        }
        Ok(())
    }
}

fn number(value: &str, max: u64) -> Result<u64, Unacceptable> {
    value.parse().ok().filter(|number| *number <= max).ok_or(Unacceptable)
}

fn switch(value: &str) -> Result<bool, Unacceptable> {
    match value {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(Unacceptable),
    }
}

/// Whether a machine is named whose costs are known.
fn machine(value: &str) -> Result<bool, Unacceptable> {
    match value {
        "" => Ok(false),
        "h100" => Ok(true),
        _ => Err(Unacceptable),
    }
}

fn alignment(value: &str) -> Result<u64, Unacceptable> {
    number(value, 2 << 20).and_then(|bytes| match bytes {
        0 => Ok(0),
        bytes if bytes.is_power_of_two() => Ok(bytes),
        _ => Err(Unacceptable),
    })
}

fn mode(value: &str) -> Result<CufileMode, Unacceptable> {
    match value {
        "nvfs" => Ok(CufileMode::Nvfs),
        "p2pdma" => Ok(CufileMode::PeerToPeer),
        "compat" => Ok(CufileMode::Compat),
        "compat_strict" => Ok(CufileMode::CompatStrict),
        "closed" => Ok(CufileMode::Closed),
        _ => Err(Unacceptable),
    }
}
