//! Reports of loads: the route of every byte, and why it was not a better one.
#![forbid(unsafe_code)]

use crate::{
    DeviceId, Dtype, counted,
    memory::HugePages,
    plan::Layout,
    route::{
        Access, Route,
        member::{Member, Stage},
    },
    verify::VerifyReport,
};
use bytesize::ByteSize;
pub use hoistway_io::Refusal;
use hoistway_io::file;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a report says where so many reads were asked for, and the process may have too few files open for them.
pub(crate) fn few_files_note(asked_for: usize) -> Option<String> {
    let most_reads = file::most_reads(asked_for);
    (asked_for > most_reads).then(|| {
        format!(
            "no more than {most_reads} reads are in flight, fewer than threads or in_flight ask for, as the process may \
             have few files open: raise ulimit -n"
        )
    })
}

/// The report of one load.
///
/// The bytes of [`Report::carriers`] add up to [`Report::tensor_bytes`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Report {
    /// Version of hoistway.
    pub version: String,
    /// The route that was asked for.
    pub route: Route,
    /// Files that were read.
    pub files: usize,
    /// Tensors of the load.
    pub tensors: usize,
    /// Bytes of these tensors.
    pub tensor_bytes: u64,
    /// Bytes that were read: the tensors, gaps read along, padding to whole blocks, and what was read for nothing.
    pub read_bytes: u64,
    /// Bytes of tensors that passed through a staging slot, of the host or of a device, rather than being read in place.
    pub staged_bytes: u64,
    /// The bytes by route.
    pub carriers: Vec<Carrier>,
    /// Routes that would have been better, and why they were not used.
    pub refused: Vec<Refusal>,
    /// Reads that had to be repeated.
    pub retries: Retries,
    /// Memory that the load took.
    pub memory: MemoryReport,
    /// The device, if one was the target.
    pub device: Option<DeviceReport>,
    /// The time by step.
    pub time: TimeReport,
    /// The objects that were compared with the checksums of their stores, if there are objects among the files.
    #[serde(default)]
    pub checksums: Option<ChecksumReport>,
    /// The result of the verification, if there was one.
    pub verify: Option<VerifyReport>,
    /// Notes for the caller.
    pub notes: Vec<String>,
}

/// The objects of a load, and the checksums that their stores have of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ChecksumReport {
    /// Objects all of whose bytes came, and have the checksum that the store says.
    pub objects: usize,
    /// Their bytes.
    pub bytes: u64,
    /// The checksums, such as `CRC-64/NVME`, or `SHA-256` by a verification.
    pub algorithms: Vec<String>,
    /// The objects that were not compared.
    pub uncompared: Vec<Uncompared>,
}

/// Objects that were not compared with a checksum, for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Uncompared {
    /// The reason.
    pub reason: String,
    /// How many objects.
    pub objects: usize,
}

impl ChecksumReport {
    /// Adds an object that has the checksum of its store.
    #[cfg(feature = "objects")]
    pub(crate) fn add_equal(&mut self, bytes: u64, algorithm: &str) {
        (self.objects, self.bytes) = (self.objects + 1, self.bytes + bytes);
        add_new(&mut self.algorithms, [algorithm.to_owned()]);
    }

    /// Adds objects that were not compared.
    pub(crate) fn add_uncompared(&mut self, reason: &str, objects: usize) {
        match self.uncompared.iter_mut().find(|own| own.reason == reason) {
            Some(own) => own.objects += objects,
            None => self.uncompared.push(Uncompared { reason: reason.to_owned(), objects }),
        }
    }

    fn merge(&mut self, later: &Self) {
        self.objects += later.objects;
        self.bytes += later.bytes;
        add_new(&mut self.algorithms, later.algorithms.iter().cloned());
        for Uncompared { reason, objects } in &later.uncompared {
            self.add_uncompared(reason, *objects);
        }
    }
}

impl fmt::Display for ChecksumReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if self.objects > 0 {
            let (objects, bytes) = (counted(self.objects, "object", "objects"), ByteSize(self.bytes));
            parts.push(format!("{objects}, {bytes} as the store's {} says", self.algorithms.join(" and ")));
        }
        for Uncompared { reason, objects } in &self.uncompared {
            parts.push(format!("{} not compared: {reason}", counted(*objects, "object", "objects")));
        }
        f.write_str(&parts.join("; "))
    }
}

/// One route's share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Carrier {
    /// The route.
    pub route: Route,
    /// Whether it went past the page cache or through it.
    pub access: Access,
    /// The way on to a device: `staged` if by pinned host memory; `None` if the route leads to where the tensors stay, or into
    /// buffers that the device imports and copies from, which a note then says.
    pub via: Option<Route>,
    /// Bytes of tensors that it delivered, as many as they have in the file.
    pub tensor_bytes: u64,
    /// Bytes that it read.
    pub read_bytes: u64,
    /// Reads that it made.
    pub reads: u64,
}

/// What is to be said of a route that carries bytes, whether or not it is there still.
#[derive(Debug)]
pub(crate) struct RouteRemarks {
    route: Route,
    notes: Vec<String>,
    refused: Vec<Refusal>,
}

impl RouteRemarks {
    /// What is to be said of a route that leads to the host, or to `device`.
    pub(crate) fn of(member: &dyn Member, device: Option<DeviceId>) -> Self {
        Self { route: member.route(), notes: member.notes(Stage::Open), refused: member.refusals(device) }
    }

    /// Adds it to a report, if the route is among the carriers.
    pub(crate) fn add_to(&self, carriers: &[Carrier], notes: &mut Vec<String>, refused: &mut Vec<Refusal>) {
        if carriers.iter().any(|carrier| carrier.route == self.route) {
            add_new(notes, self.notes.iter().cloned());
            add_new(refused, self.refused.iter().cloned());
        }
    }
}

/// What becomes of bytes once they are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Onward {
    /// They are where they stay, or are copied there by the side that they are on.
    Stay,
    /// They are copied from the host to a device.
    ToDevice,
    /// They stay in host memory, which a device uses as it is.
    Unified,
}

impl Carrier {
    /// A share of nothing so far.
    pub(crate) fn new(route: Route, access: Access, onward: Onward) -> Self {
        let via = match onward {
            Onward::Stay => None,
            Onward::ToDevice => Some(Route::Staged),
            Onward::Unified => Some(Route::Unified),
        };
        Self { route, access, via, tensor_bytes: 0, read_bytes: 0, reads: 0 }
    }

    /// One read of `read_bytes`, of which `tensor_bytes` are delivered.
    pub(crate) fn of_read(self, read_bytes: usize, tensor_bytes: u64) -> Self {
        Self { tensor_bytes, read_bytes: read_bytes as u64, reads: 1, ..self }
    }

    /// Whether it is the share of the same way.
    fn is_same_way(&self, other: &Self) -> bool {
        (self.route, self.access, self.via) == (other.route, other.access, other.via)
    }

    /// Adds it to the share of the same way, if there is one.
    pub(crate) fn add_to(self, carriers: &mut Vec<Self>) {
        match carriers.iter_mut().find(|same| same.is_same_way(&self)) {
            Some(same) => {
                same.tensor_bytes += self.tensor_bytes;
                same.read_bytes += self.read_bytes;
                same.reads += self.reads;
            }
            None => carriers.push(self),
        }
    }
}

/// What the attempts of one read have brought, by who brought it. It goes with the read, and is added to the [`Tally`] as
/// the read ends, or starts over.
#[derive(Debug, Default)]
pub(crate) struct Account(Vec<Carrier>);

impl Account {
    /// Adds an attempt.
    pub(crate) fn add(&mut self, carrier: Carrier) {
        carrier.add_to(&mut self.0);
    }

    /// What was read so far was read for nothing.
    pub(crate) fn take_back(&mut self) {
        self.0.iter_mut().for_each(|carrier| carrier.tensor_bytes = 0);
    }

    /// Whether nothing was read.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes of tensors that were read.
    pub(crate) fn tensor_bytes(&self) -> u64 {
        self.0.iter().map(|carrier| carrier.tensor_bytes).sum()
    }
}

/// What the reads of a load or a batch have done so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) carriers: Vec<Carrier>,
    pub(crate) refused: Vec<Refusal>,
    pub(crate) retries: Retries,
    pub(crate) staged_bytes: u64,
}

impl Tally {
    /// Adds what a read has done, `staged_bytes` of it by way of a slot.
    pub(crate) fn add(&mut self, Account(carriers): Account, staged_bytes: u64) {
        self.staged_bytes += staged_bytes;
        carriers.into_iter().for_each(|carrier| carrier.add_to(&mut self.carriers));
    }

    /// Something better than what will be done is not possible.
    pub(crate) fn refuse(&mut self, refusal: Refusal) {
        tracing::debug!(what = refusal.what, why = %refusal.why, "refused");
        add_new(&mut self.refused, [refusal]);
    }
}

/// Reads that had to be repeated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Retries {
    /// Reads that returned fewer bytes than asked.
    pub short: u64,
    /// Reads that were interrupted or told to try again.
    pub interrupted: u64,
}

/// Memory that a load took.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MemoryReport {
    /// How tensors share memory.
    pub layout: Layout,
    /// Arenas that hold them.
    pub arenas: usize,
    /// Bytes of these: tensors, gaps, padding.
    pub arena_bytes: u64,
    /// Bytes of staging slots, freed when the load ended, and the most that waited at a time for the node's cache.
    pub staging_bytes: u64,
    /// Kind of pages.
    pub huge_pages: HugePages,
    /// Whether the arenas come from a pool of memory that was touched before.
    pub pooled: bool,
    /// The NUMA node that was asked for them, and for staging and the load's threads, if any. Notes say what is elsewhere.
    pub numa_node: Option<u32>,
}

/// The report about the device that a load went to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceReport {
    /// The device.
    pub device: DeviceId,
    /// Its name.
    pub name: String,
    /// Its place on the PCI bus.
    pub pci: String,
    /// Whether it uses host memory as it is, because it has none of its own.
    pub unified: bool,
    /// The type that floats were converted to, if they were.
    pub dtype: Option<Dtype>,
    /// Bytes of its memory that hold the tensors: padding included, and converted.
    pub memory_bytes: u64,
    /// Bytes of its memory that the load took besides, freed when it ended.
    pub scratch_bytes: u64,
    /// Copies and kernels.
    pub copies: u64,
    /// Threads that copied from the page cache to slots.
    #[serde(default)]
    pub copiers: usize,
    /// Time during which the next copy to end was waited for.
    pub copy_wait_seconds: f64,
    /// Time that readers waited for a slot, all of them together: long if copies are slower than reads.
    pub slot_wait_seconds: f64,
    /// The proof that the direct path was direct, if it was taken.
    pub proof: Option<String>,
}

/// The time of a load by step, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TimeReport {
    /// Finding the files and reading their headers. Counted in the first load from a checkpoint; 0 in later ones.
    pub open_seconds: f64,
    /// Planning and allocating address space.
    pub prepare_seconds: f64,
    /// From the first read to the end of the last thread.
    pub transfer_seconds: f64,
    /// All of these.
    pub total_seconds: f64,
    /// CPU time of the whole process meanwhile, user and system.
    pub cpu_seconds: f64,
    /// Page faults of the whole process meanwhile.
    pub page_faults: u64,
}

/// Writes a rate as drives and networks state it: in powers of ten.
pub(crate) fn shown_rate(bytes_per_second: f64) -> String {
    format!("{:.2}/s", ByteSize(bytes_per_second as u64).display().si())
}

impl Report {
    /// Bytes of tensors per second over the whole load; 0 if nothing was read.
    pub fn bytes_per_second(&self) -> f64 {
        if self.is_unread() {
            return 0.0;
        }
        if self.time.total_seconds > 0.0 { self.tensor_bytes as f64 / self.time.total_seconds } else { 0.0 }
    }

    /// Whether a mapping would have given the same bytes at once: nearly all were cached, and are of a size that matters.
    fn is_copied_from_cache(&self) -> bool {
        let cached = self.carriers.iter().filter(|carrier| carrier.route == Route::Cached);
        let cached_bytes: u64 = cached.map(|carrier| carrier.tensor_bytes).sum();
        self.device.is_none()
            && !self.memory.pooled
            && self.tensor_bytes >= 16 << 20
            && cached_bytes >= self.tensor_bytes / 10 * 9
    }

    /// Whether files were mapped, and no byte of them was read.
    fn is_unread(&self) -> bool {
        self.route == Route::Mapped && self.read_bytes == 0
    }

    /// Adds a later load of the same checkpoint: sums what can be summed, and keeps each refusal and note once.
    pub fn merge(&mut self, later: &Self) {
        self.files = self.files.max(later.files);
        self.tensors += later.tensors;
        self.tensor_bytes += later.tensor_bytes;
        self.read_bytes += later.read_bytes;
        self.staged_bytes += later.staged_bytes;
        later.carriers.iter().for_each(|carrier| carrier.clone().add_to(&mut self.carriers));
        add_new(&mut self.refused, later.refused.iter().cloned());
        add_new(&mut self.notes, later.notes.iter().cloned());
        self.retries.short += later.retries.short;
        self.retries.interrupted += later.retries.interrupted;
        self.memory.arenas += later.memory.arenas;
        self.memory.arena_bytes += later.memory.arena_bytes;
        self.memory.staging_bytes = self.memory.staging_bytes.max(later.memory.staging_bytes);
        match (&mut self.checksums, &later.checksums) {
            (Some(checksums), Some(later)) => checksums.merge(later),
            (checksums @ None, later) => checksums.clone_from(later),
            (Some(_), None) => {}
        }
        match (&mut self.device, &later.device) {
            (Some(device), Some(later)) => {
                device.memory_bytes += later.memory_bytes;
                device.scratch_bytes = device.scratch_bytes.max(later.scratch_bytes);
                device.copies += later.copies;
                device.copiers = device.copiers.max(later.copiers);
                device.copy_wait_seconds += later.copy_wait_seconds;
                device.slot_wait_seconds += later.slot_wait_seconds;
                device.proof = device.proof.take().or_else(|| later.proof.clone());
            }
            (device @ None, later) => device.clone_from(later),
            (Some(_), None) => {}
        }
        self.time.open_seconds += later.time.open_seconds;
        self.time.prepare_seconds += later.time.prepare_seconds;
        self.time.transfer_seconds += later.time.transfer_seconds;
        self.time.total_seconds += later.time.total_seconds;
        self.time.cpu_seconds += later.time.cpu_seconds;
        self.time.page_faults += later.time.page_faults;
    }
}

/// The routes that moved `bytes`: a line each. Columns stay in line if some of them lead to a device.
pub(crate) fn write_carriers(
    f: &mut fmt::Formatter<'_>,
    carriers: &[Carrier],
    bytes: u64,
    has_device: bool,
) -> fmt::Result {
    let (route_width, way_width) = if has_device { (10, 16) } else { (9, 8) };
    for carrier in carriers {
        let share = 100.0 * carrier.tensor_bytes as f64 / bytes.max(1) as f64;
        let way = match carrier.via {
            Some(via) => format!("{}, {via}", carrier.access),
            None => carrier.access.to_string(),
        };
        writeln!(
            f,
            "  {:<route_width$} {way:<way_width$} {:>10} {share:5.1} %  ({} of {} in all)",
            carrier.route,
            ByteSize(carrier.tensor_bytes).to_string(),
            counted(carrier.reads, "read", "reads"),
            ByteSize(carrier.read_bytes),
        )?;
    }
    Ok(())
}

/// What was refused: a line for each reason, however many files it holds for.
pub(crate) fn write_refused(f: &mut fmt::Formatter<'_>, refused: &[Refusal]) -> fmt::Result {
    let is_alike = |a: &Refusal, b: &Refusal| (&a.what, &a.why) == (&b.what, &b.why);
    for (position, refusal) in refused.iter().enumerate() {
        if refused[..position].iter().any(|earlier| is_alike(earlier, refusal)) {
            continue;
        }
        write!(f, "  not used: {}", refusal.what)?;
        if let Some(path) = &refusal.path {
            write!(f, " on {}", path.display())?;
            let others = refused[position + 1..].iter().filter(|later| is_alike(later, refusal)).count();
            if others > 0 {
                write!(f, " and {others} more")?;
            }
        }
        writeln!(f, ": {}", refusal.why)?;
    }
    Ok(())
}

/// Adds those that are not there.
pub(crate) fn add_new<T: PartialEq>(known: &mut Vec<T>, later: impl IntoIterator<Item = T>) {
    for item in later {
        if !known.contains(&item) {
            known.push(item);
        }
    }
}

impl fmt::Display for Report {
    /// Several lines of text for people.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensors = counted(self.tensors, "tensor", "tensors");
        let (files, bytes) = (counted(self.files, "file", "files"), ByteSize(self.tensor_bytes));
        let seconds = self.time.total_seconds;
        if self.is_unread() {
            writeln!(
                f,
                "mapped {tensors}, {bytes} of {files} in {seconds:.3} s: nothing is read until it is used"
            )?;
        } else {
            let rate = shown_rate(self.bytes_per_second());
            writeln!(f, "{tensors}, {bytes} from {files} in {seconds:.3} s ({rate})")?;
        }
        write_carriers(f, &self.carriers, self.tensor_bytes, self.device.is_some())?;
        write_refused(f, &self.refused)?;
        if let Some(device) = &self.device {
            let on = if device.unified { "shared with" } else { "on" };
            write!(f, "  device    {on} {} ({}, {})", device.device, device.name, device.pci)?;
            if let Some(dtype) = device.dtype {
                write!(f, ", converted to {dtype}")?;
            }
            write!(f, "; {}", counted(device.copies, "copy", "copies"))?;
            if device.copiers > 0 {
                write!(f, ", {} copied to slots", counted(device.copiers, "thread", "threads"))?;
            }
            if device.scratch_bytes > 0 {
                write!(f, ", scratch {}", ByteSize(device.scratch_bytes))?;
            }
            writeln!(
                f,
                "; waited {:.3} s for copies, readers {:.3} s for slots (all of them together)",
                device.copy_wait_seconds, device.slot_wait_seconds
            )?;
            if let Some(proof) = &device.proof {
                writeln!(f, "  proof     {proof}, and none through the host since")?;
            }
        }
        writeln!(
            f,
            "  memory    {} in {}{}, staging {}{}",
            ByteSize(self.memory.arena_bytes),
            counted(self.memory.arenas, "arena", "arenas"),
            if self.memory.pooled { " from the pool" } else { "" },
            ByteSize(self.memory.staging_bytes),
            self.memory.numa_node.map_or_else(String::new, |node| format!(", NUMA node {node} asked for")),
        )?;
        writeln!(
            f,
            "  time      open {:.3} s, prepare {:.3} s, transfer {:.3} s; CPU {:.3} s, {}",
            self.time.open_seconds,
            self.time.prepare_seconds,
            self.time.transfer_seconds,
            self.time.cpu_seconds,
            counted(self.time.page_faults, "page fault", "page faults"),
        )?;
        if self.retries != Retries::default() {
            writeln!(
                f,
                "  retries   {} short, {} interrupted",
                self.retries.short, self.retries.interrupted
            )?;
        }
        if let Some(checksums) = &self.checksums {
            writeln!(f, "  checksums {checksums}")?;
        }
        if let Some(verify) = &self.verify {
            writeln!(
                f,
                "  verified  {}, {} against {} in {:.3} s",
                counted(verify.tensors, "tensor", "tensors"),
                ByteSize(verify.bytes),
                verify.against,
                verify.seconds,
            )?;
        }
        for note in &self.notes {
            writeln!(f, "  note: {note}")?;
        }
        if self.is_copied_from_cache() {
            writeln!(
                f,
                "  note: the page cache had these bytes; route 'mapped' would use them there, without a copy"
            )?;
        }
        Ok(())
    }
}
