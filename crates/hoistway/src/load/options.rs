//! What a caller can ask of a load.
#![deny(unsafe_code)]

#[cfg(feature = "fault-injection")]
use crate::route::fault::FaultScript;
use crate::{
    Alignment, Cancel, DeviceId, Dtype, Error, Result,
    environment::{self, bytes, count, named},
    memory::{HugePages, LentMemory, MemoryPool},
    plan::{Cast, Destination, Layout, PlanOptions, Selection},
    route::{DirectIo, Route, threefs_client},
};
use bytesize::ByteSize;
use serde::{Deserialize, Serialize};
use std::{fmt, path::PathBuf, sync::Arc};

/// Longest read that a load may make: systems end longer ones early.
const MAX_CHUNK_BYTES: u64 = 1 << 30;

/// The same for a load to a device, whose slots are pinned memory.
const MAX_PINNED_CHUNK_BYTES: u64 = 32 << 20;

/// Which NUMA node arenas come from, as long as it has memory, and lanes run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum NumaPlacement {
    /// The node that the device hangs off, for a load to a device; else as [`Unbound`](Self::Unbound). Threads stay on those of the
    /// node's processors that the caller's thread may use.
    #[default]
    Auto,
    /// Wherever the kernel puts them.
    Unbound,
    /// The node that the first file's drive hangs off. The report says if the system does not tell it.
    NearStorage,
    /// This node.
    Node(u32),
}

impl NumaPlacement {
    /// As options name it.
    pub(super) fn text(self) -> String {
        match self {
            Self::Auto => "auto".into(),
            Self::Unbound => "unbound".into(),
            Self::NearStorage => "near_storage".into(),
            Self::Node(node) => node.to_string(),
        }
    }
}

/// How to load. The default is right for almost everyone.
///
/// ```
/// use hoistway::{LoadOptions, Route};
/// let mut options = LoadOptions::default().route(Route::Threads).threads(4);
/// options.memory_budget_bytes = None;
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Where tensors go.
    pub device: DeviceId,
    /// Which way the bytes take.
    pub route: Route,
    /// Whether reads go past the page cache.
    pub direct: DirectIo,
    /// Who speaks to the daemon of a 3FS.
    pub usrbio: threefs_client::Client,
    /// Directories that may hold the vendor's library for 3FS, besides those that are known and those that
    /// `HF3FS_LIB_DIR` and `LD_LIBRARY_PATH` name, which are looked at before.
    pub usrbio_directories: Vec<PathBuf>,
    /// Which tensors, and which parts of them.
    pub selection: Selection,
    /// The type that a device converts floats to as they arrive: `F32`, `F16` or `BF16`. Integers stay what they are.
    pub dtype: Option<Dtype>,
    /// How tensors share memory.
    pub layout: Layout,
    /// Longest single read in bytes; a multiple of 4096.
    pub chunk_bytes: u64,
    /// Unwanted bytes between two wanted ranges that are read along rather than skipped.
    pub coalesce_gap_bytes: u64,
    /// Bytes in flight to one device. Default: 32 MiB, 128 MiB for network file systems without USRBIO, and more where
    /// rings find that this makes the device faster.
    pub in_flight_bytes: Option<u64>,
    /// Rings of routes `io_uring` and `usrbio`, ports of route `overlapped`. Default: one, or two if there are eight cores and
    /// the device has several queues; to host memory from a 3FS two, or four if there are eight cores.
    pub rings: Option<usize>,
    /// Threads of route `threads` and of copies from the page cache, at most. Default: by cores and by bytes in flight.
    pub threads: Option<usize>,
    /// Kind of pages that arenas are made of.
    pub huge_pages: HugePages,
    /// NUMA placement of arenas and lanes.
    pub numa: NumaPlacement,
    /// Memory to take arenas from, already touched.
    pub pool: Option<MemoryPool>,
    /// Memory of a device to put tensors into; without it, the driver's own.
    pub allocator: Option<DeviceAllocator>,
    /// Most bytes of host memory that the load may allocate, tensors and staging together.
    pub memory_budget_bytes: Option<u64>,
    /// With route `mapped`: read everything in at once rather than on first touch.
    pub populate: bool,
    /// Ends the load early, also while it starts.
    pub cancel: Option<Cancel>,
    /// Faults to inject into the lanes.
    #[cfg(feature = "fault-injection")]
    pub(crate) faults: Option<FaultScript>,
}

hoistway_io::setters! {
    LoadOptions {
        device: DeviceId,
        route: Route,
        direct: DirectIo,
        usrbio: threefs_client::Client,
        usrbio_directories: Vec<PathBuf>,
        selection: Selection,
        dtype: Option<Dtype>,
        layout: Layout,
        chunk_bytes: u64,
        coalesce_gap_bytes: u64,
        in_flight_bytes: Option<u64>,
        rings: Option<usize>,
        threads: Option<usize>,
        huge_pages: HugePages,
        numa: NumaPlacement,
        pool: Option<MemoryPool>,
        allocator: Option<DeviceAllocator>,
        memory_budget_bytes: Option<u64>,
        populate: bool,
        cancel: Option<Cancel>,
        #[cfg(feature = "fault-injection")]
        #[doc(hidden)]
        faults: Option<FaultScript>,
    }
}

/// Gives memory of a device, such as that of a framework's own allocator.
#[derive(Clone)]
pub struct DeviceAllocator {
    allocate: Arc<dyn Fn(u64) -> Result<LentMemory> + Send + Sync>,
}

impl DeviceAllocator {
    /// An allocator that calls `allocate` with a number of bytes, on the thread that starts the load.
    ///
    /// # Safety
    /// Each memory must be of the device that the load goes to, of at least the bytes asked for, used by nothing else
    /// but for work queued on the stream that it names, and live until its owner is dropped.
    #[allow(unsafe_code)]
    pub unsafe fn new(allocate: impl Fn(u64) -> Result<LentMemory> + Send + Sync + 'static) -> Self {
        Self { allocate: Arc::new(allocate) }
    }

    pub(super) fn allocate(&self, bytes: u64) -> Result<LentMemory> {
        (self.allocate)(bytes)
    }
}

impl fmt::Debug for DeviceAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceAllocator").finish_non_exhaustive()
    }
}

impl Default for LoadOptions {
    fn default() -> Self {
        let PlanOptions { layout, chunk_bytes, coalesce_gap_bytes, .. } = PlanOptions::default();
        Self {
            device: DeviceId::Cpu,
            route: Route::Auto,
            direct: DirectIo::Auto,
            usrbio: threefs_client::Client::Auto,
            usrbio_directories: Vec::new(),
            selection: Selection::all(),
            dtype: None,
            layout,
            chunk_bytes,
            coalesce_gap_bytes,
            in_flight_bytes: None,
            rings: None,
            threads: None,
            huge_pages: HugePages::default(),
            numa: NumaPlacement::default(),
            pool: None,
            allocator: None,
            memory_budget_bytes: None,
            populate: false,
            cancel: None,
            #[cfg(feature = "fault-injection")]
            faults: None,
        }
    }
}

impl LoadOptions {
    /// The defaults, changed by the environment: `HOISTWAY_DEVICE`, `HOISTWAY_ROUTE`, `HOISTWAY_DIRECT`,
    /// `HOISTWAY_DTYPE`, `HOISTWAY_LAYOUT`,
    /// `HOISTWAY_CHUNK`, `HOISTWAY_COALESCE_GAP`, `HOISTWAY_IN_FLIGHT`, `HOISTWAY_RINGS`, `HOISTWAY_THREADS`,
    /// `HOISTWAY_HUGE_PAGES`, `HOISTWAY_NUMA`, `HOISTWAY_MEMORY_BUDGET`, `HOISTWAY_POPULATE`, `HOISTWAY_USRBIO`.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] names the variable.
    pub fn from_env() -> Result<Self> {
        let mut options = Self::default();
        environment::apply(&VARIABLES, |option, value| options.set(option, value))?;
        Ok(options)
    }

    /// Sets an option by its name, from text: what environment variables, flags and Python arguments share.
    ///
    /// ```
    /// use hoistway::{LoadOptions, Route};
    /// let mut options = LoadOptions::default();
    /// options.set("route", "threads")?;
    /// options.set("memory_budget", "8GiB")?;
    /// assert_eq!(options.route, Route::Threads);
    /// assert_eq!(options.memory_budget_bytes, Some(8 << 30));
    /// # Ok::<(), hoistway::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidOption`] if there is no such option or it cannot have this value.
    pub fn set(&mut self, option: &str, value: &str) -> Result<()> {
        match option {
            "device" => self.device = value.parse()?,
            "dtype" => self.dtype = Some(dtype(value)?),
            "route" => self.route = value.parse()?,
            "direct" => self.direct = named("direct", value)?,
            "layout" => self.layout = named("layout", value)?,
            "chunk" => self.chunk_bytes = bytes("chunk", value)?,
            "coalesce_gap" => self.coalesce_gap_bytes = bytes("coalesce_gap", value)?,
            "in_flight" => self.in_flight_bytes = Some(bytes("in_flight", value)?),
            "rings" => self.rings = Some(count("rings", value)?),
            "threads" => self.threads = Some(count("threads", value)?),
            "huge_pages" => self.huge_pages = named("huge_pages", value)?,
            "numa" => {
                self.numa = match value {
                    "auto" => NumaPlacement::Auto,
                    "unbound" => NumaPlacement::Unbound,
                    "near_storage" => NumaPlacement::NearStorage,
                    node => NumaPlacement::Node(node.parse().map_err(|_| {
                        Error::invalid_option(
                            "numa",
                            value,
                            "it must be auto, unbound, near_storage or the number of a node",
                        )
                    })?),
                }
            }
            "memory_budget" => self.memory_budget_bytes = Some(bytes("memory_budget", value)?),
            "usrbio" => self.usrbio = named("usrbio", value)?,
            "populate" => self.populate = environment::boolean("populate", value)?,
            _ => {
                let known: Vec<&str> = VARIABLES.iter().map(|(_, option)| *option).collect();
                let reason = format!("the options are {}", known.join(", "));
                return Err(Error::invalid_option("option", option, reason));
            }
        }
        Ok(())
    }

    /// Drops what the environment says of memory that is allocated, for a load that allocates none.
    #[doc(hidden)]
    #[must_use]
    pub fn without_memory(mut self) -> Self {
        let Self { layout, huge_pages, numa, .. } = Self::default();
        if self.huge_pages == HugePages::Reserved {
            self.huge_pages = huge_pages;
        }
        self.layout(layout).numa(numa)
    }

    /// Fails for numbers that no load can work with.
    pub(super) fn check(&self) -> Result<()> {
        for (option, value) in [("rings", self.rings), ("threads", self.threads)] {
            if let Some(value) = value {
                count(option, &value.to_string())?;
            }
        }
        let block = Alignment::BLOCK;
        if self.chunk_bytes == 0 || self.chunk_bytes > MAX_CHUNK_BYTES || !block.divides(self.chunk_bytes) {
            let reason =
                format!("it must be a multiple of {} up to {}", block.bytes(), ByteSize(MAX_CHUNK_BYTES));
            return Err(Error::invalid_option("chunk", self.chunk_bytes, reason));
        }
        if self.populate && !self.route.is_mapping() {
            let reason = "only route mapped leaves anything to populate";
            return Err(Error::invalid_option("populate", "true", reason));
        }
        self.check_device()?;
        if self.route.is_of_page_cache() && self.direct == DirectIo::Always {
            let reason = format!("route {} takes bytes from the page cache", self.route);
            return Err(Error::invalid_option("direct", "always", reason));
        }
        Ok(())
    }

    /// Fails for options that do not go with the target.
    fn check_device(&self) -> Result<()> {
        let refuse = |option, value: &dyn fmt::Display, reason: String| {
            Err(Error::InvalidOption { option, value: value.to_string(), reason })
        };
        match (self.device, self.dtype) {
            (DeviceId::Cpu, Some(dtype)) => {
                return refuse(
                    "dtype",
                    &dtype,
                    "conversions run on a device, and the target is cpu; name one, such as device=cuda"
                        .into(),
                );
            }
            (_, Some(dtype)) if !Cast::TARGETS.contains(&dtype) => {
                return refuse(
                    "dtype",
                    &dtype,
                    "it must be F32, F16 or BF16 (float32, float16, bfloat16)".into(),
                );
            }
            _ => {}
        }
        match (self.device, self.route) {
            (DeviceId::Cpu, route) if route.leads_to_device() => {
                return refuse(
                    "route",
                    &self.route,
                    "it leads to a device, and the target is cpu; name one, such as device=cuda".into(),
                );
            }
            (_, route) if route.is_unified() && (self.dtype.is_some() || self.allocator.is_some()) => {
                let reason = "it copies nothing: leave out dtype and allocator, or choose route staged";
                return refuse("route", &self.route, reason.into());
            }
            (device, route) if route.is_mapping() && !device.is_host() => {
                let reason = format!("a mapping is host memory, and the target is {}", self.device);
                return refuse("route", &self.route, reason);
            }
            _ => {}
        }
        if self.device != DeviceId::Cpu && self.chunk_bytes > MAX_PINNED_CHUNK_BYTES {
            let most = ByteSize(MAX_PINNED_CHUNK_BYTES);
            return refuse("chunk", &self.chunk_bytes, format!("to a device it may be {most} at most"));
        }
        if self.direct == DirectIo::Never && self.route.reads_any_bytes() {
            return refuse(
                "direct",
                &"never",
                format!("route {} bypasses the page cache; choose another route", self.route),
            );
        }
        if self.route.is_mapping() {
            self.check_mapping()?;
        }
        match (self.device, &self.pool, &self.allocator) {
            (device, Some(_), _) if !device.is_host() => refuse(
                "pool",
                &"a pool",
                format!("it is host memory, and the target is {}; leave it out", self.device),
            ),
            (DeviceId::Cpu, _, Some(_)) => refuse(
                "allocator",
                &"an allocator",
                "it gives memory of a device, and the target is cpu; name one, such as device=cuda".into(),
            ),
            _ => Ok(()),
        }
    }

    /// Fails for what was asked of memory: a mapping allocates none.
    fn check_mapping(&self) -> Result<()> {
        let is_placed = !matches!(self.numa, NumaPlacement::Auto | NumaPlacement::Unbound);
        let numa = self.numa.text();
        let given = [
            ("pool", self.pool.is_some(), "a pool"),
            ("layout", self.layout == Layout::Packed, "packed"),
            ("layout", self.layout == Layout::Tensor, "tensor"),
            ("huge_pages", self.huge_pages == HugePages::Reserved, "reserved"),
            ("numa", is_placed, numa.as_str()),
        ];
        match given.into_iter().find(|(_, is_given, _)| *is_given) {
            None => Ok(()),
            Some((option, _, value)) => {
                let reason = format!("route {} allocates no memory", self.route);
                Err(Error::invalid_option(option, value, reason))
            }
        }
    }

    pub(super) fn plan_options(&self) -> PlanOptions {
        PlanOptions {
            destination: match self.device {
                DeviceId::Cpu => Destination::Host,
                _ => Destination::Device { dtype: self.dtype },
            },
            layout: self.layout,
            chunk_bytes: self.chunk_bytes,
            coalesce_gap_bytes: self.coalesce_gap_bytes,
            ..PlanOptions::default()
        }
    }
}

/// Environment variables and the options that they set.
const VARIABLES: [(&str, &str); 15] = [
    ("HOISTWAY_DEVICE", "device"),
    ("HOISTWAY_DTYPE", "dtype"),
    ("HOISTWAY_ROUTE", "route"),
    ("HOISTWAY_DIRECT", "direct"),
    ("HOISTWAY_LAYOUT", "layout"),
    ("HOISTWAY_CHUNK", "chunk"),
    ("HOISTWAY_COALESCE_GAP", "coalesce_gap"),
    ("HOISTWAY_IN_FLIGHT", "in_flight"),
    ("HOISTWAY_RINGS", "rings"),
    ("HOISTWAY_THREADS", "threads"),
    ("HOISTWAY_HUGE_PAGES", "huge_pages"),
    ("HOISTWAY_NUMA", "numa"),
    ("HOISTWAY_MEMORY_BUDGET", "memory_budget"),
    ("HOISTWAY_POPULATE", "populate"),
    ("HOISTWAY_USRBIO", "usrbio"),
];

/// An element type by its safetensors name, or by what frameworks call it.
fn dtype(value: &str) -> Result<Dtype> {
    let name = value.to_ascii_lowercase();
    let found = match name.strip_prefix("torch.").unwrap_or(&name) {
        "float32" | "float" => Some(Dtype::F32),
        "float16" | "half" => Some(Dtype::F16),
        "bfloat16" => Some(Dtype::Bf16),
        other => Dtype::ALL.iter().copied().find(|dtype| dtype.name().eq_ignore_ascii_case(other)),
    };
    found.ok_or_else(|| {
        Error::invalid_option("dtype", value, "it must be F32, F16 or BF16 (float32, float16, bfloat16)")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variable_is_known_when_others_are_looked_for() {
        for (variable, _) in VARIABLES {
            assert!(environment::KNOWN.contains(&variable), "{variable}");
        }
    }

    #[test]
    fn every_variable_names_an_option_and_bad_values_say_what_is_allowed() {
        for (_, option) in VARIABLES {
            let error = LoadOptions::default().set(option, "nonsense!").unwrap_err();
            assert!(error.to_string().starts_with(&format!("{option} cannot be 'nonsense!'")), "{error}");
        }
        let error = LoadOptions::default().set("direct", "x").unwrap_err();
        assert!(error.to_string().ends_with("it must be one of auto, always, never"), "{error}");
        let error = LoadOptions::default().set("rout", "x").unwrap_err();
        assert!(error.to_string().contains("memory_budget"), "{error}");
    }

    #[test]
    fn values_are_read() {
        let mut options = LoadOptions::default();
        for (option, value) in
            [("direct", "never"), ("layout", "packed"), ("numa", "1"), ("huge_pages", "reserved")]
        {
            options.set(option, value).unwrap();
        }
        assert_eq!(options.direct, DirectIo::Never);
        assert_eq!(options.layout, Layout::Packed);
        assert_eq!(options.numa, NumaPlacement::Node(1));
        assert_eq!(options.huge_pages, HugePages::Reserved);
    }
}
