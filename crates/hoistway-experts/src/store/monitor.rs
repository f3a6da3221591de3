//! The store's lock, and how threads wait: carries out what the ledger says, and tells it which reads have ended.
//!
//! Reads end on threads of the reader. These never take the store's lock, so that a caller may cancel and wait for reads while it
//! has that. Whichever caller looks next settles what has ended. Where more may have to be read then, a thread that prepares units
//! looks at once, as each does that has prepared one. Reads are submitted without the store's lock, since that may call the driver
//! of a device and wait for it, and by the caller alone that starts them: a driver that does not answer keeps no other waiting.
#![forbid(unsafe_code)]

use super::{
    ledger::{Command, Ended, Ledger, RequestId, Status},
    sync::{Condvar, Mutex, MutexGuard},
};
use std::{
    collections::{HashMap, VecDeque},
    ops::Deref,
    sync::{Arc, PoisonError, Weak},
    time::Instant,
};

/// The interface that reads units, and gives them memory.
pub(super) trait Io: Send + Sync + 'static {
    /// Why a read failed.
    type Failure: Clone + Send;
    /// Reads of one unit. Dropping it waits for what is under way.
    type Load: Send;
    /// The memory of one unit.
    type Room: Clone + Send;

    /// Takes room for a unit. Gives back memory that no unit has first, if more than `keep_bytes` were held otherwise. `None` if
    /// the unit has to be prepared first.
    fn reserve(&self, unit: usize, keep_bytes: u64) -> Result<Option<Self::Room>, Self::Failure>;

    /// Begins to prepare a unit on another thread, which calls `then` once that is done.
    fn prepare(
        &self,
        unit: usize,
        is_demand: bool,
        then: impl FnOnce() + Send + 'static,
    ) -> Result<(), Self::Failure>;

    /// What calls its argument on a thread that prepares units, and is none of the reader's.
    fn elsewhere(&self) -> Elsewhere;

    /// Waits for threads that prepare units. Nothing is prepared any more.
    fn end_preparing(&self);

    /// A request waits for a unit that is being prepared.
    fn hasten(&self, _unit: usize) {}

    /// Starts to read a unit into its room. Called without the store's lock. `notice` is told once, when all of its reads have
    /// ended; it may be told at once.
    fn start(
        &self,
        unit: usize,
        room: &Self::Room,
        is_demand: bool,
        begin_by: Option<Instant>,
        notice: Notice,
    ) -> Result<Self::Load, Self::Failure>;

    /// How reads ended, of which the notice was told.
    fn outcome(&self, load: Self::Load) -> Ended<Self::Failure>;

    /// Ends reads that have not begun.
    fn cancel(&self, load: &Self::Load);

    /// Makes reads demand.
    fn promote(&self, load: &Self::Load);

    /// Takes room back. `false` if it is lost.
    fn release(&self, unit: usize, room: &Self::Room, keep_bytes: u64) -> bool;
}

/// Calls a function on another thread.
pub(super) type Elsewhere = Box<dyn Fn(Box<dyn FnOnce() + Send>) + Send + Sync>;

/// The notice that the reads of a unit have ended, or that it is prepared for them.
pub(super) struct Notice {
    signal: Arc<Signal>,
    unit: usize,
    load: u64,
}

impl Notice {
    pub(super) fn tell(self) {
        if self.note() {
            (self.signal.look_elsewhere)();
        }
    }

    /// Tells that what should bring the unit did not have it: it has to be read.
    pub(super) fn tell_gone(self) {
        self.note();
        (self.signal.look_elsewhere)();
    }

    /// Returns whether some thread has to look now.
    fn note(&self) -> bool {
        let mut state = lock(&self.signal.state);
        state.ended.push((self.unit, self.load));
        state.epoch += 1;
        // One look settles all that has ended by then, and says anew whether ends are awaited.
        let is_awaited = std::mem::take(&mut state.is_awaited);
        drop(state);
        self.signal.changed.notify_all();
        is_awaited
    }
}

/// The signal that threads wait for.
struct Signal {
    state: Mutex<SignalState>,
    changed: Condvar,
    /// Has a thread look that prepares units.
    look_elsewhere: Box<dyn Fn() + Send + Sync>,
}

#[derive(Debug, Default)]
struct SignalState {
    /// Counts changes.
    epoch: u64,
    /// Units whose reads have ended, or that are prepared, and the number of the load.
    ended: Vec<(usize, u64)>,
    /// Whether the next end has a thread look.
    is_awaited: bool,
}

impl Signal {
    fn epoch(&self) -> u64 {
        lock(&self.state).epoch
    }

    fn change(&self) {
        lock(&self.state).epoch += 1;
        self.changed.notify_all();
    }

    /// Takes what has ended, and says whether further ends are awaited.
    fn take_ended(&self, is_awaited: bool) -> Vec<(usize, u64)> {
        let mut state = lock(&self.state);
        state.is_awaited = is_awaited;
        std::mem::take(&mut state.ended)
    }

    /// Waits until something has changed since `epoch`. Returns `false` at the deadline.
    fn wait(&self, epoch: u64, deadline: Option<Instant>) -> bool {
        let mut state = lock(&self.state);
        while state.epoch == epoch {
            state = match deadline {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return false;
                    }
                    self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        true
    }
}

/// A store without its door.
pub(super) struct Monitor<I: Io>(Arc<Core<I>>);

impl<I: Io> Monitor<I> {
    pub(super) fn new(ledger: Ledger<I::Failure>, io: I) -> Self {
        let rooms = std::iter::repeat_with(|| None).take(ledger.unit_count()).collect();
        let (loads, unsubmitted) = (HashMap::new(), Vec::new());
        let state = Mutex::new(StoreState { ledger, loads, rooms, unsubmitted, next_load: 0 });
        Self(Arc::new_cyclic(|own: &Weak<Core<I>>| {
            let (elsewhere, core) = (io.elsewhere(), own.clone());
            let look_elsewhere = move || {
                let core = core.clone();
                elsewhere(Box::new(move || look(&core)));
            };
            let (look_elsewhere, own) = (Box::new(look_elsewhere), own.clone());
            let (signal, changed) = (Mutex::default(), Condvar::new());
            Core { state, signal: Arc::new(Signal { state: signal, changed, look_elsewhere }), io, own }
        }))
    }
}

impl<I: Io> Deref for Monitor<I> {
    type Target = Core<I>;

    fn deref(&self) -> &Core<I> {
        &self.0
    }
}

impl<I: Io> Drop for Monitor<I> {
    fn drop(&mut self) {
        // They may have the core, and would wait for themselves if they dropped it.
        self.0.io.end_preparing();
    }
}

/// What threads that prepare units share with callers.
pub(super) struct Core<I: Io> {
    // Before what reads: loads wait for their reads as they are dropped.
    state: Mutex<StoreState<I>>,
    signal: Arc<Signal>,
    io: I,
    own: Weak<Self>,
}

/// A request, and the rooms of its units if all of them are resident.
pub(super) type Requested<R> = (RequestId, Option<Vec<R>>);

/// The state that the store's lock guards.
pub(super) struct StoreState<I: Io> {
    pub(super) ledger: Ledger<I::Failure>,
    loads: HashMap<usize, (u64, Loading<I::Load>)>,
    /// By unit.
    rooms: Vec<Option<I::Room>>,
    /// Units whose reads the thread that has the lock submits once it has given that up.
    unsubmitted: Vec<usize>,
    next_load: u64,
}

impl<I: Io> StoreState<I> {
    fn room(&self, unit: usize) -> Option<&I::Room> {
        self.rooms.get(unit)?.as_ref()
    }

    /// The rooms of units. `None` if one has none.
    fn rooms_of(&self, units: &[usize]) -> Option<Vec<I::Room>> {
        units.iter().map(|unit| self.room(*unit).cloned()).collect()
    }
}

/// The progress of a unit's load.
enum Loading<L> {
    /// The unit is prepared for its reads.
    Preparing(Asked),
    /// Its reads are about to be submitted, or a thread submits them.
    Submitting { asked: Asked, has_ended: bool },
    /// It is read.
    Reading(L),
}

/// What is asked of a load whose reads were not submitted.
#[derive(Clone, Copy)]
struct Asked {
    is_demand: bool,
    begin_by: Option<Instant>,
    is_cancelled: bool,
}

/// Why a request is not ready.
#[derive(Clone, Debug)]
pub(super) enum NotReady<F> {
    /// Leases hold the room that it needs.
    NoRoom,
    /// It waits for room, and the policy that makes it has panicked.
    Closed,
    /// This unit is still being read.
    Loading(usize),
    /// A unit could not be read.
    Failed(usize, F),
}

impl<I: Io> Core<I> {
    pub(super) fn io(&self) -> &I {
        &self.io
    }

    /// Changes the ledger, and carries out what it says.
    pub(super) fn change<T>(
        &self,
        change: impl FnOnce(&mut Ledger<I::Failure>, &mut Vec<Command>) -> T,
    ) -> T {
        self.change_and_look(change, |result, _| result)
    }

    /// Requests `units` by a change of the ledger. A request that misses nothing has its rooms by one pass.
    pub(super) fn request<E>(
        &self,
        units: &[usize],
        request: impl FnOnce(&mut Ledger<I::Failure>, &mut Vec<Command>) -> Result<RequestId, E>,
    ) -> Result<Requested<I::Room>, E> {
        self.change_and_look(request, |made, state| {
            let id = made?;
            let is_ready = matches!(state.ledger.status(id), Status::Ready);
            Ok((id, if is_ready { state.rooms_of(units) } else { None }))
        })
    }

    /// Settles what has ended, changes the ledger, carries out what it says, and looks at the outcome.
    fn change_and_look<T, U>(
        &self,
        change: impl FnOnce(&mut Ledger<I::Failure>, &mut Vec<Command>) -> T,
        look: impl FnOnce(T, &mut StoreState<I>) -> U,
    ) -> U {
        let mut state = lock(&self.state);
        self.carry_out(&mut state, Vec::new(), false);
        let mut commands = Vec::new();
        let changed = change(&mut state.ledger, &mut commands);
        self.carry_out(&mut state, commands, false);
        let seen = look(changed, &mut state);
        self.submit(state);
        seen
    }

    /// Gives back the room of all units that no request pins, now and as requests end. Waits for reads of such units that are
    /// under way.
    pub(super) fn drain(&self) {
        self.change(Ledger::drain);
        loop {
            // Before the look: what changes after it ends the wait.
            let epoch = self.signal.epoch();
            if !self.look(|ledger| ledger.is_reading_unpinned()) {
                return;
            }
            self.signal.wait(epoch, None);
        }
    }

    /// Settles what has ended, and looks at the ledger.
    pub(super) fn look<T>(&self, look: impl FnOnce(&mut Ledger<I::Failure>) -> T) -> T {
        self.change_and_look(|_, _| (), |(), state| look(&mut state.ledger))
    }

    /// Waits until all units of a request are resident. Returns the rooms of `units`, which are of the request; `None` if one has
    /// none.
    pub(super) fn wait(
        &self,
        id: RequestId,
        units: &[usize],
        deadline: Option<Instant>,
    ) -> Result<Option<Vec<I::Room>>, NotReady<I::Failure>> {
        self.wait_until(deadline, |state| match state.ledger.status(id) {
            Status::Ready => Ok(state.rooms_of(units)),
            Status::Queued => Err(NotReady::NoRoom),
            Status::Closed => Err(NotReady::Closed),
            Status::Loading(unit) => Err(NotReady::Loading(unit)),
            Status::Failed(unit, failure) => Err(NotReady::Failed(unit, failure)),
        })
    }

    /// Waits until one unit of a request is resident. Returns its room; `None` if it has none.
    pub(super) fn wait_for(
        &self,
        id: RequestId,
        unit: usize,
        deadline: Option<Instant>,
    ) -> Result<Option<I::Room>, NotReady<I::Failure>> {
        self.wait_until(deadline, |state| {
            if state.ledger.is_leased(id, unit) {
                return Ok(state.room(unit).cloned());
            }
            match state.ledger.status(id) {
                Status::Failed(unit, failure) => Err(NotReady::Failed(unit, failure)),
                Status::Queued => Err(NotReady::NoRoom),
                Status::Closed => Err(NotReady::Closed),
                Status::Ready | Status::Loading(_) => Err(NotReady::Loading(unit)),
            }
        })
    }

    fn wait_until<T>(
        &self,
        deadline: Option<Instant>,
        ready: impl Fn(&StoreState<I>) -> Result<T, NotReady<I::Failure>>,
    ) -> Result<T, NotReady<I::Failure>> {
        loop {
            // Before the look: what changes after it ends the wait.
            let epoch = self.signal.epoch();
            match self.change_and_look(|_, _| (), |(), state| ready(state)) {
                Err(NotReady::NoRoom | NotReady::Loading(_)) if self.signal.wait(epoch, deadline) => {}
                answer => return answer,
            }
        }
    }

    /// Carries out commands, and settles loads that have ended, until nothing is left to do.
    fn carry_out(&self, state: &mut StoreState<I>, mut commands: Vec<Command>, mut has_changed: bool) {
        loop {
            let mut failed = Vec::new();
            for command in std::mem::take(&mut commands) {
                has_changed = true;
                if let Err((unit, failure)) = self.execute(state, &command) {
                    failed.push((unit, failure));
                }
            }
            for (unit, failure) in failed {
                state.ledger.ended(unit, Ended::Failed(failure), &mut commands);
            }
            let ended = self.signal.take_ended(state.ledger.awaits_ends());
            if ended.is_empty() && commands.is_empty() {
                break;
            }
            for (unit, number) in ended {
                has_changed = true;
                if state.loads.get(&unit).is_none_or(|(current, _)| *current != number) {
                    continue;
                }
                let ended = match state.loads.remove(&unit) {
                    Some((_, Loading::Reading(load))) => self.io.outcome(load),
                    Some((_, Loading::Submitting { asked, .. })) => {
                        // The thread that submits them settles that.
                        state.loads.insert(unit, (number, Loading::Submitting { asked, has_ended: true }));
                        continue;
                    }
                    Some((_, Loading::Preparing(asked))) => match self.start(state, unit, asked) {
                        Ok(()) => continue,
                        Err(failure) => Ended::Failed(failure),
                    },
                    None => continue,
                };
                state.ledger.ended(unit, ended, &mut commands);
            }
        }
        if state.ledger.take_wake() || has_changed {
            self.signal.change();
        }
    }

    /// Submits the reads of units that this thread has started. Other threads have the lock meanwhile.
    fn submit<'a>(&'a self, mut state: MutexGuard<'a, StoreState<I>>) {
        let mut units = VecDeque::new();
        loop {
            units.extend(state.unsubmitted.drain(..));
            let Some(unit) = units.pop_front() else { return };
            let Some((number, Loading::Submitting { asked, .. })) = state.loads.get(&unit) else { continue };
            let Some(room) = state.room(unit).cloned() else { continue };
            let (load, asked) = (*number, *asked);
            drop(state);
            let notice = Notice { signal: self.signal.clone(), unit, load };
            let started = self.io.start(unit, &room, asked.is_demand, asked.begin_by, notice);
            state = lock(&self.state);
            self.submitted(&mut state, unit, asked, started);
        }
    }

    /// The reads of a unit were submitted as was asked then, or could not be.
    fn submitted(
        &self,
        state: &mut StoreState<I>,
        unit: usize,
        then: Asked,
        started: Result<I::Load, I::Failure>,
    ) {
        let Some((number, Loading::Submitting { asked, has_ended })) = state.loads.remove(&unit) else {
            return;
        };
        let ended = match started {
            Ok(load) if has_ended => self.io.outcome(load),
            Ok(load) => {
                if asked.is_cancelled {
                    self.io.cancel(&load);
                } else if asked.is_demand && !then.is_demand {
                    self.io.promote(&load);
                }
                state.loads.insert(unit, (number, Loading::Reading(load)));
                return;
            }
            Err(failure) => Ended::Failed(failure),
        };
        let mut commands = Vec::new();
        state.ledger.ended(unit, ended, &mut commands);
        self.carry_out(state, commands, true);
    }

    fn execute(&self, state: &mut StoreState<I>, command: &Command) -> Result<(), (usize, I::Failure)> {
        match *command {
            Command::Start { unit, is_demand, begin_by } => {
                let asked = Asked { is_demand, begin_by, is_cancelled: false };
                self.start(state, unit, asked).map_err(|failure| (unit, failure))?;
            }
            Command::Cancel { unit } => self.cancel(state, unit),
            Command::Promote { unit } => match state.loads.get_mut(&unit) {
                Some((_, Loading::Reading(load))) => self.io.promote(load),
                Some((_, Loading::Preparing(asked))) => {
                    asked.is_demand = true;
                    self.io.hasten(unit);
                }
                Some((_, Loading::Submitting { asked, .. })) => asked.is_demand = true,
                None => {}
            },
            Command::Release { unit } => {
                let keep_bytes = state.ledger.keep_bytes();
                if let Some(room) = state.rooms.get_mut(unit).and_then(Option::take)
                    && !self.io.release(unit, &room, keep_bytes)
                {
                    state.ledger.lose(unit);
                }
            }
        }
        Ok(())
    }

    /// Has a unit read, or prepares it first.
    fn start(&self, state: &mut StoreState<I>, unit: usize, asked: Asked) -> Result<(), I::Failure> {
        let room = match state.room(unit) {
            Some(room) => Some(room.clone()),
            None => self.io.reserve(unit, state.ledger.keep_bytes())?,
        };
        let number = state.next_load;
        state.next_load += 1;
        let loading = match room {
            Some(room) => {
                if let Some(place) = state.rooms.get_mut(unit) {
                    *place = Some(room);
                }
                state.unsubmitted.push(unit);
                Loading::Submitting { asked, has_ended: false }
            }
            None => {
                let notice = Notice { signal: self.signal.clone(), unit, load: number };
                let own = self.own.clone();
                let then = move || {
                    notice.note();
                    look(&own);
                };
                self.io.prepare(unit, asked.is_demand, then)?;
                Loading::Preparing(asked)
            }
        };
        state.loads.insert(unit, (number, loading));
        Ok(())
    }

    fn cancel(&self, state: &mut StoreState<I>, unit: usize) {
        match state.loads.get_mut(&unit) {
            Some((_, Loading::Reading(load))) => self.io.cancel(load),
            Some((_, Loading::Preparing(asked) | Loading::Submitting { asked, .. })) => {
                asked.is_cancelled = true;
            }
            None => {}
        }
    }
}

/// Settles what has ended, if the store is still there.
fn look<I: Io>(core: &Weak<Core<I>>) {
    if let Some(core) = core.upgrade() {
        core.look(|_| ());
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
