//! The routes of Windows on other systems.
#![forbid(unsafe_code)]

use super::refuse;
use crate::{
    route::{
        Route,
        member::{Member, Wanted},
        registry::NotOpened,
    },
    source::Source,
};
use std::sync::Arc;

pub(in crate::route) mod directstorage {
    use super::*;

    pub(in crate::route) fn open(
        wanted: &Wanted<'_>,
        _: &[&Arc<dyn Source>],
        _: &[Arc<dyn Member>],
    ) -> Result<Option<Arc<dyn Member>>, NotOpened> {
        refuse(wanted, Route::DirectStorage, "Windows")
    }
}

pub(in crate::route) mod overlapped {
    use super::*;

    pub(in crate::route) fn open(
        wanted: &Wanted<'_>,
        _: &[&Arc<dyn Source>],
        _: &[Arc<dyn Member>],
    ) -> Result<Option<Arc<dyn Member>>, NotOpened> {
        refuse(wanted, Route::Overlapped, "Windows")
    }
}
