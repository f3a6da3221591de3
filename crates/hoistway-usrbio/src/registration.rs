//! Telling the daemon of memory: a link in `3fs-virt/iovs`, whose name says everything.
#![forbid(unsafe_code)]

use crate::{Error, Result, key::Key, proto, shm::SharedMemory};
use std::{
    io,
    path::{Path, PathBuf},
};

/// Makes the daemon of `mount` map `memory`, and gives the link back. To be called by the thread that is to own it.
/// `seen` is told the memory's name while it has one.
///
/// # Errors
/// [`Error::SharedMemoryNamespace`], [`Error::ReadOnlyMount`], [`Error::DaemonDead`], [`Error::System`].
pub fn register(
    mount: &Path,
    memory: &mut SharedMemory,
    key: &Key,
    seen: impl FnOnce(&Path),
) -> Result<PathBuf> {
    let link = mount.join(proto::IOVS).join(key.to_string());
    let name = memory.publish()?;
    let linked = std::os::unix::fs::symlink(name, &link).map_err(|error| refusal(mount, name, &link, error));
    if linked.is_ok() {
        seen(name);
    }
    memory.conceal();
    linked.map(|()| link)
}

/// Takes the registration back. A daemon that is gone has forgotten it already.
pub fn deregister(link: &Path) {
    if let Err(error) = std::fs::remove_file(link) {
        tracing::debug!(link = %link.display(), %error, "a USRBIO registration could not be removed");
    }
}

fn refusal(mount: &Path, name: &Path, link: &Path, error: io::Error) -> Error {
    let mount = mount.to_owned();
    match error.raw_os_error() {
        // Everything else in the name that a daemon could object to has been checked.
        Some(libc::EINVAL) => {
            let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Error::SharedMemoryNamespace { mount, name }
        }
        Some(libc::EROFS) => Error::ReadOnlyMount { mount },
        _ => Error::system("register memory as", link, error),
    }
}
