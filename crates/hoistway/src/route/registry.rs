//! Every route that moves bytes, in order of preference. A new one is a file in `members` and a line here.
#![forbid(unsafe_code)]

#[cfg(not(target_os = "linux"))]
use super::absent::linux::{io_uring, pinned_cache, usrbio};
#[cfg(not(windows))]
use super::absent::windows::{directstorage, overlapped};
#[cfg(windows)]
use super::members::{directstorage, overlapped};
#[cfg(feature = "objects")]
use super::members::{http, node_cache};
#[cfg(target_os = "linux")]
use super::members::{io_uring, pinned_cache, usrbio};
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

/// The way in which a route uses files.
#[derive(Debug)]
enum Way {
    /// It reads them by lanes.
    Reads(Entry),
    /// It maps them: loads show what lies in the page cache, and no lane reads. See `load::mapped`.
    Maps(Route),
}

/// A route that reads.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Its name in refusals.
    pub(crate) route: Route,
    /// The memory that its reads fill.
    pub(crate) landing: Landing,
    /// Whether it is opened before a plan, because it says how long reads are, or that they need no slots of the load's own.
    pub(crate) is_first: bool,
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

/// The routes that read: a read goes to the first that takes it.
pub(crate) fn readers() -> impl Iterator<Item = &'static Entry> {
    ROUTES.iter().filter_map(|way| match way {
        Way::Reads(entry) => Some(entry),
        Way::Maps(_) => None,
    })
}

/// Whether a route maps files.
pub(super) fn maps(route: Route) -> bool {
    ROUTES.iter().any(|way| matches!(way, Way::Maps(mapping) if *mapping == route))
}

static ROUTES: &[Way] = &[
    Way::Reads(Entry { route: Route::Usrbio, landing: Landing::Shared, is_first: true, open: usrbio::open }),
    #[cfg(feature = "objects")]
    Way::Reads(Entry {
        route: Route::NodeCache,
        landing: Landing::Any,
        is_first: true,
        open: node_cache::open,
    }),
    #[cfg(feature = "objects")]
    Way::Reads(Entry { route: Route::Http, landing: Landing::Any, is_first: true, open: http::open }),
    Way::Reads(Entry {
        route: Route::PinnedCache,
        landing: Landing::View,
        is_first: false,
        open: pinned_cache::open,
    }),
    Way::Reads(Entry { route: Route::Cached, landing: Landing::Any, is_first: false, open: cached::open }),
    Way::Reads(Entry { route: Route::Gds, landing: Landing::Device, is_first: false, open: gds::open }),
    Way::Reads(Entry {
        route: Route::IoUring,
        landing: Landing::Kept,
        is_first: false,
        open: io_uring::open,
    }),
    Way::Reads(Entry {
        route: Route::Overlapped,
        landing: Landing::Kept,
        is_first: false,
        open: overlapped::open,
    }),
    Way::Reads(Entry {
        route: Route::DirectStorage,
        landing: Landing::Kept,
        is_first: true,
        open: directstorage::open,
    }),
    Way::Reads(Entry { route: Route::Threads, landing: Landing::Any, is_first: false, open: threads::open }),
    Way::Maps(Route::Mapped),
    #[cfg(feature = "fault-injection")]
    Way::Reads(Entry {
        route: Route::Toy,
        landing: Landing::Any,
        is_first: false,
        open: crate::toy::open_route,
    }),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_is_registered_once_or_leaves_the_choice_to_others() {
        for &route in Route::ALL {
            let registered =
                readers().filter(|entry| entry.route == route).count() + usize::from(maps(route));
            // `gds` opens for `gds-compat` too.
            let is_other_name = route.is_past_host() && route != Route::Gds;
            assert_eq!(registered, usize::from(!route.chooses() && !is_other_name), "{route}");
        }
    }
}
