//! What this machine offers a load, what is missing, and how to fix it.
#![forbid(unsafe_code)]

mod devices;
#[cfg(feature = "objects")]
mod objects;
#[cfg(target_os = "linux")]
mod threefs;
#[cfg(windows)]
mod windows;

use crate::{
    catalog::{OpenFile, OpenOptions, SourceName},
    memory::limits,
    parallel,
    route::{Unavailable, probe_ring},
    source::registry,
    sys::{block_device, files, machine, numa},
};
use bytesize::ByteSize;
use hoistway_io::{
    file::{FileSystemKind, Probe},
    memory::HUGE_PAGE_BYTES,
};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io,
    path::Path,
};

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Check {
    /// What was looked at.
    pub name: String,
    /// Whether it is as it should be.
    pub status: Status,
    /// What was found.
    pub finding: String,
    /// What would make it better; empty if nothing needs to.
    pub fix: String,
}

/// Whether something is as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// As it should be.
    Ok,
    /// Not here, and needed only for one purpose.
    Absent,
    /// Loads work, but slower than they could.
    Slower,
    /// Loads fail.
    Broken,
}

/// Looks at the machine, and at the file systems of `paths` or the stores of URLs among them. Of an object of a store, at most
/// 136 MiB are read to measure the speed.
///
/// ```
/// use hoistway::doctor::{Status, examine};
/// for check in examine(&["."]) {
///     println!("{:?} {}: {}", check.status, check.name, check.finding);
/// }
/// ```
pub fn examine<P: AsRef<Path>>(paths: &[P]) -> Vec<Check> {
    examine_with(paths, &OpenOptions::default())
}

/// Does what [`examine`] does, with the endpoints and credentials of stores, and the cache, that the options say.
///
/// ```
/// use hoistway::{catalog::OpenOptions, doctor::examine_with};
/// assert!(!examine_with(&["."], &OpenOptions::default()).is_empty());
/// ```
pub fn examine_with<P: AsRef<Path>>(paths: &[P], options: &OpenOptions) -> Vec<Check> {
    #[cfg(not(feature = "objects"))]
    let _ = options;
    let mut checks = system();
    checks.push(cores());
    checks.extend(memory_limits());
    checks.push(numa_nodes());
    checks.extend(devices::checks());
    #[cfg(windows)]
    checks.extend(windows::adapters());
    for path in paths {
        let path = path.as_ref();
        let source = SourceName::from(path);
        if let Err(error) = source.check_meant() {
            let name = format!("{}: access", source.shown());
            checks.push(Check {
                name,
                status: Status::Broken,
                finding: error.to_string(),
                fix: String::new(),
            });
            continue;
        }
        checks.extend(match source {
            #[cfg(feature = "objects")]
            SourceName::Url(url) => objects::checks(&url, options),
            _ => path_checks(path),
        });
    }
    checks
}

fn ok(name: &str, finding: impl Into<String>) -> Check {
    Check { name: name.into(), status: Status::Ok, finding: finding.into(), fix: String::new() }
}

fn slower(name: &str, finding: impl Into<String>, fix: impl Into<String>) -> Check {
    Check { name: name.into(), status: Status::Slower, finding: finding.into(), fix: fix.into() }
}

/// What the system offers.
fn system() -> Vec<Check> {
    if cfg!(target_os = "linux") {
        return vec![
            kernel(),
            io_uring(),
            transparent_huge_pages(),
            reserved_huge_pages(),
            locked_memory(),
            open_files(),
        ];
    }
    #[cfg_attr(not(windows), expect(unused_mut, reason = "Windows has more"))]
    let mut checks = vec![ok("system", format!("Windows {}", machine::kernel_release()))];
    #[cfg(windows)]
    checks.extend([windows::large_pages(machine::large_pages()), windows::direct_storage()]);
    checks
}

fn kernel() -> Check {
    let release = machine::kernel_release();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= (6, 5) {
        return ok("kernel", format!("Linux {release}"));
    }
    let missing = match version {
        v if v >= (6, 1) => "cannot say exactly what the page cache holds (cachestat, 6.5)",
        v if v >= (5, 14) => "also cannot say how direct reads must be aligned (statx, 6.1)",
        _ => "also cannot fault memory in ahead of reads (MADV_POPULATE_WRITE, 5.14)",
    };
    slower("kernel", format!("Linux {release} {missing}"), "use Linux 6.5 or later")
}

fn io_uring() -> Check {
    match probe_ring() {
        Ok(()) => ok("io_uring", "rings can be made"),
        Err(Unavailable { reason, fix }) => {
            slower("io_uring", format!("{reason}; threads serve instead"), fix)
        }
    }
}

fn transparent_huge_pages() -> Check {
    const NAME: &str = "transparent huge pages";
    let setting = machine::transparent_huge_pages();
    let chosen = setting.as_deref().unwrap_or("not available");
    match chosen {
        "always" | "madvise" => ok(NAME, chosen),
        _ => slower(
            NAME,
            format!("{chosen}: first touch of memory takes 512 times as many page faults"),
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
    }
}

fn reserved_huge_pages() -> Check {
    let free = ByteSize(machine::free_huge_pages() * HUGE_PAGE_BYTES as u64);
    ok("reserved huge pages", format!("{free} free; only needed for huge_pages=reserved"))
}

fn locked_memory() -> Check {
    const NAME: &str = "locked memory";
    match machine::locked_memory().map(|limit| limit.current) {
        Ok(None) => ok(NAME, "unlimited"),
        Ok(Some(limit)) => ok(NAME, format!("{}; rings of recent kernels need none", ByteSize(limit))),
        Err(error) => unknown_limit(NAME, &error),
    }
}

fn open_files() -> Check {
    // A checkpoint file takes two descriptors.
    const ENOUGH: u64 = 1024;
    const NAME: &str = "open files";
    match machine::open_files().map(|limit| limit.current) {
        Ok(Some(limit)) if limit < ENOUGH => slower(
            NAME,
            format!("{limit}: enough for a checkpoint of {} files", limit.saturating_sub(32) / 2),
            "raise ulimit -n",
        ),
        Ok(limit) => ok(NAME, limit.map_or("unlimited".into(), |limit| limit.to_string())),
        Err(error) => unknown_limit(NAME, &error),
    }
}

fn unknown_limit(name: &str, error: &io::Error) -> Check {
    let fix = if cfg!(windows) { "" } else { "allow prlimit64 in the container's seccomp profile" };
    slower(name, format!("the system does not tell the limit: {error}"), fix)
}

fn cores() -> Check {
    ok("cores", parallel::cores().to_string())
}

fn memory_limits() -> Vec<Check> {
    limits()
        .into_iter()
        .map(|limit| {
            let (available, total) = (ByteSize(limit.available_bytes), ByteSize(limit.total_bytes));
            let finding = format!("{available} of {total} available");
            ok(&format!("memory: {}", limit.name), finding)
        })
        .collect()
}

fn numa_nodes() -> Check {
    match numa::nodes().as_slice() {
        [] | [_] => ok("NUMA", "one node"),
        nodes => {
            let listed: Vec<String> =
                nodes.iter().map(|node| format!("node {} with {} cores", node.id, node.cpus.len())).collect();
            slower(
                "NUMA",
                listed.join(", "),
                "load to host memory with numa=near_storage, or with numa=N for the node of the process that uses the tensors",
            )
        }
    }
}

/// What the file system of a path offers. Looks at the path itself if it is a file, else at a file in it.
fn path_checks(path: &Path) -> Vec<Check> {
    let name = |what: &str| format!("{}: {what}", path.display());
    let broken = |finding: String, fix: &str| {
        vec![Check { name: name("access"), status: Status::Broken, finding, fix: fix.into() }]
    };
    let file = match open_some_file(path) {
        Ok(Some(file)) => file,
        Ok(None) => {
            let fix = "name a file, or a directory that holds one";
            return vec![slower(&name("file system"), "not examined: there is no file here", fix)];
        }
        Err(error) => {
            return broken(format!("cannot be opened: {error}"), "check the path and its permissions");
        }
    };
    let open = OpenFile::from_file(file, path).map_err(crate::Error::from);
    let source = match open.and_then(registry::of_file) {
        Ok(source) => source,
        Err(error) => return broken(error.to_string(), ""),
    };
    let local = match source.local() {
        Ok(local) => local,
        Err(why) => return broken(why.reason, &why.fix),
    };
    let filesystem = local.filesystem();
    let queues = match block_device::queues(local.device()) {
        0 => String::new(),
        1 => ", one hardware queue".into(),
        several => format!(", {several} hardware queues"),
    };
    let mut checks = vec![ok(&name("file system"), format!("{filesystem}{queues}"))];
    checks.push(match local.direct_refusal() {
        None => ok(&name("direct reads"), "supported"),
        Some(_) if filesystem.kind == FileSystemKind::Memory => {
            ok(&name("direct reads"), "not needed: the files are in memory")
        }
        Some(Unavailable { reason, fix }) => slower(&name("direct reads"), reason, fix),
    });
    if cfg!(target_os = "linux") {
        checks.push(match local.ring_refusal() {
            None => ok(&name("io_uring"), "can be used here"),
            Some(why) => slower(&name("io_uring"), format!("{}; threads serve instead", why.reason), why.fix),
        });
    }
    checks.push(match local.probe() {
        Probe::Cachestat => ok(&name("page cache"), "its contents are known exactly (cachestat)"),
        Probe::Nowait => ok(&name("page cache"), "its contents are found by sampling (RWF_NOWAIT)"),
        Probe::Memory => ok(&name("page cache"), "the files are in memory"),
        Probe::None(Unavailable { reason, fix }) => slower(&name("page cache"), reason, fix),
    });
    #[cfg(target_os = "linux")]
    if crate::source::threefs::ThreeFs::of(&source).is_some() {
        checks.extend(threefs::checks(name, local));
    }
    #[cfg(windows)]
    checks.extend(windows::checks(name, local));
    checks.extend(devices::path_checks(&path.display().to_string(), &*source));
    checks
}

/// A file to examine a path by. In a directory without files, a nameless new one, if that can be made.
fn open_some_file(path: &Path) -> io::Result<Option<File>> {
    let kind = fs::metadata(path)?.file_type();
    if kind.is_file() {
        return File::open(path).map(Some);
    }
    // Opening anything else might wait for ever, as for a pipe.
    if !kind.is_dir() {
        return Ok(None);
    }
    for entry in fs::read_dir(path)? {
        let path = entry?.path();
        if path.is_file()
            && let Ok(file) = File::open(&path)
        {
            return Ok(Some(file));
        }
    }
    Ok(files::create_nameless(path).ok())
}
