//! Ends work early: one token, from the call that a user makes down to the read that waits for a server.
#![forbid(unsafe_code)]

use std::{
    collections::BTreeMap,
    fmt, process,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

/// Ends work early. Clones are one token.
///
/// A wait for a server ends soon after its token is cancelled. A read in the kernel is not interrupted.
#[derive(Clone, Default)]
pub struct Cancel(Arc<Inner>);

struct Inner {
    is_cancelled: AtomicBool,
    wakers: Mutex<Wakers>,
    /// The registration that cancels the token with its parent.
    parent: OnceLock<Registration>,
    process: u32,
}

/// A function that is called once the token is cancelled.
type Wake = Box<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct Wakers {
    next: u64,
    wakers: BTreeMap<u64, Wake>,
}

/// A call that is made once a token is cancelled. Dropping it takes that back, unless the call is being made.
pub struct Registration {
    of: Weak<Inner>,
    number: u64,
}

impl Cancel {
    /// Cancels the work. What waits for that is woken by this thread, once.
    pub fn cancel(&self) {
        // Before the wakers are taken: one that is added later sees it.
        self.0.is_cancelled.store(true, Ordering::SeqCst);
        let wakers = self.0.lock().map(|mut state| std::mem::take(&mut state.wakers));
        wakers.into_iter().flat_map(BTreeMap::into_values).for_each(|wake| wake());
    }

    /// Returns whether the work is to end.
    pub fn is_cancelled(&self) -> bool {
        self.0.is_cancelled.load(Ordering::SeqCst)
    }

    /// Returns a token that is cancelled with this one, and by itself.
    pub fn child(&self) -> Self {
        let child = Self::default();
        let weak = Arc::downgrade(&child.0);
        let wake = move || weak.upgrade().into_iter().for_each(|inner| Self(inner).cancel());
        child.0.parent.get_or_init(|| self.on_cancel(wake));
        child
    }

    /// Returns the flag that is set once the work is to end.
    pub fn flag(&self) -> &AtomicBool {
        &self.0.is_cancelled
    }

    /// Calls `wake` once the token is cancelled, by the thread that cancels it: at once if it is.
    pub fn on_cancel(&self, wake: impl Fn() + Send + Sync + 'static) -> Registration {
        let mut number = None;
        if let Some(mut state) = self.0.lock() {
            state.next += 1;
            let next = state.next;
            number = Some(next);
            state.wakers.insert(next, Box::new(wake));
        }
        let registration = Registration { of: Arc::downgrade(&self.0), number: number.unwrap_or_default() };
        if self.is_cancelled() {
            // One of the two threads takes it.
            registration.take().into_iter().for_each(|wake| wake());
        }
        registration
    }
}

impl Inner {
    /// `None` in a child of `fork` if a thread of its parent had the lock.
    fn lock(&self) -> Option<MutexGuard<'_, Wakers>> {
        if self.process == process::id() {
            return Some(self.wakers.lock().unwrap_or_else(PoisonError::into_inner));
        }
        self.wakers.try_lock().ok()
    }
}

impl Default for Inner {
    fn default() -> Self {
        let (is_cancelled, wakers, parent) = (AtomicBool::new(false), Mutex::default(), OnceLock::new());
        Self { is_cancelled, wakers, parent, process: process::id() }
    }
}

impl Registration {
    fn take(&self) -> Option<Wake> {
        let of = self.of.upgrade()?;
        let mut state = of.lock()?;
        state.wakers.remove(&self.number)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Dropped without the lock: dropping it may drop other registrations.
        drop(self.take());
    }
}

/// Options are equal that do the same, whatever ends that.
impl PartialEq for Cancel {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Cancel {}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cancel").field(&self.is_cancelled()).finish()
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::atomic::AtomicUsize, thread};

    #[test]
    fn children_end_with_their_parent_and_by_themselves() {
        let parent = Cancel::default();
        let (first, second) = (parent.child(), parent.child());
        let grandchild = first.child();
        first.cancel();
        let are_cancelled = |tokens: [&Cancel; 4]| tokens.map(Cancel::is_cancelled);
        assert_eq!(are_cancelled([&parent, &first, &second, &grandchild]), [false, true, false, true]);
        parent.cancel();
        assert!(second.is_cancelled() && second.clone().is_cancelled());
        assert!(parent.child().is_cancelled(), "also one that is made later");
    }

    #[test]
    fn a_waker_is_called_once_unless_it_was_taken_back() {
        let (token, calls) = (Cancel::default(), Arc::new(AtomicUsize::new(0)));
        let count = || {
            let calls = calls.clone();
            move || _ = calls.fetch_add(1, Ordering::SeqCst)
        };
        drop(token.on_cancel(count()));
        let _kept = token.on_cancel(count());
        token.cancel();
        token.cancel();
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        let _late = token.on_cancel(count());
        assert_eq!(calls.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_waker_that_is_added_meanwhile_is_called_once() {
        for _ in 0..1000 {
            let (token, calls) = (Cancel::default(), Arc::new(AtomicUsize::new(0)));
            let counted = calls.clone();
            let registered = thread::scope(|scope| {
                scope.spawn(|| token.cancel());
                token.on_cancel(move || _ = counted.fetch_add(1, Ordering::SeqCst))
            });
            assert_eq!(calls.load(Ordering::SeqCst), 1);
            drop(registered);
        }
    }

    #[test]
    fn tokens_and_wakers_that_are_dropped_leave_nothing() {
        let (token, held) = (Cancel::default(), Arc::new(()));
        for _ in 0..10 {
            let (child, held) = (token.child(), held.clone());
            let _registered = child.on_cancel(move || drop(held.clone()));
        }
        assert_eq!((Arc::strong_count(&held), token.0.lock().unwrap().wakers.len()), (1, 0));
    }
}
