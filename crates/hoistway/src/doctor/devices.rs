//! What of devices a load can use: what their kinds need, devices, their links, and the direct path from storage.
#![forbid(unsafe_code)]

use super::{Check, Status, ok, slower};
use crate::{
    device::{Device, DeviceInfo, devices},
    route::{Unavailable, gds},
    source::Source,
    sys::numa,
};
use bytesize::ByteSize;
use hoistway_device::{Condition, Finding, examine};
use std::{fs, path::Path};

/// The machine's part.
pub(super) fn checks() -> Vec<Check> {
    let mut checks: Vec<Check> = examine().into_iter().map(check_of).collect();
    // Why there are none has been said.
    let found = devices().unwrap_or_default();
    checks.extend(found.iter().flat_map(device_checks));
    checks
}

fn check_of(found: Finding) -> Check {
    let status = match found.condition {
        Condition::Ok => Status::Ok,
        Condition::Absent => Status::Absent,
        Condition::Slower => Status::Slower,
    };
    Check { name: found.name.into(), status, finding: found.text, fix: found.fix }
}

fn device_checks(info: &DeviceInfo) -> Vec<Check> {
    let device = info.id.to_string();
    let memory = match Device::open(info.id).and_then(|device| device.memory()) {
        Ok((free, total)) => format!("{} of {} free", ByteSize(free), ByteSize(total)),
        Err(error) => {
            return vec![slower(&device, format!("{}: {error}", info.name), "check that its driver works")];
        }
    };
    let kind =
        if info.is_integrated && info.reads_pageable_memory { ", shares the host's memory" } else { "" };
    let node = match (info.numa_node, numa::nodes().len()) {
        (Some(node), 2..) => format!(", NUMA node {node}"),
        _ => String::new(),
    };
    let converts = if info.has_kernels { "" } else { ", copies only: no kernels are compiled for it" };
    let finding =
        format!("{}, {memory}, {}, {}{node}{kind}{converts}", info.name, info.architecture, info.pci);
    let mut checks = vec![ok(&device, finding)];
    if cfg!(target_os = "linux") {
        let directory = Path::new("/sys/bus/pci/devices").join(&info.pci);
        checks.push(link(&format!("{device} PCIe link"), &directory));
        checks.push(window(&format!("{device} BAR"), &directory, info));
    }
    checks
}

/// The speed of copies: a link that was trained to fewer lanes than it has is a broken slot or riser.
fn link(name: &str, directory: &Path) -> Check {
    let text = |file: &str| fs::read_to_string(directory.join(file)).map(|text| text.trim().to_owned()).ok();
    let lanes = |file: &str| text(file)?.parse::<u32>().ok();
    match (text("max_link_speed"), lanes("current_link_width"), lanes("max_link_width")) {
        (Some(speed), Some(width), Some(most)) if width < most => slower(
            name,
            format!("{width} of {most} lanes at up to {speed}"),
            "check slot, riser and BIOS; in a virtual machine this may be all that is shown",
        ),
        (Some(speed), Some(width), _) => ok(name, format!("{width} lanes at up to {speed}")),
        _ => ok(name, "the system does not show it"),
    }
}

/// The window through which drives and cards reach the device's memory.
fn window(name: &str, directory: &Path, info: &DeviceInfo) -> Check {
    let resources = fs::read_to_string(directory.join("resource")).unwrap_or_default();
    let Some((number, bytes)) = largest_bar(&resources) else {
        return ok(name, "the system does not show it");
    };
    let share = match bytes < info.memory_bytes {
        true => "less than the device's memory, enough for the direct path's buffers",
        false => "all of the device's memory",
    };
    ok(name, format!("BAR{number}, {}: {share}", ByteSize(bytes)))
}

/// Number and size of the largest region of a PCI device, from the lines `start end flags` of its file `resource`; the first
/// of equals. That is its memory, whichever number a vendor gives it.
fn largest_bar(resources: &str) -> Option<(usize, u64)> {
    /// Lines of the regions. Those after them are of the ROM and of virtual functions.
    const REGIONS: usize = 6;
    let hex = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let bytes = |line: &str| {
        let mut words = line.split_whitespace();
        let (start, end) = (hex(words.next()?)?, hex(words.next()?)?);
        (end > start).then(|| end - start + 1)
    };
    let regions = resources.lines().take(REGIONS).enumerate();
    let sized = regions.filter_map(|(number, line)| Some((number, bytes(line)?)));
    sized.reduce(|largest, next| if next.1 > largest.1 { next } else { largest })
}

/// For each device, whether it can be filled past the host from the file system of a file.
pub(super) fn path_checks(name: &str, source: &dyn Source) -> Vec<Check> {
    // No other system has a direct path.
    let found = if cfg!(target_os = "linux") { devices().unwrap_or_default() } else { Vec::new() };
    found
        .iter()
        .map(|info| {
            let name = format!("{name}: gds to {}", info.id);
            match prove(info, source) {
                Ok(proof) => ok(&name, proof),
                Err(Unavailable { reason, fix }) => {
                    let finding = format!("{reason}; loads are staged through host memory");
                    Check { name, status: Status::Absent, finding, fix }
                }
            }
        })
        .collect()
}

fn prove(info: &DeviceInfo, source: &dyn Source) -> Result<String, Unavailable> {
    if let Some(why) = source.direct_refusal() {
        return Err(why.clone());
    }
    let device = Device::open(info.id).map_err(|error| Unavailable::new(error.to_string(), ""))?;
    device.may_have_direct_path()?;
    gds::prove(&device, source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_a_region_is_read() {
        let resources = "0x00000000d2000000 0x00000000d2ffffff 0x0000000000040200\n\
                         0x0000021000000000 0x00000217ffffffff 0x000000000014220c\n\
                         0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        assert_eq!(largest_bar(resources), Some((1, 32 << 30)));
        let first = "0x0000021000000000 0x00000217ffffffff 0x000000000014220c\n\
                     0x00000000d2000000 0x00000000d2ffffff 0x0000000000040200\n";
        assert_eq!(largest_bar(first), Some((0, 32 << 30)));
        // Two of one size, ROM, and the regions of virtual functions, which are larger.
        let small = "0x00000000d2000000 0x00000000d2ffffff 0x0000000000040200\n";
        let large = "0x0000021000000000 0x0000031fffffffff 0x000000000014220c\n";
        let lines = [vec![small; 2], vec![first], vec![small; 2], vec![large; 7]].concat();
        assert_eq!(lines.concat().lines().count(), 13);
        assert_eq!(largest_bar(&lines.concat()), Some((2, 32 << 30)));
        assert_eq!(largest_bar(&small.repeat(6)), Some((0, 16 << 20)));
        assert_eq!(largest_bar("0x0000000000000000 0x0000000000000000 0x0000000000000000\n"), None);
    }
}
