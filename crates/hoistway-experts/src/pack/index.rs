//! What a pack says of itself: which model it is of, and the digest of each expert.
//!
//! The first block of the file has a mark, a version, and where the index is, with its digest. Experts follow, and the index, as
//! JSON, is behind them.
#![forbid(unsafe_code)]

use super::{Layout, Unusable};
use crate::catalog::ExpertCatalog;
use hoistway::{ByteRange, read::ReadFile};
use hoistway_io::file::{FileIdentity, OpenFile, read_exact_at, write_all_at};
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io::{self, IoSlice},
    path::Path,
};

/// Where experts begin.
pub(super) const DATA_START: u64 = 4096;
pub(super) const MARK: [u8; 16] = *b"hoistway.experts";
const VERSION: u32 = 1;
/// The most that the index has of an expert, of a file, and beside these.
const EXPERT_BYTES: u64 = 128;
const SOURCE_BYTES: u64 = 2048;
const FRAME_BYTES: u64 = 4096;
/// Mark, version and a reserved word, place of the index, digest of the index.
const HEAD_BYTES: usize = 16 + 8 + 16 + 32;

/// The index.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Index {
    /// The files of the model, in the order of its catalog.
    pub(super) sources: Vec<SourceIdentity>,
    /// The [`Layout`]'s digest.
    pub(super) layout: String,
    /// The BLAKE3 digest of each expert's parts, one after the other.
    pub(super) experts: Vec<String>,
    /// Where it lies in its file.
    #[serde(skip)]
    pub(super) start: u64,
}

/// What tells a file of a model from others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SourceIdentity {
    name: String,
    bytes: u64,
    /// The time of its last change, since 1970.
    modified_seconds: i64,
    modified_nanoseconds: i64,
}

impl SourceIdentity {
    /// That of a file that is open. `None` if it is none of this machine.
    pub(super) fn of(file: &ReadFile) -> Option<Self> {
        Some(Self::new(file.path(), &file.identity()?))
    }

    /// That of the file that a path leads to now.
    pub(super) fn at(path: &Path) -> hoistway::Result<Self> {
        Ok(Self::new(path, &OpenFile::open(path)?.identity))
    }

    fn new(path: &Path, identity: &FileIdentity) -> Self {
        const SECOND: i128 = 1_000_000_000;
        let (name, modified) = (path.file_name().unwrap_or_default(), identity.modified_ns());
        Self {
            name: name.to_string_lossy().into_owned(),
            bytes: identity.len(),
            modified_seconds: modified.div_euclid(SECOND) as i64,
            modified_nanoseconds: modified.rem_euclid(SECOND) as i64,
        }
    }

    /// What is different in `now`, in words.
    fn change(&self, now: &Self) -> Option<String> {
        let name = &now.name;
        if self.name != now.name {
            Some(format!("it was packed from '{}', and the model is '{name}'", self.name))
        } else if self.bytes != now.bytes {
            Some(format!("'{name}' had {} bytes when it was packed, and has {}", self.bytes, now.bytes))
        } else if self != now {
            Some(format!("'{name}' was changed or copied since it was packed"))
        } else {
            None
        }
    }
}

impl Index {
    /// Writes it behind the experts, and then the first block.
    pub(super) fn write(&self, file: &File, start: u64) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        write(file, &text, start)?;
        let mut head = Vec::with_capacity(HEAD_BYTES);
        head.extend(MARK);
        head.extend(VERSION.to_le_bytes());
        head.extend([0; 4]);
        head.extend(start.to_le_bytes());
        head.extend((text.len() as u64).to_le_bytes());
        head.extend(blake3::hash(&text).as_bytes());
        write(file, &head, 0)
    }

    /// Reads it, if it is whole, and no longer than that of this catalog can be.
    pub(super) fn read(file: &File, catalog: &ExpertCatalog) -> Result<Self, Unusable> {
        let refused = |reason: &str| Unusable::Refused(reason.into());
        let len = file.metadata()?.len();
        let mut head = [0; HEAD_BYTES];
        if len < DATA_START {
            return Err(refused("it holds no packed experts"));
        }
        read_exact_at(file, &mut head, 0)?;
        let (mark, rest) = head.split_at(MARK.len());
        if mark != MARK {
            return Err(refused("it holds no packed experts"));
        }
        let word = |at: usize| {
            let bytes = rest.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
            u64::from_le_bytes(bytes.unwrap_or_default())
        };
        let version = word(0) as u32;
        if version != VERSION {
            return Err(Unusable::Refused(format!(
                "it has version {version}, and {VERSION} is known: pack again"
            )));
        }
        let place = ByteRange::at(word(8), word(16)).filter(|place| place.end() <= len);
        let place = place.filter(|place| place.start() >= DATA_START);
        let place = place.ok_or_else(|| refused("its index does not lie in it: it was cut or damaged"))?;
        let experts = (catalog.experts().len() as u64).saturating_mul(EXPERT_BYTES);
        let sources = (catalog.files().len() as u64).saturating_mul(SOURCE_BYTES);
        if place.len() > experts.saturating_add(sources).saturating_add(FRAME_BYTES) {
            return Err(refused("its index is longer than that of this model: pack again"));
        }
        let mut text = vec![0; place.len() as usize];
        read_exact_at(file, &mut text, place.start())?;
        if rest.get(24..56) != Some(blake3::hash(&text).as_bytes().as_slice()) {
            return Err(refused("its index is damaged"));
        }
        let read: Result<Self, _> = serde_json::from_slice(&text);
        let read = read.map_err(|error| Unusable::Refused(format!("its index is damaged: {error}")))?;
        Ok(Self { start: place.start(), ..read })
    }

    /// Fails, in words, unless it is of this model, whose files are `now`.
    pub(super) fn compare(&self, layout: &Layout, now: &[SourceIdentity]) -> Result<(), String> {
        self.compare_sources(now)?;
        if self.layout != layout.digest || self.experts.len() != layout.units.len() {
            return Err("it holds other experts than the model, or in another order: pack again".into());
        }
        if self.start != layout.end {
            return Err("its index does not begin where its experts end: pack again".into());
        }
        Ok(())
    }

    /// Fails, in words, unless it was made from files that are `now`.
    pub(super) fn compare_sources(&self, now: &[SourceIdentity]) -> Result<(), String> {
        if self.sources.len() != now.len() {
            let (then, now) = (self.sources.len(), now.len());
            return Err(format!("it was packed from {then} files, and the model has {now}"));
        }
        match self.sources.iter().zip(now).find_map(|(then, now)| then.change(now)) {
            Some(change) => Err(format!("{change}: pack again")),
            None => Ok(()),
        }
    }

    /// Whether the digest of an expert is this.
    pub(super) fn has(&self, expert: usize, digest: &blake3::Hash) -> bool {
        self.experts.get(expert).map(String::as_str) == Some(digest.to_hex().as_str())
    }
}

pub(super) fn write(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    let mut offset = offset;
    write_all_at(file, &mut [IoSlice::new(bytes)], &mut offset, hoistway::Alignment::BYTE)
}
