//! The route by which a reader reads into a device past the host.
#![forbid(unsafe_code)]

use super::{
    Access, Route, Unavailable,
    member::{Landing, Member, Wanted},
    registry::{self, NotOpened},
};
use crate::{Error, Result, memory::Slots, parallel::lock, report::RouteRemarks, source::Source};
use std::sync::{Arc, Mutex, OnceLock};

/// A route to a device past the host.
#[derive(Debug)]
pub(crate) struct DirectRoute {
    // Before the member, which the memory belongs to.
    pub(crate) slots: OnceLock<Slots>,
    making: Mutex<()>,
    pub(crate) member: Arc<dyn Member>,
    pub(crate) remarks: RouteRemarks,
    given_up: OnceLock<Unavailable>,
}

impl DirectRoute {
    /// The first such route that is named or chosen.
    pub(crate) fn open(wanted: &Wanted<'_>) -> std::result::Result<Option<Arc<Self>>, (Route, NotOpened)> {
        for entry in registry::readers().filter(|entry| entry.landing == Landing::Device) {
            let opened = (entry.open)(wanted, &[], &[]);
            if let Some(member) = opened.map_err(|why| (entry.route, why))? {
                let (slots, making, given_up) = (OnceLock::new(), Mutex::default(), OnceLock::new());
                let remarks = RouteRemarks::of(&*member, wanted.device.map(|device| device.id()));
                return Ok(Some(Arc::new(Self { slots, making, member, remarks, given_up })));
            }
        }
        Ok(None)
    }

    /// Makes a file ready, and with the first one the slots.
    pub(crate) fn add(&self, source: &Arc<dyn Source>, count: usize, slot_bytes: usize) -> Result<()> {
        let refused = |path, why| Error::RouteUnavailable { route: self.member.route(), path, why };
        if let Some(why) = self.given_up.get() {
            return Err(refused(None, why.clone()));
        }
        let path = || Some(source.path().to_owned());
        self.member.add(source, Access::Direct).map_err(|why| refused(path(), why))?;
        let _making = lock(&self.making);
        if self.slots.get().is_none() {
            let _ = self.slots.set(self.member.slots(count, slot_bytes, None, None)?);
        }
        Ok(())
    }

    /// It is not used any more.
    pub(crate) fn give_up(&self, why: Unavailable) {
        let _ = self.given_up.set(why);
    }

    /// Whether it may be used.
    pub(crate) fn is_open(&self) -> bool {
        self.given_up.get().is_none()
    }
}
