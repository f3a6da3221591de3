//! `gds`: from the drive to a device past the host's memory (GPUDirect Storage), by cuFile; and the proof that reads
//! take that path, without which they are `gds-compat`.
#![forbid(unsafe_code)]

use super::{BlockingRead, Buffer, ReadOp, SourceFile, Unavailable};
use crate::{
    Alignment,
    device::{
        Device, DirectBuffer,
        cuda::cufile::{Counters, CuFile, is_stand_in},
    },
    memory::{SlotKind, Slots},
};
use std::{
    collections::HashMap,
    fs, io,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

/// Bytes of the read that proves the path.
const PROBE_BYTES: u64 = 1 << 20;
/// Where nvidia-fs shows itself.
const NVIDIA_FS: &str = "/proc/driver/nvidia-fs";

/// Whether this machine may have a direct path at all. Asked before cuFile is opened unless the caller insists: opening
/// costs time and memory of the device, and where nothing is prepared for it, some versions misbehave.
pub(crate) fn plausible() -> Result<(), Unavailable> {
    if Path::new(NVIDIA_FS).exists() || is_stand_in() {
        return Ok(());
    }
    p2pdma().map_err(|why| {
        let reason = format!("there is no nvidia-fs ({NVIDIA_FS}), and no P2PDMA: {}", why.reason);
        Unavailable::new(reason, format!("modprobe nvidia-fs, or: {}", why.fix))
    })
}

/// What is known to keep drives from reaching a device by themselves.
pub(crate) fn p2pdma() -> Result<(), Unavailable> {
    let version = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    if !version.contains("Open Kernel Module") {
        let reason = "NVIDIA's open driver is not in use";
        return Err(Unavailable::new(reason, "install the open kernel modules, 570 or later"));
    }
    let multipath = fs::read_to_string("/sys/module/nvme_core/parameters/multipath").unwrap_or_default();
    if multipath.trim() == "Y" {
        return Err(Unavailable::new(
            "NVMe multipath is on, which has none",
            "boot with nvme_core.multipath=N",
        ));
    }
    let parameters = fs::read_to_string("/proc/driver/nvidia/params").unwrap_or_default();
    if !parameters.contains("RMForceStaticBar1=1") {
        let fix = "options nvidia NVreg_RegistryDwords=\"RMForceStaticBar1=1;RmForceDisableIomapWC=1;\"";
        return Err(Unavailable::new("BAR1 is not mapped once and for all", fix));
    }
    Ok(())
}

/// What proves that reads of a file into a device take the direct path: found once for each file system and device.
///
/// # Errors
/// Why there is no proof.
pub(crate) fn prove(device: &Arc<Device>, source: &SourceFile) -> Result<String, Unavailable> {
    type Known = HashMap<(u64, u32), Verdict>;
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    // Kept consistent by every statement, so a panic elsewhere does not spoil it. Held while probing: the counters
    // below are the process's.
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    let key = (source.device(), device.info().ordinal);
    let verdict = match known.get(&key) {
        Some(verdict) => verdict.clone(),
        None => probe(device, source).unwrap_or_else(Verdict::Unknown),
    };
    // A small file says nothing about its file system.
    if source.len() >= PROBE_BYTES && !matches!(verdict, Verdict::Unknown(_)) {
        known.insert(key, verdict.clone());
    }
    match verdict {
        Verdict::Direct(proof) => Ok(proof),
        Verdict::ThroughHost(why) | Verdict::Unknown(why) => Err(why),
    }
}

/// Reads a little by cuFile, compares the bytes with a plain read, and asks the counters which way they came.
fn probe(device: &Arc<Device>, source: &SourceFile) -> Result<Verdict, Unavailable> {
    let cufile = CuFile::get()?;
    if !cufile.has_direct_path() {
        let reason = "cuFile runs in compatibility mode: it has neither nvidia-fs nor P2PDMA, and copies through \
                      host memory";
        return Err(Unavailable::new(
            reason,
            "load the module nvidia-fs, or set P2PDMA up: docs/gpu.md says how",
        ));
    }
    let file = source.cufile()?;
    let len = Alignment::BLOCK.down(source.len().min(PROBE_BYTES));
    if len == 0 {
        return Err(Unavailable::new("the file is shorter than a block, which takes no direct read", ""));
    }
    let failed = |what: &str, error: &dyn std::fmt::Display| {
        Unavailable::new(
            format!("{what}: {error}"),
            "check gdscheck -p and cufile.log in the temporary directory",
        )
    };
    let buffer =
        DirectBuffer::new(device, len).map_err(|error| failed("no buffer for a trial read", &error))?;
    let before = cufile.counters(device.uuid());
    let count =
        file.read_at(&buffer, 0, len as usize, 0).map_err(|error| failed("a trial read failed", &error))?;
    let after = cufile.counters(device.uuid());
    let unchecked = |error: &dyn std::fmt::Display| failed("a trial read cannot be checked", error);
    let mut bytes = vec![0; len as usize];
    buffer.read_back(&mut bytes).map_err(|error| unchecked(&error))?;
    // Directly, so that the page cache stays as it is.
    let slots = Slots::new(1, len as usize, SlotKind::Host).map_err(|error| unchecked(&error))?;
    let mut slot = slots.try_take().ok_or_else(|| unchecked(&"there is no slot"))?;
    let expected = slot.as_mut_slice();
    let read = source.direct_file().and_then(|file| Ok(rustix::io::pread(file, &mut *expected, 0)?));
    let read = read.map_err(|error| unchecked(&error))?;
    if (count, read) != (len as usize, len as usize) || *bytes != *expected {
        return Err(Unavailable::new(
            format!("a trial read gave {count} of {len} bytes, or others than the file's"),
            "",
        ));
    }
    Ok(verdict(before, after))
}

/// What a read between two counts took.
fn verdict(before: Option<Counters>, after: Option<Counters>) -> Verdict {
    let (Some(before), Some(after)) = (before, after) else {
        return Verdict::Unknown(Unavailable::new(
            "this cuFile does not count its reads by path, so that nothing proves the direct one",
            "install cuFile of CUDA 13: its package libcufile or, for Python, 'pip install nvidia-cufile'",
        ));
    };
    if after.posix > before.posix {
        let reason = "cuFile read through host memory, as its counters show";
        return Verdict::ThroughHost(Unavailable::new(
            reason,
            "see what gdscheck -p says of this file system",
        ));
    }
    if after.p2p > before.p2p {
        return Verdict::Direct("cuFile counted a trial read as P2PDMA".into());
    }
    if after.nvfs > before.nvfs {
        return Verdict::Direct("cuFile counted a trial read as nvidia-fs".into());
    }
    Verdict::Unknown(Unavailable::new("cuFile's counters do not show which way a read went", ""))
}

/// Which way a trial read went.
#[derive(Clone, Debug)]
enum Verdict {
    Direct(String),
    ThroughHost(Unavailable),
    /// It failed, or nobody says: another attempt may tell more.
    Unknown(Unavailable),
}

/// How many reads into a device have gone through host memory, if cuFile counts them.
pub(crate) fn reads_through_host(device: &Device) -> Option<u64> {
    CuFile::get().ok()?.counters(device.uuid()).map(|counters| counters.posix)
}

/// `cuFileRead` into slots of a registered buffer.
#[derive(Debug)]
pub(crate) struct CuFileRead(pub(crate) Arc<DirectBuffer>);

impl BlockingRead for CuFileRead {
    fn read(&self, op: &mut ReadOp) -> io::Result<usize> {
        let Self(buffer) = self;
        let file = op.source.cufile().map_err(|why| io::Error::other(why.to_string()))?;
        let no_room = || io::Error::other("a read does not fit its slot");
        let Buffer::Staged { slot: Some(slot), .. } = &op.buffer else { return Err(no_room()) };
        let fits = op.position.checked_add(op.len).is_some_and(|end| end <= slot.len());
        let start = slot.device_address().and_then(|address| address.checked_sub(buffer.address()));
        let start = start.filter(|_| fits).ok_or_else(no_room)?;
        file.read_at(buffer, start + op.position as u64, op.len, op.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_counted_direct_reads_are_proof() {
        let counters = |p2p, nvfs, posix| Some(Counters { p2p, nvfs, posix });
        let before = counters(1, 1, 1);
        assert!(
            matches!(verdict(before, counters(2, 1, 1)), Verdict::Direct(proof) if proof.contains("P2PDMA"))
        );
        assert!(
            matches!(verdict(before, counters(1, 2, 1)), Verdict::Direct(proof) if proof.contains("nvidia-fs"))
        );
        assert!(matches!(verdict(before, counters(1, 1, 2)), Verdict::ThroughHost(_)));
        assert!(matches!(verdict(before, counters(2, 1, 2)), Verdict::ThroughHost(_)), "part of it");
        assert!(matches!(verdict(before, before), Verdict::Unknown(_)));
        assert!(matches!(verdict(None, None), Verdict::Unknown(_)));
    }
}
