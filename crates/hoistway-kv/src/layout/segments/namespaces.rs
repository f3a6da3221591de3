//! Namespaces: their descriptions on the disk, and the numbers that this process gives them.
#![forbid(unsafe_code)]

use super::{directory, failed, root::Root};
use crate::{
    Error, NamespaceId, NamespaceOptions, Result,
    disk::{Disk, TEMPORARY, write_whole},
};
use std::{
    collections::HashMap,
    sync::{PoisonError, RwLock},
};
use uuid::Uuid;

/// Namespaces by number.
#[derive(Debug, Default)]
pub(super) struct Namespaces(RwLock<Table>);

#[derive(Debug, Default)]
struct Table {
    /// By number. One that is free, or was found in no log, has no namespace.
    ids: Vec<Option<NamespaceId>>,
    numbers: HashMap<NamespaceId, u16>,
    options: HashMap<NamespaceId, NamespaceOptions>,
    /// The namespaces that this process opened to write.
    descriptions: HashMap<NamespaceId, String>,
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
        let free = table.ids.iter().position(Option::is_none).unwrap_or(table.ids.len());
        let number = u16::try_from(free).map_err(|_| {
            Error::InvalidRequest("a store has at most 65536 namespaces that have blocks or are open".into())
        })?;
        if free == table.ids.len() {
            table.ids.push(None);
        }
        table.ids[free] = Some(id);
        table.numbers.insert(id, number);
        Ok(number)
    }

    /// Gives the number of a namespace back, which has no blocks. Returns what it was.
    pub(super) fn forget(&self, id: NamespaceId) -> Option<u16> {
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        table.options.remove(&id);
        table.descriptions.remove(&id);
        let number = table.numbers.remove(&id)?;
        table.ids[usize::from(number)] = None;
        Some(number)
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

    pub(super) fn set_description(&self, id: NamespaceId, description: &str) {
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        table.descriptions.insert(id, description.to_owned());
    }

    /// Those that this process opened to write, with their descriptions.
    pub(super) fn opened(&self) -> Vec<(NamespaceId, String)> {
        let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
        table.descriptions.iter().map(|(id, description)| (*id, description.clone())).collect()
    }

    pub(super) fn options(&self, id: NamespaceId) -> NamespaceOptions {
        let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
        table.options.get(&id).copied().unwrap_or_default()
    }
}

/// Writes a description down, unless it is there.
pub(super) fn describe(disk: &dyn Disk, root: &Root, id: NamespaceId, description: &str) -> Result<()> {
    directory::describe(disk, &root.path, id, description, |path, bytes| {
        // Other processes open the same namespace at the same moment, and none waits for another.
        let temporary = path.with_file_name(format!("{}{TEMPORARY}", Uuid::new_v4()));
        write_whole(disk, &temporary, path, bytes, |from, to| disk.rename(from, to))
            .map_err(failed("writing to", path))
    })
}

/// All that have been described. One whose description cannot be read is in no other's way.
pub(super) fn described(disk: &dyn Disk, root: &Root) -> Result<Vec<(NamespaceId, String)>> {
    let mut described = Vec::new();
    for (id, description) in directory::described(disk, &root.path)? {
        match description {
            Ok(description) => described.push((id, description)),
            Err(reason) => root.warn_once(&directory::of_namespace(&root.path, id), &reason),
        }
    }
    Ok(described)
}
