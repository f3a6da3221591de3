//! What became of work that a device was given, and memory that waits for an answer.
//!
//! A wait that fails does not always tell whether work has ended. Memory that such work uses is parked with its device: it is
//! neither used nor freed. It comes back once an event of that work is found reached ([`Device::ask_again`]), a wait for all
//! work of the device succeeds ([`Device::settle`]), or the device is lost. If none of that happens, it stays as it is to the end
//! of the process.
use crate::{
    Device, Error, Result, Ticket, Unavailable,
    backend::{Event, Stream},
};
use std::{
    any::Any,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

/// What is known of work after it was waited for.
#[derive(Debug)]
#[must_use]
pub enum Fate {
    /// It is done.
    Done,
    /// It has failed, and nothing of it is under way.
    Failed(Error),
    /// Whether it has ended is unknown: memory that it uses must be left alone. A later wait may tell.
    Unknown(Error),
}

impl Fate {
    /// What a wait for the work says.
    pub(crate) fn of(waited: Result<()>) -> Self {
        match waited {
            Ok(()) => Self::Done,
            Err(error) if error.leaves_doubt() => Self::Unknown(error),
            Err(error) => Self::Failed(error),
        }
    }

    /// Whether the work has ended.
    pub fn is_known(&self) -> bool {
        !matches!(self, Self::Unknown(_))
    }

    /// Whether all of it is done.
    ///
    /// # Errors
    /// Why not.
    pub fn result(self) -> Result<()> {
        match self {
            Self::Done => Ok(()),
            Self::Failed(error) | Self::Unknown(error) => Err(error),
        }
    }
}

/// Memory that queued work uses. When it is dropped, it waits for the work and drops the memory, or parks it if it is unknown
/// whether the work has ended.
#[derive(Debug)]
pub struct InUse<T: Send + 'static> {
    work: Option<(Ticket, T)>,
    /// Whether a wait has told that the work has ended.
    has_ended: AtomicBool,
}

impl<T: Send + 'static> InUse<T> {
    pub(crate) fn new(ticket: Ticket, memory: T) -> Self {
        Self { work: Some((ticket, memory)), has_ended: AtomicBool::new(false) }
    }

    /// Whether the work is done, or failed.
    pub fn is_over(&self) -> bool {
        self.work.as_ref().is_none_or(|(ticket, _)| ticket.is_over())
    }

    /// Waits for the work.
    pub fn wait(&self) -> Fate {
        let fate = self.work.as_ref().map_or(Fate::Done, |(ticket, _)| ticket.wait());
        self.has_ended.fetch_or(fate.is_known(), Ordering::Relaxed);
        fate
    }
}

impl<T: Send + 'static> Drop for InUse<T> {
    fn drop(&mut self) {
        if let Some((ticket, memory)) = self.work.take()
            && !*self.has_ended.get_mut()
            && !ticket.wait().is_known()
        {
            ticket.park(memory);
        }
    }
}

/// Memory of one device that waits for an answer.
#[derive(Debug, Default)]
pub(crate) struct Parked {
    items: Mutex<Items>,
    /// How many there are: spares the lock while there are none, as nearly always.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct Items {
    parked: Vec<Item>,
    /// How many were parked, ever.
    ever: u64,
}

/// Memory that work on a stream may still use. Fields are dropped in this order.
struct Item {
    /// How many were parked before it.
    number: u64,
    _memory: Box<dyn Any + Send>,
    sign: Sign,
    /// That of the work, if it is copies. Some drivers forget the work of a stream that is destroyed.
    stream: Option<Arc<dyn Stream>>,
    /// It would drop what is parked.
    _device: Arc<Device>,
}

/// What tells that the work has ended which uses parked memory.
pub(crate) enum Sign {
    /// A wait for all work of the device.
    Wait,
    /// This event, which lies behind it.
    Event(Box<dyn Event>),
    /// The return of all that was parked before and that copies use.
    EarlierCopies,
}

impl Sign {
    fn is_reached(&self) -> bool {
        matches!(self, Self::Event(event) if is_over(&**event))
    }
}

impl Parked {
    fn items(&self) -> MutexGuard<'_, Items> {
        // Kept consistent by every statement, so a panic elsewhere does not spoil it.
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops what is not in doubt any more, without the lock: that calls the driver.
    fn take(&self, has_ended: impl Fn(&Item) -> bool) {
        let mut items = self.items();
        let mut ended: Vec<Item> = items.parked.extract_if(.., |item| has_ended(item)).collect();
        let mut has_copies = false;
        let is_behind_none = |item: &mut Item| {
            has_copies |= item.stream.is_some();
            !has_copies && matches!(item.sign, Sign::EarlierCopies)
        };
        ended.extend(items.parked.extract_if(.., is_behind_none));
        self.count.store(items.parked.len(), Ordering::Release);
        drop(items);
        drop(ended);
    }
}

impl Device {
    /// Keeps memory that work uses, of a stream if it is known of which, until it is known that the work has ended.
    pub(crate) fn park(
        self: &Arc<Self>,
        stream: Option<Arc<dyn Stream>>,
        sign: Sign,
        memory: impl Any + Send,
    ) {
        tracing::warn!(device = %self.id(), "memory is set aside, as it is not known whether the device still uses it");
        let parked = self.parked();
        let mut items = parked.items();
        let number = items.ever;
        items.ever += 1;
        let (memory, device) = (Box::new(memory), self.clone());
        items.parked.push(Item { number, _memory: memory, sign, stream, _device: device });
        parked.count.store(items.parked.len(), Ordering::Release);
    }

    /// Parks memory that any work of the device may use.
    pub fn set_aside(self: &Arc<Self>, memory: impl Any + Send) {
        self.park(None, Sign::Wait, memory);
    }

    /// Parks memory that only copies may use whose own memory is parked already. It comes back with that.
    pub fn set_aside_with_copies(self: &Arc<Self>, memory: impl Any + Send) {
        self.park(None, Sign::EarlierCopies, memory);
    }

    /// Whether memory is parked.
    pub fn is_in_doubt(&self) -> bool {
        self.parked().count.load(Ordering::Acquire) > 0
    }

    /// Asks whether work has ended whose memory is parked. Waits for no work of hoistway's; to free the memory may wait for
    /// others'.
    pub fn ask_again(&self) {
        if self.is_in_doubt() {
            // One that is lost does nothing more.
            let is_lost = self.backend().is_lost();
            self.parked().take(|item| is_lost || item.sign.is_reached());
        }
    }

    /// Gets all memory back that is parked: asks, and waits for the device if that does not tell.
    ///
    /// # Errors
    /// As [`Device::settle`].
    pub fn regain(&self) -> Result<()> {
        self.ask_again();
        if self.is_in_doubt() { self.settle() } else { Ok(()) }
    }

    /// Waits for all work on the device, whether that succeeds or fails. Memory that was parked before comes back.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] if it is not known whether the work has ended. A later wait may tell.
    pub fn settle(&self) -> Result<()> {
        let before = if self.is_in_doubt() { self.parked().items().ever } else { 0 };
        match self.backend().wait_for_all() {
            // A child of fork has copies, which are the parent's to drop.
            Fate::Failed(Error::Forked) => Ok(()),
            Fate::Done | Fate::Failed(_) => {
                if before > 0 {
                    self.parked().take(|item| item.number < before);
                }
                Ok(())
            }
            Fate::Unknown(error) => {
                let reason = format!("whether it has ended its earlier work is unknown: {error}");
                let why = Unavailable::new(reason, "try again");
                Err(Error::DeviceUnavailable { device: self.name(), why })
            }
        }
    }
}

/// Whether the work before an event is known to have ended.
pub(crate) fn is_over(event: &dyn Event) -> bool {
    match event.is_reached() {
        Ok(is_reached) => is_reached,
        // Work that failed is over too.
        Err(error) => !error.leaves_doubt(),
    }
}

impl fmt::Debug for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Item").field("number", &self.number).finish_non_exhaustive()
    }
}

/// On the toy device: those of drivers are in the tests of `hoistway`.
#[cfg(test)]
#[cfg(feature = "toy-device")]
mod tests {
    use super::*;
    use crate::{
        CopyDirection, CopyStream, DeviceId, DeviceMemory, HostCopy, Pinned, release_devices,
        toy::{self, Fault, turn},
    };
    use std::sync::Weak;

    /// A stream, and a copy to queue on it.
    struct Copier {
        stream: CopyStream,
        device: Arc<Device>,
        memory: DeviceMemory,
        host: Vec<u8>,
    }

    impl Copier {
        fn new() -> Self {
            let device = Device::open(DeviceId::Toy(0)).unwrap();
            let stream = CopyStream::new(&device).unwrap();
            let memory = DeviceMemory::new(&device, 16).unwrap();
            Self { stream, device, memory, host: vec![7; 16] }
        }

        fn copy(&mut self) -> HostCopy {
            HostCopy {
                host: self.host.as_mut_ptr().expose_provenance(),
                device: self.memory.address(),
                len: 16,
            }
        }

        /// Memory that a copy uses, and what tells whether it was dropped.
        fn in_use(&mut self) -> (InUse<Arc<()>>, Weak<()>) {
            let copy = self.copy();
            // SAFETY: memory that is not pinned is copied when this returns; this has it.
            #[allow(unsafe_code)]
            let queued = unsafe { self.stream.run(CopyDirection::ToDevice, &[copy]) };
            assert!(matches!(queued, Fate::Done), "{queued:?}");
            let (memory, held) = counted();
            (self.stream.keep(memory, Ok(())).unwrap(), held)
        }

        /// Memory whose copy was waited for in vain.
        fn parked(&mut self) -> Weak<()> {
            let (in_use, held) = self.in_use();
            toy::fail(Fault::Doubt, None);
            assert!(matches!(in_use.wait(), Fate::Unknown(_)));
            drop(in_use);
            assert!(self.device.is_in_doubt() && held.strong_count() == 1);
            held
        }
    }

    /// Memory, and what tells whether it was dropped.
    fn counted() -> (Arc<()>, Weak<()>) {
        let memory = Arc::new(());
        let held = Arc::downgrade(&memory);
        (memory, held)
    }

    /// Parks what owns memory that parked work uses.
    fn owner(device: &Arc<Device>) -> Weak<()> {
        let (memory, held) = counted();
        device.set_aside_with_copies(memory);
        held
    }

    #[test]
    fn memory_of_work_that_is_done_or_has_failed_is_dropped_at_once() {
        let _turn = turn();
        for (fault, is_done) in [(None, true), (Some(Fault::Lose), false)] {
            let mut copier = Copier::new();
            let (in_use, held) = copier.in_use();
            fault.into_iter().for_each(|fault| toy::fail(fault, None));
            let fate = in_use.wait();
            assert!(fate.is_known() && matches!(fate, Fate::Done) == is_done, "{fate:?}");
            assert_eq!(fate.result().is_ok(), is_done);
            assert!(in_use.is_over() && held.strong_count() == 1);
            drop(in_use);
            assert!(held.strong_count() == 0 && !copier.device.is_in_doubt());
            toy::reset();
            drop(copier);
            release_devices();
        }
    }

    #[test]
    fn parked_memory_comes_back_when_its_event_is_found_reached() {
        let _turn = turn();
        let mut copier = Copier::new();
        let held = copier.parked();
        copier.device.ask_again();
        assert!(held.strong_count() == 1, "the device does not tell");
        toy::reset();
        copier.device.ask_again();
        assert!(held.strong_count() == 0 && !copier.device.is_in_doubt());
    }

    #[test]
    fn parked_memory_comes_back_with_a_wait_for_the_device() {
        let _turn = turn();
        let mut copier = Copier::new();
        let held = copier.parked();
        for _ in 0..2 {
            let error = copier.device.settle().unwrap_err();
            assert!(matches!(error, Error::DeviceUnavailable { .. }), "{error:?}");
            assert!(copier.device.regain().is_err());
            assert_eq!(held.strong_count(), 1);
        }
        // Behind which no event could be made.
        toy::fail(Fault::Mark, None);
        let (memory, without_event) = counted();
        copier.stream.park(memory);
        toy::reset();
        copier.device.ask_again();
        assert_eq!((held.strong_count(), without_event.strong_count()), (0, 1));
        copier.device.regain().unwrap();
        assert!(without_event.strong_count() == 0 && !copier.device.is_in_doubt());
    }

    /// A device that is lost does nothing more.
    #[test]
    fn parked_memory_comes_back_when_the_device_is_lost() {
        let _turn = turn();
        let mut copier = Copier::new();
        let held = copier.parked();
        toy::reset();
        let (lost, _) = copier.in_use();
        toy::fail(Fault::Lose, None);
        assert!(matches!(lost.wait(), Fate::Failed(_)));
        copier.device.settle().unwrap();
        assert_eq!(held.strong_count(), 0);
        drop((lost, copier));
        release_devices();
    }

    /// What owns the places that copies write to comes back with the last of their slots.
    #[test]
    fn memory_that_copies_use_comes_back_with_what_of_them_was_parked_before() {
        let _turn = turn();
        let mut copier = Copier::new();
        let first = copier.parked();
        // Memory that no copy uses.
        let (memory, unfreed) = counted();
        copier.device.set_aside(memory);
        let own = owner(&copier.device);
        toy::fail(Fault::Mark, None);
        let (memory, second) = counted();
        copier.stream.park(memory);
        let last = owner(&copier.device);
        toy::reset();
        copier.device.ask_again();
        let left = || [&first, &unfreed, &own, &second, &last].map(Weak::strong_count);
        assert_eq!(left(), [0, 1, 0, 1, 1], "no event lies behind the second");
        release_devices();
        assert_eq!(left(), [0; 5]);
        let alone = owner(&copier.device);
        copier.device.ask_again();
        assert!(alone.strong_count() == 0 && !copier.device.is_in_doubt());
    }

    #[test]
    fn what_copies_of_unknown_fate_use_is_kept_whatever_is_dropped() {
        let _turn = turn();
        let mut copier = Copier::new();
        let memory = vec![1_u8; 4096];
        let mut pages = memory.into_boxed_slice();
        // SAFETY: both are parked together.
        #[allow(unsafe_code)]
        let pinned = unsafe { Pinned::new(&copier.device, pages.as_mut_ptr(), pages.len()) }.unwrap();
        let copy = HostCopy { host: pages.as_mut_ptr().expose_provenance(), ..copier.copy() };
        toy::fail(Fault::Doubt, None);
        // SAFETY: all of it is pinned or allocated, and parked below.
        #[allow(unsafe_code)]
        let fate = unsafe { copier.stream.run(CopyDirection::ToDevice, &[copy]) };
        assert!(matches!(fate, Fate::Unknown(_)), "{fate:?}");
        let Copier { stream, device, memory, .. } = copier;
        stream.park((pinned, pages, memory));
        let device = (Arc::downgrade(&device), drop(device)).0;
        drop(stream);
        release_devices();
        assert_eq!(toy::in_use(), (16, 4096));
        let again = Device::open(DeviceId::Toy(0)).unwrap();
        assert!(again.is_in_doubt() && device.upgrade().is_some_and(|device| Arc::ptr_eq(&device, &again)));
        toy::reset();
        again.regain().unwrap();
        assert_eq!(toy::in_use(), (0, 0));
    }

    /// A wait says nothing of work that was queued after it began.
    #[test]
    fn memory_that_is_parked_during_a_wait_is_not_dropped_by_it() {
        let _turn = turn();
        let mut copier = Copier::new();
        let first = copier.parked();
        let number = copier.device.parked().items().ever;
        let second = {
            toy::reset();
            copier.parked()
        };
        copier.device.parked().take(|item| item.number < number);
        assert_eq!((first.strong_count(), second.strong_count()), (0, 1));
        toy::reset();
        copier.device.settle().unwrap();
        drop(copier);
    }

    /// If queueing fails, some of the work may be under way.
    #[test]
    fn memory_is_kept_or_parked_where_queueing_failed() {
        let _turn = turn();
        let copier = Copier::new();
        for (fault, is_parked) in [(None, false), (Some(Fault::Doubt), true)] {
            let (memory, held) = counted();
            fault.into_iter().for_each(|fault| toy::fail(fault, None));
            let refused = Error::Internal("a test wants it so".into());
            assert!(copier.stream.keep(memory, Err(refused)).is_err());
            assert_eq!((held.strong_count() == 1, copier.device.is_in_doubt()), (is_parked, is_parked));
            toy::reset();
            copier.device.regain().unwrap();
            assert_eq!(held.strong_count(), 0);
        }
    }
}
