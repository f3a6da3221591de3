//! What is kept for devices between uses, and given back when nothing has used it for some time: by one thread of the process, while
//! anything is kept.
#![forbid(unsafe_code)]

use crate::aside;
use std::{
    process,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long something is kept that nothing uses.
const IDLE_TIME: Duration = Duration::from_secs(5);

/// Gives back, on threads of its own, what is to be given back if nothing has used it since an instant, as the argument says. Returns
/// since when the rest is not used, at the earliest.
type GiveBack = fn(&dyn Fn(Instant) -> bool) -> Option<Instant>;

struct Idle {
    keepers: Vec<GiveBack>,
    has_thread: bool,
    /// How often something was kept or given back, and how often that was when the thread last began to look.
    changes: u64,
    seen: u64,
}

static IDLE: Mutex<Idle> = Mutex::new(Idle { keepers: Vec::new(), has_thread: false, changes: 0, seen: 0 });
static CHANGED: Condvar = Condvar::new();
/// The process that the thread is in. A child of `fork` has none, and the lock may be held in its copy for ever.
static PROCESS: AtomicU32 = AtomicU32::new(0);

fn idle() -> MutexGuard<'static, Idle> {
    IDLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has `give_back` called from time to time while something is kept. It must wait for nothing.
pub fn on_idle(give_back: GiveBack) {
    if !claims_foreign() {
        idle().keepers.push(give_back);
    }
}

/// Has what was just kept be given back when nothing has used it for five seconds. Returns `false` if no thread can be started for
/// that: then it must not be kept. The caller holds no lock that its keeper takes.
#[must_use]
pub fn keep_while_used() -> bool {
    if claims_foreign() {
        return false;
    }
    let mut idle = idle();
    idle.changes += 1;
    if !idle.has_thread {
        idle.has_thread = thread::Builder::new().name("hoistway-idle".into()).spawn(serve).is_ok();
    }
    idle.has_thread
}

/// Has the thread look at what is left, after something was given back by another. When this returns, the thread has ended if nothing
/// is kept any more, or a driver has held it up for ten seconds. The caller holds no lock that a keeper takes.
pub fn look_again() {
    look_again_until(aside::deadline());
}

/// As [`look_again`], with a deadline of the caller's.
pub(crate) fn look_again_until(deadline: Instant) {
    // Does not make the thread this process's: children of one that has kept nothing keep things of their own.
    if PROCESS.load(Ordering::Acquire) != process::id() {
        return;
    }
    let mut idle = idle();
    idle.changes += 1;
    let wanted = idle.changes;
    CHANGED.notify_all();
    let is_behind = |idle: &mut Idle| idle.has_thread && idle.seen < wanted;
    let left = deadline.saturating_duration_since(Instant::now());
    drop(CHANGED.wait_timeout_while(idle, left, is_behind).unwrap_or_else(PoisonError::into_inner));
}

/// Whether the thread is another process's. If it is none's, it is this one's from now on.
fn claims_foreign() -> bool {
    let own = process::id();
    PROCESS.compare_exchange(0, own, Ordering::AcqRel, Ordering::Acquire).is_err_and(|other| other != own)
}

/// A thread that ends by a panic of a keeper. The next that keeps something starts another.
struct Thread;

impl Drop for Thread {
    fn drop(&mut self) {
        if thread::panicking() {
            idle().has_thread = false;
            CHANGED.notify_all();
        }
    }
}

fn serve() {
    let _thread = Thread;
    let mut idle = idle();
    loop {
        let (keepers, changes) = (idle.keepers.clone(), idle.changes);
        drop(idle);
        let now = Instant::now();
        let is_old = |since: Instant| now.saturating_duration_since(since) >= IDLE_TIME;
        let oldest = keepers.into_iter().filter_map(|give_back| give_back(&is_old)).min();
        idle = self::idle();
        idle.has_thread = oldest.is_some() || idle.changes != changes;
        idle.seen = changes;
        CHANGED.notify_all();
        match oldest {
            _ if !idle.has_thread => return,
            Some(since) if idle.changes == changes => {
                let left = (since + IDLE_TIME).saturating_duration_since(now);
                let is_same = |idle: &mut Idle| idle.changes == changes;
                let waited = CHANGED.wait_timeout_while(idle, left, is_same);
                idle = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
#[allow(clippy::panic, clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize};

    #[test]
    fn a_keeper_that_panics_leaves_the_others_to_the_next_thread() {
        static PANICS: AtomicBool = AtomicBool::new(false);
        static LOOKS: AtomicUsize = AtomicUsize::new(0);
        on_idle(|_| {
            LOOKS.fetch_add(1, Ordering::Relaxed);
            assert!(!PANICS.swap(false, Ordering::Relaxed), "as the test wants it");
            None
        });
        PANICS.store(true, Ordering::Relaxed);
        assert!(keep_while_used());
        look_again();
        let looks = LOOKS.load(Ordering::Relaxed);
        assert!(!PANICS.load(Ordering::Relaxed) && looks > 0);
        assert!(keep_while_used());
        look_again();
        assert!(LOOKS.load(Ordering::Relaxed) > looks, "no thread looks any more");
    }

    #[test]
    fn a_keeper_that_hangs_is_not_waited_for_beyond_the_deadline() {
        static GATE: Mutex<()> = Mutex::new(());
        on_idle(|_| {
            drop(GATE.lock().unwrap());
            None
        });
        let gate = GATE.lock().unwrap();
        assert!(keep_while_used());
        look_again_until(Instant::now() + Duration::from_millis(1));
        drop(gate);
        look_again();
    }
}
