//! What kernels are loaded from: images that `just kernels` compiles ahead, one for each architecture, in the folder `kernels`
//! of each vendor.
#![forbid(unsafe_code)]

/// The kernels as a driver loads them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Image {
    /// The architecture that it is compiled for, such as `sm_90`.
    pub(crate) name: &'static str,
    pub(crate) bytes: &'static [u8],
}

/// As aligned as loaders may expect it.
#[repr(C, align(4096))]
pub(crate) struct Aligned<T>(pub(crate) T);

/// The images in the folder `kernels` beside the file that uses this, by architecture; `$suffix` ends the names of their files.
macro_rules! images {
    ($($architecture:literal),* $(,)?; $suffix:literal) => {
        &[$($crate::driver::images::Image {
            name: $architecture,
            bytes: &$crate::driver::images::Aligned(
                *include_bytes!(concat!("kernels/", $architecture, $suffix))
            ).0,
        }),*]
    };
}
pub(crate) use images;
