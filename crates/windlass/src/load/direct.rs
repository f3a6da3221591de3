//! The direct path of one load to a device: which files take it, and through which slots.
#![forbid(unsafe_code)]

use super::{DirectIo, LoadOptions, delivery::Needs, usrbio::UsrbioPath};
use crate::{
    Error, Result,
    device::{Device, DirectBuffer},
    memory::{SlotKind, Slots},
    plan::Plan,
    report::Refusal,
    route::{BlockingLane, CuFileRead, Route, SourceFile, Unavailable, gds},
};
use std::sync::{Arc, OnceLock};

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
    /// What the counters said at the end.
    kept: OnceLock<std::result::Result<(), Unavailable>>,
}

impl DirectPath {
    /// The direct path for a load of `plan` to `device`, if its route may or must take it, but for files that USRBIO
    /// reads. Adds to `refused` why others do not, if they need not.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`] if the caller named a route that is not there.
    pub(super) fn find(
        plan: &Plan,
        sources: &[Arc<SourceFile>],
        options: &LoadOptions,
        device: &Arc<Device>,
        (readers, needs): (usize, &Needs),
        usrbio: Option<&UsrbioPath>,
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
        // A file that has nothing but a last block, cut short, needs no direct path.
        let whole = plan.extents().iter().filter(|extent| Plan::is_whole_blocks(extent));
        let mut used: Vec<usize> = whole.map(|extent| extent.file.index()).collect();
        used.dedup();
        used.retain(|&file| !usrbio.is_some_and(|path| path.takes(file)));
        for file in used {
            let source = &sources[file];
            match Self::check(device, source, options.route) {
                Ok(found) => {
                    files[file] = true;
                    proof = proof.or(found);
                }
                Err(why) if is_named => {
                    let path = Some(source.path().to_owned());
                    return Err(Error::RouteUnavailable { route: options.route, path, why });
                }
                Err(why) => refuse(Some(source), why),
            }
        }
        if !files.contains(&true) {
            return Ok(None);
        }
        let slot_bytes = needs.slot_bytes;
        let count = (2 * readers).min(needs.slots_in(LANDING_BYTES)).min(plan.extents().len());
        let buffer =
            match DirectBuffer::new(device, slot_bytes.saturating_mul(count as u64)).map_err(Error::from) {
                Ok(buffer) => Arc::new(buffer),
                Err(Error::DeviceUnavailable { why, .. }) if is_named => {
                    return Err(Error::RouteUnavailable { route: options.route, path: None, why });
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
        Ok(Some(Self { route, files, slots, proof, buffer, through_host, kept: OnceLock::new() }))
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

    pub(super) fn lane(&self) -> BlockingLane<CuFileRead> {
        BlockingLane::new(CuFileRead(self.buffer.clone()))
    }

    /// Bytes of the device that reads land in.
    pub(super) fn landing_bytes(&self) -> u64 {
        self.slots.device_bytes()
    }

    /// Whether reads that were said to be direct have been, as far as is known: for good, once the load has asked
    /// [`DirectPath::check_kept`] at its end.
    pub(super) fn is_kept(&self) -> bool {
        self.kept.get().map_or_else(|| self.look().is_ok(), std::result::Result::is_ok)
    }

    /// Fails if reads that were said to be direct went through host memory after all, or if nobody counted them. Asked
    /// when all are made; the answer stays.
    pub(super) fn check_kept(&self) -> std::result::Result<(), Unavailable> {
        self.kept.get_or_init(|| self.look()).clone()
    }

    fn look(&self) -> std::result::Result<(), Unavailable> {
        if self.route != Route::Gds {
            return Ok(());
        }
        match (self.through_host, gds::reads_through_host(self.buffer.device())) {
            (Some(before), Some(now)) if now == before => Ok(()),
            (Some(before), Some(now)) if now > before => Err(Unavailable::new(
                format!(
                    "cuFile made {} reads through host memory meanwhile, of this load or of others in this process",
                    now - before
                ),
                "choose route gds-compat to allow that, or staged, which is faster then",
            )),
            _ => Err(Unavailable::new("cuFile's counters were stopped or set back meanwhile", "")),
        }
    }
}
