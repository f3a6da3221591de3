//! Saving to an object store: parts of each file from several threads, and the index last.
//!
//! The store shows a file when it is complete, so a reader finds the old object or the new one. Of a set, all parts of all files are
//! there before the first file is shown. What fails before that is aborted. If it is not known whether the index was replaced, the
//! shards that it names then stay.
#![forbid(unsafe_code)]

use super::{
    SaveOptions, SaveReport, Sharding,
    commit::{ShardNames, index_text},
    content::{self, TensorBytes, TensorData},
    gather::{Devices, host_part, misfit},
    plan::{self, Piece, PlannedFile},
};
use crate::{
    ByteRange, DirectIo, Error, Result,
    catalog::safetensors::Metadata,
    counted,
    parallel::{self, lock},
    report::add_new,
};
use bytesize::ByteSize;
use hoistway_io::Placement;
use hoistway_objects::{Problem, Stop, StoreOptions, Upload, list, remove};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    ops::ControlFlow,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

/// Parts in flight, unless the caller says how many threads there are.
const CONNECTIONS: usize = 8;
/// How often the caller is asked whether to go on.
const TICK: Duration = Duration::from_millis(50);

/// What is asked whether to go on, with the bytes written since.
type GoOn<'a> = &'a (dyn Fn(u64) -> ControlFlow<()> + Sync);

/// Saves tensors to one object.
pub(super) fn save(
    url: &str,
    tensors: &[TensorData<'_>],
    metadata: Option<&Metadata>,
    options: &SaveOptions,
    go_on: GoOn<'_>,
) -> Result<SaveReport> {
    let started = Instant::now();
    let saving = Saving::new(url, tensors, options, go_on)?;
    let lens = content::check(tensors)?;
    let order = (0..tensors.len()).collect();
    let file = PlannedFile::new(tensors, &lens, order, metadata, options.alignment)?;
    let mut report = SaveReport::new(tensors.len(), options);
    let upload = saving.begin(url.to_owned(), Content::File(&file))?;
    saving.abort_on_error(&[&upload], || {
        saving.send_all(&upload)?;
        // What one request writes is shown already.
        if !upload.upload.is_one_request() && go_on(0).is_break() {
            return Err(Error::Cancelled);
        }
        saving.show(&upload, &mut report)
    })?;
    report.write_seconds = started.elapsed().as_secs_f64();
    saving.finish(&mut report, started);
    Ok(report)
}

/// Saves tensors to a folder: shards, and an index that is written last. An index that is there names old files until it is
/// replaced; new files take names that no object has. What the folder held before stays.
pub(super) fn save_sharded(
    url: &str,
    tensors: &[TensorData<'_>],
    metadata: Option<&Metadata>,
    sharding: &Sharding,
    options: &SaveOptions,
    go_on: GoOn<'_>,
) -> Result<SaveReport> {
    let started = Instant::now();
    sharding.check()?;
    let folder = format!("{}/", url.trim_end_matches('/'));
    let saving = Saving::new(url, tensors, options, go_on)?;
    let lens = content::check(tensors)?;
    let files = plan::files(tensors, &lens, metadata, sharding.max_shard_bytes, options.alignment)?;
    let mut report = SaveReport::new(tensors.len(), options);
    let names = ShardNames::new(&sharding.file_name);
    let found = saving.listed(&folder)?;
    let old: Vec<&String> = found.iter().filter(|name| names.stem_of(name).is_some()).collect();
    let has_index = found.contains(&names.index());
    let is_single = files.len() == 1 && old.is_empty() && !has_index;
    let new = match is_single {
        true => vec![sharding.file_name.clone()],
        false => names.free(files.len(), |name| found.contains(name))?,
    };
    let index = (!is_single).then(|| {
        let contents = files.iter().map(|file| file.tensors().map(|tensor| tensors[tensor].name));
        let weight_map: BTreeMap<&str, &str> =
            new.iter().zip(contents).flat_map(|(name, own)| own.map(|tensor| (tensor, &**name))).collect();
        index_text(weight_map, lens.iter().sum())
    });
    let index = index.transpose().map_err(|source| Error::Io {
        operation: "write",
        path: folder.clone().into(),
        tensor: None,
        range: None,
        source,
    })?;
    let mut uploads = Vec::with_capacity(files.len());
    for (name, file) in new.iter().zip(&files) {
        let begun = saving.begin(format!("{folder}{name}"), Content::File(file));
        let upload = saving.abort_on_error(&uploads.iter().collect::<Vec<_>>(), || begun)?;
        uploads.push(upload);
        let all: Vec<_> = uploads.iter().collect();
        // What one request writes is shown at once: it waits for the others.
        if let Some(last) = all.last().filter(|own| !own.upload.is_one_request()) {
            saving.abort_on_error(&all, || saving.send_all(last))?;
        }
    }
    let all: Vec<_> = uploads.iter().collect();
    saving.abort_on_error(&all, || if go_on(0).is_break() { Err(Error::Cancelled) } else { Ok(()) })?;
    report.write_seconds = started.elapsed().as_secs_f64();
    // Shards that the store shows, or may show. No index names them before its own request is sent.
    let mut shown = Vec::new();
    let done = saving.abort_on_error(&all, || {
        for upload in &uploads {
            let sent = if upload.upload.is_one_request() { saving.send_all(upload) } else { Ok(()) };
            let done = sent.and_then(|()| saving.show(upload, &mut report));
            if done.as_ref().map_or_else(may_be_shown, |()| true) {
                shown.push(upload.upload.url().to_owned());
            }
            done?;
        }
        Ok(())
    });
    let Some(text) = &index else {
        done?;
        saving.finish(&mut report, started);
        return Ok(report);
    };
    done.map_err(|error| saving.take_back(error, &shown))?;
    let begun = saving.begin(format!("{folder}{}", names.index()), Content::Text(text));
    let upload = begun.map_err(|error| saving.take_back(error, &shown))?;
    let mut may_stand = false;
    let done = saving.abort_on_error(&[&upload], || {
        let done = saving.send_all(&upload).and_then(|()| saving.show(&upload, &mut report));
        may_stand = done.as_ref().is_err_and(may_be_shown);
        done
    });
    done.map_err(|error| match may_stand {
        true => and_left(
            error,
            &format!("the new shards stay, because the index may name them: {}", shown.join(", ")),
        ),
        false => saving.take_back(error, &shown),
    })?;
    let left = old.into_iter().chain(found.iter().filter(|name| !is_single && **name == sharding.file_name));
    let left: Vec<&str> = left.map(String::as_str).collect();
    if !left.is_empty() {
        report.notes.push(format!(
            "{} of an earlier save stay in {folder}, and the index does not name them: {}",
            counted(left.len(), "file", "files"),
            left.join(", ")
        ));
    }
    saving.finish(&mut report, started);
    Ok(report)
}

/// What an object is made of.
#[derive(Clone, Copy)]
enum Content<'a> {
    File(&'a PlannedFile),
    Text(&'a [u8]),
}

/// One object on its way.
struct Uploading<'a> {
    upload: Upload,
    content: Content<'a>,
}

/// What all objects of a save have in common.
struct Saving<'a> {
    tensors: &'a [TensorData<'a>],
    options: &'a SaveOptions,
    store: StoreOptions,
    devices: Devices,
    /// Where its threads run.
    near: Placement,
    /// Why a thread does not stay there.
    unbound: OnceLock<String>,
    go_on: GoOn<'a>,
    /// Ends what waits for the store, and bounds what is cleaned up then.
    stop: Stop,
    staged_bytes: AtomicU64,
}

impl Content<'_> {
    fn len(self) -> u64 {
        match self {
            Self::File(file) => file.len(),
            Self::Text(text) => text.len() as u64,
        }
    }
}

impl<'a> Saving<'a> {
    fn new(
        url: &str,
        tensors: &'a [TensorData<'a>],
        options: &'a SaveOptions,
        go_on: GoOn<'a>,
    ) -> Result<Self> {
        options.check()?;
        let store = options.store.clone().unwrap_or_default();
        Upload::check(url, &store).map_err(|error| failed(error, None))?;
        if options.direct == DirectIo::Always {
            let reason = "objects are sent over the network; direct writes are for files: leave it at auto";
            return Err(Error::invalid_option("direct", "always", reason));
        }
        let devices = Devices::of(tensors)?;
        Ok(Self {
            tensors,
            options,
            store,
            near: devices.placement(tensors),
            unbound: OnceLock::new(),
            devices,
            go_on,
            stop: Stop::default(),
            staged_bytes: AtomicU64::new(0),
        })
    }

    /// The names of the objects in a folder.
    fn listed(&self, folder: &str) -> Result<BTreeSet<String>> {
        let listed = self
            .watched(1, || list(folder, &self.store, self.stop.flag()).map_err(|error| failed(error, None)));
        let name = |url: String| url.rsplit('/').next().unwrap_or_default().to_owned();
        Ok(listed?.into_iter().flatten().map(name).collect())
    }

    fn begin<'c>(&self, url: String, content: Content<'c>) -> Result<Uploading<'c>> {
        let begin = || Upload::begin(&url, content.len(), &self.store, &self.stop);
        let begun = self.watched(1, || begin().map_err(|error| failed(error, None)))?;
        let upload = begun.into_iter().next().ok_or_else(misfit)?;
        let part_bytes = upload.part_bytes();
        if self.devices.is_used() && upload.parts() > 1 && part_bytes > self.options.in_flight {
            let reason = format!(
                "an object of {} is sent in parts of {}, and each passes the memory of the host: save shards, or allow more",
                ByteSize(content.len()),
                ByteSize(part_bytes)
            );
            return Err(Error::invalid_option("in_flight", self.options.in_flight, reason));
        }
        Ok(Uploading { upload, content })
    }

    /// Sends all parts of an object.
    fn send_all(&self, uploading: &Uploading<'_>) -> Result<()> {
        let upload = &uploading.upload;
        let most = self.options.in_flight / upload.part_bytes().max(1);
        let threads = self.options.threads.unwrap_or(CONNECTIONS) as u64;
        let threads = threads.min(most).min(upload.parts()).max(1);
        let next = AtomicU64::new(0);
        let send = || {
            let mut staging = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= upload.parts() {
                    return Ok(());
                }
                if self.stop.is_set() {
                    return Err(Error::Cancelled);
                }
                self.send(uploading, number, &mut staging)?;
            }
        };
        self.watched(threads as usize, send).map(drop)
    }

    /// Sends a part. `staging` is memory for what comes from devices.
    fn send(&self, uploading: &Uploading<'_>, number: u64, staging: &mut Vec<u8>) -> Result<()> {
        let Uploading { upload, content } = uploading;
        let range = upload.range(number);
        let pieces = match content {
            Content::Text(text) => vec![host_part(text, byte_range(&range)?)?],
            Content::File(file) => match self.host_pieces(file, byte_range(&range)?)? {
                Some(pieces) => pieces,
                None => {
                    let range = byte_range(&range)?;
                    self.stage(file, range, staging)?;
                    vec![&staging[..]]
                }
            },
        };
        let sent = upload.send(number, &pieces, &self.stop);
        sent.map_err(|error| failed(error, Some((content, self.tensors))))?;
        if (self.go_on)(range.end - range.start).is_break() {
            self.stop.set();
            // What one request writes is shown already.
            if !upload.is_one_request() {
                return Err(Error::Cancelled);
            }
        }
        Ok(())
    }

    /// The bytes of a range where they are. `None` if some are on a device.
    fn host_pieces<'p>(&self, file: &'p PlannedFile, range: ByteRange) -> Result<Option<Vec<&'p [u8]>>>
    where
        'a: 'p,
    {
        let mut pieces = Vec::new();
        for piece in file.pieces(range) {
            pieces.push(match piece {
                Piece::Header(header) => header,
                Piece::Tensor(tensor, part) => match self.tensors[tensor].bytes {
                    TensorBytes::Host(bytes) => host_part(bytes, part)?,
                    TensorBytes::Device(_) => return Ok(None),
                },
            });
        }
        Ok(Some(pieces))
    }

    /// Brings the bytes of a range together.
    fn stage(&self, file: &PlannedFile, range: ByteRange, staging: &mut Vec<u8>) -> Result<()> {
        let len = range.len() as usize;
        staging.clear();
        staging.try_reserve_exact(len).map_err(|error| Error::Allocation {
            bytes: range.len(),
            kind: "memory for a part of an upload",
            source: io::Error::new(io::ErrorKind::OutOfMemory, error),
        })?;
        staging.resize(len, 0);
        self.devices.gather(file, self.tensors, range, staging)?;
        self.staged_bytes.fetch_add(range.len(), Ordering::Relaxed);
        Ok(())
    }

    /// Has the store show an object that was sent.
    fn show(&self, uploading: &Uploading<'_>, report: &mut SaveReport) -> Result<()> {
        let Uploading { upload, content } = uploading;
        let complete = || upload.complete(&self.stop).map_err(|error| failed(error, None));
        let uploaded = self.watched(1, complete)?.into_iter().next().ok_or_else(misfit)?;
        report.paths.push(upload.url().into());
        report.parts += upload.parts();
        report.retries += uploaded.repeated;
        report.uploaded_bytes += content.len();
        match uploaded.compared {
            Ok(checksum) if report.paths.len() == 1 => report.checksum = Some(checksum.to_owned()),
            Ok(_) => {}
            Err(why) => {
                report.checksum = None;
                add_new(&mut report.notes, Some(format!("the store did not compare what it got: {why}")));
            }
        }
        if uploaded.has_stray {
            let note = "the answer to a request that begins an upload was lost: the store may hold an upload without parts until \
                        a lifecycle rule of the bucket aborts it";
            add_new(&mut report.notes, Some(note.to_owned()));
        }
        if let Content::File(file) = content {
            report.files += 1;
            report.tensor_bytes += file.tensor_bytes();
            report.file_bytes += file.len();
        }
        Ok(())
    }

    /// Does something, and aborts the uploads if it fails.
    fn abort_on_error<T>(&self, uploads: &[&Uploading<'_>], work: impl FnOnce() -> Result<T>) -> Result<T> {
        work().map_err(|error| {
            let left = self.clean_up(uploads, |own| own.upload.abort(&self.stop));
            let are_dropped_later = left.iter().all(|own| matches!(own.problem, Problem::BlocksLeft));
            match error {
                // No request removes blocks of Azure: that they are left is no failure, and the log says it.
                Error::Cancelled if are_dropped_later => Error::Cancelled,
                error if left.is_empty() => error,
                error => and_left(error, &told(&left)),
            }
        })
    }

    /// Removes the objects of a set whose index does not name them.
    fn take_back(&self, error: Error, shown: &[String]) -> Error {
        let left = self.clean_up(shown, |url| remove(url, &self.store, &self.stop));
        if left.is_empty() {
            return error;
        }
        and_left(error, &format!("objects of this save stay that no index names: {}", told(&left)))
    }

    /// Cleans up side by side, all within the time that is left after a stop. Says what is left, in the log too.
    fn clean_up<T: Sync>(
        &self,
        what: &[T],
        clean: impl Fn(&T) -> hoistway_objects::Result<()> + Sync,
    ) -> Vec<hoistway_objects::Error> {
        self.stop.set();
        let (next, left) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let work = || {
            while let Some(own) = what.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(error) = clean(own) {
                    tracing::warn!("{error}");
                    lock(&left).push(error);
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..what.len().min(CONNECTIONS) {
                if parallel::thread_named("hoistway-upload").spawn_scoped(scope, work).is_err() {
                    break;
                }
            }
            work();
        });
        std::mem::take(&mut *lock(&left))
    }

    fn finish(&self, report: &mut SaveReport, started: Instant) {
        report.staged_bytes = self.staged_bytes.load(Ordering::Relaxed);
        report.synced = true;
        add_new(&mut report.notes, self.near.note.clone());
        add_new(&mut report.notes, self.unbound.get().cloned());
        report.finish(started);
    }

    /// Does something on so many threads, while this one asks the caller whether to go on. The first error ends the others.
    fn watched<T: Send>(&self, threads: usize, work: impl Fn() -> Result<T> + Sync) -> Result<Vec<T>> {
        let first = Mutex::new(None::<Error>);
        let guarded = || {
            let done = work();
            done.map_err(|error| {
                self.stop.set();
                let mut first = lock(&first);
                // What stopped the others is the error to tell of, rather than that they were stopped.
                if matches!(&*first, None | Some(Error::Cancelled)) {
                    *first = Some(error);
                }
            })
            .ok()
        };
        let mut results = Vec::with_capacity(threads);
        thread::scope(|scope| {
            let (sender, receiver) = mpsc::channel();
            let mut has_threads = false;
            for _ in 0..threads {
                let (sender, guarded) = (sender.clone(), &guarded);
                let body = move || {
                    if let Err(error) = self.near.bind() {
                        let _ = self.unbound.set(Placement::unbound(&error));
                    }
                    let _ = sender.send(guarded());
                };
                // As many as the system gives.
                if parallel::thread_named("hoistway-upload").spawn_scoped(scope, body).is_err() {
                    break;
                }
                has_threads = true;
            }
            drop(sender);
            if !has_threads {
                results.extend(guarded());
                return;
            }
            loop {
                match receiver.recv_timeout(TICK) {
                    Ok(done) => results.extend(done),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
                if (self.go_on)(0).is_break() {
                    self.stop.set();
                }
            }
        });
        let failed = lock(&first).take();
        failed.map_or(Ok(results), Err)
    }
}

fn byte_range(range: &std::ops::Range<u64>) -> Result<ByteRange> {
    ByteRange::new(range.start, range.end).ok_or_else(misfit)
}

/// The error of a request, with the tensor whose bytes it had.
fn failed(error: hoistway_objects::Error, of: Option<(&Content<'_>, &[TensorData<'_>])>) -> Error {
    let hoistway_objects::Error { url, range, problem, .. } = error;
    let range = range.and_then(|range| ByteRange::new(range.start, range.end));
    let tensor = match (of, range) {
        (Some((Content::File(file), tensors)), Some(range)) => {
            file.tensor_at(range.start()).map(|tensor| tensors[tensor].name.to_owned())
        }
        _ => None,
    };
    match problem {
        Problem::Invalid(reason) => Error::InvalidOption { option: "path", value: url, reason },
        Problem::Stopped => Error::Cancelled,
        problem => {
            let source = io::Error::new(problem.kind(), problem);
            Error::Io { operation: "upload", path: url.into(), tensor, range, source }
        }
    }
}

/// What is left in a store, in words.
fn told(left: &[hoistway_objects::Error]) -> String {
    left.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Whether a store may show what was sent, for all that is known.
fn may_be_shown(error: &Error) -> bool {
    let Error::Io { source, .. } = error else { return false };
    let problem = source.get_ref().and_then(|inner| inner.downcast_ref::<Problem>());
    matches!(problem, Some(Problem::Doubtful(_) | Problem::StoredDamaged(_)))
}

/// An error, and what is left in the store.
fn and_left(error: Error, left: &str) -> Error {
    let told = |kind, text: String| io::Error::new(kind, format!("{text}; {left}"));
    match error {
        Error::Io { operation, path, tensor, range, source } => {
            let source = told(source.kind(), source.to_string());
            Error::Io { operation, path, tensor, range, source }
        }
        Error::InvalidOption { option, value, reason } => {
            Error::InvalidOption { option, value, reason: format!("{reason}; {left}") }
        }
        Error::Cancelled => Error::System {
            operation: "cleaning up after a save that was cancelled",
            source: io::Error::new(io::ErrorKind::TimedOut, left.to_owned()),
        },
        error => Error::System { operation: "saving", source: told(io::ErrorKind::Other, error.to_string()) },
    }
}
