//! Where the vendor's library may lie.
#![forbid(unsafe_code)]

use crate::setters::setters;
use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
};

pub(super) const NAME: &str = "libhf3fs_api_shared.so";
const WELL_KNOWN: [&str; 3] =
    ["/usr/lib", "/usr/local/lib", "/usr/local/3fs/src/lib/rs/hf3fs-usrbio-sys/lib"];

/// Where to look for the vendor's library, in this order: the file named here, `HF3FS_LIB_DIR`, `LD_LIBRARY_PATH`, the
/// directories named here, wherever the dynamic linker looks, and where the vendor's guides put it.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct LibrarySearch {
    /// The library itself. Nothing else is looked at.
    pub library: Option<PathBuf>,
    /// Directories that the caller knows of, such as those beside the Python package `hf3fs_py_usrbio`.
    pub directories: Vec<PathBuf>,
}

setters! {
    LibrarySearch {
        library: PathBuf => Some,
        directories: Vec<PathBuf>,
    }
}

/// One place, and whether the dynamic linker has to say if the library is there.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Candidate {
    File(PathBuf),
    Directory(PathBuf),
    Linker,
}

impl LibrarySearch {
    pub(super) fn candidates(&self) -> Vec<Candidate> {
        let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
        self.candidates_with(variable("HF3FS_LIB_DIR").as_deref(), variable("LD_LIBRARY_PATH").as_deref())
    }

    fn candidates_with(&self, lib_dir: Option<&OsStr>, library_path: Option<&OsStr>) -> Vec<Candidate> {
        if let Some(library) = &self.library {
            return vec![Candidate::File(library.clone())];
        }
        let paths =
            library_path.into_iter().flat_map(env::split_paths).filter(|path| !path.as_os_str().is_empty());
        let before =
            lib_dir.map(PathBuf::from).into_iter().chain(paths).chain(self.directories.iter().cloned());
        before
            .map(Candidate::Directory)
            .chain([Candidate::Linker])
            .chain(WELL_KNOWN.map(PathBuf::from).map(Candidate::Directory))
            .collect()
    }
}

/// The library in a directory: by its name, or by that with something behind.
pub(super) fn in_directory(directory: &Path) -> Option<PathBuf> {
    let exact = directory.join(NAME);
    if exact.is_file() {
        return Some(exact);
    }
    let names = fs::read_dir(directory).ok()?.flatten().map(|entry| entry.path());
    names
        .filter(|path| {
            path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(NAME.as_bytes()))
        })
        .filter(|path| path.is_file())
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_looked_at_in_the_documented_order() {
        let search = LibrarySearch { library: None, directories: vec!["/site/hf3fs_py_usrbio.libs".into()] };
        let found = search.candidates_with(Some("/env".as_ref()), Some("/a::/b".as_ref()));
        let directory = |path: &str| Candidate::Directory(path.into());
        let expected = ["/env", "/a", "/b", "/site/hf3fs_py_usrbio.libs"].map(directory);
        assert_eq!(found[..4], expected);
        assert_eq!(found[4], Candidate::Linker);
        assert_eq!(found[5..], WELL_KNOWN.map(directory));
    }

    #[test]
    fn a_named_library_is_the_only_candidate() {
        let search = LibrarySearch { library: Some("/x.so".into()), directories: vec!["/site".into()] };
        assert_eq!(search.candidates_with(Some("/env".as_ref()), None), [Candidate::File("/x.so".into())]);
    }

    #[test]
    fn a_library_with_a_version_behind_its_name_is_found() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(in_directory(directory.path()), None);
        let versioned = directory.path().join("libhf3fs_api_shared.so.1");
        fs::write(&versioned, "").unwrap();
        assert_eq!(in_directory(directory.path()), Some(versioned));
        let exact = directory.path().join(NAME);
        fs::write(&exact, "").unwrap();
        assert_eq!(in_directory(directory.path()), Some(exact));
    }
}
