//! Whether a route does what its name promises, for one load or one batch.
#![forbid(unsafe_code)]

use super::{Unavailable, member::Member};
use crate::report::Carrier;
use std::sync::{Arc, OnceLock};

/// A route that a load or a batch may take, watched since that began.
#[derive(Debug)]
pub(crate) struct NameCheck {
    member: Arc<dyn Member>,
    /// Reads that were not what the name promises, before.
    broken: Option<u64>,
    /// The result at the end.
    kept: OnceLock<Result<(), Unavailable>>,
}

impl NameCheck {
    pub(crate) fn of(member: &Arc<dyn Member>) -> Self {
        Self {
            member: member.clone(),
            broken: member.proof().and_then(|proof| proof.broken()),
            kept: OnceLock::new(),
        }
    }

    /// Fails if the route has done something else, as far as is known: for good after [`NameCheck::check`].
    ///
    /// # Errors
    /// What the route did instead.
    pub(crate) fn look(&self) -> Result<(), Unavailable> {
        self.kept.get().cloned().unwrap_or_else(|| self.ask())
    }

    /// Fails if the route has done something else. Asked when all reads are made; the answer stays.
    ///
    /// # Errors
    /// What the route did instead.
    pub(crate) fn check(&self) -> Result<(), Unavailable> {
        self.kept.get_or_init(|| self.ask()).clone()
    }

    fn ask(&self) -> Result<(), Unavailable> {
        self.member.proof().map_or(Ok(()), |proof| proof.check_kept(self.broken))
    }

    /// Gives the share of the route its true name. Returns what proves it, if it has carried bytes.
    pub(crate) fn name_truly(&self, carriers: &mut [Carrier]) -> Option<String> {
        let (is_kept, route) = (self.look().is_ok(), self.member.route());
        let mut has_carried = false;
        for carrier in carriers.iter_mut().filter(|carrier| carrier.route == route) {
            has_carried |= carrier.tensor_bytes > 0;
            if let (false, Some(proof)) = (is_kept, self.member.proof()) {
                // Which reads did is not known: none of them may have its name.
                carrier.route = proof.route_unless_kept();
            }
        }
        if is_kept && has_carried { self.member.proof()?.shown() } else { None }
    }
}
