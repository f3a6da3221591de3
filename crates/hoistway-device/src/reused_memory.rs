//! Memory that a stream of tensors has had before: its next tensors go there, rather than to memory that is allocated for them.
#![forbid(unsafe_code)]

use crate::{Device, DeviceMemory};
use std::{
    mem, process,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// How many pieces of memory are kept at once.
const MOST: usize = 2;

/// Keeps up to two pieces of memory that nothing in the process uses any more, but work on the device still may.
///
/// [`ReusedMemory::serve`] waits for that work. Then [`ReusedMemory::take`] gives the memory out again. All of it is freed when it is
/// closed, and when memory of hoistway cannot be allocated on the device.
#[derive(Debug)]
pub struct ReusedMemory {
    device: Arc<Device>,
    /// A child of `fork` has copies of the memory, and the lock may be held in its copy for ever.
    process: u32,
    most_bytes: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Work on the device may still use it.
    used: Vec<DeviceMemory>,
    /// Pieces and bytes in no list: a wait for the device or their release is under way.
    awaited: (usize, u64),
    /// All work that used it has ended.
    ready: Vec<DeviceMemory>,
    /// Nothing fits in it.
    unfit: Vec<DeviceMemory>,
    /// How many have too little memory: while there is one, nothing is kept.
    wanting: usize,
    is_closed: bool,
}

impl State {
    fn keeps(&self) -> bool {
        !self.is_closed && self.wanting == 0
    }

    /// Pieces and bytes that are kept, or not freed yet.
    fn kept(&self) -> (usize, u64) {
        let (count, bytes) = sum(self.used.iter().chain(&self.ready).chain(&self.unfit));
        (count + self.awaited.0, bytes.saturating_add(self.awaited.1))
    }

    fn take_all(&mut self) -> Vec<DeviceMemory> {
        let mut all = mem::take(&mut self.used);
        all.append(&mut self.ready);
        all.append(&mut self.unfit);
        all
    }
}

fn sum<'a>(memory: impl Iterator<Item = &'a DeviceMemory>) -> (usize, u64) {
    memory.fold((0, 0), |(count, bytes), piece| (count + 1, piece.len().saturating_add(bytes)))
}

impl ReusedMemory {
    /// Nothing yet, of a device. At most `most_bytes` are kept. A thread of the caller's [serves](Self::serve) it.
    pub fn new(device: &Arc<Device>, most_bytes: u64) -> Arc<Self> {
        let (state, changed) = Default::default();
        let reused =
            Arc::new(Self { device: device.clone(), process: process::id(), most_bytes, state, changed });
        device.add_reused_memory(&reused);
        reused
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
        let (count, bytes) = state.kept();
        if state.keeps() && count < MOST && bytes.saturating_add(memory.len()) <= self.most_bytes {
            state.used.push(memory);
            self.changed.notify_all();
        }
        // What was not kept is dropped after the lock.
    }

    /// Memory of `len` bytes which no work uses, if there is some. None that is longer: the rest would be no one's, and nothing would
    /// free it while the tensor lives.
    pub fn take(&self, len: u64) -> Option<DeviceMemory> {
        let mut state = self.state();
        let at = state.ready.iter().position(|memory| memory.len() == len);
        if at.is_none() && !state.ready.is_empty() {
            // It would keep room from what fits.
            let mut unfit = mem::take(&mut state.ready);
            state.unfit.append(&mut unfit);
            self.changed.notify_all();
        }
        at.map(|at| state.ready.swap_remove(at))
    }

    /// Waits for the work that uses what was given back, again and again, until it is closed, and frees what does not fit.
    pub fn serve(&self) {
        let _closes = Closes(self);
        let idle = |state: &mut State| state.used.is_empty() && state.unfit.is_empty() && !state.is_closed;
        loop {
            let waited = self.changed.wait_while(self.state(), idle);
            let mut state = waited.unwrap_or_else(PoisonError::into_inner);
            if state.is_closed {
                return self.free_all(state);
            }
            let (used, unfit) = (mem::take(&mut state.used), mem::take(&mut state.unfit));
            let awaited = self.await_all(&mut state, used.iter().chain(&unfit));
            drop(state);
            drop(unfit);
            // Work that was queued before the last user of the memory went: there is no other that may use it.
            let has_ended = used.is_empty() || (self.device.settle().is_ok() && !self.device.is_lost());
            let mut state = self.state();
            if has_ended && state.keeps() {
                state.ready.extend(used);
                drop(state);
            } else {
                drop(state);
                drop(used);
            }
            drop(awaited);
        }
    }

    /// Keeps nothing from now on. What it has kept is freed by the thread that serves it.
    pub fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_all();
    }

    fn await_all<'a>(
        &self,
        state: &mut State,
        memory: impl Iterator<Item = &'a DeviceMemory>,
    ) -> Awaited<'_> {
        let (count, bytes) = sum(memory);
        state.awaited.0 += count;
        state.awaited.1 = state.awaited.1.saturating_add(bytes);
        Awaited { of: self, count, bytes }
    }

    /// Frees what is in the lists, without the lock: that may wait for the device.
    fn free_all(&self, mut state: MutexGuard<'_, State>) {
        let all = state.take_all();
        let _awaited = self.await_all(&mut state, all.iter());
        drop(state);
        drop(all);
    }

    /// Has nothing kept as long as the result lives. `None` in a child of `fork`.
    pub(crate) fn want(self: Arc<Self>) -> Option<Wanting> {
        if self.process != process::id() {
            return None;
        }
        self.state().wanting += 1;
        Some(Wanting(self))
    }
}

/// Pieces that a thread waits for or frees.
struct Awaited<'a> {
    of: &'a ReusedMemory,
    count: usize,
    bytes: u64,
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        let mut state = self.of.state();
        state.awaited.0 -= self.count;
        state.awaited.1 -= self.bytes;
        drop(state);
        self.of.changed.notify_all();
    }
}

/// Closes it, also after a panic of the thread that serves it: no other would free what is kept.
struct Closes<'a>(&'a ReusedMemory);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Someone has too little memory.
pub(crate) struct Wanting(Arc<ReusedMemory>);

impl Wanting {
    /// Frees what is kept, after the waits that are under way.
    pub(crate) fn let_go(&self) {
        let waits = |state: &mut State| state.awaited.0 > 0;
        let waited = self.0.changed.wait_while(self.0.state(), waits);
        self.0.free_all(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Wanting {
    fn drop(&mut self) {
        self.0.state().wanting -= 1;
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
    use std::{thread, time::Duration};

    const LEN: u64 = 4096;

    /// Memory that is given back while a thread serves it, until `ends` has returned.
    fn served<T>(ends: impl FnOnce(&Arc<Device>, &Arc<ReusedMemory>) -> T) -> T {
        let device = Device::open(DeviceId::Toy(0)).unwrap();
        let reused = ReusedMemory::new(&device, 8 * LEN);
        thread::scope(|scope| {
            // Also after a panic, so that the thread ends.
            let closes = Closes(&reused);
            scope.spawn(|| reused.serve());
            let result = ends(&device, &reused);
            drop(closes);
            result
        })
    }

    fn until_nothing_is_awaited(reused: &ReusedMemory) {
        let waits =
            |state: &mut State| !state.used.is_empty() || state.awaited.0 > 0 || !state.unfit.is_empty();
        let waited = reused.changed.wait_timeout_while(reused.state(), Duration::from_secs(60), waits);
        assert!(!waited.unwrap().1.timed_out());
    }

    fn allocate(device: &Arc<Device>, len: u64) -> DeviceMemory {
        DeviceMemory::new(device, len).unwrap()
    }

    #[test]
    fn memory_comes_back_once_the_device_has_ended_its_work() {
        let _turn = toy::turn();
        served(|device, reused| {
            let memory = allocate(device, LEN);
            let address = memory.address();
            assert!(reused.take(LEN).is_none());
            reused.give_back(memory);
            until_nothing_is_awaited(reused);
            assert_eq!(reused.take(LEN).unwrap().address(), address);
            assert!(reused.take(LEN).is_none());
        });
        assert_eq!(toy::in_use(), (0, 0));
    }

    #[test]
    fn no_more_than_two_pieces_are_kept_and_none_that_does_not_fit() {
        let _turn = toy::turn();
        served(|device, reused| {
            for _ in 0..5 {
                reused.give_back(allocate(device, LEN));
            }
            until_nothing_is_awaited(reused);
            assert_eq!(toy::in_use().0, 2 * LEN);
            // Too short, and longer.
            for len in [LEN + 1, LEN - 1] {
                assert!(reused.take(len).is_none());
                until_nothing_is_awaited(reused);
                assert_eq!(toy::in_use().0, 0);
                reused.give_back(allocate(device, LEN));
                until_nothing_is_awaited(reused);
            }
        });
        assert_eq!(toy::in_use(), (0, 0));
    }

    #[test]
    fn no_more_bytes_are_kept_than_may_be() {
        let _turn = toy::turn();
        served(|device, reused| {
            for len in [8 * LEN + 1, 5 * LEN, 3 * LEN + 1] {
                reused.give_back(allocate(device, len));
            }
            until_nothing_is_awaited(reused);
            assert_eq!(toy::in_use().0, 5 * LEN);
            reused.give_back(allocate(device, 3 * LEN));
            until_nothing_is_awaited(reused);
            assert_eq!(toy::in_use().0, 8 * LEN);
        });
        assert_eq!(toy::in_use(), (0, 0));
    }

    #[test]
    fn memory_is_not_used_again_if_the_wait_does_not_tell() {
        let _turn = toy::turn();
        served(|device, reused| {
            toy::fail(Fault::Doubt, None);
            reused.give_back(allocate(device, LEN));
            until_nothing_is_awaited(reused);
            assert!(reused.take(LEN).is_none());
            toy::reset();
        });
        crate::release_devices();
        assert_eq!(toy::in_use(), (0, 0));
    }

    #[test]
    fn memory_that_is_kept_makes_room_for_what_is_allocated() {
        let _turn = toy::turn();
        served(|device, reused| {
            toy::set_memory_bytes(4 * LEN);
            reused.give_back(allocate(device, 3 * LEN));
            let memory = allocate(device, 2 * LEN);
            assert!(matches!(DeviceMemory::new(device, 3 * LEN), Err(Error::OutOfMemory { .. })));
            drop(memory);
        });
        assert_eq!(toy::in_use(), (0, 0));
    }

    #[test]
    fn nothing_is_kept_while_memory_is_wanted() {
        let _turn = toy::turn();
        served(|device, reused| {
            let memory = [allocate(device, LEN), allocate(device, LEN)];
            let [wanting, other] = [reused.clone().want().unwrap(), reused.clone().want().unwrap()];
            for (memory, wanting) in memory.into_iter().zip([wanting, other]) {
                reused.give_back(memory);
                wanting.let_go();
            }
            assert_eq!(toy::in_use().0, 0);
            reused.give_back(allocate(device, LEN));
            until_nothing_is_awaited(reused);
            assert_eq!(toy::in_use().0, LEN);
        });
        assert_eq!(toy::in_use(), (0, 0));
    }

    #[test]
    fn nothing_is_kept_once_it_is_closed() {
        let _turn = toy::turn();
        let (device, reused) = served(|device, reused| (device.clone(), reused.clone()));
        reused.give_back(allocate(&device, LEN));
        assert_eq!(toy::in_use().0, 0);
    }
}
