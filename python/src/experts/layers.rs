//! Layers of dense models, one after the other.
#![allow(unsafe_code)]

use crate::{
    checkpoint::Checkpoint,
    error::IntoPython,
    options::{bytes_of, reader_options, seconds},
    process::{Owned, patiently},
    tensor::Tensor,
    view::{KeptTensor, Place},
};
use hoistway::{
    DeviceId,
    read::{Reader, ReaderOptions},
};
use hoistway_experts::layers::{self, Layer, LayerOptions, LayerSpec, LayerTensor, LayerWatch};
use pyo3::{prelude::*, types::PyDict};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Layers of a checkpoint, again and again. `hoistway.LayerStream` shows it.
#[pyclass(frozen, module = "hoistway._native")]
pub(crate) struct LayerStream {
    stream: Owned<Arc<Shared>>,
}

impl Drop for LayerStream {
    fn drop(&mut self) {
        // A thread that waits, as after an interrupt, would keep the memory.
        self.stop();
    }
}

/// The state that a stream and the threads that wait for its layers share.
struct Shared {
    stream: Mutex<layers::LayerStream>,
    /// For who must not wait for the stream.
    watch: LayerWatch,
    /// A layer whose wait was interrupted: it is the next one.
    waited_for: Mutex<Option<Layer>>,
    /// The layer that was handed out last, which its tensors hold too.
    handed_out: Mutex<Option<Arc<Owned<Layer>>>>,
}

#[pymethods]
impl LayerStream {
    #[new]
    #[pyo3(signature = (checkpoint, layers, budget, ahead, timeout, device, **options))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn new(
        py: Python<'_>,
        checkpoint: &Checkpoint,
        layers: Vec<(String, Vec<String>)>,
        budget: &Bound<'_, PyAny>,
        ahead: usize,
        timeout: f64,
        device: &str,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let reader = reader_options(ReaderOptions::default(), options, py)?;
        let options = LayerOptions::default()
            .budget_bytes(bytes_of("budget", budget).into_python(py)?)
            .ahead(ahead)
            .device(device.parse::<DeviceId>().into_python(py)?)
            .timeout(seconds("timeout", timeout).into_python(py)?);
        let specs: Vec<LayerSpec> =
            layers.into_iter().map(|(name, tensors)| LayerSpec { name, tensors }).collect();
        let checkpoint = checkpoint.shared();
        let open = || {
            let reader = Arc::new(Reader::new(&reader)?);
            layers::LayerStream::new(&checkpoint, &reader, &specs, &options)
        };
        let stream = py.detach(open).into_python(py)?;
        Ok(Self {
            stream: Owned::new(Arc::new(Shared {
                watch: stream.watch(),
                stream: Mutex::new(stream),
                waited_for: Mutex::default(),
                handed_out: Mutex::default(),
            })),
        })
    }

    /// The name and the tensors of the next layer, behind the last of which the first comes again.
    fn next(&self, py: Python<'_>) -> PyResult<(String, Vec<Tensor>)> {
        let shared = self.stream.get(py)?;
        loop {
            let waiting = shared.clone();
            // Other threads may take what this one has waited for.
            let waited = patiently(py, move || {
                let mut stream = lock(&waiting.stream);
                // The layer has a lock of its own, which the interpreter's threads never wait for long.
                let is_there = lock(&waiting.waited_for).is_some();
                if !is_there {
                    let layer = stream.next_layer()?;
                    *lock(&waiting.waited_for) = Some(layer);
                }
                Ok::<_, hoistway_experts::Error>(())
            })?;
            // An error goes to the caller whose wait it ended. After an interrupt it goes to none, and the layer is read again.
            waited.into_python(py)?;
            let layer = lock(&shared.waited_for).take();
            if let Some(layer) = layer {
                // Not a clone: each says for itself what has used the layer.
                let owned = Arc::new(Owned::new(layer));
                let layer = owned.get(py)?;
                let tensors = layer.tensors().map(|tensor| kept(tensor, &owned));
                let found = (layer.name().to_owned(), tensors.collect());
                // What is not released otherwise was used by any work of the device.
                let earlier = lock(&shared.handed_out).replace(owned);
                py.detach(|| drop(earlier));
                return Ok(found);
            }
        }
    }

    /// Gives the layer back that was handed out last. Work on `stream` alone has used it, if that is given and no tensor of it is held.
    #[pyo3(signature = (stream=None))]
    fn give_back(&self, py: Python<'_>, stream: Option<usize>) -> PyResult<()> {
        let shared = self.stream.get(py)?;
        let Some(owned) = lock(&shared.handed_out).take() else { return Ok(()) };
        let is_alone = Arc::strong_count(&owned) == 1;
        let told = match stream.filter(|_| is_alone) {
            None => Ok(()),
            Some(stream) => {
                let layer = owned.get(py)?;
                // SAFETY: the caller says that the stream lives, and that all work on the layer is queued on it. No tensor of the
                // layer is left that later work could use.
                py.detach(|| unsafe { layer.used_behind(stream) })
            }
        };
        py.detach(|| drop(owned));
        told.into_python(py)
    }

    /// Ends a wait for room, whichever thread waits. A child of `fork` has none to end.
    fn stop(&self) {
        if let Some(shared) = self.stream.here() {
            shared.watch.stop();
        }
    }

    /// What it has done, as JSON.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        let shared = self.stream.get(py)?;
        let stats = shared.watch.stats();
        let mut values = serde_json::to_value(&stats).into_python(py)?;
        if let Some(values) = values.as_object_mut() {
            values.insert("stall_seconds".into(), stats.stall.as_secs_f64().into());
            values.remove("stall");
        }
        serde_json::to_string(&values).into_python(py)
    }
}

/// The layers that the names of tensors count, and the names of their tensors.
#[pyfunction]
pub(crate) fn numbered_layers(checkpoint: &Checkpoint) -> Vec<(String, Vec<String>)> {
    let layers = layers::numbered_layers(checkpoint.shared().catalog());
    layers.into_iter().map(|layer| (layer.name, layer.tensors)).collect()
}

/// A tensor that holds its layer.
fn kept(tensor: LayerTensor<'_>, layer: &Arc<Owned<Layer>>) -> Tensor {
    let place = Place { device: tensor.device(), address: tensor.address(), len_bytes: tensor.len() };
    let (name, shape) = (tensor.name().into(), tensor.shape().into());
    // SAFETY: the layer holds its bytes, which were read before it was handed out. Later passes see the same ones.
    unsafe { KeptTensor::new(name, tensor.dtype(), shape, place, true, layer.clone()) }.into()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
