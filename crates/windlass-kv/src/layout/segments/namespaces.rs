//! Namespaces: their descriptions on the disk, and the numbers that this process gives them.
#![forbid(unsafe_code)]

use super::{failed, names, root::Root};
use crate::{
    Error, NamespaceId, NamespaceOptions, Result,
    disk::{Disk, replace_file},
};
use std::{
    collections::HashMap,
    io,
    sync::{PoisonError, RwLock},
};

/// The longest description that is read.
const MAX_DESCRIPTION: usize = 1 << 20;

/// Namespaces by number.
#[derive(Debug, Default)]
pub(super) struct Namespaces(RwLock<Table>);

#[derive(Debug, Default)]
struct Table {
    /// By number; numbers that were found in no log are nobody's.
    ids: Vec<Option<NamespaceId>>,
    numbers: HashMap<NamespaceId, u16>,
    options: HashMap<NamespaceId, NamespaceOptions>,
}

impl Namespaces {
    /// The number of a namespace; a new one if it has none.
    pub(super) fn number(&self, id: NamespaceId) -> Result<u16> {
        if let Some(number) = self.known(id) {
            return Ok(number);
        }
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(number) = table.numbers.get(&id) {
            return Ok(*number);
        }
        let number = u16::try_from(table.ids.len())
            .map_err(|_| Error::InvalidRequest("a store has at most 65536 namespaces".into()))?;
        table.ids.push(Some(id));
        table.numbers.insert(id, number);
        Ok(number)
    }

    /// Takes in a number that a log of ours gave.
    pub(super) fn adopt(&self, number: u16, id: NamespaceId) {
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let len = table.ids.len().max(usize::from(number) + 1);
        table.ids.resize(len, None);
        table.ids[usize::from(number)] = Some(id);
        table.numbers.insert(id, number);
    }

    pub(super) fn known(&self, id: NamespaceId) -> Option<u16> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).numbers.get(&id).copied()
    }

    pub(super) fn id(&self, number: u16) -> Option<NamespaceId> {
        let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
        table.ids.get(usize::from(number)).copied().flatten()
    }

    /// All that have a number.
    pub(super) fn all(&self) -> Vec<(u16, NamespaceId)> {
        let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let numbered = (0..=u16::MAX).zip(&table.ids);
        numbered.filter_map(|(number, id)| Some((number, (*id)?))).collect()
    }

    pub(super) fn set_options(&self, id: NamespaceId, options: NamespaceOptions) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).options.insert(id, options);
    }

    pub(super) fn options(&self, id: NamespaceId) -> NamespaceOptions {
        let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
        table.options.get(&id).copied().unwrap_or_default()
    }
}

/// Writes a description down, unless it is there.
pub(super) fn describe(disk: &dyn Disk, root: &Root, id: NamespaceId, description: &str) -> Result<()> {
    let all = root.path.join(names::NAMESPACES);
    let directory = all.join(id.to_string());
    let path = directory.join(names::DESCRIPTION);
    let is_there =
        || disk.read_file(&path, MAX_DESCRIPTION).is_ok_and(|there| there == description.as_bytes());
    if is_there() {
        return Ok(());
    }
    // Other processes open the same one at the same moment.
    let _locked = root.lock()?;
    if is_there() {
        return Ok(());
    }
    for (directory, parent) in [(&all, &root.path), (&directory, &all)] {
        disk.create_directory(directory).map_err(failed("making", directory))?;
        disk.sync_directory(parent).map_err(failed("syncing", parent))?;
    }
    replace_file(disk, &path, description.as_bytes()).map_err(failed("writing", &path))
}

/// All that have been described. One whose description cannot be read is in no other's way.
pub(super) fn described(disk: &dyn Disk, root: &Root) -> Result<Vec<(NamespaceId, String)>> {
    let all = root.path.join(names::NAMESPACES);
    let listing = match disk.list(&all) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        listing => listing.map_err(failed("listing", &all))?,
    };
    let mut described = Vec::new();
    for file in listing {
        let Some(id) = names::parse_namespace(&file.name) else { continue };
        let path = all.join(file.name).join(names::DESCRIPTION);
        match disk.read_file(&path, MAX_DESCRIPTION) {
            Ok(bytes) => described.push((id, String::from_utf8_lossy(&bytes).into_owned())),
            // Somebody is about to write it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => root.warn_once(&path, &failed("reading", &path)(error)),
        }
    }
    described.sort();
    Ok(described)
}
