//! `gds` and `gds-compat`: take whole blocks of files that a library reads into a device, with a proof or without.
#![forbid(unsafe_code)]

use crate::{
    Error,
    device::Device,
    memory::{SlotKind, Slots},
    parallel::lock,
    route::{
        Access, BlockingLane, DirectIo, DirectRead, Progress, ReadLane, Route, Unavailable, gds,
        member::{ALONE, Demand, Facts, Grain, Landing, Member, Proof, Share, Verdict, Wanted},
        registry::NotOpened,
    },
    source::Source,
};
use hoistway_device::DirectBuffer;
use hoistway_io::file::{is_transient, most_reads};
use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, Weak},
};

/// Memory of the device that reads land in before they are copied to their places, at most.
const LANDING_BYTES: u64 = 128 << 20;

#[derive(Debug)]
struct Gds {
    /// [`Route::Gds`] if the path is to be proven, else [`Route::GdsCompat`].
    route: Route,
    is_named: bool,
    device: Arc<Device>,
    state: Mutex<State>,
}

/// A file, as long as it is open, and whether it takes the path.
type Found = (Weak<dyn Source>, Result<(), Unavailable>);

#[derive(Debug, Default)]
struct State {
    /// The verdict on each file, by its address.
    files: HashMap<usize, Found>,
    /// The proof of the first file that was proven.
    proof: Option<String>,
    /// Trial reads that went through host memory, which breaks no promise.
    trials: u64,
}

/// Opens it for a device, if it is named, or the route chooses and this machine may have such a path.
pub(in crate::route) fn open(
    wanted: &Wanted<'_>,
    _: &[&Arc<dyn Source>],
    _: &[Arc<dyn Member>],
) -> Result<Option<Arc<dyn Member>>, NotOpened> {
    let is_named = wanted.route.is_past_host();
    // No other system has such a path, which a report need not say.
    let is_chosen = wanted.route == Route::Auto && cfg!(target_os = "linux");
    let Some(device) = wanted.device.filter(|_| is_named || is_chosen) else {
        return Ok(None);
    };
    if !is_named {
        if wanted.is_inline {
            return Err(Unavailable::new(ALONE, "").into());
        }
        if wanted.direct == DirectIo::Never {
            return Err(Unavailable::new("switched off by the option direct=never", "").into());
        }
        device.may_have_direct_path()?;
    }
    let route = if wanted.route == Route::GdsCompat { Route::GdsCompat } else { Route::Gds };
    if is_named {
        // Every file may be too short for it: others read them, but the path must be there.
        match route {
            Route::Gds => device.check_direct(),
            _ => device.check_direct_library(),
        }?;
    }
    Ok(Some(Arc::new(Gds { route, is_named, device: device.clone(), state: Mutex::default() })))
}

impl Gds {
    /// Whether a file can take the path, and what proves it.
    fn check(&self, source: &dyn Source) -> Result<Option<String>, Unavailable> {
        if let Some(why) = source.direct_refusal() {
            return Err(why.clone());
        }
        if self.route == Route::GdsCompat {
            return gds::registered(source).map(|_| None);
        }
        let proof = gds::prove(&self.device, source)?;
        gds::registered(source)?;
        Ok(Some(proof))
    }
}

impl Member for Gds {
    fn facts(&self) -> Facts {
        Facts {
            landing: Landing::Device,
            // The library would read the rest through the host, without saying so.
            grain: Grain::InWholeBlocks,
            ..Facts::of(self.route, "hoistway-ring")
        }
    }

    fn add(&self, source: &Arc<dyn Source>, _: Access) -> Result<bool, Unavailable> {
        let mut state = lock(&self.state);
        let address = Arc::as_ptr(source).addr();
        if let Some((file, found)) = state.files.get(&address)
            && file.strong_count() > 0
        {
            return found.clone().map(|()| true);
        }
        state.files.retain(|_, (file, _)| file.strong_count() > 0);
        // The library is not opened for files that it cannot take.
        let is_counted = self.route == Route::Gds && source.direct_refusal().is_none();
        let count = || if is_counted { gds::reads_through_host(&self.device) } else { None };
        let before = count();
        let found = self.check(&**source);
        let after = count();
        // A trial read that went through the host is told by its refusal.
        if let (Err(_), Some(before), Some(after)) = (&found, before, after) {
            state.trials += after.saturating_sub(before);
        }
        let found = found.map(|proof| {
            if state.proof.is_none() {
                state.proof = proof;
            }
        });
        state.files.insert(address, (Arc::downgrade(source), found.clone()));
        found.map(|()| true)
    }

    fn lane(&self, _: usize) -> Result<Box<ReadLane>, Unavailable> {
        Ok(Box::new(BlockingLane::new(DirectRead)))
    }

    fn share(&self, demand: &Demand<'_>) -> Share {
        // Each opens its file twice for a moment: for itself, and for the device's library.
        let threads = demand.threads.direct;
        let threads = threads.min(most_reads(2 * threads).div_ceil(2));
        let (slot_bytes, beside) = demand.slot_bytes;
        let affordable = usize::try_from(LANDING_BYTES / (slot_bytes + beside).max(1)).unwrap_or(usize::MAX);
        let slots = (2 * threads).min(affordable.max(1)).min(demand.reads);
        Share { threads, depth: (1, 1), slots, slot_bytes }
    }

    fn slots(
        &self,
        count: usize,
        slot_bytes: usize,
        _: Option<&Arc<Device>>,
        _: Option<u32>,
    ) -> crate::Result<Slots> {
        let bytes = (slot_bytes as u64).saturating_mul(count as u64);
        let buffer = DirectBuffer::new(&self.device, bytes).map_err(|error| match Error::from(error) {
            Error::DeviceUnavailable { why, .. } => {
                Error::RouteUnavailable { route: self.route, path: None, why }
            }
            error => error,
        })?;
        Ok(Slots::new(count, slot_bytes, SlotKind::Device(&Arc::new(buffer)))?)
    }

    fn verdict(&self, error: &io::Error, progress: Progress) -> Verdict {
        if !self.is_named && (!is_transient(error) || progress.is_out_of_patience()) {
            return Verdict::GiveUp(Unavailable::new(error.to_string(), "see 'hoistway doctor'"));
        }
        Verdict::OfRead
    }

    fn proof(&self) -> Option<&dyn Proof> {
        (self.route == Route::Gds).then_some(self)
    }
}

impl Proof for Gds {
    fn shown(&self) -> Option<String> {
        lock(&self.state).proof.clone()
    }

    fn broken(&self) -> Option<u64> {
        // Under the lock: no trial is under way.
        let state = lock(&self.state);
        gds::reads_through_host(&self.device)?.checked_sub(state.trials)
    }

    fn check_kept(&self, before: Option<u64>) -> Result<(), Unavailable> {
        match (before, self.broken()) {
            (Some(before), Some(now)) if now == before => Ok(()),
            (Some(before), Some(now)) if now > before => Err(Unavailable::new(
                format!(
                    "{} made {} reads through host memory meanwhile, of this load or of others in this process",
                    self.device.direct_library().map_or("its library", |library| library.name),
                    now - before
                ),
                "choose route gds-compat to allow that, or staged, which is faster then",
            )),
            _ => Err(gds::counters_stopped(&self.device)),
        }
    }

    fn route_unless_kept(&self) -> Route {
        Route::GdsCompat
    }
}
