//! The lock around the scheduler's state, and the work that is done without it: dropping operations, reporting ends.
#![forbid(unsafe_code)]

use super::{
    admission::Limits,
    customer::{Customer, Reason},
    flight::Flight,
    operation::{Cancelled, Charge, GroupId, QueueId, Submission, Whose},
    queues::{Chosen, Freed, Position, QueueOptions, QueueSet},
    state::{Ended, Figures, Parked, Removed, State, Wakes},
    sync::{Condvar, Mutex, MutexGuard},
};
use crate::parallel;
use std::{
    mem,
    panic::{self, AssertUnwindSafe},
    process,
    sync::{Arc, PoisonError},
    task::Waker,
    time::{Duration, Instant},
};

/// Pause before an operation that was put back is offered again while none is in flight.
const PUT_BACK_PAUSE: Duration = Duration::from_millis(1);

/// The same while some are in flight. The first of these that ends is the end of the pause.
const LONG_PUT_BACK_PAUSE: Duration = Duration::from_millis(100);

/// Decides which operation is next, for all threads that serve its queues.
pub struct Scheduler<C: Customer> {
    customer: C,
    state: Mutex<State<C>>,
    /// Wakes the thread that watches deadlines and events.
    watched: Condvar,
    process: u32,
}

/// A submission that was refused.
pub struct Refused<C: Customer> {
    /// Why it was refused.
    pub reason: Reason,
    /// The submission.
    pub submission: Submission<C>,
}

/// Groups that are accepted under one lock. Threads are woken for these before the next ones are accepted.
const GROUPS_AT_ONCE: usize = 64;

/// The group of a submission, or why that was refused.
pub type Submitted<C> = Result<GroupId, Box<Refused<C>>>;

/// A group that was accepted, its end if it has none to wait for, and the threads that it needs.
type Accepted<C> = (GroupId, Option<Ended<C>>, Wakes);

/// What a thread does when no operation may begin.
pub(super) enum Wait {
    /// It returns.
    Not,
    /// It waits in its lane, where the waker wakes it.
    InLane(Waker),
    /// It waits until one may begin, or until none will come any more.
    UntilOver,
}

impl<C: Customer> Scheduler<C> {
    /// Makes a scheduler with these queues, at most 8.
    pub fn new(customer: C, limits: Limits, queues: &[QueueOptions]) -> Arc<Self> {
        Self::waking(customer, limits, queues, parallel::cores().saturating_sub(1))
    }

    /// The same, of which a submission wakes `most_wakes` threads at most.
    pub(super) fn waking(
        customer: C,
        limits: Limits,
        queues: &[QueueOptions],
        most_wakes: usize,
    ) -> Arc<Self> {
        let state = Mutex::new(State::new(limits, queues, most_wakes));
        Arc::new(Self { customer, state, watched: Condvar::new(), process: process::id() })
    }

    /// Returns the customer.
    pub fn customer(&self) -> &C {
        &self.customer
    }

    /// Accepts a group. [`Customer::ended`] reports its end, whatever happens; at once if it has no operations.
    ///
    /// # Errors
    /// [`Reason::Full`]; [`Reason::Forked`]; the reason of [`Scheduler::close`]. [`Reason::Unserved`] if there is no such
    /// queue, no thread [watches](Scheduler::watch) events, or the scheduler was [sealed](Scheduler::seal).
    pub fn submit(&self, submission: Submission<C>) -> Submitted<C> {
        if self.is_foreign() {
            return Err(Box::new(Refused { reason: Reason::Forked, submission }));
        }
        let (id, ended, _) = self.change(|state| {
            let accepted = self.accept(state, submission);
            if let Ok((_, _, wakes)) = &accepted {
                state.wake_for(*wakes);
            }
            accepted
        })?;
        self.tell(ended);
        Ok(id)
    }

    /// Accepts groups as [`submit`](Scheduler::submit) does, one after the other, and wakes threads for 64 of them at once.
    /// Each has an answer of its own.
    pub fn submit_all(&self, submissions: Vec<Submission<C>>) -> Vec<Submitted<C>> {
        if self.is_foreign() {
            let refuse = |submission| Err(Box::new(Refused { reason: Reason::Forked, submission }));
            return submissions.into_iter().map(refuse).collect();
        }
        let mut answers = Vec::with_capacity(submissions.len());
        let mut submissions = submissions.into_iter().peekable();
        while submissions.peek().is_some() {
            let mut all_ended = Vec::new();
            self.change(|state| {
                let mut all_wakes = Wakes::default();
                let accept = |submission| -> Submitted<C> {
                    let (id, ended, wakes) = self.accept(state, submission)?;
                    all_ended.extend(ended);
                    all_wakes = all_wakes.and(wakes);
                    Ok(id)
                };
                answers.extend(submissions.by_ref().take(GROUPS_AT_ONCE).map(accept));
                state.wake_for(all_wakes);
            });
            all_ended.into_iter().for_each(|ended| self.tell(Some(ended)));
        }
        answers
    }

    /// Accepts a group unless it is refused. Returns its end too, if it has no operations.
    fn accept(
        &self,
        state: &mut State<C>,
        submission: Submission<C>,
    ) -> Result<Accepted<C>, Box<Refused<C>>> {
        if let Some(reason) = state.refusal(&submission) {
            return Err(Box::new(Refused { reason, submission }));
        }
        if submission.deadline.is_some() || submission.event.is_some() {
            self.watched.notify_all();
        }
        let is_empty = submission.operations.is_empty();
        let (id, wakes) = state.accept(submission);
        let ended = if is_empty { state.settle(id, 0) } else { None };
        Ok((id, ended, wakes))
    }

    /// Refuses further groups. Threads end once nothing can come to their queues any more.
    pub fn seal(&self) {
        self.with_state(State::seal);
    }

    /// Raises the gate of a group to `end`, if it is a [`Gate::Below`](super::Gate::Below).
    pub fn admit(&self, group: GroupId, end: u64) {
        self.with_state(|state| state.admit(group, end));
    }

    /// Makes groups demand, because a caller waits for them.
    pub fn promote(&self, whose: Whose) {
        self.with_state(|state| state.promote(whose));
    }

    /// Removes operations that have not begun: their groups fail. Those that have begun end as they may, and a group of
    /// which all have begun may end well.
    pub fn cancel(&self, whose: Whose) -> Cancelled {
        let all = self.with_state(|state| {
            let groups = state.select(whose).into_iter();
            groups.map(|id| state.cancel(id, Reason::Cancelled)).collect::<Vec<_>>()
        });
        let mut sum = Cancelled::default();
        for (removed, count) in all.into_iter().flatten() {
            sum.not_begun += count.not_begun;
            sum.in_flight += count.in_flight;
            self.dismiss(removed);
        }
        sum
    }

    /// Ends a group with an error, if it has none yet. Operations that have begun end as they may.
    pub fn fail(&self, group: GroupId, error: C::Error) {
        let removed = self.with_state(|state| state.fail(group, error));
        removed.into_iter().for_each(|removed| self.dismiss(removed));
    }

    /// Moves the operations of `from`, and those that will come to it, to `to`. Returns `true` for the first call only.
    pub fn redirect(&self, from: QueueId, to: QueueId) -> bool {
        self.with_state(|state| state.redirect(from, to)).unwrap_or(false)
    }

    /// Refuses further groups and removes all operations that have not begun. Threads end once their lanes are empty, or
    /// bring nothing back any more. The first reason stands.
    pub fn close(&self, reason: Reason) {
        let removed = self.with_state(|state| {
            let reason = state.close(reason);
            let groups = state.all().into_iter();
            groups.map(|id| state.cancel(id, reason.clone()).0).collect::<Vec<_>>()
        });
        removed.into_iter().flatten().for_each(|removed| self.dismiss(removed));
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.with_state(|state| state.closed.is_some()).unwrap_or(true)
    }

    /// Whether demand is in flight, or was a moment ago: then other operations had better be short.
    pub fn has_demand(&self) -> bool {
        self.with_state(|state| state.queues.room().has_demand()).unwrap_or_default()
    }

    /// Returns how many operations wait in queues. None in a child of `fork`.
    pub fn waiting(&self, queues: &[QueueId]) -> usize {
        self.with_state(|state| state.queues.waiting_in(QueueSet::of(queues))).unwrap_or(0)
    }

    /// Returns how much the scheduler has to do and has done. Zeros in a child of `fork`.
    pub fn figures(&self) -> Figures {
        self.with_state(|state| state.figures()).unwrap_or_default()
    }

    /// Fails groups whose deadlines have passed at `now`, and lets groups begin whose events are reached. Returns whether
    /// there were any.
    pub fn look(&self, now: Instant) -> bool {
        let found = self.with_state(|state| (state.expired(now), state.events()));
        let (expired, events) = found.unwrap_or_default();
        let mut is_news = !expired.is_empty();
        self.expire(expired);
        for event in events {
            // Without the lock: drivers take their time. The clone keeps the event.
            let answer = panic::catch_unwind(AssertUnwindSafe(|| self.customer.is_reached(&event)));
            let error = match answer {
                Ok(Ok(false)) => continue,
                Ok(Ok(true)) => None,
                Ok(Err(error)) => Some(error),
                Err(_) => Some(Reason::Abandoned.into()),
            };
            is_news = true;
            let removed = self.change(|state| match error {
                None => {
                    state.reached(&event);
                    None
                }
                // The other failures follow: each group has its error.
                Some(error) => state.awaiting(&event).map(|group| state.fail(group, error)),
            });
            removed.into_iter().for_each(|removed| self.dismiss(removed));
        }
        is_news
    }

    /// Watches deadlines and events until the scheduler is closed, or sealed and without groups: the work of one thread.
    /// Groups with events are refused before.
    pub fn watch(&self) {
        const SHORT_PAUSE: Duration = Duration::from_micros(100);
        const LONG_PAUSE: Duration = Duration::from_millis(1);
        let mut pause = SHORT_PAUSE;
        while !self.is_foreign() {
            let is_news = self.look(Instant::now());
            let state = self.lock();
            if state.has_ended() {
                return;
            }
            if is_news {
                pause = SHORT_PAUSE;
                continue;
            }
            let deadline = state.next_deadline().map(|end| end.saturating_duration_since(Instant::now()));
            let asks = state.has_events().then_some(pause);
            let Some(timeout) = deadline.into_iter().chain(asks).min() else {
                drop(self.watched.wait(state).unwrap_or_else(PoisonError::into_inner));
                continue;
            };
            let waited = self.watched.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner);
            // A new event may be reached sooner.
            pause = if waited.1.timed_out() { LONG_PAUSE.min(pause * 2) } else { SHORT_PAUSE };
        }
    }

    /// Accepts groups with events from now on, as a thread is about to [watch](Scheduler::watch).
    pub fn expect_watcher(&self) {
        self.with_state(|state| state.is_watched = true);
    }

    pub(super) fn enlist(&self, serves: QueueSet) -> usize {
        self.change(|state| state.enlist(serves))
    }

    pub(super) fn discharge(&self, worker: usize) {
        self.change(|state| state.discharge(worker));
    }

    /// Notes that a thread has returned from its lane.
    pub(super) fn leave(&self, worker: usize) {
        self.change(|state| state.leave(worker));
    }

    /// Returns the next operation for a thread.
    pub(super) fn next(self: &Arc<Self>, worker: usize, serves: QueueSet, wait: &Wait) -> Option<Flight<C>> {
        let mut state = self.lock();
        loop {
            if state.closed.is_some() {
                return None;
            }
            if state.next_deadline().is_some() {
                let expired = state.expired(Instant::now());
                if !expired.is_empty() {
                    drop(state);
                    self.expire(expired);
                    state = self.lock();
                    continue;
                }
            }
            let ends = state.ends;
            let is_held_up = state.worker(worker).is_some_and(|worker_state| worker_state.is_held_up(ends));
            let chosen = if is_held_up { Chosen::Nothing } else { state.begin(serves) };
            match chosen {
                Chosen::Begun(position, content) => {
                    if let Some(worker_state) = state.worker(worker) {
                        worker_state.began_at = ends;
                    }
                    self.unlock(state);
                    return Some(Flight::begun(self.clone(), position, content));
                }
                Chosen::Impossible(group) => {
                    let removed = state.fail(group, Reason::NoMemory.into());
                    self.unlock(state);
                    self.dismiss(removed);
                    state = self.lock();
                    continue;
                }
                Chosen::Nothing => {}
            }
            match wait {
                Wait::Not => return None,
                Wait::InLane(waker) => {
                    state.park(worker, Parked::InLane(waker.clone()));
                    return None;
                }
                Wait::UntilOver if state.is_over(serves) => return None,
                Wait::UntilOver => state = self.sleep(state, worker, is_held_up),
            }
        }
    }

    /// Waits until the thread is woken.
    fn sleep<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<C>>,
        worker: usize,
        is_held_up: bool,
    ) -> MutexGuard<'a, State<C>> {
        let Some(condvar) = state.worker(worker).map(|worker_state| worker_state.condvar.clone()) else {
            return state;
        };
        state.park(worker, Parked::Idle(condvar.clone()));
        while state.is_parked(worker) {
            if is_held_up {
                let is_idle = state.queues.room().operations() == 0;
                let pause = if is_idle { PUT_BACK_PAUSE } else { LONG_PUT_BACK_PAUSE };
                let waited = condvar.wait_timeout(state, pause);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
                state.leave(worker);
                if let Some(worker_state) = state.worker(worker) {
                    worker_state.held_up_at = None;
                }
            } else {
                state = condvar.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        state
    }

    /// Returns an operation that has begun to its place in its queue.
    pub(super) fn put_back(&self, worker: usize, flight: Flight<C>) {
        let queue = flight.ticket().queue();
        let charge = flight.ticket().charge();
        self.wait_again(flight, queue, charge, Some(worker));
    }

    /// Moves an operation that has begun to another queue.
    pub(super) fn hand_over(&self, flight: Flight<C>, to: QueueId, charge: Charge) {
        self.wait_again(flight, to, charge, None);
    }

    fn wait_again(&self, flight: Flight<C>, to: QueueId, charge: Charge, held_up: Option<usize>) {
        if self.is_foreign() {
            return;
        }
        let (content, ticket) = flight.into_parts();
        let position = ticket.defuse();
        let refused = self.change(|state| {
            state.free(&position, Freed::Waits);
            match held_up.and_then(|worker| state.worker(worker)) {
                Some(worker_state) => worker_state.hold_up(),
                // What it held is free, which others may lack.
                None => state.ends += 1,
            }
            state.wait_again(&position, to, charge, content).err()
        });
        if let Some((content, reason)) = refused {
            self.contain(|| drop(content));
            self.finish(&position, Err(reason.into()), |_| {});
        }
    }

    /// Ends an operation that has begun.
    pub(super) fn end(&self, position: &Position, result: Result<(), C::Error>, is_lost: bool) {
        if !self.is_foreign() {
            let freed = if is_lost { Freed::Lost } else { Freed::Ended };
            self.finish(position, result, |state| state.free(position, freed));
        }
    }

    /// Slots that were lost can be used again.
    pub(super) fn regain(&self, queue: QueueId, slots: u32) {
        if !self.is_foreign() {
            self.change(|state| state.regain(queue, slots));
        }
    }

    fn finish(&self, position: &Position, result: Result<(), C::Error>, free: impl FnOnce(&mut State<C>)) {
        let (removed, ended) = self.change(|state| {
            free(state);
            let removed = result.err().map(|error| state.fail(position.group, error));
            state.forget(position);
            (removed, state.settle(position.group, 1))
        });
        self.tell(ended);
        removed.into_iter().for_each(|removed| self.dismiss(removed));
    }

    fn expire(&self, expired: Vec<GroupId>) {
        for id in expired {
            let (removed, _) = self.change(|state| state.cancel(id, Reason::TimedOut));
            self.dismiss(removed);
        }
    }

    /// Drops operations that have not begun, and then counts them as ended.
    fn dismiss(&self, removed: Removed<C::Operation>) {
        let Removed { group, contents } = removed;
        let count = contents.len();
        if count > 0 {
            self.contain(|| drop(contents));
            self.tell(self.change(|state| state.settle(group, count)));
        }
    }

    fn tell(&self, ended: Option<Ended<C>>) {
        if let Some(Ended { data, result }) = ended {
            self.contain(|| self.customer.ended(data, result));
        }
    }

    /// Runs a customer's code. The panic hook reports a panic; the thread goes on.
    fn contain(&self, work: impl FnOnce()) {
        let _ = panic::catch_unwind(AssertUnwindSafe(work));
    }

    /// Returns whether this process is a child of `fork`: a thread of the parent may hold the lock.
    pub(super) fn is_foreign(&self) -> bool {
        self.process != process::id()
    }

    /// Does what [`change`](Self::change) does; nothing in a child of `fork`.
    fn with_state<T>(&self, work: impl FnOnce(&mut State<C>) -> T) -> Option<T> {
        (!self.is_foreign()).then(|| self.change(work))
    }

    /// Runs `work` with the lock, then wakes the threads that it gave something to do.
    fn change<T>(&self, work: impl FnOnce(&mut State<C>) -> T) -> T {
        let mut state = self.lock();
        let answer = work(&mut state);
        self.unlock(state);
        answer
    }

    /// Unlocks, then wakes threads: the lock is the first thing that they need.
    fn unlock(&self, mut state: MutexGuard<'_, State<C>>) {
        let (woken, is_over) = (mem::take(&mut state.woken), state.has_ended());
        drop(state);
        woken.into_iter().for_each(Parked::wake);
        if is_over {
            self.watched.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<C>> {
        // Kept consistent by every statement, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C: Customer> std::fmt::Debug for Scheduler<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scheduler").field("figures", &self.figures()).finish_non_exhaustive()
    }
}

impl<C: Customer> std::fmt::Debug for Refused<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Refused").field("reason", &self.reason).finish_non_exhaustive()
    }
}
