//! The kernels for AMD's devices, compiled by `just kernels`: code objects of version 5, which ROCm reads since 5.5.
#![forbid(unsafe_code)]

use crate::driver::images::{Image, images};

/// MI100, MI200, MI300, MI350; Radeon of RDNA 2, 3, 3.5 and 4.
static IMAGES: &[Image] = images![
    "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1151", "gfx1200",
    "gfx1201"; ".co"
];

/// The image for an architecture such as `gfx942:sramecc+:xnack-`, if there is one. It runs with its features on and off.
pub(super) fn of(architecture: &str) -> Vec<Image> {
    let processor = architecture.split(':').next().unwrap_or_default();
    IMAGES.iter().filter(|image| image.name == processor).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_architecture_has_a_code_object_of_its_own_and_others_have_none() {
        for image in IMAGES {
            assert!(image.bytes.starts_with(b"\x7fELF"), "{}", image.name);
            let found: Vec<_> =
                of(&format!("{}:xnack-", image.name)).iter().map(|image| image.bytes.as_ptr()).collect();
            assert_eq!(found, [image.bytes.as_ptr()]);
        }
        for unknown in ["", "gfx94", "gfx9421", "gfx803"] {
            assert!(of(unknown).is_empty(), "{unknown}");
        }
    }
}
