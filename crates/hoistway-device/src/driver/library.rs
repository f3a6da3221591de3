//! Libraries that are found at run time, and tables of their functions.
#![allow(unsafe_code)]

use libloading::Library;
#[cfg(not(windows))]
use std::ffi::c_int;
use std::{
    ffi::OsStr,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

/// Declares `Functions`, a table of functions that return `$result` unless they say otherwise, and how it is filled.
macro_rules! functions {
    (@result $default:ty;) => { $default };
    (@result $default:ty; $result:ty) => { $result };
    (
        $(#[$meta:meta])* returning $default:ty;
        required { $($name:ident = $symbol:literal ($($argument:ty),*) $(-> $result:ty)?;)* }
        optional { $($extra:ident = $extra_symbol:literal ($($extra_argument:ty),*);)* }
    ) => {
        $(#[$meta])*
        pub(crate) struct Functions {
            $(pub(super) $name:
                unsafe extern "C" fn($($argument),*) -> functions!(@result $default; $($result)?),)*
            $(pub(super) $extra: Option<unsafe extern "C" fn($($extra_argument),*) -> $default>,)*
        }

        impl Functions {
            /// The names of all.
            #[cfg(feature = "stand-in")]
            pub(crate) const NAMES: &[&str] = &[$($symbol,)* $($extra_symbol,)*];

            /// The functions of a library that stays loaded for the life of the process; else the name of one that it
            /// lacks.
            pub(super) fn find(library: &libloading::Library) -> std::result::Result<Self, &'static str> {
                // SAFETY: each symbol is a function of the signature that the library's header declares under its
                // name, which is what the table's author vouches for.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!($symbol, "\0").as_bytes()).map_err(|_| $symbol)?,)*
                        $($extra: library.get(concat!($extra_symbol, "\0").as_bytes()).ok().map(|found| *found),)*
                    })
                }
            }
        }
    };
}
pub(crate) use functions;

/// Directories where vendors' libraries may lie besides those that the system searches: Python packages have their own.
static DIRECTORIES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Looks for vendors' libraries in `directory` too. Has an effect until each is used for the first time.
pub fn search_libraries_in(directory: impl Into<PathBuf>) {
    DIRECTORIES.lock().unwrap_or_else(PoisonError::into_inner).push(directory.into());
}

/// The directories that were named so.
pub(crate) fn searched_directories() -> Vec<PathBuf> {
    DIRECTORIES.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Whether this process has loaded a library of this name, or one that says that this is its name.
#[cfg(not(windows))]
pub(crate) fn is_loaded(name: &OsStr) -> bool {
    use libloading::os::unix;
    /// `RTLD_NOLOAD` of Linux.
    const NO_LOAD: c_int = 4;
    // SAFETY: loads nothing, so that no initialiser runs.
    cfg!(target_os = "linux") && unsafe { unix::Library::open(Some(name), unix::RTLD_NOW | NO_LOAD) }.is_ok()
}

/// Whether this process has loaded a library of this name.
#[cfg(windows)]
pub(crate) fn is_loaded(name: &OsStr) -> bool {
    libloading::os::windows::Library::open_already_loaded(name).is_ok()
}

/// Opens a vendor's own library, or one that a test names.
#[cfg(not(windows))]
pub(crate) fn open(name: &OsStr) -> Result<Library, libloading::Error> {
    // SAFETY: loading runs the library's initialisers, which is what they are for.
    unsafe { Library::new(name) }
}

/// From System32 alone, where drivers live: other directories of the search path belong to others.
#[cfg(windows)]
pub(crate) fn open(name: &OsStr) -> Result<Library, libloading::Error> {
    use libloading::os::windows;
    // SAFETY: as above.
    unsafe {
        windows::Library::load_with_flags(name, windows::LOAD_LIBRARY_SEARCH_SYSTEM32).map(Library::from)
    }
}

/// Why a library cannot be loaded, in the linker's words.
pub(crate) fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}
