//! Opens namespaces by descriptions that another process wrote.
#![forbid(unsafe_code)]

use super::{Namespace, Store};
use crate::{Error, NamespaceDescription, NamespaceId, NamespaceOptions, Result};

impl Store {
    /// Opens a namespace by a description as [`Store::namespaces`] gives it, perhaps of another store: for tools that
    /// move blocks. Salts are in it by their digests alone, so [`Store::namespace`] could not do that.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] if this is no description, or that of another namespace; as [`Store::namespace`].
    pub fn described_namespace(
        &self,
        id: NamespaceId,
        description: &str,
        options: NamespaceOptions,
    ) -> Result<Namespace> {
        serde_json::from_str::<NamespaceDescription>(description)
            .map_err(|error| Error::InvalidRequest(format!("the description of namespace {id}: {error}")))?;
        if NamespaceId::of_description(description) != id {
            let problem = format!("the description of namespace {id} is that of another one");
            return Err(Error::InvalidRequest(problem));
        }
        self.opened_namespace(id, description, options)
    }
}
