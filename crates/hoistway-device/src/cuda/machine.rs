//! What of the machine CUDA needs: its driver, and what a direct path from drives to devices takes.
#![forbid(unsafe_code)]

use super::{Cuda, cufile};
use crate::{
    Finding, Unavailable,
    driver::{Driver, Vendor},
};
use std::{fs, path::Path};

/// Where nvidia-fs shows itself.
const NVIDIA_FS: &str = "/proc/driver/nvidia-fs";

/// Whether this machine may have a direct path to devices at all.
///
/// # Errors
/// What is missing.
pub(super) fn may_have_direct_path() -> Result<(), Unavailable> {
    if cfg!(not(target_os = "linux")) {
        return Err(Unavailable::new("GPUDirect Storage is of Linux", "use route staged"));
    }
    if Path::new(NVIDIA_FS).exists() || cufile::is_stand_in() {
        return Ok(());
    }
    p2pdma().map_err(|why| {
        let reason = format!("there is no nvidia-fs ({NVIDIA_FS}), and no P2PDMA: {}", why.reason);
        Unavailable::new(reason, format!("modprobe nvidia-fs, or: {}", why.fix))
    })
}

/// What is known to keep drives from reaching a device by themselves.
fn p2pdma() -> Result<(), Unavailable> {
    let version = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    if !version.contains("Open Kernel Module") {
        let reason = "NVIDIA's open driver is not in use";
        return Err(Unavailable::new(reason, "install the open kernel modules, 570 or later"));
    }
    let multipath = fs::read_to_string("/sys/module/nvme_core/parameters/multipath").unwrap_or_default();
    if multipath.trim() == "Y" {
        return Err(Unavailable::new(
            "NVMe multipath is on, which has none",
            "boot with nvme_core.multipath=N",
        ));
    }
    let parameters = fs::read_to_string("/proc/driver/nvidia/params").unwrap_or_default();
    if !parameters.contains("RMForceStaticBar1=1") {
        let fix = "options nvidia NVreg_RegistryDwords=\"RMForceStaticBar1=1;RmForceDisableIomapWC=1;\"";
        return Err(Unavailable::new("BAR1 is not mapped once and for all", fix));
    }
    Ok(())
}

/// What of it is here. Without a driver nothing else is looked at.
pub(super) fn examine(devices: Result<(), Unavailable>) -> Vec<Finding> {
    const DRIVER: &str = "CUDA driver";
    let version = match Driver::<Cuda>::get() {
        Ok(driver) => Cuda::version_text(driver.version),
        Err(Unavailable { reason, fix }) => {
            return vec![Finding::absent(DRIVER, format!("no load goes to its devices: {reason}"), fix)];
        }
    };
    let mut findings = vec![Finding::ok(DRIVER, format!("serves {version}"))];
    match devices {
        Ok(()) if cfg!(not(target_os = "linux")) => {}
        Ok(()) => findings.extend([examine_nvidia_fs(), examine_p2pdma(), examine_cufile()]),
        Err(Unavailable { reason, fix }) => {
            findings.push(Finding::slower("CUDA devices", reason, fix));
        }
    }
    findings
}

fn examine_nvidia_fs() -> Finding {
    const NAME: &str = "nvidia-fs";
    match fs::read_to_string(format!("{NVIDIA_FS}/version")) {
        Ok(version) => Finding::ok(NAME, version.lines().next().unwrap_or("loaded").trim()),
        Err(_) => Finding::absent(
            NAME,
            "not loaded: route gds needs it, or P2PDMA",
            "modprobe nvidia-fs (package nvidia-fs-dkms); in a container, pass /dev/nvidia-fs* and /run/udev",
        ),
    }
}

fn examine_p2pdma() -> Finding {
    const NAME: &str = "P2PDMA";
    match p2pdma() {
        Ok(()) => Finding::ok(NAME, "nothing known is in its way; a load proves it"),
        Err(Unavailable { reason, fix }) => Finding::absent(
            NAME,
            format!("{reason}, so drives cannot reach the device without nvidia-fs"),
            fix,
        ),
    }
}

fn examine_cufile() -> Finding {
    const NAME: &str = "cuFile";
    if let Err(Unavailable { reason, fix }) = may_have_direct_path() {
        return Finding::absent(
            NAME,
            format!("not opened, since there is nothing for it to use: {reason}"),
            fix,
        );
    }
    match cufile::CuFile::get() {
        Ok(cufile) => Finding::ok(NAME, cufile.describe()),
        Err(Unavailable { reason, fix }) => Finding::absent(NAME, reason, fix),
    }
}
