//! Memory of the store's own that unaligned bytes, headers, and bytes of devices pass through.
//!
//! It is cut into slots of one size. A step takes as many as it needs at once, not necessarily neighbours, and gives
//! them back when it is done; it never waits for more while it holds some, so that nobody waits for ever. Whoever came
//! first is served first, however much it needs; but what somebody waits for goes before the rest, most of the time.

use super::wake::Wake;
use crate::{Priority, layout::BLOCK_LEN};
use std::{
    collections::VecDeque,
    io, mem,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard},
};
use windlass_io::{
    memory::{Mapping, PageKind},
    parallel::lock,
};

/// So often may others go before a step that nobody waits for.
const MOST_OVERTAKINGS: u32 = 64;

/// Who waits for a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    Demand,
    /// Nobody yet.
    Rest,
}

impl Urgency {
    pub(super) const ALL: [Self; 2] = [Self::Demand, Self::Rest];

    pub(super) fn of(priority: Priority) -> Self {
        if priority == Priority::Demand { Self::Demand } else { Self::Rest }
    }
}

/// Why there is no lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoLease {
    /// Others have the memory, or wait longer for it.
    Later,
    /// So much is lost that there will never be enough.
    Never,
}

/// The slots.
#[derive(Debug)]
pub(super) struct BouncePool {
    mapping: Mapping,
    slot_len: usize,
    slots: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Last in, first out: those that were used last are in the processor's cache.
    free: Vec<usize>,
    /// Workers that wait for so many slots, by urgency.
    waiting: [VecDeque<(usize, Arc<Wake>)>; 2],
    /// How often somebody went before the first that nobody waits for.
    overtakings: u32,
    /// Slots that are never given back.
    lost: usize,
}

impl State {
    /// Wakes who is next, if there is enough for it.
    fn wake_next(&self) {
        let [is_demand, is_rest] = self.waiting.each_ref().map(|line| !line.is_empty());
        let line = &self.waiting[self.next(is_demand, is_rest) as usize];
        if let Some((slots, wake)) = line.front()
            && *slots <= self.free.len()
        {
            wake.notify();
        }
    }

    /// Whose turn it is, of those who ask.
    fn next(&self, is_demand: bool, is_rest: bool) -> Urgency {
        let is_rests_turn = !is_demand || self.overtakings >= MOST_OVERTAKINGS;
        if is_rest && is_rests_turn { Urgency::Rest } else { Urgency::Demand }
    }
}

impl BouncePool {
    /// At least one slot, of `slot_len` bytes each: a multiple of [`BLOCK_LEN`].
    pub(super) fn new(bytes: u64, slot_len: usize) -> io::Result<Arc<Self>> {
        debug_assert!((slot_len as u64).is_multiple_of(BLOCK_LEN), "slots are whole blocks");
        let slots = usize::try_from(bytes).unwrap_or(usize::MAX).div_ceil(slot_len).max(1);
        let len = slots.checked_mul(slot_len).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let free = (0..slots).rev().collect();
        let mut mapping = Mapping::anonymous(len, PageKind::TransparentHuge)?;
        // Children of `fork` never use it, and transfers go on in the parent: a copy on write would take their bytes.
        mapping.hide_from_children();
        Ok(Arc::new(Self { mapping, slot_len, slots, state: Mutex::new(State { free, ..State::default() }) }))
    }

    /// Bytes of all slots that are not lost.
    pub(super) fn len(&self) -> u64 {
        ((self.slots - self.lock().lost) * self.slot_len) as u64
    }

    /// All of its memory, for a device to know.
    pub(super) fn memory(&self) -> (NonNull<u8>, usize) {
        (self.mapping.pointer(0), self.slots * self.slot_len)
    }

    /// Room for `bytes`, if there is any and nobody waits longer for it. Where that may come later, `wake` is notified
    /// when it is worth asking again: by the same, or others will wait for ever.
    pub(super) fn try_take(
        self: &Arc<Self>,
        bytes: u64,
        urgency: Urgency,
        wake: &Arc<Wake>,
    ) -> Result<Lease, NoLease> {
        let count = usize::try_from(bytes).unwrap_or(usize::MAX).div_ceil(self.slot_len);
        if count == 0 {
            return Ok(Lease { pool: self.clone(), slots: Vec::new() });
        }
        let mut state = self.lock();
        if count > self.slots - state.lost {
            return Err(NoLease::Never);
        }
        let line = urgency as usize;
        let asks = |other: Urgency| other == urgency || !state.waiting[other as usize].is_empty();
        let is_turn = state.next(asks(Urgency::Demand), asks(Urgency::Rest)) == urgency;
        let place = state.waiting[line].iter().position(|(_, own)| Arc::ptr_eq(own, wake));
        let is_first = place.unwrap_or(state.waiting[line].len()) == 0;
        if !is_turn || !is_first || count > state.free.len() {
            match place {
                Some(place) => state.waiting[line][place].0 = count,
                None => state.waiting[line].push_back((count, wake.clone())),
            }
            return Err(NoLease::Later);
        }
        if place.is_some() {
            state.waiting[line].pop_front();
        }
        let overtakes = urgency == Urgency::Demand && !state.waiting[Urgency::Rest as usize].is_empty();
        state.overtakings = if overtakes { state.overtakings + 1 } else { 0 };
        let kept = state.free.len() - count;
        let mut slots = state.free.split_off(kept);
        slots.reverse();
        state.wake_next();
        Ok(Lease { pool: self.clone(), slots })
    }

    /// The worker of `wake` does not wait any more.
    pub(super) fn leave(&self, urgency: Urgency, wake: &Arc<Wake>) {
        let mut state = self.lock();
        state.waiting[urgency as usize].retain(|(_, own)| !Arc::ptr_eq(own, wake));
        state.wake_next();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// Some slots, to oneself.
#[derive(Debug)]
pub(super) struct Lease {
    pool: Arc<BouncePool>,
    slots: Vec<usize>,
}

impl Lease {
    /// The memory of bytes `start..start + len` of the lease, in as many runs as slots are not neighbours. Bytes past
    /// its end are left out.
    pub(super) fn runs(&self, start: u64, len: u64) -> impl Iterator<Item = (*mut u8, usize)> + '_ {
        let slot_len = self.pool.slot_len;
        let (mut position, end) = (start as usize, (start + len) as usize);
        std::iter::from_fn(move || {
            let (slot, within) = (position / slot_len, position % slot_len);
            let index = *self.slots.get(slot)?;
            let mut reach = slot_len - within;
            let neighbours = self.slots[slot..].windows(2).take_while(|pair| pair[1] == pair[0] + 1);
            reach += neighbours.count() * slot_len;
            let count = reach.min(end.checked_sub(position)?);
            if count == 0 {
                return None;
            }
            position += count;
            Some((self.pool.mapping.pointer(index * slot_len + within).as_ptr(), count))
        })
    }

    /// Never gives them back, as somebody may go on using them. Who waits for more than is left is told.
    pub(super) fn lose(mut self) {
        let slots = mem::take(&mut self.slots);
        let mut state = self.pool.lock();
        state.lost += slots.len();
        let left = self.pool.slots - state.lost;
        for line in &mut state.waiting {
            line.retain(|(count, wake)| {
                if *count > left {
                    wake.notify();
                }
                *count <= left
            });
        }
        state.wake_next();
        drop(state);
        // The mapping stays as long as they are used, which is for ever.
        mem::forget(self);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.slots.is_empty() {
            return;
        }
        let mut state = self.pool.lock();
        state.free.extend(self.slots.drain(..).rev());
        state.wake_next();
    }
}

#[cfg(test)]
#[allow(unsafe_code, reason = "a test forks")]
mod tests {
    use super::*;

    #[test]
    fn children_do_not_have_the_memory() {
        let pool = BouncePool::new(4 * 4096, 4096).unwrap();
        let (address, len) = pool.memory();
        // SAFETY: the child calls the system alone, and leaves at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut resident = [0_u8; 4];
            // SAFETY: there is a byte for each page.
            let found = unsafe { libc::mincore(address.as_ptr().cast(), len, resident.as_mut_ptr()) };
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { libc::_exit(i32::from(found == 0)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child has the memory");
    }

    #[test]
    fn whoever_came_first_is_served_first() {
        let pool = BouncePool::new(4 * 4096, 4096).unwrap();
        let [first, second] = [(); 2].map(|()| Arc::new(Wake::new().unwrap()));
        let held = pool.try_take(3 * 4096, Urgency::Demand, &first).unwrap();
        assert_eq!(pool.try_take(2 * 4096, Urgency::Demand, &first).unwrap_err(), NoLease::Later);
        assert!(
            pool.try_take(1, Urgency::Demand, &second).is_err(),
            "there is a slot, but another waits for two"
        );
        drop(held);
        let large = pool.try_take(2 * 4096, Urgency::Demand, &first).unwrap();
        let small = pool.try_take(1, Urgency::Demand, &second).unwrap();
        drop((large, small));
        assert_eq!(pool.lock().free.len(), 4);
    }

    #[test]
    fn who_leaves_makes_way() {
        let pool = BouncePool::new(2 * 4096, 4096).unwrap();
        let [first, second] = [(); 2].map(|()| Arc::new(Wake::new().unwrap()));
        let _held = pool.try_take(4096, Urgency::Demand, &first).unwrap();
        assert!(pool.try_take(2 * 4096, Urgency::Demand, &first).is_err());
        assert!(pool.try_take(4096, Urgency::Demand, &second).is_err());
        pool.leave(Urgency::Demand, &first);
        second.wait();
        assert!(pool.try_take(4096, Urgency::Demand, &second).is_ok());
    }

    #[test]
    fn what_somebody_waits_for_goes_before_the_rest_but_not_for_ever() {
        let pool = BouncePool::new(4 * 4096, 4096).unwrap();
        let [store, load] = [(); 2].map(|()| Arc::new(Wake::new().unwrap()));
        let held = pool.try_take(4096, Urgency::Rest, &store).unwrap();
        assert_eq!(pool.try_take(4 * 4096, Urgency::Rest, &store).unwrap_err(), NoLease::Later);
        for _ in 0..MOST_OVERTAKINGS {
            drop(pool.try_take(4096, Urgency::Demand, &load).unwrap());
        }
        assert_eq!(pool.try_take(4096, Urgency::Demand, &load).unwrap_err(), NoLease::Later);
        drop(held);
        store.wait();
        drop(pool.try_take(4 * 4096, Urgency::Rest, &store).unwrap());
        load.wait();
        assert!(pool.try_take(4096, Urgency::Demand, &load).is_ok());
    }

    #[test]
    fn nobody_waits_for_memory_that_is_lost() {
        let pool = BouncePool::new(4 * 4096, 4096).unwrap();
        let [first, second, third] = [(); 3].map(|()| Arc::new(Wake::new().unwrap()));
        let held = pool.try_take(2 * 4096, Urgency::Demand, &third).unwrap();
        let lost = pool.try_take(2 * 4096, Urgency::Demand, &third).unwrap();
        assert_eq!(pool.try_take(3 * 4096, Urgency::Demand, &first).unwrap_err(), NoLease::Later);
        assert_eq!(pool.try_take(2 * 4096, Urgency::Demand, &second).unwrap_err(), NoLease::Later);
        lost.lose();
        first.wait();
        assert_eq!(pool.try_take(3 * 4096, Urgency::Demand, &first).unwrap_err(), NoLease::Never);
        assert_eq!(pool.len(), 2 * 4096);
        drop(held);
        second.wait();
        assert!(pool.try_take(2 * 4096, Urgency::Demand, &second).is_ok());
    }

    #[test]
    fn leases_are_disjoint_runs_of_whole_slots() {
        let pool = BouncePool::new(8 * 4096, 4096).unwrap();
        let wake = Arc::new(Wake::new().unwrap());
        let scattered: Vec<Lease> =
            (0..8).map(|_| pool.try_take(4096, Urgency::Demand, &wake).unwrap()).collect();
        drop(scattered);
        let lease = pool.try_take(8 * 4096, Urgency::Demand, &wake).unwrap();
        let mut bytes: Vec<usize> = Vec::new();
        for (address, len) in lease.runs(100, 8 * 4096 - 200) {
            bytes.extend(address.addr()..address.addr() + len);
        }
        assert_eq!(bytes.len(), 8 * 4096 - 200);
        bytes.sort_unstable();
        bytes.dedup();
        assert_eq!(bytes.len(), 8 * 4096 - 200);
        assert_eq!(lease.runs(8 * 4096, 1).count(), 0);
    }
}
