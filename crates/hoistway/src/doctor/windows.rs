//! What there is to say of Windows: large pages; of paths, sectors, BypassIO, and what makes reads of a file slower.
#![forbid(unsafe_code)]

use super::{Check, Status, ok, slower};
use crate::{
    device::{self, DeviceId, DeviceInfo},
    route::Unavailable,
    sys::block_device::{self, Sectors},
};
use bytesize::ByteSize;
use hoistway_directstorage::{Adapter, luid_text};
use hoistway_io::file::LocalFile;

/// Whether route `directstorage` has its libraries. They are looked for, and not loaded.
pub(super) fn direct_storage() -> Check {
    const NAME: &str = "DirectStorage";
    match hoistway_directstorage::find() {
        Ok(found) => {
            let version = found.version.as_deref().unwrap_or("of an unknown version");
            ok(NAME, format!("{version}, {}; its runtime stages what goes to a device", found.path.display()))
        }
        Err(why) => Check { fix: why.fix, ..absent(NAME.to_owned(), why.reason) },
    }
}

/// The adapters of D3D12, and which CUDA devices they are: route `directstorage` reaches these through buffers of D3D12.
pub(super) fn adapters() -> Vec<Check> {
    let devices: Vec<DeviceInfo> = device::devices().unwrap_or_default();
    let devices = devices.iter().filter(|device| matches!(device.id, DeviceId::Cuda(_)));
    adapter_checks(hoistway_directstorage::adapters(), &devices.collect::<Vec<_>>())
}

fn adapter_checks(found: Result<Vec<Adapter>, Unavailable>, devices: &[&DeviceInfo]) -> Vec<Check> {
    const NAME: &str = "D3D12";
    let adapters = match found {
        Ok(adapters) => adapters,
        Err(why) => return vec![Check { fix: why.fix, ..absent(NAME.to_owned(), why.reason) }],
    };
    let owners = |luid| devices.iter().filter(move |device| device.luid == Some(luid));
    let mut checks: Vec<Check> = adapters
        .iter()
        .filter(|adapter| !adapter.is_software || owners(adapter.luid).next().is_some())
        .map(|adapter| match owners(adapter.luid).next() {
            Some(device) => ok(NAME, format!("{adapter} is {}", device.id)),
            None => absent(NAME.to_owned(), format!("{adapter} is no CUDA device")),
        })
        .collect();
    let is_listed = |device: &DeviceInfo| adapters.iter().any(|adapter| Some(adapter.luid) == device.luid);
    checks.extend(devices.iter().filter(|device| !is_listed(device)).map(|device| {
        let luid = device.luid.map_or("no LUID".to_owned(), |luid| format!("LUID {}", luid_text(&luid)));
        let finding = format!("no adapter is {} ({luid}): route directstorage pins memory for it", device.id);
        slower(NAME, finding, "set its driver to the mode for graphics (WDDM)")
    }));
    checks
}

/// What keeps this user from large pages, or their length.
pub(super) fn large_pages(found: std::io::Result<usize>) -> Check {
    const NAME: &str = "large pages";
    match found {
        Ok(bytes) => ok(NAME, format!("of {}; only used for huge_pages=reserved", ByteSize(bytes as u64))),
        Err(error) => absent(NAME.to_owned(), format!("{error}; only needed for huge_pages=reserved")),
    }
}

/// Checks of a file. `name` makes the name of a check.
pub(super) fn checks(name: impl Fn(&str) -> String, file: &LocalFile) -> Vec<Check> {
    let file = match file.buffered_file() {
        Ok(file) => file,
        Err(error) => return vec![slower(&name("sectors"), format!("not examined: {error}"), "")],
    };
    let mut checks = vec![sectors(&name("sectors"), block_device::sectors(&file))];
    checks.push(match block_device::bypass_io(&file) {
        Ok(found) if found.refusal.is_none() => ok(&name("BypassIO"), found.to_string()),
        Ok(found) => absent(name("BypassIO"), found.to_string()),
        Err(error) => absent(name("BypassIO"), error.to_string()),
    });
    match block_device::hindrances(&file) {
        Ok(found) if found.is_empty() => {}
        Ok(found) => checks.push(slower(
            &name("attributes"),
            format!(
                "the file is {}: Windows carries out its transfers in other ways, and slower",
                found.join(", ")
            ),
            "copy it to a file that is not, on a local NTFS volume",
        )),
        Err(error) => checks.push(slower(&name("attributes"), format!("not known: {error}"), "")),
    }
    checks
}

fn sectors(name: &str, found: Option<Sectors>) -> Check {
    match found {
        Some(Sectors { logical, physical }) if logical == physical => ok(name, format!("{logical} bytes")),
        Some(Sectors { logical, physical }) => {
            ok(name, format!("{logical} bytes, on a drive that has {physical}"))
        }
        None => ok(name, "not reported; direct reads are aligned to 4096 bytes"),
    }
}

/// What only one purpose needs.
fn absent(name: String, finding: String) -> Check {
    Check { name, status: Status::Absent, finding, fix: String::new() }
}
