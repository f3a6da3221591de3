//! Layers of dense models that stream in, in the order of use.
#![allow(unsafe_code)]

use super::{some, some_timeout};
use crate::{
    handle::{self, held},
    hoistway_catalog,
    read::hoistway_reader,
    status::{Failure, call, hoistway_status},
    text,
    versioned::{self, Versioned},
};
use ::hoistway_experts::layers::{Layer, LayerOptions, LayerSpec, LayerStream, numbered_layers};
use std::{
    ffi::{CString, c_char, c_void},
    sync::{Mutex, PoisonError},
};

/// Layers of a model, one after the other, again and again.
pub struct hoistway_layers {
    stream: Mutex<LayerStream>,
}

/// A layer whose bytes are in memory until it is freed.
pub struct hoistway_layer {
    layer: Layer,
    name: CString,
    /// Names and types of its tensors.
    tensors: Vec<[CString; 2]>,
}

/// A layer, as the caller names it. This structure never grows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_layer_spec {
    /// What reports and messages call it.
    pub name: *const c_char,
    /// Names of its tensors.
    pub tensors: *const *const c_char,
    /// How many these are.
    pub tensor_count: u64,
}

/// How to stream layers. Numbers that are 0 are defaults.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_layers_options {
    /// `sizeof(hoistway_layers_options)`.
    pub size: u64,
    /// Most bytes of all layers in memory: those that stay, those that the caller holds, those that are read. 0 for 4 GiB.
    pub budget_bytes: u64,
    /// Layers that are read ahead of the one that computes; 0 for 1. Fewer if the budget does not hold as many.
    pub ahead: u64,
    /// Milliseconds that a layer waits for room that the caller holds; 0 for 60,000, `UINT64_MAX` for as long as it takes.
    pub timeout_ms: u64,
    /// The layers in the order of use. NULL for those that names of tensors count (`blk.N.`, `layers.N.`, `h.N.`,
    /// `blocks.N.`).
    pub layers: *const hoistway_layer_spec,
    /// How many these are.
    pub layer_count: u64,
}

// SAFETY: numbers and pointers, of which the first is the size.
unsafe impl Versioned for hoistway_layers_options {
    const NAME: &str = "hoistway_layers_options";
    const FIRST_SIZE: usize = 48;
}

/// A tensor of a layer. What it points to lives as long as the layer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_layer_part {
    /// `sizeof(hoistway_layer_part)`, set by the caller; then, as far as members were filled in.
    pub size: u64,
    /// Its name in the checkpoint.
    pub name: *const c_char,
    /// Type of its elements, such as "BF16" or "Q4_K".
    pub dtype: *const c_char,
    /// Elements along each dimension, slowest first.
    pub shape: *const u64,
    /// Length of `shape`.
    pub dimensions: u32,
    /// The type's number in ggml; -1 if ggml has none.
    pub ggml_type: i32,
    /// Its bytes.
    pub address: *const c_void,
    /// How many these are.
    pub bytes: u64,
}

// SAFETY: numbers and pointers, of which the first is the size.
unsafe impl Versioned for hoistway_layer_part {
    const NAME: &str = "hoistway_layer_part";
    const FIRST_SIZE: usize = 56;
}

/// Streams layers of a checkpoint, and reads nothing yet. As many as the budget holds stay in memory, spread over the pass. The
/// catalog may be freed; the reader ends once its streams are freed too. `options` may be NULL.
///
/// `HOISTWAY_MEMORY` if the budget does not hold the largest layer; `HOISTWAY_INVALID_ARGUMENT` if there is no layer.
///
/// # Safety
/// `reader` and `catalog` must be live, `options` NULL or as its size says, `layers` writable.
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
        Ok(hoistway_layers { stream: Mutex::new(stream) })
    };
    // SAFETY: writable, as the caller says.
    unsafe { handle::make(layers, open) }
}

/// Ends a stream of layers. Layers that the caller holds stay. NULL is fine.
///
/// # Safety
/// `layers` must come from [`hoistway_layers_open`], and not be in use nor have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_layers_free(layers: *mut hoistway_layers) {
    // SAFETY: as the caller says.
    unsafe { handle::free(layers) }
}

/// Waits for the next layer, behind the last of which the first comes again, and starts to read those after it. Free a layer
/// before its room is needed: `HOISTWAY_REFUSED` if the caller held it for as long as `timeout_ms` says. After a failure the
/// layer is next again.
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

/// Gives what a stream of layers has done, as JSON. Free it with `hoistway_string_free`.
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
        let stats = layers.stream.lock().unwrap_or_else(PoisonError::into_inner).stats();
        let mut told = serde_json::to_value(&stats)?;
        told["stall"] = stats.stall.as_secs_f64().into();
        // SAFETY: writable, as the caller says.
        unsafe { text::give(&told.to_string(), json) }
    })
}

/// Name of a layer; empty if `layer` is NULL. It lives as long as the layer.
///
/// # Safety
/// `layer` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_layer_name(layer: *const hoistway_layer) -> *const c_char {
    // SAFETY: live, as the caller says.
    unsafe { layer.as_ref() }.map_or(c"", |layer| layer.name.as_c_str()).as_ptr()
}

/// Number of a layer's tensors; 0 if `layer` is NULL.
///
/// # Safety
/// `layer` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_layer_tensor_count(layer: *const hoistway_layer) -> u64 {
    // SAFETY: live, as the caller says.
    unsafe { layer.as_ref() }.map_or(0, |layer| layer.tensors.len() as u64)
}

/// The tensor at a position of a layer. `HOISTWAY_NOT_FOUND` past the last.
///
/// # Safety
/// `layer` must be live, `tensor` writable as far as its `size` says.
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
        let described = hoistway_layer_part {
            size: 0,
            name: name.as_ptr(),
            dtype: dtype.as_ptr(),
            shape: found.shape().as_ptr(),
            dimensions: u32::try_from(found.shape().len()).unwrap_or(u32::MAX),
            ggml_type: found.dtype().ggml_id().and_then(|id| i32::try_from(id).ok()).unwrap_or(-1),
            address: found.bytes().as_ptr().cast(),
            bytes: found.bytes().len() as u64,
        };
        // SAFETY: writable, as the caller says.
        unsafe { versioned::write(tensor, described, |tensor, size| tensor.size = size) }
    })
}

/// Frees a layer: its memory may be used for others. NULL is fine.
///
/// # Safety
/// `layer` must come from [`hoistway_layers_next`], and not be in use nor have been freed. None of its bytes may be used
/// afterwards.
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
