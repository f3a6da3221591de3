//! The kernels for CUDA devices, compiled by `just kernels`: machine code, and PTX for architectures that have none here. The
//! driver compiles PTX when it loads it, which can take seconds.
#![forbid(unsafe_code)]

use crate::driver::images::{Image, images};

/// V100; Turing; A100; RTX 30; RTX 40 and L40; H100; B200; RTX 50.
static IMAGES: &[Image] =
    images!["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"; ".cubin"];

/// Every device from compute capability 6.0 on runs it. It ends with a zero.
const PTX: Image = Image {
    name: "PTX of compute_60",
    bytes: concat!(include_str!("kernels/compute_60.ptx"), "\0").as_bytes(),
};

/// The images for a compute capability, best first.
pub(super) fn of((major, minor): (u32, u32)) -> Vec<Image> {
    // Machine code runs on devices of the same major number, and of the same minor number or a higher one.
    let fits = |image: &&Image| {
        image
            .name
            .strip_prefix("sm_")
            .and_then(|number| number.parse::<u32>().ok())
            .is_some_and(|number| number / 10 == major && number % 10 <= minor)
    };
    let machine_code = IMAGES.iter().rfind(fits);
    machine_code.copied().into_iter().chain([PTX]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_gets_machine_code_that_it_runs_and_ptx_after_it() {
        let names = |capability| of(capability).iter().map(|image| image.name).collect::<Vec<_>>();
        for (capability, expected) in [
            ((7, 0), Some("sm_70")),
            ((7, 2), Some("sm_70")),
            ((7, 5), Some("sm_75")),
            ((8, 0), Some("sm_80")),
            ((8, 6), Some("sm_86")),
            ((8, 7), Some("sm_86")),
            ((8, 9), Some("sm_89")),
            ((9, 0), Some("sm_90")),
            ((10, 0), Some("sm_100")),
            ((10, 3), Some("sm_100")),
            ((12, 1), Some("sm_120")),
            ((6, 1), None),
            ((11, 0), None),
            ((13, 0), None),
        ] {
            let expected: Vec<_> = expected.into_iter().chain([PTX.name]).collect();
            assert_eq!(names(capability), expected, "{capability:?}");
        }
    }

    #[test]
    fn images_are_what_their_names_say() {
        for image in IMAGES {
            assert!(image.bytes.starts_with(b"\x7fELF"), "{}", image.name);
        }
        assert!(PTX.bytes.starts_with(b".version 8.0"));
    }
}
