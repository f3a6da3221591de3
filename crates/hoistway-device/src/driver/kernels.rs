//! The kernels: copies of many short pieces, and conversions. Compiled ahead from `kernels.cu` by `just kernels`, so
//! that no compiler is needed where they run; the vendor's module has what they are compiled to.
#![allow(unsafe_code)]

use super::{Vendor, device::DriverDevice, table::Handle};
use crate::{
    Conversion, Error, Result,
    backend::{Kernel, Segment},
};
use std::{
    collections::BTreeMap,
    ffi::{CString, c_void},
    ptr,
    sync::PoisonError,
};

/// Threads of a block.
const BLOCK_THREADS: u32 = 256;
/// Elements that a thread takes on before another block pays.
const ELEMENTS_A_THREAD: u64 = 8;
/// Blocks that share a segment, at most: more than the largest device runs at once gain nothing.
const MAX_BLOCKS: u64 = 1024;
/// Segments of one launch, which drivers limit.
const MAX_SEGMENTS: usize = 65_535;

/// The module with the kernels, loaded into a device's context.
pub(super) struct Kernels {
    module: Handle,
    functions: BTreeMap<Kernel, Handle>,
}

impl Kernels {
    fn load<V: Vendor>(device: &DriverDevice<V>) -> Result<Self> {
        let functions = &device.driver.functions;
        let (load, find) = (&functions.module_load, &functions.module_function);
        let Some(image) = V::kernels(&device.info.architecture) else {
            let architecture = &device.info.architecture;
            return Err(Error::Internal(format!("there are no kernels for {architecture}")));
        };
        let mut kernels = Self { module: ptr::null_mut(), functions: BTreeMap::new() };
        // SAFETY: writes one handle; the image is whole; the caller has made the device current.
        device.call("loading kernels", load.name, || unsafe {
            (load.call)(&mut kernels.module, image.as_ptr().cast::<c_void>())
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

impl<V: Vendor> DriverDevice<V> {
    /// The kernels, loaded at the first call. The caller has made the device current.
    pub(super) fn kernels(&self) -> Result<&Kernels> {
        // One thread compiles, the others wait for it.
        let _turn = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = self.kernels.get() {
            return Ok(kernels);
        }
        let _ = self.kernels.set(Kernels::load(self)?);
        self.kernels.get().ok_or_else(|| Error::Internal("the kernels are gone".into()))
    }
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
