//! Memory that a stream of tensors has had before: its next tensors go there, rather than to memory that is allocated for them.
#![forbid(unsafe_code)]

use crate::{Device, DeviceMemory};
use std::{
    mem, process,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// How many pieces of memory are kept at once.
const MOST: usize = 2;

/// Keeps up to two pieces of memory that nothing in the process uses any more, but work on the device still may.
///
/// [`SpareMemory::serve`] waits for that work. Then [`SpareMemory::take`] gives the memory out again. All of it is freed when it is closed,
/// and when memory of hoistway cannot be allocated on the device.
#[derive(Debug)]
pub struct SpareMemory {
    device: Arc<Device>,
    /// A child of `fork` has copies of the memory, and the lock may be held in its copy for ever.
    process: u32,
    state: Mutex<State>,
    changed: Condvar,
    taken: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// Work on the device may still use it.
    used: Vec<DeviceMemory>,
    /// How many pieces were taken out of `used` for the wait that is under way, or out of `unfit`.
    awaited: usize,
    /// All work that used it has ended.
    ready: Vec<DeviceMemory>,
    /// Nothing fits in it.
    unfit: Vec<DeviceMemory>,
    is_closed: bool,
}

impl State {
    fn count(&self) -> usize {
        self.used.len() + self.awaited + self.ready.len() + self.unfit.len()
    }

    /// All that no wait is under way for, to be dropped without the lock: that may wait for the device.
    fn take_all(&mut self) -> Vec<DeviceMemory> {
        let mut all = mem::take(&mut self.used);
        all.append(&mut self.ready);
        all.append(&mut self.unfit);
        all
    }
}

impl SpareMemory {
    /// Nothing yet, of a device. A thread of the caller's [serves](Self::serve) it.
    pub fn new(device: &Arc<Device>) -> Arc<Self> {
        let (state, changed, taken) = Default::default();
        let spare = Arc::new(Self { device: device.clone(), process: process::id(), state, changed, taken });
        device.add_spare_memory(&spare);
        spare
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Kept consistent by every statement, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps memory whose users in the process have all gone. If there is enough, it is freed instead, which waits for the device.
    pub fn give_back(&self, memory: DeviceMemory) {
        if self.process != process::id() {
            return;
        }
        let mut state = self.state();
        if !state.is_closed && state.count() < MOST {
            state.used.push(memory);
            self.changed.notify_all();
        }
        // What was not kept is dropped after the lock.
    }

    /// Memory for `len` bytes which no work uses, if there is some that is not more than twice as long.
    pub fn take(&self, len: u64) -> Option<DeviceMemory> {
        let mut state = self.state();
        let fits = |memory: &DeviceMemory| memory.len() >= len && memory.len() / 2 <= len;
        let Some(at) = state.ready.iter().position(fits) else {
            // It would keep room from what fits.
            let mut unfit = mem::take(&mut state.ready);
            if !unfit.is_empty() {
                state.unfit.append(&mut unfit);
                self.changed.notify_all();
            }
            return None;
        };
        self.taken.fetch_add(1, Ordering::Relaxed);
        Some(state.ready.swap_remove(at))
    }

    /// How often memory was given out again.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Waits for the work that uses what was given back, again and again, until it is closed, and frees what does not fit.
    pub fn serve(&self) {
        let idle = |state: &mut State| state.used.is_empty() && state.unfit.is_empty() && !state.is_closed;
        loop {
            let waited = self.changed.wait_while(self.state(), idle);
            let mut state = waited.unwrap_or_else(PoisonError::into_inner);
            if state.is_closed {
                let left = state.take_all();
                drop(state);
                return drop(left);
            }
            let unfit = mem::take(&mut state.unfit);
            let used = mem::take(&mut state.used);
            state.awaited = used.len() + unfit.len();
            drop(state);
            drop(unfit);
            // Work that was queued before the last user of the memory went: there is no other that may use it.
            let has_ended = used.is_empty() || (self.device.settle().is_ok() && !self.device.is_lost());
            let mut state = self.state();
            if has_ended && !state.is_closed {
                state.ready.extend(used);
            } else {
                drop(state);
                drop(used);
                state = self.state();
            }
            state.awaited = 0;
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Keeps nothing from now on. What it has kept is freed by the thread that serves it.
    pub fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_all();
    }

    /// Frees what it keeps, after the wait that is under way. Returns whether it kept any.
    pub(crate) fn let_go(&self) -> bool {
        if self.process != process::id() {
            return false;
        }
        let mut state = self.state();
        let had_any = state.count() > 0;
        state =
            self.changed.wait_while(state, |state| state.awaited > 0).unwrap_or_else(PoisonError::into_inner);
        let all = state.take_all();
        drop(state);
        drop(all);
        had_any
    }
}

/// On the toy device: those of drivers are in the tests of `hoistway`.
#[cfg(test)]
#[cfg(feature = "toy-device")]
mod tests {
    use super::*;
    use crate::{
        DeviceId, Error,
        toy::{self, Fault},
    };
    use std::thread;

    const LEN: u64 = 4096;

    /// Memory that is given back while a thread serves it, until `ends` has returned.
    fn served<T>(ends: impl FnOnce(&Arc<Device>, &Arc<SpareMemory>) -> T) -> T {
        let device = Device::open(DeviceId::Toy(0)).unwrap();
        let spare = SpareMemory::new(&device);
        thread::scope(|scope| {
            /// Also after a panic, so that the thread ends.
            struct Closes<'a>(&'a SpareMemory);
            impl Drop for Closes<'_> {
                fn drop(&mut self) {
                    self.0.close();
                }
            }
            let closes = Closes(&spare);
            scope.spawn(|| spare.serve());
            let result = ends(&device, &spare);
            drop(closes);
            result
        })
    }

    fn until_nothing_is_awaited(spare: &SpareMemory) {
        let waits =
            |state: &mut State| !state.used.is_empty() || state.awaited > 0 || !state.unfit.is_empty();
        drop(spare.changed.wait_while(spare.state(), waits).unwrap());
    }

    fn allocate(device: &Arc<Device>, len: u64) -> DeviceMemory {
        DeviceMemory::new(device, len).unwrap()
    }

    #[test]
    fn memory_comes_back_once_the_device_has_ended_its_work() {
        let _turn = toy::turn();
        served(|device, spare| {
            let memory = allocate(device, LEN);
            let address = memory.address();
            assert!(spare.take(LEN).is_none());
            spare.give_back(memory);
            until_nothing_is_awaited(spare);
            let again = spare.take(LEN - 1).unwrap();
            assert_eq!((again.address(), spare.taken()), (address, 1));
            assert!(spare.take(LEN).is_none());
        });
        assert_eq!(toy::in_use(), (0, 0));
    }

    #[test]
    fn no_more_than_two_pieces_are_kept_and_none_that_does_not_fit() {
        let _turn = toy::turn();
        served(|device, spare| {
            for _ in 0..5 {
                spare.give_back(allocate(device, LEN));
            }
            until_nothing_is_awaited(spare);
            assert_eq!(toy::in_use().0, 2 * LEN);
            for len in [LEN + 1, LEN / 2 - 1] {
                assert!(spare.take(len).is_none());
                until_nothing_is_awaited(spare);
                assert_eq!(toy::in_use().0, 0);
                spare.give_back(allocate(device, LEN));
                until_nothing_is_awaited(spare);
            }
        });
        assert_eq!(toy::in_use(), (0, 0));
    }

    #[test]
    fn memory_is_not_used_again_if_the_wait_does_not_tell() {
        let _turn = toy::turn();
        served(|device, spare| {
            toy::fail(Fault::Doubt, None);
            spare.give_back(allocate(device, LEN));
            until_nothing_is_awaited(spare);
            assert!(spare.take(LEN).is_none());
            toy::reset();
        });
        crate::release_devices();
        assert_eq!(toy::in_use(), (0, 0));
    }

    #[test]
    fn memory_that_is_kept_makes_room_for_what_is_allocated() {
        let _turn = toy::turn();
        served(|device, spare| {
            toy::set_memory_bytes(4 * LEN);
            spare.give_back(allocate(device, 3 * LEN));
            let memory = allocate(device, 2 * LEN);
            assert!(matches!(DeviceMemory::new(device, 3 * LEN), Err(Error::OutOfMemory { .. })));
            drop(memory);
        });
        assert_eq!(toy::in_use(), (0, 0));
    }

    #[test]
    fn nothing_is_kept_once_it_is_closed() {
        let _turn = toy::turn();
        let (device, spare) = served(|device, spare| (device.clone(), spare.clone()));
        spare.give_back(allocate(&device, LEN));
        assert_eq!(toy::in_use().0, 0);
    }
}
