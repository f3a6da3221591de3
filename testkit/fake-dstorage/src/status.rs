//! Arrays of results.
#![allow(unsafe_code)]

use crate::{
    control::state,
    object::{Kind, kind, unknown},
};
use hoistway_directstorage::abi::{E_PENDING, Guid, HResult, IID_STATUS_ARRAY, Object, StatusArrayTable};
use std::sync::{
    Arc,
    atomic::{AtomicI32, Ordering},
};

pub(crate) type Results = Arc<[AtomicI32]>;

pub(crate) struct Statuses(Results);

impl Kind for Statuses {
    type Table = StatusArrayTable;
    const TABLE: &'static StatusArrayTable =
        &StatusArrayTable { unknown: unknown::<Self>(), is_complete, result };
    const IDS: &'static [Guid] = &[IID_STATUS_ARRAY];
}

impl Statuses {
    pub(crate) fn new(count: u32) -> Self {
        state().count("statuses");
        Self((0..count).map(|_| AtomicI32::new(0)).collect())
    }

    pub(crate) fn results(&self) -> &Results {
        &self.0
    }
}

impl Drop for Statuses {
    fn drop(&mut self) {
        state().discount("statuses");
    }
}

unsafe extern "system" fn is_complete(object: Object, index: u32) -> u8 {
    // SAFETY: as callers promise.
    u8::from(unsafe { result(object, index) } != E_PENDING)
}

unsafe extern "system" fn result(object: Object, index: u32) -> HResult {
    // SAFETY: callers give a living object.
    unsafe { kind::<Statuses>(object) }.0[index as usize].load(Ordering::Acquire)
}
