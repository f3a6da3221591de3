//! Streams that a device keeps between uses: to make one and to destroy it takes longer than to copy a small tensor.
#![forbid(unsafe_code)]

use crate::{Device, backend::Stream, device::open_devices, drop_aside, idle};
use std::{
    process,
    sync::{Arc, Mutex, MutexGuard, Once, PoisonError},
    time::Instant,
};

/// How many a device keeps: more than loads that usually run at once.
const MOST: usize = 4;

/// Streams that nothing uses. They keep the context of their device, but not the device.
#[derive(Debug)]
pub(crate) struct SpareStreams {
    /// A child of `fork` has copies of them, and the lock may be held in its copy for ever.
    process: u32,
    kept: Mutex<Vec<Spare>>,
}

#[derive(Debug)]
struct Spare {
    stream: Arc<dyn Stream>,
    since: Instant,
}

impl SpareStreams {
    pub(crate) fn new() -> Self {
        Self { process: process::id(), kept: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Spare>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A stream without work that no capture has taken in. One that is busy stays, and one that does not say so is destroyed.
    pub(crate) fn take(&self) -> Option<Arc<dyn Stream>> {
        if self.process != process::id() {
            return None;
        }
        let mut busy = Vec::new();
        let taken = loop {
            // Without the lock: this calls the driver.
            let Some(spare) = self.pop() else { break None };
            match spare.stream.is_idle() {
                Ok(true) => break Some(spare.stream),
                Ok(false) => busy.push(spare),
                Err(error) => tracing::debug!(%error, "a stream that was kept is not used again"),
            }
        };
        if !busy.is_empty() {
            self.kept().extend(busy);
        }
        taken
    }

    fn pop(&self) -> Option<Spare> {
        self.kept().pop()
    }

    /// Takes out what nothing has used since an instant that is meant.
    fn take_out(&self, is_meant: impl Fn(Instant) -> bool) -> Vec<Spare> {
        if self.process != process::id() {
            return Vec::new();
        }
        self.kept().extract_if(.., |spare| is_meant(spare.since)).collect()
    }

    fn oldest(&self) -> Option<Instant> {
        self.kept().iter().map(|spare| spare.since).min()
    }

    /// Destroys all of them.
    pub(crate) fn let_go(&self) {
        drop(self.take_out(|_| true));
    }
}

/// Keeps a stream that its only user is about to drop, if the process keeps the device. Whether it has work left is asked when it is
/// used again.
pub(crate) fn keep(device: &Device, stream: &Arc<dyn Stream>) {
    let spare = device.spare_streams();
    if Arc::strong_count(stream) > 1 || spare.process != process::id() || !device.is_kept() {
        return;
    }
    static GIVES_BACK: Once = Once::new();
    GIVES_BACK.call_once(|| idle::on_idle(give_back));
    let mut kept = spare.kept();
    if kept.len() >= MOST {
        return;
    }
    kept.push(Spare { stream: stream.clone(), since: Instant::now() });
    drop(kept);
    if !idle::keep_while_used() || !device.is_kept() {
        // Without a thread it would stay for ever, and so would it if the device was released in the meantime.
        spare.let_go();
    }
}

fn give_back(is_old: &dyn Fn(Instant) -> bool) -> Option<Instant> {
    let mut oldest: Option<Instant> = None;
    for device in open_devices() {
        let old = device.spare_streams().take_out(is_old);
        oldest = oldest.into_iter().chain(device.spare_streams().oldest()).min();
        if !old.is_empty() {
            // To destroy them may wait, and the end of the process must wait for that. So it must where this is the last that holds the
            // device.
            drop_aside((old, device));
        }
    }
    oldest
}
