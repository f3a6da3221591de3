//! Mount points of 3FS, from `/proc/self/mountinfo`.
#![forbid(unsafe_code)]

use crate::{Error, Result};
use std::{
    ffi::OsString,
    fs,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

const MOUNTINFO: &str = "/proc/self/mountinfo";
const TYPE: &[u8] = b"fuse.hf3fs";
const VIRTUAL: &str = "3fs-virt";

/// The mount point of the 3FS that `path` lies on.
///
/// # Errors
/// [`Error::System`] if there is no such path, [`Error::NotOn3fs`] if it lies elsewhere.
pub fn extract_mount_point(path: &Path) -> Result<PathBuf> {
    let real = fs::canonicalize(path).map_err(|error| Error::system("resolve the path", path, error))?;
    let mounts = Mounts::read()?;
    mounts
        .point_of(&real, |directory| directory.is_dir())
        .ok_or_else(|| Error::NotOn3fs { path: path.to_owned(), seen: mounts.points_of_3fs() })
}

/// Where a 3FS is mounted that this process sees.
///
/// # Errors
/// [`Error::System`] if the mounts cannot be listed.
pub fn mount_points() -> Result<Vec<PathBuf>> {
    Ok(Mounts::read()?.points_of_3fs())
}

struct Mounts(Vec<MountEntry>);

#[derive(Debug, PartialEq, Eq)]
struct MountEntry {
    device: Vec<u8>,
    point: PathBuf,
    is_3fs: bool,
}

impl Mounts {
    fn read() -> Result<Self> {
        let text = fs::read(MOUNTINFO)
            .map_err(|error| Error::system("list the mounts", Path::new(MOUNTINFO), error))?;
        Ok(Self::parse(&text))
    }

    fn parse(text: &[u8]) -> Self {
        Self(text.split(|&byte| byte == b'\n').filter_map(parse_line).collect())
    }

    /// `has_directory` says whether a directory exists.
    fn point_of(&self, path: &Path, has_directory: impl Fn(&Path) -> bool) -> Option<PathBuf> {
        // What covers the path is the longest mount point, and of mounts on the same point the last.
        let covering = self
            .0
            .iter()
            .filter(|mount| path.starts_with(&mount.point))
            .max_by_key(|mount| depth(&mount.point))?;
        if covering.point.ends_with(VIRTUAL) && covering.is_3fs {
            return covering.point.parent().map(Path::to_owned);
        }
        if has_directory(&covering.point.join(VIRTUAL).join("iovs")) {
            return Some(covering.point.clone());
        }
        if !covering.is_3fs {
            return None;
        }
        // A part of a 3FS that is mounted by itself: its registrations go to where 3fs-virt is mounted, or to where
        // the whole is.
        let same = |mount: &&MountEntry| mount.is_3fs && mount.device == covering.device;
        let virtual_alone = self.0.iter().filter(same).rfind(|mount| mount.point.ends_with(VIRTUAL));
        if let Some(mount) = virtual_alone {
            return mount.point.parent().map(Path::to_owned);
        }
        let whole =
            self.0.iter().filter(same).rfind(|mount| has_directory(&mount.point.join(VIRTUAL).join("iovs")));
        whole.map(|mount| mount.point.clone())
    }

    fn points_of_3fs(&self) -> Vec<PathBuf> {
        self.0.iter().filter(|mount| mount.is_3fs).map(|mount| mount.point.clone()).collect()
    }
}

fn depth(path: &Path) -> usize {
    path.components().count()
}

/// `36 35 98:0 /root /mount/point options [optional ...] - type source options`
fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&byte| byte == b' ');
    let device = fields.by_ref().nth(2)?.to_vec();
    let point = PathBuf::from(OsString::from_vec(unescaped(fields.by_ref().nth(1)?)));
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    point.has_root().then(|| MountEntry { device, is_3fs: kind == TYPE, point })
}

/// Blanks in paths are written as a backslash and three octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let escaped = match tail {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] if *first == b'\\' => {
                Some((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'))
            }
            _ => None,
        };
        bytes.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { &tail[3..] } else { tail };
    }
    bytes
}

/// `path` as C would have it, without a NUL inside.
pub(crate) fn c_path(path: &Path) -> Result<std::ffi::CString> {
    std::ffi::CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::Invalid(format!("{} has a NUL byte inside", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /mnt/3fs rw,nosuid - fuse.hf3fs hf3fs.main rw,user_id=0
31 22 0:41 / /mnt/3fs2 rw - ext4 /dev/vdb rw
32 30 0:42 / /mnt/3fs/scratch rw - tmpfs none rw
33 22 0:43 / /mnt/with\\040blank\\134 rw shared:2 master:1 - fuse.hf3fs x rw
34 22 0:40 /models /models ro - fuse.hf3fs hf3fs.main rw
35 22 0:44 /data /alone/data ro - fuse.hf3fs y rw
36 22 0:44 /3fs-virt /alone/3fs-virt rw - fuse.hf3fs y rw
37 22 0:45 / /other rw - fuse x rw
38 22 0:46 / /over rw - fuse.hf3fs x rw
39 22 0:47 / /over rw - tmpfs x rw
broken
40 22
";

    fn point(path: &str) -> Option<PathBuf> {
        let with_virtual = ["/mnt/3fs", "/mnt/with blank\\", "/other"];
        Mounts::parse(TEXT).point_of(Path::new(path), |directory| {
            with_virtual.iter().any(|point| directory == Path::new(point).join("3fs-virt/iovs"))
        })
    }

    #[test]
    fn a_path_belongs_to_the_mount_that_covers_it() {
        assert_eq!(point("/mnt/3fs"), Some("/mnt/3fs".into()));
        assert_eq!(point("/mnt/3fs/a/b.safetensors"), Some("/mnt/3fs".into()));
        assert_eq!(point("/mnt/3fs/3fs-virt/iovs"), Some("/mnt/3fs".into()));
        assert_eq!(point("/mnt/with blank\\/a"), Some("/mnt/with blank\\".into()));
    }

    #[test]
    fn neighbours_and_what_is_mounted_inside_or_over_do_not_belong_to_it() {
        for path in ["/", "/mnt/3fs2", "/mnt/3fs2/a", "/mnt/3fsx", "/mnt/3fs/scratch/a", "/over/a"] {
            assert_eq!(point(path), None, "{path}");
        }
    }

    #[test]
    fn a_file_system_of_another_type_counts_if_it_has_the_directory() {
        assert_eq!(point("/other/a"), Some("/other".into()));
    }

    #[test]
    fn a_part_mounted_alone_is_registered_where_the_virtual_directory_is() {
        assert_eq!(point("/models/a"), Some("/mnt/3fs".into()));
        assert_eq!(point("/alone/data/a"), Some("/alone".into()));
        assert_eq!(point("/alone/3fs-virt/iovs"), Some("/alone".into()));
    }

    #[test]
    fn mounts_of_3fs_are_listed_for_errors() {
        let error = extract_mount_point(Path::new("/proc")).unwrap_err();
        assert!(matches!(&error, Error::NotOn3fs { path, .. } if path == Path::new("/proc")), "{error}");
        assert!(matches!(
            extract_mount_point(Path::new("/proc/no-such-file")),
            Err(Error::System { action: "resolve the path", .. })
        ));
        assert_eq!(Mounts::parse(TEXT).points_of_3fs().len(), 6);
    }
}
