//! Jobs whose event is not reached yet. One thread asks after all of them, so that no other waits for a device.
#![forbid(unsafe_code)]

use super::{
    Failure, Job,
    queue::{Closing, Queue, Queued},
};
use std::{
    collections::{BTreeMap, HashMap},
    mem,
    sync::{Condvar, Mutex, PoisonError},
    time::Duration,
};
use windlass_device::DeviceId;
use windlass_io::parallel::lock;

/// Time between questions: at first, and after some in vain.
const SHORT_PAUSE: Duration = Duration::from_micros(100);
const LONG_PAUSE: Duration = Duration::from_millis(1);

/// An event that jobs wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AwaitedEvent {
    /// As the driver knows it.
    pub(super) handle: u64,
    /// The device that is asked.
    pub(super) id: DeviceId,
}

impl AwaitedEvent {
    /// What a job waits for, if for anything.
    pub(super) fn of(job: &Job) -> Option<Self> {
        let handle = job.wait_event?;
        let devices = job.parts.iter().flat_map(|part| &part.pieces).map(|piece| piece.device);
        let id = devices.filter(|device| !device.is_host()).min().unwrap_or(DeviceId::default_device());
        Some(Self { handle, id })
    }
}

#[derive(Debug, Default)]
pub(super) struct EventLine {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The jobs that wait for each event, by tag.
    by_event: HashMap<AwaitedEvent, BTreeMap<u64, Vec<Job>>>,
    closing: Option<Closing>,
}

/// Jobs that need not wait any longer.
#[derive(Debug, Default)]
struct Answered {
    reached: Vec<Job>,
    failed: Vec<(Job, windlass_device::Error)>,
}

impl EventLine {
    /// Adds jobs, with what they wait for.
    pub(super) fn push(&self, jobs: Vec<(AwaitedEvent, Job)>) {
        if jobs.is_empty() {
            return;
        }
        let mut refused = Vec::new();
        {
            let mut state = lock(&self.state);
            for (event, job) in jobs {
                if let Some(closing) = &state.closing {
                    refused.push((job, closing.failure()));
                } else if job.withdrawn.is_set() {
                    // Said before it was looked for here.
                    refused.push((job, Failure::Cancelled));
                } else {
                    let by_tag = state.by_event.entry(event).or_default();
                    if by_tag.is_empty() {
                        self.changed.notify_all();
                    }
                    by_tag.entry(job.tag).or_default().push(job);
                }
            }
        }
        refused.into_iter().for_each(|(job, failure)| end(job, failure));
    }

    /// Ends the jobs of this tag; says how many.
    pub(super) fn cancel(&self, tag: u64) -> usize {
        let mut cancelled = Vec::new();
        lock(&self.state).by_event.retain(|_, by_tag| {
            cancelled.extend(by_tag.remove(&tag).into_iter().flatten());
            !by_tag.is_empty()
        });
        let count = cancelled.len();
        cancelled.into_iter().for_each(|job| end(job, Failure::Cancelled));
        count
    }

    /// Ends all jobs, and takes no more.
    pub(super) fn close(&self, closing: Closing) {
        let ended: Vec<_> = {
            let mut state = lock(&self.state);
            self.changed.notify_all();
            let jobs = mem::take(&mut state.by_event).into_values().flat_map(BTreeMap::into_values).flatten();
            let closing = state.closing.get_or_insert(closing);
            jobs.map(|job| (job, closing.failure())).collect()
        };
        ended.into_iter().for_each(|(job, failure)| end(job, failure));
    }

    /// Hands jobs on to the queue as their events are reached, until this is closed.
    pub(super) fn watch(
        &self,
        queue: &Queue,
        is_reached: impl Fn(AwaitedEvent) -> windlass_device::Result<bool>,
    ) {
        let mut pause = SHORT_PAUSE;
        let mut state = lock(&self.state);
        while state.closing.is_none() {
            if state.by_event.is_empty() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                pause = SHORT_PAUSE;
                continue;
            }
            // With the lock: an event lives as long as its jobs are not ended, and nobody ends them meanwhile.
            let Answered { mut reached, failed } = state.ask(&is_reached);
            if reached.is_empty() && failed.is_empty() {
                let waited = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner);
                state = waited.0;
                // Another event may be reached sooner.
                pause = if waited.1.timed_out() { LONG_PAUSE.min(pause * 2) } else { SHORT_PAUSE };
                continue;
            }
            drop(state);
            reached.iter_mut().for_each(|job| job.wait_event = None);
            queue.push(reached);
            failed.into_iter().for_each(|(job, error)| end(job, Failure::Device(error)));
            pause = SHORT_PAUSE;
            state = lock(&self.state);
        }
    }
}

impl State {
    /// Takes out the jobs whose events are reached, or cannot be asked after.
    fn ask(&mut self, is_reached: impl Fn(AwaitedEvent) -> windlass_device::Result<bool>) -> Answered {
        let mut answered = Answered::default();
        self.by_event.retain(|event, by_tag| {
            while !by_tag.is_empty() {
                match is_reached(*event) {
                    Ok(false) => return true,
                    Ok(true) => answered.reached.extend(mem::take(by_tag).into_values().flatten()),
                    // Each job has an error of its own.
                    Err(error) => answered.failed.extend(pop(by_tag).map(|job| (job, error))),
                }
            }
            false
        });
        answered
    }
}

fn pop(by_tag: &mut BTreeMap<u64, Vec<Job>>) -> Option<Job> {
    let mut first = by_tag.first_entry()?;
    let job = first.get_mut().pop();
    if first.get().is_empty() {
        first.remove();
    }
    job
}

fn end(job: Job, failure: Failure) {
    Queued { job, steps: None }.end(failure);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        KeepAlive, Priority,
        io::{Checksums, Direction, FileRef, Header, Withdrawn},
    };
    use std::{
        io,
        sync::{
            atomic::{AtomicBool, AtomicUsize, Ordering},
            mpsc,
        },
        thread,
        time::Instant,
    };

    const PATIENCE: Duration = Duration::from_secs(60);

    type Ends = mpsc::Receiver<Result<(), Failure>>;

    fn job(tag: u64, withdrawn: &Withdrawn) -> (Job, Ends) {
        let (sender, ends) = mpsc::channel();
        let job = Job {
            tag,
            direction: Direction::Write,
            priority: Priority::Demand,
            file: FileRef::made("/nonexistent".into()),
            header: Header::None,
            parts: Vec::new(),
            checksums: Checksums::Skip,
            deadline: None,
            withdrawn: withdrawn.clone(),
            wait_event: Some(7),
            keep: KeepAlive::by_caller(),
            done: Box::new(move |outcome| _ = sender.send(outcome.result)),
        };
        (job, ends)
    }

    fn push(line: &EventLine, tag: u64, withdrawn: &Withdrawn) -> Ends {
        let (job, ends) = job(tag, withdrawn);
        line.push(vec![(AwaitedEvent::of(&job).unwrap(), job)]);
        ends
    }

    #[test]
    fn what_was_withdrawn_before_it_came_does_not_wait() {
        let (line, queue) = (EventLine::default(), Queue::default());
        let withdrawn = Withdrawn::default();
        let waiting = push(&line, 1, &withdrawn);
        withdrawn.set();
        assert_eq!(line.cancel(1) + queue.cancel(1), 1);
        assert!(matches!(waiting.try_recv(), Ok(Err(Failure::Cancelled))));
        assert!(matches!(push(&line, 1, &withdrawn).try_recv(), Ok(Err(Failure::Cancelled))));
        let (pushed, ends) = job(1, &withdrawn);
        queue.push(vec![pushed]);
        assert!(matches!(ends.try_recv(), Ok(Err(Failure::Cancelled))));
        let (taken, ends) = job(1, &withdrawn);
        queue.put_back(Queued { job: taken, steps: None });
        assert!(matches!(ends.try_recv(), Ok(Err(Failure::Cancelled))));
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn an_event_is_asked_after_once_for_all_its_jobs() {
        let (line, queue) = (EventLine::default(), Queue::default());
        let (asked, is_reached) = (AtomicUsize::new(0), AtomicBool::new(false));
        let ends: Vec<_> = (0..1000).map(|tag| push(&line, tag, &Withdrawn::default())).collect();
        let begin = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| {
                line.watch(&queue, |event| {
                    assert_eq!(event, AwaitedEvent { handle: 7, id: DeviceId::default_device() });
                    asked.fetch_add(1, Ordering::SeqCst);
                    Ok(is_reached.load(Ordering::SeqCst))
                });
            });
            while asked.load(Ordering::SeqCst) < 10 {
                assert!(begin.elapsed() < PATIENCE);
                thread::sleep(Duration::from_millis(1));
            }
            let asked = asked.load(Ordering::SeqCst);
            // In the first milliseconds there are some more.
            let most = begin.elapsed().as_millis() as usize + 10;
            assert!(asked <= most, "{asked} questions of 1000 jobs, {most} at most");
            is_reached.store(true, Ordering::SeqCst);
            while queue.len() < ends.len() {
                assert!(begin.elapsed() < PATIENCE);
                thread::sleep(Duration::from_millis(1));
            }
            line.close(Closing::Dropped);
        });
    }

    #[test]
    fn jobs_of_an_event_that_cannot_be_asked_after_fail() {
        let (line, queue) = (EventLine::default(), Queue::default());
        thread::scope(|scope| {
            scope.spawn(|| line.watch(&queue, |_| Err(windlass_device::Error::Internal("no".into()))));
            let ends: Vec<_> = (0..3).map(|number| push(&line, number / 2, &Withdrawn::default())).collect();
            for ends in ends {
                assert!(matches!(ends.recv_timeout(PATIENCE), Ok(Err(Failure::Device(_)))));
            }
            line.close(Closing::Dropped);
        });
    }

    #[test]
    fn a_line_that_is_closed_ends_jobs_with_the_reason() {
        let line = EventLine::default();
        let waiting = push(&line, 1, &Withdrawn::default());
        line.close(Closing::Broken(io::Error::from_raw_os_error(libc::EBADF)));
        line.close(Closing::Dropped);
        for ends in [waiting, push(&line, 1, &Withdrawn::default())] {
            let Ok(Err(failure)) = ends.try_recv() else { panic!("it waits") };
            assert_eq!(failure.errno(), libc::EBADF);
        }
    }
}
