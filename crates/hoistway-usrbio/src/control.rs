//! The one thread of a mount that registers and deregisters memory.
//!
//! The daemon drops all registrations of a thread when that thread closes a handle of `3fs-virt/iovs`: listing the
//! directory from a thread that has rings kills the rings. So registering is this thread's, which opens the directory
//! once, lists nothing, and closes it when all is over; then the daemon frees whatever is left, also if the process
//! was killed.
#![forbid(unsafe_code)]

use crate::{Error, Result, proto, worker::Worker};
use rustix::{
    fs::{Mode, OFlags},
    io::retry_on_intr,
};
use std::{
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    time::Duration,
};

type Task = Box<dyn FnOnce() + Send>;

#[derive(Debug)]
pub(crate) struct Control {
    mount: PathBuf,
    limit: Duration,
    tasks: Option<Sender<Task>>,
    thread: Worker,
    device: u64,
}

impl Control {
    /// Starts the thread, which opens the directory of registrations. Each of its tasks may take `limit`.
    pub(crate) fn start(mount: &Path, limit: Duration) -> Result<Self> {
        let (tasks, incoming) = channel::<Task>();
        let (opened, outcome) = channel();
        let directory = mount.join(proto::IOVS);
        let thread = Worker::spawn(move || match open(&directory) {
            Ok((handle, device)) => {
                let _ = opened.send(Ok(device));
                incoming.into_iter().for_each(|task| task());
                drop(handle);
            }
            Err(error) => drop(opened.send(Err(error))),
        })
        .map_err(|error| Error::system("start the control thread of", mount, error))?;
        let device = received(&outcome, limit, mount, "opening 3fs-virt/iovs")??;
        Ok(Self { mount: mount.to_owned(), limit, tasks: Some(tasks), thread, device })
    }

    /// The number of the file system's device.
    pub(crate) fn device(&self) -> u64 {
        self.device
    }

    /// Runs a task on the thread and waits for it. What comes too late is dropped there.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        what: &str,
        task: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let (result, outcome) = channel();
        self.post(move || drop(result.send(task())));
        received(&outcome, self.limit, &self.mount, what)
    }

    /// Queues a task for the thread.
    pub(crate) fn post(&self, task: impl FnOnce() + Send + 'static) {
        if let Some(tasks) = &self.tasks {
            let _ = tasks.send(Box::new(task));
        }
    }

    /// Ends the thread after all that it was given. Returns before the end if that takes too long.
    pub(crate) fn finish(&mut self) {
        self.tasks = None;
        self.thread.finish();
    }
}

fn open(directory: &Path) -> Result<(rustix::fd::OwnedFd, u64)> {
    let failed = |error| Error::system("open the registrations", directory, error);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let handle = retry_on_intr(|| rustix::fs::open(directory, flags, Mode::empty())).map_err(failed)?;
    let device = rustix::fs::fstat(&handle).map_err(failed)?.st_dev;
    Ok((handle, device))
}

fn received<T>(outcome: &Receiver<T>, limit: Duration, mount: &Path, what: &str) -> Result<T> {
    outcome.recv_timeout(limit).map_err(|error| match error {
        RecvTimeoutError::Timeout => Error::Timeout { mount: mount.to_owned(), what: what.into(), limit },
        RecvTimeoutError::Disconnected => {
            Error::Invalid(format!("the control thread of {} ended before {what}", mount.display()))
        }
    })
}
