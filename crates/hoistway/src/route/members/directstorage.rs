//! `directstorage`: takes files that DirectStorage opens, and has its runtime read them: into host memory, or for a CUDA device into
//! buffers of D3D12 that the device has imported. Where there are none, bytes for a device go through pinned memory.
#![forbid(unsafe_code)]

use super::queued::INLINE_DEPTH;
use crate::{
    Error,
    device::{Device, DeviceId},
    memory::{SlotKind, Slots},
    report::Refusal,
    route::{
        Access, ReadLane, Route, Unavailable,
        directstorage::{DirectStorageLane, opened},
        graphics::Graphics,
        member::{ALONE, Demand, Facts, Files, Grain, Landing, Member, Share, Stage, Wanted},
        registry::NotOpened,
    },
    source::Source,
    sys::block_device::bypass_io,
};
use hoistway_directstorage::Runtime;
use std::sync::{Arc, OnceLock};

#[derive(Debug)]
struct DirectStorage {
    runtime: &'static Runtime,
    way: Way,
    /// What the system says of BypassIO for the first file.
    bypass_io: OnceLock<String>,
}

/// How bytes reach where they go.
#[derive(Debug)]
enum Way {
    /// They are read there.
    Host,
    /// To a device, through buffers of D3D12.
    Graphics(Graphics),
    /// To a device, through pinned memory, for this reason.
    Pinned(Unavailable),
}

/// Memory of the device that reads land in before they are copied to their places, at most.
const LANDING_BYTES: u64 = 128 << 20;

impl Way {
    fn of(wanted: &Wanted<'_>) -> Self {
        let Some(device) = wanted.device else { return Self::Host };
        let opened = match device.id() {
            DeviceId::Cuda(_) if wanted.is_inline => Err(Unavailable::new(ALONE, "")),
            DeviceId::Cuda(_) => Graphics::open(device),
            _ => Err(Unavailable::new("CUDA devices alone import buffers of D3D12", "")),
        };
        opened.map_or_else(Self::Pinned, Self::Graphics)
    }
}

/// Opens it if it is named. No machine was measured yet, so `auto` leaves it out, and says so where it is there.
pub(in crate::route) fn open(
    wanted: &Wanted<'_>,
    _: &[&Arc<dyn Source>],
    _: &[Arc<dyn Member>],
) -> Result<Option<Arc<dyn Member>>, NotOpened> {
    if wanted.route == Route::DirectStorage {
        let (runtime, way, bypass_io) = (Runtime::get()?, Way::of(wanted), OnceLock::new());
        return Ok(Some(Arc::new(DirectStorage { runtime, way, bypass_io })));
    }
    if wanted.route == Route::Auto && hoistway_directstorage::find().is_ok() {
        let reason = "whether it is faster than route overlapped was not measured on any machine yet";
        return Err(Unavailable::new(reason, "name route directstorage to use it").into());
    }
    Ok(None)
}

impl Member for DirectStorage {
    fn facts(&self) -> Facts {
        Facts {
            landing: match self.way {
                Way::Graphics(_) => Landing::Device,
                Way::Host | Way::Pinned(_) => Landing::Kept,
            },
            files: Files::Alone(Access::Direct),
            grain: Grain::AnyBytes,
            most_lanes: 1,
            ..Facts::of(Route::DirectStorage, "hoistway-dstore")
        }
    }

    fn add(&self, source: &Arc<dyn Source>, _: Access) -> Result<bool, Unavailable> {
        opened(&**source)?;
        self.bypass_io.get_or_init(|| bypass_io_of(&**source));
        Ok(true)
    }

    fn lane(&self, depth: usize) -> Result<Box<ReadLane>, Unavailable> {
        Ok(Box::new(match &self.way {
            Way::Graphics(graphics) => DirectStorageLane::to_device(depth, graphics)?,
            Way::Host | Way::Pinned(_) => DirectStorageLane::new(depth)?,
        }))
    }

    fn share(&self, demand: &Demand<'_>) -> Share {
        let depth = if demand.is_inline { (INLINE_DEPTH, INLINE_DEPTH) } else { demand.threads.depth };
        let threads = demand.threads.rings;
        if !matches!(self.way, Way::Graphics(_)) {
            return Share { threads, depth, slots: 0, slot_bytes: 0 };
        }
        let (slot_bytes, beside) = demand.slot_bytes;
        let room = demand.in_flight_bytes.map_or(LANDING_BYTES, |chosen| chosen.min(LANDING_BYTES));
        let affordable = usize::try_from(room / (slot_bytes + beside).max(1)).unwrap_or(usize::MAX);
        Share { threads, depth, slots: affordable.min(demand.reads).max(1), slot_bytes }
    }

    fn slots(
        &self,
        count: usize,
        slot_bytes: usize,
        _: Option<&Arc<Device>>,
        _: Option<u32>,
    ) -> crate::Result<Slots> {
        let Way::Graphics(graphics) = &self.way else {
            return Err(Error::Internal("pinned slots are the load's".into()));
        };
        let memory = graphics.memory((slot_bytes as u64).saturating_mul(count as u64))?;
        Ok(Slots::new(count, slot_bytes, SlotKind::External(&Arc::new(memory)))?)
    }

    fn refusals(&self, device: Option<DeviceId>) -> Vec<Refusal> {
        let why = match &self.way {
            Way::Pinned(why) => why.clone(),
            // A reader has one route for all devices, which it opens before it knows of any.
            Way::Host if device.is_some() => {
                Unavailable::new("readers read into pinned memory", "load the checkpoint to use it")
            }
            Way::Host | Way::Graphics(_) => return Vec::new(),
        };
        vec![Refusal::new("directstorage by D3D12", None, why)]
    }

    fn notes(&self, stage: Stage) -> Vec<String> {
        if stage != Stage::Open {
            return Vec::new();
        }
        let version = self.runtime.version().map(|version| format!(" {version}")).unwrap_or_default();
        let path = self.runtime.path().display();
        let configured = match self.runtime.not_configured() {
            Some(_) => "; another library of this process has configured it, its telemetry included",
            None => "",
        };
        let way = match &self.way {
            Way::Host => String::new(),
            Way::Graphics(graphics) => format!("; to the device through {graphics}"),
            Way::Pinned(_) => "; to the device through pinned memory".to_owned(),
        };
        let runtime = format!(
            "directstorage (staged by the runtime): DirectStorage{version} of {path}{configured}{way}"
        );
        [runtime].into_iter().chain(self.bypass_io.get().cloned()).collect()
    }
}

/// Whether reads of a file can bypass the filters of its file system, and which driver does not let them. The runtime decides for itself.
fn bypass_io_of(source: &dyn Source) -> String {
    let file = source.local().map_err(|why| why.to_string());
    let file = file.and_then(|local| local.buffered_file().map_err(|error| error.to_string()));
    let found = file.and_then(|file| bypass_io(&file).map_err(|error| error.to_string()));
    let found = found.map_or_else(|error| error, |found| found.to_string());
    format!("BypassIO of {}: {found}", source.path().display())
}
