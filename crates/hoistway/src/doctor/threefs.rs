//! What there is to say of paths on a 3FS: whether USRBIO works, by which client, and what it needs.
#![forbid(unsafe_code)]

use super::{Check, Status, ok, slower, unknown_limit};
use crate::{
    route::{OpenMount, UsrbioClient},
    sys::{files, machine},
};
use bytesize::ByteSize;
use hoistway_io::file::LocalFile;

const SHARED_MEMORY: &str = "/dev/shm";
/// What one load to a device takes.
const ENOUGH_SHARED_MEMORY: u64 = 64 << 20;
/// At more than this, the vendor's library takes more memory for its table of files than loads do.
const MOST_FILES: u64 = 16 << 20;

/// Checks of a file on a 3FS. `name` makes the name of a check.
pub(super) fn checks(name: impl Fn(&str) -> String, file: &LocalFile) -> Vec<Check> {
    vec![usrbio(name("usrbio"), file), shared_memory(name("shared memory")), open_files(name("open files"))]
}

fn usrbio(name: String, file: &LocalFile) -> Check {
    // Examined through a directory, the file has a path of its own.
    let Some(path) = file.buffered_file().ok().and_then(|file| files::name(&file)) else {
        return slower(&name, "not examined: the system does not tell the path of the file", "mount /proc");
    };
    match OpenMount::of(file.device(), &path, UsrbioClient::Auto, &[]) {
        Ok(mount) => ok(&name, format!("works, by the {} client: {}", mount.client(), mount.reason())),
        Err(why) => slower(&name, format!("{}; loads read through the kernel instead", why.reason), why.fix),
    }
}

fn shared_memory(name: String) -> Check {
    let (free, total) = match files::space(SHARED_MEMORY.as_ref()) {
        Ok(space) => (space.free_bytes, space.total_bytes),
        Err(error) => {
            let finding = format!("{SHARED_MEMORY} cannot be used: {error}");
            return slower(&name, finding, "mount a tmpfs there, the one that the daemon of the 3FS has");
        }
    };
    let finding = format!("{} of {} free in {SHARED_MEMORY}", ByteSize(free), ByteSize(total));
    if free < ENOUGH_SHARED_MEMORY {
        let fix = "enlarge it (docker run --ipc=host, or --shm-size), or load with a smaller in_flight";
        return slower(&name, finding, fix);
    }
    ok(&name, finding)
}

fn open_files(name: String) -> Check {
    match machine::open_files().map(|limit| limit.maximum) {
        Err(error) => unknown_limit(&name, &error),
        Ok(Some(limit)) if limit <= MOST_FILES => ok(&name, format!("hard limit {limit}")),
        Ok(limit) => Check {
            name,
            status: Status::Absent,
            finding: format!(
                "hard limit {}: the vendor's library for 3FS is not loaded, since it takes 8 bytes for each",
                limit.map_or("none".into(), |limit| limit.to_string())
            ),
            fix: "ulimit -Hn 1048576, or docker run --ulimit nofile=1048576".into(),
        },
    }
}
