//! The door to loads into memory of the caller's: what targets may be.
#![allow(unsafe_code)]

use super::{
    Checkpoint, FillTarget, Filling, LoadOptions, NumaPlacement, Order, fill::reader_options,
    reporting::Planned,
};
use crate::{
    ByteRange, DeviceId, Error, Result,
    device::Device,
    memory::HugePages,
    metrics,
    plan::{Layout, Plan, PlannedTensor, TensorRequest},
    read::Reader,
    sys::usage::Usage,
};
use std::{collections::BTreeSet, sync::Arc, time::Instant};

impl Checkpoint {
    /// Starts to load into memory of the caller's, without memory of its own but for staging slots of reads that cannot be
    /// made in place. Routes are those of a [`Reader`]. A part of a tensor may
    /// be of very many runs: but for the first 8192, reads are asked for as [`Filling::next_within`] tells of others.
    ///
    /// If it fails, what lies in targets that were not told to be filled is worth nothing.
    ///
    /// # Safety
    /// The memory of each target must be valid for reads and writes and initialised, and nothing else may use it, until the
    /// target was told to be filled, or [`Filling::cancel`] has succeeded.
    ///
    /// # Errors
    /// Those of [`Checkpoint::start`] and [`Reader::new`]; [`Error::InvalidOption`] if a target has another size than its
    /// tensor, or two targets overlap, and for options that choose or convert what the targets already say, or are about
    /// memory that it does not have.
    pub unsafe fn fill(
        &self,
        targets: &[FillTarget],
        options: &LoadOptions,
        order: Order,
    ) -> Result<Filling> {
        // SAFETY: the caller's promise.
        unsafe { self.begin_to_fill(targets, options, order) }.inspect_err(metrics::count_unbegun)
    }

    /// # Safety
    /// That of [`Checkpoint::fill`].
    unsafe fn begin_to_fill(
        &self,
        targets: &[FillTarget],
        options: &LoadOptions,
        order: Order,
    ) -> Result<Filling> {
        let started = Instant::now();
        let usage = Usage::now();
        check(options)?;
        let requests: Vec<TensorRequest> = targets.iter().map(|target| target.request.clone()).collect();
        let plan = Plan::without_reads(self.catalog(), &requests, &LoadOptions::default().plan_options())?;
        let mut planned: Vec<&PlannedTensor> = plan.tensors().iter().collect();
        planned.sort_unstable_by_key(|planned| planned.tensor);
        let planned_of = |target: &FillTarget| {
            let found = planned.binary_search_by_key(&target.request.tensor, |planned| planned.tensor);
            found
                .map(|position| planned[position])
                .map_err(|_| Error::Internal("a target was not planned".into()))
        };
        for target in targets {
            self.check_size(target, planned_of(target)?)?;
        }
        self.check_disjoint(targets)?;
        let devices = devices_of(targets)?;
        let reader_options = reader_options(options, !devices.is_empty())?;
        let reader = Reader::new(&reader_options)?;

        let planned = Planned { catalog: self.catalog(), plan: &plan, options, numa_node: None };
        let mut report = planned.report_without_memory(devices.first().map(|device| &**device));
        report.notes.push("tensors were read into memory of the caller's".into());
        report.time.open_seconds = self.take_open_time().as_secs_f64();
        report.time.prepare_seconds = started.elapsed().as_secs_f64();
        let planned = targets.iter().map(planned_of).collect::<Result<Vec<_>>>()?;
        let parts: Vec<_> = targets.iter().zip(planned).collect();
        let filling = Filling::new(order, report, usage, devices);
        // SAFETY: the caller's promise.
        unsafe { filling.begin(reader, self.catalog(), self.sources(), &parts, options.coalesce_gap_bytes) }
    }

    fn check_size(&self, target: &FillTarget, planned: &PlannedTensor) -> Result<()> {
        let name = &self.catalog().tensor(planned.tensor).name;
        let invalid =
            |reason: String| Error::InvalidOption { option: "copy_into", value: name.to_string(), reason };
        if planned.place.len() != target.len_bytes {
            let needed = planned.place.len();
            return Err(invalid(format!("it needs {needed} bytes, and the target has {}", target.len_bytes)));
        }
        let range = ByteRange::at(target.address, target.len_bytes);
        match range.filter(|range| range.is_empty() || target.address != 0) {
            Some(_) => Ok(()),
            None => Err(invalid(format!("there is no memory at address {:#x}", target.address))),
        }
    }

    fn check_disjoint(&self, targets: &[FillTarget]) -> Result<()> {
        let mut places: Vec<_> = targets.iter().filter(|target| target.len_bytes > 0).collect();
        let key = |target: &&FillTarget| (target.device, target.address);
        places.sort_unstable_by_key(key);
        for pair in places.windows(2) {
            let [first, second] = pair else { continue };
            if first.device == second.device && first.address.saturating_add(first.len_bytes) > second.address
            {
                let name = |target: &FillTarget| &*self.catalog().tensor(target.request.tensor).name;
                let reason = format!("its target and that of '{}' overlap", name(first));
                return Err(Error::invalid_option("copy_into", name(second), reason));
            }
        }
        Ok(())
    }
}

/// The devices of the targets, ready to be written to: queued work of the caller's may still use them.
fn devices_of(targets: &[FillTarget]) -> Result<Vec<Arc<Device>>> {
    let ids: BTreeSet<_> = targets.iter().map(|target| target.device).filter(|id| !id.is_host()).collect();
    let devices: Vec<_> = ids.into_iter().map(Device::open).collect::<Result<_, _>>()?;
    for device in &devices {
        device.settle()?;
    }
    Ok(devices)
}

/// Fails for what was asked and has no meaning here.
fn check(options: &LoadOptions) -> Result<()> {
    let LoadOptions { device, selection, dtype, layout, rings, huge_pages, numa, .. } = options;
    let of_memory = "copy_into has no memory of its own to make so";
    let layout_name = format!("{layout:?}").to_lowercase();
    let given = [
        ("dtype", dtype.map(|dtype| dtype.to_string()), "copy_into takes elements as they are in the file"),
        ("device", (*device != DeviceId::Cpu).then(|| device.to_string()), "targets say their own"),
        ("select", (!selection.is_all()).then(|| "given".into()), "targets say what is loaded"),
        ("layout", (*layout != Layout::default()).then_some(layout_name), of_memory),
        ("rings", rings.map(|rings| rings.to_string()), "copy_into has one at most"),
        ("huge_pages", (*huge_pages == HugePages::Reserved).then(|| "reserved".into()), of_memory),
        (
            "numa",
            (*numa != NumaPlacement::Auto).then(|| numa.text()),
            "copy_into has no memory of its own, and stages on the nodes of the targets' devices",
        ),
        ("pool", options.pool.as_ref().map(|_| "given".into()), of_memory),
        ("allocator", options.allocator.as_ref().map(|_| "given".into()), of_memory),
        (
            "populate",
            options.populate.then(|| "true".into()),
            "only route mapped leaves anything to populate",
        ),
    ];
    for (option, value, reason) in given {
        if let Some(value) = value {
            return Err(Error::InvalidOption { option, value, reason: reason.into() });
        }
    }
    Ok(())
}
