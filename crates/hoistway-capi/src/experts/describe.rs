//! What a store streams: the model, its layers, and the parts of its experts.
#![allow(unsafe_code)]

use super::hoistway_experts;
use crate::{
    handle::{check_place, held},
    read::target_of,
    status::{Failure, call, hoistway_status},
    text,
    versioned::{self, Versioned},
};
use ::hoistway_experts::{
    ExpertId,
    catalog::{ExpertCatalog, Part, Unit},
    store::LeasedPart,
};
use std::{
    collections::HashMap,
    ffi::{CString, c_char, c_void},
    ptr,
};

/// The model of a store of experts.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_experts_model {
    /// Set by the caller to `sizeof(hoistway_experts_model)`. The call sets it to the bytes that it filled in.
    pub size: u64,
    /// Number of layers that have experts.
    pub layers: u64,
    /// Number of experts in all layers.
    pub experts: u64,
    /// Bytes of all experts.
    pub expert_bytes: u64,
    /// Number of tensors that hold no expert.
    pub dense_tensors: u64,
    /// Bytes of all dense tensors.
    pub dense_bytes: u64,
    /// Bytes of the experts that one token uses in all layers; 0 if `experts_per_token` is 0. With a smaller budget, a
    /// policy that evicts the least recently used expert never finds one resident.
    pub token_cycle_bytes: u64,
    /// Number of experts that a token uses in each layer; 0 if unknown.
    pub experts_per_token: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: numbers, of which the first is the size.
unsafe impl Versioned for hoistway_experts_model {
    const NAME: &str = "hoistway_experts_model";
    const FIRST_SIZE: usize = 64;
}

/// A layer that has experts.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_experts_layer_info {
    /// Set by the caller to `sizeof(hoistway_experts_layer_info)`. The call sets it to the bytes that it filled in.
    pub size: u64,
    /// Number of the layer in the checkpoint, counted from 0.
    pub layer: u32,
    /// Number of experts in the layer.
    pub experts: u32,
    /// Bytes of the largest expert of the layer.
    pub expert_bytes: u64,
    /// Bytes of the experts that one token uses in the layer; 0 if their number is unknown.
    pub demand_bytes: u64,
}

// SAFETY: numbers, of which the first is the size.
unsafe impl Versioned for hoistway_experts_layer_info {
    const NAME: &str = "hoistway_experts_layer_info";
    const FIRST_SIZE: usize = 32;
}

/// A part of an expert, or a dense tensor. Its pointers are valid as long as the store and its leases; `address` is
/// valid as long as the lease.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_part {
    /// Set by the caller to `sizeof(hoistway_part)`. The call sets it to the bytes that it filled in.
    pub size: u64,
    /// Name of the tensor that holds the part.
    pub tensor: *const c_char,
    /// "gate", "up", "gate_up", "down", or "dense".
    pub role: *const c_char,
    /// Which component of the role it is: "weight", "blocks", "scales", or another ending of the tensor's name.
    pub component: *const c_char,
    /// Element type, such as "BF16" or "Q4_K".
    pub dtype: *const c_char,
    /// Elements along each dimension, slowest first, without the dimension that counts the experts.
    pub shape: *const u64,
    /// Length of `shape`.
    pub dimensions: u32,
    /// Number of the element type in ggml; -1 if ggml has none.
    pub ggml_type: i32,
    /// Number of the file in the catalog.
    pub file: u64,
    /// Where the part begins in the file, in bytes.
    pub offset: u64,
    /// Length of the part in bytes.
    pub bytes: u64,
    /// Where the part is in memory, if it is leased; else NULL.
    pub address: *mut c_void,
    /// Kind of that memory, one of `HOISTWAY_TARGET_…`.
    pub target: i32,
    /// Number of the device, for device memory.
    pub device: i32,
    /// Number of the slot that holds the expert, if it is leased and the backing has slots; else -1.
    pub slot: i64,
}

// SAFETY: numbers and pointers, of which the first is the size.
unsafe impl Versioned for hoistway_part {
    const NAME: &str = "hoistway_part";
    const FIRST_SIZE: usize = 104;
}

/// Describes the model of a store.
///
/// # Safety
/// `store` must be live, `model` writable for its `size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_describe(
    store: *const hoistway_experts,
    model: *mut hoistway_experts_model,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let catalog = unsafe { held(store, "store of experts")? }.store.catalog();
        check_place(model, "model")?;
        let described = hoistway_experts_model {
            size: 0,
            layers: catalog.layers().len() as u64,
            experts: catalog.experts().len() as u64,
            expert_bytes: catalog.total_expert_bytes(),
            dense_tensors: catalog.dense().len() as u64,
            dense_bytes: catalog.total_dense_bytes(),
            token_cycle_bytes: catalog.token_cycle_bytes().unwrap_or_default(),
            experts_per_token: catalog.top_k().unwrap_or_default(),
            reserved: 0,
        };
        // SAFETY: writable, as the caller says.
        unsafe { versioned::write(model, described, |model, size| model.size = size) }
    })
}

/// Describes the layer at position `index` among the layers that have experts, counted from 0. `HOISTWAY_NOT_FOUND` if
/// `index` is past the last.
///
/// # Safety
/// `store` must be live, `layer` writable for its `size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_layer(
    store: *const hoistway_experts,
    index: u64,
    layer: *mut hoistway_experts_layer_info,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let catalog = unsafe { held(store, "store of experts")? }.store.catalog();
        check_place(layer, "layer")?;
        let number = usize::try_from(index).ok().and_then(|index| catalog.layers().nth(index));
        let number = number.ok_or_else(|| {
            let count = catalog.layers().len();
            Failure::not_found(format!("there is no layer at position {index}: {count} layers have experts"))
        })?;
        let described = hoistway_experts_layer_info {
            size: 0,
            layer: number,
            experts: catalog.expert_count(number),
            expert_bytes: catalog.expert_bytes(number),
            demand_bytes: catalog.layer_demand_bytes(number).unwrap_or_default(),
        };
        // SAFETY: writable, as the caller says.
        unsafe { versioned::write(layer, described, |layer, size| layer.size = size) }
    })
}

/// Describes the part at position `index` of an expert, counted from 0. `HOISTWAY_NOT_FOUND` if `index` is past the
/// last, or if there is no such expert.
///
/// # Safety
/// `store` must be live, `part` writable for its `size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_part(
    store: *const hoistway_experts,
    layer: u32,
    expert: u32,
    index: u64,
    part: *mut hoistway_part,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let store = unsafe { held(store, "store of experts")? };
        let unit = store.store.catalog().expert(ExpertId { layer, expert })?;
        let place = usize::try_from(index).ok().and_then(|index| unit.parts().get(index));
        let found = place.ok_or_else(|| no_such_part(unit, index))?;
        // SAFETY: writable, as the caller says.
        unsafe { tell(part, store.strings.describe(found)) }
    })
}

pub(super) fn no_such_part(unit: &Unit, index: u64) -> Failure {
    Failure::not_found(format!("there is no part {index}: {} has {}", unit.label(), unit.parts().len()))
}

/// # Safety
/// `place` must be NULL, or writable as far as its `size` says.
pub(super) unsafe fn tell(place: *mut hoistway_part, part: hoistway_part) -> Result<(), Failure> {
    check_place(place, "part")?;
    // SAFETY: writable, as the caller says.
    unsafe { versioned::write(place, part, |part, size| part.size = size) }
}

/// Strings of a catalog, as C has them. What was described to C points to these.
#[derive(Debug)]
pub(super) struct Strings {
    by_text: HashMap<String, CString>,
}

impl Strings {
    pub(super) fn of(catalog: &ExpertCatalog) -> Self {
        let mut by_text = HashMap::new();
        let mut add = |text: &str| {
            if !by_text.contains_key(text) {
                by_text.insert(text.to_owned(), text::without_nul(text));
            }
        };
        for part in catalog.experts().iter().chain(catalog.dense()).flat_map(Unit::parts) {
            add(&part.tensor);
            add(part.role.name());
            add(&part.component);
            add(&part.dtype.to_string());
        }
        Self { by_text }
    }

    fn text(&self, text: &str) -> *const c_char {
        self.by_text.get(text).map_or(ptr::null(), |string| string.as_ptr())
    }

    /// Describes a part that is not leased.
    pub(super) fn describe(&self, part: &Part) -> hoistway_part {
        hoistway_part {
            size: 0,
            tensor: self.text(&part.tensor),
            role: self.text(part.role.name()),
            component: self.text(&part.component),
            dtype: self.text(&part.dtype.to_string()),
            shape: part.shape.as_ptr(),
            dimensions: u32::try_from(part.shape.len()).unwrap_or(u32::MAX),
            ggml_type: part.dtype.ggml_id().and_then(|id| i32::try_from(id).ok()).unwrap_or(-1),
            file: part.file as u64,
            offset: part.bytes.start(),
            bytes: part.bytes.len(),
            address: ptr::null_mut(),
            target: crate::HOISTWAY_TARGET_HOST,
            device: 0,
            slot: -1,
        }
    }

    /// Describes a part that is leased.
    pub(super) fn describe_leased(&self, leased: LeasedPart<'_>, slot: Option<u32>) -> hoistway_part {
        let (target, device) = target_of(leased.memory());
        hoistway_part {
            address: ptr::with_exposed_provenance_mut(leased.address() as usize),
            target,
            device,
            slot: slot.map_or(-1, i64::from),
            ..self.describe(leased.part())
        }
    }
}
