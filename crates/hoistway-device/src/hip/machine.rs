//! What of the machine ROCm needs: its runtime, and access to its devices.
#![forbid(unsafe_code)]

use super::Hip;
use crate::{
    Finding, Unavailable,
    driver::{Driver, Vendor},
};
use std::path::Path;

/// Where the kernel's driver for computing on AMD's devices shows itself.
const KERNEL_DRIVER: &str = "/dev/kfd";

/// Why there is no direct path. AMD's library for it says of itself that it is an early-access preview: its functions were
/// renamed between versions, and the number of its interface is 0. Its counts of bytes by path are for another process.
pub(super) fn no_direct_path() -> Unavailable {
    let reason = "AMD's library for direct reads, hipFile, is a preview whose interface is not stable, and is not used";
    Unavailable::new(reason, "use route staged")
}

/// What of it is here. Of a machine that shows no sign of AMD's devices nothing is said.
pub(super) fn examine(devices: Result<usize, Unavailable>) -> Vec<Finding> {
    const DRIVER: &str = "ROCm driver";
    match (Driver::<Hip>::get(), devices) {
        (Ok(driver), Ok(_)) => vec![Finding::ok(DRIVER, serves(driver.version))],
        (Ok(driver), Err(Unavailable { reason, fix })) => {
            vec![Finding::ok(DRIVER, serves(driver.version)), Finding::slower("ROCm devices", reason, fix)]
        }
        (Err(Unavailable { reason, fix }), _) if Path::new(KERNEL_DRIVER).exists() || is_stand_in() => {
            vec![Finding::absent(DRIVER, format!("no load goes to its devices: {reason}"), fix)]
        }
        (Err(_), _) => Vec::new(),
    }
}

fn serves(version: i32) -> String {
    format!("serves {}", Hip::version_text(version))
}

/// Whether a test has named the library.
fn is_stand_in() -> bool {
    cfg!(feature = "stand-in") && std::env::var_os("HOISTWAY_HIP_DRIVER").is_some()
}
