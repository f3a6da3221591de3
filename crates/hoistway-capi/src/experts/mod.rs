//! Models larger than memory: stores of experts, rows of tables, layers that stream.
#![allow(unsafe_code)]

mod control;
mod describe;
mod layers;
mod lease;
mod rows;

pub use control::*;
pub use describe::*;
pub use layers::*;
pub use lease::*;
pub use rows::*;

use crate::{
    handle::{self, held},
    hoistway_catalog,
    read::{device_of, timeout},
    status::{Failure, hoistway_status, status_of},
    text,
    versioned::{self, Versioned},
};
use ::hoistway_experts::{
    Error,
    backing::Backing,
    catalog::ExpertCatalog,
    pack::PackChoice,
    policy::{self, CatalogShape, LayerShape},
    store::{Store, StoreOptions},
};
use describe::Strings;
use std::{ffi::c_char, sync::Arc, time::Duration};

/// A store of the experts and dense tensors of a model. It reads them when they are requested, and evicts them to keep
/// a budget.
pub struct hoistway_experts {
    store: Store,
    strings: Arc<Strings>,
}

/// How to open a store of experts. A string that is NULL, or a number that is 0, stands for the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_experts_options {
    /// `sizeof(hoistway_experts_options)`.
    pub size: u64,
    /// "host_slots", "host_sparse", "device_slots" or "device_sparse"; NULL for "host_slots". With "device_sparse", slices of
    /// experts must be whole granules of the CUDA device, of 2 MiB today.
    pub backing: *const c_char,
    /// "ewma2", "lru", "slru", "lfu" or "arc"; NULL for "ewma2".
    pub policy: *const c_char,
    /// "auto", "io_uring", "overlapped", "threads", "cached", "usrbio" or "directstorage"; NULL for "auto".
    pub route: *const c_char,
    /// Limit in bytes of the experts and tensors that are resident or being read; 0 for 4 GiB. One request may exceed
    /// it by its own demand.
    pub budget_bytes: u64,
    /// With "device_slots": bytes beside the budget for the demand of one request; 0 for the demand of one token in
    /// one layer.
    pub batch_bytes: u64,
    /// With "device_slots": bytes of the budget for dense tensors; 0 for the size of all, but at most an eighth of the
    /// budget.
    pub dense_bytes: u64,
    /// Milliseconds that a request waits for room and for reads; 0 for 60,000. `UINT64_MAX` waits without limit.
    pub timeout_ms: u64,
    /// Number of residency changes that are kept for `hoistway_experts_events`; 0 keeps none.
    pub events: u64,
    /// Limit of staging memory in bytes; 0 for 128 MiB.
    pub memory_budget_bytes: u64,
    /// Number of reads in flight; 0 for 16.
    pub in_flight: u64,
    /// Experts that a token uses in each layer; 0 for the number in the headers or in `config.json`.
    pub experts_per_token: u32,
    /// With "device_slots": `HOISTWAY_TARGET_CUDA` or `HOISTWAY_TARGET_ROCM`; with "device_sparse" the first; else 0.
    pub target: i32,
    /// With "device_slots" and "device_sparse": number of the device.
    pub device: i32,
    /// Must be 0.
    pub reserved: u32,
    /// With "device_slots": bytes of pinned host memory beside the budget, which evicted experts stay in, and are copied from rather
    /// than read; 0 for none.
    pub host_level_bytes: u64,
}

// SAFETY: numbers and pointers, of which the first is the size.
unsafe impl Versioned for hoistway_experts_options {
    const NAME: &str = "hoistway_experts_options";
    const FIRST_SIZE: usize = 104;
}

/// Opens a store of the model that a catalog describes. It reads no tensor yet, but three experts if there are packed
/// ones. A model without experts has only dense tensors. The catalog may be freed afterwards. `options` may be NULL. Free
/// `store` with `hoistway_experts_free`.
///
/// `HOISTWAY_MEMORY` if the budget does not hold the largest expert; `HOISTWAY_INVALID_FILE` if a tensor has the name
/// of an expert but not its form, or if an expert lacks a tensor. In a child of `fork`, requests fail: open a store
/// there.
///
/// # Safety
/// `catalog` must be live, `options` NULL or readable for its size, `store` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_open(
    catalog: *const hoistway_catalog,
    options: *const hoistway_experts_options,
    store: *mut *mut hoistway_experts,
) -> hoistway_status {
    let open = || {
        // SAFETY: live, as the caller says.
        let checkpoint = unsafe { held(catalog, "catalog")? }.checkpoint();
        // SAFETY: as the caller says.
        let Chosen { policy, experts_per_token, options } = unsafe { chosen(options)? };
        let catalog = ExpertCatalog::of_checkpoint(checkpoint, experts_per_token)?;
        let catalog = Arc::new(catalog.with_pack(&PackChoice::Auto)?);
        let shape = if catalog.experts().is_empty() {
            // A policy is asked of experts alone, so that of any other model does.
            CatalogShape::new(1, vec![LayerShape { experts: 1, expert_bytes: 0 }])
        } else {
            CatalogShape::try_from(&*catalog)
        };
        let shape = shape.map_err(|error| Failure::argument(error.to_string()))?;
        let policy = policy::by_name(policy.unwrap_or(policy::DEFAULT), &shape)
            .map_err(|error| Failure::argument(error.to_string()))?;
        let strings = Arc::new(Strings::of(&catalog));
        let files = ExpertCatalog::open_files(checkpoint);
        Ok(hoistway_experts { store: Store::open(catalog, files, policy, &options)?, strings })
    };
    // SAFETY: writable, as the caller says.
    unsafe { handle::make(store, open) }
}

/// Frees a store, and the memory that no lease holds. Leases stay valid; each frees its memory when it is freed. NULL
/// is allowed.
///
/// # Safety
/// `store` must be NULL or come from [`hoistway_experts_open`], and neither be in use nor have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_free(store: *mut hoistway_experts) {
    // SAFETY: as the caller says.
    unsafe { handle::free(store) }
}

/// What options say.
struct Chosen<'a> {
    policy: Option<&'a str>,
    experts_per_token: Option<u32>,
    options: StoreOptions,
}

/// # Safety
/// `options` must be NULL or as its size says, and its strings outlive the result.
unsafe fn chosen<'a>(options: *const hoistway_experts_options) -> Result<Chosen<'a>, Failure> {
    let mut chosen = StoreOptions::default();
    if options.is_null() {
        return Ok(Chosen { policy: None, experts_per_token: None, options: chosen });
    }
    // SAFETY: readable, as the caller says.
    let options = unsafe { versioned::read(options)? };
    if options.reserved != 0 {
        return Err(Failure::argument("hoistway_experts_options.reserved is not 0"));
    }
    // SAFETY: strings, as the caller says.
    let (backing, policy, route) = unsafe {
        (
            text::borrow(options.backing, "the backing")?,
            text::borrow(options.policy, "the policy")?,
            text::borrow(options.route, "the route")?,
        )
    };
    chosen.backing = match backing.unwrap_or("host_slots") {
        "host_slots" => Backing::HostSlots,
        "host_sparse" => Backing::HostSparse,
        name @ ("device_slots" | "device_sparse") => {
            let device = device_of(options.target, options.device).ok_or_else(|| {
                let kinds = if name == "device_slots" { "CUDA or ROCm device" } else { "CUDA device" };
                Failure::argument(format!(
                    "the backing {name} needs a {kinds}: there is no device {} of target {}",
                    options.device, options.target
                ))
            })?;
            if name == "device_slots" { Backing::DeviceSlots(device) } else { Backing::DeviceSparse(device) }
        }
        other => {
            let reason = format!(
                "there is no backing '{other}': it must be one of host_slots, host_sparse, device_slots and device_sparse"
            );
            return Err(Failure::argument(reason));
        }
    };
    let reader = &mut chosen.reader;
    if let Some(route) = route {
        reader.route = route.parse()?;
    }
    if options.memory_budget_bytes > 0 {
        reader.memory_budget_bytes = options.memory_budget_bytes;
    }
    if options.in_flight > 0 {
        reader.in_flight = usize::try_from(options.in_flight).unwrap_or(usize::MAX);
    }
    if options.budget_bytes > 0 {
        chosen.budget_bytes = options.budget_bytes;
    }
    if options.timeout_ms > 0 {
        chosen.timeout = timeout(options.timeout_ms);
    }
    chosen.batch_bytes = some(options.batch_bytes);
    chosen.dense_bytes = some(options.dense_bytes);
    chosen.host_level_bytes = some(options.host_level_bytes);
    chosen.events = usize::try_from(options.events).unwrap_or(usize::MAX);
    let experts_per_token = (options.experts_per_token > 0).then_some(options.experts_per_token);
    Ok(Chosen { policy, experts_per_token, options: chosen })
}

/// A number that was set.
fn some(value: u64) -> Option<u64> {
    (value > 0).then_some(value)
}

/// A duration that was set.
fn some_timeout(milliseconds: u64) -> Option<Duration> {
    some(milliseconds).map(timeout)
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(status_of_experts(&error), error.to_string())
    }
}

fn status_of_experts(error: &Error) -> hoistway_status {
    use hoistway_status::*;
    match error {
        Error::Engine(error) => status_of(error),
        Error::Read { source, .. } => status_of(source.error()),
        Error::NoMemory { source, .. } => status_of_experts(source),
        Error::InvalidExperts { .. } | Error::InvalidConfig { .. } | Error::InvalidPack { .. } => {
            HOISTWAY_INVALID_FILE
        }
        Error::InvalidExpert { .. } | Error::InvalidOption { .. } => HOISTWAY_INVALID_ARGUMENT,
        Error::NoSuchLayer { .. }
        | Error::NoSuchExpert { .. }
        | Error::NoSuchTensor { .. }
        | Error::NoSuchRow { .. } => HOISTWAY_NOT_FOUND,
        Error::BudgetTooSmall { .. } | Error::BatchTooLarge { .. } => HOISTWAY_MEMORY,
        Error::NoRoom { .. } => HOISTWAY_REFUSED,
        Error::TimedOut { .. } => HOISTWAY_TIMED_OUT,
        Error::Closed { .. } => HOISTWAY_CLOSED,
        _ => HOISTWAY_INTERNAL,
    }
}
