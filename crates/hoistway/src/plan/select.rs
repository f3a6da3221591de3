//! Which tensors of a catalog are wanted, and which part of each.
#![forbid(unsafe_code)]

use super::slice::TensorSlice;
use crate::{Catalog, Error, Result, catalog::TensorEntry, catalog::TensorId};
use glob::Pattern;
use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    sync::Arc,
};

/// Which tensors to load, by name, pattern or predicate, and which slices of them.
///
/// Starts as everything; each call narrows or refines it.
///
/// ```
/// use hoistway::plan::{Selection, TensorSlice};
/// let selection = Selection::all()
///     .select("model.layers.[0-3].*")
///     .exclude("*.bias")
///     .slice("model.layers.0.mlp.up_proj.weight", TensorSlice::new(vec![0..1024]));
/// ```
#[derive(Clone, Default)]
pub struct Selection {
    /// `None`: everything.
    select: Option<Vec<String>>,
    exclude: Vec<String>,
    predicates: Vec<Predicate>,
    slices: HashMap<String, TensorSlice>,
}

type Predicate = Arc<dyn Fn(&TensorEntry) -> bool + Send + Sync>;

impl Selection {
    /// Every tensor, whole.
    pub fn all() -> Self {
        Self::default()
    }

    /// Nothing but what later calls of [`select`](Self::select) add.
    pub fn none(mut self) -> Self {
        self.select = Some(Vec::new());
        self
    }

    /// Only tensors with this name, or whose name matches this glob pattern (`*`, `?`, `[a-z]`).
    ///
    /// Called more than once, tensors that match any are in. A pattern that matches nothing is an error when the
    /// selection is used.
    pub fn select(mut self, name_or_pattern: impl Into<String>) -> Self {
        self.select.get_or_insert_default().push(name_or_pattern.into());
        self
    }

    /// Not the tensors with this name, or whose name matches this glob pattern, if there are any.
    pub fn exclude(mut self, name_or_pattern: impl Into<String>) -> Self {
        self.exclude.push(name_or_pattern.into());
        self
    }

    /// Only tensors for which `predicate` holds.
    pub fn filter(mut self, predicate: impl Fn(&TensorEntry) -> bool + Send + Sync + 'static) -> Self {
        self.predicates.push(Arc::new(predicate));
        self
    }

    /// Of the tensor `name`, only this part. Does not by itself put the tensor in.
    pub fn slice(mut self, name: impl Into<String>, slice: TensorSlice) -> Self {
        self.slices.insert(name.into(), slice);
        self
    }

    /// Whether it was never narrowed nor refined.
    pub(crate) fn is_all(&self) -> bool {
        self.select.is_none()
            && self.exclude.is_empty()
            && self.predicates.is_empty()
            && self.slices.is_empty()
    }

    /// The tensors of `catalog` that are wanted, in the catalog's order.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`] for a selected name or pattern that nothing matches and a slice of
    /// no tensor; [`Error::InvalidOption`] for
    /// something that is not a pattern.
    pub fn resolve(&self, catalog: &Catalog) -> Result<Vec<TensorRequest>> {
        let selected = self
            .select
            .as_ref()
            .map(|select| Matcher::new(select, catalog, Unmatched::IsAnError))
            .transpose()?;
        let exclude = Matcher::new(&self.exclude, catalog, Unmatched::IsFine)?;
        for name in self.slices.keys() {
            catalog.find(name).ok_or_else(|| catalog.no_such_tensor(name))?;
        }
        let requested = |tensor: TensorId| {
            let entry = catalog.tensor(tensor);
            let wanted = selected.as_ref().is_none_or(|selected| selected.matches(tensor, &entry.name))
                && !exclude.matches(tensor, &entry.name)
                && self.predicates.iter().all(|predicate| predicate(entry));
            wanted.then(|| TensorRequest {
                tensor,
                slice: self.slices.get(&*entry.name).cloned().unwrap_or_default(),
            })
        };
        Ok(match selected.as_ref().and_then(Matcher::only_exact) {
            // One tensor of a hundred thousand must not cost a look at all of them.
            Some(exact) => exact.iter().copied().filter_map(requested).collect(),
            None => catalog.ids().filter_map(requested).collect(),
        })
    }
}

impl fmt::Debug for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Selection")
            .field("select", &self.select)
            .field("exclude", &self.exclude)
            .field("predicates", &self.predicates.len())
            .field("slices", &self.slices)
            .finish()
    }
}

/// One tensor, or a part of it, that a plan shall deliver.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorRequest {
    /// Which one.
    pub tensor: TensorId,
    /// Which part; the default is all of it.
    pub slice: TensorSlice,
}

impl TensorRequest {
    /// A part of a tensor.
    pub fn new(tensor: TensorId, slice: TensorSlice) -> Self {
        Self { tensor, slice }
    }

    /// All of a tensor.
    pub fn whole(tensor: TensorId) -> Self {
        Self { tensor, slice: TensorSlice::default() }
    }
}

/// What it means that a pattern matches nothing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unmatched {
    IsAnError,
    /// What is not there need not be left out.
    IsFine,
}

/// Exact names first, since tensor names may hold pattern characters; patterns for the rest.
struct Matcher {
    exact: BTreeSet<TensorId>,
    patterns: Vec<Pattern>,
}

impl Matcher {
    fn new(names_or_patterns: &[String], catalog: &Catalog, unmatched: Unmatched) -> Result<Self> {
        let mut matcher = Self { exact: BTreeSet::new(), patterns: Vec::new() };
        for text in names_or_patterns {
            if let Some(tensor) = catalog.find(text) {
                matcher.exact.insert(tensor);
                continue;
            }
            let pattern = Pattern::new(text).map_err(|error| {
                let option = if unmatched == Unmatched::IsFine { "exclude" } else { "select" };
                let reason = format!("it is neither the name of a tensor nor a glob pattern: {error}");
                Error::invalid_option(option, text, reason)
            })?;
            if unmatched == Unmatched::IsAnError
                && !catalog.tensors().iter().any(|tensor| pattern.matches(&tensor.name))
            {
                return Err(catalog.no_such_tensor(text));
            }
            matcher.patterns.push(pattern);
        }
        Ok(matcher)
    }

    /// The tensors that match, in the catalog's order, if no pattern is involved.
    fn only_exact(&self) -> Option<&BTreeSet<TensorId>> {
        self.patterns.is_empty().then_some(&self.exact)
    }

    fn matches(&self, tensor: TensorId, name: &str) -> bool {
        self.exact.contains(&tensor) || self.patterns.iter().any(|pattern| pattern.matches(name))
    }
}
