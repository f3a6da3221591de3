//! Packed experts: a file beside the model in which the parts of each expert lie together, and begin at blocks.
//!
//! In the files of a model the parts of an expert are far apart, and begin anywhere. From a pack a store reads an expert by one
//! direct read where slots keep its parts together, and with nothing staged where tensors are stacked in memory. A pack is a copy:
//! the model stays as it is, and does without it.
//!
//! [`write`](fn@write) makes a pack, [`ExpertCatalog::with_pack`] uses it if it is of this model, and [`check`] reads all of it again.
//! `index` is what the file says of itself. A pack names the files of its model with their lengths and the times of their last
//! changes: a model that was changed or copied since is another one. A store compares these with the files that it reads, some experts
//! of the model with their digests as it is opened, and each packed expert as it is read for the first time.
//!
//! ```no_run
//! use hoistway::Checkpoint;
//! use hoistway_experts::{catalog::ExpertCatalog, pack::{self, PackChoice, PackOptions}};
//! let checkpoint = Checkpoint::open(&["model.gguf"])?;
//! let catalog = ExpertCatalog::of_checkpoint(&checkpoint, None)?;
//! let path = pack::path_of(&catalog).expect("a model has a file");
//! pack::write(&checkpoint, &catalog, &path, &PackOptions::default(), |_bytes| ())?;
//! let catalog = catalog.with_pack(&PackChoice::Auto)?;
//! println!("{:?}", catalog.packing());
//! # Ok::<(), hoistway_experts::Error>(())
//! ```
#![forbid(unsafe_code)]

mod index;
mod write;

pub use write::{PackOptions, PackReport, check, write};

use crate::{
    Error, Result,
    backing::Backing,
    catalog::{ExpertCatalog, Part, Unit},
};
use hoistway::{Alignment, ByteRange, catalog::SourceName, read::ReadFile};
use hoistway_io::file::OpenFile;
use index::{Index, SourceIdentity};
use serde::{Serialize, Serializer};
use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// What the name of a pack adds to that of the model's first file.
const SUFFIX: &str = ".experts";

/// Whether a store reads experts from a pack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PackChoice {
    /// If there is one [beside the model](path_of) that is of this model. [`ExpertCatalog::packing`] says why another one is refused.
    #[default]
    Auto,
    /// No.
    Never,
    /// From the one at this path, or it is an error.
    At(PathBuf),
}

/// Whether experts are read from a pack.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Packing {
    /// There is no pack, or none is wanted.
    #[default]
    None,
    /// They are.
    Used {
        /// The pack.
        #[serde(serialize_with = "shown")]
        path: PathBuf,
    },
    /// There is a pack, which cannot be used.
    Refused {
        /// The pack.
        #[serde(serialize_with = "shown")]
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// A pack that experts are read from.
#[derive(Clone, Debug)]
pub(crate) struct Packed {
    file: ReadFile,
    layout: Arc<Layout>,
    index: Arc<Index>,
    /// Experts that were read from it as they were packed.
    verified: Arc<[AtomicBool]>,
    /// Whether it is an error if it cannot be used.
    is_required: bool,
}

impl Packed {
    pub(crate) fn file(&self) -> &ReadFile {
        &self.file
    }

    /// The places of an expert's parts, by the position of its unit.
    pub(crate) fn parts(&self, unit: usize) -> Option<&[ByteRange]> {
        self.layout.units.get(unit).map(|parts| &**parts)
    }

    /// Whether the bytes of an expert have to be [verified](Self::verify).
    pub(crate) fn is_unverified(&self, unit: usize) -> bool {
        self.verified.get(unit).is_some_and(|verified| !verified.load(Ordering::Relaxed))
    }

    /// Compares the bytes of an expert's parts, which were read, with the digest of what was packed.
    ///
    /// # Errors
    /// [`hoistway::Error::Io`].
    pub(crate) fn verify<'a>(
        &self,
        unit: usize,
        parts: impl IntoIterator<Item = &'a [u8]>,
    ) -> hoistway::Result<()> {
        if !self.index.has(unit, &digest_of(parts)) {
            return Err(hoistway::Error::Io {
                operation: "verify",
                path: self.file.path().to_owned(),
                tensor: None,
                range: Some(self.layout.range(unit)),
                source: io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the packed expert is damaged: pack again or remove the pack, then open the store again",
                ),
            });
        }
        if let Some(verified) = self.verified.get(unit) {
            verified.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

fn digest_of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(part);
    }
    hasher.finalize()
}

/// The catalog that a store reads: without its pack if that is not of the files that the store has, or the memory does not take it.
///
/// # Errors
/// [`Error::InvalidPack`] if the pack is then one that [`PackChoice::At`] named.
pub(crate) fn for_store(
    catalog: Arc<ExpertCatalog>,
    files: &[ReadFile],
    backing: &Backing,
) -> Result<Arc<ExpertCatalog>> {
    let Some(packed) = catalog.packed() else { return Ok(catalog) };
    let Err(reason) = usable(&catalog, packed, files, backing) else { return Ok(catalog) };
    let path = packed.file.path().to_owned();
    if packed.is_required {
        return Err(Error::InvalidPack { path, reason });
    }
    Ok(Arc::new(Arc::unwrap_or_clone(catalog).refusing(path, reason)))
}

/// Fails, in words, unless a store of these files may read experts from a pack to this memory.
fn usable(
    catalog: &ExpertCatalog,
    packed: &Packed,
    files: &[ReadFile],
    backing: &Backing,
) -> Result<(), String> {
    let is_whole = |part: &Part| Alignment::BLOCK.divides(part.bytes.len());
    match backing {
        Backing::DeviceSlots(_) | Backing::DeviceSparse(_) => {
            return Err("experts in memory of a device cannot be compared with their digests".into());
        }
        Backing::HostSparse if !catalog.experts().iter().flat_map(Unit::parts).all(is_whole) => {
            return Err(
                "host_sparse has the model's parts in place, as their lengths are no whole blocks".into()
            );
        }
        _ => {}
    }
    let files = files.get(..catalog.files().len()).unwrap_or(files);
    let now: Option<Vec<_>> = files.iter().map(SourceIdentity::of).collect();
    packed.index.compare_sources(&now.ok_or("the model's files are not of this machine")?)?;
    write::compare_some(catalog, &packed.index, files)
}

/// The path of a catalog's pack: that of its first file, with `.experts` behind it. `None` for a catalog without files, or whose
/// files are in an object store.
pub fn path_of(catalog: &ExpertCatalog) -> Option<PathBuf> {
    let first = catalog.files().first()?;
    if matches!(SourceName::from(&**first), SourceName::Url(_)) {
        return None;
    }
    let mut path = first.clone().into_os_string();
    path.push(SUFFIX);
    Some(path.into())
}

impl ExpertCatalog {
    /// The same experts, which a [`Store`](crate::store::Store) reads from a pack if `choice` says so and there is one of this model.
    ///
    /// # Errors
    /// [`Error::InvalidPack`] if the pack that [`PackChoice::At`] names cannot be used.
    pub fn with_pack(self, choice: &PackChoice) -> Result<Self> {
        let path = match choice {
            PackChoice::Never => None,
            PackChoice::At(path) => Some(path.clone()),
            PackChoice::Auto => path_of(&self).filter(|_| !self.experts().is_empty()),
        };
        let Some(path) = path else { return Ok(self.with_packing(Packing::None, None)) };
        match open(&self, &path, matches!(choice, PackChoice::At(_))) {
            Ok(packed) => Ok(self.with_packing(Packing::Used { path }, Some(packed))),
            Err(error) if matches!(choice, PackChoice::At(_)) => Err(error.into_error(path)),
            Err(Unusable::Missing) => Ok(self.with_packing(Packing::None, None)),
            Err(Unusable::Refused(reason)) => Ok(self.refusing(path, reason)),
        }
    }

    fn refusing(self, path: PathBuf, reason: String) -> Self {
        tracing::warn!(path = %path.display(), reason, "packed experts are not used");
        self.with_packing(Packing::Refused { path, reason }, None)
    }
}

/// Why a pack is not used.
enum Unusable {
    Missing,
    Refused(String),
}

impl Unusable {
    fn into_error(self, path: PathBuf) -> Error {
        let reason = match self {
            Self::Missing => "there are no packed experts: make them by 'hoistway moe pack'".into(),
            Self::Refused(reason) => reason,
        };
        Error::InvalidPack { path, reason }
    }
}

impl From<hoistway::Error> for Unusable {
    fn from(error: hoistway::Error) -> Self {
        match error {
            hoistway::Error::NotFound { .. } => Self::Missing,
            error => Self::Refused(error.to_string()),
        }
    }
}

impl From<io::Error> for Unusable {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::Missing,
            _ => Self::Refused(format!("it cannot be read: {error}")),
        }
    }
}

/// Opens a pack, if it is one of this catalog.
fn open(catalog: &ExpertCatalog, path: &Path, is_required: bool) -> Result<Packed, Unusable> {
    let (file, layout, index) = open_index(catalog, path)?;
    let file = ReadFile::from_file(file, path).map_err(|error| Unusable::Refused(error.to_string()))?;
    if file.len() < layout.end {
        return Err(Unusable::Refused(format!(
            "it has {} bytes, and experts up to {}",
            file.len(),
            layout.end
        )));
    }
    let verified = layout.units.iter().map(|_| AtomicBool::new(false)).collect();
    let (layout, index) = (Arc::new(layout), Arc::new(index));
    Ok(Packed { file, layout, index, verified, is_required })
}

/// Opens a pack and reads its index, if it is one of this catalog.
fn open_index(catalog: &ExpertCatalog, path: &Path) -> Result<(File, Layout, Index), Unusable> {
    // What is no regular file is not opened: a pipe would keep the caller waiting.
    let opened = OpenFile::open(path).map_err(hoistway::Error::from)?;
    let file = opened.file()?.try_clone()?;
    let index = Index::read(&file, catalog)?;
    let layout = Layout::of(catalog).map_err(|error| Unusable::Refused(error.to_string()))?;
    let now = sources(catalog).map_err(|error| Unusable::Refused(error.to_string()))?;
    index.compare(&layout, &now).map_err(Unusable::Refused)?;
    Ok((file, layout, index))
}

/// Where the parts of experts lie in a pack: each begins at a block, in the order of the catalog.
#[derive(Debug)]
struct Layout {
    units: Vec<Box<[ByteRange]>>,
    end: u64,
    /// A digest of what lies where: other experts, or the same in another order, have another one.
    digest: String,
}

impl Layout {
    /// # Errors
    /// [`Error::Internal`] if the experts do not fit 64 bits.
    fn of(catalog: &ExpertCatalog) -> Result<Self> {
        let too_long = || Error::Internal("the experts do not fit one file".into());
        let (mut next, mut hasher) = (index::DATA_START, blake3::Hasher::new());
        let mut units = Vec::with_capacity(catalog.experts().len());
        for unit in catalog.experts() {
            digest_unit(&mut hasher, unit);
            let mut parts = Vec::with_capacity(unit.parts().len());
            for part in unit.parts() {
                let place = ByteRange::at(next, part.bytes.len()).ok_or_else(too_long)?;
                next = Alignment::BLOCK.up(place.end()).ok_or_else(too_long)?;
                parts.push(place);
            }
            units.push(parts.into());
        }
        Ok(Self { units, end: next, digest: hasher.finalize().to_hex().to_string() })
    }

    /// Bytes of an expert with what lies between its parts.
    fn range(&self, unit: usize) -> ByteRange {
        let parts = self.units.get(unit).map_or(&[][..], |parts| parts);
        let ends = parts.first().zip(parts.last());
        ends.and_then(|(first, last)| ByteRange::new(first.start(), last.end())).unwrap_or_default()
    }
}

fn digest_unit(hasher: &mut blake3::Hasher, unit: &Unit) {
    let mut text = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    text(&unit.label());
    for part in unit.parts() {
        text(&part.tensor);
        text(part.role.name());
        text(&part.component);
        text(&format!("file {} at {} of {} {:?}", part.file, part.bytes, part.dtype, part.shape));
    }
}

/// A path as text, also one that is no Unicode.
fn shown<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

/// What the files of a model are now.
fn sources(catalog: &ExpertCatalog) -> hoistway::Result<Vec<SourceIdentity>> {
    catalog.files().iter().map(|path| SourceIdentity::at(path)).collect()
}
