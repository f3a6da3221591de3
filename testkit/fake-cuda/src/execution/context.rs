//! Contexts: the primary one of each device, those made by hand, and which one is current in which thread.

use super::{
    event, kernel,
    stream::{self, Kind, STREAMS, Stream},
};
#[cfg(windows)]
use crate::driver::external;
use crate::{
    control::{control, counters::LEAKED, settings::DEVICES_MAX},
    memory::{self, host::Driver},
    status::{CONTEXT_IS_DESTROYED, Code, INVALID_CONTEXT, OPERATING_SYSTEM, SUCCESS},
};
use std::{
    cell::RefCell,
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak,
        atomic::{AtomicI32, AtomicU64, Ordering},
    },
};

/// Devices of both drivers: those of HIP come after those of CUDA.
pub(crate) const SLOTS: usize = 2 * DEVICES_MAX;

/// Primary contexts keep their handle when they are released and retained again.
const FIRST_PRIMARY: usize = 0xC0DE_0000_0000;
const FIRST_CREATED: usize = 0xC1DE_0000_0000;
const HANDLE_STEP: usize = 0x100;

/// A live context.
pub(crate) struct Context {
    pub(crate) owner: Arc<Owner>,
    default_stream: OnceLock<Arc<Stream>>,
}

/// What everything that belongs to a context knows of it.
pub(crate) struct Owner {
    pub(crate) context: usize,
    /// No other context has or had it.
    pub(crate) id: u64,
    pub(crate) device: usize,
    /// The error that made the context unusable.
    sticky: AtomicI32,
    /// How often its work was ended. Held for reading while work is done.
    era: RwLock<u64>,
    /// The era of the last reset by a test, which goes on with the context as if it were new.
    fresh: AtomicU64,
    /// Including destroyed ones that still have work to do.
    streams: Mutex<Vec<Weak<Stream>>>,
}

struct Registry {
    /// Those of HIP's devices are never retained, and stay.
    primary: [Primary; SLOTS],
    created: BTreeMap<usize, Arc<Context>>,
    next: usize,
}

struct Primary {
    retained: u64,
    context: Option<Arc<Context>>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry {
    primary: [const { Primary { retained: 0, context: None } }; SLOTS],
    created: BTreeMap::new(),
    next: FIRST_CREATED,
});

thread_local! {
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

impl Owner {
    fn new(context: usize, device: usize) -> Arc<Owner> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let (sticky, era, fresh, streams) = Default::default();
        Arc::new(Owner { context, id, device, sticky, era, fresh, streams })
    }

    pub(crate) fn is_of_cuda(&self) -> bool {
        is_of_cuda(self.device)
    }

    /// Its driver.
    pub(crate) fn driver(&self) -> Driver {
        driver(self.device)
    }

    /// The device's number among those of its driver.
    pub(crate) fn ordinal(&self) -> usize {
        self.device % DEVICES_MAX
    }

    /// The error that made the context unusable, if one did.
    pub(crate) fn health(&self) -> Result<(), Code> {
        match self.sticky.load(Ordering::SeqCst) {
            SUCCESS => Ok(()),
            code => Err(code),
        }
    }

    /// Makes the context unusable. The first error counts.
    pub(crate) fn fail(&self, code: Code) {
        // A loss means that it was unusable already.
        let _ = self.sticky.compare_exchange(SUCCESS, code, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// What work belongs to that streams are given now.
    pub(super) fn era(&self) -> u64 {
        *self.era.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does work of an era, unless that has ended. Returns whether it has not.
    pub(super) fn act(&self, era: u64, action: impl FnOnce()) -> bool {
        let now = self.era.read().unwrap_or_else(PoisonError::into_inner);
        if *now == era {
            action();
        }
        *now == era
    }

    /// Whether the context was as new since the end of an era, by a reset.
    pub(super) fn was_reset_since(&self, era: u64) -> bool {
        era < self.fresh.load(Ordering::SeqCst)
    }

    /// Ends all copies, fills and kernels that were given to the context's streams so far: none is under way when this returns, and those
    /// that wait are left out.
    pub(crate) fn end_work(&self) {
        *self.era.write().unwrap_or_else(PoisonError::into_inner) += 1;
        control().wake();
    }

    /// Waits for all that was given to the context's streams so far.
    pub(crate) fn synchronize(&self) {
        for stream in self.live_streams() {
            stream.synchronize();
        }
    }

    pub(super) fn live_streams(&self) -> Vec<Arc<Stream>> {
        let mut streams = self.streams();
        streams.retain(|stream| stream.strong_count() > 0);
        streams.iter().filter_map(Weak::upgrade).collect()
    }

    pub(super) fn adopt(&self, stream: &Arc<Stream>) {
        self.streams().push(Arc::downgrade(stream));
    }

    fn streams(&self) -> MutexGuard<'_, Vec<Weak<Stream>>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Context {
    fn new(handle: usize, device: usize) -> Arc<Context> {
        Arc::new(Context { owner: Owner::new(handle, device), default_stream: OnceLock::new() })
    }

    /// The stream that is meant by none.
    pub(crate) fn default_stream(&self) -> Result<Arc<Stream>, Code> {
        if self.default_stream.get().is_none() {
            let stream = Stream::start(&self.owner, Kind::Legacy).map_err(|_| OPERATING_SYSTEM)?;
            if let Err(surplus) = self.default_stream.set(stream) {
                surplus.close();
            }
        }
        self.default_stream.get().cloned().ok_or(OPERATING_SYSTEM)
    }

    /// Ends everything that belongs to the context. Returns how many things these were.
    fn destroy(&self) -> u64 {
        self.owner.synchronize();
        let streams = stream::release_all(&self.owner);
        if let Some(stream) = self.default_stream.get() {
            stream.close();
        }
        let leaked = streams
            + event::release_all(&self.owner)
            + kernel::release_all(&self.owner)
            + memory::device::release_all(&self.owner)
            + memory::host::release_all(&self.owner);
        #[cfg(windows)]
        let leaked = leaked + external::release_all(&self.owner);
        leaked
    }
}

/// Waits for all that was given to a device so far, in whichever context.
pub(crate) fn synchronize_device(device: usize) {
    contexts(|context| context.owner.device == device).iter().for_each(|context| context.owner.synchronize());
}

/// Whether streams of a device have yet to copy from or to a range of its memory, or to fill it.
pub(crate) fn has_work_with(device: usize, range: Range<u64>) -> bool {
    let has_work = |context: &Arc<Context>| {
        context.owner.live_streams().iter().any(|stream| stream.has_work_with(&range))
    };
    contexts(|context| context.owner.device == device).iter().any(has_work)
}

/// Ends the work of all devices of a driver.
pub(crate) fn end_work_of(driver: Driver) {
    contexts(|context| context.owner.driver() == driver).iter().for_each(|context| context.owner.end_work());
}

/// Whether the device in a slot is CUDA's.
pub(crate) fn is_of_cuda(slot: usize) -> bool {
    slot < DEVICES_MAX
}

/// The driver of the device in a slot.
pub(crate) fn driver(slot: usize) -> Driver {
    if is_of_cuda(slot) { Driver::Cuda } else { Driver::Hip }
}

/// The context of a device of HIP's.
pub(crate) fn of_hip(ordinal: usize) -> Result<Arc<Context>, Code> {
    let device = DEVICES_MAX + ordinal;
    let mut registry = registry();
    let primary = registry.primary.get_mut(device).ok_or(INVALID_CONTEXT)?;
    let handle = FIRST_PRIMARY + device * HANDLE_STEP;
    Ok(primary.context.get_or_insert_with(|| Context::new(handle, device)).clone())
}

/// Retains a device's primary context, and makes it if it was not retained.
pub(crate) fn retain_primary(device: usize) -> Result<usize, Code> {
    let handle = FIRST_PRIMARY + device * HANDLE_STEP;
    let mut registry = registry();
    let primary = registry.primary.get_mut(device).ok_or(INVALID_CONTEXT)?;
    primary.context.get_or_insert_with(|| Context::new(handle, device));
    primary.retained += 1;
    Ok(handle)
}

/// Releases a device's primary context, and destroys it with the last.
pub(crate) fn release_primary(device: usize) -> Result<(), Code> {
    let last = {
        let mut registry = registry();
        let primary = registry.primary.get_mut(device).ok_or(INVALID_CONTEXT)?;
        primary.retained = primary.retained.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        if primary.retained == 0 { primary.context.take() } else { None }
    };
    if let Some(context) = last {
        LEAKED.add(context.destroy());
    }
    Ok(())
}

/// Destroys a device's primary context, however often it is retained. It is made anew when it is retained again, and streams are given
/// the handles of those that are gone.
pub(crate) fn reset_primary(device: usize) -> Result<(), Code> {
    let context = registry().primary.get_mut(device).ok_or(INVALID_CONTEXT)?.context.take();
    if let Some(context) = context {
        let gone = STREAMS.handles_of(|stream| Arc::ptr_eq(&stream.owner, &context.owner));
        context.destroy();
        STREAMS.give_again(gone);
    }
    Ok(())
}

pub(crate) fn primary_is_active(device: usize) -> bool {
    registry().primary.get(device).is_some_and(|primary| primary.context.is_some())
}

/// How often primary contexts are retained, in all.
pub(crate) fn retained() -> u64 {
    registry().primary.iter().map(|primary| primary.retained).sum()
}

/// Makes a context, and makes it current.
pub(crate) fn create(device: usize) -> usize {
    let handle = {
        let mut registry = registry();
        let handle = registry.next;
        registry.next += HANDLE_STEP;
        registry.created.insert(handle, Context::new(handle, device));
        handle
    };
    with_stack(|stack| stack.push(handle));
    handle
}

/// Destroys a context that was made by hand.
pub(crate) fn destroy(handle: usize) -> Result<(), Code> {
    let context = registry().created.remove(&handle).ok_or(INVALID_CONTEXT)?;
    with_stack(|stack| {
        if stack.last() == Some(&handle) {
            stack.pop();
        }
    });
    LEAKED.add(context.destroy());
    Ok(())
}

/// What tells a context from one that had its handle before.
pub(crate) fn id_of(handle: usize) -> Result<u64, Code> {
    find(handle).map(|context| context.owner.id).ok_or(INVALID_CONTEXT)
}

/// The calling thread's context.
pub(crate) fn current() -> Result<Arc<Context>, Code> {
    match current_handle() {
        0 => Err(INVALID_CONTEXT),
        handle => find(handle).ok_or(CONTEXT_IS_DESTROYED),
    }
}

/// The calling thread's context, alive or not, or 0.
pub(crate) fn current_handle() -> usize {
    with_stack(|stack| stack.last().copied()).flatten().unwrap_or(0)
}

/// Replaces the top of the calling thread's stack, or removes it for 0.
pub(crate) fn set_current(handle: usize) -> Result<(), Code> {
    if handle != 0 && find(handle).is_none() {
        return Err(INVALID_CONTEXT);
    }
    with_stack(|stack| {
        stack.pop();
        if handle != 0 {
            stack.push(handle);
        }
    });
    Ok(())
}

pub(crate) fn push_current(handle: usize) -> Result<(), Code> {
    find(handle).ok_or(INVALID_CONTEXT)?;
    with_stack(|stack| stack.push(handle));
    Ok(())
}

pub(crate) fn pop_current() -> Result<usize, Code> {
    with_stack(Vec::pop).flatten().ok_or(INVALID_CONTEXT)
}

/// How many contexts are on the calling thread's stack.
pub(crate) fn depth() -> u64 {
    with_stack(|stack| stack.len() as u64).unwrap_or(0)
}

/// Makes all contexts usable again. What they had to do before is not done.
pub(crate) fn heal_all() {
    for context in contexts(|_| true) {
        let owner = &context.owner;
        if owner.health().is_err() {
            owner.end_work();
            owner.sticky.store(SUCCESS, Ordering::SeqCst);
        }
        owner.fresh.store(owner.era(), Ordering::SeqCst);
    }
}

/// The contexts that meet a condition.
fn contexts(is_meant: impl Fn(&Context) -> bool) -> Vec<Arc<Context>> {
    let registry = registry();
    let primary = registry.primary.iter().filter_map(|primary| primary.context.as_ref());
    primary.chain(registry.created.values()).filter(|context| is_meant(context)).cloned().collect()
}

fn find(handle: usize) -> Option<Arc<Context>> {
    let registry = registry();
    let primary = registry.primary.iter().filter_map(|primary| primary.context.as_ref());
    let created = registry.created.get(&handle);
    primary.chain(created).find(|context| context.owner.context == handle).cloned()
}

/// `None` in a thread that is ending.
fn with_stack<T>(action: impl FnOnce(&mut Vec<usize>) -> T) -> Option<T> {
    STACK.try_with(|stack| action(&mut stack.borrow_mut())).ok()
}

fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}
