//! The store: what is resident, what is being read, what is leased.
//!
//! [`Store::ensure`] is the door. `ledger` decides what is read and what is evicted, `monitor` carries that out under one lock,
//! `reading` reads by the engine's [`Reader`] into the rooms of a backing, and `lease` is what callers hold. Reads have two
//! priorities, demand and prefetch; the reader's scheduler orders them, the store has no queue of reads.
//!
//! ```no_run
//! use std::sync::Arc;
//! use hoistway::Checkpoint;
//! use hoistway_experts::{Policy, catalog::ExpertCatalog, store::{Store, StoreOptions}};
//! # fn policy() -> Box<dyn Policy> { unimplemented!() }
//! let checkpoint = Checkpoint::open(&["model.gguf"])?;
//! let catalog = Arc::new(ExpertCatalog::of_checkpoint(&checkpoint, None)?);
//! let files = ExpertCatalog::open_files(&checkpoint);
//! let store = Store::open(catalog, files, policy(), &StoreOptions::default().budget_bytes(8 << 30))?;
//! // The router of layer 0 chose these experts.
//! let lease = store.ensure(0, &[3, 17])?;
//! for expert in lease.units() {
//!     for part in expert.parts() {
//!         println!("{} at {:#x}", part.part().role, part.address());
//!     }
//! }
//! # Ok::<(), hoistway_experts::Error>(())
//! ```

mod guard;
mod lease;
mod ledger;
#[cfg(test)]
mod model;
mod monitor;
mod options;
mod prepare_threads;
mod reading;
mod stats;
mod sync;
#[cfg(test)]
mod tests;

pub use lease::{Lease, LeasedPart, LeasedUnit, ReadyUnit, Ticket};
pub use options::StoreOptions;
pub use stats::{Change, ResidencyEvent, StoreStats};

use crate::{
    Error, ExpertId, Policy, Result,
    backing::{HostLevel, UnitRoom},
    catalog::{ExpertCatalog, Part, Unit, UnitId},
    pack,
};
use hoistway::{
    Cancel,
    read::{ReadFile, Reader},
};
use hoistway_io::parallel::lock;
use lease::Held;
use ledger::{Entry, Ledger, Limits, Refusal};
use monitor::Monitor;
use reading::ReaderIo;
use std::{
    collections::BTreeSet,
    fmt,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// Slots for the demand of one request, if it is not known how many experts a token uses.
const DEFAULT_BATCH: u64 = 8;

/// Experts and dense tensors of a model that come from storage as they are used, under a budget.
///
/// Any thread may call it. A child of `fork` keeps the leases of its parent; every other call returns
/// [`Error::Engine`] with [`hoistway::Error::Forked`] there.
///
/// A lease pins what it holds; what is not pinned is evicted as the [`Policy`] says.
///
/// Dropping the last clone of a store evicts what no lease or ticket holds, and gives its memory back. It waits for reads
/// that are under way. Leases and tickets stay valid: each gives its memory back as it is dropped. The budget of another store
/// does not count that memory.
#[derive(Clone, Debug)]
pub struct Store {
    door: Arc<Door>,
}

/// The state that the clones of a store share, without its leases.
#[derive(Debug)]
struct Door {
    shared: Arc<StoreShared>,
}

/// The state that a store and its leases share.
pub(crate) struct StoreShared {
    monitor: Monitor<ReaderIo>,
    catalog: Arc<ExpertCatalog>,
    options: StoreOptions,
    visits: Mutex<Visits>,
    /// The process that opened the store.
    process: u32,
    /// The unit that needs most memory, of those that a budget has to hold: what messages call it, and the bytes.
    largest: Option<(String, u64)>,
    /// What the experts that one token uses occupy, if it is known how many these are.
    token_cycle_bytes: Option<u64>,
}

/// The observed order of visits to layers.
#[derive(Debug, Default)]
struct Visits {
    /// The layers whose visits the caller tells.
    observed: BTreeSet<u32>,
    last: Option<u32>,
}

impl Visits {
    /// Notes a visit of a layer. Returns whether it is the first of a token.
    fn note(&mut self, layer: u32) -> bool {
        self.last.replace(layer).is_none_or(|last| last >= layer)
    }
}

impl Store {
    /// Opens a store over the files of a catalog, in the order of [`ExpertCatalog::files`]. Reads nothing yet, but three experts if there are packed ones.
    ///
    /// A budget below the memory that one token's experts occupy is a warning, here and in the [statistics](Self::stats).
    ///
    /// # Errors
    /// [`Error::BudgetTooSmall`]; [`Error::InvalidOption`] if a file is missing, or is none of the catalog's; [`Error::InvalidPack`] if a pack is demanded that is not of the files, or not for the backing;
    /// [`Error::Engine`] if a file is too short,
    /// the reader does not start, or there is no memory.
    pub fn open(
        catalog: Arc<ExpertCatalog>,
        files: Vec<ReadFile>,
        policy: Box<dyn Policy>,
        options: &StoreOptions,
    ) -> Result<Self> {
        Self::open_until(&Cancel::default(), catalog, files, policy, options)
    }

    /// Like [`Store::open`], unless `cancel` ends it before memory is allocated.
    ///
    /// # Errors
    /// Those of [`Store::open`]; [`Error::Engine`] with [`hoistway::Error::Cancelled`].
    pub fn open_until(
        cancel: &Cancel,
        catalog: Arc<ExpertCatalog>,
        mut files: Vec<ReadFile>,
        policy: Box<dyn Policy>,
        options: &StoreOptions,
    ) -> Result<Self> {
        reading::check_files(&catalog, &files)?;
        let catalog = pack::for_store(catalog, &files, &options.backing)?;
        files.extend(catalog.packed_file().cloned());
        let batch_bytes = batch_bytes(&catalog, options);
        if cancel.is_cancelled() {
            return Err(hoistway::Error::Cancelled.into());
        }
        let memory = options.backing.open(&catalog, &reading::lens(&files), options, batch_bytes)?;
        let entry = |(position, unit): (usize, &Unit)| Entry {
            expert: match unit.id() {
                UnitId::Expert(id) => Some(id),
                UnitId::Dense(_) => None,
            },
            cost: memory.cost_bytes(position),
            bytes: unit.bytes(),
        };
        let entries: Vec<Entry> = catalog.units().iter().enumerate().map(entry).collect();
        let largest = largest(&catalog, &entries);
        let token_cycle_bytes = catalog.token_cycle(|unit| entries[unit].cost);
        check_budget(largest.as_ref(), options.budget_bytes)?;
        warn_of_cliff(token_cycle_bytes, options.budget_bytes);
        let events = stats::Events::new(options.events);
        let limits = Limits {
            budget: options.budget_bytes,
            max_experts: memory.max_experts(),
            max_dense_bytes: memory.max_dense_bytes(),
        };
        let ledger = Ledger::new(entries, policy, limits, events);
        let reader = Arc::new(Reader::new(&options.reader)?);
        let monitor = Monitor::new(ledger, ReaderIo::new(reader, files, catalog.clone(), memory));
        let (options, visits) = (options.clone(), Mutex::default());
        let process = std::process::id();
        let shared = StoreShared { monitor, catalog, options, visits, process, largest, token_cycle_bytes };
        Ok(Self { door: Arc::new(Door { shared: Arc::new(shared) }) })
    }

    /// The catalog of its units.
    pub fn catalog(&self) -> &Arc<ExpertCatalog> {
        &self.door.shared.catalog
    }

    /// Its reader, for [rows](crate::rows) and [layers](crate::layers) of the same model.
    pub fn reader(&self) -> &Arc<Reader> {
        self.door.shared.monitor.io().reader()
    }

    /// Makes experts of a layer resident, and waits for them as long as [`StoreOptions::timeout`].
    ///
    /// An expert that is named twice is in the lease twice, and read once. What is missing is read at once, all experts side
    /// by side.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::NoSuchExpert`], [`Error::BatchTooLarge`], [`Error::Read`], [`Error::NoRoom`],
    /// [`Error::NoMemory`], [`Error::TimedOut`], [`Error::Closed`]. Then nothing is leased.
    pub fn ensure(&self, layer: u32, experts: &[u32]) -> Result<Lease> {
        leased(self.request_experts(layer, experts)?)
    }

    /// Like [`ensure`](Self::ensure), and does not wait: each expert is ready for itself.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::NoSuchExpert`], [`Error::BatchTooLarge`], [`Error::Closed`].
    pub fn ensure_async(&self, layer: u32, experts: &[u32]) -> Result<Ticket> {
        let (request, _) = self.request_experts(layer, experts)?;
        Ok(Ticket::new(request))
    }

    /// Makes dense tensors resident, and waits for them as [`ensure`](Self::ensure) does.
    ///
    /// They are evicted by [`evict_tensors`](Self::evict_tensors), or when no expert is left to evict, the one that was used
    /// least recently first.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`]; [`Error::Engine`] if a tensor is big-endian or of an unknown type; and those of
    /// [`ensure`](Self::ensure).
    pub fn ensure_tensors<S: AsRef<str>>(&self, names: &[S]) -> Result<Lease> {
        leased(self.request(self.readable_positions(names)?, |_| ())?)
    }

    /// Like [`ensure_tensors`](Self::ensure_tensors), and does not wait.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`], [`Error::Engine`], [`Error::BatchTooLarge`], [`Error::Closed`].
    pub fn ensure_tensors_async<S: AsRef<str>>(&self, names: &[S]) -> Result<Ticket> {
        let (request, _) = self.request(self.readable_positions(names)?, |_| ())?;
        Ok(Ticket::new(request))
    }

    /// Tells the policy what the router of a layer chose, with its weights. Call it at each visit of the layer, before
    /// [`ensure`](Self::ensure): from the first call on, requests for this layer tell the policy nothing, so that several of
    /// them may serve one visit. For a layer that was never observed, each request is a visit with equal weights.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::NoSuchExpert`], [`Error::Closed`].
    pub fn observe(&self, layer: u32, experts: &[(u32, f32)]) -> Result<()> {
        for (expert, _) in experts {
            self.door.shared.catalog.expert_position(ExpertId { layer, expert: *expert })?;
        }
        self.door.shared.monitor()?.change(|ledger, _| {
            let mut visits = lock(&self.door.shared.visits);
            visits.observed.insert(layer);
            ledger.visit(layer, experts);
            ledger.counts_mut().tokens += u64::from(visits.note(layer));
            self.check_open(ledger)
        })
    }

    /// Starts to read experts that will probably be requested. A hint: a read begins only while no demand waits to be read, so
    /// it may share the drive with demand that is under way. What has not begun is dropped if a request has to read, or
    /// `deadline` has passed when its turn comes. They take a quarter of the budget at most, and evict what the policy names,
    /// but nothing that was prefetched and not yet used. While a request waits for room, nothing is prefetched.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::NoSuchExpert`], [`Error::Closed`].
    pub fn prefetch(&self, layer: u32, experts: &[u32], deadline: Option<Instant>) -> Result<()> {
        let units = self.positions(layer, experts)?;
        self.door.shared.monitor()?.change(|ledger, commands| {
            self.check_open(ledger)?;
            ledger.prefetch(&units, deadline, commands);
            Ok(())
        })
    }

    /// Drops prefetches of layers before `layer` that have not begun. These include prefetches of the next token's first
    /// layers: make those after the call. An expert has begun once the reads of all its parts have.
    pub fn cancel_before(&self, layer: u32) {
        let Ok(monitor) = self.door.shared.monitor() else { return };
        monitor.change(|ledger, commands| {
            let is_before = |entry: Entry| entry.expert.is_some_and(|expert| expert.layer < layer);
            ledger.cancel_prefetches(is_before, commands);
        });
    }

    /// Sets the budget, and evicts what exceeds it and is not leased.
    ///
    /// # Errors
    /// [`Error::BudgetTooSmall`]; [`Error::InvalidOption`] if the backing has less memory; [`Error::Closed`].
    pub fn set_budget(&self, budget_bytes: u64) -> Result<()> {
        let StoreShared { largest, token_cycle_bytes, .. } = &*self.door.shared;
        let monitor = self.door.shared.monitor()?;
        let memory = monitor.io().memory();
        if budget_bytes > memory.max_budget_bytes() {
            let most = memory.max_budget_bytes();
            let reason = format!("memory was allocated at the start, for a budget of {most} bytes at most");
            return Err(Error::invalid_option("budget", budget_bytes, reason));
        }
        check_budget(largest.as_ref(), budget_bytes)?;
        warn_of_cliff(*token_cycle_bytes, budget_bytes);
        monitor.change(|ledger, commands| {
            ledger.set_budget(budget_bytes, commands);
            self.check_open(ledger)
        })?;
        // No unit was evicted if all memory beyond the budget was free.
        memory.trim(budget_bytes);
        Ok(())
    }

    /// Whether an expert is resident.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::NoSuchExpert`].
    pub fn is_resident(&self, id: ExpertId) -> Result<bool> {
        let unit = self.door.shared.catalog.expert_position(id)?;
        Ok(self.door.shared.monitor()?.look(|ledger| ledger.is_resident(unit)))
    }

    /// Whether a dense tensor is resident.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`].
    pub fn is_tensor_resident(&self, name: &str) -> Result<bool> {
        let unit = self.door.shared.catalog.dense_position(name)?;
        Ok(self.door.shared.monitor()?.look(|ledger| ledger.is_resident(unit)))
    }

    /// Evicts experts that are resident and not leased. Returns how many.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::NoSuchExpert`].
    pub fn evict(&self, layer: u32, experts: &[u32]) -> Result<usize> {
        let units = self.positions(layer, experts)?;
        Ok(self.door.shared.monitor()?.change(|ledger, commands| ledger.evict_all(&units, commands)))
    }

    /// Evicts dense tensors that are resident and not leased. Returns how many.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`].
    pub fn evict_tensors<S: AsRef<str>>(&self, names: &[S]) -> Result<usize> {
        let units = self.tensor_positions(names)?;
        Ok(self.door.shared.monitor()?.change(|ledger, commands| ledger.evict_all(&units, commands)))
    }

    /// Takes the changes of residency since the last call, oldest first, and the number of older ones that were lost because
    /// there were more than [`StoreOptions::events`].
    pub fn take_events(&self) -> (Vec<ResidencyEvent>, u64) {
        let Ok(monitor) = self.door.shared.monitor() else { return (Vec::new(), 0) };
        let (events, lost) = monitor.look(Ledger::take_events);
        let units = self.door.shared.catalog.units();
        let events =
            events.into_iter().map(|(unit, change)| ResidencyEvent { unit: units[unit].id(), change });
        (events.collect(), lost)
    }

    /// Its statistics. A child of `fork` learns only the backing.
    pub fn stats(&self) -> StoreStats {
        let StoreShared { options, .. } = &*self.door.shared;
        let Ok(monitor) = self.door.shared.monitor() else {
            return StoreStats { backing: options.backing.name(), ..StoreStats::default() };
        };
        let token_cycle_bytes = self.door.shared.token_cycle_bytes;
        monitor.look(|ledger| {
            let counts = ledger.counts().clone();
            StoreStats {
                backing: options.backing.name(),
                policy: ledger.policy_name(),
                packing: self.door.shared.catalog.packing().clone(),
                hits: counts.hits,
                misses: counts.misses,
                evictions: counts.evictions,
                bytes_read: counts.bytes_read,
                tokens: counts.tokens,
                stall: counts.stall,
                largest_batch_bytes: counts.largest_batch_bytes,
                peak_bytes: counts.peak_bytes,
                used_bytes: ledger.used(),
                held_bytes: monitor.io().memory().held_bytes(),
                host_level: monitor.io().memory().level().map(HostLevel::stats),
                resident: ledger.resident(),
                budget_bytes: ledger.budget(),
                token_cycle_bytes,
                is_below_token_cycle: token_cycle_bytes.is_some_and(|cycle| ledger.budget() < cycle),
                prefetches: counts.prefetches,
                refused_prefetches: counts.refused_prefetches,
                failed_prefetches: counts.failed_prefetches,
                dropped_prefetches: counts.dropped_prefetches,
                useful_prefetches: counts.useful_prefetches,
                wasted_prefetches: counts.wasted_prefetches,
            }
        })
    }

    /// The address of the first byte of a stacked tensor, with [`Backing::HostSparse`](crate::backing::Backing::HostSparse) and
    /// [`Backing::DeviceSparse`](crate::backing::Backing::DeviceSparse): expert `e` lies `e` [strides](Self::tensor_stride)
    /// further. Only slices of leased experts may be read. `None` for other backings, and if no expert has a part in a tensor of
    /// this name.
    pub fn tensor_address(&self, name: &str) -> Option<u64> {
        self.door.shared.monitor.io().memory().tensor_address(self.part_of(name)?)
    }

    /// Bytes from one expert of a stacked tensor to the next: those of a slice, and its
    /// [padding](crate::store::StoreOptions::pad_slices). `None` where [`tensor_address`](Self::tensor_address) is.
    pub fn tensor_stride(&self, name: &str) -> Option<u64> {
        self.door.shared.monitor.io().memory().tensor_stride(self.part_of(name)?)
    }

    fn part_of(&self, tensor: &str) -> Option<&Part> {
        self.door.shared.catalog.units().iter().flat_map(Unit::parts).find(|part| &*part.tensor == tensor)
    }

    fn positions(&self, layer: u32, experts: &[u32]) -> Result<Vec<usize>> {
        let position =
            |expert: &u32| self.door.shared.catalog.expert_position(ExpertId { layer, expert: *expert });
        // An empty list asks for a layer that must be there all the same.
        if experts.is_empty() {
            self.door.shared.catalog.expert_position(ExpertId { layer, expert: 0 })?;
        }
        experts.iter().map(position).collect()
    }

    /// Positions of tensors that are to be read.
    fn readable_positions<S: AsRef<str>>(&self, names: &[S]) -> Result<Vec<usize>> {
        let catalog = &self.door.shared.catalog;
        names.iter().try_for_each(|name| catalog.check_dense_readable(name.as_ref()))?;
        self.tensor_positions(names)
    }

    fn tensor_positions<S: AsRef<str>>(&self, names: &[S]) -> Result<Vec<usize>> {
        names.iter().map(|name| self.door.shared.catalog.dense_position(name.as_ref())).collect()
    }

    /// Requests experts of a layer. If no caller observes the layer, the request is a visit of it.
    fn request_experts(&self, layer: u32, experts: &[u32]) -> Result<(Held, Option<Vec<UnitRoom>>)> {
        let units = self.positions(layer, experts)?;
        self.request(units, |ledger| {
            let mut visits = lock(&self.door.shared.visits);
            if !visits.observed.contains(&layer) {
                let mut chosen = experts.to_vec();
                chosen.sort_unstable();
                chosen.dedup();
                let weight = 1.0 / chosen.len().max(1) as f32;
                let chosen: Vec<(u32, f32)> = chosen.into_iter().map(|expert| (expert, weight)).collect();
                ledger.visit(layer, &chosen);
                ledger.counts_mut().tokens += u64::from(visits.note(layer));
            }
        })
    }

    /// Requests units. `visit` tells the policy, once it is known that the request is taken. Returns the rooms, too, if all
    /// units are resident.
    fn request(
        &self,
        units: Vec<usize>,
        visit: impl FnOnce(&mut Ledger<reading::Failure>),
    ) -> Result<(Held, Option<Vec<UnitRoom>>)> {
        let mut distinct = units.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let monitor = self.door.shared.monitor()?;
        let memory = monitor.io().memory();
        let (id, rooms) = monitor.request(&units, |ledger, commands| {
            let is_dense =
                distinct.first().is_some_and(|unit| *unit >= self.door.shared.catalog.experts().len());
            let taken = ledger.check(&distinct).and_then(|()| {
                visit(ledger);
                ledger.request(distinct, commands)
            });
            taken.map_err(|refusal| match refusal {
                Refusal::TooLarge { needed } => {
                    let slots = || (memory.max_experts() as u64).saturating_mul(memory.cost_bytes(0));
                    let capacity = if is_dense { memory.max_dense_bytes() } else { slots() };
                    Error::BatchTooLarge { is_dense, needed, capacity }
                }
                Refusal::Closed => self.door.shared.closed(ledger),
            })
        })?;
        Ok((Held::new(self.door.shared.clone(), id, units), rooms))
    }

    /// Fails if the policy has panicked.
    fn check_open(&self, ledger: &Ledger<reading::Failure>) -> Result<()> {
        ledger.policy_panic().map_or(Ok(()), |_| Err(self.door.shared.closed(ledger)))
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        // Without a lease or ticket all of it is dropped anyway, and without a store there will be no other.
        if Arc::strong_count(&self.shared) == 1 {
            return;
        }
        // In a child of `fork` the lock may be held by a thread that is not there.
        let Ok(monitor) = self.shared.monitor() else { return };
        monitor.drain();
        // Without an eviction no release has trimmed it.
        monitor.io().memory().trim(0);
    }
}

impl StoreShared {
    /// The store's lock and reads. Fails in a child of `fork`, where threads that it lacks may hold the lock.
    fn monitor(&self) -> Result<&Monitor<ReaderIo>> {
        if self.process != std::process::id() {
            return Err(hoistway::Error::Forked.into());
        }
        Ok(&self.monitor)
    }

    /// The error of a store whose policy has panicked.
    fn closed(&self, ledger: &Ledger<reading::Failure>) -> Error {
        let message = ledger.policy_panic().unwrap_or_default().to_owned();
        Error::Closed { policy: ledger.policy_name(), message }
    }

    fn note_stall(&self, waited: Duration) {
        self.monitor.change(|ledger, _| ledger.counts_mut().stall += waited);
    }
}

impl fmt::Debug for StoreShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreShared").field("options", &self.options).finish_non_exhaustive()
    }
}

/// The lease of a request, at once if all of its units are resident.
fn leased((request, rooms): (Held, Option<Vec<UnitRoom>>)) -> Result<Lease> {
    match rooms {
        Some(rooms) => Ok(Lease::new(request, rooms)),
        None => Ticket::new(request).wait(),
    }
}

/// Bytes beside the budget for the demand of one request.
fn batch_bytes(catalog: &ExpertCatalog, options: &StoreOptions) -> u64 {
    let of_layer = |layer: u32| {
        let few = || catalog.expert_bytes(layer).saturating_mul(DEFAULT_BATCH);
        catalog.layer_demand_bytes(layer).unwrap_or_else(few)
    };
    options.batch_bytes.unwrap_or_else(|| catalog.layers().map(of_layer).max().unwrap_or_default())
}

/// The largest expert, or the largest tensor of a model without experts, and the bytes that it occupies.
fn largest(catalog: &ExpertCatalog, entries: &[Entry]) -> Option<(String, u64)> {
    let counted = if catalog.experts().is_empty() { entries.len() } else { catalog.experts().len() };
    let (position, entry) = entries.iter().take(counted).enumerate().max_by_key(|(_, entry)| entry.cost)?;
    Some((catalog.units()[position].label(), entry.cost))
}

/// Fails if the budget does not hold the largest unit.
fn check_budget(largest: Option<&(String, u64)>, budget: u64) -> Result<()> {
    match largest {
        Some((unit, needed)) if *needed > budget => {
            Err(Error::BudgetTooSmall { budget, needed: *needed, unit: unit.clone() })
        }
        _ => Ok(()),
    }
}

fn warn_of_cliff(token_cycle_bytes: Option<u64>, budget_bytes: u64) {
    if let Some(token_cycle_bytes) = token_cycle_bytes
        && budget_bytes < token_cycle_bytes
    {
        tracing::warn!(
            budget_bytes,
            token_cycle_bytes,
            "the budget does not hold the experts of one token: each is read again for every token under LRU"
        );
    }
}
