//! The route of Windows on other systems.
#![forbid(unsafe_code)]

pub(in crate::route) mod overlapped {
    use crate::{
        route::{
            Route,
            absent::refuse,
            member::{Member, Wanted},
            registry::NotOpened,
        },
        source::Source,
    };
    use std::sync::Arc;

    pub(in crate::route) fn open(
        wanted: &Wanted<'_>,
        _: &[&Arc<dyn Source>],
        _: &[Arc<dyn Member>],
    ) -> Result<Option<Arc<dyn Member>>, NotOpened> {
        refuse(wanted, Route::Overlapped, "Windows")
    }
}
