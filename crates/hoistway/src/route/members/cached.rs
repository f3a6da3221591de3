//! `cached`: takes files whose pages in the page cache can be seen, and for a device those that lie in memory.
//!
//! Beside a route that has a device copy from the same pages, few threads copy: as many as fill what that leaves of the link.
#![forbid(unsafe_code)]

use crate::{
    route::{
        Access, BlockingLane, BlockingRead, CachedCopy, CarriedRead, DirectIo, ReadLane, Route, SourceRead,
        Unavailable,
        member::{CacheFacts, Demand, Facts, Landing, Member, Share, Wanted},
        registry::NotOpened,
    },
    source::Source,
};
use hoistway_io::file::{LocalFile, Probe};
use std::{io, sync::Arc};

/// Threads at first, beside a route that has a device copy.
const BESIDE: usize = 4;

#[derive(Debug)]
struct Cached {
    is_named: bool,
    /// Whether another route has a device copy from the same pages.
    is_beside: bool,
    /// Whether it takes files in memory. For memory of the host, the threads that read are as fast.
    takes_memory: bool,
}

/// Copies what the cache holds.
struct PageCopy;

impl BlockingRead<CarriedRead> for PageCopy {
    fn read(&self, op: &mut CarriedRead) -> io::Result<usize> {
        match op.source.local().map(LocalFile::probe) {
            // Its file system refuses to be asked, as there is no drive to wait for.
            Ok(Probe::Memory) => SourceRead.read(op),
            _ => CachedCopy.read(op),
        }
    }
}

/// Opens it if it is named, or the route chooses and may read from the page cache.
pub(in crate::route) fn open(
    wanted: &Wanted<'_>,
    _: &[&Arc<dyn Source>],
    before: &[Arc<dyn Member>],
) -> Result<Option<Arc<dyn Member>>, NotOpened> {
    // Others that are named for the page cache leave short copies to it.
    let is_named = wanted.route.is_of_page_cache();
    if !is_named && !wanted.route.chooses() {
        return Ok(None);
    }
    if !is_named && wanted.direct == DirectIo::Always {
        return Err(Unavailable::new("switched off by the option direct=always", "").into());
    }
    let is_beside = before.iter().any(|member| member.facts().landing == Landing::View);
    let takes_memory = is_named || wanted.device.is_some() && !wanted.copies_on_lanes;
    Ok(Some(Arc::new(Cached { is_named, is_beside, takes_memory })))
}

impl Member for Cached {
    fn facts(&self) -> Facts {
        Facts { cache: Some(CacheFacts::PAGES), ..Facts::of(Route::Cached, "hoistway-copy") }
    }

    fn add(&self, source: &Arc<dyn Source>, access: Access) -> Result<bool, Unavailable> {
        match source.local()?.probe() {
            Probe::Memory => Ok(self.takes_memory),
            // Buffered reads take what is cached from the cache by themselves.
            _ if !self.is_named && access == Access::Buffered => Ok(false),
            Probe::None(why) => Err(why),
            Probe::Cachestat | Probe::Nowait => Ok(true),
        }
    }

    fn lane(&self, _: usize) -> Result<Box<ReadLane>, Unavailable> {
        Ok(Box::new(BlockingLane::new(PageCopy)))
    }

    fn share(&self, demand: &Demand<'_>) -> Share {
        let (first, _) = demand.threads.copiers;
        // A thread has a read, or nothing to do.
        let first = first.min(demand.reads.max(1));
        let beside = BESIDE.min(demand.threads.copiers_beside);
        Share::blocking(if self.is_beside { first.min(beside) } else { first })
    }
}
