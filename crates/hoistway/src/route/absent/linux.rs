//! The routes of Linux on other systems.
#![forbid(unsafe_code)]

use super::{of, refuse};
use crate::{
    route::{
        Route, Unavailable, UsrbioClient,
        member::{Member, Wanted},
        registry::NotOpened,
    },
    source::Source,
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

pub(in crate::route) mod io_uring {
    use super::*;

    pub(in crate::route) fn open(
        wanted: &Wanted<'_>,
        _: &[&Arc<dyn Source>],
        _: &[Arc<dyn Member>],
    ) -> Result<Option<Arc<dyn Member>>, NotOpened> {
        refuse(wanted, Route::IoUring, "Linux")
    }
}

pub(in crate::route) mod pinned_cache {
    use super::*;

    pub(in crate::route) fn open(
        wanted: &Wanted<'_>,
        _: &[&Arc<dyn Source>],
        _: &[Arc<dyn Member>],
    ) -> Result<Option<Arc<dyn Member>>, NotOpened> {
        refuse(wanted, Route::PinnedCache, "Linux")
    }
}

pub(in crate::route) mod usrbio {
    use super::*;

    pub(in crate::route) fn open(
        wanted: &Wanted<'_>,
        _: &[&Arc<dyn Source>],
        _: &[Arc<dyn Member>],
    ) -> Result<Option<Arc<dyn Member>>, NotOpened> {
        refuse(wanted, Route::Usrbio, "Linux")
    }
}

/// Why rings cannot be made.
pub(crate) fn probe_ring() -> Result<(), Unavailable> {
    Err(of(Route::IoUring, "Linux"))
}

/// The system's number behind an error of a read.
pub(crate) fn errno(error: &io::Error) -> Option<i32> {
    error.raw_os_error()
}

/// Where the 3FS is mounted that `path` lies on.
///
/// # Errors
/// [`Error::NotFound`](crate::Error::NotFound), or [`Error::RouteUnavailable`](crate::Error::RouteUnavailable): there is
/// none.
pub fn mount_point_of_3fs(path: &Path) -> crate::Result<PathBuf> {
    std::fs::metadata(path).map_err(|error| hoistway_io::Error::opening(path, error))?;
    let (route, path, why) = (Route::Usrbio, Some(path.to_owned()), of(Route::Usrbio, "Linux"));
    Err(crate::Error::RouteUnavailable { route, path, why })
}

/// Where a 3FS is mounted that this process sees: nowhere.
pub fn mount_points_of_3fs() -> Vec<PathBuf> {
    Vec::new()
}

/// Whether route `usrbio` can read from the 3FS at `path`.
///
/// # Errors
/// Those of [`mount_point_of_3fs`].
pub fn probe_3fs(path: &Path, _client: UsrbioClient, _directories: &[PathBuf]) -> crate::Result<()> {
    mount_point_of_3fs(path).map(drop)
}
