//! Whether the daemon still lives and still knows this process.
//!
//! Looking means to ask the daemon, and one that hangs does not answer. So a thread of its own looks, and a thread that
//! waits for transfers is not held up.
#![forbid(unsafe_code)]

use crate::{Error, RingPriority, proto, worker::Worker};
use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// The result of a check of the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Alive,
    Dead(String),
    Restarted,
    /// Registrations that are gone.
    Removed(BTreeSet<String>),
}

impl Verdict {
    /// The verdict as an error for the owner of these registrations.
    pub(crate) fn into_error<'a>(
        self,
        mount: &Path,
        mut keys: impl Iterator<Item = &'a str>,
    ) -> Option<Error> {
        let mount = mount.to_owned();
        match self {
            Self::Alive => None,
            Self::Dead(reason) => Some(Error::DaemonDead { mount, reason }),
            Self::Restarted => Some(Error::DaemonRestarted { mount }),
            Self::Removed(removed) => {
                let key = keys.find(|key| removed.contains(*key))?;
                Some(Error::IovRemoved { mount, key: key.to_owned() })
            }
        }
    }
}

/// The thread that looks, when asked to.
#[derive(Debug)]
pub(crate) struct Watch {
    shared: Arc<Watched>,
    thread: Worker,
}

#[derive(Debug)]
struct Watched {
    mount: PathBuf,
    submit_target: PathBuf,
    state: Mutex<State>,
    asked: Condvar,
}

#[derive(Debug, Default)]
struct State {
    keys: BTreeSet<String>,
    asked: u64,
    answered: u64,
    verdict: Option<Verdict>,
    stopped: bool,
}

impl Watch {
    pub(crate) fn start(mount: &Path, submit_target: &Path) -> Result<Self, Error> {
        let shared = Arc::new(Watched {
            mount: mount.to_owned(),
            submit_target: submit_target.to_owned(),
            state: Mutex::default(),
            asked: Condvar::new(),
        });
        let looker = shared.clone();
        let thread = Worker::spawn(move || looker.run())
            .map_err(|error| Error::system("start the watching thread of", mount, error))?;
        Ok(Self { shared, thread })
    }

    /// Asks for a look. The number is for [`answer`](Self::answer).
    pub(crate) fn ask(&self) -> u64 {
        let mut state = self.shared.state();
        state.asked += 1;
        self.shared.asked.notify_one();
        state.asked
    }

    /// What was found by a look that began after question `number`, if it is over.
    pub(crate) fn answer(&self, number: u64) -> Option<Verdict> {
        let state = self.shared.state();
        if state.answered >= number { state.verdict.clone() } else { None }
    }

    pub(crate) fn add(&self, key: &str) {
        self.shared.state().keys.insert(key.to_owned());
    }

    pub(crate) fn remove(&self, key: &str) {
        self.shared.state().keys.remove(key);
    }

    /// Ends the thread. Returns before the end if that takes too long.
    pub(crate) fn finish(&mut self) {
        self.shared.state().stopped = true;
        self.shared.asked.notify_one();
        self.thread.finish();
    }
}

impl Watched {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.state();
        while !state.stopped {
            if state.asked == state.answered {
                state = self.asked.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let (number, keys) = (state.asked, state.keys.clone());
            drop(state);
            let verdict = look(&self.mount, &self.submit_target, keys);
            state = self.state();
            state.answered = number;
            state.verdict = Some(match verdict {
                // What was dropped on purpose meanwhile is not missed.
                Verdict::Removed(removed) => {
                    let missed: BTreeSet<_> = removed.intersection(&state.keys).cloned().collect();
                    if missed.is_empty() { Verdict::Alive } else { Verdict::Removed(missed) }
                }
                other => other,
            });
        }
    }
}

/// Asks the daemon of `mount`.
pub(crate) fn look(mount: &Path, submit_target: &Path, keys: BTreeSet<String>) -> Verdict {
    let directory = mount.join(proto::IOVS);
    match fs::read_link(directory.join(RingPriority::default().submit_link())) {
        Ok(target) if target == submit_target => {}
        Ok(_) => return Verdict::Restarted,
        Err(error) => return Verdict::Dead(death(&error)),
    }
    let mut removed = BTreeSet::new();
    for key in keys {
        match fs::symlink_metadata(directory.join(&key)) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                removed.insert(key);
            }
            Err(error) => return Verdict::Dead(death(&error)),
        }
    }
    if removed.is_empty() { Verdict::Alive } else { Verdict::Removed(removed) }
}

fn death(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "nothing is mounted there any more".into(),
        _ => error.to_string(),
    }
}
