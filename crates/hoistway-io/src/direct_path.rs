//! The path between drives and a device past the host's memory (GPUDirect Storage): the proof that reads and writes take
//! it.
#![forbid(unsafe_code)]

use crate::{
    Alignment, Error,
    file::{self, FileUse, LocalFile, open_direct},
    memory::{SlotKind, Slots},
    sys::folders,
};
use hoistway_device::{
    Device, DeviceId, DirectBuffer, DirectLibrary, PathCounts, RegisteredFile, Unavailable,
};
use std::{
    collections::HashMap,
    fmt,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Bytes of the read that proves the path.
const PROBE_BYTES: u64 = 1 << 20;

/// The proof that reads of a file into a device take the direct path: found once for each file system and device.
/// `register` makes the file known to the device's library.
///
/// # Errors
/// Why there is no proof.
pub fn prove(
    device: &Arc<Device>,
    source: &LocalFile,
    register: impl FnOnce() -> Result<Arc<RegisteredFile>, Unavailable>,
) -> Result<String, Unavailable> {
    type Known = HashMap<(u64, DeviceId), Verdict>;
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    // Before the lock: a child of fork whose parent has the library never asks for that.
    device.check_direct_library()?;
    // Kept consistent by every statement, so a panic elsewhere does not spoil it. Held while probing: the counters
    // below are the process's.
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    let key = (source.device(), device.id());
    let verdict = match known.get(&key) {
        Some(verdict) => verdict.clone(),
        None => probe(device, source, register).unwrap_or_else(Verdict::Unknown),
    };
    // A small file says nothing about its file system.
    if source.len_bytes() >= PROBE_BYTES && !matches!(verdict, Verdict::Unknown(_)) {
        known.insert(key, verdict.clone());
    }
    verdict.proof()
}

/// Reads a little by the device's library, compares the bytes with a plain read, and asks the counters which way they came.
fn probe(
    device: &Arc<Device>,
    source: &LocalFile,
    register: impl FnOnce() -> Result<Arc<RegisteredFile>, Unavailable>,
) -> Result<Verdict, Unavailable> {
    device.check_direct()?;
    let file = register()?;
    let len = Alignment::BLOCK.down(source.len_bytes().min(PROBE_BYTES));
    if len == 0 {
        let reason = "the file is shorter than a block, so no trial read proves the path";
        return Err(Unavailable::new(reason, "choose route auto or staged"));
    }
    let library = device.direct_library()?;
    let plain =
        source.direct_file().map_err(|error| failed(library, "a trial read cannot be checked", &error))?;
    trial_read(device, &file, &plain, len)
}

fn failed(library: &DirectLibrary, what: &str, error: &dyn fmt::Display) -> Unavailable {
    Unavailable::new(format!("{what}: {error}"), library.log)
}

/// Reads the first `len` bytes of a file by the device's library and plainly.
fn trial_read(
    device: &Arc<Device>,
    file: &RegisteredFile,
    plain: &File,
    len: u64,
) -> Result<Verdict, Unavailable> {
    let library = device.direct_library()?;
    let failed = |what: &str, error: &dyn fmt::Display| failed(library, what, error);
    let buffer =
        DirectBuffer::new(device, len).map_err(|error| failed("no buffer for a trial read", &error))?;
    let before = device.direct_reads();
    let count =
        file.read_at(&buffer, 0, len as usize, 0).map_err(|error| failed("a trial read failed", &error))?;
    let after = device.direct_reads();
    let unchecked = |error: &dyn fmt::Display| failed("a trial read cannot be checked", error);
    let mut bytes = vec![0; len as usize];
    buffer.read_back(&mut bytes).map_err(|error| unchecked(&error))?;
    let expected = read_plainly(plain, len).map_err(|error| unchecked(&error))?;
    if count != len as usize || bytes != expected {
        return Err(Unavailable::new(
            format!("a trial read gave {count} of {len} bytes, or others than the file's"),
            "",
        ));
    }
    Ok(verdict(library, before, after, "read"))
}

/// Writes the first `len` bytes of a file by the device's library, and reads them plainly.
fn trial_write(
    device: &Arc<Device>,
    file: &RegisteredFile,
    plain: &File,
    len: u64,
) -> Result<Verdict, Unavailable> {
    let library = device.direct_library()?;
    let failed = |error: &dyn fmt::Display| failed(library, "a trial write failed", error);
    let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8 ^ (at >> 12) as u8).collect();
    let buffer = DirectBuffer::new(device, len).map_err(|error| failed(&error))?;
    buffer.write(&bytes).map_err(|error| failed(&error))?;
    let before = device.direct_writes();
    let count = file.write_at(&buffer, 0, len as usize, 0).map_err(|error| failed(&error))?;
    let after = device.direct_writes();
    let written = read_plainly(plain, len).map_err(|error| failed(&error))?;
    if count != len as usize || written != bytes {
        let reason = format!("a trial write wrote {count} of {len} bytes, or others than it was given");
        return Err(Unavailable::new(reason, ""));
    }
    Ok(verdict(library, before, after, "write"))
}

/// The first bytes of a file that was opened with `O_DIRECT`: the page cache stays as it is.
fn read_plainly(file: &File, len: u64) -> crate::Result<Vec<u8>> {
    let slots = Slots::new(1, len as usize, SlotKind::Host)?;
    let no_slot = || Error::Internal("there is no slot".into());
    let mut slot = slots.try_take().ok_or_else(no_slot)?;
    let bytes = slot.as_mut_slice();
    let count = file::read_at(file, &mut *bytes, 0).map_err(|error| Error::Internal(error.to_string()))?;
    Ok(bytes[..count.min(bytes.len())].to_vec())
}

/// Proof that reads and writes between one device and the files of one file system go past the host's memory.
#[derive(Debug)]
pub struct DirectProof {
    device: Arc<Device>,
    text: String,
    /// Reads and writes through host memory that were counted by then.
    through_host: (u64, u64),
}

impl DirectProof {
    /// Writes and reads a file of 1 MiB in `directory` by the device's library, compares the bytes, and asks the
    /// counters which way they went. The file is removed.
    ///
    /// # Errors
    /// Why there is no proof.
    pub fn find(device: &Arc<Device>, directory: &Path) -> Result<Self, Unavailable> {
        // One at a time: the counters are the process's.
        static TURN: Mutex<()> = Mutex::new(());
        // Before the lock: a child of fork whose parent has the library never asks for that.
        device.check_direct()?;
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let scratch = Scratch::new(directory)?;
        let plain = open_direct(&scratch.file, FileUse::ReadWrite)?.file;
        let file = RegisteredFile::register(&plain)?;
        let written = trial_write(device, &file, &plain, PROBE_BYTES)?.proof()?;
        let read = trial_read(device, &file, &plain, PROBE_BYTES)?.proof()?;
        let through_host = count_through_host(device).ok_or_else(|| counters_stopped(device))?;
        Ok(Self { device: device.clone(), text: format!("{written}; {read}"), through_host })
    }

    /// What it is, for people.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Fails if reads or writes between the device and files went through host memory since, or if they were not counted.
    ///
    /// # Errors
    /// How many went through host memory, or that the number is unknown.
    pub fn check_kept(&self) -> Result<(), Unavailable> {
        let (reads, writes) = self.through_host;
        match count_through_host(&self.device) {
            Some(now) if now == self.through_host => Ok(()),
            Some((now_reads, now_writes)) if now_reads >= reads && now_writes >= writes => {
                let library = self.device.direct_library()?;
                Err(Unavailable::new(
                    format!(
                        "{} made {} reads and {} writes through host memory meanwhile, of ours or of others in this \
                         process",
                        library.name,
                        now_reads - reads,
                        now_writes - writes
                    ),
                    library.check,
                ))
            }
            _ => Err(counters_stopped(&self.device)),
        }
    }
}

fn count_through_host(device: &Device) -> Option<(u64, u64)> {
    let (reads, writes) = (device.direct_reads()?, device.direct_writes()?);
    Some((reads.through_host, writes.through_host))
}

/// The refusal where the counts of a device no longer tell anything.
pub fn counters_stopped(device: &Device) -> Unavailable {
    match device.direct_library() {
        Ok(library) => {
            Unavailable::new(format!("{}'s counters were stopped or set back meanwhile", library.name), "")
        }
        Err(why) => why,
    }
}

/// A file that is gone when this is dropped.
struct Scratch {
    file: File,
    path: PathBuf,
}

impl Scratch {
    fn new(directory: &Path) -> Result<Self, Unavailable> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!(".hoistway-trial-{}-{number}", std::process::id()));
        let refused = |error: io::Error| {
            let reason = format!("no file for a trial write can be made in {}: {error}", directory.display());
            Unavailable::new(reason, "")
        };
        // Killed while it was here, another process of this number may have left one.
        let _ = fs::remove_file(&path);
        let file = folders::create_private(&path).map_err(refused)?;
        Ok(Self { file, path })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The path of a trial `read` or `write` between two counts.
fn verdict(
    library: &DirectLibrary,
    before: Option<PathCounts>,
    after: Option<PathCounts>,
    what: &str,
) -> Verdict {
    let name = library.name;
    let (Some(before), Some(after)) = (before, after) else {
        return Verdict::Unknown(Unavailable::new(
            format!("this {name} does not count each {what} by path, so that nothing proves the direct one"),
            library.counting_version,
        ));
    };
    if after.through_host > before.through_host {
        let reason = format!("a trial {what} of {name} went through host memory, as its counters show");
        return Verdict::ThroughHost(Unavailable::new(reason, library.check));
    }
    let ways = before.direct.iter().zip(&after.direct);
    match ways.into_iter().find(|((_, before), (_, after))| after > before) {
        Some(((way, _), _)) => Verdict::Direct(format!("{name} counted a trial {what} as {way}")),
        None => Verdict::Unknown(Unavailable::new(
            format!("{name}'s counters do not show which way a {what} went"),
            "",
        )),
    }
}

/// The path of a trial read.
#[derive(Clone, Debug)]
enum Verdict {
    Direct(String),
    ThroughHost(Unavailable),
    /// The trial failed, or the system does not count: another trial may tell more.
    Unknown(Unavailable),
}

impl Verdict {
    fn proof(self) -> Result<String, Unavailable> {
        match self {
            Self::Direct(proof) => Ok(proof),
            Self::ThroughHost(why) | Self::Unknown(why) => Err(why),
        }
    }
}

/// How many reads into a device have gone through host memory, if its library counts them.
pub fn reads_through_host(device: &Device) -> Option<u64> {
    device.direct_reads().map(|counts| counts.through_host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_counted_direct_reads_are_proof() {
        let library =
            DirectLibrary { name: "a library", check: "", log: "", counting_version: "a newer one" };
        let counts = |one, other, through_host| {
            Some(PathCounts { direct: vec![("one", one), ("other", other)], through_host })
        };
        let judge = |before, after| verdict(&library, before, after, "read");
        let before = || counts(1, 1, 1);
        for (after, way) in [(counts(2, 1, 1), "one"), (counts(1, 2, 1), "other")] {
            let expected = format!("a library counted a trial read as {way}");
            assert!(matches!(judge(before(), after), Verdict::Direct(proof) if proof == expected));
        }
        assert!(matches!(judge(before(), counts(1, 1, 2)), Verdict::ThroughHost(_)));
        assert!(matches!(judge(before(), counts(2, 1, 2)), Verdict::ThroughHost(_)), "part of it");
        assert!(matches!(judge(before(), before()), Verdict::Unknown(_)));
        assert!(
            matches!(judge(None, None), Verdict::Unknown(why) if why.to_string().contains("a newer one"))
        );
    }
}
