//! Options of a store.
#![forbid(unsafe_code)]

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

/// An option with a fixed set of values, each of which has a name.
macro_rules! named {
    ($(#[$attribute:meta])* $kind:ident, $option:literal, $default:ident { $($(#[$doc:meta])* $variant:ident = $name:literal,)+ }) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[non_exhaustive]
        pub enum $kind {
            $($(#[$doc])* #[serde(rename = $name)] $variant,)+
        }

        impl $kind {
            /// Every value.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The name that options and reports use.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }

        impl Default for $kind {
            fn default() -> Self {
                Self::$default
            }
        }

        impl fmt::Display for $kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }

        impl FromStr for $kind {
            type Err = Error;

            fn from_str(name: &str) -> Result<Self> {
                Self::ALL.iter().copied().find(|value| value.name() == name).ok_or_else(|| Error::InvalidOption {
                    option: $option,
                    value: name.to_owned(),
                    reason: format!("it must be one of {}", [$($name),+].join(", ")),
                })
            }
        }
    };
}

named! {
    /// What a completed store means after a power cut.
    Durability, "durability", Batched {
        /// Nothing: blocks may be lost, and are then missing. Wrong bytes are never delivered. In layout
        /// [`Files`](LayoutKind::Files), a key that was deleted and stored again may have its older bytes.
        None = "none",
        /// What was acknowledged stays: a block is found, and its store ends, once it is on the disk. Blocks that come while
        /// others are synced share the next sync.
        Batched = "batched",
        /// As `batched`.
        Sync = "sync",
    }
}

named! {
    /// How blocks lie in files.
    LayoutKind, "layout", Segments {
        /// In large files, with an index of their own. The fast one.
        Segments = "segments",
        /// A file each, as vLLM's tier `fs` names them: for shared file systems that others read too. Looking up, loading
        /// and storing ask the file system on the caller's thread, and wait as long as that takes to answer.
        Files = "files",
    }
}

named! {
    /// Which block goes first when room is needed.
    Eviction, "eviction", S3Fifo {
        /// Those that were not asked for again soon after they were stored, then the oldest that were not asked for
        /// since (S3-FIFO).
        S3Fifo = "s3fifo",
        /// The one that was not used for the longest time.
        Lru = "lru",
    }
}

named! {
    /// Which blocks are stored at all.
    Admission, "admission", Always {
        /// Every one.
        Always = "always",
        /// Those that were stored, or asked for, before: spares the drive what is used once.
        SecondTouch = "second_touch",
    }
}

named! {
    /// How bytes move between host memory and files.
    Route, "route", Auto {
        /// `io_uring`, or `threads` where that is refused.
        Auto = "auto",
        /// Asynchronous reads and writes past the page cache.
        IoUring = "io_uring",
        /// A pool of threads that read and write, past the page cache where the file system allows it.
        Threads = "threads",
    }
}

named! {
    /// Whether blocks move between a device and storage past the host's memory.
    DirectPath, "direct", Prefer {
        /// Never: by way of pinned host memory.
        Off = "off",
        /// Where that is proven to work; else by way of pinned host memory, and the report says why.
        Prefer = "prefer",
        /// Always: an error where it does not work.
        Require = "require",
    }
}

named! {
    /// What a process may do with a store.
    StoreAccess, "access", ReadWrite {
        /// Read and write.
        ReadWrite = "read_write",
        /// Read what others write. Changes no file.
        Read = "read",
    }
}

named! {
    /// When a block is written to the far tier.
    FarPolicy, "policy", WriteThrough {
        /// Before its store ends. A store also ends if the far tier fails, refuses the block, or takes longer than
        /// [`FarOptions::timeout`]: the completion counts such blocks, and the write is not repeated.
        WriteThrough = "write_through",
        /// After its store has ended. The block stays in the near tier until it is written.
        WriteBack = "write_back",
    }
}

/// The far tier of a store: a second store, such as one on a shared file system, behind the near one.
///
/// Lookups answer for both tiers, and loads read from the far tier what the near one lacks. A failure of the far tier
/// never fails the near one.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FarOptions {
    /// Directory of the far store. It is not made: until it is there, the near tier goes on without the far one.
    pub root: PathBuf,
    /// Most bytes that all files below `root` take. Required for writing.
    pub capacity_bytes: Option<u64>,
    /// Bytes that are left free on the file system.
    pub min_free_bytes: u64,
    /// How blocks lie in files.
    pub layout: Option<LayoutKind>,
    /// What acknowledgement by the far store means.
    pub durability: Durability,
    /// When blocks are written to it.
    pub policy: FarPolicy,
    /// Whether a block that is loaded from the far tier is stored in the near one.
    pub promote: bool,
    /// Longest time of one operation of the far tier.
    pub timeout: Duration,
    /// Longest time that a lookup waits for a far tier that has to ask its file system.
    pub lookup_timeout: Duration,
    /// Most bytes that blocks which wait to be written take in the near tier. The oldest are dropped when there are more.
    pub backlog_bytes: u64,
    /// Host memory for blocks that move between the tiers: of each shard its length and 4 KiB.
    pub staging_bytes: u64,
    /// Faults between the far store and its disk, for tests.
    #[cfg(feature = "fault-injection")]
    pub(crate) faults: Option<crate::fault::FaultScript>,
}

hoistway_io::setters! {
    FarOptions {
        capacity_bytes: Option<u64>,
        min_free_bytes: u64,
        layout: Option<LayoutKind>,
        durability: Durability,
        policy: FarPolicy,
        promote: bool,
        timeout: Duration,
        lookup_timeout: Duration,
        backlog_bytes: u64,
        staging_bytes: u64,
        #[cfg(feature = "fault-injection")]
        #[doc(hidden)]
        faults: Option<crate::fault::FaultScript>,
    }
}

impl FarOptions {
    /// A far tier at `root`, with defaults for the rest.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            capacity_bytes: None,
            min_free_bytes: 1 << 30,
            layout: None,
            durability: Durability::default(),
            policy: FarPolicy::default(),
            promote: true,
            timeout: Duration::from_secs(5),
            lookup_timeout: Duration::from_millis(50),
            backlog_bytes: 1 << 30,
            staging_bytes: 256 << 20,
            #[cfg(feature = "fault-injection")]
            faults: None,
        }
    }
}

/// Options of [`Store::open`](crate::Store::open).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Directory of the store. Made if it is not there and `access` allows it.
    pub root: PathBuf,
    /// Most bytes that all files below `root` take, of all processes. Required for writing.
    pub capacity_bytes: Option<u64>,
    /// Bytes that are left free on the file system, whatever the capacity.
    pub min_free_bytes: u64,
    /// What a process may do.
    pub access: StoreAccess,
    /// How blocks lie in files. What an existing store has wins over `None`, and differs from `Some` by an error.
    pub layout: Option<LayoutKind>,
    /// What acknowledgement means.
    pub durability: Durability,
    /// Which block goes first.
    pub eviction: Eviction,
    /// Which blocks are stored.
    pub admission: Admission,
    /// Bytes of a segment file. Default: 1 GiB, less for small capacities.
    pub segment_bytes: Option<u64>,
    /// How bytes move between host memory and files.
    pub route: Route,
    /// Whether devices are read from and written to directly.
    pub direct: DirectPath,
    /// Threads that move bytes, at most 256. Default: 4; 8 for the route `threads`.
    pub io_threads: Option<usize>,
    /// Host memory of the store's own, through which pass blocks that are not aligned; once a device is used, as much again,
    /// pinned, for what does not move directly. At least [`LEAST_STAGING_BYTES`](Self::LEAST_STAGING_BYTES). Default: 64 MiB.
    pub staging_bytes: Option<u64>,
    /// Most bytes of transfers that are under way; more are queued. Stores are refused as busy, each as a whole, if those
    /// before it leave no room in as many bytes; one that is larger goes alone. So are requests to load, but by their
    /// number: those before it and its own may have 65,536 blocks, or 49,152 if it is no [`Priority::Demand`](crate::Priority::Demand).
    pub max_in_flight_bytes: u64,
    /// Whether the checksum of a block is compared when it is loaded. That of a block that no sync covers is always compared:
    /// one that another process stores with [`Durability::None`], or stored and did not end with a `close`.
    pub verify: bool,
    /// Time that a load or a store may take unless it says otherwise.
    pub timeout: Option<Duration>,
    /// Time after which a block is given up that lacks shards and has got no further one: it holds room meanwhile.
    pub partial_timeout: Duration,
    /// Bytes a second that are read in the background to find damaged blocks. 0: none.
    pub scrub_bytes_per_second: u64,
    /// Whether the store is only opened to tend it, as the command `hoistway kv gc` does: other processes are not told the
    /// capacity and the durability of these options, and a capacity that nothing can be stored in is no error.
    pub for_upkeep: bool,
    /// A second tier behind this store.
    pub far: Option<FarOptions>,
    /// The missing parts that are created.
    pub(crate) creation: Creation,
    /// Faults between the store and its disk, for tests.
    #[cfg(feature = "fault-injection")]
    pub(crate) faults: Option<crate::fault::FaultScript>,
}

/// The parts of a store that an opening creates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Creation {
    /// The directory, with those above it, and the store.
    Directory,
    /// The store, in a directory that is there.
    Store,
    /// Nothing.
    Nothing,
}

hoistway_io::setters! {
    StoreOptions {
        capacity_bytes: Option<u64>,
        min_free_bytes: u64,
        access: StoreAccess,
        layout: Option<LayoutKind>,
        durability: Durability,
        eviction: Eviction,
        admission: Admission,
        segment_bytes: Option<u64>,
        route: Route,
        direct: DirectPath,
        io_threads: Option<usize>,
        staging_bytes: Option<u64>,
        max_in_flight_bytes: u64,
        verify: bool,
        timeout: Option<Duration>,
        partial_timeout: Duration,
        scrub_bytes_per_second: u64,
        for_upkeep: bool,
        far: Option<FarOptions>,
        #[cfg(feature = "fault-injection")]
        #[doc(hidden)]
        faults: Option<crate::fault::FaultScript>,
    }
}

impl StoreOptions {
    /// The least that [`staging_bytes`](Self::staging_bytes) may be: what one transfer of a device passes through.
    pub const LEAST_STAGING_BYTES: u64 = 8 << 20;

    /// A store at `root`, with defaults for the rest.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            capacity_bytes: None,
            min_free_bytes: 1 << 30,
            access: StoreAccess::default(),
            layout: None,
            durability: Durability::default(),
            eviction: Eviction::default(),
            admission: Admission::default(),
            segment_bytes: None,
            route: Route::default(),
            direct: DirectPath::default(),
            io_threads: None,
            staging_bytes: None,
            max_in_flight_bytes: 256 << 20,
            verify: true,
            timeout: None,
            partial_timeout: Duration::from_secs(60),
            scrub_bytes_per_second: 0,
            for_upkeep: false,
            far: None,
            creation: Creation::Directory,
            #[cfg(feature = "fault-injection")]
            faults: None,
        }
    }
}
