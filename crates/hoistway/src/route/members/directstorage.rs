//! `directstorage`: takes files that DirectStorage opens, and has its runtime read them.
#![forbid(unsafe_code)]

use super::queued::INLINE_DEPTH;
use crate::{
    route::{
        Access, ReadLane, Route, Unavailable,
        directstorage::{DirectStorageLane, opened},
        member::{Demand, Facts, Files, Grain, Landing, Member, Share, Stage, Wanted},
        registry::NotOpened,
    },
    source::Source,
};
use hoistway_directstorage::Runtime;
use std::sync::Arc;

#[derive(Debug)]
struct DirectStorage {
    runtime: &'static Runtime,
}

/// Opens it if it is named. No machine was measured yet, so `auto` leaves it out, and says so where it is there.
pub(in crate::route) fn open(
    wanted: &Wanted<'_>,
    _: &[&Arc<dyn Source>],
    _: &[Arc<dyn Member>],
) -> Result<Option<Arc<dyn Member>>, NotOpened> {
    if wanted.route == Route::DirectStorage {
        return Ok(Some(Arc::new(DirectStorage { runtime: Runtime::get()? })));
    }
    if wanted.route == Route::Auto && hoistway_directstorage::find().is_ok() {
        let reason = "whether it is faster than route overlapped was not measured on any machine yet";
        return Err(Unavailable::new(reason, "name route directstorage to use it").into());
    }
    Ok(None)
}

impl Member for DirectStorage {
    fn facts(&self) -> Facts {
        Facts {
            landing: Landing::Kept,
            files: Files::Alone(Access::Direct),
            grain: Grain::AnyBytes,
            most_lanes: 1,
            ..Facts::of(Route::DirectStorage, "hoistway-dstore")
        }
    }

    fn add(&self, source: &Arc<dyn Source>, _: Access) -> Result<bool, Unavailable> {
        opened(&**source).map(|_| true)
    }

    fn lane(&self, depth: usize) -> Result<Box<ReadLane>, Unavailable> {
        Ok(Box::new(DirectStorageLane::new(depth)?))
    }

    fn share(&self, demand: &Demand<'_>) -> Share {
        let depth = if demand.is_inline { (INLINE_DEPTH, INLINE_DEPTH) } else { demand.threads.depth };
        Share { threads: demand.threads.rings, depth, slots: 0, slot_bytes: 0 }
    }

    fn notes(&self, stage: Stage) -> Vec<String> {
        if stage != Stage::Open {
            return Vec::new();
        }
        let version = self.runtime.version().map(|version| format!(" {version}")).unwrap_or_default();
        let path = self.runtime.path().display();
        let configured = match self.runtime.not_configured() {
            Some(_) => "; another library of this process has configured it, its telemetry included",
            None => "",
        };
        vec![format!("directstorage (staged by the runtime): DirectStorage{version} of {path}{configured}")]
    }
}
