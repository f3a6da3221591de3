//! Notes of reports about objects and the node's cache, for all routes that read them.
#![forbid(unsafe_code)]

use crate::{
    cache::Entry,
    route::member::{Stage, Wanted},
    source::{Source, objects::ObjectSource},
};
use bytesize::ByteSize;
use std::{collections::BTreeSet, sync::Arc};

/// The notes of the objects that a load or a fill reads.
#[derive(Debug, Default)]
pub(crate) struct ObjectNotes {
    /// The notes that are known before the first read.
    pub(crate) first: Vec<String>,
    /// The entries of the objects in the node's cache.
    entries: Vec<Arc<Entry>>,
}

impl ObjectNotes {
    /// The notes of the objects among these sources.
    pub(crate) fn of<'a>(sources: impl IntoIterator<Item = &'a Arc<dyn Source>>) -> Self {
        let objects: Vec<_> = sources.into_iter().filter_map(ObjectSource::of).collect();
        let servers: BTreeSet<_> =
            objects.iter().map(|source| (source.object().server(), source.object().region())).collect();
        let from = |(server, region): &(String, Option<&str>)| match region {
            Some(region) => {
                format!("objects came from {server}, whose bucket is in region {region} as it said")
            }
            None => format!("objects came from {server}"),
        };
        let mut first: Vec<_> = servers.iter().map(from).collect();
        for object in &objects {
            let url = object.object().url();
            if let Some(why) = object.uncached() {
                first.push(format!("{url} is not kept in the node's cache: {why}"));
            }
            if !object.object().is_pinned() {
                first.push(format!("{url} has no strong ETag: its length and date were compared instead"));
            }
        }
        Self { first, entries: objects.iter().filter_map(|source| source.entry().cloned()).collect() }
    }

    /// Those of a route that is opened for these files. A reader learns of its files later: there, a fill has the notes.
    pub(super) fn of_route(wanted: &Wanted<'_>, files: &[&Arc<dyn Source>]) -> Self {
        if wanted.copies_on_lanes { Self::default() } else { Self::of(files.iter().copied()) }
    }

    /// The notes at that time.
    pub(crate) fn at(&self, stage: Stage) -> Vec<String> {
        match stage {
            Stage::Open if self.first.is_empty() => Vec::new(),
            Stage::Open => vec![self.first.join("; ")],
            Stage::Over => self.last(),
        }
    }

    /// The notes that depend on reads.
    pub(crate) fn last(&self) -> Vec<String> {
        let (mut damaged, mut kept, mut left_out, mut notes) = (0, 0, 0, Vec::new());
        for entry in &self.entries {
            let counts = entry.counts();
            (damaged, kept, left_out) = (damaged + counts.0, kept + counts.1, left_out + counts.2);
            if let Some(why) = entry.refusal() {
                let note = format!("the node's cache is not written to: {why}");
                if !notes.contains(&note) {
                    notes.push(note);
                }
            }
        }
        if damaged > 0 {
            notes.push(format!("{damaged} blocks in the node's cache were damaged, and came from the store"));
        }
        if kept > 0 {
            notes.push(format!("{} were written to the node's cache so far", ByteSize(kept)));
        }
        if left_out > 0 {
            let bytes = ByteSize(left_out);
            notes.push(format!(
                "{bytes} are not kept in the node's cache: its drive is slower than the store, or memory_budget leaves \
                 no room for them to wait"
            ));
        }
        notes
    }
}
