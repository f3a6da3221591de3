//! The daemon in a process of its own, which tests can stop and kill.

use crate::{
    Faults, Options,
    control::{BEHAVE, OK, READY, REGISTRATIONS, RESTART, TRANSFERS},
    mounting::unmount,
};
use hoistway_usrbio::{RingPriority, proto};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs,
    io::{self, BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Mutex, PoisonError},
};

/// A daemon in a process of its own. Killed and unmounted when dropped.
pub struct Spawned {
    mount_point: PathBuf,
    is_mounted: bool,
    child: Child,
    channel: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
    /// What a daemon that is killed leaves in `/dev/shm`.
    semaphores: Mutex<Vec<PathBuf>>,
}

impl Spawned {
    /// Starts `program`, the daemon's binary, on `root` and waits until it is mounted at `mount_point`.
    ///
    /// # Errors
    /// Those of starting and mounting.
    pub fn start(program: &Path, root: &Path, mount_point: &Path, options: &Options) -> io::Result<Self> {
        let mut command = Command::new(program);
        command.arg(root).arg(mount_point).arg("--chunk-bytes").arg(options.chunk_bytes.to_string());
        if options.read_only {
            command.arg("--read-only");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let broken = || io::Error::from(io::ErrorKind::BrokenPipe);
        let stdin = child.stdin.take().ok_or_else(broken)?;
        let mut stdout = BufReader::new(child.stdout.take().ok_or_else(broken)?);
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        if line.trim_end() != READY {
            let status = child.wait()?;
            return Err(io::Error::other(format!("the daemon ended: {status}")));
        }
        let mount_point = fs::canonicalize(mount_point)?;
        let spawned = Self {
            mount_point,
            is_mounted: true,
            child,
            channel: Mutex::new((stdin, stdout)),
            semaphores: Mutex::default(),
        };
        spawned.note_semaphores();
        Ok(spawned)
    }

    /// Where it is mounted.
    #[must_use]
    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }

    /// From now on it behaves like this.
    ///
    /// # Errors
    /// Those of speaking with it.
    pub fn behave(&self, faults: Faults) -> io::Result<()> {
        self.command(&format!("{BEHAVE} {faults}")).map(drop)
    }

    /// Forgets all clients and makes new semaphores, as a daemon that was restarted.
    ///
    /// # Errors
    /// Those of speaking with it.
    pub fn restart(&self) -> io::Result<()> {
        self.command(RESTART)?;
        self.note_semaphores();
        Ok(())
    }

    /// What clients have registered.
    ///
    /// # Errors
    /// Those of speaking with it.
    pub fn registrations(&self) -> io::Result<Vec<String>> {
        Ok(self.command(REGISTRATIONS)?.split_whitespace().map(Into::into).collect())
    }

    /// How many transfers there were since the last [`behave`](Self::behave).
    ///
    /// # Errors
    /// Those of speaking with it.
    pub fn transfers(&self) -> io::Result<u64> {
        self.command(TRANSFERS)?.trim().parse().map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// Kills it. The mount stays, and answers nothing.
    ///
    /// # Errors
    /// Those of killing.
    pub fn kill(&mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait().map(drop)
    }

    /// Takes the mount away, as an administrator does after a daemon's death.
    ///
    /// # Errors
    /// Those of unmounting.
    pub fn unmount(&mut self) -> io::Result<()> {
        self.is_mounted = false;
        unmount(&self.mount_point)
    }

    /// Stops it, until [`resume`](Self::resume): it does not answer, and is not dead.
    ///
    /// # Errors
    /// Those of sending signals.
    pub fn pause(&self) -> io::Result<()> {
        self.signal(Signal::STOP)
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// Those of sending signals.
    pub fn resume(&self) -> io::Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }

    fn command(&self, command: &str) -> io::Result<String> {
        let mut channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        let (stdin, stdout) = &mut *channel;
        writeln!(stdin, "{command}")?;
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        let line = line.trim_end();
        match line.strip_prefix(OK) {
            Some(answer) => Ok(answer.trim_start().into()),
            None => Err(io::Error::other(format!("the daemon answered '{line}' to '{command}'"))),
        }
    }

    fn note_semaphores(&self) {
        let links = self.mount_point.join(proto::IOVS);
        let targets = [RingPriority::High, RingPriority::Normal, RingPriority::Low]
            .map(|priority| fs::read_link(links.join(priority.submit_link())));
        let mut semaphores = self.semaphores.lock().unwrap_or_else(PoisonError::into_inner);
        semaphores.extend(targets.into_iter().flatten());
    }
}

impl Drop for Spawned {
    fn drop(&mut self) {
        let _ = self.kill();
        if self.is_mounted {
            let _ = unmount(&self.mount_point);
        }
        for semaphore in self.semaphores.get_mut().unwrap_or_else(PoisonError::into_inner) {
            let _ = fs::remove_file(semaphore);
        }
    }
}
