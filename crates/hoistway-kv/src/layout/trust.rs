//! Checks whether other users can change a store's directories.
#![forbid(unsafe_code)]

use super::Notice;
use crate::EventKind;
use std::{
    fs::Metadata,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// Levels of directories that are looked at: the root, writers and namespaces, and what is in those.
const LEVELS: usize = 3;
/// Most directories that are looked at.
const MOST_DIRECTORIES: usize = 1024;

/// Returns a warning if a user other than this process's and root can change directories of the store.
pub(crate) fn warning(root: &Path) -> Option<Notice> {
    let user = rustix::process::geteuid().as_raw();
    let mut first = None;
    let mut count = 0;
    for path in directories(root) {
        let Some(risk) = path.metadata().ok().and_then(|metadata| risk(&metadata, user)) else { continue };
        count += 1;
        first.get_or_insert((path, risk));
    }
    let (path, risk) = first?;
    let more = match count {
        1 => String::new(),
        2 => " (and 1 other directory of the store is like it)".into(),
        _ => format!(" (and {} other directories of the store are like it)", count - 1),
    };
    let reason = format!(
        "{} {risk}{more}: other users can remove or replace blocks; use a directory that this user alone can write to",
        path.display()
    );
    Some(Notice { kind: EventKind::UnsafeRoot, reason })
}

/// Returns which other users can change a directory, or `None`.
fn risk(directory: &Metadata, user: u32) -> Option<String> {
    let (owner, mode) = (directory.uid(), directory.mode());
    if owner != user && owner != 0 {
        return Some(format!("is owned by user {owner}"));
    }
    let is_sticky = mode & 0o1000 != 0;
    (mode & 0o022 != 0 && !is_sticky).then(|| format!("has the mode {:04o}", mode & 0o7777))
}

/// The root and directories below it, from the top; links are not followed.
fn directories(root: &Path) -> Vec<PathBuf> {
    let mut found = vec![root.to_owned()];
    let mut begin = 0;
    for _ in 1..LEVELS {
        let end = found.len();
        for number in begin..end {
            let Ok(entries) = std::fs::read_dir(&found[number]) else { continue };
            let is_directory = |entry: &std::fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
            let below = entries.filter_map(|entry| entry.ok().filter(is_directory));
            found.extend(
                below.take(MOST_DIRECTORIES - found.len().min(MOST_DIRECTORIES)).map(|entry| entry.path()),
            );
        }
        begin = end;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt};

    #[test]
    fn directories_that_others_can_write_to_are_warned_of() {
        let root = tempfile::tempdir().unwrap();
        let (namespaces, writer) = (root.path().join("ns"), root.path().join("ns/1"));
        fs::create_dir_all(&writer).unwrap();
        let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        for path in [root.path(), &namespaces, &writer] {
            set(path, 0o700);
        }
        assert_eq!(warning(root.path()), None);
        for path in [root.path(), &namespaces, &writer] {
            for (mode, is_safe) in [(0o770, false), (0o702, false), (0o1777, true), (0o755, true)] {
                set(path, mode);
                let warned = warning(root.path());
                assert_eq!(warned.is_none(), is_safe, "{mode:o} {path:?}: {warned:?}");
                assert!(warned.is_none_or(|warned| warned.reason.contains(&format!("mode {mode:04o}"))));
            }
            set(path, 0o700);
        }
    }

    #[test]
    fn foreign_directories_are_risks_but_those_of_root_are_not() {
        let root = tempfile::tempdir().unwrap();
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let metadata = root.path().metadata().unwrap();
        assert_eq!(risk(&metadata, metadata.uid()), None);
        let other = risk(&metadata, metadata.uid() + 1);
        assert_eq!(other.is_some(), metadata.uid() != 0, "{other:?}");
    }
}
