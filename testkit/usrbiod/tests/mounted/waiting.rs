//! Waits that setting the clock does not disturb.
#![cfg(target_env = "gnu")]

use crate::fixture::PATIENCE;
use hoistway_usrbio::parts::wait;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::{
    mem::MaybeUninit,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// From now on this thread is told that time is over whenever it waits by the clock that can be set.
fn without_the_clock_of_the_day() {
    const WAIT_BY_REALTIME: u64 = (libc::FUTEX_WAIT_BITSET | libc::FUTEX_CLOCK_REALTIME) as u64;
    let operation = SeccompCmpOp::MaskedEq(!(libc::FUTEX_PRIVATE_FLAG as u64));
    let waits = SeccompCondition::new(1, SeccompCmpArgLen::Dword, operation, WAIT_BY_REALTIME).unwrap();
    let filter = SeccompFilter::new(
        [(libc::SYS_futex, vec![SeccompRule::new(vec![waits]).unwrap()])].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::ETIMEDOUT as u32),
        std::env::consts::ARCH.try_into().unwrap(),
    );
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
}

#[test]
fn setting_the_clock_of_the_day_does_not_end_a_wait() {
    let limit = Duration::from_millis(300);
    let wait_by = |wait: unsafe fn(*mut libc::sem_t, Duration)| {
        let waited = thread::spawn(move || {
            without_the_clock_of_the_day();
            let mut semaphore = MaybeUninit::<libc::sem_t>::uninit();
            // SAFETY: the semaphore is this thread's, and made before it is waited for.
            unsafe {
                assert_eq!(libc::sem_init(semaphore.as_mut_ptr(), 1, 0), 0);
                let start = Instant::now();
                wait(semaphore.as_mut_ptr(), limit);
                start.elapsed()
            }
        });
        waited.join().unwrap()
    };
    assert!(wait_by(wait) >= limit);
    // Where the filter does nothing, this test proves nothing.
    assert!(wait_by(by_the_clock_of_the_day) < PATIENCE);
}

unsafe fn by_the_clock_of_the_day(semaphore: *mut libc::sem_t, _limit: Duration) {
    let until = SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + 2 * PATIENCE;
    let until = libc::timespec { tv_sec: until.as_secs().cast_signed(), tv_nsec: 0 };
    // SAFETY: the caller's promise.
    unsafe { libc::sem_timedwait(semaphore, &raw const until) };
}
