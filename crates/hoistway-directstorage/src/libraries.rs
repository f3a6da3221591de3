//! Where the two libraries are, and loading them.
#![allow(unsafe_code)]

use crate::{
    DIRECTORY_VARIABLE, Failure,
    abi::{Configuration1, GetFactory, SetConfiguration1},
};
use hoistway_device::Unavailable;
use std::{
    env,
    ffi::{CStr, OsString, c_void},
    io, mem,
    os::windows::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    ptr,
    sync::LazyLock,
};
use windows_sys::Win32::{
    Foundation::{FreeLibrary, HMODULE},
    System::LibraryLoader::{
        GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS, GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
        GetModuleFileNameW, GetModuleHandleExW, GetProcAddress, LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR,
        LOAD_LIBRARY_SEARCH_SYSTEM32, LoadLibraryExW,
    },
};

/// The library with the functions, and the one that it needs: loaded first, since the other looks for it beside the program alone.
const NAME: &str = "dstorage.dll";
const CORE_NAME: &str = "dstoragecore.dll";
const FIX: &str = "take dstorage.dll and dstoragecore.dll of DirectStorage 1.3.0 from folder native/bin/x64 of the NuGet package \
                   Microsoft.Direct3D.DirectStorage; put both beside the program, or name their folder in \
                   HOISTWAY_DIRECTSTORAGE_DIR";

/// The functions of the loaded libraries. They are never unloaded.
#[derive(Debug)]
pub(crate) struct Libraries {
    pub(crate) get_factory: GetFactory,
    /// The path of the one with the functions.
    pub(crate) path: PathBuf,
    /// Its version, if the file says so.
    pub(crate) version: Option<String>,
    /// Why the runtime could not be configured: another library had made its factory before.
    pub(crate) not_configured: Option<Failure>,
}

/// A library that was not loaded yet.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its absolute path.
    pub path: PathBuf,
    /// The version that its file tells.
    pub version: Option<String>,
}

/// Finds the library as it would be loaded now. Loads nothing.
///
/// # Errors
/// Where it was looked for in vain, and what to install.
pub fn find() -> Result<Found, Unavailable> {
    let path = find_path()?;
    Ok(Found { version: file_version(&path), path })
}

/// The folder that the environment names.
fn named_folder() -> Option<PathBuf> {
    env::var_os(DIRECTORY_VARIABLE).filter(|named| !named.is_empty()).map(PathBuf::from)
}

fn find_path() -> Result<PathBuf, Unavailable> {
    let named = named_folder();
    if let Some(named) = named.as_ref().filter(|named| !named.is_absolute()) {
        // Other users may have put a library into the working directory.
        let reason = format!("HOISTWAY_DIRECTSTORAGE_DIR is {}, which is no absolute path", named.display());
        return Err(Unavailable::new(reason, "give it the whole path of a folder"));
    }
    let folders = named.clone().map_or_else(own_folders, |named| vec![named]);
    let has_library = |folder: &PathBuf| folder.join(NAME).is_file();
    let Some(folder) = folders.iter().find(|folder| has_library(folder)) else {
        let folders: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
        let of = if named.is_some() { ", which HOISTWAY_DIRECTSTORAGE_DIR names" } else { "" };
        return Err(Unavailable::new(format!("{NAME} is not in {}{of}", folders.join(" nor in ")), FIX));
    };
    if !folder.join(CORE_NAME).is_file() {
        return Err(Unavailable::new(
            format!("{CORE_NAME} is not beside {NAME} in {}", folder.display()),
            FIX,
        ));
    }
    let path = absolute(&folder.join(NAME))?;
    let [version, core] = [&path, &path.with_file_name(CORE_NAME)].map(|path| file_version(path));
    match (version, core) {
        // They call each other by tables that change from release to release.
        (Some(version), Some(core)) if version != core => Err(Unavailable::new(
            format!("{} has version {version}, and {CORE_NAME} beside it version {core}", path.display()),
            FIX,
        )),
        _ => Ok(path),
    }
}

impl Libraries {
    /// Loads them by their absolute paths, and configures the runtime before anything else is asked of it.
    ///
    /// # Errors
    /// What is missing or of another version.
    pub(crate) fn load() -> Result<Self, Unavailable> {
        let found = find_path();
        // Another library of this process may use DirectStorage: there is one runtime a process.
        if let Some(loaded) = Module::loaded(NAME) {
            let path = loaded.path().unwrap_or_else(|| NAME.into());
            if named_folder().is_some() {
                let found = found?;
                if !is_same(&found, &path) {
                    return Err(Unavailable::new(
                        format!(
                            "another library of this process has loaded {}, and HOISTWAY_DIRECTSTORAGE_DIR names {}",
                            path.display(),
                            found.display()
                        ),
                        "clear the variable, or start hoistway's loads before that library",
                    ));
                }
            }
            return Self::of(loaded, None, path, false);
        }
        let path = found?;
        let core = Module::load(&path.with_file_name(CORE_NAME))?;
        Self::of(Module::load(&path)?, Some(core), path, true)
    }

    fn of(module: Module, core: Option<Module>, path: PathBuf, is_first: bool) -> Result<Self, Unavailable> {
        let version = file_version(&path);
        let older = |name: &CStr| {
            let version = version.as_deref().unwrap_or("unknown");
            let reason =
                format!("{} (version {version}) has no function {}", path.display(), name.to_string_lossy());
            Unavailable::new(reason, FIX)
        };
        let function = |name: &'static CStr| module.function(name).ok_or_else(|| older(name));
        let set_configuration = function(c"DStorageSetConfiguration1")?;
        let get_factory = function(c"DStorageGetFactory")?;
        // SAFETY: the header declares the functions of these names so.
        let (set_configuration, get_factory) = unsafe {
            (
                mem::transmute::<*const c_void, SetConfiguration1>(set_configuration),
                mem::transmute::<*const c_void, GetFactory>(get_factory),
            )
        };
        // Decompression stays as it is: others of this process may want it.
        let configuration = Configuration1 { disable_telemetry: 1, ..Configuration1::default() };
        // SAFETY: the structure is that of the header, and outlives the call.
        let configured = unsafe { set_configuration(&raw const configuration) };
        let configured = Failure::check("DStorageSetConfiguration1", configured);
        if let (true, Err(failure)) = (is_first, &configured) {
            let why = Unavailable::from(failure.clone());
            return Err(Unavailable::new(format!("{}: {}", path.display(), why.reason), why.fix));
        }
        // From now on the runtime may have threads.
        mem::forget((module, core));
        Ok(Self { get_factory, path, version, not_configured: configured.err() })
    }
}

/// A library of this process, and a count of it.
pub(crate) struct Module(HMODULE);

impl Module {
    /// One that is loaded, by its name alone.
    fn loaded(name: &str) -> Option<Self> {
        let (name, mut module) = (wide(Path::new(name)), ptr::null_mut());
        // SAFETY: the name ends with a zero, and both outlive the call.
        (unsafe { GetModuleHandleExW(0, name.as_ptr(), &raw mut module) } != 0).then_some(Self(module))
    }

    /// Loads one by its absolute path; what it needs itself, from beside it or from Windows.
    fn load(path: &Path) -> Result<Self, Unavailable> {
        let flags = LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR | LOAD_LIBRARY_SEARCH_SYSTEM32;
        Self::open(path, flags)
            .map_err(|error| Unavailable::new(format!("{} cannot be loaded: {error}", path.display()), FIX))
    }

    /// Windows' own of this name; one that the process has loaded under that name already.
    pub(crate) fn of_system(name: &Path) -> io::Result<Self> {
        Self::open(name, LOAD_LIBRARY_SEARCH_SYSTEM32)
    }

    fn open(path: &Path, flags: u32) -> io::Result<Self> {
        let name = wide(path);
        // SAFETY: the path ends with a zero. What the library runs as it is loaded is Microsoft's.
        let module = unsafe { LoadLibraryExW(name.as_ptr(), ptr::null_mut(), flags) };
        if module.is_null() { Err(io::Error::last_os_error()) } else { Ok(Self(module)) }
    }

    fn path(&self) -> Option<PathBuf> {
        module_path(self.0)
    }

    pub(crate) fn function(&self, name: &CStr) -> Option<*const c_void> {
        // SAFETY: the library is loaded as long as this value lives.
        let function = unsafe { GetProcAddress(self.0, name.as_ptr().cast()) }?;
        Some(function as *const c_void)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: this value's count.
        unsafe { FreeLibrary(self.0) };
    }
}

/// The folders of the program and of the library that this code is part of: an extension of Python, or the C library.
fn own_folders() -> Vec<PathBuf> {
    let mut own: HMODULE = ptr::null_mut();
    let flags = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    let address = own_folders as *const u16;
    // SAFETY: with this flag, the name is an address within the library that is looked for.
    let found = unsafe { GetModuleHandleExW(flags, address, &raw mut own) } != 0;
    let library = if found { module_path(own) } else { None };
    let mut folders: Vec<PathBuf> = Vec::new();
    for path in [library, env::current_exe().ok()].into_iter().flatten() {
        if let Some(folder) = path.parent()
            && !folders.iter().any(|own| own == folder)
        {
            folders.push(folder.to_owned());
        }
    }
    folders
}

fn module_path(module: HMODULE) -> Option<PathBuf> {
    let mut text = vec![0u16; 512];
    loop {
        let room = u32::try_from(text.len()).ok()?;
        // SAFETY: the library is loaded, and the call writes no more than `room` characters.
        let len = unsafe { GetModuleFileNameW(module, text.as_mut_ptr(), room) } as usize;
        if len == 0 {
            return None;
        }
        if len < text.len() {
            text.truncate(len);
            return Some(OsString::from_wide(&text).into());
        }
        text.resize(text.len().checked_mul(2).filter(|&len| len <= 1 << 16)?, 0);
    }
}

/// The version of a library, as its file tells.
fn file_version(path: &Path) -> Option<String> {
    let version = VersionFunctions::get()?;
    let path = wide(path);
    // SAFETY: the path ends with a zero.
    let len = unsafe { (version.info_len)(path.as_ptr(), ptr::null_mut()) };
    // The structure consists of words.
    let mut block = vec![0u32; (len as usize).div_ceil(4)];
    // SAFETY: the block has room for `len` bytes.
    if len == 0 || unsafe { (version.info)(path.as_ptr(), 0, len, block.as_mut_ptr().cast()) } == 0 {
        return None;
    }
    let (root, mut found, mut found_len) = ([u16::from(b'\\'), 0], ptr::null_mut(), 0u32);
    // SAFETY: the block is what the call above has written, and what is found lies in it.
    let is_found = unsafe {
        (version.value)(block.as_ptr().cast(), root.as_ptr(), &raw mut found, &raw mut found_len) != 0
    };
    if !is_found || found.is_null() || found_len < 16 {
        return None;
    }
    // SAFETY: the third and fourth word of `VS_FIXEDFILEINFO`, which lies in the block.
    let [high, low] = [2, 3].map(|at| unsafe { found.cast::<u32>().add(at).read_unaligned() });
    Some(format!("{}.{}.{}.{}", high >> 16, high & 0xFFFF, low >> 16, low & 0xFFFF))
}

/// The functions of `version.dll`. A program that imports that library has Windows look for it beside the program first, where others
/// may have put one; here it is Windows' own.
struct VersionFunctions {
    info_len: InfoLen,
    info: Info,
    value: Value,
}

/// `GetFileVersionInfoSizeW`
type InfoLen = unsafe extern "system" fn(*const u16, *mut u32) -> u32;
/// `GetFileVersionInfoW`
type Info = unsafe extern "system" fn(*const u16, u32, u32, *mut c_void) -> i32;
/// `VerQueryValueW`
type Value = unsafe extern "system" fn(*const c_void, *const u16, *mut *mut c_void, *mut u32) -> i32;

impl VersionFunctions {
    /// `None` on a Windows without them.
    fn get() -> Option<&'static Self> {
        static FUNCTIONS: LazyLock<Option<VersionFunctions>> = LazyLock::new(|| {
            let library = Module::of_system(Path::new("version.dll")).ok()?;
            // SAFETY: the header declares the functions of these names so.
            let functions = unsafe {
                VersionFunctions {
                    info_len: mem::transmute::<*const c_void, InfoLen>(
                        library.function(c"GetFileVersionInfoSizeW")?,
                    ),
                    info: mem::transmute::<*const c_void, Info>(library.function(c"GetFileVersionInfoW")?),
                    value: mem::transmute::<*const c_void, Value>(library.function(c"VerQueryValueW")?),
                }
            };
            mem::forget(library);
            Some(functions)
        });
        FUNCTIONS.as_ref()
    }
}

fn is_same(path: &Path, other: &Path) -> bool {
    let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    canonical(path) == canonical(other)
}

fn absolute(path: &Path) -> Result<PathBuf, Unavailable> {
    std::path::absolute(path)
        .map_err(|error| Unavailable::new(format!("{} is no path: {error}", path.display()), ""))
}

/// A path as functions of Windows take it, with a zero at its end.
pub(crate) fn wide(path: &Path) -> Vec<u16> {
    path.as_os_str().encode_wide().chain([0]).collect()
}
