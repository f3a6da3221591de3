//! What a load starts from, and its plan.
#![forbid(unsafe_code)]

use super::{LoadOptions, flow::StreamOptions};
use crate::{
    Catalog, DeviceId, Error, Result,
    device::Device,
    memory,
    plan::{Destination, Plan, PlanOptions},
    route::Unavailable,
    source::Source,
};
use std::{sync::Arc, time::Duration};
use tracing::{Span, debug_span};

/// What a load starts from.
#[derive(Clone, Copy)]
pub(super) struct Start<'a> {
    pub(super) catalog: &'a Arc<Catalog>,
    /// The files by their position in the catalog.
    pub(super) sources: &'a [Arc<dyn Source>],
    pub(super) options: &'a LoadOptions,
    pub(super) stream: &'a StreamOptions,
    /// Whether its owner takes tensors one by one, and waits for the first.
    pub(super) is_loop: bool,
    /// How long opening the checkpoint took.
    pub(super) open_time: Duration,
    /// That of the load.
    pub(super) span: &'a Span,
}

impl Start<'_> {
    /// Checks the options, and opens the device that they name.
    pub(super) fn device(&self) -> Result<Option<Arc<Device>>> {
        let options = self.options;
        options.check()?;
        if options.route.is_mapping() {
            let reason = "a mapping has nothing to do in the background: use load rather than start";
            return Err(Error::invalid_option("route", options.route, reason));
        }
        let device = match options.device {
            DeviceId::Cpu => None,
            device => Some(Device::open(device)?),
        };
        if let Some(device) = &device {
            // What earlier loads had to leave may be free by now.
            device.ask_again();
        }
        if let (Some(device), true) = (&device, options.route.is_unified())
            && !device.shares_host_memory()
        {
            let why = Unavailable::new(
                format!("{} ({}) has memory of its own", device.name(), device.info().name),
                "choose route auto or staged",
            );
            return Err(Error::RouteUnavailable { route: options.route, path: None, why });
        }
        Ok(device)
    }

    pub(super) fn plan_options(&self, chunk_bytes: u64) -> PlanOptions {
        let mut plan_options = PlanOptions { chunk_bytes, ..self.options.plan_options() };
        if self.options.route.is_unified() {
            plan_options.destination = Destination::Host;
        }
        self.stream.limit(&mut plan_options);
        plan_options
    }

    pub(super) fn plan(&self, chunk_bytes: u64) -> Result<Plan, NoLoad> {
        let _planning = debug_span!("plan", chunk_bytes).entered();
        let requests = self.options.selection.resolve(self.catalog)?;
        let may_make = |reads| {
            let bytes = memory::budget::bookkeeping_bytes(reads);
            memory::budget::check(0, bytes, self.options.memory_budget_bytes).map_err(NoLoad::TooManyReads)
        };
        Plan::within(self.catalog, &requests, &self.plan_options(chunk_bytes), may_make)
    }
}

/// Why there is no load that has all its reads.
#[derive(Debug)]
pub(super) enum NoLoad {
    /// They take more memory than there is. Waves of them may not.
    TooManyReads(Error),
    Failed(Error),
}

impl<E: Into<Error>> From<E> for NoLoad {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}
