//! The direct path of one load to a device: which files take it, and through which slots.
#![forbid(unsafe_code)]

use super::{DirectIo, LoadOptions};
use crate::{
    Error, Result,
    device::{Device, DirectBuffer},
    memory::{SlotKind, Slots},
    plan::Plan,
    report::Refusal,
    route::{GdsLane, Route, SourceFile, Unavailable, gds},
};
use std::sync::Arc;

/// Memory of the device that direct reads land in before they are copied to their places, at most.
const LANDING_BYTES: u64 = 128 << 20;

/// cuFile's part in a load.
#[derive(Debug)]
pub(super) struct DirectPath {
    /// [`Route::Gds`] if the path is proven, else [`Route::GdsCompat`].
    pub(super) route: Route,
    /// Whether each file of the catalog takes it.
    pub(super) files: Vec<bool>,
    pub(super) slots: Slots,
    /// What proves it.
    pub(super) proof: Option<String>,
    buffer: Arc<DirectBuffer>,
    /// Reads through host memory that cuFile had counted before the load.
    through_host: Option<u64>,
}

impl DirectPath {
    /// The direct path for a load of `plan` to `device`, if its route may or must take it. Adds to `refused` why files
    /// do not, if they need not.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`] if the caller named a route that is not there.
    pub(super) fn find(
        plan: &Plan,
        sources: &[Arc<SourceFile>],
        options: &LoadOptions,
        device: &Arc<Device>,
        (readers, slot_bytes): (usize, u64),
        refused: &mut Vec<Refusal>,
    ) -> Result<Option<Self>> {
        let is_named = options.route.is_cufile();
        if !is_named && options.route != Route::Auto {
            return Ok(None);
        }
        let mut refuse = |path: Option<&SourceFile>, why: Unavailable| {
            let path = path.map(|source| source.path().to_owned());
            let refusal = Refusal { what: Route::Gds.to_string(), path, why };
            if !refused.contains(&refusal) {
                refused.push(refusal);
            }
        };
        if !is_named {
            let off = match options.direct {
                DirectIo::Never => Err(Unavailable::new("switched off by the option direct=never", "")),
                _ => gds::plausible(),
            };
            if let Err(why) = off {
                refuse(None, why);
                return Ok(None);
            }
        }
        let mut files = vec![false; sources.len()];
        let mut proof = None;
        let mut used: Vec<usize> = plan.extents().iter().map(|extent| extent.file.index()).collect();
        used.dedup();
        for file in used {
            let source = &sources[file];
            match Self::check(device, source, options.route) {
                Ok(found) => {
                    files[file] = true;
                    proof = proof.or(found);
                }
                Err(why) if is_named => {
                    let path = source.path().to_owned();
                    return Err(Error::RouteUnavailable { route: options.route, path, why });
                }
                Err(why) => refuse(Some(source), why),
            }
        }
        if !files.contains(&true) {
            return Ok(None);
        }
        let count = (2 * readers).min((LANDING_BYTES / slot_bytes.max(1)) as usize);
        let count = count.min(plan.extents().len()).max(1);
        let buffer = match DirectBuffer::new(device, slot_bytes.saturating_mul(count as u64)) {
            Ok(buffer) => Arc::new(buffer),
            Err(Error::DeviceUnavailable { why, .. }) if is_named => {
                let path = sources.first().map(|source| source.path().to_owned()).unwrap_or_default();
                return Err(Error::RouteUnavailable { route: options.route, path, why });
            }
            Err(error) if is_named => return Err(error),
            Err(error) => {
                refuse(None, Unavailable::new(error.to_string(), ""));
                return Ok(None);
            }
        };
        let slots = Slots::new(count, slot_bytes as usize, SlotKind::Device(&buffer))?;
        let route = if options.route == Route::GdsCompat { Route::GdsCompat } else { Route::Gds };
        let through_host = gds::reads_through_host(device);
        Ok(Some(Self { route, files, slots, proof, buffer, through_host }))
    }

    /// Whether a file can take the path, and what proves it.
    fn check(
        device: &Arc<Device>,
        source: &SourceFile,
        route: Route,
    ) -> std::result::Result<Option<String>, Unavailable> {
        if let Some(why) = source.direct_refusal() {
            return Err(why.clone());
        }
        if route == Route::GdsCompat {
            return source.cufile().map(|_| None);
        }
        let proof = gds::prove(device, source)?;
        source.cufile()?;
        Ok(Some(proof))
    }

    pub(super) fn lane(&self) -> GdsLane {
        GdsLane::new(self.buffer.clone())
    }

    /// Bytes of the device that reads land in.
    pub(super) fn landing_bytes(&self) -> u64 {
        self.slots.device_bytes()
    }

    /// Fails if reads that were said to be direct went through host memory after all.
    pub(super) fn check_kept(&self) -> std::result::Result<(), Unavailable> {
        let now = gds::reads_through_host(self.buffer.device());
        match (self.route, self.through_host, now) {
            (Route::Gds, Some(before), Some(now)) if now > before => Err(Unavailable::new(
                format!(
                    "cuFile made {} reads through host memory meanwhile, of this load or of others in this process",
                    now - before
                ),
                "choose route gds-compat to allow that, or staged, which is faster then",
            )),
            _ => Ok(()),
        }
    }
}
