//! Moves the bytes of planned files onto the disk: extents, on threads, past the page cache where that is possible.
#![forbid(unsafe_code)]

use super::{
    SaveOptions, SaveReport,
    content::{TensorBytes, TensorData},
    io_error,
    plan::{Piece, PlannedFile},
    temp::TempFile,
};
use crate::{
    Alignment, ByteRange, DirectIo, Error, Refusal, Result, Route,
    device::CopyQueue,
    memory::{Slot, SlotKind, Slots},
    parallel,
    route::{FileSystem, Unavailable, is_refusal_of_direct, is_transient, open_direct},
};
use rustix::fs::OFlags;
use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, IoSlice},
    iter,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Instant,
};

/// Bytes of one write, on a grid of file offsets.
const EXTENT_BYTES: u64 = 4 << 20;
/// Files below this length are not worth the drive's wait.
const MIN_DIRECT_BYTES: u64 = 1 << 20;
/// Slices that the kernel takes in one call.
const MAX_SLICES: usize = 1024;
/// Writes in a row without progress before an error is final.
const MAX_STALLS: u32 = 100;

/// One file that is being written.
#[derive(Debug)]
pub(super) struct Target {
    plan: PlannedFile,
    temp: TempFile,
    /// What messages call it: the name that it will have.
    path: PathBuf,
    /// A second descriptor for direct writes.
    direct: Option<File>,
    /// Why there is none.
    refused: Option<Unavailable>,
    /// Set when a direct write was refused although opening was not.
    direct_failed: OnceLock<Unavailable>,
    /// Extents that are still to be written.
    left: AtomicUsize,
}

impl Target {
    /// A file of the planned length, without its bytes.
    pub(super) fn new(
        plan: PlannedFile,
        temp: TempFile,
        path: PathBuf,
        options: &SaveOptions,
    ) -> Result<Self> {
        temp.allocate(plan.len(), &path)?;
        let (direct, refused) = match open_for_direct(&temp, plan.len(), &path, options)? {
            Ok(direct) => (Some(direct), None),
            Err(why) => (None, Some(why)),
        };
        let refused = refused.filter(|_| options.direct != DirectIo::Never);
        if let (Some(why), DirectIo::Always) = (&refused, options.direct) {
            return Err(refuse_direct(&path, &why.reason));
        }
        let left = AtomicUsize::new(extents(plan.len()).count());
        Ok(Self { plan, temp, path, direct, refused, direct_failed: OnceLock::new(), left })
    }

    fn direct(&self) -> Option<&File> {
        self.direct.as_ref().filter(|_| self.direct_failed.get().is_none())
    }

    /// A failure at the first byte of `range`.
    fn error(&self, tensors: &[TensorData<'_>], range: ByteRange, source: io::Error) -> Error {
        let tensor = self.plan.tensor_at(range.start()).map(|tensor| tensors[tensor].name.to_owned());
        Error::Io { operation: "write", path: self.path.clone(), tensor, range: Some(range), source }
    }
}

/// A descriptor for direct writes, or why there is to be none.
fn open_for_direct(
    temp: &TempFile,
    len: u64,
    path: &Path,
    options: &SaveOptions,
) -> Result<Result<File, Unavailable>> {
    let unwanted = match options.direct {
        DirectIo::Never => Some("they are not wanted".to_owned()),
        DirectIo::Auto if !options.sync => {
            Some("the save does not wait for the disk, and the page cache takes it faster".to_owned())
        }
        DirectIo::Auto if len < MIN_DIRECT_BYTES => Some(format!("the file has only {len} bytes")),
        DirectIo::Auto | DirectIo::Always => None,
    };
    if let Some(reason) = unwanted {
        return Ok(Err(Unavailable::new(reason, "")));
    }
    let filesystem = FileSystem::of(temp.file()).map_err(|source| io_error("statfs", path, source))?;
    Ok(open_direct(temp.file(), filesystem, OFlags::WRONLY))
}

fn refuse_direct(path: &Path, reason: &str) -> Error {
    let why = Unavailable::new(reason, "set direct to auto or never");
    Error::RouteUnavailable { route: Route::Threads, path: path.to_owned(), why }
}

/// The parts that a file of `len` bytes is written in.
fn extents(len: u64) -> impl Iterator<Item = ByteRange> {
    let mut start = 0;
    iter::from_fn(move || {
        let end = len.min(start + EXTENT_BYTES);
        let extent = ByteRange::new(start, end).filter(|extent| !extent.is_empty());
        start = end;
        extent
    })
}

/// Queues of copies from the devices that tensors are on.
#[derive(Debug)]
pub(super) struct Devices {
    queues: BTreeMap<u32, CopyQueue>,
}

impl Devices {
    /// Those of these tensors. Waits for what is still computing them.
    pub(super) fn of(tensors: &[TensorData<'_>]) -> Result<Self> {
        let mut queues = BTreeMap::new();
        for tensor in tensors {
            let TensorBytes::Device(bytes) = &tensor.bytes else { continue };
            let ordinal = bytes.device.info().ordinal;
            if tensor.bytes.is_empty() || queues.contains_key(&ordinal) {
                continue;
            }
            // What failed in there shows when the bytes are copied.
            bytes.device.wait_for_all();
            queues.insert(ordinal, CopyQueue::new(&bytes.device)?);
        }
        Ok(Self { queues })
    }

    /// Fills `into` with the bytes of `range` of a file.
    pub(super) fn gather(
        &self,
        plan: &PlannedFile,
        tensors: &[TensorData<'_>],
        range: ByteRange,
        into: &mut [u8],
    ) -> Result<()> {
        let mut rest = into;
        for piece in plan.pieces(range) {
            let len = match piece {
                Piece::Header(header) => header.len(),
                Piece::Tensor(_, part) => part.len() as usize,
            };
            let Some((place, after)) = rest.split_at_mut_checked(len) else { return Err(misfit()) };
            rest = after;
            match piece {
                Piece::Header(header) => place.copy_from_slice(header),
                Piece::Tensor(tensor, part) => match &tensors[tensor].bytes {
                    TensorBytes::Host(bytes) => place.copy_from_slice(host_part(bytes, part)?),
                    TensorBytes::Device(bytes) => {
                        let queue = self.queues.get(&bytes.device.info().ordinal).ok_or_else(misfit)?;
                        queue.read_back(bytes.address + part.start(), place)?;
                    }
                },
            }
        }
        if rest.is_empty() { Ok(()) } else { Err(misfit()) }
    }
}

fn host_part(bytes: &[u8], part: ByteRange) -> Result<&[u8]> {
    bytes.get(part.start() as usize..part.end() as usize).ok_or_else(misfit)
}

fn misfit() -> Error {
    Error::Internal("a save's plan does not fit its tensors".into())
}

/// The writing of all files of a save.
pub(super) struct Writing<'a> {
    tensors: &'a [TensorData<'a>],
    targets: Vec<Target>,
    options: &'a SaveOptions,
    go_on: &'a (dyn Fn(u64) -> ControlFlow<()> + Sync),
    devices: Devices,
    /// Once something failed, the rest is not written.
    stopped: AtomicBool,
    direct_bytes: AtomicU64,
    buffered_bytes: AtomicU64,
    staged_bytes: AtomicU64,
}

impl<'a> Writing<'a> {
    pub(super) fn new(
        tensors: &'a [TensorData<'a>],
        options: &'a SaveOptions,
        targets: Vec<Target>,
        go_on: &'a (dyn Fn(u64) -> ControlFlow<()> + Sync),
    ) -> Result<Self> {
        let devices = Devices::of(tensors)?;
        let (stopped, zero) = (AtomicBool::new(false), || AtomicU64::new(0));
        Ok(Self {
            tensors,
            targets,
            options,
            go_on,
            devices,
            stopped,
            direct_bytes: zero(),
            buffered_bytes: zero(),
            staged_bytes: zero(),
        })
    }

    /// Writes everything, and syncs it if asked to. The files have all their bytes then, but not their names.
    pub(super) fn run(self, report: &mut SaveReport) -> Result<Vec<TempFile>> {
        let started = Instant::now();
        let extents: Vec<(&Target, ByteRange)> = self
            .targets
            .iter()
            .flat_map(|target| extents(target.plan.len()).map(move |extent| (target, extent)))
            .collect();
        // Writes wait more than they compute, and a few in flight keep a drive busy.
        let threads = self.options.threads.unwrap_or_else(|| (2 * parallel::cores()).clamp(4, 16));
        let threads = threads.min(extents.len());
        let slots = Slots::new(threads, EXTENT_BYTES as usize, SlotKind::Host)?;
        let written = parallel::map(&extents, threads, |&(target, extent)| {
            self.write(target, extent, &slots).inspect_err(|_| self.stopped.store(true, Ordering::Relaxed))
        });
        // What stopped the others is the error to tell of, rather than that they were stopped.
        let mut cancelled = Ok(());
        for result in written {
            match result {
                Err(Error::Cancelled) => cancelled = Err(Error::Cancelled),
                other => other?,
            }
        }
        cancelled?;
        self.tell(report);
        report.write_seconds = started.elapsed().as_secs_f64();
        Ok(self.targets.into_iter().map(|target| target.temp).collect())
    }

    fn tell(&self, report: &mut SaveReport) {
        report.files = self.targets.len();
        for target in &self.targets {
            report.tensor_bytes += target.plan.tensor_bytes();
            report.file_bytes += target.plan.len();
            if let Some(why) = target.direct_failed.get().or(target.refused.as_ref()) {
                let (what, path) = ("direct writes".into(), Some(target.path.clone()));
                report.refused.push(Refusal { what, path, why: why.clone() });
            }
        }
        report.direct_bytes = self.direct_bytes.load(Ordering::Relaxed);
        report.buffered_bytes = self.buffered_bytes.load(Ordering::Relaxed);
        report.staged_bytes = self.staged_bytes.load(Ordering::Relaxed);
    }

    fn write(&self, target: &Target, extent: ByteRange, slots: &Slots) -> Result<()> {
        if self.stopped.load(Ordering::Relaxed) || (self.go_on)(0).is_break() {
            return Err(Error::Cancelled);
        }
        let mut slot = None;
        let whole_blocks = ByteRange::new(extent.start(), Alignment::BLOCK.down(extent.end()));
        let mut rest = extent;
        if let (Some(direct), Some(blocks)) =
            (target.direct(), whole_blocks.filter(|range| !range.is_empty()))
            && self.write_direct(target, direct, blocks, extent, slots, &mut slot)?
        {
            self.direct_bytes.fetch_add(blocks.len(), Ordering::Relaxed);
            rest = ByteRange::new(blocks.end(), extent.end()).unwrap_or_default();
        }
        if !rest.is_empty() {
            self.write_buffered(target, rest, extent, slots, &mut slot)?;
            self.buffered_bytes.fetch_add(rest.len(), Ordering::Relaxed);
        }
        if target.left.fetch_sub(1, Ordering::AcqRel) == 1 && self.options.sync {
            target.temp.file().sync_all().map_err(|source| io_error("sync", &target.path, source))?;
        }
        if (self.go_on)(extent.len()).is_break() { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// Writes whole blocks past the page cache; `false` if the file system refuses although it let the file be opened.
    fn write_direct(
        &self,
        target: &Target,
        direct: &File,
        blocks: ByteRange,
        extent: ByteRange,
        slots: &Slots,
        slot: &mut Option<Slot>,
    ) -> Result<bool> {
        let bytes = match self.aligned_in_memory(target, blocks)? {
            Some(bytes) => bytes,
            None => &self.stage(target, extent, slots, slot)?[..blocks.len() as usize],
        };
        let mut slices = [IoSlice::new(bytes)];
        let mut offset = blocks.start();
        match write_all(|slices, at| pwritev(direct, slices, at), &mut slices, &mut offset, Alignment::BLOCK)
        {
            Ok(()) => Ok(true),
            Err(error) if is_refusal_of_direct(&error) => {
                let reason = format!("direct writes were refused: {error}");
                if self.options.direct == DirectIo::Always {
                    return Err(refuse_direct(&target.path, &reason));
                }
                let _ = target.direct_failed.set(Unavailable::new(reason, ""));
                Ok(false)
            }
            Err(source) => Err(self.failed(target, offset, blocks, source)),
        }
    }

    fn write_buffered(
        &self,
        target: &Target,
        range: ByteRange,
        extent: ByteRange,
        slots: &Slots,
        slot: &mut Option<Slot>,
    ) -> Result<()> {
        let staged;
        let mut slices = Vec::new();
        if slot.is_some() || self.needs_copies(target, range) {
            staged = self.stage(target, extent, slots, slot)?;
            let start = (range.start() - extent.start()) as usize;
            slices.push(IoSlice::new(&staged[start..start + range.len() as usize]));
        } else {
            // The kernel copies them together from where they are.
            for piece in target.plan.pieces(range) {
                slices.push(IoSlice::new(match piece {
                    Piece::Header(header) => header,
                    Piece::Tensor(tensor, part) => match &self.tensors[tensor].bytes {
                        TensorBytes::Host(bytes) => host_part(bytes, part)?,
                        TensorBytes::Device(_) => return Err(misfit()),
                    },
                }));
            }
        }
        let file = target.temp.file();
        let mut offset = range.start();
        write_all(|slices, at| pwritev(file, slices, at), &mut slices, &mut offset, Alignment::BYTE)
            .map_err(|source| self.failed(target, offset, range, source))
    }

    /// A failure at `offset` of the writing of `range`.
    fn failed(&self, target: &Target, offset: u64, range: ByteRange, source: io::Error) -> Error {
        let range = ByteRange::new(offset, range.end()).unwrap_or(range);
        target.error(self.tensors, range, source)
    }

    /// Bytes of a single tensor that lie in host memory as direct writes need them.
    fn aligned_in_memory(&self, target: &Target, range: ByteRange) -> Result<Option<&'a [u8]>> {
        let mut pieces = target.plan.pieces(range);
        let (Some(Piece::Tensor(tensor, part)), None) = (pieces.next(), pieces.next()) else {
            return Ok(None);
        };
        let TensorBytes::Host(bytes) = self.tensors[tensor].bytes else { return Ok(None) };
        let bytes = host_part(bytes, part)?;
        Ok(Some(bytes).filter(|bytes| Alignment::BLOCK.divides(bytes.as_ptr().addr() as u64)))
    }

    fn needs_copies(&self, target: &Target, range: ByteRange) -> bool {
        target.plan.pieces(range).any(|piece| match piece {
            Piece::Header(_) => false,
            Piece::Tensor(tensor, _) => matches!(self.tensors[tensor].bytes, TensorBytes::Device(_)),
        })
    }

    /// The bytes of an extent, put together in a slot, which is filled but once.
    fn stage<'s>(
        &self,
        target: &Target,
        extent: ByteRange,
        slots: &Slots,
        slot: &'s mut Option<Slot>,
    ) -> Result<&'s [u8]> {
        let len = extent.len() as usize;
        let is_new = slot.is_none();
        if is_new {
            *slot = slots.take();
        }
        let Some(slot) = slot else { return Err(misfit()) };
        let bytes = slot.as_mut_slice().get_mut(..len).ok_or_else(misfit)?;
        if is_new {
            self.devices.gather(&target.plan, self.tensors, extent, bytes)?;
            self.staged_bytes.fetch_add(extent.len(), Ordering::Relaxed);
        }
        Ok(bytes)
    }
}

fn pwritev(file: &File, slices: &[IoSlice<'_>], offset: u64) -> io::Result<usize> {
    Ok(rustix::io::pwritev(file, slices, offset)?)
}

/// Writes all slices from `offset` on, which is where it ends or failed. Goes on after short writes, at a multiple of
/// `block`, and repeats those that were interrupted.
fn write_all(
    mut write: impl FnMut(&[IoSlice<'_>], u64) -> io::Result<usize>,
    mut slices: &mut [IoSlice<'_>],
    offset: &mut u64,
    block: Alignment,
) -> io::Result<()> {
    let mut stalls = 0;
    while !slices.is_empty() {
        let written = match write(&slices[..slices.len().min(MAX_SLICES)], *offset) {
            Ok(count) => block.down(count as u64),
            Err(error) if is_transient(&error) && stalls < MAX_STALLS => 0,
            Err(error) => return Err(error),
        };
        if written == 0 {
            stalls += 1;
            if stalls > MAX_STALLS {
                return Err(io::Error::new(io::ErrorKind::WriteZero, "the file system takes no more bytes"));
            }
            continue;
        }
        stalls = 0;
        *offset += written;
        IoSlice::advance_slices(&mut slices, written as usize);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// Carries writes of `data` out on a vector as `script` says: so many bytes, or that error. What is not in the script
    /// goes well.
    fn scripted(
        data: &[&[u8]],
        script: &[Result<usize, i32>],
        block: Alignment,
    ) -> (io::Result<()>, u64, Vec<u8>) {
        let mut script: VecDeque<_> = script.iter().copied().collect();
        let mut file = Vec::new();
        let mut offset = 0;
        let mut slices: Vec<_> = data.iter().map(|data| IoSlice::new(data)).collect();
        let write = |slices: &[IoSlice<'_>], offset: u64| {
            let all: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
            let count = match script.pop_front() {
                Some(Err(errno)) => return Err(io::Error::from_raw_os_error(errno)),
                Some(Ok(count)) => count.min(all.len()),
                None => all.len(),
            };
            file.truncate(offset as usize);
            file.extend_from_slice(&all[..count]);
            Ok(count)
        };
        let result = write_all(write, &mut slices, &mut offset, block);
        (result, offset, file)
    }

    #[test]
    fn short_and_interrupted_writes_are_continued() {
        let data: [&[u8]; 3] = [b"abc", b"defgh", b"i"];
        let script = [Ok(1), Err(libc::EINTR), Ok(0), Ok(4), Err(libc::EAGAIN), Ok(3)];
        let (result, offset, file) = scripted(&data, &script, Alignment::BYTE);
        result.unwrap();
        assert_eq!((offset, file.as_slice()), (9, b"abcdefghi".as_slice()));
    }

    #[test]
    fn short_direct_writes_go_on_at_a_whole_block() {
        let data: Vec<u8> = (0..5 * 4096u32).map(|i| (i / 7) as u8).collect();
        let (result, offset, file) = scripted(&[&data], &[Ok(5000), Ok(100), Ok(4096)], Alignment::BLOCK);
        result.unwrap();
        assert_eq!(offset, 5 * 4096);
        assert!(file == data);
    }

    #[test]
    fn errors_say_where_and_writes_without_progress_end() {
        let (result, offset, _) = scripted(&[b"abcdef"], &[Ok(2), Err(libc::EIO)], Alignment::BYTE);
        assert_eq!((result.unwrap_err().raw_os_error(), offset), (Some(libc::EIO), 2));
        let (result, offset, _) = scripted(&[b"abcdef"], &[Ok(0); 200], Alignment::BYTE);
        assert_eq!((result.unwrap_err().kind(), offset), (io::ErrorKind::WriteZero, 0));
        let (result, ..) = scripted(&[b"abcdef"], &[Err(libc::EINTR); 200], Alignment::BYTE);
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::Interrupted);
    }

    #[test]
    fn more_slices_than_the_kernel_takes_are_written_in_turn() {
        let data = vec![b"ab".as_slice(); 3000];
        let mut largest = 0;
        let mut slices: Vec<_> = data.iter().map(|data| IoSlice::new(data)).collect();
        let mut offset = 0;
        let write = |slices: &[IoSlice<'_>], _| {
            largest = largest.max(slices.len());
            Ok(slices.iter().map(|slice| slice.len()).sum())
        };
        write_all(write, &mut slices, &mut offset, Alignment::BYTE).unwrap();
        assert_eq!((offset, largest), (6000, MAX_SLICES));
    }

    #[test]
    fn extents_cover_a_file_once() {
        for len in [1, EXTENT_BYTES - 1, EXTENT_BYTES, EXTENT_BYTES + 1, 3 * EXTENT_BYTES] {
            let mut end = 0;
            for extent in extents(len) {
                assert_eq!(extent.start(), end);
                assert!(!extent.is_empty() && Alignment::BLOCK.divides(extent.start()));
                end = extent.end();
            }
            assert_eq!(end, len);
        }
    }
}
