//! For tests: the stand-in of their process, and its controls.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use hoistway_directstorage::{DIRECTORY_VARIABLE, Runtime};
use std::{
    env,
    ffi::{CStr, CString, c_char, c_int},
    fs,
    os::windows::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::{LazyLock, Mutex, MutexGuard, Once, PoisonError},
    thread,
};
use windows_sys::Win32::{
    Foundation::HMODULE,
    System::{
        LibraryLoader::{GetModuleHandleW, GetProcAddress, LoadLibraryW},
        Threading::{GetCurrentProcess, GetProcessHandleCount},
    },
};

/// A test's turn with the stand-in. It is as it was when the turn is over.
#[derive(Debug)]
pub struct Turn(#[allow(dead_code)] MutexGuard<'static, ()>);

static TURNS: Mutex<()> = Mutex::new(());
static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| folder("stand-in"));

impl Turn {
    /// Waits for a turn. The first one loads the runtime.
    pub fn take() -> Self {
        let turn = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
        if env::var_os(DIRECTORY_VARIABLE).is_none() {
            // SAFETY: the first turn alone does, before the runtime is looked for; on Windows other threads may read meanwhile.
            unsafe { env::set_var(DIRECTORY_VARIABLE, &*FOLDER) };
        }
        static HAS_GRAPHICS: Once = Once::new();
        HAS_GRAPHICS.call_once(|| {
            let library = FOLDER.join(GRAPHICS);
            let path: Vec<u16> = library.as_os_str().encode_wide().chain([0]).collect();
            // SAFETY: as above; a path that ends with a zero, of a library that has no initialisers.
            unsafe {
                env::set_var("HOISTWAY_D3D12", &library);
                assert!(!LoadLibraryW(path.as_ptr()).is_null(), "{}", library.display());
            }
        });
        Runtime::get().unwrap_or_else(|why| panic!("{why}"));
        let turn = Self(turn);
        turn.reset();
        turn
    }

    /// Sets `name=value`: see `control`.
    pub fn set(&self, setting: &str) {
        let text = CString::new(setting).unwrap();
        let is_of_graphics = ["d3d12_", "dxgi_"].iter().any(|prefix| setting.starts_with(prefix));
        let library = if is_of_graphics { GRAPHICS } else { "dstorage.dll" };
        // SAFETY: of this signature in the stand-in.
        let code = unsafe {
            let set: unsafe extern "C" fn(*const c_char) -> c_int =
                std::mem::transmute(function(library, c"fake_dstorage_set"));
            set(text.as_ptr())
        };
        assert_eq!(code, 0, "{setting:?} means nothing to the stand-in");
    }

    /// Takes all settings back, and counts from 0 again once no request is left, also of queues that were leaked.
    pub fn reset(&self) {
        self.reset_libraries();
        while self.count("pending") > 0 {
            thread::yield_now();
        }
        self.reset_libraries();
    }

    fn reset_libraries(&self) {
        for library in ["dstorage.dll", GRAPHICS] {
            // SAFETY: of this signature in the stand-in.
            unsafe {
                let reset: unsafe extern "C" fn() =
                    std::mem::transmute(function(library, c"fake_dstorage_reset"));
                reset();
            }
        }
    }

    /// What the stand-in counts by this name.
    pub fn count(&self, name: &str) -> u64 {
        count("dstorage.dll", name)
    }

    /// What D3D12's counts by this name.
    pub fn count_graphics(&self, name: &str) -> u64 {
        count(GRAPHICS, name)
    }

    /// Objects of D3D12 that there are.
    pub fn graphics(&self) -> [u64; 4] {
        ["devices", "heaps", "resources", "fences"].map(|name| self.count_graphics(name))
    }

    /// Objects that there are: queues, files and arrays of results.
    pub fn objects(&self) -> [u64; 3] {
        ["queues", "files", "statuses"].map(|name| self.count(name))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.reset();
    }
}

fn count(library: &str, name: &str) -> u64 {
    let text = CString::new(name).unwrap();
    // SAFETY: of this signature in the stand-in.
    unsafe {
        let count: unsafe extern "C" fn(*const c_char) -> u64 =
            std::mem::transmute(function(library, c"fake_dstorage_count"));
        count(text.as_ptr())
    }
}

fn function(library: &str, name: &CStr) -> unsafe extern "system" fn() -> isize {
    let wide: Vec<u16> = library.encode_utf16().chain([0]).collect();
    // SAFETY: texts that end with a zero; the library stays loaded.
    unsafe {
        let module: HMODULE = GetModuleHandleW(wide.as_ptr());
        assert!(!module.is_null(), "{library} is not loaded");
        GetProcAddress(module, name.as_ptr().cast())
            .unwrap_or_else(|| panic!("{library} is not the stand-in"))
    }
}

/// The stand-in of D3D12.
const GRAPHICS: &str = "fake_graphics.dll";

/// Makes a folder with the stand-in under the names of all libraries.
pub fn folder(name: &str) -> PathBuf {
    let folder = place().join(format!("dstorage-{name}"));
    fs::create_dir_all(&folder).unwrap();
    for library in ["dstorage.dll", "dstoragecore.dll", GRAPHICS] {
        // Another test program may have it loaded.
        if let Err(error) = fs::copy(library_file(), folder.join(library)) {
            assert!(folder.join(library).exists(), "{error}");
        }
    }
    folder
}

/// The folder of the test programs, where cargo puts the stand-in too.
fn place() -> PathBuf {
    env::current_exe().unwrap().parent().unwrap().to_owned()
}

fn library_file() -> PathBuf {
    let names = [place().join("fake_dstorage.dll"), place().join("../fake_dstorage.dll")];
    names
        .into_iter()
        .find(|path: &PathBuf| Path::exists(path))
        .expect("the stand-in was not built beside the tests")
}

/// Handles of this process.
pub fn handles() -> u32 {
    let mut count = 0;
    // SAFETY: the structure is valid.
    assert_ne!(unsafe { GetProcessHandleCount(GetCurrentProcess(), &raw mut count) }, 0);
    count
}
