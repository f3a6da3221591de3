//! Streams that a device keeps between uses: to make one and to destroy it takes longer than to copy a small tensor.
#![forbid(unsafe_code)]

use crate::{
    Device, aside,
    backend::{Pending, Stream},
    device::open_devices,
    drop_aside, idle,
};
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

    /// Keeps streams again, but no more than it keeps in all. Returns `false` if no thread will let them go.
    fn put_back(&self, spares: Vec<Spare>) -> bool {
        if spares.is_empty() {
            return true;
        }
        let mut kept = self.kept();
        kept.extend(spares);
        let beyond = kept.len().saturating_sub(MOST);
        let beyond: Vec<_> = kept.drain(..beyond).collect();
        // Without the lock: this calls the driver.
        drop(kept);
        drop(beyond);
        idle::keep_while_used()
    }

    fn oldest(&self) -> Option<Instant> {
        self.kept().iter().map(|spare| spare.since).min()
    }

    /// Destroys all of them, but for those that a capture of the program has taken in: these stay until it is over, or the device is
    /// closed.
    pub(crate) fn let_go(&self) {
        self.give_back(self.take_out(|_| true));
    }

    fn give_back(&self, spares: Vec<Spare>) {
        let is_captured = |spare: &Spare| matches!(spare.stream.pending(), Ok(Pending::Capture));
        let (captured, free): (Vec<_>, Vec<_>) = spares.into_iter().partition(is_captured);
        drop(free);
        let since = Instant::now();
        // Where no thread looks after them, they stay as long as the device.
        self.put_back(captured.into_iter().map(|spare| Spare { since, ..spare }).collect());
    }
}

/// A stream that nothing uses, without work, and that no capture has taken in. Others stay, but for those that do not say so: these are
/// not used again.
pub(crate) fn take(device: &Device) -> Option<Arc<dyn Stream>> {
    let spare = device.spare_streams();
    if spare.process != process::id() {
        return None;
    }
    let mut busy = Vec::new();
    let taken = loop {
        // Without the lock: this calls the driver.
        let Some(own) = spare.pop() else { break None };
        match own.stream.pending() {
            Ok(Pending::Nothing) => break Some(own.stream),
            Ok(Pending::Work | Pending::Capture) => busy.push(own),
            Err(error) => tracing::debug!(%error, "a stream that was kept is not used again"),
        }
    };
    if !busy.is_empty() && (!spare.put_back(busy) || !device.is_kept()) {
        spare.let_go();
    }
    taken
}

/// Keeps a stream that its only user is about to drop, if the process keeps the device. Whether it has work left is asked when it is
/// used again.
pub(crate) fn keep(device: &Device, stream: &Arc<dyn Stream>) {
    let spare = device.spare_streams();
    let is_foreign = spare.process != process::id();
    if Arc::strong_count(stream) > 1 || is_foreign || !stream.can_be_kept() || !device.is_kept() {
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
        let spare = device.spare_streams();
        let old = spare.take_out(is_old);
        oldest = oldest.into_iter().chain(spare.oldest()).min();
        // To destroy them may wait, and so may to close the device where this is the last that holds it. The end of the process must
        // wait for that.
        if !old.is_empty() {
            aside::run("hoistway-unpin", move || device.spare_streams().give_back(old));
        } else if let Some(last) = Arc::into_inner(device) {
            drop_aside(last);
        }
    }
    oldest
}
