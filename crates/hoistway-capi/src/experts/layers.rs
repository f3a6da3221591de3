//! Layers of dense models that stream in, in the order of use.
#![allow(unsafe_code)]

use super::{some, some_timeout};
use crate::{
    handle::{self, held},
    hoistway_catalog,
    read::{HOISTWAY_TARGET_HOST, device_of, hoistway_reader, target_of},
    status::{Failure, call, hoistway_status},
    text,
    versioned::{self, Versioned},
};
use ::hoistway_experts::layers::{Layer, LayerOptions, LayerSpec, LayerStream, LayerWatch, numbered_layers};
use std::{
    ffi::{CString, c_char, c_void},
    ptr,
    sync::{Mutex, PoisonError},
};

/// A stream of the layers of a model, which begins again after the last layer.
pub struct hoistway_layers {
    stream: Mutex<LayerStream>,
    /// For who must not wait for the stream.
    watch: LayerWatch,
}

/// A layer in memory, until it is freed.
pub struct hoistway_layer {
    layer: Layer,
    name: CString,
    /// Names and types of its tensors.
    tensors: Vec<[CString; 2]>,
}

/// A layer, as the caller defines it. This structure never grows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_layer_spec {
    /// Name of the layer in reports and messages.
    pub name: *const c_char,
    /// Names of the tensors of the layer.
    pub tensors: *const *const c_char,
    /// Number of these names.
    pub tensor_count: u64,
}

/// How to stream layers. A number that is 0 stands for the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_layers_options {
    /// `sizeof(hoistway_layers_options)`.
    pub size: u64,
    /// Limit in bytes of all layers in memory: kept between passes, held by the caller, or being read; 0 for 4 GiB.
    pub budget_bytes: u64,
    /// Number of layers to read ahead of the current one; 0 for 1. Fewer if the budget does not hold as many.
    pub ahead: u64,
    /// Milliseconds that `hoistway_layers_next` waits for layers that the caller has to free; 0 for 60,000.
    /// `UINT64_MAX` waits without limit.
    pub timeout_ms: u64,
    /// The layers in the order of use, or NULL for the layers that tensor names number (`blk.N.`, `layers.N.`, `h.N.`,
    /// `blocks.N.`).
    pub layers: *const hoistway_layer_spec,
    /// Number of entries in `layers`.
    pub layer_count: u64,
    /// Where layers go: `HOISTWAY_TARGET_HOST`, `HOISTWAY_TARGET_CUDA` or `HOISTWAY_TARGET_ROCM`. The budget then bounds memory of
    /// the device, and each tensor begins at a multiple of 256 bytes.
    pub target: i32,
    /// Number of the device, for device memory; 0 for host memory.
    pub device: i32,
}

// SAFETY: numbers and pointers, of which the first is the size.
unsafe impl Versioned for hoistway_layers_options {
    const NAME: &str = "hoistway_layers_options";
    const FIRST_SIZE: usize = 48;
}

/// A tensor of a layer. Its pointers are valid as long as the layer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_layer_part {
    /// Set by the caller to `sizeof(hoistway_layer_part)`. The call sets it to the bytes that it filled in.
    pub size: u64,
    /// Name of the tensor in the checkpoint.
    pub name: *const c_char,
    /// Element type, such as "BF16" or "Q4_K".
    pub dtype: *const c_char,
    /// Elements along each dimension, slowest first.
    pub shape: *const u64,
    /// Length of `shape`.
    pub dimensions: u32,
    /// Number of the element type in ggml; -1 if ggml has none.
    pub ggml_type: i32,
    /// Where the tensor is: host memory, or a device pointer.
    pub address: *const c_void,
    /// Length of the tensor in bytes.
    pub bytes: u64,
    /// Which memory that is: `HOISTWAY_TARGET_HOST`, `HOISTWAY_TARGET_CUDA` or `HOISTWAY_TARGET_ROCM`.
    pub target: i32,
    /// Number of the device, for device memory.
    pub device: i32,
}

// SAFETY: numbers and pointers, of which the first is the size.
unsafe impl Versioned for hoistway_layer_part {
    const NAME: &str = "hoistway_layer_part";
    const FIRST_SIZE: usize = 56;
}

/// Opens a stream of the layers of a checkpoint. It reads no layer yet. As many layers as the budget holds stay in
/// memory, spread evenly over the model. The catalog may be freed afterwards. The reader may be freed too: it ends
/// once its streams are freed. `options` may be NULL. Free `layers` with `hoistway_layers_free`.
///
/// `HOISTWAY_MEMORY` if the budget does not hold the largest layer; `HOISTWAY_INVALID_ARGUMENT` if there is no layer, if `target`
/// is none of those above, or if `device` is set for host memory; `HOISTWAY_DEVICE` if the device cannot be opened.
///
/// # Safety
/// `reader` and `catalog` must be live, `options` NULL or readable for its size, `layers` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_layers_open(
    reader: *const hoistway_reader,
    catalog: *const hoistway_catalog,
    options: *const hoistway_layers_options,
    layers: *mut *mut hoistway_layers,
) -> hoistway_status {
    let open = || {
        // SAFETY: live, as the caller says.
        let (reader, catalog) = unsafe { (held(reader, "reader")?, held(catalog, "catalog")?) };
        // SAFETY: as the caller says.
        let (specs, options) = unsafe { chosen(options)? };
        let checkpoint = catalog.checkpoint();
        let specs = specs.unwrap_or_else(|| numbered_layers(checkpoint.catalog()));
        let stream = LayerStream::new(checkpoint, reader.shared(), &specs, &options)?;
        Ok(hoistway_layers { watch: stream.watch(), stream: Mutex::new(stream) })
    };
    // SAFETY: writable, as the caller says.
    unsafe { handle::make(layers, open) }
}

/// Frees a stream of layers. Layers that the caller holds stay valid. NULL is allowed.
///
/// # Safety
/// `layers` must be NULL or come from [`hoistway_layers_open`], and neither be in use nor have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_layers_free(layers: *mut hoistway_layers) {
    // SAFETY: as the caller says.
    unsafe { handle::free(layers) }
}

/// Waits for the next layer, and starts to read the layers after it. After the last layer comes the first. Free
/// `layer` with `hoistway_layer_free`, before its room is needed for others. `HOISTWAY_REFUSED` if layers that the
/// caller holds left no room within `timeout_ms`; `HOISTWAY_MEMORY` if memory cannot be allocated; `HOISTWAY_DEVICE` if the device
/// fails. After a failure, the next call tries the same layer.
///
/// # Safety
/// `layers` must be live, `layer` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_layers_next(
    layers: *const hoistway_layers,
    layer: *mut *mut hoistway_layer,
) -> hoistway_status {
    let next = || {
        // SAFETY: live, as the caller says.
        let layers = unsafe { held(layers, "stream of layers")? };
        let layer = layers.stream.lock().unwrap_or_else(PoisonError::into_inner).next_layer()?;
        let name = text::without_nul(layer.name());
        let strings = layer
            .tensors()
            .map(|tensor| [text::without_nul(tensor.name()), text::without_nul(&tensor.dtype().to_string())]);
        let tensors = strings.collect();
        Ok(hoistway_layer { layer, name, tensors })
    };
    // SAFETY: writable, as the caller says.
    unsafe { handle::make(layer, next) }
}

/// Ends waits for room: `hoistway_layers_next` fails with `HOISTWAY_CANCELLED` where it would wait for layers that the caller has to
/// free, also where another thread waits already. A wait for a read goes on. Free the stream once no thread uses it.
///
/// # Safety
/// `layers` must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_layers_stop(layers: *const hoistway_layers) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        unsafe { held(layers, "stream of layers")? }.watch.stop();
        Ok(())
    })
}

/// Sets `json` to statistics of a stream of layers. Free it with `hoistway_string_free`. Does not wait for a call of
/// `hoistway_layers_next` under way.
///
/// # Safety
/// `layers` must be live, `json` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_layers_stats(
    layers: *const hoistway_layers,
    json: *mut *mut c_char,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let layers = unsafe { held(layers, "stream of layers")? };
        let stats = layers.watch.stats();
        let mut told = serde_json::to_value(&stats)?;
        told["stall"] = stats.stall.as_secs_f64().into();
        // SAFETY: writable, as the caller says.
        unsafe { text::give(&told.to_string(), json) }
    })
}

/// Returns the name of a layer; an empty string if `layer` is NULL. The string is valid as long as the layer.
///
/// # Safety
/// `layer` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_layer_name(layer: *const hoistway_layer) -> *const c_char {
    // SAFETY: live, as the caller says.
    unsafe { layer.as_ref() }.map_or(c"", |layer| layer.name.as_c_str()).as_ptr()
}

/// Returns the number of tensors of a layer; 0 if `layer` is NULL.
///
/// # Safety
/// `layer` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_layer_tensor_count(layer: *const hoistway_layer) -> u64 {
    // SAFETY: live, as the caller says.
    unsafe { layer.as_ref() }.map_or(0, |layer| layer.tensors.len() as u64)
}

/// Describes the tensor at position `index` of a layer, counted from 0. `HOISTWAY_NOT_FOUND` if `index` is past the
/// last; `HOISTWAY_INVALID_ARGUMENT` if the layer is in device memory and the structure is that of an older header, which has no
/// member that says so.
///
/// # Safety
/// `layer` must be live, `tensor` writable for its `size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_layer_tensor(
    layer: *const hoistway_layer,
    index: u64,
    tensor: *mut hoistway_layer_part,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let layer = unsafe { held(layer, "layer")? };
        handle::check_place(tensor, "tensor")?;
        let position = usize::try_from(index).unwrap_or(usize::MAX);
        let found = layer.tensors.get(position).zip(layer.layer.tensors().nth(position));
        let ([name, dtype], found) = found.ok_or_else(|| {
            let (name, count) = (layer.layer.name(), layer.tensors.len());
            Failure::not_found(format!("there is no tensor {index}: layer '{name}' has {count}"))
        })?;
        let (target, device) = target_of(found.device());
        // SAFETY: readable, as the caller says.
        let size = unsafe { versioned::size_of_instance(tensor)? };
        if target != HOISTWAY_TARGET_HOST && size < size_of::<hoistway_layer_part>() {
            let name = layer.layer.name();
            let reason = format!(
                "layer '{name}' is in device memory, which this version of hoistway_layer_part cannot say"
            );
            return Err(Failure::argument(reason));
        }
        let described = hoistway_layer_part {
            size: 0,
            name: name.as_ptr(),
            dtype: dtype.as_ptr(),
            shape: found.shape().as_ptr(),
            dimensions: u32::try_from(found.shape().len()).unwrap_or(u32::MAX),
            ggml_type: found.dtype().ggml_id().and_then(|id| i32::try_from(id).ok()).unwrap_or(-1),
            address: ptr::with_exposed_provenance(found.address() as usize),
            bytes: found.len(),
            target,
            device,
        };
        // SAFETY: writable, as the caller says.
        unsafe { versioned::write(tensor, described, |tensor, size| tensor.size = size) }
    })
}

/// Says that work on `stream` uses a layer in device memory: a stream of the device, such as a `CUstream` or `hipStream_t`, or
/// NULL for its legacy default stream. Call it once all that work is queued, before `hoistway_layer_free`; where several streams use
/// the layer, once for each. Later layers are then read to the memory after that work. Without it, they are read there after all work
/// of the device, so the reads cannot run beside work that is queued already.
///
/// `HOISTWAY_INVALID_ARGUMENT` if the layer is in host memory: all work on it must end before it is freed. `HOISTWAY_DEVICE` if the
/// stream cannot be used, as while it is captured: reads then wait for all work of the device, whatever was said before.
///
/// # Safety
/// `layer` must be live, `stream` NULL or a live stream of its device. Nothing else uses the bytes of the layer, now or later, but work
/// on streams that are named too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_layer_used_behind(
    layer: *const hoistway_layer,
    stream: *mut c_void,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let layer = unsafe { held(layer, "layer")? };
        // SAFETY: as the caller says.
        unsafe { layer.layer.used_behind(stream.addr())? };
        Ok(())
    })
}

/// Frees a layer. Its memory is reused for other layers. NULL is allowed.
///
/// # Safety
/// `layer` must be NULL or come from [`hoistway_layers_next`], and neither be in use nor have been freed. None of its
/// bytes may be used afterwards. For a layer in device memory, but for no other, work of that device that is queued already may still use
/// them. Work that reads a layer in host memory, also work of a device that reads memory which the caller pinned or which it shares with
/// the host, must have ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_layer_free(layer: *mut hoistway_layer) {
    // SAFETY: as the caller says.
    unsafe { handle::free(layer) }
}

/// # Safety
/// `options` must be NULL or as its size says.
unsafe fn chosen(
    options: *const hoistway_layers_options,
) -> Result<(Option<Vec<LayerSpec>>, LayerOptions), Failure> {
    let mut chosen = LayerOptions::default();
    if options.is_null() {
        return Ok((None, chosen));
    }
    // SAFETY: readable, as the caller says.
    let options = unsafe { versioned::read(options)? };
    chosen.budget_bytes = some(options.budget_bytes).unwrap_or(chosen.budget_bytes);
    chosen.timeout = some_timeout(options.timeout_ms).unwrap_or(chosen.timeout);
    if let Some(ahead) = some(options.ahead) {
        chosen.ahead = usize::try_from(ahead).unwrap_or(usize::MAX);
    }
    if options.target == HOISTWAY_TARGET_HOST && options.device != 0 {
        let device = options.device;
        return Err(Failure::argument(format!(
            "device {device} is set for layers in host memory; set a target too"
        )));
    }
    if options.target != HOISTWAY_TARGET_HOST {
        let (target, device) = (options.target, options.device);
        chosen.device = device_of(target, device)
            .ok_or_else(|| Failure::argument(format!("there is no device {device} of target {target}")))?;
    }
    if options.layers.is_null() {
        return Ok((None, chosen));
    }
    // SAFETY: as many, as the caller says.
    let layers = unsafe { handle::list(options.layers, options.layer_count, "layers")? };
    let specs = layers.iter().map(|layer| {
        // SAFETY: strings, as the caller says.
        let (name, tensors) = unsafe {
            (
                text::required(layer.name, "name of a layer")?,
                text::borrow_all(layer.tensors, layer.tensor_count)?,
            )
        };
        let tensors = tensors.into_iter().map(str::to_owned).collect();
        Ok(LayerSpec { name: name.to_owned(), tensors })
    });
    Ok((Some(specs.collect::<Result<_, Failure>>()?), chosen))
}
