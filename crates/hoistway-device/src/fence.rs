//! What copies to memory of the caller's wait for: work that is queued on the device and may still use that memory.
#![allow(unsafe_code)]

use crate::{CopyStream, Device, DeviceId, Result, backend::Event, fate};
use std::{
    fmt,
    sync::{Arc, Condvar, Mutex, PoisonError},
};

/// What comes before copies. Clones are the same.
#[derive(Clone, Debug)]
pub struct Fence(Arc<Kind>);

enum Kind {
    /// What was queued on the legacy default stream as copies were asked for, and on the streams in order with it.
    Default,
    /// An event of the caller's, as the driver names it.
    OfCaller(u64),
    /// What was queued on a stream as the fence was made.
    Marked(Mutex<Box<dyn Event>>),
    /// All work of the device.
    Device { device: DeviceId, is_passed: Mutex<bool> },
    /// Work of hoistway that another thread makes and waits for.
    Gated(Arc<Latch>),
}

#[derive(Default)]
struct Latch {
    is_open: Mutex<bool>,
    opened: Condvar,
}

/// Opens a [fence](Fence::gated) when it is dropped.
#[derive(Debug)]
pub struct Gate(Arc<Latch>);

impl Drop for Gate {
    fn drop(&mut self) {
        *self.0.is_open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.opened.notify_all();
    }
}

impl fmt::Debug for Latch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Latch")
    }
}

impl Fence {
    /// Lies behind what is queued on the legacy default stream by the time that copies are asked for, and so on every stream
    /// that is in order with it.
    pub fn of_default_stream() -> Self {
        Self(Arc::new(Kind::Default))
    }

    /// Lies behind what is queued so far on a stream of the caller's: a handle of the device, 0 for the legacy default stream.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device).
    ///
    /// # Safety
    /// The stream lives.
    pub unsafe fn of_stream(device: &Device, stream: usize) -> Result<Self> {
        // SAFETY: passed on.
        let event = unsafe { device.backend().clone().mark(stream)? };
        Ok(Self(Arc::new(Kind::Marked(Mutex::new(event)))))
    }

    /// Lies behind an event of the caller's, as the driver names it. One that was recorded in a capture is refused where copies
    /// are asked for.
    ///
    /// # Safety
    /// The event lives until the copies have begun.
    pub unsafe fn of_event(event: u64) -> Self {
        Self(Arc::new(Kind::OfCaller(event)))
    }

    /// Lies behind all work of the device. The thread that asks for copies waits for that: no other call does, and no lock is
    /// held meanwhile that other fences need.
    pub fn of_device(device: DeviceId) -> Self {
        Self(Arc::new(Kind::Device { device, is_passed: Mutex::new(false) }))
    }

    /// Lies behind work that another thread makes, which drops the gate once that has ended. The thread that asks for copies waits
    /// for that.
    pub fn gated() -> (Self, Gate) {
        let latch = Arc::<Latch>::default();
        (Self(Arc::new(Kind::Gated(latch.clone()))), Gate(latch))
    }

    /// Whether it lies behind what was queued until now, also if it was made before: nothing waits for it yet.
    pub fn covers_now(&self) -> bool {
        match &*self.0 {
            Kind::Device { is_passed, .. } => is_passed.try_lock().is_ok_and(|is_passed| !*is_passed),
            _ => false,
        }
    }

    /// Whether what it lies behind is known to have ended. Waits for nothing.
    pub fn is_passed(&self) -> bool {
        match &*self.0 {
            Kind::Default | Kind::OfCaller(_) => false,
            // The thread that holds the lock may wait for the driver.
            Kind::Marked(event) => event.try_lock().is_ok_and(|event| fate::is_over(&**event)),
            Kind::Device { is_passed, .. } => is_passed.try_lock().is_ok_and(|is_passed| *is_passed),
            Kind::Gated(latch) => *latch.is_open.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Whether the stream waits for it, rather than the thread that asks.
    pub fn is_queued(&self) -> bool {
        !matches!(*self.0, Kind::Device { .. } | Kind::Gated(_))
    }

    /// Whether it is [gated](Self::gated).
    pub fn is_gate(&self) -> bool {
        matches!(*self.0, Kind::Gated(_))
    }

    /// Makes later copies of `copies` wait for it.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device); [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable) if a wait does not tell
    /// whether work has ended.
    pub fn order(&self, copies: &CopyStream) -> Result<()> {
        match &*self.0 {
            Kind::Default => copies.wait_for_default(),
            // SAFETY: the event lives, as who made the fence has promised.
            Kind::OfCaller(event) => unsafe { copies.stream().wait_for_event(*event) },
            Kind::Marked(event) => {
                let event = event.lock().unwrap_or_else(PoisonError::into_inner);
                // SAFETY: an event of this value, for which the driver waits although it be destroyed.
                unsafe { copies.stream().wait_for_event(event.handle()) }
            }
            Kind::Device { device, is_passed } => {
                let mut is_passed = is_passed.lock().unwrap_or_else(PoisonError::into_inner);
                if !*is_passed {
                    Device::open(*device)?.settle()?;
                    *is_passed = true;
                }
                Ok(())
            }
            Kind::Gated(latch) => {
                let is_open = latch.is_open.lock().unwrap_or_else(PoisonError::into_inner);
                drop(latch.opened.wait_while(is_open, |is_open| !*is_open));
                Ok(())
            }
        }
    }
}

impl PartialEq for Fence {
    /// Whether what comes behind the one comes behind the other, too.
    fn eq(&self, other: &Self) -> bool {
        match (&*self.0, &*other.0) {
            (Kind::Default, Kind::Default) => true,
            (Kind::OfCaller(one), Kind::OfCaller(other)) => one == other,
            _ => Arc::ptr_eq(&self.0, &other.0),
        }
    }
}

impl Eq for Fence {}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "Default",
            Self::OfCaller(_) => "OfCaller",
            Self::Marked(_) => "Marked",
            Self::Device { .. } => "Device",
            Self::Gated(_) => "Gated",
        })
    }
}
