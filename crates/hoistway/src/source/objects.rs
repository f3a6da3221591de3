//! An object in a store, or a file of a web server. It is pinned when it is opened: each answer is compared with that version.
#![forbid(unsafe_code)]

use super::{Extensions, Latency, Source, SourceName};
use crate::{
    ByteRange, Cancel, Error, Result,
    cache::{Entry, Holds, NodeCache},
    catalog::{OpenOptions, empty_file},
    memory::{Grant, Ledger},
    route::ReadOp,
};
use hoistway_objects::{Comparison, HeadSums, Object, Outcome, Problem, Unsaid};
use std::{
    any::Any,
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// The name that the files of a web server's folder begin with: such folders cannot be listed.
const INDEX: &str = "model.safetensors.index.json";
const WHOLE: &str = "model.safetensors";
/// Bytes that are read at once of a header that goes on past the first answer: twice as many each time.
const MAX_AHEAD_BYTES: usize = 8 << 20;
/// How long what needs the store's checksum waits for those of all objects.
pub(crate) const CHECKSUM_PATIENCE: Duration = Duration::from_secs(2);
/// Why an object is not compared some of whose bytes are not read.
pub(crate) const PART: &str = "read in part";
/// Why an object is not compared whose store is slow to say its checksum.
const LATE: &str = "the store had not said its checksum when the load began";
/// The same, if that was not waited for.
const PROVEN: &str = "the store had not said its checksum when the load began; an earlier load has compared what the node's cache holds";

/// An object.
#[derive(Debug)]
pub(crate) struct ObjectSource {
    object: Object,
    ahead: Mutex<Ahead>,
    /// The checksums of its header, once that was read.
    header: OnceLock<HeadSums>,
    /// What the node's cache held as the header was read from there; empty if the first bytes have all of it.
    header_held: OnceLock<Holds>,
    /// Whether some of the header after the first bytes has come from the store.
    has_asked_header: AtomicBool,
    /// The node's cache and the object's entry in it, or why it has none although there is a cache.
    kept: Option<Result<(NodeCache, Arc<Entry>), String>>,
    extensions: Extensions,
}

/// Bytes that came before they were wanted: those of the header.
#[derive(Default)]
struct Ahead {
    start: u64,
    bytes: Vec<u8>,
    /// The checksums of all bytes before these.
    before: HeadSums,
}

impl std::fmt::Debug for Ahead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ahead").field("start", &self.start).field("len", &self.bytes.len()).finish()
    }
}

/// Opens an object by its URL.
pub(super) fn open(url: &str, options: &OpenOptions) -> Result<Arc<dyn Source>> {
    let cancel = options.cancel_token();
    let store = options.store.clone().unwrap_or_default();
    let is_index = url.ends_with(".json");
    let opened = match is_index {
        true => Object::open_with_head(url, &store, cancel.flag()),
        false => Object::open_asking(url, &store, cancel.flag()),
    };
    let (object, head) = match opened {
        Err(error) if matches!(error.problem, Problem::Empty) => {
            return Err(empty_file(Path::new(&error.url), options));
        }
        opened => opened.map_err(failed("open"))?,
    };
    // Indexes are not compared, so that nothing would tell of a wrong one that is kept.
    let cache = options.cache.as_ref().filter(|_| !is_index);
    let kept = cache.map(|cache| Ok((cache.clone(), cache.entry(&object, &head)?)));
    if let Some(Ok((cache, entry))) = &kept {
        cache.keep(entry, 0, &head, None);
    }
    let ahead = Mutex::new(Ahead { bytes: head, ..Ahead::default() });
    Ok(Arc::new(ObjectSource {
        object,
        ahead,
        header: OnceLock::new(),
        header_held: OnceLock::new(),
        has_asked_header: AtomicBool::new(false),
        kept,
        extensions: Extensions::default(),
    }))
}

/// The files in a folder of a store.
pub(super) fn list(url: &str, options: &OpenOptions) -> Result<Vec<PathBuf>> {
    let listed = hoistway_objects::list(
        url,
        &options.store.clone().unwrap_or_default(),
        options.cancel_token().flag(),
    );
    Ok(listed.map_err(failed("list"))?.into_iter().map(PathBuf::from).collect())
}

/// The files in a folder of a web server's: its index or its only file.
pub(super) fn list_web(url: &str, options: &OpenOptions) -> Result<Vec<PathBuf>> {
    let folder = SourceName::Url(url.to_owned());
    match open(&format!("{url}{INDEX}"), options) {
        Ok(_) => Ok(vec![folder.beside(INDEX)]),
        Err(Error::NotFound { .. }) => Ok(vec![folder.beside(WHOLE)]),
        // S3 says so of what is missing, to those who may not list.
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
            Ok(vec![folder.beside(WHOLE)])
        }
        Err(error) => Err(error),
    }
}

pub(super) fn failed(operation: &'static str) -> impl Fn(hoistway_objects::Error) -> Error {
    move |error| {
        let hoistway_objects::Error { url, problem, .. } = error;
        match problem {
            Problem::Invalid(reason) => Error::InvalidOption { option: "path", value: url, reason },
            Problem::Stopped => Error::Cancelled,
            // The hub says what is missing.
            Problem::NotFound { .. } if operation == "open" && !url.starts_with("hf:") => Error::NotFound {
                path: url.into(),
                reason: format!("{problem}; the URL of a folder ends with '/'"),
            },
            problem @ Problem::NotFound { .. } => {
                Error::NotFound { path: url.into(), reason: problem.to_string() }
            }
            problem => {
                let source = io::Error::new(problem.kind(), problem);
                Error::Io { operation, path: url.into(), tensor: None, range: None, source }
            }
        }
    }
}

impl ObjectSource {
    /// The source as an object, if it is one.
    pub(crate) fn of(source: &Arc<dyn Source>) -> Option<&Self> {
        let source: &dyn Any = &**source;
        source.downcast_ref()
    }

    /// The object.
    pub(crate) fn object(&self) -> &Object {
        &self.object
    }

    /// Its entry in the node's cache.
    pub(crate) fn entry(&self) -> Option<&Arc<Entry>> {
        self.kept.as_ref()?.as_ref().ok().map(|(_, entry)| entry)
    }

    /// Why it is not kept in the node's cache, if there is one.
    pub(crate) fn uncached(&self) -> Option<&str> {
        self.kept.as_ref()?.as_ref().err().map(String::as_str)
    }

    /// Frees the bytes that came before they were wanted.
    pub(crate) fn forget_ahead(&self) {
        if let Ok(mut ahead) = self.ahead.try_lock() {
            *ahead = Ahead::default();
        }
    }

    /// What a load that reads these ranges compares with the store's checksum. If the load has to wait for that, the store is asked
    /// for it before others.
    ///
    /// # Errors
    /// Why nothing is compared.
    pub(crate) fn to_compare(&self, ranges: Vec<Range<u64>>) -> Result<ToCompare<'_>, &'static str> {
        let len = self.object.len();
        let head = self.header.get().filter(|head| Comparison::is_whole(len, head, &ranges)).ok_or(PART)?;
        let holds = self.entry().map(|entry| entry.holds());
        let waits = match holds {
            None | Some(Holds::Proven) => false,
            // Nothing of it is kept, or comes from there.
            Some(Holds::Nothing) => self.entry().is_some_and(|entry| entry.refusal().is_none()),
            Some(Holds::Part | Holds::Unproven(_)) => true,
        };
        if waits {
            self.object.hurry_checksum();
        }
        Ok(ToCompare { source: self, head, ranges, holds, waits })
    }

    /// Reads what the node's cache holds. Returns how many bytes that are. The read keeps its claims of what is missing.
    pub(crate) fn read_kept(&self, op: &mut ReadOp) -> io::Result<usize> {
        let Some(entry) = self.entry() else { return Ok(0) };
        let (target, offset) = (op.buffer.target(op.progress)?, op.progress.offset);
        let comparing = op.comparison.as_deref();
        let mut piece = comparing.map(|comparing| comparing.comparison.piece(offset));
        let (count, claims) =
            entry.read_or_claim(offset, target, &op.cancel, |bytes, crc64| match (&mut piece, crc64) {
                (Some(piece), Some(crc64)) => piece.add_checked(bytes, crc64),
                (Some(piece), None) => piece.add(bytes),
                (None, _) => {}
            });
        if let (Some(comparing), Some(piece)) = (comparing, piece) {
            self.compared(comparing, piece.end())?;
        }
        op.claims = claims;
        Ok(count)
    }

    /// Reads from the store. Returns how many bytes came.
    pub(crate) fn read_asked(&self, op: &mut ReadOp) -> io::Result<usize> {
        let (target, offset) = (op.buffer.target(op.progress)?, op.progress.offset);
        let (cancel, ledger, comparison) = (&op.cancel, op.ledger.as_ref(), op.comparison.as_deref());
        self.read(target, offset, &Reading { cancel, ledger, comparison, is_kept: true })
    }

    /// Reads what the read asks for, and no more for the node's cache: from the first bytes, or the store. Returns how many bytes
    /// came.
    pub(crate) fn read_plainly(&self, op: &mut ReadOp) -> io::Result<usize> {
        let (target, offset) = (op.buffer.target(op.progress)?, op.progress.offset);
        let ahead = self.ahead.try_lock().map_or(0, |ahead| ahead.copy(target, offset));
        let (cancel, ledger, comparison) = (&op.cancel, op.ledger.as_ref(), op.comparison.as_deref());
        if ahead > 0 {
            self.compare(comparison, offset, &target[..ahead])?;
            return Ok(ahead);
        }
        self.ask(target, offset, &Reading { cancel, ledger, comparison, is_kept: true })
    }

    /// Reads from the store. Returns how many bytes came: fewer at the end alone. Where the range begins or ends inside of a block
    /// that the node's cache lacks, the whole block is read, if the ledger has memory for it.
    fn read(&self, buffer: &mut [u8], offset: u64, reading: &Reading<'_>) -> io::Result<usize> {
        let Some(entry) = self.entry().filter(|_| reading.is_kept) else {
            return self.ask(buffer, offset, reading);
        };
        let end = self.object.len().min(offset.saturating_add(buffer.len() as u64));
        let (mut at, whole_end) = (offset, entry.whole_end(end));
        while at < end {
            let block = entry.block_at(at);
            let place = &mut buffer[(at - offset) as usize..(end - offset) as usize];
            if at == block.start && block.end <= end {
                let len = (whole_end - at) as usize;
                self.ask(&mut place[..len], at, reading)?;
                at = whole_end;
                continue;
            }
            let len = (block.end.min(end) - at) as usize;
            let block_len = block.end - block.start;
            // Its memory is freed before that of the next.
            let lacks = entry.lacks(at);
            let memory = lacks.then(|| Whole::new(block_len, reading.ledger)).flatten();
            if lacks && memory.is_none() {
                entry.note_left_out(block_len);
            }
            match memory {
                Some(mut whole) => {
                    // More than the read asks for: the rest is another read's.
                    let uncompared = Reading { comparison: None, ..*reading };
                    self.ask(&mut whole.bytes, block.start, &uncompared)?;
                    place[..len].copy_from_slice(&whole.bytes[(at - block.start) as usize..][..len]);
                    self.compare(reading.comparison, at, &place[..len])?;
                }
                None => {
                    self.ask(&mut place[..len], at, reading)?;
                }
            }
            at += len as u64;
        }
        Ok(end.saturating_sub(offset) as usize)
    }

    /// Reads on in the header: what the node's cache holds of it or, if that is nothing, from the store. The first bytes always come
    /// from there.
    fn read_header(&self, buffer: &mut [u8], offset: u64, cancel: &Cancel) -> io::Result<usize> {
        if let Some(entry) = self.entry() {
            self.header_held.get_or_init(|| entry.holds());
            let count = entry.read(offset, buffer);
            if count > 0 {
                return Ok(count);
            }
        }
        self.has_asked_header.store(true, Ordering::Relaxed);
        self.ask(buffer, offset, &Reading::alone(cancel))
    }

    /// Makes one read of the store, compares and keeps what came.
    fn ask(&self, buffer: &mut [u8], offset: u64, reading: &Reading<'_>) -> io::Result<usize> {
        let stop = reading.cancel.flag();
        let mut piece = reading.comparison.map(|comparing| comparing.of_store().piece(offset));
        let read = self.object.read_with(offset, buffer, stop, |bytes| {
            if let Some(piece) = &mut piece {
                piece.add(bytes);
            }
        });
        // The error of the load has the URL and the range.
        let count = read.map_err(|error| into_io(error.problem))?;
        if let (Some(comparing), Some(piece)) = (reading.comparison, piece) {
            self.compared(comparing, piece.end())?;
        }
        if let Some(Ok((cache, entry))) = &self.kept
            && reading.is_kept
        {
            cache.keep(entry, offset, &buffer[..count], reading.ledger);
        }
        Ok(count)
    }

    /// Adds bytes that have come from the store to a comparison, if there is one.
    fn compare(&self, comparing: Option<&Comparing>, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let Some(comparing) = comparing else { return Ok(()) };
        self.compared(comparing, comparing.of_store().add(offset, bytes))
    }

    /// Marks what the node's cache holds of an object, if all of that has the checksum of the store, and discards it if the bytes
    /// that came have not.
    fn compared(&self, comparing: &Comparing, outcome: Result<(), Problem>) -> io::Result<()> {
        if let (Some(entry), Some(digest)) = (self.entry(), comparing.unproven)
            && !comparing.has_asked.load(Ordering::Relaxed)
            && matches!(comparing.comparison.outcome(), Outcome::Equal(_))
        {
            entry.prove(digest);
        }
        outcome.map_err(|problem| {
            let why = "the bytes that came have not the checksum that the store says";
            match comparing.has_asked.load(Ordering::Relaxed) {
                true => self.discard_unproven(why),
                false => self.discard_kept(why),
            }
            into_io(problem)
        })
    }

    /// Discards what the node's cache holds of it, if that is not proven: bytes that came may be from there, and are not those of
    /// the store.
    pub(crate) fn discard_unproven(&self, why: &str) {
        if self.entry().is_some_and(|entry| entry.holds() != Holds::Proven) {
            self.discard_kept(why);
        }
    }

    /// Discards what the node's cache holds of it.
    fn discard_kept(&self, why: &str) {
        if let Some(entry) = self.entry() {
            entry.discard(why);
        }
    }
}

/// An object that a load reads whole.
pub(crate) struct ToCompare<'a> {
    source: &'a ObjectSource,
    head: &'a HeadSums,
    ranges: Vec<Range<u64>>,
    /// What the node's cache holds, if there is one.
    holds: Option<Holds>,
    /// Whether the load waits for the store's answer: what it has kept, or keeps, counts as right once it was compared.
    waits: bool,
}

impl ToCompare<'_> {
    /// Begins the comparison, once the store has said its checksum. That is waited for until `until` at the latest.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn begin(self, until: Instant, cancel: &Cancel) -> Result<Comparing, &'static str> {
        let object = &self.source.object;
        if self.waits {
            object.wait_for_checksum(until, cancel.flag());
        }
        let late = if self.holds == Some(Holds::Proven) { PROVEN } else { LATE };
        let checksum = match object.known_checksum() {
            Some(Ok(checksum)) => checksum.clone(),
            Some(Err(Unsaid::Late(_))) if self.holds == Some(Holds::Proven) => return Err(PROVEN),
            Some(Err(why)) => return Err(why.reason()),
            None => return Err(late),
        };
        let comparison =
            Comparison::new(object.len(), self.head.clone(), &self.ranges, checksum).ok_or(PART)?;
        // A header that came from the cache tells of the blocks that it had then.
        let is_of_cache = |holds| self.source.header_held.get().is_none_or(|held| *held == holds);
        let unproven = match self.holds {
            Some(holds @ Holds::Unproven(digest)) if is_of_cache(holds) => Some(digest),
            _ => None,
        };
        let has_asked = AtomicBool::new(self.source.has_asked_header.load(Ordering::Relaxed));
        Ok(Comparing { comparison, unproven, has_asked })
    }
}

/// What a load compares of one object.
#[derive(Debug)]
pub(crate) struct Comparing {
    comparison: Comparison,
    /// The digest of what the node's cache holds, if that is whole and not proven.
    unproven: Option<blake3::Hash>,
    /// Whether bytes have come from the store.
    has_asked: AtomicBool,
}

impl Comparing {
    /// The comparison, for bytes of the store.
    fn of_store(&self) -> &Comparison {
        self.has_asked.store(true, Ordering::Relaxed);
        &self.comparison
    }

    /// How the checksums differ, if they do.
    pub(crate) fn difference(&self) -> Option<Problem> {
        self.comparison.difference()
    }

    /// What it has come to.
    pub(crate) fn outcome(&self) -> Outcome {
        self.comparison.outcome()
    }
}

/// The name of the checksum that a comparison has found equal, or why it has not.
pub(crate) fn compared_by(outcome: Outcome) -> Result<&'static str, &'static str> {
    match outcome {
        Outcome::Equal(algorithm) => Ok(algorithm.name()),
        Outcome::Unknown(why) => Err(why),
        Outcome::Pending => Err("not all of it has come"),
        Outcome::Different => Err("it differs"),
    }
}

/// What a read of an object's store is part of.
#[derive(Clone, Copy)]
struct Reading<'a> {
    cancel: &'a Cancel,
    ledger: Option<&'a Arc<Ledger>>,
    comparison: Option<&'a Comparing>,
    /// Whether the node's cache keeps what comes.
    is_kept: bool,
}

impl<'a> Reading<'a> {
    /// A read that belongs to no load: of a header.
    fn alone(cancel: &'a Cancel) -> Self {
        Self { cancel, ledger: None, comparison: None, is_kept: true }
    }
}

fn into_io(problem: Problem) -> io::Error {
    io::Error::new(problem.kind(), problem)
}

/// The error of a read that has shown that the bytes of an object are not those of its store.
pub(crate) fn checksum_mismatch(path: &Path, error: &io::Error) -> Option<Error> {
    mismatch(path, error.get_ref()?.downcast_ref()?)
}

/// The error of bytes that a problem says are not those of the store.
pub(crate) fn mismatch(path: &Path, problem: &Problem) -> Option<Error> {
    match problem {
        Problem::Damaged { checksum, expected, found } => Some(Error::ChecksumMismatch {
            path: path.to_owned(),
            checksum,
            expected: expected.clone(),
            found: found.clone(),
        }),
        _ => None,
    }
}

/// Memory of a block that a read takes a part of.
struct Whole {
    bytes: Vec<u8>,
    _grant: Option<Grant>,
}

impl Whole {
    /// `None` if there is not enough memory for it.
    fn new(len: u64, ledger: Option<&Arc<Ledger>>) -> Option<Self> {
        let grant = match ledger {
            Some(ledger) => Some(ledger.try_take(len)?),
            None => None,
        };
        Some(Self { bytes: vec![0; usize::try_from(len).ok()?], _grant: grant })
    }
}

impl Ahead {
    /// Copies what it has of the bytes from `offset` on.
    fn copy(&self, buffer: &mut [u8], offset: u64) -> usize {
        let start = offset.checked_sub(self.start).and_then(|start| usize::try_from(start).ok());
        let held = start.and_then(|start| self.bytes.get(start..)).unwrap_or_default();
        let count = held.len().min(buffer.len());
        buffer[..count].copy_from_slice(&held[..count]);
        count
    }
}

impl Source for ObjectSource {
    fn path(&self) -> &Path {
        self.object.url().as_ref()
    }

    fn len(&self) -> u64 {
        self.object.len()
    }

    fn medium(&self) -> &'static str {
        "an object store"
    }

    fn latency(&self) -> Latency {
        Latency::Remote
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64, cancel: &Cancel) -> io::Result<usize> {
        // A reader that finds another at it asks the store: no child of `fork` waits for a thread of its parent.
        if let Ok(mut ahead) = self.ahead.try_lock() {
            let count = ahead.copy(buffer, offset);
            let end = ahead.start + ahead.bytes.len() as u64;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            // What reads on where the last bytes ended is a header.
            if offset == end && end > 0 && buffer.len() >= MAX_AHEAD_BYTES {
                let count = self.read_header(buffer, offset, cancel)?;
                let mut before = std::mem::take(&mut ahead.before);
                before.add(&ahead.bytes);
                before.add(&buffer[..count]);
                *ahead = Ahead { start: offset + count as u64, bytes: Vec::new(), before };
                return Ok(count);
            }
            if offset == end && end > 0 {
                let len = (ahead.bytes.len() * 2).clamp(buffer.len(), MAX_AHEAD_BYTES);
                let mut bytes = vec![0; len];
                let count = self.read_header(&mut bytes, offset, cancel)?;
                bytes.truncate(count);
                let mut before = std::mem::take(&mut ahead.before);
                before.add(&ahead.bytes);
                *ahead = Ahead { start: offset, bytes, before };
                return Ok(ahead.copy(buffer, offset));
            }
        }
        // Such as the second read of a verification.
        self.ask(buffer, offset, &Reading { is_kept: false, ..Reading::alone(cancel) })
    }

    fn header_was_read(&self, end: u64) {
        if let Ok(mut ahead) = self.ahead.try_lock() {
            let Ahead { start, bytes, before: mut sums } = std::mem::take(&mut *ahead);
            if let Some(rest) = end.checked_sub(start) {
                let rest = usize::try_from(rest).unwrap_or(usize::MAX).min(bytes.len());
                sums.add(&bytes[..rest]);
                self.header.get_or_init(|| sums);
            }
        }
    }

    fn header_is_invalid(&self) {
        // The next opening takes it from the store.
        if self.header_held.get().is_some() {
            self.discard_unproven("its header is not valid");
        }
    }

    fn version(&self) -> Option<&str> {
        Some(self.object.version().unwrap_or_default())
    }

    fn check_identity(&self, needed: ByteRange) -> hoistway_io::Result<()> {
        // Each answer was compared before its bytes were taken.
        match self.object.change() {
            None => Ok(()),
            Some(change) => {
                let (path, change) = (self.path().to_owned(), change.to_owned());
                Err(hoistway_io::Error::Changed { path, needed, change })
            }
        }
    }

    fn extensions(&self) -> &Extensions {
        &self.extensions
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hoistway_objects::StoreOptions;

    #[test]
    fn a_load_waits_for_the_checksum_of_what_a_cache_holds_or_keeps_unproven() {
        let server = objectd::Server::start().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let mut store = StoreOptions::default();
        for (name, value) in [("endpoint", &*server.url()), ("anonymous", "true")] {
            store.set(name, value).unwrap();
        }
        let opened = |url: &str, cache: Option<&NodeCache>| {
            let options =
                OpenOptions { cache: cache.cloned(), ..OpenOptions::default().store(store.clone()) };
            let source = open(url, &options).unwrap();
            source.header_was_read(8);
            cache.iter().for_each(|cache| cache.flush());
            source
        };
        let to_compare = |source: &Arc<dyn Source>| {
            let object = ObjectSource::of(source).unwrap();
            let whole = object.to_compare(vec![8..object.len()]).unwrap();
            (whole.holds, whole.waits)
        };
        let (long, short) = ("s3://models/long", "s3://models/short");
        server.put("models/long", &vec![7; 3_000_000]);
        server.put("models/short", &[7; 3_000]);
        assert_eq!(to_compare(&opened(long, None)), (None, false));
        // One without room keeps nothing.
        let full = folder.path().join("full");
        let full = NodeCache::open(full, Some(1)).unwrap();
        assert_eq!(to_compare(&opened(long, Some(&full))), (Some(Holds::Nothing), false));
        let cache = NodeCache::open(folder.path().join("cache"), Some(1 << 30)).unwrap();
        let source = opened(long, Some(&cache));
        assert_eq!(to_compare(&source), (Some(Holds::Part), true));
        let object = ObjectSource::of(&source).unwrap();
        object.entry().unwrap().lose_blocks();
        assert_eq!(to_compare(&source), (Some(Holds::Nothing), true));
        let source = opened(short, Some(&cache));
        let (Some(Holds::Unproven(digest)), true) = to_compare(&source) else { panic!() };
        ObjectSource::of(&source).unwrap().entry().unwrap().prove(digest);
        assert_eq!(to_compare(&source), (Some(Holds::Proven), false));
    }

    #[test]
    fn the_first_bytes_are_kept_for_the_header_alone() {
        let server = objectd::Server::start().unwrap();
        let bytes: Vec<u8> = (0..3_000_000).map(|at| (at % 251) as u8).collect();
        server.put("models/a", &bytes);
        let source = open(&format!("{}/models/a", server.url()), &OpenOptions::default()).unwrap();
        let kept = || {
            let any: &dyn Any = &*source;
            any.downcast_ref::<ObjectSource>().unwrap().ahead.lock().unwrap().bytes.len()
        };
        let mut found = vec![0; 2_000_000];
        source.read_exactly(&mut found, 0, None, &Cancel::default()).unwrap();
        assert!(found == bytes[..found.len()] && kept() > 0);
        source.header_was_read(8);
        assert_eq!(kept(), 0);
        source.read_exactly(&mut found, 5, None, &Cancel::default()).unwrap();
        assert!(found == bytes[5..][..found.len()]);
    }
}
