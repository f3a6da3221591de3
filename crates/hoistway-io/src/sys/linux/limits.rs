//! How much more memory this process may use: the machine's, and that of every cgroup it is in.
#![forbid(unsafe_code)]

use super::read_number;
pub use crate::sys::common::MemoryLimit;
use std::{
    fs,
    path::{Path, PathBuf},
};

const MEMINFO: &str = "/proc/meminfo";

/// A place that tells a limit and what it leaves.
#[derive(Clone, Debug)]
pub struct LimitSource(Scope);

#[derive(Clone, Debug)]
enum Scope {
    Machine,
    /// A group, and which of its limits.
    Cgroup(PathBuf, Limit),
}

/// Returns every limit that applies to this process. Which ones do rarely changes; what they leave always does.
pub fn sources() -> Vec<LimitSource> {
    let mut sources = vec![LimitSource(Scope::Machine)];
    sources.extend(cgroups(
        &String::from_utf8_lossy(&fs::read("/proc/self/cgroup").unwrap_or_default()),
        &String::from_utf8_lossy(&fs::read("/proc/self/mountinfo").unwrap_or_default()),
    ));
    sources
}

impl LimitSource {
    /// Reads the limit and what it leaves; `None` if it sets none or cannot be read.
    pub fn read(&self) -> Option<MemoryLimit> {
        match &self.0 {
            Scope::Machine => machine(&fs::read_to_string(MEMINFO).unwrap_or_default()),
            Scope::Cgroup(group, limit) => group_limit(group, limit),
        }
    }

    /// Returns whether memory counts as soon as it is allocated, touched or not. On Linux what is touched counts.
    pub fn counts_allocated(&self) -> bool {
        false
    }

    /// Returns the file that the limit stands in. Processes under the same limit have the same file.
    pub fn file(&self) -> PathBuf {
        match &self.0 {
            Scope::Machine => MEMINFO.into(),
            Scope::Cgroup(group, limit) => group.join(limit.file),
        }
    }
}

fn machine(meminfo: &str) -> Option<MemoryLimit> {
    let kib = |key: &str| -> Option<u64> {
        let line = meminfo.lines().find(|line| line.split(':').next() == Some(key))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    Some(MemoryLimit {
        name: "the machine's free memory".into(),
        available_bytes: kib("MemAvailable")?.saturating_mul(1024),
        total_bytes: kib("MemTotal")?.saturating_mul(1024),
    })
}

/// Limits of this process's memory cgroup and of those around it, as far as they are visible.
fn cgroups(proc_cgroup: &str, mountinfo: &str) -> Vec<LimitSource> {
    let mut sources = Vec::new();
    for line in proc_cgroup.lines() {
        // hierarchy:controllers:path; version 2 has hierarchy 0 and no controllers.
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let version = if controllers.is_empty() {
            Version::V2
        } else if controllers.split(',').any(|controller| controller == "memory") {
            Version::V1
        } else {
            continue;
        };
        let Some((mount_point, root)) = cgroup_mount(mountinfo, version) else {
            continue;
        };
        // Inside a container the mount may show only part of the hierarchy: the path counts from its root.
        let path = Path::new(path);
        let below = path.strip_prefix(&root).or_else(|_| path.strip_prefix("/")).unwrap_or(path);
        let group = mount_point.join(below);
        let ancestors = group.ancestors().take_while(|ancestor| ancestor.starts_with(&mount_point));
        let limits = |group: &Path| {
            let of = |limit: &Limit| LimitSource(Scope::Cgroup(group.to_owned(), *limit));
            version.limits().iter().map(of).collect::<Vec<_>>()
        };
        sources.extend(ancestors.flat_map(limits));
    }
    sources
}

/// A version of control groups.
#[derive(Clone, Copy, Debug)]
enum Version {
    V1,
    V2,
}

/// The files that say what a group may use and what it does.
#[derive(Clone, Copy, Debug)]
struct Limit {
    file: &'static str,
    usage_file: &'static str,
    /// Lines of `memory.stat` whose bytes the kernel frees when it needs room.
    reclaimable: [&'static str; 2],
}

impl Version {
    fn limits(self) -> &'static [Limit] {
        const V1: Limit = Limit {
            file: "memory.limit_in_bytes",
            usage_file: "memory.usage_in_bytes",
            reclaimable: ["total_inactive_file", "total_active_file"],
        };
        const MAX: Limit = Limit {
            file: "memory.max",
            usage_file: "memory.current",
            reclaimable: ["inactive_file", "active_file"],
        };
        // The kernel slows a group above this one down until it hardly moves.
        const HIGH: Limit = Limit { file: "memory.high", ..MAX };
        match self {
            Self::V1 => &[V1],
            Self::V2 => &[MAX, HIGH],
        }
    }
}

/// Mount point, and the cgroup that is mounted there.
fn cgroup_mount(mountinfo: &str, version: Version) -> Option<(PathBuf, PathBuf)> {
    mountinfo.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut after = after.split(' ');
        let kind = after.next()?;
        let options = after.nth(1)?;
        let wanted = match version {
            Version::V1 => kind == "cgroup" && options.split(',').any(|option| option == "memory"),
            Version::V2 => kind == "cgroup2",
        };
        let mut fields = before.split(' ').skip(3);
        let (root, mount_point) = (fields.next()?, fields.next()?);
        wanted.then(|| (unescaped(mount_point), unescaped(root)))
    })
}

/// A path of `mountinfo`, where blanks, line feeds and backslashes are a backslash and three octal digits.
fn unescaped(field: &str) -> PathBuf {
    let mut path = String::new();
    let mut rest = field;
    while let Some((before, after)) = rest.split_once('\\') {
        path.push_str(before);
        match after.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if byte.is_ascii() => {
                path.push(byte.into());
                rest = &after[3..];
            }
            _ => {
                path.push('\\');
                rest = after;
            }
        }
    }
    path.push_str(rest);
    path.into()
}

fn group_limit(group: &Path, limit: &Limit) -> Option<MemoryLimit> {
    // "max" in version 2 is no number; version 1 writes a number near 2^63 for the same.
    let total = read_number::<u64>(group.join(limit.file)).filter(|&total| total < 1 << 60)?;
    let used: u64 = read_number(group.join(limit.usage_file))?;
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let reclaimable: u64 = stat
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(key, _)| limit.reclaimable.contains(key))
        .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
        .sum();
    Some(MemoryLimit {
        name: format!("the cgroup limit {}", group.join(limit.file).display()),
        available_bytes: total.saturating_sub(used.saturating_sub(reclaimable)),
        total_bytes: total,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_itself_is_a_limit() {
        let limit =
            machine("MemTotal:       24684092 kB\nMemFree: 1 kB\nMemAvailable:   23000000 kB\n").unwrap();
        assert_eq!(limit.available_bytes, 23_000_000 * 1024);
        let total = |source: &LimitSource| source.read().map_or(0, |limit| limit.total_bytes);
        assert!(sources().iter().any(|source| total(source) > 0), "this machine has memory");
    }

    #[test]
    fn both_cgroup_versions_are_read_up_to_their_roots() {
        let root = tempfile::tempdir().unwrap();
        let mount = |name: &str| {
            let mount = root.path().join(name);
            fs::create_dir_all(mount.join("pod/app")).unwrap();
            mount
        };
        let (v1, v2) = (mount("v1"), mount("v 2"));
        let write = |path: PathBuf, text: &str| fs::write(path, text).unwrap();
        write(v1.join("pod/memory.limit_in_bytes"), "1000\n");
        write(v1.join("pod/memory.usage_in_bytes"), "700\n");
        write(v1.join("pod/memory.stat"), "cache 5\ntotal_inactive_file 200\n");
        write(v1.join("pod/app/memory.limit_in_bytes"), "9223372036854771712\n");
        write(v2.join("pod/app/memory.max"), "500\n");
        write(v2.join("pod/app/memory.current"), "100\n");
        write(v2.join("pod/memory.max"), "max\n");
        write(v2.join("pod/memory.high"), "300\n");
        write(v2.join("pod/memory.current"), "250\n");
        let mountinfo = format!(
            "30 25 0:26 / {} rw - cgroup cgroup rw,memory\n31 25 0:27 /kube {} rw shared:1 - cgroup2 cgroup2 rw\n",
            v1.display(),
            v2.display().to_string().replace(' ', "\\040")
        );
        let found = cgroups("4:cpu,cpuacct:/\n5:memory:/pod/app\n0::/kube/pod/app\n", &mountinfo);
        let found: Vec<MemoryLimit> = found.iter().filter_map(LimitSource::read).collect();
        let available: Vec<u64> = found.iter().map(|limit| limit.available_bytes).collect();
        assert_eq!(available, [500, 400, 50], "{found:?}");
        assert!(found[2].name.ends_with("memory.high"), "{found:?}");
    }
}
