//! File descriptors, as far as cuFile has to do with them.
#![allow(unsafe_code)]

#[cfg(target_os = "linux")]
pub(super) use linux::{StandardInput, of};
#[cfg(not(target_os = "linux"))]
pub(super) use other::{StandardInput, of};

#[cfg(target_os = "linux")]
mod linux {
    use std::{
        ffi::c_int,
        fs::File,
        io,
        os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    };

    /// The descriptor of an open file.
    pub(in crate::cuda) fn of(file: &File) -> c_int {
        file.as_raw_fd()
    }

    /// Standard input, kept while cuFile opens: without nvidia-fs, some versions close descriptor 0.
    pub(in crate::cuda) struct StandardInput(Option<OwnedFd>);

    impl StandardInput {
        pub(in crate::cuda) fn keep() -> Self {
            Self(rustix::io::dup(io::stdin().as_fd()).ok())
        }

        /// Puts back what was there, if it was closed.
        pub(in crate::cuda) fn restore(self) {
            if let Some(before) = self.0
                && rustix::io::fcntl_getfd(io::stdin().as_fd()).is_err()
            {
                // SAFETY: descriptor 0 is closed, so it has no owner; the result gets none and stays open, as standard
                // input does.
                let mut standard_input = unsafe { OwnedFd::from_raw_fd(0) };
                let _ = rustix::io::dup2(&before, &mut standard_input);
                std::mem::forget(standard_input);
            }
        }
    }
}

/// Systems on which cuFile is not loaded.
#[cfg(not(target_os = "linux"))]
mod other {
    use std::{ffi::c_int, fs::File};

    pub(in crate::cuda) fn of(_: &File) -> c_int {
        -1
    }

    pub(in crate::cuda) struct StandardInput;

    impl StandardInput {
        pub(in crate::cuda) fn keep() -> Self {
            Self
        }

        pub(in crate::cuda) fn restore(self) {}
    }
}
