//! Python's interpreter, if the process has one: whether the calling thread holds its lock.

use crate::system;
use std::{
    ffi::{CStr, c_int, c_void},
    sync::OnceLock,
};

type Ask = unsafe extern "C" fn() -> c_int;

/// Whether the calling thread holds the lock.
pub(crate) fn is_held() -> bool {
    static ASK: OnceLock<Option<(Ask, Ask)>> = OnceLock::new();
    let ask = ASK.get_or_init(|| Some((find(c"Py_IsInitialized")?, find(c"PyGILState_Check")?)));
    // SAFETY: both may be called by any thread; the second while there is an interpreter.
    ask.is_some_and(|(is_initialized, is_held)| unsafe { is_initialized() == 1 && is_held() == 1 })
}

fn find(name: &CStr) -> Option<Ask> {
    let found = system::symbol(name);
    // SAFETY: both names are of functions of this type.
    (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Ask>(found) })
}
