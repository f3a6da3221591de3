//! The namespace that a directory of vLLM's belongs to. Its blocks do not name their namespace, so a directory has one
//! owner: a claim beside the namespaces, made before the owner's description, and never replaced while it can be read.
#![forbid(unsafe_code)]

use super::{
    failed,
    names::{self, Tree},
    namespaces::taken,
    writer::Writer,
};
use crate::{
    NamespaceId, Result,
    disk::RealDisk,
    layout::directory::{Described, described, of_namespace, read_description},
};
use std::{
    io,
    path::{Path, PathBuf},
};

/// Times that a claim is read again which another process made meanwhile.
const MOST_ATTEMPTS: usize = 8;

/// The owner of a tree: by the claim, or, in a store of a version that made none, the described namespace with the
/// lowest identity. `None` if it has none yet.
///
/// # Errors
/// If the system cannot read the claim: it may name another owner.
fn owner(disk: &RealDisk, root: &Path, tree: &Tree, described: &Described) -> Result<Option<NamespaceId>> {
    match claimed(disk, root, tree) {
        Ok(Some((id, _))) => Ok(Some(id)),
        Err(error) if !is_damage(&error) => Err(failed("reading", &path(root, tree))(error)),
        _ => Ok(lowest(root, tree, described).map(|(id, _)| id)),
    }
}

/// An error if another namespace is the owner of a tree.
///
/// # Errors
/// [`Error::InvalidOption`](crate::Error::InvalidOption) if it is; that of reading its claim.
pub(super) fn expect(
    disk: &RealDisk,
    root: &Path,
    tree: &Tree,
    id: NamespaceId,
    described: &Described,
) -> Result<()> {
    match owner(disk, root, tree, described)? {
        Some(owner) if owner != id => Err(taken(tree, owner)),
        _ => Ok(()),
    }
}

/// Makes a namespace the owner of its tree, if that has none.
///
/// # Errors
/// [`Error::InvalidOption`](crate::Error::InvalidOption) if another namespace is the owner.
pub(super) fn claim(
    disk: &RealDisk,
    writer: &Writer,
    root: &Path,
    tree: &Tree,
    id: NamespaceId,
    description: &str,
) -> Result<()> {
    let path = path(root, tree);
    for _ in 0..MOST_ATTEMPTS {
        let there = claimed(disk, root, tree);
        if let Ok(Some((owner, _))) = there {
            return if owner == id { Ok(()) } else { Err(taken(tree, owner)) };
        }
        let there_are = described(disk, root)?;
        let (_, first) = lowest(root, tree, &there_are).unwrap_or((id, description));
        let made = match there {
            Ok(_) => writer.write_new_file(disk, &path, first.as_bytes()),
            // It may be another namespace's, and good.
            Err(error) if !is_damage(&error) => return Err(failed("reading", &path)(error)),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "a claim cannot be read, and is made anew");
                writer.write_file(disk, &path, first.as_bytes())
            }
        };
        match made {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed("making", &path)(error));
            }
            // What is there now says who was first.
            _ => {}
        }
    }
    Err(failed("making", &path)(io::Error::other("it changes all the time")))
}

/// Whether a claim was read, or is no file, and is no claim; rather than an error of the system's.
fn is_damage(error: &io::Error) -> bool {
    error.raw_os_error().is_none()
}

/// The namespace that a claim names, and its description.
fn claimed(disk: &RealDisk, root: &Path, tree: &Tree) -> io::Result<Option<(NamespaceId, String)>> {
    let description = match read_description(disk, &path(root, tree)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        description => description?,
    };
    let id = NamespaceId::of_description(&description);
    if !is_of(root, tree, id, &description) {
        return Err(io::Error::other("it describes no namespace with this directory"));
    }
    Ok(Some((id, description)))
}

fn lowest<'a>(root: &Path, tree: &Tree, described: &'a Described) -> Option<(NamespaceId, &'a str)> {
    let mut descriptions = described.iter().filter_map(|(id, text)| Some((*id, text.as_deref().ok()?)));
    descriptions.find(|(id, text)| is_of(root, tree, *id, text))
}

fn is_of(root: &Path, tree: &Tree, id: NamespaceId, description: &str) -> bool {
    Tree::of(root, of_namespace(root, id), description).is_ok_and(|other| other == *tree)
}

fn path(root: &Path, tree: &Tree) -> PathBuf {
    let mut name = tree.root().file_name().unwrap_or_default().to_owned();
    name.push(names::CLAIM_SUFFIX);
    root.join(names::NAMESPACES).join(name)
}
