//! The driver's result codes, with the numbers of `cuda.h`.

use crate::memory::host::Driver;

/// A `CUresult`. A C enum could hold any number, so it isn't a Rust one.
pub(crate) type Code = i32;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const INVALID_DEVICE: Code = 101;
pub(crate) const INVALID_IMAGE: Code = 200;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const OPERATING_SYSTEM: Code = 304;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const NOT_FOUND: Code = 500;
pub(crate) const NOT_READY: Code = 600;
pub(crate) const ILLEGAL_ADDRESS: Code = 700;
pub(crate) const CONTEXT_IS_DESTROYED: Code = 709;
pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: Code = 712;
pub(crate) const HOST_MEMORY_NOT_REGISTERED: Code = 713;
pub(crate) const NOT_PERMITTED: Code = 800;
pub(crate) const NOT_SUPPORTED: Code = 801;
pub(crate) const CAPTURE_UNSUPPORTED: Code = 900;
pub(crate) const CAPTURE_INVALIDATED: Code = 901;
pub(crate) const CAPTURE_UNMATCHED: Code = 903;
pub(crate) const CAPTURE_UNJOINED: Code = 904;
pub(crate) const CAPTURE_IMPLICIT: Code = 906;
pub(crate) const CAPTURED_EVENT: Code = 907;
pub(crate) const CAPTURE_WRONG_THREAD: Code = 908;

/// Whether a call that returns this leaves its context unusable, and nothing of it under way: the codes that the engine takes so.
pub(crate) fn ends_work(driver: Driver, code: Code) -> bool {
    match driver {
        Driver::Cuda => matches!(code, 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719),
        Driver::Hip => matches!(code, 214 | 700 | 702 | 710 | 719),
    }
}
