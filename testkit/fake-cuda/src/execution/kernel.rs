//! Modules, the functions in them, and their execution.

use super::{
    context::{self, Owner},
    handles::Table,
};
use crate::{
    control::settings,
    memory::{device, host},
    status::{Code, ILLEGAL_ADDRESS, INVALID_IMAGE, NOT_FOUND},
};
use std::{
    cell::Cell,
    ffi::{CStr, CString, c_char},
    sync::Arc,
};

/// All loaded modules.
pub(crate) static MODULES: Table<Module> = Table::new(0x9D00_0000_0000);
/// All functions that were asked for, by module and name.
pub(crate) static FUNCTIONS: Table<Function> = Table::new(0xF000_0000_0000);

/// A loaded module: PTX or machine code, of which only the names of its kernels are looked at.
pub(crate) struct Module {
    pub(crate) owner: Arc<Owner>,
    entries: Vec<String>,
}

/// A kernel of a module.
pub(crate) struct Function {
    pub(crate) owner: Arc<Owner>,
    pub(crate) module: usize,
    name: String,
    kernel: Kernel,
}

/// A kernel for the CPU. All of them take the device address of a table.
type Kernel = unsafe extern "C" fn(u64);

/// Translates an address for the shim: the range around it that can be accessed, and where the host has it.
type Reach = unsafe extern "C" fn(u64, *mut u64, *mut u64, *mut *mut u8) -> bool;

/// What ELF files begin with.
const ELF: &[u8] = b"\x7fELF";

/// A kernel to run.
#[derive(Clone)]
pub(crate) struct Launch {
    pub(crate) function: Arc<Function>,
    pub(crate) argument: u64,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
}

unsafe extern "C" {
    /// Of the engine's `kernels.cu`.
    fn hoistway_kernel(name: *const c_char) -> Option<Kernel>;
    /// Of `kernels_shim.cpp`.
    fn fake_cuda_run_kernel(
        kernel: Kernel,
        argument: u64,
        grid: *const u32,
        block: *const u32,
        reach: Reach,
        stored: *mut u64,
    ) -> Code;
}

thread_local! {
    /// The device on which this thread runs a kernel.
    static DEVICE: Cell<usize> = const { Cell::new(0) };
}

/// Unloads what a context left behind, and says how many modules that were.
pub(crate) fn release_all(owner: &Arc<Owner>) -> u64 {
    FUNCTIONS.remove_if(|function| Arc::ptr_eq(&function.owner, owner));
    MODULES.remove_if(|module| Arc::ptr_eq(&module.owner, owner)).len() as u64
}

/// The number of a vendor's machines in ELF files, and what comes before and after a kernel's name in theirs: that of its section, or
/// of its descriptor.
struct Machine {
    number: u16,
    before: &'static [u8],
    after: &'static [u8],
}

/// `EM_CUDA`.
const NVIDIA: Machine = Machine { number: 190, before: b".text.", after: b"" };
/// `EM_AMDGPU`.
const AMD: Machine = Machine { number: 224, before: b"", after: b".kd" };

impl Module {
    /// A module of PTX or of an ELF file for NVIDIA's devices.
    ///
    /// # Safety
    /// `image` leads to a text that ends with a NUL, or to a whole file.
    pub(crate) unsafe fn load(owner: &Arc<Owner>, image: *const c_char) -> Result<Arc<Module>, Code> {
        // SAFETY: passed on. A file has a NUL early on.
        let text = unsafe { CStr::from_ptr(image) };
        if text.to_bytes().starts_with(ELF) {
            // SAFETY: passed on.
            return unsafe { Module::of_file(owner, image.cast(), &NVIDIA) };
        }
        let ptx = text.to_str().ok().filter(|text| text.contains(".version")).ok_or(INVALID_IMAGE)?;
        let name = |text: &str| {
            let end = text.find(|c: char| c != '_' && c != '$' && !c.is_ascii_alphanumeric());
            text.get(..end.unwrap_or(text.len())).unwrap_or_default().to_owned()
        };
        let entries = ptx.split(".entry").skip(1).map(|text| name(text.trim_start())).collect();
        Ok(Arc::new(Module { owner: Arc::clone(owner), entries }))
    }

    /// A module of an ELF file for AMD's devices.
    ///
    /// # Safety
    /// `image` leads to a whole file.
    pub(crate) unsafe fn of_code_object(owner: &Arc<Owner>, image: *const u8) -> Result<Arc<Module>, Code> {
        // SAFETY: passed on.
        unsafe { Module::of_file(owner, image, &AMD) }
    }

    /// # Safety
    /// `image` leads to a whole file.
    unsafe fn of_file(owner: &Arc<Owner>, image: *const u8, machine: &Machine) -> Result<Arc<Module>, Code> {
        const HEADER_BYTES: usize = 64;
        // SAFETY: a whole file has a header.
        let header = unsafe { std::slice::from_raw_parts(image, HEADER_BYTES) };
        let half = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let sections_at = header[40..48].iter().rev().fold(0, |value, byte| value << 8 | usize::from(*byte));
        if !header.starts_with(ELF) || header[4..6] != [2, 1] || half(18) != machine.number {
            return Err(INVALID_IMAGE);
        }
        // Sections' headers come after all names, and there are so many, each so long.
        let len = sections_at + usize::from(half(58)) * usize::from(half(60));
        // SAFETY: the caller promised a whole file.
        let file = unsafe { std::slice::from_raw_parts(image, len) };
        let names = file.split(|byte| *byte == 0);
        let kernels = names.filter_map(|text| text.strip_prefix(machine.before)?.strip_suffix(machine.after));
        let entries: Vec<String> = kernels.map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        if entries.is_empty() {
            return Err(INVALID_IMAGE);
        }
        Ok(Arc::new(Module { owner: Arc::clone(owner), entries }))
    }
}

impl Function {
    /// The handle of a kernel. A module without any, as a test may make up, is taken to have them all.
    pub(crate) fn get(module: usize, of: &Module, name: &str) -> Result<usize, Code> {
        if !of.entries.is_empty() && !of.entries.iter().any(|entry| entry == name) {
            return Err(NOT_FOUND);
        }
        if let Some(known) = FUNCTIONS.find(|function| function.module == module && function.name == name) {
            return Ok(known);
        }
        let symbol = CString::new(name).map_err(|_| NOT_FOUND)?;
        // SAFETY: compares the NUL-terminated name with those it knows.
        let kernel = unsafe { hoistway_kernel(symbol.as_ptr()) }.ok_or(NOT_FOUND)?;
        let owner = Arc::clone(&of.owner);
        Ok(FUNCTIONS.insert(Arc::new(Function { owner, module, name: name.to_owned(), kernel })))
    }
}

impl Launch {
    pub(crate) fn name(&self) -> &str {
        &self.function.name
    }

    /// Runs the kernel's threads one after another, and says how many bytes they stored.
    pub(super) fn run(&self, owner: &Owner) -> Result<u64, Code> {
        DEVICE.set(owner.device);
        let mut stored = 0;
        // SAFETY: the kernel is one of those compiled with the shim, which checks each of its accesses.
        let code = unsafe {
            fake_cuda_run_kernel(
                self.function.kernel,
                self.argument,
                self.grid.as_ptr(),
                self.block.as_ptr(),
                reach_from_kernel,
                &mut stored,
            )
        };
        if code == 0 { Ok(stored) } else { Err(code) }
    }
}

/// `reach`, as C++ calls it.
///
/// # Safety
/// The three places can be written.
unsafe extern "C" fn reach_from_kernel(
    address: u64,
    begin: *mut u64,
    end: *mut u64,
    shadow: *mut *mut u8,
) -> bool {
    let Ok((first, bytes, there)) = reach(address) else { return false };
    // SAFETY: the caller promised that all three can be written.
    unsafe {
        begin.write(first);
        end.write(first + bytes);
        shadow.write(there);
    }
    true
}

/// The range that a kernel may access around an address: its start, length, and place in the host.
fn reach(address: u64) -> Result<(u64, u64, *mut u8), Code> {
    const PAGE: u64 = 4096;
    let memory = device::of_device(DEVICE.get()).ok_or(ILLEGAL_ADDRESS)?;
    if let Some(found) = memory.find(address) {
        return memory.shadow(found.start, found.bytes).map(|shadow| (found.start, found.bytes, shadow));
    }
    if let Some(found) = host::pinned().find(context::driver(DEVICE.get()), address as usize) {
        return Ok((found.start as u64, found.bytes as u64, found.start as *mut u8));
    }
    // A device that uses the host's page tables reaches all that the host does; other devices' windows are of
    // those that the host itself can't reach.
    if settings().integrated && address >= PAGE && device::of_address(address).is_none() {
        let page = address / PAGE * PAGE;
        return Ok((page, PAGE, page as *mut u8));
    }
    Err(ILLEGAL_ADDRESS)
}
