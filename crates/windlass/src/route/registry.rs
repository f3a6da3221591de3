//! Every route that reads, in order of preference. A new one is a file in `members` and a line here.
#![forbid(unsafe_code)]

#[cfg(not(target_os = "linux"))]
use super::absent::{io_uring, usrbio};
#[cfg(target_os = "linux")]
use super::members::{io_uring, usrbio};
use super::{
    Route, Unavailable,
    member::{Landing, Member, Wanted},
    members::{cached, gds, threads},
};
use crate::source::Source;
use std::{path::PathBuf, sync::Arc};

/// Opens a route for reads of these files, after others that were opened before. `None` if it is neither named nor of
/// use.
type Open =
    fn(&Wanted<'_>, &[&Arc<dyn Source>], &[Arc<dyn Member>]) -> Result<Option<Arc<dyn Member>>, NotOpened>;

/// A route that can be opened.
#[derive(Debug)]
pub(crate) struct Entry {
    /// What a refusal calls it.
    pub(crate) route: Route,
    /// The memory that its reads fill. One whose slots are [shared](Landing::Shared) may say how long reads are, so that it is
    /// opened before a plan.
    pub(crate) landing: Landing,
    pub(crate) open: Open,
}

/// Why a route was not opened.
#[derive(Debug)]
pub(crate) struct NotOpened {
    /// The file that is to blame, if it is one.
    pub(crate) path: Option<PathBuf>,
    pub(crate) why: Unavailable,
}

impl From<Unavailable> for NotOpened {
    fn from(why: Unavailable) -> Self {
        Self { path: None, why }
    }
}

/// All of them: a read goes to the first that takes it.
pub(crate) static ROUTES: &[Entry] = &[
    Entry { route: Route::Usrbio, landing: Landing::Shared, open: usrbio::open },
    Entry { route: Route::Cached, landing: Landing::Any, open: cached::open },
    Entry { route: Route::Gds, landing: Landing::Device, open: gds::open },
    Entry { route: Route::IoUring, landing: Landing::Any, open: io_uring::open },
    Entry { route: Route::Threads, landing: Landing::Any, open: threads::open },
    #[cfg(feature = "fault-injection")]
    Entry { route: Route::Toy, landing: Landing::Any, open: super::members::toy::open },
];
