//! `threads`: takes every file, and what other routes leave.
#![forbid(unsafe_code)]

#[cfg(feature = "objects")]
use super::object_notes::ObjectNotes;
#[cfg(feature = "objects")]
use crate::route::member::Stage;
use crate::{
    route::{
        Access, BlockingLane, ReadLane, Route, SourceRead, Unavailable,
        member::{Demand, Facts, Member, Share, Wanted},
        registry::NotOpened,
    },
    source::Source,
};
use std::sync::Arc;

#[derive(Debug)]
struct Threads {
    #[cfg(feature = "objects")]
    notes: ObjectNotes,
}

/// Opens it if it is named, or another route may need it: one that chooses, or one that leaves the ends of files.
pub(in crate::route) fn open(
    wanted: &Wanted<'_>,
    files: &[&Arc<dyn Source>],
    _: &[Arc<dyn Member>],
) -> Result<Option<Arc<dyn Member>>, NotOpened> {
    let route = wanted.route;
    let is_wanted = route == Route::Threads || route.chooses() || route.is_past_host();
    #[cfg(not(feature = "objects"))]
    let _ = files;
    let member = Threads {
        #[cfg(feature = "objects")]
        notes: ObjectNotes::of_route(wanted, files),
    };
    Ok(is_wanted.then(|| Arc::new(member) as Arc<dyn Member>))
}

impl Member for Threads {
    fn facts(&self) -> Facts {
        Facts::of(Route::Threads, "hoistway-read")
    }

    fn add(&self, _: &Arc<dyn Source>, _: Access) -> Result<bool, Unavailable> {
        Ok(true)
    }

    fn lane(&self, _: usize) -> Result<Box<ReadLane>, Unavailable> {
        Ok(Box::new(BlockingLane::new(SourceRead)))
    }

    fn share(&self, demand: &Demand<'_>) -> Share {
        Share::blocking(demand.threads.pool)
    }

    #[cfg(feature = "objects")]
    fn notes(&self, stage: Stage) -> Vec<String> {
        self.notes.at(stage)
    }
}
