//! The kernels: copies of many short pieces, and conversions. Compiled ahead from `kernels.cu` by `just kernels`, so
//! that no compiler is needed where they run; the vendor's module has the images.
#![allow(unsafe_code)]

use super::{Vendor, device::DriverDevice, images::Image, table::Handle};
use crate::{
    Conversion, Error, Result,
    backend::{Kernel, Segment},
};
use std::{
    collections::BTreeMap,
    ffi::{CString, c_void},
    ptr,
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// Threads of a block.
const BLOCK_THREADS: u32 = 256;
/// Elements that a thread takes on before another block pays.
const ELEMENTS_A_THREAD: u64 = 8;
/// Blocks that share a segment, at most: more than the largest device runs at once gain nothing.
const MAX_BLOCKS: u64 = 1024;
/// Segments of one launch, which drivers limit.
const MAX_SEGMENTS: usize = 65_535;

/// The kernels of a device, which are loaded once.
#[derive(Default)]
pub(super) struct KernelsOnce {
    loaded: OnceLock<Kernels>,
    /// Held while they are loaded.
    loading: Mutex<()>,
    has_begun: AtomicBool,
}

impl KernelsOnce {
    /// Whether nothing has begun to load them ahead; from now on something has.
    pub(super) fn begin(&self) -> bool {
        !self.has_begun.swap(true, Ordering::Relaxed)
    }

    /// What reports say of how they were loaded, if anything.
    pub(super) fn note(&self) -> Option<String> {
        self.loaded.get()?.note.clone()
    }

    pub(super) fn take(&mut self) -> Option<Kernels> {
        self.loaded.take()
    }
}

impl<V: Vendor> DriverDevice<V> {
    /// The kernels, loaded at the first call. The caller has made the device current.
    pub(super) fn kernels(&self) -> Result<&Kernels> {
        let KernelsOnce { loaded, loading, .. } = &self.kernels;
        if let Some(kernels) = loaded.get() {
            return Ok(kernels);
        }
        // One thread loads them, and the others wait for it.
        let _turn = loading.lock().unwrap_or_else(PoisonError::into_inner);
        if loaded.get().is_none() {
            let _ = loaded.set(Kernels::load(self)?);
        }
        loaded.get().ok_or_else(|| Error::Internal("the kernels are gone".into()))
    }
}

/// The module with the kernels, loaded into a device's context.
pub(super) struct Kernels {
    module: Handle,
    functions: BTreeMap<Kernel, Handle>,
    /// What reports say of how it was loaded, if anything.
    note: Option<String>,
}

impl Kernels {
    /// Loads the first image that the driver takes.
    fn load<V: Vendor>(device: &DriverDevice<V>) -> Result<Self> {
        let architecture = &device.info.architecture;
        let mut refused = Error::Internal(format!("there are no kernels for {architecture}"));
        let mut note = None;
        for image in V::kernels(architecture) {
            match Self::of_image(device, image) {
                Ok(kernels) => return Ok(Self { note, ..kernels }),
                Err(error) if is_of_image(&error) => {
                    let name = image.name;
                    tracing::warn!(device = %device.info.id, image = name, %error, "the driver refuses kernels");
                    note = Some(format!(
                        "the driver refused the kernels for {name} and compiled them itself, which takes longer: {error}"
                    ));
                    refused = error;
                }
                Err(error) => return Err(error),
            }
        }
        Err(refused)
    }

    fn of_image<V: Vendor>(device: &DriverDevice<V>, image: Image) -> Result<Self> {
        let functions = &device.driver.functions;
        let (load, find) = (&functions.module_load, &functions.module_function);
        let mut kernels = Self { module: ptr::null_mut(), functions: BTreeMap::new(), note: None };
        // SAFETY: writes one handle; the image is whole; the caller has made the device current.
        device.call("loading kernels", load.name, || unsafe {
            (load.call)(&mut kernels.module, image.bytes.as_ptr().cast::<c_void>())
        })?;
        for kernel in all_kernels() {
            let mut function = ptr::null_mut();
            let found = CString::new(symbol(kernel)).map_err(|error| Error::Internal(error.to_string()));
            let found = found.and_then(|symbol| {
                // SAFETY: writes one handle; the module is loaded.
                device.call("finding a kernel", find.name, || unsafe {
                    (find.call)(&mut function, kernels.module, symbol.as_ptr())
                })
            });
            if let Err(error) = found {
                kernels.unload(device);
                return Err(error);
            }
            kernels.functions.insert(kernel, function);
        }
        Ok(kernels)
    }

    /// The caller has made the device current.
    pub(super) fn unload<V: Vendor>(self, device: &DriverDevice<V>) {
        // SAFETY: loaded by `load`, unloaded once, when nothing runs any more.
        let code =
            device.driver.repeat(|| unsafe { (device.driver.functions.module_unload.call)(self.module) });
        device.forget(code);
    }

    /// Queues a kernel over a table of `segments`, the longest of them `longest`.
    ///
    /// # Safety
    /// The table and what it refers to must stay allocated and untouched until the kernel is done. The device must
    /// be current.
    pub(super) unsafe fn launch<V: Vendor>(
        &self,
        device: &DriverDevice<V>,
        stream: Handle,
        kernel: Kernel,
        table: u64,
        segments: usize,
        longest: u64,
    ) -> Result<()> {
        let Some(&function) = self.functions.get(&kernel) else {
            return Err(Error::Internal(format!("there is no kernel {}", symbol(kernel))));
        };
        let launch = &device.driver.functions.launch;
        let a_block = u64::from(BLOCK_THREADS) * ELEMENTS_A_THREAD;
        let blocks = longest.div_ceil(a_block).clamp(1, MAX_BLOCKS) as u32;
        for first in (0..segments).step_by(MAX_SEGMENTS) {
            let count = (segments - first).min(MAX_SEGMENTS) as u32;
            let mut table = table + (first * size_of::<Segment>()) as u64;
            let mut arguments = [(&raw mut table).cast::<c_void>()];
            // SAFETY: the kernel takes one 64-bit argument, which the driver copies before it returns.
            device.call("starting a kernel", launch.name, || unsafe {
                (launch.call)(
                    function,
                    blocks,
                    count,
                    1,
                    BLOCK_THREADS,
                    1,
                    1,
                    0,
                    stream,
                    arguments.as_mut_ptr(),
                    ptr::null_mut(),
                )
            })?;
        }
        Ok(())
    }
}

/// Whether an error is about an image, so that another may do. HIP's codes are the same.
fn is_of_image(error: &Error) -> bool {
    const INVALID_IMAGE: i32 = 200;
    const NO_BINARY_FOR_DEVICE: i32 = 209;
    const INVALID_PTX: i32 = 218;
    const COMPILER_NOT_FOUND: i32 = 221;
    const UNSUPPORTED_PTX_VERSION: i32 = 222;
    const COMPILATION_DISABLED: i32 = 223;
    const INVALID_SOURCE: i32 = 300;
    const NOT_FOUND: i32 = 500;
    let codes = [
        INVALID_IMAGE,
        NO_BINARY_FOR_DEVICE,
        INVALID_PTX,
        COMPILER_NOT_FOUND,
        UNSUPPORTED_PTX_VERSION,
        COMPILATION_DISABLED,
        INVALID_SOURCE,
        NOT_FOUND,
    ];
    matches!(error, Error::Device { source, .. } if codes.contains(&source.code))
}

/// The kernels of the module.
fn all_kernels() -> impl Iterator<Item = Kernel> {
    std::iter::once(Kernel::Copy).chain(Conversion::all().map(Kernel::Convert))
}

fn symbol(kernel: Kernel) -> String {
    match kernel {
        Kernel::Copy => "hoistway_copy".to_owned(),
        Kernel::Convert(conversion) => {
            format!("hoistway_cast_{}_{}", conversion.from().name(), conversion.to().name())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DriverError;

    #[test]
    fn another_image_is_tried_where_the_driver_refuses_this_one_alone() {
        let error = |code| {
            let (name, description) = (String::new(), String::new());
            let source =
                DriverError { function: "cuModuleLoadData", code, name, description, ends_work: false };
            Error::Device { device: "cuda:0".into(), operation: "loading kernels", source }
        };
        for code in [200, 209, 218, 221, 222, 223, 300, 500] {
            assert!(is_of_image(&error(code)), "{code}");
        }
        // About the call, the memory, the context, the machine.
        for code in [1, 2, 3, 4, 100, 201, 302, 700, 719, 801, 802, 999] {
            assert!(!is_of_image(&error(code)), "{code}");
        }
    }
}
