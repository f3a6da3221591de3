//! The permissions of a saved file: those of the files that it replaces.
#![forbid(unsafe_code)]

use crate::{Error, Result};
use rustix::{
    fs::{Gid, Mode, Uid, fchmod, fchown, fremovexattr, getxattr_query},
    io::Errno,
};
use std::{
    ffi::CStr,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// The mode of a new file before the process's mask is taken from it.
const NEW_FILE: Mode = Mode::from_raw_mode(0o666);

/// The attribute that an access control list is kept in.
const ACCESS_LIST: &CStr = c"system.posix_acl_access";

/// Mode and owner of a file that is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permissions {
    mode: Mode,
    /// The owner and group of the replaced file.
    owner: Option<(Uid, Gid)>,
}

impl Permissions {
    /// Returns those of a new file: what the process's mask leaves.
    pub fn of_new_file() -> Self {
        Self { mode: mode_of_new_files(), owner: None }
    }

    /// Returns those of a file that replaces the files of these paths: the rights that all of them give, and the owner and
    /// group of the first. If they have several groups, the group gets the rights of all others. Missing files do not count;
    /// if all are missing, it is a new file.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn replacing(paths: &[PathBuf]) -> Result<Self> {
        let mut replacing: Option<Self> = None;
        for path in paths {
            let stat = match fs::metadata(path) {
                Ok(stat) => stat,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(source) => {
                    let path = path.clone();
                    return Err(Error::Io { operation: "stat", path, range: None, source });
                }
            };
            // What runs as its owner or group does so by another right.
            let mut mode = Mode::from_raw_mode(stat.mode()) & Mode::from_raw_mode(0o777);
            if has_access_list(path) {
                mode = without_own_group(mode);
            }
            let owner = Some((Uid::from_raw(stat.uid()), Gid::from_raw(stat.gid())));
            let first = replacing.get_or_insert(Self { mode, owner });
            first.mode &= mode;
            if first.owner.map(|(_, gid)| gid) != owner.map(|(_, gid)| gid) {
                first.mode = without_own_group(first.mode);
            }
        }
        Ok(replacing.unwrap_or_else(Self::of_new_file))
    }

    /// Gives them to a complete file that has no name yet, as far as the process is allowed to, and never more rights. If the
    /// group cannot be given, the group gets the rights of all others. Adds a note of what the file system refuses.
    pub fn give(&self, file: &File, path: &Path, notes: &mut Vec<String>) {
        let mut mode = self.mode;
        let (uid, gid) = match (self.owner, file.metadata()) {
            (Some((uid, gid)), Ok(stat)) => (
                Some(uid).filter(|uid| uid.as_raw() != stat.uid()),
                Some(gid).filter(|gid| gid.as_raw() != stat.gid()),
            ),
            _ => (None, None),
        };
        if gid.is_some() && fchown(file, None, gid).is_err() {
            mode = without_own_group(mode);
        }
        // One that it has got from its folder gives rights that the replaced file did not give.
        if self.owner.is_some()
            && !matches!(
                fremovexattr(file, ACCESS_LIST),
                Ok(()) | Err(Errno::NODATA | Errno::NOTSUP | Errno::NOSYS)
            )
        {
            mode = without_own_group(mode);
        }
        if let Err(error) = fchmod(file, mode) {
            let wanted = mode.as_raw_mode();
            notes.push(format!("{} does not get the permissions {wanted:03o}: {error}", path.display()));
        }
        // The last step: afterwards the file may be another's.
        if uid.is_some() {
            // Only privileged processes may give files away; others keep what they write.
            let _ = fchown(file, uid, None);
        }
    }
}

/// Whether a file has an access control list. Then the mode shows the most that anyone on the list may do where it otherwise
/// shows what the group may do. A file system that does not answer may have one.
fn has_access_list(path: &Path) -> bool {
    !matches!(getxattr_query(path, ACCESS_LIST), Ok(0) | Err(Errno::NODATA | Errno::NOTSUP | Errno::NOSYS))
}

/// The mode with the rights of all others for the group, where those are fewer.
fn without_own_group(mode: Mode) -> Mode {
    let others = (mode & Mode::RWXO).as_raw_mode();
    mode & (!Mode::RWXG | Mode::from_raw_mode(others << 3))
}

/// The mode of any new file of this process. 0600 where /proc does not tell the mask: to ask by setting it would change it
/// for other threads.
fn mode_of_new_files() -> Mode {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    match mask.and_then(|mask| u32::from_str_radix(mask.trim(), 8).ok()) {
        Some(mask) => NEW_FILE & !Mode::from_raw_mode(mask),
        None => Mode::RUSR | Mode::WUSR,
    }
}
