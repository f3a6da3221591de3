//! The kernels, compiled for each architecture by `just kernels`: code objects of version 5, which ROCm reads since 5.5.
#![forbid(unsafe_code)]

/// As aligned as loaders may expect it.
#[repr(C, align(4096))]
struct Image<T: ?Sized>(T);

/// Pairs each architecture with its code object in the folder `kernels`.
macro_rules! images {
    ($($architecture:literal),* $(,)?) => {
        &[$(($architecture, &Image(*include_bytes!(concat!("kernels/", $architecture, ".co")))),)*]
    };
}

/// MI100, MI200, MI300, MI350; Radeon of RDNA 2, 3, 3.5 and 4.
static IMAGES: &[(&str, &Image<[u8]>)] = images![
    "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1151", "gfx1200",
    "gfx1201",
];

/// The kernels for an architecture such as `gfx942:sramecc+:xnack-`. They run with its features on and off.
pub(super) fn of(architecture: &str) -> Option<&'static [u8]> {
    let processor = architecture.split(':').next().unwrap_or_default();
    IMAGES.iter().find(|(name, _)| *name == processor).map(|(_, image)| &image.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_architecture_has_a_code_object_of_its_own_and_others_have_none() {
        for (name, image) in IMAGES {
            assert!(image.0.starts_with(b"\x7fELF"), "{name}");
            assert_eq!(of(&format!("{name}:xnack-")).unwrap().as_ptr(), image.0.as_ptr());
        }
        for unknown in ["", "gfx94", "gfx9421", "gfx803"] {
            assert!(of(unknown).is_none(), "{unknown}");
        }
    }
}
