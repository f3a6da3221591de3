//! Drives a lane: takes operations from queues, keeps the lane full, and asks the handler about each.
#![forbid(unsafe_code)]

use super::{
    customer::{Customer, Handler, Next, Reason},
    flight::{Flight, Ticket},
    limit::InFlightLimit,
    operation::QueueId,
    queues::QueueSet,
    scheduler::{Scheduler, Wait},
};
use crate::{
    lane::{Done, Lane},
    span::OwnSpan,
};
use std::{
    io,
    ops::{Deref, DerefMut},
    panic::{self, AssertUnwindSafe},
    sync::Arc,
    task::Waker,
    time::{Duration, Instant},
};
use tracing::{Span, trace_span};

/// Operations of a closed scheduler are lost if their lane still returns none of them after this long.
const CLOSE_PATIENCE: Duration = Duration::from_millis(100);

/// An operation in a lane, with the number that its thread gave it.
#[derive(Debug)]
pub struct Carried<O> {
    number: usize,
    /// The operation.
    pub content: O,
}

impl<O> Carried<O> {
    /// An operation for a lane that no thread of the executor serves. It is no thread's: one that gets it back drops it.
    pub fn alone(content: O) -> Self {
        Self { number: usize::MAX, content }
    }
}

impl<O> Deref for Carried<O> {
    type Target = O;

    fn deref(&self) -> &O {
        &self.content
    }
}

impl<O> DerefMut for Carried<O> {
    fn deref_mut(&mut self) -> &mut O {
        &mut self.content
    }
}

/// How a thread serves queues.
#[derive(Debug)]
pub struct Service<'a> {
    /// The queues that the thread takes operations from.
    pub queues: &'a [QueueId],
    /// How many operations it keeps in flight.
    pub limit: InFlightLimit,
    /// What it does when no operation may begin.
    pub patience: Patience,
}

/// What a thread with an empty lane does when no operation may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// It waits until the queues are over, or the scheduler is closed.
    UntilOver,
    /// It returns. For a thread of the caller that serves alone.
    None,
}

/// How a thread's service ended.
#[derive(Debug)]
pub enum Served {
    /// No operation will come any more; with [`Patience::None`], none may begin now.
    Over,
    /// The handler has given the lane up. Operations wait in the queues.
    GaveUp,
    /// The lane failed. Its operations are lost, and the scheduler is closed.
    Failed {
        /// The error of the lane.
        error: io::Error,
        /// The first of the lost operations, by its position in its group.
        first_lost: Option<u64>,
    },
}

/// A thread at work.
struct Worker<C: Customer, L> {
    scheduler: Arc<Scheduler<C>>,
    number: usize,
    serves: QueueSet,
    lane: L,
    tickets: Vec<Option<InLane<C>>>,
    free: Vec<usize>,
    waker: Option<Waker>,
    has_given_up: bool,
}

/// The ticket of an operation that the lane has.
struct InLane<C: Customer> {
    ticket: Ticket<C>,
    pushed: Instant,
    span: OwnSpan,
}

impl<C: Customer> Scheduler<C> {
    /// Serves queues with a lane, on this thread.
    pub fn serve<L>(self: &Arc<Self>, lane: L, handler: &mut impl Handler<C>, service: Service<'_>) -> Served
    where
        L: Lane<Carried<C::Operation>>,
    {
        if self.is_foreign() {
            return Served::Over;
        }
        let serves = QueueSet::of(service.queues);
        let worker = Worker {
            scheduler: self.clone(),
            number: self.enlist(serves),
            serves,
            waker: lane.waker(),
            lane,
            tickets: Vec::new(),
            free: Vec::new(),
            has_given_up: false,
        };
        worker.run(handler, service.limit, service.patience)
    }
}

impl<C: Customer, L: Lane<Carried<C::Operation>>> Worker<C, L> {
    fn run(mut self, handler: &mut impl Handler<C>, limit: InFlightLimit, patience: Patience) -> Served {
        // Panics of handlers are contained below: this is one of the lane.
        let worked = panic::catch_unwind(AssertUnwindSafe(|| self.work(handler, limit, patience)));
        let ended = worked.unwrap_or_else(|_| Err(io::Error::other("the lane panicked")));
        let Self { scheduler, number, lane, tickets, .. } = self;
        scheduler.discharge(number);
        let why: Arc<str> = match &ended {
            Ok(_) => "the scheduler was closed".into(),
            Err(error) => error.to_string().into(),
        };
        let _ = panic::catch_unwind(AssertUnwindSafe(|| drop(lane)));
        // What the lane still had may be written to, and will not come back.
        let lost = tickets.into_iter().flatten().map(|InLane { ticket, .. }| {
            let index = ticket.index();
            ticket.lose(Reason::Lost(why.clone()).into());
            index
        });
        let first_lost = lost.min();
        ended.unwrap_or_else(|error| {
            scheduler.close(Reason::Broken(why));
            Served::Failed { error, first_lost }
        })
    }

    /// Serves until nothing is left to do. Operations that the lane has then are lost.
    fn work(
        &mut self,
        handler: &mut impl Handler<C>,
        mut limit: InFlightLimit,
        patience: Patience,
    ) -> io::Result<Served> {
        let (mut done, mut closed_at) = (Vec::new(), None);
        loop {
            let is_in_lane = self.fill(handler, &limit, patience);
            if self.lane.in_flight() == 0 {
                return Ok(if self.has_given_up { Served::GaveUp } else { Served::Over });
            }
            let waited = trace_span!("wait", in_flight = self.lane.in_flight())
                .in_scope(|| self.lane.submit_and_wait(&mut done));
            if is_in_lane {
                self.scheduler.leave(self.number);
            }
            waited?;
            let (now, mut others) = (Instant::now(), done.len());
            if done.is_empty()
                && self.scheduler.is_closed()
                && now.saturating_duration_since(*closed_at.get_or_insert(now)) >= CLOSE_PATIENCE
            {
                return Ok(Served::Over);
            }
            for Done { op: Carried { number, content }, result } in done.drain(..) {
                let Some(InLane { ticket, pushed, span }) =
                    self.tickets.get_mut(number).and_then(Option::take)
                else {
                    continue;
                };
                drop(span);
                self.free.push(number);
                others -= 1;
                let (bytes, took) = (*result.as_ref().unwrap_or(&0), now.saturating_duration_since(pushed));
                limit.ended(bytes, took, others, now);
                let flight = Flight::new(content, ticket);
                self.follow(handler, |handler| handler.settle(flight, result));
            }
        }
    }

    /// Pushes operations as long as there is room in the lane. Returns whether the scheduler may wake it in its lane.
    fn fill(&mut self, handler: &mut impl Handler<C>, limit: &InFlightLimit, patience: Patience) -> bool {
        while !self.has_given_up && self.lane.in_flight() < limit.operations().min(self.lane.allowed()) {
            let wait = match patience {
                _ if self.lane.in_flight() > 0 => self.waker.clone().map_or(Wait::Not, Wait::InLane),
                Patience::UntilOver => Wait::UntilOver,
                Patience::None => Wait::Not,
            };
            let idle = match wait {
                Wait::UntilOver => trace_span!("idle"),
                Wait::Not | Wait::InLane(_) => Span::none(),
            };
            let next = idle.in_scope(|| self.scheduler.next(self.number, self.serves, &wait));
            let Some(flight) = next else {
                return matches!(wait, Wait::InLane(_));
            };
            self.follow(handler, |handler| handler.begin(flight));
        }
        false
    }

    /// Carries out the answer of a handler. If the handler panics, the operation fails.
    fn follow<H: Handler<C>>(&mut self, handler: &mut H, ask: impl FnOnce(&mut H) -> Next<C>) {
        // Making its span calls the program's subscriber, which may panic too.
        let asked = panic::catch_unwind(AssertUnwindSafe(|| {
            let next = ask(handler);
            let span = match &next {
                Next::Carry(flight) => handler.span(&flight.content),
                _ => Span::none(),
            };
            (next, span)
        }));
        let (next, span) = asked.unwrap_or_else(|_| (Next::Ended, Span::none()));
        match next {
            Next::Carry(flight) => self.push(flight, span),
            Next::HandOver(flight, queue, charge) => self.scheduler.hand_over(flight, queue, charge),
            Next::PutBack(flight) => self.scheduler.put_back(self.number, flight),
            Next::GiveUp(flight) => {
                self.has_given_up = true;
                self.scheduler.put_back(self.number, flight);
            }
            Next::Ended => {}
        }
    }

    fn push(&mut self, flight: Flight<C>, span: Span) {
        let (content, ticket) = flight.into_parts();
        let in_lane = Some(InLane { ticket, pushed: Instant::now(), span: span.into() });
        let number = match self.free.pop() {
            Some(free) => {
                self.tickets[free] = in_lane;
                free
            }
            None => {
                self.tickets.push(in_lane);
                self.tickets.len() - 1
            }
        };
        self.lane.push(Carried { number, content });
    }
}
