//! Rows of tables larger than memory, such as embeddings of n-grams: only the rows that are asked for are read.
//!
//! Rows go past the store: they are small, and which of them are used is as good as random. A reader with many reads in
//! flight hides how long each of them takes.
//!
//! ```no_run
//! use std::sync::Arc;
//! use hoistway::{Checkpoint, read::{Reader, ReaderOptions}};
//! use hoistway_experts::rows::Rows;
//! let checkpoint = Checkpoint::open(&["model.gguf"])?;
//! let reader = Arc::new(Reader::new(&ReaderOptions::default().in_flight(64))?);
//! let table = Rows::of_tensor(&reader, &checkpoint, "per_layer_token_embd.weight")?;
//! let gathered = table.gather(&[151_643, 17])?;
//! println!("{} bytes", gathered.row(1).map_or(0, <[u8]>::len));
//! # Ok::<(), hoistway_experts::Error>(())
//! ```
#![allow(unsafe_code)]

use crate::{Error, ReadFailure, Result};
use hoistway::{
    ByteRange, Checkpoint,
    read::{Priority, ReadFile, ReadRequest, Reader, Target},
};
use std::{ptr::NonNull, sync::Arc};

/// Longest read of rows that follow one another.
const MAX_RUN_BYTES: u64 = 1 << 20;

/// A table in a file, of rows of equal length.
#[derive(Clone, Debug)]
pub struct Rows {
    reader: Arc<Reader>,
    file: ReadFile,
    name: Arc<str>,
    bytes: ByteRange,
    row_bytes: u64,
}

/// Rows that were read, in the order in which they were asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gathered {
    /// Each row once.
    bytes: Vec<u8>,
    row_bytes: usize,
    /// The start of each requested row.
    starts: Vec<usize>,
}

impl Rows {
    /// The rows of a tensor: what lies under each index of its slowest dimension.
    ///
    /// # Errors
    /// [`Error::Engine`] if there is no such tensor, or it is big-endian or of an unknown type; [`Error::InvalidOption`] if it has no
    /// rows of whole bytes.
    pub fn of_tensor(reader: &Arc<Reader>, checkpoint: &Checkpoint, name: &str) -> Result<Self> {
        let catalog = checkpoint.catalog();
        let id = catalog.find(name).ok_or_else(|| catalog.no_such_tensor(name))?;
        catalog.check_readable(&[id]).map_err(hoistway::Error::from)?;
        let entry = catalog.tensor(id);
        let no_rows = || {
            let reason =
                format!("its shape is {:?} of {}: it has no rows of whole bytes", entry.shape, entry.dtype);
            Error::invalid_option("table", name, reason)
        };
        let shape = entry.shape.split_first().filter(|(rows, _)| **rows > 0);
        let row_bytes = shape.and_then(|(_, row)| entry.dtype.size_of(row).ok()).ok_or_else(no_rows)?;
        let file = checkpoint.read_file(entry.file).ok_or_else(no_rows)?;
        Self::new(reader, &file, entry.bytes, row_bytes, entry.name.clone())
    }

    /// A table at `bytes` of a file, of rows of `row_bytes`. `name` is what messages call it.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] if that is no whole number of rows, or lies outside of the file.
    pub fn new(
        reader: &Arc<Reader>,
        file: &ReadFile,
        bytes: ByteRange,
        row_bytes: u64,
        name: impl Into<Arc<str>>,
    ) -> Result<Self> {
        let name = name.into();
        if row_bytes == 0 || !bytes.len().is_multiple_of(row_bytes) || bytes.end() > file.len() {
            let reason =
                format!("bytes {bytes} of a file of {} are no rows of {row_bytes} bytes", file.len());
            return Err(Error::invalid_option("table", name, reason));
        }
        Ok(Self { reader: reader.clone(), file: file.clone(), name, bytes, row_bytes })
    }

    /// Number of rows.
    pub fn len(&self) -> u64 {
        self.bytes.len() / self.row_bytes
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// Reads rows, each once however often it is named, and rows that follow one another together.
    ///
    /// # Errors
    /// [`Error::NoSuchRow`]; [`Error::Read`]; [`Error::Engine`] if there is no memory. Then no row is delivered.
    pub fn gather(&self, rows: &[u64]) -> Result<Gathered> {
        if let Some(row) = rows.iter().copied().find(|row| *row >= self.len()) {
            return Err(Error::NoSuchRow { table: self.name.to_string(), row, rows: self.len() });
        }
        let mut distinct = rows.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let len = (distinct.len() as u64).saturating_mul(self.row_bytes);
        let mut bytes = hoistway::memory::zeroed(len, "memory for rows")?;
        let runs = self.runs(&distinct);
        let mut requests = Vec::with_capacity(runs.len());
        let mut rest = bytes.as_mut_slice();
        for run in &runs {
            let (target, behind) = rest.split_at_mut(run.len() as usize);
            rest = behind;
            // SAFETY: initialised memory of this run alone. The vector is not looked at before the batch was dropped, also if
            // this panics: the batch was made after it.
            let target = unsafe { Target::host(NonNull::from(target).cast()) };
            requests.push(ReadRequest::new(&self.file, *run, target).named(self.name.clone()));
        }
        let batch = self.reader.submit(requests, Priority::Demand)?;
        let _ = batch.wait();
        let failed = (0..batch.len()).find(|read| batch.status(*read).error().is_some());
        if let Some(read) = failed {
            let unit = format!("table '{}'", self.name);
            return Err(Error::Read { unit, source: ReadFailure::of_batch(&batch, read) });
        }
        drop(batch);
        let row_bytes = self.row_bytes as usize;
        let start = |row: &u64| distinct.binary_search(row).unwrap_or_default() * row_bytes;
        let starts = rows.iter().map(start).collect();
        Ok(Gathered { bytes, row_bytes, starts })
    }

    /// The bytes of rows, which are in order and in the table, as reads.
    fn runs(&self, rows: &[u64]) -> Vec<ByteRange> {
        let mut runs: Vec<ByteRange> = Vec::new();
        for row in rows {
            let start = self.bytes.start() + row * self.row_bytes;
            let bytes = ByteRange::at(start, self.row_bytes).unwrap_or_default();
            match runs.last_mut() {
                Some(last) if last.end() == start && last.len() + self.row_bytes <= MAX_RUN_BYTES => {
                    *last = ByteRange::new(last.start(), bytes.end()).unwrap_or(*last);
                }
                _ => runs.push(bytes),
            }
        }
        runs
    }
}

impl Gathered {
    /// Number of rows that were asked for.
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// Whether no row was asked for.
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// The row that was asked for at this position.
    pub fn row(&self, position: usize) -> Option<&[u8]> {
        let start = *self.starts.get(position)?;
        self.bytes.get(start..start + self.row_bytes)
    }

    /// The rows, in the order in which they were asked for.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.starts.iter().map(|start| &self.bytes[*start..start + self.row_bytes])
    }
}
