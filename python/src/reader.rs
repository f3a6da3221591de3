//! Reads of named tensors of a checkpoint on request, for `hoistway.Reader`.
#![allow(unsafe_code)]

use crate::{
    checkpoint::Checkpoint,
    error::{IntoPython, exception_of, named},
    options::{reader_options, seconds},
    process::{Detached, Owned},
    tensor::Tensor,
    tick,
    view::{KeptTensor, Place},
};
use hoistway::{
    ByteRange, DeviceId, Dtype, Error,
    read::{Batch, Priority, ReadRequest, ReaderOptions, Target},
};
use pyo3::{prelude::*, types::PyDict};
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

/// Name of a tensor, and the first and last of its rows that are wanted, if not all.
type Wanted = (String, Option<(u64, u64)>);

/// Reads tensors of a checkpoint. `hoistway.Reader` shows it.
#[pyclass(frozen, module = "hoistway._native")]
pub(crate) struct Reader {
    reader: Owned<Arc<hoistway::read::Reader>>,
    checkpoint: Detached<Arc<hoistway::Checkpoint>>,
}

#[pymethods]
impl Reader {
    #[new]
    #[pyo3(signature = (checkpoint, **options))]
    fn new(py: Python<'_>, checkpoint: &Checkpoint, options: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let options = reader_options(ReaderOptions::default(), options, py)?;
        let reader = py.detach(|| hoistway::read::Reader::new(&options)).into_python(py)?;
        Ok(Self { reader: Owned::new(Arc::new(reader)), checkpoint: Detached::new(checkpoint.shared()) })
    }

    /// Starts to read tensors, with the priority `demand`, `prefetch` or `background`. Those that have not begun after so many
    /// seconds are cancelled.
    #[pyo3(signature = (wanted, priority="demand", begin_by=None))]
    fn submit(
        &self,
        py: Python<'_>,
        wanted: Vec<Wanted>,
        priority: &str,
        begin_by: Option<f64>,
    ) -> PyResult<Reading> {
        let reader = self.reader.get(py)?.clone();
        let priority = priority_of(priority).into_python(py)?;
        let patience = begin_by.map(|value| seconds("begin_by", value)).transpose().into_python(py)?;
        let deadline = patience.and_then(|patience| Instant::now().checked_add(patience));
        let (mut requests, mut tensors) =
            (Vec::with_capacity(wanted.len()), Vec::with_capacity(wanted.len()));
        for (name, rows) in wanted {
            let (mut request, tensor) = self.request(&name, rows).into_python(py)?;
            if let Some(deadline) = deadline {
                request = request.begin_by(deadline);
            }
            requests.push(request);
            tensors.push(tensor);
        }
        let batch = py.detach(|| reader.submit(requests, priority)).into_python(py)?;
        let (batch, reader) = (Owned::new(batch), Owned::new(reader));
        Ok(Reading { batch, _reader: reader, tensors, told: AtomicUsize::new(0) })
    }
}

impl Reader {
    fn request(&self, name: &str, rows: Option<(u64, u64)>) -> hoistway::Result<(ReadRequest, Described)> {
        let catalog = self.checkpoint.catalog();
        let id = catalog.find(name).ok_or_else(|| catalog.no_such_tensor(name))?;
        catalog.check_readable(&[id])?;
        let entry = catalog.tensor(id);
        let (bytes, shape) = match rows {
            None => (entry.bytes, entry.shape.to_vec()),
            Some((start, end)) => {
                let invalid = || Error::InvalidOption {
                    option: "rows",
                    value: format!("{start}..{end}"),
                    reason: format!(
                        "tensor '{name}' of type {} and shape {:?} has no such rows of whole bytes",
                        entry.dtype, entry.shape
                    ),
                };
                let (count, row) = entry.shape.split_first().ok_or_else(invalid)?;
                let len = end.checked_sub(start).filter(|_| end <= *count).ok_or_else(invalid)?;
                let row_bytes = entry.dtype.size_of(row).map_err(|_| invalid())?;
                let first =
                    start.checked_mul(row_bytes).and_then(|offset| offset.checked_add(entry.bytes.start()));
                let range = first.zip(len.checked_mul(row_bytes));
                let range = range.and_then(|(first, len)| ByteRange::at(first, len));
                let range = range.filter(|range| entry.bytes.contains(*range)).ok_or_else(invalid)?;
                let mut shape = entry.shape.to_vec();
                shape[0] = len;
                (range, shape)
            }
        };
        let file = self.checkpoint.read_file(entry.file);
        let file = file.ok_or_else(|| Error::Internal("a tensor has no file".into()))?;
        let request = ReadRequest::new(&file, bytes, Target::memory()).named(entry.name.clone());
        Ok((request, Described { name: entry.name.clone(), dtype: entry.dtype, shape: shape.into() }))
    }
}

/// The result of a read.
struct Described {
    name: Arc<str>,
    dtype: Dtype,
    shape: Arc<[u64]>,
}

/// Tensors that are being read. `hoistway.Reading` shows it.
#[pyclass(frozen, module = "hoistway._native")]
pub(crate) struct Reading {
    /// Dropping it cancels what has not begun, and waits for the rest.
    batch: Owned<Batch>,
    /// After the batch, whose reads end with the threads of the reader.
    _reader: Owned<Arc<hoistway::read::Reader>>,
    tensors: Vec<Described>,
    /// Reads whose end `next` has told.
    told: AtomicUsize,
}

#[pymethods]
impl Reading {
    fn __len__(&self) -> usize {
        self.tensors.len()
    }

    /// The next tensor that was read, each once, in the order in which reads end. `None` once there are no more.
    fn next(&self, py: Python<'_>) -> PyResult<Option<Tensor>> {
        let batch = self.batch.get(py)?;
        while self.told.load(Ordering::Relaxed) < self.tensors.len() {
            let ended = py.detach(|| batch.next_ended(tick(None)));
            let Some(read) = ended else {
                // Only here: a read that was told must be handed out.
                py.check_signals()?;
                continue;
            };
            self.told.fetch_add(1, Ordering::Relaxed);
            if let Some(error) = batch.status(read).error() {
                return Err(exception_of(py, error));
            }
            // `wait` may have handed it out.
            if let Some(tensor) = self.take(batch, read) {
                return Ok(Some(tensor));
            }
        }
        Ok(None)
    }

    /// Waits for all tensors, and returns those that were not handed out yet, in the order in which they were asked for.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Vec<Tensor>> {
        let batch = self.batch.get(py)?;
        let timeout = timeout.map(|value| seconds("timeout", value)).transpose().into_python(py)?;
        let asked = Instant::now();
        loop {
            let left = timeout.map(|timeout| timeout.saturating_sub(asked.elapsed()));
            let ended = py.detach(|| batch.wait_within(tick(left.map(|left| left.as_secs_f64()))));
            py.check_signals()?;
            match ended {
                Some(Ok(())) => {
                    return Ok((0..self.tensors.len()).filter_map(|read| self.take(batch, read)).collect());
                }
                Some(Err(error)) => return Err(exception_of(py, error)),
                None if left.is_some_and(|left| left.is_zero()) => {
                    let (ended, all) = (batch.ended(), batch.len());
                    let message = format!("{ended} of {all} reads have ended within {:?}", asked.elapsed());
                    return Err(named("WaitTimeoutError", py, &message, &PyDict::new(py))?);
                }
                None => {}
            }
        }
    }

    /// Number of tensors whose reads have ended, well or not.
    fn ended(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.batch.get(py)?.ended())
    }

    /// Bytes that have been read, and bytes in all.
    fn progress(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let batch = self.batch.get(py)?;
        Ok((batch.bytes_done(), batch.bytes_total()))
    }

    /// Makes reads that have not begun demand.
    fn promote(&self, py: Python<'_>) -> PyResult<()> {
        let batch = self.batch.get(py)?;
        py.detach(|| batch.promote());
        Ok(())
    }

    /// Ends reads that have not begun.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        let batch = self.batch.get(py)?;
        py.detach(|| batch.cancel());
        Ok(())
    }

    /// What the reads did, as JSON.
    fn report(&self, py: Python<'_>) -> PyResult<String> {
        let batch = self.batch.get(py)?;
        serde_json::to_string(&py.detach(|| batch.report())).into_python(py)
    }
}

impl Reading {
    /// The tensor of a read that has delivered it, once.
    fn take(&self, batch: &Batch, read: usize) -> Option<Tensor> {
        let Described { name, dtype, shape } = self.tensors.get(read)?;
        let block = batch.take(read)?;
        let place = Place {
            device: DeviceId::Cpu,
            address: block.as_ptr().expose_provenance() as u64,
            len_bytes: block.len() as u64,
        };
        // SAFETY: the block holds its bytes, which the read has delivered, and nothing else uses.
        let tensor =
            unsafe { KeptTensor::new(name.clone(), *dtype, shape.clone(), place, false, Arc::new(block)) };
        Some(tensor.into())
    }
}

fn priority_of(name: &str) -> hoistway::Result<Priority> {
    match name {
        "demand" => Ok(Priority::Demand),
        "prefetch" => Ok(Priority::Prefetch),
        "background" => Ok(Priority::Background),
        other => Err(Error::InvalidOption {
            option: "priority",
            value: other.to_owned(),
            reason: "it must be one of demand, prefetch, background".into(),
        }),
    }
}
