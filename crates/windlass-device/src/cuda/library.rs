//! Libraries that are found at run time, and tables of their functions.
#![allow(unsafe_code)]

use libloading::Library;
use std::ffi::OsStr;

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
        pub(super) struct Functions {
            $(pub(super) $name:
                unsafe extern "C" fn($($argument),*) -> functions!(@result $default; $($result)?),)*
            $(pub(super) $extra: Option<unsafe extern "C" fn($($extra_argument),*) -> $default>,)*
        }

        impl Functions {
            /// The functions of a library that stays loaded for the life of the process; else the name of one that it
            /// lacks.
            fn find(library: &libloading::Library) -> std::result::Result<Self, &'static str> {
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
pub(super) use functions;

/// Opens one of NVIDIA's own libraries, or one that a test names.
#[cfg(not(windows))]
pub(super) fn open(name: &OsStr) -> Result<Library, libloading::Error> {
    // SAFETY: loading runs the library's initialisers, which is what they are for.
    unsafe { Library::new(name) }
}

/// From System32 alone, where the driver lives: other directories of the search path belong to others.
#[cfg(windows)]
pub(super) fn open(name: &OsStr) -> Result<Library, libloading::Error> {
    use libloading::os::windows;
    // SAFETY: as above.
    unsafe {
        windows::Library::load_with_flags(name, windows::LOAD_LIBRARY_SEARCH_SYSTEM32).map(Library::from)
    }
}

/// Why a library cannot be loaded, in the linker's words.
pub(super) fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}
