//! The routes of other systems: refused where they are named, and left out where they are not.
#![forbid(unsafe_code)]

#[cfg(not(target_os = "linux"))]
pub(super) mod linux;
#[cfg(not(windows))]
pub(super) mod windows;

use super::{
    Route, Unavailable,
    member::{Member, Wanted},
    registry::NotOpened,
};
use std::sync::Arc;

fn refuse(wanted: &Wanted<'_>, route: Route, system: &str) -> Result<Option<Arc<dyn Member>>, NotOpened> {
    if wanted.names(route) { Err(of(route, system).into()) } else { Ok(None) }
}

fn of(route: Route, system: &str) -> Unavailable {
    Unavailable::new(format!("{route} is an interface of {system}"), "choose route auto or threads")
}
