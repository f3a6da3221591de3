//! What tests set and count.
#![allow(unsafe_code)]

use std::{
    collections::HashMap,
    env,
    ffi::{CStr, c_char, c_int},
    sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError},
};

/// Settings, by their names; 0 is the default of all:
///
/// * `fail_at=N`: the N-th request fails, with `code`, or as the end of the file.
/// * `fail_len=N`: each request to a file of N bytes fails so.
/// * `remove_at=N`: from the N-th request on, all fail as of a device that was removed.
/// * `stall_at=N`: from the N-th request on, none ends until this is taken back.
/// * `deaf=1`: such requests do not end when they are cancelled or their queue is closed, either.
/// * `delay_ms=T`: each request takes that much longer.
/// * `reverse=1`: the requests of a submission are carried out from the last to the first.
/// * `early=1`: events are set as they are submitted, before the requests ahead of them are done.
/// * `staging_locked=1`: another library has made queues.
/// * `refuse_queue=CODE`: making a queue to a device of D3D12 fails with this result.
/// * `d3d12_refuse_WHAT=CODE`: what makes it fails with this result: `device`, `heap`, `placed`, `committed`, `handle`, `fence`, `event`.
/// * `d3d12_deaf_at=N`: no fence reaches the value N, or a larger one.
/// * `d3d12_remove=1`: the device was removed.
/// * `dxgi_hidden=BITS`: adapters that are not there.
/// * `spoil=1`: a request that fails has written to its memory.
///
/// Those whose names begin with `d3d12` and `dxgi` are set in the library that plays these.
///
/// The variable `FAKE_DSTORAGE` has them for a process, with commas between.
static STATE: LazyLock<(Mutex<State>, Condvar)> = LazyLock::new(|| {
    let mut state = State::default();
    for setting in env::var("FAKE_DSTORAGE").unwrap_or_default().split(',').filter(|text| !text.is_empty()) {
        state.set(setting);
    }
    (Mutex::new(state), Condvar::new())
});

#[derive(Default)]
pub(crate) struct State {
    settings: HashMap<String, u64>,
    counts: HashMap<String, u64>,
}

impl State {
    pub(crate) fn get(&self, name: &str) -> u64 {
        self.settings.get(name).copied().unwrap_or(0)
    }

    pub(crate) fn count(&mut self, name: &str) -> u64 {
        let count = self.counts.entry(name.to_owned()).or_default();
        *count += 1;
        *count
    }

    pub(crate) fn discount(&mut self, name: &str) {
        *self.counts.entry(name.to_owned()).or_default() -= 1;
    }

    pub(crate) fn counted(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or(0)
    }

    fn set(&mut self, setting: &str) -> bool {
        let Some((name, value)) = setting.split_once('=') else { return false };
        let value = match value.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => value.parse(),
        };
        let Ok(value) = value else { return false };
        self.settings.insert(name.to_owned(), value);
        true
    }
}

pub(crate) fn state() -> MutexGuard<'static, State> {
    STATE.0.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until settings change.
pub(crate) fn wait(state: MutexGuard<'static, State>) -> MutexGuard<'static, State> {
    STATE.1.wait(state).unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn wake() {
    STATE.1.notify_all();
}

/// Notes what the real library ends the process for.
pub(crate) fn violation() {
    state().count("violations");
}

/// Sets `name=value`. 0: it was understood.
///
/// # Safety
/// `setting` ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_dstorage_set(setting: *const c_char) -> c_int {
    // SAFETY: by the contract of this function.
    let setting = unsafe { CStr::from_ptr(setting) }.to_string_lossy();
    let is_set = state().set(&setting);
    wake();
    if is_set { 0 } else { 1 }
}

/// Takes all settings back, and counts requests from 1 again.
#[unsafe(no_mangle)]
pub extern "C" fn fake_dstorage_reset() {
    let mut state = state();
    state.settings.clear();
    let stays = ["pending", "queues", "files", "statuses", "devices", "heaps", "resources", "fences"];
    state.counts.retain(|name, _| stays.contains(&name.as_str()));
    drop(state);
    wake();
}

/// How many there were of what the name says: `enqueued`, `requests` (that were begun), `submits`, `violations`, `configurations`,
/// `blocked` (entries that found their queue full, for which the real one has the caller wait); or are now: `pending` (submitted
/// requests that have not ended), `queues`, `files`, `statuses`; of D3D12 `devices`, `heaps`, `resources`, `fences`, and `kept_resident`.
///
/// # Safety
/// `name` ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_dstorage_count(name: *const c_char) -> u64 {
    // SAFETY: by the contract of this function.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    state().counted(&name)
}
