//! What there is to say of Windows: large pages; of paths, sectors, BypassIO, and what makes reads of a file slower.
#![forbid(unsafe_code)]

use super::{Check, Status, ok, slower};
use crate::sys::block_device::{self, BypassIo, Sectors};
use bytesize::ByteSize;
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
        Ok(found) => bypass_io(name("BypassIO"), &found),
        Err(error) => {
            absent(name("BypassIO"), format!("this system or file system does not have it: {error}"))
        }
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

fn bypass_io(name: String, found: &BypassIo) -> Check {
    let driver = if found.has_storage_driver { "supports it" } else { "does not support it" };
    let filters = if found.blocks_filters { ", and a filter was kept from the volume for it" } else { "" };
    let more = format!("the driver of the drive {driver}{filters}");
    match &found.refusal {
        None => ok(&name, format!("can be used here; {more}")),
        Some(refusal) => absent(name, format!("a driver is in its way: {refusal}; {more}")),
    }
}

/// What only one purpose needs.
fn absent(name: String, finding: String) -> Check {
    Check { name, status: Status::Absent, finding, fix: String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bypass_io_names_the_driver_in_its_way() {
        let check = |refusal: Option<&str>, has_storage_driver, blocks_filters| {
            let refusal = refusal.map(str::to_owned);
            bypass_io("BypassIO".to_owned(), &BypassIo { refusal, has_storage_driver, blocks_filters })
        };
        let usable = check(None, true, false);
        assert_eq!(usable.finding, "can be used here; the driver of the drive supports it");
        let refused = check(Some("filter.sys: it encrypts"), false, true);
        assert!(matches!(refused.status, Status::Absent));
        assert_eq!(
            refused.finding,
            "a driver is in its way: filter.sys: it encrypts; the driver of the drive does not support it, \
             and a filter was kept from the volume for it"
        );
    }
}
