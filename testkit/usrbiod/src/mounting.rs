//! Mounting as 3FS does, and the daemon in this process.

use crate::{Faults, engine::Engine, fs::Mounted};
use fuser::{Config, MountOption, Session, SessionACL};
use rustix::mount::{MountFlags, UnmountFlags};
use std::{
    ffi::CString,
    fs::{self, File},
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

const SOURCE: &str = "hf3fs.stand-in";
const KERNEL_THREADS: usize = 4;

/// How the daemon is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// What files say is their chunk size.
    pub chunk_bytes: u32,
    /// Nothing can be written through the mount.
    pub read_only: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { chunk_bytes: 1 << 20, read_only: false }
    }
}

/// A mounted daemon. Unmounted when dropped; files that are still open then stay readable until they are closed.
pub struct Daemon {
    engine: Arc<Engine>,
    mount_point: PathBuf,
}

/// Whether this machine lets file systems be mounted by FUSE; if not, why.
///
/// # Errors
/// The reason.
pub fn is_usable() -> io::Result<()> {
    File::options().read(true).write(true).open("/dev/fuse").map(drop)
}

impl Daemon {
    /// Mounts `root`, a directory, at `mount_point`.
    ///
    /// # Errors
    /// Those of mounting: no `/dev/fuse`, or no right to mount.
    pub fn mount(root: &Path, mount_point: &Path, options: &Options) -> io::Result<Self> {
        let mount_point = fs::canonicalize(mount_point)?;
        let engine = Engine::start(fs::canonicalize(root)?, options.chunk_bytes)?;
        let mounted = start(Mounted::new(engine.clone()), &mount_point, options);
        if let Err(error) = mounted {
            engine.stop();
            return Err(error);
        }
        Ok(Self { engine, mount_point })
    }

    /// Where it is mounted.
    #[must_use]
    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }

    /// From now on it behaves like this.
    pub fn behave(&self, faults: Faults) {
        self.engine.behave(faults);
    }

    /// Forgets all clients and makes new semaphores, as a daemon that was restarted.
    ///
    /// # Errors
    /// Those of making semaphores.
    pub fn restart(&self) -> io::Result<()> {
        self.engine.restart()
    }

    /// What clients have registered: the names in `3fs-virt/iovs`, without a handle of that directory.
    #[must_use]
    pub fn registrations(&self) -> Vec<String> {
        self.engine.registry.all().into_iter().map(|(_, one)| one.name.clone()).collect()
    }

    /// How many transfers there were since the last [`behave`](Self::behave).
    #[must_use]
    pub fn transfers(&self) -> u64 {
        self.engine.transfers()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.engine.stop();
        let _ = unmount(&self.mount_point);
    }
}

/// Takes a mount away, also one whose daemon is dead or whose files are open.
pub(crate) fn unmount(mount_point: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(mount_point, UnmountFlags::DETACH)?)
}

fn start(mounted: Mounted, mount_point: &Path, options: &Options) -> io::Result<()> {
    let mut config = Config::default();
    config.n_threads = Some(KERNEL_THREADS);
    let session = if rustix::process::geteuid().is_root() {
        // The library would mount as type `fuse`, and only helpers add the subtype.
        let device: OwnedFd = File::options().read(true).write(true).open("/dev/fuse")?.into();
        let data = CString::new(format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other",
            device.as_raw_fd()
        ))?;
        let read_only = if options.read_only { MountFlags::RDONLY } else { MountFlags::empty() };
        let flags = MountFlags::NOSUID | MountFlags::NODEV | read_only;
        rustix::mount::mount(SOURCE, mount_point, "fuse.hf3fs", flags, Some(data.as_c_str()))?;
        Session::from_fd(mounted, device, SessionACL::All, config)
    } else {
        let access = if options.read_only { MountOption::RO } else { MountOption::RW };
        config.mount_options =
            vec![MountOption::FSName(SOURCE.into()), MountOption::Subtype("hf3fs".into()), access];
        Session::new(mounted, mount_point, &config)
    }?;
    // Ends when the mount is gone and its last file closed, which may be after the daemon's end.
    thread::Builder::new().name("usrbiod-fuse".into()).spawn(move || session.run())?;
    Ok(())
}
