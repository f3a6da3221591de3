//! Chooses what is evicted: a trait, and its members by name.
//!
//! A member is a file here and a line in `registry`. `lists` and `ranked` are the two structures that members keep
//! resident experts in. Every member passes the suite in `conformance`, and agrees with its model in `naive`.
#![forbid(unsafe_code)]

mod arc;
mod belady;
#[cfg(test)]
mod conformance;
mod ewma2;
mod lfu;
mod lists;
mod lru;
#[cfg(test)]
mod naive;
mod ranked;
mod registry;
mod shape;
mod slru;
mod static_profile;

pub use belady::Future;
pub use registry::{DEFAULT, PolicyError, PolicyInput, STATIC_PROFILE, about, by_name, names};
pub use shape::{CatalogShape, LayerShape, ShapeError};
pub use static_profile::Profile;

use serde::{Deserialize, Serialize};
use std::fmt;

/// An expert of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ExpertId {
    /// The layer, counted from 0 as the checkpoint does.
    pub layer: u32,
    /// The expert within its layer.
    pub expert: u32,
}

impl fmt::Display for ExpertId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expert {} of layer {}", self.expert, self.layer)
    }
}

/// Chooses what is evicted. Pure: no I/O, no clock, no sizes.
///
/// The caller owns residency. For each visit of a layer it calls [`visit`](Self::visit) once. It makes room by
/// [`victim`](Self::victim) and [`remove`](Self::remove), says by [`insert`](Self::insert) that an expert is resident, and
/// asks [`admit`](Self::admit) about those that it read for the visit. What a policy chooses does not depend on the order in
/// which the experts of one visit are inserted, which is that of I/O.
///
/// Experts outside of the shape that a policy was made for are ignored, and so is an insert of a resident expert or a
/// removal of an absent one.
pub trait Policy: Send {
    /// Notes that a router chose these experts of a layer, with their weights. Called once a visit, for hits and misses
    /// alike, before [`victim`](Self::victim).
    ///
    /// A visit of several tokens, such as a prefill, lists the choices of one token after the other, the last token's
    /// last. An expert then comes as often as it was chosen.
    fn visit(&mut self, layer: u32, experts: &[(u32, f32)]);

    /// Notes that an expert became resident.
    fn insert(&mut self, expert: ExpertId);

    /// Notes that an expert is no longer resident.
    fn remove(&mut self, expert: ExpertId);

    /// Returns the resident expert to evict next, among those for which `may_evict` is true, or `None` if there is none.
    /// `may_evict` refuses experts that are in use: those of the visit that needs the room, and those leased.
    fn victim(&mut self, may_evict: &mut dyn FnMut(ExpertId) -> bool) -> Option<ExpertId>;

    /// Returns whether an expert that is read for the last visit is worth keeping. One that is not is used and dropped, or
    /// evicted before any other. A policy may so refuse what a scan reads, such as a prefill. Asked before the expert is
    /// inserted, or after.
    fn admit(&mut self, _expert: ExpertId) -> bool {
        true
    }

    /// Returns its name, as options and reports have it.
    fn name(&self) -> &'static str;
}
