//! Objects with a table of functions and a count.
#![allow(unsafe_code)]

use hoistway_directstorage::abi::{E_NOINTERFACE, Guid, HResult, IID_UNKNOWN, Object, UnknownTable};
use std::sync::atomic::{AtomicU32, Ordering};

/// What an object is, beside its functions.
pub(crate) trait Kind: Sized + Sync + 'static {
    type Table: 'static;
    const TABLE: &'static Self::Table;
    /// The interfaces that it has.
    const IDS: &'static [Guid];
}

#[repr(C)]
struct Counted<K: Kind> {
    table: &'static K::Table,
    count: AtomicU32,
    kind: K,
}

/// Makes an object, and gives the caller its first reference if it has the interface.
///
/// # Safety
/// `id` and `out` are valid.
pub(crate) unsafe fn make<K: Kind>(kind: K, id: *const Guid, out: *mut Object) -> HResult {
    let object = Box::new(Counted { table: K::TABLE, count: AtomicU32::new(1), kind });
    let object: Object = Box::into_raw(object).cast();
    // SAFETY: the object was just made, and `id` and `out` are valid.
    unsafe {
        let result = query::<K>(object, id, out);
        release::<K>(object);
        result
    }
}

/// # Safety
/// `object` is a living one of this kind.
pub(crate) unsafe fn kind<'a, K: Kind>(object: Object) -> &'a K {
    // SAFETY: by the contract of this function.
    unsafe { &(*object.cast::<Counted<K>>()).kind }
}

pub(crate) const fn unknown<K: Kind>() -> UnknownTable {
    UnknownTable { query: query::<K>, add_ref: add_ref::<K>, release: release::<K> }
}

unsafe extern "system" fn query<K: Kind>(object: Object, id: *const Guid, out: *mut Object) -> HResult {
    // SAFETY: callers give valid pointers.
    unsafe {
        if *id == IID_UNKNOWN || K::IDS.contains(&*id) {
            add_ref::<K>(object);
            *out = object;
            0
        } else {
            *out = std::ptr::null_mut();
            E_NOINTERFACE
        }
    }
}

unsafe extern "system" fn add_ref<K: Kind>(object: Object) -> u32 {
    // SAFETY: callers give a living object.
    unsafe { (*object.cast::<Counted<K>>()).count.fetch_add(1, Ordering::Relaxed) + 1 }
}

pub(crate) unsafe extern "system" fn release<K: Kind>(object: Object) -> u32 {
    let object = object.cast::<Counted<K>>();
    // SAFETY: callers give a living object, and a reference to it that is theirs.
    unsafe {
        let before = (*object).count.fetch_sub(1, Ordering::AcqRel);
        if before == 1 {
            drop(Box::from_raw(object));
        }
        before - 1
    }
}
