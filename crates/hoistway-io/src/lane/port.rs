//! Reads by a completion port: many in flight from one thread.
#![allow(unsafe_code)]

use super::{Done, FileRead, Lane, ReadsFile};
use crate::sys::port::{Port, Started, Transfer, TransferState};
use hoistway_device::Unavailable;
use std::{
    fmt, io,
    mem::{self, ManuallyDrop},
};

/// Reads by a completion port.
///
/// The system writes to the places and the memory of operations until it has told that they ended. So neither is freed before:
/// a lane that is dropped ends its operations and waits for that.
pub struct PortLane<T: ReadsFile> {
    port: Port,
    /// One for each operation that may be in flight. Never moved.
    places: Vec<TransferState>,
    in_flight: Vec<Option<(T, Transfer)>>,
    free: Vec<usize>,
    /// Operations that ended before the system had them.
    rejected: Vec<Done<T>>,
    /// Addresses of the places of operations that have ended.
    ended: Vec<usize>,
}

impl<T: ReadsFile> PortLane<T> {
    /// Makes a port for up to `depth` reads.
    ///
    /// # Errors
    /// Why there is none.
    pub fn new(depth: usize) -> Result<Self, Unavailable> {
        let port = Port::new()
            .map_err(|error| Unavailable::new(format!("no completion port can be made: {error}"), ""))?;
        Ok(Self {
            port,
            places: (0..depth).map(|_| TransferState::default()).collect(),
            in_flight: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            rejected: Vec::new(),
            ended: Vec::new(),
        })
    }

    fn count(&self) -> usize {
        self.in_flight.len() - self.free.len() + self.rejected.len()
    }

    fn reject(&mut self, slot: usize, op: T, result: io::Result<usize>) {
        self.free.push(slot);
        self.rejected.push(Done { op, result });
    }

    fn wait(&mut self, done: &mut Vec<Done<T>>) -> io::Result<()> {
        if self.count() == 0 {
            return Ok(());
        }
        if !self.rejected.is_empty() {
            done.append(&mut self.rejected);
            return Ok(());
        }
        self.port.wait(&mut self.ended)?;
        for address in self.ended.drain(..) {
            let found = self.places.iter().position(|place| place.address() == address);
            let Some((slot, (op, transfer))) =
                found.and_then(|slot| Some((slot, self.in_flight[slot].take()?)))
            else {
                continue;
            };
            self.free.push(slot);
            done.push(Done { op, result: transfer.result(&self.places[slot]) });
        }
        Ok(())
    }
}

impl<T: ReadsFile> Lane<T> for PortLane<T> {
    fn capacity(&self) -> usize {
        self.places.len()
    }

    fn in_flight(&self) -> usize {
        self.count()
    }

    fn push(&mut self, mut op: T) {
        let Some(slot) = self.free.pop() else {
            let result = Err(io::Error::other("more operations were pushed than the port takes"));
            return self.rejected.push(Done { op, result });
        };
        let started = op.next_read().and_then(|FileRead { file, offset, target }| {
            // SAFETY: by the contract of `ReadsFile`, and as operation, place and transfer are kept until the end was told,
            // also if the lane is dropped.
            unsafe { self.port.read(file, target, offset, &self.places[slot]) }
        });
        match started {
            Ok(Started::InFlight(transfer)) => self.in_flight[slot] = Some((op, transfer)),
            Ok(Started::Ended(result)) => self.reject(slot, op, result),
            Err(error) => self.reject(slot, op, Err(error)),
        }
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done<T>>) -> io::Result<()> {
        self.wait(done)
    }
}

impl<T: ReadsFile> Drop for PortLane<T> {
    fn drop(&mut self) {
        for (slot, place) in self.in_flight.iter().zip(&self.places) {
            if let Some((_, transfer)) = slot {
                transfer.cancel(place);
            }
        }
        let mut done = Vec::new();
        while self.count() > 0 {
            if self.wait(&mut done).is_err() {
                // What becomes of these cannot be known: the system may still write to their memory and places. Neither is
                // freed, even if one of the calls panics.
                mem::forget(mem::take(&mut self.places));
                let mut lost = ManuallyDrop::new(mem::take(&mut self.in_flight).into_iter());
                for (op, transfer) in lost.by_ref().flatten() {
                    mem::forget(transfer);
                    op.abandon();
                }
                return;
            }
            done.clear();
        }
    }
}

impl<T: ReadsFile> fmt::Debug for PortLane<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortLane").field("in_flight", &self.count()).finish_non_exhaustive()
    }
}
