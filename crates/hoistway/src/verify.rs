//! Content digests of tensors, read a second way: plain buffered reads, none of the engine's machinery.
#![forbid(unsafe_code)]

use crate::{
    Cancel, Checkpoint, Dtype, Error, Loaded, Result, Tensor, TensorMemory,
    catalog::{TensorEntry, TensorId},
    memory, parallel, save,
    source::Source,
};
#[cfg(feature = "objects")]
use crate::{
    report::ChecksumReport,
    source::objects::{CHECKSUM_PATIENCE, ObjectSource, PART, compared_by, mismatch},
};
#[cfg(feature = "objects")]
use hoistway_objects::{Checksum, Comparison, HeadSums, Object, Unsaid, WholeDigest};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, fs, io, ops::ControlFlow, path::Path, time::Instant};
#[cfg(feature = "objects")]
use std::{sync::Arc, time::Duration};

/// Bytes that are read and hashed at once.
const STEP_BYTES: usize = 1 << 20;
const BUFFER: &str = "memory for bytes to be hashed";
/// How long a verification waits for the checksums of stores that have not said them in time for the load.
#[cfg(feature = "objects")]
const STORE_PATIENCE: Duration = Duration::from_secs(30);
/// Objects whose checksums a verification asks for at once.
#[cfg(feature = "objects")]
const ASKED_AT_ONCE: usize = 16;

/// The tensors of a checkpoint, with digests of their bytes.
///
/// Serialises to JSON. Made by [`Manifest::of`], kept beside the files, and compared later, elsewhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// How the digests are made: `blake3`.
    pub algorithm: String,
    /// The tensors by name.
    pub tensors: BTreeMap<String, ManifestEntry>,
}

/// One tensor of a [`Manifest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestEntry {
    /// Type of each element.
    pub dtype: Dtype,
    /// Elements along each dimension.
    pub shape: Vec<u64>,
    /// BLAKE3 digest of the bytes, in hex.
    pub digest: String,
}

impl fmt::Display for ManifestEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} {}", self.dtype, self.shape, self.digest)
    }
}

/// The result of a verification.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct VerifyReport {
    /// What the loaded bytes were compared with: `second read` or the path of a manifest.
    pub against: String,
    /// Tensors that were compared, all of them equal.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// How long it took.
    pub seconds: f64,
}

impl Manifest {
    const ALGORITHM: &str = "blake3";

    /// Reads and digests every tensor of a checkpoint, on all cores. Calls `progress` with bytes done since the
    /// last call, from any thread, until it breaks off.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Truncated`], [`Error::Changed`] or [`Error::Cancelled`].
    pub fn of(checkpoint: &Checkpoint, progress: impl Fn(u64) -> ControlFlow<()> + Sync) -> Result<Self> {
        Self::of_until(&Cancel::default(), checkpoint, progress)
    }

    /// Like [`Manifest::of`], until `cancel` ends it: also reads that wait for a server.
    ///
    /// # Errors
    /// Those of [`Manifest::of`].
    pub fn of_until(
        cancel: &Cancel,
        checkpoint: &Checkpoint,
        progress: impl Fn(u64) -> ControlFlow<()> + Sync,
    ) -> Result<Self> {
        let ids: Vec<TensorId> = checkpoint.catalog().ids().collect();
        let entries = parallel::map(&ids, parallel::cores(), |&id| {
            let entry = checkpoint.catalog().tensor(id);
            let digest = digest_of_file(checkpoint.source(entry.file), entry, cancel, &progress)?;
            let described = ManifestEntry { dtype: entry.dtype, shape: entry.shape.to_vec(), digest };
            Ok((entry.name.to_string(), described))
        });
        Ok(Self { algorithm: Self::ALGORITHM.into(), tensors: entries.into_iter().collect::<Result<_>>()? })
    }

    /// Reads a manifest that [`Manifest::write`] wrote.
    ///
    /// # Errors
    /// [`Error::InvalidManifest`]; [`Error::Io`] if it cannot be read.
    pub fn read(path: &Path) -> Result<Self> {
        let invalid = |reason: String| Error::InvalidManifest { path: path.to_owned(), reason };
        let text = fs::read(path).map_err(|source| manifest_io("read", path, source))?;
        let manifest: Self = serde_json::from_slice(&text)
            .map_err(|error| invalid(format!("not what 'hoistway verify --save' writes: {error}")))?;
        if manifest.algorithm != Self::ALGORITHM {
            return Err(invalid(format!("digests by '{}' are not known", manifest.algorithm)));
        }
        Ok(manifest)
    }

    /// Fails if a file is there that is no manifest, which [`Manifest::write`] does not replace.
    ///
    /// # Errors
    /// [`Error::Io`].
    #[doc(hidden)]
    pub fn check_place(path: &Path) -> Result<()> {
        // Whose members may be in any order. Of other files this reads no more than their beginning is JSON.
        let is_read = || {
            let file = fs::File::open(path).map(io::BufReader::new);
            file.is_ok_and(|file| serde_json::from_reader::<_, Self>(file).is_ok())
        };
        save::refuse_others(path, "a manifest", |begins| {
            begins.starts_with(b"{\"algorithm\":") || (begins.starts_with(b"{") && is_read())
        })
    }

    /// Writes the manifest as JSON. An older manifest of that name has its contents until the new ones are on the disk.
    ///
    /// # Errors
    /// [`Error::Io`], also if there is another file of that name.
    pub fn write(&self, path: &Path) -> Result<()> {
        Self::check_place(path)?;
        let text = serde_json::to_string_pretty(self);
        let text = text.map_err(|error| manifest_io("write", path, error.into()))? + "\n";
        save::write_whole(path, text.as_bytes())
    }

    /// What in `found` differs from this manifest, in words; empty if nothing does.
    pub fn differences(&self, found: &Self) -> Vec<String> {
        let mut differences = Vec::new();
        for (name, expected) in &self.tensors {
            match found.tensors.get(name) {
                None => differences.push(format!("tensor '{name}' is missing")),
                Some(entry) if entry == expected => {}
                Some(entry) => {
                    differences.push(format!("tensor '{name}' is {entry}, expected {expected}"));
                }
            }
        }
        for name in found.tensors.keys().filter(|name| !self.tensors.contains_key(*name)) {
            differences.push(format!("tensor '{name}' is not in the manifest"));
        }
        differences
    }
}

fn manifest_io(operation: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Io { operation, path: path.to_owned(), tensor: None, range: None, source }
}

/// Compares what `loaded` holds with a manifest or, without one, with a second reading of the files.
///
/// # Errors
/// [`Error::DigestMismatch`] names the first tensor that differs. [`Error::InvalidManifest`] if the manifest does
/// not have a tensor, or has one that a whole checkpoint lacks; [`Error::InvalidOption`] if a tensor was loaded in
/// part or converted, which digests cannot tell.
pub(crate) fn check(
    checkpoint: &Checkpoint,
    loaded: &Loaded,
    manifest: Option<(&Path, &Manifest)>,
    cancel: &Cancel,
) -> Result<VerifyReport> {
    let started = Instant::now();
    let checked = parallel::map(loaded.tensors(), parallel::cores(), |tensor| {
        let catalog = checkpoint.catalog();
        let id = catalog.find(tensor.name()).ok_or_else(|| catalog.no_such_tensor(tensor.name()))?;
        let entry = catalog.tensor(id);
        if tensor.shape() != &*entry.shape {
            let reason = "a slice cannot be compared with the digest of the whole tensor";
            return Err(Error::invalid_option("verify", tensor.name(), reason));
        }
        if tensor.dtype() != entry.dtype {
            let reason = "converted elements cannot be compared with the digest of those in the file";
            return Err(Error::invalid_option("verify", tensor.name(), reason));
        }
        let describe = |digest| ManifestEntry { dtype: entry.dtype, shape: entry.shape.to_vec(), digest };
        let mut hasher = blake3::Hasher::new();
        for_bytes_of(tensor, |bytes| _ = hasher.update(bytes))?;
        let found = describe(hasher.finalize().to_hex().to_string());
        let go_on = |_| ControlFlow::Continue(());
        let expected = match manifest {
            None => describe(digest_of_file(checkpoint.source(entry.file), entry, cancel, &go_on)?),
            Some((path, manifest)) => match manifest.tensors.get(tensor.name()) {
                Some(expected) => expected.clone(),
                None => {
                    let reason = format!("it has no tensor '{}'", tensor.name());
                    return Err(Error::InvalidManifest { path: path.to_owned(), reason });
                }
            },
        };
        if found == expected {
            return Ok(tensor.len_bytes());
        }
        #[cfg(feature = "objects")]
        discard_kept(&checkpoint.sources()[entry.file.index()]);
        let path = catalog.file(entry.file).source.as_path().to_owned();
        let (expected, found) = (expected.to_string(), found.to_string());
        Err(Error::DigestMismatch { tensor: tensor.name().to_owned(), path, expected, found })
    });
    let bytes = checked.into_iter().sum::<Result<u64>>()?;
    if let Some((path, manifest)) = manifest
        && loaded.tensors().len() == checkpoint.catalog().tensors().len()
        && let Some(lost) = manifest.tensors.keys().find(|name| checkpoint.catalog().find(name).is_none())
    {
        let reason = format!("it has tensor '{lost}', which the checkpoint lacks");
        return Err(Error::InvalidManifest { path: path.to_owned(), reason });
    }
    Ok(VerifyReport {
        against: manifest.map_or("second read".into(), |(path, _)| path.display().to_string()),
        tensors: loaded.tensors().len(),
        bytes,
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// Compares the objects all of whose tensors are loaded with what their stores say of them: their checksum, which is waited for, or
/// their digest. Returns what was compared.
///
/// # Errors
/// [`Error::ChecksumMismatch`].
#[cfg(feature = "objects")]
pub(crate) fn check_stores(
    checkpoint: &Checkpoint,
    loaded: &Loaded,
    cancel: &Cancel,
) -> Result<ChecksumReport> {
    let begun = Instant::now();
    let files = checkpoint.catalog().files().iter().zip(checkpoint.sources());
    let objects = files.filter_map(|(file, source)| {
        let object = ObjectSource::of(source)?.object();
        let tensors: Vec<_> = file.tensors().map(|id| checkpoint.catalog().tensor(id)).collect();
        let loaded = tensors.iter().filter(|entry| loaded.get(&entry.name).is_some()).count();
        let is_whole = loaded == tensors.len();
        (loaded > 0).then_some(LoadedObject { source, object, tensors, is_whole })
    });
    let objects: Vec<_> = objects.collect();
    // Before the first is compared: that may take longer than all stores have.
    let said = parallel::map(&objects, ASKED_AT_ONCE, |own| {
        own.is_whole.then(|| said_by(own.object, begun, cancel))
    });
    let objects: Vec<_> = objects.into_iter().zip(said).collect();
    let checked =
        parallel::map(&objects, parallel::cores(), |(LoadedObject { source, tensors, .. }, said)| {
            if cancel.is_cancelled() {
                return Err(Error::Cancelled);
            }
            let compared = match said {
                None => Err(PART),
                Some((Ok(checksum), _)) => {
                    let (len, whole) = (source.len(), 0..source.len());
                    let compared = Comparison::new(len, HeadSums::default(), &[whole], checksum.clone());
                    let Some(compared) = compared else { return Ok((len, Err(PART))) };
                    let mut piece = compared.piece(0);
                    for_all_bytes(&***source, tensors, loaded, cancel, |bytes| piece.add(bytes))?;
                    if let Err(problem) = piece.end() {
                        discard_kept(source);
                        let other =
                            |problem| Error::Internal(format!("a checksum cannot be compared: {problem}"));
                        return Err(mismatch(source.path(), &problem).unwrap_or_else(|| other(problem)));
                    }
                    compared_by(compared.outcome())
                }
                Some((_, Some(expected))) => {
                    let mut hasher = expected.hasher();
                    for_all_bytes(&***source, tensors, loaded, cancel, |bytes| hasher.update(bytes))?;
                    let (found, checksum) = (hasher.finish(), expected.name());
                    if found != expected.text() {
                        discard_kept(source);
                        let path = source.path().to_owned();
                        return Err(Error::ChecksumMismatch {
                            path,
                            checksum,
                            expected: expected.text(),
                            found,
                        });
                    }
                    Ok(checksum)
                }
                Some((Err(why), None)) => Err(why.reason()),
            };
            Ok((source.len(), compared))
        });
    let mut report = ChecksumReport::default();
    for object in checked {
        match object? {
            (bytes, Ok(checksum)) => report.add_equal(bytes, checksum),
            (_, Err(reason)) => report.add_uncompared(reason, 1),
        }
    }
    Ok(report)
}

/// An object of which tensors are loaded.
#[cfg(feature = "objects")]
struct LoadedObject<'a> {
    source: &'a Arc<dyn Source>,
    object: &'a Object,
    tensors: Vec<&'a TensorEntry>,
    /// Whether all of them are.
    is_whole: bool,
}

/// What the store says of an object: the answer to what it was asked as that was opened or, if there is none, to another question, for
/// which it has more time.
#[cfg(feature = "objects")]
fn said_by(
    object: &Object,
    begun: Instant,
    cancel: &Cancel,
) -> (Result<Checksum, Unsaid>, Option<WholeDigest>) {
    object.hurry_checksum();
    object.wait_for_checksum(begun + CHECKSUM_PATIENCE, cancel.flag());
    match object.known_checksum() {
        Some(Ok(checksum)) => (Ok(checksum.clone()), None),
        Some(Err(why @ Unsaid::Never(_))) => (Err(why), object.known_digest()),
        late => match (object.known_digest(), object.ask_again(begun + STORE_PATIENCE, cancel.flag())) {
            (_, Some((Ok(checksum), _))) => (Ok(checksum), None),
            (known, Some((Err(why), digest))) => (Err(why), known.or(digest)),
            (known, None) => {
                let none = Unsaid::Never("the store was not asked for its checksum");
                (late.and_then(Result::err).map_or(Err(none), Err), known)
            }
        },
    }
}

/// Discards what the node's cache holds of a file whose bytes were found to be wrong.
#[cfg(feature = "objects")]
fn discard_kept(source: &Arc<dyn Source>) {
    if let Some(object) = ObjectSource::of(source) {
        object.discard_unproven("a verification has found that its bytes are not those of the store");
    }
}

/// Calls `came` with the bytes of a file in their order: those of its tensors are those that were loaded.
#[cfg(feature = "objects")]
fn for_all_bytes(
    source: &dyn Source,
    tensors: &[&TensorEntry],
    loaded: &Loaded,
    cancel: &Cancel,
    mut came: impl FnMut(&[u8]),
) -> Result<()> {
    let mut buffer = memory::zeroed(STEP_BYTES as u64, BUFFER)?;
    let mut at = 0;
    let ends = tensors.iter().map(|entry| (entry.bytes.start(), Some(entry))).chain([(source.len(), None)]);
    for (end, entry) in ends {
        // Headers and padding are in no tensor.
        while at < end {
            let len = buffer.len().min((end - at) as usize);
            source.read_exactly(&mut buffer[..len], at, None, cancel)?;
            came(&buffer[..len]);
            at += len as u64;
        }
        if let Some(tensor) = entry.and_then(|entry| loaded.get(&entry.name)) {
            for_bytes_of(tensor, &mut came)?;
            at += tensor.len_bytes();
        }
    }
    Ok(())
}

/// Calls `came` with the bytes of a tensor in their order. Those of a device are not in host memory all at once.
fn for_bytes_of(tensor: &Tensor, mut came: impl FnMut(&[u8])) -> Result<()> {
    match tensor.memory() {
        TensorMemory::Host(block) => came(block),
        TensorMemory::Device(block) => block.read_back_in_steps(STEP_BYTES, came)?,
    }
    Ok(())
}

fn digest_of_file(
    source: &dyn Source,
    entry: &TensorEntry,
    cancel: &Cancel,
    progress: &impl Fn(u64) -> ControlFlow<()>,
) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = memory::zeroed(entry.bytes.len().min(STEP_BYTES as u64), BUFFER)?;
    let mut offset = entry.bytes.start();
    while offset < entry.bytes.end() {
        let len = buffer.len().min((entry.bytes.end() - offset) as usize);
        let step = &mut buffer[..len];
        source.read_exactly(step, offset, Some(&entry.name), cancel)?;
        hasher.update(step);
        if progress(len as u64).is_break() || cancel.is_cancelled() {
            return Err(Error::Cancelled);
        }
        offset += len as u64;
    }
    source.check_unchanged(entry.bytes, |_| Some(entry.name.to_string()))?;
    Ok(hasher.finalize().to_hex().to_string())
}
