//! What a save did, and why it was not done a better way.
#![forbid(unsafe_code)]

use super::SaveOptions;
use crate::{
    counted,
    report::{Refusal, shown_rate, write_refused},
};
use bytesize::ByteSize;
use serde::{Deserialize, Serialize, Serializer};
use std::{fmt, path::PathBuf, time::Instant};

/// What one save did.
///
/// [`direct_bytes`](Self::direct_bytes) and [`buffered_bytes`](Self::buffered_bytes) add up to
/// [`file_bytes`](Self::file_bytes), unless the save went to an object store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SaveReport {
    /// Version of hoistway.
    pub version: String,
    /// The files that hold tensors, and the index last if there is one.
    #[serde(serialize_with = "as_texts")]
    pub paths: Vec<PathBuf>,
    /// Files of earlier saves that were removed.
    #[serde(serialize_with = "as_texts")]
    pub removed: Vec<PathBuf>,
    /// Files that hold tensors.
    pub files: usize,
    /// Tensors that were saved.
    pub tensors: usize,
    /// Bytes of these tensors.
    pub tensor_bytes: u64,
    /// Bytes of the files that hold them: the tensors and the headers.
    pub file_bytes: u64,
    /// Bytes that were sent to an object store, the index among them.
    pub uploaded_bytes: u64,
    /// Parts that objects were sent in: one of an object that one request writes.
    pub parts: u64,
    /// Requests to the store that failed and were repeated.
    pub retries: u64,
    /// The checksum by which the store compared all that was sent, such as `CRC-64/NVME`. `None` if it did not, or nothing was
    /// sent to one.
    pub checksum: Option<String>,
    /// Bytes that were written past the page cache.
    pub direct_bytes: u64,
    /// Bytes that were written through the page cache.
    pub buffered_bytes: u64,
    /// Bytes that passed through memory of the save's own: what direct writes do not find aligned, and what came from
    /// a device.
    pub staged_bytes: u64,
    /// Whether the save was on the disk when it ended, or in its store.
    pub synced: bool,
    /// What would have been better, and why it was not done.
    pub refused: Vec<Refusal>,
    /// What else the caller should know.
    pub notes: Vec<String>,
    /// Writing, and syncing what was written.
    pub write_seconds: f64,
    /// From the call to the return.
    pub total_seconds: f64,
}

/// A path may hold bytes that are no text: a report is for reading, so they are replaced.
fn as_texts<S: Serializer>(paths: &[PathBuf], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(paths.iter().map(|path| path.to_string_lossy()))
}

impl SaveReport {
    pub(super) fn new(tensors: usize, options: &SaveOptions) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            paths: Vec::new(),
            removed: Vec::new(),
            files: 0,
            tensors,
            tensor_bytes: 0,
            file_bytes: 0,
            uploaded_bytes: 0,
            parts: 0,
            retries: 0,
            checksum: None,
            direct_bytes: 0,
            buffered_bytes: 0,
            staged_bytes: 0,
            synced: options.sync,
            refused: Vec::new(),
            notes: Vec::new(),
            write_seconds: 0.0,
            total_seconds: 0.0,
        }
    }

    pub(super) fn finish(&mut self, started: Instant) {
        self.total_seconds = started.elapsed().as_secs_f64();
    }
}

impl fmt::Display for SaveReport {
    /// Several lines of text for people.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let per_second = self.file_bytes as f64 / self.total_seconds.max(1e-9);
        writeln!(
            f,
            "{}, {} to {} in {:.3} s ({}), {}",
            counted(self.tensors, "tensor", "tensors"),
            ByteSize(self.tensor_bytes),
            counted(self.files, "file", "files"),
            self.total_seconds,
            shown_rate(per_second),
            match self.synced {
                _ if self.parts > 0 => "stored",
                true => "synced",
                false => "not synced",
            },
        )?;
        if self.parts > 0 {
            let compared = self.checksum.as_ref().map(|own| format!(", {own} compared by the store"));
            writeln!(
                f,
                "  http     {:>10} 100.0 %  ({}, {} repeated{})",
                ByteSize(self.uploaded_bytes).to_string(),
                counted(self.parts as usize, "part", "parts"),
                self.retries,
                compared.unwrap_or_default()
            )?;
        }
        for (access, bytes) in [("direct", self.direct_bytes), ("buffered", self.buffered_bytes)] {
            if bytes > 0 {
                let share = 100.0 * bytes as f64 / self.file_bytes.max(1) as f64;
                writeln!(f, "  {access:<8} {:>10} {share:5.1} %", ByteSize(bytes).to_string())?;
            }
        }
        write_refused(f, &self.refused)?;
        for note in &self.notes {
            writeln!(f, "  note: {note}")?;
        }
        Ok(())
    }
}
