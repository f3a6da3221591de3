//! `gds`: from the drive to a device past the host's memory (GPUDirect Storage), by batches of cuFile reads; and the
//! proof that they take that path, without which they are `gds-compat`.
#![allow(unsafe_code)]

use super::{Buffer, Done, Lane, ReadOp, SourceFile, Unavailable};
use crate::{
    Alignment,
    device::{
        Device, DirectBuffer,
        cuda::cufile::{Batch, BatchRead, Counters, CuFile, MAX_BATCH, is_stand_in},
    },
    memory::{Slot, SlotKind, Slots},
};
use std::{
    collections::HashMap,
    fs, io,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// Bytes of the read that proves the path.
const PROBE_BYTES: u64 = 1 << 20;
/// Longest wait for a batch before the others are looked at.
const PATIENCE: Duration = Duration::from_millis(20);
/// Where nvidia-fs shows itself.
const NVIDIA_FS: &str = "/proc/driver/nvidia-fs";

/// Whether this machine may have a direct path at all. Asked before cuFile is opened, which costs time, memory of
/// the device, and trust: where nothing is prepared for it, some versions misbehave.
pub(crate) fn plausible() -> Result<(), Unavailable> {
    let has_open_driver = || {
        let version = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
        version.contains("Open Kernel Module")
    };
    if Path::new(NVIDIA_FS).exists() || has_open_driver() || is_stand_in() {
        return Ok(());
    }
    Err(Unavailable::new(
        "there is neither nvidia-fs (/proc/driver/nvidia-fs) nor NVIDIA's open driver, which P2PDMA needs",
        "load the module nvidia-fs, or install the open driver 570 or later; 'windlass doctor' says more",
    ))
}

/// What proves that reads of a file into a device take the direct path: found once for each file system and device.
///
/// # Errors
/// Why there is no proof.
pub(crate) fn prove(device: &Arc<Device>, source: &SourceFile) -> Result<String, Unavailable> {
    type Proofs = HashMap<(u64, u32), Result<String, Unavailable>>;
    static PROOFS: Mutex<Option<Proofs>> = Mutex::new(None);
    plausible()?;
    // Kept consistent by every statement, so a panic elsewhere does not spoil it. Held while probing: the counters
    // below are the process's.
    let mut proofs = PROOFS.lock().unwrap_or_else(PoisonError::into_inner);
    let proofs = proofs.get_or_insert_default();
    let key = (source.device(), device.info().ordinal);
    if let Some(known) = proofs.get(&key) {
        return known.clone();
    }
    let found = probe(device, source);
    // A small file says nothing about its file system.
    if source.len() >= PROBE_BYTES {
        proofs.insert(key, found.clone());
    }
    found
}

/// Reads a little by cuFile, compares the bytes with a plain read, and asks the counters which way they came.
fn probe(device: &Arc<Device>, source: &SourceFile) -> Result<String, Unavailable> {
    let cufile = CuFile::get()?;
    if !cufile.has_direct_path() {
        let reason = "cuFile runs in compatibility mode: it has neither nvidia-fs nor P2PDMA, and copies through \
                      host memory";
        return Err(Unavailable::new(
            reason,
            "load the module nvidia-fs, or set P2PDMA up: see 'windlass doctor'",
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
    let before = Evidence::now(cufile, device);
    let count =
        file.read_at(&buffer, 0, len as usize, 0).map_err(|error| failed("a trial read failed", &error))?;
    let after = Evidence::now(cufile, device);
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
    Evidence::verdict(before, after)
}

/// What tells which way reads went.
#[derive(Clone, Copy)]
enum Evidence {
    /// cuFile's own counters of a device.
    CuFile(Counters),
    /// The number of reads that nvidia-fs has done for whoever asked.
    NvidiaFs(u64),
    None,
}

impl Evidence {
    fn now(cufile: &CuFile, device: &Device) -> Self {
        if let Some(counters) = cufile.counters(device.uuid()) {
            return Self::CuFile(counters);
        }
        let statistics = fs::read_to_string(Path::new(NVIDIA_FS).join("stats")).unwrap_or_default();
        reads_of_nvidia_fs(&statistics).map_or(Self::None, Self::NvidiaFs)
    }

    /// What a read between the two took.
    fn verdict(before: Self, after: Self) -> Result<String, Unavailable> {
        match (before, after) {
            (Self::CuFile(before), Self::CuFile(after)) => {
                if after.posix > before.posix {
                    let reason = "cuFile read through host memory, as its counters show";
                    return Err(Unavailable::new(reason, "see what gdscheck -p says of this file system"));
                }
                if after.p2p > before.p2p {
                    return Ok("cuFile counted a trial read as P2PDMA".into());
                }
                if after.nvfs > before.nvfs {
                    return Ok("cuFile counted a trial read as nvidia-fs".into());
                }
                Err(Unavailable::new("cuFile's counters do not show which way a read went", ""))
            }
            (Self::NvidiaFs(before), Self::NvidiaFs(after)) if after > before => {
                Ok("nvidia-fs counted a trial read".into())
            }
            (Self::NvidiaFs(_), Self::NvidiaFs(_)) => Err(Unavailable::new(
                "nvidia-fs did not count a trial read: cuFile read through host memory, or counting is off",
                "echo 1 > /sys/module/nvidia_fs/parameters/rw_stats_enabled",
            )),
            _ => Err(Unavailable::new(
                "this cuFile does not say which way its reads go, so that nothing proves the direct path",
                "use cuFile of CUDA 13 ('pip install nvidia-cufile')",
            )),
        }
    }
}

/// The reads in `/proc/driver/nvidia-fs/stats` that went well.
fn reads_of_nvidia_fs(statistics: &str) -> Option<u64> {
    let line = statistics.lines().find(|line| line.trim_start().starts_with("Reads"))?;
    line.split_whitespace().find_map(|word| word.strip_prefix("ok="))?.parse().ok()
}

/// How many reads into a device have gone through host memory, if cuFile counts them.
pub(crate) fn reads_through_host(device: &Device) -> Option<u64> {
    CuFile::get().ok()?.counters(device.uuid()).map(|counters| counters.posix)
}

/// Batches of reads into one registered buffer.
pub(crate) struct GdsLane {
    buffer: Arc<DirectBuffer>,
    capacity: usize,
    /// Pushed and not submitted.
    waiting: Vec<ReadOp>,
    batches: Vec<(Batch, Vec<Option<ReadOp>>)>,
    /// Reads that failed before cuFile saw them.
    rejected: Vec<Done>,
}

impl GdsLane {
    /// A lane for up to `depth` reads into slots of `buffer`.
    pub(crate) fn new(buffer: Arc<DirectBuffer>, depth: usize) -> Result<Self, Unavailable> {
        CuFile::get()?;
        let capacity = depth.clamp(1, MAX_BATCH);
        Ok(Self { buffer, capacity, waiting: Vec::new(), batches: Vec::new(), rejected: Vec::new() })
    }

    fn under_way(&self) -> usize {
        self.batches.iter().map(|(batch, _)| batch.under_way()).sum()
    }

    /// Submits what waits, as one batch.
    fn submit(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let ops = std::mem::take(&mut self.waiting);
        let idle = self.batches.iter().position(|(batch, _)| batch.under_way() == 0);
        let batch = match idle {
            Some(idle) => Ok(&mut self.batches[idle]),
            None => Batch::new(self.buffer.clone(), self.capacity)
                .map(|batch| self.batches.push_mut((batch, Vec::new())))
                .map_err(|why| io::Error::other(why.to_string())),
        };
        let reject = |error: &io::Error, ops: Vec<ReadOp>, rejected: &mut Vec<Done>| {
            let copy = || match error.raw_os_error() {
                Some(code) => io::Error::from_raw_os_error(code),
                None => io::Error::other(error.to_string()),
            };
            rejected.extend(ops.into_iter().map(|op| Done { op, result: Err(copy()) }));
        };
        let (batch, in_flight) = match batch {
            Ok(batch) => batch,
            Err(error) => return reject(&error, ops, &mut self.rejected),
        };
        let start = self.buffer.address();
        let reads: io::Result<Vec<BatchRead<'_>>> =
            ops.iter().enumerate().map(|(cookie, op)| read_of(op, cookie, start)).collect();
        // SAFETY: the reads own their slots and hold their files, and stay in `in_flight` until they come back.
        let submitted = reads.and_then(|reads| unsafe { batch.submit(&reads) });
        match submitted {
            Ok(()) => *in_flight = ops.into_iter().map(Some).collect(),
            Err(error) => reject(&error, ops, &mut self.rejected),
        }
    }

    /// Collects the reads that came back, waiting for the first of each batch up to `timeout`.
    fn collect(&mut self, timeout: Duration, done: &mut Vec<Done>) -> io::Result<()> {
        for (batch, in_flight) in &mut self.batches {
            if batch.under_way() == 0 {
                continue;
            }
            batch.poll(timeout, |cookie, result| {
                if let Some(op) = in_flight.get_mut(cookie).and_then(Option::take) {
                    done.push(Done { op, result });
                }
            })?;
        }
        Ok(())
    }
}

/// A read as cuFile takes it; `start` is the address of the buffer whose slots it reads into.
fn read_of(op: &ReadOp, cookie: usize, start: u64) -> io::Result<BatchRead<'_>> {
    let file = op.source.cufile().map_err(|why| io::Error::other(why.to_string()))?;
    let slot = match &op.buffer {
        Buffer::Staged { slot: Some(slot), .. } => slot.device_address(),
        _ => None,
    };
    let fits = |slot: &Slot| op.position.checked_add(op.len).is_some_and(|end| end <= slot.len());
    match (slot, &op.buffer) {
        (Some(address), Buffer::Staged { slot: Some(slot), .. }) if fits(slot) => Ok(BatchRead {
            file,
            file_offset: op.offset,
            buffer_offset: address - start + op.position as u64,
            len: op.len,
            cookie,
        }),
        _ => Err(io::Error::other("a read does not fit its buffer")),
    }
}

impl Lane for GdsLane {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn in_flight(&self) -> usize {
        self.waiting.len() + self.under_way() + self.rejected.len()
    }

    fn push(&mut self, op: ReadOp) {
        self.waiting.push(op);
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        self.submit();
        done.append(&mut self.rejected);
        let mut timeout = Duration::ZERO;
        while done.is_empty() && self.under_way() > 0 {
            self.collect(timeout, done)?;
            timeout = PATIENCE;
        }
        Ok(())
    }
}

impl Drop for GdsLane {
    fn drop(&mut self) {
        for (batch, _) in &mut self.batches {
            if batch.under_way() > 0 {
                batch.cancel();
            }
        }
        let mut done = Vec::new();
        while self.under_way() > 0 {
            if self.collect(PATIENCE, &mut done).is_err() {
                // Nothing more can be learnt of these reads: the drive may still write to their slots, so these are
                // never used again, nor freed.
                std::mem::forget(self.buffer.clone());
                std::mem::forget(std::mem::take(&mut self.batches));
                return;
            }
            done.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counters_of_nvidia_fs_are_read() {
        let statistics = "GDS Version: 1.7.0.149\nNVFS statistics(ver: 4.0)\nActive Shadow-Buffer (MiB): 0\n\
                          Reads\t\t\t\t: n=130 ok=128 err=2 readMiB=512 io_state_err=0\n\
                          Writes\t\t\t\t: n=0 ok=0 err=0\n";
        assert_eq!(reads_of_nvidia_fs(statistics), Some(128));
        assert_eq!(reads_of_nvidia_fs("nothing"), None);
    }

    #[test]
    fn only_counted_direct_reads_are_proof() {
        let counters = |p2p, nvfs, posix| Evidence::CuFile(Counters { p2p, nvfs, posix });
        let verdict = Evidence::verdict;
        assert!(verdict(counters(1, 1, 1), counters(2, 1, 1)).unwrap().contains("P2PDMA"));
        assert!(verdict(counters(1, 1, 1), counters(1, 2, 1)).unwrap().contains("nvidia-fs"));
        assert!(verdict(counters(1, 1, 1), counters(1, 1, 2)).is_err());
        assert!(verdict(counters(1, 1, 1), counters(2, 1, 2)).is_err(), "part of it went through the host");
        assert!(verdict(counters(1, 1, 1), counters(1, 1, 1)).is_err());
        assert!(verdict(Evidence::NvidiaFs(3), Evidence::NvidiaFs(4)).is_ok());
        assert!(verdict(Evidence::NvidiaFs(3), Evidence::NvidiaFs(3)).is_err());
        assert!(verdict(Evidence::None, Evidence::None).is_err());
    }
}
