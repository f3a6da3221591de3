//! Names and folders of the files of a store with layout `files`.
//!
//! ```text
//! <root>/STORE                                            superblock
//! <root>/UNSYNCED                                         whether there may be blocks that no sync covers
//! <root>/ns/<namespace>/NAMESPACE.json                    description
//! <root>/ns/<directory>.claim                             description of the namespace that a directory of vLLM's
//!                                                         belongs to
//! <root>/ns/<namespace>/EXPIRING                          whether there are blocks that expire
//! <root>/ns/<namespace>/<hh>/<fingerprint>.kvb            a block: its shards, then a page that describes it
//! <root>/<directory>/<hhh>/<hh>_g<group>/<hash>.bin       a block as vLLM's tier `fs` writes it: the payload alone
//! <root>/w-<writer>/                                      a writing process: its lease, and files that are not whole yet
//! ```
#![forbid(unsafe_code)]

use crate::{Error, Fingerprint, NamespaceDescription, Result};
use std::path::{Component, Path, PathBuf};

#[cfg(test)]
pub(super) use crate::layout::directory::DESCRIPTION;
pub(super) use crate::layout::directory::{LEASE, NAMESPACES, SUPERBLOCK, WRITER_PREFIX};

pub(super) const UNSYNCED: &str = "UNSYNCED";
/// Is there if some blocks of the namespace have a time of expiry, which is in their files alone.
pub(super) const EXPIRING: &str = "EXPIRING";
/// Ends the name of the claim of a directory of vLLM's.
pub(super) const CLAIM_SUFFIX: &str = ".claim";
/// In [`NamespaceDescription::other`]: the directory below the root that vLLM's tier `fs` would use, as
/// `<model>_<12 hexadecimal digits>_r<rank>`.
pub(super) const VLLM_DIRECTORY: &str = "vllm_directory";

/// Bytes of the number of a cache group, at the end of vLLM's keys.
const GROUP_LEN: usize = 4;
/// Hash bytes that vLLM's directories are named by.
const LEAST_HASH_LEN: usize = 3;
/// A name must not be longer than file systems allow.
const MOST_HASH_LEN: usize = 120;

/// The folders with the blocks of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Tree {
    /// In files of this layout, with a page that describes the block behind the payload.
    Described(PathBuf),
    /// In files as vLLM writes them.
    Bare(PathBuf),
}

/// The block that a file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Named {
    Fingerprint(Fingerprint),
    Key(Vec<u8>),
}

impl Tree {
    /// The tree of a namespace with this description, whose directory is `namespace`.
    pub(super) fn of(root: &Path, namespace: PathBuf, description: &str) -> Result<Self> {
        // One that another version wrote, with fields that this one does not know, has no such directory.
        let description: NamespaceDescription = serde_json::from_str(description).unwrap_or_default();
        let Some(directory) = description.other.get(VLLM_DIRECTORY) else {
            return Ok(Self::Described(namespace));
        };
        let mut components = Path::new(directory).components();
        let is_plain = matches!(
            (components.next(), components.next()),
            (Some(Component::Normal(name)), None) if name == directory.as_str()
        );
        let is_ours = [SUPERBLOCK, NAMESPACES, UNSYNCED].contains(&directory.as_str())
            || directory.starts_with(WRITER_PREFIX)
            || directory.starts_with(SUPERBLOCK);
        if !is_plain || is_ours {
            return Err(Error::InvalidOption {
                option: VLLM_DIRECTORY,
                value: directory.clone(),
                reason:
                    "it must be the name of one directory below the store's root, such as model_0123456789ab_r0"
                        .into(),
            });
        }
        Ok(Self::Bare(root.join(directory)))
    }

    pub(super) fn root(&self) -> &Path {
        match self {
            Self::Described(path) | Self::Bare(path) => path,
        }
    }

    pub(super) fn is_bare(&self) -> bool {
        matches!(self, Self::Bare(_))
    }

    /// The file of a block; `None` if none can have its key, or if its key is needed, and not known.
    pub(super) fn path(&self, fingerprint: Fingerprint, key: Option<&[u8]>) -> Option<PathBuf> {
        match self {
            Self::Described(root) => {
                let name = format!("{fingerprint:?}");
                Some(root.join(&name[..2]).join(name + ".kvb"))
            }
            Self::Bare(root) => {
                let key = key?;
                let (hash, group) = key.split_at_checked(key.len().checked_sub(GROUP_LEN)?)?;
                if !(LEAST_HASH_LEN..=MOST_HASH_LEN).contains(&hash.len()) {
                    return None;
                }
                let group = u32::from_be_bytes(group.try_into().ok()?);
                let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
                let directory = root.join(&hash[..3]).join(format!("{}_g{group}", &hash[3..5]));
                Some(directory.join(hash + ".bin"))
            }
        }
    }

    /// How many levels of directories there are above the files.
    pub(super) fn depth(&self) -> usize {
        match self {
            Self::Described(_) => 1,
            Self::Bare(_) => 2,
        }
    }

    /// Which block a file is, by the directory that it is in and its name. `None` if it is no block of this tree.
    pub(super) fn parse(&self, directory: &Path, name: &str) -> Option<Named> {
        let named = match self {
            Self::Described(_) => {
                Named::Fingerprint(Fingerprint(unhex(name.strip_suffix(".kvb")?)?.try_into().ok()?))
            }
            Self::Bare(_) => {
                let (_, group) = directory.file_name()?.to_str()?.split_once("_g")?;
                let mut key = unhex(name.strip_suffix(".bin")?)?;
                key.extend(group.parse::<u32>().ok()?.to_be_bytes());
                Named::Key(key)
            }
        };
        // Only the name that we would give is one that we look for.
        let path = match &named {
            Named::Fingerprint(fingerprint) => self.path(*fingerprint, None)?,
            Named::Key(key) => self.path(Fingerprint([0; 16]), Some(key))?,
        };
        (path == directory.join(name)).then_some(named)
    }
}

/// Bytes from lower-case hexadecimal digits.
fn unhex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || !text.is_ascii() {
        return None;
    }
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn vllm(directory: &str) -> Result<Tree> {
        let description = NamespaceDescription {
            other: [(VLLM_DIRECTORY.into(), directory.into())].into(),
            ..Default::default()
        };
        Tree::of(Path::new("/root"), "/root/ns/1".into(), &description.to_json()?)
    }

    #[test]
    fn vllm_finds_its_files() {
        let tree = vllm("org_model_0123456789ab_r3").unwrap();
        let mut key = vec![0xab; 32];
        key[..3].copy_from_slice(&[0x01, 0x23, 0x45]);
        key.extend([0, 0, 0, 7]);
        let path = tree.path(Fingerprint([0; 16]), Some(&key)).unwrap();
        let rest = "ab".repeat(29);
        assert_eq!(
            path.to_str().unwrap(),
            format!("/root/org_model_0123456789ab_r3/012/34_g7/012345{rest}.bin")
        );
    }

    #[test]
    fn directories_elsewhere_are_refused() {
        for directory in ["", ".", "..", "a/b", "/etc", "a/", "ns", "STORE", "UNSYNCED", "w-1"] {
            let refused = vllm(directory);
            assert!(matches!(refused, Err(Error::InvalidOption { .. })), "{directory}: {refused:?}");
        }
    }

    proptest! {
        #[test]
        fn names_are_read_as_they_are_written(
            fingerprint: [u8; 16], key in proptest::collection::vec(any::<u8>(), 0..140),
        ) {
            let fingerprint = Fingerprint(fingerprint);
            let described = Tree::Described("/n".into());
            let path = described.path(fingerprint, None).unwrap();
            let name = path.file_name().unwrap().to_str().unwrap();
            prop_assert_eq!(
                described.parse(path.parent().unwrap(), name),
                Some(Named::Fingerprint(fingerprint))
            );
            let bare = Tree::Bare("/b".into());
            match bare.path(fingerprint, Some(&key)) {
                None => prop_assert!(key.len() < 7 || key.len() > 124),
                Some(path) => {
                    let name = path.file_name().unwrap().to_str().unwrap();
                    prop_assert_eq!(bare.parse(path.parent().unwrap(), name), Some(Named::Key(key)));
                }
            }
        }

        #[test]
        fn no_name_is_taken_for_another(directory in "[0-9a-f]{1,3}(_g[0-9]{0,3})?", name in "[0-9a-fA-F+]{0,34}(.bin|.kvb|.tmp)?") {
            for tree in [Tree::Described("/n".into()), Tree::Bare("/n".into())] {
                let directory = Path::new("/n").join(&directory);
                if let Some(named) = tree.parse(&directory, &name) {
                    let path = match &named {
                        Named::Fingerprint(fingerprint) => tree.path(*fingerprint, None),
                        Named::Key(key) => tree.path(Fingerprint([0; 16]), Some(key)),
                    };
                    prop_assert_eq!(path, Some(directory.join(&name)));
                }
            }
        }
    }
}
